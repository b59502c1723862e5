"""Limits the batch requests in the engine, to keep slots free for interactive requests and to keep steps short."""

import collections
import math

from apt_jax.sched import StepCosts

MEMORY_S = 15.0
"""Seconds for which an interactive request still counts after it ends, because another is likely to follow."""
KEPT_SHARE = 0.9
"""Fraction of the full throughput (tokens per second) that short steps must keep."""
_LEAST_SHARE = 8
"""Divisor: `short_step_rows` is at least 1/8 of the slots, because step costs exclude the host's work per step."""


class FeedWindow:
    """Decides how many batch requests may use the slots of a step that interactive requests leave free.

    * Without interactive requests, batch requests may use all slots.
    * With interactive requests, as many slots are left free as their peak number in the last `MEMORY_S` seconds, plus a
      few, so that the next interactive request finds a free slot under every policy. At least one slot is for batches.
    * The first token of a new request waits for the running step, so steps are also kept short while there are
      interactive requests: the number of batch requests is limited to the smallest number of rows that reaches
      `KEPT_SHARE` of the full throughput according to the step costs. This is most of the slots if a step with few rows
      takes nearly as long as one with many, and few slots if the time grows with each row, as for small models on CPUs.
    * No batch request is added while an interactive request may be waiting for a slot.

    Args:
        places: number of slots, the maximum number of requests in one step.
        most: maximum number of batch requests at once.
        costs: measured step costs; None if they are not known.
    """

    def __init__(self, places: int, most: int, costs: StepCosts | None = None) -> None:
        self._places, self._most = places, most
        self._short = short_step_rows(places, costs)
        self._spare = max(1, places // 16)
        self._peaks: collections.deque[tuple[float, int]] = collections.deque()
        """(time, number of interactive requests), in descending order of number; the first is the peak of the last
        `MEMORY_S` seconds."""

    def room(self, now_s: float, num_interactive: int, num_batch: int) -> int:
        """Return the number of batch requests that may be added.

        Args:
            now_s: time in seconds on any monotonic clock.
            num_interactive: number of running and waiting requests in the engine that do not belong to a batch.
            num_batch: number of batch requests in the engine.
        """
        peaks = self._peaks
        while peaks and now_s - peaks[0][0] > MEMORY_S:
            peaks.popleft()
        while peaks and peaks[-1][1] <= num_interactive:
            peaks.pop()
        peaks.append((now_s, num_interactive))
        if num_interactive + num_batch >= self._places:  # an interactive request may be waiting
            return 0
        peak = peaks[0][1]
        left = min(self._places - peak - self._spare, self._short) if peak else self._places
        return max(0, min(max(left, 1), self._most) - num_batch)


def short_step_rows(places: int, costs: StepCosts | None) -> int:
    """Return the smallest number of rows at which a decode step reaches `KEPT_SHARE` of a full step's throughput.

    The result is at least 1/8 of the slots; if the costs are not known, a quarter of the slots.
    """
    least = max(1, places // _LEAST_SHARE)
    if costs is None or costs.decode_base_s + costs.decode_per_request_s <= 0:
        return max(least, places // 4)
    base_s, row_s = max(costs.decode_base_s, 0.0), max(costs.decode_per_request_s, 0.0)
    wanted = KEPT_SHARE * places / (base_s + places * row_s)  # rows per second
    left = 1 - wanted * row_s
    rows = math.ceil(wanted * base_s / left) if left > 0 else places
    return min(max(rows, least), places)
