"""Every benchmark that compares policies explains itself."""

import importlib

import pytest

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    "module",
    [
        "scheduling.apt_plus",
        "scheduling.best_effort_bound",
        "scheduling.live_attainment",
        "scheduling.schedulers",
        "scheduling.simulator_fidelity",
        "scheduling.vllm_scheduler",
        "server.goodput",
        "paper.apt_serve",
        "paper.bros",
        "paper.host_time",
        "paper.infermax",
    ],
)
def test_help(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{module}").main(["--help"])
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_a_benchmark_without_requests_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["cpu_throughput", "--concurrency", "0"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module("benchmarks.engine.cpu_throughput").main()
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--concurrency" in last
    assert "'0'" in last
