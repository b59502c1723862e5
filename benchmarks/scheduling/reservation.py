"""Memory reserved by quantiles of learned output lengths, against none, against `max_tokens`, and against known lengths.

    python -m benchmarks.scheduling.reservation [--quick] [--seeds N] [--requests N] [--workers N] [--out DIR]
                                                [--store FILE]

Simulated: OPT-13B on one A100 of 40 GB, Llama-2-7B on one of 80 GB for traces beyond OPT's 2,048 tokens, keys and values
alone. Every request allows itself 1,024 tokens (as far as the model has positions) and ends at its length in the trace,
which no policy knows (`--max-tokens`). Three schedulers: `vllm-v1`, `fcfs` (both with the greatest sum over future
time), and `sarathi` (Algorithm 1 of InferMax, which adds up all final lengths).

The quantile of each scheduler is chosen on `TUNED` with seeds from 100 on: of those whose mean attainment is at most half
a point below the best one's, the one with fewest recomputed tokens. It is judged on `JUDGED`, traces that were not
looked at, with seeds from 0 on, and 0.9 beside it: differences to no reservation are paired by seed, with 95 % intervals
(Student's t). "known" is the bound: requests declare their lengths in the trace.

It writes `tuned.csv`, `judged.csv` and `summary.csv`. Finished runs are kept in the store: an interrupted benchmark goes on.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate
from benchmarks.paper.common import Runs, add_options, half_width, mean, paired, write_csv
from benchmarks.scheduling.apt_plus import TRACES

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reservation"

POLICIES = ("vllm-v1", "fcfs", "sarathi")
QUANTILES = ("0.3", "0.5", "0.7", "0.9")
NONE, ALL, KNOWN = "none", "max_tokens", "known"
TUNED = {trace: TRACES[trace][3] for trace in ("sharegpt", "azure-conv")}
JUDGED = {"bros-lmsys": (3.0,), "longbench": (1.3,), "mooncake-conv": (4.0,)}
"""Requests/s by trace."""
TUNING_SEEDS = (100, 101)
MAX_TOKENS = 1024
KEPT = ("attainment", "goodput", "tokens_per_s", "ttft_p99_s", "tbt_p99_s", "recomputed_tokens", "preemptions")

Cell = tuple[str, float, str, str]
"""Trace, requests/s, policy, reservation."""


def config_of(cell: Cell, num_requests: int) -> SimulationConfig:
    """One run, without its seed."""
    trace, rate, policy, reserve = cell
    model, hardware, slo, _ = TRACES[trace]
    option = {NONE: "", ALL: "?reserve=1", KNOWN: "?reserve=1"}.get(reserve, f"?reserve={reserve}")
    return SimulationConfig(
        model=model, hardware=hardware, trace=trace, slo=slo, rate=rate, cv=1.0, drop_too_long=True,
        policy=policy + option, cache="kv", hidden_attention="reproject", num_requests=num_requests,
        max_tokens=None if reserve == KNOWN else MAX_TOKENS,
    )  # fmt: skip


def run(config: SimulationConfig) -> dict[str, Any]:
    """Simulate one run; return the columns of the table."""
    result = simulate(config)
    summary = result.summary
    return {
        "attainment": 100 * summary.slo_attainment,
        "goodput": summary.goodput,
        "tokens_per_s": summary.tokens_per_s,
        "ttft_p99_s": summary.ttft_s.p99,
        "tbt_p99_s": summary.tbt_s.p99,
        "recomputed_tokens": result.recomputed_tokens,
        "preemptions": result.preemptions,
        **{f"recomputed_{cause}": number for cause, number in result.recomputed_by_cause.items()},
    }


def run_all(
    runs: Runs,
    what: str,
    loads: Mapping[str, Sequence[float]],
    reserves: Sequence[tuple[str, str]],
    seeds: Sequence[int],
) -> dict[Cell, list[dict[str, Any]]]:
    """Results of every trace, load, and (policy, reservation), by seed."""
    cells = [(trace, rate, *one) for trace, rates in loads.items() for rate in rates for one in reserves]
    tasks = [(dataclasses.replace(config_of(cell, runs.num_requests), seed=seed),) for cell in cells for seed in seeds]
    found = iter(runs.map(what, run, tasks))
    return {cell: [next(found) for _ in seeds] for cell in cells}


def row_of(cell: Cell, mine: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A line of a table; `base` has the same seeds without reservation."""
    row: dict[str, Any] = dict(zip(("trace", "rate", "policy", "reserve"), cell, strict=True))
    row["seeds"] = len(mine)
    for key in KEPT:
        row[key] = mean([one[key] for one in mine])
    for key in ("attainment", "recomputed_tokens", "tokens_per_s"):
        row[f"{key}_gain"], row[f"{key}_95"] = paired([one[key] for one in mine], [one[key] for one in base])
    return row


def rows_of(results: dict[Cell, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [row_of(cell, mine, results[(*cell[:3], NONE)]) for cell, mine in results.items()]


def best_quantiles(results: dict[Cell, list[dict[str, Any]]]) -> dict[str, str]:
    """By policy, the quantile that is chosen."""

    def of(policy: str, quantile: str, key: str) -> float:
        return mean([one[key] for cell, of in results.items() if cell[2:] == (policy, quantile) for one in of])

    chosen = {}
    for policy in POLICIES:
        best = max(of(policy, quantile, "attainment") for quantile in QUANTILES)
        good = [q for q in QUANTILES if of(policy, q, "attainment") >= best - 0.5]
        chosen[policy] = min(good, key=lambda q, p=policy: of(p, q, "recomputed_tokens"))
    return chosen


def summary(results: dict[Cell, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """By policy and reservation over all traces and loads: means, and differences to none paired by run."""
    lines = []
    for policy, reserve in dict.fromkeys(cell[2:] for cell in results):
        mine = [one for cell, of in results.items() if cell[2:] == (policy, reserve) for one in of]
        base = [one for cell, of in results.items() if cell[2:] == (policy, NONE) for one in of]
        gain, half = paired([one["attainment"] for one in mine], [one["attainment"] for one in base])
        lines.append(
            {"policy": policy, "reserve": reserve, "attainment": mean([one["attainment"] for one in mine]),
             "gain": gain, "half_width": half, "half_width_of_mean": half_width([one["attainment"] for one in mine]),
             **{key: mean([one[key] for one in mine]) for key in KEPT[1:]}, "runs": len(mine)}
        )  # fmt: skip
    return lines


def show(lines: Sequence[dict[str, Any]]) -> None:
    for line in lines:
        print(
            f"{line['policy']:<10}{line['reserve']:<11}{line['attainment']:>6.1f} %{line['gain']:>+7.1f} ± {line['half_width']:<5.1f}"
            f"{line['goodput']:>6.2f}/s{line['tokens_per_s']:>7.0f} tokens/s, TTFT p99 {line['ttft_p99_s']:>6.1f} s, "
            f"{line['recomputed_tokens']:>8.0f} recomputed, {line['preemptions']:>5.1f} preemptions"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_options(parser, requests=250, seeds=4, out=RESULTS)
    runs = Runs.from_args(parser.parse_args(argv))
    every = [(policy, reserve) for policy in POLICIES for reserve in (NONE, *QUANTILES, ALL)]
    tuned = run_all(runs, "tuning", TUNED, every, TUNING_SEEDS[: len(runs.seeds)])
    quantiles = best_quantiles(tuned)
    print("tuning on", ", ".join(TUNED))
    show(summary(tuned))
    print("chosen:", quantiles)
    write_csv(runs.out / "tuned.csv", rows_of(tuned))

    compared = [(policy, reserve) for policy in POLICIES for reserve in (NONE, quantiles[policy], "0.9", ALL, KNOWN)]
    judged = run_all(runs, "judging", JUDGED, compared, runs.seeds)
    print("judged on", ", ".join(JUDGED))
    lines = summary(judged)
    show(lines)
    write_csv(runs.out / "judged.csv", rows_of(judged))
    write_csv(runs.out / "summary.csv", lines)


if __name__ == "__main__":
    main()
