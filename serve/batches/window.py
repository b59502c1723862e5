"""How many requests of batches may be in the engine: what interactive requests leave, in steps that are short enough."""

import collections
import math

from apt_jax.sched import StepCosts

MEMORY_S = 15.0
"""Seconds for which an interactive request counts after it has ended: the next one is expected."""
KEPT_SHARE = 0.9
"""Share of the tokens per second that short steps must keep."""
_LEAST_SHARE = 8
"""An eighth of the places in any case: a model of costs knows nothing of the host's work per step."""


class FeedWindow:
    """Requests of batches fill the places of a step that interactive requests do not use.

    * Without interactive requests they have all places: a batch alone keeps the engine full.
    * With them, as many places are left free as they used at most at once in the last seconds, and a few more: the next
      one finds a place, whatever the policy.
    * A first token waits for the step that runs when its request comes. So with interactive requests there are no more
      rows in a step than `KEPT_SHARE` of the full throughput needs, by the costs of the model: where a step takes
      nearly as long with few rows as with many, that is most of the places; where its time grows with each row, as with
      small models on CPUs, a few.
    * Nothing is added while an interactive request waits for a place.

    Args:
        places: requests that run in one step.
        most: bound of the batch requests at once.
        costs: of steps; None: not known.
    """

    def __init__(self, places: int, most: int, costs: StepCosts | None = None) -> None:
        self._places, self._most = places, most
        self._short = short_step_rows(places, costs)
        self._spare = max(1, places // 16)
        self._peaks: collections.deque[tuple[float, int]] = collections.deque()
        """(time, interactive requests), falling: the first is the peak of `MEMORY_S`."""

    def room(self, now_s: float, num_interactive: int, num_batch: int) -> int:
        """Return how many requests of batches may be added.

        Args:
            now_s: seconds of any clock that does not go back.
            num_interactive: requests in the engine, waiting ones among them, that belong to no batch.
            num_batch: those that do.
        """
        peaks = self._peaks
        while peaks and now_s - peaks[0][0] > MEMORY_S:
            peaks.popleft()
        while peaks and peaks[-1][1] <= num_interactive:
            peaks.pop()
        peaks.append((now_s, num_interactive))
        if num_interactive + num_batch >= self._places:  # somebody may wait
            return 0
        peak = peaks[0][1]
        left = min(self._places - peak - self._spare, self._short) if peak else self._places
        return max(0, min(max(left, 1), self._most) - num_batch)


def short_step_rows(places: int, costs: StepCosts | None) -> int:
    """Return the fewest rows of a decode step with `KEPT_SHARE` of the throughput of a full one."""
    least = max(1, places // _LEAST_SHARE)
    if costs is None or costs.decode_base_s + costs.decode_per_request_s <= 0:
        return max(least, places // 4)
    base_s, row_s = max(costs.decode_base_s, 0.0), max(costs.decode_per_request_s, 0.0)
    wanted = KEPT_SHARE * places / (base_s + places * row_s)  # rows per second
    left = 1 - wanted * row_s
    rows = math.ceil(wanted * base_s / left) if left > 0 else places
    return min(max(rows, least), places)
