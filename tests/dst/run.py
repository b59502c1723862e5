"""Many histories of the simulations, in resumable chunks: `python -m tests.dst.run --seeds 40000`.

Results are appended to a file, a line a chunk; chunks that are in it are not run again. At the end there is a summary,
which `--summary FILE` writes as Markdown (benchmarks/results has those that were run). Exit code 1
where a seed failed.
"""

import argparse
import collections
import datetime
import json
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import tqdm

CHUNK = 50


def _run_chunk(task: tuple[str, int, int]) -> dict[str, Any]:
    from tests.support.seeds import run_seeds

    layer, first, count = task
    started, cpu = time.monotonic(), time.process_time()
    tally = run_seeds(layer, range(first, first + count), keep=False)  # type: ignore[arg-type]
    return {
        "layer": layer,
        "first": first,
        "count": count,
        "seconds": round(time.monotonic() - started, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "counts": tally.counts,
        "seeds_with": tally.seeds_with,
        "failures": tally.failures,
    }


def summary(results: list[dict[str, Any]]) -> str:
    """Return what many chunks came to, as Markdown."""
    lines = ["# Simulated histories", ""]
    cpu = next((line.partition(":")[2].strip() for line in _cpu_info() if line.startswith("model name")), "unknown CPU")
    lines += [f"{platform.system()} on {cpu}, Python {platform.python_version()}, {datetime.date.today()}.", ""]
    lines += ["| layer | seeds | first | failed | CPU minutes |", "|---|---|---|---|---|"]
    layers = sorted({result["layer"] for result in results})
    for layer in layers:
        own = [r for r in results if r["layer"] == layer]
        count, failed = sum(r["count"] for r in own), sum(len(r["failures"]) for r in own)
        minutes = sum(r["cpu_seconds"] for r in own) / 60
        lines.append(f"| {layer} | {count:,} | {min(r['first'] for r in own)} | {failed} | {minutes:.0f} |")
    for layer in layers:
        own = [r for r in results if r["layer"] == layer]
        counts: collections.Counter[str] = collections.Counter()
        seeds_with: collections.Counter[str] = collections.Counter()
        for result in own:
            counts.update(result["counts"])
            seeds_with.update(result["seeds_with"])
        total = sum(r["count"] for r in own)
        lines += ["", f"## {layer}", "", "| state, fault or outcome | times | share of the seeds |", "|---|---|---|"]
        lines += [f"| {name} | {counts[name]:,} | {seeds_with[name] / total:.4f} |" for name in sorted(counts)]
        failures = [failure for result in own for failure in result["failures"]]
        lines += ["", *(f"* failed: `{layer} {seed}`: {text.splitlines()[0]}" for seed, text in failures)]
    return "\n".join(lines).rstrip() + "\n"


def _cpu_info() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    parser = argparse.ArgumentParser(prog="python -m tests.dst.run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=40_000, help="number of seeds of each layer")
    parser.add_argument("--base", type=int, help="first seed (default: the date, as in the tests)")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--layer", choices=["engine", "serving", "both"], default="both")
    parser.add_argument("--out", type=Path, default=Path("simulation.jsonl"), help="results, a line a chunk")
    parser.add_argument("--summary", type=Path, help="Markdown file to be written at the end")
    parser.add_argument("--digests", nargs="+", metavar=("LAYER", "SEED"), help="print digests of a layer's seeds")
    args = parser.parse_args()
    if args.digests:
        from tests.support.seeds import SIMULATE

        layer, *seeds = args.digests
        for seed in map(int, seeds):
            sys.stdout.write(f"{seed} {SIMULATE[layer](seed).digest}\n")
        return 0
    today = datetime.datetime.now(datetime.UTC)
    base = int(f"{today:%Y%m%d}0000") if args.base is None else args.base
    results = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    known = {(r["layer"], r["first"], r["count"]) for r in results}
    layers = ["engine", "serving"] if args.layer == "both" else [args.layer]
    chunks = [
        (layer, base + first, min(CHUNK, args.seeds - first))
        for first in range(0, args.seeds, CHUNK)
        for layer in layers
    ]
    todo = [chunk for chunk in chunks if chunk not in known]
    num_failed = sum(len(r["failures"]) for r in results)
    with (
        multiprocessing.get_context("spawn").Pool(args.jobs) as pool,
        args.out.open("a") as out,
        tqdm.tqdm(
            total=args.seeds * len(layers), unit="seed", initial=args.seeds * len(layers) - sum(c[2] for c in todo)
        ) as bar,
    ):
        for result in pool.imap_unordered(_run_chunk, todo):
            out.write(json.dumps(result) + "\n")
            out.flush()
            results.append(result)
            num_failed += len(result["failures"])
            bar.update(result["count"])
            bar.set_postfix(failed=num_failed)
            for seed, text in result["failures"]:
                bar.write(f"{result['layer']} {seed}  # {text.splitlines()[0]}\n  {text.splitlines()[-1]}")
    wanted = set(chunks)
    results = [r for r in results if (r["layer"], r["first"], r["count"]) in wanted]
    if args.summary is not None:
        args.summary.write_text(summary(results))
    sys.stdout.write(f"{sum(r['count'] for r in results)} seeds, {num_failed} failed: {args.out}\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
