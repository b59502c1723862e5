"""vLLM's current scheduler: its own decisions."""

from pathlib import Path

import pytest

from apt_jax.sched import Policy, VllmV1Policy
from benchmarks.scheduling.vllm_scheduler import differences, our_steps, recorded, summary
from tests.support.sched_world import HIDDEN, KV, World

DECISIONS = recorded(Path(__file__).parent / "vllm_decisions.json")


def step(world: World, policy: Policy) -> tuple[str, dict[int, int], list[int]]:
    plan = world.schedule(policy)
    tokens = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
    return plan.iteration, tokens, plan.preempt.tolist()


@pytest.mark.parametrize("case", DECISIONS)
def test_decisions_are_those_of_vllm(case):
    settings, theirs = DECISIONS[case]
    assert "0 preemptions" not in summary(theirs)
    assert not differences(theirs, our_steps(settings))


def test_the_comparison_sees_another_policy():
    settings, theirs = DECISIONS["preemptions"]
    for policy in ("vllm-v0", "fastgen", "least-computed"):
        assert differences(theirs, our_steps(settings, policy))


def test_running_requests_first_in_order_then_waiting_ones():
    world = World(num_blocks=1000, mode="kv", max_num_batched_tokens=100, max_num_seqs=20)
    world.hold(world.add(8, 20), KV)
    world.hold(world.add(30, 20), KV, cached=10)
    world.hold(world.add(8, 20), KV)
    world.add(50, 20)
    world.add(50, 20)
    assert step(world, VllmV1Policy(budget=64)) == ("mixed", {0: 1, 1: 20, 2: 1, 3: 42}, [])
    # A chunk may leave nothing to a request that decodes.
    assert step(world, VllmV1Policy(budget=15)) == ("mixed", {0: 1, 1: 14}, [])


def test_a_whole_prompt_must_fit_but_nothing_is_set_aside_for_it():
    world = World(num_blocks=20, mode="kv", block_size=4, max_num_batched_tokens=100)
    world.hold(world.add(8, 20), KV)  # 4 blocks and 2 more now
    world.add(40, 1)  # 20 blocks
    world.add(4, 1)
    policy = VllmV1Policy(budget=9)
    assert step(world, policy) == ("decode", {0: 1}, [])
    world.num_blocks = 26
    world.step(policy)
    assert world.used_blocks == 6 + 4  # of 8 of its tokens
    world.hold(world.add(16, 20), KV)  # others may take the rest, later ones lose it
    assert step(world, policy) == ("mixed", {0: 1, 1: 8}, [])
    world.num_blocks = world.used_blocks + 3
    assert step(world, policy) == ("mixed", {0: 1, 1: 8}, [3])


def test_the_last_make_room_until_the_first_fits_and_none_is_admitted():
    world = World(num_blocks=24, mode="kv", block_size=4)
    for _ in range(4):
        world.hold(world.add(8, 20), KV, num_outputs=1)  # 4 blocks each, 2 more now
    world.add(1, 1)
    world.num_blocks = 16
    assert step(world, VllmV1Policy()) == ("decode", {0: 1, 1: 1}, [2, 3])


def test_the_budget_is_a_whole_step_at_most():
    world = World(num_blocks=1000, mode="kv", max_num_batched_tokens=64)
    world.add(600, 4)
    assert step(world, VllmV1Policy(budget=8192)) == ("prefill", {0: 64}, [])


def test_a_request_that_kv_can_never_hold_takes_hidden():
    world = World(num_blocks=10, block_size=4)
    world.add(16, 10)  # 7 groups: 14 blocks of KV, 7 of hidden
    plan = world.schedule(VllmV1Policy())
    assert plan.kind.tolist() == [HIDDEN]
