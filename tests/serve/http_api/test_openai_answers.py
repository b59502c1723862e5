"""Chunks written in one go are the bytes of the chunks that they stand for."""

import pytest

from apt_jax.frontend.outputs import OutputDelta
from apt_jax.request import Logprob, RequestMetrics
from serve.compact_json import json_bytes
from serve.http_api.openai_request import read_call
from serve.http_api.openai_response import CompletionResponseBuilder
from tests.support.toy_serving import toy_parts

TEXTS = ["He said ", '"text":"', "\n\\", "", "äöü 🙂", '","content":"', "end"]


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"return_token_ids": True},
        {"aptjax_timings": True},
        {"logprobs": True},
    ],
)
def test_events_are_chunks_as_json(kind, fields):
    parts = toy_parts()
    body = {"stream": True, "prompt": '"text":"{', **fields}
    if kind == "chat":
        if fields.get("logprobs"):
            body["top_logprobs"] = 0
    elif fields.get("logprobs"):
        body["logprobs"] = 1
    # Chats need a template; what is under test only looks at the kind of the call.
    call = read_call(parts, "completion", {**body, "logprobs": None}, {}, 0.0)
    object.__setattr__(call, "kind", kind)
    fast, plain = CompletionResponseBuilder(parts, call), CompletionResponseBuilder(parts, call)
    for number, text in enumerate(TEXTS):
        for index, request in enumerate(call.requests):
            delta = OutputDelta(
                request=request,
                text=f"{text}{index}",
                token_ids=[5 + number],
                logprobs=[{5 + number: Logprob(logprob=-1.0, rank=1, decoded_token="x")}]
                if fields.get("logprobs")
                else None,
                finish_reason="length" if text == "end" else None,
                metrics=RequestMetrics(arrival_s=0.0, slo=request.slo),
            )
            assert fast.event(index, delta) == json_bytes(plain.chunk(index, delta))
    assert fast.num_tokens == plain.num_tokens == len(TEXTS) * len(call.requests)
    assert fast.last_chunk() == plain.last_chunk()
