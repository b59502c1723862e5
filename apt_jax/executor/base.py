"""The interface between the engine and its executor: a device, a cost model, or a test double.

`execute` dispatches a step, and `StepHandle.result` fetches its result later, so the engine can prepare the next step
while the device works. Steps take effect in the order in which they were dispatched.
"""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.step import StepBatch, StepResult


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that host or device memory is exhausted."""
    is_the_devices = isinstance(error, RuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED")
    return is_the_devices or isinstance(error, MemoryError)


_DEVICE_LOST = re.compile(
    r"(CUDA_ERROR_|hipError)(ILLEGAL_?\w+|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|LAUNCH_FAILED|LAUNCH_TIMEOUT|MISALIGNED_ADDRESS"
    r"|INVALID_ADDRESS_SPACE|INVALID_PC|HARDWARE_STACK_ERROR|ASSERT|CONTEXT_IS_DESTROYED|DEVICE_UNAVAILABLE)\b"
    r"|illegal memory access|uncorrectable ECC|unspecified launch failure|device-side assert",
    re.IGNORECASE,
)


def is_device_lost(error: BaseException) -> bool:
    """Return True if an error leaves the device unusable for this process: every later call fails too, or returns wrong
    results."""
    return isinstance(error, RuntimeError) and _DEVICE_LOST.search(str(error)) is not None


class StepHandle(Protocol):
    """A dispatched step."""

    def result(self) -> StepResult:
        """Wait for the step to finish and return its results. Raises the exception of the step if it failed."""
        ...


class MaskedStepHandle(StepHandle, Protocol):
    """A step dispatched up to sampling, which needs masks first.

    The forward pass takes most of the time and needs no masks: while it runs, the host fetches the tokens of the
    previous step and computes which tokens may follow them.
    """

    def sample(self, masks: NDArray[np.int32]) -> None:
        """Dispatch the sampling with masks. Must be called once, before `result` and before the next `execute`. After
        an exception the pool is lost.

        Args:
            masks: (rows in `StepBatch.masked`, any width); bit i % 32 of ``masks[j, i // 32]`` allows token i. Tokens
                beyond the last word are forbidden.
        """
        ...


class Executor(Protocol):
    """Runs steps over a pool of `num_blocks` usable blocks with ids in [1, num_blocks]."""

    num_blocks: int
    block_size: int
    """Number of tokens whose keys, or values, fit in a block."""
    hidden_block_size: int
    """Number of layer inputs in a block: more than `block_size` if they are narrower than keys, fewer if they are
    wider."""
    max_num_seqs: int
    can_convert: bool
    """True if steps may have `StepBatch.conversions`."""
    lengths_only: bool
    """True if the executor, like a cost model, uses only lengths and kinds of steps: token ids, block tables, sampling
    parameters and histories of a `StepBatch` may be empty."""

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the LoRA adapters that requests may use."""
        ...

    def execute(self, batch: StepBatch) -> StepHandle:
        """Dispatch one step without waiting for it. After an exception the pool is lost: call `reset`."""
        ...

    def reset(self) -> None:
        """Recreate the pool after a failed step, which has destroyed the donated arrays. All cache on the device is
        lost; blocks saved to host memory stay."""
        ...

    def check_integrity(self) -> None:
        """Wait for all dispatched steps, and check the device's per-slot arrays against them.

        Raises:
            RuntimeError: the arrays differ.
        """
        ...

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every program that serving can need, except the programs of `prepare_prompt_logprobs`.
        `progress(done, total)` is called before the first program and after each."""
        ...

    def prepare_prompt_logprobs(self) -> None:
        """Compile the programs of steps with `StepBatch.prompt_targets` if they are not compiled yet. May be called
        from any thread while steps run; a step that needs a program before then compiles it itself."""
        ...

    @property
    def compilations(self) -> int:
        """Number of programs that steps had to compile after `warm_up`, without the programs of
        `prepare_prompt_logprobs`; stays 0 while serving."""
        ...
