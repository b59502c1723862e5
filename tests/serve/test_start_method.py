"""How processes are started beside a device that is in use."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORKS = {("os", "fork"), ("os", "forkpty"), ("pty", "fork"), ("pty", "spawn")}
POOLS = {"Process", "Pool", "Manager", "Value", "Array", "Queue", "Pipe", "Lock", "Event", "set_start_method"}
"""Names of `multiprocessing` that use the platform's default method, which is fork on Linux before Python 3.14."""


def _wrong(tree: ast.AST) -> list[str]:
    """Return the calls of a module that may fork."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "multiprocessing":
            found += [f"from multiprocessing import {a.name}" for a in node.names if a.name in POOLS | {"get_context"}]
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                if (module, name) in FORKS or (module == "multiprocessing" and name in POOLS):
                    found.append(f"{module}.{name}")
                if (module, name) == ("multiprocessing", "get_context"):
                    first = node.args[0] if node.args else None
                    if not (isinstance(first, ast.Constant) and first.value == "spawn"):
                        found.append("multiprocessing.get_context")
        names = [node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")]
        if names == ["ProcessPoolExecutor"]:
            contexts = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mp_context")]
            if not contexts:
                found.append("ProcessPoolExecutor")
    return found


def test_H11_no_process_is_started_by_fork():
    wrong = {}
    files = [
        path
        for room in ("apt_jax", "serve", "benchmarks", "deploy", "examples")
        for path in (ROOT / room).rglob("*.py")
    ]
    assert len(files) > 200
    for path in files:
        calls = _wrong(ast.parse(path.read_text()))
        if calls:
            wrong[str(path.relative_to(ROOT))] = calls
    assert wrong == {}


def test_H11_calls_that_may_fork_are_seen():
    for line in (
        "os.fork()", "multiprocessing.Process()", "multiprocessing.get_context()", "multiprocessing.get_context('fork')",
        "from multiprocessing import Pool", "ProcessPoolExecutor(2)", "concurrent.futures.ProcessPoolExecutor(2)",
    ):  # fmt: skip
        assert _wrong(ast.parse(line)), line
    for line in (
        "multiprocessing.get_context('spawn')",
        "ProcessPoolExecutor(1, mp_context=spawn)",
        "subprocess.run([])",
    ):
        assert not _wrong(ast.parse(line)), line
