"""The audit against the papers: complete, with evidence that exists, and as its page says."""

import re
from pathlib import Path

import pytest

from benchmarks.paper import audit
from tools.cache_kinds import splice

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "lab" / "audit.md"
ROWS = audit.read()
LAST = {"A": 57, "I": 29, "B": 31}


def parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def defines(path: Path, name: str) -> bool:
    """Return True if a Python file has a function, a class, a field or a constant of this name."""
    return (
        re.search(rf"^\s*(?:(?:def|class) {name}\b|{name}\b[^=\n(]*[:=])", path.read_text(), re.MULTILINE) is not None
    )


def test_every_item_has_one_row() -> None:
    assert [row.id for row in ROWS] == [f"{paper}{n}" for paper, last in LAST.items() for n in range(1, last + 1)]
    assert all(row.item and row.where for row in ROWS)


def test_what_is_not_right_has_a_cause() -> None:
    assert {row.status for row in ROWS} <= set(audit.STATUSES)
    without = [row.id for row in ROWS if row.status != "right" and row.reason.partition(": ")[0] not in audit.CAUSES]
    assert not without


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_evidence_exists(row: audit.Row) -> None:
    evidence = parts(row.evidence)
    assert evidence or row.status == "missing"
    for path, _, name in (part.partition("::") for part in evidence):
        assert (ROOT / path).is_file(), path
        assert not name or defines(ROOT / path, name), f"{path}::{name}"
    for path in parts(row.result):
        assert (ROOT / path).stat().st_size > 0, path


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_shows_it_exists(row: audit.Row) -> None:
    command = re.fullmatch(r"python -m ([\w.]+)(?: (\w+))?", row.shown_by)
    if command is None:
        path, name = row.shown_by.split("::")
        assert path.startswith("tests/")
        assert re.search(rf"^(?: {{4}})?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), row.shown_by
        return
    module, figure = command.groups()
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    assert "def main(" in source
    assert figure is None or f'"{figure}"' in source, row.shown_by
    assert row.result or row.status != "right", f"{row.id}: an experiment that is right has a committed result"


def test_names_that_are_not_there_are_noticed() -> None:
    path = ROOT / "benchmarks" / "paper" / "audit.py"
    assert all(defines(path, name) for name in ("read", "Row", "status", "CAUSES"))
    assert not any(defines(path, name) for name in ("rea", "Rows", "argv", "splice"))


def test_the_page_says_what_the_table_says() -> None:
    text = PAGE.read_text()
    assert splice(text, audit.markdown(ROWS), audit.BEGIN, audit.END) == text


def test_the_page_is_written_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{audit.BEGIN}\nold\n{audit.END}\nend\n")
    assert audit.main([str(page)]) == 0
    assert audit.main([]) == 0
    printed = capsys.readouterr().out
    assert page.read_text() == f"# Title\n{audit.BEGIN}\n{printed}{audit.END}\nend\n"
    assert sum(line.startswith("| all |") for line in printed.splitlines()) == 1
