"""The dashboard's data: a snapshot of the server each second while it has viewers, shared by all of them.

1. The first `Viewer` starts the feed, and the last viewer to leave stops it. Without viewers, only one point is
   recorded every five seconds, to avoid gaps in the charts.
2. Each second one function runs in the engine's thread, between two steps, for under a millisecond. It copies the
   current values of `/metrics` (with the same code), the scheduler's decisions since the last snapshot, and the state
   of recent requests.
3. The snapshot is encoded once per API key owner with a viewer: tenants see only the ids of their own requests,
   operators see all ids. On a server with operators, tenants see only their own rows, tokens, queue and distributions,
   and no sums over all tenants, iteration numbers or past points.
4. A viewer waits for the newest snapshot. A slow reader skips older snapshots and does not delay other viewers.
5. Snapshots hold the server's state (starting, serving, stalled, draining, stopped, ended). The last snapshot ends the
   stream.
"""

import asyncio
import collections
import dataclasses
import functools
import logging
import uuid
from collections.abc import Callable
from typing import Any

from prometheus_client.registry import Collector

from apt_jax.engine.events import IterationBatch, IterationSubscription
from apt_jax.frontend.async_engine import AsyncEngine
from serve.compact_json import json_bytes
from serve.observability.call_log import log_failure
from serve.observability.metric_families import LABELS
from serve.observability.prometheus import ServerMetrics
from serve.security.api_keys import Caller
from serve.watcher_slots import MAX_WATCHERS, WatcherSlots

logger = logging.getLogger(__name__)

PERIOD_S = 1.0

_READ_TIMEOUT_S = 5.0
"""Seconds without a response after which the engine is shown as stalled."""
_HISTORY_S, _LONG_HISTORY_S = 300.0, 3600.0
"""Seconds for which all points are kept, and for which points with distributions are kept."""
_RECORD_S, _SUMS_S = 5.0, 10.0
"""Seconds between points while the feed has no viewers, and between points with distributions."""
_DISTRIBUTIONS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tbt": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
}
_WATCH_CAPACITY = 1024
_MOST_ROWS = 256
_MOST_REQUESTS = 40
_MOST_CHANGES = 40

_SHOWN = frozenset(
    (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:num_preemptions",
        "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
        "vllm:request_success", "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "aptjax:blocks",
        "aptjax:host_blocks", "aptjax:host_moved_blocks", "aptjax:host_moved_slots", "aptjax:restores", "aptjax:host_lost_groups",
        "aptjax:cache_hit_tokens", "aptjax:prompt_tokens_by_source", "aptjax:sessions", "aptjax:class_requests", "aptjax:class_generation_tokens", "aptjax:class_queue_time_seconds",
        "aptjax:class_time_to_first_token_seconds", "aptjax:class_inter_token_latency_seconds",
        "aptjax:slo_attained", "aptjax:slo_missed", "aptjax:cache_kind_switch", "aptjax:recomputed_tokens", "aptjax:requests_refused",
    )
)  # fmt: skip
"""Metric families on the dashboard."""

Numbers = dict[str, dict[str, float]]
"""Values keyed by metric name, then by label values joined with commas."""
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reading:
    """State copied in the engine's thread."""

    at_s: float
    metrics: Collector
    updates: IterationBatch
    requests: dict[str | None, Rows]
    """Recent requests of each tenant with a viewer; key None: requests of all tenants, for operators."""
    own: dict[str, Numbers]
    """Metrics of each tenant with a viewer."""


class _Snapshot:
    """State of the server at one moment, for all viewers.

    Args:
        common: state of the server, visible to every tenant.
        totals: sums over all tenants.
        own: metrics of each tenant.
        requests: recent requests of each tenant; key None: requests of all tenants.
        batch, changes: rows of the last iteration, and recent preemptions and switches of the cache kind, of all
            tenants; `request_id` is the engine's, as in `requests`.
        last: True for the snapshot that ends the stream.
    """

    def __init__(
        self,
        common: dict[str, Any],
        requests: dict[str | None, Rows],
        batch: Rows,
        changes: Rows,
        *,
        totals: dict[str, Any] | None = None,
        own: dict[str, Numbers] | None = None,
        last: bool,
    ) -> None:
        self._common, self._requests = common, requests
        self._totals, self._own = totals or {}, own or {}
        self._batch, self._changes = batch, changes
        self.last = last
        self._events: dict[tuple[Caller, bool], bytes] = {}

    def event(self, caller: Caller, sees_totals: bool) -> bytes:
        """Encode the snapshot for one owner of an API key."""
        if (caller, sees_totals) not in self._events:
            value = {
                **self._common,
                **(self._totals if sees_totals else self._of_tenant(caller)),
                "batch": _seen_by(caller, self._batch, others=sees_totals),
                "changes": _seen_by(caller, self._changes, others=sees_totals),
                "requests": _seen_by(caller, self._requests.get(_scope(caller), []), others=sees_totals),
            }
            self._events[caller, sees_totals] = _event("snapshot", value)
        return self._events[caller, sees_totals]

    def _of_tenant(self, caller: Caller) -> dict[str, Any]:
        """Return the metrics of a tenant, instead of sums over all tenants."""
        numbers = self._own.get(caller.tenant or "")
        if numbers is None:  # the viewer has just joined
            return {}
        return {"metrics": numbers, "point": _point(self._common["at_s"], numbers), "iteration": None}


class Viewer:
    """An asynchronous iterator of server-sent events, for one reader; created by `DashboardFeed.join`.

    The first event, `history`, has past points. Then `snapshot` events follow, always with the newest snapshot.
    """

    def __init__(self, feed: "DashboardFeed", caller: Caller) -> None:
        self.caller = caller
        self._feed = feed
        self._news = asyncio.Event()
        self._begun = self._over = False

    def __aiter__(self) -> "Viewer":
        return self

    async def __anext__(self) -> bytes:
        if not self._begun:
            self._begun = True
            return _event("history", self._feed.history() if self._feed.sees_totals(self.caller) else [])
        while not self._over:
            await self._news.wait()
            self._news.clear()
            snapshot = self._feed._latest
            if snapshot is not None and not self._over:
                self._over = snapshot.last
                return snapshot.event(self.caller, self._feed.sees_totals(self.caller))
        raise StopAsyncIteration

    def close(self) -> None:
        """Stop the viewer; may be called more than once."""
        self._over = True
        self._news.set()
        self._feed._leave(self)


class DashboardFeed:
    """The snapshots of one server. Used from one event loop only.

    Args:
        period_s: seconds between two snapshots.
        max_viewers: maximum number of viewers at a time.
        sees_totals: returns whether the owner of a key may see sums over all tenants; called for each event.
    """

    def __init__(
        self,
        period_s: float = PERIOD_S,
        max_viewers: int = MAX_WATCHERS,
        sees_totals: Callable[[Caller], bool] = lambda caller: True,
    ) -> None:
        self._period_s, self.sees_totals = period_s, sees_totals
        self._slots = WatcherSlots("dashboards are open", max_viewers)
        self._server = uuid.uuid4().hex
        self._engine: AsyncEngine | None = None
        self._metrics: ServerMetrics | None = None
        self._draining = self._closed = False
        self._viewers: set[Viewer] = set()
        self._running: asyncio.Task[None] | None = None
        self._latest: _Snapshot | None = None
        self._iteration: dict[str, Any] | None = None
        self._batch: Rows = []
        self._changes: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MOST_CHANGES)
        self._history: collections.deque[dict[str, Any]] = collections.deque()
        self._long_history: collections.deque[dict[str, Any]] = collections.deque()
        self._sums_at_s = -_SUMS_S
        self._recording: asyncio.Task[None] | None = None
        self.starting: Callable[[], object] = lambda: None
        """Returns the server's startup progress."""

    def use(self, engine: AsyncEngine, metrics: ServerMetrics | None) -> None:
        """Show the state of this engine from now on."""
        self._engine, self._metrics = engine, metrics
        if metrics is not None:
            self._recording = asyncio.create_task(self._record())

    def stop_recording(self) -> None:
        """Stop recording points, since the engine has stopped or will stop."""
        if self._recording is not None:
            self._recording.cancel()

    def drain(self) -> None:
        """Show that the server is draining."""
        self._draining = True

    def join(self, caller: Caller) -> Viewer:
        """Add a viewer, which the caller must close.

        Raises:
            QueueFullError: there are too many viewers.
        """
        self._slots.take(caller)
        viewer = Viewer(self, caller)
        self._viewers.add(viewer)
        if self._latest is not None:
            viewer._news.set()
        if self._running is None and not self._closed:
            self._running = asyncio.create_task(self._run())
        return viewer

    async def close(self) -> None:
        """Send the last snapshot to all viewers, including viewers that join later."""
        if self._closed:
            return
        self._closed = True
        self.stop_recording()
        if self._running is not None:
            self._running.cancel()
        self._iteration, self._batch = None, []
        await self._refresh(None, last=True)

    def _leave(self, viewer: Viewer) -> None:
        if viewer in self._viewers:
            self._viewers.remove(viewer)
            self._slots.free(viewer.caller)
        if self._viewers or self._running is None or self._closed:
            return
        self._running.cancel()
        self._running = self._latest = self._iteration = None
        self._batch = []
        self._changes.clear()

    async def _run(self) -> None:
        watch: IterationSubscription | None = None
        try:
            while True:
                if watch is None and self._engine is not None:
                    watch = self._engine.watch(_WATCH_CAPACITY)
                await self._refresh(watch)
                await asyncio.sleep(self._period_s)
        finally:
            if watch is not None:
                watch.close()

    async def _record(self) -> None:
        """Record points while the feed has no viewers."""
        while True:
            engine, metrics = self._engine, self._metrics
            if not self._viewers and engine is not None and metrics is not None and self._state() == "serving":
                try:
                    async with asyncio.timeout(_READ_TIMEOUT_S):
                        read = functools.partial(_read, engine, metrics, None, set())
                        reading = await asyncio.wrap_future(engine.call(read))
                    self._keep(reading.at_s, _numbers(reading.metrics))
                except Exception as error:
                    logger.debug("no point for the dashboard: %s", type(error).__name__)
            await asyncio.sleep(_RECORD_S)

    def _keep(self, at_s: float, numbers: Numbers) -> dict[str, Any]:
        """Add a point to the history, and drop outdated points."""
        point = _point(at_s, numbers)
        kept = point
        if at_s - self._sums_at_s >= _SUMS_S:
            self._sums_at_s = at_s
            kept = point | {"sums": _sums(numbers)}
        self._history.append(kept)
        while self._history[0]["at_s"] < at_s - _HISTORY_S:
            old = self._history.popleft()
            if "sums" in old:
                self._long_history.append(old)
        while self._long_history and self._long_history[0]["at_s"] < at_s - _LONG_HISTORY_S:
            self._long_history.popleft()
        return point

    def history(self) -> Rows:
        """Return points of the last hour: all points of the last five minutes, and earlier points with
        distributions."""
        return [*self._long_history, *self._history]

    async def _refresh(self, watch: IterationSubscription | None, *, last: bool = False) -> None:
        try:
            snapshot = await self._snapshot(watch, last=last)
        except Exception as error:  # must not disturb calls or the shutdown
            log_failure(logger, "a snapshot for the dashboard", error)
            snapshot = _Snapshot(self._common(self._state()), {}, [], [], last=last)
        self._latest = snapshot
        for viewer in self._viewers:
            viewer._news.set()

    async def _snapshot(self, watch: IterationSubscription | None, *, last: bool = False) -> _Snapshot:
        engine, metrics, state = self._engine, self._metrics, self._state()
        reading: _Reading | None = None
        if engine is not None and metrics is not None and state != "ended":
            tenants = {_scope(viewer.caller) for viewer in self._viewers}
            read = functools.partial(_read, engine, metrics, watch, tenants)
            try:
                async with asyncio.timeout(_READ_TIMEOUT_S):
                    reading = await asyncio.wrap_future(engine.call(read))
            except TimeoutError:
                state = "stalled"
        common = self._common(state)
        if engine is None or reading is None:
            return _Snapshot(common, {}, [], [], last=last)
        self._note(reading)
        numbers = _numbers(reading.metrics)
        point = self._keep(reading.at_s, numbers)
        common |= {
            "model": engine.parts.model_name,
            "at_s": reading.at_s,
        }
        totals = {"metrics": numbers, "point": point, "iteration": self._iteration}
        changes = list(self._changes)
        return _Snapshot(common, reading.requests, self._batch, changes, totals=totals, own=reading.own, last=last)

    def _common(self, state: str) -> dict[str, Any]:
        start = self.starting() if state == "starting" else None
        return {"server": self._server, "state": state, **({} if start is None else {"start": str(start)})}

    def _state(self) -> str:
        engine = self._engine
        if engine is not None and engine.dead_reason is not None:
            return "ended"
        if self._closed:
            return "stopped"
        if self._draining or (engine is not None and not engine.is_serving):
            return "draining"
        return "starting" if engine is None else "serving"

    def _note(self, reading: _Reading) -> None:
        """Store the last iteration, and the last preemptions and cache-kind switches."""
        for iteration in reading.updates.iterations:
            at = {"iteration": iteration.number, "at_s": iteration.at_s}
            for row in iteration.preempted:
                what = {"event": "preempted", "kind": row.kind, "tokens": row.num_tokens}
                self._changes.appendleft({"request_id": row.request_id} | at | what)
            for switch in iteration.switched:
                what = {"event": "switched", "old": switch.old, "new": switch.new}
                self._changes.appendleft({"request_id": switch.request_id} | at | what)
        if not reading.updates.iterations:
            return
        iteration = reading.updates.iterations[-1]
        self._iteration = {
            "number": iteration.number,
            "at_s": iteration.at_s,
            "type": iteration.type,
            "step_ms": None if iteration.step_s is None else round(1e3 * iteration.step_s, 3),
            "schedule_ms": round(1e3 * iteration.schedule_s, 3),
            "rows": len(iteration.scheduled),
        }
        self._batch = [
            {
                "request_id": row.request_id,
                "kind": row.kind,
                "phase": "decode" if row.decodes else "prefill",
                "tokens": row.num_tokens,
                "cached": row.start,
            }
            for row in iteration.scheduled[:_MOST_ROWS]
        ]


def _read(
    engine: AsyncEngine,
    metrics: ServerMetrics,
    watch: IterationSubscription | None,
    tenants: set[str | None],
) -> _Reading:
    """Copy the state; called in the engine's thread."""
    updates = IterationBatch(num_dropped=0, iterations=[]) if watch is None else watch.take()
    log, requests = engine.decision_log, {}
    if log is not None:
        requests = {
            tenant: [one.summary() | {"request_id": one.request_id} for one in last]
            for tenant, last in log.last(tenants, _MOST_REQUESTS).items()
        }
    return _Reading(
        at_s=engine.parts.clock.now_s(),
        metrics=metrics.read(),
        updates=updates,
        requests=requests,
        own={tenant: _own_numbers(engine, metrics, tenant) for tenant in tenants if tenant is not None},
    )


def _own_numbers(engine: AsyncEngine, metrics: ServerMetrics, tenant: str) -> Numbers:
    """Return the metrics of one tenant; called in the engine's thread."""
    usage = engine.parts.engine.usage_of(tenant)
    return {
        **metrics.own_numbers(tenant),
        "vllm:num_requests_running": {"": usage.num_running},
        "vllm:num_requests_waiting": {"": usage.num_waiting},
        "vllm:prompt_tokens_total": {"": usage.prompt_tokens},
        "vllm:generation_tokens_total": {"": usage.generation_tokens},
    }


def _numbers(metrics: Collector) -> Numbers:
    """Return the values of the dashboard's metrics, as in `/metrics`."""
    numbers: Numbers = {}
    for family in metrics.collect():
        if family.name in _SHOWN:
            for sample in family.samples:
                own = [value for name, value in sample.labels.items() if name not in LABELS]
                numbers.setdefault(sample.name, {})[",".join(own)] = sample.value
    return numbers


def _point(at_s: float, numbers: Numbers) -> dict[str, float]:
    """Return one point of the page's time series."""
    blocks = numbers.get("aptjax:blocks", {})
    return {
        "at_s": round(at_s, 3),
        **{kind: blocks.get(kind, 0) for kind in ("kv", "hidden", "cached", "free")},
        "running": numbers["vllm:num_requests_running"][""],
        "waiting": numbers["vllm:num_requests_waiting"][""],
        "prompt_tokens": numbers["vllm:prompt_tokens_total"][""],
        "generation_tokens": numbers["vllm:generation_tokens_total"][""],
    }


def _sums(numbers: Numbers) -> dict[str, Any]:
    """Return distributions since the server's start: cumulative counts of the buckets, in the order of `/metrics`, and
    the number of requests per finish reason."""
    sums: dict[str, Any] = {
        name: [int(count) for count in numbers.get(f"{metric}_bucket", {}).values()]
        for name, metric in _DISTRIBUTIONS.items()
    }
    return sums | {"finished": {why: int(n) for why, n in numbers.get("vllm:request_success_total", {}).items()}}


def _scope(caller: Caller) -> str | None:
    """Return the tenant whose requests this caller may list; None: all tenants."""
    return None if caller.is_operator else caller.tenant


def _seen_by(caller: Caller, rows: Rows, *, others: bool) -> Rows:
    """Return rows with the ids that the caller may see. If `others`, rows of other tenants are included, without ids;
    otherwise the caller's own rows are returned, without iteration numbers."""
    shown = [row | {"request_id": caller.shown_id(row["request_id"])} for row in rows]
    if others:
        return shown
    # Iteration numbers would reveal how many iterations ran for other tenants.
    own = [row for row in shown if row["request_id"] is not None]
    return [{name: value for name, value in row.items() if name != "iteration"} for row in own]


def _event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(value) + b"\n\n"
