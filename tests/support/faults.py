"""Faults for any engine: of steps, of memory, of clocks, of clients.

`inject(parts, {3: StepFault("raise")})` makes the fourth step fail, whatever executor runs it, a real model's too. The
faults of `FakeExecutor` are for the simulation: they also spoil its memory. `faulty_server.py` is a server process with
such a plan.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import grpc
import numpy as np
from numpy.typing import NDArray

from apt_jax.core.step import StepBatch, StepResult
from apt_jax.engine import Engine
from apt_jax.executor import Executor, MaskedStepHandle, StepHandle
from apt_jax.frontend.components import EngineComponents
from apt_jax.utils.clock import WallClock
from serve.client import make_request

GENERATE = "/aptjax.v1.AptServe/Generate"

UNREAD = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
"""Options of a client that takes no more than it reads."""

What = Literal["raise", "memory", "lost", "destroy", "exit", "slow", "hang", "nan", "token", "short"]
When = Literal["before", "after", "result"]


@dataclasses.dataclass(frozen=True)
class StepFault:
    """Fault of one step."""

    what: What
    """"raise"; "memory": what JAX raises where there is none; "lost": what it raises once the GPU is; "destroy": the cache is gone, as after a failed step that
    has taken it; "exit": SystemExit; "slow"; "hang": until `FaultyExecutor.released`; "nan": a row that is not finite;
    "token": one outside the vocabulary; "short": the result misses its last row."""
    when: When = "before"
    """Anything was written, afterwards, or as the result is fetched; of what raises."""
    row: int = 0
    seconds: float = 1.0
    """Duration of "slow"."""


Plan = Mapping[int, StepFault] | Callable[[int, StepBatch], StepFault | None]
"""By the number of the step, from 0."""


def out_of_memory() -> Exception:
    """Return the error that JAX raises when the device is out of memory."""
    import jax.numpy as jnp

    try:
        jnp.zeros(1 << 50, jnp.int8)
    except Exception as error:
        return error
    raise AssertionError("a petabyte of memory")


class FaultyExecutor:
    """An executor that does what another one does, but for its plan.

    Attributes:
        num_steps: steps asked for, those that failed among them.
        num_resets: how often the pool was recreated.
        batches: the sizes (rows, tokens) of the steps.
        released: ends what hangs.
    """

    def __init__(self, inner: Executor, plan: Plan) -> None:
        self.inner, self.plan = inner, plan
        self.num_steps = self.num_resets = 0
        self.batches: list[tuple[int, int]] = []
        self.released = threading.Event()
        self._is_broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def reset(self) -> None:
        self.num_resets += 1
        self.inner.reset()
        self._is_broken = False

    def execute(self, batch: StepBatch) -> StepHandle:
        assert not self._is_broken, "a step after one that failed, without reset"
        number, self.num_steps = self.num_steps, self.num_steps + 1
        self.batches.append((batch.num_tokens.size, batch.token_ids.size))
        plan = self.plan
        fault = plan.get(number) if isinstance(plan, Mapping) else plan(number, batch)
        if fault is None:
            return self.inner.execute(batch)
        if fault.what == "slow":
            time.sleep(fault.seconds)
        elif fault.what == "hang":
            self.released.wait(60)
        elif fault.what == "destroy":
            self._is_broken = True
            for pool in getattr(getattr(self.inner, "runner", None), "pools", ()):
                pool.delete()
        elif fault.when == "before":
            self._fail(fault)
        handle = self.inner.execute(batch)
        if fault.when == "after":
            self._fail(fault)
        return _FaultyHandle(self, handle, fault, batch)

    def _fail(self, fault: StepFault) -> None:
        if fault.what not in ("raise", "memory", "lost", "exit"):
            return
        self._is_broken = True
        if fault.what == "memory":
            raise out_of_memory()
        if fault.what == "lost":
            raise RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
        raise SystemExit("planted") if fault.what == "exit" else RuntimeError("planted")


@dataclasses.dataclass
class _FaultyHandle:
    executor: FaultyExecutor
    inner: StepHandle
    fault: StepFault
    batch: StepBatch

    def sample(self, masks: NDArray[np.int32]) -> None:
        cast("MaskedStepHandle", self.inner).sample(masks)

    def result(self) -> StepResult:
        result, fault = self.inner.result(), self.fault
        if fault.when == "result":
            self.executor._fail(fault)
        row = fault.row % self.batch.num_tokens.size
        ids, finite = result.token_ids.copy(), result.finite.copy()
        if fault.what == "nan":
            finite[row] = False
        if fault.what == "token":
            ids[row] = 2**31 - 1
        if fault.what == "short":
            ids, finite = ids[:-1], finite[:-1]
        return dataclasses.replace(result, token_ids=ids, finite=finite)


def inject(parts: EngineComponents, plan: Plan) -> FaultyExecutor:
    """Put a plan between the engine and its executor, before anything is served."""
    faulty = FaultyExecutor(parts.engine.executor, plan)
    parts.engine.executor = parts.engine._steps._executor = cast("Executor", faulty)
    return faulty


def plan_of(text: str) -> dict[int, StepFault]:
    """ "3:raise,7:memory:result": by the number of the step, what and when."""
    plan = {}
    for entry in filter(None, text.split(",")):
        number, *fault = entry.split(":")
        plan[int(number)] = StepFault(*fault)  # type: ignore[arg-type]
    return plan


def fail_allocations(engine: Engine, fails: Callable[[int], bool]) -> None:
    """The pool gives nothing where `fails(number of blocks asked for)`."""
    pool = engine.cache.pool
    allocate = pool.allocate

    def failing(num: int) -> NDArray[np.int32] | None:
        return None if fails(num) else allocate(num)

    pool.allocate = failing  # type: ignore[method-assign]


class JumpingClock(WallClock):
    """The engine's clock, which can be put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


class ClientProcess:
    """A client that can be killed or stopped: a process of its own that runs a function of a module, and says when it
    is there.

    Args:
        function: gets `ready`, to be called once, and `args`. It must be importable from where this process finds it.
    """

    def __init__(self, function: Callable[..., None], args: Sequence[Any]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["faults"])  # so that a client is there at once
        self._ready = context.Event()
        self._process = context.Process(target=function, args=(self._ready.set, *args), daemon=True)
        self._process.start()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def _send(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """As the kernel does, without a farewell."""
        self._send(signal.SIGKILL)

    def stop(self) -> None:
        """Freeze it: its connections stay, and nobody reads."""
        self._send(signal.SIGSTOP)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        self._process.join(10)


def grpc_client(ready: Callable[[], None], target: str, fields: dict[str, Any], reads: bool) -> None:
    """For `ClientProcess`: asks for an answer, reads it or does not, and stays."""
    with grpc.insecure_channel(target, options=[] if reads else UNREAD) as channel:
        call: Any = channel.unary_stream(GENERATE)(make_request(**fields).SerializeToString())
        ready()
        if reads:
            for _ in call:
                pass
        threading.Event().wait()
