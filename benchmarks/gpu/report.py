"""Tables of a run: its rows stage by stage, then the goals that they decide. Needs no JAX."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import ROWS, read_rows

Row = Mapping[str, Any]

_COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {
    "bandwidth": (("gb_s", ".0f"), ("tflop_s", ".0f"), ("ms", ".3f")),
    "correctness": (("error", ".1e"), ("tolerance", ".1e"), ("same_bits", "")),
    "kernels": (("us", ".1f"), ("spread_us", ".1f"), ("gb_s", ".0f"), ("tflop_s", ".1f"), ("of_floor", ".2f"), ("of_design", ".2f")),
    "peers": (("us", ".1f"), ("gb_s", ".0f"), ("tflop_s", ".1f"), ("of_floor", ".2f")),
    "start": (("at_s", ".1f"), ("lower_s", ".2f"), ("compile_s", ".2f"), ("programs", "d"), ("answered", "")),
    "step": (
        ("alone_ms", ".2f"), ("pipelined_ms", ".2f"), ("idle_host_ms", ".2f"), ("floor_ms", ".2f"), ("of_floor", ".2f"),
        ("graph_launches", ".1f"), ("other_launches", ".1f"), ("device_ms", ".2f"),
    ),
    "generate": (("tokens_s", ".0f"), ("floor_tokens_s", ".0f"), ("of_floor", ".2f"), ("duration_s", ".1f"), ("steps", "d")),
    "serve": (
        ("attainment", ".3f"), ("points", ".1f"), ("tokens_s", ".0f"), ("ttft_p50_ms", ".0f"), ("ttft_p99_ms", ".0f"),
        ("tbt_p50_ms", ".1f"), ("tbt_p99_ms", ".1f"), ("step_error_mean", ".3f"), ("r2", ".3f"), ("mean_relative_error", ".3f"),
    ),
    "tune": (("us", ".1f"), ("default", "")),
    "sanitizer": (("errors", "d"), ("seconds", ".0f")),
    "autotune": (("programs", "d"), ("results", "d"), ("seconds", ".0f")),
}  # fmt: skip
"""Columns that a table shows of each stage, and their formats."""
STAGES = tuple(_COLUMNS)
"""All stages, in the order in which tables come."""


def _cell(row: Row, name: str, form: str) -> str:
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    return format(value, form) if form else str(value)


def table(stage: str, rows: Sequence[Row], most: int = 1 << 30) -> list[str]:
    """Lines of a stage's table: at most `most` rows, those that went wrong first."""
    good = [row for row in rows if row["status"] == "ok"]
    bad = [row for row in rows if row["status"] != "ok"]
    shown = [row for row in good if stage != "start" or most > len(good) or "program" not in row]
    shown = shown[: max(0, most - min(len(bad), most // 3))]
    columns = [(n, f) for n, f in _COLUMNS.get(stage, ()) if any(row.get(n) is not None for row in shown)]
    width = max([len(row["case"]) for row in shown], default=0)
    lines = [f"{len(rows)} rows, {len(good)} ok"]
    if shown:
        wide = [max(10, len(name) + 2) for name, _ in columns]
        lines.append(" " * width + "".join(f"{name:>{w}s}" for (name, _), w in zip(columns, wide, strict=True)))
        for row in shown:
            cells = (f"{_cell(row, n, form):>{w}s}" for (n, form), w in zip(columns, wide, strict=True))
            lines.append((f"{row['case']:{width}s}" + "".join(cells)).rstrip())
    lines += [f"{row['case']}: {row['status'][:100]}" for row in bad[: most // 3 if len(bad) > most // 3 else None]]
    return lines


def _value(rows: Mapping[tuple[str, str], Row], stage: str, case: str, column: str) -> float | None:
    row = rows.get((stage, case))
    found = None if row is None or row["status"] != "ok" else row.get(column)
    return found if isinstance(found, int | float) else None


def goals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what the rows say about each goal, as far as they do."""
    by_name = {(row["stage"], row["case"]): row for row in rows}

    def ratio(text: str, of: tuple[str, str, str], to: tuple[str, str, str], form: str = ".2f") -> Iterator[str]:
        a, b = _value(by_name, *of), _value(by_name, *to)
        if a is not None and b:
            yield f"{text}: {a / b:{form}}"

    def value(text: str, of: tuple[str, str, str], form: str) -> Iterator[str]:
        found = _value(by_name, *of)
        if found is not None:
            yield f"{text}: {found:{form}}"

    for tokens, most in ((4000, 1.3), (30000, 1.0), (120000, 1.0)):
        for kernel in dict.fromkeys(
            r["kernel"] for r in rows if str(r.get("kernel", "")).startswith("decode_absorbed")
        ):
            names = (f"{kernel} opt-13b {tokens} 64", f"decode_kv opt-13b {tokens} 64")
            yield from ratio(f"{kernel} over decode_kv, {tokens:,} tokens (goal {most})",
                             ("kernels", names[0], "us"), ("kernels", names[1], "us"))  # fmt: skip
    for name in ("opt-13b 2048 1", "opt-13b 512 4", "llama-3-8b 8192 1"):
        yield from ratio(f"prompt attention, cuDNN's time over ours, {name} (goal 0.8)",
                         ("peers", f"jax cudnn {name}", "us"), ("kernels", f"prompt {name}", "us"))  # fmt: skip
    yield from value(
        "reprojection, share of the floor (goal 0.85)",
        ("kernels", "decode_reprojected opt-13b 30000 64", "of_floor"),
        ".2f",
    )
    yield from value("decode_v_absorbed, share of the floor (goal 0.7)", ("kernels", "decode_v_absorbed llama-2-7b 30000 64", "of_floor"), ".2f")  # fmt: skip
    yield from value("first answer, s (goal 30)", ("start", "opt-13b first: first answer", "at_s"), ".1f")
    yield from value("all programs, s (goal 60)", ("start", "opt-13b first: all programs", "at_s"), ".1f")
    yield from value(
        "second start: all programs, s (goal 10)", ("start", "opt-13b second: all programs", "at_s"), ".1f"
    )
    for row in rows:
        if row["stage"] == "step" and row.get("twin"):
            yield from ratio(f"{row['case']} over {row['twin']}", ("step", row["case"], "pipelined_ms"),
                             ("step", row["twin"], "pipelined_ms"))  # fmt: skip
    for row in rows:
        if row["stage"] == "generate" and row["status"] == "ok":
            yield f"{row['case']}: {row['tokens_s']:.0f} output tokens/s, {row['of_floor']:.2f} of the sum of floors"
    for row in rows:
        if row["stage"] == "serve" and row.get("points") is not None:
            yield f"{row['case']}: served less simulated {row['points']:+.1f} points (goal within 5)"


_SHORT, _SHORT_OTHERS = {"kernels": 20, "step": 20}, 14
"""Rows of a stage in the tables at the end of a run."""


def print_tables(out: Path, *, short: bool = False, say: Callable[[str], None] = print) -> None:
    """Print all tables of a folder, or their first rows, and what they say about the goals."""
    rows = read_rows(out / ROWS)
    for stage in STAGES:
        own = [row for row in rows if row["stage"] == stage]
        if own:
            most = _SHORT.get(stage, _SHORT_OTHERS) if short else 1 << 30
            say(f"\n== {stage}: " + "\n".join(table(stage, own, most)))
    lines = list(goals(rows))
    if lines:
        say("\n== goals\n" + "\n".join(lines))
