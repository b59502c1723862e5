"""The engine and its parts; `apt_jax.engine.engine` describes the life cycle of a request."""

from apt_jax.engine.engine import Engine
from apt_jax.engine.policy_runner import STALL_LIMIT
from apt_jax.engine.recovery import FAILURE_WINDOW_S, OOM_BACKOFF_S
from apt_jax.engine.request_state import OutputProcessor, StepOutput, TokenLogprobs
from apt_jax.engine.stats import EngineStats

__all__ = [
    "FAILURE_WINDOW_S",
    "OOM_BACKOFF_S",
    "STALL_LIMIT",
    "Engine",
    "EngineStats",
    "OutputProcessor",
    "StepOutput",
    "TokenLogprobs",
]
