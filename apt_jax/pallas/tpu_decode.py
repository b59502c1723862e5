"""Decode attention over the block pool for TPUs: Pallas kernels that Mosaic compiles (contracts: `lab/reference.py`).

Both ops use the same flash-attention kernel, which runs over a work list. An item is a tile of a row: the next G blocks
of its table are folded into a running maximum m, denominator l and accumulator, which stay in VMEM for all items of a
row. The grid is (core, item), with as many items as the longest list of a core. On a chip with two cores each core
takes some of the rows, with about half of all tiles.

  * XLA makes the list from the lengths, in a few operations whose result all layers share. A row without positions has
    one item, which writes zeros. If there is a sliding window, the tiles before it are not in the list.
  * The list, lengths, block tables and slot ranges are prefetched into scalar memory, where the block specifications
    read them: the pipeline fetches the blocks of item i + 1 while item i computes. The G blocks of an item are G
    operands, all of which are the same pool, because one operand can only fetch contiguous slots.
  * Tokens outside the row get score -1e30 and weight 0, and their values are replaced by 0, because 0 * NaN = NaN.

Keys and values of all heads are adjacent in the E lanes of a slot. Each query is therefore extended to E lanes: it is
placed in the lanes of its key/value head, with 0 elsewhere. So an item needs only two matrix products for all heads,
and the accumulator's values outside a head's own lanes are dropped at the end. The multiplications by 0 make the
products N times as large, but this does not matter: they take 2 N multiplications per byte of cache, and a TPU can do
over 200 per byte that it reads. In absorbed attention the queries are E wide already, and the cached inputs, which are
both keys and values, are read once.

Pools may be float32 or bfloat16, because the matrix unit does not support float16. A TPU lays an array out in tiles
over its last two axes, so the kernel takes the pool with all three axes: (P, C * E) would be another layout, and every
call would copy the whole pool.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int32

from apt_jax.ops.calls import DecodeCall, LogitModifiers

TILE_BYTES = 1 << 20
"""Maximum bytes of cache per item, if its tile is longer than `MIN_TILE`: large enough to hide the overhead of an item,
small enough that two tiles of 9216 lanes fit VMEM."""
MIN_TILE, MAX_TILE = 64, 128
"""Minimum and maximum number of positions per item."""
MAX_SCALARS = 1 << 17
"""Maximum number of integers in tables and work list: half of a TPU's scalar memory."""

_MASKED = -1e30
"""Score of a token outside the row; finite, so a fully masked tile cannot give NaN."""


def blocks_per_item(pool: Any, num_arrays: int, num_entries: int) -> int:
    """Return the number of blocks per item (G) for each of `num_arrays` arrays (keys and values: 2)."""
    _, block_size, lanes = pool.shape
    tile = MIN_TILE
    while tile < MAX_TILE and 2 * tile * num_arrays * lanes * pool.dtype.itemsize <= TILE_BYTES:
        tile *= 2
    return max(1, min(tile // block_size, num_entries))


def takes(pool: Any, tables: Any, width: int, *, interpret: bool = False) -> bool:
    """Return True if the kernels support a pool and tables.

    The pool must be float32 or bfloat16 and consist of whole registers of 16 slots by 128 lanes, and the tables must
    fit scalar memory. The interpreter supports all sizes.

    Args:
        pool: (P, C, E) pool.
        tables: (B, [A,] J) block tables.
        width: number of lanes that the call reads per slot; it must be E, so layer inputs of another width are not
            supported.
        interpret: True: the kernels run in the interpreter.
    """
    _, block_size, lanes = pool.shape
    num_arrays = tables.shape[1] if tables.ndim == 3 else 1
    g = blocks_per_item(pool, num_arrays, tables.shape[-1])
    num_scalars = tables.size + 2 * tables.shape[0] * -(-tables.shape[-1] // g)
    return (
        pool.dtype in (jnp.float32, jnp.bfloat16)
        and width == lanes
        and (interpret or (block_size % 16 == 0 and lanes % 128 == 0 and num_scalars <= MAX_SCALARS))
    )


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Return the product over axis `axes[0]` of a and `axes[1]` of b in float32; float32 inputs are not rounded."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, contract, precision=exact, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Static sizes and logit modifiers of a call."""

    num_arrays: int
    """Number of arrays (A): 2 for keys and values, 1 for layer inputs, which are both."""
    blocks: int
    """Number of blocks of each array per item (G)."""
    block_size: int
    """Number of slots per block (C)."""
    num_entries: int
    """Number of entries per row of the tables (J)."""
    num_items: int
    """Length of each core's list."""
    with_ranges: bool
    head_dim: int | None
    """Head width (H); None: the queries are E wide and already scaled."""
    softcap: float | None
    window: int | None
    with_slopes: bool
    with_sinks: bool

    @property
    def tile(self) -> int:
        """Number of positions per item."""
        return self.blocks * self.block_size

    def first_tile(self, length: Array) -> Array:
        """Return the first tile that a row's query sees."""
        if self.window is None:
            return jnp.zeros_like(length)
        return lax.div(jnp.maximum(length - self.window, 0), jnp.int32(self.tile))


def work_list(lens: Int32[Array, " B"], sizes: Any, cores: int) -> tuple[Array, Array, Array]:
    """List the tiles of all rows, row by row, and divide the rows among the cores.

    Returns:
        The row and the tile of each item, both (cores * num_items,), and the number of items of each core, (cores,).
        The rest of a core's list repeats its last item, so no further blocks are fetched.
    """
    batch = lens.shape[0]
    tiles = jnp.maximum(lax.div(lens + (sizes.tile - 1), jnp.int32(sizes.tile)) - sizes.first_tile(lens), 1)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    first_rows = [jnp.int32(0)]
    for core in range(1, cores):
        before = jnp.sum(ends * cores <= ends[-1] * core, dtype=jnp.int32)
        first_rows.append(jnp.clip(before, core, batch - cores + core))  # each core has a row
    first_row = jnp.stack(first_rows)
    starts = jnp.where(first_row > 0, ends[first_row - 1], 0)
    counts = jnp.append(starts[1:], ends[-1]) - starts
    item = jnp.arange(sizes.num_items, dtype=jnp.int32)[None, :]
    number = (starts[:, None] + jnp.minimum(item, counts[:, None] - 1)).reshape(-1)
    rows = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
    return rows, number - (ends - tiles)[rows] + sizes.first_tile(lens)[rows], counts


def _vmem_bytes(q: Any, pool: Any, num_blocks: int, out_dtype: Any) -> int | None:
    """Return the VMEM limit in bytes, or None if XLA's default of 16 MiB suffices.

    Inputs and outputs are double-buffered, and the joined and masked tiles need memory too.
    """
    _, num_heads, width = q.shape
    tile = num_blocks * math.prod(pool.shape[1:]) * pool.dtype.itemsize
    rows = num_heads * width * (q.dtype.itemsize + jnp.dtype(out_dtype).itemsize)
    needed = 4 * tile + 2 * rows + 8 * num_heads * pool.shape[2]
    return max(2 * needed, 16 << 20) if needed > 8 << 20 else None


def _own(axis: int, tile: Array, length: Array, ranges: Any, first_range: Array, sizes: _Sizes) -> tuple[Array, Array]:
    """Return the mask of a tile's slots that belong to the row and are seen by its query, and the slots' positions.

    Both are two-dimensional arrays along `axis`.
    """
    g, c = sizes.blocks, sizes.block_size
    slot = lax.broadcasted_iota(jnp.int32, (1, g * c) if axis else (g * c, 1), axis)
    if ranges is None:
        position = slot + tile * (g * c)
        own = position < length
    else:
        position, own = jnp.zeros_like(slot), slot < 0
        for i in range(g):
            entry = tile * g + i
            at = (first_range + jnp.minimum(entry, sizes.num_entries - 1)) * 2
            first, last = ranges[at], ranges[at + 1]
            upwards = first <= last
            size = jnp.where(upwards, last - first, first - last)
            count = jnp.maximum(jnp.minimum(size, length - entry * c), 0)
            low = jnp.where(upwards, first, first - count) + i * c
            mine = (slot >= low) & (slot < low + count)
            order = jnp.where(upwards, slot - low, low + count - 1 - slot)
            position = jnp.where(mine, entry * c + order, position)
            own = own | mine
    if sizes.window is not None:
        own = own & (position >= length - sizes.window)
    return own, position


def _kernel(
    lens_smem,  # (B,)
    rows_smem,  # (cores * items,)
    tiles_smem,  # (cores * items,)
    counts_smem,  # (cores,)
    tables_smem,  # (B * A * J,)
    ranges_smem,  # (B * J * 2,), or (1,) without slot ranges
    q_ref,  # (N, H), or (N, E) if head_dim is None
    slopes_ref,  # (N, 1)
    sinks_ref,  # (N, 1)
    *refs,  # A * G blocks (C, E); output (N, H) or (N, E); scratch m, l (N, 1), acc (N, E) and, with H, queries (N, E)
    sizes: _Sizes,
):
    del tables_smem  # for the block specifications
    g, head_dim = sizes.blocks, sizes.head_dim
    key_refs, value_refs = refs[:g], refs[(sizes.num_arrays - 1) * g : sizes.num_arrays * g]
    out_ref, m_ref, l_ref, acc_ref, *spread = refs[sizes.num_arrays * g :]
    queries_ref = spread[0] if spread else q_ref
    core, item = pl.program_id(0), pl.program_id(1)
    has_work = item < counts_smem[core]
    row, tile = rows_smem[core * sizes.num_items + item], tiles_smem[core * sizes.num_items + item]
    length = lens_smem[row]
    num_heads, lanes = acc_ref.shape
    num_kv_heads = 1 if head_dim is None else lanes // head_dim
    group = num_heads // num_kv_heads
    head = lax.broadcasted_iota(jnp.int32, (num_heads, 1), 0)

    @pl.when(has_work & (tile == sizes.first_tile(length)))
    def _start():
        if sizes.with_sinks:
            m_ref[...] = sinks_ref[...]
            l_ref[...] = jnp.ones(l_ref.shape, jnp.float32)
        else:
            m_ref[...] = jnp.full(m_ref.shape, _MASKED, jnp.float32)
            l_ref[...] = jnp.zeros(l_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)
        if head_dim is not None:
            scaled = q_ref[...].astype(jnp.float32) * head_dim**-0.5
            for k in range(num_kv_heads):
                mine = (head >= k * group) & (head < (k + 1) * group)
                queries_ref[:, k * head_dim : (k + 1) * head_dim] = jnp.where(mine, scaled, 0.0).astype(
                    queries_ref.dtype
                )

    @pl.when(has_work & (length > 0))
    def _attend():
        own = functools.partial(
            _own,
            tile=tile,
            length=length,
            ranges=ranges_smem if sizes.with_ranges else None,
            first_range=row * sizes.num_entries,
            sizes=sizes,
        )
        (own_scores, position), (own_values, _) = own(1), own(0)
        keys = jnp.concatenate([ref[...] for ref in key_refs])
        values = jnp.concatenate([ref[...] for ref in value_refs])
        values = jnp.where(own_values, values, jnp.zeros((), values.dtype))
        s = _dot(queries_ref[...], keys, (1, 1))
        if sizes.softcap is not None:
            s = sizes.softcap * jnp.tanh(s / sizes.softcap)
        if sizes.with_slopes:
            s = s + slopes_ref[...] * (position - (length - 1)).astype(jnp.float32)
        s = jnp.where(own_scores, s, _MASKED)
        m_new = jnp.maximum(m_ref[...], jnp.max(s, axis=1, keepdims=True))
        p = jnp.where(own_scores, jnp.exp(s - m_new), 0.0)
        rescale = jnp.exp(m_ref[...] - m_new)
        m_ref[...] = m_new
        l_ref[...] = l_ref[...] * rescale + jnp.sum(p, axis=1, keepdims=True)
        acc_ref[...] = acc_ref[...] * rescale + _dot(p.astype(values.dtype), values, (1, 0))

    @pl.when(has_work & ((tile + 1) * sizes.tile >= length))
    def _finish():
        over = 1.0 / jnp.maximum(l_ref[...], 1e-30)
        if head_dim is None:
            out_ref[...] = (acc_ref[...] * over).astype(out_ref.dtype)
            return
        out = jnp.zeros(out_ref.shape, jnp.float32)
        for k in range(num_kv_heads):
            mine = (head >= k * group) & (head < (k + 1) * group)
            out = out + jnp.where(mine, acc_ref[:, k * head_dim : (k + 1) * head_dim], 0.0)
        out_ref[...] = (out * over).astype(out_ref.dtype)


def _decode(
    q: Float[Array, "B N W"], call: DecodeCall, *, head_dim: int | None, cores: int, out_dtype: Any, interpret: Any
) -> Float[Array, "B N W"]:
    """Compute decode attention over keys and values or, with `head_dim=None`, over layer inputs."""
    call, pool, block_size = call.by_row(), call.pool, call.block_size
    slot_ranges, rules = call.slot_ranges, call.rules or LogitModifiers()
    if pool.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"a TPU's matrix unit does not support {pool.dtype.name}: use a bfloat16 or float32 pool (--dtype bfloat16)"
        )
    batch, num_heads, width = q.shape
    num_entries = call.tables.shape[-1]
    num_arrays = call.tables[0].size // num_entries
    lanes, cores = pool.shape[2], min(cores, batch)
    g = blocks_per_item(pool, num_arrays, num_entries)
    sizes = _Sizes(
        num_arrays=num_arrays,
        blocks=g,
        block_size=block_size,
        num_entries=num_entries,
        num_items=batch * -(-num_entries // g),
        with_ranges=slot_ranges is not None,
        head_dim=head_dim,
        softcap=rules.softcap,
        window=rules.window,
        with_slopes=rules.slopes is not None,
        with_sinks=rules.sinks is not None,
    )
    index, (first, last) = jnp.arange(batch, dtype=jnp.int32), call.row_range()
    lens = jnp.where((index >= first) & (index < last), jnp.clip(call.lens, 0, call.capacity), 0)
    list_rows, list_tiles, counts = work_list(lens, sizes, cores)
    ranges = jnp.zeros(1, jnp.int32) if slot_ranges is None else slot_ranges.reshape(-1)
    nothing = jnp.zeros((num_heads, 1), jnp.float32)
    of_heads = [nothing if a is None else a.astype(jnp.float32)[:, None] for a in (rules.slopes, rules.sinks)]

    def block(array: int, place: int) -> pl.BlockSpec:
        """Return the specification that fetches block `place` of an item's G blocks; past the end of the row, it
        fetches the row's last block."""

        def index_map(core, item, lens_smem, rows_smem, tiles_smem, counts_smem, tables_smem, ranges_smem):
            del counts_smem, ranges_smem
            row, tile = rows_smem[core * sizes.num_items + item], tiles_smem[core * sizes.num_items + item]
            used = lax.div(lens_smem[row] + (block_size - 1), jnp.int32(block_size))
            entry = jnp.clip(tile * g + place, 0, jnp.maximum(used - 1, 0))
            return tables_smem[(row * num_arrays + array) * num_entries + entry], 0, 0

        return pl.BlockSpec((None, block_size, lanes), index_map)

    def of_row(core, item, lens_smem, rows_smem, *prefetched):
        del lens_smem, prefetched
        return rows_smem[core * sizes.num_items + item], 0, 0

    blocks = [block(array, place) for array in range(num_arrays) for place in range(g)]
    scratch = [pltpu.VMEM((num_heads, 1), jnp.float32)] * 2 + [pltpu.VMEM((num_heads, lanes), jnp.float32)]
    if head_dim is None:
        q = q.astype(pool.dtype)
    else:
        scratch.append(pltpu.VMEM((num_heads, lanes), pool.dtype))
    return pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(cores, jnp.max(counts)),
            in_specs=[
                pl.BlockSpec((None, num_heads, width), of_row),
                *[pl.BlockSpec((num_heads, 1), lambda *_: (0, 0))] * 2,
                *blocks,
            ],
            out_specs=pl.BlockSpec((None, num_heads, width), of_row),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((batch, num_heads, width), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_vmem_bytes(q, pool, num_arrays * g, out_dtype),
        ),
        interpret=interpret,
        name="decode_absorbed" if head_dim is None else "decode_kv",
    )(
        lens,
        list_rows,
        list_tiles,
        counts,
        call.tables.reshape(-1),
        ranges,
        q,
        *of_heads,
        *([pool] * len(blocks)),
    )


def decode_kv(
    q: Float[Array, "B N H"], call: DecodeCall, *, cores: int = 1, interpret: Any = False
) -> Float[Array, "B N H"]:
    """Return decode attention over keys and values in float32; see `reference.decode_kv`.

    Args:
        q: queries.
        call: pool (float32 or bfloat16), tables, lengths and logit modifiers.
        cores: number of cores of the chip; the rows are divided among them.
        interpret: run without a TPU: True, or `pltpu.InterpretParams` to simulate its memories.

    Raises:
        ValueError: the pool is neither float32 nor bfloat16.
    """
    return _decode(q, call, head_dim=q.shape[2], cores=cores, out_dtype=jnp.float32, interpret=interpret)


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    call: DecodeCall,
    *,
    cores: int = 1,
    out_dtype: Any = jnp.float32,
    interpret: Any = False,
) -> Float[Array, "B N D"]:
    """Return absorbed decode attention over layer inputs; see `reference.decode_absorbed`.

    Args:
        q_absorbed: queries.
        call: see `decode_kv`.
        cores: see `decode_kv`.
        out_dtype: dtype of the result, which is accumulated in float32; the result is N times as wide as layer inputs.
        interpret: see `decode_kv`.

    Raises:
        ValueError: the pool is neither float32 nor bfloat16.
    """
    return _decode(q_absorbed, call, head_dim=None, cores=cores, out_dtype=out_dtype, interpret=interpret)
