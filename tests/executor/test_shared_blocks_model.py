"""Blocks of two requests in the programs: positions from the right end of a block, in every way to attend."""

import functools
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import StepBatch
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.executor.transfers.host_saver import HostSaver
from apt_jax.sched import Policy, make_policy
from tests.support.cases import num_cases
from tests.support.host_executor import make_host_executor
from tests.support.paged_driver import GREEDY, Driver, few_programs, make_executor, reference_greedy
from tests.support.random_plan_policy import PerturbedPolicy, RandomPlanPolicy
from tests.support.shared_serving import draw_requests, serve

PROMPTS = {0: [5, 6, 7, 8, 9, 10, 11], 1: [12, 13, 14, 15, 16], 2: [17, 18], 3: [19] * 9}


class SharingDriver(Driver):
    """Rows 1 and 3 have all blocks from the right; each shares its first blocks with the row before it, as far as both
    leave slots of them free."""

    def add(self, slot: int, prompt: list[int], kind: int) -> None:
        super().add(slot, prompt, kind)
        if slot % 2:
            self.table[slot] = -self.table[slot]


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize("ops", ["cpu", "xla"])
@pytest.mark.parametrize("attention", ["auto", "reproject"])
def test_tokens_are_those_of_blocks_of_their_own(ops, attention):
    executor = few_programs(make_executor(attention=attention, ops=ops, both_ends=True))
    driver = SharingDriver(executor)
    kinds = {0: KV, 1: KV, 2: HIDDEN, 3: HIDDEN}
    for slot, prompt in PROMPTS.items():
        driver.add(slot, prompt, kinds[slot])
    driver.step({0: 7, 1: 3, 2: 2, 3: 4})
    driver.step({0: 1, 1: 2, 2: 1, 3: 5})
    for _ in range(8):
        driver.step(dict.fromkeys(PROMPTS, 1))
    for slot, prompt in PROMPTS.items():
        assert driver.tokens[slot] == reference_greedy(prompt, len(driver.tokens[slot]) - len(prompt))


def neighbours(executor: JaxExecutor, kind: int) -> None:
    """Two requests in one block of four slots, one position each at first."""
    tables = np.zeros((2, 2, 2), np.int32)
    tables[0, : 2 - kind, 0], tables[1, : 2 - kind, 0] = [9, 10][: 2 - kind], [-9, -10][: 2 - kind]
    tokens = {0: [5], 1: [12]}
    for step in range(2):
        batch = StepBatch(
            slots=np.arange(2, dtype=np.int32), num_tokens=np.ones(2, np.int32), start=np.full(2, step, np.int32),
            kind=np.full(2, kind, np.int8), token_ids=np.array([tokens[0][-1], tokens[1][-1]], np.int32),
            block_tables=tables, samples=np.ones(2, np.bool_), position=np.full(2, step, np.int32),
            params=[GREEDY] * 2, history=[np.array(tokens[r], np.int32) for r in range(2)],
            prompt_len=np.ones(2, np.int32),
        )  # fmt: skip
        result = executor.execute(batch).result()
        for row in range(2):
            tokens[row].append(int(result.token_ids[row]))
    assert tokens[0] == reference_greedy([5], 2)
    assert tokens[1] == reference_greedy([12], 2)


@pytest.mark.parametrize("kind", [KV, HIDDEN])
def test_two_requests_fill_one_block_from_both_ends(kind):
    neighbours(few_programs(make_executor(both_ends=True)), kind)


@functools.cache
def sharing_executor() -> JaxExecutor:
    """A pool of 30 blocks of four positions, and host memory."""
    return make_host_executor(num_blocks=30, max_num_seqs=6, host_sizes=(16,), both_ends=True)


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.seeds
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["kv", "hidden", "hybrid"])
def test_requests_that_share_blocks_say_what_they_say_alone(kind, monkeypatch):
    """Random requests of both classes: blocks shared and checkpointed, prefixes of host memory, preemption, transfers
    that fail and clients that leave."""
    made = sharing_executor()
    assert made.host is not None
    assert made.host.slots is not None
    moved = 0
    store = HostSaver._store
    for seed in range(num_cases(4, 700)):
        rng = np.random.default_rng([seed, 5])
        requests, lost = draw_requests(rng), np.random.default_rng(seed)
        expected = serve(made, requests, kind, make_policy("fcfs"), share=False)

        def fail(*args: Any, seed=seed, lost=lost) -> None:
            if seed % 3 == 0 and lost.random() < 0.2:
                return
            store(*args)

        monkeypatch.setattr(HostSaver, "_store", staticmethod(fail))
        before = made.host.slots.saved_bytes, made.host.slots.loaded_bytes
        policy: Policy = make_policy("bros")
        if seed % 2:
            policy = PerturbedPolicy(policy, seed, RandomPlanPolicy(preempt=0.03, skip=0.1, chunk=0.2, flip=0.2))
        aborted = {int(rng.integers(7)): int(rng.integers(1, 8))} if seed % 4 == 0 else {}
        said = serve(made, requests, kind, policy, share=True, aborted=aborted)
        for number, (tokens, same) in enumerate(zip(said, expected, strict=True)):
            assert tokens == (same[: len(tokens)] if number in aborted else same), (seed, number)
        saved, loaded = (
            a - b for a, b in zip((made.host.slots.saved_bytes, made.host.slots.loaded_bytes), before, strict=True)
        )
        assert saved % (2 * 64 * 4) == loaded % (2 * 64 * 4) == 0  # slots over two layers, 64 lanes of float32
        moved += saved
    assert moved


@pytest.fixture
def held_saver():
    """Host memory whose saves wait until the test calls what it is given."""
    host = sharing_executor().host
    assert host is not None
    assert host.slots is not None
    sharing_executor().reset()
    runner, rng = sharing_executor().runner, np.random.default_rng(1)
    runner.pools = tuple(jnp.asarray(rng.standard_normal(pool.shape, np.float32)) for pool in runner.pools)
    go = threading.Event()
    host._saver._thread.submit(go.wait)
    yield host, go.set
    go.set()


def test_slots_that_are_to_be_saved_are_not_what_they_were_before(held_saver):
    host, go = held_saver
    saves, span = np.array([[1, 5, 0, 2, KV]], np.int32), np.array([[5, 0, 2, KV]], np.int32)
    for _ in range(2):
        host.slots.announce(saves)
    host.slots.save(saves)
    go()
    assert host.slots_ready(span).all()
    host.slots.save(saves)
    host.slots.announce(saves)  # while the one before may be under way, and nothing comes of it
    assert not host.slots_ready(span).any()
    host.slots.save(saves)
    assert host.slots_ready(span).all()
    host._memory[4, 0, 0] += 1
    assert not host.slots_ready(span).any()


def test_blocks_and_slots_are_saved_in_the_order_of_their_dispatch(held_saver):
    """A block that was lent for slots is a cached group's next, or the other way round."""
    host, go = held_saver
    slots, blocks = np.array([[1, 6, 1, 2, KV]], np.int32), np.array([[2, 6]], np.int32)
    host.slots.announce(slots)
    host.slots.save(slots)
    host.announce(blocks)
    host.save(blocks)
    go()
    assert host.ready_to_load(np.array([6], np.int32)).all()
    np.testing.assert_array_equal(host._memory[5], np.stack([pool[2] for pool in sharing_executor().runner.pools]))
    host.slots.announce(slots)
    host.slots.save(slots)
    assert host.slots_ready(np.array([[6, 1, 2, KV]], np.int32)).all()
    assert not host.ready_to_load(np.array([6], np.int32)).any()
