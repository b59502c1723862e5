"""Admission by the memory that requests will need: a request begins only if all can go on to their expected ends.

InferMax's eviction-free schedulers reserve each request's greatest length, I + O - 1 positions (§4.1), and its own one
an estimate (§6); both add up what all requests reserve. But requests end at different times. What must fit the pool is
the greatest sum over future time, as in the Past-Future scheduler (Gong et al., ASPLOS'25): those that end
later grow into what those before them gave back. That sum is greatest right before some request
ends, so it is taken there.

With lengths that are known, or `quantile` = 1, nobody is ever preempted for memory: see `Reservation`.
"""

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.step_packer import Rows
from apt_jax.sched.view import SchedulerView


def expected_tokens(view: SchedulerView, rows: Rows, quantile: float) -> NDArray[np.int32]:
    """(n,) tokens of prompt and output that `rows` are expected to end with, at least one more than they have.

    A declared length (`RequestTable.known_length`) is taken as it is. Else it is the quantile of
    `OutputLengths.quantile`, at most `max_tokens`; of a request about which too little is known the next token alone.

    Args:
        view: the state.
        rows: requests.
        quantile: above 0; 1: all that `max_tokens` allows.
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
    """Decides how many waiting requests may begin.

    Nobody is preempted where lengths do not exceed what is expected, because the sum is an upper bound:

    * All requests that decode take one token in the same steps. So they end in the order and at the distance that is
      reckoned with, unless they end early. Where a step has fewer tokens than there are slots, some could stay behind;
      then all greatest lengths are added up.
    * A prompt has all its blocks from the beginning. When its first token comes is not certain: what it holds is that
      of the earliest time, and it ends at the latest, when all prompts that have begun are done.
    * What a waiting request would share with others counts as its own: they may end first.

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
        """Return how many of the first `waiting` requests may begin beside all running ones.

        Args:
            view: the state.
            waiting: by falling priority, with room for their prompts.
            kind: (n,) that they take.
            prompt_budget: tokens of prompts that every step computes at least while there are any, beside a token of
                each request that decodes; None: decodes wait until all prompts that have begun are done.
        """
        if not waiting.size:
            return 0
        future = _Future(view, waiting, kind, self.quantile)
        if view.max_num_seqs > view.max_num_batched_tokens:
            prompt_budget = 0
        # Every request more makes the sum greater: of most steps the first decides, of others all can begin.
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
    """Blocks of running and waiting requests from the coming step on."""

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
        """Return True if the first waiting ones can begin."""
        n = self._num_running + num_waiting
        tokens, last, steps, is_prompt = self._tokens[:n], self._last[:n], self._steps[:n], self._is_prompt[:n]
        kind, shared = self._kind[:n], self._shared[:n]
        final = self._view.blocks_for(last, kind) - shared
        if int(final.sum()) <= self._capacity:
            return True
        if prompt_budget is not None and prompt_budget < 1:
            return False
        if prompt_budget is None:
            # A first token comes before the decodes of the others go on; or with the next of them, where the last chunk
            # of a prompt is one token, which looks like a decode.
            begin, ends = tokens - 1 + is_prompt, steps
        else:
            wait = -(-int(self._left[:n][is_prompt].sum()) // prompt_budget)
            begin, ends = tokens - 1, steps + np.where(is_prompt, max(wait - 1, 0), 0)
        least = np.where(is_prompt, tokens, 0)
        times = np.unique(ends)[:, None]
        held = np.minimum(np.maximum(begin + times, least), last)
        # As `SchedulerView.blocks_for`, with one gather for all times; one number divides faster.
        sizes = self._view.block_sizes
        groups = -(-held // (sizes[0] if (sizes == sizes[0]).all() else sizes[kind]))
        blocks = groups * self._view.blocks_per_group[kind] - shared
        peak = (blocks * (ends >= times)).sum(axis=1)
        return bool(peak.max() <= self._capacity)
