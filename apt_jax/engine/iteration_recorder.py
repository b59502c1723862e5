"""Records the engine's decisions while a listener is attached."""

from collections.abc import Callable, Sequence

from apt_jax.core.kinds import KIND_NAMES
from apt_jax.core.step import StepBatch
from apt_jax.engine.events import Iteration, KindSwitch, PreemptedRow, ScheduledRow
from apt_jax.engine.request_state import InFlightStep
from apt_jax.sched.view import Plan
from apt_jax.utils.clock import Clock


class IterationRecorder:
    """Creates an `Iteration` for each decision, and passes it to the listener when its step has ended.

    Attributes:
        listener: called with every decision, in order; must be quick and must not raise.
        num_decisions: number of the next `Iteration`.
        current: the decision being carried out; None: no listener is attached, or the decision is empty.
        preempted_between: preemptions made outside decisions, which are reported with the next decision.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.listener: Callable[[Iteration], None] | None = None
        self.num_decisions = 0
        self.current: Iteration | None = None
        self.preempted_between: list[PreemptedRow] = []

    def begin(self, plan: Plan, schedule_s: float) -> None:
        """Number a decision that runs or preempts requests, and set `current` if there is a listener."""
        preempted, self.preempted_between = self.preempted_between, []
        self.current = None
        if not plan.rows.size and not plan.preempt.size and not preempted:
            return
        number, self.num_decisions = self.num_decisions, self.num_decisions + 1
        if self.listener is not None:
            self.current = Iteration(
                number=number,
                at_s=self._clock.now_s(),
                type=plan.iteration,
                preempted=preempted,
                schedule_s=schedule_s,
            )

    def preempted(self, request_id: str, num_tokens: int, kind: int) -> None:
        """Record a preemption, made by the current decision or outside decisions."""
        if self.listener is None:
            return
        rows = self.preempted_between if self.current is None else self.current.preempted
        rows.append(PreemptedRow(request_id=request_id, num_tokens=num_tokens, kind=KIND_NAMES[kind]))

    def switched(self, request_id: str, old: int, new: int) -> None:
        """Record that a request was scheduled again with another cache kind."""
        if self.current is not None:
            switch = KindSwitch(request_id=request_id, old=KIND_NAMES[old], new=KIND_NAMES[new])
            self.current.switched.append(switch)

    def converted(self, request_id: str) -> None:
        """Record that a request was converted from layer inputs to keys and values."""
        if self.current is not None:
            self.current.converted.append(request_id)

    def built(
        self,
        batch: StepBatch | None,
        request_ids: Sequence[str],
        *,
        num_waiting: int,
        num_running: int,
        free_blocks: int,
    ) -> None:
        """Record the batch of the current decision (None: no row runs), and the resulting numbers of requests and free
        blocks."""
        iteration = self.current
        assert iteration is not None
        iteration.num_waiting = num_waiting
        iteration.num_running = num_running
        iteration.free_blocks = free_blocks
        if batch is not None:
            columns = zip(
                request_ids,
                batch.num_tokens.tolist(),
                batch.start.tolist(),
                batch.kind.tolist(),
                strict=True,
            )
            iteration.scheduled = tuple(
                ScheduledRow(request_id=i, num_tokens=n, start=s, kind=KIND_NAMES[k]) for i, n, s, k in columns
            )

    def end(self, iteration: Iteration | None, step_s: float | None) -> None:
        """Report a decision whose step took `step_s` seconds; None: the step failed."""
        if iteration is not None:
            iteration.step_s, iteration.failed = step_s, step_s is None
            self._tell(iteration)

    def end_step(self, step: InFlightStep, step_s: float | None) -> None:
        """Report the decision of a step; a second call for the step does nothing."""
        iteration, step.iteration = step.iteration, None
        self.end(iteration, step_s)

    def end_current(self, *, ran: bool) -> None:
        """Report the current decision now if it dispatched no step; otherwise (`ran`) it is reported when its step
        ends."""
        if self.current is not None and not ran:
            self._tell(self.current)
        self.current = None

    def _tell(self, iteration: Iteration) -> None:
        if self.listener is not None:
            self.listener(iteration)
