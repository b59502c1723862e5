"""The tokenizer of a server, as files for gateways that encode and decode themselves.

A ZIP archive of tokenizer.json, tokenizer_config.json (special tokens and chat template) and config.json. They are made
from what was loaded, so they say what the server does, whatever file it came from (GGUF, vocab.json) and whatever was
chosen at start (``--tokenizer``, ``--chat-template``). Equal contents give equal bytes.
"""

import contextlib
import io
import json
import zipfile
from typing import Any

from apt_jax.frontend.components import EngineComponents
from apt_jax.text.tokenizer import Tokenizer, tokenizer_config

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a ZIP archive can hold


def tokenizer_bundle(parts: EngineComponents) -> bytes | None:
    """The archive; None: the model has no tokenizer."""
    if parts.tokenizer is None:
        return None
    settings = _settings(parts.tokenizer)
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    settings["model_max_length"] = parts.limits.max_model_len
    settings.pop("chat_template", None)
    if parts.chat_template is not None:
        settings |= parts.chat_template.special_tokens
        settings["chat_template"] = parts.chat_template.source
    files = {
        "tokenizer.json": parts.tokenizer.backend.to_str(),
        "tokenizer_config.json": json.dumps(settings),
        "config.json": json.dumps(dict(parts.hf_config)),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), text, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _settings(tokenizer: Tokenizer) -> dict[str, Any]:
    path = tokenizer.path
    if path is None:
        return {}
    if path.is_dir():
        settings = tokenizer_config(path)
        settings.pop("auto_map", None)  # names code, which must not be run
        return settings
    from apt_jax.models.loading.gguf.file import GgufFile
    from apt_jax.models.loading.gguf.tokenizer import gguf_special_tokens

    with contextlib.closing(GgufFile(path)) as file:
        return dict(gguf_special_tokens(file))
