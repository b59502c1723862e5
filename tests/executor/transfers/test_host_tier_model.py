"""The tier of host memory over the real executor: greedy tokens do not depend on it, nothing is compiled for it while
serving, and what travels is what is counted."""

import dataclasses
import functools
import threading
import zlib
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from apt_jax.config import SLO, CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from apt_jax.core.kinds import HIDDEN, KV, CacheKindSpec
from apt_jax.core.tiers import Tiers
from apt_jax.costs.model import StepCosts
from apt_jax.engine import Engine
from apt_jax.errors import ConfigError
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.executor.pool_memory import HostBlocks
from apt_jax.executor.transfers.host_saver import PINNED, HostSaver, stages_in_pinned_memory
from apt_jax.frontend.builder import build_engine
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import Policy, make_policy
from apt_jax.utils.clock import WallClock
from apt_jax.utils.swap_space import blocks_of
from tests.support.cases import num_cases
from tests.support.fake_serving import OneKind
from tests.support.host_executor import make_host_executor
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy

BLOCK_BYTES = 2 * 4 * 64 * 4  # layers, positions, lanes, float32


@functools.cache
def executor() -> JaxExecutor:
    return make_host_executor(conversion=True)


def host():
    pool = executor().host
    assert pool is not None
    return pool


class Talks:
    """An engine over the one executor.

    Args:
        tier: with host memory.
    """

    def __init__(self, kind: str, *, tier: bool, policy: Policy | None = None, caching: bool = True) -> None:
        made = executor()
        made.reset()
        kinds = (
            CacheKindSpec(name="kv", blocks_per_group=2, offered=kind in ("kv", "hybrid")),
            CacheKindSpec(name="hidden", blocks_per_group=1, offered=kind in ("hidden", "hybrid")),
        )
        self.before = host().saved_bytes, host().loaded_bytes
        self.engine = Engine(
            made, policy or make_policy("fcfs"), WallClock(), kinds,
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
            dataclasses.replace(made.cache_config, enable_prefix_caching=caching, swap_space=0.0),
            costs=StepCosts(prefill_per_token_s=1e-3), tiers=Tiers(host=host() if tier else None), vocab_size=97, debug=True,
        )  # fmt: skip
        self.num = 0

    def serve(self, prompts: list[list[int]], max_tokens: int = 12) -> list[list[int]]:
        said: dict[str, list[int]] = {}
        for prompt in prompts:
            self.num += 1
            said[str(self.num)] = []
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            self.engine.add_request(EngineRequest(
                request_id=str(self.num), prompt=None, prompt_token_ids=np.array(prompt, np.int32), params=params,
                slo=SLO(), arrival_s=self.engine.clock.now_s(),
            ))  # fmt: skip
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.finish_reason in (None, "length"), output.error
                said[output.request_id] += output.new_token_ids
        stats = self.engine.stats()
        assert (stats.free_blocks, stats.compilations) == (stats.total_blocks, 0)
        return list(said.values())

    def moved(self) -> tuple[int, int]:
        """Bytes to host memory and back."""
        return host().saved_bytes - self.before[0], host().loaded_bytes - self.before[1]


def prompts(seed: int, num: int = 6) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 97, int(rng.integers(30, 70))).tolist() for _ in range(num)]


@functools.cache
def expected(seed: int) -> list[list[int]]:
    """Nothing is cached, and nobody waits."""
    talks = Talks("kv", tier=False, caching=False)
    said = [talks.serve([prompt])[0] for prompt in prompts(seed)]
    assert len({tuple(answer) for answer in said}) > 4  # the model says something
    return said


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize("kind", ["kv", "hidden", "hybrid"])
def test_tokens_do_not_depend_on_it(kind):
    for seed in range(num_cases(2, 10)):
        policy = RandomPolicy(seed, RandomPlanPolicy(preempt=0.15, skip=0.1, chunk=0.4, flip=0.3))
        talks = Talks(kind, tier=True, policy=policy)
        assert [talks.serve(prompts(seed)) for _ in range(2)] == [expected(seed)] * 2
        stats = talks.engine.stats()
        assert stats.num_preemptions > 3
        assert stats.host_hit_tokens > 0
        assert talks.moved() == (stats.saved_blocks * BLOCK_BYTES, stats.loaded_blocks * BLOCK_BYTES)
        assert min(talks.moved()) > 0
        assert stats.restores.keys() >= ({"kv", "hidden"} if kind == "hybrid" else {kind})


def test_keys_and_values_come_back_from_layer_inputs():
    talks = Talks("hybrid", tier=True, policy=OneKind(HIDDEN))
    asked = prompts(1)
    said = [talks.serve([prompt])[0] for prompt in asked]
    talks.engine.policy = OneKind(KV)
    said.append(talks.serve([asked[0]])[0])
    assert said == [*expected(1), expected(1)[0]]
    stats = talks.engine.stats()
    assert stats.restores == {"converted": 1}
    assert stats.loaded_blocks == (len(asked[0]) - 1) // 4  # its last position is computed


@pytest.mark.parametrize("kind", [KV, HIDDEN], ids=["kv", "hidden"])
def test_bytes_are_those_of_the_positions_that_are_overwritten(kind):
    """Keys and values of a position take twice what its layer input does."""
    talks = Talks(("kv", "hidden")[kind], tier=True)
    num = 2 if kind == KV else 4  # the pool holds one prompt and a half, or three
    asked = [np.random.default_rng(seed).integers(3, 97, 80).tolist() for seed in range(num)]
    for prompt in (*asked, asked[0]):
        talks.serve([prompt], 1)
    lane_bytes = 64 * 2 * 4  # of one key, value or layer input of a position, over all layers
    if kind == KV:  # half of the first prompt is overwritten by the second, and half of that by what comes back
        assert talks.moved() == (2 * (40 + 40) * lane_bytes, 2 * 40 * lane_bytes)
    else:  # all of the first prompt by the fourth, and all of the second by what comes back
        assert talks.moved() == ((80 + 80) * lane_bytes, 80 * lane_bytes)


def test_a_failed_transfer_is_computed_again(monkeypatch):
    talks = Talks("kv", tier=True)
    all_prompts = prompts(1)
    said = talks.serve(all_prompts)
    assert said == expected(1)
    pool = host()
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_sum", lambda block: (_ for _ in ()).throw(RuntimeError("planted")))
        assert talks.serve(prompts(2)) == expected(2)
        pool._saver.wait()
    assert talks.serve(all_prompts) == said
    assert talks.engine.stats().num_lost_groups > 0


def test_a_copy_that_has_changed_is_computed_again():
    talks = Talks("kv", tier=True)
    assert talks.serve(prompts(1)) == expected(1)
    assert talks.serve(prompts(2)) == expected(2)
    pool = host()
    pool._saver.wait()
    pool._memory.reshape(-1).view(np.uint8)[::100] ^= 1
    assert talks.serve(prompts(1)) == expected(1)
    stats = talks.engine.stats()
    assert stats.num_lost_groups > 0


def test_saves_through_pinned_memory_say_the_same(monkeypatch):
    """As on a GPU."""
    if all(memory.kind != PINNED for memory in jax.local_devices()[0].addressable_memories()):
        pytest.skip(f"no {PINNED} memory in this version of JAX on a CPU")
    assert not stages_in_pinned_memory(jax.local_devices()[0])
    monkeypatch.setattr(host()._saver, "pinned", True)
    kinds: set[str | None] = set()
    store = HostSaver._store

    def seen(array: jax.Array, *args: Any) -> None:
        kinds.add(array.sharding.memory_kind)
        store(array, *args)

    monkeypatch.setattr(HostSaver, "_store", staticmethod(seen))
    talks = Talks("hybrid", tier=True)
    for seed in (1, 2, 1):
        assert talks.serve(prompts(seed)) == expected(seed)
    assert kinds == {PINNED}
    stats = talks.engine.stats()
    assert stats.loaded_blocks > 0
    assert (stats.compilations, stats.num_lost_groups) == (0, 0)


def test_where_pinned_memory_is_short_saves_go_on_without(monkeypatch, caplog):
    monkeypatch.setattr(host()._saver, "pinned", True)

    def device_put(*_: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: planted")

    with monkeypatch.context() as patch:
        patch.setattr("apt_jax.executor.transfers.host_saver.jax", SimpleNamespace(device_put=device_put))
        talks = Talks("hybrid", tier=True)
        for seed in (1, 2, 1):
            assert talks.serve(prompts(seed)) == expected(seed)
    assert talks.engine.stats().loaded_blocks > 0
    assert caplog.text.count("copies no longer use pinned host memory: RESOURCE_EXHAUSTED: planted") == 1


def test_a_load_waits_for_the_save_of_its_block():
    pool, made = host(), executor()
    made.reset()
    held = threading.Event()
    pool._saver._thread.submit(held.wait)
    pairs = np.array([[3, 5], [4, 6]], np.int32)
    pool.announce(pairs)
    assert not pool.ready_to_load(np.array([5], np.int32)).any()  # announced, and not on its way
    pool.save(pairs)
    threading.Timer(0.05, held.set).start()
    assert pool.ready_to_load(pairs[:, 1]).all()
    assert held.is_set()


def test_a_block_that_is_announced_anew_holds_nothing_of_what_was_there():
    """Its next save fails; the one before was good and may end late."""
    pool, made = host(), executor()
    made.reset()
    held = threading.Event()
    pool._saver._thread.submit(held.wait)
    pairs = np.array([[3, 5]], np.int32)
    pool.announce(pairs)
    pool.save(pairs)
    pool.announce(pairs)
    held.set()
    pool._saver.wait()
    assert not pool.ready_to_load(pairs[:, 1]).any()


def test_more_blocks_than_a_program_takes_travel_there_and_back():
    pool, made = host(), executor()
    made.reset()
    rng = np.random.default_rng(0)
    contents = [rng.normal(size=made.runner.pools[0].shape).astype(np.float32) for _ in made.runner.pools]
    made.runner.pools = tuple(jax.device_put(layer, made.device) for layer in contents)
    ids = np.stack([rng.permutation(60)[:37] + 1, rng.permutation(pool.num_blocks)[:37] + 1], axis=1).astype(np.int32)
    pool.announce(ids)
    pool.save(ids)
    assert pool.ready_to_load(ids[:, 1]).all()
    made.reset()
    pool.load(ids[:, ::-1])
    for layer, pool_of_layer in zip(contents, made.runner.pools, strict=True):
        found = np.asarray(pool_of_layer)
        assert np.array_equal(found[ids[:, 0]], layer[ids[:, 0]])
        rest = np.setdiff1d(np.arange(61), ids[:, 0])
        assert not found[rest].any()
    block = int(ids[0, 1])
    assert zlib.crc32(pool._memory[block - 1].tobytes()) == pool._checksum[block]
    made.reset()


def test_too_little_is_refused():
    blocks = HostBlocks((2, 4, 64), np.float32)
    assert blocks_of(2 / 1024, blocks.block_bytes) == 2 * 2**20 // BLOCK_BYTES
    with pytest.raises(ConfigError, match=r"holds fewer than two blocks of 2,048 bytes.*--swap-space"):
        blocks_of(1e-6, blocks.block_bytes)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", r"^swap_space='x' must be a number \(--swap-space\)$"),
        (-1.0, r"^swap_space=-1.0 must lie in \[0, 1,048,576\] GiB \(--swap-space\)$"),
        (float("nan"), r"^swap_space=nan must lie in \[0, 1,048,576\] GiB"),
    ],
)
def test_no_size_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig(swap_space=value)


def test_settings_that_do_not_go_together_are_refused():
    with pytest.raises(
        ConfigError, match=r"^swap_space=1 keeps cached prefixes; leave out --no-enable-prefix-caching or"
    ):
        CacheConfig(swap_space=1.0, enable_prefix_caching=False)
    with pytest.raises(
        ConfigError, match=r"^swap_space=1 is host memory of one host; leave out --nnodes or --swap-space"
    ):
        EngineConfig(
            model="tiny-opt",
            cache=CacheConfig(swap_space=1.0),
            parallel=ParallelConfig(nnodes=2, tensor_parallel_size=2),
        )
    with pytest.raises(ConfigError, match=r"^swap_space=1e\+06 GiB is more than the \d+\.\d GiB of free host memory"):
        build_engine(EngineConfig(model="/nowhere", cache=CacheConfig(swap_space=1e6)))
