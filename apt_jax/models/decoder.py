"""The decoder: one functional step over the block pool, driven by `ModelConfig`, for every family.

A step works on T flat tokens: first `num_decode` rows of one token each, then the chunks of prefill rows, one after
another. The path of a token through one layer:

1. x = the layer's attention input (after the norm in pre-norm models), which the hidden kind caches.
2. q from x for all tokens; k and v from x for prefill tokens, and for decode rows if any of them has the KV kind; q and
   k are normed and rotated if the model does so.
3. Cache write: (k, v) or x, whichever the token's request caches, in one scatter into the donated pool; two scatters if
   x and k differ in width.
4. Decode rows attend to the pool: KV, absorbed, or reprojected. Prefill chunks attend to themselves directly and to
   their cached prefix through the pool; a hidden request computes k and v on the fly and keeps only x.
5. Output projection, residual, feed-forward, residual; norms are placed as in `ModelConfig.norm_placement`.

Activations are in the parameters' dtype; every product accumulates in float32; the residual stream, norms and softmax
are float32. Layers are unrolled with one pool array each: a scan over stacked pools would copy the pool.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Shaped

from apt_jax.models.attention import AttentionInputs, attend, key_norm, logit_modifiers
from apt_jax.models.config import AttentionShape, ModelConfig, RopeConfig
from apt_jax.models.lora import adapted, addition
from apt_jax.models.params import LayerParams, ModelParams
from apt_jax.models.sharding import TensorParallel
from apt_jax.models.step import (
    ConvertBatch,
    DecoderBatch,
    Product,
    StepOptions,
    apply_dense,
    apply_dense_summed,
    apply_norm,
    flatten_inputs,
    product_args,
    zero_non_finite,
)
from apt_jax.models.weight_layout import pre_norm_layer
from apt_jax.ops import sampling
from apt_jax.ops.backend import KernelBackend
from apt_jax.ops.calls import LogitModifiers
from apt_jax.ops.linear import activate, dense, dot, project_kv
from apt_jax.ops.weights import (
    Experts,
    GroupedMatrix,
    IntegerTiles,
    NormParams,
    PreNormLayer,
    QuantizedMatrix,
    TiledMatrix,
    rows_of,
)
from apt_jax.ops.xla_common import fetch_blocks, project_shards


def _feed_forward(
    x: Float[Array, "T D"],
    h: Float[Array, "T D"],
    p: LayerParams,
    config: ModelConfig,
    options: StepOptions,
    index: Int32[Array, " T"] | None,
) -> Float[Array, "T D"]:
    """Compute the feed-forward layer in float32; between its two products, values have the dtype of x. `h` is the
    residual stream and `index` the adapter of each row."""
    if p.experts is not None:
        return _add_experts(x, h, p, p.experts, config, options)
    if p.adapters is not None:
        return _adapted_feed_forward(x, p, config, options, index)
    up = _first_half(x, p, config, options)
    return apply_dense_summed(up, p.w_down, p.b_down, options)


def _first_half(
    x: Float[Array, "T D"], p: LayerParams, config: ModelConfig, options: StepOptions
) -> Shaped[Array, "T F"]:
    """Compute the values between the products of a feed-forward layer, in the dtype of x."""
    dtype, ops = x.dtype, options.ops
    if not config.gated:
        up = apply_dense(x, p.w_up, p.b_up, ops.dense, config.activation, dtype)
    elif p.w_gate_up is None:
        gate = apply_dense(x, p.w_gate, p.b_gate, ops.dense, config.activation)
        up = gate * apply_dense(x, p.w_up, p.b_up, ops.dense)
    elif ops.gated is not None and p.b_gate_up is None:
        up = ops.gated(x, p.w_gate_up, config.activation)
    else:
        both = apply_dense(x, p.w_gate_up, p.b_gate_up, ops.dense)
        f = both.shape[1] // 2
        up = activate(both[:, :f], config.activation) * both[:, f:]
    return up.astype(dtype)


def route(
    x: Float[Array, "T D"], experts: Experts, config: ModelConfig
) -> tuple[Int32[Array, "T E"], Float[Array, "T E"]]:
    """Return the experts that each row goes to, and their weights."""
    mixture = config.experts
    assert mixture is not None
    if mixture.scoring == "softmax":
        scores = choice = jax.nn.softmax(dense(x, experts.router, bias=experts.router_bias), axis=-1)
    else:
        scores = jax.nn.sigmoid(dense(x, experts.router))
        choice = scores if experts.router_bias is None else scores + experts.router_bias[None]
    if mixture.num_groups > 1:
        by_group = choice.reshape(choice.shape[0], mixture.num_groups, -1)
        best = jnp.sum(lax.top_k(by_group, 1 if mixture.scoring == "softmax" else 2)[0], axis=-1)
        least = lax.top_k(best, mixture.groups_per_token)[0][:, -1:]
        choice = jnp.where((best >= least)[:, :, None], by_group, -jnp.inf).reshape(choice.shape)
    _, ids = lax.top_k(choice, mixture.per_token)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if mixture.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    weights = weights * mixture.factor
    return ids, weights if experts.scale is None else weights * experts.scale.astype(jnp.float32)[ids]


def expert_inputs(
    x: Float[Array, "T D"], h: Float[Array, "T D"], experts: Experts, config: ModelConfig
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Return the inputs of a layer's router and of its experts: `x`, or norms of the residual stream `h` with
    `ExpertsConfig.apart`."""
    if experts.norms is None:
        return x, x
    of_router = apply_norm(h, experts.norms.router, config) * config.hidden_size**-0.5
    return of_router.astype(x.dtype), apply_norm(h, experts.norms.before, config).astype(x.dtype)


def mixed_biases(
    ids: Int32[Array, "T E"], weights: Float[Array, "T E"], b_down: Float[Array, "X D"]
) -> Float[Array, "T D"]:
    """Return the weighted sum of the biases of each row's experts, in float32."""
    shares = jnp.sum(jax.nn.one_hot(ids, b_down.shape[0], dtype=jnp.float32) * weights[..., None], axis=1)
    return dot(shares, b_down.astype(jnp.float32), (1, 0))


def _add_experts(
    x: Float[Array, "T D"],
    h: Float[Array, "T D"],
    p: LayerParams,
    experts: Experts,
    config: ModelConfig,
    options: StepOptions,
) -> Float[Array, "T D"]:
    """Compute a mixture of experts in float32, with the expert that all tokens go to if the layer has one. `x` is the input
    of feed-forward layers, and `h` the residual stream."""
    assert config.experts is not None
    of_router, rows = expert_inputs(x, h, experts, config)
    ids, weights = route(of_router, experts, config)
    out = options.ops.experts(rows, ids, weights, experts, config.activation, clamp=config.experts.clamp)
    if (norms := experts.norms) is not None:
        out = out if options.tensor is None else options.tensor.sum(out.astype(x.dtype))
        shared = apply_dense_summed(_first_half(x, p, config, options), p.w_down, None, options)
        return apply_norm(shared, norms.shared, config) + apply_norm(out, norms.after, config)
    if p.w_down is not None:
        shared = apply_dense(_first_half(x, p, config, options), p.w_down, None, options.ops.dense)
        gate = experts.shared_gate
        out = out + (shared if gate is None else jax.nn.sigmoid(dense(x, gate)) * shared)
    if options.tensor is not None:
        out = options.tensor.sum(out.astype(x.dtype)).astype(jnp.float32)
    return out if experts.b_down is None else out + mixed_biases(ids, weights, experts.b_down)


def _adapted_feed_forward(
    x: Float[Array, "T D"],
    p: LayerParams,
    config: ModelConfig,
    options: StepOptions,
    index: Int32[Array, " T"] | None,
) -> Float[Array, "T D"]:
    """Compute `_feed_forward` with adapters; each LoRA term is added right after its product."""
    ops, f = options.ops, config.ffn_size

    def product(w: Any, b: Array | None, *fields: str) -> Array:
        return adapted(apply_dense(x, w, b, ops.dense), x, p, [(field, f) for field in fields], index, ops)

    if not config.gated:
        up = activate(product(p.w_up, p.b_up, "w_up"), config.activation)
    elif p.w_gate_up is None:
        gate, up = product(p.w_gate, p.b_gate, "w_gate"), product(p.w_up, p.b_up, "w_up")
        up = activate(gate, config.activation) * up
    else:
        both = product(p.w_gate_up, p.b_gate_up, "w_gate", "w_up")
        up = activate(both[:, :f], config.activation) * both[:, f:]
    up = up.astype(x.dtype)
    down = apply_dense_summed(up, p.w_down, p.b_down, options)
    return adapted(down, up, p, [("w_down", config.hidden_size)], index, ops)


def _rows(w: Any, rows: Int32[Array, " T"], dtype: Any) -> Shaped[Array, "T I"]:
    """Return rows of a matrix (an array or one of `FLAT_MATRICES`) in `dtype`."""
    if isinstance(w, GroupedMatrix | IntegerTiles):
        return w.rows(rows).astype(dtype)
    if not isinstance(w, QuantizedMatrix | TiledMatrix):
        return w[rows]
    values = w.values[rows] if isinstance(w, QuantizedMatrix) else rows_of(w, rows)
    if w.scale is not None:
        values = values.astype(jnp.float32) * w.scale[rows].astype(jnp.float32)[:, None]
    return values.astype(dtype)


def embed(
    params: ModelParams,
    token_ids: Int32[Array, " T"],
    positions: Int32[Array, " T"],
    config: ModelConfig,
    product: Product = dense,
    tensor: TensorParallel | None = None,
) -> Float[Array, "T D"]:
    """Return the input of the first layer in float32: token embeddings, with projection, scale, positions and norm if
    the model has them."""
    if tensor is None:
        h = _rows(params.embed, token_ids, params.dtype)
    else:
        there = params.embed.shape[0]
        index = token_ids - tensor.rank * there
        mine = (index >= 0) & (index < there)
        rows = _rows(params.embed, jnp.where(mine, index, 0), params.dtype)
        h = tensor.sum(jnp.where(mine[:, None], rows, jnp.zeros((), rows.dtype)))
    if params.project_in is not None:
        h = apply_dense(h, params.project_in, None, product)
    h = h.astype(jnp.float32)
    if config.embedding_scale is not None:
        h = h * jnp.asarray(config.embedding_scale, params.dtype).astype(jnp.float32)
    if params.position is not None:
        h = h + params.position[positions + config.position_offset].astype(jnp.float32)
    return h if params.embed_norm is None else apply_norm(h, params.embed_norm, config)


def rotary_angles(rope: RopeConfig | None, positions: Array) -> Float[Array, "T HALF"] | None:
    """Return the rotary angles of positions; None: no rotary embedding."""
    if rope is None:
        return None
    return positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.inv_freq, jnp.float32)[None]


def _rotation(
    rope: RopeConfig | None, batch: DecoderBatch, options: StepOptions
) -> tuple[tuple[Array, Array] | None, Array | None]:
    """Return `cos_sin` and `all_angles` of `AttentionInputs`, for layers with the rotary embedding `rope`."""
    angles = rotary_angles(rope, batch.positions)
    if angles is None:
        return None, None
    # Computed once: if the compiler fused them into every layer, they would cost as much as the layer's products.
    cos_sin = lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
    if not options.kinds[1]:
        return cos_sin, None
    tables = batch.decode_tables if options.num_decode else batch.prefill_tables
    longest = tables.shape[2] * options.hidden_block_size
    return cos_sin, rotary_angles(rope, jnp.arange(longest, dtype=jnp.float32))


def _sampled(rows: Array, sample_rows: Int32[Array, " S"] | None) -> Array:
    """Return the rows at the indices `sample_rows`, zeros for indices out of range; None: all rows."""
    if sample_rows is None:
        return rows
    return rows.at[sample_rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _added(
    h: Float[Array, "T D"],
    delta: Float[Array, "T D"] | None,
    norm: NormParams | None,
    dtype: Any,
    config: ModelConfig,
    options: StepOptions,
) -> tuple[Array, Array]:
    """Add `delta` to the residual stream; return the sum in float32 and the normed sum in `dtype`, the input of the
    next products."""
    add_norm = options.ops.add_norm if dtype in (jnp.float32, jnp.bfloat16) else None
    if add_norm is not None and norm is not None:
        return add_norm(
            h, delta, norm, dtype, eps=config.norm_eps, offset=config.norm_offset, layer=config.norm == "layer"
        )  # fmt: skip
    h = h if delta is None else h + delta
    return h, _normed(h, norm, config).astype(dtype)


def _normed(h: Array, norm: NormParams | None, config: ModelConfig) -> Array:
    return h if norm is None else apply_norm(h, norm, config)


def _scaled(delta: Array, config: ModelConfig) -> Array:
    return delta if config.residual_scale == 1.0 else delta * config.residual_scale


class _PositionTerms(NamedTuple):
    """Position-dependent inputs of a layer's attention: the fields of `AttentionInputs` with the same names."""

    cos_sin: tuple[Array, Array] | None
    all_angles: Array | None
    rules: LogitModifiers | None
    rules_of_all_heads: LogitModifiers | None


def _attention(
    x: Float[Array, "T D"],
    pool: Array,
    p: LayerParams,
    batch: DecoderBatch,
    terms: _PositionTerms,
    *,
    rope: RopeConfig | None,
    shape: AttentionShape,
    config: ModelConfig,
    options: StepOptions,
) -> tuple[Float[Array, "T NH"], Array]:
    """Call `attend` for a layer, with the arguments of `_layer`."""
    inputs = AttentionInputs(
        params=p, config=config, options=options, batch=batch, rope=rope, shape=shape, **terms._asdict()
    )
    return attend(inputs, x, pool)


_shared_attention = jax.jit(_attention, static_argnames=("rope", "shape", "config", "options"))
"""`_attention` as one function of the compiled program that all layers call, including the last."""


def _layer(
    h: Float[Array, "T D"],
    x: Float[Array, "T D"],
    pool: Array,
    p: LayerParams,
    next_norm: NormParams | None,
    batch: DecoderBatch,
    terms: _PositionTerms,
    sample_rows: Int32[Array, " S"] | None,
    *,
    rope: RopeConfig | None,
    shape: AttentionShape,
    config: ModelConfig,
    options: StepOptions,
    rest: StepOptions,
) -> tuple[Float[Array, "S D"], Float[Array, "S D"], Array]:
    """Compute one layer of a step and write its cache; return the residual stream after the layer, the next layer's
    input, and the updated pool.

    Args:
        h: the residual stream, float32.
        x: input of attention: `h` after the norm, in the parameters' dtype.
        next_norm: norm that follows the layer: the attention norm of the next layer, or the final norm.
        sample_rows: indices of the tokens whose computation continues after attention; None: all.
        rest: options for the part of the layer after attention.
    """
    dtype, index = x.dtype, batch.adapters
    of_layer = _attention if options.ops.branches else _shared_attention
    with jax.named_scope("attention"):
        heads, pool = of_layer(x, pool, p, batch, terms, rope=rope, shape=shape, config=config, options=options)
        h, heads = _sampled(h, sample_rows), _sampled(heads, sample_rows)
        index = None if index is None else _sampled(index, sample_rows)
        out = apply_dense_summed(heads, flatten_inputs(p.wo, 1), p.bo, rest)
        out = adapted(out, heads, p, [("wo", config.hidden_size)], index, rest.ops)
        out = _scaled(_normed(out, p.attn_out_norm, config), config)
    with jax.named_scope("ffn"):
        if config.norm_placement == "post":
            h = _normed(h + out, p.attn_norm, config)
            x = h.astype(dtype)
        elif config.parallel:
            _, x = _added(h, None, p.ffn_norm, dtype, config, rest)
            h = h + out
        else:
            h, x = _added(h, out, p.ffn_norm, dtype, config, rest)
        delta = _scaled(_normed(_feed_forward(x, h, p, config, rest, index), p.ffn_out_norm, config), config)
        if config.norm_placement == "post":
            h, delta = _normed(h + delta, p.ffn_norm, config), None
        if p.layer_scale is not None:
            factor = p.layer_scale.astype(jnp.float32)[None]
            h, delta = h * factor, None if delta is None else delta * factor
        h, x = _added(h, delta, next_norm, dtype, config, rest)
    return h, x, pool


_shared_layer = jax.jit(_layer, static_argnames=("rope", "shape", "config", "options", "rest"))
"""`_layer` as a separate function of the program, traced and lowered once for equal layers. The compiler inlines each
call."""


def decoder_step(
    params: ModelParams,
    pools: tuple[Array, ...],
    batch: DecoderBatch,
    config: ModelConfig,
    options: StepOptions,
    sample_rows: Int32[Array, " S"] | None = None,
) -> tuple[tuple[Array, ...], Float[Array, "S D"]]:
    """Compute all tokens of a step and write their cache; return the updated pools and the last layer's output.

    Args:
        pools: one array per layer or, with `options.layer_groups`, shared by layers; (P, C, E). Meant to be donated: the
            caller uses the returned pools from then on.
        sample_rows: indices of the tokens whose output is needed, padded with indices out of range; for the other
            tokens of a prompt the last layer only writes the cache. None: all tokens.

    Returns:
        The pools, and hidden states (S, D) in the parameters' dtype, after the final norm if the model has one. Rows
        for indices out of range are meaningless. `logits` computes scores over the vocabulary from the rows.
    """
    num_tokens = batch.token_ids.shape[0]
    every = options.ops
    if options.num_decode in (0, num_tokens):
        live = batch.num_decode_rows if options.num_decode else jnp.sum(batch.prefill_lens)
        options = dataclasses.replace(options, ops=options.ops.for_rows(live))
    has_prompts = options.num_decode < num_tokens
    if sample_rows is None:
        of_samples = options
    else:
        of_samples = dataclasses.replace(options, ops=every.for_rows(jnp.sum(sample_rows < num_tokens)))

    dtype, product = params.dtype, options.ops.dense
    with jax.named_scope("embed"):
        h = embed(params, batch.token_ids, batch.positions, config, product, options.tensor)
    ropes = [config.rope_of(i) for i in range(len(params.layers))]
    turns = {rope: _rotation(rope, batch, options) for rope in dict.fromkeys(ropes)}

    whole = config if options.tensor is None else options.tensor.config
    rules = [logit_modifiers(whole, i, options.tensor, p.sinks) for i, p in enumerate(params.layers)]
    post = config.norm_placement == "post"
    norms = [*(None if post else p.attn_norm for p in params.layers), params.final_norm]
    compute = _layer if every.branches else _shared_layer

    groups, num_layers = options.layer_groups, len(params.layers)
    arrays = range(num_layers) if groups is None else groups.arrays
    sets: tuple[int | None, ...] = (None,) * num_layers if groups is None else groups.sets
    of_set = {index: batch.of_set(index) for index in dict.fromkeys(sets)}
    block_sizes = [options.block_size if groups is None else groups.block_size_of(i) for i in range(num_layers)]

    def in_parts(h: Array, pools: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        new_pools = list(pools)
        h, x = _added(h, None, norms[0], dtype, config, options)
        for i, p in enumerate(params.layers):
            is_cut = has_prompts and i == len(params.layers) - 1
            with jax.named_scope(f"layer{i}"):
                h, x, new_pools[arrays[i]] = compute(
                    h,
                    x,
                    new_pools[arrays[i]],
                    p,
                    norms[i + 1],
                    of_set[sets[i]],
                    _PositionTerms(*turns[ropes[i]], rules[i], logit_modifiers(whole, i)),
                    sample_rows if is_cut else None,
                    rope=ropes[i],
                    shape=config.attention_of(i),
                    config=config,
                    options=dataclasses.replace(options, block_size=block_sizes[i]),
                    rest=of_samples if is_cut else options,
                )
        if not has_prompts:
            x = _added(_sampled(h, sample_rows), None, params.final_norm, dtype, config, of_samples)[1]
        return tuple(new_pools), x

    layers: list[PreNormLayer] = []
    if options.num_decode == num_tokens and options.kinds[0]:
        plain = (pre_norm_layer(p, config) for p in params.layers)
        layers = [
            layer for layer in plain if layer is not None and options.ops.takes_layer(layer, dtype, pools[0].dtype)
        ]
    if len(layers) < len(params.layers):
        return in_parts(h, pools)

    def in_one_call_each(h: Array, pools: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        new_pools = list(pools)
        assert options.ops.decode_layer is not None
        for i, layer in enumerate(layers):
            own = of_set[sets[i]]
            with jax.named_scope(f"layer{i}"):
                h, new_pools[arrays[i]] = options.ops.decode_layer(
                    h, new_pools[arrays[i]], layer, tables=own.decode_tables, lens=batch.decode_lens,
                    slots=(own.first_slots, own.second_slots), live=batch.num_decode_rows, cos_sin=turns[ropes[i]][0],
                    rules=rules[i], block_size=block_sizes[i],
                )  # fmt: skip
        return tuple(new_pools), _added(_sampled(h, sample_rows), None, params.final_norm, dtype, config, of_samples)[1]

    if not options.kinds[1]:
        return in_one_call_each(h, pools)
    if jax.__version_info__ < (0, 11):  # older compilers copy all pools into and out of a branch
        return in_parts(h, pools)
    has_hidden = batch.num_decode_rows > batch.num_kv_rows
    return lax.cond(has_hidden, in_parts, in_one_call_each, h, pools)


def convert_inputs(
    params: ModelParams,
    pools: tuple[Array, ...],
    batch: ConvertBatch,
    config: ModelConfig,
    options: StepOptions,
) -> tuple[Array, ...]:
    """Compute keys and values from cached layer inputs and write them to other blocks: the K and V that a step of the
    KV kind would have cached, up to rounding. No attention or feed-forward layer is computed.

    Args:
        pools: as in `decoder_step`. In each layer, all of `batch.blocks` are read before any block is written.

    Returns:
        The pools.
    """
    dtype = params.dtype
    ropes = [config.rope_of(i) for i in range(len(params.layers))]
    angles = {rope: rotary_angles(rope, batch.positions) for rope in dict.fromkeys(ropes)}
    slots = jnp.concatenate([batch.first_slots, batch.second_slots])
    # Fetch the features of all devices, or only this device's if its projections are sharded by feature.
    inputs: dict[str, Any] = {}
    if options.tensor is not None and not options.cuts_by_feature:
        inputs["tensor"] = options.tensor
    new_pools: list[Any] = []
    for i, (p, pool) in enumerate(zip(params.layers, pools, strict=True)):
        with jax.named_scope(f"layer{i}/convert"):
            fetched = fetch_blocks(pool, batch.blocks[None], options.hidden_block_size, None, p.wk.shape[2], **inputs)
            x = fetched[0].astype(dtype)
            if options.cuts_by_feature:
                assert options.tensor is not None
                k, v = project_shards(x, p.wk, p.bk, p.wv, p.bv, options.tensor)
            else:
                more = (addition(x, p, field, config.lane, batch.adapters, options.ops) for field in ("wk", "wv"))
                more_k, more_v = more
                k = project_kv(x, p.wk, p.bk, angles[ropes[i]], key_norm(p, config), more_k)
                v = project_kv(x, p.wv, p.bv, more=more_v)
            rows = zero_non_finite(jnp.concatenate([k, v])).astype(pool.dtype)
            by_slot = pool.reshape(-1, config.lane).at[slots].set(rows, mode="drop")
            new_pools.append(by_slot.reshape(pool.shape))
    return tuple(new_pools)


def logits(
    params: ModelParams,
    hidden: Float[Array, "B D"],
    config: ModelConfig,
    product: Product = dense,
    tensor: TensorParallel | None = None,
) -> Float[Array, "B V"]:
    """Return the scores over the vocabulary, in float32; every device gets all of them."""
    hidden, head = _before_head(params, hidden, product)
    scores = apply_dense(hidden, head, params.head_bias, product)
    if config.logits_scale != 1.0:
        scores = scores * config.logits_scale
    if tensor is not None:
        scores = tensor.gather(scores, 1)[:, : tensor.config.vocab_size]
    cap = config.logits_softcap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def greedy_tokens(
    params: ModelParams,
    hidden: Float[Array, "B D"],
    config: ModelConfig,
    ops: KernelBackend,
    tensor: TensorParallel | None = None,
) -> tuple[Int32[Array, " B"], Bool[Array, " B"]]:
    """Return `sampling.greedy` of the logits. If `dense_argmax` can be used, the logits are not written to memory."""
    plain = params.head_bias is None and config.logits_softcap is None and tensor is None
    if ops.dense_argmax is None or not plain:
        return sampling.greedy(logits(params, hidden, config, ops.dense, tensor))
    hidden, head = _before_head(params, hidden, ops.dense)
    return ops.dense_argmax(hidden, *product_args(head))


def _before_head(params: ModelParams, hidden: Float[Array, "B D"], product: Product) -> tuple[Array, Any]:
    """Return the input of the output head, and the head's matrix."""
    if params.project_out is not None:
        hidden = apply_dense(hidden, params.project_out, None, product).astype(hidden.dtype)
    return hidden, params.embed if params.head is None else params.head


__all__ = [
    "ConvertBatch",
    "DecoderBatch",
    "StepOptions",
    "convert_inputs",
    "decoder_step",
    "embed",
    "greedy_tokens",
    "logit_modifiers",
    "logits",
    "mixed_biases",
    "rotary_angles",
    "route",
]
