"""The text model in checkpoints that also have a vision encoder, which is not loaded: images are not supported."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from apt_jax.errors import ModelLoadError
from apt_jax.models.checkpoint_map import NORM_BUFFERS, ModelFamily
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import shown
from apt_jax.models.known_fields import FamilyFields

_OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
"""Fields that are read beside ``text_config``, which may have them too."""


def text_family(
    family: ModelFamily,
    name: str,
    *,
    model_config: Callable[[Mapping[str, Any], int | None], ModelConfig],
    presets: Mapping[str, Mapping[str, Any]],
    ignored: frozenset[str],
) -> ModelFamily:
    """Return the family of checkpoints with images whose text model is of `family`.

    Args:
        name: ``model_type`` of the whole model.
        model_config: function from the fields of ``text_config`` to the shape of the text model.
        ignored: fields beside ``text_config`` that have no effect on text.
    """

    def config(fields: Mapping[str, Any], max_len: int | None = None) -> ModelConfig:
        text = fields.get("text_config")
        if not isinstance(text, Mapping):
            raise ModelLoadError(
                f"config.json: text_config={shown(text, 60)} must be an object, the fields of the text model"
            )
        outer = {name: fields[name] for name in _OUTER if name in fields}
        return dataclasses.replace(model_config(outer | dict(text), max_len), family=name)

    def strip_prefixes(tensor: str) -> str:
        return family.strip_prefix(family.strip_prefix(tensor).removeprefix("language_model."))

    return dataclasses.replace(
        family,
        name=name,
        presets=presets,
        model_config=config,
        fields=FamilyFields(
            read=frozenset(), ignored=ignored | {"vision_config"}, nested={"text_config": family.fields}
        ),
        strip_prefix=strip_prefixes,
        ignored_tensors=re.compile(
            rf"{NORM_BUFFERS.pattern}|^(vision_tower|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
        ),
    )
