"""BROS Figs. 3 and 10 to 14 in simulation: real-time requests beside best-effort ones, and alone.

Times are simulated; what is timed on this machine are calls of the scheduler (Fig. 14). Setup of §7.1: OPT-13B on two
and OPT-30B on four A100 40 GB, Llama-3-70B on eight A100 80 GB, tensor parallel, greedy, blocks of 16. Real-time (RT)
requests have the lengths of Table 2 and Poisson arrivals; their objectives are 0.4 s to the first token (TTFT) and 0.2
s a token on average after it (TPOT). Best-effort (BE) requests come in batches: the next one when all of the one before
have ended (a closed loop), from the start until the last RT arrival. Then the RT requests that are left run to their
end.

    fig3      512 RT requests alone: first come first served against preemption by waiting time, with the share of
              queueing; preempted requests are computed again, or come back from host memory
    fig10     mean normalised latency of RT requests and throughput of BE requests, over request rates
    fig11     TTFT and TPOT attainment of the same runs
    fig12     RT requests alone: normalised latency and throughput
    fig13     OPT-30B at 10 requests/s, with the memory management of §5 and without
    fig14     share of scheduling in the time of an iteration, in the runs of fig10 with OPT
    combined  BROS with the hybrid cache of Apt-Serve by absorption, beside BROS and apt-plus alone
    variants  what single choices change, in one run per rate: round robin by phases, token groups, the paper's
              replacement and packing

Policies: `fcfs` (vLLM), `tgi`, `round-robin` (RR), `bros`. `bros` has host memory and blocks that RT and BE requests
share; `bros-recompute` has neither, as in the paper's Figs. 12 and 13 ("we simply perform recomputation"), and the other
systems have neither. Prompts are all different, so nothing is found in the cache but a request's own.

The paper gives neither the rates (but the highest, 15 requests/s), nor the size of a BE batch, nor that of host memory;
all are ours. It has 15 points and runs of 10 minutes: `--points 15 --duration 600`. The default is 9 points of one
minute, of which the first batch alone keeps BE work waiting. vLLM and RR have vLLM's limit of 256 running requests; TGI
has none, and the adaptive batch of BROS grows up to 1,024.

    python -m benchmarks.paper.bros all [--quick] [--out DIRECTORY] [--workers N] [--store FILE]
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.bros_runs import (
    COMBINED,
    DATASETS,
    MAX_NUM_SEQS,
    MEMORIES,
    MODELS,
    POLICIES,
    PURE,
    SHOWN,
    SWAP_GIB_PER_DEVICE,
    Mixed,
)
from benchmarks.paper.cases import effect, print_facts, run_cases
from benchmarks.paper.common import (
    RESULTS,
    above,
    claim,
    compare,
    half_width,
    mean,
    new_figure,
    paired,
    print_rows,
    save_figure,
    targets,
    write_csv,
    write_rows,
)

Row = dict[str, Any]
# --- figures ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    out: Path
    store: Path | None
    workers: int
    quick: bool
    duration_s: float
    be_batch: int
    max_num_seqs: int | None
    num_points: int
    num_seeds: int
    first_seed: int = 0
    swap_gib: float
    """Host memory for each device, of policies that have some."""
    overhead_s: float

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.first_seed, self.first_seed + self.num_seeds))

    @property
    def points(self) -> list[tuple[str, float]]:
        """Model and rate, 15 a data set in the paper; of nine, the lowest, the middle and the highest rate of each."""
        step = 1 if self.num_points == 15 else 2
        points = [(model, rate) for model, (_, _, rates, _) in MODELS.items() for rate in rates[::step]]
        return points if self.num_points > 2 else points[1:3]

    def case(self, policy: str, dataset: str, point: tuple[str, float], seed: int) -> Mixed:
        has_memory = policy.endswith("-memory") or (policy.startswith("bros") and not policy.endswith("-recompute"))
        return Mixed(
            policy=policy,
            model=point[0],
            dataset=dataset,
            rate=point[1],
            duration_s=self.duration_s,
            be_batch=self.be_batch,
            max_num_seqs=self.max_num_seqs or MAX_NUM_SEQS.get(policy.split("-")[0], 256),
            seed=seed,
            swap_gib=has_memory * self.swap_gib * MODELS[point[0]][1],
            share_blocks=has_memory and policy.startswith("bros") and policy != "bros-swap",
            is_lazy=policy != "bros-eager",
            overhead_s=self.overhead_s,
            cache_mode="hybrid" if "kinds" in policy or policy.startswith("apt") else "kv",
        )


Results = dict[Mixed, dict[str, Any]]


def _measure(options: Options, policies: Sequence[str], name: str) -> Results:
    cases = [
        options.case(policy, dataset, point, seed)
        for point, dataset, seed, policy in itertools.product(options.points, DATASETS, options.seeds, policies)
    ]
    results = run_cases(cases, options.store, options.workers)
    write_csv(options.out / f"bros_{name}.csv", [{**dataclasses.asdict(c), **results[c]} for c in cases])
    return results


def _by_seed(options: Options, results: Results, policy: str, dataset: str, metric: str) -> list[float]:
    """Mean over the cases of a data set, one a seed."""
    return [
        float(np.mean([results[options.case(policy, dataset, p, s)][metric] for p in options.points]))
        for s in options.seeds
    ]


def _plot(options: Options, results: Results, policies: Sequence[str], metrics: dict[str, str], name: str) -> None:
    models = list(dict.fromkeys(model for model, _ in options.points))
    panels = list(itertools.product(DATASETS, metrics))
    figure, axes = new_figure(len(panels), len(models), height=2.3)
    for line, (dataset, metric) in zip(axes, panels, strict=True):
        for axis, model in zip(line, models, strict=True):
            rates = [rate for of, rate in options.points if of == model]
            for policy in policies:
                values = np.array(
                    [
                        [results[options.case(policy, dataset, (model, r), s)][metric] for r in rates]
                        for s in options.seeds
                    ]
                )
                axis.errorbar(
                    rates,
                    values.mean(0),
                    values.std(0, ddof=1) if len(values) > 1 else None,
                    marker=".",
                    label=SHOWN[policy],
                )
            axis.set(title=f"{model}, {dataset}", ylabel=metrics[metric], xlabel="RT requests/s")
            if metric == "normalised_latency_s":
                axis.set(yscale="log")
    axes[0][0].legend(fontsize="x-small")
    save_figure(figure, options.out / f"bros_{name}.png")


def fig10(options: Options) -> list[Row]:
    results = _measure(options, tuple(POLICIES), "fig10_11")
    rows = []
    for dataset, (other, tag) in itertools.product(DATASETS, (("fcfs", "vllm"), ("round-robin", "rr"))):
        for kind, metric in (("lat", "normalised_latency_s"), ("be", "be_per_s")):
            ours, theirs = (_by_seed(options, results, p, dataset, metric) for p in ("bros", other))
            cut = [100 * (1 - a / b) if b else 0.0 for a, b in zip(ours, theirs, strict=True)]
            target = f"B-{kind}-{dataset}-{tag}"
            rows.append(effect(target, cut) if kind == "lat" else compare(target, cut, agrees=float(np.mean(cut)) > 0))
    metrics = {"normalised_latency_s": "s/token", "be_per_s": "BE requests/s"}
    _plot(options, results, tuple(POLICIES), metrics, "fig10")
    return rows


def fig11(options: Options) -> list[Row]:
    results = _measure(options, tuple(POLICIES), "fig10_11")
    rows = []

    def percent(policy: str, datasets: Sequence[str], metric: str) -> list[float]:
        each = [_by_seed(options, results, policy, d, metric) for d in datasets]
        return [100 * float(np.mean(values)) for values in zip(*each, strict=True)]

    for dataset, (other, tag), kind in itertools.product(
        DATASETS, (("fcfs", "vllm"), ("round-robin", "rr")), ("ttft", "tpot")
    ):
        ours, theirs = (percent(p, (dataset,), f"{kind}_attainment") for p in ("bros", other))
        # Nothing attained in any of hundreds of requests counts as half of one request.
        least = 100 * 0.5 / min(r["rt_requests"] for r in results.values())
        ratio = [a / max(b, least) for a, b in zip(ours, theirs, strict=True)]
        rows.append(effect(f"B-{kind}-{dataset}-{tag}", ratio))
    both = tuple(DATASETS)
    rows.append(compare("B-vllm-ttft", percent("fcfs", both, "ttft_attainment"), agrees=None))
    for dataset in DATASETS:
        never = [
            15
            / len(options.points)
            * sum(results[options.case("fcfs", dataset, p, s)]["ttft_attainment"] == 0 for p in options.points)
            for s in options.seeds
        ]
        rows.append(compare("B-vllm-zero", never, variant=dataset))
    rows.append(compare("B-rr-ttft", percent("round-robin", both, "ttft_attainment")))
    for policy, tag in (("round-robin", "rr"), ("bros", "bros")):
        for dataset in DATASETS:
            values = percent(policy, (dataset,), "tpot_attainment")
            rows.append(compare(f"B-{tag}-tpot-{dataset}", values))
    metrics = {"ttft_attainment": "TTFT attainment", "tpot_attainment": "TPOT attainment"}
    _plot(options, results, tuple(POLICIES), metrics, "fig11")
    return rows


def fig12(options: Options) -> list[Row]:
    options = dataclasses.replace(options, be_batch=0)
    results = _measure(options, PURE, "fig12")
    rows = []
    for dataset in DATASETS:
        latency = {p: _by_seed(options, results, p, dataset, "normalised_latency_s") for p in PURE}
        served = {p: _by_seed(options, results, p, dataset, "rt_per_s") for p in PURE}
        cut = [100 * (1 - b / a) for a, b in zip(latency["fcfs"], latency["bros-recompute"], strict=True)]
        rows.append(effect("B-rt-lat", cut, variant=dataset))
        gain = [b / a for a, b in zip(served["fcfs"], served["bros-recompute"], strict=True)]
        rows.append(effect("B-rt-thr", gain, variant=dataset))
        # The paper says of TGI that BROS outperforms it, without a number.
        holds = [
            results[options.case("bros-recompute", dataset, p, s)]["normalised_latency_s"]
            <= results[options.case("tgi", dataset, p, s)]["normalised_latency_s"]
            for p in options.points
            for s in options.seeds
        ]
        text = "BROS has less normalised latency than TGI, RT alone"
        rows.append(claim("B-rt-tgi", "Sec 7.3", text, holds, variant=dataset))
    metrics = {"normalised_latency_s": "s/token", "rt_per_s": "RT requests/s"}
    _plot(options, results, PURE, metrics, "fig12")
    return rows


def fig3(options: Options) -> list[Row]:
    policies = ("fcfs", "longest-wait", "longest-wait-256", "longest-wait-memory", "longest-wait-256-memory")
    rates = (8.0, 30.0) if options.quick else (5.0, 10.0, 15.0, 20.0, 30.0)
    num = 12 if options.quick else 512

    def case(policy: str, rate: float, seed: int) -> Mixed:
        return Mixed(
            policy=policy,
            model="opt-13b",
            dataset="share",
            rate=rate,
            be_batch=0,
            num_requests=num,
            seed=seed,
            swap_gib=policy.endswith("-memory") * options.swap_gib * MODELS["opt-13b"][1],
        )

    cases = [case(*of) for of in itertools.product(policies, rates, options.seeds)]
    results = run_cases(cases, options.store, options.workers)
    write_csv(options.out / "bros_fig3.csv", [{**dataclasses.asdict(c), **results[c]} for c in cases])
    metrics = {"normalised_latency_s": "s/token", "queueing_share": "share of queueing"}
    figure, axes = new_figure(1, 2)
    rows = []
    for axis, (metric, label) in zip(axes[0], metrics.items(), strict=True):
        values = {p: [[results[case(p, r, s)][metric] for s in options.seeds] for r in rates] for p in policies}
        for policy, of in values.items():
            axis.plot(rates, np.mean(of, axis=1), marker=".", label=SHOWN[policy])
        axis.set(xlabel="RT requests/s", ylabel=label)
        for policy in policies[1:]:
            holds = [above(a, b) for a, b in zip(values["fcfs"], values[policy], strict=True)]
            text = f"preemption by waiting time lowers {label}"
            name = f"B-fig3-{metric.split('_')[0]}"
            rows.append(claim(name, "Fig 3", text, holds, variant=SHOWN[policy]))
    axes[0][0].set(yscale="log")
    axes[0][0].legend(fontsize="x-small")
    save_figure(figure, options.out / "bros_fig3.png")
    return rows


def fig13(options: Options) -> list[Row]:
    """With and without bidirectional blocks; beside it what lies between the two."""
    point = ("opt-30b", 10.0)
    cases = {
        (policy, dataset, seed): options.case(policy, dataset, point, seed)
        for policy, dataset, seed in itertools.product(map(str, MEMORIES), DATASETS, options.seeds)
    }
    results = run_cases(list(cases.values()), options.store, options.workers)
    write_csv(options.out / "bros_fig13.csv", [{**dataclasses.asdict(c), **results[c]} for c in cases.values()])

    def of(policy: str, dataset: str, metric: str) -> list[float]:
        return [results[cases[policy, dataset, seed]][metric] for seed in options.seeds]

    metrics = {
        "ttft_attainment": "TTFT attainment",
        "tpot_attainment": "TPOT attainment",
        "normalised_latency_s": "s/token",
        "be_per_s": "BE requests/s",
    }
    rows = []
    figure, axes = new_figure(len(DATASETS), len(metrics), width=3.2, height=2.3)
    for line, dataset in zip(axes, DATASETS, strict=True):
        for axis, (metric, label) in zip(line, metrics.items(), strict=True):
            values = [of(policy, dataset, metric) for policy in MEMORIES]
            axis.barh([SHOWN[p] for p in MEMORIES], [mean(v) for v in values], xerr=[half_width(v) for v in values])
            axis.invert_yaxis()
            axis.set(title=dataset, xlabel=label)
            if axis is not line[0]:
                axis.set_yticklabels([])
        for kind in ("ttft", "tpot"):
            on, without = (of(policy, dataset, f"{kind}_attainment") for policy in ("bros", "bros-recompute"))
            ratio = [a / b for a, b in zip(on, without, strict=True) if b]
            rows += [effect(f"B-bi-{kind}", ratio, variant=dataset)] if ratio else []
        for policy in MEMORIES[1:]:
            for metric in metrics:
                gain, half = paired(of("bros", dataset, metric), of(policy, dataset, metric))
                print(f"{dataset:<6} bros - {policy:<15} {metric:<21} {gain:+.4f} ± {half:.4f}")
    save_figure(figure, options.out / "bros_fig13.png")
    return rows


def fig14(options: Options) -> list[Row]:
    results = _measure(options, tuple(POLICIES), "fig10_11")
    models = {"opt-13b": "B-ovh13", "opt-30b": "B-ovh30"}
    shares: dict[tuple[str, str], list[float]] = {}
    rows = []
    for (model, target), policy in itertools.product(models.items(), POLICIES):
        by_seed = [
            float(
                np.mean(
                    [
                        100 * results[options.case(policy, dataset, p, s)]["schedule_share"]
                        for dataset in DATASETS
                        for p in options.points
                        if p[0] == model
                    ]
                    or [np.nan]
                )
            )
            for s in options.seeds
        ]
        if np.isnan(by_seed).any():
            continue
        shares[model, policy] = by_seed
        if policy == "bros":
            less = float(np.mean(by_seed)) <= targets()[target].number
            row = compare(target, by_seed, agrees=less)
            rows.append({**row, "paper": targets()[target].value})
    write_csv(
        options.out / "bros_fig14.csv",
        [
            {"model": model, "policy": p, "seed": s, "schedule_share_percent": share}
            for (model, p), of in shares.items()
            for s, share in zip(options.seeds, of, strict=True)
        ],
    )
    figure, axes = new_figure(1, 1)
    for i, policy in enumerate(POLICIES):
        own = [(m, float(np.mean(of))) for (m, p), of in shares.items() if p == policy]
        at = np.arange(len(own)) + 0.25 * i
        axes[0][0].bar(at, [share for _, share in own], 0.2, label=SHOWN[policy])
        axes[0][0].set_xticks(np.arange(len(own)) + 0.25, [m for m, _ in own])
    axes[0][0].set(ylabel="scheduling, % of an iteration")
    axes[0][0].legend(fontsize="x-small")
    save_figure(figure, options.out / "bros_fig14.png")
    return rows


def combined(options: Options) -> list[Row]:
    """No target: BROS and apt-plus, and what each has of the other. OPT at 10 requests/s, where memory is short; no hidden cache of
    the 70B is smaller than its keys and values."""
    points = [("opt-13b", 10.0), ("opt-30b", 10.0)][: 1 if options.quick else 2]
    cases = {
        (policy, dataset, point, seed): options.case(policy, dataset, point, seed)
        for policy, dataset, point, seed in itertools.product(COMBINED, DATASETS, points, options.seeds)
    }
    results = run_cases(list(cases.values()), options.store, options.workers)
    write_csv(options.out / "bros_combined.csv", [{**dataclasses.asdict(c), **results[c]} for c in cases.values()])
    metrics = ("normalised_latency_s", "ttft_attainment", "tpot_attainment", "be_per_s", "recomputed_tokens")
    for dataset, point in itertools.product(DATASETS, points):
        print(
            f"{dataset}, {point[0]}, {point[1]:g} requests/s: mean, and the difference from bros with a 95 % interval"
        )
        print(f"{'':<40}" + "".join(f"{m:>30}" for m in metrics))
        for policy in COMBINED:
            cells = []
            for metric in metrics:
                ours, theirs = (
                    [float(results[cases[p, dataset, point, seed]][metric]) for seed in options.seeds]
                    for p in (policy, "bros")
                )
                gain, half = paired(ours, theirs)
                cells.append(f"{mean(ours):>12.4g} {gain:>+9.3g} ± {half:<6.2g}")
            print(f"{SHOWN[policy]:<40}" + "".join(cells))
    return []


def variants(options: Options) -> list[Row]:
    """No target: a table of what single choices change."""
    names = ("round-robin", "round-robin-phases", "bros", "bros-groups", "bros-any", "bros-literal")
    results = _measure(options, names, "variants")
    metrics = ("normalised_latency_s", "ttft_attainment", "tpot_attainment", "be_per_s")
    print(f"{'':<20}" + "".join(f"{m:>22}" for m in metrics))
    for name in names:
        of = [np.mean([_by_seed(options, results, name, dataset, m) for dataset in DATASETS]) for m in metrics]
        print(f"{name:<20}" + "".join(f"{value:>22.4g}" for value in of))
    return []


FIGURES = {
    "fig3": fig3,
    "fig10": fig10,
    "fig11": fig11,
    "fig12": fig12,
    "fig13": fig13,
    "fig14": fig14,
    "combined": combined,
    "variants": variants,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("figures", nargs="+", choices=(*FIGURES, "all"))
    parser.add_argument("--quick", action="store_true", help="tiny settings, seconds in all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--store", type=Path, help="keeps finished runs, to go on from later")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--duration", type=float, help="of RT arrivals, s; default 60, quick 10")
    parser.add_argument("--be-batch", type=int, help="BE requests at once; default 256, quick 64")
    parser.add_argument("--max-num-seqs", type=int, help="of all policies; default 256, bros and tgi 1024")
    parser.add_argument(
        "--points",
        type=int,
        choices=(2, 9, 15),
        help="models and rates; the paper has 15, default 9, quick 2",
    )
    parser.add_argument("--seeds", type=int, help="default 3, quick 1")
    parser.add_argument("--first-seed", type=int, default=0, help="default 0")
    parser.add_argument(
        "--swap-space",
        type=float,
        default=SWAP_GIB_PER_DEVICE,
        metavar="GIB",
        help=f"host memory per device; default {SWAP_GIB_PER_DEVICE:g}",
    )
    parser.add_argument(
        "--host-ms", type=float, default=0.0, metavar="MS", help="host time of every step that nothing hides; default 0"
    )
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    options = Options(
        out=args.out,
        store=args.store,
        workers=args.workers,
        quick=args.quick,
        duration_s=args.duration or (10.0 if args.quick else 60.0),
        be_batch=args.be_batch or (64 if args.quick else 256),
        max_num_seqs=args.max_num_seqs,
        num_points=args.points or (2 if args.quick else 9),
        num_seeds=args.seeds or (1 if args.quick else 3),
        first_seed=args.first_seed,
        swap_gib=args.swap_space,
        overhead_s=args.host_ms / 1e3,
    )
    for name in FIGURES if "all" in args.figures else args.figures:
        rows = FIGURES[name](options)
        if rows:
            print_rows(rows)
            write_rows(args.out / "bros.csv", rows)
    print_facts("bros.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
