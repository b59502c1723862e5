"""Timelines of requests: when they waited (and why), ran, changed their cache kind, or lost their cache.

Timelines are built from the `Iteration`s that subscribers also get, and kept for the latest requests. Consecutive steps
of the same type are a single event. Times of events are in milliseconds since the arrival of the request.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any

from apt_jax.engine.events import Iteration
from apt_jax.request import EngineRequest, split_engine_id

_MOST_EVENTS = 128
_NUM_STATES = 512
_MOST_LOOKED_AT = 2048


_OF_OTHERS = ("free_blocks", "running", "waiting", "iteration")
"""Details of events that depend on the load from other requests."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Event:
    """One event, or several consecutive events of the same type."""

    event: str
    """Type: "waited", "prefill", "decode", "preempted", "switched", "converted", "deferred" (scheduled, but too few
    blocks were free), "lost" (a failed step destroyed its cache), or "ended"."""
    at_ms: float
    until_ms: float
    details: dict[str, Any]


@dataclasses.dataclass(kw_only=True)
class RequestTimeline:
    """Timeline of one request."""

    request_id: str
    """Id of the request in the engine."""
    tenant: str | None
    arrival_s: float
    prompt_len: int
    events: "collections.deque[Event]"
    num_dropped: int = 0
    """Number of events dropped; the first event is always kept."""
    begun_at: int
    """Number of the first iteration that may concern the request."""
    waits_since: int | None
    """Number of the first iteration of the current wait; None: the request runs."""
    ended: bool = False

    def as_json(self, *, others: bool = True) -> dict[str, Any]:
        """Return the timeline as JSON data.

        Args:
            others: True: include details that depend on other requests, which the client of this request may not see.
        """
        left_out = () if others else _OF_OTHERS
        return {
            "object": "request.decisions",
            "request_id": split_engine_id(self.request_id)[1],
            "num_dropped": self.num_dropped,
            "events": [
                {
                    "event": e.event,
                    "at_ms": round(e.at_ms, 3),
                    "until_ms": round(e.until_ms, 3),
                    **{name: value for name, value in e.details.items() if name not in left_out},
                }
                for e in self.events
            ],
        }

    def summary(self) -> dict[str, Any]:
        """Return a summary of the request; times are as in `as_json`, except that `arrival_s` is on the engine's
        clock."""
        last = self.events[-1] if self.events else None
        kinds = [e.details["kind"] for e in self.events if e.event in ("prefill", "decode")]
        state = "waiting" if self.waits_since is not None else "running"
        return {
            "request_id": split_engine_id(self.request_id)[1],
            "arrival_s": self.arrival_s,
            "prompt_tokens": self.prompt_len,
            "state": last.details["reason"] if last is not None and self.ended else state,
            "ended_ms": round(last.at_ms, 3) if last is not None and self.ended else None,
            "kind": kinds[-1] if kinds else None,
            "preemptions": sum(e.event == "preempted" for e in self.events),
        }


class TimelineLog:
    """Timelines of the latest requests; not thread-safe.

    Args:
        num_requests: maximum number of requests that are kept.
        max_num_seqs: maximum number of running requests.
        blocks_needed: function that returns the minimum number of blocks for a number of tokens.
    """

    def __init__(
        self,
        num_requests: int,
        *,
        max_num_seqs: int,
        blocks_needed: Callable[[int], int],
    ) -> None:
        self._num_requests, self._max_num_seqs = num_requests, max_num_seqs
        self._blocks_needed = blocks_needed
        self._requests: collections.OrderedDict[str, RequestTimeline] = collections.OrderedDict()
        self._states: collections.deque[tuple[int, int, int]] = collections.deque(maxlen=_NUM_STATES)
        """(iteration number, free blocks, running requests) of each of the last iterations."""

    def of(self, request_id: str) -> RequestTimeline | None:
        """Return the timeline of the last request with this id; None: it is not, or no longer, kept."""
        return self._requests.get(request_id)

    def last(self, tenants: Collection[str | None], count: int) -> dict[str | None, list[RequestTimeline]]:
        """Return, for each tenant, the timelines of at most `count` requests, newest first, from the last 2,048
        requests. The tenant None stands for all tenants."""
        found: dict[str | None, list[RequestTimeline]] = {tenant: [] for tenant in tenants}
        for request in itertools.islice(reversed(self._requests.values()), _MOST_LOOKED_AT):
            for tenant in {request.tenant, None}:
                theirs = found.get(tenant)
                if theirs is not None and len(theirs) < count:
                    theirs.append(request)
        return found

    def begin(self, request: EngineRequest, number: int) -> None:
        """Begin the timeline of an admitted request; `number` is the number of the next iteration."""
        self._requests.pop(request.request_id, None)
        self._requests[request.request_id] = RequestTimeline(
            request_id=request.request_id,
            tenant=request.tenant,
            arrival_s=request.arrival_s,
            prompt_len=int(request.prompt_token_ids.size),
            events=collections.deque(),
            begun_at=number,
            waits_since=number,
        )
        if len(self._requests) > self._num_requests:
            self._requests.popitem(last=False)

    def end(self, ended: EngineRequest, reason: str, now_s: float) -> None:
        """Record the end of a request; does not touch a later request with the same id."""
        request = self._requests.get(ended.request_id)
        if request is not None and request.arrival_s == ended.arrival_s:
            self._add(request, "ended", now_s, reason=reason)
            request.ended = True

    def _in(self, iteration: Iteration, request_id: str) -> RequestTimeline | None:
        """Return the timeline of a request of an iteration. None: it is not kept, ended while the step ran, or its id
        is now used by a later request."""
        request = self._requests.get(request_id)
        if request is None or request.ended or iteration.number < request.begun_at:
            return None
        return request

    def note(self, iteration: Iteration) -> None:
        """Add the events of a decision whose step has ended."""
        at_s = iteration.at_s
        for row in iteration.preempted:
            request = self._in(iteration, row.request_id)
            if request is not None:
                self._add(
                    request, "preempted", at_s, tokens=row.num_tokens, kind=row.kind,
                    free_blocks=iteration.free_blocks, running=iteration.num_running, waiting=iteration.num_waiting,
                )  # fmt: skip
                request.waits_since = iteration.number
        for switch in iteration.switched:
            request = self._in(iteration, switch.request_id)
            if request is not None:
                self._add(request, "switched", at_s, old=switch.old, new=switch.new)
        for request_id in iteration.converted:
            request = self._in(iteration, request_id)
            if request is not None:
                self._add(request, "converted", at_s, old="hidden", new="kv")
        for request_id in iteration.deferred:
            request = self._in(iteration, request_id)
            if request is not None:
                self._add(request, "deferred", at_s, iteration=iteration.number)
        if iteration.failed:
            for request_id in dict.fromkeys((*iteration.lost, *(r.request_id for r in iteration.scheduled))):
                self._lose(iteration, request_id)
        until_s = at_s + (iteration.step_s or 0.0)
        for row in () if iteration.failed else iteration.scheduled:
            request = self._in(iteration, row.request_id)
            if request is None:
                continue
            if request.waits_since is not None:
                self._add_wait(request, iteration)
            if row.decodes:
                self._extend(request, "decode", at_s, until_s, tokens=1, kind=row.kind)
            else:
                self._extend(request, "prefill", at_s, until_s, tokens=row.num_tokens, kind=row.kind, cached=row.start)
        self._states.append((iteration.number, iteration.free_blocks, iteration.num_running))

    def _lose(self, iteration: Iteration, request_id: str) -> None:
        """Add a "lost" event, only once per failure, although the step after the failed step is reported as failed
        too."""
        request = self._in(iteration, request_id)
        if request is None:
            return
        if not request.events or request.events[-1].event != "lost":
            self._add(request, "lost", iteration.at_s, iteration=iteration.number)
        request.waits_since = iteration.number + 1

    def _add_wait(self, request: RequestTimeline, iteration: Iteration) -> None:
        """Add the wait until now, and count its causes: for each iteration without the request, too few free blocks, no
        free slot, or other requests that were scheduled first. Only recent iterations are counted."""
        since, request.waits_since = request.waits_since, None
        iterations = iteration.number - (since or 0)
        if iterations <= 0:
            return
        needed = self._blocks_needed(request.prompt_len)
        counts = {"for_blocks": 0, "for_slots": 0, "behind_others": 0}
        for number, free_blocks, num_running in reversed(self._states):
            if since is None or number < since:
                break
            if free_blocks < needed:
                counts["for_blocks"] += 1
            elif num_running >= self._max_num_seqs:
                counts["for_slots"] += 1
            else:
                counts["behind_others"] += 1
        last = request.events[-1] if request.events else None
        self._add(request, "waited", iteration.at_s, iterations=iterations, **counts)
        request.events[-1].at_ms = 0.0 if last is None else last.until_ms

    def _extend(self, request: RequestTimeline, event: str, at_s: float, until_s: float, **details: Any) -> None:
        last = request.events[-1] if request.events else None
        if last is not None and last.event == event and last.details["kind"] == details["kind"]:
            last.details["tokens"] += details["tokens"]
            last.details["steps"] += 1
            last.until_ms = 1e3 * (until_s - request.arrival_s)
            return
        self._add(request, event, at_s, steps=1, **details)
        request.events[-1].until_ms = 1e3 * (until_s - request.arrival_s)

    def _add(self, request: RequestTimeline, event: str, at_s: float, **details: Any) -> None:
        at_ms = 1e3 * (at_s - request.arrival_s)
        if len(request.events) == _MOST_EVENTS:
            del request.events[1]
            request.num_dropped += 1
        request.events.append(Event(event=event, at_ms=at_ms, until_ms=at_ms, details=details))
