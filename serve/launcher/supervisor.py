"""Keeps replicas and the gateway before them running: `apt-jax launch`.

1. Every replica is started; the gateway when all of them are healthy.
2. One that ends is started again, after 1 s, 2 s, 4 s, up to 60 s; `STEADY_S` of health begin the count anew.
3. At SIGTERM or SIGINT replicas end what they have begun; then the gateway ends. A second signal kills all.

All are children that the kernel kills with this process, whatever ends it (serve/launcher/exec_with_pdeathsig.py).
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

from apt_jax.errors import ConfigError
from serve.cli.commands.serve import Signals
from serve.errors import CommandError

logger = logging.getLogger(__name__)

STEADY_S = 60.0
"""A program that was healthy for so long has not failed to start: the next failure is its first."""

_USAGE_ERROR = 2
_LONGEST_DELAY_S = 60.0
_PROBE_S = 0.25
_GRACE_S = 10.0
"""Beyond the time that a program was given to end."""
_LONGEST_LINE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What is kept running."""

    name: str
    """Begins every line of its output."""
    command: Sequence[str]
    """The file of the program, by its whole path, and arguments."""
    env: Mapping[str, str]
    cpus: Sequence[int] = ()
    """That it is bound to; none: it may use all."""
    is_healthy: Callable[[], bool] | None
    """Asks it, in a thread; None: it cannot be asked."""
    keeps_json: bool = False
    """Lines that are JSON objects are passed on as they are."""
    hides: re.Pattern[str] | None = None
    """Found in lines that are not shown."""


class _Keeper:
    """Keeps one program running until `stop`."""

    def __init__(self, program: Program, max_restarts: int) -> None:
        self.program = program
        self.was_healthy = False
        """In any of its lives."""
        self.code: int | None = None
        """Of its end after `stop`; None: it did not run then."""
        self._max_restarts = max_restarts
        self._process: asyncio.subprocess.Process | None = None
        self._may_start, self._stopping = asyncio.Event(), asyncio.Event()
        self._words: dict[str, collections.deque[str]] = {}

    async def run(self) -> None:
        """From `start` to the end of the program after `stop`.

        Raises:
            ConfigError: it does not accept its flags.
            CommandError: it has ended too often.
        """
        await self._may_start.wait()
        failures = 0
        while not self._stopping.is_set():
            healthy_s = await self._live()
            if self._stopping.is_set():
                break
            name, how = self.program.name, _how_ended(self.code)
            if self.code == _USAGE_ERROR and not self.was_healthy:
                raise ConfigError(f"{name}: {self._last_words()}")
            failures = 1 if healthy_s >= STEADY_S else failures + 1
            if failures > self._max_restarts:
                raise CommandError(
                    f"{name} {how}, {failures} times in a row (--max-restarts {self._max_restarts}); its last words: {self._last_words()}"
                )
            delay_s = min(2.0 ** (failures - 1), _LONGEST_DELAY_S)
            logger.warning("%s %s; it is started again in %g s", name, how, delay_s)
            self.code = None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    def start(self) -> None:
        self._may_start.set()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it by a signal, and let it be ended."""
        self._stopping.set()
        self._may_start.set()
        self._signal(number)

    def tell(self, number: int) -> None:
        """Pass a signal on that ends nothing, once the program can take it."""
        if self.was_healthy:
            self._signal(number)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _live(self) -> float:
        """One life of the program; for how long it was healthy, seconds."""
        program, loop = self.program, asyncio.get_running_loop()
        cpus = ",".join(map(str, program.cpus))
        tied = str(Path(__file__).with_name("exec_with_pdeathsig.py"))
        self._words = {name: collections.deque(maxlen=1) for name in ("stdout", "stderr")}
        self.code = None
        # A process group of its own: Ctrl-C is for the launcher, which passes it on once.
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", tied, str(os.getpid()), cpus, *program.command,
            env=program.env, process_group=0, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stderr is not None
        pumps = [
            asyncio.create_task(self._pass_on(process.stdout, "stdout")),
            asyncio.create_task(self._pass_on(process.stderr, "stderr")),
        ]
        health = asyncio.create_task(self._wait_healthy())
        try:
            code = await process.wait()
            await asyncio.wait(pumps, timeout=1.0)  # others may hold the other end
        finally:
            self._signal(signal.SIGKILL)
            for task in (*pumps, health):
                task.cancel()
        self.code = code
        return loop.time() - health.result() if health.done() else 0.0

    async def _wait_healthy(self) -> float:
        """The time at which it is."""
        if self.program.is_healthy is None:
            await asyncio.sleep(STEADY_S)
        else:
            while not await asyncio.to_thread(self.program.is_healthy):
                await asyncio.sleep(_PROBE_S)
        if self.was_healthy:
            logger.warning("%s is back", self.program.name)
        self.was_healthy = True
        return asyncio.get_running_loop().time()

    async def _pass_on(self, reader: asyncio.StreamReader, stream: str) -> None:
        left = b""
        while chunk := await reader.read(1 << 16):
            *lines, left = (left + chunk).split(b"\n")
            if len(left) > _LONGEST_LINE_BYTES:
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
            self._words[stream].append(text)
        if not (self.program.keeps_json and text.startswith("{")):
            text = f"{self.program.name} | {text}"
        _write(text, sys.stdout if stream == "stdout" else sys.stderr)

    def _last_words(self) -> str:
        said = self._words["stderr"] or self._words["stdout"]
        return said[-1] if said else "none"


async def launch(
    replicas: Sequence[Program],
    gateway: Program | None,
    *,
    max_restarts: int,
    drain_s: float,
    where: str,
) -> int:
    """Run programs until a signal; returns the exit code.

    Args:
        replicas: end first.
        gateway: ends after them.
        max_restarts: of one program in a row.
        drain_s: time that replicas have to end after the first signal.
        where: said when all that can be asked are healthy.

    Raises:
        ConfigError: a program does not accept its flags.
        CommandError: a program ended too often.
    """
    backs = [_Keeper(program, max_restarts) for program in replicas]
    fronts = [] if gateway is None else [_Keeper(gateway, max_restarts)]

    def pass_on() -> None:
        for keeper in backs:
            keeper.tell(signal.SIGHUP)

    signals = Signals(pass_on)
    jobs = {keeper: asyncio.create_task(keeper.run()) for keeper in (*backs, *fronts)}
    ready = asyncio.create_task(_start(backs, fronts, where))
    first = asyncio.create_task(signals.first.wait())
    second = asyncio.create_task(signals.second.wait())
    try:
        await asyncio.wait({first, *jobs.values()}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if first.done():
            _say(f"stopping: open requests have {drain_s:g} s to end")
        for group, limit_s in ((backs, drain_s + _GRACE_S), (fronts, _GRACE_S)):
            for keeper in group:
                keeper.stop()
            ended = asyncio.gather(*(jobs[keeper] for keeper in group), return_exceptions=True)
            await asyncio.wait({ended, second}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            for keeper in group:
                keeper.stop(signal.SIGKILL)
            await ended
        for job in jobs.values():
            job.result()
        if second.done():
            return 128 + signals.last
        wrong = [keeper for keeper in backs if keeper.code not in (None, 0, -signal.SIGTERM)]
        for keeper in wrong:
            logger.error("%s %s", keeper.program.name, _how_ended(keeper.code))
        _say("stopped")
        return 1 if wrong else 0
    finally:
        for task in (ready, first, second, *jobs.values()):
            task.cancel()
        await asyncio.gather(ready, first, second, *jobs.values(), return_exceptions=True)
        signals.close()


async def _start(backs: list[_Keeper], fronts: list[_Keeper], where: str) -> None:
    """One after the other, told by a bar over those that can be asked."""
    groups = [[k for k in group if k.program.is_healthy is not None] for group in (backs, fronts)]
    columns, lines = shutil.get_terminal_size()  # some terminals say that they have no size
    with tqdm(
        total=sum(map(len, groups)),
        desc="starting",
        unit="program",
        disable=None,
        ncols=columns,
        nrows=lines,
    ) as bar:
        for all_of_group, group in zip((backs, fronts), groups, strict=True):
            for keeper in all_of_group:
                keeper.start()
            before = bar.n
            while not all(keeper.was_healthy for keeper in group):
                bar.n = before + sum(keeper.was_healthy for keeper in group)
                bar.refresh()
                await asyncio.sleep(_PROBE_S)
            bar.n = before + len(group)
    _say(where)


def _how_ended(code: int | None) -> str:
    if code is None:
        return "has not run"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _say(line: str) -> None:
    _write(line, sys.stdout)


def _write(line: str, stream: TextIO) -> None:
    """A line, above the bar where there is one. Whoever read it may have gone: the replicas serve on."""
    with contextlib.suppress(OSError):
        tqdm.write(line, file=stream)
        stream.flush()
