"""Guidance over OpenAI's API."""

import json

import guidance
from guidance.models import OpenAI
from harness import BASE_URL, CITY_SCHEMA, KEY, MODEL, QUESTION, expect, feature, run


def ask() -> OpenAI:
    lm = OpenAI(MODEL, base_url=BASE_URL, api_key=KEY, echo=False)
    with guidance.user():
        lm += QUESTION
    return lm


@feature("chat")
def chat() -> None:
    lm = ask()
    with guidance.assistant():
        lm += guidance.gen("answer", max_tokens=12)
    expect(lm["answer"])


@feature("JSON schema")
def json_schema() -> None:
    lm = ask()
    with guidance.assistant():
        lm += guidance.json("answer", schema=CITY_SCHEMA, max_tokens=200)
    expect(set(json.loads(lm["answer"])) == {"city", "people"})


run()
