"""Executors run the steps that the engine plans: their interface (`base`), and the executor that runs a model with JAX.

The package itself exports only the interface, which does not import JAX; `apt_jax.core` has the types of steps.
"""

from apt_jax.executor.base import Executor, MaskedStepHandle, StepHandle, is_device_lost, is_out_of_memory

__all__ = ["Executor", "MaskedStepHandle", "StepHandle", "is_device_lost", "is_out_of_memory"]
