"""Stage `correctness`: every op against the float32 reference on the device, in worker processes.

Lowering is Python and holds the interpreter's lock, and a kernel and its reference take seconds to lower and compile. So
the cases are shared out to processes, each of which makes one case's arguments, compiles both programs, runs and compares
them, and says what it found as a line of JSON. A case that takes its process down costs that case: the next has a new
process. Published shapes come first.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.harness import Stage, Table, end_with_parent, environment_of, spawn

_CASE_LIMIT_S = 60.0
_WORKERS = 12
"""Processes at most: each takes half a GiB of the card, and a core."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """An op at one shape and dtype."""

    shape: Any
    op: str
    dtype: str
    ranges: bool
    lens: tuple[int, ...]
    chunk: int = 0
    backend: str | None = None
    """A name of `apt_jax.backends`; None: the kernels under test."""

    @property
    def name(self) -> str:
        backend = f" by {self.backend}" if self.backend else ""
        return f"{self.op} {self.shape.name} {self.dtype}{' ranges' if self.ranges else ''}{backend}"


def checks(tiny: bool) -> Iterator[Check]:
    """All checks, published shapes first, as they matter most; every op and dtype, with and without slot ranges."""
    from benchmarks.gpu import problems, shapes

    if tiny:
        for name, op in (("three-heads", "decode_kv"), ("three-heads", "decode_absorbed"), ("three-heads", "prefill")):
            yield Check(shape=shapes.SMALL[name], op=op, dtype="float32", ranges=True, lens=(0, 1, 17), chunk=8)
        return
    modest = (0, 1, 15, 16, 17, 129, 300, 700)
    published = [
        shapes.PUBLISHED[n] for n in ("opt-13b", "llama-2-7b", "llama-3-8b", "opt-66b", "opt-6.7b", "gpt-neox-20b")
    ]
    for (dtype, ranges), shape in itertools.product((("bfloat16", False), ("float16", True)), published):
        for op in problems.ops_for(shape):
            yield Check(shape=shape, op=op, dtype=dtype, ranges=ranges, lens=modest, chunk=130)
            if op == "decode_absorbed":
                yield Check(shape=shape, op=op, dtype=dtype, ranges=ranges, lens=modest, backend="triton-onepass")
    variants = (("bfloat16", False), ("float16", True), ("float32", True), ("bfloat16", True))
    for (dtype, ranges), shape in itertools.product(variants, shapes.SMALL.values()):
        for op in problems.ops_for(shape):
            # The reference of `prefill` unrolls its rows, which costs compile time.
            lens = (0, 1, 17, 64, 129, 500) if op == "prefill" else shapes.RAGGED_LENGTHS
            yield Check(shape=shape, op=op, dtype=dtype, ranges=ranges, lens=lens, chunk=40)


def num_workers(tiny: bool) -> int:
    """Processes that compile and compare at once."""
    cores = os.cpu_count() or 2
    return min(2, cores) if tiny else max(1, min(_WORKERS, cores - 2))


def correctness(stage: Stage) -> None:
    """Run all checks that there is time for; a row each."""
    table = stage.table()
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    wanted = [check.name for check in checks(stage.tiny) if stage.wanted(table, check.name)]
    for name in wanted:
        names.put(name)
    lock = threading.Lock()
    threads = []
    for _ in range(min(len(wanted), 1 if stage.careful else num_workers(stage.tiny))):
        # A thread lives as long as its processes: they end with it.
        threads.append(threading.Thread(target=_share, args=(stage, table, names, lock), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    print(f"  {names.qsize()} not reached", flush=True)


def _share(stage: Stage, table: Table, names: "queue.SimpleQueue[str]", lock: threading.Lock) -> None:
    """Have one worker after another run checks until none, or no time, is left."""
    worker: subprocess.Popen[str] | None = None
    while stage.left_s > 0:
        try:
            name = names.get_nowait()
        except queue.Empty:
            break
        if worker is None:
            worker = _start(stage)
        found = _ask(worker, name, min(600.0 if stage.tiny else _CASE_LIMIT_S, stage.left_s + 2.0))
        if "error" not in found and "status" not in found:  # no answer
            late = stage.left_s <= 0
            status = _end(worker)
            found = {"status": "took too long" if status == -9 else f"ended the process: {status}"}
            worker = None
            if late:
                break
        with lock:
            table.add(name, **found)
            if found.get("status", "ok") != "ok":
                print(f"  {name}: {found['status'][:160]}", flush=True)
    if worker is not None:
        _end(worker)


def _end(worker: "subprocess.Popen[str]") -> int:
    """End a worker; returns its exit status."""
    worker.kill()
    with worker:
        return worker.wait()


def _start(stage: Stage) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.gpu.correctness", "--worker", *(["--tiny"] if stage.tiny else [])]
    environment = environment_of("correctness", stage.work or stage.out)
    return spawn(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(worker: "subprocess.Popen[str]", name: str, limit_s: float) -> dict[str, Any]:
    """A worker's answer; empty: it ended, or took longer than the limit and was ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    watch = threading.Timer(limit_s, worker.kill)
    watch.start()
    try:
        worker.stdin.write(name + "\n")
        worker.stdin.flush()
        for line in worker.stdout:
            if line.startswith("{"):
                return json.loads(line)
    except (OSError, ValueError):  # its end of a pipe is closed
        pass
    finally:
        watch.cancel()
    return {}


# --- in the worker -----------------------------------------------------------------------------------------------


def compare(check: Check, tiny: bool) -> dict[str, Any]:
    """Compile a kernel and its reference, run both; slots that no row owns hold NaN. Gives the values of a row."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from apt_jax.backends import attention_ops
    from apt_jax.lab import reference
    from benchmarks.gpu import problems
    from benchmarks.gpu.kernels import kernel_ops, tile_class

    begin = time.perf_counter()
    ops = kernel_ops(tiny)
    if check.backend:
        ops = attention_ops(jax.devices()[0].platform, check.backend, tile_class())
    args = problems.arguments(
        check.op, check.shape, check.dtype, check.lens, seed=1, poisoned=True, ranges=check.ranges, chunk=check.chunk
    )
    program = jax.jit(functools.partial(problems.call, ops, check.op)).lower(args).compile()
    # The reference of `prefill` loops over rows in Python: what it counts by stays on the host.
    host = {k: np.asarray(args[k]) for k in _HOST_SIDE & args.keys()} if check.op == "prefill" else {}
    wide = {k: v for k, v in problems.in_float32(args).items() if k not in host}
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(lambda a: problems.call(reference, check.op, a | host)).lower(wide).compile()
    compiled_s = time.perf_counter() - begin
    first, second, want = program(args), program(args), expected(wide)
    top = float(jnp.max(jnp.abs(want)))
    error = float(jnp.max(jnp.abs(first.astype(jnp.float32) - want))) / max(top, 1e-30)
    same, tolerance = bool(jnp.array_equal(first, second)), problems.TOLERANCE[check.dtype]
    row = {
        "op": check.op, "shape": check.shape.name, "dtype": check.dtype, "ranges": check.ranges, "error": error,
        "tolerance": tolerance, "same_bits": same, "compiled_s": compiled_s, "status": "ok",
    }  # fmt: skip
    if not math.isfinite(error):
        return row | {"error": str(error), "status": "wrong"}
    if error > tolerance or not same:
        row["status"] = "wrong" if error > tolerance else "differs between runs"
    return row


_HOST_SIDE = frozenset({"tables", "offsets", "chunk_lens", "lens", "hidden", "num_rows", "slot_ranges"})


def _answer(check: Check, tiny: bool) -> dict[str, Any]:
    try:
        return compare(check, tiny)
    except Exception as error:
        return {"status": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}


def main() -> int:
    """Answer the checks that are named on standard input (`--worker`), or one that is named as an argument."""
    end_with_parent()
    tiny = "--tiny" in sys.argv
    by_name = {check.name: check for check in checks(tiny)}
    named = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    for line in sys.stdin if "--worker" in sys.argv else named:
        found = _answer(by_name[line.strip()], tiny)
        print(json.dumps(found), flush=True)
        if any(sign in found["status"] for sign in ("CUDA_ERROR", "illegal", "misaligned")):
            return 1  # the context is lost: what follows needs another process
    return 0


if __name__ == "__main__":
    sys.exit(main())
