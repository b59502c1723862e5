"""Filling in between two texts: `suffix` of completions."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from apt_jax.text.tokenizer import Tokenizer
from tests.support.http_serving import HttpServed, run
from tests.support.toy_serving import EOS, SPECIALS, VOCAB_SIZE, toy_parts

FORM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def code_tokenizer() -> Tokenizer:
    """One token a byte, of which some that no text has are those of `FORM`; `</s>` is prepended."""
    unused = set("öøùúûüýþÿõ")  # the bytes from 0xF5 on
    alphabet = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c not in unused]
    names = [*SPECIALS, *FORM]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet, *FORM])}
    assert len(vocab) <= VOCAB_SIZE
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(names)
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", EOS)])
    return Tokenizer(backend)


def prompt_of(served: HttpServed, choice: dict) -> str:
    assert served.parts.tokenizer is not None
    return served.parts.tokenizer.decode(choice["prompt_token_ids"], skip_special_tokens=False)


def test_a_suffix_makes_the_prompt_of_the_models_form():
    async def scenario(served: HttpServed) -> None:
        body = {"prompt": "def f(", "suffix": "):\n<|fim_middle|>", "max_tokens": 5, "return_token_ids": True}
        (choice,) = (await served.post("/v1/completions", body)).json()["choices"]
        tokenizer = served.parts.tokenizer
        assert tokenizer is not None
        want = "</s><|fim_prefix|>def f(<|fim_suffix|>):\n<|fim_middle|><|fim_middle|>"
        assert prompt_of(served, choice) == want
        assert choice["prompt_token_ids"].count(tokenizer.backend.token_to_id("<|fim_middle|>")) == 1
        several = {**body, "prompt": ["a", ""], "n": 2}
        choices = (await served.post("/v1/completions", several)).json()["choices"]
        assert [prompt_of(served, c)[: -len("<|fim_suffix|>):\n<|fim_middle|><|fim_middle|>")] for c in choices] == [
            *["</s><|fim_prefix|>a"] * 2,
            *["</s><|fim_prefix|>"] * 2,
        ]
        plain = (await served.post("/v1/completions", {**body, "suffix": ""})).json()["choices"]
        assert prompt_of(served, plain[0]) == "</s>def f("
        streamed = await served.post("/v1/completions", {**body, "stream": True, "temperature": 0})
        assert streamed.text.endswith("data: [DONE]\n\n")

    run(scenario, parts=toy_parts(tokenizer=code_tokenizer()))


def test_tokens_of_the_form_end_what_is_filled_in():
    async def scenario(served: HttpServed) -> None:
        tokenizer = served.parts.tokenizer
        assert tokenizer is not None
        another = tokenizer.backend.token_to_id("<|file_sep|>")
        body = {"prompt": "a", "suffix": "b", "max_tokens": 5, "allowed_token_ids": [another], "return_token_ids": True}
        (choice,) = (await served.post("/v1/completions", body)).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", another, "")
        (choice,) = (await served.post("/v1/completions", {**body, "ignore_eos": True})).json()["choices"]
        assert choice["token_ids"] == [another] * 5

    run(scenario, parts=toy_parts(tokenizer=code_tokenizer()))


def test_what_does_not_go_with_a_suffix_is_told_in_one_line():
    async def scenario(served: HttpServed) -> None:
        for fields, param, says in (
            ({"echo": True}, "echo", "cannot be given together with suffix"),
            ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "cannot be given together with suffix"),
            ({"prompt": [1, 2]}, "prompt", "must be a text, or a list of texts"),
            ({"prompt": []}, "prompt", "must be a text, or a list of texts"),
            ({"suffix": 5}, "suffix", "int is not text"),
            ({"suffix": "x" * 9000}, "suffix", "shorten it"),
            ({"prompt": "x" * 150, "suffix": "x" * 150}, "prompt", ""),
        ):
            response = await served.post("/v1/completions", {"prompt": "a", "suffix": "b", **fields})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
            assert says in error["message"]

    run(scenario, parts=toy_parts(tokenizer=code_tokenizer()))


def test_a_model_without_the_tokens_refuses_a_suffix():
    async def scenario(served: HttpServed) -> None:
        response = await served.post("/v1/completions", {"prompt": "a", "suffix": "b"})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "suffix")
        assert "has no tokens to fill in between two texts" in error["message"]

    run(scenario)
