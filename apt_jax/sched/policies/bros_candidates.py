"""Requests that `bros` may put into a step: their work, priority order, slack, and predicted step times (BROS §4)."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN
from apt_jax.costs.model import StepCosts, prefix_step_s
from apt_jax.sched.step_packer import Rows
from apt_jax.sched.view import SchedulerView


@dataclasses.dataclass(eq=False)
class Candidates:
    """Requests in order of priority, with the work of each in this step; arrays of shape (n,)."""

    rows: Rows
    kind: NDArray[np.int8]
    num_tokens: NDArray[np.int32]
    start: NDArray[np.int32]
    slack_s: NDArray[np.float64]
    """Remaining time: seconds that this step may take if the request is to meet its deadline; inf for best-effort
    requests, -inf for overdue requests."""

    holds: NDArray[np.bool_]
    """True if the request holds cache."""
    need: NDArray[np.int32]
    """Blocks that the request must get: for its next positions or, if more, its checkpointed blocks; for the whole
    prompt if it waits."""
    load: NDArray[np.int32]
    """Blocks that are copied from host memory before the request runs: M^cpu."""

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> "Candidates":
        return Candidates(*(getattr(self, name)[index] for name in _ARRAYS))

    def join(self, other: "Candidates") -> "Candidates":
        return Candidates(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in _ARRAYS))

    @property
    def prompts(self) -> NDArray[np.bool_]:
        return (self.num_tokens > 1) | (self.start == 0)


_ARRAYS = tuple(field.name for field in dataclasses.fields(Candidates))


class TokenGroups:
    """Records the completion time of the last token group of each request.

    Args:
        size: number of tokens per group; the first token of a request is a group of its own.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._rank = np.zeros(0, np.int64)
        self._group = np.zeros(0, np.int32)
        self._since_s = np.zeros(0)

    def since_s(self, view: SchedulerView, rows: Rows, delivered: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return the (n,) completion times in seconds of the last groups; before the first token, the arrivals.

        Args:
            view: the scheduler's view.
            rows: (n,) rows of requests.
            delivered: (n,) number of delivered output tokens of each row.
        """
        table = view.table
        grown = table.capacity - self._rank.size
        if grown:
            self._rank = np.concatenate([self._rank, np.full(grown, -1)])
            self._group = np.concatenate([self._group, np.zeros(grown, np.int32)])
            self._since_s = np.concatenate([self._since_s, np.zeros(grown)])
        group, rank = (delivered - 1) // self._size, table.rank[rows]
        new = (self._rank[rows] != rank) | (self._group[rows] != group)
        which = rows[new]
        self._rank[which], self._group[which] = rank[new], group[new]
        self._since_s[which] = table.last_token_s[which]
        return self._since_s[rows]


def poll(pending: NDArray[np.float64], waiting: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Merge `pending` and `waiting` in ascending order of keys (BROS §4.2, Fig. 8).

    The pending keys are sorted; the waiting keys are checked, and sorted only if they are not in order. Among equal
    keys, pending requests come before waiting requests; otherwise the order of each array is kept.

    Args:
        pending: (p,) keys of requests that hold cache.
        waiting: (w,) keys of requests without cache, in order of arrival.
        most: maximum number of waiting requests.

    Returns:
        (p + min(w, most),) indices into the concatenation of `pending` and `waiting`.
    """
    first = pending.argsort(kind="stable")
    in_order = (waiting[1:] >= waiting[:-1]).all()
    second = np.arange(waiting.size) if in_order else waiting.argsort(kind="stable")
    second = second[: max(most, 0)]
    order = np.empty(first.size + second.size, np.intp)
    at = np.searchsorted(waiting[second], pending[first]) + np.arange(first.size)
    free = np.ones(order.size, np.bool_)
    free[at] = False
    order[at] = first
    order[free] = second + first.size
    return order


def iteration_s(costs: StepCosts, step: Candidates) -> float:
    """Return the time of an iteration in seconds: the longer of execution and copies from host memory (BROS §4.1)."""
    step_s = costs.step_s(step.num_tokens, step.start, step.kind)
    return max(step_s, costs.transfer_s(0, int(step.load.sum()))) if step.load.any() else step_s


def end_times_s(view: SchedulerView, asked: Candidates) -> NDArray[np.float64]:
    """Return the (n,) durations in seconds of steps of the first 1, 2, .. n candidates, with copies from the host."""
    step_s = prefix_step_s(view.costs, asked.num_tokens, asked.start, asked.kind)
    if asked.load.any():
        loaded = asked.load.cumsum()
        load_s = view.costs.load_base_s * (loaded > 0) + view.costs.load_per_block_s * loaded
        step_s = np.maximum(step_s, load_s)
    return step_s


def alone_s(costs: StepCosts, asked: Candidates) -> NDArray[np.float64]:
    """Return the (n,) durations in seconds of steps with only one candidate each, without copies from the host."""
    c, m = asked.num_tokens.astype(np.float64), asked.start.astype(np.float64)
    hidden = asked.kind == HIDDEN
    window_s = costs.decode_per_window_token_s * np.minimum(m + 1, costs.window_tokens) + costs.experts_read_s(1)
    decode_s = window_s + np.where(
        hidden,
        costs.decode_per_hidden_request_s + (m + 1) * costs.decode_per_hidden_token_s,
        costs.decode_per_request_s + (m + 1) * costs.decode_per_token_s,
    )
    prefix_s = np.where(hidden, costs.prefill_per_hidden_prefix_s, costs.prefill_per_kv_prefix_s)
    chunk_s = costs.prefill_per_request_s + costs.prefill_per_token_s * c + prefix_s * m
    chunk_s += costs.prefill_per_pair_s * c * (c + 2 * m)
    return np.where(asked.prompts, costs.prefill_base_s + chunk_s, costs.decode_base_s + decode_s)


def among(view: SchedulerView, rows: Rows, others: Rows) -> NDArray[np.bool_]:
    """Return the (n,) mask of `rows` that are in `others`."""
    chosen = np.zeros(view.table.capacity, np.bool_)
    chosen[others] = True
    return chosen[rows]
