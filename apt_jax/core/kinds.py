"""The kinds of cache that a request can hold: keys and values, or the layer inputs from which they are computed.

A kind is an integer, which is also the kind's column in arrays with one column per kind. Plain integers are used
because comparing a NumPy array with an enum member takes twice as long, comparing a single element takes ten times as
long, and both convert int8 to int64.
"""

import bisect
import dataclasses
import math
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

KV = 0
"""Kind of a cache of keys and values."""
HIDDEN = 1
"""Kind of a cache of layer inputs."""
KINDS = (KV, HIDDEN)
NUM_KINDS = len(KINDS)
NO_KIND = -1
"""The kind of a request that holds no cache."""
WINDOWED = 2
"""Index, after the kinds, of the groups of windowed layers (`WindowSpec`)."""

CacheKindName = Literal["kv", "hidden"]
KIND_NAMES: tuple[CacheKindName, ...] = ("kv", "hidden")
"""Names of the kinds by number, used in events, metrics and file names."""


class KindSet(NamedTuple):
    """One flag per cache kind: whether a program handles the kind, or whether the kind is offered."""

    kv: bool
    hidden: bool


_Tokens = TypeVar("_Tokens", int, NDArray[np.integer])


def _least(numbers: _Tokens, most: int) -> _Tokens:
    return min(numbers, most) if isinstance(numbers, int) else np.minimum(numbers, most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSpec:
    """Cache of windowed layers in groups of their own, which a request releases when their positions have left the
    window of its next token."""

    window: int
    """Number of positions that a token attends to, its own included."""
    block_size: int
    """Number of positions per group."""
    blocks_per_group: int

    @property
    def max_groups(self) -> int:
        """Largest number of groups that the next token of a request needs."""
        return -(-(self.window - 1) // self.block_size) + 1

    def num_groups(self, tokens: _Tokens) -> _Tokens:
        """Return the largest number of groups that a request holds between two steps, given its number of positions."""
        return _least(-(-tokens // self.block_size), self.max_groups)

    def num_blocks(self, tokens: _Tokens) -> _Tokens:
        """Return the number of blocks of `num_groups`."""
        return self.num_groups(tokens) * self.blocks_per_group

    def extra_blocks(self, starts: _Tokens, ends: _Tokens) -> _Tokens:
        """Return the number of blocks beyond `num_blocks` of `ends` that chunks of positions [starts, ends) need until
        they are computed: those of the window before the chunk that are not needed after it."""
        written = _least(-(-ends // self.block_size) - -(-starts // self.block_size), self.max_groups)
        return (self.num_groups(starts) + written - self.num_groups(ends)) * self.blocks_per_group

    def most_blocks(self, tokens: _Tokens) -> _Tokens:
        """Return the largest number of blocks that a prompt of `tokens` positions holds while it is computed in
        chunks."""
        return _least(-(-tokens // self.block_size), 2 * self.max_groups) * self.blocks_per_group

    def first_group(self, position: _Tokens) -> _Tokens:
        """Return the first group that the token at a position attends to."""
        first = position + 1 - self.window
        return (max(first, 0) if isinstance(first, int) else np.maximum(first, 0)) // self.block_size


def most_blocks(tokens: int, size: int, blocks_per_group: int, windows: WindowSpec | None) -> int:
    """Return the largest number of blocks that a request of `tokens` positions holds at once, with `size` positions per
    group: those of its groups, and those of windowed layers while its prompt is computed in chunks."""
    blocks = -(-tokens // size) * blocks_per_group
    return blocks if windows is None else blocks + windows.most_blocks(tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheKindSpec:
    """Memory use of a cache kind, and its extra time compared with the KV kind (docs/design/scheduling.md, Value of a
    request; Apt-Serve Eq. 6)."""

    name: str
    blocks_per_group: int
    """Number of blocks per group of token positions (`SchedulerView.block_sizes`): 2 for keys and values, 1 for layer
    inputs."""
    offered: bool = True
    """False if the model or the `--cache` flag excludes this kind."""
    reprojected: bool = True
    """True if attention recomputes keys and values of all cached positions in every step (Apt-Serve §3.1); False if it
    reads the cache directly."""
    extra_base_s: float = 0.0
    """c0 of the extra time compared with KV, t = c0 + c1 * tokens, in seconds per request and decode iteration; may be
    negative."""
    extra_per_token_s: float = 0.0
    """c1 of the extra time compared with KV, t = c0 + c1 * tokens, in seconds per cached token and decode iteration;
    may be negative."""
    windows: WindowSpec | None = None
    """Groups of windowed layers that a request of this kind holds beside its other groups; None: it has none."""

    def tokens_in(self, num_blocks: int, size: int) -> int:
        """Return the largest number of positions of one request that `num_blocks` blocks hold, with `size` positions per
        group."""
        spec = self.windows
        if spec is None:
            return num_blocks // self.blocks_per_group * size
        full = spec.max_groups * spec.block_size  # from here on, windowed layers take no more blocks

        def needed(groups: int) -> int:
            return -(-groups * spec.block_size // size) * self.blocks_per_group + groups * spec.blocks_per_group

        if num_blocks < needed(spec.max_groups):
            groups = bisect.bisect_right(range(spec.max_groups + 1), num_blocks, key=needed) - 1
            return groups * spec.block_size
        left = num_blocks - spec.max_groups * spec.blocks_per_group
        return max(left // self.blocks_per_group * size, full)

    def longest(self, num_blocks: int, size: int) -> int:
        """Return the largest number of positions of a request that a pool of `num_blocks` blocks can serve, with `size`
        positions per group: as `tokens_in`, but with the blocks of `most_blocks`."""
        spec = self.windows
        if spec is None:
            return self.tokens_in(num_blocks, size)
        step = math.gcd(size, spec.block_size)

        def needed(steps: int) -> int:
            return most_blocks(steps * step, size, self.blocks_per_group, spec)

        most = num_blocks * size // step
        return (bisect.bisect_right(range(most + 1), num_blocks, key=needed) - 1) * step
