"""Llama 2 and 3 (Touvron et al., 2023; Grattafiori et al., 2024), and models with the same layout: Yi, SmolLM2, and
most models whose ``config.json`` names ``LlamaForCausalLM``.

RMS norms, rotary embeddings, gated feed-forward layers with SiLU, no biases unless the configuration asks for them.
Mistral, Qwen, Phi-3, Gemma and OLMo-2 are variations: their adapters build on `base_config` and `source` of this
module.
"""

from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ACTIVATIONS, ModelFamily, Source, whole
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.known_fields import LLAMA_FIELDS
from apt_jax.models.rope import read_rope

TOP_LEVEL = {
    "embed": "embed_tokens.weight",
    "final_norm.scale": "norm.weight",
    "head": "lm_head.weight",
}

IN_LAYER = {
    "attn_norm.scale": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "wk": "self_attn.k_proj.weight",
    "bk": "self_attn.k_proj.bias",
    "wv": "self_attn.v_proj.weight",
    "bv": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "wo": "self_attn.o_proj.weight",
    "bo": "self_attn.o_proj.bias",
    "ffn_norm.scale": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "b_gate": "mlp.gate_proj.bias",
    "w_up": "mlp.up_proj.weight",
    "b_up": "mlp.up_proj.bias",
    "w_down": "mlp.down_proj.weight",
    "b_down": "mlp.down_proj.bias",
    "experts.router": "mlp.gate.weight",
    "experts.w_gate": "mlp.experts.*.gate_proj.weight",
    "experts.w_up": "mlp.experts.*.up_proj.weight",
    "experts.w_down": "mlp.experts.*.down_proj.weight",
}


def base_config(
    fields: Mapping[str, Any],
    family: str,
    max_len: int | None,
    *,
    eps: float = 1e-6,
    theta: float = 10_000.0,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    tie_embeddings: bool = False,
    default_activation: str = "silu",
    tokens: tuple[int | None, int | None, int | None] = (1, 2, None),
    **more: Any,
) -> ModelConfig:
    """Return the `ModelConfig` of a model with Llama's layout.

    Args:
        eps, theta, num_kv_heads, head_dim, tie_embeddings, default_activation: defaults of fields that the
            configuration leaves out. `num_kv_heads` None: as many as query heads; `head_dim` None: hidden_size / heads.
        tokens: default begin-of-sequence, end-of-sequence and padding id.
        more: fields of `ModelConfig` in which the family differs.
    """
    get = ConfigFields(fields)
    hidden_size = get.positive("hidden_size")
    num_heads = get.positive("num_attention_heads")
    head_dim = get.optional_positive("head_dim") or head_dim
    if head_dim is None:
        _, _, head_dim = get.attention_sizes("hidden_size", "num_attention_heads")
    vocab_size = get.positive("vocab_size")
    rope, max_position = read_rope(fields, head_dim, theta=theta, max_len=max_len, can_be_partial=family == "phi3")
    if fields.get("num_key_value_heads", 0) is None:
        num_kv_heads = num_heads
    attention_bias = get.flag("attention_bias", False)
    values: dict[str, Any] = dict(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=get.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=get.positive("num_key_value_heads", num_kv_heads or num_heads),
        head_dim=head_dim,
        ffn_size=get.positive("intermediate_size"),
        max_position=max_position,
        activation=get.choice("hidden_act", default_activation, ACTIVATIONS),
        gated=True,
        norm="rms",
        norm_bias=False,
        norm_eps=get.number("rms_norm_eps", eps, at_least=0.0),
        position="rope",
        rope=rope,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        ffn_bias=False,
        tie_embeddings=get.flag("tie_word_embeddings", tie_embeddings),
        **get.special_ids(vocab_size, tokens[0], tokens[1], tokens[2]),
    )
    return ModelConfig(**(values | more))


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """Return the model shape that a ``config.json`` describes; absent optional fields take Hugging Face's defaults.

    Args:
        max_len: longest context to serve, in tokens; see `read_rope`.

    Raises:
        ModelLoadError: a field is missing, out of range, or asks for something that is not implemented.
    """
    return base_config(fields, "llama", max_len, ffn_bias=ConfigFields(fields).flag("mlp_bias", False))


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`."""
    del config
    return whole(leaf, shape, TOP_LEVEL, IN_LAYER, "layers.{}.")


def strip_prefix(name: str) -> str:
    """Return a tensor name without ``model.``, a prefix that only some transformers classes save."""
    return name.removeprefix("model.")


def preset(
    architecture: str,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_size: int,
    vocab_size: int,
    max_position: int,
    **more: Any,
) -> dict[str, Any]:
    """Return the fields of a published ``config.json``."""
    return {
        "architectures": [architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": ffn_size,
        "max_position_embeddings": max_position,
    } | more


_LLAMA = "LlamaForCausalLM"
_LLAMA31_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "smollm2-135m": preset(_LLAMA, 30, 576, 9, 3, 1536, 49152, 8192, rope_theta=100000, rms_norm_eps=1e-5, tie_word_embeddings=True),
    "llama-2-7b": preset(_LLAMA, 32, 4096, 32, 32, 11008, 32000, 4096, rms_norm_eps=1e-5),
    "llama-2-13b": preset(_LLAMA, 40, 5120, 40, 40, 13824, 32000, 4096, rms_norm_eps=1e-5),
    "llama-3-8b": preset(_LLAMA, 32, 4096, 32, 8, 14336, 128256, 8192, rope_theta=500000.0, rms_norm_eps=1e-5),
    "llama-3.1-8b": preset(_LLAMA, 32, 4096, 32, 8, 14336, 128256, 131072, rope_theta=500000.0, rms_norm_eps=1e-5, rope_scaling=_LLAMA31_ROPE),
    "llama-3-70b": preset(_LLAMA, 80, 8192, 64, 8, 28672, 128256, 8192, rope_theta=500000.0, rms_norm_eps=1e-5),
    "llama-3-8b-262k": preset(_LLAMA, 32, 4096, 32, 8, 14336, 128256, 262144, rope_theta=283461213.0, rms_norm_eps=1e-5),
    "yi-6b": preset(_LLAMA, 32, 4096, 32, 4, 11008, 64000, 4096, rope_theta=5000000.0, rms_norm_eps=1e-5),
    "yi-6b-200k": preset(_LLAMA, 32, 4096, 32, 4, 11008, 64000, 200000, rope_theta=10000000.0, rms_norm_eps=1e-5),
}  # fmt: skip
"""Published sizes by name; Apt-Serve §6.7 uses the two long-context models."""

FAMILY = ModelFamily(
    name="llama",
    presets=PRESETS,
    model_config=model_config,
    fields=LLAMA_FIELDS.but("mlp_bias"),
    source=source,
    strip_prefix=strip_prefix,
)
