"""Small kernels that the compile gate is tested on: one that passes, one that spills, and ops for a decode step."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from apt_jax.ops.backend import KernelBackend
from apt_jax.ops.calls import DecodeCall

_TILE = 64
_LOG2_E = 1.4426950408889634


def decode_kv(
    q: Array,
    call: DecodeCall,
) -> Array:
    """One program a row and head; every product has 16 rows of which one is used."""
    pool, tables, block_size = call.pool, call.tables, call.block_size
    batch, num_heads, head_dim = q.shape
    lanes = pool.shape[2]
    pool = pool.reshape(pool.shape[0], -1)
    index = jnp.arange(batch, dtype=jnp.int32)
    first, last = call.row_range()
    lens = jnp.where((index >= first) & (index < last), call.lens, 0)

    def kernel(q_ref, pool_ref, tables_ref, lens_ref, out_ref):
        b, n = pl.program_id(0), pl.program_id(1)
        length = plt.load(lens_ref.at[b])
        lane = n * head_dim + jnp.arange(head_dim)
        first_row = jnp.broadcast_to((jnp.arange(16) == 0)[:, None], (16, head_dim))
        zero = jnp.zeros((16,), jnp.int32)
        q_tile = plt.load(q_ref.at[b, n, zero[:, None], jnp.arange(head_dim)[None]], mask=first_row, other=0)

        def fetch(half: int, own: Array, position: Array) -> Array:
            block = plt.load(tables_ref.at[b, half, position // block_size], mask=own, other=0)
            column = (position % block_size)[:, None] * lanes + lane[None]
            mask = jnp.broadcast_to(own[:, None], (_TILE, head_dim))
            return plt.load(pool_ref.at[block[:, None], column], mask=mask, other=0)

        def body(j, carry):
            m, l, acc = carry
            position = j * _TILE + jnp.arange(_TILE)
            own = position < length
            s = plt.dot(q_tile, fetch(0, own, position).T) * (head_dim**-0.5 * _LOG2_E)
            s = jnp.where(own[None], s, -1e30)
            m_new = jnp.maximum(m, jnp.max(s, axis=1))
            p = jnp.exp2(s - m_new[:, None])
            rescale = jnp.exp2(m - m_new)
            values = fetch(1, own, position)
            acc = acc * rescale[:, None] + plt.dot(p.astype(values.dtype), values)
            return m_new, l * rescale + jnp.sum(p, axis=1), acc

        init = (jnp.full((16,), -1e30), jnp.zeros((16,)), jnp.zeros((16, head_dim), jnp.float32))
        _, l, acc = lax.fori_loop(0, pl.cdiv(length, _TILE), body, init)
        out = jnp.where(length > 0, acc / l[:, None], 0.0)
        plt.store(out_ref.at[b, n, zero[:, None], jnp.arange(head_dim)[None]], out, mask=first_row)

    out = pl.pallas_call(
        kernel,
        grid=(batch, num_heads),
        in_specs=[pl.no_block_spec] * 4,
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((batch, num_heads, 1, head_dim), jnp.float32),
        name="small_decode_kv",
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
    )(q[:, :, None], pool, tables, lens)
    return out[:, :, 0]


def spilling(x: Array, w: Array) -> Array:
    """A product whose accumulator, 256 by 512 float32, is twice the registers of its four warps."""

    def kernel(x_ref, w_ref, out_ref):
        rows, columns = jnp.arange(256)[:, None], jnp.arange(512)[None]

        def body(k, acc):
            c = k * 32 + jnp.arange(32)
            a = plt.load(x_ref.at[rows, c[None]])
            b = plt.load(w_ref.at[c[:, None], columns])
            return acc + plt.dot(a, b)

        acc = lax.fori_loop(0, x.shape[1] // 32, body, jnp.zeros((256, 512), jnp.float32))
        plt.store(out_ref.at[rows, columns], acc)

    return pl.pallas_call(
        kernel,
        in_specs=[pl.no_block_spec] * 2,
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((256, 512), jnp.float32),
        name="spilling",
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
    )(x, w)


def _absent(*_arguments: Any, **_more: Any) -> Any:
    raise NotImplementedError("the gate's tests have no such kernel")


SMALL_OPS = KernelBackend(
    name="small",
    decode_kv=decode_kv,
    decode_absorbed=_absent,
    decode_reprojected=_absent,
    decode_v_absorbed=_absent,
    prefill=_absent,
    rows_per_tile=1,
    extras=frozenset(),
    branches=False,
)
