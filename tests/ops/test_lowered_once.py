"""Functions that are traced and lowered once a process, in whatever programs they are."""

import jax
import jax.numpy as jnp
import numpy as np

from apt_jax.ops.lowered_once import lowered_once

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Scaled:
    """Counts how often it is traced."""

    def __init__(self) -> None:
        self.traced = 0

    def __call__(self, x, rows, *, factor, more=None):
        self.traced += 1
        out = x * factor + rows[0].astype(x.dtype)
        return (out, rows) if more is None else (out + more["y"], rows)


def test_programs_share_what_is_lowered_and_keep_their_results() -> None:
    function = Scaled()
    once = lowered_once(function, static_argnames=("factor",), platform="cpu")

    def first(x):
        out, (row,) = once(x, (jnp.float32(1.0),), factor=2.0)
        return once(out, (row,), factor=2.0)[0]

    def second(x):
        return jnp.sum(once(x, (jnp.float32(3.0),), factor=2.0)[0])

    np.testing.assert_array_equal(jax.jit(first)(X), (X * 2 + 1) * 2 + 1)
    np.testing.assert_array_equal(jax.jit(second)(X), np.sum(X * 2 + 3))
    assert function.traced == 1


def test_other_shapes_static_arguments_and_trees_are_lowered_by_themselves() -> None:
    function = Scaled()
    once = lowered_once(function, static_argnames=("factor",), platform="cpu")

    def run(x, factor, **arrays):
        return jax.jit(lambda x: once(x, (jnp.float32(1.0),), factor=factor, **arrays)[0])(x)

    np.testing.assert_array_equal(run(X, 2.0), X * 2 + 1)
    np.testing.assert_array_equal(run(X[:1], 2.0), X[:1] * 2 + 1)
    np.testing.assert_array_equal(run(X, 3.0), X * 3 + 1)
    np.testing.assert_array_equal(run(X.astype(np.float16), 2.0), (X * 2 + 1).astype(np.float16))
    np.testing.assert_array_equal(run(X, 2.0, more={"y": jnp.float32(4.0)}), X * 2 + 5)
    assert function.traced == 5
    run(X, 3.0)
    assert function.traced == 5
