"""The data type that `--dtype` asks for."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from apt_jax.config import EngineConfig

_SIXTEEN_BITS = ("bfloat16", "float16")
_ALIASES = {"half": "float16", "float": "float32"}


def with_auto_dtype(config: EngineConfig, fields: Mapping[str, Any], platform: str | None = None) -> EngineConfig:
    """Return the configuration with the name of a data type in `dtype`. ``auto`` becomes float32 on CPUs, bfloat16 on
    TPUs, and elsewhere the 16-bit type of the model's files, or bfloat16 if they are not 16-bit.

    Args:
        config: configuration of the engine.
        fields: contents of the model's config.json.
        platform: JAX's name of the devices' platform; None: JAX's default.
    """
    if config.dtype != "auto":
        return dataclasses.replace(config, dtype=_ALIASES.get(config.dtype, config.dtype))
    import jax

    platform = platform or jax.default_backend()
    if platform == "cpu":
        return dataclasses.replace(config, dtype="float32")
    stored = fields.get("dtype") or fields.get("torch_dtype")
    has_16_bits = stored in _SIXTEEN_BITS and platform != "tpu"
    return dataclasses.replace(config, dtype=stored if has_16_bits else "bfloat16")
