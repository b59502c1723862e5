"""Reading input files: what ended the server twice is not read again, tenants take turns, and a batch can end before its
file has been read."""

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from serve.batches import runner
from serve.batches.input_file import InputRead, read_input
from serve.batches.runner import MAX_VALIDATIONS
from serve.security.api_keys import ApiKeys
from tests.serve.batches.test_batches import KEY, OTHER, create, ended, jsonl, line, lines_of, store_at
from tests.support.http_serving import HttpServed, http_serving, run

ROOT = Path(__file__).resolve().parents[3]
SLOW = b'{"slow": true}'
"""A first line of files that are being read until it is over."""


class Reading:
    """Reads files as the server does, but for those that begin with `SLOW`."""

    def __init__(self) -> None:
        self.begun: list[Path] = []
        self.goes_on = threading.Event()
        """Files that begin with `SLOW` are read on."""

    def __call__(
        self, path: Path, endpoint: str, config: Any, check: Any, is_over: Callable[[], bool]
    ) -> InputRead | None:
        self.begun.append(path)
        if path.read_bytes().startswith(SLOW):
            while not is_over() and not self.goes_on.is_set():
                time.sleep(0.002)
        return read_input(path, endpoint, config, check, is_over)


@pytest.fixture
def reading(monkeypatch) -> Reading:
    made = Reading()
    monkeypatch.setattr(runner, "read_input", made)
    return made


def counts(directory: Path) -> list[int]:
    """Validations that have begun and not ended, as they are on disk, of all batches."""
    with tempfile.TemporaryDirectory() as copy:  # the server has the database to itself
        for path in directory.glob("batches.sqlite3*"):
            shutil.copy(path, copy)
        with contextlib.closing(sqlite3.connect(f"{copy}/batches.sqlite3")) as db:
            return [row[0] for row in db.execute("SELECT num_validations FROM batches ORDER BY number")]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def test_a_file_in_whose_reading_the_server_ended_twice_fails_alone(tmp_path, reading):
    """A copy of the directory while a file is read is what a server that ends then leaves."""
    ends = [tmp_path / f"end{number}" for number in range(MAX_VALIDATIONS + 1)]
    ids: list[str] = []

    async def starts(number: int) -> None:
        async with http_serving(app={"batches": store_at(ends[number])}) as served:
            client: Any = served.openai
            if not number:
                for data in ([SLOW], [line("a"), line("b")]):
                    ids.append((await create(client, jsonl(data))).id)
            if number < MAX_VALIDATIONS:
                await until(lambda: counts(ends[number]) == [number + 1, 0])  # the second one waits
                shutil.copytree(ends[number], ends[number + 1])
                return
            batch = await ended(client, ids[0])
            assert (batch.status, batch.errors.data[0].code) == ("failed", "validation_interrupted")
            message = batch.errors.data[0].message
            assert "stopped 2 times while reading the input file" in message
            assert "create the batch again" in message
            other = await ended(client, ids[1])
            assert other.status == "completed"
            assert len(await lines_of(client, other.output_file_id)) == 2
            assert len(reading.begun) == MAX_VALIDATIONS + 1  # that of the other

    for number in range(MAX_VALIDATIONS + 1):
        asyncio.run(starts(number))


def test_an_orderly_end_does_not_count(tmp_path, reading):
    batch_id = ""

    async def begin() -> None:
        nonlocal batch_id
        async with http_serving(app={"batches": store_at(tmp_path)}) as served:
            if not batch_id:
                batch_id = (await create(served.openai, jsonl([SLOW]))).id
            await until(lambda: counts(tmp_path) == [1])

    for _ in range(MAX_VALIDATIONS + 1):
        asyncio.run(begin())
        assert counts(tmp_path) == [0]

    async def scenario(served: HttpServed) -> None:
        reading.goes_on.set()
        batch = await ended(served.openai, batch_id)
        assert batch.errors.data[0].code == "missing_required_parameter"  # it was read

    run(scenario, app={"batches": store_at(tmp_path)})


def test_a_batch_whose_file_is_being_read_can_be_cancelled_and_expires(tmp_path, reading, monkeypatch):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        batch = await create(client, jsonl([SLOW]))
        await until(lambda: len(reading.begun) == 1)
        await client.batches.cancel(batch.id)
        assert (await ended(client, batch.id)).status == "cancelled"
        monkeypatch.setattr("serve.batches.http.routes.window_s", lambda _: 1)
        batch = await ended(client, (await create(client, jsonl([SLOW, line("a")]))).id)
        assert (batch.status, batch.expired_at is not None) == ("expired", True)
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        assert batch.request_counts.total == 0
        assert len(reading.begun) == 2

    run(scenario, app={"batches": store_at(tmp_path)})


def test_keys_take_turns_with_their_files(tmp_path, reading):
    keys = ApiKeys((KEY, OTHER))

    async def scenario(served: HttpServed) -> None:
        async with asyncio.timeout(30):
            ours, theirs = served.openai.copy(api_key=KEY), served.openai.copy(api_key=OTHER)
            batches = [await create(ours, jsonl([SLOW if not i else line("a")])) for i in range(3)]
            await until(lambda: len(reading.begun) == 1)
            batches.append(await create(theirs, jsonl([line("a")])))
            reading.goes_on.set()
            await until(lambda: len(reading.begun) == 4)
        files = [
            batches[i].input_file_id for i in (0, 1, 3, 2)
        ]  # the first of ours that waited, theirs, the other of ours
        assert [path.name for path in reading.begun] == files
        for client, batch in zip((ours, ours, ours, theirs), batches, strict=True):
            await ended(client, batch.id)

    run(scenario, app={"batches": store_at(tmp_path), "keys": keys})


CHILD = """
import asyncio, os, sys, time
from serve.batches import runner
from tests.support import toy_batches
read = runner.read_input
def freezes(path, *args, **kwargs):
    while path.read_bytes().startswith(b'{"slow"'):
        time.sleep(0.01)
    return read(path, *args, **kwargs)
runner.read_input = freezes
asyncio.run(toy_batches.main(sys.argv[1], 0))
"""


@contextlib.contextmanager
def server(directory: Path) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    """A server that reads files that begin with `SLOW` for ever."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=30) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_kill_9_while_a_file_is_read_is_survived_at_the_third_start(tmp_path):
    ids: list[str] = []
    for start in range(MAX_VALIDATIONS):
        with server(tmp_path) as (_, client):
            for data in ([SLOW], [line("a"), line("b")]) if not start else ():
                form = {"files": {"file": ("in.jsonl", jsonl(list(data)))}, "data": {"purpose": "batch"}}
                file_id = client.post("/files", **form).json()["id"]
                body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "1h"}
                ids.append(client.post("/batches", json=body).json()["id"])
            asyncio.run(until(lambda wanted=start + 1: counts(tmp_path) == [wanted, 0]))
    with server(tmp_path) as (_, client):
        asyncio.run(until(lambda: client.get(f"/batches/{ids[1]}").json()["status"] == "completed"))
        batch = client.get(f"/batches/{ids[0]}").json()
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "validation_interrupted")
