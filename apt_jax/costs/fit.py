"""Models of step time fitted to measured steps (docs/design/scheduling.md, Cost model; InferMax §3.2, BROS §4.1).

Two models are fitted to the same points, both by non-negative least squares on relative errors:

* a linear model (`StepCosts`), for policies:
    prefill = base + a1 * tokens + a2 * sum(c^2 + 2 m c) + a3 * KV prefix + a4 * hidden prefix    c chunk, m cached prefix
    decode  = base + a5 * KV tokens + a6 * hidden tokens + a7 * KV requests + a8 * hidden requests
  A step with both phases takes the sum if it is two programs. If it is one program, each decode row adds only a token
  to the prefill part and the cost of reading its cache, as in `StepCosts` when the chunks have the larger linear part;
* a model by compiled program and tile (`ProgramCosts`), for predictions: in the simulator, and for the latency
  objectives of the demonstration. The base time of a program with few or no points is kept near the line between the
  base times of the neighbouring sizes.

The extra time of a hidden request over a KV request is t = c0 + c1 * tokens (Apt-Serve Eq. 6 made affine). Its
coefficients c0 = a8 - a7 and c1 = a6 - a5 may be negative.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV, CacheKindSpec
from apt_jax.costs.model import StepCosts
from apt_jax.costs.programs import ProgramCosts, ProgramShapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPoint:
    """One measured step, one row per request."""

    num_tokens: Sequence[int]
    """Number of tokens that each row computes."""
    start: Sequence[int]
    """Number of positions of each row cached before the step."""
    kind: Sequence[int]
    """Cache kind of each row: `KV` or `HIDDEN`."""
    time_s: float
    held_back: bool = False
    """True if the point is held out: a step like those of a server, used to judge a fit to the other points."""

    @property
    def is_prefill(self) -> bool:
        """True if at least one row is a prefill chunk."""
        return max(self.num_tokens) > 1

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int8]]:
        """Return `num_tokens`, `start` and `kind` as the arrays that `StepCosts.step_s` takes."""
        return (
            np.asarray(self.num_tokens, np.int32),
            np.asarray(self.start, np.int32),
            np.asarray(self.kind, np.int8),
        )

    def linear_features(self, one_program: bool) -> list[float]:
        """Return the features of the linear model, in the order of `_PREFILL` + `_DECODE`.

        Args:
            one_program: True if a step with both phases is one program.
        """
        num_tokens, start, kind = (a.astype(np.float64) for a in self.arrays())
        hidden, decode = kind == HIDDEN, num_tokens == 1
        features = [0.0] * (len(_PREFILL) + len(_DECODE))
        if self.is_prefill:
            c, m = num_tokens[~decode], start[~decode]
            prefixes = [float(start[~decode & rows].sum()) for rows in (~hidden, hidden)]
            tokens = num_tokens if one_program else c
            features[: len(_PREFILL)] = [1.0, float(tokens.sum()), float(c @ (c + 2 * m)), *prefixes]
        if decode.any():
            kinds = (decode & ~hidden, decode & hidden)
            read = [float((start[rows] + 1).sum()) for rows in kinds]
            alone = 0.0 if self.is_prefill and one_program else 1.0
            features[len(_PREFILL) :] = [alone, *read, *(alone * float(rows.sum()) for rows in kinds)]
        return features


_PREFILL = (
    "prefill_base_s", "prefill_per_token_s", "prefill_per_pair_s", "prefill_per_kv_prefix_s", "prefill_per_hidden_prefix_s",
)  # fmt: skip
_DECODE = (
    "decode_base_s", "decode_per_token_s", "decode_per_hidden_token_s", "decode_per_request_s", "decode_per_hidden_request_s",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitQuality:
    """Quality of a phase's fit on its held-out points, or on all its points if no point is held out."""

    num_points: int
    num_held_back: int
    r2: float
    worst_relative_error: float
    mean_relative_error: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Both fitted models and their quality."""

    costs: StepCosts
    programs: ProgramCosts
    prefill_quality: FitQuality
    """Quality of `programs` on steps with chunks."""
    decode_quality: FitQuality
    """Quality of `programs` on steps without chunks."""
    linear_prefill_quality: FitQuality
    linear_decode_quality: FitQuality

    def prefill_s(self, chunk_lens: Sequence[int], prefix_lens: Sequence[int]) -> float:
        """Return the predicted time of a step of KV chunks, in seconds."""
        point = StepPoint(num_tokens=chunk_lens, start=prefix_lens, kind=[KV] * len(chunk_lens), time_s=0.0)
        return self.programs.step_s(*point.arrays())

    def decode_s(self, kv_lens: Sequence[int], hidden_lens: Sequence[int]) -> float:
        """Return the predicted time in seconds of a decode step; `kv_lens`, `hidden_lens`: cached tokens per
        request."""
        lens = [*kv_lens, *hidden_lens]
        kind = [KV] * len(kv_lens) + [HIDDEN] * len(hidden_lens)
        point = StepPoint(num_tokens=[1] * len(lens), start=lens, kind=kind, time_s=0.0)
        return self.programs.step_s(*point.arrays())

    def step_costs(self) -> StepCosts:
        """Return the linear costs, which policies use."""
        return self.costs

    def kinds(self, offered: tuple[bool, bool], *, absorbs: bool) -> tuple[CacheKindSpec, CacheKindSpec]:
        """Return both cache kinds; if both are offered, with the measured extra decode time of the hidden kind.

        Args:
            offered: True for each kind that may be used, indexed by `KV` and `HIDDEN`.
            absorbs: True if attention reads cached layer inputs directly (`JaxExecutor.absorbs`).
        """
        c, extra = self.costs, offered[KV] and offered[HIDDEN]
        extra_base_s = c.decode_per_hidden_request_s - c.decode_per_request_s
        extra_per_token_s = c.decode_per_hidden_token_s - c.decode_per_token_s
        return (
            CacheKindSpec(name="kv", blocks_per_group=2, offered=offered[KV]),
            CacheKindSpec(
                name="hidden",
                blocks_per_group=1,
                offered=offered[HIDDEN],
                reprojected=not absorbs,
                extra_base_s=extra_base_s if extra else 0.0,
                extra_per_token_s=extra_per_token_s if extra else 0.0,
            ),
        )


_SMOOTHNESS = 2.0
"""Weight of the distance of a program's base from the line between its neighbours' bases, as a fraction of a typical
step time; a measured point has a weight of up to 4.5."""


def _smoothness(
    shapes: ProgramShapes, is_measured: NDArray[np.bool_], prefill_s: float, decode_s: float
) -> NDArray[np.float64]:
    """Return (n, num_coefficients) rows for `_solve` that keep the base times of neighbouring program sizes consistent.

    The product of a row with the coefficients is 0 if a base lies on the line between its neighbours' bases or, outside
    the range of measured sizes, if it equals the nearest measured base.

    Args:
        is_measured: (num_coefficients,) True if the coefficient occurs in a point.
        prefill_s: typical time of a step with chunks, in seconds.
        decode_s: typical time of a step without chunks, in seconds.
    """
    place, num = {program: i for i, program in enumerate(shapes.programs())}, len(shapes.feature_names())
    out = []

    def add(at: list[int], values: tuple[float, ...], weight: float) -> None:
        out.append(np.zeros(num))
        out[-1][at] = weight * np.array(values)

    for family in shapes.families():
        at, size = [place[program] for program in family], [rows + tokens for rows, tokens in family]
        weight = _SMOOTHNESS / (prefill_s if family[0][1] else decode_s)
        known = np.flatnonzero(is_measured[at])
        if not known.size:
            continue
        first, last = int(known[0]), int(known[-1])
        for i in range(len(at)):
            if not first <= i <= last:
                add([at[i], at[first if i < first else last]], (1.0, -1.0), weight)
            elif first < i < last:
                before = (size[i + 1] - size[i]) / (size[i + 1] - size[i - 1])
                add(at[i - 1 : i + 2], (-before, 1.0, before - 1.0), weight)
    return np.reshape(out, (len(out), num))


def _solve(
    features: NDArray[np.float64],
    times: NDArray[np.float64],
    rows: NDArray[np.bool_],
    smoothness: NDArray[np.float64] | None = None,
    known_s: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Return non-negative coefficients, fitted by least squares on relative errors, with little weight on outliers.

    Args:
        rows: (n,) True for the points to fit.
        smoothness: (m, num_coefficients) additional rows whose products with the coefficients should be near 0.
        known_s: (n,) part of each point's time, in seconds, that is already explained and is subtracted before the fit.
    """
    from scipy.optimize import nnls  # slow to import, and only needed for a calibration

    if not rows.any():
        return np.zeros(features.shape[1])
    a = features[rows] / times[rows, None]
    extra = np.zeros((0, a.shape[1])) if smoothness is None else smoothness
    scale = np.maximum(np.abs(np.concatenate([a, extra])).max(axis=0, initial=0.0), 1e-30)
    a, extra, found = a / scale, extra / scale, np.zeros(features.shape[1])
    left = np.ones(len(a)) if known_s is None else 1.0 - known_s[rows] / times[rows]
    weight = np.ones(len(a))
    for _ in range(5):
        target = np.concatenate([weight * left, np.zeros(len(extra))])
        found = nnls(np.concatenate([a * weight[:, None], extra]), target)[0]
        weight = 1.0 / np.sqrt(np.maximum(np.abs(a @ found - left), 0.05))
    return found / scale


def _solve_linear(
    features: NDArray[np.float64],
    times: NDArray[np.float64],
    rows: NDArray[np.bool_],
    prefill: NDArray[np.bool_],
    shapes: ProgramShapes,
) -> NDArray[np.float64]:
    """Return the coefficients of the linear model.

    If a step with both phases is one program, the decode coefficients are fitted only to steps without chunks, because
    the stepwise times of the chunk programs would distort them.
    """
    if not shapes.mixed:
        return _solve(features, times, rows)
    num = len(_PREFILL)
    decode = _solve(features[:, num:], times, rows & ~prefill)
    chunks = _solve(features[:, :num], times, rows & prefill, known_s=features[:, num:] @ decode)
    return np.concatenate([chunks, decode])


def _quality(
    found: NDArray[np.float64],
    features: NDArray[np.float64],
    times: NDArray[np.float64],
    held: NDArray[np.bool_],
    rows: NDArray[np.bool_],
) -> FitQuality:
    """Return the fit quality on the held-out rows among `rows`, or on all of `rows` if no row is held out."""
    check = held & rows if (held & rows).any() else rows
    if not check.any():
        return FitQuality(num_points=0, num_held_back=0, r2=1.0, worst_relative_error=0.0, mean_relative_error=0.0)
    predicted, measured = features[check] @ found, times[check]
    relative = np.abs(predicted - measured) / measured
    spread = ((measured - measured.mean()) ** 2).sum()
    return FitQuality(
        num_points=int(rows.sum()),
        num_held_back=int((held & rows).sum()),
        r2=float(1.0 - ((predicted - measured) ** 2).sum() / spread) if spread > 0 else 1.0,
        worst_relative_error=float(relative.max()),
        mean_relative_error=float(relative.mean()),
    )


def fit_cost_model(points: Sequence[StepPoint], shapes: ProgramShapes) -> CostModel:
    """Fit both models without the held-out points to measure their quality, then fit them to all points.

    If a phase has at least eight points and none of them is marked `held_back`, every fourth point is held out.

    Raises:
        ValueError: a phase has fewer points than the linear model has coefficients. No prefill points are needed if a
            step has at most one token, because it then never holds a chunk.
    """
    prefill = np.array([p.is_prefill for p in points], np.bool_)
    num_prefill, num_decode = int(prefill.sum()), int((~prefill).sum())
    no_chunks = num_prefill == 0 and shapes.prefill_buckets[-1] == 1
    if (num_prefill < len(_PREFILL) and not no_chunks) or num_decode < len(_DECODE):
        raise ValueError(
            f"a cost model needs at least {len(_PREFILL)} prefill and {len(_DECODE)} decode points, got {num_prefill} and {num_decode}"
        )
    times = np.array([p.time_s for p in points])
    everything = np.ones(len(points), np.bool_)
    held = np.array([p.held_back for p in points], np.bool_)
    for phase in (prefill, ~prefill):
        rows = np.flatnonzero(phase)
        if rows.size >= 8 and not held[rows].any():
            held[rows[3::4]] = True

    by_program = np.array([shapes.features(*p.arrays()) for p in points])
    typical_s = [float(np.median(times[phase])) if phase.any() else 1.0 for phase in (prefill, ~prefill)]
    smooth = _smoothness(shapes, by_program.any(axis=0), *typical_s)
    seen = _solve(by_program, times, ~held, smooth)
    qualities = [_quality(seen, by_program, times, held, phase) for phase in (prefill, ~prefill)]
    programs = ProgramCosts(shapes=shapes, coefficients=tuple(_solve(by_program, times, everything, smooth).tolist()))
    linear = np.array([p.linear_features(shapes.mixed) for p in points])
    seen = _solve_linear(linear, times, ~held, prefill, shapes)
    linear_qualities = [_quality(seen, linear, times, held, phase) for phase in (prefill, ~prefill)]
    found = _solve_linear(linear, times, everything, prefill, shapes).tolist()
    costs = StepCosts(**dict(zip((*_PREFILL, *_DECODE), found, strict=True)), one_program=shapes.mixed)
    return CostModel(
        costs=costs,
        programs=programs,
        prefill_quality=qualities[0],
        decode_quality=qualities[1],
        linear_prefill_quality=linear_qualities[0],
        linear_decode_quality=linear_qualities[1],
    )
