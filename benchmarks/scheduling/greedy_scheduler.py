"""Speed and quality of the greedy scheduler.

Times `solve_greedy` (with building and checking the problem) on problems of 100 to 100,000 requests with two cache
kinds, and `schedule` of every policy on whole views. One thread of NumPy; sorting and memory traffic limit it. Then
compares it with the exact solver (HiGHS) on random problems; that takes about 3 to 10 ms each.

    python -m benchmarks.scheduling.greedy_scheduler [--problems 20000] [--policies apt,fcfs] [--seed 0] [--json FILE]
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from apt_jax.core.kinds import CacheKindSpec
from apt_jax.errors import ConfigError
from apt_jax.sched import (
    KnapsackProblem,
    RequestTable,
    SchedulerView,
    StepCosts,
    all_policies,
    make_policy,
    solve_exact,
    solve_greedy,
)

SIZES = (100, 1_600, 10_000, 100_000)
BLOCK_SIZE = 16


def percentiles_ms(times_s: list[float]) -> dict[str, float]:
    ms = 1e3 * np.array(times_s)
    return {
        "min_ms": float(ms.min()),
        "median_ms": float(np.median(ms)),
        "p99_ms": float(np.percentile(ms, 99)),
    }


def serving_problem(rng: np.random.Generator, num_requests: int) -> KnapsackProblem:
    """Lengths, pending times and a linear penalty as in serving; memory for three tenths of the requests with KV."""
    tokens = rng.integers(1, 2000, num_requests)
    pending_s = rng.exponential(1.0, num_requests)
    groups = -(-tokens // BLOCK_SIZE)
    value = np.stack([pending_s, pending_s - 3e-4 * tokens], axis=1)
    cost = np.stack([2 * groups, groups], axis=1)
    return KnapsackProblem(value, cost, int(0.3 * cost[:, 0].sum()))


def small_problem(rng: np.random.Generator) -> KnapsackProblem:
    """1 to 40 requests, 2 or 3 kinds, whole blocks; penalties of both signs, free and oversized options, ties."""
    n, k = int(rng.integers(1, 41)), int(rng.choice([2, 2, 3]))
    tokens = rng.integers(1, int(rng.choice([20, 300])), n)
    groups = -(-tokens // int(rng.choice([1, 4, 16])))
    cost = groups[:, None] * np.arange(k, 0, -1)
    pending_s = rng.exponential(1.0, n) if rng.random() < 0.8 else rng.integers(1, 4, n).astype(float)
    penalty = rng.choice([0.0, 1e-3, 1e-2, -1e-2]) * rng.exponential(1.0, (n, k)) * tokens[:, None]
    penalty[:, 0] = 0.0
    value = pending_s[:, None] - penalty
    if rng.random() < 0.1:
        cost = np.where(rng.random((n, k)) < 0.1, 0, cost)
    if rng.random() < 0.1:
        value = np.where(rng.random((n, k)) < 0.3, -np.inf, value)
    return KnapsackProblem(value, cost, int(rng.integers(1, cost.max(axis=1).sum() + 2)))


def measure_solver(rng: np.random.Generator) -> list[dict[str, float]]:
    results = []
    for n in SIZES:
        problem = serving_problem(rng, n)
        repeats = int(np.clip(400_000 // n, 25, 1000))
        for _ in range(3):
            solve_greedy(problem)
        times_s = []
        for _ in range(repeats):
            start_s = time.perf_counter()
            solve_greedy(KnapsackProblem(problem.value, problem.cost, problem.capacity))
            times_s.append(time.perf_counter() - start_s)
        results.append({"requests": n, "repeats": repeats, **percentiles_ms(times_s)})
    return results


def serving_view(rng: np.random.Generator, num_running: int, num_waiting: int, num_blocks: int) -> SchedulerView:
    table = RequestTable(num_running + num_waiting)
    now_s = 10.0
    for i in range(num_running + num_waiting):
        row = table.add(
            arrival_s=float(rng.uniform(0, now_s)),
            rank=i,
            prompt_len=int(rng.integers(10, 1000)),
            max_tokens=500,
            slo_ttft_s=5.0,
            slo_tbt_s=1.0,
        )
        if i < num_running:
            outputs = int(rng.integers(1, 300))
            table.num_outputs[row] = table.num_delivered[row] = outputs
            table.num_tokens[row] += outputs
            table.num_cached[row] = table.num_tokens[row] - 1
            table.kind[row] = rng.integers(2)
            table.num_blocks[row] = -(-table.num_cached[row] // BLOCK_SIZE) * (2 - table.kind[row])
            table.last_token_s[row] = now_s - rng.uniform(0, 0.1)
    used = int(table.num_blocks.sum())
    return SchedulerView(
        now_s=now_s,
        table=table,
        waiting=np.arange(num_running, num_running + num_waiting, dtype=np.int32),
        running=np.arange(num_running, dtype=np.int32),
        free_blocks=max(num_blocks - used, 0),
        total_blocks=max(num_blocks, used),
        block_size=BLOCK_SIZE,
        kinds=(
            CacheKindSpec(name="kv", blocks_per_group=2),
            CacheKindSpec(name="hidden", blocks_per_group=1, extra_per_token_s=1e-6),
        ),
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        costs=StepCosts(prefill_base_s=1e-3, prefill_per_token_s=1e-4),
    )


def measure_policies(rng: np.random.Generator, names: list[str], repeats: int) -> list[dict[str, object]]:
    cases = (
        ("64 running, 200 waiting", 64, 200, 8000),
        ("64 running, pool full", 64, 0, 0),
        ("200 running, 1400 waiting", 200, 1400, 24000),
        ("1600 waiting", 0, 1600, 8000),
    )
    results: list[dict[str, object]] = []
    for name, num_running, num_waiting, num_blocks in cases:
        view = serving_view(rng, num_running, num_waiting, num_blocks)
        for policy_name in names:
            policy, times_s = make_policy(policy_name), []
            for _ in range(3 + repeats):
                start_s = time.perf_counter()
                policy.schedule(view)
                times_s.append(time.perf_counter() - start_s)
            results.append({"policy": policy_name, "case": name, **percentiles_ms(times_s[3:])})
    return results


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """HiGHS prints stray lines on the file descriptor itself, whatever its options say."""
    sys.stdout.flush()
    saved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)


def measure_ratio(rng: np.random.Generator, num_problems: int) -> dict[str, float]:
    """Greedy value over the exact optimum."""
    ratios, below_half, optimal = [], 0, 0
    started_s = time.perf_counter()
    for done in range(1, num_problems + 1):
        problem = small_problem(rng)
        best, value = solve_exact(problem).value, solve_greedy(problem).value
        ratio = value / best if best > 0 else 1.0
        ratios.append(ratio)
        below_half += ratio < 0.5
        optimal += ratio > 1 - 1e-9
        if done % 100 == 0 or done == num_problems:
            filled = 30 * done // num_problems
            left_s = (time.perf_counter() - started_s) / done * (num_problems - done)
            bar = "#" * filled + "." * (30 - filled)
            sys.stderr.write(f"\r[{bar}] {done}/{num_problems} problems, {left_s:.0f} s left ")
            sys.stderr.flush()
    sys.stderr.write("\n")
    return {
        "problems": num_problems,
        "mean": float(np.mean(ratios)),
        "p1": float(np.percentile(ratios, 1)),
        "least": float(np.min(ratios)),
        "below_half": int(below_half),
        "optimal_share": optimal / num_problems,
    }


def revision() -> str:
    here = Path(__file__).resolve().parent
    answer = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and quality of the greedy scheduler.")
    parser.add_argument(
        "--problems",
        type=int,
        default=20_000,
        help="random problems for the ratio; 0: skip it (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random problems (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument(
        "--policies",
        default=",".join(sorted(all_policies())),
        metavar="POLICY[,POLICY...]",
        help="whose calls are timed; package.module:Class too (default: all)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=500,
        help="calls of each policy on each view (default %(default)s)",
    )
    options = parser.parse_args()
    names = options.policies.split(",")
    try:
        for name in names:
            make_policy(name)
    except ConfigError as error:
        parser.error(str(error))
    if options.problems < 0:
        parser.error(f"--problems {options.problems} must be at least 0")
    rng = np.random.default_rng(options.seed)

    solver = measure_solver(rng)
    print(f"{'solve_greedy':<36}{'min ms':>10}{'median ms':>12}{'p99 ms':>10}")
    for r in solver:
        print(
            f"{r['requests']:>8,} requests x 2 kinds           {r['min_ms']:>9.3f}{r['median_ms']:>12.3f}{r['p99_ms']:>10.3f}"
        )
    width = 31 + max(5, *map(len, names))
    policies = measure_policies(rng, names, options.repeats)
    print(f"\n{'schedule()':<{width}}{'min ms':>10}{'median ms':>12}{'p99 ms':>10}")
    for r in policies:
        print(
            f"{r['policy']!s:<{width - 30}}{r['case']!s:<30}{r['min_ms']:>10.3f}{r['median_ms']:>12.3f}{r['p99_ms']:>10.3f}"
        )
    ratio = None
    if options.problems:
        with quiet_stdout():
            ratio = measure_ratio(rng, options.problems)
    if ratio:
        print(
            f"\ngreedy / exact over {ratio['problems']:,} problems: mean {ratio['mean']:.4f}, 1st percentile {ratio['p1']:.4f}, "
            f"least {ratio['least']:.4f}; {ratio['below_half']} below one half, {ratio['optimal_share']:.1%} optimal"
        )
    result = {
        "command": " ".join(["python", *sys.argv]),
        "revision": revision(),
        "seed": options.seed,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "solve_greedy": solver,
        "schedule": policies,
        "ratio": ratio,
    }
    line = json.dumps(result)
    if options.json:
        options.json.write_text(line + "\n")
    print(line)
    if ratio and ratio["below_half"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
