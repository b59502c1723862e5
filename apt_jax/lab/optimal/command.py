"""Find the best possible schedule of a few requests, with all lengths known beforehand (InferMax §5)."""

import argparse
import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from apt_jax.errors import ConfigError
from apt_jax.lab.optimal.baselines import policy_schedule
from apt_jax.lab.optimal.check import Replay, check_schedule
from apt_jax.lab.optimal.problem import OBJECTIVES, OptimalProblem, OptimalRequest, OptimalSchedule
from apt_jax.lab.optimal.solver import find_better, solve_optimal
from apt_jax.sched import make_policy
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.trace import Trace, known_traces, load_trace
from serve.cli import flags, options
from serve.cli.output import print_table, write_json
from serve.errors import CommandError, require_matplotlib

_STYLES = {"P": "bold reverse", "p": "bold", "D": "dim reverse", "E": "bold red"}
_CELL = 4
"""Characters per batch in the printed schedule."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests",
        required=True,
        metavar="FILE",
        help="CSV file with the columns prompt_tokens, output_tokens and optionally arrival_s, not decreasing (docs/lab/optimal.md)",
    )
    group = parser.add_argument_group("costs and memory")
    group.add_argument(
        "--model", metavar="MODEL", default="llama-2-7b", help="model that the hardware description is for"
    )
    group.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        default="a100-80gb",
        help="name of a hardware description, or path of a .json file",
    )
    group.add_argument(
        "--capacity-tokens",
        type=options.positive(int),
        metavar="TOKENS",
        help="number of tokens that the cache holds as keys and values (default: the hardware's)",
    )
    group.add_argument(
        "--cache",
        choices=("kv", "hidden", "hybrid"),
        default="kv",
        help="cache kinds that requests may hold",
    )
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-num-batched-tokens",
        type=options.positive(int),
        metavar="TOKENS",
        default=4096,
        help="maximum number of tokens per batch",
    )
    group.add_argument(
        "--chunk",
        type=options.positive(int),
        metavar="TOKENS",
        help="maximum number of prefill tokens per batch, with prompts computed in chunks (default: prompts are computed whole)",
    )
    group.add_argument(
        "--chunk-step",
        type=options.positive(int),
        metavar="TOKENS",
        default=1,
        help="chunks end at multiples of this number of tokens; larger values make the search faster but less exact",
    )
    group.add_argument(
        "--no-hybrid-batching",
        action="store_true",
        help="never combine prefills and decodes in a batch",
    )
    group.add_argument(
        "--no-eviction", action="store_true", help="never evict a request's cache before the request ends"
    )
    group = parser.add_argument_group("objective")
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="latency",
        help="minimize the last completion time, the sum of completion times or the sum of TTFTs; or maximize the number of "
        "requests whose first token comes within --slo-ttft-ms",
    )
    group.add_argument(
        "--slo-ttft-ms",
        type=options.positive(float),
        metavar="MS",
        help=flags.request_help("slo_ttft_ms", "; for --objective slo", bounds=False),
    )
    group.add_argument(
        "--time-limit",
        type=options.positive(float),
        metavar="S",
        default=60.0,
        help="seconds after which the search stops and the best schedule found is shown",
    )
    parser.add_argument(
        "--start",
        metavar="POLICY[,POLICY...]",
        default="",
        help="compute the schedules of these policies first and bound the search by the best of them",
    )
    parser.add_argument(
        "--better-by",
        type=options.positive(float),
        metavar="PERCENT",
        help="only decide whether a schedule exists that is better than the best of --start by this percentage",
    )
    options.add_json_argument(parser)
    parser.add_argument("--png", metavar="FILE", help="write a PNG picture of the schedule; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    trace, problem = _problem(args)
    if (misfit := problem.misfit()) is not None:
        row, why = misfit
        raise ConfigError(
            f"{_where(args, trace, row)}: the request can never run: it {why}; a block is half a token of keys and values (--capacity-tokens, "
            "--max-num-batched-tokens, --chunk)"
        )
    if args.png is not None:
        require_matplotlib("--png")
    starts = _starts(problem, args.start)
    start_s = time.monotonic()
    try:
        if args.better_by is not None:
            best = min(starts.values(), key=lambda s: s.objective * problem.direction)
            answer = _beside_a_spinner(
                lambda: find_better(problem, best, by=args.better_by / 100, time_limit_s=args.time_limit),
                args.time_limit,
            )
            return _tell_better(args, problem, best, *answer)
        schedule = _beside_a_spinner(
            lambda: solve_optimal(problem, time_limit_s=args.time_limit, starts=tuple(starts.values())),
            args.time_limit,
        )
    except ConfigError as error:
        raise ConfigError(f"{args.requests}: {error} (--requests, --chunk-step)") from None
    solve_s = time.monotonic() - start_s
    replay = check_schedule(problem, schedule)
    _print(problem, schedule, replay, solve_s)
    if starts:
        print_table("starts", [(name, _value(problem, start.objective)) for name, start in starts.items()])
    values = {name: start.objective for name, start in starts.items()}
    write_json(args.json, {**_facts(problem, schedule, replay, solve_s), "starts": values})
    if args.png is not None:
        _draw(problem, schedule, replay, args.png)
    return 0


def _where(args: argparse.Namespace, trace: Trace, row: int) -> str:
    return f"{args.requests} line {trace.lines[row]}" if trace.lines is not None else args.requests


def _problem(args: argparse.Namespace) -> tuple[Trace, OptimalProblem]:
    if (args.objective == "slo") != (args.slo_ttft_ms is not None):
        raise ConfigError("--objective slo and --slo-ttft-ms go together")
    if args.better_by is not None and not args.start:
        raise ConfigError("--better-by needs a schedule to compare with: --start POLICY")
    if args.better_by is not None and args.better_by >= 100:
        raise ConfigError(f"--better-by {args.better_by:g} must be below 100 (percent)")
    if args.chunk is not None and not args.chunk_step <= args.chunk <= args.max_num_batched_tokens:
        raise ConfigError(
            f"--chunk {args.chunk} must be between --chunk-step {args.chunk_step} and "
            f"--max-num-batched-tokens {args.max_num_batched_tokens}"
        )
    if args.requests not in known_traces() and not os.path.isfile(args.requests):
        what = "is a directory; give a CSV file in it" if os.path.isdir(args.requests) else "no such file"
        raise ConfigError(f"{args.requests}: {what} (--requests)")
    try:
        trace = load_trace(args.requests).without_sessions("--requests")
    except ConfigError as error:
        raise ConfigError(str(error).replace("(--trace)", "(--requests)")) from None
    hardware = load_hardware(args.model, args.hardware)
    kinds = hardware.kinds(args.cache)
    tokens = hardware.num_kv_tokens if args.capacity_tokens is None else args.capacity_tokens
    # A block is half a KV token or one hidden token, which is exact. If layer inputs have another width, blocks are
    # those of the engine.
    same = hardware.hidden_block_size in (None, hardware.block_size)
    block_size = 1 if same else hardware.block_size
    slo_s = float("inf") if args.slo_ttft_ms is None else args.slo_ttft_ms / 1e3
    requests = tuple(
        OptimalRequest(
            prompt_tokens=int(prompt),
            output_tokens=int(output),
            arrival_s=0.0 if trace.arrival_s is None else float(trace.arrival_s[i]),
            slo_ttft_s=slo_s,
        )
        for i, (prompt, output) in enumerate(zip(trace.prompt_tokens, trace.output_tokens, strict=True))
    )
    problem = OptimalProblem(
        requests=requests,
        capacity_blocks=tokens // block_size * kinds[0].blocks_per_group,
        max_num_batched_tokens=args.max_num_batched_tokens,
        chunk=args.chunk,
        chunk_step=args.chunk_step,
        hybrid_batching=not args.no_hybrid_batching,
        eviction=not args.no_eviction,
        kinds=kinds,
        block_size=block_size,
        hidden_block_size=None if same else hardware.hidden_block_size,
        costs=hardware.step_costs(),
        objective=args.objective,
    )
    return trace, problem


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Discard output to file descriptor 1: HiGHS sometimes prints lines there, which would end up in the JSON."""
    try:
        saved = os.dup(1)
    except OSError:  # no stdout at all
        yield
        return
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)


def _starts(problem: OptimalProblem, text: str) -> dict[str, OptimalSchedule]:
    """Return the schedules of the policies in a comma-separated list, keyed by policy name."""
    starts = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        try:
            policy = make_policy(name)
        except ConfigError as error:
            raise ConfigError(str(error).replace("--scheduling-policy", "--start")) from None
        try:
            starts[name] = policy_schedule(problem, policy)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{name} cannot schedule this problem: {error} (--start, --chunk, --no-hybrid-batching, --no-eviction)"
            ) from None
    return starts


def _value(problem: OptimalProblem, objective: float) -> str:
    if problem.objective == "slo":
        return f"{objective:.0f} of {len(problem.requests)} on time"
    return f"{1e3 * objective:.3f} ms"


def _tell_better(
    args: argparse.Namespace,
    problem: OptimalProblem,
    best: OptimalSchedule,
    answer: str,
    found: OptimalSchedule | None,
) -> int:
    rows = [("best start", _value(problem, best.objective)), ("better", answer)]
    if found is not None:
        rows.append(("found", _value(problem, found.objective)))
    print_table(f"a schedule that is {args.better_by:g} % better", rows)
    write_json(
        args.json,
        {
            "objective": problem.objective,
            "better_by_percent": args.better_by,
            "start": best.objective,
            "answer": answer,
            "value": None if found is None else found.objective,
        },
    )
    if found is not None and args.png is not None:
        _draw(problem, found, check_schedule(problem, found), args.png)
    return 0


T = TypeVar("T")


def _beside_a_spinner(solve: Callable[[], T], time_limit_s: float) -> T:
    """Run `solve` in a thread, so that Ctrl-C works, and show a spinner after two seconds; return its result."""
    found: list[T] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            found.append(solve())
        except Exception as error:  # raised again below, in the waiting thread
            failed.append(error)

    worker = threading.Thread(target=work, daemon=True)
    start_s = time.monotonic()
    with _quiet_stdout(), contextlib.ExitStack() as stack:
        worker.start()
        status: Status | None = None
        while worker.is_alive():
            worker.join(0.1)
            passed_s = time.monotonic() - start_s
            if passed_s > 2:
                text = f"solving: {passed_s:.0f} s of at most {time_limit_s:g} s"
                if status is None:
                    status = stack.enter_context(Status(text, console=Console(stderr=True)))
                status.update(text)
    if failed:
        raise failed[0]
    return found[0]


def cells(problem: OptimalProblem, schedule: OptimalSchedule) -> list[list[str]]:
    """Return a table of requests by batches, as in InferMax Fig. 15.

    A cell is "P" for a prefill or refill, "p" for a chunk of a prefill, "D" for a decode, "E" for an eviction, or
    empty.
    """
    length = [r.prompt_tokens for r in problem.requests]
    picture = [[""] * len(schedule.batches) for _ in problem.requests]
    for j, batch in enumerate(schedule.batches):
        for i in batch.preempt:
            picture[i][j] = "E"
        for i, c, m in zip(batch.rows, batch.num_tokens, batch.start, strict=True):
            ends = m + c == length[i]
            decodes = c == 1 and m > 0 and m >= problem.requests[i].prompt_tokens
            picture[i][j] = "D" if decodes and ends else "P" if ends else "p"
            length[i] += ends
    return picture


def _print(problem: OptimalProblem, schedule: OptimalSchedule, replay: Replay, solve_s: float) -> None:
    console = Console(highlight=False, emoji=False)
    picture = cells(problem, schedule)
    both = sum(k.offered for k in problem.kinds) > 1
    kinds = [{i: k for i, k in zip(b.rows, b.kind, strict=True)} if both else {} for b in schedule.batches]
    names = [f"{r.prompt_tokens}+{r.output_tokens}" for r in problem.requests]
    label = max(len("memory %"), *(len(f"{i + 1}: {n}") for i, n in enumerate(names)))
    columns = max(1, (console.width - label - 1) // _CELL)
    for first in range(0, len(schedule.batches), columns):
        last = min(first + columns, len(schedule.batches))
        table = Table(box=None, pad_edge=False, padding=0, show_header=True)
        table.add_column("batch", width=label + 1, no_wrap=True)
        for j in range(first, last):
            table.add_column(str(j + 1), width=_CELL, justify="center", no_wrap=True)
        for i, name in enumerate(names):
            row = [Text(f"{i + 1}: {name}")]
            for j in range(first, last):
                what = picture[i][j]
                mark = "h" if kinds[j].get(i) == 1 else ""
                row.append(Text(f" {what}{mark} " if what else "·", _STYLES.get(what, "dim")))
            table.add_row(*row)
        share = [100 * u / problem.capacity_blocks for u in replay.used_blocks[first:last]]
        table.add_row(Text("memory %"), *(Text(f"{s:.0f}", "blue") for s in share))
        console.print(table)
        console.print()
    console.print(
        "P prefill or refill, p chunk of a prefill, D decode, E evicted" + ("; h: hidden cache" if both else ""),
        style="dim",
    )
    print_table(
        "optimal schedule" if schedule.status == "optimal" else "best schedule found",
        _rows(problem, schedule, replay, solve_s),
    )


def _rows(
    problem: OptimalProblem, schedule: OptimalSchedule, replay: Replay, solve_s: float
) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [("latency (ms)", f"{1e3 * schedule.latency_s:.3f}")]
    if problem.objective == "slo":
        rows.append(("first tokens on time", f"{schedule.objective:.0f} of {len(problem.requests)}"))
    elif problem.objective != "latency":
        rows.append((f"sum of {problem.objective} (ms)", f"{1e3 * schedule.objective:.3f}"))
    if schedule.status == "optimal":
        rows.append(("proof", f"complete, in {solve_s:.1f} s"))
    else:
        unit = 1.0 if problem.objective == "slo" else 1e3
        rows.append(
            (
                "proof",
                f"not complete after {solve_s:.1f} s; no schedule is better than {unit * schedule.bound:.3f} (--time-limit)",
            )
        )
    rows += [
        ("batches", len(schedule.batches)),
        ("evictions", schedule.num_evictions),
        ("waiting for arrivals (ms)", f"{1e3 * (replay.latency_s - replay.busy_s):.3f}"),
    ]
    return rows


def _facts(problem: OptimalProblem, schedule: OptimalSchedule, replay: Replay, solve_s: float) -> dict[str, Any]:
    return {
        "objective": problem.objective,
        "status": schedule.status,
        "value": schedule.objective,
        "bound": schedule.bound if abs(schedule.bound) < float("inf") else None,
        "latency_s": schedule.latency_s,
        "busy_s": replay.busy_s,
        "solve_s": solve_s,
        "num_evictions": schedule.num_evictions,
        "requests": [
            {
                "prompt_tokens": r.prompt_tokens,
                "output_tokens": r.output_tokens,
                "arrival_s": r.arrival_s,
                "first_token_s": first,
                "finish_s": finish,
            }
            for r, first, finish in zip(problem.requests, replay.first_token_s, replay.finish_s, strict=True)
        ],
        "batches": [
            {
                **dataclasses.asdict(batch),
                "kind": [problem.kinds[k].name for k in batch.kind],
                "memory": used / problem.capacity_blocks,
            }
            for batch, used in zip(schedule.batches, replay.used_blocks, strict=True)
        ],
    }


def plot_schedule(axis: Any, problem: OptimalProblem, schedule: OptimalSchedule, replay: Replay) -> None:
    """Draw a schedule like InferMax Fig. 15 on a matplotlib axis."""
    colors = {"P": "black", "p": "dimgray", "D": "silver", "E": "red"}
    for i, row in enumerate(cells(problem, schedule)):
        for j, what in enumerate(row):
            if what:
                axis.barh(i, 0.92, left=j + 0.04, height=0.8, color=colors[what])
    n = len(problem.requests)
    axis.set(xlim=(0, len(schedule.batches)), ylim=(n - 0.5, -0.5), xlabel="batch", ylabel="request")
    axis.set_yticks(range(n), [str(i + 1) for i in range(n)])
    memory = axis.twinx()
    memory.plot(
        [j + 0.5 for j in range(len(schedule.batches))],
        [100 * u / problem.capacity_blocks for u in replay.used_blocks],
        color="tab:blue",
        marker=".",
    )
    memory.set(ylim=(0, 105), ylabel="memory (%)")
    memory.yaxis.label.set_color("tab:blue")


def _draw(problem: OptimalProblem, schedule: OptimalSchedule, replay: Replay, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(
            max(4.0, 0.35 * len(schedule.batches)),
            max(2.0, 0.35 * len(problem.requests) + 1),
        ),
        layout="constrained",
    )
    axis = figure.subplots()
    plot_schedule(axis, problem, schedule, replay)
    axis.set_title(f"{1e3 * schedule.latency_s:.1f} ms, {schedule.status}")
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise CommandError(f"cannot write {path} ({error.strerror}) (--png)") from None
