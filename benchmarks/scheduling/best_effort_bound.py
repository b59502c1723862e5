"""The bound on best-effort waits under too many real-time requests: what `bros` holds and loses with it.

    python -m benchmarks.scheduling.best_effort_bound

Simulated: OPT-13B on one A100 of 40 GB, KV, steps of 512 tokens. Real-time requests (prompts of 200 to 600 tokens,
outputs of 20 to 120, TTFT 1 s, TBT 0.2 s) come at `--rate` for `--minutes`; best-effort ones (700 and 80) 10 s later.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from apt_jax.config import SLO
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate
from apt_jax.sim.workload import Workload

POLICIES = ("bros", "bros?best_effort_wait=60", "bros?best_effort_wait=20")


def mixed(rate: float, minutes: float, num_best_effort: int, seed: int) -> Workload:
    """Real-time requests, and best-effort ones that all come 10 s later."""
    rng = np.random.default_rng(seed)
    n, m = round(rate * 60 * minutes), num_best_effort
    arrival_s = np.r_[rng.exponential(1 / rate, n).cumsum(), np.full(m, 10.0)]
    order = arrival_s.argsort(kind="stable")
    return Workload(
        prompt_tokens=np.r_[rng.integers(200, 600, n), np.full(m, 700)].astype(np.int32)[order],
        output_tokens=np.r_[rng.integers(20, 120, n), np.full(m, 80)].astype(np.int32)[order],
        arrival_s=arrival_s[order],
        best_effort=order >= n,
    )


def row(policy: str, workload: Workload) -> str:
    """One run as a row of a Markdown table."""
    config = SimulationConfig(
        policy=policy,
        cache="kv",
        slo=SLO(ttft_s=1.0, tbt_s=0.2),
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    result = simulate(config, workload=workload)
    metrics = [one for one in result.requests if one is not None]
    of_class = [[m for m, low in zip(metrics, workload.best_effort, strict=True) if low == c] for c in (False, True)]
    waits_s = [np.diff([m.arrival_s, *m.token_times_s]).max() for m in of_class[1]]
    attained = np.mean([m.slo_attained for m in of_class[0]])
    ttft_s = np.median([m.ttft_s or 0.0 for m in of_class[0]])
    return (
        f"| `{policy}` | {len(of_class[1])} | {np.max(waits_s):.0f} | {100 * attained:.1f} | {ttft_s:.2f} "
        f"| {result.tokens_per_s:.0f} | {result.preemptions} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=9.6, help="real-time requests per second (default: 9.6, 120 %%)")
    parser.add_argument("--minutes", type=float, default=5.0, help="for how long they come (default: 5)")
    parser.add_argument("--best-effort", type=int, nargs="+", default=[1, 40], help="numbers of best-effort requests")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print("| policy | best-effort requests | longest wait for a token, s | real-time attainment, % | TTFT p50, s | tokens/s | preemptions |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for count in args.best_effort:
        workload = mixed(args.rate, args.minutes, count, args.seed)
        for policy in POLICIES:
            print(row(policy, workload), flush=True)


if __name__ == "__main__":
    main()
