"""Random faults in a fleet under load: two replicas behind the gateway, a proxy on every link, a ledger of all requests.

Faults are drawn from a seed: links delay, lose, trickle, hold, cut, reset and refuse; replicas are frozen, killed,
drained, and run out of descriptors, memory and disk; the gateway is killed. Every request must be answered once as
offline, be refused, or end with an error that says so; what is healed must serve; nothing may be left at the end.
"""

import argparse
import collections
import contextlib
import dataclasses
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from apt_jax.utils.cache_dir import cache_dir
from benchmarks.server.faulty_proxy import Condition, FaultyProxy
from benchmarks.server.fleet import Fleet, until
from benchmarks.server.ledger import Entry, Expected, Outcome, ask, audit, differences
from benchmarks.server.offline import Offline
from benchmarks.server.protocols import LoadRequest
from benchmarks.server.report import Run, progress

HEALED_S = 30.0
"""Maximum time until a healed fleet serves, under load."""
_BACK_S = 300.0
"""Maximum time until a process that was killed is back: the launcher waits up to a minute, and models load."""
_TOO_LONG = 10**6
_FREE_BYTES = 64 << 20
"""Left on the small disk for what the replicas write."""
_SLACK_FDS = 8
"""Descriptors that a process may have more than when it began: connections of the gateway."""
_WORDS = ("shall", "compare", "thee", "summer", "day", "lovely", "temperate", "rough", "winds", "shake", "darling",
          "buds", "May", "lease", "date", "hot", "eye", "heaven", "shines", "gold", "complexion", "dimmed")  # fmt: skip

Undo = Callable[[], None]


@dataclasses.dataclass(kw_only=True)
class Findings:
    """Result of a storm."""

    faults: dict[str, int]
    entries: list[Entry]
    problems: list[str]
    """Violations of any promise on answers."""
    repeated: int
    """Requests executed to the end more than once, or though they were refused, all of them while something was at
    fault."""
    healing_s: list[float]
    """From the end of each fault to the first whole answer."""
    unhealed: list[str]
    """Faults after which there was none in time."""
    ends: dict[str, int]
    """Processes that ended, by how."""
    wrong_ends: list[str]
    """Processes that ended with code 0 though nobody had asked them to."""
    idle_after_s: float | None
    """Time until all blocks were free at the end; None: never."""
    descriptors: dict[str, tuple[int, int]]
    """At the beginning and at the end, by process."""


class Storm:
    """Load and faults for one fleet.

    Args:
        fleet: ready.
        bodies: requests, of `POST /v1/completions`.
        answers: offline answers to them.
        seed: of everything that is drawn.
        num_clients: closed loops of requests.
        disk: directory of a small file system that the replicas cache files on; None: no fault of disks.
    """

    def __init__(
        self, fleet: Fleet, bodies: Sequence[Mapping[str, Any]], answers: Sequence[Expected], *, seed: int,
        num_clients: int = 6, disk: Path | None = None,
    ) -> None:  # fmt: skip
        self.fleet, self.bodies, self.answers, self.disk = fleet, bodies, answers, disk
        self.entries: list[Entry] = []
        self._random = random.Random(seed)
        self._seed, self._num_clients = seed, num_clients
        self._disturbed: list[tuple[float, float]] = []
        self._stopping = threading.Event()
        self._asked_to_end = 0
        """SIGTERM sent to replicas."""

    def run(self, kinds: Sequence[str], reached: Callable[[float], None] = lambda _: None) -> Findings:
        """Run one fault after the other under load.

        Args:
            kinds: names in `FAULTS`, in order.
            reached: called with the number of faults so far.
        """
        found = Findings(
            faults=dict(collections.Counter(kinds)), entries=self.entries, problems=[], repeated=0, healing_s=[], unhealed=[],
            ends={}, wrong_ends=[], idle_after_s=None, descriptors={},
        )  # fmt: skip
        before = self._descriptors()
        clients = [threading.Thread(target=self._client, args=(i,), daemon=True) for i in range(self._num_clients)]
        for client in clients:
            client.start()
        for number, kind in enumerate(kinds):
            began_s = time.time()
            FAULTS[kind](self)()
            healed_s = self._healing_s(number)
            self._disturbed.append((began_s, time.time()))
            if healed_s is None:
                found.unhealed.append(kind)
            else:
                found.healing_s.append(healed_s)
            reached(number + 1)
        self._stopping.set()
        for client in clients:
            client.join(300)
        if until(self._all_serve, _BACK_S) is None:
            found.unhealed.append("a replica is not back")
        found.idle_after_s = until(self.fleet.is_idle, 30)
        self._check(found)
        after: dict[str, int] = {}

        def flat() -> bool:
            after.update(self._descriptors())
            return all(after.get(name, 0) <= count + _SLACK_FDS for name, count in before.items())

        until(flat, 45, pause_s=0.5)  # the gateway closes silent connections after 30 s
        found.descriptors = {name: (count, after.get(name, -1)) for name, count in before.items()}
        return found

    # --- load ----------------------------------------------------------------------------------------------------

    def _client(self, number: int) -> None:
        drawn = random.Random(f"{self._seed} {number}")
        turn = 0
        while not self._stopping.is_set():
            which = drawn.randrange(len(self.bodies))
            body = dict(self.bodies[which])
            if drawn.random() < 0.1:
                body["max_tokens"] = _TOO_LONG  # refused for what it is
            entry = ask(
                self.fleet.front.port, body, request_id=f"chaos-{number}-{turn}", number=which,
                stream=drawn.random() < 0.75, timeout_s=60.0,
            )  # fmt: skip
            self.entries.append(entry)
            turn += 1
            time.sleep(drawn.uniform(0.0, 0.2) if entry.outcome is Outcome.OK else 0.2)

    def _healing_s(self, number: int) -> float | None:
        """Return the time until a request is answered after a fault; None: it was not, though a replica serves and the
        gateway runs."""
        if until(lambda: self._has_a_replica() and self.fleet.gateway() is not None, _BACK_S) is None:
            return None
        turn = 0

        def serves() -> bool:
            nonlocal turn
            turn += 1
            entry = ask(
                self.fleet.front.port, self.bodies[0], request_id=f"probe-{number}-{turn}", stream=False, timeout_s=10.0
            )
            self.entries.append(entry)
            return entry.outcome is Outcome.OK

        return until(serves, HEALED_S, pause_s=0.1)

    def _has_a_replica(self) -> bool:
        return any(map(self.fleet.is_serving, range(len(self.fleet.ports))))

    def _all_serve(self) -> bool:
        return all(map(self.fleet.is_serving, range(len(self.fleet.ports))))

    # --- checks --------------------------------------------------------------------------------------------------

    def _check(self, found: Findings) -> None:
        for entry in self.entries:
            found.problems += differences(entry, self.answers[entry.number])
        violations, found.repeated = audit(self.entries, self.fleet.executions(), self._disturbed)
        found.problems += violations
        ends = self.fleet.ends()
        found.ends = dict(collections.Counter(f"{name.split()[0]}: {how}" for name, how in ends))
        clean = [name for name, how in ends if how == "0"]
        if len(clean) > self._asked_to_end:
            found.wrong_ends = clean

    def _descriptors(self) -> dict[str, int]:
        named = {"launcher": self.fleet.launcher, "gateway": self.fleet.gateway()}
        named |= {f"replica {i}": self.fleet.replica(i) for i in range(len(self.fleet.ports))}
        counts = {}
        for name, process in named.items():
            with contextlib.suppress(psutil.Error):
                if process is not None:
                    counts[name] = process.num_fds()
        return counts

    # --- faults --------------------------------------------------------------------------------------------------

    def last(self, least_s: float, most_s: float) -> None:
        """Let a fault last for a while."""
        time.sleep(self._random.uniform(least_s, most_s))

    def link(self) -> FaultyProxy:
        return self._random.choice([self.fleet.front, *self.fleet.links])

    def replica(self) -> tuple[int, psutil.Process | None]:
        number = self._random.randrange(len(self.fleet.ports))
        return number, self.fleet.replica(number)

    def under(self, condition: Callable[[random.Random], Condition], most_s: float = 2.5) -> Undo:
        """Put a link under a condition for a while; returns what heals it."""
        link = self.link()
        drawn = condition(self._random)
        link.set(drawn)
        if drawn.refuses:
            link.reset()
        self.last(0.3, most_s)

        def heal() -> None:
            if self._random.random() < 0.5:  # what was held is lost
                link.reset()
            link.heal()

        return heal

    def signal_replica(self, number: signal.Signals) -> None:
        _, process = self.replica()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                self._asked_to_end += number is signal.SIGTERM

    def limit(self, name: int, wanted: Callable[[psutil.Process], int], during: Callable[[int], None]) -> Undo:
        """Lower a resource limit of a replica for a while; returns what restores it."""
        number, process = self.replica()
        if process is None:
            return _nothing
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            old = resource.prlimit(process.pid, name)
            resource.prlimit(process.pid, name, (wanted(process), old[1]))
            during(number)

            def restore() -> None:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(process.pid, name, old)

            return restore
        return _nothing


def _nothing() -> None:
    pass


def _reset(storm: Storm) -> Undo:
    storm.link().reset()
    storm.last(0.0, 0.5)
    return _nothing


def _freeze(storm: Storm) -> Undo:
    _, process = storm.replica()
    if process is None:
        return _nothing
    with contextlib.suppress(psutil.NoSuchProcess):
        process.suspend()
    storm.last(0.5, 6.0)

    def thaw() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()

    return thaw


def _kill(storm: Storm) -> Undo:
    storm.signal_replica(signal.SIGKILL)
    storm.last(0.0, 1.0)
    return _nothing


def _terminate(storm: Storm) -> Undo:
    storm.signal_replica(signal.SIGTERM)
    storm.last(0.0, 1.0)
    return _nothing


def _kill_gateway(storm: Storm) -> Undo:
    gateway = storm.fleet.gateway()
    with contextlib.suppress(psutil.NoSuchProcess):
        if gateway is not None:
            gateway.kill()
    storm.last(0.0, 1.0)
    return _nothing


def _hang_up(storm: Storm) -> Undo:
    storm.fleet.launcher.send_signal(signal.SIGHUP)
    storm.last(0.0, 0.5)
    return _nothing


def _few_descriptors(storm: Storm) -> Undo:
    def connect(number: int) -> None:
        with contextlib.ExitStack() as held:
            for _ in range(20):
                with contextlib.suppress(OSError):
                    held.enter_context(socket.create_connection(("127.0.0.1", storm.fleet.ports[number]), timeout=1.0))
            storm.last(0.5, 2.5)

    return storm.limit(resource.RLIMIT_NOFILE, lambda process: process.num_fds() + 4, connect)


def _little_memory(storm: Storm) -> Undo:
    more = storm._random.choice([1 << 20, 8 << 20, 64 << 20])
    return storm.limit(
        resource.RLIMIT_AS, lambda process: process.memory_info().vms + more, lambda _: storm.last(0.5, 2.5)
    )


def _full_disk(storm: Storm) -> Undo:
    """A replica starts while nothing can be written to its cache."""
    if storm.disk is None:
        return storm.limit(resource.RLIMIT_FSIZE, lambda _: 0, lambda _: storm.last(0.5, 2.5))
    filler = storm.disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
    storm.signal_replica(signal.SIGKILL)
    storm.last(2.0, 5.0)

    def empty() -> None:
        filler.unlink(missing_ok=True)

    return empty


FAULTS: dict[str, Callable[[Storm], Undo]] = {
    "delay": lambda s: s.under(lambda r: Condition(delay_s=r.uniform(0.05, 0.5))),
    "loss": lambda s: s.under(lambda r: Condition(loss=r.uniform(0.1, 0.5))),
    "trickle": lambda s: s.under(lambda _: Condition(bytes_per_s=1.0)),
    "half-open": lambda s: s.under(lambda _: Condition(half_open=True), most_s=6.0),
    "cut after bytes": lambda s: s.under(lambda r: Condition(cut_after=r.randrange(4000))),
    "refuse": lambda s: s.under(lambda _: Condition(refuses=True)),
    "reset": _reset,
    "freeze replica": _freeze,
    "kill replica": _kill,
    "drain replica": _terminate,
    "kill gateway": _kill_gateway,
    "reload": _hang_up,
    "few descriptors": _few_descriptors,
    "little memory": _little_memory,
    "full disk": _full_disk,
}
"""Kinds of faults: each makes one, lets it last, and returns what ends it."""

_RARE = {"kill replica": 0.5, "drain replica": 0.5, "kill gateway": 0.4, "full disk": 0.3, "reload": 0.5}
"""Weights of faults after which a process has to start; of the others: 1."""


def draw(count: int, seed: int, kinds: Sequence[str] = tuple(FAULTS)) -> list[str]:
    """Draw faults: every kind in proportion to its weight, at least once if there are enough, in random order."""
    drawn = random.Random(seed)
    rest = max(0, count - len(kinds))
    found = [*kinds, *drawn.choices(kinds, [_RARE.get(kind, 1.0) for kind in kinds], k=rest)]
    drawn.shuffle(found)
    return found[:count]


# --- the run -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faults", type=int, default=200, help="number of faults (default: 200)")
    parser.add_argument("--clients", type=int, default=6, help="concurrent clients (default: 6)")
    parser.add_argument("--requests", type=int, default=60, help="number of different requests (default: 60)")
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS), help="kinds (default: all)")


def run(args: argparse.Namespace) -> Run:
    found = Run("chaos", args)
    engine = args.engine_flags or list(_SMALL)
    requests, texts = _requests(args.requests, args.seed)
    with Offline(args.model, engine) as offline:
        ids = offline.encode(texts)
        requests = [dataclasses.replace(r, prompt_ids=i) for r, i in zip(requests, ids, strict=True)]
        kept, answers = offline.answers(requests)
    by_ids = dict(zip(ids, texts, strict=True))
    bodies = [{"model": "chaos", "prompt": by_ids[r.prompt_ids], **r.params} for r in kept]
    with _small_disk() as disk:
        env = {} if disk is None else {"APT_JAX_CACHE_DIR": str(_copy_of_cache(disk)), "TMPDIR": str(disk)}
        flags = [
            args.model,
            *engine,
            *args.server_flags,
            "--calibration-time=0",
            "--served-model-name=chaos",
            "--max-restarts=1000",
        ]
        with Fleet(flags, env=env, seed=args.seed) as fleet, progress("chaos", args.faults, "fault") as bar:
            storm = Storm(fleet, bodies, answers, seed=args.seed, num_clients=args.clients, disk=disk)
            shown = storm.run(draw(args.faults, args.seed, args.kinds), bar)
            code = fleet.terminate(120)
            orphans = [p.pid for p in fleet.orphans()]
            if shown.problems or shown.unhealed:
                found.values["log"] = fleet.lines[-2000:]
    found.values["versions_of"] = {name: _version(name) for name in ("smg", "grpcio")}
    report(found, shown, code, orphans)
    return found


_SMALL = ("--max-num-seqs=4", "--max-num-batched-tokens=64", "--max-model-len=512", "--num-blocks-override=256",
          "--max-num-queued-reqs=4")  # fmt: skip
"""A small engine, whose queue fills."""


def report(found: Run, shown: Findings, code: int, orphans: Sequence[int]) -> None:
    """Add the promises and figures of a storm."""
    outcomes = collections.Counter(entry.outcome.value for entry in shown.entries)
    statuses = collections.Counter(entry.status for entry in shown.entries if entry.outcome is Outcome.REFUSED)
    found.values |= {
        "faults": shown.faults, "requests": len(shown.entries), "outcomes": dict(outcomes),
        "refused_by_status": {str(status): count for status, count in statuses.items()},
        "executed_again_under_faults": shown.repeated, "healing_s": sorted(shown.healing_s), "ends": shown.ends,
        "descriptors": shown.descriptors, "problems": shown.problems, "unhealed": shown.unhealed,
    }  # fmt: skip
    found.promise(
        "every answer equals the offline one, or is its beginning and says that it is not whole; nothing runs twice without a fault",
        not shown.problems, shown.problems[:5] or f"{len(shown.entries)} requests: {dict(outcomes)}",
    )  # fmt: skip
    worst_s = max(shown.healing_s, default=0.0)
    found.promise(
        f"a healed fleet serves within {HEALED_S:g} s",
        not shown.unhealed, shown.unhealed or f"{len(shown.healing_s)} times, at most {worst_s:.1f} s",
    )  # fmt: skip
    found.promise("all blocks are free at the end", shown.idle_after_s is not None, shown.idle_after_s)
    found.promise("who dies has an exit code other than 0", not shown.wrong_ends, shown.wrong_ends or shown.ends)
    more = {name: (a, b) for name, (a, b) in shown.descriptors.items() if not 0 <= b <= a + _SLACK_FDS}
    found.promise("descriptors are back", not more, more or shown.descriptors)
    found.promise("SIGTERM ends the launcher with 0 and leaves no process", code == 0 and not orphans, (code, orphans))


def _requests(count: int, seed: int) -> tuple[list[LoadRequest], list[str]]:
    """Requests with different prompts of plain words, half of them greedy, half with a seed."""
    drawn = random.Random(seed)
    texts = [" ".join([f"{i}", *drawn.choices(_WORDS, k=drawn.randint(3, 40))]) for i in range(count)]
    requests = []
    for number in range(count):
        params = {"max_tokens": drawn.randint(4, 96), "ignore_eos": True, "temperature": 0.0}
        if number % 2:
            params |= {"temperature": 0.75, "top_p": 0.9375, "seed": number}
        requests.append(LoadRequest(prompt_ids=(), params=params))
    return requests, texts


def _copy_of_cache(disk: Path) -> Path:
    """A cache directory on the disk with what earlier runs have compiled, as far as it leaves space."""
    copy = disk / "cache"
    copy.mkdir(mode=0o700)
    for name in ("kernels", "compiled"):
        source = cache_dir() / name
        (copy / name).mkdir(mode=0o700)
        files = sorted(source.iterdir(), key=lambda path: -path.stat().st_mtime) if source.is_dir() else []
        for path in files:
            if path.is_file() and shutil.disk_usage(disk).free > path.stat().st_size + _FREE_BYTES:
                shutil.copy2(path, copy / name)
    return copy


@contextlib.contextmanager
def _small_disk(mib: int = 512) -> Iterator[Path | None]:
    """Mount a small file system; None where that is not allowed."""
    with tempfile.TemporaryDirectory() as directory:
        options = f"size={mib}m,mode=700"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            yield None
            return
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "-l", directory], check=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
