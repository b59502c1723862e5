"""One simulated replica: an engine with its own clock."""

import dataclasses
import math
from typing import Protocol

import numpy as np

from apt_jax.core.kinds import HIDDEN
from apt_jax.core.step import StepBatch
from apt_jax.engine import Engine, StepOutput
from apt_jax.engine.admission import AdmissionDemand, PendingArrivals
from apt_jax.errors import InvalidRequestError
from apt_jax.executor import Executor
from apt_jax.metrics import TokenRate
from apt_jax.request import EngineRequest
from apt_jax.sim.routing import ReplicaState
from apt_jax.utils.clock import VirtualClock

IDLE_S = 0.01
"""Seconds until the next iteration if a policy keeps all requests waiting and no request runs; an arrival ends the
wait."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaCounts:
    """Counts of one replica over a run."""

    num_sent: int
    """Number of requests routed to this replica."""
    iterations: int
    preemptions: int
    device_busy_fraction: float


class TimedExecutor(Executor, Protocol):
    """An executor that counts its steps and its busy time in seconds."""

    @property
    def num_steps(self) -> int: ...

    @property
    def busy_s(self) -> float: ...


class Replica:
    """An engine with its own clock, the requests sent to it, and the state that a router may see."""

    def __init__(self, engine: Engine, executor: TimedExecutor, clock: VirtualClock, overlap: bool) -> None:
        self.engine, self.executor, self._clock = engine, executor, clock
        self._overlap = overlap
        self.next_s = math.inf
        """Start time of the next iteration, in seconds; infinite if no request is left."""
        self.num_sent = self.hidden_tokens = 0
        self._inbox: list[EngineRequest] = []
        self._pending = PendingArrivals()
        self._rate = TokenRate()
        self._in_step: ReplicaState | None = None
        """State when the last step was dispatched; its `busy_s` is the expected end time of that step."""

    def watch(self) -> None:
        """From now on, record the state at each dispatch; `state` needs it."""
        self.engine.before_dispatch = self._look_at_step

    def _look_at_step(self, batch: StepBatch) -> None:
        self._pending = PendingArrivals()
        step_s = self.engine.costs.step_s(batch.num_tokens, batch.start, batch.kind)
        begin_s = self._clock.now_s()
        if self._overlap and self._in_step is not None:  # the previous step still runs
            begin_s = max(begin_s, self._in_step.busy_s)
        self._in_step = self._look(begin_s + step_s)

    def _look(self, busy_s: float) -> ReplicaState:
        engine, view = self.engine, self.engine.view()
        return ReplicaState(
            admission=engine.admission,
            queue_snapshot=engine.queue_snapshot(),
            pending=self._pending,
            busy_s=busy_s,
            num_running=int(view.running.size),
            num_blocks=view.total_blocks,
            free_blocks=view.free_blocks,
            queued_tokens=int(view.table.num_tokens[view.waiting].sum()),
            tokens_per_s=self._rate.update(self._clock.now_s(), self.engine.num_generated, self.executor.busy_s),
            min_blocks_for=engine.min_blocks_for,
        )

    def state(self, now_s: float) -> ReplicaState:
        """Return the state of the replica at `now_s`, a time in seconds between the starts of two iterations."""
        if self._in_step is not None and self._clock.now_s() > now_s:  # the running step ends later
            left_s = max(self._in_step.busy_s - now_s, 0.0)
            return dataclasses.replace(self._in_step, busy_s=left_s, pending=self._pending)
        self._clock.advance_to(now_s)
        left_s = 0.0
        if self._overlap and self._in_step is not None:
            left_s = max(self._in_step.busy_s - now_s, 0.0)
        return self._look(left_s)

    def send(self, request: EngineRequest) -> None:
        """Add a request that arrives now; the next iteration passes it to the engine."""
        self._inbox.append(request)
        self.num_sent += 1
        num_tokens = int(request.prompt_token_ids.size)
        self._pending.add(
            AdmissionDemand(
                prompt_len=num_tokens,
                uncached_tokens=num_tokens,
                num_blocks=self.engine.min_blocks_for(num_tokens),
                best_effort=request.slo_class == "be",
                tenant=request.tenant,
            )
        )
        self.next_s = max(self._clock.now_s(), request.arrival_s)

    @property
    def now_s(self) -> float:
        """Time on the replica's clock, in seconds."""
        return self._clock.now_s()

    def turn(self) -> tuple[list[StepOutput], list[EngineRequest]]:
        """Run one iteration of the engine; return its outputs and the newly arrived requests that it rejected."""
        self._clock.advance_to(self.next_s)
        rejected = []
        for request in self._inbox:
            try:
                self.engine.add_request(request)
            except InvalidRequestError:
                rejected.append(request)
        self._inbox.clear()
        self._pending = PendingArrivals()
        before, began_s = self.executor.num_steps, self._clock.now_s()
        outputs = self.engine.step()
        self.next_s = self._clock.now_s() if self.engine.has_work else math.inf
        if self.executor.num_steps > before:
            plan = self.engine.last_plan
            if plan is not None and plan.kind.any():
                self.hidden_tokens += int(np.count_nonzero(plan.kind == HIDDEN))
        elif not outputs and self._clock.now_s() == began_s:  # and no earlier step has finished either
            self.next_s += IDLE_S
        return outputs, rejected
