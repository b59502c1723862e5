"""The contract between the engine and its executor: a device, a cost model, or a test double.

A step is dispatched by `execute` and its result fetched later by `StepHandle.result`, so that the engine can prepare
the next step while the device works. Steps take effect in the order in which they were dispatched.
"""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.step import StepBatch, StepResult


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means out of memory, on the host or, in JAX's wording, on the device."""
    is_the_devices = isinstance(error, RuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED")
    return is_the_devices or isinstance(error, MemoryError)


_DEVICE_LOST = re.compile(
    r"(CUDA_ERROR_|hipError)(ILLEGAL_?\w+|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|LAUNCH_FAILED|LAUNCH_TIMEOUT|MISALIGNED_ADDRESS"
    r"|INVALID_ADDRESS_SPACE|INVALID_PC|HARDWARE_STACK_ERROR|ASSERT|CONTEXT_IS_DESTROYED|DEVICE_UNAVAILABLE)\b"
    r"|illegal memory access|uncorrectable ECC|unspecified launch failure|device-side assert",
    re.IGNORECASE,
)


def is_device_lost(error: BaseException) -> bool:
    """True if an error leaves the device unusable for this process: every later call fails too, or computes nonsense."""
    return isinstance(error, RuntimeError) and _DEVICE_LOST.search(str(error)) is not None


class StepHandle(Protocol):
    """A dispatched step."""

    def result(self) -> StepResult:
        """Wait for the step to end and fetch its tokens. Raises what the step raised."""
        ...


class MaskedStepHandle(StepHandle, Protocol):
    """A step that has been dispatched up to the point where tokens are sampled, which takes the masks.

    The forward pass takes most of the time and needs no masks: while it runs, the host fetches the tokens of the
    previous step and computes which tokens may follow them.
    """

    def sample(self, masks: NDArray[np.int32]) -> None:
        """Dispatch the rest. Must be called once, before `result` and before the next `execute`.

        Args:
            masks: (rows in `StepBatch.masked`, any width): bit i % 32 of ``masks[j, i // 32]`` allows token i; tokens
                beyond the last word are forbidden. After an exception the pool is gone.
        """
        ...


class Executor(Protocol):
    """Runs steps over a pool of `num_blocks` usable blocks with ids in [1, num_blocks]."""

    num_blocks: int
    block_size: int
    """Keys, or values, that a block holds."""
    hidden_block_size: int
    """Layer inputs that a block holds: more than keys where they are narrower, fewer where they are wider."""
    max_num_seqs: int
    can_convert: bool
    """True if steps may have `StepBatch.conversions`."""
    lengths_only: bool
    """True if only lengths and kinds of steps are looked at, as by a cost model: token ids, block tables, sampling
    parameters and histories of a `StepBatch` may be empty."""

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the LoRA adapters that requests may have."""
        ...

    def execute(self, batch: StepBatch) -> StepHandle:
        """Dispatch one step; must not wait for it. After an exception the pool is gone: call `reset`."""
        ...

    def reset(self) -> None:
        """Recreate the pool, all cache on the device lost (a failed step has destroyed the donated arrays). Host memory
        keeps what steps before had saved."""
        ...

    def check_integrity(self) -> None:
        """Check the device's per-slot arrays against the steps that were dispatched. Waits for them.

        Raises:
            RuntimeError: it has something else.
        """
        ...

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile everything that serving can need; `progress(done, total)` before the first program and after each."""
        ...

    def prepare_prompt_logprobs(self) -> None:
        """Compile the programs of steps with `StepBatch.prompt_targets` if they are not compiled yet. From any thread, while
        steps run; a step that comes before its end compiles what it needs itself."""
        ...

    @property
    def compilations(self) -> int:
        """Programs compiled since `warm_up` ended; stays 0 while serving."""
        ...
