"""Products of integers against NumPy: weights of 4 to 8 bits, rows rounded to 8 bits a group of 32 inputs at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.cpu import build, ops
from apt_jax.ops import linear
from apt_jax.ops.blocks import BLOCK_KINDS, unpack
from apt_jax.ops.weights import GroupedMatrix, IntegerTiles, QuantizedMatrix, tile_integers
from tests.support.grouped import dequantized, random_blocks

KINDS = (*BLOCK_KINDS, "int8")
# Rows, width, outputs: one row; all sizes of a batch; rows of two tasks; outputs that end in a tile; many groups.
SHAPES = [
    (1, 576, 96),
    (2, 32, 16),
    (3, 96, 50),
    (7, 64, 33),
    (33, 96, 130),
    (70, 64, 17),
    (300, 64, 80),
    (5, 5504, 34),
]
DTYPES = ["float32", "bfloat16"]
Matrix = GroupedMatrix | QuantizedMatrix


@pytest.fixture(autouse=True)
def _kernels() -> None:
    build.load()


@functools.cache
def _matrix(kind: str, outputs: int, width: int) -> tuple[Matrix, IntegerTiles]:
    rng = np.random.default_rng(outputs + width)
    if kind == "int8":
        w: Matrix = QuantizedMatrix(
            values=jnp.asarray(rng.integers(-128, 128, (outputs, width)), jnp.int8),
            scale=jnp.asarray(rng.random(outputs) / 40, jnp.float32),
        )
        return w, tile_integers(w)
    blocks = jnp.asarray(random_blocks((outputs, width), kind, outputs))
    w = GroupedMatrix(blocks=blocks, kind=kind, shape=(outputs, width))
    return w, tile_integers(w)


def _width(kind: str, least: int) -> int:
    """Width of whole blocks."""
    inputs = 32 if kind == "int8" else BLOCK_KINDS[kind].inputs
    return -(-least // inputs) * inputs


def _x(rows: int, width: int, dtype: str) -> jax.Array:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, width)) * np.exp2(rng.integers(-6, 6, (rows, 1)))
    x[:, width // 3] = 0
    return jnp.asarray(x, dtype)


def _weights(w: Matrix) -> np.ndarray:
    """Weights (O, I) from the definition of the integers, float64."""
    if isinstance(w, QuantizedMatrix):
        return np.asarray(w.values, np.float64) * np.asarray(w.scale, np.float64)[:, None]
    return dequantized(np.asarray(w.blocks), w.kind).astype(np.float64)


def _rounded(x: jax.Array) -> np.ndarray:
    """Rows as their groups are rounded, float64."""
    x32 = np.asarray(x, np.float32)
    wide = np.pad(x32, ((0, 0), (0, -x32.shape[1] % 32))).reshape(x32.shape[0], -1, 32)
    top = np.abs(wide).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 1e-30)
    integers = np.rint(wide.astype(np.float64) * inverse)
    return (integers * (top / np.float32(127))).reshape(x32.shape[0], -1)[:, : x32.shape[1]]


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_rounded_rows(kind: str, shape: tuple[int, int, int], dtype: str) -> None:
    rows, width, outputs = shape[0], _width(kind, shape[1]), shape[2]
    w, tiles = _matrix(kind, outputs, width)
    x = _x(rows, width, dtype)
    actual = np.asarray(jax.jit(ops.dense)(x, tiles), np.float64)
    expected = _rounded(x) @ _weights(w).T
    size = np.abs(_rounded(x)) @ np.abs(_weights(w)).T
    np.testing.assert_array_less(np.abs(actual - expected), 1e-6 * size + 1e-30)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_near_those_of_rows_as_they_are(kind: str) -> None:
    w, tiles = _matrix(kind, 96, _width(kind, 576))
    x = _x(9, w.shape[1], "float32")
    exact = np.asarray(x, np.float64) @ _weights(w).T
    error = np.asarray(ops.dense(x, tiles)) - exact
    assert np.linalg.norm(error) < 0.01 * np.linalg.norm(exact)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_products_widen_the_integers(kind: str) -> None:
    w, _ = _matrix(kind, 50, _width(kind, 96))
    x = _x(3, w.shape[1], "float32")
    arguments = (w.values, w.scale) if isinstance(w, QuantizedMatrix) else (w,)
    actual = np.asarray(jax.jit(linear.dense)(x, *arguments))
    np.testing.assert_allclose(actual, np.asarray(x, np.float64) @ _weights(w).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [1, 31, 37, 70])
def test_int8_takes_any_number_of_inputs(width: int) -> None:
    w, tiles = _matrix("int8", 20, width)
    x = _x(5, width, "float32")
    expected = _rounded(x) @ _weights(w).T
    np.testing.assert_allclose(np.asarray(ops.dense(x, tiles)), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_the_numbers_of_blocks_are_those_that_the_library_reads(kind: str) -> None:
    blocks = random_blocks((70, 512), kind, 1)
    actual = jax.jit(lambda b: unpack(kind, b).numbers())(jnp.asarray(blocks))
    np.testing.assert_array_equal(np.asarray(actual), dequantized(blocks, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_tiles_are_the_weights(kind: str) -> None:
    w, tiles = _matrix(kind, 50, _width(kind, 96))
    rows = jnp.asarray([0, 49, 17, 17, 31], jnp.int32)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(IntegerTiles.rows)(tiles, rows)), _weights(w)[rows].astype(np.float32)
    )
    if isinstance(w, GroupedMatrix):
        np.testing.assert_array_equal(np.asarray(w.rows(rows)), _weights(w)[rows].astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gives_the_same_bits_in_any_company(kind: str, dtype: str) -> None:
    _, tiles = _matrix(kind, 130, _width(kind, 96))
    x = _x(21, tiles.shape[1], dtype)
    together = np.asarray(jax.jit(ops.dense)(x, tiles))
    for count in (1, 2, 3, 5, 8, 13):
        alone = np.asarray(jax.jit(ops.dense)(x[4 : 4 + count], tiles))
        np.testing.assert_array_equal(alone, together[4 : 4 + count])


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("kind", KINDS)
def test_bias_and_activation_follow(kind: str, activation: str | None) -> None:
    _, tiles = _matrix(kind, 50, _width(kind, 96))
    x, bias = _x(3, tiles.shape[1], "float32"), jnp.linspace(-1, 1, 50)
    expected = ops.dense(x, tiles) + bias[None]
    if activation is not None:
        expected = linear.activate(expected, activation)
    for out in DTYPES:
        actual = ops.dense(x, tiles, bias=bias, activation=activation, dtype=jnp.dtype(out))
        assert actual.dtype == out
        np.testing.assert_allclose(
            np.asarray(actual, np.float32), expected, rtol=2**-8 if out == "bfloat16" else 1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_argmax_is_that_of_written_products(kind: str, shape: tuple[int, int, int], dtype: str) -> None:
    rows, width, outputs = shape[0], _width(kind, shape[1]), shape[2]
    _, tiles = _matrix(kind, outputs, width)
    x = _x(rows, width, dtype)
    tokens, trusted = jax.jit(ops.dense_argmax)(x, tiles)
    np.testing.assert_array_equal(tokens, np.asarray(ops.dense(x, tiles)).argmax(axis=1))
    assert np.asarray(trusted).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_in_its_row(kind: str, dtype: str) -> None:
    _, tiles = _matrix(kind, 50, _width(kind, 96))
    clean = _x(6, tiles.shape[1], dtype)
    x = clean.at[1, 3].set(jnp.nan).at[4, 95].set(-jnp.inf)
    out = np.asarray(ops.dense(x, tiles))
    assert np.isnan(out[[1, 4]]).all()
    others = [0, 2, 3, 5]
    np.testing.assert_array_equal(out[others], np.asarray(ops.dense(clean, tiles))[others])
    _, trusted = ops.dense_argmax(x, tiles)
    np.testing.assert_array_equal(trusted, [True, False, True, True, False, True])


def test_rows_of_any_size_are_rounded() -> None:
    _, tiles = _matrix("Q8_0", 50, 96)
    x = jnp.stack([jnp.zeros(96), jnp.full(96, 1e-37), jnp.full(96, 1e30)])
    out = np.asarray(ops.dense(x, tiles))
    assert (out[:2] == 0).all()
    assert np.isfinite(out).all()
    assert (out[2] != 0).all()


@pytest.mark.in_turn(24)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("outputs", [32, 160, 192])
@pytest.mark.parametrize("kind", KINDS)
def test_gated_equals_its_parts(kind: str, outputs: int, activation: str, dtype: str) -> None:
    _, tiles = _matrix(kind, outputs, _width(kind, 64))
    x = _x(11, tiles.shape[1], dtype)
    both = np.asarray(ops.dense(x, tiles), np.float32)
    gate, up = both[:, : outputs // 2], both[:, outputs // 2 :]
    expected = np.asarray(linear.activate(jnp.asarray(gate), activation)) * up
    actual = ops.gated(x, tiles, activation)
    assert actual.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected, rtol=2**-8 if dtype == "bfloat16" else 1e-5, atol=1e-3
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_live_are_zeros(kind: str) -> None:
    _, tiles = _matrix(kind, 64, _width(kind, 96))
    x, live = _x(9, tiles.shape[1], "float32"), jnp.int32(4)
    whole = np.asarray(ops.dense(x, tiles))
    out = np.asarray(ops.dense(x, tiles, live=live))
    np.testing.assert_array_equal(out[:4], whole[:4])
    assert (out[4:] == 0).all()
    np.testing.assert_array_equal(ops.gated(x, tiles, "silu", live=live)[:4], ops.gated(x, tiles, "silu")[:4])
