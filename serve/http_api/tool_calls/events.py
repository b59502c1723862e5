"""The interface of the parsers that turn a model's output into events."""

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class ContentText:
    """A piece of content."""

    text: str


@dataclasses.dataclass(frozen=True)
class ReasoningText:
    """A piece of the reasoning before the content."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallStart:
    """The start of a function call; its arguments follow."""

    index: int
    """Index of the call in the output, from 0."""
    id: str
    """Id of the call, which the message with its result repeats."""
    name: str
    """Name of the function."""


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of the current call, as JSON text."""

    index: int
    text: str


OutputEvent = ContentText | ReasoningText | CallStart | CallArguments


class OutputParser(Protocol):
    """Parses the text of one output.

    The events contain all text, except the marks of calls and reasoning, whitespace around these marks, and calls that
    are dropped because they are repeated or cut off. How the text is split into pieces affects only how consecutive
    events of the same kind are split.
    """

    def push(self, text: str, finished: bool) -> list[OutputEvent]:
        """Process the next piece of text, and return its events.

        Args:
            text: the next piece; may be empty.
            finished: whether this is the last piece, after which no text may be held back.
        """
        ...


class PlainText:
    """The parser of outputs that are only content."""

    def push(self, text: str, finished: bool) -> list[OutputEvent]:
        del finished
        return [ContentText(text)] if text else []
