"""What it is worth to run a request now (Apt-Serve Eq. 5, 6 and 8), with the SLO-aware fallback (§4.2, §6.6).

When has a request "already violated its SLOs"? It attains them when its first token came in time and the 99th
percentile of its gaps between tokens is within `slo_tbt_s`. So it counts as violated

* before its first token: when it has waited longer than `slo_ttft_s`. It can never attain again.
* after a first token that was late: for ever.
* after its first token: when so many gaps were late that the P99 of its gaps so far is, the gap that is open now
  counted in (l late ones among n gaps: l > (n - 1) / 100). With fewer than a hundred gaps one late gap is enough. Later
  gaps in time can dilute it again; until then the request makes room for those that need no luck.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.policy import allowed_kinds
from apt_jax.sched.view import SchedulerView

NEAR_ZERO = 1e-6
"""Factor on the value of a violated request with `violation_decay=0`: not zero, so that it runs where there is room,
the longest pending first."""

SHORTEST_PENDING_S = 1e-6
"""Pending times are at least this: a request that arrives right now is worth running, too."""


@dataclasses.dataclass(frozen=True, eq=False)
class Urgency:
    """How urgent requests are; arrays of shape (n,), in the order of the rows that were asked for."""

    pending_s: NDArray[np.float64]
    """p_i: since the last token, or since arrival before the first one (Apt-Serve §4.2)."""
    violated: NDArray[np.bool_]
    weight: NDArray[np.float64]
    """Factor of the SLO-aware fallback: 1, or less where `violated`."""
    num_counted: int
    """|W| + |R| of Eq. 5 and 8 over these rows, violated ones left out."""

    @property
    def weighted_s(self) -> NDArray[np.float64]:
        """weight * p_i: the value of running with the KV kind, and a request's share in the urgency of its queue."""
        return self.weight * self.pending_s


def urgency(view: SchedulerView, rows: NDArray[np.int32], violation_decay: float = 0.0) -> Urgency:
    """Pending times and fallback weights of `rows`.

    Args:
        view: the state.
        rows: all waiting and running rows, for `num_counted` to be |W| + |R|.
        violation_decay: weight of violated requests; 0 means near zero (`NEAR_ZERO`).
    """
    table = view.table
    last_s = table.last_token_s.take(rows)
    pending_s = np.maximum(view.now_s - last_s, SHORTEST_PENDING_S)
    has_token = (table.num_delivered.take(rows) > 0) | (last_s > table.arrival_s.take(rows))
    num_gaps = np.maximum(table.num_outputs.take(rows), 1)  # the open one is the last of them
    num_late = table.num_late_gaps.take(rows) + (pending_s > table.slo_tbt_s.take(rows))
    late_gaps = num_late > 0.01 * (num_gaps - 1)
    waited_out = pending_s > table.slo_ttft_s.take(rows)
    violated = np.where(has_token, late_gaps, waited_out) | table.ttft_missed.take(rows)
    weight = np.where(violated, max(violation_decay, NEAR_ZERO), 1.0)
    return Urgency(pending_s, violated, weight, int(rows.size - np.count_nonzero(violated)))


def option_values(
    view: SchedulerView,
    rows: NDArray[np.int32],
    pending_s: NDArray[np.float64],
    weight: NDArray[np.float64],
    num_counted: int,
) -> NDArray[np.float64]:
    """Values (n, num_kinds): `g_i^c = weight_i * (p_i - (|W| + |R|) * t_i^c)`, -inf where the kind is not allowed.

    `t_i^c = c0 + c1 * tokens` is the extra time of kind c (Apt-Serve Eq. 6 with an affine cost; it may be negative).
    A request that has no choice of kind is not charged for it: its penalty would only keep it from running at all.
    """
    allowed = allowed_kinds(view, rows).T
    base_s = np.array([kind.extra_base_s for kind in view.kinds])
    per_token_s = np.array([kind.extra_per_token_s for kind in view.kinds])
    extra_s = np.multiply.outer(per_token_s, view.table.num_tokens.take(rows))
    extra_s += base_s[:, None]
    any_kind = bool(allowed.all())
    if not any_kind or len(allowed) == 1:
        extra_s *= allowed.sum(axis=0) > 1
    value = weight * (pending_s - num_counted * extra_s)
    return value.T if any_kind else np.where(allowed, value, -np.inf).T
