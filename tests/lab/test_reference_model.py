import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.lab.reference_model import forward as eager_forward
from apt_jax.lab.reference_model import reference_generate_greedy
from apt_jax.models.families import opt
from apt_jax.models.params import dummy_params
from tests.support.opt_checkpoint import TINY

# One program for each layout: all sequences have as many tokens as those that `reference_generate_greedy` compiles for.
forward = jax.jit(eager_forward, static_argnums=2)

_LAYOUTS = {
    "pre-norm": TINY,
    "post-norm": TINY | {"do_layer_norm_before": False, "word_embed_proj_dim": 8},
    "untied": TINY | {"tie_word_embeddings": False, "enable_bias": False},
}


@pytest.fixture(params=_LAYOUTS)
def model(request):
    config = opt.model_config(_LAYOUTS[request.param])
    return dummy_params(config, np.float32, 0), config


def test_scores_have_a_row_a_position_and_a_column_a_token(model):
    params, config = model
    scores = forward(params, jnp.arange(9, dtype=jnp.int32), config)
    assert scores.shape == (9, config.vocab_size)
    assert scores.dtype == jnp.float32


def test_later_tokens_do_not_act_on_earlier_scores(model):
    params, config = model
    one = forward(params, jnp.array([3, 4, 5, 6, 5, 6, 5, 6, 5], jnp.int32), config)
    two = forward(params, jnp.array([3, 4, 7, 8, 7, 8, 7, 8, 7], jnp.int32), config)
    np.testing.assert_array_equal(one[:2], two[:2])
    assert not np.allclose(one[2:], two[2:])


def test_a_zero_model_is_undecided():
    config = opt.model_config(TINY)
    zeros = jax.tree.map(jnp.zeros_like, dummy_params(config, np.float32, 0))
    scores = forward(zeros, jnp.full(9, 3, jnp.int32), config)
    np.testing.assert_array_equal(scores, np.zeros((9, 48)))
    assert reference_generate_greedy(zeros, [3], 8, config) == [0] * 8


def test_greedy_output_is_the_best_token_at_every_position(model):
    params, config = model
    prompt = [5, 9, 2]
    output = reference_generate_greedy(params, prompt, 6, config)
    scores = forward(params, jnp.asarray(prompt + output, jnp.int32), config)
    assert np.argmax(scores, -1)[2:-1].tolist() == output


def test_greedy_output_ends_with_the_end_token(model):
    params, config = model
    whole = reference_generate_greedy(params, [5, 9, 2], 6, config)
    end = reference_generate_greedy(params, [5, 9, 2], 6, config, eos_token_id=whole[2])
    assert end == whole[: whole.index(whole[2]) + 1]


def test_greedy_output_stays_within_the_position_table():
    config = opt.model_config(TINY)
    params = dummy_params(config, np.float32, 0)
    with pytest.raises(ValueError, match="max_position=32"):
        reference_generate_greedy(params, [1] * 30, 3, config)
    with pytest.raises(ValueError, match="at least one"):
        reference_generate_greedy(params, [], 3, config)
