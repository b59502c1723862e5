"""What the load tool asks of a way to reach a server, and which ways there are."""

import dataclasses
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import numpy as np

from apt_jax.config import SLO
from serve.bench.load import BenchRequest

BACKENDS = ("aptjax-grpc", "vllm-grpc", "openai", "openai-chat")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Which server, and what every request to it says."""

    address: str
    """``HOST:PORT`` for gRPC, a base URL for HTTP."""
    model: str | None = None
    """Name of the served model; None: the server's."""
    slo: SLO = SLO()  # noqa: RUF009 - frozen
    """Sent along where it is finite."""
    ignore_eos: bool = True
    temperature: float = 0.0
    vocab_size: int | None = None
    """Made-up prompts have token ids below it; None: the server is asked."""
    api_key: str | None = None
    tls_ca: str | None = None
    """PEM file of the CAs that the server's certificate is held against; None with gRPC: no TLS."""

    def slo_ms(self) -> dict[str, float]:
        """The finite objectives, milliseconds, by the words of `serve.client.make_request`."""
        parts = {"slo_ttft_ms": self.slo.ttft_s * 1e3, "slo_tbt_ms": self.slo.tbt_s * 1e3}
        return {name: round(ms, 6) for name, ms in parts.items() if ms < float("inf")}

    def slo_headers(self) -> dict[str, str]:
        """The same as headers or metadata."""
        names = {"slo_ttft_ms": "x-slo-ttft-ms", "slo_tbt_ms": "x-slo-tpot-ms"}
        ms = self.slo_ms()
        return {names[name]: np.format_float_positional(ms[name], trim="-") for name in ms}


@dataclasses.dataclass(slots=True)
class News:
    """What one message of a stream says."""

    num_tokens: int = 0
    """New output tokens."""
    finish_reason: str | None = None
    """In the last message: "stop", "length", or something else where it did not end well."""
    prompt_tokens: int | None = None
    num_preemptions: int | None = None
    recomputed_tokens: int | None = None
    cache_kind: str | None = None


class RequestFailed(Exception):
    """A request was refused or broke off.

    Attributes:
        status: a word for tables: an HTTP status, the name of a gRPC status, "connection", "broken".
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class Backend(Protocol):
    """A server, opened."""

    def prepare(self, request: BenchRequest) -> Any:
        """Everything that can be done before a request is due.

        Raises:
            ConfigError: this backend cannot send it.
        """
        ...

    def send(self, prepared: Any) -> AsyncGenerator[News]:
        """Send it, and tell the news as they come. Closing the generator ends the request.

        Raises:
            RequestFailed: refused, or broken off.
        """
        ...

    model: str
    """Name of the served model."""
    max_model_len: int | None
    """Longest prompt plus output, tokens; None: the server does not say."""

    async def close(self) -> None: ...


async def open_backend(name: str, target: Target) -> Backend:
    """Reach the server and learn its model and vocabulary.

    Raises:
        CommandError: nobody answers there, or not as expected.
        ConfigError: a flag that this backend cannot use.
    """
    if name in ("aptjax-grpc", "vllm-grpc"):
        from serve.bench.grpc_backends import open_grpc

        return await open_grpc(name, target)
    from serve.bench.http_backends import HttpBackend

    return await HttpBackend.open(target, chat=name == "openai-chat")


def made_up_ids(request: BenchRequest, vocab_size: int) -> list[int]:
    """Token ids of a prompt that no other request of the run has, so that nothing of it is cached."""
    # Special tokens lie at either end of a vocabulary.
    low, high = vocab_size // 8, max(vocab_size - vocab_size // 8, 1)
    rng = np.random.default_rng([request.seed, request.index, 0x1D5])
    return rng.integers(low, high, request.prompt_tokens).tolist()
