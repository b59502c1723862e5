"""Mixtures of experts: the kernel and XLA's op against plain NumPy, row by row."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.cpu import build, ops
from apt_jax.models.weight_layout import tile_experts
from apt_jax.ops import linear
from apt_jax.ops.weights import Experts


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    build.load()


def drawn(rng: np.random.Generator, dtype: str, num_experts: int, width: int, inner: int) -> Experts:
    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, dtype)

    return Experts(
        router=matrix(num_experts, width),
        w_gate=matrix(num_experts, inner, width),
        w_up=matrix(num_experts, inner, width),
        w_down=matrix(num_experts, width, inner),
    )


def routed(rng: np.random.Generator, rows: int, num_experts: int, each: int) -> tuple[jax.Array, jax.Array]:
    ids = np.stack([rng.permutation(num_experts)[:each] for _ in range(rows)])
    return jnp.asarray(ids, jnp.int32), jnp.asarray(rng.random((rows, each)), jnp.float32)


def silu(v: np.ndarray) -> np.ndarray:
    return v / (1 + np.exp(-v))


def plain(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w: Experts,
    activate: Callable[[Any], Any] = silu,
    clamp: tuple[float, float] | None = None,
) -> np.ndarray:
    gate, up, down = (np.asarray(m, np.float64) for m in (w.w_gate, w.w_up, w.w_down))
    b_gate, b_up = (np.zeros(gate.shape[:2]) if b is None else np.asarray(b, np.float64) for b in (w.b_gate, w.b_up))
    out = np.zeros(x.shape)
    for t, row in enumerate(np.asarray(x, np.float64)):
        for expert, weight in zip(np.asarray(ids[t]), np.asarray(weights[t], np.float64), strict=True):
            g, u = gate[expert] @ row + b_gate[expert], up[expert] @ row + b_up[expert]
            if clamp is None:
                mixed = activate(g) * u
            else:
                alpha, limit = clamp
                g = np.minimum(g, limit)
                mixed = (np.clip(u, -limit, limit) + 1) * g / (1 + np.exp(-alpha * g))
            out[t] += weight * (down[expert] @ mixed)
    return out


SHAPES = [  # rows, experts, experts of a row, width, inner width
    (1, 4, 2, 32, 16),
    (1, 1, 1, 16, 16),
    (7, 8, 3, 64, 48),
    (33, 5, 5, 96, 112),
    (70, 16, 2, 208, 64),
    (40, 3, 1, 48, 272),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_and_xla_compute_what_numpy_does(dtype, shape):
    rows, num_experts, each, width, inner = shape
    rng = np.random.default_rng(sum(shape))
    w = drawn(rng, dtype, num_experts, width, inner)
    x = jnp.asarray(rng.standard_normal((rows, width)), dtype)
    ids, weights = routed(rng, rows, num_experts, each)
    want = plain(x, ids, weights, w)
    tolerance = (1e-5 if dtype == "float32" else 2e-2) * np.abs(want).max()
    tiled = tile_experts(w)
    assert tiled.w_gate_up is not None
    for found in (linear.experts(x, ids, weights, w, "silu"), ops.experts(x, ids, weights, tiled, "silu")):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("clamp", [None, (1.702, 0.8), (0.5, 7.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [*SHAPES, (5, 4, 2, 40, 20)], ids=str)
def test_biases_and_clamped_gates(shape, dtype, clamp):
    rows, num_experts, each, width, inner = shape
    rng = np.random.default_rng(sum(shape))
    biases = {name: jnp.asarray(rng.standard_normal((num_experts, inner)), dtype) for name in ("b_gate", "b_up")}
    w = dataclasses.replace(drawn(rng, dtype, num_experts, width, inner), **biases)
    x = jnp.asarray(rng.standard_normal((rows, width)), dtype)
    ids, weights = routed(rng, rows, num_experts, each)
    want = plain(x, ids, weights, w, clamp=clamp)
    tolerance = (1e-5 if dtype == "float32" else 2e-2) * np.abs(want).max()
    tiled = tile_experts(w)
    assert (tiled.b_gate_up is None) == (tiled.w_gate_up is None) == (width == 40)
    for op, given in ((linear.experts, w), (ops.experts, tiled)):
        found = op(x, ids, weights, given, "silu", clamp=clamp)
        np.testing.assert_allclose(found, want, rtol=0, atol=tolerance)
    if width != 40:  # an activation without a kernel
        found = ops.experts(x, ids, weights, tiled, "gelu", clamp=clamp)
        expected = linear.experts(x, ids, weights, w, "gelu", clamp=clamp)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_depends_neither_on_others_nor_on_their_number(dtype):
    rng = np.random.default_rng(0)
    w = tile_experts(drawn(rng, dtype, 6, 64, 80))
    x = jnp.asarray(rng.standard_normal((45, 64)), dtype)
    ids, weights = routed(rng, 45, 6, 3)
    mix = jax.jit(lambda x, ids, weights, w: ops.experts(x, ids, weights, w, "silu"))
    together = np.asarray(mix(x, ids, weights, w))
    for row in range(0, 45, 7):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(np.asarray(mix(x[one], ids[one], weights[one], w))[0], together[row])
    some = np.asarray(jax.jit(lambda live: ops.experts(x, ids, weights, w, "silu", live=live))(jnp.int32(20)))
    np.testing.assert_array_equal(some[:20], together[:20])
    assert not some[20:].any()


def test_widths_and_activations_without_a_kernel_are_computed_by_xla():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 40)), "float32")
    ids, weights = routed(rng, 5, 4, 2)
    narrow = tile_experts(drawn(rng, "float32", 4, 40, 20))
    assert narrow.w_gate_up is None
    np.testing.assert_allclose(ops.experts(x, ids, weights, narrow, "silu"), plain(x, ids, weights, narrow), atol=1e-5)
    live = ops.experts(x, ids, weights, narrow, "silu", live=jnp.int32(5))
    np.testing.assert_allclose(live, plain(x, ids, weights, narrow), atol=1e-5)
    wide = drawn(rng, "float32", 4, 48, 32)
    x = jnp.asarray(rng.standard_normal((5, 48)), "float32")
    erf = np.vectorize(math.erf)
    for name, activate in (
        ("relu", lambda v: np.maximum(v, 0)),
        ("silu", silu),
        ("gelu", lambda v: v * (1 + erf(v / 2**0.5)) / 2),
    ):
        found = ops.experts(x, ids, weights, tile_experts(wide), name)
        np.testing.assert_allclose(found, plain(x, ids, weights, wide, activate), atol=1e-5)


def test_an_expert_that_is_not_there_is_an_error():
    rng = np.random.default_rng(0)
    w = tile_experts(drawn(rng, "float32", 3, 32, 16))
    x, (ids, weights) = jnp.ones((2, 32)), routed(rng, 2, 3, 1)
    with pytest.raises(Exception, match="no such expert"):
        ops.experts(x, ids + 3, weights, w, "silu").block_until_ready()
