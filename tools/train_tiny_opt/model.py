"""OPT decoder in flax, written for training on CPU.

Pre-norm blocks with biases, learned positions and ReLU, tied input and output embeddings: the
architecture of transformers' ``OPTForCausalLM``, whose weight names ``export.py`` restores.

Two things make training fast on a CPU with bfloat16 matrix units:

* every matrix product takes bfloat16 inputs and accumulates in float32, forward and backward (the
  automatic gradient would multiply a float32 cotangent, which takes the slow path);
* attention runs over blocks of queries, each against the keys up to its own end only, with a
  hand-written gradient that reuses the stored probabilities: about 3 times faster, forward and
  backward, than a masked softmax over all keys at a length of 256.

Master weights, softmax, norms and the loss are float32.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

_POSITION_ROWS_SKIPPED = 2
"""OPT's position table has two unused rows in front: position p is row p + 2."""


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
    """Input type of matrix products; accumulation is float32."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"{self.hidden_size=} must be divisible by {self.num_heads=}")


def _dot(a: Array, b: Array, contract: tuple[int, int], batch: bool = False) -> Array:
    dims = (((contract[0],), (contract[1],)), (((0,), (0,)) if batch else ((), ())))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _transpose(x: Float[Array, "R I"]) -> Float[Array, "I R"]:
    """``x.T`` as its own operation.

    XLA on CPU folds a plain transpose into the product, and a product over the leading axis of
    both operands takes a path that is 4 to 6 times slower; it does not fold this spelling.
    """
    num_rows, width = x.shape
    if num_rows % 64:
        return x.T
    return x.reshape(-1, 64, width).transpose(2, 0, 1).reshape(width, num_rows)


def _dot_over_rows(x: Float[Array, "R I"], g: Float[Array, "R O"]) -> Float[Array, "I O"]:
    """``x.T @ g``, transposing the narrower operand where the sizes allow it."""
    if x.shape[1] > g.shape[1] and x.shape[0] % 64 == 0 and g.shape[1] % 64 == 0:
        # A plain `.T` of the product would be folded too, into an output layout for which XLA on
        # CPU has no bfloat16 kernel: it fails at run time.
        return _transpose(_dot(_transpose(g), x, (1, 0)))
    return _dot(_transpose(x), g, (1, 0))


@jax.custom_vjp
def _matmul(x: Float[Array, "R I"], w: Float[Array, "I O"]) -> Float[Array, "R O"]:
    return _dot(x, w, (1, 0))


def _matmul_fwd(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _matmul(x, w), (x, w)


def _matmul_bwd(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, w = saved
    grad = grad.astype(x.dtype)
    return _dot(grad, w, (1, 1)).astype(x.dtype), _dot_over_rows(x, grad).astype(w.dtype)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@jax.custom_vjp
def _project(x: Float[Array, "R D"], table: Float[Array, "V D"]) -> Float[Array, "R V"]:
    """``x @ table.T``: logits from the tied embedding table."""
    return _dot(x, table, (1, 1))


def _project_fwd(x: Array, table: Array) -> tuple[Array, tuple[Array, Array]]:
    return _project(x, table), (x, table)


def _project_bwd(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, table = saved
    grad = grad.astype(x.dtype)
    return _dot(grad, table, (1, 0)).astype(x.dtype), _dot_over_rows(grad, x).astype(table.dtype)


_project.defvjp(_project_fwd, _project_bwd)


def matmul(x: Float[Array, "... I"], w: Float[Array, "I O"], dtype: str) -> Float[Array, "... O"]:
    """``x @ w`` with inputs cast to ``dtype`` and float32 accumulation, also in the gradient."""
    rows = x.reshape(-1, x.shape[-1]).astype(dtype)
    return _matmul(rows, w.astype(dtype)).reshape(*x.shape[:-1], w.shape[-1])


def _query_blocks(length: int) -> int:
    """Number of query blocks: blocks of 64 up to a length of 512, then 8 blocks."""
    return max(1, min(length // 64, 8)) if length % 64 == 0 else 1


def _block_probs(q: Array, k: Array, start: int) -> Array:
    scores = _dot(q, k, (2, 2), batch=True)
    visible = (start + jnp.arange(q.shape[1]))[:, None] >= jnp.arange(k.shape[1])
    return jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)


@jax.custom_vjp
def causal_attention(
    q: Float[Array, "Z T H"], k: Float[Array, "Z T H"], v: Float[Array, "Z T H"]
) -> Float[Array, "Z T H"]:
    """``softmax(mask(q @ k.T)) @ v`` for each of the Z = B * N heads; ``q`` is already scaled."""
    return _attention_fwd(q, k, v)[0]


def _attention_fwd(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    size = q.shape[1] // _query_blocks(q.shape[1])
    outs, probs = [], []
    for start in range(0, q.shape[1], size):
        end = start + size
        p = _block_probs(q[:, start:end], k[:, :end], start).astype(q.dtype)
        probs.append(p)
        outs.append(_dot(p, v[:, :end], (2, 1), batch=True).astype(q.dtype))
    return jnp.concatenate(outs, axis=1), (q, k, v, tuple(probs))


def _attention_bwd(saved: Any, grad: Array) -> tuple[Array, Array, Array]:
    q, k, v, probs = saved
    grad = grad.astype(q.dtype)
    size = q.shape[1] // len(probs)
    dq = []
    dk = jnp.zeros(k.shape, jnp.float32)
    dv = jnp.zeros(v.shape, jnp.float32)
    for i, p in enumerate(probs):
        start, end = i * size, (i + 1) * size
        g = grad[:, start:end]
        dp = _dot(g, v[:, :end], (2, 2), batch=True)
        p32 = p.astype(jnp.float32)
        ds = (p32 * (dp - (dp * p32).sum(-1, keepdims=True))).astype(q.dtype)
        dq.append(_dot(ds, k[:, :end], (2, 1), batch=True).astype(q.dtype))
        dk = dk.at[:, :end].add(_dot(ds, q[:, start:end], (1, 1), batch=True))
        dv = dv.at[:, :end].add(_dot(p, g, (1, 1), batch=True))
    return jnp.concatenate(dq, axis=1), dk.astype(k.dtype), dv.astype(v.dtype)


causal_attention.defvjp(_attention_fwd, _attention_bwd)


class _Linear(nn.Module):
    features: int
    init_scale: float
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        init = nn.initializers.normal(self.init_scale)
        kernel = self.param("kernel", init, (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return matmul(x, kernel, self.dtype) + bias


class _Block(nn.Module):
    cfg: OptConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        cfg = self.cfg
        num_seqs, seq_len, width = x.shape
        head_dim = width // cfg.num_heads
        # Both branches of a block end in a product whose initial scale shrinks with depth.
        out_scale = 0.02 * (2 * cfg.num_layers) ** -0.5

        def heads(name: str, h: Array, scale: float = 1.0) -> Array:
            y = _Linear(width, 0.02, cfg.matmul_dtype, name=name)(h) * scale
            y = y.astype(cfg.matmul_dtype).reshape(num_seqs, seq_len, cfg.num_heads, head_dim)
            return y.transpose(0, 2, 1, 3).reshape(-1, seq_len, head_dim)

        h = nn.LayerNorm(epsilon=1e-5, name="self_attn_layer_norm", use_fast_variance=False)(x)
        out = causal_attention(heads("q_proj", h, head_dim**-0.5), heads("k_proj", h), heads("v_proj", h))
        out = out.reshape(num_seqs, cfg.num_heads, seq_len, head_dim).transpose(0, 2, 1, 3)
        out = out.reshape(num_seqs, seq_len, width)
        x = x + _Linear(width, out_scale, cfg.matmul_dtype, name="out_proj")(out)
        h = nn.LayerNorm(epsilon=1e-5, name="final_layer_norm", use_fast_variance=False)(x)
        h = nn.relu(_Linear(cfg.ffn_dim, 0.02, cfg.matmul_dtype, name="fc1")(h))
        return x + _Linear(width, out_scale, cfg.matmul_dtype, name="fc2")(h)


class OptModel(nn.Module):
    """Next-token logits of a batch of windows."""

    cfg: OptConfig

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"], offsets: Int[Array, " B"]) -> Float[Array, "B T V"]:
        """Args: token ids, and the position of each sequence's first token (0 in a prompt)."""
        cfg = self.cfg
        init = nn.initializers.normal(0.02)
        embed = self.param("embed_tokens", init, (cfg.vocab_size, cfg.hidden_size))
        num_positions = cfg.max_len + _POSITION_ROWS_SKIPPED
        positions = self.param("embed_positions", init, (num_positions, cfg.hidden_size))
        at = offsets[:, None] + jnp.arange(tokens.shape[1]) + _POSITION_ROWS_SKIPPED
        x = embed[tokens] + positions[at]
        for i in range(cfg.num_layers):
            x = _Block(cfg, name=f"layers_{i}")(x)
        x = nn.LayerNorm(epsilon=1e-5, name="final_layer_norm", use_fast_variance=False)(x)
        rows = x.reshape(-1, cfg.hidden_size).astype(cfg.matmul_dtype)
        logits = _project(rows, embed.astype(cfg.matmul_dtype))
        return logits.reshape(*tokens.shape, cfg.vocab_size)


def compute_logits(
    params: Any, cfg: OptConfig, tokens: Int[Array, "B T"], offsets: Int[Array, " B"]
) -> Float[Array, "B T V"]:
    """Applies ``OptModel`` to ``params``."""
    logits = OptModel(cfg).apply({"params": params}, tokens, offsets)
    assert isinstance(logits, jax.Array)
    return logits


def token_losses(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Negative log-likelihood of each target, in nats."""
    # A masked sum rather than a gather: the gradient of a gather is a scatter, slow on CPU.
    hit = jnp.arange(logits.shape[-1]) == targets[..., None]
    chosen = jnp.where(hit, logits, 0.0).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen
