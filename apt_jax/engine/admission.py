"""Admission control: rejects a request on arrival if the queue is full, if its tenant already has too many waiting
requests, or if it would wait too long.

Three limits are checked when a request arrives, before anything is allocated for it:

* total: at most `max_num_queued_reqs` waiting requests and `max_num_queued_tokens` prompt tokens;
* per tenant (an API key): at most `TENANT_SHARE` waiting requests per free place in the queue, a dynamic threshold as
  used for shared buffers (Choudhury and Hahne, IEEE/ACM Trans. Networking 1998). A single tenant can fill nearly the
  whole queue, k tenants that send too many requests get about 1/k of it each, and there is always a place for a new
  tenant;
* SLO: the expected TTFT must not exceed the request's TTFT SLO (`slo_admission`). The expected TTFT is the estimate of
  the cost model plus the 90th percentile of the model's recent errors.

A rejection includes a retry delay: the expected time until the excess has been processed.

A request that arrives while a step runs can be rejected before the step ends: `Admission.early_reject` decides from the
`QueueSnapshot` that the engine published when the step began, and from the requests that have arrived since. It can
only reject; the engine decides about all other requests.
"""

import collections
import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import HybridCache
from apt_jax.config import SchedulerConfig
from apt_jax.core.kinds import NO_KIND
from apt_jax.costs.model import StepCosts
from apt_jax.engine.request_states import RUNNING, WAITING, RequestStates
from apt_jax.errors import DuplicateRequestError, InvalidRequestError, QueueFullError, counted
from apt_jax.request import EngineRequest
from apt_jax.utils.clock import Clock

logger = logging.getLogger("apt_jax.engine")

TENANT_SHARE = 8.0
"""Maximum number of waiting requests of a tenant, per free place in the queue."""

_LEAST_RETRY_S, _MOST_RETRY_S = 0.1, 60.0
_WARN_EVERY_S = 10.0
_NUM_ERRORS, _FEWEST_ERRORS, _QUANTILE, _FORGET_S = 64, 8, 0.9, 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queue:
    """State of the queue in front of a new request."""

    num_waiting: int
    waiting_tokens: int
    """Prompt tokens of the waiting requests."""
    num_of_tenant: int
    """Waiting requests of the new request's tenant."""
    uncached_tokens: int
    """Number of uncached positions of the requests that are served before the new request."""
    uncached_requests: int
    """Number of requests that are served before the new request."""
    missing_blocks: int
    """Blocks that the new request and the requests before it need, minus the free blocks; may be negative."""
    missing_slots: int
    """Batch slots that the new request and the requests before it need, minus the free slots; may be negative."""
    blocks_per_s: float
    """Recent rate of blocks freed by finished requests, blocks per second; 0: unknown."""
    requests_per_s: float
    """Recent rate of finished requests, requests per second; 0: unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueueSnapshot:
    """Snapshot of the queue while a step runs; immutable, so readable from any thread."""

    queues: tuple[Queue, Queue]
    """State of the queue in front of a request with an SLO, and in front of a best-effort request. `missing_slots`
    includes the slot of the new request, but `missing_blocks` does not include its blocks."""
    of_tenants: Mapping[str | None, int]
    """Number of waiting requests of each tenant; requests without a tenant may be left out."""
    costs: StepCosts
    margin_s: float
    """Result of `Admission.margin_s` when the snapshot was made, seconds."""

    def queue_before(self, pending: "PendingArrivals", *, blocks: int, best_effort: bool, tenant: str | None) -> Queue:
        """Return the queue in front of the next request, whose prompt needs `blocks` blocks."""
        queue, which = self.queues[best_effort], int(best_effort)
        return dataclasses.replace(
            queue,
            num_waiting=queue.num_waiting + pending.num,
            waiting_tokens=queue.waiting_tokens + pending.tokens,
            num_of_tenant=self.of_tenants.get(tenant, 0) + pending.of_tenants[tenant],
            uncached_tokens=queue.uncached_tokens + pending.tokens_before[which],
            uncached_requests=queue.uncached_requests + pending.num_before[which],
            missing_blocks=queue.missing_blocks + pending.blocks_before[which] + blocks,
            missing_slots=queue.missing_slots + pending.num_before[which],
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionDemand:
    """Properties of a new request that admission needs."""

    prompt_len: int
    """Tokens of the prompt."""
    uncached_tokens: int
    """Prompt tokens that are not cached."""
    num_blocks: int
    """Cache blocks for the prompt."""
    best_effort: bool
    tenant: str | None


class PendingArrivals:
    """Counts of requests that arrived after a `QueueSnapshot`; lists are indexed like `QueueSnapshot.queues`."""

    def __init__(self) -> None:
        self.num = self.tokens = 0
        self.num_before, self.tokens_before, self.blocks_before = [0, 0], [0, 0], [0, 0]
        self.of_tenants: collections.Counter[str | None] = collections.Counter()

    def add(self, demand: AdmissionDemand) -> None:
        """Count a request."""
        self.num += 1
        self.tokens += demand.prompt_len
        self.of_tenants[demand.tenant] += 1
        for before in (1,) if demand.best_effort else (0, 1):
            self.num_before[before] += 1
            self.tokens_before[before] += demand.uncached_tokens
            self.blocks_before[before] += demand.num_blocks


class Admission:
    """Admits or rejects requests, based on counts, the cost model and the model's recent errors."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._errors: collections.deque[tuple[float, float]] = collections.deque(maxlen=_NUM_ERRORS)
        self._warned_s = -math.inf
        self.num_slo_at_risk_admitted = 0
        """Requests admitted although their SLO looked out of reach (`slo_admission="warn"`)."""

    def check(
        self,
        *,
        prompt_len: int,
        own_tokens: int,
        ttft_s: float,
        tenant: str | None,
        queue: Queue,
        costs: StepCosts,
        now_s: float,
    ) -> float | None:
        """Admit or reject a request.

        Args:
            prompt_len: tokens of its prompt.
            own_tokens: prompt tokens that are not cached.
            ttft_s: its TTFT SLO, seconds; infinite: no SLO.
            tenant: its tenant; None: no tenant, so the limit per tenant does not apply.
            queue: the queue in front of the request.
            costs: step costs; all zero: not known.
            now_s: the time on the engine's clock.

        Returns:
            The TTFT estimated by the model, without the margin, for `learn`; None: the request has no SLO or need not
            wait for others, or SLO admission is off.

        Raises:
            QueueFullError: the request was rejected and may be retried later.
            InvalidRequestError: the SLO cannot be met even without other requests.
        """
        self._check_counts(prompt_len, tenant, queue, costs)
        if self._config.slo_admission == "off" or not math.isfinite(ttft_s):
            return None
        alone_s = self.prefill_s(own_tokens, 1, costs)
        before_s = self._before_s(queue, costs)
        expected_s = alone_s + self.expected_wait_s(queue, costs, self.margin_s(now_s))
        if expected_s > ttft_s:
            self._handle_unreachable_slo(own_tokens, ttft_s, alone_s, expected_s, now_s)
        return before_s + alone_s if before_s else None

    def early_reject(
        self,
        snapshot: QueueSnapshot,
        pending: PendingArrivals,
        demand: AdmissionDemand,
        ttft_s: float,
    ) -> QueueFullError | None:
        """Return the error if a request that arrives while a step runs must be rejected; None: the engine decides.
        Callable from any thread.

        Args:
            ttft_s: the request's TTFT SLO, seconds.
        """
        queue = snapshot.queue_before(
            pending, blocks=demand.num_blocks, best_effort=demand.best_effort, tenant=demand.tenant
        )
        try:
            self._check_counts(demand.prompt_len, demand.tenant, queue, snapshot.costs)
        except QueueFullError as error:
            return error
        if self._config.slo_admission != "on":
            return None
        alone_s = self.prefill_s(demand.uncached_tokens, 1, snapshot.costs)
        expected_s = alone_s + self.expected_wait_s(queue, snapshot.costs, snapshot.margin_s)
        if alone_s > ttft_s or expected_s <= ttft_s:  # never reachable: the engine rejects it
            return None
        return _out_of_reach_now(ttft_s, expected_s)

    def expected_wait_s(self, queue: Queue, costs: StepCosts, margin_s: float) -> float:
        """Estimate how long a new request waits for others, seconds, without the time for its own prompt."""
        before_s = self._before_s(queue, costs)
        return max(before_s + margin_s, 0.0) if before_s else 0.0

    def learn(self, expected_s: float, ttft_s: float, now_s: float) -> None:
        """Record the expected TTFT of a request, returned by `check`, and its measured TTFT."""
        self._errors.append((now_s, ttft_s - expected_s))

    def margin_s(self, now_s: float) -> float:
        """Return the 90th percentile of the recent errors of the expected TTFT, seconds; 0 if too few are known."""
        while self._errors and now_s - self._errors[0][0] > _FORGET_S:
            self._errors.popleft()
        errors = sorted(error for _, error in self._errors)
        return errors[int(_QUANTILE * len(errors))] if len(errors) >= _FEWEST_ERRORS else 0.0

    def _check_counts(self, prompt_len: int, tenant: str | None, queue: Queue, costs: StepCosts) -> None:
        limit = self._config.max_num_queued_reqs
        free = limit - queue.num_waiting
        if free <= 0:
            raise QueueFullError(
                f"the queue is full with {counted(queue.num_waiting, 'request')} (--max-num-queued-reqs {limit})",
                _bounded(_over(1 - free, queue.requests_per_s)),
            )
        if tenant is not None and queue.num_of_tenant >= TENANT_SHARE * free:
            too_many = queue.num_of_tenant - TENANT_SHARE * free + 1
            raise QueueFullError(
                f"the queue already holds {counted(queue.num_of_tenant, 'request')} from this API key, which is the key's full share (--max-num-queued-reqs {limit})",
                _bounded(_over(too_many / (1 + TENANT_SHARE), queue.requests_per_s)),
            )
        token_limit = self._config.max_num_queued_tokens
        # An empty queue accepts any request: a request longer than the limit could otherwise never be served.
        if token_limit is None or not queue.waiting_tokens:
            return
        too_many = queue.waiting_tokens + prompt_len - token_limit
        if too_many > 0:
            raise QueueFullError(
                f"{queue.waiting_tokens} prompt tokens are waiting (--max-num-queued-tokens {token_limit})",
                _bounded(self.prefill_s(min(too_many, queue.waiting_tokens), 1, costs)),
            )

    def _handle_unreachable_slo(
        self, own_tokens: int, ttft_s: float, alone_s: float, expected_s: float, now_s: float
    ) -> None:
        asked = _asked(ttft_s)
        if self._config.slo_admission == "warn":
            self.num_slo_at_risk_admitted += 1
            if now_s - self._warned_s >= _WARN_EVERY_S:
                self._warned_s = now_s
                logger.warning("%s is requested, but about %.0f ms are expected", asked, 1e3 * expected_s)
        elif alone_s > ttft_s:
            raise InvalidRequestError(
                "slo.ttft_ms",
                f"{asked} is out of reach: {own_tokens} prompt tokens alone take about {1e3 * alone_s:.0f} ms (--set slo_admission)",
            )
        else:
            raise _out_of_reach_now(ttft_s, expected_s)

    def _before_s(self, queue: Queue, costs: StepCosts) -> float:
        """Estimate the time until a new request runs, seconds, if all waiting requests are served first: until their
        prompts have been computed or there are enough blocks and slots for all, whichever is later."""
        before_s = self.prefill_s(queue.uncached_tokens, queue.uncached_requests, costs)
        if queue.missing_blocks > 0 and queue.blocks_per_s:
            before_s = max(before_s, queue.missing_blocks / queue.blocks_per_s)
        if queue.missing_slots > 0 and queue.requests_per_s:
            before_s = max(before_s, queue.missing_slots / queue.requests_per_s)
        return before_s

    def prefill_s(self, num_tokens: int, num_requests: int, costs: StepCosts) -> float:
        """Estimate the time to compute prompts of equal length in prefill steps of maximum size, seconds."""
        if num_tokens <= 0:
            return 0.0
        budget = self._config.max_num_batched_tokens
        num_steps = math.ceil(num_tokens / budget)
        chunks = max(num_requests, num_steps)
        # Chunks attend to all earlier positions, so the number of pairs does not depend on how a prompt is split.
        pairs = num_tokens**2 / max(num_requests, 1)
        return (
            num_steps * costs.prefill_base_s
            + chunks * costs.prefill_per_request_s
            + num_tokens * costs.prefill_per_token_s
            + pairs * costs.prefill_per_pair_s
        )


def _asked(ttft_s: float) -> str:
    return f"a first token within {1e3 * ttft_s:.0f} ms"


def _out_of_reach_now(ttft_s: float, expected_s: float) -> QueueFullError:
    return QueueFullError(
        f"{_asked(ttft_s)} is out of reach now: about {1e3 * expected_s:.0f} ms are expected (--set slo_admission)",
        _bounded(expected_s - ttft_s),
    )


def _over(count: float, per_s: float) -> float:
    return count / per_s if per_s > 0 else 1.0


def _bounded(seconds: float) -> float:
    return min(max(seconds, _LEAST_RETRY_S), _MOST_RETRY_S)


class AdmissionController:
    """Admits or rejects the engine's new requests, and reports the state of its queue.

    Args:
        admission: checks the limits of the queue, and estimates the TTFT.
        config: limits, and the mode of SLO admission.
        states: live requests.
        cache: the pool.
        clock: the current time.
        offered: available cache kinds, the kind with the fewest blocks per position first.
        can_mask: True: requests may use structured output and token rules such as `bad_words`.
    """

    def __init__(
        self,
        admission: Admission,
        config: SchedulerConfig,
        states: RequestStates,
        cache: HybridCache,
        clock: Clock,
        offered: Sequence[int],
        *,
        can_mask: bool,
    ) -> None:
        self._admission = admission
        self._config = config
        self._states = states
        self._cache = cache
        self._clock = clock
        self._offered = offered
        self.can_mask = can_mask

    def check(self, request: EngineRequest, costs: StepCosts) -> tuple[int, float | None]:
        """Check a new request, and reject it if it cannot be served.

        Prompt and `max_tokens` together must fit the pool: then the request can always finish, because the policy can
        give it the whole pool. With a kind that needs more blocks than the pool has, it would be preempted again and
        again.

        Returns:
            The only kind that can hold the request (`NO_KIND`: any kind can), and the result of `Admission.check`.

        Raises:
            DuplicateRequestError: a live request has this id.
            InvalidRequestError: the request can never be served.
            QueueFullError: the request may be retried later.
        """
        prompt_len, max_tokens = int(request.prompt_token_ids.size), request.params.max_tokens
        if request.request_id in self._states.by_id:
            raise DuplicateRequestError(request.label)
        if prompt_len < 1:
            raise InvalidRequestError("prompt", "must hold at least one token")
        if max_tokens < 1:
            raise InvalidRequestError("max_tokens", f"{max_tokens} must be at least 1")
        if (request.grammar is not None or request.has_token_rules) and not self.can_mask:
            field = "structured_outputs" if request.grammar is not None else "bad_words"
            raise InvalidRequestError(field, "this engine does not know the size of its vocabulary")
        cache, offered = self._cache, self._offered
        total, pool = prompt_len + max_tokens, cache.pool.num_blocks
        drop_oversized = [kind for kind in offered if cache.blocks_needed(total, kind) <= pool]
        if not drop_oversized:
            least = cache.blocks_needed(total, offered[0])
            raise InvalidRequestError(
                "max_tokens",
                f"prompt and output of up to {total} tokens take {least} cache blocks of {cache.block_sizes[offered[0]]} tokens, but the pool has {pool}",
            )
        blocks = min(cache.blocks_needed(prompt_len, kind) for kind in drop_oversized)
        expected_ttft_s = self._admission.check(
            prompt_len=prompt_len,
            own_tokens=prompt_len - self.num_cached(request),
            ttft_s=request.slo.ttft_s,
            tenant=request.tenant,
            queue=self._queue_before(request, blocks),
            costs=costs,
            now_s=self._clock.now_s(),
        )
        return drop_oversized[0] if len(drop_oversized) < len(offered) else NO_KIND, expected_ttft_s

    def num_cached(self, request: EngineRequest) -> int:
        """Return the number of cached prompt tokens of a new request; 0 if admission does not need the number."""
        asks = self._config.slo_admission != "off" and math.isfinite(request.slo.ttft_s)
        return self._states.prefixes.num_cached(request) if asks else 0

    def min_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` positions take in the cheapest available kind."""
        return min(self._cache.blocks_needed(num_tokens, kind) for kind in self._offered)

    def queue_snapshot(self, costs: StepCosts) -> QueueSnapshot:
        """Return a snapshot of the queue, for early rejection while a step runs."""
        waiting = self._states.rows(WAITING)
        with_slo = waiting[~self._states.table.best_effort[waiting]]
        queue = self._queue(waiting, with_slo, 0, 0)
        last = queue if with_slo.size == waiting.size else self._queue(waiting, waiting, 0, 0)
        return QueueSnapshot(
            queues=(queue, last),
            of_tenants=self._by_tenant(waiting),
            costs=costs,
            margin_s=self._admission.margin_s(self._clock.now_s()),
        )

    def expected_wait_s(self, costs: StepCosts) -> float | None:
        """Estimate the queueing time of a new request with an SLO, seconds; None without a cost model."""
        if costs == StepCosts():
            return None
        snapshot = self.queue_snapshot(costs)
        return self._admission.expected_wait_s(snapshot.queues[0], costs, snapshot.margin_s)

    def _queue_before(self, request: EngineRequest, blocks: int) -> Queue:
        """Return the state of the queue in front of a new request whose prompt needs `blocks` blocks."""
        states = self._states
        waiting = states.rows(WAITING)
        tenant, num_of_tenant = request.tenant, 0
        if tenant is not None:
            number = states.tenants.get(tenant, -1)
            num_of_tenant = int(np.count_nonzero(states.table.tenant[waiting] == number))
        # Best-effort requests are served after requests with an SLO.
        before = waiting if request.slo_class == "be" else waiting[~states.table.best_effort[waiting]]
        return self._queue(waiting, before, blocks, num_of_tenant)

    def _by_tenant(self, rows: NDArray[Any]) -> dict[str | None, int]:
        tenants = self._states.tenants
        if len(tenants) == 1:
            return {}
        counts = np.bincount(self._states.table.tenant[rows], minlength=len(tenants)).tolist()
        return dict(zip(tenants, counts, strict=True))

    def _queue(self, waiting: NDArray[Any], before: NDArray[Any], blocks: int, num_of_tenant: int) -> Queue:
        states, cache = self._states, self._cache
        kind = self._offered[0]  # the policy may give all requests the kind that takes the fewest blocks
        groups = -(-states.table.num_tokens[before] // cache.block_sizes[kind])
        needed = int(groups.sum()) * cache.blocks_per_group[kind] + blocks
        times, per_s = states.finish_times_s, 0.0
        # The interval ends now, so the rate falls if no request has finished recently.
        if len(times) > 1 and self._clock.now_s() > times[0]:
            per_s = len(times) / (self._clock.now_s() - times[0])
        num_running = states.count(RUNNING)
        held = cache.pool.num_blocks - cache.num_free
        return Queue(
            num_waiting=int(waiting.size),
            waiting_tokens=int(states.table.prompt_len[waiting].sum()),
            num_of_tenant=num_of_tenant,
            uncached_tokens=states.uncached_tokens(before),
            uncached_requests=int(before.size),
            missing_blocks=needed - cache.num_free,
            missing_slots=int(before.size) + 1 + num_running - self._config.max_num_seqs,
            blocks_per_s=per_s * held / num_running if num_running else 0.0,
            requests_per_s=per_s,
        )
