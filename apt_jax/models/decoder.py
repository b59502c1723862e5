"""The decoder: one functional step over the block pool, driven by `ModelConfig`, for every family.

A step works on T flat tokens: first `num_decode` rows of one token each, then the chunks of prefill rows, one after
another. The life of a token in one layer:

1. x = the layer's attention input (after the norm where the model is pre-norm): what the hidden kind caches.
2. q from x for all tokens; k and v from x for prefill tokens, and for decode rows if any of them has the KV kind; q and k
   are normed and turned where the model does so.
3. Cache write: (k, v) or x, whichever the token's request caches, in one scatter into the donated pool; two where x
   and k differ in width.
4. Decode rows attend to the pool: KV, absorbed, or reprojected. Prefill chunks attend to themselves directly and to
   their cached prefix through the pool; a hidden request computes k and v on the fly and keeps only x.
5. Output projection, residual, feed-forward, residual; norms where `ModelConfig.norm_placement` says.

Activations are in the parameters' dtype, every product accumulates in float32, the residual stream, norms and softmax
are float32. Layers are unrolled with one pool array each: a scan over stacked pools would copy the pool.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from apt_jax.models.config import HiddenMode, ModelConfig
from apt_jax.models.params import LayerParams, ModelParams
from apt_jax.models.sharding import TensorParallel
from apt_jax.ops import sampling
from apt_jax.ops.backend import AttentionOps
from apt_jax.ops.linear import activate, dense, dot, project_kv
from apt_jax.ops.reference import KeyNorm, ScoreRules, rms_norm_heads, turn
from apt_jax.ops.weights import NormParams, QuantizedMatrix, TiledMatrix, rows_of
from apt_jax.ops.xla_common import fetch_blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderBatch:
    """One step on the device. T flat tokens: B decode rows of one token, then the chunks of R prefill rows."""

    token_ids: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    """Position of each token in its request; padding tokens have 0."""
    first_slots: Int32[Array, " T"]
    """Pool slot for the token's k or x, counted in slots of its kind; out of range for padding, which is dropped."""
    second_slots: Int32[Array, " T"]
    """Pool slot for its v; out of range for hidden requests and padding."""
    token_hidden: Bool[Array, " T"]
    decode_tables: Int32[Array, "B 2 J"]
    decode_lens: Int32[Array, " B"]
    """Positions to attend to, the row's own included; 0 for padding rows."""
    num_kv_rows: Int32[Array, ""]
    """Decode rows [0, num_kv_rows) have the KV kind,"""
    num_decode_rows: Int32[Array, ""]
    """rows [num_kv_rows, num_decode_rows) the hidden kind."""
    prefill_tables: Int32[Array, "R 2 J"]
    prefill_offsets: Int32[Array, " R"]
    """Start of each chunk among the prefill tokens."""
    prefill_lens: Int32[Array, " R"]
    prefix_lens: Int32[Array, " R"]
    prefill_hidden: Bool[Array, " R"]
    num_prefill_rows: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertBatch:
    """Layer inputs that become keys and values. G of their blocks, T = G * `hidden_block_size` slots, block after block."""

    blocks: Int32[Array, " G"]
    """The reserved block for padding."""
    positions: Int32[Array, " T"]
    """Position of each slot in its request."""
    first_slots: Int32[Array, " T"]
    """Pool slot for the slot's k, counted in keys; out of range for slots without a layer input, which are dropped."""
    second_slots: Int32[Array, " T"]
    """Likewise for its v."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What is fixed when a step is compiled."""

    num_decode: int
    """B: decode rows, padding included."""
    block_size: int
    hidden_block_size: int
    """Layer inputs a block."""
    hidden_mode: HiddenMode | None
    """How hidden decode rows attend: what of `ModelConfig.hidden_mode` is absorbed; None: nothing, they are reprojected."""
    kinds: tuple[bool, bool]
    """Whether KV and hidden rows can occur in the step."""
    ops: AttentionOps
    """`ops.branches` says whether what no row needs is branched around on the device."""
    tensor: TensorParallel | None = None
    """None: the device has the whole model. Else the step is one device's share of it, within `jax.shard_map`, and its
    `ModelConfig` is `parallel.own_config`."""


_Product = Callable[..., Array]
"""`AttentionOps.dense`."""


def _dense(
    x: Float[Array, "T I"],
    w: Float[Array, "O I"] | QuantizedMatrix | TiledMatrix,
    b: Float[Array, " O"] | None,
    product: _Product,
) -> Float[Array, "T O"]:
    """`x @ w.T + b` in float32, by the platform's product."""
    out = product(x, *_weights(w))
    return out if b is None else out + b.astype(jnp.float32)[None, :]


def _summed(
    x: Float[Array, "T I"],
    w: Any,
    b: Float[Array, " O"] | None,
    options: StepOptions,
) -> Float[Array, "T O"]:
    """`_dense` where the inputs are those of one device among several."""
    if options.tensor is None:
        return _dense(x, w, b, options.ops.dense)
    out = options.tensor.sum(_dense(x, w, None, options.ops.dense))
    return out if b is None else out + b.astype(jnp.float32)[None, :]


def _weights(w: Array | QuantizedMatrix | TiledMatrix) -> tuple[Any, ...]:
    """Arguments of the products: a matrix, or integers and their scales."""
    return (w.values, w.scale) if isinstance(w, QuantizedMatrix) else (w,)


def _flat(w: Any, inputs_from: int) -> Any:
    """A matrix as (outputs, inputs); axes from `inputs_from` on are inputs. Those that are no arrays are so already."""
    if isinstance(w, QuantizedMatrix | TiledMatrix):
        return w
    return w.reshape(math.prod(w.shape[:inputs_from]), -1)


def _norm(x: Float[Array, "T D"], p: NormParams, config: ModelConfig) -> Float[Array, "T D"]:
    x = x.astype(jnp.float32)
    if config.norm == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    scaled = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
    scale = p.scale.astype(jnp.float32)
    if config.norm_offset:
        scale = scale + config.norm_offset
    out = scaled * scale[None, :]
    return out if p.bias is None else out + p.bias.astype(jnp.float32)[None, :]


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Attention:
    """What attention of one layer needs beside its input: the same for all layers but for `params` and the rules."""

    params: LayerParams
    config: ModelConfig
    options: StepOptions
    batch: DecoderBatch
    turns: tuple[Array, Array] | None
    """Cosine and sine (T, HALF) of the angles of every token of the step."""
    all_angles: Float[Array, "S HALF"] | None
    """Of every position, for keys computed from cached layer inputs."""
    rules: ScoreRules | None
    whole_rules: ScoreRules | None
    """`rules` of the heads of all devices."""

    @property
    def key_norm(self) -> KeyNorm | None:
        scale = self.params.k_norm
        return None if scale is None else KeyNorm(scale=scale, eps=self.config.norm_eps)

    @property
    def extras(self) -> dict[str, Any]:
        """Arguments of ops, only those that are not the plain case."""
        return {} if self.rules is None else {"rules": self.rules}

    @property
    def key_extras(self) -> dict[str, Any]:
        """Arguments of ops that compute keys."""
        more: dict[str, Any] = {} if self.all_angles is None else {"angles": self.all_angles}
        return more if self.key_norm is None else more | {"key_norm": self.key_norm}

    def qkv(
        self, x: Array, turns: tuple[Array, Array] | None, *, q_alone: bool = False
    ) -> tuple[Array, Array, Array]:
        """q (T, N * H), k and v (T, E) of tokens, in the dtype of x; zeros for what of k and v is not finite. `q_alone`: k and v
        are zeros."""
        p, config = self.params, self.config
        lanes, q_width = config.lane, config.num_heads * config.head_dim
        nothing = jnp.zeros((x.shape[0], lanes), x.dtype)

        def project(w: Any, b: Array | None) -> Array:
            bias = None if b is None else b.reshape(-1)
            inputs_from = len(w.shape) - 1
            return _dense(x, _flat(w, inputs_from), bias, self.options.ops.dense)

        if p.wqkv is not None and not (q_alone and p.wq is not None):
            split = self.options.ops.split_qkv
            if split is not None and self._turns_alone and x.dtype in (jnp.float32, jnp.bfloat16):
                return split(project(p.wqkv, None), p.bqkv, turns, config.head_dim, config.num_heads, x.dtype)
            out = project(p.wqkv, p.bqkv)
            q, k, v = out[:, :q_width], out[:, q_width : q_width + lanes], out[:, q_width + lanes :]
        elif q_alone:
            q, k, v = project(p.wq, p.bq), nothing, nothing
        else:
            q, k, v = project(p.wq, p.bq), project(p.wk, p.bk), project(p.wv, p.bv)
        if config.clip_qkv is not None:
            q, k, v = (jnp.clip(a, -config.clip_qkv, config.clip_qkv) for a in (q, k, v))
        q = self._positioned(q, p.q_norm, turns, of_queries=True)
        k = k if q_alone else self._positioned(k, p.k_norm, turns, of_queries=False)
        return q.astype(x.dtype), _finite(k.astype(x.dtype)), _finite(v.astype(x.dtype))

    @property
    def _turns_alone(self) -> bool:
        """Whether nothing but bias and rotation, if any, lies between the product for q, k and v and attention."""
        config, p = self.config, self.params
        plain = config.scale * config.head_dim**0.5 == 1.0 and config.clip_qkv is None
        if config.rope is not None and config.rope.attention_factor != 1.0:
            return False
        return plain and p.q_norm is None and p.k_norm is None

    def _positioned(
        self,
        a: Float[Array, "T E"],
        norm: Array | None,
        turns: tuple[Array, Array] | None,
        *,
        of_queries: bool,
    ) -> Array:
        """Queries or keys, normed and turned; queries take all factors on scores, but for the 1 / sqrt(H) of the ops."""
        config = self.config
        factor = config.scale * config.head_dim**0.5 if of_queries else 1.0
        if norm is None and turns is None:
            return a if factor == 1.0 else a * factor
        heads = a.reshape(a.shape[0], -1, config.head_dim)
        tensor = self.options.tensor
        if norm is not None and tensor is not None and config.qk_norm == "lane":
            square = tensor.sum(jnp.sum(a * a, axis=1, keepdims=True)) / (a.shape[1] * tensor.size)
            scaled = a * lax.rsqrt(square + config.norm_eps) * norm.astype(jnp.float32)[None]
            heads = scaled.reshape(heads.shape)
        elif norm is not None:
            heads = rms_norm_heads(heads, norm, config.norm_eps)
        if turns is not None:
            heads = turn(heads, *turns)
        if config.rope is not None and of_queries and config.rope.attention_factor != 1.0:
            turned = jnp.arange(config.head_dim) < config.rope.rotary_dim
            heads = heads * jnp.where(turned, config.rope.attention_factor**2, 1.0)[None, None]
        return (heads if factor == 1.0 else heads * factor).reshape(a.shape)

    def hidden_decode(self, q: Float[Array, "B N H"], pool: Array) -> Float[Array, "B N H"]:
        """Decode rows of the hidden kind; zeros for others."""
        p, options, batch = self.params, self.options, self.batch
        rows = (batch.num_kv_rows, batch.num_decode_rows)
        common: dict[str, Any] = {
            "block_size": options.hidden_block_size,
            "rows": rows,
        } | self.extras
        tables, lens = batch.decode_tables[:, 0], batch.decode_lens
        if options.tensor is not None:
            if options.hidden_mode == "absorb":
                return self._absorbed_by_input(q, pool, options.tensor)
            common["tensor"] = options.tensor
        if options.hidden_mode is None:
            return options.ops.decode_reprojected(
                q, pool, tables, lens, p.wk, p.bk, p.wv, p.bv, **common, **self.key_extras
            )
        # score = (W_k^T q) . x + q . b_k, and the softmax drops the second term; out = W_v (sum a x) + b_v as sum a = 1.
        scaled = q * jnp.asarray(q.shape[2] ** -0.5, q.dtype)
        if options.hidden_mode == "absorb":
            z = options.ops.decode_absorbed(
                self._absorbed(scaled, p.wk), pool, tables, lens, **common
            )
        else:
            # Lanes that are turned, or normed, after projection: keys are computed, and only the rest is absorbed.
            r = q.shape[2] if options.hidden_mode == "v-absorb" else 2 * self._half
            absorbed = None if r == q.shape[2] else self._absorbed(scaled[:, :, r:], p.wk[:, r:])
            bias = None if p.bk is None else p.bk[:, :r]
            z = options.ops.decode_v_absorbed(
                scaled[:, :, :r], absorbed, pool, tables, lens, p.wk[:, :r], bias, **common, **self.key_extras
            )  # fmt: skip
        return self._with_bias(_of_kv_heads(z, p.wv, (2, 2)).transpose(1, 0, 2).reshape(q.shape))

    def _with_bias(self, out: Float[Array, "B N H"]) -> Array:
        """What was absorbed of hidden rows, with the bias of their values."""
        bv = self.params.bv
        if bv is None:
            return out
        index = jnp.arange(out.shape[0], dtype=jnp.int32)
        mine = (index >= self.batch.num_kv_rows)[:, None, None]
        bias = jnp.repeat(bv.astype(jnp.float32), out.shape[1] // bv.shape[0], axis=0)
        return out + jnp.where(mine, bias[None], 0.0)

    def _absorbed_by_input(
        self, q: Float[Array, "B N H"], pool: Array, tensor: TensorParallel
    ) -> Float[Array, "B N H"]:
        """Absorbed attention of this device's heads, where every device has some features of the layer inputs, and so a part of
        the scores of all heads."""
        p, batch = self.params, self.batch
        every = tensor.gather(q * jnp.asarray(q.shape[2] ** -0.5, q.dtype), 1)
        z = self.options.ops.decode_absorbed(
            self._absorbed(every, p.wk_inputs),
            pool,
            batch.decode_tables[:, 0],
            batch.decode_lens,
            block_size=self.options.hidden_block_size,
            rows=(batch.num_kv_rows, batch.num_decode_rows),
            rules=self.whole_rules,
            tensor=tensor,
        )
        out = _of_kv_heads(z, p.wv_inputs, (2, 2)).transpose(1, 0, 2)
        return self._with_bias(tensor.scatter_sum(out.reshape(every.shape), 1))

    @property
    def _half(self) -> int:
        assert self.all_angles is not None
        return self.all_angles.shape[1]

    def _absorbed(
        self, q: Float[Array, "B N R"], wk: Float[Array, "K R D"]
    ) -> Float[Array, "B N D"]:
        # N times as wide as q: on GPUs its traffic counts, so it is not written in float32 first.
        product = None if self.options.ops.branches else q.dtype
        out = _of_kv_heads(q, wk, (2, 1), product)
        return out.transpose(1, 0, 2).reshape(q.shape[0], q.shape[1], -1).astype(q.dtype)

    def write(self, pool: Array, x: Array, k: Array, v: Array) -> Array:
        """The pool with the cache of all tokens in it."""
        batch, (kv_rows, hidden_rows) = self.batch, self.options.kinds
        if self.options.tensor is not None and hidden_rows:
            x = self.options.tensor.own(x, 1)
        lanes = self.config.lane
        # What others may read stays finite by construction, as k and v are: 0 * NaN = NaN, so a NaN would pass the mask of a
        # neighbour in the same tile, or of a recycled block's next owner. The row that made it still fails, through its own
        # residual.
        apart = hidden_rows and x.shape[1] != lanes
        if apart:
            pool = self._write_inputs(pool, _finite(x))
            if not kv_rows:
                return pool
        first = (
            jnp.where(batch.token_hidden[:, None], _finite(x), k)
            if hidden_rows and not apart
            else k
        )
        rows = jnp.concatenate([first, v]) if kv_rows else first
        first_slots = batch.first_slots
        if apart:
            first_slots = jnp.where(
                batch.token_hidden, pool.shape[0] * self.options.block_size, first_slots
            )
        slots = jnp.concatenate([first_slots, batch.second_slots]) if kv_rows else first_slots
        by_slot = pool.reshape(-1, lanes).at[slots].set(rows.astype(pool.dtype), mode="drop")
        return by_slot.reshape(pool.shape)

    def _write_inputs(self, pool: Array, x: Array) -> Array:
        """Layer inputs that are not as wide as the lane: `hidden_block_size` of them lie at the start of a block."""
        batch, slots = self.batch, self.options.hidden_block_size
        block, slot = batch.first_slots // slots, batch.first_slots % slots
        block = jnp.where(batch.token_hidden, block, pool.shape[0])
        return lax.scatter(
            pool,
            jnp.stack([block, slot * x.shape[1]], axis=1),
            x.astype(pool.dtype),
            lax.ScatterDimensionNumbers(
                update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
            ),
            mode=lax.GatherScatterMode.FILL_OR_DROP,
        )  # fmt: skip

    def __call__(self, x: Float[Array, "T D"], pool: Array) -> tuple[Float[Array, "T NH"], Array]:
        """Attention of all tokens, before the output projection, and the pool with their cache written."""
        batch, options, config = self.batch, self.options, self.config
        b, t = options.num_decode, x.shape[0]
        kv_rows, hidden_rows = options.kinds
        head_dim, dtype = config.head_dim, x.dtype

        def turns(start: int, stop: int) -> tuple[Array, Array] | None:
            if self.turns is None:
                return None
            return self.turns[0][start:stop], self.turns[1][start:stop]

        parts = []
        if b and not (kv_rows and hidden_rows and options.ops.branches):
            parts.append(self.qkv(x[:b], turns(0, b), q_alone=not kv_rows))
        elif b:
            parts.append(
                lax.cond(
                    batch.num_kv_rows > 0,
                    lambda: self.qkv(x[:b], turns(0, b)),
                    lambda: self.qkv(x[:b], turns(0, b), q_alone=True),
                )
            )
        if t > b:
            parts.append(self.qkv(x[b:], turns(b, t)))
        q, k, v = (jnp.concatenate(pieces) for pieces in zip(*parts, strict=True))
        q = q.reshape(t, -1, head_dim)
        pool = self.write(pool, x, k, v)

        outs = []
        if b:
            zeros = jnp.zeros((b, q.shape[1], head_dim), jnp.float32)

            def kv_attention() -> Array:
                rows = (jnp.int32(0), batch.num_kv_rows)
                return options.ops.decode_kv(
                    q[:b],
                    pool,
                    batch.decode_tables,
                    batch.decode_lens,
                    block_size=options.block_size,
                    rows=rows,
                    **self.extras,
                )

            def hidden_attention() -> Array:
                return self.hidden_decode(q[:b], pool)

            if not hidden_rows:
                out = kv_attention()
            elif not kv_rows:
                out = hidden_attention()
            elif not options.ops.branches:
                out = kv_attention() + hidden_attention()
            else:
                out = kv_attention() + lax.cond(
                    batch.num_decode_rows > batch.num_kv_rows, hidden_attention, lambda: zeros
                )
            outs.append(out.astype(dtype))
        if t > b:
            p = self.params
            more: dict[str, Any] = {}
            if options.tensor is not None:
                more["tensor"] = options.tensor
            if options.hidden_block_size != options.block_size or x.shape[1] != config.lane:
                more["hidden_block_size"] = options.hidden_block_size
            out = options.ops.prefill(
                q[b:],
                k[b:].reshape(t - b, -1, head_dim),
                v[b:].reshape(t - b, -1, head_dim),
                pool,
                batch.prefill_tables,
                batch.prefill_offsets,
                batch.prefill_lens,
                batch.prefix_lens,
                batch.prefill_hidden,
                batch.num_prefill_rows,
                p.wk,
                p.bk,
                p.wv,
                p.bv,
                block_size=options.block_size,
                with_hidden=hidden_rows,
                **self.extras,
                **(self.key_extras if hidden_rows else {}),
                **(more if hidden_rows else {}),
            )
            outs.append(out.astype(dtype))
        return jnp.concatenate(outs).reshape(t, -1), pool


def _of_kv_heads(
    a: Float[Array, "B N R"], w: Float[Array, "K H D"], contract: tuple[int, int], dtype: Any = None
) -> Array:
    """Products of every query head with its key head's matrix: (N, B, ...) where K = N, else (B * G, ...) a key head laid
    out so that `transpose(1, 0, 2)` and a reshape give (B, N, ...)."""
    batch, num_heads, width = a.shape
    num_kv_heads = w.shape[0]
    if num_heads == num_kv_heads:
        return dot(a.astype(w.dtype), w, contract, ((1,), (0,)), dtype)
    group = num_heads // num_kv_heads
    grouped = a.reshape(batch, num_kv_heads, group, width).transpose(0, 2, 1, 3)
    rows = grouped.reshape(batch * group, num_kv_heads, width).astype(w.dtype)
    out = dot(rows, w, contract, ((1,), (0,)), dtype)
    out = out.reshape(num_kv_heads, batch, group, -1).transpose(0, 2, 1, 3)
    return out.reshape(num_heads, batch, -1)


def _feed_forward(
    x: Float[Array, "T D"], p: LayerParams, config: ModelConfig, options: StepOptions
) -> Float[Array, "T D"]:
    """In the dtype of x between its two products; the result in float32."""
    dtype, ops = x.dtype, options.ops
    if not config.gated:
        up = activate(_dense(x, p.w_up, p.b_up, ops.dense), config.activation)
    elif p.w_gate_up is None:
        gate = activate(_dense(x, p.w_gate, p.b_gate, ops.dense), config.activation)
        up = gate * _dense(x, p.w_up, p.b_up, ops.dense)
    elif ops.gated is not None and p.b_gate_up is None:
        up = ops.gated(x, p.w_gate_up, config.activation)
    else:
        both = _dense(x, p.w_gate_up, p.b_gate_up, ops.dense)
        up = activate(both[:, : config.ffn_size], config.activation) * both[:, config.ffn_size :]
    return _summed(up.astype(dtype), p.w_down, p.b_down, options)


def score_rules(
    config: ModelConfig, layer: int, tensor: TensorParallel | None = None
) -> ScoreRules | None:
    """The rules of a layer's scores, of the heads of one of several devices; None where there are none."""
    window = config.window(layer)
    if config.attention_softcap is None and not config.alibi_slopes and window is None:
        return None
    slopes = jnp.asarray(config.alibi_slopes, jnp.float32) if config.alibi_slopes else None
    if slopes is not None and tensor is not None:
        slopes = tensor.own(slopes, 0)
    return ScoreRules(softcap=config.attention_softcap, slopes=slopes, window=window)


def embed(
    params: ModelParams,
    token_ids: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    config: ModelConfig,
    product: _Product = dense,
    tensor: TensorParallel | None = None,
) -> Float[Array, "T D"]:
    """What the first layer works on, float32."""
    h = params.embed
    if tensor is not None:
        index = token_ids - tensor.rank * h.shape[0]
        mine = (index >= 0) & (index < h.shape[0])
        rows = jnp.where(mine[:, None], h[jnp.where(mine, index, 0)], jnp.zeros((), h.dtype))
        h = tensor.sum(rows)
    elif isinstance(h, QuantizedMatrix | TiledMatrix):
        rows = (
            h.values[token_ids] if isinstance(h, QuantizedMatrix) else rows_of(h, token_ids)
        )
        if h.scale is not None:
            rows = rows.astype(jnp.float32) * h.scale[token_ids].astype(jnp.float32)[:, None]
        h = rows.astype(params.dtype)
    else:
        h = h[token_ids]
    if params.project_in is not None:
        h = _dense(h, params.project_in, None, product)
    h = h.astype(jnp.float32)
    if config.embedding_scale is not None:
        h = h * jnp.asarray(config.embedding_scale, params.dtype).astype(jnp.float32)
    if params.position is not None:
        h = h + params.position[positions + config.position_offset].astype(jnp.float32)
    return h if params.embed_norm is None else _norm(h, params.embed_norm, config)


def decoder_step(
    params: ModelParams,
    pools: tuple[Array, ...],
    batch: DecoderBatch,
    config: ModelConfig,
    options: StepOptions,
) -> tuple[tuple[Array, ...], Float[Array, "T D"]]:
    """Compute all tokens of a step; returns the pools with their cache written and the last layer's output.

    Args:
        pools: one array a layer, (P, C * E). Meant to be donated: the caller rebinds them to the result.

    Returns:
        The pools, and hidden states (T, D) in the parameters' dtype, final norm applied where the model has one;
        `logits` turns rows of them into scores over the vocabulary.
    """
    dtype, product = params.dtype, options.ops.dense
    with jax.named_scope("embed"):
        h = embed(params, batch.token_ids, batch.positions, config, product, options.tensor)
    turns = all_angles = None
    if config.rope is not None:
        inv_freq = jnp.asarray(config.rope.inv_freq, jnp.float32)[None]
        angles = batch.positions.astype(jnp.float32)[:, None] * inv_freq
        # Computed once: fused into the heads of every layer, they would cost as much as the layer's products.
        turns = lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
        if options.kinds[1]:
            tables = batch.decode_tables if options.num_decode else batch.prefill_tables
            longest = tables.shape[2] * options.hidden_block_size
            all_angles = jnp.arange(longest, dtype=jnp.float32)[:, None] * inv_freq

    def normed(h: Array, norm: NormParams | None) -> Array:
        return h if norm is None else _norm(h, norm, config)

    add_norm = options.ops.add_norm if dtype in (jnp.float32, jnp.bfloat16) else None

    def added(h: Array, delta: Array | None, norm: NormParams | None) -> tuple[Array, Array]:
        """The residual stream with `delta` in it, and its norm as an input of products."""
        if add_norm is not None and norm is not None:
            return add_norm(
                h, delta, norm, dtype, eps=config.norm_eps, offset=config.norm_offset, layer=config.norm == "layer"
            )  # fmt: skip
        h = h if delta is None else h + delta
        return h, normed(h, norm).astype(dtype)

    post = config.norm_placement == "post"
    new_pools: list[Any] = []
    delta = None  # of the last feed-forward, not in h yet
    whole = config if options.tensor is None else options.tensor.config
    for i, p in enumerate(params.layers):
        attention = _Attention(
            params=p, config=config, options=options, batch=batch, turns=turns, all_angles=all_angles,
            rules=score_rules(whole, i, options.tensor), whole_rules=score_rules(whole, i),
        )  # fmt: skip
        with jax.named_scope(f"layer{i}/attention"):
            h, x = added(h, delta, None if post else p.attn_norm)
            out, pool = attention(x, pools[i])
            new_pools.append(pool)
            out = normed(_summed(out, _flat(p.wo, 1), p.bo, options), p.attn_out_norm)
        with jax.named_scope(f"layer{i}/ffn"):
            if post:
                h = normed(h + out, p.attn_norm)
                x = h.astype(dtype)
            elif config.parallel:
                _, x = added(h, None, p.ffn_norm)
                h = h + out
            else:
                h, x = added(h, out, p.ffn_norm)
            delta = normed(_feed_forward(x, p, config, options), p.ffn_out_norm)
            if post:
                h, delta = normed(h + delta, p.ffn_norm), None
    _, out = added(h, delta, params.final_norm)
    return tuple(new_pools), out


def convert_inputs(
    params: ModelParams,
    pools: tuple[Array, ...],
    batch: ConvertBatch,
    config: ModelConfig,
    options: StepOptions,
) -> tuple[Array, ...]:
    """Compute keys and values of cached layer inputs and write them to other blocks: K and V as a step of the KV kind would have
    cached them, but for rounding; no attention, no feed-forward.

    Args:
        pools: as in `decoder_step`. All of `batch.blocks` are read before anything is written.

    Returns:
        The pools.
    """
    dtype = params.dtype
    angles = None
    if config.rope is not None:
        inv_freq = jnp.asarray(config.rope.inv_freq, jnp.float32)[None]
        angles = batch.positions.astype(jnp.float32)[:, None] * inv_freq
    slots = jnp.concatenate([batch.first_slots, batch.second_slots])
    inputs: dict[str, Any] = {} if options.tensor is None else {"tensor": options.tensor}
    new_pools: list[Any] = []
    for i, (p, pool) in enumerate(zip(params.layers, pools, strict=True)):
        with jax.named_scope(f"layer{i}/convert"):
            x = fetch_blocks(
                pool, batch.blocks[None], options.hidden_block_size, None, p.wk.shape[2], **inputs
            )[0].astype(dtype)
            norm = None if p.k_norm is None else KeyNorm(scale=p.k_norm, eps=config.norm_eps)
            k, v = project_kv(x, p.wk, p.bk, angles, norm), project_kv(x, p.wv, p.bv)
            rows = _finite(jnp.concatenate([k, v])).astype(pool.dtype)
            by_slot = pool.reshape(-1, config.lane).at[slots].set(rows, mode="drop")
            new_pools.append(by_slot.reshape(pool.shape))
    return tuple(new_pools)


def logits(
    params: ModelParams,
    hidden: Float[Array, "B D"],
    config: ModelConfig,
    product: _Product = dense,
    tensor: TensorParallel | None = None,
) -> Float[Array, "B V"]:
    """Scores over the vocabulary, float32; the whole of it on every device."""
    hidden, head = _before_head(params, hidden, product)
    scores = _dense(hidden, head, params.head_bias, product)
    if tensor is not None:
        scores = tensor.gather(scores, 1)[:, : tensor.config.vocab_size]
    cap = config.logits_softcap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def greedy_tokens(
    params: ModelParams,
    hidden: Float[Array, "B D"],
    config: ModelConfig,
    ops: AttentionOps,
    tensor: TensorParallel | None = None,
) -> tuple[Int32[Array, " B"], Bool[Array, " B"]]:
    """`sampling.greedy` of `logits`, which are not written where the platform can do without."""
    plain = params.head_bias is None and config.logits_softcap is None and tensor is None
    if ops.dense_argmax is None or not plain:
        return sampling.greedy(logits(params, hidden, config, ops.dense, tensor))
    hidden, head = _before_head(params, hidden, ops.dense)
    return ops.dense_argmax(hidden, *_weights(head))


def _before_head(
    params: ModelParams, hidden: Float[Array, "B D"], product: _Product
) -> tuple[Array, Any]:
    """What the head is multiplied with, and its matrix."""
    if params.project_out is not None:
        hidden = _dense(hidden, params.project_out, None, product).astype(hidden.dtype)
    return hidden, params.embed if params.head is None else params.head


__all__ = ["ConvertBatch", "DecoderBatch", "StepOptions", "convert_inputs", "decoder_step", "embed", "greedy_tokens", "logits", "score_rules"]  # fmt: skip
