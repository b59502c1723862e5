"""Stages `bandwidth`, `correctness` and `kernels`: the machine's rates, then kernels right and fast."""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apt_jax.backends import attention_ops, known_attention_ops
from apt_jax.ops import reference, shapes
from apt_jax.ops.backend import KernelBackend
from apt_jax.ops.shapes import AttentionShape
from benchmarks.gpu import problems
from benchmarks.gpu.harness import Stage, ceilings, floor_s, read_rows, time_call
from benchmarks.gpu.problems import BLOCK_SIZE, TOLERANCE, Arrays

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


def bandwidth(stage: Stage) -> list[str]:
    """A large copy, a large sum, and matrix products: what the floors of the other stages rest on."""
    table = stage.table(["gb_s", "tflop_s", "ms", "spread_ms"])
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
    rates = ceilings(stage.out)
    return [
        f"stream {rates['bytes_s'] / 1e9:.0f} GB/s (read + write), read {rates['read_bytes_s'] / 1e9:.0f} GB/s, "
        f"bf16 matmul {rates['flop_s'] / 1e12:.1f} TFLOP/s"
    ]


# --- correctness -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Check:
    shape: AttentionShape
    op: str
    dtype: str
    ranges: bool
    lens: tuple[int, ...]
    chunk: int = 0

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape.name} {self.dtype}{' ranges' if self.ranges else ''}"


def _checks(tiny: bool) -> Iterator[_Check]:
    """Published shapes first, as they matter most; every op and dtype, with and without slot ranges."""
    if tiny:
        for name, op in (("three-heads", "decode_kv"), ("three-heads", "decode_absorbed"), ("three-heads", "prefill")):
            yield _Check(shape=shapes.SMALL[name], op=op, dtype="float32", ranges=True, lens=(0, 1, 17), chunk=8)
        return
    modest = (0, 1, 15, 16, 17, 129, 300, 700)
    for name in ("opt-13b", "llama-2-7b", "opt-66b", "opt-6.7b", "llama-3-8b", "gpt-neox-20b"):
        shape = shapes.PUBLISHED[name]
        for op, (dtype, ranges) in itertools.product(problems.ops_for(shape), (("bfloat16", False), ("float16", True))):
            yield _Check(shape=shape, op=op, dtype=dtype, ranges=ranges, lens=modest, chunk=130)
    variants = (("bfloat16", False), ("float16", True), ("float32", True), ("bfloat16", True))
    for dtype, ranges in variants:
        for shape in shapes.SMALL.values():
            for op in problems.ops_for(shape):
                # The reference of `prefill` unrolls its rows, which costs compile time.
                lens = (0, 1, 17, 64, 129, 500) if op == "prefill" else shapes.RAGGED_LENGTHS
                yield _Check(shape=shape, op=op, dtype=dtype, ranges=ranges, lens=lens, chunk=40)


def correctness(stage: Stage) -> list[str]:
    """Every op against the float32 reference on the device; slots that no row owns hold NaN; equal bits twice."""
    table = stage.table(["op", "shape", "dtype", "ranges", "error", "tolerance", "same_bits"])
    ops = kernel_ops(stage.tiny)

    def make(check: _Check) -> Arrays:
        return problems.arguments(
            check.op, check.shape, check.dtype, check.lens, seed=1, poisoned=True, ranges=check.ranges, chunk=check.chunk,
        )  # fmt: skip

    def lower(check: _Check, args: Arrays) -> Any:
        program = lower_or_error(functools.partial(problems.call, ops, check.op), args)
        if isinstance(program, Exception):
            return program
        # The reference of `prefill` loops over rows in Python: what it counts by stays on the host.
        host = {k: np.asarray(args[k]) for k in _HOST_SIDE & args.keys()} if check.op == "prefill" else {}
        device = {k: v for k, v in problems.in_float32(args).items() if k not in host}
        with jax.default_matmul_precision("highest"):
            want = lower_or_error(functools.partial(_expected, check.op, host), device)
        return want if isinstance(want, Exception) else _Both(program, want, frozenset(device))

    def lowered() -> Iterator[tuple[Any, Any]]:
        for check in _checks(stage.tiny):
            if stage.wanted(table, check.name):
                try:
                    args = make(check)
                except Exception as error:
                    yield (check, {}), error
                    continue
                yield (check, args), lower(check, args)

    def compare(check: _Check, args: Arrays, programs: Any) -> dict[str, Any]:
        program, reference_program, names = unless_failed(programs)
        first, second = program(args), program(args)
        wide = {k: v for k, v in problems.in_float32(args).items() if k in names}
        want = reference_program(wide)
        top = float(jnp.max(jnp.abs(want)))
        error = float(jnp.max(jnp.abs(first.astype(jnp.float32) - want))) / max(top, 1e-30)
        same = bool(jnp.array_equal(first, second))
        tolerance = TOLERANCE[check.dtype]
        row = {
            "op": check.op, "shape": check.shape.name, "dtype": check.dtype, "ranges": check.ranges,
            "error": error, "tolerance": tolerance, "same_bits": same,
        }  # fmt: skip
        if not (math.isfinite(error) and error <= tolerance and same):
            row["status"] = "differs between runs" if math.isfinite(error) and not same else "wrong"
        return row

    for (check, args), program in stage.compiled(lowered(), lambda label: label[0].name, workers=num_workers()):
        stage.run(table, check.name, functools.partial(compare, check, args, program))
    rows = _rows(stage)
    bad = [row["case"] for row in rows if row["status"] != "ok"]
    lines = [f"{len(rows) - len(bad)} of {len(rows)} cases right; {stage.num_skipped} not reached"]
    for op in ("decode_kv", "decode_absorbed", "decode_reprojected", "decode_v_absorbed", "prefill"):
        worst = []
        for dtype in TOLERANCE:
            errors = [float(r["error"]) for r in rows if r["op"] == op and r["dtype"] == dtype and r["error"]]
            if errors:
                worst.append(f"{dtype} {max(errors):.1e}")
        lines.append(f"  {op:18s} worst error of the largest output: {', '.join(worst) or '-'}")
    return lines + [f"  FAILED: {name}" for name in bad[:12]]


def _rows(stage: Stage) -> list[dict[str, str]]:
    return read_rows(stage.out / f"{stage.name}.csv")


_HOST_SIDE = frozenset({"tables", "offsets", "chunk_lens", "lens", "hidden", "num_rows", "slot_ranges"})


def _expected(op: str, host: Arrays, a: Arrays) -> Any:
    return problems.call(reference, op, a | host)


@dataclasses.dataclass(frozen=True)
class _Both:
    """A kernel's program and its reference's, compiled together."""

    kernel: Any
    reference: Any
    names: frozenset[str]
    """Arguments that the reference's program takes."""

    def compile(self) -> tuple[Any, Any, frozenset[str]]:
        return self.kernel.compile(), self.reference.compile(), self.names


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
        return f"{self.kernel} {self.shape.name} {self.tokens} {self.batch}"

    @property
    def hidden_prefix(self) -> bool:
        """`prefill`: all prefixes are layer inputs, else keys and values."""
        return self.kernel.endswith("hidden prefix")


_DECODE = ("decode_kv", "decode_absorbed", "decode_reprojected")
_PARTS = (
    ("absorbed scores", "decode_absorbed"),
    ("absorbed output", "decode_absorbed"),
    ("decode_absorbed, 16-bit result", "decode_absorbed"),
)
_PEERS = (
    ("jax paged_attention", "decode_kv"),
    ("xla gather + einsum", "decode_kv"),
    ("xla gather + matmul", "decode_reprojected"),
    ("apt-jax xla", "decode_kv"),
)


def _timed(tiny: bool) -> Iterator[Timed]:
    """By importance: OPT-13B at 30k tokens, its other sizes, other models, other batches."""
    if tiny:
        shape = shapes.SMALL["three-heads"]
        for kernel, op in [(op, op) for op in _DECODE[:2]] + list(_PEERS):
            yield Timed(kernel=kernel, op=op, shape=shape, tokens=64, batch=2, dtype="float32")
        return
    small, middle, large = shapes.CACHED_TOKENS
    opt13 = shapes.PUBLISHED["opt-13b"]
    for kernel, op in [(op, op) for op in _DECODE] + list(_PARTS) + list(_PEERS):
        yield Timed(kernel=kernel, op=op, shape=opt13, tokens=middle, batch=64)
    for tokens, chunk, batch in ((0, 2048, 1), (0, 512, 4), (1024, 512, 4)):
        kernel = f"prefill of {chunk}"
        kernels_ = [kernel, f"{kernel}, hidden prefix"] if tokens else [kernel]
        for name in kernels_:
            yield Timed(kernel=name, op="prefill", shape=opt13, tokens=tokens * batch, batch=batch, chunk=chunk)
    for tokens in (small, large):
        for kernel, op in [*((op, op) for op in _DECODE), *_PARTS, _PEERS[0]]:
            yield Timed(kernel=kernel, op=op, shape=opt13, tokens=tokens, batch=64)
    yield Timed(
        kernel="decode_v_absorbed",
        op="decode_v_absorbed",
        shape=shapes.PUBLISHED["llama-2-7b"],
        tokens=middle,
        batch=64,
    )
    others = [shapes.PUBLISHED[name] for name in ("opt-6.7b", "opt-66b")]
    for shape, tokens in itertools.product(others, (middle, small, large)):
        for op in _DECODE:
            yield Timed(kernel=op, op=op, shape=shape, tokens=tokens, batch=64)
    for tokens, batch in itertools.product((middle, small, large), (16, 128)):
        for op in _DECODE:
            yield Timed(kernel=op, op=op, shape=opt13, tokens=tokens, batch=batch)
    for shape, tokens, batch in itertools.product(others, (middle, small, large), (16, 128)):
        for op in _DECODE:
            yield Timed(kernel=op, op=op, shape=shape, tokens=tokens, batch=batch)


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
    if case.kernel.endswith("16-bit result"):
        return lambda a: problems.call(ops, op, a, out_dtype=jnp.dtype(case.dtype))
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


def _half_of_absorbed(half: str, ops: KernelBackend, a: Arrays) -> Any:
    """One of the two kernels; the second runs on weights P = 1 that the first did not make."""
    from apt_jax.pallas import triton_decode_absorbed as absorbed
    from apt_jax.pallas.triton_tiles import tile_for
    from apt_jax.pallas.triton_work_list import rows_of

    more = {"block_size": BLOCK_SIZE, "chip": tile_class(), "interpret": ops.name == "triton-interpret"}
    heads, width = a["q"].shape[1:]
    pool = a["pool"]
    tile = tile_for("scores", tile_class(), heads, width, pool.dtype.itemsize)
    most_tiles = -(-a["tables"].shape[1] * BLOCK_SIZE // tile.tokens)
    rows = rows_of(a["lens"], None, tokens=tile.tokens)
    wave = next(absorbed.waves_of(rows, most_tiles, heads * tile.tokens * pool.dtype.itemsize))
    if half == "scores":
        return absorbed.absorbed_scores(a["q"], pool, a["tables"], wave, **more)[0]
    p, m, l = (jnp.ones(s.shape, s.dtype) for s in absorbed.scores_shape(wave, heads, tile.tokens, pool.dtype))
    return absorbed.absorbed_output((p, m, l), pool, a["tables"], wave, width=width, **more)[0]


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


def kernels(stage: Stage) -> list[str]:
    """Time, rate and share of the floor of each kernel, beside what JAX offers for the same."""
    table = stage.table([
        "kernel", "shape", "tokens", "batch", "dtype", "us", "spread_us", "gb_s", "tflop_s", "floor_us", "of_floor", "of_design",
    ])  # fmt: skip
    ops, rates, pools = kernel_ops(stage.tiny), ceilings(stage.out), Pools()
    is_triton = ops.name.startswith("triton")

    def lowered() -> Iterator[tuple[Any, Any]]:
        for case in _timed(stage.tiny):
            if not is_triton and (case.kernel.startswith("absorbed") or "16-bit" in case.kernel):
                continue
            if stage.tiny and case.kernel == "jax paged_attention":
                continue  # its pages and splits do not suit a tiny case
            if not stage.wanted(table, case.name):
                continue
            length = "chunk_lens" if case.op == "prefill" else "lens"
            shared, own = abstract_arguments(case)
            program = problems.chained(one_call(case, ops), length)
            yield case, lower_or_error(program, shared, own)

    def measure(case: Timed, program: Any) -> dict[str, Any]:
        program = unless_failed(program)
        shared, own = make_arguments(case, pools)
        seconds, spread = time_call(lambda: program(shared, own), tiny=stage.tiny)
        seconds, spread = seconds / len(own), spread / len(own)
        lens = problems.ragged(case.tokens, case.batch, 2) if case.tokens else [0] * case.batch
        work = problems.work_of(
            case.op, case.shape, lens, jnp.dtype(case.dtype).itemsize, case.chunk, case.hidden_prefix
        )
        if case.kernel.startswith("absorbed "):  # one of two kernels does half of the work
            work = dataclasses.replace(work, moved_bytes=work.num_bytes, flop=work.flop / 2)
        floor = floor_s(work.num_bytes, work.flop, rates)
        design = floor_s(work.moved_bytes, work.flop, rates)
        return {
            "kernel": case.kernel, "shape": case.shape.name, "tokens": case.tokens, "batch": case.batch, "dtype": case.dtype,
            "us": 1e6 * seconds, "spread_us": 1e6 * spread, "gb_s": work.moved_bytes / seconds / 1e9,
            "tflop_s": work.flop / seconds / 1e12, "floor_us": 1e6 * floor, "of_floor": floor / seconds,
            "of_design": design / seconds,
        }  # fmt: skip

    for case, program in stage.compiled(lowered(), lambda case: case.name, workers=num_workers(), together=16):
        if stage.wanted(table, case.name):
            stage.run(table, case.name, functools.partial(measure, case, program))
    lines = [
        f"{'kernel':32s}{'shape':12s}{'tokens':>8s}{'batch':>6s}{'us':>9s}{'GB/s':>7s}{'TF/s':>7s}{'floor':>7s}{'design':>7s}"
    ]
    for row in _rows(stage):
        if row["status"] == "ok" and row["batch"] in ("64", "1", "4", "2"):
            lines.append(
                f"{row['kernel']:32s}{row['shape']:12s}{row['tokens']:>8s}{row['batch']:>6s}{float(row['us']):9.1f}"
                f"{float(row['gb_s']):7.0f}{float(row['tflop_s']):7.1f}{float(row['of_floor']):7.2f}{float(row['of_design']):7.2f}"
            )
    failed = [row["case"] for row in _rows(stage) if row["status"] != "ok"]
    return [*lines, f"failed: {', '.join(failed) or 'none'}; {stage.num_skipped} not reached"]


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
