"""The kinds of cache that a request can hold: keys and values, or the layer inputs that these are computed from.

A kind is its number, which is its column wherever an array has one column a kind. The numbers are plain integers:
against a member of an enum NumPy compares an array in twice the time, a single element in ten times, and makes int64 of
int8.
"""

import dataclasses
from typing import Literal, NamedTuple

KV = 0
"""Keys and values."""
HIDDEN = 1
"""Layer inputs."""
KINDS = (KV, HIDDEN)
NUM_KINDS = len(KINDS)
NO_KIND = -1
"""The kind of a request that holds no cache."""

CacheKindName = Literal["kv", "hidden"]
KIND_NAMES: tuple[CacheKindName, ...] = ("kv", "hidden")
"""Names of the kinds, by number: in events, metrics and the names of files."""


class KindSet(NamedTuple):
    """One flag a kind: those that a program handles, or that are on offer."""

    kv: bool
    hidden: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheKindSpec:
    """A cache kind as data: its memory and its extra time over the KV kind (docs/design/scheduling.md, Value of a
    request; Apt-Serve Eq. 6)."""

    name: str
    blocks_per_group: int
    """Blocks of a group of token positions (`SchedulerView.block_sizes`): 2 for keys and values, 1 for layer inputs."""
    offered: bool = True
    """False: the model or the `--cache` flag rules this kind out."""
    reprojected: bool = True
    """Attention first restores the keys and values of all cached positions, in every step (Apt-Serve §3.1). False: it
    works on what is cached."""
    extra_base_s: float = 0.0
    """c0 of t = c0 + c1 * tokens, seconds per request and decode iteration over KV; may be negative."""
    extra_per_token_s: float = 0.0
    """c1, seconds a cached token and decode iteration over KV; may be negative."""
