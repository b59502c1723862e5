"""Absorbed decode attention in one pass over cached layer inputs, as a CUDA kernel for chips with clusters (contract:
`reference.decode_absorbed`; source: `cuda/decode_absorbed.cu`).

The PTX for sm_90 is checked in (`cuda/decode_absorbed.ptx.xz`; `python -m tools.cuda_kernels` compiles it after a
change of the source), so the machine that runs the kernel needs no CUDA compiler. XLA passes the PTX from a custom call
to the driver, and the launch is part of a step's CUDA graph like those of Triton kernels. The PTX for float16 and
bfloat16 differs only in the names of two instructions.

A `Variant` holds the sizes that are compile-time constants: the numbers of blocks, warps, feature lanes, heads,
positions per tile and pipeline stages. All other sizes are run-time arguments, so a few variants serve most widths up
to 9,216 (`plan_for`) and any number of heads: heads are split into groups of equal size, which read the same layer
inputs from the L2 cache. The visible tiles of all rows are cut into ranges of about equal length, as many as there are
clusters that can run at once for a group of heads (`ranges_of`), and `triton_work_list.join_pieces` joins rows that lie
in several ranges.

The kernel also computes attention over latents, whose first lanes are the values: `decode_absorbed(...,
value_width=512)` for latents of 576 lanes.
"""

import dataclasses
import functools
import json
import lzma
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from apt_jax.ops.calls import DecodeCall, LogitModifiers
from apt_jax.pallas.triton_decode_common import by_block, check_inputs, slopes_of
from apt_jax.pallas.triton_tiles import NUM_PROCESSORS
from apt_jax.pallas.triton_work_list import Rows, WorkList, join_pieces, partial_shapes, rows_of_call

CALL = "__gpu$xla.gpu.ptx"
"""Name of XLA's custom call that launches a kernel given as PTX; available in JAX's CUDA plugin from 0.10.2 on."""
CHIP = "sm_90"
"""Class of chips whose thread blocks can form clusters."""
SOURCES = tuple(Path(__file__).with_name("cuda") / name for name in ("decode_absorbed.cu", "warp_ops.cuh"))
COMPILED = Path(__file__).with_name("cuda") / "decode_absorbed.ptx.xz"

_LANES = 8
"""Number of heads per matrix instruction (n of m16n8k16). Tiles of features are twice as wide."""
_MOST_PADDING = 4 / 3
"""Maximum ratio of a variant's lanes to the width of the layer inputs."""
_PROCESSORS_IN_CLUSTERS = 128
"""Number of an H100's 132 processors that clusters can use: a cluster lies within one of the chip's partitions, which
have 16 or 18 processors."""
_LEAST_TILES = 2
"""Minimum number of tiles per range."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Sizes that the kernel is compiled for."""

    cluster: int
    """Number of blocks per cluster; each block occupies a processor."""
    warps: int
    """Number of warps per block: 4, 8 or 12, because each quarter of a processor has its own registers."""
    feature_tiles: int
    """Number of tiles of 16 feature lanes per warp."""
    head_tiles: int
    """Number of tiles of 8 heads."""
    halves: int
    """Number of groups of 16 positions per tile: 1 or 2. The exchange between blocks takes equally long for both."""
    stages: int
    """Number of tiles of layer inputs in shared memory, three of which are in use by computations."""

    @property
    def name(self) -> str:
        return f"{self.cluster}x{self.warps}x{self.feature_tiles}x{self.head_tiles}x{self.halves}x{self.stages}"

    @property
    def width(self) -> int:
        """Number of feature lanes."""
        return self.cluster * self.warps * self.feature_tiles * 2 * _LANES

    @property
    def tile(self) -> int:
        """Number of positions per tile."""
        return 16 * self.halves

    @property
    def heads(self) -> int:
        return _LANES * self.head_tiles

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def macros(self) -> dict[str, int]:
        """Macros for the CUDA compiler, by name."""
        return {
            "ONE_CLUSTER": self.cluster,
            "ONE_WARPS": self.warps,
            "ONE_MT": self.feature_tiles,
            "ONE_NT": self.head_tiles,
            "ONE_HALVES": self.halves,
            "ONE_STAGES": self.stages,
        }

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block in bytes: `Layout::kBytes` of the source."""
        inputs = self.stages * self.warps * self.tile * (32 * self.feature_tiles + 16)
        of_warps, of_blocks = self.warps * self.head_tiles * 32 * 16, 2 * self.heads * self.tile * 4
        weights = 3 * self.heads * (2 * self.tile + 16 + 8)
        return inputs + of_warps + of_blocks + weights + self.stages * self.warps * 32 + 4 * len(Shape._fields)


VARIANTS = tuple(
    Variant(cluster=c, warps=w, feature_tiles=m, head_tiles=n, halves=h, stages=s)
    for c, w, m, n, h, s in (
        (1, 12, 3, 4, 2, 4),  # 576 lanes: latents
        (1, 8, 6, 2, 2, 4),  # 768, 12 heads: OPT-125M, GPT-2
        (1, 8, 8, 2, 1, 6),  # 1,024, 16 heads: BLOOM-560M
        (2, 8, 5, 3, 2, 4),  # 1,280, 20 heads: GPT-2 large
        (4, 8, 4, 4, 2, 5),  # 2,048, 32 heads: OPT-1.3B
        (4, 8, 5, 4, 2, 4),  # 2,560, 32 heads: OPT-2.7B, BLOOM-3B
        (8, 8, 4, 4, 2, 5),  # 4,096, 32 heads: OPT-6.7B, BLOOM-7B1, MPT-7B
        (8, 8, 5, 5, 2, 4),  # 5,120, 40 heads: OPT-13B
        (8, 8, 7, 4, 1, 6),  # 7,168, 56 or 64 heads in 2 groups: OPT-30B, MPT-30B
        (8, 8, 9, 3, 1, 5),  # 9,216, 72 heads in 3 groups: OPT-66B
    )
)
"""Compiled variants, by width. `tools.cuda_kernels` checks that each takes at most 255 registers per thread and 227 KiB
of shared memory per block and spills no registers."""


class Shape(NamedTuple):
    """Numbers that the kernel reads, which are equal for all items; `Field` in the source has the same order."""

    heads: int
    width: int
    value_width: int
    entries: int
    """Number of entries per row of the tables."""
    block_size: int
    block_stride: int
    """Number of elements per block of the pool."""
    window: int
    """Number of positions that a query attends to; 0: all."""
    softcap: float
    """Soft cap of scores; 0: no cap."""
    has_ranges: bool
    has_slopes: bool
    groups: int
    group_heads: int
    items: int

    def packed(self) -> np.ndarray:
        """Return the fields as an int32 array for the kernel, floats by their float32 bits."""
        return np.array([np.float32(x).view(np.int32) if isinstance(x, float) else x for x in self], np.int32)


class Plan(NamedTuple):
    """The variant for a call, and the split of its heads into groups."""

    variant: Variant
    groups: int
    """Number of groups of heads."""
    group_heads: int


def plan_for(heads: int, width: int) -> Plan | None:
    """Return the plan whose variant needs the fewest multiplications, padding included; None if no variant has a
    suitable width."""
    found: list[tuple[int, Plan]] = []
    for variant in VARIANTS:
        if width <= variant.width <= _MOST_PADDING * width:
            groups = -(-heads // variant.heads)
            plan = Plan(variant, groups, -(-heads // groups))
            found.append((groups * variant.heads * variant.width, plan))
    return min(found, key=lambda cost_and_plan: cost_and_plan[0])[1] if found else None


def why_not(chip: str | None, q_absorbed: Array, pool: Array) -> str | None:
    """Return the reason why the kernel does not support a call; None if it does.

    Args:
        chip: class of the chip, one of `triton_tiles.CHIPS`.
        q_absorbed: (B, N, D) queries in the dtype of the result.
        pool: pool of layer inputs.
    """
    _, heads, width = q_absorbed.shape
    if chip != CHIP:
        return f"it needs a chip with clusters ({CHIP} or newer; this is {chip or 'an unspecified chip'})"
    if pool.dtype not in (jnp.float16, jnp.bfloat16) or q_absorbed.dtype != pool.dtype:
        return f"it needs queries and layer inputs of the same 16-bit dtype ({pool.dtype} layer inputs, {q_absorbed.dtype} queries)"
    if width % _LANES or math.prod(pool.shape[1:]) % _LANES:
        return f"layer inputs of {width} lanes in blocks of {pool.shape[1:]} are not aligned to {_LANES}"
    if plan_for(heads, width) is None:
        return f"it is not compiled for layer inputs of {width} lanes"
    return None


@functools.cache
def _compiled() -> dict[str, Any]:
    return json.loads(lzma.decompress(COMPILED.read_bytes()))


def ptx_of(variant: Variant, dtype: Any) -> str:
    """Return the PTX of a variant for `sm_90`, for bfloat16 or float16."""
    text = _compiled()["ptx"][variant.name]
    return text if jnp.dtype(dtype) == jnp.bfloat16 else text.replace("bf16", "f16")


def num_ranges(plan: Plan) -> int:
    """Return the number of ranges that all tiles are cut into, so that the clusters of all ranges and groups run at the
    same time."""
    processors = NUM_PROCESSORS[CHIP] if plan.variant.cluster == 1 else _PROCESSORS_IN_CLUSTERS
    return max(1, processors // plan.variant.cluster // plan.groups)


def _running_sum(x: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """Return the inclusive running sum."""
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(index[:, None] >= index[None, :], x[None, :], 0), axis=1, dtype=jnp.int32)


def slack_for(plan: Plan, heads: int) -> int:
    """Return the number of tiles by which a cut may move to reach a row's border: half the number of tiles that take as
    many bytes as a piece's partial result."""
    return -(-heads // plan.variant.tile)


def ranges_of(rows: Rows, count: int, slack: int) -> tuple[WorkList, Int32[Array, " RANGES_AND_1"]]:
    """Cut the visible tiles of all rows into `count` ranges of about equal length, one per cluster.

    Args:
        rows: visible tiles of each row.
        count: number of ranges.
        slack: a cut is moved to the border of a row that is at most `slack` tiles away, because a row that is not cut
            needs no partial results.

    Returns:
        The work list, with one item per piece of a row, range by range, followed by rows without tiles; and the index
        of the first item of each range, with the end of the last range appended.
    """
    batch = rows.length.shape[0]
    begin, end = rows.packed, rows.packed + (rows.last - rows.first)
    total = end[-1]
    cuts = jnp.arange(1, count, dtype=jnp.int32) * jnp.maximum((total + count - 1) // count, _LEAST_TILES)
    cuts = jnp.minimum(cuts, total)
    nearest = end[jnp.argmin(jnp.abs(cuts[:, None] - end[None, :]), axis=1)]
    cuts = jnp.where(jnp.abs(cuts - nearest) <= slack, nearest, cuts)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), cuts, total[None]])

    is_empty = begin == end
    first = jnp.sum(cuts[None, :] <= begin[:, None], axis=1, dtype=jnp.int32)
    inside = jnp.sum((cuts[None, :] > begin[:, None]) & (cuts[None, :] < end[:, None]), axis=1, dtype=jnp.int32)
    is_cut = inside > 0
    counts = jnp.where(is_empty, 0, 1 + inside)
    after, empty = _running_sum(counts), _running_sum(is_empty.astype(jnp.int32))
    places = jnp.where(is_cut, counts, 0)
    place = _running_sum(places) - places

    item = jnp.arange(batch + count - 1, dtype=jnp.int32)
    row = jnp.sum(item[:, None] >= after[None, :], axis=1, dtype=jnp.int32)
    has_tiles = row < batch
    other = jnp.sum((item - after[-1])[:, None] >= empty[None, :], axis=1, dtype=jnp.int32)
    there, row = has_tiles | (other < batch), jnp.minimum(jnp.where(has_tiles, row, other), batch - 1)
    piece = jnp.where(has_tiles, item - (after - counts)[row], 0)
    of_range = jnp.where(has_tiles, first[row] + piece, count)
    safe = jnp.minimum(of_range, count - 1)
    start = jnp.maximum(begin[row], bounds[safe])
    stop = jnp.maximum(jnp.minimum(end[row], bounds[safe + 1]), start)
    shift = rows.first[row] - begin[row]
    items = jnp.stack(
        (
            jnp.where(there, row, -1),
            rows.table[row],
            rows.length[row],
            start + shift,
            stop + shift,
            start,
            row,
            jnp.where(is_cut[row], place[row] + piece, -1),
        ),
        axis=1,
    )
    joined = jnp.arange(min(batch, count - 1), dtype=jnp.int32)
    cut = jnp.sum(joined[:, None] >= _running_sum(is_cut.astype(jnp.int32))[None, :], axis=1, dtype=jnp.int32)
    is_there, cut = cut < batch, jnp.minimum(cut, batch - 1)
    joins = jnp.stack((cut, place[cut], jnp.where(is_there, counts[cut], 0)), axis=1)
    work = WorkList(items=items, joins=joins, num_places=2 * (count - 1) or 1)
    number = jnp.arange(count + 1, dtype=jnp.int32)
    return work, jnp.sum(of_range[None, :] < number[:, None], axis=1, dtype=jnp.int32)


def launch(plan: Plan, dtype: Any, count: int, operands: tuple[Array, ...], outs: list[jax.ShapeDtypeStruct]) -> Any:
    """Launch the kernel over `count` ranges; return its results, with the shapes and dtypes of `outs`."""
    variant, number = plan.variant, np.int32
    return jax.ffi.ffi_call(CALL, outs)(
        *operands,
        name="decode_absorbed",
        kernel_type="ptx",
        kernel_data=ptx_of(variant, dtype),
        grid_x=number(count * plan.groups * variant.cluster),
        grid_y=number(1),
        grid_z=number(1),
        block_x=number(variant.threads),
        block_y=number(1),
        block_z=number(1),
        shared_mem_bytes=number(variant.shared_bytes),
    )


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    call: DecodeCall,
    *,
    value_width: int | None = None,
    plan: Plan | None = None,
    count: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B N V"]:
    """Return `softmax(q~ x^T) x` over positions [0, lens) in the pool's dtype; see `reference.decode_absorbed`.

    Args:
        q_absorbed: queries q~.
        call: pool, tables, lengths and logit modifiers.
        value_width: number of leading lanes of the result to compute (V, even); None: D.
        plan: variant and head groups; None: those of `plan_for`.
        count: number of ranges; None: `num_ranges`.
        interpret: run the Triton kernel that joins pieces in Pallas' interpreter.

    Raises:
        ValueError: the kernel does not support these shapes or this dtype (`why_not`).
    """
    pool, slot_ranges = call.pool, call.slot_ranges
    batch, heads, width = q_absorbed.shape
    check_inputs(pool, call.block_size, width)
    q_absorbed = q_absorbed.astype(pool.dtype)
    plan = plan or plan_for(heads, width)
    if plan is None or pool.dtype.itemsize != 2:
        raise ValueError(why_not(CHIP, q_absorbed, pool))
    rules = call.rules or LogitModifiers()
    count = count or num_ranges(plan)
    rows = rows_of_call(call, plan.variant.tile)
    work, starts = ranges_of(rows, count, slack=slack_for(plan, heads))
    slopes = slopes_of(rules)
    value_width = value_width or width
    shape = Shape(
        heads=heads,
        width=width,
        value_width=value_width,
        entries=call.tables.shape[1],
        block_size=call.block_size,
        block_stride=math.prod(pool.shape[1:]),
        window=rules.window or 0,
        softcap=float(rules.softcap or 0),
        has_ranges=slot_ranges is not None,
        has_slopes=slopes is not None,
        groups=plan.groups,
        group_heads=plan.group_heads,
        items=work.items.shape[0],
    )
    operands = (
        work.items,
        starts,
        call.tables,
        jnp.zeros((1, 1, 2), jnp.int32) if slot_ranges is None else slot_ranges,
        jnp.zeros(1, jnp.float32) if slopes is None else slopes,
        jnp.asarray(shape.packed()),
        q_absorbed,
        by_block(pool),
    )
    out = jax.ShapeDtypeStruct((batch, heads, value_width), pool.dtype)
    z, *partial = launch(plan, pool.dtype, count, operands, [out, *partial_shapes(work, heads, value_width)])
    return join_pieces(work, (z,), partial, None, interpret=interpret)[0]
