"""Perplexity of a model on a text, with its weights as they are and as integers, side by side.

The text is cut into windows of as many tokens, each of which begins without a past: of a window all tokens but the
first count. Scores come from the engine's own programs, so that what they round is in the figures.

    python -m benchmarks.engine.perplexity --model model.gguf --quantization none gguf int8
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from apt_jax.config import CacheConfig
from apt_jax.core.kinds import KV
from apt_jax.executor.calibrate import synthetic_batch
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.executor.programs.packing import pack_forward
from apt_jax.frontend.builder import use_compile_cache
from apt_jax.models.decoder import logits
from apt_jax.text.tokenizer import load_tokenizer
from benchmarks.engine.cpu_throughput import load
from benchmarks.paper.common import new_file

ROOT = Path(__file__).resolve().parents[2]


def hidden_states(executor: JaxExecutor, ids: np.ndarray, kind: int = KV) -> Array:
    """The last layer's outputs (T, D) of a window of T token ids, T the most tokens of a step and rows of it."""
    batch = dataclasses.replace(synthetic_batch(executor, [kind], [0], [len(ids)]), token_ids=ids.astype(np.int32))
    executor.send_tables(batch)
    step = pack_forward(batch, executor.step_format, np.zeros((2, 0), np.int32), mixed=executor.mixed)
    views = executor.step_format.forward_layout(step.num_decode, step.num_prefill).split(step.ints)
    views["sample_rows"][: len(ids)] = step.num_decode + np.arange(len(ids))
    kinds = executor.programs.kind_set_of(batch.kind, step.num_decode, step.num_prefill, step.prefix_room)
    call = executor.runner.forward_call(
        step.ints, step.num_decode, step.num_prefill, kinds, prefix_room=step.prefix_room
    )
    return call.run()[: len(ids)]


def losses(executor: JaxExecutor, windows: np.ndarray, label: str) -> np.ndarray:
    """Negative log likelihood (nats) of every token but the first of windows (W, T): (W, T - 1) float64."""

    def of_window(params: Any, hidden: Array, ids: Array) -> Array:
        scores = logits(params, hidden[:-1], executor.config, executor.programs.ops.dense)
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), ids[1:, None], axis=1)[:, 0]

    of_window_compiled = jax.jit(of_window)
    found = []
    for ids in tqdm(windows, desc=label, unit="window", file=sys.stderr):
        hidden = hidden_states(executor, ids)
        found.append(np.asarray(of_window_compiled(executor.params, hidden, jnp.asarray(ids)), np.float64))
    return np.stack(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny-opt", help="as for apt-jax (default: tiny-opt)")
    parser.add_argument("--text", type=Path, nargs="+", help="text files (default: docs/*.md)")
    parser.add_argument(
        "--quantization", nargs="+", default=["none", "int8"], choices=["none", "int8", "gguf"],
        help="of the weights, one or more; differences are to the first (default: none int8)",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16", help="of activations and other weights (default: bfloat16)")
    parser.add_argument("--attention-backend", help="as for apt-jax (default: the platform's)")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window (default: 512)")
    parser.add_argument("--windows", type=int, default=40, help="at most so many windows (default: 40)")
    parser.add_argument("--json", type=new_file, metavar="FILE")
    args = parser.parse_args()
    if args.window < 16 or args.windows < 1:
        parser.error("--window must be at least 16, --windows at least 1")
    for path in args.text or ():
        if not path.is_file():
            parser.error(f"--text {path}: there is no such file")
    use_compile_cache()
    files = args.text or sorted((ROOT / "docs").glob("*.md"))
    text = "\n\n".join(path.read_text() for path in files)
    windows, rows, reference = np.zeros((0, 0), np.int64), [], None
    for name in args.quantization:
        quantization = None if name == "none" else name
        loaded = load(parser, model=args.model, dtype=args.dtype, quantization=quantization)
        if not windows.size:
            assert loaded.path is not None
            ids = np.asarray(load_tokenizer(loaded.path).encode(text), np.int64)
            count = min(args.windows, len(ids) // args.window)
            windows = ids[: count * args.window].reshape(count, args.window)
        executor = JaxExecutor(
            loaded.params, loaded.config, cache=CacheConfig(mode="kv", num_blocks_override=4 * args.window // 16),
            max_num_seqs=args.window, max_num_batched_tokens=args.window, max_model_len=args.window,
            attention=args.attention_backend, quantization=quantization,
        )  # fmt: skip
        loss = losses(executor, windows, name)
        reference = loss if reference is None else reference
        rows.append(
            {
                "quantization": name,
                "perplexity": float(np.exp(loss.mean())),
                "loss": float(loss.mean()),
                "difference": float((loss - reference).mean()),
                "standard_error": float((loss - reference).std() / np.sqrt(loss.size)),
            }
        )
        del executor, loaded
    print(f"{windows.size} tokens in windows of {args.window}, {args.dtype}")
    print(f"{'weights':8} {'perplexity':>10} {'loss':>8} {'more than the first':>20}")
    for row in rows:
        print(
            f"{row['quantization']:8} {row['perplexity']:10.3f} {row['loss']:8.4f} "
            f"{row['difference']:+12.4f} ± {row['standard_error']:.4f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "window": args.window, "runs": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
