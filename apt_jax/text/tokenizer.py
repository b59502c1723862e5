"""Tokenization and detokenization: a thin wrapper around the `tokenizers` library, with support for streaming.

* `load_tokenizer` reads the tokenizer of a model directory or GGUF file into a `Tokenizer`. Text that looks like a
  special token is encoded as plain text: only the tokenizer's own template adds special tokens.
* `IncrementalDetokenizer` turns tokens into text one by one, as the continuation of a prompt. A character whose bytes
  are spread over several tokens is returned whole, when its last byte arrives.
* `StopChecker` finds stop strings across token boundaries, and holds back text that may still become a stop string, so
  that streamed text never has to be retracted.
* `OutputText` combines both for one request.
"""

import collections
import contextlib
import functools
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors
from numpy.typing import NDArray

from apt_jax.errors import ModelLoadError, one_line
from apt_jax.text.continuations import BYTE_ALPHABET, Continuations, byte_level_bytes
from apt_jax.text.long_texts import LONG_CHARS, LongTextTokenizer
from apt_jax.text.patterns import any_of
from apt_jax.text.tokenizer_config import apply_config, special_token, tokenizer_config
from apt_jax.utils.json_memory import check_json_memory

TokenIds = Sequence[int] | NDArray[np.int32]

_logger = logging.getLogger(__name__)
MAX_FILE_BYTES = 256 << 20
_MAX_VOCAB_SIZE = 1 << 22  # the largest vocabularies have under a million tokens
_FEW_IDS = 64  # number of ids beyond the model's rows that every tokenizer may have
_SPACE = re.compile(r"\s*")
_NEAR_END = 16
"""Number of tokens at the end of a prompt that are searched for a text token. Longer runs of special tokens are rare."""
_QUICK_CHARS = 1024
_QUICK_TOKENS = 1024
"""Longer texts are encoded and decoded as a batch of one, since only then does the library release the GIL."""


class Tokenizer:
    """A tokenizer of the `tokenizers` library with the engine's interface.

    Args:
        backend: the library's tokenizer; its handling of special tokens is changed (see the module docstring).

    Attributes:
        continuations: bytes that each token adds to preceding text.
        is_byte_level: True if tokens are written in the byte alphabet of GPT-2.
        vocab_size: ids are in [0, vocab_size).
        path: the directory or GGUF file from which the tokenizer was read, if any.
    """

    def __init__(self, backend: tokenizers.Tokenizer, path: Path | None = None) -> None:
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.path = path
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        fields = json.loads(backend.to_str())
        unknown = _unknown_token(fields["model"])
        self._unknown_id = None if unknown is None else backend.token_to_id(unknown)
        self._plain = backend
        """Tokenizer that never turns text into special tokens."""
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        without = _without_pieces(fields, special)
        if without is not None:
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(without))
            self._plain.encode_special_tokens = True
        self.continuations = Continuations(backend)
        self.is_byte_level = self.continuations.is_byte_level
        self._longest_token = max(
            (len(byte_level_bytes(t)) if self.is_byte_level else len(t) for t in vocab), default=1
        )
        # A normaliser may shorten text (strip, compose characters), and an added token may absorb the spaces around
        # it; then the length of a text gives no bound on its number of tokens.
        self._bounded = (
            self.is_byte_level
            and backend.normalizer is None
            and not any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values())
        )
        self._child: LongTextTokenizer | None = None

    def use_child_for_long_texts(self) -> None:
        """Tokenize long texts in a child process from now on, as servers do; see `apt_jax.text.long_texts`."""
        if self._child is None:
            self._child = LongTextTokenizer(self._backend.to_str())

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; `add_special_tokens` adds the special tokens of the tokenizer's template
        (OPT: `</s>` first).

        Raises InvalidRequestError if a long text takes too much time or memory (`use_child_for_long_texts`).
        """
        if self._child is not None and len(text) > LONG_CHARS:
            return self._child.encode(text, add_special_tokens=add_special_tokens)
        return _encode(self._plain, text, add_special_tokens)

    @functools.cached_property
    def _special_tokens(self) -> dict[str, tokenizers.AddedToken]:
        added = self._backend.get_added_tokens_decoder().values()
        return {token.content: token for token in added if token.special and token.content}

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with exactly this text, or None."""
        return self._backend.token_to_id(text) if text in self._special_tokens else None

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Pattern that matches the text of any special token, the longest at each position; None without special
        tokens."""
        return any_of(self._special_tokens) if self._special_tokens else None

    @functools.cached_property
    def _trusting(self) -> tokenizers.Tokenizer:
        """Copy of the library's tokenizer that encodes the text of special tokens as special tokens."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = False
        return backend

    @functools.cached_property
    def _continuing(self) -> tokenizers.Tokenizer:
        """Like `_plain`, but for text inside a prompt: without a space before it if the tokenizer adds a space only at
        the start of a prompt."""
        fields = json.loads(self._plain.to_str())
        changed = False

        def change(step: Any) -> None:
            nonlocal changed
            if isinstance(step, dict):
                if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
                    step["prepend_scheme"], changed = "never", True
                for inner in step.get("pretokenizers", []):
                    change(inner)

        change(fields.get("pre_tokenizer"))
        if not changed:
            return self._plain
        backend = tokenizers.Tokenizer.from_str(json.dumps(fields))
        backend.encode_special_tokens = True
        return backend

    def encode_template(self, text: str, written: Sequence[Sequence[int]]) -> list[int]:
        """Return the token ids of a prompt that contains its special tokens as text; no other special tokens are added.

        If the template wrote all special tokens in the text, the text is encoded as a whole. Otherwise it is encoded in
        parts that end at the special tokens of the template.

        Args:
            text: text of the prompt.
            written: half-open ranges of characters that the template wrote, in order. Only there does the text of a
                special token become a special token.

        Raises InvalidRequestError: see `encode`.
        """
        if self._child is not None and len(text) > LONG_CHARS:
            return self._child.encode_template(text, written)
        pattern = self.special_pattern
        if pattern is None:
            return _encode(self._plain, text, False)
        found = [match for start, end in written for match in pattern.finditer(text, start, end)]
        if [match.span() for match in found] == [match.span() for match in pattern.finditer(text)]:
            ids = _encode(self._trusting, text, False)
            # Normalisers may turn other text into the text of special tokens.
            surplus = self._special_counts(ids) - self._special_counts(map(self.special_id, (m[0] for m in found)))
            if not surplus:
                return ids
        return self._encode_parts(text, found)

    def _special_counts(self, ids: Iterable[int | None]) -> collections.Counter[int | None]:
        """Count each special token, except the token for unknown text, which counts as plain text."""
        return collections.Counter(i for i in ids if i in self.special_ids and i != self._unknown_id)

    def _encode_parts(self, text: str, found: Iterable[re.Match[str]]) -> list[int]:
        """Return the ids of a text with special tokens only at the matches in `found`."""
        ids: list[int] = []
        end = 0

        def add(part: str) -> None:
            ids.extend(_encode(self._continuing if ids else self._plain, part, False) if part else [])

        for match in found:
            token, start, stop = self._special_tokens[match[0]], match.start(), match.end()
            # A token may absorb the spaces next to it.
            if token.lstrip:
                start = end + len(text[end:start].rstrip())
            if token.rstrip:
                stop = _end_of_space(text, stop)
            add(text[end:start])
            token_id = self.special_id(match[0])
            assert token_id is not None
            ids.append(token_id)
            end = stop
        add(text[end:])
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Return the token ids of plain text that continues other text, without a space or special token before it.

        Raises InvalidRequestError: see `encode`.
        """
        if self._child is not None and len(text) > LONG_CHARS:
            return self._child.encode_continuation(text)
        return _encode(self._unspaced, text, False)

    @functools.cached_property
    def _unspaced(self) -> tokenizers.Tokenizer:
        """Like `_plain`, but without a space before any text."""
        fields = json.loads(self._plain.to_str())

        def without(step: Any) -> Any:
            kind = step.get("type") if isinstance(step, dict) else None
            if kind == "Prepend":
                return None
            if kind == "Metaspace":
                return {**step, "prepend_scheme": "never"}
            if kind == "ByteLevel":
                return {**step, "add_prefix_space": False}
            inner = next(
                (name for name in ("normalizers", "pretokenizers") if kind == "Sequence" and name in step), None
            )
            return step if inner is None else {**step, inner: [s for s in map(without, step[inner]) if s is not None]}

        fields |= {name: without(fields.get(name)) for name in ("normalizer", "pre_tokenizer")}
        backend = tokenizers.Tokenizer.from_str(json.dumps(fields))
        backend.encode_special_tokens = True
        return backend

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of `text`, computed from its length."""
        if not self._bounded:
            return 1
        return -(-len(text.encode("utf-8")) // self._longest_token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. Ids without a token are skipped; bytes that are not UTF-8 become U+FFFD."""
        if len(token_ids) > _QUICK_TOKENS:
            return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int, after: int | None = None) -> str | None:
        """Return the text that a token, special or not, adds to preceding text; None for an id without a token.

        Args:
            token_id: the token. Incomplete characters become U+FFFD.
            after: the token before it; see `apt_jax.text.continuations.Continuations.piece`.
        """
        if self._backend.id_to_token(token_id) is None:
            return None
        return self.continuations.piece(token_id, after).decode("utf-8", "replace")

    def last_text_id(self, token_ids: TokenIds) -> int | None:
        """Return the last id that is not a special token, for `token_text`; None if the last few are all special."""
        end = token_ids[-_NEAR_END:]
        return next((int(i) for i in reversed(end) if int(i) not in self.special_ids), None)


def _unknown_token(model: Mapping[str, Any]) -> str | None:
    """Return the model's token for unknown text."""
    number = model.get("unk_id")
    return model.get("unk_token") if number is None else model["vocab"][number][0]


def _without_pieces(fields: dict[str, Any], special: set[str]) -> dict[str, Any] | None:
    """Return the fields of a tokenizer.json in which text cannot become a special token; `fields` may be changed.

    `encode_special_tokens` keeps the library from finding special tokens in text, but not the model (Unigram, WordLevel
    and others) from using a vocabulary entry with the same text. Here these entries get names that no text contains.

    Returns:
        The changed fields, or None if the model never uses such an entry.
    """
    model = fields["model"]
    vocab, is_bpe = model["vocab"], model["type"] == "BPE"
    names = special.intersection(vocab if isinstance(vocab, dict) else (piece for piece, _ in vocab))
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model.get("merges", ())]
    if is_bpe and not (
        model.get("ignore_merges") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    ):
        merged = {"".join(pair) for pair in merges}
        names = {name for name in names if len(name) == 1 or name in merged}
    if not names:
        return None
    nonce = secrets.token_hex(16)
    renamed = {name: f"\U0010fffd{nonce}{number}" for number, name in enumerate(sorted(names))}
    if isinstance(vocab, dict):
        model["vocab"] = {renamed.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocab]
    if merges:
        model["merges"] = [pair for pair in merges if names.isdisjoint((*pair, "".join(pair)))]
    if "unk_token" in model:
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    for token in fields["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    return fields


def _end_of_space(text: str, at: int) -> int:
    """Return the index after the whitespace that begins at `at`, or `at` if another character is there."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) > _QUICK_CHARS:
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return backend.encode(text, add_special_tokens=add_special_tokens).ids


def load_tokenizer(path: Path | str, *, model_vocab_size: int | None = None) -> Tokenizer:
    """Read the tokenizer of a model: tokenizer.json, else vocab.json with merges.txt (GPT-2's format), or a GGUF file.

    Args:
        path: a directory, or a ``.gguf`` file.
        model_vocab_size: vocabulary size of the model; None: not checked.

    Raises:
        ModelLoadError: the file is missing or damaged, or has many ids beyond the model's vocabulary.
    """
    source = Path(path)
    if source.suffix.lower() == ".gguf" and not os.path.isdir(source):
        file, backend = source, _from_gguf(source)
    else:
        file, backend = _from_directory(source)
    _check_ids(file, backend)
    tokenizer = Tokenizer(backend, source)
    if tokenizer.vocab_size == 0:
        raise ModelLoadError(f"{file}: the vocabulary is empty")
    if model_vocab_size is not None and tokenizer.vocab_size > model_vocab_size:
        _check_rows(file, tokenizer, model_vocab_size)
    return tokenizer


def _check_rows(file: Path, tokenizer: Tokenizer, num_rows: int) -> None:
    """Raise ModelLoadError for a tokenizer of another model. A few ids without a row in the model are normal: Gemma 3's
    text models have no row for `<image_soft_token>`. Requests with such an id are rejected (`apt_jax.validation`)."""
    ids = tokenizer.backend.get_vocab(with_added_tokens=True).values()
    beyond = sum(token_id >= num_rows for token_id in ids)
    if beyond > max(_FEW_IDS, num_rows // 32):
        raise ModelLoadError(
            f"{file}: {beyond} token ids up to {tokenizer.vocab_size - 1} are beyond the model's {num_rows}; "
            "tokenizer and model do not belong together (--tokenizer)"
        )
    _logger.info(
        "%s: %d token ids from %d on are beyond the model's rows; requests with such ids are rejected",
        file,
        beyond,
        num_rows,
    )


def _check_ids(file: Path, backend: tokenizers.Tokenizer) -> None:
    """Reject ids that the library accepts but cannot serialize: an id shared by two tokens, of which it writes only
    one, and extremely large ids, since it iterates up to the largest id."""
    seen: dict[int, str] = {}
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id >= _MAX_VOCAB_SIZE:
            raise ModelLoadError(
                f"{file}: damaged, the token {token!a:.40} has the id {token_id}; ids must be below {_MAX_VOCAB_SIZE}"
            )
        if token_id in seen:
            names = " and ".join(f"{name!a:.40}" for name in sorted((seen[token_id], token)))
            raise ModelLoadError(f"{file}: damaged, the tokens {names} have the same id {token_id}")
        seen[token_id] = token


def _from_gguf(path: Path) -> tokenizers.Tokenizer:
    # Imported here, because `apt_jax.models` imports JAX.
    from apt_jax.models.loading.gguf.file import GgufFile
    from apt_jax.models.loading.gguf.tokenizer import gguf_tokenizer

    with contextlib.closing(GgufFile(path)) as file:
        return gguf_tokenizer(file)


def _from_directory(directory: Path) -> tuple[Path, tokenizers.Tokenizer]:
    """Return the tokenizer's file and the tokenizer."""
    file = directory / "tokenizer.json"
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    if not os.path.exists(file) and os.path.isfile(vocab) and os.path.isfile(merges):
        return vocab, _gpt2_files(directory, vocab, merges)
    if not os.path.exists(file) and os.path.isfile(directory / "tokenizer.model"):
        raise ModelLoadError(
            f"{directory / 'tokenizer.model'}: is the only tokenizer file, and SentencePiece files are not supported; a tokenizer.json is "
            "needed, as written by transformers' save_pretrained (--tokenizer)"
        )
    text = _read_vocabulary(file)
    _warn_of_code(directory)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        reason = one_line(str(error))[:120]
        raise ModelLoadError(f"{file}: damaged or not a tokenizer ({reason})") from None
    apply_config(directory, backend)
    return file, backend


def _warn_of_code(directory: Path) -> None:
    if tokenizer_config(directory).get("auto_map"):
        _logger.warning(
            "%s: auto_map is ignored: code from model directories is never run", directory / "tokenizer_config.json"
        )


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ModelLoadError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(
            f"{file}: cannot be read ({error.strerror}); a directory with a tokenizer.json is needed (--tokenizer)"
        ) from None
    except UnicodeDecodeError:
        raise ModelLoadError(f"{file}: damaged, not UTF-8") from None


def _read_vocabulary(file: Path) -> str:
    """Read a JSON file with a vocabulary, which may take more memory relative to its size than other JSON files."""
    text = _read_text(file)
    check_json_memory(text.encode(), str(file), is_vocabulary=True)
    return text


def _gpt2_files(directory: Path, vocab_file: Path, merges_file: Path) -> tokenizers.Tokenizer:
    """Load byte-level BPE in the original format of GPT-2 and OPT: vocabulary, merges and names of special tokens."""
    text = _read_vocabulary(vocab_file)
    try:
        vocab = json.loads(text)
    except (ValueError, RecursionError):
        raise ModelLoadError(f"{vocab_file}: damaged, not JSON") from None
    if not isinstance(vocab, dict) or not all(type(i) is int and 0 <= i < 2**31 for i in vocab.values()):
        raise ModelLoadError(f"{vocab_file}: damaged, must map tokens to ids")
    if not BYTE_ALPHABET.keys() <= vocab.keys():
        raise ModelLoadError(f"{vocab_file}: is not a byte-level vocabulary; a tokenizer.json is needed (--tokenizer)")
    lines = [line for line in _read_text(merges_file).split("\n") if not line.startswith("#version")]
    parts = [line.rstrip("\r").split(" ") for line in lines if line.strip()]
    if not all(len(pair) == 2 for pair in parts):
        raise ModelLoadError(f"{merges_file}: damaged, a line is not two tokens")
    pairs = [(left, right) for left, right in parts]
    _warn_of_code(directory)
    config = tokenizer_config(directory)
    try:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # the library raises plain Exception
        reason = one_line(str(error))[:120]
        raise ModelLoadError(f"{merges_file}: does not fit vocab.json ({reason})") from None
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    apply_config(directory, backend, "GPT2Tokenizer")
    ends = {
        name: special_token(config, f"{name}_token") if config.get(f"add_{name}_token") is True else None
        for name in ("bos", "eos")
    }
    ids = {token: backend.token_to_id(token) for token in ends.values() if token is not None}
    if ids and None not in ids.values():
        single = [token for token in (ends["bos"], "$A", ends["eos"]) if token is not None]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=single, special_tokens=list(ids.items())
        )
    return backend
