"""OpenAI's Responses API: `apt-jax serve smollm2-135m`, then `python examples/responses_client.py`.

The client is not part of apt-jax: `pip install openai`.

The server stores nothing: a conversation goes on by sending its items again.
"""

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    conversation = []
    for question in ("What is the capital of France?", "And of Italy?"):
        print(f"> {question}")
        conversation.append({"role": "user", "content": question})
        with client.responses.stream(
            model=model, instructions="Be brief.", input=conversation, temperature=0, store=False
        ) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    print(event.delta, end="", flush=True)
                if event.type == "response.completed" or event.type == "response.incomplete":
                    conversation += [item.to_dict() for item in event.response.output]
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
