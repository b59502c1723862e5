"""Dynamic SplitFuse: full steps, memory taken as it is used, nobody evicted for a decode."""

import numpy as np
import pytest

from apt_jax.lab.policies.fastgen import FastGenPolicy
from apt_jax.sched import SchedulerView, make_policy
from tests.support.sched_world import HIDDEN, KV, Arrival, World, blocks


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


def test_slots_and_an_empty_world():
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


# --- the same, one request at a time ----------------------------------------------------------------------------------


def composed(view: SchedulerView, budget: int, evicted: set[int]) -> dict[int, int]:
    """The tokens of each row of a step after `evicted` are gone, one request at a time."""
    table = view.table
    budget = min(budget, view.max_num_batched_tokens)
    free = view.free_blocks + sum(int(table.num_blocks[row]) for row in evicted)
    running = [row for row in view.running.tolist() if row not in evicted]
    remaining = {row: int(table.num_tokens[row] - table.num_cached[row]) for row in running}
    step: dict[int, int] = {}

    def grow(row: int, kind: int, num_tokens: int) -> int:
        end = int(table.num_cached[row]) + num_tokens
        held = int(table.num_blocks[row])
        return blocks(end, kind, view.block_size, view.hidden_block_size) - held

    for row in (row for row in running if remaining[row] == 1):
        need = grow(row, int(table.kind[row]), 1)
        if budget and need <= free:
            step[row] = 1
            free -= need
            budget -= 1
    prompts = [(row, int(table.kind[row])) for row in running if remaining[row] > 1]
    if not evicted:
        for row in view.waiting.tolist()[: view.max_num_seqs - len(running)]:
            whole = blocks(int(table.max_tokens_total[row]), KV, view.block_size)
            prompts.append((row, KV if whole <= view.total_blocks else HIDDEN))
    for row, kind in prompts:
        left = int(table.num_tokens[row] - table.num_cached[row])
        if not budget or grow(row, kind, left) > free:
            break
        step[row] = min(left, budget)
        free -= grow(row, kind, step[row])
        budget -= step[row]
    return step


@pytest.mark.parametrize("mode", ["kv", "hybrid"])
def test_steps_are_those_of_a_loop_over_requests(mode):
    num_full = num_held_up = num_evicted = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        policy = FastGenPolicy(budget=int(rng.choice([6, 15, 40])))
        block_size = int(rng.choice([1, 4]))
        inputs = (block_size, block_size + 1)[seed % 2]
        todo = [
            Arrival(
                at_step=int(rng.integers(0, 25)),
                prompt_len=int(rng.integers(1, 30)),
                max_tokens=int(rng.integers(1, 25)),
            )
            for _ in range(20)
        ]
        longest = max(a.prompt_len + a.max_tokens for a in todo)
        least = blocks(longest, KV if mode == "kv" else HIDDEN, block_size, inputs)
        world = World(
            num_blocks=int(least * rng.choice([1.0, 1.5, 3.0])),
            block_size=block_size,
            hidden_block_size=inputs,
            mode=mode,
            max_num_seqs=int(rng.choice([3, 8, 20])),
            max_num_batched_tokens=20,
        )
        for _ in range(60):
            for a in [a for a in todo if a.at_step == world.num_steps]:
                world.add(a.prompt_len, a.max_tokens)
            view = world.view()
            running: list[int] = view.running.tolist()
            evicted: set[int] = set()
            while not (expected := composed(view, policy.budget, evicted)) and len(evicted) < len(running):
                evicted.add(running[-1 - len(evicted)])
            plan = world.step(policy)
            got = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
            assert (got, set(plan.preempt.tolist())) == (expected, evicted)
            num_full += sum(expected.values()) == min(policy.budget, 20)
            num_held_up += any(row not in expected for row in running)
            num_evicted += len(evicted)
    assert num_full > 20
    assert num_held_up > 20
    assert num_evicted > 5
