"""Every fault that a server can meet has a test that is named after it: `grep -rn "def test_.*C4_" tests`.

The ids are those of the fault list: C of clients, R of the content of requests, Q of load, E of the engine.
"""

import re
from pathlib import Path

IDS = {
    *(f"C{i}" for i in range(1, 17)),
    *(f"R{i}" for i in range(1, 27)),
    *(f"Q{i}" for i in range(1, 11)),
    *(f"E{i}" for i in range(1, 13)),
}

NOT_HERE: dict[str, str] = {}
"""Ids without a test, and why."""


def test_every_id_has_a_test():
    found: set[str] = set()
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        for name in re.findall(r"def test_(\w+)\(", path.read_text()):
            found.update(re.findall(r"(?<![A-Za-z0-9])([CRQE]\d+)(?=_)", name.replace("_", "__")))
    assert IDS - found - set(NOT_HERE) == set()
    assert not set(NOT_HERE) & found
    assert set(NOT_HERE) <= IDS
