"""Text model of Gemma 4 (Gemma Team, 2026): Gemma 3 without offsets in norms, with normed values, a factor on the result
of each layer, and fewer but wider key heads in layers without a window, whose values are the projection of keys.

In these layers rotation changes a quarter of the lanes. Keys and values are then cached as one tensor
(`AttentionShape.turned_lanes`), exactly. In 26B-A4B a mixture of experts stands beside every feed-forward layer, with norms of
its own (`ExpertsConfig.apart`). Models with embeddings of their own in every layer (E2B, E4B) are refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from apt_jax.errors import ModelLoadError
from apt_jax.models.checkpoint_map import ModelFamily, Source, split_leaf, whole, windows
from apt_jax.models.config import AttentionShape, ExpertsConfig, ModelConfig
from apt_jax.models.config_fields import ConfigFields, shown
from apt_jax.models.families.gemma import gemma_config
from apt_jax.models.families.gemma2 import IN_SANDWICH
from apt_jax.models.families.llama import TOP_LEVEL, preset, strip_prefix
from apt_jax.models.families.with_images import text_family
from apt_jax.models.known_fields import LLAMA_FIELDS, ROPE_BY_LAYER, FamilyFields
from apt_jax.models.rope import read_rope

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "intermediate_size": 9216, "max_position_embeddings": 131072,
}  # fmt: skip
"""Values of fields that configurations may leave out."""
_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _rope_fields(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields of a configuration with the rotary embedding of only one kind of layer."""
    given = fields.get("rope_parameters") or _ROPES
    own = given.get(kind) if isinstance(given, Mapping) else None
    if not isinstance(own, Mapping):
        raise ModelLoadError(
            f"config.json: rope_parameters={shown(given, 60)} must hold one object for full_attention and one for sliding_attention"
        )
    return {**fields, "rope_parameters": dict(own)}


def _global_shape(fields: Mapping[str, Any], global_layers: list[int]) -> tuple[int, int]:
    """Return the number and the width of key heads in layers without a window."""
    by_layer = fields.get("per_layer_config")
    if by_layer is None:
        shares = ConfigFields(fields).flag("attention_k_eq_v", False)
        is_own = shares and fields.get("num_global_key_value_heads") is not None
        name, get = "num_global_key_value_heads" if is_own else "num_key_value_heads", ConfigFields(fields)
        heads, num_queries = get.positive(name), get.positive("num_attention_heads")
        if num_queries % heads:
            raise ModelLoadError(f"config.json: {name}={heads} must divide num_attention_heads={num_queries}")
        return heads, get.positive("global_head_dim", 512)
    found = [by_layer.get(str(i)) for i in global_layers] if isinstance(by_layer, Mapping) else [None]
    own = found[0] if found and isinstance(found[0], Mapping) else {}
    is_known = set(own) <= {"head_dim", "num_key_value_heads"} and all(one == own for one in found)
    if not own or not is_known or len(by_layer) != len(global_layers):
        raise ModelLoadError(
            f"config.json: per_layer_config={shown(by_layer)} must give the same head_dim and num_key_value_heads for every layer "
            "with full attention, and nothing else"
        )
    get = ConfigFields({**fields, **own}, "config.json: per_layer_config ")
    return get.positive("num_key_value_heads"), get.positive("head_dim")


def _experts(fields: Mapping[str, Any]) -> ExpertsConfig | None:
    """Return the mixture beside every feed-forward layer; None: there is none."""
    get = ConfigFields(fields)
    if not get.flag("enable_moe_block", False):
        return None
    return ExpertsConfig(
        num_experts=get.positive("num_experts"),
        per_token=get.positive("top_k_experts"),
        size=get.positive("moe_intermediate_size"),
        normalize=True,
        shared_size=get.positive("intermediate_size"),
        shared_gate=False,
        apart=True,
    )


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    fields = _DEFAULTS | {name: value for name, value in fields.items() if value is not None or name not in _DEFAULTS}
    get = ConfigFields(fields)
    embeddings = fields.get("hidden_size_per_layer_input", 256)
    if embeddings:
        raise ModelLoadError(
            f"config.json: hidden_size_per_layer_input={shown(embeddings, 20)} is not supported: Gemma 4 E2B and E4B have embeddings "
            "in every layer; use a larger Gemma 4"
        )
    num_layers = get.positive("num_hidden_layers")
    types = fields.get("layer_types") or [
        "sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(num_layers)
    ]
    if isinstance(types, list):
        types = [*types[:-1], "full_attention"]
    given = {"sliding_window": 512, **fields, "layer_types": types}
    layer_windows = windows(given, num_layers, lambda _: True)
    local_layers = tuple(i for i, window in enumerate(layer_windows) if window is not None)
    config = gemma_config(
        _rope_fields(fields, "sliding_attention"), "gemma4_text", max_len, "hidden_activation",
        norm_offset=0.0, norm_placement="sandwich", qk_norm="head", value_norm=True, layer_scale=True, attention_scale=1.0,
        logits_softcap=get.optional_number("final_logit_softcapping"), layer_windows=layer_windows, experts=_experts(fields),
    )  # fmt: skip
    key_heads, head_dim = _global_shape(fields, [i for i in range(num_layers) if i not in local_layers])
    rope, longest = read_rope(_rope_fields(fields, "full_attention"), head_dim, max_len=max_len)
    shares, turned = get.flag("attention_k_eq_v", False), 2 * sum(f > 0 for f in rope.inv_freq)
    return dataclasses.replace(
        config,
        rope=rope,
        local_rope=config.rope if local_layers else None,
        local_layers=local_layers,
        max_position=min(config.max_position, longest),
        global_attention=AttentionShape(
            num_kv_heads=key_heads,
            head_dim=head_dim,
            one_projection=shares,
            turned_lanes=turned if shares and turned < head_dim else None,
        ),
    )


_IN_LAYER = IN_SANDWICH | {
    "layer_scale": "layer_scalar",
    "experts.router": "router.proj.weight",
    "experts.scale": "router.per_expert_scale",
    "experts.router_norm.scale": "router.scale",
    "experts.before_norm.scale": "pre_feedforward_layernorm_2.weight",
    "experts.after_norm.scale": "post_feedforward_layernorm_2.weight",
    "experts.shared_norm.scale": "post_feedforward_layernorm_1.weight",
    "experts.w_down": "experts.down_proj",
}


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`. Gate and up of all experts are one tensor."""
    del config
    field, index = split_leaf(leaf)
    if field in ("experts.w_gate", "experts.w_up"):
        first, width = (0, shape[1]) if field.endswith("gate") else (shape[1], 2 * shape[1])
        stored = (shape[0], 2 * shape[1], shape[2])
        return Source(f"layers.{index}.experts.gate_up_proj", stored, lambda tensor: tensor[:, first:width])
    return whole(leaf, shape, TOP_LEVEL, _IN_LAYER, "layers.{}.")


_FIELDS: FamilyFields = dataclasses.replace(
    LLAMA_FIELDS.but(
        "hidden_activation", "final_logit_softcapping", "sliding_window", "layer_types", "attention_k_eq_v", "global_head_dim",
        "num_global_key_value_heads", "per_layer_config", "hidden_size_per_layer_input", "enable_moe_block",
        "num_experts", "top_k_experts", "moe_intermediate_size",
        ignored=frozenset({
            "hidden_act", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "vocab_size_per_layer_input",
            "use_double_wide_mlp",
        }),
        use_bidirectional_attention=(False, "vision"), num_kv_shared_layers=(0,),
    ),
    nested={"rope_parameters": ROPE_BY_LAYER["rope_parameters"]},
)  # fmt: skip

FAMILY = ModelFamily(
    name="gemma4_text",
    presets={},
    model_config=model_config,
    fields=_FIELDS,
    source=source,
    strip_prefix=strip_prefix,
)


def _preset_with_images(
    num_layers: int, hidden_size: int, num_heads: int, num_kv_heads: int, num_global_kv_heads: int, ffn_size: int
) -> dict[str, Any]:
    text = preset(
        "Gemma4ForCausalLM", num_layers, hidden_size, num_heads, num_kv_heads, ffn_size, 262144, 262144, head_dim=256,
        global_head_dim=512, num_global_key_value_heads=num_global_kv_heads, attention_k_eq_v=True, sliding_window=1024,
        hidden_size_per_layer_input=0, final_logit_softcapping=30.0,
    )  # fmt: skip
    return {"architectures": ["Gemma4ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}


TEXT_OF_FAMILY_WITH_IMAGES = text_family(
    FAMILY,
    "gemma4",
    model_config=model_config,
    presets={
        "gemma-4-12b": _preset_with_images(48, 3840, 16, 8, 1, 15360),
        "gemma-4-31b": _preset_with_images(60, 5376, 32, 16, 4, 21504),
    },
    ignored=frozenset({
        "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "boa_token_id", "eoa_token_index",
        "audio_token_id",
    }),
)  # fmt: skip
"""The text model of checkpoints that also have a vision encoder."""
