"""Prefix hits of waiting requests: equal to a plain lookup after every event, and updated in the time of what changes."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from apt_jax.cache.hybrid_cache import HybridCache
from apt_jax.cache.prefix_tree import extend_digests
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import NULL_BLOCK
from apt_jax.sched.request_table import RequestTable
from tests.support.cases import num_cases

KINDS = (KV, HIDDEN)


def digests_of(tokens: np.ndarray, size: int) -> list[bytes]:
    found: list[bytes] = []
    extend_digests(found, b"root", tokens.astype(np.int32), size)
    return found


class Pool:
    """A cache, and waiting requests whose hits are compared with lookups."""

    def __init__(self, num_blocks: int, num_host_blocks: int = 0, block_size: int = 2) -> None:
        self.cache = HybridCache(
            num_blocks=num_blocks, block_size=block_size, max_num_seqs=4, prefix_caching=True, num_host_blocks=num_host_blocks
        )  # fmt: skip
        self.table = RequestTable(8)
        self.hits = self.cache.watch_hits(self.table)
        self.size = block_size
        self.waiting: dict[int, list[list[bytes]]] = {}
        self.owners: dict[int, tuple[int, np.ndarray]] = {}
        self.num_least_urgent = 0
        least_urgent = self.hits.least_urgent

        def checked(skip):
            found = least_urgent(skip)
            self.num_least_urgent += 1
            self.check()
            return found

        self.hits.least_urgent = checked  # type: ignore[method-assign]

    def wait(self, tokens: np.ndarray, kinds: Sequence[int] = KINDS) -> int:
        row = self.table.add(
            arrival_s=0.0, rank=len(self.waiting), prompt_len=tokens.size, max_tokens=9, slo_ttft_s=1.0, slo_tbt_s=1.0
        )
        self.waiting[row] = [digests_of(tokens, self.size) if kind in kinds else [] for kind in KINDS]
        self.hits.begin(row, self.waiting[row], kinds)
        return row

    def leave(self, row: int) -> None:
        del self.waiting[row]
        self.hits.end(row)
        self.table.remove(row)

    def path(self, kind: int, digests: list[bytes]) -> Iterator:
        assert self.cache.prefixes is not None
        for digest in digests:
            node = self.cache.prefixes.find(kind, digest)
            if node is None:
                return
            yield node

    def start(self, owner: int, kind: int, tokens: np.ndarray) -> bool:
        """Run a request: attach what is found, and compute and register the rest."""
        digests = digests_of(tokens, self.size)
        found = list(self.path(kind, digests))
        if self.cache.tier is not None:
            self.cache.tier.pin([node for node in found if node.block == NULL_BLOCK])
        if found and not self.cache.attach(owner, found, kind):
            return False
        if not self.cache.reserve(owner, tokens.size, kind):
            if found:
                self.cache.release(owner)
            return False
        new = self.cache.expect(self.cache.slot_of(owner), len(found), len(digests))
        self.cache.register(owner, kind, digests, len(found), *new)
        self.owners[owner] = kind, tokens
        return True

    def next_step(self) -> None:
        if self.cache.tier is not None:
            self.cache.tier.take_transfers()

    def check(self) -> None:
        table = self.table
        for row, digests in self.waiting.items():
            for kind in KINDS:
                blocks = [node.block for node in self.path(kind, digests[kind])]
                most = int(table.num_tokens[row]) - 1
                tokens = min(len(blocks) * self.size, most)
                host = min(blocks.count(NULL_BLOCK) * self.size, tokens)
                held = 0
                for block in blocks[: tokens // self.size]:
                    if block == NULL_BLOCK or not self.cache.num_refs[block]:
                        break
                    held += self.cache.blocks_per_group[kind]
                found = [table.cached_prefix_tokens, table.host_prefix_tokens, table.shared_prefix_blocks]
                assert [int(column[row, kind]) for column in found] == [tokens, host, held], (row, kind)
                if kind in self.hits.kinds_of(row):
                    node = self.hits.node(row, kind)
                    assert node.depth == len(blocks)
                    assert self.hits._placed[row][kind] == self.hits._locate(node)
        assert self.cache.prefixes is not None
        for root in self.cache.prefixes.roots[: len(KINDS)]:
            for node in self.cache.prefixes.subtree(root)[1:]:
                below = self.cache.prefixes.subtree(node)
                assert node.num_below == sum(len(one.rows) for one in below)


@pytest.mark.seeds
@pytest.mark.parametrize("num_host_blocks", [0, 6, 40])
def test_hits_equal_a_lookup_after_every_event(num_host_blocks):
    num_asked = 0
    for seed in range(num_cases(12, every=60)):
        rng = np.random.default_rng([seed, num_host_blocks])
        pool = Pool(num_blocks=int(rng.integers(16, 50)), num_host_blocks=num_host_blocks)
        texts = rng.integers(0, 2, (3, 26))
        for _ in range(120):
            tokens = texts[rng.integers(3)][: int(rng.integers(2, 26))].copy()
            if rng.random() < 0.3:
                tokens[int(rng.integers(tokens.size)) :] += 2
            kind, free = int(rng.integers(2)), [owner for owner in range(4) if owner not in pool.owners]
            match rng.choice(
                ["wait", "leave", "start", "release", "drop", "lose"], p=[0.2, 0.1, 0.38, 0.25, 0.05, 0.02]
            ):
                case "wait" if len(pool.waiting) < 6:
                    pool.wait(tokens, [KINDS, (KV,), (HIDDEN,)][int(rng.integers(3))])
                case "leave" if pool.waiting:
                    pool.leave(int(rng.choice(list(pool.waiting))))
                case "start" if free:
                    pool.start(free[0], kind, tokens)
                case "release" if pool.owners:
                    owner = int(rng.choice(list(pool.owners)))
                    del pool.owners[owner]
                    pool.cache.release(owner)
                case "drop":
                    for row in list(pool.waiting):
                        digests = pool.waiting[row][kind]
                        if digests:
                            pool.cache.drop_prefix(kind, digests, int(rng.integers(len(digests))))
                            break
                case "lose" if not pool.owners:
                    pool.cache.lose_device()
                case _:
                    continue
            pool.check()
            pool.next_step()
            pool.hits.refresh()
            pool.check()
        pool.cache.check_integrity(list(pool.owners))
        num_asked += pool.num_least_urgent
    assert num_asked or num_host_blocks != 6


@pytest.mark.parametrize(("num_host_blocks", "most"), [(0, 0), (2000, 1)])
def test_a_long_prefix_is_walked_at_most_once_per_allocation_that_evicts_its_groups(num_host_blocks, most, monkeypatch):
    pool = Pool(num_blocks=1000, num_host_blocks=num_host_blocks)
    text = np.arange(998)
    assert pool.start(0, KV, text)
    pool.cache.release(0)
    for num in (998, 997, 600):
        pool.wait(text[:num], (KV,))
    pool.wait(np.append(text, 5), (KV,))
    pool.check()
    num_walks, locate = 0, pool.hits._locate

    def counting(node):
        nonlocal num_walks
        num_walks += 1
        return locate(node)

    monkeypatch.setattr(pool.hits, "_locate", counting)
    for owner in range(4):
        num_walks = 0
        assert pool.cache.reserve(owner, 200, KV)
        assert num_walks <= most
        pool.check()
        pool.next_step()


def test_a_group_that_is_dropped_right_after_it_was_evicted_counts_once():
    pool = Pool(num_blocks=40, num_host_blocks=40)
    text = np.arange(40)
    assert pool.start(0, KV, text)
    pool.cache.release(0)
    pool.wait(text, (KV,))
    assert pool.cache.reserve(1, 6, KV)  # the last three groups are in host memory
    pool.next_step()
    groups, nodes = pool.cache.groups, list(pool.path(KV, digests_of(text, 2)))
    assert [node.block == NULL_BLOCK for node in nodes] == 17 * [False] + 3 * [True]
    with pool.hits.together():
        groups._evict(nodes[16].block)
        groups._evict(nodes[15].block)
        groups.drop(nodes[16])
    pool.check()


def test_few_lookups_find_where_a_long_prefix_ends(monkeypatch):
    pool = Pool(num_blocks=1000)
    assert pool.start(0, KV, np.arange(998))
    num_lookups, find = 0, pool.hits._tree.find

    def counting(kind, digest):
        nonlocal num_lookups
        num_lookups += 1
        return find(kind, digest)

    monkeypatch.setattr(pool.hits._tree, "find", counting)
    for num in (0, 2, 4, 500, 996, 998):
        num_lookups = 0
        row = pool.wait(np.concatenate([np.arange(num), np.full(1000, -1)]), (KV,))
        assert num_lookups <= 2 + 2 * num.bit_length()
        assert pool.hits.node(row, KV).depth == num // 2
