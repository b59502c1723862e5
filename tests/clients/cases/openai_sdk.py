"""OpenAI's own SDK: one script for its major versions."""

from harness import BASE_URL, CITY_SCHEMA, KEY, MODEL, QUESTION, expect, feature, run
from openai import AsyncOpenAI, OpenAI
from openai_responses import City  # with it come the features of /v1/responses

client = OpenAI(base_url=BASE_URL, api_key=KEY)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "note_city", "description": "Note a city", "parameters": CITY_SCHEMA}}


@feature("models")
def models() -> None:
    expect(MODEL in [model.id for model in client.models.list().data])
    expect(client.models.retrieve(MODEL).id == MODEL)


@feature("completions")
def completions() -> None:
    made = client.completions.create(model=MODEL, prompt=["One two", "Three four"], max_tokens=4, n=2, stop=["."] * 5)
    expect(len(made.choices) == 4)
    many = client.completions.create(model=MODEL, prompt=[f"{i} and" for i in range(32)], max_tokens=1)
    expect(len(many.choices) == 32)


@feature("prompt logprobs")
def prompt_logprobs() -> None:
    made = client.completions.create(model=MODEL, prompt="One two three", echo=True, logprobs=1, max_tokens=0)
    logprobs = made.choices[0].logprobs
    expect(logprobs.token_logprobs[0] is None and len(logprobs.tokens) == made.usage.prompt_tokens)
    expect(all(value <= 0 for value in logprobs.token_logprobs[1:]))


@feature("chat")
def chat() -> None:
    made = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=1e-8, seed=-1)
    expect(made.choices[0].message.content)


@feature("streams")
def streams() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    expect(text == whole.choices[0].message.content, text)
    expect(chunks[-1].usage.total_tokens == whole.usage.total_tokens)


@feature("streams, async")
async def streams_async() -> None:
    async with AsyncOpenAI(base_url=BASE_URL, api_key=KEY) as other:
        stream = await other.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, stream=True)
        expect([c async for c in stream])


@feature("JSON schema")
def json_schema() -> None:
    parse = getattr(client.chat.completions, "parse", None) or client.beta.chat.completions.parse
    made = parse(model=MODEL, messages=MESSAGES, response_format=City, max_tokens=200)
    expect(isinstance(made.choices[0].message.parsed, City))
    made = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=200,
        response_format={"type": "json_object"},
        extra_body={"response_format": {"type": "json_object", "schema": CITY_SCHEMA}},
    )
    City.model_validate_json(made.choices[0].message.content)


@feature("tools, required")
def tools_required() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "note_city"}}):
        made = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=200
        )
        (call,) = made.choices[0].message.tool_calls
        expect(call.function.name == "note_city" and made.choices[0].finish_reason in ("tool_calls", "stop"))
        City.model_validate_json(call.function.arguments)


@feature("tools, auto")
def tools_auto() -> None:
    made = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], max_tokens=40)
    message = made.choices[0].message
    expect(message.content or message.tool_calls)


@feature("tools, history")
def tools_history() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "note_city", "arguments": '{"city": "Paris", "people": 2}'},
    }
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noted"},
    ]
    made = client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL], tool_choice="none", max_tokens=8)
    expect(made.choices[0].message.content)


@feature("tools, streamed")
def tools_streamed() -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        stream=True,
    )
    name, arguments = "", ""
    for chunk in stream:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    expect(name == "note_city")
    City.model_validate_json(arguments)


@feature("vLLM's fields")
def other_fields() -> None:
    prefix = [*MESSAGES, {"role": "assistant", "content": "The capital of France is"}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    made = client.chat.completions.create(model=MODEL, messages=prefix, max_tokens=2, temperature=0, extra_body=more)
    expect("Paris" in made.choices[0].message.content, made)
    more = {"continue_final_message": True, "add_generation_prompt": False, "bad_words": ["Paris"]}
    made = client.chat.completions.create(model=MODEL, messages=prefix, max_tokens=2, temperature=0, extra_body=more)
    expect("Paris" not in made.choices[0].message.content, made)
    more = {"truncate_prompt_tokens": 3, "allowed_token_ids": [100]}
    made = client.completions.create(model=MODEL, prompt="One two " * 20, max_tokens=2, extra_body=more)
    expect(made.usage.prompt_tokens == 3, made)


@feature("embeddings")
def embeddings() -> None:
    made = client.embeddings.create(model=MODEL, input=["one", "two"], dimensions=64)
    expect(len(made.data) == 2 and len(made.data[0].embedding) == 64)


@feature("128 answers")
def many_answers() -> None:
    made = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=128, max_tokens=1)
    expect(len(made.choices) == 128)


run()
