"""Choice of a waiting request's cache kind by the value of the saved memory (docs/apt-plus.md, rule 2)."""

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.sched.step_packer import Rows, allowed_kinds
from apt_jax.sched.view import SchedulerView

TYPICAL_TOKENS = 256
"""Minimum number of tokens assumed for a request when its memory is valued, because requests grow."""


def kinds_by_cost(view: SchedulerView, rows: Rows) -> NDArray[np.int8]:
    """Return the cache kind that each waiting row should take.

    Assume that the pool is full of N typical requests with KV and that a step takes time T. A request of m tokens that
    takes the hidden kind instead saves a share s of the pool, in which s N more requests run in every step. The rate
    N / T rises by the factor 1 + s, but the step grows by the extra time t(m) of the request's hidden cache and by the
    time of the additional requests. The hidden kind is better if

        s T > t(m) + s N (per request + per token * typical length)

    But if one kind has a cached prefix that is longer by more than half of the prompt, that kind is taken.

    Args:
        view: the scheduler's view.
        rows: (n,) rows of waiting requests.

    Returns:
        (n,) `KV` or `HIDDEN`.
    """
    allowed = allowed_kinds(view, rows)
    kind = np.where(allowed[:, KV], KV, HIDDEN).astype(np.int8)
    both = allowed[:, KV] & allowed[:, HIDDEN]
    if not both.any():
        return kind
    hidden = view.kinds[HIDDEN]
    tokens = np.maximum(view.table.num_tokens[rows], TYPICAL_TOKENS)
    saved = view.blocks_for(tokens, KV) - view.blocks_for(tokens, HIDDEN)
    share = saved / view.total_blocks
    extra_s = hidden.extra_base_s + hidden.extra_per_token_s * tokens
    # T minus the part of all N requests is the base time, which does not grow with the number of requests.
    kind[both & (share * view.costs.decode_base_s > extra_s)] = HIDDEN
    hits = view.table.cached_prefix_tokens[rows]
    if hits.any():
        # Not computing half of the prompt is worth more than the kinds differ in reads or memory.
        gain = hits[np.arange(rows.size), 1 - kind] - hits[np.arange(rows.size), kind]
        other = both & (gain > view.table.num_tokens[rows] // 2)
        kind[other] = 1 - kind[other]
    return kind
