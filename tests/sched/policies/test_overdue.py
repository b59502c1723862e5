"""A bound on how long best-effort requests wait: what holds with it, and that nothing changes without it."""

import numpy as np
import pytest

from apt_jax.config import SLO
from apt_jax.errors import ConfigError
from apt_jax.request import RequestMetrics
from apt_jax.sched import StepCosts, make_policy
from apt_jax.sched.policies.bros import BrosPolicy
from apt_jax.sched.policies.overdue import CHUNK_SHARE, OVERDUE_SHARE, OverdueRequests, share_of_step
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate
from apt_jax.sim.workload import Workload
from tests.support.cases import num_cases
from tests.support.sched_world import World

STEP_S = 0.01


def best_effort(world: World, prompt_len: int, max_tokens: int = 1000) -> int:
    row = world.add(prompt_len, max_tokens)
    world.table.best_effort[row] = True
    return row


def rank_of(world: World, row: int) -> int:
    return int(world.table.rank[row])


def flooded(num_blocks: int = 4000, *, max_num_seqs: int = 16) -> World:
    return World(num_blocks=num_blocks, mode="kv", max_num_seqs=max_num_seqs)


def step(world: World, policy: BrosPolicy) -> np.ndarray:
    """A step under real-time requests that would fill it alone and are late, so that none makes way.

    Returns:
        The ranks of its requests: rows are used again.
    """
    table = world.table
    waiting = np.count_nonzero(table.live & ~table.best_effort)
    for _ in range(6 - waiting):
        world.add(58, 1, arrival_s=world.now_s - 1, ttft_s=0.5)
    plan = world.schedule(policy)
    ranks = table.rank[plan.rows]
    world.apply(plan, seconds=STEP_S)
    return ranks


def longest_wait_s(world: World, policy: BrosPolicy, row: int, steps: int) -> float:
    """The longest time that a request is without a new token, while it lives."""
    longest_s, rank = 0.0, world.table.rank[row]
    for _ in range(steps):
        step(world, policy)
        if not world.table.live[row] or world.table.rank[row] != rank:
            break
        longest_s = max(longest_s, world.now_s - float(world.table.last_token_s[row]))
    return longest_s


def test_without_the_bound_it_waits_as_long_as_the_others_come():
    world = flooded()
    row = best_effort(world, 40)
    assert longest_wait_s(world, BrosPolicy(), row, 200) == pytest.approx(200 * STEP_S)


def test_with_it_no_wait_is_longer():
    world = flooded()
    row = best_effort(world, 40, 30)
    wait_s = longest_wait_s(world, BrosPolicy(best_effort_wait=0.5, best_effort_tokens=8), row, 600)
    assert world.num_steps < 300  # 30 tokens in four turns
    # Three chunks of 16 prompt tokens, a quarter of a step, once it has waited.
    assert 0.5 <= wait_s < 0.5 + 6 * STEP_S


def test_after_its_turn_it_waits_again():
    world, overdue = flooded(), OverdueRequests(0.5, 2)
    row = best_effort(world, 10)
    found = []
    for has_token in (False, False, True, True, False, False):
        world.now_s += 0.3
        found.append(overdue.rows(world.view()).tolist())
        if has_token:
            world.table.record_tokens(np.array([row], np.int32), world.now_s)
    assert found == [[], [row], [row], [row], [], [row]]


def test_it_takes_no_more_than_its_share_of_a_flood():
    world, policy = flooded(max_num_seqs=32), BrosPolicy(best_effort_wait=0.2)
    flood = [rank_of(world, best_effort(world, 50)) for _ in range(40)]
    assert policy._overdue is not None
    most, without = 0, 0
    for _ in range(200):
        most = max(most, policy._overdue.rows(world.view()).size)
        without += bool(np.isin(step(world, policy), flood).all())
    assert most == 32 // OVERDUE_SHARE
    assert without == 0  # real-time requests are in every step


def test_those_that_wait_longest_have_their_turn_first():
    world, policy = flooded(max_num_seqs=8), BrosPolicy(best_effort_wait=0.2, best_effort_tokens=4)
    ranks = [rank_of(world, best_effort(world, 8, 4)) for _ in range(5)]  # one at a time
    order = [rank for _ in range(80) for rank in step(world, policy).tolist() if rank in ranks]
    assert order == np.repeat(ranks, 4).tolist()


def test_it_gets_blocks_though_real_time_requests_hold_all():
    world, policy = flooded(130), BrosPolicy(best_effort_wait=0.2, best_effort_tokens=4)
    row = best_effort(world, 60, 4)  # 32 blocks; each real-time request has as many
    assert longest_wait_s(world, policy, row, 100) < 0.5
    assert world.num_steps < 60


def test_shares_of_a_step():
    tokens = np.array([1, 100, 1, 60, 200], np.int32)
    assert share_of_step(tokens, 512).tolist() == [1, 100, 1, 28, 0]
    assert share_of_step(tokens, 512).sum() == 2 + 512 // CHUNK_SHARE
    assert share_of_step(np.array([9], np.int32), 2).tolist() == [1]


@pytest.mark.seeds
def test_a_bound_that_is_never_reached_changes_no_decision():
    costs = StepCosts(prefill_base_s=0.01, prefill_per_token_s=1e-3, decode_base_s=0.01, decode_per_request_s=1e-4)
    for seed in range(num_cases(3, 40)):
        plans = []
        for policy in (BrosPolicy(), BrosPolicy(best_effort_wait=1e9)):
            rng, world = np.random.default_rng(seed), World(num_blocks=60, mode="kv", costs=costs)
            plans.append([])
            for _ in range(60):
                if rng.random() < 0.4:
                    row = world.add(int(rng.integers(1, 50)), int(rng.integers(1, 30)), ttft_s=0.3, tbt_s=0.05)
                    world.table.best_effort[row] = rng.random() < 0.5
                plan = world.step(policy)
                plans[-1].append((plan.rows.tolist(), plan.num_tokens.tolist(), plan.preempt.tolist()))
        assert plans[0] == plans[1]


@pytest.mark.seeds
def test_everything_ends_with_little_room():
    for seed in range(num_cases(3, 40)):
        rng = np.random.default_rng(seed)
        world = World(num_blocks=int(rng.choice([40, 50, 80])), mode="kv", max_num_seqs=int(rng.choice([1, 2, 8])))
        policy = BrosPolicy(
            best_effort_wait=float(rng.choice([0.011, 0.1])), best_effort_tokens=int(rng.integers(1, 9))
        )
        for _ in range(12):
            row = world.add(int(rng.integers(1, 50)), int(rng.integers(1, 30)), ttft_s=0.3, tbt_s=0.05)
            world.table.best_effort[row] = rng.random() < 0.5
        idle = 0
        while world.table.live.any():
            idle = 0 if world.step(policy).rows.size else idle + 1
            assert idle < 4
            assert world.num_steps < 3000


@pytest.mark.parametrize(
    "options", ["best_effort_wait=0", "best_effort_wait=-1", "best_effort_wait=60&best_effort_tokens=0"]
)
def test_a_bound_is_positive(options):
    with pytest.raises(ConfigError, match=r"best_effort_(wait|tokens)=.* must be"):
        make_policy(f"bros?{options}")


def test_algorithm_1_as_printed_has_no_bound():
    with pytest.raises(ConfigError, match=r"no option 'best_effort_wait'"):
        make_policy("apt_jax.lab.policies.bros_paper:BrosPaperPolicy?best_effort_wait=60")


class TestSimulated:
    """Real-time requests at 120 % of what the engine can do, and one best-effort request."""

    @staticmethod
    def run(policy: str, *, load_s: float = 10.0) -> tuple[RequestMetrics, list[RequestMetrics]]:
        rng = np.random.default_rng(3)
        rate = 6.0  # of 5 that an A100 can do
        n, before = int(rate * load_s), 12
        workload = Workload(
            prompt_tokens=np.insert(rng.integers(700, 900, n), before, 700).astype(np.int32),
            output_tokens=np.insert(rng.integers(60, 100, n), before, 40).astype(np.int32),
            arrival_s=np.r_[np.zeros(before + 1), rng.exponential(1 / rate, n - before).cumsum()],
            best_effort=np.arange(n + 1) == before,
        )
        config = SimulationConfig(
            policy=policy, cache="kv", slo=SLO(ttft_s=1.0, tbt_s=0.2), max_num_seqs=32, max_num_batched_tokens=512
        )  # fmt: skip
        result = simulate(config, workload=workload)
        assert result.fallback_iterations == 0
        metrics = [one for one in result.requests if one is not None]
        assert len(metrics) == n + 1
        return metrics.pop(before), metrics

    @staticmethod
    def longest_wait_s(metrics: RequestMetrics) -> float:
        return float(np.diff([metrics.arrival_s, *metrics.token_times_s]).max())

    def test_the_bound_holds_and_only_with_it(self):
        first, _ = self.run("bros")
        assert self.longest_wait_s(first) > 6.0
        bounded, _ = self.run("bros?best_effort_wait=3")
        # Its prompt takes six steps of up to 0.25 s, an eighth of a second and a fourth of the tokens each.
        assert 3.0 <= self.longest_wait_s(bounded) < 4.5

    @pytest.mark.slow
    def test_it_holds_for_minutes(self):
        first, others = self.run("bros", load_s=180.0)
        assert self.longest_wait_s(first) > 60.0
        bounded, beside = self.run("bros?best_effort_wait=10", load_s=180.0)
        assert 10.0 <= self.longest_wait_s(bounded) < 12.0
        attained = [np.mean([one.slo_attained for one in some]) for some in (others, beside)]
        assert attained[1] > attained[0] - 0.02
