"""Traces: prompt lengths, output lengths and arrival times of requests.

A trace file is CSV (or gzipped CSV) with the columns `prompt_tokens`, `output_tokens` and optionally `arrival_s`
(seconds, in ascending order), `class` (`rt` or `be`) and `hash_ids`; other columns are ignored. `traces/` holds the
bundled traces of the papers, one file per name. `apt_jax.sim.sessions` has the columns of traces of sessions.

`hash_ids` are integers, separated by spaces, one per block of `block_tokens` prompt tokens (`prompts_of`). Requests
that start with the same integers start with the same tokens, as in the traces that Mooncake publishes (blocks of 512).
"""

import csv
import dataclasses
import difflib
import functools
import gzip
import io
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.errors import ConfigError
from apt_jax.sim import catalog, sessions, trace_formats
from apt_jax.sim.sessions import Calls, scramble
from apt_jax.utils.text_files import decode

_MAX_TOKENS = 10_000_000
_COLUMNS = (
    "prompt_tokens", "output_tokens", "arrival_s", "class", "hash_ids", *sessions.COLUMNS, *sessions.OPTIONAL_COLUMNS
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Requests of a workload; all arrays have one entry per request."""

    name: str
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    arrival_s: NDArray[np.float64] | None = None
    """Recorded arrival times in seconds, ascending; None: not recorded."""
    best_effort: NDArray[np.bool_] | None = None
    """True for requests of class "be"; None: all are real-time."""
    hash_ids: Sequence[NDArray[np.int64]] | None = None
    """Identifiers of the blocks of each prompt, in order; None: the contents are unknown."""
    block_tokens: int = 512
    """Prompt tokens per block of `hash_ids`, or per block that calls of a session share, if nothing else is given."""
    lines: NDArray[np.int32] | None = None
    """Line number of each request in the file, for error messages."""
    calls: Calls | None = None
    """Sessions of the requests; None: requests do not wait for each other."""

    @property
    def num_requests(self) -> int:
        return self.prompt_tokens.size

    def take(self, index: NDArray[np.integer], calls: Calls | None = None) -> "Trace":
        """Return a trace of the requests with these indices, in this order; of a trace of sessions with their
        `calls`."""
        assert calls is not None or self.calls is None, "the calls of sessions are taken with what ties them"

        def pick(values: NDArray | None) -> NDArray | None:
            return None if values is None else values[index]

        return Trace(
            name=self.name,
            prompt_tokens=self.prompt_tokens[index],
            output_tokens=self.output_tokens[index],
            arrival_s=pick(self.arrival_s),
            best_effort=pick(self.best_effort),
            hash_ids=None if self.hash_ids is None else [self.hash_ids[i] for i in index.tolist()],
            block_tokens=self.block_tokens,
            lines=pick(self.lines),
            calls=calls,
        )

    def without(self, removed: NDArray[np.bool_]) -> "Trace":
        """Return the trace without the requests of a mask; of sessions, without all that would follow them."""
        if self.calls is None:
            return self.take(np.flatnonzero(~removed))
        calls, index = self.calls.without(removed)
        return self.take(index, calls)

    def scale_outputs(self, factor: float) -> "Trace":
        """Return the trace with output lengths multiplied by `factor`, rounded, at least one token each."""
        if factor == 1.0:
            return self
        return dataclasses.replace(self, output_tokens=_scaled(self.output_tokens, factor))

    def check_shared(self, block_tokens: int | None) -> None:
        """Raise `ConfigError` if calls of a file share more blocks of `block_tokens` tokens than their prompts have;
        None: the trace's own size of blocks."""
        if self.calls is not None and self.lines is not None:
            size = block_tokens or self.block_tokens
            sessions.check_shared(self.calls, self.prompt_tokens, self.lines.tolist(), size, self.name)

    def without_sessions(self, flag: str) -> "Trace":
        """Return the trace.

        Raises:
            ConfigError: its requests wait for each other.
        """
        if self.calls is None:
            return self
        raise ConfigError(
            f"{self.name}: is a trace of sessions, which apt-jax simulate and bench run; give another one ({flag})"
        )

    def scale_tokens(self, factor: float) -> "Trace":
        """Return the trace with prompt and output lengths multiplied by `factor`, rounded, at least one token each."""
        if factor == 1.0:
            return self
        return dataclasses.replace(
            self,
            prompt_tokens=_scaled(self.prompt_tokens, factor),
            output_tokens=_scaled(self.output_tokens, factor),
        )


def _scaled(lengths: NDArray[np.int32], factor: float) -> NDArray[np.int32]:
    return np.clip(np.rint(lengths * float(factor)), 1, _MAX_TOKENS).astype(np.int32)


# --- synthetic lengths ---------------------------------------------------------------------------------------------

_TABLE_7 = {
    # dataset: (minimum (our assumption), median, maximum, exponent of the upper half) of prompts and outputs. For u
    # uniform in (0, 1): linear below the median, above it median + (maximum - median) * (2u - 1)^exponent. Apt-Serve
    # Table 7 gives median, mean and maximum; the exponents are chosen to match its means.
    "wikitext": ((200, 871, 1840, 1.2989), (50, 552, 992, 1.328)),
    "arxiv": ((1500, 6853, 19600, 1.7744), (50, 226, 9754, 19.0168)),
    "bookcorpus": ((8000, 14781, 23706, 0.1566), (20, 221, 299, 1.7368)),
}
_BROS_TABLE_2 = {
    # workload: (mu, sigma) of the log of prompts and outputs, from the means and deviations of BROS Table 2.
    "bros-sharegpt": ((4.9844, 0.9184), (5.0387, 0.9152)),
    "bros-lmsys": ((3.8521, 1.143), (5.1403, 0.8099)),
}
_BROS_BEST_EFFORT = ((512, 1024), (32, 128))  # uniform bounds of prompts and outputs
SYNTHETIC = (*_TABLE_7, *_BROS_TABLE_2, "bros-best-effort")
"""Traces that are drawn from published distributions instead of read from files."""

_NUM_SYNTHETIC = 4096
_SYNTHETIC_SEED = 20250611


def _synthetic(name: str) -> Trace:
    rng = np.random.default_rng([_SYNTHETIC_SEED, SYNTHETIC.index(name)])

    def skewed(least: float, median: float, most: float, exponent: float) -> NDArray[np.float64]:
        u = rng.random(_NUM_SYNTHETIC)
        lower = median - (median - least) * (1.0 - 2.0 * u)
        upper = median + (most - median) * np.maximum(2.0 * u - 1.0, 0.0) ** exponent
        return np.where(u < 0.5, lower, upper)

    if name in _TABLE_7:
        prompt, output = (skewed(*side) for side in _TABLE_7[name])
    elif name in _BROS_TABLE_2:
        prompt, output = (rng.lognormal(mu, s, _NUM_SYNTHETIC) for mu, s in _BROS_TABLE_2[name])
        prompt, output = np.minimum(prompt, 1024), np.minimum(output, 1024)  # OPT's limit of 2,048 in total
    else:
        prompt, output = (
            rng.integers(low, high, _NUM_SYNTHETIC, endpoint=True).astype(np.float64) for low, high in _BROS_BEST_EFFORT
        )
    return Trace(
        name=name,
        prompt_tokens=np.maximum(np.rint(prompt), 1).astype(np.int32),
        output_tokens=np.maximum(np.rint(output), 1).astype(np.int32),
        best_effort=np.ones(_NUM_SYNTHETIC, np.bool_) if name == "bros-best-effort" else None,
    )


# --- files ---------------------------------------------------------------------------------------------------------


def known_traces() -> list[str]:
    """Return the trace names that `load_trace` accepts, sorted."""
    folder = resources.files("apt_jax.sim") / "traces"
    bundled = [f.name.removesuffix(".csv.gz") for f in folder.iterdir() if f.name.endswith(".csv.gz")]
    return sorted([*bundled, *SYNTHETIC, *catalog.NAMES])


def load_trace(name: str | Path) -> Trace:
    """Return a trace by name (`known_traces`), or read it from a file.

    Raises:
        ConfigError: unknown name, or a file that is not a valid trace; the message names file, line and column.
    """
    text = str(name)
    known = _known_trace(text)
    if known is not None:
        return known
    path = Path(text)
    if trace_formats.is_other_format(text):
        header, rows = trace_formats.read_rows(path)
        return _trace(header, rows, text)
    if not os.path.isfile(path):
        if path.suffix or "/" in text:
            raise ConfigError(f"{text:.200}: no such file (--trace)")
        near = difflib.get_close_matches(text, known_traces(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"trace {text!r:.200} is neither a file nor one of {', '.join(known_traces())}{hint} (--trace)"
        )
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{text}: cannot be read as CSV ({error}) (--trace)") from None
    return _parse(decode(data, text, "--trace"), text)


@functools.lru_cache(maxsize=16)
def _known_trace(name: str) -> Trace | None:
    """Return the trace of this name with read-only arrays; None if the name is unknown."""
    if name in SYNTHETIC:
        trace = _synthetic(name)
    elif name in catalog.NAMES:
        trace = Trace(name=name, **catalog.generate(name)._asdict())
    else:
        if name not in known_traces():
            return None
        bundled = resources.files("apt_jax.sim") / "traces" / f"{name}.csv.gz"
        trace = _parse(gzip.decompress(bundled.read_bytes()).decode(), name)
    columns = (trace.prompt_tokens, trace.output_tokens, trace.arrival_s, trace.best_effort, trace.lines)
    for column in (*columns, *(trace.hash_ids or ())):
        if column is not None:
            column.flags.writeable = False
    return trace


def _parse(text: str, name: str) -> Trace:
    # Ignored columns may be long; the limit applies to the whole process.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(io.StringIO(text), strict=True)
    rows = _rows(reader, name)
    _, header = next(rows, (0, []))
    return _trace([column.strip() for column in header], rows, name)


def _trace(header: Sequence[str], rows: Iterable[tuple[int, Sequence[str]]], name: str) -> Trace:
    """Return the trace that the cells of a file describe; each row comes with its line number."""
    missing = [c for c in ("prompt_tokens", "output_tokens") if c not in header]
    if missing:
        raise ConfigError(
            f"{name}: column {missing[0]!r} is missing; the header is {','.join(header)[:80]!r} (--trace)"
        )
    for column in _COLUMNS:
        if header.count(column) > 1:
            raise ConfigError(f"{name}: column {column!r} occurs twice; keep one (--trace)")
    at = {column: i for i, column in enumerate(header)}
    arrivals: list[float] = []
    lengths: dict[str, list[int]] = {"prompt_tokens": [], "output_tokens": []}
    best_effort: list[bool] = []
    hash_ids: list[NDArray[np.int64]] = []
    lines: list[int] = []
    of_sessions: dict[str, list[str]] = {}
    if all(column in at for column in sessions.COLUMNS):
        of_sessions = {c: [] for c in (*sessions.COLUMNS, *sessions.OPTIONAL_COLUMNS) if c in at}
    for line, row in rows:
        if not any(cell.strip() for cell in row):
            continue
        if len(row) < len(header):
            raise ConfigError(f"{name} line {line}: {len(row)} values for {len(header)} columns (--trace)")
        for column, values in lengths.items():
            # Recorded sessions have answers that were cut off at once.
            low = 0 if of_sessions and column == "output_tokens" else 1
            values.append(max(_length(row[at[column]], name, line, column, low), 1))
        if "arrival_s" in at:
            arrival_s = _number(row[at["arrival_s"]], name, line)
            if arrivals and arrival_s < arrivals[-1]:
                raise ConfigError(
                    f"{name} line {line}: arrival_s={arrival_s:g} is before the previous request's {arrivals[-1]:g}; sort the file (--trace)"
                )
            arrivals.append(arrival_s)
        if "class" in at:
            cell = row[at["class"]].strip()
            if cell not in ("rt", "be"):
                raise ConfigError(f"{name} line {line}: class={cell!r:.40} must be rt or be (--trace)")
            best_effort.append(cell == "be")
        if "hash_ids" in at:
            hash_ids.append(_hashes(row[at["hash_ids"]], name, line))
        for column, cells in of_sessions.items():
            cells.append(row[at[column]])
        lines.append(line)
    if not lines:
        raise ConfigError(f"{name}: holds no request (--trace)")
    trace = Trace(
        name=name,
        prompt_tokens=np.array(lengths["prompt_tokens"], np.int32),
        output_tokens=np.array(lengths["output_tokens"], np.int32),
        arrival_s=np.array(arrivals) if arrivals else None,
        best_effort=np.array(best_effort) if best_effort else None,
        hash_ids=hash_ids or None,
        lines=np.array(lines, np.int32),
    )
    if not of_sessions:
        return trace
    calls, index = sessions.read_calls(of_sessions, lines, lengths["prompt_tokens"], name)
    # Calls arrive after the answers before them, whatever the file says.
    return dataclasses.replace(
        trace.take(index, calls), arrival_s=None, hash_ids=None, block_tokens=sessions.BLOCK_TOKENS
    )


def _rows(reader: Any, name: str) -> Iterator[tuple[int, list[str]]]:
    while True:
        begin = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ConfigError(
                f"{name} line {begin}: not CSV ({error}); double each quote inside a quoted value, and close all quotes (--trace)"
            ) from None
        if row is None:
            return
        yield reader.line_num, row


def _length(cell: str, name: str, line: int, column: str, low: int) -> int:
    try:
        value = int(cell)
    except ValueError:
        value = low - 1
    if not low <= value <= _MAX_TOKENS:
        raise ConfigError(
            f"{name} line {line}: {column}={cell.strip()!r:.40} must be a whole number of at least {low} (--trace)"
        )
    return value


def _hashes(cell: str, name: str, line: int) -> NDArray[np.int64]:
    try:
        return np.array([int(part) for part in cell.split()], np.int64)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{name} line {line}: hash_ids={cell.strip()!r:.40} must be 64-bit integers separated by spaces (--trace)"
        ) from None


def prompts_of(trace: Trace, block_tokens: int, scale: float = 1.0) -> list[NDArray[np.int32]]:
    """Make token ids for each prompt from its `hash_ids`; blocks are equal if and only if their identifiers are.

    Positions [j * block_tokens, (j + 1) * block_tokens) are block j, scaled. Tokens after the last identified block are
    unique to the request.

    Args:
        trace: a trace that has `hash_ids`.
        block_tokens: prompt tokens per block, before scaling.
        scale: factor that prompt lengths were scaled with.

    Raises:
        ConfigError: a request has more `hash_ids` than its prompt has blocks.
    """
    assert trace.hash_ids is not None
    per_token = 1.0 / (block_tokens * scale)
    prompts = []
    for i, (length, names) in enumerate(zip(trace.prompt_tokens.tolist(), trace.hash_ids, strict=True)):
        num_blocks = math.ceil(length * per_token)
        if names.size > num_blocks + (scale != 1.0):  # rounding may have shortened the prompt
            where = f" line {trace.lines[i]}" if trace.lines is not None else ""
            raise ConfigError(
                f"{trace.name}{where}: {names.size} hash_ids for {length} prompt tokens, which are {num_blocks} blocks of {block_tokens} (--hash-block-tokens)"
            )
        own = scramble(np.array([i], np.uint64) ^ _OWN)
        at = np.arange(length, dtype=np.uint64)
        block = np.minimum((at * per_token).astype(np.intp), names.size)
        named = np.concatenate([scramble(names.view(np.uint64)), own])[block]
        prompts.append((scramble(named + at) >> np.uint64(34)).astype(np.int32))
    return prompts


_OWN = np.uint64(0x9E3779B97F4A7C15)


def _number(cell: str, name: str, line: int) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(
            f"{name} line {line}: arrival_s={cell.strip()!r:.40} must be a number of seconds of at least 0 (--trace)"
        )
    return value


# --- arrivals ------------------------------------------------------------------------------------------------------


def draw_arrivals(num_requests: int, rate: float, cv: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw arrival times in seconds; gaps are Gamma with mean 1 / rate and coefficient of variation `cv` (1: Poisson).

    The same generator state gives the same pattern at every rate, only stretched.
    """
    shape = 1.0 / (cv * cv)
    gaps = rng.gamma(shape, 1.0 / shape, num_requests)
    return np.cumsum(gaps) / rate


def scale_arrivals(arrival_s: NDArray[np.float64], rate: float | None) -> NDArray[np.float64]:
    """Shift recorded arrivals to start at 0, and stretch them to a mean of `rate` requests/s (None: no stretching)."""
    arrival_s = arrival_s - arrival_s[0]
    if rate is None or arrival_s[-1] <= 0:
        return arrival_s
    return arrival_s * ((arrival_s.size - 1) / (arrival_s[-1] * rate))
