"""The contract of parsers of a model's text: pieces of text in, events out."""

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class ContentText:
    """More content."""

    text: str


@dataclasses.dataclass(frozen=True)
class ReasoningText:
    """More reasoning before the content."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallStart:
    """A call of a function begins; its arguments follow."""

    index: int
    """0 for the first call of the output, then 1, and so on."""
    id: str
    """Id of the call, for the message with its result."""
    name: str
    """Name of the function."""


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """More of the arguments of the call that began last, JSON text."""

    index: int
    text: str


OutputEvent = ContentText | ReasoningText | CallStart | CallArguments


class OutputParser(Protocol):
    """Reads the text of one output. However the text is divided into pieces, the events say the same: pieces of one kind
    that follow each other only add up differently. All text comes out again, except for the marks of calls and of
    reasoning, and for whitespace beside them."""

    def push(self, text: str, finished: bool) -> list[OutputEvent]:
        """Take more text, in order.

        Args:
            text: may be empty.
            finished: it is the last one; everything that was held back comes out.
        """
        ...


class PlainText:
    """The parser of outputs that are only content."""

    def push(self, text: str, finished: bool) -> list[OutputEvent]:
        del finished
        return [ContentText(text)] if text else []
