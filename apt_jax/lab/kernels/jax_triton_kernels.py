"""Example kernels of absorbed decode attention in plain Triton; importing this module requires triton.

The accumulator of a row, N heads of D lanes in float32, does not fit in a streaming multiprocessor, so the output is
split along D over programs, while every score needs all of D. So there are two kernels (launched by
`jax_triton_absorbed.py`):

  1. `absorbed_scores`, with a program per (tile of T tokens, row), computes S = q~ x^T over all lanes, the maximum m of
     the tile, the weights P = exp(S - m) in the pool's dtype, and their sum l.
  2. `absorbed_output`, with a program per (block of lanes, row), computes the sum of P x over the row's tiles, rescaled
     as in flash attention by exp(m - running maximum) and finally divided by the sum of l. It uses no atomics, so equal
     inputs give equal bits. It takes the rows in the reverse order of kernel 1, because the layer inputs that kernel 1
     read last may still be in the L2 cache.

Products on tensor cores need a number of heads that is a power of two and at least 16. N heads are split into a first
group of H0 and, if that needs less padding, a second group of H1 (72 heads take 64 + 16). H1 = 0: no second group.

Float32 products are not rounded to TF32 ("ieee").

The functions are excluded from run-time checks of annotations (`no_type_check`), because Triton compiles their source
and resolves names in this module.

The dimension key is that of `reference.py`, with T tokens per tile and M tiles per row.
"""

from typing import no_type_check

import triton  # pyright: ignore[reportMissingImports]  # optional
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
@no_type_check
def _token_slots(
    tables,
    ranges,
    length,
    row,
    tile,
    J: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    RANGED: tl.constexpr,
):
    """Return the pool slots of a row's tokens [tile * T, tile * T + T), and the mask of the row's own tokens."""
    position = tile * T + tl.arange(0, T)
    entry, order = position // C, position % C
    own = position < length
    slot = order
    if RANGED:
        at = ranges + (row * J + entry) * 2
        first = tl.load(at, mask=own, other=0)
        last = tl.load(at + 1, mask=own, other=0)
        upwards = first <= last
        slot = tl.where(upwards, first + order, first - 1 - order)
        own = own & (order < tl.where(upwards, last - first, first - last))
    block = tl.load(tables + row * J + entry, mask=own, other=0)
    return block.to(tl.int64) * C + slot, own


@triton.jit
@no_type_check
def _store_weights(scores, own, p_out, m_out, l_out, cell, head, N: tl.constexpr, T: tl.constexpr):
    """Store the maximum, the weights and their sum for one group of heads and one tile, whose index is `cell`."""
    scores = tl.where(own[None, :], scores, -1e30)
    m = tl.max(scores, axis=1)
    p = tl.where(own[None, :], tl.exp(scores - m[:, None]), 0.0)
    at = cell * N + head
    tl.store(m_out + at, m, mask=head < N)
    tl.store(l_out + at, tl.sum(p, axis=1), mask=head < N)
    where = p_out + at[:, None] * T + tl.arange(0, T)[None, :]
    tl.store(where, p.to(p_out.dtype.element_ty), mask=(head < N)[:, None])


@triton.jit
@no_type_check
def absorbed_scores(
    q,  # (B, N, D)
    pool,  # (P, C, D)
    tables,  # (B, J)
    lens,  # (B,)
    ranges,  # (B, J, 2); read if RANGED
    p_out,  # (B, M, N, T)
    m_out,  # (B, M, N) float32
    l_out,  # (B, M, N) float32
    N: tl.constexpr,
    D: tl.constexpr,
    J: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    M: tl.constexpr,
    H0: tl.constexpr,
    H1: tl.constexpr,
    LANES: tl.constexpr,
    RANGED: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens + row)
    if tile * T >= length:
        return
    slot, own = _token_slots(tables, ranges, length, row, tile, J, C, T, RANGED)
    x_at = pool + slot * D
    q_at = q + row.to(tl.int64) * (N * D)
    head0 = tl.arange(0, H0)
    s0 = tl.zeros((H0, T), tl.float32)
    if H1 > 0:
        head1 = H0 + tl.arange(0, H1)
        s1 = tl.zeros((H1, T), tl.float32)
    for start in range(0, D, LANES):
        lane = start + tl.arange(0, LANES)
        if D % LANES == 0:
            x_mask, q0_mask = own[:, None], (head0 < N)[:, None]
        else:
            x_mask, q0_mask = (
                own[:, None] & (lane < D)[None, :],
                (head0 < N)[:, None] & (lane < D)[None, :],
            )
        x = tl.load(x_at[:, None] + lane[None, :], mask=x_mask, other=0.0)
        q0 = tl.load(q_at + head0[:, None] * D + lane[None, :], mask=q0_mask, other=0.0)
        s0 = tl.dot(q0, tl.trans(x), s0, input_precision="ieee")
        if H1 > 0:
            q1_mask = (head1 < N)[:, None]
            if D % LANES != 0:
                q1_mask = q1_mask & (lane < D)[None, :]
            q1 = tl.load(q_at + head1[:, None] * D + lane[None, :], mask=q1_mask, other=0.0)
            s1 = tl.dot(q1, tl.trans(x), s1, input_precision="ieee")
    cell = row.to(tl.int64) * M + tile
    _store_weights(s0, own, p_out, m_out, l_out, cell, head0, N, T)
    if H1 > 0:
        _store_weights(s1, own, p_out, m_out, l_out, cell, head1, N, T)


@triton.jit
@no_type_check
def _fold(state_m, state_l, acc, x, p_in, m_in, l_in, cell, head, N: tl.constexpr, T: tl.constexpr):
    """Fold one tile of one group of heads into the running maximum, denominator and accumulator, and return these."""
    at = cell * N + head
    m = tl.load(m_in + at, mask=head < N, other=-1e30)
    l = tl.load(l_in + at, mask=head < N, other=0.0)
    where = p_in + at[:, None] * T + tl.arange(0, T)[None, :]
    p = tl.load(where, mask=(head < N)[:, None], other=0.0)
    m_new = tl.maximum(state_m, m)
    rescale, weight = tl.exp(state_m - m_new), tl.exp(m - m_new)
    p = (p.to(tl.float32) * weight[:, None]).to(x.dtype)
    acc = tl.dot(p, x, acc * rescale[:, None], input_precision="ieee")
    return m_new, state_l * rescale + l * weight, acc


@triton.jit
@no_type_check
def absorbed_output(
    p_in,  # (B, M, N, T)
    m_in,  # (B, M, N) float32
    l_in,  # (B, M, N) float32
    pool,  # (P, C, D)
    tables,  # (B, J)
    lens,  # (B,)
    ranges,  # (B, J, 2); read if RANGED
    out,  # (B, N, D) float32
    N: tl.constexpr,
    D: tl.constexpr,
    J: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    M: tl.constexpr,
    H0: tl.constexpr,
    H1: tl.constexpr,
    LANES: tl.constexpr,
    RANGED: tl.constexpr,
):
    row = tl.num_programs(1) - 1 - tl.program_id(1)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    length = tl.load(lens + row)
    head0 = tl.arange(0, H0)
    m0 = tl.full((H0,), -1e30, tl.float32)
    l0 = tl.zeros((H0,), tl.float32)
    acc0 = tl.zeros((H0, LANES), tl.float32)
    if H1 > 0:
        head1 = H0 + tl.arange(0, H1)
        m1 = tl.full((H1,), -1e30, tl.float32)
        l1 = tl.zeros((H1,), tl.float32)
        acc1 = tl.zeros((H1, LANES), tl.float32)
    for tile in range(0, tl.cdiv(length, T)):
        slot, own = _token_slots(tables, ranges, length, row, tile, J, C, T, RANGED)
        x_mask = own[:, None]
        if D % LANES != 0:
            x_mask = x_mask & (lane < D)[None, :]
        x = tl.load(pool + (slot * D)[:, None] + lane[None, :], mask=x_mask, other=0.0)
        cell = row.to(tl.int64) * M + tile
        m0, l0, acc0 = _fold(m0, l0, acc0, x, p_in, m_in, l_in, cell, head0, N, T)
        if H1 > 0:
            m1, l1, acc1 = _fold(m1, l1, acc1, x, p_in, m_in, l_in, cell, head1, N, T)
    out_at = out + row.to(tl.int64) * (N * D)
    z = acc0 / tl.maximum(l0, 1e-30)[:, None]
    mask = (head0 < N)[:, None] & (lane < D)[None, :]
    tl.store(out_at + head0[:, None] * D + lane[None, :], z, mask=mask)
    if H1 > 0:
        z = acc1 / tl.maximum(l1, 1e-30)[:, None]
        mask = (head1 < N)[:, None] & (lane < D)[None, :]
        tl.store(out_at + head1[:, None] * D + lane[None, :], z, mask=mask)
