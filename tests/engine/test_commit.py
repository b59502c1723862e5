"""The end of a request: which of several reasons counts."""

import itertools

import pytest

from apt_jax.engine.commit import finish_reason
from apt_jax.request import SamplingParams

STOP, OTHER = 5, 6
MIN_TOKENS, MAX_TOKENS = 3, 5
LATE = range(MIN_TOKENS, MAX_TOKENS + 1)


def reason(count: int, *, token: int = OTHER, string: str | None = None, ended: bool = False):
    params = SamplingParams(min_tokens=MIN_TOKENS, max_tokens=MAX_TOKENS)
    return finish_reason(token, count, params, frozenset({STOP, 7}), string, ended)


@pytest.mark.parametrize(
    ("causes", "counts", "expected"),
    [
        ({"token": STOP}, (1, 2), (None, None)),
        ({"string": "END"}, (1, 2), (None, None)),
        ({"token": STOP, "string": "END"}, (1, 2), (None, None)),
        ({"ended": True}, (1, 2), ("stop", None)),
        ({"token": STOP, "string": "END", "ended": True}, (1, 2), ("stop", None)),
        ({}, (1, 2, 3, 4), (None, None)),
        ({}, (5, 6), ("length", None)),
        ({"token": STOP}, LATE, ("stop", STOP)),
        ({"string": "END"}, LATE, ("stop", "END")),
        ({"string": ""}, LATE, ("stop", "")),
        ({"ended": True}, LATE, ("stop", None)),
        ({"token": STOP, "string": "END", "ended": True}, LATE, ("stop", STOP)),
        ({"string": "END", "ended": True}, LATE, ("stop", "END")),
    ],
)
def test_the_first_reason_counts(causes, counts, expected):
    for count in counts:
        assert reason(count, **causes) == expected


def test_every_combination_is_in_the_documented_order():
    """Stop token, stop string, constraint, length; the first two from `min_tokens` on."""
    for count, token, string, ended in itertools.product(range(1, 8), (STOP, OTHER), (None, "END"), (False, True)):
        causes = {
            ("stop", token): token == STOP and count >= MIN_TOKENS,
            ("stop", string): string is not None and count >= MIN_TOKENS,
            ("stop", None): ended,
            ("length", None): count >= MAX_TOKENS,
            (None, None): True,
        }
        first = next(end for end, applies in causes.items() if applies)
        assert reason(count, token=token, string=string, ended=ended) == first


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_min_tokens_may_be_all_tokens(max_tokens):
    params = SamplingParams(min_tokens=max_tokens, max_tokens=max_tokens)
    assert finish_reason(STOP, max_tokens, params, frozenset({STOP}), None, False) == ("stop", STOP)
    assert finish_reason(STOP, max_tokens, params, frozenset(), None, False) == ("length", None)
