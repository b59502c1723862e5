"""Anthropic's SDK."""

import anthropic
from harness import CITY_SCHEMA, KEY, MODEL, QUESTION, ROOT_URL, expect, feature, run

client = anthropic.Anthropic(base_url=ROOT_URL, api_key=KEY)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"name": "note_city", "description": "Note a city", "input_schema": CITY_SCHEMA}


@feature("chat")
def chat() -> None:
    made = client.messages.create(model=MODEL, max_tokens=16, messages=MESSAGES, system="Be brief.")
    expect(made.content[0].type == "text" and made.content[0].text and made.stop_reason in ("end_turn", "max_tokens"))


@feature("stop strings")
def stop_strings() -> None:
    whole = client.messages.create(model=MODEL, max_tokens=16, messages=MESSAGES, temperature=0).content[0].text
    word = whole.split()[2]
    made = client.messages.create(model=MODEL, max_tokens=16, messages=MESSAGES, temperature=0, stop_sequences=[word])
    expect(made.stop_reason == "stop_sequence" and made.stop_sequence == word, made)


@feature("streams")
def streams() -> None:
    whole = client.messages.create(model=MODEL, max_tokens=16, messages=MESSAGES, temperature=0).content[0].text
    with client.messages.stream(model=MODEL, max_tokens=16, messages=MESSAGES, temperature=0) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect(text == whole == final.content[0].text, text)
    expect(final.usage.output_tokens > 0)


@feature("tools, required")
def tools_required() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "note_city"}):
        made = client.messages.create(
            model=MODEL,
            max_tokens=80,
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
        max_tokens=80,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    (used,) = [block for block in final.content if block.type == "tool_use"]
    expect(set(used.input) == {"city", "people"} and "input_json" in kinds, kinds)


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
    expect(counted == client.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES).usage.input_tokens)


@feature("models")
def models() -> None:
    expect(MODEL in [model.id for model in client.models.list().data])


run()
