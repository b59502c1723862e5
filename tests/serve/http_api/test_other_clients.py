"""Names, values, paths and headers that clients of other servers send and look at."""

import asyncio
import dataclasses
import re

import pytest

from apt_jax.errors import ConfigError, InvalidRequestError, QueueFullError
from apt_jax.frontend.streams import EngineClosedError
from apt_jax.text.chat import ChatTemplate
from apt_jax.version import __version__
from serve.cli.commands.serve import _check_root_path
from serve.http_api.app import HttpApp
from serve.http_api.app_config import AppConfig
from serve.http_api.errors import DROPPED_REASON_KEYS, to_http_error
from serve.http_api.other_paths import ELSEWHERE, hint
from serve.security.api_keys import ApiKeys
from serve.slo_headers import QUEUE_TTL_KEY, max_queue_s
from tests.support.chat_templates import CHATML
from tests.support.http_serving import HttpServed, run
from tests.support.snapshots import parser_of
from tests.support.toy_serving import VOCAB_SIZE, toy_parts


def run_chat(scenario) -> None:
    template = ChatTemplate(CHATML)
    run(scenario, parts=toy_parts(chat_template=template, num_blocks=600))
    template.close()


KEY = "sk-0123456789abcdefghij"


SERVED = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models", "/v1/embeddings",
    "/tokenize", "/health", "/api/chat", "/api/tags", "/api/generate",
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/start_profile", "start the server with --set profiler_dir=DIR"),
        ("/is_sleeping", "the server does not sleep"),
        ("/abort_request", "close the connection of a request to cancel it"),
        ("/v1/engines", "use /v1/models, /v1/completions and /v1/chat/completions"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/responses/r", "responses are only stored with --store-responses; send the whole conversation to /v1/responses"),
        ("/v1/engines/gpt/completions", "use /v1/models, /v1/completions and /v1/chat/completions"),
        ("/v1/vector_stores/vs_1/files", "nothing is stored; use /v1/embeddings and your own vector store"),
        ("/v1/videos", "image, audio and video models are not served"),
        ("/v1/audio/speech", "image, audio and video models are not served"),
        ("/v1/responses/resp_1", "responses are only stored with --store-responses; send the whole conversation to /v1/responses"),
        ("/v1/responses/resp_1/cancel", "responses are only stored with --store-responses; send the whole conversation to /v1/responses"),
        ("/collective_rpc", "use /server_info and /metrics; workers do not accept calls by name"),
        ("/docs", "/openapi.json describes the API"),
        ("/swagger-ui/index.html", "/openapi.json describes the API"),
        ("/v1/openapi.yaml", "/openapi.json describes the API"),
        ("/slots/0", "use /metrics and /load"),
        ("/v1/props", "use /v1/models and /server_info"),
        ("/api/blobs/sha256:00", "the model is chosen when the server starts"),
        ("/api/chats", "did you mean /api/chat?"),
        ("/api/chat/completions", "did you mean /v1/chat/completions?"),
        ("/api/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "did you mean /v1/models?"),
        ("/v1/api/tags", "did you mean /api/tags?"),
        ("/api/models", "did you mean /v1/models?"),
        ("/openai/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/api/", ""),
        ("/", ""),
        ("/v1", ""),
        ("/x" * 4000, ""),
    ],
)  # fmt: skip
def test_a_path_of_other_servers_names_what_to_use(path, told):
    assert hint(path, SERVED) == (f"; {told}" if told else "")


def test_hints_name_flags_and_paths_that_there_are():
    app = HttpApp(AppConfig())
    paths = {path for _, path in app.paths} | {f"/{name}" for name in ("v1/batches", "v1/files", "api/generate")}
    flags = {flag for action in parser_of("serve")._actions for flag in action.option_strings}
    for path, told in ELSEWHERE.items():
        assert path not in paths, path
        assert set(re.findall(r"(?<![\w/])/[\w/.]+\w", told)) <= paths, path
        assert set(re.findall(r"--[\w-]+", told)) <= flags, path
    app.close()


def test_many_prompts_outputs_and_stop_strings_in_one_call():
    async def scenario(served: HttpServed) -> None:
        found = await served.ask(["a", "b"], n=64, max_tokens=2)
        assert [choice["index"] for choice in found["choices"]] == list(range(128))
        assert found["usage"]["completion_tokens"] == 256
        many = await served.post("/v1/completions", {"prompt": ["a"] * 129, "max_tokens": 1})
        assert "more than 128 answers at once" in many.json()["error"]["message"]
        stops = [f"never {i}" for i in range(16)]
        assert (await served.ask(stop=stops, max_tokens=2))["usage"]["completion_tokens"] == 2
        more = await served.post("/v1/completions", {"prompt": "a", "stop": [*stops, "x"]})
        assert "17 strings, at most 16 are allowed (--set max_stop_strings)" in more.json()["error"]["message"]
        near = await served.post("/v1/completions", {"prompt": "a", "temperature": 1e-8, "seed": -1, "max_tokens": 1})
        assert near.status_code == 200

    run(scenario, num_blocks=600)


def test_bad_words_and_allowed_tokens_bind_every_output():
    async def scenario(served: HttpServed) -> None:
        body = {"prompt": "hi", "max_tokens": 40, "return_token_ids": True, "n": 3, "temperature": 1.0, "seed": 1}
        few = (await served.post("/v1/completions", {**body, "allowed_token_ids": [70, 71, 72]})).json()
        assert all(set(choice["token_ids"]) <= {70, 71, 72} for choice in few["choices"])
        assert all(len(choice["token_ids"]) == 40 for choice in few["choices"])  # the end token is not among them
        assert served.parts.tokenizer is not None
        first, second = (served.parts.tokenizer.decode([token]) for token in (40, 80))
        rules = {"allowed_token_ids": [40, 80, 90], "bad_words": [first + second, "z"], "ignore_eos": True}
        bound = (await served.post("/v1/completions", {**body, **rules})).json()
        assert all(first + second not in choice["text"] for choice in bound["choices"])
        assert any(first in choice["text"] and second in choice["text"] for choice in bound["choices"])
        bad = await served.post("/v1/completions", {**body, "allowed_token_ids": [VOCAB_SIZE]})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "allowed_token_ids")
        none = await served.post("/v1/completions", {**body, "allowed_token_ids": [40], "bad_words": [first]})
        error = none.json()["error"]
        assert (none.status_code, error["param"], error["code"]) == (400, "allowed_token_ids", "no_token_left")
        form = {"response_format": {"type": "json_object"}, "allowed_token_ids": [40]}
        none = await served.post("/v1/completions", {**body, **form})
        assert (none.status_code, none.json()["error"]["code"]) == (400, "no_token_left")

    run(scenario)


def test_prompts_are_cut_where_the_call_says_so():
    async def scenario(served: HttpServed) -> None:
        cut = await served.ask("hello", truncate_prompt_tokens=3, max_tokens=1, echo=True)
        assert cut["usage"]["prompt_tokens"] == 3
        assert cut["choices"][0]["text"].startswith("</s>lo")
        chat = {"messages": [{"role": "user", "content": "x" * 5000}], "max_tokens": 5}
        whole = await served.post("/v1/chat/completions", chat)
        assert whole.json()["error"]["code"] == "context_length_exceeded"
        fits = (await served.post("/v1/chat/completions", {**chat, "truncate_prompt_tokens": -1})).json()
        assert fits["usage"]["prompt_tokens"] + 5 == served.parts.limits.max_model_len

    run_chat(scenario)


def test_the_last_message_is_gone_on_with():
    async def scenario(served: HttpServed) -> None:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well "}]

        async def prompt(**fields) -> str:
            tokens = (await served.post("/tokenize", {"messages": messages, **fields})).json()
            assert served.parts.tokenizer is not None
            return served.parts.tokenizer.decode(tokens["tokens"], skip_special_tokens=False)

        assert (await prompt(continue_final_message=True)).endswith("well ")
        assert not (await prompt()).endswith("well ")
        both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
        refused = await served.post("/v1/chat/completions", both)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")
        named = {"messages": messages, "chat_template_kwargs": {"messages": []}}
        refused = await served.post("/v1/chat/completions", named)
        assert "'messages' cannot be set by requests" in refused.json()["error"]["message"]
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        calls = {"messages": [messages[0], {**messages[1], "tool_calls": [call]}], "continue_final_message": True}
        refused = await served.post("/v1/chat/completions", calls)
        assert "the last message has tool calls" in refused.json()["error"]["message"]
        good = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 1}
        assert (await served.post("/v1/chat/completions", good)).status_code == 200

    run_chat(scenario)


def test_paths_that_others_have_and_hints_for_wrong_ones():
    async def scenario(served: HttpServed) -> None:
        bearer = {"authorization": f"Bearer {KEY}"}
        assert (await served.http.get("/ping")).status_code == 200
        assert (await served.http.post("/ping")).status_code == 200
        assert (await served.http.get("/version")).status_code == 401
        assert (await served.http.get("/version", headers=bearer)).json() == {"version": __version__}
        for path, told in (
            ("/chat/completions", "; did you mean /v1/chat/completions?"),
            ("/models", "; did you mean /v1/models?"),
            ("/v1/tokenize", "; did you mean /tokenize?"),
            ("/v1/completions/", "; did you mean /v1/completions?"),
            ("/v1/chat/completion", "; did you mean /v1/chat/completions?"),
            ("/completion", "; use /v1/completions"),
            ("/nothing", ""),
        ):
            error = (await served.http.get(path, headers=bearer)).json()["error"]
            assert error["message"] == f"there is nothing at {path!r}{told}"
        long = (await served.http.get("/" + "%0a" * 300, headers=bearer)).json()["error"]["message"]
        assert len(long) < 300
        assert "\n" not in long
        wrong = (await served.http.get("/v1/completions", headers=bearer)).json()["error"]["message"]
        assert wrong == "'/v1/completions' does not accept this method"
        empty = await served.post("/tokenize", {"content": "hello"}, headers=bearer)
        assert "prompt: missing; give a text as prompt, or messages; llama.cpp's" in empty.json()["error"]["message"]

    run(scenario, app={"keys": ApiKeys([KEY])})


@pytest.mark.parametrize("dashboard", [True, False])
def test_an_address_without_a_path_leads_people_to_the_chat_and_programs_on(dashboard):
    async def scenario(served: HttpServed) -> None:
        browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
        found = await served.http.get("/", headers={"accept": browser})
        assert found.status_code == (307 if dashboard else 200)
        assert found.headers.get("location") == ("chat" if dashboard else None)
        for accept in ("*/*", "application/json", ""):
            found = await served.http.get("/", headers={"accept": accept})
            links = found.json()["links"]
            assert ("chat" in links) == dashboard
            for path in links.values():
                head = {"authorization": f"Bearer {KEY}"}
                assert path == "/v1" or (await served.http.get(path, headers=head)).status_code == 200

    run(scenario, app={"keys": ApiKeys([KEY]), "dashboard": dashboard})


def test_paths_may_have_a_prefix():
    async def scenario(served: HttpServed) -> None:
        bearer = {"authorization": f"Bearer {KEY}"}
        for prefix in ("", "/llm/a"):
            assert (await served.http.get(f"{prefix}/health")).status_code == 200
            assert (await served.http.get(f"{prefix}/v1/models")).status_code == 401
            assert (await served.http.get(f"{prefix}/v1/models", headers=bearer)).status_code == 200
            body = {"prompt": "a", "max_tokens": 1}
            assert (await served.post(f"{prefix}/v1/completions", body, headers=bearer)).status_code == 200
        for path in ("/llm", "/llm/v1/models", "/llm/av1/models", "/llm/a/llm/a/health", "/llm%2Fa/health"):
            assert (await served.http.get(path, headers=bearer)).status_code == 404
        document = (await served.http.get("/llm/a/openapi.json", headers=bearer)).json()
        assert document["servers"] == [{"url": "/llm/a"}]

    run(scenario, app={"keys": ApiKeys([KEY]), "root_path": "/llm/a"})


@pytest.mark.parametrize("path", ["llm", "/", "/llm/", "//", "/a b", "/a//b", "/%61", "/ä"])
def test_a_prefix_must_be_one(path):
    with pytest.raises(ConfigError, match="--root-path"):
        _check_root_path(path)


def test_a_model_of_several_names():
    async def scenario(served: HttpServed) -> None:
        listed = (await served.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["toy", "gpt-4o", "mine"]
        for name in ("toy", "gpt-4o", "mine"):
            assert (await served.ask(model=name, max_tokens=1))["model"] == "toy"
            assert (await served.http.get(f"/v1/models/{name}")).json()["id"] == name
        other = await served.post("/v1/completions", {"prompt": "a", "model": "other"})
        assert other.status_code == 404
        assert "this server has 'toy' and 'gpt-4o' and 'mine'" in other.json()["error"]["message"]

    parts = toy_parts()
    config = dataclasses.replace(parts.config, served_model_aliases=("gpt-4o", "mine"))
    run(scenario, parts=dataclasses.replace(parts, config=config))


# --- the queue -----------------------------------------------------------------------------------------------------


def test_a_request_waits_no_longer_than_it_asks_to():
    async def scenario(served: HttpServed) -> None:
        executor = served.parts.executor
        executor.step_s = 0.01  # type: ignore[attr-defined]
        running = asyncio.create_task(served.ask("long", max_tokens=60))
        await served.until(lambda: served.parts.engine.num_live == 1)
        late = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={QUEUE_TTL_KEY: "50ms"})
        assert late.status_code == 429
        assert "has waited for 0.05 s (its own limit)" in late.json()["error"]["message"]
        assert {late.headers[key] for key in DROPPED_REASON_KEYS} == {"rejected-ttl-expired"}
        long = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={QUEUE_TTL_KEY: "1h"})
        assert long.status_code == 200
        await running
        wrong = await served.post("/v1/completions", {"prompt": "a"}, headers={QUEUE_TTL_KEY: "soon"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, QUEUE_TTL_KEY)

    run(scenario, max_num_seqs=1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1500ms", 1.5), ("2s", 2.0), ("1m30s", 90.0), ("1.5h", 5400.0), ("250us", 2.5e-4), (b"3s", 3.0)],
)
def test_durations_are_those_of_go(text, seconds):
    assert max_queue_s({QUEUE_TTL_KEY: text}) == pytest.approx(seconds)
    assert max_queue_s({}) is None


@pytest.mark.parametrize("text", ["", "2", "0s", "-2s", "2 s", "s", "1e3s", "9" * 40 + "s", "1s" * 7, "\n2s3"])
def test_other_texts_are_no_durations(text):
    with pytest.raises(InvalidRequestError, match=QUEUE_TTL_KEY):
        max_queue_s({QUEUE_TTL_KEY: text})


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (QueueFullError("full"), "saturated"),
        (QueueFullError("late", has_waited=True), "ttl-expired"),
        (MemoryError(), "saturated"),
        (EngineClosedError("the server is shutting down"), "shutting-down"),
        (EngineClosedError("the server is starting", why="no-endpoints"), "no-endpoints"),
    ],
)
def test_the_reason_of_a_rejection_is_in_its_headers(error, why):
    headers = to_http_error(error, "id").headers
    assert {headers[key] for key in DROPPED_REASON_KEYS} == {f"rejected-{why}"}
    assert not set(DROPPED_REASON_KEYS) & set(to_http_error(InvalidRequestError("a", "b"), "id").headers)
