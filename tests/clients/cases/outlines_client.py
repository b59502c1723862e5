"""Outlines over OpenAI's client, as vLLM's and as SGLang's."""

import json
import re
from typing import Literal

import openai
import outlines
from harness import BASE_URL, KEY, MODEL, QUESTION, expect, feature, run
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY)


class City(BaseModel):
    city: str = Field(max_length=30)
    people: int = Field(ge=0, le=99)


@feature("chat")
def chat() -> None:
    expect(outlines.from_openai(client, MODEL)(QUESTION, max_tokens=8))


@feature("JSON schema")
def json_schema() -> None:
    for make in (outlines.from_openai, outlines.from_vllm, outlines.from_sglang):
        City.model_validate(json.loads(make(client, MODEL)(QUESTION, City, max_tokens=200)))


@feature("regex, choice, grammar")
def others() -> None:
    for make in (outlines.from_vllm, outlines.from_sglang):
        expect(re.fullmatch("[0-9]{3}", make(client, MODEL)(QUESTION, Regex("[0-9]{3}"), max_tokens=8)))
        expect(make(client, MODEL)(QUESTION, Literal["Paris", "Rome"], max_tokens=8) in ("Paris", "Rome"))
    made = outlines.from_vllm(client, MODEL)(QUESTION, CFG('start: "yes" | "no"'), max_tokens=8)
    expect(made in ("yes", "no"), made)


run()
