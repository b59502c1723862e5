"""Pages are true to the code: names, flags, messages, and what flags of other servers are called here."""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from apt_jax.frontend import other_servers
from serve.cli.flags import Parser
from serve.cli.main import _COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
)
PAGES = [page for page in PAGES if not {"_build", "generated"} & set(page.parts)]
PLACES = ("apt_jax", "serve", "tests", "benchmarks", "tools", "docs", "deploy", "examples", "notebooks", "lab")
"""Folders whose files pages name by their path."""
OTHERS = (
    "--break-system-packages", "--data-parallel-size", "--logdir", "--unix-socket", "--extra-index-url", "--load-monitor-interval", "--model-name",
    "--least-load-default-throughput", "--least-load-kv-pressure-weight", "--no-deps", "--prometheus-host", "--policy",
)  # fmt: skip
"""Flags of other programs that pages name."""


FOREIGN = {
    "FindBlock", "FindPreemptBlock", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN", "LoRARequest", "MemoryMax",
    "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER",
}  # fmt: skip
"""Names of papers and other programs."""


def _inline_code(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def _where(page: Path, what: str) -> str:
    return f"{page.relative_to(ROOT)}: {what}"


class _Facts(NamedTuple):
    """Names and texts of a file that pages may quote."""

    defined: set[str]
    """Functions and classes."""
    names: set[str]
    """These, variables, attributes and imports."""
    texts: list[str]
    """String constants; those with values have a mark in place of each."""


@functools.cache
def _facts(path: Path) -> _Facts:
    facts = _Facts(set(), set(), [])
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                facts.defined.add(node.name)
            case ast.alias():
                facts.names.add(node.name.rpartition(".")[2])
            case ast.Name():
                facts.names.add(node.id)
            case ast.Attribute():
                facts.names.add(node.attr)
            case ast.JoinedStr():
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                facts.texts.append("".join(map(str, parts)))
            case ast.Constant(value=str(text)):
                facts.texts.append(text)
    facts.names.update(facts.defined)
    return facts


def _source(*roots: str) -> Iterator[_Facts]:
    paths = [path for root in roots for path in sorted((ROOT / root).rglob("*.py")) if "_pb2" not in path.name]
    return map(_facts, paths)


def test_paths_that_pages_name_exist() -> None:
    missing = []
    for page in PAGES:
        for code in _inline_code(page):
            path = code.partition("::")[0].rstrip("/")
            if not re.fullmatch(r"[\w.-]+(?:/[\w.*-]+)+", path) or path.split("/")[0] not in PLACES:
                continue
            if not any(True for _ in ROOT.glob(path)) and not path.endswith(("TARGET", "NAME", "RESULT")):
                missing.append(_where(page, code))
    assert not missing, "\n".join(missing)


def test_functions_that_pages_name_exist() -> None:
    roots = ("apt_jax", "serve", "tests", "benchmarks", "tools", "docs/_ext")
    defined = set().union(*(facts.defined for facts in _source(*roots)))
    missing = [
        _where(page, code)
        for page in PAGES
        for code in _inline_code(page)
        if (call := re.fullmatch(r"(?:[\w]+\.)*(\w+)\(\)", code)) and call.group(1) not in defined
    ]
    assert not missing, "\n".join(missing)


def test_classes_and_constants_that_pages_name_exist() -> None:
    """`Class`, `Class.attribute` and `CONSTANT_NAME`."""
    known: set[str] = set()
    for facts in _source("apt_jax", "serve", "tests", "benchmarks", "tools"):
        known |= facts.names
        known.update(re.findall(r"\w+", "\n".join(facts.texts)))
    names = r"[A-Z][a-z]+[A-Z]\w*(?:\.\w+)?|[A-Z]+_[A-Z_]+"
    missing = [
        _where(page, code)
        for page in PAGES
        for code in _inline_code(page)
        if re.fullmatch(names, code) and not known.union(FOREIGN).issuperset(code.split("."))
    ]
    assert not missing, "\n".join(missing)


def test_metrics_that_the_page_lists_exist() -> None:
    texts = "".join(path.read_text() for path in (ROOT / "serve").rglob("*.py"))
    page = (ROOT / "docs" / "serving" / "observability.md").read_text()
    named = re.findall(r"`(?:aptjax|vllm):(\w+)", page)
    assert len(named) > 20
    assert not [name for name in named if name.removesuffix("_total") not in texts]


@functools.cache
def _flags() -> frozenset[str]:
    """Flags of every command, and those that benchmarks, tests and tools read."""
    commands: set[str] = set()
    for module, _ in _COMMANDS.values():
        parser = Parser()
        importlib.import_module(module).add_arguments(parser)
        commands |= {option for action in parser._actions for option in action.option_strings}
    sources = _source("benchmarks", "tests", "tools", "serve/launcher", "apt_jax/models")
    literals = {text for facts in sources for text in facts.texts if text.startswith("-")}
    return frozenset(commands | literals | set(OTHERS))


def test_flags_that_pages_name_exist() -> None:
    elsewhere = {"--help", "--version", *_told_flags()}
    missing = [
        _where(page, flag)
        for page in PAGES
        for code in _inline_code(page)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code)
        if flag not in _flags() | elsewhere
    ]
    assert not missing, "\n".join(missing)


def test_settings_that_pages_name_exist() -> None:
    parser = Parser()
    importlib.import_module(_COMMANDS["serve"][0]).add_arguments(parser)
    assert parser.settings is not None
    known = {"NAME", *(action.dest for action in parser.settings._actions)}
    missing = [
        _where(page, f"--set {name}")
        for page in PAGES
        for code in _inline_code(page)
        for name in re.findall(r"--set (\w+)", code)
        if name not in known
    ]
    assert not missing, "\n".join(missing)


# --- docs/coming_from_vllm.md ----------------------------------------------------------------------------------------


def _told_flags() -> set[str]:
    return {*other_servers._NAMES, *other_servers._NOTHING, "--enable-lora"}


def test_flags_of_other_servers_are_on_the_page() -> None:
    """The two tables of docs/coming_from_vllm.md say what apt_jax/frontend/other_servers.py says."""
    text = (ROOT / "docs" / "coming_from_vllm.md").read_text()
    renamed, left_out = text.split("Flags of vLLM, SGLang")[1].split("Flags to leave out")
    rows = re.findall(r"^\| (`-.*?`) \| `(-.*?)`(:?).* \|$", renamed, re.MULTILINE)
    named = {flag: (here, mark) for flags, here, mark in rows for flag in re.findall("`(.*?)`", flags)}
    elsewhere = {flag: here for flag, here in other_servers._NAMES.items() if flag != "--http-port"}
    assert {flag: here for flag, (here, _) in named.items()} == elsewhere
    assert {flag for flag, (_, mark) in named.items() if mark} == {*other_servers._DIFFERENT} & {*other_servers._NAMES}
    rows = re.findall(r"^\| (`-.*?`) \| (.*) \|$", left_out.split("\n## ")[0], re.MULTILINE)
    named = {flag for flags, _ in rows for flag in re.findall("`(.*?)`", flags)}
    assert named == {*other_servers._NOTHING, "--enable-lora"}


# --- docs/troubleshooting.md -----------------------------------------------------------------------------------------


def _unprinted(messages: list[str]) -> list[str]:
    """The messages that no text of the source has; `...` stands for values."""
    texts = [text for facts in _source("apt_jax", "serve") for text in facts.texts if len(text) > 8]
    patterns = {m: re.compile(".*?".join(re.escape(part) for part in m.split("...")), re.DOTALL) for m in messages}
    return [message for message, pattern in patterns.items() if not any(pattern.search(text) for text in texts)]


def test_messages_that_are_explained_are_those_of_the_source() -> None:
    """Change docs/troubleshooting.md with the message."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 35
    missing = _unprinted(quoted)
    assert not missing, "\n".join(missing)


def test_messages_that_the_source_does_not_have_are_noticed() -> None:
    other = ["this line is in no source", "the pool, ... of a model, ... takes the queue"]
    assert _unprinted(other) == other


def test_the_pages_are_short() -> None:
    """At most 40,000 words in all pages and the changelog; records under docs/lab are not counted."""
    pages = [page for page in PAGES if "lab" not in page.parts and page.name != "SECURITY.md"]
    assert sum(len(page.read_text().split()) for page in [*pages, ROOT / "CHANGELOG.md"]) <= 40_000
