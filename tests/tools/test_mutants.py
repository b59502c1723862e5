"""The mutants: every patch applies and names tests that exist, and the runner tells what it is there to tell."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.mutants.__main__ import PAGE, page
from tools.mutants.patch import PATCHES, ROOT, Mutant, read_mutant, read_mutants
from tools.mutants.runner import Verdict, copy_tree, run_all

# Two are canaries.
LEAST = 42


def test_every_patch_applies_to_the_tree_as_it_is():
    errors = [error for mutant in read_mutants() if (error := mutant.apply_error(ROOT, only_check=True))]
    assert not errors, "\n".join(["make these patches again (CONTRIBUTING.md):", *errors])


def test_every_patch_names_tests_that_exist():
    names: dict[Path, set[str]] = {}
    for mutant in read_mutants():
        assert (ROOT / mutant.file).is_file()
        for test in mutant.tests:
            file, *parts = test.split("::")
            path = ROOT / file
            if path not in names:
                names[path] = set(_tests(ast.parse(path.read_text()).body))
            assert "::".join(parts).partition("[")[0] in names[path], f"{mutant.path.name}: there is no {test}"


def _tests(body: list[ast.stmt], within: str = "") -> list[str]:
    found = []
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            found += _tests(statement.body, f"{statement.name}::")
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(within + statement.name)
    return found


def test_there_are_enough_and_the_canaries_among_them():
    mutants = {mutant.name: mutant for mutant in read_mutants()}
    assert len(mutants) >= LEAST
    assert mutants["canary-harmless"].expected == "survives"
    assert mutants["canary-gross"].expected == "killed"
    assert sum(mutant.expected == "survives" for mutant in mutants.values()) == 1


def test_the_page_lists_the_patches_that_there_are():
    rows = re.findall(r"^\| ([\w-]+) \| (\w[\w ]*) \|$", PAGE.read_text(), re.MULTILINE)[1:]  # below the head
    assert {name for name, _ in rows} == {path.stem for path in PATCHES.glob("*.patch")}, "make mutants"
    assert {result for _, result in rows} <= {"killed", "survived", "not run"}  # others are as they must not be


# --- the runner, on a project of two files ---------------------------------------------------------------------------

CODE = "def half(n):\n    return n // 2\n\n\ndef unused():\n    return 1\n"
TESTS = "from code_of_mine import half\n\n\ndef test_half():\n    assert half(4) == 2\n"


def patch(old: str, new: str, *, expected: str = "killed", tests: str = "test_it.py::test_half") -> str:
    return (
        f"Breaks: something\nExpected: {expected}\nTests: {tests}\n--- a/code_of_mine.py\n+++ b/code_of_mine.py\n"
        f"@@ -1,4 +1,4 @@\n def half(n):\n-    return {old}\n+    return {new}\n \n \n"
    )


PATCHES_OF_IT = {
    "1-killed": patch("n // 2", "n // 3"),
    "4-survived": patch("n // 2", "n - n // 2"),
    "5-stale": patch("n // 7", "n"),
    "6-no-such-test": patch("n // 2", "n", tests="test_it.py::test_none"),
    "7-no-module": patch("n // 2", "(n"),
    "8-equivalent": patch("n // 2", "n - n // 2", expected="equivalent"),
}


@pytest.fixture
def project(tmp_path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "code_of_mine.py").write_text(CODE)
    (tree / "test_it.py").write_text(TESTS)
    (tree / "pytest.ini").write_text("[pytest]\n")
    return tree


def mutants_of(directory: Path) -> list[Mutant]:
    directory.mkdir()
    for name, text in PATCHES_OF_IT.items():
        (directory / f"{name}.patch").write_text(text)
    return read_mutants(directory)


def test_the_runner_tells_killed_from_surviving_and_from_neither(tmp_path, project):
    reported: list[Verdict] = []
    second = tmp_path / "second"
    shutil.copytree(project, second)
    verdicts = run_all(mutants_of(tmp_path / "patches"), [project, second], 120.0, reported.append)
    assert [verdict.outcome for verdict in verdicts] == [
        "killed", "survived", "does not apply", "no verdict", "no verdict", "not run",
    ]  # fmt: skip
    assert [verdict.mutant.name for verdict in verdicts if not verdict.is_expected] == [
        "4-survived", "5-stale", "6-no-such-test", "7-no-module",
    ]  # fmt: skip
    assert len(reported) == len(verdicts)
    assert (project / "code_of_mine.py").read_text() == CODE  # all have been taken back
    text = page(verdicts, "", "today")
    assert "6 mutants, 1 killed, 4 not as expected; last run: today." in text
    assert "| **survived** |" in text
    before = text.replace("| 1-killed | killed |", "| 1-killed | **survived** |") + "| gone | killed |\n"
    later = page(verdicts[:1], before, "then")
    assert "1 mutants, 1 killed, 0 not as expected; last run: then." in later  # the others have no patch in this tree
    assert "5-stale.patch does not apply" in verdicts[2].says
    assert "\n" not in verdicts[2].says


def test_a_tree_is_copied_as_git_knows_it(tmp_path, project):
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / ".gitignore").write_text("ignored\n")
    (project / "ignored").write_text("x")
    copy_tree(project, tmp_path / "copy")
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert names == {"code_of_mine.py", "test_it.py", "pytest.ini", ".gitignore"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (patch("a", "b").replace("Tests: ", "Test: "), "needs the lines"),
        (patch("a", "b").replace("--- a/", "--- "), "needs the lines"),
        (patch("a", "b", expected="dead"), "Expected is 'dead'"),
        (patch("a", "b", tests="test_it.py"), "node ids"),
        (patch("a", "b") + "--- a/other.py\n+++ b/other.py\n", "more than one file"),
    ],
)
def test_headers_are_checked(tmp_path, text, says):
    (tmp_path / "x.patch").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_mutant(tmp_path / "x.patch")
