"""Bans on what no line of the packages may do: run code that is found in data, and protect by `assert`."""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("apt_jax", "serve")
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
"""Read or write what runs code when it is read."""
PICKLING = {"jax.experimental.serialize_executable"}
"""Does so as well."""
CALLS = {
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "os.system", "os.popen", "subprocess.getoutput",
    "subprocess.getstatusoutput", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "importlib.util.spec_from_file_location",
    "pandas.read_pickle", "runpy.run_path", "runpy.run_module",
}  # fmt: skip
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
"""Must not be true, nor depend on anything, unless the call is in `ALLOWED`."""
ALLOWED = {
    ("apt_jax/__init__.py", "importlib.import_module"): "names of the package's own table",
    ("apt_jax/models/__init__.py", "importlib.import_module"): "names of the package's own table",
    ("serve/cli/main.py", "importlib.import_module"): "commands of the package's own table",
    ("apt_jax/sched/registry.py", "importlib.import_module"): "a policy that the operator names by a flag",
    ("apt_jax/sched/__init__.py", "importlib.import_module"): "a name of its own: the laboratory's policies",
    (
        "apt_jax/executor/compiling/quick_lowering.py",
        "importlib.import_module",
    ): "a name of its own: Triton's operations",
    (
        "apt_jax/executor/compiling/executables.py",
        "jax.experimental.serialize_executable",
    ): "entries of the user's own cache directory, by a list of what they may name",
    ("apt_jax/models/loading/loader.py", "allow_pickle"): "--load-format pt, for tensors alone (weights_only)",
}
"""Calls that look like bans, and why they are none."""
NOT_NARROWING = {("serve/http_api/app.py", "scope['type'] == 'http'")}
"""Asserts that tell neither a type checker nor a client anything; a contract of the framework's."""


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax trees of all modules by path."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def bans(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield lines that do what is banned, and what it is; imports may have any name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in MODULES or alias.name in PICKLING:
                    yield node.lineno, alias.name
                if alias.asname is not None:
                    names[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.partition(".")[0] in MODULES:
                yield node.lineno, module
            yield from ((node.lineno, name) for alias in node.names if (name := f"{module}.{alias.name}") in PICKLING)
            names |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _of_call(node, names))


def _of_call(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    first, dot, rest = ast.unparse(call.func).partition(".")
    name = names.get(first, first) + dot + rest
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in CALLS:
        yield name
    if name == "importlib.import_module" and not (call.args and isinstance(call.args[0], ast.Constant)):
        yield name
    if name == "torch.load" and not _is(given.get("weights_only"), True):
        yield name
    yield from (word for word in KEYWORDS if word in given and not _is(given[word], False))


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_nothing_runs_code_that_it_finds_in_data() -> None:
    found = {(path, what): line for path, tree in modules().items() for line, what in bans(tree)}
    assert {key: line for key, line in found.items() if key not in ALLOWED} == {}
    assert set(ALLOWED) <= set(found), "drop what is no longer there"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import dill",
        "import jax.experimental.serialize_executable",
        "from jax.experimental import serialize_executable",
        "from joblib import load",
        "import marshal",
        "import shelve",
        "import torch\ntorch.load(path)",
        "from torch import load as read\nread(path, weights_only=False)",
        "import torch as t\nt.load(path, weights_only=flag)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=asked)",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "import yaml\nyaml.load(text)",
        "from yaml import load\nload(text)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "from importlib import import_module\nimport_module(name)",
        "import importlib\nimportlib.import_module(f'{name}.x')",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_each_ban_is_noticed(source: str) -> None:
    assert len(list(bans(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path, weights_only=True)",
        "re.compile(pattern)",
        "importlib.import_module('apt_jax.lab')",
        "subprocess.run(line, shell=False)",
        "yaml.safe_load(text)",
        "model.eval()",
    ],
)
def test_what_is_harmless_is_no_ban(source: str) -> None:
    assert list(bans(ast.parse(source))) == []


def _narrows(test: ast.expr) -> bool:
    """Return whether a type checker needs the assertion: `x is not None`, `isinstance(x, T)`."""
    if isinstance(test, ast.BoolOp):
        return all(map(_narrows, test.values))
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.IsNot) and _is(test.comparators[0], None)
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"


@pytest.mark.parametrize(
    "where",
    ["serve", "apt_jax/distributed", "apt_jax/frontend", "apt_jax/models/loading", "apt_jax/structured", "apt_jax/text", "apt_jax/utils", "apt_jax/validation"],
)  # fmt: skip
def test_H12_nothing_is_refused_by_an_assert(where: str) -> None:
    """Where input comes in, an assertion only tells the type checker what is known; `python -O` leaves it out."""
    for path, tree in modules().items():
        if path.startswith(where + "/"):
            checks = {ast.unparse(n.test) for n in ast.walk(tree) if isinstance(n, ast.Assert) and not _narrows(n.test)}
            assert {(path, check) for check in checks} <= NOT_NARROWING


def test_H12_what_protects_is_refused_without_asserts_too() -> None:
    command = [sys.executable, "-O", "-m", "tests.support.critical_refusals"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["debug"] is False
    assert len(found["refusals"]) > 20
    assert {name: how for name, how in found["refusals"].items() if how != "refused"} == {}
