"""Stage `peers`: what others offer for the same sizes. Prompts are in `peers_of_prompts`; decode attention by PyTorch here:

  * `sdpa` over keys and values that lie ready, padded to the longest row with a mask: attention alone.
  * `gather + sdpa`: blocks gathered from the pool first, which is what a paged cache costs without a paged kernel.
  * `sdpa, equal rows`: all rows of the mean length and no mask, which lets it take its fastest path.
  * `flex_attention` compiled over the padded copy, with lengths in its mask.
  * `gather + matmul`: keys and values of all cached tokens from layer inputs, the work of reprojection.

What is missing is named in the table and skipped.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu import peers_of_prompts, problems, shapes
from benchmarks.gpu.harness import Stage, ceilings, floor_s
from benchmarks.gpu.problems import BLOCK_SIZE
from benchmarks.gpu.shapes import AttentionShape

_COPIES = 3
"""Pools that calls take in turn, so that none finds its tokens in the L2 cache."""


def _median_s(torch: Any, call: Callable[[int], Any], tiny: bool) -> float:
    """Median over five repeats, by device events around many calls; by the wall clock on a CPU."""
    import time

    for i in range(1 if tiny else 3):
        call(i)
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        call(0)
        return time.perf_counter() - begin
    torch.cuda.synchronize()
    times = []
    count = 6
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(count):
            call(i)
        end.record()
        torch.cuda.synchronize()
        times.append(1e-3 * start.elapsed_time(end) / count)
    return sorted(times)[2]


def _cases(
    torch: Any, shape: AttentionShape, tokens: int, batch: int, dtype: Any, device: str
) -> dict[str, tuple[str, Callable[[], Callable[[int], Any]]]]:
    """By name: the op that it is a peer of, and what makes its call."""
    heads, kv, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
    lens = problems.ragged(tokens, batch, seed=2)
    rng = np.random.default_rng(2)
    tables, num_blocks = problems.tables_for(rng, lens, 2)
    longest = tables.shape[2] * BLOCK_SIZE

    def normal(*dims: int) -> Any:
        return torch.randn(dims, dtype=dtype, device=device)

    @functools.cache
    def query() -> Any:
        return normal(batch, heads, 1, width)

    @functools.cache
    def pools() -> list[Any]:
        return [normal(num_blocks, BLOCK_SIZE, kv, width) for _ in range(_COPIES)]

    index = torch.as_tensor(tables, dtype=torch.int64, device=device)
    lengths = torch.as_tensor(lens, dtype=torch.int64, device=device)
    mask = (torch.arange(longest, device=device)[None, :] < lengths[:, None])[:, None, None, :]
    attention = functools.partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=heads != kv)

    def gathered(pool: Any) -> list[Any]:
        return [pool[index[:, i]].reshape(batch, longest, kv, width).transpose(1, 2) for i in range(2)]

    def ready() -> Callable[[int], Any]:
        copies = [gathered(pool) for pool in pools()]
        return lambda i: attention(query(), *copies[i % _COPIES], attn_mask=mask)

    def with_gather() -> Callable[[int], Any]:
        return lambda i: attention(query(), *gathered(pools()[i % _COPIES]), attn_mask=mask)

    def equal() -> Callable[[int], Any]:
        mean = max(1, tokens // batch)
        copies = [[normal(batch, kv, mean, width) for _ in range(2)] for _ in range(_COPIES)]
        return lambda i: attention(query(), *copies[i % _COPIES])

    def flex() -> Callable[[int], Any]:
        module = __import__("torch.nn.attention.flex_attention", fromlist=["flex_attention"])
        copies = [gathered(pool) for pool in pools()]

        def own(b: Any, h: Any, q: Any, k: Any) -> Any:
            del h, q
            return k < lengths[b]

        blocks = module.create_block_mask(own, batch, None, 1, longest, device=device)
        compiled = torch.compile(module.flex_attention)
        more = {"block_mask": blocks, "enable_gqa": heads != kv}
        return lambda i: compiled(query(), *copies[i % _COPIES], **more)

    def product() -> Callable[[int], Any]:
        weights = normal(2 * shape.lane, shape.hidden_size)
        inputs = [normal(num_blocks, BLOCK_SIZE * shape.hidden_size) for _ in range(2)]
        rows = index[:, 0].reshape(-1)
        return lambda i: inputs[i % 2][rows].reshape(-1, shape.hidden_size) @ weights.T

    return {
        "torch gather + sdpa": ("decode_kv", with_gather),
        "torch sdpa": ("decode_kv", ready),
        "torch sdpa, equal rows": ("decode_kv", equal),
        "torch gather + matmul": ("decode_reprojected", product),
        "torch flex_attention": ("decode_kv", flex),
    }


def peers(stage: Stage) -> None:
    """Attention and products of others on the sizes of stage `kernels`, prompts by cuDNN first."""
    peers_of_prompts.by_jax(stage)
    table = stage.table()
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        if "torch" not in table.done:
            table.add("torch", status="skipped: not installed")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not stage.tiny:
        if "torch" not in table.done:
            table.add("torch", status="skipped: sees no GPU")
        return
    peers_of_prompts.by_torch(stage, torch, device)
    _decode_peers(stage, torch, device)
    print(f"  {stage.num_skipped} not reached", flush=True)


def _decode_peers(stage: Stage, torch: Any, device: str) -> None:
    table, rates = stage.table(), ceilings(stage.out)
    if stage.tiny:
        sizes = [(shapes.SMALL["three-heads"], 64, 2)]
    else:
        small, middle, large = shapes.CACHED_TOKENS
        first = shapes.PUBLISHED["opt-13b"]
        sizes = [(first, n, 64) for n in (middle, small, large)]
        sizes += [(shapes.PUBLISHED[m], middle, 64) for m in ("llama-3-8b", "opt-6.7b", "opt-66b")]
    dtype = torch.float32 if stage.tiny else torch.bfloat16

    def measure(shape: AttentionShape, tokens: int, batch: int, name: str) -> dict[str, Any]:
        op, make = _cases(torch, shape, tokens, batch, dtype, device)[name]
        with torch.inference_mode():
            seconds = _median_s(torch, make(), stage.tiny)
        lens = problems.ragged(tokens, batch, seed=2)
        work = problems.work_of(op, shape, lens, dtype.itemsize)
        return {
            "kernel": name, "shape": shape.name, "tokens": tokens, "batch": batch, "us": 1e6 * seconds,
            "gb_s": work.num_bytes / seconds / 1e9, "tflop_s": work.flop / seconds / 1e12,
            "of_floor": floor_s(work.num_bytes, work.flop, rates) / seconds, "torch": torch.__version__,
        }  # fmt: skip

    names = (
        "torch flex_attention",
        "torch sdpa, equal rows",
        "torch sdpa",
        "torch gather + sdpa",
        "torch gather + matmul",
    )
    for shape, tokens, batch in sizes:
        for name in names:
            case = f"{name} {shape.name} {tokens} {batch}"
            if stage.wanted(table, case):
                stage.run(table, case, functools.partial(measure, shape, tokens, batch, name))
                if device == "cuda":
                    torch.cuda.empty_cache()
