"""Who may wait: requests that would have to wait too long, or behind too many of the same tenant, are refused at once.

Three bounds, checked when a request comes and before anything is allocated for it:

* of all: `max_num_queued_reqs` waiting requests and `max_num_queued_tokens` prompt tokens;
* of a tenant (an API key): as many waiting requests as `TENANT_SHARE` times the places still free, the dynamic threshold of
  shared buffers (Choudhury and Hahne, IEEE/ACM Trans. Networking 1998). One tenant alone gets nearly the whole queue, k of them
  that ask for more get about a k-th each, and whoever comes new finds room;
* of the objective: where the first token would come after the time allowed to it (`slo_admission`), by the cost model and by
  how much later than the model said nine in ten of the last requests were.

A refusal says when to come back: when as much has been done as is too much.

Who comes while a step runs need not wait for its end to be refused: `foresee` decides by an `Outlook`, what the engine published when
the step began, and by what has come since. It only ever refuses; whoever it lets pass the engine judges.
"""

import collections
import dataclasses
import logging
import math
from collections.abc import Mapping

from apt_jax.config import SchedulerConfig
from apt_jax.errors import InvalidRequestError, QueueFullError
from apt_jax.sched.view import StepCosts

logger = logging.getLogger(__name__)

TENANT_SHARE = 8.0
"""Waiting requests of a tenant over free places of the queue."""

_LEAST_RETRY_S, _MOST_RETRY_S = 0.1, 60.0
_WARN_EVERY_S = 10.0
_NUM_ERRORS, _FEWEST_ERRORS, _QUANTILE, _FORGET_S = 64, 8, 0.9, 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queue:
    """What stands before a new request."""

    num_waiting: int
    waiting_tokens: int
    """Prompt tokens of the waiting requests."""
    num_of_tenant: int
    """Waiting requests of the new one's tenant."""
    uncached_tokens: int
    """Positions that those requests must compute which come before the new one."""
    uncached_requests: int
    """How many they are."""
    missing_blocks: int
    """Blocks that they and the new one need beyond those that are free; negative: so many are left."""
    missing_seats: int
    """Seats of the batch likewise."""
    blocks_per_s: float
    """Blocks that ending requests give back, as lately; 0: not known."""
    requests_per_s: float
    """Requests that end, as lately; 0: not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """The queue while a step runs: nothing of it changes before the step has ended. For any thread."""

    queues: tuple[Queue, Queue]
    """What stands before a request with objectives, and before a best-effort one, which itself needs one seat and no blocks."""
    of_tenants: Mapping[str | None, int]
    """Waiting requests by tenant; those of nobody in particular may be missing."""
    costs: StepCosts
    margin_s: float
    """See `Admission.margin_s`."""

    def queue_before(
        self, coming: "Coming", *, blocks: int, best_effort: bool, tenant: str | None
    ) -> Queue:
        """What stands before one more request whose prompt needs `blocks`."""
        queue, which = self.queues[best_effort], int(best_effort)
        return dataclasses.replace(
            queue,
            num_waiting=queue.num_waiting + coming.num,
            waiting_tokens=queue.waiting_tokens + coming.tokens,
            num_of_tenant=self.of_tenants.get(tenant, 0) + coming.of_tenants[tenant],
            uncached_tokens=queue.uncached_tokens + coming.tokens_before[which],
            uncached_requests=queue.uncached_requests + coming.num_before[which],
            missing_blocks=queue.missing_blocks + coming.blocks_before[which] + blocks,
            missing_seats=queue.missing_seats + coming.num_before[which],
        )


class Coming:
    """Requests that have come since an `Outlook` was made; indexes are those of `Outlook.queues`."""

    def __init__(self) -> None:
        self.num = self.tokens = 0
        self.num_before, self.tokens_before, self.blocks_before = [0, 0], [0, 0], [0, 0]
        self.of_tenants: collections.Counter[str | None] = collections.Counter()

    def add(
        self,
        *,
        prompt_len: int,
        own_tokens: int,
        blocks: int,
        best_effort: bool,
        tenant: str | None,
    ) -> None:
        """One more; arguments as for `Admission.foresee`."""
        self.num += 1
        self.tokens += prompt_len
        self.of_tenants[tenant] += 1
        for before in (1,) if best_effort else (0, 1):
            self.num_before[before] += 1
            self.tokens_before[before] += own_tokens
            self.blocks_before[before] += blocks


class Admission:
    """Decides by counts, the cost model, and how wrong that was lately."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._errors: collections.deque[tuple[float, float]] = collections.deque(maxlen=_NUM_ERRORS)
        self._warned_s = -math.inf
        self.num_doubtful = 0
        """Requests let in although their objective looked out of reach (`slo_admission="warn"`)."""

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
        """Let a request in or not; returns the TTFT that was expected by the model alone, for `learn`, where the request had to
        wait for others and has an objective.

        Args:
            prompt_len: tokens of its prompt.
            own_tokens: of them those that are not cached.
            ttft_s: its objective; infinite: none.
            tenant: whose it is; None: nobody's in particular, which has no share.
            queue: as it is without the request.
            costs: of steps, zero where nothing is known.
            now_s: on the engine's clock.

        Raises:
            QueueFullError: come back later.
            InvalidRequestError: the objective is out of reach even alone.
        """
        self._check_counts(prompt_len, tenant, queue, costs)
        if self._config.slo_admission == "off" or not math.isfinite(ttft_s):
            return None
        alone_s = self.prefill_s(own_tokens, 1, costs)
        before_s = self._before_s(queue, costs)
        expected_s = alone_s + self.expected_wait_s(queue, costs, self.margin_s(now_s))
        if expected_s > ttft_s:
            self._doubt(own_tokens, ttft_s, alone_s, expected_s, now_s)
        return before_s + alone_s if before_s else None

    def foresee(
        self,
        outlook: Outlook,
        coming: Coming,
        *,
        prompt_len: int,
        own_tokens: int,
        blocks: int,
        ttft_s: float,
        best_effort: bool,
        tenant: str | None,
    ) -> QueueFullError | None:
        """Why a request that comes while a step runs would be refused; None: it would not be, or only the engine can tell. From any
        thread.

        Args:
            prompt_len, own_tokens, ttft_s, tenant: as for `check`.
            blocks: that its prompt needs.
        """
        queue = outlook.queue_before(coming, blocks=blocks, best_effort=best_effort, tenant=tenant)
        try:
            self._check_counts(prompt_len, tenant, queue, outlook.costs)
        except QueueFullError as error:
            return error
        if self._config.slo_admission != "on":
            return None
        alone_s = self.prefill_s(own_tokens, 1, outlook.costs)
        expected_s = alone_s + self.expected_wait_s(queue, outlook.costs, outlook.margin_s)
        if alone_s > ttft_s or expected_s <= ttft_s:  # out of reach for good: the engine says so
            return None
        return _out_of_reach_now(ttft_s, expected_s)

    def expected_wait_s(self, queue: Queue, costs: StepCosts, margin_s: float) -> float:
        """How long a new request waits for others by the cost model, seconds; its own prompt is not counted."""
        before_s = self._before_s(queue, costs)
        return max(before_s + margin_s, 0.0) if before_s else 0.0

    def learn(self, expected_s: float, ttft_s: float, now_s: float) -> None:
        """How long it took in the end."""
        self._errors.append((now_s, ttft_s - expected_s))

    def margin_s(self, now_s: float) -> float:
        """What to add to the model's word: batches end in bursts, policies put others first."""
        while self._errors and now_s - self._errors[0][0] > _FORGET_S:
            self._errors.popleft()
        errors = sorted(error for _, error in self._errors)
        return errors[int(_QUANTILE * len(errors))] if len(errors) >= _FEWEST_ERRORS else 0.0

    def _check_counts(
        self, prompt_len: int, tenant: str | None, queue: Queue, costs: StepCosts
    ) -> None:
        limit = self._config.max_num_queued_reqs
        free = limit - queue.num_waiting
        if free <= 0:
            raise QueueFullError(
                f"{queue.num_waiting} requests are waiting (--max-num-queued-reqs {limit})",
                _bounded(_over(1 - free, queue.requests_per_s)),
            )
        if tenant is not None and queue.num_of_tenant >= TENANT_SHARE * free:
            too_many = queue.num_of_tenant - TENANT_SHARE * free + 1
            raise QueueFullError(
                f"{queue.num_of_tenant} requests of this API key are waiting, its share of the queue (--max-num-queued-reqs {limit})",
                _bounded(_over(too_many / (1 + TENANT_SHARE), queue.requests_per_s)),
            )
        token_limit = self._config.max_num_queued_tokens
        # An empty queue takes any request: one longer than the limit could otherwise never be served.
        if token_limit is None or not queue.waiting_tokens:
            return
        too_many = queue.waiting_tokens + prompt_len - token_limit
        if too_many > 0:
            raise QueueFullError(
                f"{queue.waiting_tokens} prompt tokens are waiting (--max-num-queued-tokens {token_limit})",
                _bounded(self.prefill_s(min(too_many, queue.waiting_tokens), 1, costs)),
            )

    def _doubt(
        self, own_tokens: int, ttft_s: float, alone_s: float, expected_s: float, now_s: float
    ) -> None:
        asked = _asked(ttft_s)
        if self._config.slo_admission == "warn":
            self.num_doubtful += 1
            if now_s - self._warned_s >= _WARN_EVERY_S:
                self._warned_s = now_s
                logger.warning(
                    "%s is asked for, about %.0f ms are to be expected", asked, 1e3 * expected_s
                )
        elif alone_s > ttft_s:
            raise InvalidRequestError(
                "slo.ttft_ms",
                f"{asked} is out of reach: {own_tokens} prompt tokens take about {1e3 * alone_s:.0f} ms alone (--slo-admission)",
            )
        else:
            raise _out_of_reach_now(ttft_s, expected_s)

    def _before_s(self, queue: Queue, costs: StepCosts) -> float:
        """When a new request's turn would come if those that wait went first, whole prompts at a time: the time of their prompts,
        or until there are memory and seats for all, whichever is last."""
        before_s = self.prefill_s(queue.uncached_tokens, queue.uncached_requests, costs)
        if queue.missing_blocks > 0 and queue.blocks_per_s:
            before_s = max(before_s, queue.missing_blocks / queue.blocks_per_s)
        if queue.missing_seats > 0 and queue.requests_per_s:
            before_s = max(before_s, queue.missing_seats / queue.requests_per_s)
        return before_s

    def prefill_s(self, num_tokens: int, num_requests: int, costs: StepCosts) -> float:
        """Of steps full of prompts, the requests' tokens shared out evenly."""
        if num_tokens <= 0:
            return 0.0
        budget = self._config.max_num_batched_tokens
        num_steps = math.ceil(num_tokens / budget)
        chunks = max(num_requests, num_steps)
        # A prompt's chunks attend to what came before: all pairs of its positions, however it is cut.
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
        f"{_asked(ttft_s)} is out of reach now: about {1e3 * expected_s:.0f} ms are to be expected (--slo-admission)",
        _bounded(expected_s - ttft_s),
    )


def _over(count: float, per_s: float) -> float:
    return count / per_s if per_s > 0 else 1.0


def _bounded(seconds: float) -> float:
    return min(max(seconds, _LEAST_RETRY_S), _MOST_RETRY_S)
