"""The plan of an output: the constraint on it, and the parser of its text."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from serve.http_api.tool_calls.events import OutputParser, PlainText


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """How the outputs of one call are sampled and read."""

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `SamplingParams`, raw, in place of those of the body."""
    parser: Callable[[], OutputParser] = PlainText
    """Makes the parser of one output."""
    is_plain: bool = True
    """The text is content alone."""
