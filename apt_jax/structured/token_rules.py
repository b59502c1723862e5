"""Masks for requests that allow only part of the vocabulary, or forbid sequences of tokens.

As in vLLM, `allowed_token_ids` is a whitelist that also covers end tokens. The last token of each of `bad_words` is
forbidden if the output ends with the preceding tokens of the word. Both can be combined with structured output.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.request import EngineRequest, TokenConstraint
from apt_jax.structured.constraint import NoTokenLeftError


def start_constraint(request: EngineRequest) -> TokenConstraint | None:
    """Return the constraint of a request at the start of its output; None if all tokens are always allowed."""
    inner = None if request.grammar is None else request.grammar.start()
    if not request.has_token_rules:
        return inner
    return RestrictedConstraint(inner, request.params.allowed_token_ids, request.bad_words_token_ids)


class RestrictedConstraint:
    """A `TokenConstraint` that removes tokens from the masks of another constraint.

    Args:
        inner: the other constraint; None: every token is allowed.
        allowed: allowed ids; None: all.
        bad_words: sequences of ids that the output must not contain.
    """

    def __init__(
        self, inner: TokenConstraint | None, allowed: Sequence[int] | None, bad_words: Sequence[Sequence[int]]
    ) -> None:
        self._inner = inner
        self._allowed = None if allowed is None else np.asarray(allowed, np.int64)
        self._allowed_words: NDArray[np.int32] | None = None
        self._bad_words = [(tuple(ids[:-1]), ids[-1]) for ids in bad_words]
        self._longest = max((len(before) for before, _ in self._bad_words), default=0)
        self._last: tuple[int, ...] = ()
        """The last tokens of the output, as many as the bad words need."""

    @property
    def ended(self) -> bool:
        return self._inner is not None and self._inner.ended

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        if self._longest:
            self._last = (*self._last, token_id)[-self._longest :]

    def fill_mask(self, row: NDArray[np.int32]) -> bool:
        if self._inner is None:
            row.fill(-1)
        elif not self._inner.fill_mask(row):
            return False
        if self._allowed is not None:
            row &= self._mask_of_allowed(len(row))
        words = row.view(np.uint32)
        for before, last in self._bad_words:
            if not before or self._last[-len(before) :] == before:
                words[last >> 5] &= ~np.uint32(1 << (last & 31))
        if not words.any():
            raise NoTokenLeftError("bad_words" if self._allowed is None else "allowed_token_ids")
        return True

    def _mask_of_allowed(self, num_words: int) -> NDArray[np.int32]:
        assert self._allowed is not None
        if self._allowed_words is None or len(self._allowed_words) != num_words:
            bits = np.zeros(32 * num_words, np.uint8)
            bits[self._allowed] = 1
            self._allowed_words = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)
        return self._allowed_words
