"""Output of commands: tables for people, JSON for programs."""

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from apt_jax.config import SLO
from apt_jax.frontend.progress import ProgressBars
from serve.errors import CommandError


def print_table(title: str, rows: Iterable[tuple[str, object]]) -> None:
    """Print a table of two columns: name and value."""
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(str(value)))
    console = Console(highlight=False, emoji=False)
    console.print(Text(title, style="bold"), soft_wrap=True)  # a table's own title is wrapped to its width
    console.print(table)


def objectives(slo: SLO) -> str:
    """Return the objectives of an SLO for a title, as in ``TTFT 1 s, P99 TBT 0.2 s``; empty: there are none."""
    times_s = {"TTFT": slo.ttft_s, "P99 TBT": slo.tbt_s, "end to end": slo.e2e_s}
    return ", ".join(f"{name} {time_s:g} s" for name, time_s in times_s.items() if math.isfinite(time_s))


def session_rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a table for a `SessionSummary` as plain values."""

    def span(name: str) -> str:
        p = values[name]
        return " / ".join("-" if p[q] is None else f"{p[q]:.3f}" for q in ("p50", "p90", "p99"))

    mean_s, slowdown = values["completion_mean_s"], values["slowdown_mean"]
    means = "-" if mean_s is None else f"{mean_s:.1f} s"
    return [
        (
            "sessions completed, calls",
            f"{values['num_completed']} of {values['num_sessions']}, {values['num_calls']:,}",
        ),
        ("session completion time, mean", means if slowdown is None else f"{means}, {slowdown:.2f} times alone"),
        ("session completion time p50 / p90 / p99 (s)", span("completion_s")),
        ("first calls: TTFT p50 / p90 / p99 (s)", span("ttft_first_s")),
        ("later calls: TTFT p50 / p90 / p99 (s)", span("ttft_later_s")),
    ]


_json_out: list[TextIO] = []
"""For each nested `tables_on_stderr`, the stream that stdout was before it. JSON is written to the last of them, or to
stdout if the list is empty."""


class _Stderr(io.TextIOBase):
    """Standard error that raises no exception if its reader has closed it, not even at exit."""

    def write(self, text: str) -> int:
        try:
            sys.stderr.write(text)
        except BrokenPipeError:
            self._drop()
        return len(text)

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def isatty(self) -> bool:
        return sys.stderr.isatty()

    @property
    def encoding(self) -> str:
        return sys.stderr.encoding


@contextlib.contextmanager
def tables_on_stderr() -> Iterator[None]:
    """Print everything except `write_json` output to stderr."""
    _json_out.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(_Stderr()):
            yield
    finally:
        _json_out.pop()


def say_on_stderr(line: str) -> None:
    """Write a line of progress to stderr at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def starting_bars(*, quiet: bool = False) -> ProgressBars:
    """Return bars that show an engine's startup progress on stderr at least every five seconds until `close`; they are
    plain lines if stderr is not a terminal."""
    return ProgressBars(disable=True if quiet else None, say=say_on_stderr).keep_reporting()


def rounded(value: Any, places: int = 6) -> Any:
    """Round all floats in `value` to `places` decimals (three if the key ends in ``_ms``), but keep at least six
    significant digits."""
    match value:
        case dict():
            return {k: rounded(v, 3 if str(k).endswith("_ms") else places) for k, v in value.items()}
        case list() | tuple():
            return [rounded(item, places) for item in value]
        case float() if value and math.isfinite(value):
            return round(value, max(places, 5 - math.floor(math.log10(abs(value)))))
    return value


def write_json(path: str | None, values: Any) -> None:
    """Write `values` as JSON to a file, to stdout for ``-``, or not at all for None; `rounded` rounds the numbers."""
    if path is None:
        return
    text = json.dumps(rounded(values), indent=1, default=str) + "\n"
    if path == "-":
        (_json_out or [sys.stdout])[-1].write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise CommandError(f"cannot write {path} ({error.strerror}) (--json)") from None
