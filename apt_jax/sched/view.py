"""What a policy sees and what it answers. NumPy only: no device, no block ids, no clock.

The engine owns one `RequestTable`; a policy reads it through a `SchedulerView` and returns a `Plan`.
docs/writing_a_policy.md is the tutorial.
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

INTERFACE_VERSION = 1
"""Version of what a policy from outside this package relies on: `SchedulerView` and all that it holds, `Plan` and its
promises, `Policy`, and what docs/writing_a_policy.md names of `apt_jax.sched.policy`. A policy declares the one that it
was written for (`interface_version`).

It rises when a policy that was right could misread a view or have its plan refused: something is removed, renamed or
means something else, a promise of `Plan` is added or made stricter, a field of `Plan` has no default. It does not rise
for columns, fields with a default and functions that are added.
"""

NO_KIND = -1
"""`RequestTable.kind` of a request that holds no cache."""

KV = 0
HIDDEN = 1
NUM_KINDS = 2
"""Column numbers of the two cache kinds wherever options are arrays of shape (num_requests, num_kinds)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindSpec:
    """A cache kind as data: its memory and its extra time over the KV kind (DESIGN.md §5, Apt-Serve Eq. 6)."""

    name: str
    blocks_per_group: int
    """Blocks of a group of token positions (`SchedulerView.block_sizes`): 2 for keys and values, 1 for layer inputs."""
    offered: bool = True
    """False: the model or the `--cache` flag rules this kind out."""
    reprojected: bool = True
    """Attention first restores the keys and values of all cached positions, in every step (Apt-Serve §3.1). False: it works on
    what is cached."""
    extra_base_s: float = 0.0
    """c0 of t = c0 + c1 * tokens, seconds a request and decode iteration over KV; may be negative."""
    extra_per_token_s: float = 0.0
    """c1, seconds a cached token and decode iteration over KV; may be negative."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Time of a step as a linear model of what is in it (DESIGN.md §7; InferMax §3.2, BROS §4.1).

    From calibration or a hardware description; all in seconds, zero where nothing is known. A row decodes when it
    computes one token over cached positions, else it is a prefill chunk of c tokens over m cached ones. Per phase:

        linear   prefill:  base + per_request * chunks + per_token * sum(c)
                 decode:   base + per_request * requests (a coefficient a kind)
        read     prefill:  per_pair * sum(c^2 + 2 m c) + per_kv_prefix * m (or per_hidden_prefix * m)
                 decode:   per_token * (m + 1), a coefficient a kind

    A step of one phase takes linear + read. In a mixed step the linear layers run once over all tokens, so it takes
    both reads, and the linear part of whichever phase is dearer with all tokens counted to it. Where it is two programs
    (`one_program` is False, as on CPUs) it takes both phases one after another. A prompt of one token counts as a chunk here,
    though an executor may run it with the decodes.
    """

    prefill_base_s: float = 0.0
    prefill_per_token_s: float = 0.0
    prefill_per_pair_s: float = 0.0
    prefill_per_request_s: float = 0.0
    prefill_per_kv_prefix_s: float = 0.0
    """Per cached KV token that a chunk attends to."""
    prefill_per_hidden_prefix_s: float = 0.0
    """Per cached hidden token that a chunk attends to."""
    decode_base_s: float = 0.0
    decode_per_request_s: float = 0.0
    decode_per_token_s: float = 0.0
    """Per cached KV token read."""
    decode_per_hidden_request_s: float = 0.0
    decode_per_hidden_token_s: float = 0.0
    """Per cached hidden token read."""
    convert_per_hidden_token_s: float = 0.0
    """Per cached token whose keys and values are computed from its layer input (`Plan.convert`), once; the step itself
    then counts the row as a KV one. 0: not known."""
    one_program: bool = True
    """A mixed step is one program; else its decodes and its chunks are two."""

    def step_s(
        self,
        num_tokens: NDArray[np.int32],
        start: NDArray[np.int32],
        kind: NDArray[np.int8],
    ) -> float:
        """Predicted time of one step, seconds.

        Args:
            num_tokens: (n,) tokens that each row computes.
            start: (n,) positions cached before.
            kind: (n,) cache kinds.
        """
        n = num_tokens.size
        if n == 0:
            return 0.0
        decode = (num_tokens == 1) & (start > 0)
        num_decode = int(np.count_nonzero(decode))
        linear_s = read_s = 0.0
        if num_decode:
            read = start + 1
            hidden = kind == HIDDEN
            if num_decode < n:
                hidden = hidden & decode
                read = np.where(decode, read, 0)
            num_hidden = int(np.count_nonzero(hidden))
            num_read = int(read.sum())
            hidden_read = int(read[hidden].sum()) if num_hidden else 0
            linear_s = (
                self.decode_base_s
                + self.decode_per_request_s * (num_decode - num_hidden)
                + self.decode_per_hidden_request_s * num_hidden
            )
            read_s = (
                self.decode_per_token_s * (num_read - hidden_read)
                + self.decode_per_hidden_token_s * hidden_read
            )
            if num_decode == n:
                return linear_s + read_s
        chunk = ~decode
        c = num_tokens[chunk].astype(np.float64)
        m = start[chunk].astype(np.float64)
        tokens = float(c.sum())
        read_s += self.prefill_per_pair_s * float(c @ (c + 2 * m))
        if m.any():
            hidden_m = float(m[kind[chunk] == HIDDEN].sum())
            read_s += self.prefill_per_kv_prefix_s * (float(m.sum()) - hidden_m)
            read_s += self.prefill_per_hidden_prefix_s * hidden_m
        prefill_s = self.prefill_base_s + self.prefill_per_request_s * (n - num_decode)
        if not self.one_program:
            return linear_s + prefill_s + self.prefill_per_token_s * tokens + read_s
        prefill_s += self.prefill_per_token_s * (tokens + num_decode)
        return max(linear_s, prefill_s) + read_s

    def conversion_s(self, num_tokens: int) -> float:
        """What a step takes in addition for `Plan.convert` of rows with so many cached tokens together, seconds."""
        return self.convert_per_hidden_token_s * num_tokens


class _Column(NamedTuple):
    """Declaration of a column of a `ColumnTable`."""

    dtype: type[np.generic]
    fill: int
    width: int | None

    def make(self, capacity: int) -> NDArray:
        shape = capacity if self.width is None else (capacity, self.width)
        return np.full(shape, self.fill, self.dtype)


_Scalar = TypeVar("_Scalar", bound=np.generic)


def column(dtype: type[_Scalar], *, fill: int = 0, width: int | None = None) -> NDArray[_Scalar]:
    """Declare a column of a `ColumnTable`: (capacity,) or (capacity, `width`) values, `fill` in a fresh row."""
    return cast("NDArray[_Scalar]", _Column(dtype, fill, width))


class ColumnTable:
    """Struct of arrays over rows. A subclass declares each array once, as a class attribute made by `column`."""

    COLUMNS: ClassVar[dict[str, _Column]] = {}

    def __init_subclass__(cls) -> None:
        cls.COLUMNS = {name: c for name, c in vars(cls).items() if isinstance(c, _Column)}

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        for name, declared in self.COLUMNS.items():
            setattr(self, name, declared.make(capacity))

    def clear_row(self, row: int) -> None:
        """Reset all columns of a row."""
        for name, declared in self.COLUMNS.items():
            getattr(self, name)[row] = declared.fill

    def grow(self, capacity: int) -> None:
        """Add fresh rows; the columns are new arrays afterwards."""
        for name, declared in self.COLUMNS.items():
            more = declared.make(capacity - self.capacity)
            setattr(self, name, np.concatenate([getattr(self, name), more]))
        self.capacity = capacity


class RequestTable(ColumnTable):
    """Struct of arrays over request rows; row numbers are stable while a request lives and are then reused.

    Token counts include the token of a step that is still in flight: at scheduling time `num_tokens` is what the
    sequence will hold once all dispatched steps have ended.
    """

    arrival_s = column(np.float64)  # time of arrival
    last_token_s = column(np.float64)  # time of the last delivered token; the arrival before the first one
    rank = column(np.int64)  # arrival order; kept over preemptions
    prompt_len = column(np.int32)
    num_tokens = column(np.int32)  # prompt and output tokens, tokens in flight counted
    max_tokens_total = column(np.int32)  # prompt_len + the request's max_tokens
    num_cached = column(np.int32)  # positions whose cache is on the device, steps in flight counted
    kind = column(np.int8, fill=NO_KIND)  # cache kind held, NO_KIND when none
    num_blocks = column(np.int32)  # blocks held exclusively
    num_shared = column(np.int32)  # blocks shared with other requests: not attributed to any of them
    num_outputs = column(np.int32)  # output tokens, tokens in flight counted
    slo_ttft_s = column(np.float64)
    slo_tbt_s = column(np.float64)
    num_delivered = column(np.int32)  # output tokens counted by `note_tokens`
    ttft_missed = column(np.bool_)  # the first token came after slo_ttft_s
    num_late_gaps = column(np.int32)  # gaps between delivered tokens above slo_tbt_s
    num_preemptions = column(np.int32)
    num_kind_switches = column(np.int32)
    tokens_since_preemption = column(np.int32)
    best_effort = column(np.bool_)  # class "be", without objectives of its own (BROS §2)
    tenant = column(np.int32)  # number of the tenant; 0: none
    live = column(np.bool_)
    # By kind, what a waiting request would find cached; 0 for all others.
    hit_tokens = column(np.int32, width=NUM_KINDS)  # positions that need not be computed
    hit_blocks = column(np.int32, width=NUM_KINDS)  # blocks held by running requests: they cost nothing

    def __init__(self, capacity: int = 256) -> None:
        super().__init__(capacity)
        self._free = list(range(capacity - 1, -1, -1))
        self.output_lengths = np.zeros(256, np.int64)
        """Number of requests that ended with each number of output tokens; grows with the longest."""
        self.num_output_lengths = 0
        """Their sum: how many have ended."""

    def add(
        self,
        *,
        arrival_s: float,
        rank: int,
        prompt_len: int,
        max_tokens: int,
        slo_ttft_s: float,
        slo_tbt_s: float,
        best_effort: bool = False,
        tenant: int = 0,
    ) -> int:
        """Take a row for a new request (no cache, no outputs) and return its number. Grows when full."""
        if not self._free:
            self._free = list(range(2 * self.capacity - 1, self.capacity - 1, -1))
            self.grow(2 * self.capacity)
        row = self._free.pop()
        self.clear_row(row)
        self.arrival_s[row] = self.last_token_s[row] = arrival_s
        self.rank[row] = rank
        self.prompt_len[row] = self.num_tokens[row] = prompt_len
        self.max_tokens_total[row] = prompt_len + max_tokens
        self.slo_ttft_s[row] = slo_ttft_s
        self.slo_tbt_s[row] = slo_tbt_s
        self.best_effort[row] = best_effort
        self.tenant[row] = tenant
        self.live[row] = True
        return row

    def note_tokens(self, rows: NDArray[np.int32], now_s: float) -> None:
        """One token is delivered to each of `rows` (no row twice): sets `last_token_s` and counts what came late."""
        gap_s = now_s - self.last_token_s.take(rows)
        delivered = self.num_delivered.take(rows)
        late = gap_s > self.slo_tbt_s.take(rows)
        if not delivered.all():
            first = delivered == 0
            self.ttft_missed[rows] |= first & (gap_s > self.slo_ttft_s.take(rows))
            late &= ~first
        if late.any():
            self.num_late_gaps[rows[late]] += 1
        self.num_delivered[rows] = delivered + 1
        self.last_token_s[rows] = now_s

    def note_length(self, num_outputs: int) -> None:
        """A request has come to its natural end after `num_outputs` tokens (not by an abort or an error)."""
        size = self.output_lengths.size
        if num_outputs >= size:
            grown = np.zeros(max(num_outputs + 1, 2 * size), np.int64)
            grown[:size] = self.output_lengths
            self.output_lengths = grown
        self.output_lengths[num_outputs] += 1
        self.num_output_lengths += 1

    def remove(self, row: int) -> None:
        """Give the row of an ended request back."""
        assert self.live[row], f"row {row} is not live"
        self.live[row] = False
        self.kind[row] = NO_KIND
        self._free.append(row)

    def read_only(self) -> "RequestTable":
        """The same columns for readers: writing to them raises ValueError. Right until the table is changed."""
        table = copy.copy(self)
        table._free = []
        for name in (*self.COLUMNS, "output_lengths"):
            column = getattr(self, name).view()
            column.flags.writeable = False
            setattr(table, name, column)
        return table


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
    """Blocks that can be handed out, those of cached prefixes that nobody holds among them."""
    total_blocks: int
    """Usable blocks of the pool (the reserved one not counted)."""
    block_size: int
    """Keys, or values, that a block holds: token positions of a group with the KV kind."""
    kinds: Sequence[KindSpec]
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
    """Whether `Plan.convert` may be used: both kinds are on offer, and the executor can do it."""

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

    def remaining(
        self, rows: NDArray[np.int32], kind: NDArray[np.integer] | int | None = None
    ) -> NDArray[np.int32]:
        """Tokens not computed yet: 1 for a decoding request, more for one in prefill. Shape of `rows`.

        With `kind`, that which waiting requests would take: without what they would find cached of it.
        """
        table = self.table
        left = table.num_tokens.take(rows) - table.num_cached.take(rows)
        return left if kind is None else left - table.hit_tokens[rows, kind]

    def blocks_for(
        self, tokens: NDArray[np.int32], kind: NDArray[np.integer] | int
    ) -> NDArray[np.int32]:
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
    """One iteration: which rows run, over how many tokens, with which kind, and who gives its cache up first.

    Promises that the engine checks before it acts:
      * `rows` are live, unique, and none is in `preempt`; `1 <= num_tokens <= remaining` (of the row's kind: cached
        prefixes are not computed again); their sum is at most `max_num_batched_tokens`, their count with other cache holders at most `max_num_seqs`;
      * a row that holds cache keeps its kind (to change it: `convert`, or preempt now and run it in a later iteration);
      * rows in `convert` are unique, among `rows`, hold the hidden kind (which `kind` says), and could be held by the whole
        pool as keys and values at their greatest length; there are none unless `SchedulerView.can_convert`;
      * the blocks needed fit `free_blocks` plus `num_blocks` of what is in `preempt`. A row in `convert` needs the KV blocks
        of all its positions, the new one among them, beside its hidden blocks: those are free for the next step. Where they
        do not fit after all (a failed allocation, a prefix that was shared with a preempted request), the engine defers the
        rows that come last in `rows`; a row that cannot be converted then runs as a hidden one.
    """

    rows: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    kind: NDArray[np.int8]
    preempt: NDArray[np.int32]
    """Rows from `running` whose cache is dropped before anything is allocated; they are recomputed later."""
    iteration: str
    """"prefill", "decode", "mixed" or "idle"; for logs and metrics only."""
    convert: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """Rows that hold the hidden kind and shall hold KV from this step on, without being preempted: their keys and values
    are computed from the cached layer inputs, which costs `StepCosts.convert_per_hidden_token_s` a cached token."""

    @classmethod
    def idle(cls, preempt: NDArray[np.int32] | None = None) -> "Plan":
        """Nothing runs."""
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

    One from outside this package also declares `interface_version: int`, the `INTERFACE_VERSION` that it was written for.
    One that uses `Plan.convert` has an attribute ``converts = True``: without it servers compile no programs for that, and
    `SchedulerView.can_convert` is False.
    """

    name: str
    """In logs, metrics and tables."""

    def schedule(self, view: SchedulerView) -> Plan:
        """Decide one iteration. Must not modify `view.table`."""
        ...


def converts(policy: Policy) -> bool:
    """Whether a policy may use `Plan.convert`."""
    return bool(getattr(policy, "converts", False))
