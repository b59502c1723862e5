"""GPT-2 (Radford et al., 2019): pre-norm, learned position embeddings, the tanh form of GELU, and q, k and v in one
tensor.

Linear layers are stored as (inputs, outputs), so their matrices are transposed when they are loaded.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from apt_jax.models.checkpoint_map import (
    ACTIVATIONS,
    ModelFamily,
    Source,
    flat_shape,
    rows,
    split_leaf,
    whole,
)
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.known_fields import FamilyFields

_TOP_LEVEL = {
    "embed": "wte.weight",
    "position": "wpe.weight",
    "final_norm.scale": "ln_f.weight",
    "final_norm.bias": "ln_f.bias",
    "head": "lm_head.weight",
}

_IN_LAYER = {
    "attn_norm.scale": "ln_1.weight",
    "attn_norm.bias": "ln_1.bias",
    "wo": "attn.c_proj.weight",
    "bo": "attn.c_proj.bias",
    "ffn_norm.scale": "ln_2.weight",
    "ffn_norm.bias": "ln_2.bias",
    "w_up": "mlp.c_fc.weight",
    "b_up": "mlp.c_fc.bias",
    "w_down": "mlp.c_proj.weight",
    "b_down": "mlp.c_proj.bias",
}

_IGNORED_TENSORS = re.compile(r"attn\.(bias|masked_bias)$")
"""Pattern for the names of the attention masks in older files."""


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`; `max_len` has no effect, because the position table has a fixed length."""
    del max_len
    get = ConfigFields(fields)
    hidden_size, num_heads, head_dim = get.attention_sizes(
        get.named("n_embd", "hidden_size"), get.named("n_head", "num_attention_heads"), 768, 12
    )
    vocab_size = get.positive("vocab_size", 50257)
    return ModelConfig(
        family="gpt2",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=get.positive(get.named("n_layer", "num_hidden_layers"), 12),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        ffn_size=get.positive("n_inner", 4 * hidden_size),
        max_position=get.positive(get.named("n_positions", "max_position_embeddings"), 1024),
        activation=get.choice("activation_function", "gelu_new", ACTIVATIONS),
        norm_eps=get.number("layer_norm_epsilon", 1e-5, at_least=0.0),
        attention_scale=None if get.flag("scale_attn_weights", True) else 1.0,
        tie_embeddings=get.flag("tie_word_embeddings", True),
        **get.special_ids(vocab_size, 50256, 50256, None),
    )


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`."""
    field, index = split_leaf(leaf)
    flat, d = flat_shape(field, shape), config.hidden_size
    if field in ("bq", "bk", "bv"):
        return rows(f"h.{index}.attn.c_attn.bias", flat, d * "qkv".index(field[1]), 3 * d)
    if field in ("wq", "wk", "wv"):
        start = d * "qkv".index(field[1])

        def take(tensor: np.ndarray) -> np.ndarray:
            return tensor[:, start : start + d].T

        return Source(f"h.{index}.attn.c_attn.weight", (d, 3 * d), take)
    found = whole(leaf, shape, _TOP_LEVEL, _IN_LAYER, "h.{}.")
    if field in ("wo", "w_up", "w_down"):
        return Source(found.name, found.shape[::-1], lambda tensor: tensor.T)
    return found


def strip_prefix(name: str) -> str:
    """Return a tensor name without ``transformer.``, a prefix that only some transformers classes save."""
    return name.removeprefix("transformer.")


def _preset(num_layers: int, hidden_size: int, num_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_embd": hidden_size,
        "n_layer": num_layers,
        "n_head": num_heads,
        "n_positions": 1024,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _preset(12, 768, 12),
    "gpt2-medium": _preset(24, 1024, 16),
    "gpt2-large": _preset(36, 1280, 20),
    "gpt2-xl": _preset(48, 1600, 25),
}

_FIELDS = FamilyFields(
    read=frozenset({
        "n_embd", "hidden_size", "n_layer", "num_hidden_layers", "n_head", "num_attention_heads", "n_inner", "n_positions",
        "max_position_embeddings", "activation_function", "layer_norm_epsilon", "scale_attn_weights",
    }),
    off={"scale_attn_by_inverse_layer_idx": (False,)},
    ignored=frozenset({"n_ctx"}),
)  # fmt: skip

FAMILY = ModelFamily(
    name="gpt2",
    presets=PRESETS,
    model_config=model_config,
    fields=_FIELDS,
    source=source,
    strip_prefix=strip_prefix,
    ignored_tensors=_IGNORED_TENSORS,
    inputs_first=True,
)
