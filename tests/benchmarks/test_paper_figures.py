"""The scripts behind the figures of InferMax and BROS run with tiny settings and judge what they find."""

import csv
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
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

    assert "20/20 " in capsys.readouterr().err
    assert script.main(arguments) == 0
    assert "/20 " not in capsys.readouterr().err


@pytest.mark.parametrize("script", ["bros"], indirect=True)
def test_bros_beats_first_come_first_served_beside_best_effort_batches(
    script: ModuleType, tmp_path: Path
) -> None:
    assert script.main(["fig11", "--quick", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "bros_fig10_11.csv")
    attained = {
        (row["policy"], f"{row['model']} {row['dataset']} {row['rate']}"): float(
            row["ttft_attainment"]
        )
        for row in rows
    }
    assert {policy for policy, _ in attained} == {"fcfs", "round-robin", "bros"}
    assert all(attained["bros", point] > attained["fcfs", point] for _, point in attained)
    assert all(float(row["be_per_s"]) > 0 for row in rows)
    targets = {row["id"]: row for row in read(tmp_path / "bros.csv")}
    assert targets["B-ttft-share-vllm"]["verdict"] in ("reproduced", "same direction")
    assert (tmp_path / "bros_fig11.png").stat().st_size > 0


@pytest.mark.parametrize("script", ["bros"], indirect=True)
def test_the_next_best_effort_batch_comes_when_the_one_before_has_ended(
    script: ModuleType,
) -> None:
    class Sizes(script.Feed):
        waiting: ClassVar[list[int]] = []

        def _send_batch(self, now_s: float) -> None:
            self.waiting.append(self._num_be - len(self.be_ended_s))
            super()._send_batch(now_s)

    case = script.Mixed(
        policy="fcfs", model="opt-13b", dataset="lmsys", rate=1.0, duration_s=10.0, be_batch=8
    )
    rng = np.random.default_rng(0)
    feed = Sizes(case, script._pick("bros-lmsys", 5, rng), np.linspace(1.0, 10.0, 5), rng)
    feed.run()
    assert len(feed.ended) == 5
    assert len(Sizes.waiting) > 1
    assert not any(Sizes.waiting)
