"""apt-jax: an LLM serving engine in JAX with a hybrid cache and adaptive scheduling (Apt-Serve, SIGMOD'25).

    from apt_jax import LLM, SamplingParams, SLO

    llm = LLM("tiny-opt")
    outs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32, temperature=0.0), slo=SLO(ttft_s=1.0))
    print(outs[0].outputs[0].text)

Names are imported at their first use, so importing `apt_jax.sched` requires only NumPy.
"""

import importlib
from typing import TYPE_CHECKING

from apt_jax.version import __version__

if TYPE_CHECKING:
    from apt_jax.config import SLO, CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
    from apt_jax.errors import (
        AptJaxError,
        ConfigError,
        DuplicateRequestError,
        EngineDeadError,
        InvalidRequestError,
        ModelLoadError,
        QueueFullError,
        UnknownRequestError,
    )
    from apt_jax.frontend.async_engine import AsyncEngine
    from apt_jax.frontend.builder import build_engine
    from apt_jax.frontend.llm import LLM
    from apt_jax.models.config import ModelConfig
    from apt_jax.request import (
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )


__all__ = [
    "LLM",
    "SLO",
    "AptJaxError",
    "AsyncEngine",
    "CacheConfig",
    "CompletionOutput",
    "ConfigError",
    "DuplicateRequestError",
    "EngineConfig",
    "EngineDeadError",
    "InvalidRequestError",
    "Logprob",
    "ModelConfig",
    "ModelLoadError",
    "ParallelConfig",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "StructuredOutputsParams",
    "UnknownRequestError",
    "__version__",
    "build_engine",
]

_HOMES = {
    "AsyncEngine": "apt_jax.frontend.async_engine",
    "LLM": "apt_jax.frontend.llm",
    "build_engine": "apt_jax.frontend.builder",
    **dict.fromkeys(
        ("SLO", "CacheConfig", "EngineConfig", "ParallelConfig", "SchedulerConfig"),
        "apt_jax.config",
    ),
    "ModelConfig": "apt_jax.models.config",
    **dict.fromkeys(
        (
            "AptJaxError",
            "ConfigError",
            "DuplicateRequestError",
            "EngineDeadError",
            "InvalidRequestError",
            "ModelLoadError",
            "QueueFullError",
            "UnknownRequestError",
        ),
        "apt_jax.errors",
    ),
    **dict.fromkeys(
        (
            "CompletionOutput",
            "Logprob",
            "RequestMetrics",
            "RequestOutput",
            "SamplingParams",
            "StructuredOutputsParams",
        ),
        "apt_jax.request",
    ),
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'apt_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
