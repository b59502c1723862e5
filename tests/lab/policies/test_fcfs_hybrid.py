import numpy as np
import pytest

from apt_jax.lab.policies.fcfs_hybrid import FcfsHybridPolicy
from apt_jax.sched import FcfsPolicy, make_policy
from tests.support.sched_world import HIDDEN, KV, Arrival, World, drain


def full_world(**more) -> World:
    """Three requests whose next positions need two blocks each, in a pool with one free block."""
    world = World(num_blocks=25, **more)
    for _ in range(3):
        # 16 positions in 8 blocks: the next needs a group.
        world.hold(world.add(15, 20), KV, num_outputs=2)
    return world


def test_the_oldest_turns_hidden_and_the_others_go_on():
    world, policy = full_world(), FcfsHybridPolicy()
    plan = world.step(policy)
    assert (plan.iteration, plan.rows.tolist(), plan.preempt.tolist()) == ("decode", [1, 2], [0])
    plan = world.step(policy)
    assert (plan.iteration, plan.rows.tolist(), plan.kind.tolist()) == ("prefill", [0], [HIDDEN])
    assert world.step(policy).rows.tolist() == [0, 1, 2]
    assert world.table.kind[:3].tolist() == [HIDDEN, KV, KV]


def test_nobody_is_admitted_into_the_room_of_those_that_turn():
    world, policy = full_world(), FcfsHybridPolicy()
    world.step(policy)
    newer = world.add(2, 2)
    assert world.step(policy).rows.tolist() == [0]
    world.table.max_tokens_total[1] = world.table.num_tokens[1] + 1
    assert world.step(policy).rows.tolist() == [0, 1, 2]
    assert world.step(policy).rows.tolist() == [newer]


def test_beyond_the_limit_the_latest_is_evicted_and_comes_back_with_kv():
    world, policy = full_world(), FcfsHybridPolicy(max_hidden_tokens=16)  # the oldest has 17 tokens
    plan = world.step(policy)
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0, 1], [2])
    for row in (0, 1):
        world.table.max_tokens_total[row] = world.table.num_tokens[row] + 1
    world.step(policy)
    plan = world.step(policy)
    assert (plan.rows.tolist(), plan.kind.tolist()) == ([2], [KV])


def test_the_limit_counts_those_that_are_hidden_already():
    for limit, preempted in ((40, [1]), (33, [2])):
        world = World(num_blocks=21)
        world.hold(world.add(15, 20), HIDDEN, num_outputs=2)  # 17 tokens
        for _ in range(2):
            world.hold(world.add(15, 20), KV, num_outputs=2)
        plan = world.schedule(FcfsHybridPolicy(max_hidden_tokens=limit))
        assert plan.preempt.tolist() == preempted


def test_a_request_that_ended_meanwhile_blocks_no_admission():
    world, policy = full_world(), FcfsHybridPolicy()
    world.step(policy)
    world.table.remove(0)
    world.add(2, 2)
    plan = world.step(policy)
    assert plan.iteration == "prefill"
    assert plan.kind.tolist() == [KV]


@pytest.mark.parametrize("mode", ["kv", "hidden"])
def test_with_one_kind_it_is_fcfs(mode: str):
    rng = np.random.default_rng(3)
    arrivals = [
        Arrival(int(rng.integers(0, 40)), int(rng.integers(1, 40)), int(rng.integers(1, 30))) for _ in range(25)
    ]
    plans = []
    for policy in (FcfsPolicy(), FcfsHybridPolicy()):
        world, seen = World(num_blocks=60, mode=mode), []
        for a in sorted(arrivals, key=lambda a: a.at_step):
            world.add(a.prompt_len, a.max_tokens)
        while world.table.live.any():
            plan = world.step(policy)
            seen.append((plan.rows.tolist(), plan.preempt.tolist(), plan.kind.tolist()))
        plans.append(seen)
    assert plans[0] == plans[1]


def test_all_are_served_under_pressure_and_fewer_are_evicted():
    rng = np.random.default_rng(1)
    arrivals = [
        Arrival(int(rng.integers(0, 60)), int(rng.integers(1, 30)), int(rng.integers(5, 40))) for _ in range(60)
    ]
    world = World(num_blocks=80)
    drain(world, FcfsHybridPolicy(), arrivals, limit=4000)
    assert len(world.finished) == 60


def test_its_limit_is_an_option_of_its_name():
    policy = make_policy("fcfs-hybrid?max_hidden_tokens=100")
    assert isinstance(policy, FcfsHybridPolicy)
    assert policy.max_hidden_tokens == 100
    with pytest.raises(ValueError, match="at least 0"):
        FcfsHybridPolicy(max_hidden_tokens=-1)


def test_with_convert_hidden_requests_go_back_to_keys_and_values_when_there_is_room():
    policy = make_policy("fcfs-hybrid?convert=true")
    world = full_world(can_convert=True)
    for _ in range(3):
        assert not world.step(policy).convert.size
    assert world.table.kind[0] == HIDDEN
    world.num_blocks = 60
    plan = world.step(policy)
    assert (plan.rows.tolist(), plan.convert.tolist()) == ([0, 1, 2], [0])
    assert world.table.kind[:3].tolist() == [KV] * 3

    rng = np.random.default_rng(1)
    arrivals = [
        Arrival(int(rng.integers(0, 60)), int(rng.integers(1, 30)), int(rng.integers(5, 40))) for _ in range(60)
    ]
    world = World(num_blocks=80, can_convert=True)
    drain(world, make_policy("fcfs-hybrid?convert=true"), arrivals, limit=4000)
    assert len(world.finished) == 60
    assert world.num_conversions > 0
