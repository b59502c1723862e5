import jax
import numpy as np
import pytest

from apt_jax.errors import ModelLoadError
from apt_jax.models import FAMILIES
from apt_jax.models.families import opt
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.models.params import abstract_params, dummy_params, param_axes, param_names
from tests.support.opt_checkpoint import TINY, tensor_shapes

_PUBLISHED = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
}


@pytest.mark.parametrize("name", opt.PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name):
    _, config = read_model_config(opt.PRESETS[name])
    shapes = jax.tree.leaves(abstract_params(config, np.float16))
    assert config.num_params == sum(leaf.size for leaf in shapes) == _PUBLISHED[name]


@pytest.mark.parametrize("name", opt.PRESETS)
def test_a_preset_names_every_published_tensor_once(name):
    fields = opt.PRESETS[name]
    _, config = read_model_config(fields)
    leaves = jax.tree.leaves(param_names(config))
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract_params(config, np.float16))]
    ours = {
        (source := opt.source(leaf, shape, config)).name: source.shape
        for leaf, shape in zip(leaves, shapes, strict=True)
    }
    theirs = {opt.strip_prefix(tensor): shape for tensor, shape in tensor_shapes(dict(fields)).items()}
    assert ours == theirs
    assert len(ours) == len(leaves)


def test_the_350m_layout_is_post_norm_with_narrow_embeddings():
    _, config = read_model_config(opt.PRESETS["opt-350m"])
    assert (config.norm_placement, config.final_norm) == ("post", False)
    assert (config.embedding_size, config.hidden_size) == (512, 1024)
    assert config.supports_hidden
    assert config.hidden_mode == "absorb"


def test_axes_and_shapes_have_one_structure():
    for fields in (TINY, TINY | {"do_layer_norm_before": False, "word_embed_proj_dim": 8}):
        _, config = read_model_config(fields)
        axes = jax.tree.leaves(param_axes(config), is_leaf=_is_axes)
        shapes = jax.tree.leaves(abstract_params(config, np.float32))
        assert [len(a) for a in axes] == [len(s.shape) for s in shapes]
        assert len(jax.tree.leaves(param_names(config))) == len(shapes)


def _is_axes(x):
    return isinstance(x, tuple) and all(isinstance(name, str) for name in x)


def test_dummy_weights_depend_on_the_seed_alone():
    _, config = read_model_config(TINY)
    first, again, other = (dummy_params(config, np.float32, seed) for seed in (1, 1, 2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.embed, other.embed)


def test_dummy_weights_have_the_abstract_shapes():
    _, config = read_model_config(TINY | {"word_embed_proj_dim": 8, "enable_bias": False})
    params = dummy_params(config, np.float16, 0)
    abstract = abstract_params(config, np.float16)
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    for leaf, want in zip(jax.tree.leaves(params), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype)


def test_absent_optional_fields_have_the_defaults_of_hugging_face():
    required = [
        "architectures",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "ffn_dim",
        "max_position_embeddings",
    ]
    assert opt.model_config({k: TINY[k] for k in required}) == opt.model_config(TINY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 2**31}, "vocab_size=2147483648"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"hidden_size": -16}, "hidden_size=-16"),
        ({"hidden_size": 16.0}, "hidden_size=16.0"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"hidden_size": "16"}, "hidden_size='16'"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_attention_heads": 3}, "hidden_size=16 must be a multiple of num_attention_heads=3"),
        ({"num_hidden_layers": 10**6}, "[1, 1024]"),
        ({"ffn_dim": [24]}, "ffn_dim="),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ({"word_embed_proj_dim": -1}, "word_embed_proj_dim=-1"),
        ({"activation_function": "tanh"}, "activation_function='tanh'"),
        ({"enable_bias": "yes"}, "enable_bias='yes'"),
        ({"eos_token_id": -1}, "eos_token_id=-1"),
        ({"bos_token_id": "2"}, "bos_token_id='2'"),
        ({"architectures": ["GPT5ForCausalLM"]}, "known: Bloom, "),
        ({"architectures": [], "model_type": None}, "known: Bloom, "),
        ({"architectures": 7}, "known: Bloom, "),
        ({"architectures": None, "model_type": "rwkv"}, "known: Bloom, "),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_an_impossible_configuration_is_refused(change, message):
    with pytest.raises(ModelLoadError) as error:
        read_model_config(TINY | change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_size_is_named():
    with pytest.raises(ModelLoadError, match="ffn_dim is missing"):
        read_model_config({k: v for k, v in TINY.items() if k != "ffn_dim"})


def test_the_model_type_stands_in_for_a_missing_architecture():
    family, _ = read_model_config({k: v for k, v in TINY.items() if k != "architectures"})
    assert family is FAMILIES["OPTForCausalLM"]
