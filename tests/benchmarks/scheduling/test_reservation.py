"""The comparison of reservations: what is chosen, and tables of paired differences."""

import csv

import pytest

from benchmarks.scheduling import reservation


def test_one_command_three_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reservation, "TUNED", {"humaneval": (30.0,)})
    monkeypatch.setattr(reservation, "JUDGED", {"humaneval": (30.0,)})
    monkeypatch.setattr(reservation, "POLICIES", ("vllm-v1",))
    options = ("--seeds", 2, "--requests", 4, "--workers", 1, "--out", tmp_path, "--store", tmp_path / "runs.jsonl")
    reservation.main([*map(str, options)])
    tables = {}
    for name in ("tuned", "judged", "summary"):
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            tables[name] = list(csv.DictReader(file))
    assert [row["reserve"] for row in tables["tuned"]] == ["none", *reservation.QUANTILES, "max_tokens"]
    assert {"none", "max_tokens", "known"} < {row["reserve"] for row in tables["judged"]}
    for row in tables["judged"]:
        assert 0 <= float(row["attainment"]) <= 100
        assert row["reserve"] != "none" or float(row["attainment_gain"]) == 0
        assert row["reserve"] not in ("max_tokens", "known") or float(row["preemptions"]) == 0
    assert "chosen:" in capsys.readouterr().out


def test_the_quantile_with_fewest_recomputed_tokens_of_the_best_is_chosen(monkeypatch):
    monkeypatch.setattr(reservation, "POLICIES", ("fcfs",))
    attainment = {"0.3": 80.0, "0.5": 80.2, "0.7": 79.8, "0.9": 70.0}
    recomputed = {"0.3": 900, "0.5": 500, "0.7": 100, "0.9": 0}
    results = {
        ("sharegpt", 4.0, "fcfs", q): [{"attainment": attainment[q], "recomputed_tokens": recomputed[q]}]
        for q in reservation.QUANTILES
    }
    assert reservation.best_quantiles(results) == {"fcfs": "0.7"}


@pytest.mark.parametrize(
    ("reserve", "policy", "max_tokens"),
    [("none", "fcfs", 1024), ("0.5", "fcfs?reserve=0.5", 1024), ("max_tokens", "fcfs?reserve=1", 1024), ("known", "fcfs?reserve=1", None)],
)  # fmt: skip
def test_what_is_compared(reserve, policy, max_tokens):
    config = reservation.config_of(("sharegpt", 4.0, "fcfs", reserve), 10)
    assert (config.policy, config.max_tokens) == (policy, max_tokens)
