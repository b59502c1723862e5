"""GPT-NeoX and Pythia (Black et al., 2022; Biderman et al., 2023): attention and feed-forward in parallel, rotary
embedding on a quarter of each head's lanes, and q, k and v stored head by head in one tensor."""

from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import (
    ACTIVATIONS,
    ModelFamily,
    Source,
    split_interleaved_qkv,
    split_leaf,
    whole,
)
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.known_fields import ROPE, FamilyFields
from apt_jax.models.rope import read_rope

_TOP_LEVEL = {
    "embed": "embed_in.weight",
    "final_norm.scale": "final_layer_norm.weight",
    "final_norm.bias": "final_layer_norm.bias",
    "head": "lm_head.weight",
}

_IN_LAYER = {
    "attn_norm.scale": "input_layernorm.weight",
    "attn_norm.bias": "input_layernorm.bias",
    "wo": "attention.dense.weight",
    "bo": "attention.dense.bias",
    "ffn_norm.scale": "post_attention_layernorm.weight",
    "ffn_norm.bias": "post_attention_layernorm.bias",
    "w_up": "mlp.dense_h_to_4h.weight",
    "b_up": "mlp.dense_h_to_4h.bias",
    "w_down": "mlp.dense_4h_to_h.weight",
    "b_down": "mlp.dense_4h_to_h.bias",
}


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    get = ConfigFields(fields)
    hidden_size, num_heads, head_dim = get.attention_sizes("hidden_size", "num_attention_heads")
    vocab_size = get.positive("vocab_size")
    # Outside of rope_parameters, this family has its own names for the rotary fields.
    others = {k: v for k, v in fields.items() if k not in ("rope_theta", "partial_rotary_factor")}
    rope, max_position = read_rope(
        others, head_dim, theta=get.number("rotary_emb_base", 10_000.0), partial=get.number("rotary_pct", 0.25),
        can_be_partial=True, max_len=max_len
    )  # fmt: skip
    bias = get.flag("attention_bias", True)
    return ModelConfig(
        family="gpt_neox",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=get.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        ffn_size=get.positive("intermediate_size"),
        max_position=max_position,
        activation=get.choice("hidden_act", "gelu", ACTIVATIONS),
        norm_eps=get.number("layer_norm_eps", 1e-5, at_least=0.0),
        parallel=get.flag("use_parallel_residual", True),
        position="rope",
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        tie_embeddings=get.flag("tie_word_embeddings", False),
        **get.special_ids(vocab_size, 0, 2, None),
    )


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`."""
    del config
    field, index = split_leaf(leaf)
    if field in ("wq", "wk", "wv", "bq", "bk", "bv"):
        kind = "weight" if field[0] == "w" else "bias"
        name = f"layers.{index}.attention.query_key_value.{kind}"
        return split_interleaved_qkv(name, shape, "qkv".index(field[1]))
    return whole(leaf, shape, _TOP_LEVEL, _IN_LAYER, "layers.{}.")


def strip_prefix(name: str) -> str:
    """Return a tensor name without ``gpt_neox.``, a prefix that only some transformers classes save. Both names of the
    output head become ``lm_head.weight``."""
    name = name.removeprefix("gpt_neox.")
    return "lm_head.weight" if name == "embed_out.weight" else name


def _preset(num_layers: int, hidden_size: int, num_heads: int, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": 2048,
        "eos_token_id": 0,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "pythia-70m": _preset(6, 512, 8, 50304),
    "pythia-1.4b": _preset(24, 2048, 16, 50304),
    "pythia-6.9b": _preset(32, 4096, 32, 50432),
    "pythia-12b": _preset(36, 5120, 40, 50688),
}

_FIELDS = FamilyFields(
    read=frozenset({
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings",
        "original_max_position_embeddings", "hidden_act", "layer_norm_eps", "use_parallel_residual", "attention_bias",
        "rotary_pct", "rotary_emb_base",
    }),
    ignored=frozenset({"rope_theta", "partial_rotary_factor"}),
    nested=ROPE,
)  # fmt: skip

FAMILY = ModelFamily(
    name="gpt_neox",
    presets=PRESETS,
    model_config=model_config,
    fields=_FIELDS,
    source=source,
    strip_prefix=strip_prefix,
)
