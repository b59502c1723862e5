"""Tiles of the Triton kernels: how much of a problem one program takes, by kernel, chip and shape.

Chosen so that no kernel spills registers on either chip, for 32 to 72 heads of 128 lanes at 16 bits, by registers read
from cubins that were compiled for both without a GPU; not yet timed on one. Three facts shape the table:

  * A product's sums stay in registers: 128 lanes x 128 tokens take 64 of a thread's 255 at 8 warps. A kernel that makes
    keys and values together holds two of those, which Hopper affords (its operands come from shared memory) and an
    A100 does not.
  * Where a load's address comes from another load, as where the slot of a position is looked up first, the pipeline
    spends two of its stages on that: `output` needs 5 for two buffers of layer inputs, as 3 or 4 give one.
  * The buffers share the shared memory of a processor, 164 KiB on an A100, with those of the other programs there.
"""

import dataclasses
from collections.abc import Sequence

CHIPS = ("sm_80", "sm_90")
"""A100, and H100 or H200."""

NUM_PROCESSORS = {"sm_80": 108, "sm_90": 132}
"""Streaming multiprocessors of a chip, which a small batch is split over."""

MIN_SIDE = 16
"""Smallest side of a matrix product on the tensor cores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """Problem size that one program of a kernel takes at a time; sizes are powers of two."""

    tokens: int
    """Cached positions."""
    lanes: int
    """Elements of a slot: the step of the loop over D, or the output lanes of `output`."""
    warps: int
    """Warps a program."""
    stages: int
    """Depth of the pipeline that copies from device memory."""
    passes: int = 1
    """`reprojected` only: loops over D. 1 makes keys and values together; 2 reads layer inputs twice, mostly from the
    L2 cache, and needs half the accumulators. With a turn there are always two."""
    columns: int = 0
    """`rotary_scores` only: projected lanes of one half of a turn, over all heads of a program."""

    def __post_init__(self) -> None:
        for name in ("tokens", "lanes", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")


_DEFAULTS = {
    ("kv", "sm_80"): Tile(tokens=64, lanes=128, warps=4, stages=3),
    ("kv", "sm_90"): Tile(tokens=64, lanes=128, warps=4, stages=3),
    ("scores", "sm_80"): Tile(tokens=64, lanes=64, warps=4, stages=3),
    ("scores", "sm_90"): Tile(tokens=64, lanes=64, warps=4, stages=3),
    ("output", "sm_80"): Tile(tokens=64, lanes=128, warps=8, stages=5),
    ("output", "sm_90"): Tile(tokens=64, lanes=128, warps=8, stages=5),
    ("reprojected", "sm_80"): Tile(tokens=128, lanes=32, warps=8, stages=4, passes=2),
    ("reprojected", "sm_90"): Tile(tokens=128, lanes=32, warps=8, stages=4, passes=1),
    ("rotary_scores", "sm_80"): Tile(tokens=128, lanes=32, warps=8, stages=4, columns=64),
    ("rotary_scores", "sm_90"): Tile(tokens=128, lanes=32, warps=8, stages=4, columns=64),
}
"""By kernel and chip: every shape that `_TUNED` does not list."""

_TUNED: dict[tuple[str, str, int, int], Tile] = {
    # GPT-NeoX-20B: three sets of key lanes (24 turned in two halves, 72 not) need more registers at 128 tokens.
    ("reprojected", "sm_80", 64, 6144): Tile(tokens=64, lanes=32, warps=8, stages=4, passes=2),
}
"""By kernel, chip, heads and width, where the default does not fit or something else is faster."""


def tile_for(kernel: str, chip: str | None, heads: int, width: int, itemsize: int) -> Tile:
    """The tile of a kernel: the shape's own, else the default of kernel and chip.

    4-byte elements are for comparisons, not for speed: they get half the tokens and lanes, and two stages, which fits
    where the 2-byte tile does. Loops never step over more lanes than there are.

    Args:
        chip: one of `CHIPS`; None takes the tiles of sm_80, which run on every later chip with 164 KiB a processor.
        heads: query heads.
        width: D for kernels over layer inputs, H for `kv`.

    Raises:
        ValueError: the chip is unknown.
    """
    chip = chip or CHIPS[0]
    if chip not in CHIPS:
        raise ValueError(f"no tiles for {chip=}; known: {CHIPS}, or None")
    tile = _TUNED.get((kernel, chip, heads, width)) or _DEFAULTS[kernel, chip]
    if itemsize > 2:
        tile = dataclasses.replace(
            tile,
            tokens=tile.tokens // 2,
            lanes=max(MIN_SIDE, tile.lanes // 2),
            columns=tile.columns // 2,
            stages=2,
        )
    return dataclasses.replace(tile, lanes=min(tile.lanes, padded(width)))


def padded(size: int) -> int:
    """The power of two, at least `MIN_SIDE`, that holds `size`."""
    return max(MIN_SIDE, 1 << (size - 1).bit_length())


def head_splits(size: int) -> Sequence[tuple[int, int]]:
    """`size` heads as one or two powers of two (start, length): 40 as 32 + 16, 72 as 64 + 16, 12 as 16.

    Two where that leaves fewer heads over than one.
    """
    whole = padded(size)
    half = whole // 2
    if size > half >= MIN_SIDE and half + padded(size - half) < whole:
        return (0, half), (half, padded(size - half))
    return ((0, whole),)


def num_splits(chip: str | None, programs: int, tiles: int) -> int:
    """Pieces that a row's context is cut into, so that a small batch fills the chip about twice."""
    wanted = -(-2 * NUM_PROCESSORS[chip or CHIPS[0]] // programs)
    return max(1, min(wanted, tiles, 32))
