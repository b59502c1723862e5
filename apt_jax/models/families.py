"""Which mapping file loads which published architecture. A new family is one file beside this one and one line here."""

from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

from apt_jax.config import ModelConfig
from apt_jax.models import opt


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
    def IGNORED_TENSORS(self) -> frozenset[str]:
        """Bare names of stored tensors that nothing needs."""
        ...

    def model_config(self, fields: Mapping[str, Any], /) -> ModelConfig: ...

    def tensor_name(self, leaf: str, /) -> str: ...

    def tensor_shape(self, leaf: str, shape: tuple[int, ...], /) -> tuple[int, ...]: ...

    def constant_leaf(self, leaf: str, fields: Mapping[str, Any], /) -> float | None: ...

    def bare_name(self, name: str, /) -> str: ...


FAMILIES: dict[str, Family] = {"OPTForCausalLM": cast(Family, opt)}
"""Mapping files by the architecture name in ``config.json``."""

MODEL_TYPES: dict[str, str] = {"opt": "OPTForCausalLM"}
"""Architectures by ``model_type``, for a configuration that names no architecture."""

PRESETS: dict[str, Mapping[str, Any]] = {
    name: fields for family in FAMILIES.values() for name, fields in family.PRESETS.items()
}

__all__ = ["FAMILIES", "MODEL_TYPES", "PRESETS", "Family"]
