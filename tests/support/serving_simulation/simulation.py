"""The whole history of a seed: arrivals and faults, then everything must end, and nothing may be left."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from unittest import mock

from tests.support.serving_simulation.calls import Call, draw_call
from tests.support.serving_simulation.client import run_client
from tests.support.serving_simulation.processes import Processes
from tests.support.serving_simulation.router import Router
from tests.support.serving_simulation.world import World
from tests.support.simulation_harness import SimulationError, expect


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
    """One seed's history; see the docstring of the package."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.processes = Processes(self.world)
        self.router = Router(self.world, self.processes)

    def run(self) -> ServingReport:
        """The whole history.

        Raises:
            SimulationError: something is wrong.
        """
        world = self.world
        try:
            with _quiet(), mock.patch.object(concurrent.futures, "ThreadPoolExecutor", world.make_pool):
                asyncio.set_event_loop(None)
                try:
                    world.loop.run_until_complete(self._run())
                finally:
                    self._close()
            world.raise_failure()
        except Exception as error:
            text = f"seed {world.seed}, {world.loop.time():.3f} s: {type(error).__name__}: {error}\n{world.scenario}"
            raise SimulationError(f"{text}\nreplay: python -m tests.support.serving_simulation {world.seed}") from error
        outcomes = collections.Counter(str(call.outcome) for call in world.calls)
        return ServingReport(
            seed=world.seed,
            num_steps=world.num_steps,
            virtual_s=world.loop.time(),
            digest=world.digest,
            outcomes=outcomes,
            sometimes=world.note,
        )

    async def _run(self) -> None:
        world, processes = self.world, self.processes
        for place in range(world.scenario.num_replicas):
            processes.start(place)
        for at_s in world.scenario.stop_at_s:
            world.loop.call_later(at_s, processes.signal, int(world.rng.integers(world.scenario.num_replicas)))
        faults = world.spawn(processes.inject_faults())
        clients = await self._send_calls()
        # The second phase: no arrivals, no faults; what is left must end.
        world.faults_on = False
        processes.resume_all()
        await faults
        await self._end(clients)
        await self._check_nothing_left()

    async def _send_calls(self) -> list[asyncio.Task[None]]:
        """The arrivals; returns the clients."""
        world, scenario = self.world, self.world.scenario
        clients = []
        for number in range(scenario.num_calls):
            call = self._draw_call(number)
            world.calls.append(call)
            clients.append(world.spawn(run_client(world, self.router, call)))
            if scenario.gap_s and not (scenario.flood and world.rng.random() < 0.7):
                await asyncio.sleep(float(world.rng.exponential(scenario.gap_s)))
            world.raise_failure()
        return clients

    def _draw_call(self, number: int) -> Call:
        """Draw a call; some have the id of one that came shortly before."""
        world = self.world
        call = draw_call(world.rng, world.scenario, number)
        if world.calls and world.rng.random() < world.scenario.p_duplicate:
            other = world.calls[int(world.rng.integers(max(0, number - 3), number))]
            if other.duplicate_of is None:
                call.duplicate_of, call.request_id = other, other.request_id
                call.body["request_id"] = other.request_id
        return call

    async def _end(self, clients: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the clients, then stop the replicas."""
        world, replicas = self.world, self.processes.replicas
        deadline_s = world.loop.time() + 600.0
        while not all(task.done() for task in clients):
            world.raise_failure()
            expect(
                world.loop.time() < deadline_s,
                f"calls without an end: {[c.request_id for c in world.calls if c.outcome is None]}",
            )
            await asyncio.sleep(0.1)
        world.raise_failure()
        for replica in list(replicas):
            if replica is not None and not replica.is_stopping:
                await replica.stop(30.0)
            world.raise_failure()
        while any(replica is not None for replica in replicas):
            world.raise_failure()
            expect(world.loop.time() < deadline_s, "a replica does not stop")
            await asyncio.sleep(0.1)
        world.raise_failure()

    async def _check_nothing_left(self) -> None:
        """After the last process has ended: no task, no timer, no job, no error that nobody has seen."""
        await asyncio.sleep(120.0)  # longer than every time limit
        self.world.raise_failure()
        own = asyncio.current_task()
        tasks = [t for t in asyncio.all_tasks() if t is not own and not t.done()]
        expect(not tasks, f"tasks are left: {[str(t.get_coro()) for t in tasks]}")
        timers = self.world.loop.timers()
        expect(not timers, f"timers are left: {timers}")
        expect(not any(pool.num_open for pool in self.world.pools), "jobs are left")
        expect(not self.world.loop.errors, f"errors that nobody has seen: {self.world.loop.errors[:1]}")

    def _close(self) -> None:
        for task in asyncio.all_tasks(self.world.loop):
            task.cancel()
        self.world.faults_on = False
        for replica in [*self.processes.past, *self.processes.replicas]:
            if replica is not None:
                replica.is_dead = True
        with contextlib.suppress(Exception):
            self.world.loop.run_until(self.world.loop.time())
        self.world.loop.close()


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
