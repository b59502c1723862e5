"""The simulator: the engine's own code on a cost model, arrivals, traces, results."""

import dataclasses
import gzip

import numpy as np
import pytest

from apt_jax.config import SLO
from apt_jax.core.kinds import HIDDEN, WindowSpec
from apt_jax.core.step import StepBatch
from apt_jax.costs.programs import ProgramCosts, ProgramShapes
from apt_jax.errors import ConfigError
from apt_jax.sched import Plan, SchedulerView, all_policies, make_policy
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.host_link import block_bytes, num_host_blocks, with_transfers
from apt_jax.sim.simulator import SimulationResult, simulate
from apt_jax.sim.trace import (
    SYNTHETIC,
    draw_arrivals,
    known_traces,
    load_trace,
    prompts_of,
    scale_arrivals,
)
from apt_jax.sim.workload import Workload, sample_workload
from tests.support.cases import ALL, cover
from tests.support.policy_names import LEADING

SMALL = SimulationConfig(rate=4.0, num_requests=60)
CROWDED = (
    dataclasses.replace(SMALL, num_blocks=300, seed=3)
    if ALL
    else dataclasses.replace(SMALL, num_blocks=130, seed=3, rate=32.0, num_requests=40, output_scale=0.1)
)
"""Requests wait and are preempted; in `make test` there are fewer and shorter ones."""


def output_lengths(config: SimulationConfig) -> list[int]:
    trace = load_trace("sharegpt").scale_outputs(config.output_scale)
    return sample_workload(trace, config).output_tokens.tolist()


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
    prefill_s = costs.prefill_base_s + 1000 * costs.prefill_per_token_s + 1e6 * costs.prefill_per_pair_s
    decode_s = [costs.decode_base_s + costs.decode_per_request_s + n * costs.decode_per_token_s for n in (1001, 1002)]
    assert metrics.ttft_s == pytest.approx(prefill_s)
    assert np.diff(metrics.token_times_s) == pytest.approx(decode_s)
    assert result.iterations == 3
    assert result.summary.duration_s == pytest.approx(prefill_s + sum(decode_s))


def test_rho_is_what_policies_charge_and_not_what_steps_take():
    seen = []

    class Watching:
        name = "watching"

        def __init__(self) -> None:
            self._inner = make_policy("fcfs")

        def schedule(self, view: SchedulerView) -> Plan:
            seen.append((view.kinds[HIDDEN].extra_base_s, view.kinds[HIDDEN].extra_per_token_s))
            return self._inner.schedule(view)

    config = dataclasses.replace(SMALL, hidden_attention="absorb")
    workload = of([(1000, 3), (500, 2)])
    costs = load_hardware("opt-13b", "a100-40gb").step_costs("absorb")
    durations = {}
    for rho_us in (None, 0.0, 70.0):
        one = dataclasses.replace(config, rho_us=rho_us)
        durations[rho_us] = simulate(one, workload=workload, policy=Watching()).duration_s
        extra_base_s, extra_per_token_s = seen[-1]
        true = (
            costs.decode_per_hidden_request_s - costs.decode_per_request_s,
            costs.decode_per_hidden_token_s - costs.decode_per_token_s,
        )
        wanted = true if rho_us is None else (0.0, rho_us / 1e6)
        assert (extra_base_s, extra_per_token_s) == pytest.approx(wanted)
    assert len(set(durations.values())) == 1


def test_a_large_rho_keeps_apt_from_the_hidden_kind():
    config = dataclasses.replace(SMALL, policy="apt", rate=8.0, num_requests=100, hidden_attention="reproject")
    free = simulate(dataclasses.replace(config, rho_us=0.0))
    expensive = simulate(dataclasses.replace(config, rho_us=1e4))
    assert free.hidden_token_fraction > 0.2
    assert expensive.hidden_token_fraction < 0.02


def test_time_of_the_host_lengthens_every_step_and_the_device_stays_idle():
    config = dataclasses.replace(SMALL, policy="fcfs", cache="kv")
    workload = of([(1000, 30)])
    plain = simulate(config, workload=workload)
    slow = simulate(dataclasses.replace(config, host_s=0.02), workload=workload)
    assert slow.iterations == plain.iterations == 30
    assert slow.duration_s == pytest.approx(plain.duration_s + 30 * 0.02)
    assert plain.device_busy_fraction == pytest.approx(1.0)
    assert slow.device_busy_fraction == pytest.approx(plain.duration_s / slow.duration_s)


def overlapped(workload: Workload, *, overlap: bool, host_s: float = 0.0) -> SimulationResult:
    config = dataclasses.replace(SMALL, policy="fcfs", cache="kv", overlap=overlap, host_s=host_s)
    return simulate(config, workload=workload, step_s=lambda batch: 0.1, debug=True)


def test_with_overlap_a_new_request_waits_for_up_to_two_steps():
    """Steps last 0.1 s. The second request comes 0.02 s into a step: step by step it is in the next one; with overlap
    that one has been dispatched already, and it is in the one after."""
    workload = of([(10, 20), (10, 1)], [0.0, 0.52])
    ttft_s = {}
    for overlap in (False, True):
        result = overlapped(workload, overlap=overlap)
        first, second = result.requests
        assert first is not None
        assert second is not None
        assert first.token_times_s[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
        ttft_s[overlap] = second.ttft_s
    assert ttft_s[False] == pytest.approx(0.08 + 0.1)
    assert ttft_s[True] == pytest.approx(0.08 + 0.1 + 0.1)


def test_with_overlap_an_idle_engine_starts_at_once():
    result = overlapped(of([(10, 2), (10, 1)], [0.0, 5.0]), overlap=True)
    assert [m.ttft_s for m in result.requests if m is not None] == pytest.approx([0.1, 0.1])
    assert result.iterations == 3


def test_time_of_the_host_is_hidden_behind_the_device_as_far_as_it_is_shorter():
    workload = of([(10, 50)])
    assert overlapped(workload, overlap=True, host_s=0.03).duration_s == pytest.approx(0.03 + 50 * 0.1)
    assert overlapped(workload, overlap=True, host_s=0.25).duration_s == pytest.approx(50 * 0.25 + 0.1, rel=0.03)
    assert overlapped(workload, overlap=False, host_s=0.03).duration_s == pytest.approx(50 * 0.13)


@pytest.mark.in_turn(7)
@pytest.mark.seeds
@pytest.mark.parametrize("policy", cover(sorted(all_policies()), LEADING))
def test_every_policy_serves_all_with_overlap(policy):
    config = dataclasses.replace(CROWDED, policy=policy, overlap=True)
    result = simulate(config, debug=True)
    assert [len(m.token_times_s) for m in result.requests if m is not None] == output_lengths(config)


def test_several_replicas_with_overlap_serve_all():
    config = dataclasses.replace(
        SMALL, policy="apt", rate=16.0, overlap=True, replicas=2, num_requests=30, output_scale=0.25,
        routing_policy="expected_slack",
    )  # fmt: skip
    first, again = simulate(config, debug=True), simulate(config)
    assert first.summary == again.summary
    assert first.summary.num_completed == 30


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_steps_overlap_where_the_description_was_calibrated(is_calibrated):
    hardware = load_hardware("opt-13b", "a100-40gb")
    if is_calibrated:
        shapes = ProgramShapes(
            decode_buckets=(8,), prefill_buckets=(64,), max_num_seqs=8, mixed=True,
            rows_per_tile=8, tokens_per_tile=16, query_tile=16, key_tile=16,
        )  # fmt: skip
        ones = (1e-3,) * len(shapes.feature_names())
        programs = ProgramCosts(shapes=shapes, coefficients=ones)
        hardware = dataclasses.replace(hardware, programs=programs)
    ttft_s = []
    for overlap in (None, False, True):
        config = dataclasses.replace(SMALL, policy="fcfs", cache="kv", overlap=overlap)
        workload = of([(10, 20), (10, 1)], [0.0, 0.52])
        result = simulate(config, hardware=hardware, workload=workload, step_s=lambda batch: 0.1)
        request = result.requests[1]
        assert request is not None
        ttft_s.append(request.ttft_s)
    assert ttft_s[1] < ttft_s[2]
    assert ttft_s[0] == ttft_s[2 if is_calibrated else 1]


def test_share_of_requests_with_more_than_a_hundred_gaps():
    workload = of([(5, 1), (5, 101), (5, 102), (5, 300)])
    assert workload.share_with_gaps() == 0.5
    assert workload.share_with_gaps(0) == 0.75


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


def test_windowed_layers_hold_their_window_alone():
    """Prompts of 400 tokens and 20 more take 27 groups of two blocks; windows of 64 positions at most 5 groups of two, and
    10 in chunks. With all positions a request would take 108 blocks."""
    hardware = load_hardware("opt-13b", "a100-40gb")
    windows = WindowSpec(window=64, block_size=16, blocks_per_group=2)
    described = dataclasses.replace(
        hardware, hidden_blocks_per_group=None, costs={"kv": hardware.step_costs()}, windows=windows
    )
    config = dataclasses.replace(SMALL, policy="fcfs", cache="kv")
    workload = of([(400, 20)] * 3)
    for num_blocks, running in ((74, 1), (145, 2), (210, 3)):
        used: list[int] = []
        simulate(
            dataclasses.replace(config, num_blocks=num_blocks), hardware=described, workload=workload, debug=True,
            on_step=lambda engine, used=used: used.append(engine.stats().num_running),
        )  # fmt: skip
        assert max(used) == running


@pytest.mark.in_turn(6)
@pytest.mark.seeds
@pytest.mark.parametrize("policy", sorted(all_policies()))
def test_every_policy_serves_all_and_a_seed_fixes_the_run(policy):
    config = dataclasses.replace(CROWDED, policy=policy)
    first = simulate(config, debug=True)
    again = simulate(config)
    assert first.summary == again.summary
    assert first.summary.num_completed == config.num_requests
    assert [len(m.token_times_s) for m in first.requests if m is not None] == output_lengths(config)


@pytest.mark.seeds
@pytest.mark.parametrize("policy", ["fcfs", "sarathi", "apt", "apt-plus"])
def test_an_engine_that_is_told_lengths_only_decides_the_same(policy):
    """A cost model of the caller's own is given whole batches, the simulator's own one lengths and kinds alone."""
    config = dataclasses.replace(CROWDED, policy=policy)
    costs = load_hardware("opt-13b", "a100-40gb").step_costs("auto")
    sizes = []

    def step_s(batch: StepBatch) -> float:
        sizes.append((batch.token_ids.size, int(batch.num_tokens.sum()), len(batch.params)))
        return costs.step_s(batch.num_tokens, batch.start, batch.kind)

    whole, lengths = simulate(config, step_s=step_s), simulate(config)
    assert all(tokens == wanted > 0 and params for tokens, wanted, params in sizes)
    assert whole.requests == lengths.requests
    assert (whole.preemptions, whole.recomputed_tokens) == (
        lengths.preemptions,
        lengths.recomputed_tokens,
    )


def test_seeds_differ_and_rates_only_stretch_the_arrivals():
    trace = load_trace("sharegpt")
    slow, fast, other = (
        sample_workload(trace, dataclasses.replace(SMALL, rate=rate, seed=seed))
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
    assert sample_workload(trace, config).arrival_s.tolist() == trace.arrival_s[:100].tolist()
    scaled = scale_arrivals(trace.arrival_s[:100], 20.0)
    assert 99 / scaled[-1] == pytest.approx(20.0)
    synthetic = sample_workload(trace, dataclasses.replace(config, rate=5.0, cv=1.0))
    assert synthetic.arrival_s.tolist() != trace.arrival_s[:100].tolist()


def test_requests_repeat_only_when_there_are_not_enough():
    trace = load_trace("humaneval")
    drawn = sample_workload(trace, dataclasses.replace(SMALL, num_requests=164))
    assert sorted(drawn.prompt_tokens.tolist()) == sorted(trace.prompt_tokens.tolist())
    assert sample_workload(trace, dataclasses.replace(SMALL, num_requests=500)).arrival_s.size == 500


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


TURNS = """prompt_tokens,output_tokens,arrival_s,hash_ids
300,20,0,7 8 9
400,20,100,7 8 10 11
200,20,200,5 8
300,20,300,
"""


def test_classes_are_summed_up_apart(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("prompt_tokens,output_tokens,arrival_s,class\n30,4,0,rt\n50,6,0.1,be\n70,8,0.2,rt\n")
    result = simulate(SimulationConfig(trace=str(trace), policy="bros", cache="kv"))
    assert {name: one.num_sent for name, one in result.by_class.items()} == {"rt": 2, "be": 1}
    be = result.requests[1]
    assert be is not None
    assert result.by_class["be"].ttft_s.p50 == be.ttft_s
    assert result.as_dict()["by_class"]["rt"]["num_completed"] == 2
    assert simulate(dataclasses.replace(result.config, num_requests=1)).by_class == {}


def test_prompts_are_equal_exactly_where_their_blocks_have_equal_names(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TURNS)
    trace = load_trace(path)
    first, second, third, plain = prompts_of(trace, 128)
    assert [p.size for p in (first, second, third, plain)] == [300, 400, 200, 300]
    assert all(p.dtype == np.int32 and p.min() >= 0 for p in (first, second, third, plain))
    assert (first[:256] == second[:256]).all()
    assert not (first[256:] == second[256:300]).any()
    assert (third[128:] == first[128:200]).all()  # the block of one name, behind another one
    assert not (third[:128] == first[:128]).any()
    assert not (plain == first).any()
    assert np.unique(np.concatenate([first, second[256:], plain])).size == 300 + 144 + 300


def test_what_prompts_have_in_common_is_computed_once(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TURNS)
    config = SimulationConfig(trace=str(path), policy="fcfs", cache="kv", hash_block_tokens=128, num_requests=4)
    shared = simulate(config, debug=True)
    alone = simulate(dataclasses.replace(config, enable_prefix_caching=False))
    cached = [m.num_cached_tokens for m in shared.requests if m is not None]
    assert cached == [0, 256, 0, 0]  # a block counts only after the same ones before it
    assert shared.prefix_hit_fraction == 256 / 1200
    assert alone.prefix_hit_fraction == 0.0
    ttft_s = [[m.ttft_s or 0.0 for m in r.requests if m is not None] for r in (shared, alone)]
    assert ttft_s[0][1] < ttft_s[1][1]
    assert ttft_s[0][::2] == pytest.approx(ttft_s[1][::2])


def test_prefix_caching_needs_names_of_blocks():
    with pytest.raises(ConfigError, match="no column hash_ids"):
        simulate(dataclasses.replace(SMALL, enable_prefix_caching=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt_tokens,output_tokens,hash_ids\n300,2,1 x\n", "line 2: hash_ids='1 x' must be"),
        ("prompt_tokens,output_tokens,hash_ids\n300,2,99999999999999999999\n", "64-bit integers"),
        ("prompt_tokens,output_tokens,hash_ids\n513,2,1 2 3\n", "line 2: 3 hash_ids for 513"),
    ],
)
def test_bad_names_of_blocks_are_told_with_their_line(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        simulate(SimulationConfig(trace=str(path), rate=1.0))


def test_a_request_that_can_never_fit_is_named_or_left_out(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens\n5,4\n2048,1\n")
    config = dataclasses.replace(SMALL, trace=str(path), num_requests=2)
    with pytest.raises(ConfigError, match="line 3: 2048 prompt and 1 output"):
        simulate(config)
    result = simulate(dataclasses.replace(config, drop_too_long=True))
    assert result.summary.num_completed == 2


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"rho_us": -1.0}, "--rho-us"),
        ({"rho_us": float("nan")}, "--rho-us"),
        ({"host_s": -0.1}, "--host-ms"),
        ({"host_s": float("inf")}, "--host-ms"),
    ],
)
def test_costs_out_of_range_name_the_flag(changes, flag):
    with pytest.raises(ConfigError, match=flag):
        dataclasses.replace(SMALL, **changes)


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
    result = simulate(SimulationConfig(trace="humaneval", rate=8.0, num_requests=100_000, policy="fcfs", cache="kv"))
    assert result.summary.num_completed == 100_000


def test_tenants_are_drawn_and_vtc_gives_the_small_ones_their_share():
    """Overload: the first of three tenants sends more than half of the requests."""
    config = dataclasses.replace(
        SMALL, rate=60.0, num_requests=120, tenants=3, cache="kv", num_blocks=200, output_scale=0.25
    )
    results = {policy: simulate(dataclasses.replace(config, policy=policy)) for policy in ("vllm-v1", "vtc")}
    for result in results.values():
        assert sum(t.num_sent for t in result.tenants) == 120
        assert result.tenants[0].num_sent > result.tenants[1].num_sent > result.tenants[2].num_sent
        assert sum(t.output_tokens for t in result.tenants) == sum(
            len(m.token_times_s) for m in result.requests if m is not None
        )
        assert result.summary.num_completed == 120
        assert result.as_dict()["tenants"][2]["num_sent"] == result.tenants[2].num_sent

    def wait_s(policy: str, tenant: int) -> float:
        p50 = results[policy].tenants[tenant].ttft_p50_s
        assert p50 is not None
        return p50

    # By arrival all wait alike; by service those that send little wait much less.
    assert wait_s("vllm-v1", 2) > 0.6 * wait_s("vllm-v1", 0)
    assert wait_s("vtc", 2) < 0.5 * wait_s("vtc", 0)
    assert not simulate(dataclasses.replace(SMALL, num_requests=5)).tenants


def of_requests(result: SimulationResult) -> list[list[float]]:
    return [m.token_times_s for m in result.requests if m is not None]


def test_with_max_tokens_lengths_are_those_of_the_trace_and_nobody_knows_them():
    known, hidden = [], []

    def note(into: list[bool]):
        return lambda engine: into.extend(engine.table.known_length[engine.table.live].tolist())

    config = dataclasses.replace(SMALL, policy="fcfs", cache="kv", num_requests=10, output_scale=0.2)
    declared = simulate(config, on_step=note(known))
    result = simulate(dataclasses.replace(config, max_tokens=4000), on_step=note(hidden), debug=True)
    assert all(known)
    assert not any(hidden)
    assert of_requests(result) == of_requests(declared)  # fcfs does not look at max_tokens
    assert [len(times) for times in of_requests(result)] == output_lengths(config)


def test_with_max_tokens_outputs_are_cut_off():
    config = dataclasses.replace(SMALL, policy="fcfs", num_requests=10, max_tokens=50)
    result = simulate(config)
    assert [len(times) for times in of_requests(result)] == [min(n, 50) for n in output_lengths(config)]
    assert max(output_lengths(config)) > 50


@pytest.mark.parametrize("policy", ["vllm-v1", "fcfs", "sarathi"])
def test_reservation_prevents_preemptions(policy):
    """Nobody is preempted with memory for max_tokens; recomputed tokens are told by cause."""
    config = dataclasses.replace(CROWDED, cache="kv", max_tokens=200)
    results = [simulate(dataclasses.replace(config, policy=policy + option)) for option in ("", "?reserve=1")]
    assert results[0].preemptions > 0 == results[1].preemptions
    for result in results:
        assert sum(result.recomputed_by_cause.values()) == result.recomputed_tokens
        assert result.as_dict()["recomputed_by_cause"] == result.recomputed_by_cause
    assert results[0].recomputed_by_cause["memory"] == results[0].recomputed_tokens
    assert [m.finished_s is not None for m in results[1].requests if m is not None].count(True) == config.num_requests


class TestHostMemory:
    """Preempted requests come back by copying, in the time that copies take."""

    def run(self, swap_space: float, **fields) -> SimulationResult:
        config = SimulationConfig(
            rate=6.0, num_requests=30, policy="fcfs", cache="kv", num_blocks=400, swap_space=swap_space, **fields
        )
        return simulate(config)

    def test_less_is_computed_again_and_the_requests_end_sooner(self):
        without, swapped = self.run(0.0), self.run(16.0)
        assert without.preemptions > 10
        assert (without.saved_blocks, without.loaded_blocks, without.restores) == (0, 0, {})
        assert swapped.saved_blocks > 0
        assert swapped.loaded_blocks > 0
        assert swapped.restores["kv"] > 10
        assert swapped.recomputed_tokens < 0.2 * without.recomputed_tokens
        assert swapped.duration_s < without.duration_s

    def test_steps_take_as_long_as_their_transfers(self):
        hardware = load_hardware("opt-13b", "a100-40gb")
        slow = {
            mode: dataclasses.replace(costs, load_per_block_s=1e-9, save_per_block_s=0.5)
            for mode, costs in hardware.costs.items()
        }
        config = SimulationConfig(rate=6.0, num_requests=20, policy="fcfs", cache="kv", num_blocks=600, swap_space=16.0)
        fast = simulate(config)
        slower = simulate(config, hardware=dataclasses.replace(hardware, costs=slow))
        assert slower.saved_blocks > 0
        assert slower.duration_s > fast.duration_s + 0.4 * slower.saved_blocks

    def test_a_block_takes_the_time_of_its_bytes_on_the_link(self):
        hardware = load_hardware("opt-13b", "a100-40gb")
        assert block_bytes(hardware) == 40 * 16 * 5120 * 2
        costs = with_transfers(hardware.step_costs(), hardware)
        assert costs.load_per_block_s == costs.save_per_block_s == block_bytes(hardware) / 25.6e9
        two = load_hardware("opt-13b", "a100-40gb", 2)
        assert with_transfers(two.step_costs(), two).load_per_block_s == costs.load_per_block_s / 2
        assert num_host_blocks(hardware, 1.0) == 2**30 // block_bytes(hardware)

    def test_what_is_not_known_is_refused(self):
        hardware = dataclasses.replace(load_hardware("opt-13b", "a100-40gb"), name="abacus")
        with pytest.raises(ConfigError, match="the bandwidth between host and abacus is unknown"):
            with_transfers(hardware.step_costs(), hardware)
        with pytest.raises(ConfigError, match="block size in bytes of 'other'"):
            block_bytes(dataclasses.replace(hardware, model="other"))
        with pytest.raises(ConfigError, match="--no-enable-prefix-caching or --swap-space"):
            SimulationConfig(swap_space=1.0, enable_prefix_caching=False)
