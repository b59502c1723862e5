"""Schedulers that differ from vLLM's (`vllm-v1`) in one rule."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.policies.vllm_v1 import BUDGET, VllmV1Policy
from apt_jax.sched.step_packer import RequestNotes, Rows, blocks_after, num_that_fit, step_plan
from apt_jax.sched.view import Plan, SchedulerView


class LeastComputedPolicy(VllmV1Policy):
    """`vllm-v1` that preempts the request with the fewest computed tokens (vllm-project/vllm#54644).

    A preemption costs the recomputation of the computed tokens, so the request with the fewest is preempted first;
    among equal requests, the latest arrival. It may be the request that needs blocks, or a request that already got
    tokens of this step, which then return to the budget.

    Differences from vLLM: there the loop ends when the visited request itself is preempted; here later requests still
    run. A preempted request keeps its place by arrival; vLLM puts it before all waiting requests.

    Starvation: the oldest request can be preempted again and again, as long as later requests have computed more
    tokens. It is the first to be admitted whenever enough blocks are free.
    """

    def __init__(self, name: str = "least-computed", budget: int = BUDGET, reserve: float | None = None) -> None:
        super().__init__(name, budget, reserve)

    def schedule(self, view: SchedulerView) -> Plan:
        plan = super().schedule(view)
        if not plan.preempt.size:
            return plan
        # Tokens of preempted requests go to later requests if there are blocks for them.
        kept = view.running[~np.isin(view.running, plan.preempt)]
        budget = min(self.budget, view.max_num_batched_tokens)
        num_tokens = self._shared(view, kept, budget)
        free = view.free_blocks + int(view.table.num_blocks[plan.preempt].sum())
        growth = blocks_after(view, kept, num_tokens) - view.table.num_blocks[kept]
        num_tokens[np.cumsum(growth) > free] = 0
        return step_plan(view, kept, num_tokens, view.table.kind[kept], plan.preempt)

    def _kept(self, view: SchedulerView, num_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        running = view.running
        order = np.lexsort((view.table.rank[running], -view.table.num_cached[running]))
        num = num_that_fit(view, running[order], num_tokens[order])
        kept = np.zeros(running.size, np.bool_)
        kept[order[:num]] = True
        return kept


class HrrnPolicy(VllmV1Policy):
    """`vllm-v1` with admission by highest response ratio next, as added to SGLang (sgl-project/sglang#32911).

    Waiting requests are admitted in decreasing order of the ratio of age to work. The work is the number of prompt
    tokens that are not cached. The age is measured in prompt tokens too: the number that the engine has computed since
    the request arrived. So short prompts come first, but the ratio of a long prompt rises while others are served, and
    no request starves. Requests with equal ratios are admitted by arrival.

    Differences from SGLang: there a step is either a prefill or a decode, and if more than 128 requests wait, they are
    admitted by arrival (`first_come_above`), because SGLang is slow at matching and sorting them.

    Args:
        name: name of the policy.
        budget: maximum number of tokens per step, limited to `max_num_batched_tokens`.
        first_come_above: number of waiting requests above which requests are admitted by arrival; SGLang: 128. None: no
            limit.
        reserve: see `VllmV1Policy`.
    """

    def __init__(
        self,
        name: str = "hrrn",
        budget: int = BUDGET,
        first_come_above: int | None = None,
        reserve: float | None = None,
    ) -> None:
        super().__init__(name, budget, reserve)
        self.first_come_above = first_come_above
        self._computed = 0
        self._arrived_at = RequestNotes(np.int64)

    def schedule(self, view: SchedulerView) -> Plan:
        waiting, notes = view.waiting, self._arrived_at
        new = notes.new(view.table, waiting)
        notes.values[waiting[new]] = self._computed
        plan = super().schedule(view)
        prefills = view.remaining(plan.rows) > 1
        self._computed += int(plan.num_tokens[prefills].sum())
        return plan

    def _in_order(self, view: SchedulerView) -> Rows:
        waiting = view.waiting
        if self.first_come_above is not None and waiting.size > self.first_come_above:
            return waiting
        work = view.table.num_tokens.take(waiting)
        hits = view.table.cached_prefix_tokens
        if hits.any():
            work = work - hits.take(waiting, axis=0).max(axis=1)
        age = self._computed - self._arrived_at.values.take(waiting)
        return waiting[np.argsort(-(age / np.maximum(work, 1)), kind="stable")]


class VtcPolicy(VllmV1Policy):
    """`vllm-v1` with fair admission between tenants by a Virtual Token Counter (Sheng et al., OSDI'24).

    Each tenant has a counter of the service it has received, by default 1 per prompt token and 2 per output token. The
    next request to be admitted is the first request of the waiting tenant with the lowest counter; its prompt is
    counted immediately (Algorithm 2). A tenant cannot save up service while it has no requests in the queue: when it
    comes back, its counter is raised to the lowest counter of the waiting tenants or, if no tenant waits, to the
    counter of the tenant that left the queue last. The difference in service between two tenants that always have
    waiting requests is bounded (Theorem 4.4).

    A tenant is the key that a request came with (`EngineRequest.tenant`); all requests without a key are one tenant.
    With a single tenant the policy acts like `vllm-v1`. `apt-jax simulate --tenants N` draws tenants.

    Preemption is not covered by the paper, whose engine reserves the longest output and preempts no request: here
    recomputation is not counted again, because the tenant did not ask for it, and a preempted request does not raise a
    counter.

    Args:
        name: name of the policy.
        budget: maximum number of tokens per step, limited to `max_num_batched_tokens`.
        input_weight: weight of a prompt token.
        output_weight: weight of an output token.
        reserve: see `VllmV1Policy`.
    """

    def __init__(
        self,
        name: str = "vtc",
        budget: int = BUDGET,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
        reserve: float | None = None,
    ) -> None:
        super().__init__(name, budget, reserve)
        self.input_weight, self.output_weight = input_weight, output_weight
        self.counters = np.zeros(1)
        """(tenants,) weighted number of tokens that each tenant has received."""
        self._waits = np.zeros(1, np.bool_)
        self._left_last = 0
        self._counted = RequestNotes(np.bool_)

    def schedule(self, view: SchedulerView) -> Plan:
        table, waiting = view.table, view.waiting
        tenant = table.tenant.take(waiting)
        self._grow(np.concatenate([tenant, table.tenant.take(view.running)]))
        self._lift(tenant, self._counted.new(table, waiting))
        plan = super().schedule(view)
        self._counted.new(table, plan.rows)
        first = plan.rows[~self._counted.values[plan.rows]]
        self._counted.values[first] = True
        served = table.tenant.take(first)
        np.add.at(self.counters, served, self.input_weight * table.prompt_len.take(first))
        done = plan.rows[plan.num_tokens == view.remaining(plan.rows, plan.kind)]
        np.add.at(self.counters, table.tenant.take(done), self.output_weight)

        still = np.zeros_like(self._waits)
        still[tenant[~np.isin(waiting, plan.rows)]] = True
        gone = served[~still[served]]
        if gone.size:
            self._left_last = int(gone[-1])
        self._waits = still
        return plan

    def _grow(self, tenant: NDArray[np.int32]) -> None:
        """Add counters for new tenants."""
        if tenant.size and (most := int(tenant.max())) >= self.counters.size:
            more = most + 1 - self.counters.size
            self.counters = np.concatenate([self.counters, np.zeros(more)])
            self._waits = np.concatenate([self._waits, np.zeros(more, np.bool_)])

    def _lift(self, tenant: NDArray[np.int32], new: NDArray[np.bool_]) -> None:
        """Raise the counters of tenants that have joined the queue since the last step."""
        waits = self._waits
        come = tenant[new & ~waits[tenant]]
        if not come.size:
            return
        first, *others = dict.fromkeys(come.tolist())
        least = self.counters[waits].min() if waits.any() else self.counters[self._left_last]
        self.counters[first] = max(self.counters[first], least)
        if not waits.any():
            least = self.counters[first]
        self.counters[others] = np.maximum(self.counters[others], least)

    def _in_order(self, view: SchedulerView) -> Rows:
        table, waiting = view.table, view.waiting
        if self.counters.size == 1:
            return waiting
        tenant = table.tenant.take(waiting)
        cost = self.input_weight * table.prompt_len.take(waiting)
        cost[self._counted.values[waiting]] = 0.0
        # Value that the tenant's counter will have when the request's turn comes: counters only rise, and the lowest is
        # always next.
        by_tenant = np.argsort(tenant, kind="stable")
        tenant, cost = tenant[by_tenant], cost[by_tenant]
        before = np.cumsum(cost) - cost
        first = np.flatnonzero(np.r_[True, tenant[1:] != tenant[:-1]])
        start = np.repeat(before[first], np.diff(np.r_[first, tenant.size]))
        turn = np.empty(waiting.size)
        turn[by_tenant] = self.counters[tenant] + before - start
        return waiting[np.argsort(turn, kind="stable")]
