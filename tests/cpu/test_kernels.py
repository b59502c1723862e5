"""Products of the C++ kernels against float64, and the fallback where they are not available. Attention:
tests/pallas."""

import dataclasses
import errno
import functools
import io
import logging
import os
import select
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax import backends as registry
from apt_jax.backends import attention_ops
from apt_jax.cpu import build, compiler, ops
from apt_jax.errors import ConfigError
from apt_jax.executor.attention_choice import choose_attention
from apt_jax.models import weight_layout as tiles
from apt_jax.ops import linear, sampling
from apt_jax.ops.weights import NormParams, QuantizedMatrix, TiledMatrix, rows_of
from apt_jax.utils import cache_dir
from apt_jax.utils.cache_dir import write_verified
from tests.support.paged_driver import CONFIG

# Rows, width, outputs: whole tiles; one row; all that is odd; outputs that end in a tile, in a task; rows of two tasks.
SHAPES = [
    (16, 64, 128),
    (1, 576, 960),
    (3, 37, 50),
    (33, 96, 130),
    (70, 32, 17),
    (300, 64, 272),
    (5, 64, 7),
    (256, 11008, 34),
    (0, 32, 32),
]


@pytest.fixture(autouse=True)
def _kernels() -> None:
    build.load()


def _arrays(rows: int, width: int, outputs: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows + width + outputs)
    x = rng.standard_normal((rows, width)) / np.sqrt(width)
    return jnp.asarray(x, dtype), jnp.asarray(rng.standard_normal((outputs, width)), dtype)


DTYPES = ["float32", "bfloat16"]


def _laid_out(rows: int, width: int, outputs: int, dtype: str) -> tuple[jax.Array, jax.Array, TiledMatrix]:
    """Rows, a matrix, and the matrix as it is given to the kernels."""
    x, w = _arrays(rows, width, outputs, dtype)
    return x, w, tiles.tile_matrix(w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_equals_float64(shape: tuple[int, int, int], dtype: str) -> None:
    x, w, given = _laid_out(*shape, dtype)
    actual = jax.jit(ops.dense)(x, given)
    assert actual.dtype == jnp.float32
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(np.asarray(actual), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("shape", [(3, 37, 50), (9, 64, 130)])
def test_dense_adds_a_bias_and_activates(
    shape: tuple[int, int, int], activation: str | None, dtype: str, out: str
) -> None:
    x, w, given = _laid_out(*shape, dtype)
    bias = jnp.asarray(np.random.default_rng(0).standard_normal(shape[2]), dtype)
    call = jax.jit(ops.dense, static_argnames=("activation", "dtype"))
    actual = call(x, given, bias=bias, activation=activation, dtype=jnp.dtype(out))
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T + np.asarray(bias, np.float64)
    if activation is not None:
        expected = np.asarray(linear.activate(jnp.asarray(expected, jnp.float32), activation), np.float64)
    assert actual.dtype == jnp.dtype(out)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, atol=1e-5, rtol=2**-8 if out == "bfloat16" else 1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 64, 40_000)])
def test_argmax_of_products_equals_that_of_written_ones(shape: tuple[int, int, int], dtype: str) -> None:
    x, _, given = _laid_out(*shape, dtype)
    x = x.at[1:2].multiply(0)  # all equal: the first one
    tokens, trusted = jax.jit(ops.dense_argmax)(x, given)
    scores = np.asarray(jax.jit(ops.dense)(x, given))
    np.testing.assert_array_equal(tokens, scores.argmax(axis=1))
    assert tokens.dtype == jnp.int32
    assert np.asarray(trusted).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_says_which_rows_have_no_best(dtype: str) -> None:
    x, w, given = _laid_out(6, 64, 70, dtype)
    x = x.at[1, 3].set(jnp.nan).at[4, 0].set(jnp.inf)
    tokens, trusted = jax.jit(ops.dense_argmax)(x, given)
    np.testing.assert_array_equal(trusted, [True, False, True, True, False, True])
    expected, _ = sampling.greedy(linear.dense(x, w))
    np.testing.assert_array_equal(np.asarray(tokens)[trusted], np.asarray(expected)[trusted])
    assert ((np.asarray(tokens) >= 0) & (np.asarray(tokens) < 70)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_of_int8_equals_its_integers_times_scales(shape: tuple[int, int, int], dtype: str) -> None:
    x, w = _arrays(*shape, dtype)
    rng = np.random.default_rng(1)
    values = jnp.asarray(rng.integers(-127, 128, w.shape), jnp.int8)
    scale = jnp.asarray(rng.random(w.shape[0]) / 40, jnp.float32)
    matrix = np.asarray(values, np.float64) * np.asarray(scale, np.float64)[:, None]
    expected = np.asarray(x, np.float64) @ matrix.T
    given = tiles.tile_matrix(QuantizedMatrix(values=values, scale=scale))
    for actual in (jax.jit(ops.dense)(x, given), jax.jit(linear.dense)(x, values, scale)):
        np.testing.assert_allclose(np.asarray(actual), expected, atol=1e-5, rtol=0)


def test_gated_of_int8_scales_both_halves() -> None:
    x, w = _arrays(20, 64, 96, "bfloat16")
    values = jnp.asarray(np.random.default_rng(1).integers(-127, 128, w.shape), jnp.int8)
    scale = jnp.linspace(0.01, 0.02, 96, dtype=jnp.float32)
    gate, up = np.split(np.asarray(linear.dense(x.astype(jnp.float32), values, scale)), 2, axis=1)
    expected = np.asarray(jax.nn.silu(gate)) * up
    given = tiles.tile_matrix(QuantizedMatrix(values=values, scale=scale))
    actual = np.asarray(ops.gated(x, given, "silu"), np.float32)
    np.testing.assert_allclose(actual, expected, rtol=2**-7, atol=1e-4 * np.abs(expected).max())


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("shape", SHAPES[:-1])
def test_gated_equals_its_parts(shape: tuple[int, int, int], activation: str, dtype: str) -> None:
    rows, width, outputs = shape
    x, w = _arrays(rows, width, 2 * outputs, dtype)
    gate, up = np.split(np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, 2, axis=1)
    expected = np.asarray(linear.activate(jnp.asarray(gate, jnp.float32), activation)) * up
    actual = jax.jit(ops.gated, static_argnums=2)(x, tiles.tile_matrix(w), activation)
    assert actual.dtype == jnp.dtype(dtype)
    rtol = 2**-8 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rtol, atol=1e-5 * np.abs(expected).max())


def test_gates_of_any_size_saturate() -> None:
    x = jnp.asarray([[-3e38] + [0] * 31, [-200] + [0] * 31, [200] + [0] * 31, [3e30] + [0] * 31], jnp.bfloat16)
    w = jnp.zeros((64, 32), jnp.bfloat16).at[:, 0].set(1)
    out = np.asarray(ops.gated(x, tiles.tile_matrix(w), "silu"), np.float64)
    expected = np.array([0.0, 0.0, 200.0**2, np.inf])
    np.testing.assert_allclose(out, np.broadcast_to(expected[:, None], out.shape), rtol=2**-8)


# Rows, heads, key heads, lanes, width of layer inputs: OPT's; one row; grouped; odd widths, less and more than a panel.
HEADS = [
    (9, 12, 12, 64, 768),
    (1, 4, 4, 16, 64),
    (7, 6, 2, 32, 96),
    (14, 3, 3, 6, 21),
    (5, 4, 1, 34, 135),
    (3, 2, 2, 2, 5),
]


def _heads(shape: tuple[int, ...], onto_inputs: bool, dtype: str) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Rows of every head, matrices of key heads, and their products in float64."""
    batch, heads, key_heads, lanes, width = shape
    rng = np.random.default_rng(batch + width)
    x = jnp.asarray(rng.standard_normal((batch, heads, lanes if onto_inputs else width)), dtype)
    w = jnp.asarray(rng.standard_normal((key_heads, lanes, width)) / np.sqrt(width), dtype)
    each = np.repeat(np.asarray(w, np.float64), heads // key_heads, axis=0)
    expected = np.einsum("bnh,nhd->bnd" if onto_inputs else "bnd,nhd->bnh", np.asarray(x, np.float64), each)
    return x, w, expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("onto_inputs", [True, False])
@pytest.mark.parametrize("shape", HEADS)
def test_products_of_heads_equal_float64(shape: tuple[int, ...], onto_inputs: bool, dtype: str) -> None:
    x, w, expected = _heads(shape, onto_inputs, dtype)
    rounded = dtype == "bfloat16" and onto_inputs
    for product in (ops.head_products, linear.head_products):
        actual = jax.jit(product, static_argnames="onto_inputs")(x, w, onto_inputs=onto_inputs)
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(actual), expected, atol=2e-5, rtol=2**-8 if rounded else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("onto_inputs", [True, False])
@pytest.mark.parametrize("shape", HEADS)
def test_products_of_heads_are_made_for_the_rows_asked_for(
    shape: tuple[int, ...], onto_inputs: bool, dtype: str
) -> None:
    x, w, _ = _heads(shape, onto_inputs, dtype)
    product = jax.jit(ops.head_products, static_argnames="onto_inputs")
    whole = np.asarray(product(x, w, onto_inputs=onto_inputs))
    for first, last in ((0, 1), (1, 4), (2, 2), (0, len(x)), (len(x) - 1, len(x))):
        some = np.asarray(product(x, w, onto_inputs=onto_inputs, rows=(jnp.int32(first), jnp.int32(last))))
        np.testing.assert_array_equal(some[first:last], whole[first:last])  # the same bits in any company
        assert not some[:first].any()
        assert not some[last:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gives_the_same_bits_in_any_company(dtype: str) -> None:
    rows = 40
    x, _, given = _laid_out(rows, 96, 200, dtype)
    together = np.asarray(jax.jit(ops.dense)(x, given))
    for row in range(rows):
        alone = np.asarray(jax.jit(ops.dense)(x[row : row + 1], given))
        np.testing.assert_array_equal(alone[0], together[row])


def test_nan_and_infinity_stay_in_their_row() -> None:
    x, _, w = _laid_out(40, 64, 64, "bfloat16")
    clean = np.asarray(ops.dense(x, w))
    dirty = np.asarray(ops.dense(x.at[7, 3].set(jnp.nan).at[21, 0].set(jnp.inf), w))
    assert np.isnan(dirty[7]).all()
    assert not np.isfinite(dirty[21]).any()
    others = [r for r in range(40) if r not in (7, 21)]
    np.testing.assert_array_equal(dirty[others], clean[others])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (19, 50), (64, 576), (0, 16), (3, 7)])
def test_add_norm_equals_its_parts(rows: int, width: int, layer: bool, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    h, delta = (jnp.asarray(rng.standard_normal((rows, width)) * 3 + 1, jnp.float32) for _ in "ab")
    scale, bias = (jnp.asarray(rng.standard_normal(width), dtype) for _ in "ab")
    wide = np.asarray(h, np.float64) + np.asarray(delta, np.float64)
    for added, offset, given in ((delta, 0.0, bias), (None, 1.0, None)):
        norm = NormParams(scale=scale, bias=given)
        call = jax.jit(ops.add_norm, static_argnames=("dtype", "eps", "offset", "layer"))
        total, out = call(h, added, norm, jnp.dtype(dtype), eps=1e-5, offset=offset, layer=layer)
        x = wide if added is not None else np.asarray(h, np.float64)
        np.testing.assert_allclose(total, x, rtol=1e-6)
        centred = x - x.mean(axis=1, keepdims=True) if layer else x
        scaled = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
        expected = scaled * (np.asarray(scale, np.float64) + offset)
        expected += 0 if given is None else np.asarray(given, np.float64)
        assert out.dtype == jnp.dtype(dtype)
        tolerance = 2e-5 if dtype == "float32" else 2**-8
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("half", [None, 8, 3])
def test_split_qkv_equals_its_parts(half: int | None, dtype: str) -> None:
    config = dataclasses.replace(CONFIG, num_heads=4, num_kv_heads=2, head_dim=16)
    rng = np.random.default_rng(0)
    sums = jnp.asarray(rng.standard_normal((21, 8 * 16)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal(8 * 16), dtype)
    turns = None
    if half is not None:
        angles = jnp.asarray(rng.random((21, half)) * 6, jnp.float32)
        turns = (jnp.cos(angles), jnp.sin(angles))
    call = jax.jit(ops.split_qkv, static_argnums=(3, 4, 5))
    q, k, v = call(sums, bias, turns, config.head_dim, config.num_heads, jnp.dtype(dtype))
    whole = (sums + bias.astype(jnp.float32)[None]).reshape(21, 8, 16)
    turned = whole if turns is None else linear.apply_rope(whole, *turns)
    expected = (turned[:, :4], turned[:, 4:6], whole[:, 6:])
    for actual, wanted in zip((q, k, v), expected, strict=True):
        assert actual.dtype == jnp.dtype(dtype)
        flat = np.asarray(wanted.reshape(21, -1), np.float64)
        np.testing.assert_allclose(
            np.asarray(actual, np.float64), flat, rtol=2**-8 if dtype == "bfloat16" else 1e-5, atol=1e-6
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_qkv_leaves_no_key_or_value_that_is_not_finite(dtype: str) -> None:
    config = dataclasses.replace(CONFIG, num_heads=1, num_kv_heads=1, head_dim=8)
    bad = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, 3.4e38, 1.0, -0.0, 2.0, 3.0], jnp.float32)
    q, k, v = ops.split_qkv(jnp.tile(bad, (1, 3)), None, None, config.head_dim, config.num_heads, jnp.dtype(dtype))
    assert np.isnan(np.asarray(q, np.float32)[0, 0])
    for part in (k, v):
        found = np.asarray(part, np.float32)[0]
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found[[0, 1, 2, 4, 6, 7]], [0, 0, 0, 1, 2, 3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 50), (16, 32), (7, 33)])
def test_rows_of_a_tiled_matrix_are_its_rows(shape: tuple[int, int], dtype: str) -> None:
    w = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    rows = jnp.asarray([0, shape[0] - 1, 3, 3], jnp.int32)
    np.testing.assert_array_equal(rows_of(tiles.tile_matrix(w), rows), w[rows])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache directory of its own, and nothing loaded yet; the kernels of this process stay loaded and registered."""
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    # Not cleared: another process may have replaced the file since, and the kernels of two files cannot be registered.
    monkeypatch.setattr(build, "_library", functools.cache(build._library.__wrapped__))
    monkeypatch.setattr(build, "load", functools.cache(build.load.__wrapped__))
    for function in (registry.attention_ops, cache_dir._log_not_kept):
        function.cache_clear()
    yield tmp_path
    registry.attention_ops.cache_clear()


def _compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_D6_without_a_compiler_xla_serves_and_says_so(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert attention_ops("cpu").name == "xla"
    assert "no C++ compiler found" in caplog.text
    with pytest.raises(ConfigError, match=r"'cpu' is not available: no C\+\+ compiler"):
        choose_attention("cpu", "cpu", None, {})


def test_D6_a_compiler_that_fails_is_named_with_its_error(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _compiler(fresh / "cc", "echo 'kernels.cc:1: error: no such instruction' >&2; exit 1")
    monkeypatch.setenv("CXX", broken)
    with pytest.raises(build.KernelBuildError, match=r"cc failed: .*no such instruction"):
        build.load()


def _failing(fresh: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> Path:
    """Use a compiler that adds a line to the file returned and ends so, a shell command."""
    count = fresh / "count"
    monkeypatch.setenv("CXX", _compiler(fresh / "cc", f"echo x >> {count}; {ending}"))
    return count


def _starts(count: Path) -> int:
    """Compilers that ran since the last call of this; nothing is loaded after it."""
    build._library.cache_clear()
    number = len(count.read_text().split()) if count.exists() else 0
    count.unlink(missing_ok=True)
    return number


LASTING = {"an error": "echo 'x.cc:1: error: bad' >&2; exit 1", "no reason": "exit 3", "a crash": "kill -SEGV $$"}


@pytest.mark.parametrize("ending", LASTING.values(), ids=LASTING)
def test_a_build_that_failed_is_not_tried_at_the_next_start(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    count = _failing(fresh, monkeypatch, ending)
    messages = []
    for calls in (2, 0):  # two parts
        caplog.clear()
        registry.attention_ops.cache_clear()
        assert attention_ops("cpu").name == "xla"
        assert 1 <= _starts(count) <= 2 if calls else _starts(count) == 0
        (record,) = [record for record in caplog.records if record.name == registry.__name__]
        messages.append(record.message)
    (kept,) = (fresh / "cache" / "kernels").iterdir()
    assert kept.suffix == ".failed"
    for message in messages:
        assert "\n" not in message
        assert "cc failed: " in message
        assert f"delete {kept}" in message
        assert "--attention-backend xla" in message
    build.begin()
    assert not build.is_compiling()
    kept.unlink()
    with pytest.raises(build.KernelBuildError):
        build._library()
    assert _starts(count) > 0


def test_a_build_that_takes_too_long_is_not_tried_at_the_next_start(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = _failing(fresh, monkeypatch, "exec sleep 1000")
    monkeypatch.setattr(compiler, "_LIMIT_S", 0)
    for _ in range(2):
        with pytest.raises(build.KernelBuildError, match="cc took more than 0 s; tried again in 24 h"):
            build._library()
        build._library.cache_clear()
        monkeypatch.setattr(build, "compile_library", None)
    assert _starts(count) <= 2


@pytest.mark.parametrize("change", ["a day", "a clock set back", "flags", "the compiler", "a damaged note"])
def test_a_build_that_failed_is_tried_again_after(fresh: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    count = _failing(fresh, monkeypatch, "exit 1")
    with pytest.raises(build.KernelBuildError):
        build._library()
    assert _starts(count) > 0
    (note,) = (fresh / "cache" / "kernels").iterdir()
    if change == "flags":
        monkeypatch.setenv("APT_JAX_KERNEL_FLAGS", "-O1")
    elif change == "the compiler":
        os.utime(fresh / "cc", (1, 1))
    elif change == "a damaged note":
        note.write_bytes(b"{")
    else:
        now_s = build.time.time() + (build._TRY_AGAIN_S if change == "a day" else -1000)
        monkeypatch.setattr(build.time, "time", lambda: now_s)
    with pytest.raises(build.KernelBuildError):
        build._library()
    assert _starts(count) > 0


PASSING = {
    "no such program": "exec /nowhere/g++",
    "a program that cannot be run": "exec /dev/null",
    "no part of the compiler": "echo 'error: cannot execute cc1plus: No such file or directory' >&2; exit 1",
    "no header": "echo \"a.cc:1: fatal error: 'vector' file not found\" >&2; exit 1",
    "no compiler behind a cache": "echo 'ccache: error: Could not find compiler' >&2; exit 1",
    "a full disk": "echo 'fatal error: error writing to /tmp/a.s: No space left on device' >&2; exit 1",
    "the end of the server": "kill -TERM $$",
    # A shell whose parent ignores the signal would do so, too.
    "an interruption": f"exec {sys.executable} -c 'import os, signal as s; s.signal(2, s.SIG_DFL); os.kill(os.getpid(), 2)'",
}


@pytest.mark.parametrize("ending", PASSING.values(), ids=PASSING)
def test_a_build_is_tried_again_where_something_was_missing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    count = _failing(fresh, monkeypatch, ending)
    for _ in range(2):
        with pytest.raises(build.KernelBuildError, match="cc failed: "):
            build._library()
        assert _starts(count) > 0
    assert list((fresh / "cache" / "kernels").iterdir()) == []


def test_a_missing_compiler_is_no_failed_build(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fresh / "nothing"))
    with pytest.raises(build.KernelBuildError, match="nothing: No such file"):
        build.load()
    assert list((fresh / "cache" / "kernels").iterdir()) == []


def test_a_library_that_cannot_be_loaded_is_not_made_at_the_next_start(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = _failing(fresh, monkeypatch, 'for target; do :; done; echo text > "$target"')
    for calls in (CALLS, 0):
        with pytest.raises(build.KernelBuildError, match=r"cannot load .*\.failed; "):
            build._library()
        assert _starts(count) == calls


def test_a_build_that_succeeds_forgets_that_it_failed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = _counting(fresh, monkeypatch, whole=False)
    compiler_command = build.find_compiler()
    assert compiler_command is not None
    directory = cache_dir.private_dir("kernels")
    assert directory is not None
    write_verified(build._failed_path(directory, build.library_name(compiler_command)), b"damaged")
    build._library()
    assert [path.suffix for path in directory.iterdir()] == [".so"]
    assert _starts(count) == CALLS


@pytest.fixture
def slow_compiler(fresh: Path) -> Iterator[tuple[str, io.FileIO]]:
    """A compiler that starts a program and waits for it, and a pipe: from the program a line, and its end when both
    have ended."""
    pipe = fresh / "pipe"
    os.mkfifo(pipe)
    name = _compiler(
        fresh / "slow", f"exec 9> {pipe}; trap '' TERM HUP; sh -c 'echo here >&9; exec sleep 1000'; exit 1"
    )
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as read:
        os.set_blocking(read.fileno(), True)
        yield name, read


def _readable(read: io.FileIO) -> bool:
    return bool(select.select([read], [], [], 60)[0])


def test_compilers_and_what_they_started_end_with_the_server(slow_compiler: tuple[str, io.FileIO]) -> None:
    name, read = slow_compiler
    script = f"from apt_jax.cpu import compiler; compiler._run([[{name!r}]])"
    with subprocess.Popen([sys.executable, "-c", script]) as server:
        assert _readable(read)
        assert read.read(100) == b"here\n"
        server.kill()
    assert _readable(read)
    assert read.read(100) == b""


def test_a_compiler_that_takes_too_long_ends_with_what_it_started(
    slow_compiler: tuple[str, io.FileIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, read = slow_compiler
    monkeypatch.setattr(compiler, "_LIMIT_S", 0)
    monkeypatch.setattr(compiler._compilers, "add", lambda pid: _readable(read))
    with pytest.raises(build.KernelBuildError, match="slow took more than 0 s"):
        compiler._run([[name]])
    assert read.read(100) == b"here\n"
    assert _readable(read)
    assert read.read(100) == b""


CALLS = 3
"""Calls of the compiler for a library: two parts, and what joins them."""


def _counting(fresh: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> Path:
    """Use a compiler that adds a line to the file returned and, unless `whole`, compiles an empty source instead."""
    count, real = fresh / "count", build.find_compiler()
    assert real is not None
    given = '"$@"' if whole else '-shared -fPIC -x c++ /dev/null -o "$target"'
    script = f"echo x >> {count}; for target; do :; done; exec {' '.join(real)} {given}"
    monkeypatch.setenv("CXX", _compiler(fresh / "cc", script))
    return count


whole_or_empty = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
"""An optimised build of the kernels takes half a minute, and what is kept and loaded does not depend on it."""


@whole_or_empty
def test_what_the_compiler_made_is_kept(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    count = _counting(fresh, monkeypatch, whole)
    build._library()
    assert "compiling the CPU kernels, once" in caplog.text  # which takes half a minute
    (made,) = (fresh / "cache" / "kernels").iterdir()
    assert made.suffix == ".so"
    build._library.cache_clear()
    build._library()
    assert len(count.read_text().split()) == CALLS


@pytest.mark.parametrize("size", [0, 1000, "half", "all but the digest"])
def test_H8_F10_a_library_that_was_cut_is_compiled_again(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: int | str
) -> None:
    count = _counting(fresh, monkeypatch, whole=False)
    build._library()
    (made,) = (fresh / "cache" / "kernels").iterdir()
    whole = made.read_bytes()
    of_name = {"half": len(whole) // 2, "all but the digest": len(whole) - 73}
    made.unlink()  # it is loaded, and a loaded file must not become shorter
    made.write_bytes(whole[: size if isinstance(size, int) else of_name[size]])
    caplog.clear()
    build._library.cache_clear()
    build._library()
    assert made.read_bytes() == whole
    assert len(count.read_text().split()) == 2 * CALLS
    assert [record.message.partition(": ")[2] for record in caplog.records if "damaged" in record.message] == [
        "damaged; removed, and made again"
    ]


def test_a_library_that_cannot_be_loaded_is_compiled_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = _counting(fresh, monkeypatch, whole=False)
    build._library()
    (made,) = (fresh / "cache" / "kernels").iterdir()
    whole = made.read_bytes()
    write_verified(made, b"of another machine")
    build._library.cache_clear()
    build._library()
    assert made.read_bytes() == whole
    assert len(count.read_text().split()) == 2 * CALLS


def test_H8_without_room_for_it_the_library_is_loaded_and_a_later_start_keeps_it(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = _counting(fresh, monkeypatch, whole=False)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(build, "write_verified", full)
        assert build._library() is not None
    assert "No space left" in caplog.text
    assert list((fresh / "cache" / "kernels").iterdir()) == []
    for _ in range(2):
        build._library.cache_clear()
        build._library()
    assert len(count.read_text().split()) == 2 * CALLS


def test_O7_what_is_loaded_is_the_file_that_was_verified(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has its name by then."""
    _counting(fresh, monkeypatch, whole=False)
    build._library()
    (made,) = (fresh / "cache" / "kernels").iterdir()
    loaded = []

    def replaced_before_it_is_loaded(name: str) -> object:
        made.unlink()
        made.write_bytes(b"planted")
        loaded.append(os.readlink(name))
        return object()

    monkeypatch.setattr("ctypes.CDLL", replaced_before_it_is_loaded)
    build._library.cache_clear()
    build._library()
    assert loaded == [f"{made} (deleted)"]


@whole_or_empty
def test_kernels_of_a_directory_that_others_write_are_not_loaded(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    count = _counting(fresh, monkeypatch, whole)
    directory = fresh / "cache" / "kernels"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    (directory / "kernels-planted.so").write_bytes(b"planted")
    with caplog.at_level(logging.WARNING):
        build._library()
    assert "must belong to this user" in caplog.text
    assert len(count.read_text().split()) == CALLS
    assert [path.name for path in directory.iterdir()] == ["kernels-planted.so"]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o777


def test_processes_that_start_together_compile_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = _counting(fresh, monkeypatch, whole=False)
    script = "from apt_jax.cpu import build; build._library()"
    started = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    assert count.read_text().split() == ["x"] * 3  # two parts and their link
