"""Phi-3 and Phi-3.5 mini and medium, Phi-4 mini (Abdin et al., 2024): Llama with q, k and v in one tensor, gate and up
in another, and LongRoPE in the long variants."""

from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ModelFamily, Source, flat_shape, rows, split_leaf, windows
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.families import llama
from apt_jax.models.families.llama import base_config, preset, strip_prefix


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    num_layers = ConfigFields(fields).positive("num_hidden_layers")
    rope = fields.get("rope_scaling") or fields.get("rope_parameters")
    if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
        fields = {k: v for k, v in fields.items() if k not in ("rope_scaling", "rope_parameters")} | {
            "rope_scaling": {**rope, "rope_type": "longrope"}  # what transformers takes them for
        }
    return base_config(
        fields, "phi3", max_len, eps=1e-5, tokens=(1, 32000, 32000), qkv_bias=False, out_bias=False,
        layer_windows=windows(fields, num_layers),
    )  # fmt: skip


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Source tensor of a leaf of `param_names`."""
    field, index = split_leaf(leaf)
    q, kv = config.num_heads * config.head_dim, config.lane
    starts = {"wq": 0, "wk": q, "wv": q + kv}
    if field in starts:
        name = f"layers.{index}.self_attn.qkv_proj.weight"
        return rows(name, flat_shape(field, shape), starts[field], q + 2 * kv)
    if field in ("w_gate", "w_up"):
        name = f"layers.{index}.mlp.gate_up_proj.weight"
        return rows(name, shape, config.ffn_size * (field == "w_up"), 2 * config.ffn_size)
    return llama.source(leaf, shape, config)


_PHI3 = "Phi3ForCausalLM"
PRESETS: dict[str, dict[str, Any]] = {
    "phi-3-mini": preset(_PHI3, 32, 3072, 32, 32, 8192, 32064, 4096, sliding_window=2047),
    "phi-3-medium": preset(_PHI3, 40, 5120, 40, 10, 17920, 32064, 4096, sliding_window=2047),
}

FAMILY = ModelFamily(
    name="phi3",
    presets=PRESETS,
    model_config=model_config,
    source=source,
    strip_prefix=strip_prefix,
)
