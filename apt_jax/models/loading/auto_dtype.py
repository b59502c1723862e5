"""The data type that `--dtype auto` stands for."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from apt_jax.config import EngineConfig

_SIXTEEN_BITS = ("bfloat16", "float16")


def with_auto_dtype(config: EngineConfig, fields: Mapping[str, Any], platform: str | None = None) -> EngineConfig:
    """Return the configuration with a data type: float32 on CPUs, else the 16-bit type of the model's files, bfloat16
    where they have none. Another one than ``auto`` is left as it is.

    Args:
        config: of the engine.
        fields: contents of the model's config.json.
        platform: of the devices, as JAX calls it; None: JAX's default.
    """
    if config.dtype != "auto":
        return config
    import jax

    if (platform or jax.default_backend()) == "cpu":
        return dataclasses.replace(config, dtype="float32")
    stored = fields.get("dtype") or fields.get("torch_dtype")
    return dataclasses.replace(config, dtype=stored if stored in _SIXTEEN_BITS else "bfloat16")
