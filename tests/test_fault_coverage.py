"""Every row of the list of faults (docs/lab/faults.md) has a test that is named after it, or a reason why not.

`grep -rn "def test_.*C4_" tests` finds the tests of a row.
"""

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lab" / "faults.md"
GROUPS = {"C": 16, "R": 26, "Q": 10, "E": 12, "M": 13, "D": 7, "F": 10, "H": 12, "N": 11, "O": 10}
"""Rows of each group: nobody drops one unseen."""


def page() -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the cells of each row by its id, and the reasons for rows without a test."""
    listed, without = PAGE.read_text().split("## Rows without a test")
    rows: dict[str, list[str]] = {}
    for row, *cells in _cells(listed):
        assert row not in rows, f"{row} stands twice in {PAGE.name}"
        rows[row] = cells
    reasons = _cells(without)
    assert len({row for row, *_ in reasons}) == len(reasons)
    return rows, {row: " ".join(cells) for row, *cells in reasons}


def _cells(text: str) -> list[list[str]]:
    lines = re.findall(r"^\| ([A-Z]\d+ \|.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def named_tests() -> dict[str, list[str]]:
    """Return the tests whose names begin with an id, by id, as pytest would collect them."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in _tests(ast.parse(path.read_text()).body):
            for row in re.findall(r"[A-Z]\d+(?=_)", (re.match(r"test_((?:[A-Z]\d+_)*)", name) or [""])[0]):
                if row[0] in GROUPS:
                    found[row].append(f"{path.relative_to(ROOT)}::{name}")
    return found


def _tests(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.ClassDef) and statement.name.startswith("Test"):
            yield from _tests(statement.body)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name.startswith("test_"):
            yield statement.name


def test_the_list_is_whole():
    rows, reasons = page()
    assert set(rows) == {f"{group}{number}" for group, most in GROUPS.items() for number in range(1, most + 1)}
    assert all(len(cells) == 2 and all(cells) for cells in rows.values())
    assert set(reasons) <= set(rows)
    assert all(len(reason.split()) >= 5 for reason in reasons.values()), "a reason is a sentence"


def test_every_row_has_a_test_or_a_reason():
    rows, reasons = page()
    named = named_tests()
    neither = set(rows) - set(named) - set(reasons)
    assert not neither, f"{sorted(neither)} have neither a test nor a reason in docs/lab/faults.md"
    both = set(reasons) & set(named)
    assert not both, f"{sorted(both)} have a test: drop them from the table of reasons in docs/lab/faults.md"
    unknown = set(named) - set(rows)
    assert not unknown, f"{[named[row] for row in sorted(unknown)]} carry ids that are not in docs/lab/faults.md"


def test_names_are_read_as_pytest_collects_them():
    source = "class TestA:\n  def test_M1_x(self): ...\nasync def test_C1_R2_y(): ...\ndef help_C3_z(): ...\n"
    assert list(_tests(ast.parse(source).body)) == ["test_M1_x", "test_C1_R2_y"]
