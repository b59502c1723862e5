"""Our float32 forward pass against Hugging Face's OPT, on models that it made and saved itself."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.config import EngineConfig
from apt_jax.lab.reference_model import forward, reference_generate_greedy
from apt_jax.models import PRESETS, load_model
from apt_jax.models.config import ModelConfig
from apt_jax.models.loading.resolve import bundled_models, read_model_config
from tests.support.opt_checkpoint import TINY

_WHERE = "runs in the reference environment (make reference)"
torch = pytest.importorskip("torch", reason=_WHERE)
transformers = pytest.importorskip("transformers", reason=_WHERE)

_TOLERANCE = 1e-4
"""On logits of size one to ten, in float32: both sides sum in their own order."""

_VARIANTS = {
    "plain": {},
    "350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 8},
    "projected pre-norm": {"word_embed_proj_dim": 24},
    "no bias": {"enable_bias": False},
    "no affine": {"layer_norm_elementwise_affine": False},
    "post-norm no affine": {"do_layer_norm_before": False, "layer_norm_elementwise_affine": False},
    "no final norm": {"_remove_final_layer_norm": True},
    "untied": {"tie_word_embeddings": False},
    "deep": {"num_hidden_layers": 7, "num_attention_heads": 2},
}


@pytest.fixture(params=_VARIANTS)
def pair(request, tmp_path):
    """A random model of transformers, and what our loader makes of its files."""
    torch.manual_seed(0)
    fields = TINY | _VARIANTS[request.param]
    # Dropout is off, and weights are large enough that every part of the model moves the result.
    config = transformers.OPTConfig(**fields, dropout=0.0, init_std=0.3)
    theirs = transformers.OPTForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if name.endswith("bias") or "norm" in name:
                value.add_(torch.randn_like(value) * 0.3)
    theirs.save_pretrained(tmp_path)
    return theirs, load_model(EngineConfig(model=str(tmp_path)))


def _their_logits(model, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def test_logits_are_those_of_transformers(pair):
    theirs, ours = pair
    tokens = np.random.default_rng(0).integers(3, 48, 32).tolist()
    logits = forward(ours.params, jnp.asarray(tokens, jnp.int32), ours.config)
    want = _their_logits(theirs, tokens)
    assert np.abs(want).max() > 0.5  # the comparison would be idle on a model that says nothing
    np.testing.assert_allclose(logits, want, atol=_TOLERANCE, rtol=0)


def test_greedy_output_is_that_of_transformers(pair):
    theirs, ours = pair
    prompt = [2, 17, 5, 40]
    tokens = list(prompt)
    for _ in range(12):
        tokens.append(int(_their_logits(theirs, tokens)[-1].argmax()))
    assert reference_generate_greedy(ours.params, prompt, 12, ours.config) == tokens[4:]


def test_pickled_weights_load_when_asked_for(tmp_path):
    torch.manual_seed(0)
    config = transformers.OPTConfig(**TINY)
    theirs = transformers.OPTForCausalLM(config).to(torch.bfloat16)
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    ours = load_model(EngineConfig(model=str(tmp_path), load_format="pt"))
    want = theirs.model.decoder.embed_tokens.weight.detach().float().numpy()
    np.testing.assert_array_equal(ours.params.embed, want)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    import os
    import pickle

    from apt_jax.errors import ModelLoadError

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    transformers.OPTConfig(**TINY).save_pretrained(tmp_path)
    for content in (pickle.dumps(Trap()), b"", b"\x80\x04garbage", pickle.dumps({"a": 1})):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin"):
            load_model(EngineConfig(model=str(tmp_path), load_format="pt"))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_the_model_of_transformers(name):
    fields = {k: v for k, v in PRESETS[name].items() if k != "architectures"}
    with torch.device("meta"):
        model_class = getattr(transformers, PRESETS[name]["architectures"][0])
        theirs = model_class(model_class.config_class(**fields))
    _, config = read_model_config(PRESETS[name])
    of_images = ("vision_tower.", "multi_modal_projector.")  # not loaded, and here of transformers' default size
    text = [value for leaf, value in theirs.named_parameters() if not leaf.removeprefix("model.").startswith(of_images)]
    assert config.num_params == sum(value.numel() for value in text) + _num_constants(config)


def _num_constants(config: ModelConfig) -> int:
    """Entries of our arrays that are no parameters of theirs: zeros and ones in the projections of latents, and buffers,
    which are biases of routers and Gemma 4's factor of each layer."""
    if config.latent is None:
        return config.num_layers * config.layer_scale
    rotary = config.input_width - config.latent.rank
    keys = config.head_dim * config.input_width - (config.head_dim - rotary) * config.latent.rank
    constants = config.num_layers * config.num_heads * (keys + config.value_dim * rotary)
    sparse = [config.experts_of(i) for i in range(config.num_layers)]
    return constants + sum(e.num_experts for e in sparse if e is not None and e.scoring == "sigmoid")


@pytest.mark.skipif("tiny-opt" not in bundled_models(), reason="the bundled model is not there")
def test_the_bundled_model_gives_the_logits_of_transformers():
    ours = load_model(EngineConfig(model="tiny-opt"))
    assert isinstance(ours.path, Path)
    theirs = transformers.OPTForCausalLM.from_pretrained(ours.path, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    tokens = [2, *rng.integers(3, ours.config.vocab_size, 127).tolist()]
    logits = forward(ours.params, jnp.asarray(tokens, jnp.int32), ours.config)
    np.testing.assert_allclose(logits, _their_logits(theirs, tokens), atol=_TOLERANCE, rtol=0)
