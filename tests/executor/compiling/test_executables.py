import concurrent.futures
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.cpu import build
from apt_jax.executor.compiling import executables
from apt_jax.executor.compiling.executables import ExecutableStore, described, process_facts
from apt_jax.executor.programs.runner import ProgramCall
from apt_jax.utils import compile_cache
from tests.support.caches import calibrations_apart
from tests.support.kept_executables import greedy_programs, greedy_tokens, make_executor, programs_are_kept, start

REPOSITORY = Path(__file__).parents[3]
X = np.arange(5, dtype=np.float32)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where compiled programs are kept, empty."""
    monkeypatch.setenv("APT_JAX_CACHE_DIR", calibrations_apart(tmp_path / "cache"))
    with programs_are_kept():
        yield tmp_path / "cache" / "compiled"


class Counter:
    """Asks a new store, as a later start does, for a small program."""

    def __init__(self) -> None:
        self.lowered = 0

    def run(self, *facts: str) -> None:
        store = ExecutableStore.find(jax.devices()[:1], facts)
        assert store is not None

        def lower() -> Any:
            self.lowered += 1
            return jax.jit(lambda x: jnp.sin(x) * 3).lower(X)

        np.testing.assert_allclose(store.executable(("small",), lower)(X), np.sin(X) * 3, rtol=1e-6)


def entry(directory: Path) -> Path:
    (path,) = directory.glob("*.executable")
    return path


def begin_process() -> subprocess.Popen[str]:
    """A start in a process of its own."""
    chosen = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    env = {name: value for name, value in os.environ.items() if name not in chosen}
    command = [sys.executable, "-m", "tests.support.kept_executables"]
    return subprocess.Popen(
        command, env=env | {"PYTHONPATH": str(REPOSITORY)}, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    text, _ = process.communicate(timeout=300)
    return json.loads(text.splitlines()[-1])


# --- starts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16", "int8"])
def test_a_later_start_traces_and_lowers_nothing_and_has_the_same_tokens(directory, monkeypatch, weights):
    first = start(weights=weights)
    assert first["loaded"] == 0
    assert first["traced"] > 0
    monkeypatch.setattr(ProgramCall, "lower", None)
    later = start(weights=weights)
    assert later == first | {"loaded": first["programs"], "traced": 0}
    assert later["compilations"] == 0


@pytest.mark.in_turn(10, group="executors with models")
def test_in_other_processes_and_over_several_devices_too(directory):
    first, later = (result_of(begin_process()) for _ in range(2))
    for size in ("1", "2"):
        assert first[size]["loaded"] == 0
        assert later[size] == first[size] | {"loaded": first[size]["programs"], "traced": 0}
    assert first["1"]["tokens"] == first["2"]["tokens"]


@pytest.mark.slow
def test_processes_that_start_together_keep_whole_entries(directory):
    together = [begin_process() for _ in range(2)]
    first, second = map(result_of, together)
    later = result_of(begin_process())
    for size in ("1", "2"):
        assert first[size]["tokens"] == second[size]["tokens"] == later[size]["tokens"]
        assert later[size]["loaded"] == later[size]["programs"]


@pytest.mark.skipif(
    build.has_tiles() if build.load() is None else True, reason="matrix tiles take parts one after another"
)
def test_a_loaded_program_writes_the_pool_in_place(directory):
    for _ in range(2):
        executor = make_executor()
        for program in greedy_programs(executor):
            program.run()
        pools = executor.runner.pools
        places = [pool.unsafe_buffer_pointer() for pool in pools]
        greedy_tokens(executor)
        assert all(pool.is_deleted() for pool in pools)
        assert [pool.unsafe_buffer_pointer() for pool in executor.runner.pools] == places
    assert executor.programs.store is not None
    assert executor.programs.store.num_loaded


def test_one_that_does_not_run_is_compiled_again_with_all_others(directory, monkeypatch, caplog):
    expected = start()

    def damaged(*args: Any) -> Any:
        compiled = load(*args)

        def run(*arguments: Any) -> Any:
            if len(calls) == 1:
                raise jax.errors.JaxRuntimeError("NOT_FOUND: Function fusion\nnot found")
            calls.append(1)
            return compiled(*arguments)

        return run

    calls: list[int] = []
    load = executables._unpickle
    monkeypatch.setattr(executables, "_unpickle", damaged)
    executor = make_executor()
    programs = greedy_programs(executor)
    executor._warm_up(programs, None)
    assert (
        caplog.text.count("a loaded program did not run; compiling all programs (NOT_FOUND: Function fusion not found)")
        == 1
    )
    assert greedy_tokens(executor) == expected["tokens"]
    assert executor.compilations == 0
    monkeypatch.setattr(executables, "_unpickle", load)
    assert start()["loaded"] == expected["programs"]


def test_nothing_is_kept_where_it_is_not_wanted_or_programs_are_kept_elsewhere(directory, tmp_path):
    assert make_executor(load_executables=False).programs.store is None
    for name, value in (("jax_compilation_cache_dir", str(tmp_path)), ("jax_enable_compilation_cache", False)):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        try:
            assert make_executor().programs.store is None
        finally:
            jax.config.update(name, before)


def test_a_version_of_jax_without_these_classes_lowers_programs(directory, monkeypatch, caplog):
    from jax.experimental import serialize_executable

    executables._pickling.cache_clear()
    monkeypatch.delattr(serialize_executable, "_JaxPjrtPickler")
    assert make_executor().programs.store is None
    assert "each start lowers all programs" in caplog.text


class Call:
    """Pickled as the call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def _pickle_of(module: str, name: str) -> bytes:
    """A pickle that calls what it names, with one string."""
    words = b"".join(bytes([0x8C, len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + words + b"\x93\x8c\x04fileR."


@pytest.mark.parametrize(
    "made",
    [
        pickle.dumps(Call(os.system, "true")),
        pickle.dumps(Call(np.load, "file")),
        pickle.dumps(Call(eval, "1")),
        pickle.dumps(Call(print, "")),
        _pickle_of("numpy", "memmap"),
        _pickle_of("ml_dtypes", "finfo"),
        _pickle_of("apt_jax.cpu.compiler", "subprocess.Popen"),
        _pickle_of("apt_jax.models.loading.resolve", "Path"),
        _pickle_of("apt_jax.utils.cache_dir", "read_private"),
        _pickle_of("jax._src.mesh", "Mesh.mro"),
    ],
    ids=range(10),
)
def test_an_entry_names_only_what_describes_arguments(directory, made, caplog):
    counter = Counter()
    counter.run()
    executables.cache_dir.write_verified(entry(directory), made)
    counter.run()
    assert counter.lowered == 2
    assert "cannot be loaded, compiling it again (LookupError: it names" in caplog.text


# --- entries ----------------------------------------------------------------------------------------------------------


def test_a_program_is_lowered_again_where_anything_that_it_depends_on_has_changed(directory, monkeypatch, tmp_path):
    counter = Counter()
    counter.run("a fact")
    counter.run("a fact")
    assert counter.lowered == 1

    def source(content: str) -> None:
        (tmp_path / "package").mkdir(exist_ok=True)
        (tmp_path / "package" / "programs.py").write_text(content)
        monkeypatch.setattr(executables, "_PACKAGE", tmp_path / "package")  # and at the end of the test as it was
        executables.source_digest.cache_clear()

    changes = {
        "facts": lambda patch: counter.run("another"),
        "flags": lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false"),
        "instructions": lambda patch: patch.setattr(executables.compiler, "describe_cpu", lambda: "flags: sse2"),
        "version": lambda patch: patch.setattr(jax, "__version__", "0.99.0"),
        "packages": lambda patch: patch.setattr(sys, "path", [*sys.path, str(packages)]),
        "options": lambda patch: patch.setattr(
            type(jax.config), "values", {**jax.config.values, "jax_enable_x64": True}
        ),
        "sources": lambda patch: source("x = 1"),
        "a source": lambda patch: source("x = 2"),
    }
    packages = tmp_path / "site-packages"
    (packages / "jaxlib-0.99.0.dist-info").mkdir(parents=True)
    try:
        for number, (name, change) in enumerate(changes.items(), 2):
            with monkeypatch.context() as patch:
                change(patch)
                if name != "facts":
                    counter.run("a fact")
            assert counter.lowered == number, name
    finally:
        executables.source_digest.cache_clear()


def test_what_no_program_depends_on_changes_nothing(monkeypatch):
    facts = process_facts()
    monkeypatch.setenv("APT_JAX_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("HOME", "/home/other")
    assert process_facts() == facts


def test_arguments_are_described_by_structure_shape_dtype_and_sharding():
    x = jnp.zeros((2, 3))
    descriptions = [
        described(tree) for tree in (x, [x], x[0], x.astype(jnp.bfloat16), np.zeros((2, 3), np.float32), None)
    ]
    assert len({*descriptions}) == len(descriptions)
    assert described(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)) == described(x)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])


def _no_pickle(path: Path) -> None:
    executables.cache_dir.write_verified(path, b"not a pickle")


def _no_program(path: Path) -> None:
    for program in path.parent.glob("*.program"):
        program.unlink()


def _foreign(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root gives files away")
    os.chown(path, 12345, -1)


def _open_directory(path: Path) -> None:
    path.parent.chmod(0o777)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (_cut, "damaged; removed, and made again"),
        (_flip, "damaged; removed, and made again"),
        (_no_pickle, "cannot be loaded, compiling it again (UnpicklingError"),
        (_no_program, "its executable is missing"),
        (lambda path: path.chmod(0o622), "writeable by nobody else"),
        (_foreign, "it must be a file of this user"),
        (_open_directory, "writeable by nobody else"),
    ],
)  # fmt: skip
def test_what_is_damaged_or_others_may_have_written_is_not_loaded(directory, damage, line, caplog):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    counter = Counter()
    counter.run()
    damage(entry(directory))
    counter.run()
    assert counter.lowered == 2
    assert line in caplog.text
    assert len(caplog.records) == (2 if damage is _open_directory else 1)  # the program is not used, either
    directory.chmod(0o700)
    counter.run()
    assert counter.lowered == 2


def test_one_line_says_what_may_be_wrong_with_all(directory, caplog):
    store = ExecutableStore.find(jax.devices()[:1], ())
    assert store is not None
    for name in ("one", "two"):
        jitted = jax.jit(lambda x: x + 1)
        store.executable((name,), lambda jitted=jitted: jitted.lower(X))
    for path in directory.glob("*.executable"):
        _no_pickle(path)
    store = ExecutableStore.find(jax.devices()[:1], ())
    assert store is not None
    for name in ("one", "two"):
        store.executable((name,), lambda: jax.jit(lambda x: x + 1).lower(X))
    assert caplog.text.count("cannot be loaded") == 1


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_entries_name_programs_of_the_compile_cache_or_hold_them_where_that_has_none(directory, seconds):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    counter = Counter()
    counter.run()
    assert len([*directory.glob("*.program")]) == (seconds == 0.0)
    counter.run()
    assert counter.lowered == 1


def test_a_program_that_the_compile_cache_has_is_not_serialised_again(directory):
    """One that was deserialised cannot be: its functions have lost their names."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    counter = Counter()
    counter.run()
    entry(directory).unlink()
    jax.clear_caches()
    counter.run()
    counter.run()
    assert counter.lowered == 2


def test_threads_that_ask_together_have_one_entry(directory):
    store = ExecutableStore.find(jax.devices()[:1], ())
    assert store is not None
    barrier = threading.Barrier(4)

    def ask(_: int) -> Any:
        barrier.wait()
        return np.asarray(store.executable(("small",), lambda: jax.jit(lambda x: x * 2).lower(X))(X))

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for found in threads.map(ask, range(4)):
            np.testing.assert_array_equal(found, X * 2)
    entry(directory)


def test_a_full_disk_is_no_reason_not_to_start(directory, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(executables.cache_dir, "write_verified", full)
    counter = Counter()
    counter.run()
    counter.run()
    assert counter.lowered == 2
    assert [*directory.glob("*.executable")] == []


def test_the_compile_cache_keeps_what_was_used_last(directory, monkeypatch):
    for age, name in enumerate(("new", "old", "read")):
        (directory / f"{name}.program").write_bytes(bytes(1000))
        os.utime(directory / f"{name}.program", (0, 1_000_000 - 1000 * age))
    compile_cache.cache_dir.write_verified(directory / "read.program", b"x" * 900)
    os.utime(directory / "read.program", (0, 0))
    kept = compile_cache.kept_programs()
    assert kept is not None
    assert kept.get("read") is not None
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 2000)
    compile_cache.keep_programs(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["new.program", "read.program"]


def test_programs_that_tracing_compiles_are_not_taken_for_the_program(directory):
    """JAX asks its cache for them, and perhaps not for the program itself."""

    def program(x):
        return jnp.sin(x) * 3

    x = jnp.arange(300_000.0)
    jitted = jax.jit(program)
    jitted.lower(x).compile()  # JAX has it in this process

    def lower():
        jax.jit(jnp.cos).lower(x).compile()
        return jitted.lower(x)

    for _ in range(2):
        store = executables.ExecutableStore.find(jax.devices()[:1], ["a case"])
        assert store is not None
        np.testing.assert_allclose(store.executable(["a program"], lower)(x), np.sin(x) * 3, rtol=1e-5, atol=1e-5)


def test_directories_that_cannot_be_listed_are_passed_over(monkeypatch, tmp_path):
    def listdir(path):
        raise PermissionError(13, "denied", path)

    facts = process_facts()
    monkeypatch.setattr(executables.os, "listdir", listdir)
    assert process_facts() != facts
