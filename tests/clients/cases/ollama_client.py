"""Ollama's own client."""

import json

from harness import CITY_SCHEMA, KEY, MODEL, QUESTION, ROOT_URL, expect, feature, run
from ollama import AsyncClient, Client, ResponseError

HEADERS = {"authorization": f"Bearer {KEY}"}
client = Client(ROOT_URL, headers=HEADERS)
MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0, "num_predict": 16}
TOOL = {
    "type": "function",
    "function": {"name": "note_city", "description": "Note a city", "parameters": CITY_SCHEMA},
}


@feature("models")
def models() -> None:
    expect(MODEL in [model.model for model in client.list().models])
    expect(MODEL in [model.model for model in client.ps().models])
    shown = client.show(MODEL)
    expect("completion" in shown.capabilities and shown.template and shown.modelinfo)


@feature("chat")
def chat() -> None:
    made = client.chat(MODEL, MESSAGES, options=GREEDY)
    expect(made.message.role == "assistant" and made.message.content and made.done, made)
    expect(1 < made.eval_count <= 16 and made.total_duration > 0 and made.done_reason in ("stop", "length"), made)
    stopped = client.chat(MODEL, MESSAGES, options={**GREEDY, "stop": [made.message.content.split()[2]]})
    expect(made.message.content.startswith(stopped.message.content), stopped)


@feature("streams")
def streams() -> None:
    whole = client.chat(MODEL, MESSAGES, options=GREEDY)
    pieces = list(client.chat(MODEL, MESSAGES, options=GREEDY, stream=True))
    expect("".join(piece.message.content for piece in pieces) == whole.message.content)
    expect(pieces[-1].done and not any(piece.done for piece in pieces[:-1]) and len(pieces) > 4)


@feature("streams, async")
async def streams_async() -> None:
    other = AsyncClient(ROOT_URL, headers=HEADERS)
    pieces = [piece async for piece in await other.generate(MODEL, QUESTION, options=GREEDY, stream=True)]
    expect("".join(piece.response for piece in pieces) and 1 < pieces[-1].eval_count <= 16)


@feature("completions")
def completions() -> None:
    made = client.generate(MODEL, "The capital of France is", raw=True, options=GREEDY)
    expect(made.response and made.done_reason in ("stop", "length"), made)
    answered = client.generate(MODEL, QUESTION, system="Be brief.", options=GREEDY)
    expect(answered.response, answered)
    expect(client.generate(MODEL).done)


@feature("JSON schema")
def json_schema() -> None:
    made = client.chat(MODEL, MESSAGES, format=CITY_SCHEMA, options={"temperature": 0, "num_predict": 80})
    expect(set(json.loads(made.message.content)) == {"city", "people"}, made)


@feature("tools, history")
def tools_history() -> None:
    call = {"function": {"name": "note_city", "arguments": {"city": "Paris", "people": 2}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "note_city", "content": "noted"},
    ]
    made = client.chat(MODEL, history, tools=[TOOL], options=GREEDY)
    expect(made.done and made.prompt_eval_count > client.chat(MODEL, MESSAGES, options=GREEDY).prompt_eval_count, made)


@feature("embeddings")
def embeddings() -> None:
    made = client.embed(MODEL, ["One text.", "Another one."])
    expect(len(made.embeddings) == 2 and len(made.embeddings[0]) == len(made.embeddings[1]) > 8)
    expect(len(client.embeddings(MODEL, "One text.").embedding) == len(made.embeddings[0]))


@feature("refused by name")
def refused() -> None:
    for call, says in (
        (lambda: client.chat(MODEL, MESSAGES, options={"temperature": -1}), "options.temperature"),
        (lambda: client.chat("no-such-model", MESSAGES), "no-such-model"),
        (lambda: client.pull(MODEL), "/api/pull"),
    ):
        try:
            call()
        except ResponseError as error:
            expect(says in error.error and error.status_code in (400, 404), error)
        else:
            raise AssertionError(says)


run()
