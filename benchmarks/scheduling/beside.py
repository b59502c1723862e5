"""Chats with objectives beside agents without, simulated: what the agents cost the chats.

    python -m benchmarks.scheduling.beside --trace FILE --seeds 2

Llama-3-8B on one H100 with 64 GiB of host memory. The chats are `interactive-chat` of the catalog (first token within
1 s, P99 of the gaps within 50 ms), real-time; the agents are best-effort, and recorded ones if `--trace` names a file.
Each policy serves the same chats alone and beside the agents.

Writes beside.csv: a row per policy, means over seeds, and prints it.
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apt_jax.config import SLO
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware, save_hardware
from apt_jax.sim.simulator import simulate
from apt_jax.sim.trace import load_trace
from apt_jax.sim.workload import draw_beside, drop_oversized, sample_workload
from benchmarks.paper.common import Runs, add_options, half_width, mean, write_csv
from benchmarks.scheduling.sessions import HARDWARE, HOST_GIB, MODEL, RESULTS, coarse

POLICIES = ("vllm-v1", "bros", "apt-plus")


def run(config: SimulationConfig) -> dict[str, Any]:
    """One seed of one policy: chats alone, and beside agents."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "long.json"
        save_hardware(coarse(load_hardware(MODEL, HARDWARE), 1), path)
        hardware = load_hardware(MODEL, str(path))
    only = dataclasses.replace(config, beside=None)
    agents = sample_workload(drop_oversized(load_trace(config.trace), hardware, only), only)
    alone = simulate(only, hardware=hardware, workload=draw_beside(agents, hardware, config))
    both = simulate(config, hardware=hardware)
    sessions = both.sessions
    assert sessions is not None
    assert not both.fallback_iterations
    chats = both.by_class["rt"]
    return {
        "chats": chats.num_sent,
        "agents_calls": sessions.num_calls,
        "alone": alone.summary.slo_attainment,
        "beside": chats.slo_attainment,
        "ttft_alone": alone.summary.ttft_attainment,
        "ttft_beside": chats.ttft_attainment,
        "tbt_alone": alone.summary.tbt_attainment,
        "tbt_beside": chats.tbt_attainment,
        "agents_completion_s": sessions.completion_mean_s,
        "agents_times_alone": sessions.slowdown_mean,
        "cached": both.prefix_hit_fraction,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_options(parser, requests=8, seeds=2, out=RESULTS)
    parser.add_argument("--trace", default="agents", help="recorded sessions, or generated ones (default: agents)")
    parser.add_argument("--rate", type=float, default=0.03, help="agents' sessions per second (default: 0.03)")
    parser.add_argument("--chats", type=float, default=0.5, help="chats per second (default: 0.5)")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    args = parser.parse_args(argv)
    runs = Runs.from_args(args)
    cells = [(policy, seed) for seed in runs.seeds for policy in args.policies]
    configs = [
        SimulationConfig(
            model=MODEL, hardware=HARDWARE, cache="kv", trace=args.trace, drop_too_long=True, rate=args.rate, seed=seed,
            num_sessions=runs.num_requests, policy=policy, swap_space=HOST_GIB, max_think_s=60.0, slo=SLO(),
            beside=f"interactive-chat:{args.chats}", max_num_batched_tokens=2048,
        )
        for policy, seed in cells
    ]  # fmt: skip
    results = runs.map("beside", run, [(config,) for config in configs])
    rows = []
    for policy in args.policies:
        own = [found for (name, _), found in zip(cells, results, strict=True) if name == policy]
        lost = [100 * (found["alone"] - found["beside"]) for found in own]
        rows.append({
            "policy": policy, **{name: mean([found[name] for found in own]) for name in own[0]}, "seeds": len(own),
            "lost_points": mean(lost), "half_width": half_width(lost),
        })  # fmt: skip
    write_csv(runs.out / "beside.csv", rows)
    for row in rows:
        print(
            f"{row['policy']:10} chats on time alone {row['alone']:.3f}, beside {row['beside']:.3f}: {row['lost_points']:.1f} "
            f"± {row['half_width']:.1f} points less; agents {row['agents_times_alone']:.2f} times as long as alone"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
