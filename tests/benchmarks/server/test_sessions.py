"""The benchmark of sessions: which calls it sends, and what it makes of their times."""

import dataclasses

import numpy as np

from apt_jax.config import SLO
from apt_jax.metrics import RequestRecord
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.trace import load_trace
from benchmarks.server.sessions import measured, simulated, summarized, write_trace
from tests.support.toy_openai import ToyOpenAI, in_thread


def test_the_first_calls_of_sessions_are_written_as_they_are(tmp_path):
    whole = load_trace("agents")
    assert whole.calls is not None
    write_trace(whole, 4, tmp_path / "t.csv")
    kept = load_trace(str(tmp_path / "t.csv"))
    assert kept.calls is not None
    assert kept.calls.num_sessions == whole.calls.num_sessions
    begins, own = whole.calls.begins(), kept.calls.begins()
    assert np.diff(own).max() == 4
    for session in range(0, kept.calls.num_sessions, 7):
        first, of = begins[session], own[session]
        for i in range(own[session + 1] - of):
            assert kept.prompt_tokens[of + i] == whole.prompt_tokens[first + i]
            assert kept.output_tokens[of + i] == whole.output_tokens[first + i]
            for name in ("think_s", "shared_blocks"):
                assert getattr(kept.calls, name)[of + i] == getattr(whole.calls, name)[first + i]
            for name in ("parent", "follows"):
                a, b = getattr(kept.calls, name)[of + i], getattr(whole.calls, name)[first + i]
                assert a - of == b - first if b >= 0 else a == -1


def test_the_same_sessions_are_measured_and_simulated(tmp_path):
    write_trace(load_trace("agents"), 3, tmp_path / "t.csv")
    hardware = load_hardware("opt-13b", "a100-40gb")
    config = SimulationConfig(
        trace=str(tmp_path / "t.csv"), rate=50.0, num_sessions=4, max_think_s=0.05, scale_tokens=1 / 512, cache="kv",
        drop_too_long=True, hash_block_tokens=64, slo=SLO(), policy="fcfs",
    )  # fmt: skip
    calls, predicted = simulated(config, hardware)
    toy = ToyOpenAI(lambda _: [0.02, 0.01])
    with in_thread(toy.running):
        found = measured(toy.url, calls, config, hardware)
    assert len(toy.bodies) == calls.session.size + 1  # one to begin with
    assert len(found["by_turn"]) == len(predicted["by_turn"]) == 3
    assert min(found["by_turn"]) >= 0.019
    assert found["completion_mean_s"] >= 0.029 * calls.session.size / calls.num_sessions
    assert (found["computed_tokens"], found["cached_share"]) == (5 * calls.session.size, 0.0)
    assert predicted["cached_share"] > 0.3


def test_figures_are_of_sessions_and_turns():
    calls = load_trace("interactive-chat").calls
    assert calls is not None
    calls, _ = calls.take([0, 1])
    n = calls.session.size
    at = np.arange(n) - calls.begins()[calls.session]
    records = [RequestRecord(arrival_s=10.0, token_times_s=(11.0 + t, 13.0 + t), finished_s=99.0) for t in at.tolist()]
    found = summarized(calls, records, np.arange(n), np.full(n, 20))
    took_s = [sum(3.0 + t for t in at[calls.session == s]) for s in (0, 1)]
    assert found["completion_mean_s"] == np.mean(took_s)
    assert found["by_turn"] == [1.0 + t for t in range(int(at.max()) + 1)]
    assert found["computed_tokens"] == 20 * n - sum(range(n))
    late = dataclasses.replace(records[0], ok=False)
    assert np.isnan(summarized(calls, [late, *records[1:]], np.arange(n), np.full(n, 20))["completion_mean_s"])
