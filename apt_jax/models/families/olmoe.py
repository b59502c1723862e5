"""OLMoE (Muennighoff et al., 2024): Llama with a mixture of experts in every layer, and with queries and keys RMS-normed
over all heads together."""

from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ModelFamily
from apt_jax.models.config import ExpertsConfig, ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.families.llama import base_config, preset, source, strip_prefix
from apt_jax.models.known_fields import LLAMA_FIELDS


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    get = ConfigFields(fields)
    experts = ExpertsConfig(
        num_experts=get.positive(get.named("num_experts", "num_local_experts"), 64),
        per_token=get.positive("num_experts_per_tok", 8),
        size=get.positive("intermediate_size"),
        normalize=get.flag("norm_topk_prob", False),
    )
    return base_config(fields, "olmoe", max_len, eps=1e-5, tokens=(None, 50279, 1), qk_norm="lane", experts=experts)


FAMILY = ModelFamily(
    name="olmoe",
    presets={
        "olmoe-1b-7b": preset(
            "OlmoeForCausalLM", 16, 2048, 16, 16, 1024, 50304, 4096, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8
        ),
    },
    model_config=model_config,
    fields=LLAMA_FIELDS.but(
        "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob", clip_qkv=(),
        ignored=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    ),
    source=source,
    strip_prefix=strip_prefix,
)  # fmt: skip
