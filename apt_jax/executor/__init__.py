"""Executors run the steps that the engine plans: the contract (`base`), and the one that runs a model with JAX.

This face of the package has the contract alone, which needs no JAX; `apt_jax.core` has what it is about.
"""

from apt_jax.executor.base import Executor, MaskedStepHandle, StepHandle, is_device_lost, is_out_of_memory

__all__ = ["Executor", "MaskedStepHandle", "StepHandle", "is_device_lost", "is_out_of_memory"]
