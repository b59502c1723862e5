"""Models: one functional decoder, its parameters, and the adapters and loaders that fill them from checkpoints."""

import importlib

_HOMES = {
    **dict.fromkeys(("FAMILIES", "PRESETS"), "apt_jax.models.families"),
    **dict.fromkeys(("LoadedModel", "load_model"), "apt_jax.models.loading.loader"),
    **dict.fromkeys(
        ("ResolvedModel", "bundled_models", "models_with_files", "read_model_config", "resolve_model"),
        "apt_jax.models.loading.resolve",
    ),
    "ModelConfig": "apt_jax.models.config",
    "ModelParams": "apt_jax.models.params",
    **dict.fromkeys(("forward", "reference_generate_greedy"), "apt_jax.models.reference"),
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import on first use: `apt_jax.models.config` needs no JAX."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'apt_jax.models' has no attribute {name!r}")
