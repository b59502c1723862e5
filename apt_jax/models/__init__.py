"""Models: one functional decoder, its parameters, and the mapping files and loaders that fill them from checkpoints."""

from apt_jax.models.families import FAMILIES, PRESETS
from apt_jax.models.loader import (
    LoadedModel,
    ResolvedModel,
    bundled_models,
    load_model,
    models_with_files,
    read_model_config,
    resolve_model,
)
from apt_jax.models.params import ModelParams
from apt_jax.models.reference import forward, reference_generate_greedy

__all__ = [
    "FAMILIES",
    "PRESETS",
    "LoadedModel",
    "ModelParams",
    "ResolvedModel",
    "bundled_models",
    "forward",
    "load_model",
    "models_with_files",
    "read_model_config",
    "reference_generate_greedy",
    "resolve_model",
]
