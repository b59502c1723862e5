"""Families of Prometheus metrics whose samples have the labels of the engine."""

import math
from collections.abc import Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from apt_jax.metrics import Distribution

LABELS = ("model_name", "engine")
"""Labels of every sample."""
CLASSES = ("rt", "be")


class ByClass:
    """One distribution per SLO class."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.of = {name: Distribution(bounds) for name in CLASSES}

    def copy(self) -> "ByClass":
        made = ByClass.__new__(ByClass)
        made.of = {name: values.copy() for name, values in self.of.items()}
        return made

    @property
    def all(self) -> Distribution:
        return self.of["rt"].plus(self.of["be"])


def buckets(values: Distribution) -> list[tuple[str, float]]:
    """Return the cumulative counts of a distribution, each with the label of its bucket."""
    return [("+Inf" if math.isinf(bound) else str(float(bound)), count) for bound, count in values.cumulative()]


class Families:
    """Creates the metrics of one engine.

    Args:
        model_name: value of the label `model_name`.
    """

    def __init__(self, model_name: str) -> None:
        self._values = (model_name, "0")

    def gauge(
        self,
        name: str,
        text: str,
        values: Sequence[tuple[Sequence[str], float]],
        labels: Sequence[str] = (),
    ) -> Metric:
        """Return a gauge with one value for each tuple of additional label values."""
        family = GaugeMetricFamily(name, text, labels=[*LABELS, *labels])
        for more, value in values:
            family.add_metric([*self._values, *more], value)
        return family

    def counter(
        self,
        name: str,
        text: str,
        values: Sequence[tuple[Sequence[str], float]],
        labels: Sequence[str] = (),
    ) -> Metric:
        """Return a counter with one value for each tuple of additional label values."""
        family = CounterMetricFamily(name, text, labels=[*LABELS, *labels])
        for more, value in values:
            family.add_metric([*self._values, *more], value)
        return family

    def histogram(self, name: str, text: str, values: Distribution | ByClass) -> Metric:
        """Return a histogram; for `ByClass` values it has the label `class`."""
        by_class = isinstance(values, ByClass)
        family = HistogramMetricFamily(name, text, labels=[*LABELS, "class"] if by_class else list(LABELS))
        for label, one in values.of.items() if by_class else (("", values),):
            family.add_metric([*self._values, label] if by_class else list(self._values), buckets(one), one.sum)
        return family
