"""Start times: from the start of the process to its first answer, from clean and from warm caches.

Each run starts a server twice: with an empty cache directory (kernels, programs and step costs are made), and again
with what the first has kept. The first one is ended only when it has prepared everything. CPU seconds are those of the
server and its compilers: they say more than the time where the machine does other work.
"""

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import tempfile
import time
from typing import Any

import numpy as np
import psutil

from benchmarks.server.report import Run
from benchmarks.server.server_process import Server

_PREPARED_S = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=5, help="pairs of a cold and a warm start (default: 5)")


def run(args: argparse.Namespace) -> Run:
    found = Run("start", args)
    starts: list[dict[str, Any]] = []
    for number in range(args.runs):
        with tempfile.TemporaryDirectory(prefix="apt-jax-start-") as cache:
            for cold in (True, False):
                starts.append({"run": number, "cold": cold, **_start(args, cache, until_prepared=cold)})
    found.values["starts"], found.values["lscpu"] = starts, _lscpu()
    for cold in (True, False):
        these = [start for start in starts if start["cold"] == cold]
        answers, cpu = ([start[name] for start in these] for name in ("answer_s", "cpu_s"))
        found.say(
            f"{'cold' if cold else 'warm'}: first answer after {np.median(answers):.1f} s (median; {min(answers):.1f} to "
            f"{max(answers):.1f}), {np.median(cpu):.1f} CPU s"
        )
    found.promise("every start answers", all(start["status"] == 200 for start in starts), f"{len(starts)} starts")
    return found


def _start(args: argparse.Namespace, cache: str, *, until_prepared: bool) -> dict[str, Any]:
    load = os.getloadavg()[0]
    started_s = time.monotonic()
    flags = [*args.engine_flags, *args.server_flags]
    with Server(args.model, flags, early=True, cache_dir=cache) as server:
        serving_s = time.monotonic() - started_s
        connection = http.client.HTTPConnection(server.http, timeout=120)
        body = {"model": args.model, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        connection.close()
        found = {
            "status": response.status,
            "serving_s": serving_s,
            "answer_s": time.monotonic() - started_s,
            "cpu_s": _cpu_s(server.usage),
            "load": load,
        }
        if until_prepared:
            server.until_said("calibrated in", _PREPARED_S)
            found |= {"prepared_s": time.monotonic() - started_s, "prepared_cpu_s": _cpu_s(server.usage)}
        return found


def _cpu_s(process: psutil.Process) -> float:
    """CPU time of a process and of its children, ended or not."""
    times = process.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:2])
    return total


def _lscpu() -> str:
    try:
        return subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
