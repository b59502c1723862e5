"""Sessions: files of calls, prompts that share what the file says, closed loops, completion times."""

import dataclasses
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apt_jax.costs.model import StepCosts
from apt_jax.errors import ConfigError
from apt_jax.request import RequestMetrics
from apt_jax.sim import catalog
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.sessions import COLUMNS, OPTIONAL_COLUMNS, Calls, SessionPrompts, alone_s, check_shared
from apt_jax.sim.simulator import SimulationResult, simulate
from apt_jax.sim.sweep import run_key
from apt_jax.sim.trace import Trace, load_trace
from apt_jax.sim.workload import Arrivals, draw_beside, drop_oversized, sample_workload, with_beside

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "traces" / "agent_sessions.csv.gz"
TWO = """\
session,request,subagent,parent,shared_blocks,prompt_tokens,output_tokens,think_s,input
a,0,,-1,0,200,5,0,text
b,7,,-1,0,130,4,0,text
a,1,,0,3,300,6,2.5,tool_result
a,2,sub,-1,0,100,3,0,text
b,8,,7,2,400,2,9,text
a,3,sub,2,1,150,3,1,tool_result
a,4,,1,4,310,7,4,tool_result
"""
CONFIG = SimulationConfig(rate=0.05, num_sessions=2, policy="fcfs", cache="kv", hidden_attention="reproject")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "sessions.csv"
    file.write_text(TWO)
    return file


def done(result: SimulationResult) -> list[RequestMetrics]:
    """The metrics of all calls, which must have completed."""
    assert all(m is not None and m.finished_s is not None for m in result.requests)
    return [m for m in result.requests if m is not None]


def arrivals_and_ends(result: SimulationResult) -> tuple[np.ndarray, np.ndarray]:
    metrics = done(result)
    return np.array([m.arrival_s for m in metrics]), np.array([m.finished_s or 0.0 for m in metrics])


# --- files -------------------------------------------------------------------------------------------------------------


def test_calls_of_a_session_are_together_and_wait_for_the_one_before_in_their_chain(path):
    trace = load_trace(path)
    calls = trace.calls
    assert calls is not None
    assert trace.prompt_tokens.tolist() == [200, 300, 100, 150, 310, 130, 400]
    assert calls.session.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert calls.follows.tolist() == [-1, 0, 1, 2, 1, -1, 5]
    assert calls.parent.tolist() == [-1, 0, -1, 2, 1, -1, 5]
    assert calls.shared_blocks.tolist() == [0, 3, 0, 1, 4, 0, 2]
    assert calls.chain.tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert calls.works == ("tool", "tool", "tool", "", "", "person", "")  # by what comes next in the chain
    assert [calls.chain_id(i) for i in (0, 2, 5)] == ["0.0", "0.1", "1.0"]
    assert calls.gaps_s().tolist() == [2.5, 4.0, 1.0, math.inf, math.inf, 9.0, math.inf]


def test_without_numbers_calls_count_from_0(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(
        "session,parent,shared_blocks,prompt_tokens,output_tokens,think_s\nx,-1,0,64,0,0\ny,-1,0,9,1,0\nx,0,1,99,1,3\n"
    )
    trace = load_trace(file)
    assert trace.calls is not None
    assert trace.calls.parent.tolist() == [-1, 0, -1]
    assert trace.output_tokens.tolist() == [1, 1, 1]  # an answer that was cut off at once takes one token


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,5,,9,1,300,6,1,text", "line 9: parent='9' must be -1 or the number of an earlier call"),
        ("a,5,,5,1,300,6,1,text", "line 9: parent='5' must be -1"),
        ("a,5,,7,1,300,6,1,text", "line 9: parent='7' must be -1"),  # of the other session
        ("a,5,,-2,0,300,6,1,text", "line 9: parent='-2' must be a whole number of at least -1"),
        ("a,4,,1,0,300,6,1,text", "line 9: request='4' occurs twice"),
        ("a,5,,4,-1,300,6,1,text", "line 9: shared_blocks='-1' must be a whole number"),
        ("a,5,,4,301,300,6,1,text", "line 9: shared_blocks='301' must be 0 without a parent, and at most"),
        ("a,5,,-1,1,300,6,1,text", "line 9: shared_blocks='1' must be 0 without a parent"),
        ("a,5,,4,6,300,6,1,text", "line 9: shared_blocks=6 blocks of 64 tokens are more than 300 tokens"),
        ("a,5,,4,1,300,6,-1,text", "line 9: think_s='-1' must be from 0 to 2592000 seconds"),
        ("a,5,,4,1,300,6,1e9,text", "line 9: think_s='1e9' must be"),
        ("a,5,,4,1,300,6,nan,text", "line 9: think_s='nan' must be"),
        ("a,5,,4,1,300,6,1", "line 9: 8 values for 9 columns"),
        ("a,x,,4,1,300,6,1,text", "line 9: request='x' must be a whole number of at least 0"),
        ("a,5,,4,1,300,-6,1,text", "line 9: output_tokens='-6' must be a whole number of at least 0"),
        ("a,5,,4,99999999999,300,6,1,text", "line 9: shared_blocks='99999999999'"),
    ],
)
def test_a_bad_cell_is_refused_with_its_line_and_column(path, row, message):
    path.write_text(TWO + row + "\n")
    with pytest.raises(ConfigError, match=message):
        simulate(dataclasses.replace(CONFIG, trace=str(path)))


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(TWO.encode())[:-30])
    with pytest.raises(ConfigError, match=r"t\.csv\.gz: cannot be read as CSV"):
        load_trace(file)


def test_sessions_need_a_rate_or_a_number_at_once(path):
    with pytest.raises(ConfigError, match="has sessions; give the number of sessions per second"):
        simulate(dataclasses.replace(CONFIG, trace=str(path), rate=None))


def test_a_call_that_can_never_fit_ends_its_chain(path):
    path.write_text(TWO.replace("a,1,,0,3,300", "a,1,,0,3,3000"))
    config = dataclasses.replace(CONFIG, trace=str(path), drop_too_long=True)
    trace = drop_oversized(load_trace(path), load_hardware("opt-13b", "a100-40gb"), config)
    assert trace.prompt_tokens.tolist() == [200, 130, 400]  # the subagent began after the call that is left out
    assert trace.calls is not None
    assert trace.calls.session.tolist() == [0, 1, 1]
    assert trace.calls.follows.tolist() == trace.calls.parent.tolist() == [-1, -1, 1]
    assert simulate(config).num_left_out == 4
    with pytest.raises(ConfigError, match="line 4: 3000 prompt and 6 output tokens can never fit"):
        simulate(dataclasses.replace(config, drop_too_long=False))


# --- other formats -----------------------------------------------------------------------------------------------------


def recorded(name: str, **changes: object) -> dict[str, object]:
    ids = [1, 2, 3]
    requests = [
        {"t": 0.0, "in": 200, "out": 5, "hash_ids": ids, "input_types": ["text"], "api_time": 3.0},
        {"t": 5.5, "in": 300, "out": 6, "hash_ids": [*ids, 4], "input_types": ["tool_result"], "think_time": 2.0},
        {"type": "subagent", "requests": [{"t": 0.0, "in": 100, "out": 3, "hash_ids": [1]}]},
        {"t": 9.0, "in": 310, "out": 7, "hash_ids": [*ids, 5], "input_types": ["text", "thinking"]},
    ]
    return {"id": name, "block_size": 64, "requests": requests, **changes}


def test_recorded_sessions_are_read_as_they_are(tmp_path):
    for name in ("s2", "s1"):
        (tmp_path / f"{name}.json").write_text(json.dumps(recorded(name)))
    trace = load_trace(tmp_path)
    calls = trace.calls
    assert calls is not None
    assert calls.num_sessions == 2
    one = load_trace(tmp_path / "s1.json")
    assert one.prompt_tokens.tolist() == [200, 300, 100, 310]
    assert one.calls is not None
    assert one.calls.follows.tolist() == [-1, 0, 1, 1]
    assert one.calls.parent.tolist() == [-1, 0, 1, 1]
    assert one.calls.shared_blocks.tolist() == [0, 3, 1, 3]
    assert one.calls.think_s.tolist() == [0.0, 2.0, 0.0, 3.5]  # without think_time: from the times, less api_time
    assert one.calls.works == ("tool", "person", "", "")


def test_why_an_answer_ended_tells_who_works_next(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(
        "session,parent,shared_blocks,prompt_tokens,output_tokens,think_s,input,stop\n"
        "x,-1,0,64,1,0,text,tool_use\nx,0,1,99,1,3,text,end_turn\nx,1,1,120,1,3,tool_result,\n"
    )
    calls = load_trace(file).calls
    assert calls is not None
    assert calls.works == ("tool", "person", "")
    session = recorded("s")
    session["requests"][0]["stop"] = "end_turn"  # type: ignore[index]
    (tmp_path / "s.json").write_text(json.dumps(session))
    calls = load_trace(tmp_path / "s.json").calls
    assert calls is not None
    assert calls.works[0] == "person"
    session["requests"][1]["stop"] = 3  # type: ignore[index]
    (tmp_path / "s.json").write_text(json.dumps(session))
    with pytest.raises(ConfigError, match="request 1: stop=3 must be a string"):
        load_trace(tmp_path / "s.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(recorded("x"))[:-9], "not JSON .* may have been cut off"),
        (json.dumps(recorded("x", block_size=16)), "block_size=16 must be 64"),
        (json.dumps(recorded("x", requests=[{"in": 3, "out": 1}])), "request 0: hash_ids=None must be a list"),
        (json.dumps(recorded("x", requests=7)), "requests=7 must be a list"),
        ("[]", r"x.json: \[\] must be an object"),
        ("{}", "block_size=None must be a whole number"),
        (json.dumps(recorded("x", requests=[3])), "request 0: 3 must be an object"),
        *(
            (
                json.dumps(recorded("x", requests=[{"in": 70, "out": 1, "hash_ids": [1], **wrong}])),
                f"request 0: {name}=",
            )
            for name, values in {
                "hash_ids": (["a"], [2**70], [None], [[1, 2]], [1.5], [True], "1", 5),
                "in": (0, -1, 1.5, True, "5", 2**31, None),
                "out": (-1, 2.0, "5"),
                "t": ("x", [1], 10**400, True),
                "think_time": ("x", 1e300, True, {}),
                "api_time": ("x", [], True),
                "input_types": (5, "text", [1], None),
                "requests": (5, "x"),
            }.items()
            for value in values
            for wrong in ({name: value},)
        ),
    ],
)
def test_a_session_in_another_form_is_refused(tmp_path, text, message):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_trace(file)


def test_subagents_of_subagents_have_a_bound(tmp_path):
    requests: list[object] = [{"in": 3, "out": 1, "hash_ids": [1]}]
    for _ in range(8):
        requests = [{"requests": requests}]
    (tmp_path / "x.json").write_text(json.dumps(recorded("x", requests=requests)))
    assert load_trace(tmp_path / "x.json").num_requests == 1
    (tmp_path / "x.json").write_text(json.dumps(recorded("x", requests=[{"requests": requests}])))
    with pytest.raises(ConfigError, match="nested more than 8 deep"):
        load_trace(tmp_path / "x.json")


def test_mooncakes_lines_are_read_as_they_are(tmp_path):
    file = tmp_path / "m.jsonl"
    line = {"timestamp": 1500, "input_length": 1000, "output_length": 7, "hash_ids": [5, 6]}
    file.write_text(json.dumps(line) + "\n\n" + json.dumps(line | {"timestamp": 2500, "hash_ids": [5]}) + "\n")
    trace = load_trace(file)
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [1.5, 2.5]
    assert trace.hash_ids is not None
    assert [ids.tolist() for ids in trace.hash_ids] == [[5, 6], [5]]
    file.write_text(file.read_text() + '{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match="line 4: hash_ids=None must be a list"):
        load_trace(file)


# --- prompts -----------------------------------------------------------------------------------------------------------


@st.composite
def any_calls(draw) -> tuple[Calls, np.ndarray]:
    """Some sessions of random form."""
    session, follows, parent, shared, lengths = [], [], [], [], []
    for number in range(draw(st.integers(1, 3))):
        base = len(session)
        for i in range(draw(st.integers(1, 5))):
            length = draw(st.integers(1, 700))
            of = draw(st.integers(-1, i - 1))
            blocks = 0 if of < 0 else draw(st.integers(0, min(length, lengths[base + of]) // 64))
            session.append(number)
            follows.append(base + i - 1 if i else -1)
            parent.append(base + of if of >= 0 else -1)
            shared.append(blocks)
            lengths.append(length)
    n = len(session)
    calls = Calls(
        session=np.array(session, np.int32),
        follows=np.array(follows, np.int32),
        think_s=np.zeros(n),
        parent=np.array(parent, np.int32),
        shared_blocks=np.array(shared, np.int32),
        works=("",) * n,
        chain=np.zeros(n, np.int32),
        common_tokens=draw(st.sampled_from([0, 64, 200])),
    )
    return calls, np.array(lengths, np.int32)


def common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(a.size, b.size)
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


@settings(max_examples=150, deadline=None)
@given(any_calls(), st.sampled_from([1.0, 0.5, 1 / 3, 1 / 64, 2.0]))
def test_prompts_begin_alike_exactly_as_far_as_the_trace_says(given_calls, scale):
    calls, lengths = given_calls
    trace = Trace(name="t", prompt_tokens=lengths, output_tokens=lengths).scale_tokens(scale)
    prompts = SessionPrompts(calls, trace.prompt_tokens, scale=scale)
    # A second way to say it: the blocks of each prompt as a list of names.
    names: list[list[object]] = []
    for i, (length, parent, shared) in enumerate(
        zip(trace.prompt_tokens.tolist(), calls.parent.tolist(), calls.shared_blocks.tolist(), strict=True)
    ):
        kept = names[parent][:shared] if parent >= 0 else [("start", j) for j in range(calls.common_tokens // 64)]
        size = int((length - 1) / (64 * scale)) + 1
        names.append([*kept[:size], *[(i, j) for j in range(len(kept), size)]])
    for i in range(len(prompts)):
        assert prompts[i].size == trace.prompt_tokens[i]
        assert prompts[i].min() >= 0
        for j in range(i):
            same = next((k for k, (a, b) in enumerate(zip(names[i], names[j], strict=False)) if a != b), None)
            both = min(prompts[i].size, prompts[j].size)
            expected = both if same is None else min(int(np.ceil(same * 64 * scale)), both)
            assert common(prompts[i], prompts[j]) == expected


def test_a_session_that_is_drawn_again_has_other_contents(path):
    config = dataclasses.replace(CONFIG, num_sessions=4)
    workload = sample_workload(load_trace(path), config)
    assert workload.calls is not None
    assert workload.prompts is not None
    assert workload.calls.num_sessions == 4
    begins = workload.calls.begins()[:-1].tolist()
    assert all(common(workload.prompts[i], workload.prompts[j]) == 0 for i in begins for j in begins if i < j)


# --- closed loops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_call_arrives_its_think_time_after_the_answer_before(path, overlap):
    config = dataclasses.replace(CONFIG, trace=str(path), overlap=overlap)
    result = simulate(config, debug=True)
    calls = sample_workload(load_trace(path), config).calls
    assert calls is not None
    arrival_s, end_s = arrivals_and_ends(result)
    later = calls.follows >= 0
    assert arrival_s[later] == pytest.approx(end_s[calls.follows[later]] + calls.think_s[later])
    shorter = simulate(dataclasses.replace(config, max_think_s=1.0))
    arrival_s, end_s = arrivals_and_ends(shorter)
    assert arrival_s[later] == pytest.approx(end_s[calls.follows[later]] + np.minimum(calls.think_s[later], 1.0))


def test_a_number_of_sessions_is_held_constant(path):
    config = dataclasses.replace(CONFIG, trace=str(path), rate=None, concurrent_sessions=3, num_sessions=12)
    calls = sample_workload(load_trace(path), config).calls
    assert calls is not None
    arrival_s, end_s = arrivals_and_ends(simulate(config))
    begin = [float(arrival_s[calls.session == s].min()) for s in range(12)]
    end = [float(end_s[calls.session == s].max()) for s in range(12)]
    assert max(begin[:3]) <= 60.0
    # Each later one begins when one has ended.
    assert sorted(begin[3:]) == pytest.approx(sorted(end)[:9])


def test_each_session_begins_at_its_own_time_whatever_the_policy(path):
    config = dataclasses.replace(CONFIG, trace=str(path), num_sessions=6)
    calls = sample_workload(load_trace(path), config).calls
    assert calls is not None
    first = calls.begins()[:-1]
    begins = [
        arrivals_and_ends(simulate(dataclasses.replace(config, policy=p)))[0][first] for p in ("fcfs", "apt-plus")
    ]
    assert begins[0].tolist() == begins[1].tolist()


def test_calls_after_one_that_was_rejected_still_arrive(path):
    workload = sample_workload(load_trace(path), CONFIG)
    assert workload.calls is not None
    arrivals = Arrivals(workload, CONFIG)
    taken = []
    now_s = 0.0
    while arrivals.next_s < np.inf:
        now_s = max(now_s, arrivals.next_s)
        taken.append(int(arrivals.take().request_id))
        arrivals.ended(taken[-1], now_s)
    assert sorted(taken) == list(range(7))
    assert not np.isnan(arrivals.arrival_s).any()


def test_what_calls_share_is_computed_once(path):
    config = dataclasses.replace(CONFIG, trace=str(path))
    workload = sample_workload(load_trace(path), config)
    cached = np.array([m.num_cached_tokens for m in done(simulate(config, debug=True))])
    assert cached.tolist() == workload.shared_tokens(config).tolist()
    off = simulate(dataclasses.replace(config, enable_prefix_caching=False))
    assert off.prefix_hit_fraction == 0.0


# --- completion times --------------------------------------------------------------------------------------------------


def test_completion_is_the_sum_of_the_calls_durations(path):
    result = simulate(dataclasses.replace(CONFIG, trace=str(path)))
    sessions = result.sessions
    assert sessions is not None
    calls = sample_workload(load_trace(path), CONFIG).calls
    assert calls is not None
    arrival_s, end_s = arrivals_and_ends(result)
    took = [float((end_s - arrival_s)[calls.session == s].sum()) for s in range(2)]
    assert sessions.completion_mean_s == pytest.approx(np.mean(took))
    assert (sessions.num_sessions, sessions.num_completed, sessions.num_calls) == (2, 2, 7)
    assert "sessions" in result.as_dict()
    assert "sessions" not in simulate(SimulationConfig(rate=4.0, num_requests=3)).as_dict()


def test_a_session_alone_has_no_slowdown(path):
    """The formula of the time alone is what the engine takes for one call after the other."""
    path.write_text("\n".join([line for line in TWO.splitlines() if "sub" not in line or "subagent" in line]) + "\n")
    config = dataclasses.replace(CONFIG, trace=str(path), rate=1e-4, scale_tokens=4.0)
    workload = sample_workload(drop_oversized(load_trace(path), load_hardware("opt-13b", "a100-40gb"), config), config)
    costs = load_hardware("opt-13b", "a100-40gb").step_costs("reproject")
    assert workload.calls is not None
    for budget in (2048, 300):
        result = simulate(dataclasses.replace(config, max_num_batched_tokens=budget))
        alone = alone_s(
            workload.prompt_tokens, workload.output_tokens, workload.shared_tokens(config), costs, budget
        )  # fmt: skip
        arrival_s, end_s = arrivals_and_ends(result)
        assert (end_s - arrival_s).tolist() == pytest.approx(alone.tolist(), rel=1e-6)
        assert result.sessions is not None
        assert result.sessions.slowdown_mean == pytest.approx(1.0, rel=1e-6)


def test_the_time_alone_counts_windows_and_experts():
    costs = StepCosts(
        decode_base_s=1.0, decode_per_token_s=0.1, decode_per_window_token_s=0.5, window_tokens=40.0, experts_s=3.0, experts_per_token=0.25
    )  # fmt: skip
    prompt, output = np.array([10, 35, 60], np.int32), np.array([50, 20, 5], np.int32)
    one = np.ones(1, np.int32)
    expected = [
        sum(costs.step_s(one, one * (p + t), np.zeros(1, np.int8)) for t in range(o - 1))
        for p, o in zip(prompt.tolist(), output.tolist(), strict=True)
    ]
    assert alone_s(prompt, output, np.zeros(3, np.int64), costs, 100).tolist() == pytest.approx(expected)


# --- generated workloads -----------------------------------------------------------------------------------------------

QUANTILES = (10, 25, 50, 75, 90)


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded sessions are not bundled")
def test_generated_agents_are_like_the_recorded_ones():
    made, real = load_trace("agents"), load_trace(RECORDED)
    assert made.calls is not None
    assert real.calls is not None

    def quantiles(values: np.ndarray) -> np.ndarray:
        return np.percentile(values, QUANTILES)

    def later(trace: Trace) -> np.ndarray:
        assert trace.calls is not None
        return trace.calls.think_s[trace.calls.follows >= 0]

    for of in (lambda t: t.output_tokens, lambda t: np.bincount(t.calls.session), later):
        assert quantiles(of(made)) == pytest.approx(quantiles(of(real)), rel=0.25, abs=2)
    assert quantiles(made.prompt_tokens) == pytest.approx(quantiles(real.prompt_tokens), rel=0.35)
    shares = [(t.calls.shared_blocks.sum() * 64 / t.prompt_tokens.sum()) for t in (made, real)]  # pyright: ignore
    assert shares[0] == pytest.approx(shares[1], abs=0.01)


@pytest.mark.parametrize(
    ("name", "prompt", "output", "turns"),
    [
        # Means of the catalog; of single turns the prompt is the system prompt and the input.
        ("reasoning", 250 + 1000, 8000, 1),
        ("batch-summarization-rag", 500 + 15000, 500, 1),
        ("batch-synthetic-data", 2000 + 500, 4000, 1),
        ("interactive-chat", None, 300, 4),
        ("deep-research", None, 300, 15),
        ("code-generation", None, 425, None),
        ("agentic-trace-replay", 49141, 659, 21.9),
    ],
)
def test_generated_workloads_have_the_means_of_the_catalog(name, prompt, output, turns):
    trace = load_trace(name)
    assert trace.output_tokens.mean() == pytest.approx(output, rel=0.1)
    if prompt is not None:
        assert trace.prompt_tokens.mean() == pytest.approx(prompt, rel=0.05)
    if turns is not None:
        calls = 1.0 if trace.calls is None else np.bincount(trace.calls.session).mean()
        assert calls == pytest.approx(turns, rel=0.1)
    again = catalog.generate(name)
    assert (again.prompt_tokens == trace.prompt_tokens).all()


def test_every_generated_trace_can_be_simulated():
    for name in catalog.NAMES:
        config = SimulationConfig(
            trace=name, rate=1.0, num_requests=20, scale_tokens=1 / 256, policy="fcfs", cache="kv"
        )  # fmt: skip
        if name in catalog.OF_SESSIONS:
            config = dataclasses.replace(config, num_sessions=2, max_think_s=5.0)
        result = simulate(config, debug=True)
        assert result.summary.num_completed == result.summary.num_sent > 0
        assert (result.prefix_hit_fraction > 0) == (
            result.sessions is not None
        )  # a short system prompt shrinks to one token


@pytest.mark.parametrize("name", catalog.OF_SESSIONS)
def test_every_session_of_a_generated_trace_can_be_drawn(name):
    trace = load_trace(name)
    calls = trace.calls
    assert calls is not None
    assert np.unique(calls.session).tolist() == list(range(calls.num_sessions))
    index = np.arange(trace.num_requests)
    assert (calls.follows < index).all()
    assert (calls.parent < index).all()
    assert (calls.session[calls.follows] == calls.session)[calls.follows >= 0].all()
    check_shared(calls, trace.prompt_tokens, index.tolist(), trace.block_tokens, name)
    for num_sessions in (calls.num_sessions + 5, 7):  # all of them, some twice; and a few
        config = SimulationConfig(trace=name, rate=1.0, num_sessions=num_sessions, enable_prefix_caching=False)
        arrivals, now_s, num = Arrivals(sample_workload(trace, config), config), 0.0, 0
        while arrivals.next_s < np.inf:
            now_s, num = max(now_s, arrivals.next_s), num + 1
            arrivals.ended(int(arrivals.take().request_id), now_s)
        assert num == arrivals.num_requests


def test_commands_without_sessions_refuse_them(path):
    for trace in (path, "agents"):
        with pytest.raises(
            ConfigError, match=r"is a trace of sessions, which apt-jax simulate and bench run.*\(--requests\)"
        ):
            load_trace(trace).without_sessions("--requests")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrent_sessions": 2}, "leave out the rate and cv"),
        ({"concurrent_sessions": 2, "rate": None, "cv": 2.0}, "leave out the rate and cv"),
        ({"trace": "sharegpt", "num_sessions": 3}, "trace sharegpt has no sessions; leave num_sessions out"),
        ({"trace": "sharegpt", "num_sessions": None, "max_think_s": 3.0}, r"leave max_think_s out \(--max-think-s\)"),
        ({"trace": "sharegpt", "num_sessions": None, "concurrent_sessions": 3}, "leave concurrent_sessions out"),
    ],
)
def test_options_that_contradict_each_other_are_refused(path, changes, message):
    with pytest.raises(ConfigError, match=message):
        simulate(dataclasses.replace(CONFIG, **{"trace": str(path), **changes}))


def test_shared_blocks_are_checked_whatever_the_scale(path):
    path.write_text(TWO.replace("a,4,,1,4,310", "a,4,,1,5,250"))
    for scale in (1.0, 0.999, 1 / 64):
        with pytest.raises(ConfigError, match="shared_blocks=5 blocks of 64 tokens are more than 250 tokens"):
            simulate(dataclasses.replace(CONFIG, trace=str(path), scale_tokens=scale))


def test_lengths_do_not_overflow(path):
    path.write_text(TWO.replace("a,0,,-1,0,200,5", "a,0,,-1,0,5000000,5"))
    with pytest.raises(ConfigError, match="line 2: 10000000 prompt and 5000 output tokens can never fit"):
        simulate(dataclasses.replace(CONFIG, trace=str(path), scale_tokens=1000.0))


def test_the_system_prompt_and_max_tokens_count_in_the_time_alone():
    config = SimulationConfig(
        trace="interactive-chat", rate=1e-3, num_sessions=3, scale_tokens=1 / 4, policy="fcfs", cache="kv",
        hidden_attention="reproject", max_tokens=3,
    )  # fmt: skip
    result = simulate(config)
    assert result.sessions is not None
    assert result.sessions.slowdown_mean == pytest.approx(1.0, abs=0.1)  # the first finds no system prompt
    assert result.sessions.slowdown.p50 == pytest.approx(1.0, abs=1e-3)


def test_stored_runs_of_a_directory_depend_on_its_files(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(recorded("a")))
    config = dataclasses.replace(CONFIG, trace=str(tmp_path))
    before = run_key(config)
    (tmp_path / "b.json").write_text(json.dumps(recorded("b")))
    assert run_key(config) != before
    assert json.dumps(simulate(dataclasses.replace(config, num_sessions=np.int64(2))).as_dict())  # pyright: ignore


@pytest.mark.parametrize("first", ["interactive-chat", "file"])
def test_two_traces_run_beside_each_other_as_two_classes(path, first):
    config = SimulationConfig(
        model="llama-3-8b", hardware="h100-80gb", cache="kv", policy="apt-plus", rate=0.5, num_sessions=3, seed=3,
        trace=str(path) if first == "file" else first, scale_tokens=1 / 16, beside="interactive-chat:1", max_think_s=20.0,
    )  # fmt: skip
    alone = dataclasses.replace(config, beside=None)
    hardware = load_hardware(config.model, config.hardware)
    workload = sample_workload(drop_oversized(load_trace(config.trace), hardware, alone), alone)
    both, chats = with_beside(workload, hardware, config), draw_beside(workload, hardware, config)
    num = workload.arrival_s.size
    assert both.best_effort.tolist() == [True] * num + [False] * chats.arrival_s.size
    assert np.nanmax(chats.arrival_s) < 2 * np.nanmax(workload.arrival_s)
    assert both.slos is not None
    assert {slo.ttft_s for slo in both.slos[num:]} == {catalog.OBJECTIVES["interactive-chat"].ttft_s}
    assert both.prompts is not None
    assert both.calls is not None
    # Each trace's prompts begin alike as far as they do alone, and the two traces' not at all.
    for part, begin in ((workload, 0), (chats, num)):
        assert part.prompts is not None
        for i, j in np.random.default_rng(5).integers(0, part.arrival_s.size, (60, 2)).tolist():
            expected = common(part.prompts[i], part.prompts[j])
            assert common(both.prompts[begin + i], both.prompts[begin + j]) == expected
    assert common(both.prompts[0], both.prompts[num]) == 0
    result = simulate(config, debug=True)
    assert result.by_class["be"].num_sent == num
    assert result.by_class["rt"].num_completed == chats.arrival_s.size > 5
    assert result.sessions is not None
    assert (result.sessions.num_sessions, result.sessions.num_calls) == (3, num)
    rt = np.flatnonzero(~both.best_effort)
    calls, begun = both.calls, [m.arrival_s for m in done(result)]
    after = rt[calls.follows[rt] >= 0]
    ends = [done(result)[i].finished_s or 0.0 for i in calls.follows[after].tolist()]
    assert np.array(begun)[after] == pytest.approx(np.array(ends) + calls.think_s[after])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beside": "interactive-chat"}, "sessions per second"),
        ({"beside": "interactive-chat:0"}, "sessions per second"),
        ({"beside": ":1"}, "sessions per second"),
        ({"beside": "sharegpt:1"}, "must be traces of sessions"),
        ({"trace": "sharegpt", "beside": "agents:1", "num_sessions": None}, "must be traces of sessions"),
        ({"beside": "nothing:1"}, "is neither a file nor one of"),
        ({"beside": "agents:1", "rate": None, "concurrent_sessions": 2}, "needs a rate"),
        ({"beside": "agents:1", "tenants": 2}, "one tenant"),
    ],
)
def test_a_second_trace_that_cannot_run_beside_is_refused(path, changes, message):
    with pytest.raises(ConfigError, match=message):
        simulate(dataclasses.replace(CONFIG, **{"trace": str(path), **changes}))


def test_columns_are_documented():
    page = (Path(__file__).parents[2] / "docs" / "lab" / "sessions.md").read_text()
    assert all(f"`{column}`" in page for column in (*COLUMNS, *OPTIONAL_COLUMNS))
