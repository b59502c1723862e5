"""Checks of a client library against a running server: each says what works, one line a check.

`python tests/clients/NAME.py --base-url http://127.0.0.1:8000 --model NAME` in an environment that has the library. Exit
code 1 if a check fails. Nothing here is imported by the test suite.
"""

import argparse
import traceback
from collections.abc import Callable

Check = Callable[[], object]


def arguments(library: str) -> argparse.Namespace:
    """Flags of a script."""
    parser = argparse.ArgumentParser(description=f"Checks of {library} against a running server.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="of the server, without /v1")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--only", default="", help="checks whose name has this")
    return parser.parse_args()


def run(title: str, checks: list[Check], only: str = "") -> int:
    """Run the checks, print a line for each, and return the exit code."""
    failed = 0
    print(title)
    for check in checks:
        name = check.__name__.replace("_", " ")
        if only not in name:
            continue
        try:
            note = check()
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}")
        else:
            print(f"ok      {name}{'' if note is None else f': {note}'}")
    print(f"{len(checks) - failed} of {len(checks)} ok" if not only else "")
    return 1 if failed else 0
