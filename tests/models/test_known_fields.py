"""Fields of configurations: those that are read have an effect, those that are not supported are refused, others logged."""

import json
import logging
import runpy
from typing import Any

import pytest

from apt_jax.config import EngineConfig
from apt_jax.errors import ModelLoadError
from apt_jax.models import FAMILIES, load_model
from apt_jax.models.checkpoint_map import ModelFamily
from apt_jax.models.known_fields import (
    IGNORED,
    FamilyFields,
    check_fields,
    markdown,
    unknown_fields,
)
from apt_jax.models.loading.resolve import read_model_config

BY_NAME = {family.name: (architecture, family) for architecture, family in reversed(FAMILIES.items())}

OTHER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "n_embed"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "head_dim", "word_embed_proj_dim"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"), 40),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ("relu", "gelu")),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-3),
    **dict.fromkeys(("mlp_bias", "_remove_final_layer_norm", "use_sliding_window"), True),
    **dict.fromkeys(("do_layer_norm_before", "enable_bias", "scale_attn_weights", "use_parallel_residual"), False),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 7.0),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), 1234.0),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (0.5, 1.0)),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), 2),
    "attention_bias": (True, False),
    "vocab_size": 77,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 100,
    "sliding_window": 5,
    "max_window_layers": 0,
    "mlp_only_layers": [1],
    "no_rope_layers": [0, 1],
    "no_rope_layer_interval": 3,
    "norm_topk_prob": (True, False),
    "qkv_bias": False,
    "attention_k_eq_v": False,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "per_layer_config": {"1": {"head_dim": 32}},
    "hidden_size_per_layer_input": 256,
    **dict.fromkeys(("decoder_sparse_step", "num_experts", "num_local_experts", "num_experts_per_tok"), 3),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_routed_experts", "topk_group"), 2),
    **dict.fromkeys(("scale_emb", "scale_depth", "routed_scaling_factor"), 3.0),
    "n_shared_experts": (2, 1),
    "first_k_dense_replace": (0, 1),
    "n_group": 8,
    "enable_moe_block": False,
    "top_k_experts": 1,
    "topk_method": "greedy",
    "mlp_layer_types": ["sparse", "dense"],
    "dim_model_base": 32,
    "layer_types": (["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]),
    "original_max_position_embeddings": 4096,
    "alibi_bias_max": 4,
    "softmax_scale": 0.3,
    "clip_qkv": 2.0,
    "swiglu_alpha": 1.0,
    "swiglu_limit": 5.0,
    "kv_n_heads": 2,
    "bos_token_id": 9,
    "eos_token_id": 9,
    "pad_token_id": 9,
}
"""Another value than the one of `small`."""
ELSEWHERE = {
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "layer_norm_elementwise_affine",
    "tie_word_embeddings",
}
"""Have tests of their own: they choose the family or the dtype, or say what a checkpoint stores."""


def small(architecture: str, family: ModelFamily) -> dict[str, Any]:
    known = family.fields.read
    sizes = {
        "hidden_size": 64,
        "d_model": 64,
        "n_embd": 64,
        "n_embed": 64,
        "num_hidden_layers": 2,
        "n_layer": 2,
        "n_layers": 2,
    }
    sizes |= {"num_attention_heads": 4, "n_head": 4, "n_heads": 4, "intermediate_size": 48, "ffn_dim": 48}
    sizes |= {"max_position_embeddings": 64, "head_dim": 16, "num_key_value_heads": 4}
    older = {"n_embd", "d_model", "n_embed", "n_layer", "n_layers", "n_head", "n_heads", "n_positions"}
    fields = {k: v for k, v in sizes.items() if k in known and (k in older or not older & known)}
    if family.name == "phi3":  # partial_rotary_factor has an effect, and the original context with this scaling
        fields |= {
            "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            "partial_rotary_factor": 0.5,
        }
        fields |= {"original_max_position_embeddings": 32}
    elif "original_max_position_embeddings" in known:
        fields |= {"original_max_position_embeddings": 16, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    if "use_sliding_window" in known:
        fields |= {"use_sliding_window": True, "sliding_window": 7}
    if "no_rope_layer_interval" in known:
        fields |= {"no_rope_layer_interval": 2}
    if (
        "kv_lora_rank" in known
    ):  # the original context has an effect with a scaling of as many factors as there are lanes
        fields |= {
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 4,
            "v_head_dim": 12,
        }
    if "topk_method" in known:
        fields |= {"topk_method": "group_limited_greedy"}
    if "n_routed_experts" in known:
        fields |= {"n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 3}
    if "attention_k_eq_v" in known:
        fields |= {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
    if "enable_moe_block" in known:
        fields |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    if "max_window_layers" in known:
        fields |= {"max_window_layers": 1}
    return {"architectures": [architecture], "vocab_size": 97, **fields}  # fmt: skip


def outcome(fields: dict[str, Any]) -> Any:
    try:
        return read_model_config(fields)[1]
    except ModelLoadError:
        return "refused"


CASES = [
    (name, field)
    for name, (_, family) in BY_NAME.items()
    for field in sorted({"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"} | family.fields.read)
    if field not in ELSEWHERE and name not in ("gemma3", "gemma4", "mistral3")
]


@pytest.mark.parametrize(("name", "field"), CASES)
def test_a_field_that_is_read_has_an_effect(name, field):
    architecture, family = BY_NAME[name]
    fields = small(architecture, family)
    before = outcome(fields)
    assert before != "refused"
    values = (not fields[field],) if field == "use_sliding_window" else OTHER[field]
    values = values if isinstance(values, tuple) else (values,)
    assert any(outcome(fields | {field: value}) != before for value in values)


@pytest.mark.parametrize("field", sorted(BY_NAME["mpt"][1].fields.nested["attn_config"].read))
def test_a_field_of_an_object_has_an_effect(field):
    fields = small(*BY_NAME["mpt"])
    assert outcome(fields | {"attn_config": {field: OTHER[field]}}) != outcome(fields)


def offs(known: FamilyFields, where: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], tuple[Any, ...]]]:
    found = [((*where, name), values) for name, values in known.off.items()]
    return found + [one for name, inner in known.nested.items() for one in offs(inner, (*where, name))]


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {path[0]: nested(path[1:], value) if path[1:] else value}


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_not_supported_is_refused_unless_it_is_off(name):
    known = BY_NAME[name][1].fields
    every = [(("is_encoder_decoder",), (False,)), (("pruned_heads",), ({},)), (("compression_config",), ())]
    for path, values in [*offs(known), *every]:
        for value in (None, *values):
            check_fields(known, nested(path, value), name)
        for value in ("surely not", 0.25, True, False):
            if not any(type(value) is type(v) and value == v for v in values):
                with pytest.raises(ModelLoadError, match=path[-1]):
                    check_fields(known, nested(path, value), name)


def test_unknown_fields_are_named_once_and_known_ones_never(tmp_path, caplog):
    fields = small(*BY_NAME["llama"]) | {
        "logit_scale": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "spin": 3}, "use_mrope": False, "_private": 1,
        "attention_dropout": 0.1, "transformers_version": "5.0",
    }  # fmt: skip
    assert unknown_fields(BY_NAME["llama"][1].fields, fields) == ["rope_scaling.spin", "logit_scale"]
    (tmp_path / "config.json").write_text(json.dumps(fields | {"eos_token_id": 2}))
    with caplog.at_level(logging.WARNING):
        load_model(EngineConfig(model=str(tmp_path), load_format="dummy"))
    (record,) = caplog.records
    assert "rope_scaling.spin, logit_scale" in record.getMessage()


@pytest.mark.parametrize("name", [n for n, (_, family) in BY_NAME.items() if family.presets])
def test_presets_hold_known_fields_only(name):
    family = BY_NAME[name][1]
    for fields in family.presets.values():
        assert unknown_fields(family.fields, fields) == []


def test_the_table_has_every_family_and_reason(capsys):
    runpy.run_module("apt_jax.models.families", run_name="__main__")
    table = capsys.readouterr().out
    assert table == markdown({family.name: family.fields for family in FAMILIES.values()})
    assert all(f"| {family.name} |" in table for family in FAMILIES.values())
    assert all(reason in table for reason in IGNORED)
