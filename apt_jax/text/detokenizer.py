"""Text from token ids as they come, and stop strings within it."""

import codecs
import logging
from collections.abc import Sequence

from apt_jax.text.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)


class IncrementalDetokenizer:
    """Tokens to text, a token at a time.

    For every sequence of tokens, the pieces that `push` returns, and last `flush`'s, joined, equal
    `Tokenizer.decode` of all of them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Without byte-level pieces: text comes from decoding a window of ids again.
        self._ids: list[int] = []
        self._window_start = 0
        self._window_read = 0

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; empty while a character lacks bytes."""
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(self._tokenizer.piece(token_id))
        self._ids.append(token_id)
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None or _is_byte_fallback(token):
            return ""  # runs of single bytes are decoded as a whole
        return self._advance()

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for bytes that never became a character."""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._advance()

    def _advance(self) -> str:
        before = self._decode(self._window_start, self._window_read)
        now = self._decode(self._window_start, len(self._ids))
        self._window_start, self._window_read = self._window_read, len(self._ids)
        return now[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip_special)


def _is_byte_fallback(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


class _Matcher:
    """Knuth-Morris-Pratt: how much of one stop string the text so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fail = [0] * len(pattern)
        k = 0
        for i in range(1, len(pattern)):
            while k and pattern[i] != pattern[k]:
                k = self._fail[k - 1]
            k += pattern[i] == pattern[k]
            self._fail[i] = k

    def feed(self, char: str) -> bool:
        """True when the text now ends with the whole pattern; `matched` is then its longest proper prefix."""
        k, pattern = self.matched, self.pattern
        while k and char != pattern[k]:
            k = self._fail[k - 1]
        k += char == pattern[k]
        if k == len(pattern):
            self.matched = self._fail[k - 1]
            return True
        self.matched = k
        return False


class StopChecker:
    """Finds the first stop string in text that arrives in pieces.

    The text ends at the first character that completes a stop string; of several completed by the same character the
    longest counts. Where the borders of the pieces fall makes no difference.

    Args:
        stop: stop strings, none empty.
        include_in_output: keep the matched string at the end of the text.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        # Longest first: the first one that a character completes is the one that counts.
        self._matchers = [_Matcher(s) for s in sorted(stop, key=len, reverse=True)]
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, *, may_match: bool = True) -> tuple[str, str | None]:
        """Take the next piece.

        Args:
            text: the piece.
            may_match: False: a stop string that ends within this piece does not count (`min_tokens`).

        Returns:
            Text that is settled and may be shown, and the stop string that was found; after one, push no more.
        """
        if not self._matchers:
            return text, None
        pending = self._held + text
        for index, char in enumerate(text):
            found: str | None = None
            for matcher in self._matchers:
                if matcher.feed(char) and found is None:
                    found = matcher.pattern
            if found is not None and may_match:
                end = len(self._held) + index + 1
                self._held = ""
                return pending[: end if self._include else end - len(found)], found
        keep = max(matcher.matched for matcher in self._matchers)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def flush(self) -> str:
        """Text kept back that became no stop string after all."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """The text of one output sequence: detokenised, and cut at a stop string.

    Attributes:
        stop: the stop string that ended it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._checker = StopChecker(stop, include_in_output=include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._unread: list[str] = []
        self._flushed = False
        self.stop: str | None = None

    def push(self, token_id: int) -> str | None:
        """Take the next token; returns the stop string that it completes. Tokens after one are ignored."""
        self._num_tokens += 1
        if self.stop is not None:
            return None
        text = self._detokenizer.push(token_id)
        if text:
            shown, self.stop = self._checker.push(text, may_match=self._num_tokens >= self._min_tokens)
            if shown:
                self._unread.append(shown)
        return self.stop

    def take(self, *, final: bool = False) -> str:
        """Text settled since the last call; with `final` also what was kept back. Nothing is looked for in that."""
        if final and not self._flushed:
            self._flushed = True
            if self.stop is None:
                self._unread += [self._checker.flush(), self._detokenizer.flush()]
        text = "".join(self._unread)
        self._unread.clear()
        return text
