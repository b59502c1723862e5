"""Anthropic's Messages API: `apt-jax serve smollm2-135m`, then `python examples/messages_client.py`.

The client is not part of apt-jax: `pip install anthropic`.
"""

import sys

from anthropic import Anthropic  # pyright: ignore[reportMissingImports] - not part of the development environment


def main(base_url: str = "http://127.0.0.1:8000") -> None:
    client = Anthropic(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    print("tokens of the prompt:", client.messages.count_tokens(model=model, messages=messages).input_tokens)
    with client.messages.stream(
        model=model, max_tokens=64, messages=messages, stop_sequences=["\n"], extra_body={"temperature": 0}
    ) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        message = stream.get_final_message()
    print(f"\n{message.stop_reason}, {message.usage.output_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
