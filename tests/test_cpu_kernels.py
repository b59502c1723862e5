"""Products of the C++ kernels against float64, and what happens where they cannot be had. Attention: tests/pallas."""

import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.cpu import build, ops
from apt_jax.errors import ConfigError
from apt_jax.jax_executor import _attention_ops
from apt_jax.pallas import attention_ops, registry, xla

# Rows, width, outputs: whole tiles; one row; all that is odd; outputs that end in a tile, in a task; rows of two tasks.
SHAPES = [(16, 64, 128), (1, 576, 960), (3, 37, 50), (33, 96, 130), (70, 32, 17), (300, 64, 272), (5, 64, 7), (0, 32, 32)]  # fmt: skip


@pytest.fixture(autouse=True)
def _kernels() -> None:
    build.load()


def _arrays(rows: int, width: int, outputs: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows + width + outputs)
    x = rng.standard_normal((rows, width)) / np.sqrt(width)
    return jnp.asarray(x, dtype), jnp.asarray(rng.standard_normal((outputs, width)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_equals_float64(
    shape: tuple[int, int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_MAX_ROWS", dict.fromkeys(ops._MAX_ROWS, 1 << 30))
    x, w = _arrays(*shape, dtype)
    actual = jax.jit(ops.dense)(x, w)
    assert actual.dtype == jnp.float32
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(np.asarray(actual), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_of_int8_equals_its_integers_times_scales(
    shape: tuple[int, int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_MAX_ROWS", dict.fromkeys(ops._MAX_ROWS, 1 << 30))
    x, w = _arrays(*shape, dtype)
    rng = np.random.default_rng(1)
    values = jnp.asarray(rng.integers(-127, 128, w.shape), jnp.int8)
    scale = jnp.asarray(rng.random(w.shape[0]) / 40, jnp.float32)
    matrix = np.asarray(values, np.float64) * np.asarray(scale, np.float64)[:, None]
    expected = np.asarray(x, np.float64) @ matrix.T
    for product in (ops.dense, xla.dense):
        actual = jax.jit(product)(x, values, scale)
        np.testing.assert_allclose(np.asarray(actual), expected, atol=1e-5, rtol=0)


def test_gated_of_int8_scales_both_halves() -> None:
    x, w = _arrays(20, 64, 96, "bfloat16")
    values = jnp.asarray(np.random.default_rng(1).integers(-127, 128, w.shape), jnp.int8)
    scale = jnp.linspace(0.01, 0.02, 96, dtype=jnp.float32)
    gate, up = np.split(np.asarray(xla.dense(x.astype(jnp.float32), values, scale)), 2, axis=1)
    expected = np.asarray(jax.nn.silu(gate)) * up
    actual = np.asarray(ops.gated(x, values, scale, "silu"), np.float32)
    np.testing.assert_allclose(actual, expected, rtol=2**-7, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_gated_equals_its_parts(shape: tuple[int, int, int], activation: str) -> None:
    rows, width, outputs = shape
    x, w = _arrays(rows, width, 2 * outputs, "bfloat16")
    gate, up = np.split(np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, 2, axis=1)
    expected = np.asarray(xla.activate(jnp.asarray(gate, jnp.float32), activation)) * up
    actual = jax.jit(ops.gated, static_argnums=3)(x, w, None, activation)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=2**-8, atol=1e-5 * np.abs(expected).max()
    )


def test_gates_of_any_size_saturate() -> None:
    x = jnp.asarray([[-3e38] + [0] * 31, [-200] + [0] * 31, [200] + [0] * 31, [3e30] + [0] * 31], jnp.bfloat16)  # fmt: skip
    w = jnp.zeros((64, 32), jnp.bfloat16).at[:, 0].set(1)
    out = np.asarray(ops.gated(x, w, None, "silu"), np.float64)
    expected = np.array([0.0, 0.0, 200.0**2, np.inf])
    np.testing.assert_allclose(out, np.broadcast_to(expected[:, None], out.shape), rtol=2**-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_gives_the_same_bits_in_any_company(dtype: str) -> None:
    x, w = _arrays(16, 96, 200, dtype)
    together = np.asarray(jax.jit(ops.dense)(x, w))
    for row in range(16):
        alone = np.asarray(jax.jit(ops.dense)(x[row : row + 1], w))
        np.testing.assert_array_equal(alone[0], together[row])


def test_nan_and_infinity_stay_in_their_row() -> None:
    x, w = _arrays(40, 64, 64, "bfloat16")
    clean = np.asarray(ops.dense(x, w))
    dirty = np.asarray(ops.dense(x.at[7, 3].set(jnp.nan).at[21, 0].set(jnp.inf), w))
    assert np.isnan(dirty[7]).all()
    assert not np.isfinite(dirty[21]).any()
    others = [r for r in range(40) if r not in (7, 21)]
    np.testing.assert_array_equal(dirty[others], clean[others])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache directory of its own, and nothing loaded yet; the kernels of this process stay registered."""
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    for function in (build._library, build.load, registry.attention_ops):
        function.cache_clear()
    yield tmp_path
    for function in (build._library, build.load, registry.attention_ops):
        function.cache_clear()


def _compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_xla_serves_and_says_so(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert attention_ops("cpu").name == "xla"
    assert "no C++ compiler found" in caplog.text
    with pytest.raises(ConfigError, match=r"'cpu' cannot be had: no C\+\+ compiler"):
        _attention_ops("cpu", "cpu", None, frozenset())


def test_a_compiler_that_fails_is_named_with_its_error(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = _compiler(fresh / "cc", "echo 'kernels.cc:1: error: no such instruction' >&2; exit 1")
    monkeypatch.setenv("CXX", broken)
    with pytest.raises(build.KernelBuildError, match=r"cc failed: .*no such instruction"):
        build.load()
    monkeypatch.setenv("CXX", str(fresh / "nothing"))
    with pytest.raises(build.KernelBuildError, match="nothing: No such file"):
        build.load()
    assert not list((fresh / "cache" / "kernels").iterdir())


def test_what_the_compiler_made_is_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = fresh / "count"
    real = build.find_compiler()
    assert real is not None
    monkeypatch.setenv("CXX", _compiler(fresh / "cc", f'echo x >> {count}; exec {" ".join(real)} "$@"'))  # fmt: skip
    build._library()
    (made,) = (fresh / "cache" / "kernels").iterdir()
    assert made.suffix == ".so"
    build._library.cache_clear()
    build._library()
    assert count.read_text().split() == ["x"]


def test_kernels_of_a_directory_that_others_write_are_not_loaded(
    fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = fresh / "cache" / "kernels"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    (directory / "kernels-planted.so").write_bytes(b"planted")
    with caplog.at_level(logging.WARNING):
        build._library()
    assert "must belong to this user" in caplog.text
    assert [path.name for path in directory.iterdir()] == ["kernels-planted.so"]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o777
