"""Configurations of every family: what their fields mean, and that none of them ends in anything but one clear line."""

import json
import time
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from apt_jax.config import EngineConfig
from apt_jax.errors import ConfigError, ModelLoadError
from apt_jax.models import FAMILIES, PRESETS, load_model
from apt_jax.models.config import AttentionShape
from apt_jax.models.config_fields import shown
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.models.params import abstract_params, param_axes, param_names

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
GPT2: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 100}
MPT: dict[str, Any] = {
    "architectures": ["MptForCausalLM"],
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 100,
}
NEOX = LLAMA | {"architectures": ["GPTNeoXForCausalLM"]}


def _of(architecture: str, **fields: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [architecture]} | fields


LATENT: dict[str, Any] = {"kv_lora_rank": 16, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
V2 = _of("DeepseekV2ForCausalLM", n_routed_experts=8, num_experts_per_tok=2, **LATENT)
MINICPM3 = _of("MiniCPM3ForCausalLM", **LATENT | {"qk_rope_head_dim": 32})


@pytest.mark.in_turn(16)
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_as_many_parameters_as_they_say_and_name_each_once(name):
    family, config = read_model_config(PRESETS[name])
    leaves = jax.tree.leaves(param_names(config))
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract_params(config, np.float16))]
    assert config.num_params == sum(int(np.prod(shape)) for shape in shapes)
    axes = jax.tree.leaves(
        param_axes(config),
        is_leaf=lambda x: isinstance(x, tuple) and all(isinstance(a, str) for a in x),
    )
    assert [len(a) for a in axes] == [len(s) for s in shapes]
    assert len(set(leaves)) == len(leaves)
    for leaf, shape in zip(leaves, shapes, strict=True):
        source = family.source(leaf, shape, config)
        if source.take is None:
            assert int(np.prod(source.shape)) == int(np.prod(shape)), leaf
        elif np.prod(source.shape) < 1e6:
            assert source.take(np.zeros(source.shape, np.int8)).size == np.prod(shape), leaf


def test_other_names_of_the_same_field():
    fields = GPT2 | {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    config = read_model_config(fields)[1]
    assert (config.hidden_size, config.num_layers, config.num_heads, config.max_position) == (
        64,
        2,
        4,
        64,
    )
    with pytest.raises(ModelLoadError, match=r"n_heads=4, num_attention_heads=8 are the same field and differ"):
        read_model_config(MPT | {"num_attention_heads": 8})
    assert read_model_config(LLAMA | {"architectures": ["LLaMAForCausalLM"]})[1].family == "llama"
    assert read_model_config(LLAMA | {"architectures": [], "model_type": "qwen2"})[1].family == "qwen2"


def test_labels_outside_of_the_vocabulary_are_absent():
    config = read_model_config(LLAMA | {"pad_token_id": -1, "bos_token_id": 100})[1]
    assert (config.pad_token_id, config.bos_token_id) == (None, None)
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        read_model_config(LLAMA | {"eos_token_id": -1})


def test_rope_scaling_takes_the_place_of_rope_parameters():
    linear = {"type": "linear", "factor": 8.0}
    rope = read_model_config(LLAMA | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": linear})[1].rope
    assert rope is not None
    assert rope.inv_freq[0] == pytest.approx(1 / 8)


def test_gpt_neox_has_its_own_names_for_rotary_fields():
    fields = {
        "rotary_emb_base": 5000,
        "rope_theta": 10000,
        "rotary_pct": 1.0,
        "partial_rotary_factor": 0.25,
    }
    rope = read_model_config(NEOX | fields)[1].rope
    assert rope is not None
    assert rope.rotary_dim == 16
    assert rope.inv_freq[1] == pytest.approx(5000 ** (-1 / 8))


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 1e3, "rope_scaling": LINEAR},
        {"rope_parameters": {"full_attention": LINEAR | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e3}}},
        {"rope_theta": 5e5, "rope_local_base_freq": 1e3, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": None}},
    ],
)  # fmt: skip
def test_gemma_3_has_a_rotary_embedding_in_layers_with_a_window_and_one_in_the_others(fields):
    config = read_model_config(_of("Gemma3ForCausalLM", sliding_window_pattern=2, head_dim=8) | fields)[1]
    local, full = config.rope_of(0), config.rope_of(1)
    assert local is not None
    assert full is not None
    assert local.inv_freq == pytest.approx([1e3 ** (-i / 4) for i in range(4)])
    assert full.inv_freq == pytest.approx([5e5 ** (-i / 4) / 8 for i in range(4)])
    assert config.max_position == 64  # not stretched: the published limit has the factor in it


def test_gemma_3_beside_a_vision_encoder_is_its_text_model():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": LINEAR}  # fmt: skip
    family, config = read_model_config({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text})
    assert config == read_model_config(PRESETS["gemma-3-4b"])[1]
    assert (config.family, family.name, config.eos_token_id) == ("gemma3", "gemma3", 1)
    for name in ("language_model.model.norm.weight", "model.language_model.norm.weight", "model.norm.weight"):
        assert family.strip_prefix(name) == "norm.weight"
    assert family.strip_prefix("language_model.lm_head.weight") == "lm_head.weight"
    for name in ("vision_tower.post_layernorm.bias", "model.multi_modal_projector.mm_soft_emb_norm.weight"):
        assert family.ignored_tensors.search(family.strip_prefix(name))
    assert not family.ignored_tensors.search("layers.0.vision_tower.weight")


def test_phi_4_mini_turns_96_lanes_of_128():
    short, long = (read_model_config(PRESETS["phi-4-mini"], max_len)[1] for max_len in (None, 131072))
    assert (short.max_position, long.max_position) == (4096, 131072)
    assert short.rope is not None
    assert long.rope is not None
    assert short.rope.rotary_dim == 96
    assert long.rope.attention_factor == pytest.approx(np.sqrt(1 + 5 / 12))  # ln(131072 / 4096) / ln(4096)
    assert short.rope.inv_freq[47] / long.rope.inv_freq[47] == pytest.approx(47.77)
    assert short.tie_embeddings


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 32}, (32, 32)),
        ("MistralForCausalLM", {"sliding_window": 32, "layer_types": ["full_attention"] * 2}, ()),
        (
            "MistralForCausalLM",
            {"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]},
            (None, 32),
        ),
        (
            "MinistralForCausalLM",
            {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
            (32, None),
        ),
        ("Phi3ForCausalLM", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, (8, 8)),
        ("Qwen2ForCausalLM", {"sliding_window": 32, "layer_types": ["full_attention"] * 2}, ()),
        ("LlamaForCausalLM", {"layer_types": ["full_attention"] * 2}, ()),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("MistralForCausalLM", {}, (4096, 4096)),
        ("Qwen2ForCausalLM", {"sliding_window": 32}, ()),
        ("Qwen2ForCausalLM", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, (None, 32)),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (8, None),
        ),
        ("Phi3ForCausalLM", {"sliding_window": 8}, (8, 8)),
        ("Gemma2ForCausalLM", {"sliding_window": 8}, (8, None)),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "num_hidden_layers": 7}, (8,) * 5 + (None, 8)),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None)),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, (None, 8)),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, ()),
    ],
)
def test_windows(architecture, fields, windows):
    config = read_model_config(_of(architecture, num_key_value_heads=2, **fields))[1]
    assert config.layer_windows == windows


def test_glm_keeps_the_bias_of_its_router_in_float32_and_ignores_the_layer_that_predicts_more(tmp_path):
    fields = LLAMA | {
        "architectures": ["Glm4MoeLiteForCausalLM"], "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 12, "eos_token_id": 2,
    }  # fmt: skip
    family, config = read_model_config(fields)
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract_params(config, np.float32))]
    sources = [
        family.source(leaf, shape, config)
        for leaf, shape in zip(jax.tree.leaves(param_names(config)), shapes, strict=True)
    ]
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {"model.layers.47.eh_proj.weight": np.zeros((2, 2), np.float32)}
    for source in sources:
        for name in source.parts or (source.name,):
            shape = source.shape[1:] if source.parts else source.shape
            tensors[name if name == "lm_head.weight" else f"model.{name}"] = rng.standard_normal(shape, np.float32)
    bias = np.float32(8) + rng.random(4, np.float32) / 64  # in bfloat16 all would be equal
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = bias
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    params = load_model(EngineConfig(model=str(tmp_path), dtype="bfloat16")).params
    experts = params.layers[1].experts
    assert experts is not None
    np.testing.assert_array_equal(experts.router_bias, bias)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16", "float32"}
    keys = np.asarray(params.layers[0].wk.astype(np.float32))
    assert (keys[:, :4, 16:] == np.eye(4)).all()  # the rotary lanes of every head are those of the latent
    assert not keys[:, :4, :16].any()
    assert not keys[:, 4:, 16:].any()
    with pytest.raises(ModelLoadError, match=r"quantization='int8' does not support .*--quantization"):
        load_model(EngineConfig(model=str(tmp_path), quantization="int8"))


def test_quantization_of_latent_attention_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINICPM3 | {"eos_token_id": 2}))
    with pytest.raises(
        ModelLoadError, match=r"quantization='int8' does not support latent attention; .*--quantization"
    ):
        load_model(EngineConfig(model=str(tmp_path), load_format="dummy", quantization="int8"))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "layers without end": (_of("MistralForCausalLM", num_hidden_layers=2**31 - 1), "num_hidden_layers"),
    "heads without end": ({"architectures": ["BloomForCausalLM"], "hidden_size": 2**30, "n_head": 2**30}, "n_head"),
    "wide heads": (LLAMA | {"head_dim": 2**31 - 2}, "head_dim"),
    "wide heads, derived": (LLAMA | {"hidden_size": 2**30, "num_attention_heads": 1}, "lanes"),
    "yarn, theta 1": (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}}, "yarn"),
    "yarn, beta": (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast"),
    "yarn, tiny beta": (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 1e-320}}, "yarn"),
    "yarn, factor": (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": -3}}, "factor"),
    "yarn, mscale": (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1, "mscale_all_dim": -1}}, "mscale"),
    "longrope, original": (
        LLAMA | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "original_max_position_embeddings": 1}},
        "original"),
    "longrope, factors": (LLAMA | {"rope_scaling": {"rope_type": "longrope", "short_factor": [10**400] * 8, "long_factor": [1.0] * 8}}, "short_factor"),
    "longrope, too few factors": (LLAMA | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}}, "list of 8"),
    "rope type": (LLAMA | {"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
    "rope by layer type": (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters"),
    "rope no object": (LLAMA | {"rope_scaling": "linear"}, "rope_scaling"),
    "rope factor NaN": (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
    "llama3 bands": (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "low_freq_factor"),
    "partial rotary": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "odd rotary": (NEOX | {"rotary_pct": 0.2}, "lanes of a head"),
    "layer types": (_of("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"]), "layer_types"),
    "unknown layer type": (_of("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=8, layer_types=["chunked_attention"] * 2), "layer_types"),
    "layer types of Llama": (LLAMA | {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "layer types of Phi-3": (_of("Phi3ForCausalLM", sliding_window=8, layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    "Qwen, layer types that slide without a window": (_of("Qwen2ForCausalLM", layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    "Mistral, layer types without a window": (_of("MistralForCausalLM", sliding_window=None, layer_types=["sliding_attention"] * 2), "layer_types"),
    "Gemma 2, no window": (_of("Gemma2ForCausalLM", sliding_window=None), "sliding_window=null"),
    "Gemma 3, no window": (_of("Gemma3ForCausalLM", sliding_window=None), "sliding_window=null"),
    "Gemma 4, no window": (_of("Gemma4ForCausalLM", sliding_window=None, hidden_size_per_layer_input=0), "needs a sliding_window"),
    "gpt-oss, no window": (_of("GptOssForCausalLM", sliding_window=None), "sliding_window=null"),
    "Qwen 2 MoE, no window": (_of("Qwen2MoeForCausalLM", use_sliding_window=True, sliding_window=None), "sliding_window=null"),
    "Qwen 2 MoE, windows without their flag": (
        _of("Qwen2MoeForCausalLM", layer_types=["sliding_attention"] * 2, use_sliding_window=False), "sliding_window and use_sliding_window"),
    "Qwen 3 MoE, windows without their flag": (_of("Qwen3MoeForCausalLM", layer_types=["sliding_attention"] * 2, sliding_window=8), "sliding_window=None"),
    "SmolLM3, windows without their flag": (_of("SmolLM3ForCausalLM", layer_types=["sliding_attention"] * 2, sliding_window=8), "needs a sliding_window"),
    "layer types no list": (_of("Gemma2ForCausalLM", layer_types="full_attention"), "layer_types"),
    "an encoder": (LLAMA | {"is_encoder_decoder": True}, "is_encoder_decoder"),
    "not causal": (LLAMA | {"is_causal": False}, "is_causal"),
    "heads taken out": (GPT2 | {"pruned_heads": {"0": [1]}}, "pruned_heads"),
    "rope of images": (LLAMA | {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "rope_scaling.mrope_section"),
    "compressed": (LLAMA | {"compression_config": {"format": "pack"}}, "compression_config"),
    "a flag that is a number": (GPT2 | {"scale_attn_by_inverse_layer_idx": 0}, "inverse_layer"),
    "eps": (LLAMA | {"rms_norm_eps": -1.0}, "rms_norm_eps"),
    "eps text": (LLAMA | {"rms_norm_eps": "small"}, "rms_norm_eps"),
    "activation": (LLAMA | {"hidden_act": "tanh"}, "hidden_act"),
    "heads": (LLAMA | {"num_attention_heads": 5}, "multiple"),
    "key heads": (LLAMA | {"num_key_value_heads": 3}, "multiple"),
    "head count true": (LLAMA | {"num_attention_heads": True}, "num_attention_heads"),
    "Gemma 3, softcap": (_of("Gemma3ForCausalLM", attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    "Gemma 3, bidirectional": (_of("Gemma3ForCausalLM", use_bidirectional_attention=True), "bidirectional"),
    "Gemma 3, no period": (_of("Gemma3ForCausalLM", sliding_window_pattern=0), "sliding_window_pattern"),
    "Gemma 3, one rope": (_of("Gemma3ForCausalLM", rope_parameters={"rope_theta": 1e6}), "rope_parameters"),
    "Gemma 3, rope no object": (_of("Gemma3ForCausalLM", rope_scaling="linear"), "rope_scaling"),
    "Gemma 3, rope type": (_of("Gemma3ForCausalLM", rope_parameters={"sliding_attention": {"rope_type": "spiral"}}), "spiral"),
    "Gemma 3, no text": ({"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}, "text_config"),
    "softcap": (_of("Gemma2ForCausalLM", attn_logit_softcapping=-1), "attn_logit_softcapping"),
    "bidirectional": (_of("GemmaForCausalLM", use_bidirectional_attention=True), "bidirectional"),
    "GPT-2, layer scales": (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer"),
    "MPT, no ALiBi": (MPT | {"attn_config": {"alibi": False}}, "alibi"),
    "MPT, key norm": (MPT | {"attn_config": {"qk_ln": True}}, "qk_ln"),
    "MPT, logits": (MPT | {"logit_scale": 0.5}, "logit_scale"),
    "MPT, norm": (MPT | {"norm_type": "rmsnorm"}, "norm_type"),
    "MPT, feed-forward": (MPT | {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_config"),
    "MPT, slopes": (MPT | {"attn_config": {"alibi_bias_max": -1e4}}, "alibi_bias_max"),
    "MPT, attention no object": (MPT | {"attn_config": 3}, "attn_config"),
    "BLOOM, residual": ({"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": True}, "post_layernorm"),
    "latent, key heads": (V2 | {"num_key_value_heads": 2}, "num_key_value_heads=2 must be num_attention_heads=4"),
    "latent, biases": (V2 | {"attention_bias": True}, "attention_bias"),
    "latent, wide values": (V2 | {"v_head_dim": 193}, "v_head_dim=193"),
    "latent, odd rotary": (V2 | {"qk_rope_head_dim": 7}, "lanes of a head"),
    "latent, no rank": (V2 | {"kv_lora_rank": 0}, "kv_lora_rank"),
    "latent, no width of latents": ({name: value for name, value in V2.items() if name != "kv_lora_rank"}, "kv_lora_rank is missing"),
    "latent, null for the width of latents": (V2 | {"kv_lora_rank": None}, "kv_lora_rank=None"),
    "latent, no rotated lanes": ({name: value for name, value in V2.items() if name != "qk_rope_head_dim"}, "qk_rope_head_dim is missing"),
    "latent, rank of queries": (V2 | {"q_lora_rank": -1}, "q_lora_rank"),
    "latent, longrope of whole heads": (
        MINICPM3 | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}}, "list of 16"),
    "DeepSeek, groups": (V2 | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}, "num_groups=3 must divide num_experts=8"),
    "DeepSeek, no groups": (V2 | {"topk_method": "group_limited_greedy"}, "n_group is missing"),
    "DeepSeek, small groups": (V2 | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 1}, "groups_per_token=1"),
    "DeepSeek, method": (V2 | {"topk_method": "noaux_tc"}, "topk_method"),
    "DeepSeek, scores": (V2 | {"scoring_func": "sigmoid"}, "scoring_func"),
    "DeepSeek, normed": (V2 | {"norm_topk_prob": True}, "norm_topk_prob"),
    "DeepSeek, first layers": (V2 | {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    "DeepSeek, sparse layers": (V2 | {"moe_layer_freq": 2}, "moe_layer_freq"),
    "DeepSeek-V3, rotary halves": (_of("DeepseekV3ForCausalLM", rope_interleave=False), "rope_interleave"),
    "DeepSeek-V3, groups of one": (_of("DeepseekV3ForCausalLM", n_routed_experts=8, n_group=8, topk_group=8), "num_groups=8"),
    "GLM, kinds of layers": (_of("Glm4MoeLiteForCausalLM", mlp_layer_types=["dense"]), "mlp_layer_types"),
    "OPT, norm flag": (_of("OPTForCausalLM", ffn_dim=96, layer_norm_elementwise_affine="x"), "affine"),
    "unknown": (_of("FalconForCausalLM"), "FalconForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_configuration_that_cannot_be_is_one_clear_line(case):
    fields, named = BAD[case]
    begin = time.monotonic()
    with pytest.raises(ModelLoadError) as error:
        read_model_config(fields)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
    assert time.monotonic() - begin < 5


def test_long_values_in_messages_are_cut_between_their_elements():
    assert shown(["sliding_attention"] * 3) == str(["sliding_attention"] * 3)
    assert shown(["sliding_attention"] * 40) == "['sliding_attention', 'sliding_attention', 'sliding_attention', ...]"
    assert shown({"a" * 30: 1, "b" * 30: 2, "c" * 30: 3}) == f"{{'{'a' * 30}': 1, '{'b' * 30}': 2, ...}}"
    assert shown("x" * 100, 10) == "'xxxxxxxxx..."
    assert shown(["x" * 100], 10) == "['xxxxxxxxx...]"
    with pytest.raises(ModelLoadError) as error:
        read_model_config(_of("Gemma2ForCausalLM", layer_types=["sliding_attention"] * 40, sliding_window=None))
    assert "attention', ...] must name" in str(error.value)


@pytest.mark.parametrize(
    "architecture", ["MistralForCausalLM", "MinistralForCausalLM", "Qwen3MoeForCausalLM", "Phi3ForCausalLM"]
)
def test_where_all_layers_may_have_the_window_null_is_none(architecture):
    fields = _of(architecture, num_key_value_heads=2, use_sliding_window=True, sliding_window=None)
    assert read_model_config(fields)[1].layer_windows == ()


def _complaint(fields: dict[str, Any]) -> str:
    try:
        read_model_config(fields)
    except ModelLoadError as error:
        return str(error)
    return ""


def test_every_field_of_every_family_survives_any_value():
    """Whatever a field holds, the end is a configuration or one clear line."""
    values = [None, True, -1, 0, 2**31, 1e308, float("nan"), "x", [], {}, [1], {"a": {}}, 10**400]
    more = (
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "head_dim",
        "hidden_act",
        "attn_config",
        "tie_word_embeddings",
    )
    rope = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    for family in {f.name: f for f in FAMILIES.values() if f.presets}.values():
        fields = dict(next(iter(family.presets.values())))
        tried = [fields | {name: value} for name in {*fields, *more} - {"architectures"} for value in values]
        tried += [fields | {"rope_scaling": rope | {name: value}} for name in rope for value in values]
        for candidate in tried:
            assert "\n" not in _complaint(candidate)


_GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 128, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "global_head_dim": 32, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision",
}  # fmt: skip


def test_layers_of_gemma_4_without_a_window_cache_one_tensor():
    config = read_model_config(_GEMMA4)[1]
    assert config.local_layers == (0, 1, 2, 3, 4)
    assert config.attention_of(0) == AttentionShape(num_kv_heads=4, head_dim=16)
    shape = AttentionShape(num_kv_heads=1, head_dim=32, one_projection=True, turned_lanes=8)
    assert config.attention_of(5) == shape
    assert (shape.lane, config.lane) == (40, 64)
    newer = {k: v for k, v in _GEMMA4.items() if "global" not in k}
    newer |= {"per_layer_config": {"5": {"head_dim": 32, "num_key_value_heads": 1}}}
    assert read_model_config(newer)[1] == config
    apart = read_model_config(_GEMMA4 | {"attention_k_eq_v": False, "global_head_dim": None})[1]
    assert apart.attention_of(5) == AttentionShape(num_kv_heads=4, head_dim=512)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256 is not supported: Gemma 4 E2B and E4B"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ({"per_layer_config": {"4": {"head_dim": 32}}}, "per_layer_config=.* must give the same head_dim"),
        ({"per_layer_config": {"5": {"sliding_window": 3}}}, "per_layer_config=.* must give the same head_dim"),
        ({"per_layer_config": {"5": {"head_dim": 0}}}, r"per_layer_config head_dim=0 must be an integer in \[1"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads=3 must divide num_attention_heads=8"),
        ({"num_global_key_value_heads": 0}, "num_global_key_value_heads=0 must be an integer"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters=.* must hold one object for full_attention"),
    ],
)
def test_unsupported_fields_of_gemma_4_are_refused_in_one_line(changed, message):
    with pytest.raises((ModelLoadError, ConfigError), match=message) as caught:
        read_model_config(_GEMMA4 | changed)
    assert "\n" not in str(caught.value)


def test_embeddings_in_every_layer_are_the_default_of_gemma_4():
    with pytest.raises(ModelLoadError, match="hidden_size_per_layer_input=256 is not supported"):
        read_model_config({k: v for k, v in _GEMMA4.items() if k != "hidden_size_per_layer_input"})
