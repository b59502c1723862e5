"""Checks that requests, request table, cache and the step in flight are consistent."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.cache import NO_SLOT, CacheIntegrityError, HybridCache
from apt_jax.cache.prefix_hits import Hit
from apt_jax.cache.prefix_tree import extend_digests
from apt_jax.core.kinds import HIDDEN, KV, NO_KIND, WINDOWED
from apt_jax.core.step import NULL_BLOCK
from apt_jax.engine.request_state import InFlightStep, RequestState
from apt_jax.engine.request_states import ENDING, FREE, RUNNING, WAITING, RequestStates


def check_engine(states: RequestStates, offered: Sequence[int], pending: InFlightStep | None) -> None:
    """Check the accounting of an engine that has not stopped.

    Args:
        states: the requests.
        offered: available cache kinds.
        pending: the step in flight; None: no step.

    Raises:
        CacheIntegrityError: the accounting is inconsistent.
    """
    table, cache, live = states.table, states.cache, states.by_id.values()
    cache.check_integrity(state.rank for state in live)
    if states.sessions is not None:
        states.sessions.check_integrity()

    rows = np.array([state.row for state in live], np.int32)
    _require(np.unique(rows).size == rows.size, "two requests share a row")
    _require(
        all(states.by_row[state.row] is state and not state.ended for state in live),
        "a row does not refer to its live request",
    )
    _require(
        np.flatnonzero(states.status != FREE).tolist() == sorted(rows.tolist()),
        "a row without a live request is in use",
    )
    _require(
        np.flatnonzero(table.live).tolist() == sorted(rows.tolist()),
        "the request table has other live rows",
    )
    status, slots = states.status[rows], states.slot[rows]
    running = status == RUNNING
    _require(
        ((slots != NO_SLOT) == running).all(),
        "a running request has no slot, or another request has one",
    )
    _require(
        (table.num_cached[rows] >= 0).all() and (table.num_cached[rows] <= table.num_tokens[rows]).all(),
        "more cached positions than tokens, or fewer than 0",
    )
    _require(
        (table.num_cached[rows[~running]] == 0).all()
        and (table.num_blocks[rows[~running]] == 0).all()
        and (table.num_shared[rows[~running]] == 0).all(),
        "a request that is not running has cache",
    )
    _require((table.kind[rows[~running]] == NO_KIND).all(), "a request that is not running has a cache kind")
    _require(
        int(np.count_nonzero(running)) == int(np.count_nonzero(cache.owner >= 0)),
        "the number of used slots differs from the number of running requests",
    )
    held, held_slots = rows[running], slots[running]
    _require((cache.owner[held_slots] == table.rank[held]).all(), "a slot belongs to another request")
    _require(
        (cache.kind[held_slots] == table.kind[held]).all(),
        "cache and request table have different cache kinds",
    )
    _require(
        (cache.num_tokens[held_slots] == table.num_cached[held]).all(),
        "cache and request table have different numbers of positions",
    )
    private = cache.num_private_blocks_of(held_slots)
    _require(
        (private == table.num_blocks[held]).all()
        and (cache.num_blocks_of(held_slots) - private == table.num_shared[held]).all(),
        "cache and request table have different numbers of blocks",
    )
    _require(
        cache.num_free + cache.num_shared + int(private.sum()) == cache.pool.num_blocks,
        "blocks are charged to two requests, or to no request",
    )
    _check_hits(states, offered, rows)
    known = np.array([state.num_known for state in live], np.int32)
    _require(
        (known + states.in_flight[rows] == table.num_tokens[rows]).all(),
        "tokens in flight are miscounted",
    )
    _require(
        (table.num_outputs[rows] == table.num_tokens[rows] - table.prompt_len[rows]).all(),
        "output tokens are miscounted",
    )
    _require(
        (table.num_tokens[rows] <= table.max_tokens_total[rows]).all(),
        "a request has more tokens than max_tokens allows",
    )
    in_flight = np.zeros(states.in_flight.size, np.int8)
    if pending is not None:
        for i in np.flatnonzero(pending.samples).tolist():
            state = pending.requests[i]
            in_flight[state.row] += not state.ended
    _require((in_flight[rows] == states.in_flight[rows]).all(), "tokens in flight differ from the step in flight")
    ending = rows[status == ENDING]
    _require((states.in_flight[ending] > 0).all(), "a request waits for its last token, but no token is in flight")


def _check_hits(states: RequestStates, offered: Sequence[int], rows: NDArray[np.int32]) -> None:
    """Look up the cached prefix of each waiting request again, and compare it with the tracked hit."""
    table, cache = states.table, states.cache
    hits = states.prefixes.hits
    if hits is not None:
        hits.check_windows()
    cached_prefix_tokens, host_prefix_tokens, shared_prefix_blocks = (
        np.zeros_like(table.cached_prefix_tokens),
        np.zeros_like(table.host_prefix_tokens),
        np.zeros_like(table.shared_prefix_blocks),
    )
    waits = (states.status[rows] == WAITING) & (states.in_flight[rows] == 0)
    for row in rows[waits].tolist() if cache.prefixes is not None else ():
        assert cache.prefixes is not None
        assert hits is not None
        state, found = states.state(row), dict[int, Hit]()
        for kind in offered:
            if states.pinned_kind[row] not in (NO_KIND, kind) or state.needs_all_states:
                continue
            size, digests, blocks = cache.block_sizes[kind], list[bytes](), list[int]()
            extend_digests(digests, state.root, state.tokens[: state.num_known], size)
            for digest in digests:
                node = cache.prefixes.find(kind, digest)
                if node is None:
                    break
                blocks.append(node.block)
            num_host = blocks.count(NULL_BLOCK)
            resident = blocks.index(NULL_BLOCK) if num_host else len(blocks)
            tokens, from_host = hits.usable(kind, len(blocks), resident, num_host, state.num_known - 1)
            if cache.windows is not None:
                tokens = _usable_windows(cache, state, tokens, size)
            taken = blocks[: tokens // size]
            held = (cache.num_refs[taken] > 0) | cache.groups.is_kept[taken]
            shared = int(np.logical_and.accumulate(held).sum()) * cache.blocks_per_group[kind]
            found[kind] = Hit(tokens, from_host, shared)
        converted = hits.by_conversion(found.get(KV), found.get(HIDDEN), state.num_known)
        for kind, hit in (found | ({} if converted is None else {KV: converted})).items():
            cached_prefix_tokens[row, kind], host_prefix_tokens[row, kind], shared_prefix_blocks[row, kind] = hit
    if not (
        np.array_equal(cached_prefix_tokens, table.cached_prefix_tokens)
        and np.array_equal(host_prefix_tokens, table.host_prefix_tokens)
        and np.array_equal(shared_prefix_blocks, table.shared_prefix_blocks)
    ):
        raise CacheIntegrityError("prefix cache hits of waiting requests differ from those in the request table")


def _require(condition: object, message: str) -> None:
    if not condition:
        raise CacheIntegrityError(message)


def _usable_windows(cache: HybridCache, state: RequestState, tokens: int, size: int) -> int:
    """Return the most positions, at most `tokens` and whole groups, after which a token finds its window cached."""
    assert cache.prefixes is not None
    assert cache.windows is not None
    spec, digests = cache.windows.spec, list[bytes]()
    extend_digests(digests, state.root, state.tokens[: state.num_known], spec.block_size)
    cached = [cache.prefixes.find(WINDOWED, digest) is not None for digest in digests]
    step = math.lcm(size, spec.block_size)
    for num in range(tokens // step * step, 0, -step):
        first = max(0, num - spec.window + 1) // spec.block_size
        if num <= len(cached) * spec.block_size and all(cached[first : num // spec.block_size]):
            return num
    return 0
