"""Bodies, fields, lines, heads, forms and outputs that are made to take long: time grows with size.

Times are of the processor, each of several shapes together: one that takes the square of its size is most of it.
"""

import contextlib
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.datastructures import Headers

from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.components import EngineComponents
from apt_jax.text.chat import ChatTemplate
from apt_jax.text.detokenizer import StopChecker
from benchmarks.server.hostile_bodies import SHAPES
from serve.batches.config import BatchConfig
from serve.batches.http.routes import _batch_of
from serve.batches.http.uploads import _Parser
from serve.batches.input_file import read_input
from serve.errors import UnknownModelError
from serve.http_api.browsers import browser_rules
from serve.http_api.calls import require_json
from serve.http_api.endpoints import ENDPOINTS
from serve.http_api.errors import BadCallError
from serve.http_api.messages.request import count_tokens
from serve.http_api.ollama.models import show
from serve.http_api.tokenization import detokenize, tokenize
from serve.http_api.tool_calls.constrained import ConstrainedCalls
from serve.http_api.tool_calls.events import OutputParser
from serve.http_api.tool_calls.forms import PARSERS, form_of
from serve.http_api.tool_calls.openai_message import OpenAIMessage
from serve.http_api.tool_calls.reasoning import ReasoningFirst
from serve.slo_headers import max_queue_s, milliseconds
from tests.serve.batches.test_batches import store_at
from tests.support.http_serving import HttpServed, run
from tests.support.toy_server import TEMPLATE, ascii_tokenizer
from tests.support.toy_serving import toy_parts

TOOLS_TEMPLATE = TEMPLATE + "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
PATHS = (
    *(endpoint.path for endpoint in ENDPOINTS),
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/api/show",
    "/v1/batches",
)
NAMES = frozenset({"f", "g"})

Read = Callable[[EngineComponents, Any], object]
READ: dict[str, Read] = {
    **{e.path: lambda parts, body, e=e: e.read(parts, body, {}, 0.0, None) for e in ENDPOINTS},
    "/v1/messages/count_tokens": count_tokens,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/api/show": show,
    "/v1/batches": lambda parts, body: _batch_of(body, ""),
}


def assert_linear(work: Callable[[int], object], size: int, slack_s: float = 0.05) -> None:
    """`work` takes no more than 9 times the processor time for 4 times the size; the square would be 16."""

    def seconds(size: int) -> float:
        begun = time.process_time()
        work(size)
        return time.process_time() - begun

    quick = min(seconds(size) for _ in range(2))
    slow = seconds(4 * size)
    if slow >= 9 * quick + slack_s:  # another thread may have taken its time
        slow = min(slow, seconds(4 * size))
    assert slow < 9 * quick + slack_s, (quick, slow)


def test_every_endpoint_reads_every_shape_of_body_in_linear_time(tmp_path) -> None:
    async def scenario(served: HttpServed) -> None:
        async def seconds(path: str, size: int) -> float:
            bodies = [shape(size) for shape in SHAPES.values()]
            begun = time.process_time()
            for body in bodies:
                answer = await served.http.post(path, content=body, headers={"content-type": "application/json"})
                assert answer.status_code in (200, 400), answer.text
            return time.process_time() - begun

        for path in PATHS:
            assert path in READ
            quick = await seconds(path, 12 << 10)
            slow = await seconds(path, 48 << 10)
            assert slow < 9 * quick + 0.5, (path, quick, slow)

    run(scenario, app={"batches": store_at(tmp_path)})


def test_all_endpoints_that_take_json_are_known(tmp_path) -> None:
    async def scenario(served: HttpServed) -> None:
        taking = {path for method, path in served.server.app.paths if method == "POST"}
        assert taking - set(PATHS) == {"/ping", "/v1/files", "/v1/batches/{batch_id}/cancel"}

    run(scenario, app={"batches": store_at(tmp_path)})


def test_lines_of_batches_are_read_in_linear_time(tmp_path) -> None:
    def read(size: int) -> None:
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"\n".join(shape(size).replace(b"\n", b" ") for shape in SHAPES.values()) + b"\n" * 1000)
        found = read_input(path, "/v1/completions", BatchConfig(directory=tmp_path), lambda body: None)
        assert found is not None
        assert len(found.errors) == len(SHAPES)

    assert_linear(read, 16 << 10)


# --- fields ----------------------------------------------------------------------------------------------------------

TEXTS = ("</s>", "</s", "!", " ", '\\"', "[", "9", "\ue000")
MESSAGE = {"role": "user", "content": "a"}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [MESSAGE], **fields}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


FIELDS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "prompt": lambda t: ("/v1/completions", {"prompt": t}),
    "suffix": lambda t: ("/v1/completions", {"prompt": t, "suffix": t}),
    "model": lambda t: ("/v1/completions", {"prompt": "a", "model": t}),
    "request id": lambda t: ("/v1/completions", {"prompt": "a", "request_id": t}),
    "stop strings": lambda t: ("/v1/completions", {"prompt": "a", "stop": [t, t[:256], t[:200]]}),
    "names": lambda t: ("/v1/completions", {"prompt": "a", t: 1, "logit_bias": {t: 1}, "slo": {t: 1}}),
    "service tier": lambda t: ("/v1/completions", {"prompt": "a", "service_tier": t}),
    "constraints": lambda t: ("/v1/completions", {"prompt": "a", "guided_choice": [t], "regex": t, "grammar": t}),
    "content": lambda t: chat(messages=[{"role": "user", "content": t}]),
    "role": lambda t: chat(messages=[{"role": t, "content": "a"}]),
    "name of a message": lambda t: chat(messages=[{**MESSAGE, "name": t}]),
    "field of a message": lambda t: chat(messages=[{**MESSAGE, t: t}]),
    "reasoning": lambda t: chat(messages=[{"role": "assistant", "content": "a", "reasoning_content": t}, MESSAGE]),
    "last message": lambda t: chat(
        messages=[MESSAGE, {"role": "assistant", "content": t}], continue_final_message=True, add_generation_prompt=False
    ),
    "arguments": lambda t: chat(messages=[{"role": "assistant", "tool_calls": [function(name="f", arguments=t)]}]),
    "argument": lambda t: chat(messages=[{"role": "assistant", "tool_calls": [function(name=t, arguments={t: t})]}]),
    "description of a tool": lambda t: chat(tools=[function(name="f", description=t)]),
    "name of a tool": lambda t: chat(tools=[function(name=t)], tool_choice=t),
    "schema of a tool": lambda t: chat(tools=[function(name="f", parameters={"type": "object", "title": t})]),
    "older function": lambda t: chat(functions=[{"name": "f", "description": t}], function_call={"name": t}),
    "older call": lambda t: chat(messages=[
        {"role": "assistant", "function_call": {"name": t, "arguments": t}}, {"role": "function", "name": t, "content": t}]),
    "custom tool": lambda t: chat(tools=[{"type": "custom", "custom": {
        "name": "f", "description": t, "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": t}}}}]),
    "custom call": lambda t: chat(messages=[
        {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f", "input": t}}]}]),
    "allowed tools": lambda t: chat(tools=[function(name="f")], tool_choice={"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": t}}]}}),
    "schema": lambda t: chat(response_format={"type": "json_schema", "json_schema": {"name": t, "schema": {"title": t}}}),
    "variables": lambda t: chat(chat_template_kwargs={"a": t}, reasoning_effort=t),
    "input": lambda t: ("/v1/responses", {"input": t, "instructions": t}),
    "items": lambda t: ("/v1/responses", {"input": [
        {"type": "function_call", "call_id": t, "name": "f", "arguments": t},
        {"type": "function_call_output", "call_id": "a", "output": t}, {"type": t},
    ]}),
    "blocks": lambda t: ("/v1/messages", {"max_tokens": 1, "system": t, "messages": [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": t}, {"type": "text", "text": t}]},
    ]}),
    "counted": lambda t: ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": t}]}),
    "embedded": lambda t: ("/v1/embeddings", {"input": t}),
    "filled in": lambda t: ("/infill", {"input_prefix": t, "input_suffix": t, "prompt": t, "input_extra": [
        {"filename": t, "text": t}], "response_fields": [t, "/" * len(t)], "n_predict": 4}),
    "Ollama's messages": lambda t: ("/api/chat", {"messages": [
        {"role": "assistant", "content": t, "thinking": t, "tool_calls": [{"function": {"name": t, "arguments": {t: t}}}]},
        {"role": "tool", "tool_name": t, "content": t}], "model": t}),
    "Ollama's options": lambda t: ("/api/chat", {"messages": [MESSAGE], "format": t, "think": t, "options": {t: 1, "stop": t}}),
    "Ollama's prompt": lambda t: ("/api/generate", {"prompt": t, "system": t, "raw": True}),
    "Ollama's name": lambda t: ("/api/show", {"model": t}),
    "Ollama's input": lambda t: ("/api/embed", {"input": [t]}),
    "encoding": lambda t: ("/v1/embeddings", {"input": "a", "encoding_format": t}),
    "scored": lambda t: ("/v1/score", {"text_1": t, "text_2": t}),
    "ranked": lambda t: ("/v1/rerank", {"query": t, "documents": [t, {"text": t}]}),
    "tokenized": lambda t: ("/tokenize", {"prompt": t}),
    "detokenized": lambda t: ("/detokenize", {"tokens": t}),
    "file": lambda t: ("/v1/batches", {"input_file_id": t, "endpoint": t}),
    "window": lambda t: ("/v1/batches", {"input_file_id": "a", "endpoint": "/v1/completions", "completion_window": t}),
    "metadata": lambda t: ("/v1/batches", {"input_file_id": "a", "endpoint": "/v1/completions",
                                           "completion_window": "1h", "metadata": {"a": t}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def parts() -> EngineComponents:
    template = ChatTemplate(TOOLS_TEMPLATE, special_tokens={"eos_token": "</s>"})
    return toy_parts(tokenizer=ascii_tokenizer(), max_model_len=1 << 20, num_blocks=1 << 16, debug=False, chat_template=template)  # fmt: skip


@pytest.mark.in_turn(15)
@pytest.mark.parametrize("field", FIELDS)
def test_texts_in_fields_take_linear_time(parts, field) -> None:
    def read(size: int) -> None:
        for text in TEXTS:
            path, body = FIELDS[field](text * (size // len(text)))
            with contextlib.suppress(InvalidRequestError, UnknownModelError):
                READ[path](parts, body)

    assert_linear(read, 8 << 10, slack_s=0.15)


MANY: dict[str, Callable[[int, str], tuple[str, dict[str, Any]]]] = {
    "thoughts": lambda n, big: ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": t} for t in (big, *"y" * n)]}, MESSAGE]}),
    "blocks": lambda n, big: ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "user", "content": [{"type": "text", "text": t} for t in (big, *"y" * n)]}]}),
    "results": lambda n, big: ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": t} for t in (big, *"y" * n)]}]}),
    "turns": lambda n, big: ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "user", "content": t} for t in (big, *"y" * n)]}),
    "messages": lambda n, big: chat(messages=[{"role": "user", "content": t} for t in (big, *"y" * n)]),
    "tool messages": lambda n, big: chat(messages=[{"role": "tool", "content": t} for t in (big, *"y" * n)]),
    "parts": lambda n, big: chat(messages=[
        {"role": "user", "content": [{"type": "text", "text": t} for t in (big, *"y" * n)]}]),
    "calls": lambda n, big: chat(messages=[
        {"role": "assistant", "content": big, "tool_calls": [function(name="f", arguments="{}")] * n}, MESSAGE]),
    "older calls": lambda n, big: chat(messages=[
        {"role": "assistant", "content": t, "function_call": {"name": "f", "arguments": "{}"}} for t in (big, *"y" * n)]),
    "properties": lambda n, big: chat(response_format={"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"type": "object", "properties": {f"p{i}": {} for i in range(n)}}}}),
    "items": lambda n, big: ("/v1/responses", {"input": [
        {"type": "message", "role": "user", "content": t} for t in (big, *"y" * n)]}),
    "reasoning items": lambda n, big: ("/v1/responses", {"input": [
        {"type": "reasoning", "content": [{"text": t} for t in (big, *"y" * n)]}, MESSAGE]}),
    "function calls": lambda n, big: ("/v1/responses", {"input": [
        {"type": "function_call", "call_id": f"a{i}", "name": "f", "arguments": "{}"} for i in range(n)]}),
    "included": lambda n, big: ("/v1/responses", {"input": "a", "include": ["reasoning.encrypted_content"] * n}),
    "token ids": lambda n, big: ("/v1/completions", {"prompt": [5] * n * 8}),
    "prompts": lambda n, big: ("/v1/completions", {"prompt": ["a"] * n}),
    "allowed ids": lambda n, big: ("/v1/completions", {"prompt": "a", "allowed_token_ids": [5] * n}),
    "files": lambda n, big: ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [
        {"text": t} for t in (big, *"y" * n)]}),
    "Ollama's turns": lambda n, big: ("/api/chat", {"messages": [{"role": "user", "content": t} for t in (big, *"y" * n)]}),
    "Ollama's calls": lambda n, big: ("/api/chat", {"messages": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}] * n},
        *({"role": "tool", "content": "y"} for _ in range(n))]}),
    "embedded": lambda n, big: ("/v1/embeddings", {"input": [[5] * (n // 20)] * 100}),
    "detokenized": lambda n, big: ("/detokenize", {"tokens": [5] * n * 4}),
}  # fmt: skip


@pytest.mark.parametrize("items", MANY)
def test_many_items_take_linear_time(parts, items) -> None:
    def read(num: int) -> None:
        path, body = MANY[items](num, "x" * 32 * num)
        with contextlib.suppress(InvalidRequestError):
            READ[path](parts, body)

    assert_linear(read, 1000, slack_s=0.1)


# --- heads, forms, outputs -------------------------------------------------------------------------------------------


def test_heads_are_read_in_linear_time() -> None:
    rules = browser_rules("127.0.0.1", ["example.com"], ["https://example.com"])

    def check(value: str) -> None:
        headers = {"x-slo-ttft-ms": value, "x-llm-d-inference-ttl": value, "content-type": value}
        with contextlib.suppress(InvalidRequestError):
            milliseconds(headers, ["x-slo-ttft-ms"])
        with contextlib.suppress(InvalidRequestError):
            max_queue_s(headers)
        with contextlib.suppress(BadCallError):
            require_json(Headers(headers))
        for name in (b"host", b"origin", b"sec-fetch-site"):
            given = [(b"host", b"localhost"), (name, value.encode())]
            with contextlib.suppress(BadCallError):
                rules.check({"method": "POST", "scheme": "http", "headers": given})

    def read(size: int) -> None:
        for text in ("a", "1", "1.", "1ms", "a.", "[", ":", " ", "http://", ";", '"'):
            check(text * (size // len(text)))

    assert_linear(read, 4 << 10, slack_s=0.02)


@pytest.mark.parametrize("boundary", [b"x", b"-" * 60, b"a" * 250])
def test_forms_are_read_in_linear_time(tmp_path, boundary) -> None:
    head = b'--%s\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' % boundary

    def read(size: int) -> None:
        for text in (
            b"\r",
            b"\n",
            b"\r\n",
            b"-",
            b"\r\n--",
            b"\r\n--" + boundary[:-1],
            b"\r\n--" + boundary[:-1] + b"\r",
        ):
            file = io.BytesIO()
            file.name = "f"  # type: ignore[attr-defined]  # as those of the system have
            parser = _Parser(boundary, BatchConfig(directory=tmp_path), file)
            parser.write(head)
            data = text * (size // len(text) + 1)
            for start in range(0, len(data), 16 << 10):
                parser.write(data[start : start + (16 << 10)])

    assert_linear(read, 16 << 10)


def parser_of(name: str) -> OutputParser:
    form = form_of(name.removesuffix(", constrained"), "[ARGS]")
    assert form is not None
    if name.endswith("constrained"):
        return ConstrainedCalls(form, NAMES, single=False, free_text=bool(form.mark))
    return ReasoningFirst(True, form.parser(NAMES, 16))


@pytest.mark.parametrize("name", [*PARSERS, *(f"{name}, constrained" for name in PARSERS)])
def test_outputs_are_parsed_in_linear_time(name) -> None:
    form = form_of(name.removesuffix(", constrained"), "[ARGS]")
    assert form is not None
    call = f"{form.prefix}{form.opening}f{form.middle}"
    texts = (
        "a",
        " ",
        "{",
        "[",
        '"',
        "\\",
        '\\"',
        "<think>",
        "</think>",
        "<tool_call>",
        "[TOOL_CALLS]",
        "; {",
        call,
        "{}",
    )

    def read(size: int) -> None:
        for beginning in ("</think>", "</think>" + call + '{"a": "'):
            for text in texts:
                output = beginning * (name in PARSERS or len(beginning) > 8) + text * (size // len(text))
                message = OpenAIMessage(parser_of(name))
                message.push(output, True)
                message, step = OpenAIMessage(parser_of(name)), size // 64
                for start in range(0, len(output), step):
                    message.push(output[start : start + step], False)

    assert_linear(read, 16 << 10, slack_s=0.1)


def test_stop_strings_are_looked_for_in_linear_time() -> None:
    stop = ["a" * size + "b" for size in range(100, 116)]

    def read(size: int) -> None:
        checker = StopChecker(stop)
        checker.push("a" * size)
        for _ in range(size // 8):
            checker.push("aaaaaaaa")

    assert_linear(read, 2000)
