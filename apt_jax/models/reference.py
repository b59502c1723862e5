"""The plain forward pass: the contract that the paged decoder is tested against.

One sequence, no cache, full causal attention, float32 throughout, one line a step of the model's definition.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from apt_jax.config import ModelConfig
from apt_jax.models.params import LayerParams, ModelParams, NormParams


def _einsum(spec: str, *operands: Array) -> Array:
    return jnp.einsum(spec, *operands, precision="highest", preferred_element_type=jnp.float32)


def _plus(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias[None]


def _norm(x: Float[Array, "T D"], p: NormParams, eps: float) -> Float[Array, "T D"]:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + eps) * p.scale[None, :] + p.bias[None, :]


def _attention(x: Float[Array, "T D"], p: LayerParams, config: ModelConfig) -> Float[Array, "T D"]:
    groups = config.num_heads // config.num_kv_heads
    q = _plus(_einsum("TD,NHD->TNH", x, p.wq), p.bq)
    k = _plus(_einsum("SD,KHD->SKH", x, p.wk), p.bk)
    v = _plus(_einsum("SD,KHD->SKH", x, p.wv), p.bv)
    k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
    scores = _einsum("TNH,SNH->NTS", q, k) / jnp.sqrt(jnp.float32(config.head_dim))
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    weights = jax.nn.softmax(jnp.where(causal[None], scores, -jnp.inf), axis=-1)
    return _plus(_einsum("TNH,DNH->TD", _einsum("NTS,SNH->TNH", weights, v), p.wo), p.bo)


def _feed_forward(x: Float[Array, "T D"], p: LayerParams) -> Float[Array, "T D"]:
    up = jax.nn.relu(_plus(_einsum("TD,FD->TF", x, p.w_up), p.b_up))
    return _plus(_einsum("TF,DF->TD", up, p.w_down), p.b_down)


def _layer(h: Float[Array, "T D"], p: LayerParams, config: ModelConfig) -> Float[Array, "T D"]:
    eps = config.norm_eps
    if config.norm_before:
        h = h + _attention(_norm(h, p.attn_norm, eps), p, config)
        return h + _feed_forward(_norm(h, p.ffn_norm, eps), p)
    h = _norm(h + _attention(h, p, config), p.attn_norm, eps)
    return _norm(h + _feed_forward(h, p), p.ffn_norm, eps)


def forward(
    params: ModelParams, tokens: Int32[Array, " T"], config: ModelConfig
) -> Float[Array, "T V"]:
    """Scores of the next token after each position of one sequence.

    Args:
        params: any floating dtype; computed in float32.
        tokens: ids in [0, vocab_size), at positions 0 to T - 1.

    Returns:
        float32 logits; row t depends on tokens [0, t] only.
    """
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.float32), params)
    h = params.embed[tokens]
    if params.project_in is not None:
        h = _einsum("TE,DE->TD", h, params.project_in)
    h = h + params.position[jnp.arange(tokens.shape[0]) + config.position_offset]
    for p in params.layers:
        h = _layer(h, p, config)
    if params.final_norm is not None:
        h = _norm(h, params.final_norm, config.norm_eps)
    if params.project_out is not None:
        h = _einsum("TD,ED->TE", h, params.project_out)
    head = params.embed if params.head is None else params.head
    return _einsum("TE,VE->TV", h, head)


_forward_compiled = jax.jit(forward, static_argnums=2)


def reference_generate_greedy(
    params: ModelParams,
    prompt: Sequence[int],
    num_tokens: int,
    config: ModelConfig,
    *,
    eos_token_id: int | None = None,
) -> list[int]:
    """Continue `prompt` by the most likely token (the smallest id among equals), computing everything anew each time.

    Args:
        prompt: at least one id.
        num_tokens: output length; shorter only where `eos_token_id` comes first, which is then the last of the output.

    Returns:
        The output ids without the prompt.
    """
    if not prompt:
        raise ValueError("prompt must hold at least one token")
    total = len(prompt) + num_tokens
    if total > config.max_position:
        raise ValueError(
            f"{len(prompt)=} + {num_tokens=} must not exceed max_position={config.max_position}"
        )
    # One fixed length compiles once; what lies behind a position cannot act on it.
    tokens = np.zeros(total, np.int32)
    tokens[: len(prompt)] = prompt
    for position in range(len(prompt), total):
        scores = _forward_compiled(params, jnp.asarray(tokens), config)[position - 1]
        tokens[position] = int(jnp.argmax(scores))
        if tokens[position] == eos_token_id:
            return tokens[len(prompt) : position + 1].tolist()
    return tokens[len(prompt) :].tolist()


__all__ = ["forward", "reference_generate_greedy"]
