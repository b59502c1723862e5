"""Client processes: a closed loop of streams, in rounds or for a time, or arrivals at a rate, with every token compared
with the offline answer.

Times are those of `time.monotonic`, which is the same clock in all processes of a machine.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from benchmarks.server.offline import Answer
from benchmarks.server.protocols import Endpoint, Endpoints, HttpEndpoint, LoadRequest, Refused

_LAG_PERIOD_S = 0.01
_ROUND_TICK_S = 0.01
_SLOW_PAUSE_S = 0.1
"""Pause of a slow reader after every message."""
_CONSTRAINTS: Sequence[dict[str, Any]] = (
    {"choice": ["yes", "no", "perhaps, and perhaps not"]},
    {"regex": "[a-z]{2,8}( [a-z]{2,8}){3}"},
    {"json": '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}'},
    {"json": '{"type": "array", "items": {"enum": ["red", "green", 7]}, "minItems": 3}'},
)  # fmt: skip
_SPAWN = multiprocessing.get_context("spawn")


@dataclasses.dataclass(slots=True, kw_only=True)
class Record:
    """Outcome of one request, as its client saw it."""

    protocol: str
    started_s: float
    first_s: float | None = None
    """Time of its first token."""
    ended_s: float = 0.0
    num_tokens: int = 0
    status: str = ""
    """`complete`, `left` (the client disconnected on purpose), or that of `Refused`."""
    problem: str = ""
    """Difference from the offline answer; empty: none."""
    longest_gap_s: float = 0.0
    p99_gap_s: float = 0.0
    attained: bool | None = None
    """SLO verdict of the server; None: not reported."""


@dataclasses.dataclass(kw_only=True)
class Report:
    """Results of one client process."""

    records: list[Record]
    lag_s: list[float]
    """Delay of its event loop, measured every 10 ms."""
    cpu_s: float
    late_s: float = 0.0
    """Longest time from when a request was due to when it was sent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Load that one client process generates.

    Attributes:
        http, grpc: addresses.
        requests: the requests, drawn with replacement.
        answers: offline answer to each; None: not compared.
        protocols: names of the APIs, used in turn.
        streams: concurrent streams of a closed loop; 0: arrivals at `rate`.
        rate: Poisson arrivals per second.
        round_size: requests between two drains (`Clients.begin_round`); 0: there are none.
        duration_s: no request starts after it, unless there are rounds.
        in_order: send every request once, in order.
        leave_share: share of clients that disconnect before the end.
        slow_share: share of clients that read slowly.
        tokenize_share: number of calls of `/detokenize` and `/tokenize`, as a share of the streams.
        token_ids: request token ids over HTTP.
    """

    http: str
    grpc: str
    requests: Sequence[LoadRequest]
    answers: Sequence[Answer] | None = None
    protocols: Sequence[str] = ("http", "grpc", "vllm")
    streams: int = 0
    round_size: int = 0
    rate: float = 0.0
    duration_s: float = float("inf")
    in_order: bool = False
    leave_share: float = 0.0
    slow_share: float = 0.0
    tokenize_share: float = 0.0
    token_ids: bool = True
    seed: int = 0
    cores: Sequence[int] | None = None


class Clients:
    """Running client processes; a context.

    Args:
        loads: one per process.
    """

    def __init__(self, loads: Sequence[Load]) -> None:
        self._done = [_SPAWN.Value("l", 0) for _ in loads]
        self._round = _SPAWN.Value("l", 0)
        self._rounds_done = [_SPAWN.Value("l", 0) for _ in loads]
        self._reports: list[Connection] = []
        self._processes = []
        for load, done, rounds_done in zip(loads, self._done, self._rounds_done, strict=True):
            ours, theirs = _SPAWN.Pipe(duplex=False)
            shared = _Shared(done, self._round, rounds_done)
            process = _SPAWN.Process(target=_main, args=(load, shared, theirs), daemon=True)
            process.start()
            theirs.close()
            self._reports.append(ours)
            self._processes.append(process)

    @property
    def num_done(self) -> int:
        """Number of finished requests."""
        return sum(done.value for done in self._done)

    @property
    def drained(self) -> bool:
        """True once every request of this round has ended and every connection is closed."""
        return all(done.value == self._round.value for done in self._rounds_done)

    def begin_round(self) -> None:
        """Let every process send its next `Load.round_size` requests."""
        self._round.value += 1

    def end_rounds(self) -> None:
        """Let the processes report; after the last round."""
        self._round.value = -1

    def running(self, pause_s: float = 0.2) -> Iterator[None]:
        """Yield every `pause_s` until every process has a report."""
        while not all(report.poll() for report in self._reports):
            yield
            time.sleep(pause_s)

    def reports(self) -> list[Report]:
        """Wait for the reports of all processes.

        Raises:
            RuntimeError: a process ended without a report.
        """
        found = []
        for report, process in zip(self._reports, self._processes, strict=True):
            try:
                found.append(report.recv())
            except EOFError:
                raise RuntimeError("a client process ended without a report") from None
            process.join()
        return found

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def add_request_arguments(
    parser: argparse.ArgumentParser, *, prompt_len: tuple[int, int], output_len: tuple[int, int]
) -> None:
    """Add the flags that `build_requests` reads, with these defaults."""
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


def build_requests(args: argparse.Namespace, count: int, structured_share: float = 0.0) -> list[LoadRequest]:
    """Return random requests by the flags of `add_request_arguments`."""
    return random_requests(
        count, vocab_size=args.vocab_size, prompt_len=tuple(args.prompt_len), output_len=tuple(args.output_len), seed=args.seed,
        structured_share=structured_share,
    )  # fmt: skip


def random_requests(
    count: int,
    *,
    vocab_size: int,
    prompt_len: tuple[int, int],
    output_len: tuple[int, int],
    seed: int,
    sampled_share: float = 0.5,
    structured_share: float = 0.0,
) -> list[LoadRequest]:
    """Return requests with random prompts, some greedy and some with a seed. Some share a prefix, which prefix caching
    finds.

    Args:
        prompt_len, output_len: minimum and maximum in tokens.
        structured_share: share of structured outputs.
    """
    rng = np.random.default_rng(seed)
    shared = rng.integers(5, vocab_size, prompt_len[1]).tolist()
    requests = []
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
        if structured_share and rng.random() < structured_share:
            params |= {
                "ignore_eos": False,
                "structured_outputs": _CONSTRAINTS[int(rng.integers(len(_CONSTRAINTS)))],
            }
        requests.append(LoadRequest(prompt_ids=tuple(ids), params=params))
    return requests


# --- in a process ------------------------------------------------------------------------------------------------


class _Shared(NamedTuple):
    """Numbers that the process shares with the one that started it."""

    done: Any
    """Finished requests."""
    round: Any
    """Rounds that may begin; -1: no more follow."""
    rounds_done: Any
    """Finished rounds."""


class _Turn(NamedTuple):
    """Turn of one client."""

    index: int
    """Index of its request."""
    protocol: str
    leave_after: int | None
    """Tokens after which it disconnects; None: it does not."""
    is_slow: bool
    tokenizes: bool


def _main(load: Load, shared: _Shared, report: Connection) -> None:
    if load.cores is not None:
        os.sched_setaffinity(0, load.cores)
    report.send(asyncio.run(_work(load, shared)))


async def _work(load: Load, shared: _Shared) -> Report:
    found = Report(records=[], lag_s=[], cpu_s=0.0)

    def note(record: Record) -> None:
        found.records.append(record)
        shared.done.value += 1

    if load.round_size:
        async with _lag(found.lag_s):
            await _rounds(load, shared, note)
        found.cpu_s = time.process_time()
        return found
    async with Endpoints(load.http, load.grpc) as endpoints, _lag(found.lag_s):
        for protocol in set(load.protocols):  # warm up connections and code
            with contextlib.suppress(Refused):
                params = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
                async for _ in endpoints[protocol].stream(LoadRequest(prompt_ids=(7,), params=params)):
                    pass
        cpu_s = time.process_time()
        if load.streams:
            await _streams(load, endpoints, note, _turns(load))
        else:
            found.late_s = await _arrivals(load, endpoints, note)
        found.cpu_s = time.process_time() - cpu_s
    return found


async def _rounds(load: Load, shared: _Shared, note: Callable[[Record], None]) -> None:
    """Send `load.round_size` requests over new connections each time that a round may begin."""
    turns = iter(_turns(load))
    while True:
        while shared.round.value == shared.rounds_done.value:
            await asyncio.sleep(_ROUND_TICK_S)
        if shared.round.value < 0:
            return
        async with Endpoints(load.http, load.grpc) as endpoints:
            await _streams(load, endpoints, note, itertools.islice(turns, load.round_size))
        shared.rounds_done.value += 1


async def _streams(load: Load, endpoints: Any, note: Callable[[Record], None], turns: Iterable[_Turn]) -> None:
    """Keep `load.streams` requests in flight."""
    until_s = float("inf") if load.round_size else time.monotonic() + load.duration_s
    turns = iter(turns)

    async def stream() -> None:
        for turn in turns:
            if time.monotonic() >= until_s:
                return
            record = await _follow(load, turn, endpoints[turn.protocol])
            note(record)
            if turn.tokenizes:
                note(await _tokenize(load, turn, endpoints["http"]))
            if record.status not in ("complete", "left"):
                await asyncio.sleep(0.05)  # do not flood a server that rejects

    await asyncio.gather(*(stream() for _ in range(load.streams)))


async def _arrivals(load: Load, endpoints: Any, note: Callable[[Record], None]) -> float:
    """Send requests as a Poisson process; return the longest time that one was late."""
    rng = np.random.default_rng([load.seed, 1])
    due_s = begun_s = time.monotonic()
    late_s, open_calls = 0.0, set[asyncio.Task[None]]()
    for turn in _turns(load):
        due_s += float(rng.exponential(1 / load.rate))
        if due_s > begun_s + load.duration_s:
            break
        await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
        late_s = max(late_s, time.monotonic() - due_s)

        async def call(turn: _Turn = turn) -> None:
            note(await _follow(load, turn, endpoints[turn.protocol]))

        task = asyncio.create_task(call())
        open_calls.add(task)
        task.add_done_callback(open_calls.discard)
    await asyncio.gather(*open_calls)
    return late_s


def _turns(load: Load) -> Iterable[_Turn]:
    rng = np.random.default_rng([load.seed, 0])
    number, count = 0, len(load.requests)
    while not load.in_order or number < count:
        index = number if load.in_order else int(rng.integers(count))
        most = load.requests[index].params["max_tokens"]
        leaves = bool(rng.random() < load.leave_share)
        yield _Turn(
            index=index,
            protocol=load.protocols[number % len(load.protocols)],
            leave_after=int(rng.integers(0, most)) if leaves else None,
            is_slow=bool(rng.random() < load.slow_share),
            tokenizes=bool(rng.random() < load.tokenize_share),
        )
        number += 1


async def _follow(load: Load, turn: _Turn, endpoint: Endpoint) -> Record:
    """Send one request and read its stream to the end."""
    leave_after = turn.leave_after
    request = load.requests[turn.index]
    answer = None if load.answers is None else load.answers[turn.index]
    record = Record(protocol=turn.protocol, started_s=time.monotonic())
    ids: list[int] = []
    texts: list[str] = []
    times_s: list[float] = []
    reason = None
    try:
        async with contextlib.aclosing(endpoint.stream(request, token_ids=load.token_ids)) as pieces:
            if leave_after == 0:  # at some time before its first token
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
                    if turn.is_slow:
                        await asyncio.sleep(_SLOW_PAUSE_S)
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


async def _tokenize(load: Load, turn: _Turn, endpoint: HttpEndpoint) -> Record:
    """Turn the prompt of a request into text and back."""
    record = Record(protocol="tokenize", started_s=time.monotonic(), status="complete")
    try:
        found = await endpoint.round_trip(load.requests[turn.index].prompt_ids)
    except Refused as error:
        record.status = error.status
    else:
        if load.answers is not None and found != load.answers[turn.index].prompt:
            record.problem = "the prompt's text, or its tokens, differ"
    record.ended_s = time.monotonic()
    return record


def _difference(answer: Answer, ids: list[int], text: str | None, reason: str | None) -> str:
    """Describe how an answer differs from the offline one; an answer without a finish reason may be a prefix of it."""
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
    """Measure the delay of the event loop."""

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
