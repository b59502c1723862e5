"""The table of all schedulers: one command, rows that compare seed by seed, runs that are kept."""

import csv
import math
import sys

import pytest

from apt_jax.sched import all_policies
from benchmarks.scheduling import schedulers


def run_main(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["schedulers", *map(str, args)])
    schedulers.main()


@pytest.mark.in_turn(4, group="whole commands")
def test_one_command_one_table_one_picture(tmp_path, monkeypatch, capsys):
    options = ("--policies", "vllm-v1,apt", "--datasets", "ShareGPT", "--rates", "2,40", "--seeds", 2,
               "--requests", 4, "--workers", 1, "--out", tmp_path, "--store", tmp_path / "runs.jsonl")  # fmt: skip
    run_main(monkeypatch, *options)
    with (tmp_path / "schedulers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    variants = [("vllm-v1", "kv"), ("apt", "kv"), ("apt", "hybrid")]
    assert [(r["policy"], r["cache"]) for r in rows] == 2 * variants
    assert [r["rate"] for r in rows] == ["2"] * 3 + ["40"] * 3
    base = rows[0]
    assert float(base["over_vllm_v1"]) == 0.0
    for row in rows:
        assert 0 <= float(row["attainment"]) <= 100
        assert 0 <= float(row["goodput"]) < 40
        assert float(row["tokens_per_s"]) > 0
    assert (tmp_path / "schedulers.png").read_bytes()[:4] == b"\x89PNG"
    assert "apt, hybrid" in capsys.readouterr().out

    monkeypatch.setattr(schedulers, "run", lambda config: pytest.fail("it was kept"))
    monkeypatch.setattr(schedulers.run, "__name__", "run", raising=False)
    before = (tmp_path / "schedulers.csv").read_bytes()
    run_main(monkeypatch, *options)
    assert (tmp_path / "schedulers.csv").read_bytes() == before


def test_intervals_are_those_of_student():
    assert schedulers.half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / math.sqrt(3))
    assert math.isnan(schedulers.half_width([1.0]))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--policies", "vllm-v1,lifo"), "'lifo' is unknown; `apt-jax policies` lists all"),
        (("--datasets", "Azure"), "'Azure': data sets must be some of"),
        (("--rates", "3,x"), "must be positive numbers"),
    ],
)
def test_wrong_names_are_named(option, message, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, *option)
    assert message in capsys.readouterr().err


def test_every_compared_policy_is_there():
    assert set(schedulers.COMPARED) <= set(all_policies())
