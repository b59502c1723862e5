"""Fields of vLLM and OpenAI: the page about them is true, and what is ignored is ignored on purpose."""

import pytest

from apt_jax.errors import InvalidRequestError
from serve.http_api.endpoints import ENDPOINTS
from tests.support.http_serving import HttpServed, run
from tests.support.request_fields import ASKING, FIELDS, IGNORED, PAGE, parts_for_fields, table, verdict


@pytest.fixture(scope="module")
def parts():
    made = parts_for_fields()
    yield made
    assert made.chat_template is not None
    made.chat_template.close()
    assert made.grammars is not None
    made.grammars.close()


def test_the_page_is_what_the_server_does(parts):
    assert PAGE.read_text() == table(parts), "python -m tests.support.request_fields"


def test_every_field_that_is_ignored_has_a_reason(parts):
    named = {field for apis in FIELDS.values() for names in apis.values() for field in names}
    assert named <= set(ASKING)
    found = {
        (path, field): verdict(parts, path, field)
        for path, apis in FIELDS.items()
        for n in apis.values()
        for field in n
    }
    assert {field for (_, field), (what, _) in found.items() if what == "ignored"} <= set(IGNORED)
    assert all(why for what, why in found.values() if what != "served")


def test_priority_is_a_class():
    async def scenario(served: HttpServed) -> None:
        for fields, slo_class in (
            ({"priority": 5}, "be"),
            ({"priority": -5}, "rt"),
            ({"priority": 0}, "be"),
            ({}, "be"),
            ({"priority": 5, "slo_class": "rt"}, "rt"),
            ({"priority": -5, "service_tier": "flex"}, "rt"),
        ):
            for path, body in (
                ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
                ("/v1/embeddings", {"input": "a"}),
            ):
                endpoint = next(e for e in ENDPOINTS if e.path == path)
                call = endpoint.read(served.parts, {**body, **fields}, {}, 0.0, None)
                assert {request.slo_class for request in call.requests} == {slo_class}
        for value in ("1", 1.5, True, 2**63):
            refused = await served.post("/v1/completions", {"prompt": "a", "priority": value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")

    run(scenario, default_slo_class="be")


@pytest.mark.parametrize(
    "field", ["use_beam_search", "logits_processors", "documents", "chat_template", "watermarking"]
)
def test_refusals_name_the_way_out(parts, field):
    endpoint = next(e for e in ENDPOINTS if e.path == "/v1/completions")
    with pytest.raises(InvalidRequestError, match=f"^{field}: is not supported; "):
        endpoint.read(parts, {"prompt": "a", field: ASKING[field]}, {}, 0.0, None)
