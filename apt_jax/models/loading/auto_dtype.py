"""Choice of the data type for `--dtype auto`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from apt_jax.config import EngineConfig

_SIXTEEN_BITS = ("bfloat16", "float16")


def with_auto_dtype(config: EngineConfig, fields: Mapping[str, Any], platform: str | None = None) -> EngineConfig:
    """Return the configuration with ``auto`` replaced by a data type: float32 on CPUs, otherwise the 16-bit type of the
    model's files, or bfloat16 if they are not 16-bit. Any other data type stays unchanged.

    Args:
        config: configuration of the engine.
        fields: contents of the model's config.json.
        platform: JAX's name of the devices' platform; None: JAX's default.
    """
    if config.dtype != "auto":
        return config
    import jax

    if (platform or jax.default_backend()) == "cpu":
        return dataclasses.replace(config, dtype="float32")
    stored = fields.get("dtype") or fields.get("torch_dtype")
    return dataclasses.replace(config, dtype=stored if stored in _SIXTEEN_BITS else "bfloat16")
