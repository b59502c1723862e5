"""Tiles of the Triton kernels: how much of a problem one program takes, by kernel, chip and shape.

Chosen so that no kernel spills registers on either chip (compiled for both with ptxas, registers read from the cubins).
Two limits shape the table. A block of a row's context is multiplied in one piece, so accumulators must fit the
registers: 64 heads x 128 lanes take 64 of a thread's 255 at 4 warps, 128 tokens x 256 lanes take 128 at 8 warps. And
the pipeline keeps `stages - 1` (or `stages`, on Hopper) slices of both operands in shared memory: 164 KiB on an A100.
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
    """What one program of a kernel takes at a time; sizes are powers of two."""

    tokens: int
    """Cached positions."""
    lanes: int
    """Elements of a slot: the step of the loop over D, or the output lanes of `output`."""
    warps: int
    """Warps a program."""
    stages: int
    """Depth of the pipeline that copies from device memory."""
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
    ("output", "sm_80"): Tile(tokens=64, lanes=128, warps=4, stages=3),
    ("output", "sm_90"): Tile(tokens=64, lanes=128, warps=4, stages=3),
    ("reprojected", "sm_80"): Tile(tokens=128, lanes=32, warps=8, stages=4),
    ("reprojected", "sm_90"): Tile(tokens=128, lanes=32, warps=8, stages=4),
    ("rotary_scores", "sm_80"): Tile(tokens=128, lanes=32, warps=8, stages=4, columns=128),
    ("rotary_scores", "sm_90"): Tile(tokens=128, lanes=32, warps=8, stages=4, columns=128),
}
"""By kernel and chip: every shape that `_TUNED` does not list."""

_TUNED: dict[tuple[str, str, int, int], Tile] = {}
"""By kernel, chip, heads and width, where something better than the default was measured."""


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


def parts_of(size: int) -> Sequence[tuple[int, int]]:
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
