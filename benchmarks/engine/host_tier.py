"""The tier of host memory on this machine: how long a request takes to come back, and conversations that exceed the pool.

First, how long it takes until a request whose cache is not on the device has its next token, by the length of its context:
computed again in chunks, its keys and values copied from host memory, its layer inputs copied and used as they are, and
its layer inputs copied and turned into keys and values (the idea of HCache). Copies include the check of the blocks.
Beside them the way that the engine chooses by the calibrated cost model. Before it the same for hardware that is not here,
by its cost model alone.

Second, conversations over more text than the pool holds, with and without the tier: prompt tokens computed, time to first
token, wall time. Answers must be the same.

    python -m benchmarks.engine.host_tier --csv host_tier.csv
"""

import argparse
import csv
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apt_jax.config import CacheConfig, EngineConfig, SchedulerConfig
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import Conversions, StepBatch
from apt_jax.engine.restore import RestoreChoice
from apt_jax.executor.calibrate import synthetic_batch
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import build_engine
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.progress import ProgressBars
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.host_link import with_transfers
from benchmarks.engine.prefix_cache import draw, fresh, print_facts, serve

WAYS = ("recompute", "copy KV", "copy X", "copy X, to KV")


def timed_s(executor: JaxExecutor, batches: Sequence[StepBatch], loaded: np.ndarray) -> float:
    """Seconds for steps one after another, with the check of the host blocks that the first one loads."""
    host = executor.host
    assert host is not None
    started = time.perf_counter()
    if loaded.size:
        assert host.ready_to_load(loaded).all()
    for batch in batches:
        executor.execute(batch).result()
    return time.perf_counter() - started


def restore_times(executor: JaxExecutor, length: int, repeats: int) -> dict[str, float]:
    """Least seconds by way until a request with `length` cached positions has its next token."""
    host = executor.host
    assert host is not None
    budget = executor.max_num_batched_tokens
    ends = [*range(budget, length + 1, budget), length + 1]
    chunks = [
        synthetic_batch(executor, [KV], [start], [end - start])
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
        if end > start
    ]
    kv, hidden = (synthetic_batch(executor, [kind], [length], [1]) for kind in (KV, HIDDEN))
    last = int(kv.block_tables.max())

    def loads(blocks: np.ndarray) -> np.ndarray:
        """Save these blocks of the device, and load them from there."""
        pairs = np.stack([blocks, 1 + np.arange(blocks.size)], axis=1).astype(np.int32)
        host.announce(pairs)
        host.save(pairs)
        assert host.ready_to_load(pairs[:, 1]).all()
        return pairs[:, ::-1].copy()

    def blocks_of(batch: StepBatch, kind: int) -> np.ndarray:
        groups = -(-length // (executor.block_size, executor.hidden_block_size)[kind])
        table = batch.block_tables[0, :, :groups].reshape(-1)
        return table[table > 0]

    inputs = last + 1 + np.arange(-(-length // executor.hidden_block_size))
    found = {"recompute": (chunks, np.zeros((0, 2), np.int32))}
    for way, batch, kind in (("copy KV", kv, KV), ("copy X", hidden, HIDDEN)):
        pairs = loads(blocks_of(batch, kind))
        found[way] = ([dataclasses.replace(batch, loads=pairs)], pairs)
    if executor.can_convert:
        pairs = loads(inputs.astype(np.int32))
        wanted = Conversions(rows=np.zeros(1, np.int64), inputs=inputs[None].astype(np.int32))
        found["copy X, to KV"] = ([dataclasses.replace(kv, loads=pairs, conversions=wanted)], pairs)
    times: dict[str, list[float]] = {way: [] for way in found}
    for way, (batches, pairs) in found.items():
        if pairs.size:  # each way reads blocks that were saved for it
            blocks = pairs[:, ::-1].copy()
            host.announce(blocks)
            host.save(blocks)
        for _ in range(repeats + 1):
            times[way].append(timed_s(executor, batches, pairs[:, 0]))
    return {way: min(values[1:]) for way, values in times.items()}


def simulated_restores(model: str, card: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """The same by the cost model of hardware that is not here, with the way that the engine would choose."""
    hardware = load_hardware(model, card)
    costs = with_transfers(hardware.step_costs(), hardware)
    sizes = (hardware.block_size, hardware.hidden_block_size or hardware.block_size)
    choice = RestoreChoice(lambda: costs, sizes, (2, 1), 2048)
    rows = []
    for length in (n for n in lengths if n < hardware.max_model_len):
        next_s = choice.compute_s(KV, 1, length)
        ways = {
            "recompute": choice.compute_s(KV, length + 1, 0),
            "copy KV": choice.copy_s(KV, length) + next_s,
        }
        if hardware.hidden_blocks_per_group:
            ways["copy X, to KV"] = choice.copy_s(HIDDEN, length) + costs.conversion_s(length) + next_s
        row: dict[str, Any] = {"length": length} | {way: 1e3 * s for way, s in ways.items()}
        rows.append(row | {"chosen": min(ways, key=lambda way: ways[way])})
    return rows


def measure_restores(parts: EngineComponents, lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    executor, costs = parts.executor, parts.engine.costs
    assert isinstance(executor, JaxExecutor)
    sizes, per_group = parts.engine.cache.block_sizes, parts.engine.cache.blocks_per_group
    choice = RestoreChoice(lambda: costs, sizes, per_group, executor.max_num_batched_tokens)
    rows = []
    for length in lengths:
        times = restore_times(executor, length, repeats)
        row: dict[str, Any] = {"length": length} | {way: 1e3 * s for way, s in times.items()}
        for kind, name in ((KV, "KV"), (HIDDEN, "X")):
            copies = choice(kind, length, 0, length, length + 1)
            row[f"chosen, {name}"] = f"copy {name}" if copies else "recompute"
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0])
    print("  ".join(f"{name:>13}" for name in names))
    for row in rows:
        cells = (f"{v:.1f} ms" if isinstance(v, float) else str(v) for v in row.values())
        print("  ".join(f"{cell:>13}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description="The tier of host memory: restore times and conversations.")
    parser.add_argument("--model", default="tiny-opt")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 128, 256, 512, 1024, 1900])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--swap-space", type=float, default=1.0, help="GiB")
    parser.add_argument("--policies", nargs="*", default=["fcfs", "apt"])
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--open", type=int, default=12, help="conversations at a time")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--systems", type=int, default=12)
    parser.add_argument("--system-len", type=int, default=400, help="tokens of a system prompt")
    parser.add_argument("--turn-len", type=int, default=40, help="tokens of a turn, on average")
    parser.add_argument("--output-len", type=int, default=24)
    parser.add_argument("--num-blocks", type=int, default=400, help="of the pool that conversations exceed")
    parser.add_argument("--calibration-s", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    bars = ProgressBars()

    def built(num_blocks: int | None) -> EngineComponents:
        config = EngineConfig(
            model=args.model,
            load_format=args.load_format,
            cache=CacheConfig(num_blocks_override=num_blocks, swap_space=args.swap_space),
            scheduler=SchedulerConfig(policy="apt?convert=true", max_num_seqs=8, max_num_batched_tokens=512),
        )
        return build_engine(config, calibration_s=args.calibration_s, progress=bars)

    for model, card in (("opt-13b", "a100-40gb"), ("llama-2-7b", "a100-80gb"), ("llama-3-8b", "a100-40gb")):
        print(f"simulated: {model} on {card}")
        print_table(simulated_restores(model, card, [256, 1024, 2000, 4000]))
    longest = max(args.lengths)
    parts = built(4 * -(-longest // 16) + 16)
    bars.close()
    print("time to the next token by length of the context")
    restores = measure_restores(parts, args.lengths, args.repeats)
    print_table(restores)
    del parts

    parts = built(args.num_blocks)
    bars.close()
    talks = draw(args)
    serve(fresh(parts, "fcfs", swap_space=0.0), talks[:2], 4, 2)
    runs = []
    for policy in args.policies:
        for swap_space in (0.0, args.swap_space):
            engine_parts = fresh(parts, policy, swap_space=swap_space)
            run = serve(engine_parts, talks, args.output_len, args.open)
            stats = engine_parts.engine.stats()
            runs.append({
                "policy": policy, "tier": "on" if swap_space else "off", "time_s": run.duration_s,
                "ttft_p50_ms": run.ttft_p50_ms, "ttft_p99_ms": run.ttft_p99_ms, "prompt tokens": run.prompt_tokens,
                "computed": run.computed_tokens, "hits": run.hit_share, "saved_mib": stats.saved_bytes / 2**20,
                "loaded_mib": stats.loaded_bytes / 2**20, "preemptions": stats.num_preemptions, "digest": run.digest,
            })  # fmt: skip
    print("\nconversations over more text than the pool holds")
    print(
        f"{'policy':6} {'tier':4} {'time':>8} {'TTFT p50':>10} {'TTFT p99':>10} {'prompts':>8} {'computed':>8} "
        f"{'hits':>5} {'saved':>9} {'loaded':>9} {'preempted':>9}"
    )
    for r in runs:
        print(
            f"{r['policy']:6} {r['tier']:4} {r['time_s']:6.2f} s {r['ttft_p50_ms']:7.1f} ms {r['ttft_p99_ms']:7.1f} ms "
            f"{r['prompt tokens']:8} {r['computed']:8} {r['hits']:5.0%} {r['saved_mib']:5.0f} MiB {r['loaded_mib']:5.0f} MiB "
            f"{r['preemptions']:9}"
        )
    assert len({r["digest"] for r in runs}) == 1, "answers differ"
    if args.csv:
        with args.csv.open("w", newline="") as file:
            for rows in (restores, runs):
                writer = csv.DictWriter(file, fieldnames=list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
    print_facts(args.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
