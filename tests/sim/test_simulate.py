"""The simulator: the engine's own code on a cost model, arrivals, traces, results."""

import dataclasses
import gzip

import numpy as np
import pytest

from apt_jax.config import SLO
from apt_jax.errors import ConfigError
from apt_jax.sched import POLICIES
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.simulate import SimulationConfig, Workload, draw_workload, simulate
from apt_jax.sim.trace import (
    SYNTHETIC,
    draw_arrivals,
    known_traces,
    load_trace,
    scale_arrivals,
)

SMALL = SimulationConfig(rate=4.0, num_requests=60)


def of(lengths: list[tuple[int, int]], arrival_s: list[float] | None = None) -> Workload:
    n = len(lengths)
    prompt, output = np.array(lengths, np.int32).T
    return Workload(
        prompt_tokens=prompt,
        output_tokens=output,
        arrival_s=np.zeros(n) if arrival_s is None else np.array(arrival_s),
        best_effort=np.zeros(n, np.bool_),
    )


def test_one_request_takes_the_time_that_the_cost_model_says():
    costs = load_hardware("opt-13b", "a100-40gb").step_costs("reproject")
    result = simulate(
        dataclasses.replace(SMALL, policy="fcfs", cache="kv", hidden_attention="reproject"),
        workload=of([(1000, 3)], [5.0]),
    )
    metrics = result.requests[0]
    assert metrics is not None
    prefill_s = (
        costs.prefill_base_s + 1000 * costs.prefill_per_token_s + 1e6 * costs.prefill_per_pair_s
    )
    decode_s = [
        costs.decode_base_s + costs.decode_per_request_s + n * costs.decode_per_token_s
        for n in (1001, 1002)
    ]
    assert metrics.ttft_s == pytest.approx(prefill_s)
    assert np.diff(metrics.token_times_s) == pytest.approx(decode_s)
    assert result.iterations == 3
    assert result.summary.duration_s == pytest.approx(prefill_s + sum(decode_s))


def test_narrow_layer_inputs_take_fewer_blocks():
    """42 blocks hold 42 times 21 layer inputs, and 42 times 16 of the width of keys."""
    hardware = load_hardware("opt-13b", "a100-40gb")
    config = dataclasses.replace(SMALL, policy="fcfs", cache="hidden", num_blocks=42)
    workload = of([(400, 20), (400, 20), (400, 20)])
    most = {}
    for inputs in (None, 21):
        described = dataclasses.replace(hardware, hidden_block_size=inputs)
        used: list[int] = []
        simulate(
            config, hardware=described, workload=workload, debug=True,
            on_step=lambda engine, used=used: used.append(engine.stats().num_running),
        )  # fmt: skip
        most[inputs] = max(used)
    assert most == {None: 1, 21: 2}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves_all_and_a_seed_fixes_the_run(policy):
    config = dataclasses.replace(SMALL, policy=policy, num_blocks=300, seed=3)
    first = simulate(config, debug=True)
    again = simulate(config)
    assert first.summary == again.summary
    assert first.summary.num_completed == 60
    lengths = draw_workload(load_trace("sharegpt"), config).output_tokens
    assert [len(m.token_times_s) for m in first.requests if m is not None] == lengths.tolist()


def test_seeds_differ_and_rates_only_stretch_the_arrivals():
    trace = load_trace("sharegpt")
    slow, fast, other = (
        draw_workload(trace, dataclasses.replace(SMALL, rate=rate, seed=seed))
        for rate, seed in ((2.0, 0), (8.0, 0), (2.0, 1))
    )
    assert slow.prompt_tokens.tolist() == fast.prompt_tokens.tolist()
    assert slow.arrival_s == pytest.approx(4 * fast.arrival_s)
    assert slow.prompt_tokens.tolist() != other.prompt_tokens.tolist()


@pytest.mark.parametrize("cv", [1.0, 5.0, 10.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(cv):
    gaps = np.diff(draw_arrivals(400_000, 3.0, cv, np.random.default_rng(1)))
    assert gaps.mean() == pytest.approx(1 / 3, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_recorded_arrivals_are_kept_or_stretched():
    trace = load_trace("azure-conv")
    assert trace.arrival_s is not None
    config = SimulationConfig(trace="azure-conv", num_requests=100)
    assert draw_workload(trace, config).arrival_s.tolist() == trace.arrival_s[:100].tolist()
    scaled = scale_arrivals(trace.arrival_s[:100], 20.0)
    assert 99 / scaled[-1] == pytest.approx(20.0)
    synthetic = draw_workload(trace, dataclasses.replace(config, rate=5.0, cv=1.0))
    assert synthetic.arrival_s.tolist() != trace.arrival_s[:100].tolist()


def test_requests_repeat_only_when_there_are_not_enough():
    trace = load_trace("humaneval")
    drawn = draw_workload(trace, dataclasses.replace(SMALL, num_requests=164))
    assert sorted(drawn.prompt_tokens.tolist()) == sorted(trace.prompt_tokens.tolist())
    assert draw_workload(trace, dataclasses.replace(SMALL, num_requests=500)).arrival_s.size == 500


def test_outputs_are_scaled_and_never_empty():
    trace = load_trace("longbench")
    scaled = trace.scale_outputs(0.25)
    assert scaled.output_tokens.min() >= 1
    assert scaled.output_tokens.mean() == pytest.approx(trace.output_tokens.mean() / 4, rel=0.01)


def test_paper_lengths():
    """Apt-Serve Table 7 and BROS Table 2, as far as the synthetic traces claim them."""
    arxiv = load_trace("arxiv")
    assert arxiv.prompt_tokens.max() == pytest.approx(19600, rel=0.02)
    assert np.median(arxiv.prompt_tokens) == pytest.approx(6853, rel=0.05)
    assert arxiv.prompt_tokens.mean() == pytest.approx(7812, rel=0.05)
    best_effort = load_trace("bros-best-effort")
    assert best_effort.prompt_tokens.mean() == pytest.approx(784, rel=0.05)
    assert best_effort.best_effort is not None
    assert best_effort.best_effort.all()
    assert load_trace("bros-sharegpt").prompt_tokens.mean() == pytest.approx(222.76, rel=0.1)


def test_every_known_trace_loads():
    assert set(SYNTHETIC) < set(known_traces())
    for name in known_traces():
        assert load_trace(name).num_requests >= 79


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt_tokens\n3\n", "'output_tokens' is missing"),
        ("", "'prompt_tokens' is missing"),
        ("prompt_tokens,output_tokens\n", "holds no request"),
        ("prompt_tokens,output_tokens\n5,4\n-3,4\n", "line 3: prompt_tokens='-3'"),
        ("prompt_tokens,output_tokens\n5,x\n", "line 2: output_tokens='x'"),
        ("prompt_tokens,output_tokens\n5,1.5\n", "line 2: output_tokens='1.5'"),
        ("prompt_tokens,output_tokens\n5\n", "line 2: 1 values for 2 columns"),
        ("arrival_s,prompt_tokens,output_tokens\n1,5,4\n0.5,5,4\n", "line 3: arrival_s=0.5"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,5,4\n", "line 2: arrival_s='nan'"),
        ("prompt_tokens,output_tokens,class\n5,4,vip\n", "line 2: class='vip'"),
    ],
)
def test_bad_traces_name_file_line_and_column(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_trace(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_compressed_trace_with_classes(tmp_path):
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"prompt_tokens,output_tokens,class\n5,4,rt\n7,2,be\n"))
    trace = load_trace(path)
    assert trace.best_effort is not None
    assert trace.best_effort.tolist() == [False, True]


def test_a_request_that_can_never_fit_is_named_or_left_out(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens\n5,4\n2048,1\n")
    config = dataclasses.replace(SMALL, trace=str(path), num_requests=2)
    with pytest.raises(ConfigError, match="line 3: 2048 prompt and 1 output"):
        simulate(config)
    result = simulate(dataclasses.replace(config, drop_too_long=True))
    assert result.summary.num_completed == 2


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "num_blocks"])
def test_no_bound_of_a_run_can_be_zero(name):
    for value in (0, -1):
        with pytest.raises(ConfigError, match=f"^{name}={value} must be at least 1 "):
            dataclasses.replace(SMALL, **{name: value})


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"did you mean sharegpt\?"):
        simulate(dataclasses.replace(SMALL, trace="sharegtp"))
    with pytest.raises(ConfigError, match=r"^share.csv: no such file \(--trace\)$"):
        simulate(dataclasses.replace(SMALL, trace="share.csv"))
    with pytest.raises(ConfigError, match="a100-40gb"):
        simulate(dataclasses.replace(SMALL, hardware="a1000"))
    with pytest.raises(ConfigError, match="rate"):
        simulate(dataclasses.replace(SMALL, rate=None))


def test_objectives_decide_attainment():
    loose = simulate(dataclasses.replace(SMALL, slo=SLO()))
    tight = simulate(dataclasses.replace(SMALL, slo=SLO(ttft_s=1e-3, tbt_s=1e-3)))
    assert loose.summary.slo_attainment == 1.0
    assert tight.summary.slo_attainment == 0.0


@pytest.mark.slow
def test_a_hundred_thousand_requests():
    result = simulate(
        SimulationConfig(
            trace="humaneval", rate=8.0, num_requests=100_000, policy="fcfs", cache="kv"
        )
    )
    assert result.summary.num_completed == 100_000
