"""Uploads: malformed and oversized forms, slow clients, and what they leave on disk."""

import asyncio
import os
from typing import Any

import pytest

from serve.batches.config import BatchConfig
from serve.batches.store import BatchStore
from tests.support.http_serving import HttpServed, run


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    of_file = "" if filename is None else f'; filename="{filename}"'
    return f'--B\r\ncontent-disposition: form-data; name="{name}"{of_file}\r\n\r\n'.encode() + data + b"\r\n"


PURPOSE, FILE, END = part("purpose", b"batch"), part("file", b"{}\n", "a.jsonl"), b"--B--\r\n"
FORMS: list[tuple[bytes, int, str | None]] = [
    (PURPOSE + END, 400, "file"),
    (FILE + END, 400, "purpose"),
    (part("purpose", b"assistants") + FILE + END, 400, "purpose"),
    (PURPOSE + FILE, 400, "body"),
    (PURPOSE + FILE[:-8], 400, "body"),
    (PURPOSE + FILE + FILE + END, 400, "file"),
    (PURPOSE + part("file", b"x") + END, 400, "file"),
    (part("purpose", b"x" * 2000) + FILE + END, 400, "purpose"),
    (b"".join(part(f"f{i}", b"") for i in range(9)) + FILE + END, 400, "body"),
    (b"--B\r\nx-large: " + b"y" * 5000 + b"\r\n\r\n", 400, "body"),
    (b"--B\r\n\r\nnameless\r\n" + END, 400, "body"),
    (b"no form at all", 400, "body"),
    (b"", 400, "body"),
    (PURPOSE + part("expires_after[anchor]", b"created_at") + part("expires_after[seconds]", b"1e9") + FILE + END, 400, "expires_after.seconds"),
    (PURPOSE + part("file", b"x" * 5001, "big") + END, 413, None),
    (b"x" * 80_000, 413, None),
]  # fmt: skip
FORM_TYPE = {"content-type": "multipart/form-data; boundary=B"}


async def in_pieces(data: bytes, size: int) -> Any:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@pytest.mark.parametrize("chunked", [False, True])
def test_forms_that_cannot_be_taken_leave_nothing(tmp_path, chunked):
    async def scenario(served: HttpServed) -> None:
        for data, status, param in FORMS[: -1 if chunked else None]:  # the last says how long it is
            content: Any = in_pieces(data, 700) if chunked else data
            response = await served.http.post("/v1/files", content=content, headers=FORM_TYPE)
            assert response.status_code == status, (data[:80], response.text)
            error = response.json()["error"]
            assert error["param"] == param, (data[:80], error)
            assert "\n" not in error["message"]
        for kind in (
            "application/json",
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "text/plain; boundary=B",
        ):
            response = await served.http.post("/v1/files", content=PURPOSE + FILE + END, headers={"content-type": kind})
            assert response.status_code == 415, kind
        assert os.listdir(tmp_path / "files") == []
        pieces: Any = in_pieces(FILE + PURPOSE + END, 1)
        response = await served.http.post("/v1/files", content=pieces, headers=FORM_TYPE)
        assert response.json()["bytes"] == 3  # whatever the order and the pieces

    run(scenario, app={"batches": BatchStore(BatchConfig(directory=tmp_path, max_file_bytes=5000))})


def test_slow_and_broken_uploads_leave_nothing_and_few_run_at_once(tmp_path):
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=B\r\ncontent-length: 3000\r\n\r\n"

    async def scenario(served: HttpServed) -> None:
        slow = [await served.raw(head + PURPOSE + FILE[:40]) for _ in range(2)]
        await served.until(lambda: len(os.listdir(tmp_path / "files")) == 2)
        response = await served.http.post("/v1/files", content=PURPOSE + FILE + END, headers=FORM_TYPE)
        assert response.status_code == 429
        await slow[0].close()
        status, answer = await slow[1].answer()
        assert (status, answer["error"]["code"]) == (408, "body_timeout")
        await slow[1].close()
        await served.until(lambda: not os.listdir(tmp_path / "files"))
        response = await served.http.post("/v1/files", content=PURPOSE + FILE + END, headers=FORM_TYPE)
        assert response.status_code == 200
        await asyncio.sleep(0)

    store = BatchStore(BatchConfig(directory=tmp_path, max_uploads=4))
    run(scenario, app={"batches": store, "body_timeout_s": 0.3})
