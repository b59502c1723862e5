"""Every implementation of an attention op against its reference: head layouts, dtypes, ragged lengths, slot ranges.

All slots that no row of a case owns hold NaN (the null block, guard blocks that no table names, the rest of blocks in
use): what reads them as data fails. In shared blocks the other request's slots hold NaN too, one request at a time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.backends import attention_ops
from apt_jax.lab import reference
from apt_jax.ops import linear, xla_decode
from benchmarks.gpu.shapes import RAGGED_LENGTHS, SMALL, AttentionShape
from tests.support.attention_cases import expected_decode, expected_prefill, reference_prefill
from tests.support.cases import cover
from tests.support.op_calls import flat

IMPLEMENTATIONS = ["cpu", "xla"]
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 2e-3}
"""Relative to the largest output: one layer's attention output."""
BLOCK = 16
SHORT_LENGTHS = (0, 1, 15, 16, 17, 31, 33, 64, 65, 5, 3, 129, 6, 7, 128, 20)
DECODE_OPS = ("decode_kv", "decode_absorbed", "decode_reprojected", "decode_v_absorbed")


class Blocks(NamedTuple):
    """Where the positions of B rows lie."""

    num_blocks: int
    tables: np.ndarray
    """(B, A, J): A = 2 for keys and values."""
    slot_ranges: np.ndarray | None
    """(B, J, 2)"""
    owner: np.ndarray
    """(P, C): the row that a slot belongs to, -1 for none."""


def place(
    rng: np.random.Generator,
    lens: Sequence[int],
    halves: int,
    block_size: int = BLOCK,
    shared: bool = False,
) -> Blocks:
    """Random tables; `shared`: rows in random directions, and a row's last block is the next row's too if both fit."""
    num_rows, entries = len(lens), max(1, -(-max(lens) // block_size))
    used = [-(-n // block_size) for n in lens]
    num_blocks = 1 + halves * sum(used) + 3  # the null block, and guard blocks
    free = list(1 + rng.permutation(num_blocks - 1).astype(np.int32))
    tables = np.zeros((num_rows, halves, entries), np.int32)
    ranges = np.zeros((num_rows, entries, 2), np.int32)
    owner = np.full((num_blocks, block_size), -1)
    open_end = None  # the row whose last block can take another row from its other end
    for r, n in enumerate(lens):
        for j in range(used[r]):
            count = min(block_size, n - j * block_size)
            last = j == used[r] - 1
            if shared and last and open_end is not None and count <= open_end[1]:
                tables[r, :, j] = tables[open_end[0], :, used[open_end[0]] - 1]
                up, open_end = not open_end[2], None
            else:
                tables[r, :, j] = [free.pop() for _ in range(halves)]
                up = not shared or bool(rng.integers(2))
                if last:
                    open_end = (r, block_size - count, up)
            ranges[r, j] = (0, count) if up else (block_size, block_size - count)
            low, high = sorted(ranges[r, j])
            assert (owner[tables[r, :, j], low:high] == -1).all()
            owner[tables[r, :, j], low:high] = r
    return Blocks(num_blocks, tables, ranges if shared else None, owner)


def fill(rng: np.random.Generator, blocks: Blocks, lanes: int, dtype: str, rows: Any = None) -> jax.Array:
    """A pool of normal numbers in the slots of `rows` (None: of all rows), NaN in all others."""
    pool = rng.standard_normal((*blocks.owner.shape, lanes)).astype(np.float32)
    keep = blocks.owner >= 0 if rows is None else np.isin(blocks.owner, rows)
    pool[~keep] = np.nan
    return jnp.asarray(pool.astype(jnp.dtype(dtype)))


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    return jnp.asarray((scale * rng.standard_normal(shape)).astype(np.float32).astype(jnp.dtype(dtype)))


def weights(rng: np.random.Generator, shape: AttentionShape, dtype: str, bias: bool = True) -> list[Any]:
    """W_k, b_k, W_v, b_v of layer inputs as wide as a pool slot."""
    k, h, d = shape.num_kv_heads, shape.head_dim, shape.lane
    w = [normal(rng, s, dtype, d**-0.5) for s in ((k, h, d), (k, h), (k, h, d), (k, h))]
    return w if bias else [w[0], None, w[2], None]


def angles_of(shape: AttentionShape, positions: int) -> Any:
    half = shape.rotary_dim // 2
    frequency = 1e4 ** -(np.arange(half) / max(1, half))
    return jnp.asarray((np.arange(positions)[:, None] * frequency).astype(np.float32))


def decode_case(
    rng: np.random.Generator,
    op: str,
    shape: AttentionShape,
    dtype: str,
    batch: int,
    positions: int,
    bias: bool = True,
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Arguments of a decode op before the pool, after the lengths, and by name. Inputs are as wide as a pool slot."""
    n, h, d, r = shape.num_heads, shape.head_dim, shape.lane, shape.rotary_dim
    q = normal(rng, (batch, n, h), dtype)
    if op == "decode_kv":
        return [q], [], {}
    if op == "decode_absorbed":
        return [normal(rng, (batch, n, d), dtype, d**-0.5)], [], {}
    angles = angles_of(shape, positions)
    if op == "decode_reprojected":
        named = {"angles": angles} if r else {}
        return [q], weights(rng, shape, dtype, bias), named
    rest = normal(rng, (batch, n, d), dtype, d**-0.5) if r < h else None
    wk = normal(rng, (n, r, d), dtype, d**-0.5)
    bk = normal(rng, (n, r), dtype) if bias else None
    return [normal(rng, (batch, n, r), dtype, r**-0.5), rest], [wk, bk, angles], {}


def supports(op: str, shape: AttentionShape) -> bool:
    """Full absorption needs no rotary lanes, half of it needs some; both as many key as query heads."""
    if op == "decode_absorbed":
        return shape.has_hidden and not shape.rotary_dim
    return op != "decode_v_absorbed" or (shape.has_hidden and shape.rotary_dim > 0)


@functools.cache
def jitted(function: Any, *more_static: str) -> Callable[..., Any]:
    return jax.jit(flat(function), static_argnames=("block_size", *more_static))


def check(actual: Any, expected: Any, dtype: str) -> np.ndarray:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(expected).all()
    error = np.abs(actual - expected).max(initial=0.0)
    assert error <= TOLERANCE[dtype] * np.abs(expected).max(initial=1e-3)  # NaN fails, too
    return actual


def check_decode(
    name: str,
    op: str,
    shape: AttentionShape,
    dtype: str,
    lens: Sequence[int],
    *,
    shared: bool = False,
    block_size: int = BLOCK,
    bias: bool = True,
    seed: int = 0,
) -> None:
    rng = np.random.default_rng(seed)
    halves = 2 if op == "decode_kv" else 1
    blocks = place(rng, lens, halves, block_size, shared)
    first, last, named = decode_case(rng, op, shape, dtype, len(lens), max(lens), bias)
    tables = jnp.asarray(blocks.tables if halves == 2 else blocks.tables[:, 0])
    named["block_size"] = block_size
    if shared:
        assert blocks.slot_ranges is not None
        named["slot_ranges"] = jnp.asarray(blocks.slot_ranges)
    pool = fill(rng, blocks, shape.lane, dtype)
    run = jitted(getattr(reference if name == "reference" else attention_ops("cpu", name), op))
    arguments = (*first, pool, tables, jnp.asarray(lens, jnp.int32), *last)
    actual = check(run(*arguments, **named), expected_decode(op, *arguments, **named), dtype)
    assert not actual[np.asarray(lens) == 0].any()
    np.testing.assert_array_equal(actual, np.asarray(run(*arguments, **named), np.float64))
    if shared:
        for parity in range(2):  # neighbours in a block poison each other, one after the other
            mine = np.arange(len(lens))[parity::2]
            own = np.isin(blocks.owner, mine)[:, :, None]
            masked = jnp.asarray(np.where(own, np.asarray(pool), np.asarray(np.nan, pool.dtype)))
            arguments = (*first, masked, tables, jnp.asarray(lens, jnp.int32), *last)
            again = np.asarray(run(*arguments, **named), np.float64)
            np.testing.assert_array_equal(again[mine], actual[mine])


LAYOUTS = [(op, shape) for shape in SMALL for op in DECODE_OPS]


@pytest.mark.parametrize(
    ("op", "shape", "shared"),
    cover(
        [(op, shape, shared) for op, shape in LAYOUTS for shared in (False, True)],
        [
            ("decode_kv", "grouped-by-three", True),
            ("decode_absorbed", "width-80", True),
            ("decode_reprojected", "grouped-rotary", True),
            ("decode_reprojected", "three-heads", False),
            ("decode_v_absorbed", "partial-rotary", True),
            ("decode_v_absorbed", "rotary", False),
        ],
    ),
)
def test_the_references_compute_what_numpy_does(op: str, shape: str, shared: bool) -> None:
    if not supports(op, SMALL[shape]):
        pytest.skip("not defined for this head layout")
    check_decode("reference", op, SMALL[shape], "float32", SHORT_LENGTHS, shared=shared)


@pytest.mark.in_turn(13)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", DECODE_OPS)
@pytest.mark.parametrize(
    "layout",  # shared blocks, below, have the others
    cover(SMALL, ["one-head", "three-heads", "grouped-by-three", "grouped-rotary", "seventy-two-heads"]),
)
def test_decode_over_head_layouts(name: str, op: str, layout: str) -> None:
    if not supports(op, SMALL[layout]):
        pytest.skip("not defined for this head layout")
    check_decode(name, op, SMALL[layout], "float32", SHORT_LENGTHS)


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", DECODE_OPS)
@pytest.mark.parametrize(
    ("dtype", "shared"),
    cover(
        [("float32", False), ("float32", True), ("bfloat16", True), ("float16", False)],
        [("bfloat16", True), ("float16", False)],  # float32 is in the cases above and below
    ),
)
def test_decode_over_dtypes_and_long_rows(name: str, op: str, dtype: str, shared: bool) -> None:
    shape = SMALL["partial-rotary" if op == "decode_v_absorbed" else "three-heads"]
    check_decode(name, op, shape, dtype, RAGGED_LENGTHS, shared=shared, bias=not shared, seed=1)


@pytest.mark.in_turn(10)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", DECODE_OPS)
@pytest.mark.parametrize("layout", ["width-80", "grouped", "rotary", "partial-rotary"])
def test_decode_in_shared_blocks(name: str, op: str, layout: str) -> None:
    if not supports(op, SMALL[layout]):
        pytest.skip("not defined for this head layout")
    check_decode(name, op, SMALL[layout], "float32", SHORT_LENGTHS, shared=True, seed=2)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", DECODE_OPS)
@pytest.mark.parametrize("block_size", [1, 4])
def test_decode_over_block_sizes(name: str, op: str, block_size: int) -> None:
    shape = SMALL["rotary" if op == "decode_v_absorbed" else "one-head"]
    if block_size == 1:
        check_decode(name, op, shape, "float32", (67,), block_size=block_size)
    else:
        check_decode(name, op, shape, "float32", (2, 0, 70), block_size=block_size, shared=True)


def test_two_requests_grow_towards_each_other() -> None:
    """The smallest case by hand: in a block of four slots one request has two, the other one."""
    pool = jnp.asarray([[np.nan] * 4, [1.0, 2.0, np.nan, 4.0], [10.0, 20.0, np.nan, 40.0]])[:, :, None]
    tables = jnp.asarray([[[1], [2]], [[1], [2]]], jnp.int32)
    ranges = jnp.asarray([[[0, 2]], [[4, 3]]], jnp.int32)
    q = jnp.zeros((2, 1, 1))
    out = jitted(xla_decode.decode_kv)(
        q, pool, tables, jnp.asarray([2, 1], jnp.int32), block_size=4, slot_ranges=ranges
    )
    np.testing.assert_allclose(np.asarray(out)[:, 0, 0], [15.0, 40.0])
    own, position = reference.own_slots(jnp.asarray([[4, 1]], jnp.int32), jnp.int32(3), 1, 4)
    np.testing.assert_array_equal(np.asarray(own), [False, True, True, True])
    np.testing.assert_array_equal(np.asarray(position), [0, 2, 1, 0])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", DECODE_OPS)
def test_rows_outside_the_range_are_left_out(name: str, op: str) -> None:
    shape = SMALL["partial-rotary" if op == "decode_v_absorbed" else "three-heads"]
    rng = np.random.default_rng(3)
    lens = rng.integers(0, 60, 64).tolist()
    halves = 2 if op == "decode_kv" else 1
    blocks = place(rng, lens, halves)
    first, last, named = decode_case(rng, op, shape, "float32", 64, 60)
    tables = jnp.asarray(blocks.tables if halves == 2 else blocks.tables[:, 0])
    run = functools.partial(jitted(getattr(attention_ops("cpu", name), op)), block_size=BLOCK, **named)
    pool = fill(np.random.default_rng(4), blocks, shape.lane, "float32")
    whole = np.asarray(run(*first, pool, tables, jnp.asarray(lens, jnp.int32), *last))
    for a, b in ((5, 43), (0, 64), (32, 33), (7, 7), (64, 64)):
        rows = (jnp.int32(a), jnp.int32(b))
        others_poisoned = fill(np.random.default_rng(4), blocks, shape.lane, "float32", list(range(a, b)))
        part = run(*first, others_poisoned, tables, jnp.asarray(lens, jnp.int32), *last, rows=rows)
        expected = np.zeros_like(whole)
        expected[a:b] = whole[a:b]
        np.testing.assert_array_equal(np.asarray(part), expected)


@pytest.mark.parametrize("dtype", cover(TOLERANCE, ["float32", "bfloat16"]))
def test_absorption_equals_reprojection(dtype: str) -> None:
    """The algebra of absorption (docs/design/hybrid_cache.md) on the same cached inputs: b_k drops out, b_v is added
    once."""
    rng = np.random.default_rng(11)
    shape, lens = SMALL["three-heads"], (90, 1, 17, 64, 33)
    blocks = place(rng, lens, 1)
    pool = fill(rng, blocks, shape.lane, dtype)
    tables, lengths = jnp.asarray(blocks.tables[:, 0]), jnp.asarray(lens, jnp.int32)
    wk, bk, wv, bv = weights(rng, shape, "float32")
    q = normal(rng, (len(lens), shape.num_heads, shape.head_dim), "float32")
    reprojected = jitted(xla_decode.decode_reprojected)(
        q.astype(dtype),
        pool,
        tables,
        lengths,
        *(w.astype(dtype) for w in (wk, bk, wv, bv)),
        block_size=BLOCK,
    )
    q_absorbed = jnp.einsum("bnh,nhd->bnd", q, wk) * shape.head_dim**-0.5
    z = jitted(xla_decode.decode_absorbed)(q_absorbed.astype(dtype), pool, tables, lengths, block_size=BLOCK)
    absorbed = np.asarray(jnp.einsum("bnd,nhd->bnh", z, wv) + bv[None])
    error = np.abs(absorbed - np.asarray(reprojected)).max()
    assert error <= 2 * TOLERANCE[dtype] * np.abs(absorbed).max()


@pytest.mark.parametrize("dtype", cover(TOLERANCE, ["float32", "bfloat16"]))
def test_half_absorption_equals_reprojection(dtype: str) -> None:
    """Rotary lanes reprojected, the other lanes and the values absorbed: b_k counts in the rotary lanes only."""
    rng = np.random.default_rng(12)
    shape, lens = SMALL["partial-rotary"], (90, 1, 17, 64, 33)
    blocks = place(rng, lens, 1)
    pool = fill(rng, blocks, shape.lane, dtype)
    tables, lengths = jnp.asarray(blocks.tables[:, 0]), jnp.asarray(lens, jnp.int32)
    wk, bk, wv, bv = weights(rng, shape, "float32")
    angles = angles_of(shape, max(lens))
    r, scale = shape.rotary_dim, shape.head_dim**-0.5
    q = reference.rotate(normal(rng, (len(lens), shape.num_heads, shape.head_dim), "float32"), angles[lengths - 1])
    reprojected = jitted(xla_decode.decode_reprojected)(
        q.astype(dtype),
        pool,
        tables,
        lengths,
        *(w.astype(dtype) for w in (wk, bk, wv, bv)),
        block_size=BLOCK,
        angles=angles,
    )
    rest = jnp.einsum("bnh,nhd->bnd", q[..., r:], wk[:, r:]) * scale
    z = jitted(xla_decode.decode_v_absorbed)(
        (q[..., :r] * scale).astype(dtype),
        rest.astype(dtype),
        pool,
        tables,
        lengths,
        wk[:, :r].astype(dtype),
        bk[:, :r].astype(dtype),
        angles,
        block_size=BLOCK,
    )
    absorbed = np.asarray(jnp.einsum("bnd,nhd->bnh", z, wv) + bv[None])
    error = np.abs(absorbed - np.asarray(reprojected)).max()
    assert error <= 2 * TOLERANCE[dtype] * np.abs(absorbed).max()


PREFILL_CHUNKS = (1, 140, 37, 0, 130, 5)
PREFILL_PREFIXES = (9, 0, 133, 0, 200, 6)


@functools.cache
def prefill_case(layout: str, dtype: str, shared: bool) -> tuple[Sequence[Any], dict[str, Any], Any]:
    """Arguments of `prefill`, those by name, and what it must return."""
    shape = SMALL[layout]
    rng = np.random.default_rng(5)
    n, k, h = shape.num_heads, shape.num_kv_heads, shape.head_dim
    blocks = place(rng, PREFILL_PREFIXES, 2, shared=shared)
    chunks = np.array((*PREFILL_CHUNKS, 8), np.int32)  # the last row is beyond `num_rows`
    num_rows = len(PREFILL_CHUNKS)
    offsets = np.concatenate([[0], np.cumsum(chunks)[:-1]]).astype(np.int32)
    tokens = int(chunks.sum()) + 11
    tables = np.concatenate([blocks.tables, np.zeros_like(blocks.tables[:1])])
    ranges = None
    if blocks.slot_ranges is not None:
        ranges = jnp.asarray(np.concatenate([blocks.slot_ranges, np.zeros_like(blocks.slot_ranges[:1])]))
    with_hidden = shape.has_hidden or shape.rotary_dim > 0
    arguments = (
        *(normal(rng, (tokens, a, h), dtype) for a in (n, k, k)),
        fill(rng, blocks, shape.lane, dtype),
        jnp.asarray(tables),
        *(jnp.asarray(a, jnp.int32) for a in (offsets, chunks, (*PREFILL_PREFIXES, 12))),
        jnp.asarray([r % 2 == 0 and with_hidden for r in range(num_rows + 1)]),
        jnp.int32(num_rows),
        *weights(rng, shape, dtype, bias=not shared),
    )
    named: dict[str, Any] = {"slot_ranges": ranges}
    if shape.rotary_dim:
        named["angles"] = angles_of(shape, max(PREFILL_PREFIXES))
    named |= {"block_size": BLOCK, "with_hidden": with_hidden}
    return arguments, named, expected_prefill(arguments, named)


PREFILL_CASES = [
    *((layout, "float32", i % 2 == 1) for i, layout in enumerate(SMALL)),
    ("rotary", "float32", True),
    ("rotary", "bfloat16", True),
    ("width-80", "float16", True),
]


@pytest.mark.parametrize(
    ("layout", "dtype", "shared"),
    cover(PREFILL_CASES, [("three-heads", "float32", True), ("grouped-rotary", "float32", False)]),
)
def test_the_reference_of_prefill_computes_what_numpy_does(layout: str, dtype: str, shared: bool) -> None:
    arguments, named, expected = prefill_case(layout, dtype, shared)
    some = np.flatnonzero(np.asarray(arguments[6]))  # a row without any token is none for the reference
    rows = [a if a is None else a[some] for a in (*arguments[4:9], named["slot_ranges"])]
    wide = [a.astype(jnp.float32) for a in arguments[:3]]  # keys computed from layer inputs are float32
    arguments = (*wide, arguments[3], *rows[:5], arguments[9] - 1, *arguments[10:])
    check(reference_prefill(arguments, named | {"slot_ranges": rows[5]}), expected, dtype)


@pytest.mark.in_turn(8)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("layout", "dtype", "shared"),
    # The cases that are left out have layouts of the same class as others here, or come again in another dtype.
    cover(
        PREFILL_CASES,
        [
            case
            for case in PREFILL_CASES
            if case[0] != "twelve-heads" and (case[1] != "float32" or case[0] not in ("rotary", "width-80"))
        ],
    ),
)
def test_prefill(name: str, layout: str, dtype: str, shared: bool) -> None:
    arguments, named, expected = prefill_case(layout, dtype, shared)
    run = jitted(attention_ops("cpu", name).prefill, "with_hidden")
    actual = check(run(*arguments, **named), expected, dtype)
    offsets, num_rows = arguments[5], int(arguments[9])
    assert not actual[offsets[num_rows] :].any()
    np.testing.assert_array_equal(actual, np.asarray(run(*arguments, **named), np.float64))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_prefill_without_cached_tokens_is_causal_attention(name: str) -> None:
    rng = np.random.default_rng(6)
    shape = SMALL["grouped"]
    q, k, v = (
        normal(rng, (50, a, shape.head_dim), "float32")
        for a in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    one = jnp.zeros(1, jnp.int32)
    actual = jitted(attention_ops("cpu", name).prefill, "with_hidden")(
        q,
        k,
        v,
        jnp.full((1, BLOCK, shape.lane), jnp.nan),
        jnp.zeros((1, 2, 1), jnp.int32),
        one,
        one + 50,
        one,
        jnp.zeros(1, bool),
        jnp.int32(1),
        *weights(rng, shape, "float32"),
        block_size=BLOCK,
        with_hidden=False,
    )
    check(actual, jax.jit(reference.causal_attention)(q, k, v), "float32")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_broken_prefix_stays_with_its_row_in_prefill(name: str, hidden: bool) -> None:
    """Chunks share a tile of queries: what is not finite in one row's cache may not reach the others."""
    rng = np.random.default_rng(7)
    shape, chunks, prefixes = SMALL["three-heads"], (3, 4, 2), (20, 9, 17)
    blocks = place(rng, prefixes, 2)
    q, k, v = (normal(rng, (12, shape.num_heads, shape.head_dim), "float32") for _ in range(3))
    args = (
        jnp.asarray(blocks.tables),
        *(jnp.asarray(a, jnp.int32) for a in ((0, 3, 7), chunks, prefixes)),
        jnp.full(3, hidden),
        jnp.int32(3),
        *weights(rng, shape, "float32"),
    )
    prefill = jitted(attention_ops("cpu", name).prefill, "with_hidden")
    run = functools.partial(prefill, block_size=BLOCK, with_hidden=hidden)
    pool = functools.partial(fill, blocks=blocks, lanes=shape.lane, dtype="float32")
    whole = np.asarray(run(q, k, v, pool(np.random.default_rng(8)), *args))
    broken = np.asarray(run(q, k, v, pool(np.random.default_rng(8), rows=[0, 2]), *args))
    mine = [0, 1, 2, 7, 8, 9, 10, 11]
    np.testing.assert_array_equal(broken[mine], whole[mine])
    assert not np.isfinite(broken[3:7]).any()


def test_rotary_keys_are_rounded_once() -> None:
    rng = np.random.default_rng(9)
    x, w, b = (normal(rng, s, "bfloat16") for s in ((50, 24), (3, 8, 24), (3, 8)))
    angles = jnp.asarray(3 * rng.standard_normal((50, 4)), jnp.float32)
    keys = jnp.einsum("td,khd->tkh", x, w, preferred_element_type=jnp.float32)
    keys += b.astype(jnp.float32)[None]
    exact = np.asarray(reference.rotate(keys, angles)).reshape(50, 24)
    actual = np.asarray(linear.project_kv(x, w, b, angles), np.float32)
    assert (np.abs(actual - exact) <= 2.0**-8 * np.abs(exact) * 1.001 + 1e-5).all()


def test_unknown_implementation_is_an_error() -> None:
    with pytest.raises(ValueError, match="no attention implementation 'mosaic'"):
        attention_ops("cpu", "mosaic")
