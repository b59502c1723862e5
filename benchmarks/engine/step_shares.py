"""Where the time of a step goes on this CPU: every operation beside the machine's rates.

A step is timed whole, and its operations by the kernels themselves (compiled for that once, about half a minute). Shares
are of the read bandwidth and the matmul rate that the same process measures just before; what no kernel accounts for
(sampling, embedding, XLA's own operations, the host) is one line.

    python -m benchmarks.engine.step_shares --dtype bfloat16 --step 8x1@160 --step 1x1024@0 --step 24x1@160+1x400@0
"""

import argparse
import json
import os
import sys

os.environ["APT_JAX_KERNEL_FLAGS"] = f"{os.environ.get('APT_JAX_KERNEL_FLAGS', '')} -DAPT_TIMES".strip()

import numpy as np
from tqdm import tqdm

from apt_jax.config import CacheConfig
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.cpu import build
from apt_jax.executor.calibrate import step_time_s, synthetic_batch
from apt_jax.executor.jax_executor import JaxExecutor
from benchmarks.engine.cpu_throughput import add_model_flags, load, machine_rates
from benchmarks.paper.common import new_file

_MAX_ROWS, _MAX_MODEL_LEN = 64, 2048


def rows_of(step: str) -> tuple[list[int], list[int]]:
    """Cached tokens and tokens to compute of every row of a step like ``24x1@160+1x400@0``: parts of ROWSxTOKENS@CACHED.

    Raises:
        ValueError: it is no such text.
    """
    starts, lens = [], []
    for part in step.split("+"):
        shape, cached = part.split("@")
        rows, tokens = shape.split("x")
        starts += [int(cached)] * int(rows)
        lens += [int(tokens)] * int(rows)
    return starts, lens


def _step(text: str) -> str:
    try:
        starts, lens = rows_of(text)
    except ValueError:
        starts, lens = [], []
    if not lens or min(starts) < 0 or min(lens) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be ROWSxTOKENS@CACHED, parts joined by +")
    if max(map(sum, zip(starts, lens, strict=True))) > _MAX_MODEL_LEN:
        raise argparse.ArgumentTypeError(f"{text!r:.80} has a row of more than {_MAX_MODEL_LEN} tokens")
    if len(lens) > _MAX_ROWS or sum(lens) > _MAX_MODEL_LEN:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is more than {_MAX_ROWS} rows or {_MAX_MODEL_LEN} tokens")
    return text


def measure(executor: JaxExecutor, step: str, kind: int, repeats: int) -> tuple[float, dict[str, build.OperationTime]]:
    """Median seconds of a step, and its operations, of `repeats` steps together."""
    starts, lens = rows_of(step)
    batch = synthetic_batch(executor, [kind] * len(starts), starts, lens)
    for _ in range(3):
        step_time_s(executor, batch)
    build.take_times()
    seconds = [step_time_s(executor, batch) for _ in range(repeats)]
    return float(np.median(seconds)), build.take_times()


def table(
    seconds: float, times: dict[str, build.OperationTime], repeats: int, rates: dict[str, float]
) -> list[dict[str, float | str]]:
    """A row an operation, longest first, and one for what is left: milliseconds a step and shares of the rates."""
    rows: list[dict[str, float | str]] = []
    for name, t in sorted(times.items(), key=lambda item: -item[1].seconds):
        rows.append(
            {
                "operation": name,
                "calls": t.calls / repeats,
                "ms": 1e3 * t.seconds / repeats,
                "read": t.bytes / t.seconds / rates["read_bytes_s"],
                "products": t.operations / t.seconds / rates["matmul_flop_s"],
            }
        )
    rest = 1e3 * seconds - sum(float(row["ms"]) for row in rows)
    return [*rows, {"operation": "rest", "calls": 0, "ms": rest, "read": 0, "products": 0}]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model_flags(parser)
    parser.add_argument("--cache", default="kv", choices=["kv", "hidden"], help="kind of all rows (default: kv)")
    parser.add_argument(
        "--step",
        type=_step,
        action="append",
        metavar="ROWSxTOKENS@CACHED",
        help="rows, tokens that each computes and tokens that it has cached, parts joined by +; again for each step "
        "(default: decode steps of 1 to 64 rows, a prompt of 1,024 and a mixed step)",
    )
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="steps of each kind (default: 15)")
    parser.add_argument("--json", type=new_file, metavar="FILE")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} must be at least 1")
    steps = args.step or ["1x1@160", "8x1@160", "32x1@160", "64x1@160", "1x1024@0", "24x1@160+1x400@0"]
    found = []
    for dtype in args.dtype:
        loaded = load(
            parser, model=args.model, dtype=dtype, load_format=args.load_format, quantization=args.quantization
        )
        executor = JaxExecutor(
            loaded.params, loaded.config, cache=CacheConfig(num_blocks_override=2000), max_num_seqs=_MAX_ROWS,
            max_num_batched_tokens=_MAX_MODEL_LEN, max_model_len=_MAX_MODEL_LEN, quantization=args.quantization,
        )  # fmt: skip
        rates = machine_rates(dtype)
        print(
            f"{dtype}: matmul {rates['matmul_flop_s'] / 1e9:.0f} GFLOP/s, read {rates['read_bytes_s'] / 1e9:.1f} GB/s; "
            "shares are of these, and above 100 % where the machine was slower then"
        )
        for step in tqdm(steps, desc=dtype, file=sys.stderr):
            seconds, times = measure(executor, step, KV if args.cache == "kv" else HIDDEN, args.repeats)
            rows = table(seconds, times, args.repeats, rates)
            print(f"\n{dtype} {args.cache} {step}: {1e3 * seconds:.1f} ms a step")
            print(f"  {'operation':42} {'calls':>5} {'ms':>8} {'of step':>8} {'read':>6} {'product':>8}")
            for row in rows:
                print(
                    f"  {row['operation']:42} {row['calls']:5.0f} {row['ms']:8.2f} {float(row['ms']) / seconds / 10:7.0f}%"
                    f" {row['read']:6.0%} {row['products']:8.0%}"
                )
            found.append({"dtype": dtype, "cache": args.cache, "step": step, "ms": 1e3 * seconds, "operations": rows})
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "steps": found}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
