"""Checks of parameters given by callers: one leaf of the right shape for each parameter of the model, and no other
leaves."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from apt_jax.errors import ConfigError
from apt_jax.models.config import ModelConfig
from apt_jax.models.loading.checkpoint import format_names
from apt_jax.models.params import ModelParams, abstract_params, param_names


def check_params(params: ModelParams, config: ModelConfig, where: str) -> None:
    """Raise unless the tree has the structure and shapes that `load_model` returns for unquantized weights; a running
    engine's parameters have another layout.

    Args:
        where: start of the error message.

    Raises:
        ConfigError: one line that names the wrong leaves.
    """
    names = param_names(config)
    try:
        leaves = jax.tree.structure(names).flatten_up_to(params)
    except (ValueError, TypeError):
        raise ConfigError(
            f"{where}: not the parameters of a model of the family {config.family} with {config.num_layers} layers, as load_model "
            "and from_nnx return them (those of a running engine have another layout; convert an NNX module with from_nnx)"
        ) from None
    check_leaves(dict(zip(jax.tree.leaves(names), leaves, strict=True)), config, where)


def check_leaves(leaves: Mapping[str, Any], config: ModelConfig, where: str) -> None:
    """Like `check_params`, for a mapping from leaf names (`params.param_names`) to arrays."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract_params(config, jnp.float32))]
    wanted = dict(zip(jax.tree.leaves(param_names(config)), shapes, strict=True))
    found: dict[str, list[str]] = {
        "missing": [name for name in wanted if name not in leaves],
        "unexpected": [name for name in leaves if name not in wanted],
        "misshapen": [],
        "not floating-point": [],
    }
    for name in wanted.keys() & leaves.keys():
        value = leaves[name]
        if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.floating):
            found["not floating-point"].append(f"{name} is {getattr(value, 'dtype', type(value).__name__)}")
        elif tuple(value.shape) != wanted[name]:
            found["misshapen"].append(f"{name} has {list(value.shape)}, not {list(wanted[name])}")
    problems = [f"{len(some)} {kind} ({format_names(sorted(some))})" for kind, some in found.items() if some]
    if problems:
        raise ConfigError(f"{where}: parameters do not match the {config.family} model: {'; '.join(problems)}")


__all__ = ["check_leaves", "check_params"]
