"""Call a server with OpenAI's client: `apt-jax serve tiny-opt`, then `python examples/openai_client.py`.

The client is not part of apt-jax: `pip install openai`.

Fields that OpenAI's API does not have, such as the SLO, go into `extra_body`.
"""

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model,
        prompt="The king said",
        max_tokens=24,
        temperature=0.0,
        stream=True,
        extra_body={"slo": {"ttft_ms": 500, "tbt_ms": 100}, "aptjax_timings": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
