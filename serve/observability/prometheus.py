"""Prometheus metrics: vLLM's names if vLLM has one, else `aptjax:` (docs/serving/observability.md).

Counters and gauges are the engine's own (`EngineStats`); `ServerMetrics` adds distributions and SLO counts as the
observer of an `AsyncEngine`, for requests of every protocol. A scrape copies both between two steps, in the engine's
thread, so that its values are consistent, and changes nothing.
"""

import asyncio
import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from apt_jax.engine import EngineStats
from apt_jax.engine.restore import RESTORES
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.metrics import Distribution, RequestRecord
from apt_jax.request import EngineRequest
from serve.batches.records import OPEN, STATUSES
from serve.batches.runner import OUTCOMES, BatchCounters
from serve.memory_gate import MemoryGate

# vLLM's buckets, seconds.
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

_OPENMETRICS = "application/openmetrics-text"
_OUTPUTS = (1, 2, 5, 10, 20)
_REASONS = ("stop", "length", "abort", "error")
_OBJECTIVES = ("ttft", "tbt", "all")
_CLASSES = ("rt", "be")
LABELS = ("model_name", "engine")
"""Labels of every sample."""


def token_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to `most`, as vLLM has them."""
    bounds = (m * 10**e for e in range(len(str(most))) for m in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)


class _ByClass:
    """A distribution of each class."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.of = {name: Distribution(bounds) for name in _CLASSES}

    def copy(self) -> "_ByClass":
        made = _ByClass.__new__(_ByClass)
        made.of = {name: values.copy() for name, values in self.of.items()}
        return made

    @property
    def all(self) -> Distribution:
        return self.of["rt"].plus(self.of["be"])


@dataclasses.dataclass(kw_only=True)
class _Sums:
    """Distributions and counts over all requests so far."""

    ttft_s: _ByClass
    inter_token_s: _ByClass
    latency_s: Distribution
    queue_s: _ByClass
    prompt_tokens: Distribution
    generation_tokens: Distribution
    prefill_s: Distribution
    decode_s: Distribution
    inference_s: Distribution
    params_max_tokens: Distribution
    params_n: Distribution
    attained: "collections.Counter[tuple[str, str]]"
    """By objective and class."""
    missed: "collections.Counter[tuple[str, str]]"

    def copy(self) -> "_Sums":
        return _Sums(**{f.name: getattr(self, f.name).copy() for f in dataclasses.fields(self)})


@dataclasses.dataclass(kw_only=True)
class _TenantSums:
    """Distributions and counts over the requests of one tenant."""

    ttft_s: Distribution = dataclasses.field(default_factory=lambda: Distribution(TTFT_S))
    inter_token_s: Distribution = dataclasses.field(default_factory=lambda: Distribution(INTER_TOKEN_S))
    latency_s: Distribution = dataclasses.field(default_factory=lambda: Distribution(LATENCY_S))
    queue_s: Distribution = dataclasses.field(default_factory=lambda: Distribution(LATENCY_S))
    finished: "collections.Counter[str]" = dataclasses.field(default_factory=collections.Counter)
    """By how they ended."""


class ServerMetrics:
    """The metrics of one engine; the observer of its `AsyncEngine`.

    Args:
        parts: of the engine.
        memory: rejects calls; None: there is no limit.
    """

    def __init__(self, parts: EngineComponents, memory: MemoryGate | None = None) -> None:
        self._parts, self._memory = parts, memory
        self.batches: Callable[[], BatchCounters] | None = None
        """Counts of batches; None: there are none."""
        lens = token_buckets(parts.limits.max_model_len)
        self._sums = _Sums(
            ttft_s=_ByClass(TTFT_S),
            inter_token_s=_ByClass(INTER_TOKEN_S),
            latency_s=Distribution(LATENCY_S),
            queue_s=_ByClass(LATENCY_S),
            prompt_tokens=Distribution(lens),
            generation_tokens=Distribution(lens),
            prefill_s=Distribution(LATENCY_S),
            decode_s=Distribution(LATENCY_S),
            inference_s=Distribution(LATENCY_S),
            params_max_tokens=Distribution(lens),
            params_n=Distribution(_OUTPUTS),
            attained=collections.Counter(),
            missed=collections.Counter(),
        )
        self._of_tenants: collections.defaultdict[str, _TenantSums] = collections.defaultdict(_TenantSums)

    def calibrated(self, parts: EngineComponents) -> None:
        """The engine has got its step costs."""
        self._parts = parts

    # Called in the engine's thread, which alone writes the sums.

    def ended(self, delta: OutputDelta) -> None:
        """See `apt_jax.frontend.async_engine.Observer`."""
        sums, metrics, of_class = self._sums, delta.metrics, delta.request.slo_class
        times_s = metrics.token_times_s
        if times_s:
            sums.ttft_s.of[of_class].add(times_s[0] - metrics.arrival_s)
            sums.inter_token_s.of[of_class].add_all(np.diff(np.asarray(times_s, np.float64)))
        ok = delta.finish_reason in ("stop", "length")
        if ok and metrics.finished_s is not None and metrics.first_scheduled_s is not None:
            sums.latency_s.add(metrics.finished_s - metrics.arrival_s)
            sums.queue_s.of[of_class].add(metrics.first_scheduled_s - metrics.arrival_s)
            sums.prompt_tokens.add(delta.request.prompt_token_ids.size)
            sums.generation_tokens.add(len(times_s))
            sums.params_max_tokens.add(delta.request.params.max_tokens)
            if "#" not in delta.request.label:  # once a prompt
                sums.params_n.add(delta.request.num_outputs)
            if times_s:
                sums.prefill_s.add(times_s[0] - metrics.first_scheduled_s)
                sums.decode_s.add(times_s[-1] - times_s[0])
                sums.inference_s.add(times_s[-1] - metrics.first_scheduled_s)
        self._count_slos(RequestRecord.from_metrics(metrics, ok=ok), delta.request)
        if delta.request.tenant is not None:
            self._ended_of_tenant(self._of_tenants[delta.request.tenant], delta)

    def _ended_of_tenant(self, sums: _TenantSums, delta: OutputDelta) -> None:
        metrics, times_s = delta.metrics, delta.metrics.token_times_s
        if times_s:
            sums.ttft_s.add(times_s[0] - metrics.arrival_s)
            sums.inter_token_s.add_all(np.diff(np.asarray(times_s, np.float64)))
        if delta.finish_reason in ("stop", "length") and metrics.finished_s is not None:
            sums.latency_s.add(metrics.finished_s - metrics.arrival_s)
            if metrics.first_scheduled_s is not None:
                sums.queue_s.add(metrics.first_scheduled_s - metrics.arrival_s)
        if delta.finish_reason is not None:
            sums.finished[delta.finish_reason] += 1

    def own_numbers(self, tenant: str) -> dict[str, dict[str, float]]:
        """Distributions and ends of the requests of one tenant: values by sample name, then by bucket or reason. Called in
        the engine's thread."""
        sums = self._of_tenants.get(tenant) or _TenantSums()
        numbers: dict[str, dict[str, float]] = {"vllm:request_success_total": dict(sums.finished)}
        for name, values in (
            ("vllm:time_to_first_token_seconds", sums.ttft_s),
            ("vllm:inter_token_latency_seconds", sums.inter_token_s),
            ("vllm:e2e_request_latency_seconds", sums.latency_s),
            ("vllm:request_queue_time_seconds", sums.queue_s),
        ):
            numbers[f"{name}_bucket"] = dict(_buckets(values))
            numbers[f"{name}_sum"] = {"": values.sum}
        return numbers

    def refused(self, request: EngineRequest) -> None:
        """See `apt_jax.frontend.async_engine.Observer`."""
        record = RequestRecord(arrival_s=request.arrival_s, ok=False, slo=request.slo)
        self._count_slos(record, request)

    def _count_slos(self, record: RequestRecord, request: EngineRequest) -> None:
        """Count a request; one without an objective is neither attained nor missed."""
        has_ttft, has_tbt = math.isfinite(request.slo.ttft_s), math.isfinite(request.slo.tbt_s)
        for objective, has, attained in (
            ("ttft", has_ttft, record.ttft_attained),
            ("tbt", has_tbt, record.tbt_attained),
            ("all", has_ttft or has_tbt, record.slo_attained),
        ):
            if has:
                counter = self._sums.attained if attained else self._sums.missed
                counter[objective, request.slo_class] += 1

    def read(self) -> Collector:
        """Copy all metrics now; called in the engine's thread, used in any."""
        rejected = 0 if self._memory is None else self._memory.num_rejected
        batches = None if self.batches is None else self.batches()
        return _Scrape(self._parts, self._parts.engine.stats(), self._sums.copy(), rejected, batches)

    async def scrape(self, engine: AsyncEngine, accept: str = "") -> tuple[bytes, str]:
        """The exposition in a format that the scraper accepts, and its content type."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(await asyncio.wrap_future(engine.call(self.read)))
        ProcessCollector(registry=registry)
        return exposition(registry, accept)


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics of a registry in a format that an Accept header allows, and its content type.

    Names are the same in both formats: those with colons need no escapes in either, but from 0.23 on
    prometheus_client writes underscores for them unless UTF-8 is allowed.
    """
    wanted = [[part.strip() for part in entry.split(";")] for entry in accept.lower().split(",")]
    if not any(kind == _OPENMETRICS and "q=0" not in parameters for kind, *parameters in wanted):
        encode, content_type = choose_encoder("")
        return encode(registry), content_type
    encode, _ = choose_encoder(f"{_OPENMETRICS};version=1.0.0;escaping=allow-utf-8")
    return encode(registry), f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"


def _buckets(values: Distribution) -> list[tuple[str, float]]:
    """Cumulative counts by the label of their bucket."""
    return [("+Inf" if math.isinf(bound) else str(float(bound)), count) for bound, count in values.cumulative()]


class _Scrape(Collector):
    """The metrics of one moment."""

    def __init__(
        self,
        parts: EngineComponents,
        stats: EngineStats,
        sums: _Sums,
        rejected_by_memory: int,
        batches: BatchCounters | None,
    ) -> None:
        self._parts, self._stats, self._sums, self._batches = parts, stats, sums, batches
        self._rejected_by_memory = rejected_by_memory
        self._values = (parts.model_name, "0")

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        if self._batches is not None:
            yield from self._of_batches(self._batches)

    def _of_batches(self, batches: BatchCounters) -> Iterable[Metric]:
        open_ones = [((status,), batches.open[status]) for status in OPEN]
        yield self._gauge("aptjax:batches", "Batches that have not ended, by state.", open_ones, ("status",))
        ends = [((status,), batches.ended[status]) for status in STATUSES if status not in OPEN]
        yield self._counter("aptjax:batches_ended", "Batches that have ended, by last state.", ends, ("status",))
        yield self._gauge(
            "aptjax:batch_requests_running",
            "Requests of batches that are being read, wait or run.",
            [((), batches.num_in_flight)],
        )
        outcomes = [((outcome,), batches.requests[outcome]) for outcome in OUTCOMES]
        yield self._counter(
            "aptjax:batch_requests", "Requests of batches whose outcome is on disk.", outcomes, ("outcome",)
        )

    def _gauge(
        self,
        name: str,
        text: str,
        values: Sequence[tuple[Sequence[str], float]],
        labels: Sequence[str] = (),
    ) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*LABELS, *labels])
        for more, value in values:
            family.add_metric([*self._values, *more], value)
        return family

    def _counter(
        self,
        name: str,
        text: str,
        values: Sequence[tuple[Sequence[str], float]],
        labels: Sequence[str] = (),
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*LABELS, *labels])
        for more, value in values:
            family.add_metric([*self._values, *more], value)
        return family

    def _histogram(self, name: str, text: str, values: Distribution | _ByClass) -> Metric:
        by_class = isinstance(values, _ByClass)
        family = HistogramMetricFamily(name, text, labels=[*LABELS, "class"] if by_class else list(LABELS))
        for label, one in values.of.items() if by_class else (("", values),):
            family.add_metric([*self._values, label] if by_class else list(self._values), _buckets(one), one.sum)
        return family

    def _gauges(self) -> Iterable[Metric]:
        stats, parts = self._stats, self._parts
        yield self._gauge(
            "vllm:num_requests_running",
            "Requests that have begun and not ended; waiting ones apart.",
            [((), stats.num_running + stats.num_ending)],
        )
        yield self._gauge("vllm:num_requests_waiting", "Requests without cache.", [((), stats.num_waiting)])
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the block pool in use, 0 to 1.",
            [((), stats.used_blocks / stats.total_blocks)],
        )
        of_classes = [
            (("rt", "waiting"), stats.num_waiting - stats.num_waiting_best_effort),
            (("rt", "running"), stats.num_running + stats.num_ending - stats.num_running_best_effort),
            (("be", "waiting"), stats.num_waiting_best_effort),
            (("be", "running"), stats.num_running_best_effort),
        ]
        yield self._gauge(
            "aptjax:class_requests", "Requests that wait and run, by class.", of_classes, ("class", "state")
        )
        groups = (parts.limits.max_pool_tokens or 0) // parts.executor.block_size
        facts = {
            "block_size": str(parts.executor.block_size),
            "num_gpu_blocks": str(groups),
            "enable_prefix_caching": str(parts.config.cache.enable_prefix_caching),
            "cache_mode": parts.config.cache.mode,
        }
        yield self._gauge(
            "vllm:cache_config_info",
            "The cache; num_gpu_blocks counts blocks of block_size tokens of its smallest kind.",
            [(tuple(facts.values()), 1)],
            tuple(facts),
        )
        blocks = [((kind,), count) for kind, count in stats.blocks_by_kind.items()]
        yield self._gauge(
            "aptjax:blocks",
            "Blocks of the pool: in use by kind, free ones with cached prefixes, other free ones.",
            [*blocks, (("cached",), stats.cached_blocks), (("free",), stats.free_blocks - stats.cached_blocks)],
            ("kind",),
        )
        if stats.host_blocks:
            yield self._gauge(
                "aptjax:host_blocks",
                "Blocks of host memory for cached prefixes: in use, and free.",
                [(("used",), stats.used_host_blocks), (("free",), stats.host_blocks - stats.used_host_blocks)],
                ("state",),
            )
        if parts.config.cache.prefix_cache_dir is not None:
            yield self._gauge(
                "aptjax:disk_used_bytes",
                "Bytes of all files of cached prefixes, as far as this server knows.",
                [((), stats.disk_bytes)],
            )
        if stats.expected_wait_s is not None:
            yield self._gauge(
                "aptjax:expected_wait_seconds",
                "How long a new request with objectives would wait for others, by the cost model.",
                [((), stats.expected_wait_s)],
            )
        served = [((phase,), error) for phase, error in sorted(stats.cost_errors.items())]
        if served:
            yield self._gauge(
                "aptjax:cost_model_serving_error_ratio",
                "Mean relative error of the step times that the scheduler reckons with, over the last steps served.",
                served,
                ("phase",),
            )
        model = parts.cost_model
        if model is not None:
            errors = [
                (("prefill",), model.prefill_quality.mean_relative_error),
                (("decode",), model.decode_quality.mean_relative_error),
            ]
            yield self._gauge(
                "aptjax:cost_model_error_ratio",
                "Mean relative error of predicted step times, on the calibration's points held back.",
                errors,
                ("phase",),
            )

    def _counters(self) -> Iterable[Metric]:
        stats, sums = self._stats, self._sums
        for name, text, value in (
            ("vllm:num_preemptions", "Times that a request's cache was taken away.", stats.num_preemptions),
            ("vllm:prompt_tokens", "Prompt tokens of requests that have delivered a token.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens delivered.", stats.generation_tokens),
            (
                "vllm:prefix_cache_queries",
                "Tokens of requests that were scheduled for the first time.",
                stats.prefix_cache_queries,
            ),
            ("vllm:prefix_cache_hits", "Those of them whose cache was there.", stats.prefix_cache_hits),
            (
                "aptjax:cache_conversions",
                "Times that a running request went from layer inputs to keys and values.",
                stats.num_conversions,
            ),
            (
                "aptjax:recomputed_tokens",
                "Positions computed again after preemptions and failures.",
                stats.recomputed_tokens,
            ),
            (
                "aptjax:scheduler_fallbacks",
                "Iterations that fcfs scheduled, because the policy raised or its plan broke a promise.",
                stats.fallback_iterations,
            ),
            (
                "aptjax:requests_refused",
                "Requests that the engine did not take: queue full, too large, id in use.",
                stats.num_rejected,
            ),
            (
                "aptjax:memory_rejections",
                "Calls rejected because the process used too much memory.",
                self._rejected_by_memory,
            ),
            (
                "aptjax:requests_doubtful",
                "Requests admitted although their TTFT SLO looked out of reach.",
                stats.num_slo_at_risk_admitted,
            ),
        ):
            yield self._counter(name, text, [((), value)])
        yield self._counter(
            "aptjax:recomputed_tokens_by_cause",
            "Positions computed again, by how their cache was lost.",
            [((cause,), value) for cause, value in stats.recomputed_by_cause.items()],
            ("cause",),
        )
        for name, text, total, best_effort in (
            (
                "aptjax:class_prompt_tokens",
                "Prompt tokens of requests that have delivered a token, by class.",
                stats.prompt_tokens,
                stats.best_effort_prompt_tokens,
            ),
            (
                "aptjax:class_generation_tokens",
                "Tokens delivered, by class.",
                stats.generation_tokens,
                stats.best_effort_generation_tokens,
            ),
        ):
            yield self._counter(name, text, [(("rt",), total - best_effort), (("be",), best_effort)], ("class",))
        hits = [(("device",), stats.device_hit_tokens)]
        hits += [(("host",), stats.host_hit_tokens)] if stats.host_blocks else []
        yield self._counter(
            "aptjax:cache_hit_tokens",
            "Positions of new and of preempted requests whose cache was there, by where.",
            hits,
            ("tier",),
        )
        if stats.host_blocks:
            yield from self._host_memory()
        if self._parts.config.cache.prefix_cache_dir is not None:
            yield from self._disk()
        ends = [((reason,), stats.finished.get(reason, 0)) for reason in _REASONS]
        yield self._counter("vllm:request_success", "Ended requests.", ends, ("finished_reason",))
        pairs = [(o, c) for o in _OBJECTIVES for c in _CLASSES]
        for name, text, counter in (
            ("aptjax:slo_attained", "Requests that met this objective of theirs.", sums.attained),
            ("aptjax:slo_missed", "Requests that did not, the refused and broken off ones among them.", sums.missed),
        ):
            yield self._counter(name, text, [(pair, counter[pair]) for pair in pairs], ("slo", "class"))
        switches = list(stats.kind_switches.items())
        yield self._counter(
            "aptjax:cache_kind_switch",
            "Times that a request came back with another kind of cache.",
            switches,
            ("from", "to"),
        )
        actions = {
            **dict.fromkeys(("prefill", "decode", "mixed"), 0),
            **stats.iterations,
            "preempt": stats.num_preemptions,
            "defer": stats.num_deferred_requests,
        }
        yield self._counter(
            "aptjax:scheduler_decision",
            "Steps by type, and requests preempted or put off.",
            [((action,), count) for action, count in actions.items()],
            ("action",),
        )
        yield self._counter(
            "aptjax:compilations",
            "Programs compiled after warm-up; anything but 0 is a fault.",
            [(("serving",), stats.compilations)],
            ("phase",),
        )

    def _host_memory(self) -> Iterable[Metric]:
        stats = self._stats
        moved = [(("save",), stats.saved_bytes), (("load",), stats.loaded_bytes)]
        yield self._counter("aptjax:host_bytes", "Bytes copied to host memory and back.", moved, ("direction",))
        blocks = [(("save",), stats.saved_blocks), (("load",), stats.loaded_blocks)]
        yield self._counter(
            "aptjax:host_moved_blocks", "Whole blocks copied to host memory and back.", blocks, ("direction",)
        )
        slots = [(("save",), stats.saved_slots), (("load",), stats.loaded_slots)]
        yield self._counter(
            "aptjax:host_moved_slots",
            "Positions in shared blocks copied before another request overwrote them, and back.",
            slots,
            ("direction",),
        )
        yield self._counter(
            "aptjax:host_hit_tokens",
            "Positions copied from host memory in place of being computed.",
            [((), stats.host_hit_tokens)],
        )
        ways = [((way,), stats.restores.get(way, 0)) for way in RESTORES]
        yield self._counter(
            "aptjax:restores",
            "Requests that found cache in host memory alone: copied as keys and values or as layer inputs, or computed again "
            "because that took less time.",
            ways,
            ("way",),
        )
        yield self._counter(
            "aptjax:host_lost_groups",
            "Groups of blocks lost in host memory, by a failed copy or a wrong checksum.",
            [((), stats.num_lost_groups)],
        )

    def _disk(self) -> Iterable[Metric]:
        stats = self._stats
        moved = [(("read",), stats.disk_read_bytes), (("write",), stats.disk_written_bytes)]
        yield self._counter("aptjax:disk_bytes", "Bytes of cached prefixes read and written.", moved, ("direction",))
        yield self._counter(
            "aptjax:disk_hit_tokens",
            "Positions read from disk for requests that waited for them.",
            [((), stats.disk_hit_tokens)],
        )
        yield self._counter(
            "aptjax:disk_dropped_files",
            "Files of cached prefixes removed because they were damaged, or not of this model.",
            [((), stats.num_dropped_files)],
        )
        yield self._counter(
            "aptjax:disk_unwritten_groups",
            "Groups of blocks that were not written, as the disk failed, was full or too slow.",
            [((), stats.num_unwritten_groups)],
        )

    def _histograms(self) -> Iterable[Metric]:
        stats, sums = self._stats, self._sums
        for name, text, values in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", sums.ttft_s.all),
            ("vllm:inter_token_latency_seconds", "Gaps between the tokens of a request.", sums.inter_token_s.all),
            (
                "vllm:e2e_request_latency_seconds",
                "Arrival to end, of requests that ended with stop or length.",
                sums.latency_s,
            ),
            (
                "vllm:request_queue_time_seconds",
                "Arrival to first step, of requests that ended with stop or length.",
                sums.queue_s.all,
            ),
            ("aptjax:class_time_to_first_token_seconds", "Arrival to first token, by class.", sums.ttft_s),
            (
                "aptjax:class_inter_token_latency_seconds",
                "Gaps between the tokens of a request, by class.",
                sums.inter_token_s,
            ),
            (
                "aptjax:class_queue_time_seconds",
                "Arrival to first step, of requests that ended with stop or length, by class.",
                sums.queue_s,
            ),
            (
                "vllm:request_prompt_tokens",
                "Prompt tokens per request, of requests that ended with stop or length.",
                sums.prompt_tokens,
            ),
            (
                "vllm:request_generation_tokens",
                "Output tokens per request, of requests that ended with stop or length.",
                sums.generation_tokens,
            ),
            (
                "vllm:request_prefill_time_seconds",
                "First step to first token, of requests that ended with stop or length.",
                sums.prefill_s,
            ),
            (
                "vllm:request_decode_time_seconds",
                "First to last token, of requests that ended with stop or length.",
                sums.decode_s,
            ),
            (
                "vllm:request_inference_time_seconds",
                "First step to last token, of requests that ended with stop or length.",
                sums.inference_s,
            ),
            (
                "vllm:request_params_max_tokens",
                "max_tokens of requests that ended with stop or length.",
                sums.params_max_tokens,
            ),
            (
                "vllm:request_params_n",
                "n of calls, once for each of their prompts whose first output ended with stop or length.",
                sums.params_n,
            ),
            ("vllm:iteration_tokens_total", "Tokens per step.", stats.step_tokens),
            ("aptjax:scheduler_step_seconds", "The policy's time for a decision.", stats.schedule_s),
        ):
            yield self._histogram(name, text, values)
