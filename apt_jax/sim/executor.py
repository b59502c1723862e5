"""An executor that simulates only the durations of steps; engine, scheduler and block accounting are real."""

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.step import NO_TOKEN, StepBatch, StepResult
from apt_jax.utils.clock import VirtualClock


@dataclasses.dataclass(slots=True)
class _Handle:
    clock: VirtualClock
    ready_s: float
    samples: np.ndarray

    def result(self) -> StepResult:
        self.clock.advance_to(self.ready_s)
        n = self.samples.size
        token_ids = np.zeros(n, np.int32)
        if not self.samples.all():
            token_ids[~self.samples] = NO_TOKEN
        return StepResult(token_ids=token_ids, finite=np.ones(n, np.bool_))


class SimulatedExecutor:
    """An `Executor` whose steps take the time that a cost model predicts and always sample token 0.

    It keeps time as a device does: `execute` spends the host time and dispatches the step; the step begins once it is
    dispatched and the previous step has finished; `result` moves the clock to the end of the step. With
    `SchedulerConfig.overlap` the host therefore prepares a step while the device runs the previous one, and each step
    is scheduled before the previous step has finished.

    Args:
        clock: the engine's clock.
        step_s: function that returns the duration of a step in seconds.
        num_blocks: number of usable blocks in the pool.
        block_size: tokens per block of keys or values.
        hidden_block_size: tokens per block of layer inputs; None: `block_size`.
        max_num_seqs: maximum number of requests in a batch.
        host_s: host time before each dispatch, in seconds.
        can_convert: whether layer inputs may be converted to keys and values within a step.
        transfer_s: function that returns the duration of a step's transfers in seconds. Transfers run in parallel with
            the step, which then takes the longer of the two durations. None: transfers take no time.
        lengths_only: True if `step_s` and `transfer_s` read only lengths and kinds (`Executor.lengths_only`).

    Attributes:
        num_steps: number of executed steps.
        busy_s: time in seconds that the simulated device has worked, without host time.
    """

    adapters = ()

    def __init__(
        self,
        clock: VirtualClock,
        step_s: Callable[[StepBatch], float],
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        hidden_block_size: int | None = None,
        host_s: float = 0.0,
        can_convert: bool = True,
        transfer_s: Callable[[StepBatch], float] | None = None,
        lengths_only: bool = False,
    ) -> None:
        self.clock = clock
        self.lengths_only = lengths_only
        self.step_s = step_s
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hidden_block_size = block_size if hidden_block_size is None else hidden_block_size
        self.max_num_seqs = max_num_seqs
        self.host_s = host_s
        self.can_convert = can_convert
        self.transfer_s = transfer_s
        self.num_steps = 0
        self.busy_s = 0.0
        self._busy_until_s = 0.0

    def execute(self, batch: StepBatch) -> _Handle:
        duration_s = self.step_s(batch)
        if self.transfer_s is not None:
            duration_s = max(duration_s, self.transfer_s(batch))
        self.num_steps += 1
        self.busy_s += duration_s
        if self.host_s:
            self.clock.advance_to(self.clock.now_s() + self.host_s)
        self._busy_until_s = max(self._busy_until_s, self.clock.now_s()) + duration_s
        return _Handle(self.clock, self._busy_until_s, batch.samples)

    def reset(self) -> None:
        pass

    def check_integrity(self) -> None:
        pass

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        if progress is not None:
            progress(1, 1)

    def prepare_prompt_logprobs(self) -> None:
        pass

    @property
    def compilations(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class SimulatedHostMemory:
    """Simulated host memory whose transfers never fail."""

    num_blocks: int
    block_bytes: int = 0

    def save_now(self, saves: NDArray[np.int32]) -> None:
        """Do nothing: simulated blocks have no contents."""

    def slots_ready(self, spans: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.ones(len(spans), np.bool_)

    def ready_to_load(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.ones(blocks.size, np.bool_)
