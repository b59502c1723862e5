"""Stored responses: continuing them is resending the conversation, each key has its own, and memory is bounded."""

import json
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.responses import Response

from apt_jax.text.chat import ChatTemplate
from serve.http_api.errors import BadCallError
from serve.http_api.responses.store import LIFETIME_S, ResponseStore, StoredResponse
from serve.security.api_keys import ApiKeys
from tests.serve.http_api.responses.test_responses import events_of
from tests.support.chat_templates import CHATML
from tests.support.http_serving import bearer, run
from tests.support.toy_serving import toy_parts

KEY, OTHER = "sk-0123456789abcdefghij", "sk-another-key-of-a-tenant"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_output_tokens": 8}
TEMPLATE = ChatTemplate(CHATML)
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module", autouse=True)
def template():
    yield
    TEMPLATE.close()


def serve(scenario, **app: Any) -> None:
    parts = toy_parts(chat_template=TEMPLATE, max_model_len=1024, num_blocks=512, retention="knapsack")
    run(scenario, parts=parts, app={"store_responses": 100, **app})


async def ask(served: Any, given: Any, key: str = KEY, **fields: Any) -> dict[str, Any]:
    body = {"input": given, **GREEDY, **fields}
    response = await served.post("/v1/responses", body, headers=bearer(key))
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        Response.model_validate(response.json())
        return response.json()
    return events_of(response.text)[-1]["response"]


async def get(served: Any, response_id: str, key: str = KEY, method: str = "GET") -> Any:
    return await served.http.request(method, f"/v1/responses/{response_id}", headers=bearer(key))


def texts(answer: dict[str, Any]) -> list[str]:
    return [part["text"] for item in answer["output"] for part in item["content"]]


def as_input(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text} for text in texts(answer)]


@pytest.mark.parametrize("streamed", [False, True])
def test_continuing_a_response_is_resending_its_conversation(streamed):
    async def scenario(served):
        fields: dict[str, Any] = {"stream": streamed, "instructions": "Be brief.", "store": None}
        first = await ask(served, "hello", **fields)
        assert (first["store"], first["previous_response_id"]) == (True, None)
        second = await ask(served, [{"role": "user", "content": "more"}], previous_response_id=first["id"], **fields)
        assert second["previous_response_id"] == first["id"]
        third = await ask(served, "end", previous_response_id=second["id"], **fields)
        history = [{"role": "user", "content": "hello"}, *as_input(first), {"role": "user", "content": "more"}]
        resent = await ask(served, history, **fields)
        assert texts(resent) == texts(second)
        assert resent["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        history += [*as_input(second), {"role": "user", "content": "end"}]
        resent = await ask(served, history, **fields)
        assert texts(resent) == texts(third)
        found = third["usage"]["input_tokens_details"]["cached_tokens"]
        assert found > second["usage"]["input_tokens"] - 32  # the prefix of the session
        branch = await ask(served, "more", previous_response_id=first["id"], **fields)  # a response has many heirs
        assert texts(branch) == texts(second)

    serve(scenario)


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_calls_are_continued_with_their_results(streamed):
    async def scenario(served):
        fields: dict[str, Any] = {"tools": [TOOL], "max_output_tokens": 64, "ignore_eos": False, "stream": streamed}
        first = await ask(served, "look", **{**fields, "tool_choice": {"type": "function", "name": "look"}})
        (call,) = first["output"]
        assert call["type"] == "function_call"
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "nothing"}
        second = await ask(served, [result], previous_response_id=first["id"], **fields)
        history = [{"role": "user", "content": "look"}, call, result]
        assert texts(await ask(served, history, **fields)) == texts(second)
        response = await served.post(
            "/v1/responses", {"input": [{"type": "nonsense"}], "previous_response_id": first["id"]}, headers=bearer(KEY)
        )
        assert response.json()["error"]["param"] == "input[0]"  # as the call itself counts

    serve(scenario)


def test_logprobs_are_shown_and_not_continued():
    async def scenario(served):
        first = await ask(served, "hello", include=["message.output_text.logprobs"], top_logprobs=2)
        shown = (await get(served, first["id"])).json()
        assert shown["output"][0]["content"][0]["logprobs"]
        second = await ask(served, "more", previous_response_id=first["id"])
        plain = await ask(served, "hello")
        assert texts(await ask(served, "more", previous_response_id=plain["id"])) == texts(second)

    serve(scenario)


def test_a_continued_call_belongs_to_the_session_of_the_first():
    async def scenario(served):
        sessions = served.parts.engine.states.sessions

        def num_calls(name: str | None) -> int:
            return sum(int(sessions.table.num_calls[row]) for (_, n), rows in sessions._named.items() for row in rows if n == name)  # fmt: skip

        first = await ask(served, "hello", session_id="mine")
        second = await ask(served, "more", previous_response_id=first["id"])
        await ask(served, "again", previous_response_id=second["id"])
        assert num_calls("mine") == 3
        await ask(served, "again", previous_response_id=second["id"], prompt_cache_key="theirs")
        assert (num_calls("mine"), num_calls("theirs")) == (3, 1)
        unnamed = await ask(served, "something long enough that its blocks are found again by the call after it")
        num = int(sessions.table.live.sum())
        await ask(served, "and more", previous_response_id=unnamed["id"])
        assert int(sessions.table.live.sum()) == num  # by its prefix
        assert num_calls("mine") == 3

    serve(scenario)


def test_stored_responses_are_shown_and_removed():
    async def scenario(served):
        for streamed in (False, True):
            answer = await ask(served, "hello", stream=streamed, metadata={"a": "b"})
            shown = await get(served, answer["id"])
            assert (shown.status_code, shown.json()) == (200, answer)
            removed = await get(served, answer["id"], method="DELETE")
            assert removed.json() == {"id": answer["id"], "object": "response", "deleted": True}
            for method in ("GET", "DELETE"):
                gone = await get(served, answer["id"], method=method)
                assert gone.status_code == 404
                assert gone.json()["error"]["code"] == "response_not_found"
            assert (await get(served, answer["id"], method="POST")).status_code == 405

    serve(scenario)


def test_the_client_of_openai_continues_shows_and_removes():
    async def scenario(served):
        client = served.openai.responses
        first = await client.create(model="toy", input="hello", max_output_tokens=8)
        second = await client.create(model="toy", input="more", previous_response_id=first.id, max_output_tokens=8)
        assert second.previous_response_id == first.id
        assert await client.retrieve(first.id) == first
        await client.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="no stored response has the id"):
            await client.retrieve(first.id)
        with pytest.raises(openai.NotFoundError, match="send the whole conversation as input"):
            await client.create(model="toy", input="more", previous_response_id=first.id)
        assert (await client.create(model="toy", input="x", previous_response_id=second.id)).status == "completed"

    serve(scenario)


def test_responses_that_ask_not_to_be_stored_or_fail_are_not():
    async def scenario(served):
        for streamed in (False, True):
            answer = await ask(served, "hello", store=False, stream=streamed)
            assert answer["store"] is False
            assert (await get(served, answer["id"])).status_code == 404
        first = await ask(served, "hello")
        second = await ask(served, "more", previous_response_id=first["id"], store=False)
        assert second["previous_response_id"] == first["id"]
        body = {"input": "x" * 5000, "request_id": "mine"}
        assert (await served.post("/v1/responses", body, headers=bearer(KEY))).status_code == 400
        assert (await get(served, "resp_mine")).status_code == 404

    serve(scenario)


def test_a_conversation_that_grows_by_ignored_fields_cannot_be_continued_for_ever():
    async def scenario(served):
        item, previous = {"role": "user", "content": "x", "junk": "y" * 1_900_000}, None
        for _ in range(3):
            previous = (await ask(served, [item], previous_response_id=previous, max_output_tokens=1))["id"]
        body = {"input": "x", "previous_response_id": previous}
        response = await served.post("/v1/responses", body, headers=bearer(KEY))
        assert response.status_code == 400
        assert "has more than 4 MiB; send a shorter one as input" in response.json()["error"]["message"]

    serve(scenario)


def test_nothing_of_one_key_is_visible_to_another():
    async def scenario(served):
        answer = await ask(served, "a secret", request_id="guessed")
        assert answer["id"] == "resp_guessed"
        for key, status in ((OTHER, 404), (KEY, 200)):
            assert (await get(served, answer["id"], key)).status_code == status
            body = {"input": "more", "previous_response_id": answer["id"], "max_output_tokens": 2}
            response = await served.post("/v1/responses", body, headers=bearer(key))
            assert response.status_code == status
            assert status == 200 or "secret" not in response.text
        assert (await get(served, answer["id"], OTHER, "DELETE")).status_code == 404
        unknown = await get(served, "resp_unknown", OTHER)
        assert (await get(served, answer["id"], OTHER)).text == unknown.text.replace("resp_unknown", answer["id"])
        mine = await ask(served, "mine", OTHER, request_id="guessed")  # the same id of two keys
        assert (await get(served, mine["id"], OTHER)).json() == mine
        assert (await get(served, answer["id"])).json() == answer

    serve(scenario, keys=ApiKeys([KEY, OTHER]))


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("resp_unknown", 404), ("", 404), ("x" * 100_000, 404), ("a\nb\0", 404), (5, 400), (["r"], 400), ({}, 400),
        (True, 400), ("\ud800", 404),
    ],
)  # fmt: skip
def test_an_id_that_is_none_is_refused_in_one_short_line(value, status):
    async def scenario(served):
        data = json.dumps({"input": "x", "previous_response_id": value}).encode()
        headers = {"content-type": "application/json"}
        response = await served.http.post("/v1/responses", content=data, headers=headers)
        assert response.status_code == status, response.text
        message = response.json()["error"]["message"]
        assert "previous_response_id" in message
        assert message.isprintable()
        assert len(message) < 400

    serve(scenario)


def test_by_default_nothing_is_stored_and_the_answer_says_so():
    async def scenario(served):
        for fields in ({}, {"store": True}):
            response = await served.post("/v1/responses", {"input": "hello", **GREEDY, **fields})
            answer = response.json()
            assert answer["store"] is False
            body = {"input": "more", "previous_response_id": answer["id"]}
            response = await served.post("/v1/responses", body)
            assert response.status_code == 400
            assert "--store-responses" in response.json()["error"]["message"]
            for method in ("GET", "DELETE"):
                shown = await served.http.request(method, f"/v1/responses/{answer['id']}")
                assert shown.status_code == 404
                assert "--store-responses" in shown.json()["error"]["message"]

    run(scenario, chat_template=TEMPLATE)


def record(num_bytes: int) -> StoredResponse:
    return StoredResponse(body=b"x" * (num_bytes // 2), items=b"y" * (num_bytes - num_bytes // 2), session_id=None)


def test_count_bytes_and_time_are_bounded_and_the_least_recently_used_goes_first():
    for seed in range(30):
        rng = np.random.default_rng([seed, 81])
        now_s = 0.0
        most, most_bytes, total = int(rng.integers(1, 8)), int(rng.integers(50, 300)), int(rng.integers(100, 600))
        store = ResponseStore(most, max_bytes=most_bytes, max_total_bytes=total, now_s=lambda: now_s)  # noqa: B023
        expected: dict[str | None, dict[str, tuple[float, int]]] = {"a": {}, "b": {}, None: {}}

        def sizes(of: dict[str, tuple[float, int]]) -> int:
            return sum(size for _, size in of.values())

        for _ in range(200):
            now_s += float(rng.choice([0.0, 1.0, LIFETIME_S / 3]))
            tenant: str | None = ("a", "b", None)[int(rng.integers(3))]
            name, mine = f"r{int(rng.integers(12))}", expected[tenant]
            action = int(rng.integers(4))
            if action < 3:
                for of in expected.values():
                    for gone in [n for n, (used_s, _) in of.items() if used_s < now_s - LIFETIME_S]:
                        del of[gone]
            if action < 2:
                size = int(rng.integers(1, 120))
                store.put(tenant, name, record(size))
                mine.pop(name, None)
                mine[name] = (now_s, size)
                while len(mine) > most or sizes(mine) > most_bytes:
                    del mine[next(iter(mine))]
                while sum(map(sizes, expected.values())) > total:
                    largest = max(expected.values(), key=sizes)
                    if sum(sizes(of) == sizes(largest) for of in expected.values()) > 1:
                        break  # a tie, which the store may resolve differently
                    del largest[next(iter(largest))]
                else:
                    assert {t: dict(m) for t, m in expected.items() if m} == {
                        t: {n: (s, r.num_bytes) for n, (s, r) in m.records.items()}
                        for t, m in store._tenants.items() if m.records
                    }  # fmt: skip
                    assert store._num_bytes == sum(map(sizes, expected.values())) <= total
                    continue
                break
            if action == 2 and name in mine:
                assert store.get(tenant, name).num_bytes == mine[name][1]
                mine[name] = (now_s, mine.pop(name)[1])
            elif action == 2:
                with pytest.raises(BadCallError):
                    store.get(tenant, name)
            elif name in mine:
                store.delete(tenant, name)
                del mine[name]
            else:
                with pytest.raises(BadCallError):
                    store.delete(tenant, name)
