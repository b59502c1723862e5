"""Prometheus metrics of batches."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from serve.batches.records import OPEN, STATUSES
from serve.batches.runner import OUTCOMES, BatchCounters
from serve.observability.metric_families import Families


def batch_metrics(families: Families, counters: BatchCounters) -> Iterator[Metric]:
    """Yield counters and gauges of batches and their requests."""
    open_ones = [((status,), counters.open[status]) for status in OPEN]
    yield families.gauge("aptjax:batches", "Batches that have not ended, by status.", open_ones, ("status",))
    ends = [((status,), counters.ended[status]) for status in STATUSES if status not in OPEN]
    yield families.counter("aptjax:batches_ended", "Batches that have ended, by final status.", ends, ("status",))
    running = [((), counters.num_in_flight)]
    text = "Batch requests that are being read, waiting or running."
    yield families.gauge("aptjax:batch_requests_running", text, running)
    outcomes = [((outcome,), counters.requests[outcome]) for outcome in OUTCOMES]
    text = "Batch requests whose outcome is on disk."
    yield families.counter("aptjax:batch_requests", text, outcomes, ("outcome",))
