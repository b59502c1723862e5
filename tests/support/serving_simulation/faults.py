"""Faults in a replica: steps that are slow, hang or fail, bad rows, preemptions and aborts, jumps of the clock."""

import itertools

import numpy as np

from apt_jax.core.step import StepBatch
from apt_jax.engine import Engine
from tests.support.fake_executor import Fault, FaultKind
from tests.support.serving_simulation.engine import ReplicaClock
from tests.support.serving_simulation.world import World


class ReplicaFaults:
    """Draws the faults of one process.

    Args:
        world: it belongs to.
        rng: for these faults alone.
        clock: of the process; it jumps.

    Attributes:
        hangs: a step hangs.
        row_faults: number of rows that were made bad.
    """

    def __init__(self, world: World, rng: np.random.Generator, clock: ReplicaClock) -> None:
        self._world, self._rng, self._clock = world, rng, clock
        self.hangs = False
        self.row_faults = 0
        self._step_failures_s: list[float] = []

    @property
    def failed_twice(self) -> bool:
        """Two steps failed within a minute."""
        return any(b - a < 60.0 + 1e-6 for a, b in itertools.pairwise(self._step_failures_s))

    def duration_s(self, batch: StepBatch) -> float:
        """Draw the duration of a step."""
        world, rng = self._world, self._rng
        duration_s = 0.01 + 0.0001 * batch.token_ids.size
        if world.faults_on and rng.random() < world.scenario.p_slow_step:
            world.note["slow step"] += 1
            duration_s *= 50
        if world.faults_on and rng.random() < world.scenario.p_hang:
            world.note["hung step"] += 1
            self.hangs = True
            duration_s = 1e6
        return duration_s

    def step_fault(self, batch: StepBatch) -> Fault | None:
        """Draw whether and how a step fails."""
        world, rng = self._world, self._rng
        if not world.faults_on:
            return None
        if rng.random() < world.scenario.p_step_failure:
            self._step_failures_s.append(self._clock.now_s())
            kinds = (
                FaultKind.OUT_OF_MEMORY, FaultKind.RAISE_BEFORE, FaultKind.RAISE_AFTER, FaultKind.RAISE_IN_RESULT,
                FaultKind.PARTIAL, *((FaultKind.RAISE_IN_SAMPLE,) if batch.masked is not None else ()),
            )  # fmt: skip
            kind = kinds[int(rng.integers(len(kinds)))]
            world.note[f"step failure: {kind.name.lower()}"] += 1
            world.note["step failure with >= 2 rows"] += batch.slots.size >= 2
            return Fault(kind=kind)
        if rng.random() < world.scenario.p_bad_row:
            row = int(rng.integers(batch.slots.size * 2))
            if batch.samples[row % batch.slots.size]:
                self.row_faults += 1
                world.note["bad row"] += 1
                return Fault(kind=FaultKind.NOT_FINITE if rng.random() < 0.5 else FaultKind.BAD_TOKEN, row=row)
        return None

    def disturb(self, engine: Engine) -> None:
        """Preemptions and aborts from outside, and jumps of the clock, between two steps."""
        world, rng = self._world, self._rng
        scenario = world.scenario
        ids = sorted(engine.states.by_id)
        if ids and rng.random() < scenario.p_preempt:
            world.note["preempted from outside"] += engine.preempt(ids[int(rng.integers(len(ids)))])
        if ids and rng.random() < scenario.p_abort:
            victim = ids[int(rng.integers(len(ids)))]
            world.aborted.add(victim)
            engine.abort(victim)
            world.note["aborted by an operator"] += 1
        if scenario.clock_jumps and rng.random() < 0.01:
            self._clock.ahead_s += float(rng.choice([0.3, 5.0, 100.0]))
            world.note["clock jumped"] += 1
            world.jumped = True
