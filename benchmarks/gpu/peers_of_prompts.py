"""Peers of prompt attention: cuDNN by JAX and by PyTorch, PyTorch's FlashAttention, XLA; and FlashAttention 3 with a page
table for decode, where the package `flash-attn3-jax` is installed.

Shapes are those of the cases `prompt` of stage `kernels`: causal attention of B prompts of T tokens, N query heads over K
key heads of H lanes.
"""

import dataclasses
import functools
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import problems, shapes
from benchmarks.gpu.harness import Stage, Table, ceilings, floor_s, time_call
from benchmarks.gpu.shapes import AttentionShape

_SEGMENTS = {"cudnn packed of 4": 4, "cudnn packed of 64": 64}
"""Prompts one after another, as a step has them, by cuDNN from sm_90 on: the number of segments is static, and most of 64
are empty, as in an engine with 64 slots."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prompts:
    """B prompts of T tokens each."""

    shape: AttentionShape
    tokens: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.tokens} {self.batch}"

    def row(self, seconds: float, itemsize: int, stage: Stage) -> dict[str, Any]:
        """The values of a row, bytes and operations counted as for our own kernel."""
        work = problems.work_of("prefill", self.shape, [0] * self.batch, itemsize, self.tokens)
        return {
            "shape": self.shape.name, "tokens": self.tokens, "batch": self.batch, "us": 1e6 * seconds,
            "gb_s": work.num_bytes / seconds / 1e9, "tflop_s": work.flop / seconds / 1e12,
            "of_floor": floor_s(work.num_bytes, work.flop, ceilings(stage.out)) / seconds,
        }  # fmt: skip


def _sizes(tiny: bool) -> Iterator[_Prompts]:
    if tiny:
        yield _Prompts(shape=shapes.SMALL["three-heads"], tokens=16, batch=1)
        return
    opt, llama = shapes.PUBLISHED["opt-13b"], shapes.PUBLISHED["llama-3-8b"]
    for shape, tokens, batch in ((opt, 2048, 1), (opt, 512, 4), (llama, 8192, 1), (opt, 512, 1)):
        yield _Prompts(shape=shape, tokens=tokens, batch=batch)


def _prompt_by_jax(stage: Stage, size: _Prompts, implementation: str) -> dict[str, Any]:
    shape, dtype = size.shape, jnp.float32 if stage.tiny else jnp.bfloat16
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    dims = [(size.batch, size.tokens, n, shape.head_dim) for n in heads]
    q, k, v = (problems._random(jax.random.key(i), d, jnp.dtype(dtype), 1.0) for i, d in enumerate(dims))
    if implementation in _SEGMENTS:
        attention = functools.partial(_packed, count=_SEGMENTS[implementation])
    else:
        attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)  # pyright: ignore
    compiled = jax.jit(attention).lower(q, k, v).compile()
    seconds, _ = time_call(lambda: compiled(q, k, v), tiny=stage.tiny)
    return size.row(seconds, jnp.dtype(dtype).itemsize, stage)


def segments(chunk_lens: list[int], count: int) -> tuple[Any, Any]:
    """Lengths (1, count) and offsets (1, count + 1) of chunks that lie one after another; -1 where there is none."""
    missing = [-1] * (count - len(chunk_lens))
    offsets = [0, *itertools.accumulate(chunk_lens)]
    return jnp.asarray([chunk_lens + missing], jnp.int32), jnp.asarray([offsets + missing], jnp.int32)


def _packed(q: Any, k: Any, v: Any, count: int) -> Any:
    """Prompts one after another, in room for `count`."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    lens, offsets = segments([q.shape[1]] * q.shape[0], count)
    q, k, v = (a.reshape(1, -1, *a.shape[2:]) for a in (q, k, v))
    return cudnn.dot_product_attention(
        q, k, v,
        q_seqlen=lens, kv_seqlen=lens, q_offsets=offsets, kv_offsets=offsets,
        mask_type=cudnn.MaskType.PADDING_CAUSAL, scale=q.shape[-1] ** -0.5,
    )  # fmt: skip


def by_jax(stage: Stage) -> None:
    """Prompts by cuDNN, then decode by FlashAttention 3 over pages, then prompts by XLA."""
    table, sizes = stage.table(), list(_sizes(stage.tiny))
    is_gpu = jax.devices()[0].platform != "cpu"

    def prompts(implementation: str) -> None:
        for size in sizes:
            case = f"jax {implementation} {size.name}"
            if implementation == "xla" and size.tokens > 2048:
                continue  # its scores take tens of gigabytes
            if not stage.wanted(table, case):
                continue
            if implementation != "xla" and not is_gpu:
                table.add(case, status="skipped: no GPU")
                continue
            stage.run(table, case, functools.partial(_prompt_by_jax, stage, size, implementation))

    for implementation in ("cudnn", *_SEGMENTS):
        prompts(implementation)
    _flash_attention_3(stage, table)
    prompts("xla")


def _flash_attention_3(stage: Stage, table: Table) -> None:
    """Decode over a page table of pages of our block size, and of 256 tokens, keys and values in pools of their own."""
    if importlib.util.find_spec("flash_attn3_jax") is None:
        if "flash-attn3-jax" not in table.done:
            table.add("flash-attn3-jax", status="skipped: not installed")
        return
    small, middle, large = shapes.CACHED_TOKENS
    cases = [(shapes.PUBLISHED["opt-13b"], n) for n in (middle, small, large)]
    cases.append((shapes.PUBLISHED["llama-3-8b"], middle))
    for (shape, tokens), page in ((case, page) for case in cases for page in (problems.BLOCK_SIZE, 256)):
        case = f"flash-attn3-jax, pages of {page} {shape.name} {tokens} 64"
        if stage.wanted(table, case):
            stage.run(table, case, functools.partial(_paged, stage, shape, tokens, page))


def _paged(stage: Stage, shape: AttentionShape, tokens: int, page: int) -> dict[str, Any]:
    import numpy as np

    module: Any = importlib.import_module("flash_attn3_jax")
    lens = problems.ragged(tokens, 64, seed=2)
    used = [-(-n // page) for n in lens]
    order = np.random.default_rng(2).permutation(sum(used)).astype(np.int32)
    tables, at = np.zeros((64, max(used)), np.int32), 0
    for row, count in enumerate(used):
        tables[row, :count] = order[at : at + count]
        at += count
    pool = (sum(used), page, shape.num_kv_heads, shape.head_dim)
    copies = [
        [problems._random(jax.random.key(2 * i + j), pool, jnp.dtype(jnp.bfloat16), 1.0) for j in (0, 1)]
        for i in range(3)
    ]
    q = problems._random(jax.random.key(9), (64, 1, shape.num_heads, shape.head_dim), jnp.dtype(jnp.bfloat16), 1.0)
    call = jax.jit(lambda q, k, v, lens, tables: module.flash_mha_with_kvcache(
        q, k, v, cache_seqlens=lens, page_table=tables, num_splits=8
    ))  # fmt: skip
    args = (jnp.asarray(lens, jnp.int32), jnp.asarray(tables))
    turn = iter(range(1 << 30))
    seconds, _ = time_call(lambda: call(q, *copies[next(turn) % 3], *args), tiny=stage.tiny)
    work = problems.work_of("decode_kv", shape, lens, 2)
    return {
        "shape": shape.name, "tokens": tokens, "batch": 64, "us": 1e6 * seconds, "gb_s": work.num_bytes / seconds / 1e9,
        "tflop_s": work.flop / seconds / 1e12, "of_floor": floor_s(work.num_bytes, work.flop, ceilings(stage.out)) / seconds,
    }  # fmt: skip


def by_torch(stage: Stage, torch: Any, device: str) -> None:
    """The same prompts by PyTorch's FlashAttention and by cuDNN."""
    table = stage.table()
    module = importlib.import_module("torch.nn.attention")
    for size in _sizes(stage.tiny):
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION") if device == "cuda" else ("MATH",):
            case = f"torch {name.lower()} {size.name}"
            if stage.wanted(table, case):
                backend = getattr(module.SDPBackend, name)
                stage.run(
                    table, case, functools.partial(_prompt_by_torch, stage, torch, module.sdpa_kernel, backend, size)
                )


def _prompt_by_torch(stage: Stage, torch: Any, kernel: Any, backend: Any, size: _Prompts) -> dict[str, Any]:
    shape, device = size.shape, "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if stage.tiny else torch.bfloat16
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (torch.randn((size.batch, n, size.tokens, shape.head_dim), dtype=dtype, device=device) for n in heads)
    grouped = heads[0] != heads[1]

    def call() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    with torch.inference_mode(), kernel(backend):
        return size.row(_seconds(torch, call), dtype.itemsize, stage) | {"torch": torch.__version__}


def _seconds(torch: Any, call: Callable[[], Any]) -> float:
    """Median of five repeats by device events; on a CPU one call by the wall clock."""
    call()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    times, count = [], 30
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(1e-3 * start.elapsed_time(end) / count)
    return sorted(times)[2]
