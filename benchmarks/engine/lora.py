"""Decode throughput of a batch whose rows have LoRA adapters, several of them, against one without.

What is timed: decode steps of a full batch through the engine, without overlap. Three engines over the same weights take
turns, a step each: one without `--lora-modules`; one with adapters that its requests name in turn; and one with adapters
whose requests name none. Adapters and weights are random: their values do not change the time. What limits it: matrix
products, weights read from memory in small batches, and on top the products with A and B of every row.

    python -m benchmarks.engine.lora --json lora.json
    python -m benchmarks.engine.lora --model smollm2-135m --dtype bfloat16 --rows 32 64 --ranks 8 16
"""

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from apt_jax.config import SLO, CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.core.kinds import CacheKindSpec
from apt_jax.engine import Engine
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import load_weights
from apt_jax.models.config import ModelConfig
from apt_jax.models.lora import TARGETS, LoraAdapter, target_shape
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import make_policy
from apt_jax.utils.clock import WallClock

FIELDS = {"all": TARGETS, "attention": ("wq", "wk", "wv", "wo"), "qv": ("wq", "wv")}
"""Matrices that adapters add to, by the name of the set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Medians over steps; shares are medians of the ratios of steps that followed each other."""

    targets: str
    rank: int
    num_adapters: int
    rows: int
    without_tokens_s: float
    adapters_tokens_s: float
    unused_tokens_s: float
    """Value for an engine with adapters whose requests name none."""
    share: float
    """Throughput with adapters over that without."""
    unused_share: float


def random_adapters(config: ModelConfig, count: int, rank: int, fields: tuple[str, ...]) -> list[LoraAdapter]:
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(0.02)

    shapes = {field: shape for field in fields if (shape := target_shape(field, config, 0)) is not None}
    return [
        LoraAdapter(
            name=f"adapter-{i}",
            matrices={
                (layer, field): (numbers(rank, inputs), numbers(outputs, rank))
                for layer in range(config.num_layers)
                for field, (outputs, inputs) in shapes.items()
            },
        )
        for i in range(count)
    ]


def decoding(executor: JaxExecutor, args: argparse.Namespace, rows: int, adapters: tuple[str, ...]) -> Engine:
    """An engine whose requests all decode, and will for `args.output_len` more steps."""
    kinds = (
        CacheKindSpec(name="kv", blocks_per_group=2),
        CacheKindSpec(name="hidden", blocks_per_group=1, offered=False),
    )
    scheduler = SchedulerConfig(
        policy="fcfs", max_num_seqs=executor.max_num_seqs, max_num_batched_tokens=executor.max_num_batched_tokens,
        overlap=False,
    )  # fmt: skip
    executor.reset()
    engine = Engine(
        executor, make_policy("fcfs", scheduler), WallClock(), kinds, scheduler, executor.cache_config,
        vocab_size=executor.config.vocab_size,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    longest = executor.max_model_len - args.prompt_len
    params = SamplingParams(max_tokens=longest, temperature=0.0, ignore_eos=True)
    for i in range(rows):
        engine.add_request(EngineRequest(
            request_id=str(i), prompt=None, prompt_token_ids=rng.integers(3, 4000, args.prompt_len).astype(np.int32),
            params=params, slo=SLO(), arrival_s=engine.clock.now_s(),
            adapter=adapters[i % len(adapters)] if adapters else None,
        ))  # fmt: skip
    while (engine.table.num_outputs[engine.table.live] < 2).any():
        engine.step()
    return engine


def step_times_s(engines: list[Engine], rows: int, num_steps: int) -> np.ndarray:
    """(num_steps, engines): the engines take turns, a step each, in another order every time."""
    times_s = np.zeros((num_steps, len(engines)))
    rng = np.random.default_rng(0)
    for turn in times_s:
        for i in rng.permutation(len(engines)).tolist():
            started = time.perf_counter()
            outputs = engines[i].step()
            turn[i] = time.perf_counter() - started
            assert len(outputs) == rows
    return times_s


def measure(args: argparse.Namespace) -> list[Result]:
    config = EngineConfig(
        model=args.model, load_format=args.load_format, dtype=args.dtype,
        cache=CacheConfig(mode="kv", enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=max(args.rows)),
    )  # fmt: skip
    loaded, _ = load_weights(config)
    longest = args.prompt_len + args.steps + max(args.rows) + 8  # prompts are computed one after another
    blocks = 2 * max(args.rows) * -(-longest // config.cache.block_size)

    def executor(adapters: list[LoraAdapter]) -> JaxExecutor:
        made = JaxExecutor(
            loaded.params, loaded.config, cache=dataclasses.replace(config.cache, num_blocks_override=blocks),
            max_num_seqs=max(args.rows), max_num_batched_tokens=512, max_model_len=longest, quantization=args.quantization,
            adapters=adapters,
        )  # fmt: skip
        made.buckets.decode = sorted(args.rows)  # fewer programs to compile
        made.buckets.prefill = made.buckets.prefill[-1:]
        return made

    results = []
    for targets in args.targets:
        for rank in args.ranks:
            adapters = random_adapters(loaded.config, args.adapters, rank, FIELDS[targets])
            executors = [executor(some) for some in ([], adapters, adapters)]
            for rows in args.rows:
                named = ((), executors[1].adapters, ())
                engines = [decoding(e, args, rows, names) for e, names in zip(executors, named, strict=True)]
                times_s = step_times_s(engines, rows, args.steps)
                tokens_s, shares = rows / np.median(times_s, axis=0), np.median(times_s[:, :1] / times_s, axis=0)
                results.append(Result(
                    targets=targets, rank=rank, num_adapters=args.adapters, rows=rows, without_tokens_s=tokens_s[0],
                    adapters_tokens_s=tokens_s[1], unused_tokens_s=tokens_s[2], share=shares[1], unused_share=shares[2],
                ))  # fmt: skip
                show(results[-1])
    return results


def show(r: Result) -> None:
    print(
        f"{r.targets:9} {r.rank:4} {r.num_adapters:8} {r.rows:4} {r.without_tokens_s:10.0f} {r.adapters_tokens_s:10.0f} "
        f"{r.share:6.1%} {r.unused_tokens_s:10.0f} {r.unused_share:6.1%}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Decode throughput with LoRA adapters against none.")
    parser.add_argument("--model", default="smollm2-135m", help="a published size (default: %(default)s)")
    parser.add_argument("--load-format", default="dummy", help="auto: its files (default: %(default)s)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--targets", nargs="+", choices=sorted(FIELDS), default=["all", "qv"])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40, help="decode steps of each (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    print(
        f"{'matrices':9} {'rank':>4} {'adapters':>8} {'rows':>4} {'without':>10} {'adapters':>10} {'share':>6} {'none named':>10}"
    )
    results = measure(args)
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    record: dict[str, Any] = {
        "command": [Path(sys.argv[0]).name, *(arguments or sys.argv[1:])],
        "revision": revision,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "settings": {k: v for k, v in vars(args).items() if k != "json"},
        "results": [dataclasses.asdict(result) for result in results],
    }
    print(json.dumps(record))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
