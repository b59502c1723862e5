import importlib.resources
import itertools
import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from apt_jax.errors import ModelLoadError
from apt_jax.text.detokenizer import IncrementalDetokenizer, OutputText, StopChecker
from apt_jax.text.tokenizer import Tokenizer, load_tokenizer

SPECIALS = ["<s>", "<pad>", "</s>"]


def byte_level_backend() -> tokenizers.Tokenizer:
    """All bytes, a few merges, three special tokens, and one added token with a character outside the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("â", "Ĥ"), ("âĤ", "¬")]
    tokens = [*SPECIALS, *alphabet, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens(["＜tag＞"])
    backend.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """In the manner of SentencePiece: word pieces with U+2581 for spaces, and <0x..> for anything else."""
    pieces = ["▁", "a", "b", "▁a", "ab", "▁ab", "é", "▁▁"]
    tokens = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIALS)
    return backend


BYTE_LEVEL = Tokenizer(byte_level_backend())
BYTE_FALLBACK = Tokenizer(byte_fallback_backend())
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])


# --- encoding ------------------------------------------------------------------------------------------------------


def test_the_template_adds_special_tokens_and_text_cannot():
    assert BYTE_LEVEL.encode("he</s>")[0] == 2
    assert 2 not in BYTE_LEVEL.encode("he</s>")[1:]
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("he</s>")) == "he</s>"


def test_R17_special_token_text_is_plain_text():
    ids = BYTE_LEVEL.encode("<s><pad></s>", add_special_tokens=False)
    assert not set(ids) & BYTE_LEVEL.special_ids


@given(st.text())
def test_encoding_and_decoding_returns_the_text(text):
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


@given(st.text())
def test_the_cheap_bound_never_exceeds_the_number_of_tokens(text):
    assert BYTE_LEVEL.min_tokens(text) <= len(BYTE_LEVEL.encode(text))
    assert BYTE_FALLBACK.min_tokens(text) <= max(1, len(BYTE_FALLBACK.encode(text)))


def test_the_cheap_bound_knows_tokens_that_swallow_spaces():
    backend = byte_level_backend()
    backend.add_tokens([tokenizers.AddedToken("<greedy>", lstrip=True)])
    greedy = Tokenizer(backend)
    text = " " * 5000 + "<greedy>"
    assert greedy.min_tokens(text) <= len(greedy.encode(text))


def test_text_of_one_token_shows_special_tokens():
    assert BYTE_LEVEL.token_text(2) == "</s>"
    assert BYTE_LEVEL.token_text(BYTE_LEVEL.vocab_size) is None


# --- loading -------------------------------------------------------------------------------------------------------


def write_tokenizer(path, **config):
    byte_level_backend().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_directory_is_loaded(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, model_vocab_size=BYTE_LEVEL.vocab_size)
    assert tokenizer.encode("hello") == BYTE_LEVEL.encode("hello")
    assert tokenizer.path == tmp_path


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json.*--tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": {}}', b"null", b"[" * 100_000])
def test_a_damaged_file_is_one_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: damaged") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_damaged_tokenizer_config_is_named(tmp_path, content):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("beyond", [1, 64])
def test_a_few_ids_beyond_the_models_rows_are_loaded(tmp_path, beyond):
    write_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, model_vocab_size=BYTE_LEVEL.vocab_size - beyond).vocab_size == BYTE_LEVEL.vocab_size


def test_a_vocabulary_much_larger_than_the_models_is_refused(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(ModelLoadError, match=f"beyond the model's {BYTE_LEVEL.vocab_size - 65}"):
        load_tokenizer(tmp_path, model_vocab_size=BYTE_LEVEL.vocab_size - 65)


def unigram_backend() -> tokenizers.Tokenizer:
    pieces = [(t, 0.0) for t in SPECIALS] + [(c, -float(i)) for i, c in enumerate("▁abcdefgh")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.add_special_tokens(SPECIALS)
    return backend


def word_piece_backend() -> tokenizers.Tokenizer:
    words = [*SPECIALS, "[UNK]", "a", "##b", "##c", "ab"]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.add_special_tokens(SPECIALS)
    return backend


def prefixed_bpe_backend() -> tokenizers.Tokenizer:
    vocab = {t: i for i, t in enumerate([*SPECIALS, "a", "##b", "##c", "ab", "abc"])}
    bpe = models.BPE(vocab=vocab, merges=[("a", "##b"), ("ab", "##c")], continuing_subword_prefix="##")
    backend = tokenizers.Tokenizer(bpe)
    backend.add_special_tokens(SPECIALS)
    return backend


def test_two_tokens_with_one_id_are_refused(tmp_path):
    """The library would write one of them for both, and cannot copy the tokenizer for chat templates."""
    write_tokenizer(tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = fields["model"]["vocab"]
    vocab["he"] = vocab["A"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ModelLoadError, match=rf"the tokens 'A' and 'he' have the same id {vocab['A']}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("token_id", [2**22, 2**31, 2**32 - 1])
def test_an_id_beyond_any_use_is_refused(tmp_path, token_id):
    """The library would count up to it, and end the process for want of memory."""
    write_tokenizer(tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    fields["model"]["vocab"]["he"] = token_id
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ModelLoadError, match=rf"the token 'he' has the id {token_id}; ids must be below"):
        load_tokenizer(tmp_path)


def test_code_named_in_the_config_is_not_obeyed(tmp_path, caplog):
    write_tokenizer(tmp_path, auto_map={"AutoTokenizer": "evil.Evil"})
    load_tokenizer(tmp_path)
    assert "never run" in caplog.text


# --- detokenising --------------------------------------------------------------------------------------------------


def streamed(tokenizer: Tokenizer, ids, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=30), skip=st.booleans())
def test_E9_pieces_together_are_the_decoded_text_of_any_ids(ids, skip):
    assert "".join(streamed(BYTE_LEVEL, ids, skip)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@BOTH
@given(text=st.text(alphabet=st.sampled_from("ab é€日🎉\u0301\u200d\n"), max_size=20))
def test_pieces_together_are_the_text_and_hold_whole_characters(tokenizer, text):
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_E9_a_character_comes_with_its_last_byte():
    ids = [BYTE_LEVEL.backend.token_to_id(t) for t in ("ð", "Ł", "İ", "ī")]
    assert streamed(BYTE_LEVEL, ids) == ["", "", "", "🎉", ""]


def test_E9_bytes_that_never_became_a_character_are_flushed_as_replacement():
    ids = [BYTE_LEVEL.backend.token_to_id(t) for t in ("a", "ð", "Ł")]
    assert streamed(BYTE_LEVEL, ids) == ["a", "", "", "\ufffd"]


def test_an_invalid_byte_is_replaced_and_the_stream_goes_on():
    ids = [BYTE_LEVEL.backend.token_to_id(t) for t in ("ð", "a")]
    assert streamed(BYTE_LEVEL, ids) == ["", "\ufffda", ""]


def test_special_tokens_are_skipped_or_shown():
    assert "".join(streamed(BYTE_LEVEL, [2, 0])) == ""
    assert "".join(streamed(BYTE_LEVEL, [2, 0], skip=False)) == "</s><s>"


# --- stop strings --------------------------------------------------------------------------------------------------


def whole_text_stop(text: str, stop, first_end: int = 0) -> tuple[str | None, int]:
    """The definition: the earliest end above `first_end`, of those the longest string; (string, its end)."""
    for end in range(first_end + 1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return max(ending, key=len), end
    return None, len(text)


@settings(max_examples=500)
@given(
    text=st.text(alphabet="ab", max_size=40),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4, unique=True),
    cuts=st.lists(st.integers(0, 40), max_size=10),
    include=st.booleans(),
)
def test_R10_stop_strings_in_pieces_equal_the_search_of_the_whole_text(text, stop, cuts, include):
    checker = StopChecker(stop, include_in_output=include)
    borders = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    shown, found = "", None
    for start, end in itertools.pairwise(borders):
        piece, found = checker.push(text[start:end])
        shown += piece
        assert text.startswith(shown)  # nothing is ever taken back
        if found is not None:
            break
    if found is None:
        shown += checker.flush()
    expected, end = whole_text_stop(text, stop)
    assert found == expected
    assert shown == text[: end if include or expected is None else end - len(expected)]


def test_text_that_may_become_a_stop_string_is_kept_back():
    checker = StopChecker(["\n\nUser:"])
    assert checker.push("Hi") == ("Hi", None)
    assert checker.push("\n\nUs") == ("", None)
    assert checker.push("e") == ("", None)
    assert checker.push("d") == ("\n\nUsed", None)
    assert checker.push("!\n") == ("!", None)
    assert checker.flush() == "\n"
    checker = StopChecker(["\n\nUser:", "<end>"])  # the shorter one as well
    assert checker.push("Hi<e") == ("Hi", None)
    assert checker.push("nd>") == ("", "<end>")


def test_overlapping_stop_strings_take_the_one_that_ends_first():
    assert StopChecker(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopChecker(["c", "abc"]).push("xabcd") == ("x", "abc")


@settings(max_examples=300)
@given(
    text=st.text(alphabet=st.sampled_from("he llo w€🎉"), max_size=25),
    stop=st.lists(st.text(alphabet=st.sampled_from("he lo€🎉"), min_size=1, max_size=4), max_size=4),
    min_tokens=st.integers(0, 8),
    include=st.booleans(),
)
def test_R10_output_text_equals_the_search_of_the_decoded_text(text, stop, min_tokens, include):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    output = OutputText(BYTE_LEVEL, stop=stop, min_tokens=min_tokens, include_stop_str_in_output=include)
    shown, num_tokens, found = "", 0, None
    for token in ids:
        num_tokens += 1
        found = output.push(token)
        shown += output.take()
        assert text.startswith(shown)
        if found is not None:
            break
    shown += output.take(final=True)
    early = IncrementalDetokenizer(BYTE_LEVEL)
    first_end = len("".join(early.push(token) for token in ids[: max(0, min_tokens - 1)]))
    expected, end = whole_text_stop(text, stop, first_end)
    assert found == expected
    assert shown == text[: end if include or expected is None else end - len(expected)]
    if found is not None and len(ids) > num_tokens:
        assert output.push(ids[num_tokens]) is None
        assert output.take(final=True) == ""


def test_the_checker_is_linear_in_hostile_text():
    # Overlapping prefixes are where a naive search goes quadratic; a budget in characters fed, not in seconds.
    stop = ["a" * 255 + c for c in "bcde"]
    checker = StopChecker(stop)
    shown, found = checker.push("a" * 20_000 + "e")
    assert (len(shown), found) == (20_000 - 255, stop[3])


def test_random_streams_of_the_real_alphabet_are_exact():
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(BYTE_LEVEL.vocab_size) for _ in range(60)]
        assert "".join(streamed(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


# --- the bundled tokenizer -----------------------------------------------------------------------------------------

BUNDLED = load_tokenizer(Path(str(importlib.resources.files("apt_jax") / "assets" / "tiny-opt")), model_vocab_size=4096)


def test_the_bundled_tokenizer_begins_every_text_with_eos():
    ids = BUNDLED.encode("Once upon a time")
    assert ids[0] == 2
    assert 2 not in ids[1:]
    assert BUNDLED.special_ids >= {2}
    assert BUNDLED.is_byte_level


@given(st.text())
def test_R17_the_bundled_tokenizer_returns_any_text(text):
    ids = BUNDLED.encode(text)
    assert BUNDLED.decode(ids) == text
    assert BUNDLED.min_tokens(text) <= len(ids)
    detokenizer = IncrementalDetokenizer(BUNDLED)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    assert "".join(pieces) + detokenizer.flush() == text


@given(st.lists(st.integers(0, BUNDLED.vocab_size - 1)), st.booleans())
def test_pieces_of_the_bundled_tokenizer_are_the_decoded_text_of_any_ids(ids, skip):
    detokenizer = IncrementalDetokenizer(BUNDLED, skip_special_tokens=skip)
    text = "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])
    assert text == BUNDLED.decode(ids, skip_special_tokens=skip)


@given(
    st.lists(st.integers(3, BUNDLED.vocab_size - 1), min_size=1, max_size=30),
    st.data(),
    st.booleans(),
)
def test_R10_stop_strings_in_the_output_of_the_bundled_tokenizer(ids, data, include):
    """The stop string is cut from the whole text, anywhere, so that it lies across tokens and characters' bytes."""
    whole = BUNDLED.decode(ids)
    start = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stop = whole[start : start + data.draw(st.integers(1, 6))] or "absent"
    output = OutputText(BUNDLED, stop=(stop,), include_stop_str_in_output=include)
    shown, found = "", None
    for token_id in ids:
        found = output.push(token_id)
        shown += output.take()
        assert whole.startswith(shown)  # what was streamed is never withdrawn
        if found:
            break
    shown += output.take(final=True)
    found = output.stop  # U+FFFD of bytes that are left at the very end comes last
    assert (found is None) == (stop not in whole)
    assert shown == (whole[: whole.index(stop) + (len(stop) if include else 0)] if found else whole)
