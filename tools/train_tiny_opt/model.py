"""The model that is trained: OPT, as the flax NNX module that `apt_jax.lab.training.to_nnx` makes.

Pre-norm blocks with biases, learned positions and ReLU, tied input and output embeddings: the architecture of
transformers' ``OPTForCausalLM``. Parameters are the module's state, float32; products are of bfloat16, which matrix units
of CPUs take, and accumulate in float32.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from apt_jax.lab.training import from_nnx, to_nnx
from apt_jax.models import ModelConfig, ModelParams
from apt_jax.models.families import opt
from apt_jax.models.params import abstract_params, is_matrix, is_norm_scale, param_names
from tools.train_tiny_opt import tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptConfig:
    """Shape of the model."""

    vocab_size: int = 4096
    """Rows of the embedding table."""
    hidden_size: int = 256
    """Model width D."""
    num_layers: int = 8
    """Decoder blocks L."""
    num_heads: int = 8
    """Attention heads N."""
    ffn_dim: int = 1024
    """Feed-forward width F."""
    max_len: int = 2048
    """Learned positions."""
    matmul_dtype: str = "bfloat16"
    """Dtype that parameters are rounded to in the forward pass; sums are float32."""

    @property
    def fields(self) -> dict[str, Any]:
        """Its ``config.json``."""
        return {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "word_embed_proj_dim": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "ffn_dim": self.ffn_dim,
            "max_position_embeddings": self.max_len,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
            "tie_word_embeddings": True,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "layerdrop": 0.0,
            "init_std": 0.02,
            "use_cache": True,
            "torch_dtype": "float16",
            "bos_token_id": tokenizer.EOS_ID,
            "eos_token_id": tokenizer.EOS_ID,
            "pad_token_id": tokenizer.PAD_ID,
        }

    @functools.cached_property
    def shape(self) -> ModelConfig:
        """The shape as the engine knows it."""
        return opt.model_config(self.fields)


def init_params(cfg: OptConfig, seed: int) -> nnx.State:
    """Fresh parameters: matrices normal with a deviation of 0.02, biases zero."""
    rng = np.random.default_rng(seed)

    def leaf(name: str, shape: tuple[int, ...]) -> jax.Array:
        if is_norm_scale(name):
            return jnp.ones(shape, jnp.float32)
        if not is_matrix(name) and name != "position":
            return jnp.zeros(shape, jnp.float32)
        # Both branches of a block end in a product whose initial scale shrinks with depth.
        ends_branch = name.endswith((".wo", ".w_down"))
        scale = 0.02 * (2 * cfg.num_layers) ** -0.5 if ends_branch else 0.02
        return jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(scale))

    shapes = abstract_params(cfg.shape, jnp.float32)
    return to_state(jax.tree.map(lambda name, like: leaf(name, like.shape), param_names(cfg.shape), shapes), cfg)


def to_state(params: ModelParams, cfg: OptConfig) -> nnx.State:
    """The state of the module with these parameters."""
    return nnx.state(to_nnx(params, cfg.shape))


def to_params(state: nnx.State, cfg: OptConfig) -> ModelParams:
    """The parameters in a state."""
    return from_nnx(state, cfg.shape)


@functools.cache
def _graph(cfg: OptConfig) -> Any:
    return nnx.graphdef(to_nnx(abstract_params(cfg.shape, jnp.float32), cfg.shape, dtype=cfg.matmul_dtype))


def compute_logits(
    state: nnx.State, cfg: OptConfig, tokens: Int[Array, "B T"], offsets: Int[Array, " B"]
) -> Float[Array, "B T V"]:
    """Next-token logits of a batch of windows.

    Args:
        tokens: ids.
        offsets: the position of each window's first token (0 in a prompt).
    """
    positions = offsets[:, None] + jnp.arange(tokens.shape[1])
    return nnx.merge(_graph(cfg), state)(tokens, positions)


def is_decayed(state: nnx.State) -> Any:
    """Which leaves are matrices and tables; the others are biases and norms, those of heads with two axes among them."""

    def decayed(path: tuple[Any, ...], leaf: Any) -> bool:
        name = {getattr(key, "key", None) for key in path}
        return leaf.ndim > 1 and not name & {"bq", "bk", "bv"}

    return jax.tree.map_with_path(decayed, state)


def token_losses(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Negative log-likelihood of each target, in nats."""
    # A masked sum rather than a gather: the gradient of a gather is a scatter, slow on CPU.
    hit = jnp.arange(logits.shape[-1]) == targets[..., None]
    chosen = jnp.where(hit, logits, 0.0).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen
