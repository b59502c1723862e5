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
        ("T4-ShareGPT-6-cv1-kv", [50.0, 50.1], True, "same direction"),
        (
            "T4-ShareGPT-6-cv1-kv",
            [40.0, 80.0],
            False,
            "undecided",
        ),  # the interval holds it and is wide
        ("T4-ShareGPT-6-cv1-kv", [30.0, 31.0], False, "differs"),
        ("T4-ShareGPT-6-cv1-kv", [30.0], None, "differs"),
        ("S66-ShareGPT-apt", [91.0], None, "reproduced"),  # more than 90
        ("S66-ShareGPT-fcfs", [29.0], None, "reproduced"),  # less than 30
        ("S66-ShareGPT-fcfs", [31.0], False, "differs"),
        ("S66-ShareGPT-apt", [89.0, 93.0], None, "undecided"),  # the interval holds the bound
        ("S66-ShareGPT-apt", [95.0, 95.1], None, "reproduced"),
    ],
)
def test_verdicts(target: str, values: list[float], agrees: bool | None, expected: str) -> None:
    assert common.compare(target, values, agrees=agrees)["verdict"] == expected


@pytest.mark.parametrize(
    ("gain", "half", "paper", "expected"),
    [
        (1.0, 1.5, 7.6, "undecided"),
        (3.0, 1.0, 7.6, "same direction"),
        (7.0, 1.0, 7.6, "reproduced"),
        (-2.0, 1.0, 7.6, "differs"),
    ],
)
def test_a_gain_has_a_verdict_only_where_its_interval_excludes_zero(
    gain: float, half: float, paper: float, expected: str
) -> None:
    assert common.gain_verdict(gain, half, paper) == expected


def test_intervals_are_students_and_differences_are_paired() -> None:
    assert common.half_width([1.0]) == 0.0
    assert common.half_width([1.0, 2.0, 3.0]) == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    # Seeds differ a great deal, the difference does not.
    assert common.paired([11.0, 51.0, 91.0], [10.0, 50.0, 90.0]) == (1.0, 0.0)


def test_verdicts_of_claims_count_cases() -> None:
    said = [common.claim("C", "", "", holds)["verdict"] for holds in ([True] * 2, [True, True, False], [True, False])]
    assert said == ["reproduced", "same direction", "differs"]


def test_rows_are_merged_by_id_and_variant(tmp_path: Path) -> None:
    path = tmp_path / "targets.csv"
    common.write_rows(path, [common.compare("T6-50", 0.2, variant="a"), common.compare("S31-eff", 2.0)])
    common.write_rows(path, [common.compare("S31-eff", [2.0, 3.0]), common.compare("T6-50", 0.4)])
    found = {(row["id"], row["variant"]): row["ours"] for row in rows_of(path)}
    assert found == {("T6-50", "a"): "0.2", ("T6-50", ""): "0.4", ("S31-eff", ""): "2.5"}


def test_settings_are_the_papers() -> None:
    config = common.paper_config("LongBench", "66B", rate=1.0)
    assert (config.model, config.num_devices, config.slo.ttft_s) == ("opt-66b", 4, 5.0)
    assert config.hidden_attention == "reproject"


def test_output_lengths_of_longbench_are_a_dimension_of_the_settings() -> None:
    assert common.paper_config("LongBench").output_scale == 0.4
    assert common.paper_config("LongBench", output_scale=1.0).output_scale == 1.0
    assert common.paper_config("ShareGPT").output_scale == 1.0
    shares = [apt_serve.share_with_gaps("LongBench", s) for s in common.OUTPUT_SCALES["LongBench"]]
    assert shares == pytest.approx([98.7, 83.5, 43.0], abs=0.1)


def test_table_4_has_a_row_for_every_scale_of_outputs(tmp_path: Path, monkeypatch: Any) -> None:
    asked: set[tuple[str, float]] = set()

    def fake(config: Any) -> dict[str, Any]:
        asked.add((config.trace, config.output_scale))
        shares = dict.fromkeys(("slo", "ttft", "tbt"), config.output_scale / 2)
        costs = ("tokens_per_s", "ttft_p99_s", "recomputed_tokens", "preemptions", "makespan_s")
        return {**shares, **dict.fromkeys(costs, 1.0)}

    monkeypatch.setattr(apt_serve, "attainment", fake)
    runs = common.Runs(quick=False, num_requests=5, seeds=(0,), workers=1, out=tmp_path, store=common.Store())
    apt_serve.table4(runs)
    scales = {("longbench", scale) for scale in (1.0, 0.6, 0.4)}
    assert asked == {("sharegpt", 1.0), *scales}
    rows = rows_of(tmp_path / "apt_serve_targets.csv")
    found = {row["variant"]: row["ours"] for row in rows if row["id"] == "T4-LongBench-3-cv1-kv"}
    # With whole outputs the rates are not the paper's: gains alone are set beside it.
    assert found == {"outputs x 0.6": "30", "outputs x 0.4": "20"}
    gains = rows_of(tmp_path / "apt_serve_table4_gains.csv")
    whole = [row for row in gains if row["output_scale"] == "1" and row["cell"] == "LongBench-3-cv1"]
    assert {(row["system"], row["over"]) for row in whole} == {
        ("hybrid", "kv"), ("hybrid, true rho", "kv"), ("hybrid, violated not counted", "kv"), ("hybrid", "fcfs"),
    }  # fmt: skip
    assert {row["verdict"] for row in gains} == {"undecided"}
    lines = apt_serve.report(tmp_path / "apt_serve_targets.csv").splitlines()
    assert any(
        line.startswith("| LongBench 3/s, CV 1, outputs x 0.6 | 84 % | 30.0 ± 0.0 | 70.0 | +7.6 |") for line in lines
    )


def test_decode_steps_set_beside_the_papers_fit_the_pool() -> None:
    (kv, kv_s), (mixed, mixed_s) = apt_serve._decode_steps(50)
    assert kv == "cost model, 272 tokens a request, 0 hidden"  # 17 groups of 2 blocks of 1,780 / 50
    assert mixed == "cost model, 395 tokens a request, 29 hidden"  # 21 * 50 + 29 * 25 = 1,775
    assert kv_s == pytest.approx(0.02448 + 50 * 3.85e-5 + 50 * 272 * 8.22e-7)
    assert mixed_s - kv_s == pytest.approx(29 * 395 * 16.742e-6 + (21 * 395 - 50 * 272) * 8.22e-7)


@pytest.mark.parametrize("start", [0.2, 2.0, 3.0, 50.0])
def test_crossings_do_not_depend_on_the_start(start: float, monkeypatch: Any) -> None:
    def fake(config: Any) -> dict[str, float]:
        return {"slo": min(1.0, 3.0 / config.rate)}

    monkeypatch.setattr(apt_serve, "attainment", fake)
    found = apt_serve.crossings(common.paper_config("ShareGPT"), (0.9, 0.6), (start, start))
    # 3 / 0.9 and 3 / 0.6, up to the interpolation between neighbouring rates.
    assert found["rates"] == pytest.approx([3.333, 5.0], rel=0.02)


@pytest.mark.in_turn(4, group="whole commands")
def test_commands_run_and_keep_their_runs(tmp_path: Path, capsys: Any) -> None:
    common_flags = ["--quick", "--workers", "1", "--out", str(tmp_path), "--store", str(tmp_path / "runs")]
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
