"""Registry of model families: the adapter of each published architecture.

To add a family, add one file to this package and one line here.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from apt_jax.models.checkpoint_map import ModelFamily
from apt_jax.models.families import (
    bloom,
    deepseek,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gpt2,
    gpt_neox,
    gpt_oss,
    llama,
    minicpm3,
    mistral,
    mixtral,
    mpt,
    olmo2,
    olmoe,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen_moe,
    smollm3,
)

FAMILIES: dict[str, ModelFamily] = {
    "OPTForCausalLM": opt.FAMILY,
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "MinistralForCausalLM": dataclasses.replace(mistral.FAMILY, name="ministral", presets={}),
    "Ministral3ForCausalLM": mistral.MINISTRAL3,
    "Mistral3ForConditionalGeneration": mistral.TEXT_OF_FAMILY_WITH_IMAGES,
    "SmolLM3ForCausalLM": smollm3.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen2MoeForCausalLM": qwen_moe.QWEN2,
    "Qwen3MoeForCausalLM": qwen_moe.QWEN3,
    "MixtralForCausalLM": mixtral.FAMILY,
    "DeepseekV2ForCausalLM": deepseek.V2,
    "DeepseekV3ForCausalLM": deepseek.V3,
    "Glm4MoeLiteForCausalLM": deepseek.GLM,
    "MiniCPM3ForCausalLM": minicpm3.FAMILY,
    "Phi3ForCausalLM": phi3.FAMILY,
    "GemmaForCausalLM": gemma.FAMILY,
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "Gemma3ForConditionalGeneration": gemma3.TEXT_OF_FAMILY_WITH_IMAGES,
    "Gemma4ForCausalLM": gemma4.FAMILY,
    "Gemma4ForConditionalGeneration": gemma4.TEXT_OF_FAMILY_WITH_IMAGES,
    "Olmo2ForCausalLM": olmo2.FAMILY,
    "OlmoeForCausalLM": olmoe.FAMILY,
    "GptOssForCausalLM": gpt_oss.FAMILY,
    "GPT2LMHeadModel": gpt2.FAMILY,
    "GPTNeoXForCausalLM": gpt_neox.FAMILY,
    "BloomForCausalLM": bloom.FAMILY,
    "MptForCausalLM": mpt.FAMILY,
}
"""Adapter for each architecture name in ``config.json``."""

_OTHER_NAMES = {"MPTForCausalLM": "MptForCausalLM", "LLaMAForCausalLM": "LlamaForCausalLM"}
FAMILIES |= {old: FAMILIES[name] for old, name in _OTHER_NAMES.items()}

MODEL_TYPES: dict[str, str] = {
    family.name: architecture for architecture, family in FAMILIES.items() if architecture not in _OTHER_NAMES
}
"""Architecture for each ``model_type``, for configurations that do not name an architecture."""

PRESETS: dict[str, Mapping[str, Any]] = {
    name: fields for family in FAMILIES.values() for name, fields in family.presets.items()
}
