"""Everything that wants a GPU, in one command: are the kernels right, how fast are they, and what does a whole model
make of them?

    python -m benchmarks.gpu.run --out DIR                            # all stages but `tune`, under ten minutes
    python -m benchmarks.gpu.run --out DIR --stages step,serve --describe DIR/hardware.json
    python -m benchmarks.gpu.run --out DIR --tiny                     # the same code on a CPU, in a minute

stage         question                                                             writes
bandwidth     what copies and matrix products reach: the floors of all that follows  bandwidth.csv
correctness   is every op right on this card, at odd shapes, over poisoned pools     correctness.csv
kernels       time, rate and share of the floor of each kernel, beside JAX's own     kernels.csv
peers         the same sizes in PyTorch                                              peers.csv
step          a decode or prefill step of OPT-13B against reading its bytes once     step.csv
serve         OPT-13B from a pool of 12 GB: attainment, latencies; simulated too     serve.csv, predictions.csv
tune          better tiles for `apt_jax/pallas/triton_tiles.py`                             tune.csv, tiles.json

Each stage runs in a process of its own with a time budget: it stops starting cases when that is spent, and is ended
half a budget later; all end 10 % after `--seconds`. Rows are written as they are measured. A case that takes its
process down is named in the table, and the stage goes on after it. The last thing printed is a short table a stage,
then one line of JSON with the facts.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import HUNG, RESTART, Stage, Table, facts, read_rows, write_json

ROOT = Path(__file__).parents[2]

BUDGETS_S = {
    "start": 110.0, "bandwidth": 15.0, "correctness": 75.0, "kernels": 75.0, "peers": 30.0, "step": 75.0, "serve": 190.0, "tune": 75.0,
}  # fmt: skip
"""A stage's share of `--seconds`, seconds where it is not given."""
DEFAULT = ("start", "bandwidth", "correctness", "kernels", "peers", "step", "serve")

_MEMORY = {"kernels": "0.85", "tune": "0.85", "step": "0.93", "serve": "0.93"}
"""Share of the card that JAX takes at once, by stage; 0.5 for others."""


def run_stage(stage: Stage, args: argparse.Namespace) -> list[str]:
    """Run a stage in this process; its lines for the table."""
    if stage.name == "start":
        from benchmarks.gpu.start import start

        return start(stage)
    if stage.name == "peers":
        from benchmarks.gpu.peers import peers

        return peers(stage)
    if stage.name in ("step", "serve"):
        from benchmarks.gpu import full_model

        if stage.name == "step":
            return full_model.step(stage)
        return full_model.serve(stage, describe=args.describe, rate=args.rate, seconds=args.arrivals_s)
    if stage.name == "tune":
        from benchmarks.gpu.tuning import tune

        return tune(stage)
    from benchmarks.gpu import kernels

    return getattr(kernels, stage.name)(stage)


def _child(args: argparse.Namespace) -> int:
    """One stage, in the process that was started for it."""
    stage = Stage(
        name=args.child, out=args.out, budget_s=args.seconds, tiny=args.tiny, resume=args.resume, careful=args.careful, only=args.only,
    )  # fmt: skip
    lines = run_stage(stage, args)
    (args.out / f".{stage.name}.lines").write_text("\n".join(lines))
    return 0


def _in_processes(name: str, budget_s: float, ends: float, args: argparse.Namespace) -> list[str]:
    """Run a stage in processes of its own until it is done, 1.5 times its budget is over, or the clock says `ends`."""
    begin = time.monotonic()
    marker, lines = args.out / f".{name}.case", args.out / f".{name}.lines"
    marker.unlink(missing_ok=True)
    lines.unlink(missing_ok=True)
    resume, careful, ends = args.resume, False, min(ends, begin + 1.5 * budget_s + 10)
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": _MEMORY.get(name, "0.5"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }  # fmt: skip
    notes: list[str] = []
    for _ in range(6):
        left = budget_s - (time.monotonic() - begin)
        if left <= 0:
            break
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.run",
            "--child",
            name,
            "--out",
            str(args.out),
            "--seconds",
            f"{left:.1f}",
        ]
        command += ["--only", args.only, "--arrivals-s", str(args.arrivals_s)]
        command += ["--tiny"] if args.tiny else []
        command += ["--resume"] if resume else []
        command += ["--careful"] if careful else []
        command += ["--rate", str(args.rate)] if args.rate else []
        command += ["--describe", str(args.describe)] if args.describe else []
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            status: int | str = process.wait(max(1.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = "took too long"
            process.kill()
            process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        if status == 0:
            break
        resume = True
        if status == RESTART:
            continue
        if marker.is_file() and (careful or status == HUNG):
            case = marker.read_text()
            _blame(args.out / f"{name}.csv", case, status)
            notes.append(f"{case}: ended the process ({status})")
        elif careful or isinstance(status, str) or status == 1:  # 1: a Python error, nothing to find
            notes.append(f"ended ({status}); its own output is above")
            break
        careful = careful or status != HUNG
    found = lines.read_text().splitlines() if lines.is_file() else []
    lines.unlink(missing_ok=True)
    marker.unlink(missing_ok=True)
    if not found:
        rows = read_rows(args.out / f"{name}.csv")
        found = [f"cut off after {len(rows)} cases, {sum(r['status'] == 'ok' for r in rows)} of them ok"]
    return [*found, *notes]


def _blame(path: Path, case: str, status: int | str) -> None:
    columns = path.read_text().splitlines()[0].split(",")[1:-1] if path.is_file() else []
    Table(path, columns, resume=True).add(case, status=f"ended the process: {status}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for CSV and JSON files")
    parser.add_argument("--stages", default=",".join(DEFAULT), help=f"of {', '.join(BUDGETS_S)}")
    parser.add_argument("--seconds", type=float, help="for all stages together; by default 570 for the default ones")
    parser.add_argument("--only", default="", help="run cases whose names contain this")
    parser.add_argument("--resume", action="store_true", help="keep rows that are there, run the rest")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--describe", type=Path, help="stage serve: hardware description to write")
    parser.add_argument("--rate", type=float, help="stage serve: requests/s")
    parser.add_argument("--arrivals-s", type=float, default=12.0, help="stage serve: of arrivals a policy")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--careful", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    args.describe = args.describe and args.describe.resolve()
    args.stages = [name for name in args.stages.split(",") if name]
    for name in args.stages:
        if name not in BUDGETS_S:
            parser.error(f"no stage {name!r}; there are {', '.join(BUDGETS_S)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        return _child(args)

    def stop(number: int, frame: Any) -> None:
        del number, frame
        raise KeyboardInterrupt

    if not args.tiny:  # tiny runs in its caller's process, whose signals are its own
        signal.signal(signal.SIGTERM, stop)
    known = facts(seed=0) | {"stages": args.stages}
    write_json(args.out / "facts.json", known)
    total_s = args.seconds or sum(BUDGETS_S[name] for name in args.stages)
    scale = total_s / sum(BUDGETS_S[name] for name in args.stages)
    ends = time.monotonic() + 1.1 * total_s + 10
    lines: dict[str, list[str]] = {}
    took: dict[str, float] = {}
    try:
        for name in args.stages:
            begin = time.monotonic()
            budget_s = scale * BUDGETS_S[name]
            print(f"== {name}, {budget_s:.0f} s", flush=True)
            if args.tiny:
                stage = Stage(name=name, out=args.out, budget_s=budget_s, tiny=True, resume=args.resume, only=args.only)
                lines[name] = run_stage(stage, args)
            else:
                lines[name] = _in_processes(name, budget_s, ends, args)
            took[name] = round(time.monotonic() - begin, 1)
            write_json(args.out / "facts.json", known | {"seconds": took})
    except KeyboardInterrupt:
        print("interrupted: what was measured is in the files", flush=True)
    for name, text in lines.items():
        print(f"\n== {name} ({took.get(name, 0):.0f} s)")
        print("\n".join(text))
    print(f"\ncard: {known['card'] or 'none'}")
    print(json.dumps(known | {"seconds": took}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
