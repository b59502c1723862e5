"""Apt-Serve on chunked prefill: what goes into a step, who stays, kinds."""

import dataclasses

import numpy as np
import pytest

from apt_jax.sched import make_policy
from apt_jax.sched.policies.apt_s import STEP_TOKENS, AptSPolicy
from tests.support.apt_paper import decide_s
from tests.support.cases import num_cases
from tests.support.sched_world import HIDDEN, KV, World, random_world


def test_decodes_and_chunks_share_a_step():
    world = World(num_blocks=4000, mode="kv", max_num_batched_tokens=2048)
    first = world.hold(world.add(10), KV)
    partial = world.hold(world.add(600), KV, cached=300)
    waiting = world.add(400)
    plan = world.schedule(make_policy("apt-s"))
    assert plan.iteration == "mixed"
    assert plan.rows.tolist() == [first, partial, waiting]
    assert plan.num_tokens.tolist() == [1, 300, STEP_TOKENS - 301]


def test_a_small_step_is_not_exceeded():
    world = World(num_blocks=400, mode="kv", max_num_batched_tokens=16)
    for _ in range(3):
        world.hold(world.add(10), KV)
    world.add(60)
    plan = world.schedule(make_policy("apt-s"))
    assert plan.num_tokens.tolist() == [1, 1, 1, 13]


def test_a_prompt_begins_only_if_all_of_it_fits():
    world = World(num_blocks=40, mode="kv", max_num_batched_tokens=16)
    world.hold(world.add(40), KV)  # 20 blocks, 22 with the next position
    world.add(60)
    small = world.add(12)
    world.now_s = 1.0
    plan = world.schedule(make_policy("apt-s"))
    assert plan.rows.tolist() == [0, small]
    assert not plan.preempt.size


@pytest.mark.seeds
def test_the_transcription_decides_the_same_in_random_states():
    num = num_cases(200, 1000)
    rng = np.random.default_rng(67)
    seen = {"prefill": 0, "decode": 0, "mixed": 0, "idle": 0, "preempt": 0, "hidden": 0}
    for i in range(num):
        world = random_world(rng)
        if not world.table.live.any():
            continue
        decay = 0.4 if i % 3 == 0 else 0.0
        plan = world.schedule(AptSPolicy(decay, keep_kind=False))
        expected = decide_s(world.view(), decay=decay, step_tokens=STEP_TOKENS)
        assert dict(zip(plan.rows.tolist(), plan.kind.tolist(), strict=True)) == expected.runs
        assert set(plan.preempt.tolist()) == expected.preempts
        seen[plan.iteration] += 1
        seen["preempt"] += plan.preempt.size > 0
        seen["hidden"] += bool((plan.kind == HIDDEN).any())
    assert min(seen["mixed"], seen["decode"], seen["preempt"], seen["hidden"]) > num / 10, seen


def test_those_who_wait_and_those_who_run_compete_only_where_asked_to():
    world = World(num_blocks=24, mode="kv")
    running = world.hold(world.add(40), KV)  # 22 blocks, 0.0 s since its last token
    world.table.last_token_s[running] = -0.01
    waiting = world.add(20, arrival_s=-0.5, ttft_s=1.0)  # 12 blocks
    plan = world.schedule(make_policy("apt-s"))
    assert (plan.rows.tolist(), plan.preempt.size) == ([running], 0)
    plan = world.schedule(make_policy("apt-s?one_knapsack=true"))
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([waiting], [running])
    # Who cannot begin in this step takes nobody's cache.
    world.max_num_seqs = 1
    plan = world.schedule(make_policy("apt-s?one_knapsack=true"))
    assert (plan.rows.tolist(), plan.preempt.size) == ([running], 0)


def test_when_the_pool_is_outgrown_a_late_gap_goes_first():
    world = World(num_blocks=8, mode="kv", max_num_batched_tokens=8)
    late = world.hold(world.add(7, tbt_s=0.1), KV, num_outputs=2)
    world.table.last_token_s[late] = -1.0
    fine = world.hold(world.add(7, tbt_s=0.1), KV, num_outputs=2)
    plan = world.schedule(make_policy("apt-s"))
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([fine], [late])


def test_a_prompt_under_way_stays():
    world = World(num_blocks=12, mode="kv", max_num_batched_tokens=8)
    decoding = world.hold(world.add(7), KV, num_outputs=2)
    partial = world.hold(world.add(15), KV, cached=8)
    plan = world.schedule(make_policy("apt-s"))
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([partial], [decoding])


def test_hidden_where_keys_and_values_leave_too_few_room():
    world = World(num_blocks=20, max_num_seqs=64, max_num_batched_tokens=400, per_token_s=1e-6)
    for _ in range(8):
        world.add(7, 4, arrival_s=-1.0)
    plan = world.schedule(make_policy("apt-s"))
    assert plan.rows.size == 8
    assert set(plan.kind.tolist()) == {KV, HIDDEN}


def test_who_is_chosen_with_the_other_kind_is_recomputed_with_it():
    world = World(num_blocks=400, per_token_s=1e-2)
    rows = [world.hold(world.add(20, 80), HIDDEN, num_outputs=40) for _ in range(3)]
    world.now_s = 0.05
    plan = world.schedule(make_policy("apt-s"))
    assert plan.preempt.tolist() == rows
    world.apply(plan)
    assert set(world.schedule(make_policy("apt-s")).kind.tolist()) == {KV}


def test_kinds_stay_where_attention_needs_no_reprojection():
    world = World(num_blocks=400, per_token_s=1e-2)
    world.kinds = (world.kinds[KV], dataclasses.replace(world.kinds[HIDDEN], reprojected=False))
    rows = [world.hold(world.add(20, 80), HIDDEN, num_outputs=40) for _ in range(3)]
    world.now_s = 0.05
    plan = world.schedule(make_policy("apt-s"))
    assert (plan.rows.tolist(), plan.preempt.size) == (rows, 0)
