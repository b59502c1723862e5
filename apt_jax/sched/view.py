"""The interface of policies: the view that they read and the plan that they return.

The interface consists of NumPy arrays and numbers; it has no devices, block ids or clock.

The engine owns one `RequestTable`; a policy reads it through a `SchedulerView` and returns a `Plan`.
docs/writing_a_policy.md is the tutorial.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import KV, CacheKindSpec, WindowSpec
from apt_jax.costs.model import StepCosts
from apt_jax.sched.request_table import RequestTable

INTERFACE_VERSION = 1
"""Version of the interface for policies from outside this package: `SchedulerView` and everything in it, `Plan` and its
contract, `Policy`, and the names of `apt_jax.sched.step_packer` that docs/writing_a_policy.md lists. A policy declares
the version that it was written for (`interface_version`).

The version rises with a change that could make a correct policy misread a view or have its plan rejected: a name is
removed, renamed or changes its meaning, the contract of `Plan` becomes stricter, or `Plan` gets a field without a
default. It does not rise when columns, functions or fields with a default are added.
"""


class TakeableGroups:
    """Groups that real-time requests may take from best-effort requests (BROS §5).

    Args:
        rows_of: function that returns `rows` for a kind; called at most once per kind, when first needed.
    """

    def __init__(self, rows_of: Callable[[int], NDArray[np.int32]]) -> None:
        self._rows_of = functools.cache(rows_of)

    def rows(self, kind: int) -> NDArray[np.int32]:
        """Return the (g,) best-effort rows from which real-time requests of a kind may take groups of blocks.

        There is one entry per group, in the order in which groups are taken (`FindPreemptBlock`) after the free groups.
        The contents of taken groups are saved first; their request gets them back, in new blocks, when it runs next
        (`RequestTable.checkpointed_blocks`). Real-time requests of a step get their blocks before best-effort requests,
        whatever the order of `Plan.rows`. If a request reuses only part of a cached group, its first new group is a
        copy of that group and cannot be one of the taken groups.
        """
        return self._rows_of(kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerView:
    """Everything that a scheduling decision may depend on."""

    now_s: float
    table: RequestTable
    waiting: NDArray[np.int32]
    """Rows of requests without cache, including preempted requests, by rank."""
    running: NDArray[np.int32]
    """Rows of requests that hold cache, by rank: decoding requests and partly computed prompts."""
    free_blocks: int
    """Blocks that can be handed out, including blocks of idle cached prefixes."""
    total_blocks: int
    """Usable blocks of the pool, without the reserved block."""
    block_size: int
    """Tokens per block of keys or values, which is also the number of token positions per group of the KV kind."""
    kinds: Sequence[CacheKindSpec]
    """Indexed by `KV` and `HIDDEN`."""
    max_num_seqs: int
    max_num_batched_tokens: int
    costs: StepCosts = StepCosts()
    shared_blocks: int = 0
    """Number of blocks that two or more running requests hold. The pool consists of the shared blocks, the free blocks
    and the `num_blocks` of all running requests, so preempting requests frees at least their `num_blocks`."""
    hidden_block_size: int | None = None
    """Tokens per block of layer inputs; None: `block_size`."""
    can_convert: bool = False
    """True if `Plan.convert` may be used: both kinds are offered, and the executor supports conversions."""
    takeable: TakeableGroups | None = None
    """Groups that real-time rows may take from best-effort requests without preempting them; None: no groups."""

    @functools.cached_property
    def block_sizes(self) -> NDArray[np.int32]:
        """(num_kinds,) token positions per group of each kind."""
        hidden = self.block_size if self.hidden_block_size is None else self.hidden_block_size
        return np.array([self.block_size, hidden], np.int32)[: len(self.kinds)]

    @functools.cached_property
    def blocks_per_group(self) -> NDArray[np.int32]:
        """(num_kinds,) blocks per group of each kind."""
        return np.array([kind.blocks_per_group for kind in self.kinds], np.int32)

    @functools.cached_property
    def windows(self) -> WindowSpec | None:
        """Blocks that a request holds for windowed layers; None: all layers keep all positions."""
        return self.kinds[KV].windows

    @functools.cached_property
    def offered(self) -> NDArray[np.bool_]:
        """(num_kinds,) True if the kind is offered."""
        return np.array([kind.offered for kind in self.kinds])

    def remaining(self, rows: NDArray[np.int32], kind: NDArray[np.integer] | int | None = None) -> NDArray[np.int32]:
        """Return the number of tokens not computed yet, in the shape of `rows`.

        It is 1 for a decoding request and more for a request in prefill.

        Args:
            rows: rows of requests.
            kind: kind that waiting requests would take; tokens for which they would find cache of this kind are not
                counted. None: cached prefixes are ignored.
        """
        table = self.table
        left = table.num_tokens.take(rows) - table.num_cached.take(rows)
        return left if kind is None else left - table.cached_prefix_tokens[rows, kind]

    def blocks_for(self, tokens: NDArray[np.int32], kind: NDArray[np.integer] | int) -> NDArray[np.int32]:
        """Return the number of blocks for `tokens` positions: `blocks_per_group * ceil(tokens / block size)`, and the blocks
        of windowed layers.

        Args:
            tokens: numbers of token positions, of any shape.
            kind: cache kinds in the shape of `tokens`, or one kind for all.
        """
        same = self.hidden_block_size in (None, self.block_size)
        size = self.block_size if same else self.block_sizes[kind]  # dividing by a scalar is faster
        blocks = -(-tokens // size) * self.blocks_per_group[kind]
        return blocks if self.windows is None else blocks + self.windows.num_blocks(tokens)

    def blocks_of(self, tokens: int, kind: int) -> int:
        """Return `blocks_for` of one number of positions."""
        blocks = -(-tokens // int(self.block_sizes[kind])) * self.kinds[kind].blocks_per_group
        return blocks if self.windows is None else blocks + self.windows.num_blocks(tokens)

    def most_tokens(self, blocks: int, kind: int) -> int:
        """Return the largest number of positions that `blocks` blocks of a kind hold (`blocks_for`)."""
        return self.kinds[kind].tokens_in(blocks, int(self.block_sizes[kind]))

    def block_options(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the (n, num_kinds) results of `blocks_for` for (n,) `tokens` and each kind, as a transposed array."""
        if self.hidden_block_size in (None, self.block_size):
            groups = -(-tokens // self.block_size)
        else:
            groups = -(-tokens[None] // self.block_sizes[:, None])
        blocks = (groups * self.blocks_per_group[:, None]).T
        return blocks if self.windows is None else blocks + self.windows.num_blocks(tokens)[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One iteration: the rows that run, their numbers of tokens and cache kinds, and the rows preempted before it.

    Contract, which `check_plan` checks for policies from outside this package:
      * `rows` are live and unique, and no row is in `preempt`;
      * `1 <= num_tokens <= remaining`, where `remaining` leaves out prefixes cached with the row's kind; the sum of
        `num_tokens` is at most `max_num_batched_tokens`;
      * at most `max_num_seqs` rows run or keep cache;
      * a row that holds cache keeps its kind (to change it, use `convert`, or preempt the row now and run it in a later
        iteration);
      * rows in `convert` are unique, are in `rows`, hold the hidden kind (also in `kind`), and fit the whole pool as
        keys and values at their maximum length; `convert` is empty unless `SchedulerView.can_convert`;
      * the needed blocks fit `free_blocks` plus `num_blocks` of the rows in `preempt` plus, if `SchedulerView.takeable`
        is set, the groups in it that real-time rows take. A row in `convert` needs the KV blocks of all its positions,
        including the new position, in addition to its hidden blocks, which become free for the next step.

    If the blocks do not fit after all (a failed allocation, a prefix that was shared with a preempted request), the
    engine defers the last rows of the plan; a row that cannot be converted runs with its hidden cache.
    """

    rows: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    kind: NDArray[np.int8]
    preempt: NDArray[np.int32]
    """Rows from `running` whose cache is dropped before any block is allocated; they are recomputed later."""
    iteration: str
    """"prefill", "decode", "mixed" or "idle"; for logs and metrics only."""
    convert: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """Rows of the hidden kind that change to KV in this step without preemption: their keys and values are computed
    from the cached layer inputs, which takes `StepCosts.convert_per_hidden_token_s` per cached token."""
    num_first: int = 0
    """Number of leading rows that get their blocks together with the real-time rows, in order, even if they are
    best-effort. Real-time rows take no groups from them (`SchedulerView.takeable`)."""

    @classmethod
    def idle(cls, preempt: NDArray[np.int32] | None = None) -> "Plan":
        """Return a plan in which no row runs."""
        none = np.zeros(0, np.int32)
        return cls(
            rows=none,
            num_tokens=none,
            kind=none.astype(np.int8),
            preempt=none if preempt is None else preempt,
            iteration="idle",
        )


class Policy(Protocol):
    """A scheduling policy: it sees the engine only through a view, and only `schedule` may change its state.

    A policy from outside this package also declares `interface_version: int`, the `INTERFACE_VERSION` that it was
    written for. A policy that uses `Plan.convert` has an attribute ``converts = True``; without it servers do not
    compile the conversion programs, and `SchedulerView.can_convert` is False. A policy that reads
    `SchedulerView.takeable` has ``takes_groups = True``.
    """

    name: str
    """Name in logs, metrics and tables."""

    def schedule(self, view: SchedulerView) -> Plan:
        """Return the plan of one iteration. It must not modify `view.table`."""
        ...


def has_classes(policy: Policy) -> bool:
    """Return True if a policy distinguishes real-time from best-effort requests (`RequestTable.best_effort`)."""
    return bool(getattr(policy, "has_classes", False))


def takes_groups(policy: Policy) -> bool:
    """Return True if a policy reads `SchedulerView.takeable`."""
    return bool(getattr(policy, "takes_groups", False))


def converts(policy: Policy) -> bool:
    """Return True if a policy may use `Plan.convert`."""
    return bool(getattr(policy, "converts", False))
