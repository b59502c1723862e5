"""OpenTelemetry traces of calls (the extra `otel`): one span per call, with child spans for each request's phases.

Spans are created from recorded times when a call has ended, so tracing adds no work per token. A library thread
sends them over OTLP/HTTP, up to 512 at a time. At most 2,048 spans are queued; if there are more, the oldest are
dropped. A slow or unreachable collector does not delay calls; the log shows when it starts to fail and when it works
again.

Attributes have vLLM's name where there is one (`gen_ai.*`), else `aptjax.*`; docs/serving.md lists them.
"""

import logging
import math
import os
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

import apt_jax
from apt_jax.errors import ConfigError, counted
from apt_jax.metrics import RequestRecord
from apt_jax.request import EngineRequest, RequestMetrics
from serve.observability.call_log import log_failure
from serve.observability.call_record import CallRecord

logger = logging.getLogger(__name__)

FLAG = "--otlp-traces-endpoint"

_PATH = "/v1/traces"
_SEND_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 3.0
_QUEUE_SPANS, _BATCH_SPANS = 2048, 512
_DELAY_MS = 1000

_Attributes = dict[str, AttributeValue]


class Tracer:
    """Creates and sends the spans. Used from one event loop only.

    Args:
        endpoint: URL of the collector; without a path, ``/v1/traces`` is appended.

    Raises:
        ConfigError: `endpoint` is not an HTTP URL.
    """

    def __init__(self, endpoint: str) -> None:
        url, where = _checked(endpoint)
        # The library would log every failed attempt; `_Exporter` logs enough.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        names = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "apt-jax"}
        self._provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _Exporter(OTLPSpanExporter(url, timeout=_SEND_TIMEOUT_S), where),
                max_queue_size=_QUEUE_SPANS,
                max_export_batch_size=_BATCH_SPANS,
                schedule_delay_millis=_DELAY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("apt_jax", apt_jax.__version__)
        self._parents = TraceContextTextMapPropagator()
        self._has_failed = False

    def send(self, record: CallRecord) -> None:
        """Queue the spans of a call that has ended; another thread sends them."""
        try:
            self._make(record)
        except Exception as error:  # tracing must not disturb calls
            if not self._has_failed:
                log_failure(logger, "making a trace (logged once)", error)
            self._has_failed = True

    def _make(self, record: CallRecord) -> None:
        span = self._tracer.start_span(
            "llm_request",
            context=self._parents.extract(dict(record.parent)),
            kind=SpanKind.SERVER,
            start_time=record.started_unix_ns,
        )
        if span.is_recording():  # else the client's trace is not sampled
            span.set_attributes(_of_call(record))
            if record.outcome in ("rejected", "failed"):
                span.set_attribute("error.type", record.code or record.reason)
                span.set_status(StatusCode.ERROR, record.code or record.reason)
            for index, (request, metrics) in enumerate(zip(record.requests, record.metrics, strict=True)):
                if metrics is not None:
                    self._send_request(span, record, index, request, metrics)
        span.end(record.ended_unix_ns)

    def _send_request(
        self,
        parent: Span,
        record: CallRecord,
        index: int,
        request: EngineRequest,
        metrics: RequestMetrics,
    ) -> None:
        attributes = _of_request(index, request, metrics)
        context = set_span_in_context(parent)
        ended_s = record.ended_engine_s if metrics.finished_s is None else metrics.finished_s
        first_token_s = metrics.token_times_s[0] if metrics.token_times_s else None
        moments = (
            ("queue", metrics.arrival_s),
            ("prefill", metrics.first_scheduled_s),
            ("decode", first_token_s),
        )
        begun = [(name, at_s) for name, at_s in moments if at_s is not None]
        ends = [*(at_s for _, at_s in begun[1:]), max(ended_s, begun[-1][1])]
        for (name, from_s), until_s in zip(begun, ends, strict=True):
            span = self._tracer.start_span(
                name, context=context, start_time=record.unix_ns(from_s), attributes=attributes
            )
            span.end(record.unix_ns(until_s))

    def close(self) -> None:
        """Send the queued spans, for at most three seconds."""
        # The library itself would wait for half a minute.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


class _Exporter(SpanExporter):
    """Wraps an exporter, and logs when it starts to fail and when it works again.

    Args:
        exporter: sends the spans.
        where: host and port of the collector, for the log.
    """

    def __init__(self, exporter: SpanExporter, where: str) -> None:
        self._exporter, self._where = exporter, where
        self._num_lost = 0
        """Number of spans lost since the last success."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                logger.warning("%s accepts traces again; lost: %s", self._where, counted(self._num_lost, "span"))
            self._num_lost = 0
        else:
            if not self._num_lost:
                logger.warning("%s does not accept traces; they are lost until it does (%s)", self._where, FLAG)
            self._num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        """See `SpanExporter`."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See `SpanExporter`."""
        return self._exporter.force_flush(timeout_millis)


def _checked(endpoint: str) -> tuple[str, str]:
    """Return the complete URL, and its host and port for the log; the other parts of the URL may be secret."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"the trace collector must have an address such as http://127.0.0.1:4318 ({FLAG})")
    if parts.path in ("", "/"):
        parts = parts._replace(path=_PATH)
    return parts.geturl(), host if port is None else f"{host}:{port}"


def _of_call(record: CallRecord) -> _Attributes:
    known: dict[str, AttributeValue | None] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.response.model": record.model,
        "gen_ai.latency.e2e": record.duration_s,
        "gen_ai.latency.time_in_queue": record.queue_s,
        "gen_ai.latency.time_to_first_token": record.ttft_s,
        "aptjax.protocol": record.protocol,
        "aptjax.method": record.method,
        "aptjax.tenant": record.tenant,
        "aptjax.reason": record.reason,
    }
    if record.requests:
        params = record.requests[0].params
        known |= {
            "gen_ai.request.n": len(record.requests),
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.num_sequences": len(record.requests),
            "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": record.num_output_tokens,
        }
        known |= _of_slos(record)
    metrics = [m for m in record.metrics if m is not None]
    if metrics:
        kinds = {m.cache_kind for m in metrics if m.cache_kind is not None}
        prefill_s, decode_s = _model_times_s(metrics[0])
        known |= {
            "gen_ai.latency.time_in_model_prefill": prefill_s if len(metrics) == 1 else None,
            "gen_ai.latency.time_in_model_decode": decode_s if len(metrics) == 1 else None,
            "aptjax.cache.kind": ",".join(sorted(kinds)) or None,
            "aptjax.cache.blocks": record.num_blocks,
            "aptjax.cache.cached_tokens": sum(m.num_cached_tokens for m in metrics),
            "aptjax.preemptions": sum(m.num_preemptions for m in metrics),
            "aptjax.kind_switches": sum(m.num_kind_switches for m in metrics),
            "aptjax.conversions": sum(m.num_conversions for m in metrics),
            "aptjax.recomputed_tokens": sum(m.recomputed_tokens for m in metrics),
        }
    return {name: value for name, value in known.items() if value is not None}


def _of_slos(record: CallRecord) -> dict[str, AttributeValue | None]:
    """Return attributes for the call's SLOs and whether all its requests attained them."""
    slo = record.requests[0].slo
    known: dict[str, AttributeValue | None] = {"aptjax.slo.class": record.requests[0].slo_class}
    ok = record.outcome == "succeeded" and "abort" not in record.reason
    records = [
        RequestRecord.from_metrics(m, ok=ok) if m is not None else RequestRecord(arrival_s=0.0, ok=False)
        for m in record.metrics
    ]  # fmt: skip
    if math.isfinite(slo.ttft_s):
        known["aptjax.slo.ttft_ms"] = 1e3 * slo.ttft_s
        known["aptjax.slo.ttft_attained"] = all(r.ttft_attained for r in records)
    if math.isfinite(slo.tbt_s):
        known["aptjax.slo.tbt_ms"] = 1e3 * slo.tbt_s
        known["aptjax.slo.tbt_attained"] = all(r.tbt_attained for r in records)
    if math.isfinite(slo.e2e_s):
        known["aptjax.slo.e2e_ms"] = 1e3 * slo.e2e_s
        known["aptjax.slo.e2e_attained"] = all(r.e2e_attained for r in records)
    return known


def _of_request(index: int, request: EngineRequest, metrics: RequestMetrics) -> _Attributes:
    known: dict[str, AttributeValue | None] = {
        "aptjax.index": index,
        "gen_ai.request.id": request.label,
        "gen_ai.usage.prompt_tokens": int(request.prompt_token_ids.size),
        "gen_ai.usage.completion_tokens": len(metrics.token_times_s),
        "aptjax.cache.kind": metrics.cache_kind,
        "aptjax.cache.blocks": metrics.num_blocks,
        "aptjax.cache.cached_tokens": metrics.num_cached_tokens,
        "aptjax.preemptions": metrics.num_preemptions,
        "aptjax.kind_switches": metrics.num_kind_switches,
        "aptjax.conversions": metrics.num_conversions,
        "aptjax.recomputed_tokens": metrics.recomputed_tokens,
    }
    return {name: value for name, value in known.items() if value is not None}


def _model_times_s(metrics: RequestMetrics) -> tuple[float | None, float | None]:
    """Return the seconds from first step to first token, and from first to last token; None: not known."""
    times_s = metrics.token_times_s
    if not times_s or metrics.first_scheduled_s is None:
        return None, None
    return times_s[0] - metrics.first_scheduled_s, times_s[-1] - times_s[0]
