"""InferMax Figs. 3 to 6, 8 to 14 and 16: offline batches under memory pressure, and one hour of a real load.

Times are simulated, but for Figs. 13 and 14, which time the engine on this machine. Setup of §4.1: Llama-2-7B on an
A100, M = 100K tokens of cache, C = 4096, all requests there at time 0, no limit on how many run. Memory is counted in
tokens (blocks of one token), except in Figs. 13, 14 and 16. Objectives play no part: they are set out of reach.

    fig3     how well lines fit measured operators: R2 (needs the profiles, --profiles)
    fig4     B = 32 equal requests: vLLM (fcfs) and its group, Sarathi, Sarathi without mixed steps
    fig5     B = 1024, I and O from 1 to 1024: vLLM, Sarathi, Sarathi with P = C, and those that behave like them
    fig6     tokens/s of the same runs over I and over O
    fig8     O = B = 1024: the same three and their eviction-free twins
    fig9     O = 32, B = 1024, M from 100 tokens to 1M
    fig10_12 two kinds of requests mixed: rank by input, by output, by neither; three shuffles
    sorting  keeping long requests (§6) on those mixes and on equal requests: the 1.4 x of §1
    fig13    Fig. 5 on the engine itself, small, on the CPU of this machine, against the simulator (infermax_engine.py)
    fig14    Fig. 9 on the engine itself, in the same way
    fig16    the Azure conversation hour on Llama-3-70B, four A100, M = 100K, C = 16384, arrivals as recorded

`--grid` says how many I and O Figs. 4 to 9 have: coarse 3, fine 6 (powers of 4), full 11 (powers of 2).

Three cost models, for the paper gives the form of its own but not the coefficients: `linear`, InferMax §3.2 fitted to
public measurements of operators (see infermax_fig15.py); `per-prefill`, the same with 1.5 ms a prefill request, a term
that the paper has; and `measured`, the bundled description, fitted to whole steps
(`--costs linear per-prefill measured` for all). Fig. 16 has the bundled description alone.

    python -m benchmarks.paper.infermax all [--quick] [--out DIRECTORY] [--workers N] [--store FILE]
"""

import argparse
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apt_jax.config import SLO
from apt_jax.costs.hardware import Hardware
from apt_jax.engine import Engine
from apt_jax.request import RequestMetrics
from apt_jax.sched.policies.unified import UnifiedPolicy
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.simulator import simulate
from apt_jax.sim.trace import load_trace
from apt_jax.sim.workload import Workload
from benchmarks.paper.cases import effect, largest, print_facts, run_cases
from benchmarks.paper.common import (
    RESULTS,
    claim,
    compare,
    new_figure,
    print_rows,
    save_figure,
    write_csv,
    write_rows,
)
from benchmarks.paper.infermax_fig15 import linear_costs, per_prefill_costs

Row = dict[str, Any]
Curves = dict[str, tuple[Sequence[float], Sequence[float]]]
Panel = tuple[str, str, Curves]
"""Title, label of the y axis, curves by name."""
NO_SLO = SLO(ttft_s=1e9, tbt_s=1e9)
SHOWN = {
    "fcfs": "vLLM",
    "sarathi": "Sarathi",
    "sarathi-pc": "Sarathi P=C",
    "rank-org": "no rank",
    "sarathi-nohy": "Sarathi no hybrid",
    "sarathi-nocp": "Sarathi no chunks",
    "vllm-hy": "vLLM hybrid",
    "algorithm-1": "vLLM, no watermark",
    "sorting": "sorting alone",
    "infermax-c": "infermax P=C",
    "rank-i": "by input",
    "rank-o": "by output",
}
BASES = ("fcfs", "sarathi", "sarathi-pc")
COSTS = ("linear", "per-prefill", "measured")
GRIDS = {
    # I, and O of Figs. 4 to 6
    "coarse": ((1, 256, 1024), (1, 32, 1024)),
    "fine": (tuple(4**k for k in range(6)), (1, 8, 32, 256, 1024)),
    "full": (tuple(2**k for k in range(11)), tuple(2**k for k in range(11))),
}
ALIKE = {"sarathi-nocp": "sarathi-pc", "vllm-hy": "fcfs"}
"""Schedulers that the paper groups with another one (§4.3)."""
SIZES = (16, 64, 256, 1024)
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
        fitted = {"linear": linear_costs, "per-prefill": per_prefill_costs}
        costs = described.costs if self.costs == "measured" else {"reproject": fitted[self.costs]()}
        return dataclasses.replace(described, block_size=1, num_blocks=2 * self.capacity, costs=costs, fit={})

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
        hardware = dataclasses.replace(described, num_blocks=2 * -(-self.capacity // described.block_size))
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
    grid: str
    sizes: tuple[int, ...]
    num_seeds: int
    chosen_prompts: tuple[int, ...] | None
    engine_model: str
    profiles: Path

    @property
    def prompts(self) -> tuple[int, ...]:
        """I of Figs. 4 to 8."""
        if self.chosen_prompts:
            return self.chosen_prompts
        return (32, 1024) if self.quick else GRIDS[self.grid][0]

    @property
    def outputs(self) -> tuple[int, ...]:
        """O of Figs. 4 to 6."""
        return (1, 32) if self.quick else GRIDS[self.grid][1]

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


def fig3(options: Options) -> list[Row]:
    """Fits of §3.2 to one layer of Llama-2-7B on an A100, from public measurements of operators."""
    try:
        points = _operators(options.profiles)
    except FileNotFoundError as error:
        print(f"fig3 left out: no profiles at {error.filename} (--profiles)", file=sys.stderr)
        return []
    targets = {
        "layer": ("I-r2-nonattn", "tokens"),
        "decode attention": ("I-r2-decode", "KVs read"),
        "prefill attention": ("I-r2-prefill", "sum of c^2"),
    }
    rows, table = [], []
    figure, axes = new_figure(1, 3)
    for axis, (part, (target, x)) in zip(axes[0], targets.items(), strict=True):
        size, ms = (np.array(values) for values in zip(*points[part], strict=True))
        slope, bias = np.polyfit(size, ms, 1)
        r2 = 1 - float(((ms - bias - slope * size) ** 2).sum() / ((ms - ms.mean()) ** 2).sum())
        rows.append(compare(target, r2))
        table += [{"part": part, "size": s, "ms": t, "fit_ms": bias + slope * s} for s, t in points[part]]
        axis.plot(size, ms, ".", label="measured")
        ends = np.array([size.min(), size.max()])
        axis.plot(ends, bias + slope * ends, "r", label=f"R2 = {r2:.3f}")
        axis.set(title=part, xlabel=x, ylabel="ms a layer")
        axis.legend(fontsize="x-small")
    write_csv(options.out / "infermax_fig3.csv", table)
    save_figure(figure, options.out / "infermax_fig3.png")
    return rows


def _operators(directory: Path) -> dict[str, list[tuple[float, float]]]:
    """(size, ms) of the parts of a layer; at most 4096 tokens, 131072 tokens read, 8 prompts of at most 4096."""
    from tools.hardware_descriptions import MODELS, Profiles

    profiles, model = Profiles(directory), MODELS["llama-2-7b"]
    layer = [
        (float(n), 1e3 * profiles.vidur_s("a100", model.vidur, 1, "layer_sum_ms", n))
        for n in (1, 8, 16, 32, 64, 128, 256, 512, 768, *range(1024, 4097, 512))
    ]
    lengths = [2**k for k in range(4, 17)]
    attention: dict[str, list[tuple[float, float]]] = {"decode": [], "prefill": []}
    for phase, batch, length in itertools.product(attention, (1, 2, 4, 8, 16, 32, 64, 128, 256), lengths):
        prefill = phase == "prefill"
        if (batch > 8 or length > 4096) if prefill else batch * length > 131072:
            continue
        seconds = profiles.attention_s(phase, "a100_sxm", model, 1, batch, length)
        if seconds is not None:
            size = batch * length**2 if prefill else batch * length
            attention[phase].append((float(size), 1e3 * seconds))
    return {
        "layer": layer,
        "decode attention": attention["decode"],
        "prefill attention": attention["prefill"],
    }


def fig4(options: Options) -> list[Row]:
    prompts, outputs, costs = options.prompts, options.outputs, options.costs
    policies = ("fcfs", "sarathi", "sarathi-nohy", "sarathi-pc", "sarathi-nocp", "vllm-hy")

    def case(c: str, o: int, i: int, p: str) -> Offline:
        return Offline(policy=p, num_requests=32, prompt=i, output=o, costs=c)

    cells = list(itertools.product(costs, outputs, prompts))
    results = options.run([case(*cell, p) for cell in cells for p in policies])
    write_csv(options.out / "infermax_fig4.csv", _rows(results))

    def of(cell: tuple[str, int, int], policy: str, metric: str = "latency_s") -> float:
        return results[case(*cell, policy)][metric]

    rows = []
    for c in costs:
        own = [cell for cell in cells if cell[0] == c]
        several = [cell for cell in own if cell[1] > 1]
        long = [cell for cell in own if cell[2] >= 256 and cell[1] >= 32]
        claims = (
            ("I-42-evict", "no scheduler evicts", [of(x, p, "evictions") == 0 for x in own for p in policies]),
            ("I-42-vllm", "vLLM has the least latency (within 1 %)", [of(x, "fcfs") <= 1.01 * min(of(x, p) for p in policies) for x in own]),
            ("I-42-group", "P = C, no chunks and vLLM hybrid are within 10 % of vLLM", [abs(of(x, p) / of(x, "fcfs") - 1) <= 0.1 for x in own for p in policies[3:]]),
            ("I-42-sar", "Sarathi's TPOT is above vLLM's at O = 32, I < 1024", [of(x, "sarathi", "tpot_s") > of(x, "fcfs", "tpot_s") for x in several if x[1] == 32 and 32 <= x[2] < 1024]),
            ("I-42-sar-long", "Sarathi's TPOT is below vLLM's at O = 32, I = 1024", [of(x, "sarathi", "tpot_s") < of(x, "fcfs", "tpot_s") for x in several if x[1:] == (32, 1024)]),
            ("I-42-nohy", "Sarathi without mixed steps has the most latency at I of 256 or more, O of 32 or more", [of(x, "sarathi-nohy") >= max(of(x, p) for p in policies) for x in long]),
        )  # fmt: skip
        rows += [claim(name, "Sec 4.2 / Fig 4", text, holds, variant=c) for name, text, holds in claims if holds]
        panels: list[Panel] = [
            (
                f"O = {o}",
                label,
                {shown(p): (prompts, [of((c, o, i), p, m) for i in prompts]) for p in policies[:3]},
            )
            for m, label in METRICS[:4]
            for o in outputs
        ]
        _plot(options.out / f"infermax_fig4_{c}.png", panels, columns=len(outputs), x="I")
    return rows


def _high(options: Options, c: str, o: int, i: int, p: str) -> Offline:
    """A run of Figs. 5 and 6."""
    num = 32 if options.quick else 1024
    return Offline(policy=p, num_requests=num, prompt=i, output=o, costs=c)


def fig5(options: Options) -> list[Row]:
    prompts, outputs, costs = options.prompts, options.outputs, options.costs
    case = functools.partial(_high, options)
    cells = list(itertools.product(costs, outputs, prompts))
    results = options.run([case(*cell, p) for cell in cells for p in (*BASES, *ALIKE)])
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
        for policy, like in ALIKE.items():
            holds = [
                abs(results[case(*x, policy)]["latency_s"] / results[case(*x, like)]["latency_s"] - 1) <= 0.1
                for x in cells
                if x[0] == c
            ]
            text = f"{shown(policy)} has the latency of {shown(like)} within 10 %"
            rows.append(claim(f"I-43-{policy}", "Sec 4.3", text, holds, variant=c))
        rows += memory_claims(
            c, [(case(*x, p), results[case(*x, p)]) for x in cells if x[0] == c for p in (*BASES, *ALIKE)]
        )
        panels: list[Panel] = [
            (
                f"O = {o}",
                label,
                {shown(p): (prompts, [results[case(c, o, i, p)][m] for i in prompts]) for p in BASES},
            )
            for m, label in METRICS
            for o in outputs
        ]
        _plot(options.out / f"infermax_fig5_{c}.png", panels, columns=len(outputs), x="I")
    return rows


def memory_claims(c: str, runs: Sequence[tuple[Offline, dict[str, Any]]]) -> list[Row]:
    """Return what §4.3 says of the cache in use, judged on runs of Fig. 5 with costs `c`."""
    holds_some = [
        (of["memory_use"] > 0) == (case.policy == "sarathi")
        for case, of in runs
        if (case.output, case.prompt) == (1, 1024)
    ]
    is_full = [of["memory_use"] > 0.9 for case, of in runs if case.output == 1024]
    claims = (
        ("I-43-kv", "at O = 1, I = 1024 Sarathi alone keeps keys and values", holds_some),
        ("I-43-full", "at O = 1024 over 90 % of the cache is in use on average", is_full),
    )
    return [claim(name, "Sec 4.3", text, holds, variant=c) for name, text, holds in claims if holds]


def fig6(options: Options) -> list[Row]:
    prompts, outputs, costs = options.prompts, options.outputs, options.costs
    case = functools.partial(_high, options)
    results = options.run([case(*cell, p) for cell in itertools.product(costs, outputs, prompts) for p in BASES])
    write_csv(options.out / "infermax_fig6.csv", _rows(results))
    rows = []
    for c in costs:
        rate = {
            (p, o, i): results[case(c, o, i, p)]["tokens_per_s"]
            for p, o, i in itertools.product(BASES, outputs, prompts)
        }
        falls = [
            rate[p, o, later] < rate[p, o, i]
            for p, o in itertools.product(BASES, outputs)
            for i, later in itertools.pairwise(prompts)
        ]
        inner = [
            rate[p, outputs[-1], i] < max(rate[p, o, i] for o in outputs[:-1])
            for p, i in itertools.product(BASES, prompts)
        ]
        rows.append(claim("I-43-tps-i", "Fig 6", "TPS falls as I grows", falls, variant=c))
        text = "TPS falls beyond a certain O"
        rows.append(claim("I-43-tps-o", "Fig 6", text, inner, variant=c))
        panels: list[Panel] = [
            (
                shown(p),
                "tokens/s",
                {f"I = {i}": (outputs, [rate[p, o, i] for o in outputs]) for i in prompts},
            )
            for p in BASES
        ]
        _plot(options.out / f"infermax_fig6_{c}.png", panels, columns=3, x="O")
    return rows


def fig8(options: Options) -> list[Row]:
    num = 32 if options.quick else 1024
    output, capacity = (64, 2048) if options.quick else (1024, 100_000)
    prompts = (8, 64) if options.quick else options.prompts
    costs = options.costs
    shown_here = ("algorithm-1", *TWINS)

    def case(c: str, i: int, p: str) -> Offline:
        return Offline(policy=p, num_requests=num, prompt=i, output=output, capacity=capacity, costs=c)

    results = options.run(list(itertools.starmap(case, itertools.product(costs, prompts, shown_here))))
    kind = "" if costs == COSTS[:1] else "_" + "_".join(costs)
    write_csv(options.out / f"infermax_fig8{kind}.csv", _rows(results))
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
                {shown(p): (prompts, [results[case(c, i, p)][m] for i in prompts]) for p in shown_here},
            )
            for m, label in (*METRICS, ("running", "running requests"))
        ]
        _plot(options.out / f"infermax_fig8_{c}.png", panels, columns=4, x="I")
    return rows


def fig9(options: Options) -> list[Row]:
    num = 16 if options.quick else 1024
    capacities = (100, 1_000) if options.quick else (100, 1_000, 10_000, 100_000, 1_000_000)
    costs = options.costs
    bases = ("fcfs", "algorithm-1", "sarathi")
    twins = tuple(dict.fromkeys(p for base in bases for p in (base, twin(base))))

    def prompts(capacity: int) -> list[int]:
        # Prompts that fit with 31 tokens of output; InferMax crops its axes in the same way.
        lengths = (16, 64) if options.quick else sorted({16, 64, *options.prompts})
        return [i for i in lengths if i + 31 <= capacity]

    def case(c: str, m: int, i: int, p: str) -> Offline:
        return Offline(policy=p, num_requests=num, prompt=i, output=32, capacity=m, costs=c)

    results = options.run([case(c, m, i, p) for c in costs for m in capacities for i in prompts(m) for p in twins])
    write_csv(options.out / "infermax_fig9.csv", _rows(results))

    def gain(c: str, base: str, m: int) -> dict[str, float]:
        """TPS with evictions over TPS without."""
        return {
            f"I={i}": results[case(c, m, i, base)]["tokens_per_s"] / results[case(c, m, i, twin(base))]["tokens_per_s"]
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
                most, where = largest({f"{shown(p)} {i}": 1 / g for p in bases for i, g in gain(c, p, m).items()})
                rows.append(effect(name, most, variant=c, where=where))
        rows += tpot_claims(
            c, {(m, i): results[case(c, m, i, "fcfs")]["tpot_s"] for m in capacities for i in prompts(m)}
        )
        if (m := 1_000_000) in capacities:
            use = max(results[case(c, m, i, "sarathi")]["memory_use"] for i in prompts(m))
            rows.append(compare("I-45-util", 100 * use, variant=c))
        panels: list[Panel] = [
            (
                f"M = {m}",
                label,
                {shown(p): (prompts(m), [results[case(c, m, i, p)][n] for i in prompts(m)]) for p in twins},
            )
            for n, label in METRICS
            for m in capacities
        ]
        _plot(options.out / f"infermax_fig9_{c}.png", panels, columns=len(capacities), x="I")
    return rows


def tpot_claims(c: str, tpot_s: dict[tuple[int, int], float]) -> list[Row]:
    """Return what §4.5 says of vLLM's TPOT at large M, judged on its TPOT by M and I with costs `c`."""
    large = {m: sorted(i for of, i in tpot_s if of == m) for m in (100_000, 1_000_000)}
    if not all(large.values()):
        return []
    rises = [tpot_s[m, i] < tpot_s[m, more] for m, lengths in large.items() for i, more in itertools.pairwise(lengths)]
    keeps = [tpot_s[100_000, i] <= tpot_s[1_000_000, i] for i in large[100_000]]
    return [
        claim("I-45-tpot-i", "Sec 4.5", "vLLM's TPOT rises with I at M of 100K and 1M", rises, variant=c),
        claim("I-45-tpot-m", "Sec 4.5", "vLLM's TPOT is not lower at M = 1M than at 100K", keeps, variant=c),
    ]


def fig10_12(options: Options) -> list[Row]:
    mixes = ("SISO+LILO", "SILO+LISO") if options.quick else options.mixes
    sizes = (16,) if options.quick else options.sizes
    seeds = (0, 1) if options.quick else tuple(range(options.num_seeds))
    costs = options.costs
    policies = ("rank-org", "rank-i", "rank-o")

    def case(c: str, mix: str, b: int, s: int, p: str) -> Offline:
        return Offline(policy=p, num_requests=b, mix=mix, costs=c, seed=s)

    results = options.run(list(itertools.starmap(case, itertools.product(costs, mixes, sizes, seeds, policies))))
    # Runs with other sizes stand beside those with all.
    part = "" if sizes == SIZES or options.quick else f"_B{max(sizes)}"
    write_csv(options.out / f"infermax_fig10_12{part}.csv", _rows(results))
    claims = (
        # target, metric, policy ahead, policies behind, mixes
        ("I-46-lat", "latency_s", "rank-i", ("rank-o", "rank-org"), MIXES),
        ("I-46-ttft-o", "ttft_s", "rank-i", ("rank-o",), MIXES),
        ("I-46-ttft-n", "ttft_s", "rank-i", ("rank-org",), MIXES),
        ("I-46-tpot", "tpot_s", "rank-i", ("rank-o", "rank-org"), WITH_LILO),
        ("I-46-tpot-o-i", "tpot_s", "rank-o", ("rank-i",), WITHOUT_LILO),
        ("I-46-tpot-o-n", "tpot_s", "rank-o", ("rank-org",), WITHOUT_LILO),
    )
    rows = []
    for c in costs:
        for name, metric, ahead, behind, which in claims:
            by_seed = {
                f"{mix} B={b} over {shown(p)}": [
                    results[case(c, mix, b, s, p)][metric] / results[case(c, mix, b, s, ahead)][metric] for s in seeds
                ]
                for mix, b, p in itertools.product(mixes, sizes, behind)
                if mix in which
            }
            _, where = largest({k: float(np.mean(v)) for k, v in by_seed.items()})
            variant = f"{c}, B up to {max(sizes)}" if part else c
            rows.append(effect(name, by_seed[where], variant=variant, where=where))

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
            _plot(options.out / f"infermax_fig{number}{part}_{c}.png", panels, columns=3, x="B")
    return rows


def sorting(options: Options) -> list[Row]:
    """§1: keeping long requests cuts latency "by up to 1.4x for our analysis workloads without regression".

    B is the largest of `--sizes`; with fewer than 1,024 requests M is less in proportion.
    """
    bases = ("fcfs", "algorithm-1", "sarathi", "sarathi-pc")
    ours = ("sorting", "infermax", "infermax-c")
    seeds = (0,) if options.quick else tuple(range(options.num_seeds))
    num = 32 if options.quick else max(options.sizes)
    capacity = 2048 if options.quick else 100_000 * num // 1024
    mixes = ("SISO+LISO",) if options.quick else options.mixes
    equal = [(i, o) for o in options.outputs for i in options.prompts if o > 1]

    def mixed(c: str, mix: str, s: int, p: str) -> Offline:
        return Offline(policy=p, num_requests=num, mix=mix, capacity=capacity, costs=c, seed=s)

    def same(c: str, i: int, o: int, p: str) -> Offline:
        return Offline(policy=p, num_requests=num, prompt=i, output=o, capacity=capacity, costs=c)

    policies = (*bases, *ours)
    results = options.run(
        [
            *(mixed(*x) for x in itertools.product(options.costs, mixes, seeds, policies)),
            *(same(c, i, o, p) for c in options.costs for i, o in equal for p in policies),
        ]
    )
    write_csv(options.out / "infermax_sorting.csv", _rows(results))
    rows = []
    for c, base, policy in itertools.product(options.costs, bases, ours):
        by_seed = {
            mix: [
                results[mixed(c, mix, s, base)]["latency_s"] / results[mixed(c, mix, s, policy)]["latency_s"]
                for s in seeds
            ]
            for mix in mixes
        }
        by_seed |= {
            f"I={i} O={o}": [results[same(c, i, o, base)]["latency_s"] / results[same(c, i, o, policy)]["latency_s"]]
            for i, o in equal
        }
        name = f"{c}, {shown(policy)} over {shown(base)}"
        _, where = largest({k: float(np.mean(v)) for k, v in by_seed.items()})
        rows.append(effect("I-abs-sim", by_seed[where], variant=name, where=where))
        holds = [float(np.mean(v)) >= 0.99 for v in by_seed.values()]
        text = "no workload gets slower (by more than 1 %)"
        rows.append(claim("I-abs-noregression", "Sec 1", text, holds, variant=name))
    return rows


def fig13(options: Options) -> list[Row]:
    from benchmarks.paper.infermax_engine import OnEngine

    lengths = (8,) if options.quick else (8, 64)
    outputs = (4,) if options.quick else (8, 64)

    def case(o: int, i: int, p: str) -> OnEngine:
        return OnEngine(
            policy=p,
            prompt=i,
            output=o,
            num_requests=8 if options.quick else 32,
            capacity=1024,
            model=options.engine_model,
            calibration_s=4.0 if options.quick else 30.0,
            repeats=1 if options.quick else 3,
        )

    cells = list(itertools.product(outputs, lengths))
    results = run_cases([case(*x, p) for x in cells for p in BASES], options.store, 1)
    write_csv(options.out / "infermax_fig13.csv", _rows(results))
    errors = [100 * abs(r["error"]) for r in results.values()]
    variant = f"{options.engine_model} on this CPU"
    rows = [
        compare("I-err-max", max(errors), variant=variant),
        compare("I-err-avg", float(np.mean(errors)), variant=variant),
    ]
    same_order = [
        (results[case(*x, a)]["latency_s"] < results[case(*x, b)]["latency_s"])
        == (results[case(*x, a)]["simulated_latency_s"] < results[case(*x, b)]["simulated_latency_s"])
        for x in cells
        for a, b in itertools.combinations(BASES, 2)
        if abs(results[case(*x, a)]["latency_s"] / results[case(*x, b)]["latency_s"] - 1) > 0.1
    ]
    text = "of two schedulers more than 10 % apart the simulator has the same one ahead"
    if same_order:
        rows.append(claim("I-47-order", "Sec 4.7 / Fig 13", text, same_order, variant=variant))
    panels: list[Panel] = []
    for o in outputs:
        curves: Curves = {}
        for p in BASES:
            curves[shown(p)] = (lengths, [results[case(o, i, p)]["latency_s"] for i in lengths])
            curves[f"{shown(p)}, host"] = (
                lengths,
                [results[case(o, i, p)]["host_s"] for i in lengths],
            )
        panels.append((f"O = {o}", "device time (s)", curves))
    for o in outputs:
        curves = {shown(p): (lengths, [100 * results[case(o, i, p)]["error"] for i in lengths]) for p in BASES}
        panels.append((f"O = {o}", "error of the simulator (%)", curves))
    _plot(options.out / "infermax_fig13.png", panels, columns=len(outputs), x="I")
    return rows


def fig14(options: Options) -> list[Row]:
    from benchmarks.paper.infermax_engine import OnEngine

    capacities = (64, 256) if options.quick else (64, 256, 1024, 4096)
    lengths = (8,) if options.quick else (4, 32)
    output = 8 if options.quick else 16
    bases = ("fcfs", "sarathi")

    def prompts(m: int) -> list[int]:
        return [i for i in lengths if i + output <= m]

    def case(m: int, i: int, p: str) -> OnEngine:
        return OnEngine(
            policy=p,
            prompt=i,
            output=output,
            num_requests=8 if options.quick else 32,
            capacity=m,
            model=options.engine_model,
            calibration_s=4.0 if options.quick else 30.0,
            repeats=1 if options.quick else 2,
        )

    twins = [p for base in bases for p in (base, twin(base))]
    results = run_cases([case(m, i, p) for m in capacities for i in prompts(m) for p in twins], options.store, 1)
    write_csv(options.out / "infermax_fig14.csv", _rows(results))
    rows = []
    for m, target in zip(
        capacities,
        ("I-45-real-100", "I-45-real-1k", "I-45-real-10k", "I-45-real-100k"),
        strict=False,
    ):
        gains = {
            f"{shown(p)} I={i}": results[case(m, i, p)]["tokens_per_s"] / results[case(m, i, twin(p))]["tokens_per_s"]
            for p in bases
            for i in prompts(m)
        }
        if target in ("I-45-real-10k", "I-45-real-100k"):
            gains = {name: 1 / gain for name, gain in gains.items()}
        most, where = largest(gains)
        rows.append(effect(target, most, variant=f"engine on this CPU, M = {m}", where=where))
    panels: list[Panel] = [
        (
            f"M = {m}",
            label,
            {shown(p): (prompts(m), [results[case(m, i, p)][metric] for i in prompts(m)]) for p in twins},
        )
        for metric, label in METRICS[:5]
        for m in capacities
    ]
    _plot(options.out / "infermax_fig14.png", panels, columns=len(capacities), x="I")
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
    rows += [effect("I-abs-bound", seconds[name] / seconds[bound], variant=f"over {name}") for name in baselines]
    figure, axes = new_figure(1, 1, width=6, height=3)
    axis = axes[0][0]
    axis.barh(list(seconds)[::-1], list(seconds.values())[::-1])
    for x, label in ((7000, "deployable"), (6000, "theirs"), (5000, "bound")):
        axis.axvline(x, color="gray", ls=":")
        axis.annotate(label, (x, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=7)
    axis.set(xlabel="total time (s); dotted: the paper's")
    save_figure(figure, options.out / "infermax_fig16.png")
    return rows


FIGURES = {
    "fig3": fig3,
    "fig4": fig4,
    "fig5": fig5,
    "fig6": fig6,
    "fig8": fig8,
    "fig9": fig9,
    "fig10_12": fig10_12,
    "sorting": sorting,
    "fig13": fig13,
    "fig14": fig14,
    "fig16": fig16,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("figures", nargs="+", choices=(*FIGURES, "all"))
    parser.add_argument("--quick", action="store_true", help="tiny settings, seconds in all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--store", type=Path, help="keeps finished runs, to go on from later")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--costs", nargs="+", choices=COSTS, default=COSTS[:1])
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=MIXES, help="of Fig. 10 to 12")
    parser.add_argument("--grid", choices=tuple(GRIDS), default="coarse", help="of I and O")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        default=SIZES,
        help="B of Fig. 10 to 12; of sorting the largest",
    )
    parser.add_argument("--prompts", nargs="+", type=int, help="I, instead of the grid's")
    parser.add_argument("--seeds", type=int, default=3, help="shuffles of Fig. 10 to 12 and of sorting; default 3")
    parser.add_argument(
        "--engine-model",
        default="tiny-opt",
        help="of Figs. 13 and 14; others than tiny-opt (opt-125m) have random weights",
    )
    parser.add_argument(
        "--profiles",
        type=Path,
        default=Path(__file__).resolve().parents[3] / "shared" / "data" / "profiles",
        help="measured operators, as tools/hardware_descriptions.py takes them; for fig3",
    )
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    options = Options(
        out=args.out,
        store=args.store,
        workers=args.workers,
        quick=args.quick,
        costs=tuple(args.costs),
        mixes=tuple(args.mixes),
        grid=args.grid,
        sizes=tuple(args.sizes),
        num_seeds=args.seeds,
        chosen_prompts=None if args.prompts is None else tuple(args.prompts),
        engine_model=args.engine_model,
        profiles=args.profiles,
    )
    for name in FIGURES if "all" in args.figures else args.figures:
        rows = FIGURES[name](options)
        if rows:
            print_rows(rows)
            write_rows(args.out / "infermax.csv", rows)
    print_facts("infermax.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
