"""Stages `bandwidth` and `kernels`: the machine's rates, and how near to them each kernel comes."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from apt_jax.backends import attention_ops, known_attention_ops
from apt_jax.config import SchedulerConfig
from apt_jax.ops.backend import KernelBackend
from benchmarks.gpu import problems, shapes
from benchmarks.gpu.harness import Stage, ceilings, floor_s, time_call
from benchmarks.gpu.problems import BLOCK_SIZE, Arrays
from benchmarks.gpu.shapes import AttentionShape

_L2_BYTES = 256 << 20
"""Pools of a timed program take at least this much together: several times any L2 cache."""


def chip() -> str | None:
    """`sm_80`, `sm_90`, ... of the first device; None on a CPU."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    return None if device.platform == "cpu" else f"sm_{str(capability).replace('.', '')}"


def tile_class() -> str:
    """The class of chips whose tiles the kernels under test take."""
    from apt_jax.executor.attention_choice import chip_of
    from apt_jax.pallas.triton_tiles import CHIPS

    return chip_of(jax.devices()[0]) or CHIPS[0]


def kernel_ops(tiny: bool = False) -> KernelBackend:
    """The kernels under test: `triton` for this chip; on a CPU its interpreter, or `xla` where there is none yet."""
    platform = jax.devices()[0].platform
    if platform != "cpu":
        return attention_ops(platform, "triton", tile_class())
    if tiny and "triton-interpret" in known_attention_ops():
        try:
            return attention_ops(platform, "triton-interpret")
        except ImportError as error:
            print(f"  no triton-interpret ({error}): xla", flush=True)
    return attention_ops(platform, "xla")


def num_workers() -> int:
    return max(1, min(12, (os.cpu_count() or 2) - 2))


def _abstract(args: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)


def lower_or_error(function: Callable[..., Any], *args: Any) -> Any:
    """Lowered for `args`, or the exception that it ended with."""
    try:
        return jax.jit(function).lower(*_abstract(args))
    except Exception as error:
        return error


def unless_failed(program: Any) -> Any:
    if isinstance(program, Exception):
        raise program
    return program


# --- bandwidth ---------------------------------------------------------------------------------------------------


def bandwidth(stage: Stage) -> None:
    """A large copy, a large sum, and matrix products: what the floors of the other stages rest on."""
    table = stage.table()
    elements = 1 << (20 if stage.tiny else 31)
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        elements = min(elements, int(stats["bytes_limit"]) // 16)
    time_it = functools.partial(time_call, tiny=stage.tiny, seconds=0.5)

    def moved(times: int, work: Callable[[Any], Any]) -> dict[str, Any]:
        data = problems._random(jax.random.key(0), (elements,), jnp.dtype(jnp.bfloat16), 1.0)
        compiled = jax.jit(work)
        median, spread = time_it(lambda: compiled(data))
        return {"gb_s": 2e-9 * times * elements / median, "ms": 1e3 * median, "spread_ms": 1e3 * spread}

    def product(size: int, dtype: str) -> dict[str, Any]:
        a, b = (problems._random(jax.random.key(i), (size, size), jnp.dtype(dtype), 1.0) for i in range(2))
        compiled = jax.jit(jnp.dot)
        median, spread = time_it(lambda: compiled(a, b))
        return {"tflop_s": 2e-12 * size**3 / median, "ms": 1e3 * median, "spread_ms": 1e3 * spread}

    cases: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("stream", lambda: moved(2, lambda x: -x)),
        ("read", lambda: moved(1, lambda x: jnp.sum(x, dtype=jnp.float32))),
    ]
    for dtype in ("bfloat16", "float16"):
        size = 256 if stage.tiny else 8192
        cases.append((f"matmul {dtype}", functools.partial(product, size, dtype)))
    for case, work in cases:
        if stage.wanted(table, case):
            stage.run(table, case, work)


# --- kernels -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """One kernel at one size."""

    kernel: str
    """An op, a part or a variant of one, or a peer of JAX."""
    op: str
    shape: AttentionShape
    tokens: int
    batch: int
    dtype: str = "bfloat16"
    chunk: int = 0

    @property
    def name(self) -> str:
        if self.op != "prefill":
            return f"{self.kernel} {self.shape.name} {self.tokens} {self.batch}"
        prefix = f" over {self.tokens // self.batch}" if self.tokens else ""
        return f"{self.kernel} {self.shape.name} {self.chunk} {self.batch}{prefix}"

    @property
    def hidden_prefix(self) -> bool:
        """`prefill`: all prefixes are layer inputs, else keys and values."""
        return self.kernel.endswith("hidden prefix")


_DECODE = ("decode_kv", "decode_absorbed", "decode_reprojected")
ABSORBED_BACKENDS = ("triton-onepass", "jax-triton")
"""Other implementations of `decode_absorbed`, by their names in `apt_jax.backends`."""
_PARTS = (
    ("absorbed scores", "decode_absorbed"),
    ("absorbed output", "decode_absorbed"),
    ("decode_absorbed, 16-bit result", "decode_absorbed"),
    ("decode_absorbed, 32-bit result", "decode_absorbed"),
)
_PEERS = (
    ("jax paged_attention", "decode_kv"),
    ("xla gather + einsum", "decode_kv"),
    ("xla gather + matmul", "decode_reprojected"),
    ("apt-jax xla", "decode_kv"),
)


def prompt_buckets(model: str) -> list[int]:
    """Sizes that the engine pads the prompt tokens of a step to, with its default flags."""
    from apt_jax.config import CacheConfig
    from apt_jax.executor.plan import plan_executor
    from apt_jax.models import PRESETS
    from apt_jax.models.loading.resolve import read_model_config

    limits = SchedulerConfig()
    config = read_model_config(PRESETS[model])[1]
    plan = plan_executor(
        config, cache=CacheConfig(), max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=config.max_position, num_devices=1, platform="gpu", chip=None, attention="triton",
    )  # fmt: skip
    return plan.buckets.prefill


def _prompts(shape: AttentionShape) -> Iterator[Timed]:
    """Prompts by peers' sizes, then chunks of the engine's own buckets, bare and over prefixes of both kinds."""
    for tokens, batch, of in ((2048, 1, shape), (512, 4, shape), (8192, 1, shapes.PUBLISHED["llama-3-8b"])):
        yield Timed(kernel="prompt", op="prefill", shape=of, tokens=0, batch=batch, chunk=tokens)
    buckets = prompt_buckets("opt-13b")
    for tokens in reversed(buckets):
        yield Timed(kernel="prompt", op="prefill", shape=shape, tokens=0, batch=1, chunk=tokens)
    for kernel in ("prompt", "prompt, hidden prefix"):
        yield Timed(kernel=kernel, op="prefill", shape=shape, tokens=4096, batch=4, chunk=buckets[-1])
        yield Timed(kernel=kernel, op="prefill", shape=shape, tokens=1024, batch=1, chunk=64)


def _timed(tiny: bool) -> Iterator[Timed]:
    """By importance: OPT-13B's ops at all numbers of cached tokens, prompts, parts and peers, other models, batches."""
    if tiny:
        shape = shapes.SMALL["three-heads"]
        for kernel, op in [(op, op) for op in _DECODE[:2]] + [_PARTS[2]] + list(_PEERS):
            yield Timed(kernel=kernel, op=op, shape=shape, tokens=64, batch=2, dtype="float32")
        yield Timed(kernel="prompt", op="prefill", shape=shape, tokens=0, batch=1, chunk=16, dtype="float32")
        return
    small, middle, large = shapes.CACHED_TOKENS
    opt13 = shapes.PUBLISHED["opt-13b"]

    def decode(kernel: str, op: str, tokens: int, batch: int = 64, shape: AttentionShape = opt13) -> Timed:
        return Timed(kernel=kernel, op=op, shape=shape, tokens=tokens, batch=batch)

    for tokens in (middle, small, large):
        yield from (decode(op, op, tokens) for op in _DECODE[:2])
    for backend, tokens in itertools.product(ABSORBED_BACKENDS[:1], (middle, small, large)):
        yield decode(f"decode_absorbed by {backend}", "decode_absorbed", tokens)
    prompts = list(_prompts(opt13))
    yield from prompts[:3]
    yield decode("decode_reprojected", "decode_reprojected", middle)
    yield decode("decode_v_absorbed", "decode_v_absorbed", middle, shape=shapes.PUBLISHED["llama-2-7b"])
    yield from prompts[3:]
    yield from (decode(kernel, op, middle) for kernel, op in (*_PARTS, *_PEERS))
    for tokens in (small, large):
        yield from (decode(kernel, op, tokens) for kernel, op in (*_PARTS[:2], _PEERS[0], (_DECODE[2], _DECODE[2])))
    yield from (decode(f"decode_absorbed by {backend}", "decode_absorbed", middle) for backend in ABSORBED_BACKENDS[1:])
    others = [shapes.PUBLISHED[name] for name in ("llama-3-8b", "opt-6.7b", "opt-66b")]
    for shape, tokens, op in itertools.product(others, (middle, small, large), _DECODE):
        if op in problems.ops_for(shape):
            yield decode(op, op, tokens, shape=shape)
    for tokens, batch, op in itertools.product((middle, small, large), (16, 128), _DECODE[:2]):
        yield decode(op, op, tokens, batch)


def _calls(case: Timed) -> tuple[int, int]:
    """Pools, and calls in a program."""
    itemsize = jnp.dtype(case.dtype).itemsize
    pool = problems.halves_of(case.op) * max(case.tokens, 1) * case.shape.lane * itemsize
    pools = min(8, max(2, -(-_L2_BYTES // pool)))
    return (pools, max(4, pools)) if pool > 1 << 20 else (2, 2)


class Pools:
    """Pools of one size at a time, as several would not fit small cards."""

    def __init__(self) -> None:
        self._key: Any = None
        self._pools: list[Any] = []

    def get(self, count: int, num_blocks: int, lane: int, dtype: str) -> list[Any]:
        if self._key != (count, num_blocks, lane, dtype):
            self._pools = []
            self._key = (count, num_blocks, lane, dtype)
            self._pools = [problems.random_pool(i, num_blocks, lane, dtype) for i in range(count)]
        return self._pools


def make_arguments(case: Timed, pools: Pools) -> tuple[Arrays, list[Arrays]]:
    """Arguments that all calls of the program share, and the pool of each."""
    lens = problems.ragged(case.tokens, case.batch, seed=2) if case.tokens else [0] * case.batch
    blank = jnp.zeros((1, BLOCK_SIZE * case.shape.lane), jnp.dtype(case.dtype))
    shared = problems.arguments(case.op, case.shape, case.dtype, lens, seed=2, pool=blank, chunk=case.chunk)
    if case.op == "prefill":
        shared["hidden"] = jnp.full_like(shared["hidden"], case.hidden_prefix)
    del shared["pool"]
    num_blocks = 1 + problems.halves_of(case.op) * sum(-(-n // BLOCK_SIZE) for n in lens)
    count, calls = _calls(case)
    made = pools.get(count, num_blocks, case.shape.lane, case.dtype)
    if case.kernel == "jax paged_attention":
        # Its pools are head-major: (K, P, C, H). Half of ours is taken for keys, half for values.
        kv, half = case.shape.num_kv_heads, num_blocks // 2
        shared["tables"] = jnp.clip(shared["tables"][:, 0] // 2, 0, half - 1)
        made = [p[: 2 * half].reshape(2, kv, half, BLOCK_SIZE, case.shape.head_dim) for p in made[:2]]
    return shared, [{"pool": made[i % len(made)]} for i in range(calls)]


def one_call(case: Timed, ops: KernelBackend) -> Callable[[Arrays], Any]:
    """One call of the kernel."""
    op, shape = case.op, case.shape
    if case.kernel == "absorbed scores" or case.kernel == "absorbed output":
        return functools.partial(_half_of_absorbed, case.kernel.split()[1], ops)
    if case.kernel.endswith("bit result"):
        return functools.partial(_absorbed_as, jnp.float32 if "32" in case.kernel else case.dtype, ops)
    if " by " in case.kernel:
        other = attention_ops(jax.devices()[0].platform, case.kernel.partition(" by ")[2], tile_class())
        return lambda a: problems.call(other, op, a)
    if op == "prefill":  # as the engine calls it: kernels for hidden prefixes where there are any
        return lambda a: problems.call(ops, op, a, with_hidden=case.hidden_prefix)
    if case.kernel == "apt-jax xla":
        xla = attention_ops(jax.devices()[0].platform, "xla")
        return lambda a: problems.call(xla, op, a)
    if case.kernel == "xla gather + einsum":
        return functools.partial(_gather_einsum, shape.num_kv_heads, shape.head_dim)
    if case.kernel == "xla gather + matmul":
        return _gather_matmul
    if case.kernel == "jax paged_attention":
        return _jax_paged_attention
    return lambda a: problems.call(ops, op, a)


def _absorbed_as(dtype: Any, ops: KernelBackend, a: Arrays) -> Any:
    """`decode_absorbed` with a result of that dtype; the engine's has that of the queries."""
    from apt_jax.pallas import triton_decode_absorbed as absorbed

    call, interpret = problems.decode_record("decode_absorbed", a), ops.name == "triton-interpret"
    return absorbed.decode_absorbed(a["q"], call, out_dtype=jnp.dtype(dtype), chip=tile_class(), interpret=interpret)


def _half_of_absorbed(half: str, ops: KernelBackend, a: Arrays) -> Any:
    """One of the two kernels; the second runs on weights P = 1 that the first did not make."""
    from apt_jax.pallas import triton_decode_absorbed as absorbed
    from apt_jax.pallas.triton_tiles import tile_for
    from apt_jax.pallas.triton_work_list import rows_of_call

    call = problems.decode_record("decode_absorbed", a)
    on: dict[str, Any] = {"chip": tile_class(), "interpret": ops.name == "triton-interpret"}
    heads, width = a["q"].shape[1:]
    pool = a["pool"]
    tile = tile_for("scores", tile_class(), heads, width, pool.dtype.itemsize)
    most_tiles, rows = -(-call.capacity // tile.tokens), rows_of_call(call, tile.tokens)
    wave = next(absorbed.waves_of(rows, most_tiles, heads * tile.tokens * pool.dtype.itemsize))
    if half == "scores":
        return absorbed.absorbed_scores(a["q"], call, wave, **on)[0]
    p, m, l = (jnp.ones(s.shape, s.dtype) for s in absorbed.scores_shape(wave, heads, tile.tokens, pool.dtype))
    return absorbed.absorbed_output((p, m, l), call, wave, width=width, **on)[0]


def _gather_einsum(kv_heads: int, head_dim: int, a: Arrays) -> Any:
    """Padded to the longest row, masked, as one would write it without a kernel."""
    keys, values = (a["pool"][a["tables"][:, i]].reshape(a["q"].shape[0], -1, kv_heads, head_dim) for i in range(2))
    group = a["q"].shape[1] // kv_heads
    q = a["q"].reshape(-1, kv_heads, group, head_dim)
    scores = jnp.einsum("bkgh,bskh->bkgs", q, keys, preferred_element_type=jnp.float32)
    own = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, :] < a["lens"][:, None]
    scores = jnp.where(own[:, None, None], scores * jnp.float32(head_dim**-0.5), -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    out = jnp.einsum("bkgs,bskh->bkgh", weights, values, preferred_element_type=jnp.float32)
    return out.reshape(a["q"].shape)


def _gather_matmul(a: Arrays) -> Any:
    """K and V of all cached tokens by one product, without the attention that would follow: XLA's share of
    reprojection."""
    width = a["wk"].shape[-1]
    x = a["pool"][a["tables"].reshape(-1)].reshape(-1, width)
    w = jnp.concatenate([a["wk"].reshape(-1, width), a["wv"].reshape(-1, width)])
    # The lengths are in the product so that calls in a chain stay in order.
    x = x + (a["lens"][0] < 0).astype(x.dtype)
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))).astype(x.dtype)


def _jax_paged_attention(a: Arrays) -> Any:
    from jax.experimental.pallas.ops.gpu import paged_attention as module

    keys, values = a["pool"][0], a["pool"][1]
    # On Triton for lack of compiler parameters of its own it would go to another backend; 16 splits want 16 tables.
    tables = jnp.pad(a["tables"], ((0, 0), (0, -a["tables"].shape[1] % 128)))
    interpret = jax.devices()[0].platform == "cpu"
    return module.paged_attention(a["q"], keys, values, tables, a["lens"], interpret=interpret)


def kernels(stage: Stage) -> None:
    """Time, rate and share of the floor of each kernel, beside what JAX offers for the same."""
    table = stage.table()
    ops, rates, pools = kernel_ops(stage.tiny), ceilings(stage.out), Pools()
    is_triton = ops.name.startswith("triton")

    def lowered() -> Iterator[tuple[Any, Any]]:
        for case in _timed(stage.tiny):
            if not is_triton and (case.kernel.startswith("absorbed") or "bit result" in case.kernel):
                continue
            if stage.tiny and case.kernel == "jax paged_attention":
                continue  # its pages and splits do not suit a tiny case
            if not stage.wanted(table, case.name):
                continue
            backend = case.kernel.partition(" by ")[2]
            if backend and backend not in known_attention_ops():
                table.add(case.name, status=f"skipped: no backend {backend} in this revision")
                continue
            yield case, _lowered_or_error(case, ops)

    def measure(case: Timed, program: Any) -> dict[str, Any]:
        program = unless_failed(program)
        shared, own = make_arguments(case, pools)
        seconds, spread = time_call(lambda: program(shared, own), tiny=stage.tiny)
        seconds, spread = seconds / len(own), spread / len(own)
        lens = problems.ragged(case.tokens, case.batch, 2) if case.tokens else [0] * case.batch
        result_size = 4 if "32-bit" in case.kernel else None
        work = problems.work_of(
            case.op, case.shape, lens, jnp.dtype(case.dtype).itemsize, case.chunk, case.hidden_prefix, result_size
        )
        if case.kernel.startswith("absorbed "):  # one of two kernels does half of the work
            work = dataclasses.replace(work, moved_bytes=work.num_bytes, flop=work.flop / 2)
        if case.kernel.endswith("onepass"):
            work = dataclasses.replace(work, moved_bytes=work.num_bytes)
        floor = floor_s(work.num_bytes, work.flop, rates)
        design = floor_s(work.moved_bytes, work.flop, rates)
        return {
            "kernel": case.kernel, "shape": case.shape.name, "tokens": case.tokens, "batch": case.batch, "dtype": case.dtype,
            "us": 1e6 * seconds, "spread_us": 1e6 * spread, "gb_s": work.moved_bytes / seconds / 1e9,
            "tflop_s": work.flop / seconds / 1e12, "floor_us": 1e6 * floor, "of_floor": floor / seconds,
            "of_design": design / seconds,
        }  # fmt: skip

    programs = stage.compiled(lowered(), lambda case: case.name, workers=num_workers(), together=12, first=6)
    for case, program in programs:
        if stage.wanted(table, case.name):
            stage.run(table, case.name, functools.partial(measure, case, program))
    print(f"  {stage.num_skipped} not reached", flush=True)


def _lowered_or_error(case: Timed, ops: KernelBackend) -> Any:
    """The program of a case, lowered, or the exception that making it ended with."""
    try:
        shared, own = abstract_arguments(case)
        length = "chunk_lens" if case.op == "prefill" else "lens"
        return lower_or_error(problems.chained(one_call(case, ops), length), shared, own)
    except Exception as error:
        return error


def abstract_arguments(case: Timed) -> tuple[Any, Any]:
    """Return the result of `_make` as shapes and dtypes, without memory."""
    lens = problems.ragged(case.tokens, case.batch, seed=2) if case.tokens else [0] * case.batch
    num_blocks = 1 + problems.halves_of(case.op) * sum(-(-n // BLOCK_SIZE) for n in lens)
    pool_shape = (num_blocks, BLOCK_SIZE, case.shape.lane)

    class _NoPools(Pools):
        def get(self, count: int, num_blocks: int, lane: int, dtype: str) -> list[Any]:
            return [jax.ShapeDtypeStruct(pool_shape, jnp.dtype(dtype))] * count

    def make() -> Any:
        shared, own = make_arguments(dataclasses.replace(case, kernel=case.op), _NoPools())
        return shared, own

    shared, own = make()
    if case.kernel == "jax paged_attention":
        half, kv = num_blocks // 2, case.shape.num_kv_heads
        shape = (2, kv, half, BLOCK_SIZE, case.shape.head_dim)
        own = [{"pool": jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype))} for _ in own]
        tables = shared["tables"]
        shared["tables"] = jax.ShapeDtypeStruct((tables.shape[0], tables.shape[2]), jnp.int32)
    return _abstract((shared, own))
