"""Masks of `bad_words` and `allowed_token_ids`, alone and with another constraint."""

import dataclasses

import numpy as np
import pytest

from apt_jax.structured.constraint import NoTokenLeftError
from apt_jax.structured.token_rules import RestrictedConstraint

V = 70  # a word and a bit more than two


def allowed_after(constraint: RestrictedConstraint, *tokens: int) -> set[int]:
    for token in tokens:
        constraint.accept(token)
    row = np.zeros(-(-V // 32), np.int32)
    assert constraint.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:V]).tolist())


@dataclasses.dataclass
class Only:
    """A constraint that allows some tokens; none: it has ended."""

    tokens: set[int]

    @property
    def ended(self) -> bool:
        return not self.tokens

    def accept(self, token_id: int) -> None:
        self.tokens = self.tokens - {token_id}

    def fill_mask(self, row):
        row.fill(0)
        for token in self.tokens:
            row.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
        return bool(self.tokens)


def test_only_the_allowed_tokens_may_come():
    assert allowed_after(RestrictedConstraint(None, (0, 31, 32, 69), ())) == {0, 31, 32, 69}
    assert allowed_after(RestrictedConstraint(None, (5,), ()), 5, 5) == {5}


def test_the_last_token_of_a_bad_word_is_forbidden_after_the_others():
    every = set(range(V))
    words = ((3,), (31, 64, 7), (64, 8))
    assert allowed_after(RestrictedConstraint(None, None, words)) == every - {3}
    assert allowed_after(RestrictedConstraint(None, None, words), 31) == every - {3}
    assert allowed_after(RestrictedConstraint(None, None, words), 31, 64) == every - {3, 7, 8}
    assert allowed_after(RestrictedConstraint(None, None, words), 1, 64) == every - {3, 8}
    assert allowed_after(RestrictedConstraint(None, None, words), 31, 64, 1) == every - {3}


def test_it_takes_away_from_what_another_constraint_allows():
    constraint = RestrictedConstraint(Only({1, 2, 40}), (2, 40, 50), ((2, 40),))
    assert allowed_after(constraint) == {2, 40}
    assert not constraint.ended
    constraint.accept(2)
    row = np.zeros(3, np.int32)
    with pytest.raises(NoTokenLeftError, match="allowed_token_ids: allows no token"):
        constraint.fill_mask(row)  # the other one wants 1 or 40


def test_it_ends_with_the_other_constraint():
    constraint = RestrictedConstraint(Only({1}), None, ((9,),))
    constraint.accept(1)
    assert constraint.ended
    assert not constraint.fill_mask(np.zeros(3, np.int32))
    assert not RestrictedConstraint(None, (1,), ()).ended


def test_they_agree_with_a_search_in_the_output():
    rng = np.random.default_rng(3)
    words = tuple(tuple(rng.integers(0, 4, size).tolist()) for size in (1, 2, 2, 3, 4))
    constraint, output = RestrictedConstraint(None, None, words), []
    for _ in range(200):
        found = allowed_after(constraint)
        for token in range(4):
            text = [*output, token]
            ends = any(text[-len(word) :] == list(word) for word in words)
            assert (token in found) is not ends
        output.append(int(rng.choice(sorted(found & set(range(8))))))
        constraint.accept(output[-1])
