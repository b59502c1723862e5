"""Parts that the scripts here share: each runs in its client's own environment, against one server, and prints a line per feature.

The standard library alone: nothing of the project is installed beside a client.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

ROOT_URL = os.environ.get("CLIENTS_URL", "http://127.0.0.1:8000")
BASE_URL = f"{ROOT_URL}/v1"
MODEL = os.environ.get("CLIENTS_MODEL", "smollm2-135m")
KEY = "no-key-is-needed"
QUESTION = "What is the capital of France?"

CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}

_features: list[tuple[str, Callable[[], Any]]] = []


def feature(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a check of one feature, which fails by an exception; the names are the columns of the matrix."""

    def register(check: Callable[[], Any]) -> Callable[[], Any]:
        _features.append((name, check))
        return check

    return register


def run() -> None:
    """Run all checks and print for each ``{"feature", "ok", "detail"}``; the arguments pick features by name."""
    wanted = set(sys.argv[1:])
    failed = False
    for name, check in _features:
        if wanted and name not in wanted:
            continue
        try:
            made = check()
            if inspect.isawaitable(made):
                asyncio.run(_finish(made))
        except BaseException as error:  # also what a client raises to end the process
            failed = True
            lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
            _print(name, False, " ".join(lines)[:500])
            traceback.print_exc(file=sys.stderr)
        else:
            _print(name, True, "")
    sys.exit(failed)


async def _finish(made: Any) -> None:
    await made


def _print(name: str, ok: bool, detail: str) -> None:
    print(json.dumps({"feature": name, "ok": ok, "detail": detail}), flush=True)


def expect(condition: object, message: object = "") -> None:
    """Fail with a message, with `python -O` too."""
    if not condition:
        raise AssertionError(message)
