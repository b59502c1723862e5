"""Sweeps: parallel, resumable, and effective throughput by bisection."""

import dataclasses
import json

import pytest

from apt_jax.errors import ConfigError
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate
from apt_jax.sim.sweep import Store, bisect_rate, find_rates, run_key, sweep

SMALL = SimulationConfig(rate=3.0, num_requests=12, policy="fcfs", cache="kv", trace="humaneval", output_scale=0.25)
GRID = [dataclasses.replace(SMALL, rate=rate, seed=seed) for rate in (2.0, 4.0) for seed in (0, 1)]
SAME = ("slo_attainment", "ttft_s", "tbt_s", "iterations", "preemptions", "tokens_per_s")


def test_a_sweep_gives_what_single_runs_give_in_order():
    runs = sweep(GRID, workers=1)
    for config, run in zip(GRID, runs, strict=True):
        alone = simulate(config).as_dict()
        assert {k: run[k] for k in SAME} == {k: alone[k] for k in SAME}


def test_processes_give_the_same():
    alone, together = sweep(GRID, workers=1), sweep(GRID, workers=2)
    assert [{k: r[k] for k in SAME} for r in alone] == [{k: r[k] for k in SAME} for r in together]


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"

    def stop_after_two(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(GRID, store=Store(path), workers=1, progress=stop_after_two)
    with path.open("a") as file:
        file.write('{"key": "cut of')  # as a crash in the middle of a line leaves it
    assert len(path.read_text().splitlines()) == 3

    ran = []
    monkeypatch.setattr("apt_jax.sim.sweep.simulate", lambda config: ran.append(config) or simulate(config))
    runs = sweep(GRID, store=Store(path), workers=1)
    assert ran == GRID[2:]
    assert [r["slo_attainment"] for r in runs] == [simulate(c).summary.slo_attainment for c in GRID]
    ran.clear()
    assert len(sweep(GRID, store=Store(path), workers=1)) == 4
    assert not ran
    assert all(json.loads(line) for line in path.read_text().splitlines() if line.endswith("}"))


def test_a_key_depends_on_the_configuration_and_on_files(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("prompt_tokens,output_tokens\n5,4\n")
    config = dataclasses.replace(SMALL, trace=str(trace))
    first = run_key(config)
    assert first == run_key(config)
    assert first != run_key(dataclasses.replace(config, seed=1))
    trace.write_text("prompt_tokens,output_tokens\n5,5\n")
    assert first != run_key(config)


@pytest.mark.parametrize(("true_rate", "guess"), [(3.3, 2.0), (3.3, 40.0), (0.07, 2.0), (55.0, 2.0)])
def test_bisection_finds_the_rate(true_rate, guess):
    def attainment(rate: float) -> float:
        return 0.95 if rate <= true_rate else 0.5

    rate, runs = bisect_rate(attainment, target=0.9, guess=guess, tolerance=0.02)
    assert true_rate / 1.03 < rate <= true_rate
    assert all((a >= 0.9) == (float(r) <= true_rate) for r, a in runs.items())


def test_a_target_out_of_reach_is_rate_zero():
    assert bisect_rate(lambda rate: 0.5, target=0.9)[0] == 0.0


def test_effective_rate_with_its_spread():
    (found,) = find_rates([SMALL], target=0.9, seeds=(0, 1), guesses=[8.0], tolerance=0.1, workers=1)
    assert len(found.rates) == 2
    assert found.mean == pytest.approx(sum(found.rates) / 2)
    assert found.std >= 0
    for seed, rate in enumerate(found.rates):
        at = simulate(dataclasses.replace(SMALL, seed=seed, rate=rate)).summary.slo_attainment
        assert at >= 0.9
    with pytest.raises(ConfigError, match="--find-rate"):
        find_rates([SMALL], target=1.5)


def test_a_store_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match="--store"):
        Store(tmp_path)
