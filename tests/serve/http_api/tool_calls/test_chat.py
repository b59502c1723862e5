"""Tools and reasoning over ``/v1/chat/completions``: a server without a model, whose outputs follow the constraints."""

import dataclasses
import json
import random
from typing import Any

import jsonschema
import pytest

from apt_jax.errors import InvalidRequestError
from apt_jax.text.chat import ChatTemplate
from serve.http_api.openai_request import read_call
from serve.http_api.tool_calls.openai_message import OpenAIMessage
from tests.support.cases import num_cases
from tests.support.chat_templates import CHATML, QWEN
from tests.support.http_serving import run
from tests.support.random_schemas import random_schema
from tests.support.tool_calls import MESSAGES, ask, ask_streamed, seen, tool
from tests.support.toy_serving import toy_parts

pytest.importorskip("llguidance")

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 400}


NAMED = {"type": "function", "function": {"name": "get_weather"}}
OUTPUT = 'Look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def parts(template: str = QWEN, **config: Any):
    made = toy_parts(chat_template=ChatTemplate(template), max_model_len=4000, num_blocks=4096, debug=False)
    return dataclasses.replace(made, config=dataclasses.replace(made.config, **config))


def literally(text: str) -> dict[str, Any]:
    """A constraint that leaves no choice, so that the output is this text; it is read as if it were none."""
    return {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}}


async def check_required(served, tools, choice, **more: Any) -> None:
    """Two choices, whole and streamed: every call validates, and nothing else is said."""
    fields = {"tools": tools, "tool_choice": choice, "n": 2, "temperature": 1.0, "seed": 3, "logprobs": True, **more}
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
    answer = await ask(served, **fields)
    for one in answer["choices"]:
        assert one["message"]["content"] is None
        assert one["finish_reason"] == "tool_calls"
        calls = seen(one)["calls"]
        assert 1 <= len(calls) <= (1 if "parallel_tool_calls" in more else 16)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[name])
            assert choice == "required" or name == choice["function"]["name"]
        raw = b"".join(bytes(entry["bytes"]) for entry in one["logprobs"]["content"])
        assert b'"name": "' in raw
    assert await ask_streamed(served, **fields) == [seen(one) for one in answer["choices"]]


@pytest.mark.parametrize("template", [QWEN, CHATML], ids=["with place for tools", "without"])
def test_required_calls(template):
    async def scenario(served):
        tools = [tool(), tool("get_time", {"type": "object", "properties": {"zone": {"enum": [1, 2]}}})]
        await check_required(served, tools[:1], "required", max_tokens=1700, n=1)
        await check_required(served, tools, NAMED, parallel_tool_calls=None)
        await check_required(served, tools, "required", parallel_tool_calls=False)
        # Instructor sends the schema as the format of text too.
        form = {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object", "required": ["other"]}},
        }
        await check_required(served, tools[:1], "required", parallel_tool_calls=False, response_format=form)

    run(scenario, parts=parts(template))


def test_a_call_in_text_by_the_official_client():
    async def scenario(served):
        stream = {"tools": [tool()], "extra_body": literally(OUTPUT), **GREEDY}
        answer = await served.openai.chat.completions.create(model="toy", messages=MESSAGES, **stream)
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("Look.", "tool_calls")
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
        fields = {"tools": [tool()], **literally(OUTPUT)}
        assert await ask_streamed(served, **fields) == [seen((await ask(served, **fields))["choices"][0])]
        # The history with the call and its result is the template's to render.
        again = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
        answer = await served.openai.chat.completions.create(model="toy", messages=again, **stream)
        prompt = served.parts.tokenizer.decode(
            served.parts.chat_prompt([m if isinstance(m, dict) else m.model_dump() for m in again], tools=[tool()])
        )
        assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
        assert "<tool_response>\nSunny.\n</tool_response>" in prompt
        assert answer.usage.prompt_tokens > 0

    run(scenario, parts=parts())


def test_what_is_no_call_stays_content():
    async def scenario(served):
        for text in ('<tool_call>{"name": 3}</tool_call>', "<tool_call>", '{"name": "get_weather", "arguments": {}}'):
            fields = {"tools": [tool()], **literally(text)}
            (choice,) = (await ask(served, **fields))["choices"]
            assert seen(choice) == {"content": text, "reasoning_content": "", "calls": [], "finish_reason": "stop"}
            assert await ask_streamed(served, **fields) == [seen(choice)]
        for fields in ({"tools": [tool()], "tool_choice": "none"}, {}):
            (choice,) = (await ask(served, **fields, **literally(OUTPUT)))["choices"]
            assert choice["message"]["content"] == OUTPUT
        (choice,) = (await ask(served, tools=[tool()], stop=["Paris"], **literally(OUTPUT)))["choices"]
        assert choice["message"]["content"] == OUTPUT.partition("Paris")[0]
        assert choice["stop_reason"] == "Paris"

    run(scenario, parts=parts())


def test_no_parser_leaves_text_as_it_is():
    async def scenario(served):
        (choice,) = (await ask(served, tools=[tool()], **literally(OUTPUT)))["choices"]
        assert choice["message"]["content"] == OUTPUT
        (choice,) = (await ask(served, tools=[tool()], tool_choice="required"))["choices"]
        assert choice["message"]["tool_calls"]

    run(scenario, parts=parts(tool_call_parser="none"))


def test_strict_functions_are_constrained_where_the_model_calls():
    """The toy model writes at random: that it begins no call by itself is the other half of the test."""

    async def scenario(served):
        fields = {"tools": [tool(strict=True)], "max_tokens": 40, "temperature": 1.0, "seed": 1}
        answer = await ask(served, **fields)
        assert await ask_streamed(served, **fields) == [seen(one) for one in answer["choices"]]
        schema = {
            "type": "object",
            "properties": {"x": {"enum": [1]}},
            "required": ["x"],
            "additionalProperties": False,
        }
        answer = await ask(
            served,
            tools=[tool()],
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        )
        one = seen(answer["choices"][0])
        if one["calls"]:
            assert [name for name, _ in one["calls"]] == ["get_weather"] * len(one["calls"])
        else:
            assert json.loads(one["content"]) == {"x": 1}

    run(scenario, parts=parts())


REASONING = QWEN + "{# <think> </think> #}"
CHANNELS = QWEN + "{# <|channel|>analysis<|message|> #}"
IN_CHANNELS = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
)


@pytest.mark.parametrize(
    ("template", "reasoning_parser", "text", "want"),
    [
        (REASONING, "auto", f"<think>\nHm.\n</think>\n\n{OUTPUT}", ("Look.", "Hm.", 1)),
        (REASONING, "auto", OUTPUT, ("Look.", "", 1)),
        (REASONING + "<think>\n", "auto", f"Hm.</think>{OUTPUT}", ("Look.", "Hm.", 1)),
        (REASONING + "<think>\n\n</think>\n\n", "auto", "<think>a</think>", ("<think>a</think>", "", 0)),
        (REASONING, "none", "<think>a</think>", ("<think>a</think>", "", 0)),
        (QWEN, "deepseek_r1", f"Hm.</think>{OUTPUT}", ("Look.", "Hm.", 1)),
        (CHANNELS, "auto", IN_CHANNELS, ("Look.", "Hm.", 1)),
        (QWEN, "harmony", IN_CHANNELS, ("Look.", "Hm.", 1)),
        (CHANNELS, "none", "<|channel|>final<|message|>a", ("<|channel|>final<|message|>a", "", 0)),
    ],
)
def test_reasoning_is_a_field_of_its_own(template, reasoning_parser, text, want):
    made = parts(template, reasoning_parser=reasoning_parser)
    call = read_call(made, "chat", {"messages": MESSAGES, "tools": [tool()]}, {}, 0.0)
    message = OpenAIMessage(call.output.parser())
    message.push(text, True)
    whole = message.whole()
    assert (whole["content"], whole.get("reasoning_content", ""), len(whole.get("tool_calls", []))) == want
    assert made.chat_template is not None
    made.chat_template.close()


def test_a_message_that_is_continued_has_no_reasoning_any_more():
    made = parts(QWEN, reasoning_parser="deepseek_r1")
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    call = read_call(made, "chat", body, {}, 0.0)
    message = OpenAIMessage(call.output.parser())
    message.push(" sunny.", True)
    assert (message.whole()["content"], message.whole().get("reasoning_content")) == (" sunny.", None)
    assert made.chat_template is not None
    made.chat_template.close()


def test_effort_is_a_variable_of_the_template():
    made = parts("{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert made.tokenizer is not None
    for fields, seen_effort in (
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ({"reasoning_effort": None}, ""),
        ({"reasoning_effort": 5}, ""),
    ):
        (request,) = read_call(made, "chat", {"messages": MESSAGES, **fields}, {}, 0.0).requests
        text = made.tokenizer.decode(request.prompt_token_ids.tolist())
        assert text == f"{seen_effort}{MESSAGES[0]['content']}"
    assert made.chat_template is not None
    made.chat_template.close()


def test_channels_are_constrained_and_continued():
    made = parts(CHANNELS)
    calls, choice = {"tools": [tool()], "tool_choice": "required"}, {"structured_outputs": {"choice": ["yes"]}}
    for fields, rule in (
        (calls, "output: call\n"),
        (choice, "output: final\n"),
        ({"tools": [tool()], **choice}, "output: call | final\n"),
    ):
        read = read_call(made, "chat", {"messages": MESSAGES, **fields}, {}, 0.0)
        (request,) = read.requests
        assert request.params.structured_outputs is not None
        assert rule in str(request.params.structured_outputs.grammar)
        assert request.params.skip_special_tokens is False
        assert read.output.constrains_calls == ("tools" in fields)
    (request,) = read_call(made, "chat", {"messages": MESSAGES, "tools": [tool()]}, {}, 0.0).requests
    assert request.params.structured_outputs is None
    with pytest.raises(InvalidRequestError, match="reasoning"):
        read_call(made, "chat", {"messages": MESSAGES, **literally("x")}, {}, 0.0)
    begun = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False, **choice}
    read = read_call(made, "chat", body, {}, 0.0)
    asked = read.requests[0].params.structured_outputs
    assert asked is not None
    assert asked.choice == ("yes",)
    message = OpenAIMessage(read.output.parser())
    message.push(" sunny.", True)
    assert message.whole()["content"] == " sunny."
    assert made.chat_template is not None
    made.chat_template.close()


def test_reasoning_before_calls_is_told_to_templates_that_name_it():
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    said = [*MESSAGES, {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}]
    for name, want in (("thinking", "[][Hm.]"), ("other", "[][]")):
        made = parts(f"{{% for m in messages %}}[{{{{ m.{name} }}}}]{{% endfor %}}")
        assert made.tokenizer is not None
        assert made.tokenizer.decode(made.chat_prompt(said)) == want
        assert made.chat_template is not None
        made.chat_template.close()


def test_constraints_follow_reasoning_or_are_refused():
    made = parts(REASONING)
    thought = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    body: dict[str, Any] = {"messages": [*MESSAGES, thought, *MESSAGES]}
    for fields in ({"tools": [tool()], "tool_choice": "required"}, {"structured_outputs": {"choice": ["yes"]}}):
        (request,) = read_call(made, "chat", {**body, **fields}, {}, 0.0).requests
        assert request.params.structured_outputs is not None
        assert str(request.params.structured_outputs.grammar).startswith("start: (SPACE")
    with pytest.raises(InvalidRequestError, match="reasoning"):
        read_call(made, "chat", {**body, **literally("x")}, {}, 0.0)
    assert made.chat_template is not None
    made.chat_template.close()


WRONG: list[tuple[dict[str, Any], str]] = [
        ({"tools": [tool("no spaces")]}, "tools[0]"),
        ({"tools": [tool("x" * 65)]}, "tools[0]"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool()] * 129}, "tools"),
        ({"tools": [tool(parameters=[1])]}, "tools[0]"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0]"),
        ({"tools": [tool(strict="yes")]}, "tools[0].strict"),
        ({"tools": [tool(parameters={"type": "object", "properties": {"a": {"type": "thing"}}})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool(parameters={"description": "x" * 70_000})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "required", "regex": "a"}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [tool()["function"]], "tools": [tool()]}, "functions"),
    ]  # fmt: skip


def test_what_is_wrong_is_told_in_one_line():
    async def scenario(served):
        for fields, field in WRONG:
            response = await served.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
            assert response.status_code == 400, fields
            error = response.json()["error"]
            assert error["param"] == field
            assert "\n" not in error["message"]

    run(scenario, parts=parts())


@pytest.mark.seeds
def test_random_schemas():
    """Every required call parses and validates, streamed as not."""

    async def scenario(served):
        served.http.timeout = 300
        for seed in range(num_cases(2, 100)):
            random_ = random.Random(seed)
            tools = [tool(f"f{i}", random_schema(random_), strict=True) for i in range(random_.randint(1, 3))]
            schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
            fields = {
                "tools": tools, "tool_choice": "required", "temperature": 1.0, "seed": seed, "max_tokens": 1500,
                "parallel_tool_calls": random_.random() < 0.5,
            }  # fmt: skip
            one = seen((await ask(served, **fields))["choices"][0])
            assert one["finish_reason"] == "tool_calls", one
            for name, arguments in one["calls"]:
                jsonschema.validate(json.loads(arguments), schemas[name])
            assert await ask_streamed(served, **fields) == [one]

    run(
        scenario,
        limit_s=900,
        parts=toy_parts(chat_template=ChatTemplate(QWEN), max_model_len=8000, num_blocks=8192, debug=False),
    )
