"""Response bodies of Ollama's ``/api/tags``, ``/api/ps``, ``/api/show`` and ``/api/version``."""

import datetime
import hashlib
from typing import Any

from apt_jax.frontend.components import EngineComponents
from apt_jax.text.fill_in_middle import fills_in_middle
from serve.compact_json import json_bytes
from serve.generate_call import require_served_model
from serve.http_api.ollama.request import ShowBody, served_name
from serve.http_api.openai_request import Body
from serve.http_api.records import read
from serve.http_api.tool_calls.reasoning import reasoning_parser_of

API_VERSION = "0.13.0"
"""Ollama version reported to clients, which check that it is recent enough."""

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Json = dict[str, Any]


def version() -> bytes:
    """Return the response body of ``/api/version``."""
    return json_bytes({"version": API_VERSION})


def tags(parts: EngineComponents, created_s: int) -> bytes:
    """Return the response body of ``/api/tags``: an entry for each name of the model and each adapter."""
    return json_bytes({"models": [_entry(parts, created_s, name) for name in _names(parts)]})


def running(parts: EngineComponents, created_s: int) -> bytes:
    """Return the response body of ``/api/ps``: the model and its adapters, which are always loaded."""
    more = {
        "expires_at": "9999-12-31T23:59:59Z",
        "size_vram": 0 if getattr(parts.executor, "platform", "cpu") == "cpu" else _size(parts),
        "context_length": parts.limits.max_model_len,
    }
    return json_bytes({"models": [_entry(parts, created_s, name) | more for name in _names(parts)]})


def show(parts: EngineComponents, body: Body) -> bytes:
    """Return the response body of ``/api/show``.

    Raises:
        InvalidRequestError: the model name is not text.
        UnknownModelError: the body names a model that the server does not serve.
    """
    name = served_name(parts, read(ShowBody, body))
    if isinstance(name, str) and name:
        require_served_model(parts, name)
    family, config = _family(parts), parts.model_config
    info: Json = {"general.architecture": family, f"{family}.context_length": parts.limits.max_model_len}
    if config is not None:
        info |= {
            f"{family}.embedding_length": config.embedding_size or config.hidden_size,
            f"{family}.block_count": config.num_layers,
            f"{family}.attention.head_count": config.num_heads,
            f"{family}.attention.head_count_kv": config.num_kv_heads,
            f"{family}.vocab_size": config.vocab_size,
        }
    template = parts.chat_template
    return json_bytes(
        {
            "modelfile": "",
            "parameters": "",
            "template": "" if template is None else template.source,
            "details": _details(parts),
            "model_info": info,
            "capabilities": capabilities(parts),
        }
    )


def capabilities(parts: EngineComponents) -> list[str]:
    """Return Ollama's names of the capabilities that the model has."""
    source = "" if parts.chat_template is None else parts.chat_template.source
    found = {
        "completion": True,
        "tools": parts.chat_template is not None,
        "insert": fills_in_middle(parts.tokenizer),
        "thinking": reasoning_parser_of(parts.config.reasoning_parser, source) is not None,
        "embedding": True,
    }
    return [name for name, is_there in found.items() if is_there]


def _names(parts: EngineComponents) -> list[str]:
    return [*parts.model_names, *parts.limits.adapters]


def _entry(parts: EngineComponents, created_s: int, name: str) -> Json:
    at = datetime.datetime.fromtimestamp(created_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    digest = hashlib.sha256(f"{parts.config.model}\n{name}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": at,
        "size": _size(parts),
        "digest": digest,
        "details": _details(parts),
    }


def _size(parts: EngineComponents) -> int:
    """Return the size of the weights in memory in bytes; 0 for an executor without a model."""
    return getattr(parts.executor, "weight_bytes", 0)


def _precision(parts: EngineComponents) -> str:
    """Return the number format of the weights in memory, as Ollama's `quantization_level`."""
    if parts.config.quantization == "gguf":
        return parts.stored[1]
    return "INT8" if parts.config.quantization == "int8" else _DTYPES.get(parts.config.dtype, "unknown")


def _family(parts: EngineComponents) -> str:
    return "unknown" if parts.model_config is None else parts.model_config.family


def _details(parts: EngineComponents) -> Json:
    family = _family(parts)
    return {
        "parent_model": "",
        "format": parts.stored[0],
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": _precision(parts),
    }
