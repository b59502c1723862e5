"""Prometheus metrics, with vLLM's name where there is one, else with the prefix `aptjax:`
(docs/serving/observability.md).

Counters and gauges are the engine's own (`EngineStats`); `ServerMetrics` adds distributions and SLO counts as the
observer of an `AsyncEngine`, for requests of every protocol. A scrape copies both between two steps, in the engine's
thread, so its values are consistent. It changes nothing.
"""

import asyncio
import collections
import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.metrics import Distribution, RequestRecord
from apt_jax.request import EngineRequest
from serve.memory_gate import MemoryGate
from serve.observability.arrivals import ArrivalLog
from serve.observability.metric_families import ByClass, Families, buckets
from serve.observability.scrape import Scrape, Sums

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


def token_buckets(most: int) -> tuple[int, ...]:
    """Return vLLM's bucket bounds for token counts: 1, 2, 5, 10, 20, ... up to `most`."""
    bounds = (m * 10**e for e in range(len(str(most))) for m in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)


@dataclasses.dataclass(kw_only=True)
class _TenantSums:
    """Distributions and counts over the requests of one tenant."""

    ttft_s: Distribution = dataclasses.field(default_factory=lambda: Distribution(TTFT_S))
    inter_token_s: Distribution = dataclasses.field(default_factory=lambda: Distribution(INTER_TOKEN_S))
    latency_s: Distribution = dataclasses.field(default_factory=lambda: Distribution(LATENCY_S))
    queue_s: Distribution = dataclasses.field(default_factory=lambda: Distribution(LATENCY_S))
    finished: "collections.Counter[str]" = dataclasses.field(default_factory=collections.Counter)
    """Number of finished requests for each finish reason."""


class ServerMetrics:
    """The metrics of one engine; the observer of its `AsyncEngine`.

    Args:
        parts: components of the engine.
        memory: gate that counts the calls rejected because memory was short; None: no limit.
    """

    def __init__(self, parts: EngineComponents, memory: MemoryGate | None = None) -> None:
        self._parts, self._memory = parts, memory
        self.arrivals = ArrivalLog()
        """Recent arrivals, for operators."""
        self.others: Callable[[Families], Iterable[Metric]] | None = None
        """Function that returns further metrics; None: no further metrics."""
        lens = token_buckets(parts.limits.max_model_len)
        self._sums = Sums(
            ttft_s=ByClass(TTFT_S),
            inter_token_s=ByClass(INTER_TOKEN_S),
            latency_s=Distribution(LATENCY_S),
            queue_s=ByClass(LATENCY_S),
            prompt_tokens=Distribution(lens),
            generation_tokens=Distribution(lens),
            prefill_s=Distribution(LATENCY_S),
            decode_s=Distribution(LATENCY_S),
            inference_s=Distribution(LATENCY_S),
            time_per_output_token_s=Distribution(INTER_TOKEN_S),
            params_max_tokens=Distribution(lens),
            params_n=Distribution(_OUTPUTS),
            attained=collections.Counter(),
            missed=collections.Counter(),
        )
        self._of_tenants: collections.defaultdict[str, _TenantSums] = collections.defaultdict(_TenantSums)

    def calibrated(self, parts: EngineComponents) -> None:
        """Use these components from now on: the engine's step costs have been measured."""
        self._parts = parts

    # Called in the engine's thread, the only thread that writes the sums.

    def ended(self, delta: OutputDelta) -> None:
        """See `apt_jax.frontend.async_engine.Observer`."""
        self.arrivals.add(delta.request, delta.metrics)
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
            if "#" not in delta.request.label:  # once per prompt
                sums.params_n.add(delta.request.num_outputs)
            if times_s:
                sums.prefill_s.add(times_s[0] - metrics.first_scheduled_s)
                sums.decode_s.add(times_s[-1] - times_s[0])
                sums.time_per_output_token_s.add((times_s[-1] - times_s[0]) / max(1, len(times_s) - 1))
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
        """Return one tenant's latency distributions and numbers of finished requests: values keyed by sample name, then
        by bucket or finish reason ("" for sums). Called in the engine's thread."""
        sums = self._of_tenants.get(tenant) or _TenantSums()
        numbers: dict[str, dict[str, float]] = {"vllm:request_success_total": dict(sums.finished)}
        for name, values in (
            ("vllm:time_to_first_token_seconds", sums.ttft_s),
            ("vllm:inter_token_latency_seconds", sums.inter_token_s),
            ("vllm:e2e_request_latency_seconds", sums.latency_s),
            ("vllm:request_queue_time_seconds", sums.queue_s),
        ):
            numbers[f"{name}_bucket"] = dict(buckets(values))
            numbers[f"{name}_sum"] = {"": values.sum}
        return numbers

    def refused(self, request: EngineRequest) -> None:
        """See `apt_jax.frontend.async_engine.Observer`."""
        record = RequestRecord(arrival_s=request.arrival_s, ok=False, slo=request.slo)
        self._count_slos(record, request)

    def _count_slos(self, record: RequestRecord, request: EngineRequest) -> None:
        """Count a request as attained or missed, for each objective that it has."""
        slo = request.slo
        has_ttft, has_tbt, has_e2e = map(math.isfinite, (slo.ttft_s, slo.tbt_s, slo.e2e_s))
        has_any = has_ttft or has_tbt or has_e2e
        for objective, has, attained in (
            ("ttft", has_ttft, record.ttft_attained),
            ("tbt", has_tbt, record.tbt_attained),
            ("e2e", has_e2e, record.e2e_attained),
            ("all", has_any, record.slo_attained),
            ("strict", has_any, record.strictly_attained),
        ):
            if has:
                counter = self._sums.attained if attained else self._sums.missed
                counter[objective, request.slo_class] += 1

    def read(self) -> Collector:
        """Return a copy of all metrics. Called in the engine's thread; any thread may use the copy."""
        rejected = 0 if self._memory is None else self._memory.num_rejected
        others = () if self.others is None else tuple(self.others(Families(self._parts.model_name)))
        return Scrape(self._parts, self._parts.engine.stats(), self._sums.copy(), rejected, others)

    async def scrape(self, engine: AsyncEngine, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition in a format that the scraper accepts, and its content type."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(await asyncio.wrap_future(engine.call(self.read)))
        ProcessCollector(registry=registry)
        return exposition(registry, accept)


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics of a registry in a format that an Accept header allows, and its content type.

    Metric names are the same in both formats. Colons in names need no escapes in either format, but prometheus_client
    0.23 and later replaces them with underscores unless UTF-8 is allowed.
    """
    wanted = [[part.strip() for part in entry.split(";")] for entry in accept.lower().split(",")]
    if not any(kind == _OPENMETRICS and "q=0" not in parameters for kind, *parameters in wanted):
        encode, content_type = choose_encoder("")
        return encode(registry), content_type
    encode, _ = choose_encoder(f"{_OPENMETRICS};version=1.0.0;escaping=allow-utf-8")
    return encode(registry), f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"
