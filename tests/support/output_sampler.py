"""Outputs drawn at random under the masks of a constraint, by a tokenizer with one token a byte."""

import dataclasses
import json
from random import Random
from typing import Any

import numpy as np

from apt_jax.request import StructuredOutputsParams, TokenConstraint
from apt_jax.structured.compiler import GrammarCompiler
from apt_jax.validation.structured import checked_structured_outputs
from tests.support.toy_serving import byte_tokenizer

_CLOSING = b'"]}'
_JSON = ['"a":', '"b":', ",", "{", "}", "[", "]", "0", "-1", "1.5", "null", "true", '""', "{}", "[]", "\\n", ":"]
_HURRY = 60
"""Steps after which what ends strings, arrays and objects is preferred."""


@dataclasses.dataclass(frozen=True)
class Output:
    """One output.

    Attributes:
        text: as far as it came.
        is_complete: it may end there.
    """

    text: bytes
    is_complete: bool


class OutputSampler:
    """Draws outputs. Close it."""

    def __init__(self) -> None:
        tokenizer = byte_tokenizer()
        self._eos, self._size = 2, tokenizer.vocab_size
        self._compiler = GrammarCompiler(tokenizer, vocab_size=self._size, eos_token_ids=[self._eos])
        pieces = tokenizer.continuations.pieces(self._size)
        self._ids = [pieces.index(bytes([byte])) for byte in range(256)]
        self._bytes = {token: byte for byte, token in enumerate(self._ids)}

    def close(self) -> None:
        self._compiler.close()

    def start(self, schema: object) -> TokenConstraint:
        """A constraint at its beginning. Raises InvalidRequestError: the schema is refused."""
        wanted = StructuredOutputsParams(json=schema, disable_any_whitespace=True)  # type: ignore[arg-type]  # checked
        checked = checked_structured_outputs(wanted)
        assert checked is not None
        return self._compiler.compile(checked).start()

    def allowed(self, constraint: TokenConstraint) -> set[int]:
        """Tokens that may come next."""
        row = np.zeros(-(-self._size // 32), np.int32)
        if constraint.ended or not constraint.fill_mask(row):
            return {self._eos}
        return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())

    def accepts(self, schema: object, text: str) -> bool | int:
        """True: a whole output; False: the beginning of one; else how many bytes are."""
        constraint = self.start(schema)
        for count, byte in enumerate(text.encode()):
            if self._ids[byte] not in self.allowed(constraint):
                return count
            constraint.accept(self._ids[byte])
        return self._eos in self.allowed(constraint)

    def sample(self, schema: object, random: Random, max_tokens: int = 250) -> Output:
        """Draw an output: any tokens that are allowed, and often pieces of the schema, with and without escapes.

        Raises:
            GrammarError: the output cannot go on.
        """
        constraint, pieces, text = self.start(schema), _pieces(schema), bytearray()
        while len(text) < max_tokens:
            allowed = self.allowed(constraint)
            ends = self._eos in allowed
            allowed.discard(self._eos)
            if ends and (not allowed or random.random() < 0.5 or len(text) > 2 * _HURRY):
                return Output(bytes(text), True)
            drawn = random.random()
            closing = [byte for byte in _CLOSING if self._ids[byte] in allowed]
            if len(text) > _HURRY and drawn < 0.6 and closing:
                piece = bytes([random.choice(closing)])
            elif drawn < 0.75:
                piece = random.choice(pieces)
            else:
                piece = b""
            if not piece or self._ids[piece[0]] not in allowed:
                plain = [byte for token in sorted(allowed) if 32 <= (byte := self._bytes[token]) < 127]
                usual = plain and random.random() < 0.9
                piece = bytes([random.choice(plain if usual else [self._bytes[t] for t in sorted(allowed)])])
            for byte in piece:
                if len(piece) > 1 and self._ids[byte] not in self.allowed(constraint):
                    break
                constraint.accept(self._ids[byte])
                text.append(byte)
        return Output(bytes(text), False)


def _pieces(schema: Any) -> list[bytes]:
    found = list(_JSON)
    stack = [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for name, value in item.items():
                found.append(f"{json.dumps(name)}:")
                if name:
                    found.append(f'"\\u{ord(name[0]):04x}{json.dumps(name[1:])[1:]}:')
                stack.append(value)
        elif isinstance(item, list):
            stack += item
        else:
            found += [json.dumps(item), json.dumps(item, ensure_ascii=False)]
    return [piece.encode() for piece in found]
