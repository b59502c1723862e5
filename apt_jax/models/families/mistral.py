"""Mistral 7B and its successors with the same layout (Jiang et al., 2023): Llama with grouped queries and, in version
0.1, a sliding window in every layer. In Ministral 8B, ``layer_types`` lists which layers have the window; in Ministral 3,
queries grow with the logarithm of their position. Checkpoints with a vision encoder (Ministral 3, Mistral Small 3.1)
hold the same text models."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ModelFamily, windows
from apt_jax.models.config import ModelConfig, QueryGrowth
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.families.llama import (
    base_config,
    preset,
    source,
    strip_prefix,
)
from apt_jax.models.families.with_images import text_family
from apt_jax.models.known_fields import LLAMA_FIELDS, ROPE_WITH_GROWTH


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    num_layers = ConfigFields(fields).positive("num_hidden_layers")
    given = {"sliding_window": 4096, **fields}
    return base_config(
        fields, "mistral", max_len, num_kv_heads=8, layer_windows=windows(given, num_layers, lambda _: True)
    )  # fmt: skip


_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _ministral3_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    given = {"rope_parameters": _YARN, "max_position_embeddings": 262144, "head_dim": 128} | {
        name: value for name, value in fields.items() if value is not None
    }
    num_layers = ConfigFields(given).positive("num_hidden_layers")
    config = base_config(
        given, "ministral3", max_len, eps=1e-5, num_kv_heads=8, layer_windows=windows(given, num_layers)
    )  # fmt: skip
    assert config.rope is not None
    scaling = ConfigFields(given["rope_parameters"], "config.json: rope ")
    growth = scaling.number("llama_4_scaling_beta", at_least=0.0)
    original = scaling.positive("original_max_position_embeddings")
    return dataclasses.replace(config, query_growth=QueryGrowth(factor=growth, length=original))


def _text_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    return (_ministral3_config if fields.get("model_type") == "ministral3" else model_config)(fields, max_len)


PRESETS: dict[str, dict[str, Any]] = {
    "mistral-7b-v0.1": preset(
        "MistralForCausalLM", 32, 4096, 32, 8, 14336, 32000, 32768, rms_norm_eps=1e-5, sliding_window=4096
    ),
    "mistral-7b-v0.3": preset(
        "MistralForCausalLM", 32, 4096, 32, 8, 14336, 32768, 32768, rope_theta=1e6, rms_norm_eps=1e-5, sliding_window=None
    ),
}  # fmt: skip

FAMILY = ModelFamily(
    name="mistral",
    presets=PRESETS,
    model_config=model_config,
    fields=LLAMA_FIELDS.but("sliding_window", "layer_types"),
    source=source,
    strip_prefix=strip_prefix,
)

MINISTRAL3 = dataclasses.replace(
    FAMILY,
    name="ministral3",
    presets={},
    model_config=_ministral3_config,
    fields=dataclasses.replace(LLAMA_FIELDS.but("sliding_window"), nested=ROPE_WITH_GROWTH),
)


def _preset_with_images(num_layers: int, hidden_size: int, ffn_size: int, **more: Any) -> dict[str, Any]:
    text = preset("Ministral3ForCausalLM", num_layers, hidden_size, 32, 8, ffn_size, 131072, 262144, rms_norm_eps=1e-5)
    text |= {"model_type": "ministral3", "head_dim": 128, "rope_parameters": _YARN}
    return {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, **more}


TEXT_OF_FAMILY_WITH_IMAGES = text_family(
    MINISTRAL3,
    "mistral3",
    model_config=_text_config,
    presets={
        "ministral-3-3b": _preset_with_images(26, 3072, 9216, tie_word_embeddings=True),
        "ministral-3-8b": _preset_with_images(34, 4096, 14336, tie_word_embeddings=False),
        "ministral-3-14b": _preset_with_images(40, 5120, 16384, tie_word_embeddings=False),
    },
    ignored=frozenset({
        "image_token_index", "image_token_id", "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size",
    }),
)  # fmt: skip
"""The text model of checkpoints that also have a vision encoder."""
