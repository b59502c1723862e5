"""Interface through which commands complete prompts with an engine in this process or with a server."""

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from apt_jax.text.chat import Message
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb

SLO_FIELDS = ("slo_class", "slo_ttft_ms", "slo_tbt_ms", "slo_e2e_ms")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextChunk:
    """New text of a completion; the last chunk has a `finish`."""

    text: str
    finish: pb.Finish | None = None


def without_slo(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the fields of a request into fields of `SamplingParams` and SLO fields (`SLO_FIELDS`)."""
    sampling = {name: value for name, value in fields.items() if name not in SLO_FIELDS}
    return sampling, {name: fields.get(name) for name in SLO_FIELDS}


class Completer(Protocol):
    """Completes text prompts, and conversations if `has_chat` is true."""

    @property
    def has_chat(self) -> bool:
        """True if there is a chat template; `stream` then also accepts messages."""
        ...

    def stream(self, prompt: str | Sequence[Message], **fields: Any) -> AsyncGenerator[TextChunk]:
        """Complete a text or a conversation; `fields` come from `serve.cli.options.request_fields`."""
        ...

    async def max_model_len(self) -> int: ...
