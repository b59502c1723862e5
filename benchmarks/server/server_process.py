"""Server process: `apt-jax serve` on free ports, its resource use and its statistics."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import psutil

from serve.client import AptClient
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 600.0
_TAIL_CHARS = 4000


class Server:
    """A running `apt-jax serve`, once it is ready.

    Args:
        model: see `apt-jax serve`.
        flags: further flags.
        crash_on_signal: SIGUSR1 ends the thread of its engine (`benchmarks.server.crash_on_signal`).
        cores: the cores that it may run on; None: all of them.
        early: it serves before it has prepared everything, and logs when it has.
        cache_dir: its cache directory; None: the usual one.

    Raises:
        RuntimeError: it did not start; the message has the end of its log.
    """

    def __init__(
        self,
        model: str,
        flags: Sequence[str] = (),
        *,
        crash_on_signal: bool = False,
        cores: Sequence[int] | None = None,
        early: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        module = "benchmarks.server.crash_on_signal" if crash_on_signal else "serve.cli"
        self.flags = tuple(flags)
        command = [
            sys.executable,
            "-m",
            module,
            "serve",
            model,
            "--port",
            "0",
            "--grpc-port",
            "0",
            "--log-level",
            "info" if early else "warning",
            *([] if early else ["--set", "early_start=false"]),
            *flags,
        ]
        if cores is not None:
            command = ["taskset", "-c", ",".join(map(str, cores)), *command]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, cwd=ROOT, text=True,
            env={**os.environ, "PYTHONPATH": path, **({} if cache_dir is None else {"APT_JAX_CACHE_DIR": cache_dir})},
        )  # fmt: skip
        try:
            self.http, self.grpc = self._addresses()
            self.usage = psutil.Process(self._process.pid)
        except BaseException:
            self.close()
            raise

    def _addresses(self) -> tuple[str, str]:
        assert self._process.stdout is not None
        started_s = time.monotonic()
        for line in self._process.stdout:
            if line.startswith("serving "):
                words = line.split(" on ", 1)[1].split()
                return words[3], words[0]
            if time.monotonic() - started_s > _START_TIMEOUT_S:
                break
        raise RuntimeError(f"the server did not start: {self.log()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """Return the end of its standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_TAIL_CHARS:]

    def until_said(self, text: str, timeout_s: float) -> None:
        """Wait until its log has a text; at most `timeout_s`.

        Raises:
            TimeoutError: it has not.
        """
        deadline_s = time.monotonic() + timeout_s
        while text not in self.log():
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise TimeoutError(f"the server has not said {text!r}: {self.log()}")
            time.sleep(0.2)

    def rss_mib(self) -> float:
        """Return the resident memory in MiB."""
        return self.usage.memory_info().rss / 2**20

    def num_descriptors(self) -> int:
        """Return the number of open file descriptors."""
        return self.usage.num_fds()

    def num_threads(self) -> int:
        return self.usage.num_threads()

    def cpu_s(self) -> float:
        """Return the CPU time of all its threads so far."""
        times = self.usage.cpu_times()
        return times.user + times.system

    def loop_cpu_s(self) -> float:
        """Return the CPU time of its event loop thread, which serves the endpoints but does not run the engine."""
        main = next(thread for thread in self.usage.threads() if thread.id == self.pid)
        return main.user_time + main.system_time

    def stats(self) -> pb.GetStatsResponse:
        """Return the engine's counters and gauges."""
        with AptClient(self.grpc) as client:
            return client.stats(30.0)

    def get(self, path: str, timeout_s: float = 5.0) -> int:
        """Return the HTTP status of a path, over a new connection; 0: no answer."""
        connection = http.client.HTTPConnection(self.http, timeout=timeout_s)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def grpc_serving(self, timeout_s: float = 5.0) -> bool:
        """Return the status of gRPC health checking; False also when there is no answer."""
        try:
            with AptClient(self.grpc) as client:
                return client.is_serving(timeout_s=timeout_s)
        except grpc.RpcError:
            return False

    def until_idle(self, timeout_s: float = 60.0) -> pb.GetStatsResponse:
        """Wait until no request is left, at most `timeout_s`; return the last statistics."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            stats = self.stats()
            left = stats.num_waiting + stats.num_running + stats.num_ending
            if not left or time.monotonic() > deadline_s:
                return stats
            time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit code; None: it has not ended in time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Kill it if it still runs, and delete its log."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        with contextlib.suppress(OSError):
            self._log.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
