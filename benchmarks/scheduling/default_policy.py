"""Compares what `serve` could take as its default policy: on a simulated GPU, with latency objectives and without.

    python -m benchmarks.scheduling.default_policy [--requests N] [--seeds N]

OPT-13B on one A100 of 40 GB, keys and values alone, ShareGPT and LongBench (outputs x 0.6) below and above what the
machine completes. For each policy, over paired seeds with 95 % intervals of the mean: attainment (with objectives), the
first token's p50 and p99, the p99 over requests of their largest gap, tokens/s, recomputed tokens. It writes
`default-policy.csv`. `benchmarks.scheduling.long_prompt` has what a long prompt does to streams on a CPU.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from apt_jax.config import SLO
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import SimulationResult, simulate
from benchmarks.paper.common import half_width

RESULTS = Path(__file__).resolve().parents[1] / "results" / "long-prompt"
POLICIES = ("apt", "apt-plus", "vllm-v1", "sarathi")
LOADS = (("sharegpt", 1.0, 3.0), ("sharegpt", 1.0, 6.0), ("longbench", 0.6, 0.8), ("longbench", 0.6, 1.6))
OBJECTIVES = {"sharegpt": SLO(ttft_s=1.0, tbt_s=1.0), "longbench": SLO(ttft_s=4.0, tbt_s=1.0)}
COLUMNS = ("attainment %", "ttft p50 s", "ttft p99 s", "largest gap p99 s", "tokens/s", "recomputed tokens")


def measured(result: SimulationResult) -> list[float]:
    done = [request for request in result.requests if request is not None and len(request.token_times_s) > 1]
    ttft_s = [request.ttft_s for request in done if request.ttft_s is not None]
    gaps_s = [float(np.diff(request.token_times_s).max()) for request in done]
    values = [100.0 * result.slo_attainment, *np.percentile(ttft_s, (50, 99)), np.percentile(gaps_s, 99)]
    return [*map(float, values), result.tokens_per_s, float(result.recomputed_tokens)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args(argv)
    policies: list[str] = args.policies
    cases = [(load, given, policy) for load in LOADS for given in (True, False) for policy in policies]
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "default-policy.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        names = [f"{column}{half}" for column in COLUMNS for half in ("", " half width")]
        writer.writerow(["trace", "requests/s", "objectives", "policy", *names])
        for (trace, scale, rate), given, policy in tqdm(cases, unit="case"):
            runs = [
                measured(
                    simulate(
                        SimulationConfig(
                            model="opt-13b",
                            hardware="a100-40gb",
                            trace=trace,
                            output_scale=scale,
                            rate=rate,
                            slo=OBJECTIVES[trace] if given else SLO(),
                            policy=policy,
                            cache="kv",
                            num_requests=args.requests,
                            drop_too_long=True,
                            seed=seed,
                        )
                    )
                )
                for seed in range(args.seeds)
            ]
            row = [f"{f(column):.4g}" for column in zip(*runs, strict=True) for f in (np.mean, half_width)]
            writer.writerow([trace, rate, "yes" if given else "no", policy, *row])
            file.flush()
            tqdm.write(f"{trace} {rate}/s objectives {'yes' if given else 'no'} {policy}: " + " ".join(row[::2]))


if __name__ == "__main__":
    main()
