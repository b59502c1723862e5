"""Slots narrower than those of the pool, and one cached tensor that is key and value: attention of every implementation
that takes them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.backends import attention_ops
from apt_jax.models.step import slot_ranges
from apt_jax.ops.calls import DecodeCall, LogitModifiers, PrefillCall
from tests.support.attention_cases import expected_decode, expected_prefill

C, J, P = 8, 5, 40
LENS = (1, 33, 0, 40, 17, 8)
WIDTHS = [(1, 640, 960), (4, 20, 80), (2, 48, 200), (3, 40, 121)]
"""Key heads, width of a head, elements of a slot of the pool."""
OPS = ["xla", "cpu"]


def drawn(heads: int, width: int, lanes: int, dtype: str, one: bool) -> tuple[Any, Any, Any, np.random.Generator]:
    """A pool, the same slots in a pool of their own width, and tables."""
    rng = np.random.default_rng(heads + width)
    narrow = rng.standard_normal((P, C, heads * width)).astype(np.float32)
    wide = np.full((P, C * lanes), 1e3, np.float32)  # what no op may read
    wide[:, : C * heads * width] = narrow.reshape(P, -1)
    tables = rng.permutation(np.arange(1, P))[: J * 6].reshape(6, 1, J).astype(np.int32)
    values = tables if one else tables[::-1]
    both = jnp.asarray(np.concatenate([tables, values], axis=1))
    return jnp.asarray(wide.reshape(P, C, lanes), dtype), jnp.asarray(narrow, dtype), both, rng


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("ops", OPS)
def test_decode_reads_slots_of_their_own_width(ops: str, widths: tuple[int, int, int], dtype: str, one: bool) -> None:
    heads, width, lanes = widths
    pool, narrow, tables, rng = drawn(heads, width, lanes, dtype, one)
    q = jnp.asarray(rng.standard_normal((6, 4 * heads, width)), dtype)
    rules = LogitModifiers(window=19) if width == 20 else None
    ranges = None
    if width == 48:  # some blocks are filled from their end
        downwards = jnp.asarray(rng.random((6, J)) < 0.5)
        ranges = slot_ranges(downwards, jnp.asarray(LENS), jnp.full(6, C))
    call = DecodeCall(
        pool=pool, tables=tables, lens=jnp.asarray(LENS), block_size=C, lane=heads * width, rules=rules, slot_ranges=ranges
    )  # fmt: skip
    decode = jax.jit(attention_ops("cpu", ops).decode_kv)
    out = decode(q, call)
    np.testing.assert_array_equal(out, decode(q, dataclasses.replace(call, pool=narrow, lane=None)))
    wanted = expected_decode("decode_kv", q, narrow, tables, LENS, block_size=C, rules=rules, slot_ranges=ranges)
    np.testing.assert_allclose(out, wanted, atol=2e-5 if dtype == "float32" else 0.02, rtol=0)


def test_what_the_kernels_of_tpus_do_not_take_runs_in_xla() -> None:
    pool, _, tables, rng = drawn(2, 16, 48, "float32", True)
    q = jnp.asarray(rng.standard_normal((6, 4, 16)), "float32")
    call = DecodeCall(pool=pool, tables=tables, lens=jnp.asarray(LENS), block_size=C, lane=32)
    of_tpu, of_xla = (jax.jit(attention_ops("cpu", ops).decode_kv)(q, call) for ops in ("tpu-interpret", "xla"))
    np.testing.assert_array_equal(of_tpu, of_xla)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("ops", OPS)
def test_prefill_reads_slots_of_their_own_width(ops: str, widths: tuple[int, int, int], dtype: str, one: bool) -> None:
    heads, width, lanes = widths
    pool, narrow, tables, rng = drawn(heads, width, lanes, dtype, one)
    chunks, prefixes = np.array([7, 1, 20, 0, 3, 33]), np.array([0, 33, 9, 40, 17, 8])
    offsets, total = np.cumsum(chunks) - chunks, int(chunks.sum())
    q = jnp.asarray(rng.standard_normal((total, 4 * heads, width)), dtype)
    k = jnp.asarray(rng.standard_normal((total, heads, width)), dtype)
    v = k if one else jnp.asarray(rng.standard_normal((total, heads, width)), dtype)
    rows = [jnp.asarray(a, jnp.int32) for a in (offsets, chunks, prefixes)]
    call = PrefillCall(
        pool=pool, tables=tables, offsets=rows[0], chunk_lens=rows[1], prefix_lens=rows[2], hidden=jnp.zeros(6, bool),
        num_rows=jnp.int32(6), block_size=C, lane=heads * width,
    )  # fmt: skip
    out = jax.jit(attention_ops("cpu", ops).prefill)(q, k, v, call)
    wanted = expected_prefill(
        [q, k, v, narrow, tables, *rows, np.zeros(6, bool), 6], {"block_size": C, "with_hidden": False}
    )
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=2e-5 if dtype == "float32" else 0.03, rtol=0)
