"""The contract between the load tool and the backends that reach a server."""

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import numpy as np

from apt_jax.config import SLO
from serve.bench.load import BenchRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The server, and the fields of every request to it."""

    address: str
    """``HOST:PORT`` for gRPC, a base URL for HTTP."""
    model: str | None = None
    """Name of the served model; None: the server's."""
    slo: SLO = SLO()  # noqa: RUF009 - frozen
    """Sent along where it is finite."""
    ignore_eos: bool = True
    temperature: float = 0.0
    vocab_size: int | None = None
    """Random prompts have token ids below it; None: the server is asked."""
    api_key: str | None = None
    tls_ca: str | None = None
    """PEM file of the CAs that the server's certificate is held against; None with gRPC: no TLS."""

    def slo_ms(self) -> dict[str, float]:
        """The finite SLOs, milliseconds, by the arguments of `serve.client.make_request`."""
        parts = {"slo_ttft_ms": self.slo.ttft_s * 1e3, "slo_tbt_ms": self.slo.tbt_s * 1e3}
        return {name: round(ms, 6) for name, ms in parts.items() if ms < float("inf")}

    def slo_headers(self) -> dict[str, str]:
        """The same as headers or metadata."""
        names = {"slo_ttft_ms": "x-slo-ttft-ms", "slo_tbt_ms": "x-slo-tpot-ms"}
        ms = self.slo_ms()
        return {names[name]: np.format_float_positional(ms[name], trim="-") for name in ms}


@dataclasses.dataclass(slots=True)
class StreamEvent:
    """One message of a stream."""

    num_tokens: int = 0
    """New output tokens."""
    finish_reason: str | None = None
    """In the last message: "stop", "length", or something else if it did not end well."""
    prompt_tokens: int | None = None
    num_preemptions: int | None = None
    recomputed_tokens: int | None = None
    cache_kind: str | None = None


class RequestFailed(Exception):
    """A request was rejected or broke off.

    Attributes:
        status: short text for tables: an HTTP status, the name of a gRPC status, "connection", "broken".
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class Backend(Protocol):
    """A server, opened."""

    def prepare(self, request: BenchRequest) -> Any:
        """Do everything that can be done before a request is due.

        Raises:
            ConfigError: this backend cannot send it.
        """
        ...

    def send(self, prepared: Any) -> AsyncGenerator[StreamEvent]:
        """Send it and stream its events. Closing the generator cancels the request.

        Raises:
            RequestFailed: rejected, or broken off.
        """
        ...

    model: str
    """Name of the served model."""
    max_model_len: int | None
    """Longest prompt plus output, tokens; None: the server does not say."""

    async def close(self) -> None: ...


def random_token_ids(request: BenchRequest, vocab_size: int) -> list[int]:
    """Random token ids of a prompt, different for each request of the run, so that nothing of it is cached."""
    # Special tokens lie at either end of a vocabulary.
    low, high = vocab_size // 8, max(vocab_size - vocab_size // 8, 1)
    rng = np.random.default_rng([request.seed, request.index, 0x1D5])
    return rng.integers(low, high, request.prompt_tokens).tolist()
