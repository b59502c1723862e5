"""Tiles of the Triton kernels: the problem size that one program processes at a time, for each kernel, chip and shape.

They are chosen so that no kernel spills registers or needs more shared memory than a block may have. The register
counts come from cubins compiled without a GPU; alternative tiles have not been timed on a GPU. The tiles follow from
these facts:

  * The sums of a product stay in registers: 128 lanes x 128 tokens take 64 of a thread's 255 registers with 8 warps. A
    kernel that computes keys and values together holds two such sums. They fit on Hopper, whose operands come from
    shared memory, but not on an A100.
  * If the address of a load comes from another load, such as the lookup of a position's slot, the pipeline spends two
    stages on that, and further stages do not give more buffers. `output` looks up the slots of a step in the previous
    step, so all of its stages but one are buffers.
  * The read rate of a processor is the number of bytes in flight divided by the latency of memory (about 1 us under
    load): an H100 needs 22 KB in flight per processor. All buffers but one of each running program are in flight.
  * The buffers of all programs on a processor share its shared memory, 164 KiB on an A100.
"""

import dataclasses
from collections.abc import Sequence

CHIPS = ("sm_80", "sm_89", "sm_90")
"""Classes of chips that have tiles: A100; consumer and inference cards with 99 KiB of shared memory per block (A10, L4,
L40, RTX 30 to 50); H100, H200 and later data center chips."""

SHARED_BYTES = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10}
"""Maximum shared memory per block in bytes, by class of chips."""

NUM_PROCESSORS = {"sm_80": 108, "sm_89": 58, "sm_90": 132}
"""Number of streaming multiprocessors over which a small batch is split, by class of chips; for sm_89, the number of an
L4."""

MAX_HEAD_DIM = 256
"""Maximum number of lanes per head."""

_SHARED_BYTES_OF = {
    80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10,
    110: 227 << 10, 120: 99 << 10, 121: 99 << 10,
}  # fmt: skip
"""Maximum shared memory per block in bytes, by compute capability (80 for 8.0), from the CUDA programming guide,
because JAX does not report it."""

MIN_SIDE = 16
"""Smallest side of a matrix product on the tensor cores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """Problem size that one program of a kernel processes at a time; sizes are powers of two."""

    tokens: int
    """Number of cached positions."""
    lanes: int
    """Number of elements of a slot: the step of the loop over D, or the output lanes of `output`."""
    warps: int
    """Number of warps per program."""
    stages: int
    """Depth of the pipeline that copies from device memory."""
    passes: int = 1
    """Number of loops over D, only for `reprojected`. With 1, keys and values are computed together; with 2, layer
    inputs are read twice, mostly from the L2 cache, and half as many accumulators are needed. Rotary keys always take
    2."""
    columns: int = 0
    """Number of projected lanes in one half of the rotary lanes, over all heads of a program; only for
    `rotary_scores`."""

    def __post_init__(self) -> None:
        for name in ("tokens", "lanes", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTile:
    """Problem size that one program of a prefill kernel processes at a time; sizes are powers of two."""

    queries: int
    """Number of rows of a product: query tokens times query heads per key/value head."""
    keys: int
    """Number of positions, cached or of the chunk."""
    warps: int
    stages: int


_DEFAULTS = {
    ("kv", "sm_80"): Tile(tokens=64, lanes=128, warps=4, stages=3),
    ("kv", "sm_89"): Tile(tokens=64, lanes=128, warps=4, stages=3),
    ("kv", "sm_90"): Tile(tokens=64, lanes=128, warps=4, stages=3),
    ("scores", "sm_80"): Tile(tokens=64, lanes=64, warps=4, stages=4),
    ("scores", "sm_89"): Tile(tokens=64, lanes=64, warps=4, stages=3),
    ("scores", "sm_90"): Tile(tokens=64, lanes=64, warps=4, stages=5),
    ("output", "sm_80"): Tile(tokens=64, lanes=128, warps=4, stages=4),
    ("output", "sm_89"): Tile(tokens=64, lanes=128, warps=4, stages=3),
    ("output", "sm_90"): Tile(tokens=64, lanes=128, warps=4, stages=5),
    ("reprojected", "sm_80"): Tile(tokens=128, lanes=32, warps=8, stages=4, passes=2),
    ("reprojected", "sm_89"): Tile(tokens=128, lanes=32, warps=8, stages=4, passes=2),
    ("reprojected", "sm_90"): Tile(tokens=128, lanes=32, warps=8, stages=4, passes=1),
    ("rotary_scores", "sm_80"): Tile(tokens=128, lanes=32, warps=8, stages=4, columns=64),
    ("rotary_scores", "sm_89"): Tile(tokens=128, lanes=32, warps=8, stages=4, columns=64),
    ("rotary_scores", "sm_90"): Tile(tokens=128, lanes=32, warps=8, stages=4, columns=64),
    ("project", "sm_80"): Tile(tokens=256, lanes=32, warps=8, stages=4),
    ("project", "sm_89"): Tile(tokens=256, lanes=32, warps=8, stages=4),
    ("project", "sm_90"): Tile(tokens=256, lanes=32, warps=8, stages=4),
    ("project_turned", "sm_80"): Tile(tokens=128, lanes=32, warps=8, stages=4),
    ("project_turned", "sm_89"): Tile(tokens=128, lanes=32, warps=8, stages=4),
    ("project_turned", "sm_90"): Tile(tokens=128, lanes=64, warps=8, stages=3),
}
"""Default tiles by kernel and chip, for shapes that the other tables do not list. `project_turned` is `project` with
rotary or normed keys: both halves of the rotary lanes and the cosines and sines are in registers."""

_MANY_HEADS: dict[tuple[str, str], Tile] = {
    ("output", "sm_80"): Tile(tokens=64, lanes=128, warps=8, stages=6),
    ("output", "sm_89"): Tile(tokens=64, lanes=128, warps=8, stages=4),
    ("output", "sm_90"): Tile(tokens=64, lanes=128, warps=8, stages=6),
}
"""Tiles by kernel and chip for more than `_FEW_HEADS` padded heads, whose sums need the registers of 8 warps."""
_FEW_HEADS = 48

_WIDE_HEADS: dict[tuple[str, str, int], Tile] = {
    ("project", "sm_80", 256): Tile(tokens=128, lanes=32, warps=8, stages=4),
    ("project", "sm_89", 256): Tile(tokens=128, lanes=32, warps=8, stages=4),
    ("project", "sm_90", 256): Tile(tokens=128, lanes=32, warps=8, stages=4),
    ("project_turned", "sm_80", 256): Tile(tokens=64, lanes=32, warps=8, stages=4),
    ("project_turned", "sm_89", 256): Tile(tokens=64, lanes=32, warps=8, stages=4),
    ("project_turned", "sm_90", 256): Tile(tokens=64, lanes=32, warps=8, stages=4),
    ("rotary_scores", "sm_80", 256): Tile(tokens=64, lanes=32, warps=8, stages=4, columns=64),
    ("rotary_scores", "sm_89", 256): Tile(tokens=64, lanes=32, warps=8, stages=4, columns=64),
    ("rotary_scores", "sm_90", 256): Tile(tokens=64, lanes=32, warps=8, stages=4, columns=64),
}
"""Tiles by kernel, chip and padded lanes per head, for heads that are wider than the defaults allow."""

_OF_HEADS: dict[tuple[str, str, int], Tile] = {
    # Phi-3 and Llama-2-7B within a step: 4 warps spill 8 bytes, at 168 registers.
    ("output", "sm_90", 32): Tile(tokens=64, lanes=128, warps=8, stages=6),
}
"""Tiles by kernel, chip and number of heads, for any width."""

_TUNED: dict[tuple[str, str, int, int], Tile] = {
    # GPT-NeoX-20B: three sets of key lanes (two halves of 24 rotary lanes, 72 others) need more registers at 128.
    ("reprojected", "sm_80", 64, 6144): Tile(tokens=64, lanes=32, warps=8, stages=4, passes=2),
    ("reprojected", "sm_89", 64, 6144): Tile(tokens=64, lanes=32, warps=8, stages=4, passes=2),
    # Phi-3 with its window: 4 warps spill 8 bytes, at 168 registers.
    ("output", "sm_80", 32, 3072): Tile(tokens=64, lanes=128, warps=8, stages=6),
}
"""Tiles by kernel, chip, number of heads and width, if the default does not fit or another tile is faster."""

_PREFILL: dict[tuple[str, int], PrefillTile] = {
    ("sm_80", 128): PrefillTile(queries=128, keys=64, warps=8, stages=3),
    ("sm_89", 128): PrefillTile(queries=128, keys=32, warps=8, stages=3),
    ("sm_90", 128): PrefillTile(queries=128, keys=128, warps=8, stages=3),
    ("sm_80", 256): PrefillTile(queries=64, keys=32, warps=8, stages=3),
    ("sm_89", 256): PrefillTile(queries=64, keys=16, warps=8, stages=3),
    ("sm_90", 256): PrefillTile(queries=64, keys=32, warps=8, stages=3),
}
"""Tiles of the prefill kernels by chip and lanes per head, padded to at least 128."""


def chip_for(capability: float) -> str:
    """Return the class of a GPU, one of `CHIPS`.

    Args:
        capability: compute capability, 8.0 for an A100.

    Raises:
        ValueError: the compute capability is below 8.0, the minimum for the kernels.
    """
    if capability < 8.0:
        raise ValueError(f"compute capability {capability:.1f} is too old for the kernels, which need 8.0 or newer")
    # A GPU that is not listed yet gets the tiles that need at most 99 KiB.
    shared = _SHARED_BYTES_OF.get(round(10 * capability), 0)
    return "sm_90" if shared >= SHARED_BYTES["sm_90"] else "sm_80" if shared >= SHARED_BYTES["sm_80"] else "sm_89"


def check_chip(chip: str | None, head_dim: int) -> str:
    """Return the class of chips for which to choose tiles; sm_80 if `chip` is None.

    Raises:
        ValueError: the chip is unknown, or heads are wider than `MAX_HEAD_DIM`.
    """
    chip = chip or CHIPS[0]
    if chip not in CHIPS:
        raise ValueError(f"no tiles for {chip=}; known: {CHIPS}, or None")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"heads of {head_dim} lanes are wider than {MAX_HEAD_DIM}, the maximum for tiles in {SHARED_BYTES[chip] >> 10} KiB"
            f" of shared memory per block ({chip})"
        )
    return chip


def tile_for(kernel: str, chip: str | None, heads: int, width: int, itemsize: int, head_dim: int = 128) -> Tile:
    """Return the tile of a kernel: a special tile for the shape if the tables have one, else the default of kernel and
    chip.

    4-byte elements are for comparisons, not for speed: they get half the tokens and lanes, and two stages, which fits
    wherever the 2-byte tile does. A tile has at most as many lanes as the padded width.

    Args:
        kernel: name of the kernel in the tables.
        chip: one of `CHIPS`; None: as for sm_80, which runs on all later chips with 164 KiB per processor.
        heads: number of query heads.
        width: D for kernels over layer inputs, H for `kv`.
        itemsize: bytes per element of the pool.
        head_dim: H.

    Raises:
        ValueError: the chip is unknown, or heads are wider than `MAX_HEAD_DIM`.
    """
    chip = check_chip(chip, head_dim)
    tile = _TUNED.get((kernel, chip, heads, width)) or _OF_HEADS.get((kernel, chip, heads))
    tile = tile or _WIDE_HEADS.get((kernel, chip, padded(head_dim)))
    if sum(size for _, size in head_splits(heads)) > _FEW_HEADS:
        tile = tile or _MANY_HEADS.get((kernel, chip))
    tile = tile or _DEFAULTS[kernel, chip]
    if itemsize > 2:
        tile = dataclasses.replace(
            tile,
            tokens=tile.tokens // 2,
            lanes=max(MIN_SIDE, tile.lanes // 2),
            columns=tile.columns // 2,
            stages=2,
        )
    return dataclasses.replace(tile, lanes=min(tile.lanes, padded(width)))


def prefill_tile(chip: str | None, head_dim: int, itemsize: int, num_rows: int, group: int) -> PrefillTile:
    """Return the tile of the prefill kernels, like `tile_for`, but with fewer queries for a short batch.

    Args:
        chip: see `tile_for`.
        head_dim: H.
        itemsize: bytes per element of the pool.
        num_rows: number of query tokens times `group`.
        group: number of query heads per key/value head, rounded up to a power of two; a tile holds all of them for at
            least one token.

    Raises:
        ValueError: the chip is unknown, or heads are wider than `MAX_HEAD_DIM`.
    """
    tile = _PREFILL[check_chip(chip, head_dim), max(128, padded(head_dim))]
    if itemsize > 2:
        tile = dataclasses.replace(tile, queries=tile.queries // 2, keys=max(MIN_SIDE, tile.keys // 2), stages=2)
    return dataclasses.replace(tile, queries=max(min(tile.queries, padded(num_rows)), group))


def padded(size: int) -> int:
    """Return `size` rounded up to a power of two, at least `MIN_SIDE`."""
    return max(MIN_SIDE, 1 << (size - 1).bit_length())


def head_splits(size: int) -> Sequence[tuple[int, int]]:
    """Split `size` heads into one or two padded parts (start, length): 40 into 32 + 16, 72 into 64 + 16, 12 into 16.

    Heads are split into two parts only if this needs less padding.
    """
    whole = padded(size)
    half = whole // 2
    if size > half >= MIN_SIDE and half + padded(size - half) < whole:
        return (0, half), (half, padded(size - half))
    return ((0, whole),)
