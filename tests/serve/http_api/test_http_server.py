"""The HTTP server: answers as OpenAI's, statuses, cancellation, bounds, keys, TLS, draining."""

import asyncio
import itertools
import json
import threading
from typing import Any

import openai
import pytest

from apt_jax.config import SLO
from apt_jax.request import SamplingParams
from apt_jax.text.chat import ChatTemplate
from apt_jax.text.detokenizer import IncrementalDetokenizer
from tests.support.chat_templates import CHATML, WITH_TOOLS
from tests.support.fake_executor import Fault, FaultKind, reference_tokens
from tests.support.http_serving import completion, post_head, run
from tests.support.toy_serving import VOCAB_SIZE, expected_tokens, toy_parts

GREEDY: dict[str, Any] = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}


def chat_parts(template: str = CHATML):
    return toy_parts(chat_template=ChatTemplate(template))


def expected(served: Any, prompt, max_tokens: int) -> list[int]:
    ids = served.parts.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return reference_tokens(ids, max_tokens, vocab_size=VOCAB_SIZE, params=params)


def text_of(served: Any, ids) -> str:
    return served.parts.tokenizer.decode(ids)


def error_of(response) -> dict[str, Any]:
    """The error of an answer, in OpenAI's shape."""
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert "\n" not in body["error"]["message"]
    return body["error"]


# --- completions ---------------------------------------------------------------------------------------------------


def test_a_completion_by_the_official_client():
    async def scenario(served):
        answer = await served.openai.completions.create(model="toy", prompt="hello", max_tokens=10, **GREEDY)
        want = expected(served, "hello", 10)
        (choice,) = answer.choices
        assert answer.object == "text_completion"
        assert answer.model == "toy"
        assert answer.id.startswith("cmpl-")
        assert choice.text == text_of(served, want)
        assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
        assert choice.stop_reason is None
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 10, 16)
        assert usage.prompt_tokens_details.cached_tokens == 0
        assert answer._request_id == answer.id

    run(scenario)


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_by_the_official_client(include_usage):
    async def scenario(served):
        options = {"stream_options": {"include_usage": True}} if include_usage else {}
        stream = await served.openai.completions.create(
            model="toy", prompt="hello", max_tokens=20, stream=True, **options, **GREEDY
        )
        chunks = [chunk async for chunk in stream]
        if include_usage:
            last = chunks.pop()
            assert last.choices == []
            assert last.usage.completion_tokens == 20
            assert last.usage.prompt_tokens == 6
        assert all(chunk.usage is None for chunk in chunks)
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert text == text_of(served, expected(served, "hello", 20))
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["length"]
        assert len({chunk.id for chunk in chunks}) == 1

    run(scenario)


def test_the_bytes_of_a_stream():
    async def scenario(served):
        body = {"prompt": "hello", "max_tokens": 5, "stream": True, "temperature": 0, "ignore_eos": True}
        response = await served.post("/v1/completions", body)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: {") for event in events[:-2])
        assert "usage" not in json.loads(events[0].removeprefix("data: "))

    run(scenario)


def test_streams_of_many_at_once_equal_their_reference():
    async def scenario(served):
        async def one(prompt) -> None:
            stream = await served.openai.completions.create(
                model="toy", prompt=prompt, max_tokens=10, stream=True, **GREEDY
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == text_of(served, expected(served, prompt, 10))

        await asyncio.gather(*(one("x" * n) for n in range(1, 25)), one([5, 6, 7]))

    run(scenario, max_num_queued_reqs=64)


def test_prompts_as_texts_and_as_token_ids():
    async def scenario(served):
        ids = served.parts.tokenizer.encode("hello")
        for prompt, prompts in (
            ("hello", ["hello"]),
            (["hello", "world!"], ["hello", "world!"]),
            (ids, ["hello"]),
            ([ids, [7, 8]], ["hello", [7, 8]]),
        ):
            answer = await served.ask(prompt, max_tokens=6, return_token_ids=True)
            assert [c["index"] for c in answer["choices"]] == list(range(len(prompts)))
            for choice, one in zip(answer["choices"], prompts, strict=True):
                assert choice["token_ids"] == expected(served, one, 6)
                assert choice["text"] == text_of(served, choice["token_ids"])
            assert answer["usage"]["completion_tokens"] == 6 * len(prompts)
            lens = [len(c["prompt_token_ids"]) for c in answer["choices"]]
            assert answer["usage"]["prompt_tokens"] == sum(lens)

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_with_seeds_of_their_own(stream):
    async def scenario(served):
        answer = await served.openai.completions.create(
            model="toy", prompt=["hello", "hi"], n=3, max_tokens=8, seed=5, stream=stream,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        texts = {i: "" for i in range(6)}
        chunks = [chunk async for chunk in answer] if stream else [answer]
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        if not stream:
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6 + 3, 48)
        for number, prompt in enumerate(["hello", "hi"]):
            for i in range(3):
                request = served.parts.build_request(
                    prompt=prompt, params={"max_tokens": 8, "seed": 5 + i, "ignore_eos": True}
                )
                assert texts[3 * number + i] == text_of(served, expected_tokens(request))

    run(scenario)


def test_echo_and_stops():
    async def scenario(served):
        want = expected(served, "hello", 30)
        text = text_of(served, want)
        answer = await served.ask("hello", max_tokens=3, echo=True)
        assert answer["choices"][0]["text"] == "hello" + text_of(served, want[:3])
        answer = await served.ask([[7, 8]], max_tokens=3, echo=True)
        assert answer["choices"][0]["text"].startswith(text_of(served, [7, 8]))
        stop = next(c for c in text if c.isascii() and c.isprintable())
        for given in (stop, [stop], [stop, "\x00never"]):
            (choice,) = (await served.ask("hello", max_tokens=30, stop=given))["choices"]
            assert choice["text"] == text[: text.index(stop)]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        (choice,) = (await served.ask("hello", max_tokens=30, stop=stop, include_stop_str_in_output=True))["choices"]
        assert choice["text"] == text[: text.index(stop) + 1]
        (choice,) = (await served.ask("hello", max_tokens=30, stop_token_ids=[want[4]]))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", want[4])

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_completions(stream):
    async def scenario(served):
        answer = await served.openai.completions.create(
            model="toy", prompt="hello", max_tokens=6, logprobs=3, stream=stream, **GREEDY
        )
        chunks = [chunk async for chunk in answer] if stream else [answer]
        parts = [chunk.choices[0].logprobs for chunk in chunks]
        tokens = [t for p in parts for t in p.tokens]
        want = expected(served, "hello", 6)
        assert tokens == [served.parts.tokenizer.token_text(i) for i in want]
        values = [v for p in parts for v in p.token_logprobs]
        tops = [top for p in parts for top in p.top_logprobs]
        assert len(tops) == 6
        for token, value, top in zip(tokens, values, tops, strict=True):
            assert top[token] == value == max(top.values())
            assert 1 <= len(top) <= 3  # different tokens may have the same text
        detokenizer = IncrementalDetokenizer(served.parts.tokenizer)
        ends = list(itertools.accumulate(len(detokenizer.push(i)) for i in want))
        assert [o for p in parts for o in p.text_offset] == [0, *ends[:-1]]

    run(scenario)


def test_tokens_can_be_named_by_their_ids():
    async def scenario(served):
        answer = await served.ask("hello", max_tokens=4, logprobs=2, return_tokens_as_token_ids=True)
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{i}" for i in expected(served, "hello", 4)]
        assert all(len(top) == 2 for top in logprobs["top_logprobs"])

    run(scenario)


def test_logit_bias_takes_ids_as_names():
    async def scenario(served):
        build, seen = served.parts.build_requests, []

        def noting(**fields):
            seen.append(fields["params"]["logit_bias"])
            return build(**fields)

        object.__setattr__(served.parts, "build_requests", noting)
        await served.ask("hello", max_tokens=5, logit_bias={"70": 100, "71": -100.0})
        assert seen == [{70: 100, 71: -100.0}]

    run(scenario)


def test_structured_outputs_by_both_names():
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3}

    async def scenario(served):
        for constraint in (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": schema},
                }
            },
            {"structured_outputs": {"json": schema}},
        ):
            answer = await served.ask("hello", max_tokens=100, ignore_eos=False, **constraint)
            value = json.loads(answer["choices"][0]["text"])
            assert 2 <= len(value) <= 3
            assert set(value) <= {"a", "b"}
        answer = await served.ask("hello", max_tokens=20, ignore_eos=False, response_format={"type": "json_object"})
        assert answer["choices"][0]["text"].startswith("{")
        answer = await served.ask("hello", max_tokens=4, response_format={"type": "text"})
        assert answer["choices"][0]["text"] == text_of(served, expected(served, "hello", 4))
        answer = await served.ask("x", max_tokens=9, ignore_eos=False, structured_outputs={"choice": ["yes", "no"]})
        assert answer["choices"][0]["text"] in ("yes", "no")
        served.parts.grammars.close()

    run(scenario)


def test_how_it_was_served_is_told_to_those_who_ask():
    async def scenario(served):
        slo = {"ttft_ms": 60_000, "tbt_ms": 0.01, "e2e_ms": 50_000, "class": "be"}
        (choice,) = (await served.ask("hello", max_tokens=6, slo=slo, aptjax_timings=True, request_id="r-1"))["choices"]
        told = choice["aptjax"]
        assert told["request_id"] == "r-1"
        t = told["timings"]
        assert 0 <= t["queue_ms"] <= t["ttft_ms"] <= t["total_ms"]
        assert t["p99_tbt_ms"] > 2.0
        assert told["slo"] == {
            "ttft_ms": 60_000, "tbt_ms": 0.01, "e2e_ms": 50_000, "class": "be",
            "ttft_attained": True, "tbt_attained": False, "e2e_attained": True, "attained": False,
        }  # fmt: skip
        assert told["cache_kind"] in ("kv", "hidden")
        (choice,) = (await served.ask("hello", max_tokens=6, slo_e2e_ms=0.01, aptjax_timings=True))["choices"]
        told = choice["aptjax"]["slo"]
        assert (told["e2e_ms"], told["e2e_attained"], told["attained"]) == (0.01, False, False)
        assert (choice["finish_reason"], told["tbt_attained"]) == ("length", True)
        assert "aptjax" not in (await served.ask("hello", max_tokens=1))["choices"][0]
        body = {"prompt": "hello", "max_tokens": 4, "stream": True, "aptjax_timings": True, "ignore_eos": True}
        events = (await served.post("/v1/completions", body)).text.split("\n\n")[:-2]
        choices = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events]
        assert ["aptjax" in c for c in choices] == [False] * (len(choices) - 1) + [True]

    run(scenario, step_s=0.004)


def test_usage_in_every_chunk_for_those_who_ask():
    async def scenario(served):
        body = {
            "prompt": "hello",
            "max_tokens": 4,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"continuous_usage_stats": True},
        }
        events = (await served.post("/v1/completions", body)).text.split("\n\n")[:-2]
        counts = [json.loads(e.removeprefix("data: "))["usage"]["completion_tokens"] for e in events]
        assert counts == sorted(counts)
        assert counts[-1] == 4

    run(scenario)


# --- chat ----------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "Hi"}]


def conversation_ids(served, messages=MESSAGES, **kwargs) -> list[int]:
    return served.parts.chat_prompt(messages, **kwargs)


def test_a_chat_by_the_official_client():
    async def scenario(served):
        answer = await served.openai.chat.completions.create(
            model="toy", messages=MESSAGES, max_tokens=10, logprobs=True, top_logprobs=2, **GREEDY
        )
        want = expected(served, conversation_ids(served), 10)
        (choice,) = answer.choices
        assert answer.object == "chat.completion"
        assert answer.id.startswith("chatcmpl-")
        assert choice.message.role == "assistant"
        assert choice.message.content == text_of(served, want)
        assert choice.finish_reason == "length"
        entries = choice.logprobs.content
        assert b"".join(bytes(e.bytes) for e in entries) == b"".join(
            map(served.parts.tokenizer.continuations.piece, want)
        )
        for entry in entries:
            assert len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        served.parts.chat_template.close()

    run(scenario, parts=chat_parts())


def test_a_streamed_chat_by_the_official_client():
    async def scenario(served):
        stream = await served.openai.chat.completions.create(
            model="toy", messages=MESSAGES, max_completion_tokens=10, stream=True,
            stream_options={"include_usage": True}, **GREEDY,
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        usage = chunks.pop().usage
        ids = conversation_ids(served)
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), 10)
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        roles = [chunk.choices[0].delta.role for chunk in chunks]
        assert roles == ["assistant"] + [None] * (len(chunks) - 1)
        text = "".join(chunk.choices[0].delta.content for chunk in chunks)
        assert text == text_of(served, expected(served, ids, 10))
        assert chunks[-1].choices[0].finish_reason == "length"
        served.parts.chat_template.close()

    run(scenario, parts=chat_parts())


def test_a_chat_without_a_limit_fills_what_is_left():
    async def scenario(served):
        body = {"messages": MESSAGES, "ignore_eos": True}
        answer = (await served.post("/v1/chat/completions", body)).json()
        used = answer["usage"]
        assert used["total_tokens"] == served.parts.limits.max_model_len
        served.parts.chat_template.close()

    run(scenario, parts=chat_parts())


def test_tools_go_into_the_prompt():
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

    async def scenario(served):
        for extra, tools in (({}, [tool]), ({"tool_choice": "auto"}, [tool]), ({"tool_choice": "none"}, None)):
            body = {
                "messages": MESSAGES,
                "tools": [tool],
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
                **extra,
            }
            answer = (await served.post("/v1/chat/completions", body)).json()
            ids = conversation_ids(served, tools=tools)
            assert answer["choices"][0]["message"]["content"] == text_of(served, expected(served, ids, 4))
        for choice in ("any", {"type": "function", "function": {"name": "another"}}):
            body = {"messages": MESSAGES, "tools": [tool], "tool_choice": choice}
            response = await served.post("/v1/chat/completions", body)
            assert response.status_code == 400
            assert error_of(response)["param"].startswith("tool_choice")
        served.parts.chat_template.close()

    run(scenario, parts=chat_parts(WITH_TOOLS))


def test_R1_R12_R13_chats_that_are_refused():
    async def scenario(served):
        for fields, param in (
            ({"messages": []}, "messages"),
            ({}, "messages"),
            ({"messages": "hi"}, "messages"),
            ({"messages": [{"role": "user"}]}, "messages"),
            (
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}
                    ]
                },
                "messages",
            ),
            ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
            ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
            ({"messages": MESSAGES, "max_completion_tokens": 5, "max_tokens": "5"}, "max_tokens"),
            ({"messages": MESSAGES, "max_tokens": 10_000}, "max_tokens"),
            ({"messages": MESSAGES, "logprobs": 5}, "logprobs"),
            ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
            ({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0]"),
            ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
            ({"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
            ({"messages": MESSAGES, "continue_final_message": 1}, "continue_final_message"),
            ({"messages": MESSAGES, "add_generation_prompt": "yes"}, "add_generation_prompt"),
            ({"messages": MESSAGES, "functions": [{}]}, "functions"),
            ({"messages": MESSAGES, "echo": True}, "echo"),
        ):
            response = await served.post("/v1/chat/completions", fields)
            assert response.status_code == 400, (fields, response.text)
            assert error_of(response)["param"] == param, response.text
        served.parts.chat_template.close()

    run(scenario, parts=chat_parts())


def test_a_model_without_a_template_refuses_chats():
    async def scenario(served):
        response = await served.post("/v1/chat/completions", {"messages": MESSAGES})
        assert response.status_code == 400
        assert "no chat template" in error_of(response)["message"]

    run(scenario)


# --- models, tokens, health ----------------------------------------------------------------------------------------


def test_models():
    async def scenario(served):
        models = await served.openai.models.list()
        assert [m.id for m in models.data] == ["toy"]
        assert models.data[0].max_model_len == 256
        assert (await served.openai.models.retrieve("toy")).id == "toy"
        with pytest.raises(openai.NotFoundError):
            await served.openai.models.retrieve("gpt-5")
        with pytest.raises(openai.NotFoundError) as caught:
            await served.openai.completions.create(model="gpt-5", prompt="hello")
        assert caught.value.code == "model_not_found"
        assert "'toy'" in caught.value.message

    run(scenario)


def test_tokenize_and_back():
    async def scenario(served):
        for text in ("hello", "", "é🎉"):
            answer = (
                await served.post("/tokenize", {"model": "toy", "prompt": text, "return_token_strs": True})
            ).json()
            ids = served.parts.tokenizer.encode(text) if text else []
            assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 256)
            assert len(answer["token_strs"]) == len(ids)
            plain = (await served.post("/tokenize", {"prompt": text, "add_special_tokens": False})).json()["tokens"]
            assert (await served.post("/detokenize", {"tokens": plain})).json() == {"prompt": text}
        answer = (await served.post("/tokenize", {"messages": MESSAGES})).json()
        assert answer["tokens"] == conversation_ids(served)
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": "abc"}, "tokens"),
            ("/detokenize", {"tokens": [5, VOCAB_SIZE]}, "tokens[1]"),
            ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ):
            response = await served.post(path, body)
            assert response.status_code == 400, response.text
            assert error_of(response)["param"] == param
        served.parts.chat_template.close()

    run(scenario, parts=chat_parts())


@pytest.mark.parametrize(("left_s", "retry_after"), [(41.2, "42"), (0.2, "1"), (600.0, "60"), (None, "5")])
def test_a_request_before_the_start_is_over_learns_how_far_it_is(left_s, retry_after):
    from apt_jax.frontend.start_stages import StartStatus
    from serve.http_api.app_config import AppConfig
    from serve.http_api.server import HttpConfig, HttpServer

    status = StartStatus(stage="compiling the CPU kernels", number=2, total=4, spent_s=3.0, left_s=left_s)

    async def scenario() -> None:
        import httpx2

        server = HttpServer(HttpConfig(port=0, app=AppConfig(starting=lambda: status)))
        await server.start()
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as http:
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/v1/messages"):
                response = await http.post(path, json={"prompt": "x"})
                assert response.status_code == 503
                assert response.headers["retry-after"] == retry_after
                error = response.json()["error"]
                assert "stage 2 of 4, compiling the CPU kernels" in error["message"]
                if path != "/v1/messages":
                    assert error["starting"] == {
                        "stage": "compiling the CPU kernels",
                        "number": 2,
                        "of": 4,
                        "estimated_seconds": left_s,
                    }
        await server.stop(0)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_P10_health_and_readiness_follow_the_engine():
    from apt_jax.frontend.async_engine import AsyncEngine
    from serve.http_api.server import HttpConfig, HttpServer

    async def scenario() -> None:
        import httpx2

        server = HttpServer(HttpConfig(port=0))
        await server.start()
        base = f"http://127.0.0.1:{server.port}"
        async with httpx2.AsyncClient(base_url=base) as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/metrics")).status_code == 200
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize")):
                response = await http.request(method, path, json={"prompt": "x"})
                assert response.status_code == 503
                assert "starting" in error_of(response)["message"]
                assert int(response.headers["retry-after"]) >= 1
                assert "x-should-retry" not in response.headers
            parts = toy_parts(step_s=0.005)
            await server.serve(AsyncEngine(parts))
            assert (await http.get("/ready")).status_code == 200
            body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True}
            task = asyncio.create_task(http.post("/v1/completions", json=body))
            while not parts.engine.num_live:
                await asyncio.sleep(0.001)
            stopping = asyncio.create_task(server.stop(30))
            await asyncio.sleep(0)
            # Draining: alive, not ready, new completions go elsewhere, what was open ends well.
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
            late = await http.post("/v1/completions", json=body)
            assert late.status_code == 503
            assert "shutting down" in error_of(late)["message"]
            answer = await task
            assert answer.json()["usage"]["completion_tokens"] == 60
            await stopping

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("stream", [False, True])
def test_H1_what_does_not_end_in_the_drain_time_is_told_so(stream):
    async def scenario(served):
        body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": stream}
        task = asyncio.create_task(served.post("/v1/completions", body))
        await served.until(lambda: served.parts.engine.stats().generation_tokens > 2)
        await served.server.stop(0.1)
        response = await task
        if not stream:
            assert response.status_code == 503
            assert "retry-after" in response.headers
            return
        *events, last = [e for e in response.text.split("\n\n") if e]
        assert len(events) > 1
        assert "error" in json.loads(last.removeprefix("data: "))
        assert "[DONE]" not in response.text

    run(scenario, step_s=0.02)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/api/show", "/v1/messages/count_tokens"])
def test_a_stop_ends_bodies_that_are_still_read(path, caplog, monkeypatch):
    monkeypatch.setattr("serve.http_api.server._CLOSE_TIMEOUT_S", 0.01)

    async def scenario(served):
        body = b'{"prompt": "hello'
        connection = await served.raw(post_head(path, 1000) + body)
        await served.until(lambda: served.server._uvicorn.server_state.tasks)
        await served.server.stop(0)
        assert await connection.at_end()
        await connection.close()

    run(scenario)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_P9_engine_death_is_503_and_seen_by_health():
    def fault(batch):
        fault.steps += 1
        return Fault(kind=FaultKind.RAISE_AFTER) if fault.steps > 3 else None

    fault.steps = 0

    async def scenario(served):
        bodies = [{"prompt": f"r{i}", "ignore_eos": True} for i in range(3)]
        responses = await asyncio.gather(*(served.post("/v1/completions", b) for b in bodies))
        assert {r.status_code for r in responses} == {503}
        assert await served.engine.wait_ended()
        assert (await served.http.get("/health")).status_code == 503
        assert (await served.http.get("/ready")).status_code == 503
        assert (await served.post("/v1/completions", bodies[0])).status_code == 503
        assert (await served.http.get("/metrics")).status_code == 200

    run(scenario, fault=fault, debug=False)


def test_paths_and_methods_that_are_not_there():
    async def scenario(served):
        for method, path, status in (
            ("POST", "/", 405),
            ("GET", "/v1/completions", 405),
            ("POST", "/health", 405),
            ("GET", "/health/", 404),
            ("GET", "/x//health", 404),
            ("POST", "/v1/images/generations", 404),
            ("GET", "/docs", 404),
        ):
            response = await served.http.request(method, path, json={})
            assert response.status_code == status, path
            assert error_of(response)["type"] == "invalid_request_error"

    run(scenario)


# --- failures ------------------------------------------------------------------------------------------------------


def test_E7_a_request_that_broke_says_so_and_not_to_try_again():
    read = threading.Event()

    def fault(batch):
        fault.steps += 1
        if fault.steps == 10:  # the stream must have begun: an answer that has not has the status of the error
            assert read.wait(30)
        return Fault(kind=FaultKind.NOT_FINITE) if fault.steps in (3, 10) else None

    fault.steps = 0

    async def scenario(served):
        body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "request_id": "mine"}
        response = await served.post("/v1/completions", body)
        assert response.status_code == 500
        error = error_of(response)
        assert "not finite" in error["message"]
        assert "mine" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        fault.steps = 3
        stream = await served.openai.completions.create(
            model="toy", prompt="hello", max_tokens=20, stream=True, **GREEDY
        )

        async def read_all() -> None:
            async for _ in stream:
                read.set()

        with pytest.raises(openai.APIError, match="not finite"):
            await read_all()
        assert await served.ask("next", max_tokens=2)

    run(scenario, fault=fault, debug=False)


def test_P19_no_text_of_an_exception_reaches_the_client(caplog):
    async def scenario(served):
        def broken(**fields):
            raise ValueError("secret prompt text")

        object.__setattr__(served.parts, "build_requests", broken)
        response = await served.post("/v1/completions", {"prompt": "hello"})
        assert response.status_code == 500
        assert "secret" not in response.text
        assert "internal error" in error_of(response)["message"]
        assert response.headers["x-should-retry"] == "false"

    run(scenario)


def test_P20_logs_hold_neither_prompt_nor_output(caplog):
    caplog.set_level("DEBUG")

    async def scenario(served):
        answer = await served.ask("canary-prompt", max_tokens=20)
        assert "canary-prompt" not in caplog.text
        assert answer["choices"][0]["text"] not in caplog.text
        assert "20 tokens" in caplog.text

    run(scenario)


def test_a_full_queue_is_429_for_those_that_did_not_fit_and_for_all_of_one_call():
    async def scenario(served):
        body = {"prompt": "hello", "max_tokens": 30, "ignore_eos": True}
        responses = await asyncio.gather(
            *(served.post("/v1/completions", body) for _ in range(8)),
        )
        statuses = [r.status_code for r in responses]
        assert statuses.count(200) >= 1
        refused = [r for r in responses if r.status_code == 429]
        assert refused
        assert set(statuses) == {200, 429}
        for response in refused:
            assert int(response.headers["retry-after"]) >= 1
            assert error_of(response)["code"] == "queue_full"
        for stream in (False, True):
            response = await served.post("/v1/completions", {**body, "n": 5, "stream": stream})
            assert response.status_code == 429
        await served.idle()

    run(scenario, max_num_seqs=1, max_num_queued_reqs=2, step_s=0.002)


@pytest.mark.parametrize("stream", [False, True])
def test_C8_deadlines(stream):
    async def scenario(served):
        body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": stream}
        for given in ({"deadline_ms": 150}, {"slo": {"deadline_ms": 150}}):
            response = await served.post("/v1/completions", {**body, **given})
            if stream:
                assert '"code":"deadline_exceeded"' in response.text
                assert "[DONE]" not in response.text
            else:
                assert response.status_code == 408
                assert error_of(response)["code"] == "deadline_exceeded"
                assert response.headers["x-should-retry"] == "false"
            await served.idle()
        assert served.parts.engine.stats().generation_tokens < 100
        response = await served.post("/v1/completions", {**body, "deadline_ms": 0.001})
        assert response.status_code == 408
        await served.idle()

    run(scenario, step_s=0.01)


def test_C10_a_duplicate_id_is_refused_and_the_first_one_goes_on():
    async def scenario(served):
        body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "request_id": "mine", "temperature": 0}
        first = asyncio.create_task(served.post("/v1/completions", body))
        await served.until(lambda: served.parts.engine.num_live == 1)
        second = await served.post("/v1/completions", body)
        assert second.status_code == 400  # 409 would be tried again
        assert error_of(second)["code"] == "duplicate_id"
        assert (await first).json()["choices"][0]["text"] == text_of(served, expected(served, "hello", 60))

    run(scenario, step_s=0.003)


# --- objectives ----------------------------------------------------------------------------------------------------


def test_a_misspelt_objective_is_refused():
    async def scenario(served):
        answer = await served.post("/v1/completions", {"prompt": "x", "slo": {"ttft": 500}})
        assert answer.status_code == 400
        error = error_of(answer)
        assert error["param"] == "slo"
        assert "'ttft' is none of ttft_ms, tbt_ms, e2e_ms, class, deadline_ms" in error["message"]

    run(scenario)


@pytest.mark.parametrize(
    ("body", "headers", "want"),
    [
        ({}, {}, (SLO(), "rt")),
        ({"slo": {"ttft_ms": 500, "tbt_ms": 50, "e2e_ms": 9000, "class": "be"}}, {}, (SLO(0.5, 0.05, e2e_s=9.0), "be")),
        ({"slo_ttft_ms": 500, "slo_tbt_ms": 50, "slo_class": "be"}, {}, (SLO(0.5, 0.05), "be")),
        ({"slo_e2e_ms": 9000}, {}, (SLO(e2e_s=9.0), "rt")),
        ({}, {"x-llm-d-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "12.5"}, (SLO(0.25, 0.0125), "rt")),
        (
            {},
            {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5", "x-slo-e2e-ms": "9000"},
            (SLO(0.25, 0.0125, e2e_s=9.0), "rt"),
        ),
        ({}, {"x-slo-ttft-ms": "1", "x-llm-d-slo-ttft-ms": "2"}, (SLO(0.002), "rt")),
        ({"slo": {"ttft_ms": 3}}, {"x-llm-d-slo-ttft-ms": "2", "x-slo-tpot-ms": "7"}, (SLO(0.003, 0.007), "rt")),
        ({"slo": {"e2e_ms": 3}}, {"x-slo-e2e-ms": "2", "x-slo-tpot-ms": "7"}, (SLO(tbt_s=0.007, e2e_s=0.003), "rt")),
        ({"service_tier": "flex"}, {}, (SLO(), "be")),
        ({"service_tier": "priority"}, {}, (SLO(), "rt")),
        ({"service_tier": "auto"}, {}, (SLO(), "rt")),
        ({"service_tier": "flex", "slo_class": "rt"}, {}, (SLO(), "rt")),
    ],
)
def test_objectives_of_body_headers_and_tier(body, headers, want):
    async def scenario(served):
        seen = []
        add = served.parts.engine.add_request

        def noting(request):
            seen.append((request.slo, request.slo_class))
            add(request)

        served.parts.engine.add_request = noting
        response = await served.post("/v1/completions", {"prompt": "hello", "max_tokens": 1, **body}, headers=headers)
        assert response.status_code == 200, response.text
        assert seen == [want]

    run(scenario)


# --- clients that leave, or do not read ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_C3_C9_a_client_that_leaves_is_cancelled_at_once(stream, half):
    async def scenario(served):
        bystander = asyncio.create_task(served.ask("bystander", max_tokens=100))
        connection = await served.raw(completion(max_tokens=200, stream=stream))
        await served.until(lambda: served.parts.engine.num_live == 2)
        await asyncio.sleep(0.05)
        before = served.parts.engine.stats().finished.get("abort", 0)
        if half:
            connection.writer.write_eof()
        else:
            connection.writer.transport.abort()
        await served.until(lambda: served.parts.engine.num_live <= 1, 2.0)
        assert served.parts.engine.stats().finished.get("abort", 0) == before + 1
        answer = await bystander
        assert answer["choices"][0]["text"] == text_of(served, expected(served, "bystander", 100))
        await served.idle()
        await connection.close()

    run(scenario, step_s=0.004)


def test_C1_a_client_that_leaves_the_queue_is_never_scheduled(caplog):
    caplog.set_level("INFO")

    async def scenario(served):
        first = asyncio.create_task(served.ask("first", max_tokens=60))
        await served.until(lambda: served.parts.engine.num_live == 1)
        connection = await served.raw(completion(max_tokens=100))
        await served.until(lambda: served.parts.engine.num_live == 2)
        connection.writer.transport.abort()
        await served.until(lambda: served.parts.engine.num_live == 1, 2.0)
        await first
        await served.idle()
        assert served.parts.engine.stats().prompt_tokens == 6  # of the first alone
        assert ": 499, 0 tokens" in caplog.text

    run(scenario, max_num_seqs=1, step_s=0.002)


def test_a_client_that_leaves_while_its_prompt_is_read_runs_nothing():
    async def scenario(served):
        started, go = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        encode = served.parts.chat_template.encode

        def slow(*args, **kwargs):
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(20)
            return encode(*args, **kwargs)

        served.parts.chat_template.encode = slow
        body = json.dumps({"messages": MESSAGES}).encode()
        connection = await served.raw(post_head("/v1/chat/completions", len(body)) + body)
        await started.wait()
        connection.writer.transport.abort()
        await asyncio.sleep(0.05)
        go.set()
        await served.idle()
        assert served.parts.engine.stats().finished == {}
        served.parts.chat_template.close()

    run(scenario, parts=chat_parts())


def test_C5_clients_that_never_read_lose_their_requests_and_block_nobody():
    async def scenario(served):
        import socket

        hoarders = []
        for _ in range(3):
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", served.server.port))
            await asyncio.get_running_loop().sock_sendall(raw, completion(max_tokens=1500, stream=True, logprobs=20))
            hoarders.append(raw)
        await served.until(lambda: served.parts.engine.num_live == 3)
        answer = await served.ask("reader", max_tokens=20)
        assert answer["choices"][0]["text"] == text_of(served, expected(served, "reader", 20))
        await served.idle(10.0)
        finished = served.parts.engine.stats().finished
        for raw in hoarders:
            raw.close()
        assert finished == {"length": 1, "abort": 3}

    # A chunk has 1 kB; 1,500 of them are more than all buffers take.
    run(scenario, connections={"write_stall_s": 0.3}, num_blocks=4096, max_model_len=2048, step_s=0.002)


def test_a_slow_reader_that_reads_gets_everything():
    async def scenario(served):
        connection = await served.raw(completion(max_tokens=1500, stream=True, logprobs=20, temperature=0))
        data = bytearray()
        while b"[DONE]" not in data[-20_000:]:
            data += await connection.reader.read(16_384)
            await asyncio.sleep(0.01)
        assert b'"finish_reason":"length"' in data
        await connection.close()

    run(scenario, connections={"write_stall_s": 0.3}, num_blocks=2048, max_model_len=2048, debug=False)


def test_C13_rapid_open_and_leave_leaves_nothing():
    async def scenario(served):
        async def one(number: int) -> None:
            connection = await served.raw(completion(max_tokens=100, stream=bool(number % 2)))
            if number % 3:
                await asyncio.sleep(0.002 * (number % 7))
            connection.writer.transport.abort()

        for start in range(0, 200, 50):
            await asyncio.gather(*(one(n) for n in range(start, start + 50)))
        await served.idle()

    run(scenario, max_num_queued_reqs=500)
