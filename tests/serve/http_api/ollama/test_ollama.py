"""Ollama's API: the text of chat completions in its form, a line for each piece."""

import asyncio
import dataclasses
import datetime
import json
from typing import Any

import jsonschema
import pytest

from apt_jax.text.chat import ChatTemplate
from serve.http_api import openapi
from serve.http_api.ollama import models
from serve.http_api.ollama.request import messages_of
from serve.security.api_keys import ApiKeys
from tests.serve.http_api.test_infill import code_tokenizer
from tests.support.chat_templates import CHATML, WITH_TOOLS
from tests.support.http_serving import HttpServed, run
from tests.support.toy_serving import toy_parts

HELLO = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "top_k": 0, "top_p": 1, "num_predict": 9}
DOCUMENT = openapi.document()
KEY = "sk-0123456789abcdefghij"


def serve(scenario, *, template: str = CHATML, **kwargs: Any) -> None:
    async def closing(served: HttpServed) -> None:
        await scenario(served)
        if served.parts.grammars is not None:
            served.parts.grammars.close()

    parts = toy_parts(chat_template=ChatTemplate(template), max_model_len=2048, num_blocks=2048)
    run(closing, parts=parts, **kwargs)


def check(name: str, value: Any) -> Any:
    schemas = {"components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **schemas}).validate(value)
    return value


async def answer(served: HttpServed, path: str, **body: Any) -> Any:
    response = await served.post(f"/api/{path}", {"model": "toy", "stream": False, **body})
    assert response.status_code == 200, response.text
    return check(f"Ollama{path.capitalize()}", response.json())


async def lines(served: HttpServed, path: str, **body: Any) -> list[Any]:
    response = await served.post(f"/api/{path}", {"model": "toy", **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.headers["x-request-id"]
    return [check(f"Ollama{path.capitalize()}", json.loads(line)) for line in response.text.splitlines()]


def test_a_chat_has_the_text_of_a_chat_completion_whole_and_in_lines():
    async def scenario(served: HttpServed) -> None:
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 9}
        want = (await served.post("/v1/chat/completions", body)).json()
        whole = await answer(served, "chat", messages=HELLO, options=GREEDY)
        assert whole["message"] == {"role": "assistant", "content": want["choices"][0]["message"]["content"]}
        assert (whole["done"], whole["done_reason"], whole["model"]) == (True, "length", "toy")
        assert (whole["prompt_eval_count"], whole["eval_count"]) == (want["usage"]["prompt_tokens"], 9)
        assert whole["total_duration"] >= whole["prompt_eval_duration"] + whole["eval_duration"] > 0
        datetime.datetime.fromisoformat(whole["created_at"])
        pieces = await lines(served, "chat", messages=HELLO, options=GREEDY)
        assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"]
        assert [piece["done"] for piece in pieces] == [*[False] * (len(pieces) - 1), True]
        assert pieces[-1]["eval_count"] == 9

    serve(scenario)


def test_a_text_is_answered_by_the_template_or_continued_raw():
    async def scenario(served: HttpServed) -> None:
        messages = [{"role": "system", "content": "Be brief."}, *HELLO]
        want = (
            await served.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 9})
        ).json()
        whole = await answer(served, "generate", prompt="hi", system="Be brief.", options=GREEDY)
        assert whole["response"] == want["choices"][0]["message"]["content"]
        plain = await served.ask("hi", max_tokens=9, ignore_eos=False)
        raw = await answer(served, "generate", prompt="hi", raw=True, options=GREEDY)
        assert raw["response"] == plain["choices"][0]["text"]
        pieces = await lines(served, "generate", prompt="hi", raw=True, options=GREEDY)
        assert "".join(piece["response"] for piece in pieces) == raw["response"]
        long = await answer(served, "generate", prompt="hi", raw=True, options={**GREEDY, "num_predict": -1, "seed": 3})
        assert long["eval_count"] > 16  # the most of a completion that says nothing of it

    serve(scenario)


def test_options_are_those_of_sampling():
    async def scenario(served: HttpServed) -> None:
        text = (await answer(served, "chat", messages=HELLO, options=GREEDY))["message"]["content"]
        stopped = await answer(served, "chat", messages=HELLO, options={**GREEDY, "stop": [text[3]]})
        assert stopped["message"]["content"] == text[: text.index(text[3])]
        assert stopped["done_reason"] == "stop"
        free = {"num_predict": 9, "seed": 7, "num_ctx": 8192, "num_gpu": 1, "unknown": "x"}
        first, second = [await answer(served, "chat", messages=HELLO, options=free) for _ in range(2)]
        assert first["message"] == second["message"]
        body = {"messages": HELLO, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 7, "max_tokens": 9}
        same = (await served.post("/v1/chat/completions", body)).json()
        assert same["choices"][0]["message"]["content"] == first["message"]["content"]
        with_logprobs = await lines(served, "chat", messages=HELLO, options=GREEDY, logprobs=True, top_logprobs=2)
        entries = [entry for piece in with_logprobs for entry in piece.get("logprobs", ())]
        assert len(entries) == 9
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("chat", {"messages": 5}, 400, "messages: a number is not a list"),
        ("chat", {"messages": [5]}, 400, "messages[0]: a number is not a message"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, 400, "images: are not supported"),
        ("chat", {"messages": HELLO, "options": 5}, 400, "options: "),
        ("chat", {"messages": HELLO, "options": {"temperature": "hot"}}, 400, "options.temperature: "),
        ("chat", {"messages": HELLO, "options": {"num_predict": 1.5}}, 400, "options.num_predict: "),
        ("chat", {"messages": HELLO, "options": {"repeat_penalty": -1}}, 400, "options.repeat_penalty: "),
        ("chat", {"messages": HELLO, "options": {"mirostat": 2}}, 400, "options.mirostat: is not supported"),
        ("chat", {"messages": HELLO, "format": "xml"}, 400, "format: 'xml' must be json or a JSON schema"),
        ("chat", {"messages": HELLO, "format": {"type": 5}}, 400, "format: "),
        ("chat", {"messages": HELLO, "think": "hard"}, 400, "think: 'hard' must be true, false"),
        ("chat", {"messages": HELLO, "model": "other"}, 404, "model 'other' is not served here"),
        ("chat", {"messages": HELLO, "model": 5}, 400, "model: a number is not a name"),
        ("chat", {"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "messages: "),
        ("generate", {"prompt": "x" * 9000}, 400, "prompt: "),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix: the model's vocabulary has no fill-in-the-middle tokens"),
        ("generate", {"prompt": "a", "context": [1]}, 400, "context: is not kept here"),
        ("generate", {"prompt": 5}, 400, "prompt: a number is not text"),
        ("embed", {"input": [5]}, 400, "input: a number is not text"),
        ("embed", {}, 400, "input: missing"),
        ("show", {"model": "other"}, 404, "model 'other' is not served here"),
        ("pull", {"model": "toy"}, 404, "the model is chosen when the server starts"),
    ],
)  # fmt: skip
def test_errors_have_ollamas_form_and_name_the_field(path, body, status, says):
    async def scenario(served: HttpServed) -> None:
        response = await served.post(f"/api/{path}", {"model": "toy", **body})
        assert (response.status_code, list(response.json())) == (status, ["error"])
        assert says in response.json()["error"]

    serve(scenario)


def test_a_call_without_a_prompt_waits_for_the_model():
    async def scenario(served: HttpServed) -> None:
        for path, body in (("chat", {}), ("chat", {"messages": []}), ("generate", {}), ("generate", {"prompt": ""})):
            found = await answer(served, path, keep_alive="5m", **body)
            assert (found["done"], found["done_reason"]) == (True, "load")
            assert found.get("response", found.get("message", {}).get("content")) == ""

    serve(scenario)


def test_tools_are_called_and_their_results_go_back():
    pytest.importorskip("llguidance")

    async def scenario(served: HttpServed) -> None:
        city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
        tools = [{"type": "function", "function": {"name": "time", "description": "d", "parameters": city}}]
        history = [
            *HELLO,
            {"role": "assistant", "tool_calls": [{"function": {"name": "time", "arguments": {"city": "Rome"}}}]},
            {"role": "tool", "tool_name": "time", "content": "noon"},
        ]
        found = await answer(served, "chat", messages=history, tools=tools, options=GREEDY)
        assert found["done"]
        constrained = await answer(served, "chat", messages=HELLO, format=city, options={**GREEDY, "num_predict": 99})
        assert json.loads(constrained["message"]["content"]) == {"city": "Rome"}
        plain = await answer(
            served, "generate", prompt="hi", raw=True, format="json", options={**GREEDY, "num_predict": 5}
        )
        assert plain["response"].startswith("{")

    serve(scenario, template=WITH_TOOLS)


def test_calls_without_ids_get_those_of_their_results():
    call = {"function": {"name": "f", "arguments": {}}}
    given = [
        {"role": "assistant", "tool_calls": [call, {**call, "id": "mine"}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2", "tool_name": "f"},
        {"role": "assistant", "content": "x", "thinking": "why"},
    ]
    made: Any = messages_of(given)
    first, second = [call["id"] for call in made[0]["tool_calls"]]
    assert second == "mine"
    assert len(first) == 9
    assert [made[1]["tool_call_id"], made[2]["tool_call_id"]] == [first, "mine"]
    assert made[2]["name"] == "f"
    assert made[3]["reasoning_content"] == "why"


def test_a_suffix_is_filled_in():
    async def scenario(served: HttpServed) -> None:
        body = {"prompt": "a", "suffix": "b", "temperature": 0, "max_tokens": 9}
        want = (await served.post("/v1/completions", body)).json()
        found = await answer(served, "generate", prompt="a", suffix="b", options=GREEDY)
        assert found["response"] == want["choices"][0]["text"]
        assert "insert" in (await answer(served, "show"))["capabilities"]

    run(scenario, parts=toy_parts(tokenizer=code_tokenizer()))


def test_texts_are_embedded_as_by_openais_api():
    async def scenario(served: HttpServed) -> None:
        want = (await served.post("/v1/embeddings", {"input": ["hi", "you"]})).json()
        found = await answer(served, "embed", input=["hi", "you"])
        assert found["embeddings"] == [row["embedding"] for row in want["data"]]
        assert found["prompt_eval_count"] == want["usage"]["prompt_tokens"]
        one = await answer(served, "embeddings", prompt="hi")
        assert one["embedding"] == found["embeddings"][0]
        assert (await answer(served, "embed", input="x" * 3000))["prompt_eval_count"] < 2048
        cut = await served.post("/api/embed", {"input": "x" * 3000, "truncate": False})
        assert (cut.status_code, list(cut.json())) == (400, ["error"])

    serve(scenario)


def test_the_model_is_listed_and_shown():
    async def scenario(served: HttpServed) -> None:
        listed = check("OllamaTags", (await served.http.get("/api/tags")).json())["models"]
        assert [model["name"] for model in listed] == ["toy"]
        running = check("OllamaPs", (await served.http.get("/api/ps")).json())["models"]
        assert running[0]["context_length"] == 2048
        shown = await answer(served, "show")
        assert shown["capabilities"][:2] == ["completion", "tools"]
        assert shown["template"] == CHATML
        check("OllamaVersion", (await served.http.get("/api/version")).json())
        latest = await answer(served, "chat", model="toy:latest", messages=HELLO, options=GREEDY)
        assert latest["model"] == "toy:latest"

    serve(scenario)


@pytest.mark.parametrize(
    ("fields", "stored", "told"),
    [
        ({"dtype": "bfloat16"}, ("directory", "F16"), "BF16"),
        ({"dtype": "float32"}, ("directory", "F16"), "F32"),
        ({"dtype": "bfloat16", "quantization": "int8"}, ("directory", "F16"), "INT8"),
        ({"dtype": "float32", "quantization": "gguf"}, ("gguf", "Q4_0"), "Q4_0"),
    ],
)  # fmt: skip
def test_the_listed_size_and_precision_are_those_of_the_weights_in_use(fields, stored, told):
    parts = toy_parts()
    parts = dataclasses.replace(parts, config=dataclasses.replace(parts.config, **fields), stored=stored)
    executor: Any = parts.executor
    executor.weight_bytes = 12345
    (entry,) = json.loads(models.tags(parts, 0))["models"]
    assert (entry["size"], entry["details"]["quantization_level"]) == (12345, told)
    (running,) = json.loads(models.running(parts, 0))["models"]
    assert running["size_vram"] == 0
    executor.platform = "gpu"
    (running,) = json.loads(models.running(parts, 0))["models"]
    assert running["size_vram"] == 12345


def test_keys_objectives_and_disconnects_are_as_for_chats():
    async def scenario(served: HttpServed) -> None:
        for method, path in (("GET", "/api/tags"), ("GET", "/api/version"), ("POST", "/api/chat")):
            refused = await served.http.request(method, path)
            assert (refused.status_code, list(refused.json())) == (401, ["error"])
        key = {"authorization": f"Bearer {KEY}"}
        body = {"messages": HELLO, "options": {**GREEDY, "num_predict": 1000}, "slo_class": "be"}
        call = asyncio.create_task(served.post("/api/chat", body, headers={**key, "x-slo-ttft-ms": "250"}))
        await served.until(lambda: served.parts.engine.num_live == 1)
        call.cancel()
        await served.idle()
        late = await served.post("/api/chat", {**body, "deadline_ms": 1e-3}, headers=key)
        assert (late.status_code, list(late.json())) == (408, ["error"])

    serve(scenario, app={"keys": ApiKeys([KEY])})
