"""Answers to completions and chats continue their prompt: text, echo, places and bytes of tokens, for every tokenizer."""

import json
import random
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from apt_jax.engine.request_state import StepOutput, TokenLogprobs
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputAssembler, OutputDelta
from apt_jax.request import PromptLogprobs, RequestMetrics
from apt_jax.text.tokenizer import Tokenizer
from serve.http_api.openai_request import read_call
from serve.http_api.openai_response import CompletionResponseBuilder
from tests.support.small_tokenizers import TOKENIZERS, ids_of
from tests.support.toy_serving import toy_parts

NAMES = sorted(TOKENIZERS.keys() - {"stripped_ends", "whole_texts"})
WORDS = ["the", "model", "is", "a", "no!", "é", "😀😀", "\n", "?", "<tag>"]


def parts_of(name: str) -> EngineComponents:
    tokenizer = Tokenizer(TOKENIZERS[name]())
    return toy_parts(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)


def step_outputs(request: Any, ids: list[int], top: list[int], reason: Any = "length") -> list[StepOutput]:
    """An output of one token a step, with log probabilities."""
    metrics = RequestMetrics(arrival_s=0.0, slo=request.slo)
    size = request.prompt_token_ids.size - 1
    of_prompt = PromptLogprobs(
        logprob=np.full(size, -1.0, np.float32),
        rank=np.full(size, 9, np.int32),
        top_ids=np.tile(np.array(top, np.int32), (size, 1)),
        top_logprobs=np.tile(np.full(len(top), -2.0, np.float32), (size, 1)),
    )
    values = np.full(len(top), -2.0, np.float32)
    return [
        StepOutput(
            request=request,
            new_token_ids=[token],
            logprobs=[TokenLogprobs(logprob=-1.0, top_ids=np.array(top, np.int32), top_logprobs=values)],
            prompt_logprobs=of_prompt if at == 0 else None,
            num_outputs=at + 1,
            finish_reason=reason if at == len(ids) - 1 else None,
            metrics=metrics,
        )
        for at, token in enumerate(ids)
    ]


def deltas_of(assembler: OutputAssembler, outputs: list[StepOutput]) -> list[OutputDelta]:
    deltas = []
    for output in outputs:
        assembler.on_token(output.request, output.new_token_ids[0])
        deltas.append(assembler.delta(output))
    return deltas


def answer(
    parts: EngineComponents, body: dict[str, Any], ids: list[int], top: list[int], *, stream: bool = False
) -> dict:
    """The choice of a completion, of which a model says `ids`."""
    call = read_call(parts, "completion", {"max_tokens": len(ids), **body}, {}, 0.0)
    builder = CompletionResponseBuilder(parts, call)
    deltas = deltas_of(parts.assembler, step_outputs(call.requests[0], ids, top))
    if stream:
        chunks = [builder.chunk(0, delta)["choices"][0] for delta in deltas]
        logprobs = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
        joined = {key: [value for part in logprobs for value in part[key]] for key in (logprobs[0] if logprobs else {})}
        return {"text": "".join(chunk["text"] for chunk in chunks), "logprobs": joined}
    whole = deltas[0]
    for delta in deltas[1:]:
        whole.merge(delta)
    return builder.whole([whole])["choices"][0]


def check_places(
    text: str, tokens: list[str], text_offset: list[int], top_logprobs: list[dict | None], token_logprobs: list
) -> None:
    """Every token stands where it is said to, and they are the whole text; parts of a character stand where it does."""
    assert len(token_logprobs) == len(tokens)
    at = 0
    for token, offset, top in zip(tokens, text_offset, top_logprobs, strict=True):
        if "\ufffd" in token:  # parts of a character
            assert text[offset] in "é😀"
            at = offset + 1
        else:
            assert offset == at
            assert text.startswith(token, at)
            at += len(token)
        assert top is None or token in top
    assert at == len(text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_text_echo_and_places_of_tokens_continue_the_prompt(name, stream):
    parts = parts_of(name)
    tokenizer = parts.tokenizer
    assert tokenizer is not None
    rng = random.Random(0)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    for _ in range(8):
        prompt = " ".join(rng.choice(WORDS[:4]) for _ in range(3))
        ids = [i for i in encode(" ".join(rng.choice(WORDS) for _ in range(5))) if i not in tokenizer.special_ids]
        top = encode("model")[:1]
        begun = tokenizer.decode(encode(prompt))
        whole = prompt + tokenizer.decode(encode(prompt) + ids).removeprefix(begun)
        body = {"prompt": prompt, "logprobs": 1}
        choice = answer(parts, {**body, "echo": True}, ids, top, stream=stream)
        assert choice["text"] == whole
        assert choice["logprobs"]["text_offset"][len(encode(prompt))] == len(prompt)
        check_places(whole, **choice["logprobs"])
        choice = answer(parts, body, ids, top, stream=stream)
        assert choice["text"] == whole.removeprefix(prompt)
        assert choice["logprobs"]["text_offset"][0] == 0


def test_a_prompt_of_token_ids_is_echoed_with_its_special_tokens():
    parts = parts_of("llama2")
    assert parts.tokenizer is not None
    backend = parts.tokenizer.backend
    prompt, ids = ids_of(backend, "<s>", "▁hello"), ids_of(backend, "▁model", "▁is")
    choice = answer(parts, {"prompt": prompt, "logprobs": 1, "echo": True}, ids, ids[:1])
    assert choice["text"] == "<s> hello model is"
    assert choice["logprobs"]["tokens"] == ["<s>", " hello", " model", " is"]
    assert choice["logprobs"]["text_offset"] == [0, 3, 9, 15]
    choice = answer(parts, {"prompt": prompt[1:], "logprobs": 1, "echo": True}, ids, ids[:1])
    assert choice["text"] == "hello model is"
    assert choice["logprobs"]["tokens"] == ["hello", " model", " is"]
    assert choice["logprobs"]["text_offset"] == [0, 5, 11]


def test_the_token_that_begins_every_prompt_is_in_no_text():
    parts = parts_of("llama2")
    tokenizer = parts.tokenizer
    assert tokenizer is not None
    tokenizer.backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    choice = answer(
        parts, {"prompt": "hello the", "logprobs": 2, "echo": True}, ids_of(tokenizer.backend, "▁model", "<<\n>>"), [1]
    )
    assert choice["text"] == "hello the model\n"
    assert choice["logprobs"]["tokens"] == ["<s>", "hello", " the", " model", "\n"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 5, 9, 15]
    assert "hello" in choice["logprobs"]["top_logprobs"][1]


def test_tokens_of_a_character_in_parts_stand_where_it_stands():
    parts = parts_of("llama2")
    assert parts.tokenizer is not None
    ids = ids_of(parts.tokenizer.backend, "▁the", "<<😀>>", "▁is")
    choice = answer(parts, {"prompt": "hello", "logprobs": 1}, ids, ids[:1])
    assert choice["text"] == " the😀 is"
    assert choice["logprobs"]["text_offset"] == [0, 4, 4, 4, 4, 5]


@pytest.mark.parametrize("name", ["llama2", "unigram_bytes", "byte_level"])
def test_an_output_completes_a_character_that_the_echo_leaves_to_it(name):
    parts = parts_of(name)
    assert parts.tokenizer is not None
    whole = parts.tokenizer.encode("the 😀 is", add_special_tokens=False)
    for cut in range(1, len(whole)):
        choice = answer(parts, {"prompt": whole[:cut], "echo": True, "logprobs": 1}, whole[cut:], whole[:1])
        assert choice["text"] == "the 😀 is"


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_the_tokens_of_a_chat_put_together_are_its_text(name):
    parts = parts_of(name)
    tokenizer = parts.tokenizer
    assert tokenizer is not None
    rng = random.Random(0)
    for end in ([], [2]):
        ids = tokenizer.encode(" ".join(rng.choice(WORDS) for _ in range(8)), add_special_tokens=False) + end
        body = {"prompt": "hello the", "max_tokens": len(ids), "logprobs": 1}
        call = read_call(parts, "completion", body, {}, 0.0)
        outputs = step_outputs(call.requests[0], ids, ids[:2])
        text, entries = "", []
        for delta in deltas_of(parts.assembler, outputs):
            text += delta.text
            builder = CompletionResponseBuilder(parts, call)
            assert delta.logprobs is not None
            entries += builder.chat_logprobs(0, delta.token_ids, delta.logprobs)
        json.dumps(entries)
        assert bytes(b for entry in entries for b in entry["bytes"]).decode() == text
        assert text.startswith((" ", "the", "model", "is", "a", "no", "\n", "<tag>", "é", "😀"))


def test_bytes_of_byte_tokens_are_theirs():
    parts = parts_of("llama2")
    assert parts.tokenizer is not None
    ids = ids_of(parts.tokenizer.backend, "▁the", "<<😀\n>>", "</s>")
    call = read_call(parts, "completion", {"prompt": [1], "logprobs": 1}, {}, 0.0)
    deltas = deltas_of(parts.assembler, step_outputs(call.requests[0], ids, ids[1:2]))
    builder = CompletionResponseBuilder(parts, call)
    entries = [e for d in deltas for e in builder.chat_logprobs(0, d.token_ids, d.logprobs or [])]
    assert [e["bytes"] for e in entries] == [[*b" the"], [240], [159], [152], [128], [10], []]
    assert [e["token"] for e in entries] == [" the", *["\ufffd"] * 4, "\n", "</s>"]
    assert entries[0]["top_logprobs"][0]["bytes"] == [240]


@pytest.mark.parametrize("name", ["llama2", "byte_level"])
def test_a_stop_string_of_bytes_that_are_no_character_is_the_reason_of_the_end(name):
    parts = parts_of(name)
    assert parts.tokenizer is not None
    begun = parts.tokenizer.encode("the 😀", add_special_tokens=False)[:-1]
    call = read_call(parts, "completion", {"prompt": "x", "stop": ["\ufffd"], "logprobs": 1}, {}, 0.0)
    *_, last = deltas_of(parts.assembler, step_outputs(call.requests[0], begun, begun[:1]))
    assert (last.finish_reason, last.stop_reason) == ("stop", "\ufffd")
    assert parts.assembler.num_open == 0
