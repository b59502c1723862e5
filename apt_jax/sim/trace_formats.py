"""Traces in other projects' formats: Mooncake's JSON lines, and the recorded sessions of kv-cache-tester (JSON).

* A ``.jsonl`` file has one request per line, with `timestamp` in milliseconds, `input_length`, `output_length` and
  `hash_ids`, one per 512 prompt tokens.
* A ``.json`` file is one session; a directory is all sessions in its ``.json`` files. A session has `block_size` and
  `requests`, each with `in` and `out` (tokens), `hash_ids`, `think_time` (seconds) or `t` and `api_time`, and
  `input_types`. An entry with `requests` of its own is a subagent.
"""

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.errors import ConfigError
from apt_jax.sim.sessions import BLOCK_TOKENS
from apt_jax.utils.text_files import read_text

_LOOKED_BACK = 60
"""Number of earlier calls of a session among which the parent of a call is sought."""
_DEEPEST = 8
"""How deep subagents may begin subagents."""
_LARGEST = 1e12
"""Bound of times, in their unit."""


def is_other_format(path: str) -> bool:
    """Return True if `read_rows` reads this path, False if it is a CSV file or missing."""
    if os.path.isdir(path):
        return True
    if not path.endswith((".json", ".jsonl")) or not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")
    except OSError:
        return False


def read_rows(path: Path) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Read a file or directory in another project's format as the rows of a trace file.

    Returns:
        The names of the columns (`apt_jax.sim.trace`), and the number and the cells of each row: its line, or of
        sessions the number of the request.

    Raises:
        ConfigError: the file is not in one of the formats; the message names the file and the field.
    """
    if path.suffix == ".jsonl" and not path.is_dir():
        return _mooncake(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path}: is a directory without a session in .json; give a CSV file in it (--trace)")
    header = ["prompt_tokens", "output_tokens", "session", "subagent", "request", "parent", "shared_blocks", "think_s", "input", "stop"]  # fmt: skip
    return header, enumerate(itertools.chain.from_iterable(map(_session, files)), 1)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error}); the file may have been cut off (--trace)") from None


class _Fields:
    """Reads the fields of a JSON object; a missing field or a wrong value is refused with its name and `where`."""

    def __init__(self, of: Any, where: str) -> None:
        if not isinstance(of, Mapping):
            raise ConfigError(f"{where}: {of!r:.40} must be an object (--trace)")
        self._of, self._where = of, where

    def _refuse(self, name: str, must: str) -> ConfigError:
        return ConfigError(f"{self._where}: {name}={self._of.get(name)!r:.40} must be {must} (--trace)")

    def has(self, name: str) -> bool:
        return self._of.get(name) is not None

    def integer(self, name: str, low: int) -> int:
        value = self._of.get(name)
        if type(value) is not int or not low <= value < 2**31:
            raise self._refuse(name, f"a whole number of at least {low}")
        return value

    def seconds(self, name: str, default: float = 0.0) -> float:
        value = self._of.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not abs(value) < _LARGEST:
            raise self._refuse(name, "a number")
        return float(value)

    def ids(self, name: str) -> NDArray[np.int64]:
        value = self._of.get(name)
        if not isinstance(value, list) or not all(type(one) is int and abs(one) < 2**63 for one in value):
            raise self._refuse(name, "a list of 64-bit integers")
        return np.array(value, np.int64)

    def texts(self, name: str) -> list[str]:
        value = self._of.get(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._refuse(name, "a list of strings")
        return value

    def text(self, name: str) -> str:
        value = self._of.get(name)
        if value is not None and not isinstance(value, str):
            raise self._refuse(name, "a string")
        return value or ""

    def objects(self, name: str) -> list[Any]:
        value = self._of.get(name)
        if not isinstance(value, list):
            raise self._refuse(name, "a list")
        return value


def _mooncake(path: Path) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    def rows() -> Iterator[tuple[int, list[str]]]:
        for number, line in enumerate(read_text(path, "--trace").split("\n"), 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            request = _Fields(_json(line, where), where)
            ids = " ".join(map(str, request.ids("hash_ids").tolist()))
            lengths = (str(request.integer(name, 1)) for name in ("input_length", "output_length"))
            yield number, [*lengths, repr(request.seconds("timestamp") / 1e3), ids]

    return ["prompt_tokens", "output_tokens", "arrival_s", "hash_ids"], rows()


def _session(path: Path) -> Iterator[list[str]]:
    """Yield the rows of a recorded session; the name of its file is the session's."""
    session = _Fields(_json(read_text(path, "--trace"), str(path)), str(path))
    if (size := session.integer("block_size", 1)) != BLOCK_TOKENS:
        raise ConfigError(f"{path}: block_size={size} must be {BLOCK_TOKENS} (--trace)")
    earlier: list[NDArray[np.int64]] = []
    for subagent, request, think_s in _calls(session.objects("requests"), str(path)):
        ids, tokens = request.ids("hash_ids"), request.integer("in", 1)
        shared, parent = 0, -1
        for i in range(len(earlier) - 1, max(len(earlier) - 1 - _LOOKED_BACK, -1), -1):
            n = min(ids.size, earlier[i].size)
            differs = np.flatnonzero(ids[:n] != earlier[i][:n])
            same = int(differs[0]) if differs.size else n
            if same > shared:
                shared, parent = same, i
        yield [
            str(tokens), str(request.integer("out", 0)), path.stem, subagent, str(len(earlier)), str(parent),
            str(min(shared, tokens // size)), repr(think_s), "+".join(request.texts("input_types")),
            request.text("stop"),
        ]  # fmt: skip
        earlier.append(ids)


def _calls(requests: list[Any], where: str) -> Iterator[tuple[str, _Fields, float]]:
    """Yield the subagent (or empty text), the call and the time before it in seconds."""
    subagents = itertools.count(1)

    def of(requests: list[Any], subagent: str, where: str, depth: int) -> Iterator[tuple[str, _Fields, float]]:
        ended_s = None
        for i, one in enumerate(requests):
            at = f"{where}, request {i}"
            request = _Fields(one, at)
            if request.has("requests"):
                if depth == _DEEPEST:
                    raise ConfigError(f"{at}: requests are nested more than {_DEEPEST} deep (--trace)")
                yield from of(request.objects("requests"), subagent or f"agent_{next(subagents):03}", at, depth + 1)
                continue
            began_s = request.seconds("t")
            between_s = 0.0 if ended_s is None else began_s - ended_s
            yield subagent, request, max(request.seconds("think_time", between_s), 0.0)
            ended_s = began_s + request.seconds("api_time")

    yield from of(requests, "", where, 0)
