"""One replica over several hosts: rank 0 schedules and serves, the others run the programs that it runs.

JAX joins the devices of the processes into one mesh, and asks that all of them call the same programs, in the same order, with the
same integers. So rank 0 sends every call (`Plan`: which program, and the integers that it takes) over a TCP connection to each
other rank before it makes it itself. The cache never travels, nor do tokens: they are on every rank's devices.

Ranks meet at ``--master-addr``, ``--master-port`` (the next port is JAX's own). They compare versions and flags before anything
is loaded. From then on each end of a connection says every 2 s that it is there: a process that ends is noticed at once, a
host that vanishes after 10 s, and every rank that is left says so and ends. There is no encryption: it is for a cluster's network.
"""

import collections
import contextlib
import dataclasses
import json
import logging
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from apt_jax import __version__
from apt_jax.config import EngineConfig, ModelConfig, ParallelConfig
from apt_jax.errors import AptJaxError, ConfigError, one_line

if TYPE_CHECKING:
    from apt_jax.jax_executor import JaxExecutor

logger = logging.getLogger(__name__)

BEAT_S = 2.0
SILENCE_S = 10.0
"""After which a rank that says nothing is lost."""
CHECK_EVERY = 256
"""Plans between two comparisons of what was sent and what came."""
_HELLO_S = 5.0
_MAX_HELLO = 1 << 20
_MAX_MESSAGE = 1 << 30
_FRAME = struct.Struct("<cI")
_NOT_COMPARED = {
    "model", "tokenizer", "chat_template", "served_model_name", "parallel.node_rank", "parallel.join_timeout_s",
}  # fmt: skip
"""Settings in which ranks may differ: paths, and what is each rank's own."""

_HELLO, _WELCOME, _BEAT, _PLAN, _DRAIN, _END, _FAIL = (bytes([c]) for c in b"hwbpdef")

Array = NDArray[np.int32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One call of a program, as rank 0 makes it."""

    program: str
    arrays: Sequence[Array | None]
    """What it takes from the host, in the order of its arguments."""
    static: dict[str, Any]

    def encode(self) -> bytes:
        shapes = [None if a is None else a.shape for a in self.arrays]
        head = json.dumps([self.program, self.static, shapes]).encode()
        parts = [np.ascontiguousarray(a).tobytes() for a in self.arrays if a is not None]
        return b"".join([struct.pack("<I", len(head)), head, *parts])

    @classmethod
    def decode(cls, data: bytes) -> "Plan":
        (length,) = struct.unpack_from("<I", data)
        program, static, shapes = json.loads(data[4 : 4 + length])
        arrays: list[Array | None] = []
        place = 4 + length
        for shape in shapes:
            if shape is None:
                arrays.append(None)
                continue
            count = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(data, np.int32, count, place).reshape(shape))
            place += 4 * count
        fixed = {k: tuple(v) if isinstance(v, list) else v for k, v in static.items()}
        return cls(program=program, arrays=arrays, static=fixed)


class StepError(AptJaxError):
    """What rank 0 had this rank run has failed."""


class _Link:
    """One connection: messages of a kind and bytes, whole or not at all."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        """The rank at the other end, for people."""
        self._socket, self._lock = sock, threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(_HELLO_S)

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Raises OSError where the other end does not read."""
        with self._lock:
            self._socket.sendall(_FRAME.pack(kind, len(data)) + data)

    def receive(self, timeout_s: float, most: int = _MAX_MESSAGE) -> tuple[bytes, bytes]:
        """Raises OSError where the other end is gone or says nothing for so long."""
        self._socket.settimeout(timeout_s)
        kind, length = _FRAME.unpack(self._exactly(_FRAME.size))
        if length > most:
            raise OSError(f"a message of {length:,} bytes")
        return kind, self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        view, got = memoryview(data), 0
        while got < length:
            count = self._socket.recv_into(view[got:])
            if count == 0:
                raise ConnectionResetError("the connection was closed")
            got += count
        return bytes(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _end_now(reason: str) -> None:
    """What is done where nobody has said what to do when a rank is lost: threads may be stuck in a collective for ever."""
    sys.stdout.flush()
    os.write(2, f"apt-jax: {reason}\n".encode())
    os._exit(1)


class Hosts:
    """This rank's connections to others.

    Attributes:
        on_lost: called once, in a thread, with a line about the rank that was lost; the default ends the process.
    """

    def __init__(self, links: Sequence[_Link]) -> None:
        self._links = links
        self.on_lost: Callable[[str], None] = _end_now
        self._lost = threading.Lock()  # taken for good by the first that notices
        self._closing = False

    def _start(self) -> None:
        for link in self._links:
            threading.Thread(target=self._listen, args=(link,), name="apt-jax-host", daemon=True).start()  # fmt: skip
        threading.Thread(target=self._beat, name="apt-jax-beat", daemon=True).start()

    def _beat(self) -> None:
        while not self._closing:
            for link in self._links:
                with contextlib.suppress(OSError):  # who listens to it notices
                    link.send(_BEAT)
            time.sleep(BEAT_S)

    def _listen(self, link: _Link) -> None:
        try:
            while True:
                kind, data = link.receive(SILENCE_S)
                if kind == _FAIL:
                    return self._lose(link, one_line(data.decode("utf-8", "replace")))
                if kind != _BEAT:
                    self._on_message(kind, data)
        except TimeoutError:
            self._lose(link, f"{link.name} has said nothing for {SILENCE_S:g} s")
        except OSError:
            self._lose(link, f"{link.name} has ended")
        finally:
            link.close()

    def _on_message(self, kind: bytes, data: bytes) -> None:
        raise NotImplementedError

    def _lose(self, link: _Link, reason: str) -> None:
        if self._closing or not self._lost.acquire(blocking=False):
            return
        for other in self._links:
            if other is not link:
                with contextlib.suppress(OSError):
                    other.send(_FAIL, reason.encode())
        self.on_lost(reason)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """An exception within is told to the other ranks, which end with its message."""
        try:
            yield
        except Exception as error:
            self._closing = True
            for link in self._links:
                with contextlib.suppress(OSError):
                    link.send(_FAIL, f"{self._own_name}: {error}".encode())
            raise

    _own_name = "rank 0"


class Leader(Hosts):
    """Rank 0's side. Another rank that gets SIGTERM has this process get one."""

    def __init__(self, links: Sequence[_Link]) -> None:
        super().__init__(links)
        self._num_plans, self._digest = 0, 0
        self._start()

    def announce(self, plan: Plan) -> None:
        """Have the other ranks make a call; to be called right before it is made here."""
        data = plan.encode()
        self._num_plans, self._digest = self._num_plans + 1, zlib.crc32(data, self._digest)
        if self._num_plans % CHECK_EVERY == 0:
            data = struct.pack("<I", self._digest) + data
        for link in self._links:
            try:
                link.send(_PLAN, data)
            except OSError:
                self._lose(link, f"{link.name} has ended")
                raise

    def _on_message(self, kind: bytes, data: bytes) -> None:
        del data
        if kind == _DRAIN:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """The end, as it should be: the other ranks end with exit code 0."""
        self._closing = True
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(_END)
        for link in self._links:
            link.close()


class Follower(Hosts):
    """Another rank's side."""

    def __init__(self, link: _Link, rank: int) -> None:
        super().__init__([link])
        self._link, self._own_name = link, f"rank {rank} ({socket.gethostname()})"
        self._plans: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._follows = False
        self._num_plans, self._digest = 0, 0
        self._start()

    def ask_to_drain(self) -> None:
        """Tell rank 0 that this rank was asked to end."""
        with contextlib.suppress(OSError):
            self._link.send(_DRAIN)

    def plans(self) -> Iterator[Plan]:
        """What to run, until rank 0 ends. Raises RuntimeError where something else came than was sent."""
        self._follows = True
        while (data := self._plans.get()) is not None:
            self._num_plans += 1
            expected = None
            if self._num_plans % CHECK_EVERY == 0:
                (expected,), data = struct.unpack_from("<I", data), data[4:]
            self._digest = zlib.crc32(data, self._digest)
            if expected is not None and expected != self._digest:
                raise RuntimeError(f"what came until plan {self._num_plans} is not what was sent")
            yield Plan.decode(data)

    def _on_message(self, kind: bytes, data: bytes) -> None:
        if kind == _PLAN:
            self._plans.put(data)
        elif kind == _END:
            self._closing = True
            if not self._follows:  # rank 0 was stopped while models are loaded
                sys.stdout.flush()
                os._exit(0)
            self._plans.put(None)


def join(config: EngineConfig, model: ModelConfig) -> Leader | Follower:
    """Meet the other ranks and join their devices into one JAX. To be called before JAX has touched a device.

    Raises:
        ConfigError: on every rank that came, where one did not, or has other flags or another version.
    """
    ours = config.parallel
    settings = _settings(config, model)
    hosts = _lead(ours, settings) if ours.node_rank == 0 else _follow(ours, settings)
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    with hosts.telling():
        try:
            jax.distributed.initialize(
                f"{ours.master_addr}:{ours.master_port + 1}",
                ours.nnodes,
                ours.node_rank,
                initialization_timeout=60,
                heartbeat_timeout_seconds=int(2 * SILENCE_S),
                coordinator_bind_address=f"{ours.master_addr}:{ours.master_port + 1}",
            )
        except RuntimeError as error:
            raise ConfigError(
                f"JAX cannot join the hosts at port {ours.master_port + 1}, the one after --master-port: {one_line(str(error))[:200]}"
            ) from error
    return hosts


def _settings(config: EngineConfig, model: ModelConfig) -> dict[str, str]:
    """All that ranks must have alike, by name."""

    def flat(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for key, item in value.items():
            if isinstance(item, dict):
                yield from flat(item, f"{prefix}{key}.")
            elif prefix + key not in _NOT_COMPARED:
                yield prefix + key, repr(item)

    versions = {f"version of {name}": version(name) for name in ("jax", "jaxlib")}
    return {
        "version of apt-jax": __version__,
        **versions,
        **dict(flat(dataclasses.asdict(config), "")),
        **dict(flat(dataclasses.asdict(model), "model.")),
    }


def _difference(rank: str, theirs: dict[str, str], ours: dict[str, str]) -> str | None:
    """In one line; None: there is none."""
    for name in {**ours, **theirs}:
        a, b = ours.get(name), theirs.get(name)
        if a == b:
            continue
        what = (
            name.rpartition(".")[2] if not name.startswith("model.") else f"the model's {name[6:]}"
        )
        advice = (
            "install the same on all hosts" if name.startswith("version") else "give all ranks the same model" if name.startswith("model.") else "give all ranks the same flags"
        )  # fmt: skip
        return f"{rank} has {what} {b:.60}, rank 0 has {a:.60}; {advice}" if a and b else f"{rank} is of another version of apt-jax"  # fmt: skip
    return None


def _lead(ours: ParallelConfig, settings: dict[str, str]) -> Leader:
    where = f"{ours.master_addr}:{ours.master_port}"
    for port in (ours.master_port + 1, ours.master_port):  # JAX's own is not asked for so early
        try:
            server = socket.create_server((ours.master_addr, port))
        except OSError as error:
            what = "the port after --master-port" if port != ours.master_port else "--master-addr, --master-port"  # fmt: skip
            raise ConfigError(f"rank 0 cannot listen on {ours.master_addr}:{port}: {error.strerror} ({what})") from None  # fmt: skip
        if port != ours.master_port:
            server.close()
    until_s = time.monotonic() + ours.join_timeout_s
    links: dict[int, _Link] = {}

    def refuse(reason: str) -> NoReturn:
        for link in links.values():
            with contextlib.suppress(OSError):
                link.send(_FAIL, reason.encode())
            link.close()
        raise ConfigError(reason)

    logger.info("rank 0 waits at %s for %d other ranks", where, ours.nnodes - 1)
    with server:
        while len(links) < ours.nnodes - 1:
            server.settimeout(max(until_s - time.monotonic(), 0.001))
            try:
                sock, (address, *_) = server.accept()
            except TimeoutError:
                missing = [str(r) for r in range(1, ours.nnodes) if r not in links]
                refuse(
                    f"rank {', '.join(missing)} of {ours.nnodes} did not join at {where} within {ours.join_timeout_s:g} s; "
                    "start it with this --master-addr and --master-port, or wait longer (--join-timeout)"
                )
            link = _Link(sock, str(address))
            try:
                kind, data = link.receive(_HELLO_S, _MAX_HELLO)
                hello: Any = json.loads(data) if kind == _HELLO else None
                rank, host, theirs = int(hello["rank"]), str(hello["host"]), dict(hello["settings"])
            except (OSError, ValueError, TypeError, KeyError):
                logger.warning("%s is at --master-port and is no rank of apt-jax", address)
                link.close()
                continue
            link.name = f"rank {rank} ({one_line(host)[:80]}, {address})"
            if rank in links or not 1 <= rank < ours.nnodes:
                why = "another process is that rank" if rank in links else f"there are ranks 1 to {ours.nnodes - 1}"  # fmt: skip
                with contextlib.suppress(OSError):
                    link.send(_FAIL, f"node_rank={rank} is not free: {why} (--node-rank)".encode())
                link.close()
                continue
            links[rank] = link
            logger.info("%s joined", link.name)
            if reason := _difference(link.name, theirs, settings):
                refuse(reason)
    for link in links.values():
        try:
            link.send(_WELCOME)
        except OSError:
            refuse(f"{link.name} has ended")
    return Leader([links[rank] for rank in sorted(links)])


def _follow(ours: ParallelConfig, settings: dict[str, str]) -> Follower:
    where = (ours.master_addr, ours.master_port)
    name = f"rank 0 at {where[0]}:{where[1]}"
    until_s = time.monotonic() + ours.join_timeout_s
    hello = {"rank": ours.node_rank, "host": socket.gethostname(), "settings": settings}
    while True:
        try:
            sock = socket.create_connection(where, timeout=_HELLO_S)
            break
        except OSError as error:
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"rank {ours.node_rank} cannot reach {name} within {ours.join_timeout_s:g} s: "
                    f"{error.strerror or error}; is it started? (--master-addr, --master-port, --join-timeout)"
                ) from None
            time.sleep(0.5)
    link = _Link(sock, name)
    try:
        link.send(_HELLO, json.dumps(hello).encode())
        # Rank 0 ends the wait for those that do not come; it may have begun a little later.
        kind, data = link.receive(ours.join_timeout_s + 60, _MAX_HELLO)
        reason = None
    except OSError as error:
        kind, data = b"", b""
        reason = f"{name} ended before all ranks had joined ({error.strerror or error}), or is no apt-jax (--master-addr, --master-port)"
    if kind == _FAIL:
        reason = one_line(data.decode("utf-8", "replace"))
    elif kind != _WELCOME:
        reason = reason or f"{name} is no apt-jax (--master-addr, --master-port)"
    if reason is not None:
        link.close()
        raise ConfigError(reason)
    return Follower(link, ours.node_rank)


def follow(executor: "JaxExecutor", follower: Follower) -> None:
    """Run what rank 0 runs until it ends. Raises StepError where a step failed."""
    import jax

    flying: collections.deque[Any] = collections.deque()
    with follower.telling():
        try:
            for plan in follower.plans():
                flying.append(executor.run_plan(plan))
                if len(flying) > 2:  # so that a step that fails is noticed
                    jax.block_until_ready(flying.popleft())
        except Exception as error:
            time.sleep(1.0)  # where it failed for want of another rank, `on_lost` ends this one
            raise StepError(f"a step failed: {one_line(str(error))[:300]}") from error
