"""One validator, three doors: HTTP, gRPC and Python say the same of the same request, and give the same answer."""

import asyncio
import json
import math
import re
from typing import Any

import grpc
import pytest
from http_serving import HttpServed, http_serving
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_serving import VOCAB_SIZE, toy_parts

from apt_jax.errors import InvalidRequestError
from apt_jax.request import SamplingParams
from serve import openai_api
from serve.client import make_request
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb

NAN, INF = math.nan, math.inf

# Every field of SamplingParams: values at the borders and beyond.
SAMPLING: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1, 250, 251, 257, 2**31 - 1],
    "temperature": [-0.1, -0.0, 0.0, 0.009, 0.01, 2.0, 2.1, NAN, INF, -INF, 5e-324],
    "top_k": [-2, -1, 0, 1, VOCAB_SIZE, 2**31 - 1],
    "top_p": [0.0, -0.5, 0.5, 1.0, 1.5, NAN, INF],
    "min_p": [-0.5, 0.0, 0.5, 1.5, NAN],
    "seed": [-1, 0, 2**63 - 1],
    "repetition_penalty": [0.0, -1.0, 0.01, 2.0, 2.1, NAN],
    "presence_penalty": [-2.1, -2.0, 2.0, 2.1, NAN, INF],
    "frequency_penalty": [-2.1, -2.0, 2.0, 2.1, NAN],
    "logit_bias": [{VOCAB_SIZE: 1.0}, {1: NAN}, {1: 101.0}, {1: -100.0}, {i: 0.0 for i in range(301)}],
    "min_tokens": [-1, 0, 16, 17],
    "stop": [[""], ["a"] * 5, ["a" * 257], ["a", "b"]],
    "stop_token_ids": [[VOCAB_SIZE], [VOCAB_SIZE - 1], list(range(17))],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "logprobs": [-1, 0, 20, 21],
    "structured_outputs": [
        {}, {"json_object": False}, {"disable_any_whitespace": True}, {"regex": "("},
        {"json": "{"}, {"json": '{"x-guidance": 1}'}, {"choice": []}, {"choice": ["a", "b"]}, {"grammar": "start"},
    ],
}  # fmt: skip


def test_every_sampling_parameter_is_in_the_table():
    assert set(SAMPLING) == set(SamplingParams.__dataclass_fields__)


REQUESTS: list[dict[str, Any]] = [
    *({"params": {name: value}} for name, values in SAMPLING.items() for value in values),
    {"prompt": ""},
    {"prompt": "x"},
    {"prompt": "x" * 254},
    {"prompt": "x" * 255},
    {"prompt": "x" * 5000},
    {"prompt_token_ids": []},
    {"prompt_token_ids": [0, VOCAB_SIZE - 1]},
    {"prompt_token_ids": [VOCAB_SIZE]},
    {"prompt_token_ids": [1] * 255},
    {"prompt_token_ids": [1] * 256},
    {"params": {"min_tokens": 17, "max_tokens": 17}},
    {"params": {"structured_outputs": {"regex": "a"}, "max_tokens": 300}},
    *({"request_id": value} for value in ("a b", "../etc", "x" * 128, "x" * 129, "a#1", "é")),
    *(
        {name: value}
        for name in ("slo_ttft_ms", "slo_tbt_ms")
        for value in (0.0, -1.0, 0.001, 0.0001, 86_400_000.0, 86_400_001.0, NAN, INF)
    ),
    {"slo_class": "rt"},
    {"slo_class": "be"},
]


def named(field: str) -> str:
    """HTTP has one name for a prompt of either kind."""
    return re.sub(r"^prompt_token_ids", "prompt", field)


def python_says(served: HttpServed, case: dict[str, Any]) -> str | None:
    """The message of a refusal, None where the request is built."""
    try:
        served.parts.build_request(**{"prompt": "hello"} | case if "prompt_token_ids" not in case else case)  # fmt: skip
    except InvalidRequestError as error:
        found = error
    else:
        return None
    assert str(found).startswith(found.field)
    return named(str(found))


async def http_says(served: HttpServed, case: dict[str, Any]) -> str | None:
    body = {k: v for k, v in case.items() if k not in ("params", "prompt_token_ids")}
    body |= {"prompt": case.get("prompt_token_ids", case.get("prompt", "hello"))}
    body |= case.get("params", {})
    if "logit_bias" in body:
        body["logit_bias"] = {str(k): v for k, v in body["logit_bias"].items()}
    response = await served.http.post(
        "/v1/completions",
        content=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    if response.status_code == 200:
        return None
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-should-retry"] == "false"
    if error["param"] != "body":
        assert error["message"].startswith(error["param"])
    return error["message"]


async def grpc_says(served: HttpServed, case: dict[str, Any]) -> str | None:
    fields = {k: v for k, v in case.items() if k not in ("params", "prompt", "prompt_token_ids")}
    prompt = case.get("prompt_token_ids", case.get("prompt", "hello"))
    try:
        async for _ in served.grpc.generate(prompt, **fields, **case.get("params", {})):
            pass
    except grpc.aio.AioRpcError as error:
        found = error
    else:
        return None
    assert found.code() is grpc.StatusCode.INVALID_ARGUMENT, found.details()
    return named(found.details() or "")


def has_what_json_lacks(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_what_json_lacks, value.values()))
    return isinstance(value, float) and not math.isfinite(value)


def test_P2_the_doors_say_the_same_of_the_same_request():
    pytest.importorskip("llguidance")
    verdicts = {"taken": 0, "refused": 0}

    async def scenario() -> None:
        async with http_serving() as served:
            for case in REQUESTS:
                python, http, wire = (
                    python_says(served, case),
                    await http_says(served, case),
                    await grpc_says(served, case),
                )
                verdicts["taken" if python is None else "refused"] += 1
                assert python == wire, case
                if has_what_json_lacks(case):
                    assert python is not None
                    assert http is not None
                    assert http.startswith("body: ")
                else:
                    assert http == python, case
            # What was refused was refused before the engine.
            assert served.parts.engine.stats().num_refused == 0
            assert served.parts.engine.stats().finished.get("error") is None
            assert served.parts.grammars is not None
            served.parts.grammars.close()

    asyncio.run(asyncio.wait_for(scenario(), 240))
    assert verdicts["taken"] > 35
    assert verdicts["refused"] > 70


def test_the_doors_give_the_same_answer():
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


@settings(max_examples=600)
@given(params=st.dictionaries(st.sampled_from(_FIELDS), _VALUE, min_size=1, max_size=3))
def test_R8_R9_R14_any_value_of_any_parameter(params):
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
        assert isinstance(message, pb.GenerateRequest)


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
