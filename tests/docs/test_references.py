"""Files and modules that the documentation and docstrings name exist."""

import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
YOURS = {"my_policy.py"}
"""Files of readers."""


def _files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a clone")
    return listed.stdout.split()


def _named(pattern: str) -> Iterator[tuple[str, str]]:
    """(file and line, what matches) of everything between backticks but in the changelog and in results."""
    for name in _files():
        if not name.endswith((".md", ".py")) or name.startswith("benchmarks/results/") or name == "CHANGELOG.md":
            continue
        text = (ROOT / name).read_text()
        for found in re.finditer(f"`({pattern})`", text):
            yield f"{name}:{text.count(chr(10), 0, found.start()) + 1}", found.group(1)


def test_files_that_are_named_exist() -> None:
    files = _files()
    ends = {"/".join(name.split("/")[i:]) for name in files for i in range(name.count("/") + 1)}
    missing = [
        f"{where}: {what}"
        for where, what in _named(r"(?:[\w-]+/)*[\w-]+\.(?:py|cc|proto)")
        if what not in ends and what not in YOURS
    ]
    assert not missing, "\n".join(missing)


def test_the_architecture_names_every_package() -> None:
    """Add a row of one line to the tables under "Packages" of docs/design/architecture.md."""
    text = (ROOT / "docs" / "design" / "architecture.md").read_text()
    for root in ("apt_jax", "serve"):
        rows = text.split(f"| `{root}/` | |\n", 1)[1].split("\n\n", 1)[0]
        named = set(re.findall(r"^\| `([\w/]+)/`", rows, re.MULTILINE))
        packages = {name.split("/")[1] for name in _files() if name.startswith(f"{root}/") and name.count("/") > 1}
        assert named == packages, root


def _exists(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part) and part not in getattr(found, "__annotations__", {}):
                return False
            found = getattr(found, part, None)
        return True
    return False


def test_modules_that_are_named_exist() -> None:
    groups = {"apt_jax.scheduling_policies"}  # entry points
    names = [n for n in _named(r"apt_jax\.[\w.]+\w") if n[1] not in groups]
    assert names
    missing = [f"{where}: {what}" for where, what in names if not _exists(what)]
    assert not missing, "\n".join(missing)
