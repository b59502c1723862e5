"""Apt-Serve on chunked prefill: what goes into a step, who stays, kinds."""

import numpy as np
from sched_world import HIDDEN, KV, World

from apt_jax.sched import StepCosts, make_policy
from apt_jax.sched.apt_s import STEP_TOKENS


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


def test_those_who_wait_take_nobodys_cache():
    world = World(num_blocks=24, mode="kv")
    late = world.hold(world.add(40, ttft_s=0.1), KV)
    world.table.ttft_missed[late] = True
    world.add(20, arrival_s=-0.5, ttft_s=1.0)
    plan = world.schedule(make_policy("apt-s"))
    assert plan.rows.tolist() == [late]
    assert not plan.preempt.size


def test_when_the_pool_is_outgrown_missed_objectives_go_first():
    world = World(num_blocks=8, mode="kv", max_num_batched_tokens=8)
    late = world.hold(world.add(7, ttft_s=0.1), KV, num_outputs=2)
    world.table.ttft_missed[late] = True
    fine = world.hold(world.add(7), KV, num_outputs=2)
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


def test_a_request_goes_over_to_the_cheaper_kind():
    world = World(
        num_blocks=400, per_token_s=1e-2, costs=StepCosts(prefill_base_s=1e-3, decode_base_s=1e-3)
    )
    rows = [world.hold(world.add(20, 80), HIDDEN, num_outputs=40) for _ in range(3)]
    world.now_s = 0.05
    plan = world.schedule(make_policy("apt-s"))
    assert plan.preempt.size == 1
    assert sorted([*plan.rows.tolist(), *plan.preempt.tolist()]) == rows
    world.apply(plan)
    back = world.schedule(make_policy("apt-s"))
    assert back.kind[np.isin(back.rows, plan.preempt)].tolist() == [KV]
