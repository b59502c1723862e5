"""Open WebUI, through its own API: a first user signs up, names this server as three connections, and chats.

It has one connection for each API that it speaks to: chat completions, Responses and Ollama's.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from harness import BASE_URL, CITY_SCHEMA, KEY, MODEL, QUESTION, ROOT_URL, expect, feature, run

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
MESSAGES = [{"role": "user", "content": QUESTION}]
MODELS = {api: f"{api}.{MODEL}" for api in ("chat", "responses", "ollama")}
TOOL = {"type": "function", "function": {"name": "note_city", "description": "Note a city", "parameters": CITY_SCHEMA}}
ui = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120)


def call(path: str, body: dict[str, Any]) -> Any:
    answer = ui.post(path, json=body)
    expect(answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:300]}")
    return answer.json()


def body_of(api: str, *, temperature: float = 0, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": temperature}
    if api == "ollama":  # to which Open WebUI hands on no sampling but this
        sampling = {"options": sampling}
    return {"model": MODELS[api], "messages": MESSAGES, "max_tokens": 12, "stream": False, **sampling, **fields}


def ask(api: str, **fields: Any) -> Any:
    return call("/api/chat/completions", body_of(api, **fields))


def text_of(made: Any) -> str:
    return made["choices"][0]["message"]["content"]


def streamed_text(api: str) -> str:
    pieces, ended = [], False
    with ui.stream("POST", "/api/chat/completions", json=body_of(api, stream=True)) as answer:
        expect(answer.status_code == 200, answer.status_code)
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                expect("error" not in event, event)
                if event.get("type") == "response.output_text.delta":  # Open WebUI hands on the events of Responses
                    pieces.append(event["delta"])
                for choice in event.get("choices") or []:
                    pieces.append(choice["delta"].get("content") or "")
                    ended = ended or bool(choice.get("finish_reason"))
                ended = ended or event.get("type") in ("response.completed", "response.incomplete")
    expect(ended and len(pieces) > 3, pieces)
    return "".join(pieces)


@feature("models")
def models() -> None:
    for path, url in (("/openai/verify", BASE_URL), ("/ollama/verify", ROOT_URL)):
        call(path, {"url": url, "key": KEY})
    connections = {"key": KEY, "enable": True}
    chat, responses = {"prefix_id": "chat"}, {"prefix_id": "responses", "api_type": "responses"}
    call(
        "/openai/config/update",
        {
            "ENABLE_OPENAI_API": True,
            "OPENAI_API_BASE_URLS": [BASE_URL, BASE_URL],
            "OPENAI_API_KEYS": [KEY, KEY],
            "OPENAI_API_CONFIGS": {"0": {**connections, **chat}, "1": {**connections, **responses}},
        },
    )
    ollama = {"0": {**connections, "prefix_id": "ollama"}}
    call(
        "/ollama/config/update",
        {"ENABLE_OLLAMA_API": True, "OLLAMA_BASE_URLS": [ROOT_URL], "OLLAMA_API_CONFIGS": ollama},
    )
    found = {model["id"] for model in ui.get("/api/models", params={"refresh": True}).json()["data"]}
    expect(set(MODELS.values()) <= found, found)
    expect(ui.get("/ollama/api/version").json()["version"])
    expect(MODELS["ollama"] in json.dumps(ui.get("/ollama/api/ps").json()))


@feature("chat")
def chat() -> None:
    made = ask("chat")
    expect(text_of(made), made)
    # After a first answer the page asks for a title by a prompt of its own.
    title = call("/api/v1/tasks/title/completions", {"model": MODELS["chat"], "messages": MESSAGES, "chat_id": ""})
    expect(text_of(title), title)


@feature("streams")
def streams() -> None:
    expect(streamed_text("chat") == text_of(ask("chat")))


@feature("Responses")
def responses() -> None:
    expect(text_of(ask("responses")) == text_of(ask("chat")))


@feature("Responses, streams")
def responses_streams() -> None:
    expect(streamed_text("responses") == text_of(ask("chat")))


@feature("Ollama, chat")
def ollama() -> None:
    expect(text_of(ask("ollama")) == text_of(ask("chat")))


@feature("Ollama, streams")
def ollama_streams() -> None:
    expect(streamed_text("ollama") == text_of(ask("chat")))


@feature("Messages")
def messages() -> None:
    for api in ("chat", "ollama"):
        made = call("/api/v1/messages", {"model": MODELS[api], "messages": MESSAGES, "max_tokens": 12})
        expect(made["content"][0]["text"], made)


@feature("JSON schema")
def json_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True}}
    for api in ("chat", "ollama"):
        made = ask(api, response_format=form, max_tokens=80)
        expect(set(json.loads(text_of(made))) == {"city", "people"}, made)


@feature("tools, required")
def tools_required() -> None:
    made = ask("chat", tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=80)
    (used,) = made["choices"][0]["message"]["tool_calls"]
    expect(set(json.loads(used["function"]["arguments"])) == {"city", "people"}, made)


@feature("embeddings")
def embeddings() -> None:
    for api in ("chat", "ollama"):
        made = call("/api/embeddings", {"model": MODELS[api], "input": ["One text.", "Another one."]})
        expect(len(made["data"]) == 2 and len(made["data"][0]["embedding"]) > 8, api)
    # Documents: Open WebUI embeds their parts, and the question.
    for engine, url in (("openai", BASE_URL), ("ollama", ROOT_URL)):
        settings = {"RAG_EMBEDDING_ENGINE": engine, "RAG_EMBEDDING_MODEL": MODEL, "RAG_EMBEDDING_BATCH_SIZE": 2}
        call("/api/v1/retrieval/embedding/update", {**settings, f"{engine}_config": {"url": url, "key": KEY}})
        made = call("/api/v1/retrieval/process/text", {"name": engine, "content": f"{engine}: one text. " * 300})
        asked = {"collection_name": made["collection_name"], "query": "Which text?", "k": 2}
        expect(call("/api/v1/retrieval/query/doc", asked)["documents"][0], engine)


@feature("refused by name")
def refused() -> None:
    for api in ("chat", "ollama"):
        answer = ui.post("/api/chat/completions", json=body_of(api, temperature=-1))
        expect(answer.status_code == 400 and "temperature" in answer.text, f"{api}: {answer.text[:300]}")


def wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while True:
        try:
            if ui.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        expect(process.poll() is None and time.monotonic() < deadline, "Open WebUI did not start")
        time.sleep(1)


settings = {
    "DATA_DIR": os.getcwd(),
    "WEBUI_SECRET_KEY": "a-key-for-one-run",
    "OFFLINE_MODE": "true",
    "RAG_EMBEDDING_ENGINE": "openai",  # its own would be downloaded
    "ENABLE_PERSISTENT_CONFIG": "true",
}
program = [Path(sys.executable).with_name("open-webui"), "serve", "--host", "127.0.0.1", "--port", str(PORT)]
with subprocess.Popen(program, env=os.environ | settings, stdout=sys.stderr) as process:
    try:
        wait_until_ready(process)
        first = {"name": "One", "email": "one@example.org", "password": "a-pass-word"}
        ui.headers["authorization"] = f"Bearer {call('/api/v1/auths/signup', first)['token']}"
        run()
    finally:
        process.terminate()
