"""The table of all live requests: one NumPy column per property, one row per request."""

import copy
import math
from typing import ClassVar, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import NO_KIND, NUM_KINDS
from apt_jax.sched.output_lengths import BEGINNINGS, OutputLengths


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
    """Declare a column of a `ColumnTable`: an array of shape (capacity,) or (capacity, `width`), `fill` in new rows."""
    return cast("NDArray[_Scalar]", _Column(dtype, fill, width))


class ColumnTable:
    """Table stored as one array per column; a subclass declares each column as a class attribute made by `column`."""

    COLUMNS: ClassVar[dict[str, _Column]] = {}

    def __init_subclass__(cls) -> None:
        cls.COLUMNS = {name: c for name, c in vars(cls).items() if isinstance(c, _Column)}

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        for name, declared in self.COLUMNS.items():
            setattr(self, name, declared.make(capacity))

    def clear_row(self, row: int) -> None:
        """Reset all columns of a row to their fill values."""
        for name, declared in self.COLUMNS.items():
            getattr(self, name)[row] = declared.fill

    def grow(self, capacity: int) -> None:
        """Grow the table to `capacity` rows; this replaces the arrays of all columns."""
        for name, declared in self.COLUMNS.items():
            more = declared.make(capacity - self.capacity)
            setattr(self, name, np.concatenate([getattr(self, name), more]))
        self.capacity = capacity


class RequestTable(ColumnTable):
    """Table of live requests; a row number is stable while its request lives and is then reused.

    Token counts include the tokens of steps in flight: at scheduling time `num_tokens` is the length of the sequence
    after all dispatched steps have finished.
    """

    arrival_s = column(np.float64)  # time of arrival
    last_token_s = column(np.float64)  # time of the last delivered token; before the first token: the arrival
    rank = column(np.int64)  # arrival order; kept over preemptions
    prompt_len = column(np.int32)
    num_tokens = column(np.int32)  # prompt and output tokens, including tokens in flight
    max_tokens_total = column(np.int32)  # prompt_len + the request's max_tokens
    num_cached = column(np.int32)  # positions whose cache is on the device, including steps in flight
    kind = column(np.int8, fill=NO_KIND)  # cache kind held, NO_KIND when none
    num_blocks = column(np.int32)  # blocks held exclusively
    num_shared = column(np.int32)  # blocks shared with other requests: not attributed to any of them
    num_outputs = column(np.int32)  # output tokens, including tokens in flight
    slo_ttft_s = column(np.float64)
    slo_tbt_s = column(np.float64)
    slo_e2e_s = column(np.float64)
    num_delivered = column(np.int32)  # output tokens counted by `record_tokens`
    ttft_missed = column(np.bool_)  # the first token came after slo_ttft_s
    num_late_gaps = column(np.int32)  # gaps between delivered tokens longer than slo_tbt_s
    num_preemptions = column(np.int32)
    num_kind_switches = column(np.int32)
    tokens_since_preemption = column(np.int32)
    checkpointed_blocks = column(np.int32)  # blocks saved in host memory because other requests took them (BROS, M^cpu)
    best_effort = column(np.bool_)  # class "be", without objectives (BROS §2)
    tenant = column(np.int32)  # number of the tenant; 0: no tenant
    live = column(np.bool_)
    known_length = column(np.bool_)  # True if only max_tokens can end it
    histograms = column(np.int32, width=len(BEGINNINGS))  # histogram numbers, see `lengths`; 0: none
    # Cached prefix that a waiting request would find with each kind; 0 for other requests.
    cached_prefix_tokens = column(np.int32, width=NUM_KINDS)  # positions that need not be computed
    host_prefix_tokens = column(np.int32, width=NUM_KINDS)  # those of them that are copied from host memory
    shared_prefix_blocks = column(np.int32, width=NUM_KINDS)  # blocks of it that running requests hold

    def __init__(self, capacity: int = 256) -> None:
        super().__init__(capacity)
        self._free = list(range(capacity - 1, -1, -1))
        self.output_lengths = np.zeros(256, np.int64)
        """Index n: number of requests that ended on their own after n output tokens; grows with the longest output."""
        self.num_output_lengths = 0
        """Sum of `output_lengths`: the number of requests counted by `record_output_length`."""
        self.lengths = OutputLengths()
        """Estimate of output lengths by prompt prefixes (`histograms`)."""

    def add(
        self,
        *,
        arrival_s: float,
        rank: int,
        prompt_len: int,
        max_tokens: int,
        slo_ttft_s: float,
        slo_tbt_s: float,
        slo_e2e_s: float = math.inf,
        best_effort: bool = False,
        tenant: int = 0,
        known_length: bool = False,
    ) -> int:
        """Add a new request (no cache, no outputs) and return its row number. A full table grows."""
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
        self.slo_e2e_s[row] = slo_e2e_s
        self.best_effort[row] = best_effort
        self.tenant[row] = tenant
        self.known_length[row] = known_length
        self.live[row] = True
        return row

    def record_tokens(self, rows: NDArray[np.int32], now_s: float) -> None:
        """Record one delivered token for each of `rows`, which are unique: set `last_token_s` and count late tokens."""
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

    def record_output_length(self, num_outputs: int) -> None:
        """Count a request that ended on its own after `num_outputs` tokens (not by an abort or an error)."""
        size = self.output_lengths.size
        if num_outputs >= size:
            grown = np.zeros(max(num_outputs + 1, 2 * size), np.int64)
            grown[:size] = self.output_lengths
            self.output_lengths = grown
        self.output_lengths[num_outputs] += 1
        self.num_output_lengths += 1

    def remove(self, row: int) -> None:
        """Free the row of a finished request."""
        assert self.live[row], f"row {row} is not live"
        self.live[row] = False
        self.kind[row] = NO_KIND
        self._free.append(row)

    def read_only(self) -> "RequestTable":
        """Return a read-only view of the table, valid until the table changes; writing to a column raises
        ValueError."""
        table = copy.copy(self)
        table._free = []
        for name in (*self.COLUMNS, "output_lengths"):
            column = getattr(self, name).view()
            column.flags.writeable = False
            setattr(table, name, column)
        return table
