"""Inspect: an evaluation with and without tools."""

import os
import tempfile

from harness import BASE_URL, KEY, MODEL, expect, feature, run
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import generate, multiple_choice, use_tools
from inspect_ai.tool import tool

os.environ["INSPECT_DISPLAY"] = "none"


@tool
def add():
    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        return x + y

    return execute


def check(task: Task, provider: str = "vllm") -> None:
    name = f"{provider}/{MODEL}" if provider == "vllm" else f"openai-api/local/{MODEL}"
    model = get_model(name, base_url=BASE_URL, api_key=KEY, config=GenerateConfig(max_tokens=32, temperature=0))
    with tempfile.TemporaryDirectory() as logs:
        (log,) = eval(task, model=model, log_dir=logs, display="none", message_limit=4)
    expect(log.status == "success", log.error)


SAMPLE = [Sample(input="What is 1 + 1?", target="2")]


@feature("chat")
def chat() -> None:
    for provider in ("vllm", "openai-api"):
        check(Task(dataset=SAMPLE, solver=generate(), scorer=includes()), provider)


@feature("multiple choice")
def multiple() -> None:
    sample = Sample(input="The capital of France?", choices=["Rome", "Paris"], target="B")
    check(Task(dataset=[sample], solver=multiple_choice(), scorer=choice()))


@feature("tools, auto")
def tools_auto() -> None:
    for provider in ("vllm", "openai-api"):
        check(Task(dataset=SAMPLE, solver=[use_tools(add()), generate()], scorer=includes()), provider)


@feature("tools, required")
def tools_required() -> None:
    for provider in ("vllm", "openai-api"):
        check(
            Task(
                dataset=SAMPLE,
                solver=[use_tools(add(), tool_choice="any"), generate(tool_calls="single")],
                scorer=includes(),
            ),
            provider,
        )


run()
