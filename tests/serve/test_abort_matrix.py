"""Every way of aborting a request, in every state that it can be in.

A bystander runs, the victim arrives, and as soon as it is in the state the engine is paused within a step. Then the
client disconnects, its deadline passes, or it is aborted, and the engine resumes. Afterwards nothing of the victim may
be left, it may not have been computed any further, the bystander has its tokens, and the next request succeeds.
"""

import asyncio
import threading
from typing import Any

import grpc
import pytest

from apt_jax.core.step import StepBatch
from apt_jax.engine import Engine
from apt_jax.engine.request_state import RequestState
from apt_jax.engine.request_states import ENDING, RUNNING, WAITING
from apt_jax.request import EngineRequest
from serve.client import make_request
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from tests.support.faults import GENERATE, UNREAD, ClientProcess, JumpingClock, grpc_client
from tests.support.http_serving import HttpServed, completion, http_serving
from tests.support.toy_serving import assert_clean, expected_tokens, toy_parts

BYSTANDER = "bystander"
VICTIM = "victim"
LATER_S = 1000.0
KEEPALIVE = {"keepalive_time_s": 0.5, "keepalive_timeout_s": 0.5}
"""How soon a client that is stopped is found,"""
PATIENCE = {"write_stall_s": 60.0}
"""and not before it has been, however slow the machine."""

STATES: dict[str, dict[str, Any]] = {
    "queued": {},
    "prefill chunk": {"prompt": "x" * 200, "max_tokens": 40},
    "decode": {},
    "preempted": {},
    "ending": {"max_tokens": 4},
    "tokenizing": {"prompt": "x" * 5000},
    "compiling its grammar": {"structured_outputs": {"regex": "[a-z]{90}"}},
    "waiting for its mask": {"structured_outputs": {"regex": "[a-z]{90}"}},
    "blocked in a write": {"max_tokens": 1500, "logprobs": 20},
}
"""Request fields that bring the victim into the state."""

BEFORE_THE_ENGINE = {"tokenizing", "compiling its grammar"}

WAYS = [
    "gRPC cancel",
    "channel closed",
    "deadline",
    "client killed",
    "client stopped",
    "HTTP closed",
    "HTTP half-closed",
    "engine abort",
]

AS_OTHERS = {"channel closed", "client killed", "client stopped", "HTTP half-closed"}
"""Ways of which the engine hears as of the others: the protocol's side of them is the same in these states."""
IN_A_BATCH = {"prefill chunk", "preempted", "ending", "waiting for its mask"}
ALIKE = {("blocked in a write", "channel closed"), ("blocked in a write", "client killed")}
ALIKE |= {(state, way) for state in {*IN_A_BATCH, "tokenizing"} for way in AS_OTHERS}
CASES = [
    pytest.param(state, way, marks=[pytest.mark.slow] if (state, way) in ALIKE else [])
    for state in STATES
    for way in WAYS
]


def is_in(state: str, engine: Engine, victim: RequestState, batch: StepBatch) -> bool:
    """Asked before each step is dispatched, in the engine's thread."""
    row, table = victim.row, engine.table
    status, outputs = engine.states.status[row], int(table.num_outputs[row])
    match state:
        case "queued":
            return bool(status == WAITING)
        case "prefill chunk":
            return bool(status == RUNNING and 0 < table.num_cached[row] < table.prompt_len[row])
        case "decode" | "waiting for its mask":
            return bool(status == RUNNING and outputs >= 3)
        case "preempted":
            return bool(status == WAITING and table.num_preemptions[row])
        case "ending":
            return bool(status == ENDING)
        case "blocked in a write":
            return outputs >= victim.params.max_tokens - 100
    return False


class Held:
    """Holds the engine in a step, or the grammar compiler, where the victim has come to a state."""

    def __init__(self, served: HttpServed, state: str) -> None:
        self.state, self.engine = state, served.parts.engine
        self.reached, self.released = threading.Event(), threading.Event()
        self.has_preempted = False
        self.steps_after = 0
        """Steps with the victim that were dispatched after the release, the one that was held among them."""
        executor, fill, grammars = (
            self.engine.executor,
            self.engine._masks.fill_masks,
            served.parts.grammars,
        )
        execute = executor.execute

        def holding(batch: StepBatch):
            victim = self.victim
            if state == "preempted" and victim is not None and self.may_preempt(victim):
                served.engine.call(lambda: self.engine.preempt(victim.request.request_id))
            if victim is not None and state != "waiting for its mask" and is_in(state, self.engine, victim, batch):
                self.hold()
            self.steps_after += self.released.is_set() and self.takes_part(batch)
            return execute(batch)

        def filling(constraints, masks, rows):
            victim = self.victim
            if victim is not None and self.engine.table.num_outputs[victim.row] >= 3:
                self.hold()
            return fill(constraints, masks, rows)

        executor.execute = holding  # type: ignore[method-assign]
        if state == "waiting for its mask":
            self.engine._masks.fill_masks = filling
        if state == "compiling its grammar":
            assert grammars is not None
            compile_grammar = grammars._compile

            def compiling(*args, **kwargs):
                self.hold()
                return compile_grammar(*args, **kwargs)

            grammars._compile = compiling  # type: ignore[method-assign]
        if state == "tokenizing":
            tokenizer = served.parts.tokenizer
            assert tokenizer is not None
            encode = tokenizer.encode

            def encoding(text: str, **kwargs):
                if len(text) > 4096:
                    self.hold()
                return encode(text, **kwargs)

            tokenizer.encode = encoding  # type: ignore[method-assign]

    def hold(self) -> None:
        self.reached.set()
        assert self.released.wait(30)

    def may_preempt(self, victim: RequestState) -> bool:
        """Return True at one step alone: what is left in the inbox would be taken for the abort."""
        if self.has_preempted or self.engine.table.num_outputs[victim.row] != 3:
            return False
        self.has_preempted = True
        return True

    @property
    def victim(self) -> RequestState | None:
        return next((v for name, v in list(self.engine.states.by_id.items()) if name != BYSTANDER), None)

    def takes_part(self, batch: StepBatch) -> bool:
        victim = self.victim
        if victim is None or self.engine.states.slot[victim.row] < 0:
            return False
        return bool((batch.slots == self.engine.states.slot[victim.row]).any())


class GrpcVictim:
    """A call from this process."""

    def __init__(self, served: HttpServed, fields: dict[str, Any], reads: bool) -> None:
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{served.grpc_server.port}", options=[] if reads else UNREAD
        )
        method = self.channel.unary_stream(GENERATE, response_deserializer=pb.GenerateResponse.FromString)
        self.call: Any = method(make_request(**fields, request_id=VICTIM, deadline_ms=600e3).SerializeToString())
        self.reading = asyncio.create_task(self._read()) if reads else None

    async def _read(self) -> None:
        try:
            async for _ in self.call:
                pass
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass

    async def close(self) -> None:
        await self.channel.close()
        if self.reading is not None:
            await self.reading


class OtherProcess:
    """A call from another process."""

    def __init__(self, served: HttpServed, fields: dict[str, Any], reads: bool) -> None:
        target = f"127.0.0.1:{served.grpc_server.port}"
        fields = {**fields, "request_id": VICTIM}
        self.process = ClientProcess(grpc_client, (target, fields, reads))

    async def close(self) -> None:
        self.process.end()


async def start(way: str, served: HttpServed, fields: dict[str, Any], reads: bool) -> Any:
    if way.startswith("HTTP"):
        connection = await served.raw(completion(stream=True, request_id=VICTIM, **fields))
        if not reads:
            connection.reader._transport.pause_reading()  # type: ignore[attr-defined]
        return connection
    if way in ("client killed", "client stopped"):
        return OtherProcess(served, fields, reads)
    return GrpcVictim(served, fields, reads)


async def give_up(way: str, served: HttpServed, victim: Any, clock: JumpingClock, held: Held) -> None:
    match way:
        case "gRPC cancel":
            victim.call.cancel()
        case "channel closed":
            await victim.channel.close()
        case "deadline":
            clock.ahead_s += LATER_S
        case "client killed":
            victim.process.kill()
        case "client stopped":
            victim.process.stop()
        case "HTTP closed":
            victim.writer.transport.abort()
        case "HTTP half-closed":
            victim.writer.write_eof()
        case "engine abort":
            live = held.victim
            served.engine.abort(VICTIM if live is None else live.request.request_id)
        case _:
            raise AssertionError(way)
    if way != "deadline" and held.state not in BEFORE_THE_ENGINE:
        await served.until(lambda: served.engine._inbox)  # the engine's thread will hear of it


@pytest.mark.in_turn(8)
@pytest.mark.parametrize(("state", "way"), CASES)
def test_nothing_is_left(state, way):
    fields = {
        "prompt": "victim",
        "max_tokens": 100,
        "temperature": 0.0,
        "ignore_eos": True,
        **STATES[state],
    }
    if state == "blocked in a write" and not way.startswith("HTTP"):
        fields["max_tokens"] = 600  # buffers of gRPC take less
    if fields.get("structured_outputs"):
        del fields["ignore_eos"]
    clock = JumpingClock()

    async def scenario(served: HttpServed) -> None:
        parts, reads = served.parts, state != "blocked in a write"
        gate = parts.executor.gate  # type: ignore[attr-defined]
        held = Held(served, state)
        gate.clear()
        other = request_of(served, BYSTANDER, 60)
        bystander = asyncio.create_task(tokens_of(served, other))
        await served.until(lambda: parts.engine.num_live == 1)
        victim = await start(way, served, fields, reads)
        try:
            if state not in BEFORE_THE_ENGINE:  # it may come in time for the step that is about to be held
                await served.until(lambda: served.engine._inbox or parts.engine.num_live == 2)
            gate.set()
            await served.until(held.reached.is_set, 40)
            if not reads:
                await blocked(served, held)
            await give_up(way, served, victim, clock, held)
            held.released.set()
            await served.until(lambda: parts.engine.num_live <= 1 and held.victim is None)
            assert held.steps_after <= 1 or (way == "engine abort" and state in BEFORE_THE_ENGINE)
            assert await bystander == expected_tokens(other)
            after = request_of(served, "after", 20)
            assert await tokens_of(served, after) == expected_tokens(after)
            await served.until(lambda: not parts.engine.has_work)
            await asyncio.wrap_future(served.engine.call(lambda: assert_clean(parts)))
        finally:
            held.released.set()
            gate.set()
            await victim.close()
        await served.idle()
        await served.until(lambda: served.grpc_server.num_open == 0)

    async def whole() -> None:
        room: dict[str, Any] = {}
        if state == "blocked in a write":
            room = {"num_blocks": 4096, "max_model_len": 2048}
        elif state == "tokenizing":
            room = {"num_blocks": 8192, "max_model_len": 8192}
        slots = 1 if state == "queued" else 4
        parts = toy_parts(clock=clock, max_num_seqs=slots, debug=not room, **room)
        async with http_serving(parts, grpc=KEEPALIVE, connections=PATIENCE) as served:
            await asyncio.wait_for(scenario(served), 60)

    asyncio.run(whole())


async def blocked(served: HttpServed, held: Held) -> None:
    """Wait until the victim has output that its blocked writer does not take."""
    live = held.victim
    assert live is not None
    stream, since = served.engine._streams.by_request[live.request], 0
    while since < 40:
        await asyncio.sleep(0.005)
        since = since + 1 if stream._unread is not None else 0


def request_of(served: HttpServed, name: str, max_tokens: int) -> EngineRequest:
    params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return served.parts.build_request(prompt=name, params=params, request_id=name)


async def tokens_of(served: HttpServed, request: EngineRequest) -> list[int]:
    return [t async for delta in served.engine.submit(request) for t in delta.token_ids]
