"""Absorbed decode attention in one pass over cached layer inputs, as a CUDA kernel for chips with clusters (contract:
`reference.decode_absorbed`; the kernel: `cuda/decode_absorbed.cu`).

The kernel is compiled to PTX for sm_90 when the package is made, not where it runs (`cuda/decode_absorbed.ptx.xz`, by
`python -m tools.cuda_kernels`). XLA takes the text in a custom call and hands it to the driver; the launch is part of a
step's CUDA graph as those of Triton kernels are. float16 and bfloat16 differ in the names of two instructions.

What is static for the compiler is a `Variant`: how many blocks, warps, feature lanes and heads. Everything else is data,
so that a handful of variants serves all widths up to 9,216 and any number of heads, in groups of equal size that read
layer inputs one after another from the L2 cache. The visible tiles of all rows are cut into as many ranges of equal length
as clusters run side by side (`ranges_of`), and `triton_work_list.join_pieces` joins rows that lie in several.

Nothing but decode attention needs to know: key and value of a group of heads are one tensor, whose first lanes are the
value (`decode_absorbed(..., value_width=512)` for latents of 576 lanes).
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
"""The custom call of XLA that launches a kernel given as PTX; JAX's CUDA plugin has it from 0.10.2 on."""
CHIP = "sm_90"
"""The class of chips that have clusters."""
SOURCES = tuple(Path(__file__).with_name("cuda") / name for name in ("decode_absorbed.cu", "warp_ops.cuh"))
COMPILED = Path(__file__).with_name("cuda") / "decode_absorbed.ptx.xz"

_LANES = 8
"""Heads, or feature lanes, that an instruction multiplies."""
_MOST_PADDING = 4 / 3
"""A variant takes layer inputs that are narrower than its lanes by this factor at most."""
_PROCESSORS_IN_CLUSTERS = 128
"""Processors that clusters get, of the 132 of an H100: they do not reach over the borders of its parts, of 16 or 18
processors each."""
_LEAST_TILES = 2
"""Tiles of a range, at least."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Sizes that the kernel is compiled for."""

    cluster: int
    """Blocks, each of which has a processor to itself."""
    warps: int
    """Warps of a block: 4, 8 or 12, as each quarter of a processor has registers of its own."""
    feature_tiles: int
    """Times 16 feature lanes, of a warp."""
    head_tiles: int
    """Times 8 heads."""
    halves: int
    """Times 16 positions, of a tile: 1 or 2. What passes between blocks takes as long for either."""
    stages: int
    """Tiles of layer inputs in shared memory; three of them are being computed with."""

    @property
    def name(self) -> str:
        return f"{self.cluster}x{self.warps}x{self.feature_tiles}x{self.head_tiles}x{self.halves}x{self.stages}"

    @property
    def width(self) -> int:
        """Feature lanes."""
        return self.cluster * self.warps * self.feature_tiles * 2 * _LANES

    @property
    def tile(self) -> int:
        """Positions of a tile."""
        return 16 * self.halves

    @property
    def heads(self) -> int:
        return _LANES * self.head_tiles

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def macros(self) -> dict[str, int]:
        """Macros that the compiler is given."""
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
        """Shared memory of a block: `Layout::kBytes` of the source."""
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
"""By width. No more than 255 registers a thread and 227 KiB of shared memory a block, nothing spilled: the gate checks."""


class Shape(NamedTuple):
    """Numbers that the kernel reads, the same for all items: `Field` of the source."""

    heads: int
    width: int
    value_width: int
    entries: int
    """Entries of a row of the tables."""
    block_size: int
    block_stride: int
    """Elements of a block of the pool."""
    window: int
    """0: none."""
    softcap: float
    """0: none."""
    has_ranges: bool
    has_slopes: bool
    groups: int
    group_heads: int
    items: int

    def packed(self) -> np.ndarray:
        """As the kernel reads them, int32."""
        return np.array([np.float32(x).view(np.int32) if isinstance(x, float) else x for x in self], np.int32)


class Plan(NamedTuple):
    """How heads and lanes are spread."""

    variant: Variant
    groups: int
    """Groups of heads."""
    group_heads: int


def plan_for(heads: int, width: int) -> Plan | None:
    """The variant that multiplies the fewest numbers, padding included; None where none is wide enough, or all are much
    too wide."""
    found: list[tuple[int, Plan]] = []
    for variant in VARIANTS:
        if width <= variant.width <= _MOST_PADDING * width:
            groups = -(-heads // variant.heads)
            plan = Plan(variant, groups, -(-heads // groups))
            found.append((groups * variant.heads * variant.width, plan))
    return min(found, key=lambda cost_and_plan: cost_and_plan[0])[1] if found else None


def why_not(chip: str | None, q_absorbed: Array, pool: Array) -> str | None:
    """Reason why the kernel cannot take a call; None: it can.

    Args:
        q_absorbed: (B, N, D), of the dtype that results are to have.
    """
    _, heads, width = q_absorbed.shape
    if chip != CHIP:
        return f"it needs a chip with clusters ({CHIP} or newer; this is {chip or 'any'})"
    if pool.dtype not in (jnp.float16, jnp.bfloat16) or q_absorbed.dtype != pool.dtype:
        return f"it takes and gives one kind of 16-bit numbers ({pool.dtype} layer inputs, {q_absorbed.dtype} queries)"
    if width % _LANES or math.prod(pool.shape[1:]) % _LANES:
        return f"layer inputs of {width} lanes in blocks of {pool.shape[1:]} are not aligned to {_LANES}"
    if plan_for(heads, width) is None:
        return f"it is not compiled for layer inputs of {width} lanes"
    return None


@functools.cache
def _compiled() -> dict[str, Any]:
    return json.loads(lzma.decompress(COMPILED.read_bytes()))


def ptx_of(variant: Variant, dtype: Any) -> str:
    """The program of a variant for bfloat16 or float16, PTX of `sm_90`."""
    text = _compiled()["ptx"][variant.name]
    return text if jnp.dtype(dtype) == jnp.bfloat16 else text.replace("bf16", "f16")


def num_ranges(plan: Plan) -> int:
    """Ranges that all tiles are cut into: as many clusters run side by side, those of the groups of a range together."""
    processors = NUM_PROCESSORS[CHIP] if plan.variant.cluster == 1 else _PROCESSORS_IN_CLUSTERS
    return max(1, processors // plan.variant.cluster // plan.groups)


def _running_sum(x: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """Inclusive."""
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(index[:, None] >= index[None, :], x[None, :], 0), axis=1, dtype=jnp.int32)


def slack_for(plan: Plan, heads: int) -> int:
    """Tiles that a range may be longer or shorter so as not to cut a row: half of those that have as many bytes as the
    partial result of a piece."""
    return -(-heads // plan.variant.tile)


def ranges_of(rows: Rows, count: int, slack: int) -> tuple[WorkList, Int32[Array, " RANGES_AND_1"]]:
    """Cut the visible tiles of all rows into `count` ranges of about equal length; a cluster takes one.

    Returns:
        Pieces of rows, an item each, range by range, then rows without tiles; the first item of each range and the end of
        the last one's.

    Args:
        slack: where a row begins or ends at most so many tiles from a cut, the cut is there: a row that is not cut needs
            no partial results.
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
    """The kernel over `count` ranges; results in the order of its arguments."""
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
    """`softmax(q~ x^T) x` over positions [0, lens) in the pool's dtype, of the first `value_width` lanes; see
    `reference.decode_absorbed`.

    Args:
        value_width: V, even; None: D.
        plan: None: `plan_for`.
        count: ranges; None: `num_ranges`.
        interpret: run the Triton kernel that joins pieces in Pallas' interpreter.

    Raises:
        ValueError: shapes or a dtype that the kernel does not take (`why_not`).
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
    return join_pieces(work, (z,), partial, interpret=interpret)[0]
