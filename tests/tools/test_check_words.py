"""The check of first sentences: it finds pronouns in the place of nouns, and nothing else."""

import re
import tomllib
from pathlib import Path

import pytest

from tools.check_words import awkward_sentences

SETTINGS = tomllib.loads((Path(__file__).parents[2] / "tools/words.toml").read_text())
PATTERN = re.compile(SETTINGS["first_sentences"]["pattern"])


def _found(source: str) -> list[str]:
    return [match for _, match, _ in awkward_sentences(source, PATTERN)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Those of the rows whose tokens count.", "Those"),
        ("Return what is unread.", "what"),
        ("Blocks that so many GiB hold.", "so many"),
        ("Requires guided_json alone.", "alone"),
        ("The last id that is no special token's.", "is no"),
        ("Tiles that there are.", "that there are"),
    ],
)
def test_pronouns_in_first_sentences_are_found(text: str, word: str) -> None:
    for source in (f'"""{text}"""', f'def f():\n    """{text}"""', f'x = 1\n"""{text}"""', f'f(help="{text}")'):
        assert _found(source) == [word], source


@pytest.mark.parametrize(
    "source",
    [
        '"""Return the unread output. What follows is not looked at."""',
        '"""Number of blocks; None: all."""',
        'x = "what it is"',
        'f(text="those")',
    ],
)
def test_other_sentences_and_texts_are_not(source: str) -> None:
    assert _found(source) == []


def test_the_line_is_that_of_the_text() -> None:
    ((line, _, first),) = awkward_sentences('x = 1\n\n\ndef f():\n    """What\n    it is."""\n', PATTERN)
    assert (line, first) == (5, "What it is.")
