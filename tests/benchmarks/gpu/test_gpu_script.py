"""The script for GPU runs goes through on a CPU: every stage has rows, whatever ends it leaves them, and a stage outlives
its process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("benchmarks.gpu.run")
from apt_jax.backends import attention_ops
from benchmarks.gpu import absorbed_designs, harness, kernels, problems, report, run, tuning
from benchmarks.gpu.shapes import SMALL

ROOT = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}
FILES = {"rows.jsonl", "facts.json", "log.txt", "hardware.json", "predictions.csv", "tiles.json", "autotune.json"}


def command(out: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.run", "--out", str(out), "--work", f"{out}-work", *flags]


def start(out: Path, *flags: str) -> str:
    """Run the script in a separate process, as it is used; return its output."""
    done = subprocess.run(
        command(out, *flags), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def rows_of(out: Path, stage: str | None = None) -> list[dict[str, Any]]:
    return harness.read_rows(out / harness.ROWS, stage)


def failures(out: Path) -> list[str]:
    bad = [row for row in rows_of(out) if row["status"] != "ok" and not row["status"].startswith("skipped: ")]
    return [f"{row['stage']} {row['case']}: {row['status']}" for row in bad]


def processes_of(out: Path) -> list[int]:
    """Processes with the folder among their arguments or in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(out).encode() in text and state != "Z":
            found.append(int(path.name))
    return found


@pytest.mark.slow  # minutes of compilation
def test_kernel_stages(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stages = ["bandwidth", "correctness", "kernels", "peers", "tune", "autotune", "sanitizer"]
    printed = start(out, "--tiny", "--stages", ",".join(stages))
    assert failures(out) == []
    assert {row["stage"] for row in rows_of(out)} == set(stages)
    assert {row["op"] for row in rows_of(out, "correctness")} == {"decode_kv", "decode_absorbed", "prefill"}
    timed = {row["case"]: row["us"] for row in rows_of(out, "kernels")}
    assert all(us > 0 for us in timed.values())
    assert {"decode_absorbed, 16-bit result three-heads 64 2", "prompt three-heads 16 1"} <= set(timed)
    assert list(json.loads(printed.splitlines()[-1])["seconds"]) == stages
    for found in json.loads((out / "tiles.json").read_text()):
        assert {"tokens", "lanes", "warps", "stages"} <= set(found["tile"])
    assert {path.name for path in out.iterdir()} <= FILES


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.timeout(900)  # seconds of a processor, but minutes on a machine with much other work
def test_a_start_is_told_program_by_program(tmp_path: Path) -> None:
    out = tmp_path / "out"
    start(out, "--tiny", "--stages", "start")
    assert failures(out) == []
    started = {row["case"]: row for row in rows_of(out, "start")}
    for turn in ("first", "second"):
        assert started[f"opt-13b {turn}: first answer"]["answered"]
        assert started[f"opt-13b {turn}: answer after that"]["compilations"] == 0
    programs = {name: row for name, row in started.items() if "program" in row}
    assert started["opt-13b first: all programs"]["programs"] <= sum(" first: " in name for name in programs)
    assert all(row["lowered"] == (" first: " in name) for name, row in programs.items())


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.timeout(900)
def test_whole_model_stages(tmp_path: Path) -> None:
    from apt_jax.sim.hardware import load_hardware

    out = tmp_path / "out"
    start(out, "--tiny", "--stages", "step,generate,serve", "--rates", "20")
    assert failures(out) == []
    steps = {row["case"] for row in rows_of(out, "step")}
    assert {
        "decode 2 kv",
        "decode 2 absorb",
        "decode 2 reproject",
        "prompt 16 hidden",
        "prompt 16 over 1 hidden",
    } <= steps
    assert {"mixed 16 kv", "mixed 16 hidden", "trace decode 2 kv"} <= steps
    (generated,) = rows_of(out, "generate")
    assert generated["compilations"] == 0
    served = [row for row in rows_of(out, "serve") if row.get("side") == "served"]
    assert {(row["policy"], row["cache"]) for row in served} == {
        ("fcfs", "kv"), ("sarathi", "kv"), ("apt", "kv"), ("apt", "hybrid"), ("apt-plus", "hybrid"),
    }  # fmt: skip
    assert all(row["requests"] == 8 and row["compilations"] == 0 for row in served)
    simulated = {row["case"]: row for row in rows_of(out, "serve") if row.get("side") == "simulated"}
    for row in served:
        twin = simulated[row["case"].replace("served", "simulated")]
        assert twin["points"] == pytest.approx(100 * (row["attainment"] - twin["attainment"]), abs=0.01)
    assert len((out / "predictions.csv").read_text().splitlines()) > 8
    assert load_hardware(f"{out}-work/tiny", str(out / "hardware.json")).programs is not None
    assert {path.name for path in out.iterdir()} <= FILES
    assert "goals" in start(out, "--report")


def test_what_ends_the_script_leaves_rows_and_no_process(tmp_path: Path) -> None:
    """`kill -9` of the parent, in the middle of a stage with worker processes."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(out, "--tiny", "--stages", "sanitizer,correctness"),
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 120
        while len(processes_of(out)) < 4 or not rows_of(out):  # the script, its stage, two workers
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until = time.monotonic() + 20
    while processes_of(out):
        assert time.monotonic() < until, processes_of(out)
        time.sleep(0.05)
    assert rows_of(out)
    assert {path.name for path in out.iterdir()} <= FILES
    assert "memcheck" in start(out, "--report")


def test_a_stage_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    out = tmp_path / "out"
    begin = time.monotonic()
    printed = start(out, "--tiny", "--stages", "serve", "--seconds", "9")
    assert time.monotonic() - begin < 60
    assert "serve: its time was over" in printed
    assert processes_of(out) == []


CHILD = """
import os, sys
from benchmarks.gpu import run
def stage(stage):
    table = stage.table()
    def work(case):
        if case == "dies":
            os._exit(3)
        if case == "loses":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
        return {"value": 1.5}
    for case in ("first", "loses", "dies", "last"):
        if stage.wanted(table, case):
            stage.run(table, case, lambda: work(case))
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
    assert run.main(["--out", str(out), "--work", str(tmp_path / "work"), "--stages", "tune"]) == 0
    status = {row["case"]: row["status"] for row in rows_of(out, "tune")}
    assert set(status) == {"first", "loses", "dies", "last"}
    assert status["first"] == status["last"] == "ok"
    assert status["loses"].startswith("RuntimeError")
    assert status["dies"] == "ended the process: 3"
    assert sorted(p.name for p in out.iterdir()) == ["facts.json", "log.txt", "rows.jsonl"]


def test_a_row_that_was_cut_off_is_left_out_and_begun_again(tmp_path: Path) -> None:
    path = tmp_path / harness.ROWS
    harness.Table(path, "kernels").add("first", us=1.2345678)
    with path.open("a") as file:
        file.write('{"stage": "kernels", "case": "seco')
    assert [row["case"] for row in harness.read_rows(path)] == ["first"]
    table = harness.Table(path, "kernels")
    table.add("second", us=2)
    assert [(row["case"], row["us"]) for row in table.rows()] == [("first", 1.2346), ("second", 2)]


def test_stages_that_begin_again_forget_their_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / harness.ROWS
    for stage in ("bandwidth", "kernels"):
        harness.Table(path, stage).add("a")
    harness.forget_rows(path, ["kernels"])
    assert [row["stage"] for row in harness.read_rows(path)] == ["bandwidth"]


def test_the_two_commands_take_their_minutes_and_reach_every_stage() -> None:
    first, rest = run.parse(["--out", "x"]), run.parse(["--out", "x", "--rest"])
    assert first.seconds == 480
    assert sum(first.shares.values()) <= 480
    assert rest.resume
    assert first.shares.keys() | rest.shares.keys() == set(report.STAGES)


def test_unknown_stages_are_refused() -> None:
    with pytest.raises(SystemExit):
        run.parse(["--out", "x", "--stages", "kernel"])


def test_no_case_is_started_without_time(tmp_path: Path) -> None:
    stage = harness.Stage(name="tune", out=tmp_path, budget_s=20.0, tiny=True)
    table = stage.table()
    assert stage.wanted(table, "a")
    assert not stage.wanted(table, "a", needs_s=30.0)
    assert stage.num_skipped == 1


def test_a_backend_that_is_not_there_is_skipped_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = kernels.Timed(
        kernel="decode_absorbed by nobody", op="decode_absorbed", shape=SMALL["three-heads"], tokens=64, batch=2
    )
    monkeypatch.setattr(kernels, "_timed", lambda tiny: [case])
    kernels.kernels(harness.Stage(name="kernels", out=tmp_path, budget_s=60.0, tiny=True))
    (row,) = rows_of(tmp_path)
    assert row["status"] == "skipped: no backend nobody in this revision"


def test_prompts_are_timed_at_the_sizes_of_the_engine() -> None:
    sizes = [
        case.chunk
        for case in kernels._timed(tiny=False)
        if case.op == "prefill" and not case.tokens and case.batch == 1
    ]
    assert set(kernels.prompt_buckets("opt-13b")) <= set(sizes)


def test_goals_say_what_rows_decide() -> None:
    rows = [
        {"stage": "kernels", "case": f"{kernel} opt-13b 30000 64", "kernel": kernel, "us": us, "status": "ok"}
        for kernel, us in (("decode_kv", 200.0), ("decode_absorbed", 300.0))
    ]
    assert list(report.goals(rows)) == ["decode_absorbed over decode_kv, 30,000 tokens (goal 1.0): 1.50"]


def test_a_short_table_keeps_what_went_wrong() -> None:
    rows = [{"stage": "kernels", "case": f"good {i}", "us": 1.0, "status": "ok"} for i in range(30)]
    rows.append({"stage": "kernels", "case": "bad", "status": "RuntimeError: no"})
    lines = report.table("kernels", rows, most=9)
    assert len(lines) == 11  # a count, a heading, eight rows, what went wrong
    assert lines[-1] == "bad: RuntimeError: no"


def test_work_of_a_kernel() -> None:
    shape = SMALL["three-heads"]  # 3 heads of 16, width 48
    kv = problems.work_of("decode_kv", shape, [10, 20], 2)
    assert kv.num_bytes == 2 * 48 * 2 * 30 + 2 * 48 * (2 + 4)
    assert kv.flop == 4 * 48 * 30
    absorbed = problems.work_of("decode_absorbed", shape, [10, 20], 2)
    assert absorbed.moved_bytes - absorbed.num_bytes == 48 * 2 * 30
    assert absorbed.flop == 4 * 3 * 48 * 30


@pytest.mark.parametrize(("bits", "dtype"), [(16, jnp.bfloat16), (32, jnp.float32)])
def test_rows_that_name_the_size_of_their_results_have_it(bits: int, dtype: Any) -> None:
    shape = SMALL["three-heads"]
    name = f"decode_absorbed, {bits}-bit result"
    case = kernels.Timed(kernel=name, op="decode_absorbed", shape=shape, tokens=64, batch=2)
    shared, own = kernels.abstract_arguments(case)
    call = kernels.one_call(case, attention_ops("cpu", "triton-interpret"))
    assert jax.eval_shape(call, shared | own[0]).dtype == dtype
    assert name in {timed.kernel for timed in kernels._timed(tiny=False)}
    work, narrow = (problems.work_of(case.op, shape, [64], 2, result_size=size) for size in (bits // 8, None))
    assert work.num_bytes - narrow.num_bytes == 3 * 48 * (bits // 8 - 2)


def test_every_kernel_with_tiles_of_its_own_is_tuned() -> None:
    trials = list(tuning._trials("sm_90", tiny=False))
    assert len({trial.name for trial in trials}) == len(trials)
    first = {trial.tunable.kernel: trial for trial in reversed(trials)}
    assert all(trial.default for trial in first.values())
    assert {"scores", "output", "reprojected", "rotary_scores"} <= first.keys()
    assert first["rotary_scores"].case.shape.rotary_dim
    assert {trial.tile.columns for trial in trials if trial.tunable.kernel == "rotary_scores"} == {64, 128}


def test_designs_of_absorbed_attention_are_predicted_as_they_were_measured() -> None:
    rows = list(absorbed_designs.designs())
    of_output = [float(row["H100 us"].split("+")[1]) for row in rows if row["design"].endswith("before")]
    assert of_output == pytest.approx([61, 173, 525], rel=0.1)
    twice, once = (next(r for r in rows if r["tokens"] == 30_000 and name in r["design"]) for name in ("two", "waves"))
    assert twice["memory MB"] - once["memory MB"] == pytest.approx(2 * 5120 * 30_000 / 1e6, rel=0.02)


def test_bytes_that_tiles_of_projections_take_from_the_cache() -> None:
    lens = problems.ragged(30_000, 64, seed=2)
    row = next(row for row in absorbed_designs.projections() if row["kernel"] == "decode_reprojected")
    weights, inputs = 2 * 5120 * 5120 * 2 * sum(-(-n // 128) for n in lens), 40 * 5120 * 2 * 30_000
    assert row["L2 GB"] == round((weights + inputs) / 1e9, 1)


def test_floors_need_rates() -> None:
    assert harness.floor_s(10.0, 10.0, {"bytes_s": 0.0, "flop_s": 0.0}) == 0.0
    assert harness.floor_s(10.0, 40.0, {"bytes_s": 10.0, "flop_s": 10.0}) == 4.0
