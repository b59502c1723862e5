"""The server's tokenizer as an archive, for gateways that tokenize and detokenize themselves.

It is a ZIP archive of tokenizer.json, tokenizer_config.json (`serve.tokenizer_settings`) and config.json, made from the
loaded tokenizer and model configuration. The same contents always give the same bytes.
"""

import io
import json
import zipfile

from apt_jax.frontend.components import EngineComponents
from serve.tokenizer_settings import tokenizer_settings

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a ZIP archive can hold


def tokenizer_bundle(parts: EngineComponents) -> bytes | None:
    """Return the ZIP archive of the tokenizer; None if the model has no tokenizer."""
    settings = tokenizer_settings(parts)
    if parts.tokenizer is None or settings is None:
        return None
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
