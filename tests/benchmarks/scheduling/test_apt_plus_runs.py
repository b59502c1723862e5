"""`apt-plus` beside every reading of Apt-Serve, with minutes of arrivals: the command, its tables and its store."""

import csv
from pathlib import Path

import pytest

from benchmarks.scheduling import apt_plus


@pytest.mark.in_turn(4, group="whole commands")
def test_rates_say_what_they_were_bought_with_and_are_drawn(tmp_path: Path) -> None:
    flags = [
        "rates",
        "--quick",
        "--traces",
        "humaneval",
        "--cv",
        "1",
        "--workers",
        "1",
        "--requests",
        "20",
        "--out",
        str(tmp_path),
    ]
    assert apt_plus.main([*flags, "--store", str(tmp_path / "runs.jsonl")]) == 0
    with (tmp_path / "rates.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    best = max(float(row[name]) for name in apt_plus.READINGS)
    assert float(row["ratio"]) == pytest.approx(float(row[apt_plus.PLUS]) / best, rel=1e-3)
    with (tmp_path / "rates-bought-with.csv").open(newline="") as file:
        rows = {r["system"]: r for r in csv.DictReader(file)}
    assert set(rows) == {*apt_plus.READINGS, apt_plus.PLUS}
    assert all(0 <= float(r["strict_percent"]) <= float(r["slo_percent"]) for r in rows.values())
    assert apt_plus.main(["picture", "--cv", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
