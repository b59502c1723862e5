"""Modules that collecting tests imports: a change to a scheduling policy is tested in seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

COLLECT = """
import sys
import pytest
assert pytest.main(["-q", "-n0", "--collect-only", *sys.argv[1].split()]) == 0
print("imported:", *(name for name in sys.argv[2].split() if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ("tests/sched tests/cache tests/validation", "jax jaxlib openai"),
        ("tests/sched/policies/test_apt.py tests/engine/test_engine.py", "jax jaxlib hypothesis scipy grpc openai"),
    ],
)
def test_tests_of_scheduling_import_little(paths, names):
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, paths, names],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"
