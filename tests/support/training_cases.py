"""Small models with all that a forward pass can have, and weights for them."""

import dataclasses
from typing import Any

import jax

from apt_jax.models.config import ModelConfig, QueryGrowth, RopeConfig
from apt_jax.models.params import ModelParams, dummy_params
from tests.support.parallel_cases import MODELS

CONFIGS: dict[str, ModelConfig] = {
    "opt": dataclasses.replace(MODELS["opt"], tie_embeddings=True, position_offset=2),
    "llama": MODELS["llama grouped"],
    "gemma2": dataclasses.replace(
        MODELS["gemma2"], tie_embeddings=True, activation="gelu_tanh", embedding_scale=8.0, norm_offset=1.0,
        attention_scale=0.2,
    ),
    "gemma3": MODELS["gemma3"],
    "gemma4": MODELS["gemma4"],
    "gemma4 experts": MODELS["gemma4 experts"],
    "qwen3": MODELS["qwen3"],
    "opt post-norm": dataclasses.replace(
        MODELS["opt"], norm_placement="post", final_norm=False, embedding_size=16, tie_embeddings=True
    ),
    "bloom, clipped": dataclasses.replace(MODELS["bloom"], clip_qkv=0.5),
    "neox": MODELS["neox"],
    "experts, growing queries": dataclasses.replace(
        MODELS["experts"], unrotated_layers=(2,), query_growth=QueryGrowth(factor=0.5, length=5)
    ),
    "gpt_oss": MODELS["gpt_oss"],
    "olmo2": MODELS["olmo2 grouped"],
    "latent": dataclasses.replace(
        MODELS["latent"], rope=RopeConfig(inv_freq=(1.0, 0.3, 0.1, 0.03), attention_factor=1.2)
    ),
}  # fmt: skip


def weights(config: ModelConfig, dtype: Any = "float32") -> ModelParams:
    """Random weights, large enough for tokens to depend on those before them."""
    params = dummy_params(config, dtype, 7)
    layers = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, params.layers)
    others = {name: getattr(params, name) for name in ("embed", "head", "project_in", "project_out")}
    scaled = {name: leaf if leaf is None else leaf * 8 for name, leaf in others.items()}
    return dataclasses.replace(params, layers=layers, **scaled)


def shallow(config: ModelConfig) -> ModelConfig:
    """The first layer alone, which is quick to compile."""
    return dataclasses.replace(config, num_layers=1, layer_windows=config.layer_windows[:1])
