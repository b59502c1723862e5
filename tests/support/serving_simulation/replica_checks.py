"""Checks in a replica: before each step is run, after each iteration and after the stop."""

from typing import TYPE_CHECKING, Any

from apt_jax.request import EngineRequest
from tests.support.recount import Recount
from tests.support.serving_simulation.admission_recount import AdmissionRecount
from tests.support.serving_simulation.calls import call_id_of
from tests.support.serving_simulation.connection import HIGH_WATER_BYTES
from tests.support.simulation_harness import expect
from tests.support.toy_serving import assert_clean

if TYPE_CHECKING:
    from tests.support.serving_simulation.replica import Replica

_CHECK_EVERY = 4
"""One in so many iterations recounts the engine's accounting."""
_PROBE_EVERY = 16
"""One in so many iterations compares all gauges."""


class ReplicaChecks:
    """Invariants of one process.

    Args:
        replica: some methods of its engine are wrapped.

    Attributes:
        recount: counters and columns of the engine, counted again.
        admission: admission decided again.
    """

    def __init__(self, replica: "Replica") -> None:
        self._replica, self._world = replica, replica.world
        self._num_iterations = 0
        self._iteration_s = 0.0
        self.recount = Recount(replica.parts.engine)
        self.admission = AdmissionRecount(replica)
        engine: Any = replica.parts.engine
        self._execute, engine._steps.execute = engine._steps.execute, self._world.guarded(self._checked_execute)

    def begin_iteration(self) -> None:
        """Note when an iteration begins."""
        self._iteration_s = self._world.loop.time()
        self._num_iterations += 1

    def _checked_execute(self, plan, batch, rows, requests, costs):
        replica, world = self._replica, self._world
        now_s, loop_s = replica.clock.now_s(), world.loop.time()
        open_streams = replica.engine._streams.by_request
        ids, taken = [], {state.request for state in requests}
        for state in requests:
            request = state.request
            ids.append(request.request_id)
            stream = open_streams.get(request)
            if stream is not None:
                expect(
                    stream.deadline_s is None or now_s < stream.deadline_s,
                    f"{request.request_id} is scheduled after its deadline",
                )
                expect(not stream.cancelled, f"{request.request_id} is scheduled although it was cancelled")
            self._check_client(request, loop_s)
        limit_s = world.scenario.max_queue_s
        for request in open_streams:
            late = request not in self.recount.scheduled and request not in taken
            waited_s = now_s - self.admission.added_s.get(request, now_s)
            expect(
                not late
                or limit_s is None
                or waited_s < limit_s
                or replica.parts.engine.states.by_id.get(request.request_id) is None,
                f"{request.request_id} waits for {waited_s:.3f} s, longer than --set max_queue_s",
            )
        world.log("step", replica.place, round(loop_s, 6), ids, batch.num_tokens.tolist())
        return self._execute(plan, batch, rows, requests, costs)

    def _check_client(self, request: EngineRequest, now_s: float) -> None:
        """Nothing is run for a client that has been gone for more than an iteration."""
        for connection in self._replica.connections:
            gone_s = connection.cut_s
            if gone_s is None or connection.call.engine_id != call_id_of(request):
                continue
            others = [
                c
                for c in self._replica.connections
                if c.call.engine_id == connection.call.engine_id and c.cut_s is None
            ]
            expect(
                others or gone_s > self._iteration_s - 0.01,
                f"{request.request_id} is scheduled {now_s - gone_s:.3f} s after its client left ({connection.state})",
            )

    def end_iteration(self) -> None:
        """Invariants between two iterations."""
        replica, engine = self._replica, self._replica.parts.engine
        if engine.dead_reason is not None or replica.engine._abandoned:
            return
        if not engine.debug and self._num_iterations % _CHECK_EVERY == 0:
            engine.check_integrity()  # the other simulation does so after every step
        wrong = self.recount.check(gauges=self._num_iterations % _PROBE_EVERY == 0)
        expect(not wrong, f"{replica.name}: {'; '.join(wrong)}")
        streams = replica.engine._streams
        open_streams = streams.by_request
        for held in (streams._deadlines, streams._awaiting_first_schedule):
            expect(held.keys() <= open_streams.keys(), f"{replica.name}: a stream that has ended is still watched")
        for request, stream in open_streams.items():
            unread = stream._unread
            num_unread = 0 if unread is None else len(unread.token_ids)
            expect(num_unread <= request.params.max_tokens, f"{request.request_id}: {num_unread} unread tokens")
            expect(not stream.ended, f"{request.request_id}: its stream has ended and is still held")
        expect(
            engine.num_live == len(open_streams) or engine.states.outputs or self._world.aborted,
            f"{replica.name}: {engine.num_live} live requests, {len(open_streams)} streams",
        )
        for connection in replica.connections:
            expect(
                connection.most_buffered <= HIGH_WATER_BYTES,
                f"call {connection.call.request_id}: {connection.most_buffered} bytes were not read, and more written",
            )

    def check_clean(self) -> None:
        """After a stop nothing is left."""
        replica, engine = self._replica, self._replica.engine
        assert_clean(replica.parts)
        wrong = self.recount.check()
        expect(not wrong, f"{replica.name}: {'; '.join(wrong)}")
        streams = engine._streams
        left = [len(h) for h in (streams.by_request, streams._deadlines, streams._awaiting_first_schedule)]
        expect(not any(left) and not engine._inbox, f"{replica.name}: streams are left: {left}")
        expect(replica.app.num_open == 0, f"{replica.name}: {replica.app.num_open} calls are counted as open")
        expect(not any(c.buffered for c in replica.connections), f"{replica.name}: bytes are left in buffers")
        queues = (replica.work._short, replica.work._long, replica.work._grammars)
        expect(not any(queue.num_waiting for queue in queues), f"{replica.name}: calls wait before the engine")
        expect(
            replica.work.bodies.used_bytes == 0,
            f"{replica.name}: {replica.work.bodies.used_bytes} bytes of bodies are left",
        )
        expect(len(engine._feed) == 0, f"{replica.name}: {len(engine._feed)} subscribers are left")
        stats = replica.parts.engine.stats()
        expect(
            stats.num_rejected == self.admission.num_rejected,
            f"{replica.name}: num_rejected is {stats.num_rejected}, counted again {self.admission.num_rejected}",
        )
        expect(
            sum(stats.finished.values()) == self.admission.num_added,
            f"{replica.name}: {sum(stats.finished.values())} requests ended, {self.admission.num_added} were added",
        )
