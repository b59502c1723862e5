"""Schedulers that use slack, the time left until the next tokens are due: FairBatching and QoServe."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import KV
from apt_jax.costs.model import prefix_step_s
from apt_jax.sched.policies.edf import in_order, next_deadline_s
from apt_jax.sched.step_packer import (
    RequestNotes,
    Rows,
    admissible,
    blocks_after,
    num_that_fit,
    share_tokens,
    split_running,
    step_plan,
)
from apt_jax.sched.view import Plan, SchedulerView


def line_deadline_s(view: SchedulerView, rows: Rows) -> NDArray[np.float64]:
    """Return the (n,) deadlines in seconds of the next tokens: arrival + TTFT + (tokens so far) * TBT.

    The deadline of a best-effort request is infinite. A request that is ahead of its deadlines keeps its lead, unlike
    with `next_deadline_s`.
    """
    table = view.table
    num = table.num_outputs.take(rows)
    later_s = np.zeros(rows.size)
    np.multiply(num, table.slo_tbt_s.take(rows), out=later_s, where=num > 0)
    due_s = table.arrival_s.take(rows) + table.slo_ttft_s.take(rows) + later_s
    due_s[table.best_effort.take(rows)] = np.inf
    return due_s


def _with_blocks(
    view: SchedulerView,
    rows: Rows,
    num_tokens: NDArray[np.int32],
    kind: NDArray[np.int8],
    stay: Rows,
) -> Plan:
    """Return the plan of a step; running requests are preempted if too few blocks are free for `rows`.

    Args:
        view: the scheduler's view.
        rows: (n,) rows of the step. Waiting rows among them must fit the free blocks in addition to all running rows.
        num_tokens: (n,) tokens of each row.
        kind: (n,) cache kind of each row.
        stay: all running rows; the last is preempted first.
    """
    table = view.table
    of_row = np.zeros(table.capacity, np.int32)
    of_row[rows] = num_tokens
    num = num_that_fit(view, stay, of_row[stay])
    if num == stay.size:
        return step_plan(view, rows, num_tokens, kind, stay[:0])
    if not of_row[stay[:num]].any():  # no row that stays was in the step: add all of them
        of_row[stay] = share_tokens(view.remaining(stay), view.max_num_batched_tokens)
        num = num_that_fit(view, stay, of_row[stay])
    kept = stay[:num]
    return step_plan(view, kept, of_row[kept], table.kind[kept], stay[num:])


def _prompts(
    view: SchedulerView, decoding: Rows, partial: Rows, waiting: Rows
) -> tuple[Rows, NDArray[np.int32], NDArray[np.int8]]:
    """Return the prompts that may run: all of `partial`, and the longest prefix of `waiting` that fits the free blocks.

    Blocks count as free if neither `decoding` needs them in this step nor `partial` for its whole prompts.

    Returns:
        The rows, the tokens that each has left to compute, and their kinds.
    """
    table = view.table
    left = view.remaining(partial)
    growth = blocks_after(view, decoding, np.ones(decoding.size, np.int32)).sum()
    growth += blocks_after(view, partial, left).sum()
    free = view.free_blocks + int(table.num_blocks[view.running].sum() - growth)
    started, wanted, kind = admissible(view, waiting, free)
    if not partial.size:
        return started, wanted, kind
    return (
        np.concatenate([partial, started]),
        np.concatenate([left, wanted]),
        np.concatenate([table.kind[partial], kind]),
    )


class FairBatchingPolicy:
    """FairBatching: prompts use the time by which decodes are ahead of their deadlines (Lyu et al., arXiv 2510.14392).

    1. *Deadlines*: output token j is due at arrival + TTFT + j * TBT, so a request that got tokens early has slack.
    2. *Time of a step*: it is max(least slack of the decodes, least TBT of the decodes). The most urgent decode is then
       on time unless its slack is below that TBT, and steps are long enough to be efficient. The cost model, which is
       linear in new and in cached tokens, predicts the time.
    3. *Batch*: urgent decodes (slack below that time plus the least TBT) come first, then prompts, then other decodes,
       each group by slack, as long as the predicted time stays within the time of the step. The prompt at the limit
       gets a chunk.

    Rules for cases that the paper does not cover, and differences due to the engine:

    * Without decodes the time of a step is not limited. C (`max_num_batched_tokens`) always limits a step, and is the
      only limit if no cost model is known (all costs are zero).
    * The first row of the step always runs; if it is a prompt, it gets at least `LEAST_CHUNK` tokens.
    * Memory is managed as in vLLM, on which the paper's prototype is built: a prompt starts if its blocks are free in
      addition to the blocks that all running requests still need for their prompts. If blocks run out, the latest
      arrival is preempted, and no request is admitted in that step.
    * The Prefill Admission Budget, for routers of several engines, is not part of a policy.
    * End-to-end objectives, which the paper does not have, are not read.

    Starvation: prompts wait while urgent decodes take all the time, but only until these decodes end.

    Args:
        name: name of the policy.
    """

    LEAST_CHUNK = 16

    def __init__(self, name: str = "fairbatching") -> None:
        self.name = name

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        decoding, partial = split_running(view)
        slack_s = line_deadline_s(view, decoding) - view.now_s
        least_tbt_s = float(table.slo_tbt_s.take(decoding).min(initial=np.inf))
        time_s = max(float(slack_s.min(initial=np.inf)), least_tbt_s)
        by_slack = in_order(view, decoding, slack_s)
        decoding, slack_s = decoding[by_slack], slack_s[by_slack]
        urgent = slack_s < time_s + least_tbt_s

        waiting = view.waiting
        if waiting.size:
            waiting = waiting[in_order(view, waiting, line_deadline_s(view, waiting))]
        prompts, wanted, kind = _prompts(view, decoding, partial, waiting)
        if partial.size:
            order = in_order(view, prompts, line_deadline_s(view, prompts))
            prompts, wanted, kind = prompts[order], wanted[order], kind[order]
        rows = np.concatenate([decoding[urgent], prompts, decoding[~urgent]])
        num_tokens = np.ones(rows.size, np.int32)
        kinds = table.kind.take(rows)
        first, last = (num_urgent := int(urgent.sum())), num_urgent + prompts.size
        num_tokens[first:last], kinds[first:last] = wanted, kind
        num_tokens = self._within(view, rows, num_tokens, kinds, slice(first, last), time_s)
        return _with_blocks(view, rows, num_tokens, kinds, view.running)

    def _within(
        self,
        view: SchedulerView,
        rows: Rows,
        num_tokens: NDArray[np.int32],
        kind: NDArray[np.int8],
        prompts: slice,
        time_s: float,
    ) -> NDArray[np.int32]:
        """Return `num_tokens`, reduced to the time and token limits of the step; 0: the row does not run."""
        table, costs = view.table, view.costs
        start = table.num_cached.take(rows)
        waits = table.kind.take(rows) < 0
        start[waits] = table.cached_prefix_tokens[rows[waits], kind[waits]]
        num_tokens = share_tokens(num_tokens, view.max_num_batched_tokens)
        if not np.isfinite(time_s) or not rows.size:
            return num_tokens
        # Urgent decodes and prompts, up to the first that takes too long.
        head = slice(0, prompts.stop)
        times_s = prefix_step_s(costs, num_tokens[head], start[head], kind[head])
        num = int(np.searchsorted(np.maximum.accumulate(times_s), time_s, side="right"))
        if num < prompts.stop:
            cut = num_tokens[num]
            num_tokens[max(num, 1) : prompts.stop] = 0
            if num >= prompts.start:  # find the largest chunk of that prompt that fits the time
                low, high = (min(self.LEAST_CHUNK, int(cut)) if num == 0 else 0), int(cut)
                through = slice(0, num + 1)
                while low < high:
                    num_tokens[num] = middle = (low + high + 1) // 2
                    needed_s = costs.step_s(num_tokens[through], start[through], kind[through])
                    low, high = (middle, high) if needed_s <= time_s else (low, middle - 1)
                num_tokens[num] = low
        # Other decodes, in the time left.
        tail = np.arange(prompts.stop, rows.size)
        if tail.size:
            inside = np.concatenate([np.flatnonzero(num_tokens[head]), tail])
            num_tokens[tail] = 1
            tokens = share_tokens(num_tokens[inside], view.max_num_batched_tokens)
            times_s = prefix_step_s(costs, tokens, start[inside], kind[inside])
            num = int(np.searchsorted(np.maximum.accumulate(times_s), time_s, side="right"))
            num_tokens[inside] = tokens
            num_tokens[inside[max(num, inside.size - tail.size, 1) :]] = 0
        return num_tokens


class QoServePolicy:
    """QoServe, first called Niyama: chunks as large as the slack allows (Goel et al., ASPLOS'26, arXiv 2503.22562).

    * *Dynamic chunks*. All decodes run, and their least slack bounds the step: its total size is the largest in `SIZES`
      whose predicted time, times `MARGIN`, is within the slack. Prompts get the tokens of that size that decodes leave.
      A decode is due at arrival + max(TTFT objective, actual TTFT) + (tokens so far) * TBT.
    * *Hybrid priority* of prompts: they are ordered by arrival + TTFT objective + alpha * (tokens left to compute), a
      mixture of earliest deadline first (alpha = 0) and shortest remaining prompt first. Partly computed and waiting
      prompts are in one order, so a more urgent prompt can interrupt another, which keeps its cache. Decodes are never
      interrupted (selective preemption).
    * *Eager relegation*: a request that has no token yet and can no longer be on time, at the recent rate of prompt
      tokens per second (a moving average), comes after all other requests from then on.

    The rules are those of the paper; sizes, margin, alpha = 8 ms per token and the weight of the average are those of
    the authors' scheduler (microsoft/sarathi-serve, `niyama_asplos2026`). Rules for cases that the paper does not
    cover, and differences due to the engine:

    * Objectives are TTFT and TBT. The paper's tiers with an objective for the last token, and relegation by hints about
      importance, are not implemented. A best-effort request has no deadline and comes after all requests that can be on
      time.
    * As in the authors' scheduler, a step has the largest size if there are no decodes, and the smallest if there is no
      slack. With few free blocks the sizes end at 512; in pools smaller than `FEW_TOKENS`, such as that of OPT-13B on
      40 GB, this is always the case.
    * The authors' engine reserves memory for a prompt when it starts and preempts no request. Here a waiting prompt
      starts if its blocks are free in addition to the blocks that running requests still need for their prompts. If
      decodes do not fit, running requests lose their cache: relegated requests first, then the latest arrivals. A
      preempted request that has tokens is due TBT after its last token and is not relegated.

    Starvation: relegated requests wait as long as others fill the engine, by design.

    Args:
        name: name of the policy.
        alpha_s: delay of a prompt's priority per token left to compute, seconds.
    """

    SIZES = (128, *range(256, 2049, 256), 2552)
    SMALL_SIZES = (128, 256, 384, 512)
    MARGIN = 1.2
    FEW_TOKENS = 32_000
    """Number of positions of one request in the free blocks below which `SMALL_SIZES` are used."""
    OLD_WEIGHT = 0.995
    """Weight of the old value in the moving average of prompt tokens per second."""
    TOKENS_PER_S = 8500.0
    """Initial value of the moving average if no cost model is known."""

    def __init__(self, name: str = "qoserve", alpha_s: float = 0.008) -> None:
        self.name = name
        self.alpha_s = alpha_s
        self._tokens_per_s = 0.0
        self._last_s = 0.0
        self._last_tokens = 0
        self._relegated = RequestNotes(np.bool_)
        self._first_s = RequestNotes(np.float64)

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        self._observe(view)
        self._relegated.new(table, view.running)
        self._relegate(view)
        decoding, partial = split_running(view)
        waiting = view.waiting
        if waiting.size:
            waiting = waiting[self._order(view, waiting)]
        prompts, wanted, kind = _prompts(view, decoding, partial, waiting)
        if partial.size:
            order = self._order(view, prompts)
            prompts, wanted, kind = prompts[order], wanted[order], kind[order]

        decoding = decoding[: view.max_num_batched_tokens]
        due_s = self._due_s(view, decoding)
        chunk = self._chunk(view, decoding, due_s, prompts) if prompts.size else 0
        rows = np.concatenate([decoding, prompts])
        num_tokens = np.concatenate([np.ones(decoding.size, np.int32), share_tokens(wanted, chunk)])
        kinds = np.concatenate([table.kind[decoding], kind])
        relegated = self._relegated.values[view.running]
        stay = np.concatenate([view.running[~relegated], view.running[relegated]])
        plan = _with_blocks(view, rows, num_tokens, kinds, stay)
        chunks = view.remaining(plan.rows) > 1
        self._last_tokens, self._last_s = int(plan.num_tokens[chunks].sum()), view.now_s
        return plan

    def _observe(self, view: SchedulerView) -> None:
        """Update the moving average of prompt tokens per second with the last step."""
        if not self._tokens_per_s:
            per_token_s = view.costs.prefill_per_token_s
            self._tokens_per_s = 1 / per_token_s if per_token_s > 0 else self.TOKENS_PER_S
        took_s = view.now_s - self._last_s
        if self._last_tokens and took_s > 0:
            new = self._last_tokens / took_s
            self._tokens_per_s += (1 - self.OLD_WEIGHT) * (new - self._tokens_per_s)

    def _relegate(self, view: SchedulerView) -> None:
        """Mark waiting requests that can no longer be on time."""
        table, waiting = view.table, view.waiting
        self._relegated.new(table, waiting)
        work_s = view.remaining(waiting) / self._tokens_per_s
        due_s = table.arrival_s.take(waiting) + table.slo_ttft_s.take(waiting)
        late = (table.num_outputs.take(waiting) == 0) & (view.now_s + work_s > due_s)
        self._relegated.values[waiting[late]] = True

    def _order(self, view: SchedulerView, rows: Rows) -> NDArray[np.intp]:
        table = view.table
        key = next_deadline_s(view, rows) + self.alpha_s * view.remaining(rows)
        return np.lexsort((table.rank.take(rows), key, self._relegated.values.take(rows)))

    def _chunk(self, view: SchedulerView, decoding: Rows, due_s: NDArray[np.float64], prompts: Rows) -> int:
        """Return the number of prompt tokens of this step.

        It is the largest size with which `decoding` rows are on time, minus the number of these rows.
        """
        table = view.table
        sizes = self.SIZES if view.most_tokens(view.free_blocks, KV) >= self.FEW_TOKENS else self.SMALL_SIZES
        chosen = sizes[-1]
        if decoding.size:
            slack_s = float((due_s - view.now_s).min())
            start = np.append(table.num_cached.take(decoding), table.num_cached[prompts[0]])
            kind = np.append(table.kind.take(decoding), max(table.kind[prompts[0]], 0))
            num_tokens = np.ones(start.size, np.int32)
            low, high = 0, len(sizes) - 1 if slack_s > 0 else 0
            while low < high:
                middle = (low + high + 1) // 2
                num_tokens[-1] = max(sizes[middle] - decoding.size, 1)
                fits = self.MARGIN * view.costs.step_s(num_tokens, start, kind) <= slack_s
                low, high = (middle, high) if fits else (low, middle - 1)
            chosen = sizes[low]
        return max(min(chosen, view.max_num_batched_tokens) - decoding.size, 0)

    def _due_s(self, view: SchedulerView, decoding: Rows) -> NDArray[np.float64]:
        """Return the (n,) deadlines in seconds of the next tokens of decodes, counted from the first token if it was
        late."""
        table = view.table
        new = self._first_s.new(table, decoding)
        self._first_s.values[decoding[new]] = view.now_s
        promised_s = table.arrival_s.take(decoding) + table.slo_ttft_s.take(decoding)
        late_s = np.maximum(self._first_s.values.take(decoding) - promised_s, 0.0)
        return line_deadline_s(view, decoding) + late_s
