"""Decode attention over the block pool for TPUs: Pallas kernels that Mosaic compiles (contracts: `reference.py`).

Both ops are one flash-attention kernel. Its grid is (row, step); a step folds the next G blocks of the row into a
running maximum m, denominator l and accumulator that stay in VMEM from step to step. How blocks arrive:

  * Lengths, block tables and slot ranges are prefetched into scalar memory, and the block specifications look them up:
    the pipeline fetches the blocks of step s + 1 while step s computes. G blocks per step are G operands, all of them
    the same pool, as one operand can only bring slots that lie side by side.
  * A step past the row's end asks for the blocks that the last step left in VMEM, so nothing is fetched, and computes
    nothing. The number of steps is that of the longest row, known on the device only.
  * Tokens that are not the row's own get score -1e30 and weight 0, and their values are replaced by 0: 0 * NaN = NaN.

Keys and values of all heads lie side by side in the E lanes of a slot. The queries are therefore spread over E lanes,
each in those of its key/value head and 0 elsewhere, which makes of all heads two matrix products per step; what the
accumulator gathers outside of a head's own lanes is dropped at the end. The multiplications by 0 are N times more than
needed, and still too few to matter: they are 2 N a byte of cache, where a TPU can do over 200. In absorbed attention
the queries are E wide by nature, and the cached inputs are both keys and values.

Pools may be float32 or bfloat16; float16 is refused, as the matrix unit does not take it. On a TPU an array is laid out
in tiles over its last two axes, which is why a pool has three: (P, C * E) would be another layout, and every call would
begin with a copy of the whole pool.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int32

TOKENS_PER_STEP = 64
"""G * C: enough to hide the cost of a step, few enough that two steps of 9216 lanes fit into VMEM."""

_MASKED = -1e30
"""Score of a token that is not the row's; finite, so that a fully masked step cannot make NaN."""


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Matrix product over axis `axes[0]` of a and `axes[1]` of b in float32; float32 inputs are not rounded."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, contract, precision=exact, preferred_element_type=jnp.float32)


def _cdiv(a: Array, b: int) -> Array:
    return lax.div(a + (b - 1), jnp.int32(b))


def _own(
    axis: int,
    step: Array,
    length: Array,
    ranges: Any,
    first_range: Array,
    *,
    g: int,
    c: int,
    j: int,
) -> Array:
    """Mask of the row's own slots among the G * C of a step, along `axis` of two."""
    shape = (1, g * c) if axis else (g * c, 1)
    slot = lax.broadcasted_iota(jnp.int32, shape, axis)
    if ranges is None:
        return slot < length - step * (g * c)
    own = None
    for i in range(g):
        entry = step * g + i
        at = (first_range + jnp.minimum(entry, j - 1)) * 2
        first, last = ranges[at], ranges[at + 1]
        upwards = first <= last
        size = jnp.where(upwards, last - first, first - last)
        count = jnp.maximum(jnp.minimum(size, length - entry * c), 0)
        low = jnp.where(upwards, first, first - count) + i * c
        mine = (slot >= low) & (slot < low + count)
        own = mine if own is None else own | mine
    assert own is not None
    return own


def _kernel(
    lens_smem,  # (B,)
    tables_smem,  # (B * A * J,)
    ranges_smem,  # (B * J * 2,), or (1,) where there are none
    q_ref,  # (N, H), or (N, E) where the queries are that wide
    *refs,  # A * G blocks (C, E); output (N, H) or (N, E); scratch m, l (N, 1) and, beside H, acc, queries (N, E)
    num_arrays: int,  # A: 2 for keys and values, 1 for layer inputs, which are both
    blocks_per_step: int,  # G
    block_size: int,  # C
    num_entries: int,  # J
    with_ranges: bool,
    head_dim: int | None,  # H; None: the queries come E wide and scaled
):
    del tables_smem  # for the block specifications
    g, c = blocks_per_step, block_size
    key_refs, value_refs = refs[:g], refs[(num_arrays - 1) * g : num_arrays * g]
    out_ref, m_ref, l_ref, *spread = refs[num_arrays * g :]
    acc_ref, queries_ref = spread or (out_ref, q_ref)
    row, step = pl.program_id(0), pl.program_id(1)
    length = lens_smem[row]
    num_heads, lanes = acc_ref.shape
    num_kv_heads = 1 if head_dim is None else lanes // head_dim
    group = num_heads // num_kv_heads
    head = lax.broadcasted_iota(jnp.int32, (num_heads, 1), 0)

    @pl.when(step == 0)
    def _start():
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

    @pl.when(step * (g * c) < length)
    def _attend():
        own = functools.partial(
            _own,
            step=step,
            length=length,
            ranges=ranges_smem if with_ranges else None,
            first_range=row * num_entries,
            g=g,
            c=c,
            j=num_entries,
        )
        own_scores, own_values = own(1), own(0)
        keys = jnp.concatenate([ref[...] for ref in key_refs])
        values = jnp.concatenate([ref[...] for ref in value_refs])
        values = jnp.where(own_values, values, jnp.zeros((), values.dtype))
        s = jnp.where(own_scores, _dot(queries_ref[...], keys, (1, 1)), _MASKED)
        m_new = jnp.maximum(m_ref[...], jnp.max(s, axis=1, keepdims=True))
        p = jnp.where(own_scores, jnp.exp(s - m_new), 0.0)
        rescale = jnp.exp(m_ref[...] - m_new)
        m_ref[...] = m_new
        l_ref[...] = l_ref[...] * rescale + jnp.sum(p, axis=1, keepdims=True)
        acc_ref[...] = acc_ref[...] * rescale + _dot(p.astype(values.dtype), values, (1, 0))

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish():
        over = 1.0 / jnp.maximum(l_ref[...], 1e-30)
        if head_dim is None:
            out_ref[...] = acc_ref[...] * over
            return
        out = jnp.zeros(out_ref.shape, jnp.float32)
        for k in range(num_kv_heads):
            mine = (head >= k * group) & (head < (k + 1) * group)
            out = out + jnp.where(mine, acc_ref[:, k * head_dim : (k + 1) * head_dim], 0.0)
        out_ref[...] = out * over


def _decode(
    q: Float[Array, "B N W"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B A J"],
    lens: Int32[Array, " B"],
    rows: tuple[Array, Array] | None,
    slot_ranges: Int32[Array, "B J 2"] | None,
    *,
    block_size: int,
    head_dim: int | None,
    interpret: Any,
) -> Float[Array, "B N W"]:
    """Both ops; A = 2 for keys and values, 1 for layer inputs."""
    if pool.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"a TPU's matrix unit takes no {pool.dtype.name}: use a bfloat16 or float32 pool (--dtype bfloat16)"
        )
    batch, num_heads, width = q.shape
    num_arrays, num_entries = tables.shape[1:]
    lanes = pool.shape[2]
    g = max(1, min(TOKENS_PER_STEP // block_size, num_entries))
    lens = jnp.clip(lens, 0, num_entries * block_size)
    if rows is not None:
        index = jnp.arange(batch, dtype=jnp.int32)
        lens = jnp.where((index >= rows[0]) & (index < rows[1]), lens, 0)
    ranges = jnp.zeros(1, jnp.int32) if slot_ranges is None else slot_ranges.reshape(-1)

    def block(array: int, place: int) -> pl.BlockSpec:
        """The place-th of G blocks: entry `step * G + place`, or the last such entry that the row uses."""

        def index_map(row, step, lens_smem, tables_smem, ranges_smem):
            del ranges_smem
            used = _cdiv(lens_smem[row], block_size)
            last = used - 1 - lax.rem(jnp.maximum(used - 1 - place, 0), jnp.int32(g))
            entry = jnp.where(place < used, jnp.minimum(step * g + place, last), 0)
            return tables_smem[(row * num_arrays + array) * num_entries + entry], 0, 0

        return pl.BlockSpec((None, block_size, lanes), index_map)

    def whole_row(row, step, *prefetched):
        del step, prefetched
        return row, 0, 0

    blocks = [block(array, place) for array in range(num_arrays) for place in range(g)]
    steps = jnp.maximum(_cdiv(jnp.max(lens), g * block_size), 1)
    scratch = [pltpu.VMEM((num_heads, 1), jnp.float32)] * 2
    if head_dim is None:  # the output block is the accumulator: it stays in VMEM until the row changes
        q = q.astype(pool.dtype)
    else:
        scratch += [pltpu.VMEM((num_heads, lanes), d) for d in (jnp.float32, pool.dtype)]
    kernel = functools.partial(
        _kernel,
        num_arrays=num_arrays,
        blocks_per_step=g,
        block_size=block_size,
        num_entries=num_entries,
        with_ranges=slot_ranges is not None,
        head_dim=head_dim,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, steps),
            in_specs=[pl.BlockSpec((None, num_heads, width), whole_row), *blocks],
            out_specs=pl.BlockSpec((None, num_heads, width), whole_row),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((batch, num_heads, width), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="decode_absorbed" if head_dim is None else "decode_kv",
    )(lens, tables.reshape(-1), ranges, q, *([pool] * len(blocks)))


def decode_kv(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B 2 J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    interpret: Any = False,
) -> Float[Array, "B N H"]:
    """See `reference.decode_kv`.

    Args:
        pool: (P, C, E), float32 or bfloat16.
        interpret: run without a TPU: True, or `pltpu.InterpretParams` to simulate its memories.

    Raises:
        ValueError: a pool of another dtype.
    """
    return _decode(
        q,
        pool,
        tables,
        lens,
        rows,
        slot_ranges,
        block_size=block_size,
        head_dim=q.shape[2],
        interpret=interpret,
    )


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    interpret: Any = False,
) -> Float[Array, "B N D"]:
    """See `reference.decode_absorbed`; `pool`, `interpret` and what is raised as in `decode_kv`."""
    return _decode(
        q_absorbed,
        pool,
        tables[:, None],
        lens,
        rows,
        slot_ranges,
        block_size=block_size,
        head_dim=None,
        interpret=interpret,
    )
