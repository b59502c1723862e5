"""API key authentication, with one list of keys for every protocol, and the rights of a key's owner.

Each protocol's server passes the `authorization` header to `ApiKeys.caller_of`. Endpoints that need no key are listed
by exact name, so new endpoints need a key by default.

The owner of a key is a tenant. To keep tenants from reaching each other's requests, every lookup by id uses tenant and
id (`Caller.engine_id`), and every shown id goes through `Caller.shown_id`. Operators can reach all requests.
"""

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from apt_jax.errors import ConfigError
from apt_jax.request import engine_id, split_engine_id
from serve.errors import OperatorKeyError
from serve.security.single_key import KEY_FLAG, KEY_VARIABLE

FLAG = "--api-key-file"
OPERATOR_FLAG = "--operator-key-file"

_MIN_CHARS = 20
_MAX_FILE_BYTES = 1 << 20


class Caller(NamedTuple):
    """The owner of a call's API key, and its rights."""

    tenant: str | None
    """The owner of the call's API key; None: the server has no keys."""
    is_operator: bool

    def engine_id(self, given: str) -> str:
        """Return the engine's request id for a request id given by the caller. Operators refer to a tenant's request as
        ``TENANT:ID``."""
        return given if self.is_operator and ":" in given else engine_id(self.tenant, given)

    def shown_id(self, request_id: str) -> str | None:
        """Return the id that the caller may see and send back; None: the request belongs to another tenant."""
        tenant, label = split_engine_id(request_id)
        if tenant == self.tenant:
            return label
        return request_id if self.is_operator else None


ANYBODY = Caller(tenant=None, is_operator=True)
"""The caller of every call on a server without keys."""


class ApiKeys:
    """The accepted API keys.

    Args:
        keys: keys of tenants.
        operators: keys of operators, each of which is also a tenant.

    Raises:
        ConfigError: the lists are empty, a key is too short or has characters that a header cannot carry, or a key is
            in both lists.
    """

    def __init__(self, keys: Sequence[str], operators: Sequence[str] = ()) -> None:
        if not keys and not operators:
            raise ConfigError(f"there is no API key ({FLAG})")
        self._tenants, self._operators = _digests(keys, FLAG), _digests(operators, OPERATOR_FLAG)
        if set(self._tenants) & set(self._operators):
            raise ConfigError(f"an operator's key is also a tenant's key ({OPERATOR_FLAG}, {FLAG})")

    @classmethod
    def load(cls, path: str | None, operator_path: str | None = None, key: str | None = None) -> "ApiKeys":
        """Read files with one key per line; empty lines and lines that begin with ``#`` are ignored.

        Args:
            path: file with keys of tenants; None: no file.
            operator_path: file with keys of operators; None: no file.
            key: another key of a tenant (`serve.security.single_key`).

        Raises:
            ConfigError: a file cannot be read, is too large, can be read or written by every user, or has no key; or
                see the class.
        """
        if key is not None:
            _digests([key], f"{KEY_FLAG}, {KEY_VARIABLE}")
        return cls([*_read(path, FLAG), *([] if key is None else [key])], _read(operator_path, OPERATOR_FLAG))

    @property
    def has_operators(self) -> bool:
        return bool(self._operators)

    def replace(self, other: "ApiKeys") -> None:
        """Accept the keys of `other` from now on."""
        self._tenants, self._operators = other._tenants, other._operators

    def accepts(self, authorization: str | bytes | None) -> bool:
        """Return whether the header is ``Bearer`` and an accepted key, in a time that does not depend on the keys."""
        return self.caller_of(authorization) is not None

    def caller_of(self, authorization: str | bytes | None) -> Caller | None:
        """Return the owner of the key, whose name reveals nothing about the key; None: the key is not accepted. The
        time does not depend on the keys."""
        if authorization is None:
            return None
        raw = authorization.encode("utf-8", "replace") if isinstance(authorization, str) else authorization
        scheme, _, key = raw.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = _digest(key.strip())
        is_tenant, is_operator = _is_among(digest, self._tenants), _is_among(digest, self._operators)
        if not is_tenant and not is_operator:
            return None
        return Caller(hashlib.sha256(b"tenant" + digest).hexdigest()[:12], is_operator)


def require_operator(keys: ApiKeys | None, caller: Caller, *, totals: bool = False) -> None:
    """Check that the caller may make a call that is reserved for operators.

    Args:
        keys: accepted keys; None: the server has no keys.
        caller: owner of the call's key.
        totals: True if the call only shows sums over all tenants; a server without operators then allows it with
            every key.

    Raises:
        OperatorKeyError: the caller may not make the call.
    """
    if caller.is_operator or keys is None or (totals and may_see_totals(keys, caller)):
        return
    if keys.has_operators:
        raise OperatorKeyError(f"this is for operators: send a key of the server's {OPERATOR_FLAG}")
    raise OperatorKeyError(f"this is for operators, and the server has none: start it with {OPERATOR_FLAG}")


def may_see_totals(keys: ApiKeys | None, caller: Caller) -> bool:
    """Return whether a caller may see sums over all tenants; on a server without operators, every caller may."""
    return caller.is_operator or keys is None or not keys.has_operators


def _read(path: str | None, flag: str) -> list[str]:
    """Return the keys in a file, at least one; an empty list if `path` is None."""
    if path is None:
        return []
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}) ({flag})") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"{path}: every user of this machine can read or write it; chmod 600 it ({flag})")
    if len(text) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES >> 20} MiB ({flag})")
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path}: there is no API key ({flag})")
    try:
        _digests(keys, flag)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return keys


def _digests(keys: Iterable[str], flag: str) -> list[bytes]:
    for number, key in enumerate(keys, 1):
        if len(key) < _MIN_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"API key {number} must be {_MIN_CHARS} or more printable ASCII characters without spaces ({flag})"
            )
    return [_digest(key.encode()) for key in keys]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_among(digest: bytes, known: Iterable[bytes]) -> bool:
    found = False
    for one in known:
        found |= hmac.compare_digest(digest, one)
    return found
