"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ModelFamily, Source, whole, windows
from apt_jax.models.config import ExpertsConfig, ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.families.llama import IN_LAYER, TOP_LEVEL, base_config, preset, strip_prefix
from apt_jax.models.known_fields import LLAMA_FIELDS

_IN_LAYER = IN_LAYER | {
    "experts.router": "block_sparse_moe.gate.weight",
    "experts.w_gate": "block_sparse_moe.experts.*.w1.weight",
    "experts.w_up": "block_sparse_moe.experts.*.w3.weight",
    "experts.w_down": "block_sparse_moe.experts.*.w2.weight",
}


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    get = ConfigFields(fields)
    experts = ExpertsConfig(
        num_experts=get.positive(get.named("num_local_experts", "num_experts"), 8),
        per_token=get.positive("num_experts_per_tok", 2),
        size=get.positive("intermediate_size"),
        normalize=True,
    )
    layers = windows(fields, get.positive("num_hidden_layers"))
    return base_config(
        fields, "mixtral", max_len, eps=1e-5, theta=1e6, num_kv_heads=8, experts=experts, layer_windows=layers
    )


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`."""
    del config
    return whole(leaf, shape, TOP_LEVEL, _IN_LAYER, "layers.{}.")


FAMILY = ModelFamily(
    name="mixtral",
    presets={
        "mixtral-8x7b": preset(
            "MixtralForCausalLM", 32, 4096, 32, 8, 14336, 32000, 32768, rope_theta=1e6, rms_norm_eps=1e-5,
            num_local_experts=8, num_experts_per_tok=2,
        ),
    },
    model_config=model_config,
    fields=LLAMA_FIELDS.but(
        "sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok",
        ignored=frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}),
    ),
    source=source,
    strip_prefix=strip_prefix,
)  # fmt: skip
