"""One validator, four endpoints: HTTP, both gRPC services and Python give the same verdict and the same answer to the
same request.

`make fuzz` sends 1,200 fuzzed requests to all of them.
"""

import asyncio
import collections
import json
import math
from typing import Any

import pytest
from hypothesis import strategies as st

from apt_jax import LLM, validation
from apt_jax.errors import InvalidRequestError
from apt_jax.request import SamplingParams
from serve.client import make_request
from serve.http_api import openai_request as openai_api
from serve.protos.aptjax.v1 import apt_serve_pb2
from tests.support.cases import num_cases
from tests.support.endpoints import Request, ask_aptserve, ask_http, ask_python, ask_vllm, pb
from tests.support.fuzzing import MAX_MODEL_LEN, cases, fuzz
from tests.support.http_serving import HttpServed, http_serving
from tests.support.toy_serving import VOCAB_SIZE, assert_clean, toy_parts

NAN, INF = math.nan, math.inf
HELLO = 6
"""Tokens of the prompt, with the one that is prepended."""


def at(*limits: int) -> list[int]:
    """Return values just below each limit, at it, and just above."""
    return [limit + step for limit in limits for step in (-1, 0, 1)]


def near(*limits: float) -> list[float]:
    """Return such values as decimals that a 32-bit float represents."""
    return [round(limit + step, 4) for limit in limits for step in (-0.001, 0.0, 0.001)]


# Every field of SamplingParams: values at each limit and beyond, and some that no limit is about.
V = validation
NO_NUMBERS = [NAN, INF, -INF, 5e-324, 1e-42]
SAMPLING: dict[str, list[Any]] = {
    "max_tokens": [*at(1, MAX_MODEL_LEN - HELLO, V.MAX_INTEGER), 5, -1, 2**32 - 1],
    "temperature": [*near(0.0, V.MIN_TEMPERATURE, V.MAX_TEMPERATURE), -0.0, 0.7, *NO_NUMBERS],
    "top_k": [*at(-1, VOCAB_SIZE, V.MAX_INTEGER), 1, 2**32 - 1],
    "top_p": [*near(0.0, 1.0), -0.0, 0.1, 0.5, *NO_NUMBERS],
    "min_p": [*near(0.0, 1.0), -0.0, 0.5, *NO_NUMBERS],
    "seed": [0, 1, *at(2**31 - 1, V.MAX_SEED), -2, -(2**63), -(2**63) - 1],  # -1: another one each time
    "repetition_penalty": [*near(V.MIN_REPETITION_PENALTY, V.MAX_REPETITION_PENALTY), 0.0, -1.0, 1e-9, *NO_NUMBERS],
    "presence_penalty": [*near(-V.MAX_PENALTY, V.MAX_PENALTY), 0.3, -0.0, *NO_NUMBERS],
    "frequency_penalty": [*near(-V.MAX_PENALTY, V.MAX_PENALTY), 0.3, -0.0, *NO_NUMBERS],
    "logit_bias": [
        {}, {5: 1.5}, {VOCAB_SIZE - 1: 1.0}, {VOCAB_SIZE: 1.0}, {2**31 - 1: 0.0}, *({1: bias} for bias in [*near(-V.MAX_BIAS, V.MAX_BIAS), *NO_NUMBERS]),
        *(dict.fromkeys(range(count), 0.0) for count in at(VOCAB_SIZE, V.MAX_LOGIT_BIAS)),
    ],
    "min_tokens": [*at(0, 16, V.MAX_INTEGER), 3, 2**32 - 1],
    "stop": [*(["a"] * count for count in at(V.MAX_STOP_STRINGS)), *(["a" * count] for count in at(V.MAX_STOP_CHARS)), [], [""], ["q"], ["aé", "b"], ["\x00"]],
    "stop_token_ids": [[], [5], [5, 6], [VOCAB_SIZE - 1], [VOCAB_SIZE], [2**32 - 1], *(list(range(count)) for count in at(V.MAX_STOP_TOKEN_IDS))],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "logprobs": [*at(0, V.MAX_LOGPROBS), 3, 2**31 - 1],
    "prompt_logprobs": [*at(0, V.MAX_LOGPROBS), 3, 2**31 - 1],
    "structured_outputs": [
        {}, {"json_object": False}, {"json_object": True}, {"disable_any_whitespace": True}, {"json": "{}"}, {"json": "{"}, {"json": ""}, {"json": "3"},
        {"json": '{"type": "strin"}'}, {"json": '{"x-guidance": 1}'}, {"regex": "a+"}, {"regex": "("}, {"regex": ""}, {"choice": ["yes"]},
        {"choice": ["a", "b"]}, {"choice": [""]}, {"choice": []}, *({"choice": [f"c{i}" for i in range(count)]} for count in at(V.MAX_CHOICES)),
        {"grammar": 'start: "a"'}, {"grammar": "start"}, {"grammar": 'root ::= "a" | "b"'}, {"grammar": "root ::= ("},
        {"regex": "a", "json_object": True}, {"regex": "a", "json_object": False}, {"json_object": True, "whitespace_pattern": " "}, {"regex": "a", "whitespace_pattern": " "},
        *({"json": "{" + " " * (count - 2) + "}"} for count in at(V.MAX_GRAMMAR_BYTES)),
        *({"json_object": True, "whitespace_pattern": "a" * count} for count in at(V.MAX_WHITESPACE_PATTERN_BYTES)),
    ],
}  # fmt: skip
PROMPTS: list[Any] = [
    "", "x", "\x00", "<s>", "naïve", "x" * 5000, [], [5], [0, VOCAB_SIZE - 1], [VOCAB_SIZE], [2**32 - 1],
    *("x" * count for count in at(MAX_MODEL_LEN - 17, MAX_MODEL_LEN - 1)), *([1] * count for count in at(MAX_MODEL_LEN - 16, MAX_MODEL_LEN)),
]  # fmt: skip
MS = [*near(1e3 * V.MAX_SLO_S), 1e3 * V.MIN_SLO_S, 0.0009, 0.0, -1.0, 250.0, 12.5, 500, NAN, INF]
BESIDE: dict[str, list[Any]] = {
    "slo_ttft_ms": MS,
    "slo_tbt_ms": MS,
    "slo_e2e_ms": MS,
    "slo_class": ["rt", "be", "", "RT"],
    "request_id": ["x", "a b", "../etc", "a#1", "é", "", *("x" * count for count in at(V.MAX_REQUEST_ID_CHARS))],
    "n": [*at(1, V.MAX_SEQUENCES), 2**32 - 1],
    "deadline_ms": [*near(1e3 * V.MAX_DEADLINE_S), 60_000, 0.0, -1.0, NAN, INF],
}  # fmt: skip
SHORT = {"max_tokens": 4}
"""Further parameters, where neither the length of an answer nor what it is compared with is in question."""
AT_LENGTH = ("max_tokens", "min_tokens", "structured_outputs")
REQUESTS: list[Request] = [
    *({"prompt": "hello", "params": {name: value} if name in AT_LENGTH else {name: value, **SHORT}} for name, values in SAMPLING.items() for value in values),
    *({"prompt": prompt, "params": {}} for prompt in PROMPTS),
    *({"prompt": "hello", "params": SHORT, name: value} for name, values in BESIDE.items() for value in values),
    {"prompt": "x" * (MAX_MODEL_LEN - 20), "params": {"max_tokens": 30}},
    {"prompt": [], "params": {"top_p": 1.5}},
    {"prompt": "hello", "params": {"min_tokens": 4, "max_tokens": 3}},
    {"prompt": "hello", "params": {"min_tokens": 17, "max_tokens": 17}},
    {"prompt": "hello", "params": {"structured_outputs": {"regex": "a"}, "max_tokens": 300}},
    {"prompt": "hello", "params": {"stop": ["a"], "min_p": 0.1, "logprobs": 2, "repetition_penalty": 1.2}, "n": 3},
]  # fmt: skip
# Of VllmEngine's sampling parameters.
CONSTRAINTS = {"json_schema", "regex", "grammar", "json_object", "choice"}
ELSEWHERE = {"n", "truncate_prompt_tokens", "structural_tag"}
NOT_IN_APTSERVE = {"bad_words", "allowed_token_ids", "truncate_prompt_tokens", "pooling"}
NO_EFFECT = {"spaces_between_special_tokens", "grammar_from_first_token"}


def test_every_sampling_parameter_is_in_the_table():
    assert set(SAMPLING) | NOT_IN_APTSERVE | {"n"} == set(SamplingParams.__dataclass_fields__)
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert names == (set(SAMPLING) - {"structured_outputs"}) | CONSTRAINTS | ELSEWHERE | NO_EFFECT


class Endpoints:
    """All endpoints, and counts of their verdicts.

    Attributes:
        counts: number of verdicts by endpoint.
    """

    def __init__(self, served: HttpServed, llm: LLM) -> None:
        self._served, self._llm = served, llm
        self.counts: collections.Counter[str] = collections.Counter()

    async def agree(self, case: Request) -> None:
        """Send a case to every endpoint that can express it; require the same verdict in the same words, or the same
        tokens and text."""
        # The engine's own seeds count requests, and -1 is another one each time.
        params = {"seed": 11} | dict(case["params"])
        case = {**case, "params": params | {"seed": 11} if params["seed"] == -1 else params}
        python = ask_python(self._llm, case)
        self.counts[f"python {python[0]}"] += 1
        for name, ask in (("http", ask_http), ("aptserve", ask_aptserve), ("vllm", ask_vllm)):
            said = await ask(self._served, case)
            if said is None:
                continue
            self.counts[f"{name} {said[0]}"] += 1
            want = python
            if said[0] == want[0] == "served" and name == "vllm":
                want = ("served", [(token_ids, None) for token_ids, _ in want[1]])
            assert said == want, (name, case)


async def with_endpoints(scenario: Any) -> Endpoints:
    """Run a scenario with `Endpoints`; rejections happen before the engine, and nothing is left."""
    llm = LLM.from_parts(toy_parts(debug=False, max_model_len=MAX_MODEL_LEN))
    async with http_serving(debug=False, max_model_len=MAX_MODEL_LEN) as served:
        endpoints = Endpoints(served, llm)
        try:
            await scenario(endpoints)
            assert served.parts.engine.stats().num_rejected == 0
            assert served.parts.engine.stats().finished.get("error") is None
        finally:
            for grammars in (served.parts.grammars, llm.parts.grammars):
                if grammars is not None:
                    grammars.close()
    assert_clean(llm.parts)
    return endpoints


def test_P2_R1_to_R11_R25_the_endpoints_agree_about_each_bound():
    pytest.importorskip("llguidance")

    async def scenario(endpoints: Endpoints) -> None:
        for case in REQUESTS:
            await endpoints.agree(case)

    counts = asyncio.run(asyncio.wait_for(with_endpoints(scenario), 240)).counts
    for endpoint in ("python", "http", "aptserve", "vllm"):
        assert counts[f"{endpoint} served"] > 60, counts
        assert counts[f"{endpoint} refused"] > 60, counts


# --- fuzzed requests ---------------------------------------------------------------------------------------------

_INSIDE: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 40),
    "temperature": st.integers(1, 200).map(lambda n: n / 100),
    "top_k": st.integers(0, 300),
    "top_p": st.integers(1, 100).map(lambda n: n / 100),
    "min_p": st.integers(0, 100).map(lambda n: n / 100),
    "seed": st.integers(0, 2**31 - 1),
    "repetition_penalty": st.integers(1, 200).map(lambda n: n / 100),
    "presence_penalty": st.integers(-200, 200).map(lambda n: n / 100),
    "frequency_penalty": st.integers(-200, 200).map(lambda n: n / 100),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.integers(-100, 100).map(float), max_size=5),
    "min_tokens": st.integers(0, 10),
    "stop": st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5),
    "logprobs": st.integers(0, 20),
    "structured_outputs": st.sampled_from([{"regex": "[a-z]{1,9}"}, {"choice": ["yes", "no"]}, {"json_object": True}, {"json": '{"type": "integer"}'}]),
}  # fmt: skip
_PROMPT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20) | st.lists(
    st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20
)


@st.composite
def fuzzed_requests(draw: st.DrawFn) -> Request:
    """Several fields, mostly within their limits; one or two things at or beyond one."""
    names = draw(st.lists(st.sampled_from(sorted(_INSIDE)), max_size=5, unique=True))
    params = {name: draw(_INSIDE[name]) for name in names}
    case: dict[str, Any] = {"prompt": draw(_PROMPT), "params": params}
    for name in draw(st.lists(st.sampled_from(sorted(SAMPLING)), max_size=2)):
        params[name] = draw(st.sampled_from(SAMPLING[name]))
    if draw(st.integers(0, 5)) == 0:
        case["prompt"] = draw(st.sampled_from(PROMPTS))
    if draw(st.integers(0, 2)) == 0:
        name = draw(st.sampled_from(sorted(BESIDE)))
        if name in ("n", "deadline_ms"):  # each endpoint checks these at a different point
            case |= {"prompt": "hello", "params": {"max_tokens": 4}}
        case[name] = draw(st.sampled_from(BESIDE[name]))
    return case


@pytest.mark.seeds
def test_P2_the_endpoints_agree_about_any_request():
    pytest.importorskip("llguidance")
    total = cases(num_cases(80, 100), 1200, 20_000)

    async def scenario(endpoints: Endpoints) -> None:
        loop = asyncio.get_running_loop()

        def send(case: Request) -> None:
            asyncio.run_coroutine_threadsafe(endpoints.agree(case), loop).result(60)

        await asyncio.to_thread(fuzz, "endpoints", send, total, case=fuzzed_requests())

    counts = asyncio.run(with_endpoints(scenario)).counts
    total = counts["python served"] + counts["python refused"]
    print(f"  {dict(sorted(counts.items()))}")
    for endpoint in ("python", "http", "aptserve", "vllm"):
        assert counts[f"{endpoint} served"] > total / 10, counts
        assert counts[f"{endpoint} refused"] > total / 20, counts


def test_the_endpoints_give_the_same_answer():
    cases: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 12},
        {"seed": 3, "max_tokens": 12, "top_k": 5, "repetition_penalty": 1.2},
        {"seed": 3, "max_tokens": 12, "min_p": 0.1, "presence_penalty": 1.0, "min_tokens": 4},
        {"temperature": 0.0, "max_tokens": 12, "logprobs": 3},
    ]

    async def scenario() -> None:
        async with http_serving() as served:
            for params in cases:
                body = {"prompt": "hello", "return_token_ids": True, **params}
                (choice,) = (await served.post("/v1/completions", body)).json()["choices"]
                wire = [m async for m in served.grpc.generate("hello", **params)]
                assert choice["token_ids"] == [t for m in wire for t in m.token_ids]
                assert choice["text"] == "".join(m.text for m in wire)
                request = served.parts.build_request(prompt="hello", params=params)
                outputs = [output async for output in served.engine.generate(request)]
                assert outputs[-1].outputs[0].token_ids == choice["token_ids"]
                if "logprobs" in params:
                    sampled = [e.sampled.logprob for m in wire for e in m.logprobs]
                    assert choice["logprobs"]["token_logprobs"] == pytest.approx(sampled)

    asyncio.run(asyncio.wait_for(scenario(), 60))


# --- any value in any field ----------------------------------------------------------------------------------------

PARTS = toy_parts()
_LEAF = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-3, 300) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.5, 1.0, 0.0, -0.0, 2.0, 1e-320, 5e-324, 1e300]) | st.text(max_size=6) | st.just("x" * 300)
)  # fmt: skip
_VALUE = st.recursive(
    _LEAF, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6
)  # fmt: skip
_FIELDS = [name for name in SAMPLING if name not in ("logit_bias", "structured_outputs")]


@pytest.mark.seeds
def test_R8_R9_R14_any_value_of_any_parameter():
    params = st.dictionaries(st.sampled_from(_FIELDS), _VALUE, min_size=1, max_size=3)
    fuzz("parameters", check_parameters, cases(num_cases(60, 200), 2000, 100_000), params=params)


def check_parameters(params: dict[str, Any]) -> None:
    """HTTP takes null for absent; but for that it is Python's verdict, word for word."""
    given_params = {name: value for name, value in params.items() if value is not None}

    def verdict(build) -> tuple[str | None, Any]:
        try:
            return None, build()
        except InvalidRequestError as error:
            return str(error), None

    python, request = verdict(lambda: PARTS.build_request(prompt="hello", params=given_params))
    body = openai_api.parse_json(json.dumps({"prompt": "hello", **params}).encode())
    http, call = verdict(lambda: openai_api.read_call(PARTS, "completion", body, {}, 0.0))
    assert http == python
    assert "\n" not in (http or "")
    if request is not None:
        (other,) = call.requests
        seedless = {"seed": 0} if "seed" not in given_params else {}
        assert {**vars_of(request.params), **seedless} == {**vars_of(other.params), **seedless}
        try:
            message = make_request("hello", **given_params)
        except (TypeError, ValueError):
            return  # the message cannot hold it
        assert isinstance(message, apt_serve_pb2.GenerateRequest)


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
