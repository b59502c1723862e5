"""`/v1/embeddings` with an executor whose states are those of plain arithmetic."""

import asyncio
import base64

import numpy as np
import pytest

from tests.support.fake_executor import reference_embedding
from tests.support.http_serving import run
from tests.support.toy_serving import toy_parts

TEXTS = ["hello", "another and longer text", "x"]


def expected(served, text: str, pooling: str = "last", normalize: bool = True) -> np.ndarray:
    states = reference_embedding(np.asarray(served.parts.tokenizer.encode(text)), pooling)
    return states / np.linalg.norm(states) if normalize else states


async def ask(served, **fields):
    response = await served.post("/v1/embeddings", {"model": "toy", **fields})
    return response.status_code, response.json()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_pooled_states_of_each_text(pooling):
    async def scenario(served):
        status, answer = await ask(served, input=TEXTS, pooling=pooling)
        assert status == 200
        assert [item["index"] for item in answer["data"]] == [0, 1, 2]
        for item, text in zip(answer["data"], TEXTS, strict=True):
            np.testing.assert_allclose(item["embedding"], expected(served, text, pooling), rtol=1e-6)
        total = sum(len(served.parts.tokenizer.encode(text)) for text in TEXTS)
        assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}
        ids = served.parts.tokenizer.encode(TEXTS[1])
        for given in (TEXTS[1], ids, [ids]):
            again = (await ask(served, input=given, pooling=pooling, normalize=False))[1]["data"]
            np.testing.assert_allclose(again[0]["embedding"], expected(served, TEXTS[1], pooling, False), rtol=1e-6)
        assert served.parts.engine.num_live == 0

    run(scenario)


def test_base64_and_fewer_dimensions():
    async def scenario(served):
        whole = expected(served, TEXTS[0], normalize=False)
        answer = (await ask(served, input=TEXTS[0], encoding_format="base64", dimensions=2))[1]
        found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
        np.testing.assert_allclose(found, whole[:2] / np.linalg.norm(whole[:2]), rtol=1e-6)

    run(scenario)


def test_long_prompts_in_many_steps_beside_others():
    async def scenario(served):
        texts = ["long " * count for count in (20, 3, 13)]
        calls = [ask(served, input=texts, pooling="mean") for _ in range(4)]
        others = [served.ask("hello", max_tokens=20) for _ in range(3)]
        answers = await asyncio.gather(*calls, *others)
        for status, answer in answers[:4]:
            assert status == 200
            for item, text in zip(answer["data"], texts, strict=True):
                np.testing.assert_allclose(item["embedding"], expected(served, text, "mean"), rtol=1e-5, atol=1e-6)
        assert served.parts.engine.num_live == 0

    run(scenario, num_blocks=40)


def test_what_is_refused():
    async def scenario(served):
        for fields, param in (
            ({}, "input"),
            ({"input": []}, "input"),
            ({"input": ""}, "input"),
            ({"input": ["a", 5]}, "input"),
            ({"input": {"text": "a"}}, "input"),
            ({"input": "a", "pooling": "max"}, "pooling"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
            ({"input": "a", "dimensions": 0}, "dimensions"),
            ({"input": "a", "dimensions": True}, "dimensions"),
            ({"input": "a", "normalize": 1}, "normalize"),
            ({"input": "a", "stream": True}, "stream"),
            ({"input": ["a"] * 129}, "input"),
            ({"input": ["a", "b"], "request_id": ""}, "request_id"),
        ):
            status, answer = await ask(served, **fields)
            assert status == 400, fields
            assert answer["error"]["param"].partition("[")[0] == param, answer
        assert (await ask(served, input="a", model="other"))[0] == 404

    run(scenario, parts=toy_parts())


def test_a_client_that_leaves_ends_its_embeddings():
    async def scenario(served):
        call = asyncio.create_task(ask(served, input=["long " * 13] * 8, pooling="mean"))
        while not served.parts.engine.num_live:
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        async with asyncio.timeout(10):
            while served.parts.engine.num_live:
                await asyncio.sleep(0.001)
        assert (await ask(served, input="hello"))[0] == 200

    run(scenario, step_s=0.02)


def test_scores_are_cosines():
    async def score(served, **fields):
        response = await served.post("/v1/score", {"model": "toy", **fields})
        return response.status_code, response.json()

    async def scenario(served):
        units = [expected(served, text) for text in TEXTS]
        for first, second, pairs in (
            (TEXTS[0], TEXTS[1], [(0, 1)]),
            (TEXTS[0], TEXTS[1:], [(0, 1), (0, 2)]),
            (TEXTS[:2], TEXTS[1:], [(0, 1), (1, 2)]),
            ([TEXTS[2]], TEXTS, [(2, 0), (2, 1), (2, 2)]),
        ):
            status, answer = await score(served, text_1=first, text_2=second)
            assert status == 200
            assert [item["index"] for item in answer["data"]] == list(range(len(pairs)))
            wanted = [float(units[a] @ units[b]) for a, b in pairs]
            np.testing.assert_allclose([item["score"] for item in answer["data"]], wanted, rtol=1e-5, atol=1e-6)
        mean = float(expected(served, TEXTS[0], "mean") @ expected(served, TEXTS[1], "mean"))
        answer = (await score(served, text_1=TEXTS[0], text_2=TEXTS[1], pooling="mean"))[1]
        np.testing.assert_allclose(answer["data"][0]["score"], mean, rtol=1e-5)
        for fields, param in (
            ({"text_1": "a"}, "text_2"),
            ({"text_2": "a"}, "text_1"),
            ({"text_1": [], "text_2": "a"}, "text_1"),
            ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
            ({"text_1": "a", "text_2": ["a", 5]}, "text_2[1]"),
            ({"text_1": [1, 2], "text_2": ["a"]}, "text_1[0]"),
            ({"text_1": "", "text_2": "a"}, "text_1[0]"),
            ({"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
            ({"text_1": "a", "text_2": "b " * 2000}, "text_2[0]"),
            ({"text_1": "a", "text_2": ["a"] * 128}, "text_2"),
            ({"text_1": "a", "text_2": "b", "pooling": "max"}, "pooling"),
            ({"text_1": "a", "text_2": "b", "stream": True}, "stream"),
        ):
            status, answer = await score(served, **fields)
            assert (status, answer["error"]["param"]) == (400, param), answer

    run(scenario, parts=toy_parts())
