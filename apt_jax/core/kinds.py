"""The kinds of cache that a request can hold: keys and values, or the layer inputs from which they are computed.

A kind is an integer, which is also the kind's column in arrays with one column per kind. Plain integers are used
because comparing a NumPy array with an enum member takes twice as long, comparing a single element takes ten times as
long, and both convert int8 to int64.
"""

import dataclasses
from typing import Literal, NamedTuple

KV = 0
"""Kind of a cache of keys and values."""
HIDDEN = 1
"""Kind of a cache of layer inputs."""
KINDS = (KV, HIDDEN)
NUM_KINDS = len(KINDS)
NO_KIND = -1
"""The kind of a request that holds no cache."""

CacheKindName = Literal["kv", "hidden"]
KIND_NAMES: tuple[CacheKindName, ...] = ("kv", "hidden")
"""Names of the kinds by number, used in events, metrics and file names."""


class KindSet(NamedTuple):
    """One flag per cache kind: whether a program handles the kind, or whether the kind is offered."""

    kv: bool
    hidden: bool


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
