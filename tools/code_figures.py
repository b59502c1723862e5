"""Figures of the source tree: sizes, circles, upward imports, repeated passages, and how often an option is declared.

    python tools/code_figures.py                  # this tree
    python tools/code_figures.py --root ../old    # another checkout, e.g. an earlier commit
    python tools/code_figures.py --list           # name what is over a limit

Counts `*.py` under `apt_jax/` and `serve/` without generated protobuf code. Imports under `if TYPE_CHECKING:` count as
imports: a circle that only types close is a circle still. It reads the files alone and imports nothing of the project.
"""

import argparse
import ast
import collections
import dataclasses
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

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

MOST_MODULES, MOST_FILE_LINES, MOST_CLASS_LINES = 14, 600, 450


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

    rows = [
        ("modules", len(plain)),
        ("lines", sum(length for _, length in files)),
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
            "circles": [" ".join(ring) for ring in rings],
            "upward": [f"{a} -> {b}" for a, b in arrows],
            "repeated": [f"{a} = {b}" for a, b in pairs],
            "options": [f"{len(where)} {name}: {' '.join(where)}" for name, where in options.items() if len(where) > 2],
        }
        for title, lines in listed.items():
            print(f"\n{title}:", *lines, sep="\n  ")


if __name__ == "__main__":
    main()
