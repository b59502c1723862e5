"""Models: the functional decoder, its parameters, and the code that loads them from checkpoints.

Names are imported on first use, so importing `apt_jax.models.config` does not import JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apt_jax.models.config import ModelConfig
    from apt_jax.models.families.registry import FAMILIES, PRESETS
    from apt_jax.models.loading.loader import LoadedModel, load_model
    from apt_jax.models.loading.resolve import (
        ResolvedModel,
        bundled_models,
        models_with_files,
        read_model_config,
        resolve_model,
    )
    from apt_jax.models.params import ModelParams

__all__ = [
    "FAMILIES",
    "PRESETS",
    "LoadedModel",
    "ModelConfig",
    "ModelParams",
    "ResolvedModel",
    "bundled_models",
    "load_model",
    "models_with_files",
    "read_model_config",
    "resolve_model",
]

_HOMES = {
    **dict.fromkeys(("FAMILIES", "PRESETS"), "families.registry"),
    **dict.fromkeys(("LoadedModel", "load_model"), "loading.loader"),
    **dict.fromkeys(
        ("ResolvedModel", "bundled_models", "models_with_files", "read_model_config", "resolve_model"),
        "loading.resolve",
    ),
    "ModelConfig": "config",
    "ModelParams": "params",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"apt_jax.models.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'apt_jax.models' has no attribute {name!r}")
