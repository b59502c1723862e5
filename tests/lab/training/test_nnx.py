"""Parameters as NNX modules and back, and serving what was trained."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

pytest.importorskip("flax", reason="needs the extra `train`")
pytest.importorskip("optax", reason="needs the extra `train`")

import optax
from flax import nnx

from apt_jax import LLM, SamplingParams
from apt_jax.config import EngineConfig
from apt_jax.errors import ConfigError
from apt_jax.lab.training import from_nnx, to_nnx
from apt_jax.models import FAMILIES, PRESETS, load_model, read_model_config
from apt_jax.models.config import ModelConfig
from apt_jax.models.params import ModelParams, abstract_params, dummy_params, param_names
from apt_jax.models.quantize import quantize_params
from apt_jax.models.weight_layout import fuse_products
from tests.support.caches import calibrations_apart
from tests.support.paged_driver import few_programs
from tests.support.small_models import write_byte_model, write_shallow_model
from tests.support.training_cases import CONFIGS, weights


@pytest.fixture(scope="module", autouse=True)
def _promotion() -> Iterator[None]:
    """optax mixes scalars, which the suite's strict settings refuse."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


# --- there and back


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("family", sorted({family.name for family in FAMILIES.values() if family.presets}))
def test_every_family_comes_back_as_the_arrays_that_went_in(family):
    configs = [config for config in (read_model_config(f)[1] for f in PRESETS.values()) if config.family == family]
    config = min(configs, key=lambda c: c.num_layers)
    params = abstract_params(config, jnp.bfloat16)
    module = to_nnx(params, config)
    for back in (from_nnx(module, config), from_nnx(nnx.state(module), config)):
        assert jax.tree.structure(back) == jax.tree.structure(params)
        assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_values_dtypes_and_names_stay(name):
    config = CONFIGS[name]
    params = weights(config, "bfloat16")
    norm = params.layers[0].attn_norm or params.layers[0].attn_out_norm
    assert norm is not None
    mixed = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.shape == norm.scale.shape else leaf, params)
    module = to_nnx(mixed, config)
    back = from_nnx(jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(module))), config)
    assert jax.tree.structure(back) == jax.tree.structure(mixed)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(mixed), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module))}
    assert names == set(jax.tree.leaves(param_names(config)))
    assert ("head" in names) == (not config.tie_embeddings)
    assert module.layers[1].wq.get_value() is mixed.layers[1].wq


def test_shardings_stay():
    config = CONFIGS["llama"]
    where = NamedSharding(jax.make_mesh((1,), ("tensor",)), PartitionSpec("tensor"))
    params = jax.tree.map(lambda leaf: jax.device_put(leaf, where), weights(config))
    for leaf in jax.tree.leaves(from_nnx(to_nnx(params, config), config)):
        assert leaf.sharding == where


def test_a_checkpoint_comes_back(tmp_path):
    """Orbax restores numbers of layers as strings."""
    ocp = pytest.importorskip("orbax.checkpoint")
    config = CONFIGS["opt"]
    params = weights(config, "bfloat16")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", nnx.to_pure_dict(nnx.state(to_nnx(params, config))))
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "1")
    assert set(state["layers"]) == {"0", "1"}
    for a, b in zip(*map(jax.tree.leaves, (from_nnx(state, config), params)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


def test_what_does_not_fit_is_named():
    config = CONFIGS["llama"]
    params = weights(config)
    with pytest.raises(ConfigError, match="to_nnx: not the parameters of a model of the family test with 2 layers"):
        to_nnx(params, dataclasses.replace(config, tie_embeddings=True))
    with pytest.raises(ConfigError, match="layout"):
        to_nnx(fuse_products(params, keep=False), config)
    with pytest.raises(ConfigError, match=r"misshapen \(layers.0.w_down has \[64, 96\], not \[64, 32\]"):
        to_nnx(params, dataclasses.replace(config, ffn_size=32))
    module = to_nnx(params, config)
    del module.layers[1].wq
    layer: Any = module.layers[0]
    layer.lora_a = nnx.LoRAParam(jnp.zeros((64, 2)))
    with pytest.raises(ConfigError, match=r"1 missing \(layers.1.wq\); 1 unexpected \(layers.0.lora_a\)"):
        from_nnx(module, config)
    with pytest.raises(ConfigError, match="from_nnx: ModelParams is not an NNX module"):
        from_nnx(params, config)


def test_quantized_weights_are_refused():
    pytest.importorskip("qwix")
    config = CONFIGS["llama"]
    with pytest.raises(ConfigError, match=r"not floating-point \(embed is QuantizedMatrix"):
        to_nnx(quantize_params(weights(config), keep=False), config)


def test_without_flax_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    for convert in (to_nnx, from_nnx):
        with pytest.raises(ConfigError, match=r"need flax: pip install 'apt-jax\[train\]'"):
            convert(weights(CONFIGS["opt"]), CONFIGS["opt"])


# --- serving


_FIELDS: dict[str, Any] = {
    "vocab_size": 280, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "eos_token_id": 2,
}  # fmt: skip
SERVED: dict[str, dict[str, Any]] = {
    "OPTForCausalLM": {},
    "LlamaForCausalLM": _FIELDS,
    "Gemma2ForCausalLM": _FIELDS | {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 10, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "Qwen3ForCausalLM": _FIELDS | {"head_dim": 16},
}  # fmt: skip


def write(path: Path, architecture: str) -> ModelConfig:
    """Write a byte model without weights, of one layer; returns its shape."""
    write_byte_model(path, **SERVED[architecture])
    written = json.loads((path / "config.json").read_text()) | {"architectures": [architecture]}
    (path / "config.json").write_text(json.dumps(written))
    return read_model_config(written)[1]


def serve(path: Path, params: ModelParams, **options: Any) -> LLM:
    llm = LLM(
        str(path), params=params, load_format="dummy", max_num_seqs=4, max_num_batched_tokens=64, num_blocks_override=40,
        warm_up=False, use_tqdm=False, **options,
    )  # fmt: skip
    few_programs(llm.parts.executor)
    return llm


PROMPTS = [[5, 9, 70, 33, 12, 6, 44, 80, 91, 17, 23, 64], [101, 7]]


@pytest.fixture(autouse=True)
def _caches(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("APT_JAX_CACHE_DIR", calibrations_apart(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("apt_jax.frontend.builder.use_compile_cache", lambda: False)


@pytest.mark.in_turn(1, group="NNX and training")
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=pytest.mark.slow) if name.startswith("Llama") else name for name in SERVED],
)
def test_the_engine_has_the_scores_of_the_module(architecture, tmp_path):
    config = write(tmp_path, architecture)
    module = to_nnx(weights(config), config)
    llm = serve(tmp_path, from_nnx(module, config))
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=20)
    tokens = np.zeros((2, 32), np.int32)
    outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
    for row, output in zip(tokens, outputs, strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        row[: len(ids)] = ids
    wanted = jax.nn.log_softmax(nnx.jit(lambda module, tokens: module(tokens))(module, tokens), axis=-1)
    spread = 0.0
    for row, scores, output in zip(tokens, np.asarray(wanted), outputs, strict=True):
        assert output.prompt_logprobs is not None
        for at, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            ids = list(entry)
            assert row[at + 1] in ids
            np.testing.assert_allclose([entry[i].logprob for i in ids], scores[at][ids], atol=2e-4)
            spread = max(spread, float(np.ptp(scores[at])))
        first = len(output.prompt_token_ids) - 1
        assert output.outputs[0].token_ids == scores[first : first + 8].argmax(axis=1).tolist()
    assert spread > 1.0


@pytest.mark.in_turn(1, group="NNX and training")
def test_what_was_trained_is_served(tmp_path):
    config = write(tmp_path, "OPTForCausalLM")
    before = dummy_params(config, "float32", 0)
    module = to_nnx(before, config)
    lines = np.resize(np.arange(10, 17), (4, 41)) + np.arange(4)[:, None] * 7  # four circles of seven tokens
    windows = jnp.asarray(lines, jnp.int32)

    def loss_of(module: Any) -> jax.Array:
        scores = module(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(scores, windows[:, 1:]).mean()

    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(module: Any, optimizer: Any) -> jax.Array:
        loss, gradient = nnx.value_and_grad(loss_of)(module)
        optimizer.update(module, gradient)
        return loss

    losses = [float(step(module, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.1 < 2.0 < losses[0]
    after = from_nnx(module, config)
    for name, a, b in zip(*map(jax.tree.leaves, (param_names(config), before, after)), strict=True):
        assert np.isfinite(b).all(), name
        assert not np.array_equal(a, b), name
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    outputs = serve(tmp_path, after).generate(windows[:, :9].tolist(), greedy, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == lines[:, 9:21].tolist()
    outputs = serve(tmp_path, before).generate(windows[:, :9].tolist(), greedy, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] != lines[:, 9:21].tolist()


def test_weights_are_cast_and_shared(tmp_path):
    params = jax.tree.map(np.asarray, weights(write(tmp_path, "OPTForCausalLM"), "float16"))
    config = EngineConfig(model=str(tmp_path), load_format="dummy")
    loaded = load_model(config, params=params)
    assert (loaded.weights, loaded.params.dtype) == ("F32", jnp.float32)
    again = load_model(config, params=loaded.params)
    assert again.params.embed.unsafe_buffer_pointer() == loaded.params.embed.unsafe_buffer_pointer()
    half = load_model(dataclasses.replace(config, dtype="bfloat16"), params=params)
    assert (half.weights, half.params.dtype) == ("BF16", jnp.bfloat16)
    same = load_model(dataclasses.replace(config, dtype="float16"), params=params)
    np.testing.assert_array_equal(same.params.embed, params.embed)


def test_weights_that_cannot_be_served_are_refused(tmp_path):
    config = write(tmp_path, "OPTForCausalLM")
    params = weights(config)
    with pytest.raises(ConfigError, match="params: not the parameters of a model of the family opt with 1 layers"):
        serve(tmp_path, dataclasses.replace(params, layers=()))
    bad = dataclasses.replace(params, embed=params.embed.at[3, 3].set(jnp.nan))
    with pytest.raises(ConfigError, match="params: 'embed' holds NaN or infinite values in float32"):
        serve(tmp_path, bad)
    with pytest.raises(ConfigError, match="in float16"):
        serve(tmp_path, dataclasses.replace(params, embed=params.embed * 1e9), dtype="float16")
    with pytest.raises(ConfigError, match=r"params=\.\.\. have none"):
        serve(tmp_path, params, quantization="gguf")
    with pytest.raises(ConfigError, match="not with several hosts"):
        serve(tmp_path, params, tensor_parallel_size=2, nnodes=2)


@pytest.mark.slow
def test_weights_that_were_trained_in_shards_are_served_on_any_number_of_devices(tmp_path):
    model = write_shallow_model(tmp_path / "model")
    command = [sys.executable, "-m", "tests.support.sharded_training", str(model)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3], timeout=250
    )
    found = json.loads(done.stdout)
    whole, sharded = found["losses"]
    np.testing.assert_allclose(sharded, whole, rtol=1e-4)
    assert whole[-1] < whole[0]
    assert found["served"] == [found["served"][0]] * 4
