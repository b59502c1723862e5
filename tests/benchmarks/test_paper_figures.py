"""The scripts behind the figures of InferMax and BROS run with tiny settings and judge what they find."""

import csv
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks/paper"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    return importlib.import_module(request.param)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("script", ["infermax"], indirect=True)
def test_infermax_compares_eviction_with_waiting_and_goes_on_from_its_store(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fig9", "--quick", "--out", str(tmp_path), "--store", str(tmp_path / "runs.jsonl")]
    assert script.main(arguments) == 0
    rows = read(tmp_path / "infermax_fig9.csv")
    assert all(row["evictions"] == "0" for row in rows if row["policy"].endswith("-ef"))
    assert any(row["evictions"] != "0" for row in rows)
    assert {row["num_completed"] for row in rows} == {"64"}
    targets = {row["id"]: row for row in read(tmp_path / "infermax.csv")}
    assert targets["I-45-vllm-100"]["paper"] == "1.9"
    assert targets["I-45-vllm-100"]["verdict"] in ("reproduced", "same direction", "differs")
    assert (tmp_path / "infermax_fig9_linear.png").stat().st_size > 0

    assert "24/24" in capsys.readouterr().err
    assert script.main(arguments) == 0
    assert "/24" not in capsys.readouterr().err
