import dataclasses
import time

import numpy as np
import pytest

from apt_jax.sched import NO_KIND, AptPolicy, Plan, StepCosts, make_policy
from apt_jax.sched.view import converts
from tests.support.sched_world import HIDDEN, KV, Arrival, World, drain

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


def test_a_violated_request_counts_with_its_pending_time_for_the_iteration_type():
    world = World(num_blocks=1000)
    world.hold(world.add(8, tbt_s=0.1), KV)
    world.add(8, ttft_s=1.0)
    set_pending(world, r0=0.04, r1=50.0)
    assert world.schedule(AptPolicy()).iteration == "prefill"


def test_violated_requests_come_after_all_others_and_small_ones_first_among_them():
    world = World(num_blocks=16, mode="kv", max_num_batched_tokens=1000)
    for _ in range(2):
        world.add(15, 1, ttft_s=10.0)
    for _ in range(2):
        world.add(15, 1, ttft_s=100.0)
    world.add(3, 1, ttft_s=10.0)
    set_pending(world, r0=30.0, r1=40.0, r2=3.0, r3=2.0, r4=11.0)
    assert sorted(decided(world.schedule(AptPolicy()))) == [2, 3]
    # the near-zero constant is the same for all: the smallest has the most of it a block
    world.table.slo_ttft_s[:] = 0.1
    assert sorted(decided(world.schedule(AptPolicy()))) == [0, 4]


def test_the_marginal_gain_decides_who_shares_the_step_and_the_first_that_does_not_fit_ends_it():
    world = World(num_blocks=1000, max_num_batched_tokens=20)
    for length in (12, 12, 7):
        world.add(length)
    set_pending(world, r0=3.0, r1=4.0, r2=1.6)
    # a block of the hidden kind: 0.75, 1.0 and 0.8 seconds; 12 + 7 tokens, then 12 more do not fit
    assert decided(world.schedule(AptPolicy())) == {1: (12, KV), 2: (7, KV)}
    set_pending(world, r0=3.3, r1=4.0, r2=1.6)
    assert decided(world.schedule(AptPolicy())) == {1: (12, KV)}


def test_kinds_are_chosen_for_those_that_can_begin():
    # Memory for the keys and values of one; the other cannot begin in this step, so nobody makes room for it.
    world = World(num_blocks=8, max_num_batched_tokens=20)
    for _ in range(2):
        world.add(15, 1)
    set_pending(world, r0=5.0, r1=5.0)
    assert decided(world.schedule(AptPolicy())) == {0: (15, KV)}


def test_a_prefill_leaves_the_keys_and_values_of_the_running_queue_free():
    # 32 blocks; the hidden one holds 5 and counts as 10 (Eq. 7), which leaves 22: two prompts with 8 each.
    world = World(num_blocks=32, max_num_batched_tokens=1000, per_token_s=1.0)
    world.hold(world.add(15, 30), HIDDEN, num_outputs=2)
    for _ in range(3):
        world.add(15, 1)
    set_pending(world, r0=0.1, r1=5.0, r2=4.0, r3=3.0)
    assert sorted(decided(world.schedule(AptPolicy()))) == [1, 2]
    world.num_blocks = 31
    assert sorted(decided(world.schedule(AptPolicy(prefill_memory="held")))) == [1, 2, 3]
    assert sorted(decided(world.schedule(AptPolicy()))) == [1, 2]


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


def test_slots_limit_admission():
    world = World(num_blocks=1000, max_num_seqs=3)
    world.hold(world.add(5), KV)
    for _ in range(5):
        world.add(5)
    set_pending(world, r0=0.1, r1=1.0, r2=2.0, r3=3.0, r4=4.0, r5=5.0)
    assert sorted(decided(world.schedule(AptPolicy()))) == [4, 5]


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


def test_the_most_seconds_a_block_stay():
    world = World(num_blocks=20, mode="kv")
    world.hold(world.add(31, 3), KV, num_outputs=2)  # 18 blocks for the next position, value 2.2
    world.hold(world.add(3, 30), KV, num_outputs=2)  # 4 blocks, value 2
    world.table.num_blocks[:2] = (16, 2)
    set_pending(world, r0=1.9, r1=2.0)
    plan = world.schedule(AptPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([1], [0])


def test_V_prime_keeps_a_large_request_that_is_worth_more_than_all_others():
    world = World(num_blocks=20, mode="kv")
    world.hold(world.add(31, 3), KV, num_outputs=2)
    world.hold(world.add(3, 30), KV, num_outputs=2)
    world.table.num_blocks[:2] = (16, 2)
    set_pending(world, r0=2.2, r1=2.0)
    plan = world.schedule(AptPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0], [1])


def hybrid_pair(num_blocks: int, **options: float) -> World:
    """A request with KV and one with the hidden kind; the next positions take 10 and 5 blocks."""
    world = World(num_blocks=num_blocks, **options)  # pyright: ignore[reportArgumentType]
    for kind in (KV, HIDDEN):
        world.hold(world.add(15, 3), kind, num_outputs=2)
    set_pending(world, r0=3.0, r1=2.0)
    return world


def test_who_is_chosen_with_the_other_kind_gives_its_cache_up():
    # Room for keys and values of both: the hidden one shall have them, and is recomputed.
    plan = hybrid_pair(20).schedule(AptPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0], [1])
    # Room for 15 blocks: hidden first for both, then the upgrade of the first: all stay.
    plan = hybrid_pair(15).schedule(AptPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0, 1], [])


def test_a_hidden_request_that_costs_the_others_too_much_gives_its_cache_up():
    # 2 requests times 17 tokens times 0.1 s is more than the 2 s that it gains.
    plan = hybrid_pair(15, per_token_s=0.1).schedule(AptPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0], [1])


def test_Q6_a_running_request_keeps_its_kind_where_attention_needs_no_reprojection():
    world = hybrid_pair(20)
    world.kinds = (world.kinds[KV], dataclasses.replace(world.kinds[HIDDEN], reprojected=False))
    assert not world.schedule(AptPolicy()).preempt.size
    assert world.schedule(AptPolicy(keep_kind=False)).preempt.tolist() == [1]
    assert not hybrid_pair(20).schedule(AptPolicy(keep_kind=True)).preempt.size
    # It may still be preempted for want of blocks.
    world.num_blocks = 14
    assert world.schedule(AptPolicy()).preempt.tolist() == [1]


def test_a_begun_prompt_goes_on_where_nothing_else_would_run():
    world = World(num_blocks=10, mode="kv", max_num_batched_tokens=8)
    world.hold(world.add(7, 10), KV, num_outputs=2)  # 4 blocks, needs 6
    world.hold(world.add(15, 2), KV, cached=12)  # 6 blocks, needs 8
    set_pending(world, r0=5.0, r1=1.0)
    plan = world.schedule(AptPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([1], [0])


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
    world = World(num_blocks=8000, block_size=16, max_num_seqs=128, max_num_batched_tokens=512, costs=COSTS)
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


def test_with_convert_who_moves_to_keys_and_values_keeps_its_cache():
    policy = make_policy("apt?convert=true")
    assert converts(policy)
    assert not converts(AptPolicy())
    # 12 blocks are held, 3 grow; keys and values of the second take 10 beside its layer inputs.
    for num_blocks, expected in ((25, [1]), (24, [])):
        world = hybrid_pair(num_blocks, can_convert=True, base_s=1e-3)
        world.table.max_tokens_total[1] = 40  # many steps to gain in
        plan = world.step(policy)
        assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0, 1], [])
        assert plan.convert.tolist() == expected
        assert world.table.kind[1] == (KV if expected else HIDDEN)
    # An engine that cannot: the paper's decision.
    plan = hybrid_pair(20).schedule(policy)
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0], [1])


def test_with_convert_all_are_served_under_pressure():
    rng = np.random.default_rng(1)
    arrivals = [
        Arrival(int(rng.integers(0, 60)), int(rng.integers(1, 30)), int(rng.integers(5, 40))) for _ in range(60)
    ]
    world = World(num_blocks=80, can_convert=True)
    drain(world, make_policy("apt?convert=true"), arrivals, limit=8000)
    assert len(world.finished) == 60
    assert world.num_conversions > 0
