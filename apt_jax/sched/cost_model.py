"""Iteration time as a linear model of what is in a batch (DESIGN.md §7; InferMax §3.2, BROS §4.1).

    prefill = base + a1 * tokens + a2 * sum(c^2 + 2 m c)                      c chunk, m cached prefix
    decode  = base + a3 * KV tokens + a4 * hidden tokens + a5 * KV requests + a6 * hidden requests

Fitted by non-negative least squares on relative errors, a phase at a time. What a hidden request costs over a KV one,
t = c0 + c1 * tokens (Apt-Serve Eq. 6 made affine), is then c0 = a6 - a5 and c1 = a4 - a3: either may be negative.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.view import HIDDEN, KV, KindSpec, StepCosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPoint:
    """One measured prefill step."""

    chunk_lens: Sequence[int]
    prefix_lens: Sequence[int]
    time_s: float

    def features(self) -> list[float]:
        c, m = np.asarray(self.chunk_lens, np.float64), np.asarray(self.prefix_lens, np.float64)
        return [1.0, float(c.sum()), float((c * c + 2 * m * c).sum())]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePoint:
    """One measured decode step."""

    kv_lens: Sequence[int]
    hidden_lens: Sequence[int]
    time_s: float

    def features(self) -> list[float]:
        kv, hidden = self.kv_lens, self.hidden_lens
        return [1.0, float(sum(kv)), float(sum(hidden)), float(len(kv)), float(len(hidden))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitQuality:
    """How well a phase's fit predicts points that it has not seen."""

    num_points: int
    num_held_back: int
    r2: float
    worst_relative_error: float
    mean_relative_error: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Coefficients in seconds; see the module docstring for their features."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float, float, float]
    prefill_quality: FitQuality
    decode_quality: FitQuality

    def prefill_s(self, chunk_lens: Sequence[int], prefix_lens: Sequence[int]) -> float:
        """Predicted time of a prefill step, seconds."""
        return float(
            np.dot(
                self.prefill,
                PrefillPoint(chunk_lens=chunk_lens, prefix_lens=prefix_lens, time_s=0).features(),
            )
        )

    def decode_s(self, kv_lens: Sequence[int], hidden_lens: Sequence[int]) -> float:
        """Predicted time of a decode step, seconds."""
        return float(
            np.dot(
                self.decode,
                DecodePoint(kv_lens=kv_lens, hidden_lens=hidden_lens, time_s=0).features(),
            )
        )

    def step_costs(self) -> StepCosts:
        """The part that policies weigh."""
        base, kv_token, hidden_token, kv_request, hidden_request = self.decode
        return StepCosts(
            prefill_base_s=self.prefill[0],
            prefill_per_token_s=self.prefill[1],
            prefill_per_pair_s=self.prefill[2],
            decode_base_s=base,
            decode_per_request_s=kv_request,
            decode_per_token_s=kv_token,
            decode_per_hidden_request_s=hidden_request,
            decode_per_hidden_token_s=hidden_token,
        )

    def kinds(self, offered: tuple[bool, bool]) -> tuple[KindSpec, KindSpec]:
        """Both cache kinds with their measured extra time; `offered` says which may be used."""
        _, kv_token, hidden_token, kv_request, hidden_request = self.decode
        extra = offered[KV] and offered[HIDDEN]
        return (
            KindSpec(name="kv", blocks_per_group=2, offered=offered[KV]),
            KindSpec(
                name="hidden",
                blocks_per_group=1,
                offered=offered[HIDDEN],
                extra_base_s=hidden_request - kv_request if extra else 0.0,
                extra_per_token_s=hidden_token - kv_token if extra else 0.0,
            ),
        )


def _fit(
    features: NDArray[np.float64], times: NDArray[np.float64]
) -> tuple[NDArray[np.float64], FitQuality]:
    from scipy.optimize import nnls  # heavy to import, and only a calibration needs it

    def solve(rows: NDArray[np.bool_]) -> NDArray[np.float64]:
        a = features[rows] / times[rows, None]
        scale = np.maximum(np.abs(a).max(axis=0), 1e-30)
        return nnls(a / scale, np.ones(int(rows.sum())))[0] / scale

    held = np.arange(len(times)) % 4 == 3
    if held.sum() < 2:
        held[:] = False
    seen = solve(~held)
    check = held if held.any() else ~held
    predicted = features[check] @ seen
    relative = np.abs(predicted - times[check]) / times[check]
    spread = ((times[check] - times[check].mean()) ** 2).sum()
    quality = FitQuality(
        num_points=len(times),
        num_held_back=int(held.sum()),
        r2=float(1.0 - ((predicted - times[check]) ** 2).sum() / spread) if spread > 0 else 1.0,
        worst_relative_error=float(relative.max()),
        mean_relative_error=float(relative.mean()),
    )
    return solve(np.ones(len(times), bool)), quality


def fit_cost_model(prefill: Sequence[PrefillPoint], decode: Sequence[DecodePoint]) -> CostModel:
    """Fit both phases; every fourth point is held back to state the quality, then all are used for the result.

    Raises:
        ValueError: a phase has fewer points than coefficients.
    """
    if len(prefill) < 3 or len(decode) < 5:
        raise ValueError(
            f"a cost model needs at least 3 prefill and 5 decode points, got {len(prefill)} and {len(decode)}"
        )
    p, p_quality = _fit(
        np.array([x.features() for x in prefill]), np.array([x.time_s for x in prefill])
    )
    d, d_quality = _fit(
        np.array([x.features() for x in decode]), np.array([x.time_s for x in decode])
    )
    return CostModel(
        prefill=(float(p[0]), float(p[1]), float(p[2])),
        decode=(float(d[0]), float(d[1]), float(d[2]), float(d[3]), float(d[4])),
        prefill_quality=p_quality,
        decode_quality=d_quality,
    )
