"""One replica over several hosts: rank 0 schedules and serves, and the other ranks run the same programs.

JAX joins the devices of all processes into one mesh and requires all processes to call the same programs in the same
order with the same integer arguments. Rank 0 therefore sends every call (`Plan`: a program and its integer arguments)
on a stream to each other rank before it makes the call itself. Only rank 0 allocates blocks; cache, block tables and
tokens are on every rank's devices, and only changes of the tables are sent.

1. Ranks connect to ``--master-addr``, ``--master-port`` (`rendezvous.join`; JAX uses the next port).
2. Each rank proves that it has the join key, then its settings are compared with rank 0's, before anything is loaded.
3. Rank 0 announces program calls, and the other ranks run them (`worker.follow`).
4. If a rank is lost, the replica stops: every remaining rank reports the loss and exits. If it is lost before all ranks
   have joined, its place becomes free again.
"""

import abc
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from apt_jax.config import ParallelConfig
from apt_jax.distributed.authentication import JoinKey, RejectedError, check_rank
from apt_jax.distributed.messages import Plan
from apt_jax.distributed.settings import difference
from apt_jax.errors import AptJaxError, HostError, one_line

if TYPE_CHECKING:
    from apt_jax.distributed.protos import ranks_pb2 as pb
    from apt_jax.distributed.transport import Stream

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 1.0


def end_process(code: int, reason: str | None = None) -> None:
    """Exit this process immediately; nothing else in the package does so.

    Called when an ordinary exit is not possible: a rank was lost before `Hosts.on_lost` was set, or rank 0 has stopped
    while this rank loads its model. Other threads may then be stuck in a collective or a compilation, which exceptions
    cannot interrupt.
    """
    sys.stdout.flush()
    if reason is not None:
        os.write(2, f"apt-jax: {reason}\n".encode())
    os._exit(code)


class Hosts(abc.ABC):
    """Streams of this rank to other ranks.

    Attributes:
        on_lost: function called once, in a thread, with a one-line message about the lost rank; by default it exits the
            process.
    """

    def __init__(self, own_name: str) -> None:
        self.on_lost: Callable[[str], None] = lambda reason: end_process(1, reason)
        self._own_name = own_name
        self._streams: dict[int, Stream] = {}  # by rank; replaced as a whole
        self._losing = threading.Lock()  # acquired by the first thread that notices a lost rank, and never released
        self._closing = False
        self._close_transport: Callable[[], object] = lambda: None

    def _listen(self, rank: int, stream: "Stream") -> None:
        from apt_jax.distributed.transport import StreamError

        reason, told = f"{stream.name} {stream.when_ended}", None
        try:
            for message in stream:
                kind = message.WhichOneof("kind")
                if kind in ("failed", "refused"):
                    reason, told = one_line(getattr(message, kind).reason), kind
                    break
                self._on_message(kind, message)
        except StreamError as error:
            reason = f"{stream.name} {error}"
        self._lose(rank, reason, told)

    @abc.abstractmethod
    def _on_message(self, kind: str, message: Any) -> None:
        """Handle a message other than `failed` and `refused`."""

    def _tell(self, **kind: Any) -> None:
        for stream in self._streams.values():
            stream.send(**kind)

    def _end_streams(self) -> None:
        """Finish this rank's side of the streams, and wait briefly for everything to arrive."""
        streams = self._streams.values()
        for stream in streams:
            stream.finish()
        for stream in streams:
            stream.close()

    def _lose(self, rank: int, reason: str, told: str | None) -> None:
        """Stop the replica because a rank is lost.

        Args:
            told: kind of the message in which the rank announced that it is stopping; None: it sent no such message.
        """
        del told
        if self._closing or not self._losing.acquire(blocking=False):
            return
        self._streams = {r: stream for r, stream in self._streams.items() if r != rank}
        self._tell(failed={"reason": reason})
        self._end_streams()
        self.on_lost(reason)

    @contextlib.contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Send an exception raised within the `with` block to the other ranks, which stop with its message."""
        try:
            yield
        except Exception as error:
            self._closing = True
            self._tell(failed={"reason": f"{self._own_name}: {error}"})
            self._end_streams()
            raise

    def close(self) -> None:
        """Stop sending and receiving."""
        self._closing = True
        self._end_streams()
        self._close_transport()


class Leader(Hosts):
    """Rank 0's streams to the other ranks.

    Attributes:
        on_drain: function called in a thread when another rank has been asked to stop.
    """

    def __init__(self, ours: ParallelConfig, settings: Mapping[str, str], key: JoinKey | None = None) -> None:
        super().__init__("rank 0")
        self.on_drain: Callable[[], object] = lambda: None
        self._ours, self._settings, self._key = ours, settings, key
        self._meeting = threading.Condition()
        self._complete = False
        self._refusal: str | None = None
        self._warned_s = float("-inf")

    # --- until all have joined

    def meet(self, close_transport: Callable[[], object] = lambda: None) -> None:
        """Wait until the other ranks have joined through `admit`. Raises: see `rendezvous.join`."""
        self._close_transport = close_transport
        ours = self._ours
        with self._meeting:
            self._meeting.wait_for(lambda: self._refusal or len(self._streams) == ours.nnodes - 1, ours.join_timeout_s)
            self._complete = True
            missing = [str(rank) for rank in range(1, ours.nnodes) if rank not in self._streams]
            self._closing = self._refusal is not None or bool(missing)
        if self._refusal is not None:
            self._tell(refused={"reason": self._refusal})
            self.close()
            raise HostError(self._refusal)
        if missing:
            reason = (
                f"rank {', '.join(missing)} of {ours.nnodes} did not join at {ours.master_addr}:{ours.master_port} within "
                f"{ours.join_timeout_s:g} s; start it with this --master-addr and --master-port, or wait longer (--set join_timeout)"
            )
            self._tell(failed={"reason": reason})
            self.close()
            raise HostError(reason)
        self._tell(welcome={})

    def admit(self, stream: "Stream") -> None:
        """Check a new stream, and listen to it in this thread if it belongs to a rank that may join."""
        from apt_jax.distributed.transport import HELLO_S, StreamError

        address = stream.name
        try:
            with stream.limited(HELLO_S):
                check_rank(stream, self._key)
                told = stream.expect("introduction").introduction
        except (RejectedError, StreamError) as error:
            return self._warn(f"{address} connected to --master-port and was rejected: it {error}")
        rank, theirs = told.rank, dict(told.settings)
        stream.name = f"rank {rank} ({one_line(told.host)[:80]}, {address})"
        with self._meeting:
            if self._complete or rank in self._streams or not 1 <= rank < self._ours.nnodes:
                exists = 1 <= rank < self._ours.nnodes
                why = "another process has it" if exists else f"ranks are 1 to {self._ours.nnodes - 1}"
                return stream.send(failed={"reason": f"node_rank={rank} is not available: {why} (--node-rank)"})
            logger.info("%s joined", stream.name)
            self._streams = {**self._streams, rank: stream}
            self._refusal = self._refusal or difference(stream.name, theirs, self._settings)
            self._meeting.notify_all()
        self._listen(rank, stream)

    def _warn(self, text: str) -> None:
        """Log rejected connections at a limited rate, because there may be many."""
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            logger.warning("%s", text)

    def _lose(self, rank: int, reason: str, told: str | None) -> None:
        with self._meeting:
            if not self._complete:
                logger.warning("%s; its place is free again", reason)
                self._streams = {r: stream for r, stream in self._streams.items() if r != rank}
                return
        super()._lose(rank, reason, told)

    # --- after all have joined

    def announce(self, plan: Plan) -> None:
        """Send a program call to the other ranks; must be called right before rank 0 runs it.

        Raises:
            StreamError: a rank has disconnected.
        """
        data = plan.encode()
        for stream in self._streams.values():
            stream.send_encoded(data)

    def _on_message(self, kind: str, message: Any) -> None:
        del message
        if kind == "drain":
            self.on_drain()

    def end(self) -> None:
        """Stop normally: the other ranks exit with code 0."""
        self._closing = True
        self._tell(end={})
        self.close()


class Follower(Hosts):
    """The stream to rank 0, on a rank other than 0.

    Args:
        ours: this rank's configuration.
        stream: stream to rank 0, which has received this rank's settings.
        close_transport: function that closes the connection.
    """

    def __init__(
        self, ours: ParallelConfig, stream: "Stream", close_transport: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(f"rank {ours.node_rank} ({socket.gethostname()})")
        self._plans: queue.SimpleQueue[pb.ProgramCall | None] = queue.SimpleQueue()
        self._follows = False
        self._welcome: queue.SimpleQueue[AptJaxError | None] = queue.SimpleQueue()
        self._is_in = False
        self._streams, self._close_transport = {0: stream}, close_transport
        threading.Thread(target=self._listen, args=(0, stream), name="apt-jax-rank-0", daemon=True).start()

    def meet(self) -> None:
        """Wait until all ranks have joined. Raises: see `rendezvous.join`."""
        error = self._welcome.get()  # rank 0 sends an error if some ranks do not join in time
        if error is not None:
            self.close()
            raise error

    def _lose(self, rank: int, reason: str, told: str | None) -> None:
        if self._is_in:
            return super()._lose(rank, reason, told)
        if told is None:
            reason += BEFORE_ALL_JOINED
        self._welcome.put(HostError(reason))

    def ask_to_drain(self) -> None:
        """Notify rank 0 that this rank has been asked to stop."""
        self._tell(drain={})

    def plans(self) -> Iterator[Plan]:
        """Yield the program calls to run, until rank 0 stops."""
        self._follows = True
        while (call := self._plans.get()) is not None:
            yield Plan.from_message(call)

    def _on_message(self, kind: str, message: Any) -> None:
        if kind == "call":
            self._plans.put(message.call)
        elif kind == "welcome":
            self._is_in = True
            self._welcome.put(None)
        elif kind == "end":
            self._closing = True
            if not self._follows:  # rank 0 has stopped while this rank loads its model
                end_process(0)
            self._plans.put(None)


BEFORE_ALL_JOINED = " before all ranks had joined, or is not apt-jax (--master-addr, --master-port)"
