"""Requests go from layer inputs to keys and values while they run: blocks, promises, and the same tokens."""

import dataclasses

import numpy as np
import pytest

from apt_jax.cache import CacheIntegrityError, HybridCache
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import Conversions, StepBatch
from apt_jax.costs.model import StepCosts
from apt_jax.request import SamplingParams
from apt_jax.sched.plan_check import check_plan
from apt_jax.sched.step_packer import decode_plan, split_running
from apt_jax.sched.view import Plan, SchedulerView
from tests.support.fake_executor import BatchContractError, FakeExecutor, Fault, FaultKind
from tests.support.fake_serving import VOCAB_SIZE, Served, prompt


class Converter:
    """Everybody begins with layer inputs, alone in its step or together; who has `after` tokens is converted."""

    name = "converter"

    def __init__(self, after: int = 3, chunk: int = 1000) -> None:
        self.after, self.chunk = after, chunk
        self.plans: list[tuple[SchedulerView, Plan]] = []
        self.checks = True

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        decoding, partial = split_running(view)
        begin = view.waiting[: 1 if decoding.size else None]
        rows = np.concatenate([decoding, partial, begin])
        kind = np.where(table.kind[rows] < 0, np.int8(HIDDEN), table.kind[rows])
        if not rows.size:
            return Plan.idle()
        num_tokens = np.minimum(view.remaining(rows, kind), self.chunk).astype(np.int32)
        ready = (table.num_outputs[rows] >= self.after) & (table.kind[rows] == HIDDEN)
        plan = Plan(
            rows=rows,
            num_tokens=num_tokens,
            kind=kind,
            preempt=view.running[:0],
            iteration="mixed",
            convert=rows[ready],
        )
        if self.checks:
            check_plan(view, plan)
        self.plans.append((view, plan))
        return plan


class AllKv:
    """First come, first served, with keys and values."""

    name = "all-kv"

    def schedule(self, view: SchedulerView) -> Plan:
        if view.running.size:
            return decode_plan(view, view.running, view.running[:0])
        kind = np.full(view.waiting.size, KV, np.int8)
        return Plan(
            rows=view.waiting,
            num_tokens=view.remaining(view.waiting, kind),
            kind=kind,
            preempt=view.waiting[:0],
            iteration="prefill",
        )


def served(policy: Converter | None = None, **options) -> Served:
    made = Served(**options)
    made.engine.policy = policy or Converter()
    return made


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("inputs", [4, 5, 3])
def test_tokens_are_the_same_and_nothing_is_computed_again(overlap, prefix_caching, inputs):
    made = served(overlap=overlap, prefix_caching=prefix_caching, hidden_block_size=inputs)
    for length in (1, 3, 4, 5, 17):
        made.add(prompt(length, length), 12)
    made.drain()
    made.assert_as_expected()
    stats = made.engine.stats()
    assert (stats.num_conversions, stats.num_preemptions, stats.recomputed_tokens) == (5, 0, 0)
    assert not sum(stats.kind_switches.values())
    steps = [b for b in made.batches if b.conversions is not None]
    assert sum(b.conversions.rows.size for b in steps if b.conversions) == 5
    for batch in steps:
        assert batch.conversions is not None
        assert (batch.kind[batch.conversions.rows] == KV).all()
        assert batch.num_converted_tokens == batch.start[batch.conversions.rows].sum() > 0
    assert sum(int(b.num_tokens.sum()) for b in made.batches) == 1 + 3 + 4 + 5 + 17 + 5 * 11


def test_table_and_metrics_say_kv_afterwards():
    made = served(Converter(after=2))
    name = made.add(prompt(9), 6)
    rows = []
    while made.engine.has_work:
        made.step()
        running = made.engine.view().running
        if running.size:
            table, row = made.engine.table, int(running[0])
            rows.append((int(table.kind[row]), int(table.num_blocks[row]), int(table.num_cached[row])))
    kinds = [kind for kind, _, _ in rows]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {KV, HIDDEN}
    for kind, blocks, cached in rows:
        groups = -(-cached // 4)
        assert blocks == (2 * groups if kind == KV else groups)
    made.assert_as_expected()
    assert made.ended[name] == "length"


def test_a_chunk_of_a_prompt_can_be_converted():
    policy = Converter(after=0, chunk=6)
    made = served(policy)
    made.add(prompt(23), 3)
    made.drain()
    made.assert_as_expected()
    (batch,) = [b for b in made.batches if b.conversions is not None]
    assert (int(batch.start[0]), int(batch.num_tokens[0])) == (6, 6)


def test_new_blocks_are_found_as_keys_and_values_by_those_who_begin_alike():
    made = served()
    text = prompt(16)
    made.serve(text, 10)
    kv_nodes = made.engine.cache.prefixes
    assert kv_nodes is not None
    assert kv_nodes.num_nodes(KV) == (16 + 10 - 1) // 4  # all full groups
    assert kv_nodes.num_nodes(HIDDEN) == 4  # as they were until then
    made.engine.policy = AllKv()
    name = made.serve([*text, *made.tokens["r0"]], 2)
    made.assert_as_expected()
    assert made.cached[name] == 24


def test_layer_inputs_that_others_hold_stay_with_them():
    made = served(Converter(after=4), overlap=False)
    text = prompt(12)
    made.serve(text, 1)  # leaves three groups of layer inputs
    for more in (1, 2):
        made.add([*text, more], 7)
        made.step()
    made.drain()
    made.assert_as_expected()
    steps = [b for b in made.batches if b.conversions is not None]
    (first, second) = steps  # the second begins a step later
    assert first.conversions is not None
    assert second.conversions is not None
    held = first.conversions.inputs[0, :3]
    assert np.array_equal(held, second.conversions.inputs[0, :3])  # nobody has taken them away


def test_without_blocks_a_request_stays_hidden_and_goes_on():
    policy = Converter(after=2)
    made = served(policy, num_blocks=40)
    pool = made.engine.cache.pool
    allocate, refused = pool.allocate, []

    def fails(num: int):
        if num >= 4 and len(refused) < 3:  # a conversion asks for all of its blocks at once
            refused.append(num)
            return None
        return allocate(num)

    pool.allocate = fails
    made.add(prompt(9), 9)
    made.drain()
    made.assert_as_expected()
    stats = made.engine.stats()
    assert len(refused) == 3
    assert (stats.num_conversions, stats.num_deferred_requests, stats.num_preemptions) == (1, 0, 0)


def test_a_request_that_can_have_no_block_at_all_is_deferred():
    made = served(Converter(after=1))
    made.add(prompt(4), 6)  # the next position needs a block of either kind
    made.step()
    pool = made.engine.cache.pool
    allocate = pool.allocate
    pool.allocate = lambda num: None
    made.step()
    pool.allocate = allocate
    made.drain()
    made.assert_as_expected()
    stats = made.engine.stats()
    assert (stats.num_deferred_requests, stats.num_conversions) == (1, 1)


@pytest.mark.parametrize("kind", [FaultKind.RAISE_AFTER, FaultKind.RAISE_IN_RESULT])
def test_M8_a_step_that_fails_while_it_converts_loses_no_request(kind):
    def fault(batch: StepBatch) -> Fault | None:
        planted.append(batch.conversions is not None and not any(planted))
        return Fault(kind=kind) if planted[-1] else None

    planted: list[bool] = []
    made = served(fault=fault)
    made.add(prompt(9), 8)
    made.drain()
    made.assert_as_expected()
    assert any(planted)
    assert made.engine.stats().step_failures == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_M8_an_interrupted_conversion_leaves_the_old_kind_or_the_new_one(how, overlap):
    """A mixture would change the tokens, as what a step reads is tagged with its kind."""
    made = served(overlap=overlap)
    names = [made.add(prompt(9, seed), 8) for seed in range(3)]
    interrupted = 0
    while made.engine.has_work:
        num = len(made.batches)
        made.step()
        if interrupted == 0 and any(b.conversions is not None for b in made.batches[num:]):
            interrupted = sum(getattr(made.engine, how)(name) for name in names[:2])
            made.engine.check_integrity()
    assert interrupted == 2
    ended = "abort" if how == "abort" else "length"
    assert [made.ended[name] for name in names] == [ended, ended, "length"]
    for name in names:
        expected = made.expected(name)
        assert made.tokens[name] == (expected[: len(made.tokens[name])] if made.ended[name] == "abort" else expected)
    stats = made.engine.stats()
    assert (stats.used_blocks, stats.num_preemptions) == (0, 0 if how == "abort" else 2)


@pytest.mark.parametrize("how", ["abort", "preempt", "fail"])
@pytest.mark.parametrize(("first", "second"), [(KV, HIDDEN), (HIDDEN, KV)])
def test_M8_an_interrupted_switch_by_preemption_is_never_a_mixture(first, second, how):
    """A request that came back with the other kind is interrupted while it is computed again."""

    class Switching(AllKv):
        def schedule(self, view: SchedulerView) -> Plan:
            plan = super().schedule(view)
            wanted = first if view.table.num_outputs[plan.rows].max(initial=0) == 0 else second
            is_new = view.table.kind[plan.rows] < 0
            kind = np.where(is_new, np.int8(wanted), plan.kind)
            chunk = np.where(is_new & (wanted == second), np.minimum(plan.num_tokens, 5), plan.num_tokens)
            return dataclasses.replace(plan, kind=kind, num_tokens=chunk.astype(np.int32))

    def fault(batch: StepBatch) -> Fault | None:
        if how == "fail" and not failed and (batch.kind == second).any():
            failed.append(batch)
            return Fault(kind=FaultKind.RAISE_AFTER)
        return None

    failed: list[StepBatch] = []
    made = Served(fault=fault, prefix_caching=False)
    made.engine.policy = Switching()
    name = made.add(prompt(9), 8)
    while not made.tokens[name]:
        made.step()
    made.engine.preempt(name)
    made.step()
    made.step()
    if how != "fail":
        assert getattr(made.engine, how)(name)
    made.drain()
    expected = made.expected(name)
    assert made.tokens[name] == (expected[: len(made.tokens[name])] if how == "abort" else expected)
    assert made.ended[name] == ("abort" if how == "abort" else "length")
    assert bool(failed) == (how == "fail")
    kinds = {int(kind) for batch in made.batches for kind in batch.kind}
    assert kinds == {first, second}
    assert made.engine.stats().used_blocks == 0


def test_keys_and_values_that_turn_out_bad_are_not_found():
    def fault(batch: StepBatch) -> Fault | None:
        return Fault(kind=FaultKind.NOT_FINITE) if batch.conversions is not None else None

    made = served(fault=fault)
    made.add(prompt(16), 8)
    made.drain()
    made.assert_as_expected()
    assert set(made.ended.values()) == {"error"}
    tree = made.engine.cache.prefixes
    assert tree is not None
    assert (tree.num_nodes(KV), tree.num_nodes(HIDDEN)) == (0, 0)


def test_broken_promises_are_named():
    policy = Converter(after=2)
    made = served(policy)
    made.add(prompt(9), 6)
    made.step()
    made.step()
    view, plan = policy.plans[-1]
    assert view.running.size
    assert not plan.convert.size
    row = plan.rows
    for convert, message in (
        (np.repeat(row, 2), "converted twice"),
        (np.array([200], np.int32), "do not run"),
        (row.astype(np.int64), "convert is int64"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_plan(view, dataclasses.replace(plan, convert=convert))
    wanted = dataclasses.replace(plan, convert=row)
    blocks = int(view.blocks_for(view.table.num_cached[row] + 1, KV).sum())
    check_plan(dataclasses.replace(view, free_blocks=blocks), wanted)
    for changes, message in (
        ({"free_blocks": blocks - 1}, "blocks needed"),
        ({"can_convert": False}, "can_convert is False"),
        ({"total_blocks": 6}, "could outgrow the pool"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_plan(dataclasses.replace(view, **changes), wanted)
    made.step()
    assert policy.plans[-1][1].convert.size
    view = made.engine.view()
    kind = view.table.kind[row]
    with pytest.raises(AssertionError, match="hold no layer inputs"):
        check_plan(view, dataclasses.replace(wanted, kind=kind))


def test_what_a_policy_may_not_convert_stays_as_it_is():
    """Setting of a server, which reports a broken promise once and goes on."""
    policy = Converter(after=1)
    policy.checks = False
    made = served(policy, num_blocks=8, debug=False)  # 16 positions as KV: 20 can be held as layer inputs alone
    made.engine._policies.check_plans = False  # as of a policy of the package
    made.add(prompt(14), 6)
    made.drain()
    made.assert_as_expected()
    stats = made.engine.stats()
    assert stats.num_conversions == 0
    assert stats.num_invalid_plan_rows > 0


@pytest.mark.parametrize("can_convert", [False, True])
def test_views_say_whether_the_executor_can(can_convert, monkeypatch):
    made = FakeExecutor.__init__

    def like_another(self, **options):
        made(self, **options)
        self.can_convert = can_convert

    monkeypatch.setattr(FakeExecutor, "__init__", like_another)
    assert Served().engine.view().can_convert == can_convert
    for offered in ((True, False), (False, True)):
        assert not Served(offered=offered).engine.view().can_convert


def test_the_cost_of_a_step_counts_converted_tokens():
    costs = StepCosts(decode_base_s=1.0, convert_per_hidden_token_s=0.5)
    assert costs.conversion_s(6) == 3.0
    assert costs.conversion_s(0) == 0.0


# --- the cache -------------------------------------------------------------------------------------------------------


def test_no_block_that_is_given_back_is_handed_out_in_the_same_call():
    cache = HybridCache(num_blocks=14, block_size=4, max_num_seqs=3)
    for owner in range(3):
        assert cache.reserve(owner, 8, HIDDEN)
    before = [cache.tables[cache.slot_of(owner), 0, :2].tolist() for owner in range(3)]
    given_back, ok = cache.convert_rows([0, 1, 2], [8, 9, 9])
    # 8 free blocks: the first takes 4, the second would take 6 and keeps its kind with one more, and so does the third.
    assert ok == [True, True, True]
    assert given_back[0] is not None
    assert given_back[0].tolist() == before[0]
    assert given_back[1] is None
    assert given_back[2] is None
    assert [int(cache.kind[cache.slot_of(o)]) for o in range(3)] == [KV, HIDDEN, HIDDEN]
    taken = cache.tables[cache.tables > 0].tolist()
    assert not set(before[0]) & set(taken)
    assert cache.num_free == 14 - 4 - 3 - 3
    cache.check_integrity([0, 1, 2])
    with pytest.raises(CacheIntegrityError, match="holds no layer inputs"):
        cache.convert_rows([0], [8])
    with pytest.raises(CacheIntegrityError, match="would shrink"):
        cache.convert_rows([1], [8])


def test_nothing_changes_for_a_request_that_gets_no_block():
    cache = HybridCache(num_blocks=3, block_size=4, max_num_seqs=2)
    assert cache.reserve(0, 4, HIDDEN)
    assert cache.reserve(1, 8, HIDDEN)
    given_back, ok = cache.convert_rows([0], [5])
    assert (given_back, ok) == ([None], [False])
    assert int(cache.num_tokens[cache.slot_of(0)]) == 4
    cache.check_integrity([0, 1])


def test_long_tables_grow():
    cache = HybridCache(num_blocks=400, block_size=2, hidden_block_size=4, max_num_seqs=1)
    assert cache.reserve(0, 256, HIDDEN)
    given_back, ok = cache.convert_rows([0], [257])
    assert ok == [True]
    assert given_back[0] is not None
    assert given_back[0].size == 64
    assert int(cache.num_groups[0]) == 129
    cache.check_integrity([0])


# --- the contract ----------------------------------------------------------------------------------------------------


def _batch(**changes) -> StepBatch:
    batch = StepBatch(
        slots=np.zeros(1, np.int32),
        num_tokens=np.ones(1, np.int32),
        start=np.full(1, 5, np.int32),
        kind=np.full(1, KV, np.int8),
        token_ids=np.ones(1, np.int32),
        block_tables=np.array([[[3, 4], [5, 6]]], np.int32),
        samples=np.ones(1, np.bool_),
        position=np.zeros(1, np.int32),
        params=[SamplingParams(temperature=0.0)],
        history=[np.zeros(0, np.int32)],
        prompt_len=np.zeros(1, np.int32),
        conversions=Conversions(rows=np.zeros(1, np.int64), inputs=np.array([[1, 2]], np.int32)),
    )
    return dataclasses.replace(batch, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": np.full(1, HIDDEN, np.int8), "block_tables": np.array([[[3, 4], [0, 0]]], np.int32)}, "no KV row"),
        ({"conversions": Conversions(rows=np.zeros(0, np.int64), inputs=np.zeros((0, 1), np.int32))}, "disorder"),
        ({"conversions": Conversions(rows=np.zeros(1, np.int64), inputs=np.array([[1]], np.int32))}, "layer inputs"),
        ({"conversions": Conversions(rows=np.zeros(1, np.int64), inputs=np.array([[1, 0]], np.int32))}, "holes"),
        ({"conversions": Conversions(rows=np.zeros(1, np.int64), inputs=np.array([[1, 4]], np.int32))}, "written to"),
    ],
)
def test_a_batch_that_breaks_the_contract_is_refused(changes, message):
    executor = FakeExecutor(num_blocks=9, block_size=4, max_num_seqs=2, vocab_size=VOCAB_SIZE)
    with pytest.raises(BatchContractError, match=message):
        executor.execute(_batch(**changes))
