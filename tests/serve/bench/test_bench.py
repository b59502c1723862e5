"""`apt-jax bench`: what it sends and when, what it measures, and what it says when things go wrong."""

import asyncio
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from apt_jax import LLM
from apt_jax.config import SLO
from apt_jax.errors import ConfigError
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.workload import sample_workload
from serve import cli
from serve.bench import load, report
from serve.bench.backends import Target, random_token_ids
from serve.bench.runner import ClientHealth, Outcome, Run
from serve.bench.search import Probe, find_rates
from serve.security.api_keys import ApiKeys
from serve.security.tls import Tls
from tests.support.caches import calibrations_apart
from tests.support.http_serving import http_serving
from tests.support.small_models import write_shallow_model
from tests.support.toy_openai import ToyOpenAI, in_thread
from tests.support.toy_serving import executor_of, toy_parts

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def bench(*argv: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(["bench", *map(str, argv)])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return code, out.getvalue(), err.getvalue()


def saved(tmp_path: Path, *argv: object) -> tuple[dict, list[dict[str, str]]]:
    """The JSON and the CSV of a run that goes well."""
    json_file, csv_file = tmp_path / "run.json", tmp_path / "run.csv"
    code, _, err = bench(*argv, "--save-json", json_file, "--save-csv", csv_file)
    assert code == 0, err
    with csv_file.open(newline="") as file:
        return json.loads(json_file.read_text()), list(csv.DictReader(file))


# --- arrivals and lengths ------------------------------------------------------------------------------------------

SOURCE = load.fixed_source(10, 20)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("burstiness", [None, 0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_vllms_burstiness(seed, burstiness):
    arrivals = load.Arrivals(rate=8.0, burstiness=burstiness, num_requests=20_000)
    at_s = np.array([r.at_s for r in load.requests(SOURCE, arrivals, seed)])
    gaps = np.diff(at_s)
    # Four standard errors of a mean of 20,000 gaps, and as many of their deviation (kurtosis 6 / shape of a Gamma).
    cv = 1.0 if burstiness is None else 1 / math.sqrt(burstiness)
    assert gaps.mean() * 8.0 == pytest.approx(1.0, abs=4 * cv / math.sqrt(20_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06 * max(1, cv))


def test_a_seed_decides_everything_and_a_rate_only_stretches():
    def drawn(rate: float, seed: int) -> list[load.BenchRequest]:
        source = load.trace_source("sharegpt")
        return load.requests(source, load.Arrivals(rate=rate, num_requests=50), seed)

    assert drawn(2.0, 0) == drawn(2.0, 0)
    assert drawn(2.0, 0) != drawn(2.0, 1)
    slow, fast = drawn(2.0, 0), drawn(4.0, 0)
    assert [r.max_tokens for r in slow] == [r.max_tokens for r in fast]
    np.testing.assert_allclose([r.at_s for r in slow], [2 * r.at_s for r in fast])


def test_requests_of_the_simulator_are_the_requests_of_bench():
    from apt_jax.sim.config import SimulationConfig
    from apt_jax.sim.trace import load_trace
    from apt_jax.sim.workload import sample_workload

    want = sample_workload(
        load_trace("sharegpt"), SimulationConfig(trace="sharegpt", rate=3.0, cv=2.0, num_requests=40, seed=7)
    )
    arrivals = load.Arrivals(rate=3.0, burstiness=0.25, num_requests=40)
    got = load.requests(load.trace_source("sharegpt"), arrivals, 7)
    assert [r.prompt_tokens for r in got] == want.prompt_tokens.tolist()
    assert [r.max_tokens for r in got] == want.output_tokens.tolist()
    assert [r.at_s for r in got] == want.arrival_s.tolist()


@given(
    rate=st.floats(0.5, 200),
    duration_s=st.floats(0.1, 20),
    burstiness=st.sampled_from([None, 0.05, 3.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_a_duration_holds_all_arrivals_within_it_and_no_other(rate, duration_s, burstiness, seed):
    arrivals = load.Arrivals(rate=rate, burstiness=burstiness, duration_s=duration_s)
    longer = dataclasses.replace(arrivals, duration_s=None, num_requests=9000)
    every = [r.at_s for r in load.requests(SOURCE, longer, seed)]
    inside = [at_s for at_s in every if at_s <= duration_s]
    if not inside:
        with pytest.raises(ConfigError, match="--duration"):
            load.requests(SOURCE, arrivals, seed)
        return
    assert [r.at_s for r in load.requests(SOURCE, arrivals, seed)] == inside


def test_recorded_arrivals_are_kept_or_stretched(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("prompt_tokens,output_tokens,arrival_s,class\n3,4,10,rt\n5,6,11,be\n7,8,14,rt\n")
    source = load.trace_source(str(trace))
    as_recorded = load.requests(source, load.Arrivals(num_requests=9), 0)
    assert [(r.at_s, r.prompt_tokens, r.max_tokens, r.slo_class) for r in as_recorded] == [
        (0, 3, 4, "rt"), (1, 5, 6, "be"), (4, 7, 8, "rt")]  # fmt: skip
    # Two gaps in one second.
    stretched = load.requests(source, load.Arrivals(rate=2.0, num_requests=9), 0)
    assert [r.at_s for r in stretched] == [0, 0.25, 1.0]
    cut = load.requests(source, load.Arrivals(duration_s=2.0), 0)
    assert [r.at_s for r in cut] == [0, 1]


def test_a_file_of_prompts_is_sent_line_by_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": [1, 2], "output_tokens": 3}\n')
    source = load.prompts_source(str(path), output_len=9)
    drawn = load.requests(source, load.Arrivals(rate=math.inf, num_requests=2), 0)
    assert sorted((str(r.prompt), r.max_tokens) for r in drawn) == [("[1, 2]", 3), ("a", 9)]
    for text, says in [
        ("{", "line 1: not JSON"),
        ('{"prompt": ""}', "needs prompt"),
        ("[1]", "needs prompt"),
        ("", "has no prompts"),
        ('{"prompt": "x", "output_tokens": true}', "output_tokens=True"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(says)):
            load.prompts_source(str(path), output_len=9)


def test_endless_requests_take_every_line_once_before_any_twice():
    source = dataclasses.replace(load.trace_source("humaneval"))
    count = source.trace.num_requests
    first = list(itertools.islice(load.endless(source, 1), 2 * count))
    assert [r.index for r in first] == list(range(2 * count))
    want = sorted(zip(source.trace.prompt_tokens.tolist(), source.trace.output_tokens.tolist(), strict=True))
    for half in (first[:count], first[count:]):
        assert sorted((r.prompt_tokens, r.max_tokens) for r in half) == want


def test_no_two_made_up_prompts_are_alike():
    request = load.BenchRequest(index=0, at_s=0.0, max_tokens=1, prompt_tokens=200)
    prompts = [random_token_ids(dataclasses.replace(request, index=i), 500) for i in range(20)]
    assert all(len(p) == 200 and min(p) >= 62 and max(p) < 438 for p in prompts)
    assert len({tuple(p[:8]) for p in prompts}) == 20


# --- what is measured ----------------------------------------------------------------------------------------------


def p99_by_hand(values: list[float]) -> float:
    """NumPy's linear interpolation, written out."""
    ordered = sorted(values)
    at = 0.99 * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def test_known_delays_are_measured_and_judged(tmp_path):
    """Slow first tokens, slow gaps, refusals and empty answers, each counted as what it is."""

    def delays(number: int) -> list[float] | int:
        kind = number % 5
        if kind == 1:
            return 429
        return [[0.03, *[0.01] * 5], [], [1.5, *[0.01] * 5], [0.03, 1.2, *[0.01] * 4], []][kind]

    toy = ToyOpenAI(delays)
    with in_thread(toy.running):
        values, rows = saved(
            tmp_path, "--target", toy.url, "--request-rate", 25, "--num-requests", 25, "--num-warmups", 0,
            "--random-input-len", 8, "--random-output-len", 6, "--slo-ttft-ms", 700, "--slo-tbt-ms", 600,
        )  # fmt: skip
    # Requests come in the order of their sending, or nearly so; the server knows which one got which delays.
    assert len(rows) == values["num_sent"] == 25
    assert values["statuses"] == {"ok": 15, "429": 5, "broken": 5}
    assert all(h["x-slo-ttft-ms"] == "700" and h["x-slo-tpot-ms"] == "600" for h in toy.headers)
    assert all(b["ignore_eos"] is True and b["max_tokens"] == 6 and b["stream"] for b in toy.bodies)

    ok = [r for r in rows if r["status"] == "ok"]
    assert all(r["output_tokens"] == "6" and r["prompt_tokens"] == "5" for r in ok)
    fast_ttft = [r for r in ok if float(r["ttft_ms"]) < 700]
    assert len(fast_ttft) == 10
    assert len([r for r in fast_ttft if r["slo_attained"] == "1"]) == 5
    # The slow gap is the first one: it misses the objective, and is not there where the first gap is dropped.
    slow_gap = [r for r in fast_ttft if r["slo_attained"] == "0"]
    assert all(float(r["p99_tbt_ms"]) > 1000 and float(r["p99_tbt_drop_first_ms"]) < 600 for r in slow_gap)

    # Everything again from the rows alone.
    for r in ok:
        gaps = [float(g) for g in r["gaps_ms"].split()]
        assert len(gaps) == 5
        assert float(r["p99_tbt_ms"]) == pytest.approx(p99_by_hand(gaps), abs=1e-3)
        assert float(r["p99_tbt_drop_first_ms"]) == pytest.approx(p99_by_hand(gaps[1:]), abs=1e-3)
        assert float(r["e2e_ms"]) >= float(r["ttft_ms"]) + sum(gaps) - 1e-2
    attained = sum(
        float(r["ttft_ms"]) <= 700 and p99_by_hand([float(g) for g in r["gaps_ms"].split()]) <= 600 for r in ok
    )
    assert attained == 5
    assert values["slo_attainment"] == attained / 25
    assert values["ttft_attainment"] == 10 / 25
    assert values["tbt_attainment"] == 10 / 25
    starts = [float(r["sent_s"]) for r in rows]
    ends = [float(r["sent_s"]) + (float(r["ttft_ms"]) + sum(map(float, r["gaps_ms"].split()))) / 1e3 for r in ok]
    duration_s = max(ends) - min(starts)
    assert values["duration_s"] == pytest.approx(duration_s, abs=1e-4)
    assert values["goodput"] == pytest.approx(attained / duration_s, rel=1e-3)
    assert values["tokens_per_s"] == pytest.approx(15 * 6 / duration_s, rel=1e-3)
    for name, column in [("ttft_s", "ttft_ms"), ("tbt_s", "p99_tbt_ms"), ("e2e_s", "e2e_ms")]:
        found = [float(r[column]) / 1e3 for r in ok]
        assert values[name]["p99"] == pytest.approx(p99_by_hand(found), abs=1e-5)
        assert values[name]["p50"] == pytest.approx(sorted(found)[len(found) // 2], abs=1e-5)


def test_the_clients_times_are_the_servers_times(tmp_path):
    toy = ToyOpenAI(lambda _: [0.05, 0.02, 0.04, 0.02])
    with in_thread(toy.running):
        _, rows = saved(tmp_path, "--target", toy.url, "--max-concurrency", 1, "--num-requests", 8,
                        "--num-warmups", 0, "--random-output-len", 4)  # fmt: skip
    assert len(rows) == len(toy.written_s) == 8
    errors = []
    for row, came_s, written in zip(rows, toy.came_s, toy.written_s, strict=True):
        errors.append(abs(float(row["ttft_ms"]) / 1e3 - (written[0] - came_s)))
        gaps = [float(g) / 1e3 for g in row["gaps_ms"].split()]
        errors += np.abs(np.array(gaps) - np.diff(written)).tolist()
    # Medians, as other work on the machine may delay any single one.
    assert np.median(errors) < 0.005


@pytest.mark.parametrize(("usage", "output", "prompt"), [("never", "3", ""), ("last", "6", "5")])
def test_servers_that_do_not_count_in_every_chunk(tmp_path, usage, output, prompt):
    toy = ToyOpenAI(lambda _: [0.01] * 3, usage=usage)
    with in_thread(toy.running):
        values, rows = saved(tmp_path, "--target", toy.url, "--num-requests", 3, "--max-concurrency", 3)
    assert [(r["output_tokens"], r["prompt_tokens"]) for r in rows] == [(output, prompt)] * 3
    assert values["slo_ms"] == {}
    assert len(toy.bodies) == 4  # with the one that is not counted


def test_an_answer_without_a_token_is_not_attained():
    from serve.bench.backends import StreamEvent
    from serve.bench.runner import Runner

    class Silent:
        model = "silent"
        max_model_len: int | None = None

        def prepare(self, request):
            return request.index

        async def send(self, prepared):
            yield StreamEvent(num_tokens=prepared % 2, finish_reason="abort" if prepared == 3 else "stop")

        async def close(self):
            pass

    async def scenario():
        requests = load.requests(SOURCE, load.Arrivals(rate=math.inf, num_requests=4), 0)
        return await Runner(Silent(), slo=SLO(), timeout_s=9).open_loop(requests, asyncio.Event())

    run = asyncio.run(scenario())
    assert [o.status for o in run.outcomes] == ["empty", "ok", "empty", "abort"]
    assert report.summary(run)["slo_attainment"] == 0.25


def test_concurrency_is_bounded_in_both_loops(tmp_path):
    toy = ToyOpenAI(lambda _: [0.05])
    with in_thread(toy.running):
        for more in ([], ["--request-rate", 200], ["--duration", 1.0]):
            count = [] if "--duration" in more else ["--num-requests", 12]
            values, rows = saved(tmp_path, "--target", toy.url, "--max-concurrency", 3, *count, *more)
            assert values["peak_concurrency"] == 3
            if count:
                assert len(rows) == 12
            else:
                assert (
                    sum(float(r["sent_s"]) > 1.0 for r in rows) <= 3
                )  # each worker looks at the clock before it sends
                assert len(rows) > 12
            assert values["client"]["lateness_ms"]["p99"] is None


def test_requests_are_sent_when_they_are_due(tmp_path):
    toy = ToyOpenAI(lambda _: [0.3])
    with in_thread(toy.running):
        values, rows = saved(tmp_path, "--target", toy.url, "--request-rate", 40, "--num-requests", 40)
    late = np.array([float(r["sent_s"]) - float(r["due_s"]) for r in rows]) * 1e3
    assert late.min() > -1.0
    assert np.median(late) < 20  # open loop: nobody waits for answers of 300 ms
    assert values["client"]["lateness_ms"]["p99"] == pytest.approx(np.percentile(late, 99), abs=0.01)
    assert values["peak_concurrency"] > 5


def test_a_client_that_is_the_bottleneck_says_so():
    idle = ClientHealth(lateness_s=[0.001] * 99, lag_s=[0.001] * 99, process_cpu=0.2, loop_cpu=0.1)
    values = {"ttft_s": {"p50": 0.1}, "gap_s": {"p50": 0.02}}
    assert report.warning(idle, values) is None
    for change, says in [
        ({"lateness_s": [0.05] * 9}, "50 ms late"),
        ({"lag_s": [0.03] * 9}, "lagged by 30 ms"),
        ({"loop_cpu": 0.95}, "95 % of a core"),
    ]:
        line = report.warning(dataclasses.replace(idle, **change), values)
        assert line is not None
        assert says in line
        assert "\n" not in line
    # 50 ms are nothing where first tokens take ten seconds.
    late = dataclasses.replace(idle, lateness_s=[0.05] * 9)
    assert report.warning(late, {**values, "ttft_s": {"p50": 10.0}}) is None


def test_a_busy_event_loop_is_noticed(tmp_path):
    """A backend that computes for 30 ms a message: sends are late, and the loop's share of a core is high."""
    from serve.bench.backends import StreamEvent
    from serve.bench.runner import Runner

    class Busy:
        model = "busy"
        max_model_len: int | None = None

        def prepare(self, request):
            return request

        async def send(self, prepared):
            end_s = time.thread_time() + 0.03
            while time.thread_time() < end_s:
                pass
            yield StreamEvent(num_tokens=1, finish_reason="stop")

        async def close(self):
            pass

    async def scenario():
        requests = load.requests(SOURCE, load.Arrivals(rate=100.0, num_requests=40), 0)
        runner = Runner(Busy(), slo=SLO(), timeout_s=9)
        return await runner.open_loop(requests, asyncio.Event())

    run = asyncio.run(scenario())
    values = report.summary(run)
    assert len(run.outcomes) == 40
    assert values["client"]["lateness_ms"]["p99"] > 300
    assert values["client"]["lag_ms"]["p50"] > 10
    assert "limits this measurement" in values["warning"]


# --- what goes wrong -----------------------------------------------------------------------------------------------


def test_all_refused_is_a_result_and_exit_code_1(tmp_path):
    toy = ToyOpenAI(lambda _: 503)
    path = tmp_path / "r.json"
    with in_thread(toy.running):
        code, out, err = bench("--target", toy.url, "--num-requests", 4, "--num-warmups", 0,
                               "--slo-ttft-ms", 100, "--save-json", path)  # fmt: skip
        warm_code, _, warm_err = bench("--target", toy.url, "--num-requests", 4)
    assert code == 1
    assert "4 503" in out
    assert "first failure: 503: no room" in err
    values = json.loads(path.read_text())
    assert (values["slo_attainment"], values["num_completed"], values["goodput"]) == (0.0, 0, 0.0)
    assert (warm_code, warm_err.count("\n")) == (1, 1)
    assert "the first request failed: 503: no room" in warm_err


def test_what_takes_too_long_has_failed(tmp_path):
    toy = ToyOpenAI(lambda number: [0.01, 5.0 if number == 1 else 0.01])
    with in_thread(toy.running):
        values, rows = saved(tmp_path, "--target", toy.url, "--num-requests", 3, "--timeout", 0.5,
                             "--num-warmups", 0, "--request-rate", 100, "--slo-tbt-ms", 9000)  # fmt: skip
    assert values["statuses"] == {"ok": 2, "timeout": 1}
    (slow,) = [r for r in rows if r["status"] == "timeout"]
    assert (slow["output_tokens"], slow["slo_attained"]) == ("1", "0")
    assert values["slo_attainment"] == pytest.approx(2 / 3, abs=1e-6)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "--target"),
        (["--target", "http://h:1", "--backend", "vllm-grpc"], "--backend vllm-grpc"),
        (["--target", "nohost"], "must be grpc://HOST:PORT (--target"),
        (["--target", "grpc://h:1", "--backend", "openai"], "--backend openai"),
        (["--target", "h:1", "--backend", "opnai"], "did you mean openai?"),
        (["--target", "h:1", "--request-rate", "0"], "--request-rate"),
        (["--target", "h:1", "--request-rate", "nan"], "--request-rate"),
        (["--target", "h:1", "--seed", "-1"], "(--seed)"),
        (["--target", "h:1", "--burstiness", "1", "--cv", "1"], "--cv"),
        (["--target", "h:1", "--request-rate", "1", "--cv", "0.01"], "(--burstiness, --cv)"),
        (["--target", "h:1", "--trace", "a", "--prompts", "b"], "--trace and --prompts"),
        (["--target", "h:1", "--trace", "a", "--random-output-len", "3"], "--output-scale"),
        (["--target", "h:1", "--duration", "3", "--request-rate", "inf"], "--max-concurrency"),
        (["--target", "h:1", "--find-rate"], "--slo-ttft-ms"),
        (["--target", "h:1", "--find-rate", "--slo-ttft-ms", "9", "--max-concurrency", "3"], "--max-concurrency"),
        (["--target", "h:1", "--attainment", "90"], "--attainment"),
        (["--target", "h:1", "--goodput", "itl:3"], "ttft:MS"),
        (["--target", "h:1", "--goodput", "ttft:3", "--slo-tbt-ms", "3"], "give one"),
        (["--target", "h:1", "--goodput", "e2el:3", "--slo-e2e-ms", "3"], "give one"),
        (["--target", "h:1", "--goodput", "ttftl:3"], "e2el:MS"),
        (["--target", "h:1", "--goodput", "e2el:0"], "--goodput"),
        (["--target", "h:1", "--save-csv", "/no/such/place/x.csv"], "(--save-csv)"),
        (["--target", "h:1", "--api-key-file", "/no/such/file"], "(--api-key-file)"),
        (["--target", "h:1", "--tls-ca", "/no/such/file"], "(--tls-ca)"),
        (["--target", "https://h:1", "--tls-ca", "/no/such/file"], "(--tls-ca)"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(argv, says):
    code, out, err = bench(*argv)
    assert code == 2
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("target", ["127.0.0.1:1", "http://127.0.0.1:1"])
def test_nobody_there_is_one_line_and_exit_code_1(target):
    code, out, err = bench("--target", target)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "127.0.0.1:1" in err
    assert "--target" in err


def test_without_matplotlib_the_picture_is_refused_before_anything_is_sent(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = bench("--target", "127.0.0.1:1", "--save-png", "x.png")
    assert code == 1
    assert err == "apt-jax bench: --save-png needs matplotlib: pip install 'apt-jax[demo]'\n"


def test_ctrl_c_prints_what_was_measured(tmp_path):
    toy = ToyOpenAI(lambda number: [0.02] if number < 10 else [60.0])
    path = tmp_path / "r.json"
    with in_thread(toy.running):
        command = [sys.executable, "-m", "serve.cli", "bench", "--target", toy.url, "--request-rate", "50",
                   "--num-requests", "30", "--num-warmups", "0", "--save-json", str(path)]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        deadline_s = time.monotonic() + 60
        while len(toy.bodies) < 30:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert re.search(r"requests sent, completed +10, 10", out)
    assert re.search(r"interrupted +20", out)
    values = json.loads(path.read_text())
    assert (values["num_sent"], values["num_interrupted"], values["interrupted"]) == (10, 20, True)


# --- the rate that a server sustains -------------------------------------------------------------------------------


def test_the_search_finds_a_known_rate_and_shares_its_runs():
    runs = []

    def measure(rate: float, seed: int) -> Probe:
        runs.append((rate, seed))
        attainment = min(1.0, (10.0 + seed) / rate)  # 0.9 at 11.1, 12.2; 0.5 at 20, 22
        return Probe(rate=rate, seed=seed, attainment=attainment, num_sent=9, alone=False)

    high, low = find_rates(measure, targets=[0.9, 0.5], seeds=[0, 1], guess=1.0, tolerance=0.01)
    assert high.rate.rates == pytest.approx([10 / 0.9, 11 / 0.9], rel=0.01)
    assert low.rate.rates == pytest.approx([20.0, 22.0], rel=0.01)
    assert high.bounded
    assert low.bounded
    assert len(runs) == len(set(runs))


def test_the_search_ends_where_lower_rates_cannot_help_and_says_where_higher_ones_were_not_tried():
    runs = []

    def measure(rate: float, seed: int) -> Probe:
        runs.append(rate)
        return Probe(rate=rate, seed=seed, attainment=0.3, num_sent=9, alone=rate < 1.5)

    (found,) = find_rates(measure, targets=[0.9], seeds=[0], guess=4.0, tolerance=0.1)
    assert found.rate.rates == (0.0,)
    assert min(runs) > 0.9  # not down to a hundredth of a request a second
    (found,) = find_rates(
        lambda rate, seed: Probe(rate=rate, seed=seed, attainment=1.0, num_sent=9, alone=False),
        targets=[0.9], seeds=[0], guess=1.0, tolerance=0.1,
    )  # fmt: skip
    assert not found.bounded


def test_find_rate_finds_the_capacity_of_a_server(tmp_path):
    """One request at a time, 25 ms each, regular arrivals: request k waits k (0.025 - 1 / rate) seconds beyond its own
    25 ms, so that 80 % of 40 are within 100 ms up to the rate where the 32nd waits 75 ms."""
    sustained = 1 / (0.025 - 0.075 / 32)
    toy = ToyOpenAI(lambda _: [0.0], service_s=0.025)
    json_file, csv_file, png_file = (tmp_path / f"f.{end}" for end in ("json", "csv", "png"))
    with in_thread(toy.running):
        code, out, err = bench(
            "--target", toy.url, "--find-rate", "--attainment", 0.8, "--seeds", 1, "--request-rate", 30, "--cv", 0.05,
            "--num-requests", 40, "--random-output-len", 1, "--slo-ttft-ms", 100, "--tolerance", 0.05,
            "--save-json", json_file, "--save-csv", csv_file, "--save-png", png_file,
        )  # fmt: skip
    assert code == 0, err
    values = json.loads(json_file.read_text())
    # The bracket's width, and as much again for a machine that does other things.
    assert values["effective_rate"] == pytest.approx(sustained, rel=0.10)
    assert values["by_target"][0]["bounded"] is True
    assert f"{values['effective_rate']:.2f}" in out
    assert "TTFT 0.1 s" in out
    with csv_file.open(newline="") as file:
        assert [float(r["rate"]) for r in csv.DictReader(file)] == [r["rate"] for r in values["runs"]]
    assert png_file.stat().st_size > 1000


# --- sessions --------------------------------------------------------------------------------------------------------

CALLS = """session,request,subagent,parent,shared_blocks,think_s,prompt_tokens,output_tokens
a,0,,-1,0,0,40,2
a,1,,0,2,0.2,44,3
a,2,x,1,2,0.1,35,2
a,3,,1,2,0.3,50,2
b,0,,-1,0,0,30,2
b,1,,0,1,0.15,30,2
"""


def session_flags(path: Path, *others: object) -> list[object]:
    path.write_text(CALLS)
    return ["--trace", path, "--hash-block-tokens", 16, "--num-sessions", 2, "--request-rate", 20, *others]


@pytest.mark.parametrize("ids", [True, False], ids=["token ids", "words"])
def test_calls_of_sessions_follow_answers_and_share_prefixes(tmp_path, ids):
    toy = ToyOpenAI(lambda _: [0.03, 0.02])
    vocab = ["--vocab-size", 1000] if ids else []
    with in_thread(toy.running):
        values, rows = saved(
            tmp_path, "--target", toy.url, "--num-warmups", 0, *session_flags(tmp_path / "t.csv", *vocab)
        )
    assert values["statuses"] == {"ok": 6}
    assert values["load"]["num_sessions"] == 2
    calls = load.trace_source(str(tmp_path / "t.csv"), hash_block_tokens=16).trace.calls
    assert calls is not None
    by_length: dict[int, list[int]] = {}
    prompts = [body["prompt"] if ids else body["prompt"].split() for body in toy.bodies]
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(i)
    first, second, sub, last = (by_length[n][0] for n in (40, 44, 35, 50))
    b = by_length[30]
    keys = [body["prompt_cache_key"] for body in toy.bodies]
    assert keys[first] == keys[second] == keys[last]
    assert keys[b[0]] == keys[b[1]]
    assert len(set(keys)) == 3  # the subagent is a session of its own

    def common(i: int, j: int) -> int:
        return sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompts[i], prompts[j], strict=False))
        )

    chance = 0 if ids else 3  # the same word may follow
    for i, j, shared in (
        (first, second, 32),
        (second, sub, 32),
        (second, last, 32),
        (b[0], b[1], 16),
        (first, b[0], 0),
    ):
        assert shared <= common(i, j) <= shared + chance
    for before, after, think_s in ((first, second, 0.2), (second, sub, 0.1), (second, last, 0.3), (b[0], b[1], 0.15)):
        gap_s = toy.came_s[after] - toy.written_s[before][-1]
        assert gap_s >= think_s - 1e-3  # timers fire late, not early
    found = values["sessions"]
    assert (found["num_sessions"], found["num_calls"], found["num_completed"]) == (2, 6, 2)
    took_s: dict[str, float] = {}
    for row in rows:
        name = row["session"].rpartition(".")[0]
        took_s[name] = took_s.get(name, 0.0) + float(row["e2e_ms"]) / 1e3
    assert found["completion_mean_s"] == pytest.approx(sum(took_s.values()) / 2, abs=1e-4)
    assert found["slowdown_mean"] is None


def test_a_call_of_a_session_goes_on_after_one_that_has_failed(tmp_path):
    toy = ToyOpenAI(lambda number: 503 if number == 0 else [0.01, 0.01])
    json_file = tmp_path / "run.json"
    with in_thread(toy.running):
        code, out, _ = bench(
            "--target", toy.url, "--num-warmups", 0, "--json", json_file, *session_flags(tmp_path / "t.csv")
        )
    values = json.loads(json_file.read_text())
    assert code == 0
    assert (values["num_sent"], values["num_completed"]) == (6, 5)
    assert values["sessions"]["num_completed"] == 1
    assert "sessions completed, calls" in out


def test_sessions_are_those_of_the_simulator(tmp_path):
    config = SimulationConfig(trace="agents", num_sessions=6, rate=0.1, max_think_s=5.0, scale_tokens=1 / 64, seed=3)
    source = load.trace_source("agents", scale_tokens=1 / 64)
    drawn, arrivals = sample_workload(source.trace, config), load.SessionLoad(source, config, "x")
    due = {request.index: request for request in arrivals.known()}
    assert len(due) == 6
    seen = 0
    while due:
        index, request = due.popitem()
        seen += 1
        assert drawn.prompts is not None
        assert request.numbers is not None
        assert request.numbers.tolist() == drawn.prompts[index].tolist()
        assert (request.prompt_tokens, request.max_tokens) == (drawn.prompt_tokens[index], drawn.output_tokens[index])
        arrivals.ended(index, request.at_s + 1.0)
        for later in arrivals.known():
            assert arrivals.calls.follows[later.index] == index
            assert later.at_s == pytest.approx(request.at_s + 1.0 + arrivals.calls.think_s[later.index])
            due[later.index] = later
    assert seen == drawn.prompt_tokens.size


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--request-rate", 1, "--num-requests", 3], "leave out --num-requests"),
        (["--request-rate", 1, "--max-concurrency", 3], "leave out --max-concurrency"),
        (["--request-rate", 1, "--duration", 3], "leave out --duration"),
        ([], "the number of sessions per second (--rate) or at once (--concurrent-sessions)"),
        (["--request-rate", 1, "--concurrent-sessions", 2], "leave out the rate"),
    ],
)
def test_what_sessions_cannot_have_is_told(tmp_path, flags, says):
    (tmp_path / "t.csv").write_text(CALLS)
    toy = ToyOpenAI(lambda _: [0.01])
    with in_thread(toy.running):
        code, _, err = bench("--target", toy.url, "--trace", tmp_path / "t.csv", "--hash-block-tokens", 16, *flags)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert says in err
    assert not toy.bodies


def test_flags_of_sessions_need_sessions():
    toy = ToyOpenAI(lambda _: [0.01])
    with in_thread(toy.running):
        code, _, err = bench("--target", toy.url, "--trace", "humaneval", "--max-len", 9999, "--num-sessions", 3)
    assert code == 2
    assert "humaneval is no trace of sessions; leave out --num-sessions" in err


# --- files ---------------------------------------------------------------------------------------------------------


def test_json_says_where_it_comes_from_and_csv_reads_back(tmp_path):
    toy = ToyOpenAI(lambda _: [0.01, 0.01])
    png = tmp_path / "x.png"
    with in_thread(toy.running):
        values, rows = saved(tmp_path, "--target", toy.url, "--num-requests", 5, "--seed", 3,
                             "--goodput", "ttft:500", "tbt:400", "e2el:9000", "--save-png", png)  # fmt: skip
    assert png.stat().st_size > 1000
    assert values["command"].startswith(f"apt-jax bench --target {toy.url}")
    assert values["slo_ms"] == {"slo_ttft_ms": 500.0, "slo_tbt_ms": 400.0, "slo_e2e_ms": 9000.0}
    assert values["versions"]["apt-jax"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", values["date"])
    assert values["load"]["seed"] == 3
    assert values["model"] == "toy"
    assert tuple(rows[0]) == report.COLUMNS
    assert [int(r["index"]) for r in rows] == list(range(5))


def test_requests_have_the_class_of_their_line_or_of_the_run(tmp_path):
    arrivals = load.Arrivals(rate=math.inf, num_requests=3)
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    plain = load.prompts_source(str(lines), output_len=4)
    assert {r.slo_class for r in load.requests(plain, arrivals, 0)} == {None}
    low = dataclasses.replace(plain, slo_class="be")
    assert {r.slo_class for r in load.requests(low, arrivals, 0)} == {"be"}
    lines.write_text('{"prompt": "a"}\n{"prompt": "b", "class": "be"}\n')
    source = load.prompts_source(str(lines), output_len=4)
    found = {r.prompt: r.slo_class for r in load.requests(source, arrivals, 0)}
    assert found == {"a": "rt", "b": "be"}
    lines.write_text('{"prompt": "a", "class": "flex"}\n')
    with pytest.raises(ConfigError, match="line 1: class='flex' must be rt or be"):
        load.prompts_source(str(lines), output_len=4)


def test_classes_are_summed_up_apart():
    def outcome(slo_class: str | None, ttft_s: float) -> Outcome:
        request = load.BenchRequest(index=0, at_s=0.0, max_tokens=2, slo_class=slo_class)
        times_s = [1.0 + ttft_s, 1.5 + ttft_s]
        slo = SLO(ttft_s=0.3)
        return Outcome(request=request, slo=slo, due_s=None, sent_s=1.0, token_times_s=times_s, finished_s=times_s[-1])

    health = ClientHealth(lateness_s=[], lag_s=[], process_cpu=0.0, loop_cpu=0.0)

    def values(outcomes: list[Outcome]) -> dict[str, Any]:
        run = Run(
            outcomes=outcomes, num_interrupted=0, interrupted=False, start_s=0.0, wall_s=9.0, peak_concurrency=1,
            client=health,
        )  # fmt: skip
        return report.summary(run)

    found = values([outcome("rt", 0.1), outcome("be", 4.0), outcome("rt", 0.2)])
    assert list(found["by_class"]) == ["rt", "be"]
    assert [found["by_class"][c]["num_sent"] for c in ("rt", "be")] == [2, 1]
    assert [found["by_class"][c]["slo_attainment"] for c in ("rt", "be")] == [1.0, 0.0]
    names = [name for name, _ in report.rows(found, SLO(ttft_s=0.3))]
    assert {"rt: SLO attainment (%)", "be: TTFT p50 / p90 / p99 (ms)"} <= set(names)
    assert "end-to-end attainment (%)" not in names
    assert ("end-to-end attainment (%)", "100.0") in report.rows(found, SLO(e2e_s=9.0))
    assert values([outcome(None, 0.1), outcome(None, 0.2)])["by_class"] == {}


def test_a_row_loses_nothing_of_an_outcome():
    request = load.BenchRequest(index=4, at_s=1.5, max_tokens=3, slo_class="be")
    outcome = Outcome(
        request=request, slo=SLO(ttft_s=0.3, tbt_s=0.05, e2e_s=0.39), due_s=11.5, sent_s=11.501,
        token_times_s=[11.751, 11.781, 11.881], finished_s=11.9, finish_reason="length", prompt_tokens=7,
        num_preemptions=2, error='a "quoted", text',
    )  # fmt: skip
    row = report.csv_row(outcome, 10.0)
    file = io.StringIO()
    writer = csv.DictWriter(file, report.COLUMNS)
    writer.writeheader()
    writer.writerow(row)
    (back,) = csv.DictReader(io.StringIO(file.getvalue()))
    assert back == {k: str(v) for k, v in row.items()}
    assert (back["due_s"], back["sent_s"], back["class"]) == ("1.5", "1.501", "be")
    assert float(back["ttft_ms"]) == pytest.approx(250, abs=1e-3)
    assert [float(g) for g in back["gaps_ms"].split()] == pytest.approx([30, 100], abs=1e-3)
    assert float(back["p99_tbt_ms"]) == pytest.approx(99.3, abs=1e-3)
    assert float(back["p99_tbt_drop_first_ms"]) == pytest.approx(100, abs=1e-3)
    assert float(back["e2e_ms"]) == pytest.approx(380, abs=1e-3)  # to the last token, not to the end
    attained = ("ttft_attained", "tbt_attained", "e2e_attained", "slo_attained")
    assert [back[name] for name in attained] == ["1", "0", "1", "0"]


# --- our servers ---------------------------------------------------------------------------------------------------

BACKENDS = ("aptjax-grpc", "vllm-grpc", "openai", "openai-chat")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Both ports over a real model with few shapes to compile, and a chat template."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "chat.jinja").write_text(CHAT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APT_JAX_CACHE_DIR", calibrations_apart(folder))
        patch.setattr("apt_jax.frontend.builder.use_compile_cache", lambda: False)
        llm = LLM(str(write_shallow_model(folder / "model")), served_model_name="shallow", max_num_seqs=2,
                  chat_template=str(folder / "chat.jinja"), max_num_batched_tokens=64, max_model_len=128,
                  num_blocks_override=64, warm_up=False, use_tqdm=False)  # fmt: skip
    with in_thread(lambda: http_serving(llm.parts)) as served:
        yield served
    assert llm.parts.chat_template is not None
    llm.parts.chat_template.close()


def slo_counts(port: int) -> float:
    """Requests with both objectives that the server has judged."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    found = re.findall(r'^aptjax:slo_(?:attained|missed)_total\{.*slo="all".*\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_measures_a_real_model(real, tmp_path, backend):
    port = real.grpc_server.port if backend.endswith("grpc") else real.server.port
    before = slo_counts(real.server.port)
    values, rows = saved(
        tmp_path, "--backend", backend, "--target", f"127.0.0.1:{port}", "--request-rate", 50, "--num-requests", 6,
        "--random-input-len", 40, "--random-output-len", 12, "--slo-e2e-ms", 60_000,
    )  # fmt: skip
    assert values["statuses"] == {"ok": 6}
    assert values["model"] == "shallow"
    assert values["e2e_attainment"] == 1.0
    assert values["slo_attainment"] == 1.0
    assert all(r["output_tokens"] == "12" and r["finish_reason"] == "length" for r in rows)
    lengths = [int(r["prompt_tokens"]) for r in rows]
    # Token ids are taken as they are; the length of a chat is met as well as words allow.
    assert lengths == [40] * 6 if backend != "openai-chat" else all(28 <= n <= 52 for n in lengths)
    assert (values["preemptions"] is not None) is (backend == "aptjax-grpc")
    # The server has heard of the objectives, for the request before the counted ones too.
    assert slo_counts(real.server.port) - before == 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_of_sessions_find_what_the_server_has_cached(real, tmp_path, backend):
    port = real.grpc_server.port if backend.endswith("grpc") else real.server.port
    seed = BACKENDS.index(backend)
    values, rows = saved(
        tmp_path, "--backend", backend, "--target", f"127.0.0.1:{port}", "--seed", seed, *session_flags(tmp_path / "t.csv")
    )  # fmt: skip
    assert values["statuses"] == {"ok": 6}
    assert values["cached_tokens"] == sum(int(row["cached_tokens"]) for row in rows) > 0
    if backend != "openai-chat":  # words are not of a length that is known
        assert values["cached_tokens"] == 3 * 32 + 16


def test_bundled_traces_without_what_the_server_has_no_room_for(real, tmp_path):
    target = f"127.0.0.1:{real.grpc_server.port}"
    values, rows = saved(tmp_path, "--target", target, "--num-requests", 4, "--max-concurrency", 2)
    assert values["load"]["source"] == "sharegpt"
    assert values["load"]["arrivals"] == "closed loop"
    assert all(int(r["prompt_tokens"]) + int(r["output_tokens"]) <= 128 for r in rows)
    assert values["statuses"] == {"ok": 4}


def test_what_the_server_refuses_as_wrong_is_wrong_usage(real):
    for target in (f"127.0.0.1:{real.grpc_server.port}", f"http://127.0.0.1:{real.server.port}"):
        code, _, err = bench("--target", target, "--model", "nope", "--random-input-len", 4)
        assert (code, err.count("\n")) == (2, 1)
        assert "'nope' is not served here" in err
        code, _, err = bench("--target", target, "--random-input-len", 500)
        assert (code, err.count("\n")) == (2, 1)
        assert "128" in err


def test_prompts_classes_and_refusals_reach_an_engine(tmp_path):
    """Over an engine whose queue is full: the rest is refused, and counted as not attained."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hello", "output_tokens": 8}\n{"prompt": [10, 11, 12]}\n')
    parts = toy_parts(max_num_queued_reqs=2, max_num_seqs=2)
    with in_thread(lambda: http_serving(parts)) as served:
        executor_of(parts).gate.clear()
        threading.Timer(1.5, executor_of(parts).gate.set).start()
        target = f"127.0.0.1:{served.grpc_server.port}"
        values, rows = saved(tmp_path, "--target", target, "--prompts", prompts, "--num-requests", 12, "--num-warmups", 0,
                             "--ignore-eos", "--random-output-len", 5, "--slo-ttft-ms", 60_000, "--vocab-size", 200)  # fmt: skip
    refused = values["statuses"]["RESOURCE_EXHAUSTED"]
    assert refused + values["statuses"]["ok"] == 12
    assert refused >= 6
    assert values["slo_attainment"] == pytest.approx((12 - refused) / 12, abs=1e-5)
    assert {(r["prompt_tokens"], r["output_tokens"]) for r in rows if r["status"] == "ok"} <= {("6", "8"), ("3", "5")}
    assert all(r["error"] and r["slo_attained"] == "0" for r in rows if r["status"] != "ok")


def test_objectives_become_headers_without_exponents():
    target = Target(address="x", slo=SLO(ttft_s=1e-6, tbt_s=12_345.5, e2e_s=86_400.0))
    assert target.slo_headers() == {"x-slo-ttft-ms": "0.001", "x-slo-tpot-ms": "12345500", "x-slo-e2e-ms": "86400000"}
    assert Target(address="x").slo_headers() == {}


def test_keys_and_tls_at_both_ports(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    ca, cert, key, key_file = (str(tmp_path / n) for n in ("ca.pem", "cert.pem", "cert.key", "keys"))
    authority.cert_pem.write_to_path(ca)
    issued.private_key_pem.write_to_path(key)
    for number, pem in enumerate(issued.cert_chain_pems):
        pem.write_to_path(cert, append=number > 0)
    Path(key_file).write_text("sk-0123456789abcdefghij\n")
    keys, tls = ApiKeys(["sk-0123456789abcdefghij"]), Tls(cert, key)
    settings = {
        "app": {"keys": keys}, "http": {"tls": tls}, "grpc": {"keys": keys, "tls": tls},
        "base": "https://localhost:{port}", "verify": False,
    }  # fmt: skip
    with in_thread(lambda: http_serving(toy_parts(), **settings)) as served:
        for backend, target in [
            ("aptjax-grpc", f"localhost:{served.grpc_server.port}"),
            ("vllm-grpc", f"localhost:{served.grpc_server.port}"),
            ("openai", f"https://localhost:{served.server.port}"),
        ]:
            load_flags = ["--backend", backend, "--target", target, "--num-requests", 2, "--random-input-len", 9,
                          "--random-output-len", 3]  # fmt: skip
            values, _ = saved(tmp_path, *load_flags, "--tls-ca", ca, "--api-key-file", key_file)
            assert values["statuses"] == {"ok": 2}
            code, _, err = bench(*load_flags, "--tls-ca", ca)
            assert (code, err.count("\n")) == (1, 1)
            assert "no valid API key; give one with --api-key-file FILE or in APT_JAX_API_KEY" in err
            if backend == "openai":  # with --model the first request is what fails
                code, _, err = bench(*load_flags, "--tls-ca", ca, "--model", "toy")
                assert (code, err.count("\n")) == (1, 1)
                assert "401: no valid API key; give one with --api-key-file" in err
            code, _, err = bench(*load_flags, "--api-key-file", key_file)
            assert (code, err.count("\n")) == (1, 1)
