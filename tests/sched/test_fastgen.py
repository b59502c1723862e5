"""Dynamic SplitFuse: full steps, memory taken as it is used, nobody evicted for a decode."""

import numpy as np
from sched_world import HIDDEN, KV, World

from apt_jax.sched import FastGenPolicy, make_policy


def step(world: World, budget: int = 512) -> tuple[str, dict[int, int], list[int]]:
    plan = world.schedule(FastGenPolicy(budget))
    tokens = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
    return plan.iteration, tokens, plan.preempt.tolist()


def test_long_prompts_are_split_and_short_ones_composed_to_fill_every_step():
    world = World(num_blocks=1000, mode="kv", max_num_batched_tokens=100, max_num_seqs=20)
    for prompt_len in (50, 5, 5, 5, 30):
        world.add(prompt_len, 4)
    policy = FastGenPolicy(budget=20)
    steps = [world.step(policy) for _ in range(5)]
    assert [plan.num_tokens.tolist() for plan in steps] == [
        [20],
        [20],
        [10, 5, 5],
        [1, 1, 1, 5, 12],
        [1, 1, 1, 1, 16],
    ]
    assert [plan.iteration for plan in steps] == ["prefill"] * 3 + ["mixed"] * 2


def test_the_budget_is_a_whole_step_at_most():
    world = World(num_blocks=1000, mode="kv", max_num_batched_tokens=64)
    world.add(600, 4)
    assert step(world) == ("prefill", {0: 64}, [])


def test_nothing_is_set_aside_for_the_rest_of_a_prompt():
    world = World(num_blocks=30, mode="kv", max_num_batched_tokens=8, max_num_seqs=8)
    world.hold(world.add(8, 4), KV)  # 4 blocks, 2 more now
    world.add(40, 4)  # 20 blocks, 4 of them in this step
    world.step(FastGenPolicy())
    assert world.used_blocks == 6 + 4
    # Requests that decode may take what the prompt will need; then it waits with what it has.
    for _ in range(3):
        world.hold(world.add(8, 20), KV, num_outputs=2)
    assert step(world) == ("decode", {0: 1, 2: 1, 3: 1, 4: 1}, [])
    assert make_policy("sarathi").schedule(world.view()).preempt.tolist() == [1]


def test_a_decode_that_does_not_fit_waits_with_its_cache():
    world = World(num_blocks=15, block_size=4)
    for kind in (HIDDEN, KV, HIDDEN):
        world.hold(world.add(8, 20), kind)  # 2, 4 and 2 blocks
    world.hold(world.add(9, 20), KV)  # 6 blocks, the next position is there
    world.add(4, 4)
    assert step(world) == ("decode", {0: 1, 3: 1}, [])
    world.num_blocks = 16
    assert step(world) == ("decode", {0: 1, 2: 1, 3: 1}, [])


def test_only_a_deadlock_takes_caches_and_only_of_the_latest():
    world = World(num_blocks=12, mode="kv", block_size=4)
    for _ in range(3):
        world.hold(world.add(8, 20), KV)
    assert step(world) == ("decode", {0: 1, 1: 1}, [2])


def test_prompts_that_block_each_other_are_untangled():
    world = World(num_blocks=12, mode="kv", block_size=4)
    for _ in range(2):
        world.hold(world.add(20, 2), KV, cached=12)
    assert step(world) == ("prefill", {0: 8}, [1])


def test_the_first_prompt_that_does_not_fit_ends_the_step():
    world = World(num_blocks=12, mode="kv", block_size=4, max_num_batched_tokens=100)
    world.hold(world.add(7, 8), KV)  # 4 blocks
    world.add(20, 2)  # 10 blocks
    world.add(4, 2)  # would fit
    assert step(world) == ("decode", {0: 1}, [])


def test_seats_and_an_empty_world():
    world = World(num_blocks=100, mode="kv", max_num_seqs=2)
    for _ in range(3):
        world.add(4, 4)
    assert step(world) == ("prefill", {0: 4, 1: 4}, [])
    assert step(World(num_blocks=10)) == ("idle", {}, [])


def test_every_step_is_full_while_prompts_wait():
    rng = np.random.default_rng(0)
    world = World(num_blocks=10**5, mode="kv", max_num_batched_tokens=64, max_num_seqs=64)
    for _ in range(60):
        world.add(int(rng.integers(1, 90)), 20)
    policy = FastGenPolicy(budget=48)
    while world.view().waiting.size:
        plan = world.step(policy)
        assert plan.num_tokens.sum() == 48 or not world.view().waiting.size
