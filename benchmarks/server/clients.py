"""Processes of clients: streams one after another or arrivals at a rate, every token held against the offline answer.

Times are of `time.monotonic`, which is the same clock in all processes of a machine.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.server.offline import Answer
from benchmarks.server.protocols import Ask, Door, Doors, Refused

_LAG_PERIOD_S = 0.01
_SPAWN = multiprocessing.get_context("spawn")


@dataclasses.dataclass(slots=True, kw_only=True)
class Record:
    """What became of one request, as its client saw it."""

    door: str
    started_s: float
    first_s: float | None = None
    """When its first token came."""
    ended_s: float = 0.0
    num_tokens: int = 0
    status: str = ""
    """`complete`, `left` (the client went on purpose), or that of `Refused`."""
    problem: str = ""
    """What differs from the offline answer; nothing."""
    longest_gap_s: float = 0.0
    p99_gap_s: float = 0.0
    attained: bool | None = None
    """The server's verdict."""


@dataclasses.dataclass(kw_only=True)
class Report:
    """Of one process."""

    records: list[Record]
    lag_s: list[float]
    """How much later than asked for its event loop woke, every 10 ms."""
    cpu_s: float
    late_s: float = 0.0
    """The most that an arrival was sent after it was due."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What one process of clients does.

    Attributes:
        http, grpc: addresses.
        asks: the requests, drawn from again and again.
        answers: of each offline; None: not compared.
        doors: each request takes the next.
        streams: at a time, one request after another in each; 0: arrivals.
        rate: arrivals a second, Poisson.
        duration_s: no request begins after it.
        in_order: every request once, in order, then the end.
        leave_share: of clients that leave before the end.
        token_ids: whether HTTP is asked for ids.
    """

    http: str
    grpc: str
    asks: Sequence[Ask]
    answers: Sequence[Answer] | None = None
    doors: Sequence[str] = ("http", "grpc", "vllm")
    streams: int = 0
    rate: float = 0.0
    duration_s: float = float("inf")
    in_order: bool = False
    leave_share: float = 0.0
    token_ids: bool = True
    seed: int = 0
    cores: Sequence[int] | None = None


class Clients:
    """Processes of clients that have begun; a context.

    Args:
        loads: one a process.
    """

    def __init__(self, loads: Sequence[Load]) -> None:
        self._done = [_SPAWN.Value("l", 0) for _ in loads]
        self._reports: list[Connection] = []
        self._processes = []
        for load, done in zip(loads, self._done, strict=True):
            ours, theirs = _SPAWN.Pipe(duplex=False)
            process = _SPAWN.Process(target=_main, args=(load, done, theirs), daemon=True)
            process.start()
            theirs.close()
            self._reports.append(ours)
            self._processes.append(process)

    @property
    def num_done(self) -> int:
        """Requests that have ended."""
        return sum(done.value for done in self._done)

    def running(self, pause_s: float = 0.2) -> Iterator[None]:
        """Now and then, until every process has something to report."""
        while not all(report.poll() for report in self._reports):
            yield
            time.sleep(pause_s)

    def reports(self) -> list[Report]:
        """Wait for the end.

        Raises:
            RuntimeError: a process ended without a report.
        """
        found = []
        for report, process in zip(self._reports, self._processes, strict=True):
            try:
                found.append(report.recv())
            except EOFError:
                raise RuntimeError("a process of clients broke") from None
            process.join()
        return found

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def add_ask_arguments(
    parser: argparse.ArgumentParser, *, prompt_len: tuple[int, int], output_len: tuple[int, int]
) -> None:
    """Flags of requests, for `asks_of`, with these defaults."""
    for name, default in (("--prompt-len", prompt_len), ("--output-len", output_len)):
        least, most = default
        parser.add_argument(
            name,
            type=int,
            nargs=2,
            default=default,
            metavar=("LEAST", "MOST"),
            help=f"tokens (default: {least} {most})",
        )
    parser.add_argument("--vocab-size", type=int, default=4000, help="prompts have token ids below it (default: 4000)")


def asks_of(args: argparse.Namespace, count: int) -> list[Ask]:
    """Different requests by the flags of `add_ask_arguments`."""
    return draw_asks(
        count, vocab_size=args.vocab_size, prompt_len=tuple(args.prompt_len), output_len=tuple(args.output_len), seed=args.seed
    )  # fmt: skip


def draw_asks(
    count: int,
    *,
    vocab_size: int,
    prompt_len: tuple[int, int],
    output_len: tuple[int, int],
    seed: int,
    sampled_share: float = 0.5,
) -> list[Ask]:
    """Different requests: random token ids, greedy ones and others with a seed. Some share a beginning, which prefix caching finds.

    Args:
        prompt_len, output_len: least and most, tokens.
    """
    rng = np.random.default_rng(seed)
    shared = rng.integers(5, vocab_size, prompt_len[1]).tolist()
    asks = []
    for number in range(count):
        length = int(rng.integers(prompt_len[0], prompt_len[1] + 1))
        ids = rng.integers(5, vocab_size, length).tolist()
        if rng.random() < 0.25:
            ids[: length // 2] = shared[: length // 2]
        params: dict[str, Any] = {
            "max_tokens": int(rng.integers(output_len[0], output_len[1] + 1)),
            "ignore_eos": True,
            "temperature": 0.0,
        }
        if rng.random() < sampled_share:
            params |= {"temperature": 0.75, "top_p": 0.9375, "seed": number}
        asks.append(Ask(prompt_ids=tuple(ids), params=params))
    return asks


# --- in a process ------------------------------------------------------------------------------------------------


def _main(load: Load, done: Any, report: Connection) -> None:
    if load.cores is not None:
        os.sched_setaffinity(0, load.cores)
    report.send(asyncio.run(_work(load, done)))


async def _work(load: Load, done: Any) -> Report:
    found = Report(records=[], lag_s=[], cpu_s=0.0)

    def note(record: Record) -> None:
        found.records.append(record)
        done.value += 1

    async with Doors(load.http, load.grpc) as doors, _lag(found.lag_s):
        for door in set(load.doors):  # connections and code are warm
            with contextlib.suppress(Refused):
                params = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
                async for _ in doors[door].ask(Ask(prompt_ids=(7,), params=params)):
                    pass
        cpu_s = time.process_time()
        if load.streams:
            await _streams(load, doors, note)
        else:
            found.late_s = await _arrivals(load, doors, note)
        found.cpu_s = time.process_time() - cpu_s
    return found


async def _streams(load: Load, doors: Any, note: Callable[[Record], None]) -> None:
    """So many at a time, one after another."""
    until_s = time.monotonic() + load.duration_s
    turns = _turns(load)

    async def stream() -> None:
        for number, door, leave_after in turns:
            if time.monotonic() >= until_s:
                return
            record = await _follow(load, number, door, doors[door], leave_after)
            note(record)
            if record.status not in ("complete", "left"):
                await asyncio.sleep(0.05)  # a server that refuses is not stormed

    await asyncio.gather(*(stream() for _ in range(load.streams)))


async def _arrivals(load: Load, doors: Any, note: Callable[[Record], None]) -> float:
    """A Poisson process; returns the most that one was late."""
    rng = np.random.default_rng([load.seed, 1])
    due_s = begun_s = time.monotonic()
    late_s, open_calls = 0.0, set[asyncio.Task[None]]()
    for number, door, leave_after in _turns(load):
        due_s += float(rng.exponential(1 / load.rate))
        if due_s > begun_s + load.duration_s:
            break
        await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
        late_s = max(late_s, time.monotonic() - due_s)

        async def call(number: int = number, door: str = door, leave_after: int | None = leave_after) -> None:
            note(await _follow(load, number, door, doors[door], leave_after))

        task = asyncio.create_task(call())
        open_calls.add(task)
        task.add_done_callback(open_calls.discard)
    await asyncio.gather(*open_calls)
    return late_s


def _turns(load: Load) -> Iterable[tuple[int, str, int | None]]:
    """Which request, by which door, and after how many tokens its client leaves."""
    rng = np.random.default_rng([load.seed, 0])
    number, count = 0, len(load.asks)
    while not load.in_order or number < count:
        ask = number if load.in_order else int(rng.integers(count))
        most = load.asks[ask].params["max_tokens"]
        leaves = bool(rng.random() < load.leave_share)
        yield ask, load.doors[number % len(load.doors)], int(rng.integers(0, most)) if leaves else None
        number += 1


async def _follow(load: Load, number: int, name: str, door: Door, leave_after: int | None) -> Record:
    """One request to its end."""
    ask = load.asks[number]
    answer = None if load.answers is None else load.answers[number]
    record = Record(door=name, started_s=time.monotonic())
    ids: list[int] = []
    texts: list[str] = []
    times_s: list[float] = []
    reason = None
    try:
        async with contextlib.aclosing(door.ask(ask, token_ids=load.token_ids)) as pieces:
            if leave_after == 0:  # before its first token, some time
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await anext(pieces)
                record.status = "left"
            else:
                async for piece in pieces:
                    if piece.num_tokens:
                        times_s.append(time.monotonic())
                        record.num_tokens += piece.num_tokens
                    ids += piece.token_ids or ()
                    if piece.text is not None:
                        texts.append(piece.text)
                    reason = piece.finish_reason or reason
                    if piece.attained is not None:
                        record.attained = piece.attained
                    if leave_after is not None and record.num_tokens >= leave_after and reason is None:
                        record.status = "left"
                        break
    except Refused as error:
        record.status = error.status
    record.ended_s = time.monotonic()
    if times_s:
        record.first_s = times_s[0]
        gaps_s = np.diff(times_s)
        if gaps_s.size:
            record.longest_gap_s = float(gaps_s.max())
            record.p99_gap_s = float(np.percentile(gaps_s, 99))
    if not record.status:
        record.status = "complete" if reason in ("stop", "length") else str(reason)
    if answer is not None and load.token_ids:
        record.problem = _difference(answer, ids, "".join(texts) if texts else None, reason)
    return record


def _difference(answer: Answer, ids: list[int], text: str | None, reason: str | None) -> str:
    """How what came differs from the offline answer, of which it may be the beginning where it has no end."""
    expected = answer.token_ids if reason is not None else answer.token_ids[: len(ids)]
    if tuple(ids) != expected:
        at = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), None)
        if at is None:
            return f"{len(ids)} tokens, not {len(expected)}"
        return f"token {at} of {len(expected)} differs"
    if text is not None and not (answer.text == text if reason is not None else answer.text.startswith(text)):
        return "the text differs"
    if reason is not None and reason != answer.finish_reason:
        return f"ended with {reason}, not {answer.finish_reason}"
    return ""


@contextlib.asynccontextmanager
async def _lag(found: list[float]) -> AsyncIterator[None]:
    """Measures how late the event loop wakes."""

    async def measure() -> None:
        while True:
            due_s = time.monotonic() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            found.append(time.monotonic() - due_s)

    measuring: Coroutine[Any, Any, None] = measure()
    task = asyncio.create_task(measuring)
    try:
        yield
    finally:
        task.cancel()
