"""Deterministic simulation of the real engine: one seed, one history, every promise checked on the way.

`simulate(seed)` draws a scenario (pool, blocks, budget, load, policy, and which faults there are), runs the engine on a
`FakeExecutor` in virtual time, and holds every stream against the one that a cache-free reference gives. First phase:
arrivals and faults; second phase: both stop, and all that is left must end within a bounded number of iterations, with
every block free.

Any failure is a `SimulationError` that ends with the command that replays it:

    python -m tests.support.simulation_harness SEED
"""

import collections
import contextlib
import dataclasses
import hashlib
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from apt_jax.config import SLO, CacheConfig, SchedulerConfig
from apt_jax.core.kinds import HIDDEN, KV, NO_KIND, CacheKindSpec, WindowSpec
from apt_jax.core.step import StepBatch
from apt_jax.core.tiers import Tiers
from apt_jax.costs.model import StepCosts
from apt_jax.engine import Engine, StepOutput
from apt_jax.engine.batch import PlainReserver, SharedReserver
from apt_jax.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
)
from apt_jax.request import EngineRequest, RequestMetrics, SamplingParams
from apt_jax.sched import all_policies, check_plan, make_policy
from apt_jax.sched.view import Plan, Policy, SchedulerView
from apt_jax.utils.clock import VirtualClock
from tests.support.fake_disk import FakeDisk
from tests.support.fake_executor import FakeExecutor, Fault, FaultKind, reference_tokens
from tests.support.faults import fail_allocations
from tests.support.random_plan_policy import PerturbedPolicy, RandomPlanPolicy, RandomPolicy
from tests.support.recount import Recount
from tests.support.sched_world import contents

VOCAB_SIZE = 31
"""Small, so that stop tokens are hit often."""

DRAIN_ITERATIONS = 5_000

REAL_POLICIES = tuple(all_policies())


class SimulationError(AssertionError):
    """A promise was broken; the message ends with the command that replays the seed."""


class _ProcessorFailure(Exception):
    """Raised by the simulated front end for some tokens."""


def expect(condition: object, message: str) -> None:
    """Raise a `SimulationError` unless a condition holds."""
    if not condition:
        raise SimulationError(message)


@dataclasses.dataclass(kw_only=True)
class Scenario:
    """Settings that a seed determines before anything runs."""

    block_size: int
    hidden_block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int | None
    offered: tuple[bool, bool]
    overlap: bool
    debug: bool
    policy: str
    chaos: RandomPlanPolicy
    num_requests: int
    burst: float
    """Mean arrivals an iteration."""
    p_abort: float
    p_preempt: float
    p_allocation_failure: float
    p_step_failure: float
    p_bad_row: float
    p_processor_failure: float
    p_processor_abort: float
    second_failure: bool
    """A step failure is followed by another at once: the engine must end."""
    prefix_caching: bool
    p_continue: float
    """A request's prompt begins with tokens of an earlier request."""
    num_host_blocks: int
    p_lost_copy: float
    """A transfer to host memory fails."""
    share_blocks: bool
    p_best_effort: float
    """A request is of the best-effort class."""
    has_disk: bool
    p_disk_failure: float
    """A group is not written, or not read."""
    disk_latency: int
    """Most iterations that a group takes to be read."""
    windows: WindowSpec | None
    """Windowed layers; None: there are none."""


def scenario_rng(seed: int) -> np.random.Generator:
    """Where everything of a seed is drawn from, the scenario first."""
    return np.random.default_rng([20_250_622, seed])


def draw_scenario(rng: np.random.Generator) -> Scenario:
    """Swarm: each fault is there or not, then its rate is drawn (docs/lab/testing.md)."""

    def rate(most: float, p: float = 0.5) -> float:
        return float(rng.uniform(0, most)) if rng.random() < p else 0.0

    second_failure = bool(rng.random() < 0.04)
    block_size = int(rng.choice([1, 2, 3, 4, 8, 16]))
    # Layer inputs may have another width than keys, but are smaller than keys and values.
    sizes, conversions, tiers, classes, disks, layers = rng.spawn(6)
    is_odd = sizes.random() < 0.4
    inputs = int(sizes.integers(block_size // 2 + 1, 2 * block_size + 2))
    hidden_block_size = inputs if is_odd else block_size
    max_num_seqs = int(rng.choice([1, 2, 4, 8, 16]))
    policy = str(rng.choice(REAL_POLICIES))
    wrap = rng.random()
    policy = "any" if wrap < 0.2 else policy if wrap < 0.6 else f"{policy}+chaos"
    num_host_blocks = int(tiers.choice([2, 5, 20, 200])) if tiers.random() < 0.6 else 0
    share_blocks = num_host_blocks > 0 and bool(classes.random() < 0.6)
    if share_blocks and classes.random() < 0.7:
        policy = str(classes.choice(["bros", "bros+chaos"]))
    scenario = Scenario(
        windows=None,
        block_size=block_size,
        hidden_block_size=hidden_block_size,
        num_blocks=int(rng.choice([2, 3, 8, 12, 16, 24, 40, 80])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(rng.choice([0, 1, 3, 8, 30, 100])),
        max_num_queued_reqs=int(rng.choice([3, 10, 1000])),
        max_num_queued_tokens=int(rng.choice([20, 100])) if rng.random() < 0.2 else None,
        offered=((True, True), (True, True), (True, True), (True, False), (False, True))[int(rng.integers(5))],
        overlap=bool(rng.random() < 0.7),
        debug=bool(rng.random() < 0.5),
        policy=policy,
        chaos=RandomPlanPolicy(
            preempt=rate(0.2),
            skip=rate(0.3),
            chunk=rate(0.6),
            flip=rate(0.7),
            shuffle=rate(0.5),
            convert=float(conversions.uniform(0.2, 1.0)),
        ),
        num_requests=int(rng.integers(5, 40)),
        burst=float(rng.choice([0.2, 1.0, 5.0])),
        p_abort=rate(0.1),
        p_preempt=rate(0.1),
        p_allocation_failure=rate(0.1),
        p_step_failure=0.2 if second_failure else rate(0.04),
        p_bad_row=rate(0.08),
        p_processor_failure=rate(0.03, 0.3),
        p_processor_abort=rate(0.05, 0.3),
        second_failure=second_failure,
        prefix_caching=bool(rng.random() < 0.85),
        p_continue=rate(0.9, 0.7),
        num_host_blocks=num_host_blocks,
        p_lost_copy=float(tiers.uniform(0, 0.3)) if tiers.random() < 0.4 else 0.0,
        share_blocks=share_blocks,
        p_best_effort=float(classes.uniform(0.2, 0.8)) if share_blocks else 0.0,
        has_disk=num_host_blocks > 0 and bool(disks.random() < 0.6),
        p_disk_failure=float(disks.uniform(0, 0.3)) if disks.random() < 0.4 else 0.0,
        disk_latency=int(disks.choice([1, 1, 3])),
    )
    if layers.random() > 0.1:
        return scenario
    windows = WindowSpec(  # keys and values alone, on the device alone
        window=int(layers.choice([2, 3, 7, 20, 100])),
        block_size=int(layers.choice([block_size, 2, 4])),
        blocks_per_group=int(layers.choice([2, 4, 10])),
    )
    alone: dict[str, Any] = dict(num_host_blocks=0, share_blocks=False, p_best_effort=0.0, has_disk=False)
    return dataclasses.replace(scenario, windows=windows, offered=(True, False), **alone)


def make_policy_named(name: str, seed: int, chaos: RandomPlanPolicy, kinds: tuple[CacheKindSpec, ...]) -> Policy:
    """A policy of the swarm."""
    if name == "any":
        return RandomPolicy(seed, chaos)
    inner, _, wrap = name.partition("+")
    policy = make_policy(inner, seed=seed)
    return PerturbedPolicy(policy, seed, chaos) if wrap else policy


@dataclasses.dataclass(kw_only=True)
class _Stream:
    """A request and what has come of it."""

    request: EngineRequest
    expected: list[int]
    reason: str
    stop_reason: int | str | None
    processor_fails: bool
    got: list[int] = dataclasses.field(default_factory=list)
    finish: str | None = None
    aborted: bool = False
    row_fault: bool = False


class _CheckedPolicy:
    """Passes views and plans on, and looks at both."""

    def __init__(self, inner: Policy, note: collections.Counter[str]) -> None:
        self.name = inner.name
        self.inner = inner
        self.engine: Engine | None = None
        self._note = note

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        both = np.concatenate([view.waiting, view.running])
        expect(np.unique(both).size == both.size and table.live[both].all(), "view: rows twice or dead")
        for rows in (view.waiting, view.running):
            expect((np.diff(table.rank[rows]) > 0).all(), "view: rows not by rank")
        expect((view.remaining(both) >= 1).all(), "view: a row with nothing to compute")
        expect(
            (table.num_outputs[both] < table.max_tokens_total[both] - table.prompt_len[both]).all(),
            "view: a row that has all its tokens",
        )
        expect(
            view.free_blocks + int(table.num_blocks[view.running].sum()) + view.shared_blocks == view.total_blocks,
            "view: blocks that nobody holds",
        )
        expect(
            (table.kind[view.waiting] == -1).all() and (table.kind[view.running] >= 0).all(),
            "view: kinds",
        )
        before = contents(table)
        plan = self.inner.schedule(view)
        check_plan(view, plan)
        expect(contents(table) == before, "the policy changed the table")
        self._note["conversion planned"] += plan.convert.size
        if plan.rows.size:
            starts = table.num_cached[plan.rows] == 0
            self._note["mixed prefill and decode"] += bool(starts.any() and not starts.all())
            chunked = (table.num_cached[plan.rows] + plan.num_tokens < table.num_tokens[plan.rows]).any()
            self._note["chunked prefill"] += bool(chunked)
        return plan


@dataclasses.dataclass(kw_only=True)
class Report:
    """Report of one simulation."""

    seed: int
    iterations: int
    digest: str
    """Digest of every output in order; equal for equal seeds."""
    sometimes: collections.Counter[str]


class Simulation:
    """One seed's history; see the module docstring.

    Args:
        seed: everything is drawn from it.
        full_checks: False: neither accounting nor batches are looked at, only the streams.
        engine_class: the engine, or one with a planted bug.
    """

    def __init__(self, seed: int, *, full_checks: bool = True, engine_class: type[Engine] = Engine) -> None:
        self.seed = seed
        self.full_checks = full_checks
        self.rng = scenario_rng(seed)
        self.scenario = scenario = draw_scenario(self.rng)
        self.note: collections.Counter[str] = collections.Counter()
        self.clock = VirtualClock()
        self.faults_on = True
        self.num_step_faults = 0
        self.row_faults_planted = False
        self._fault_rng = np.random.default_rng([1, seed])
        self._class_rng = np.random.default_rng([2, seed])
        self._next_fault_s = 0.0
        self.executor = FakeExecutor(
            num_blocks=scenario.num_blocks,
            block_size=scenario.block_size,
            hidden_block_size=scenario.hidden_block_size,
            max_num_seqs=scenario.max_num_seqs,
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            duration_s=lambda batch: 0.01 + 0.0001 * batch.token_ids.size,
            fault=self._fault,
            num_host_blocks=scenario.num_host_blocks,
            lost=lambda: self.faults_on and self._fault_rng.random() < self.scenario.p_lost_copy,
            windows=scenario.windows,
        )
        has_disk = scenario.has_disk and scenario.prefix_caching
        self._disk_rng = np.random.default_rng([2, seed])
        self.disk = (
            None
            if not has_disk
            else FakeDisk(
                self.executor.host,
                latency=lambda: int(self._disk_rng.integers(scenario.disk_latency)),
                fails=lambda: self.faults_on and self._disk_rng.random() < scenario.p_disk_failure,
            )
        )
        if not full_checks:
            self.executor._check = lambda batch: None  # type: ignore[method-assign]
        kinds = (
            CacheKindSpec(name="kv", blocks_per_group=2, offered=scenario.offered[KV], windows=scenario.windows),
            CacheKindSpec(
                name="hidden",
                blocks_per_group=1,
                offered=scenario.offered[HIDDEN],
                extra_base_s=1e-4,
                extra_per_token_s=1e-6,
            ),
        )
        self.policy = _CheckedPolicy(make_policy_named(scenario.policy, seed, scenario.chaos, kinds), self.note)
        if not full_checks:
            self.policy = self.policy.inner
        self.engine = engine_class(
            self.executor,
            self.policy,
            self.clock,
            kinds,
            SchedulerConfig(
                max_num_seqs=scenario.max_num_seqs,
                max_num_batched_tokens=scenario.max_num_batched_tokens,
                max_num_queued_reqs=scenario.max_num_queued_reqs,
                max_num_queued_tokens=scenario.max_num_queued_tokens,
                overlap=scenario.overlap,
            ),
            CacheConfig(block_size=scenario.block_size, enable_prefix_caching=scenario.prefix_caching),
            costs=StepCosts(
                prefill_base_s=0.01,
                prefill_per_token_s=1e-4,
                decode_base_s=0.01,
                decode_per_request_s=1e-4,
            ),
            vocab_size=VOCAB_SIZE,
            output_processor=self,
            tiers=Tiers(host=self.executor.host if scenario.num_host_blocks else None, disk=self.disk),
            reserver=SharedReserver if scenario.share_blocks and scenario.prefix_caching else PlainReserver,
            debug=scenario.debug and full_checks,
        )
        self._instrument()
        self._recount = Recount(self.engine) if full_checks else None
        self.streams: dict[str, _Stream] = {}
        self.open: dict[str, _Stream] = {}
        self._digest = hashlib.sha256()
        self._metrics: dict[str, RequestMetrics] = {}
        self._preempted_before: dict[int, int] = {}  # preemptions up to the last token, by rank
        self._submitted = 0
        self._num_idle = 0
        """Iterations without faults since something was last run or delivered."""
        self.iterations = 0

    # --- faults ----------------------------------------------------------------------------------------------------

    def _fault(self, batch: StepBatch) -> Fault | None:
        """Step failures stay more than a minute apart, unless the scenario wants the engine to end."""
        if not self.faults_on:
            return None
        rng, scenario = self._fault_rng, self.scenario
        if rng.random() < scenario.p_step_failure and self.clock.now_s() >= self._next_fault_s:
            if not scenario.second_failure:
                self._next_fault_s = math.inf  # until the engine has recovered, see `_step`
            self.num_step_faults += 1
            self.note["step failure with >= 2 rows"] += batch.slots.size >= 2
            self.note["step failure with a token in flight"] += bool((batch.token_ids == -1).any())
            kinds = (
                FaultKind.OUT_OF_MEMORY if self.num_step_faults % 2 else FaultKind.RAISE_BEFORE,
                FaultKind.RAISE_AFTER,
                FaultKind.RAISE_IN_RESULT,
                FaultKind.PARTIAL,
            )
            kind = kinds[int(rng.integers(len(kinds)))]
            self.note[f"step failure: {kind.name.lower()}"] += 1
            return Fault(kind=kind)
        if rng.random() < scenario.p_bad_row:
            row = int(rng.integers(batch.slots.size * 2))
            if batch.samples[row % batch.slots.size]:
                self.row_faults_planted = True
                self.note["bad row with >= 2 bystanders"] += batch.slots.size >= 3
                return Fault(
                    kind=FaultKind.NOT_FINITE if rng.random() < 0.5 else FaultKind.BAD_TOKEN,
                    row=row,
                )
        return None

    def _instrument(self) -> None:
        """Count rare states where they arise, and make allocations fail."""
        engine, note = self.engine, self.note
        preempt = engine.states.preempt
        scenario = self.scenario
        calm = scenario.policy in REAL_POLICIES and not (
            scenario.p_preempt or scenario.p_allocation_failure or scenario.p_step_failure
        )

        def noting_preempt(row: int, *cause: Any) -> None:
            table = engine.table
            note["preempted in mid-prompt"] += bool(0 < table.num_cached[row] < table.prompt_len[row])
            note["preempted with a token in flight"] += bool(engine.states.in_flight[row] > 0)
            note["preempted before a new token"] += bool(
                table.num_preemptions[row] and not table.tokens_since_preemption[row]
            )
            preempt(row, *cause)
            live = engine.states.by_row[row]
            if calm and live is not None:
                waits = table.num_preemptions[row] - self._preempted_before.get(live.rank, 0)
                expect(waits <= 16, f"preempted {waits} times without a new token")
            note["preempted 3 times"] += bool(table.num_preemptions[row] == 3)

        def allocation_fails(num: int) -> bool:
            fails = self.faults_on and self._fault_rng.random() < self.scenario.p_allocation_failure
            note["allocation failure of > 1 block"] += bool(fails and num > 1)
            return fails

        def counting(name: str, function: Callable) -> Callable:
            def counted(*args):
                note[name] += 1
                return function(*args)

            return counted

        cache, execute = engine.cache, self.executor.execute
        cache.attach = counting("prefix found", cache.attach)  # type: ignore[method-assign]
        cache.groups._deduplicate = counting("group exchanged", cache.groups._deduplicate)  # type: ignore[method-assign]
        cache.groups._evict = counting("group evicted", cache.groups._evict)  # type: ignore[method-assign]
        cache.drop_prefix = counting("prefix dropped", cache.drop_prefix)  # type: ignore[method-assign]

        def noting_execute(batch: StepBatch):
            note["block copied"] += bool(len(batch.copies))
            note["block saved"] += bool(len(batch.saves))
            note["block loaded"] += bool(len(batch.loads))
            if batch.conversions is not None:
                rows = batch.conversions.rows
                note["conversion"] += rows.size
                note["conversion of two rows"] += bool(rows.size > 1)
                note["conversion beside a copy"] += bool(len(batch.copies))
                note["conversion within a prompt"] += bool((batch.num_tokens[rows] > 1).any())
                note["conversion with a token in flight"] += bool((batch.token_ids == -1).any())
                shared = np.isin(batch.conversions.inputs, batch.block_tables[batch.block_tables > 0])
                note["conversion of shared layer inputs"] += bool(shared.any())
            first = batch.block_tables[:, 0]
            both = np.bincount(first[first > 0]) > 1
            note["block read by two rows"] += bool(both.any())
            return execute(batch)

        self.executor.execute = noting_execute  # type: ignore[method-assign]
        engine.states.preempt = noting_preempt  # type: ignore[method-assign]
        fail_allocations(engine, allocation_fails)

    # --- the front end ---------------------------------------------------------------------------------------------

    def on_token(self, request: EngineRequest, token_id: int) -> str | None:
        """The engine's output processor: one token in `request.params.stop` is a stop string."""
        stream = self.streams[request.request_id]
        if stream.processor_fails and len(stream.got) >= 1:
            raise _ProcessorFailure
        if self.faults_on and self._fault_rng.random() < self.scenario.p_processor_abort:
            victim = list(self.open.values())[int(self._fault_rng.integers(len(self.open)))]
            if self.engine.abort(victim.request.request_id):
                victim.aborted = True
                self.note["abort in the step that delivers"] += 1
        return next((s for s in request.params.stop if s == f"<{token_id}>"), None)

    def _group(self) -> int:
        """Positions of a group of one kind or the other."""
        sizes = {self.scenario.block_size, self.scenario.hidden_block_size}
        return sizes.pop() if len(sizes) == 1 else int(self.rng.choice(sorted(sizes)))

    def _draw_request(self) -> EngineRequest:
        rng, c = self.rng, self._group()
        kind = rng.integers(4)
        if kind == 0:  # about a block border
            prompt_len = max(1, c * int(rng.integers(1, 5)) + int(rng.integers(-1, 2)))
        else:
            prompt_len = int(rng.integers(1, (3, 12, 40)[kind - 1]))
        max_tokens = int(rng.integers(1, 4)) if rng.random() < 0.3 else int(rng.integers(1, 3 * c + 4))
        if rng.random() < 0.3:  # ends about a block border
            max_tokens = max(1, -(prompt_len + max_tokens) % c + max_tokens + int(rng.integers(-1, 2)))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.2 else 0,
            temperature=float(rng.choice([0.0, 1.0])),
            seed=int(rng.integers(2**32)),
            stop_token_ids=tuple(rng.choice(VOCAB_SIZE, int(rng.integers(0, 4)), replace=False).tolist()),
            stop=(f"<{int(rng.integers(VOCAB_SIZE))}>",) if rng.random() < 0.3 else (),
            logprobs=int(rng.integers(0, 4)) if rng.random() < 0.2 else None,
        )
        return EngineRequest(
            request_id=f"r{self._submitted}",
            prompt=None,
            prompt_token_ids=self._draw_prompt(prompt_len),
            params=params,
            slo=SLO(
                ttft_s=float(rng.choice([0.05, 1.0, np.inf])),
                tbt_s=float(rng.choice([0.02, 1.0, np.inf])),
            ),
            slo_class="be" if self._class_rng.random() < self.scenario.p_best_effort else "rt",
            arrival_s=self.clock.now_s(),
        )

    def _draw_prompt(self, length: int) -> np.ndarray:
        """Random tokens, or an earlier request's prompt and output as far as they go, or a part of it."""
        rng, c = self.rng, self._group()
        prompt = rng.integers(0, VOCAB_SIZE, length).astype(np.int32)
        if not self.streams or rng.random() >= self.scenario.p_continue:
            return prompt
        earlier = list(self.streams.values())[-8:]
        stream = earlier[int(rng.integers(len(earlier)))]
        known = np.concatenate([stream.request.prompt_token_ids, np.array(stream.got, np.int32)])
        cut = known.size
        if rng.random() < 0.5:  # often whole groups
            cut = int(rng.integers(1, cut + 1))
            cut = max(cut - cut % c, 1) if rng.random() < 0.5 else cut
        more = int(rng.integers(1, 6)) if rng.random() < 0.5 else 0
        return np.concatenate([known[:cut], prompt[:more]])[:60].astype(np.int32)

    def _submit(self) -> None:
        request = self._draw_request()
        self._submitted += 1
        params, scenario = request.params, self.scenario
        total = int(request.prompt_token_ids.size) + params.max_tokens
        blocks = (-(-total // scenario.block_size) * 2, -(-total // scenario.hidden_block_size))
        if scenario.windows is not None:  # a chunk holds the window before it and that at its end
            w = scenario.windows
            groups = min(-(-total // w.block_size), 2 * (-(-(w.window - 1) // w.block_size) + 1))
            blocks = (blocks[KV] + groups * w.blocks_per_group, 0)
        fits = [k for k in (KV, HIDDEN) if scenario.offered[k] and blocks[k] <= scenario.num_blocks]
        used = self.engine.cache.pool.num_used
        try:
            self.engine.add_request(request)
        except InvalidRequestError:
            self.note["refused: never fits"] += 1
            expect(not fits, f"{request.request_id} was refused although it fits")
            expect(used == self.engine.cache.pool.num_used, "a refused request took blocks")
            return
        except QueueFullError as error:
            self.note["refused: queue full"] += 1
            expect(error.retry_after_s > 0, "retry at once")
            return
        expect(fits, f"{request.request_id} was accepted although it never fits")
        self.note["pinned to hidden"] += fits == [HIDDEN] and scenario.offered == (True, True)
        expected = reference_tokens(request.prompt_token_ids, params.max_tokens, vocab_size=VOCAB_SIZE, params=params)
        reason: str = "length"
        stop_reason: int | str | None = None
        for count, token in enumerate(expected, 1):
            if count < params.min_tokens:
                continue
            if token in params.stop_token_ids or f"<{token}>" in params.stop:
                expected = expected[:count]
                reason, stop_reason = (
                    "stop",
                    token if token in params.stop_token_ids else f"<{token}>",
                )
                break
        stream = _Stream(
            request=request,
            expected=expected,
            reason=reason,
            stop_reason=stop_reason,
            processor_fails=bool(self.rng.random() < scenario.p_processor_failure),
        )
        self.streams[request.request_id] = self.open[request.request_id] = stream
        if self.rng.random() < 0.05:
            with contextlib.suppress(DuplicateRequestError):
                self.engine.add_request(request)
                raise SimulationError("a duplicate id was accepted")

    def _disturb(self) -> None:
        """Aborts and preemptions from outside, between two steps."""
        rng, scenario, engine = self.rng, self.scenario, self.engine
        live = [s for s in self.open.values() if not s.aborted]
        if live and rng.random() < scenario.p_abort:
            rows = [self.engine.states.by_id[s.request.request_id].row for s in live]
            preempted = [
                stream
                for stream, row in zip(live, rows, strict=True)
                if engine.table.num_preemptions[row] and engine.table.kind[row] == NO_KIND
            ]
            if preempted and rng.random() < 0.7:
                live = preempted
            stream = live[int(rng.integers(len(live)))]
            request_id = stream.request.request_id
            row = engine.states.by_id[request_id].row if request_id in engine.states.by_id else None
            if row is not None:
                state = ("free", "waiting", "running", "ending")[engine.states.status[row]]
                if state == "waiting" and engine.table.num_preemptions[row]:
                    state = "preempted"
                if state == "running" and engine.table.num_cached[row] < engine.table.prompt_len[row]:
                    state = "prefill"
                self.note[f"abort: {state}"] += 1
                self.note["abort with a token in flight"] += bool(engine.states.in_flight[row] > 0)
            expect(engine.abort(request_id), "a live request could not be aborted")
            stream.aborted = True
            expect(not engine.abort(request_id), "a request was aborted twice")
        if rng.random() < 0.02:
            expect(not engine.abort("nobody"), "an unknown request was aborted")
            ended = [s for s in self.streams.values() if s.finish is not None]
            expect(
                not ended or not engine.abort(ended[-1].request.request_id),
                "an ended request was aborted",
            )
        if live and rng.random() < scenario.p_preempt:
            for stream in live if rng.random() < 0.1 else [live[int(rng.integers(len(live)))]]:
                self.note["preempted from outside"] += engine.preempt(stream.request.request_id)

    # --- the history -----------------------------------------------------------------------------------------------

    def run(self) -> Report:
        """The whole history.

        Raises:
            SimulationError: something is wrong.
        """
        try:
            with _quiet():
                self._run()
        except Exception as error:
            text = f"seed {self.seed}, iteration {self.iterations}: {type(error).__name__}: {error}\n{self.scenario}"
            raise SimulationError(f"{text}\nreplay: python -m tests.support.simulation_harness {self.seed}") from error
        return Report(
            seed=self.seed,
            iterations=self.iterations,
            digest=self._digest.hexdigest(),
            sometimes=self.note,
        )

    def _run(self) -> None:
        scenario, engine = self.scenario, self.engine
        while self._submitted < scenario.num_requests:
            for _ in range(int(self.rng.poisson(scenario.burst))):
                self._submit()
            self._disturb()
            if not self._step():
                return
            expect(self.iterations < 20_000, "the first phase does not end")
        self.faults_on = False
        chaos = getattr(getattr(self.policy, "inner", self.policy), "chaos", None)
        if chaos is not None:
            for field in dataclasses.fields(chaos):
                setattr(chaos, field.name, 0.0)
        self.note["drained with preempted requests"] += bool(
            engine.stats().num_waiting and engine.stats().num_preemptions
        )
        for _ in range(DRAIN_ITERATIONS):
            if not engine.has_work:
                break
            if not self._step():
                return
        expect(
            not engine.has_work,
            f"{len(self.open)} requests do not end within {DRAIN_ITERATIONS} iterations",
        )
        stats = engine.stats()
        wrong = [] if self._recount is None else self._recount.check()
        expect(not wrong, "; ".join(wrong))
        expect(not self.open, "a stream has no end")
        expect(stats.free_blocks == stats.total_blocks, f"{stats.used_blocks} blocks are lost")
        expect(
            len(engine.cache.free_slots) == scenario.max_num_seqs and not engine.table.live.any(),
            "slots or rows are lost",
        )
        expect(sum(stats.finished.values()) == len(self.streams), "ends are miscounted")
        expect(
            stats.generation_tokens == sum(len(s.got) for s in self.streams.values()),
            "tokens are miscounted",
        )
        expect(stats.num_invalid_plan_rows == 0, "the policy broke a promise")
        expect(
            stats.num_preemptions == sum(m.num_preemptions for m in self._metrics.values()),
            "preemptions are miscounted",
        )
        expect(
            stats.num_conversions == sum(m.num_conversions for m in self._metrics.values()),
            "conversions are miscounted",
        )
        if self.full_checks:
            put_off = self.note["conversion planned"] + stats.restores.get("converted", 0) - stats.num_conversions
            expect(put_off >= 0, "a conversion that was not asked for")
            self.note["conversion put off"] += put_off
        self.note["a kind switch kv to hidden"] += stats.kind_switches["kv", "hidden"]
        self.note["a kind switch hidden to kv"] += stats.kind_switches["hidden", "kv"]
        self.note["stop found late, row in flight dropped"] += stats.num_discarded_tokens
        self.note["row deferred"] += stats.num_deferred_requests
        self.note["positions recomputed"] += stats.recomputed_tokens
        self.note["blocks cached at the end"] += stats.cached_blocks
        self.note["slots saved for a request of the other class"] += self.executor.host.num_saved_slots
        self.note["slots loaded"] += self.executor.host.num_loaded_slots
        if self.disk is not None:
            self.note["group written to disk"] += self.disk.num_written
            self.note["group read from disk"] += stats.disk_hit_tokens > 0
            self.note["disk failed"] += self.disk.num_failed
        expect(min(stats.prompt_tokens_by_source.values()) >= 0, "sources of prompt tokens are miscounted")
        expect(0 <= stats.prefix_cache_hits <= stats.prefix_cache_queries, "hits are miscounted")
        engine.check_integrity()
        engine.close()
        engine.check_integrity()

    def _step(self) -> bool:
        """One iteration; False when the engine has ended, as it should."""
        engine = self.engine
        self.iterations += 1
        if self.rng.random() < 0.1:
            self.clock.advance_to(self.clock.now_s() + float(self.rng.choice([0.01, 1.0, 62.0])))
        resets, steps = self.executor.num_resets, self.executor.num_steps
        outputs = engine.step()
        is_idle = steps == self.executor.num_steps and not outputs and engine.has_work and not self.faults_on
        self._num_idle = self._num_idle + 1 if is_idle else 0
        expect(self._num_idle <= 8, f"nothing was run and nothing delivered in {self._num_idle} iterations")
        if self.executor.num_resets > resets:
            self._next_fault_s = self.clock.now_s() + 61.0 * (not self.scenario.second_failure)
        for output in outputs:
            self._take(output)
        if engine.dead_reason is not None:
            expect(
                self.scenario.second_failure and self.num_step_faults >= 2,
                f"the engine ended: {engine.dead_reason}",
            )
            self.note["engine ended after two failures"] += 1
            expect(not self.open, "the engine ended and a stream did not")
            try:
                engine.step()
            except EngineDeadError:
                return False
            raise SimulationError("a dead engine made a step")
        if self.full_checks and not engine.debug:  # which has just checked it
            engine.check_integrity()
        if self._recount is not None:
            wrong = self._recount.check(gauges=self.iterations % 16 == 0)
            expect(not wrong, "; ".join(wrong))
        expect(
            engine.num_live == len(self.open) or not outputs or any(s.aborted for s in self.open.values()),
            "live requests are miscounted",
        )
        return True

    def _take(self, output: StepOutput) -> None:
        stream = self.streams[output.request_id]
        expect(stream.finish is None, f"{output.request_id}: an output after the end")
        stream.got.extend(output.new_token_ids)
        live = self.engine.states.by_id.get(output.request_id)
        if live is not None and output.new_token_ids:
            self._preempted_before[live.rank] = output.metrics.num_preemptions
        got, expected = stream.got, stream.expected
        name = output.request_id
        expect(
            got == expected[: len(got)],
            f"{name}: got {got[-8:]} at {len(got)}, expected {expected[: len(got)][-8:]}",
        )
        expect(
            output.num_outputs == len(got),
            f"{name}: num_outputs {output.num_outputs}, {len(got)} came",
        )
        metrics = output.metrics
        self._metrics[name] = metrics
        if output.new_token_ids and stream.request.params.logprobs is not None:
            expect(
                output.logprobs and output.logprobs[0].top_ids.size == stream.request.params.logprobs,
                f"{name}: logprobs",
            )
        self._digest.update(repr((name, output.new_token_ids, output.finish_reason)).encode())
        if output.finish_reason is None:
            return
        stream.finish = output.finish_reason
        del self.open[name]
        self.note[f"finish: {output.finish_reason}"] += 1
        times = metrics.token_times_s
        expect(
            len(times) == len(got) and times == sorted(times),
            f"{name}: token times",
        )
        expect(
            metrics.finished_s is not None and metrics.finished_s >= metrics.arrival_s,
            f"{name}: times",
        )
        if stream.finish in ("stop", "length"):
            expect(not stream.aborted, f"{name}: ended after its abort")
            expect(got == expected, f"{name}: ended after {len(got)} of {len(expected)} tokens")
            reasons = output.finish_reason, output.stop_reason
            expect(
                reasons == (stream.reason, stream.stop_reason),
                f"{name}: {reasons}, expected {stream.reason, stream.stop_reason}",
            )
            total = int(stream.request.prompt_token_ids.size) + len(got)
            self.note["ends at a block border"] += total % self.scenario.block_size == 0
        elif stream.finish == "abort":
            expect(stream.aborted, f"{name}: aborted by nobody")
        else:
            allowed = stream.processor_fails or self.row_faults_planted or self.engine.dead_reason
            expect(output.error and allowed, f"{name}: error {output.error!r} for no reason")


@contextlib.contextmanager
def _quiet():
    """Planted faults need no log."""
    logger = logging.getLogger("apt_jax.engine")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def simulate(seed: int, *, full_checks: bool = True, engine_class: type[Engine] = Engine) -> Report:
    """Run one seed.

    Raises:
        SimulationError: a promise was broken.
    """
    simulation = Simulation(seed, full_checks=full_checks, engine_class=engine_class)
    return simulation.run()


def replay(simulate: Callable[[int], Any], describe: Callable[[Any], str]) -> None:
    """Replay the seeds on the command line, `SEED` or `FIRST LAST`, and print which rare states occurred.

    Args:
        simulate: runs one seed.
        describe: its report in a line, for a single seed.
    """
    first, last = int(sys.argv[1]), int(sys.argv[-1])
    total: collections.Counter[str] = collections.Counter()
    for seed in range(first, last + 1):
        report = simulate(seed)
        total += report.sometimes
        if first == last:
            sys.stdout.write(f"seed {seed}: {describe(report)}\n")
    for name, count in sorted(total.items()):
        sys.stdout.write(f"{count:8d}  {name}\n")


if __name__ == "__main__":
    replay(simulate, lambda report: f"{report.iterations} iterations, {report.digest}")
