"""Run a batch with OpenAI's client: `apt-jax serve tiny-opt --batch-dir /tmp/batches`, then `python examples/batch.py`.

The client is not part of apt-jax: `pip install openai`.
"""

import json
import sys
import time

from openai import OpenAI

PROMPTS = ("The king said", "Once upon a time", "In the garden")


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    lines = [
        {
            "custom_id": f"prompt-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0},
        }
        for number, prompt in enumerate(PROMPTS)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    print(batch.status, batch.request_counts)
    if batch.output_file_id is not None:
        for line in client.files.content(batch.output_file_id).text.splitlines():
            answer = json.loads(line)
            print(answer["custom_id"], repr(answer["response"]["body"]["choices"][0]["text"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
