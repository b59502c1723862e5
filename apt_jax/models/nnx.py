"""The parameters of a model as a flax NNX module, and back: JAX training code serves what it trains.

`to_nnx` and `from_nnx` move no array: values, dtypes and shardings are those that came in. Names are those of
`params.param_names`: ``module.layers[3].wq`` is the leaf ``layers.3.wq``, and what a model does not have is no attribute.
Tied embeddings are one parameter.

flax is an optional dependency, imported when one of these functions is called.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from apt_jax.errors import ConfigError
from apt_jax.models.check_params import check_leaves, check_params
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import ModelParams, param_names

if TYPE_CHECKING:
    from apt_jax.models.nnx_decoder import Decoder


def to_nnx(params: ModelParams, config: ModelConfig, *, dtype: Any = None, remat: bool = False) -> "Decoder":
    """The NNX module of a loaded model.

    Args:
        params: as `load_model` returns them: not quantized, and not those of a running engine, which lays them out for
            its kernels. The module shares their arrays: a training step that donates them takes them away from `params`.
        config: the model's shape.
        dtype: that the module's forward pass rounds parameters to, and multiplies in; None: theirs.
        remat: see `training_logits`.

    Returns:
        A module with an `nnx.Param` for each leaf, called with token ids; see `Decoder`.

    Raises:
        ConfigError: the parameters are others than the configuration says, or flax is not installed.
    """
    _import_nnx()
    from apt_jax.models.nnx_decoder import Decoder

    check_params(params, config, "to_nnx")
    return Decoder(params, config, dtype=dtype, remat=remat)


def from_nnx(state_or_module: Any, config: ModelConfig) -> ModelParams:
    """The parameters that a module of `to_nnx` holds, as `LLM(..., params=...)` takes them.

    Args:
        state_or_module: the module, its `nnx.state`, or that as nested dictionaries of arrays, as
            `nnx.to_pure_dict` makes them and checkpoints restore them (numbers of layers may be strings).
        config: the model's shape.

    Raises:
        ConfigError: parameters are missing, of other shapes, quantized, or unknown (those of adapters in the module,
            for example); or flax is not installed.
    """
    nnx = _import_nnx()
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


def _import_nnx() -> Any:
    try:
        from flax import nnx
    except ImportError:
        raise ConfigError("NNX modules need flax: pip install 'apt-jax[train]'") from None
    return nnx


__all__ = ["from_nnx", "to_nnx"]
