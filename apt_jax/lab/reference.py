"""Readable reference implementations of the attention ops, which every other implementation is tested against.

`apt_jax.ops.calls` describes the pool, block tables, slot ranges and the letters of dimensions. Softmax and sums are
float32 whatever the input dtype.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from apt_jax.ops.calls import DecodeCall, LogitModifiers, PrefillCall, Projection
from apt_jax.ops.linear import rms_norm_heads, rotate
from apt_jax.ops.xla_common import own_slots


def modified_scores(
    scores: Float[Array, "N S"],
    position: Int32[Array, " S"],
    query_position: Int32[Array, ""],
    rules: LogitModifiers | None,
) -> tuple[Float[Array, "N S"], Bool[Array, " S"]]:
    """Return the scores of one query after the logit modifiers, and the mask of the keys at `position` that it may
    attend to: its own and earlier positions, within the window if there is one."""
    sees = position <= query_position
    if rules is None:
        return scores, sees
    if rules.softcap is not None:
        scores = rules.softcap * jnp.tanh(scores / rules.softcap)
    if rules.slopes is not None:
        scores = scores + rules.slopes[:, None] * (position - query_position)[None, :].astype(jnp.float32)
    if rules.window is not None:
        sees = sees & (position > query_position - rules.window)
    return scores, sees


def gather_slots(
    pool: Float[Array, "P C E"], table: Int32[Array, " J"], block_size: int, width: int
) -> Float[Array, "S D"]:
    """Return the slots of one row's blocks in the order of its table, float32; S = J * C. Each block holds `block_size`
    slots of `width` elements from its start."""
    used = pool[table].reshape(table.shape[0], -1)[:, : block_size * width]
    return used.reshape(table.shape[0] * block_size, width).astype(jnp.float32)


def _softmax(scores: Float[Array, "N S"], mask: Array, rules: LogitModifiers | None) -> Float[Array, "N S"]:
    """Return weights; with `rules.sinks` they add up to less than 1."""
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    sinks = None if rules is None or rules.sinks is None else rules.sinks.astype(jnp.float32)[:, None]
    top = top if sinks is None else jnp.maximum(top, sinks)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True) + (0.0 if sinks is None else jnp.exp(sinks - top))
    return weights / jnp.maximum(total, 1e-30)


def _over_rows(row: Callable[..., Array], q: Array, call: DecodeCall, *more: Array) -> Array:
    """Return `row(q, table, length, slot_ranges, *more)` for every row in the call's range, and zeros for other
    rows."""
    call, (first, last), index = call.by_row(), call.row_range(), jnp.arange(q.shape[0])
    lens = jnp.where((index >= first) & (index < last), call.lens, 0)
    axes = (0, 0, 0, None if call.slot_ranges is None else 0, *(0 for _ in more))
    return jax.vmap(row, in_axes=axes)(q, call.tables, lens, call.slot_ranges, *more)


def decode_kv(q: Float[Array, "B N H"], call: DecodeCall) -> Float[Array, "B N H"]:
    """Return `softmax(q k^T / sqrt(H)) v` over positions [0, lens); rows of length 0 give zeros."""
    num_heads, head_dim = q.shape[1], q.shape[2]

    def row(q_row: Array, table: Array, length: Array, ranges: Array | None) -> Array:
        own, position = own_slots(ranges, length, table.shape[1], call.block_size)
        k, v = (
            jnp.where(own[:, None], gather_slots(call.pool, half, call.block_size, call.width), 0.0).reshape(
                own.size, -1, head_dim
            )
            for half in table
        )
        group = num_heads // k.shape[1]
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("nh,snh->ns", q_row.astype(jnp.float32), k) * head_dim**-0.5
        scores, sees = modified_scores(scores, position, length - 1, call.rules)
        return jnp.einsum("ns,snh->nh", _softmax(scores, (own & sees)[None, :], call.rules), v)

    return _over_rows(row, q, call)


def _inputs_of(
    call: DecodeCall, table: Array, length: Array, ranges: Array | None, width: int
) -> tuple[Float[Array, "S D"], Bool[Array, " S"], Int32[Array, " S"]]:
    """Return the cached layer inputs of a row, with zeros in slots that the row does not own; the mask of its own
    slots; and their positions."""
    own, position = own_slots(ranges, length, table.shape[0], call.block_size)
    return jnp.where(own[:, None], gather_slots(call.pool, table, call.block_size, width), 0.0), own, position


def decode_absorbed(q_absorbed: Float[Array, "B N D"], call: DecodeCall) -> Float[Array, "B N D"]:
    """Return `softmax(q~ x^T) x` over positions [0, lens), x shared by all heads (docs/design/hybrid_cache.md,
    Absorption); the scale is included in q~."""
    width = q_absorbed.shape[2]

    def row(q_row: Array, table: Array, length: Array, ranges: Array | None) -> Array:
        x, own, position = _inputs_of(call, table, length, ranges, width)
        scores = jnp.einsum("nd,sd->ns", q_row.astype(jnp.float32), x)
        scores, sees = modified_scores(scores, position, length - 1, call.rules)
        return jnp.einsum("ns,sd->nd", _softmax(scores, (own & sees)[None, :], call.rules), x)

    return _over_rows(row, q_absorbed, call)


def _project(x: Float[Array, "S D"], w: Array, b: Array | None) -> Float[Array, "S K H"]:
    out = jnp.einsum("sd,khd->skh", x, w.astype(jnp.float32))
    return out if b is None else out + b.astype(jnp.float32)[None]


def _project_keys(x: Float[Array, "S D"], p: Projection, position: Int32[Array, " S"]) -> Float[Array, "S K H"]:
    assert p.adapters is None
    k = _project(x, p.wk, p.bk)
    if p.key_norm is not None:
        k = rms_norm_heads(k, p.key_norm.scale, p.key_norm.eps)
    return rotate(k, None if p.angles is None else p.angles[position])


def decode_reprojected(q: Float[Array, "B N H"], call: DecodeCall) -> Float[Array, "B N H"]:
    """Compute attention over keys and values that are computed from the cached layer inputs (Apt-Serve §3.1, Fig. 3b).

    The caller has rotated `q`, and normed it if keys are normed.
    """
    p = call.projected
    wv, group, head_dim = p.value_weights, q.shape[1] // p.wk.shape[0], q.shape[2]

    def row(q_row: Array, table: Array, length: Array, ranges: Array | None) -> Array:
        x, own, position = _inputs_of(call, table, length, ranges, wv.shape[2])
        k, v = (jnp.repeat(a, group, axis=1) for a in (_project_keys(x, p, position), _project(x, wv, p.bv)))
        scores = jnp.einsum("nh,snh->ns", q_row.astype(jnp.float32), k) * head_dim**-0.5
        scores, sees = modified_scores(scores, position, length - 1, call.rules)
        return jnp.einsum("ns,snh->nh", _softmax(scores, (own & sees)[None, :], call.rules), v)

    return _over_rows(row, q, call)


def decode_v_absorbed(
    q_rotary: Float[Array, "B N R"], q_absorbed: Float[Array, "B N D"] | None, call: DecodeCall
) -> Float[Array, "B N D"]:
    """Return `softmax(q_r k_r^T + q~ x^T) x` with k_r = rotate(W_k,r x + b_k,r): values absorbed, rotary keys
    reprojected.

    The R rotary lanes of a head must be reprojected, because their rotation comes between q and W_k; the other H - R
    lanes are absorbed into `q_absorbed` (None if R = H). Both queries include the scale, and the caller has rotated
    `q_rotary`. With a key norm all lanes are reprojected (R = H), and the angles rotate the first 2 * HALF of them.
    """
    p = call.projected
    group = q_rotary.shape[1] // p.wk.shape[0]

    def row(q_row: Array, table: Array, length: Array, ranges: Array | None, *absorbed: Array) -> Array:
        x, own, position = _inputs_of(call, table, length, ranges, p.wk.shape[2])
        k = jnp.repeat(_project_keys(x, p, position), group, axis=1)
        scores = jnp.einsum("nr,snr->ns", q_row.astype(jnp.float32), k)
        for q_rest in absorbed:
            scores = scores + jnp.einsum("nd,sd->ns", q_rest.astype(jnp.float32), x)
        scores, sees = modified_scores(scores, position, length - 1, call.rules)
        return jnp.einsum("ns,sd->nd", _softmax(scores, (own & sees)[None, :], call.rules), x)

    more = () if q_absorbed is None else (q_absorbed,)
    return _over_rows(row, q_rotary, call, *more)


def prefill(
    q: Float[Array, "T N H"], k: Float[Array, "T K H"], v: Float[Array, "T K H"], call: PrefillCall
) -> Float[Array, "T N H"]:
    """Compute causal attention of prompt chunks, stored one after another in T tokens, each over its cached prefix and
    itself.

    Row r is `q[offsets[r] : offsets[r] + chunk_lens[r]]`; its prefix is positions [0, prefix_lens[r]) of the pool:
    layer inputs if `hidden[r]`, otherwise keys and values. Rows from `num_rows` on are skipped; tokens outside all rows
    give zeros. The caller has rotated `q` and `k` if the model is rotary. Under `jax.jit`, the per-row arrays of `call`
    and `num_rows` must be NumPy constants that the jitted function closes over, not arguments; the compiled program is
    valid only for those values.
    """
    out = jnp.zeros(q.shape, jnp.float32)
    head_dim = q.shape[2]
    for r in range(int(call.num_rows)):
        start, n, m = (int(a[r]) for a in (call.offsets, call.chunk_lens, call.prefix_lens))
        ranges = None if call.slot_ranges is None else call.slot_ranges[r]
        of_inputs = call.hidden_prefixes if bool(call.hidden[r]) else None
        slots = call.block_size if of_inputs is None else of_inputs.block_size
        own, position = own_slots(ranges, jnp.int32(m), call.tables.shape[2], slots)
        order = jnp.argsort(jnp.where(own, position, jnp.iinfo(jnp.int32).max))[:m]
        if of_inputs is not None:
            p = of_inputs.projection
            x = gather_slots(call.pool, call.tables[r, 0], slots, p.wk.shape[2])[order]
            keys, values = _project_keys(x, p, jnp.arange(m)), _project(x, p.value_weights, p.bv)
        else:
            first, second = (
                gather_slots(call.pool, half, slots, k.shape[1] * head_dim)[order] for half in call.tables[r]
            )
            keys, values = (a.reshape(m, first.shape[1] // head_dim, head_dim) for a in (first, second))
        chunk = slice(start, start + n)
        keys, values = jnp.concatenate([keys, k[chunk]]), jnp.concatenate([values, v[chunk]])
        out = out.at[chunk].set(causal_attention(q[chunk], keys, values, call.rules))
    return out


def causal_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    rules: LogitModifiers | None = None,
) -> Float[Array, "T N H"]:
    """Compute attention of the last T of S positions, each over itself and all earlier positions, as in a prefill
    chunk."""
    group, head_dim = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (
        jnp.repeat(k, group, axis=1).astype(jnp.float32),
        jnp.repeat(v, group, axis=1).astype(jnp.float32),
    )
    scores = jnp.einsum("tnh,snh->nts", q.astype(jnp.float32), k) * head_dim**-0.5
    t, s = q.shape[0], k.shape[0]
    position = jnp.arange(s, dtype=jnp.int32)

    def ruled(query: Array, row: Array) -> tuple[Array, Array]:
        return modified_scores(row, position, query, rules)

    over_queries = jax.vmap(ruled, in_axes=(0, 1), out_axes=(1, 0))
    scores, mask = over_queries(jnp.arange(t, dtype=jnp.int32) + (s - t), scores)
    weights = jax.vmap(lambda row, sees: _softmax(row, sees, rules), in_axes=(1, 0), out_axes=1)(scores, mask)
    return jnp.einsum("nts,snh->tnh", weights, v)
