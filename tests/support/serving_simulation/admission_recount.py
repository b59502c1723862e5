"""Admission decided again, by counting requests one by one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from apt_jax.engine.admission import TENANT_SHARE
from apt_jax.engine.request_states import WAITING
from apt_jax.errors import QueueFullError
from apt_jax.request import EngineRequest
from tests.support.simulation_harness import expect

if TYPE_CHECKING:
    from tests.support.serving_simulation.replica import Replica


class AdmissionRecount:
    """Admission decided again, by counting requests one by one; with `slo_admission="off"` every rejection by count must
    have its reason."""

    def __init__(self, replica: "Replica") -> None:
        self._replica = replica
        self._engine = replica.parts.engine
        self._config = replica.parts.config.scheduler
        self.added_s: dict[EngineRequest, float] = {}
        self.num_added = self.num_rejected = 0
        self._base: list[EngineRequest] = []
        self._pending: list[EngineRequest] = []
        engine: Any = self._engine
        gate: Any = replica.engine._gate
        guarded = replica.world.guarded
        self._add, engine.add_request = engine.add_request, guarded(self._checked_add)
        self._begin, gate.begin_step = gate.begin_step, self._begin_step
        self._early, gate.early_reject = gate.early_reject, guarded(self._checked_early)

    def _waiting(self) -> list[EngineRequest]:
        states = self._engine.states
        return [s.request for s in states.by_id.values() if states.status[s.row] == WAITING]

    def _is_full(self, request: EngineRequest, waiting: Sequence[EngineRequest]) -> bool:
        config = self._config
        free = config.max_num_queued_reqs - len(waiting)
        if free <= 0:
            return True
        of_tenant = sum(r.tenant == request.tenant for r in waiting)
        if request.tenant is not None and of_tenant >= TENANT_SHARE * free:
            self._replica.world.note["rejected: share of the tenant"] += 1
            return True
        tokens = sum(r.prompt_token_ids.size for r in waiting)
        most = config.max_num_queued_tokens
        return most is not None and tokens > 0 and tokens + request.prompt_token_ids.size > most

    def _checked_add(self, request: EngineRequest) -> None:
        is_full = self._is_full(request, self._waiting())
        note = self._replica.world.note
        try:
            self._add(request)
        except Exception as error:
            self.num_rejected += 1
            note[f"engine rejects: {type(error).__name__}"] += 1
            if isinstance(error, QueueFullError) and self._config.slo_admission != "on":
                expect(is_full, f"{request.request_id} was rejected ({error}) although there is room")
            raise
        expect(not is_full, f"{request.request_id} was admitted although the queue or its share is full")
        self.num_added += 1
        self.added_s[request] = self._engine.clock.now_s()

    def _begin_step(self, snapshot: Any, pending: Any) -> None:
        pending = list(pending)
        self._base, self._pending = self._waiting(), pending
        self._begin(snapshot, pending)

    def _checked_early(self, request: EngineRequest, demand: Any) -> Any:
        is_open = not self._replica.engine._is_running  # between two iterations nothing is rejected early
        is_full = not is_open and self._is_full(request, [*self._base, *self._pending])
        error = self._early(request, demand)
        if error is not None:
            self.num_rejected += 1
            self._replica.world.note["rejected while a step ran"] += 1
            expect(
                is_full or self._config.slo_admission == "on",
                f"{request.request_id} was rejected early ({error}) although there is room",
            )
        elif not is_open:
            self._pending.append(request)
        return error
