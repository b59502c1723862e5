"""Random problems for the attention ops: arguments, what a program must read and compute, calls by name.

Arguments are a dictionary of arrays, so that one function calls the op of any implementation, the reference included.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apt_jax.ops.calls import DecodeCall, HiddenPrefixes, PrefillCall, Projection
from benchmarks.gpu.shapes import AttentionShape

BLOCK_SIZE = 16
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
"""Maximum error relative to the largest output."""

Arrays = dict[str, Any]


def ops_for(shape: AttentionShape) -> list[str]:
    """Names of the ops that a model of this shape uses."""
    if not shape.has_hidden:
        return ["decode_kv", "prefill"]
    hidden = ["decode_v_absorbed"] if shape.rotary_dim else ["decode_absorbed"]
    return ["decode_kv", *hidden, "decode_reprojected", "prefill"]


def halves_of(op: str) -> int:
    """Blocks that a table entry names: two of keys and values, or one of layer inputs."""
    return 2 if op in ("decode_kv", "prefill") else 1


def tables_for(rng: np.random.Generator, lens: Sequence[int], halves: int) -> tuple[np.ndarray, int]:
    """Block tables in random order over blocks from 1 on, (B, 2 or 1, J), and the number of blocks with the null
    one."""
    used = [-(-n // BLOCK_SIZE) for n in lens]
    order = 1 + rng.permutation(halves * sum(used)).astype(np.int32)
    tables = np.zeros((len(lens), halves, max(1, *used)), np.int32)
    at = 0
    for row, count in enumerate(used):
        tables[row, :, :count] = order[at : at + halves * count].reshape(halves, count)
        at += halves * count
    return tables, 1 + halves * sum(used)


def ranges_for(rng: np.random.Generator, lens: Sequence[int], entries: int) -> np.ndarray:
    """Slot ranges, (B, J, 2): whole blocks upwards or downwards, the last part anywhere in its block."""
    ranges = np.zeros((len(lens), entries, 2), np.int32)
    for row, length in enumerate(lens):
        for entry in range(-(-length // BLOCK_SIZE)):
            count = min(BLOCK_SIZE, length - entry * BLOCK_SIZE)
            low = int(rng.integers(0, BLOCK_SIZE - count + 1))
            ends = (low, low + count)
            ranges[row, entry] = ends if rng.integers(2) else ends[::-1]
    return ranges


def owned_slots(tables: np.ndarray, lens: Sequence[int], ranges: np.ndarray | None, num_blocks: int) -> np.ndarray:
    """Slots that some row owns, (P, C)."""
    owned = np.zeros((num_blocks, BLOCK_SIZE), bool)
    for row, length in enumerate(lens):
        for entry in range(-(-length // BLOCK_SIZE)):
            count = min(BLOCK_SIZE, length - entry * BLOCK_SIZE)
            low, high = (0, count) if ranges is None else sorted(ranges[row, entry].tolist())
            owned[tables[row, :, entry], low:high] = True
    return owned


def _normal(key: Any, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    return (jax.random.normal(key, shape, jnp.float32) * jnp.float32(scale)).astype(dtype)


_random = jax.jit(_normal, static_argnames=("shape", "dtype", "scale"))


def random_pool(seed: int, num_blocks: int, lane: int, dtype: str) -> Any:
    """A pool of normal numbers, made on the device in pieces of a sixteenth."""

    @jax.jit
    def pool(key: Any) -> Any:
        size = -(-num_blocks // 16)

        def piece(i: Any, out: Any) -> Any:
            rows = _normal(jax.random.fold_in(key, i), (size, *out.shape[1:]), out.dtype)
            start = jnp.minimum(i * size, max(0, num_blocks - size))
            return jax.lax.dynamic_update_slice_in_dim(out, rows[:num_blocks], start, axis=0)

        return jax.lax.fori_loop(0, 16, piece, jnp.zeros((num_blocks, BLOCK_SIZE, lane), jnp.dtype(dtype)))

    return pool(jax.random.key(seed))


def arguments(
    op: str,
    shape: AttentionShape,
    dtype: str,
    lens: Sequence[int],
    *,
    seed: int,
    pool: Any = None,
    poisoned: bool = False,
    ranges: bool = False,
    chunk: int = 0,
) -> Arrays:
    """Random arguments of an op.

    Args:
        lens: cached positions a row.
        pool: to be used as it is; None: a new one.
        poisoned: slots that no row owns hold NaN.
        ranges: with random slot ranges.
        chunk: `prefill` only: tokens of every chunk beside its prefix of `lens`.
    """
    rng = np.random.default_rng(seed)
    key = jax.random.key(seed)
    n, k, h, d = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.lane
    rotary, batch, halves = shape.rotary_dim, len(lens), halves_of(op)
    tables, num_blocks = tables_for(rng, lens, halves)
    slot_ranges = ranges_for(rng, lens, tables.shape[2]) if ranges else None
    if pool is None:
        pool = random_pool(seed, num_blocks, d, dtype)
        if poisoned:
            owned = jnp.asarray(owned_slots(tables, lens, slot_ranges, num_blocks))[:, :, None]
            pool = jnp.where(owned, pool, jnp.asarray(jnp.nan, pool.dtype))

    def normal(i: int, *dims: int, scale: float = 1.0) -> Any:
        return _random(jax.random.fold_in(key, i), dims, jnp.dtype(dtype), scale)

    args: Arrays = {"pool": pool, "lens": jnp.asarray(lens, jnp.int32)}
    args["tables"] = jnp.asarray(tables if halves == 2 else tables[:, 0])
    if slot_ranges is not None:
        args["slot_ranges"] = jnp.asarray(slot_ranges)
    if rotary and op != "decode_kv":
        frequency = 1e4 ** -(np.arange(rotary // 2) / (rotary // 2))
        positions = np.arange(tables.shape[2] * BLOCK_SIZE + chunk)
        args["angles"] = jnp.asarray(positions[:, None] * frequency, jnp.float32)
    if op == "decode_absorbed":
        args["q"] = normal(1, batch, n, d, scale=d**-0.5)
    elif op == "decode_v_absorbed":
        args["q"] = normal(1, batch, n, rotary, scale=rotary**-0.5)
        if rotary < h:
            args["q_absorbed"] = normal(2, batch, n, d, scale=d**-0.5)
        args["wk"], args["bk"] = normal(3, n, rotary, d, scale=d**-0.5), normal(4, n, rotary)
    else:
        rows = batch * chunk if op == "prefill" else batch
        args["q"] = normal(1, rows, n, h)
    if op in ("decode_reprojected", "prefill"):
        args["wk"], args["wv"] = (normal(i, k, h, d, scale=d**-0.5) for i in (3, 5))
        args["bk"], args["bv"] = (normal(i, k, h) for i in (4, 6))
    if op == "prefill":
        args["k"], args["v"] = (normal(i, batch * chunk, k, h) for i in (7, 8))
        args["offsets"] = chunk * jnp.arange(batch, dtype=jnp.int32)
        args["chunk_lens"] = jnp.full(batch, chunk, jnp.int32)
        hidden = np.arange(batch) % 2 == 1 if shape.has_hidden else np.zeros(batch, bool)
        args["hidden"], args["num_rows"] = jnp.asarray(hidden), jnp.int32(batch)
    return args


def decode_record(op: str, a: Arrays, **more: Any) -> DecodeCall:
    """The record of a decode op on `arguments`; `more` are fields of it."""
    projection = None
    if op in ("decode_reprojected", "decode_v_absorbed"):
        projection = Projection(wk=a["wk"], bk=a["bk"], wv=a.get("wv"), bv=a.get("bv"), angles=a.get("angles"))
    fields = {"block_size": BLOCK_SIZE, "slot_ranges": a.get("slot_ranges")} | more
    return DecodeCall(pool=a["pool"], tables=a["tables"], lens=a["lens"], projection=projection, **fields)


def prefill_record(a: Arrays, *, with_hidden: bool) -> PrefillCall:
    """The record of `prefill` on `arguments`. `with_hidden`: some prefixes may be layer inputs."""
    prefixes = None
    if with_hidden:
        projection = Projection(wk=a["wk"], bk=a["bk"], wv=a["wv"], bv=a["bv"], angles=a.get("angles"))
        prefixes = HiddenPrefixes(projection=projection, block_size=BLOCK_SIZE)
    rows = {name: a[name] for name in ("pool", "tables", "offsets", "chunk_lens", "hidden", "num_rows")}
    ranges = a.get("slot_ranges")
    return PrefillCall(
        **rows, prefix_lens=a["lens"], block_size=BLOCK_SIZE, slot_ranges=ranges, hidden_prefixes=prefixes
    )


def call(ops: Any, op: str, a: Arrays, *, with_hidden: bool = True) -> Any:
    """The op of an implementation (`KernelBackend` or `reference`) on `arguments`; `with_hidden` as in
    `prefill_record`."""
    if op == "prefill":
        return ops.prefill(a["q"], a["k"], a["v"], prefill_record(a, with_hidden=with_hidden))
    reads = decode_record(op, a)
    if op == "decode_v_absorbed":
        return ops.decode_v_absorbed(a["q"], a.get("q_absorbed"), reads)
    return getattr(ops, op)(a["q"], reads)


def in_float32(args: Arrays) -> Arrays:
    """The same numbers, for the reference."""
    return {k: v.astype(jnp.float32) if jnp.issubdtype(v.dtype, jnp.floating) else v for k, v in args.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Minimum memory traffic and operations of a call."""

    num_bytes: float
    """Bytes of every cached element, query, weight and result, once."""
    moved_bytes: float
    """The same with layer inputs as often as the design of `triton_decode_absorbed` reads them: twice where
    absorbed."""
    flop: float


def work_of(
    op: str,
    shape: AttentionShape,
    lens: Sequence[int],
    itemsize: int,
    chunk: int = 0,
    hidden_prefix: bool = False,
    result_size: int | None = None,
) -> Work:
    """Bytes and operations of a decode op, or of a `prefill` over prefixes of one kind.

    Args:
        result_size: bytes of an element of an absorbed result; None: `itemsize`, as the backend asks for. Other results
            are in float32.
    """
    result_size = result_size or itemsize
    n, h, d, e, r = (
        shape.num_heads, shape.head_dim, shape.hidden_size, shape.lane, shape.rotary_dim,
    )  # fmt: skip
    tokens, batch = float(sum(lens)), len(lens)
    if op == "prefill":
        rows = batch * chunk
        pairs = sum(chunk * n_ + chunk * (chunk + 1) / 2 for n_ in lens)
        moved = rows * (2 * n * h + 2 * e) * itemsize
        flop = 4 * n * h * pairs
        if hidden_prefix:
            moved += d * itemsize * tokens + 2 * e * d * itemsize
            flop += 4 * e * d * tokens
        else:
            moved += 2 * e * itemsize * tokens
        return Work(num_bytes=moved, moved_bytes=moved, flop=flop)
    if op == "decode_kv":
        cached, reads = 2 * e * itemsize * tokens, 1
        around, flop = batch * n * h * (itemsize + 4), 4 * n * h * tokens
    elif op == "decode_absorbed":
        cached, reads = d * itemsize * tokens, 2
        around, flop = batch * n * d * (itemsize + result_size), 4 * n * d * tokens
    elif op == "decode_reprojected":
        cached, reads = d * itemsize * tokens, 1
        around = batch * n * h * (itemsize + 4) + 2 * e * d * itemsize
        flop = (4 * e * d + 4 * n * h) * tokens
    else:
        cached, reads = d * itemsize * tokens, 2
        around = batch * n * (r * itemsize + d * result_size + (d * itemsize if r < h else 0))
        around += n * r * d * itemsize
        flop = (2 * n * r * d + 2 * n * r + 2 * n * d * (2 if r < h else 1)) * tokens
    return Work(num_bytes=cached + around, moved_bytes=reads * cached + around, flop=flop)


def ragged(total: int, batch: int, seed: int) -> list[int]:
    """`batch` lengths that sum to `total`, from about half to one and a half of their mean."""
    rng = np.random.default_rng(seed)
    share = rng.uniform(0.5, 1.5, batch)
    lens = np.maximum(1, np.floor(total * share / share.sum())).astype(int)
    lens[0] += total - lens.sum()
    return lens.tolist()


def chained(call_once: Callable[[Arrays], Any], length: str = "lens") -> Callable[..., Any]:
    """One program of several calls, each after the one before: its lengths wait for the last result.

    The program takes arguments that all calls share, and of each call those that are its own (its pool).

    Calls over different pools find no cached tokens in the L2 cache, as the layers of a model do not.
    """

    def program(shared: Arrays, own: Sequence[Arrays]) -> Any:
        lens, out = shared[length], None
        for more in own:
            out = jax.lax.optimization_barrier(call_once({**shared, **more, length: lens}))
            lens = lens + jnp.isnan(out.reshape(-1)[0]).astype(jnp.int32)
        return out

    return program
