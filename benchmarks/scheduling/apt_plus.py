"""`apt-plus` against Apt-Serve as published and as released, and what each of its rules contributes.

    python -m benchmarks.scheduling.apt_plus rates     rate at 90 % attainment with ten minutes of arrivals, beside every reading of Apt-Serve
    python -m benchmarks.scheduling.apt_plus picture   of these rates
    python -m benchmarks.scheduling.apt_plus strict    the share of requests with every gap in time
    python -m benchmarks.scheduling.apt_plus parts     one rule at a time left out or changed

Simulated OPT-13B on one A100 of 40 GB (Llama-2-7B on one of 80 GB for traces beyond OPT's 2,048 tokens). `apt` is the
paper's policy, with keys and values, with the paper's hybrid cache (reprojection), and with that cache and the rho that
the authors' probe most likely gave; `apt-released` is what its authors released. `apt-plus` uses absorption where the
model allows it; Llama-2 has rotary embedding, so it has the hybrid cache by reprojection there.

Constants were chosen with seeds from 100 on (`parts` uses these), on ShareGPT and LongBench and with a look at
mooncake-conv, azure-conv, HumanEval and WikiText. `rates` and `strict` judge on seeds from 0 on, and also on traces that
were not looked at. Differences and ratios are paired by seed, with 95 % intervals. Finished runs are kept in the store,
so that an interrupted benchmark goes on.
"""

import argparse
import csv
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO
from apt_jax.sched import INTERFACE_VERSION, SchedulerView
from apt_jax.sched.policies.apt_plus import AptPlusPolicy
from apt_jax.sched.step_packer import Rows
from apt_jax.sim.config import SimulationConfig
from benchmarks.paper.apt_serve import RHO_US, attainment, crossings, seeded
from benchmarks.paper.common import (
    Runs,
    add_options,
    half_width,
    mean,
    new_figure,
    paired,
    save_figure,
    write_csv,
)

RESULTS = Path(__file__).resolve().parents[1] / "results" / "apt-plus"

APT_KV, APT_HYBRID, APT_PROBED = (
    "apt, KV",
    "apt, hybrid by reprojection",
    "apt, hybrid, rho as probed",
)
UNCOUNTED, RELEASED_KV, RELEASED, RELEASED_PROBED = (
    "apt, hybrid, violated not counted",
    "apt-released, KV",
    "apt-released, hybrid",
    "apt-released, hybrid, rho as probed",
)
PLUS = "apt-plus"
ABSORB = {"cache": "hybrid", "hidden_attention": "absorb"}
HIDDEN = {"cache": "hidden", "hidden_attention": "absorb"}
OF_PLUS: dict[str, Any] = {"policy": "apt-plus", **ABSORB}
READINGS: dict[str, dict[str, Any]] = {
    APT_KV: {"policy": "apt", "cache": "kv", "hidden_attention": "reproject"},
    APT_HYBRID: {"policy": "apt", "cache": "hybrid", "hidden_attention": "reproject"},
    APT_PROBED: {"policy": "apt", "cache": "hybrid", "hidden_attention": "reproject", "rho_us": RHO_US},
    UNCOUNTED: {"policy": "apt?count_violated=false", "cache": "hybrid", "hidden_attention": "reproject"},
    RELEASED_KV: {"policy": "apt-released", "cache": "kv", "hidden_attention": "reproject"},
    RELEASED: {"policy": "apt-released", "cache": "hybrid", "hidden_attention": "reproject"},
    RELEASED_PROBED: {"policy": "apt-released", "cache": "hybrid", "hidden_attention": "reproject", "rho_us": RHO_US},
}
"""All readings of Apt-Serve: of its text, of Eq. 5 as in its authors' code, and of all of that code."""


class LargestFirst(AptPlusPolicy):
    """`apt-plus`, but of those that may pause the one with most blocks goes first, as the paper's knapsack drops
    them."""

    interface_version = INTERFACE_VERSION

    def _pause_order(self, view: SchedulerView, decoding: Rows) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        is_free = self.may_wait(view, decoding)
        return np.lexsort((-view.table.num_blocks.take(decoding), ~is_free)), is_free


PARTS: dict[str, dict[str, Any]] = {
    PLUS: OF_PLUS,
    "keys and values alone": {**READINGS[APT_KV], "policy": "apt-plus"},
    "late gaps are not spent": {"policy": "apt-plus?forgiven_gaps=0", **ABSORB},
    "nobody pauses for others": {"policy": "apt-plus?urgent_share=0", **ABSORB},
    "pauses at once, not when urgent": {"policy": "apt-plus?urgent_share=1", **ABSORB},
    "the largest pause first": {"policy": "benchmarks.scheduling.apt_plus:LargestFirst", **ABSORB},
    "pauses without a bound": {"policy": "apt-plus?recompute_share=1e9", **ABSORB},
    "a bound of 6 %": {"policy": "apt-plus?recompute_share=0.06", **ABSORB},
    "a bound of a quarter": {"policy": "apt-plus?recompute_share=0.25", **ABSORB},
    "pauses for large requests too": {"policy": "apt-plus?largest_share=1.0", **ABSORB},
    "no reserve for growth": {"policy": "apt-plus?reserve_tokens=0", **ABSORB},
    "late ones need no more room": {"policy": "apt-plus?leftover_tokens=16", **ABSORB},
    "the paper's decisions, all hidden by absorption": {"policy": "apt", **HIDDEN},
    "the paper's decisions, hybrid by absorption": {"policy": "apt", **ABSORB},
}

TRACES = {
    # trace: (model, hardware, SLO, rates of `strict`)
    "sharegpt": ("opt-13b", "a100-40gb", SLO(ttft_s=1.0, tbt_s=1.0), (4.0, 8.0)),
    "longbench": ("opt-13b", "a100-40gb", SLO(ttft_s=4.0, tbt_s=1.0), (1.0, 1.3)),
    "humaneval": ("opt-13b", "a100-40gb", SLO(ttft_s=0.5, tbt_s=0.5), (8.0, 14.0)),
    "wikitext": ("opt-13b", "a100-40gb", SLO(ttft_s=4.0, tbt_s=1.0), (0.8, 1.6)),
    "bros-sharegpt": ("opt-13b", "a100-40gb", SLO(ttft_s=1.0, tbt_s=1.0), (3.0, 6.0)),
    "bros-lmsys": ("opt-13b", "a100-40gb", SLO(ttft_s=1.0, tbt_s=1.0), (3.0, 6.0)),
    "azure-conv": ("llama-2-7b", "a100-80gb", SLO(ttft_s=2.0, tbt_s=0.5), (3.0, 6.0)),
    "mooncake-conv": ("llama-2-7b", "a100-80gb", SLO(ttft_s=4.0, tbt_s=1.0), (1.5, 4.0)),
}
TUNED = ("sharegpt", "longbench")
LONG = ("sharegpt", "longbench", "humaneval", "wikitext", "bros-sharegpt", "bros-lmsys")
"""Traces of `rates`."""
NEAR = 0.98
"""Share of the best reading's rate on the first seed from which on a reading runs on the other seeds."""
FIRST_TUNING_SEED = 100


def config_of(trace: str, system: dict[str, Any], **changes: Any) -> SimulationConfig:
    """One run; a model without absorption gets reprojection, and keys and values where the hidden kind was to be the
    only one."""
    model, hardware, slo, _ = TRACES[trace]
    if model != "opt-13b":
        cache = "kv" if system["cache"] == "hidden" else system["cache"]
        system = {**system, "cache": cache, "hidden_attention": "reproject"}
    return SimulationConfig(
        **{"model": model, "hardware": hardware, "trace": trace, "slo": slo, "rate": 1.0, "drop_too_long": True, **system, **changes}
    )  # fmt: skip


def rates(runs: Runs, traces: Sequence[str], cvs: Sequence[float]) -> None:
    """Rates at 90 % attainment with ten minutes of arrivals (500 requests if they are more), beside every reading of
    Apt-Serve; the ratio of `apt-plus` to the best of them on each seed; and what the highest rates tried that hold 90 %
    were bought with.

    All run on the first seed, from where its search begins on the others; a system that holds less than `NEAR` of the
    best there is left out of the others (column "seeds").
    """
    systems = {**READINGS, PLUS: OF_PLUS}
    minutes = 0.1 if runs.quick else 10.0
    starts = {"sharegpt": (4.0, 14.0), "longbench": (1.2, 1.7)}
    shapes = [(trace, cv) for trace in traces for cv in cvs]
    found: dict[Any, list[dict[str, Any]]] = {}

    def search(of: dict[tuple[str, float, str], float], seeds: Sequence[int]) -> None:
        tasks = [
            (one, (0.9,), (start,), minutes)
            for (trace, cv, name), start in of.items()
            for one in seeded(config_of(trace, systems[name], cv=cv, num_requests=runs.num_requests), seeds)
        ]
        results = iter(runs.map("rates", crossings, tasks))
        for key in of:
            found.setdefault(key, []).extend(next(results) for _ in seeds)

    search(
        {
            (trace, cv, name): starts.get(trace, TRACES[trace][3])[name == PLUS] / cv**0.5
            for trace, cv in shapes
            for name in systems
        },
        runs.seeds[:1],
    )
    first = {key: results[0]["rates"][0] for key, results in found.items()}
    near = {shape: NEAR * max(first[*shape, name] for name in systems if name != PLUS) for shape in shapes}
    search({key: rate for key, rate in first.items() if key[-1] == PLUS or rate >= near[key[:2]]}, runs.seeds[1:])
    table, bought, by_seed = [], [], []
    length = {"minutes": minutes}
    for trace, cv in shapes:
        of = {name: [r["rates"][0] for r in found[trace, cv, name]] for name in systems}
        best = [max(r[i] for name, r in of.items() if name != PLUS and i < len(r)) for i in range(len(runs.seeds))]
        ratio = (np.array(of[PLUS]) / best).tolist()
        table.append(
            {"trace": trace, "cv": cv, **{name: mean(r) for name, r in of.items()},
             "ratio": mean(ratio), "half_width": half_width(ratio), "least": min(ratio), "seeds": len(ratio), **length}
        )  # fmt: skip
        print(table[-1], flush=True)
        by_seed += [
            {"trace": trace, "cv": cv, "system": name, "seed": seed, "rate": rate, **length}
            for name, rates in of.items()
            for seed, rate in zip(runs.seeds, rates, strict=False)
        ]
        for name in systems:
            held = [_highest_held(r) for r in found[trace, cv, name]]
            bought.append(
                {"trace": trace, "cv": cv, "system": name, "rate": mean(of[name]), "half_width": half_width(of[name]),
                 "rate_tried": mean([h["rate"] for h in held]), **{f"{k}_percent": 100 * mean([h[k] for h in held]) for k in ("slo", "strict", "bound")},
                 **{k: mean([h[k] for h in held]) for k in COSTS}, "seeds": len(held), **length}
            )  # fmt: skip
    merge_csv(runs.out / "rates.csv", table)
    merge_csv(runs.out / "rates-bought-with.csv", bought)
    merge_csv(runs.out / "rates-by-seed.csv", by_seed)


def _highest_held(found: dict[str, Any]) -> dict[str, Any]:
    """Return what a run gave at the highest rate tried that holds 90 %; at the lowest rate tried if none does."""
    rate_of = {step: 2 ** (int(step) / 3) for step in found["at"]}
    holds = [step for step, r in found["at"].items() if r["slo"] >= 0.9]
    step = max(holds, key=rate_of.__getitem__) if holds else min(rate_of, key=rate_of.__getitem__)
    return {**found["at"][step], "rate": rate_of[step]}


def merge_csv(path: Path, table: Sequence[dict[str, Any]]) -> None:
    """Write a table; rows that the file has of other traces, CVs and rates stay if they have the same columns."""
    key = ("trace", "cv", "system", "seed") if "system" in table[0] else ("trace", "cv", "rate")

    def of(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(float(row[k]) if k in ("cv", "rate", "seed") else row[k] for k in key if k in row)

    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            rows = {of(row): row for row in csv.DictReader(file) if set(row) == set(table[0])}
    rows |= {of(row): row for row in table}
    write_csv(path, list(rows.values()))


COSTS = ("tokens_per_s", "ttft_p99_s", "recomputed_tokens", "longest_gap_p99_s")


def _measured(
    runs: Runs,
    what: str,
    shapes: Sequence[tuple[str, float, float]],
    systems: dict[str, dict[str, Any]],
) -> dict[tuple[str, float, float, str], list[dict[str, Any]]]:
    """`attainment` of (trace, CV, rate) shapes and systems, one for each seed."""
    keys, tasks = [], []
    for trace, cv, rate in shapes:
        for name, system in systems.items():
            config = config_of(trace, system, cv=cv, rate=rate, num_requests=runs.num_requests)
            for one in seeded(config, runs.seeds):
                keys.append((trace, cv, rate, name))
                tasks.append((one,))
    found: dict[tuple[str, float, float, str], list[dict[str, Any]]] = {}
    for key, result in zip(keys, runs.map(what, attainment, tasks), strict=True):
        found.setdefault(key, []).append(result)
    return found


STRICT: dict[str, dict[str, Any]] = {
    APT_KV: READINGS[APT_KV],
    "apt-plus, KV": {**READINGS[APT_KV], "policy": "apt-plus"},
    "apt-plus, KV, forgiven_gaps=0": {**READINGS[APT_KV], "policy": "apt-plus?forgiven_gaps=0"},
    PLUS: OF_PLUS,
    "apt-plus, forgiven_gaps=0": {"policy": "apt-plus?forgiven_gaps=0", **ABSORB},
}


def strict(runs: Runs, traces: Sequence[str], cvs: Sequence[float]) -> None:
    """Share of requests with every gap in time, under load: paired differences to `apt` on keys and values."""
    shapes = [(trace, cv, rate) for trace in traces for cv in cvs for rate in TRACES[trace][3]]
    found = _measured(runs, "strict", shapes, STRICT)
    table = []
    for shape in shapes:
        base = [100 * r["strict"] for r in found[*shape, APT_KV]]
        for name in STRICT:
            of = found[*shape, name]
            gain, half = paired([100 * r["strict"] for r in of], base)
            table.append(
                {"trace": shape[0], "cv": shape[1], "rate": shape[2], "system": name, "strict_percent": mean([100 * r["strict"] for r in of]),
                 "gain": gain, "half_width": half, "slo_percent": mean([100 * r["slo"] for r in of]),
                 **{k: mean([r[k] for r in of]) for k in COSTS}, "seeds": len(of), "requests": runs.num_requests}
            )  # fmt: skip
    write_csv(runs.out / "strict.csv", table)
    for row in table:
        print({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()})


def parts(runs: Runs, traces: Sequence[str], cvs: Sequence[float]) -> None:
    """Rules left out, on the tuning seeds."""
    runs = dataclasses.replace(runs, seeds=tuple(FIRST_TUNING_SEED + s for s in runs.seeds))
    shapes = [
        s
        for s in (("sharegpt", 1.0, 14.0), ("sharegpt", 5.0, 8.0), ("longbench", 1.0, 1.75))
        if s[0] in traces and s[1] in cvs
    ]
    found = _measured(runs, "parts", shapes, PARTS)
    table = []
    for shape in shapes:
        base = [100 * r["slo"] for r in found[*shape, PLUS]]
        for name in PARTS:
            of = found[*shape, name]
            at = [100 * r["slo"] for r in of]
            gain, half = paired(at, base)
            table.append(
                {"trace": shape[0], "cv": shape[1], "rate": shape[2], "variant": name, "slo_percent": mean(at), "difference": gain,
                 "half_width": half, "strict_percent": mean([100 * r["strict"] for r in of]), **{k: mean([r[k] for r in of]) for k in COSTS}, "seeds": len(at), "requests": runs.num_requests}
            )  # fmt: skip
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in table[-1].items()})
    write_csv(runs.out / "parts.csv", table)


def picture(runs: Runs, traces: Sequence[str], cvs: Sequence[float]) -> None:
    """Draw the ratios that `rates` found; no run."""
    with (runs.out / "rates-by-seed.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["trace"] in traces and float(row["cv"]) in cvs]
    found: dict[tuple[float, str], dict[int, dict[str, float]]] = {}
    for row in rows:
        of = found.setdefault((float(row["cv"]), row["trace"]), {}).setdefault(int(row["seed"]), {})
        of[row["system"]] = float(row["rate"])
    figure, ((axis,),) = new_figure(1, 1, width=9.0, height=0.45 * len(found) + 1.3)
    for y, ((cv, trace), seeds) in enumerate(
        sorted(found.items(), key=lambda item: (item[0][0], traces.index(item[0][1])))
    ):
        best = [max(rate for name, rate in of.items() if name != PLUS) for of in seeds.values()]
        ratio = [of[PLUS] / b for of, b in zip(seeds.values(), best, strict=True)]
        axis.barh(y, mean(ratio), xerr=half_width(ratio), color="C0", capsize=3)
        kind = "" if cv == 1 else f", bursts (CV {cv:g})"
        plus = mean([of[PLUS] for of in seeds.values()])
        axis.text(
            mean(ratio) + half_width(ratio) + 0.05,
            y,
            f"{mean(best):.3g} -> {plus:.3g} requests/s",
            va="center",
            fontsize="small",
        )
        axis.text(0.03, y, f"{trace}{kind}", va="center", color="white", fontsize="small", weight="bold")
    axis.axvline(1.0, color="black", lw=1)
    axis.set(
        xlabel="rate of apt-plus over that of Apt-Serve, the best of seven readings on each seed",
        title="Requests/s of which 90 % are within their objectives, ten minutes of arrivals\nOPT-13B on one A100 of 40 GB, simulated",
        yticks=[],
    )
    axis.set_xlim(0, 1.25 * axis.get_xlim()[1])
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    save_figure(figure, runs.out / "rates.png")


COMMANDS = {
    # name: (function, requests a run, seeds, traces)
    "rates": (rates, 500, 6, LONG),
    "strict": (strict, 1000, 6, LONG),
    "parts": (parts, 1000, 5, TUNED),
    "picture": (picture, 0, 6, LONG),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (function, requests, seeds, traces) in COMMANDS.items():
        one = commands.add_parser(name, help=(function.__doc__ or "").splitlines()[0].replace("%", "%%"))
        add_options(one, requests=requests, seeds=seeds, out=RESULTS)
        one.add_argument("--traces", nargs="+", choices=list(TRACES), default=list(traces))
        one.add_argument(
            "--cv",
            nargs="+",
            type=float,
            default=[1.0, 5.0, 10.0],
            help="of arrivals; default 1 5 10",
        )
    args = parser.parse_args(argv)
    COMMANDS[args.command][0](Runs.from_args(args), args.traces, args.cv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
