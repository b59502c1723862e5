"""apt-plus, rule by rule, in small scripted states."""

import numpy as np
import pytest
from sched_world import World

from apt_jax.sched import HIDDEN, KV, AptPlusPolicy, StepCosts
from apt_jax.sched.apt_plus import PRIOR_TOKENS, RemainingOutput
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.simulate import SimulationConfig, simulate

COSTS = StepCosts(
    prefill_base_s=0.02,
    prefill_per_token_s=1e-3,
    decode_base_s=0.02,
    decode_per_request_s=1e-4,
    decode_per_token_s=1e-6,
)


def world(num_blocks: int = 200, mode: str = "kv", **settings: object) -> World:
    return World(num_blocks=num_blocks, mode=mode, costs=COSTS, **settings)  # type: ignore[arg-type]


def pending(w: World, row: int, seconds: float) -> None:
    w.table.last_token_s[row] = w.now_s - seconds
    if not w.table.num_delivered[row]:
        w.table.arrival_s[row] = w.now_s - seconds


def test_prompts_ride_along_with_decodes():
    w = world(max_num_batched_tokens=64)
    w.hold(w.add(15, 30), KV, num_outputs=2)
    w.add(20, 30)
    plan = w.schedule(AptPlusPolicy())
    assert plan.iteration == "mixed"
    assert plan.rows.tolist() == [0, 1]
    assert plan.num_tokens.tolist() == [1, 20]


def test_a_tight_objective_makes_small_chunks_and_a_late_one_none():
    def chunk(tbt_s: float) -> int:
        w = world(block_size=16, max_num_batched_tokens=512)
        w.hold(w.add(15, 30, tbt_s=tbt_s), KV, num_outputs=2)
        w.add(400, 30)
        pending(w, 0, 0.01)
        return int(w.schedule(AptPlusPolicy()).num_tokens[1])

    # 0.8 * objective - pending - the decode itself (about 20 ms), at a millisecond a token
    assert chunk(0.2) == pytest.approx(129, abs=2)
    assert chunk(1.0) == 400
    assert chunk(0.03) == 16  # not even the decode is in time: prompts go on by a block
    assert chunk(0.005) == 400  # late already: nothing to protect


def test_late_requests_give_way_first_then_the_dear():
    # Three requests of two blocks' growth in a full pool; the second one is late, the third holds most.
    def preempted(late: bool) -> list[int]:
        w = world(num_blocks=1000)
        for prompt in (15, 15, 47):
            w.hold(w.add(prompt, 200, tbt_s=1.0), KV, num_outputs=2)
        w.num_blocks = w.used_blocks
        if late:
            w.table.num_late_gaps[1] = 1
        return w.schedule(AptPlusPolicy()).preempt.tolist()

    assert preempted(late=True) == [1]
    assert preempted(late=False) == [2]


def test_the_dear_makes_room_for_the_cheap_when_it_must_and_only_then():
    def preempted(waited_s: float, prompt: int, sacrifice: bool = True) -> list[int]:
        w = world(num_blocks=1000, max_num_batched_tokens=512)
        w.hold(w.add(500, 400, tbt_s=1.0), KV, num_outputs=30)
        w.hold(w.add(20, 400, tbt_s=1.0), KV, num_outputs=30)
        w.num_blocks = w.used_blocks + 4
        row = w.add(prompt, 30, ttft_s=1.0)
        pending(w, row, waited_s)
        return w.schedule(AptPlusPolicy(sacrifice=sacrifice)).preempt.tolist()

    assert preempted(0.6, prompt=20) == [0]
    assert preempted(0.4, prompt=20) == []  # it can still wait
    assert preempted(1.1, prompt=20) == []  # nothing to save any more
    assert preempted(0.6, prompt=450) == []  # not cheaper to finish
    assert preempted(0.6, prompt=20, sacrifice=False) == []


def test_who_cannot_be_on_time_any_more_does_not_take_the_room():
    def first(foresee: bool) -> int:
        w = world(num_blocks=2 * 17, block_size=16, max_num_batched_tokens=512)
        for prompt, waited_s in ((250, 0.9), (200, 0.5)):
            pending(w, w.add(prompt, 4, ttft_s=1.0), waited_s)
        return int(w.schedule(AptPlusPolicy(foresee=foresee)).rows[0])

    # The first has waited longest, but its prompt takes 270 ms and only 100 are left.
    assert first(foresee=False) == 0
    assert first(foresee=True) == 1


@pytest.mark.parametrize(("attention", "kind"), [("absorb", HIDDEN), ("reproject", KV)])
def test_kinds_by_the_price_of_memory(attention, kind):
    hardware = load_hardware("opt-13b", "a100-40gb")
    w = World(num_blocks=hardware.num_blocks, block_size=16, costs=hardware.step_costs(attention))
    w.kinds = hardware.kinds("hybrid", attention)
    w.add(300, 100)
    assert w.schedule(AptPlusPolicy()).kind.tolist() == [kind]


def test_ample_memory_is_not_worth_slower_reads():
    hardware = load_hardware("opt-13b", "h200")
    w = World(num_blocks=100 * hardware.num_blocks, costs=hardware.step_costs("absorb"))
    w.kinds = hardware.kinds("hybrid", "absorb")
    w.add(300, 100)
    assert w.schedule(AptPlusPolicy()).kind.tolist() == [KV]


def test_remaining_output_follows_the_lengths_seen():
    model = RemainingOutput()
    at = np.array([0, 50], np.int32)
    none = np.zeros(2, np.int32)
    # Memoryless before anything has ended: the sum of k over the steps is about the square of the mean.
    assert model.token_steps(at, none) == pytest.approx([PRIOR_TOKENS**2] * 2, rel=0.05)
    lengths = np.zeros(256, np.int64)
    lengths[100] = 100_000
    model.learn(lengths, 100_000)
    # All end after 100: 101 steps from the start, 51 from the fiftieth on.
    assert model.token_steps(at, none) == pytest.approx([5050, 1275], rel=0.02)
    assert model.token_steps(at, none + 10) == pytest.approx([5050 + 1010, 1275 + 510], rel=0.02)


def test_no_use_of_lengths_that_a_server_would_not_know():
    """The same decisions whatever max_tokens says beyond the true length."""

    def plans(extra: int) -> list:
        w = world(num_blocks=60, max_num_batched_tokens=128)
        seen = []
        for _ in range(5):
            w.add(40, 30 + extra)
        policy = AptPlusPolicy()
        for _ in range(12):
            plan = w.step(policy)
            seen.append((plan.rows.tolist(), plan.num_tokens.tolist(), plan.preempt.tolist()))
        return seen

    assert plans(0) == plans(20)


def test_it_holds_more_than_apt_does_in_simulation():
    config = SimulationConfig(rate=6.0, num_requests=250, hidden_attention="absorb")
    apt = simulate(config)
    plus = simulate(SimulationConfig(rate=6.0, num_requests=250, policy="apt-plus"))
    assert plus.summary.slo_attainment > apt.summary.slo_attainment
