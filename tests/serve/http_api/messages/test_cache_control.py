"""`cache_control`: where it may be, what it asks for, and what usage says about the cache."""

import itertools
from typing import Any

import pytest

from apt_jax.errors import InvalidRequestError
from apt_jax.text.chat import ChatTemplate
from serve.http_api.messages.cache_control import longest_ttl
from tests.serve.http_api.messages.test_messages import error_of, events_of
from tests.support.http_serving import run
from tests.support.toy_serving import toy_parts

TEMPLATE = ChatTemplate("{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
TOOL = {"name": "look", "input_schema": {"type": "object"}}
TEXT = "a prompt that is longer than some blocks of the cache, so that a part of it is found again. "


def body_with(marks: dict[str, Any]) -> dict[str, Any]:
    """A body with a mark at each named place."""

    def marked(place: str, block: dict[str, Any]) -> dict[str, Any]:
        return {**block, "cache_control": marks[place]} if place in marks else block

    result = marked("result", {"type": "tool_result", "tool_use_id": "t", "content": [
        marked("in result", {"type": "text", "text": "none"})
    ]})  # fmt: skip
    use = marked("use", {"type": "tool_use", "id": "t", "name": "look", "input": {}})
    return marked("body", {
        "max_tokens": 2,
        "tools": [marked("tool", TOOL)],
        "system": [marked("system", {"type": "text", "text": TEXT})],
        "messages": [
            {"role": "user", "content": [marked("text", {"type": "text", "text": TEXT})]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    })  # fmt: skip


PLACES = ("body", "tool", "system", "text", "use", "result", "in result")


def ttl_of(body: dict[str, Any]) -> str | None:
    return longest_ttl(body.get("cache_control"), body["tools"], body["system"], body["messages"])


def test_the_longest_time_to_live_counts_wherever_it_is():
    assert ttl_of(body_with({})) is None
    assert ttl_of(body_with(dict.fromkeys(PLACES))) is None  # null is no mark
    short, none, long = (
        {"type": "ephemeral", **more} for more in ({"ttl": "5m"}, {}, {"ttl": "1h", "scope": "global"})
    )
    for num in (1, 2, 3, 4):
        for places in itertools.combinations(PLACES, num):
            assert ttl_of(body_with(dict.fromkeys(places, none))) == "5m"
            assert ttl_of(body_with({**dict.fromkeys(places, short), places[-1]: long})) == "1h"


def test_more_than_four_marks_are_refused():
    for places in itertools.combinations(PLACES, 5):
        with pytest.raises(InvalidRequestError, match="5 blocks have it; at most 4 may"):
            ttl_of(body_with({place: {"type": "ephemeral"} for place in places}))


@pytest.mark.parametrize(
    ("mark", "problem"),
    [
        ({"type": "ephemeral", "ttl": "2h"}, "ttl '2h' must be one of 5m, 1h"),
        ({"type": "ephemeral", "ttl": ["5m"]}, "ttl an array must be one of 5m, 1h"),
        ({"type": "ephemeral", "ttl": 300}, "ttl a number must be one of 5m, 1h"),
        ({"type": "permanent"}, "type 'permanent' must be 'ephemeral'"),
        ({}, "type null must be 'ephemeral'"),
        ("ephemeral", "an object"),
        (["ephemeral"], "an object"),
        (True, "an object"),
        ({"type": "ephemeral", "ttl": "5" * 10_000}, "must be one of 5m, 1h"),
    ],
)
def test_a_mark_that_is_none_is_refused_at_every_place(mark, problem):
    for place in PLACES:
        with pytest.raises(InvalidRequestError) as raised:
            ttl_of(body_with({place: mark}))
        message = str(raised.value)
        assert problem in message
        assert raised.value.field.endswith("cache_control")
        assert len(message) < 200


def test_both_paths_refuse_marks_and_ignore_malformed_parts_of_other_fields():
    async def scenario(served):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            response = await served.post(path, body_with({"system": {"type": "ephemeral", "ttl": "9m"}}))
            assert response.status_code == 400
            assert error_of(response)["message"].startswith("system[0].cache_control: ttl '9m'")
            response = await served.post(path, body_with({"in result": {"type": "ephemeral"}}))
            assert response.status_code == 200, response.text

    run(scenario, parts=toy_parts(chat_template=TEMPLATE, max_model_len=512))
    assert longest_ttl(None, 5, "text", [1, {"content": {"cache_control": 3}}, {"content": [None, "x"]}]) is None


def test_the_longest_time_to_live_is_advice_for_the_session():
    async def scenario(served):
        sessions = served.parts.engine.states.sessions

        async def hint(path: str, name: str, body: dict[str, Any]) -> float:
            response = await served.post(path, {**body, "session_id": name})
            assert response.status_code == 200, response.text
            (rows,) = (rows for (_, known), rows in sessions._named.items() if known == name)
            return float(sessions.table.hint_s[rows[0]])

        ephemeral, hour = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
        assert await hint("/v1/messages", "none", body_with({})) == 0.0
        assert await hint("/v1/messages", "short", body_with({"system": ephemeral})) == 300.0
        assert await hint("/v1/messages", "long", body_with({"system": hour, "text": ephemeral})) == 3600.0
        chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
        openai: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}),
            ("/v1/responses", {"input": TEXT, "max_output_tokens": 1}),
        ]
        for path, body in openai:
            for ttl, seconds in (
                ("30m", 1800.0),
                ("59m", 3540.0),
                ("12h", 3600.0),
                ("999999h", 3600.0),
                ("90s", 90.0),
                (None, 0.0),
            ):
                options = {"mode": "implicit", "ttl": ttl}
                assert await hint(path, f"{path}{ttl}", {**body, "prompt_cache_options": options}) == seconds
            for bad in ("", "0m", "m", "1d", "-5m", "1.5h", "９m", "1" * 50 + "s", "5m\n"):
                response = await served.post(path, {**body, "prompt_cache_options": {"ttl": bad}})
                assert response.status_code == 400, bad
                assert "is not a duration such as 5m, 30m or 12h" in response.json()["error"]["message"]
            assert (await served.post(path, {**body, "prompt_cache_options": {}})).status_code == 200
            assert (await served.post(path, {**body, "prompt_cache_retention": "24h"})).status_code == 200

    run(scenario, parts=toy_parts(chat_template=TEMPLATE, max_model_len=512, retention="knapsack"))


@pytest.mark.parametrize("streamed", [False, True])
def test_usage_counts_what_is_read_from_the_cache_and_what_is_written(streamed):
    async def scenario(served):
        async def usages(marks: dict[str, Any], text: str) -> list[dict[str, Any]]:
            body = {**body_with(marks), "stream": streamed}
            body["messages"][0]["content"][0]["text"] += text
            response = await served.post("/v1/messages", body)
            assert response.status_code == 200, response.text
            if not streamed:
                return [response.json()["usage"]]
            events = events_of(response.text)
            return [events[0]["message"]["usage"], events[-2]["usage"]]

        counted = (await served.post("/v1/messages/count_tokens", body_with({}))).json()["input_tokens"]
        mark = {"text": {"type": "ephemeral"}}
        names = ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")
        for usage in await usages(mark, ""):
            read, written, other = (usage[name] for name in names)
            assert (read, written + other) == (0, counted)
            assert 0 <= other < 16
            assert written > 100
        for usage in await usages(mark, ""):  # the last group is computed again if it ends the prompt
            assert written - 16 <= usage[names[0]] <= written
            assert sum(usage[name] for name in names) == counted
        for usage in await usages({}, "and more text behind it, which is new"):
            assert usage[names[1]] == 0  # nothing is marked
            assert usage[names[0]] > 100

    run(scenario, parts=toy_parts(chat_template=TEMPLATE, max_model_len=512))


def test_responses_count_written_tokens_too():
    async def scenario(served):
        details = []
        for _ in range(2):
            response = await served.post("/v1/responses", {"input": TEXT * 3, "max_output_tokens": 2})
            usage = response.json()["usage"]
            details.append(usage["input_tokens_details"])
        assert details[0]["cached_tokens"] == 0
        assert usage["input_tokens"] - 16 < details[0]["cache_write_tokens"] <= usage["input_tokens"]
        assert sum(details[1].values()) == details[0]["cache_write_tokens"]
        assert details[1]["cached_tokens"] >= details[0]["cache_write_tokens"] - 16

    run(scenario, parts=toy_parts(chat_template=TEMPLATE, max_model_len=512))
