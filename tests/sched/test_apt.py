import time

import numpy as np
import pytest
from sched_world import HIDDEN, KV, World

from apt_jax.sched import NO_KIND, AptPolicy, Plan, StepCosts, solve_greedy

COSTS = StepCosts(prefill_base_s=0.01, prefill_per_token_s=1e-3)


def set_pending(world: World, **pending_s: float) -> None:
    """Pending times by row: r0=..., r1=..."""
    world.now_s = 100.0
    for name, value in pending_s.items():
        row = int(name[1:])
        world.table.last_token_s[row] = 100.0 - value
        if world.table.num_outputs[row] == 0:
            world.table.arrival_s[row] = 100.0 - value


def decided(plan: Plan) -> dict[int, tuple[int, int]]:
    """row -> (tokens, kind)"""
    triples = zip(plan.rows.tolist(), plan.num_tokens.tolist(), plan.kind.tolist(), strict=True)
    return {row: (tokens, kind) for row, tokens, kind in triples}


# --- iteration type ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("waiting_s", "iteration"), [(2.9, "decode"), (3.1, "prefill")])
def test_the_queue_with_the_larger_cumulative_pending_time_goes(waiting_s, iteration):
    world = World(num_blocks=1000)
    for _ in range(2):
        world.hold(world.add(8), KV)
    world.add(8)
    set_pending(world, r0=1.0, r1=2.0, r2=waiting_s)
    assert world.schedule(AptPolicy()).iteration == iteration


def test_decode_when_the_waiting_queue_is_urgent_but_nothing_fits():
    world = World(num_blocks=12, block_size=4)
    world.hold(world.add(8, 12), KV)
    world.add(12, 8)
    set_pending(world, r0=0.1, r1=50.0)
    world.hold(world.add(8, 12), KV)
    plan = world.schedule(AptPolicy())
    assert plan.iteration == "decode"
    assert plan.rows.tolist() == [0, 2]


def test_prefill_when_nothing_runs_even_without_pending_time():
    world = World(num_blocks=100)
    world.add(8)
    assert world.schedule(AptPolicy()).iteration == "prefill"


def test_hopeless_requests_do_not_force_prefill_where_that_would_make_someone_late():
    world = World(num_blocks=1000, costs=COSTS)
    world.hold(world.add(8, tbt_s=0.1), KV)
    world.add(8, ttft_s=1.0)
    set_pending(world, r0=0.04, r1=50.0)
    assert world.schedule(AptPolicy()).iteration == "decode"
    # With the decay of Apt-Serve §6.6 it still counts for 20 seconds.
    assert world.schedule(AptPolicy(violation_decay=0.4)).iteration == "prefill"


def test_hopeless_requests_are_let_in_while_that_harms_nobody():
    world = World(num_blocks=1000, costs=COSTS)
    world.hold(world.add(8, tbt_s=1.0), KV)
    world.add(8, ttft_s=1.0)
    set_pending(world, r0=0.04, r1=50.0)
    assert world.schedule(AptPolicy()).iteration == "prefill"
    set_pending(world, r0=0.6, r1=50.0)
    assert world.schedule(AptPolicy()).iteration == "decode"


# --- prefill -------------------------------------------------------------------------------------------------------


def test_ample_memory_gives_kv_and_scarce_memory_hidden():
    def kinds_with(num_blocks: int) -> set[tuple[int, int]]:
        world = World(num_blocks=num_blocks, max_num_batched_tokens=1000)
        for _ in range(4):
            world.add(15, 1)
        set_pending(world, r0=5.0, r1=5.0, r2=5.0, r3=5.0)
        return {(row, kind) for row, (_, kind) in decided(world.schedule(AptPolicy())).items()}

    # 15 tokens and one more are 4 groups: 8 blocks with KV, 4 with hidden
    assert kinds_with(32) == {(0, KV), (1, KV), (2, KV), (3, KV)}
    assert kinds_with(16) == {(0, HIDDEN), (1, HIDDEN), (2, HIDDEN), (3, HIDDEN)}
    # halfway: the first ones are upgraded
    assert kinds_with(24) == {(0, KV), (1, KV), (2, HIDDEN), (3, HIDDEN)}


def test_hidden_is_avoided_when_kv_has_the_better_efficiency():
    # penalty 4 * 0.05 * 15 = 3 of 5 seconds: 2 over 4 blocks is less than 5 over 8 (Apt-Serve §5, the refined theta)
    world = World(num_blocks=16, max_num_batched_tokens=1000, per_token_s=0.05)
    for _ in range(4):
        world.add(15, 1)
    set_pending(world, r0=5.0, r1=5.0, r2=5.0, r3=5.0)
    assert decided(world.schedule(AptPolicy())) == {0: (15, KV), 1: (15, KV)}


def test_violated_requests_come_after_all_others():
    world = World(num_blocks=16, mode="kv", max_num_batched_tokens=1000)
    for _ in range(2):
        world.add(15, 1, ttft_s=10.0)
    for _ in range(2):
        world.add(15, 1, ttft_s=100.0)
    set_pending(world, r0=30.0, r1=40.0, r2=3.0, r3=2.0)
    assert sorted(decided(world.schedule(AptPolicy()))) == [2, 3]
    # among violated ones the longest pending first
    world.table.slo_ttft_s[:] = 0.1
    assert sorted(decided(world.schedule(AptPolicy()))) == [0, 1]


def test_value_per_token_decides_who_shares_the_step_and_nothing_is_begun_by_halves():
    world = World(num_blocks=1000, max_num_batched_tokens=20)
    for length in (12, 12, 6):
        world.add(length)
    set_pending(world, r0=3.0, r1=4.0, r2=1.6)
    # per token 0.25, 0.33, 0.27: 12 + 6 tokens, then 12 more do not fit
    assert decided(world.schedule(AptPolicy())) == {1: (12, KV), 2: (6, KV)}


def test_a_prompt_longer_than_a_step_is_computed_in_chunks_and_goes_on_first():
    world = World(num_blocks=1000, max_num_batched_tokens=20)
    world.add(50)
    policy = AptPolicy()
    assert decided(world.step(policy)) == {0: (20, KV)}
    world.add(6, arrival_s=-1.0)
    assert decided(world.step(policy)) == {0: (20, KV)}
    assert decided(world.step(policy)) == {0: (10, KV), 1: (6, KV)}


def test_the_blocks_of_a_begun_prompt_are_set_aside():
    # 50 + 1 tokens take 26 of 30 blocks, 10 of which it holds after the first chunk: 4 blocks are really free
    world = World(num_blocks=30, mode="kv", max_num_batched_tokens=20)
    world.add(50, 2)
    policy = AptPolicy()
    world.step(policy)
    world.add(15, 2)
    world.table.last_token_s[1] = -100.0
    assert decided(world.step(policy)) == {0: (20, KV)}
    assert decided(world.step(policy)) == {0: (10, KV)}


def test_admission_leaves_the_next_blocks_to_what_decodes():
    world = World(num_blocks=20, mode="kv")
    world.hold(
        world.add(15, 100), KV, num_outputs=1
    )  # 8 blocks, the next token needs 2 more, 8 tokens 4
    world.add(10, 100)  # 6 blocks
    world.add(10, 100)
    set_pending(world, r0=0.1, r1=5.0, r2=4.0)
    assert sorted(decided(world.schedule(AptPolicy()))) == [1]


def test_seats_limit_admission():
    world = World(num_blocks=1000, max_num_seqs=3)
    world.hold(world.add(5), KV)
    for _ in range(5):
        world.add(5)
    set_pending(world, r0=0.1, r1=1.0, r2=2.0, r3=3.0, r4=4.0, r5=5.0)
    assert sorted(decided(world.schedule(AptPolicy()))) == [4, 5]


def test_Q5_a_request_preempted_again_and_again_goes_first():
    world = World(num_blocks=8, mode="kv")
    for _ in range(2):
        world.add(15, 1)
    set_pending(world, r0=9.0, r1=1.0)
    assert sorted(decided(world.schedule(AptPolicy()))) == [0]
    world.table.num_preemptions[1] = 8
    assert sorted(decided(world.schedule(AptPolicy()))) == [1]


# --- decode --------------------------------------------------------------------------------------------------------


def full_pool(mode: str = "kv", costs: StepCosts | None = None) -> World:
    """Three requests whose next positions need 2 blocks each, in a pool with 2 free: one has to go."""
    world = World(num_blocks=26, mode=mode, costs=costs)
    for _ in range(3):
        world.hold(world.add(15, 9), HIDDEN if mode == "hidden" else KV, num_outputs=2)
    return world


def test_everything_runs_that_fits():
    world = World(num_blocks=30, mode="kv")
    for _ in range(3):
        world.hold(world.add(15, 100), KV, num_outputs=2)
    plan = world.schedule(AptPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0, 1, 2], [])


def test_the_least_urgent_request_is_preempted():
    world = full_pool()
    set_pending(world, r0=3.0, r1=1.0, r2=2.0)
    plan = world.schedule(AptPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0, 2], [1])


def test_the_most_valuable_request_stays_even_if_the_knapsack_would_drop_it():
    world = World(num_blocks=20, mode="kv")
    world.hold(world.add(31, 3), KV, num_outputs=2)  # 18 blocks for the next position, value 2.2
    world.hold(world.add(3, 30), KV, num_outputs=2)  # 4 blocks, value 2 and much better a block
    world.table.num_blocks[:2] = (16, 2)
    set_pending(world, r0=2.2, r1=2.0)
    plan = world.schedule(AptPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0], [1])


def test_a_request_preempted_too_often_stays():
    world = full_pool()
    set_pending(world, r0=3.0, r1=1.0, r2=2.0)
    world.table.num_preemptions[1] = 8
    assert world.schedule(AptPolicy()).preempt.tolist() == [2]


def test_hidden_halves_what_is_needed():
    world = full_pool("hidden")
    assert world.used_blocks == 12
    assert world.schedule(AptPolicy()).preempt.size == 0


def test_a_preempted_request_keeps_its_rank_and_is_recomputed_whole():
    world = full_pool()
    set_pending(world, r0=1.0, r1=3.0, r2=2.0)
    policy = AptPolicy()
    assert world.step(policy).preempt.tolist() == [0]
    assert world.view().waiting.tolist() == [0]
    newer = world.add(15, 9)
    assert world.view().waiting.tolist() == [0, newer]
    for row in (1, 2):
        world.table.remove(row)
        world.table.num_blocks[row] = 0
    assert decided(world.schedule(policy))[0] == (17, KV)


def test_a_switch_is_charged_with_its_recomputation(monkeypatch):
    problems = []

    def spy(problem, **options):
        problems.append(problem)
        return solve_greedy(problem, **options)

    monkeypatch.setattr("apt_jax.sched.apt.solve_greedy", spy)
    world = full_pool("hybrid", COSTS)
    set_pending(world, r0=3.0, r1=1.0, r2=2.0)
    world.table.tokens_since_preemption[:3] = (64, 64, 31)
    assert world.schedule(AptPolicy()).preempt.tolist() == [1]
    # The request of most value stays in any case; the others: p, and p - 3 (t + recomputation / 64) of 17 tokens
    recompute_s = 0.01 + 17e-3
    hidden = 1.0 - 3 * (17e-5 + recompute_s / 64)
    assert problems[0].value == pytest.approx(np.array([[1.0, hidden], [2.0, -np.inf]]))
    assert problems[0].cost.tolist() == [[10, 5], [10, 5]]
    assert problems[0].capacity == 26 - 10


def test_who_is_chosen_with_the_other_kind_gives_its_cache_up():
    # Seven blocks are too few for KV of the second one (10) and enough for hidden (5).
    world = World(num_blocks=17 + 1, costs=StepCosts(prefill_per_token_s=1e-6))
    for _ in range(2):
        world.hold(world.add(15, 3), KV, num_outputs=2)
    set_pending(world, r0=3.0, r1=2.0)
    world.table.tokens_since_preemption[:2] = 64
    plan = world.schedule(AptPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0], [1])


def test_a_slow_cache_makes_way_first_but_not_for_nothing():
    # The hidden one costs all more than it gains: it goes, although it has the largest pending time after the first.
    world = World(num_blocks=22, per_token_s=1.0, costs=COSTS)
    for kind in (KV, KV, HIDDEN):
        world.hold(world.add(15, 3), kind, num_outputs=2)
    world.num_blocks = world.used_blocks + 4
    set_pending(world, r0=3.0, r1=1.0, r2=2.0)
    assert world.schedule(AptPolicy()).preempt.tolist() == [2]
    world.num_blocks += 1
    assert world.schedule(AptPolicy()).preempt.tolist() == []


def idle_hidden(extra_s: float, costs: StepCosts, settled: int = 64) -> Plan:
    """Two hidden requests in an ample pool."""
    world = World(num_blocks=1000, per_token_s=0.0, base_s=extra_s, costs=costs)
    for _ in range(2):
        world.hold(world.add(15, 200), HIDDEN, num_outputs=64)
    world.table.tokens_since_preemption[:2] = settled
    set_pending(world, r0=9.0, r1=9.0)
    return world.schedule(AptPolicy())


def test_a_kind_changes_when_64_tokens_pay_for_the_recomputation():
    recompute_s = (0.01 + 79 * 1e-3) / 64
    assert idle_hidden(0.9 * recompute_s, COSTS).preempt.tolist() == []
    plan = idle_hidden(1.1 * recompute_s, COSTS)
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([1], [0])


def test_no_change_of_kind_with_unknown_costs_or_just_after_one():
    assert idle_hidden(1.0, StepCosts()).preempt.size == 0
    assert idle_hidden(1.0, COSTS, settled=31).preempt.size == 0


def test_Q6_at_most_two_switches_in_64_tokens():
    world = World(num_blocks=1000, per_token_s=0.0, base_s=1.0, costs=COSTS)
    world.hold(world.add(15, 200), HIDDEN, num_outputs=60)
    set_pending(world, r0=9.0)
    for switches, outputs, expected in ((1, 60, [0]), (2, 60, []), (2, 64, [0]), (4, 64, [])):
        world.table.num_kind_switches[0] = switches
        world.table.num_outputs[0] = outputs
        assert world.schedule(AptPolicy()).preempt.tolist() == expected


def test_the_youngest_begun_prompt_makes_way_when_not_even_one_request_can_decode():
    world = World(num_blocks=10, mode="kv", max_num_batched_tokens=8)
    world.hold(world.add(7, 10), KV, num_outputs=2)  # 4 blocks, needs 6
    world.hold(world.add(15, 2), KV, cached=12)  # 6 blocks, needs 8
    set_pending(world, r0=5.0, r1=1.0)
    plan = world.schedule(AptPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0], [1])


def test_blocked_prompts_are_untangled():
    world = World(num_blocks=12, mode="kv", max_num_batched_tokens=16)
    for _ in range(2):
        world.hold(world.add(20, 2), KV, cached=12)
    plan = world.schedule(AptPolicy())
    assert (decided(plan), plan.preempt.tolist()) == ({0: (8, KV)}, [1])


def test_nothing_to_do():
    assert World(num_blocks=10).schedule(AptPolicy()).iteration == "idle"


def test_deciding_over_two_hundred_waiting_and_sixty_four_running_takes_well_under_a_millisecond():
    rng = np.random.default_rng(0)
    world = World(
        num_blocks=8000, block_size=16, max_num_seqs=128, max_num_batched_tokens=512, costs=COSTS
    )
    for i in range(264):
        row = world.add(
            int(rng.integers(10, 1000)),
            500,
            arrival_s=float(rng.uniform(0, 9)),
            ttft_s=5.0,
            tbt_s=1.0,
        )
        if i < 64:
            world.hold(row, int(rng.integers(2)))
    world.now_s = 9.5
    assert (world.table.kind[world.view().waiting] == NO_KIND).all()
    view, policy, times_s = world.view(), AptPolicy(), []
    for _ in range(100):
        start_s = time.perf_counter()
        policy.schedule(view)
        times_s.append(time.perf_counter() - start_s)
    # About 0.3 ms; the bound leaves room for a busy machine.
    assert min(times_s) < 1.5e-3, f"fastest of 100: {1e3 * min(times_s):.2f} ms"
