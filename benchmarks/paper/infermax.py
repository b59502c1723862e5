"""InferMax Fig. 5, 8, 9, 10 to 12 and 16 in simulation: offline batches under memory pressure, and one hour of a real load.

Times are simulated; nothing is timed on this machine. Setup of §4.1: Llama-2-7B on an A100, M = 100K tokens of cache,
C = 4096, all requests there at time 0, no limit on how many run. Memory is counted in tokens (blocks of one token), except
in Fig. 16. Objectives play no part: they are set out of reach.

    fig5     B = 1024 equal requests, I and O from 1 to 1024: vLLM (fcfs), Sarathi, Sarathi with P = C
    fig8     O = B = 1024: the same three and their eviction-free twins
    fig9     O = 32, B = 1024, M from 100 tokens to 1M
    fig10_12 two kinds of requests mixed: rank by input, by output, by neither; three shuffles
    fig16    the Azure conversation hour on Llama-3-70B, four A100, M = 100K, C = 16384, arrivals as recorded

Two cost models, for the paper gives the form of its own but not the coefficients: `linear`, InferMax §3.2 fitted to public
measurements of operators (see infermax_fig15.py), and `measured`, the bundled description, fitted to whole steps
(`--costs linear measured` for both). Fig. 16 has the bundled description alone.

    python benchmarks/paper/infermax.py all [--quick] [--out DIRECTORY] [--workers N] [--store FILE]
"""

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from cases import effect, largest, print_facts, run_cases
from common import RESULTS, compare, new_figure, print_rows, save_figure, write_csv, write_rows
from infermax_fig15 import linear_costs

from apt_jax.config import SLO
from apt_jax.engine import Engine
from apt_jax.request import RequestMetrics
from apt_jax.sched.unified import UnifiedPolicy
from apt_jax.sim.hardware import Hardware, load_hardware
from apt_jax.sim.simulate import SimulationConfig, Workload, simulate
from apt_jax.sim.trace import load_trace

Row = dict[str, Any]
Curves = dict[str, tuple[Sequence[float], Sequence[float]]]
Panel = tuple[str, str, Curves]
"""Title, label of the y axis, curves by name."""
NO_SLO = SLO(ttft_s=1e9, tbt_s=1e9)
SHOWN = {
    "fcfs": "vLLM",
    "sarathi": "Sarathi",
    "sarathi-pc": "Sarathi P=C",
    "rank-none": "no rank",
    "algorithm-1": "vLLM, no watermark",
    "sorting": "sorting alone",
    "infermax-c": "infermax P=C",
    "rank-i": "by input",
    "rank-o": "by output",
}
BASES = ("fcfs", "sarathi", "sarathi-pc")
COSTS = ("linear", "measured")
SMALL, LARGE = (8, 16), (512, 1024)
GROUPS = {
    "SISO": (SMALL, SMALL),
    "SILO": (SMALL, LARGE),
    "LISO": (LARGE, SMALL),
    "LILO": (LARGE, LARGE),
}
MIXES = tuple(f"{a}+{b}" for a, b in itertools.combinations(GROUPS, 2))
WITH_LILO = tuple(mix for mix in MIXES if "LILO" in mix)
WITHOUT_LILO = tuple(mix for mix in MIXES if "LILO" not in mix)
VARIANTS: dict[str, dict[str, Any]] = {
    # vLLM as Algorithm 1 has it: it admits up to the last block, where `fcfs` leaves one in a hundred.
    "algorithm-1": {
        "first": "prefill",
        "hybrid": False,
        "chunked": False,
        "prefill_tokens": 16384,
    },
    "sorting": {"longest_first": True},
    "infermax-c": {"longest_first": True, "reserve": "estimate", "prefill_tokens": 16384},
    # The one group of all requests that rank-i and rank-o sort, in order of arrival.
    "rank-none": {"first": "nobody"},
}
"""Configurations of the unified algorithm that have no name as a policy. A step has at most C tokens in any case."""
INDEFINITE = 20_000_000
"""Tokens: more than the hour ever holds at once."""


def variant(policy: str) -> UnifiedPolicy | None:
    return UnifiedPolicy(policy, **VARIANTS[policy]) if policy in VARIANTS else None


def twin(policy: str) -> str:
    """The eviction-free variant."""
    return "fcfs-ef" if policy == "algorithm-1" else f"{policy}-ef"


def shown(policy: str) -> str:
    """Name in tables and pictures."""
    base = policy.removesuffix("-ef")
    return SHOWN.get(base, base) + (" EF" if base != policy else "")


TWINS = tuple(p for base in BASES for p in (base, twin(base)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offline:
    """Requests that are all there at time 0."""

    policy: str
    num_requests: int = 1024
    prompt: int = 0
    output: int = 0
    mix: str = ""
    """Two of `GROUPS` instead of one length, half of the requests each."""
    capacity: int = 100_000
    """M, tokens."""
    costs: str = "linear"
    seed: int = 0

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        n = self.num_requests
        if not self.mix:
            return np.full(n, self.prompt, np.int32), np.full(n, self.output, np.int32)
        rng = np.random.default_rng([self.seed, 0x10F])
        groups = [GROUPS[name] for name in self.mix.split("+")]
        sides = rng.permutation(np.arange(n) % 2)
        draw = [[rng.choice(side, n) for side in group] for group in groups]
        prompt, output = (np.where(sides == 0, draw[0][i], draw[1][i]) for i in range(2))
        return prompt.astype(np.int32), output.astype(np.int32)

    def hardware(self) -> Hardware:
        described = load_hardware("llama-2-7b", "a100-80gb")
        costs = described.costs if self.costs == "measured" else {"reproject": linear_costs()}
        return dataclasses.replace(
            described, block_size=1, num_blocks=2 * self.capacity, costs=costs, fit={}
        )

    def run(self) -> dict[str, Any]:
        prompt, output = self.lengths()
        workload = Workload(
            prompt_tokens=prompt,
            output_tokens=output,
            arrival_s=np.zeros(self.num_requests),
            best_effort=np.zeros(self.num_requests, np.bool_),
        )
        config = SimulationConfig(
            model="llama-2-7b",
            hardware="a100-80gb",
            policy="fcfs" if self.policy in VARIANTS else self.policy,
            cache="kv",
            slo=NO_SLO,
            max_num_seqs=self.num_requests,
            max_num_batched_tokens=4096,
            seed=self.seed,
        )
        policy = variant(self.policy)
        return measure(config, self.hardware(), workload, policy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hour:
    """The Azure conversation hour on Llama-3-70B."""

    policy: str
    capacity: int = 100_000
    num_requests: int = 19_366
    speed: float = 1.0
    """Arrivals this many times as fast as recorded; inf: all there at time 0."""
    max_num_seqs: int = 2048
    seed: int = 0

    def run(self) -> dict[str, Any]:
        trace = load_trace("azure-conv")
        trace = trace.take(np.arange(min(self.num_requests, trace.num_requests)))
        assert trace.arrival_s is not None
        workload = Workload(
            prompt_tokens=trace.prompt_tokens,
            output_tokens=trace.output_tokens,
            arrival_s=(trace.arrival_s - trace.arrival_s[0]) / self.speed,
            best_effort=np.zeros(trace.num_requests, np.bool_),
        )
        described = load_hardware("llama-3-70b", "a100-80gb", 4)
        hardware = dataclasses.replace(
            described, num_blocks=2 * -(-self.capacity // described.block_size)
        )
        config = SimulationConfig(
            model="llama-3-70b",
            hardware="a100-80gb",
            num_devices=4,
            policy="fcfs" if self.policy in VARIANTS else self.policy,
            cache="kv",
            slo=NO_SLO,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=16384,
            seed=self.seed,
        )
        policy = variant(self.policy)
        return measure(config, hardware, workload, policy)


def measure(
    config: SimulationConfig,
    hardware: Hardware,
    workload: Workload,
    policy: UnifiedPolicy | None,
) -> dict[str, Any]:
    """The paper's metrics of one run."""
    used: list[float] = []
    running: list[int] = []

    def look(engine: Engine) -> None:
        pool = engine.cache.pool
        used.append(pool.num_used / pool.num_blocks)
        running.append(int(np.count_nonzero(engine.table.num_blocks * engine.table.live)))

    result = simulate(config, hardware=hardware, workload=workload, policy=policy, on_step=look)
    ended = [m for m in result.requests if m is not None and m.finished_s is not None]
    tokens = sum(len(m.token_times_s) for m in ended)
    latency_s = max(m.finished_s or 0.0 for m in ended) if ended else math.nan
    tpot_s = [t for t in map(time_per_output_token_s, ended) if t is not None]
    return {
        "num_completed": len(ended),
        "latency_s": latency_s,
        "tokens_per_s": tokens / latency_s,
        "ttft_s": float(np.mean([m.ttft_s or 0.0 for m in ended])),
        "tpot_s": float(np.mean(tpot_s)) if tpot_s else 0.0,
        "evictions": result.preemptions,
        "recomputed_tokens": result.recomputed_tokens,
        "memory_use": float(np.mean(used)),
        "running": float(np.mean(running)),
        "iterations": result.iterations,
        "sim_wall_s": result.sim_wall_s,
    }


def time_per_output_token_s(metrics: RequestMetrics) -> float | None:
    """Mean gap between the tokens of a request; None with fewer than two."""
    times = metrics.token_times_s
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


# --- figures ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    out: Path
    store: Path | None
    workers: int
    quick: bool
    costs: tuple[str, ...]
    mixes: tuple[str, ...]

    def run(self, cases: Sequence[Any]) -> dict[Any, dict[str, Any]]:
        return run_cases(cases, self.store, self.workers)


def _rows(results: dict[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(case), **numbers} for case, numbers in results.items()]


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan


def _plot(
    path: Path,
    panels: Sequence[Panel],
    *,
    columns: int,
    x: str,
) -> None:
    figure, axes = new_figure(-(-len(panels) // columns), columns, width=3.2, height=2.3)
    flat = [axis for row in axes for axis in row]
    for axis, (title, y, curves) in zip(flat, panels, strict=False):
        for name, (xs, ys) in curves.items():
            axis.plot(xs, ys, marker=".", label=name, ls="--" if name.endswith("EF") else "-")
        axis.set(title=title, ylabel=y, xlabel=x, xscale="log")
    for axis in flat[len(panels) :]:
        axis.axis("off")
    flat[0].legend(fontsize="x-small")
    save_figure(figure, path)


METRICS = (
    ("latency_s", "latency (s)"),
    ("tokens_per_s", "tokens/s"),
    ("ttft_s", "mean TTFT (s)"),
    ("tpot_s", "mean TPOT (s)"),
    ("evictions", "evictions"),
    ("memory_use", "memory use"),
)


def fig5(options: Options) -> list[Row]:
    num = 64 if options.quick else 1024
    prompts = (32, 1024) if options.quick else (1, 256, 1024)
    outputs = (32,) if options.quick else (1, 32, 1024)
    costs = options.costs

    def case(c: str, o: int, i: int, p: str) -> Offline:
        return Offline(policy=p, num_requests=num, prompt=i, output=o, costs=c)

    results = options.run(
        list(itertools.starmap(case, itertools.product(costs, outputs, prompts, BASES)))
    )
    write_csv(options.out / "infermax_fig5.csv", _rows(results))
    rows = []
    for c in costs:
        slower, faster = {}, {}
        for o, i in itertools.product(outputs, prompts):
            vllm, sarathi = results[case(c, o, i, "fcfs")], results[case(c, o, i, "sarathi")]
            name = f"I={i} O={o}"
            slower[name] = 100 * (sarathi["latency_s"] / vllm["latency_s"] - 1)
            faster[name] = _ratio(vllm["tpot_s"], sarathi["tpot_s"])
        for target, values in (("I-43-lat", slower), ("I-43-tpot", faster)):
            most, where = largest(values)
            rows.append(effect(target, most, variant=c, where=where))
        panels: list[Panel] = [
            (
                f"O = {o}",
                label,
                {
                    shown(p): (prompts, [results[case(c, o, i, p)][m] for i in prompts])
                    for p in BASES
                },
            )
            for m, label in METRICS
            for o in outputs
        ]
        _plot(options.out / f"infermax_fig5_{c}.png", panels, columns=len(outputs), x="I")
    return rows


def fig8(options: Options) -> list[Row]:
    num = 32 if options.quick else 1024
    output, capacity = (64, 2048) if options.quick else (1024, 100_000)
    prompts = (8, 64) if options.quick else (1, 256, 1024)
    costs = options.costs
    shown_here = ("algorithm-1", *TWINS)

    def case(c: str, i: int, p: str) -> Offline:
        return Offline(
            policy=p, num_requests=num, prompt=i, output=output, capacity=capacity, costs=c
        )

    results = options.run(
        list(itertools.starmap(case, itertools.product(costs, prompts, shown_here)))
    )
    write_csv(options.out / "infermax_fig8.csv", _rows(results))
    targets = {
        "fcfs": ("I-44-tps-vllm", "I-44-ttft", "I-44-tpot"),
        "algorithm-1": ("I-44-tps-vllm", "I-44-ttft", "I-44-tpot"),
        "sarathi": ("I-44-tps-sar", "I-44-ttft-sar", "I-44-tpot-sar"),
        "sarathi-pc": ("I-44-tps-sarpc", "I-44-ttft", "I-44-tpot"),
    }
    rows = []
    for c, (base, names) in itertools.product(costs, targets.items()):
        gains: list[dict[str, float]] = [{}, {}, {}]
        for i in prompts:
            evicting, free = results[case(c, i, base)], results[case(c, i, twin(base))]
            gains[0][f"I={i}"] = 100 * (free["tokens_per_s"] / evicting["tokens_per_s"] - 1)
            gains[1][f"I={i}"] = _ratio(free["ttft_s"], evicting["ttft_s"])
            gains[2][f"I={i}"] = _ratio(evicting["tpot_s"], free["tpot_s"])
        variant = f"{c}, {shown(base)}"
        for name, values in zip(names, gains, strict=True):
            most, where = largest(values)
            rows.append(effect(name, most, variant=variant, where=where))
        if base == "algorithm-1":
            continue  # the same twin
        for name, i in (("I-44-run-I1", prompts[0]), ("I-44-run-I1024", prompts[-1])):
            rows.append(compare(name, results[case(c, i, twin(base))]["running"], variant=variant))
    for c in costs:
        panels: list[Panel] = [
            (
                "",
                label,
                {
                    shown(p): (prompts, [results[case(c, i, p)][m] for i in prompts])
                    for p in shown_here
                },
            )
            for m, label in (*METRICS, ("running", "running requests"))
        ]
        _plot(options.out / f"infermax_fig8_{c}.png", panels, columns=4, x="I")
    return rows


def fig9(options: Options) -> list[Row]:
    num = 64 if options.quick else 1024
    capacities = (100, 1_000) if options.quick else (100, 1_000, 10_000, 100_000, 1_000_000)
    costs = options.costs
    bases = ("fcfs", "algorithm-1", "sarathi")
    twins = tuple(dict.fromkeys(p for base in bases for p in (base, twin(base))))

    def prompts(capacity: int) -> list[int]:
        # What fits beside 31 tokens of output; InferMax crops its axes likewise.
        lengths = (16, 64) if options.quick else (1, 16, 64, 1024)
        return [i for i in lengths if i + 31 <= capacity]

    def case(c: str, m: int, i: int, p: str) -> Offline:
        return Offline(policy=p, num_requests=num, prompt=i, output=32, capacity=m, costs=c)

    results = options.run(
        [case(c, m, i, p) for c in costs for m in capacities for i in prompts(m) for p in twins]
    )
    write_csv(options.out / "infermax_fig9.csv", _rows(results))

    def gain(c: str, base: str, m: int) -> dict[str, float]:
        """TPS with evictions over TPS without."""
        return {
            f"I={i}": results[case(c, m, i, base)]["tokens_per_s"]
            / results[case(c, m, i, twin(base))]["tokens_per_s"]
            for i in prompts(m)
        }

    rows = []
    for c in costs:
        for name, base, m in (
            ("I-45-vllm-100", "fcfs", 100),
            ("I-45-sar-100", "sarathi", 100),
            ("I-45-vllm-1k", "fcfs", 1_000),
            ("I-45-sar-1k", "sarathi", 1_000),
            ("I-45-real-100", "fcfs", 100),
            ("I-45-real-1k", "fcfs", 1_000),
        ):
            most, where = largest(gain(c, base, m))
            rows.append(effect(name, most, variant=c, where=where))
            if base == "fcfs":
                most, where = largest(gain(c, "algorithm-1", m))
                bare = f"{c}, {shown('algorithm-1')}"
                rows.append(effect(name, most, variant=bare, where=where))
        for name, m in (("I-45-real-10k", 10_000), ("I-45-real-100k", 100_000)):
            if m in capacities:
                most, where = largest(
                    {f"{shown(p)} {i}": 1 / g for p in bases for i, g in gain(c, p, m).items()}
                )
                rows.append(effect(name, most, variant=c, where=where))
        if (m := 1_000_000) in capacities:
            use = max(results[case(c, m, i, "sarathi")]["memory_use"] for i in prompts(m))
            rows.append(compare("I-45-util", 100 * use, variant=c))
        panels: list[Panel] = [
            (
                f"M = {m}",
                label,
                {
                    shown(p): (prompts(m), [results[case(c, m, i, p)][n] for i in prompts(m)])
                    for p in twins
                },
            )
            for n, label in METRICS
            for m in capacities
        ]
        _plot(options.out / f"infermax_fig9_{c}.png", panels, columns=len(capacities), x="I")
    return rows


def fig10_12(options: Options) -> list[Row]:
    mixes = ("SISO+LILO", "SILO+LISO") if options.quick else options.mixes
    sizes = (16,) if options.quick else (16, 64, 256, 1024)
    seeds = (0, 1) if options.quick else (0, 1, 2)
    costs = options.costs
    policies = ("rank-none", "rank-i", "rank-o")

    def case(c: str, mix: str, b: int, s: int, p: str) -> Offline:
        return Offline(policy=p, num_requests=b, mix=mix, costs=c, seed=s)

    results = options.run(
        list(itertools.starmap(case, itertools.product(costs, mixes, sizes, seeds, policies)))
    )
    write_csv(options.out / "infermax_fig10_12.csv", _rows(results))
    claims = (
        # target, metric, policy ahead, policies behind, mixes
        ("I-46-lat", "latency_s", "rank-i", ("rank-o", "rank-none"), MIXES),
        ("I-46-ttft-o", "ttft_s", "rank-i", ("rank-o",), MIXES),
        ("I-46-ttft-n", "ttft_s", "rank-i", ("rank-none",), MIXES),
        ("I-46-tpot", "tpot_s", "rank-i", ("rank-o", "rank-none"), WITH_LILO),
        ("I-46-tpot-o-i", "tpot_s", "rank-o", ("rank-i",), WITHOUT_LILO),
        ("I-46-tpot-o-n", "tpot_s", "rank-o", ("rank-none",), WITHOUT_LILO),
    )
    rows = []
    for c in costs:
        for name, metric, ahead, behind, which in claims:
            by_seed = {
                f"{mix} B={b} over {shown(p)}": [
                    results[case(c, mix, b, s, p)][metric]
                    / results[case(c, mix, b, s, ahead)][metric]
                    for s in seeds
                ]
                for mix, b, p in itertools.product(mixes, sizes, behind)
                if mix in which
            }
            _, where = largest({k: float(np.mean(v)) for k, v in by_seed.items()})
            rows.append(effect(name, by_seed[where], variant=c, where=where))

        def mean(mix: str, metric: str, p: str, b: int, c: str = c) -> float:
            return float(np.mean([results[case(c, mix, b, s, p)][metric] for s in seeds]))

        for number, (metric, label) in (("10", METRICS[0]), ("11", METRICS[2]), ("12", METRICS[3])):
            panels: list[Panel] = [
                (
                    mix,
                    label,
                    {shown(p): (sizes, [mean(mix, metric, p, b) for b in sizes]) for p in policies},
                )
                for mix in mixes
            ]
            _plot(options.out / f"infermax_fig{number}_{c}.png", panels, columns=3, x="B")
    return rows


def fig16(options: Options) -> list[Row]:
    num = 200 if options.quick else 19_366
    policies = (
        "fcfs",
        "algorithm-1",
        "sarathi",
        "sarathi-pc",
        "fcfs-ef",
        "sarathi-ef",
        "sorting",
        "infermax",
        "infermax-c",
    )
    cases = {shown(p): Hour(policy=p, num_requests=num) for p in policies}
    bound = "vLLM, indefinite M"
    cases[bound] = Hour(policy="fcfs", num_requests=num, capacity=INDEFINITE)
    results = options.run(list(cases.values()))
    write_csv(
        options.out / "infermax_fig16.csv",
        [{"name": k, **dataclasses.asdict(v), **results[v]} for k, v in cases.items()],
    )
    seconds = {name: results[case]["latency_s"] for name, case in cases.items()}
    baselines = [shown(p) for p in policies[:4]]
    rows = [compare("I-6-deploy", seconds[name], variant=name) for name in baselines]
    rows.append(compare("I-6-ours", seconds["infermax"]))
    rows.append(compare("I-6-bound", seconds[bound]))
    for name in baselines:
        gain = seconds[name] / seconds["infermax"]
        rows.append(effect("I-abs-real", gain, variant=f"over {name}"))
        for other in ("sorting", "infermax-c"):
            gain = seconds[name] / seconds[shown(other)]
            rows.append(effect("I-abs-real", gain, variant=f"{shown(other)} over {name}"))
    rows += [
        effect("I-abs-bound", seconds[name] / seconds[bound], variant=f"over {name}")
        for name in baselines
    ]
    figure, axes = new_figure(1, 1, width=6, height=3)
    axis = axes[0][0]
    axis.barh(list(seconds)[::-1], list(seconds.values())[::-1])
    for x, label in ((7000, "deployable"), (6000, "theirs"), (5000, "bound")):
        axis.axvline(x, color="gray", ls=":")
        axis.annotate(label, (x, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=7)
    axis.set(xlabel="total time (s); dotted: the paper's")
    save_figure(figure, options.out / "infermax_fig16.png")
    return rows


FIGURES = {"fig5": fig5, "fig8": fig8, "fig9": fig9, "fig10_12": fig10_12, "fig16": fig16}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("figures", nargs="+", choices=(*FIGURES, "all"))
    parser.add_argument("--quick", action="store_true", help="tiny settings, seconds in all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--store", type=Path, help="keeps finished runs, to go on from later")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--costs", nargs="+", choices=COSTS, default=COSTS[:1])
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=MIXES, help="of Fig. 10 to 12")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    options = Options(
        out=args.out,
        store=args.store,
        workers=args.workers,
        quick=args.quick,
        costs=tuple(args.costs),
        mixes=tuple(args.mixes),
    )
    for name in FIGURES if "all" in args.figures else args.figures:
        rows = FIGURES[name](options)
        print_rows(rows)
        write_rows(args.out / "infermax.csv", rows)
    print_facts("infermax.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
