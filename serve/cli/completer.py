"""The contract of the commands' completers of prompts: an engine in this process, or a server."""

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from apt_jax.text.chat import Message
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextChunk:
    """New text of a completion; the last piece has a `finish`."""

    text: str
    finish: pb.Finish | None = None


class Completer(Protocol):
    """Completes texts, and conversations if `has_chat`."""

    @property
    def has_chat(self) -> bool:
        """True if there is a chat template, so that `stream` takes messages too."""
        ...

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        slo_class: str | None = None,
        slo_ttft_ms: float | None = None,
        slo_tbt_ms: float | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[TextChunk]: ...

    async def max_model_len(self) -> int: ...
