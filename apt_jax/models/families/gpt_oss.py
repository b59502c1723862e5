"""gpt-oss (OpenAI, 2025): attention sinks, windows in every other layer, and experts with biases that clamp their gate.

Published checkpoints store the experts in MXFP4 (`models.loading.mxfp4`); unpacked ones have the same layout.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from apt_jax.models.checkpoint_map import ModelFamily, Source, split_leaf, whole, windows
from apt_jax.models.config import ExpertsConfig, ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.families.llama import IN_LAYER, TOP_LEVEL, base_config, preset, strip_prefix
from apt_jax.models.known_fields import LLAMA_FIELDS

_IN_LAYER = IN_LAYER | {
    "bo": "self_attn.o_proj.bias",
    "sinks": "self_attn.sinks",
    "experts.router": "mlp.router.weight",
    "experts.router_bias": "mlp.router.bias",
    "experts.b_down": "mlp.experts.down_proj_bias",
}


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    get = ConfigFields(fields)
    experts = ExpertsConfig(
        num_experts=get.positive(get.named("num_local_experts", "num_experts"), 128),
        per_token=get.positive("num_experts_per_tok", 4),
        size=get.positive("intermediate_size"),
        normalize=True,
        bias=True,
        clamp=(get.number("swiglu_alpha", 1.702), get.number("swiglu_limit", 7.0)),
    )
    num_layers, given = get.positive("num_hidden_layers"), {"sliding_window": 128, **fields}
    layers = windows(given, num_layers, lambda i: i % 2 == 0, always=True)
    return base_config(
        {"attention_bias": True, "rope_parameters": _ROPE, **fields}, "gpt_oss", max_len, eps=1e-5, theta=150_000.0,
        num_kv_heads=8, head_dim=64, tokens=(None, None, None), experts=experts, layer_windows=layers,
        attention_sinks=True,
    )  # fmt: skip


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`. Experts are stored as (inputs, outputs), with gate and up
    in turns."""
    del config
    field, index = split_leaf(leaf)
    place = f"layers.{index}.mlp.experts."
    if field in ("experts.w_gate", "experts.w_up", "experts.b_gate", "experts.b_up"):
        first, is_bias = int(field.endswith("up")), ".b_" in field

        def take(tensor: np.ndarray) -> np.ndarray:
            half = tensor[..., first::2]
            return half if is_bias else half.swapaxes(1, 2)

        stored = (shape[0], 2 * shape[1]) if is_bias else (shape[0], shape[2], 2 * shape[1])
        return Source(place + ("gate_up_proj_bias" if is_bias else "gate_up_proj"), stored, take)
    if field == "experts.w_down":
        return Source(place + "down_proj", (shape[0], shape[2], shape[1]), lambda tensor: tensor.swapaxes(1, 2))
    return whole(leaf, shape, TOP_LEVEL, _IN_LAYER, "layers.{}.")


_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _preset(num_layers: int, num_experts: int) -> dict[str, Any]:
    return preset(
        "GptOssForCausalLM", num_layers, 2880, 64, 8, 2880, 201088, 131072, head_dim=64, rope_theta=150_000,
        rope_scaling=_ROPE, rms_norm_eps=1e-5, sliding_window=128, num_local_experts=num_experts, num_experts_per_tok=4,
        swiglu_limit=7.0, eos_token_id=200002, pad_token_id=199999,
    )  # fmt: skip


FAMILY = ModelFamily(
    name="gpt_oss",
    presets={"gpt-oss-20b": _preset(24, 32), "gpt-oss-120b": _preset(36, 128)},
    model_config=model_config,
    fields=LLAMA_FIELDS.but(
        "sliding_window", "layer_types", "num_local_experts", "num_experts", "num_experts_per_tok", "swiglu_alpha",
        "swiglu_limit",
        ignored=frozenset(
            {"output_router_logits", "router_aux_loss_coef", "experts_per_token", "initial_context_length"}
        ),
    ),
    source=source,
    strip_prefix=strip_prefix,
    quantizations=frozenset({"mxfp4"}),
)  # fmt: skip
