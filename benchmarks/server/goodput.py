"""The same arrivals for several servers, one after another: attainment, goodput and throughput over the request rate.

Any server with OpenAI's completions API. Each is started by its own command, which has {port} where the port belongs:

    python -m benchmarks.server.goodput \\
      --server 'apt-plus=apt-jax serve MODEL --port {port} --grpc-port 0 --scheduling-policy apt-plus' \\
      --server 'vllm=vllm serve MODEL --port {port} --kv-cache-memory-bytes 536870912' \\
      --rates 1.5 2.5 3.5 4.5 --seeds 3 --slo-ttft-ms 2000 --slo-tbt-ms 500 --json goodput.json --png goodput.png

A round is a seed: every server is started, warmed up and given each rate in turn with that seed's requests and arrivals,
so that servers alternate over the sitting. Every run is `apt-jax bench` with its flags after `--bench-flags`. Give all of
them a cache of the same size. The client shares the machine with the server.

Attainment is the share of requests within both objectives, goodput the number of them a second. "rate at 90 %" is where
the mean attainment over the seeds falls through 90 %, between the two rates around it. The first server's attainment is
compared with every other's on the same seeds, with 95 % intervals. `--from FILE` shows kept results
again instead of measuring; several files are put together.

`--simulate` gives the same requests to the simulator, beside the server of that name:

    apt-jax calibrate MODEL --describe here.json
    python -m benchmarks.server.goodput --from goodput.json --png goodput.png \\
      --simulate 'apt-plus=--hardware here.json --model MODEL --scheduling-policy apt-plus'
"""

import argparse
import contextlib
import csv
import datetime
import itertools
import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from apt_jax.version import __version__
from benchmarks.paper.common import half_width, mean, new_file, paired
from serve.bench import load

ROOT = Path(__file__).resolve().parents[2]
_START_S = 900.0
_TAIL_CHARS = 3000
_SAME = ("slo_ttft_ms", "slo_tbt_ms", "duration_s", "max_len", "bench_flags")
"""Settings that must be the same in results that are put together."""


def _server(text: str) -> tuple[str, str]:
    name, equals, command = text.partition("=")
    if not equals or "{port}" not in command:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be NAME=COMMAND with {{port}} in it")
    return name, command


def _simulated(text: str) -> tuple[str, list[str]]:
    name, equals, flags = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be NAME=FLAGS")
    return name, shlex.split(flags)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@contextlib.contextmanager
def running(name: str, command: str) -> Iterator[str]:
    """The address of a server that was started by a command of the shell, once it lists its model.

    Raises:
        RuntimeError: it ended, or was not ready in time; the message has the end of its output.
    """
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command.replace("{port}", str(port)), shell=True, stdout=log, stderr=log, start_new_session=True
        )
        try:
            deadline = time.monotonic() + _START_S
            while not _answers(f"{address}/v1/models"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    end = log.read().decode(errors="replace")[-_TAIL_CHARS:]
                    raise RuntimeError(f"{name}: the server did not get ready: {end}")
                time.sleep(0.5)
            yield address
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)


def measure(address: str, rate: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The summary of one run of `apt-jax bench`.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "run.json"
        command = [
            sys.executable, "-m", "serve.cli", "bench", "--target", address, "--request-rate", str(rate),
            "--duration", str(args.duration_s), "--seed", str(seed), "--burstiness", "1",
            "--slo-ttft-ms", str(args.slo_ttft_ms), "--slo-tbt-ms", str(args.slo_tbt_ms), "--json", str(result),
            "--max-len", str(args.max_len), *args.bench_flags,
        ]  # fmt: skip
        return run_command(command, result)


def simulate(flags: Sequence[str], rate: float, seed: int, setting: dict[str, Any]) -> dict[str, Any]:
    """The summary of `apt-jax simulate` for the requests of one run, measured as `setting` says.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    source = load.trace_source("sharegpt", max_len=setting["max_len"])
    arrivals = load.Arrivals(rate=rate, burstiness=1.0, duration_s=setting["duration_s"])
    with tempfile.TemporaryDirectory() as directory:
        trace, result = Path(directory) / "requests.csv", Path(directory) / "run.json"
        with trace.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["prompt_tokens", "output_tokens", "arrival_s"])
            writer.writerows((r.prompt_tokens, r.max_tokens, r.at_s) for r in load.requests(source, arrivals, seed))
        command = [
            sys.executable, "-m", "serve.cli", "simulate", "--trace", str(trace), "--num-requests", "1000000",
            "--slo-ttft-ms", str(setting["slo_ttft_ms"]), "--slo-tbt-ms", str(setting["slo_tbt_ms"]),
            "--json", str(result), *flags,
        ]  # fmt: skip
        return run_command(command, result)


def run_command(command: Sequence[str], result: Path) -> dict[str, Any]:
    """Run a command of apt-jax; returns what it wrote to `result`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    if done.returncode != 0 or not result.is_file():
        raise RuntimeError(f"apt-jax {command[3]} failed: {done.stderr[-_TAIL_CHARS:]}")
    return json.loads(result.read_text())


def simulate_all(
    args: argparse.Namespace, rows: Sequence[dict[str, Any]], setting: dict[str, Any]
) -> list[dict[str, Any]]:
    """Attainment that the simulator gives for every run of the servers that `args.simulate` names."""
    flags = dict(args.simulate)
    runs = [one for one in rows if one["server"] in flags]
    found = []
    for one in tqdm(runs, unit="run", desc="simulating", disable=None):
        values = simulate(flags[one["server"]], one["rate"], one["seed"], setting)
        found.append({key: one[key] for key in ("server", "rate", "seed")} | {"attainment": values["slo_attainment"]})
    return found


def measure_all(args: argparse.Namespace, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of all servers, rates and seeds, as `row` gives them; written to `args.json` after each."""
    rows: list[dict[str, Any]] = []
    bar = tqdm(total=args.seeds * len(args.server) * len(args.rates), unit="run", disable=None)
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name, command in args.server:
            bar.set_description(f"{name}, seed {seed}: starting")
            with running(name, command) as address:
                for rate in args.rates:
                    bar.set_description(f"{name}, seed {seed}, {rate:g} requests/s")
                    rows.append(row(name, rate, seed, measure(address, rate, seed, args)))
                    bar.update(1)
                    keep(args.json, setting, rows)
    bar.close()
    return rows


def row(name: str, rate: float, seed: int, values: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run that are kept."""
    attained = values["slo_attainment"]
    return {
        "server": name, "rate": rate, "seed": seed, "attainment": attained,
        "ttft_attainment": values["ttft_attainment"], "tbt_attainment": values["tbt_attainment"],
        "requests": values["num_sent"], "completed": values["num_completed"],
        "goodput_per_s": attained * values["num_sent"] / values["duration_s"],
        "output_tokens_per_s": values["tokens_per_s"],
        **{f"{what}_{q}_ms": None if values[f"{what}_s"][q] is None else 1e3 * values[f"{what}_s"][q]
           for what in ("ttft", "tbt") for q in ("p50", "p99")},
        "warning": values["warning"],
    }  # fmt: skip


def setting_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what all runs of a measurement share."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(), "cores": os.cpu_count(), "apt_jax": __version__, "command": shlex.join(sys.argv[1:]),
        **{key: getattr(args, key) for key in _SAME}, "servers": dict(args.server or ()),
    }  # fmt: skip


def keep(
    path: Path | None, setting: dict[str, Any], rows: Sequence[dict[str, Any]], simulated: Sequence[dict[str, Any]] = ()
) -> None:
    if path is not None:
        whole = {**setting, "runs": list(rows), **({"simulated": list(simulated)} if simulated else {})}
        path.write_text(json.dumps(whole, indent=1) + "\n")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def rate_at(rates: Sequence[float], attainment: Sequence[float], target: float) -> float | None:
    """The rate at which attainment falls through `target`, between the rates around it; None: it does not in this range,
    or is below it at the lowest rate."""
    points = list(zip(rates, attainment, strict=True))
    for (low, above), (high, below) in itertools.pairwise(points):
        if above >= target > below:
            return low + (above - target) / (above - below) * (high - low)
    return None


def by_server(rows: Sequence[dict[str, Any]]) -> dict[str, dict[float, list[dict[str, Any]]]]:
    found: dict[str, dict[float, list[dict[str, Any]]]] = {one["server"]: {} for one in rows}
    for one in sorted(rows, key=lambda r: (r["rate"], r["seed"])):
        found[one["server"]].setdefault(one["rate"], []).append(one)
    return found


def show(rows: Sequence[dict[str, Any]], target: float, simulated: Sequence[dict[str, Any]] = ()) -> None:
    table = Table(
        "server", "requests/s", "attainment %", *(["simulated %"] if simulated else []), "goodput/s", "output tokens/s",
        "TTFT p50 ms", "P99 TBT p50 ms", "seeds",
    )  # fmt: skip
    predicted = by_server(simulated)
    console = Console(width=max(120, Console().width))
    for name, rates in by_server(rows).items():
        for rate, runs in rates.items():
            of = [100 * r["attainment"] for r in runs]
            median = {
                key: np.median([r[key] for r in runs if r[key] is not None] or [np.nan])
                for key in ("goodput_per_s", "output_tokens_per_s", "ttft_p50_ms", "tbt_p50_ms")
            }
            there = [100 * r["attainment"] for r in predicted.get(name, {}).get(rate, ())]
            table.add_row(
                name, f"{rate:g}", f"{mean(of):.1f} ± {half_width(of):.1f}",
                *([f"{mean(there):.1f}" if there else "-"] if simulated else []), f"{median['goodput_per_s']:.2f}",
                *(f"{median[key]:.0f}" for key in ("output_tokens_per_s", "ttft_p50_ms", "tbt_p50_ms")), str(len(runs)),
            )  # fmt: skip
    console.print(table)
    for name, rates in by_server(rows).items():
        attained = [mean([r["attainment"] for r in runs]) for runs in rates.values()]
        found = rate_at(list(rates), attained, target)
        if found is not None:
            text = f"{found:.2f}"
        else:
            text = f"more than {max(rates):g}" if attained[-1] >= target else f"less than {min(rates):g}"
        console.print(f"{name}: {100 * target:g} % attained up to {text} requests/s")
    first, *others = by_server(rows).items()
    for name, rates in others:
        for rate in sorted(rates.keys() & first[1].keys()):
            ours, theirs = ({r["seed"]: 100 * r["attainment"] for r in side[rate]} for side in (first[1], rates))
            seeds = sorted(ours.keys() & theirs.keys())
            if seeds:
                by, within = paired([ours[s] for s in seeds], [theirs[s] for s in seeds])
                console.print(
                    f"{first[0]} less {name} at {rate:g}/s: {by:+.1f} ± {within:.1f} points, {len(seeds)} seeds"
                )


def plot(
    rows: Sequence[dict[str, Any]], path: Path, slo_ms: tuple[float, float], simulated: Sequence[dict[str, Any]] = ()
) -> None:
    """Attainment and throughput over the rate, with the spread over the seeds; dashed what was simulated."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    predicted = by_server(simulated)
    for name, rates in by_server(rows).items():
        x = list(rates)
        for axis, key, factor in ((left, "attainment", 100), (right, "output_tokens_per_s", 1)):
            values = [[factor * r[key] for r in runs] for runs in rates.values()]
            (line,) = axis.plot(x, [mean(v) for v in values], marker="o", label=name)
            axis.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=line.get_color(), alpha=0.15)
            if axis is left and name in predicted:
                there = [100 * mean([r["attainment"] for r in runs]) for runs in predicted[name].values()]
                axis.plot(list(predicted[name]), there, "--", color=line.get_color(), linewidth=1)
    left.axhline(90, color="grey", linewidth=0.8, linestyle=":")
    left.set(xlabel="requests/s", ylabel="requests within the SLO (%)", ylim=(0, 102))
    dashed = "; dashed: simulated" if simulated else ""
    left.set_title(f"TTFT {slo_ms[0]:g} ms, P99 TBT {slo_ms[1]:g} ms{dashed}", fontsize=10)
    right.set(xlabel="requests/s", ylabel="output tokens/s")
    right.set_ylim(bottom=0)
    left.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server.goodput",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--server", type=_server, action="append", metavar="NAME=COMMAND", help="a server; again for each"
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[1.5, 2.5, 3.5, 4.5],
        metavar="R",
        help="requests per second (default: 1.5 2.5 3.5 4.5)",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="rounds (default: 3)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED", help="of the first round (default: 0)")
    parser.add_argument(
        "--duration", dest="duration_s", type=float, default=60.0, metavar="S",
        help="seconds of arrivals in a run (default: 60)",
    )  # fmt: skip
    parser.add_argument(
        "--max-len", type=int, default=2048, metavar="TOKENS",
        help="leave out requests of more tokens, prompt and output together: all servers must take this many "
        "(default: 2,048)",
    )  # fmt: skip
    parser.add_argument(
        "--slo-ttft-ms", type=float, default=2000.0, metavar="MS", help="TTFT SLO, milliseconds (default: 2,000)"
    )
    parser.add_argument(
        "--slo-tbt-ms", type=float, default=500.0, metavar="MS", help="P99 TBT SLO, milliseconds (default: 500)"
    )
    parser.add_argument(
        "--target",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="attainment, of 1, whose rate is shown (default: 0.9)",
    )
    parser.add_argument(
        "--bench-flags",
        type=shlex.split,
        default=[],
        metavar="'FLAGS'",
        help="more flags of apt-jax bench, as one argument",
    )
    parser.add_argument("--from", dest="kept", type=Path, nargs="+", metavar="FILE", help="show these results instead")
    parser.add_argument(
        "--simulate", type=_simulated, action="append", default=[], metavar="NAME=FLAGS",
        help="apt-jax simulate with these flags beside the server of that name; again for each",
    )  # fmt: skip
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all runs, after each of them")
    parser.add_argument("--png", type=new_file, metavar="FILE", help="plot attainment and throughput over the rate")
    args = parser.parse_args(arguments)
    for path in args.kept or ():
        if not path.is_file():
            parser.error(f"--from {path}: there is no such file")
    simulated: list[dict[str, Any]] = []
    if args.kept:
        kept = [json.loads(path.read_text()) for path in args.kept]
        setting = {key: value for key, value in kept[0].items() if key not in ("runs", "simulated")}
        setting["dates"] = [date for file in kept for date in file.get("dates", [file.get("date")])]
        for path, file in zip(args.kept, kept, strict=True):
            other = [key for key in _SAME if file.get(key) != setting.get(key)]
            if other:
                parser.error(f"--from {path}: {other[0]} is another one than in {args.kept[0]}")
        rows = [one for file in kept for one in file["runs"]]
        simulated = [one for file in kept for one in file.get("simulated", ())]
        names = {one["server"] for one in rows}
    elif args.server:
        setting, rows = setting_of(args), []
        names = {name for name, _ in args.server}
    else:
        parser.error("give --server, or --from")
    for name, _ in args.simulate:
        if name not in names:
            parser.error(f"--simulate {name}: none of the servers, {', '.join(sorted(names))}")
    if args.simulate and setting.get("bench_flags"):
        parser.error("--simulate knows nothing of --bench-flags, which these runs are measured with")
    if not args.kept:
        rows = measure_all(args, setting)
    if args.simulate:
        simulated = simulate_all(args, rows, setting)
    keep(args.json, setting, rows, simulated)
    show(rows, args.target, simulated)
    if args.png is not None:
        plot(rows, args.png, (setting["slo_ttft_ms"], setting["slo_tbt_ms"]), simulated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
