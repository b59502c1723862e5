"""Sends requests on time, records when each token arrives, and checks whether the client keeps up.

Open loop: every request is sent when it is due, even if earlier requests are unanswered. Closed loop: a fixed
number of requests is always in flight. Sessions: a call is sent its think time after an answer. Everything runs in one event loop of one thread, so a client that cannot keep up
shows in three places: requests are sent late, timers fire late, and the thread's share of a CPU nears one.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from apt_jax.config import SLO
from apt_jax.errors import one_line
from apt_jax.metrics import RequestRecord
from serve.bench.backends import Backend, RequestFailed
from serve.bench.load import BenchRequest, SessionLoad

_PROBE_S = 0.01
_LEAD_S = 0.05
"""Seconds between the start of the loop and the first arrival."""


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """One sent request and its result. Times are seconds on the client's monotonic clock."""

    request: BenchRequest
    slo: SLO
    due_s: float | None
    """Scheduled time of sending; None: no schedule."""
    sent_s: float
    token_times_s: list[float] = dataclasses.field(default_factory=list)
    finished_s: float | None = None
    status: str = "ok"
    """"ok", or the kind of failure: an HTTP status, the name of a gRPC status, "timeout", "connection", "broken",
    "error", "empty" (no tokens) or an unexpected finish reason such as "abort"."""
    error: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """Prompt length as counted by the server."""
    cached_tokens: int | None = None
    """Prompt tokens that the server found cached; None: it does not tell."""
    num_preemptions: int | None = None
    recomputed_tokens: int | None = None
    cache_kind: str | None = None

    @property
    def record(self) -> RequestRecord:
        """The record of this request for `apt_jax.metrics`."""
        return RequestRecord(
            arrival_s=self.sent_s,
            token_times_s=self.token_times_s,
            finished_s=self.finished_s,
            ok=self.status == "ok",
            slo=self.slo,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientHealth:
    """Measurements that show whether the client limited the results."""

    lateness_s: Sequence[float]
    """Delay of each request after its scheduled time; empty without a schedule or with a concurrency limit."""
    lag_s: Sequence[float]
    """Delay of timers set every 10 ms."""
    process_cpu: float
    """CPU time of this process divided by wall time; 1 is one core."""
    loop_cpu: float
    """CPU time of the event loop's thread divided by wall time, at most 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Measurements of a run."""

    outcomes: Sequence[Outcome]
    """Every finished request, in the order of sending."""
    num_interrupted: int
    """Number of requests in flight when the run was interrupted; they are not counted elsewhere."""
    interrupted: bool
    start_s: float
    wall_s: float
    peak_concurrency: int
    client: ClientHealth


Observer = Callable[[str, Outcome], None]
"""Function called with ("sent", outcome) and ("done", outcome)."""


class Runner:
    """One run against an open backend.

    Args:
        slo: objectives that the client checks.
        timeout_s: seconds after which a request is aborted and counts as failed.
        max_concurrency: maximum number of requests in flight; None: no limit.
        observe: see `Observer`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        slo: SLO,
        timeout_s: float,
        max_concurrency: int | None = None,
        observe: Observer | None = None,
    ) -> None:
        self._backend, self._slo, self._timeout_s = backend, slo, timeout_s
        self._max_concurrency = max_concurrency
        self._observe = observe or (lambda _what, _outcome: None)
        self._outcomes: list[Outcome] = []
        self._lateness: list[float] = []
        self._open = self._peak = 0

    async def open_loop(self, requests: Sequence[BenchRequest], stop: asyncio.Event) -> Run:
        """Send each request when it is due, or later if the concurrency limit is reached.

        Args:
            requests: requests ordered by `at_s`.
            stop: event that ends the run early.
        """
        prepared = [(request, self._backend.prepare(request)) for request in requests]
        room = contextlib.nullcontext() if self._max_concurrency is None else asyncio.Semaphore(self._max_concurrency)
        start_s = time.perf_counter() + _LEAD_S

        async def bounded(request: BenchRequest, data: Any, due_s: float) -> None:
            async with room:
                await self._one(request, data, due_s)

        async def load() -> None:
            async with asyncio.TaskGroup() as group:
                for request, data in prepared:
                    due_s = start_s + request.at_s
                    # No wait if the time has passed, so that a client behind its schedule catches up.
                    if (wait_s := due_s - time.perf_counter()) > 0:
                        await asyncio.sleep(wait_s)
                    group.create_task(bounded(request, data, due_s))

        return await self._run(load(), start_s, stop)

    async def closed_loop(
        self, requests: Iterable[BenchRequest], stop: asyncio.Event, *, duration_s: float | None
    ) -> Run:
        """Keep `max_concurrency` requests in flight until all have been sent or `duration_s` has passed.

        Args:
            requests: requests to send; may be endless if there is a duration.
        """
        assert self._max_concurrency is not None
        coming: Iterator[BenchRequest] = iter(requests)
        start_s = time.perf_counter() + _LEAD_S
        end_s = float("inf") if duration_s is None else start_s + duration_s

        async def worker() -> None:
            for request in coming:
                if time.perf_counter() >= end_s:
                    return
                await self._one(request, self._backend.prepare(request), None)

        async def load() -> None:
            await asyncio.sleep(_LEAD_S)
            async with asyncio.TaskGroup() as group:
                for _ in range(self._max_concurrency or 1):
                    group.create_task(worker())

        return await self._run(load(), start_s, stop)

    async def session_loop(self, sessions: SessionLoad, stop: asyncio.Event) -> Run:
        """Send every call of the sessions when it is due, which most are only once others have been answered."""
        start_s = time.perf_counter() + _LEAD_S

        async def load() -> None:
            async with asyncio.TaskGroup() as group:

                async def call(request: BenchRequest) -> None:
                    prepared, due_s = self._backend.prepare(request), start_s + request.at_s
                    if (wait_s := due_s - time.perf_counter()) > 0:
                        await asyncio.sleep(wait_s)
                    await self._one(request, prepared, due_s)
                    sessions.ended(request.index, time.perf_counter() - start_s)
                    begin()

                def begin() -> None:
                    for request in sessions.known():
                        group.create_task(call(request))

                begin()

        return await self._run(load(), start_s, stop)

    async def _run(self, load: Any, start_s: float, stop: asyncio.Event) -> Run:
        lags: list[float] = []
        probe = asyncio.create_task(_probe(lags))
        work = asyncio.create_task(load)
        stopped = asyncio.create_task(stop.wait())
        process_s, thread_s, began_s = time.process_time(), time.thread_time(), time.perf_counter()
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            interrupted = not work.done()
        finally:
            for task in (probe, stopped, work):
                task.cancel()
            await asyncio.gather(probe, stopped, work, return_exceptions=True)
        wall_s = time.perf_counter() - began_s
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        ended = [o for o in self._outcomes if o.finished_s is not None]
        return Run(
            outcomes=ended,
            num_interrupted=len(self._outcomes) - len(ended),
            interrupted=interrupted,
            start_s=start_s,
            wall_s=time.perf_counter() - start_s,
            peak_concurrency=self._peak,
            client=ClientHealth(
                lateness_s=self._lateness,
                lag_s=lags,
                process_cpu=(time.process_time() - process_s) / wall_s,
                loop_cpu=(time.thread_time() - thread_s) / wall_s,
            ),
        )

    async def _one(self, request: BenchRequest, prepared: Any, due_s: float | None) -> None:
        outcome = Outcome(request=request, slo=self._slo, due_s=due_s, sent_s=time.perf_counter())
        if due_s is not None and self._max_concurrency is None:
            self._lateness.append(max(0.0, outcome.sent_s - due_s))
        self._outcomes.append(outcome)
        self._open += 1
        self._peak = max(self._peak, self._open)
        self._observe("sent", outcome)
        try:
            await self._receive(prepared, outcome)
        finally:
            self._open -= 1
        outcome.finished_s = time.perf_counter()
        self._observe("done", outcome)

    async def _receive(self, prepared: Any, outcome: Outcome) -> None:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                contextlib.aclosing(self._backend.send(prepared)) as stream,
            ):
                async for event in stream:
                    if event.num_tokens:
                        outcome.token_times_s += [time.perf_counter()] * event.num_tokens
                    outcome.finish_reason = event.finish_reason or outcome.finish_reason
                    for name in (
                        "prompt_tokens",
                        "cached_tokens",
                        "num_preemptions",
                        "recomputed_tokens",
                        "cache_kind",
                    ):
                        if (value := getattr(event, name)) is not None:
                            setattr(outcome, name, value)
        except RequestFailed as failure:
            outcome.status, outcome.error = failure.status, str(failure)
        except TimeoutError:
            outcome.status, outcome.error = "timeout", f"took longer than {self._timeout_s:g} s"
        except Exception as error:  # a server may send anything: the run continues, and the request counts as failed
            outcome.status = "broken"
            outcome.error = f"{type(error).__name__}: {one_line(str(error))}"
        else:
            if outcome.finish_reason not in ("stop", "length"):
                outcome.status = outcome.finish_reason or "broken"
                outcome.error = "the stream ended without a finish reason" if outcome.status == "broken" else ""
            elif not outcome.token_times_s:
                outcome.status = "empty"


async def _probe(lags: list[float]) -> None:
    """Measure the event loop's lag with a 10 ms timer. Ticks missed by a busy loop count too, which weights
    percentiles by time."""
    due_s = time.perf_counter()
    while True:
        due_s += _PROBE_S
        await asyncio.sleep(due_s - time.perf_counter())
        now_s = time.perf_counter()
        lags.append(max(0.0, now_s - due_s))
        while due_s + _PROBE_S <= now_s:
            due_s += _PROBE_S
            lags.append(now_s - due_s)
