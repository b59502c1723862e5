"""Instructor, in its modes for OpenAI-compatible servers."""

import instructor
from harness import BASE_URL, KEY, MODEL, QUESTION, expect, feature, run
from openai import OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    city: str = Field(max_length=30)
    people: int = Field(ge=0, le=99)


def check(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=KEY), mode=mode)
    messages = [{"role": "user", "content": QUESTION}]
    made = client.chat.completions.create(
        model=MODEL, messages=messages, response_model=City, max_tokens=200, max_retries=0
    )
    expect(isinstance(made, City))


@feature("tools, required")
def tools() -> None:
    check(instructor.Mode.TOOLS)


@feature("tools, strict")
def tools_strict() -> None:
    check(instructor.Mode.TOOLS_STRICT)


@feature("JSON schema")
def json_schema() -> None:
    check(instructor.Mode.JSON_SCHEMA)


@feature("Responses")
def responses() -> None:
    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=KEY), mode=instructor.Mode.RESPONSES_TOOLS)
    made = client.responses.create(
        model=MODEL, input=QUESTION, response_model=City, max_output_tokens=200, max_retries=0
    )
    expect(isinstance(made, City))


@feature("streams")
def streams() -> None:
    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=KEY))
    messages = [{"role": "user", "content": QUESTION}]
    made = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=messages, response_model=City, max_tokens=200, max_retries=0
        )
    )
    expect(made[-1].city is not None)


run()
