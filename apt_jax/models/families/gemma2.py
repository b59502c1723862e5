"""Gemma 2 (Gemma Team, 2024): Gemma with norms on both sides of attention and feed-forward layers, soft caps on scores
and logits, and a sliding window in every other layer."""

from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ModelFamily, Source, whole, windows
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.families.gemma import gemma_config
from apt_jax.models.families.llama import (
    IN_LAYER,
    TOP_LEVEL,
    preset,
    strip_prefix,
)
from apt_jax.models.known_fields import LLAMA_FIELDS

IN_SANDWICH = IN_LAYER | {
    "attn_out_norm.scale": "post_attention_layernorm.weight",
    "ffn_norm.scale": "pre_feedforward_layernorm.weight",
    "ffn_out_norm.scale": "post_feedforward_layernorm.weight",
}


def _cap(fields: Mapping[str, Any], name: str, default: float) -> float | None:
    return ConfigFields({name: default, **fields}).optional_number(name)


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    get = ConfigFields(fields)
    given = {"sliding_window": 4096, **fields}
    return gemma_config(
        fields, "gemma2", max_len, "hidden_activation", num_kv_heads=4,
        norm_placement="sandwich",
        attention_scale=get.number("query_pre_attn_scalar", 256, at_least=1e-6) ** -0.5,
        attention_softcap=_cap(fields, "attn_logit_softcapping", 50.0),
        logits_softcap=_cap(fields, "final_logit_softcapping", 30.0),
        layer_windows=windows(given, get.positive("num_hidden_layers"), lambda i: i % 2 == 0, always=True),
    )  # fmt: skip


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`."""
    del config
    return whole(leaf, shape, TOP_LEVEL, IN_SANDWICH, "layers.{}.")


GEMMA2_FIELDS = LLAMA_FIELDS.but(
    "hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping", "sliding_window", "layer_types",
    ignored=frozenset({"hidden_act"}),
)  # fmt: skip
_GEMMA2 = "Gemma2ForCausalLM"
PRESETS: dict[str, dict[str, Any]] = {
    "gemma-2-2b": preset(_GEMMA2, 26, 2304, 8, 4, 9216, 256000, 8192, head_dim=256),
    "gemma-2-9b": preset(_GEMMA2, 42, 3584, 16, 8, 14336, 256000, 8192, head_dim=256),
}

FAMILY = ModelFamily(
    name="gemma2",
    presets=PRESETS,
    model_config=model_config,
    fields=GEMMA2_FIELDS.but("attn_logit_softcapping"),
    source=source,
    strip_prefix=strip_prefix,
)
