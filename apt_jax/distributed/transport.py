"""Streams between ranks: one bidirectional gRPC call for each rank other than 0, opened at rank 0's --master-port.

gRPC keeps the order of messages, and its keepalive detects a peer that no longer answers: the exit of a process is
detected at once, the loss of a host or a hung process after `SILENCE_S`. Messages are defined in protos/ranks.proto.
Needs grpcio and protobuf (the extra `serve`); the module is imported only when ranks connect.

The resources that unauthenticated peers can use through the port are limited: there are at most `MAX_HELLOS` streams
that have not joined, one per connection, and a message has at most `MAX_FROM_RANK` bytes. A connection without a stream
is closed after `HELLO_S`.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from apt_jax.distributed.protos import ranks_pb2 as pb

SILENCE_S = 10.0
"""Seconds without an answer after which a rank counts as lost."""
HELLO_S = 5.0
"""Seconds within which a new rank must prove that it has the key and send its settings."""
MAX_HELLOS = 16
MAX_FROM_RANK = 1 << 20
_MAX_FROM_LEADER = 1 << 30
_CLOSE_S = 1.0

_SERVICE = pb.DESCRIPTOR.services_by_name["Ranks"].full_name


class StreamError(Exception):
    """The other end of a stream has disconnected, or is not a rank of apt-jax. The message has no subject, because
    callers put the name of that end before it.

    Attributes:
        is_busy: True if rank 0 already has `MAX_HELLOS` other streams that have not joined.
    """

    def __init__(self, text: str, *, is_busy: bool = False) -> None:
        super().__init__(text)
        self.is_busy = is_busy


class Stream:
    """One end of a stream; messages arrive whole and in order.

    Args:
        name: name of the other end, for messages.
        sends: type of the messages that this end sends.
        receives: type of the messages that the other end sends.

    Attributes:
        when_ended: text that follows the name of the other end in messages, once the stream has ended.
    """

    def __init__(self, name: str, sends: Any, receives: Any) -> None:
        self.name, self.when_ended = name, "has disconnected"
        self._sends, self._receives = sends, receives
        self._incoming: Iterator[bytes] = iter(())
        self._transmit: Callable[[bytes | None], object] = lambda data: None
        self._sending = threading.Lock()
        self._is_finished = False
        self._cancel: Callable[[], object] = lambda: None
        self._done = threading.Event()

    def attach(self, call: Any, incoming: Iterator[bytes], transmit: Callable[[bytes | None], object]) -> None:
        """Set the gRPC call of this end, the iterator over received messages, and the function that sends a message
        (None: end of messages)."""
        self._cancel, self._incoming, self._transmit = call.cancel, incoming, transmit
        if not call.add_callback(self._done.set):
            self._done.set()

    def send(self, **kind: Any) -> None:
        """Send a message, given as its kind and fields (`hello={...}`); do nothing if the other end has
        disconnected."""
        with contextlib.suppress(StreamError):
            self.send_encoded(self._sends(**kind).SerializeToString())

    def send_encoded(self, data: bytes) -> None:
        """Send a serialized message.

        Raises:
            StreamError: the other end has disconnected.
        """
        with self._sending:
            if self._is_finished or self._done.is_set():
                raise StreamError(self.when_ended)
            self._transmit(data)

    def __iter__(self) -> Iterator[Any]:
        """Yield messages as they arrive, until the other end has finished the stream.

        Raises:
            StreamError: the stream broke, or a message cannot be decoded.
        """
        try:
            for data in self._incoming:
                yield self._receives.FromString(data)
        except DecodeError:
            raise StreamError("sent a message that apt-jax does not know") from None
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):  # at rank 0: the iterator just stops
                return
            details = (error.details() or "").lower()
            if "ping timeout" in details or "keepalive" in details:
                raise StreamError(f"has not answered for {SILENCE_S:g} s") from None
            is_busy = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            raise StreamError(self.when_ended, is_busy=is_busy) from None

    def expect(self, *kinds: str) -> Any:
        """Return the next message, which must be of one of these kinds.

        Raises:
            StreamError: the message is of another kind, or the stream has ended.
        """
        message = next(iter(self), None)
        if message is None:
            raise StreamError(self.when_ended)
        if message.WhichOneof("kind") not in kinds:
            raise StreamError("sent a message that apt-jax does not expect")
        return message

    @contextlib.contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        """Cancel the stream if the `with` block takes longer than `limit_s` seconds."""
        timer = threading.Timer(limit_s, self._cancel)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def finish(self) -> None:
        """Finish this end of the stream: no more messages are sent."""
        with self._sending:
            if not self._is_finished:
                self._is_finished = True
                self._transmit(None)

    def close(self) -> None:
        """Finish this end, wait briefly for everything to arrive, and cancel the stream if it is still open."""
        self.finish()
        if not self._done.wait(_CLOSE_S):
            self._cancel()


def _options(*more: tuple[str, int | str]) -> list[tuple[str, int | str]]:
    half_ms = int(SILENCE_S * 500)
    return [
        ("grpc.keepalive_time_ms", half_ms),  # a silent connection is probed after this time,
        ("grpc.keepalive_timeout_ms", half_ms),  # and closed after this much longer,
        ("grpc.http2.ping_timeout_ms", half_ms),  # even if the peer's kernel still acknowledges
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.bdp_probe", 0),  # no extra pings; the window below is large enough
        ("grpc.http2.lookahead_bytes", 8 << 20),
        ("grpc.optimization_target", "latency"),
        ("grpc.max_send_message_length", -1),
        *more,
    ]


def connect(host: str, port: int, name: str) -> tuple[Stream, Callable[[], None]]:
    """Open this rank's stream to rank 0; return it and a function that closes the connection."""
    channel = grpc.insecure_channel(
        join_host_port(host, port),
        _options(
            ("grpc.max_receive_message_length", _MAX_FROM_LEADER),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.min_reconnect_backoff_ms", int(HELLO_S * 1e3)),  # also the time limit for connecting
        ),
    )
    stream = Stream(name, pb.FromRank, pb.FromLeader)
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    call: Any = channel.stream_stream(f"/{_SERVICE}/Join")(iter(outgoing.get, None))
    stream.attach(call, call, outgoing.put)
    return stream, channel.close


def listen(host: str, port: int, num_ranks: int, admit: Callable[[Stream], None]) -> grpc.Server:
    """Start the server of rank 0.

    Args:
        host, port: address of rank 0.
        num_ranks: number of other ranks.
        admit: function called with each new stream, in its own thread; the stream is closed when it returns.

    Raises:
        RuntimeError: the port is in use, or the address does not belong to this host.
    """

    def join(incoming: Iterator[bytes], context: Any, send_response_callback: Callable[[bytes | None], None]) -> None:
        stream = Stream(_address(context.peer()), pb.FromLeader, pb.FromRank)
        stream.attach(context, incoming, send_response_callback)
        stream.when_ended = (
            f"has not answered for {SILENCE_S:g} s or has disconnected"  # gRPC servers cannot distinguish these
        )
        try:
            admit(stream)
        finally:
            stream.close()

    # As in grpcio-health-checking: the thread that calls `send` then sends the responses itself. Otherwise another
    # thread would iterate over them, and would wait for the interpreter's lock while the engine runs.
    join.experimental_non_blocking = True  # type: ignore[attr-defined]
    most = num_ranks + MAX_HELLOS
    server = grpc.server(
        _DaemonThreads(),  # type: ignore[arg-type]  # any executor will do
        maximum_concurrent_rpcs=most,
        options=_options(
            ("grpc.so_reuseport", 0),  # a port in use is an error
            ("grpc.max_receive_message_length", MAX_FROM_RANK),
            ("grpc.max_metadata_size", 16 << 10),
            ("grpc.max_concurrent_streams", 1),
            ("grpc.max_connection_idle_ms", int(HELLO_S * 1e3)),
            ("grpc.server_handshake_timeout_ms", int(HELLO_S * 1e3)),
        ),
    )
    handlers = {"Join": grpc.stream_stream_rpc_method_handler(join)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    server.add_insecure_port(join_host_port(host, port))
    server.start()
    return server


class _DaemonThreads(futures.Executor):
    """Executor that runs each call in a new daemon thread; the server limits the number of calls."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="apt-jax-stream", daemon=True).start()
        return future


def join_host_port(host: str, port: int) -> str:
    """Return host and port as an address in gRPC's format."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(peer: str) -> str:
    """Return the address contained in gRPC's name of a peer, such as ``ipv4:10.0.0.2:41234``."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
