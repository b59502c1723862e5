"""API keys: who may ask. One list for both doors; without it everybody may.

A door asks `ApiKeys.accepts` with what stands in `authorization`; what everybody may ask all the same is the door's to list,
by exact name, so that whatever is added later is closed until somebody opens it.
"""

import hashlib
import hmac
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from apt_jax.errors import ConfigError
from serve.observability.call_log import CallLog
from serve.observability.call_record import CallRecord

FLAG = "--api-key-file"

_MIN_CHARS = 20
_MAX_FILE_BYTES = 1 << 20
_OPEN_METHODS = frozenset(("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"))
_REFUSED = "no valid API key; send 'authorization: Bearer KEY'"


class ApiKeys:
    """The keys that are let in.

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
            raise ConfigError(f"{path}: every user of this machine can read or write it; chmod 600 it ({FLAG})")  # fmt: skip
        if len(text) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES >> 20} MiB ({FLAG})")
        lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        try:
            return cls(keys)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def replace(self, other: "ApiKeys") -> None:
        """Let in the other's keys from now on."""
        self._digests = other._digests

    def accepts(self, authorization: str | bytes | None) -> bool:
        """Whether the header is ``Bearer`` and a key; takes the same time for every key and for none of them."""
        return self.tenant_of(authorization) is not None

    def tenant_of(self, authorization: str | bytes | None) -> str | None:
        """A name for whose key it is, which tells nothing of the key; None: it is none of ours. As `accepts`."""
        if authorization is None:
            return None
        raw = authorization.encode("utf-8", "replace") if isinstance(authorization, str) else authorization  # fmt: skip
        scheme, _, key = raw.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest, found = _digest(key.strip()), False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return hashlib.sha256(b"tenant" + digest).hexdigest()[:12] if found else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets only calls with a key through, and those that ask whether the server is healthy.

    Args:
        keys: that are let in.
        log: of the others.
    """

    def __init__(self, keys: ApiKeys, log: CallLog) -> None:
        self._keys, self._log = keys, log

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        if handler_call_details.method in _OPEN_METHODS:
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        if self._keys.accepts(metadata.get("authorization")):
            return handler
        if handler is None:
            return grpc.unary_unary_rpc_method_handler(self._refusing("any"))
        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(self._refusing(handler_call_details.method.removeprefix("/")))

    def _refusing(self, method: str) -> Any:
        async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
            record = CallRecord(door="grpc", method=method, reason="unauthenticated", verdict="refused")  # fmt: skip
            record.close(None, None)
            self._log.write(record)
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, _REFUSED, (("grpc-retry-pushback-ms", "-1"),)
            )

        return refuse
