"""Bytes that each token adds to preceding text.

An output continues its prompt, so its tokens must not be decoded as if they began a text: SentencePiece decoders
drop the first space of a text, and WordPiece decoders put no space before its first word. Here every token has its own
bytes, and the text is the concatenation of the bytes of all tokens. `apt_jax.text.detokenizer`, log probabilities and
constraints (`apt_jax.structured`) all decode tokens in this way.

For nearly all decoders of the `tokenizers` library these bytes depend on the token only. There are two exceptions:

* ``BPEDecoder`` turns the end of a word (``</w>``) into a space once another token follows; here the space belongs to
  that token.
* Other decoders (CTC, unknown steps) look at the whole text. `is_exact` is False for them, and `IncrementalDetokenizer`
  decodes a window of tokens.

Spaces that a decoder strips from the end of a text are kept, since the text may continue.
"""

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

_CONTEXT = "a"
"""Text of the tokens placed before and after the token in question."""


def _byte_alphabet() -> dict[str, int]:
    """Map characters of byte-level vocabularies (GPT-2) to bytes: printable Latin-1 characters stand for themselves,
    characters from U+0100 on for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable}
    alphabet.update({chr(0x100 + n): b for n, b in enumerate(rest)})
    return alphabet


BYTE_ALPHABET = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary."""
    try:
        return bytes(BYTE_ALPHABET[c] for c in token)
    except KeyError:  # an added token with other characters
        return token.encode("utf-8", "replace")


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    """Replace each invalid byte with U+FFFD, like the library's ``ByteFallback``; a codec error handler."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


_EACH = "apt_jax.replace_each"
codecs.register_error(_EACH, _replace_each)


class Continuations:
    """The bytes that each token adds to preceding text.

    Args:
        backend: the library's tokenizer; its vocabulary and decoder do not change afterwards.

    Attributes:
        is_exact: True if the decoded text equals the concatenated bytes of its tokens.
        is_byte_level: True if tokens are written in the byte alphabet of GPT-2.
        word_end: suffix of tokens that end a word; the next token adds a space. None: the vocabulary has none.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._decoder = backend.decoder
        steps = _steps(None if self._decoder is None else json.loads(self._decoder.__getstate__()))
        kinds = [step["type"] for step in steps]
        self.is_byte_level = kinds[:1] == ["ByteLevel"] and all(map(_keeps_later_text, steps[1:]))
        self.word_end: str | None = steps[0]["suffix"] or None if kinds == ["BPEDecoder"] else None
        self.is_exact = (
            self.is_byte_level
            or self.word_end is not None
            or (_is_by_token(steps) and self._decode([_CONTEXT]) == _CONTEXT)
        )
        self._has_byte_tokens = self.is_exact and "ByteFallback" in kinds
        self._after_context = self._decode([_CONTEXT] * 2).removeprefix(_CONTEXT)
        self._pieces: dict[int, bytes] = {}

    def piece(self, token_id: int, after: int | None = None) -> bytes:
        """Return the bytes that a token adds; empty for an id without a token. Without `is_exact`, the context is ignored.

        Args:
            token_id: the token.
            after: the token before it; used only with `word_end`.
        """
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id)
            piece = self._pieces[token_id] = b"" if token is None else self._piece(token)
        if self.word_end is not None and self.ends_word(after) and self._backend.id_to_token(token_id) is not None:
            return b" " + piece
        return piece

    def first_piece(self, token_id: int) -> bytes:
        """Return the bytes of a token that begins a text."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        by_itself = self.is_byte_level or self.word_end is not None or not self.is_exact
        if by_itself or (self._has_byte_tokens and _byte_of(token) is not None):
            return self._piece(token)
        return self._decode([token, _CONTEXT]).removesuffix(self._after_context).encode()

    def ends_word(self, token_id: int | None) -> bool:
        """Return True if a token ends a word; the next token then adds a space."""
        token = None if token_id is None else self._backend.id_to_token(token_id)
        return token is not None and self.word_end is not None and token.endswith(self.word_end)

    def pieces(self, num_ids: int) -> list[bytes]:
        """Return `piece` of every id in [0, num_ids), each as if no word had ended before it."""
        tokens = map(self._backend.id_to_token, range(num_ids))
        return [b"" if token is None else self._piece(token) for token in tokens]

    def encoder(self) -> Callable[[str], list[int]]:
        """Return a function that encodes text as the continuation of other text, without a space before it. The tokens
        may decode to a different text if the tokenizer knows only whole words."""
        fields = json.loads(self._backend.to_str())
        fields |= {"normalizer": _without_prefix(fields["normalizer"]), "post_processor": None}
        fields["pre_tokenizer"] = _without_prefix(fields["pre_tokenizer"])
        backend = tokenizers.Tokenizer.from_str(json.dumps(fields))
        backend.encode_special_tokens = True
        return lambda text: backend.encode(text, add_special_tokens=False).ids

    def utf8_decoder(self) -> codecs.IncrementalDecoder:
        """Return an incremental UTF-8 decoder that replaces invalid bytes like the library's decoder."""
        return codecs.getincrementaldecoder("utf-8")(_EACH if self._has_byte_tokens else "replace")

    def _piece(self, token: str) -> bytes:
        if self.is_byte_level:
            return byte_level_bytes(token)
        if self.word_end is not None:
            return token.removesuffix(self.word_end).replace(self.word_end, " ").encode()
        if not self.is_exact:
            return self._decode([token]).encode()
        if self._has_byte_tokens and (byte := _byte_of(token)) is not None:
            return bytes([byte])
        text = self._decode([_CONTEXT, token, _CONTEXT])
        return text.removeprefix(_CONTEXT).removesuffix(self._after_context).encode()

    def _decode(self, tokens: Sequence[str]) -> str:
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(list(tokens))


def _byte_of(token: str) -> int | None:
    """Return the byte that a token such as ``<0x0A>`` stands for."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _without_prefix(step: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the normaliser or pre-tokenizer without the step that puts a space before a text."""
    if step is None or step["type"] == "Prepend":
        return None
    changed = dict(step)
    for name in ("normalizers", "pretokenizers"):
        if name in step:
            changed[name] = [kept for inner in step[name] if (kept := _without_prefix(inner)) is not None]
    if step["type"] == "Metaspace":
        changed["prepend_scheme"] = "never"
    if step["type"] == "ByteLevel" and "add_prefix_space" in step:
        changed["add_prefix_space"] = False
    return changed


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a decoder as a flat list; empty without a decoder."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _keeps_later_text(step: Mapping[str, Any]) -> bool:
    """Return True if a step on the whole text changes only its ends, or each character separately."""
    return step["type"] in ("Fuse", "Strip") or _maps_characters(step)


def _maps_characters(step: Mapping[str, Any]) -> bool:
    if step["type"] != "Replace":
        return False
    pattern = step["pattern"].get("String")
    return pattern is not None and len(pattern) == 1


def _is_by_token(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the bytes that a token adds depend only on the token."""
    kinds = [step["type"] for step in steps]
    if not {"Replace", "Metaspace", "WordPiece", "ByteFallback", "Fuse", "Strip"}.issuperset(kinds):
        return False
    joined = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    bytes_ = kinds.index("ByteFallback") if "ByteFallback" in kinds else joined
    # Tokens are separate until Fuse joins them, but ByteFallback makes one piece of a run of byte tokens.
    return (
        bytes_ <= joined
        and all(
            step["type"] in ("ByteFallback", "Metaspace") or _maps_characters(step) for step in steps[bytes_:joined]
        )
        and all(map(_keeps_later_text, steps[joined:]))
    )
