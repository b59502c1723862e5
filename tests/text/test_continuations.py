"""Outputs continue their prompt, whatever the tokenizer: text, bytes, stop strings; against the `tokenizers` library."""

import random

import pytest
import tokenizers
from tokenizers.decoders import DecodeStream

from apt_jax.text.detokenizer import IncrementalDetokenizer, OutputText
from apt_jax.text.tokenizer import Tokenizer
from tests.support.small_tokenizers import SPECIALS, TOKENIZERS, ids_of, llama2, mistral, stripped_ends

ALL = sorted(TOKENIZERS.keys() - {"stripped_ends"})  # the library itself fails there
WITH_BYTES = ["llama2", "mistral", "gemma", "unigram_bytes", "unigram_bytes_metaspace", "byte_level"]
WORDS = [
    "the",
    "model",
    "is",
    "a",
    "x1",
    "  yes",
    "no!",
    "?",
    "don't",
    "é",
    "😀😀",
    "\n",
    "日本",
    "<tag>",
    ".",
    "é\n\nno",
]


def made(name: str) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    backend = TOKENIZERS[name]()
    return backend, Tokenizer(backend)


def encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


def pieces_of(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


def plain_ids(backend: tokenizers.Tokenizer) -> list[int]:
    """Tokens that are whole characters: the library cannot stream others in every order."""
    names = sorted(backend.get_vocab().items(), key=lambda pair: pair[1])
    whole = [(i, backend.decode([0, i], skip_special_tokens=False)) for name, i in names if not name.startswith("<0x")]
    return [i for i, text in whole if "\ufffd" not in text]


@pytest.mark.parametrize("name", ALL)
def test_every_token_adds_what_the_librarys_stream_gives_after_the_prompt(name):
    backend, tokenizer = made(name)
    rng = random.Random(0)
    plain = plain_ids(backend)
    for turn in range(150):
        text = " ".join(rng.choice(WORDS) for _ in range(6))
        ids = encode(backend, text) if turn % 2 else [rng.choice(plain) for _ in range(10)]
        prompt = encode(backend, "hello the") if turn % 4 < 2 else [plain[-1], *rng.choices(plain, k=3)]
        for skip in (True, False):
            stream = DecodeStream(ids=prompt, skip_special_tokens=skip)
            *pieces, last = pieces_of(tokenizer, prompt, ids, skip)
            assert pieces == [stream.step(backend, i) or "" for i in ids]
            assert last == ""
            whole = backend.decode(prompt + ids, skip_special_tokens=skip)
            assert backend.decode(prompt, skip_special_tokens=skip) + "".join(pieces) == whole


@pytest.mark.parametrize("name", ALL)
def test_without_a_prompt_the_tokens_begin_a_text(name):
    backend, tokenizer = made(name)
    rng = random.Random(3)
    for turn in range(60):
        ids = encode(backend, " ".join(rng.choice(WORDS) for _ in range(4)))
        ids = ids if turn % 2 else rng.choices(plain_ids(backend), k=5)
        for skip in (True, False):
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
            text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
            assert text == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"whole_texts"}))
def test_the_bytes_of_all_tokens_put_together_are_the_text(name):
    backend, tokenizer = made(name)
    rng = random.Random(1)
    for _ in range(100):
        ids = encode(backend, " ".join(rng.choice(WORDS) for _ in range(6)))
        prompt = encode(backend, "the")
        before = [*prompt[-1:], *ids]
        data = b"".join(tokenizer.continuations.piece(i, after) for after, i in zip(before, ids, strict=False))
        assert data.decode() == "".join(pieces_of(tokenizer, prompt, ids, skip=False))


def test_bytes_that_are_not_utf8_are_replaced_one_by_one_and_the_stream_goes_on():
    backend = llama2()
    tokenizer = Tokenizer(backend)
    emoji = ids_of(backend, "<<😀>>")
    *_, the = ids_of(backend, "▁the")
    assert pieces_of(tokenizer, [the], [*emoji[:3], the, *emoji, emoji[0], *emoji]) == [
        *("", "", "", "\ufffd\ufffd\ufffd the"), *("", "", "", "😀"), "", *("\ufffd", "", "", "😀"), ""
    ]  # fmt: skip
    assert pieces_of(tokenizer, [the], emoji[:2]) == ["", "", "\ufffd\ufffd"] == ["", "", backend.decode(emoji[:2])]


@pytest.mark.parametrize("name", WITH_BYTES)
def test_a_character_that_the_prompt_has_begun_belongs_to_the_output(name):
    backend, tokenizer = made(name)
    emoji = encode(backend, "x😀")[-2:]
    assert backend.decode([*encode(backend, "x"), *emoji]).endswith("\ufffd") or name == "byte_level"
    whole = encode(backend, "the x😀 no")
    for cut in range(1, len(whole)):
        prompt, ids = whole[:cut], whole[cut:]
        settled = backend.decode(prompt).rstrip("\ufffd")
        assert settled + "".join(pieces_of(tokenizer, prompt, ids)) == backend.decode(whole)


@pytest.mark.parametrize("name", WITH_BYTES)
def test_without_it_an_output_is_its_own_bytes(name):
    backend, tokenizer = made(name)
    begun = encode(backend, "x😀")[:-1]
    no = encode(backend, "the no")[-1]
    for own, expected in ((True, ""), (False, "\ufffd")):
        detokenizer = IncrementalDetokenizer(tokenizer, begun, own_bytes_only=own)
        assert detokenizer.push(no).startswith(expected)
        assert detokenizer.push(no).strip() == "no"


def test_a_prompt_of_special_tokens_begins_a_text_for_nobody():
    """The model's first word has its space: where the prompt ends is no beginning."""
    for name in ("llama2", "mistral", "unigram", "unigram_bytes", "unigram_bytes_metaspace"):
        backend, tokenizer = made(name)
        ids = [i for i in encode(backend, "the model is") if i != backend.token_to_id("<s>")]
        assert "".join(pieces_of(tokenizer, ids_of(backend, "<s>"), ids)) == " the model is"


def test_spaces_at_the_end_of_an_output_stay():
    backend = stripped_ends()
    ids = encode(backend, "the  model ")
    plain = Tokenizer(mistral())
    assert pieces_of(Tokenizer(backend), ids, ids) == pieces_of(plain, ids, ids)


def test_special_and_unknown_ids_within_a_character_are_passed_over():
    backend, tokenizer = made("llama2")
    a, b, c, d = ids_of(backend, "<<😀>>")
    (eos,) = ids_of(backend, SPECIALS[2])
    assert "".join(pieces_of(tokenizer, [], [a, b, eos, c, tokenizer.vocab_size + 1, d])) == "😀"


@pytest.mark.parametrize("name", ALL)
def test_only_the_end_of_a_prompt_is_read(name):
    """However long the prompt: what a token adds depends on the token before it at most."""

    class Long(list[int]):
        def __iter__(self):
            raise AssertionError("the whole prompt was read")

        def __getitem__(self, at):
            assert isinstance(at, slice)
            end = list.__getitem__(self, at)
            assert len(end) < 32
            return end

    backend, tokenizer = made(name)
    prompt, ids = encode(backend, "the model is hello" * 1000), encode(backend, "no the model")
    assert pieces_of(tokenizer, Long(prompt), ids) == pieces_of(tokenizer, prompt[-40:], ids)


def test_a_stream_without_characters_is_read_on_in_constant_time():
    """A decoder of whole texts holds bytes back for a few tokens only."""
    backend = TOKENIZERS["whole_texts"]()
    tokenizer = Tokenizer(backend)
    backend.add_tokens(["\ufffd"])
    (lost,) = ids_of(backend, "\ufffd")
    detokenizer = IncrementalDetokenizer(tokenizer)
    longest = 0
    for _ in range(200):
        detokenizer.push(lost)
        longest = max(longest, len(detokenizer._ids))
    assert longest < 32


# --- stop strings --------------------------------------------------------------------------------------------------


def run(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> tuple[str, str | None, int]:
    """The text, the stop string, and the number of tokens that were needed."""
    output = OutputText(tokenizer, [], stop=stop)
    needed = next((count for count, token in enumerate(ids, 1) if output.push(token) is not None), len(ids))
    return output.take(final=True), output.stop, needed


@pytest.mark.parametrize("name", ["llama2", "mistral", "gemma", "unigram_bytes", "unigram_bytes_metaspace"])
def test_a_stop_string_of_byte_tokens_ends_the_output_with_its_last_byte(name):
    backend, tokenizer = made(name)
    the = ids_of(backend, "▁the")
    assert run(tokenizer, [*the, *ids_of(backend, "<<\n>>")], ["\n"]) == (" the", "\n", 2)
    later = ids_of(backend, "<<é\n\nnot this>>")
    assert run(tokenizer, [*the, *later], ["\n\n"]) == (" theé", "\n\n", 5)
    assert run(tokenizer, ids_of(backend, "<<😀>>"), ["😀"]) == ("", "😀", 4)
    assert run(tokenizer, [*the, *ids_of(backend, "<<😀>>")[:3]], ["\ufffd"]) == (" the", "\ufffd", 4)


@pytest.mark.parametrize("name", ALL)
def test_no_stop_string_is_missed_and_no_token_beyond_it_is_needed(name):
    backend, tokenizer = made(name)
    rng = random.Random(2)
    for _ in range(150):
        ids = encode(backend, " ".join(rng.choice(WORDS) for _ in range(8)))
        if name in WITH_BYTES and rng.random() < 0.5:
            ids += ids_of(backend, "<<\n>>") if name != "byte_level" else encode(backend, "\n")
        pieces = pieces_of(tokenizer, [], ids)
        text = "".join(pieces)
        at = rng.randrange(len(text))
        stop = [text[at : at + rng.randrange(1, 5)], "never this"]
        end = text.index(stop[0]) + len(stop[0])
        needed = next(n for n in range(len(ids) + 1) if len("".join(pieces[:n])) >= end)
        assert run(tokenizer, ids, stop) == (text[: end - len(stop[0])], stop[0], needed)
