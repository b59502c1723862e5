"""Block tables live on the device, which gets what is new: whatever happened before, a step reads its rows' blocks."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apt_jax.config import CacheConfig
from apt_jax.core.kinds import HIDDEN, KV, KindSet
from apt_jax.core.step import NULL_BLOCK, StepBatch
from apt_jax.errors import ConfigError
from apt_jax.executor.compiling.buckets import CHANGES_PER_CALL
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.executor.plan import plan_executor
from apt_jax.executor.programs.block_tables import SentTables
from apt_jax.executor.programs.packing import pack_changes, pack_forward
from tests.support.generation import greedy
from tests.support.paged_driver import CONFIG, Driver, few_programs, make_executor, reference_greedy
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy

SLOTS, TABLE_LEN = 4, 12
PROMPTS = {0: [5, 6, 7], 1: list(range(10, 47)), 2: [3], 3: list(range(60, 77))}


def step_tables(lens: list[int], kinds: list[int], rng: np.random.Generator) -> np.ndarray:
    """(n, 2, longest) random blocks, `NULL_BLOCK` behind what a row has."""
    tables = rng.integers(1, 100, (len(lens), 2, max(lens))).astype(np.int32)
    tables[np.arange(max(lens))[None, None, :].repeat(2, 1).repeat(len(lens), 0) >= np.array(lens)[:, None, None]] = 0
    tables[np.array(kinds) == HIDDEN, 1] = NULL_BLOCK
    return tables


@given(st.data())
def test_the_device_has_the_tables_of_every_step(data):
    """Rows come, grow, shrink, change their kind and leave their slot to others, in any order; and once all is lost."""
    sent, device = SentTables((SLOTS, 2, TABLE_LEN)), np.zeros(SLOTS * 2 * TABLE_LEN, np.int32)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    tables: dict[int, np.ndarray] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.integers(0, 5)) == 5:
            sent.clear()
            device[:] = 0
        slots = np.array(data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1)), np.int32)
        lens = [int(rng.integers(1, TABLE_LEN + 1)) for _ in slots]
        batch = step_tables(lens, rng.integers(0, 2, len(slots)).tolist(), rng)
        for row, slot in enumerate(slots.tolist()):  # most blocks of a row are those that it had
            old = tables.get(slot, batch[:0])
            if old.size and rng.random() < 0.7:
                width = min(old.shape[1], lens[row])
                kept = (old[:, :width] != NULL_BLOCK) & (batch[row, :, :width] != NULL_BLOCK)
                batch[row, :, :width][kept] = old[:, :width][kept]
            tables[slot] = batch[row]
        places, blocks = sent.take_changes(slots, batch)
        assert np.unique(places).size == places.size
        device[places] = blocks
        found = device.reshape(SLOTS, 2, TABLE_LEN)[slots, :, : batch.shape[2]]
        assert (found[batch != NULL_BLOCK] == batch[batch != NULL_BLOCK]).all()
        sent.check(device.reshape(SLOTS, 2, TABLE_LEN))
        assert sent.take_changes(slots, batch).size == 0


def test_a_row_sends_the_blocks_that_it_begins():
    sent = SentTables((SLOTS, 2, TABLE_LEN))
    first = np.array([[[1, 2], [3, 4]], [[5, 0], [0, 0]]], np.int32)
    slots = np.array([2, 0], np.int32)
    sent.take_changes(slots, first)
    more = np.array([[[1, 2, 9], [3, 4, 8]], [[5, 0, 0], [0, 0, 0]]], np.int32)
    at = 2 * 2 * TABLE_LEN + 2
    assert sent.take_changes(slots, more).tolist() == [[at, at + TABLE_LEN], [9, 8]]
    # A request of one block takes the slot: what is behind it is not erased, and sent again when it grows.
    assert sent.take_changes(slots[:1], np.array([[[1], [3]]], np.int32)).size == 0
    assert sent.take_changes(slots[:1], more[:1]).tolist() == [[at - 1, at, at - 1 + TABLE_LEN, at + TABLE_LEN], [2, 9, 4, 8]]  # fmt: skip


def test_other_tables_on_the_device_are_noticed():
    sent = SentTables((SLOTS, 2, TABLE_LEN))
    sent.take_changes(np.array([3], np.int32), np.array([[[1], [3]]], np.int32))
    with pytest.raises(RuntimeError, match=r"block tables on the device are wrong in slots \[3\]"):
        sent.check(np.zeros((SLOTS, 2, TABLE_LEN), np.int32))


@given(st.integers(0, 1 << 20), st.booleans())
def test_what_rows_begin_in_a_step_fits_into_it(seed, mixed):
    executor = executor_of_four()
    step_format, rng = executor.step_format, np.random.default_rng(seed)
    lens = np.ones(int(rng.integers(1, 5)), np.int64)
    if rng.random() < 0.7:
        lens += rng.multinomial(int(rng.integers(0, 64 - len(lens) + 1)), np.ones(len(lens)) / len(lens))
    start = rng.integers(0, 128 - lens + 1)
    kinds = rng.integers(0, 2, len(lens))
    sizes = np.where(kinds == KV, executor.block_size, executor.hidden_block_size)
    before, after = -(-start // sizes), -(-(start + lens) // sizes)
    batch = step_tables(after.tolist(), kinds.tolist(), rng)
    sent = SentTables((4, 2, step_format.table_len))
    slots = np.arange(len(lens), dtype=np.int32)
    cached = np.where(np.arange(batch.shape[2])[None, None, :] < before[:, None, None], batch, NULL_BLOCK)
    sent.take_changes(slots, cached)
    n = len(lens)
    step = StepBatch(
        slots=slots, num_tokens=lens.astype(np.int32), start=start.astype(np.int32), kind=kinds.astype(np.int8),
        token_ids=np.ones(int(lens.sum()), np.int32), block_tables=batch, samples=np.ones(n, np.bool_),
        position=np.zeros(n, np.int32), params=(), history=(), prompt_len=np.zeros(n, np.int32),
    )  # fmt: skip
    packed = pack_forward(step, step_format, sent.take_changes(slots, batch), mixed=mixed)
    assert packed.table_changes.size == 0


def test_many_changes_take_several_calls():
    changes = np.stack([np.arange(9000), np.arange(9000) + 7]).astype(np.int32)
    parts = list(pack_changes(changes, 10_000))
    assert [part.shape for part in parts] == [(2, CHANGES_PER_CALL)] * 3
    joined = np.concatenate(parts, axis=1)
    np.testing.assert_array_equal(joined[:, :9000], changes)
    assert (joined[0, 9000:] == 10_000).all()


# --- on the device ---------------------------------------------------------------------------------------------------


@functools.cache
def executor_of_four() -> JaxExecutor:
    return few_programs(make_executor(max_num_seqs=4, conversion=True))


def test_rows_read_the_blocks_in_use_and_no_more():
    """Behind them a slot may name blocks of a request before."""
    programs = executor_of_four().programs
    tables = np.arange(1, 1 + 4 * 2 * programs.step_format.table_len, dtype=np.int32)
    tables = tables.reshape(programs.step_format.tables_shape)
    slots, lens, hidden = np.array([2, 0, 4, 1], np.int32), np.array([9, 4, 0, 5], np.int32), [0, 1, 0, 0]
    found = np.asarray(
        jax.jit(programs._tables_of_rows)(tables, slots, lens, np.array(hidden, np.bool_)),
    )
    expected = np.zeros_like(found)
    expected[0, :, :3] = tables[2, :, :3]
    expected[1, 0, :1] = tables[0, 0, :1]
    expected[3, :, :2] = tables[1, :, :2]
    np.testing.assert_array_equal(found, expected)


class Watched:
    """Compares the device's tables with those of every step of an executor."""

    def __init__(self, executor: JaxExecutor, patch: pytest.MonkeyPatch) -> None:
        self.executor, self.num_calls, self.num_steps = executor, 0, 0
        execute, send = executor.execute, executor.runner.tables_call

        def checked(batch: StepBatch):
            handle = execute(batch)
            found = np.asarray(executor.runner.tables)[batch.slots, :, : batch.block_tables.shape[2]]
            used = batch.block_tables != NULL_BLOCK
            assert (found[used] == batch.block_tables[used]).all()
            self.num_steps += 1
            return handle

        def counted(changes):
            self.num_calls += 1
            return send(changes)

        patch.setattr(executor, "execute", checked)
        patch.setattr(executor.runner, "tables_call", counted)


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize("kind", ["kv", "hidden", "hybrid"])
def test_tokens_are_the_same_where_slots_change_hands(kind, monkeypatch):
    """More requests than slots, preempted, begun again and converted at random, each step dispatched ahead."""
    executor = executor_of_four()
    watched = Watched(executor, monkeypatch)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 97, int(n)).tolist() for n in (1, 5, 53, 18, 33, 9, 2, 40)]
    policy = RandomPolicy(3, RandomPlanPolicy(convert=0.5 if kind == "hybrid" else 0.0))
    tokens = greedy(executor, prompts, 9, kind, "forced preemptions", policy)
    assert tokens == [reference_greedy(prompt, 9)[len(prompt) :] for prompt in prompts]
    assert watched.num_steps > 20
    executor.check_integrity()


def test_a_row_that_comes_with_more_than_a_step_takes(monkeypatch):
    """A decode row whose slot held another request: its blocks travel before the step, in calls of a few entries."""
    monkeypatch.setattr("apt_jax.executor.programs.packing.CHANGES_PER_CALL", 5)
    executor = executor_of_four()
    executor.reset()
    watched = Watched(executor, monkeypatch)
    driver = Driver(executor)
    for slot, prompt in ((0, PROMPTS[1]), (1, PROMPTS[3])):
        driver.add(slot, prompt, KV)
        driver.step({slot: len(prompt)})
    before = watched.num_calls
    fields: list[dict[int, Any]] = [driver.tokens, driver.cached, driver.table, driver.kind]
    for cached in fields:  # each goes on in the slot of the other
        cached[0], cached[1] = cached[1], cached[0]
    driver.step({0: 1, 1: 1})
    assert watched.num_calls - before > 5
    assert not watched.executor.runner.sent_tables.blocks[2:].any()
    driver.step({0: 1, 1: 1}, on_device=True)
    assert driver.tokens[0] == reference_greedy(PROMPTS[3], 3)
    assert driver.tokens[1] == reference_greedy(PROMPTS[1], 3)


def test_a_step_that_failed_leaves_empty_tables(monkeypatch):
    """On both sides, where its changes had been sent and where they had not."""
    executor = executor_of_four()
    driver = Driver(executor)
    for failing in ("forward_call", "tables_call"):
        driver.add(0, PROMPTS[1], KV)
        driver.step({0: 37})
        driver.add(1, PROMPTS[3], KV)
        with monkeypatch.context() as patch:
            patch.setattr(executor.runner, failing, lambda *_: raise_lost())
            patch.setattr("apt_jax.executor.programs.packing.StepFormat.num_table_changes", lambda *_: 1)
            with pytest.raises(RuntimeError, match="lost"):
                driver.step({1: 17})
        executor.reset()
        executor.check_integrity()
        assert not executor.runner.sent_tables.blocks.any()
        driver.add(0, PROMPTS[3], HIDDEN)
        driver.step({0: 17})
        driver.step({0: 1})
        assert driver.tokens[0] == reference_greedy(PROMPTS[3], 2)
        executor.check_integrity()


def raise_lost() -> None:
    raise RuntimeError("lost")


def test_padding_leaves_the_tables_as_they_are():
    executor = executor_of_four()
    driver = Driver(executor)
    driver.add(3, PROMPTS[3], KV)
    driver.step({3: 17})
    before = np.asarray(executor.runner.tables)
    assert before.any()
    executor.runner.empty_tables_call().run()
    executor.runner.empty_forward_call(executor.buckets.decode[-1], 0, KindSet(True, True)).run()
    executor.runner.empty_forward_call(0, executor.buckets.prefill[-1], KindSet(True, True)).run()
    np.testing.assert_array_equal(np.asarray(executor.runner.tables), before)


def test_tables_that_int32_cannot_index_are_refused():
    config = dataclasses.replace(CONFIG, max_position=1 << 22)
    with pytest.raises(ConfigError, match=r"lower --max-num-seqs or --max-model-len, or use a larger --block-size"):
        plan_executor(
            config, cache=CacheConfig(block_size=1), max_num_seqs=256, max_num_batched_tokens=512, max_model_len=1 << 22,
            num_devices=1, platform="cpu", chip=None,
        )  # fmt: skip


def test_what_a_step_sends_does_not_grow_with_the_context():
    sizes = []
    for context in (2048, 1 << 18):
        plan = plan_executor(
            dataclasses.replace(CONFIG, max_position=1 << 18), cache=CacheConfig(), max_num_seqs=64, max_num_batched_tokens=512,
            max_model_len=context, num_devices=1, platform="cpu", chip=None,
        )  # fmt: skip
        step_format = plan.step_format(100)
        layouts = [
            step_format.forward_layout(64, 0),
            step_format.forward_layout(64, 512),
            step_format.penalty_layout(64),
        ]
        sizes.append([layout.size for layout in layouts])
    assert sizes[0] == sizes[1]
    assert sizes[0][0] * 4 < 5000
