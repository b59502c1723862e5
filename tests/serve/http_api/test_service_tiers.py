"""Classes and objectives on every endpoint: what a request asks for, what the engine sees, and what the answer says."""

import dataclasses
from typing import Any

import pytest

from apt_jax.config import SLO
from apt_jax.text.chat import ChatTemplate
from tests.support.chat_templates import CHATML
from tests.support.http_serving import run
from tests.support.toy_serving import toy_parts

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "hello"},
    "/v1/score": {"text_1": "hello", "text_2": "world"},
}
MESSAGES = "/v1/messages"
TIERS = {
    None: ("rt", "default"),
    "auto": ("rt", "default"),
    "default": ("rt", "default"),
    "priority": ("rt", "priority"),
}
TIERS["flex"] = ("be", "flex")
TEMPLATE = ChatTemplate(CHATML)


@pytest.fixture(scope="module", autouse=True)
def template():
    yield
    TEMPLATE.close()


def parts(**limits: Any):
    made = toy_parts(chat_template=TEMPLATE, max_model_len=512)
    return dataclasses.replace(made, limits=dataclasses.replace(made.limits, **limits))


def noting(served: Any) -> list[tuple[str, SLO]]:
    """Class and objectives of each request that the engine gets from now on."""
    seen: list[tuple[str, SLO]] = []
    add = served.parts.engine.add_request

    def add_request(request: Any) -> None:
        seen.append((request.slo_class, request.slo))
        add(request)

    served.parts.engine.add_request = add_request
    return seen


async def ask(served: Any, path: str, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    response = await served.post(path, {**BODIES[path], **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def test_every_endpoint_serves_the_tier_that_is_asked_for_and_says_so():
    async def scenario(served):
        seen = noting(served)
        for path in BODIES:
            for tier, (slo_class, used) in TIERS.items():
                answer = await ask(served, path, service_tier=tier)
                assert answer["service_tier"] == used, (path, tier)
                assert {of_class for of_class, _ in seen} == {slo_class}, (path, tier)
                seen.clear()
            assert (await ask(served, path, {"service_tier": "flex"}))["service_tier"] == "flex"
            assert (await ask(served, path, service_tier="priority", slo_class="be"))["service_tier"] == "flex"
            assert (await ask(served, path, service_tier="flex", slo={"class": "rt"}))["service_tier"] == "default"
            seen.clear()

    run(scenario, parts=parts())


def test_every_endpoint_takes_an_end_to_end_objective_and_refuses_a_bad_one():
    async def scenario(served):
        seen = noting(served)
        bodies = {**BODIES, MESSAGES: {"messages": HELLO, "max_tokens": 2}}
        header = {"x-slo-e2e-ms": "7000"}
        for path, body in bodies.items():
            for fields, seconds in (
                ({}, 7.0),
                ({"slo_e2e_ms": 9000}, 9.0),
                ({"slo": {"e2e_ms": 8000.5}}, 8.0005),
                ({"slo": {"ttft_ms": None}, "slo_e2e_ms": None}, 7.0),
            ):
                response = await served.post(path, {**body, **fields}, headers=header)
                assert response.status_code == 200, (path, response.text)
                assert {slo for _, slo in seen} == {SLO(e2e_s=seconds)}, (path, fields)
                seen.clear()
            for bad in (0, -1, 1e18, "9000", True, [1]):
                for fields in ({"slo_e2e_ms": bad}, {"slo": {"e2e_ms": bad}}):
                    response = await served.post(path, {**body, **fields})
                    assert response.status_code == 400, (path, fields)
                    assert "e2e_ms: " in response.json()["error"]["message"], (path, fields)
        assert not seen

    run(scenario, parts=parts())


def test_streams_say_so_too():
    async def scenario(served):
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            fields = {**BODIES[path], "stream": True, "service_tier": "flex"}
            text = (await served.post(path, fields)).text
            assert '"service_tier":"flex"' in text
            assert '"service_tier":"default"' not in text

    run(scenario, parts=parts())


def test_anthropics_names():
    async def scenario(served):
        seen = noting(served)
        body = {"messages": HELLO, "max_tokens": 2}
        for fields, headers, slo_class, used in (
            ({}, {}, "rt", "standard"),
            ({"service_tier": "auto"}, {}, "rt", "standard"),
            ({"slo_class": "be"}, {}, "be", "batch"),
            ({}, {"service_tier": "flex"}, "be", "batch"),
            ({}, {"service_tier": "priority"}, "rt", "priority"),
        ):
            answer = (await served.post(MESSAGES, {**body, **fields}, headers=headers)).json()
            assert answer["usage"]["service_tier"] == used
            assert seen.pop()[0] == slo_class

    run(scenario, parts=parts())


@pytest.mark.parametrize("path", list(BODIES))
def test_a_wrong_tier_is_one_line_with_the_right_ones(path):
    async def scenario(served):
        for value in ("gold", "FLEX", "", 1, ["flex"]):
            response = await served.post(path, {**BODIES[path], "service_tier": value})
            assert response.status_code == 400, (value, response.text)
            error = response.json()["error"]
            assert error["param"] == "service_tier"
            assert error["message"].endswith("must be one of auto, default, flex, priority")
            assert "\n" not in error["message"]
        response = await served.post(path, {**BODIES[path], "slo_class": "flex"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "slo_class")

    run(scenario, parts=parts())


def test_the_servers_default_class_is_for_those_that_name_none():
    async def scenario(served):
        seen = noting(served)
        cases: list[tuple[dict[str, Any], str, str]] = [
            ({}, "be", "flex"),
            ({"service_tier": "auto"}, "be", "flex"),
            ({"service_tier": "priority"}, "rt", "priority"),
            ({"slo_class": "rt"}, "rt", "default"),
        ]
        for fields, slo_class, used in cases:
            for path in BODIES:
                seen.clear()
                assert (await ask(served, path, **fields))["service_tier"] == used
                # Default objectives are those of real-time requests.
                assert set(seen) == {(slo_class, SLO(ttft_s=2.0) if slo_class == "rt" else SLO())}

    run(scenario, parts=parts(default_slo_class="be", default_slo=SLO(ttft_s=2.0)))
