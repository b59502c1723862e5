"""Fill-in-the-middle prompts, with the special tokens that code models were trained with.

The vocabulary of a model determines the prompt format. Prefix, suffix and files are encoded as plain text, so that they
cannot contain special tokens of the format.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from apt_jax.errors import InvalidRequestError
from apt_jax.text.tokenizer import Tokenizer


class _Form(NamedTuple):
    prefix: str
    suffix: str
    middle: str | None
    """Token after the prefix and the suffix; None: the format has no such token."""
    suffix_first: bool = False
    """True if the suffix comes before the prefix."""
    ends: tuple[str, ...] = ()
    """Tokens that end an answer, besides the end tokens of every output and the other tokens of the format."""
    names: tuple[str, ...] = ()
    """Tokens that may precede the name of a repository; a vocabulary has at most one of them."""
    files: tuple[str, ...] = ()
    """Tokens that may precede a file; a vocabulary has at most one of them."""


_FORMS = (
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 3 and later
    _Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ends=("<|fim_pad|>",),
          names=("<|repo_name|>", "<|fim_repo|>", "<reponame>"), files=("<|file_sep|>", "<|file_separator|>")),
    # StarCoder, StarCoder2, StableCode, Granite Code; SantaCoder
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<fim_pad>",),
          names=("<repo_name>", "<reponame>"), files=("<file_sep>", "<filename>")),
    _Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",), names=("<fim-repo>",)),
    # DeepSeek-Coder and DeepSeek-V2 and later
    _Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Code Llama; then its tokens in GGUF files and later conversions
    _Form("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    _Form("<PRE>", "<SUF>", "<MID>", ends=("<EOT>",)),
    # GLM-4.5 and later
    _Form("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # Codestral (mistral-common: `encode_fim`)
    _Form("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
    # Seed-Coder
    _Form("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
)  # fmt: skip
"""Known formats, in the order in which they are tried."""

_SNIPPET = "\n\n--- snippet ---\n\n"
"""Text before a file if the vocabulary has no token for files, as in llama.cpp."""


class ExtraFile(NamedTuple):
    """Additional context, such as another file of the repository."""

    name: str
    text: str


class FillInMiddle:
    """Builds fill-in-the-middle prompts for one tokenizer.

    Args:
        tokenizer: tokenizer of the model.
        form: the format whose tokens the vocabulary has.
    """

    def __init__(self, tokenizer: Tokenizer, form: _Form) -> None:
        self._tokenizer, self._form = tokenizer, form
        marks = [mark for mark in form[:3] if mark is not None]
        vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
        self._prefix, self._suffix, *self._middle = (vocab[mark] for mark in marks)
        self._name, self._file = self._first(form.names), self._first(form.files)
        ends = [*map(vocab.get, form.ends), self._name, self._file, self._prefix, self._suffix, *self._middle]
        self.stop_token_ids = sorted({end for end in ends if end is not None})
        """Tokens that end an answer, in addition to the end tokens of every output: after them, a model would begin
        another file."""
        # The special tokens that the tokenizer puts before text, but not those that it puts after text.
        around, text = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
        self._beginning = around[: next((i for i in range(len(around)) if around[i : i + len(text)] == text), 0)]
        self._space = "" if tokenizer.encode_continuation("a") == text else " "
        """Space that SentencePiece puts before the first text of a prompt: models were trained with it before the
        prefix but not before the suffix."""

    def prompt(self, prefix: str, suffix: str, *, begun: str = "", files: Sequence[ExtraFile] = ()) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prefix: text before the answer.
            suffix: text after the answer.
            begun: start of the answer, placed after `prefix`.
            files: additional context at the start of the prompt.
        """
        start = self._space + prefix if prefix else prefix
        before = [self._prefix, *self._text(start), *self._text(begun)]
        after = [self._suffix, *self._text(suffix)]
        texts = [*after, *before] if self._form.suffix_first else [*before, *after]
        return [*self._beginning, *self._context(files), *texts, *self._middle]

    def _context(self, files: Sequence[ExtraFile]) -> list[int]:
        """Return the token ids of the files, in the format that models were trained with."""
        if not files:
            return []
        ids = [] if self._name is None else [self._name, *self._text("project\n")]
        for file in files:
            ids += self._text(_SNIPPET) if self._file is None else [self._file, *self._text(f"{file.name}\n")]
            ids += self._text(file.text)
        return ids if self._file is None else [*ids, self._file, *self._text("file\n")]

    def _text(self, text: str) -> list[int]:
        return self._tokenizer.encode_continuation(text) if text else []

    def _first(self, tokens: Sequence[str]) -> int | None:
        ids = map(self._tokenizer.backend.token_to_id, tokens)
        return next((found for found in ids if found is not None), None)


@functools.lru_cache(maxsize=8)
def _of(tokenizer: Tokenizer) -> FillInMiddle | None:
    backend = tokenizer.backend
    for form in _FORMS:
        if all(token is None or backend.token_to_id(token) is not None for token in form[:3]):
            return FillInMiddle(tokenizer, form)
    return None


def fill_in_middle(tokenizer: Tokenizer | None, field: str) -> FillInMiddle:
    """Return the prompt builder of a model.

    Args:
        tokenizer: tokenizer of the model; None: the model has no tokenizer.
        field: name of the request field that needs the builder, for errors.

    Raises:
        InvalidRequestError: the vocabulary has no fill-in-the-middle tokens.
    """
    made = None if tokenizer is None else _of(tokenizer)
    if made is None:
        raise InvalidRequestError(
            field,
            "the model's vocabulary has no fill-in-the-middle tokens; serve a code model that has them, or leave it out",
        )
    return made


def fills_in_middle(tokenizer: Tokenizer | None) -> bool:
    """Return True if a model has fill-in-the-middle tokens."""
    return tokenizer is not None and _of(tokenizer) is not None
