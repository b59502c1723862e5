"""LiteLLM, under the names that it has for servers like this one."""

import litellm
from harness import BASE_URL, CITY_SCHEMA, KEY, MODEL, QUESTION, expect, feature, run
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "note_city", "description": "Note a city", "parameters": CITY_SCHEMA}}
AT = {"api_base": BASE_URL, "api_key": KEY}


class City(BaseModel):
    city: str = Field(max_length=30)
    people: int = Field(ge=0, le=99)


@feature("chat")
def chat() -> None:
    for provider in ("openai", "hosted_vllm", "lm_studio", "llamafile"):
        made = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, max_tokens=8, **AT)
        expect(made.choices[0].message.content, provider)


@feature("completions")
def completions() -> None:
    made = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="One two", max_tokens=8, **AT)
    expect(made.choices[0].text)


@feature("streams")
def streams() -> None:
    expect(list(litellm.completion(model=f"hosted_vllm/{MODEL}", messages=MESSAGES, max_tokens=8, stream=True, **AT)))


@feature("JSON schema")
def json_schema() -> None:
    made = litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, max_tokens=200, response_format=City, **AT)
    City.model_validate_json(made.choices[0].message.content)


@feature("tools, required")
def tools_required() -> None:
    for provider in ("openai", "hosted_vllm"):
        made = litellm.completion(
            model=f"{provider}/{MODEL}", messages=MESSAGES, max_tokens=200, tools=[TOOL], tool_choice="required", **AT
        )
        City.model_validate_json(made.choices[0].message.tool_calls[0].function.arguments)


@feature("Responses")
def responses() -> None:
    expect(litellm.responses(model=f"openai/{MODEL}", input=QUESTION, max_output_tokens=16, **AT).output)


@feature("Messages")
async def messages() -> None:
    made = await litellm.anthropic.messages.acreate(model=f"openai/{MODEL}", messages=MESSAGES, max_tokens=16, **AT)
    expect(made["content"])


@feature("embeddings")
def embeddings() -> None:
    expect(len(litellm.embedding(model=f"openai/{MODEL}", input=["one", "two"], **AT).data) == 2)


run()
