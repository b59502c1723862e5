"""Offline throughput of the engine on this machine, beside what the machine can do.

What is timed: C requests given at once to the engine in process, greedy, end of sequence ignored; wall time from the
first submission to the last token. Programs are compiled before; compile time is reported apart. What limits it: a
prompt's tokens cost matrix products (compute), a decode step reads all weights and the cache (memory bandwidth), and at
many concurrent requests its products cost time too.

The model is OPT-125M-shaped by default (hidden 768, 12 layers, 12 heads, vocabulary 50,272) with random weights. Shares
are against the matmul rate and the read bandwidth that the same process measures just before.

    python -m benchmarks.engine.cpu_throughput --dtype float32 bfloat16 --cache kv hybrid --json results.json
"""

import argparse
import csv
import dataclasses
import functools
import json
import os
import platform
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from apt_jax.config import SLO, CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.costs.fit import CostModel
from apt_jax.costs.model import StepCosts
from apt_jax.engine import Engine
from apt_jax.errors import ConfigError, ModelLoadError
from apt_jax.executor.calibrate import calibrate
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import use_compile_cache
from apt_jax.frontend.components import cache_kinds
from apt_jax.frontend.progress import ProgressBars
from apt_jax.models import LoadedModel, load_model
from apt_jax.models.config import ModelConfig
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import make_policy
from apt_jax.utils.clock import WallClock
from benchmarks.paper.common import new_file
from serve.cli.flags import positive


def _best_s(run: Any, repeats: int = 7) -> float:
    run().block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def machine_rates(dtype: str) -> dict[str, float]:
    """Matmul rate (FLOP/s, float32 accumulation) and read bandwidth (bytes/s) of this process, right now."""
    n = 2048
    a = jnp.ones((n, n), dtype)
    product = jax.jit(
        lambda x, y: jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    )
    big = jnp.ones(100_000_000, jnp.float32)
    total = jax.jit(jnp.sum)
    return {
        "matmul_flop_s": 2 * n**3 / _best_s(lambda: product(a, a)),
        "read_bytes_s": big.nbytes / _best_s(lambda: total(big)),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One measured batch."""

    dtype: str
    cache: str
    concurrency: int
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tbt_p50_s: float
    tbt_p99_s: float
    duration_s: float
    matmul_share: float
    """Useful multiplications and additions a second over the machine's matmul rate."""
    bandwidth_share: float
    """Weights once a step and cache read, bytes a second, over the machine's read bandwidth."""
    hidden_share: float
    host_p50_ms: float
    compilations: int


def work(
    config: ModelConfig,
    concurrency: int,
    prompt: int,
    output: int,
    itemsize: int,
    steps: int,
    hidden: float,
) -> tuple[float, float]:
    """(FLOP, bytes) of the whole batch: dense products and attention; weights once a step and the cache once a
    token."""
    d, q = config.hidden_size, config.num_heads * config.head_dim
    per_layer = 2 * d * q + 2 * d * config.lane + (3 if config.gated else 2) * d * config.ffn_size
    layer_weights = config.num_layers * per_layer
    head = config.vocab_size * d
    tokens = concurrency * (prompt + output - 1)
    flop = 2.0 * layer_weights * tokens + 2.0 * head * concurrency * output
    context = sum(range(prompt, prompt + output)) * concurrency
    flop += 4.0 * config.num_layers * q * (context + concurrency * prompt * prompt / 2)
    cache_lanes = 2.0 - hidden
    bytes_read = (
        float(steps) * (layer_weights + head) * itemsize
        + context * cache_lanes * config.num_layers * config.lane * itemsize
    )
    return flop, bytes_read


def run_batch(
    executor: JaxExecutor,
    costs: CostModel | None,
    mode: str,
    concurrency: int,
    args: argparse.Namespace,
    seed: int,
) -> tuple[dict[str, Any], Any]:
    scheduler = SchedulerConfig(
        policy=args.policy,
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    offered = (mode != "hidden", mode != "kv")
    kinds = [
        dataclasses.replace(kind, offered=is_offered)
        for kind, is_offered in zip(cache_kinds(executor, costs), offered, strict=True)
    ]
    step_costs = StepCosts() if costs is None else costs.step_costs()
    engine = Engine(
        executor, make_policy(config=scheduler), WallClock(), kinds, scheduler, executor.cache_config,
        costs=step_costs, vocab_size=executor.config.vocab_size,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=args.output_len, temperature=0.0, ignore_eos=True, seed=0)
    start = time.perf_counter()
    for i in range(concurrency):
        ids = rng.integers(300, 8000, args.prompt_len).astype(np.int32)
        engine.add_request(
            EngineRequest(
                request_id=str(i),
                prompt=None,
                prompt_token_ids=ids,
                params=params,
                slo=SLO(),
                arrival_s=engine.clock.now_s(),
            )
        )
    finished, tokens = {}, 0
    while engine.has_work:
        for out in engine.step():
            tokens += len(out.new_token_ids)
            if out.finished:
                finished[out.request_id] = out.metrics
    duration = time.perf_counter() - start
    assert tokens == concurrency * args.output_len
    metrics = list(finished.values())
    stats = engine.stats()
    return {
        "duration_s": duration,
        "tokens": tokens,
        "ttft": [m.ttft_s for m in metrics],
        "tbt": np.concatenate([np.diff(m.token_times_s) for m in metrics]),
        "hidden": float(np.mean([m.cache_kind == "hidden" for m in metrics])),
        "steps": sum(stats.iterations.values()),
        "host_p50_ms": stats.host_p50_ms,
    }, stats


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the model that is measured, and of the dtypes that it is measured in."""
    parser.add_argument(
        "--model", default="opt-125m", help="a known size, or files with --load-format (default: opt-125m)"
    )
    parser.add_argument(
        "--load-format", default="dummy", help="of the model, as in apt-jax serve (default: dummy, random weights)"
    )
    parser.add_argument("--quantization", choices=["int8", "gguf"], help="of the weights (default: none)")
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], help="one or more (default: float32 bfloat16)"
    )


def load(parser: argparse.ArgumentParser, **fields: Any) -> LoadedModel:
    """`load_model` of `EngineConfig(**fields)`; what is wrong with the flags or the files ends the program with one line."""
    try:
        return load_model(EngineConfig(**fields))
    except (ConfigError, ModelLoadError) as error:
        parser.error(str(error))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model_flags(parser)
    parser.add_argument("--cache", nargs="+", default=["kv", "hybrid"], choices=["kv", "hidden", "hybrid"])
    parser.add_argument("--concurrency", type=positive(int), nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt-len", type=positive(int), default=128, help="tokens (default: 128)")
    parser.add_argument("--output-len", type=positive(int), default=64, help="tokens (default: 64)")
    parser.add_argument("--max-num-batched-tokens", type=positive(int), default=2048)
    parser.add_argument("--policy", default="fcfs", help="scheduling policy (default: fcfs, whole prompts first)")
    parser.add_argument(
        "--repeats",
        type=positive(int),
        default=3,
        help="batches of each kind; medians are reported (default: 3)",
    )
    parser.add_argument(
        "--calibration-s", type=float, default=8.0, help="0: none, for policies that ask for no step times (default: 8)"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE")
    parser.add_argument("--csv", type=new_file, metavar="FILE")
    args = parser.parse_args()
    use_compile_cache()
    runs: list[Run] = []
    machine: dict[str, Any] = {}
    top = max(args.concurrency)
    for dtype in args.dtype:
        loaded = load(
            parser, model=args.model, dtype=dtype, load_format=args.load_format, quantization=args.quantization
        )
        length = args.prompt_len + args.output_len
        cache = CacheConfig(num_blocks_override=2 * top * (-(-length // 16) + 1))
        start = time.perf_counter()
        executor = JaxExecutor(
            loaded.params,
            loaded.config,
            cache=cache,
            max_num_seqs=top,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=max(256, length),
            quantization=args.quantization,
        )
        bars = ProgressBars()
        executor.warm_up(functools.partial(bars, f"compiling {dtype}"))
        compile_s = time.perf_counter() - start
        show = functools.partial(bars, f"calibrating {dtype}")
        costs = calibrate(executor, args.calibration_s, show) if args.calibration_s > 0 else None
        bars.close()
        machine[dtype] = {**machine_rates(dtype), "compile_s": compile_s}
        itemsize = jnp.dtype(dtype).itemsize
        cases = [(mode, c) for mode in args.cache for c in args.concurrency]
        for mode, concurrency in tqdm(cases, desc=dtype, file=sys.stderr):
            batches = []
            for repeat in range(args.repeats):
                for _ in range(max(1, 4 // concurrency)):
                    batches.append(run_batch(executor, costs, mode, concurrency, args, repeat)[0])
            middle = sorted(batches, key=lambda b: b["duration_s"])[len(batches) // 2]
            flop, size = work(
                loaded.config,
                concurrency,
                args.prompt_len,
                args.output_len,
                itemsize,
                middle["steps"],
                middle["hidden"],
            )
            seconds = middle["duration_s"]
            runs.append(
                Run(
                    dtype=dtype, cache=mode, concurrency=concurrency, output_tokens_per_s=middle["tokens"] / seconds,
                    ttft_p50_s=float(np.percentile(middle["ttft"], 50)), ttft_p99_s=float(np.percentile(middle["ttft"], 99)),
                    tbt_p50_s=float(np.percentile(middle["tbt"], 50)), tbt_p99_s=float(np.percentile(middle["tbt"], 99)),
                    duration_s=seconds, matmul_share=flop / seconds / machine[dtype]["matmul_flop_s"],
                    bandwidth_share=size / seconds / machine[dtype]["read_bytes_s"], hidden_share=middle["hidden"],
                    host_p50_ms=middle["host_p50_ms"], compilations=executor.compilations,
                )
            )  # fmt: skip
        del executor, loaded
    print(
        f"{'dtype':9} {'cache':7} {'C':>3} {'out tok/s':>9} {'TTFT p50':>9} {'TTFT p99':>9} {'TBT p50':>8} {'TBT p99':>8} {'matmul':>7} {'memory':>7} {'hidden':>7} {'host ms':>8}"
    )
    for r in runs:
        print(
            f"{r.dtype:9} {r.cache:7} {r.concurrency:3} {r.output_tokens_per_s:9.1f} {1e3 * r.ttft_p50_s:6.0f} ms {1e3 * r.ttft_p99_s:6.0f} ms "
            f"{1e3 * r.tbt_p50_s:5.1f} ms {1e3 * r.tbt_p99_s:5.1f} ms {r.matmul_share:6.0%} {r.bandwidth_share:7.0%} {r.hidden_share:7.0%} {r.host_p50_ms:8.2f}"
        )
    for dtype, rates in machine.items():
        print(
            f"{dtype}: matmul {rates['matmul_flop_s'] / 1e9:.0f} GFLOP/s, read {rates['read_bytes_s'] / 1e9:.1f} GB/s, compiled in {rates['compile_s']:.0f} s"
        )
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "command": " ".join(sys.argv), "revision": revision, "date": time.strftime("%Y-%m-%d"), "jax": jax.__version__, "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "machine": machine, "runs": [dataclasses.asdict(r) for r in runs],
    }  # fmt: skip
    if args.csv:
        with args.csv.open("w", newline="") as f:
            writer = csv.DictWriter(f, fieldnames=[x.name for x in dataclasses.fields(Run)])
            writer.writeheader()
            writer.writerows(dataclasses.asdict(r) for r in runs)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "runs"}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
