"""The interface of policies: the view that they read and the plan that they return. NumPy only: no device, no block
ids, no clock.

The engine owns one `RequestTable`; a policy reads it through a `SchedulerView` and returns a `Plan`.
docs/writing_a_policy.md is the tutorial.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import CacheKindSpec
from apt_jax.costs.model import StepCosts
from apt_jax.sched.request_table import RequestTable

INTERFACE_VERSION = 1
"""Version of the interface for policies from outside this package: `SchedulerView` and all that it holds, `Plan` and its
promises, `Policy`, and what docs/writing_a_policy.md names of `apt_jax.sched.step_packer`. A policy declares the one
that it was written for (`interface_version`).

It rises when a policy that was right could misread a view or have its plan refused: something is removed, renamed or
means something else, a promise of `Plan` is added or made stricter, a field of `Plan` has no default. It does not rise
for columns, fields with a default and functions that are added.
"""


class SharedBlocks:
    """Blocks that a real-time and a best-effort request may share (BROS §5; `apt_jax.cache.block_sharing`).

    Args:
        takeable: gives `takeable` of a kind; asked at most once for each, and only if somebody wants to know.
    """

    def __init__(self, takeable: Callable[[int], NDArray[np.int32]]) -> None:
        self._takeable = functools.cache(takeable)

    def takeable(self, kind: int) -> NDArray[np.int32]:
        """(g,) rows of best-effort requests: one for each group of blocks that real-time requests of a kind may take beside
        the free ones, in the order in which they are taken (`FindPreemptBlock`).

        What is overwritten there has been saved, and its request gets it back, in new blocks, when it next runs
        (`RequestTable.checkpointed_blocks`). Real-time requests of a step get their blocks before best-effort ones, in
        whatever order `Plan.rows` has them. Of a request that begins with a part of a cached group, the first new group
        is a copy and cannot be one of these.
        """
        return self._takeable(kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerView:
    """Everything one scheduling decision may depend on."""

    now_s: float
    table: RequestTable
    waiting: NDArray[np.int32]
    """Rows of requests without cache, by rank. Preempted ones are among them."""
    running: NDArray[np.int32]
    """Rows of requests that hold cache, by rank: decoding ones and those whose prompt is only partly computed."""
    free_blocks: int
    """Blocks that can be handed out, including blocks of idle cached prefixes."""
    total_blocks: int
    """Usable blocks of the pool (the reserved one not counted)."""
    block_size: int
    """Keys, or values, that a block holds: token positions of a group with the KV kind."""
    kinds: Sequence[CacheKindSpec]
    """Indexed by `KV` and `HIDDEN`."""
    max_num_seqs: int
    max_num_batched_tokens: int
    costs: StepCosts = StepCosts()
    shared_blocks: int = 0
    """Blocks that two or more running requests hold. Free ones, `num_blocks` of all running requests and these make up
    the pool. So taking cache from requests frees at least their `num_blocks`."""
    hidden_block_size: int | None = None
    """Layer inputs that a block holds; None: `block_size`."""
    can_convert: bool = False
    """True if `Plan.convert` may be used: both kinds are on offer, and the executor can do it."""
    sharing: SharedBlocks | None = None
    """None: no two requests share blocks but those of cached prefixes."""

    @functools.cached_property
    def block_sizes(self) -> NDArray[np.int32]:
        """(num_kinds,) token positions of a group."""
        hidden = self.block_size if self.hidden_block_size is None else self.hidden_block_size
        return np.array([self.block_size, hidden], np.int32)[: len(self.kinds)]

    @functools.cached_property
    def blocks_per_group(self) -> NDArray[np.int32]:
        """(num_kinds,) blocks that a group takes."""
        return np.array([kind.blocks_per_group for kind in self.kinds], np.int32)

    @functools.cached_property
    def offered(self) -> NDArray[np.bool_]:
        """(num_kinds,) whether the kind is on offer."""
        return np.array([kind.offered for kind in self.kinds])

    def remaining(self, rows: NDArray[np.int32], kind: NDArray[np.integer] | int | None = None) -> NDArray[np.int32]:
        """Tokens not computed yet: 1 for a decoding request, more for one in prefill. Shape of `rows`.

        With `kind`, that which waiting requests would take: without what they would find cached of it.
        """
        table = self.table
        left = table.num_tokens.take(rows) - table.num_cached.take(rows)
        return left if kind is None else left - table.cached_prefix_tokens[rows, kind]

    def blocks_for(self, tokens: NDArray[np.int32], kind: NDArray[np.integer] | int) -> NDArray[np.int32]:
        """Blocks that `tokens` positions take with `kind`: `blocks_per_group * ceil(tokens / block size)`.

        Args:
            tokens: of any shape.
            kind: of that shape, or one for all.
        """
        same = self.hidden_block_size in (None, self.block_size)
        size = self.block_size if same else self.block_sizes[kind]  # one number divides faster
        return -(-tokens // size) * self.blocks_per_group[kind]

    def block_options(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """(n, num_kinds): `blocks_for` of (n,) `tokens` with each kind, made along memory and transposed."""
        if self.hidden_block_size in (None, self.block_size):
            groups = -(-tokens // self.block_size)
        else:
            groups = -(-tokens[None] // self.block_sizes[:, None])
        return (groups * self.blocks_per_group[:, None]).T


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One iteration: the rows that run, their numbers of tokens and cache kinds, and the requests preempted before.

    Promises that the engine checks before it acts:
      * `rows` are live, unique, and none is in `preempt`; `1 <= num_tokens <= remaining` (of the row's kind: cached
        prefixes are not computed again); their sum is at most `max_num_batched_tokens`, their count with other cache
        holders at most `max_num_seqs`;
      * a row that holds cache keeps its kind (to change it: `convert`, or preempt now and run it in a later iteration);
      * rows in `convert` are unique, among `rows`, hold the hidden kind (which `kind` says), and could be held by the
        whole pool as keys and values at their greatest length; there are none unless `SchedulerView.can_convert`;
      * the blocks needed fit `free_blocks` plus `num_blocks` of what is in `preempt`, and, where blocks are shared, plus
        the groups in `SharedBlocks.takeable` that real-time rows take. A row in `convert` needs the KV
        blocks of all its positions, the new one among them, beside its hidden blocks: those are free for the next step.
        Where they do not fit after all (a failed allocation, a prefix that was shared with a preempted request), the
        engine defers the rows that come last in `rows`; a row that cannot be converted then runs as a hidden one.
    """

    rows: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    kind: NDArray[np.int8]
    preempt: NDArray[np.int32]
    """Rows from `running` whose cache is dropped before anything is allocated; they are recomputed later."""
    iteration: str
    """"prefill", "decode", "mixed" or "idle"; for logs and metrics only."""
    convert: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """Rows that hold the hidden kind and shall hold KV from this step on, without being preempted: their keys and
    values are computed from the cached layer inputs, which costs `StepCosts.convert_per_hidden_token_s` a cached
    token."""
    num_first: int = 0
    """Rows at the beginning that get their blocks in order with real-time ones, whatever their class. Where blocks are
    shared, real-time rows take no groups of theirs (`SharedBlocks.takeable`)."""

    @classmethod
    def idle(cls, preempt: NDArray[np.int32] | None = None) -> "Plan":
        """Return a plan in which nothing runs."""
        none = np.zeros(0, np.int32)
        return cls(
            rows=none,
            num_tokens=none,
            kind=none.astype(np.int8),
            preempt=none if preempt is None else preempt,
            iteration="idle",
        )


class Policy(Protocol):
    """A scheduling policy: a pure decision. Stateless, or with state that `schedule` alone changes.

    One from outside this package also declares `interface_version: int`, the `INTERFACE_VERSION` that it was written
    for. One that uses `Plan.convert` has an attribute ``converts = True``: without it servers compile no programs for
    that, and `SchedulerView.can_convert` is False. One that reads `SchedulerView.sharing` has ``shares_blocks = True``.
    """

    name: str
    """Name in logs, metrics and tables."""

    def schedule(self, view: SchedulerView) -> Plan:
        """Decide one iteration. Must not modify `view.table`."""
        ...


def has_classes(policy: Policy) -> bool:
    """Return True if a policy tells real-time requests from best-effort ones (`RequestTable.best_effort`)."""
    return bool(getattr(policy, "has_classes", False))


def shares_blocks(policy: Policy) -> bool:
    """Return True if a policy reads `SchedulerView.sharing`."""
    return bool(getattr(policy, "shares_blocks", False))


def converts(policy: Policy) -> bool:
    """Return True if a policy may use `Plan.convert`."""
    return bool(getattr(policy, "converts", False))
