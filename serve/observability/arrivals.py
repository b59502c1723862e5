"""Recent arrivals for `apt-jax whatif`: lengths, times and which prompts begin alike, never text, tokens or names.

Nothing is recorded until an operator asks for arrivals, and recording ends a minute after the last question. A prompt is
recorded as a digest per `BLOCK_TOKENS` tokens; each digest depends on all tokens before it, on the owner of the prompt
and on a secret of this process, so that a prompt cannot be guessed from it. Sessions are numbered in order.
"""

import collections
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from apt_jax.cache.prefix_tree import extend_digests, root_digest
from apt_jax.frontend.components import EngineComponents
from apt_jax.request import EngineRequest, RequestMetrics

BLOCK_TOKENS = 64
"""Prompt tokens per digest."""
_DIGEST_BYTES = 6
"""Bytes of a recorded digest: JSON numbers of JavaScript are exact up to 53 bits."""
_MAX_REQUESTS, _MAX_DIGESTS = 8192, 1 << 20
"""Maximum numbers of requests and of digests that are kept; the oldest requests are dropped first."""
_MAX_SENT_DIGESTS = 1 << 17
"""Number of digests after which an answer ends; the next question gets the rest."""
_MAX_SESSIONS = 65536
_ACTIVE_S = 60.0


class ArrivalLog:
    """A bounded log of ended requests.

    Args:
        clock: returns the time in seconds on a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._salt = os.urandom(16)
        self._until_s = float("-inf")
        self._number = self._num_digests = 0
        self._kept: collections.deque[dict[str, Any]] = collections.deque()
        self._sessions: collections.OrderedDict[tuple[str, str], int] = collections.OrderedDict()
        self._num_sessions = 0

    def add(self, request: EngineRequest, metrics: RequestMetrics) -> None:
        """Record a request that has ended, if arrivals are recorded now. Called in the engine's thread."""
        if self._clock() > self._until_s:
            return
        root = root_digest(self._salt, (request.tenant or "").encode())
        for part in (request.adapter, request.cache_salt):
            root = root_digest(root, (part or "").encode())
        digests: list[bytes] = []
        extend_digests(digests, root, request.prompt_token_ids, BLOCK_TOKENS)
        times_s = metrics.token_times_s
        entry = {
            "arrival_s": metrics.arrival_s,
            "prompt_tokens": int(request.prompt_token_ids.size),
            "output_tokens": len(times_s),
            "class": request.slo_class,
            "hash_ids": [int.from_bytes(digest[:_DIGEST_BYTES]) for digest in digests],
            "ttft_s": metrics.ttft_s,
            "tbt_s": metrics.tbt_s,
            "e2e_s": metrics.e2e_s,
        }
        with self._lock:
            self._number += 1
            session = None
            if request.session_id is not None:
                session = self._session(request.tenant or "", request.session_id)
            self._kept.append({"number": self._number, "session": session, **entry})
            self._num_digests += len(digests)
            while len(self._kept) > _MAX_REQUESTS or (self._num_digests > _MAX_DIGESTS and len(self._kept) > 1):
                self._num_digests -= len(self._kept.popleft()["hash_ids"])

    def _session(self, tenant: str, name: str) -> int:
        key = (tenant, name)
        if key not in self._sessions:
            self._num_sessions += 1
            self._sessions[key] = self._num_sessions
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(key)
        return self._sessions[key]

    def read(self, after: int | None) -> dict[str, Any]:
        """Return the requests that ended after the request of number `after`, and record for another minute.

        Args:
            after: number of the last request that is known; None: return no requests.

        Returns:
            `number` to ask after next, the `requests`, and the number of requests that are `lost` because they had been
            dropped before this question.
        """
        with self._lock:
            if self._clock() > self._until_s:  # earlier requests belong to an earlier recording
                self._kept.clear()
                self._num_digests = 0
            self._until_s = self._clock() + _ACTIVE_S
            if after is None:
                return {"number": self._number, "requests": [], "lost": 0}
            found: list[dict[str, Any]] = []
            num_digests = 0
            for entry in self._kept:
                if entry["number"] > after and num_digests < _MAX_SENT_DIGESTS:
                    found.append(entry)
                    num_digests += len(entry["hash_ids"])
            if not found:
                return {"number": self._number, "requests": [], "lost": max(self._number - after, 0)}
            return {"number": found[-1]["number"], "requests": found, "lost": found[0]["number"] - after - 1}


def running_settings(parts: EngineComponents) -> dict[str, Any]:
    """Return the settings of a running engine that a simulation can take, named as in `SimulationConfig`, and its
    default objectives in milliseconds (None: no objective)."""
    cache, scheduler, slo = parts.config.cache, parts.config.scheduler, parts.config.scheduler.default_slo
    return {
        "model": parts.model_name,
        "policy": scheduler.policy,
        "cache": cache.mode,
        "hidden_attention": cache.hidden_attention,
        "retention": cache.retention,
        "session_order": scheduler.session_order,
        "swap_space": cache.swap_space,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "num_blocks": parts.executor.num_blocks,
        "slo_ms": {
            name: 1e3 * value if math.isfinite(value) else None
            for name, value in (("ttft", slo.ttft_s), ("tbt", slo.tbt_s), ("e2e", slo.e2e_s))
        },
    }


def description(parts: EngineComponents) -> dict[str, Any] | None:
    """Return this machine as a hardware description for the simulator, from the engine's calibration; None: the engine
    is not calibrated, or does not offer the KV kind."""
    from apt_jax.executor.calibrate import describe  # heavy to import
    from apt_jax.executor.jax_executor import JaxExecutor
    from apt_jax.sim.hardware import as_description

    executor, model = parts.executor, parts.cost_model
    if model is None or not isinstance(executor, JaxExecutor) or not executor.kinds_offered[0]:
        return None
    return as_description(describe(model, executor, parts.model_name))
