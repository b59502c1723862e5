"""Gemma 1 (Gemma Team, 2024): Llama with scaled token embeddings, norm scales stored minus one, the tanh form of GELU,
heads of width 256, and tied embeddings."""

from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ACTIVATIONS, ModelFamily
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.families.llama import (
    base_config,
    preset,
    source,
    strip_prefix,
)
from apt_jax.models.known_fields import LLAMA_FIELDS


def gemma_config(
    fields: Mapping[str, Any], family: str, max_len: int | None, activation: str, **more: Any
) -> ModelConfig:
    """Return the `ModelConfig` of a model with Gemma's layout.

    Args:
        activation: name of the field that holds the activation.
        more: fields of `ModelConfig` in which the versions of Gemma differ.
    """
    get = ConfigFields(fields)
    chosen = get.choice(activation, "gelu_pytorch_tanh", ACTIVATIONS)
    if activation == "hidden_act" and chosen == "gelu":
        chosen = "gelu_tanh"  # the first releases name gelu but use the tanh form
    return base_config(
        fields, family, max_len, head_dim=256, tie_embeddings=True, tokens=(2, 1, 0),
        default_activation="gelu_pytorch_tanh",
        **({
            "activation": chosen,
            "norm_offset": 1.0,
            "embedding_scale": float(get.positive("hidden_size")) ** 0.5,
        } | more),
    )  # fmt: skip


def model_config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
    """See `llama.model_config`."""
    return gemma_config(fields, "gemma", max_len, "hidden_act")


_GEMMA = "GemmaForCausalLM"
PRESETS: dict[str, dict[str, Any]] = {
    "gemma-2b": preset(_GEMMA, 18, 2048, 8, 1, 16384, 256000, 8192, head_dim=256),
    "gemma-7b": preset(_GEMMA, 28, 3072, 16, 16, 24576, 256000, 8192, head_dim=256),
}

FAMILY = ModelFamily(
    name="gemma",
    presets=PRESETS,
    model_config=model_config,
    fields=LLAMA_FIELDS.but(ignored=frozenset({"hidden_activation"})),
    source=source,
    strip_prefix=strip_prefix,
)
