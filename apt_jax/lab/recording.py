"""Recording and replay of real step durations, to check that the engine makes the same decisions with a real model and
in simulation.

    JaxExecutor ──► RecordingExecutor ──► VirtualClock                     run 1: the model computes; measured durations
                                                                           advance the clock
                        │ durations_s
                        ▼
    SimulatedExecutor(step_s=Replay(durations_s)) ──► VirtualClock         run 2: no model

A policy's decisions depend on the time, the request table and the pool. With equal arrivals, step durations and output
lengths (no end of sequence, exact `max_tokens`) both runs must make the same decisions, one by one. `difference`
describes the first decision or time that differs between two runs.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

from apt_jax.config import SchedulerConfig
from apt_jax.core.step import StepBatch, StepResult
from apt_jax.costs.hardware import Hardware
from apt_jax.executor import Executor, StepHandle
from apt_jax.sched import Plan, Policy, SchedulerView, make_policy
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import SimulationResult, simulate
from apt_jax.sim.workload import Workload
from apt_jax.utils.clock import VirtualClock

__all__ = [
    "Decision",
    "RecordingExecutor",
    "Replay",
    "Run",
    "difference",
    "run_recorded",
    "run_replayed",
]


@dataclasses.dataclass(slots=True)
class _Done:
    recorder: "RecordingExecutor"
    ready_s: float
    step: StepResult

    def result(self) -> StepResult:
        self.recorder.clock.advance_to(self.ready_s)
        return self.step


class RecordingExecutor:
    """Runs each step of another executor to completion, records its duration, and advances a clock by it.

    Args:
        inner: the executor that computes.
        clock: the engine's clock; `result` moves it to the end of the step.
        timer: function that returns the real time in seconds.

    Attributes:
        durations_s: duration of each step in seconds, in order, from the call of `execute` to the sampled tokens.
    """

    def __init__(
        self,
        inner: Executor,
        clock: VirtualClock,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.inner, self.clock = inner, clock
        self.num_blocks, self.block_size = inner.num_blocks, inner.block_size
        self.hidden_block_size = inner.hidden_block_size
        self.max_num_seqs, self.can_convert = inner.max_num_seqs, inner.can_convert
        self.adapters, self.lengths_only = inner.adapters, inner.lengths_only
        self.durations_s: list[float] = []
        self._timer = timer
        self._busy_until_s = 0.0

    def execute(self, batch: StepBatch) -> StepHandle:
        started = self._timer()
        step = self.inner.execute(batch).result()
        duration_s = self._timer() - started
        self.durations_s.append(duration_s)
        self._busy_until_s = max(self._busy_until_s, self.clock.now_s()) + duration_s
        return _Done(self, self._busy_until_s, step)

    @property
    def num_steps(self) -> int:
        """Number of executed steps."""
        return len(self.durations_s)

    @property
    def busy_s(self) -> float:
        """Total duration of the executed steps, seconds."""
        return sum(self.durations_s)

    def reset(self) -> None:
        self.inner.reset()

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def prepare_prompt_logprobs(self) -> None:
        """See `Executor.prepare_prompt_logprobs`."""
        self.inner.prepare_prompt_logprobs()

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        self.inner.warm_up(progress)

    @property
    def compilations(self) -> int:
        return self.inner.compilations


class Replay:
    """Returns recorded durations in order: a `step_s` for `SimulatedExecutor` or `simulate`.

    Args:
        durations_s: step durations in seconds, from `RecordingExecutor`.
    """

    def __init__(self, durations_s: Sequence[float]) -> None:
        self.durations_s = tuple(durations_s)
        self.num_used = 0

    def __call__(self, batch: StepBatch) -> float:
        """Return the duration of the next step in seconds.

        Raises:
            AssertionError: there are more steps than recorded durations.
        """
        if self.num_used >= len(self.durations_s):
            raise AssertionError(f"the simulation runs more steps than the {len(self.durations_s)} that were recorded")
        self.num_used += 1
        return self.durations_s[self.num_used - 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The plan of one iteration, with requests identified by their order of arrival so that runs can be compared."""

    now_s: float
    """Time of the decision, seconds."""
    iteration: str
    """`Plan.iteration`."""
    rows: tuple[tuple[int, int, int], ...]
    """(request, number of tokens, cache kind) of each scheduled row, in the order of the plan."""
    preempt: tuple[int, ...]
    """Preempted requests."""
    convert: tuple[int, ...] = ()
    """Requests converted from layer inputs to keys and values."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """The decisions and the result of a run."""

    decisions: list[Decision]
    durations_s: list[float]
    """Duration of each step, seconds."""
    can_convert: bool
    """True if the executor can convert layer inputs to keys and values."""
    result: SimulationResult


class RecordingPolicy:
    """A policy that records the decisions of another policy."""

    def __init__(self, inner: Policy) -> None:
        self.inner, self.name = inner, inner.name
        self.decisions: list[Decision] = []

    def schedule(self, view: SchedulerView) -> Plan:
        plan = self.inner.schedule(view)
        rank = view.table.rank  # requests are numbered as they arrive
        rows = zip(rank[plan.rows].tolist(), plan.num_tokens.tolist(), plan.kind.tolist(), strict=True)
        decision = Decision(
            now_s=view.now_s,
            iteration=plan.iteration,
            rows=tuple(rows),
            preempt=tuple(rank[plan.preempt].tolist()),
            convert=tuple(rank[plan.convert].tolist()),
        )
        self.decisions.append(decision)
        return plan


def recording_policy(config: SimulationConfig) -> RecordingPolicy:
    scheduler = SchedulerConfig(policy=config.policy)
    return RecordingPolicy(make_policy(config=scheduler, seed=config.seed))


def run_recorded(config: SimulationConfig, hardware: Hardware, workload: Workload, executor: Executor) -> Run:
    """Serve a workload with a real executor in virtual time: each step advances the clock by its measured duration.

    Args:
        config: policy, cache kinds, limits, objectives and seed; its limits must be within the executor's.
        hardware: costs that the policy uses. Block sizes and pool are taken from the executor.
        workload: requests that the executor's pool and model can hold.
        executor: the executor that computes; prompts consist of token 0, and only the number of output tokens counts.
    """
    policy, recorders = recording_policy(config), list[RecordingExecutor]()

    def record(clock: VirtualClock) -> RecordingExecutor:
        recorders.append(RecordingExecutor(executor, clock))
        return recorders[0]

    hardware = dataclasses.replace(
        hardware,
        num_blocks=executor.num_blocks,
        block_size=executor.block_size,
        hidden_block_size=executor.hidden_block_size,
    )
    result = simulate(config, hardware=hardware, workload=workload, policy=policy, executor=record, debug=True)
    return Run(
        decisions=policy.decisions,
        durations_s=recorders[0].durations_s,
        can_convert=executor.can_convert,
        result=result,
    )


def run_replayed(config: SimulationConfig, hardware: Hardware, workload: Workload, recorded: Run) -> Run:
    """Simulate the workload of `run_recorded` with its recorded durations.

    Args:
        config: as for `run_recorded`.
        hardware: costs that the policy uses, with the block sizes and the pool of the recorded run's executor.
        workload: as for `run_recorded`.
        recorded: the recorded run.

    Raises:
        AssertionError: the simulation runs more steps than were recorded.
        RuntimeError: the simulation runs fewer steps than were recorded.
    """
    policy, replay = recording_policy(config), Replay(recorded.durations_s)
    result = simulate(
        config,
        hardware=hardware,
        workload=workload,
        policy=policy,
        step_s=replay,
        can_convert=recorded.can_convert,
        debug=True,
    )
    if replay.num_used != len(recorded.durations_s):
        raise RuntimeError(f"the simulation ran {replay.num_used} steps, but {len(recorded.durations_s)} were recorded")
    return Run(
        decisions=policy.decisions,
        durations_s=recorded.durations_s,
        can_convert=recorded.can_convert,
        result=result,
    )


def difference(first: Run, second: Run) -> str | None:
    """Describe the first difference between two runs; None if all decisions, their times and the request metrics are
    equal."""
    for i, (a, b) in enumerate(zip(first.decisions, second.decisions, strict=False)):
        if a != b:
            return f"iteration {i}: {a} and {b}"
    if len(first.decisions) != len(second.decisions):
        return f"{len(first.decisions)} and {len(second.decisions)} iterations"
    for i, (a, b) in enumerate(zip(first.result.requests, second.result.requests, strict=True)):
        if a != b:
            return f"request {i}: {a} and {b}"
    return None
