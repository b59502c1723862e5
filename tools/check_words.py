"""Check that code, comments, messages and documents use the field's words (tools/words.toml), not old private ones.

    python tools/check_words.py [FILE ...]     # without files: everything that git tracks

Prints a line for each find, with the word to use instead, and ends with 1 if there is one. First sentences of
docstrings and help texts name the thing instead of pronouns ("those", "what"): `[first_sentences]` of the same file.
"""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = {".py", ".md", ".toml", ".ipynb", ".yaml", ".html", ".js", ".css", ".proto", ".cc", ".h", ""}


def tracked() -> list[Path]:
    """Return the files of the repository, new ones among them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings, of attributes too, and help texts, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg == "help"):
            value = node.value
        else:
            continue
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value


def awkward_sentences(source: str, pattern: re.Pattern[str]) -> list[tuple[int, str, str]]:
    """Line, match and text of the first sentences in Python source that match."""
    found = []
    for line, text in _texts(ast.parse(source)):
        first = re.split(r"(?<=[.:;]) ", " ".join(text.split()), maxsplit=1)[0]
        if match := pattern.search(first):
            found.append((line, match.group(), first))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="the words of the project")
    parser.add_argument("files", nargs="*", type=Path)
    args = parser.parse_args()

    settings = tomllib.loads((ROOT / "tools" / "words.toml").read_text())
    rules = [(re.compile(rule["pattern"]), rule["use"], tuple(rule.get("not_in", ()))) for rule in settings["rule"]]
    first = settings["first_sentences"]
    awkward = re.compile(first["pattern"])
    finds = 0
    for path in [file.resolve() for file in args.files] or tracked():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in SUFFIXES or any(fnmatch(name, pattern) for pattern in settings["not_in"]):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for pattern, use, not_in in rules:
                found = pattern.search(line)
                if found and not any(fnmatch(name, other) for other in not_in):
                    finds += 1
                    print(f"{name}:{number}: {found.group()!r}: {use}")
        packages = name.startswith(("apt_jax/", "serve/")) and path.suffix == ".py"
        if packages and not any(fnmatch(name, other) for other in first["not_in"]):
            for number, word, _ in awkward_sentences(path.read_text(), awkward):
                finds += 1
                print(f"{name}:{number}: {word!r} in a first sentence: {first['use']}")
    if finds:
        print(f"{finds} finds; tools/words.toml has the rules", file=sys.stderr)
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
