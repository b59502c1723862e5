"""SmolLM3 (Bakouch et al., 2025): Llama with grouped queries, and no rotary embedding in every fourth layer."""

from collections.abc import Mapping
from typing import Any

from apt_jax.errors import ModelLoadError
from apt_jax.models.checkpoint_map import ModelFamily, windows
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields, shown
from apt_jax.models.families.llama import base_config, preset, source, strip_prefix
from apt_jax.models.known_fields import LLAMA_FIELDS


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    get = ConfigFields(fields)
    num_layers, period = get.positive("num_hidden_layers"), get.positive("no_rope_layer_interval", 4)
    rotates = fields.get("no_rope_layers")
    if rotates is None:
        rotates = [int((i + 1) % period != 0) for i in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) != num_layers or not all(r in (0, 1) for r in rotates):
        raise ModelLoadError(
            f"config.json: no_rope_layers={shown(rotates)} must be 1 (rotary) or 0 for each of {num_layers} layers"
        )
    given = fields if get.flag("use_sliding_window", False) else {**fields, "sliding_window": None}
    return base_config(
        fields, "smollm3", max_len, theta=2e6, num_kv_heads=4, tie_embeddings=True, tokens=(128000, 128001, 128004),
        ffn_bias=get.flag("mlp_bias", False), unrotated_layers=tuple(i for i, r in enumerate(rotates) if not r),
        layer_windows=windows(given, num_layers, lambda i: not rotates[i]),
    )  # fmt: skip


FAMILY = ModelFamily(
    name="smollm3",
    presets={
        "smollm3-3b": preset(
            "SmolLM3ForCausalLM", 36, 2048, 16, 4, 11008, 128256, 65536, rope_theta=5e6, tie_word_embeddings=True
        ),
    },
    model_config=model_config,
    fields=LLAMA_FIELDS.but(
        "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types"
    ),
    source=source,
    strip_prefix=strip_prefix,
)
