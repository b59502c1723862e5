"""The schedulers that differ from vLLM's in one rule."""

import numpy as np

from apt_jax.lab.policies.vllm_v1_variants import HrrnPolicy, LeastComputedPolicy, VtcPolicy
from apt_jax.sched import Policy, VllmV1Policy
from tests.support.sched_world import KV, World


def step(world: World, policy: Policy) -> tuple[str, dict[int, int], list[int]]:
    plan = world.schedule(policy)
    tokens = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
    return plan.iteration, tokens, plan.preempt.tolist()


# --- least-computed --------------------------------------------------------------------------------------------------


def test_who_has_computed_least_is_preempted_first():
    world = World(num_blocks=0, mode="kv", block_size=4)
    world.hold(world.add(8, 20), KV, num_outputs=5)  # 12 cached, 6 blocks, 2 more now
    world.hold(world.add(4, 20), KV, num_outputs=1)  # 4 cached, 2 blocks
    world.hold(world.add(16, 20), KV, num_outputs=1)  # 16 cached, 8 blocks, 2 more now
    world.num_blocks = world.used_blocks
    assert step(world, VllmV1Policy()) == ("decode", {0: 1, 1: 1}, [2])
    # The 2 blocks of the second are not enough for the others' 4, so the first goes as well.
    assert step(world, LeastComputedPolicy()) == ("decode", {2: 1}, [0, 1])
    world.num_blocks += 2
    assert step(world, LeastComputedPolicy()) == ("decode", {0: 1, 2: 1}, [1])


def test_tokens_of_those_that_are_preempted_go_to_others():
    world = World(num_blocks=0, mode="kv", block_size=4)
    world.hold(world.add(40, 20), KV, cached=4)
    world.hold(world.add(40, 20), KV, cached=12)
    world.num_blocks = world.used_blocks + 4
    assert step(world, LeastComputedPolicy(budget=10)) == ("prefill", {1: 10}, [0])


def test_of_equals_the_last_is_preempted():
    world = World(num_blocks=12, mode="kv", block_size=4)
    for _ in range(3):
        world.hold(world.add(8, 20), KV)
    assert step(world, LeastComputedPolicy()) == ("decode", {0: 1, 1: 1}, [2])


# --- hrrn ------------------------------------------------------------------------------------------------------------


def in_order(world: World, policy: HrrnPolicy) -> list[int]:
    """Prompt lengths of waiting requests in the order of admission; they are seen now if they were not."""
    waiting = world.view().waiting
    new = policy._arrived_at.new(world.table, waiting)
    policy._arrived_at.values[waiting[new]] = policy._computed
    return world.table.prompt_len[policy._in_order(world.view())].tolist()


def test_the_ratio_is_age_in_computed_tokens_over_work():
    policy = HrrnPolicy(budget=100)
    world = World(num_blocks=10**5, mode="kv", max_num_batched_tokens=100, max_num_seqs=3)
    for prompt_len in (60, 20, 50):
        world.add(prompt_len, 5)
    assert in_order(world, policy) == [60, 20, 50]  # all ratios are 0: by arrival
    world.num_blocks = 0
    world.step(policy)  # nothing is computed
    world.num_blocks = 10**5
    policy._computed += 100
    assert in_order(world, policy) == [20, 50, 60]
    world.add(1, 5)
    assert in_order(world, policy) == [20, 50, 60, 1]
    policy._computed += 3  # 103 / 20 against 3 / 1
    assert in_order(world, policy) == [20, 1, 50, 60]


def test_age_grows_with_prompts_that_are_computed_and_not_with_decodes():
    policy = HrrnPolicy(budget=30)
    world = World(num_blocks=10**5, mode="kv", max_num_batched_tokens=30, max_num_seqs=1)
    world.add(50, 4)
    for expected in (30, 50, 50, 50, 50):
        world.step(policy)
        assert policy._computed == expected


def test_a_long_prompt_is_not_passed_for_ever():
    policy = HrrnPolicy(budget=20)
    world = World(num_blocks=10**5, mode="kv", max_num_batched_tokens=20, max_num_seqs=1)
    long = world.add(200, 1)
    world.hold(world.add(20, 1), KV, cached=10)
    while world.num_steps < 100:  # a short one comes in every step
        world.add(20, 1)
        if long in world.step(policy).rows:
            break
    # Short ones wait a step or so, in which 20 tokens are computed: 20 / 20 is reached after 200.
    assert 5 < world.num_steps < 30


def test_above_a_number_of_waiting_requests_they_go_by_arrival():
    world = World(num_blocks=10**5, mode="kv", max_num_seqs=1)
    for prompt_len in (30, 20, 10):
        world.add(prompt_len, 5)
    for above, order in ((None, [10, 20, 30]), (3, [10, 20, 30]), (2, [30, 20, 10])):
        policy = HrrnPolicy(first_come_above=above)
        policy._arrived_at.new(world.table, world.view().waiting)
        policy._computed = 5
        assert world.table.prompt_len[policy._in_order(world.view())].tolist() == order


def test_a_row_that_is_used_again_is_another_request():
    policy = HrrnPolicy()
    world = World(num_blocks=10**5, mode="kv", max_num_seqs=1)
    row = world.add(10, 1)
    world.step(policy)
    assert world.add(10, 1) == row
    world.schedule(policy)
    assert policy._arrived_at.values[row] == 10


# --- vtc -------------------------------------------------------------------------------------------------------------


def test_the_tenant_that_was_served_least_is_next():
    policy = VtcPolicy(budget=100)
    world = World(num_blocks=10**5, mode="kv", max_num_seqs=3, max_num_batched_tokens=100)
    rows = [world.add(n, 9, tenant=t) for n, t in ((30, 1), (10, 1), (20, 2), (5, 2), (40, 3))]
    plan = world.step(policy)
    # 0, 0 and 0 first; then 20 of tenant 2 are less than 30 of tenant 1 and 40 of tenant 3.
    assert plan.rows.tolist() == [rows[0], rows[2], rows[4]]
    assert policy.counters.tolist() == [0, 32, 22, 42]  # with an output token each
    world.max_num_seqs = 5
    assert world.step(policy).rows.tolist()[3:] == [rows[3], rows[1]]
    assert policy.counters.tolist() == [0, 46, 31, 44]


def test_one_tenant_is_served_by_arrival():
    def steps_of(policy: Policy) -> list[list[int]]:
        world = World(num_blocks=60, mode="kv", max_num_batched_tokens=30)
        for n in (30, 10, 20, 5):
            world.add(n, 9)
        return [world.step(policy).rows.tolist() for _ in range(20)]

    assert steps_of(VtcPolicy()) == steps_of(VllmV1Policy())


def test_who_asked_for_nothing_cannot_catch_up():
    policy = VtcPolicy(budget=100)
    world = World(num_blocks=10**5, mode="kv", max_num_seqs=1, max_num_batched_tokens=100)
    world.add(50, 1, tenant=1)
    world.add(50, 1, tenant=1)
    world.add(50, 1, tenant=1)
    world.step(policy)
    world.add(10, 1, tenant=2)  # comes while tenant 1 waits: lifted to its 52
    world.schedule(policy)
    assert policy.counters[2] >= 52


def test_after_an_idle_queue_the_counter_of_the_last_that_left_counts():
    policy = VtcPolicy(budget=100)
    world = World(num_blocks=10**5, mode="kv", max_num_seqs=4, max_num_batched_tokens=100)
    world.add(50, 1, tenant=1)
    world.step(policy)
    world.add(10, 1, tenant=2)
    world.step(policy)
    assert policy.counters.tolist() == [0, 52, 52 + 12]


def test_recomputation_is_not_counted_again():
    policy = VtcPolicy()
    world = World(num_blocks=24, mode="kv", block_size=4)
    for tenant in (1, 2):
        world.add(8, 20, tenant=tenant)
    world.step(policy)
    counters = policy.counters.copy()
    world.num_blocks = 8
    assert world.step(policy).preempt.size == 1
    world.num_blocks = 100
    world.step(policy)
    assert (policy.counters - counters).tolist() == [0, 4, 2]


def test_two_tenants_that_always_wait_get_equal_shares():
    """OSDI'24 Theorem 4.4: their difference is at most 2 max(w_p L_input, w_q M)."""
    rng = np.random.default_rng(0)
    policy = VtcPolicy(budget=64)
    world = World(num_blocks=2 * 100, mode="kv", block_size=4, max_num_seqs=16, max_num_batched_tokens=64)
    served = np.zeros(3)
    for _ in range(400):
        while world.view().waiting.size < 40:  # tenant 1 sends three times as many, and longer ones
            tenant = 1 if rng.random() < 0.75 else 2
            world.add(int(rng.integers(10, 60 if tenant == 1 else 20)), 20, tenant=tenant)
        plan = world.step(policy)
        if not np.isin([1, 2], world.table.tenant[world.view().waiting]).all():
            continue
        served = policy.counters.copy()
        assert plan.rows.size
    assert served[1] > 3000
    assert abs(served[1] - served[2]) <= 2 * max(60, 2 * 400)
