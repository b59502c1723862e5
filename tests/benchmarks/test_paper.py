"""The benchmarks that repeat the papers' numbers: verdicts, the search for rates, and that the commands run."""

import csv
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
apt_serve = pytest.importorskip("benchmarks.paper.apt_serve")
common = pytest.importorskip("benchmarks.paper.common")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("target", "values", "agrees", "expected"),
    [
        ("T4-ShareGPT-6-cv1-kv", [60.0], None, "reproduced"),  # 65.7 less 10 %
        ("T4-ShareGPT-6-cv1-kv", [40.0, 60.0], True, "same direction"),
        ("T4-ShareGPT-6-cv1-kv", [40.0, 80.0], False, "reproduced"),  # within the spread
        ("T4-ShareGPT-6-cv1-kv", [30.0, 31.0], False, "differs"),
        ("T4-ShareGPT-6-cv1-kv", [30.0], None, "differs"),
        ("S66-ShareGPT-apt", [91.0], None, "reproduced"),  # more than 90
        ("S66-ShareGPT-fcfs", [29.0], None, "reproduced"),  # less than 30
        ("S66-ShareGPT-fcfs", [31.0], False, "differs"),
    ],
)
def test_verdicts(target: str, values: list[float], agrees: bool | None, expected: str) -> None:
    assert common.compare(target, values, agrees=agrees)["verdict"] == expected


def test_verdicts_of_claims_count_cases() -> None:
    said = [common.claim("C", "", "", holds)["verdict"] for holds in ([True] * 2, [True, True, False], [True, False])]  # fmt: skip
    assert said == ["reproduced", "same direction", "differs"]


def test_rows_are_merged_by_id_and_variant(tmp_path: Path) -> None:
    path = tmp_path / "targets.csv"
    common.write_rows(
        path, [common.compare("T6-50", 0.2, variant="a"), common.compare("S31-eff", 2.0)]
    )
    common.write_rows(path, [common.compare("S31-eff", [2.0, 3.0]), common.compare("T6-50", 0.4)])
    found = {(row["id"], row["variant"]): row["ours"] for row in rows_of(path)}
    assert found == {("T6-50", "a"): "0.2", ("T6-50", ""): "0.4", ("S31-eff", ""): "2.5"}


def test_settings_are_the_papers() -> None:
    config = common.paper_config("LongBench", "66B", rate=1.0)
    assert (config.model, config.num_devices, config.slo.ttft_s) == ("opt-66b", 4, 5.0)
    assert config.hidden_attention == "reproject"


@pytest.mark.parametrize("start", [0.2, 2.0, 3.0, 50.0])
def test_crossings_do_not_depend_on_the_start(start: float, monkeypatch: Any) -> None:
    def fake(config: Any) -> dict[str, float]:
        return {"slo": min(1.0, 3.0 / config.rate)}

    monkeypatch.setattr(apt_serve, "attainment", fake)
    found = apt_serve.crossings(common.paper_config("ShareGPT"), (0.9, 0.6), (start, start))
    # 3 / 0.9 and 3 / 0.6, up to the interpolation between neighbouring rates.
    assert found["rates"] == pytest.approx([3.333, 5.0], rel=0.02)


def test_commands_run_and_keep_their_runs(tmp_path: Path, capsys: Any) -> None:
    common_flags = ["--quick", "--workers", "1", "--out", str(tmp_path), "--store", str(tmp_path / "runs")]  # fmt: skip
    assert apt_serve.main(["table6", *common_flags]) == 0
    assert apt_serve.main(["fig1", "--requests", "20", *common_flags]) == 0
    assert "S31-att30" in capsys.readouterr().out
    found = {row["id"] for row in rows_of(tmp_path / "apt_serve_targets.csv")}
    assert {"T6-1600", "S31-lim30", "C-fig1"} <= found
    assert (tmp_path / "apt_serve_fig2.png").read_bytes().startswith(b"\x89PNG")
    assert [row["rate"] for row in rows_of(tmp_path / "apt_serve_fig2.csv")] == ["2.6", "3"]
    assert len((tmp_path / "runs").read_text().splitlines()) == 2
    assert apt_serve.main(["fig2", "--requests", "20", *common_flags]) == 0
    assert len((tmp_path / "runs").read_text().splitlines()) == 2
