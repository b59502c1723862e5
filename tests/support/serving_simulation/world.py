"""State that every part of a history shares: its seed, its loop, its events and its first failure."""

import asyncio
import collections
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from apt_jax.text.tokenizer import Tokenizer
from tests.support.serving_simulation.calls import Call
from tests.support.serving_simulation.scenario import draw_scenario
from tests.support.simulation_harness import SimulationError
from tests.support.toy_serving import byte_tokenizer
from tests.support.virtual_loop import VirtualLoop, VirtualPool


@functools.cache
def tokenizer() -> Tokenizer:
    """The tokenizer of bytes, made once."""
    return byte_tokenizer()


class World:
    """One history's scenario, time and events.

    Attributes:
        rng: for what is drawn outside of the replicas.
        calls: those that have arrived.
        note: how often each rare state, fault or outcome has occurred.
        pools: in place of the thread pools of the work before the engine.
        faults_on: false in the second phase.
        jumped: a clock has jumped.
        aborted: ids of the engine's requests that were aborted by an operator.
        error: the first failure.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = np.random.default_rng([20_261_122, seed])
        self.scenario = draw_scenario(self.rng)
        self.loop = VirtualLoop()
        self.calls: list[Call] = []
        self.note: collections.Counter[str] = collections.Counter()
        self.pools: list[VirtualPool] = []
        self.faults_on = True
        self.jumped = False
        self.aborted: set[str] = set()
        self.error: Exception | None = None
        self.num_steps = 0
        self._digest = hashlib.sha256()
        self._job_rng = np.random.default_rng([3, seed])
        self._tasks: list[asyncio.Task[Any]] = []

    @property
    def digest(self) -> str:
        """Digest of every event in order."""
        return self._digest.hexdigest()

    def log(self, *event: Any) -> None:
        """Add an event to the digest."""
        self.num_steps += event[0] == "step"
        self._digest.update(repr(event).encode())

    def fail(self, error: Exception) -> None:
        """Remember the first failure that came up in a callback."""
        self.error = self.error or error

    def raise_failure(self) -> None:
        """Raise the failure that came up, if there is one."""
        if self.error is not None:
            raise self.error

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
