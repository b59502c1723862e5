"""Short versions of the runs of `benchmarks.server`: a real server and real clients, a few seconds each."""

import contextlib
import json
from collections.abc import Generator
from pathlib import Path

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


@pytest.mark.usefixtures("shared")
def test_soak(tmp_path, model, capsys):
    found = run(tmp_path, model, "soak", "--prompt-len", "4", "24", "--output-len", "16", "32", "--streams", "12", "--duration", "1",
                "--warm-up", "0", "--requests", "20", "--num-blocks", "5", "--memory-share", "0.5")  # fmt: skip
    assert found["statuses"]["complete"] > 0
    assert set(found["by_protocol"]) == {"http", "grpc", "vllm"}
    assert found["preemptions"] > 0  # the pool is small enough
    assert found["memory_mib_every_10_s"]
    assert "all blocks free" in capsys.readouterr().out


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
