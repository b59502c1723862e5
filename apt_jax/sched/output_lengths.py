"""Online estimate of output lengths from histograms over all requests and over requests with the same prompt prefix.

InferMax (§6) maintains "an online histogram to estimate the output lengths of requests"; it says neither which
statistic is used nor how old requests are forgotten. Here:

* A request that ends on its own reveals its length. A request that is cut off (by `max_tokens` or by its client)
  reveals only that its length is greater. The Kaplan-Meier estimate uses both: S(l) = product over lengths i <= l of
  1 - ended_i / at_risk_i, where at_risk_i counts the requests seen with i tokens or more.
* The estimate for a request is a quantile of its length L, given that it has o tokens already: the smallest l with
  P(L <= l | L > o) >= q. If too many requests were cut off to determine it, only `max_tokens` bounds the length.
* A request's weight in a histogram halves with every `half_life` later requests in it.
* Two requests have the same prompt prefix if their first 32, 128 or 512 tokens are equal and they have the same tenant
  and adapter: usually requests of one application with one system prompt. The longest prefix whose histogram holds
  enough requests longer than o tokens is used, or the histogram of all requests if there is no such prefix.

Memory is bounded: lengths above 64 share buckets, 16 per octave (an estimate is the upper end of a bucket), and the
histogram of the least recently seen prefix is replaced first.
"""

import collections
import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BEGINNINGS = (32, 128, 512)
"""Lengths in tokens of the prompt prefixes that have their own histograms."""

FEW_OUTPUTS = 20
"""Minimum weight that longer requests must have in a histogram before it gives an estimate."""

_EXACT = 64
_PER_OCTAVE = 16
_OCTAVES = 16
ENDS = np.concatenate(
    [
        np.arange(1, _EXACT + 1),
        np.floor(_EXACT * 2 ** (np.arange(1, _PER_OCTAVE * _OCTAVES + 1) / _PER_OCTAVE)).astype(np.int64),
    ]
).astype(np.int32)
"""(buckets,) greatest length of each bucket; longer outputs count in the last bucket."""

UNBOUNDED = np.iinfo(np.int32).max
"""Value of `OutputLengths.quantile` if the recorded requests do not bound the length."""

_REBASE_AT = 1e100
_TOLERANCE = 1e-9  # on probabilities, against rounding errors


class OutputLengths:
    """Histograms of output lengths; histogram 0 covers all requests.

    Args:
        num_histograms: maximum number of histograms; 1: only the histogram of all requests.
        half_life: number of later requests in a histogram after which a request's weight is halved.
    """

    def __init__(self, num_histograms: int = 256, half_life: float = 1000.0) -> None:
        if num_histograms < 1 or half_life <= 0:
            raise ValueError(f"{num_histograms=} must be at least 1 and {half_life=} positive")
        shape = num_histograms, ENDS.size
        self._ended = np.zeros(shape)
        self._cut_off = np.zeros(shape)
        self._growth = 2.0 ** (1.0 / half_life)
        self._unit = np.ones(num_histograms)
        """(histograms,) weight of the newest request; weights divided by it are relative to the newest request."""
        self._at_risk = np.zeros(shape)
        self._survival = np.ones((num_histograms, ENDS.size + 1))
        """[h, b]: share of the requests in histogram h that are longer than all buckets before b."""
        self._stale = np.zeros(num_histograms, np.bool_)
        self._num_users = [0] * num_histograms
        self._by_key: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._unused = list(range(num_histograms - 1, 0, -1))
        self._seen_once: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    # --- prompt prefixes -------------------------------------------------------------------------------------------

    def begin(self, root: bytes, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the histograms for a new request's prompt prefixes, and keep them from being replaced until `end` is
        called.

        A prefix gets a histogram the second time it is seen, if one is available, because most prefixes are seen only
        once.

        Args:
            root: key of the tenant and adapter; only prompts with equal roots share histograms.
            prompt: (n,) token ids.

        Returns:
            (len(BEGINNINGS),) histogram numbers, shortest prefix first; 0: no histogram.
        """
        numbers = [0] * len(BEGINNINGS)
        tokens = prompt[: BEGINNINGS[-1]].tobytes()
        for level, length in enumerate(BEGINNINGS):
            if prompt.size < length:
                break
            digest = hashlib.blake2b(tokens[: length * prompt.itemsize], digest_size=16, key=root[:64])
            numbers[level] = self._histogram_of(digest.digest())
            self._num_users[numbers[level]] += 1
        return np.array(numbers, np.int32)

    def end(self, numbers: NDArray[np.int32]) -> None:
        """Release the histograms that `begin` returned; they may then be replaced."""
        for number in numbers.tolist():
            self._num_users[number] -= number > 0

    def _histogram_of(self, key: bytes) -> int:
        number = self._by_key.get(key)
        if number is not None:
            self._by_key.move_to_end(key)
            return number
        if key not in self._seen_once:
            self._seen_once[key] = None
            if len(self._seen_once) > 16 * len(self._num_users):
                self._seen_once.popitem(last=False)
            return 0
        if not self._unused:
            oldest = next((k for k, n in self._by_key.items() if not self._num_users[n]), None)
            if oldest is None:
                return 0
            self._unused.append(self._by_key.pop(oldest))
        del self._seen_once[key]
        number = self._by_key[key] = self._unused.pop()
        self._ended[number] = self._cut_off[number] = self._at_risk[number] = 0.0
        self._survival[number] = self._unit[number] = 1.0
        self._stale[number] = False
        return number

    # --- learning --------------------------------------------------------------------------------------------------

    def record(self, numbers: NDArray[np.int32] | Sequence[int], length: int, *, cut_off: bool) -> None:
        """Count a request that has ended, naturally or not.

        Args:
            numbers: histograms of its prompt prefixes; the histogram of all requests is always updated.
            length: number of output tokens, at least 1.
            cut_off: True if the request did not end on its own; its natural length is then greater.
        """
        bucket = min(int(np.searchsorted(ENDS, length)), ENDS.size - 1)
        for number in {0, *map(int, numbers)}:
            unit = self._unit[number] = self._unit[number] * self._growth
            (self._cut_off if cut_off else self._ended)[number, bucket] += unit
            if unit > _REBASE_AT:
                self._ended[number] /= unit
                self._cut_off[number] /= unit
                self._unit[number] = 1.0
            self._stale[number] = True

    def _refresh(self, numbers: NDArray[np.intp]) -> None:
        """Update the Kaplan-Meier estimates of these histograms."""
        unit = self._unit[numbers, None]
        ended = self._ended[numbers] / unit
        of_each = ended + self._cut_off[numbers] / unit
        at_risk = np.cumsum(of_each[:, ::-1], axis=1)[:, ::-1]
        died = np.divide(ended, at_risk, out=np.zeros_like(ended), where=at_risk > 0)
        self._at_risk[numbers] = at_risk
        self._survival[numbers, 1:] = np.cumprod(1.0 - np.minimum(died, 1.0), axis=1)
        self._stale[numbers] = False

    # --- estimating ------------------------------------------------------------------------------------------------

    def quantile(
        self, numbers: NDArray[np.int32], num_outputs: NDArray[np.int32], quantile: float
    ) -> NDArray[np.int32]:
        """Return quantiles of the output lengths of requests, given the tokens that they already have.

        Args:
            numbers: (n, len(BEGINNINGS)) histograms of each request, as returned by `begin`.
            num_outputs: (n,) number of output tokens that each request has; it has not ended.
            quantile: probability that the length is not exceeded, above 0 and below 1.

        Returns:
            (n,) numbers of output tokens; 0: too few requests are recorded; `UNBOUNDED`: the recorded requests do not
            bound the length.
        """
        if not numbers.shape[0]:
            return np.zeros(0, np.int32)
        stale = np.flatnonzero(self._stale)
        if stale.size:
            self._refresh(stale)
        bucket = np.minimum(np.searchsorted(ENDS, num_outputs + 1), ENDS.size - 1)
        enough = self._at_risk[numbers, bucket[:, None]] >= FEW_OUTPUTS
        enough &= numbers > 0
        chosen = np.zeros(bucket.size, np.intp)
        for level in range(numbers.shape[1]):
            chosen = np.where(enough[:, level], numbers[:, level], chosen)
        before = self._survival[chosen, bucket]
        wanted = (1.0 - quantile + _TOLERANCE) * before
        reached = self._survival[chosen, 1:] <= wanted[:, None]
        lengths = np.where(reached.any(axis=1), ENDS[reached.argmax(axis=1)], UNBOUNDED)
        known = self._at_risk[chosen, bucket] >= FEW_OUTPUTS
        return np.where(known, lengths, 0).astype(np.int32)
