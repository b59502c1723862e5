"""NNX module that `apt_jax.lab.training.to_nnx` builds; importing it requires flax."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int32

from apt_jax.lab.training.forward import training_logits
from apt_jax.lab.training.nnx_params import from_nnx
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import LatentParams, ModelParams
from apt_jax.ops.weights import ExpertNorms, Experts, NormParams


class _Part(nnx.Module):
    """A module whose attributes are the fields of a dataclass of parameters, without None fields.

    Args:
        params: the dataclass; each of its arrays becomes an `nnx.Param`, each dataclass in it a part.
    """

    def __init__(self, params: Any) -> None:
        for field in dataclasses.fields(params):
            value = getattr(params, field.name)
            if isinstance(value, NormParams | Experts | LatentParams):
                setattr(self, field.name, _PARTS[type(value)](value))
            elif isinstance(value, ExpertNorms):  # named as in `param_names`
                for norm in dataclasses.fields(value):
                    setattr(self, f"{norm.name}_norm", Norm(getattr(value, norm.name)))
            elif value is not None and not isinstance(value, tuple):
                setattr(self, field.name, nnx.Param(value))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Norm(_Part):
    """The scale of a norm, and its bias if it has one."""


class Mixture(_Part):
    """The parameters of a mixture of experts, under the names of `Experts`."""


class Latent(_Part):
    """The projections of latent attention, under the names of `LatentParams`."""


_PARTS = {NormParams: Norm, Experts: Mixture, LatentParams: Latent}


class Layer(_Part):
    """The parameters of one layer, under the names of `LayerParams`."""


class Decoder(_Part):
    """A model of any family: its parameters, under the names of `ModelParams`, and its forward pass for training.

    Calling it returns `training_logits`: the next-token logits, rounded as in the engine.

    Args:
        params, config, dtype, remat: see `to_nnx`.
    """

    def __init__(self, params: ModelParams, config: ModelConfig, *, dtype: Any = None, remat: bool = False) -> None:
        super().__init__(params)
        self.layers = nnx.List([Layer(layer) for layer in params.layers])
        self.config = config
        self.dtype = dtype
        self.remat = remat

    def __call__(
        self, tokens: Int32[Array | np.ndarray, "B T"], positions: Int32[Array | np.ndarray, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Return the scores of the next token after each position.

        Args:
            tokens, positions: see `training_logits`.
        """
        params = from_nnx(self, self.config)
        return training_logits(params, tokens, self.config, positions=positions, dtype=self.dtype, remat=self.remat)


__all__ = ["Decoder", "Latent", "Layer", "Mixture", "Norm"]
