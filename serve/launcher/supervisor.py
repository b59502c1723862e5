"""Supervises the replicas and the gateway of `apt-jax launch`.

1. All replicas are started; the gateway is started once they are healthy.
2. A process that exits is restarted after 1 s, 2 s, 4 s, up to 60 s. After `STEADY_S` seconds of health, the delays
   start at 1 s again.
3. At SIGTERM or SIGINT the replicas drain; then the gateway is stopped. A second signal kills all processes.

The kernel kills all child processes when this process exits (serve/launcher/exec_with_pdeathsig.py).
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from apt_jax.errors import ConfigError, counted
from serve.errors import CommandError
from serve.observability.call_log import write_line
from serve.signals import Signals

logger = logging.getLogger(__name__)

STEADY_S = 60.0
"""Seconds of health after which the next failure of a process counts as its first."""

_USAGE_ERROR = 2
_MAX_RESTART_DELAY_S = 60.0
_PROBE_S = 0.25
_GRACE_S = 10.0
"""Seconds beyond its drain time after which a process is killed."""
_MAX_LINE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A process to keep running."""

    name: str
    """Name of the process, the prefix of every line of its output."""
    command: Sequence[str]
    """Absolute path of the executable, and arguments."""
    env: Mapping[str, str]
    cpus: Sequence[int] = ()
    """CPUs that the process is bound to; (): no restriction."""
    is_healthy: Callable[[], bool] | None
    """Health probe, called in a thread; None: no probe."""
    keeps_json: bool = False
    """Forward lines that are JSON objects unchanged, without the prefix."""
    hides: re.Pattern[str] | None = None
    """Pattern of output lines that are dropped."""


class Supervisor:
    """Keeps one process running until `stop`."""

    def __init__(self, program: ProcessSpec, max_restarts: int) -> None:
        self.program = program
        self.was_healthy = False
        """True if any run of the process has been healthy."""
        self.code: int | None = None
        """Exit code after `stop`; None: the process was not running."""
        self._is_healthy = False
        """True if the current run is healthy."""
        self._max_restarts = max_restarts
        self._process: asyncio.subprocess.Process | None = None
        self._may_start, self._stopping = asyncio.Event(), asyncio.Event()
        self._last_lines: dict[str, collections.deque[str]] = {}

    async def run(self) -> None:
        """Wait for `start`, then keep the process running until it exits after `stop`.

        Raises:
            ConfigError: the program does not accept its flags.
            CommandError: the program exited too many times in a row.
        """
        await self._may_start.wait()
        failures = 0
        while not self._stopping.is_set():
            healthy_s = await self._live()
            if self._stopping.is_set():
                break
            name, how = self.program.name, _exit_text(self.code)
            if self.code == _USAGE_ERROR and not self.was_healthy:
                raise ConfigError(f"{name}: {self._last_log_line()}")
            failures = 1 if healthy_s >= STEADY_S else failures + 1
            if failures > self._max_restarts:
                raise CommandError(
                    f"{name} {how}, {counted(failures, 'time')} in a row (--max-restarts {self._max_restarts}); last log line: {self._last_log_line()}"
                )
            delay_s = min(2.0 ** (failures - 1), _MAX_RESTART_DELAY_S)
            logger.warning("%s %s; restarting it in %g s", name, how, delay_s)
            self.code = None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    def start(self) -> None:
        self._may_start.set()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop the process with a signal and do not restart it."""
        self._stopping.set()
        self._may_start.set()
        self._signal(number)

    def tell(self, number: int) -> None:
        """Forward a signal such as SIGHUP if the process already handles it. A process that is still starting would be
        killed by it, and will read its files anyway."""
        if self._is_healthy:
            self._signal(number)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _live(self) -> float:
        """Run the process once; return the seconds for which it was healthy."""
        program, loop = self.program, asyncio.get_running_loop()
        cpus = ",".join(map(str, program.cpus))
        wrapper = str(Path(__file__).with_name("exec_with_pdeathsig.py"))
        self._last_lines = {name: collections.deque(maxlen=1) for name in ("stdout", "stderr")}
        self.code, self._is_healthy = None, False
        # A separate process group: Ctrl-C reaches only the launcher, which forwards it once.
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", wrapper, str(os.getpid()), cpus, *program.command,
            env=program.env, process_group=0, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stderr is not None
        pumps = [
            asyncio.create_task(self._forward(process.stdout, "stdout")),
            asyncio.create_task(self._forward(process.stderr, "stderr")),
        ]
        health = asyncio.create_task(self._wait_healthy())
        try:
            code = await process.wait()
            await asyncio.wait(pumps, timeout=1.0)  # other processes may keep the pipes open
        finally:
            self._signal(signal.SIGKILL)
            for task in (*pumps, health):
                task.cancel()
        self.code = code
        return loop.time() - health.result() if health.done() else 0.0

    async def _wait_healthy(self) -> float:
        """Wait until the process is healthy (without a probe: for `STEADY_S`), and return the event loop's time."""
        if self.program.is_healthy is None:
            await asyncio.sleep(STEADY_S)
        else:
            while not await asyncio.to_thread(self.program.is_healthy):
                await asyncio.sleep(_PROBE_S)
        if self.was_healthy:
            logger.warning("%s is back", self.program.name)
        self.was_healthy = self._is_healthy = True
        return asyncio.get_running_loop().time()

    async def _forward(self, reader: asyncio.StreamReader, stream: str) -> None:
        left = b""
        while chunk := await reader.read(1 << 16):
            *lines, left = (left + chunk).split(b"\n")
            if len(left) > _MAX_LINE_BYTES:
                lines, left = [*lines, left], b""
            for line in lines:
                self._show(line, stream)
        if left:
            self._show(left, stream)

    def _show(self, line: bytes, stream: str) -> None:
        text = line.decode(errors="replace").rstrip()
        if self.program.hides is not None and self.program.hides.search(text):
            return
        if text:
            self._last_lines[stream].append(text)
        if not (self.program.keeps_json and text.startswith("{")):
            text = f"{self.program.name} | {text}"
        _write(text, sys.stdout if stream == "stdout" else sys.stderr)

    def _last_log_line(self) -> str:
        said = self._last_lines["stderr"] or self._last_lines["stdout"]
        return said[-1] if said else "none"


async def launch(
    replicas: Sequence[ProcessSpec],
    gateway: ProcessSpec | None,
    *,
    max_restarts: int,
    drain_s: float,
    where: str,
) -> int:
    """Run the replicas and the gateway until a signal; return the exit code.

    Args:
        replicas: programs that are started and stopped first.
        gateway: program that is started and stopped after the replicas; None: no gateway.
        max_restarts: maximum number of consecutive restarts of one program.
        drain_s: time in seconds that replicas have to exit after the first signal.
        where: line to print when all programs with a probe are healthy.

    Raises:
        ConfigError: a program does not accept its flags.
        CommandError: a program exited too many times in a row.
    """
    replica_supervisors = [Supervisor(program, max_restarts) for program in replicas]
    gateway_supervisors = [] if gateway is None else [Supervisor(gateway, max_restarts)]

    def forward_hangup() -> None:
        for supervisor in replica_supervisors:
            supervisor.tell(signal.SIGHUP)

    signals = Signals(forward_hangup)
    jobs = {
        supervisor: asyncio.create_task(supervisor.run()) for supervisor in (*replica_supervisors, *gateway_supervisors)
    }
    ready = asyncio.create_task(_start(replica_supervisors, gateway_supervisors, where))
    first = asyncio.create_task(signals.first.wait())
    second = asyncio.create_task(signals.second.wait())
    try:
        await asyncio.wait({first, *jobs.values()}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if first.done():
            _say(f"stopping: open requests have {drain_s:g} s to finish")
        for group, limit_s in ((replica_supervisors, drain_s + _GRACE_S), (gateway_supervisors, _GRACE_S)):
            for supervisor in group:
                supervisor.stop()
            ended = asyncio.gather(*(jobs[supervisor] for supervisor in group), return_exceptions=True)
            await asyncio.wait({ended, second}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            for supervisor in group:
                supervisor.stop(signal.SIGKILL)
            await ended
        for job in jobs.values():
            job.result()
        if second.done():
            return 128 + signals.last
        wrong = [supervisor for supervisor in replica_supervisors if supervisor.code not in (None, 0, -signal.SIGTERM)]
        for supervisor in wrong:
            logger.error("%s %s", supervisor.program.name, _exit_text(supervisor.code))
        _say("stopped")
        return 1 if wrong else 0
    finally:
        for task in (ready, first, second, *jobs.values()):
            task.cancel()
        await asyncio.gather(ready, first, second, *jobs.values(), return_exceptions=True)
        signals.close()


async def _start(replica_supervisors: list[Supervisor], gateway_supervisors: list[Supervisor], where: str) -> None:
    """Start the replicas, wait until all that have a health probe are healthy, then do the same for the gateway.

    A progress bar counts the programs that have a probe.
    """
    groups = [
        [k for k in group if k.program.is_healthy is not None] for group in (replica_supervisors, gateway_supervisors)
    ]
    columns, lines = shutil.get_terminal_size()  # some terminals report a size of 0
    with tqdm(
        total=sum(map(len, groups)),
        desc="starting",
        unit="program",
        disable=None,
        ncols=columns,
        nrows=lines,
    ) as bar:
        for all_of_group, group in zip((replica_supervisors, gateway_supervisors), groups, strict=True):
            for supervisor in all_of_group:
                supervisor.start()
            before = bar.n
            while not all(supervisor.was_healthy for supervisor in group):
                bar.n = before + sum(supervisor.was_healthy for supervisor in group)
                bar.refresh()
                await asyncio.sleep(_PROBE_S)
            bar.n = before + len(group)
    _say(where)


def _exit_text(code: int | None) -> str:
    if code is None:
        return "has not run"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _say(line: str) -> None:
    _write(line, sys.stdout)


def _write(line: str, stream: TextIO) -> None:
    """Write a line, above the progress bar if there is one."""
    with contextlib.suppress(OSError), tqdm.external_write_mode(file=stream):
        write_line(line, stream)
