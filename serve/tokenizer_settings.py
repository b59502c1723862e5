"""Settings of a server's tokenizer in the format of tokenizer_config.json: special tokens, chat template and others.

They come from the loaded tokenizer and template, so they match the running server for every file format (GGUF,
vocab.json) and with all flags (``--tokenizer``, ``--chat-template``).
"""

import contextlib
from typing import Any

from apt_jax.frontend.components import EngineComponents
from apt_jax.text.tokenizer import Tokenizer, tokenizer_config


def tokenizer_settings(parts: EngineComponents) -> dict[str, Any] | None:
    """Return the tokenizer's settings; None: the model has no tokenizer."""
    if parts.tokenizer is None:
        return None
    settings = _stored(parts.tokenizer)
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    settings["model_max_length"] = parts.limits.max_model_len
    settings.pop("chat_template", None)
    if parts.chat_template is not None:
        settings |= parts.chat_template.special_tokens
        settings["chat_template"] = parts.chat_template.stored
    return settings


def _stored(tokenizer: Tokenizer) -> dict[str, Any]:
    path = tokenizer.path
    if path is None:
        return {}
    if path.is_dir():
        settings = tokenizer_config(path)
        settings.pop("auto_map", None)  # names code that must not be run
        return settings
    from apt_jax.models.loading.gguf.file import GgufFile
    from apt_jax.models.loading.gguf.tokenizer import gguf_special_tokens

    with contextlib.closing(GgufFile(path)) as file:
        return dict(gguf_special_tokens(file))
