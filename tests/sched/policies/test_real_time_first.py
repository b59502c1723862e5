"""Two classes under policies that do not tell them apart."""

import numpy as np
import pytest

from apt_jax.config import SchedulerConfig
from apt_jax.sched import AptPolicy, RealTimeFirst, make_policy
from tests.support.cases import num_cases
from tests.support.policy_names import LEADING
from tests.support.sched_world import KV, World

CONFIG = SchedulerConfig(best_effort_last=True)


def best_effort(world: World, row: int) -> int:
    world.table.best_effort[row] = True
    return row


@pytest.mark.parametrize("name", ["apt", "apt-plus?two_classes=false", "vllm-v1", "fcfs", "sarathi"])
def test_a_first_token_waits_for_no_best_effort_request(name):
    world = World(num_blocks=400, mode="kv", max_num_seqs=16)
    be = [best_effort(world, world.hold(world.add(8, 40), KV)) for _ in range(12)]
    late = best_effort(world, world.add(8))
    policy = make_policy(name, CONFIG)
    world.step(policy)
    world.now_s += 5  # they have been pending for long
    rt = world.add(8, 3)
    plan = world.step(policy)
    assert (plan.rows.tolist(), plan.preempt.tolist(), plan.iteration) == ([rt], [], "prefill")
    plan = world.step(policy)
    assert rt in plan.rows
    assert set(be) <= set(plan.rows.tolist())
    world.step(policy)
    assert not world.table.live[rt]
    for _ in range(3):
        world.step(policy)
    assert world.table.num_outputs[late] > 0


@pytest.mark.parametrize("name", ["apt", "apt-plus?two_classes=false", "vllm-v1", "fcfs", "sarathi"])
def test_every_piece_of_a_prompt_has_its_step_to_itself(name):
    """The last piece leaves room in its step, which best-effort requests do not get."""
    world = World(num_blocks=400, mode="kv", max_num_seqs=16, max_num_batched_tokens=32)
    be = [best_effort(world, world.hold(world.add(8, 40), KV)) for _ in range(4)]
    policy = make_policy(name, CONFIG)
    rt = world.add(70, 3)
    pieces = 0
    while not world.table.num_outputs[rt]:
        plan = world.step(policy)
        assert plan.rows.tolist() == [rt]
        pieces += 1
        assert pieces < 6
    assert pieces > 2
    assert set(be) <= set(world.step(policy).rows.tolist())


@pytest.mark.parametrize("name", ["apt", "vllm-v1", "fcfs", "sarathi"])
def test_no_best_effort_request_begins_while_a_real_time_one_waits(name):
    world = World(num_blocks=24, mode="kv", max_num_seqs=8)
    running = world.hold(world.add(40, 6), KV)  # 20 blocks, and 2 more with its first token to come
    waiting, low = world.add(12, 3), best_effort(world, world.add(4, 3))
    policy = make_policy(name, CONFIG)
    while not world.table.num_outputs[waiting]:
        plan = world.step(policy)
        assert low not in plan.rows, plan
    assert not world.table.live[running]
    for _ in range(4):
        world.step(policy)
    assert world.table.num_outputs[low] > 0


def test_the_latest_best_effort_requests_make_room_and_no_more_of_them_than_are_needed():
    world = World(num_blocks=24, mode="kv", max_num_seqs=8)
    be = [best_effort(world, world.hold(world.add(15), KV)) for _ in range(3)]  # 8 blocks each
    rt = world.add(10)  # 6 blocks
    policy = make_policy("vllm-v1", CONFIG)
    plan = world.step(policy)
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([rt], be[2:])
    # It is decoded with the others, and who has lost its cache waits until there is room.
    assert world.step(policy).rows.tolist() == [rt, *be[:2]]


@pytest.mark.parametrize("name", ["tgi", "fcfs", "apt", "apt-plus?two_classes=false", "vllm-v1", "fcfs-ef", "infermax"])
def test_policies_that_want_more_than_a_step_needs_get_it(name):
    """Some reserve the whole output, some a share of the pool: what best-effort requests hold is free for them."""
    world = World(num_blocks=100, mode="kv", max_num_seqs=16, max_num_batched_tokens=512)
    be = [best_effort(world, world.hold(world.add(68, 60), KV)) for _ in range(4)]  # 18 blocks each, 28 are free
    rt = world.add(40, 160)  # 10 blocks, 50 at its end
    policy = make_policy(name, CONFIG)
    plans = [world.step(policy) for _ in range(3)]
    assert any(rt in plan.rows for plan in plans)
    assert world.table.live[be].all()


def test_slots_are_taken_too():
    world = World(num_blocks=400, mode="kv", max_num_seqs=3)
    be = [best_effort(world, world.hold(world.add(8), KV)) for _ in range(3)]
    rt = [world.add(8) for _ in range(2)]
    plan = world.step(make_policy("apt", CONFIG))
    assert sorted(plan.rows.tolist()) == rt
    assert sorted(plan.preempt.tolist()) == be[1:]


def test_with_one_class_it_decides_as_the_policy_does():
    for low in (False, True):
        mine, theirs = World(num_blocks=60, mode="kv"), World(num_blocks=60, mode="kv")
        for world in (mine, theirs):
            for length in (8, 20, 12, 30):
                row = world.add(length, 20)
                world.table.best_effort[row] = low
        wrapped, bare = make_policy("apt", CONFIG), make_policy("apt")
        assert isinstance(wrapped, RealTimeFirst)
        assert isinstance(bare, AptPolicy)
        for _ in range(40):
            one, other = mine.step(wrapped), theirs.step(bare)
            assert (one.rows.tolist(), one.preempt.tolist()) == (other.rows.tolist(), other.preempt.tolist())


def test_policies_with_classes_keep_their_own():
    for name in ("bros", "round-robin", "apt-plus"):
        assert not isinstance(make_policy(name, CONFIG), RealTimeFirst)


@pytest.mark.seeds
@pytest.mark.parametrize("name", [name for name in LEADING if name not in ("bros", "round-robin")])
def test_plans_keep_their_promises_and_everything_ends(name):
    for seed in range(num_cases(4, 60)):
        rng = np.random.default_rng([seed, 77])
        world = World(
            num_blocks=int(rng.choice([40, 60, 200])),
            block_size=int(rng.choice([1, 2, 4])) if seed % 2 else 4,
            mode=str(rng.choice(["kv", "hidden", "hybrid"])),
            max_num_seqs=int(rng.integers(1, 8)),
            max_num_batched_tokens=int(rng.integers(8, 40)),
        )
        least = 2 * -(-20 // world.block_size)
        world.num_blocks = max(world.num_blocks, least)
        policy = make_policy(name, CONFIG)
        left, idle = 16, 0
        for _ in range(6000):
            if left and rng.random() < 0.2:
                row = world.add(int(rng.integers(1, 12)), int(rng.integers(1, 8)))
                world.table.best_effort[row] = rng.random() < 0.6
                left -= 1
            if not world.table.live.any():
                if not left:
                    break
                continue
            plan = world.step(policy)
            idle = 0 if plan.rows.size else idle + 1
            assert idle < 4
            low = world.table.best_effort
            if low[plan.rows].any():
                assert not (plan.preempt.size and not low[plan.preempt].all() and low[plan.rows].all())
        assert not world.table.live.any()
