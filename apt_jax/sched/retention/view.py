"""The interface of retention policies: which ended requests' blocks stay.

When a call ends, its blocks become idle: they count as free until they are needed. A retention policy decides the order
in which sessions lose idle blocks, and may keep some from counting as free. It sees sessions, not blocks: a session
loses the end of its longest prefix first.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.costs.model import StepCosts
from apt_jax.sched.retention.sessions import SessionTable
from apt_jax.sched.view import SchedulerView

Rows = NDArray[np.int32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetentionView:
    """Everything that a decision about retention may depend on; arrays have one entry per row of `rows`."""

    now_s: float
    sessions: SessionTable
    rows: Rows
    """Sessions with idle groups on the device or groups in host memory."""
    awaited: NDArray[np.bool_]
    """True: a call of the session waits, and has never run."""
    waits: NDArray[np.bool_]
    """True: a call of the session waits, perhaps after a preemption."""
    costs: StepCosts
    block_sizes: Sequence[int]
    """Tokens per group, by kind."""
    blocks_per_group: Sequence[int]
    """Blocks per group, by kind."""
    has_host: bool = False
    """True: groups that leave the device go to host memory."""
    free_host_blocks: int = 0
    """Empty blocks of host memory."""

    @functools.cached_property
    def device_blocks(self) -> NDArray[np.int64]:
        """(n,) idle blocks on the device."""
        return self.sessions.device_groups[self.rows] @ np.array(self.blocks_per_group, np.int64)

    @functools.cached_property
    def host_blocks(self) -> NDArray[np.int64]:
        """(n,) blocks in host memory of groups that are only there."""
        return self.sessions.host_groups[self.rows] @ np.array(self.blocks_per_group, np.int64)

    @functools.cached_property
    def num_tokens(self) -> NDArray[np.int64]:
        """(n,) positions in these groups."""
        groups = self.sessions.device_groups[self.rows] + self.sessions.host_groups[self.rows]
        return groups @ np.array(self.block_sizes, np.int64)

    @functools.cached_property
    def age_s(self) -> NDArray[np.float64]:
        """(n,) seconds since the session's last call ended."""
        return np.maximum(self.now_s - self.sessions.ended_s[self.rows], 0.0)

    @functools.cached_property
    def saved_s(self) -> NDArray[np.float64]:
        """(n,) seconds that the next call saves because the groups are there: their prefill, less copies from host
        memory."""
        saved_s = prefill_s(self.costs, self.num_tokens.astype(np.float64))
        return np.maximum(saved_s - self.costs.load_per_block_s * self.host_blocks, 0.0)


def prefill_s(costs: StepCosts, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds that computing the first `num_tokens` positions of a prompt takes; in proportion to the number
    if the costs are not known."""
    if not costs.prefill_per_token_s and not costs.prefill_per_pair_s:
        return num_tokens * 1e-4
    return num_tokens * (costs.prefill_per_token_s + costs.prefill_per_pair_s * num_tokens)


def used_s(view: RetentionView) -> NDArray[np.float64]:
    """Return the (n,) times at which the sessions' blocks were last used; now if a call waits for them."""
    return np.where(view.waits, view.now_s, view.sessions.ended_s[view.rows])


class Retention(Protocol):
    """A retention policy."""

    name: str
    keeps: bool
    """False: `kept` keeps nothing and need not be called."""

    def returned(self, sessions: SessionTable, row: int, now_s: float) -> None:
        """Learn from the arrival of a session's next call; the columns still describe the state before it."""
        ...

    def started(self, sessions: SessionTable, row: int, waited_s: float, num_found: int) -> None:
        """Learn from the start of a session's call that has waited and found `num_found` positions cached."""
        ...

    def ended(self, view: RetentionView) -> None:
        """Decide for the only session of a view, one of whose calls has just ended; may set `until_s`. Groups that the
        session holds are not counted in the view yet."""
        ...

    def forgotten(self, sessions: SessionTable, row: int, now_s: float) -> None:
        """Learn that a session has ended, or that the engine has forgotten it."""
        ...

    def values(self, view: RetentionView) -> NDArray[np.float64]:
        """Return the (n,) values of the sessions: the session with the lowest value loses its blocks first."""
        ...

    def kept(self, view: RetentionView, scheduler: SchedulerView) -> Rows:
        """Return the sessions whose idle blocks on the device do not count as free; the first is released first."""
        ...


class LruRetention:
    """Least recently used first; keeps nothing. An engine with this policy alone keeps no table of sessions."""

    name = "lru"
    keeps = False

    def returned(self, sessions: SessionTable, row: int, now_s: float) -> None: ...

    def started(self, sessions: SessionTable, row: int, waited_s: float, num_found: int) -> None: ...

    def ended(self, view: RetentionView) -> None: ...

    def forgotten(self, sessions: SessionTable, row: int, now_s: float) -> None: ...

    def values(self, view: RetentionView) -> NDArray[np.float64]:
        return used_s(view)

    def kept(self, view: RetentionView, scheduler: SchedulerView) -> Rows:
        return view.rows[:0]
