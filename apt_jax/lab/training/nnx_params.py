"""Conversion of an NNX module's parameters to `ModelParams`; flax is imported on use."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from apt_jax.errors import ConfigError
from apt_jax.models.check_params import check_leaves
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import ModelParams, param_names


def from_nnx(state_or_module: Any, config: ModelConfig) -> ModelParams:
    """Return the parameters of a module from `to_nnx`, for `LLM(..., params=...)`.

    Args:
        state_or_module: the module, its `nnx.state`, or that state as nested dictionaries of arrays, as
            `nnx.to_pure_dict` returns and checkpoints restore them (layer numbers may be strings).
        config: the model's shape.

    Raises:
        ConfigError: parameters are missing, have wrong shapes, are quantized or are unknown (for example adapters in
            the module); or flax is not installed.
    """
    nnx = import_nnx()
    state = nnx.state(state_or_module) if isinstance(state_or_module, nnx.Module) else state_or_module
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"from_nnx: {type(state).__name__} is not an NNX module, its state, or a dictionary of arrays"
        )

    def leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, Mapping):
            for key, value in node.items():
                yield from leaves(value, f"{path}.{key}" if path else str(key))
        elif isinstance(node, nnx.Variable):
            yield path, node.get_value()
        elif node is not None:
            yield path, node

    found = dict(leaves(state, ""))
    check_leaves(found, config, "from_nnx")
    return jax.tree.map(lambda name: found[name], param_names(config))


def import_nnx() -> Any:
    """Import and return `flax.nnx`.

    Raises:
        ConfigError: flax is not installed.
    """
    try:
        from flax import nnx
    except ImportError:
        raise ConfigError("NNX modules need flax: pip install 'apt-jax[train]'") from None
    return nnx
