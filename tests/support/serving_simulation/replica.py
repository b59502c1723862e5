"""One server process, from its start to its end."""

import asyncio
import dataclasses
from collections.abc import Callable

import numpy as np

from apt_jax.config import CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.costs.model import StepCosts
from apt_jax.engine.request_states import WAITING
from apt_jax.frontend.components import EngineComponents, build_components
from apt_jax.sched import make_policy
from serve.http_api.app import HttpApp
from serve.http_api.app_config import AppConfig
from serve.observability.prometheus import ServerMetrics
from serve.preprocessing import Preprocessing, PreprocessingLimits
from serve.security.api_keys import ApiKeys
from tests.support.fake_executor import FakeExecutor
from tests.support.fake_grammars import FakeGrammars
from tests.support.serving_simulation.calls import call_id_of, key_of
from tests.support.serving_simulation.connection import Connection
from tests.support.serving_simulation.engine import STEP_TIMEOUT_S, ReplicaClock, SimulatedEngine
from tests.support.serving_simulation.faults import ReplicaFaults
from tests.support.serving_simulation.replica_checks import ReplicaChecks
from tests.support.serving_simulation.scenario import ServingScenario
from tests.support.serving_simulation.world import World, tokenizer
from tests.support.simulation_harness import SimulationError, expect
from tests.support.toy_serving import EOS, VOCAB_SIZE

MAX_MODEL_LEN = 96


class Replica:
    """One server process.

    Args:
        world: it belongs to.
        place: its number among the replicas.
        generation: how often a process has been started in this place.
        on_end: called once when the process has ended.
    """

    def __init__(self, world: World, place: int, generation: int, on_end: Callable[["Replica"], None]) -> None:
        self.world, self.place, self._on_end = world, place, on_end
        scenario, loop = world.scenario, world.loop
        self.is_paused = self.is_cut_off = self.was_paused = self.is_dead = self.is_stopping = False
        self.connections: list[Connection] = []
        self._shutdowns: list[asyncio.Task[None]] = []
        self.clock = ReplicaClock(loop, self)
        self.faults = ReplicaFaults(world, np.random.default_rng([2, world.seed, place, generation]), self.clock)
        self.executor = FakeExecutor(
            num_blocks=scenario.num_blocks,
            block_size=scenario.block_size,
            max_num_seqs=scenario.max_num_seqs,
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            duration_s=self.faults.duration_s,
            fault=self.faults.step_fault,
        )
        self.parts = _build_parts(scenario, world.seed, self.executor, self.clock)
        keys = ApiKeys([key_of(i) for i in range(scenario.num_tenants)]) if scenario.num_tenants else None
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
        self.engine = SimulatedEngine(self, self.parts, metrics)
        self.app.use(self.engine, metrics)
        self.checks = ReplicaChecks(self)
        self._watching = world.spawn(self._watch_end())

    @property
    def name(self) -> str:
        return f"replica {self.place}"

    @property
    def is_unreachable(self) -> bool:
        """Nothing comes in or goes out."""
        return self.is_paused or self.is_cut_off

    def begin_iteration(self) -> None:
        """Prepare the checks of an iteration, and plant faults before it."""
        self.checks.begin_iteration()
        if self.world.faults_on:
            self.faults.disturb(self.parts.engine)

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
        expect(
            self.faults.hangs or self.faults.failed_twice,
            f"{self.name}: the engine ended: {reason}",
        )
        expect(
            self.engine.num_open == 0, f"{self.name}: the engine has ended and {self.engine.num_open} streams are open"
        )
        self.world.note["engine died: hung step" if self.faults.hangs else "engine died: two failures"] += 1
        self.app.drain()
        await asyncio.sleep(0.1)
        admitted = {call_id_of(request) for request in self.checks.admission.added_s}
        for connection in self.connections:
            is_told = connection.task.done() or connection.is_blocked or connection.cut_s is not None
            name = connection.call.engine_id
            # A call that repeats an id may still be read, while the one that had the id before was admitted.
            is_read = connection.call.duplicate_of is not None
            expect(is_told or is_read or name not in admitted, f"{name}: the engine has ended, and the call goes on")
        self.kill()

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
        expect(
            took_s <= drain_s + (0.1 if alone else 3 * STEP_TIMEOUT_S)
            or self.faults.hangs
            or self.was_paused
            or self.engine.dead_reason is not None,
            f"{self.name}: {took_s:.1f} s to stop, {drain_s} are allowed",
        )
        await self._settled()
        if not self.is_dead and self.engine.dead_reason is None:
            self.checks.check_clean()
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
        self._on_end(self)

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


def _build_parts(scenario: ServingScenario, seed: int, executor: FakeExecutor, clock: ReplicaClock) -> EngineComponents:
    """Build the engine and what belongs to it."""
    costs = StepCosts(prefill_base_s=0.01, prefill_per_token_s=1e-4, decode_base_s=0.01, decode_per_request_s=1e-4)
    parts = build_components(
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
        executor,
        kinds=(
            CacheKindSpec(name="kv", blocks_per_group=2, offered=scenario.offered[0]),
            CacheKindSpec(name="hidden", blocks_per_group=1, offered=scenario.offered[1], extra_per_token_s=1e-6),
        ),
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        tokenizer=tokenizer(),
        eos_token_ids=(EOS,),
        policy=make_policy(scenario.policy, seed=seed),
        clock=clock,
        costs=costs,
        debug=scenario.debug,
    )
    return dataclasses.replace(parts, grammars=FakeGrammars(VOCAB_SIZE))  # type: ignore[arg-type]
