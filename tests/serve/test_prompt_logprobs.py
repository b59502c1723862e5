"""Log probabilities of prompts over HTTP and both gRPC services, and what lm-eval asks besides."""

import asyncio
import threading
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from apt_jax.request import PromptLogprobs
from apt_jax.text.chat import ChatTemplate
from tests.support.chat_templates import CHATML
from tests.support.fake_executor import reference_prompt_logprobs
from tests.support.http_serving import HttpServed, run

TEXT = "hello there"


def ids_of(served: HttpServed, text: str = TEXT) -> list[int]:
    assert served.parts.tokenizer is not None
    return served.parts.tokenizer.encode(text)


def wanted(served: HttpServed, text: str = TEXT) -> PromptLogprobs:
    return reference_prompt_logprobs(np.array(ids_of(served, text)))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_prompt_and_completion(stream):
    async def scenario(served: HttpServed):
        answer = await served.openai.completions.create(
            model="toy", prompt=TEXT, max_tokens=4, logprobs=2, echo=True, stream=stream, temperature=0.0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        parts = [c async for c in answer] if stream else [answer]
        text = "".join(part.choices[0].text for part in parts)
        tokens, values, tops, offsets = (
            [value for part in parts for value in getattr(part.choices[0].logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        ids, scores = ids_of(served), wanted(served)
        assert text.startswith(TEXT)
        assert len(tokens) == len(values) == len(tops) == len(offsets) == len(ids) + 4
        assert "".join(tokens[1 : len(ids)]) == TEXT  # after the token that the tokenizer puts first
        assert values[0] is tops[0] is None
        assert values[1 : len(ids)] == pytest.approx(scores.logprob.tolist())
        token_text = token_text_of(served)
        for place, top in enumerate(tops[1 : len(ids)]):
            assert top[tokens[1 + place]] == values[1 + place]
            best = token_text(int(scores.top_ids[place, 0]))
            assert best == tokens[1 + place] or top[best] == pytest.approx(float(scores.top_logprobs[place, 0]))
        assert offsets[: len(ids)] == [0, *(sum(map(len, tokens[1:place])) for place in range(1, len(ids)))]
        check_offsets(text, tokens, offsets, token_text_of(served)(ids[0]))

    run(scenario)


def token_text_of(served: HttpServed):
    tokenizer = served.parts.tokenizer
    assert tokenizer is not None
    return tokenizer.token_text


def check_offsets(text: str, tokens: list[str], offsets: list[int], special: str | None) -> None:
    """Tokens stand in the text where they are said to; special ones, and parts of characters, are not in it."""
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    for before, token, offset in zip([None, *tokens], tokens, offsets, strict=False):
        if token != special and "\ufffd" not in f"{before}{token}":
            assert text.startswith(token, offset)


@pytest.mark.parametrize("prompts", [TEXT, [TEXT, "more"], [[7, 8, 9], [5]]])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_what_lm_eval_sends(prompts, max_tokens):
    async def scenario(served: HttpServed):
        answer = await served.ask(prompts, max_tokens=max_tokens, logprobs=1, echo=True, seed=1234)
        each = prompts if isinstance(prompts, list) else [prompts]
        lengths = [len(p) if isinstance(p, list) else len(ids_of(served, p)) for p in each]
        for choice, length in zip(answer["choices"], lengths, strict=True):
            values = choice["logprobs"]["token_logprobs"]
            assert [v is None for v in values] == [True] + [False] * (length - 1 + max_tokens)
            assert choice["finish_reason"] == "length"
            assert choice["stop_reason"] is None
            assert "prompt_logprobs" not in choice
        assert answer["usage"]["completion_tokens"] == max_tokens * len(lengths)
        assert answer["usage"]["prompt_tokens"] == sum(lengths)
        if max_tokens == 0 and prompts == TEXT:
            assert answer["choices"][0]["text"] == TEXT

    run(scenario)


def test_prompt_logprobs_have_the_form_of_vllm():
    async def scenario(served: HttpServed):
        ids, scores = ids_of(served), wanted(served)
        (choice,) = (await served.ask(TEXT, max_tokens=2, prompt_logprobs=3))["choices"]
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert choice["logprobs"] is None
        for place, entry in enumerate(rest):
            own = entry[str(ids[place + 1])]
            assert own["logprob"] == pytest.approx(float(scores.logprob[place]))
            assert own["rank"] == scores.rank[place]
            assert own["decoded_token"] == token_text_of(served)(ids[place + 1])
            assert set(map(int, entry)) == {ids[place + 1], *scores.top_ids[place, :3].tolist()}
        (choice,) = (await served.ask(TEXT, max_tokens=0, prompt_logprobs=0))["choices"]
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1] * (len(ids) - 1)
        assert choice["text"] == ""

    run(scenario)


def test_chats_have_them_too():
    async def scenario(served: HttpServed):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "prompt_logprobs": 1}
        answer = (await served.post("/v1/chat/completions", {**body, "return_token_ids": True})).json()
        ids = np.array(answer["choices"][0]["prompt_token_ids"])
        values = [entry[str(t)]["logprob"] for t, entry in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)]
        assert values == pytest.approx(reference_prompt_logprobs(ids).logprob.tolist())
        refused = await served.post("/v1/chat/completions", {**body, "stream": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")

    run(scenario, chat_template=ChatTemplate(CHATML))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": False, "echo": True}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt": [[3] * 60] * 2, "prompt_logprobs": 9}, "prompt_logprobs"),
        ({"prompt": [3] * 110, "prompt_logprobs": 9}, "prompt_logprobs"),
        ({"prompt": [3] * 60, "prompt_logprobs": 9, "n": 2}, "prompt_logprobs"),
    ],
)
def test_what_is_refused(fields, param):
    async def scenario(served: HttpServed):
        answer = await served.post("/v1/completions", {"prompt": TEXT, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert served.parts.engine.num_live == 0

    run(scenario, max_prompt_logprobs=1000)


def test_both_grpc_services():
    async def scenario(served: HttpServed):
        ids = [7, *range(3, 90)] * 13
        scores = reference_prompt_logprobs(np.array(ids))
        messages = [m async for m in served.grpc.generate(ids, prompt_logprobs=2, max_tokens=3)]
        assert [m.sequence for m in messages] == list(range(len(messages)))
        sizes = [len(m.prompt_logprobs) for m in messages]
        assert sizes[:2] == [1024, len(ids) - 1 - 1024]
        assert not any(sizes[2:])
        assert not messages[0].token_ids
        entries = [entry for m in messages for entry in m.prompt_logprobs]
        assert [entry.sampled.token_id for entry in entries] == ids[1:]
        assert [entry.sampled.logprob for entry in entries] == pytest.approx(scores.logprob.tolist())
        assert all(len(entry.top) <= 2 for entry in entries)
        pb = vllm_engine_pb2
        for stream in (False, True):
            request = pb.GenerateRequest(
                request_id=f"s{stream}", tokenized=pb.TokenizedInput(input_ids=ids), stream=stream,
                sampling_params=pb.SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True),
            )  # fmt: skip
            async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_server.port}") as channel:
                stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
                parts = [m async for m in stub.Generate(request)]
            found = [p.chunk if p.HasField("chunk") else p.complete for p in parts]
            found = [part.input_logprobs for part in found if part.HasField("input_logprobs")]
            assert len(found) == 1
            assert list(found[0].token_ids) == ids
            assert not found[0].token_logprobs[0].HasField("value")
            assert [v.value for v in found[0].token_logprobs[1:]] == pytest.approx(scores.logprob.tolist())
            assert [t.token_ids[0] for t in found[0].top_logprobs[1:]] == scores.top_ids[:, 0].tolist()

    run(scenario, max_model_len=2048, num_blocks=2000)


def test_abort_frees_everything_and_names_go_free():
    async def scenario(served: HttpServed):
        for _ in range(3):
            call = asyncio.create_task(
                served.post("/v1/completions", {"prompt": [3] * 100, "prompt_logprobs": 1, "max_tokens": 150})
            )
            await served.until(lambda: served.parts.engine.num_live > 0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await served.idle()

    run(scenario, step_s=0.01)


def test_tokenizer_info():
    async def scenario(served: HttpServed):
        answer = await served.http.get("/tokenizer_info")
        assert answer.status_code == 200
        settings = answer.json()
        assert settings["chat_template"] == CHATML
        assert settings["eos_token"] == "<eos>"
        assert settings["model_max_length"] == served.parts.limits.max_model_len
        assert settings["tokenizer_class"]

    run(scenario, chat_template=ChatTemplate(CHATML, special_tokens={"eos_token": "<eos>"}))


def test_requests_wait_together_for_what_is_compiled_and_others_do_not():
    async def scenario(served: HttpServed):
        executor, release, calls = served.parts.executor, threading.Event(), []

        def prepare() -> None:
            calls.append(1)
            assert release.wait(20)
            if len(calls) == 1:
                raise RuntimeError("planted")

        executor.prepare_prompt_logprobs = prepare  # type: ignore[method-assign]
        body = {"prompt": TEXT, "max_tokens": 1, "prompt_logprobs": 1}
        waiting = [asyncio.create_task(served.post("/v1/completions", body)) for _ in range(3)]
        await served.until(lambda: calls)
        await served.ask(TEXT, max_tokens=1)
        waiting.pop().cancel()
        release.set()
        assert [(await call).status_code for call in waiting] == [500, 500]
        assert (await served.post("/v1/completions", body)).status_code == 200
        assert (await served.post("/v1/completions", body)).status_code == 200
        assert len(calls) == 2

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 1, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 1, "echo": True, "logprobs": 1, "stream": True}),
        ("/v1/embeddings", {"input": TEXT}),
        ("/v1/score", {"text_1": TEXT, "text_2": "b"}),
        ("/v1/rerank", {"query": TEXT, "documents": ["b"]}),
        ("/api/embed", {"input": TEXT}),
        (None, {}),
    ],
)
def test_a_stop_ends_those_who_wait_for_what_is_compiled(path, body, caplog):
    """At once, by an answer that says so; the programs are compiled by a thread that nothing can end."""

    async def scenario(served: HttpServed):
        begun, release = threading.Event(), threading.Event()

        def prepare() -> None:
            begun.set()
            assert release.wait(20)

        served.parts.executor.prepare_prompt_logprobs = prepare  # type: ignore[method-assign]
        if path is None:
            options = {"max_tokens": 1, "prompt_logprobs": 1}
            call: Any = asyncio.ensure_future(anext(served.grpc.generate(TEXT, **options)))  # type: ignore[arg-type]
        else:
            call = asyncio.ensure_future(served.post(path, body))
        await served.until(begun.is_set)
        assert served.engine.is_compiling
        await asyncio.gather(served.server.stop(0), served.grpc_server.stop(0))
        if path is None:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await call
        else:
            assert (await call).status_code == 503
        assert served.engine.is_compiling
        release.set()
        await served.until(lambda: not served.engine.is_compiling)

    run(scenario)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
