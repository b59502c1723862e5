"""Admission by future memory: a request starts only if memory lasts until all requests reach their expected lengths.

The eviction-free schedulers in InferMax reserve the maximum length of each request, I + O - 1 positions (§4.1), and
InferMax's own scheduler reserves an estimate (§6). Both compare the sum of all reservations with the pool. But requests
end at different times. It suffices that the sum fits the pool at every future time, as in the Past-Future scheduler
(Gong et al., ASPLOS'25): later requests grow into the memory that earlier requests have freed. The sum has its maximum
right before a request ends, so it is computed at these times only.

With known lengths, or with `quantile` = 1, no request is ever preempted for memory: see `Reservation`.
"""

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.step_packer import Rows
from apt_jax.sched.view import SchedulerView


def expected_tokens(view: SchedulerView, rows: Rows, quantile: float) -> NDArray[np.int32]:
    """Return the (n,) expected total numbers of prompt and output tokens of `rows`.

    The expected number of output tokens is `max_tokens` if the length is known (`RequestTable.known_length`), else
    `OutputLengths.quantile`, limited to `max_tokens`. The total is at least one token more than the row has now, unless
    `max_tokens` is reached; if too few requests have been recorded for an estimate, it is this minimum.

    Args:
        view: the scheduler's view.
        rows: (n,) rows of requests.
        quantile: quantile of the output length, above 0; 1: `max_tokens`.
    """
    table = view.table
    most = table.max_tokens_total.take(rows)
    if quantile >= 1 or not rows.size:
        return most
    known = table.known_length.take(rows)
    if known.all():
        return most
    outputs = table.lengths.quantile(table.histograms.take(rows, axis=0), table.num_outputs.take(rows), quantile)
    room = most - table.prompt_len.take(rows)
    total = table.prompt_len.take(rows) + np.minimum(outputs, room)
    least = np.minimum(table.num_tokens.take(rows) + np.int32(1), most)
    return np.where(known, most, np.maximum(total, least))


class Reservation:
    """Decides how many waiting requests may start.

    No request is preempted if outputs do not exceed the expected lengths, because the computed sum is an upper bound:

    * All decoding requests take one token in the same steps, so they end in the expected order, and after at most the
      expected number of steps. If a step has fewer tokens than slots, some requests could fall behind; in this case the
      final lengths of all requests are added up.
    * A prompt holds all its blocks from its start. Because the time of its first token is uncertain, its length is
      computed from the earliest possible time, and its end from the latest, after all started prompts are done.
    * Blocks that a waiting request would share with other requests count as its own, because the other requests may end
      first.

    Args:
        quantile: see `expected_tokens`.
    """

    def __init__(self, quantile: float) -> None:
        if not 0 < quantile <= 1:
            raise ValueError(f"reserve={quantile} must lie in (0, 1]")
        self.quantile = quantile

    def num_admissible(
        self, view: SchedulerView, waiting: Rows, kind: NDArray[np.integer], prompt_budget: int | None
    ) -> int:
        """Return how many of the first `waiting` requests may start in addition to all running requests.

        Args:
            view: the scheduler's view.
            waiting: (n,) waiting rows in decreasing order of priority; the blocks for their prompts are free.
            kind: (n,) cache kinds that they take.
            prompt_budget: minimum number of prompt tokens per step while prompts are left, in addition to one token
                per decoding request; None: decodes wait until all started prompts are done.
        """
        if not waiting.size:
            return 0
        future = _Future(view, waiting, kind, self.quantile)
        if view.max_num_seqs > view.max_num_batched_tokens:
            prompt_budget = 0
        # The sum grows with every request, so the number is found by bisection; 1 and n are tried first, which
        # usually suffices.
        least = 0 if view.running.size else 1
        if least == 0 and not future.fits(1, prompt_budget):
            return 0
        low, high = 1, waiting.size + 1
        middle = high - 1
        while high - low > 1:
            if future.fits(middle, prompt_budget):
                low = middle
            else:
                high = middle
            middle = (low + high) // 2
        return low


class _Future:
    """Number of blocks that running and waiting requests will hold from the next step on."""

    def __init__(self, view: SchedulerView, waiting: Rows, kind: NDArray[np.integer], quantile: float) -> None:
        table = view.table
        rows = np.concatenate([view.running, waiting])
        self._view = view
        self._num_running = view.running.size
        self._kind = np.concatenate([table.kind.take(view.running), kind]).astype(np.intp)
        self._tokens = table.num_tokens.take(rows)
        self._last = expected_tokens(view, rows, quantile) - 1  # the last token is not cached
        self._steps = self._last - self._tokens + 1
        self._left = table.num_tokens.take(rows) - table.num_cached.take(rows)
        self._is_prompt = self._left > 1
        self._is_prompt[self._num_running :] = True
        self._shared = table.num_shared.take(rows)
        self._shared[self._num_running :] = 0
        self._capacity = view.free_blocks + int(table.num_blocks.take(view.running).sum())

    def fits(self, num_waiting: int, prompt_budget: int | None) -> bool:
        """Return True if the first `num_waiting` waiting requests can start; see `Reservation.num_admissible`."""
        n = self._num_running + num_waiting
        tokens, last, steps, is_prompt = self._tokens[:n], self._last[:n], self._steps[:n], self._is_prompt[:n]
        kind, shared = self._kind[:n], self._shared[:n]
        final = self._view.blocks_for(last, kind) - shared
        if int(final.sum()) <= self._capacity:
            return True
        if prompt_budget is not None and prompt_budget < 1:
            return False
        if prompt_budget is None:
            # A first token comes before the other decodes continue, or together with their next tokens if the last
            # chunk of the prompt is a single token, which looks like a decode.
            begin, ends = tokens - 1 + is_prompt, steps
        else:
            wait = -(-int(self._left[:n][is_prompt].sum()) // prompt_budget)
            begin, ends = tokens - 1, steps + np.where(is_prompt, max(wait - 1, 0), 0)
        least = np.where(is_prompt, tokens, 0)
        times = np.unique(ends)[:, None]
        held = np.minimum(np.maximum(begin + times, least), last)
        # Like `SchedulerView.blocks_for`, with one gather for all times; dividing by a scalar is faster.
        sizes = self._view.block_sizes
        groups = -(-held // (sizes[0] if (sizes == sizes[0]).all() else sizes[kind]))
        blocks = groups * self._view.blocks_per_group[kind] - shared
        if self._view.windows is not None:
            blocks += self._view.windows.num_blocks(held)
        peak = (blocks * (ends >= times)).sum(axis=1)
        return bool(peak.max() <= self._capacity)
