"""API key authentication, with one list of keys for every protocol.

A protocol's server passes the `authorization` header to `ApiKeys.accepts`. Endpoints that need no key are listed there
by exact name, so that new endpoints need one by default.
"""

import hashlib
import hmac
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from apt_jax.errors import ConfigError

FLAG = "--api-key-file"

_MIN_CHARS = 20
_MAX_FILE_BYTES = 1 << 20


class ApiKeys:
    """The accepted keys.

    Args:
        keys: at least one.

    Raises:
        ConfigError: there is none, or one is short or holds what a header cannot.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        if not keys:
            raise ConfigError(f"there is no API key ({FLAG})")
        for number, key in enumerate(keys, 1):
            if len(key) < _MIN_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"API key {number} must be {_MIN_CHARS} or more printable ASCII characters without spaces ({FLAG})"
                )
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def load(cls, path: str) -> "ApiKeys":
        """Read a file of one key a line; empty lines and lines that begin with ``#`` are left out.

        Raises:
            ConfigError: it cannot be read, anybody on the machine could, or it holds no usable key.
        """
        try:
            with Path(path).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}) ({FLAG})") from None
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ConfigError(f"{path}: every user of this machine can read or write it; chmod 600 it ({FLAG})")
        if len(text) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES >> 20} MiB ({FLAG})")
        lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        try:
            return cls(keys)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def replace(self, other: "ApiKeys") -> None:
        """Accept the other's keys from now on."""
        self._digests = other._digests

    def accepts(self, authorization: str | bytes | None) -> bool:
        """Return whether the header is ``Bearer`` and an accepted key, in a time that does not depend on the keys."""
        return self.tenant_of(authorization) is not None

    def tenant_of(self, authorization: str | bytes | None) -> str | None:
        """The name of the key's owner, which reveals nothing of the key; None: the key is not accepted. As
        `accepts`."""
        if authorization is None:
            return None
        raw = authorization.encode("utf-8", "replace") if isinstance(authorization, str) else authorization
        scheme, _, key = raw.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest, found = _digest(key.strip()), False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return hashlib.sha256(b"tenant" + digest).hexdigest()[:12] if found else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
