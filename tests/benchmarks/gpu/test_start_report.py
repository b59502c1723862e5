"""Reports of a start, program by program, and results of tuning for the package."""

import json
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.gpu.start_report")
from apt_jax.executor.buckets import GREEDY
from benchmarks.gpu import autotune
from benchmarks.gpu.start_report import BuiltProgram, report_programs
from tests.support.paged_driver import make_executor


def test_each_program_is_told_once_as_it_is_made() -> None:
    runner = make_executor().runner
    told: list[BuiltProgram] = []
    end = report_programs(told.append)
    try:
        call = runner.empty_sample_call(1, GREEDY)
        call.compile()
        call.compile()
    finally:
        end()
    runner.empty_tables_call().compile()
    (program,) = told
    assert program.name == "sample"
    assert "greedy=True" in program.static
    assert program.at_s >= program.lower_s + program.compile_s > program.lower_s > 0


def test_the_script_compiles_the_programs_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(autotune, "_NUM_LAYERS", 1)
    found = autotune.products
    monkeypatch.setattr(autotune, "products", lambda runner: found(runner)[:1])
    assert autotune.main(["--tiny", "--out", str(tmp_path)]) == 0
    program, model = map(json.loads, capsys.readouterr().out.splitlines())
    assert program["error"] is None
    assert program["program"] == "decode"
    assert model["results"] == 0  # a CPU has no results
