"""Model families: one adapter per family, which interprets its ``config.json`` and its tensor names."""

from apt_jax.models.families.registry import FAMILIES, MODEL_TYPES, PRESETS

__all__ = ["FAMILIES", "MODEL_TYPES", "PRESETS"]
