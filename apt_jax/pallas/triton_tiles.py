"""Tiles of the Triton kernels: how much of a problem one program takes, by kernel, chip and shape.

Chosen so that no kernel spills registers or asks for more shared memory than a block may have, by registers read from
cubins that were compiled without a GPU; no other tiles have been tried on one. Three facts shape the table:

  * A product's sums stay in registers: 128 lanes x 128 tokens take 64 of a thread's 255 at 8 warps. A kernel that makes
    keys and values together holds two of those, which Hopper affords (its operands come from shared memory) and an
    A100 does not.
  * Where a load's address comes from another load, as where the slot of a position is looked up first, the pipeline
    spends two of its stages on that, and more stages give no more buffers. `output` looks the slots of a step up in the
    step before: all stages but one are buffers.
  * Bytes on their way to a processor, over the latency of memory (about 1 us under load), are what it can read a second:
    an H100 needs 22 KB a processor. What is on its way is all buffers but one of every program there.
  * The buffers share the shared memory of a processor, 164 KiB on an A100, with those of the other programs there.
"""

import dataclasses
from collections.abc import Sequence

CHIPS = ("sm_80", "sm_89", "sm_90")
"""Classes of chips that tiles are chosen for: A100; consumer and inference cards of 99 KiB a block (A10, L4, L40, RTX 30
to 50); H100, H200 and later data center chips."""

SHARED_BYTES = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10}
"""Shared memory that one block may have."""

NUM_PROCESSORS = {"sm_80": 108, "sm_89": 58, "sm_90": 132}
"""Streaming multiprocessors of a chip, which a small batch is split over; of sm_89 those of an L4."""

MAX_HEAD_DIM = 256
"""The widest head that has tiles."""

_SHARED_BYTES_OF = {
    80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10,
    110: 227 << 10, 120: 99 << 10, 121: 99 << 10,
}  # fmt: skip
"""By compute capability (80 for 8.0), from the CUDA programming guide: JAX does not say."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTile:
    """Problem size that one program of a prefill kernel takes at a time; sizes are powers of two."""

    queries: int
    """Rows of a product: query tokens times query heads of a key/value head."""
    keys: int
    """Positions, cached or of the chunk."""
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
"""By kernel and chip: every shape that `_TUNED` does not list. `project_turned` is `project` where keys are rotary or
normed: both halves of a turn and its cosines and sines are in registers."""

_MANY_HEADS: dict[tuple[str, str], Tile] = {
    ("output", "sm_80"): Tile(tokens=64, lanes=128, warps=8, stages=6),
    ("output", "sm_89"): Tile(tokens=64, lanes=128, warps=8, stages=4),
    ("output", "sm_90"): Tile(tokens=64, lanes=128, warps=8, stages=6),
}
"""By kernel and chip: where products have more rows than `_FEW_HEADS`, whose sums take the registers of 8 warps."""
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
"""By kernel, chip and lanes of a head, padded: where the defaults are for narrower heads."""

_OF_HEADS: dict[tuple[str, str, int], Tile] = {
    # Phi-3 and Llama-2-7B within a step: 4 warps spill 8 bytes, at 168 registers.
    ("output", "sm_90", 32): Tile(tokens=64, lanes=128, warps=8, stages=6),
}
"""By kernel, chip and heads, whatever the width."""

_TUNED: dict[tuple[str, str, int, int], Tile] = {
    # GPT-NeoX-20B: three sets of key lanes (24 turned in two halves, 72 not) need more registers at 128 tokens.
    ("reprojected", "sm_80", 64, 6144): Tile(tokens=64, lanes=32, warps=8, stages=4, passes=2),
    ("reprojected", "sm_89", 64, 6144): Tile(tokens=64, lanes=32, warps=8, stages=4, passes=2),
    # Phi-3 with its window: 4 warps spill 8 bytes, at 168 registers.
    ("output", "sm_80", 32, 3072): Tile(tokens=64, lanes=128, warps=8, stages=6),
}
"""By kernel, chip, heads and width, where the default does not fit or something else is faster."""

_PREFILL: dict[tuple[str, int], PrefillTile] = {
    ("sm_80", 128): PrefillTile(queries=128, keys=64, warps=8, stages=3),
    ("sm_89", 128): PrefillTile(queries=128, keys=32, warps=8, stages=3),
    ("sm_90", 128): PrefillTile(queries=128, keys=128, warps=8, stages=3),
    ("sm_80", 256): PrefillTile(queries=64, keys=32, warps=8, stages=3),
    ("sm_89", 256): PrefillTile(queries=64, keys=16, warps=8, stages=3),
    ("sm_90", 256): PrefillTile(queries=64, keys=32, warps=8, stages=3),
}
"""By chip and lanes of a head, padded to 128 at least."""


def chip_for(capability: float) -> str:
    """The class of a GPU, one of `CHIPS`.

    Args:
        capability: its compute capability, 8.0 for an A100.

    Raises:
        ValueError: older than 8.0, which the kernels need.
    """
    if capability < 8.0:
        raise ValueError(f"compute capability {capability:.1f} is too old for the kernels, which need 8.0 or newer")
    # One that is not listed yet gets the tiles that run wherever there are 99 KiB.
    shared = _SHARED_BYTES_OF.get(round(10 * capability), 0)
    return "sm_90" if shared >= SHARED_BYTES["sm_90"] else "sm_80" if shared >= SHARED_BYTES["sm_80"] else "sm_89"


def check_chip(chip: str | None, head_dim: int) -> str:
    """The class of chips to take tiles for; None takes those of sm_80.

    Raises:
        ValueError: the chip is unknown, or heads are wider than any tile.
    """
    chip = chip or CHIPS[0]
    if chip not in CHIPS:
        raise ValueError(f"no tiles for {chip=}; known: {CHIPS}, or None")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"heads of {head_dim} lanes are wider than the {MAX_HEAD_DIM} whose tiles fit {SHARED_BYTES[chip] >> 10} KiB"
            f" of shared memory a block ({chip})"
        )
    return chip


def tile_for(kernel: str, chip: str | None, heads: int, width: int, itemsize: int, head_dim: int = 128) -> Tile:
    """The tile of a kernel: the shape's own, else the default of kernel and chip.

    4-byte elements are for comparisons, not for speed: they get half the tokens and lanes, and two stages, which fits
    where the 2-byte tile does. Loops never step over more lanes than there are.

    Args:
        chip: one of `CHIPS`; None takes the tiles of sm_80, which run on every later chip with 164 KiB a processor.
        heads: query heads.
        width: D for kernels over layer inputs, H for `kv`.
        head_dim: H.

    Raises:
        ValueError: the chip is unknown, or heads are wider than any tile.
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
    """The tile of the prefill kernels: like `tile_for`, and a smaller one for a short batch.

    Args:
        head_dim: H.
        num_rows: query tokens times `group`.
        group: query heads of a key/value head, a power of two; a tile holds all of them for at least one token.
    """
    tile = _PREFILL[check_chip(chip, head_dim), max(128, padded(head_dim))]
    if itemsize > 2:
        tile = dataclasses.replace(tile, queries=tile.queries // 2, keys=max(MIN_SIDE, tile.keys // 2), stages=2)
    return dataclasses.replace(tile, queries=max(min(tile.queries, padded(num_rows)), group))


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
