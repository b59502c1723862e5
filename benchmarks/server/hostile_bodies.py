"""Bodies that are made to take long, from one key, beside another key's stream and health checks.

Every shape of `SHAPES` goes to every endpoint that takes JSON, one body after another, while a stream of another key runs
and `/health` is asked every 50 ms. It prints, by shape, the longest answer, and the longest time between two events of the
stream, and between two answers of `/health`, meanwhile.
"""

import argparse
import contextlib
import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.server.report import Run
from benchmarks.server.server_process import Server
from serve.http_api.openai_request import MAX_CONTAINERS

MAX_BODY_BYTES = 2 << 20
OPENING = b'{"prompt": "' + b"[" * (MAX_CONTAINERS + 1)
SHAPES: dict[str, Callable[[int], bytes]] = {
    "escaped quotes of a string without end": lambda n: OPENING + b'\\"' * (n // 2),
    "backslashes of a string without end": lambda n: OPENING + b"\\" * n,
    "quotes": lambda n: OPENING + b'"' * n,
    "short strings": lambda n: b'{"prompt": [' + b'"[",' * (n // 4),
    "strings of escapes": lambda n: b'{"prompt": [' + b'"\\\\[",' * (n // 6),
    "brackets": lambda n: b'{"prompt": ' + b"[" * n,
    "closed brackets": lambda n: b'{"prompt": ' + b"[]," * (n // 3),
    "objects": lambda n: b'{"prompt": ' + b'{"":' * (n // 4),
    "digits": lambda n: b'{"max_tokens": ' + b"9" * n,
    "digits of a fraction": lambda n: b'{"temperature": 0.' + b"0" * n + b"}",
    "an exponent": lambda n: b'{"temperature": 1e' + b"9" * n + b"}",
    "numbers": lambda n: b'{"prompt": [' + b"1," * (n // 2),
    "numbers of many digits": lambda n: b'{"prompt": [' + (b"9" * 4000 + b",") * (n // 4001) + b"1]}",
    "fractions": lambda n: b'{"prompt": [' + b"1.5," * (n // 4) + b"1]}",
    "token ids": lambda n: b'{"prompt": [' + b"12345," * (n // 6) + b"1]}",
    "names": lambda n: b"{" + b",".join(b'"%d":0' % i for i in range(n // 10)) + b"}",
    "one name": lambda n: b"{" + b'"a":0,' * (n // 6) + b'"a":0}',
    "surrogates": lambda n: b'{"prompt": "' + b"\\ud800" * (n // 6),
    "halves of pairs": lambda n: b'{"prompt": "' + b"\\udc00\\ud800" * (n // 12) + b'"}',
    "white space": lambda n: b"{" + b" \n" * (n // 2),
    "no UTF-8 at the end": lambda n: b'{"prompt": "' + b"a" * n + b'\xff"}',
    "words": lambda n: b'{"prompt": ' + b"NaN," * (n // 4),
}
_ENDPOINTS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/score", "/v1/rerank", "/tokenize", "/detokenize", "/v1/batches", "/infill", "/api/chat",
    "/api/generate",
)  # fmt: skip
_PROMISED_GAP_S = 0.5
_HEALTH_PERIOD_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoints", nargs="+", default=list(_ENDPOINTS), metavar="PATH")
    parser.add_argument("--bytes", type=int, default=1_990_000, help="of a body, about; longer ones are not read")


class _Watch:
    """The longest time between two events since it was last asked."""

    def __init__(self) -> None:
        self._last_s, self._longest_s, self._lock = time.monotonic(), 0.0, threading.Lock()

    def note(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._longest_s, self._last_s = max(self._longest_s, now_s - self._last_s), now_s

    def take(self) -> float:
        with self._lock:
            longest_s, self._longest_s = max(self._longest_s, time.monotonic() - self._last_s), 0.0
            return longest_s


def run(args: argparse.Namespace) -> Run:
    found = Run("hostile bodies", args)
    ours, theirs = "a-key-of-somebody-else", "a-key-of-an-attacker-x"
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.write_text(f"{ours}\n{theirs}\n")
        keys.chmod(0o600)
        flags = [
            *args.engine_flags,
            *args.server_flags,
            "--api-key-file",
            str(keys),
            "--batch-dir",
            f"{directory}/batches",
        ]
        with Server(args.model, flags) as server, _others(server.http, ours, args.model) as (gap, health):
            for endpoint in args.endpoints:  # the first call of an endpoint may compile
                _post(server.http, endpoint, theirs, b"{}")
            for watch in (gap, health):
                watch.take()
            rows, others = [], list[str]()
            for shape, make in tqdm(SHAPES.items(), unit="shape"):
                body, answers_s = make(args.bytes), list[float]()
                for endpoint in args.endpoints:
                    begun_s = time.monotonic()
                    status = _post(server.http, endpoint, theirs, body)
                    answers_s.append(time.monotonic() - begun_s)
                    if status not in (200, 400, 404, 422):  # 413: it was too long to be read
                        others.append(f"{endpoint}, {shape}: {status}")
                rows.append((shape, len(body), max(answers_s), gap.take(), health.take()))
    found.values["rows"] = [
        dict(zip(("shape", "bytes", "answer_s", "gap_s", "health_s"), row, strict=True)) for row in rows
    ]
    for shape, size, answer_s, gap_s, health_s in rows:
        found.say(
            f"{shape:40} {size:>9,} B  answer {answer_s:5.2f} s  stream {gap_s:5.2f} s  /health {health_s:5.2f} s"
        )
    found.promise("every body is read and answered", not others, "; ".join(others) or "yes")
    worst = max(max(row[3:]) for row in rows)
    found.promise(f"no gap above {_PROMISED_GAP_S} s", worst <= _PROMISED_GAP_S, f"{worst:.2f} s")
    return found


def _post(address: str, path: str, key: str, body: bytes) -> int:
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        connection.request("POST", path, body, {"content-type": "application/json", "authorization": f"Bearer {key}"})
        return connection.getresponse().status
    finally:
        connection.close()


@contextlib.contextmanager
def _others(address: str, key: str, model: str) -> Iterator[Sequence[_Watch]]:
    """A stream that goes on and on, and health checks, each in a thread."""
    gap, health, is_over = _Watch(), _Watch(), threading.Event()

    def stream() -> None:
        body = {"model": model, "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not is_over.is_set():
            connection = http.client.HTTPConnection(address, timeout=120)
            headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            while response.readline() and not is_over.is_set():
                gap.note()
            connection.close()

    def check() -> None:
        while not is_over.wait(_HEALTH_PERIOD_S):
            connection = http.client.HTTPConnection(address, timeout=120)
            connection.request("GET", "/health")
            connection.getresponse().read()
            connection.close()
            health.note()

    threads = [threading.Thread(target=stream), threading.Thread(target=check)]
    for thread in threads:
        thread.start()
    time.sleep(2.0)
    try:
        yield gap, health
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
