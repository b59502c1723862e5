"""The dashboard: its events equal /metrics, viewers neither cost nor harm anybody, and a browser shows what they
say."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

import serve
from apt_jax.engine.timeline import Event
from apt_jax.frontend.async_engine import AsyncEngine
from serve.dashboard.feed import _SHOWN, DashboardFeed
from serve.dashboard.page import FILES
from serve.http_api.server import HttpConfig, HttpServer
from serve.observability.prometheus import ServerMetrics
from serve.security.api_keys import ApiKeys, Caller
from serve.watcher_slots import MAX_WATCHERS
from tests.support.browser import LAPTOP, PHONE, Page
from tests.support.fake_executor import Fault, FaultKind
from tests.support.http_serving import HttpServed, bearer
from tests.support.http_serving import run as run_within
from tests.support.toy_serving import executor_of, toy_parts

KEY = "sk-0123456789abcdefghij"
OTHER = "sk-another-key-of-a-tenant"
THIRD = "sk-a-third-key-of-a-tenant"
OPERATOR = "sk-the-key-of-an-operator"
EVENTS = "/dashboard/events"
run = functools.partial(run_within, limit_s=120)


def feed_of(served: HttpServed, period_s: float = 0.02) -> DashboardFeed:
    """The feed of the server, which from now on hurries."""
    feed = served.server.app._dashboard
    feed._period_s = period_s
    return feed


class View:
    """A stream of events, parsed as strictly as the specification of server-sent events allows."""

    def __init__(self, response: httpx2.Response, chunks: AsyncIterator[str] | None = None) -> None:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        self._chunks = chunks or response.aiter_text()
        self._rest = ""

    async def event(self) -> tuple[str, Any]:
        while "\n\n" not in self._rest:
            self._rest += await anext(self._chunks)
        block, _, self._rest = self._rest.partition("\n\n")
        name, data = block.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    async def snapshot(self, condition: Callable[[dict[str, Any]], Any] = lambda _: True) -> Any:
        """The first one that meets the condition."""
        async with asyncio.timeout(30):
            while True:
                name, value = await self.event()
                if name == "snapshot" and condition(value):
                    return value

    async def ends(self) -> list[tuple[str, Any]]:
        """Return the events until the end."""
        events = []
        async with asyncio.timeout(30):
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    events.append(await self.event())
        assert not self._rest
        return events


@contextlib.asynccontextmanager
async def viewing(served: HttpServed, **kwargs: Any) -> AsyncIterator[View]:
    """A stream that is read all the time, as by a browser: a client that reads nothing for five seconds is cut off."""
    chunks: asyncio.Queue[str | None] = asyncio.Queue()

    async def read(response: httpx2.Response) -> None:
        async for chunk in response.aiter_text():
            chunks.put_nowait(chunk)
        chunks.put_nowait(None)

    async def received() -> AsyncIterator[str]:
        while (chunk := await chunks.get()) is not None:
            yield chunk

    async with served.http.stream("GET", EVENTS, **kwargs) as response:
        reading = asyncio.create_task(read(response))
        try:
            yield View(response, received())
        finally:
            reading.cancel()
            await asyncio.wait([reading])


async def metrics_of(served: HttpServed, **kwargs: Any) -> dict[str, dict[str, float]]:
    """/metrics in the form of a snapshot."""
    numbers: dict[str, dict[str, float]] = {}
    for family in parse_text((await served.http.get("/metrics", **kwargs)).text):
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            order = [k for k in ("slo", "class", "from", "to", "state", "le") if k in own] or list(own)
            numbers.setdefault(sample.name, {})[",".join(own[k] for k in order)] = sample.value
    return numbers


async def load(served: HttpServed, count: int = 12, **kwargs: Any) -> None:
    slo = {"ttft_ms": 60_000, "tbt_ms": 0.001, "e2e_ms": 60_000}
    await asyncio.gather(
        *(
            served.ask(
                "x" * (5 + i), max_tokens=10 + i, slo={**slo, "class": ("rt", "be")[i % 2]}, **kwargs
            )
            for i in range(count)
        )
    )  # fmt: skip


def test_events_say_what_metrics_says():
    async def scenario(served):
        feed_of(served)
        async with viewing(served) as view:
            name, points = await view.event()
            assert name == "history"
            assert len(points) <= 1  # of the start
            task = asyncio.create_task(load(served))
            tokens = sum(10 + i for i in range(12))
            seen = await view.snapshot(  # meanwhile it reads: who does not is cut off
                lambda s: (
                    s["metrics"]["vllm:generation_tokens_total"][""] == tokens
                    and s["metrics"]["vllm:num_requests_running"][""] == 0
                )
            )
            await task
            other = await metrics_of(served)
            assert len(seen["metrics"]) > 20
            for name, values in seen["metrics"].items():
                assert values == other[name], name
            assert seen["metrics"]["aptjax:slo_attained_total"]["ttft,be"] == 6
            assert seen["metrics"]["aptjax:slo_missed_total"]["tbt,rt"] == 6
            assert seen["metrics"]["aptjax:slo_attained_total"]["e2e,rt"] == 6
            assert seen["metrics"]["vllm:num_preemptions_total"][""] > 0
            assert (seen["state"], seen["model"]) == ("serving", "toy")
            blocks = other["aptjax:blocks"]
            assert {k: seen["point"][k] for k in ("kv", "hidden", "cached", "free")} == blocks
            assert len(seen["requests"]) == 12
            assert {row["state"] for row in seen["requests"]} == {"length"}
            assert {row["event"] for row in seen["changes"]} >= {"preempted"}
        async with viewing(served) as later:  # what was watched before
            name, points = await later.event()
            assert name == "history"
            assert len(points) > 2
            assert points[-1]["generation_tokens"] == tokens
            assert [p["at_s"] for p in points] == sorted(p["at_s"] for p in points)

    run(scenario, num_blocks=48, max_num_seqs=6, step_s=0.005)


def test_the_page_names_metrics_that_snapshots_have():
    directory = Path(serve.__file__).with_name("dashboard")
    text = "".join(directory.joinpath(name).read_text() for name in ("dashboard.js", "index.html"))
    text = text.replace("class_${name}", "class_queue_time")
    names = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in re.findall(r"(?:vllm|aptjax):\w+", text)}
    assert len(names) > 20
    assert names <= _SHOWN


def test_the_batch_and_its_decisions():
    async def scenario(served):
        feed_of(served)
        async with viewing(served) as view:
            task = asyncio.create_task(load(served, 6))
            seen = await view.snapshot(lambda s: s["batch"] and s["requests"])
            assert seen["iteration"]["type"] in ("prefill", "decode", "mixed")
            assert seen["iteration"]["rows"] == len(seen["batch"]) <= 4
            known = {row["request_id"] for row in seen["requests"]}
            for row in seen["batch"]:
                assert row["request_id"] in known
                assert row["kind"] in ("kv", "hidden")
                assert (row["phase"] == "decode") == (row["tokens"] == 1 and row["cached"] > 0)
            told = await served.http.get(f"/v1/requests/{seen['batch'][0]['request_id']}/decisions")
            assert told.json()["request_id"] == seen["batch"][0]["request_id"]
            await task

    run(scenario, max_num_seqs=4, step_s=0.02)


def test_viewers_of_one_key_get_the_same_bytes_and_a_slow_one_skips_snapshots():
    async def scenario(served):
        feed = feed_of(served, 0.01)
        quick, same, slow = (feed.join(Caller("a", is_operator=False)) for _ in range(3))
        for viewer in (quick, same, slow):
            assert (await anext(viewer)).startswith(b"event: history\n")
        stale = await anext(slow)
        snapshots = [(await anext(quick), await anext(same)) for _ in range(10)]
        assert all(a is b for a, b in snapshots[1:])
        assert await anext(slow) is snapshots[-1][0]
        assert stale is not snapshots[-1][0]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(slow)  # nothing is queued
        for viewer in (quick, same, slow):
            viewer.close()
            viewer.close()
        assert len(feed._viewers) == 0

    run(scenario)


def test_a_viewer_that_reads_nothing_is_cut_off_and_holds_up_nobody():
    async def scenario(served):
        feed = feed_of(served, 0.001)
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", served.server.port))
            deaf.send(f"GET {EVENTS} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            async with viewing(served) as view:
                await served.until(lambda: len(feed._viewers) == 2)
                async with asyncio.timeout(60):
                    while len(feed._viewers) == 2:
                        await view.event()
                await view.snapshot()
                assert (await served.ask(max_tokens=3))["usage"]["completion_tokens"] == 3

    run(scenario, connections={"write_stall_s": 0.2})


def test_so_many_viewers_and_no_more():
    async def scenario(served):
        feed = feed_of(served)
        async with contextlib.AsyncExitStack() as stack:
            views = [await stack.enter_async_context(viewing(served)) for _ in range(MAX_WATCHERS)]
            for view in views:
                await view.snapshot()
            refused = await served.http.get(EVENTS)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert "dashboards are open already" in refused.json()["error"]["message"]
            assert len(served.engine._feed) == 1
        await served.until(lambda: len(feed._viewers) == 0)
        async with viewing(served) as view:
            await view.snapshot()

    run(scenario)


def test_without_viewers_points_are_kept_and_nothing_else(monkeypatch):
    """So that charts have no holes."""
    monkeypatch.setattr("serve.dashboard.feed._RECORD_S", 0.01)
    monkeypatch.setattr("serve.dashboard.feed._SUMS_S", 0.02)

    async def scenario(served):
        feed = served.server.app._dashboard
        await load(served, 4)
        await served.until(lambda: len(feed.history()) > 5)
        assert len(served.engine._feed) == 0
        assert feed._latest is None
        tokens = sum(10 + i for i in range(4))
        await served.until(lambda: feed.history()[-1]["generation_tokens"] == tokens)
        async with viewing(served) as view:
            name, points = await view.event()
            assert name == "history"
            seen = await view.snapshot(lambda s: s.get("metrics"))
        assert len(points) > 5
        assert [p["at_s"] for p in points] == sorted(p["at_s"] for p in points)
        await served.until(lambda: "sums" in feed.history()[-1])
        sums = feed.history()[-1]["sums"]
        assert sums["finished"] == seen["metrics"]["vllm:request_success_total"]
        for name, metric in (
            ("ttft", "time_to_first_token"),
            ("tbt", "inter_token_latency"),
            ("e2e", "e2e_request_latency"),
            ("queue", "request_queue_time"),
        ):
            assert sums[name] == list(seen["metrics"][f"vllm:{metric}_seconds_bucket"].values())
            assert sums[name][-1] == (tokens - 4 if name == "tbt" else 4)

    run(scenario)


def test_points_are_kept_for_five_minutes_and_those_with_distributions_for_an_hour():
    async def scenario(served):
        feed = feed_of(served)
        assert feed._recording is not None
        feed._recording.cancel()
        numbers = {
            "aptjax:blocks": {},
            **{
                f"vllm:{name}": {"": 0.0}
                for name in (
                    "num_requests_running",
                    "num_requests_waiting",
                    "prompt_tokens_total",
                    "generation_tokens_total",
                )
            },
        }
        feed._history.clear()
        for second in range(5000):
            feed._keep(1e6 + second, numbers)
        points = feed.history()
        times = [point["at_s"] for point in points]
        assert times == sorted(set(times))
        fine = [at_s for at_s in times if at_s >= 1e6 + 4999 - 300]
        assert len(fine) == 301
        assert len(points) - len(fine) == pytest.approx(330, abs=2)
        assert all("sums" in point for point in points[: len(points) - len(fine)])

    run(scenario)


def test_without_viewers_nothing_is_noted(monkeypatch):
    monkeypatch.setattr("serve.dashboard.feed._RECORD_S", 3600.0)

    async def scenario(served):
        feed, reads = feed_of(served), []
        read = served.server.app._metrics.read
        served.server.app._metrics.read = lambda: reads.append(1) or read()
        before = asyncio.all_tasks()
        await load(served, 4)
        assert len(served.engine._feed) == 0
        assert len(reads) <= 1  # the first point
        async with viewing(served) as view:
            await view.snapshot()
            assert len(served.engine._feed) == 1
            assert reads
        await served.until(lambda: len(feed._viewers) == 0 and len(served.engine._feed) == 0)
        count = len(reads)
        await load(served, 4)
        await asyncio.sleep(0.1)
        assert len(reads) == count
        assert feed._latest is None
        await served.until(lambda: len(asyncio.all_tasks()) <= len(before))

    run(scenario)


# --- states --------------------------------------------------------------------------------------------------------


def test_starting_serving_draining_stopped():
    async def scenario() -> None:
        server = HttpServer(HttpConfig(port=0))
        server.app._dashboard._period_s = 0.02
        await server.start()
        base = f"http://127.0.0.1:{server.port}"
        async with (
            httpx2.AsyncClient(base_url=base, timeout=60) as http,
            http.stream("GET", EVENTS) as response,
        ):
            view = View(response)
            assert (await view.snapshot())["state"] == "starting"
            parts = toy_parts(step_s=0.01)
            metrics = ServerMetrics(parts)
            engine = AsyncEngine(parts, metrics)
            await server.serve(engine, metrics)
            assert (await view.snapshot(lambda s: s["state"] == "serving"))["model"] == "toy"
            body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True}
            task = asyncio.create_task(http.post("/v1/completions", json=body))
            await view.snapshot(lambda s: s["batch"])
            stopping = asyncio.create_task(server.stop(60))
            seen = await view.snapshot(lambda s: s["state"] == "draining")
            assert seen["metrics"]["vllm:num_requests_running"][""] == 1
            last = (await view.ends())[-1][1]
            assert (await task).json()["usage"]["completion_tokens"] == 60
            assert last["state"] == "stopped"
            assert last["metrics"]["vllm:generation_tokens_total"][""] == 60
            await stopping

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("reads", [True, False])
def test_a_stop_waits_for_no_viewer(reads):
    async def scenario(served):
        feed = feed_of(served, 60.0)  # even between two snapshots
        async with viewing(served) as view:
            await view.snapshot()
            started = time.monotonic()
            stopping = asyncio.create_task(served.server.stop(30))
            if reads:
                assert (await view.ends())[-1][1]["state"] == "stopped"
            await stopping
            assert time.monotonic() - started < 10
            assert len(feed._viewers) == 0

    run(scenario)


def test_the_end_of_the_engine_is_told():
    def fault(batch):
        fault.steps += 1
        return Fault(kind=FaultKind.RAISE_AFTER) if fault.steps > 3 else None

    fault.steps = 0

    async def scenario(served):
        feed_of(served)
        async with viewing(served) as view:
            await view.snapshot(lambda s: s["state"] == "serving")
            await served.post("/v1/completions", {"prompt": "x", "ignore_eos": True})
            seen = await view.snapshot(lambda s: s["state"] != "serving")
            assert seen.keys() == {"server", "state", "batch", "changes", "requests"}
            assert seen["state"] == "ended"
            await served.server.stop(0)
            assert (await view.ends())[-1][1]["state"] == "ended"

    run(scenario, fault=fault, debug=False)


def test_a_snapshot_that_fails_disturbs_nobody(caplog):
    async def scenario(served):
        feed_of(served)
        served.server.app._metrics.read = lambda: 1 / 0
        async with viewing(served) as view:
            assert "metrics" not in await view.snapshot()
            assert (await served.ask(max_tokens=3))["usage"]["completion_tokens"] == 3
            await served.server.stop(10)
            assert (await view.ends())[-1][1]["state"] == "stopped"
        assert "a snapshot for the dashboard failed" in caplog.text

    run(scenario)


def test_an_engine_that_does_not_answer_is_told(monkeypatch):
    monkeypatch.setattr("serve.dashboard.feed._READ_TIMEOUT_S", 0.1)

    async def scenario(served):
        feed_of(served)
        async with viewing(served) as view:
            await view.snapshot(lambda s: s["state"] == "serving")
            gate = executor_of(served.parts).gate
            gate.clear()
            task = asyncio.create_task(served.ask(max_tokens=3))
            assert "metrics" not in await view.snapshot(lambda s: s["state"] == "stalled")
            gate.set()
            await view.snapshot(lambda s: s["state"] == "serving")
            await task

    run(scenario)


# --- who sees what -------------------------------------------------------------------------------------------------


def test_P17_a_key_sees_ids_of_its_own_requests_and_no_others():
    async def scenario(served):
        feed_of(served)
        async with viewing(served, headers=bearer(KEY)) as mine:
            tasks = [
                asyncio.create_task(
                    served.post(
                        "/v1/completions",
                        {"prompt": "x" * 20, "max_tokens": 60, "ignore_eos": True, "request_id": name},
                        headers=bearer(key),
                    )
                )
                for key, name in ((KEY, "mine-1"), (OTHER, "theirs-1"), (OTHER, "theirs-2"))
            ]  # fmt: skip
            seen = await mine.snapshot(lambda s: len(s["batch"]) == 3)
            names = [row["request_id"] for row in seen["batch"]]
            assert names.count(None) == 2
            (name,) = {name for name in names if name is not None}
            assert "mine-1" in name
            assert [row["request_id"] for row in seen["requests"]] == [name]
            seen = await mine.snapshot(lambda s: s["metrics"]["vllm:generation_tokens_total"][""] == 180)
            await asyncio.gather(*tasks)
            changes = [row["request_id"] for row in seen["changes"]]
            assert changes
            assert "theirs" not in json.dumps(seen)
            assert all("tenant" not in row for row in (*seen["batch"], *seen["changes"]))
            async with viewing(served, headers=bearer(OTHER)) as theirs:
                seen = await theirs.snapshot(lambda s: s["requests"])
                assert len(seen["requests"]) == 2
                assert "mine-1" not in json.dumps(seen)
                where = f"/v1/requests/{name}/decisions"
                assert (await served.http.get(where, headers=bearer(OTHER))).status_code == 404
            assert (await served.http.get(where, headers=bearer(KEY))).status_code == 200

    run(scenario, app={"keys": ApiKeys([KEY, OTHER])}, num_blocks=40, step_s=0.01)


def test_P17_where_there_are_operators_a_key_sees_nothing_of_others():
    async def scenario(served):
        feed_of(served)
        async with (
            viewing(served, headers=bearer(KEY)) as mine,
            viewing(served, headers=bearer(THIRD)) as nobodys,
            viewing(served, headers=bearer(OPERATOR)) as operators,
        ):
            for key, prompt, tokens in ((KEY, "x" * 20, 30), (OTHER, "y" * 13, 60), (OTHER, "z" * 17, 60)):
                body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
                await served.post("/v1/completions", body, headers=bearer(key))
            seen = await operators.snapshot(lambda s: s["metrics"]["vllm:generation_tokens_total"][""] >= 150)
            assert seen["iteration"] is not None
            latest = seen["at_s"]
            own = await mine.snapshot(lambda s: s.get("at_s", 0) >= latest)
            numbers = {name: values[""] for name, values in own["metrics"].items() if set(values) == {""}}
            for name, num in (
                ("time_to_first_token", 1), ("inter_token_latency", 29), ("e2e_request_latency", 1), ("request_queue_time", 1)
            ):  # fmt: skip
                assert own["metrics"][f"vllm:{name}_seconds_bucket"]["+Inf"] == num
                assert numbers.pop(f"vllm:{name}_seconds_sum") >= 0
                buckets = seen["metrics"][f"vllm:{name}_seconds_bucket"]
                assert (list(own["metrics"][f"vllm:{name}_seconds_bucket"]), buckets["+Inf"]) == (
                    list(buckets),
                    3 * num if num == 1 else 147,
                )
            assert own["metrics"]["vllm:request_success_total"] == {"length": 1}
            assert numbers == {
                "vllm:num_requests_running": 0,
                "vllm:num_requests_waiting": 0,
                "vllm:prompt_tokens_total": 21,  # one begins the text
                "vllm:generation_tokens_total": 30,
            }
            assert own["iteration"] is None
            assert {row["prompt_tokens"] for row in own["requests"]} == {21}
            assert all(row["request_id"] for row in (*own["batch"], *own["changes"]))
            assert "iteration" not in json.dumps([own["batch"], own["changes"], own["requests"]])
            where = f"/v1/requests/{own['requests'][0]['request_id']}/decisions"
            log = served.engine.decision_log
            assert log is not None
            timeline = next(one for one in log._requests.values() if one.prompt_len == 21)
            details = {"tokens": 3, "kind": "kv", "free_blocks": 4, "running": 5, "waiting": 6}
            timeline.events.append(Event(event="preempted", at_ms=1.0, until_ms=1.0, details=details))
            told = (await served.http.get(where, headers=bearer(KEY))).json()["events"][-1]
            assert told == {"event": "preempted", "at_ms": 1.0, "until_ms": 1.0, "tokens": 3, "kind": "kv"}
            assert timeline.as_json()["events"][-1].items() > details.items()
            none = await nobodys.snapshot(lambda s: s.get("at_s", 0) >= latest)
            assert not any(value for values in none["metrics"].values() for value in values.values())
            assert not any(value for name, value in none["point"].items() if name != "at_s")
            assert none["batch"] == none["changes"] == none["requests"] == []
            async with viewing(served, headers=bearer(KEY)) as again:
                assert await again.event() == ("history", [])

    run(scenario, app={"keys": ApiKeys([KEY, OTHER, THIRD], [OPERATOR])}, num_blocks=40)


def test_a_key_that_is_taken_out_of_use_sees_no_more():
    keys = ApiKeys([KEY, OTHER])

    async def scenario(served):
        feed_of(served)
        async with viewing(served, headers=bearer(KEY)) as view:
            await view.snapshot()
            keys.replace(ApiKeys([OTHER]))
            await view.ends()
        assert (await served.http.get(EVENTS, headers=bearer(KEY))).status_code == 401

    run(scenario, app={"keys": keys})


# --- the page ------------------------------------------------------------------------------------------------------


def test_the_page_is_ours_alone():
    async def scenario(served):
        for path, (name, media_type) in FILES.items():
            response = await served.http.get(path)
            assert response.status_code == 200
            assert response.headers["content-type"].startswith(media_type)
            assert response.headers["content-security-policy"].startswith("default-src 'self';")
            text = response.text
            assert text == Path(serve.__file__).with_name("dashboard").joinpath(name).read_text()
            if "vendor/" in name:  # others wrote it
                continue
            assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
            assert not re.search(r"<script(?![^>]*src=)|<[^>]+\sstyle=|\son\w+=", text)
            assert (await served.http.head(path)).content == b""
        assert (await served.http.head(EVENTS)).headers["content-type"].startswith("text/event-stream")
        assert (await served.http.post(EVENTS)).status_code == 405

    run(scenario)


def test_no_dashboard():
    async def scenario(served):
        for path in (*FILES, EVENTS):
            assert (await served.http.get(path)).status_code == 404

    run(scenario, app={"dashboard": False})


# --- in a browser --------------------------------------------------------------------------------------------------

TEXT = "document.querySelector(arguments[0])?.textContent"


def with_commas(value: float) -> str:
    return f"{round(value):,}"


@pytest.mark.parametrize(("size", "theme"), [(LAPTOP, "light"), (PHONE, "dark")])
def test_the_page_shows_what_metrics_says(browser, size, theme):
    async def scenario(served):
        page = Page(browser, served.server.port)
        await page.open(size, theme)
        await page.until("document.body.dataset.live === 'true'")
        executor = executor_of(served.parts)
        executor.step_s = 0.5  # the batch lasts until the page has shown it
        loading = asyncio.create_task(load(served, 16))
        await page.until("document.querySelector('#batch button')")
        executor.step_s = 0.01
        await loading
        await served.idle()
        numbers = await metrics_of(served)
        tokens = with_commas(numbers["vllm:generation_tokens_total"][""])
        await page.until(
            "document.querySelector('[data-metric=\"vllm:generation_tokens_total\"]').textContent === arguments[0]"
            " && document.querySelector('[data-metric=\"vllm:num_requests_running\"]').textContent === '0'",
            tokens,
        )
        shown = await page.js(
            "return [...document.querySelectorAll('[data-metric]')].map((n) => [n.dataset.metric, n.dataset.labels ?? null, n.textContent])"
        )
        assert len(shown) == 6
        for name, labels, text in shown:
            values = numbers[name]
            wanted = [values[label] for label in labels.split()] if labels else values.values()
            assert text == with_commas(sum(wanted)), name
        for cell, text in await page.js(
            "return [...document.querySelectorAll('[data-slo]')].map((n) => [n.dataset.slo, n.textContent])"
        ):
            met, missed = (numbers[f"aptjax:slo_{what}_total"][cell] for what in ("attained", "missed"))
            assert text.endswith(f"{met:.0f} of {met + missed:.0f}"), cell
        for chart, name in (("ttft", "time_to_first_token"), ("tbt", "inter_token_latency")):
            facts = await page.js(f"return {TEXT}", f"#{chart} .legend")
            assert facts.startswith(f"Count {with_commas(numbers[f'vllm:{name}_seconds_count'][''])}")
            assert await page.js(f"return document.querySelectorAll('#{chart} rect').length") >= 8
        rows = await page.js(
            "return [...document.querySelectorAll('#latency tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
        )
        assert [row[0] for row in rows] == ["Time to first token", "Time between tokens", "Whole request", "Queue"]
        assert rows[2][1] == "16"
        assert all("–" not in row for row in rows)
        assert await page.js(f"return {TEXT}", "#finished") == "Requests ended by: length 16."
        await page.until("document.querySelectorAll('#percentiles path.line').length === 3")
        for window in ("3600", "", "300"):
            await page.js(
                "const w = document.querySelector('#window'); w.value = arguments[0];"
                " w.dispatchEvent(new Event('change'))",
                window,
            )
            assert await page.js(f"return {TEXT}", "#latency tbody tr td") == "16"
        links = "return [...document.querySelectorAll('header a')].map((a) => a.getAttribute('href'))"
        assert await page.js(links) == ["chat"]
        legend = await page.js(f"return {TEXT}", "#blocks .legend")
        blocks = numbers["aptjax:blocks"]
        parts = [f"{kind} {blocks[kind.lower()]:.0f}" for kind in ("KV", "Hidden", "Cached", "Free")]
        assert legend == "".join(parts)

        # One request, by the keyboard alone.
        assert await page.js("return document.documentElement.scrollWidth <= innerWidth")
        assert (
            len(await page.js("return [...document.querySelectorAll('#requests button')].map((n) => n.textContent)"))
            == 16
        )
        request_id = await page.js(
            "const b = document.querySelector('#requests button'); b.focus(); return b.textContent"
        )
        await page.keys("\ue007")
        await page.until("document.querySelectorAll('#decisions tbody tr').length >= 3")
        told = (await served.http.get(f"/v1/requests/{request_id}/decisions")).json()
        rows = await page.js(
            "return [...document.querySelectorAll('#decisions tbody tr')].map((r) => r.cells[0].textContent)"
        )
        assert rows == [event["event"] for event in told["events"]]
        assert await page.js(f"return {TEXT}", "#request-id") == request_id
        assert await page.js("return document.documentElement.scrollWidth <= innerWidth")
        await page.keys("\ue00c")
        await page.until("!document.querySelector('#request').open")
        assert await page.js("return document.activeElement.textContent") == request_id

        # By the pointer, and the theme.
        await page.js("document.querySelectorAll('#requests button')[1].click()")
        await page.until("document.querySelectorAll('#decisions tbody tr').length >= 3")
        await page.js("document.querySelector('#request-close').click()")
        colours = []
        for _ in range(3):
            colours.append(await page.js("return getComputedStyle(document.body).backgroundColor"))
            await page.js("document.querySelector('#theme').click()")
        light, dark = "rgb(244, 246, 248)", "rgb(14, 17, 22)"
        assert colours == [dark if theme == "dark" else light, light, dark]
        assert await page.errors() == []

    run(scenario, num_blocks=48, max_num_seqs=6)


def test_the_page_asks_for_a_key_and_names_are_only_text(browser):
    hostile = "<img src=x onerror=document.title='caught'>"

    async def scenario(served):
        config = dataclasses.replace(served.parts.config, served_model_name=hostile)
        object.__setattr__(served.parts, "config", config)
        page = Page(browser, served.server.port)
        await page.open(PHONE, "light")
        for number, key in enumerate(("wrong-0123456789abcdefghij", KEY)):
            await page.until(
                "document.querySelector('#key').open"
                " && document.querySelector('#key-note').textContent.startsWith(arguments[0])",
                ("It is kept", "That key is not")[number],
            )
            await page.js("document.querySelector('#key-input').focus()")
            await page.keys(key, "\ue007")
        await page.until("document.body.dataset.live === 'true'")
        body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True}
        for key in (KEY, OTHER):
            await served.post("/v1/completions", body, headers=bearer(key))
        await page.until("document.querySelectorAll('#requests button').length === 1")
        await page.js("document.querySelector('#requests button').click()")
        await page.until("document.querySelectorAll('#decisions tbody tr').length >= 3")
        assert await page.js(f"return {TEXT}", "#model") == hostile
        assert await page.js("return document.images.length") == 0
        assert KEY not in await page.js("return document.documentElement.outerHTML")
        await page.js("location.reload()")  # the tab remembers the key
        await page.until("document.body.dataset.live === 'true'")
        errors = await page.errors()
        assert errors
        assert all("401 (Unauthorized)" in error for error in errors)

    run(scenario, app={"keys": ApiKeys([KEY, OTHER])})


def test_the_page_tells_how_the_server_is_and_comes_back(browser):
    async def scenario() -> None:
        port = 0
        for start in range(2):
            server = HttpServer(HttpConfig(port=port))
            await server.start()
            port = server.port
            page = Page(browser, port)
            if not start:
                await page.open(LAPTOP, "light")
            state = "document.querySelector('#state').dataset.state === arguments[0]"
            await page.until(state, "starting")
            parts = toy_parts(step_s=0.01)
            metrics = ServerMetrics(parts)
            await server.serve(AsyncEngine(parts, metrics), metrics)
            await page.until(state, "serving")
            assert await page.js("return document.querySelector('#banner').hidden")
            await server.stop(0)
            await page.until(state, "stopped")
            text = await page.until(
                "!document.querySelector('#banner').hidden && document.querySelector('#banner').textContent"
            )
            assert text.startswith("The server has stopped. Trying again in ")
            assert await page.js("return document.body.dataset.live") == "false"

    asyncio.run(asyncio.wait_for(scenario(), 120))
