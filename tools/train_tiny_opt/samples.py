"""Text samples from the model that trains: slow (no cache), enough for a model card."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from tools.train_tiny_opt.model import OptConfig, compute_logits
from tools.train_tiny_opt.tokenizer import EOS_ID

PROMPTS = (
    "It was a bright morning, and",
    "The old captain looked out over the sea and",
    "In the beginning",
)


def generate(
    params: Any,
    cfg: OptConfig,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Continues ``prompt`` until ``</s>`` or the limit; temperature 0 is greedy."""
    ids = tokenizer.encode(prompt).ids
    prompt_len = len(ids)
    total = min(cfg.max_len, prompt_len + max_new_tokens)
    row = np.zeros((1, min(cfg.max_len, -(-total // 64) * 64)), np.int32)
    row[0, :prompt_len] = ids

    @jax.jit
    def logits_at(params: Any, row: jax.Array, at: jax.Array) -> jax.Array:
        # Later positions hold padding; the causal mask hides it from position `at`.
        return compute_logits(params, cfg, row, jnp.zeros(1, jnp.int32))[0, at]

    rng = np.random.default_rng(seed)
    for position in range(prompt_len, total):
        logits = np.asarray(logits_at(params, row, position - 1), dtype=np.float64)
        if temperature == 0.0:
            token = int(logits.argmax())
        else:
            probs = np.exp((logits - logits.max()) / temperature)
            token = int(rng.choice(len(probs), p=probs / probs.sum()))
        if token == EOS_ID:
            total = position
            break
        row[0, position] = token
    return tokenizer.decode(row[0, prompt_len:total].tolist())
