"""Sphinx extension: pages made from the code, and links that lead out of `docs/`.

Before a build it writes to `docs/` (git ignores the files):

* `reference/generated/cli.md`: every command with its flags, from the argparse parsers;
* `reference/generated/http.md`: every path and schema, from the OpenAPI document that the server gives out;
* `reference/generated/config_fields.md`: fields of config.json that each model family knows;
* `reference/generated/modules.md`: every module with the first sentence of its docstring;
* `notebooks/*.ipynb`: copies of the repository's notebooks.

Pages are written for GitHub, so their links are relative paths in the repository. While a page is read, links to what
has a page of its own in the site are turned to that page; other files must exist and are offered as downloads.
`README.md` is not a page of the site; its links are checked all the same.
"""

import argparse
import ast
import importlib.metadata
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

_DOCS = Path(__file__).parents[1]
_ROOT = _DOCS.parent
_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "security_policy.md",
    "notebooks": "notebooks",
}
"""Files and folders of the repository that are pages of the site."""
_LINK = re.compile(r"(?<!\!)\[([^\]\n]*)\]\(([^)\s]+)\)")
_SECTION = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_log = logging.getLogger(__name__)


class _ParserMade(Exception):
    pass


def _parser_of(command: str) -> argparse.ArgumentParser:
    """The parser that `apt-jax COMMAND` reads its flags with."""

    def stop(parser: argparse.ArgumentParser, *_: Any) -> Any:
        raise _ParserMade(parser)

    original = argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_known_args = stop  # type: ignore[method-assign]
    try:
        _main()([command])
    except _ParserMade as made:
        return made.args[0]
    finally:
        argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]
    raise RuntimeError(f"apt-jax {command} reads no flags")


def _main() -> Any:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="apt-jax")
    return script.load()


def _commands() -> list[str]:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        _main()(["--help"])
    return re.findall(r"^  (\w+)  ", out.getvalue(), re.MULTILINE)


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>{}$])", r"\\\1", text)


def _of_action(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    # Python's own formatter knows how an argument and its values are written; colours are of the terminal.
    formatter = argparse.HelpFormatter(parser.prog, width=10_000)
    if action.option_strings:
        metavar = formatter._get_default_metavar_for_optional(action)
        values = "" if action.nargs == 0 else formatter._format_args(action, metavar)
        name = ", ".join(f"`{flag} {values}`" if values else f"`{flag}`" for flag in action.option_strings)
    else:
        metavar = formatter._get_default_metavar_for_positional(action)
        name = f"`{formatter._format_args(action, metavar)}`"
    yield from (name, f": {_escape(formatter._expand_help(action)) if action.help else 'see above'}", "")


def _cli() -> str:
    lines = []
    for command in _commands():
        parser = _parser_of(command)
        lines += [f"## apt-jax {command}", "", _escape(parser.description or ""), ""]
        for group in parser._action_groups:
            actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
            if actions:
                title = (group.title or "").capitalize()
                lines += [f"**{_escape(title)}**", ""]
                lines += [line for action in actions for line in _of_action(parser, action)]
    return "\n".join(lines)


def _bounds(schema: dict[str, Any]) -> str:
    """Type and bounds of a JSON schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            parts = dict.fromkeys(_bounds(part) for part in schema[key])
            return " or ".join(part for part in parts if part)
    if "const" in schema:
        return f"`{schema['const']!r}`"
    if "enum" in schema:
        return ", ".join(f"`{value!r}`" for value in schema["enum"])
    kind = schema.get("type", "")
    words = " or ".join(kind) if isinstance(kind, list) else kind
    if "items" in schema:
        words += f" of {_bounds(schema['items'])}"
    low = next((f"≥ {schema[k]}" for k in ("minimum", "minLength", "minItems") if k in schema), "")
    low = low or (f"> {schema['exclusiveMinimum']}" if "exclusiveMinimum" in schema else "")
    high = next((f"≤ {schema[k]}" for k in ("maximum", "maxLength", "maxItems") if k in schema), "")
    limits = ", ".join(part for part in (low, high) if part)
    return f"{words} ({limits})" if limits else words


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    for part in schema.get("allOf", ()):
        yield from _fields(part)
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        if not isinstance(field, dict):
            continue
        must = ", required" if name in required else ""
        text = field.get("description", "")
        yield from (f"`{name}`", f": {_bounds(field) or 'any value'}{must}. {_escape(text)}".rstrip(), "")


def _http() -> str:
    from serve.batches.config import BatchConfig
    from serve.batches.http.openapi import BatchDescription
    from serve.http_api import openapi

    batches = BatchDescription(BatchConfig(directory=Path()))
    document = openapi.document(profiles=True, has_keys=True, batches=batches)
    lines = [_escape(document["info"]["description"]), "", "## Paths", ""]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method == "head":
                continue
            lines += [f"### {method.upper()} {_escape(path)}", "", _escape(operation.get("summary", "")), ""]
            for parameter in operation.get("parameters", ()):
                text = _escape(parameter.get("description", ""))
                where = parameter["in"]
                lines += [f"`{parameter['name']}` ({where})", f": {_bounds(parameter['schema'])}. {text}".rstrip(), ""]
            body = operation.get("requestBody", {}).get("content", {})
            body = body.get("application/json") or body.get("multipart/form-data")
            if body:
                lines += [f"Body: {_bounds(body['schema'])}.", ""]
            for status, response in operation["responses"].items():
                name = response.get("$ref", "").rpartition("/")[2]
                text = document["components"]["responses"][name] if name else response
                content = text.get("content", {}).get("application/json", {})
                schema = f" {_bounds(content['schema'])}" if content and not name else ""
                lines += [f"* {status}: {_escape(text.get('description', ''))}{schema}"]
            lines += [""]
    lines += ["## Schemas", ""]
    for name, schema in document["components"]["schemas"].items():
        lines += [f"### {name}", "", _escape(schema.get("description", "")), ""]
        fields = list(_fields(schema))
        lines += fields or [_bounds(schema) or "any value", ""]
    return "\n".join(lines)


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<!Eq)(?<!Fig)\. (?=[A-Z`])", text)[0].removesuffix(".").replace("|", "\\|")


def _modules() -> str:
    """Tables of modules, one per folder."""
    folders: dict[Path, list[Path]] = {}
    for package in ("apt_jax", "serve"):
        for path in sorted((_ROOT / package).rglob("*.py")):
            if path.name != "__init__.py" and not path.stem.endswith("_pb2"):
                folders.setdefault(path.parent.relative_to(_ROOT), []).append(path)
    lines = []
    for folder, paths in sorted(folders.items()):
        lines += [f"## {_escape(folder.as_posix())}", "", "| module | contents |", "|---|---|"]
        lines += [*(f"| `{path.name}` | {first_sentence(path)} |" for path in paths), ""]
    return "\n".join(lines)


def _config_fields() -> str:
    from apt_jax.models.families.registry import FAMILIES
    from apt_jax.models.known_fields import markdown

    return markdown({family.name: family.fields for family in FAMILIES.values()})


def _write(app: Sphinx) -> None:
    generated = _DOCS / "reference" / "generated"
    generated.mkdir(exist_ok=True)
    for name, text in (
        ("cli", _cli()),
        ("http", _http()),
        ("modules", _modules()),
        ("config_fields", _config_fields()),
    ):
        page = generated / f"{name}.md"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
    notebooks = _DOCS / "notebooks"
    notebooks.mkdir(exist_ok=True)
    for source in sorted((_ROOT / "notebooks").glob("*.ipynb")):
        copy = notebooks / source.name
        # Links of a notebook start in its folder, which is as deep in the repository as the copy's is in docs/.
        text = source.read_text().replace("](../docs/", "](../")
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)
    _check_readme()


def _anchor(heading: str) -> str:
    text = re.sub(r"[`*]|\[|\]\([^)]*\)", "", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def _check_readme() -> None:
    """Warn of links in README.md to files or sections that are not there."""
    for _, target in _LINK.findall((_ROOT / "README.md").read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = _ROOT / path if path else _ROOT / "README.md"
        if not file.exists():
            _log.warning("README.md: no such file: %s", target)
        elif anchor and anchor not in map(_anchor, _SECTION.findall(file.read_text())):
            _log.warning("README.md: no such section: %s", target)


def _turn_links(app: Sphinx, docname: str, source: list[str]) -> None:
    folder = (_DOCS / docname).parent

    def turn(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path.startswith(".."):
            return match[0]
        file = Path(os.path.normpath(folder / path))
        if file.is_relative_to(_DOCS):
            return match[0]
        place = file.relative_to(_ROOT)
        for name in (place, *place.parents):
            if str(name) in _PAGES:
                page = _DOCS / _PAGES[str(name)] / place.relative_to(name)
                return f"[{text}]({os.path.relpath(page, folder)}{mark}{anchor})"
        if not file.exists():
            _log.warning("no such file: %s", target, location=docname)
        if file.is_dir() or file.suffix == ".md":
            return f"{text} (`{place}`)"
        return f"[{text}]({path})"

    source[0] = _LINK.sub(turn, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", _write)
    app.connect("source-read", _turn_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
