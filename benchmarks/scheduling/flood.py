"""Interactive traffic on top of a flood of best-effort requests, served on this machine by each policy.

    python -m benchmarks.scheduling.flood [--model opt-125m] [--seconds S] [--seeds N]

The flood is there at the start and larger than a run can serve; interactive requests arrive at random, and there are few
enough of them that they fit in beside it. Their TTFT objective is 1.5 times the p99 of the same arrivals without the flood.
For each seed, all in one sitting, in an order that changes from seed to seed:

* the interactive requests alone, and the flood alone, both with `bros`;
* both, by each policy. `bros` runs with blocks that the two classes share and without; the others know no classes.

It writes `flood.csv` and `flood.png`: interactive TTFT, the share of requests within the objective, and the best-effort
tokens a second (of prompts and output) beside those of the flood alone, with 95 % intervals over the seeds.
"""

import argparse
import csv
import dataclasses
import datetime
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from apt_jax.config import SLO, CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.engine import Engine
from apt_jax.frontend.components import EngineComponents, with_policy
from apt_jax.frontend.progress import ProgressBars
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sim.trace import draw_arrivals
from apt_jax.utils.clock import WallClock
from benchmarks.paper.common import half_width
from benchmarks.scheduling.simulator_fidelity import calibrated

RESULTS = Path(__file__).resolve().parents[1] / "results" / "flood"
SLOTS, STEP_TOKENS = 16, 32
WITHOUT = "bros, blocks not shared"
POLICIES = ("fcfs", "vllm-v1", "apt-plus", WITHOUT, "bros")
TBT_S = 0.5


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: what interactive requests waited, and what the flood got done."""

    ttft_s: NDArray[np.float64]
    """(requests,) inf: none had come when the run ended."""
    best_effort_tokens_per_s: float
    saved_slots: float
    num_preemptions: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Requests of a run.

    Attributes:
        arrival_s, prompt, output: (requests,) of interactive ones.
        flood_prompt, flood_output: (requests,) tokens of best-effort ones.
    """

    arrival_s: NDArray[np.float64]
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    flood_prompt: NDArray[np.int32]
    flood_output: NDArray[np.int32]


def draw(seconds: float, rate: float, flood_size: int, seed: int) -> Traffic:
    rng = np.random.default_rng(seed)
    n = max(int(rate * seconds), 1)

    def lengths(median: float, size: int, low: int, high: int) -> NDArray[np.int32]:
        return np.clip(rng.lognormal(np.log(median), 0.4, size), low, high).astype(np.int32)

    arrival_s = draw_arrivals(n, rate, 1.0, rng)
    return Traffic(
        arrival_s=arrival_s[arrival_s < seconds],
        prompt=lengths(220, n, 100, 320),
        output=lengths(12, n, 4, 24),
        flood_prompt=lengths(120, flood_size, 16, 320),
        flood_output=lengths(60, flood_size, 16, 128),
    )


def requests_of(
    prompt: NDArray[np.int32], output: NDArray[np.int32], slo_class: str, slo: SLO, seed: int
) -> list[EngineRequest]:
    rng = np.random.default_rng(seed)
    return [
        EngineRequest(
            request_id=f"{slo_class}{i}",
            prompt=None,
            prompt_token_ids=rng.integers(3, 200, int(length)).astype(np.int32),
            params=SamplingParams(max_tokens=int(tokens), temperature=0.0, ignore_eos=True),
            slo=slo,
            slo_class="be" if slo_class == "be" else "rt",
            arrival_s=0.0,
        )
        for i, (length, tokens) in enumerate(zip(prompt.tolist(), output.tolist(), strict=True))
    ]


def serve(engine: Engine, traffic: Traffic, seconds: float, slo: SLO, *, interactive: bool, flood: bool) -> Run:
    """Serve in real time for `seconds`, and half as long again while interactive requests wait for their first token."""
    clock = WallClock()
    batch = requests_of(traffic.flood_prompt, traffic.flood_output, "be", slo, 1) if flood else []
    chats = requests_of(traffic.prompt, traffic.output, "rt", slo, 2)[: traffic.arrival_s.size] if interactive else []
    begin_s = clock.now_s() + 0.05
    for request in batch:
        engine.add_request(dataclasses.replace(request, arrival_s=begin_s))
    ttft_s = np.full(len(chats), np.inf)
    sent, tokens = 0, 0
    counted: set[str] = set()
    while (now_s := clock.now_s() - begin_s) < 1.5 * seconds:
        if now_s >= seconds and (not interactive or np.isfinite(ttft_s).all()):
            break
        while sent < len(chats) and traffic.arrival_s[sent] <= now_s:
            engine.add_request(dataclasses.replace(chats[sent], arrival_s=begin_s + float(traffic.arrival_s[sent])))
            sent += 1
        if not engine.has_work:
            time.sleep(1e-4)
            continue
        for out in engine.step():
            now_s = clock.now_s() - begin_s
            if out.request.request_id.startswith("be"):
                if now_s < seconds and out.new_token_ids:
                    tokens += len(out.new_token_ids)
                    if out.request.request_id not in counted:
                        counted.add(out.request.request_id)
                        tokens += int(traffic.flood_prompt[int(out.request.request_id[2:])])
            elif out.new_token_ids and not np.isfinite(ttft_s[int(out.request.request_id[2:])]):
                at = int(out.request.request_id[2:])
                ttft_s[at] = now_s - traffic.arrival_s[at]
    stats = engine.stats()
    return Run(
        ttft_s=ttft_s,
        best_effort_tokens_per_s=tokens / seconds,
        saved_slots=float(stats.saved_slots),
        num_preemptions=stats.num_preemptions,
    )


def percentile(ttft_s: NDArray[np.float64], q: float) -> float:
    """One of the values, `inf` where that request has had no token."""
    return float(np.percentile(ttft_s, q, method="higher"))


def engine_of(parts: EngineComponents, policy: str) -> Engine:
    share = policy != WITHOUT
    cache = dataclasses.replace(parts.config.cache, share_blocks=share)
    parts = dataclasses.replace(parts, config=dataclasses.replace(parts.config, cache=cache))
    return with_policy(parts, "bros" if policy == WITHOUT else policy, "hybrid").engine


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="opt-125m", help="tiny-opt, or a shape with random weights")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a run; default 40")
    parser.add_argument("--rate", type=float, default=0.3, help="interactive requests/s; default 0.3")
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    parser.add_argument("--flood", type=int, default=400, help="best-effort requests; default 400")
    parser.add_argument("--blocks", type=int, default=200, help="of the pool; default 200")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args(argv)
    config = EngineConfig(
        model=args.model,
        load_format="auto" if args.model == "tiny-opt" else "dummy",
        dtype="bfloat16",
        max_model_len=512,
        cache=CacheConfig(num_blocks_override=args.blocks, swap_space=1.0),
        scheduler=SchedulerConfig(
            policy="bros", max_num_seqs=SLOTS, max_num_batched_tokens=STEP_TOKENS, max_num_queued_reqs=10_000
        ),
    )
    parts, executor, *_ = calibrated(config, 30.0)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.date.today()}")
    bars = ProgressBars()
    total = args.seeds * (len(args.policies) + 2)
    runs: dict[str, list[Run]] = {}
    targets: list[float] = []

    def run(name: str, policy: str, traffic: Traffic, slo: SLO, *, interactive: bool = True, flood: bool = True) -> Run:
        executor.reset()
        engine = engine_of(parts, policy)
        found = serve(engine, traffic, args.seconds, slo, interactive=interactive, flood=flood)
        runs.setdefault(name, []).append(found)
        bars("serving", sum(map(len, runs.values())), total)
        return found

    for seed in range(args.seeds):
        traffic = draw(args.seconds, args.rate, args.flood, seed)
        alone = run("interactive alone", "bros", traffic, SLO(ttft_s=10.0, tbt_s=TBT_S), flood=False)
        targets.append(1.5 * percentile(alone.ttft_s, 99))
        slo = SLO(ttft_s=targets[-1], tbt_s=TBT_S)
        run("flood alone", "bros", traffic, slo, interactive=False)
        order = np.random.default_rng(seed).permutation(args.policies)
        for policy in order.tolist():
            run(policy, policy, traffic, slo)
    bars.close()
    report(runs, targets, args.out)


def report(runs: dict[str, list[Run]], targets: list[float], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    flood = [r.best_effort_tokens_per_s for r in runs["flood alone"]]
    rows: list[dict[str, Any]] = []
    for name, found in runs.items():
        row: dict[str, Any] = {"policy": name}
        if found[0].ttft_s.size:
            p50, p99 = (np.array([percentile(r.ttft_s, q) for r in found]) for q in (50, 99))
            within = [100 * float(np.mean(r.ttft_s <= t)) for r, t in zip(found, targets, strict=True)]
            ratio = [float(p) / (t / 1.5) for p, t in zip(p99, targets, strict=True)]
            row |= {"ttft_p50_s": float(p50.mean()), "ttft_p99_s": float(p99.mean())}
            row |= {
                "p99_ratio": float(np.mean(ratio)),
                "p99_ratio_half_width": half_width(ratio) if np.isfinite(ratio).all() else 0.0,
            }
            row |= {"attainment": float(np.mean(within)), "attainment_half_width": half_width(within)}
        if name != "interactive alone":
            share = [100 * r.best_effort_tokens_per_s / f for r, f in zip(found, flood, strict=True)]
            row |= {"be_tokens_per_s": float(np.mean([r.best_effort_tokens_per_s for r in found]))}
            row |= {"be_share": float(np.mean(share)), "be_share_half_width": half_width(share)}
            row |= {"preemptions": float(np.mean([r.num_preemptions for r in found]))}
            row |= {"saved_slots": float(np.mean([r.saved_slots for r in found]))}
        rows.append(row)
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{v:24s}" for k, v in row.items()), flush=True)
    names = list(dict.fromkeys(key for row in rows for key in row))
    with (out / "flood.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    plot(runs, rows, float(np.mean(targets)), out / "flood.png")


def plot(runs: dict[str, list[Run]], rows: list[dict[str, Any]], target_s: float, path: Path) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, found in runs.items():
        if found[0].ttft_s.size:
            values = np.sort(np.concatenate([r.ttft_s for r in found]))
            shares = np.arange(1, values.size + 1) / values.size
            label = name if np.isfinite(values).any() else f"{name} (none began)"
            left.step(values[np.isfinite(values)], shares[np.isfinite(values)], where="post", label=label)
    left.axvline(target_s, color="0.5", linestyle=":", label="objective (mean)")
    left.set(xscale="log", xlabel="interactive TTFT (s)", ylabel="share of interactive requests", ylim=(0, 1.02))
    left.legend(fontsize="small")
    bars = [row for row in rows if "be_share" in row]
    right.barh(
        [row["policy"] for row in bars],
        [row["be_share"] for row in bars],
        xerr=[row["be_share_half_width"] for row in bars],
        color="tab:blue",
    )
    right.axvline(85, color="0.5", linestyle=":")
    right.set(xlabel="best-effort tokens/s, % of the flood alone", xlim=(0, 115))
    right.invert_yaxis()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
