"""Finds sessions whose prompts begin differently in each call, so that the cached prefix is not found.

Agents put lines that change into the beginning of their prompts, such as dates, ids and counters. Everything behind such
a line is computed again, although it is the same text:

    last prompt   A A A b C C C C C C
    this prompt   A A A d d C C C C C C E E      parts at 3; 6 tokens are computed again

The text behind may be shifted, so windows of `_WINDOW` tokens of the last prompt are looked up among those at all
positions of this one. Only calls that name their session and find less than half of its last prompt are compared, and
only the first `MAX_TOKENS` tokens of prompts, which bounds time and memory: 64 KiB for each of `MAX_SESSIONS` sessions.
"""

import collections
import dataclasses
import logging

import numpy as np
from numpy.typing import NDArray

from apt_jax.engine.counters import EngineCounters
from apt_jax.request import EngineRequest
from apt_jax.utils.clock import Clock

logger = logging.getLogger("apt_jax.engine")

MAX_SESSIONS = 512
MAX_TOKENS = 16_384
MIN_TOKENS = 64
"""Minimum number of tokens computed again that count."""
LOG_PERIOD_S = 3600.0
"""Seconds between two lines of the log about one tenant and kind of work."""
MAX_LOGGED = 64
"""Maximum number of lines in `LOG_PERIOD_S`."""
_WINDOW = 16
_WEIGHTS = np.random.default_rng(0).integers(0, 2**63, _WINDOW, np.uint64) * np.uint64(2) + np.uint64(1)
_MAX_SHORT = 8
"""Number of successive calls with much shorter prompts, such as calls of subagents, after which the last is kept."""


@dataclasses.dataclass
class _Prompt:
    begin: NDArray[np.int32]
    num_tokens: int
    num_short: int = 0


class ChangedPrefixes:
    """Compares the prompts of named sessions with their last ones.

    Args:
        clock: the current time.
        counters: `changed_prefix_tokens` is increased.
    """

    def __init__(self, clock: Clock, counters: EngineCounters) -> None:
        self._clock, self._counters = clock, counters
        self._last: collections.OrderedDict[tuple[str | None, str], _Prompt] = collections.OrderedDict()
        self._logged_s: collections.OrderedDict[tuple[str | None, str], float] = collections.OrderedDict()

    def arrived(self, request: EngineRequest, num_found: int) -> None:
        """Compare a new request, of whose prompt `num_found` tokens are cached, with its session's last prompt."""
        if request.session_id is None:
            return
        key, prompt = (request.tenant, request.session_id), request.prompt_token_ids
        last = self._last.pop(key, None)
        if last is not None:
            if 2 * num_found < last.num_tokens:
                self._compare(request, last)
            last.num_short += 1
        if last is None or 2 * prompt.size >= last.num_tokens or last.num_short > _MAX_SHORT:
            last = _Prompt(prompt[:MAX_TOKENS].copy(), int(prompt.size))
        self._last[key] = last
        if len(self._last) > MAX_SESSIONS:
            self._last.popitem(last=False)

    def forget(self, tenant: str | None, session_id: str) -> None:
        """Forget the last prompt of a session."""
        self._last.pop((tenant, session_id), None)

    def _compare(self, request: EngineRequest, last: _Prompt) -> None:
        prompt = request.prompt_token_ids
        part, share = parting(last.begin, prompt[: MAX_TOKENS + MAX_TOKENS // 16])
        num_lost = round(share * min(last.num_tokens - part, prompt.size - part))
        if share < 0.5 or num_lost < MIN_TOKENS:
            return
        self._counters.changed_prefix_tokens += num_lost
        about, now_s = (request.tenant, request.work), self._clock.now_s()
        while self._logged_s and next(iter(self._logged_s.values())) <= now_s - LOG_PERIOD_S:
            self._logged_s.popitem(last=False)
        if about in self._logged_s or len(self._logged_s) >= MAX_LOGGED:
            return
        self._logged_s[about] = now_s
        logger.warning(
            "prompts of one session%s part at token %d: %d of %d tokens (%.0f %%) "
            "are computed again although they equal the last prompt's; keep the beginning the same, and put what changes "
            "(dates, ids) at the end",
            "" if request.tenant is None else f" of tenant {request.tenant}",
            part,
            num_lost,
            prompt.size,
            100 * num_lost / prompt.size,
        )


def parting(last: NDArray[np.int32], prompt: NDArray[np.int32]) -> tuple[int, float]:
    """Return the first position at which two prompts differ, and the share of `last` from there that `prompt` has too,
    at any later position; 0 if the difference is only that one ends."""
    num = min(last.size, prompt.size)
    differs = last[:num] != prompt[:num]
    part = int(differs.argmax()) if differs.any() else num
    rest = last[part:]
    if part == num or rest.size < _WINDOW or prompt.size - part < _WINDOW:
        return part, 0.0
    wanted, windows = np.unique(_hashes(rest)[::_WINDOW]), _hashes(prompt[part:])
    at = np.minimum(np.searchsorted(wanted, windows), wanted.size - 1)
    return part, np.unique(at[wanted[at] == windows]).size / wanted.size


def _hashes(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Return the (n - _WINDOW + 1,) hashes of the windows of `tokens`."""
    return np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), _WINDOW) @ _WEIGHTS
