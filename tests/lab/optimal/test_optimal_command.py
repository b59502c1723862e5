"""`apt-jax optimal`: pictures, files and one-line errors."""

import dataclasses
import json

import pytest

from apt_jax.sim.hardware import load_hardware, save_hardware
from serve import cli

LENGTHS = "prompt_tokens,output_tokens\n32,3\n32,3\n"


@pytest.fixture
def requests(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text(LENGTHS)
    return path


def test_a_schedule_is_drawn_and_written(requests, tmp_path, capsys):
    facts, png = tmp_path / "o.json", tmp_path / "o.png"
    flags = ["--capacity-tokens", "64", "--no-eviction", "--json", str(facts), "--png", str(png)]
    assert cli.main(["optimal", "--requests", str(requests), *flags]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1:", "32+3", "P", "D", "D", "·", "·", "·"] in lines
    assert ["2:", "32+3", "·", "·", "·", "P", "D", "D"] in lines
    assert ["memory", "%", "50", "52", "53", "50", "52", "53"] in lines
    written = json.loads(facts.read_text())
    assert written["status"] == "optimal"
    assert written["num_evictions"] == 0
    assert written["bound"] == written["value"] == written["latency_s"]
    assert [b["num_tokens"] for b in written["batches"]] == [[32], [1], [1]] * 2
    assert png.read_bytes().startswith(b"\x89PNG")


def test_hidden_cache_is_chosen_and_marked(requests, capsys):
    argv = ["optimal", "--requests", str(requests), "--capacity-tokens", "40", "--cache", "hybrid"]
    assert cli.main(argv) == 0
    assert "Dh" in capsys.readouterr().out


def test_schedules_of_policies_are_starts(requests, tmp_path, capsys):
    facts = tmp_path / "o.json"
    flags = ["--capacity-tokens", "64", "--start", "fcfs, fcfs-ef", "--json", str(facts)]
    assert cli.main(["optimal", "--requests", str(requests), *flags]) == 0
    assert "starts" in capsys.readouterr().out
    written = json.loads(facts.read_text())
    assert list(written["starts"]) == ["fcfs", "fcfs-ef"]
    assert all(value >= written["value"] for value in written["starts"].values())


@pytest.mark.parametrize(("percent", "answer"), [("1", "yes"), ("90", "no")])
def test_is_there_a_better_schedule(requests, tmp_path, capsys, percent, answer):
    facts = tmp_path / "o.json"
    flags = ["--capacity-tokens", "66", "--start", "fcfs-ef", "--better-by", percent]
    argv = ["optimal", "--requests", str(requests), *flags, "--json", str(facts)]
    assert cli.main(argv) == 0
    assert answer in capsys.readouterr().out
    written = json.loads(facts.read_text())
    assert written["answer"] == answer
    assert (written["value"] is None) == (answer == "no")


def test_layer_inputs_of_another_width_take_the_blocks_of_the_engine(requests, tmp_path, capsys):
    """34 of them take two blocks of 17, half of a pool for 32 tokens with keys and values; as wide as keys 34 of 64."""
    hardware = load_hardware("llama-2-7b", "h100-80gb")
    most = {}
    for inputs in (None, 16, 17):
        path = tmp_path / f"{inputs}.json"
        save_hardware(dataclasses.replace(hardware, hidden_block_size=inputs), path)
        argv = [
            "optimal",
            "--requests",
            str(requests),
            "--hardware",
            str(path),
            "--cache",
            "hidden",
        ]
        flags = [
            "--capacity-tokens",
            "32",
            "--max-num-batched-tokens",
            "32",
            "--no-hybrid-batching",
        ]
        assert cli.main([*argv, *flags, "--no-eviction", "--json", "-"]) == 0
        batches = json.loads(capsys.readouterr().out)["batches"]
        most[inputs] = max(b["memory"] for b in batches)
    assert most == {None: 34 / 64, 16: 34 / 64, 17: 1.0}


def test_json_goes_to_stdout_alone(requests, capsys):
    argv = ["optimal", "--requests", str(requests), "--json", "-", "--objective", "slo"]
    assert cli.main([*argv, "--slo-ttft-ms", "1000"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == 2


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("prompt_tokens\n1\n", [], "column 'output_tokens' is missing"),
        ("prompt_tokens,output_tokens\n3,-1\n", [], "line 2: output_tokens='-1'"),
        ("prompt_tokens,output_tokens\n3,x\n", [], "line 2: output_tokens='x'"),
        (
            "prompt_tokens,output_tokens,arrival_s\n3,1,2\n3,1,1\n",
            [],
            "line 3: arrival_s=1 is before the previous request's 2",
        ),
        (
            LENGTHS,
            ["--capacity-tokens", "33"],
            "line 2: the request can never run: it needs 68 blocks",
        ),
        (LENGTHS, ["--max-num-batched-tokens", "31"], "line 2: the request can never run"),
        ("prompt_tokens,output_tokens\n900,900\n", ["--chunk", "64"], "fewer or shorter requests"),
        (LENGTHS, ["--chunk", "5000"], "--chunk 5000 must be between"),
        (LENGTHS, ["--objective", "slo"], "--slo-ttft-ms go together"),
        (LENGTHS, ["--hardware", "abacus"], "known:"),
        (LENGTHS, ["--start", "fcsf"], "did you mean fcfs"),
        (LENGTHS.replace("32", "400"), ["--start", "sarathi"], "is split into chunks"),
        (LENGTHS, ["--better-by", "10"], "needs a schedule to compare with"),
        (LENGTHS, ["--better-by", "100", "--start", "fcfs"], "must be below 100"),
    ],
)
def test_bad_input_is_one_line(requests, capsys, text, flags, message):
    requests.write_text(text)
    assert cli.main(["optimal", "--requests", str(requests), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "(--trace)" not in error


@pytest.mark.parametrize("name", ["nowhere.csv", "nowhere"])
def test_a_missing_file_is_said(capsys, name):
    assert cli.main(["optimal", "--requests", name]) == 2
    assert capsys.readouterr().err == f"apt-jax optimal: {name}: no such file (--requests)\n"


def test_the_readme_names_the_columns():
    from pathlib import Path

    text = (Path(__file__).parents[3] / "README.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("apt-jax optimal")]
    assert "prompt_tokens,output_tokens[,arrival_s]" in line
    assert "(docs/lab/optimal.md)" in text
