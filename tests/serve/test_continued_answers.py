"""Every endpoint answers with what follows its prompt, spaces and all, by a tokenizer of SentencePiece's kind."""

import json

import pytest
from tokenizers import processors

from apt_jax.frontend.llm import LLM
from apt_jax.request import SamplingParams
from apt_jax.text.chat import ChatTemplate
from apt_jax.text.tokenizer import Tokenizer
from tests.support.http_serving import HttpServed, run
from tests.support.small_tokenizers import ids_of, llama2
from tests.support.toy_serving import EngineComponents, toy_parts

pytest.importorskip("llguidance")

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
USER = {"role": "user", "content": "is it"}
BACKEND = llama2()
(MODEL,) = ids_of(BACKEND, "▁model")
EMOJI = ids_of(BACKEND, "<<😀>>")


def parts() -> EngineComponents:
    backend = llama2()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = Tokenizer(backend)
    template = ChatTemplate(TEMPLATE, special_tokens={"bos_token": "<s>"})
    return toy_parts(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, chat_template=template)


def saying(token: int, count: int = 2) -> dict:
    return {"allowed_token_ids": [token], "max_tokens": count, "temperature": 0, "ignore_eos": True}


def test_answers_of_every_endpoint_begin_with_the_space_of_their_first_word():
    async def scenario(served: HttpServed):
        answer = await served.ask("hello", **saying(MODEL), echo=True)
        assert answer["choices"][0]["text"] == "hello model model"
        answer = await served.ask([1], **saying(MODEL))
        assert answer["choices"][0]["text"] == " model model"
        chat = {"model": "toy", "messages": [USER], **saying(MODEL)}
        response = await served.post("/v1/chat/completions", chat)
        assert response.json()["choices"][0]["message"]["content"] == " model model"
        body = {"model": "toy", "input": "is it", "max_output_tokens": 2, **saying(MODEL)}
        body.pop("max_tokens")
        response = await served.post("/v1/responses", body)
        assert response.json()["output"][0]["content"][0]["text"] == " model model"
        begun = {"role": "assistant", "content": "yes the"}
        body = {**chat, "messages": [USER, begun], "continue_final_message": True, "add_generation_prompt": False}
        response = await served.post("/v1/chat/completions", body)
        assert response.json()["choices"][0]["message"]["content"] == " model model"
        body = {"model": "toy", "messages": [USER, begun], **saying(MODEL)}
        response = await served.post("/v1/messages", body)
        assert response.json()["content"][0]["text"] == " model model"
        sampling = {
            "max_tokens": 2,
            "temperature": 0.0,
            "logprobs": 0,
            "structured_outputs": {"choice": [" model model"]},
        }
        answers = [answer async for answer in served.grpc.generate("hello", **sampling)]
        assert "".join(answer.text for answer in answers) == " model model"
        assert [p.sampled.token_text for answer in answers for p in answer.logprobs] == [" model"] * 2
        assert served.parts.grammars is not None
        served.parts.grammars.close()

    run(scenario, parts=parts())


def test_a_stream_sends_each_character_with_its_last_byte():
    grammar = {"regex": "(😀){5}"}

    async def scenario(served: HttpServed):
        body = {"prompt": "hello", "max_tokens": 20, "temperature": 0, "stream": True, "structured_outputs": grammar}
        response = await served.post("/v1/completions", {**body, "return_token_ids": True})
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        sent, text = 0, ""
        for choice in [
            event["choices"][0] for event in events
        ]:  # An event has one token or, for a slow reader, several.
            sent += len(choice["token_ids"] or ())
            text += choice["text"]
            assert text == "😀" * (sent // len(EMOJI))
        assert (sent, text) == (5 * len(EMOJI), "😀" * 5)
        assert served.parts.grammars is not None
        served.parts.grammars.close()

    run(scenario, parts=parts())


def test_a_stop_string_of_byte_tokens_ends_the_request_with_its_last_byte():
    async def scenario(served: HttpServed):
        (newline,) = ids_of(BACKEND, "<<\n>>")
        answer = await served.ask("hello", **{**saying(newline, 9), "stop": ["\n\n"]})
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "\n\n")
        assert answer["usage"]["completion_tokens"] == 2

    run(scenario, parts=parts())


def test_python_answers_alike():
    llm = LLM.from_parts(parts())
    params = SamplingParams(
        allowed_token_ids=(MODEL,), max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=0
    )
    (output,) = llm.generate(["hello the"], params)
    assert output.outputs[0].text == " model model"
    assert output.prompt_logprobs is not None
    assert [one.decoded_token for entry in output.prompt_logprobs[1:] for one in (entry or {}).values()] == [
        " hello",
        " the",
    ]
