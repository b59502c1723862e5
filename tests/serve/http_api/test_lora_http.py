"""LoRA adapters over HTTP and gRPC: chosen by the model's name, listed as models."""

from tests.support.fake_executor import reference_tokens
from tests.support.http_serving import run
from tests.support.toy_serving import VOCAB_SIZE, toy_parts

ADAPTERS = ("french", "team/sql")


def expected(served, prompt: str, number: int, num_tokens: int = 8) -> list[int]:
    return reference_tokens(served.parts.tokenizer.encode(prompt), num_tokens, vocab_size=VOCAB_SIZE, adapter=number)


def test_the_models_name_chooses_the_adapter():
    async def scenario(served):
        for number, name in enumerate(("toy", *ADAPTERS)):
            answer = await served.ask("hello", model=name, max_tokens=8, return_token_ids=True)
            assert answer["choices"][0]["token_ids"] == expected(served, "hello", number)
            assert answer["model"] == name
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = await served.ask("hello", model="french", max_tokens=8, return_token_ids=True)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        assert (await served.ask("hello", max_tokens=1))["model"] == "toy"
        refused = await served.post("/v1/completions", {"model": "dutch", "prompt": "hello"})
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"

    run(scenario, parts=toy_parts(adapters=ADAPTERS))


def test_adapters_are_listed_as_models():
    async def scenario(served):
        cards = (await served.http.get("/v1/models")).json()["data"]
        found = [(card["id"], card["parent"], card["root"]) for card in cards]
        assert found == [
            ("toy", None, "toy"),
            ("french", "toy", "adapters/french"),
            ("team/sql", "toy", "adapters/team/sql"),
        ]
        for card in cards:
            assert (await served.http.get(f"/v1/models/{card['id']}")).json() == card
        document = (await served.http.get("/openapi.json")).json()
        names = document["components"]["schemas"]["CompletionRequest"]["properties"]["model"]["enum"]
        assert set(ADAPTERS) <= set(names)

    run(scenario, parts=toy_parts(adapters=ADAPTERS))


def test_grpc_chooses_by_the_same_name():
    async def scenario(served):
        for number, name in enumerate(("toy", *ADAPTERS)):
            tokens = []
            async for message in served.grpc.generate(
                prompt="hello", model=name, temperature=0.0, ignore_eos=True, max_tokens=8
            ):
                tokens += message.token_ids
            assert tokens == expected(served, "hello", number)

    run(scenario, parts=toy_parts(adapters=ADAPTERS))
