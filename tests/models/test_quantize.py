"""int8 weights: rounding, every place that uses them, and the engine over both kinds of cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax import LLM, SamplingParams
from apt_jax.config import CacheMode, EngineConfig
from apt_jax.errors import ConfigError
from apt_jax.lab import reference_model
from apt_jax.models import load_model
from apt_jax.models.quantize import dequantize, quantize_params
from apt_jax.models.weight_layout import fuse_products
from apt_jax.ops.weights import QuantizedMatrix
from tests.support.paged_driver import few_programs
from tests.support.small_models import write_shallow_model


@pytest.fixture(scope="module", params=["shallow", pytest.param("bundled", marks=pytest.mark.slow)])
def model(request, tmp_path_factory) -> str:
    shallow = request.param == "shallow"
    return str(write_shallow_model(tmp_path_factory.mktemp("model") / "tiny-opt")) if shallow else "tiny-opt"


@functools.cache
def _params(model: str):
    loaded = load_model(EngineConfig(model=model))
    return loaded.params, loaded.config


def _dequantized(params, quantized):
    """The parameters in the places and shapes of `params`, with what the integers of `quantized` stand for."""
    return jax.tree.map(
        lambda q, p: dequantize(q, p.dtype).reshape(p.shape) if isinstance(q, QuantizedMatrix) else q,
        quantized,
        params,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix),
    )  # fmt: skip


def test_integers_are_within_half_a_step_and_use_the_range(model: str) -> None:
    params, _ = _params(model)
    q = quantize_params(params, keep=False).layers[0].w_up
    w = np.asarray(params.layers[0].w_up, np.float64)
    assert q.values.dtype == jnp.int8
    assert (np.abs(np.asarray(q.values, np.int32)).max(axis=1) >= 127).all()
    error = np.abs(np.asarray(dequantize(q, jnp.float32), np.float64) - w)
    assert (error <= np.asarray(q.scale)[:, None] * 0.5001).all()


def test_every_matrix_is_quantised_and_nothing_else(model: str) -> None:
    params, _ = _params(model)
    for tree in (params, fuse_products(params, keep=False)):
        quantized = quantize_params(tree, keep=False)
        for name, leaf in vars(quantized.layers[0]).items():
            if leaf is not None:
                assert isinstance(leaf, QuantizedMatrix) == name.startswith("w"), name
        assert isinstance(quantized.embed, QuantizedMatrix)
        assert quantized.position is params.position
        assert quantized.dtype == params.dtype


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("cache", ["kv", "hidden"])
def test_engine_equals_a_plain_pass_over_the_rounded_weights(model: str, cache: CacheMode) -> None:
    params, config = _params(model)
    rounded = _dequantized(params, quantize_params(params, keep=False))
    forward = jax.jit(lambda tokens: reference_model.forward(rounded, tokens, config))
    llm = LLM(
        model, quantization="int8", cache=cache, max_model_len=64, max_num_seqs=4,
        max_num_batched_tokens=64, num_blocks_override=64, warm_up=False,
    )  # fmt: skip
    few_programs(llm.parts.executor)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 1000, n).tolist() for n in (3, 17, 30)]
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, greedy)
    for prompt, output in zip(prompts, outputs, strict=True):
        said = output.outputs[0].token_ids
        tokens = np.zeros(40, np.int32)  # padded at the end, where causal attention does not look
        tokens[: len(prompt) + len(said)] = [*prompt, *said]
        scores = np.asarray(forward(tokens))[len(prompt) - 1 :]
        for expected, row in zip(said, scores, strict=False):
            best = row.max()
            assert row[expected] >= best - 1e-3 * abs(best)


def test_a_quantization_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization='int4' must be int8 or gguf"):
        EngineConfig(model="tiny-opt", quantization="int4")  # type: ignore[arg-type]


def test_both_kinds_see_the_same_weights(model: str) -> None:
    params, _ = _params(model)
    kept = quantize_params(fuse_products(params, keep=True), keep=True)
    layer = kept.layers[0]
    assert isinstance(layer.wqkv, QuantizedMatrix)
    q_rows = layer.wq.shape[0]
    k = np.asarray(layer.wk).reshape(-1, layer.wk.shape[-1])
    both = np.asarray(dequantize(layer.wqkv, jnp.float32))
    np.testing.assert_array_equal(k, both[q_rows : q_rows + len(k)])
