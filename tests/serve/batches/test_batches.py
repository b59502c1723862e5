"""Files and batches over HTTP, with the official client: what it gets, and what is refused."""

import asyncio
import collections
import dataclasses
import errno
import io
import json
import os
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest

from apt_jax.frontend.components import Unprepared
from apt_jax.sched import StepCosts
from serve.batches.calls import BatchCall
from serve.batches.config import BatchConfig
from serve.batches.feeder import BatchFeeder
from serve.batches.http import Batches
from serve.batches.input_file import read_input
from serve.batches.runner import BatchRunner
from serve.batches.store import BatchStore
from serve.batches.window import short_step_rows
from serve.http_api.app_config import AppConfig
from serve.http_api.embeddings import EmbeddingsResponse
from serve.http_api.server import HttpConfig, HttpServer
from serve.security.api_keys import ApiKeys
from tests.support.http_serving import HttpServed, http_serving, run
from tests.support.toy_serving import executor_of, toy_parts

KEY, OTHER = "sk-0123456789abcdefghij", "sk-another-key-of-a-tenant"
COMPLETIONS = "/v1/completions"


def line(custom_id: str, *, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> dict[str, Any]:
    given = {"prompt": f"say {custom_id}", "max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **body}
    return {"custom_id": custom_id, "method": method, "url": url, "body": given}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def store_at(path: Path, **bounds: Any) -> BatchStore:
    return BatchStore(BatchConfig(directory=path, **bounds))


async def upload(client: Any, data: bytes, name: str = "in.jsonl") -> str:
    return (await client.files.create(file=(name, io.BytesIO(data)), purpose="batch")).id


async def create(client: Any, data: bytes, window: Any = "24h", **fields: Any) -> Any:
    file_id = await upload(client, data)
    return await client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window=window, **fields
    )


async def ended(client: Any, batch_id: str) -> Any:
    async with asyncio.timeout(30):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status not in ("validating", "in_progress", "finalizing", "cancelling"):
                return batch
            await asyncio.sleep(0.005)


async def lines_of(client: Any, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = (await client.files.content(file_id)).text
    return [json.loads(one) for one in content.splitlines()]


def test_a_batch_gives_what_calls_give_and_an_error_for_each_line_that_cannot_run(tmp_path):
    good = [line(f"r{i}", max_tokens=3 + i % 5, prompt=f"prompt {i}") for i in range(24)]
    hurried = {"deadline_ms": 0.001, "slo": {"ttft_ms": 0.001}, "slo_e2e_ms": 0}  # without effect
    good[3]["body"] |= hurried
    bad = [line("long", max_tokens=10_000), line("stream", stream=True), line("unknown", best_of=3)]

    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        batch = await create(client, jsonl([*good, *bad]), metadata={"job": "night"})
        assert batch.status in ("validating", "in_progress")
        assert batch.expires_at - batch.created_at == 24 * 3600
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (27, 24, 3)
        assert batch.metadata == {"job": "night"}
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        out = await lines_of(client, batch.output_file_id)
        assert [one["custom_id"] for one in out] == [one["custom_id"] for one in good]
        tokens = 0
        for asked, one in zip(good, out, strict=True):
            body = one["response"]["body"]
            assert (one["error"], one["response"]["status_code"]) == (None, 200)
            assert one["response"]["request_id"] == body["id"]
            alone = await served.ask(**{name: value for name, value in asked["body"].items() if name not in hurried})
            assert body["choices"] == alone["choices"]
            assert body["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
            tokens += alone["usage"]["completion_tokens"]
        assert batch.usage.output_tokens == tokens
        errors = await lines_of(client, batch.error_file_id)
        assert [one["custom_id"] for one in errors] == ["long", "stream", "unknown"]
        for one, asked in zip(errors, bad, strict=True):
            assert (one["error"], one["response"]["status_code"]) == (None, 400)
            if asked["custom_id"] != "stream":  # a call would stream
                alone = await served.post(COMPLETIONS, asked["body"])
                assert one["response"]["body"] == alone.json()
        files = (await client.files.list()).data
        assert [file.purpose for file in files] == ["batch_output", "batch_output", "batch"]

    run(scenario, app={"batches": store_at(tmp_path)}, max_model_len=128)


def test_a_batch_of_embeddings_gives_what_calls_give(tmp_path, monkeypatch):
    threads: list[threading.Thread] = []
    whole = EmbeddingsResponse.whole

    def noted(self: EmbeddingsResponse, deltas: Any) -> bytes:
        threads.append(threading.current_thread())
        return whole(self, deltas)

    monkeypatch.setattr(EmbeddingsResponse, "whole", noted)
    asked = [
        {"custom_id": f"e{i}", "method": "POST", "url": "/v1/embeddings", "body": {"input": f"text {i}"}}
        for i in range(9)
    ]

    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        file_id = await upload(client, jsonl(asked))
        batch = await client.batches.create(input_file_id=file_id, endpoint="/v1/embeddings", completion_window="24h")
        batch = await ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 9)
        assert len(threads) == 9
        assert threading.main_thread() not in threads
        out = await lines_of(client, batch.output_file_id)
        tokens = 0
        for one, line in zip(out, asked, strict=True):
            alone = (await served.post("/v1/embeddings", line["body"])).json()
            assert one["response"]["body"]["data"] == alone["data"]
            tokens += alone["usage"]["prompt_tokens"]
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (tokens, 0)

    run(scenario, app={"batches": store_at(tmp_path)})


def test_files_are_kept_listed_by_pages_and_deleted(tmp_path):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        made = [await client.files.create(file=(f"{i}.jsonl", b"%d\n" % i), purpose="batch") for i in range(7)]
        assert [(f.filename, f.bytes, f.status) for f in made] == [(f"{i}.jsonl", 2, "processed") for i in range(7)]
        listed = [file.id async for file in client.files.list(limit=3)]
        assert listed == [file.id for file in reversed(made)]
        assert [f.id async for f in client.files.list(limit=2, order="asc")] == [file.id for file in made]
        assert [f.id async for f in client.files.list(purpose="batch_output")] == []
        assert (await client.files.retrieve(made[2].id)) == made[2]
        assert (await client.files.content(made[2].id)).content == b"2\n"
        assert (await client.files.delete(made[2].id)).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="no file"):
                await call(made[2].id)
        expiring = await client.files.create(
            file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert expiring.expires_at == expiring.created_at + 3600
        assert sorted(path.name for path in (tmp_path / "files").iterdir()) == sorted(
            [expiring.id, *(file.id for file in made if file is not made[2])]
        )

    run(scenario, app={"batches": store_at(tmp_path)})


BAD_LINES = [
    ([b"{"], "invalid_json_line", 1, None),
    ([line("a"), b"[1]"], "invalid_json_line", 2, None),
    ([line("a"), b"", line("b"), line("a")], "duplicate_custom_id", 4, "custom_id"),
    ([line("a", url="/v1/chat/completions")], "invalid_url", 1, "url"),
    ([line("a", method="GET")], "invalid_method", 1, "method"),
    ([line("a", model="gpt-9")], "model_not_found", 1, "body.model"),
    ([{**line("a"), "custom_id": 5}], "invalid_custom_id", 1, "custom_id"),
    ([b'{"custom_id": "\\ud800", "method": "POST", "url": "/v1/completions", "body": {}}'], "invalid_custom_id", 1, "custom_id"),
    ([{**line("a"), "body": "x"}], "invalid_body", 1, "body"),
    ([{"custom_id": "a", "method": "POST", "url": COMPLETIONS}], "missing_required_parameter", 1, "body"),
    ([line(str(i)) for i in range(9)], "too_many_requests", 9, None),
    ([line("a", prompt="x" * 3000)], "line_too_long", 1, None),
    ([], "empty_file", None, None),
    ([b"", b"  "], "empty_file", None, None),
    ([b""] * 9 + [line("a")], "too_many_blank_lines", 9, None),
]  # fmt: skip


def test_what_is_wrong_with_the_lines_fails_the_batch_and_runs_nothing(tmp_path):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        for lines, code, number, param in BAD_LINES:
            batch = await ended(client, (await create(client, jsonl(lines))).id)
            assert batch.status == "failed"
            assert batch.failed_at is not None
            assert batch.output_file_id is batch.error_file_id is None
            (problem,) = batch.errors.data
            assert (problem.code, problem.line, problem.param) == (code, number, param), problem
            assert problem.message
            assert "\n" not in problem.message
        many = await ended(client, (await create(client, b"{\n" * 500)).id)
        assert len(many.errors.data) == 100
        assert served.parts.engine.stats().generation_tokens == 0

    run(scenario, app={"batches": store_at(tmp_path, max_requests=8, max_line_bytes=2000)})


def test_what_cannot_be_asked_for_is_refused_in_one_line(tmp_path):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        http = served.http
        file_id = await upload(client, jsonl([line("a")]))
        good = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        for change, param in (
            ({"input_file_id": "file-none"}, "input_file_id"),
            ({"input_file_id": "\ud800"}, "input_file_id"),
            ({"input_file_id": 3}, "input_file_id"),
            ({"endpoint": "/v1/models"}, "endpoint"),
            *(({"completion_window": w}, "completion_window") for w in ("0m", "337h", "24", "1d", 24, "-1h", "")),
            ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"metadata": {"a" * 65: "x"}}, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ):
            response = await http.post("/v1/batches", content=json.dumps({**good, **change}).encode(), headers={"content-type": "application/json"})  # fmt: skip
            assert response.status_code == 400, change
            assert response.json()["error"]["param"] == param
        for query in ("limit=0", "limit=101", "limit=x", "limit=-1", "limit=%2b1"):
            assert (await http.get(f"/v1/batches?{query}")).status_code == 400
        assert (await http.get("/v1/files?order=up")).status_code == 400
        assert (await http.get("/v1/files?after=file-none")).status_code == 404
        for call in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="no batch"):
                await call("batch_none")
        batch = await ended(client, (await client.batches.create(**good)).id)
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await client.batches.cancel(batch.id)
        output = dict(good, input_file_id=batch.output_file_id)
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.batches.create(**output)

    run(scenario, app={"batches": store_at(tmp_path)})


def test_another_key_finds_neither_files_nor_batches(tmp_path):
    async def scenario(served: HttpServed) -> None:
        clients: list[Any] = [served.openai.with_options(api_key=key) for key in (KEY, OTHER)]
        mine, theirs = clients
        batch = await ended(mine, (await create(mine, jsonl([line("a")]))).id)
        assert batch.status == "completed"
        files = [file.id async for file in mine.files.list()]
        assert len(files) == 2
        assert [b.id async for b in mine.batches.list()] == [batch.id]
        assert [f async for f in theirs.files.list()] == [b async for b in theirs.batches.list()] == []
        for call in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
            for file_id in files:
                with pytest.raises(openai.NotFoundError):
                    await call(file_id)
        for call in (theirs.batches.retrieve, theirs.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        for kind, after in (("files", files[0]), ("batches", batch.id)):
            headers = {"authorization": f"Bearer {OTHER}"}
            assert (await served.http.get(f"/v1/{kind}?after={after}", headers=headers)).status_code == 404
        with pytest.raises(openai.BadRequestError, match="no file"):
            await theirs.batches.create(input_file_id=files[-1], endpoint=COMPLETIONS, completion_window="24h")

    run(scenario, app={"batches": store_at(tmp_path), "keys": ApiKeys([KEY, OTHER])})


def test_another_key_cannot_cancel_a_batch_that_runs(tmp_path):
    async def scenario(served: HttpServed) -> None:
        mine, theirs = (served.openai.with_options(api_key=key) for key in (KEY, OTHER))
        client: Any = mine
        gate = executor_of(served.parts).gate
        gate.clear()
        batch = await create(client, jsonl([line(f"r{i}") for i in range(5)]))
        await served.until(lambda: served.parts.engine.num_live > 0)
        for status in ("in_progress", "in_progress"):
            with pytest.raises(openai.NotFoundError):
                await theirs.batches.cancel(batch.id)
            assert (await client.batches.retrieve(batch.id)).status == status
        gate.set()
        batch = await ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 5)

    run(scenario, app={"batches": store_at(tmp_path), "keys": ApiKeys((KEY, OTHER))})


def test_another_key_cannot_cancel_a_batch_that_is_validated(tmp_path, monkeypatch):
    goes_on = threading.Event()

    def waits(*args: Any, **kwargs: Any) -> Any:
        goes_on.wait(30)
        return read_input(*args, **kwargs)

    monkeypatch.setattr("serve.batches.runner.read_input", waits)

    async def scenario(served: HttpServed) -> None:
        mine, theirs = (served.openai.with_options(api_key=key) for key in (KEY, OTHER))
        client: Any = mine
        batch = await create(client, jsonl([line("a")]))
        with pytest.raises(openai.NotFoundError):
            await theirs.batches.cancel(batch.id)
        goes_on.set()
        assert (await ended(client, batch.id)).status == "completed"

    run(scenario, app={"batches": store_at(tmp_path), "keys": ApiKeys((KEY, OTHER))})


def test_requests_are_best_effort_whatever_they_ask_for(tmp_path):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        fields: list[dict[str, Any]] = [{}, {"slo_class": "rt"}, {"service_tier": "priority"}, {"slo": {"class": "rt"}}]
        batch = await ended(
            client, (await create(client, jsonl([line(f"r{i}", **f) for i, f in enumerate(fields)]))).id
        )
        out = await lines_of(client, batch.output_file_id)
        assert [one["response"]["body"]["service_tier"] for one in out] == ["flex"] * len(fields)

    run(scenario, app={"batches": store_at(tmp_path)})


def test_a_batch_is_cancelled_and_keeps_what_it_has(tmp_path):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        executor_of(served.parts).step_s = 0.01
        batch = await create(client, jsonl([line(f"r{i}", max_tokens=20) for i in range(60)]))
        await until_some(client, batch.id)
        with pytest.raises(openai.BadRequestError, match="has not ended reads this file"):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled"
        assert batch.created_at <= batch.cancelling_at <= batch.cancelled_at
        out, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
        assert 0 < len(out) < 60
        assert batch.request_counts.completed == len(out)
        assert sorted(one["custom_id"] for one in [*out, *errors]) == sorted(f"r{i}" for i in range(60))
        assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
        await served.idle()
        assert (await client.files.delete(batch.input_file_id)).deleted
        (tmp_path / "files" / batch.output_file_id).unlink()
        with pytest.raises(openai.NotFoundError, match="no file"):
            await client.files.content(batch.output_file_id)

    run(scenario, app={"batches": store_at(tmp_path)})


async def until_some(client: Any, batch_id: str, least: int = 1) -> None:
    async with asyncio.timeout(20):
        while (await client.batches.retrieve(batch_id)).request_counts.completed < least:
            await asyncio.sleep(0.005)


def test_at_the_deadline_the_rest_is_reported_as_expired(tmp_path):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        executor_of(served.parts).step_s = 0.01
        batch = await create(client, jsonl([line(f"r{i}", max_tokens=20) for i in range(60)]), "1m")
        await until_some(client, batch.id)
        runner = cast("Any", served.server.app._config.batches).runner
        running = runner._running[batch.id]
        running.record.expires_at -= 60  # a minute later
        running.done.set()
        batch = await ended(client, batch.id)
        assert batch.status == "expired"
        assert batch.expired_at is not None
        out, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
        assert 0 < len(out) < 60
        assert sorted(one["custom_id"] for one in [*out, *errors]) == sorted(f"r{i}" for i in range(60))
        assert {one["error"]["code"] for one in errors} == {"batch_expired"}
        assert all(one["response"] is None for one in errors)

    run(scenario, app={"batches": store_at(tmp_path)})


def test_a_stop_loses_nothing_and_the_next_start_runs_only_the_rest(tmp_path):
    lines = [line(f"r{i}", max_tokens=8, prompt=f"{i}") for i in range(50)]

    async def whole() -> None:
        async with http_serving(app={"batches": store_at(tmp_path)}, step_s=0.01) as served:
            batch = await create(served.openai, jsonl(lines))
            await until_some(served.openai, batch.id, 3)
        parts = toy_parts(debug=True)
        async with http_serving(parts, app={"batches": store_at(tmp_path)}) as served:
            client: Any = served.openai
            before = (await client.batches.retrieve(batch.id)).request_counts.completed
            after = await ended(client, batch.id)
            assert after.status == "completed"
            assert sum(parts.engine.stats().finished.values()) <= 50 - 3
            assert 3 <= before <= 50
            out = await lines_of(client, after.output_file_id)
            assert [one["custom_id"] for one in out] == [one["custom_id"] for one in lines]
            for asked, one in zip(lines[::7], out[::7], strict=True):
                alone = await served.ask(**asked["body"])
                assert one["response"]["body"]["choices"] == alone["choices"]

    asyncio.run(whole())


def test_a_line_that_no_queue_takes_gets_an_error_and_the_others_run(tmp_path):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai.with_options(api_key=KEY)
        lines = [
            line("many", n=17),
            line("most", n=16, prompt="x"),
            line("long", prompt=["x" * 60, "y" * 60]),
            line("one"),
        ]
        batch = await ended(client, (await create(client, jsonl(lines))).id)
        assert batch.status == "completed"
        assert [one["custom_id"] for one in await lines_of(client, batch.output_file_id)] == ["most", "one"]
        errors = [one["response"] for one in await lines_of(client, batch.error_file_id)]
        assert [(one["status_code"], one["body"]["error"]["param"]) for one in errors] == [(400, "n"), (400, "prompt")]
        assert "--max-num-queued-reqs" in errors[0]["body"]["error"]["message"]
        assert "--max-num-queued-tokens" in errors[1]["body"]["error"]["message"]

    app = {"batches": store_at(tmp_path), "keys": ApiKeys([KEY, OTHER])}
    run(scenario, app=app, max_num_queued_reqs=18, max_num_queued_tokens=110)


def test_batches_wait_a_while_for_step_costs_of_a_server_that_started_early(tmp_path):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        app: Any = served.server.app
        feeder = app._config.batches.runner._feeder
        served.engine.parts = dataclasses.replace(
            served.parts, unprepared=Unprepared(programs=(), calibration_s=1.0), cost_model=None
        )
        batch = await create(client, jsonl([line("a")]))
        await served.until(lambda: feeder._waiting_since_s is not None)
        await asyncio.sleep(0.1)
        assert feeder.num_calls == 0
        assert (await client.batches.retrieve(batch.id)).request_counts.completed == 0
        urgent = await create(client, jsonl([line("a")]), "1m")
        assert (await ended(client, urgent.id)).status == (await ended(client, batch.id)).status == "completed"
        batch = await create(client, jsonl([line("a")]))
        await asyncio.sleep(0.1)
        assert feeder.num_calls == 0
        feeder._waiting_since_s -= 120
        assert (await ended(client, batch.id)).status == "completed"
        feeder._waiting_since_s = None
        batch = await create(client, jsonl([line("a")]))
        await served.until(lambda: feeder._waiting_since_s is not None)
        model: Any = SimpleNamespace(costs=StepCosts(decode_base_s=0.02, decode_per_request_s=1e-5))
        served.engine.parts = dataclasses.replace(served.engine.parts, cost_model=model)
        assert (await ended(client, batch.id)).status == "completed"
        assert feeder._window._short == short_step_rows(8, model.costs) != short_step_rows(8, None)

    run(scenario, app={"batches": store_at(tmp_path)})


def test_while_the_model_loads_batches_are_neither_made_nor_cancelled(tmp_path):
    lines = [line(f"r{i}", max_tokens=8) for i in range(30)]

    async def whole() -> None:
        async with http_serving(app={"batches": store_at(tmp_path)}, step_s=0.02) as served:
            batch = await create(served.openai, jsonl(lines))
            await until_some(served.openai, batch.id)
        server = HttpServer(HttpConfig(port=0, app=AppConfig(batches=Batches(store_at(tmp_path)))))
        await server.start()
        base = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="starting") as caught:
                await create(client, jsonl(lines))
            assert caught.value.status_code == 503
            with pytest.raises(openai.InternalServerError, match="starting"):
                await client.batches.cancel(batch.id)
            assert [(one.id, one.status) async for one in client.batches.list()] == [(batch.id, "in_progress")]
        await server.stop(0)
        async with http_serving(app={"batches": store_at(tmp_path)}) as served:
            assert (await ended(served.openai, batch.id)).status == "completed"

    asyncio.run(whole())


def test_a_full_disk_stops_the_batch_and_not_the_server(tmp_path):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        batch = await ended(client, (await create(client, jsonl([line(f"r{i}") for i in range(20)]))).id)
        assert batch.status == "failed"
        (problem,) = batch.errors.data
        assert problem.code == "disk_full"
        assert "--set batch_disk" in problem.message
        with pytest.raises(openai.APIStatusError) as caught:
            await upload(client, b"x" * 10_000)
        assert caught.value.status_code == 507
        assert (await served.ask())["choices"]
        for file in (await client.files.list()).data:
            await client.files.delete(file.id)
        await upload(client, b"x" * 5000)

    run(scenario, app={"batches": store_at(tmp_path, max_disk_bytes=12_000)})


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
@pytest.mark.parametrize(
    "place", ["tempfile.mkstemp", "serve.batches.http.uploads._Parser.flush", "os.fsync", "os.replace", "os.fchmod"]
)
def test_an_upload_that_the_disk_refuses_gets_507_and_leaves_nothing(tmp_path, monkeypatch, place, code):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        batch_id = (await create(client, jsonl([line(f"r{i}") for i in range(3)]))).id
        before = await ended(client, batch_id)
        kept = sorted(path.name for path in (tmp_path / "files").iterdir())
        data = jsonl([line("again")])

        def refused(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patched:
            patched.setattr(place, refused)
            if place == "os.fchmod":  # of an output file
                batch = await ended(client, (await create(client, data)).id)
                assert (batch.status, batch.errors.data[0].code) == ("failed", "disk_full")
                kept = sorted({*kept, batch.input_file_id})
            else:
                with pytest.raises(openai.APIStatusError) as caught:
                    await upload(client, data)
                assert (caught.value.status_code, caught.value.code) == (507, "disk_full")
                assert os.strerror(code) in str(caught.value)
        assert sorted(path.name for path in (tmp_path / "files").iterdir()) == kept
        assert len(await lines_of(client, before.output_file_id)) == 3
        assert (await ended(client, (await create(client, data)).id)).status == "completed"

    run(scenario, app={"batches": store_at(tmp_path)})


def test_a_database_that_cannot_be_written_answers_507_to_every_call_that_writes(tmp_path):
    store = store_at(tmp_path)

    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        batch = await ended(client, (await create(client, jsonl([line("a")]))).id)
        await store.run(lambda: store._db.execute("PRAGMA query_only=ON"))
        body = {"input_file_id": batch.input_file_id, "endpoint": COMPLETIONS, "completion_window": "1h"}
        form: Any = {"files": {"file": ("f", b"x")}, "data": {"purpose": "batch"}}
        for response in (
            await served.http.post("/v1/batches", json=body),
            await served.http.post("/v1/files", **form),
            await served.http.delete(f"/v1/files/{batch.output_file_id}"),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (507, "disk_full")
        assert (await served.ask())["choices"]
        assert (await client.batches.retrieve(batch.id)).status == "completed"
        await store.run(lambda: store._db.execute("PRAGMA query_only=OFF"))
        assert (await served.http.delete(f"/v1/files/{batch.output_file_id}")).status_code == 200

    run(scenario, app={"batches": store})


def test_equal_request_ids_in_bodies_do_not_collide(tmp_path):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        lines = [line(f"r{i}", request_id="the-same", max_tokens=20) for i in range(8)]
        batch = await ended(client, (await create(client, jsonl(lines))).id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (8, 0)
        out = await lines_of(client, batch.output_file_id)
        assert len({one["response"]["request_id"] for one in out}) == 8

    run(scenario, app={"batches": store_at(tmp_path)})


def test_errors_end_no_loop_of_the_runner(tmp_path, monkeypatch, caplog):
    """Each of its parts fails three times; the batch ends and expired files are deleted all the same."""
    monkeypatch.setattr("serve.batches.runner._SAVE_AGAIN_S", 0.0)
    monkeypatch.setattr("serve.batches.runner._HOUSEKEEPING_S", 0.01)
    monkeypatch.setattr("serve.batches.feeder._LONGEST_PAUSE_S", 0.0)
    store = store_at(tmp_path)
    failures: collections.Counter[str] = collections.Counter()

    def fails_first(owner: Any, name: str, error: type[Exception] = RuntimeError) -> None:
        works = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            failures[name] += 1
            if failures[name] <= 3:
                raise error("injected")
            return works(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    fails_first(BatchFeeder, "_fill")
    fails_first(BatchRunner, "_commit_group")
    fails_first(store, "open_batches", sqlite3.OperationalError)
    fails_first(store, "pending", sqlite3.OperationalError)
    fails_first(store, "delete_expired_files", sqlite3.OperationalError)

    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        async with asyncio.timeout(30):
            while not cast("Any", served.server.app._config.batches).runner.is_resumed:
                await asyncio.sleep(0.005)
        batch = await ended(client, (await create(client, jsonl([line(f"r{i}") for i in range(5)]))).id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 5)
        async with asyncio.timeout(30):
            while failures["delete_expired_files"] < 5:
                await asyncio.sleep(0.005)

    run(scenario, app={"batches": store})
    assert all(times > 3 for times in failures.values())
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 3 * 5


def test_a_call_that_raises_ends_its_line_alone(tmp_path, monkeypatch):
    run_call = BatchCall.run

    async def raises(call: BatchCall) -> None:
        if b"bad" in call._data:
            raise RuntimeError("injected")
        await run_call(call)

    monkeypatch.setattr(BatchCall, "run", raises)

    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        batch = await ended(client, (await create(client, jsonl([line("a"), line("bad"), line("b")]))).id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
        (error,) = await lines_of(client, batch.error_file_id)
        assert (error["custom_id"], error["error"]["code"]) == ("bad", "internal_error")

    run(scenario, app={"batches": store_at(tmp_path)})


def test_without_the_flag_the_answer_names_it():
    async def scenario(served: HttpServed) -> None:
        for path in ("/v1/files", "/v1/batches", "/v1/batches/x/cancel"):
            response = await served.http.get(path)
            assert response.status_code == 404
            assert "--batch-dir" in response.json()["error"]["message"]

    run(scenario)


def test_metrics_count_batches_and_requests(tmp_path):
    async def scenario(served: HttpServed) -> None:
        client: Any = served.openai
        await ended(client, (await create(client, jsonl([line("a"), line("b", max_tokens=9999)]))).id)
        text = (await served.http.get("/metrics")).text
        assert 'aptjax:batch_requests_total{engine="0",model_name="toy",outcome="completed"} 1.0' in text
        assert 'aptjax:batch_requests_total{engine="0",model_name="toy",outcome="failed"} 1.0' in text
        assert 'aptjax:batches_ended_total{engine="0",model_name="toy",status="completed"} 1.0' in text
        assert 'aptjax:batches{engine="0",model_name="toy",status="in_progress"} 0.0' in text

    run(scenario, app={"batches": store_at(tmp_path)})
