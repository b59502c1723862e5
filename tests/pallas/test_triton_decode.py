"""The Triton decode kernels in Pallas' interpreter against the float32 references, over a poisoned pool."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.pallas import (
    triton_decode_absorbed,
    triton_decode_kv,
    triton_decode_reprojected,
    triton_decode_v_absorbed,
    triton_tiles,
)
from apt_jax.pallas.triton_tiles import CHIPS, Tile, head_splits, padded, tile_for
from benchmarks.gpu.shapes import PUBLISHED, RAGGED_LENGTHS, SMALL
from tests.support.attention_cases import expected_decode
from tests.support.cases import cover
from tests.support.op_calls import flat

TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 2e-3}
"""Tolerance of one layer's attention output, relative to its largest value."""

LENGTHS = [0, 1, 15, 16, 17, 65, 129]

OPS = {
    "decode_kv": triton_decode_kv.decode_kv,
    "decode_absorbed": triton_decode_absorbed.decode_absorbed,
    "decode_reprojected": triton_decode_reprojected.decode_reprojected,
    "decode_v_absorbed": triton_decode_v_absorbed.decode_v_absorbed,
}


@dataclasses.dataclass(kw_only=True)
class Case:
    """The arguments of one call, over a pool that is NaN wherever no row of the call has a position."""

    op: str
    args: list[Any]
    """Positional: queries, pool, tables, lengths, weights."""
    options: dict[str, Any]
    """Arrays by keyword."""
    block_size: int
    dtype: str

    @property
    def pool_at(self) -> int:
        """Where the pool is in `args`; tables and lengths follow it."""
        return 2 if self.op == "decode_v_absorbed" else 1

    def expected(self, **more: Any) -> np.ndarray:
        return expected_decode(self.op, *self.args, **self.options, **more, block_size=self.block_size)

    def actual(self, **more: Any) -> np.ndarray:
        """The op in the interpreter."""
        return np.asarray(_kernel(self.op)(*self.args, **self.options, **more, block_size=self.block_size))

    def check(self, **more: Any) -> np.ndarray:
        """Compare with the reference; the result."""
        pool = self.args[self.pool_at]
        before = np.asarray(pool).tobytes()
        actual = self.actual(**more)
        _close(actual, self.expected(), self.dtype)
        assert not actual[np.asarray(self.args[self.pool_at + 2]) == 0].any()
        assert np.asarray(pool).tobytes() == before
        return actual


@functools.cache
def _kernel(op: str) -> Any:
    static = ("block_size", "out_dtype") if op == "decode_absorbed" else "block_size"
    return jax.jit(functools.partial(flat(OPS[op], op), interpret=True), static_argnames=static)


def _close(actual: Any, expected: Any, dtype: str) -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max()


def _case(
    op: str,
    shape_name: str,
    dtype: str,
    lens: list[int],
    *,
    block_size: int = 16,
    shared: bool = False,
    facing: bool = False,
    biases: bool = True,
) -> Case:
    """A case with blocks in random order; block 0, and two that no table names, are all NaN.

    Args:
        shared: a row has the same full blocks as the one before, as requests with a common prefix do.
        facing: rows are pairs, the first upwards, the second downwards; their last blocks are one where both fit.
    """
    shape = SMALL[shape_name]
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    rng = np.random.default_rng(len(lens) + heads)
    batch, width, halves = len(lens), shape.hidden_size, 2 if op == "decode_kv" else 1
    lane = shape.lane if op == "decode_kv" else width
    entries = -(-max(*lens, 1) // block_size)
    num_blocks = 3 + batch * halves * entries
    free = list(2 + rng.permutation(num_blocks - 3))
    pool = np.full((num_blocks, block_size, lane), np.nan, np.float32)
    tables = np.zeros((batch, halves, entries), np.int32)
    ranges = np.zeros((batch, entries, 2), np.int32)
    for b, length in enumerate(lens):
        down = facing and b % 2 == 1
        for j in range(-(-length // block_size)):
            own = min(block_size, length - j * block_size)
            met = lens[b - 1] % block_size if down else 0
            if met and 0 < own <= block_size - met:
                tables[b, :, j] = tables[b - 1, :, lens[b - 1] // block_size]
            elif shared and b and min(length, lens[b - 1]) >= (j + 1) * block_size:
                tables[b, :, j] = tables[b - 1, :, j]
            else:
                tables[b, :, j] = [free.pop() for _ in range(halves)]
            first = block_size - own if down else 0
            ranges[b, j] = (block_size, first) if down else (0, own)
            for block in tables[b, :, j]:
                pool[block, first : first + own] = rng.standard_normal((own, lane))

    def normal(*dims: int, scale: float = 1.0) -> Any:
        return jnp.asarray((scale * rng.standard_normal(dims)).astype(np.float32).astype(jnp.dtype(dtype)))

    args = [
        jnp.asarray(pool.astype(jnp.dtype(dtype))),
        jnp.asarray(tables if halves == 2 else tables[:, 0]),
        jnp.asarray(lens, jnp.int32),
    ]
    options: dict[str, Any] = {"slot_ranges": jnp.asarray(ranges)} if facing else {}
    weights = (kv_heads, head_dim, width)
    rotary = shape.rotary_dim
    angles = 3 * rng.standard_normal((entries * block_size, rotary // 2))
    angles = jnp.asarray(angles.astype(np.float32)) if rotary else None
    if op == "decode_absorbed":
        args = [normal(batch, heads, width, scale=width**-0.5), *args]
    elif op == "decode_v_absorbed":
        rest = normal(batch, heads, width, scale=width**-0.5) if rotary < head_dim else None
        args = [normal(batch, heads, rotary, scale=rotary**-0.5), rest, *args]
        args += [normal(heads, rotary, width, scale=width**-0.5)]
        args += [normal(heads, rotary) if biases else None, angles]
    else:
        args = [normal(batch, heads, head_dim), *args]
    if op == "decode_reprojected":
        for _ in range(2):
            args += [normal(*weights, scale=width**-0.5)]
            args += [normal(kv_heads, head_dim) if biases else None]
        options["angles"] = angles
    return Case(op=op, args=args, options=options, block_size=block_size, dtype=dtype)


# Tests below run every op in the dtypes that are left out here.
@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    cover(
        [
            (op, shape, dtype)
            for dtype in TOLERANCE
            for op, shape in (
                ("decode_kv", "grouped"),
                ("decode_absorbed", "twelve-heads"),
                ("decode_reprojected", "three-heads"),
                ("decode_v_absorbed", "partial-rotary"),
            )
        ],
        [("decode_v_absorbed", "partial-rotary", "float16")],
    ),
)
def test_ops_match_their_references_in_every_dtype(op: str, shape: str, dtype: str) -> None:
    _case(op, shape, dtype, LENGTHS).check()


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("op", "shape"),
    cover(
        [
            *(("decode_kv", shape) for shape in ("one-head", "width-80", "grouped-by-three")),
            *(("decode_absorbed", shape) for shape in ("one-head", "width-80", "seventy-two-heads")),
            *(("decode_reprojected", shape) for shape in ("width-80", "rotary", "partial-rotary")),
            ("decode_reprojected", "grouped-rotary"),
            ("decode_v_absorbed", "rotary"),
        ],
        [
            *(("decode_kv", shape) for shape in ("one-head", "grouped-by-three")),
            *(("decode_absorbed", shape) for shape in ("width-80", "seventy-two-heads")),
            *(("decode_reprojected", shape) for shape in ("width-80", "partial-rotary", "grouped-rotary")),
        ],
    ),
)
def test_heads_and_widths_that_are_no_powers_of_two(op: str, shape: str) -> None:
    _case(op, shape, "float16", [0, 33, 129], block_size=8, biases=False).check()


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize("op", OPS)
def test_ragged_lengths_twice_with_the_same_bits(op: str) -> None:
    case = _case(op, "rotary", "bfloat16", list(RAGGED_LENGTHS), shared=True)
    np.testing.assert_array_equal(case.check(), case.actual())


FACING = [17, 66, 1, 3, 0, 5, 64, 40]


def _facing(op: str, lens: list[int]) -> tuple[Case, dict[str, Any]]:
    """A case with slot ranges and all its rows as `rows`; for eight rows of up to 66, one program."""
    return _case(op, "rotary", "float32", lens, block_size=4, facing=True), {"rows": (jnp.int32(0), jnp.int32(8))}


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize("op", OPS)
def test_two_requests_in_one_block(op: str) -> None:
    case, every_row = _facing(op, FACING)
    tables = np.asarray(case.args[case.pool_at + 1]).reshape(8, -1)
    assert len(np.intersect1d(tables[2], tables[3][tables[3] > 0]))  # 1 upwards meets 3 downwards
    case.check(**every_row)


@pytest.mark.parametrize("op", OPS)
def test_ranges_shorter_than_a_block(op: str) -> None:
    """Slots that a range leaves out are no positions, wherever they are in the row."""
    case, every_row = _facing(op, [40, 61, 66, 0, 1, 7, 30, 12])
    ranges = np.array(case.options["slot_ranges"])
    ranges[0, 0], ranges[1, 1] = (1, 3), (3, 1)
    case.options["slot_ranges"] = jnp.asarray(ranges)
    case.check(**every_row)


@pytest.mark.parametrize("op", OPS)
def test_rows_outside_the_range_give_zeros(op: str) -> None:
    case, every_row = _facing(op, FACING)
    rows = (jnp.int32(1), jnp.int32(4))
    actual = case.actual(rows=rows)
    assert not actual[[0, 4, 5, 6, 7]].any()
    np.testing.assert_array_equal(actual[1:4], case.actual(**every_row)[1:4])
    _close(actual, case.expected(rows=rows), "float32")
    assert not case.actual(rows=(jnp.int32(2), jnp.int32(2))).any()


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_rows_outside_the_range_of_whole_blocks_give_zeros(op: str) -> None:
    case = _case(op, "rotary", "float32", [20, 33, 7, 50, 64, 3])
    rows = (jnp.int32(1), jnp.int32(4))
    actual = case.actual(rows=rows)
    assert not actual[[0, 4, 5]].any()
    np.testing.assert_array_equal(actual[1:4], case.actual()[1:4])
    _close(actual, case.expected(rows=rows), "float32")


@pytest.mark.parametrize("op", cover(OPS, ["decode_kv"]))
def test_a_long_row_is_cut_in_pieces_of_several_tiles(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(triton_tiles.NUM_PROCESSORS, "sm_80", 1)
    kernel = jax.jit(functools.partial(flat(OPS[op], op), interpret=True, block_size=16))
    case = _case(op, "one-head" if op == "decode_kv" else "rotary", "float32", [3, 0, 700, 9, 64])
    actual = np.asarray(kernel(*case.args, **case.options))
    _close(actual, case.expected(), "float32")
    np.testing.assert_array_equal(actual, np.asarray(kernel(*case.args, **case.options)))


@pytest.mark.in_turn(14, group="kernels in interpreters")
def test_pieces_of_more_heads_than_a_program_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(triton_tiles.NUM_PROCESSORS, "sm_80", 1)
    attend = functools.partial(flat(triton_decode_absorbed.absorbed_attention), interpret=True, block_size=16)
    case = _case("decode_absorbed", "twelve-heads", "float32", [3, 0, 400, 9])
    z, m, l = (np.asarray(a) for a in jax.jit(attend)(*case.args))
    _close(z, case.expected(), "float32")
    q, pool, tables, lens = (np.asarray(a) for a in case.args)
    for row, n in enumerate(lens.tolist()):
        x = pool[tables[row]].reshape(-1, q.shape[2])[:n].astype(np.float64)
        scores = q[row].astype(np.float64) @ x.T
        top = scores.max(axis=1, initial=-1e30)
        np.testing.assert_allclose(m[row], top, rtol=1e-5)
        np.testing.assert_allclose(l[row], np.exp(scores - top[:, None]).sum(axis=1), rtol=1e-5)


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize("op", cover(["decode_absorbed", "decode_v_absorbed"], ["decode_absorbed"]))
def test_scores_of_more_rows_than_memory_come_in_waves(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, tokens = 4, tile_for("scores" if op == "decode_absorbed" else "rotary_scores", None, 4, 128, 4).tokens
    tiles = [-(-n // tokens) for n in (100, 40, 129, 129, 33)]
    most = max(tiles)
    monkeypatch.setattr(triton_decode_absorbed, "_SCORE_BYTES", (sum(tiles) - tiles[-1] + most) * heads * tokens * 4)
    kernel = jax.jit(functools.partial(flat(OPS[op], op), interpret=True, block_size=16))
    case = _case(op, "rotary", "float32", [100, 40, 129, 129, 33])
    _close(kernel(*case.args, **case.options), case.expected(), "float32")


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize("op", ["decode_kv", "decode_absorbed"])
def test_query_rows_can_share_a_table(op: str) -> None:
    case = _case(op, "rotary", "float32", [40, 0, 90])
    q, pool, tables, _ = case.args
    table_of_row = jnp.asarray([2, 0, 2, 2, 0], jnp.int32)
    lens = jnp.asarray([90, 40, 1, 64, 0], jnp.int32)  # a query row can see less than its table holds
    q = jnp.concatenate([q, 2 * q[:2]])
    case.args = [q, pool, tables, lens]
    actual = case.actual(table_of_row=table_of_row)
    case.args[2] = tables[table_of_row]
    _close(actual, case.expected(), "float32")


def test_absorbed_attention_joins_with_another_part() -> None:
    case = _case("decode_absorbed", "twelve-heads", "float32", [40, 0, 90, 150])
    q, pool, tables, lens = case.args
    attend = jax.jit(functools.partial(flat(triton_decode_absorbed.absorbed_attention), block_size=16, interpret=True))
    tables, lens = np.asarray(tables), np.asarray(lens)
    parts = ((tables[:, :5], np.minimum(lens, 80)), (tables[:, 5:], np.maximum(lens - 80, 0)))
    first, second = ([np.asarray(a) for a in attend(q, pool, *part)] for part in parts)
    m = np.maximum(first[1], second[1])
    shares = [l * np.exp(part - m) for _, part, l in (first, second)]
    total = np.maximum(shares[0] + shares[1], 1e-30)
    z = (first[0] * shares[0][..., None] + second[0] * shares[1][..., None]) / total[..., None]
    _close(z, case.expected(), "float32")
    assert not first[2][1].any()
    assert (first[1][1] == np.float32(-1e30)).all()


def test_the_absorbed_output_can_be_narrow() -> None:
    case = _case("decode_absorbed", "twelve-heads", "bfloat16", [40, 0, 90])
    assert case.actual(out_dtype=jnp.bfloat16).dtype == jnp.bfloat16
    case.check(out_dtype=jnp.bfloat16)


def test_wrong_arguments_are_errors() -> None:
    case = _case("decode_kv", "rotary", "float32", [5])
    with pytest.raises(ValueError, match="block_size=12 must be a power of two"):
        flat(triton_decode_kv.decode_kv)(*case.args, block_size=12, interpret=True)
    with pytest.raises(ValueError, match="chip='sm_10'"):
        flat(triton_decode_kv.decode_kv)(*case.args, block_size=16, interpret=True, chip="sm_10")
    args = [case.args[0], case.args[1].astype(jnp.float8_e5m2), *case.args[2:]]
    with pytest.raises(ValueError, match="must be float16, bfloat16 or float32"):
        flat(triton_decode_kv.decode_kv)(*args, block_size=16, interpret=True)


def test_tiles_fit_every_published_shape() -> None:
    for chip in (None, *CHIPS):
        for shape in (*PUBLISHED.values(), *SMALL.values()):
            for itemsize in (2, 4):
                of = functools.partial(tile_for, chip=chip, heads=shape.num_heads, itemsize=itemsize)
                tiles = {k: of(k, width=shape.hidden_size) for k in ("scores", "rotary_scores")}
                output = of("output", width=shape.hidden_size)
                assert all(tile.tokens % output.tokens == 0 for tile in tiles.values())
                assert of("kv", width=shape.head_dim).lanes <= padded(shape.head_dim)
    with pytest.raises(ValueError, match="tokens=48 must be a power of two"):
        Tile(tokens=48, lanes=64, warps=4, stages=3)


@pytest.mark.parametrize(
    ("heads", "parts"),
    [
        (1, ((0, 16),)),
        (12, ((0, 16),)),
        (32, ((0, 32),)),
        (40, ((0, 32), (32, 16))),
        (56, ((0, 64),)),
        (72, ((0, 64), (64, 16))),
    ],
)
def test_heads_in_powers_of_two(heads: int, parts: tuple[tuple[int, int], ...]) -> None:
    assert tuple(head_splits(heads)) == parts
