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

from apt_jax.errors import ConfigError
from apt_jax.utils.text_files import read_text

_LOOKED_BACK = 60
"""Number of earlier calls of a session among which the parent of a call is sought."""


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


def read_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Read a file or directory in another project's format as the rows of a trace file.

    Returns:
        The names of the columns (`apt_jax.sim.trace`), and the cells of each request.

    Raises:
        ConfigError: the file is not in one of the formats; the message names the file and the field.
    """
    if path.suffix == ".jsonl" and not path.is_dir():
        return _mooncake(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path}: is a directory without a session in .json; give a CSV file in it (--trace)")
    header = ["prompt_tokens", "output_tokens", "session", "subagent", "request", "parent", "shared_blocks", "think_s", "input"]  # fmt: skip
    return header, list(itertools.chain.from_iterable(map(_session, files)))


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error}); the file may have been cut off (--trace)") from None


def _field(of: Any, name: str, where: str, kind: type | tuple[type, ...] = (int, float)) -> Any:
    value = of.get(name) if isinstance(of, Mapping) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"{where}: {name}={value!r:.40} is missing or of the wrong type (--trace)")
    return value


def _mooncake(path: Path) -> tuple[list[str], list[list[str]]]:
    rows = []
    for number, line in enumerate(read_text(path, "--trace").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        request = _json(line, where)
        ids = _field(request, "hash_ids", where, list)
        rows.append(
            [
                str(_field(request, "input_length", where, int)),
                str(_field(request, "output_length", where, int)),
                str(_field(request, "timestamp", where) / 1e3),
                " ".join(map(str, ids)),
            ]
        )
    return ["prompt_tokens", "output_tokens", "arrival_s", "hash_ids"], rows


def _session(path: Path) -> Iterator[list[str]]:
    """Yield the rows of a recorded session."""
    session = _json(read_text(path, "--trace"), str(path))
    name = str(session.get("id") or path.stem) if isinstance(session, Mapping) else ""
    size = _field(session, "block_size", str(path), int)
    if size != 64:
        raise ConfigError(f"{path}: block_size={size} must be 64 (--trace)")
    earlier: list[np.ndarray] = []
    for subagent, request, where, think_s in _calls(session, str(path)):
        ids = np.array(_field(request, "hash_ids", where, list), np.int64)
        tokens = _field(request, "in", where, int)
        shared, parent = 0, -1
        for i in range(len(earlier) - 1, max(len(earlier) - 1 - _LOOKED_BACK, -1), -1):
            n = min(ids.size, earlier[i].size)
            differs = np.flatnonzero(ids[:n] != earlier[i][:n])
            same = int(differs[0]) if differs.size else n
            if same > shared:
                shared, parent = same, i
        types = request.get("input_types") or []
        yield [
            str(tokens), str(_field(request, "out", where, int)), name, subagent, str(len(earlier)), str(parent),
            str(min(shared, tokens // size)), f"{think_s:g}", "+".join(map(str, types)),
        ]  # fmt: skip
        earlier.append(ids)


def _calls(session: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any], str, float]]:
    """Yield the subagent (or empty text), the call, its place for messages, and the time before it in seconds."""
    subagents = itertools.count(1)

    def of(requests: list[Any], subagent: str, where: str) -> Iterator[tuple[str, Mapping[str, Any], str, float]]:
        ended_s = None
        for i, request in enumerate(requests):
            at = f"{where}, request {i}"
            if isinstance(request, Mapping) and isinstance(request.get("requests"), list):
                yield from of(request["requests"], subagent or f"agent_{next(subagents):03}", at)
                continue
            began_s = float(request.get("t", 0.0)) if isinstance(request, Mapping) else 0.0
            think_s = began_s - ended_s if ended_s is not None else 0.0
            if isinstance(request, Mapping) and isinstance(request.get("think_time"), int | float):
                think_s = request["think_time"]
            yield subagent, request, at, max(float(think_s), 0.0)
            ended_s = began_s + float(request.get("api_time") or 0.0)

    yield from of(_field(session, "requests", where, list), "", where)
