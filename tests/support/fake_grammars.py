"""Constraints without llguidance: which tokens may follow is a hash of the grammar's text and the output so far."""

import zlib
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from apt_jax.errors import InvalidRequestError, QueueFullError
from apt_jax.request import StructuredOutputsParams
from apt_jax.structured.compiler import GrammarCompiler, PendingGrammar
from apt_jax.text.tokenizer import Tokenizer

FIRST_TOKEN = 3
"""Tokens below are special ones: never allowed."""


class FakeConstraint:
    """A `TokenConstraint` that allows about an eighth of the vocabulary, a different one at each place.

    Args:
        text: of the grammar. Outputs have 1 to 12 tokens, by its hash; ``break`` in it makes the fourth mask raise.
        vocab_size: tokens.
        breaks: False: no mask raises.

    Attributes:
        length: tokens of an output.
    """

    def __init__(self, text: str, vocab_size: int, *, breaks: bool = True) -> None:
        self._hash = zlib.crc32(text.encode())
        self._fails = breaks and "break" in text
        self._vocab_size = vocab_size
        self._tokens: list[int] = []
        self.length = 1 + self._hash % 12

    @property
    def ended(self) -> bool:
        return len(self._tokens) >= self.length

    def _allowed(self) -> NDArray[np.bool_]:
        last = self._tokens[-1] if self._tokens else 0
        ids = np.arange(self._vocab_size, dtype=np.uint64)
        mixed = (ids + np.uint64(self._hash + 97 * len(self._tokens) + last)) * np.uint64(0x9E3779B97F4A7C15)
        allowed = (mixed >> np.uint64(32)) % np.uint64(8) == 0
        allowed[:FIRST_TOKEN] = False
        allowed[FIRST_TOKEN + (self._hash + last) % (self._vocab_size - FIRST_TOKEN)] = True
        return allowed

    def accept(self, token_id: int) -> None:
        if self.ended or not self._allowed()[token_id]:
            raise AssertionError(f"token {token_id} is not allowed here")
        self._tokens.append(token_id)

    def fill_mask(self, row: NDArray[np.int32]) -> bool:
        if self._fails and len(self._tokens) >= 3:
            raise InvalidRequestError("structured_outputs", "planted: this grammar breaks")
        row[:] = 0
        if self.ended:
            return False
        bits = np.packbits(self._allowed(), bitorder="little")
        row.view(np.uint8)[: bits.size] = bits
        return True


class FakeGrammar:
    """A `Grammar` of `FakeConstraint`s."""

    def __init__(self, text: str, vocab_size: int, *, breaks: bool = True) -> None:
        self._text, self._vocab_size, self._breaks = text, vocab_size, breaks

    def start(self) -> FakeConstraint:
        return FakeConstraint(self._text, self._vocab_size, breaks=self._breaks)


_NO_TOKENS = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?")))


class FakeGrammars(GrammarCompiler):
    """Takes the place of `GrammarCompiler`: regular expressions alone, by what stands in them.

    ``bad`` is rejected, ``busy`` finds the compiler's queue full. What has been compiled is known, its errors too.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__(_NO_TOKENS, vocab_size=vocab_size, eos_token_ids=())
        self._known_texts: set[str] = set()

    def begin(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool = True) -> Any:
        assert wanted.regex is not None
        return self._known("", wanted.regex.encode(), ends_at_eos) or PendingGrammar(
            self, "", wanted.regex, wanted.regex.encode(), ends_at_eos, was_tried=False
        )

    def _known(self, field: str, key: bytes, ends_at_eos: bool) -> Any:
        text = key.decode()
        if text not in self._known_texts:
            return None
        if "bad" in text:
            raise InvalidRequestError("structured_outputs.regex", "planted: this grammar is wrong")
        return FakeGrammar(text, self._vocab_size)

    def _compile(self, field: str, text: str, key: bytes, ends_at_eos: bool) -> Any:
        if "busy" in text:
            raise QueueFullError("planted: too many new grammars are being compiled", 2.0)
        self._known_texts.add(text)
        return self._known(field, key, ends_at_eos)
