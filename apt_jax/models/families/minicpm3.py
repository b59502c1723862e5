"""MiniCPM3 (OpenBMB, 2024): latent attention in a dense model, with factors on embeddings, residuals and logits."""

import functools
from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ModelFamily
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.families.deepseek import LATENT_FIELDS, latent_config, latent_source
from apt_jax.models.families.llama import preset, strip_prefix

_FACTORS = [
    1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725, 2.093982484148734, 3.1446935121267696,
    4.937952647693647, 7.524541999994549, 10.475458000005451, 13.062047352306353, 14.85530648787323, 15.906017515851266,
    16.461961959767827, 16.740306425132903, 16.87581087164081, 16.940876586213283,
]  # fmt: skip


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    get = ConfigFields(fields)
    num_layers, hidden_size = get.positive("num_hidden_layers"), get.positive("hidden_size")
    depth = num_layers**0.5 if fields.get("scale_depth", 1.4) is None else get.number("scale_depth", 1.4)
    base = hidden_size if fields.get("dim_model_base", 256) is None else get.positive("dim_model_base", 256)
    return latent_config(
        fields, "minicpm3", max_len, query_rank=768, value_dim=None, eps=1e-5, tie_embeddings=True,
        embedding_scale=get.number("scale_emb", 12.0), residual_scale=depth / num_layers**0.5,
        logits_scale=base / hidden_size,
    )  # fmt: skip


FAMILY = ModelFamily(
    name="minicpm3",
    presets={
        "minicpm3-4b": preset(
            "MiniCPM3ForCausalLM", 62, 2560, 40, 40, 6400, 73448, 32768, kv_lora_rank=256, q_lora_rank=768,
            qk_nope_head_dim=64, qk_rope_head_dim=32, scale_emb=12, scale_depth=1.4, dim_model_base=256, rms_norm_eps=1e-5,
            rope_scaling={
                "type": "longrope", "short_factor": _FACTORS, "long_factor": _FACTORS,
                "original_max_position_embeddings": 32768,
            },
        ),
    },
    model_config=model_config,
    fields=LATENT_FIELDS.but("scale_emb", "scale_depth", "dim_model_base", mlp_bias=(False,)),
    source=functools.partial(latent_source, interleaved=False),
    strip_prefix=strip_prefix,
)  # fmt: skip
