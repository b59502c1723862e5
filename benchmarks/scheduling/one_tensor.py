"""Simulate Gemma 4 31B under each policy with one tensor for keys and values, with two, and without freed windows.

    python -m benchmarks.scheduling.one_tensor

One H100 80 GB, prompts of LongBench as they are, Poisson arrivals, objectives of 5 s to the first token and 0.2 s per
token. Three caches of the same bytes:

* one tensor: the bundled description: one tensor in layers without a window, blocks outside windows freed;
* two tensors: keys and values in all layers, blocks outside windows freed; attention without a window reads 1,024
  values a position and key head in place of 640;
* all positions: keys and values of all positions in all layers, as an engine without layer groups keeps them; attention
  with a window reads no more than it all the same.

Every seed draws the same requests for all caches and policies. Writes one-tensor.csv, a row per run, and prints means.
"""

import argparse
import csv
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from apt_jax.config import SLO, CacheConfig
from apt_jax.costs.hardware import Hardware
from apt_jax.models import PRESETS, read_model_config
from apt_jax.models.layer_groups import layer_groups
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.simulator import simulate

MODEL, CARD, BLOCK_SIZE = "gemma-4-31b", "h100-80gb", 16
POLICIES = ("fcfs", "vllm-v1", "apt", "apt-plus")
CACHES = ("one tensor", "two tensors", "all positions")
FIELDS = (
    "cache", "policy", "rate", "seed", "slo_attainment", "ttft_p50_s", "ttft_p99_s", "tbt_p99_s", "tokens_per_s", "preemptions",
)  # fmt: skip
RESULTS = Path(__file__).parents[1] / "results" / "one-tensor"


def variants() -> dict[str, Hardware]:
    """Return the description with each of `CACHES`; pools have the same bytes."""
    one, model = load_hardware(MODEL, CARD), read_model_config(PRESETS[MODEL])[1]
    shape = model.global_attention
    assert shape is not None
    assert shape.turned_lanes is not None
    two = dataclasses.replace(model, global_attention=dataclasses.replace(shape, turned_lanes=None))
    cache = CacheConfig(block_size=BLOCK_SIZE)
    groups = [
        layer_groups(m, cache, hidden=False, max_model_len=one.max_model_len) for m in (model, two)
    ]  # blocks of both have the same bytes: those of the windowed layers' keys
    assert groups[0] is not None
    assert groups[1] is not None
    pool_bytes = one.num_blocks * groups[0].num_arrays * BLOCK_SIZE * model.lane * 2
    slower = 2 * shape.head_dim / shape.row_width

    def reads_two(hardware: Hardware) -> Hardware:
        costs = hardware.costs["kv"]
        token_s = costs.decode_per_token_s * slower
        of_two = dataclasses.replace(costs, decode_per_token_s=token_s, prefill_per_kv_prefix_s=token_s)
        return dataclasses.replace(hardware, costs={"kv": of_two})

    token_bytes = sum(
        2 * 2 * s.num_kv_heads * s.head_dim for s in (two.attention_of(layer) for layer in range(two.num_layers))
    )
    return {
        "one tensor": one,
        "two tensors": dataclasses.replace(
            reads_two(one),
            block_size=groups[1].block_size,
            kv_blocks_per_group=groups[1].blocks_per_group,
            windows=groups[1].windows,
            num_blocks=pool_bytes // (groups[1].num_arrays * BLOCK_SIZE * two.lane * 2),
        ),
        "all positions": dataclasses.replace(
            reads_two(one),
            block_size=BLOCK_SIZE,
            kv_blocks_per_group=2,
            windows=None,
            num_blocks=2 * (pool_bytes // (token_bytes * BLOCK_SIZE)),
        ),
    }


def run(hardware: Hardware, cache: str, policy: str, rate: float, seed: int, num_requests: int) -> dict[str, object]:
    """Return a row of the results."""
    config = SimulationConfig(
        model=MODEL, hardware=CARD, trace="longbench", rate=rate, cv=1.0, num_requests=num_requests, seed=seed, policy=policy,
        slo=SLO(ttft_s=5.0, tbt_s=0.2),
    )  # fmt: skip
    found = simulate(config, hardware=hardware)
    s = found.summary
    values = (s.slo_attainment, s.ttft_s.p50, s.ttft_s.p99, s.tbt_s.p99, s.tokens_per_s)
    rounded = [None if value is None else round(value, 4) for value in values]
    return dict(zip(FIELDS, (cache, policy, rate, seed, *rounded, found.preemptions), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 3.0], help="requests per second")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds")
    parser.add_argument("--num-requests", type=int, default=150)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write")
    args = parser.parse_args(argv)
    rows = []
    for cache, hardware in variants().items():
        print(f"{cache}: {hardware.num_kv_tokens:,} tokens of one request in the pool")
        for rate in args.rates:
            for policy in POLICIES:
                of_seeds = [run(hardware, cache, policy, rate, seed, args.num_requests) for seed in range(args.seeds)]
                rows += of_seeds
                attained, tokens = (mean(row[name] for row in of_seeds) for name in ("slo_attainment", "tokens_per_s"))  # pyright: ignore[reportArgumentType]
                print(f"  {rate:4} requests/s  {policy:9} {attained:7.1%} in time  {tokens:6.1f} tokens/s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "one-tensor.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
