"""Tokenizers with the files beside their tokenizer.json against transformers' `AutoTokenizer`: the same tokens and ids."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from apt_jax.text.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers", reason="runs in the reference environment (make reference)")

SPECIALS = ["<unk>", "<s>", "</s>"]
LETTERS = [*"abcdefgh", *"ABC", *"0123", *".,!?<>|/x"]


def byte_level(**options: Any) -> tokenizers.Tokenizer:
    merges = [("h", "e"), ("a", "b"), ("Ġ", "a"), ("Ġ", "b"), ("Ġa", "b")]
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    return backend


def byte_level_prefixed() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def qwen() -> tokenizers.Tokenizer:
    backend = byte_level()
    pattern = tokenizers.Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])  # pyright: ignore[reportArgumentType, reportCallIssue]
    return backend


def sentencepiece(scheme: str | None = "first") -> tokenizers.Tokenizer:
    """In Llama's manner; None: with the normaliser of older files."""
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "b")]
    tokens = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), "▁", *LETTERS, *("".join(pair) for pair in merges)]
    bpe = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(bpe)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme is None:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(steps if scheme == "never" else [*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(SPECIALS)
    return backend


def unigram() -> tokenizers.Tokenizer:
    pieces = [*((t, 0.0) for t in SPECIALS), ("▁", -3.0), *((c, -5.0) for c in LETTERS), ("ab", -4.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(SPECIALS)
    return backend


def only_in_the_vocabulary() -> tokenizers.Tokenizer:
    """`</s>` and its like are tokens, but nothing says that they are special."""
    backend = byte_level()
    fields = json.loads(backend.to_str()) | {"added_tokens": []}
    return tokenizers.Tokenizer.from_str(json.dumps(fields))


BACKENDS = {
    "byte-level": byte_level,
    "byte-level with a prefix": byte_level_prefixed,
    "first": sentencepiece,
    "never": lambda: sentencepiece("never"),
    "normaliser": lambda: sentencepiece(None),
    "unigram": unigram,
    "not special": only_in_the_vocabulary,
    "qwen": qwen,
}


def described(content: str, **flags: bool) -> dict[str, Any]:
    given = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True} | flags
    return {"content": content} | given


def trusting(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that takes the text of special tokens for special tokens."""
    copied = tokenizers.Tokenizer.from_str(backend.to_str())
    copied.encode_special_tokens = False
    return copied


def texts(rng: random.Random, tokens: list[str]) -> list[str]:
    parts = [*"ab AB 01 .,", " ", "  ", "ab ", " a", "he", "é", *SPECIALS, *tokens]
    parts = [
        part for part in parts if part != "<FILL_ME>"
    ]  # transformers' CodeLlama puts a prompt of its own in its place
    return ["", " ", *("".join(rng.choices(parts, k=rng.randrange(1, 9))) for _ in range(25))]


def compare(directory: Path, backend: tokenizers.Tokenizer, files: dict[str, Any], rng: random.Random) -> None:
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    for name, fields in files.items():
        (directory / name).write_text(json.dumps(fields))
    compare_loaded(directory, set(backend.get_vocab(with_added_tokens=False)), rng)


def compare_loaded(directory: Path, pieces: set[str], rng: random.Random) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = load_tokenizer(directory)
    assert ours.backend.get_vocab() == theirs.get_vocab()
    assert ours.special_ids >= {i for i, t in theirs.added_tokens_decoder.items() if t.special}
    copied = trusting(ours.backend)
    for text in texts(rng, sorted(theirs.get_vocab().keys() - pieces)):
        assert copied.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False), text
        plain = "".join(c for c in text if c not in "<>")
        assert ours.encode(plain, add_special_tokens=False) == theirs.encode(plain, add_special_tokens=False), plain


TOKEN_FIELDS: list[dict[str, Any]] = [
    {},
    {"extra_special_tokens": ["<|x|>", "<|y|>"]},
    {"additional_special_tokens": ["<|x|>", "</s>"]},
    {"extra_special_tokens": {"image_token": "<|x|>", "boi_token": "<y>"}},
    {"eos_token": "<|end|>", "bos_token": "<|begin|>", "pad_token": "<pad>"},
    {"pad_token": "<pad>", "eos_token": "</s>", "extra_special_tokens": ["<pad>", "<z>"], "image_token": "<img>"},
    {"added_tokens_decoder": {"400": described("<|x|>"), "399": described("<|w|>", special=False), "1": described("<s>")}},
    {"added_tokens_decoder": {"1000": described("<|x|>", lstrip=True), "2": described("</s>", rstrip=True)}, "eos_token": "</s>"},
    {
        "added_tokens_decoder": {"300": described("<|x|>", special=False, normalized=True)},
        "eos_token": "<|x|>",
        "pad_token": "<pad>",
        "additional_special_tokens": ["<a>", "<|x|>"],
    },
    {"bos_token": {"__type": "AddedToken", **described("<b>", normalized=True, special=False)}},
]  # fmt: skip
OTHER_FILES: list[dict[str, Any]] = [
    {},
    {"special_tokens_map.json": {"eos_token": "<|map|>", "pad_token": described("<mpad>", lstrip=True)}},
    {"added_tokens.json": {"<late>": 500, "<early>": 499, "</s>": 2, "<|x|>": 498}},
    {
        "special_tokens_map.json": {"additional_special_tokens": ["<m>"], "unk_token": "<unk>"},
        "added_tokens.json": {"<m>": 350, "<n>": 349},
    },
]


@pytest.mark.parametrize("kind", BACKENDS)
def test_declared_tokens_get_the_ids_of_transformers(kind, tmp_path):
    rng = random.Random(0)
    for number, (fields, others) in enumerate(itertools.product(TOKEN_FIELDS, OTHER_FILES)):
        compare(tmp_path / str(number), BACKENDS[kind](), {"tokenizer_config.json": fields, **others}, rng)


ANY = (None, False, True)
CLASSES: dict[str | None, dict[str, tuple[bool | None, ...]]] = {
    None: {"byte-level": ANY},
    "GPT2Tokenizer": {"byte-level": ANY, "byte-level with a prefix": ANY, "not special": ANY},
    "GPTNeoXTokenizerFast": {"byte-level": ANY, "byte-level with a prefix": ANY},
    "Qwen2Tokenizer": {"qwen": ANY},
    "LlamaTokenizer": {"first": ANY, "never": (False, True), "normaliser": (False,), "byte-level": ANY},
    "LlamaTokenizerFast": {"first": ANY, "never": (False, True), "normaliser": (False,)},
    "CodeLlamaTokenizer": {"first": ANY},
    "PreTrainedTokenizerFast": {kind: ANY for kind in BACKENDS},
    "UnknownTokenizer": {"byte-level": ANY, "first": ANY},
}
"""Values of ``add_prefix_space`` by class and kind of file, without those for which transformers puts a rule of the class
in place of the file's."""
MODEL_TYPES = (None, "llama", "mistral", "gpt2", "opt", "gpt_neox", "phi3", "olmo2", "bloom", "mpt")


def classes() -> Iterator[tuple[str | None, str | None, str, bool | None]]:
    for name, kinds in CLASSES.items():
        for kind, prefixes in kinds.items():
            yield from itertools.product((name,), MODEL_TYPES, (kind,), prefixes)
    for name in (None, "Qwen2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"):
        yield from itertools.product((name,), ("qwen2",), ("qwen",), ANY)
    yield from itertools.product((None, "Qwen2TokenizerFast"), ("qwen3",), ("qwen",), ANY)


@pytest.mark.parametrize("model_type", [*MODEL_TYPES, "qwen2", "qwen3"])
def test_the_space_before_the_first_word_is_that_of_transformers(model_type, tmp_path):
    rng = random.Random(1)
    cases = [case for case in classes() if case[1] == model_type]
    for number, (name, _, kind, prefix) in enumerate(cases):
        fields: dict[str, Any] = {"eos_token": "</s>", "extra_special_tokens": ["<|x|>"]}
        fields |= {} if name is None else {"tokenizer_class": name}
        fields |= {} if prefix is None else {"add_prefix_space": prefix}
        files = {"tokenizer_config.json": fields} | (
            {} if model_type is None else {"config.json": {"model_type": model_type}}
        )
        compare(tmp_path / str(number), BACKENDS[kind](), files, rng)


@pytest.mark.parametrize("fields", [{}, *TOKEN_FIELDS[1:]])
@pytest.mark.parametrize("more", [{}, {"add_prefix_space": True}, {"add_bos_token": True, "bos_token": "</s>"}])
def test_a_vocabulary_with_merges_gives_the_ids_of_transformers(fields, more, tmp_path):
    saved = json.loads(byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(saved["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in saved["merges"]))
    config = {"tokenizer_class": "GPT2Tokenizer", **fields, **more}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    compare_loaded(tmp_path, set(saved["vocab"]), random.Random(2))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert ours.encode("a b") == theirs.encode("a b")
