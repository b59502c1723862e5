"""Digests of the requests' prefixes, and what waiting requests would find cached."""

import itertools
import os
from collections.abc import Sequence

from apt_jax.cache import CacheKind, HybridCache
from apt_jax.cache.prefix_hits import PrefixHitTracker
from apt_jax.cache.prefix_tree import extend_digests, root_digest
from apt_jax.engine.request_state import RequestState
from apt_jax.request import EngineRequest
from apt_jax.sched.request_table import NO_KIND, RequestTable


class RequestPrefixes:
    """Prefixes of requests as the cache knows them.

    Args:
        cache: looked up; with prefix caching off there is nothing to be found.
        table: `PrefixHitTracker` keeps its `hit_tokens` and `hit_blocks` of waiting requests.
        offered: cache kinds on offer.

    Attributes:
        hits: tracks the waiting requests; None: prefix caching is off.
    """

    def __init__(self, cache: HybridCache, table: RequestTable, offered: Sequence[CacheKind]) -> None:
        self._cache = cache
        self._offered = offered
        self._salt = os.urandom(16)  # digests are unlike those of any other engine
        self.hits: PrefixHitTracker | None = None if cache.prefixes is None else cache.watch_hits(table)

    def root_of(self, request: EngineRequest) -> bytes:
        """Return the start of a request's digests.

        Requests of a tenant find what its others left, and nothing of anybody else's, whose prompts the time to a first
        token would otherwise reveal (CVE-2025-46570).
        """
        if self.hits is None:
            return b""
        return root_digest(self._salt, (request.tenant or "").encode())

    def no_digests(self) -> tuple[list[bytes], ...]:
        """Return empty lists by kind, see `RequestState.digests`."""
        of_size = {size: list[bytes]() for size in self._cache.block_sizes}
        return tuple(of_size[size] for size in self._cache.block_sizes)

    def digests(self, state: RequestState, kind: int, num_groups: int | None = None) -> list[bytes]:
        """Return the digests of full groups of a request's known tokens, of all or at least of the first `num_groups`."""
        digests, size = state.digests[kind], self._cache.block_sizes[kind]
        num_known = state.num_known if num_groups is None else min(state.num_known, num_groups * size)
        extend_digests(digests, state.root, state.tokens[:num_known], size)
        return digests

    def track(self, state: RequestState, pinned_kind: int) -> None:
        """Keep in the table what a waiting request would find, until `untrack`."""
        if self.hits is None:
            return
        kinds = [int(k) for k in self._offered if pinned_kind in (NO_KIND, k)]
        for kind in kinds:
            self.digests(state, kind)
        self.hits.begin(state.row, state.digests, kinds)

    def untrack(self, row: int) -> None:
        """Stop tracking a row, which need not be tracked."""
        if self.hits is not None:
            self.hits.end(row)

    def num_cached(self, request: EngineRequest) -> int:
        """Count the prompt tokens that a new request would find cached.

        Callable from any thread: what is found may be gone a moment later.
        """
        prefixes, most = self._cache.prefixes, 0
        if prefixes is None:
            return 0
        root = self.root_of(request)
        for kind in self._offered:
            size = self._cache.block_sizes[kind]
            digests: list[bytes] = []
            extend_digests(digests, root, request.prompt_token_ids, size)
            found = itertools.takewhile(lambda d, k=kind: prefixes.find(k, d) is not None, digests)
            most = max(most, size * sum(1 for _ in found))
        return min(most, int(request.prompt_token_ids.size) - 1)
