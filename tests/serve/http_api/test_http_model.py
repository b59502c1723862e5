"""The HTTP server over a real model: the tokens of `LLM.generate`, by the official client."""

import asyncio
import json
from typing import Any

import pytest

from apt_jax import LLM, SamplingParams
from tests.support.caches import calibrations_apart
from tests.support.http_serving import http_serving
from tests.support.small_models import write_shallow_model

FEW_PROGRAMS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "num_blocks_override": 64,
    "warm_up": False,
    "use_tqdm": False,
}
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
LINES = ["Once upon a time", "The king said: «où?» — 你好 🙂", "a"]
PARAMS = [
    {"temperature": 0.0, "max_tokens": 8},
    {"temperature": 0.8, "seed": 7, "max_tokens": 8, "top_p": 0.9},
    {"temperature": 0.8, "seed": 7, "max_tokens": 8, "frequency_penalty": 0.5, "logit_bias": {"5": 3.0}},
]  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A real model with few shapes to compile, and a chat template."""
    model = write_shallow_model(tmp_path_factory.mktemp("model"))
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APT_JAX_CACHE_DIR", calibrations_apart(tmp_path_factory.mktemp("cache")))
        patch.setattr("apt_jax.frontend.builder.use_compile_cache", lambda: False)
        llm = LLM(str(model), served_model_name="shallow", chat_template=str(template), **FEW_PROGRAMS)
    yield llm
    assert llm.parts.chat_template is not None
    llm.parts.chat_template.close()


def test_tokens_equal_those_of_LLM_generate(real):
    def sampling(params) -> SamplingParams:
        bias = {int(k): v for k, v in params.get("logit_bias", {}).items()}
        return SamplingParams(**{**params, "logit_bias": bias or None})

    want = {}
    for number, params in enumerate(PARAMS):
        for line, output in zip(LINES, real.generate(LINES, sampling(params), use_tqdm=False), strict=True):
            want[number, line] = output.outputs[0]
    messages: Any = [{"role": "user", "content": "Who is the king?"}]
    (chat,) = real.chat(messages, sampling(PARAMS[0]), use_tqdm=False)

    async def scenario() -> None:
        async with http_serving(real.parts) as served:
            client: Any = served.openai
            for number, params in enumerate(PARAMS):
                for line in LINES:
                    answer = await client.completions.create(
                        model="shallow", prompt=line, extra_body={"return_token_ids": True}, **params
                    )  # fmt: skip
                    (choice,) = answer.choices
                    assert choice.token_ids == want[number, line].token_ids
                    assert choice.text == want[number, line].text
                    assert choice.finish_reason == want[number, line].finish_reason
                    stream = await client.completions.create(model="shallow", prompt=line, stream=True, **params)
                    text = "".join([chunk.choices[0].text async for chunk in stream])
                    assert text == want[number, line].text
            answer = await client.chat.completions.create(
                model="shallow", messages=messages, logprobs=True, top_logprobs=2, **PARAMS[0]
            )
            (choice,) = answer.choices
            assert choice.message.content == chat.outputs[0].text
            assert len(choice.logprobs.content) == len(chat.outputs[0].token_ids)
            told = await served.post("/tokenize", {"messages": messages})
            assert told.json()["tokens"] == chat.prompt_token_ids

    asyncio.run(asyncio.wait_for(scenario(), 200))


def test_answers_of_a_schema(real):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["king", "queen"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }  # fmt: skip

    async def scenario() -> None:
        async with http_serving(real.parts) as served:
            constraint: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
            answer = await served.openai.chat.completions.create(
                model="shallow", messages=[{"role": "user", "content": "Who?"}], response_format=constraint, max_tokens=60,
            )  # fmt: skip
            (choice,) = answer.choices
            assert choice.finish_reason == "stop"
            value = json.loads(choice.message.content or "")
            assert value["name"] in ("king", "queen")
            assert 0 <= value["age"] <= 9
            real.parts.grammars.close()

    asyncio.run(asyncio.wait_for(scenario(), 200))
