"""`apt-jax simulate`: flags, result keys, bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from apt_jax.sim.trace import load_trace
from serve.cli import main
from tests.support.snapshots import parser_of

KEYS = {
    "slo_attainment",
    "ttft_attainment",
    "tbt_attainment",
    "ttft_s",
    "tbt_s",
    "tokens_per_s",
    "preemptions",
    "recomputed_tokens",
    "recomputed_by_cause",
    "hidden_token_fraction",
    "schedule_ms",
    "iterations",
    "sim_wall_s",
}
QUICK = ["--trace", "humaneval", "--num-requests", "20", "--output-scale", "0.25"]


def test_one_run_writes_the_keys_of_the_contract(tmp_path, capsys):
    path = tmp_path / "out.json"
    code = main(["simulate", *QUICK, "--rate", "4", "--model", "opt-13b", "--hardware", "a100-40gb",
                 "--cv", "2", "--seed", "3", "--scheduling-policy", "apt", "--cache", "hybrid",
                 "--slo-ttft-ms", "500", "--slo-tbt-ms", "500", "--json", str(path)])  # fmt: skip
    assert code == 0
    values = json.loads(path.read_text())
    assert set(values) >= KEYS
    assert set(values["ttft_s"]) == {"p50", "p90", "p99"}
    assert set(values["schedule_ms"]) == {"p50", "p99"}
    assert 0 <= values["slo_attainment"] <= 1
    assert "SLO attainment" in capsys.readouterr().out


def test_sweep_over_rates_policies_and_seeds(tmp_path, capsys):
    path = tmp_path / "out.json"
    args = ["simulate", *QUICK, "--rates", "2,8", "--scheduling-policy", "fcfs,apt", "--seeds", "2",
            "--workers", "1", "--cache", "kv", "--store", str(tmp_path / "s.jsonl"),
            "--png", str(tmp_path / "x.png"), "--json", str(path)]  # fmt: skip
    assert main(args) == 0
    assert len(json.loads(path.read_text())["runs"]) == 8
    assert (tmp_path / "x.png").stat().st_size > 1000
    assert "fcfs" in capsys.readouterr().out


def test_find_rate(tmp_path, capsys):
    path = tmp_path / "out.json"
    args = [
        "simulate",
        *QUICK,
        "--find-rate",
        "0.9",
        "--seeds",
        "1",
        "--workers",
        "1",
        "--json",
        str(path),
    ]
    assert main(args) == 0
    assert json.loads(path.read_text())["effective_rate"] > 1
    assert "requests/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        (["--rate", "4"], ""),
        (["--rates", "4,8", "--seeds", "2"], "2 seeds, "),
        (["--find-rate", "0.9", "--seeds", "1"], ""),
    ],
)
def test_tables_say_what_was_simulated(runs, named, capsys):
    args = ["--slo-ttft-ms", "500", "--slo-tbt-ms", "1500", "--workers", "1", "--cache", "kv"]
    assert main(["simulate", *QUICK, *runs, *args]) == 0
    said = f"opt-13b on a100-40gb, humaneval, 20 requests, {named}kv cache, TTFT 0.5 s, P99 TBT 1.5 s"
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "is_told"),
    [
        (["apt-released"], True),
        (["fcfs,apt-released"], True),
        (["apt-released", "--hidden-attention", "reproject"], False),
        (["apt-released", "--cache", "kv"], False),
        (["apt"], False),
        (["apt-released", "--model", "llama-2-7b", "--hardware", "a100-80gb"], False),
    ],
)
def test_a_policy_that_assumes_reprojection_says_so_where_it_is_not_simulated(given, is_told, capsys):
    assert main(["simulate", *QUICK, "--rate", "2", "--workers", "1", "--scheduling-policy", *given]) == 0
    assert ("assumes that hidden caches are reprojected" in capsys.readouterr().err) == is_told


def test_tables_are_for_people(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["simulate", *QUICK, "--rate", "2", "--scheduling-policy", "fcfs", "--cache", "kv"]) == 0
    out = capsys.readouterr().out
    assert "{" not in out
    assert "\nfcfs: opt-13b on a100-40gb, humaneval, 20 requests, kv cache, TTFT 1 s, P99 TBT 1 s\n" in f"\n{out}"
    assert (
        main(["simulate", *QUICK, "--rates", "2,3", "--scheduling-policy", "fcfs", "--cache", "kv", "--workers", "1"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert "SLO attainment, every gap in time (%)" in [line.strip() for line in lines]


def test_help_names_the_default_policies_of_simulate_and_serve():
    assert "(default: apt; of apt-jax serve: apt-plus)" in " ".join(parser_of("simulate").format_help().split())


def test_an_end_to_end_objective_is_in_the_table_and_results(tmp_path, capsys):
    path = tmp_path / "out.json"
    args = ["simulate", *QUICK, "--rate", "4", "--scheduling-policy", "fcfs", "--cache", "kv", "--json", str(path)]
    shares = []
    for given in ([], ["--slo-e2e-ms", "1"], ["--slo-e2e-ms", "3600000"]):
        assert main([*args, *given]) == 0
        values, said = json.loads(path.read_text(), parse_constant=pytest.fail), capsys.readouterr().out
        assert ("end-to-end attainment" in said) is ("end to end p50" in said) is bool(given)
        assert ("end to end 3600 s" in " ".join(said.split())) is ("3600000" in given)
        assert values["config"]["slo"]["e2e_s"] == (float(given[1]) / 1e3 if given else None)
        assert values["e2e_s"]["p99"] >= values["ttft_s"]["p99"]
        shares.append((values["e2e_attainment"], values["slo_attainment"]))
    assert shares[1] == (0.0, 0.0)
    assert shares[2] == shares[0]


def test_a_generated_trace_may_have_an_end_to_end_objective_alone(tmp_path, capsys):
    path = tmp_path / "out.json"
    args = ["simulate", "--trace", "batch-synthetic-data", "--scale-tokens", "1/64", "--num-requests", "5"]
    more = ["--scheduling-policy", "fcfs", "--cache", "kv", "--workers", "1", "--seeds", "1", "--json", str(path)]
    assert main([*args, *more, "--rate", "1"]) == 0
    values, said = json.loads(path.read_text(), parse_constant=pytest.fail), " ".join(capsys.readouterr().out.split())
    assert values["config"]["slo"] == {"ttft_s": None, "tbt_s": None, "e2e_s": 2080.0}
    assert "kv cache, end to end 2080 s" in said
    assert values["slo_attainment"] == values["e2e_attainment"] == 1.0


def test_a_rate_that_is_a_burst_is_said(capsys):
    args = [*QUICK, "--scheduling-policy", "fcfs", "--seeds", "1", "--workers", "1"]
    assert main(["simulate", *args, "--num-requests", "5", "--find-rate", "0.5"]) == 0
    assert "all 5 requests arrive within" in " ".join(capsys.readouterr().out.split())


def test_requests_that_never_fit_are_counted(tmp_path, capsys):
    path = tmp_path / "out.json"
    args = ["simulate", "--num-requests", "5", "--rate", "2", "--num-blocks-override", "40", "--workers", "1"]
    left_out = {}
    for cache in ("kv", "hybrid"):
        assert main([*args, "--cache", cache, "--json", str(path)]) == 0
        left_out[cache] = json.loads(path.read_text())["num_left_out"]
        assert f"{left_out[cache]:,}" in capsys.readouterr().out
    lengths = load_trace("sharegpt")
    total = lengths.prompt_tokens.astype(int) + lengths.output_tokens
    # 40 blocks of 16 positions, of which keys and values take two each.
    assert left_out == {"kv": int((total > 320).sum()), "hybrid": int((total > 640).sum())}
    assert main([*args, "--scheduling-policy", "fcfs,apt"]) == 0
    assert "left out because they can never fit" in capsys.readouterr().out


def test_replicas_share_the_requests(tmp_path, capsys):
    path = tmp_path / "out.json"
    args = [
        "simulate",
        *QUICK,
        "--rate",
        "20",
        "--replicas",
        "3",
        "--routing-policy",
        "expected_slack",
        "--json",
        str(path),
    ]
    assert main(args) == 0
    values = json.loads(path.read_text())
    assert set(values) >= KEYS
    assert sum(replica["num_sent"] for replica in values["replicas"]) == values["num_sent"] == 20
    assert sum(replica["iterations"] for replica in values["replicas"]) == values["iterations"]
    assert "3 replicas by expected_slack" in capsys.readouterr().out
    more = ["--replicas", "2", "--find-rate", "0.9", "--seeds", "1", "--workers", "1", "--output-scale", "0.2"]
    assert main(["simulate", *QUICK, *more, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["effective_rate"] > 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--hardware", "b200"], "a100-40gb"),
        (["--model", "gpt-5"], "opt-13b"),
        (["--trace", "nope.csv"], "nope.csv"),
        (["--scheduling-policy", "apt,fcfz"], "did you mean fcfs"),
        (["--scheduling-policy", "apt?violation_decay=0.4,apt?decay=1"], "no option 'decay'"),
        (["--rate", "-1"], "--rate"),
        (["--cv", "1000"], "--cv"),
        (["--num-requests", "0"], "--num-requests"),
        (["--cache", "none"], "--cache"),
        (["--find-rate", "1.5"], "--find-rate"),
        (["-tp", "3"], "3"),
        (["--replicas", "0"], "--replicas"),
        (["--rates", "2,3", "--rate", "2"], "--rate and --rates cannot be combined"),
        (["--find-rate", "0.9", "--rates", "2,3"], "--rates and --find-rate cannot be combined"),
        (["--scheduling-policy", "apt,fcfs,apt"], "apt is given twice"),
        (["--rates", "2,2"], "2.0 is given twice"),
        (["--rate", "2", "--png", "x.png"], "--rates"),
        (["--rates", "2", "--png", "/no/such/directory/x.png"], "--png"),
        (["--routing-policy", "leastload"], "--routing-policy"),
        (["--model", "gpt-5", "--replicas", "2"], "opt-13b"),
    ],
)
def test_bad_input_is_one_line(args, message, capsys):
    rated = {"--rate", "--rates", "--find-rate"} & set(args)
    given = args if rated else ["--rate", "2", *args]
    with pytest.raises(SystemExit) if _by_parser(args) else _nothing() as caught:
        code = main(["simulate", "--num-requests", "5", *given])
    if caught is not None:
        code = caught.value.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_without_matplotlib_the_picture_is_refused_before_anything_is_simulated(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["simulate", "--num-requests", "5", "--rates", "2", "--png", "x.png"]) == 1
    assert capsys.readouterr() == ("", "apt-jax simulate: --png needs matplotlib: pip install 'apt-jax[demo]'\n")


def test_a_trace_without_arrivals_needs_a_rate(capsys):
    assert main(["simulate", "--num-requests", "5"]) == 2
    assert "--rate" in capsys.readouterr().err


def test_a_sweep_that_is_no_terminal_writes_lines(capsys):
    assert main(["simulate", *QUICK, "--rates", "2,8", "--workers", "1"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "sweeping 2 runs"
    assert lines[-1].startswith("simulated 2 runs in ")


def _running_children(pid: int) -> list[int]:
    """Processes of the parent `pid` that are not about to end."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
            except OSError:  # it has ended
                continue
            if int(parent) == pid and state != "Z":
                found.append(int(entry.name))
    return found


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_processes_of_a_sweep_end_with_it(number):
    args = ["simulate", "--rates", "2,3", "--seeds", "2", "--workers", "2", "--num-requests", "100000"]
    command = [sys.executable, "-m", "serve.cli", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while len(children := _running_children(process.pid)) < 3:  # two workers, and the tracker of semaphores
                assert process.poll() is None
                time.sleep(0.05)
            os.kill(process.pid, number)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    assert number == signal.SIGKILL or error == "sweeping 4 runs\n"
    while any(map(_is_running, children)):
        time.sleep(0.05)


def _by_parser(args: list[str]) -> bool:
    return args[0] in ("--cache", "--routing-policy") or args[1] in ("-1", "0", "1.5")


class _nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *args: object) -> None:
        return None
