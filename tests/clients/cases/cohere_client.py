"""Cohere's SDK: its rerank."""

import cohere
from harness import KEY, MODEL, QUESTION, ROOT_URL, expect, feature, run

DOCUMENTS = ["Paris is the capital of France.", "A cat sleeps.", "What is the capital of France?"]


@feature("rerank")
def rerank() -> None:
    for client in (cohere.ClientV2(KEY, base_url=ROOT_URL), cohere.Client(KEY, base_url=ROOT_URL)):
        made = client.rerank(model=MODEL, query=QUESTION, documents=DOCUMENTS, top_n=2)
        scores = [one.relevance_score for one in made.results]
        expect(len(scores) == 2 and scores == sorted(scores, reverse=True), made)
        expect(made.results[0].index == 2, made)


@feature("refused by name")
def refused() -> None:
    try:
        cohere.ClientV2(KEY, base_url=ROOT_URL).rerank(model=MODEL, query=QUESTION, documents=[])
    except cohere.errors.BadRequestError as error:
        expect("documents" in str(error.body), error)
    else:
        raise AssertionError("accepted")


run()
