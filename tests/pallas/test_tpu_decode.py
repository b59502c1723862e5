"""The TPU's decode kernels: against their references in Pallas' interpreters, and lowered for a TPU without having
one."""

import dataclasses
import functools
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct
from jax.experimental.pallas import tpu as pltpu

from apt_jax.backends import attention_ops
from apt_jax.models.config import ModelConfig
from apt_jax.models.decoder import decoder_step
from apt_jax.models.params import abstract_params
from apt_jax.models.step import DecoderBatch, StepOptions
from apt_jax.ops.calls import LogitModifiers
from apt_jax.pallas import tpu_decode
from benchmarks.gpu.shapes import PUBLISHED, SMALL
from tests.support.attention_cases import expected_decode
from tests.support.cases import cover
from tests.support.op_calls import flat

BLOCK = 16
TILE = 64
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2}
"""Relative to the largest output."""
LENGTHS = (0, 1, 17, 64, 129)
"""Lengths of 5 rows: none, one, into the second block, one tile exactly, one slot into the third tile."""
KV_SHAPES = ("one-head", "three-heads", "grouped-by-three")
ABSORBED_SHAPES = ("one-head", "three-heads", "width-80")
LOWERED = ("opt-13b", "opt-66b", "llama-2-7b", "llama-3-8b")


def _poisoned_case(rng, lanes: int, arrays: int, dtype: str, ranged: bool):
    """A pool that is NaN wherever no row owns the slot, random block tables, lengths and (if `ranged`) slot ranges."""
    lens = np.array(LENGTHS, np.int32)
    entries = -(-int(lens.max()) // BLOCK)
    num_blocks = 1 + arrays * len(lens) * entries
    pool = np.full((num_blocks, BLOCK, lanes), np.nan, np.float32)
    tables = np.zeros((len(lens), arrays, entries), np.int32)
    free = iter(1 + rng.permutation(num_blocks - 1))
    ranges = np.zeros((len(lens), entries, 2), np.int32)
    for b, length in enumerate(lens):
        for e in range(-(-int(length) // BLOCK)):
            count = min(BLOCK, int(length) - e * BLOCK)
            if not ranged:
                first, last = 0, count
            elif rng.integers(2):
                first = int(rng.integers(BLOCK - count + 1))
                last = first + count
            else:
                first = int(rng.integers(count, BLOCK + 1))
                last = first - count
            ranges[b, e] = first, last
            for a in range(arrays):
                tables[b, a, e] = next(free)
                own = slice(min(first, last), max(first, last))
                pool[tables[b, a, e], own] = rng.standard_normal((count, lanes))
    flat = jnp.asarray(pool.astype(jnp.dtype(dtype)))
    return flat, jnp.asarray(tables), jnp.asarray(lens), jnp.asarray(ranges) if ranged else None


def _pairs(names: tuple[str, ...]) -> list[Any]:
    """Shapes, dtypes and slot ranges; all pairs of two of them in `make test`."""
    every = list(itertools.product(names, TOLERANCE, (False, True)))
    return cover(every, [case for case in every if (names.index(case[0]) % 2 + (case[1] == "float32") + case[2]) % 2])


def _close(actual, expected, dtype: str) -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(expected).all()
    assert np.abs(actual - expected).max() <= TOLERANCE[dtype] * max(1.0, np.abs(expected).max())


def _check(name: str, op: str, dtype: str, ranged: bool, interpret, rows=None, rules=None, cores: int = 1) -> None:
    shape = SMALL[name]
    rng = np.random.default_rng(len(name) + ranged)
    arrays = 2 if op == "decode_kv" else 1
    pool, tables, lens, ranges = _poisoned_case(rng, shape.lane, arrays, dtype, ranged)
    width = shape.head_dim if arrays == 2 else shape.hidden_size
    q = rng.standard_normal((len(LENGTHS), shape.num_heads, width)) * (1 if arrays == 2 else 0.2)
    q = jnp.asarray(q.astype(np.float32).astype(jnp.dtype(dtype)))
    tables = tables if arrays == 2 else tables[:, 0]
    more = {"block_size": BLOCK, "rows": rows, "slot_ranges": ranges, "rules": rules}
    expected = expected_decode(op, q, pool, tables, lens, **more)
    decode = jax.jit(functools.partial(flat(getattr(tpu_decode, op)), interpret=interpret, cores=cores, **more))
    with mock.patch.object(tpu_decode, "MAX_TILE", TILE):
        actual = decode(q, pool, tables, lens)
    _close(actual, expected, dtype)
    assert not np.asarray(actual)[0].any()
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(decode(q, pool, tables, lens)))


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(("name", "dtype", "ranged"), _pairs(KV_SHAPES))
def test_kv_decode_matches_the_reference(name: str, dtype: str, ranged: bool) -> None:
    _check(name, "decode_kv", dtype, ranged, True)


@pytest.mark.in_turn(14, group="kernels in interpreters")
def test_kv_decode_of_many_heads_matches_the_reference() -> None:
    _check("seventy-two-heads", "decode_kv", "bfloat16", True, True)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("name", "dtype", "ranged"), _pairs(ABSORBED_SHAPES))
def test_absorbed_decode_matches_the_reference(name: str, dtype: str, ranged: bool) -> None:
    _check(name, "decode_absorbed", dtype, ranged, True)


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize("op", ["decode_kv", "decode_absorbed"])
def test_the_same_on_simulated_tpu_memories(op: str) -> None:
    """Scratch starts as NaN there, and reads outside of an array are errors."""
    _check("three-heads", op, "float32", True, pltpu.InterpretParams())


@pytest.mark.parametrize("op", ["decode_kv", "decode_absorbed"])
def test_rows_outside_the_range_give_zeros(op: str) -> None:
    _check("three-heads", op, "float32", False, True, rows=(jnp.int32(1), jnp.int32(3)))


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize("op", ["decode_kv", "decode_absorbed"])
@pytest.mark.parametrize("ranged", [False, True])
def test_window_soft_cap_slopes_and_sinks(op: str, ranged: bool) -> None:
    """The window leaves out the first tile of the longest row, cuts into others and is longer than some."""
    slopes, sinks = jnp.asarray([0.5, 0.1, 0.02], jnp.float32), jnp.asarray([4.0, -9.0, 0.5], jnp.float32)
    rules = LogitModifiers(softcap=2.0, slopes=slopes, window=50, sinks=sinks)
    _check("three-heads", op, "float32", ranged, True, rules=rules)


def test_a_window_that_begins_on_the_border_of_a_tile() -> None:
    _check("one-head", "decode_kv", "float32", False, True, rules=LogitModifiers(window=129 - TILE))
    _check("one-head", "decode_kv", "float32", False, True, rules=LogitModifiers(window=130 - TILE))


@pytest.mark.parametrize("op", ["decode_kv", "decode_absorbed"])
def test_rows_shared_by_two_cores(op: str) -> None:
    _check("three-heads", op, "float32", False, True, cores=2)


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 100])
def test_the_work_list_has_every_tile_once_and_each_row_in_one_core(cores: int, window: int | None) -> None:
    rng = np.random.default_rng(cores)
    for lens in (rng.integers(0, 600, 4), np.zeros(4, np.int64), np.array([0, 0, 0, 512]), np.array([600, 1, 1, 0])):
        sizes = tpu_decode._Sizes(
            num_arrays=2, blocks=4, block_size=16, num_entries=38, num_items=len(lens) * 10, with_ranges=False,
            head_dim=16, softcap=None, window=window, with_slopes=False, with_sinks=False,
        )  # fmt: skip
        rows, tiles, counts = (np.asarray(a) for a in tpu_decode.work_list(jnp.asarray(lens, jnp.int32), sizes, cores))
        rows, tiles = rows.reshape(cores, -1), tiles.reshape(cores, -1)
        expected = []
        for row, length in enumerate(lens.tolist()):
            first = 0 if window is None else max(length - window, 0) // 64
            expected += [(row, tile) for tile in range(first, max(-(-length // 64), first + 1))]
        found = [(int(rows[c, i]), int(tiles[c, i])) for c in range(cores) for i in range(counts[c])]
        assert found == expected
        owner = [set(rows[c].tolist()) for c in range(cores)]  # what is behind the last item included
        assert all(not owner[a] & owner[b] for a in range(cores) for b in range(a))
        # No core has more than its share and what one row too many brings.
        longest = max(expected.count((r, t)) or 1 for r, t in expected) * 10
        assert counts.max() <= len(expected) / cores + longest


def test_what_the_kernels_do_not_take_is_xlas(monkeypatch) -> None:
    """Blocks of 8, lanes that fill no register, 16 bits of the other kind, tables larger than scalar memory."""
    ops = attention_ops("tpu", "tpu")
    pool = jnp.zeros((4, 16, 128))
    tables = jnp.zeros((2, 2, 3), jnp.int32)
    assert tpu_decode.takes(pool, tables, 128)
    monkeypatch.setattr(tpu_decode, "decode_kv", None)
    for other in (jnp.zeros((4, 8, 128)), jnp.zeros((4, 16, 96)), pool.astype(jnp.float16)):
        assert not tpu_decode.takes(other, tables, other.shape[2])
        q = jnp.zeros((2, 1, other.shape[2]), other.dtype)
        out = flat(ops.decode_kv)(q, other, tables, jnp.zeros(2, jnp.int32), block_size=other.shape[1])
        assert out.shape == q.shape
    assert not tpu_decode.takes(pool, tables[:, 0], 64)
    assert not tpu_decode.takes(pool, ShapeDtypeStruct((64, 2, 8192), jnp.int32), 128)
    assert ops.extras == attention_ops("cpu", "xla").extras


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match="does not support float16"):
        flat(tpu_decode.decode_kv)(
            jnp.zeros((1, 1, 8), jnp.float16),
            jnp.zeros((2, 4, 8), jnp.float16),
            jnp.zeros((1, 2, 1), jnp.int32),
            jnp.zeros(1, jnp.int32),
            block_size=4,
        )


def _abstract_args(name: str, op: str, dtype, batch: int = 64):
    shape, entries, blocks = PUBLISHED[name], 128, 4096
    width = shape.head_dim if op == "decode_kv" else shape.hidden_size
    tables = (batch, 2, entries) if op == "decode_kv" else (batch, entries)
    return (
        ShapeDtypeStruct((batch, shape.num_heads, width), dtype),
        ShapeDtypeStruct((blocks, BLOCK, shape.lane), dtype),
        ShapeDtypeStruct(tables, jnp.int32),
        ShapeDtypeStruct((batch,), jnp.int32),
        ShapeDtypeStruct((batch, entries, 2), jnp.int32),
    )


def _op(op: str, ranged: bool):
    def decode(q, pool, tables, lens, ranges):
        return flat(getattr(tpu_decode, op))(
            q, pool, tables, lens, block_size=BLOCK, slot_ranges=ranges if ranged else None
        )

    return decode


CASES = [
    (name, op)
    for name in LOWERED
    for op in ("decode_kv", "decode_absorbed")
    if op == "decode_kv" or PUBLISHED[name].has_hidden
]


@pytest.mark.in_turn(5)
@pytest.mark.parametrize(
    ("name", "op", "dtype", "ranged"),
    cover(
        [(*case, dtype, ranged) for case in CASES for dtype in TOLERANCE for ranged in (False, True)],
        [
            (*case, *rest)
            for i, case in enumerate(CASES)
            for rest in zip(TOLERANCE, (i % 2 == 0, i % 2 == 1), strict=True)
        ],
    ),
)
def test_kernels_lower_for_a_tpu(name: str, op: str, dtype: str, ranged: bool) -> None:
    """Pallas checks Mosaic's rules for block shapes and turns the kernel into its dialect; no TPU is needed."""
    args = _abstract_args(name, op, jnp.dtype(dtype))
    lowered = jax.jit(_op(op, ranged)).trace(*args).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


def _batch_arrays(num_decode: int, num_prefill: int, entries: int) -> dict[str, ShapeDtypeStruct]:
    """Return the annotated shapes and dtypes of the fields of a batch."""
    sizes = {"T": num_decode + num_prefill, "B": num_decode, "R": 2, "J": entries}
    arrays = {}
    for field in dataclasses.fields(DecoderBatch):
        kind: Any = field.type
        if field.default is dataclasses.MISSING:
            shape = [sizes[d] if d in sizes else int(d) for d in kind.dim_str.split()]
            arrays[field.name] = ShapeDtypeStruct(shape, jnp.dtype(kind.dtypes[0]))
    return arrays


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize("absorb", [False, True], ids=["reproject", "absorb"])
@pytest.mark.parametrize("decode", ["xla", "kernels"])
def test_the_decoder_lowers_for_a_tpu(decode: str, absorb: bool) -> None:
    """A whole step with decode rows of both kinds and prompt chunks: on XLA code alone, and on these decode kernels."""
    config = ModelConfig(
        family="opt",
        vocab_size=512,
        hidden_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        ffn_size=512,
        max_position=256,
    )
    ops = attention_ops("tpu", "xla")
    if decode == "kernels":
        ops = dataclasses.replace(ops, decode_kv=tpu_decode.decode_kv, decode_absorbed=tpu_decode.decode_absorbed)
    options = StepOptions(
        num_decode=8,
        block_size=BLOCK,
        hidden_block_size=BLOCK,
        hidden_mode="absorb" if absorb else None,
        kinds=(True, True),
        ops=ops,
    )
    params = abstract_params(config, jnp.bfloat16)
    pools = (ShapeDtypeStruct((64, BLOCK, config.lane), jnp.bfloat16),) * config.num_layers

    @jax.jit
    def step(params, pools, arrays):
        return decoder_step(params, pools, DecoderBatch(**arrays), config, options)

    lowered = step.trace(params, pools, _batch_arrays(8, 32, 16)).lower(lowering_platforms=("tpu",))
    kernels = lowered.as_text().count("tpu_custom_call")
    assert kernels == (config.num_layers * (1 + absorb) if decode == "kernels" else 0)
