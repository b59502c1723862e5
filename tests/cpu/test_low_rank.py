"""The kernel that adds what adapters add, against plain XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.cpu import build, ops
from apt_jax.ops import low_rank
from apt_jax.ops.weights import LowRank


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    build.load()


def drawn(rng: np.random.Generator, dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "inputs", "rank", "widths"),
    [(1, 16, 1, (16,)), (37, 80, 5, (48, 17, 17)), (64, 33, 16, (7, 64)), (9, 576, 8, (100,))],
)
def test_the_kernel_adds_what_xla_adds(dtype, rows, inputs, rank, widths):
    rng = np.random.default_rng(rows)
    x, y = drawn(rng, dtype, rows, inputs), drawn(rng, "float32", rows, sum(widths))
    index = jnp.asarray(rng.integers(0, 5, rows), jnp.int32)
    parts = [
        (None if i == 1 else LowRank(a=drawn(rng, dtype, 4, rank, inputs), b=drawn(rng, dtype, 4, rank, width)), width)
        for i, width in enumerate(widths)
    ]
    found = np.asarray(jax.jit(lambda: ops.add_low_rank(y, x, parts, index))())
    want = np.asarray(low_rank.add_low_rank(y, x, parts, index))
    # XLA's way rounds the inner product to the type of the matrices.
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(found, want, rtol=0, atol=tolerance * np.abs(want).max())
    none = np.flatnonzero(np.asarray(index) == 0)
    np.testing.assert_array_equal(found[none], np.asarray(y)[none])


def test_a_row_does_not_depend_on_its_neighbours():
    """Rows of one adapter are computed four at a time, or one by one."""
    rng = np.random.default_rng(0)
    x, y = drawn(rng, "float32", 24, 70), drawn(rng, "float32", 24, 50)
    part = LowRank(a=drawn(rng, "float32", 3, 6, 70), b=drawn(rng, "float32", 3, 6, 50))
    index = jnp.asarray(rng.integers(1, 4, 24), jnp.int32)
    add = jax.jit(lambda x, y, index: ops.add_low_rank(y, x, [(part, 50)], index))
    together = np.asarray(add(x, y, index))
    for row in range(0, 24, 5):
        np.testing.assert_array_equal(
            np.asarray(add(x[row : row + 1], y[row : row + 1], index[row : row + 1]))[0], together[row]
        )


def test_ranks_beyond_the_kernel_are_left_to_xla():
    rng = np.random.default_rng(0)
    x, y = drawn(rng, "float32", 3, 16), drawn(rng, "float32", 3, 16)
    part = LowRank(a=drawn(rng, "float32", 1, 600, 16), b=drawn(rng, "float32", 1, 600, 16))
    index = jnp.ones(3, jnp.int32)
    found = ops.add_low_rank(y, x, [(part, 16)], index)
    np.testing.assert_allclose(found, y + (x @ part.a[0].T) @ part.b[0], rtol=1e-4, atol=1e-3)
