"""Which mapping file loads which published architecture. A new family is one file beside this one and one line here."""

import re
from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

from apt_jax.models.checkpoint_map import Source
from apt_jax.models.config import ModelConfig
from apt_jax.models.families import (
    bloom,
    gemma,
    gemma2,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    mpt,
    olmo2,
    opt,
    phi3,
    qwen2,
    qwen3,
)


@runtime_checkable  # the suite checks annotations at run time
class Family(Protocol):
    """What a mapping file offers."""

    @property
    def FAMILY(self) -> str:
        """Value of `ModelConfig.family`."""
        ...

    @property
    def PRESETS(self) -> Mapping[str, Mapping[str, Any]]:
        """Published sizes by name, as configuration fields; they can be run with random weights."""
        ...

    @property
    def TIED_HEAD(self) -> str:
        """Bare name of an output head that may be stored although it is tied."""
        ...

    @property
    def IGNORED_TENSORS(self) -> re.Pattern[str]:
        """Bare names of stored tensors that nothing needs."""
        ...

    def model_config(
        self, fields: Mapping[str, Any], max_len: int | None = None, /
    ) -> ModelConfig: ...

    def source(self, leaf: str, shape: tuple[int, ...], config: ModelConfig, /) -> Source: ...

    def bare_name(self, name: str, /) -> str: ...


def constant_leaf(family: Family, leaf: str, fields: Mapping[str, Any]) -> float | None:
    """The value of a leaf that a checkpoint of this configuration does not store; None: it does."""
    known = getattr(family, "constant_leaf", None)
    return None if known is None else known(leaf, fields)


FAMILIES: dict[str, Family] = {
    architecture: cast(Family, module)
    for architecture, module in {
        "OPTForCausalLM": opt,
        "LlamaForCausalLM": llama,
        "MistralForCausalLM": mistral,
        "Qwen2ForCausalLM": qwen2,
        "Qwen3ForCausalLM": qwen3,
        "Phi3ForCausalLM": phi3,
        "GemmaForCausalLM": gemma,
        "Gemma2ForCausalLM": gemma2,
        "Olmo2ForCausalLM": olmo2,
        "GPT2LMHeadModel": gpt2,
        "GPTNeoXForCausalLM": gpt_neox,
        "BloomForCausalLM": bloom,
        "MptForCausalLM": mpt,
    }.items()
}
"""Mapping files by the architecture name in ``config.json``."""

_OTHER_NAMES = {"MPTForCausalLM": "MptForCausalLM", "LLaMAForCausalLM": "LlamaForCausalLM"}
FAMILIES |= {old: FAMILIES[name] for old, name in _OTHER_NAMES.items()}

MODEL_TYPES: dict[str, str] = {
    family.FAMILY: architecture
    for architecture, family in FAMILIES.items()
    if architecture not in _OTHER_NAMES
}
"""Architectures by ``model_type``, for a configuration that names no architecture."""

PRESETS: dict[str, Mapping[str, Any]] = {
    name: fields for family in FAMILIES.values() for name, fields in family.PRESETS.items()
}

__all__ = ["FAMILIES", "MODEL_TYPES", "PRESETS", "Family", "constant_leaf"]
