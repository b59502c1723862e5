"""Blocks shared by a real-time and a best-effort request: contents, slot by slot, against a plain model."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from apt_jax.cache import NO_SLOT, BlockPool, HybridCache
from apt_jax.cache.sharing import BlockSharing, SlotTransfers
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import NULL_BLOCK
from apt_jax.lab.eager_checkpoints import checkpoint_at_once
from tests.cache.test_hybrid_cache import histories

SIZE = 4
LARGEST = 8


class Memory:
    """Contents of every slot, (owner, half, position), of the pool and of host memory."""

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.device: dict[int, list[Any]] = {b: [None] * LARGEST for b in range(num_blocks + 1)}
        self.host: dict[int, list[Any]] = {b: [None] * LARGEST for b in range(num_host_blocks + 1)}
        self.num_moved = 0

    def move(self, transfers: SlotTransfers) -> None:
        saved = [(host, at, self.device[block][at : at + n]) for block, host, at, n, _ in transfers.saves]
        copied = [(new, list(self.device[old])) for old, new in transfers.copies]
        assert len({new for new, _ in copied}) == len(copied)
        loaded = [(block, at, self.host[host][at : at + n]) for host, block, at, n, _ in transfers.loads]
        for host, at, values in saved:
            self.host[host][at : at + len(values)] = values
        for new, values in copied:
            self.device[new] = values
        for block, at, values in loaded:
            self.device[block][at : at + len(values)] = values
        self.num_moved += sum(n for *_, n, _ in transfers.saves)


def slot_of(position: int, size: int, *, down: bool) -> int:
    return size - 1 - position % size if down else position % size


class World:
    """Requests over one cache, each of a class and a kind."""

    def __init__(
        self, num_blocks: int = 14, num_host_blocks: int = 40, max_num_seqs: int = 6, hidden_size: int = SIZE
    ) -> None:
        self.cache = HybridCache(
            num_blocks=num_blocks, block_size=SIZE, hidden_block_size=hidden_size, max_num_seqs=max_num_seqs
        )
        self.best_effort: dict[int, bool] = {}
        self.host = BlockPool(num_host_blocks)
        self.sharing = BlockSharing(self.cache, self.host, self.best_effort.__getitem__)
        self.memory = Memory(num_blocks, num_host_blocks)
        self.length: dict[int, int] = {}
        self.kind: dict[int, int] = {}
        self.next_owner = 0

    def add(self, length: int, kind: int, *, best_effort: bool) -> int:
        owner = self.next_owner
        self.next_owner += 1
        self.best_effort[owner], self.length[owner], self.kind[owner] = best_effort, length, kind
        return owner

    def step(self, owners: list[int], more: int = 1) -> list[int]:
        """Run requests: those that hold cache grow, the others begin. Returns those that could."""
        cache = self.cache
        start = {o: 0 if cache.slot_of(o) == NO_SLOT else int(cache.num_tokens[cache.slot_of(o)]) for o in owners}
        tokens = {o: start[o] + more if start[o] else self.length[o] for o in owners}
        ok = self.sharing.reserve_rows(
            np.array(owners, np.int64),
            np.array([cache.slot_of(o) for o in owners], np.int32),
            np.array([tokens[o] for o in owners], np.int32),
            np.array([self.kind[o] for o in owners], np.int8),
            np.array([self.best_effort[o] for o in owners], np.bool_),
        )
        ran = [owner for owner, runs in zip(owners, ok.tolist(), strict=True) if runs]
        self.length.update((owner, tokens[owner]) for owner in ran)
        transfers = self.sharing.take_transfers()
        for owner in transfers.lost:
            assert owner not in ran
            cache.release(owner)
        self.memory.move(transfers)
        for owner in ran:
            self._check(owner, start[owner])
            for position in range(start[owner], self.length[owner]):
                for half, block, slot in self._slots(owner, position):
                    self.memory.device[block][slot] = (owner, half, position)
            self._check(owner, self.length[owner])
        return ran

    def is_complete(self, owner: int) -> bool:
        """Return True if all that a request has is on the device."""
        return self.cache.slot_of(owner) not in self.sharing.preempted.of_slot

    def _slots(self, owner: int, position: int):
        cache = self.cache
        slot, size = cache.slot_of(owner), cache.block_sizes[self.kind[owner]]
        entry = position // size
        down = bool(self.sharing.downwards(np.array([slot], np.int32), entry + 1)[0, entry])
        for half in range(cache.blocks_per_group[self.kind[owner]]):
            block = int(cache.tables[slot, half, entry])
            assert block != NULL_BLOCK
            yield half, block, slot_of(position, size, down=down)

    def _check(self, owner: int, num_tokens: int) -> None:
        assert self.is_complete(owner)
        for position in range(num_tokens):
            for half, block, slot in self._slots(owner, position):
                assert self.memory.device[block][slot] == (owner, half, position)

    def check(self) -> None:
        self.cache.check_integrity()
        for kind in (KV, HIDDEN):
            found = list(zip(*(a.tolist() for a in self.sharing.lone_groups(kind, down=True)), strict=True))
            assert found == find_preempt_block(self, kind)
        for owner, slot in self.cache.slot_by_owner.items():
            for entry in range(int(self.cache.num_groups[slot])):
                kept = self.sharing.preempted.on_device((slot, entry))
                begin = entry * self.cache.block_sizes[self.kind[owner]]
                for position in range(begin, begin + kept):
                    for half, block, at in self._slots(owner, position):
                        assert self.memory.device[block][at] == (owner, half, position)


def find_preempt_block(world: World, kind: int) -> list[tuple[int, int, int]]:
    """BROS §5.2, word for word: "always preempt BE cache blocks with the most empty slots", of "BE-only cache blocks".

    Returns:
        Slot, entry and empty slots of each, in the order in which they are preempted.
    """
    cache, users = world.cache, {}
    size = cache.block_sizes[kind]
    for owner, slot in cache.slot_by_owner.items():
        for entry in range(int(cache.num_groups[slot])):
            block = int(cache.tables[slot, 0, entry])
            if block != NULL_BLOCK:
                users.setdefault(block, []).append((owner, slot, entry))
    only: list[tuple[int, int, int, int]] = []
    for block, holders in users.items():
        owner, slot, entry = holders[0]
        if len(holders) == 1 and world.best_effort[owner] and world.kind[owner] == kind:
            cells = world.memory.device[block]
            used = sum(cell is not None and cell[0] == owner and cell[2] // size == entry for cell in cells)
            lacks = world.sharing.preempted.of_slot.get(slot, {}).get(entry)
            empty = size - (used if lacks is None else lacks.kept)
            only.append((empty, owner, slot, entry))
    only.sort(key=lambda each: (-each[0], -each[1], -each[3]))  # the paper does not say which of equal ones
    return [(slot, entry, empty) for empty, _, slot, entry in only]


def moved_blocks(world: World) -> tuple[float, float]:
    """Return the blocks' worth of slots that have been saved and loaded."""
    traffic = world.sharing.traffic()
    return traffic.saved_blocks, traffic.loaded_blocks


def preemption_table(world: World) -> list[tuple[int, int, int | None]]:
    """The preemption table as the paper has it: (first block or `NULL_BLOCK`, owner, owner that shares it)."""
    cache, sharing = world.cache, world.sharing
    lines = []
    for slot, table in sharing.preempted.of_slot.items():
        for entry in table:
            first = int(cache.tables[slot, 0, entry])
            pair = sharing.shared.get(first)
            other = None if pair is None else int(cache.owner[pair.sides(slot)[1][0]])
            lines.append((first, int(cache.owner[slot]), other))
    return lines


def test_slots_of_the_other_are_used_only_when_needed_and_saved_first():
    world = World(num_blocks=4)
    batch = world.add(6, KV, best_effort=True)  # two groups, of 4 and of 2 positions
    assert world.step([batch]) == [batch]
    chat = world.add(2, KV, best_effort=False)
    assert world.step([chat]) == [chat]
    cache, sharing = world.cache, world.sharing
    low, high = cache.slot_of(batch), cache.slot_of(chat)
    assert cache.tables[high, 0, 0] == cache.tables[low, 0, 1]  # that with the most empty slots
    assert world.memory.num_moved == 0
    assert world.is_complete(batch)
    assert world.step([chat]) == [chat]  # takes the first slot of the other
    assert world.memory.num_moved == 2  # its key and its value
    assert preemption_table(world) == [(int(cache.tables[low, 0, 1]), batch, chat)]
    assert sharing.preempted.num_blocks_of(np.array([low, high], np.int32)).tolist() == [2, 0]
    assert world.step([chat]) == [chat]
    assert world.memory.num_moved == 4
    assert cache.tables[low, 0, 1] == NULL_BLOCK  # nothing of it is left there
    cache.release(chat)
    assert world.step([batch]) == [batch]
    assert world.is_complete(batch)
    world.check()


def test_without_laziness_a_group_is_checkpointed_when_it_is_taken():
    world = World(num_blocks=4)
    checkpoint_at_once(world.sharing)
    batch, chat = world.add(6, KV, best_effort=True), world.add(1, KV, best_effort=False)
    world.step([batch])
    assert world.step([chat]) == [chat]
    assert world.memory.num_moved == 4  # both positions, though there is room for all three
    low = world.cache.slot_of(batch)
    assert world.cache.tables[low, 0, 1] == NULL_BLOCK
    world.check()


def test_a_request_that_runs_keeps_its_slots():
    world = World(num_blocks=4)
    batch, chat = world.add(6, KV, best_effort=True), world.add(2, KV, best_effort=False)
    world.step([batch])
    world.step([chat])
    assert world.step([chat, batch]) == [chat]  # the slot that it needs is not the other's to use
    assert not world.is_complete(batch)
    assert world.step([batch]) == [batch]  # now the chat is incomplete
    assert not world.is_complete(chat)
    assert world.step([chat]) == [chat]
    assert not world.is_complete(batch)
    world.check()


def test_a_request_leaves_one_group_and_joins_another_in_the_same_step():
    world = World(num_blocks=3)
    batch, filler = world.add(4, HIDDEN, best_effort=True), world.add(1, KV, best_effort=False)
    assert world.step([filler, batch]) == [filler, batch]
    chat = world.add(2, HIDDEN, best_effort=False)
    assert world.step([chat]) == [chat]  # in the group of the batch, two slots of which are saved
    world.cache.release(filler)
    other = world.add(1, HIDDEN, best_effort=False)
    assert world.step([chat, other, batch]) == [chat, other, batch]
    cache = world.cache
    low = cache.slot_of(batch)
    assert cache.tables[low, 0, 1] == cache.tables[cache.slot_of(other), 0, 0]  # the new position's
    assert cache.tables[low, 0, 0] != cache.tables[cache.slot_of(chat), 0, 0]  # a copy
    assert world.is_complete(batch)
    world.check()


def test_best_effort_requests_end_in_blocks_with_room():
    world = World(num_blocks=2)
    chat, batch = world.add(1, KV, best_effort=False), world.add(2, KV, best_effort=True)
    assert world.step([chat]) == [chat]
    assert world.step([batch]) == [batch]
    assert world.memory.num_moved == 0
    assert not world.step([world.add(2, KV, best_effort=True)])
    world.check()


def test_without_room_in_host_memory_a_request_loses_its_cache():
    world = World(num_blocks=4, num_host_blocks=1)
    batch, chat = world.add(6, KV, best_effort=True), world.add(3, KV, best_effort=False)
    world.step([batch])
    assert world.step([chat]) == [chat]
    assert world.cache.slot_of(batch) == NO_SLOT
    world.check()


@pytest.mark.parametrize("kind", [KV, HIDDEN])
def test_bytes_that_travel_are_those_of_the_overwritten_slots(kind):
    halves = 2 if kind == KV else 1
    world = World(num_blocks=2 * halves)
    batch, chat = world.add(8, kind, best_effort=True), world.add(3, kind, best_effort=False)
    world.step([batch])
    world.step([chat])
    assert world.memory.num_moved == halves * 3
    for _ in range(3):
        world.step([chat])
    assert world.memory.num_moved == halves * 6
    assert world.sharing.preempted.saved_slots[kind] == 6
    assert moved_blocks(world) == (halves * 6 / SIZE, 0)


@pytest.mark.parametrize("size", [SIZE, 3, 6, LARGEST])
def test_groups_of_layer_inputs_have_a_size_of_their_own(size):
    """A chat takes the slots of a batch one by one, and the batch comes back."""
    world = World(num_blocks=2, hidden_size=size)
    batch, chat = world.add(2 * size - 1, HIDDEN, best_effort=True), world.add(1, HIDDEN, best_effort=False)
    assert world.step([batch]) == [batch]
    assert world.step([chat]) == [chat]
    assert world.memory.num_moved == 0  # the last slot of the batch's second group
    low = world.cache.slot_of(batch)
    for number in range(1, size):
        assert world.step([chat]) == [chat]
        assert world.memory.num_moved == number
        assert world.sharing.preempted.on_device((low, 1)) == size - 1 - number
        world.check()
    assert world.step([chat]) == [chat]  # its second group: the first one of the batch
    assert world.sharing.preempted.on_device((low, 0)) == size - 1
    assert moved_blocks(world) == (1.0, 0)
    world.cache.release(chat)
    assert world.step([batch]) == [batch]
    world.check()


@pytest.mark.parametrize("size", [3, 6, LARGEST])
def test_running_requests_share_a_group_of_layer_inputs_while_it_holds_both(size):
    world = World(num_blocks=3, hidden_size=size)
    filler = world.add(1, KV, best_effort=False)
    batch, chat = world.add(1, HIDDEN, best_effort=True), world.add(1, HIDDEN, best_effort=False)
    assert world.step([filler, batch]) == [filler, batch]
    assert world.step([chat]) == [chat]
    for _ in range(size // 2 - 1):
        assert world.step([chat, batch]) == [chat, batch]
        world.check()
    assert world.memory.num_moved == 0
    assert world.step([chat, batch]) == [chat]
    world.check()


@pytest.mark.parametrize("size", [3, 6, LARGEST])
def test_best_effort_requests_end_in_groups_of_layer_inputs_with_room(size):
    world = World(num_blocks=1, hidden_size=size)
    chat = world.add(1, HIDDEN, best_effort=False)
    assert world.step([chat]) == [chat]
    assert not world.step([world.add(size, HIDDEN, best_effort=True)])
    batch = world.add(size - 1, HIDDEN, best_effort=True)
    assert world.step([batch]) == [batch]
    assert world.memory.num_moved == 0
    world.check()


def test_a_group_that_gets_a_second_user_is_not_registered_by_a_step_in_flight():
    world = World(num_blocks=2)
    batch, chat = world.add(4, KV, best_effort=True), world.add(1, KV, best_effort=False)
    assert world.step([batch]) == [batch]
    cache, groups = world.cache, world.cache.groups
    firsts, generations = cache.expect(cache.slot_of(batch), 0, 1)
    assert world.step([chat]) == [chat]
    assert not groups.is_expected[firsts].any()
    assert (groups.generation[firsts] > generations).all()
    cache.register(batch, KV, [b"of the batch"], 0, firsts, generations)
    world.check()
    assert len(world.sharing.shared) == 1
    cache.release(batch)
    cache.release(chat)
    assert (groups.num_idle_blocks, groups.pool.num_free) == (0, 2)


def test_nothing_is_saved_of_a_request_that_has_given_everything_back():
    """Its host blocks may be another's in the same step."""
    world = World(num_blocks=2)
    batch, chat = world.add(4, KV, best_effort=True), world.add(2, KV, best_effort=False)
    assert world.step([batch]) == [batch]
    cache, sharing = world.cache, world.sharing
    free = world.host.num_free
    ok = sharing.reserve_rows(
        np.array([chat], np.int64),
        np.array([NO_SLOT], np.int32),
        np.array([2], np.int32),
        np.array([KV], np.int8),
        np.array([False]),
    )
    assert ok.all()
    assert len(sharing.preempted.transfers.saves) == 2
    assert sharing.preempted.saved_slots == [2, 0]
    cache.release(batch)
    assert (sharing.take_transfers().saves, sharing.preempted.saved_slots) == ([], [0, 0])
    assert world.host.num_free == free
    cache.check_integrity()


class SharingMachine(RuleBasedStateMachine):
    """Random steps of random requests: what runs finds every slot as it wrote it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(
        num_blocks=st.integers(4, 20),
        num_host_blocks=st.integers(1, 30),
        is_lazy=st.booleans(),
        hidden_size=st.sampled_from([SIZE, 3, LARGEST]),
    )
    def begin(self, num_blocks, num_host_blocks, is_lazy, hidden_size):
        self.world = World(num_blocks, num_host_blocks, hidden_size=hidden_size)
        if not is_lazy:
            checkpoint_at_once(self.world.sharing)

    @rule(length=st.integers(1, 14), kind=st.sampled_from([KV, HIDDEN]), best_effort=st.booleans())
    def add(self, length, kind, best_effort):
        if len(self.world.length) < 8:
            self.world.add(length, kind, best_effort=best_effort)

    @precondition(lambda self: self.world.length)
    @rule(data=st.data(), more=st.integers(1, 6))
    def step(self, data, more):
        owners = data.draw(st.lists(st.sampled_from(sorted(self.world.length)), unique=True, max_size=4))
        owners.sort(key=self.world.best_effort.__getitem__)  # real-time requests first, as in a batch
        self.world.step(owners, more)

    @precondition(lambda self: self.world.cache.slot_by_owner)
    @rule(data=st.data(), ends=st.booleans())
    def release(self, data, ends):
        owner = data.draw(st.sampled_from(sorted(self.world.cache.slot_by_owner)))
        assume(owner in self.world.length)
        self.world.cache.release(owner)
        if ends:
            del self.world.length[owner]

    @invariant()
    def adds_up(self):
        self.world.check()


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = histories(60, 1000)
