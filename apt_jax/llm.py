"""Re-exports of `apt_jax.frontend` under their former module name; kept for one release."""

from apt_jax.frontend.builder import (
    DEFAULT_CALIBRATION_S,
    build_engine,
    freeze_gc_heap,
    recalibrate,
    use_compile_cache,
)
from apt_jax.frontend.components import EngineComponents, build_components, with_policy
from apt_jax.frontend.headless import run_headless
from apt_jax.frontend.llm import LLM
from apt_jax.frontend.outputs import OutputAssembler, OutputDelta, RequestState
from apt_jax.frontend.progress import Progress, ProgressBars

__all__ = [
    "DEFAULT_CALIBRATION_S",
    "LLM",
    "EngineComponents",
    "OutputAssembler",
    "OutputDelta",
    "Progress",
    "ProgressBars",
    "RequestState",
    "build_components",
    "build_engine",
    "freeze_gc_heap",
    "recalibrate",
    "run_headless",
    "use_compile_cache",
    "with_policy",
]
