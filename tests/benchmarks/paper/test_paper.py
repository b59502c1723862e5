"""The benchmarks that repeat the papers' numbers: verdicts, the search for rates, and that the commands run."""

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib")
apt_serve = pytest.importorskip("benchmarks.paper.apt_serve")
common = pytest.importorskip("benchmarks.paper.common")
host_time = pytest.importorskip("benchmarks.paper.host_time")


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


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        ([True] * 2, "reproduced"),
        ([True, True, False], "same direction"),
        ([True, False], "differs"),
        ([True, True, None], "same direction"),
        ([True, None], "undecided"),
        ([False, None], "undecided"),
        ([None] * 3, "undecided"),
        ([False, False, None], "differs"),
    ],
)
def test_verdicts_of_claims_count_cases(holds: list[bool | None], expected: str) -> None:
    assert common.claim("C", "", "", holds)["verdict"] == expected


def test_cases_that_the_seeds_do_not_decide_are_neither_held_nor_failed() -> None:
    base = [50.0, 60.0, 70.0]
    assert common.above([51.0, 61.0, 71.5], base) is True
    assert common.above([49.0, 59.0, 68.5], base) is False
    assert common.above([51.0, 58.0, 75.0], base) is None
    assert common.above(base, base) is False
    assert common.above(base, base, or_equal=True) is True
    assert common.above([50.0, 60.0, 75.0], base) is None
    assert common.above([50.0, 60.0, 75.0], base, or_equal=True) is True


@given(st.lists(st.floats(0, 100), min_size=2, max_size=6), st.floats(0.1, 100))
def test_no_verdict_with_an_interval_wider_than_its_effect_is_a_reproduction(seeds: list[float], effect: float) -> None:
    """Neither of numbers nor of gains nor of statements about several cases."""
    target = dataclasses.replace(common.targets()["S31-eff"], value=str(effect))
    wide = common.half_width(seeds) > effect
    assert not wide or common.verdict(target, seeds, agrees=True) != "reproduced"
    gain, half = common.mean(seeds), common.half_width(seeds)
    assert half <= abs(gain) or common.gain_verdict(gain, half, effect) == "undecided"
    row = {"gain": gain, "half_width": half, "paper_gain": effect}
    for case in (apt_serve._better, apt_serve._not_worse):
        if half > max(effect, 1.0, abs(gain)):
            assert common.claim("C", "", "", [True, case(row)])["verdict"] != "reproduced"


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
        costs = (
            "strict",
            "longest_gap_p99_s",
            "tokens_per_s",
            "ttft_p99_s",
            "recomputed_tokens",
            "preemptions",
            "makespan_s",
        )
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
        ("hybrid, limits in the pass", "kv"), ("released, hybrid", "released, kv"), ("released, hybrid", "fcfs"),
    }  # fmt: skip
    assert {row["verdict"] for row in gains} == {"undecided"}
    lines = apt_serve.report(tmp_path / "apt_serve_targets.csv").splitlines()
    assert any(
        line.startswith("| LongBench 3/s, CV 1, outputs x 0.6 | 84 % | 30.0 ± 0.0 | 70.0 | +7.6 |") for line in lines
    )


def test_decode_steps_set_beside_the_papers_fit_the_pool() -> None:
    (kv, kv_s), (mixed, mixed_s) = apt_serve.decode_steps(50)
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


def test_searches_on_sharegpt_have_three_times_the_requests_up_to_the_papers(tmp_path: Path) -> None:
    def requests(dataset: str, num: int) -> int:
        runs = common.Runs(quick=False, num_requests=num, seeds=(0,), workers=1, out=tmp_path, store=common.Store())
        return apt_serve.effective_requests(runs, dataset)

    assert [requests("ShareGPT", n) for n in (200, 300, 400, 1000, 1500)] == [600, 900, 1000, 1000, 1500]
    assert requests("HumanEval", 200) == 200


def test_runs_by_length_have_the_requests_that_their_rows_say(tmp_path: Path, monkeypatch: Any) -> None:
    seen: set[int] = set()

    def fake(config: Any, *of: Any) -> dict[str, Any]:
        seen.add(config.num_requests)
        return {"rates": [2.0, 3.0], "at": {}}

    monkeypatch.setattr(apt_serve, "crossings", fake)
    runs = common.Runs(quick=False, num_requests=300, seeds=(0, 1), workers=1, out=tmp_path, store=common.Store())
    apt_serve.length(runs)
    assert {int(row["requests"]) for row in rows_of(tmp_path / "apt_serve_length.csv")} == seen == {300, 1000}


def test_cells_of_tables_4_and_5_have_the_requests_that_are_asked_for(tmp_path: Path) -> None:
    seeds = tuple(range(10))
    runs = common.Runs(quick=False, num_requests=1000, seeds=seeds, workers=1, out=tmp_path, store=common.Store())
    assert apt_serve._table45_size(runs, ("ShareGPT", 1.0, 3.0, 1.0)) == (1000, seeds)
    assert apt_serve._table45_size(runs, ("LongBench", 0.6, 3.0, 1.0)) == (1000, seeds[:6])


def test_runs_of_minutes_have_the_requests_of_their_rate(monkeypatch: Any) -> None:
    seen: list[tuple[float, int]] = []

    def fake(config: Any) -> dict[str, float]:
        seen.append((config.rate, config.num_requests))
        return {"slo": min(1.0, 3.0 / config.rate)}

    monkeypatch.setattr(apt_serve, "attainment", fake)
    apt_serve.crossings(common.paper_config("ShareGPT"), (0.9,), (2.0,), 10.0)
    assert len(seen) > 2
    assert all(num == round(600 * rate) for rate, num in seen)


def test_host_time_is_added_to_every_step_of_a_command(tmp_path: Path) -> None:
    def seen(config: Any) -> dict[str, Any]:
        return {"host_s": config.host_s, "overlap": config.overlap}

    runs = common.Runs(
        quick=True, num_requests=1, seeds=(0,), workers=1, out=tmp_path, store=common.Store(), host_s=0.06
    )
    assert runs.map("", seen, [(common.paper_config("ShareGPT", rate=1.0),)]) == [{"host_s": 0.06, "overlap": False}]


@pytest.mark.in_turn(4, group="whole commands")
def test_one_host_time_is_fitted_to_the_numbers_of_both_papers(tmp_path: Path, capsys: Any) -> None:
    flags = ["--quick", "--workers", "1", "--requests", "20", "--out", str(tmp_path), "--store", str(tmp_path / "runs")]
    assert host_time.main(flags) == 0
    rows = rows_of(tmp_path / "host_time.csv")
    assert {row["host_ms"] for row in rows} == {"0", "60"}
    decode = {row["host_ms"]: float(row["ours"]) for row in rows if row["id"] == "S66-decode50"}
    assert decode["60"] == pytest.approx(decode["0"] + 60)
    assert {row["id"] for row in rows} >= {"S31-eff", "S31-lim30", "B-rr-ttft", "B-rr-tpot-lmsys"}
    assert "one value for both papers" in capsys.readouterr().out
    assert (tmp_path / "host_time.png").read_bytes().startswith(b"\x89PNG")


def test_lengths_of_the_traces_stand_beside_the_papers(tmp_path: Path) -> None:
    assert apt_serve.main(["fig7", "--out", str(tmp_path)]) == 0
    rows = {row["id"]: row for row in rows_of(tmp_path / "apt_serve_targets.csv")}
    assert rows["T7-Arxiv-in-mean"]["verdict"] == "reproduced"
    lengths = {(r["dataset"], r["lengths"]): float(r["mean"]) for r in rows_of(tmp_path / "apt_serve_fig7.csv")}
    assert lengths["HumanEval", "out"] < lengths["ShareGPT", "out"]


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
