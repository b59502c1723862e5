"""Bookkeeping of the feeder, and when it waits."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from serve.batches.feeder import BatchFeeder, RunningBatch
from serve.batches.records import BatchRecord, RequestLine

LINE = RequestLine(number=1, custom_id="a", offset=0, size=2)


def running_batch(tenant: str = "") -> RunningBatch:
    """A batch with one request to run."""
    record = BatchRecord(
        id=f"batch_{tenant}", tenant=tenant, endpoint="/v1/completions", input_file_id="f", completion_window="24h",
        created_at=1, expires_at=2,
    )  # fmt: skip
    batch = RunningBatch(record=record, is_read=True)
    batch.pending.append((LINE, b"{}"))
    return batch


def test_a_call_that_is_cancelled_before_it_begins_is_not_counted_any_more():
    async def whole() -> None:
        nothing: Any = None
        feeder, batch = BatchFeeder(nothing, nothing, lambda *_: None, lambda: 0), running_batch("a")
        feeder.add(batch)
        feeder._start(batch)
        assert feeder.num_calls == 1
        await feeder.remove(batch)
        assert (feeder.num_calls, feeder._by_tenant["a"], batch.calls) == (0, 0, set())

    asyncio.run(whole())


def test_a_request_that_finds_no_room_pauses_only_its_batch():
    async def whole() -> None:
        nothing: Any = None
        feeder = BatchFeeder(nothing, nothing, lambda *_: None, lambda: 0)
        batches = [running_batch("a"), running_batch("b")]
        for batch in batches:
            feeder.add(batch)
        call: Any = SimpleNamespace(run=lambda: asyncio.sleep(0), outcome=None, retry_after_s=3.0)
        line, data = batches[0].pending.popleft()
        await feeder._serve(batches[0], line, data, call)
        now_s = time.monotonic()
        assert feeder._next(now_s) is batches[1]
        batches[1].pending.clear()
        assert feeder._next(now_s) is None
        assert feeder._next(now_s + 3) is batches[0]

    asyncio.run(whole())


def test_keys_take_turns():
    """The key with the fewest requests in flight is next, its oldest batch first."""
    nothing: Any = None
    feeder = BatchFeeder(nothing, nothing, lambda *_: None, lambda: 0)
    first, second, other = batches = [running_batch("a"), running_batch("a"), running_batch("b")]
    for batch in batches:
        feeder.add(batch)
    for in_flight, expected in (({}, first), ({"a": 1}, other), ({"a": 1, "b": 2}, first), ({"b": 1}, first)):
        feeder._by_tenant.clear()
        feeder._by_tenant.update(in_flight)
        assert feeder._next(time.monotonic()) is expected
    first.pending.clear()
    assert feeder._next(time.monotonic()) is second
