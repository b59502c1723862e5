"""OLMo 2 (OLMo Team, 2025): Llama with norms on the output of attention and feed-forward layers, and with queries and
keys RMS-normed over all heads together."""

from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ModelFamily, Source, whole
from apt_jax.models.config import ModelConfig
from apt_jax.models.families.llama import (
    IN_LAYER,
    TOP_LEVEL,
    base_config,
    preset,
    strip_prefix,
)
from apt_jax.models.known_fields import LLAMA_FIELDS

_IN_LAYER = IN_LAYER | {
    "attn_out_norm.scale": "post_attention_layernorm.weight",
    "ffn_out_norm.scale": "post_feedforward_layernorm.weight",
}


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    return base_config(
        fields, "olmo2", max_len, eps=1e-5, tokens=(None, 50279, 1), qk_norm="lane", norm_placement="output"
    )  # fmt: skip


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`."""
    del config
    return whole(leaf, shape, TOP_LEVEL, _IN_LAYER, "layers.{}.")


PRESETS: dict[str, dict[str, Any]] = {
    "olmo-2-7b": preset("Olmo2ForCausalLM", 32, 4096, 32, 32, 11008, 100352, 4096, rope_theta=500000),
}

FAMILY = ModelFamily(
    name="olmo2",
    presets=PRESETS,
    model_config=model_config,
    fields=LLAMA_FIELDS,
    source=source,
    strip_prefix=strip_prefix,
)
