"""Short versions of the runs of `benchmarks.server`: a real server and real clients, a few seconds each."""

import contextlib
import json
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.server import clients, overhead, overload, report, soak
from benchmarks.server import shutdown as stop
from benchmarks.server.__main__ import main
from benchmarks.server.clients import Record
from benchmarks.server.offline import Answer, Offline
from tests.support.small_models import SMALL_ENGINE, write_small_model

ENGINE, SERVER = SMALL_ENGINE[:-2], SMALL_ENGINE[-2:]
SHAPES = ["--prompt-len", "4", "24", "--output-len", "4", "24"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def offline(model: Path) -> Generator[Offline]:
    """The process of the engine that answers alone."""
    with Offline(str(model), ENGINE) as made:
        yield made


@pytest.fixture
def shared(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs have it."""
    for module in (soak, overload, stop, overhead):
        monkeypatch.setattr(module, "Offline", lambda *_, **__: contextlib.nullcontext(offline))


def run(tmp_path: Path, model: Path, name: str, *arguments: str, expected: int = 0) -> dict:
    file = tmp_path / "run.json"
    common = [
        "--model",
        str(model),
        "--vocab-size",
        "256",
        "--engine-flags",
        " ".join(ENGINE),
        "--server-flags",
        " ".join(SERVER),
        "--json",
        str(file),
    ]
    assert main([name, *common, *arguments]) == expected, file.read_text()
    found = json.loads(file.read_text())
    assert found["run"] == name
    assert found["versions"]["jax"]
    return found


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.usefixtures("shared")
def test_soak(tmp_path, model, capsys):
    plot = tmp_path / "memory.svg"
    # One block more or less of memory means nothing in so short a run.
    found = run(tmp_path, model, "soak", "--prompt-len", "4", "24", "--output-len", "16", "32", "--streams", "12", "--duration", "1",
                "--warm-up", "0", "--requests", "20", "--num-blocks", "5", "--round-size", "30", "--memory-growth", "inf",
                "--tokenize-share", "0.3", "--policy", "apt", "--plot", str(plot))  # fmt: skip
    assert found["statuses"]["complete"] > 0
    assert set(found["by_protocol"]) == {"http", "grpc", "vllm", "tokenize"}
    assert found["preemptions"] > 0  # the pool is small enough
    streams = found["requests"] - found["by_protocol"]["tokenize"]
    assert streams == 30 * len(found["drains"])
    assert plot.stat().st_size
    out = capsys.readouterr().out
    assert "no block used at each drain" in out
    assert "5 of them structured" in " ".join(out.split())


def drain(requests: int, rss_mib: float) -> soak._Drain:
    return soak._Drain(
        requests=requests, elapsed_s=0.0, rss_mib=rss_mib, descriptors=18, threads=41, used_blocks=0, left=0
    )


def test_growth_of_memory_is_told_from_noise():
    rng = np.random.default_rng(0)

    def upper(mib_per_10k: float, first_mib: float = 800.0, spread_mib: float = 0.5) -> float:
        noise = rng.normal(0.0, spread_mib, 100)
        drains = [drain(0, first_mib)]
        drains += [drain(n, 850 + mib_per_10k * n / 1e4 + noise[i]) for i, n in enumerate(range(2000, 52_000, 500))]
        found = soak._growth(drains, 2000)
        assert found["requests"] == 49_500
        assert found["mib_per_10k"] == pytest.approx(mib_per_10k, abs=0.3)
        return found["upper_mib_per_10k"]

    assert upper(0.0) < 1.0
    assert upper(2.0) > 1.0
    assert upper(0.5, spread_mib=0.0) == pytest.approx(0.5)
    assert soak._growth([drain(0, 1.0), drain(3000, 1.0)], 2000)["upper_mib_per_10k"] == float("inf")  # too few


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.usefixtures("shared")
def test_overload(tmp_path, model):
    # How fast a busy machine is, and so what it attains, is not this test's business.
    found = run(tmp_path, model, "overload", *SHAPES, "--duration", "1", "--capacity-duration", "0.5", "--queued", "8",
                "--refusal-ms", "60000", "--attainment", "-1", "--slo-ttft-ms", "60000", "--slo-tbt-ms", "60000",
                "--capacity-streams", "8", "--times", "4", "--requests", "20", "--processes", "1")  # fmt: skip
    assert found["statuses"]["complete"] == found["accepted"]
    assert found["requests"] > found["accepted"] > 0
    assert found["refusal_ms"]["p99"] > 0
    assert found["health_failures"] == 0


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.parametrize(
    "codes",
    [
        {"SIGTERM, 30 s": 0, "engine thread": 1},
        pytest.param({"SIGTERM, 0.5 s": 0, "kill -9": -9}, marks=pytest.mark.slow),
    ],
    ids=lambda codes: ", ".join(codes),
)
@pytest.mark.usefixtures("shared")
def test_stop(tmp_path, model, codes):
    # Long outputs: some requests are being served at any time.
    found = run(tmp_path, model, "stop", "--requests", "20", "--prompt-len", "4", "12", "--output-len", "44", "50", "--streams", "8",
                "--repeats", "1", "--load-time", "0.2", "--ends", *codes)  # fmt: skip
    assert {end["end"]: end["exit_code"] for end in found["ends"]} == codes


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.usefixtures("shared")
def test_overhead(tmp_path, model):
    found = run(tmp_path, model, "overhead", "--streams", "2", "--batches", "2", "--repeats", "1", "--prompt-len", "8",
                "--output-len", "8", "--ways", "shared", "--limit", "1000")  # fmt: skip
    assert [row["what"] for row in found["rows"]] == ["LLM", "AsyncEngine", "http", "grpc", "vllm"]
    assert all(row["tokens"] == 32 and row["cpu_us_per_token"] > 0 for row in found["rows"])


# --- detection of failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "text", "reason", "problem"),
    [
        ([1, 2, 3], "abc", "length", ""),
        ([1, 2], "ab", None, ""),
        ([1, 2], None, None, ""),
        ([1, 2], "ab", "length", "2 tokens, not 3"),
        ([1, 2, 2, 3], "abbc", "length", "token 2 of 3 differs"),
        ([1, 2, 3, 3], "abc", "length", "4 tokens, not 3"),
        ([1, 3], "ac", None, "token 1 of 2 differs"),
        ([1, 2, 3], "abd", "length", "the text differs"),
        ([1, 2, 3], "abc", "stop", "ended with stop, not length"),
    ],
)
def test_a_difference_from_the_offline_answer_is_reported(ids, text, reason, problem):
    answer = Answer(token_ids=(1, 2, 3), text="abc", finish_reason="length")
    assert clients._difference(answer, ids, text, reason) == problem


def test_a_broken_promise_is_exit_code_1(tmp_path, model, capsys, monkeypatch):
    def broken(args):
        found = report.Run("overload", args)
        found.promise("something", False, "not so")
        return found

    monkeypatch.setattr(overload, "run", broken)
    found = run(tmp_path, model, "overload", expected=1)
    assert found["promises"] == [{"what": "something", "kept": False, "found": "not so"}]
    assert "BROKEN" in capsys.readouterr().out


def test_attainment_by_the_clients_clock():
    class Limits:
        slo_ttft_ms, slo_tbt_ms = 100.0, 50.0

    def attained(**fields) -> bool:
        given = {
            "protocol": "http",
            "started_s": 1.0,
            "first_s": 1.09,
            "status": "complete",
            "p99_gap_s": 0.04,
        }
        return overload._attained(Record(**{**given, **fields}), Limits)  # type: ignore[arg-type]

    assert attained()
    assert not attained(first_s=1.11)
    assert not attained(first_s=None)
    assert not attained(p99_gap_s=0.06)
    assert not attained(status="cut off")
