"""Shared parts of the reproduction benchmarks: targets, settings, stored runs, tables and verdicts.

`targets.csv` holds every number that the three papers state in text or tables, one per row with a stable id:

* AptServe: Gao et al., "Apt-Serve: Adaptive Request Scheduling on Hybrid Cache for Scalable LLM Inference Serving",
  SIGMOD 2025.
* InferMax: Kim et al., "Optimizing LLM Inference for Database Systems: Cost-Aware Scheduling for Concurrent Requests".
* BROS: Wan et al., "Efficient LLM Serving on Hybrid Real-time and Best-effort Requests".

A command measures, compares each target with `compare` or `claim` and merges the rows into one table with `write_rows`.
Verdicts are computed:

* reproduced: ours is within 10 % of the paper; a bound is met.
* same direction: another size, but the order or sign that the paper reports (the command says what that is).
* differs: neither.
* undecided: the 95 % interval of our mean over seeds is wider than 10 % of the paper's number and holds it, holds a
  bound, or, of a difference, holds zero. A statement about several cases is reproduced only if each is decided.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import functools
import hashlib
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t

from apt_jax.config import SLO
from apt_jax.frontend.progress import ProgressBars
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.sweep import Store, end_with_parent, run_key

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "paper"
_PACKAGE = HERE.parents[1] / "apt_jax"

# --- targets -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A number that a paper states; the fields are the columns of `targets.csv`."""

    id: str
    paper: str
    where: str
    metric: str
    dataset: str
    setting: str
    value: str
    unit: str
    note: str

    @property
    def number(self) -> float:
        """The value, of a range "a to b" its middle; ValueError where the paper gives several."""
        ends = [float(end) for end in self.value.split(" to ")]
        return sum(ends) / len(ends)

    @property
    def bound(self) -> int:
        """1: the paper says "more than" the value, -1: "less than", 0: the value itself."""
        if "greater than" in self.unit or "more than" in self.unit:
            return 1
        return -1 if "less than" in self.unit or "not above" in self.unit else 0


@functools.cache
def targets() -> Mapping[str, Target]:
    """All targets by id."""
    with (HERE / "targets.csv").open(newline="", encoding="utf-8") as file:
        return {row["id"]: Target(**row) for row in csv.DictReader(file)}


# --- settings of Apt-Serve §6.2 ------------------------------------------------------------------------------------

TRACES = {"ShareGPT": "sharegpt", "HumanEval": "humaneval", "LongBench": "longbench"}
MODELS = {"13B": "opt-13b", "30B": "opt-30b", "66B": "opt-66b"}
OUTPUT_SCALES = {"LongBench": (1.0, 0.6, 0.4)}
"""Factors on output lengths that are tried, by data set; others run whole.

Reference answers of LongBench are longer than what the paper's rates allow: with whole ones even 1 request/s is far
beyond what the hardware can do, where the paper serves 1.5 to 3. Its client lets models stop early. How early is not
said, and it decides what a late gap costs: only the P99 of more than 100 gaps forgives one
(`Workload.share_with_gaps`)."""
OUTPUT_SCALE = {"LongBench": 0.4}
"""Factor where one is run alone."""


def slo_of(dataset: str, model: str) -> SLO:
    """Apt-Serve Table 3; `model` is 13B, 30B or 66B."""
    ttft, tbt = (targets()[f"T3-{dataset}-{model}-{which}"].number for which in ("ttft", "tbt"))
    return SLO(ttft_s=ttft, tbt_s=tbt)


def paper_config(
    dataset: str, model: str = "13B", *, output_scale: float | None = None, **changes: Any
) -> SimulationConfig:
    """A run under Apt-Serve's own conditions: A100 40 GB, Table 2's devices, hidden cache reprojected.

    Args:
        dataset: a name of `TRACES`.
        model: 13B, 30B or 66B.
        output_scale: factor on output lengths; None: that of `OUTPUT_SCALE`.
        changes: other fields of the configuration.
    """
    if output_scale is None:
        output_scale = OUTPUT_SCALE.get(dataset, 1.0)
    return SimulationConfig(
        **{
            "model": MODELS[model],
            "hardware": "a100-40gb",
            "num_devices": int(targets()[f"T2-{model}-gpus"].number),
            "trace": TRACES[dataset],
            "output_scale": output_scale,
            "hidden_attention": "reproject",
            "slo": slo_of(dataset, model),
            **changes,
        }
    )


# --- runs ----------------------------------------------------------------------------------------------------------


def source_digest() -> str:
    """Return a digest of the package's sources and data, so that stored runs of other code are not reused."""
    digest = hashlib.sha256()
    for folder, pattern in ((_PACKAGE, "**/*.py"), (_PACKAGE / "sim", "**/*")):
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def add_options(parser: argparse.ArgumentParser, *, requests: int, seeds: int = 3, out: Path = RESULTS) -> None:
    """Options that every command has; `requests`, `seeds` and `out` are the defaults."""
    parser.add_argument("--quick", action="store_true", help="few requests, one seed: seconds instead of minutes")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"default {seeds}; quick: 1")
    parser.add_argument("--requests", type=int, metavar="N", help=f"default {requests}; quick: 100")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help=f"default {out}")
    parser.add_argument(
        "--host-ms", type=float, default=0.0, metavar="MS", help="host time of every step that nothing hides; default 0"
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="FILE",
        help="finished runs; default build/paper-runs-<digest of the sources>.jsonl",
    )
    parser.set_defaults(default_requests=requests, default_seeds=seeds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """How a command runs: what it was told, and where finished runs are kept."""

    quick: bool
    num_requests: int
    seeds: tuple[int, ...]
    workers: int
    out: Path
    store: Store
    host_s: float = 0.0
    """Host time of every step, not overlapped with the device."""
    cells: tuple[Any, ...] = ()
    """The only cells of a table to run; empty: all."""

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "Runs":
        store = args.store or Path("build") / f"paper-runs-{source_digest()}.jsonl"
        num_seeds = args.seeds or (1 if args.quick else args.default_seeds)
        args.out.mkdir(parents=True, exist_ok=True)
        return cls(
            quick=args.quick,
            num_requests=args.requests or (100 if args.quick else args.default_requests),
            seeds=tuple(range(num_seeds)),
            workers=args.workers,
            out=args.out,
            store=Store(store),
            host_s=args.host_ms / 1e3,
            cells=tuple(getattr(args, "cells", None) or ()),
        )

    def map(
        self,
        what: str,
        function: Callable[..., dict[str, Any]],
        tasks: Iterable[tuple[Any, ...]],
    ) -> list[dict[str, Any]]:
        """`function(*task)` of every task, in their order, from the store where it is there.

        Args:
            what: shown at the progress bar.
            function: of a module, so that other processes find it; returns JSON values.
            tasks: arguments; the first is a `SimulationConfig`.
        """
        tasks = list(tasks)
        if self.host_s:
            tasks = [(dataclasses.replace(task[0], host_s=self.host_s, overlap=False), *task[1:]) for task in tasks]
        keys = [run_key(task[0], function=function.__name__, more=task[1:]) for task in tasks]
        missing = {k: t for k, t in zip(keys, tasks, strict=True) if self.store.get(k) is None}
        bars, total = ProgressBars(), len(set(keys))
        done = total - len(missing)
        try:
            bars(what, done, total)
            for key, result in self._results(function, missing):
                self.store.put(key, result)
                done += 1
                bars(what, done, total)
        finally:
            bars.close()
        return [self.store.get(key) or {} for key in keys]

    def _results(
        self, function: Callable[..., dict[str, Any]], missing: Mapping[str, tuple[Any, ...]]
    ) -> Iterable[tuple[str, dict[str, Any]]]:
        workers = min(self.workers, len(missing))
        if workers <= 1:
            for key, task in missing.items():
                yield key, function(*task)
            return
        # Not forked: the caller may have threads (JAX has).
        context = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(
            workers, context, initializer=end_with_parent, initargs=(os.getpid(),)
        )
        try:
            futures = {pool.submit(function, *task): key for key, task in missing.items()}
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


# --- comparison ----------------------------------------------------------------------------------------------------

_CLOSE = 0.1
_COLUMNS = [
    "id",
    "variant",
    "where",
    "metric",
    "dataset",
    "setting",
    "unit",
    "paper",
    "ours",
    "spread",
    "half_width",
    "seeds",
    "requests",
    "ratio",
    "verdict",
]


def new_file(text: str) -> Path:
    """A command line's file that can be written, asked before anything is measured."""
    if not Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r:.200}: there is no such directory")
    return Path(text)


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation over seeds; 0 of one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean over seeds (Student's t); 0 of one value."""
    n = len(values)
    return statistics.stdev(values) / n**0.5 * float(t.ppf(0.975, n - 1)) if n > 1 else 0.0


def paired(ours: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Mean of ours less base on the same seeds, and half of its 95 % interval."""
    differences = [a - b for a, b in zip(ours, base, strict=True)]
    return mean(differences), half_width(differences)


def verdict(target: Target, values: Sequence[float], agrees: bool | None) -> str:
    """See the top of this file."""
    ours, paper, half = mean(values), target.number, half_width(values)
    if target.bound:
        off = (paper - ours) * target.bound
        if abs(off) <= half:
            return "undecided"
        met = off < 0
    else:
        off = abs(ours - paper)
        met = off <= _CLOSE * abs(paper)
        if half > _CLOSE * abs(paper) and off <= half:
            return "undecided"
    if met:
        return "reproduced"
    return "same direction" if agrees else "differs"


def gain_verdict(gain: float, half: float, paper: float) -> str:
    """Return the verdict on a gain that the paper reports: "undecided" if our 95 % interval includes zero, "reproduced"
    if it includes the paper's gain and is narrow (2 points, or a fifth of the paper's gain)."""
    if abs(gain) <= half:
        return "undecided"
    if gain * paper <= 0:
        return "differs"
    is_narrow = half <= max(2.0, 0.2 * abs(paper))
    return "reproduced" if is_narrow and abs(gain - paper) <= half else "same direction"


def compare(
    target_id: str,
    ours: Sequence[float] | float,
    *,
    agrees: bool | None = None,
    variant: str = "",
    requests: int | None = None,
) -> dict[str, Any]:
    """A row of the table of targets.

    Args:
        target_id: of `targets.csv`.
        ours: one value a seed, in the target's unit.
        agrees: whether the order or sign is the paper's, where that can be said.
        variant: which of several ways ours was measured.
        requests: a run had, where runs were simulated.
    """
    target = targets()[target_id]
    values = [ours] if isinstance(ours, int | float) else list(ours)
    number = target.number
    return {
        **{c: getattr(target, c) for c in ("id", "where", "metric", "dataset", "setting", "unit")},
        "variant": variant,
        "paper": f"{number:g}",
        "ours": _text(mean(values)),
        "spread": _text(spread(values)) if len(values) > 1 else "",
        "half_width": _text(half_width(values)) if len(values) > 1 else "",
        "seeds": len(values) if len(values) > 1 else "",
        "requests": requests or "",
        "ratio": _text(mean(values) / number) if number else "",
        "verdict": verdict(target, values, agrees),
    }


def above(ours: Sequence[float], base: Sequence[float], *, or_equal: bool = False) -> bool | None:
    """Return True if ours exceeds `base` on the same seeds, False if it falls below, None if the seeds do not decide:
    the 95 % interval of the mean difference holds zero. A single seed, which has no interval, is taken at its word.

    Args:
        ours: one value a seed.
        base: one value a seed.
        or_equal: True also if ours is at least `base` on every seed.
    """
    gain, half = paired(ours, base)
    if gain > half or (or_equal and all(a >= b for a, b in zip(ours, base, strict=True))):
        return True
    return False if gain < -half or half == 0 else None


def claim(claim_id: str, where: str, text: str, holds: Sequence[bool | None], *, variant: str = "") -> dict[str, Any]:
    """A row for a statement without a number: ours is the number of cases in which it holds.

    Cases that are None, undecided, count for neither side: a statement is reproduced only if every case is decided.
    """
    num_held, num_undecided = sum(h is True for h in holds), sum(h is None for h in holds)
    num_failed = len(holds) - num_held - num_undecided
    if num_held == len(holds):
        said = "reproduced"
    elif num_undecided and 2 * max(num_held, num_failed) <= len(holds):
        said = "undecided"
    else:
        said = "same direction" if 2 * num_held > len(holds) else "differs"
    return {
        **dict.fromkeys(_COLUMNS, ""),
        "id": claim_id,
        "variant": variant,
        "where": where,
        "metric": text,
        "unit": f"of {len(holds)} cases" + (f", {num_undecided} undecided" if num_undecided else ""),
        "paper": "all",
        "ours": f"{num_held}",
        "ratio": _text(num_held / len(holds)),
        "verdict": said,
    }


def _text(value: float) -> str:
    return f"{value:.4g}"


# --- output --------------------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table; columns are those of the first row. Floats with five digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


def merge_csv(path: Path, rows: Sequence[Mapping[str, Any]], key: Sequence[str]) -> None:
    """Write a table; rows of the file whose `key` columns differ from those of all `rows` stay, behind them."""

    def of(row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(f"{row[k]:.5g}" if isinstance(row[k], float) else str(row[k]) for k in key)

    old: list[Mapping[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            old = list(csv.DictReader(file))
    new = {of(row) for row in rows}
    columns = list(dict.fromkeys([*rows[0], *(old[0] if old else ())]))
    kept = [row for row in old if of(row) not in new]
    write_csv(path, [{column: row.get(column, "") for column in columns} for row in [*rows, *kept]])


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Merge rows of `compare` and `claim` into a table: those of the same id and variant are replaced."""
    kept: dict[tuple[str, str], Mapping[str, Any]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = {(row["id"], row["variant"]): row for row in csv.DictReader(file)}
    kept.update({(row["id"], row["variant"]): row for row in rows})
    order = {target_id: i for i, target_id in enumerate(targets())}
    ordered = sorted(kept.values(), key=lambda r: (order.get(r["id"], len(order)), r["id"]))
    write_csv(path, [{column: row.get(column, "") for column in _COLUMNS} for row in ordered])


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        shown = f"{row['ours']} ± {row['half_width']}" if row["half_width"] else row["ours"]
        name = f"{row['id']} [{row['variant']}]" if row["variant"] else row["id"]
        print(f"{name:<52} paper {row['paper']:>6}  ours {shown:<18} {row['verdict']}")


def new_figure(rows: int, columns: int, *, width: float = 4.2, height: float = 3.2) -> Any:
    """A Matplotlib figure and its axes, a list of rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def save_figure(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
