"""The script for GPU runs goes through on a CPU: every stage, and a stage that dies in its own process."""

import csv
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.gpu.run")
from apt_jax.ops.shapes import SMALL
from benchmarks.gpu import full_model, harness, problems, run
from tests.support.cases import cover

ROOT = Path(__file__).parents[3]


def start(out: Path, *flags: str) -> str:
    """Run the script in a separate process, as it is used; return its output."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--out", str(out), *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def failures(out: Path) -> list[str]:
    found = [row for path in out.glob("*.csv") for row in rows_of(path) if "status" in row]
    return [f"{row['case']}: {row['status']}" for row in found if row["status"] not in ("ok", "not installed")]


@pytest.mark.in_turn(1, group="stages of the GPU script")
def test_kernel_stages(tmp_path: Path) -> None:
    printed = start(tmp_path, "--tiny", "--stages", "start,bandwidth,correctness,kernels,peers,tune")
    assert failures(tmp_path) == []
    assert {row["op"] for row in rows_of(tmp_path / "correctness.csv")} == {"decode_kv", "decode_absorbed", "prefill"}
    assert all(float(row["us"]) > 0 for row in rows_of(tmp_path / "kernels.csv"))
    assert [row["case"] for row in rows_of(tmp_path / "start.csv")] == ["tiny-opt first", "tiny-opt second"]
    facts = json.loads(printed.splitlines()[-1])
    assert set(facts["seconds"]) == {"start", "bandwidth", "correctness", "kernels", "peers", "tune"}
    for found in json.loads((tmp_path / "tiles.json").read_text()):
        assert {"tokens", "lanes", "warps", "stages"} <= set(found["tile"])


@pytest.mark.in_turn(1, group="stages of the GPU script")
@pytest.mark.parametrize("num_buckets", cover([1, 2], [1]))
def test_whole_model_stages(num_buckets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from apt_jax.sim.hardware import load_hardware

    described = tmp_path / "hardware.json"
    size = full_model._size(tiny=True)
    size = dataclasses.replace(size, decode_buckets=size.decode_buckets[-num_buckets:])
    monkeypatch.setattr(full_model, "_size", lambda tiny: size)
    flags = ("--out", str(tmp_path), "--tiny", "--stages", "step,serve", "--describe", str(described))
    assert run.main(flags) == 0
    assert failures(tmp_path) == []
    attentions = {row["attention"] for row in rows_of(tmp_path / "step.csv")}
    assert attentions == {"kv", "absorb", "reproject"}
    served = [row for row in rows_of(tmp_path / "serve.csv") if row["side"] == "served"]
    assert [(row["policy"], row["cache"]) for row in served] == [("fcfs", "kv"), ("apt", "kv"), ("apt", "hybrid")]
    assert all(row["completed"] == "8" and row["compilations"] == "0" for row in served)
    assert len(rows_of(tmp_path / "predictions.csv")) > 8
    assert load_hardware("tiny-opt", str(described)).programs is not None


CHILD = """
import os, sys
from benchmarks.gpu import harness, run
def stage(stage, args):
    table = stage.table(["value"])
    def work(case):
        if case == "dies":
            os._exit(3)
        if case == "loses":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
        return {"value": 1.5}
    for case in ("first", "loses", "dies", "last"):
        if stage.wanted(table, case):
            stage.run(table, case, lambda: work(case))
    return ["done"]
run.run_stage = stage
sys.exit(run.main())
"""


def test_a_stage_outlives_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost device and a dying process cost the cases that they happen in."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    popen = subprocess.Popen

    def patched(command: list[str], **more: object) -> subprocess.Popen[bytes]:
        if "benchmarks.gpu.run" not in command:
            return popen(command, **more)  # pyright: ignore
        at = command.index("benchmarks.gpu.run")
        return popen([command[0], str(script), *command[at + 1 :]], **more)  # pyright: ignore

    monkeypatch.setattr(subprocess, "Popen", patched)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    out = tmp_path / "out"
    assert run.main(["--out", str(out), "--stages", "tune"]) == 0
    status = {row["case"]: row["status"] for row in rows_of(out / "tune.csv")}
    assert set(status) == {"first", "loses", "dies", "last"}
    assert status["first"] == status["last"] == "ok"
    assert status["loses"].startswith("RuntimeError")
    assert status["dies"] == "ended the process: 3"
    assert sorted(p.name for p in out.iterdir()) == ["facts.json", "tune.csv"]


def test_unknown_stages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run.parse(["--out", str(tmp_path), "--stages", "kernel"])


def test_no_case_is_started_without_time(tmp_path: Path) -> None:
    stage = harness.Stage(name="tune", out=tmp_path, budget_s=0.0, tiny=True)
    table = stage.table(["us"])
    assert not stage.wanted(table, "a")
    assert stage.num_skipped == 1


def test_work_of_a_kernel() -> None:
    shape = SMALL["three-heads"]  # 3 heads of 16, width 48
    kv = problems.work_of("decode_kv", shape, [10, 20], 2)
    assert kv.num_bytes == 2 * 48 * 2 * 30 + 2 * 48 * (2 + 4)
    assert kv.flop == 4 * 48 * 30
    absorbed = problems.work_of("decode_absorbed", shape, [10, 20], 2)
    assert absorbed.moved_bytes - absorbed.num_bytes == 48 * 2 * 30
    assert absorbed.flop == 4 * 3 * 48 * 30


def test_floors_need_rates() -> None:
    assert harness.floor_s(10.0, 10.0, {"bytes_s": 0.0, "flop_s": 0.0}) == 0.0
    assert harness.floor_s(10.0, 40.0, {"bytes_s": 10.0, "flop_s": 10.0}) == 4.0
