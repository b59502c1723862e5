"""Conversion of a model's parameters to a flax NNX module and back, for serving a model that was trained in JAX.

`to_nnx` and `from_nnx` copy no array: values, dtypes and shardings are unchanged. Names are those of
`params.param_names`: ``module.layers[3].wq`` is the leaf ``layers.3.wq``, and a parameter that the model does not have
is not an attribute. Tied embeddings are one parameter.

flax is an optional dependency, imported when one of these functions is called.
"""

from typing import TYPE_CHECKING, Any

from apt_jax.lab.training.nnx_params import from_nnx, import_nnx
from apt_jax.models.check_params import check_params
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import ModelParams

if TYPE_CHECKING:
    from apt_jax.lab.training.nnx_decoder import Decoder


def to_nnx(params: ModelParams, config: ModelConfig, *, dtype: Any = None, remat: bool = False) -> "Decoder":
    """Return the NNX module of a loaded model.

    Args:
        params: parameters as `load_model` returns them: not quantized, and not from a running engine, which lays them
            out for its kernels. The module shares their arrays: a training step that donates them invalidates `params`.
        config: the model's shape.
        dtype: dtype to which the module's forward pass rounds parameters, and in which it multiplies; None: that of the
            parameters.
        remat: see `training_logits`.

    Returns:
        A module with an `nnx.Param` for each leaf, to be called with token ids; see `Decoder`.

    Raises:
        ConfigError: the parameters do not match the configuration, or flax is not installed.
    """
    import_nnx()
    from apt_jax.lab.training.nnx_decoder import Decoder

    check_params(params, config, "to_nnx")
    return Decoder(params, config, dtype=dtype, remat=remat)


__all__ = ["from_nnx", "to_nnx"]
