import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from apt_jax.cache import NO_SEAT, BlockPool, CacheIntegrityError, CacheKind, HybridCache
from apt_jax.executor import NULL_BLOCK

KV, HIDDEN = CacheKind.KV, CacheKind.HIDDEN


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def make_cache(num_blocks: int = 10, block_size: int = 4, max_num_seqs: int = 4) -> HybridCache:
    return HybridCache(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs)


class TestBlockPool:
    def test_hands_out_every_block_but_the_reserved_one(self):
        pool = BlockPool(5)
        taken = pool.allocate(5)
        assert taken is not None
        assert sorted(taken.tolist()) == [1, 2, 3, 4, 5]
        assert (pool.num_free, pool.num_used) == (0, 5)

    def test_gives_all_or_nothing(self):
        pool = BlockPool(3)
        assert pool.allocate(4) is None
        assert pool.num_free == 3
        pool.check_integrity()

    def test_freed_blocks_are_used_again(self):
        pool = BlockPool(3)
        taken = pool.allocate(3)
        assert taken is not None
        pool.free(taken[1:2])
        again = pool.allocate(1)
        assert again is not None
        assert again.tolist() == taken[1:2].tolist()

    @pytest.mark.parametrize(
        ("freed", "message"),
        [
            (ids(1), "freed twice"),
            (ids(3, 3), "twice"),
            (ids(0), "outside"),
            (ids(-1), "outside"),
            (ids(6), "outside"),
        ],
    )
    def test_refuses_what_was_not_handed_out(self, freed, message):
        pool = BlockPool(5)
        pool.allocate(5)
        pool.free(ids(1))
        with pytest.raises(CacheIntegrityError, match=message):
            pool.free(freed)

    def test_finds_a_block_that_is_on_the_list_twice(self):
        pool = BlockPool(3)
        pool._stack[0] = 1
        with pytest.raises(CacheIntegrityError, match="duplicates"):
            pool.check_integrity()

    def test_is_never_empty(self):
        with pytest.raises(ValueError, match="num_blocks=0"):
            BlockPool(0)


class TestHybridCache:
    @pytest.mark.parametrize(
        ("kind", "num_tokens", "blocks"),
        [(KV, 1, 2), (KV, 4, 2), (KV, 5, 4), (HIDDEN, 1, 1), (HIDDEN, 4, 1), (HIDDEN, 5, 2)],
    )
    def test_takes_whole_blocks_of_its_kind(self, kind, num_tokens, blocks):
        cache = make_cache()
        assert cache.reserve(7, num_tokens, kind)
        assert cache.pool.num_used == blocks == cache.blocks_needed(num_tokens, kind)
        assert cache.blocks_by_kind()[kind] == blocks
        cache.check_integrity([7])

    def test_holds_twice_the_tokens_as_layer_inputs(self):
        for kind, tokens in ((KV, 20), (HIDDEN, 40)):
            cache = make_cache(num_blocks=10)
            assert cache.reserve(0, tokens, kind)
            assert not cache.reserve(0, tokens + 1, kind)

    def test_tables_are_as_drawn(self):
        cache = make_cache()
        cache.reserve(0, 6, KV)
        cache.reserve(1, 3, HIDDEN)
        tables = cache.block_tables(ids(cache.seat_of(0), cache.seat_of(1)))
        assert tables.tolist() == [[[1, 2], [3, 4]], [[5, NULL_BLOCK], [NULL_BLOCK, NULL_BLOCK]]]

    def test_growing_keeps_what_is_there(self):
        cache = make_cache()
        cache.reserve(0, 4, KV)
        before = cache.block_tables(ids(cache.seat_of(0)))
        cache.reserve(0, 9, KV)
        after = cache.block_tables(ids(cache.seat_of(0)))
        assert after.shape == (1, 2, 3)
        assert (after[:, :, :1] == before).all()

    def test_a_failed_reservation_changes_nothing(self):
        cache = make_cache(num_blocks=5)
        cache.reserve(0, 4, KV)
        assert not cache.reserve(0, 12, KV)
        assert not cache.reserve(1, 16, HIDDEN)
        assert cache.seat_of(1) == NO_SEAT
        assert (cache.pool.num_used, cache.num_free_seats) == (2, 3)
        assert cache.reserve(1, 12, HIDDEN)
        cache.check_integrity([0, 1])

    def test_a_request_without_a_seat_must_wait(self):
        cache = make_cache(max_num_seqs=1)
        assert cache.reserve(0, 1, HIDDEN)
        assert not cache.reserve(1, 1, HIDDEN)
        cache.release(0)
        assert cache.reserve(1, 1, HIDDEN)

    def test_the_kind_cannot_change_under_a_request(self):
        cache = make_cache()
        cache.reserve(0, 1, KV)
        with pytest.raises(CacheIntegrityError, match="holds kind"):
            cache.reserve(0, 2, HIDDEN)

    def test_release_gives_everything_back_once(self):
        cache = make_cache()
        cache.reserve(0, 10, KV)
        assert cache.release(0) == 6
        assert (cache.pool.num_free, cache.num_free_seats) == (10, 4)
        with pytest.raises(CacheIntegrityError, match="holds no cache"):
            cache.release(0)

    def test_rows_are_served_in_order_until_the_blocks_are_gone(self):
        cache = make_cache(num_blocks=4)
        cache.reserve(0, 3, HIDDEN)
        owners, seats = np.array([0, 1, 2, 3]), ids(cache.seat_of(0), NO_SEAT, NO_SEAT, NO_SEAT)
        kinds = np.array([HIDDEN, KV, KV, HIDDEN], np.int8)
        ok = cache.reserve_rows(owners, seats, ids(4, 4, 4, 1), kinds)
        assert ok.tolist() == [True, True, False, True]
        assert seats.tolist()[1] == cache.seat_of(1)
        assert seats.tolist()[2] == NO_SEAT
        cache.check_integrity([0, 1, 3])

    def test_tables_grow_with_the_longest_request(self):
        cache = make_cache(num_blocks=300, block_size=1)
        cache.reserve(0, 64, HIDDEN)
        cache.reserve(0, 65, HIDDEN)
        cache.reserve(1, 115, KV)
        cache.check_integrity([0, 1])

    def test_a_damaged_table_never_reaches_a_step(self):
        for value in (0, -1, 11):
            cache = make_cache()
            cache.reserve(0, 6, KV)
            cache.tables[cache.seat_of(0), 1, 1] = value
            with pytest.raises(CacheIntegrityError, match="block table"):
                cache.block_tables(ids(cache.seat_of(0)))

    @pytest.mark.parametrize("damage", ["leak", "twice", "dead owner", "length"])
    def test_recount_finds(self, damage):
        cache = make_cache()
        cache.reserve(0, 6, KV)
        cache.reserve(1, 6, HIDDEN)
        seat = cache.seat_of(1)
        if damage == "leak":
            cache.pool.allocate(1)
        elif damage == "twice":
            cache.tables[seat, 0, 0] = cache.tables[cache.seat_of(0), 0, 0]
        elif damage == "length":
            cache.num_tokens[seat] = 4
        with pytest.raises(CacheIntegrityError):
            cache.check_integrity([0] if damage == "dead owner" else [0, 1])


class CacheMachine(RuleBasedStateMachine):
    """Random reservations and releases, held against a model that only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = HybridCache(num_blocks=13, block_size=3, max_num_seqs=4)
        self.held: dict[int, tuple[int, int]] = {}

    def cost(self, tokens: int, kind: int) -> int:
        return -(-tokens // 3) * (2, 1)[kind]

    @rule(owner=st.integers(0, 6), more=st.integers(1, 9), kind=st.sampled_from([KV, HIDDEN]))
    def reserve(self, owner, more, kind):
        tokens, held_kind = self.held.get(owner, (0, kind))
        free = 13 - sum(self.cost(*h) for h in self.held.values())
        need = self.cost(tokens + more, held_kind) - self.cost(tokens, held_kind)
        fits = need <= free and (owner in self.held or len(self.held) < 4)
        assert self.cache.reserve(owner, tokens + more, held_kind) == fits
        if fits:
            self.held[owner] = tokens + more, held_kind

    @precondition(lambda self: self.held)
    @rule(
        more=st.lists(st.integers(1, 4), min_size=7, max_size=7), kind=st.sampled_from([KV, HIDDEN])
    )
    def reserve_rows(self, more, kind):
        owners = np.arange(7)
        seats = np.array([self.cache.seat_of(o) for o in range(7)], np.int32)
        wanted = [
            (self.held.get(o, (0, 0))[0] + more[o], self.held.get(o, (0, kind))[1])
            for o in range(7)
        ]
        ok = self.cache.reserve_rows(
            owners,
            seats,
            np.array([w[0] for w in wanted], np.int32),
            np.array([w[1] for w in wanted], np.int8),
        )
        for owner in np.flatnonzero(ok).tolist():
            self.held[owner] = wanted[owner]
            assert seats[owner] == self.cache.seat_of(owner)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        owner = data.draw(st.sampled_from(sorted(self.held)))
        assert self.cache.release(owner) == self.cost(*self.held.pop(owner))

    @invariant()
    def counts_are_right(self):
        self.cache.check_integrity(self.held)
        assert self.cache.pool.num_used == sum(self.cost(*h) for h in self.held.values())
        assert self.cache.num_free_seats == 4 - len(self.held)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
