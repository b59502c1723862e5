"""The value of running a request now (Apt-Serve Eq. 5, 6 and 8), with the SLO-aware fallback (§4.2, §6.6)."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.step_packer import allowed_kinds
from apt_jax.sched.view import SchedulerView

NEAR_ZERO = 1e-9
"""Value in seconds of a request that has violated its objective (the near-zero constant of §4.2). It is smaller per
block than any other value, but not zero, so the request still runs if blocks are left."""

SHORTEST_PENDING_S = 1e-6
"""Minimum pending time in seconds; it gives a request that arrives right now a positive value."""


@dataclasses.dataclass(frozen=True, eq=False)
class PendingValue:
    """Pending times of requests; arrays of shape (n,), in the order of the given rows."""

    pending_s: NDArray[np.float64]
    """Pending time p_i of each request in seconds: since its last token or, before its first token, since its arrival
    (Apt-Serve §4.2)."""
    violated: NDArray[np.bool_]
    """True if p_i exceeds the objective of the request's current phase: `slo_ttft_s` before its first token,
    `slo_tbt_s` after it. Earlier late tokens do not count: "its tracked pending time may exceed the latency SLOs"
    (§4.2)."""

    def part(self, rows: slice) -> "PendingValue":
        """Return the pending times of a slice of the rows."""
        return PendingValue(self.pending_s[rows], self.violated[rows])


def pending_value(view: SchedulerView, rows: NDArray[np.int32]) -> PendingValue:
    """Return the pending times of `rows`, and the mask of rows that have violated an objective."""
    table = view.table
    last_s = table.last_token_s.take(rows)
    pending_s = np.maximum(view.now_s - last_s, SHORTEST_PENDING_S)
    has_token = (table.num_delivered.take(rows) > 0) | (last_s > table.arrival_s.take(rows))
    objective_s = np.where(has_token, table.slo_tbt_s.take(rows), table.slo_ttft_s.take(rows))
    return PendingValue(pending_s, pending_s > objective_s)


def check_decay(violation_decay: float) -> float:
    """Check and return `violation_decay`, the factor on the values of violated requests.

    Raises:
        ValueError: it does not lie in [0, 1].
    """
    if not 0 <= violation_decay <= 1:
        raise ValueError(f"{violation_decay=} must lie in [0, 1]")
    return violation_decay


def option_values(
    view: SchedulerView,
    rows: NDArray[np.int32],
    urgent: PendingValue,
    num_requests: int,
    violation_decay: float = 0.0,
    only: NDArray[np.int8] | None = None,
) -> NDArray[np.float64]:
    """Return the (n, num_kinds) values `g_i^c = p_i - (|W| + |R|) * t_i^c` (Apt-Serve Eq. 5 and 8) in seconds.

    The value of a kind that is not offered to a row is -inf. `t_i^c = c0 + c1 * tokens` is the extra time of kind c:
    Eq. 6 with the affine cost that calibration measures; in the paper c0 = 0 and c1 = rho. A request that may take only
    one kind gets no penalty for it, because the penalty could only keep it from running. With `violation_decay=0` the
    value of a violated request is `NEAR_ZERO`, without a penalty that distinguishes the kinds, so it is offered a
    single kind: KV if allowed.

    Args:
        view: the scheduler's view.
        rows: (n,) rows of requests.
        urgent: pending times of these rows.
        num_requests: |W| + |R|.
        violation_decay: factor on the values of violated requests (§6.6 uses 0.4); 0: the constant of §4.2.
        only: (n,) the only kind offered to each row; None: all kinds that the row may take.
    """
    allowed = allowed_kinds(view, rows).T if only is None else np.arange(len(view.kinds))[:, None] == only
    if violation_decay <= 0 and urgent.violated.any():
        first = allowed & (np.cumsum(allowed, axis=0) == 1)
        allowed = np.where(urgent.violated, first, allowed)
    every_kind = bool(allowed.all())
    base_s = np.array([kind.extra_base_s for kind in view.kinds])
    per_token_s = np.array([kind.extra_per_token_s for kind in view.kinds])
    extra_s = np.multiply.outer(per_token_s, view.table.num_tokens.take(rows))
    extra_s += base_s[:, None]
    if not every_kind or len(allowed) == 1:
        extra_s *= allowed.sum(axis=0) > 1
    value = urgent.pending_s - num_requests * extra_s
    if urgent.violated.any():
        fallback = violation_decay * value if violation_decay > 0 else NEAR_ZERO
        value = np.where(urgent.violated, fallback, value)
    return value.T if every_kind else np.where(allowed, value, -np.inf).T
