"""Designs of decode attention over layer inputs compared without a device.

`designs`, of absorbed attention: bytes of device memory and of the L2 cache, launches, and the time that a model with
three constants predicts for an H100.

A program takes `_START_US`, and then what it reads at the rate of the bytes that it has on their way; programs are
given out in their order to as many places as processors have. A kernel takes no less than the device's memory or L2
cache takes for all. The constants are those with which the model gives the times of the two kernels of
`benchmarks/gpu/README.md`'s first run (`benchmarks/results/gpu/`): output 170, 559, 60 us at 30k, 120k and 4k tokens, of
which 173, 525, 61 were measured, without what makes the work list.
"""

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from apt_jax.pallas.triton_tiles import Tile, head_splits
from benchmarks.gpu.problems import ragged
from benchmarks.gpu.shapes import CACHED_TOKENS, PUBLISHED, AttentionShape

_PROCESSORS = 132
_MEMORY_BYTES_US, _L2_BYTES_US = 2.956e6, 6.3e6
"""Rates of an H100: measured as a stream; and the most that a kernel has drawn: reprojection of 30k tokens of OPT-13B, 40.2 GB
in 6.34 ms."""
_PROCESSOR_BYTES_US = 109e3
"""That a processor reads from the L2 cache: 64 bytes a cycle of 1.7 GHz."""
_L2_BYTES = 50e6
_PRODUCT_FLOP_US = 725e6
"""Measured, bfloat16."""
_LATENCY_US, _START_US, _LAUNCH_US = 0.95, 2.0, 4.0
"""A read under load; from a program's start to its first read of layer inputs; a launch, its tail included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pair:
    """Two kernels, scores then output, as compiled for sm_90."""

    name: str
    scores: Tile
    output: Tile
    places: tuple[int, int]
    """Programs that a processor runs at once, by the gate."""
    buffers: tuple[int, int]
    """Buffers of a program that are on their way."""


_PAIRS = (
    _Pair(
        name="two kernels, before",
        scores=Tile(tokens=128, lanes=64, warps=8, stages=3),
        output=Tile(tokens=64, lanes=128, warps=8, stages=5),
        places=(2, 1),
        buffers=(1, 1),
    ),
    _Pair(
        name="two kernels",
        scores=Tile(tokens=64, lanes=64, warps=4, stages=5),
        output=Tile(tokens=64, lanes=128, warps=4, stages=5),
        places=(4, 2),
        buffers=(3, 3),
    ),
)


def _makespan_us(programs: Sequence[float], places: int, bytes_us: float) -> float:
    ends = [0.0] * (places * _PROCESSORS)
    for size in programs:
        heapq.heappush(ends, heapq.heappop(ends) + _START_US + size / bytes_us)
    return max(ends)


def _kernel_us(programs: Sequence[float], places: int, on_their_way: float, memory: float) -> float:
    """Time of a kernel whose programs read so many bytes each."""
    beside = min(places, -(-len(programs) // _PROCESSORS))
    bytes_us = min(on_their_way / _LATENCY_US, _PROCESSOR_BYTES_US / beside)
    within = max(memory / _MEMORY_BYTES_US, sum(programs) / _L2_BYTES_US)
    return _LAUNCH_US + max(within, _makespan_us(programs, places, bytes_us))


def _of_pair(pair: _Pair, shape: AttentionShape, lens: Sequence[int]) -> dict[str, Any]:
    heads, width = shape.num_heads, shape.hidden_size
    rows = sum(size for _, size in head_splits(heads))
    inputs, weights, around = (2.0 * sum(lens) * width, 2.0 * sum(lens) * heads, 2.0 * len(lens) * heads * width)
    tiles = [min(pair.scores.tokens, n - start) for n in lens for start in range(0, n, pair.scores.tokens)]
    of_scores = [2.0 * width * (tokens + heads) for tokens in tiles]
    slices = -(-width // pair.output.lanes)
    of_output = [2.0 * n * (pair.output.lanes + heads) for n in lens for _ in range(slices)]
    on_their_way = [
        2.0 * buffers * size
        for buffers, size in zip(
            pair.buffers,
            (
                pair.scores.lanes * (pair.scores.tokens + rows),
                pair.output.tokens * (pair.output.lanes + rows),
            ),
            strict=True,
        )
    ]
    again = inputs if inputs > _L2_BYTES else 0.0
    first = _kernel_us(of_scores, pair.places[0], on_their_way[0], inputs + around + weights)
    second = _kernel_us(of_output, pair.places[1], on_their_way[1], again + around + weights)
    return {
        "design": pair.name,
        "launches a layer": 3,
        "memory MB": round((inputs + again + 2 * around + 2 * weights) / 1e6),
        "L2 MB": round((sum(of_scores) + sum(of_output) + around + weights) / 1e6),
        "on their way KB": " + ".join(
            str(round(places * size / 1e3)) for places, size in zip(pair.places, on_their_way, strict=True)
        ),
        "H100 us": f"{round(first)} + {round(second)}",
    }


def _in_waves(shape: AttentionShape, lens: Sequence[int]) -> dict[str, Any]:
    """The two kernels over pieces of a third of the L2 cache, one after the other, as launches."""
    width, heads = shape.hidden_size, shape.num_heads
    found = _of_pair(_PAIRS[1], shape, lens)
    inputs, around = 2.0 * sum(lens) * width, 2.0 * len(lens) * heads * width
    waves = max(1, round(inputs / (_L2_BYTES / 3)))
    memory = inputs + 2 * around
    time = 2 * waves * (_LAUNCH_US + _START_US) + max(memory / _MEMORY_BYTES_US, 1e6 * found["L2 MB"] / _L2_BYTES_US)
    row = {"design": "in waves", "launches a layer": 2 * waves + 1, "memory MB": round(memory / 1e6)}
    return found | row | {"on their way KB": "", "H100 us": str(round(time))}


def _exchanged(shape: AttentionShape, lens: Sequence[int], tokens: int = 64, lanes: int = 256) -> dict[str, Any]:
    """One launch: programs have a slice of the lanes, sum scores through the L2 cache and then read their lanes again.

    Compiled for sm_90 it takes 215 to 236 registers, so that a processor runs one program of 8 warps (16 warps or 4
    spill), and tiles follow each other: scores, parts written and counted, P awaited, output.
    """
    width, heads = shape.hidden_size, shape.num_heads
    slices = -(-width // lanes)
    inputs, around = 2.0 * sum(lens) * width, 2.0 * len(lens) * heads * width
    tiles = sum(-(-n // tokens) for n in lens)
    parts, p = 4.0 * heads * tokens * tiles * slices, 2.0 * heads * tokens * tiles
    l2 = 2 * inputs + 2.0 * heads * width * tiles + 2 * parts + p * (1 + slices) + around
    memory = inputs + 2 * around + min(parts, 8.0 * heads * tokens * slices * len(lens))
    waits = 4 * _LATENCY_US + 1.5  # two counters, the parts, and P
    each = waits + 2.0 * lanes * (2 * tokens + heads) / _PROCESSOR_BYTES_US
    time = max(memory / _MEMORY_BYTES_US, l2 / _L2_BYTES_US, each * tiles * slices / _PROCESSORS)
    return {
        "design": "one launch, parts exchanged",
        "launches a layer": 3,
        "memory MB": round(memory / 1e6),
        "L2 MB": round(l2 / 1e6),
        "on their way KB": "14",
        "H100 us": str(round(_LAUNCH_US + time)),
    }


def designs() -> Iterator[dict[str, Any]]:
    """OPT-13B, 64 ragged rows, 16 bits."""
    shape = PUBLISHED["opt-13b"]
    for tokens in CACHED_TOKENS:
        lens = ragged(tokens, 64, seed=2)
        rows = [_of_pair(pair, shape, lens) for pair in _PAIRS]
        for row in (*rows, _in_waves(shape, lens), _exchanged(shape, lens)):
            yield {"tokens": tokens} | row


_PROJECTIONS = (
    ("decode_reprojected", "opt-13b", 256, 128, "215 registers (in use)"),
    ("decode_reprojected", "opt-13b", 128, 128, "keys, then values: `passes=2`"),
    ("rotary_scores", "llama-2-7b", 128, 128, "208 registers (in use)"),
    ("rotary_scores", "llama-2-7b", 256, 64, "`columns=128, tokens=64`: 226 registers"),
    ("rotary_scores", "llama-2-7b", 256, 128, "`columns=128`: 186 spills, after the product"),
    ("rotary_scores", "llama-2-7b", 128, 256, "`tokens=256`: 119 spills, after the product"),
)
"""Kernel, model, rows of weights and positions of a tile, and what the gate's compiler says of it."""


def projections() -> Iterator[dict[str, Any]]:
    """64 ragged rows of 30,000 tokens together, 16 bits: GB from the L2 cache, and milliseconds that it takes for them,
    beside those of the operations at the measured rate of products."""
    lens = ragged(CACHED_TOKENS[1], 64, seed=2)
    for kernel, model, rows, positions, compiled in _PROJECTIONS:
        shape = PUBLISHED[model]
        width, of_all = shape.hidden_size, shape.num_kv_heads * shape.head_dim
        of_all *= 2 if kernel == "decode_reprojected" else 1
        groups, tiles = of_all / rows, sum(-(-n // positions) for n in lens)
        moved = 2.0 * width * groups * (rows * tiles + sum(lens))
        yield {
            "kernel": kernel,
            "model": model,
            "rows x positions": f"{rows} x {positions}",
            "operations a byte": round(rows * positions / (rows + positions)),
            "L2 GB": round(moved / 1e9, 1),
            "L2 ms": round(moved / _L2_BYTES_US / 1e3, 2),
            "products ms": round(2.0 * width * of_all * sum(lens) / _PRODUCT_FLOP_US / 1e3, 2),
            "compiled for sm_90": compiled,
        }
