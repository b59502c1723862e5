"""`apt-jax plan`: the answer holds when `apt-jax simulate` checks it, one replica fewer fails, and what cannot be met is named."""

import json
import shlex
import statistics
from typing import Any

import numpy as np
import pytest

from apt_jax.config import SLO
from apt_jax.errors import ConfigError
from apt_jax.sim import planning
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.simulator import simulate
from apt_jax.sim.trace import load_trace
from apt_jax.sim.workload import drop_oversized, sample_workload
from serve.cli import main
from tests.support.cases import cover

SHORT = ["--workload", "humaneval", "--num-requests", "60", "--seeds", "2"]
CHAT = ["--workload", "interactive-chat", "--scale-tokens", "1/8", "--max-think-s", "2", "--num-sessions", "24",
        "--seeds", "2"]  # fmt: skip
QUESTIONS = {
    "requests": ["--model", "opt-13b", "--hardware", "A100-40", "-tp", "1", *SHORT, "--rate", "100", "--slo", "ttft:250,tbt:150"],
    "end to end": ["--model", "opt-13b", "--hardware", "h100", *SHORT, "--rate", "60", "--slo", "e2e:2500"],
    "sharded": ["--model", "opt-30b", "--hardware", "a100-40gb", "-tp", "2", *SHORT, "--rate", "40", "--slo", "ttft:300,tbt:500"],
    "sessions": ["--model", "llama-3-8b", "--hardware", "a100-40gb", "-tp", "1", *CHAT, "--concurrent-sessions", "16",
                 "--slo", "ttft:100,tbt:20", "--num-blocks-override", "500", "--retention", "lru,knapsack"],
    "sessions by rate": ["--model", "llama-3-8b", "--hardware", "h100", *CHAT, "--rate", "40", "--slo", "ttft:35,tbt:15",
                         "--num-blocks-override", "800", "--retention", "lru"],
    "summaries": ["--model", "llama-3-8b", "--hardware", "h100", "--workload", "batch-summarization-rag", "--scale-tokens", "1/16",
                  "--rate", "100", "--num-requests", "120", "--seeds", "2", "--slo", "ttft:500,tbt:30,e2e:3000"],
    "research": ["--model", "llama-3-8b", "--hardware", "a100-40gb", "-tp", "1", "--workload", "deep-research",
                 "--scale-tokens", "1/16", "--max-think-s", "2", "--num-sessions", "16", "--concurrent-sessions", "16",
                 "--drop-too-long", "--seeds", "2", "--slo", "ttft:250,tbt:20", "--num-blocks-override", "2000",
                 "--retention", "lru"],
}  # fmt: skip


def plan(given: list[str], path: Any) -> dict[str, Any]:
    assert main(["plan", *given, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", cover(QUESTIONS, [name for name in QUESTIONS if name != "research"]))
def test_simulate_agrees_that_the_answer_holds_and_that_one_replica_fewer_fails(name, tmp_path, capsys):
    path = tmp_path / "out.json"
    (answer,) = plan(QUESTIONS[name], path)["answers"]
    best = answer["best"]
    assert best is not None, answer["constraint"]
    out = capsys.readouterr().out
    command = answer["commands"]["simulate"]
    assert command in out
    assert answer["commands"]["serve"] in out

    def attainment(replicas: int) -> float:
        flags = shlex.split(command)[1:]
        assert main([*flags, "--replicas", str(replicas), "--workers", "1", "--json", str(path)]) == 0
        return statistics.mean(run["slo_attainment"] for run in json.loads(path.read_text())["runs"])

    assert attainment(best["replicas"]) == pytest.approx(best["attainment"], abs=1e-6)
    assert best["attainment"] >= 0.9
    assert best["replicas"] > 1, "the question should need several"
    fewer = answer["one_replica_fewer"]
    assert fewer["replicas"] == best["replicas"] - 1
    found = attainment(best["replicas"] - 1)
    assert found < 0.9
    if fewer["is_upper_bound"]:
        assert found <= (sum(fewer["by_seed"]) + 2 - len(fewer["by_seed"])) / 2
    else:
        assert found == pytest.approx(fewer["attainment"], abs=1e-6)


def test_answers_depend_only_on_the_seed_and_name_every_flag(tmp_path):
    given = QUESTIONS["requests"]
    path = tmp_path / "out.json"
    assert plan(given, path) == plan(given, path)
    other = plan([*given, "--seed", "7"], path)["answers"][0]
    assert "--seed 7" in other["commands"]["simulate"]


def test_a_picture_shows_every_number_of_devices(tmp_path):
    path = tmp_path / "out.png"
    assert main(["plan", *QUESTIONS["requests"], "--png", str(path)]) == 0
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        (["--slo", "ttft:1"], "prefill: the prompt alone takes longer than the TTFT objective of 0.001 s"),
        (["--slo", "tbt:5"], "decode: a step alone takes longer than the TBT objective of 5 ms"),
        (["--slo", "e2e:30,tbt:1000"], "length: alone they take longer than the end-to-end objective of 0.03 s"),
        (["--slo", "ttft:1000", "--max-model-len", "100"], "contexts: "),
        (["--slo", "ttft:1000", "--num-blocks-override", "8", "--cache", "kv"], "the pool of opt-13b on a100-40gb x1"),
        (["--slo", "ttft:50", "--max-devices", "1"], "TTFT, "),
    ],
)
def test_what_makes_objectives_impossible_is_named(given, constraint, tmp_path, capsys):
    question = ["--model", "opt-13b", "--hardware", "a100-40gb", "-tp", "1", *SHORT, "--rate", "100"]
    (answer,) = plan([*question, *given], tmp_path / "out.json")["answers"]
    assert answer["best"] is None
    assert constraint in answer["constraint"]
    assert constraint in capsys.readouterr().out


def test_kinds_are_compared_and_larger_replicas_only_where_they_could_need_fewer_devices(tmp_path):
    question = ["--model", "opt-13b", "--hardware", "a100-40gb,h100-80gb", *SHORT, "--rate", "20", "--slo", "ttft:1000"]
    answers = plan(question, tmp_path / "out.json")["answers"]
    kinds = [(one["hardware"], one["tensor_parallel_size"]) for one in answers]
    assert kinds == [("a100-40gb", 1), ("a100-40gb", 2), ("h100-80gb", 1)]
    assert answers[0]["num_devices"] == 1
    assert answers[1]["constraint"].startswith("not tried: with fewer devices per replica 1 in all is enough")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--hardware", "b200"], "no description of opt-13b on 'b200'; did you mean h200?; known: "),
        (["--hardware", "h100,"], "empty entry"),
        (["--model", "opt-13"], "did you mean opt-13b?"),
        (["--workload", "sharegtp"], "did you mean sharegpt?"),
        (["--slo", "ttft:0"], "must be positive"),
        (["--slo", "tpot:3"], "must be ttft:MS, tbt:MS or e2e:MS"),
        (["--slo", "ttft:3,ttft:4"], "each once"),
        (["--workload", "humaneval"], "no objectives"),
        (["--slo", "ttft:100", "--scheduling-policy", "apt,plus"], "plus"),
        (["--slo", "ttft:100", "--retention", "lru,mru"], "mru"),
        (["--slo", "ttft:100", "--session-order", "late"], "session_order='late' must be one of"),
        (["--slo", "ttft:100", "--max-devices", "1", "-tp", "2"], "fewer than the 2 of a replica"),
        (["--workload", "agents", "--slo", "ttft:100", "--concurrent-sessions", "4"], "cannot be combined"),
        (["--workload", "interactive-chat", "--num-requests", "9"], "give --num-sessions instead"),
        (["--slo", "ttft:100", "--num-sessions", "9"], "has no sessions; leave num_sessions out"),
    ],
)
def test_wrong_input_is_one_line_that_names_the_way_out(given, words, capsys):
    usual = {"--model": "opt-13b", "--hardware": "a100-40gb", "--workload": "humaneval", "--rate": "4"}
    usual.update(zip(given[::2], given[1::2], strict=True))
    try:
        code = main(["plan", *[word for pair in usual.items() for word in pair]])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_names_of_hardware_may_be_shortened_but_not_ambiguous():
    assert planning.hardware_named("opt-13b", "H100") == "h100-80gb"
    assert planning.hardware_named("opt-13b", "h100-80gb-hbm3") == "h100-80gb-hbm3"
    assert planning.hardware_named("llama-2-7b", "A100") == "a100-80gb"
    with pytest.raises(ConfigError, match="give the whole name"):
        planning.hardware_named("opt-13b", "h")


@pytest.mark.parametrize("trace", ["humaneval", "interactive-chat", "batch-summarization-rag"])
@pytest.mark.parametrize("policy", ["fcfs", "apt-plus"])
def test_no_run_beats_the_bound_of_requests_alone(trace, policy):
    slo = SLO(ttft_s=0.05, tbt_s=0.0145, e2e_s=3.0)
    of_sessions = trace == "interactive-chat"
    config = SimulationConfig(
        model="llama-3-8b", hardware="a100-40gb", trace=trace, rate=0.5, cache="kv", policy=policy, slo=slo,
        scale_tokens=1 / 8, num_requests=24, num_sessions=6 if of_sessions else None,
        max_think_s=5.0 if of_sessions else None,
    )  # fmt: skip
    hardware = load_hardware(config.model, config.hardware)
    workload = sample_workload(drop_oversized(load_trace(trace), hardware, config), config)
    bound = planning.alone(workload, config, hardware)
    assert bound is not None
    found = simulate(config, workload=workload).summary
    assert found.ttft_attainment <= bound.ttft
    assert found.e2e_attainment <= bound.e2e
    assert found.slo_attainment <= bound.slo
    assert found.tbt_attainment <= bound.tbt


def test_a_run_that_is_stopped_counts_the_rest_as_not_served():
    config = SimulationConfig(trace="humaneval", rate=4.0, num_requests=40, output_scale=0.25)
    whole = simulate(config)
    ended = []
    stopped = simulate(config, stop=lambda record: ended.append(record) or len(ended) == 10)
    assert 10 <= len(ended) < 20  # requests may end in the same step
    assert sum(one is not None for one in stopped.requests) == len(ended)
    same = [(a, b) for a, b in zip(whole.requests, stopped.requests, strict=True) if b is not None]
    assert all(a == b for a, b in same)
    assert np.isclose(stopped.summary.slo_attainment, sum(r.slo_attained for r in ended) / 40)
