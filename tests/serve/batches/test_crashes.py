"""A server that is killed in the middle of a batch: nothing is lost, and nothing is there twice."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.serve.batches.test_batches import jsonl, line
from tests.support.toy_server import server_parts
from tests.support.toy_serving import expected_tokens

ROOT = Path(__file__).resolve().parents[3]
NUM_REQUESTS = 1000


@contextlib.contextmanager
def server(directory: Path) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.toy_batches", str(directory), "2"],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=30) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def completed(client: httpx2.Client, batch_id: str) -> int:
    return client.get(f"/batches/{batch_id}").json()["request_counts"]["completed"]


@pytest.mark.slow
def test_kill_9_in_the_middle_loses_and_repeats_nothing(tmp_path):
    lines = [line(f"r{i}", prompt=f"number {i}", max_tokens=5 + i % 20) for i in range(NUM_REQUESTS)]
    rng, batch_id, before = random.Random(3), "", 0
    for attempt in range(5):
        with server(tmp_path) as (process, client):
            if not attempt:
                form = {"files": {"file": ("in.jsonl", jsonl(lines))}, "data": {"purpose": "batch"}}
                file_id = client.post("/files", **form).json()["id"]
                body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "1h"}
                batch_id = client.post("/batches", json=body).json()["id"]
            else:
                assert completed(client, batch_id) >= before  # what was told is kept
            wanted = before + rng.randint(1, NUM_REQUESTS // 8)
            while (before := completed(client, batch_id)) < wanted:
                time.sleep(0.002)
            assert before < NUM_REQUESTS
            process.kill()
    with server(tmp_path) as (_, client):
        while (batch := client.get(f"/batches/{batch_id}").json())["status"] in ("in_progress", "finalizing"):
            time.sleep(0.02)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": NUM_REQUESTS, "completed": NUM_REQUESTS, "failed": 0}
        text = client.get(f"/files/{batch['output_file_id']}/content").text
    output = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, text.splitlines())}
    assert Counter(json.loads(one)["custom_id"] for one in text.splitlines()) == Counter(
        f"r{i}" for i in range(NUM_REQUESTS)
    )
    parts = server_parts()
    assert parts.tokenizer is not None
    for asked in lines:
        fields = dict(asked["body"])
        request = parts.build_request(prompt=fields.pop("prompt"), params=fields)
        text = parts.tokenizer.decode(expected_tokens(request), skip_special_tokens=True)
        assert output[asked["custom_id"]]["choices"][0]["text"] == text
