"""Any JSON at any endpoint: an answer or a refusal in OpenAI's shape, never a failure of ours; nothing is left behind.

`APT_JAX_FUZZ=2000` sends that many bodies to each endpoint.
"""

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from chat_templates import WITH_TOOLS
from http_serving import HttpServed, http_serving
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toy_serving import toy_parts

from apt_jax.chat import ChatTemplate
from serve import openai_api

EXAMPLES = int(os.environ.get("APT_JAX_FUZZ", "60"))
STATUSES = {200, 400, 404, 408, 413, 429}


@contextlib.contextmanager
def in_thread(parts) -> Iterator[HttpServed]:
    """Servers in another thread."""
    started, state = threading.Event(), {}

    async def whole() -> None:
        async with http_serving(parts) as served:
            state.update(served=served, loop=asyncio.get_running_loop(), end=asyncio.Event())
            started.set()
            await state["end"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(whole()))
    thread.start()
    assert started.wait(30)
    try:
        yield state["served"]
    finally:
        state["loop"].call_soon_threadsafe(state["end"].set)
        thread.join()


@pytest.fixture(scope="module")
def served():
    parts = toy_parts(max_model_len=64, chat_template=ChatTemplate(WITH_TOOLS))
    with in_thread(parts) as served:
        yield served
    assert parts.chat_template is not None
    assert parts.grammars is not None
    parts.chat_template.close()
    parts.grammars.close()


@pytest.fixture(scope="module")
def client(served):
    with httpx2.Client(base_url=f"http://127.0.0.1:{served.server.port}", timeout=60) as client:
        yield client


_LEAF = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-3, 70) | st.floats()
    | st.sampled_from([0.5, 1.0, 0.0, -0.0, 5e-324, 1e308, "auto", "none", "json_object", "json_schema", "text", "be", "\ud800", "\x00"])
    | st.text(max_size=8)
)  # fmt: skip
_NAMES = st.sampled_from(["type", "json_schema", "schema", "function", "name", "arguments", "role", "content", "text", "json", "regex", "choice", "ttft_ms", "class", "include_usage", "5"]) | st.text(max_size=4)  # fmt: skip
_ANY = st.recursive(
    _LEAF,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=8,
)
_SANE: dict[str, Any] = {
    "model": "toy", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "n": 2, "seed": 1, "stop": ["x"],
    "stream": True, "stream_options": {"include_usage": True}, "echo": True, "logprobs": 2, "logit_bias": {"5": 1.5}, "min_tokens": 2,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "ignore_eos": True, "stop_token_ids": [5],
    "skip_special_tokens": False, "include_stop_str_in_output": True, "request_id": "r", "slo": {"ttft_ms": 5, "class": "be"},
    "slo_tbt_ms": 5.5, "deadline_ms": 50, "service_tier": "flex", "response_format": {"type": "text"}, "user": "u",
    "structured_outputs": {"choice": ["a", "b"]}, "return_token_ids": True, "return_tokens_as_token_ids": True, "aptjax_timings": True,
    "best_of": 1, "max_completion_tokens": 4, "top_logprobs": 2, "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto", "add_generation_prompt": False, "add_special_tokens": True, "unknown": {"x": [1]},
}  # fmt: skip
_PROMPTS = _ANY | st.sampled_from(["hi", ["a", "b"], [5, 6], [[5], [6, 7]], "x" * 80])
_MESSAGES = _ANY | st.sampled_from(
    [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    ]
)
_UNSUPPORTED = st.sampled_from(sorted(openai_api._UNSUPPORTED))


@st.composite
def bodies(draw, subject: str, values) -> dict[str, Any]:
    """Mostly good, so that what is behind the first check is reached too."""
    names = draw(st.lists(st.sampled_from(sorted(_SANE)), max_size=6, unique=True))
    body = {name: _SANE[name] for name in names}
    for name in draw(st.lists(st.sampled_from(sorted(_SANE)) | _UNSUPPORTED, max_size=2)):
        body[name] = draw(_ANY)
    body[subject] = draw(values)
    return body


def check(client: httpx2.Client, path: str, body: Any) -> int:
    response = client.post(
        path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    assert response.status_code in STATUSES, (body, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert error["message"]
        assert "\n" not in error["message"]
    elif isinstance(body, dict) and body.get("stream") is True:
        events = [e for e in response.text.split("\n\n") if e]
        assert events[-1] == "data: [DONE]" or '"code":"deadline_exceeded"' in events[-1]
    else:
        assert response.json()
    return response.status_code


@pytest.mark.parametrize(
    ("path", "subject", "values"),
    [("/v1/completions", "prompt", _PROMPTS), ("/v1/chat/completions", "messages", _MESSAGES)],
)
def test_completions_take_any_body(served, client, path, subject, values):
    seen: dict[int, int] = {}
    good = "hi" if subject == "prompt" else [{"role": "user", "content": "hi"}]

    @settings(max_examples=EXAMPLES)
    @given(body=bodies(subject, values))
    @example(body={subject: good, "max_tokens": 2})
    @example(body={subject: good, "max_tokens": 2, "stream": True, "n": 2})
    def send(body) -> None:
        status = check(client, path, body)
        seen[status] = seen.get(status, 0) + 1

    send()
    assert seen[200] >= 2  # how many of the random ones are served is a matter of luck
    assert seen[400] > EXAMPLES / 10
    assert served.parts.engine.stats().finished.get("error", 0) == 0
    assert check(client, "/v1/completions", {"prompt": "still there"}) == 200


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_token_endpoints_take_any_body(client, path):
    @settings(max_examples=EXAMPLES // 2)
    @given(
        body=st.fixed_dictionaries(
            {},
            optional={"prompt": _PROMPTS, "tokens": _PROMPTS, "messages": _MESSAGES, "add_special_tokens": _ANY, "return_token_strs": _ANY, "tools": _ANY},
        )
        | _ANY
    )  # fmt: skip
    def send(body) -> None:
        check(client, path, body)

    send()


@settings(max_examples=EXAMPLES)
@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_json(client, data):
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = client.post(path, content=data, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"]


@settings(max_examples=EXAMPLES)
@given(
    name=st.sampled_from(["x-llm-d-slo-ttft-ms", "x-slo-tpot-ms", "service_tier", "x-request-id", "accept", "content-length-x"]),
    value=st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_categories=["Cc"]), max_size=30),
)  # fmt: skip
def test_any_header(client, name, value):
    response = client.post(
        "/v1/completions",
        content=b'{"prompt": "hi", "max_tokens": 1}',
        headers={"content-type": "application/json", name: value.encode("latin-1")},
    )
    assert response.status_code in (200, 400)
