"""The forward pass for training against the plain one, and its gradients."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.lab.reference_model import forward
from apt_jax.lab.training import training_logits
from apt_jax.models import ModelConfig, ModelParams
from apt_jax.models.params import param_names
from tests.support.training_cases import CONFIGS, shallow, weights

FIRST = ("gemma2", "bloom, clipped")
"""Between them they have most of what a layer can have."""


def tokens_of(config: ModelConfig, num: int, length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).integers(3, config.vocab_size, (num, length)), jnp.int32)


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_scores_and_gradients_are_those_of_the_plain_forward_pass(name):
    """Over two blocks of queries, of which windows leave keys out."""
    config = shallow(CONFIGS[name])
    params, tokens = weights(config), tokens_of(config, 2, 70)
    weight = jnp.asarray(np.random.default_rng(4).standard_normal((2, 70, config.vocab_size)), jnp.float32)

    def plain(params: ModelParams) -> jax.Array:
        return jax.vmap(lambda row: forward(params, row, config))(tokens)

    def ours(params: ModelParams) -> jax.Array:
        return training_logits(params, tokens, config)

    def with_gradient(scores: Any) -> Any:
        def loss(params: ModelParams) -> tuple[jax.Array, jax.Array]:
            found = scores(params)
            return jnp.mean(jax.nn.log_softmax(found, axis=-1) * weight), found

        return jax.value_and_grad(loss, has_aux=True)

    run = jax.jit(lambda params: (with_gradient(ours)(params), with_gradient(plain)(params)))
    ((_, got), got_gradient), ((_, want), want_gradient) = run(params)
    assert float(jnp.abs(want).max()) > 1.0
    np.testing.assert_allclose(got, want, atol=1e-4)
    for leaf, a, b in zip(
        *(jax.tree.leaves(t) for t in (param_names(config), got_gradient, want_gradient)), strict=True
    ):
        size = float(jnp.abs(b).max())
        # Softmax does not see what is added to all its scores, as the keys' bias is where nothing is turned.
        cancels = leaf.endswith("bk") and config.rope is None and config.clip_qkv is None
        assert cancels or size > 0, leaf
        np.testing.assert_allclose(a, b, atol=1e-7 + 2e-4 * size, err_msg=leaf)


def test_layers_have_their_own_rotary_embedding_and_norms_of_queries_and_keys_their_offset():
    config = CONFIGS["gemma3"]
    params, (row,) = weights(config), tokens_of(config, 1, 24)
    want, got = jax.jit(lambda p: (forward(p, row, config), training_logits(p, row[None], config)[0]))(params)
    np.testing.assert_allclose(got, want, atol=1e-4)
    alike = dataclasses.replace(config, local_rope=None, local_layers=())
    assert not np.allclose(forward(params, row, alike), want, atol=1e-2)


def test_positions_and_dtype():
    config = shallow(CONFIGS["opt"])
    params, tokens = weights(config), tokens_of(config, 1, 8)
    scores = jax.jit(lambda params, at, dtype=None: training_logits(params, tokens, config, positions=at, dtype=dtype),
                     static_argnames="dtype")  # fmt: skip
    start, later = (jnp.arange(first, first + 8, dtype=jnp.int32)[None] for first in (0, 5))
    moved = dataclasses.replace(params, position=jnp.roll(params.position, -5, axis=0))
    np.testing.assert_allclose(scores(params, later), scores(moved, start), rtol=1e-5)
    assert not np.allclose(scores(params, later), scores(params, start), atol=1e-2)
    rounded = scores(params, start, dtype="bfloat16")
    served = scores(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), start)
    np.testing.assert_array_equal(rounded, served)
    assert rounded.dtype == jnp.float32


@pytest.mark.slow
def test_layers_that_are_computed_again_have_the_same_gradient():
    config = shallow(CONFIGS["llama"])
    params, tokens = weights(config), tokens_of(config, 1, 8)

    def gradient(remat: bool) -> Any:
        return jax.grad(lambda params: jnp.sum(training_logits(params, tokens, config, remat=remat) ** 2))(params)

    kept, again = jax.jit(lambda: (gradient(False), gradient(True)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), kept, again)


@pytest.mark.parametrize("tokens", [np.zeros(4, np.int32), np.zeros((1, 4), np.float32)])
def test_other_tokens_are_refused_with_what_they_are(tokens):
    with pytest.raises(ValueError, match=r"an integer array of shape \(sequences, tokens\), not "):
        # Without the checks of types, which only tests have.
        inspect.unwrap(training_logits)(weights(CONFIGS["opt"]), tokens, CONFIGS["opt"])
