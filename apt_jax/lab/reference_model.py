"""Plain forward pass against which the paged decoder is tested.

One sequence, no cache, full causal attention, float32 throughout, one line per step of the model's definition.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from apt_jax.models.config import ModelConfig, RopeConfig
from apt_jax.models.params import LayerParams, ModelParams
from apt_jax.ops.weights import NormParams


def _einsum(spec: str, *operands: Array) -> Array:
    return jnp.einsum(spec, *operands, precision="highest", preferred_element_type=jnp.float32)


def _plus(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias[None]


def _norm(x: Float[Array, "T D"], p: NormParams, config: ModelConfig) -> Float[Array, "T D"]:
    if config.norm == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.norm_eps)
    return _plus(x * (p.scale + config.norm_offset)[None, :], p.bias)


def _head_norm(x: Float[Array, "T N H"], scale: Array | None, config: ModelConfig) -> Float[Array, "T N H"]:
    """Apply an RMS norm to every head, or to all heads together, depending on the length of `scale`."""
    if scale is None:
        return x
    scale = scale + config.norm_offset
    flat = x if scale.shape[0] == x.shape[2] else x.reshape(x.shape[0], -1)
    scale = scale.reshape((1,) * (flat.ndim - 1) + (-1,))
    return (flat / jnp.sqrt(jnp.mean(flat**2, axis=-1, keepdims=True) + config.norm_eps) * scale).reshape(x.shape)


def _turn(x: Float[Array, "T N H"], rope: RopeConfig | None) -> Float[Array, "T N H"]:
    """Apply the rotary embedding: lanes i and i + R / 2 form a complex number, which is multiplied by e^(j t f_i) at
    position t."""
    if rope is None:
        return x
    half = len(rope.inv_freq)
    angle = jnp.arange(x.shape[0], dtype=jnp.float32)[:, None] * jnp.asarray(rope.inv_freq, jnp.float32)[None]
    turn = jax.lax.complex(jnp.cos(angle), jnp.sin(angle)) * rope.attention_factor
    turned = jax.lax.complex(x[..., :half], x[..., half : 2 * half]) * turn[:, None]
    return jnp.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def _latents(x: Array, p: LayerParams, config: ModelConfig, layer: int) -> tuple[Array, Array]:
    """Return the inputs of the projections to queries, (T, Q), and to keys and values, (T, C + R)."""
    assert config.latent is not None
    assert p.latent is not None
    eps = config.latent.norm_eps

    def norm(y: Array, scale: Array) -> Array:
        return y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + eps) * scale[None]

    q_input = x
    if p.latent.w_query is not None:
        assert p.latent.query_norm is not None
        q_input = norm(_einsum("TD,QD->TQ", x, p.latent.w_query), p.latent.query_norm.scale)
    both = _einsum("TD,CD->TC", x, p.latent.w)
    c, key = both[:, : config.latent.rank], both[:, config.latent.rank :]
    turned = _turn(key[:, None], config.rope_of(layer))[:, 0]
    return q_input, jnp.concatenate([norm(c, p.latent.norm.scale), turned], axis=1)


def _attention(x: Float[Array, "T D"], p: LayerParams, config: ModelConfig, layer: int) -> Float[Array, "T D"]:
    groups = config.num_heads // config.attention_of(layer).num_kv_heads
    q_input = x
    if config.latent is not None:
        q_input, x = _latents(x, p, config, layer)
    q = _plus(_einsum("TD,NHD->TNH", q_input, p.wq), p.bq)
    k = _plus(_einsum("SD,KHD->SKH", x, p.wk), p.bk)
    v = k if config.attention_of(layer).one_projection else _plus(_einsum("SD,KHD->SKH", x, p.wv), p.bv)
    if config.value_norm:
        v = v / jnp.sqrt(jnp.mean(v**2, axis=-1, keepdims=True) + config.norm_eps)
    if config.clip_qkv is not None:
        q, k, v = (jnp.clip(a, -config.clip_qkv, config.clip_qkv) for a in (q, k, v))
    q = _turn(_head_norm(q, p.q_norm, config), config.rope_of(layer))
    if config.latent is None:  # the rotary lanes of a latent are rotated already
        k = _turn(_head_norm(k, p.k_norm, config), config.rope_of(layer))
    if config.query_growth is not None:
        turns = jnp.floor(jnp.arange(x.shape[0]) / config.query_growth.length)
        q = q * (1 + config.query_growth.factor * jnp.log(1 + turns))[:, None, None]
    k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
    scores = _einsum("TNH,SNH->NTS", q, k) * config.scale
    if config.attention_softcap is not None:
        scores = jnp.tanh(scores / config.attention_softcap) * config.attention_softcap
    position = jnp.arange(x.shape[0])
    distance = position[None, :] - position[:, None]
    if config.alibi_slopes:
        slopes = jnp.asarray(config.alibi_slopes, jnp.float32)
        scores = scores + slopes[:, None, None] * distance[None].astype(jnp.float32)
    window = config.window(layer) or x.shape[0]
    visible = (distance <= 0) & (distance > -window)
    scores = jnp.where(visible[None], scores, -jnp.inf)
    if p.sinks is not None:  # a column of the softmax that is left out of the sum
        sinks = jnp.broadcast_to(p.sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:2], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
    else:
        weights = jax.nn.softmax(scores, axis=-1)
    return _plus(_einsum("TNH,DNH->TD", _einsum("NTS,SNH->TNH", weights, v), p.wo), p.bo)


_ACTIVATIONS = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def _feed_forward(
    x: Float[Array, "T D"], h: Float[Array, "T D"], p: LayerParams, config: ModelConfig
) -> Float[Array, "T D"]:
    """`h` is the residual stream."""
    if p.experts is not None:
        return _experts(x, h, p, config)
    activate = _ACTIVATIONS[config.activation]
    up = _plus(_einsum("TD,FD->TF", x, p.w_up), p.b_up)
    up = up * activate(_plus(_einsum("TD,FD->TF", x, p.w_gate), p.b_gate)) if config.gated else activate(up)
    return _plus(_einsum("TF,DF->TD", up, p.w_down), p.b_down)


def _experts(
    x: Float[Array, "T D"], h: Float[Array, "T D"], p: LayerParams, config: ModelConfig
) -> Float[Array, "T D"]:
    """Compute every expert for every token, and the sum weighted by the router."""
    mixture, experts, activate = config.experts, p.experts, _ACTIVATIONS[config.activation]
    assert mixture is not None
    assert experts is not None
    of_router, of_experts, norms = x, x, experts.norms
    if norms is not None:
        of_router = _norm(h, norms.router, config) / jnp.sqrt(config.hidden_size)
        of_experts = _norm(h, norms.before, config)
    products = _einsum("TD,XD->TX", of_router, experts.router)
    if mixture.scoring == "softmax":
        scores = choice = jax.nn.softmax(_plus(products, experts.router_bias))
    else:
        scores = jax.nn.sigmoid(products)
        choice = _plus(scores, experts.router_bias)
    if mixture.num_groups > 1:
        ordered = jnp.sort(choice.reshape(x.shape[0], mixture.num_groups, -1))
        best = ordered[..., -1] + (0.0 if mixture.scoring == "softmax" else ordered[..., -2])
        is_chosen = best >= jnp.sort(best)[:, -mixture.groups_per_token][:, None]
        choice = jnp.where(jnp.repeat(is_chosen, ordered.shape[2], axis=1), choice, -jnp.inf)
    least = jnp.sort(choice)[:, -mixture.per_token]
    scores = jnp.where(choice >= least[:, None], scores, 0.0)
    if mixture.normalize:
        scores = scores / scores.sum(axis=1, keepdims=True)
    scores = scores * mixture.factor * (1.0 if experts.scale is None else experts.scale[None])
    gate = _plus(_einsum("TD,XFD->TXF", of_experts, experts.w_gate), experts.b_gate)
    up = _plus(_einsum("TD,XFD->TXF", of_experts, experts.w_up), experts.b_up)
    if mixture.clamp is None:
        up = up * activate(gate)
    else:
        alpha, limit = mixture.clamp
        gate = jnp.minimum(gate, limit)
        up = (jnp.clip(up, -limit, limit) + 1) * gate / (1 + jnp.exp(-alpha * gate))
    out = _einsum("TX,TXD->TD", scores, _plus(_einsum("TXF,XDF->TXD", up, experts.w_down), experts.b_down))
    if p.w_down is not None:
        shared = _feed_forward(x, h, dataclasses.replace(p, experts=None), config)
        if norms is not None:
            return _norm(shared, norms.shared, config) + _norm(out, norms.after, config)
        gate = experts.shared_gate
        out = out + (shared if gate is None else jax.nn.sigmoid(_einsum("TD,OD->TO", x, gate)) * shared)
    return out


def _layer(h: Float[Array, "T D"], p: LayerParams, config: ModelConfig, i: int) -> Float[Array, "T D"]:
    def norm(x: Array, params: NormParams | None) -> Array:
        return x if params is None else _norm(x, params, config)

    if config.norm_placement == "post":
        h = norm(h + _attention(h, p, config, i), p.attn_norm)
        return norm(h + _feed_forward(h, h, p, config), p.ffn_norm)
    after = h + norm(_attention(norm(h, p.attn_norm), p, config, i), p.attn_out_norm) * config.residual_scale
    source = h if config.parallel else after
    out = _feed_forward(norm(source, p.ffn_norm), source, p, config)
    after = after + norm(out, p.ffn_out_norm) * config.residual_scale
    return after if p.layer_scale is None else after * p.layer_scale[None]


def forward(params: ModelParams, tokens: Int32[Array, " T"], config: ModelConfig) -> Float[Array, "T V"]:
    """Return the scores of the next token after each position of one sequence.

    Args:
        params: parameters of any floating dtype; all computation is in float32.
        tokens: ids in [0, vocab_size), at positions 0 to T - 1.

    Returns:
        float32 logits; row t depends on tokens [0, t] only.
    """
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.float32), params)
    h = params.embed[tokens]
    if params.project_in is not None:
        h = _einsum("TE,DE->TD", h, params.project_in)
    if config.embedding_scale is not None:
        h = h * config.embedding_scale
    if params.position is not None:
        h = h + params.position[jnp.arange(tokens.shape[0]) + config.position_offset]
    if params.embed_norm is not None:
        h = _norm(h, params.embed_norm, config)
    for i, p in enumerate(params.layers):
        h = _layer(h, p, config, i)
    if params.final_norm is not None:
        h = _norm(h, params.final_norm, config)
    if params.project_out is not None:
        h = _einsum("TD,ED->TE", h, params.project_out)
    head = params.embed if params.head is None else params.head
    logits = _plus(_einsum("TE,VE->TV", h, head), params.head_bias) * config.logits_scale
    cap = config.logits_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


_forward_compiled = jax.jit(forward, static_argnums=2)


def reference_generate_greedy(
    params: ModelParams,
    prompt: Sequence[int],
    num_tokens: int,
    config: ModelConfig,
    *,
    eos_token_id: int | None = None,
) -> list[int]:
    """Continue `prompt` with the most likely token (the smallest id among equals), recomputing everything for each
    token.

    Args:
        prompt: at least one id.
        num_tokens: output length; the output is shorter only if `eos_token_id` comes earlier, and then ends with it.

    Returns:
        The output ids without the prompt.
    """
    if not prompt:
        raise ValueError("prompt must hold at least one token")
    total = len(prompt) + num_tokens
    if total > config.max_position:
        raise ValueError(f"{len(prompt)=} + {num_tokens=} must not exceed max_position={config.max_position}")
    # One fixed length compiles once; later positions cannot affect earlier positions.
    tokens = np.zeros(total, np.int32)
    tokens[: len(prompt)] = prompt
    for position in range(len(prompt), total):
        scores = _forward_compiled(params, jnp.asarray(tokens), config)[position - 1]
        tokens[position] = int(jnp.argmax(scores))
        if tokens[position] == eos_token_id:
            return tokens[len(prompt) : position + 1].tolist()
    return tokens[len(prompt) :].tolist()


__all__ = ["forward", "reference_generate_greedy"]
