"""Prefill attention for NVIDIA GPUs, in Pallas' interpreter, against its reference."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from apt_jax.ops.calls import LogitModifiers
from apt_jax.pallas import triton_prefill
from apt_jax.pallas.triton_hidden_prefix import plan_prefixes
from apt_jax.pallas.triton_queries import LOG2_E, Scores, query_tiles
from apt_jax.pallas.triton_tiles import CHIPS, prefill_tile, tile_for
from benchmarks.gpu.shapes import SMALL, AttentionShape
from tests.support.attention_cases import expected_prefill
from tests.support.cases import cover
from tests.support.op_calls import flat

BLOCK = 16
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 2e-3}
"""Relative to the largest output: one layer's attention output."""
CHUNKS = (1, 80, 37, 0, 40, 5, 4)
PREFIXES = (9, 0, 70, 20, 67, 6, 30)
"""Cached tokens; rows 5 and 6 are beyond `num_rows` in some cases."""

run = jax.jit(
    flat(triton_prefill.prefill),
    static_argnames=("block_size", "with_hidden", "interpret", "chip", "tensor", "piece_positions", "room"),
)


def case(
    shape: AttentionShape,
    dtype: str,
    *,
    chunks: tuple[int, ...] = CHUNKS,
    prefixes: tuple[int, ...] = PREFIXES,
    num_rows: int | None = None,
    hidden: tuple[bool, ...] | None = None,
    shared: bool = False,
    bias: bool = True,
    seed: int = 0,
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of `prefill`: slots that no row owns hold NaN. `shared`: last blocks in pairs, grown towards each
    other."""
    rng = np.random.default_rng(seed)
    n, k, h, lanes = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.lane
    batch, entries = len(chunks), -(-max(1, *prefixes) // BLOCK)
    free = list(1 + rng.permutation(2 * batch * entries + 3).astype(np.int32))
    pool = np.full((len(free) + 1, BLOCK, lanes), np.nan, np.float32)
    tables = np.zeros((batch, 2, entries), np.int32)
    ranges = np.zeros((batch, entries, 2), np.int32)
    before = (
        np.zeros(2, np.int32),
        BLOCK,
    )  # the last block of the row before, and how many slots of it are taken
    for r, length in enumerate(prefixes):
        for j in range(-(-length // BLOCK)):
            count = min(BLOCK, length - j * BLOCK)
            last = (j + 1) * BLOCK >= length
            if shared and last and before[1] + count <= BLOCK:
                tables[r, :, j], ranges[r, j] = before[0], (BLOCK, BLOCK - count)
                before = (before[0], BLOCK)
            else:
                tables[r, :, j], ranges[r, j] = (free.pop(), free.pop()), (0, count)
                before = (tables[r, :, j], count) if last else before
            low, high = sorted(ranges[r, j])
            for block in tables[r, :, j]:
                assert np.isnan(pool[block, low:high]).all()
                pool[block, low:high] = rng.standard_normal((count, lanes))

    def normal(size: tuple[int, ...], scale: float = 1.0) -> Any:
        return jnp.asarray((scale * rng.standard_normal(size)).astype(np.float32).astype(jnp.dtype(dtype)))

    offsets = np.concatenate([[0], np.cumsum(chunks)[:-1]])
    tokens = sum(chunks) + 3
    weight, b = (k, h, lanes), (k, h)
    if hidden is None:
        hidden = tuple(r % 2 == 0 for r in range(batch))
    arguments = [
        *(normal((tokens, heads, h)) for heads in (n, k, k)),
        jnp.asarray(pool.astype(jnp.dtype(dtype))),
        jnp.asarray(tables),
        *(jnp.asarray(a, jnp.int32) for a in (offsets, chunks, prefixes)),
        jnp.asarray(hidden),
        jnp.int32(batch if num_rows is None else num_rows),
        normal(weight, lanes**-0.5),
        normal(b) if bias else None,
        normal(weight, lanes**-0.5),
        normal(b) if bias else None,
    ]
    named: dict[str, Any] = {"block_size": BLOCK, "with_hidden": any(hidden)}
    if shape.rotary_dim:
        half = shape.rotary_dim // 2
        frequency = 1e4 ** -(np.arange(half) / half)
        named["angles"] = jnp.asarray((np.arange(max(prefixes))[:, None] * frequency).astype(np.float32))
    if shared:
        named["slot_ranges"] = jnp.asarray(ranges)
    return arguments, named


def check(arguments: list[Any], named: dict[str, Any], dtype: str) -> np.ndarray:
    actual = np.asarray(run(*arguments, **named, interpret=True), np.float64)
    wanted = np.asarray(expected_prefill(arguments, named), np.float64)
    assert np.isfinite(wanted).all()
    assert np.abs(actual - wanted).max() <= TOLERANCE[dtype] * np.abs(wanted).max()
    return actual


# The layouts that are left out here are those of the tests below, or of the same class as others.
@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    "layout",
    cover(
        [name for name in SMALL if name != "twelve-heads"],
        ["grouped-by-three", "grouped-rotary", "seventy-two-heads"],
    ),
)
def test_head_layouts(layout: str) -> None:
    arguments, named = case(SMALL[layout], "float32", num_rows=5)
    actual = check(arguments, named, "float32")
    assert not actual[int(arguments[5][5]) :].any()


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("width-80", "bfloat16"), ("partial-rotary", "float16"), ("grouped", "float32")],
)
def test_dtypes_in_shared_blocks(layout: str, dtype: str) -> None:
    arguments, named = case(SMALL[layout], dtype, shared=True, bias=dtype == "bfloat16", seed=1)
    actual = check(arguments, named, dtype)
    again = np.asarray(run(*arguments, **named, interpret=True), np.float64)
    np.testing.assert_array_equal(actual, again)


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("dtype", "shared"),
    cover(
        [("float32", True), ("bfloat16", False), ("float16", True)],
        [("float32", True)],
    ),
)
def test_few_tokens_absorb_the_projections(dtype: str, shared: bool) -> None:
    """No more tokens than lanes of a head: scores come from absorbed queries, and both parts join."""
    arguments, named = case(
        AttentionShape(name="wide-head", num_heads=2, num_kv_heads=2, head_dim=64),
        dtype,
        chunks=(1, 33, 0, 5, 8),
        prefixes=(150, 70, 3, 6, 2),
        hidden=(True, True, True, False, True),
        shared=shared,
    )
    actual = check(arguments, named, dtype)
    if not shared:  # as much as the longest row has, rounded up to whole tiles
        np.testing.assert_array_equal(
            actual, np.asarray(run(*arguments, **named, interpret=True, room=256), np.float64)
        )


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize("chip", cover(["sm_80", "sm_90"], ["sm_90"]))  # other tests take the tiles of sm_80
def test_one_long_chunk_spans_several_programs(chip: str) -> None:
    arguments, named = case(SMALL["one-head"], "bfloat16", chunks=(3, 620), prefixes=(0, 300), hidden=(False, True))
    named["chip"] = chip
    actual = np.asarray(run(*arguments, **named, interpret=True))
    del named["chip"]
    wanted = np.asarray(expected_prefill(arguments, named))
    assert np.abs(actual - wanted).max() <= TOLERANCE["bfloat16"] * np.abs(wanted).max()


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize("window", [None, 1, 200])
def test_tiles_that_every_query_sees_lie_between_those_with_a_mask(window: int | None) -> None:
    """Tiles of 64 keys in the cache and in the chunk: before the window, cut by it, whole, and cut by the diagonal or the
    end."""
    arguments, named = case(
        SMALL["grouped"], "float32", chunks=(2, 330), prefixes=(20, 333), hidden=(False, False), seed=2
    )
    if window is not None:
        named["rules"] = LogitModifiers(window=window)
    wanted = np.asarray(expected_prefill(arguments, named))
    actual = np.asarray(run(*arguments, **named, interpret=True, chip="sm_90"))
    assert np.abs(actual - wanted).max() <= TOLERANCE["float32"] * np.abs(wanted).max()


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_exponentials_are_instructions_of_the_chip(softcap: float | None) -> None:
    """The interpreter cannot run them: of the text that the compiler gets, the factor is read back."""
    arguments, named = case(SMALL["one-head"], "bfloat16", chunks=(9,), prefixes=(0,), hidden=(False,))
    named["rules"] = None if softcap is None else LogitModifiers(softcap=softcap)
    jaxpr = str(jax.make_jaxpr(lambda *a: flat(triton_prefill.prefill)(*a, **named))(*arguments))
    assert "exp2 " not in jaxpr
    scale = SMALL["one-head"].head_dim ** -0.5 * LOG2_E
    factors = {scale, 1.0} if softcap is None else {2 * scale / softcap, 1.0}
    found = {np.array([int(text, 16)], np.uint32).view(np.float32)[0] for text in re.findall(r"0f([0-9A-F]{8})", jaxpr)}
    assert found == {np.float32(factor) for factor in factors}
    assert jaxpr.count("ex2.approx.ftz.f32") == jaxpr.count("fma.rn.f32")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_pieces_of_prefixes_begin_at_whole_tiles_of_keys(head_dim: int, itemsize: int) -> None:
    for chip in CHIPS:
        keys = prefill_tile(chip, head_dim, itemsize, 8192, 1).keys
        for kernel in ("project", "project_turned"):
            assert tile_for(kernel, chip, 8, 4096, itemsize, head_dim).tokens % keys == 0


@pytest.mark.in_turn(14, group="kernels in interpreters")
def test_prefixes_are_taken_in_pieces() -> None:
    """Pieces of two tiles of 128 positions: the first row lies in the first, the second in both."""
    arguments, named = case(SMALL["one-head"], "float32", chunks=(30, 40), prefixes=(100, 200), hidden=(True, True))
    wanted = np.asarray(expected_prefill(arguments, named))
    actual = np.asarray(run(*arguments, **named, interpret=True, piece_positions=256))
    assert np.abs(actual - wanted).max() <= TOLERANCE["float32"] * np.abs(wanted).max()


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """All features and heads are its own."""

    size: int = 1

    def sum(self, x: Any) -> Any:
        return x

    def scatter_sum(self, x: Any, axis: int) -> Any:
        return x

    def gather(self, x: Any, axis: int) -> Any:
        return x


@pytest.mark.in_turn(14, group="kernels in interpreters")
def test_prefixes_over_devices_are_taken_as_far_as_they_reach() -> None:
    """Pieces of a tile of 128 positions in a loop; rows share blocks."""
    rows = {"chunks": (3, 30, 5), "prefixes": (20, 200, 12), "hidden": (True, True, True)}
    arguments, named = case(SMALL["one-head"], "float32", **rows, shared=True)
    wanted = np.asarray(expected_prefill(arguments, named))
    actual = np.asarray(run(*arguments, **named, interpret=True, tensor=OneDevice(), piece_positions=128))
    assert np.abs(actual - wanted).max() <= TOLERANCE["float32"] * np.abs(wanted).max()


def test_windows_leave_out_what_no_query_sees() -> None:
    lens = jnp.asarray([700, 130, 0, 1000], jnp.int32)
    plain, windowed = (
        plan_prefixes(lens, Scores(scale=1.0, softcap=None, window=window), 1024, 64, 8192) for window in (None, 200)
    )
    assert (plain.begins.tolist(), int(plain.count[0])) == ([0, 0, 0, 0], 11 + 3 + 0 + 16)
    assert windowed.begins.tolist() == [448, 0, 0, 768]
    assert windowed.tiles.shape[0] == 4 * 5
    tiles = windowed.tiles[: int(windowed.count[0])].tolist()
    assert tiles == [
        [row, first, length]
        for row, length in enumerate(lens.tolist())
        for first in range(windowed.begins.tolist()[row], length, 64)
    ]
    assert not windowed.tiles[len(tiles) :, 2].any()


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("rows", "room", "tiles", "per_piece"),
    [
        (1, None, 8, 8),
        (64, None, 512, 32),
        (4096, None, 32_768, 32),
        (4096, 8192, 32, 32),
        (4, 8192, 32, 32),
        (1, 8192, 8, 8),
    ],
)
def test_work_and_memory_are_those_of_the_room(rows: int, room: int | None, tiles: int, per_piece: int) -> None:
    """Contexts of 2,048 positions in tiles of 256, pieces of 8,192."""
    lens = jnp.zeros(rows, jnp.int32)
    plan = plan_prefixes(lens, Scores(scale=1.0, softcap=None, window=None), 2048, 256, 8192, room)
    assert (plan.tiles.shape[0], plan.per_piece) == (tiles, per_piece)


def launched(monkeypatch: pytest.MonkeyPatch, arguments: list[Any], named: dict[str, Any]) -> list[str]:
    """Names of the kernels that `prefill` launches, in order of tracing; a loop's once."""
    names = []
    original = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *a, **k: names.append(k["name"]) or original(*a, **k))
    jax.eval_shape(lambda *a: flat(triton_prefill.prefill)(*a, **named, interpret=True), *arguments)
    monkeypatch.undo()
    return names


@pytest.mark.parametrize(
    ("room", "pieces"),
    [(256, 1), (512, 2), (768, 3), (1024, 4), (1280, 4), (None, 4)],
)
def test_kernels_are_launched_for_the_room(monkeypatch: pytest.MonkeyPatch, room: int | None, pieces: int) -> None:
    """Two rows of up to 512 positions, and pieces of 256."""
    arguments, named = case(SMALL["one-head"], "float32", chunks=(30, 40), prefixes=(100, 500), hidden=(True, True))
    names = launched(monkeypatch, arguments, named | {"room": room, "piece_positions": 256})
    # All pieces but the first are traced together.
    assert names.count("prefix_project") == names.count("prefix_attend") == min(pieces, 2)
    assert names[-1] == "prefill_chunk"


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("prefixes", "room"),
    [((256, 100), 512), ((256, 257), 768), ((100, 0), 256), ((300, 520), 1280), ((700, 830), None)],
)
@pytest.mark.parametrize("rules", [None, LogitModifiers(window=150, softcap=3.0)])
def test_prefixes_fill_the_room_or_less_of_it(
    prefixes: tuple[int, int], room: int | None, rules: LogitModifiers | None
) -> None:
    """Pieces of 256 positions, launched for the room, and where there may be more than four, in a loop."""
    more = {"chunks": (3, 9), "hidden": (True, True)}
    arguments, named = case(SMALL["one-head"], "float32", prefixes=prefixes, **more)
    if rules is not None:
        named["rules"] = rules
    wanted = np.asarray(expected_prefill(arguments, named))
    actual = np.asarray(run(*arguments, **named, interpret=True, room=room, piece_positions=256))
    assert np.abs(actual - wanted).max() <= TOLERANCE["float32"] * np.abs(wanted).max()


@pytest.mark.in_turn(14, group="kernels in interpreters")
def test_many_short_chunks_share_programs() -> None:
    """More tiles of query tokens than programs: each takes several."""
    arguments, named = case(
        SMALL["one-head"], "float32", chunks=(2, 1, 0, *[2] * 15), prefixes=(40, 0, 3, *[0] * 14, 20), hidden=(True, *[False] * 17)
    )  # fmt: skip
    offsets, lens, _, _ = (jnp.asarray(a, jnp.int32) for a in (arguments[5], arguments[6], arguments[7], arguments[7]))
    tiles = query_tiles(offsets, lens, lens, lens, arguments[0].shape[0], 64)
    assert (int(tiles.count[0]), tiles.programs) == (17, 8)
    check(arguments, named, "float32")


def test_more_query_heads_of_one_key_head_than_a_tile_has_rows() -> None:
    shape = AttentionShape(name="multi-query", num_heads=71, num_kv_heads=1, head_dim=16)
    chunks, prefixes = (3, 9, 1), (5, 0, 40)
    arguments, named = case(shape, "float32", chunks=chunks, prefixes=prefixes, hidden=(False,) * 3)
    check(arguments, named, "float32")


@pytest.mark.slow  # the test before has nothing hidden either
def test_nothing_hidden() -> None:
    arguments, named = case(SMALL["three-heads"], "float32", hidden=(False,) * len(CHUNKS))
    assert not named["with_hidden"]
    check(arguments, named, "float32")


@pytest.mark.in_turn(14, group="kernels in interpreters")
def test_no_rows_give_zeros() -> None:
    arguments, named = case(SMALL["grouped-rotary"], "float32", num_rows=0)
    assert not np.asarray(run(*arguments, **named, interpret=True)).any()


def test_wrong_arguments_are_errors() -> None:
    arguments, named = case(SMALL["three-heads"], "float32")
    with pytest.raises(ValueError, match="no tiles for chip='sm_70'"):
        flat(triton_prefill.prefill)(*arguments, **named, chip="sm_70")
    named["block_size"] = 8
    with pytest.raises(ValueError, match="do not hold block_size=8"):
        flat(triton_prefill.prefill)(*arguments, **named)
