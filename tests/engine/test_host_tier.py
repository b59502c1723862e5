"""Cached groups that leave the device go to host memory and come back, and nobody can tell from the tokens."""

import dataclasses
import itertools

import numpy as np
import pytest

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import StepBatch
from apt_jax.sched import all_policies
from tests.support.cases import cover, num_cases
from tests.support.fake_executor import Fault, FaultKind
from tests.support.fake_serving import (
    COSTS,
    OneKind,
    Served,
    prompt,
    prompt_with_shared_beginning,
    serve_random_requests,
    unsteady,
)
from tests.support.policy_names import LEADING


@pytest.fixture(params=[KV, HIDDEN], ids=["kv", "hidden"])
def offered(request) -> tuple[bool, bool]:
    return (request.param == KV, request.param == HIDDEN)


def moved(served: Served) -> tuple[int, int]:
    """Blocks saved and loaded, by the executor; the cache says the same."""
    host, tier = served.executor.host, served.engine.cache.tier
    assert tier is not None
    assert (host.num_saved, host.num_loaded) == (tier.num_saved_blocks, tier.num_loaded_blocks)
    assert sum(len(batch.saves) for batch in served.batches) == host.num_saved
    return host.num_saved, host.num_loaded


def small(offered=(True, False), num_host_blocks=100, **others) -> Served:
    """A pool of 12 groups of 4 positions."""
    return Served(num_blocks=24 if offered[KV] else 12, offered=offered, num_host_blocks=num_host_blocks, **others)


def test_a_prefix_outlives_the_pool(offered):
    served = small(offered)
    first = served.serve(prompt(33))
    served.serve(prompt(40, seed=1))  # takes the pool
    num = len(served.batches)
    again = served.serve(prompt(33))
    assert served.prefilled(num) == (32, 1)
    assert served.tokens[first] == served.tokens[again]
    assert served.engine.stats().host_hit_tokens > 0
    served.assert_as_expected()
    assert all(moved(served))


def test_only_what_is_overwritten_travels(offered):
    served = small(offered)
    served.serve(prompt(17))
    served.serve(prompt(9, seed=1))
    assert moved(served) == (0, 0)  # there was room for both
    served.serve(prompt(40, seed=2))
    per_group = 2 if offered[KV] else 1
    # 12 groups, of which the last request takes 11 and 1 was empty beside the 5 + 2 + 4 that were idle or empty.
    saved, loaded = moved(served)
    assert loaded == 0
    idle_before = (17 + 3) // 4 + (9 + 3) // 4
    assert saved == (11 - (12 - idle_before)) * per_group


def test_what_is_saved_once_is_not_saved_again(offered):
    served = small(offered)
    a, b = prompt(33), prompt(33, seed=1)
    for prompt_ids in (a, b, a, b):
        served.serve(prompt_ids)
    saved, _ = moved(served)
    for prompt_ids in (a, b, a, b):
        served.serve(prompt_ids)
    assert moved(served)[0] == saved
    served.assert_as_expected()


def test_a_preempted_request_comes_back_by_copying(offered):
    served = small(offered, max_num_seqs=2)
    served.add(prompt(21), 25)  # takes the whole pool in the end
    name = served.add(prompt(9, seed=1), 12)
    served.drain()
    stats = served.engine.stats()
    assert stats.num_preemptions >= 1
    loads = [batch for batch in served.batches if len(batch.loads)]
    assert [(len(batch.loads), int(batch.start[-1])) for batch in loads] == [(4 * (2 if offered[KV] else 1), 16)]
    assert stats.host_hit_tokens == 16  # outputs among them
    assert served.ended[name] == "length"
    served.assert_as_expected()


def test_a_prompt_of_whole_blocks_is_copied_from_host_memory(offered):
    served = small(offered)
    served.serve(prompt(32), 1)
    served.serve(prompt(47, seed=1), 1)
    num = len(served.batches)
    served.serve(prompt(32), 1)
    assert served.prefilled(num) == (31, 1)
    batch = served.batches[num]
    assert len(batch.copies) == 0
    assert len(batch.loads) == 8 * (2 if offered[KV] else 1)
    served.assert_as_expected()


def test_two_requests_that_find_the_same_load_it_once(offered):
    served = small(offered)
    served.serve(prompt(17), 1)
    served.serve(prompt(47, seed=1), 1)
    for seed in (2, 3):
        served.add([*prompt(16), *prompt(2, seed)], 3)
    num = len(served.batches)
    served.drain()
    assert len(served.batches[num].loads) == 4 * (2 if offered[KV] else 1)
    served.assert_as_expected()


def test_a_lost_copy_is_computed_again(offered):
    served = small(offered, lost=lambda: True)
    served.serve(prompt(33))
    served.serve(prompt(44, seed=1))
    num = len(served.batches)
    served.serve(prompt(33))
    assert served.prefilled(num)[0] < 32
    assert moved(served)[1] == 0
    assert served.engine.stats().num_lost_groups > 0
    served.assert_as_expected()


def test_a_copy_that_has_changed_is_computed_again(offered):
    served = small(offered)
    served.serve(prompt(33))
    served.serve(prompt(44, seed=1))
    tier = served.engine.cache.tier
    assert tier is not None
    spoiled = next(reversed(tier.only))
    served.executor.host.spoil(np.array(spoiled.host))
    served.serve(prompt(33))
    served.assert_as_expected()
    assert served.engine.stats().num_lost_groups >= 1


def test_host_memory_outlives_a_step_that_fails(offered):
    fails = itertools.count()
    at: set[int] = set()

    def fault(_batch: StepBatch) -> Fault | None:
        return Fault(kind=FaultKind.RAISE_IN_RESULT) if next(fails) in at else None

    served = small(offered, fault=fault, debug=False)
    served.serve(prompt(33))
    served.serve(prompt(44, seed=1))
    at.add(len(served.batches))
    served.serve(prompt(5, seed=2))
    num = len(served.batches)
    served.serve(prompt(33))
    start, _ = served.prefilled(num)
    assert start > 0
    served.assert_as_expected()


def test_a_full_host_memory_drops_the_end_of_the_oldest_prefix_first():
    served = small((False, True), num_host_blocks=6)
    for seed in range(4):
        served.serve(prompt(33, seed), 1)
        served.engine.check_integrity()
    num = len(served.batches)
    served.serve(prompt(33, 3), 1)
    assert served.prefilled(num)[0] == 32
    stats = served.engine.stats()
    assert stats.host_blocks == 6
    assert stats.used_host_blocks <= 6
    served.assert_as_expected()


def test_nothing_is_kept_where_there_is_none():
    served = small(num_host_blocks=0)
    assert served.engine.cache.tier is None
    assert served.engine.stats().host_blocks == 0


@pytest.mark.seeds
@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "overlap"])
def test_tokens_do_not_depend_on_it(overlap):
    """Random plans over a small pool: preempted, cut, of another kind, converted; steps and transfers fail."""
    totals = np.zeros(3, np.int64)
    for seed in (*range(num_cases(8, 1000)), 100_594):  # the last one failed once
        rng = np.random.default_rng([20, seed])
        lost = float(rng.choice([0.0, 0.0, 0.2]))
        served = unsteady(
            rng,
            seed,
            fails={int(rng.integers(5, 30))} if rng.random() < 0.3 else (),
            overlap=overlap,
            num_blocks=int(rng.choice([24, 32, 48])),
            num_host_blocks=int(rng.choice([4, 12, 60, 400])),
            hidden_block_size=int(rng.choice([3, 4, 5])),
            lost=lambda rng=rng, lost=lost: rng.random() < lost,
        )
        serve_random_requests(served, rng, int(rng.integers(6, 16)))
        saved, loaded = served.executor.host.num_saved, served.executor.host.num_loaded
        totals += saved, loaded, served.engine.stats().num_lost_groups
    assert (totals > 0).all(), totals


@pytest.mark.in_turn(7)
@pytest.mark.parametrize("policy", cover(sorted(all_policies()), LEADING))
def test_every_policy_keeps_its_promises_with_it(policy):
    rng = np.random.default_rng(1)
    served = Served(policy, num_blocks=40, num_host_blocks=200, budget=40)
    for number in range(12):
        served.add(prompt_with_shared_beginning(rng, number % 5), 6)
        for _ in range(3):
            served.step()
    served.drain()
    served.assert_as_expected()


class TestRestoreByCost:
    def served(self, **costs: float) -> Served:
        served = small((True, False))
        served.engine.costs = dataclasses.replace(COSTS, **costs)
        served.serve(prompt(33), 1)
        served.serve(prompt(47, seed=1), 1)
        return served

    def restarted(self, served: Served) -> tuple[int, int]:
        num = len(served.batches)
        served.serve(prompt(33), 1)
        served.assert_as_expected()
        return int(served.batches[num].start[0]), len(served.batches[num].loads)

    def test_a_cheap_copy_is_made(self):
        served = self.served(load_per_block_s=1e-4)
        assert self.restarted(served) == (32, 16)
        assert served.engine.stats().restores == {"kv": 1}

    def test_what_is_computed_sooner_is_computed_again(self):
        served = self.served(load_per_block_s=1.0)
        assert self.restarted(served) == (0, 0)
        assert served.engine.stats().restores == {"recomputed": 1}

    def test_only_what_is_in_host_memory_is_weighed(self):
        """16 blocks of copies take 32 ms; 33 tokens take 43 ms, the last of them 11 ms."""
        assert self.restarted(self.served(load_per_block_s=1.9e-3)) == (32, 16)
        assert self.restarted(self.served(load_per_block_s=2.1e-3)) == (0, 0)

    def test_a_change_of_the_costs_changes_what_waiting_requests_find(self):
        served = self.served(load_per_block_s=1e-4)
        name = served.add(prompt(33), 1)
        row = served.engine.states.by_id[name].row
        assert served.engine.table.cached_prefix_tokens[row, KV] == 32
        assert served.engine.table.host_prefix_tokens[row, KV] == 32
        served.engine.costs = dataclasses.replace(COSTS, load_per_block_s=1.0)
        served.engine.check_integrity()
        assert served.engine.table.cached_prefix_tokens[row, KV] == 0
        assert served.engine.table.host_prefix_tokens[row, KV] == 0
        served.drain()
        served.assert_as_expected()


class TestRestoreByConversion:
    """Keys and values from layer inputs that are in host memory."""

    def served(self, **costs: float) -> Served:
        served = Served(num_blocks=30, num_host_blocks=100, overlap=False)
        served.engine.costs = dataclasses.replace(COSTS, **costs)
        served.engine.policy = OneKind(HIDDEN)
        served.serve(prompt(33), 1)
        for seed in (1, 2, 3):
            served.serve(prompt(47, seed=seed), 1)
        served.engine.policy = OneKind(KV)
        return served

    def test_bytes_of_layer_inputs_travel_and_keys_and_values_are_kept(self):
        served = self.served(convert_per_hidden_token_s=1e-5, load_per_block_s=1e-5)
        num = len(served.batches)
        served.add(prompt(33), 3)
        served.step()
        batch = served.batches[num]
        assert (int(batch.start[0]), int(batch.num_tokens[0]), int(batch.kind[0])) == (32, 1, KV)
        assert len(batch.loads) == 8
        assert batch.conversions is not None
        assert batch.conversions.inputs.tolist() == [batch.loads[:, 1].tolist()]
        served.drain()
        assert served.engine.stats().restores == {"converted": 1}
        assert served.engine.stats().num_conversions == 1
        served.assert_as_expected()

    def test_not_where_computing_takes_less(self):
        served = self.served(convert_per_hidden_token_s=1.0)
        served.serve(prompt(33), 3)
        assert served.engine.stats().num_conversions == 0
        served.assert_as_expected()

    def test_keys_and_values_that_are_there_go_first(self):
        served = self.served(convert_per_hidden_token_s=1e-5, load_per_block_s=1e-5)
        served.serve(prompt(33), 3)
        num = len(served.batches)
        served.serve(prompt(33), 3)
        assert served.batches[num].conversions is None
        assert len(served.batches[num].loads) == 0
        served.assert_as_expected()

    def test_without_room_for_both_it_goes_on_with_layer_inputs(self):
        served = self.served(convert_per_hidden_token_s=1e-5)
        cache = served.engine.cache
        allocate, refuse = cache.groups.allocate, []

        def refusing(num: int):
            return None if refuse and num == 18 else allocate(num)  # keys and values of 33 positions

        cache.groups.allocate = refusing  # type: ignore[method-assign]
        refuse.append(True)
        num = len(served.batches)
        served.add(prompt(33), 3)
        served.step()
        assert served.batches[num].kind.tolist() == [HIDDEN]
        assert served.batches[num].start.tolist() == [32]
        served.engine.check_integrity()
        refuse.clear()
        served.engine.policy = OneKind(HIDDEN)
        served.drain()
        served.assert_as_expected()


def test_a_save_that_was_not_dispatched_is_forgotten(offered):
    """The step fails before anything is read, and host memory holds what another group had left there."""
    served = small(offered, num_host_blocks=12, debug=False)
    served.serve(prompt(33))
    served.serve(prompt(44, seed=1))
    execute = served.executor.execute

    def failing(batch: StepBatch):
        assert len(batch.saves)
        served.executor.execute = execute
        raise RuntimeError("planted: before the executor has seen the step")

    served.executor.execute = failing
    served.serve(prompt(47, seed=2), 1)  # all of the one before was to be saved
    served.serve(prompt(44, seed=1))
    served.assert_as_expected()
