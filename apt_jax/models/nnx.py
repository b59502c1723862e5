"""The parameters of a model as a flax NNX module, and back: JAX training code serves what it trains.

`to_nnx` and `from_nnx` move no array: values, dtypes and shardings are those that came in. Names are those of
`params.param_names`: ``module.layers[3].wq`` is the leaf ``layers.3.wq``, and what a model does not have is no attribute.
Tied embeddings are one parameter.

flax is an optional dependency, imported when one of these functions is called.
"""

from typing import TYPE_CHECKING, Any

from apt_jax.models.check_params import check_params
from apt_jax.models.config import ModelConfig
from apt_jax.models.nnx_params import from_nnx, import_nnx
from apt_jax.models.params import ModelParams

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
    import_nnx()
    from apt_jax.models.nnx_decoder import Decoder

    check_params(params, config, "to_nnx")
    return Decoder(params, config, dtype=dtype, remat=remat)


__all__ = ["from_nnx", "to_nnx"]
