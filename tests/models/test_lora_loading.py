"""LoRA adapters in PEFT's format: what is read, and every reason to refuse one."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from apt_jax.errors import ModelLoadError
from apt_jax.models.families.registry import FAMILIES
from apt_jax.models.loading.lora import _places, load_adapter
from apt_jax.models.loading.resolve import read_model_config
from apt_jax.models.lora import LoraAdapter
from tests.support.lora_adapters import write_adapter

OPT = {
    "architectures": ["OPTForCausalLM"], "vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "ffn_dim": 24, "max_position_embeddings": 32,
}  # fmt: skip
LAYER = "model.decoder.layers.{}."
MODULES = {
    LAYER.format(0) + "self_attn.q_proj": (16, 16),
    LAYER.format(0) + "self_attn.v_proj": (16, 16),
    LAYER.format(1) + "fc1": (16, 24),
    LAYER.format(1) + "fc2": (24, 16),
}
Q, FC1 = LAYER.format(0) + "self_attn.q_proj", LAYER.format(1) + "fc1"


def load(path: Path, fields: dict | None = None, max_rank: int = 16) -> LoraAdapter:
    family, config = read_model_config(OPT if fields is None else fields)
    return load_adapter("mine", str(path), family, config, max_rank=max_rank)


def test_matrices_are_those_of_the_file_times_the_scale(tmp_path):
    tensors = write_adapter(tmp_path, MODULES, rank=4, alpha=6.0)
    adapter = load(tmp_path)
    assert set(adapter.matrices) == {(0, "wq"), (0, "wv"), (1, "w_up"), (1, "w_down")}
    a, b = adapter.matrices[1, "w_up"]
    np.testing.assert_array_equal(a, tensors[f"base_model.model.{FC1}.lora_A.weight"])
    np.testing.assert_allclose(b, tensors[f"base_model.model.{FC1}.lora_B.weight"] * 1.5)
    assert adapter.rank == 4


@pytest.mark.parametrize(
    ("fields", "q_scale", "fc1_scale"),
    [
        ({"use_rslora": True}, 8 / 4**0.5, 8 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 3}}, 3 / 4, 8 / 2),
        ({"alpha_pattern": {r"layers\.1\.fc1": 10, "fc1": 3}}, 8 / 4, 10 / 2),
        ({"alpha_pattern": {"proj": 3}}, 8 / 4, 8 / 2),  # no whole name
        ({"alpha_pattern": {".*q_proj": 3}}, 3 / 4, 8 / 2),
    ],
)
def test_rank_and_alpha_of_single_modules(tmp_path, fields, q_scale, fc1_scale):
    tensors = write_adapter(tmp_path, MODULES, ranks={FC1: 2}, rank_pattern={"fc1": 2}, **fields)
    adapter = load(tmp_path)
    for place, module, scale in (((0, "wq"), Q, q_scale), ((1, "w_up"), FC1, fc1_scale)):
        stored = tensors[f"base_model.model.{module}.lora_B.weight"]
        np.testing.assert_allclose(adapter.matrices[place][1], stored * scale, rtol=1e-6)


def test_parts_of_fused_tensors(tmp_path):
    """Tensors of head-by-head q, k and v (BLOOM), one after another (Phi-3), and inputs first (GPT-2)."""
    bloom = {"architectures": ["BloomForCausalLM"], "vocab_size": 48, "hidden_size": 8, "n_layer": 1, "n_head": 2}
    tensors = write_adapter(tmp_path / "b", {"transformer.h.0.self_attention.query_key_value": (8, 24)}, alpha=4.0)
    stored = tensors["base_model.model.transformer.h.0.self_attention.query_key_value.lora_B.weight"]
    by_head = stored.reshape(2, 3, 4, 4)
    found = load(tmp_path / "b", bloom).matrices
    for i, field in enumerate(("wq", "wk", "wv")):
        np.testing.assert_array_equal(found[0, field][1], by_head[:, i].reshape(8, 4))

    gpt2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 48, "n_embd": 8, "n_layer": 1, "n_head": 2}
    modules = {"transformer.h.0.attn.c_attn": (8, 24), "transformer.h.0.mlp.c_fc": (8, 32)}
    tensors = write_adapter(tmp_path / "g", modules, alpha=4.0)
    stored = tensors["base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"]
    found = load(tmp_path / "g", gpt2).matrices
    for i, field in enumerate(("wq", "wk", "wv")):
        np.testing.assert_array_equal(found[0, field][1], stored[8 * i : 8 * i + 8])
    assert found[0, "w_up"][1].shape == (32, 4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not LORA"),
        ({"use_dora": True}, "use_dora is set (DoRA)"),
        ({"bias": "all"}, "bias='all' trains biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set (whole modules)"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changes the base weights"),
        ({"r": 0}, "r=0 must be an integer"),
        ({"r": 5}, "rank 5 is configured for"),
        ({"lora_alpha": "8"}, "lora_alpha='8' must be"),
        ({"rank_pattern": {"(a+)+": 4}}, "with at most 3 repeats"),
        ({"alpha_pattern": {"(": 4}}, "which is not a valid pattern"),
        ({"alpha_pattern": {"fc1": -1}}, "must be a positive number"),
        ({"target_modules": ["q_proj", "v_proj", "fc2"]}, "target_modules does not list"),
    ],
)
def test_configurations_that_are_refused(tmp_path, fields, said):
    write_adapter(tmp_path, MODULES, **fields)
    with pytest.raises(ModelLoadError) as error:
        load(tmp_path)
    assert said in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_modules_without_tensors_may_be_listed_as_in_peft(tmp_path):
    write_adapter(tmp_path, MODULES, target_modules=["q_proj", "v_proj", "fc1", "fc2", "lm_head", "of_another_model"])
    assert load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"base_model.model.lm_head.lora_A.weight": (4, 16), "base_model.model.lm_head.lora_B.weight": (48, 4)},
            "lm_head",
        ),
        ({"base_model.model.model.decoder.embed_tokens.lora_embedding_A": (4, 48)}, "neither lora_A nor lora_B"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": (16,)}, "neither lora_A nor lora_B"),
        ({f"{'a.' * 500_000}lora_A.weight": (4, 48)}, "has a name of 1000013 characters; at most 1024 are supported"),
        ({f"base_model.model.{Q}.lora_B.weight": None}, "is missing for 1 module"),
        (
            {f"base_model.model.{Q}.lora_A.weight": (4, 12)},
            "not [r, 16] and [16, r]; was it trained for another model?",
        ),
        ({f"base_model.model.{Q}.lora_B.weight": (16, 3)}, "not [r, 16] and [16, r]"),
        ({f"{Q}.lora_A.weight": (4, 16)}, "are the same tensor"),
    ],
)
def test_tensors_that_are_refused(tmp_path, changes, said):
    write_adapter(tmp_path, MODULES, target_modules=None)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, shape in changes.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.ones(shape, np.float32)
    save_file(tensors, file)
    with pytest.raises(ModelLoadError) as error:
        load(tmp_path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_scale_that_overflows_is_refused(tmp_path):
    write_adapter(tmp_path, MODULES, rank=8)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.{Q}.lora_B.weight"][0, 0] = 3e38
    save_file(tensors, file)
    config = tmp_path / "adapter_config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"lora_alpha": 8}))
    load(tmp_path)
    config.write_text(json.dumps(fields | {"lora_alpha": 16}))
    with pytest.raises(ModelLoadError, match=r"lora_B.weight is not finite after multiplication by its scale, 2 \("):
        load(tmp_path)


def test_bounds_and_damage(tmp_path):
    write_adapter(tmp_path, MODULES, rank=8)
    with pytest.raises(ModelLoadError, match=r"has rank 8, but max_lora_rank=4 \(--max-lora-rank\)"):
        load(tmp_path, max_rank=4)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.{Q}.lora_A.weight"][0, 0] = np.nan
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match="holds NaN or infinite values"):
        load(tmp_path)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelLoadError, match="cut off"):
        load(tmp_path)
    file.unlink()
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ModelLoadError, match="is a pickle"):
        load(tmp_path)
    with pytest.raises(ModelLoadError, match=r"is not a directory with adapter_config.json \(--lora-modules mine\)"):
        load(tmp_path / "absent")


def test_adapters_of_another_model_are_refused(tmp_path):
    write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": (16, 16), "model.layers.0.mlp.gate_proj": (16, 24)})
    with pytest.raises(ModelLoadError, match="it changes 1 module where this model has no linear layer") as error:
        load(tmp_path)
    assert "mlp.gate_proj" in str(error.value)


def test_links_out_of_the_directory_are_refused(tmp_path):
    write_adapter(tmp_path / "real", MODULES)
    away = tmp_path / "away"
    away.mkdir()
    (away / "adapter_config.json").write_text((tmp_path / "real/adapter_config.json").read_text())
    (away / "adapter_model.safetensors").symlink_to(tmp_path / "real/adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="link out of the model directory"):
        load(away)


def test_every_family_has_places_for_adapters():
    for family in FAMILIES.values():
        if not family.presets:  # another architecture's name for a family with some
            continue
        config = family.model_config(next(iter(family.presets.values())), None)
        places = _places(family, dataclasses.replace(config, num_layers=1, layer_windows=()))
        fields_of_layer = {field for _, _, leaves in places.values() for layer, field, _ in leaves if layer == 0}
        of_all = {"wq", "wo"} | ({"wk", "wv"} if config.latent is None else set())
        dense = {"w_up", "w_down"} | ({"w_gate"} if config.gated else set())
        assert fields_of_layer == (of_all if config.experts is not None else of_all | dense)
