"""Readable references of the attention ops: the contract that every implementation is tested against.

All of them work on one layer's pool, `(P, C, E)`: P blocks of C slots of E elements. A block holds, for C positions
of one request, keys (K * H = E elements a slot) or values, or layer inputs (D elements a slot; where D is not E, a
block holds more or fewer of them: `block_size` of the ops that read them, which lie at its start). Block tables map
position t of a request to slot `t % C` of block `table[t // C]`; padding entries of a table are `0` and are never read
as data.

Two requests can share a block by growing towards each other (BROS §5). `slot_ranges[b, j] = (first, last)` then says
which slots of row b's j-th block are its own: upwards `[first, last)` where first <= last, its positions in the order
of the slots; downwards `[last, first)` where last < first, its first position in slot `first - 1`. Keys and values of a
position lie in the same slot of their two blocks. Without `slot_ranges` every block is `(0, min(C, len - j * C))`.
`lens` stays the number of positions, `C` a block except in the last one; `rows = (a, b)` leaves rows outside [a, b)
out: they give zeros and read nothing.

Rotary embedding turns lanes i and i + R / 2 of the first R lanes of every head by `angle[position, i]` ("rotate half",
as in Llama and GPT-NeoX); cached layer inputs are not turned, so keys computed from them are turned by their position.

Dimension key: B rows, T query tokens, N query heads, K key/value heads, H head width, D model width, E lane width, R
rotary lanes of a head, P blocks, C slots per block, J table entries per row, S positions. Softmax and sums are float32
whatever the input dtype.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitModifiers:
    """Modifiers of attention scores before the softmax, applied in this order."""

    softcap: float | None = dataclasses.field(default=None, metadata=dict(static=True))
    """`cap * tanh(s / cap)` (Gemma-2)."""
    slopes: Float[Array, " N"] | None = None
    """ALiBi: `slope * (j - i)` is added for query i and key j (Press et al., 2022)."""
    window: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    """A query sees its last `window` positions alone, its own among them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyNorm:
    """RMS norm of projected keys, before they are turned (Qwen3, OLMo-2)."""

    scale: Float[Array, " S"]
    """(H,): each head by itself; (K * H,): all heads together."""
    eps: float = dataclasses.field(metadata=dict(static=True))


def rms_norm_heads(x: Float[Array, "T K H"], scale: Float[Array, " S"], eps: float) -> Float[Array, "T K H"]:
    """`KeyNorm` of float32 queries or keys."""
    shape = x.shape
    if scale.shape[0] != shape[2]:
        x = x.reshape(shape[0], 1, -1)
    scaled = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (scaled * scale.astype(jnp.float32)[None, None]).reshape(shape)


def modified_scores(
    scores: Float[Array, "N S"],
    position: Int32[Array, " S"],
    query_position: Int32[Array, ""],
    rules: LogitModifiers | None,
) -> tuple[Float[Array, "N S"], Bool[Array, " S"]]:
    """Scores of one query by the rules, and a mask of the keys at `position` that it may see, itself the last."""
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


def own_slots(
    slot_ranges: Int32[Array, "J 2"] | None,
    length: Int32[Array, ""],
    num_entries: int,
    block_size: int,
) -> tuple[Bool[Array, " S"], Int32[Array, " S"]]:
    """Mask of the row's own slots and their positions, for every slot of its blocks in the order of the table."""
    slot = jnp.arange(block_size, dtype=jnp.int32)[None, :]
    entry = jnp.arange(num_entries, dtype=jnp.int32)[:, None]
    if slot_ranges is None:
        position = entry * block_size + slot
        own = position < length
    else:
        first, last = slot_ranges[:, :1], slot_ranges[:, 1:]
        upwards = first <= last
        order = jnp.where(upwards, slot - first, first - 1 - slot)
        position = entry * block_size + order
        own = (slot >= jnp.minimum(first, last)) & (slot < jnp.maximum(first, last))
        own = own & (position < length)
    return own.reshape(-1), jnp.where(own, position, 0).reshape(-1)


def rotate(x: Float[Array, "S N H"], angles: Float[Array, "S HALF"] | None) -> Float[Array, "S N H"]:
    """Turn the first `2 * HALF` lanes of every head by `angles`, in float32."""
    if angles is None:
        return x.astype(jnp.float32)
    return apply_rope(x, jnp.cos(angles), jnp.sin(angles))


def apply_rope(
    x: Float[Array, "S N H"], cos: Float[Array, "S HALF"], sin: Float[Array, "S HALF"]
) -> Float[Array, "S N H"]:
    """`rotate` with the cosine and sine of the angles."""
    x, half = x.astype(jnp.float32), cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def gather_slots(pool: Float[Array, "P C E"], table: Int32[Array, " J"], block_size: int) -> Float[Array, "S E"]:
    """The slots of one row's blocks in the order of its table, float32; S = J * C."""
    return pool[table].reshape(table.shape[0] * block_size, -1).astype(jnp.float32)


def gather_inputs(
    pool: Float[Array, "P C E"], table: Int32[Array, " J"], block_size: int, width: int
) -> Float[Array, "S D"]:
    """`gather_slots` for layer inputs, of which `block_size` of `width` lie at the start of a block."""
    used = pool[table].reshape(table.shape[0], -1)[:, : block_size * width]
    return used.reshape(table.shape[0] * block_size, width).astype(jnp.float32)


def _softmax(scores: Float[Array, "N S"], mask: Array) -> Float[Array, "N S"]:
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)


def _over_rows(
    row: Callable[..., Array],
    q: Array,
    tables: Array,
    lens: Array,
    rows: tuple[Array, Array] | None,
    slot_ranges: Array | None,
    *more: Array,
) -> Array:
    """`row(q, table, length, slot_ranges, *more)` of every row in `rows`, zeros elsewhere."""
    index = jnp.arange(q.shape[0])
    if rows is not None:
        lens = jnp.where((index >= rows[0]) & (index < rows[1]), lens, 0)
    ranges_axis = None if slot_ranges is None else 0
    axes = (0, 0, 0, ranges_axis, *(0 for _ in more))
    return jax.vmap(row, in_axes=axes)(q, tables, lens, slot_ranges, *more)


def decode_kv(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B 2 J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    rules: LogitModifiers | None = None,
) -> Float[Array, "B N H"]:
    """`softmax(q k^T / sqrt(H)) v` over positions [0, lens); rows of length 0 give zeros."""
    num_heads, head_dim = q.shape[1], q.shape[2]

    def row(q_row: Array, table: Array, length: Array, ranges: Array | None) -> Array:
        own, position = own_slots(ranges, length, table.shape[1], block_size)
        k, v = (
            jnp.where(own[:, None], gather_slots(pool, half, block_size), 0.0).reshape(own.size, -1, head_dim)
            for half in table
        )
        group = num_heads // k.shape[1]
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("nh,snh->ns", q_row.astype(jnp.float32), k) * head_dim**-0.5
        scores, sees = modified_scores(scores, position, length - 1, rules)
        return jnp.einsum("ns,snh->nh", _softmax(scores, (own & sees)[None, :]), v)

    return _over_rows(row, q, tables, lens, rows, slot_ranges)


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    rules: LogitModifiers | None = None,
) -> Float[Array, "B N D"]:
    """`softmax(q~ x^T) x` over positions [0, lens), x shared by all heads (docs/design/hybrid_cache.md, Absorption);
    the scale is in q~."""
    width = q_absorbed.shape[2]

    def row(q_row: Array, table: Array, length: Array, ranges: Array | None) -> Array:
        own, position = own_slots(ranges, length, table.shape[0], block_size)
        x = jnp.where(own[:, None], gather_inputs(pool, table, block_size, width), 0.0)
        scores = jnp.einsum("nd,sd->ns", q_row.astype(jnp.float32), x)
        scores, sees = modified_scores(scores, position, length - 1, rules)
        return jnp.einsum("ns,sd->nd", _softmax(scores, (own & sees)[None, :]), x)

    return _over_rows(row, q_absorbed, tables, lens, rows, slot_ranges)


def decode_reprojected(
    q: Float[Array, "B N H"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    wk: Float[Array, "K H D"],
    bk: Float[Array, "K H"] | None,
    wv: Float[Array, "K H D"],
    bv: Float[Array, "K H"] | None,
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    angles: Float[Array, "S HALF"] | None = None,
    key_norm: KeyNorm | None = None,
    rules: LogitModifiers | None = None,
) -> Float[Array, "B N H"]:
    """Attention over keys and values that are computed from the cached layer inputs (Apt-Serve §3.1, Fig. 3b).

    Args:
        angles: of every position, where keys are rotary; `q` is turned by the caller, and normed where there is a
        key_norm: of the keys.
    """
    group, head_dim = q.shape[1] // wk.shape[0], q.shape[2]

    def project(x: Array, w: Array, b: Array | None) -> Array:
        out = jnp.einsum("sd,khd->skh", x, w.astype(jnp.float32))
        return out if b is None else out + b.astype(jnp.float32)[None]

    def row(q_row: Array, table: Array, length: Array, ranges: Array | None) -> Array:
        own, position = own_slots(ranges, length, table.shape[0], block_size)
        x = jnp.where(own[:, None], gather_inputs(pool, table, block_size, wk.shape[2]), 0.0)
        k = project(x, wk, bk)
        if key_norm is not None:
            k = rms_norm_heads(k, key_norm.scale, key_norm.eps)
        k = rotate(k, None if angles is None else angles[position])
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(project(x, wv, bv), group, axis=1)
        scores = jnp.einsum("nh,snh->ns", q_row.astype(jnp.float32), k) * head_dim**-0.5
        scores, sees = modified_scores(scores, position, length - 1, rules)
        return jnp.einsum("ns,snh->nh", _softmax(scores, (own & sees)[None, :]), v)

    return _over_rows(row, q, tables, lens, rows, slot_ranges)


def decode_v_absorbed(
    q_rotary: Float[Array, "B N R"],
    q_absorbed: Float[Array, "B N D"] | None,
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B J"],
    lens: Int32[Array, " B"],
    wk_rotary: Float[Array, "K R D"],
    bk_rotary: Float[Array, "K R"] | None,
    angles: Float[Array, "S HALF"],
    *,
    block_size: int,
    rows: tuple[Array, Array] | None = None,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    key_norm: KeyNorm | None = None,
    rules: LogitModifiers | None = None,
) -> Float[Array, "B N D"]:
    """`softmax(q_r k_r^T + q~ x^T) x` with k_r = turn(W_k,r x + b_k,r): values absorbed, rotary keys reprojected.

    The R rotary lanes of a head must be reprojected, as their turn stands between q and W_k; its other H - R lanes are
    absorbed into `q_absorbed` (None where R = H). Both queries carry the scale, `q_rotary` is turned by the caller.
    With a `key_norm` all lanes are reprojected (R = H), and `angles` turn the first 2 * HALF of them.
    """
    group = q_rotary.shape[1] // wk_rotary.shape[0]

    def row(q_row: Array, table: Array, length: Array, ranges: Array | None, *absorbed: Array) -> Array:
        own, position = own_slots(ranges, length, table.shape[0], block_size)
        x = jnp.where(own[:, None], gather_inputs(pool, table, block_size, wk_rotary.shape[2]), 0.0)
        k = jnp.einsum("sd,krd->skr", x, wk_rotary.astype(jnp.float32))
        if bk_rotary is not None:
            k = k + bk_rotary.astype(jnp.float32)[None]
        if key_norm is not None:
            k = rms_norm_heads(k, key_norm.scale, key_norm.eps)
        k = jnp.repeat(rotate(k, angles[position]), group, axis=1)
        scores = jnp.einsum("nr,snr->ns", q_row.astype(jnp.float32), k)
        for q_rest in absorbed:
            scores = scores + jnp.einsum("nd,sd->ns", q_rest.astype(jnp.float32), x)
        scores, sees = modified_scores(scores, position, length - 1, rules)
        return jnp.einsum("ns,sd->nd", _softmax(scores, (own & sees)[None, :]), x)

    more = () if q_absorbed is None else (q_absorbed,)
    return _over_rows(row, q_rotary, tables, lens, rows, slot_ranges, *more)


def prefill(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pool: Float[Array, "P C E"],
    tables: Int32[Array, "B 2 J"],
    offsets: Int32[Array | np.ndarray, " B"],
    chunk_lens: Int32[Array | np.ndarray, " B"],
    prefix_lens: Int32[Array | np.ndarray, " B"],
    hidden: Bool[Array | np.ndarray, " B"],
    num_rows: Int32[Array | np.ndarray, ""],
    wk: Float[Array, "K H D"],
    bk: Float[Array, "K H"] | None,
    wv: Float[Array, "K H D"],
    bv: Float[Array, "K H"] | None,
    *,
    block_size: int,
    with_hidden: bool,
    slot_ranges: Int32[Array, "B J 2"] | None = None,
    angles: Float[Array, "S HALF"] | None = None,
    hidden_block_size: int | None = None,
    key_norm: KeyNorm | None = None,
    rules: LogitModifiers | None = None,
    room: int | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of prompt chunks that lie one after another in T, each over its cached prefix and itself.

    Row r is `q[offsets[r] : offsets[r] + chunk_lens[r]]`; its prefix is positions [0, prefix_lens[r]) of the pool, keys
    and values or (where `hidden[r]`) layer inputs. Rows from `num_rows` on are left out; tokens of no row give zeros.
    `q` and `k` are turned by the caller where the model is rotary, `angles` turns keys computed from a hidden prefix,
    whose blocks hold `hidden_block_size` positions (None: as many as others). `room` says how many positions of hidden
    prefixes there are at most, each row's rounded up to whole tiles of a kernel (None: as block tables hold). Where this is compiled, `offsets` to
    `num_rows` are NumPy arrays, as the program is for these rows.
    """
    del room
    out = jnp.zeros(q.shape, jnp.float32)
    head_dim = q.shape[2]
    for r in range(int(num_rows)):
        start, n, m = (int(a[r]) for a in (offsets, chunk_lens, prefix_lens))
        ranges = None if slot_ranges is None else slot_ranges[r]
        is_hidden = with_hidden and bool(hidden[r])
        slots = (hidden_block_size or block_size) if is_hidden else block_size
        own, position = own_slots(ranges, jnp.int32(m), tables.shape[2], slots)
        order = jnp.argsort(jnp.where(own, position, jnp.iinfo(jnp.int32).max))[:m]
        if is_hidden:
            first = gather_inputs(pool, tables[r, 0], slots, wk.shape[2])[order]

            def project(w: Array, b: Array | None, x: Array = first) -> Array:
                y = jnp.einsum("sd,khd->skh", x, w.astype(jnp.float32))
                return y if b is None else y + b.astype(jnp.float32)[None]

            keys = project(wk, bk)
            if key_norm is not None:
                keys = rms_norm_heads(keys, key_norm.scale, key_norm.eps)
            keys = rotate(keys, None if angles is None else angles[:m])
            values = project(wv, bv)
        else:
            first = gather_slots(pool, tables[r, 0], block_size)[order]
            heads = first.shape[1] // head_dim
            keys = first.reshape(m, heads, head_dim)
            values = gather_slots(pool, tables[r, 1], block_size)[order].reshape(m, heads, head_dim)
        chunk = slice(start, start + n)
        keys, values = jnp.concatenate([keys, k[chunk]]), jnp.concatenate([values, v[chunk]])
        out = out.at[chunk].set(causal_attention(q[chunk], keys, values, rules))
    return out


def causal_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    rules: LogitModifiers | None = None,
) -> Float[Array, "T N H"]:
    """Attention of the last T of S positions, each over itself and all before it: what a prefill chunk computes."""
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
    weights = jax.vmap(_softmax, in_axes=(0, None))(scores, mask)
    return jnp.einsum("nts,snh->tnh", weights, v)
