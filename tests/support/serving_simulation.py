"""Deterministic simulation of whole servers: HTTP application, calls, admission, `AsyncEngine`, engine; several replicas.

`simulate_serving(seed)` draws a scenario and runs it on a `VirtualLoop`: clients with API keys send completions to one
to three replicas through a small model of a router, read slowly, stop reading or leave in any state; steps fail, hang
or are slow; clocks jump; processes are stopped, paused, cut off, killed and started again. Real are the ASGI
application with everything behind it (`serve.http_api.app`, `serve.generate_call`, `apt_jax.validation`,
`apt_jax.frontend`, `apt_jax.engine`); not real are sockets, threads, time, the model and llguidance.

Every call has one outcome, which its client writes down: what it got is compared with `reference_tokens`, what it was
told with what the scenario allows, what was run for it with what it was told. First phase: arrivals and faults; second
phase: both stop, everything must end, and nothing may be left.

Any failure is a `SimulationError` that ends with the command that replays it:

    python -m tests.support.serving_simulation SEED
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from apt_jax.config import CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.engine.admission import TENANT_SHARE
from apt_jax.engine.request_states import WAITING
from apt_jax.errors import QueueFullError
from apt_jax.executor import StepBatch
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.components import EngineComponents, build_components
from apt_jax.request import EngineRequest, engine_id
from apt_jax.sched import POLICIES, CacheKindSpec, make_policy
from apt_jax.sched.costs.model import StepCosts
from apt_jax.text.detokenizer import OutputText
from apt_jax.text.tokenizer import Tokenizer
from serve.http_api.app import HttpApp
from serve.http_api.calls import AppConfig
from serve.observability.prometheus import ServerMetrics
from serve.preprocessing import Preprocessing, PreprocessingLimits
from serve.security.api_keys import ApiKeys
from tests.support.fake_executor import FakeExecutor, Fault, FaultKind, reference_tokens
from tests.support.fake_grammars import FakeGrammar, FakeGrammars
from tests.support.recount import Recount
from tests.support.simulation_harness import SimulationError
from tests.support.toy_serving import EOS, VOCAB_SIZE, assert_clean, byte_tokenizer
from tests.support.virtual_loop import LoopClock, VirtualLoop, VirtualPool

STEP_TIMEOUT_S = 5.0
MAX_MODEL_LEN = 96
HIGH_WATER_BYTES = 2048
"""Bytes that a connection takes before it makes the writer wait."""
STALL_S = 5.0
"""A connection whose other end reads nothing for so long is cut, as the real server does."""
LATENCY_S = 0.001
_TOKENIZER: list[Tokenizer] = []
_CHECK_EVERY = 4
"""One in so many iterations recounts the engine's accounting."""
_PROBE_EVERY = 16
"""One in so many iterations compares all gauges."""


def _expect(condition: object, message: str) -> None:
    if not condition:
        raise SimulationError(message)


def tokenizer() -> Tokenizer:
    """The tokenizer of bytes, made once."""
    if not _TOKENIZER:
        _TOKENIZER.append(byte_tokenizer())
    return _TOKENIZER[0]


# --- what a seed determines ------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class ServingScenario:
    """Settings that a seed determines before anything runs."""

    num_replicas: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    overlap: bool
    debug: bool
    prefix_caching: bool
    offered: tuple[bool, bool]
    max_num_queued_reqs: int
    max_num_queued_tokens: int | None
    max_queue_s: float
    slo_admission: str
    num_tenants: int
    """0: no keys."""
    flood: bool
    """Most calls are of the first tenant, in bursts."""
    num_calls: int
    gap_s: float
    """Mean time between arrivals."""
    p_deadline: float
    p_grammar: float
    p_invalid: float
    p_duplicate: float
    p_leave: float
    p_slow_reader: float
    p_stalled_reader: float
    p_step_failure: float
    p_bad_row: float
    p_slow_step: float
    p_hang: float
    p_preempt: float
    p_abort: float
    clock_jumps: bool
    slow_jobs: bool
    """Jobs before the engine take seconds."""
    short_queues: bool
    """The queues before the engine have few places."""
    stop_at_s: tuple[float, ...]
    """SIGTERM to a replica at these times."""
    drain_s: float
    second_signal: bool
    p_crash: float
    """Rate per second of a process; also the next two."""
    p_pause: float
    p_partition: float


def draw_scenario(rng: np.random.Generator) -> ServingScenario:
    """Swarm: each fault is there or not, then its rate is drawn (docs/design/failure_model.md)."""

    def rate(most: float, p: float = 0.5) -> float:
        return float(rng.uniform(0, most)) if rng.random() < p else 0.0

    max_num_seqs = int(rng.choice([1, 2, 4, 8]))
    replicas = int(rng.choice([1, 1, 2, 3]))
    num_calls = int(rng.integers(6, 28))
    gap_s = float(rng.choice([0.0, 0.02, 0.1, 0.5]))
    span_s = max(num_calls * gap_s, 0.3)
    many = replicas > 1
    flood = bool(rng.random() < 0.3)
    if flood and rng.random() < 0.6:  # long queues: tenants come to their shares
        replicas, many, num_calls, gap_s, max_num_seqs = 1, False, int(rng.integers(20, 36)), 0.0, 1
    return ServingScenario(
        num_replicas=replicas,
        num_blocks=int(rng.choice([24, 40, 80, 160])),
        block_size=int(rng.choice([3, 4, 8])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(rng.choice([3, 16, 64])),
        policy=str(rng.choice(tuple(POLICIES))),
        overlap=bool(rng.random() < 0.7),
        debug=bool(rng.random() < 0.15),
        prefix_caching=bool(rng.random() < 0.8),
        offered=((True, True), (True, True), (True, False), (False, True))[int(rng.integers(4))],
        max_num_queued_reqs=int(rng.choice([9, 10, 12] if flood else [2, 5, 12, 1000])),
        max_num_queued_tokens=int(rng.choice([20, 100])) if rng.random() < 0.2 else None,
        max_queue_s=float(rng.choice([0.05, 0.5, 3.0])) if rng.random() < 0.4 else 600.0,
        slo_admission=str(rng.choice(["off", "off", "warn", "on"])),
        num_tenants=int(rng.choice([0, 1, 2, 3])),
        flood=flood,
        num_calls=num_calls,
        gap_s=gap_s,
        p_deadline=rate(0.5),
        p_grammar=rate(0.6),
        p_invalid=rate(0.2),
        p_duplicate=rate(0.2, 0.3),
        p_leave=rate(0.6),
        p_slow_reader=rate(0.4),
        p_stalled_reader=rate(0.3),
        p_step_failure=rate(0.02),
        p_bad_row=rate(0.05),
        p_slow_step=rate(0.1),
        p_hang=rate(0.05, 0.3),
        p_preempt=rate(0.1),
        p_abort=rate(0.05, 0.3),
        clock_jumps=bool(rng.random() < 0.15),
        slow_jobs=bool(rng.random() < 0.4),
        short_queues=bool(rng.random() < 0.4),
        stop_at_s=tuple(float(t) for t in rng.uniform(0, span_s, int(rng.random() < 0.5) + int(rng.random() < 0.1))),
        drain_s=float(rng.choice([0.0, 0.0, 0.05, 0.5, 30.0])),
        second_signal=bool(rng.random() < 0.3),
        p_crash=rate(0.15, 0.5) if many else rate(0.1, 0.15),
        p_pause=rate(0.3, 0.4) if many else rate(0.2, 0.15),
        p_partition=rate(0.3, 0.4) if many else 0.0,
    )


@dataclasses.dataclass(kw_only=True)
class Call:
    """A client's call, and how the client behaves."""

    number: int
    request_id: str
    tenant: int | None
    body: dict[str, Any]
    stream: bool
    n: int
    invalid: bool
    """It must be rejected as wrong."""
    grammar: str | None
    deadline_s: float | None
    """After its arrival."""
    leaves: str | None
    """Where the client leaves: "body", "building", "early", "token", "blocked"; None: it stays."""
    leaves_after_s: float
    read_s: float
    """Time for each piece of the response; infinite: the client reads nothing more after the first."""
    duplicate_of: "Call | None" = None
    """Another call with the same id, of the same tenant or another."""

    @property
    def engine_id(self) -> str:
        """Id of its first request to the engine."""
        return engine_id(tenant_name(self.tenant), self.request_id)

    outcome: str | None = None
    """The client's: "ok", "rejected", "unavailable", "deadline", "error", "left", "indeterminate"."""
    tokens: list[list[int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Answer:
    """Response of one attempt, as far as its client has read it."""

    status: int = 0
    code: str | None = None
    ended: bool = False
    """The response is whole."""
    done: bool = False
    """`[DONE]` has come, or the whole JSON."""
    error: str | None = None
    """Code of an error event."""
    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    reasons: list[str | None] = dataclasses.field(default_factory=list)
    usage: dict[str, Any] | None = None


# --- the parts that take the place of threads and sockets ---------------------------------------------------------------


class _Inbox:
    """Takes the place of the condition that the engine's thread sleeps on: `notify` has the loop run an iteration."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self.notify = notify

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> None:
        raise SimulationError("an iteration without anything to do")


class _Watchdog:
    """`apt_jax.frontend.watchdog.Watchdog` by timers of the loop."""

    def __init__(self, loop: VirtualLoop, on_timeout: Callable[[float, str], None], is_stopped: Callable[[], bool]):
        self._loop, self._on_timeout, self._is_stopped = loop, on_timeout, is_stopped
        self.started_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def end_step(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.pause()
        if self._is_over:
            return
        self.started_s = self._loop.time()
        self._timer = self._loop.call_later(STEP_TIMEOUT_S, self._look, self.started_s)

    def pause(self) -> None:
        self.started_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stop(self) -> None:
        self._is_over = True
        self.pause()

    def _look(self, started_s: float) -> None:
        if self.started_s == started_s and self._is_stopped():
            self._on_timeout(started_s, f"a step has not ended for {STEP_TIMEOUT_S:g} s (--step-timeout)")
        elif self.started_s == started_s:  # the step has ended, and waits for those that run nested in it
            self._timer = self._loop.call_later(STEP_TIMEOUT_S, self._look, started_s)


class SimulatedEngine(AsyncEngine):
    """An `AsyncEngine` whose iterations are callbacks of the loop."""

    def __init__(self, replica: "Replica", parts: EngineComponents, observer: ServerMetrics) -> None:
        self._replica, self._loop = replica, replica.world.loop
        self.is_over = False
        self._is_scheduled = self._is_running = False
        super().__init__(parts, observer, step_timeout_s=STEP_TIMEOUT_S)

    def _start(self) -> None:
        self._work = _Inbox(self._schedule)  # type: ignore[assignment]
        self._watchdog = _Watchdog(self._loop, self._fail_all, lambda: self._replica.hangs)  # type: ignore[assignment]

    def _schedule(self, after_s: float = 0.0) -> None:
        if not (self._is_scheduled or self._is_running or self.is_over):
            self._is_scheduled = True
            self._loop.call_later(after_s, self._drive)

    def resume(self) -> None:
        """Go on after a pause."""
        self._schedule()

    def _drive(self) -> None:
        self._is_scheduled = False
        replica = self._replica
        if self.is_over or replica.is_paused or replica.is_dead or not self._is_due():
            return
        self._is_running = True
        replica.begin_iteration()
        try:
            goes_on = self._run_iteration()
        except Exception as error:
            replica.world.fail(error)
            return
        finally:
            self._is_running = False
        if replica.is_dead:
            return
        self.is_over = not goes_on
        try:
            replica.end_iteration()
        except Exception as error:
            replica.world.fail(error)
        if goes_on:
            self._schedule(1e-4)


class Connection:
    """One HTTP call on its way: what the client sends, what the application writes, and either's end.

    Args:
        replica: answers it.
        call: sends it.
    """

    def __init__(self, replica: "Replica", call: Call) -> None:
        self.world, self.replica, self.call = replica.world, replica, call
        self.sent_body = False
        self.cut_s: float | None = None
        """When the server saw the client's end, or its own."""
        self.left_s: float | None = None
        self.buffered = 0
        self.most_buffered = 0
        self.is_blocked = False
        self.state = ""
        self._requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._responses: collections.deque[tuple[str, Any]] = collections.deque()
        self._has_news, self._drained = asyncio.Event(), asyncio.Event()
        self._stall_timer: asyncio.TimerHandle | None = None
        self._under_way: collections.deque[Callable[[], None]] = collections.deque()
        self._num_arrived = 0
        """Number of those under way that are due; more than 0 while the network or the process stands still."""
        replica.connections.append(self)
        data = json.dumps(call.body).encode()
        headers = [
            (b"host", b"replica"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(data)),
        ]
        if call.tenant is not None:
            headers.append((b"authorization", b"Bearer " + key_of(call.tenant).encode()))
        path = "/v1/completions"
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
        }  # fmt: skip
        self._data = data
        self.task = self.world.loop.create_task(self._serve())

    async def _serve(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self.replica.app(self.scope, self._receive, self._send)
        self._to_client("closed", None)

    @property
    def is_flushed(self) -> bool:
        """The response has been written and read, or nobody will read it."""
        return self.task.done() and not self.buffered

    # --- the network: in order, later while it stands still -----------------------------------------------------------

    def _pass(self, deliver: Callable[[], None]) -> None:
        self._under_way.append(deliver)
        self.world.loop.call_later(LATENCY_S, self._arrive)

    def _arrive(self) -> None:
        """Timers of one moment may fire in any order; what is under way keeps its own."""
        self._num_arrived += 1
        if not self.replica.is_unreachable:
            self.release()

    def release(self) -> None:
        """Deliver what has arrived, or was held back."""
        while self._num_arrived:
            self._num_arrived -= 1
            self._under_way.popleft()()

    # --- the client's end ---------------------------------------------------------------------------------------------

    async def send_body(self) -> None:
        """Send the request; half of it first."""
        half = len(self._data) // 2
        self._to_server({"type": "http.request", "body": self._data[:half], "more_body": True})
        await asyncio.sleep(0.002)
        if self.left_s is None:
            self.sent_body = True
            self._to_server({"type": "http.request", "body": self._data[half:], "more_body": False})

    def leave(self) -> None:
        """Close the client's end."""
        if self.left_s is None:
            self.left_s = self.world.loop.time()
            self.state = self.replica.state_of(self)
            self._pass(self.cut)

    def cut(self) -> None:
        """The server sees that the client has gone."""
        if self.cut_s is None:
            self.cut_s = self.world.loop.time()
            self._requests.put_nowait({"type": "http.disconnect"})
            self._drop_buffer()
            self._to_client("closed", None)

    def _drop_buffer(self) -> None:
        self.buffered = 0
        self._drained.set()
        self._stop_timer()

    def reset(self) -> None:
        """The process is gone."""
        self.cut_s = self.world.loop.time()
        self._responses.append(("closed", None))
        self._has_news.set()
        self._drop_buffer()
        self.task.cancel()

    async def read(self) -> tuple[str, Any]:
        """The next message, ("start", status), ("body", bytes) or ("closed", None)."""
        while not self._responses:
            self._has_news.clear()
            await self._has_news.wait()
        return self._responses.popleft()

    def taken(self, size: int) -> None:
        """The client has read so many bytes."""
        if self.cut_s is not None:
            return
        self.buffered -= size
        self._stop_timer()
        if self.buffered > 0:
            self._start_timer()
        if self.buffered <= HIGH_WATER_BYTES // 2:
            self._drained.set()

    # --- the server's end ---------------------------------------------------------------------------------------------

    def _to_server(self, message: dict[str, Any]) -> None:
        self._pass(lambda: self._requests.put_nowait(message))

    def _to_client(self, what: str, value: Any) -> None:
        def deliver() -> None:
            self._responses.append((what, value))
            self._has_news.set()

        self._pass(deliver)

    async def _receive(self) -> dict[str, Any]:
        return await self._requests.get()

    async def _send(self, message: Any) -> None:
        if self.cut_s is not None:
            return
        if message["type"] == "http.response.start":
            self._to_client("start", message["status"])
            return
        data = message.get("body", b"")
        if data:
            if self.buffered == 0:
                self._start_timer()
            self.buffered += len(data)
            self.most_buffered = max(self.most_buffered, self.buffered - len(data))
            self._to_client("body", data)
        if not message.get("more_body", False):
            self._to_client("end", None)
        if self.buffered > HIGH_WATER_BYTES:
            self.is_blocked = True
            self.world.note["writer waits for a slow reader"] += 1
            self.world.on_blocked(self)
            self._drained.clear()
            await self._drained.wait()
            self.is_blocked = False

    def _start_timer(self) -> None:
        def stalled() -> None:
            self.world.note["stalled reader cut"] += 1
            self.cut()

        if self._stall_timer is None and self.cut_s is None:
            self._stall_timer = self.world.loop.call_later(STALL_S, stalled)

    def _stop_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def key_of(tenant: int) -> str:
    return f"key-of-tenant-number-{tenant:04}"


@functools.cache
def tenant_name(tenant: int | None) -> str | None:
    """Return the server's name of a tenant."""
    if tenant is None:
        return None
    caller = ApiKeys([key_of(tenant)]).caller_of(b"Bearer " + key_of(tenant).encode())
    return None if caller is None else caller.tenant


def _call_of(request: EngineRequest) -> str:
    """`Call.engine_id` of the call that a request is of."""
    return request.request_id.partition("#")[0]


# --- one server process ------------------------------------------------------------------------------------------------


class Replica:
    """One server process, from its start to its end.

    Args:
        world: it belongs to.
        place: its number among the replicas.
        generation: how often a process has been started in this place.
    """

    def __init__(self, world: "ServingSimulation", place: int, generation: int) -> None:
        self.world, self.place = world, place
        scenario, loop = world.scenario, world.loop
        self.rng = np.random.default_rng([2, world.seed, place, generation])
        self.clock = _ReplicaClock(loop, self)
        self.is_paused = self.is_cut_off = self.is_dead = self.hangs = self.is_stopping = False
        self.step_failures_s: list[float] = []
        self.row_faults = 0
        self.connections: list[Connection] = []
        self._shutdowns: list[asyncio.Task[None]] = []
        self.executor = FakeExecutor(
            num_blocks=scenario.num_blocks,
            block_size=scenario.block_size,
            max_num_seqs=scenario.max_num_seqs,
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            duration_s=self._duration_s,
            fault=self._fault,
        )
        costs = StepCosts(prefill_base_s=0.01, prefill_per_token_s=1e-4, decode_base_s=0.01, decode_per_request_s=1e-4)
        self.parts = build_components(
            EngineConfig(
                model="toy",
                cache=CacheConfig(block_size=scenario.block_size, enable_prefix_caching=scenario.prefix_caching),
                scheduler=SchedulerConfig(
                    max_num_seqs=scenario.max_num_seqs,
                    max_num_batched_tokens=scenario.max_num_batched_tokens,
                    max_num_queued_reqs=scenario.max_num_queued_reqs,
                    max_num_queued_tokens=scenario.max_num_queued_tokens,
                    max_queue_s=scenario.max_queue_s,
                    slo_admission=scenario.slo_admission,  # type: ignore[arg-type]
                    overlap=scenario.overlap,
                ),
            ),
            self.executor,
            kinds=(
                CacheKindSpec(name="kv", blocks_per_group=2, offered=scenario.offered[0]),
                CacheKindSpec(name="hidden", blocks_per_group=1, offered=scenario.offered[1], extra_per_token_s=1e-6),
            ),
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            tokenizer=tokenizer(),
            eos_token_ids=(EOS,),
            policy=make_policy(scenario.policy, seed=world.seed),
            clock=self.clock,
            costs=costs,
            debug=scenario.debug,
        )
        grammars = FakeGrammars(VOCAB_SIZE)
        self.parts = dataclasses.replace(self.parts, grammars=grammars)  # type: ignore[arg-type]
        self.recount = Recount(self.parts.engine)
        keys = ApiKeys([key_of(i) for i in range(scenario.num_tenants)]) if scenario.num_tenants else None
        metrics = ServerMetrics(self.parts)
        self.work = Preprocessing(
            PreprocessingLimits(
                max_waiting=4, max_waiting_per_owner=3, max_waiting_grammars=4, max_waiting_grammars_per_owner=2,
                grammar_wait_s=1.0,
            )
            if scenario.short_queues
            else PreprocessingLimits()
        )  # fmt: skip
        self.app = HttpApp(AppConfig(keys=keys), self.work)
        self.engine = world.engine_class(self, self.parts, metrics)
        self.app.use(self.engine, metrics)
        self._num_iterations = 0
        self._iteration_s = 0.0
        self._admission = _AdmissionRecount(self)
        self._instrument()
        self._watching = world.spawn(self._watch_end())

    @property
    def name(self) -> str:
        return f"replica {self.place}"

    @property
    def is_unreachable(self) -> bool:
        """Nothing comes in or goes out."""
        return self.is_paused or self.is_cut_off

    # --- faults -------------------------------------------------------------------------------------------------------

    def _duration_s(self, batch: StepBatch) -> float:
        duration_s = 0.01 + 0.0001 * batch.token_ids.size
        if self.world.faults_on and self.rng.random() < self.world.scenario.p_slow_step:
            self.world.note["slow step"] += 1
            duration_s *= 50
        if self.world.faults_on and self.rng.random() < self.world.scenario.p_hang:
            self.world.note["hung step"] += 1
            self.hangs = True
            duration_s = 1e6
        return duration_s

    def _fault(self, batch: StepBatch) -> Fault | None:
        world, rng = self.world, self.rng
        if not world.faults_on:
            return None
        if rng.random() < world.scenario.p_step_failure:
            self.step_failures_s.append(self.clock.now_s())
            kinds = (
                FaultKind.OUT_OF_MEMORY, FaultKind.RAISE_BEFORE, FaultKind.RAISE_AFTER, FaultKind.RAISE_IN_RESULT,
                FaultKind.PARTIAL, *((FaultKind.RAISE_IN_SAMPLE,) if batch.masked is not None else ()),
            )  # fmt: skip
            kind = kinds[int(rng.integers(len(kinds)))]
            world.note[f"step failure: {kind.name.lower()}"] += 1
            world.note["step failure with >= 2 rows"] += batch.slots.size >= 2
            return Fault(kind=kind)
        if rng.random() < world.scenario.p_bad_row:
            row = int(rng.integers(batch.slots.size * 2))
            if batch.samples[row % batch.slots.size]:
                self.row_faults += 1
                world.note["bad row"] += 1
                return Fault(kind=FaultKind.NOT_FINITE if rng.random() < 0.5 else FaultKind.BAD_TOKEN, row=row)
        return None

    def disturb(self) -> None:
        """Preemptions and aborts from outside, between two steps."""
        rng, engine, scenario = self.rng, self.parts.engine, self.world.scenario
        ids = sorted(engine.states.by_id)
        if ids and rng.random() < scenario.p_preempt:
            self.world.note["preempted from outside"] += engine.preempt(ids[int(rng.integers(len(ids)))])
        if ids and rng.random() < scenario.p_abort:
            victim = ids[int(rng.integers(len(ids)))]
            self.world.aborted.add(victim)
            engine.abort(victim)
            self.world.note["aborted by an operator"] += 1
        if scenario.clock_jumps and rng.random() < 0.01:
            self.clock.ahead_s += float(rng.choice([0.3, 5.0, 100.0]))
            self.world.note["clock jumped"] += 1
            self.world.jumped = True

    # --- what is checked in each iteration ------------------------------------------------------------------------------

    def _instrument(self) -> None:
        engine: Any = self.parts.engine
        execute = engine._execute

        def checked_execute(plan, batch, rows, requests):
            now_s, loop_s = self.clock.now_s(), self.world.loop.time()
            open_streams = self.engine._streams.by_request
            ids, taken = [], {state.request for state in requests}
            for state in requests:
                request = state.request
                ids.append(request.request_id)
                stream = open_streams.get(request)
                if stream is not None:
                    _expect(
                        stream.deadline_s is None or now_s < stream.deadline_s,
                        f"{request.request_id} is scheduled after its deadline",
                    )
                    _expect(not stream.cancelled, f"{request.request_id} is scheduled although it was cancelled")
                self._check_client(request, loop_s)
            limit_s = self.world.scenario.max_queue_s
            for request in open_streams:
                late = request not in self.recount.scheduled and request not in taken
                waited_s = now_s - self._admission.added_s.get(request, now_s)
                _expect(
                    not late
                    or limit_s is None
                    or waited_s < limit_s
                    or engine.states.by_id.get(request.request_id) is None,
                    f"{request.request_id} waits for {waited_s:.3f} s, longer than --max-queue-s",
                )
            self.world.log("step", self.place, round(loop_s, 6), ids, batch.num_tokens.tolist())
            return execute(plan, batch, rows, requests)

        engine._execute = self.world.guarded(checked_execute)

    def _check_client(self, request: EngineRequest, now_s: float) -> None:
        """Nothing is run for a client that has been gone for more than an iteration."""
        for connection in self.connections:
            gone_s = connection.cut_s
            if gone_s is None or connection.call.engine_id != _call_of(request):
                continue
            others = [c for c in self.connections if c.call.engine_id == connection.call.engine_id and c.cut_s is None]
            _expect(
                others or gone_s > self._iteration_s - 0.01,
                f"{request.request_id} is scheduled {now_s - gone_s:.3f} s after its client left ({connection.state})",
            )

    def begin_iteration(self) -> None:
        self._iteration_s = self.world.loop.time()
        self._num_iterations += 1
        if self.world.faults_on:
            self.disturb()

    def end_iteration(self) -> None:
        """Invariants between two iterations."""
        engine = self.parts.engine
        if engine.dead_reason is not None or self.engine._abandoned:
            return
        if not engine.debug and self._num_iterations % _CHECK_EVERY == 0:
            engine.check_integrity()  # the other simulation does so after every step
        wrong = self.recount.check(gauges=self._num_iterations % _PROBE_EVERY == 0)
        _expect(not wrong, f"{self.name}: {'; '.join(wrong)}")
        streams = self.engine._streams
        open_streams = streams.by_request
        for held in (streams._deadlines, streams._awaiting_first_schedule):
            _expect(held.keys() <= open_streams.keys(), f"{self.name}: a stream that has ended is still watched")
        for request, stream in open_streams.items():
            unread = stream._unread
            num_unread = 0 if unread is None else len(unread.token_ids)
            _expect(num_unread <= request.params.max_tokens, f"{request.request_id}: {num_unread} unread tokens")
            _expect(not stream.ended, f"{request.request_id}: its stream has ended and is still held")
        _expect(
            engine.num_live == len(open_streams) or engine.states.outputs or self.world.aborted,
            f"{self.name}: {engine.num_live} live requests, {len(open_streams)} streams",
        )
        for connection in self.connections:
            _expect(
                connection.most_buffered <= HIGH_WATER_BYTES,
                f"call {connection.call.request_id}: {connection.most_buffered} bytes were not read, and more written",
            )

    def state_of(self, connection: Connection) -> str:
        """Where a call is, for the list of rare states."""
        states = self.parts.engine.states
        state = states.by_id.get(connection.call.engine_id)
        if not connection.sent_body:
            return "before the body"
        if connection.is_blocked:
            return "while written to"
        if state is None:
            return "while building" if self.num_jobs else "other"
        if states.status[state.row] == WAITING:
            return "preempted" if self.parts.engine.table.num_preemptions[state.row] else "queued"
        return "running"

    @property
    def num_jobs(self) -> int:
        """Jobs before the engine that run or wait."""
        return sum(pool.num_open for pool in self.world.pools)

    # --- the end of the process -----------------------------------------------------------------------------------------

    async def _watch_end(self) -> None:
        """As `serve.server.serve`: an engine that has ended by itself ends the process."""
        reason = await self.engine.wait_ended()
        if reason is None or self.is_dead:
            return
        _expect(
            self.hangs or self._failed_twice(),
            f"{self.name}: the engine ended: {reason}",
        )
        _expect(
            self.engine.num_open == 0, f"{self.name}: the engine has ended and {self.engine.num_open} streams are open"
        )
        self.world.note["engine died: hung step" if self.hangs else "engine died: two failures"] += 1
        self.app.drain()
        await asyncio.sleep(0.1)
        admitted = {_call_of(request) for request in self._admission.added_s}
        for connection in self.connections:
            is_told = connection.task.done() or connection.is_blocked or connection.cut_s is not None
            name = connection.call.engine_id
            _expect(is_told or name not in admitted, f"{name}: the engine has ended, and the call goes on")
        self.kill()

    def _failed_twice(self) -> bool:
        times = self.step_failures_s
        return any(b - a < 60.0 + 1e-6 for a, b in itertools.pairwise(times))

    async def stop(self, drain_s: float) -> None:
        """As `HttpServer.stop` after SIGTERM."""
        if self.is_stopping or self.is_dead:
            return
        self.is_stopping = True
        world, engine = self.world, self.parts.engine
        world.note["stopped with queued requests"] += bool(engine.states.count(WAITING))
        world.note["stopped with running requests"] += bool(engine.num_live > engine.states.count(WAITING))
        world.note["stopped while building"] += bool(self.num_jobs)
        preempted = engine.table.num_preemptions[engine.states.rows(WAITING)]
        world.note["stopped with preempted requests"] += bool(preempted.any())
        self.app.drain()
        started_s = world.loop.time()
        if world.scenario.second_signal and world.faults_on:
            world.loop.call_later(0.02, lambda: world.spawn(self._shut_down(0.0)))
        await self._shut_down(drain_s)
        if self.is_dead:
            return
        took_s = world.loop.time() - started_s
        # A step of one replica ends after those of others that began within it, hung ones too.
        alone = world.scenario.num_replicas == 1 and not world.scenario.p_slow_step
        _expect(
            took_s <= drain_s + (0.1 if alone else 3 * STEP_TIMEOUT_S)
            or self.hangs
            or self.was_paused
            or self.engine.dead_reason is not None,
            f"{self.name}: {took_s:.1f} s to stop, {drain_s} are allowed",
        )
        await self._settled()
        if not self.is_dead and self.engine.dead_reason is None:
            self._check_clean()
        self.kill()

    async def _shut_down(self, drain_s: float) -> None:
        """Shut the engine down, unless the process is killed meanwhile."""
        if self.is_dead:
            return
        task = self.world.loop.create_task(self.engine.shutdown(drain_s))
        self._shutdowns.append(task)
        await asyncio.wait([task])

    async def _settled(self) -> None:
        """Wait until every response has its end: readers that stall are cut after their time."""
        for _ in range(2000):
            if self.is_dead or (not self.app.num_open and all(c.is_flushed for c in self.connections)):
                return
            await asyncio.sleep(0.05)
        left = [c.call.request_id for c in self.connections if not c.is_flushed]
        raise SimulationError(f"{self.name}: calls {left} do not end after the engine has stopped")

    was_paused = False

    def _check_clean(self) -> None:
        """After a stop nothing is left."""
        engine = self.engine
        assert_clean(self.parts)
        wrong = self.recount.check()
        _expect(not wrong, f"{self.name}: {'; '.join(wrong)}")
        streams = engine._streams
        left = [len(h) for h in (streams.by_request, streams._deadlines, streams._awaiting_first_schedule)]
        _expect(not any(left) and not engine._inbox, f"{self.name}: streams are left: {left}")
        _expect(self.app.num_open == 0, f"{self.name}: {self.app.num_open} calls are counted as open")
        _expect(not any(c.buffered for c in self.connections), f"{self.name}: bytes are left in buffers")
        queues = (self.work._short, self.work._long, self.work._grammars)
        _expect(not any(queue.num_waiting for queue in queues), f"{self.name}: calls wait before the engine")
        _expect(
            self.work.bodies.used_bytes == 0, f"{self.name}: {self.work.bodies.used_bytes} bytes of bodies are left"
        )
        _expect(engine.num_watches == 0, f"{self.name}: {engine.num_watches} subscribers are left")
        stats = self.parts.engine.stats()
        _expect(
            stats.num_rejected == self._admission.num_rejected,
            f"{self.name}: num_rejected is {stats.num_rejected}, counted again {self._admission.num_rejected}",
        )
        _expect(
            sum(stats.finished.values()) == self._admission.num_added,
            f"{self.name}: {sum(stats.finished.values())} requests ended, {self._admission.num_added} were added",
        )

    def kill(self) -> None:
        """The process is gone, at once."""
        if self.is_dead:
            return
        self.is_dead, self.is_paused, self.is_cut_off = True, False, False
        self.engine.is_over = True
        self.engine._watchdog.stop()
        self._watching.cancel()
        for task in self._shutdowns:
            task.cancel()
        for connection in self.connections:
            if not connection.task.done():
                connection.reset()
        self.app.close()
        self.world.gone(self)

    def pause(self, *, network_only: bool) -> None:
        """SIGSTOP, or a network that passes nothing."""
        self.was_paused = True
        if network_only:
            self.is_cut_off = True
        else:
            self.is_paused = True

    def resume(self, *, network_only: bool) -> None:
        if network_only:
            self.is_cut_off = False
        else:
            self.is_paused = False
        if not self.is_dead and not self.is_unreachable:
            for connection in self.connections:
                connection.release()
        if not self.is_paused:
            self.engine.resume()


class _ReplicaClock(LoopClock):
    """A process that has ended waits for nothing any more."""

    def __init__(self, loop: VirtualLoop, replica: Replica) -> None:
        super().__init__(loop)
        self._replica = replica

    def advance_to(self, now_s: float) -> None:
        loop, replica = self._loop, self._replica
        while not replica.is_dead and replica.world.error is None:
            end_s = now_s - self.ahead_s  # it may jump meanwhile
            if loop.time() >= end_s - 1e-12 and not replica.is_paused:
                break
            next_s = loop._next_s()
            loop.run_until(next_s if replica.is_paused else min(next_s, end_s))


class _AdmissionRecount:
    """Admission decided again, by counting requests one by one; with `slo_admission="off"` every rejection by count must
    have its reason."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._engine = replica.parts.engine
        self._config = replica.parts.config.scheduler
        self.added_s: dict[EngineRequest, float] = {}
        self.num_added = self.num_rejected = 0
        self._base: list[EngineRequest] = []
        self._pending: list[EngineRequest] = []
        engine: Any = self._engine
        gate: Any = replica.engine._gate
        guarded = replica.world.guarded
        self._add, engine.add_request = engine.add_request, guarded(self._checked_add)
        self._begin, gate.begin_step = gate.begin_step, self._begin_step
        self._early, gate.early_reject = gate.early_reject, guarded(self._checked_early)

    def _waiting(self) -> list[EngineRequest]:
        states = self._engine.states
        return [s.request for s in states.by_id.values() if states.status[s.row] == WAITING]

    def _is_full(self, request: EngineRequest, waiting: Sequence[EngineRequest]) -> bool:
        config = self._config
        free = config.max_num_queued_reqs - len(waiting)
        if free <= 0:
            return True
        of_tenant = sum(r.tenant == request.tenant for r in waiting)
        if request.tenant is not None and of_tenant >= TENANT_SHARE * free:
            self._replica.world.note["rejected: share of the tenant"] += 1
            return True
        tokens = sum(r.prompt_token_ids.size for r in waiting)
        most = config.max_num_queued_tokens
        return most is not None and tokens > 0 and tokens + request.prompt_token_ids.size > most

    def _checked_add(self, request: EngineRequest) -> None:
        is_full = self._is_full(request, self._waiting())
        note = self._replica.world.note
        try:
            self._add(request)
        except Exception as error:
            self.num_rejected += 1
            note[f"engine rejects: {type(error).__name__}"] += 1
            if isinstance(error, QueueFullError) and self._config.slo_admission != "on":
                _expect(is_full, f"{request.request_id} was rejected ({error}) although there is room")
            raise
        _expect(not is_full, f"{request.request_id} was admitted although the queue or its share is full")
        self.num_added += 1
        self.added_s[request] = self._engine.clock.now_s()

    def _begin_step(self, snapshot: Any, pending: Any) -> None:
        pending = list(pending)
        self._base, self._pending = self._waiting(), pending
        self._begin(snapshot, pending)

    def _checked_early(self, request: EngineRequest, demand: Any) -> Any:
        is_open = not self._replica.engine._is_running  # between two iterations nothing is rejected early
        is_full = not is_open and self._is_full(request, [*self._base, *self._pending])
        error = self._early(request, demand)
        if error is not None:
            self.num_rejected += 1
            self._replica.world.note["rejected while a step ran"] += 1
            _expect(
                is_full or self._config.slo_admission == "on",
                f"{request.request_id} was rejected early ({error}) although there is room",
            )
        elif not is_open:
            self._pending.append(request)
        return error


# --- the router ----------------------------------------------------------------------------------------------------------


class Router:
    """A small model of a gateway: round robin over replicas that are up, a circuit breaker for each, and retries on
    another replica as long as nothing of a response has come."""

    MAX_ATTEMPTS = 3
    OPENS_AFTER = 3
    OPEN_S = 2.0
    RETRIED = frozenset((429, 503))
    CONNECT_TIMEOUT_S = 1.0

    def __init__(self, world: "ServingSimulation") -> None:
        self._world = world
        self._next = 0
        self._failures: collections.Counter[int] = collections.Counter()
        self._opened_s: dict[int, float] = {}

    def pick(self, tried: set[int]) -> Replica | None:
        """Choose a replica that has not been tried; None: there is none."""
        world, count = self._world, len(self._world.replicas)
        for i in range(count):
            place = (self._next + i) % count
            replica = world.replicas[place]
            if place in tried or replica is None or replica.is_stopping or replica.is_dead:
                continue
            opened_s = self._opened_s.get(place)
            if opened_s is not None:
                if world.loop.time() < opened_s + self.OPEN_S:
                    world.note["breaker open"] += 1
                    continue
                world.note["breaker half-open"] += 1
                self._opened_s[place] = world.loop.time()  # one call tries it
            self._next = place + 1
            return replica
        return None

    def report(self, replica: Replica, *, ok: bool) -> None:
        """Tell how an attempt went."""
        place = replica.place
        if ok:
            self._failures[place] = 0
            self._opened_s.pop(place, None)
            return
        self._failures[place] += 1
        if self._failures[place] >= self.OPENS_AFTER and self._world.scenario.num_replicas > 1:
            self._opened_s[place] = self._world.loop.time()

    def may_retry(self, answer: Answer) -> bool:
        """Return whether another replica may be asked: nothing but an error that says so, or nothing at all, has
        come."""
        return answer.status in (0, *self.RETRIED)


# --- the whole ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class ServingReport:
    """Report of one simulation."""

    seed: int
    num_steps: int
    virtual_s: float
    digest: str
    """Digest of every event in order; equal for equal seeds."""
    outcomes: collections.Counter[str]
    sometimes: collections.Counter[str]


class ServingSimulation:
    """One seed's history; see the module docstring."""

    engine_class = SimulatedEngine
    router_class = Router

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = np.random.default_rng([20_261_122, seed])
        self.scenario = draw_scenario(self.rng)
        self.note: collections.Counter[str] = collections.Counter()
        self.loop = VirtualLoop()
        self.pools: list[VirtualPool] = []
        self.faults_on = True
        self.jumped = False
        self.aborted: set[str] = set()
        self.error: Exception | None = None
        self.replicas: list[Replica | None] = []
        self.past: list[Replica] = []
        self.router = self.router_class(self)
        self.calls: list[Call] = []
        self.num_steps = 0
        self._generations: collections.Counter[int] = collections.Counter()
        self._digest = hashlib.sha256()
        self._job_rng = np.random.default_rng([3, seed])
        self._tasks: list[asyncio.Task[Any]] = []
        self._on_blocked: dict[Connection, Callable[[], None]] = {}

    def log(self, *event: Any) -> None:
        """Add an event to the digest."""
        self.num_steps += event[0] == "step"
        self._digest.update(repr(event).encode())

    def fail(self, error: Exception) -> None:
        """Remember the first failure that came up in a callback."""
        self.error = self.error or error

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a failure within a function the simulation's, even where the code under test catches it."""

        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except SimulationError as error:
                self.fail(error)
                raise

        return call

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine whose failure is the simulation's."""

        async def guarded() -> None:
            try:
                await coroutine
            except Exception as error:
                self.fail(error)

        task = self.loop.create_task(guarded())
        self._tasks.append(task)
        return task

    def make_pool(self, max_workers: int, thread_name_prefix: str = "") -> VirtualPool:
        """Take the place of the thread pools of the work before the engine."""
        compiles = thread_name_prefix.endswith("grammars")

        def job_s(_function: Callable[..., Any]) -> float:
            slow = self.scenario.slow_jobs and self.faults_on and self._job_rng.random() < (0.8 if compiles else 0.2)
            return float(self._job_rng.uniform(0.2, 3.0) if slow else self._job_rng.uniform(0.0005, 0.02))

        pool = VirtualPool(self.loop, max_workers, job_s)
        self.pools.append(pool)
        return pool

    def on_blocked(self, connection: Connection) -> None:
        """A writer waits: the client may have wanted to leave just then."""
        leave = self._on_blocked.pop(connection, None)
        if leave is not None:
            self.loop.call_later(0.05, leave)

    def start(self, place: int) -> None:
        """Start a process."""
        self._generations[place] += 1
        self.replicas[place] = Replica(self, place, self._generations[place])

    def gone(self, replica: Replica) -> None:
        """A process has ended: another one is started in its place after a while."""
        self.log("gone", replica.place, round(self.loop.time(), 6))
        self.past.append(replica)
        if self.replicas[replica.place] is replica:
            self.replicas[replica.place] = None

            def restart() -> None:
                if self.replicas[replica.place] is None and self.faults_on:
                    self.note["process started again"] += 1
                    self.start(replica.place)

            self.loop.call_later(float(self.rng.uniform(0.1, 2.0)), restart)

    # --- clients --------------------------------------------------------------------------------------------------------

    def _draw_call(self, number: int) -> Call:
        rng, scenario = self.rng, self.scenario
        tenant = None
        if scenario.num_tenants:
            tenant = 0 if scenario.flood and rng.random() < 0.8 else int(rng.integers(scenario.num_tenants))
        prompt_len = int(rng.integers(1, 40))
        shared = [3 + (i * 7) % 200 for i in range(40)]
        prompt = (shared if rng.random() < 0.4 else rng.integers(3, VOCAB_SIZE, 40).tolist())[:prompt_len]
        body: dict[str, Any] = {
            "model": "toy",
            "prompt": prompt,
            "max_tokens": int(rng.integers(1, 32)),
            "temperature": float(rng.choice([0.0, 1.0])),
            "seed": int(rng.integers(2**31)),
            "return_token_ids": True,
            "request_id": f"c{number}",
        }
        if rng.random() < 0.2:
            body["prompt"] = "".join(chr(97 + int(c)) for c in rng.integers(0, 26, prompt_len))
        if rng.random() < 0.3:
            body["ignore_eos"] = True
        if rng.random() < 0.3:
            body["stop"] = [chr(97 + int(rng.integers(26)))]
        n = 1
        if rng.random() < 0.15:
            n = body["n"] = int(rng.integers(2, 4))
        stream = bool(rng.random() < 0.7)
        if stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        if rng.random() < 0.2:
            body["slo"] = {"ttft_ms": float(rng.choice([50.0, 500.0])), "class": "rt"}
        elif rng.random() < 0.2:
            body["slo"] = {"class": "be"}
        grammar = None
        if rng.random() < scenario.p_grammar:
            what = str(rng.choice(["ok", "ok", "ok", "ok", "bad", "busy", "break"]))
            grammar = f"{what}{int(rng.integers(8))}"
            body["structured_outputs"] = {"regex": grammar}
            body.pop("ignore_eos", None)
        deadline_s = None
        if rng.random() < scenario.p_deadline:
            deadline_s = float(rng.choice([0.001, 0.05, 0.3, 2.0]))
            body.setdefault("slo", {})["deadline_ms"] = 1e3 * deadline_s
        invalid = bool(rng.random() < scenario.p_invalid)
        if invalid:
            name, value = [("temperature", -1.0), ("max_tokens", 10_000), ("stop", [""]), ("seed", "x"), ("n", 99)][
                int(rng.integers(5))
            ]
            body[name] = value
        leaves = None
        if rng.random() < scenario.p_leave:
            leaves = str(rng.choice(["body", "building", "early", "early", "token", "blocked"]))
        read_s = 0.0
        if rng.random() < scenario.p_slow_reader:
            read_s = float(rng.choice([0.01, 0.1, 0.4]))
        if rng.random() < scenario.p_stalled_reader or leaves == "blocked":
            read_s = float("inf")
        return Call(
            number=number,
            request_id=f"c{number}",
            tenant=tenant,
            body=body,
            stream=stream,
            n=n,
            invalid=invalid,
            grammar=grammar,
            deadline_s=deadline_s,
            leaves=leaves,
            leaves_after_s=float(rng.exponential(0.15)),
            read_s=read_s,
        )

    async def _client(self, call: Call) -> None:
        """One client: its attempts, and the outcome that it writes down."""
        tried: set[int] = set()
        answer, attempts = Answer(), list[tuple[Replica, Answer]]()
        for attempt in range(self.router.MAX_ATTEMPTS):
            replica = self.router.pick(tried)
            if replica is None:
                break
            tried.add(replica.place)
            if attempt:
                self.note["retried on another replica"] += 1
            call.outcome, answer = await self._attempt(call, replica)
            attempts.append((replica, answer))
            failed = answer.status in (0, 503) or answer.error is not None
            self.router.report(replica, ok=not failed)
            if call.outcome in ("left", "ok") or not self.router.may_retry(answer):
                break
        if call.outcome is None:
            call.outcome = "unavailable"
        self.log("outcome", call.request_id, call.outcome, answer.status, answer.code, answer.tokens)
        self.note[f"outcome: {call.outcome}"] += 1
        self._check_attempts(call, attempts)

    async def _attempt(self, call: Call, replica: Replica) -> tuple[str, Answer]:
        connection = Connection(replica, call)
        leave = connection.leave
        if call.leaves == "building" or call.leaves == "early":
            scale = 0.01 if call.leaves == "building" and not self.scenario.slow_jobs else 1.0
            self.loop.call_later(0.004 + call.leaves_after_s * scale, leave)
        elif call.leaves == "body":
            self.loop.call_later(0.0015, leave)
        elif call.leaves == "blocked":
            self._on_blocked[connection] = leave
        arrival_s = self.loop.time()
        await connection.send_body()
        answer, events = Answer(), _Events()
        answer.tokens = [[] for _ in range(call.n)]
        answer.texts = [""] * call.n
        answer.reasons = [None] * call.n
        num_pieces = 0
        while True:
            wait = connection.read()
            what, value = await wait
            if connection.left_s is not None:
                self.note[f"left {connection.state}"] += 1
                return "left", answer
            if what == "closed":
                break
            if what == "start":
                answer.status = value
                continue
            if what == "end":
                answer.ended = True
                break
            num_pieces += 1
            if call.leaves == "token":
                leave()
            if call.read_s and num_pieces > 1:
                # A client that reads nothing more sees the end of its connection all the same.
                await asyncio.sleep(min(call.read_s, 3 * STALL_S))
            connection.taken(len(value))
            events.add(value)
        if connection.left_s is not None:
            self.note[f"left {connection.state}"] += 1
            return "left", answer
        return self._outcome_of_response(call, replica, connection, answer, events, arrival_s), answer

    def _outcome_of_response(
        self, call: Call, replica: Replica, connection: Connection, answer: Answer, events: "_Events", arrival_s: float
    ) -> str:
        """Return the outcome of a response; raises where it breaks a promise."""
        name = call.request_id
        if answer.status == 200:
            for event in events.take(stream=call.stream):
                self._read_event(call, answer, event)
            self._check_tokens(call, replica, answer)
        elif answer.status:
            _expect(
                answer.ended or connection.cut_s is not None or replica.is_dead, f"{name}: an error without its end"
            )
            if answer.ended:
                answer.code = json.loads(events.data)["error"]["code"]
        if not answer.status or (not answer.ended and answer.error is None):
            cut = connection.cut_s is not None or replica.is_dead
            _expect(cut, f"{name}: the connection ended, and nobody has cut it")
            return "indeterminate"
        return self._outcome(call, replica, answer, arrival_s)

    def _outcome(self, call: Call, replica: Replica, answer: Answer, arrival_s: float) -> str:
        name, status, code = call.request_id, answer.status, answer.error or answer.code
        duplicate = any(other is not call and other.engine_id == call.engine_id for other in self.calls)
        if status == 200 and answer.error is None:
            _expect(answer.done, f"{name}: a response without its end")
            _expect(not call.invalid, f"{name}: served although it is invalid")
            if any(reason == "abort" for reason in answer.reasons):
                _expect(any(a.partition("#")[0] == call.engine_id for a in self.aborted), f"{name}: aborted by nobody")
                return "aborted"
            _expect(not (call.grammar or "").startswith(("bad", "busy")), f"{name}: served without its grammar")
            return "ok"
        match code:
            case "deadline_exceeded":
                _expect(call.deadline_s is not None, f"{name}: no deadline was asked for")
                late = self.loop.time() - arrival_s >= (call.deadline_s or 0.0) - 1e-6
                _expect(late or self.jumped, f"{name}: its deadline has not passed")
                return "deadline"
            case "queue_full":
                return "rejected"
            case "unavailable":
                _expect(
                    replica.is_stopping or replica.engine.dead_reason is not None,
                    f"{name}: unavailable, and the server neither stops nor has its engine died",
                )
                return "unavailable"
            case "request_failed":
                allowed = replica.row_faults or (call.grammar or "").startswith("break")
                _expect(allowed or replica.engine.dead_reason, f"{name}: failed for no reason")
                return "error"
            case "duplicate_id":
                _expect(duplicate, f"{name}: no other call has this id")
                return "invalid"
        _expect(status == 400, f"{name}: status {status}, code {code}")
        never_fits = code == "context_length_exceeded"
        slo = self.scenario.slo_admission == "on" and "slo" in call.body
        bad = (call.grammar or "").startswith("bad")
        _expect(
            call.invalid or never_fits or slo or bad or duplicate or self._too_large(call),
            f"{name}: {code} for no reason",
        )
        return "invalid"

    def _too_large(self, call: Call) -> bool:
        """Prompt and output can fit no kind of cache on offer."""
        scenario = self.scenario
        prompt = call.body["prompt"]
        total = len(prompt) + isinstance(prompt, str) + call.body["max_tokens"]
        groups = -(-total // scenario.block_size)
        return all(
            groups * per > scenario.num_blocks
            for per, is_offered in zip((2, 1), scenario.offered, strict=True)
            if is_offered
        )

    def _read_event(self, call: Call, answer: Answer, event: dict[str, Any] | None) -> None:
        name = call.request_id
        _expect(not answer.done and answer.error is None, f"{name}: something comes after the end")
        if event is None:
            answer.done = True
            return
        if "error" in event:
            answer.error = event["error"]["code"] or "unknown"
            return
        if not call.stream:
            answer.done = True
        answer.usage = event.get("usage") or answer.usage
        for choice in event["choices"]:
            index = choice["index"]
            _expect(answer.reasons[index] is None, f"{name}: choice {index} goes on after its end")
            answer.tokens[index] += choice["token_ids"]
            answer.texts[index] += choice["text"]
            answer.reasons[index] = choice["finish_reason"]

    def _check_tokens(self, call: Call, replica: Replica, answer: Answer) -> None:
        """Compare the tokens that came with the reference: a beginning of it, and all of it at the end."""
        body = call.body
        for index in range(call.n):
            fields = {k: body[k] for k in ("max_tokens", "temperature", "ignore_eos", "stop") if k in body}
            fields["seed"] = body["seed"] + index
            prompt = (
                {"prompt": body["prompt"]} if isinstance(body["prompt"], str) else {"prompt_token_ids": body["prompt"]}
            )
            request = replica.parts.build_request(params=fields, **prompt)
            grammar = None if call.grammar is None else FakeGrammar(call.grammar, VOCAB_SIZE, breaks=False)
            tokens, text, reason = _reference(request, grammar)
            got, name = answer.tokens[index], f"{call.request_id} choice {index}"
            _expect(got == tokens[: len(got)], f"{name}: tokens differ: {got[-6:]}, not {tokens[: len(got)][-6:]}")
            finish = answer.reasons[index]
            if finish in ("stop", "length"):
                _expect(
                    got == tokens and finish == reason, f"{name}: {finish} after {len(got)} of {len(tokens)}, {reason}"
                )
                _expect(answer.texts[index] == text, f"{name}: another text")
            else:
                _expect(finish in (None, "abort"), f"{name}: {finish}")
        if answer.done:
            _expect(all(answer.reasons), f"{call.request_id}: whole, and a choice has no end")
            total = sum(map(len, answer.tokens))
            _expect(
                answer.usage is not None and answer.usage["completion_tokens"] == total,
                f"{call.request_id}: usage {answer.usage}, {total} tokens came",
            )

    def _check_attempts(self, call: Call, attempts: Sequence[tuple[Replica, Answer]]) -> None:
        """The ledger: a call that was answered ran to its end once; one that was rejected did not run."""
        for i, (replica, answer) in enumerate(attempts):
            last = i == len(attempts) - 1
            runs = [r for r in replica.recount.scheduled if _call_of(r) == call.engine_id]
            if not last:
                began = any(answer.tokens)
                _expect(not began, f"{call.request_id}: retried after its first token")
            shared = any(other is not call and other.engine_id == call.engine_id for other in self.calls)
            refused = answer.code in ("queue_full", "context_length_exceeded") or (
                answer.status == 400 and answer.code != "duplicate_id"
            )
            if refused and not shared and call.n == 1:
                _expect(not runs, f"{call.request_id}: rejected with {answer.status}, and it was run")

    # --- the history -----------------------------------------------------------------------------------------------------

    def run(self) -> ServingReport:
        """The whole history.

        Raises:
            SimulationError: something is wrong.
        """
        try:
            with _quiet(), mock.patch.object(concurrent.futures, "ThreadPoolExecutor", self.make_pool):
                asyncio.set_event_loop(None)
                try:
                    self.loop.run_until_complete(self._run())
                finally:
                    self._close()
            if self.error is not None:
                raise self.error
        except Exception as error:
            text = f"seed {self.seed}, {self.loop.time():.3f} s: {type(error).__name__}: {error}\n{self.scenario}"
            raise SimulationError(f"{text}\nreplay: python -m tests.support.serving_simulation {self.seed}") from error
        outcomes = collections.Counter(str(call.outcome) for call in self.calls)
        return ServingReport(
            seed=self.seed,
            num_steps=self.num_steps,
            virtual_s=self.loop.time(),
            digest=self._digest.hexdigest(),
            outcomes=outcomes,
            sometimes=self.note,
        )

    async def _run(self) -> None:
        scenario = self.scenario
        self.replicas = [None] * scenario.num_replicas
        for place in range(scenario.num_replicas):
            self.start(place)
        for at_s in scenario.stop_at_s:
            self.loop.call_later(at_s, self._signal, int(self.rng.integers(scenario.num_replicas)))
        chaos = self.spawn(self._chaos())
        clients = []
        for number in range(scenario.num_calls):
            call = self._draw_call(number)
            if self.calls and self.rng.random() < scenario.p_duplicate:
                other = self.calls[int(self.rng.integers(max(0, number - 3), number))]
                if other.duplicate_of is None:
                    call.duplicate_of, call.request_id = other, other.request_id
                    call.body["request_id"] = other.request_id
            self.calls.append(call)
            clients.append(self.spawn(self._client(call)))
            if scenario.gap_s and not (scenario.flood and self.rng.random() < 0.7):
                await asyncio.sleep(float(self.rng.exponential(scenario.gap_s)))
            self._raise()
        # The second phase: no arrivals, no faults; what is left must end.
        self.faults_on = False
        for replica in self.replicas:
            if replica is not None:
                replica.resume(network_only=True)
                replica.resume(network_only=False)
        await chaos
        deadline_s = self.loop.time() + 600.0
        while not all(task.done() for task in clients):
            self._raise()
            _expect(
                self.loop.time() < deadline_s,
                f"calls without an end: {[c.request_id for c in self.calls if c.outcome is None]}",
            )
            await asyncio.sleep(0.1)
        self._raise()
        for replica in list(self.replicas):
            if replica is not None and not replica.is_stopping:
                await replica.stop(30.0)
            self._raise()
        while any(replica is not None for replica in self.replicas):
            self._raise()
            _expect(self.loop.time() < deadline_s, "a replica does not stop")
            await asyncio.sleep(0.1)
        self._raise()
        await self._check_nothing_left()

    async def _check_nothing_left(self) -> None:
        """After the last process has ended: no task, no timer, no job, no error that nobody has seen."""
        await asyncio.sleep(120.0)  # what has a time limit has come to it
        self._raise()
        own = asyncio.current_task()
        tasks = [t for t in asyncio.all_tasks() if t is not own and not t.done()]
        _expect(not tasks, f"tasks are left: {[str(t.get_coro()) for t in tasks]}")
        timers = self.loop.timers()
        _expect(not timers, f"timers are left: {timers}")
        _expect(not any(pool.num_open for pool in self.pools), "jobs are left")
        _expect(not self.loop.errors, f"errors that nobody has seen: {self.loop.errors[:1]}")

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _signal(self, place: int) -> None:
        replica = self.replicas[place]
        if replica is not None and self.faults_on:
            self.note["SIGTERM"] += 1
            self.spawn(replica.stop(self.scenario.drain_s))

    async def _chaos(self) -> None:
        """Crashes, pauses and partitions, four times a second."""
        rng, scenario = np.random.default_rng([4, self.seed]), self.scenario
        if not (scenario.p_crash or scenario.p_pause or scenario.p_partition):
            return
        while self.faults_on:
            await asyncio.sleep(0.25)
            for replica in list(self.replicas):
                if replica is None or not self.faults_on:
                    continue
                if rng.random() < scenario.p_crash / 4:
                    self.note["process killed"] += 1
                    replica.kill()
                    continue
                for network_only, p in ((False, scenario.p_pause), (True, scenario.p_partition)):
                    if rng.random() < p / 4 and not replica.is_unreachable:
                        self.note["network cut off" if network_only else "process paused"] += 1
                        replica.pause(network_only=network_only)
                        after_s = float(rng.choice([0.05, 0.5, 3.0]))
                        self.loop.call_later(after_s, functools.partial(replica.resume, network_only=network_only))

    def _close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.faults_on = False
        for replica in [*self.past, *self.replicas]:
            if replica is not None:
                replica.is_dead = True
        with contextlib.suppress(Exception):
            self.loop.run_until(self.loop.time())
        self.loop.close()


class _Events:
    """Bytes of a response, as server-sent events or one JSON object."""

    def __init__(self) -> None:
        self.data = b""

    def add(self, data: bytes) -> None:
        self.data += data

    def take(self, *, stream: bool) -> Iterator[dict[str, Any] | None]:
        """The events; None: `[DONE]`."""
        if not stream:
            with contextlib.suppress(json.JSONDecodeError):  # cut off
                yield json.loads(self.data)
            return
        for piece in self.data.split(b"\n\n"):
            text = piece.removeprefix(b"data: ")
            if text == b"[DONE]":
                yield None
            elif text:
                yield json.loads(text)


def _reference(request: EngineRequest, grammar: FakeGrammar | None) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of a request, computed without engine, cache or streams."""
    params = request.params
    tokens = reference_tokens(
        request.prompt_token_ids, params.max_tokens, vocab_size=VOCAB_SIZE, params=params, grammar=grammar
    )
    text = OutputText(
        tokenizer(), stop=params.stop, min_tokens=params.min_tokens, skip_special_tokens=params.skip_special_tokens
    )
    for count, token in enumerate(tokens, 1):
        if token in params.stop_token_ids and count >= params.min_tokens:
            return tokens[:count], text.take(final=True), "stop"
        if text.push(token) is not None:
            return tokens[:count], text.take(final=True), "stop"
    short = len(tokens) < params.max_tokens
    ended = grammar is not None and len(tokens) >= grammar.start().length
    return tokens, text.take(final=True), "stop" if short or ended else "length"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Planted faults need no log."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def simulate_serving(seed: int) -> ServingReport:
    """Run one seed.

    Raises:
        SimulationError: a promise was broken.
    """
    return ServingSimulation(seed).run()


def main(write: Callable[[str], object] = sys.stdout.write) -> None:
    """Replay the seeds on the command line: `SEED` or `FIRST LAST`."""
    first, last = int(sys.argv[1]), int(sys.argv[-1])
    total: collections.Counter[str] = collections.Counter()
    for seed in range(first, last + 1):
        report = simulate_serving(seed)
        total += report.sometimes
        if first == last:
            write(f"seed {seed}: {report.num_steps} steps, {report.virtual_s:.1f} s, {report.digest}\n")
    for name, count in sorted(total.items()):
        write(f"{count:8d}  {name}\n")


if __name__ == "__main__":
    main()
