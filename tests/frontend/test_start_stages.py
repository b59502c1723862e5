"""Reports of a start: its stage, of how many, and how long the rest will take."""

import os
import subprocess
import sys
import threading
import time

import pytest

from apt_jax.config import EngineConfig
from apt_jax.cpu import build, compiler
from apt_jax.frontend import start_stages
from apt_jax.frontend.progress import ProgressBars
from apt_jax.frontend.start_stages import CALIBRATING, KERNELS, LAYOUT, LOADING, PREPARING, StartStages, keep, planned
from apt_jax.utils.activity import activity


class Time:
    def __init__(self, monkeypatch):
        self.now_s = 1000.0
        monkeypatch.setattr("apt_jax.frontend.start_stages.time.monotonic", lambda: self.now_s)

    def on(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    return Time(monkeypatch)


def current(stages):
    status = stages.status()
    assert status is not None
    return status


def left_s(stages):
    return current(stages).left_s


def test_the_first_stage_begins_at_once():
    """JAX is imported before anything is loaded, for seconds."""
    assert str(StartStages([LOADING, LAYOUT]).status()) == "stage 1 of 2, loading the model"
    assert StartStages([]).status() is None


def test_the_rest_is_what_the_stages_took_when_an_engine_was_last_started(clock):
    stages = StartStages([LOADING, LAYOUT, PREPARING], {LOADING: 10.0, LAYOUT: 2.0, PREPARING: 20.0})
    stages(LOADING, 0, 1)
    clock.on(4)
    assert str(stages.status()) == "stage 1 of 3, loading the model; about 28 s more"
    stages(LAYOUT, 0, 1)
    assert str(stages.status()) == "stage 2 of 3, laying out weights and cache; about 22 s more"
    clock.on(30)  # longer than ever: it will not end at once
    assert left_s(stages) == pytest.approx(7.5 + 20)
    assert stages.taken_s == {LOADING: 4.0}


def test_parts_that_are_done_tell_more_than_the_last_start(clock):
    stages = StartStages([PREPARING], {PREPARING: 20.0})
    stages(PREPARING, 0, 50)
    clock.on(8)
    assert left_s(stages) == pytest.approx(12)
    stages(PREPARING, 10, 50)  # too few to go by
    assert left_s(stages) == pytest.approx(12)
    stages(PREPARING, 20, 50)
    assert left_s(stages) == pytest.approx(12)
    clock.on(2)
    stages(PREPARING, 40, 50)
    assert left_s(stages) == pytest.approx(2.5)


def test_a_first_start_goes_by_the_programs_that_are_done(clock):
    stages = StartStages([LAYOUT, PREPARING])
    stages(PREPARING, 0, 40)
    clock.on(3)
    assert left_s(stages) is None
    stages(PREPARING, 1, 40)
    assert left_s(stages) == pytest.approx(3 * 39)
    clock.on(1)
    stages(PREPARING, 4, 40)
    assert left_s(stages) == pytest.approx(36)


def test_programs_that_are_loaded_end_the_estimate_of_a_start_that_compiled_them(clock):
    stages = StartStages([PREPARING], {PREPARING: 100.0})
    stages(PREPARING, 0, 50)
    clock.on(1)
    assert left_s(stages) == pytest.approx(99)
    stages(PREPARING, 5, 50)
    assert left_s(stages) == pytest.approx(9)


def test_where_a_stage_takes_longer_than_it_did_its_parts_tell(clock):
    stages = StartStages([PREPARING], {PREPARING: 4.0})
    stages(PREPARING, 0, 24)
    clock.on(8)
    assert left_s(stages) == pytest.approx(2)
    stages(PREPARING, 4, 24)
    assert left_s(stages) == pytest.approx(40)


@pytest.mark.parametrize(
    ("kernels_s", "expected"),
    [(100.0, 100.0 + 7), (5.0, 10.0 + 7), (None, 10.0 + 7)],
    ids=["kernels take longer", "kernels are ready before", "kernels are not known"],
)
def test_what_goes_on_beside_a_stage_counts_once(kernels_s, expected):
    names = [LOADING, KERNELS, LAYOUT, PREPARING]
    stages = StartStages(names, {LOADING: 10.0, LAYOUT: 3.0, PREPARING: 4.0}, {KERNELS: lambda: kernels_s})
    stages(LOADING, 0, 1)
    assert left_s(stages) == pytest.approx(expected, abs=0.5)
    assert current(stages).unknown == (kernels_s is None)


def test_a_first_start_says_what_it_knows_and_how_many_stages_it_does_not():
    stages = StartStages([LOADING, KERNELS, LAYOUT, PREPARING], {}, {KERNELS: lambda: 60.0})
    stages(LOADING, 0, 1)
    assert str(stages.status()) == "stage 1 of 4, loading the model; about 60 s more, and then 3 stages"
    stages(KERNELS, 0, 1)
    assert str(stages.status()) == "stage 2 of 4, compiling the CPU kernels; about 60 s more, and then 2 stages"
    stages(LAYOUT, 0, 1)
    assert str(stages.status()) == "stage 3 of 4, laying out weights and cache"
    assert current(stages).left_s is None


def test_a_stage_that_was_not_planned_is_counted():
    stages = StartStages([LOADING, PREPARING])
    for name in (LOADING, PREPARING, CALIBRATING):
        stages(name, 0, 1)
    status = current(stages)
    assert (status.number, status.total, status.stage) == (3, 3, "measuring step costs")


def test_lines_name_what_is_waited_for_and_not_what_goes_on_beside(clock, monkeypatch):
    monkeypatch.setattr("apt_jax.frontend.progress.time.monotonic", lambda: clock.now_s)
    said: list[str] = []
    stages = StartStages([LOADING, KERNELS, LAYOUT, PREPARING], {LAYOUT: 2.0}, {KERNELS: lambda: 30.0})
    bars = ProgressBars(say=said.append, stages=stages)

    def wait(seconds):
        clock.on(seconds)
        bars.tick()

    bars(LOADING, 0, 1)
    with activity("downloading org/model from the hub"):
        wait(5)
    bars(KERNELS, 0, 1)
    with activity("compiling the CPU kernels"):
        wait(60)
    bars(LAYOUT, 0, 1)
    wait(5)
    for done in range(3):
        bars(PREPARING, done, 4)
        wait(5)
    bars.close()
    assert said == [
        "stage 1 of 4, downloading org/model from the hub: 5 s; about 32 s more, and then 2 stages",
        "stage 2 of 4, compiling the CPU kernels: 60 s; about 32 s more, and then 1 stage",
        "stage 3 of 4, laying out weights and cache: 5 s; about 1 s more, and then 1 stage",
        "preparing 4 programs",
        "stage 4 of 4, preparing programs, 0 of 4: 5 s",
        "stage 4 of 4, preparing programs, 1 of 4: 10 s; about 30 s more",
        "stage 4 of 4, preparing programs, 2 of 4: 15 s; about 15 s more",
    ]


def test_the_next_start_knows_what_this_one_took(clock, monkeypatch, tmp_path):
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path))
    config, other = EngineConfig(model="a"), EngineConfig(model="b")
    stages = planned(config, calibration_s=10.0)
    stages(LOADING, 0, 1)
    assert current(stages).total == 4
    for name in (LAYOUT, PREPARING):
        clock.on(3)
        stages(name, 0, 1)
    clock.on(9)
    stages.end()
    keep(stages, config)
    for again, total, seconds in ((config, 3, 15.0), (other, 4, 25.0)):  # step costs of one are known
        stages = planned(again, calibration_s=10.0)
        stages(LOADING, 0, 1)
        assert left_s(stages) == seconds
        assert current(stages).total == total


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"loading": "x"}', b'{"loading": null}', b"\xff"])
def test_kept_times_that_cannot_be_read_are_none(content, monkeypatch, tmp_path):
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path))
    config = EngineConfig(model="a")
    keep(StartStages([]), config)
    (path,) = (tmp_path / "starts").iterdir()
    start_stages.write_verified(path, content)
    stages = planned(config, calibration_s=0.0)
    stages(LOADING, 0, 1)
    assert left_s(stages) is None


def test_a_cache_directory_that_cannot_be_written_ends_no_start(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path / "file"))
    keep(planned(EngineConfig(model="a"), calibration_s=10.0), EngineConfig(model="a"))


def test_the_kernels_are_a_stage_while_they_are_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    ready = threading.Event()

    def compile_slowly(command):
        ready.wait(60)
        raise build.KernelBuildError("enough")

    monkeypatch.setattr(build, "compile_library", compile_slowly)
    monkeypatch.setattr(build, "_begun", {})
    assert not build.is_compiling()
    build.begin()
    stages = planned(EngineConfig(model="a"), calibration_s=0.0)
    stages(LOADING, 0, 1)
    assert current(stages).total == 4
    ready.set()
    build.wait()
    assert not build.is_compiling()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system has no /proc")
def test_the_compiler_is_estimated_by_its_processor_time(monkeypatch, tmp_path):
    """Children count: `c++` starts another program."""
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path))
    code = "import time\nwhile time.process_time() < 0.8: pass\nprint('used', flush=True)\ninput()"
    driver = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    compilers = compiler._Compilers()
    assert compilers.left_s() is None
    compilers.begin()
    with subprocess.Popen([sys.executable, "-c", driver], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        compilers.add(process.pid)
        assert process.stdout is not None
        process.stdout.readline()
        (tmp_path / compiler._CPU_S_FILE).write_text("1000")
        started_s = compilers._started_s
        assert started_s is not None
        spent_s = time.monotonic() - started_s
        used_s = 1000 / (1 + (compilers.left_s() or 0) / spent_s)
        assert 0.7 < used_s < 8  # and the start of two interpreters
        (tmp_path / compiler._CPU_S_FILE).write_text("damaged")
        assert compiler._needed_cpu_s() == 30
        process.communicate(b"\n")
    compilers.end()
    assert compilers.left_s() is None
