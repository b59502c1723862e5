"""Qwen 3, dense (Yang et al., 2025): Llama with RMS norms of every query and key head, and heads of width 128 at any
model width."""

from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ModelFamily
from apt_jax.models.config import ModelConfig
from apt_jax.models.families.llama import (
    base_config,
    preset,
    source,
    strip_prefix,
)
from apt_jax.models.families.qwen2 import layer_windows
from apt_jax.models.known_fields import LLAMA_FIELDS


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    return base_config(
        fields, "qwen3", max_len, head_dim=128, tokens=(None, None, None), qk_norm="head", layer_windows=layer_windows(fields)
    )  # fmt: skip


_QWEN3 = "Qwen3ForCausalLM"
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": preset(_QWEN3, 28, 1024, 16, 8, 3072, 151936, 40960, head_dim=128, rope_theta=1e6, tie_word_embeddings=True),
    "qwen3-1.7b": preset(_QWEN3, 28, 2048, 16, 8, 6144, 151936, 40960, head_dim=128, rope_theta=1e6, tie_word_embeddings=True),
    "qwen3-8b": preset(_QWEN3, 36, 4096, 32, 8, 12288, 151936, 40960, head_dim=128, rope_theta=1e6),
}  # fmt: skip

FAMILY = ModelFamily(
    name="qwen3",
    presets=PRESETS,
    model_config=model_config,
    fields=LLAMA_FIELDS.but("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    source=source,
    strip_prefix=strip_prefix,
)
