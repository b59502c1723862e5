"""FairBatching, QoServe: the rule of each."""

import dataclasses

import numpy as np
import pytest

from apt_jax.core.kinds import WindowSpec
from apt_jax.lab.policies.deadline import FairBatchingPolicy, QoServePolicy, line_deadline_s
from apt_jax.sched.policies.edf import next_deadline_s
from tests.support.deadline_world import decode, step, world_of
from tests.support.sched_world import KV, World


def test_deadlines_of_the_next_token():
    world = world_of()
    rows = np.array(
        [
            world.add(8, arrival_s=1.0, ttft_s=0.5, tbt_s=0.2),
            decode(world, last_s=3.0, outputs=4, arrival_s=1.0, ttft_s=0.5, tbt_s=0.2),
            decode(world, last_s=3.0, outputs=4),
            world.add(8, arrival_s=1.0, ttft_s=0.5, tbt_s=0.2),
        ],
        np.int32,
    )
    world.table.best_effort[rows[3]] = True
    assert next_deadline_s(world.view(), rows) == pytest.approx([1.5, 3.2, np.inf, np.inf])
    # The line does not know when the last token came: 1 + 0.5 + 4 * 0.2.
    assert line_deadline_s(world.view(), rows) == pytest.approx([1.5, 2.3, np.inf, np.inf])


# --- fairbatching ----------------------------------------------------------------------------------------------------


def test_a_step_lasts_as_long_as_the_least_slack():
    world = world_of()
    for slack_s in (0.2, 0.3):  # due at TTFT + 1 * TBT
        decode(world, ttft_s=slack_s - 0.05, tbt_s=0.05, arrival_s=0.0)
    world.add(900, ttft_s=1.0)
    # 10 ms, the first decode, 189 tokens of the prompt: 200 ms. The second has slack and sits out.
    assert step(world, FairBatchingPolicy()) == ("mixed", {0: 1, 2: 189}, [])
    # An urgent one: slack below 0.2 + 0.05.
    world.table.slo_ttft_s[1] = 0.19
    assert step(world, FairBatchingPolicy()) == ("mixed", {0: 1, 1: 1, 2: 188}, [])


def test_a_step_lasts_at_least_the_least_tbt():
    world = world_of()
    decode(world, ttft_s=0.01, tbt_s=0.0605, arrival_s=-5.0)  # late
    decode(world, ttft_s=0.01, tbt_s=9.0, arrival_s=-5.0)
    world.add(900, ttft_s=1.0)
    # 60 ms; the second's slack of 4 s is far above twice that.
    assert step(world, FairBatchingPolicy()) == ("mixed", {0: 1, 2: 49}, [])


def test_other_decodes_take_what_prompts_leave():
    world = world_of()
    decode(world, ttft_s=0.15, tbt_s=0.05, arrival_s=0.0)
    for _ in range(3):
        decode(world, ttft_s=0.95, tbt_s=0.05, arrival_s=0.0)
    world.add(187, ttft_s=1.0)
    # 200 ms: 10, 1, 187, and 2 of 3 decodes.
    assert step(world, FairBatchingPolicy()) == ("mixed", {0: 1, 4: 187, 1: 1, 2: 1}, [])


def test_prompts_go_by_slack_and_without_decodes_there_is_no_limit_of_time():
    world = world_of()
    world.add(600, ttft_s=1.0)
    world.add(300, ttft_s=0.1)
    world.hold(world.add(200, ttft_s=0.5), KV, cached=50)
    plan = world.schedule(FairBatchingPolicy())
    assert plan.rows.tolist() == [1, 2, 0]
    assert plan.num_tokens.tolist() == [300, 150, 550]


def test_something_always_runs():
    world = world_of()
    decode(world, ttft_s=0.001, tbt_s=1e-6, arrival_s=-5.0)
    world.add(900, ttft_s=1.0)
    assert step(world, FairBatchingPolicy()) == ("decode", {0: 1}, [])


# --- qoserve ---------------------------------------------------------------------------------------------------------


def test_the_chunk_is_the_largest_size_that_slack_allows():
    for slack_s, size in ((0.1, 128), (0.35, 256), (0.7, 512), (0.8, 512), (-1.0, 128)):
        world = world_of()
        decode(world, ttft_s=slack_s - 0.05, tbt_s=0.05, arrival_s=0.0)
        world.add(900, ttft_s=10.0)
        # 1.2 times (10 ms and a token's ms each) within the slack; the decode is one of the tokens.
        assert step(world, QoServePolicy()) == ("mixed", {0: 1, 1: size - 1}, [])


def test_little_memory_ends_the_sizes_early():
    for num_blocks, size in ((16_200, 1000), (15_000, 512)):  # of 4 positions, two a group
        world = world_of(num_blocks=num_blocks)
        world.add(3000, ttft_s=100.0)
        assert step(world, QoServePolicy()) == ("prefill", {0: size}, [])


def test_blocks_of_windowed_layers_count_as_memory():
    for per_group, size in ((2, 1000), (2000, 512)):  # 11 groups of windowed layers: 22 blocks, or 22,000
        world = world_of(num_blocks=16_200 + 11 * per_group if size == 1000 else 20_000)
        world.kinds = (
            dataclasses.replace(
                world.kinds[0], windows=WindowSpec(window=41, block_size=4, blocks_per_group=per_group)
            ),
            *world.kinds[1:],
        )
        world.add(3000, ttft_s=100.0)
        policy = QoServePolicy()
        view = world.view()
        prompts = view.waiting
        assert policy._chunk(view, prompts[:0], np.empty(0), prompts) == size


def test_a_late_first_token_moves_the_line():
    world = world_of()
    row = decode(world, ttft_s=0.1, tbt_s=0.4, arrival_s=-5.0)  # overdue on its line
    world.add(900, ttft_s=10.0)
    policy = QoServePolicy()
    world.schedule(policy)  # the first token is seen now, 4.9 s late
    assert policy._due_s(world.view(), np.array([row], np.int32)) == pytest.approx([0.4])
    assert step(world, policy) == ("mixed", {0: 1, 1: 255}, [])


def prompts_in_order(world: World, policy: QoServePolicy) -> list[int]:
    waiting = world.view().waiting
    policy.schedule(world.view())
    return waiting[policy._order(world.view(), waiting)].tolist()


def test_priority_lies_between_deadline_and_length():
    world = world_of()
    for prompt_len, ttft_s in ((500, 5.0), (100, 6.0), (10, 9.0)):
        world.add(prompt_len, ttft_s=ttft_s)
    assert prompts_in_order(world, QoServePolicy(alpha_s=0.0)) == [0, 1, 2]
    assert prompts_in_order(world, QoServePolicy()) == [1, 0, 2]  # 9, 6.8 and 9.08
    assert prompts_in_order(world, QoServePolicy(alpha_s=1.0)) == [2, 1, 0]


def test_who_cannot_be_in_time_goes_last_for_good():
    world = world_of()
    policy = QoServePolicy()  # 1,000 prompt tokens per second
    world.add(600, ttft_s=0.5)  # 0.6 s of work
    world.add(400, ttft_s=0.5)
    world.add(100, ttft_s=9.0)
    assert prompts_in_order(world, policy) == [1, 2, 0]
    world.table.slo_ttft_s[0] = 0.7
    assert prompts_in_order(world, policy) == [1, 2, 0]
    assert prompts_in_order(world, QoServePolicy()) == [1, 0, 2]  # 3.7, 5.5 and 9.8


def test_a_more_urgent_prompt_interrupts_one_under_way_and_no_decode_is_interrupted():
    world = world_of(max_num_batched_tokens=100)
    decode(world, ttft_s=5.0, tbt_s=5.0)
    world.hold(world.add(500, ttft_s=9.0), KV, cached=100)
    world.add(80, ttft_s=1.0)
    assert step(world, QoServePolicy()) == ("mixed", {0: 1, 2: 80, 1: 19}, [])


def test_the_average_follows_what_was_computed():
    world = world_of()
    world.add(5000, ttft_s=100.0)
    policy = QoServePolicy()
    for _ in range(3):
        world.step(policy, seconds=2.0)  # 1,000 tokens in 2 s
    assert policy._tokens_per_s == pytest.approx(500 + 500 * 0.995**2)


def test_relegated_requests_make_room_first():
    world = world_of(block_size=4)
    policy = QoServePolicy()
    world.add(8, 100, ttft_s=1e-6)
    world.add(8, 100, ttft_s=50.0)
    world.step(policy)
    world.num_blocks = 10
    assert step(world, policy) == ("decode", {1: 1}, [0])
