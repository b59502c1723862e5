"""Mistral 7B and its successors with the same layout (Jiang et al., 2023): Llama with grouped queries and, in version
0.1, a sliding window in every layer. In Ministral 8B, ``layer_types`` lists which layers have the window."""

from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ModelFamily, windows
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.families.llama import (
    base_config,
    preset,
    source,
    strip_prefix,
)
from apt_jax.models.known_fields import LLAMA_FIELDS


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    num_layers = ConfigFields(fields).positive("num_hidden_layers")
    given = {"sliding_window": 4096, **fields}
    return base_config(
        fields, "mistral", max_len, num_kv_heads=8, layer_windows=windows(given, num_layers, lambda _: True)
    )  # fmt: skip


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
