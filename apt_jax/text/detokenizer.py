"""Incremental detokenization, and detection of stop strings in the text."""

from collections.abc import Sequence

from apt_jax.text.tokenizer import TokenIds, Tokenizer

_PROMPT_TAIL = 16
"""Number of prompt tokens that are read: enough for the bytes of one character and some special tokens."""
_MAX_UNREAD = 8
"""Maximum number of tokens in the window that have not produced a character yet."""


class IncrementalDetokenizer:
    """Turns tokens into text, one token at a time, as the continuation of a prompt or as a separate text.

    The joined results of `push` and `flush` are the text that the tokens add to the prompt. Every character is returned
    when its last byte arrives. Bytes that are not UTF-8 become U+FFFD. A character that begins in the prompt and ends
    in the output belongs to the output.

    The time per call does not depend on the lengths of prompt and output. Only the last tokens of the prompt are read,
    because the text of a token depends at most on the token before it, and a character has at most four bytes.

    Args:
        tokenizer: tokenizer of the model.
        prompt_token_ids: the prompt, or its last tokens; None: the tokens start a new text.
        skip_special_tokens: leave special tokens out.
        own_bytes_only: leave out the bytes of a character that begins in the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: TokenIds | None = None,
        *,
        skip_special_tokens: bool = True,
        own_bytes_only: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._continuations = tokenizer.continuations
        self._skip_special = skip_special_tokens
        self._utf8 = self._continuations.utf8_decoder()
        self._ids: list[int] = []
        """Tokens to decode again at the next call: the last token or, if decoding is not `is_exact`, the last few."""
        self._window_read = 0
        self._begins = prompt_token_ids is None
        for token_id in () if prompt_token_ids is None else prompt_token_ids[-_PROMPT_TAIL:]:
            self.push(int(token_id))
        if own_bytes_only:
            self._utf8.reset()

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; empty while a character is incomplete."""
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        if not self._continuations.is_exact:
            self._ids.append(token_id)
            return self._advance(final=False)
        if self._begins:
            self._begins = self._tokenizer.backend.id_to_token(token_id) is None
            piece = self._continuations.first_piece(token_id)
        else:
            piece = self._continuations.piece(token_id, self._ids[0] if self._ids else None)
        text = self._utf8.decode(piece)
        if self._continuations.word_end is not None:
            self._ids = [token_id]
        return text

    def flush(self) -> str:
        """Return the rest of the text at the end: U+FFFD for the bytes of an incomplete character."""
        return self._utf8.decode(b"", final=True) if self._continuations.is_exact else self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        """Return the text that the window's new tokens add, by decoding the window with and without them."""
        read = self._window_read
        now = self._decode(self._ids)
        if now.endswith("\ufffd") and not final and len(self._ids) - read < _MAX_UNREAD:
            return ""  # it may still become a character
        before = self._decode(self._ids[:read])
        self._ids = self._ids[read:]
        self._window_read = len(self._ids)
        return now[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special) if token_ids else ""


class _Matcher:
    """Knuth-Morris-Pratt matcher: tracks the longest prefix of one stop string that the text ends with."""

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
        """Return True if the text now ends with the whole pattern; `matched` is then the length of the pattern's
        longest border."""
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

    The text ends at the first character that completes a stop string; if it completes several, the longest counts. The
    result does not depend on how the text is split into pieces.

    Args:
        stop: stop strings, none empty.
        include_in_output: keep the matched string at the end of the text.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        # Longest first: if a character completes several stop strings, the first in this list counts.
        self._matchers = [_Matcher(s) for s in sorted(stop, key=len, reverse=True)]
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, *, may_match: bool = True) -> tuple[str, str | None]:
        """Take the next piece.

        Args:
            text: the piece.
            may_match: False: a stop string that ends within this piece does not count (`min_tokens`).

        Returns:
            The text that is final and may be shown, and the stop string that was found, if any. Do not push after a
            match.
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
        """Return the held-back text, which turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """The text of one output sequence: detokenised, and cut at a stop string.

    Args:
        tokenizer: tokenizer of the model.
        prompt_token_ids: the prompt, or its last tokens; None: the output starts a new text.
        stop: stop strings, none empty.
        min_tokens: number of tokens before which stop strings are ignored.
        include_stop_str_in_output: keep the matched string at the end of the text.
        skip_special_tokens: leave special tokens out.
        own_bytes_only: leave out the bytes of a character that begins in the prompt.

    Attributes:
        stop: the stop string that ended the text; None: no stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: TokenIds | None = None,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        own_bytes_only: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens, own_bytes_only=own_bytes_only
        )
        self._checker = StopChecker(stop, include_in_output=include_stop_str_in_output)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._unread: list[str] = []
        self._flushed = False
        self.stop: str | None = None

    def push(self, token_id: int) -> str | None:
        """Take the next token; return the stop string that it completes, if any. Later tokens are ignored."""
        self._num_tokens += 1
        if self.stop is not None:
            return None
        self._add(self._detokenizer.push(token_id))
        return self.stop

    def take(self, *, final: bool = False) -> str:
        """Return the text that became final since the last call; `final` adds the held-back text, which may still
        contain a stop string."""
        if final and not self._flushed:
            self._flushed = True
            if self.stop is None:
                self._add(self._detokenizer.flush())
            if self.stop is None:
                self._unread.append(self._checker.flush())
        text = "".join(self._unread)
        self._unread.clear()
        return text

    def _add(self, text: str) -> None:
        if text:
            shown, self.stop = self._checker.push(text, may_match=self._num_tokens >= self._min_tokens)
            if shown:
                self._unread.append(shown)
