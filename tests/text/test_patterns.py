"""Patterns that are made of texts."""

import random
import re
import time

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from apt_jax.text.patterns import any_of
from apt_jax.text.tokenizer import Tokenizer


def one_by_one(texts: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def test_finds_what_an_alternation_finds_the_longest_first() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        texts = ["".join(rng.choices("ab<|\n.é", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 9))]
        text = "".join(rng.choices("ab<|\n.é", k=30))
        assert any_of(texts).findall(text) == one_by_one(texts).findall(text), (texts, text)


def test_texts_that_each_begin_with_the_one_before() -> None:
    texts = ["a" * size for size in range(1, 600)]
    assert any_of(texts).findall("a" * 1000) == ["a" * 599, "a" * 401]


def seconds(pattern: re.Pattern[str], text: str) -> float:
    begun = time.thread_time()
    assert pattern.search(text) is None
    return time.thread_time() - begun


def test_the_time_to_search_does_not_grow_with_the_number_of_texts() -> None:
    text = "<unused" * 20_000
    few, many = any_of([f"<unused{n}>" for n in range(10)]), any_of([f"<unused{n}>" for n in range(6000)])
    quick = min(seconds(few, text) for _ in range(5))
    assert min(seconds(many, text) for _ in range(3)) < 20 * quick + 0.01  # one by one takes 600 times as long


@pytest.mark.parametrize(
    ("sides", "expected"),
    [({"lstrip": True}, "a<s>  b<s>c<s><s> d"), ({"rstrip": True}, "a  <s>b <s>c <s><s>d"), ({}, "a  <s>  b <s>c <s> <s> d")],
)  # fmt: skip
def test_tokens_of_templates_swallow_the_spaces_beside_them(sides, expected) -> None:
    vocab = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<s>", special=True, **sides)])
    tokenizer = Tokenizer(backend)
    text = "a  <s>  b <s>c <s> <s> d"
    for more in ("", "<s>"):  # the text as a whole, and in parts
        ids = tokenizer.encode_template(text + more, [(0, len(text))])
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected + more
