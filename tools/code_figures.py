"""Figures of the source tree: sizes, circles, upward imports, repeated passages, flags, policies, words of documents.

    python tools/code_figures.py                  # this tree
    python tools/code_figures.py --root ../old    # another checkout, e.g. an earlier commit
    python tools/code_figures.py --list           # name what is over a limit

Flags of `serve` are those of tests/snapshots/cli_flags.json. Counts `*.py` under `apt_jax/` and `serve/` without generated protobuf code. Imports under `if TYPE_CHECKING:` count as
imports: a circle that only types close is a circle still. It reads the files alone and imports nothing of the project.
"""

import argparse
import ast
import collections
import dataclasses
import json
import re
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from check_words import awkward_sentences

PACKAGES = ("apt_jax", "serve")

# From the top: a module imports from its own layer and from those below. Names of the tree before the layers had
# folders stand beside today's, so that both can be measured.
LAYERS = (
    "lab",
    "serve",
    "frontend llm async_engine",
    "sim",
    "engine admission watch decisions",
    "cache prefix",
    "executor jax_executor calibrate hash_executor",
    "models text structured validation tokenizer chat chat_worker grammar grammar_worker",
    "backends pallas.registry",
    "sched distributed hosts parallel",
    "cpu pallas",
    "ops sampling",
    "config options request metrics",
    "errors utils assets version clock cache_dir child",
)
SAME_LINES = 6
"""Equal lines, blanks and surrounding space aside, that make two places a pair."""

MOST_MODULES, MOST_FILE_LINES, MOST_CLASS_LINES, MOST_PARAMETERS = 14, 600, 450, 12
LABORATORY = "apt_jax.lab"
"""Package whose lines are counted apart."""

_FLAGS = Path("tests/snapshots/cli_flags.json")
_UNCOUNTED_DOCS = ("docs/reference/generated/", "docs/lab/", "docs/_build/", "docs/notebooks/")
_SHARED_BLOCKS = re.compile(r"(?i)share[sd]?[_ ]blocks|block_?sharing|shared_?cache|\.sharing\b")
_KIND_NAMES = {"KV", "CacheKind", "KIND_NAMES", "KindSet", "KINDS"}
"""Names under which modules define a cache kind, or all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """One source file."""

    name: str
    path: Path
    lines: tuple[str, ...]
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


def modules_of(root: Path) -> dict[str, Module]:
    """Return the modules below `root` by name, generated code left out."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text()
            found[name] = Module(
                name=name, path=path.relative_to(root), lines=tuple(text.splitlines()), tree=ast.parse(text)
            )
    return found


def imports_of(module: Module, known: Iterable[str]) -> set[str]:
    """Return the project's modules that `module` imports anywhere, its own packages' `__init__` aside."""
    known = set(known)
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return (found & known) - {module.name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            part = stack[at:]
            del stack[at:]
            if len(part) > 1:
                found.append(sorted(part))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def layer_of(name: str) -> int | None:
    """Return the layer of a module, 0 at the top; None for what has none (the package's own face)."""
    best: tuple[int, int] | None = None
    for layer, prefixes in enumerate(LAYERS):
        for prefix in prefixes.split():
            prefix = prefix if prefix == "serve" else f"apt_jax.{prefix}"
            if (name == prefix or name.startswith(prefix + ".")) and (best is None or len(prefix) > best[0]):
                best = (len(prefix), layer)
    return None if best is None else best[1]


def upward(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return the imports that go from a lower layer to a higher one."""
    found = []
    for name, others in sorted(graph.items()):
        own = layer_of(name)
        for other in sorted(others):
            theirs = layer_of(other)
            if own is not None and theirs is not None and theirs < own:
                found.append((name, other))
    return found


def definitions(module: Module, kind: type | tuple[type, ...]) -> Iterator[tuple[str, int]]:
    """Yield name and lines of the classes or functions of a module."""
    for node in ast.walk(module.tree):
        if isinstance(node, kind):
            yield f"{module.path}:{node.name}", node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


def repeated(modules: Iterable[Module]) -> list[tuple[str, str]]:
    """Return the pairs of places that share `SAME_LINES` or more lines, imports left out, each longest run once."""
    texts = {}
    for module in modules:
        skipped = {
            line
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        texts[module.path] = [
            (number, line.strip())
            for number, line in enumerate(module.lines, 1)
            if line.strip() and number not in skipped
        ]
    places = collections.defaultdict(list)
    for path, lines in texts.items():
        for at in range(len(lines) - SAME_LINES + 1):
            places[tuple(line for _, line in lines[at : at + SAME_LINES])].append((path, at))
    pairs = set()
    for same in places.values():
        for one in range(len(same)):
            for two in range(one + 1, len(same)):
                pairs.add((same[one], same[two]))
    return [
        (f"{a}:{texts[a][i][0]}", f"{b}:{texts[b][j][0]}")
        for (a, i), (b, j) in sorted(pairs, key=str)
        if ((a, i - 1), (b, j - 1)) not in pairs
    ]


def option_places(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return where each field of a configuration dataclass is declared: the field, parameters of `LLM`, flags written
    out."""
    modules = list(modules)
    fields = collections.defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.ClassDef)
                and node.name.endswith("Config")
                and node.name not in {"ModelConfig", "RopeConfig"}
            ):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        fields[item.target.id].append(f"{module.path}:{item.lineno}")
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.name == "LLM":
                init = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
                for arg in init.args.kwonlyargs if init else ():
                    if arg.arg in fields:
                        fields[arg.arg].append(f"{module.path}:{arg.lineno}")
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in {
                "add_argument",
                "add",
            }:
                for value in node.args:
                    if (
                        isinstance(value, ast.Constant)
                        and isinstance(value.value, str)
                        and value.value.startswith("--")
                    ):
                        name = value.value[2:].replace("-", "_").removeprefix("no_")
                        if name in fields:
                            fields[name].append(f"{module.path}:{node.lineno}")
    return dict(fields)


def is_in_laboratory(name: str) -> bool:
    return name == LABORATORY or name.startswith(LABORATORY + ".")


def serve_flags(root: Path) -> list[str]:
    """Return the flags of `apt-jax serve`, ``--help`` aside, from the snapshot of all flags."""
    path = root / _FLAGS
    names = json.loads(path.read_text())["serve"] if path.is_file() else ()
    return [name for name in names if name.startswith("-") and not name.startswith(("--set ", "-h"))]


def policies(module: Module | None) -> int | str:
    """Return the number of policies in the table `POLICIES` of a module; an entry that a call makes counts as one. "-":
    the table is computed."""
    for node in module.tree.body if module is not None else ():
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "POLICIES":
            assert isinstance(node.value, ast.Dict)
            if any(isinstance(value, ast.DictComp) for value in node.value.values):
                return "-"
            return len(node.value.keys)
    return 0


def long_signatures(module: Module) -> Iterator[tuple[str, int]]:
    """Yield name and number of parameters of the functions with more than `MOST_PARAMETERS`, `self` aside."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            num = len(names) - (names[:1] in (["self"], ["cls"]))
            if num > MOST_PARAMETERS:
                yield f"{module.path}:{node.name}", num


def kind_spellings(root: Path, modules: Iterable[Module]) -> list[str]:
    """Return the places that define a cache kind: numbers, enumerations, tables of names, messages."""
    found = []
    for module in modules:
        for node in module.tree.body if module.name.startswith("apt_jax.") else ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            defined = {getattr(name, "id", "") for target in targets for name in getattr(target, "elts", [target])}
            if isinstance(node, ast.ClassDef):
                defined = {node.name}
            found += [f"{module.path}:{name}" for name in sorted(defined & _KIND_NAMES)]
    for path in sorted(root.glob("*/protos/**/*.proto")):
        found += [
            f"{path.relative_to(root)}:{name}" for name in re.findall(r"^enum (\w*Kind\w*)", path.read_text(), re.M)
        ]
    return found


def awkward_first_sentences(modules: Iterable[Module]) -> list[str]:
    """Return the places of first sentences that `check_words.py` finds awkward, by the words of this tree."""
    rules = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
    pattern = re.compile(rules["first_sentences"]["pattern"])
    return [
        f"{module.path}:{line}: {word}"
        for module in modules
        for line, word, _ in awkward_sentences("\n".join(module.lines), pattern)
    ]


def words_of_documents(root: Path) -> int:
    """Return the words of the pages under `docs/`, without generated ones and those of the laboratory."""
    pages = (path for path in (root / "docs").rglob("*.md"))
    counted = (p for p in pages if not p.relative_to(root).as_posix().startswith(_UNCOUNTED_DOCS))
    return sum(len(page.read_text().split()) for page in counted)


def main() -> None:
    parser = argparse.ArgumentParser(description="figures of the source tree")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument(
        "--list", action="store_true", help="name what is over a limit, and all circles and repeated passages"
    )
    args = parser.parse_args()

    modules = modules_of(args.root)
    if not modules:
        parser.error(f"no apt_jax/ or serve/ in {args.root}")
    graph = {name: imports_of(module, modules) for name, module in modules.items()}
    plain = [module for module in modules.values() if not module.is_package]
    folders = collections.Counter(str(module.path.parent) for module in plain)
    files = sorted(((str(m.path), len(m.lines)) for m in modules.values()), key=lambda item: -item[1])
    classes = sorted((c for m in modules.values() for c in definitions(m, ast.ClassDef)), key=lambda item: -item[1])
    functions = [f for m in modules.values() for f in definitions(m, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lengths = sorted(length for _, length in functions)
    rings = circles(graph)
    arrows = upward(graph)
    pairs = repeated(modules.values())
    options = option_places(modules.values())
    places = [len(where) for where in options.values()]

    of_laboratory = sum(len(m.lines) for name, m in modules.items() if is_in_laboratory(name))
    flags = serve_flags(args.root)
    signatures = [s for module in modules.values() for s in long_signatures(module)]
    spellings = kind_spellings(args.root, modules.values())
    awkward = awkward_first_sentences(modules.values())
    shared = [m.path for m in modules.values() if any(map(_SHARED_BLOCKS.search, m.lines))]

    rows = [
        ("modules", len(plain)),
        ("lines", sum(length for _, length in files)),
        ("lines without the laboratory", sum(length for _, length in files) - of_laboratory),
        ("modules in the fullest folder", "{1} ({0})".format(*folders.most_common(1)[0])),
        (f"folders with more than {MOST_MODULES} modules", sum(n > MOST_MODULES for n in folders.values())),
        ("median file, lines", int(statistics.median(length for _, length in files))),
        ("largest file, lines", "{1} ({0})".format(*files[0])),
        (f"files over {MOST_FILE_LINES} lines", sum(n > MOST_FILE_LINES for _, n in files)),
        ("largest class, lines", "{1} ({0})".format(*classes[0])),
        ("classes over 300 lines", sum(n > 300 for _, n in classes)),
        (f"classes over {MOST_CLASS_LINES} lines", sum(n > MOST_CLASS_LINES for _, n in classes)),
        ("functions", len(functions)),
        ("median function, lines", int(statistics.median(lengths))),
        ("functions over 60 lines", sum(n > 60 for n in lengths)),
        ("import circles", len(rings)),
        ("imports from a lower layer to a higher one", len(arrows)),
        (f"pairs of places with {SAME_LINES} or more equal lines", len(pairs)),
        ("places where a configuration option is declared, mean", f"{statistics.mean(places):.2f}" if places else "-"),
        ("places where a configuration option is declared, most", max(places, default=0)),
        (f"functions with more than {MOST_PARAMETERS} parameters", len(signatures)),
        ("flags of serve", len(flags)),
        ("policies of sched", policies(modules.get("apt_jax.sched"))),
        ("policies of the laboratory", policies(modules.get("apt_jax.lab.policies"))),
        ("files that name shared blocks", len(shared)),
        ("definitions of a cache kind", len(spellings)),
        ("awkward first sentences", len(awkward)),
        ("words of documents", words_of_documents(args.root)),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if args.list:
        listed = {
            "folders": [f"{n} {name}" for name, n in folders.most_common() if n > MOST_MODULES],
            "files": [f"{n} {name}" for name, n in files if n > MOST_FILE_LINES],
            "classes": [f"{n} {name}" for name, n in classes if n > 300],
            "functions": [f"{n} {name}" for name, n in sorted(functions, key=lambda item: -item[1]) if n > 60],
            "parameters": [f"{n} {name}" for name, n in sorted(signatures, key=lambda item: -item[1])],
            "cache kinds": spellings,
            "awkward": awkward,
            "shared blocks": [str(path) for path in shared],
            "circles": [" ".join(ring) for ring in rings],
            "upward": [f"{a} -> {b}" for a, b in arrows],
            "repeated": [f"{a} = {b}" for a, b in pairs],
            "options": [f"{len(where)} {name}: {' '.join(where)}" for name, where in options.items() if len(where) > 2],
        }
        for title, lines in listed.items():
            print(f"\n{title}:", *lines, sep="\n  ")


if __name__ == "__main__":
    main()
