"""Training: the parameters of a model as flax NNX modules, and the forward pass of whole sequences, with gradients."""

from apt_jax.lab.training.forward import training_logits
from apt_jax.lab.training.nnx import from_nnx, to_nnx

__all__ = ["from_nnx", "to_nnx", "training_logits"]
