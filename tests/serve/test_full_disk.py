"""Servers whose output or cache directory can take no byte more."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.server.fleet import until
from serve.client import AptClient
from tests.serve.launcher.test_smg import free_port
from tests.support.small_models import SMALL_ENGINE, write_small_model

ROOT = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def answers_and_ends(command: Sequence[str], start_s: float = 60.0, no_files: bool = False) -> int:
    """Start a server whose output is full, ask it, and end it; returns its exit code.

    Args:
        command: of the server, without its port.
        start_s: time that it may take to answer.
        no_files: no byte can be written to any file.
    """
    port = free_port()

    def answers() -> bool:
        assert process.poll() is None, "it has ended"
        with AptClient(f"127.0.0.1:{port}") as client:
            try:
                return len(list(client.generate([5, 6, 7], max_tokens=3, ignore_eos=True, temperature=0.0))) > 0
            except Exception:
                return False

    # By a shell: a function between fork and exec is not for a process with threads.
    limit = ["sh", "-c", 'ulimit -f 0 && exec "$0" "$@"'] if no_files else []
    with FULL.open("w") as full:
        process = subprocess.Popen(
            [*limit, sys.executable, *command, f"--grpc-port={port}", "--no-http"], stdout=full, stderr=full, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        assert until(answers, start_s, pause_s=0.2) is not None
        process.send_signal(signal.SIGTERM)
        return process.wait(30)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("command", [["replica", "toy"], ["--replicas=1"]], ids=["serve", "launch"])
def test_H8_a_log_that_cannot_be_written_does_not_end_a_server(command):
    assert answers_and_ends(["-m", "tests.support.toy_launch", *command]) == 0


@pytest.mark.slow
def test_H8_a_server_starts_where_no_file_can_be_written(tmp_path, monkeypatch):
    model = write_small_model(tmp_path)
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    assert answers_and_ends(["-m", "serve.cli", "serve", str(model), *SMALL_ENGINE], 280, no_files=True) == 0
