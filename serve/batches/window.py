"""How many requests of batches may be in the engine: what interactive requests leave."""

import collections


class FeedWindow:
    """Requests of batches in the engine fill the places of a step that interactive requests do not use.

    Of the `places` of a step, as many are left free as interactive requests used at most at once in the last seconds,
    and a few more while there have been any: the next one finds a place, whatever the policy. Nothing is added while an
    interactive request waits for one.

    Args:
        places: requests that run in one step.
        most: bound of the batch requests at once.
    """

    def __init__(self, places: int, most: int) -> None:
        self._places, self._most = places, most
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
        left = self._places - peak - (self._spare if peak else 0)
        return max(0, min(max(left, 1), self._most) - num_batch)


MEMORY_S = 5.0
"""Seconds for which places that interactive requests used are kept free for the next ones."""
