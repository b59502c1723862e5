"""Memory reserved by quantiles: against the future written out step by step, and nobody preempted where lengths are
known."""

from collections.abc import Sequence

import numpy as np
import pytest

from apt_jax.errors import ConfigError
from apt_jax.sched import HIDDEN, KV, Plan, Policy, SchedulerView, VllmV1Policy, make_policy
from apt_jax.sched.output_lengths import FEW_OUTPUTS
from apt_jax.sched.reservation import Reservation, expected_tokens
from tests.support.cases import num_cases
from tests.support.sched_world import Arrival, World, drain

POLICIES = ("vllm-v1", "least-computed", "hrrn", "vtc", "fcfs", "fcfs-mixed")


def policy_of(name: str, reserve: float | None) -> Policy:
    options = [] if reserve is None else [f"reserve={reserve}"]
    if name == "fcfs-mixed":
        name, options = "fcfs", ["mixed=true", *options]
    if name in ("vllm-v1", "hrrn"):
        options.append("budget=11")
    return make_policy(name + "?" * bool(options) + "&".join(options))


# --- against the future, one step at a time -------------------------------------------------------------------------


def fits(world: World, view: SchedulerView, begun: Sequence[int], kinds: Sequence[int], prompt_budget: int | None):
    """Walk through time: the pool holds all running rows and `begun` until the last of them ends."""
    table = world.table
    rows = [*view.running.tolist(), *begun]
    kind = dict(zip(begun, kinds, strict=True)) | {r: int(table.kind[r]) for r in view.running.tolist()}
    left = {r: int(table.num_tokens[r] - table.num_cached[r]) for r in rows}
    prompts = [r for r in rows if r in begun or left[r] > 1]
    wait = 1
    if prompt_budget is not None and prompts:
        wait = -(-sum(left[r] for r in prompts) // prompt_budget)
    held: dict[int, int] = {}
    for row in rows:
        tokens, final = int(table.num_tokens[row]), int(table.max_tokens_total[row]) - 1
        to_come = final + 1 - tokens
        for step in range(1000):
            if row not in prompts:
                alive, positions = step <= to_come, tokens - 1 + step
            elif prompt_budget is None:  # its first token is sampled before step 1, or in it at the latest
                alive, positions = step <= to_come, tokens + step
            else:  # its first token comes with step 1 at best, with step `wait` at worst
                alive, positions = step <= wait - 1 + to_come, max(tokens - 1 + step, tokens)
            if not alive:
                break
            held[step] = held.get(step, 0) + int(world.blocks(min(positions, final), kind[row]))
    return max(held.values()) <= world.num_blocks


@pytest.mark.seeds
def test_it_admits_as_many_as_the_future_holds():
    seen = set()
    for seed in range(num_cases(60, 600)):
        rng = np.random.default_rng(seed)
        world = World(
            num_blocks=int(rng.integers(60, 200)),
            block_size=int(rng.choice([1, 4, 16])),
            hidden_block_size=None if rng.random() < 0.5 else int(rng.choice([2, 4, 6])),
            max_num_seqs=12,
        )
        for _ in range(int(rng.integers(1, 6))):
            row = world.add(int(rng.integers(2, 20)), int(rng.integers(2, 40)))
            outputs = int(rng.integers(1, world.table.max_tokens_total[row] - world.table.prompt_len[row]))
            cached = None if rng.random() < 0.7 else int(rng.integers(1, world.table.prompt_len[row]))
            world.hold(row, int(rng.integers(2)), outputs, cached)
        for _ in range(5):
            world.add(int(rng.integers(1, 20)), int(rng.integers(1, 30)))
        view = world.view()
        kind = rng.integers(0, 2, 5).astype(np.int8)
        budget = None if rng.random() < 0.4 else int(rng.integers(1, 40))
        waiting = view.waiting.tolist()
        expected = 0
        while expected < 5 and fits(world, view, waiting[: expected + 1], kind[: expected + 1].tolist(), budget):
            expected += 1
        assert Reservation(1.0).num_admissible(view, view.waiting, kind, budget) == expected
        seen.add(expected)
    assert seen == set(range(6))


def test_a_request_that_is_alone_begins_in_any_case():
    world = World(num_blocks=10, mode="kv")
    world.add(10, 1000)
    view = world.view()
    assert Reservation(1.0).num_admissible(view, view.waiting, np.zeros(1, np.int8), 8) == 1


# --- nobody is preempted --------------------------------------------------------------------------------------------


class KnownWorld(World):
    """Requests that declare their lengths."""

    def add(self, *args, **kwargs) -> int:
        row = super().add(*args, **kwargs)
        self.table.known_length[row] = True
        return row


def num_preempted(world: World, policy: Policy, arrivals: list[Arrival]) -> int:
    """Preemptions until all are served."""
    preempted = 0
    schedule = policy.schedule

    def counting(view: SchedulerView) -> Plan:
        nonlocal preempted
        plan = schedule(view)
        preempted += plan.preempt.size
        return plan

    policy.schedule = counting  # type: ignore[method-assign]
    drain(world, policy, arrivals, 5000)
    return preempted


def random_run(seed: int, name: str, reserve: float | None) -> int:
    """Preemptions of a random workload: few requests, steps that prompts do not fit, a pool for hardly more than one."""
    rng = np.random.default_rng(seed)
    chunk, block_size = int(rng.integers(4, 14)), int(rng.choice([1, 1, 2, 4]))
    hidden_size = None if rng.random() < 0.6 else int(rng.choice([1, 2, 3, 6]))
    arrivals = [
        Arrival(int(rng.integers(0, 20)), int(rng.integers(1, 3 * chunk)), int(rng.integers(1, 16)))
        for _ in range(int(rng.integers(2, 9)))
    ]
    longest = max(one.prompt_len + one.max_tokens for one in arrivals)
    world = KnownWorld(
        num_blocks=max(2 * -(-longest // block_size), -(-longest // (hidden_size or block_size)))
        + int(rng.integers(0, 12)),
        block_size=block_size,
        hidden_block_size=hidden_size,
        mode=str(rng.choice(["kv", "kv", "hidden", "hybrid"])),
        max_num_batched_tokens=chunk,
        max_num_seqs=int(rng.integers(2, chunk + 3)),
    )
    return num_preempted(world, policy_of(name, reserve), arrivals)


@pytest.mark.seeds
@pytest.mark.parametrize("name", POLICIES)
def test_nobody_is_preempted_where_lengths_are_known(name):
    num_seeds = num_cases(20, 1000)
    assert sum(random_run(seed, name, None) for seed in range(num_seeds)) > 0
    for seed in range(num_seeds):
        assert random_run(seed, name, (0.5, 1)[seed % 2]) == 0, seed


@pytest.mark.parametrize(
    ("chunk", "num_blocks", "arrivals"),
    [
        (4, 22, [(0, 2, 5), (1, 5, 3)]),
        (7, 36, [(0, 1, 13), (1, 15, 2)]),
        (6, 42, [(0, 3, 10), (0, 10, 5)]),
        (6, 38, [(0, 4, 6), (1, 13, 2)]),
    ],
)
def test_the_last_token_of_a_prompt_may_be_computed_with_the_decodes(chunk, num_blocks, arrivals):
    """A chunk of one token looks like a decode: its request is one step behind, the other one goes on meanwhile."""
    world = KnownWorld(num_blocks=num_blocks, block_size=1, mode="kv", max_num_batched_tokens=chunk, max_num_seqs=4)
    assert num_preempted(world, policy_of("fcfs", 1), [Arrival(*one) for one in arrivals]) == 0


def test_what_is_added_up_takes_longer():
    """Requests end one after the other: the pool holds more of them than if all greatest lengths were added up."""

    def run(policy: str) -> int:
        world = KnownWorld(num_blocks=80, mode="kv")
        return drain(world, make_policy(policy), [Arrival(2 * i, 10, 60) for i in range(12)], 1000)

    assert run("vllm-v1?reserve=1") < run("sarathi-ef")


# --- quantiles ------------------------------------------------------------------------------------------------------


def learned(world: World, lengths: Sequence[int]) -> None:
    for length in lengths:
        world.table.lengths.record((), length, cut_off=False)


def test_expected_tokens():
    world = World(num_blocks=100)
    rows = np.array([world.add(10, 50), world.add(10, 50), world.add(10, 15), world.add(10, 50)], np.int32)
    world.hold(1, KV, num_outputs=25)
    world.hold(3, KV, num_outputs=45)
    world.table.known_length[0] = True
    view = world.view()
    assert expected_tokens(view, rows, 0.5).tolist() == [60, 36, 11, 56]  # nothing is known: one token more
    learned(world, [20] * 30 + [40] * 30)
    assert expected_tokens(view, rows, 0.4).tolist() == [60, 50, 25, 56]
    assert expected_tokens(view, rows, 0.9).tolist() == [60, 50, 25, 56]
    assert expected_tokens(view, rows, 1).tolist() == [60, 60, 25, 60]
    world.add(10, 50)
    assert [int(expected_tokens(view, np.array([4], np.int32), q)[0]) for q in (0.4, 0.9)] == [30, 50]


def test_a_higher_quantile_admits_less():
    admitted = {}
    for reserve in (None, 0.3, 0.6, 1):
        world = World(num_blocks=150, mode="kv", max_num_seqs=30, max_num_batched_tokens=512)
        learned(world, [10] * FEW_OUTPUTS + [50] * FEW_OUTPUTS)
        for _ in range(20):
            world.add(8, 60)
        admitted[reserve] = world.schedule(VllmV1Policy(budget=512, reserve=reserve)).rows.size
    assert 20 == admitted[None] > admitted[0.3] > admitted[0.6] > admitted[1] >= 1


def test_decodes_have_their_tokens_before_prompts():
    world = World(num_blocks=100, mode="kv", max_num_batched_tokens=4)
    world.hold(world.add(30), KV, cached=4)
    world.hold(world.add(3), KV)
    plain, reserved = (world.schedule(policy_of("vllm-v1", reserve)) for reserve in (None, 1.0))
    assert dict(zip(plain.rows.tolist(), plain.num_tokens.tolist(), strict=True)) == {0: 4}
    assert dict(zip(reserved.rows.tolist(), reserved.num_tokens.tolist(), strict=True)) == {0: 3, 1: 1}


def test_algorithm_1_adds_up_quantiles():
    """With lengths that are known a quantile decides as the eviction-free twin."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        world = KnownWorld(num_blocks=60, mode="kv")
        for i in range(8):
            row = world.add(int(rng.integers(1, 20)), int(rng.integers(4, 20)))
            if i < 2:
                world.hold(row, KV, num_outputs=2)
        quantile, twin = (world.schedule(make_policy(name)) for name in ("sarathi?reserve=0.5", "sarathi-ef"))
        assert quantile.rows.tolist() == twin.rows.tolist()
        assert quantile.num_tokens.tolist() == twin.num_tokens.tolist()


@pytest.mark.parametrize("name", ["vllm-v1?reserve=0", "fcfs?reserve=1.01", "sarathi?reserve=-1"])
def test_a_quantile_lies_between_0_and_1(name):
    with pytest.raises(ConfigError, match=r"reserve=\S+ must lie in \(0, 1\]") as caught:
        make_policy(name)
    assert "\n" not in str(caught.value)


def test_a_word_that_is_none_is_told():
    with pytest.raises(ConfigError, match="reserve='some' is not input, all, estimate or a number"):
        make_policy("sarathi?reserve=some")
    assert vars(make_policy("sarathi?reserve=all"))["reserve"] == "all"
    assert vars(make_policy("sarathi?reserve=0.5"))["reserve"] == 0.5


def test_kinds_are_both_counted():
    world = World(num_blocks=30, max_num_seqs=4)
    world.hold(world.add(8, 40), HIDDEN, num_outputs=2)
    world.add(8, 40)
    view = world.view()
    fitting = [Reservation(1.0).num_admissible(view, view.waiting, np.array([k], np.int8), 8) for k in (KV, HIDDEN)]
    assert fitting == [0, 1]
