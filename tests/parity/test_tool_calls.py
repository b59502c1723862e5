"""Required calls of SmolLM2-135M-Instruct over HTTP, with its own template and one that has a place for tools: every
call parses and validates, streamed as not."""

import asyncio
import dataclasses
import json
import random
from typing import Any

import jsonschema
import pytest

from apt_jax import LLM
from apt_jax.text.chat import ChatTemplate
from tests.support.cases import num_cases
from tests.support.chat_templates import QWEN
from tests.support.http_serving import run
from tests.support.random_schemas import random_schema
from tests.support.smollm2 import smollm2_file
from tests.support.tool_calls import ask, ask_streamed, seen, tool

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def llm() -> LLM:
    smollm2_file()
    return LLM(
        "smollm2-135m", dtype="float32", max_num_seqs=8, max_model_len=2048, num_blocks_override=512, warm_up=False, use_tqdm=False,
    )  # fmt: skip


@pytest.mark.seeds
@pytest.mark.in_turn(2, group="SmolLM2-135M")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("template", ["own", "qwen"])
def test_every_required_call_parses_and_validates(llm, template):
    parts = llm.parts
    if template == "qwen":
        assert parts.chat_template is not None
        special = parts.chat_template.special_tokens
        parts = dataclasses.replace(parts, chat_template=ChatTemplate(QWEN, special_tokens=special))

    async def scenario(served: Any) -> None:
        served.http.timeout = 1200
        at_once = asyncio.Semaphore(4)

        async def check(seed: int) -> int:
            random_ = random.Random(seed)
            tools = [tool(f"f{i}", random_schema(random_)) for i in range(random_.randint(1, 3))]
            schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
            fields = {
                "tools": tools,
                "tool_choice": random_.choice(["required", {"type": "function", "function": {"name": "f0"}}]),
                "parallel_tool_calls": random_.random() < 0.3,
                "temperature": random_.choice([0.0, 1.0]),
                "seed": seed,
                "max_tokens": 1200,
            }
            async with at_once:
                answer, streamed = await asyncio.gather(ask(served, **fields), ask_streamed(served, **fields))
            one = seen(answer["choices"][0])
            assert one["finish_reason"] == "tool_calls", (seed, one)
            assert one["content"] == ""
            for name, arguments in one["calls"]:
                jsonschema.validate(json.loads(arguments), schemas[name])
            assert streamed == [one], seed
            return len(one["calls"])

        seeds = range(num_cases(2, 100))
        await check(0)  # programs are compiled when they are first needed
        counts = await asyncio.gather(*map(check, seeds))
        print(f"{sum(counts)} calls of {len(counts)} schemas")

    run(scenario, limit_s=7000, parts=parts)
