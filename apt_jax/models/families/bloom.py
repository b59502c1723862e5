"""BLOOM (BigScience, 2022): ALiBi instead of position embeddings, a norm after the token embeddings, and q, k and v
stored head by head in one tensor."""

import math
from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import (
    ModelFamily,
    Source,
    split_interleaved_qkv,
    split_leaf,
    whole,
)
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.known_fields import FamilyFields

_TOP_LEVEL = {
    "embed": "word_embeddings.weight",
    "embed_norm.scale": "word_embeddings_layernorm.weight",
    "embed_norm.bias": "word_embeddings_layernorm.bias",
    "final_norm.scale": "ln_f.weight",
    "final_norm.bias": "ln_f.bias",
    "head": "lm_head.weight",
}

_IN_LAYER = {
    "attn_norm.scale": "input_layernorm.weight",
    "attn_norm.bias": "input_layernorm.bias",
    "wo": "self_attention.dense.weight",
    "bo": "self_attention.dense.bias",
    "ffn_norm.scale": "post_attention_layernorm.weight",
    "ffn_norm.bias": "post_attention_layernorm.bias",
    "w_up": "mlp.dense_h_to_4h.weight",
    "b_up": "mlp.dense_h_to_4h.bias",
    "w_down": "mlp.dense_4h_to_h.weight",
    "b_down": "mlp.dense_4h_to_h.bias",
}


def slopes(num_heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes (Press et al., 2022): 2^(-8 i / n) if the number of heads is a power of two; otherwise the
    heads beyond the largest power of two take every other slope of the next power."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    rest = [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return tuple(first + rest)


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`; ALiBi does not limit the context, so `max_len` may exceed the trained length."""
    get = ConfigFields(fields)
    hidden_size, num_heads, head_dim = get.attention_sizes(
        get.named("n_embed", "hidden_size"), get.named("n_head", "num_attention_heads"), 64, 8
    )
    vocab_size = get.positive("vocab_size", 250880)
    trained = get.positive("seq_length", 2048)
    return ModelConfig(
        family="bloom",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=get.positive(get.named("n_layer", "num_hidden_layers"), 2),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        ffn_size=4 * hidden_size,
        max_position=max(trained, max_len or trained),
        embedding_norm=True,
        activation="gelu_tanh",
        norm_eps=get.number("layer_norm_epsilon", 1e-5, at_least=0.0),
        position="alibi",
        alibi_slopes=slopes(num_heads),
        tie_embeddings=get.flag("tie_word_embeddings", True),
        **get.special_ids(vocab_size, 1, 2, None),
    )


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`."""
    del config
    field, index = split_leaf(leaf)
    if field in ("wq", "wk", "wv", "bq", "bk", "bv"):
        kind = "weight" if field[0] == "w" else "bias"
        name = f"h.{index}.self_attention.query_key_value.{kind}"
        return split_interleaved_qkv(name, shape, "qkv".index(field[1]))
    return whole(leaf, shape, _TOP_LEVEL, _IN_LAYER, "h.{}.")


def strip_prefix(name: str) -> str:
    """Return a tensor name without ``transformer.``, a prefix that only some transformers classes save."""
    return name.removeprefix("transformer.")


def _preset(num_layers: int, hidden_size: int, num_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["BloomForCausalLM"],
        "vocab_size": 250880,
        "hidden_size": hidden_size,
        "n_layer": num_layers,
        "n_head": num_heads,
        "seq_length": 2048,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "bloom-560m": _preset(24, 1024, 16),
    "bloom-7b": _preset(30, 4096, 32),
}

_FIELDS = FamilyFields(
    read=frozenset({
        "n_embed", "hidden_size", "n_head", "num_attention_heads", "n_layer", "num_hidden_layers", "seq_length",
        "layer_norm_epsilon",
    }),
    off={"apply_residual_connection_post_layernorm": (False,)},
    ignored=frozenset({"n_inner", "offset_alibi"}),
)  # fmt: skip

FAMILY = ModelFamily(
    name="bloom",
    presets=PRESETS,
    model_config=model_config,
    fields=_FIELDS,
    source=source,
    strip_prefix=strip_prefix,
)
