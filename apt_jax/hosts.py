"""One replica over several hosts: rank 0 schedules and serves, the others run the programs that it runs.

JAX joins the devices of the processes into one mesh, and asks that all of them call the same programs, in the same order, with the
same integers. So rank 0 sends every call (`Plan`: which program, and the integers that it takes) over a TCP connection to each
other rank before it makes it itself. Block tables are rank 0's alone; the cache never travels, nor do tokens: they are on every
rank's devices.

Ranks meet at ``--master-addr``, ``--master-port`` (the next port is JAX's own). They compare versions, flags and models before
anything is loaded. From the first word on each end of a connection says every 2 s that it is there: a process that ends is noticed
at once, a host that vanishes after 10 s, and every rank that is left says so and ends; while ranks are awaited, the place of one that
has gone is free again. There is no encryption: it is for a cluster's network.
"""

import abc
import collections
import contextlib
import dataclasses
import hashlib
import ipaddress
import json
import logging
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apt_jax import __version__
from apt_jax.config import EngineConfig, ModelConfig, ParallelConfig
from apt_jax.errors import AptJaxError, ConfigError, one_line

if TYPE_CHECKING:
    from apt_jax.jax_executor import JaxExecutor
    from apt_jax.models import ResolvedModel

logger = logging.getLogger(__name__)

BEAT_S = 2.0
SILENCE_S = 10.0
"""After which a rank that says nothing is lost."""
_HELLO_S = 5.0
_MAX_HELLO = 1 << 20
_MAX_MESSAGE = 1 << 30
_FRAME = struct.Struct("<cI")
_LARGE = 1 << 16
"""Integers; arrays of more are sent without their empty pieces: most of a batch's histories is padding."""
_PIECE = 1 << 10
_NOT_COMPARED = {
    "model", "tokenizer", "chat_template", "served_model_name",
    "parallel.node_rank", "parallel.join_timeout_s", "parallel.master_addr",
}  # fmt: skip
"""Settings in which ranks may differ: paths, names, and what is each rank's own."""

_HELLO, _WELCOME, _BEAT, _PLAN, _DRAIN, _END, _FAIL, _REFUSE = (bytes([c]) for c in b"hwbpdefr")

Array = NDArray[np.int32]


class HostError(AptJaxError):
    """Ranks of one replica have not met, or one of them is gone; beginning anew may help."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One call of a program, as rank 0 makes it."""

    program: str
    arrays: Sequence[Array | None]
    """What it takes from the host, in the order of its arguments."""
    static: dict[str, Any]

    def encode(self) -> bytes:
        packed = [_pack(a) for a in self.arrays if a is not None]
        shapes = [None if a is None else a.shape for a in self.arrays]
        head = json.dumps([self.program, self.static, shapes]).encode()
        return b"".join([struct.pack("<I", len(head)), head, *packed])

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
            array, place = _unpack(data, place, shape)
            arrays.append(array)
        fixed = {k: tuple(v) if isinstance(v, list) else v for k, v in static.items()}
        return cls(program=program, arrays=arrays, static=fixed)


def _pack(array: Array) -> bytes:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.size <= _LARGE:
        return flat.tobytes()
    pieces = np.pad(flat, (0, -flat.size % _PIECE)).reshape(-1, _PIECE)
    kept = np.flatnonzero(pieces.any(axis=1)).astype(np.int32)
    return struct.pack("<I", kept.size) + kept.tobytes() + pieces[kept].tobytes()


def _unpack(data: bytes, place: int, shape: list[int]) -> tuple[Array, int]:
    """An array that begins at a place, and the place where it ends."""

    def ints(count: int) -> Array:
        nonlocal place
        found = np.frombuffer(data, np.int32, count, place)
        place += 4 * count
        return found

    size = int(np.prod(shape, dtype=np.int64))
    if size <= _LARGE:
        return ints(size).reshape(shape), place
    kept = ints(int(ints(1)[0]))
    pieces = np.zeros((-(-size // _PIECE), _PIECE), np.int32)
    pieces[kept] = ints(kept.size * _PIECE).reshape(-1, _PIECE)
    return pieces.reshape(-1)[:size].reshape(shape), place


class _Link:
    """One connection: messages of a kind and bytes, whole or not at all."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        """The rank at the other end, for people."""
        self._socket, self._lock = sock, threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(SILENCE_S)

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Raises OSError where the other end does not read."""
        with self._lock:
            self._socket.sendall(_FRAME.pack(kind, len(data)) + data)

    def receive(self, most: int = _MAX_MESSAGE, until_s: float | None = None) -> tuple[bytes, bytes]:  # fmt: skip
        """Raises OSError where the other end is gone, says nothing for `SILENCE_S`, or has not said all by a time."""
        kind, length = _FRAME.unpack(self._exactly(_FRAME.size, until_s))
        if length > most:
            raise OSError(f"a message of {length:,} bytes")
        return kind, self._exactly(length, until_s)

    def _exactly(self, length: int, until_s: float | None) -> bytes:
        data = bytearray(length)
        view, got = memoryview(data), 0
        while got < length:
            if until_s is not None and time.monotonic() > until_s:
                raise TimeoutError("too slow")
            count = self._socket.recv_into(view[got:])
            if count == 0:
                raise ConnectionResetError("the connection was closed")
            got += count
        return bytes(data)

    def limit(self, timeout_s: float) -> None:
        """How long the other end may say nothing."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _end_now(reason: str) -> None:
    """What is done where nobody has said what to do when a rank is lost: threads may be stuck in a collective for ever."""
    sys.stdout.flush()
    os.write(2, f"apt-jax: {reason}\n".encode())
    os._exit(1)


class Hosts(abc.ABC):
    """This rank's connections to others.

    Attributes:
        on_lost: called once, in a thread, with a line about the rank that was lost; the default ends the process.
    """

    def __init__(self, own_name: str) -> None:
        self.on_lost: Callable[[str], None] = _end_now
        self._own_name = own_name
        self._links: dict[int, _Link] = {}  # by rank; replaced as a whole
        self._losing = threading.Lock()  # taken for good by the first that notices
        self._closing = False
        threading.Thread(target=self._beat, name="apt-jax-beat", daemon=True).start()

    def _hear(self, rank: int, link: _Link) -> None:
        self._links = {**self._links, rank: link}
        threading.Thread(target=self._listen, args=(rank, link), name="apt-jax-host", daemon=True).start()  # fmt: skip

    def _beat(self) -> None:
        while not self._closing:
            self._tell(_BEAT)
            time.sleep(BEAT_S)

    def _tell(self, kind: bytes, text: str = "") -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):  # who listens to it notices
                link.send(kind, text.encode())

    def _listen(self, rank: int, link: _Link) -> None:
        try:
            link.limit(SILENCE_S)
            while True:
                kind, data = link.receive()
                if kind in (_FAIL, _REFUSE):
                    return self._lose(rank, one_line(data.decode("utf-8", "replace")), kind)
                if kind != _BEAT:
                    self._on_message(kind, data)
        except TimeoutError:
            self._lose(rank, f"{link.name} has said nothing for {SILENCE_S:g} s")
        except OSError:
            self._lose(rank, f"{link.name} has ended")
        finally:
            link.close()

    @abc.abstractmethod
    def _on_message(self, kind: bytes, data: bytes) -> None:
        """Neither a beat nor an end."""

    def _lose(self, rank: int, reason: str, told: bytes | None = None) -> None:
        """A rank is gone.

        Args:
            told: the message by which it said so itself.
        """
        del told
        if self._closing or not self._losing.acquire(blocking=False):
            return
        self._links = {r: link for r, link in self._links.items() if r != rank}
        self._tell(_FAIL, reason)
        self.on_lost(reason)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """An exception within is told to the other ranks, which end with its message."""
        try:
            yield
        except Exception as error:
            self._closing = True
            self._tell(_FAIL, f"{self._own_name}: {error}")
            raise

    def close(self) -> None:
        """No more is heard or said."""
        self._closing = True
        for link in self._links.values():
            link.close()


class Leader(Hosts):
    """Rank 0's side.

    Attributes:
        on_drain: called in a thread when another rank was asked to end.
    """

    def __init__(self, ours: ParallelConfig, settings: Mapping[str, str]) -> None:
        super().__init__("rank 0")
        self.on_drain: Callable[[], object] = lambda: None
        self._ours, self._settings = ours, settings
        self._meeting = threading.Condition()
        self._complete = False
        self._refusal: str | None = None

    # --- until all have joined

    def meet(self, server: socket.socket) -> None:
        """Wait for the other ranks; raises as `join`."""
        ours, until_s = self._ours, time.monotonic() + self._ours.join_timeout_s
        threading.Thread(target=self._accept, args=(server,), name="apt-jax-join", daemon=True).start()  # fmt: skip
        with self._meeting:
            self._meeting.wait_for(
                lambda: self._refusal or len(self._links) == ours.nnodes - 1,
                until_s - time.monotonic(),
            )
            self._complete = True
            if self._refusal is not None:
                self._give_up(_REFUSE, self._refusal)
                raise ConfigError(self._refusal)
            missing = [str(rank) for rank in range(1, ours.nnodes) if rank not in self._links]
        if missing:
            reason = (
                f"rank {', '.join(missing)} of {ours.nnodes} did not join at {ours.master_addr}:{ours.master_port} within "
                f"{ours.join_timeout_s:g} s; start it with this --master-addr and --master-port, or wait longer (--join-timeout)"
            )
            self._give_up(_FAIL, reason)
            raise HostError(reason)
        self._tell(_WELCOME)

    def _give_up(self, kind: bytes, reason: str) -> None:
        self._closing = True
        self._tell(kind, reason)
        self.close()

    def _accept(self, server: socket.socket) -> None:
        server.settimeout(None)
        with contextlib.suppress(OSError):  # it is closed when all are there
            while True:
                sock, (address, *_) = server.accept()
                threading.Thread(target=self._admit, args=(_Link(sock, str(address)),), name="apt-jax-hello", daemon=True).start()  # fmt: skip

    def _admit(self, link: _Link) -> None:
        address = link.name
        try:
            link.limit(_HELLO_S)
            kind, data = link.receive(_MAX_HELLO, time.monotonic() + _HELLO_S)
            hello: Any = json.loads(data) if kind == _HELLO else None
            rank, host = int(hello["rank"]), one_line(str(hello["host"]))[:80]
            theirs = {str(k): str(v) for k, v in dict(hello["settings"]).items()}
        except Exception:  # whatever a stranger says
            logger.warning("%s is at --master-port and is no rank of apt-jax", address)
            return link.close()
        link.name = f"rank {rank} ({host}, {address})"
        with self._meeting:
            if self._complete or rank in self._links or not 1 <= rank < self._ours.nnodes:
                why = f"there are ranks 1 to {self._ours.nnodes - 1}" if not 1 <= rank < self._ours.nnodes else "another process is that rank"  # fmt: skip
                with contextlib.suppress(OSError):
                    link.send(_FAIL, f"node_rank={rank} is not free: {why} (--node-rank)".encode())
                return link.close()
            logger.info("%s joined", link.name)
            self._hear(rank, link)
            self._refusal = self._refusal or _difference(link.name, theirs, self._settings)
            self._meeting.notify_all()

    def _lose(self, rank: int, reason: str, told: bytes | None = None) -> None:
        with self._meeting:
            if not self._complete:
                logger.warning("%s; its place is free again", reason)
                self._links = {r: link for r, link in self._links.items() if r != rank}
                return
        super()._lose(rank, reason, told)

    # --- from then on

    def announce(self, plan: Plan) -> None:
        """Have the other ranks make a call; to be called right before it is made here."""
        data = plan.encode()
        for rank, link in self._links.items():
            try:
                link.send(_PLAN, data)
            except OSError:
                self._lose(rank, f"{link.name} has ended")
                raise

    def _on_message(self, kind: bytes, data: bytes) -> None:
        del data
        if kind == _DRAIN:
            self.on_drain()

    def end(self) -> None:
        """The end, as it should be: the other ranks end with exit code 0."""
        self._closing = True
        self._tell(_END)
        self.close()


class Follower(Hosts):
    """Another rank's side."""

    def __init__(self, ours: ParallelConfig, settings: Mapping[str, str], link: _Link) -> None:
        super().__init__(f"rank {ours.node_rank} ({socket.gethostname()})")
        self._plans: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._follows = False
        self._welcome: queue.SimpleQueue[AptJaxError | None] = queue.SimpleQueue()
        self._is_in = False
        hello = {"rank": ours.node_rank, "host": socket.gethostname(), "settings": dict(settings)}
        with contextlib.suppress(OSError):  # it is noticed when nothing comes back
            link.send(_HELLO, json.dumps(hello).encode())
        self._hear(0, link)

    def meet(self) -> None:
        """Wait until all ranks are there; raises as `join`."""
        error = self._welcome.get()  # rank 0 ends the wait for those that do not come
        if error is not None:
            self.close()
            raise error

    def _lose(self, rank: int, reason: str, told: bytes | None = None) -> None:
        if self._is_in:
            return super()._lose(rank, reason, told)
        if told is None:
            reason += (
                " before all ranks had joined, or is no apt-jax (--master-addr, --master-port)"
            )
        self._welcome.put(ConfigError(reason) if told == _REFUSE else HostError(reason))

    def ask_to_drain(self) -> None:
        """Tell rank 0 that this rank was asked to end."""
        self._tell(_DRAIN)

    def plans(self) -> Iterator[Plan]:
        """What to run, until rank 0 ends."""
        self._follows = True
        while (data := self._plans.get()) is not None:
            yield Plan.decode(data)

    def _on_message(self, kind: bytes, data: bytes) -> None:
        if kind == _PLAN:
            self._plans.put(data)
        elif kind == _WELCOME:
            self._is_in = True
            self._welcome.put(None)
        elif kind == _END:
            self._closing = True
            if not self._follows:  # rank 0 was stopped while models are loaded
                sys.stdout.flush()
                os._exit(0)
            self._plans.put(None)
        else:
            raise OSError("no message of apt-jax")


def join(config: EngineConfig, model: ModelConfig, resolved: "ResolvedModel") -> Leader | Follower:
    """Meet the other ranks and join their devices into one JAX. To be called before JAX has touched a device.

    Raises:
        ConfigError: on every rank that came, where one has other flags, another model or another version.
        HostError: on every rank that came, where one did not, or has gone.
    """
    ours = config.parallel
    settings = _settings(config, model, resolved)
    hosts = _lead(ours, settings) if ours.node_rank == 0 else _follow(ours, settings)
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    with hosts.telling():
        try:
            jax.distributed.initialize(
                f"{ours.master_addr}:{ours.master_port + 1}",
                ours.nnodes,
                ours.node_rank,
                cluster_detection_method="deactivate",  # a process has all devices of its host
                initialization_timeout=60,
                heartbeat_timeout_seconds=int(2 * SILENCE_S),
                coordinator_bind_address=f"{ours.master_addr}:{ours.master_port + 1}",
            )
        except RuntimeError as error:
            raise HostError(
                f"JAX cannot join the hosts at port {ours.master_port + 1}, the one after --master-port: {one_line(str(error))[:200]}"
            ) from error
    return hosts


def _settings(
    config: EngineConfig, model: ModelConfig, resolved: "ResolvedModel"
) -> dict[str, str]:
    """All that ranks must have alike, by name."""

    def flat(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for key, item in value.items():
            if isinstance(item, dict):
                yield from flat(item, f"{prefix}{key}.")
            elif prefix + key not in _NOT_COMPARED:
                yield prefix + key, repr(item)

    settings = {"version of apt-jax": __version__}
    settings |= {f"version of {name}": version(name) for name in ("jax", "jaxlib")}
    settings |= dict(flat(dataclasses.asdict(config), ""))
    settings |= dict(flat(dataclasses.asdict(model), "model."))
    if config.load_format != "dummy" and resolved.path is not None:
        settings["model.format"] = resolved.format
        settings["model.weights"] = _fingerprint(resolved.path)
    return settings


def _fingerprint(path: Path) -> str:
    """Of a model's weights: sizes of the files, and a few bytes from the middle of each. Orbax's have other names on every machine."""
    files = [path] if path.is_file() else sorted(f for f in path.glob("*.*") if f.suffix in (".safetensors", ".bin", ".gguf"))  # fmt: skip
    digest = hashlib.sha256((path / "orbax.json").read_bytes() if (path / "orbax.json").is_file() else b"")  # fmt: skip
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as opened:
            opened.seek(size // 2)
            digest.update(size.to_bytes(8, "little") + opened.read(4096))
    return digest.hexdigest()[:16]


def _difference(rank: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str | None:
    """In one line; None: there is none."""
    for name in {**ours, **theirs}:
        a, b = ours.get(name), theirs.get(name)
        if a == b:
            continue
        if a is None or b is None:
            return f"{rank} is of another version of apt-jax, or has another kind of model"
        what, advice = name.rpartition(".")[2], "give all ranks the same flags"
        if name.startswith("version"):
            what, advice = name, "install the same on all hosts"
        elif name.startswith("model."):
            what, advice = f"the model's {name[6:]}", "give all ranks the same model"
        return f"{rank} has {what} {b:.60}, rank 0 has {a:.60}; {advice}"
    return None


def _lead(ours: ParallelConfig, settings: Mapping[str, str]) -> Leader:
    with contextlib.closing(_listening(ours, 1, "the port after --master-port")):
        pass  # JAX takes it when all are there
    with contextlib.closing(_listening(ours, 0, "--master-addr, --master-port")) as server:
        logger.info("rank 0 waits at %s:%d for %d other ranks", ours.master_addr, ours.master_port, ours.nnodes - 1)  # fmt: skip
        leader = Leader(ours, settings)
        try:
            leader.meet(server)
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    return leader


def _listening(ours: ParallelConfig, offset: int, flags: str) -> socket.socket:
    host, port = ours.master_addr, ours.master_port + offset
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"rank 0 cannot listen on {host}:{port}: {error.strerror or error} ({flags})") from None  # fmt: skip
    found = server.getsockname()[0]
    if ipaddress.ip_address(found).is_loopback and host != "localhost" and not _is_address(host):
        server.close()
        raise ConfigError(
            f"{host} is {found} on this host, where no other can reach it; give the address of its network (--master-addr)"
        )
    return server


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _follow(ours: ParallelConfig, settings: Mapping[str, str]) -> Follower:
    where = (ours.master_addr, ours.master_port)
    name = f"rank 0 at {where[0]}:{where[1]}"
    until_s = time.monotonic() + ours.join_timeout_s
    while True:
        try:
            sock = socket.create_connection(where, timeout=_HELLO_S)
            break
        except OSError as error:
            if time.monotonic() > until_s:
                raise HostError(
                    f"rank {ours.node_rank} cannot reach {name} within {ours.join_timeout_s:g} s: "
                    f"{error.strerror or error}; is it started? (--master-addr, --master-port, --join-timeout)"
                ) from None
            time.sleep(0.5)
    follower = Follower(ours, settings, _Link(sock, name))
    follower.meet()
    return follower


class StepError(AptJaxError):
    """What rank 0 had this rank run has failed."""


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
