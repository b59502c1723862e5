"""`apt-jax optimal`: pictures, files and one-line errors."""

import json

import pytest

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
            "line 3: arrival_s=1 is before 2",
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
    ],
)
def test_bad_input_is_one_line(requests, capsys, text, flags, message):
    requests.write_text(text)
    assert cli.main(["optimal", "--requests", str(requests), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "(--trace)" not in error


def test_a_missing_file_is_said(capsys):
    assert cli.main(["optimal", "--requests", "nowhere.csv"]) == 2
    assert "'nowhere.csv'" in capsys.readouterr().err
