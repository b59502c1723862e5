"""Snapshot of the engine's counters and gauges."""

import dataclasses

import numpy as np

from apt_jax.cache.placement import SlotTraffic
from apt_jax.core.kinds import KIND_NAMES, KINDS
from apt_jax.core.tiers import DiskCounts
from apt_jax.engine.counters import EngineCounters, RecomputeCause
from apt_jax.engine.request_states import ENDING, RUNNING, WAITING, RequestStates
from apt_jax.metrics import Distribution


@dataclasses.dataclass(frozen=True, kw_only=True)
class TenantUsage:
    """Counters and gauges of one tenant."""

    num_running: int
    num_waiting: int
    prompt_tokens: int
    generation_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine was created, and current gauges."""

    num_waiting: int
    """Requests without cache, including preempted requests."""
    num_running: int
    """Requests that hold cache."""
    num_ending: int
    """Requests whose last token is in flight."""
    num_waiting_best_effort: int
    """Best-effort requests (class "be") in `num_waiting`."""
    num_running_best_effort: int
    """Best-effort requests (class "be") in `num_running` and `num_ending`."""
    waiting_prompt_tokens: int
    waiting_uncached_tokens: int
    """Uncached positions of the waiting requests, including output tokens of preempted requests."""
    total_blocks: int
    free_blocks: int
    """Blocks that can be allocated, including idle cached blocks."""
    cached_blocks: int
    """Blocks of cached prefixes that no request holds; they can be allocated at any time."""
    blocks_by_kind: dict[str, int]
    requests_by_kind: dict[str, int]
    """Number of running requests, keyed by cache kind."""
    iterations: dict[str, int]
    """Number of steps run, keyed by `Plan.iteration`."""
    num_preemptions: int
    kind_switches: dict[tuple[str, str], int]
    """Number of times that a request lost its cache and was scheduled with another kind, keyed by (from, to)."""
    num_conversions: int
    """Number of conversions of requests from layer inputs to keys and values."""
    recomputed_tokens: int
    """Positions recomputed after preemptions and failures."""
    recomputed_by_cause: dict[str, int]
    """`recomputed_tokens` for each cause; keys are the names of `RecomputeCause` in lower case."""
    prefix_cache_queries: int
    """Prompt tokens of requests that have been scheduled; 0 without prefix caching."""
    prefix_cache_hits: int
    """Tokens of `prefix_cache_queries` that were cached."""
    changed_prefix_tokens: int
    """Prompt tokens computed although the last prompt of their session had them too, behind a different beginning."""
    prompt_tokens_by_source: dict[str, int]
    """`prefix_cache_queries` by where they came from, keyed by `PROMPT_SOURCES`."""
    sessions: dict[str, int]
    """Number of remembered sessions, keyed by `SESSION_STATES`; empty if neither retention nor order needs sessions."""
    host_blocks: int
    """Blocks of host memory for cached prefixes; 0 without `swap_space`."""
    used_host_blocks: int
    saved_blocks: int
    """Whole blocks copied to host memory."""
    loaded_blocks: int
    """Whole blocks copied from host memory."""
    saved_bytes: int
    """Bytes copied to host memory, as whole blocks and as single slots."""
    loaded_bytes: int
    saved_slots: int
    """Single slots copied to host memory before another request overwrote them (block sharing)."""
    loaded_slots: int
    """Single slots copied back from host memory (block sharing)."""
    device_hit_tokens: int
    """Positions of new and of preempted requests that were cached on the device."""
    host_hit_tokens: int
    """Positions of new and of preempted requests that were copied from host memory instead of being computed."""
    restores: dict[str, int]
    """Number of requests whose cached prefix was restored, keyed by method. "kv", "hidden": groups of this kind were
    copied from host memory; "recomputed": groups in host memory were computed again, because that was faster;
    "converted": keys and values were computed from cached layer inputs, on the device or in host memory."""
    num_lost_groups: int
    """Groups of blocks in host memory lost because a transfer failed or a checksum was wrong."""
    disk_bytes: int
    """Bytes of the prefix files in `prefix_cache_dir`, including known files of other servers; 0 without
    `prefix_cache_dir`."""
    disk_read_bytes: int
    disk_written_bytes: int
    disk_hit_tokens: int
    """Positions read from disk into host memory for waiting requests."""
    num_dropped_files: int
    """Prefix files removed because they were damaged or belonged to another model."""
    num_unwritten_groups: int
    """Groups of blocks not written because the disk failed, was full or was too slow."""
    finished: dict[str, int]
    """Number of ended requests, keyed by finish reason."""
    num_rejected: int
    """Requests that admission rejected."""
    num_slo_at_risk_admitted: int
    """Requests admitted although their SLO looked out of reach (`slo_admission="warn"`)."""
    prompt_tokens: int
    """Prompt tokens of requests whose first token has been delivered."""
    generation_tokens: int
    """Tokens delivered."""
    best_effort_prompt_tokens: int
    """`prompt_tokens` of best-effort requests (class "be")."""
    best_effort_generation_tokens: int
    """`generation_tokens` of best-effort requests (class "be")."""
    num_deferred_requests: int
    """Rows of plans that did not run because too few blocks were free."""
    num_discarded_tokens: int
    """Tokens discarded because their request ended while the step was in flight."""
    num_invalid_plan_rows: int
    """Rows of plans that violated the contract of `Plan`; a value above 0 is a bug in the policy."""
    fallback_iterations: int
    """Iterations scheduled by `fcfs` because the policy raised an error, its plan violated the contract, or it had
    scheduled nothing for too long."""
    step_failures: int
    compilations: int
    step_tokens: Distribution
    """Tokens per step."""
    schedule_s: Distribution
    """Scheduling time per decision, seconds."""
    host_p50_ms: float
    """Median host time per iteration over the last 4,096 iterations, milliseconds, without dispatch and without waiting
    for the device; 0 before the first iteration."""
    host_p99_ms: float
    schedule_p50_ms: float
    """Median time of the policy per iteration, milliseconds; part of the host time."""
    schedule_p99_ms: float
    dispatch_p50_ms: float
    """Median time of `Executor.execute` per iteration, milliseconds."""
    mask_p50_ms: float
    """Median time to fill token masks, over the last 4,096 steps with masks, milliseconds; part of the host time."""
    mask_p99_ms: float
    cost_errors: dict[str, float]
    """Mean relative error of the step times predicted by `StepCosts`, for "prefill" (steps with chunks) and "decode",
    over about the last 32 compared steps; every eighth step is compared. Empty without a cost model."""
    busy_s: float
    """Total time of the steps, seconds."""
    expected_wait_s: float | None
    """Estimated queueing time of a new request with an SLO, seconds; None without a cost model."""

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - self.free_blocks


def collect_stats(
    states: RequestStates,
    counters: EngineCounters,
    *,
    num_slo_at_risk_admitted: int,
    compilations: int,
    expected_wait_s: float | None,
    host_block_bytes: int = 0,
    disk: DiskCounts | None = None,
) -> EngineStats:
    """Return a snapshot of counters and gauges; takes about 0.1 ms."""
    table, cache = states.table, states.cache
    tier = cache.tier
    disk = DiskCounts() if disk is None else disk
    saved, loaded = (0.0, 0.0) if tier is None else (tier.num_saved_blocks, tier.num_loaded_blocks)
    slots = SlotTraffic() if cache.placement is None else cache.placement.traffic()
    waiting = states.status == WAITING
    kinds = table.kind[states.status == RUNNING]
    low = table.best_effort & table.live
    return EngineStats(
        num_waiting=int(np.count_nonzero(waiting)),
        num_running=int(kinds.size),
        num_ending=states.count(ENDING),
        num_waiting_best_effort=int(np.count_nonzero(low & waiting)),
        num_running_best_effort=int(np.count_nonzero(low & ~waiting)),
        waiting_prompt_tokens=int(table.prompt_len[waiting].sum()),
        waiting_uncached_tokens=states.uncached_tokens(waiting),
        total_blocks=cache.pool.num_blocks,
        free_blocks=cache.num_free,
        cached_blocks=cache.num_idle,
        blocks_by_kind={KIND_NAMES[kind]: n for kind, n in cache.blocks_by_kind().items()},
        requests_by_kind={KIND_NAMES[kind]: int(np.count_nonzero(kinds == kind)) for kind in KINDS},
        iterations=dict(counters.iterations),
        num_preemptions=counters.num_preemptions,
        kind_switches={
            (KIND_NAMES[a], KIND_NAMES[b]): int(counters.kind_switches[a, b]) for a in KINDS for b in KINDS if a != b
        },
        num_conversions=counters.num_conversions,
        recomputed_tokens=counters.recomputed_tokens,
        recomputed_by_cause={cause.name.lower(): int(counters.recomputed[cause]) for cause in RecomputeCause},
        changed_prefix_tokens=counters.changed_prefix_tokens,
        prefix_cache_queries=sum(counters.prompt_sources.values()),
        prefix_cache_hits=sum(counters.prompt_sources[source] for source in ("device", "host", "disk")),
        prompt_tokens_by_source=dict(counters.prompt_sources),
        sessions={} if states.sessions is None else states.sessions.counts(),
        host_blocks=0 if tier is None else tier.pool.num_blocks,
        used_host_blocks=0 if tier is None else tier.pool.num_used,
        saved_blocks=0 if tier is None else tier.num_saved_blocks,
        loaded_blocks=0 if tier is None else tier.num_loaded_blocks,
        saved_bytes=round((saved + slots.saved_blocks) * host_block_bytes),
        loaded_bytes=round((loaded + slots.loaded_blocks) * host_block_bytes),
        saved_slots=slots.saved_slots,
        loaded_slots=slots.loaded_slots,
        device_hit_tokens=counters.cache_hit_tokens - counters.host_hit_tokens,
        host_hit_tokens=counters.host_hit_tokens,
        restores=dict(counters.restores),
        num_lost_groups=counters.num_lost_groups,
        disk_bytes=disk.num_bytes,
        disk_read_bytes=disk.read_bytes,
        disk_written_bytes=disk.written_bytes,
        disk_hit_tokens=counters.disk_hit_tokens,
        num_dropped_files=disk.num_dropped_files,
        num_unwritten_groups=disk.num_unwritten,
        finished=dict(counters.finished),
        num_rejected=counters.num_rejected,
        num_slo_at_risk_admitted=num_slo_at_risk_admitted,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        best_effort_prompt_tokens=counters.best_effort_prompt_tokens,
        best_effort_generation_tokens=counters.ended_best_effort_tokens + int(table.num_delivered[low].sum()),
        num_deferred_requests=counters.num_deferred_requests,
        num_discarded_tokens=counters.num_discarded_tokens,
        num_invalid_plan_rows=counters.num_invalid_plan_rows,
        fallback_iterations=counters.fallback_iterations,
        step_failures=counters.step_failures,
        compilations=compilations,
        step_tokens=counters.step_tokens.copy(),
        schedule_s=counters.schedule_s.copy(),
        host_p50_ms=1e3 * counters.host_s.percentile(50),
        host_p99_ms=1e3 * counters.host_s.percentile(99),
        schedule_p50_ms=1e3 * counters.last_schedules_s.percentile(50),
        schedule_p99_ms=1e3 * counters.last_schedules_s.percentile(99),
        dispatch_p50_ms=1e3 * counters.dispatch_s.percentile(50),
        mask_p50_ms=1e3 * counters.mask_s.percentile(50),
        mask_p99_ms=1e3 * counters.mask_s.percentile(99),
        cost_errors=dict(counters.cost_errors),
        busy_s=counters.busy_s,
        expected_wait_s=expected_wait_s,
    )


def usage_of(states: RequestStates, counters: EngineCounters, tenant: str) -> TenantUsage:
    """Return the counters and gauges of a tenant."""
    running, waiting = (
        int(np.count_nonzero(states.table.tenant[states.rows(status)] == states.tenants.get(tenant, -1)))
        for status in (RUNNING, WAITING)
    )
    return TenantUsage(
        num_running=running,
        num_waiting=waiting,
        prompt_tokens=counters.tenant_prompt_tokens[tenant],
        generation_tokens=counters.tenant_generation_tokens[tenant],
    )
