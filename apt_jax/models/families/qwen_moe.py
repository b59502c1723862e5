"""Qwen's mixtures of experts: Qwen 3 (Yang et al., 2025), and Qwen 1.5 and 2 with an expert that all tokens go to."""

from collections.abc import Callable, Mapping
from typing import Any

from apt_jax.errors import ModelLoadError
from apt_jax.models.checkpoint_map import ModelFamily, Source, whole, windows
from apt_jax.models.config import ExpertsConfig, ModelConfig
from apt_jax.models.config_fields import ConfigFields, shown
from apt_jax.models.families.llama import IN_LAYER, TOP_LEVEL, base_config, preset, source, strip_prefix
from apt_jax.models.known_fields import LLAMA_FIELDS


def _experts(
    fields: Mapping[str, Any], num_experts: int, per_token: int, size: int, shared_size: int = 0
) -> ExpertsConfig:
    """Return the mixture that a ``config.json`` describes; absent fields take the given values."""
    get = ConfigFields(fields)
    step, dense = get.positive("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    num_layers = get.positive("num_hidden_layers")
    if not isinstance(dense, list) or not all(isinstance(i, int) and 0 <= i < num_layers for i in dense):
        raise ModelLoadError(
            f"config.json: mlp_only_layers={shown(dense)} must be numbers of layers below {num_layers}"
        )
    return ExpertsConfig(
        num_experts=get.positive(get.named("num_experts", "num_local_experts"), num_experts),
        per_token=get.positive("num_experts_per_tok", per_token),
        size=get.positive("moe_intermediate_size", size),
        normalize=get.flag("norm_topk_prob", False),
        dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % step),
        shared_size=get.positive("shared_expert_intermediate_size", shared_size) if shared_size else 0,
    )


def qwen3_moe_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    return base_config(
        fields, "qwen3_moe", max_len, num_kv_heads=4, tokens=(None, None, None), qk_norm="head",
        experts=_experts(fields, 128, 8, 768), layer_windows=_windows(fields, None),
    )  # fmt: skip


def qwen2_moe_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    most = ConfigFields(fields).number("max_window_layers", 28.0)
    return base_config(
        fields, "qwen2_moe", max_len, num_kv_heads=16, tokens=(None, None, None), out_bias=False,
        qkv_bias=ConfigFields(fields).flag("qkv_bias", True), experts=_experts(fields, 60, 4, 1408, 5632),
        layer_windows=_windows(fields, lambda i: i % 2 == 0 and i < most),
    )  # fmt: skip


def _windows(fields: Mapping[str, Any], is_sliding: Callable[[int], bool] | None) -> tuple[int | None, ...]:
    get = ConfigFields(fields)
    slides = get.flag("use_sliding_window", False)
    given = {"sliding_window": 4096, **fields} if slides else {**fields, "sliding_window": None}
    always = slides and is_sliding is not None
    return windows(given, get.positive("num_hidden_layers"), is_sliding, always=always)


_SHARED = {
    "w_gate": "mlp.shared_expert.gate_proj.weight",
    "w_up": "mlp.shared_expert.up_proj.weight",
    "w_down": "mlp.shared_expert.down_proj.weight",
    "experts.shared_gate": "mlp.shared_expert_gate.weight",
}


def _source_with_shared(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`."""
    layer = leaf.split(".")[1] if leaf.startswith("layers.") else None
    is_sparse = layer is not None and config.experts_of(int(layer)) is not None
    return whole(leaf, shape, TOP_LEVEL, {**IN_LAYER, **(_SHARED if is_sparse else {})}, "layers.{}.")


_FIELDS = LLAMA_FIELDS.but(
    "sliding_window", "use_sliding_window", "layer_types", "num_experts", "num_local_experts", "num_experts_per_tok",
    "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
    ignored=frozenset({"output_router_logits", "router_aux_loss_coef"}),
)  # fmt: skip

QWEN3 = ModelFamily(
    name="qwen3_moe",
    presets={
        "qwen3-30b-a3b": preset(
            "Qwen3MoeForCausalLM", 48, 2048, 32, 4, 6144, 151936, 40960, head_dim=128, rope_theta=1e6, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        ),
    },
    model_config=qwen3_moe_config,
    fields=_FIELDS.but(ignored=frozenset({"max_window_layers"})),
    source=source,
    strip_prefix=strip_prefix,
)  # fmt: skip

QWEN2 = ModelFamily(
    name="qwen2_moe",
    presets={
        "qwen1.5-moe-a2.7b": preset(
            "Qwen2MoeForCausalLM", 24, 2048, 16, 16, 5632, 151936, 8192, rope_theta=1e6, num_experts=60,
            num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
        ),
    },
    model_config=qwen2_moe_config,
    fields=_FIELDS.but(
        "qkv_bias", "shared_expert_intermediate_size", "max_window_layers", ignored=frozenset({"attention_bias"})
    ),
    source=_source_with_shared,
    strip_prefix=strip_prefix,
)  # fmt: skip
