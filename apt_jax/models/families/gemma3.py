"""Text model of Gemma 3 (Gemma Team, 2025): Gemma 2 without soft caps, with RMS norms of every query and key head,
windows in five layers of six, and different rotary embeddings in layers with and without a window.

Checkpoints with a vision encoder (``Gemma3ForConditionalGeneration``) hold the same text model; the encoder is not
loaded, and images are not supported.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from apt_jax.errors import ModelLoadError
from apt_jax.models.checkpoint_map import ModelFamily, windows
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields, shown
from apt_jax.models.families.gemma import gemma_config
from apt_jax.models.families.gemma2 import GEMMA2_FIELDS, source
from apt_jax.models.families.llama import preset, strip_prefix
from apt_jax.models.families.with_images import text_family
from apt_jax.models.known_fields import ROPE_BY_LAYER
from apt_jax.models.rope import read_rope

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "intermediate_size": 9216, "max_position_embeddings": 131072,
}  # fmt: skip
"""Values of fields that published configurations leave out."""
_FIELDS = dataclasses.replace(
    GEMMA2_FIELDS.but(
        "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern", attn_logit_softcapping=()
    ),
    nested=ROPE_BY_LAYER,
)
_ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")


def _rope_fields(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the configuration's fields with the rotary fields of only one kind of layer, as if all layers were of that
    kind."""
    given = fields.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(not isinstance(v, Mapping | None) for v in given.values()):
        raise ModelLoadError(
            f"config.json: rope_parameters={shown(given, 60)} must be an object that holds one object for full_attention and one for "
            "sliding_attention"
        )
    found = dict(given.get(kind) or {})
    scaling = fields.get("rope_scaling")  # older configurations: only for layers with full attention
    if scaling is not None and kind == "full_attention":
        if not isinstance(scaling, Mapping):
            raise ModelLoadError(f"config.json: rope_scaling={shown(scaling, 60)} must be an object")
        found |= scaling
    theta, default = {
        "full_attention": ("rope_theta", 1_000_000.0),
        "sliding_attention": ("rope_local_base_freq", 10_000.0),
    }[kind]
    found.setdefault("rope_theta", ConfigFields(fields).number(theta, default))
    return {name: value for name, value in fields.items() if name not in _ROPE_FIELDS} | {"rope_parameters": found}


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    fields = _DEFAULTS | {name: value for name, value in fields.items() if value is not None or name not in _DEFAULTS}
    get = ConfigFields(fields)
    num_layers, period = (
        get.positive("num_hidden_layers"),
        get.positive(get.named("sliding_window_pattern", "_sliding_window_pattern"), 6),
    )
    given = {"sliding_window": 4096, **fields}
    layer_windows = windows(given, num_layers, lambda i: (i + 1) % period != 0, always=True)
    config = gemma_config(
        _rope_fields(fields, "full_attention"), "gemma3_text", max_len, "hidden_activation",
        norm_placement="sandwich",
        qk_norm="head",
        attention_scale=get.number("query_pre_attn_scalar", 256, at_least=1e-6) ** -0.5,
        logits_softcap=get.optional_number("final_logit_softcapping"),
        layer_windows=layer_windows,
    )  # fmt: skip
    local_layers = tuple(i for i, window in enumerate(layer_windows) if window is not None)
    if not local_layers:
        return config
    local_rope, longest = read_rope(_rope_fields(fields, "sliding_attention"), config.head_dim, max_len=max_len)
    return dataclasses.replace(
        config, local_rope=local_rope, local_layers=local_layers, max_position=min(config.max_position, longest)
    )


_GEMMA3, _WITH_IMAGES = "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"
_SMALL: dict[str, Any] = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512}


def _preset_with_images(
    num_layers: int, hidden_size: int, num_heads: int, num_kv_heads: int, ffn_size: int, **more: Any
) -> dict[str, Any]:
    text = preset(_GEMMA3, num_layers, hidden_size, num_heads, num_kv_heads, ffn_size, 262208, 131072, **({
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    } | more))  # fmt: skip
    return {"architectures": [_WITH_IMAGES], "eos_token_id": [1, 106], "text_config": text}


FAMILY = ModelFamily(
    name="gemma3_text",
    presets={
        "gemma-3-270m": preset(_GEMMA3, 18, 640, 4, 1, 2048, 262144, 32768, **_SMALL),
        "gemma-3-1b": preset(_GEMMA3, 26, 1152, 4, 1, 6912, 262144, 32768, **_SMALL),
    },
    model_config=model_config,
    fields=_FIELDS,
    source=source,
    strip_prefix=strip_prefix,
)

TEXT_OF_FAMILY_WITH_IMAGES = text_family(
    FAMILY,
    "gemma3",
    model_config=model_config,
    presets={
        "gemma-3-4b": _preset_with_images(34, 2560, 8, 4, 10240),
        "gemma-3-12b": _preset_with_images(48, 3840, 16, 8, 15360),
        "gemma-3-27b": _preset_with_images(62, 5376, 32, 16, 21504, head_dim=128, query_pre_attn_scalar=168),
    },
    ignored=frozenset({
        "mm_tokens_per_image", "image_token_index", "image_token_id", "boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id",
    }),
)  # fmt: skip
"""The text model of checkpoints that also have a vision encoder."""
