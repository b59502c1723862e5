"""Interface between the load tool and the backends that connect to a server."""

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import numpy as np

from apt_jax.config import SLO
from serve.bench.load import BenchRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The server to test, and fields that every request to it has."""

    address: str
    """``HOST:PORT`` for gRPC, a base URL for HTTP."""
    model: str | None = None
    """Name of the served model; None: ask the server."""
    slo: SLO = SLO()  # noqa: RUF009 - frozen
    """Objectives to send with each request; infinite objectives are left out."""
    ignore_eos: bool = True
    temperature: float = 0.0
    vocab_size: int | None = None
    """Vocabulary size; random prompts use smaller token ids. None: ask the server."""
    api_key: str | None = None
    tls_ca: str | None = None
    """PEM file of the CAs that verify the server's certificate; None with gRPC: no TLS."""

    def slo_ms(self) -> dict[str, float]:
        """Return the finite SLOs in milliseconds, keyed by argument name of `serve.client.make_request`."""
        parts = {"slo_ttft_ms": self.slo.ttft_s, "slo_tbt_ms": self.slo.tbt_s, "slo_e2e_ms": self.slo.e2e_s}
        return {name: round(1e3 * seconds, 6) for name, seconds in parts.items() if seconds < float("inf")}

    def slo_headers(self) -> dict[str, str]:
        """Return the finite SLOs as HTTP headers or gRPC metadata."""
        names = {"slo_ttft_ms": "x-slo-ttft-ms", "slo_tbt_ms": "x-slo-tpot-ms", "slo_e2e_ms": "x-slo-e2e-ms"}
        ms = self.slo_ms()
        return {names[name]: np.format_float_positional(ms[name], trim="-") for name in ms}


@dataclasses.dataclass(slots=True)
class StreamEvent:
    """One message of a stream."""

    num_tokens: int = 0
    """New output tokens."""
    finish_reason: str | None = None
    """Finish reason, in the last message only: "stop", "length", or another string after a failure."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    num_preemptions: int | None = None
    recomputed_tokens: int | None = None
    cache_kind: str | None = None


class RequestFailed(Exception):
    """A request was rejected or interrupted.

    Attributes:
        status: short string for tables: an HTTP status, the name of a gRPC status, "connection", "broken" or "error".
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class Backend(Protocol):
    """A connection to a server."""

    def prepare(self, request: BenchRequest) -> Any:
        """Build everything that `send` needs, before the request is due.

        Raises:
            ConfigError: this backend cannot send the request.
        """
        ...

    def send(self, prepared: Any) -> AsyncGenerator[StreamEvent]:
        """Send a prepared request and stream its events. Closing the generator cancels the request.

        Raises:
            RequestFailed: the request was rejected or interrupted.
        """
        ...

    model: str
    """Name of the served model."""
    max_model_len: int | None
    """Maximum length of prompt plus output, in tokens; None: unknown."""

    async def close(self) -> None: ...


def random_token_ids(request: BenchRequest, vocab_size: int) -> list[int]:
    """Return token ids for a prompt. They differ for each request of a run, but for what calls of sessions share, so no
    other cached prefix is reused."""
    # Special tokens lie at either end of a vocabulary.
    low, high = vocab_size // 8, max(vocab_size - vocab_size // 8, 1)
    return (low + request.picks(request.prompt_tokens, high - low)).tolist()
