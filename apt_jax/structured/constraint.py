"""Masks of running outputs, from copies of a compiled grammar that share a lexer.

A mask that would take too long fails only its request: llguidance limits lexer states, parser items and work per step
(`LIMITS`). Copies share one lexer, whose states accumulate over all outputs of a grammar. After many masks the grammar
is compiled again for later outputs. If the lexer becomes full before that, each output continues with its own lexer
(`MatcherSource`).

Numbers in JSON are bounded: after `MAX_DIGITS` digits in a row, another digit is not allowed if the number may end.
"""

import dataclasses
import functools
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.errors import AptJaxError
from apt_jax.request import TokenConstraint
from apt_jax.structured.forms import FIELD, has_json

LIMITS: Mapping[str, int | bool] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,  # 7 ms
    "step_max_items": 25_000,  # 1 ms
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
"""`llguidance.LLParserLimits`: limits of one grammar and of one step."""

MAX_DIGITS = 20
"""Maximum number of consecutive digits of a number in JSON: enough for 64-bit integers and doubles."""
_DIGITS = b"0123456789"
_AFTER_DIGITS = _DIGITS + b".eE,]} \t\r\n"
"""Bytes that may follow a digit of a number in JSON."""
_STACK_BYTES = 64 << 20
MEMORY_LEFT_BYTES = _STACK_BYTES + (64 << 20)
"""Free memory required for a compilation, including its stack."""
_STACK_SIZE = threading.Lock()  # the stack size is a setting of the whole process
_WORN_MASKS = 5_000
"""Number of masks after which a grammar is compiled again for later requests, which frees its lexer's memory."""
_OWN_LEXER_LIMIT_S = 0.02
"""Maximum compile time of a grammar, in seconds, for which an output may get its own lexer; the compilation blocks the
engine thread."""


class GrammarError(AptJaxError):
    """A constraint cannot continue; the message is for users."""


class NoTokenLeftError(GrammarError):
    """The restrictions of a request exclude every token.

    Args:
        field: field that excludes the last remaining token.
    """

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: allows no token here that the rest of the request also allows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer in llguidance's format, and the tokens that end an output."""

    tokenizer: Any
    """`llguidance.LLTokenizer`."""
    tokens: Sequence[bytes]
    """Bytes that each token adds to a text, or the name of a special token."""
    their_eos: tuple[int, ...]
    """Ids that llguidance treats as ends of an output."""
    our_eos: tuple[int, ...]
    """Ids of the model's vocabulary that end an output."""
    num_words: int
    """Number of 32-bit words in a mask that llguidance writes; ids beyond the model's vocabulary are not sampled."""

    @functools.cached_property
    def digits(self) -> NDArray[np.uint32]:
        """Mask of tokens that begin with a digit."""
        return self._beginning_with(_DIGITS)

    @functools.cached_property
    def after_digits(self) -> NDArray[np.uint32]:
        """Mask of tokens that may follow a digit of a number in JSON, judged by their first byte."""
        return self._beginning_with(_AFTER_DIGITS)

    def _beginning_with(self, first: bytes) -> NDArray[np.uint32]:
        bits = np.zeros(32 * self.num_words, np.uint8)
        bits[: len(self.tokens)] = [token != b"" and token[0] in first for token in self.tokens]
        return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


class MatcherSource:
    """Makes copies of a compiled grammar that share a lexer, and replaces the lexer when it has been used for many
    masks or is full.

    Args:
        vocabulary: vocabulary of the model.
        text: the grammar in llguidance's notation; it has passed its trial.
    """

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self.num_masks = 0
        """Approximate number of masks made with the current lexer."""
        self.is_full = False
        """True if the current lexer has reached its limit."""
        self.vocabulary, self._text = vocabulary, text
        self.bounds_numbers = has_json(text)
        """True if numbers are limited to about `MAX_DIGITS` consecutive digits."""
        self._lock = threading.Lock()
        started = time.monotonic()
        self._root = new_matcher(vocabulary, text)
        self._compile_s = time.monotonic() - started

    @property
    def error(self) -> str | None:
        return error_line(self._root.get_error()) if self._root.is_error() else None

    def copy(self) -> Any:
        """Return a matcher at the start of an output."""
        with self._lock:
            return self._root.deep_copy()

    def alone(self) -> Any:
        """Return a matcher with its own lexer at the start of an output; None if compiling would take too long."""
        self.is_full = True
        if self._compile_s > _OWN_LEXER_LIMIT_S:
            return None
        return new_matcher(self.vocabulary, self._text)

    @property
    def is_worn(self) -> bool:
        """True if the lexer has made many masks or is full."""
        return self.num_masks > _WORN_MASKS or self.is_full

    def renew_if_worn(self) -> None:
        """Compile the grammar again if its lexer is worn. Do not call this in the engine thread."""
        if self.is_worn:
            self.num_masks, self.is_full = 0, False
            root = new_matcher(self.vocabulary, self._text)
            with self._lock:
                self._root = root


class LLConstraint:
    """A `TokenConstraint` over one `llguidance.LLMatcher`."""

    def __init__(self, source: MatcherSource, ends_at_eos: bool) -> None:
        self._source, self._vocabulary, self._ends_at_eos = source, source.vocabulary, ends_at_eos
        self.matcher = source.copy()
        self._tokens: list[int] = []
        self._num_digits = 0
        """Number of digits at the end of the output."""
        self._is_alone = False

    @property
    def ended(self) -> bool:
        return self.matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        while not self.matcher.consume_token(token_id):
            self._go_on_or_raise()
        self._tokens.append(token_id)
        if self._source.bounds_numbers:
            text = self._vocabulary.tokens[token_id]
            before = text.rstrip(_DIGITS)
            self._num_digits = len(text) - len(before) + (0 if before else self._num_digits)

    def fill_mask(self, row: NDArray[np.int32]) -> bool:
        self._compute(row)
        return self.check_mask(row)

    def check_mask(self, row: NDArray[np.int32]) -> bool:
        """Complete a mask that llguidance has written to `row`; see `fill_mask`."""
        while self.matcher.is_error():
            self._go_on_or_raise()
            self._compute(row)
        self._source.num_masks += 1
        words = row.view(np.uint32)
        may_end = self.matcher.is_accepting()
        for token in self._vocabulary.their_eos:
            words[token >> 5] &= ~np.uint32(1 << (token & 31))
        if not words.any():
            if may_end:
                return False
            raise NoTokenLeftError(FIELD)
        may_end = may_end and self._ends_at_eos
        if self._num_digits >= MAX_DIGITS:
            self._end_number(words, may_end)
        if may_end:
            for token in self._vocabulary.our_eos:
                words[token >> 5] |= np.uint32(1 << (token & 31))
        return True

    def _end_number(self, words: NDArray[np.uint32], may_end: bool) -> None:
        """Exclude tokens that begin with a digit, if the output is within a number that may end here."""
        words = words[: self.num_words]
        if (words & ~self._vocabulary.after_digits[: words.size]).any():
            return  # within a string
        rest = words & ~self._vocabulary.digits[: words.size]
        if may_end or rest.any():
            words[:] = rest

    @property
    def num_words(self) -> int:
        """Number of words in a mask that llguidance writes; a row holds the first words, those of the model's
        vocabulary."""
        return self._vocabulary.num_words

    def _compute(self, row: NDArray[np.int32]) -> None:
        mask = row if self.num_words <= row.size else np.zeros(self.num_words, np.int32)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if mask is not row:
            row[:] = mask[: row.size]

    def _go_on_or_raise(self) -> None:
        """After an error, continue with a separate lexer if the shared lexer of the grammar is full.

        Raises:
            GrammarError: the error has another cause, the full lexer was already this output's own, or compiling the
            grammar for a separate lexer would take too long.
        """
        error = self.matcher.get_error()
        if error.startswith("NoExtension"):  # a vocabulary of words has no word that fits
            raise NoTokenLeftError(FIELD)
        own = None
        if error.startswith("lexer error") and not self._is_alone:
            own = self._source.alone()
        if own is None:
            raise GrammarError(error_line(error))
        self.matcher, self._is_alone = own, True
        if self._tokens and not own.consume_tokens(self._tokens):
            raise GrammarError(error_line(own.get_error()))


class MaskFiller:
    """Fills the masks of a step, in parallel if there are enough cores and rows."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = max(1, (os.cpu_count() or 1) - 1) if num_threads is None else num_threads
        self._executor: Any = None

    def __call__(
        self, constraints: Sequence[TokenConstraint], masks: NDArray[np.int32], rows: Sequence[int]
    ) -> list[bool | Exception]:
        """Fill ``masks[rows[i]]`` for ``constraints[i]``; return the result or exception of each `fill_mask`."""
        alone = self._num_threads < 2 or len(constraints) < 4
        if alone or not all(isinstance(c, LLConstraint) for c in constraints):
            return fill_one_by_one(constraints, masks, rows)
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=self._num_threads)
        ours = [c for c in constraints if isinstance(c, LLConstraint)]
        pairs = [(c.matcher, row) for c, row in zip(ours, rows, strict=True)]
        num_words = max(c.num_words for c in ours)
        wide = masks if num_words <= masks.shape[1] else np.zeros((masks.shape[0], num_words), np.int32)
        self._executor.unsafe_compute_mask_ptr(pairs, wide.ctypes.data, wide.strides[0], wide.shape[0])
        if wide is not masks:
            masks[list(rows)] = wide[list(rows), : masks.shape[1]]
        return [_outcome(c.check_mask, masks[row]) for c, row in zip(ours, rows, strict=True)]


def fill_one_by_one(
    constraints: Sequence[TokenConstraint], masks: NDArray[np.int32], rows: Sequence[int]
) -> list[bool | Exception]:
    """Fill ``masks[rows[i]]`` for ``constraints[i]``; return the result or exception of each `fill_mask`."""
    return [_outcome(c.fill_mask, masks[row]) for c, row in zip(constraints, rows, strict=True)]


def _outcome(fill: Any, row: NDArray[np.int32]) -> bool | Exception:
    try:
        return fill(row)
    except Exception as error:
        return error


def new_matcher(vocabulary: Vocabulary, text: str) -> Any:
    """Return a matcher at the start of an output; it is in an error state if the grammar could not be compiled."""
    from llguidance import LLMatcher, LLParserLimits

    def make() -> Any:
        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]  # by name
        root = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        if not root.is_error():
            root.compute_bitmask()  # copies inherit the lexer states that this builds
        return root

    return _in_deep_thread(make)


def _in_deep_thread(function: Any) -> Any:
    """Run a function in a thread with a larger stack than the child's, which no grammar that compiled in the child can
    overflow."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(function()), name="apt-jax-grammar")
    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if not result:
        raise RuntimeError("a grammar that had passed its trial could not be compiled")
    return result[0]


def error_line(message: str, most: int = 240) -> str:
    """Return an error message of llguidance as one line, with advice."""
    text = " ".join(re.split("<state>|<backtrace>|<non-verbose/>", message)[0].split())
    text = text.replace("json-schema:///", "")
    _, inline, of_schema = text.partition("failed to compile JSON schema: ")
    if inline:  # in a grammar, whose numbered lines follow
        text = re.split(r" \d+ \| ", of_schema)[0]
    if text.startswith("NoExtension"):
        text = "unsatisfiable: no text matches it"
    elif "Unimplemented keys" in text:
        text += "; leave out these keywords or express the same with others"
    elif re.search("limit|max is|too (many|complex|big)", text, re.IGNORECASE):
        text += "; make it smaller or less ambiguous"
    elif text.startswith("panic"):
        text = "too large for the compiler; make it smaller"
    return text if len(text) <= most else f"{text[: most - 3]}..."
