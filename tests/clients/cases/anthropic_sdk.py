"""Anthropic's SDK."""

import json

import anthropic
from harness import CITY_SCHEMA, KEY, MODEL, QUESTION, ROOT_URL, expect, feature, run

client = anthropic.Anthropic(base_url=ROOT_URL, api_key=KEY)
GREEDY = {"temperature": 0}  # the SDK has no argument for it any more
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"name": "note_city", "description": "Note a city", "input_schema": CITY_SCHEMA}


@feature("chat")
def chat() -> None:
    made = client.messages.create(model=MODEL, max_tokens=16, messages=MESSAGES, system="Be brief.")
    expect(made.content[0].type == "text" and made.content[0].text and made.stop_reason in ("end_turn", "max_tokens"))


@feature("stop strings")
def stop_strings() -> None:
    whole = client.messages.create(model=MODEL, max_tokens=16, messages=MESSAGES, extra_body=GREEDY).content[0].text
    word = whole.split()[2]
    made = client.messages.create(
        model=MODEL, max_tokens=16, messages=MESSAGES, extra_body=GREEDY, stop_sequences=[word]
    )
    expect(made.stop_reason == "stop_sequence" and made.stop_sequence == word, made)


@feature("streams")
def streams() -> None:
    whole = client.messages.create(model=MODEL, max_tokens=16, messages=MESSAGES, extra_body=GREEDY).content[0].text
    with client.messages.stream(model=MODEL, max_tokens=16, messages=MESSAGES, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect(text == whole == final.content[0].text, text)
    expect(final.usage.output_tokens > 0)


@feature("tools, required")
def tools_required() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "note_city"}):
        made = client.messages.create(
            model=MODEL,
            max_tokens=200,
            messages=MESSAGES,
            tools=[TOOL],
            tool_choice={**choice, "disable_parallel_tool_use": True},
        )
        (used,) = [block for block in made.content if block.type == "tool_use"]
        expect(made.stop_reason == "tool_use" and set(used.input) == {"city", "people"}, made)


@feature("tools, streamed")
def tools_streamed() -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    (used,) = [block for block in final.content if block.type == "tool_use"]
    expect(set(used.input) == {"city", "people"} and "input_json" in kinds, kinds)
    named = {"type": "tool", "name": "note_city"}
    fields = {"model": MODEL, "max_tokens": 80, "messages": MESSAGES, "tools": [TOOL], "tool_choice": named}
    whole = client.messages.create(**fields, extra_body=GREEDY)
    with client.messages.stream(**fields, extra_body=GREEDY) as stream:
        expect(stream.get_final_message().content[-1].input == whole.content[-1].input, whole)


@feature("tools, auto")
def tools_auto() -> None:
    expect(client.messages.create(model=MODEL, max_tokens=30, messages=MESSAGES, tools=[TOOL]).content)


@feature("tools, history")
def tools_history() -> None:
    history = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "toolu_1", "name": "note_city", "input": {"city": "Paris", "people": 2}}
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "noted"}]},
    ]
    made = client.messages.create(
        model=MODEL, max_tokens=8, messages=history, tools=[TOOL], tool_choice={"type": "none"}
    )
    expect(made.content)


@feature("count tokens")
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES).usage
    expect(counted == usage.input_tokens + (usage.cache_read_input_tokens or 0), usage)


@feature("JSON schema")
def json_schema() -> None:
    form = {"format": {"type": "json_schema", "schema": CITY_SCHEMA}}
    made = client.messages.create(model=MODEL, max_tokens=200, messages=MESSAGES, output_config=form)
    expect(set(json.loads(made.content[0].text)) == {"city", "people"}, made)


@feature("streams, async")
async def streams_async() -> None:
    client = anthropic.AsyncAnthropic(base_url=ROOT_URL, api_key=KEY)
    async with client, client.messages.stream(model=MODEL, max_tokens=8, messages=MESSAGES) as stream:
        expect("".join([text async for text in stream.text_stream]))


@feature("refused by name")
def refused() -> None:
    for fields, kind, name in (
        ({"extra_body": {"temperature": 1.5}}, anthropic.BadRequestError, "temperature"),
        ({"model": "another"}, anthropic.NotFoundError, "another"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError, "tools"),
    ):
        try:
            client.messages.create(**{"model": MODEL, "max_tokens": 8, "messages": MESSAGES, **fields})
        except kind as error:
            expect(error.body["type"] == "error" and name in error.body["error"]["message"], error)
        else:
            raise AssertionError(f"accepted: {fields}")


@feature("models")
def models() -> None:
    expect(MODEL in [model.id for model in client.models.list().data])


run()
