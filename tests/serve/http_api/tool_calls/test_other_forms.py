"""Functions as they were before tools, custom tools, and choices among some tools."""

import json
import re
from typing import Any

import pytest

from apt_jax.errors import InvalidRequestError
from apt_jax.text.chat import ChatTemplate
from serve.http_api.tool_calls.definitions import read_tools
from serve.http_api.tool_calls.events import CallArguments, CallStart, ContentText, OutputEvent
from serve.http_api.tool_calls.openai_message import OpenAIMessage
from serve.http_api.tool_calls.other_forms import input_of, with_tools
from tests.support.chat_templates import CHATML
from tests.support.http_serving import HttpServed, run
from tests.support.toy_serving import toy_parts

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "d", "parameters": SCHEMA}
TIME = {"name": "time", "parameters": SCHEMA}
QUESTION = [{"role": "user", "content": "Weather?"}]
PLATE: dict[str, Any] = {"name": "plate", "description": "A plate", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[A-C]{2}|x\\.\"y"}}}  # fmt: skip


def serve(scenario) -> None:
    async def closing(served: HttpServed) -> None:
        await scenario(served)
        assert served.parts.grammars is not None
        served.parts.grammars.close()

    run(closing, parts=toy_parts(chat_template=ChatTemplate(CHATML), max_model_len=2048, num_blocks=2048))


async def asked(served: HttpServed, **fields: Any) -> Any:
    client: Any = served.openai
    return await client.chat.completions.create(
        model="toy", **{"messages": QUESTION, "temperature": 0, "max_tokens": 150, **fields}
    )


def test_functions_are_tools_and_their_call_comes_back_in_the_old_form():
    async def scenario(served: HttpServed) -> None:
        tools = [{"type": "function", "function": f} for f in (WEATHER, TIME)]
        named = {"type": "function", "function": {"name": "time"}}
        want = (await asked(served, tools=tools, tool_choice=named)).choices[0].message.tool_calls[0].function
        old = {"functions": [WEATHER, TIME], "function_call": {"name": "time"}}
        choice = (await asked(served, **old)).choices[0]
        assert choice.finish_reason == "function_call"
        assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("time", want.arguments)
        assert choice.message.tool_calls is None
        chunks = [chunk.choices[0] async for chunk in await asked(served, **old, stream=True)]
        calls = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call is not None]
        assert calls[0].name == "time"
        assert "".join(call.arguments for call in calls) == want.arguments
        assert chunks[-1].finish_reason == "function_call"
        none = (await asked(served, functions=[WEATHER], function_call="none", max_tokens=5)).choices[0]
        assert (none.message.function_call, none.finish_reason) == (None, "length")

    serve(scenario)


def test_old_calls_and_results_make_the_prompt_of_new_ones():
    async def scenario(served: HttpServed) -> None:
        arguments = '{"city": "Rome"}'
        old = [
            *QUESTION,
            {"role": "assistant", "content": None, "function_call": {"name": "time", "arguments": arguments}},
            {"role": "function", "name": "time", "content": "noon"},
        ]
        call = {"id": "f00000001", "type": "function", "function": {"name": "time", "arguments": arguments}}
        new = [
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "name": "time", "tool_call_id": "f00000001", "content": "noon"},
        ]
        tools = [{"type": "function", "function": TIME}]
        prompts = [
            (await served.post("/tokenize", {"messages": old, "functions": [TIME]})).json()["tokens"],
            (await served.post("/tokenize", {"messages": new, "tools": tools})).json()["tokens"],
        ]
        assert prompts[0] == prompts[1]
        assert (await asked(served, messages=old, functions=[TIME], max_tokens=2)).usage.completion_tokens == 2

    serve(scenario)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"functions": [TIME], "tools": [{"type": "function", "function": TIME}]}, "functions", "together with tools"),
        ({"functions": {"name": "f"}}, "functions", "an object is not a list of functions"),
        ({"functions": [{"name": "a b"}]}, "functions[0]", "must match"),
        ({"functions": [5]}, "functions", r"\[0\] must be"),
        ({"functions": [TIME], "function_call": {"name": "other"}}, "function_call", "'other' is not the name"),
        ({"functions": [TIME], "function_call": "required"}, "function_call", "must be none, auto or"),
        ({"function_call": {"name": "f"}}, "function_call", "give the functions in functions"),
        ({"messages": [{"role": "assistant", "function_call": "f"}]}, "messages[0].function_call", "must be"),
        ({"tools": [{"type": "custom"}]}, "tools[0]", "must be"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "xml"}}}]}, "tools[0].format", "text or grammar"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: a"}}}}]}, "tools[0].format", "use the syntax regex"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]}, "tools[0].format", "must have a syntax"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}], "tool_choice": {"type": "custom", "custom": {"name": "g"}}}, "tool_choice", "'g' is not"),
        ({"tools": [{"type": "function", "function": TIME}], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must have a mode"),
        ({"tools": [{"type": "function", "function": TIME}], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}}, "tool_choice", "'g' is not"),
        ({"tools": [{"type": "function", "function": TIME}], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "g"}]}}}, "tool_choice", "allowed_tools must be"),
    ],
)  # fmt: skip
def test_mistakes_are_told_by_the_name_that_the_body_has(fields, field, says):
    async def scenario(served: HttpServed) -> None:
        response = await served.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field)
        assert re.search(says, error["message"])

    serve(scenario)


def test_only_allowed_tools_are_told_of_and_called():
    async def scenario(served: HttpServed) -> None:
        tools = [{"type": "function", "function": f} for f in (WEATHER, TIME)]
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
        some = {"tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
        (choice,) = (await asked(served, **some, parallel_tool_calls=False)).choices
        assert [call.function.name for call in choice.message.tool_calls] == ["time"]
        found = (await served.post("/tokenize", {"messages": QUESTION, **some})).json()["tokens"]
        alone = (await served.post("/tokenize", {"messages": QUESTION, "tools": tools[1:]})).json()["tokens"]
        assert found == alone

    serve(scenario)


def test_the_input_of_a_custom_tool_is_text_that_its_pattern_allows():
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        fields = {
            "tools": [{"type": "custom", "custom": PLATE}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        (choice,) = (await asked(served, **fields)).choices
        (call,) = choice.message.tool_calls
        assert (call.type, call.custom.name, choice.finish_reason) == ("custom", "plate", "tool_calls")
        assert re.fullmatch(PLATE["format"]["grammar"]["definition"], call.custom.input)
        response = await served.post(
            "/v1/chat/completions",
            {"messages": QUESTION, "temperature": 0, "max_tokens": 150, "stream": True, **fields},
        )
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
        calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert (calls[0]["type"], calls[0]["custom"]["name"]) == ("custom", "plate")
        assert "".join(c["custom"]["input"] for c in calls) == call.custom.input
        again = [
            *QUESTION,
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "ok"},
        ]
        assert (await asked(served, messages=again, **{**fields, "tool_choice": "none"}, max_tokens=3)).usage.completion_tokens == 3  # fmt: skip

        flat = {"type": "custom", "name": "plate", "format": {"type": "grammar", **PLATE["format"]["grammar"]}}
        made = await client.responses.create(
            model="toy", input="Weather?", tools=[flat], tool_choice={"type": "custom", "name": "plate"}, temperature=0
        )
        (item,) = made.output
        assert (item.type, item.name) == ("custom_tool_call", "plate")
        assert re.fullmatch(PLATE["format"]["grammar"]["definition"], item.input)
        events = [
            event
            async for event in await client.responses.create(
                model="toy", input="Weather?", tools=[flat], tool_choice="required", parallel_tool_calls=False, temperature=0, stream=True,
            )
        ]  # fmt: skip
        kinds = [event.type for event in events]
        assert kinds.count("response.custom_tool_call_input.done") == 1
        assert kinds[-1] == "response.completed"
        items = [
            {"role": "user", "content": "Weather?"},
            item.model_dump(exclude_none=True),
            {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"},
        ]
        more = await client.responses.create(
            model="toy", input=items, tools=[flat], tool_choice="none", max_output_tokens=3
        )
        assert more.usage.output_tokens == 3

    serve(scenario)


class Said:
    """A parser that says what is put into it."""

    def push(self, text: Any, finished: bool) -> list[OutputEvent]:
        del finished
        return list(text)


def test_inputs_come_when_a_call_is_whole():
    message = OpenAIMessage(Said(), {"code"})
    first = [ContentText("a"), CallStart(0, "c0", "code"), CallArguments(0, '{"input": "1 +')]
    assert message.push(first, False) == {  # type: ignore[arg-type]
        "content": "a",
        "tool_calls": [{"index": 0, "id": "c0", "type": "custom", "custom": {"name": "code", "input": ""}}],
    }
    second = [CallArguments(0, ' 1"}'), CallStart(1, "c1", "f"), CallArguments(1, "{}")]
    assert message.push(second, False) == {  # type: ignore[arg-type]
        "tool_calls": [
            {"index": 0, "custom": {"input": "1 + 1"}},
            {"index": 1, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        ]
    }
    third = [CallStart(2, "c2", "code"), CallArguments(2, '{"input": "cut')]
    (call,) = message.push(third, True)["tool_calls"]  # type: ignore[arg-type]
    assert call == {"index": 2, "id": "c2", "type": "custom", "custom": {"name": "code", "input": "cut"}}
    assert [c["type"] for c in message.whole()["tool_calls"]] == ["custom", "function", "custom"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "a\\n"}', "a\n"), ('{"input": "a', "a"), ('{"x": 1}', '{"x": 1}'), ("", ""), ('{"input": "a\\', '{"input": "a\\')],
)  # fmt: skip
def test_inputs_are_read_from_arguments(arguments, text):
    assert input_of(arguments) == text


def test_bodies_without_older_forms_are_left_as_they_are():
    body = {"messages": QUESTION, "tools": [], "functions": [], "function_call": "auto"}
    assert with_tools(body) is body
    for messages in (None, 5, [5], [{"role": "user", "tool_calls": 5}], [{"role": 5, "tool_calls": [5]}]):
        assert with_tools({"messages": messages})["messages"] is messages


def test_a_custom_tool_and_a_function_of_one_name_are_refused():
    with pytest.raises(InvalidRequestError, match="two functions have the same name"):
        read_tools([{"type": "custom", "custom": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}])
