"""XLA's choices for known models, as a file to ship."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import autotune


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
