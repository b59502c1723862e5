from apt_jax.sched import FcfsPolicy
from tests.support.sched_world import HIDDEN, KV, World


def test_prefill_comes_first_however_long_others_have_decoded():
    world = World(num_blocks=100)
    world.hold(world.add(8), KV)
    world.table.last_token_s[0] = -100.0
    world.add(8)
    plan = world.schedule(FcfsPolicy())
    assert (plan.iteration, plan.rows.tolist()) == ("prefill", [1])


def test_the_head_of_the_queue_blocks_those_behind_it():
    world = World(num_blocks=20)
    world.hold(world.add(15), KV)  # 8 blocks
    world.add(25, 3)  # 14 blocks
    world.add(3, 3)  # 2 blocks would fit
    plan = world.schedule(FcfsPolicy())
    assert (plan.iteration, plan.rows.tolist()) == ("decode", [0])


def test_admission_keeps_the_watermark_unless_nothing_runs():
    world = World(num_blocks=16)
    world.add(31, 1)  # 16 blocks
    assert world.schedule(FcfsPolicy()).rows.tolist() == [0]
    world = World(num_blocks=16)
    world.hold(world.add(3), KV)  # 2 blocks
    world.add(27, 1)  # 14 blocks: fits, but without the one block of the watermark
    assert world.schedule(FcfsPolicy()).iteration == "decode"


def test_slots_and_tokens_limit_a_step():
    world = World(num_blocks=1000, max_num_seqs=3, max_num_batched_tokens=20)
    for length in (10, 9, 9, 1):
        world.add(length)
    policy = FcfsPolicy()
    assert world.step(policy).rows.tolist() == [0, 1]
    assert world.step(policy).rows.tolist() == [2]
    assert world.step(policy).iteration == "decode"


def test_long_prompts_are_chunked_before_others_begin():
    world = World(num_blocks=1000, max_num_batched_tokens=20)
    world.add(50)
    world.add(5)
    policy = FcfsPolicy()
    steps = [world.step(policy) for _ in range(3)]
    assert [plan.num_tokens.tolist() for plan in steps] == [[20], [20], [10, 5]]


def test_the_latest_arrivals_are_evicted_and_come_back_by_rank():
    world = World(num_blocks=26)
    for _ in range(3):
        world.hold(world.add(15), KV, num_outputs=2)
    newer = world.add(30)
    policy = FcfsPolicy()
    plan = world.step(policy)
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0, 1], [2])
    assert world.view().waiting.tolist() == [2, newer]


def test_kv_unless_it_is_not_offered_or_can_never_hold_the_request():
    for mode, expected in (("hybrid", KV), ("kv", KV), ("hidden", HIDDEN)):
        world = World(num_blocks=100, mode=mode)
        world.add(8, 8)
        assert world.schedule(FcfsPolicy()).kind.tolist() == [expected]
    world = World(num_blocks=10)
    world.add(8, 20)
    assert world.schedule(FcfsPolicy()).kind.tolist() == [HIDDEN]


def test_blocked_prompts_are_untangled():
    world = World(num_blocks=12, mode="kv", max_num_batched_tokens=16)
    for _ in range(2):
        world.hold(world.add(20, 2), KV, cached=12)
    plan = world.schedule(FcfsPolicy())
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([0], [1])


def test_nothing_to_do():
    assert World(num_blocks=10).schedule(FcfsPolicy()).iteration == "idle"
