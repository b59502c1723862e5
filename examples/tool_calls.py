"""Let a model call functions: the call, its result back to the model, and the answer.

    apt-jax serve smollm2-135m
    python examples/tool_calls.py

The call is required, so that its arguments follow the schema whatever the model; `tool_choice="auto"`, the default,
leaves the choice to a model that knows when to call.
"""

import argparse
import json

from openai import OpenAI
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam

WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome", "Tokyo"]}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}


def get_weather(city: str, unit: str) -> str:
    """Return a weather report, in place of a real look-up."""
    return f"Sunny in {city}, {25 if unit == 'celsius' else 77} degrees {unit}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("base_url", nargs="?", default="http://127.0.0.1:8000/v1", help="address of the server")
    client = OpenAI(base_url=parser.parse_args().base_url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]

    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
    )
    message = answer.choices[0].message
    messages.append(message.to_dict())  # type: ignore[arg-type]  # the message as it came
    for call in message.tool_calls or []:
        assert call.type == "function"
        result = get_weather(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=60)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
