"""Write the table of modules in docs/design/architecture.md: the first sentence of every module's docstring.

python tools/module_table.py           # rewrite the table
python tools/module_table.py --check   # end with 1 if it is not up to date
"""

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design" / "architecture.md"
BEGIN, END = "<!-- modules: python tools/module_table.py -->\n", "<!-- end of modules -->\n"


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<!Eq)(?<!Fig)\. (?=[A-Z`])", text)[0].removesuffix(".").replace("|", "\\|")


def table() -> str:
    """Return the table, one part per folder, from the files of the tree."""
    folders: dict[Path, list[Path]] = {}
    for package in ("apt_jax", "serve"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py" and not path.stem.endswith("_pb2"):
                folders.setdefault(path.parent.relative_to(ROOT), []).append(path)
    parts = []
    for folder, paths in sorted(folders.items()):
        rows = [f"| `{path.name}` | {first_sentence(path)} |\n" for path in paths]
        parts.append(f"| `{folder.as_posix()}/` | |\n|---|---|\n" + "".join(rows))
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="the table of modules in docs/design/architecture.md")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if the table is not up to date")
    args = parser.parse_args()
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    new = f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"
    if args.check:
        if new != text:
            print(f"{PAGE.relative_to(ROOT)}: run python tools/module_table.py", file=sys.stderr)
        return int(new != text)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
