"""The patches: their headers, and whether they apply."""

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Literal, cast, get_args

ROOT = Path(__file__).parents[2]
PATCHES = Path(__file__).parent / "patches"

Expected = Literal["killed", "survives", "equivalent"]

_FIELDS = ("Breaks", "Expected", "Tests")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A patch and what is known of it."""

    path: Path
    breaks: str
    expected: Expected
    tests: tuple[str, ...]
    """Node ids, relative to the root of the project."""
    file: str
    """The file that it changes."""

    @property
    def name(self) -> str:
        return self.path.stem

    def apply_error(self, tree: Path, *, only_check: bool = False) -> str | None:
        """Apply the patch to a tree; returns one line if it does not fit, and changes nothing then."""
        return _apply(self.path, tree, "--check") if only_check else _apply(self.path, tree)

    def revert(self, tree: Path) -> None:
        """Take the patch back.

        Raises:
            RuntimeError: it cannot be taken back.
        """
        error = _apply(self.path, tree, "--reverse")
        if error is not None:
            raise RuntimeError(error)


def read_mutant(path: Path) -> Mutant:
    """Read a patch.

    Raises:
        ValueError: its header is not as it should be, in one line.
    """
    header, mark, diff = path.read_text().partition("\n--- a/")
    fields = dict(line.split(": ", 1) for line in header.splitlines() if ": " in line)
    if tuple(fields) != _FIELDS or not mark:
        raise ValueError(f"{path.name}: needs the lines {', '.join(_FIELDS)} and a diff with '--- a/FILE'")
    if fields["Expected"] not in get_args(Expected):
        raise ValueError(f"{path.name}: Expected is {fields['Expected']!r}, not {' or '.join(get_args(Expected))}")
    if "\n--- a/" in diff:
        raise ValueError(f"{path.name}: changes more than one file")
    tests = tuple(fields["Tests"].split())
    if not tests or not all("::" in test for test in tests):
        raise ValueError(f"{path.name}: Tests must be node ids, FILE::TEST")
    return Mutant(path, fields["Breaks"], cast("Expected", fields["Expected"]), tests, diff.splitlines()[0])


def read_mutants(directory: Path = PATCHES) -> list[Mutant]:
    """Read all patches of a directory, by name."""
    return [read_mutant(path) for path in sorted(directory.glob("*.patch"))]


def _apply(patch: Path, tree: Path, *flags: str) -> str | None:
    command = ["git", "apply", "--whitespace=nowarn", *flags, str(patch)]
    # A repository above the tree must not count: git would leave out whatever lies outside of the tree.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=environment, check=False)
    return None if done.returncode == 0 else f"{patch.name} does not apply: {' '.join(done.stderr.split())[:200]}"
