"""Cached groups that leave host memory go to disk, and another engine finds them; nobody can tell from the tokens."""

import dataclasses
import itertools
import time

import numpy as np
import pytest

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.engine.batch import PlainReserver, SharedReserver
from apt_jax.engine.disk_reads import DiskReads
from apt_jax.request import EngineRequest
from tests.support.cases import num_cases
from tests.support.fake_disk import FakeDisk
from tests.support.fake_executor import FakeHostMemory
from tests.support.fake_serving import COSTS, Served, prompt, serve_random_requests, unsteady


@pytest.fixture(params=[KV, HIDDEN], ids=["kv", "hidden"])
def offered(request) -> tuple[bool, bool]:
    return (request.param == KV, request.param == HIDDEN)


def new_disk(**others) -> FakeDisk:
    nothing = FakeHostMemory(np.zeros((3, 1, 1), np.int64), np.zeros(1, np.bool_), None)
    return FakeDisk(nothing, **others)


def small(disk: FakeDisk, offered=(True, False), num_host_blocks=100, **others) -> Served:
    """A pool of 12 groups of 4 positions."""
    return Served(
        num_blocks=24 if offered[KV] else 12, offered=offered, num_host_blocks=num_host_blocks, disk=disk, **others
    )


def test_the_next_engine_finds_what_was_cached(offered):
    disk = new_disk()
    first = small(disk, offered)
    name = first.serve(prompt(33))
    first.engine.close()
    first.engine.check_integrity()
    assert disk.closed
    assert disk.num_written == 9  # the last token has not been computed with

    second = small(disk, offered)
    again = second.serve(prompt(33))
    assert second.prefilled(0) == (32, 1)
    assert second.tokens[again] == first.tokens[name]
    stats = second.engine.stats()
    assert (stats.disk_hit_tokens, stats.host_hit_tokens) == (32, 32)
    assert stats.disk_read_bytes == 8 * 1000
    assert second.cached[again] == 32
    second.assert_as_expected()


def test_what_leaves_host_memory_is_written_and_comes_back(offered):
    disk = new_disk()
    served = small(disk, offered, num_host_blocks=24 if offered[KV] else 12)
    for seed in range(4):
        served.serve(prompt(40, seed), 1)
    assert disk.num_written > 0
    num = len(served.batches)
    served.serve(prompt(40, 0), 1)
    assert served.prefilled(num)[0] >= 20
    assert served.engine.stats().disk_hit_tokens > 0
    served.assert_as_expected()


def test_a_request_is_not_shown_to_the_policy_while_its_prefix_is_read(offered):
    disk = new_disk()
    first = small(disk, offered)
    first.serve(prompt(33), 1)
    first.engine.close()
    disk.latency = lambda: 2
    served = small(disk, offered, max_num_seqs=2)
    other = served.add(prompt(9, seed=1), 6)
    name = served.add(prompt(33), 1)
    row = served.engine.states.by_id[name].row
    assert served.engine.states.held[row]
    served.step()
    assert [batch.slots.size for batch in served.batches] == [1]  # the other one goes on meanwhile
    assert row not in served.engine.view().waiting
    served.drain()
    assert served.cached[name] == 32
    assert served.ended == {other: "length", name: "length"}
    served.assert_as_expected()


def test_what_cannot_be_read_is_computed(offered):
    disk = new_disk()
    first = small(disk, offered)
    first.serve(prompt(33), 1)
    first.engine.close()
    reads = itertools.count()
    disk.fails = lambda: next(reads) == 3
    served = small(disk, offered)
    served.serve(prompt(33), 1)
    assert served.prefilled(0) == (12, 21)
    served.assert_as_expected()


def test_a_read_that_stalls_is_given_up(offered):
    disk = new_disk()
    first = small(disk, offered)
    first.serve(prompt(33), 1)
    first.engine.close()
    disk.latency = lambda: 10**9
    served = small(disk, offered)
    name = served.add(prompt(33), 1)
    served.step()
    served.clock.advance_to(1.9)
    served.step()
    assert not served.batches
    served.clock.advance_to(4.0)
    served.drain()
    assert served.cached[name] == 4  # the first one came
    served.assert_as_expected()
    assert not served.engine.states.held.any()


def test_an_aborted_request_leaves_nothing_behind(offered):
    disk = new_disk()
    first = small(disk, offered)
    first.serve(prompt(33), 1)
    first.engine.close()
    disk.latency = lambda: 3
    served = small(disk, offered)
    name = served.add(prompt(33), 1)
    served.step()
    assert served.engine.abort(name)
    row_again = served.add(prompt(9, seed=1), 1)
    served.drain()
    assert served.ended == {name: "abort", row_again: "length"}
    served.engine.check_integrity()


def test_a_read_goes_on_as_long_as_anybody_waits_for_it(offered):
    disk = new_disk()
    first = small(disk, offered)
    first.serve(prompt(33), 1)
    first.engine.close()
    disk.latency = lambda: 10
    served = small(disk, offered, max_num_seqs=3)
    names = [served.add(np.concatenate([prompt(32), prompt(5, seed=5 + i)]), 1) for i in range(2)]
    reads = served.engine.states.prefixes.reads
    assert isinstance(reads, DiskReads)
    (read,) = reads._reads
    served.step()
    assert served.engine.abort(names[0])
    assert not read.of_disk.is_cancelled
    assert served.engine.abort(names[1])
    assert read.of_disk.is_cancelled
    served.step()
    assert not reads._reads
    assert disk.num_read < 8
    served.engine.check_integrity()


def test_what_is_read_takes_no_place_from_what_it_builds_on(offered):
    """A prefix that is longer than host memory: its beginning stays, and its end is not read."""
    disk = new_disk()
    first = small(disk, offered)
    first.serve(prompt(41), 1)
    first.engine.close()
    halves = 2 if offered[KV] else 1
    served = small(disk, offered, num_host_blocks=4 * halves)
    name = served.add(prompt(41), 1)
    served.drain()
    served.engine.check_integrity()
    assert served.cached[name] == 16
    served.assert_as_expected()


def test_requests_of_one_prefix_share_a_read(offered):
    disk = new_disk()
    first = small(disk, offered)
    first.serve(prompt(33), 1)
    first.engine.close()
    disk.latency = lambda: 2
    served = small(disk, offered, max_num_seqs=3)
    for rest in range(3):
        served.add(np.concatenate([prompt(32), prompt(5 + rest, seed=5)]), 1)
    served.drain()
    assert disk.num_read == 8
    assert min(served.cached.values()) >= 32
    served.assert_as_expected()


class TestByCost:
    def found(self, disk: FakeDisk, **costs: float) -> int:
        served = small(disk)
        served.engine.costs = dataclasses.replace(COSTS, **costs)
        name = served.serve(prompt(33), 1)
        served.assert_as_expected()
        return served.cached[name]

    @pytest.fixture
    def disk(self) -> FakeDisk:
        disk = new_disk()
        first = small(disk)
        first.serve(prompt(33), 1)
        first.engine.close()
        return disk

    def test_a_quick_disk_is_read(self, disk):
        assert self.found(disk) == 32

    def test_a_slow_disk_is_left_alone_once_that_is_known(self, disk):
        """33 tokens take 43 ms, the last of them 11 ms; 8 groups take 8 times as long as one."""
        disk.read_s = 0.005
        served = small(disk)
        assert served.cached[served.serve(prompt(33), 1)] == 32  # nothing is known yet
        served.engine.cache.clear_prefixes()
        assert served.cached[served.serve(prompt(33), 1)] == 0
        disk.read_s = 0.003
        for _ in range(20):  # a slow read is forgotten in the end
            served.engine.cache.clear_prefixes()
            found = served.cached[served.serve(prompt(33), 1)]
            if found:
                break
        assert found == 32
        served.assert_as_expected()

    def test_copies_to_the_device_count(self, disk):
        assert self.found(disk, load_per_block_s=1.9e-3) == 32
        assert self.found(disk, load_per_block_s=2.1e-3) == 0


def of_tenant(request: EngineRequest, tenant: str | None) -> EngineRequest:
    return dataclasses.replace(request, tenant=tenant)


def test_a_tenant_finds_nothing_of_another():
    disk = new_disk()

    def found(tenant: str | None) -> int:
        served = small(disk)
        add = served.engine.add_request
        served.engine.add_request = lambda request: add(of_tenant(request, tenant))  # type: ignore[method-assign]
        name = f"of {tenant}"
        served.add(prompt(33), 1, name)
        tokens: list[int] = []
        cached = -1
        while served.engine.has_work:
            for output in served.engine.step():
                tokens += output.new_token_ids
                cached = output.metrics.num_cached_tokens
        assert tokens == served.expected(name)
        served.engine.close()
        return cached

    assert [found(tenant) for tenant in ("a", "b", None, "b", "a", None)] == [0, 0, 0, 32, 32, 32]


@pytest.mark.parametrize("hurried", [False, True])
def test_the_end_is_bounded(hurried):
    disk = new_disk()
    served = small(disk)
    served.serve(prompt(40), 1)
    disk.flush = lambda timeout_s: False  # type: ignore[method-assign]
    began = time.monotonic()
    served.engine.close(100.0 if hurried else 0.01, is_hurried=lambda: hurried)
    assert time.monotonic() - began < 10.0
    assert disk.closed
    assert disk.num_written == 8  # of 10: it looked at the time in between
    served.engine.check_integrity()


def test_a_prefix_that_led_to_no_token_is_removed(offered):
    """The groups of a request that never had a good token over them are not to be trusted, wherever they are."""
    disk = new_disk()
    first = small(disk, offered)
    first.serve(prompt(33), 1)
    first.engine.close()
    assert disk.groups
    disk.groups = {key: (contents + 1, down) for key, (contents, down) in disk.groups.items()}
    served = small(disk, offered, debug=False)
    draw = served.executor._draw_tokens

    def not_finite(batch, fault, allowed):
        result = draw(batch, fault, allowed)
        return dataclasses.replace(result, finite=np.zeros_like(result.finite))

    served.executor._draw_tokens = not_finite  # type: ignore[method-assign]
    name = served.serve(prompt(33), 1)
    assert served.ended[name] == "error"
    assert not disk.groups


@pytest.mark.seeds
@pytest.mark.parametrize("shares", [False, True], ids=["plain", "shared"])
def test_tokens_do_not_depend_on_it(shares):
    """Random plans of several engines, one after the other, on one disk; steps, transfers and the disk fail."""
    totals = np.zeros(3, np.int64)
    for seed in range(num_cases(4, 600)):
        rng = np.random.default_rng([33, seed])
        p_fails = float(rng.choice([0.0, 0.0, 0.1]))
        disk = new_disk(latency=lambda rng=rng: int(rng.integers(3)), fails=lambda rng=rng, p=p_fails: rng.random() < p)
        size = int(rng.choice([3, 4, 5]))
        for restart in range(3):
            lost = float(rng.choice([0.0, 0.0, 0.2]))
            served = unsteady(
                rng,
                seed + restart,
                fails={int(rng.integers(5, 30))} if rng.random() < 0.3 else (),
                overlap=bool(rng.random() < 0.5),
                num_blocks=int(rng.choice([24, 32, 48])),
                num_host_blocks=int(rng.choice([4, 12, 60])),
                hidden_block_size=size,
                lost=lambda rng=rng, lost=lost: rng.random() < lost,
                disk=disk,
                reserver=SharedReserver if shares else PlainReserver,
            )
            serve_random_requests(served, rng, int(rng.integers(4, 9)))
            totals[0] += served.engine.stats().disk_hit_tokens
            served.engine.close()
            served.engine.check_integrity()
        totals[1:] += disk.num_written, disk.num_failed
    assert (totals > 0).all(), totals
