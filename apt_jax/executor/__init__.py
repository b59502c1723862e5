"""Executors run the steps that the engine plans: the contract (`base`), and the one that runs a model with JAX.

This face of the package has the contract alone, which needs no JAX.
"""

from apt_jax.executor.base import (
    NO_TOKEN,
    NULL_BLOCK,
    TOKEN_ON_DEVICE,
    Conversions,
    DiskCounts,
    DiskGroup,
    DiskRead,
    DiskStore,
    Executor,
    HostMemory,
    MaskedStepHandle,
    PoolSpan,
    PromptTargets,
    StepBatch,
    StepHandle,
    StepResult,
    is_device_lost,
    is_out_of_memory,
)

__all__ = [
    "NO_TOKEN",
    "NULL_BLOCK",
    "TOKEN_ON_DEVICE",
    "Conversions",
    "DiskCounts",
    "DiskGroup",
    "DiskRead",
    "DiskStore",
    "Executor",
    "HostMemory",
    "MaskedStepHandle",
    "PoolSpan",
    "PromptTargets",
    "StepBatch",
    "StepHandle",
    "StepResult",
    "is_device_lost",
    "is_out_of_memory",
]
