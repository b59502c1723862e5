"""The text that a client gets satisfies the constraint, whatever the tokenizer; it continues the prompt."""

import json
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from apt_jax.errors import InvalidRequestError
from apt_jax.request import StructuredOutputsParams
from apt_jax.structured.compile_worker import TokenTable
from apt_jax.structured.compiler import GrammarCompiler
from apt_jax.structured.constraint import LLConstraint, MaskFiller, NoTokenLeftError
from apt_jax.text.detokenizer import OutputText
from apt_jax.text.tokenizer import Tokenizer
from tests.support.small_tokenizers import TOKENIZERS
from tests.support.toy_serving import byte_tokenizer

pytest.importorskip("llguidance")

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"model": {"enum": ["yes", "é no", 7]}, "is": {"type": "string", "maxLength": 6}},
    "required": ["model", "is"],
    "additionalProperties": False,
}
CHOICES = [["yes", "no"], [" yes", " no"], ["the model is", " the model", "no"], ["é", "😀 no\n"], [" the model " * 40]]
REGEXES = [
    " [a-z]{2}",
    "[a-z]{2,4}",
    r" (yes|no)!\?",
    r"[a-z]+ [0-9]{2}",
    r"\n{1,3}( the)?",
    "(é|😀){3}",
    r" ye[st]|yo",
]
WORDS_ONLY = ("wordpiece", "wordlevel", "unigram", "unigram_metaspace_only")
"""Their tokens do not make every text."""


@pytest.fixture(scope="module", params=sorted(TOKENIZERS.keys() - {"word_ends", "whole_texts"}))
def compiler(request) -> Iterator[GrammarCompiler]:
    tokenizer = Tokenizer(TOKENIZERS[request.param]())
    made = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size + 5, eos_token_ids=[EOS])
    made.name = request.param  # pyright: ignore[reportAttributeAccessIssue]
    yield made
    made.close()


def allowed(constraint: LLConstraint, size: int) -> list[int] | None:
    mask = np.full(-(-size // 32), -1, np.int32)
    if not constraint.fill_mask(mask):
        return None
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def output(compiler: GrammarCompiler, wanted: StructuredOutputsParams, seed: int) -> str:
    """Text of a random output that is complete, as a client gets it."""
    tokenizer, rng = compiler._tokenizer, random.Random(seed)
    constraint = compiler.compile(wanted).start()
    text = OutputText(tokenizer, tokenizer.encode("hello the", add_special_tokens=False), own_bytes_only=True)
    for _ in range(600):
        ids = None if constraint.ended else allowed(constraint, compiler._vocab_size)
        if ids is None:
            break
        assert max(ids) < tokenizer.vocab_size
        token = EOS if EOS in ids and rng.random() < 0.5 else rng.choice(ids)
        if token == EOS:
            break
        text.push(token)
        constraint.accept(token)
    else:
        raise AssertionError("no end")
    return text.take(final=True)


def texts(compiler: GrammarCompiler, wanted: StructuredOutputsParams) -> list[str]:
    """Some outputs. Where the vocabulary is of words a constraint is refused that no tokens satisfy, and an output ends in
    an error where no token leads on."""
    found: list[str] = []
    for seed in range(12):
        try:
            found.append(output(compiler, wanted, seed))
        except (InvalidRequestError, NoTokenLeftError):
            assert compiler.name in WORDS_ONLY  # pyright: ignore[reportAttributeAccessIssue]
    return found


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("choice", CHOICES, ids=[c[0][:12] for c in CHOICES])
def test_a_choice_is_one_of_the_texts(compiler, choice):
    found = texts(compiler, StructuredOutputsParams(choice=choice))
    assert set(found) <= set(choice)


@pytest.mark.parametrize("regex", REGEXES)
def test_an_expression_matches(compiler, regex):
    for text in texts(compiler, StructuredOutputsParams(regex=regex)):
        assert re.fullmatch(regex, text)


def test_json_is_of_the_schema(compiler):
    for text in texts(compiler, StructuredOutputsParams(json=json.dumps(SCHEMA))):
        value = json.loads(text)
        assert value.keys() == {"model", "is"}
        assert value["model"] in ("yes", "é no", 7)


def test_masks_of_many_rows_are_those_of_each(compiler):
    wanted = [StructuredOutputsParams(choice=[" the", " model"]), StructuredOutputsParams(regex=" [a-z]{2}( no)?")]
    ones, others = ([compiler.compile(wanted[i % 2]).start() for i in range(6)] for _ in range(2))
    rows = [0, 2, 3, 4, 6, 7]
    masks = np.full((9, -(-compiler._vocab_size // 32)), -1, np.int32)
    assert MaskFiller(num_threads=3)(ones, masks, rows) == [True] * 6
    for constraint, row in zip(others, rows, strict=True):
        mask = np.zeros(masks.shape[1], np.int32)
        assert constraint.fill_mask(mask)
        assert (mask == masks[row]).all()
    assert (masks[[1, 5, 8]] == -1).all()


@pytest.mark.parametrize("name", WORDS_ONLY)
def test_texts_that_words_make_are_said(name):
    tokenizer = Tokenizer(TOKENIZERS[name]())
    made = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[EOS])
    made.name = name  # pyright: ignore[reportAttributeAccessIssue]
    choice = [" yes", " no model", " the", " the model"]
    assert set(texts(made, StructuredOutputsParams(choice=choice))) > {" yes"}
    assert {text[0] for text in texts(made, StructuredOutputsParams(regex=" [a-z]{2,5}"))} == {" "}
    made.close()


@pytest.mark.parametrize("name", ["word_ends", "whole_texts"])
def test_tokens_whose_text_depends_on_others_are_refused(name):
    tokenizer = Tokenizer(TOKENIZERS[name]())
    made = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[EOS])
    with pytest.raises(InvalidRequestError, match="this model's tokenizer cannot be used"):
        made.compile(StructuredOutputsParams(choice=["yes"]))
    made.close()


def test_tokens_of_a_text_are_those_that_its_tokenizer_takes():
    """Constraints do not lead a model away from how it was taught to write."""
    tokenizer = Tokenizer(TOKENIZERS["llama2"]())
    continuations = tokenizer.continuations
    table = TokenTable(continuations.pieces(tokenizer.vocab_size), [0, 1, 2], [2], continuations.encoder())
    backend = tokenizer.backend
    for text in (" the model", "hello no", "é"):
        names = [backend.id_to_token(i) for i in table(text)]
        assert names == [backend.id_to_token(i) for i in backend.encode("a" + text, add_special_tokens=False).ids][1:]


def test_a_text_is_split_wherever_tokens_make_it():
    """Against a search of all ways."""
    rng = random.Random(0)
    for _ in range(300):
        tokens = [b"", *{"".join(rng.choices("ab", k=rng.randrange(1, 5))).encode() for _ in range(5)}]
        table = TokenTable(tokens, [], [0])
        text = "".join(rng.choices("ab", k=rng.randrange(1, 10)))
        ways = {b""}  # what tokens make, and whether something is left with which one begins
        begun = {t[:end] for t in tokens for end in range(1, len(t))} | {b""}
        for _ in text:
            ways |= {w + t for w in ways for t in tokens if text.encode().startswith(w + t)}
        possible = any(text.encode()[len(w) :] in begun for w in ways)
        ids = table(text)
        assert b"".join(table.tokens[i] for i in ids) == text.encode()
        assert possible or set(ids) <= set(table.unsampled)
        real = [i for i in ids if i not in table.unsampled]
        assert ids[: len(real)] == real


def test_a_compiler_takes_a_tokenizer_json_and_no_id_beyond_those_that_count():
    tokenizer = byte_tokenizer()
    made = GrammarCompiler(tokenizer.backend.to_str, vocab_size=400, num_tokens=100, eos_token_ids=[2])
    try:
        matcher = made.compile(StructuredOutputsParams(regex=".{3}")).start()
        row = np.zeros(13, np.int32)
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert allowed.size > 10
        assert allowed.max() < 100
    finally:
        made.close()
