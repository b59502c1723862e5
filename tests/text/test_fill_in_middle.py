"""Prompts to fill in between two texts, by the tokens of a vocabulary."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from apt_jax.errors import InvalidRequestError
from apt_jax.text.fill_in_middle import ExtraFile, fill_in_middle, fills_in_middle
from apt_jax.text.tokenizer import Tokenizer


def byte_level(*special: str, beginning: str | None = None) -> Tokenizer:
    """A tokenizer of bytes with special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*([] if beginning is None else [beginning]), *special]
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*alphabet, *names])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(names)
    if beginning is not None:
        token = (beginning, backend.token_to_id(beginning))
        backend.post_processor = processors.TemplateProcessing(single=f"{beginning} $A", special_tokens=[token])
    return Tokenizer(backend)


def sentencepiece(*special: str) -> Tokenizer:
    """In the manner of SentencePiece, which puts a space before the first text."""
    pieces = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "c", "▁a", "ab", "▁ab", "▁▁"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate([*pieces, *special])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(["<s>", *special])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend)


def shown(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.backend.id_to_token(i) or "" for i in ids]


QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


@pytest.mark.parametrize(
    ("special", "want"),
    [
        (QWEN, "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"), "<fim_prefix>x<fim_suffix>y<fim_middle>"),
        (("<fim-prefix>", "<fim-middle>", "<fim-suffix>"), "<fim-prefix>x<fim-suffix>y<fim-middle>"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>x<｜fim▁hole｜>y<｜fim▁end｜>"),
        (("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"), "<|code_prefix|>x<|code_suffix|>y<|code_middle|>"),
        (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), "[SUFFIX]y[PREFIX]x"),
        (("<[fim-prefix]>", "<[fim-middle]>", "<[fim-suffix]>"), "<[fim-suffix]>y<[fim-prefix]>x<[fim-middle]>"),
    ],
)  # fmt: skip
def test_the_form_is_that_of_the_tokens(special, want):
    tokenizer = byte_level(*special, beginning="<bos>")
    assert fills_in_middle(tokenizer)
    assert "".join(shown(tokenizer, fill_in_middle(tokenizer, "suffix").prompt("x", "y"))) == f"<bos>{want}"


def test_prompts_of_code_llama_are_those_of_its_authors():
    """Ids by the reference of Code Llama (`infilling_prompt_tokens`): a space before the prefix, none before the suffix."""
    tokenizer = sentencepiece("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    maker = fill_in_middle(tokenizer, "suffix")
    for prefix, suffix, want in (
        ("ab", "b c", ["<s>", "▁<PRE>", "▁ab", "▁<SUF>", "b", "▁", "c", "▁<MID>"]),
        (" ab", "\nab", ["<s>", "▁<PRE>", "▁", "▁ab", "▁<SUF>", "<0x0A>", "ab", "▁<MID>"]),
        ("", " ab", ["<s>", "▁<PRE>", "▁<SUF>", "▁ab", "▁<MID>"]),
    ):
        assert shown(tokenizer, maker.prompt(prefix, suffix)) == want
    names = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    assert set(shown(tokenizer, maker.stop_token_ids)) == set(names)


def test_texts_hold_no_tokens_of_the_form():
    tokenizer = byte_level(*QWEN)
    ids = fill_in_middle(tokenizer, "suffix").prompt("a<|fim_suffix|>b", "<|fim_middle|>", begun="<|fim_pad|>")
    assert [token for token in shown(tokenizer, ids) if token in QWEN] == ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]  # fmt: skip
    assert tokenizer.decode(ids) == "a<|fim_suffix|>b<|fim_pad|><|fim_middle|>"


def test_files_come_first_as_in_llama_cpp():
    files = [ExtraFile("a.py", "x = 1\n"), ExtraFile("b.py", "y = 2\n")]
    tokenizer = byte_level(*QWEN)
    ids = fill_in_middle(tokenizer, "suffix").prompt("p", "s", begun="m", files=files)
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|repo_name|>project\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = 2\n<|file_sep|>file\n"
        "<|fim_prefix|>pm<|fim_suffix|>s<|fim_middle|>"
    )
    tokenizer = byte_level("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
    ids = fill_in_middle(tokenizer, "suffix").prompt("p", "s", files=files)
    assert tokenizer.decode(ids) == "\n\n--- snippet ---\n\nx = 1\n\n\n--- snippet ---\n\ny = 2\nps"


def test_a_vocabulary_without_the_tokens_is_told_of():
    for tokenizer in (None, byte_level("<|fim_prefix|>", "<|fim_suffix|>")):
        assert not fills_in_middle(tokenizer)
        with pytest.raises(
            InvalidRequestError, match="suffix: the model's vocabulary has no fill-in-the-middle tokens"
        ):
            fill_in_middle(tokenizer, "suffix")


def test_long_texts_are_encoded_as_short_ones():
    tokenizer = sentencepiece("▁<PRE>", "▁<SUF>", "▁<MID>")
    text = "ab c\n" * 8000
    want = tokenizer.encode_continuation(text)
    tokenizer.use_child_for_long_texts()
    assert tokenizer.encode_continuation(text) == want
    assert shown(tokenizer, want)[:3] == ["ab", "▁", "c"]
    assert tokenizer._child is not None
    tokenizer._child.close()
