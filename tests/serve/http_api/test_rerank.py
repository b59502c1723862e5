"""Documents by their similarity to a query."""

import pytest

from tests.support.http_serving import HttpServed, run

BODY = {"query": "hello", "documents": ["you", {"text": "hello"}, "there"]}


def test_documents_are_ordered_by_their_scores():
    async def scenario(served: HttpServed) -> None:
        score = {"text_1": "hello", "text_2": ["you", "hello", "there"]}
        scores = [row["score"] for row in (await served.post("/v1/score", score)).json()["data"]]
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            response = await served.post(path, BODY)
            found = response.json()
            assert response.headers["x-request-id"] == found["id"]
            want = sorted(range(3), key=lambda index: -scores[index])
            assert [row["index"] for row in found["results"]] == want
            assert [row["relevance_score"] for row in found["results"]] == pytest.approx([scores[i] for i in want])
            assert found["results"][0]["document"] == {"text": ["you", "hello", "there"][want[0]]}
        best = (await served.post("/v1/rerank", {**BODY, "top_n": 1, "return_documents": False})).json()
        assert [row["index"] for row in best["results"]] == want[:1]
        assert "document" not in best["results"][0]
        all_of_them = (await served.post("/v1/rerank", {**BODY, "top_n": 0})).json()
        assert len(all_of_them["results"]) == 3

    run(scenario)


def test_mistakes_are_told_by_the_names_of_the_body():
    async def scenario(served: HttpServed) -> None:
        for fields, param in (
            ({"query": 5}, "query"),
            ({"query": ""}, "query"),
            ({"query": "x" * 9000}, "query"),
            ({"documents": "a"}, "documents"),
            ({"documents": []}, "documents"),
            ({"documents": ["a", 5]}, "documents[1]"),
            ({"documents": ["a", {}]}, "documents[1]"),
            ({"documents": ["a", "x" * 9000]}, "documents[1]"),
            ({"top_n": -1}, "top_n"),
            ({"return_documents": "yes"}, "return_documents"),
            ({"stream": True}, "stream"),
        ):
            response = await served.post("/v1/rerank", {**BODY, **fields})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text

    run(scenario)


def test_load_and_facts_are_told():
    async def scenario(served: HttpServed) -> None:
        assert (await served.http.get("/load")).json() == {"server_load": 0}
        facts = (await served.http.get("/server_info")).json()
        assert (facts["model"], facts["max_model_len"], facts["scheduling_policy"]) == ("toy", 256, "fcfs")
        hint = (await served.http.get("/get_model_info")).json()["error"]["message"]
        assert hint == "there is nothing at '/get_model_info'; use /v1/models"

    run(scenario)
