"""The simulation of servers finds what it is there to find: each bug below is planted by itself, and some seed must trip
over it.

`make test` runs three of them, others every day, `make test-slow` all.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest

from apt_jax.engine.admission import AdmissionController, PendingArrivals
from apt_jax.frontend.admission_gate import AdmissionGate
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.outputs import OutputAssembler, OutputDelta
from apt_jax.frontend.streams import OpenStreams, RequestStream
from serve.generate_call import CallService
from serve.http_api.calls import DisconnectWatcher, HttpCall, ResponseWriter
from serve.preprocessing import BodyBudget, FairQueue
from tests.support.serving_simulation import simulate_serving
from tests.support.serving_simulation.router import Router
from tests.support.simulation_harness import SimulationError

Bug = Callable[[], contextlib.AbstractContextManager[Any]]
BUGS: dict[str, Bug] = {}
SEEDS = [3, 4, 5, 16, 18, 32, 134, *(seed for seed in range(500) if seed not in (3, 4, 5, 16, 18, 32, 134))]
"""First those that tripped over the bugs below when this was written: most of the time goes into seeds that find
nothing."""


def bug(plant: Callable[[], contextlib.AbstractContextManager[Any]]) -> Bug:
    BUGS[plant.__name__] = plant
    return plant


def _replace(owner: type, name: str, make: Callable[[Any], Any]) -> contextlib.AbstractContextManager[Any]:
    """Replace a method by `make(method)`."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def _skip(owner: type, name: str, value: Any = None) -> contextlib.AbstractContextManager[Any]:
    """Replace a method by one that does nothing."""
    return _replace(owner, name, lambda method: lambda self, *args: value)


@bug
def cancel_lost_while_building():
    """A client that leaves before its requests are built is not noticed."""

    async def watch(self, work):
        return await work

    def on_disconnect(self, action):
        if not self.happened:
            self._action = action

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(DisconnectWatcher, "watch", watch))
    stack.enter_context(mock.patch.object(DisconnectWatcher, "on_disconnect", on_disconnect))
    return stack


@bug
def thread_lost_before_the_engine():
    """A thread of the work before the engine is not free again after a job."""
    return _skip(FairQueue, "_release")


@bug
def memory_of_bodies_is_kept():
    """Bodies are counted from their first byte on, and a few bytes stay counted."""

    def make(lease):
        @contextlib.contextmanager
        def lease_and_keep(self, owner):
            with lease(self, owner) as made:
                yield made
            self._add(owner, 1)

        return lease_and_keep

    return _replace(BodyBudget, "lease", make)


@bug
def cancel_lost_while_served():
    """The client's end does not reach the engine while nothing is written to it."""
    return _skip(DisconnectWatcher, "on_disconnect")


@bug
def deadline_ignored_in_the_queue():
    """Deadlines count for requests that have been scheduled."""

    def make(past):
        return lambda self, now_s: [s for s in past(self, now_s) if s.metrics.first_scheduled_s is not None]

    return _replace(OpenStreams, "past_deadline", make)


@bug
def deadline_a_second_late():
    """Deadlines are looked at too late."""
    return _replace(OpenStreams, "past_deadline", lambda past: lambda self, now_s: past(self, now_s - 1.0))


@bug
def queue_timeout_off():
    """Nobody looks how long requests wait."""
    return _skip(OpenStreams, "queued_too_long", [])


@bug
def drain_forgets_the_queue():
    """At the end of a drain, requests that were never scheduled get no answer."""

    def make(end_all):
        def end_all_but_the_waiting(self, error):
            for stream in list(self._streams.by_request.values()):
                if stream.metrics.first_scheduled_s is None:
                    self._streams.remove(stream)
                    self._engine.abort(stream.request.request_id)
            end_all(self, error)

        return end_all_but_the_waiting

    return _replace(AsyncEngine, "_end_all", make)


@bug
def drain_never_ends():
    """A shutdown waits for all requests, whatever time it was given."""

    def make(close):
        return lambda self, drain_s: close(self, 1e6 if self._engine.has_work else drain_s)

    return _replace(AsyncEngine, "_close", make)


@bug
def stream_ends_and_is_kept():
    """A stream that has ended is still held."""

    def make(deliver):
        def deliver_and_keep(self, output):
            with _skip(OpenStreams, "remove", True):
                deliver(self, output)

        return deliver_and_keep

    return _replace(AsyncEngine, "_deliver", make)


@bug
def stream_ends_twice():
    """The last output of a stream is pushed twice."""

    def make(push):
        def push_twice(self, stream, delta):
            push(self, stream, delta)
            if delta.finished:
                push(self, stream, dataclasses.replace(delta, token_ids=list(delta.token_ids)))

        return push_twice

    return _replace(OpenStreams, "push", make)


@bug
def unread_output_is_replaced():
    """A slow reader loses what it has not read."""

    def replace(self, later):
        for field in dataclasses.fields(OutputDelta):
            setattr(self, field.name, getattr(later, field.name))

    return mock.patch.object(OutputDelta, "merge", replace)


@bug
def readers_are_not_woken():
    """One reader of several streams that a step has changed is not told."""

    def make(wake):
        def wake_all_but_one(self):
            for streams in self._updated.values():
                if len(streams) > 2:
                    streams.pop()
            return wake(self)

        return wake_all_but_one

    return _replace(OpenStreams, "wake", make)


@bug
def deadlines_are_kept():
    """Streams that have ended are still watched for their deadline."""

    def make(remove):
        def remove_all_but_the_deadline(self, stream):
            deadline_s = self._deadlines.get(stream.request)
            removed = remove(self, stream)
            if deadline_s is not None:
                self._deadlines[stream.request] = deadline_s
            return removed

        return remove_all_but_the_deadline

    return _replace(OpenStreams, "remove", make)


@bug
def death_is_not_told():
    """Streams of an engine whose step hangs are forgotten."""

    def make(fail_all):
        def forget(self, started_s, reason):
            self._streams.clear()
            fail_all(self, started_s, reason)

        return forget

    return _replace(AsyncEngine, "_fail_all", make)


@bug
def share_counted_too_high():
    """The waiting requests of all tenants count for each one's share."""

    def make(queue_before):
        def queue(self, request, blocks):
            made = queue_before(self, request, blocks)
            return dataclasses.replace(made, num_of_tenant=made.num_waiting)

        return queue

    return _replace(AdmissionController, "_queue_before", make)


@bug
def share_counted_for_nobody():
    """Tenants have no share of the queue."""

    def make(queue_before):
        return lambda self, request, blocks: dataclasses.replace(queue_before(self, request, blocks), num_of_tenant=0)

    return _replace(AdmissionController, "_queue_before", make)


@bug
def arrivals_counted_twice():
    """Requests that arrive while a step runs count twice."""

    def make(add):
        def add_twice(self, demand):
            add(self, demand)
            add(self, demand)

        return add_twice

    return _replace(PendingArrivals, "add", make)


@bug
def early_rejections_are_not_counted():
    """`num_rejected` counts what the engine rejects, not what the gate does."""
    return _skip(AsyncEngine, "_note_rejected")


@bug
def gate_stays_open():
    """The gate goes on rejecting by the queue of a step that has ended."""
    return _skip(AdmissionGate, "end_step")


@bug
def rejected_duplicate_ends_the_first():
    """Cancelling a duplicate that was rejected aborts the request whose id it had."""

    def make(drop):
        def drop_by_id(self, stream, error=None):
            drop(self, stream, error)
            self._engine.abort(stream.request.request_id)

        return drop_by_id

    def cancel(self):
        if not self.cancelled:
            self.cancelled = True
            self._on_cancel(self)

    stack = contextlib.ExitStack()
    stack.enter_context(_replace(AsyncEngine, "_drop", make))
    stack.enter_context(mock.patch.object(RequestStream, "cancel", cancel))
    return stack


@bug
def text_is_kept():
    """The text of requests that were cancelled is never forgotten."""

    def make(delta):
        def delta_and_keep(self, output):
            text = self._texts.get(output.request)
            made = delta(self, output)
            if text is not None and output.finish_reason == "abort":
                self._texts[output.request] = text
            return made

        return delta_and_keep

    return _replace(OutputAssembler, "delta", make)


@bug
def retry_after_the_first_token():
    """The router sends a call again whose stream broke off."""
    return mock.patch.object(Router, "may_retry", lambda self, answer: not answer.done)


@bug
def done_after_an_error():
    """A stream that fails ends as if it were whole."""

    async def fail_event(self, error):
        if not self.status:
            await ResponseWriter.json(self, error.status, error.body(), dict(error.headers))
        else:
            await self.body(b"data: [DONE]\n\n", more=True)
            await self.body(b"")

    return mock.patch.object(ResponseWriter, "fail", fail_event)


@bug
def calls_are_not_uncounted():
    """A call whose client has left counts as open for ever."""

    def make(end):
        def end_and_count(self, record, engine, group):
            end(self, record, engine, group)
            self.num_open += record.outcome == "cancelled"

        return end_and_count

    return _replace(CallService, "end", make)


@bug
def watcher_is_not_closed():
    """The task that waits for the client's end goes on after the call's."""
    return _skip(HttpCall, "close")


def first_failure(plant: Bug, seeds: Iterable[int] = SEEDS) -> tuple[int, str] | None:
    """Return the first seed that trips over a bug, and its first line."""
    with plant():
        for seed in seeds:
            try:
                simulate_serving(seed)
            except SimulationError as error:
                return seed, str(error).splitlines()[0]
    return None


@pytest.mark.timeout(900)
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_found(name):
    failure = first_failure(BUGS[name])
    assert failure is not None


def test_a_bug_in_every_history_fails_at_once():
    """The canary: were this one not found, no failure would be."""

    def make(push):
        def push_without_the_first(self, stream, delta):
            push(self, stream, dataclasses.replace(delta, token_ids=delta.token_ids[1:]))

        return push_without_the_first

    found = first_failure(lambda: _replace(OpenStreams, "push", make), range(10))
    assert found is not None
    with _replace(OpenStreams, "push", make), pytest.raises(SimulationError, match=rf"serving_simulation {found[0]}$"):
        simulate_serving(found[0])


def test_a_change_that_does_nothing_is_not_found():
    def make(push):
        return lambda self, stream, delta: push(self, stream, dataclasses.replace(delta))

    assert first_failure(lambda: _replace(OpenStreams, "push", make), range(6)) is None
