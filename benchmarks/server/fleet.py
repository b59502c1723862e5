"""`apt-jax launch` as a process with a faulty proxy on every link: clients to gateway, gateway to each replica."""

import contextlib
import dataclasses
import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.server.faulty_proxy import FaultyProxy
from serve.client import AptClient
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ("-m", "benchmarks.server.proxied_launch")
_ENDED = re.compile(r"(replica \d+|gateway) (?:was killed by (SIG\w+)|exited with code (-?\d+))")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """A request that a replica has had, from its log: a replica that is killed logs nothing of its last ones."""

    request_id: str
    reason: str
    """"length", "stop", "cancelled", or the name of an error."""
    output_tokens: int
    started_s: float
    """`time.time`."""

    @property
    def is_complete(self) -> bool:
        return self.reason in ("length", "stop")


class Fleet:
    """A launcher, its replicas and its gateway, ready; a context that leaves no process behind.

    Args:
        flags: of `apt-jax launch`, the model among them, without ports.
        script: Python's arguments that run the launcher; it must heed $PROXY_PORTS.
        num_replicas: number of replicas.
        env: further environment.
        seed: of the proxies.
        timeout_s: time to become ready.

    Attributes:
        front: proxy between clients and the gateway.
        links: proxies between the gateway and the replicas.

    Raises:
        RuntimeError: it did not become ready; the message has the end of its log.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        script: Sequence[str] = LAUNCH,
        num_replicas: int = 2,
        env: dict[str, str] | None = None,
        seed: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        self.ports = _free_ports(num_replicas)
        self.links = [FaultyProxy(port, seed + i) for i, port in enumerate(self.ports)]
        self._lines: list[str] = []
        self._family: set[psutil.Process] = set()
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.launcher = psutil.Popen(
            [
                sys.executable, *script, *flags, f"--replicas={num_replicas}", "--port=0", f"--grpc-port={self.ports[0]}",
                "--log-format=json", "--log-level=info",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, text=True, start_new_session=True,
            env={
                **os.environ, "PYTHONPATH": python_path, **(env or {}),
                "PROXY_PORTS": ",".join(str(link.port) for link in self.links),
            },
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait_ready(timeout_s)
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        for line in self.launcher.stdout:
            self._lines.append(line)

    def _wait_ready(self, timeout_s: float) -> None:
        ends_s = time.monotonic() + timeout_s
        while not (line := next((x for x in self.lines if x.startswith("listening on ")), None)):
            if self.launcher.poll() is not None or time.monotonic() > ends_s:
                raise RuntimeError(f"the fleet did not start: {''.join(self.lines)[-4000:]}")
            time.sleep(0.05)
        self.gateway_port = int(line.split(" (HTTP) over")[0].rsplit(":", 1)[1])
        self.front = FaultyProxy(self.gateway_port)
        self.family()

    # --- processes -----------------------------------------------------------------------------------------------

    def family(self) -> set[psutil.Process]:
        """All processes that the launcher has started, as far as they were seen here."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family.update(self.launcher.children(recursive=True))
        return self._family

    def replica(self, number: int) -> psutil.Process | None:
        """The process of a replica; None: it is away."""
        return self._running(f"--grpc-port={self.ports[number]}")

    def gateway(self) -> psutil.Process | None:
        """The process of the gateway; None: it is away."""
        return self._running("smg")

    def _running(self, argument: str) -> psutil.Process | None:
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                # The gateway changes its command line to one like `smg::router`.
                if process.status() != psutil.STATUS_ZOMBIE and any(x.startswith(argument) for x in process.cmdline()):
                    return process
        return None

    def orphans(self) -> list[psutil.Process]:
        """Processes of the fleet that still run."""
        return [p for p in self._family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def terminate(self, timeout_s: float = 200.0) -> int:
        """SIGTERM; returns the exit code of the launcher.

        Raises:
            psutil.TimeoutExpired: it has not ended in time.
        """
        self.family()
        self.launcher.send_signal(signal.SIGTERM)
        return self.launcher.wait(timeout_s)

    def close(self) -> None:
        """Kill what still runs."""
        family = self.family()
        for process in (self.launcher, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.launcher.wait(30)
        self._reader.join(5)
        self.launcher.stdout.close()
        for proxy in (*self.links, *([self.front] if hasattr(self, "front") else [])):
            proxy.close()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what it says --------------------------------------------------------------------------------------------

    @property
    def lines(self) -> list[str]:
        """Return all lines of its output so far."""
        return list(self._lines)

    def records(self) -> list[dict[str, Any]]:
        """Return the JSON objects of its log so far."""
        found = []
        for line in self.lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    found.append(record)
        return found

    def executions(self) -> list[Execution]:
        """Return the requests that replicas have ended, by their logs."""
        found = []
        for record in self.records():
            if record.get("request_id") and "duration_ms" in record:
                ended_s = datetime.datetime.fromisoformat(record["timestamp"]).timestamp()
                found.append(
                    Execution(
                        request_id=record["request_id"], reason=record.get("reason") or "",
                        output_tokens=record.get("output_tokens") or 0, started_s=ended_s - record["duration_ms"] / 1e3,
                    )
                )  # fmt: skip
        return found

    def ends(self) -> list[tuple[str, str]]:
        """Return which processes ended by themselves, and how: a signal or an exit code."""
        messages = [str(record.get("message")) for record in self.records()]
        return [(m[1], m[2] or m[3]) for text in messages for m in _ENDED.finditer(text)]

    def says(self, text: str) -> int:
        """Return in how many lines of its output a text stands."""
        return sum(text in line for line in self.lines)

    def stats(self, number: int, timeout_s: float = 5.0) -> pb.GetStatsResponse | None:
        """Return the counters of a replica, asked directly; None: it does not answer."""
        with AptClient(f"127.0.0.1:{self.ports[number]}") as client:
            try:
                return client.stats(timeout_s)
            except grpc.RpcError:
                return None

    def is_serving(self, number: int) -> bool:
        """Return whether a replica, asked directly, says that it takes requests."""
        with AptClient(f"127.0.0.1:{self.ports[number]}") as client:
            try:
                return client.is_serving(timeout_s=1.0)
            except grpc.RpcError:
                return False

    def is_idle(self) -> bool:
        """Return whether all replicas answer, run nothing and have all blocks free."""
        return all(
            stats is not None
            and not (stats.num_waiting or stats.num_running or stats.num_ending)
            and stats.free_blocks == stats.total_blocks
            for stats in map(self.stats, range(len(self.ports)))
        )


def until(condition: Callable[[], Any], timeout_s: float, pause_s: float = 0.05) -> float | None:
    """Wait for a condition; returns the seconds it took, or None if it did not come true in time."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > timeout_s:
            return None
        time.sleep(pause_s)
    return time.monotonic() - started_s


def _free_ports(count: int) -> list[int]:
    """Consecutive ports that are free now."""
    while True:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return list(range(first, first + count))
