"""`benchmarks.server.goodput`: two servers under the same arrivals, and what is shown of the results."""

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from apt_jax.config import SLO
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate
from apt_jax.sim.workload import Workload
from benchmarks.server import goodput
from serve.bench import load
from tests.support.small_models import SMALL_ENGINE, write_small_model

RUN = {
    "ttft_attainment": 1.0, "tbt_attainment": 1.0, "requests": 10, "completed": 10, "goodput_per_s": 1.0,
    "output_tokens_per_s": 50.0, "ttft_p50_ms": 20.0, "ttft_p99_ms": 30.0, "tbt_p50_ms": 5.0, "tbt_p99_ms": None,
    "warning": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("attainment", "expected"),
    [([1.0, 0.95, 0.85], 2.5), ([0.9, 0.8, 0.1], 1.0), ([0.5, 0.4, 0.3], None), ([1.0, 1.0, 0.9], None)],
)
def test_the_rate_lies_where_attainment_falls_through_the_target(
    attainment: list[float], expected: float | None
) -> None:
    assert goodput.rate_at([1.0, 2.0, 3.0], attainment, 0.9) == pytest.approx(expected)


def test_kept_results_are_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = []
    for name, shares in {"ours": (1.0, 0.95, 0.5), "theirs": (0.95, 0.5, 0.1)}.items():
        runs = [
            RUN | {"server": name, "rate": rate, "seed": seed, "attainment": share}
            for rate, share in zip((1.0, 2.0, 3.0), shares, strict=True)
            for seed in range(2)
        ]
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"slo_ttft_ms": 2000.0, "slo_tbt_ms": 500.0, "runs": runs}))
    picture = tmp_path / "goodput.png"
    assert goodput.main(["--from", *map(str, files), "--png", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "ours: 90 % attained up to 2.11 requests/s" in shown
    assert "theirs: 90 % attained up to 1.11 requests/s" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_simulator_gets_the_requests_of_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = {"slo_ttft_ms": 1000.0, "slo_tbt_ms": 1000.0, "duration_s": 20.0, "max_len": 2048}
    kept, whole = tmp_path / "kept.json", tmp_path / "whole.json"
    runs = [RUN | {"server": name, "rate": 4.0, "seed": 3, "attainment": 0.5} for name in ("ours", "theirs")]
    kept.write_text(json.dumps({**setting, "runs": runs}))
    flags = "--model opt-13b --scheduling-policy fcfs"
    assert goodput.main(["--from", str(kept), "--simulate", f"ours={flags}", "--json", str(whole)]) == 0
    (found,) = json.loads(whole.read_text())["simulated"]
    assert (found["server"], found["rate"], found["seed"]) == ("ours", 4.0, 3)
    # The same requests as `apt-jax bench` sends, given to the simulator by hand.
    requests = load.requests(
        load.trace_source("sharegpt", max_len=2048), load.Arrivals(rate=4.0, burstiness=1.0, duration_s=20.0), 3
    )
    workload = Workload(
        prompt_tokens=np.array([r.prompt_tokens for r in requests], np.int32),
        output_tokens=np.array([r.max_tokens for r in requests], np.int32),
        arrival_s=np.array([r.at_s for r in requests]),
        best_effort=np.zeros(len(requests), np.bool_),
    )
    config = SimulationConfig(model="opt-13b", policy="fcfs", slo=SLO(1.0, 1.0), num_requests=len(requests))
    assert found["attainment"] == simulate(config, workload=workload).summary.slo_attainment
    assert "simulated" in capsys.readouterr().out


def test_results_of_other_objectives_are_not_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, ms in (("a", 1000.0), ("b", 2000.0)):
        (tmp_path / name).write_text(json.dumps({"slo_ttft_ms": ms, "slo_tbt_ms": 500.0, "runs": []}))
    with pytest.raises(SystemExit):
        goodput.main(["--from", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "b: slo_ttft_ms is another one than in" in capsys.readouterr().err


@pytest.mark.in_turn(4, group="whole commands")
def test_two_servers_get_the_same_arrivals(tmp_path: Path) -> None:
    model, file = write_small_model(tmp_path), tmp_path / "goodput.json"
    serve = shlex.join([sys.executable, "-m", "serve.cli", "serve", str(model), *SMALL_ENGINE, "--grpc-port", "0"])
    options = "--rates 20 --seeds 1 --duration 1 --slo-ttft-ms 1000 --slo-tbt-ms 1000"
    servers = [f"{policy}={serve} --port {{port}} --scheduling-policy {policy}" for policy in ("fcfs", "apt")]
    given = [argument for server in servers for argument in ("--server", server)]
    bench = "--random-input-len 8 --random-output-len 4 --vocab-size 256 --num-warmups 0"
    assert goodput.main([*given, *options.split(), "--bench-flags", bench, "--json", str(file)]) == 0
    first, second = json.loads(file.read_text())["runs"]
    assert [first["server"], second["server"]] == ["fcfs", "apt"]
    assert first["requests"] == second["requests"] > 0
    assert first["completed"] == first["requests"]


def test_a_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"broken: .* no such option"),
        goodput.running("broken", "echo no such option; exit 2; {port}"),
    ):
        pass


def test_a_command_without_a_port_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        goodput.main(["--server", "ours=apt-jax serve"])
    assert "'ours=apt-jax serve' must be NAME=COMMAND with {port} in it" in capsys.readouterr().err
