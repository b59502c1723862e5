"""Cached prefixes on disk over the real executor: greedy tokens do not depend on them, before and after a restart."""

import dataclasses
import functools
import os
import stat
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from apt_jax.config import SLO, CacheConfig, SchedulerConfig
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.core.tiers import Tiers
from apt_jax.costs.model import StepCosts
from apt_jax.engine import Engine
from apt_jax.errors import ConfigError
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.executor.transfers.disk_store import FileStore
from apt_jax.executor.transfers.model_identity import model_identity
from apt_jax.executor.transfers.prefix_files import PrefixFiles
from apt_jax.frontend.builder import open_disk_store
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import make_policy
from apt_jax.utils.clock import WallClock
from tests.support.host_executor import make_host_executor
from tests.support.parallel_cases import MODELS, distinct_params

BLOCK_BYTES = 2 * 4 * 64 * 4  # layers, positions, lanes, float32


@functools.cache
def executor() -> JaxExecutor:
    return make_host_executor()


@functools.cache
def identity() -> bytes:
    return model_identity(executor())


def store(directory: Path, of: bytes | None = None) -> FileStore:
    host = executor().host
    assert host is not None
    return FileStore(PrefixFiles(directory, of or identity(), host.block_bytes, (2, 1), 10**7), host)


class Server:
    """An engine over the one executor, from its start to an orderly end.

    Args:
        directory: of cached prefixes; None: nothing is cached.
    """

    def __init__(self, kind: str, directory: Path | None, of: bytes | None = None) -> None:
        made = executor()
        made.reset()
        kinds = (
            CacheKindSpec(name="kv", blocks_per_group=2, offered=kind == "kv"),
            CacheKindSpec(name="hidden", blocks_per_group=1, offered=kind == "hidden"),
        )
        cached = directory is not None
        self.store = None if directory is None else store(directory, of)
        self.engine = Engine(
            made, make_policy("fcfs"), WallClock(), kinds, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
            dataclasses.replace(made.cache_config, enable_prefix_caching=cached, swap_space=0.0),
            costs=StepCosts(prefill_per_token_s=10.0), tiers=Tiers(host=made.host if cached else None, disk=self.store),
            vocab_size=97, debug=True,
        )  # fmt: skip
        self.num = 0

    def serve(self, prompts: list[list[int]], max_tokens: int = 12, tenant: str | None = None) -> list[list[int]]:
        said: dict[str, list[int]] = {}
        for prompt in prompts:
            self.num += 1
            said[str(self.num)] = []
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            self.engine.add_request(EngineRequest(
                request_id=str(self.num), prompt=None, prompt_token_ids=np.array(prompt, np.int32), params=params,
                slo=SLO(), arrival_s=self.engine.clock.now_s(), tenant=tenant,
            ))  # fmt: skip
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.finish_reason in (None, "length"), output.error
                said[output.request_id] += output.new_token_ids
        stats = self.engine.stats()
        assert (stats.free_blocks, stats.compilations) == (stats.total_blocks, 0)
        return list(said.values())

    def end(self) -> None:
        self.engine.close()
        self.engine.check_integrity()


def prompts(seed: int = 0, num: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 97, int(rng.integers(30, 70))).tolist() for _ in range(num)]


@functools.cache
def expected() -> list[list[int]]:
    """Nothing is cached."""
    said = Server("kv", None).serve(prompts())
    assert len({tuple(answer) for answer in said}) > 3  # the model says something
    return said


def served_before(directory: Path, kind: str = "kv") -> Server:
    """A server that has served and ended."""
    wanted = expected()  # on the same device: first
    server = Server(kind, directory)
    assert server.serve(prompts()) == wanted
    server.end()
    return server


def stored(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*/*") if path.is_file())


@pytest.mark.in_turn(10, group="executors with models")
@pytest.mark.parametrize("kind", ["kv", "hidden"])
def test_tokens_are_the_same_after_a_restart(tmp_path, kind):
    home = tmp_path / "prefixes"
    before = served_before(home, kind).engine.stats()
    groups = sum((len(prompt) + 11) // 4 for prompt in prompts())
    per_group = BLOCK_BYTES * (2 if kind == "kv" else 1)
    # Of outputs, too: all but the last token has been computed with. The pool may need one before it is registered.
    assert groups - 2 <= len(stored(home)) <= groups
    assert (before.disk_hit_tokens, before.num_unwritten_groups) == (0, 0)
    assert before.disk_written_bytes == before.disk_bytes == sum(path.stat().st_size for path in stored(home))
    assert before.disk_written_bytes > groups * per_group

    after = Server(kind, home)
    assert after.serve(prompts()) == expected()
    stats = after.engine.stats()
    # One that is preempted finds what it said before.
    assert stats.disk_hit_tokens >= sum(len(prompt) // 4 * 4 for prompt in prompts())
    assert stats.disk_read_bytes == stats.disk_hit_tokens // 4 * per_group
    assert stats.prefix_cache_hits >= stats.prefix_cache_queries - 4 * len(prompts())
    after.end()
    assert groups - 2 <= len(stored(home)) <= groups
    assert after.engine.stats().disk_written_bytes < 3 * 2200  # nothing is written twice


def test_modes_of_directory_and_files(tmp_path):
    home = tmp_path / "prefixes"
    old = os.umask(0)
    try:
        served_before(home)
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in home.rglob("*") if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (home, *home.rglob("*")) if path.is_dir()} == {0o700}


def test_damaged_files_are_computed_again(tmp_path, caplog):
    """One bit in each third file, the header of others; then all are cut."""
    served_before(tmp_path / "a")
    for number, path in enumerate(stored(tmp_path / "a")):
        content = bytearray(path.read_bytes())
        content[-1 - 97 * number % (2 * BLOCK_BYTES) if number % 3 else 30] ^= 4
        path.write_bytes(content)
    again = Server("kv", tmp_path / "a")
    assert again.serve(prompts()) == expected()
    stats = again.engine.stats()
    assert (stats.disk_hit_tokens, stats.num_dropped_files) == (0, len(prompts()))  # nothing is behind the first one
    assert len([r for r in caplog.records if "it will be computed again" in r.getMessage()]) == len(prompts())
    again.end()
    for path in stored(tmp_path / "a"):
        os.truncate(path, path.stat().st_size - 7)
    assert Server("kv", tmp_path / "a").serve(prompts()) == expected()


def test_other_weights_find_nothing(tmp_path):
    served_before(tmp_path / "a")
    other = Server("kv", tmp_path / "a", bytes(32))
    assert other.serve(prompts()) == expected()
    assert other.engine.stats().disk_hit_tokens == 0
    assert other.engine.stats().num_dropped_files == 0


def test_a_tenant_finds_nothing_of_another(tmp_path):
    wanted = expected()
    first = Server("kv", tmp_path / "a")
    first.serve(prompts(), tenant="one")
    first.end()
    second = Server("kv", tmp_path / "a")
    assert second.serve(prompts(), tenant="another") == wanted
    assert second.engine.stats().disk_hit_tokens == 0
    assert second.serve(prompts(), tenant="one") == wanted
    assert second.engine.stats().disk_hit_tokens > 0


class TestIdentity:
    def other(self, **changes: Any) -> bytes:
        config = dataclasses.replace(MODELS["opt"], **changes.pop("config", {}))
        params = distinct_params(config)
        if changes.pop("one_weight", False):
            params = dataclasses.replace(params, embed=params.embed.at[3, 5].add(1e-6))
        if dtype := changes.pop("dtype", None):
            params = jax.tree.map(lambda a: a.astype(dtype), params)
        cache = {"block_size": 4, "num_blocks_override": 60, "swap_space": 2 / 1024} | changes.pop("cache", {})
        limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 96}
        return model_identity(JaxExecutor(params, config, cache=CacheConfig(**cache), **limits | changes))

    def test_it_is_the_same_for_the_same(self):
        assert self.other() == identity()
        assert self.other(cache={"num_blocks_override": 80, "swap_space": 3 / 1024}, max_num_seqs=2) == identity()

    @pytest.mark.parametrize(
        "changes",
        [
            {"one_weight": True},
            {"dtype": "bfloat16"},
            {"cache": {"block_size": 8}},
            {"config": {"norm_eps": 1e-6}},
            {"both_ends": True},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_anything_that_changes_what_is_cached_changes_it(self, changes):
        assert self.other(**changes) != identity()

    def test_neither_version_nor_format_of_another(self, monkeypatch):
        for name in ("__version__", "FORMAT"):
            with monkeypatch.context() as patch:
                patch.setattr(f"apt_jax.executor.transfers.model_identity.{name}", "0.0.1")
                assert model_identity(executor()) != identity()


class TestADiskThatFails:
    @pytest.mark.parametrize("method", ["write", "read", "touch"])
    def test_serving_goes_on_and_one_line_is_logged(self, tmp_path, monkeypatch, caplog, method):
        served_before(tmp_path / "a")

        def full(*_args) -> None:
            raise OSError(28, "No space left on device")

        server = Server("kv", tmp_path / "a")
        monkeypatch.setattr(PrefixFiles, method, full)
        assert server.serve(prompts()) == expected()
        assert server.serve(prompts(1)) == server.serve(prompts(1))
        server.end()
        said = [r.getMessage() for r in caplog.records if "No space left on device" in r.getMessage()]
        assert len(said) == 1
        assert said[0].endswith(
            "cached prefixes are not stored there for now; serving continues (No space left on device)"
        )

    def test_it_is_tried_again_after_a_minute(self, tmp_path, monkeypatch):
        host = executor().host
        assert host is not None
        now_s = [0.0]
        files = PrefixFiles(tmp_path / "a", identity(), host.block_bytes, (2, 1), 10**7)
        disk = FileStore(files, host, clock=lambda: now_s[0])
        pairs = np.array([[3, 5], [4, 6]], np.int32)
        host.save_now(pairs)
        fails = [True]
        write = files.write

        def failing(*args):
            if fails[0]:
                raise OSError(5, "Input/output error")
            return write(*args)

        monkeypatch.setattr(files, "write", failing)
        for after_s, is_there in ((0.0, False), (59.0, False), (61.0, True)):
            now_s[0] = after_s
            disk.write(0, b"d" * 16, 1, (5, 6), is_downward=False)
            assert disk.flush(10.0)
            assert disk.has(0, b"d" * 16) == is_there
            fails[0] = False
        assert disk.counts().num_unwritten == 2
        disk.close()

    def test_a_disk_that_hangs_stops_nothing(self, tmp_path, monkeypatch):
        served_before(tmp_path / "a")
        held = threading.Event()
        read = PrefixFiles.read
        monkeypatch.setattr("apt_jax.engine.disk_reads._STALLED_S", 0.05)
        monkeypatch.setattr(PrefixFiles, "read", lambda *args: held.wait(20) and read(*args))
        server = Server("kv", tmp_path / "a")
        assert server.serve(prompts()) == expected()
        assert server.engine.stats().disk_hit_tokens == 0
        held.set()
        server.end()


def _wait_for(event: threading.Event) -> None:
    event.wait(20)


def test_more_than_the_writer_can_take_is_not_written(tmp_path, monkeypatch):
    host = executor().host
    assert host is not None
    disk = store(tmp_path / "a")
    monkeypatch.setattr("apt_jax.executor.transfers.disk_store._MOST_BYTES", 4 * BLOCK_BYTES)
    host.save_now(np.array([[3, 5], [4, 6]], np.int32))
    held = threading.Event()
    host._saver.run(functools.partial(_wait_for, held), "a test")
    for number in range(5):
        disk.write(0, bytes([number]) * 16, 1, (5, 6), is_downward=False)
    assert not disk.flush(0.01)
    held.set()
    assert disk.flush(10.0)
    assert disk.counts().num_unwritten == 3
    assert [disk.has(0, bytes([number]) * 16) for number in range(5)] == [True, True, False, False, False]
    disk.close()


def test_a_block_that_is_given_away_is_written_as_it_was(tmp_path):
    """The next save to it has been announced before it was copied for the file."""
    host = executor().host
    assert host is not None
    executor().reset()
    disk = store(tmp_path / "a")
    host.save_now(np.array([[3, 5], [4, 6]], np.int32))
    disk.write(0, b"a" * 16, 1, (5, 6), is_downward=False)
    made = executor()
    made.runner.pools = tuple(layer.at[7].set(1.0) for layer in made.runner.pools)
    host.save_now(np.array([[7, 5]], np.int32))
    assert disk.flush(10.0)
    found = disk._files.read(0, b"a" * 16, 1)
    assert found is not None
    assert not found.blocks.any()
    disk.write(0, b"b" * 16, 1, (5, 6), is_downward=True)
    assert disk.flush(10.0)
    found = disk._files.read(0, b"b" * 16, 1)
    assert found is not None
    assert found.is_downward
    assert found.blocks[0].any()
    disk.close()
    made.reset()


def test_settings_that_do_not_go_together_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^prefix_cache_dir=/x is read and written through host memory; set --swap"):
        CacheConfig(prefix_cache_dir="/x")
    with pytest.raises(ConfigError, match=r"^prefix_cache_dir must not be empty"):
        CacheConfig(prefix_cache_dir="", swap_space=1.0)
    with pytest.raises(ConfigError, match=r"prefix_cache_size=0 must lie in \(0, "):
        CacheConfig(prefix_cache_dir="/x", swap_space=1.0, prefix_cache_size=0)
    (tmp_path / "file").write_text("")
    cache = dataclasses.replace(executor().cache_config, prefix_cache_dir=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"/file: cannot be used for cached prefixes"):
        open_disk_store(cache, executor())
    assert open_disk_store(executor().cache_config, executor()) is None
