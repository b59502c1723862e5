"""What `apt-plus` gains over Apt-Serve as published, what each of its parts contributes, and whether it is ever worse.

    python -m benchmarks.apt_plus parts        effective throughput at 90 % attainment, one part at a time left out
    python -m benchmarks.apt_plus everywhere   attainment beside apt's: every trace, CV 1, 5 and 10, two loads
    python -m benchmarks.apt_plus made_up      the same on traces made up for it: short prompts, long ones, two sorts, all alike

Simulated OPT-13B on an A100 of 40 GB (and Llama-2-7B on one of 80 GB for traces beyond OPT's 2,048 tokens). "apt" is the
paper's policy with the paper's reprojection cost, with KV alone and with the hybrid cache; `apt-plus` uses absorption where
the model allows it. Finished runs are kept in the store, so that an interrupted benchmark goes on.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import functools
import hashlib
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np

from apt_jax.config import SLO
from apt_jax.llm import ProgressBars
from apt_jax.sched import Policy, make_policy, solve_exact, solve_greedy
from apt_jax.sched.apt_plus import AptPlusPolicy
from apt_jax.sim.simulate import SimulationConfig, simulate
from apt_jax.sim.sweep import Store, bisect_rate

RESULTS = Path(__file__).resolve().parent / "results" / "apt-plus"

Make = Callable[[], Policy]
# name: (cache, hidden attention, policy)
VARIANTS: dict[str, tuple[str, str, Make]] = {
    "apt, KV": ("kv", "reproject", lambda: make_policy("apt")),
    "apt, hybrid (the paper's)": ("hybrid", "reproject", lambda: make_policy("apt")),
    "apt, hybrid with absorption": ("hybrid", "absorb", lambda: make_policy("apt")),
    "apt, all hidden with absorption": ("hidden", "absorb", lambda: make_policy("apt")),
    "apt-plus": ("hybrid", "absorb", lambda: make_policy("apt-plus")),
    "apt-plus, KV": ("kv", "reproject", lambda: make_policy("apt-plus")),
    "apt-plus, reprojection": ("hybrid", "reproject", lambda: make_policy("apt-plus")),
    "without mixed steps": ("hybrid", "absorb", lambda: AptPlusPolicy(mixed=False)),
    "without foreseeing lateness": ("hybrid", "absorb", lambda: AptPlusPolicy(foresee=False)),
    "without making room for others": ("hybrid", "absorb", lambda: AptPlusPolicy(sacrifice=False)),
    "without filling up": (
        "hybrid",
        "absorb",
        lambda: AptPlusPolicy(solver=functools.partial(solve_greedy, fill=False)),
    ),
    "with the exact solver": ("hybrid", "absorb", lambda: AptPlusPolicy(solver=solve_exact)),
    "clairvoyant": ("hybrid", "absorb", lambda: AptPlusPolicy(clairvoyant=True)),
}

LOADS = {
    # trace: (model, hardware, SLO, output scale)
    "sharegpt": ("opt-13b", "a100-40gb", SLO(ttft_s=1.0, tbt_s=1.0), 1.0),
    "humaneval": ("opt-13b", "a100-40gb", SLO(ttft_s=0.5, tbt_s=0.5), 1.0),
    "longbench": ("opt-13b", "a100-40gb", SLO(ttft_s=4.0, tbt_s=1.0), 0.4),
    "wikitext": ("opt-13b", "a100-40gb", SLO(ttft_s=4.0, tbt_s=1.0), 1.0),
    "bros-sharegpt": ("opt-13b", "a100-40gb", SLO(ttft_s=1.0, tbt_s=1.0), 1.0),
    "bros-lmsys": ("opt-13b", "a100-40gb", SLO(ttft_s=1.0, tbt_s=1.0), 1.0),
    "azure-conv": ("llama-2-7b", "a100-80gb", SLO(ttft_s=2.0, tbt_s=0.5), 1.0),
    "mooncake-conv": ("llama-2-7b", "a100-80gb", SLO(ttft_s=4.0, tbt_s=1.0), 1.0),
}


def config_of(
    trace: str, num_requests: int, seed: int, cv: float | None = None
) -> SimulationConfig:
    model, hardware, slo, scale = LOADS[trace]
    return SimulationConfig(
        model=model,
        hardware=hardware,
        trace=trace,
        slo=slo,
        output_scale=scale,
        num_requests=num_requests,
        seed=seed,
        rate=1.0,
        cv=1.0 if cv is None else cv,
        drop_too_long=True,
    )


@dataclasses.dataclass(frozen=True)
class Task:
    """One unit of work: the rate at a target (`rate` None), or the attainment at a rate."""

    variant: str
    config: SimulationConfig
    target: float = 0.9
    guess: float = 4.0

    @property
    def key(self) -> str:
        code = "".join(
            (Path(__file__).resolve().parents[1] / "apt_jax" / name).read_text()
            for name in ("sched/apt_plus.py", "sched/apt.py", "sim/simulate.py")
        )
        facts = json.dumps([dataclasses.asdict(self), code], default=str, sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:20]

    def attainment(self, rate: float) -> float:
        cache, attention, make = VARIANTS[self.variant]
        offered = "kv" if self.config.model != "opt-13b" and attention == "absorb" else cache
        config = dataclasses.replace(
            self.config,
            rate=rate,
            cache=offered,
            hidden_attention="reproject" if offered == "kv" else attention,
        )
        return simulate(config, policy=make()).summary.slo_attainment


def _rate(task: Task) -> dict:
    rate, runs = bisect_rate(task.attainment, target=task.target, guess=task.guess, tolerance=0.03)
    return {"rate": rate, "runs": runs}


def _attainment(task: Task) -> dict:
    return {"attainment": task.attainment(task.config.rate or 1.0)}


def run_all(
    function: Callable[[Task], dict], tasks: list[Task], args: argparse.Namespace
) -> list[dict]:
    """Results in the order of the tasks; what the store has is not run again."""
    store = Store(args.out / "runs.jsonl")
    keys = [function.__name__ + task.key for task in tasks]
    missing = {k: t for k, t in zip(keys, tasks, strict=True) if store.get(k) is None}
    bars = ProgressBars()
    done = len(tasks) - len(missing)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.workers, context) as pool:
        futures = {pool.submit(function, task): key for key, task in missing.items()}
        for future in concurrent.futures.as_completed(futures):
            store.put(futures[future], future.result())
            done += 1
            bars("runs", done, len(tasks))
    bars.close()
    return [store.get(key) or {} for key in keys]


def write(path: Path, header: list[str], rows: list[list]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    widths = [max(len(str(r[i])) for r in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(str(v).ljust(w) for v, w in zip(row, widths, strict=True)))


def parts(args: argparse.Namespace) -> None:
    guesses = {"sharegpt": 4.0, "longbench": 2.2, "humaneval": 10.0}
    seeds = range(args.seeds)
    tasks = [
        Task(variant, config_of(trace, args.requests, seed), 0.9, guesses[trace])
        for trace in args.traces or ("sharegpt", "longbench")
        for variant in VARIANTS
        for seed in seeds
    ]
    found = iter(run_all(_rate, tasks, args))
    rows = []
    for trace in args.traces or ("sharegpt", "longbench"):
        base = 0.0
        for variant in VARIANTS:
            rates = [next(found)["rate"] for _ in seeds]
            if variant == "apt, KV":
                base = float(np.mean(rates))
            rows.append(
                [
                    trace,
                    variant,
                    f"{np.mean(rates):.2f}",
                    f"{np.std(rates, ddof=1) if len(rates) > 1 else 0:.2f}",
                    f"{np.mean(rates) / base:.2f}" if base else "-",
                ]
            )
    write(
        args.out / "parts.csv",
        ["trace", "variant", "requests/s at 90 %", "std over seeds", "over apt, KV"],
        rows,
    )


COMPARED = ("apt, KV", "apt, hybrid (the paper's)", "apt-plus")


def beside_apt(
    configs: list[tuple[str, SimulationConfig]], args: argparse.Namespace, name: str
) -> None:
    """Attainment under `COMPARED` of every (trace, configuration), seeds averaged."""
    tasks = [
        Task(variant, dataclasses.replace(config, seed=seed))
        for _, config in configs
        for variant in COMPARED
        for seed in range(args.seeds)
    ]
    found = iter(run_all(_attainment, tasks, args))
    rows = []
    for trace, config in configs:
        means = [
            100 * float(np.mean([next(found)["attainment"] for _ in range(args.seeds)]))
            for _ in COMPARED
        ]
        gain = means[2] - max(means[:2])
        rows.append([trace, config.cv, config.rate, *(f"{m:.1f}" for m in means), f"{gain:+.1f}"])
    write(args.out / f"{name}.csv", ["trace", "CV", "requests/s", *COMPARED, "gain"], rows)


def everywhere(args: argparse.Namespace) -> None:
    rates = {
        "sharegpt": (3.0, 6.0),
        "humaneval": (8.0, 12.0),
        "longbench": (1.5, 3.0),
        "wikitext": (0.8, 1.6),
        "bros-sharegpt": (3.0, 6.0),
        "bros-lmsys": (3.0, 6.0),
        "azure-conv": (3.0, 6.0),
        "mooncake-conv": (1.5, 4.0),
    }
    configs = [
        (trace, dataclasses.replace(config_of(trace, args.requests, 0, cv), rate=rate))
        for trace in args.traces or rates
        for cv in (1.0, 5.0, 10.0)
        for rate in rates[trace]
    ]
    beside_apt(configs, args, "everywhere")


def made_up(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(77)
    n = 3000
    one_sort = rng.random(n) < 0.5
    drawn = {
        "short-long": (rng.lognormal(3.5, 0.5, n), rng.lognormal(6.3, 0.4, n)),
        "long-short": (rng.lognormal(6.8, 0.3, n), rng.lognormal(3.0, 0.7, n)),
        "two-sorts": (
            np.where(one_sort, rng.lognormal(3.0, 0.4, n), rng.lognormal(6.7, 0.3, n)),
            np.where(one_sort, rng.lognormal(6.0, 0.4, n), rng.lognormal(2.5, 0.4, n)),
        ),
        "all-alike": (np.full(n, 300.0), np.full(n, 200.0)),
    }
    rates = {"short-long": (1.8, 3.5), "long-short": (3.0, 6.0), "two-sorts": (2.5, 5.0), "all-alike": (3.0, 6.0)}  # fmt: skip
    directory = args.out / "traces"
    directory.mkdir(exist_ok=True)
    configs = []
    for trace, (prompt, output) in drawn.items():
        prompt = np.clip(prompt, 1, 1500).astype(int)
        output = np.clip(output, 1, 2040 - prompt).astype(int)
        path = directory / f"{trace}.csv"
        rows = [f"{p},{o}" for p, o in zip(prompt.tolist(), output.tolist(), strict=True)]
        path.write_text("\n".join(["prompt_tokens,output_tokens", *rows]) + "\n")
        base = dataclasses.replace(config_of("sharegpt", args.requests, 0), trace=str(path))
        configs += [
            (trace, dataclasses.replace(base, cv=cv, rate=rate))
            for cv in (1.0, 5.0, 10.0)
            for rate in rates[trace]
        ]
    beside_apt(configs, args, "made-up")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("parts", "everywhere", "made_up"))
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--traces", nargs="*")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    {"parts": parts, "everywhere": everywhere, "made_up": made_up}[args.what](args)


if __name__ == "__main__":
    main()
