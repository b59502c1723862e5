"""Recomputed positions by how their cache was lost."""

import numpy as np
import pytest

from apt_jax.engine.counters import RecomputeCause
from apt_jax.sched.view import Plan, SchedulerView
from tests.support.fake_executor import Fault, FaultKind
from tests.support.fake_serving import Served, prompt, prompt_with_shared_beginning, unsteady


def causes(served: Served) -> dict[str, int]:
    """Causes that there were; their sum is the total."""
    stats = served.engine.stats()
    assert sum(stats.recomputed_by_cause.values()) == stats.recomputed_tokens
    return {cause: n for cause, n in stats.recomputed_by_cause.items() if n}


class Script:
    """Runs everything as the given kind; preempts the first row in the named steps."""

    name = "script"

    def __init__(self, preempt_at: set[int], kinds: tuple[int, ...] = (0,)) -> None:
        self.preempt_at, self.kinds, self.steps = preempt_at, kinds, 0

    def schedule(self, view: SchedulerView) -> Plan:
        preempt = view.running[:1] if self.steps in self.preempt_at else view.running[:0]
        self.steps += 1
        rows = np.concatenate([view.running, view.waiting])
        rows = rows[~np.isin(rows, preempt)]
        held = view.table.kind[rows]
        switches = sum(at < self.steps for at in self.preempt_at)
        kind = np.where(held >= 0, held, np.int8(self.kinds[min(switches, len(self.kinds) - 1)]))
        if not rows.size:
            return Plan.idle(preempt)
        return Plan(rows=rows, num_tokens=view.remaining(rows, kind), kind=kind, preempt=preempt, iteration="mixed")


def scripted(served: Served, *args) -> Served:
    served.engine.policy = Script(*args)
    return served


def test_memory():
    served = Served("vllm-v1", num_blocks=24, offered=(True, False), prefix_caching=False)
    for i in range(3):
        served.add(prompt(8, i), 24)
    served.drain()
    assert served.engine.stats().num_preemptions
    assert set(causes(served)) == {"memory"}


def test_choice_of_the_policy():
    served = scripted(Served(prefix_caching=False, overlap=False), {4})
    served.add(prompt(8), 12)
    served.drain()
    assert causes(served) == {"policy": 8 + 3}


def test_kind_switch():
    served = scripted(Served(prefix_caching=False, overlap=False), {4}, (0, 1))
    served.add(prompt(8), 12)
    served.drain()
    assert causes(served) == {"kind_switch": 8 + 3}


def test_another_kind_after_a_lack_of_memory_is_no_switch():
    """It would have been computed again anyway."""
    script = Script(set())
    served = Served(prefix_caching=False, overlap=False)
    served.engine.policy = script
    name = served.add(prompt(8), 12)
    for _ in range(4):
        served.step()
    served.engine.states.preempt(served.engine.states.by_id[name].row, RecomputeCause.MEMORY)
    script.kinds = (1,)
    served.drain()
    assert sum(served.engine.stats().kind_switches.values()) == 1
    assert causes(served) == {"memory": 8 + 3}


@pytest.mark.parametrize("overlap", [False, True])
def test_failed_step(overlap):
    steps = iter(range(1000))
    served = Served(overlap=overlap, fault=lambda _: Fault(kind=FaultKind.RAISE_BEFORE) if next(steps) == 4 else None)
    served.add(prompt(8), 12)
    served.drain()
    served.assert_as_expected()
    assert set(causes(served)) == {"failed_step"}


def test_prefix_lost():
    """16 positions were found and never computed by the request; when it comes back they are gone."""
    served = scripted(Served(overlap=False, num_blocks=60), {20})
    served.serve(prompt(17), 1)
    late = served.add(prompt(17), 30)
    while not served.engine.table.num_preemptions.any():
        served.step()
    served.engine.cache.clear_prefixes()
    for state in list(served.engine.states.by_id.values()):
        served.engine.states.await_hits(state)
    served.drain()
    served.assert_as_expected()
    assert served.cached[late] == 16
    found = causes(served)
    assert found["prefix_lost"] == 16
    assert found["policy"] > 0


def test_what_was_computed_again_is_its_own_the_next_time():
    served = scripted(Served(overlap=False, num_blocks=60), {20, 30})
    served.serve(prompt(17), 1)
    served.add(prompt(17), 30)
    for count in (1, 2):
        while served.engine.table.num_preemptions.max() < count:
            served.step()
        served.engine.cache.clear_prefixes()
        for state in list(served.engine.states.by_id.values()):
            served.engine.states.await_hits(state)
    served.drain()
    assert causes(served)["prefix_lost"] == 16


def test_of_everything_that_can_happen_the_sums_are_the_total():
    seen = set()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        served = unsteady(rng, seed, fails={7} if seed % 2 else (), overlap=bool(seed % 3))
        for i in range(6):
            served.add(prompt_with_shared_beginning(rng, i), int(rng.integers(2, 14)))
            served.step()
        served.drain()
        seen |= set(causes(served))
    assert seen >= {"policy", "kind_switch", "failed_step"}
