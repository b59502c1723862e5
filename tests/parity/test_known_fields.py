"""Fields of transformers' configuration classes: every one of them is read, refused or ignored on purpose."""

from typing import Any

import pytest

from apt_jax.models import FAMILIES
from apt_jax.models.known_fields import FamilyFields, check_fields, unknown_fields

transformers = pytest.importorskip("transformers", reason="runs in the reference environment (make reference)")

CLASSES = {
    "opt": "OPTConfig",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "ministral": "MinistralConfig",
    "ministral3": "Ministral3Config",
    "mistral3": "Mistral3Config",
    "mixtral": "MixtralConfig",
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
    "glm4_moe_lite": "Glm4MoeLiteConfig",
    "minicpm3": "MiniCPM3Config",
    "smollm3": "SmolLM3Config",
    "qwen2": "Qwen2Config",
    "qwen2_moe": "Qwen2MoeConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "olmoe": "OlmoeConfig",
    "qwen3": "Qwen3Config",
    "phi3": "Phi3Config",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "gemma3": "Gemma3Config",
    "gemma4_text": "Gemma4TextConfig",
    "gemma4": "Gemma4Config",
    "olmo2": "Olmo2Config",
    "gpt2": "GPT2Config",
    "gpt_neox": "GPTNeoXConfig",
    "gpt_oss": "GptOssConfig",
    "bloom": "BloomConfig",
    "mpt": "MptConfig",
}
FIELDS = {family.name: family.fields for family in FAMILIES.values()}


def unlisted(known: FamilyFields, fields: dict[str, Any]) -> set[str]:
    names = {name for name in fields if name not in known.known() and name != "_name_or_path"}
    for name, inner in known.nested.items():
        if isinstance(fields.get(name), dict):
            names |= {f"{name}.{one}" for one in unlisted(inner, fields[name])}
    return names


def test_every_family_has_a_class():
    assert FIELDS.keys() == CLASSES.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_of_transformers_is_known(name):
    config = getattr(transformers, CLASSES[name])()
    fields = config.to_dict()
    assert unlisted(FIELDS[name], fields) == set()
    assert unlisted(FIELDS[name], dict(config.attribute_map)) == set()
    assert unknown_fields(FIELDS[name], config.to_diff_dict()) == []
    assert config.model_type in FIELDS


@pytest.mark.parametrize("name", CLASSES)
def test_defaults_of_transformers_are_not_refused(name):
    check_fields(FIELDS[name], getattr(transformers, CLASSES[name])().to_dict(), name)
