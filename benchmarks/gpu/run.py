"""Everything that wants a GPU, in two commands: are the kernels right, how fast are they, how long does a start take, and
what does a whole model make of it?

    python -m benchmarks.gpu.run --out DIR             # eight minutes, in order of worth
    python -m benchmarks.gpu.run --out DIR --rest      # what is left, five minutes; again until nothing is
    python -m benchmarks.gpu.run --out DIR --report    # the tables of what is in DIR; runs nothing
    python -m benchmarks.gpu.run --out DIR --tiny      # the same code on a CPU, in three minutes

stage        question
bandwidth    what copies and matrix products reach: the floors of all that follows
correctness  is every op right on this card, at odd shapes, over poisoned pools
kernels      time, rate and share of the floor of each kernel, beside JAX's own
peers        the same sizes by cuDNN and PyTorch
start        OPT-13B at default flags: seconds of each program, first answer, all programs; the second time too
step         a decode or prompt step of OPT-13B against reading its bytes once; launches a step
generate     output tokens/s of `LLM.generate`, beside the sum of the steps' floors
serve        OPT-13B from a pool of 12 GB under five policies: attainment, served and simulated
tune         better tiles for `apt_jax/pallas/triton_tiles.py`
autotune     XLA's choices of matrix products for this card, to be shipped
sanitizer    `compute-sanitizer` over the kernels

A stage has a process of its own and a share of the time; what one leaves, the next has. Rows are written as they are
measured, and all processes end with this one, so a run that is cut off keeps what it has and `--resume` goes on with it.
A case that takes its process down is named in the table, and its stage goes on after it. The last thing printed is a
short table a stage, what it says about the goals, and a line of JSON with the facts. README.md has more.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.harness import (
    HUNG,
    RESTART,
    ROWS,
    Stage,
    Table,
    end_with_parent,
    environment_of,
    facts,
    forget_rows,
    read_rows,
    spawn,
    write_json,
)

FIRST_S = {
    "bandwidth": 12.0, "correctness": 40.0, "kernels": 60.0, "peers": 30.0, "start": 95.0, "step": 50.0, "generate": 40.0,
    "serve": 145.0,
}  # fmt: skip
"""Stages of the first command, in order of worth, and their shares of its time, seconds."""
REST_S = {
    "correctness": 20.0, "kernels": 35.0, "peers": 10.0, "step": 25.0, "serve": 110.0, "generate": 40.0, "start": 15.0,
    "autotune": 20.0, "tune": 20.0, "sanitizer": 5.0,
}  # fmt: skip
"""Those of the second."""
_MODULES = {
    "bandwidth": "kernels", "kernels": "kernels", "tune": "tuning", "sanitizer": "tools", "autotune": "tools",
}  # fmt: skip
"""The module of a stage, where it has another name; the function has the stage's."""
_END_S = 5.0
"""Time that the tables at the end take."""
_LOG_BYTES = 4 << 20
_QUICK_COMPILER = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""For `--tiny`: its programs run a few times."""


def run_stage(stage: Stage) -> None:
    """Run a stage in this process."""
    module = importlib.import_module(f"benchmarks.gpu.{_MODULES.get(stage.name, stage.name)}")
    getattr(module, stage.name)(stage)


def _child(args: argparse.Namespace) -> int:
    """One stage, in the process that was started for it."""
    run_stage(
        Stage(
            name=args.child, out=args.out, budget_s=args.seconds, tiny=args.tiny, work=args.work,
            settings=_settings(args), careful=args.careful, only=args.only,
        )
    )  # fmt: skip
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {"rates": args.rates, "slots": args.slots, "step_tokens": args.step_tokens, "requests": args.requests}


class _Log:
    """Log of what is printed, kept in the folder too.

    Args:
        path: the file; it grows to `_LOG_BYTES` at most.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()

    def say(self, text: str) -> None:
        with self._lock:
            print(text, flush=True)
            if not self._path.is_file() or self._path.stat().st_size + len(text) < _LOG_BYTES:
                with self._path.open("a") as file:
                    file.write(text + "\n")

    def follow(self, process: "subprocess.Popen[str]") -> threading.Thread:
        """Say what a process prints."""

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as output:
                for line in output:
                    self.say(line.rstrip("\n"))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread


def _command(name: str, seconds: float, args: argparse.Namespace, *, careful: bool) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--child", name, "--out", str(args.out), "--work", str(args.work)]  # fmt: skip
    command += ["--seconds", f"{seconds:.1f}", "--only", args.only, "--requests", str(args.requests)]
    command += ["--rates", ",".join(map(str, args.rates))]
    command += ["--slots", str(args.slots)] if args.slots else []
    command += ["--step-tokens", str(args.step_tokens)] if args.step_tokens else []
    command += ["--tiny"] if args.tiny else []
    return command + (["--careful"] if careful else [])


def _in_processes(name: str, ends_s: float, args: argparse.Namespace, log: _Log) -> None:
    """Run a stage in processes of its own until it is done or the clock says `ends_s`."""
    marker = args.work / f".{name}.case"
    marker.unlink(missing_ok=True)
    careful = False
    environment = environment_of(name, args.work)
    for _ in range(6):
        left = ends_s - time.monotonic()
        if left <= 1:
            break
        command = _command(name, max(1.0, left - 3), args, careful=careful)
        process = spawn(
            command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        reader = log.follow(process)
        try:
            status: int | str = process.wait(left)
        except subprocess.TimeoutExpired:
            status = "its time was over"
        finally:
            process.kill()
            process.wait()
            reader.join(2.0)
        if status == 0:
            break
        if status == RESTART:
            continue
        if status == "its time was over":
            case = f", in {marker.read_text()}" if marker.is_file() else ""
            log.say(f"  {name}: {status}{case}")
            break
        if marker.is_file() and (careful or status == HUNG):
            case = marker.read_text()
            Table(args.out / ROWS, name).add(case, status=f"ended the process: {status}")
        elif careful or status == 1:  # 1: a Python error, nothing to find
            log.say(f"  {name}: ended ({status}); its own output is above")
            break
        careful = careful or status != HUNG
    marker.unlink(missing_ok=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results: at most eight files")
    parser.add_argument("--work", type=Path, help="folder for compiled programs, kept between the commands of a run (default: one in the system's folder for temporary files)")  # fmt: skip
    parser.add_argument("--stages", help=f"of {', '.join(report.STAGES)} (default: those of the first command)")
    parser.add_argument("--seconds", type=float, help="of wall time for all stages (default: 480; with --rest 300)")
    parser.add_argument("--only", default="", help="run cases whose names contain this")
    parser.add_argument("--resume", action="store_true", help="keep rows that are there, run the other cases")
    parser.add_argument("--rest", action="store_true", help="go on with what the first command left; implies --resume")
    parser.add_argument("--report", action="store_true", help="print the tables of what is there, run nothing")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU; all stages")
    parser.add_argument("--rates", default="16,12,24", help="stage serve: requests/s, in this order")
    parser.add_argument("--requests", type=int, default=128, help="stage serve: of each run")
    parser.add_argument("--slots", type=int, help="stages with an engine: --max-num-seqs (default: the engine's)")
    parser.add_argument("--step-tokens", type=int, help="stages with an engine: --max-num-batched-tokens")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--careful", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    args.work = (args.work or Path(tempfile.gettempdir()) / f"apt-jax-gpu-queue-{os.getuid()}").resolve()
    args.rates = [float(rate) for rate in args.rates.split(",") if rate]
    shares = {**REST_S, **FIRST_S} if args.tiny else REST_S if args.rest else FIRST_S
    names = [name for name in args.stages.split(",") if name] if args.stages else list(shares)
    for name in names:
        if name not in report.STAGES:
            parser.error(f"no stage {name!r}; there are {', '.join(report.STAGES)}")
    args.shares = {name: shares.get(name) or {**REST_S, **FIRST_S}[name] for name in names}
    args.resume = args.resume or args.rest
    if args.seconds is None:
        args.seconds = 1500.0 if args.tiny else 300.0 if args.rest else 480.0 if not args.stages else 1.1 * sum(args.shares.values())  # fmt: skip
    return args


def _run_stages(args: argparse.Namespace, log: _Log, started_s: float, known: dict[str, Any]) -> None:
    """Run all stages, each until its part of the time is over."""
    scale = (args.seconds - _END_S) / sum(args.shares.values())
    ends_s = started_s
    for name, share in args.shares.items():
        begin = time.monotonic()
        ends_s += scale * share
        log.say(f"\n== {name}, until {ends_s - started_s:.0f} s")
        _in_processes(name, ends_s, args, log)
        own = read_rows(args.out / ROWS, name)
        log.say("\n".join(report.table(name, own)))
        known["seconds"][name] = round(time.monotonic() - begin, 1)
        _write_facts(args.out, known)


def _write_facts(out: Path, known: Mapping[str, Any]) -> None:
    """Keep the facts of this command beside those of earlier ones."""
    path = out / "facts.json"
    earlier = json.loads(path.read_text())["runs"] if path.is_file() else []
    write_json(path, {"runs": [*(run for run in earlier if run["date"] != known["date"]), dict(known)]})


def main(argv: Sequence[str] | None = None) -> int:
    started_s = time.monotonic()
    args = parse(argv)
    if args.child:
        end_with_parent()
        return _child(args)
    if args.report:
        report.print_tables(args.out)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.tiny:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("XLA_FLAGS", _QUICK_COMPILER)
    if not args.resume:
        forget_rows(args.out / ROWS, args.shares)
        if "start" in args.shares or args.tiny:
            shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True, exist_ok=True, mode=0o700)

    def stop(number: int, frame: Any) -> None:
        del number, frame
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
    log = _Log(args.out / "log.txt")
    known = facts(seed=0) | {"stages": list(args.shares), "seconds": {}}
    _write_facts(args.out, known)
    try:
        _run_stages(args, log, started_s, known)
    except KeyboardInterrupt:
        log.say("interrupted: what was measured is in the files")
    known["total_seconds"] = round(time.monotonic() - started_s, 1)
    _write_facts(args.out, known)
    report.print_tables(args.out, short=True, say=log.say)
    log.say(f"\ncard: {known['card'] or 'none'}")
    log.say(json.dumps(known))
    return 0


if __name__ == "__main__":
    sys.exit(main())
