"""One simulated run: a workload through the engine that serves, on a cost model and a virtual clock; or through several engines.

    trace, arrivals ──► router ──► Engine (policy, cache accounting, metrics) ──► SimulatedExecutor (step_s) ──► VirtualClock
                          └──────► Engine ...

Each replica has a clock of its own. What comes next of all goes first: an iteration of the replica that is furthest behind (of
several the one of lowest index), or the next request, which is routed when every replica's next iteration begins at its arrival or
later. It joins that iteration. A replica's engine is not told of requests that went elsewhere, so it does what it would do alone.

Everything above the executor is the code that serves. A run depends on its configuration alone: the same seed draws the
same requests and arrivals for every policy, and the same pattern of arrivals, stretched, at every rate.

Prefix caching is on where the trace says which prompts begin alike (its column `hash_ids`): prompts are then made of such tokens
that the engine finds what is common. Most traces tell lengths and no contents. Outputs are never found in a later prompt, since
nothing is known of them, and a request that is drawn twice is found whole.
"""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from apt_jax.engine.admission import Coming
from apt_jax.clock import VirtualClock
from apt_jax.config import SLO, CacheConfig, CacheMode, HiddenAttention, SchedulerConfig
from apt_jax.engine import Engine, StepOutput
from apt_jax.errors import ConfigError, InvalidRequestError
from apt_jax.executor import Executor, StepBatch
from apt_jax.metrics import RequestRecord, Summary, TokenRate, summarize
from apt_jax.options import check_options, option
from apt_jax.request import EngineRequest, RequestMetrics, SamplingParams
from apt_jax.sched import HIDDEN, Policy, make_policy
from apt_jax.sim.attainable import attainable_share
from apt_jax.sim.executor import SimulatedExecutor
from apt_jax.sim.hardware import Hardware, load_hardware
from apt_jax.sim.routing import ROUTING_POLICIES, ReplicaState, Router
from apt_jax.sim.trace import Trace, draw_arrivals, load_trace, prompts_of, scale_arrivals

_IDLE_S = 0.01
"""Where a policy lets requests wait with nothing running, time goes on by this much, or to the next arrival."""

_NO_TEXT = np.zeros(1 << 20, np.int32)
_NO_TEXT.flags.writeable = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """What to simulate; the flags of `apt-jax simulate` derive from the fields."""

    model: str = option("opt-13b", metavar="MODEL")
    """Model of the hardware description."""
    hardware: str = option("a100-40gb", metavar="NAME|FILE")
    """Name from `apt_jax.sim.hardware.known_hardware`, or a description file (.json; apt-jax calibrate --describe writes one)."""
    num_devices: int | None = option(None, flag=("--tensor-parallel-size", "-tp"), metavar="N")
    """Number of devices per replica (default: the fewest that are described)."""
    trace: str = option("sharegpt", metavar="NAME|FILE")
    """Name from `apt_jax.sim.trace.known_traces`, or a CSV file."""
    rate: float | None = option(
        None, metavar="R", positive=True, high=1e9, rule="be positive requests/s"
    )
    """Requests per second; needed unless the trace has arrivals, which it stretches, or --rates or --find-rate is given."""
    cv: float | None = option(None, metavar="CV", positive=True, low=0.05, high=100)
    """Coefficient of variation of the gaps (Gamma; 1: Poisson; default: recorded arrivals, else 1)."""
    num_requests: int = option(1000, metavar="N", positive=True, low=1)
    """Number of requests, drawn from the trace at random; with recorded arrivals its first ones."""
    seed: int = option(0, metavar="SEED", low=0)
    """Random seed of requests and arrivals."""
    policy: str = option("apt", flag="--scheduling-policy", metavar="POLICY[,POLICY...]")
    """Scheduling policy, as in `SchedulerConfig.policy`."""
    violation_decay: float = option(0.0, metavar="FACTOR")
    """Weight of requests already past their SLO; 0: near zero."""
    cache: CacheMode = option("hybrid")
    """Cache kinds that the scheduler may use."""
    hidden_attention: HiddenAttention = option("auto")
    """Cost of the hidden kind: the paper's (reproject) or ours (absorb)."""
    rho_us: float | None = option(None, metavar="US")
    """Microseconds per cached token that policies charge the hidden cache with (rho of Apt-Serve Eq. 6), whatever it really costs:
    70 is what the authors' probe most likely gave, 5 the same in float16 (default: the true cost, 15.9 for OPT-13B
    reprojected on an A100). There is no charge per request."""
    host_s: float = 0.0
    """Seconds of the host for every step. The device is idle meanwhile, unless steps overlap and it has one to run."""
    overlap: bool | None = option(None)
    """Decide and dispatch a step while the one before it runs, as apt-jax serve does (default: as the described engine does: yes for
    descriptions of apt-jax calibrate, no for the papers' engines). A new request then waits for up to two steps."""
    slo: SLO = SLO(ttft_s=1.0, tbt_s=1.0)  # noqa: RUF009 - frozen
    output_scale: float = option(
        1.0, metavar="FACTOR", positive=True, high=1000, rule="be positive"
    )
    """Factor on output lengths."""
    drop_too_long: bool = option(False)
    """Leave out requests that can never fit instead of rejecting the trace; bundled traces always do, and the result says how many."""
    max_num_seqs: int | None = option(None, metavar="N", positive=True, low=1)
    """Maximum number of requests that hold cache (default: 256, as in vLLM, or what a calibrated description was measured up to)."""
    max_num_batched_tokens: int | None = option(None, metavar="N", positive=True, low=1)
    """Maximum number of tokens per step (default: what a calibrated description was measured up to, else the model's positions, 2,048 to
    16,384)."""
    num_blocks: int | None = option(
        None, flag="--num-blocks-override", metavar="BLOCKS", positive=True, low=1
    )
    """Number of cache blocks (default: the hardware's)."""
    replicas: int = option(1, metavar="N", positive=True, low=1)
    """Number of engines that share the requests, each on hardware of its own."""
    routing_policy: str = option("round_robin")
    """Policy that chooses the replica of a request: in turn, the least loaded as the gateway smg computes it, or the one with most time
    left to the request's TTFT SLO. A name of `apt_jax.sim.routing.ROUTING_POLICIES`."""
    enable_prefix_caching: bool | None = option(None)
    """Share the cache of common prompt prefixes, by the column hash_ids of the trace (default: where the trace has one)."""
    hash_block_tokens: int = option(512, metavar="N", positive=True, low=1)
    """Prompt tokens per entry of the trace's hash_ids, 512 in the traces of Mooncake."""
    tenants: int = option(1, metavar="N", positive=True, low=1)
    """Number of tenants that send requests, for the policy vtc: the first sends twice as many as the second, three times as many as
    the third, and so on (Zipf's law)."""

    def __post_init__(self) -> None:
        def require(ok: bool, message: str) -> None:
            if not ok:
                raise ConfigError(message)

        check_options(self)
        rho_us = self.rho_us
        require(
            rho_us is None or 0 <= rho_us < 1e6,
            f"rho_us={rho_us!r} must lie in [0, 1e6) microseconds (--rho-us)",
        )
        require(
            0 <= self.host_s < 1e3,
            f"host_s={self.host_s!r} must lie in [0, 1000) seconds (--host-ms)",
        )
        require(
            self.routing_policy in ROUTING_POLICIES,
            f"routing_policy={self.routing_policy!r:.40} must be one of {', '.join(ROUTING_POLICIES)} (--routing-policy)",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """The requests of one run: lengths, arrivals, classes."""

    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    arrival_s: NDArray[np.float64]
    best_effort: NDArray[np.bool_]
    slos: Sequence[SLO] | None = None
    """Objectives of each request; None: `SimulationConfig.slo` of all."""
    tenant: NDArray[np.int32] | None = None
    """Number of who sends each request; None: all come from one."""
    prompts: Sequence[NDArray[np.int32]] | None = None
    """Token ids of each prompt, of `prompt_tokens` length; None: only lengths are known, and nothing is found cached."""

    def slo(self, index: int, default: SLO) -> SLO:
        """The objectives of one request."""
        return default if self.slos is None else self.slos[index]

    def share_with_gaps(self, more_than: int = 100) -> float:
        """Share of the requests with more than so many gaps between output tokens.

        The P99 of more than 100 gaps forgives the longest one, so that such a request may be preempted once and still attain.
        """
        return float(np.mean(self.output_tokens - 1 > more_than))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TenantCounts:
    """One tenant's part of a run."""

    num_sent: int
    slo_attainment: float
    output_tokens: int
    ttft_p50_s: float | None
    """None: no request of it came to a first token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaCounts:
    """One replica's part of a run."""

    num_sent: int
    """Requests that were routed to it."""
    iterations: int
    preemptions: int
    device_busy_fraction: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SimulationResult:
    """What a run showed."""

    config: SimulationConfig
    summary: Summary
    preemptions: int
    recomputed_tokens: int
    fallback_iterations: int
    """Iterations that `fcfs` scheduled, because the policy failed: the run is not the policy's where there are any."""
    num_left_out: int
    """Requests of the trace that can never fit this model and pool: none of them was drawn."""
    slo_attainment_bound: float | None
    """Share of the requests that no policy can exceed (`apt_jax.sim.attainable`). None: with prefix caching, classes, objectives
    of single requests, and step times that are not `StepCosts` of a description."""
    kind_switches: int
    prefix_hit_fraction: float
    """Share of the prompt tokens of scheduled requests that were found cached; 0 without prefix caching."""
    conversions: int
    """Times that a running request went from layer inputs to keys and values."""
    hidden_token_fraction: float
    """Share of decoded tokens whose request held the hidden kind."""
    iterations: int
    iterations_by_type: dict[str, int]
    device_busy_fraction: float
    """Share of the run that the simulated devices worked."""
    schedule_ms: tuple[float, float]
    """p50 and p99 of a scheduling call on this host, ms, of several replicas the longest; the only numbers that are not deterministic with the next."""
    sim_wall_s: float
    requests: list[RequestMetrics | None]
    """In order of arrival; None: refused."""
    replicas: tuple[ReplicaCounts, ...]
    routed_to: NDArray[np.int32]
    """(requests,) index of the replica of each."""
    tenants: tuple[TenantCounts, ...] = ()
    """By tenant; empty where there is one."""

    @property
    def slo_attainment(self) -> float:
        """Share of the requests that attained their objectives."""
        return self.summary.slo_attainment

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, from the first arrival to the last token."""
        return self.summary.tokens_per_s

    @property
    def ttft_p99_s(self) -> float | None:
        """P99 of TTFT over completed requests, seconds: how long the last ones wait."""
        return self.summary.ttft_s.p99

    @property
    def duration_s(self) -> float:
        """First arrival to last token, seconds (makespan)."""
        return self.summary.duration_s

    def as_dict(self) -> dict[str, Any]:
        """The result keys of `apt-jax simulate --json`."""
        s = self.summary
        config = dataclasses.asdict(self.config)
        return {
            "config": config,
            "slo_attainment": s.slo_attainment,
            "ttft_attainment": s.ttft_attainment,
            "tbt_attainment": s.tbt_attainment,
            "ttft_s": dataclasses.asdict(s.ttft_s),
            "tbt_s": dataclasses.asdict(s.tbt_s),
            "p99_tbt_drop_first_s": dataclasses.asdict(s.p99_tbt_drop_first_s),
            "tokens_per_s": s.tokens_per_s,
            "goodput": s.goodput,
            "duration_s": s.duration_s,
            "num_sent": s.num_sent,
            "num_completed": s.num_completed,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "fallback_iterations": self.fallback_iterations,
            "num_left_out": self.num_left_out,
            "slo_attainment_bound": self.slo_attainment_bound,
            "kind_switches": self.kind_switches,
            "prefix_hit_fraction": self.prefix_hit_fraction,
            "conversions": self.conversions,
            "hidden_token_fraction": self.hidden_token_fraction,
            "iterations": self.iterations,
            "iterations_by_type": self.iterations_by_type,
            "device_busy_fraction": self.device_busy_fraction,
            "schedule_ms": {"p50": self.schedule_ms[0], "p99": self.schedule_ms[1]},
            "sim_wall_s": self.sim_wall_s,
            "replicas": [dataclasses.asdict(replica) for replica in self.replicas],
            "tenants": [dataclasses.asdict(tenant) for tenant in self.tenants],
        }


def fitting(trace: Trace, hardware: Hardware, config: SimulationConfig) -> Trace:
    """The trace with scaled outputs, without (or refused for) requests that the hardware can never serve.

    Raises:
        ConfigError: a request that can never fit, unless `drop_too_long` or the trace is a bundled one.
    """
    trace = trace.scale_outputs(config.output_scale)
    kinds = hardware.kinds(config.cache, config.hidden_attention)
    num_blocks = config.num_blocks or hardware.num_blocks
    sizes = (hardware.block_size, hardware.hidden_block_size or hardware.block_size)
    pairs = zip(kinds, sizes, strict=True)
    most = max(num_blocks // kind.blocks_per_group * size for kind, size in pairs if kind.offered)
    limit = min(hardware.max_model_len, most)
    total = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    fits = total <= limit
    if fits.all():
        return trace
    if not (
        config.drop_too_long or trace.lines is None or not config.trace.endswith((".csv", ".gz"))
    ):
        i = int(np.flatnonzero(~fits)[0])
        raise ConfigError(
            f"{trace.name} line {trace.lines[i]}: {trace.prompt_tokens[i]} prompt and {trace.output_tokens[i]} output "
            f"tokens can never fit {config.model} on {hardware.name} ({limit} tokens a request); "
            "--drop-too-long leaves such requests out"
        )
    kept = trace.take(np.flatnonzero(fits))
    if not kept.num_requests:
        raise ConfigError(
            f"{trace.name}: no request fits {config.model} on {hardware.name} ({limit} tokens a request)"
        )
    return kept


def draw_workload(trace: Trace, config: SimulationConfig) -> Workload:
    """Requests and arrivals of a run, from its seed."""
    rng = np.random.default_rng([config.seed, 0xA97])
    n = config.num_requests
    recorded = trace.arrival_s is not None and config.cv is None
    if recorded:
        n = min(n, trace.num_requests)
        picked = trace.take(np.arange(n))
        assert picked.arrival_s is not None
        arrival_s = scale_arrivals(picked.arrival_s, config.rate)
    else:
        if config.rate is None:
            raise ConfigError(
                f"trace {trace.name} has no arrivals: say how many requests a second (--rate)"
            )
        # Without replacement while there are enough.
        index = rng.permutation(trace.num_requests)[:n]
        if n > index.size:
            index = np.concatenate([index, rng.integers(0, trace.num_requests, n - index.size)])
        picked = trace.take(index)
        cv = 1.0 if config.cv is None else config.cv
        arrival_s = draw_arrivals(n, config.rate, cv, np.random.default_rng([config.seed, 0x7A1]))
    best_effort = picked.best_effort
    return Workload(
        prompt_tokens=picked.prompt_tokens,
        output_tokens=picked.output_tokens,
        arrival_s=arrival_s,
        best_effort=np.zeros(n, np.bool_) if best_effort is None else best_effort,
        tenant=_draw_tenants(n, config) if config.tenants > 1 else None,
        prompts=None
        if picked.hash_ids is None or config.enable_prefix_caching is False
        else prompts_of(picked, config.hash_block_tokens),
    )


def _draw_tenants(num_requests: int, config: SimulationConfig) -> NDArray[np.int32]:
    shares = 1.0 / np.arange(1, config.tenants + 1)
    rng = np.random.default_rng([config.seed, 0x7E4])
    return rng.choice(config.tenants, num_requests, p=shares / shares.sum()).astype(np.int32)


class TimedExecutor(Executor, Protocol):
    """An executor that says how long it has worked."""

    @property
    def num_steps(self) -> int: ...

    @property
    def busy_s(self) -> float: ...


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
    can_convert: bool = True,
    debug: bool = False,
) -> SimulationResult:
    """Run one simulation.

    Args:
        config: what to run.
        hardware: None: the one that `config` names.
        workload: None: drawn from the trace that `config` names.
        policy: None: the one that `config` names. An object serves one replica.
        step_s: durations of steps; None: the hardware's cost model.
        executor: makes another one than `SimulatedExecutor` for the run's clock, which it must advance
            (`apt_jax.sim.record`); its pool and block size must be the hardware's. `host_s` is then only predicted.
        progress: told (ended requests, all) now and then.
        on_step: called with the engine that has run it after every iteration, for pictures.
        can_convert: whether policies may convert layer inputs to keys and values, at
            `StepCosts.convert_per_hidden_token_s` a token.
        debug: the engine checks its accounting after every step.

    Raises:
        ConfigError: unknown names, impossible settings, a trace that cannot be served.
    """
    started = time.perf_counter()
    hardware = hardware or load_hardware(config.model, config.hardware, config.num_devices)
    num_left_out = 0
    if workload is None:
        trace = load_trace(config.trace)
        kept = fitting(trace, hardware, config)
        num_left_out = trace.num_requests - kept.num_requests
        workload = draw_workload(kept, config)
    costs = hardware.step_costs(config.hidden_attention)
    timing = hardware.programs or costs
    overlap = hardware.programs is not None if config.overlap is None else config.overlap
    # A cost model that is fitted to whole steps has the host's time in them.
    if config.host_s and not overlap and hardware.programs is None:
        costs = dataclasses.replace(
            costs,
            prefill_base_s=costs.prefill_base_s + config.host_s,
            decode_base_s=costs.decode_base_s + config.host_s,
        )
    max_num_seqs, budget = _bounds(config, hardware)
    scheduler = SchedulerConfig(
        policy=config.policy,
        violation_decay=config.violation_decay,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        # Room for all, and more than any tenant's share of it: nobody is refused for the length of the queue.
        max_num_queued_reqs=max(2 * workload.arrival_s.size, 1),
        overlap=overlap,
    )
    prefixes = config.enable_prefix_caching
    if prefixes is None:
        prefixes = workload.prompts is not None
    if prefixes and workload.prompts is None:
        raise ConfigError(
            f"trace {config.trace} has no column hash_ids: nothing is known of common beginnings (--enable-prefix-caching)"
        )
    if policy is not None and config.replicas > 1:
        raise ConfigError(
            "a policy object serves one replica: name the policy in the configuration"
        )
    bound = None
    of_cost_model = executor is None and step_s is None and hardware.programs is None
    alike = workload.slos is None and not workload.best_effort.any() and not prefixes
    if of_cost_model and alike:
        bound = attainable_share(
            workload.arrival_s,
            workload.prompt_tokens,
            costs,
            ttft_s=config.slo.ttft_s,
            step_tokens=budget,
            replicas=config.replicas,
        )

    def predicted_s(batch: StepBatch) -> float:
        step_s = timing.step_s(batch.num_tokens, batch.start, batch.kind)
        return step_s + costs.conversion_s(batch.num_converted_tokens)

    def replica() -> "_Replica":
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
            )
        )
        engine = Engine(
            timed,
            make_policy(config=scheduler, seed=config.seed) if policy is None else policy,
            clock,
            hardware.kinds(config.cache, config.hidden_attention, rho_us=config.rho_us),
            scheduler,
            # Prompts of which only lengths are known are all alike, and would be found in the cache.
            CacheConfig(
                block_size=hardware.block_size, mode=config.cache, enable_prefix_caching=prefixes
            ),
            costs=costs,
            debug=debug,
            lengths_only=executor is None and step_s is None,
        )
        return _Replica(engine, timed, clock, overlap)

    replicas = [replica() for _ in range(config.replicas)]
    sent = _requests(workload, config)
    requests, routed_to = _run(
        replicas, sent, ROUTING_POLICIES[config.routing_policy](), progress, on_step
    )
    records = [
        RequestRecord(arrival_s=request.arrival_s, ok=False, slo=request.slo)
        if metrics is None
        else RequestRecord.from_metrics(metrics, ok=metrics.finished_s is not None)
        for request, metrics in zip(sent, requests, strict=True)
    ]
    summary = summarize(records)
    stats = [replica.engine.stats() for replica in replicas]
    by_type = collections.Counter[str]()
    for one in stats:
        by_type.update(one.iterations)

    def busy_fraction(busy_s: float) -> float:
        return busy_s / summary.duration_s if summary.duration_s > 0 else 0.0

    return SimulationResult(
        config=config,
        summary=summary,
        preemptions=sum(one.num_preemptions for one in stats),
        recomputed_tokens=sum(one.recomputed_tokens for one in stats),
        fallback_iterations=sum(one.fallback_iterations for one in stats),
        num_left_out=num_left_out,
        slo_attainment_bound=bound,
        kind_switches=sum(sum(one.kind_switches.values()) for one in stats),
        prefix_hit_fraction=sum(one.prefix_cache_hits for one in stats)
        / max(sum(one.prefix_cache_queries for one in stats), 1),
        conversions=sum(one.num_conversions for one in stats),
        hidden_token_fraction=sum(replica.hidden_tokens for replica in replicas)
        / max(sum(one.generation_tokens for one in stats), 1),
        iterations=sum(replica.executor.num_steps for replica in replicas),
        iterations_by_type=dict(by_type),
        device_busy_fraction=busy_fraction(
            sum(replica.executor.busy_s for replica in replicas) / len(replicas)
        ),
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
    )


def _by_tenant(
    tenant: NDArray[np.int32] | None, records: Sequence[RequestRecord]
) -> tuple[TenantCounts, ...]:
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


def _bounds(config: SimulationConfig, hardware: Hardware) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) of a run."""
    programs = hardware.programs
    if programs is None:
        budget = min(max(2048, hardware.max_model_len), 16384)
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


class _Replica:
    """An engine with its clock, the requests sent to it, and what a router may know of it."""

    def __init__(
        self, engine: Engine, executor: TimedExecutor, clock: VirtualClock, overlap: bool
    ) -> None:
        self.engine, self.executor, self._clock = engine, executor, clock
        self._overlap = overlap
        self.next_s = math.inf
        """When its next iteration begins; infinite: there is nothing to do."""
        self.num_sent = self.hidden_tokens = 0
        self._inbox: list[EngineRequest] = []
        self._coming = Coming()
        self._rate = TokenRate()
        self._in_step: ReplicaState | None = None
        """How things stood when the last step was put together, with the time that it should end at as `busy_s`."""

    def watch(self) -> None:
        """From now on `state` can be asked."""
        self.engine.on_plan = self._look_at_step

    def _look_at_step(self, batch: StepBatch) -> None:
        self._coming = Coming()
        step_s = self.engine.costs.step_s(batch.num_tokens, batch.start, batch.kind)
        begin_s = self._clock.now_s()
        if self._overlap and self._in_step is not None:  # the step before still runs
            begin_s = max(begin_s, self._in_step.busy_s)
        self._in_step = self._look(begin_s + step_s)

    def _look(self, busy_s: float) -> ReplicaState:
        engine, view = self.engine, self.engine.view()
        return ReplicaState(
            admission=engine.admission,
            outlook=engine.outlook(),
            coming=self._coming,
            busy_s=busy_s,
            num_running=int(view.running.size),
            num_blocks=view.total_blocks,
            free_blocks=view.free_blocks,
            queued_tokens=int(view.table.num_tokens[view.waiting].sum()),
            tokens_per_s=self._rate.update(
                self._clock.now_s(), self.engine.num_generated, self.executor.busy_s
            ),
            least_blocks=engine.least_blocks,
        )

    def state(self, now_s: float) -> ReplicaState:
        """What is known at `now_s`, which lies between the beginnings of two iterations."""
        if self._in_step is not None and self._clock.now_s() > now_s:  # it ends after this
            left_s = max(self._in_step.busy_s - now_s, 0.0)
            return dataclasses.replace(self._in_step, busy_s=left_s, coming=self._coming)
        self._clock.advance_to(now_s)
        left_s = 0.0
        if self._overlap and self._in_step is not None:
            left_s = max(self._in_step.busy_s - now_s, 0.0)
        return self._look(left_s)

    def send(self, request: EngineRequest) -> None:
        """A request comes, now."""
        self._inbox.append(request)
        self.num_sent += 1
        num_tokens = int(request.prompt_token_ids.size)
        self._coming.add(
            prompt_len=num_tokens,
            own_tokens=num_tokens,
            blocks=self.engine.least_blocks(num_tokens),
            best_effort=request.slo_class == "be",
            tenant=request.tenant,
        )
        self.next_s = max(self._clock.now_s(), request.arrival_s)

    def turn(self) -> tuple[list[StepOutput], int]:
        """One iteration of the engine; returns what it delivered, and how many of the requests that had come were refused."""
        self._clock.advance_to(self.next_s)
        num_refused = 0
        for request in self._inbox:
            try:
                self.engine.add_request(request)
            except InvalidRequestError:
                num_refused += 1
        self._inbox.clear()
        self._coming = Coming()
        before, began_s = self.executor.num_steps, self._clock.now_s()
        outputs = self.engine.step()
        self.next_s = self._clock.now_s() if self.engine.has_work else math.inf
        if self.executor.num_steps > before:
            plan = self.engine.last_plan
            if plan is not None and plan.kind.any():
                self.hidden_tokens += int(np.count_nonzero(plan.kind == HIDDEN))
        elif not outputs and self._clock.now_s() == began_s:  # and no step has ended either
            self.next_s += _IDLE_S
        return outputs, num_refused


def _requests(workload: Workload, config: SimulationConfig) -> list[EngineRequest]:
    """The workload as the engine takes it, in order of arrival; the id is the index."""
    greedy: dict[int, SamplingParams] = {}
    requests = []
    for i, (prompt_len, length, arrival_s, best_effort) in enumerate(
        zip(
            workload.prompt_tokens.tolist(),
            workload.output_tokens.tolist(),
            workload.arrival_s.tolist(),
            workload.best_effort.tolist(),
            strict=True,
        )
    ):
        params = greedy.get(length)
        if params is None:
            params = greedy[length] = SamplingParams(max_tokens=length, temperature=0.0)
        requests.append(
            EngineRequest(
                request_id=str(i),
                prompt=None,
                prompt_token_ids=_prompt(prompt_len)
                if workload.prompts is None
                else workload.prompts[i],
                params=params,
                slo=workload.slo(i, config.slo),
                arrival_s=arrival_s,
                slo_class="be" if best_effort else "rt",
                tenant=None if workload.tenant is None else str(workload.tenant[i]),
            )
        )
    return requests


def _run(
    replicas: Sequence[_Replica],
    requests: Sequence[EngineRequest],
    route: Router,
    progress: Callable[[int, int], None] | None,
    on_step: Callable[[Engine], None] | None,
) -> tuple[list[RequestMetrics | None], NDArray[np.int32]]:
    """Serve all requests; returns their metrics, and which replica each went to."""
    n = len(requests)
    metrics: list[RequestMetrics | None] = [None] * n
    routed_to = np.zeros(n, np.int32)
    if len(replicas) > 1:
        for replica in replicas:
            replica.watch()
    sent = ended = turns = 0
    while ended < n:
        replica = min(replicas, key=lambda replica: replica.next_s)
        if sent < n and requests[sent].arrival_s <= replica.next_s:
            request = requests[sent]
            if len(replicas) > 1:
                states = [replica.state(request.arrival_s) for replica in replicas]
                routed_to[sent] = route(request, states)
            replicas[routed_to[sent]].send(request)
            sent += 1
            continue
        before = replica.executor.num_steps
        outputs, num_refused = replica.turn()
        ended += num_refused
        for output in outputs:
            if output.finish_reason is not None:
                metrics[int(output.request.request_id)] = output.metrics
                ended += 1
        if on_step is not None and replica.executor.num_steps > before:
            on_step(replica.engine)
        turns += 1
        if progress is not None and not turns % 512:
            progress(ended, n)
    if progress is not None:
        progress(n, n)
    return metrics, routed_to


def _prompt(length: int) -> NDArray[np.int32]:
    if length <= _NO_TEXT.size:
        return _NO_TEXT[:length]
    return np.zeros(length, np.int32)
