"""A prompt of 100,000 tokens on a small Llama-style model with scaled rotary embeddings: in chunks, and in one pass.

Prints the largest difference of the logits, the times, and the memory: the pool, and the peak of the whole process. The
model is random; what is checked is that chunks over a cached prefix compute what one pass computes, at positions where
rotary angles are large.

    python -m benchmarks.engine.long_context --tokens 100000 --chunk 2048
"""

import argparse
import dataclasses
import json
import resource
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from apt_jax.config import CacheConfig
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import StepBatch
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.models.config import ModelConfig
from apt_jax.models.decoder import logits
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.models.params import ModelParams, dummy_params
from apt_jax.request import SamplingParams

BLOCK = 16
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192},
    "linear": {"rope_type": "linear", "factor": 16.0},
    "dynamic": {"rope_type": "dynamic", "factor": 16.0},
}  # fmt: skip


def model(rope: str, tokens: int, heads: int = 2) -> tuple[ModelConfig, ModelParams]:
    """Two layers, heads of 32, multi-head attention (so that both kinds are offered)."""
    stretched = rope in ("dynamic",)
    fields = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32 * heads, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 64 * heads, "rope_theta": 500000.0,
        "max_position_embeddings": 8192 if stretched else tokens, "rope_scaling": ROPES[rope],
    }  # fmt: skip
    config = read_model_config(fields, tokens)[1]
    params = dummy_params(config, "float32", 0)
    louder = jax.tree.map(lambda a: a * 6 if a.ndim > 1 else a, params.layers)
    return config, dataclasses.replace(params, embed=params.embed * 20, layers=louder, head=params.head * 20)


def run(
    config: ModelConfig, params: ModelParams, ids: np.ndarray, chunk: int, kind: int, bar: tqdm
) -> tuple[np.ndarray, float, int]:
    """Logits after the last token, seconds, and bytes of the pool."""
    halves = 2 if kind == KV else 1
    blocks = -(-ids.size // BLOCK)
    executor = JaxExecutor(
        params, config,
        cache=CacheConfig(num_blocks_override=halves * blocks, mode="kv" if kind == KV else "hidden"),
        max_num_seqs=1, max_num_batched_tokens=chunk, max_model_len=ids.size,
    )  # fmt: skip
    seen: list[Any] = []
    sample = executor.runner.sample_call

    def record(hidden: Any, *rest: Any) -> Any:
        seen.append(np.asarray(logits(executor.params, hidden[:1], config, executor.programs.ops.dense))[0])
        return sample(hidden, *rest)

    executor.runner.sample_call = record  # pyright: ignore[reportAttributeAccessIssue]
    tables = np.zeros((1, 2, blocks), np.int32)
    tables[0, :halves] = 1 + np.random.default_rng(0).permutation(halves * blocks).reshape(halves, blocks)
    begin = time.perf_counter()
    for start in range(0, ids.size, chunk):
        piece = ids[start : start + chunk]
        used = -(-(start + piece.size) // BLOCK)
        batch = StepBatch(
            slots=np.zeros(1, np.int32), num_tokens=np.array([piece.size], np.int32), start=np.array([start], np.int32),
            kind=np.array([kind], np.int8), token_ids=piece, block_tables=tables[:, :, :used],
            samples=np.array([start + piece.size == ids.size]), position=np.zeros(1, np.int32),
            params=[SamplingParams(temperature=0.0)], history=[ids], prompt_len=np.array([ids.size], np.int32),
        )  # fmt: skip
        executor.execute(batch).result()
        bar.update(piece.size)
    return seen[-1], time.perf_counter() - begin, executor.num_blocks * executor.block_bytes


def main(arguments: list[str] | None = None) -> int:
    """Print the table; exit code 1 if a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000, help="of the prompt (default: 100000)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens a step (default: 2048)")
    parser.add_argument("--rope", nargs="+", default=["llama3"], choices=list(ROPES))
    parser.add_argument("--kind", nargs="+", default=["kv", "hidden"], choices=["kv", "hidden"])
    parser.add_argument("--tolerance", type=float, default=1e-4, help="on logits (default: 1e-4)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    ids = np.random.default_rng(1).integers(0, 256, args.tokens).astype(np.int32)
    rows = []
    passes = len(args.rope) * (1 + len(args.kind))
    with tqdm(total=passes * ids.size, unit="token", unit_scale=True, disable=None) as bar:
        for rope in args.rope:
            config, params = model(rope, ids.size)
            whole, whole_s, _ = run(config, params, ids, ids.size, KV, bar)
            for name in args.kind:
                got, seconds, pool = run(config, params, ids, args.chunk, {"kv": KV, "hidden": HIDDEN}[name], bar)
                rows.append({
                    "rope": rope, "kind": name, "tokens": ids.size, "chunk": args.chunk, "largest_logit": float(np.abs(whole).max()),
                    "difference": float(np.abs(got - whole).max()), "chunked_s": seconds, "one_pass_s": whole_s,
                    "pool_mib": pool / 2**20, "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                })  # fmt: skip
    print(
        f"{'rope':8}{'kind':8}{'tokens':>8}{'chunk':>7}{'logits to':>10}{'difference':>12}{'chunked s':>11}{'one pass s':>12}{'pool MiB':>10}{'peak MiB':>10}"
    )
    for r in rows:
        print(
            f"{r['rope']:8}{r['kind']:8}{r['tokens']:8}{r['chunk']:7}{r['largest_logit']:10.2f}{r['difference']:12.1e}"
            f"{r['chunked_s']:11.1f}{r['one_pass_s']:12.1f}{r['pool_mib']:10.1f}{r['peak_rss_mib']:10.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return int(any(r["difference"] > args.tolerance for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
