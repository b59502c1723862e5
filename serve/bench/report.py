"""Summarizes a run, as a table, files and plots."""

import collections
import csv
import dataclasses
import datetime
import importlib.metadata
import itertools
import math
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apt_jax.config import SLO
from apt_jax.metrics import Percentiles, RequestRecord, gaps_s, percentile, summarize
from apt_jax.sim.sessions import Calls, summarize_sessions
from apt_jax.version import __version__
from serve.bench.runner import ClientHealth, Outcome, Run
from serve.bench.search import Probe
from serve.errors import CommandError

COLUMNS: tuple[str, ...] = (
    "index", "session", "class", "due_s", "sent_s", "status", "finish_reason", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms",
    "p99_tbt_ms", "p99_tbt_drop_first_ms", "e2e_ms", "ttft_attained", "tbt_attained", "e2e_attained", "slo_attained",
    "preemptions", "cache_kind", "gaps_ms", "error",
)  # fmt: skip
"""Columns of the CSV file; `due_s` and `sent_s` are seconds since the start of the run; the numbers in `gaps_ms` are
separated by spaces."""

_BUSY = 0.85
_LATE_S, _LAG_S = 0.010, 0.010
_SPOILS = 0.1


def summary(run: Run, calls: Calls | None = None) -> dict[str, Any]:
    """Return the metrics of a run as plain values; docs/metrics.md defines them.

    Args:
        calls: the sessions that the run's requests are calls of; None: they are of no sessions.

    Raises:
        CommandError: no request has finished.
    """
    outcomes = run.outcomes
    if not outcomes:
        raise CommandError("nothing was measured: no request has finished")
    records = [o.record for o in outcomes]
    totals = summarize(records)
    done = [r for r in records if r.completed]
    open_s = sum(r.finished_s - r.arrival_s for r in done if r.finished_s is not None)
    gaps = list(itertools.chain.from_iterable(gaps_s(r.token_times_s) for r in done))
    span_s = totals.duration_s
    prompt_tokens = sum(o.prompt_tokens or o.request.prompt_tokens for o in outcomes if o.status == "ok")
    output_tokens = sum(len(r.token_times_s) for r in records)
    cached = [o.cached_tokens for o in outcomes if o.cached_tokens is not None]
    preempted = [o.num_preemptions for o in outcomes if o.num_preemptions is not None]
    recomputed = [o.recomputed_tokens for o in outcomes if o.recomputed_tokens is not None]
    values = {
        **totals.as_dict(),
        "statuses": dict(collections.Counter(o.status for o in outcomes).most_common()),
        "num_interrupted": run.num_interrupted,
        "interrupted": run.interrupted,
        "gap_s": _percentiles(gaps),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": output_tokens,
        "requests_per_s": len(done) / span_s if span_s > 0 else 0.0,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / span_s if span_s > 0 else 0.0,
        "mean_concurrency": open_s / span_s if span_s > 0 else 0.0,
        "peak_concurrency": run.peak_concurrency,
        "preemptions": sum(preempted) if preempted else None,
        "recomputed_tokens": sum(recomputed) if recomputed else None,
        "client": client_facts(run.client),
        "by_class": _by_class(outcomes),
    }
    if calls is not None:
        never = RequestRecord(arrival_s=0.0, ok=False)
        of_call = {o.request.index: o.record for o in outcomes}
        of_calls = [of_call.get(i, never) for i in range(calls.session.size)]
        values["sessions"] = dataclasses.asdict(summarize_sessions(calls, of_calls, None))
    values["warning"] = warning(run.client, values)
    return values


def _by_class(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each SLO class; empty if there is only one class."""
    records: dict[str, list[RequestRecord]] = {}
    for outcome in outcomes:
        records.setdefault(outcome.request.slo_class or "rt", []).append(outcome.record)
    if len(records) < 2:
        return {}
    return {name: summarize(records[name]).as_dict() for name in sorted(records, reverse=True)}


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    p = Percentiles.of(values)
    return {"p50": p.p50, "p90": p.p90, "p99": p.p99}


def client_facts(client: ClientHealth) -> dict[str, Any]:
    """Return percentiles of the client's lateness and lag in milliseconds, and its CPU use as shares of a core."""

    def ms(values: Sequence[float]) -> dict[str, float | None]:
        found = {"p50": percentile(values, 50), "p99": percentile(values, 99)}
        return {name: None if value is None else value * 1e3 for name, value in found.items()}

    return {
        "lateness_ms": ms(client.lateness_s),
        "lag_ms": ms(client.lag_s),
        "process_cpu": client.process_cpu,
        "loop_cpu": client.loop_cpu,
    }


def warning(client: ClientHealth, values: dict[str, Any]) -> str | None:
    """Return a warning if the client distorted the measurement, else None.

    It did if its event loop was busy, or if the 99th percentile of its lateness (or lag) exceeds 10 ms and a tenth of
    the median TTFT (or gap).

    Args:
        values: a summary with `ttft_s` and `gap_s`.
    """
    problems = []
    late, lag = percentile(client.lateness_s, 99), percentile(client.lag_s, 99)
    ttft, gap = values["ttft_s"]["p50"] or 0.0, values["gap_s"]["p50"] or 0.0
    if late is not None and late > max(_LATE_S, _SPOILS * ttft):
        problems.append(f"requests were sent up to {late * 1e3:.0f} ms late (p99)")
    if lag is not None and lag > max(_LAG_S, _SPOILS * gap):
        problems.append(f"its event loop lagged by {lag * 1e3:.0f} ms (p99)")
    if client.loop_cpu > _BUSY:
        problems.append(f"its event loop took {100 * client.loop_cpu:.0f} % of a core")
    if not problems:
        return None
    return f"the client itself limits this measurement: {', '.join(problems)}; use an idle machine, or several clients"


def rows(values: dict[str, Any], slo: SLO) -> list[tuple[str, str]]:
    """Return the rows of the printed table; `slo`: objectives of the run."""

    def span(name: str, values: dict[str, Any] = values, scale: float = 1e3) -> str:
        p = values[name]
        return " / ".join("-" if p[q] is None else f"{scale * p[q]:.1f}" for q in ("p50", "p90", "p99"))

    def pair(facts: dict[str, float | None]) -> str:
        return ", ".join("-" if v is None else f"{v:.2f}" for v in facts.values())

    client = values["client"]
    has_slo = slo != SLO()
    failed = {k: n for k, n in values["statuses"].items() if k != "ok"}
    found = [
        ("requests sent, completed", f"{values['num_sent']}, {values['num_completed']}"),
        *([("failed", ", ".join(f"{n} {name}" for name, n in failed.items()))] if failed else []),
        *([("interrupted", str(values["num_interrupted"]))] if values["interrupted"] else []),
        ("duration (s)", f"{values['duration_s']:.1f}"),
        ("concurrency mean, peak", f"{values['mean_concurrency']:.1f}, {values['peak_concurrency']}"),
        ("requests/s", f"{values['requests_per_s']:.2f}"),
        ("output, total tokens/s", f"{values['tokens_per_s']:.1f}, {values['total_tokens_per_s']:.1f}"),
        ("TTFT p50 / p90 / p99 (ms)", span("ttft_s")),
        ("P99 TBT p50 / p90 / p99 (ms)", span("tbt_s")),
        ("the same, first gap dropped (ms)", span("p99_tbt_drop_first_s")),
        ("all gaps p50 / p90 / p99 (ms)", span("gap_s")),
        ("longest gap p50 / p90 / p99 (ms)", span("longest_gap_s")),
        ("end to end p50 / p90 / p99 (ms)", span("e2e_s")),
    ]  # fmt: skip
    if has_slo:
        found += [
            ("SLO attainment (%)", f"{100 * values['slo_attainment']:.1f}"),
            ("TTFT, TBT attainment (%)", f"{100 * values['ttft_attainment']:.1f}, {100 * values['tbt_attainment']:.1f}"),
            *([("end-to-end attainment (%)", f"{100 * values['e2e_attainment']:.1f}")] if math.isfinite(slo.e2e_s) else []),
            ("SLO attainment, every gap in time (%)", f"{100 * values['strict_attainment']:.1f}"),
            ("goodput (requests/s)", f"{values['goodput']:.2f}"),
        ]  # fmt: skip
    for name, one in values["by_class"].items():
        found += [
            (f"{name}: completed of sent, tokens/s", f"{one['num_completed']} of {one['num_sent']}, {one['tokens_per_s']:.1f}"),
            (f"{name}: TTFT p50 / p90 / p99 (ms)", span("ttft_s", one)),
            (f"{name}: P99 TBT p50 / p90 / p99 (ms)", span("tbt_s", one)),
            *([(f"{name}: SLO attainment (%)", f"{100 * one['slo_attainment']:.1f}")] if has_slo else []),
        ]  # fmt: skip
    if values["cached_tokens"] is not None and values["prompt_tokens"]:
        share = values["cached_tokens"] / values["prompt_tokens"]
        found.append(("prompt tokens found cached (%)", f"{100 * share:.1f}"))
    if values["preemptions"] is not None:
        found.append(
            ("preemptions, recomputed tokens", f"{values['preemptions']}, {values['recomputed_tokens']}")
        )  # fmt: skip
    found += [
        ("client: sent late p50, p99 (ms)", pair(client["lateness_ms"])),
        ("client: event loop lag p50, p99 (ms)", pair(client["lag_ms"])),
        ("client: CPU of process, of loop (%)", f"{100 * client['process_cpu']:.0f}, {100 * client['loop_cpu']:.0f}"),
    ]  # fmt: skip
    return found


def provenance() -> dict[str, Any]:
    """Return the date, the platform, and the versions of apt-jax, Python and libraries."""
    found = {"apt-jax": __version__, "python": platform.python_version()}
    for name in ("aiohttp", "grpcio", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": found,
        "platform": platform.platform(),
    }


def csv_row(outcome: Outcome, start_s: float) -> dict[str, Any]:
    """Return one request as a row with `COLUMNS`; missing values are ""."""
    record = outcome.record

    def ms(seconds: float | None) -> float | str:
        return "" if seconds is None else round(seconds * 1e3, 4)

    def or_empty(value: Any) -> Any:
        return "" if value is None else value

    return {
        "index": outcome.request.index,
        "session": or_empty(outcome.request.session),
        "class": or_empty(outcome.request.slo_class),
        "due_s": "" if outcome.due_s is None else round(outcome.due_s - start_s, 6),
        "sent_s": round(outcome.sent_s - start_s, 6),
        "status": outcome.status,
        "finish_reason": or_empty(outcome.finish_reason),
        "prompt_tokens": or_empty(outcome.prompt_tokens),
        "cached_tokens": or_empty(outcome.cached_tokens),
        "output_tokens": len(record.token_times_s),
        "ttft_ms": ms(record.ttft_s),
        "p99_tbt_ms": ms(record.tbt_s),
        "p99_tbt_drop_first_ms": ms(record.tbt_drop_first_s),
        "e2e_ms": ms(record.e2e_s),
        "ttft_attained": int(record.ttft_attained),
        "tbt_attained": int(record.tbt_attained),
        "e2e_attained": int(record.e2e_attained),
        "slo_attained": int(record.slo_attained),
        "preemptions": or_empty(outcome.num_preemptions),
        "cache_kind": or_empty(outcome.cache_kind),
        "gaps_ms": " ".join(f"{gap * 1e3:.4f}" for gap in gaps_s(record.token_times_s)),
        "error": outcome.error,
    }


def write_csv(path: str, run: Run) -> None:
    """Write one row per request.

    Raises:
        CommandError: the file cannot be written.
    """
    _write(path, COLUMNS, (csv_row(outcome, run.start_s) for outcome in run.outcomes))


def write_probes(path: str, probes: Sequence[Probe]) -> None:
    """Write one row per run of a search.

    Raises:
        CommandError: the file cannot be written.
    """
    columns = [field.name for field in dataclasses.fields(Probe)]
    _write(path, columns, (dataclasses.asdict(probe) for probe in probes))


def _write(path: str, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    try:
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise CommandError(f"cannot write {path} ({error.strerror}) (--save-csv)") from None


def plot(path: str, run: Run, values: dict[str, Any], title: str) -> None:
    """Plot cumulative distributions of TTFT and of the gaps between tokens, and SLO attainment.

    Raises:
        CommandError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    records = [o.record for o in run.outcomes if o.record.completed]
    slo = run.outcomes[0].slo
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    _cumulative(left, [r.ttft_s or 0.0 for r in records], "TTFT", slo.ttft_s)
    gaps = list(itertools.chain.from_iterable(gaps_s(r.token_times_s) for r in records))
    _cumulative(middle, gaps, "all gaps", None)
    _cumulative(middle, [r.tbt_s for r in records if r.tbt_s is not None], "P99 TBT of requests", slo.tbt_s)
    left.set(xlabel="TTFT (ms)", ylabel="share of completed requests (%)")
    middle.set(xlabel="time between tokens (ms)", ylabel="share (%)")
    bars = {
        "all": values["slo_attainment"],
        **({"end to end": values["e2e_attainment"]} if math.isfinite(slo.e2e_s) else {}),
        "TBT": values["tbt_attainment"],
        "TTFT": values["ttft_attainment"],
    }
    drawn = right.barh(list(bars), [100 * v for v in bars.values()], color=["#2a7f62"] + ["#9fc5b4"] * (len(bars) - 1))
    right.bar_label(drawn, fmt="%.0f %%", padding=3)
    right.set(xlim=(0, 120), xlabel="attainment (% of all sent)")
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def plot_search(path: str, probes: Sequence[Probe], targets: Sequence[float], title: str) -> None:
    """Plot SLO attainment against request rate, one mark per run.

    Raises:
        CommandError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for seed in sorted({p.seed for p in probes}):
        own = sorted((p.rate, 100 * p.attainment) for p in probes if p.seed == seed)
        axes.plot(*zip(*own, strict=True), marker="o", label=f"seed {seed}")
    for target in targets:
        axes.axhline(100 * target, color="#555555", linewidth=1, linestyle="--")
    axes.set(xlabel="request rate (requests/s)", ylabel="SLO attainment (%)", ylim=(0, 102))
    axes.set_title(title, fontsize=10)
    axes.legend()
    _save(figure, path)


def _cumulative(axes: Any, values: Sequence[float], label: str, objective_s: float | None) -> None:
    if not values:
        return
    x = np.sort(np.asarray(values)) * 1e3
    axes.step(x, 100 * np.arange(1, x.size + 1) / x.size, where="post", label=label)
    if objective_s is not None and objective_s < float("inf"):
        axes.axvline(objective_s * 1e3, color="#c8553d", linewidth=1, linestyle="--", label="objective")
    axes.set_ylim(0, 102)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot write {path} ({error}) (--save-png)") from None
