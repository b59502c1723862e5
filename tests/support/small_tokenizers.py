"""A small tokenizer of every class and decoder that models are published with."""

from collections.abc import Callable, Mapping

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

SPECIALS = ["<unk>", "<s>", "</s>"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'\"()[]{}<>/|_-+*#")
WORDS = ["the", "model", "is", "yes", "no", "hello"]
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys([*SPECIALS, *tokens]))}


def _bpe(words: list[str], alphabet: list[str], more: list[str], **options: object) -> models.BPE:
    """The words by merges from the left, over an alphabet."""
    merges, tokens = [], [*more, *alphabet]
    for word in words:
        symbols = [c for c in alphabet if len(c) > 1 and word.endswith(c)][:1]
        rest = word.removesuffix(symbols[0]) if symbols else word
        parts = [*rest, *symbols]
        left = parts[0]
        for part in parts[1:]:
            merges.append((left, part))
            left += part
            tokens.append(left)
    return models.BPE(vocab=_ids(tokens), merges=list(dict.fromkeys(merges)), **options)  # pyright: ignore[reportArgumentType]


def _special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens([AddedToken("<tag>", normalized=False)])
    return backend


def _llama_decoder(*more: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])  # pyright: ignore[reportArgumentType]


def _sentencepiece(*, prefix: str, strip: bool = True) -> tokenizers.Tokenizer:
    words = [*("▁" + w for w in WORDS), *("▁" + c for c in LETTERS), *WORDS, "▁▁"]
    model = _bpe(words, ["▁", *LETTERS], BYTES, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    if prefix == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    elif prefix == "pre_tokenizer":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = spaces
    backend.decoder = _llama_decoder(decoders.Strip(" ", 1, 0)) if strip else _llama_decoder()
    return _special(backend)


def llama2() -> tokenizers.Tokenizer:
    """SentencePiece's BPE as Llama 2, TinyLlama and Phi-3 mini have it."""
    return _sentencepiece(prefix="normalizer")


def mistral() -> tokenizers.Tokenizer:
    """The same with a pre-tokenizer in place of the normaliser, as in newer conversions."""
    return _sentencepiece(prefix="pre_tokenizer")


def gemma() -> tokenizers.Tokenizer:
    """SentencePiece's BPE that puts no space before a text."""
    return _sentencepiece(prefix="none", strip=False)


def _unigram(decoder: decoders.Decoder, byte_fallback: bool) -> tokenizers.Tokenizer:
    pieces = [(t, 0.0) for t in SPECIALS] + [("▁", -3.0), ("\n", -5.0)] + [(c, -5.0) for c in LETTERS]
    pieces += [(p + w, -4.0 - 0.1 * len(p)) for w in WORDS for p in ("", "▁")]
    pieces += [(b, -20.0) for b in BYTES] if byte_fallback else []
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder
    return _special(backend)


def unigram() -> tokenizers.Tokenizer:
    return _unigram(decoders.Metaspace(), False)


def unigram_bytes() -> tokenizers.Tokenizer:
    return _unigram(_llama_decoder(decoders.Strip(" ", 1, 0)), True)


def unigram_bytes_metaspace() -> tokenizers.Tokenizer:
    return _unigram(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), True)  # pyright: ignore[reportArgumentType]


def unigram_metaspace_only() -> tokenizers.Tokenizer:
    """Its byte tokens are decoded as their names: the decoder has no step for them."""
    return _unigram(decoders.Metaspace(), True)


def _pieces() -> list[str]:
    return [*LETTERS, *("##" + c for c in LETTERS), *WORDS, *("##" + w for w in WORDS), "n't", "'s", "é", "##é"]


def wordpiece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=_ids(_pieces()), unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _special(backend)


def wordlevel() -> tokenizers.Tokenizer:
    """Whole words, and no decoder: the library puts spaces between tokens."""
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=_ids([*WORDS, *LETTERS, "é"]), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return _special(backend)


def word_ends() -> tokenizers.Tokenizer:
    """BPE with ``</w>`` at the end of words, as GPT-1 has it."""
    alphabet = [*LETTERS, *(c + "</w>" for c in LETTERS)]
    backend = tokenizers.Tokenizer(_bpe([w + "</w>" for w in WORDS], alphabet, [], end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    return _special(backend)


def _byte_level(decoder: decoders.Decoder, *, prefix: bool) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(_bpe([*("Ġ" + w for w in WORDS), *WORDS, "ðŁĺ"], alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoder
    return _special(backend)


def byte_level() -> tokenizers.Tokenizer:
    return _byte_level(decoders.ByteLevel(), prefix=False)


def byte_level_sequence() -> tokenizers.Tokenizer:
    return _byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), prefix=True)  # pyright: ignore[reportArgumentType]


def stripped_ends() -> tokenizers.Tokenizer:
    """A decoder that strips spaces from both ends of a text."""
    backend = mistral()
    backend.decoder = _llama_decoder(decoders.Strip(" ", 1, 1))
    return backend


def whole_texts() -> tokenizers.Tokenizer:
    """A decoder for which no token has bytes of its own: of equal neighbours it keeps one."""
    backend = wordlevel()
    backend.decoder = decoders.CTC(pad_token="<unk>", word_delimiter_token="|", cleanup=False)
    return backend


def regex_replaced() -> tokenizers.Tokenizer:
    """A decoder with a regular expression for each token."""
    backend = gemma()
    steps = [decoders.Replace(Regex("▁+"), " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)  # pyright: ignore[reportArgumentType]
    return backend


TOKENIZERS: Mapping[str, Callable[[], tokenizers.Tokenizer]] = {
    make.__name__: make
    for make in (
        llama2, mistral, gemma, unigram, unigram_bytes, unigram_bytes_metaspace, unigram_metaspace_only, wordpiece,
        wordlevel, word_ends, byte_level, byte_level_sequence, stripped_ends, whole_texts, regex_replaced,
    )
}  # fmt: skip


def ids_of(backend: tokenizers.Tokenizer, *parts: str) -> list[int]:
    """Tokens by their names; texts in <<...>> as byte tokens."""
    ids: list[int] = []
    for part in parts:
        names = [f"<0x{b:02X}>" for b in part[2:-2].encode()] if part.startswith("<<") else [part]
        found = [backend.token_to_id(name) for name in names]
        assert None not in found, part
        ids += [i for i in found if i is not None]
    return ids
