"""Filling in between two texts: `suffix` of completions."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from apt_jax.text.tokenizer import Tokenizer
from serve.http_api import llama_infill
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
            ({"prompt": [1, 2]}, "prompt", "must be a text or a list of texts"),
            ({"prompt": []}, "prompt", "must be a text or a list of texts"),
            ({"suffix": 5}, "suffix", "a number is not text"),
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
        assert "has no fill-in-the-middle tokens" in error["message"]

    run(scenario)


def test_llama_cpps_infill_answers_in_its_form():
    async def scenario(served: HttpServed) -> None:
        tokenizer = served.parts.tokenizer
        assert tokenizer is not None
        body = {
            "input_prefix": "def f(",
            "input_suffix": "):\n",
            "prompt": "a",
            "n_predict": 5,
            "temperature": 0,
            "ignore_eos": True,
        }
        plain = await served.post(
            "/v1/completions",
            {"prompt": "def f(a", "suffix": "):\n", "max_tokens": 5, "temperature": 0, "ignore_eos": True},
        )
        answer = (await served.post("/infill", body)).json()
        assert answer["content"] == plain.json()["choices"][0]["text"]
        prompt_len = 4 + len("def f(a):\n")  # </s> and the three tokens of the form
        assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 5)
        assert (answer["tokens_evaluated"], answer["tokens_cached"]) == (prompt_len, prompt_len + 5)
        timings = answer["timings"]
        assert timings["cache_n"] + timings["prompt_n"] == prompt_len
        assert timings["predicted_n"] == 5
        # As its plugins do.
        asked = {**body, "samplers": ["top_k", "infill"], "cache_prompt": True, "t_max_predict_ms": 1000, "n_indent": 4}
        few = await served.post("/infill", {**asked, "response_fields": ["content", "timings/prompt_n", "none/x", ""]})
        assert few.json() == {"content": answer["content"], "timings/prompt_n": few.json()["timings/prompt_n"]}
        cached = (await served.post("/infill", {**body, "n_predict": 0})).json()
        assert (cached["content"], cached["tokens_predicted"]) == ("", 0)
        streamed = (await served.post("/infill", {**body, "stream": True})).text
        events = [json.loads(event.removeprefix("data: ")) for event in streamed.strip().split("\n\n")]
        assert "".join(event["content"] for event in events) == answer["content"]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1].keys() == answer.keys()

    run(scenario, parts=toy_parts(tokenizer=code_tokenizer()))


def test_llama_cpps_infill_puts_files_first_and_ends_as_it_is_told():
    async def scenario(served: HttpServed) -> None:
        tokenizer = served.parts.tokenizer
        assert tokenizer is not None
        files = [{"filename": "a.py", "text": "A<|file_sep|>"}, {"text": "B"}]
        body = {"input_prefix": "x", "input_suffix": "y", "input_extra": files, "prompt": "z"}
        (request,) = llama_infill.read_call(served.parts, body, {}, 0.0).requests
        assert tokenizer.decode(request.prompt_token_ids.tolist(), skip_special_tokens=False) == (
            "</s><|repo_name|>project\n<|file_sep|>a.py\nA<|file_sep|><|file_sep|>tmp\nB<|file_sep|>file\n"
            "<|fim_prefix|>xz<|fim_suffix|>y<|fim_middle|>"
        )
        params = request.params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
        assert params.max_tokens == served.parts.limits.max_model_len - request.prompt_token_ids.size
        short = {**body, "n_predict": 200, "temperature": 0, "ignore_eos": True}
        text = (await served.post("/infill", {**short, "n_predict": 20})).json()["content"]
        word = text[4:6]
        stopped = (await served.post("/infill", {**short, "stop": [word], "n_predict": 20})).json()
        assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == (
            text[: text.index(word)],
            "word",
            word,
        )
        assert tokenizer.backend.token_to_id("<|fim_pad|>") in params.stop_token_ids

    run(scenario, parts=toy_parts(tokenizer=code_tokenizer()))


def test_wrong_bodies_of_infill_are_told_by_llama_cpps_names():
    base = {"input_prefix": "x", "input_suffix": "y", "n_predict": 2}

    async def scenario(served: HttpServed) -> None:
        for fields, param in (
            ({"input_prefix": None}, "input_prefix"),
            ({"input_suffix": 5}, "input_suffix"),
            ({"input_prefix": "x" * 9000}, "input_prefix"),
            ({"input_prefix": "x" * 500}, "input_prefix"),
            ({"prompt": [1]}, "prompt"),
            ({"input_extra": {}}, "input_extra"),
            ({"input_extra": ["a"]}, "input_extra[0]"),
            ({"input_extra": [{"text": "a"}, {"filename": "b"}]}, "input_extra[1].text"),
            ({"input_extra": [{"text": "a", "filename": 1}]}, "input_extra[0].filename"),
            ({"input_extra": [{"text": ""}] * 300}, "input_extra"),
            ({"n_predict": 1.5}, "n_predict"),
            ({"n_predict": 100_000}, "n_predict"),
            ({"repeat_penalty": -1}, "repeat_penalty"),
            ({"mirostat": 2}, "mirostat"),
            ({"response_fields": "content"}, "response_fields"),
            ({"stream": "yes"}, "stream"),
        ):
            refused = await served.post("/infill", {**base, **fields})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, param), (fields, error)
            assert "\n" not in error["message"]

    run(scenario, parts=toy_parts(tokenizer=code_tokenizer()))


def test_infill_needs_a_model_that_has_tokens_for_it():
    async def scenario(served: HttpServed) -> None:
        refused = await served.post("/infill", {"input_prefix": "x", "input_suffix": "y"})
        assert refused.status_code == 400
        assert "has no fill-in-the-middle tokens" in refused.json()["error"]["message"]

    run(scenario)
