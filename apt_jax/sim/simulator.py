"""One simulated run: one or several serving engines process a workload on a cost model and a virtual clock.

    trace, arrivals ──► router ──► Engine (policy, cache accounting, metrics) ──► SimulatedExecutor (step_s) ──►
    VirtualClock
                          └──────► Engine ...

Each replica has its own clock. The earliest event runs first: an iteration of the replica whose next iteration starts
earliest (at equal times the replica with the lowest index), or the arrival of the next request. A request is routed
when the next iteration of every replica starts at its arrival or later, and joins the next iteration of its replica. A
replica's engine does not know of requests that went to other replicas.

Everything above the executor is the same code that serves requests. A run depends only on its configuration: the same
seed draws the same requests and arrivals for every policy, and the same pattern of arrivals, stretched, at every rate.

Prefix caching is on if the trace shows which prompts share a prefix (its column `hash_ids`); prompts are then made of
tokens that are equal in the shared prefix. Most traces hold lengths but no contents. A later prompt never finds outputs
in the cache, because their contents are unknown; a request that is drawn twice finds its whole prompt cached.
"""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SchedulerConfig
from apt_jax.core.step import StepBatch
from apt_jax.core.tiers import Tiers
from apt_jax.costs.hardware import Hardware
from apt_jax.costs.model import StepCosts
from apt_jax.engine import Engine
from apt_jax.engine.batch import PlainReserver, reserver_for
from apt_jax.errors import ConfigError
from apt_jax.metrics import RequestRecord, Summary, summarize
from apt_jax.request import RequestMetrics
from apt_jax.sched import Policy, PolicyMaker, make_policy
from apt_jax.sched.registry import read_options
from apt_jax.sched.retention import Retention
from apt_jax.sched.retention.knapsack import ClairvoyantRetention
from apt_jax.sim.attainable import Attainable, attainable
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.executor import SimulatedExecutor, SimulatedHostMemory
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.host_link import block_bytes, num_host_blocks, with_transfers
from apt_jax.sim.replica import Replica, ReplicaCounts, TimedExecutor
from apt_jax.sim.routing import ROUTING_POLICIES, Router
from apt_jax.sim.sessions import Calls, SessionSummary, alone_s, summarize_sessions
from apt_jax.sim.trace import load_trace
from apt_jax.sim.workload import (
    Arrivals,
    TraceEnds,
    Workload,
    drop_oversized,
    longest_request,
    sample_workload,
    with_beside,
    with_distinct_prompts,
)
from apt_jax.utils.clock import VirtualClock


@dataclasses.dataclass(frozen=True, kw_only=True)
class TenantCounts:
    """Counts of one tenant over a run."""

    num_sent: int
    slo_attainment: float
    output_tokens: int
    ttft_p50_s: float | None
    """Median TTFT in seconds; None: no request of the tenant produced a token."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SimulationResult:
    """The result of a run."""

    config: SimulationConfig
    summary: Summary
    preemptions: int
    recomputed_tokens: int
    recomputed_by_cause: dict[str, int]
    """`recomputed_tokens` by the cause of their loss, as in `EngineStats.recomputed_by_cause`."""
    fallback_iterations: int
    """Iterations that `fcfs` scheduled because the policy failed; if above 0, the results are not the policy's."""
    num_left_out: int
    """Requests of the trace that are left out because they can never fit this model and pool."""
    slo_attainment_bound: float | None
    """Upper bound on the SLO attainment of any policy (`apt_jax.sim.attainable`). None: not computed, because the run
    has prefix caching, best-effort requests, objectives per request, or step times other than the `StepCosts` of a
    description."""
    strict_attainment_bound: float | None
    """Upper bound on the strict attainment of any policy; None: as `slo_attainment_bound`."""
    kind_switches: int
    prefix_hit_fraction: float
    """Share of the prompt tokens of scheduled requests that were found cached; 0 without prefix caching."""
    prompt_tokens_by_source: dict[str, int]
    """See `EngineStats.prompt_tokens_by_source`."""
    saved_blocks: int
    """Blocks copied to host memory; 0 without `swap_space`."""
    loaded_blocks: int
    """Blocks copied from host memory."""
    restores: dict[str, int]
    """See `EngineStats.restores`."""
    conversions: int
    """Number of conversions of running requests from layer inputs to keys and values."""
    hidden_token_fraction: float
    """Scheduled rows with hidden cache, prefill chunks included, divided by generated tokens."""
    iterations: int
    iterations_by_type: dict[str, int]
    device_busy_fraction: float
    """Fraction of the run's duration during which the simulated devices worked; mean over replicas."""
    schedule_ms: tuple[float, float]
    """p50 and p99 of the duration of a scheduling call on this host, in ms; the largest over replicas. Only this value
    and `sim_wall_s` differ from run to run."""
    sim_wall_s: float
    """Real time that the simulation took, in seconds."""
    requests: list[RequestMetrics | None]
    """Metrics of each request in order of arrival; None: rejected."""
    replicas: tuple[ReplicaCounts, ...]
    routed_to: NDArray[np.int32]
    """(requests,) index of the replica that each request was routed to."""
    tenants: tuple[TenantCounts, ...] = ()
    """Counts per tenant; empty if there is only one tenant."""
    by_class: dict[str, Summary] = dataclasses.field(default_factory=dict)
    """Summary of the real-time requests ("rt") and of the best-effort requests ("be"); empty if all requests have the
    same class."""
    sessions: SessionSummary | None = None
    """Completion times of sessions; None: the trace has none."""

    @property
    def slo_attainment(self) -> float:
        """Share of the requests that met their objectives."""
        return self.summary.slo_attainment

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, from the first arrival to the last token."""
        return self.summary.tokens_per_s

    @property
    def ttft_p99_s(self) -> float | None:
        """P99 of TTFT over completed requests, in seconds."""
        return self.summary.ttft_s.p99

    @property
    def duration_s(self) -> float:
        """Time from the first arrival to the last token in seconds (makespan)."""
        return self.summary.duration_s

    def as_dict(self) -> dict[str, Any]:
        """Return the result as `apt-jax simulate --json` prints it."""
        s = self.summary
        config = {k: v.item() if isinstance(v, np.generic) else v for k, v in dataclasses.asdict(self.config).items()}
        config["slo"] = {name: s if math.isfinite(s) else None for name, s in config["slo"].items()}
        return {
            "config": config,
            "slo_attainment": s.slo_attainment,
            "ttft_attainment": s.ttft_attainment,
            "tbt_attainment": s.tbt_attainment,
            "e2e_attainment": s.e2e_attainment,
            "strict_attainment": s.strict_attainment,
            "ttft_s": dataclasses.asdict(s.ttft_s),
            "tbt_s": dataclasses.asdict(s.tbt_s),
            "p99_tbt_drop_first_s": dataclasses.asdict(s.p99_tbt_drop_first_s),
            "longest_gap_s": dataclasses.asdict(s.longest_gap_s),
            "e2e_s": dataclasses.asdict(s.e2e_s),
            "tokens_per_s": s.tokens_per_s,
            "goodput": s.goodput,
            "duration_s": s.duration_s,
            "num_sent": s.num_sent,
            "num_completed": s.num_completed,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "recomputed_by_cause": self.recomputed_by_cause,
            "fallback_iterations": self.fallback_iterations,
            "num_left_out": self.num_left_out,
            "slo_attainment_bound": self.slo_attainment_bound,
            "strict_attainment_bound": self.strict_attainment_bound,
            "kind_switches": self.kind_switches,
            "prefix_hit_fraction": self.prefix_hit_fraction,
            "prompt_tokens_by_source": self.prompt_tokens_by_source,
            "saved_blocks": self.saved_blocks,
            "loaded_blocks": self.loaded_blocks,
            "restores": self.restores,
            "conversions": self.conversions,
            "hidden_token_fraction": self.hidden_token_fraction,
            "iterations": self.iterations,
            "iterations_by_type": self.iterations_by_type,
            "device_busy_fraction": self.device_busy_fraction,
            "schedule_ms": {"p50": self.schedule_ms[0], "p99": self.schedule_ms[1]},
            "sim_wall_s": self.sim_wall_s,
            "replicas": [dataclasses.asdict(replica) for replica in self.replicas],
            "tenants": [dataclasses.asdict(tenant) for tenant in self.tenants],
            "by_class": {name: summary.as_dict() for name, summary in self.by_class.items()},
            **({} if self.sessions is None else {"sessions": dataclasses.asdict(self.sessions)}),
        }


def simulate(
    config: SimulationConfig,
    *,
    hardware: Hardware | None = None,
    workload: Workload | None = None,
    policy: Policy | None = None,
    step_s: Callable[[StepBatch], float] | None = None,
    executor: Callable[[VirtualClock], TimedExecutor] | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_step: Callable[[Engine], None] | None = None,
    stop: Callable[[RequestRecord], bool] | None = None,
    can_convert: bool = True,
    debug: bool = False,
) -> SimulationResult:
    """Run one simulation.

    Args:
        config: configuration of the run.
        hardware: hardware description; None: as named in `config`.
        workload: requests to serve; None: drawn from the trace named in `config`.
        policy: scheduling policy, for a run with one replica; None: as named in `config`.
        step_s: function that returns the duration of a step in seconds; None: the hardware's cost model.
        executor: function that builds an executor for the run's clock, which the executor must advance
            (`apt_jax.lab.recording`); its pool and block size must match the hardware's. `host_s` then affects only
            predictions. None: `SimulatedExecutor`.
        progress: called every 512 iterations and at the end with (number of finished requests, number of requests).
        on_step: called with the engine after each iteration in which it has executed a step.
        stop: called with each request that has ended; True ends the run, and the requests that are left count as not
            served.
        can_convert: whether policies may convert layer inputs to keys and values, at
            `StepCosts.convert_per_hidden_token_s` per token.
        debug: whether the engine checks its accounting after every step.

    Raises:
        ConfigError: unknown name, impossible setting, or a trace that cannot be served.
    """
    started = time.perf_counter()
    hardware = hardware or load_hardware(config.model, config.hardware, config.num_devices)
    num_left_out = 0
    if workload is None:
        trace = load_trace(config.trace)
        kept = drop_oversized(trace, hardware, config)
        num_left_out = trace.num_requests - kept.num_requests
        workload = sample_workload(kept, config)
        if config.beside is not None:
            workload = with_beside(workload, hardware, config)
    costs = hardware.step_costs(config.hidden_attention)
    timing = hardware.programs or costs
    overlap = hardware.programs is not None if config.overlap is None else config.overlap
    # A cost model that is fitted to whole steps already includes host time.
    if config.host_s and not overlap and hardware.programs is None:
        costs = dataclasses.replace(
            costs,
            prefill_base_s=costs.prefill_base_s + config.host_s,
            decode_base_s=costs.decode_base_s + config.host_s,
        )
    max_num_seqs, budget = step_limits(config, hardware)
    scheduler = SchedulerConfig(
        policy=config.policy,
        session_order=config.session_order,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        # Large enough for all, even within one tenant's share: no request is rejected because the queue is full.
        max_num_queued_reqs=max(2 * workload.arrival_s.size, 1),
        overlap=overlap,
    )
    prefixes = config.enable_prefix_caching
    of_policy = make_policy(config=scheduler, seed=config.seed) if policy is None else policy
    host_memory = None
    if config.swap_space:
        prefixes, costs = True, with_transfers(costs, hardware)
        host_memory = SimulatedHostMemory(num_host_blocks(hardware, config.swap_space), block_bytes(hardware))
        if workload.prompts is None:
            workload = with_distinct_prompts(workload, config.seed)
    if prefixes is None:
        prefixes = workload.prompts is not None
    if prefixes and workload.prompts is None:
        raise ConfigError(
            f"trace {config.trace} has no column hash_ids, so common prefixes are unknown (--enable-prefix-caching)"
        )
    if policy is not None and config.replicas > 1:
        raise ConfigError("a policy object serves one replica: name the policy in the configuration")
    bound: Attainable | None = None
    of_cost_model = executor is None and step_s is None and hardware.programs is None
    alike = workload.slos is None and not workload.best_effort.any() and not prefixes and workload.calls is None
    if of_cost_model and alike:
        bound = attainable(
            workload.arrival_s,
            workload.prompt_tokens,
            workload.output_tokens,
            costs,
            slo=config.slo,
            step_tokens=budget,
            pool_shares=_pool_shares(workload.prompt_tokens, config, hardware),
            replicas=config.replicas,
        )

    def predicted_s(batch: StepBatch) -> float:
        step_s = timing.step_s(batch.num_tokens, batch.start, batch.kind)
        return step_s + costs.conversion_s(batch.num_converted_tokens)

    def transfer_s(batch: StepBatch) -> float:
        hidden = hardware.hidden_block_size or hardware.block_size
        return costs.transfer_s(*batch.moved_blocks((hardware.block_size, hidden)))

    # Prompts of which only lengths are known have equal tokens, and would be found in the cache.
    cache = config.cache_config(hardware.block_size, prefix_caching=prefixes)

    def replica() -> "Replica":
        clock = VirtualClock()
        timed: TimedExecutor = (
            executor(clock)
            if executor is not None
            else SimulatedExecutor(
                clock,
                step_s or predicted_s,
                num_blocks=config.num_blocks or hardware.num_blocks,
                block_size=hardware.block_size,
                hidden_block_size=hardware.hidden_block_size,
                max_num_seqs=max_num_seqs,
                host_s=config.host_s,
                can_convert=can_convert,
                transfer_s=None if host_memory is None else transfer_s,
                lengths_only=step_s is None,
            )
        )
        engine = Engine(
            timed,
            make_policy(config=scheduler, seed=config.seed) if policy is None else policy,
            clock,
            hardware.kinds(config.cache, config.hidden_attention, rho_us=config.rho_us),
            scheduler,
            cache,
            costs=costs,
            output_processor=None if config.max_tokens is None else TraceEnds(workload.output_tokens),
            tiers=Tiers(host=host_memory if executor is None else None),
            reserver=reserver_for(of_policy, cache) if executor is None else PlainReserver,
            retention=_clairvoyant(config.retention),
            debug=debug,
        )
        return Replica(engine, timed, clock, overlap)

    replicas = [replica() for _ in range(config.replicas)]
    arrivals = Arrivals(workload, config, longest_request(hardware, config))
    requests, routed_to = _run(replicas, arrivals, ROUTING_POLICIES[config.routing_policy](), progress, on_step, stop)
    records = [_record(requests[i], arrivals, i) for i in range(arrivals.num_requests)]
    summary = summarize(records)
    stats = [replica.engine.stats() for replica in replicas]
    by_type = collections.Counter[str]()
    by_cause = collections.Counter[str]()
    by_source = collections.Counter[str]()
    for one in stats:
        by_type.update(one.iterations)
        by_cause.update(one.recomputed_by_cause)
        by_source.update(one.prompt_tokens_by_source)

    def busy_fraction(busy_s: float) -> float:
        return busy_s / summary.duration_s if summary.duration_s > 0 else 0.0

    return SimulationResult(
        config=config,
        summary=summary,
        preemptions=sum(one.num_preemptions for one in stats),
        recomputed_tokens=sum(one.recomputed_tokens for one in stats),
        recomputed_by_cause=dict(by_cause),
        fallback_iterations=sum(one.fallback_iterations for one in stats),
        num_left_out=num_left_out,
        slo_attainment_bound=None if bound is None else bound.slo,
        strict_attainment_bound=None if bound is None else bound.strict,
        kind_switches=sum(sum(one.kind_switches.values()) for one in stats),
        prefix_hit_fraction=sum(one.prefix_cache_hits for one in stats)
        / max(sum(one.prefix_cache_queries for one in stats), 1),
        prompt_tokens_by_source=dict(by_source),
        saved_blocks=sum(one.saved_blocks for one in stats),
        loaded_blocks=sum(one.loaded_blocks for one in stats),
        restores=dict(sum((collections.Counter(one.restores) for one in stats), collections.Counter())),
        conversions=sum(one.num_conversions for one in stats),
        hidden_token_fraction=sum(replica.hidden_tokens for replica in replicas)
        / max(sum(one.generation_tokens for one in stats), 1),
        iterations=sum(replica.executor.num_steps for replica in replicas),
        iterations_by_type=dict(by_type),
        device_busy_fraction=busy_fraction(sum(replica.executor.busy_s for replica in replicas) / len(replicas)),
        schedule_ms=(
            max(one.schedule_p50_ms for one in stats),
            max(one.schedule_p99_ms for one in stats),
        ),
        sim_wall_s=time.perf_counter() - started,
        requests=requests,
        replicas=tuple(
            ReplicaCounts(
                num_sent=replica.num_sent,
                iterations=replica.executor.num_steps,
                preemptions=one.num_preemptions,
                device_busy_fraction=busy_fraction(replica.executor.busy_s),
            )
            for replica, one in zip(replicas, stats, strict=True)
        ),
        routed_to=routed_to,
        tenants=_by_tenant(workload.tenant, records),
        by_class=_by_class(workload.best_effort, records),
        sessions=None
        if workload.calls is None
        else _of_sessions(workload, workload.calls, records, config, costs, budget),
    )


def _of_sessions(
    workload: Workload, calls: Calls, records: Sequence[RequestRecord], config: SimulationConfig, costs: StepCosts, budget: int
) -> SessionSummary:  # fmt: skip
    """Summarize the sessions of a run; with `SimulationConfig.beside` the best-effort ones, those of the first trace."""
    took_s = alone_s(
        workload.prompt_tokens,
        np.minimum(workload.output_tokens, config.max_tokens or 2**31 - 1),
        workload.shared_tokens(config),
        costs,
        budget,
    )
    if config.beside is not None:
        firsts = calls.begins()[:-1]
        calls, index = calls.take(np.flatnonzero(workload.best_effort[firsts]).tolist())
        records, took_s = [records[i] for i in index.tolist()], took_s[index]
    return summarize_sessions(calls, records, took_s)


def _record(metrics: RequestMetrics | None, arrivals: Arrivals, index: int) -> RequestRecord:
    if metrics is None:  # it has not arrived if the run was stopped
        arrival_s = float(np.nan_to_num(arrivals.arrival_s[index], nan=np.inf))
        return RequestRecord(arrival_s=arrival_s, ok=False, slo=arrivals.slo(index))
    return RequestRecord.from_metrics(metrics, ok=metrics.finished_s is not None)


def _clairvoyant(retention: str) -> Retention | None:
    name, mark, query = retention.partition("?")
    if name != "clairvoyant":
        return None
    maker = PolicyMaker(ClairvoyantRetention)
    options = read_options(retention, maker, query, what="retention", flag="(--retention)") if mark else {}
    return ClairvoyantRetention(**options)


def _pool_shares(prompt_tokens: NDArray[np.int32], config: SimulationConfig, hardware: Hardware) -> NDArray[np.float64]:
    """Return the (n, num_kinds) shares of the pool that prompts take with each kind; inf: the kind is not offered."""
    sizes = (hardware.block_size, hardware.hidden_block_size or hardware.block_size)
    kinds = hardware.kinds(config.cache, config.hidden_attention)
    blocks = [
        -(-prompt_tokens // size) * kind.blocks_per_group
        + (0 if kind.windows is None else kind.windows.num_blocks(prompt_tokens))
        if kind.offered
        else np.full(prompt_tokens.size, np.inf)
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    return np.stack(blocks, axis=1) / (config.num_blocks or hardware.num_blocks)


def _by_class(best_effort: NDArray[np.bool_], records: Sequence[RequestRecord]) -> dict[str, Summary]:
    if best_effort.all() or not best_effort.any():
        return {}
    classes = {"rt": ~best_effort, "be": best_effort}
    return {name: summarize([records[i] for i in np.flatnonzero(own).tolist()]) for name, own in classes.items()}


def _by_tenant(tenant: NDArray[np.int32] | None, records: Sequence[RequestRecord]) -> tuple[TenantCounts, ...]:
    if tenant is None:
        return ()
    counts = []
    for number in range(int(tenant.max(initial=0)) + 1):
        mine = [records[i] for i in np.flatnonzero(tenant == number).tolist()]
        summary = summarize(mine)
        counts.append(
            TenantCounts(
                num_sent=len(mine),
                slo_attainment=summary.slo_attainment,
                output_tokens=sum(len(record.token_times_s) for record in mine),
                ttft_p50_s=summary.ttft_s.p50,
            )
        )
    return tuple(counts)


def step_limits(config: SimulationConfig, hardware: Hardware) -> tuple[int, int]:
    """Return (max_num_seqs, max_num_batched_tokens) of a run."""
    programs = hardware.programs
    if programs is None:
        budget = min(max(2048, config.max_model_len or hardware.max_model_len), 16384)
        return config.max_num_seqs or 256, config.max_num_batched_tokens or budget
    bounds = []
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        wanted, measured = getattr(config, name), getattr(programs, name)
        if wanted is not None and wanted > measured:
            raise ConfigError(
                f"{name}={wanted} is more than {hardware.name} was calibrated for, {measured} (--{name.replace('_', '-')}, or calibrate with more)"
            )
        bounds.append(wanted or measured)
    return bounds[0], bounds[1]


def _run(
    replicas: Sequence[Replica],
    arrivals: Arrivals,
    route: Router,
    progress: Callable[[int, int], None] | None,
    on_step: Callable[[Engine], None] | None,
    stop: Callable[[RequestRecord], bool] | None,
) -> tuple[list[RequestMetrics | None], NDArray[np.int32]]:
    """Serve all requests; return the metrics of each, and the index of the replica that each was routed to."""
    n = arrivals.num_requests
    metrics: list[RequestMetrics | None] = [None] * n
    routed_to = np.zeros(n, np.int32)
    if len(replicas) > 1:
        for replica in replicas:
            replica.watch()
    ended = turns = 0
    while ended < n:
        replica = min(replicas, key=lambda replica: replica.next_s)
        if arrivals.next_s <= replica.next_s:
            request = arrivals.take()
            index = int(request.request_id)
            if len(replicas) > 1:
                states = [replica.state(request.arrival_s) for replica in replicas]
                routed_to[index] = route(request, states)
            replicas[routed_to[index]].send(request)
            continue
        before = replica.executor.num_steps
        outputs, rejected = replica.turn()
        over = [int(request.request_id) for request in rejected]
        for index in over:
            arrivals.ended(index, replica.now_s)
        for output in outputs:
            if output.finish_reason is not None:
                index = int(output.request.request_id)
                over.append(index)
                metrics[index] = output.metrics
                finished_s = output.metrics.finished_s
                arrivals.ended(index, replica.now_s if finished_s is None else finished_s)
        ended += len(over)
        if stop is not None and any([stop(_record(metrics[index], arrivals, index)) for index in over]):
            break
        if on_step is not None and replica.executor.num_steps > before:
            on_step(replica.engine)
        turns += 1
        if progress is not None and not turns % 512:
            progress(ended, n)
    if progress is not None:
        progress(n, n)
    return metrics, routed_to
