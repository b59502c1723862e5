"""Phi-3 and Phi-3.5 mini and medium, Phi-4 and Phi-4 mini (Abdin et al., 2024): Llama with q, k and v in one tensor,
gate and up in another, and LongRoPE in the long-context variants."""

from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ModelFamily, Source, flat_shape, rows, split_leaf, windows
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.families import llama
from apt_jax.models.families.llama import base_config, preset, strip_prefix
from apt_jax.models.known_fields import LLAMA_FIELDS


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    num_layers = ConfigFields(fields).positive("num_hidden_layers")
    rope = fields.get("rope_scaling") or fields.get("rope_parameters")
    if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
        fields = {k: v for k, v in fields.items() if k not in ("rope_scaling", "rope_parameters")} | {
            "rope_scaling": {**rope, "rope_type": "longrope"}  # as in transformers
        }
    return base_config(
        fields, "phi3", max_len, eps=1e-5, tokens=(1, 32000, 32000), qkv_bias=False, out_bias=False,
        layer_windows=windows(fields, num_layers),
    )  # fmt: skip


def source(leaf: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    """Return the source tensor of a leaf of `param_names`."""
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
_PHI4_MINI_LONG = [
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898, 2.735880826,
    3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894,
    8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807,
    22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97,
    33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "phi-3-mini": preset(_PHI3, 32, 3072, 32, 32, 8192, 32064, 4096, sliding_window=2047),
    "phi-3-medium": preset(_PHI3, 40, 5120, 40, 10, 17920, 32064, 4096, sliding_window=2047),
    "phi-4": preset(
        _PHI3, 40, 5120, 40, 10, 17920, 100352, 16384, original_max_position_embeddings=16384, rope_theta=250000.0,
        sliding_window=None, bos_token_id=100257, eos_token_id=100265, pad_token_id=100349,
    ),
    "phi-4-mini": preset(
        _PHI3, 32, 3072, 24, 8, 8192, 200064, 131072, original_max_position_embeddings=4096, partial_rotary_factor=0.75,
        rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": _PHI4_MINI_LONG},
        sliding_window=262144, tie_word_embeddings=True, bos_token_id=199999, eos_token_id=199999, pad_token_id=199999,
    ),
}  # fmt: skip

FAMILY = ModelFamily(
    name="phi3",
    presets=PRESETS,
    model_config=model_config,
    fields=LLAMA_FIELDS.but("sliding_window", "layer_types", attention_bias=(False,)),
    source=source,
    strip_prefix=strip_prefix,
)
