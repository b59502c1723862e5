"""Early rejection: a request that arrives during a step and would be rejected after the step is rejected at once.

The engine thread takes a snapshot of the queue when it dispatches a step. Threads that submit requests compare each
request with the snapshot and the requests that have arrived since. The gate only rejects; the engine decides about all
requests that pass.
"""

from collections.abc import Iterable

from apt_jax.engine import Engine
from apt_jax.engine.admission import AdmissionDemand, PendingArrivals, QueueSnapshot
from apt_jax.errors import QueueFullError
from apt_jax.request import EngineRequest

_MAX_PROMPT_LEN = 8192
"""Maximum number of prompt tokens that the gate checks. Longer prompts pass it, because looking up their cached
prefixes would delay an event loop."""


class AdmissionGate:
    """Rejects requests while a step runs. Unless stated otherwise, methods are called with the inbox's lock held.

    Args:
        engine: only its `has`, `num_cached`, `min_blocks_for` and `admission.early_reject` are called.

    Attributes:
        snapshot: state of the queue when the running step was dispatched; None between steps, when nothing is rejected.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.snapshot: QueueSnapshot | None = None
        self._pending = PendingArrivals()
        """Requests in the inbox that have arrived since `snapshot`."""

    def demand_of(self, request: EngineRequest) -> AdmissionDemand:
        """Return a request's demand for tokens and blocks. Can be called from any thread, preferably without the
        lock."""
        prompt_len = uncached = int(request.prompt_token_ids.size)
        if self.snapshot is not None and prompt_len <= _MAX_PROMPT_LEN:
            uncached -= self._engine.num_cached(request)
        return AdmissionDemand(
            prompt_len=prompt_len,
            uncached_tokens=uncached,
            num_blocks=self._engine.min_blocks_for(prompt_len),
            best_effort=request.slo_class == "be",
            tenant=request.tenant,
        )

    def early_reject(self, request: EngineRequest, demand: AdmissionDemand) -> QueueFullError | None:
        """Return the error if a request is rejected early; None: it passes and counts as pending."""
        # Duplicate ids are left to the engine, whose error does not invite a retry.
        if self.snapshot is None:
            return None
        if demand.prompt_len <= _MAX_PROMPT_LEN and not self._engine.has(request.request_id):
            rejection = self._engine.admission.early_reject(self.snapshot, self._pending, demand, request.slo.ttft_s)
            if rejection is not None:
                return rejection
        self._pending.add(demand)
        return None

    def begin_step(self, snapshot: QueueSnapshot, pending: Iterable[EngineRequest]) -> None:
        """Use this snapshot from now on; `pending`: the requests in the inbox that the snapshot does not include."""
        self.snapshot, self._pending = snapshot, PendingArrivals()
        for request in pending:
            self._pending.add(self.demand_of(request))

    def end_step(self) -> None:
        """Reject nothing until the next step begins, because finished requests have freed capacity."""
        self.snapshot = None
