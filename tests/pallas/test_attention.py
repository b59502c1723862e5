"""Every implementation of an attention op against its reference, over ragged lengths, dtypes and head layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.pallas import attention_ops, reference

BLOCK = 4
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 2e-3}
"""Relative to the largest output: one layer's attention output, KERNELS-style bounds per dtype."""
SHAPES = [(1, 4, 4, 8), (3, 4, 4, 8), (20, 4, 2, 8), (32, 2, 2, 16)]
"""(B, N, K, H)"""
IMPLEMENTATIONS = ["xla"]


def _close(actual, expected, dtype: str) -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.abs(actual - expected).max() <= TOLERANCE[dtype] * max(1.0, np.abs(expected).max())


def _pool(rng, batch: int, lanes: int, max_len: int, dtype: str, halves: int):
    per_row = -(-max_len // BLOCK)
    num_blocks = 1 + batch * halves * per_row
    pool = rng.standard_normal((num_blocks, BLOCK * lanes)).astype(np.float32)
    pool[0] = np.nan  # the null block must never be read as data
    tables = (1 + rng.permutation(num_blocks - 1)).astype(np.int32).reshape(batch, halves, per_row)
    lens = rng.integers(0, max_len + 1, batch).astype(np.int32)
    lens[0] = max_len
    return jnp.asarray(pool).astype(dtype), tables, lens


def _without_unused(tables, lens):
    """Unused entries point at the null block, as the engine pads them."""
    used = np.arange(tables.shape[-1]) < -(-lens // BLOCK)[:, None]
    return np.where(used[:, None, :], tables, 0)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_ops_match_their_references(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    b, n, k, h = shape
    d = n * h
    rng = np.random.default_rng(b)
    ops = attention_ops("cpu", name)
    q = jnp.asarray(rng.standard_normal((b, n, h)), jnp.float32).astype(dtype)

    pool, tables, lens = _pool(rng, b, k * h, 150, dtype, 2)
    finite_pool = pool.at[0].set(0)
    tables = _without_unused(tables, lens)
    expected = reference.decode_kv(
        q, finite_pool, jnp.asarray(tables), jnp.asarray(lens), block_size=BLOCK
    )
    actual = jax.jit(ops.decode_kv, static_argnames="block_size")(
        q, finite_pool, tables, lens, block_size=BLOCK
    )
    _close(actual, expected, dtype)
    assert not np.any(np.asarray(actual)[lens == 0])
    again = jax.jit(ops.decode_kv, static_argnames="block_size")(
        q, finite_pool, tables, lens, block_size=BLOCK
    )
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(again))

    if k == n:
        pool, tables, lens = _pool(rng, b, d, 150, dtype, 1)
        pool = pool.at[0].set(0)
        tables = _without_unused(tables, lens)[:, 0]
        q_absorbed = jnp.asarray(rng.standard_normal((b, n, d)) / d**0.5, jnp.float32).astype(dtype)
        expected = reference.decode_absorbed(
            q_absorbed, pool, jnp.asarray(tables), jnp.asarray(lens), block_size=BLOCK
        )
        actual = jax.jit(ops.decode_absorbed, static_argnames="block_size")(
            q_absorbed, pool, tables, lens, block_size=BLOCK
        )
        _close(actual, expected, dtype)

        weights = [
            jnp.asarray(rng.standard_normal(s) / d**0.5, jnp.float32).astype(dtype)
            for s in ((k, h, d), (k, h), (k, h, d), (k, h))
        ]
        expected = reference.decode_reprojected(
            q, pool, jnp.asarray(tables), jnp.asarray(lens), *weights, block_size=BLOCK
        )
        actual = jax.jit(ops.decode_reprojected, static_argnames="block_size")(
            q, pool, tables, lens, *weights, block_size=BLOCK
        )
        _close(actual, expected, dtype)


def test_rows_outside_the_range_are_left_out() -> None:
    rng = np.random.default_rng(3)
    pool, tables, lens = _pool(rng, 64, 16, 60, "float32", 2)
    pool = pool.at[0].set(0)
    q = jnp.asarray(rng.standard_normal((64, 2, 8)), jnp.float32)
    decode = jax.jit(attention_ops("cpu").decode_kv, static_argnames="block_size")
    rows = (jnp.int32(5), jnp.int32(43))
    whole = np.asarray(decode(q, pool, tables, lens, block_size=BLOCK))
    part = np.asarray(decode(q, pool, tables, lens, block_size=BLOCK, rows=rows))
    np.testing.assert_array_equal(part[5:43], whole[5:43])
    assert not part[:5].any()
    assert not part[43:].any()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_absorption_equals_reprojection_and_kv(dtype: str) -> None:
    """The algebra of DESIGN.md §6 on the same cached inputs: b_k drops out, b_v is added once."""
    rng = np.random.default_rng(11)
    b, n, h = 5, 4, 8
    d = n * h
    pool, tables, lens = _pool(rng, b, d, 90, "float32", 1)
    tables, lens = jnp.asarray(tables), jnp.asarray(np.maximum(lens, 1))
    pool = pool.at[0].set(0)
    wk, bk, wv, bv = (
        jnp.asarray(rng.standard_normal(s) / d**0.5, jnp.float32)
        for s in ((n, h, d), (n, h), (n, h, d), (n, h))
    )
    q = jnp.asarray(rng.standard_normal((b, n, h)), jnp.float32)
    ops = attention_ops("cpu")
    reprojected = ops.decode_reprojected(
        q.astype(dtype),
        pool.astype(dtype),
        tables[:, 0],
        lens,
        wk.astype(dtype),
        bk.astype(dtype),
        wv.astype(dtype),
        bv.astype(dtype),
        block_size=BLOCK,
    )
    q_absorbed = jnp.einsum("bnh,nhd->bnd", q, wk) * h**-0.5
    z = ops.decode_absorbed(
        q_absorbed.astype(dtype), pool.astype(dtype), tables[:, 0], lens, block_size=BLOCK
    )
    absorbed = jnp.einsum("bnd,nhd->bnh", z, wv) + bv[None]
    bound = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]
    assert (
        np.abs(np.asarray(absorbed - reprojected)).max()
        <= bound * np.abs(np.asarray(absorbed)).max()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_prefill_matches_causal_attention_over_prefix_and_chunk(
    dtype: str, heads: tuple[int, int]
) -> None:
    n, k = heads
    h = 8
    lanes, d = k * h, n * h
    rng = np.random.default_rng(5)
    chunk = np.array([1, 140, 37, 0, 300], np.int32)
    prefix = np.array([9, 0, 133, 0, 200], np.int32)
    hidden = np.array([False, False, True, False, True]) if k == n else np.zeros(5, bool)
    offsets = np.concatenate([[0], np.cumsum(chunk)[:-1]]).astype(np.int32)
    t = int(chunk.sum()) + 11
    q, kk, vv = (
        jnp.asarray(rng.standard_normal((t, a, h)), jnp.float32).astype(dtype) for a in (n, k, k)
    )
    pool, tables, _ = _pool(rng, 5, lanes, 220, dtype, 2)
    pool = pool.at[0].set(0)
    tables = _without_unused(tables, prefix)
    weights = (
        [
            jnp.asarray(rng.standard_normal(s) / d**0.5, jnp.float32).astype(dtype)
            for s in ((k, h, d), (k, h), (k, h, d), (k, h))
        ]
        if k == n
        else [jnp.zeros((k, h, lanes), dtype), None, jnp.zeros((k, h, lanes), dtype), None]
    )
    prefill = jax.jit(attention_ops("cpu").prefill, static_argnames=("block_size", "with_hidden"))
    actual = prefill(
        q,
        kk,
        vv,
        pool,
        tables,
        offsets,
        chunk,
        prefix,
        hidden,
        jnp.int32(5),
        *weights,
        block_size=BLOCK,
        with_hidden=k == n,
    )
    for r in range(5):
        rows = slice(int(offsets[r]), int(offsets[r] + chunk[r]))
        first = reference.gather_slots(pool, jnp.asarray(tables[r, 0]), BLOCK)[: prefix[r]]
        second = reference.gather_slots(pool, jnp.asarray(tables[r, 1]), BLOCK)[: prefix[r]]
        if hidden[r]:
            wk, bk, wv, bv = weights
            x = first.astype(jnp.float32)
            first = (
                jnp.einsum("sd,khd->skh", x, wk.astype(jnp.float32)) + bk.astype(jnp.float32)[None]
            ).reshape(-1, lanes)
            second = (
                jnp.einsum("sd,khd->skh", x, wv.astype(jnp.float32)) + bv.astype(jnp.float32)[None]
            ).reshape(-1, lanes)
        keys = jnp.concatenate(
            [first.astype(jnp.float32).reshape(-1, k, h), kk[rows].astype(jnp.float32)]
        )
        values = jnp.concatenate(
            [second.astype(jnp.float32).reshape(-1, k, h), vv[rows].astype(jnp.float32)]
        )
        if chunk[r]:
            _close(actual[rows], reference.causal_attention(q[rows], keys, values), dtype)


def test_unknown_implementation_is_an_error() -> None:
    with pytest.raises(ValueError, match="no attention implementation 'mosaic'"):
        attention_ops("cpu", "mosaic")
