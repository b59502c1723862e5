"""Qwen 2 and 2.5 (Yang et al., 2024): Llama with biases on the projections to q, k and v, and a sliding window in the
upper layers of some sizes."""

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


def layer_windows(fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the windows of Qwen's layers: if ``use_sliding_window`` is set, layers from ``max_window_layers`` on have
    a window."""
    get = ConfigFields(fields)
    slides = get.flag("use_sliding_window", False)
    first = get.number("max_window_layers", 28.0)
    given = {"sliding_window": 4096, **fields} if slides else {**fields, "sliding_window": None}
    return windows(given, get.positive("num_hidden_layers"), lambda i: i >= first)


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    return base_config(
        fields, "qwen2", max_len, tokens=(None, None, None), qkv_bias=True, out_bias=False, layer_windows=layer_windows(fields)
    )  # fmt: skip


_QWEN2 = "Qwen2ForCausalLM"
PRESETS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": preset(_QWEN2, 24, 896, 14, 2, 4864, 151936, 32768, rope_theta=1e6, tie_word_embeddings=True),
    "qwen2.5-7b": preset(_QWEN2, 28, 3584, 28, 4, 18944, 152064, 131072, rope_theta=1e6),
    "qwen2.5-32b": preset(_QWEN2, 64, 5120, 40, 8, 27648, 152064, 131072, rope_theta=1e6),
}  # fmt: skip

FAMILY = ModelFamily(
    name="qwen2",
    presets=PRESETS,
    model_config=model_config,
    fields=LLAMA_FIELDS.but(
        "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", attention_bias=(False, True)
    ),
    source=source,
    strip_prefix=strip_prefix,
)
