"""Record a running server's arrivals for a while, and simulate other settings on them. A recording has lengths, times and
which prompts begin alike, never text; only operators can make one. A recording that exists is simulated without a server.
"""

import argparse
import asyncio
import csv
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from apt_jax.config import SLO, SchedulerConfig
from apt_jax.errors import ConfigError, one_line
from apt_jax.metrics import Percentiles, Summary
from apt_jax.sched import check_policy
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.planning import hardware_named
from apt_jax.sim.simulator import simulate
from apt_jax.sim.trace import load_trace
from apt_jax.utils.text_files import read_text
from serve.cli import flags, options
from serve.cli.commands.plan import parse_slo
from serve.cli.commands.simulate import list_of
from serve.cli.http_completer import refused, tls
from serve.cli.output import objectives, say_on_stderr, write_json
from serve.client import HTTP_SCHEMES
from serve.errors import CommandError

_POLL_S = 1.0
_LONGEST_DRAIN_S = 60.0
"""Longest time after the recording in which its last requests may end, in seconds."""
_COLUMNS = ("prompt_tokens", "output_tokens", "arrival_s", "class", "session_number", "hash_ids", "ttft_s", "tbt_s", "e2e_s")  # fmt: skip
_VARIED = ("policy", "cache", "retention", "session_order", "num_blocks", "swap_space", "max_num_seqs",
           "max_num_batched_tokens")  # fmt: skip
"""Fields of `SimulationConfig` that may have several values."""


_UNCALIBRATED = "it is not calibrated until it was idle for some seconds; record again then, or name a device, as in --hardware h100 --model llama-3-8b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recording")
    group.add_argument("--target", metavar="URL", help="server to record, as in http://127.0.0.1:8000")
    options.add_access_arguments(group)
    group.add_argument(
        "--duration", type=options.positive(float), metavar="S", default=60.0, help="seconds to record"
    )  # fmt: skip
    group.add_argument(
        "--record", metavar="FILE.csv", default="arrivals.csv",
        help="file of the recording, which apt-jax simulate --trace reads too; FILE.running.json and FILE.hardware.json beside it have the server's settings and costs. Without --target: a recording that exists",
    )  # fmt: skip
    group = parser.add_argument_group("simulation (several values are combined; default: the server's)")
    for name, kind, metavar, text in (
        ("--scheduling-policy", str, "POLICY", "scheduling policies"),
        ("--cache", str, "KIND", "cache kinds that the scheduler may use: kv, hidden or hybrid"),
        ("--retention", str, "POLICY", "which cached prefixes stay when blocks are needed"),
        ("--session-order", str, "ORDER", "orders of requests for policies that take them by arrival"),
        ("--num-blocks-override", int, "BLOCKS", "numbers of cache blocks"),
        ("--swap-space", float, "GIB", "host memory for cached blocks in GiB"),
        ("--max-num-seqs", int, "N", "maximum numbers of requests that hold cache"),
        ("--max-num-batched-tokens", int, "N", "maximum numbers of tokens per step"),
    ):
        values = list_of(options.not_negative if kind is float else options.positive(int) if kind is int else str)
        group.add_argument(name, type=values, metavar=f"{metavar}[,{metavar}...]", help=text)
    group.add_argument(
        "--hardware", metavar="NAME|FILE", help="device or description file (default: the server's calibration)"
    )
    group.add_argument("--model", metavar="MODEL", help="model of the hardware description (default: the server's)")
    flags.add_field(group, SimulationConfig, "num_devices")
    group.add_argument(
        "--slo", type=parse_slo, metavar="ttft:MS,tbt:MS,e2e:MS",
        help="objectives of each request, in milliseconds (default: the server's)",
    )  # fmt: skip
    flags.add_field(group, SimulationConfig, "seed")
    options.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    path = Path(args.record)
    if path.suffix != ".csv":
        raise ConfigError(f"{args.record:.200} must end in .csv (--record)")
    if args.target is not None:
        if not args.target.startswith(HTTP_SCHEMES):
            raise ConfigError(f"{args.target:.80} must be an HTTP address, as in http://127.0.0.1:8000 (--target)")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path} (no such directory) (--record)")
    elif not path.is_file():
        raise ConfigError(f"{path}: no such file; record a server with --target URL (--record)")
    for policy in args.scheduling_policy or ():
        check_policy(policy)
    if args.hardware and args.model:
        hardware_named(args.model, args.hardware)
    if args.target is not None:
        key = options.read_api_key(args.api_key_file)
        _record(args.target.rstrip("/"), args.duration, path, key, args.tls_ca, needs_costs=args.hardware is None)
    running = _sidecar(path, "running")
    base, settings = _configs(args, path, running)
    rows: list[tuple[str, Summary | str]] = []
    measured = _measured(path, base.slo)
    if measured is not None:
        rows.append(("measured", measured))
    bar = tqdm(total=len(settings), desc="simulating", unit="setting", disable=None)
    for label, config in settings:
        if bar.disable:
            say_on_stderr(f"apt-jax whatif: {label}")
        try:
            rows.append((label, simulate(config).summary))
        except ConfigError as error:
            if len(settings) == 1:
                raise
            rows.append((label, str(error)))
        bar.update()
    bar.close()
    _report(base, path, rows)
    values = [{"setting": label, **({"error": one} if isinstance(one, str) else one.as_dict())} for label, one in rows]
    write_json(args.json, {"record": str(path), "settings": values})
    return 0


def _configs(
    args: argparse.Namespace, path: Path, running: dict[str, Any]
) -> tuple[SimulationConfig, list[tuple[str, SimulationConfig]]]:
    """Return the configuration of the running server, and the labelled configurations to simulate, the server's first."""
    of_server = path.with_suffix(".hardware.json")
    hardware, model = args.hardware, args.model or running.get("model")
    if hardware is None:
        if not of_server.is_file():
            raise ConfigError(
                f"{path}: recorded, but the server's step costs are unknown: {_UNCALIBRATED} (--hardware)"
            )
        hardware, model = str(of_server), json.loads(read_text(of_server, "--hardware"))["model"]
    if model is None:
        raise ConfigError("name the model of the hardware description (--model)")
    hardware = hardware_named(model, hardware)
    is_own = args.hardware is None
    load_hardware(model, hardware, args.tensor_parallel_size)
    slo_ms = running.get("slo_ms", {})
    slo = args.slo or SLO(**{f"{name}_s": value / 1e3 for name, value in slo_ms.items() if value is not None})
    of_running: dict[str, Any] = {"policy": SchedulerConfig().policy}
    of_running |= {name: running[name] for name in _VARIED if name in running}
    if not is_own:
        of_running.pop("num_blocks", None)  # the pool of another machine
    base = SimulationConfig(
        model=model, hardware=hardware, num_devices=args.tensor_parallel_size, trace=str(path), seed=args.seed, slo=slo,
        num_requests=load_trace(path).num_requests, hash_block_tokens=running.get("block_tokens", 64),
        drop_too_long=True, hidden_attention=running.get("hidden_attention", "auto") if is_own else "auto",
        **of_running,
    )  # fmt: skip
    given = {"policy": args.scheduling_policy, "cache": args.cache, "retention": args.retention,
             "session_order": args.session_order, "num_blocks": args.num_blocks_override, "swap_space": args.swap_space,
             "max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.max_num_batched_tokens}  # fmt: skip
    varied = {name: values for name, values in given.items() if values}
    found = [(_label([getattr(base, name) for name in varied], "as it runs" if running else "usual settings"), base)]
    for chosen in itertools.product(*varied.values()):
        config = dataclasses.replace(base, **dict(zip(varied, chosen, strict=True)))
        if config != base:
            found.append((_label(chosen), config))
    return base, found


def _label(values: Sequence[Any], mark: str = "") -> str:
    text = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f"{text} ({mark})" if text and mark else text or mark


# --- recording -----------------------------------------------------------------------------------------------------


def _record(
    base: str, duration_s: float, path: Path, key: str | None, tls_ca: str | None, *, needs_costs: bool
) -> None:
    """Record the arrivals of a server for `duration_s` seconds, and write them, its settings and its costs.

    If `needs_costs`, a server without costs is warned about before the recording begins.

    Raises:
        CommandError: the server does not answer, refuses, or no request has ended.
    """
    bar = tqdm(total=duration_s, desc="recording", unit="s", disable=None, bar_format="{desc}: {n:.0f}/{total:.0f} s |{bar}|{postfix}")  # fmt: skip

    def progress(done_s: float, num: int) -> None:
        bar.set_postfix_str(f" {num} requests", refresh=False)
        bar.update(min(done_s, duration_s) - bar.n)

    def begin(first: dict[str, Any]) -> None:
        if needs_costs and first["hardware"] is None:
            bar.clear()
            say_on_stderr(f"apt-jax whatif: {base} has no step costs yet: {_UNCALIBRATED}")
        if bar.disable:
            say_on_stderr(f"apt-jax whatif: recording {base} for {duration_s:g} s")

    try:
        first, entries, lost = asyncio.run(_poll(base, duration_s, key, tls_ca, begin, progress))
    finally:
        bar.close()
    if lost:
        say_on_stderr(
            f"apt-jax whatif: {lost:,} requests are missing, because the server dropped them before they were read"
        )
    if not entries:
        raise CommandError(f"no request ended at {base} within {duration_s:g} s; record longer (--duration)")
    entries.sort(key=lambda entry: entry["arrival_s"])
    begin_s = entries[0]["arrival_s"]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(_COLUMNS)
            for one in entries:
                session = "" if one["session"] is None else one["session"]
                times = ("" if one[name] is None else f"{one[name]:.6f}" for name in _COLUMNS[-3:])
                writer.writerow([
                    one["prompt_tokens"], max(one["output_tokens"], 1), f"{one['arrival_s'] - begin_s:.6f}", one["class"],
                    session, " ".join(map(str, one["hash_ids"])), *times,
                ])  # fmt: skip
        for name, value in (
            ("running", {**first["running"], "block_tokens": first["block_tokens"]}),
            ("hardware", first["hardware"]),
        ):
            beside = path.with_suffix(f".{name}.json")
            beside.unlink(missing_ok=True)
            if value is not None:
                beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path} ({error.strerror}) (--record)") from None


async def _poll(
    base: str, duration_s: float, key: str | None, tls_ca: str | None, begin: Callable[[dict[str, Any]], None],
    progress: Callable[[float, int], None],
) -> tuple[dict[str, Any], list[dict[str, Any]], int]:  # fmt: skip
    """Return the server's first answer, for which `begin` is called before the recording, the requests that arrived
    within the time, and the number of lost ones. Costs that the server did not have at first are those at the end."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(ssl=tls(tls_ca))
    timeout = aiohttp.ClientTimeout(total=60, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:

        async def ask(after: int | None) -> dict[str, Any]:
            query = "" if after is None else f"?after={after}"
            try:
                async with session.get(f"{base}/arrivals{query}") as response:
                    text = await response.text(errors="replace")
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                why = one_line(str(getattr(error, "os_error", error))) or "no answer"
                raise CommandError(f"{base}: {why} (--target)") from None
            if response.status != 200:
                raise refused(response.status, text)
            try:
                answer = json.loads(text)
                assert isinstance(answer["requests"], list)
            except (ValueError, KeyError, TypeError, AssertionError):
                raise CommandError(f"{base}/arrivals: this is not an apt-jax server (--target)") from None
            return answer

        first = await ask(None)
        begin(first)
        number, lost = first["number"], 0
        entries: list[dict[str, Any]] = []
        began_s = time.monotonic()
        end_s, longest_s = first["now_s"] + duration_s, 0.0
        while True:
            spent_s = time.monotonic() - began_s
            left_s = duration_s - spent_s
            await asyncio.sleep(min(_POLL_S, left_s) if left_s > 0 else _POLL_S / 4)
            answer = await ask(number)
            number, lost = answer["number"], lost + answer["lost"]
            entries += [one for one in answer["requests"] if one["arrival_s"] <= end_s]
            longest_s = max([longest_s, *(one["e2e_s"] or 0.0 for one in answer["requests"])])
            progress(time.monotonic() - began_s, len(entries))
            # Requests that arrived within the time may end a little later.
            has_drained = answer["now_s"] > end_s + min(longest_s, _LONGEST_DRAIN_S) and not answer["requests"]
            if has_drained or answer["now_s"] > end_s + _LONGEST_DRAIN_S:
                break
        if first["hardware"] is None:
            first["hardware"] = (await ask(None))["hardware"]
        return first, entries, lost


def _sidecar(path: Path, name: str) -> dict[str, Any]:
    beside = path.with_suffix(f".{name}.json")
    if not beside.is_file():
        return {}
    try:
        found = json.loads(read_text(beside, "--record"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{beside}: not written by apt-jax whatif; remove it (--record)")
    return found


# --- results -------------------------------------------------------------------------------------------------------


def _measured(path: Path, slo: SLO) -> Summary | None:
    """Return the attainment and latencies of the server while it was recorded; None: the file does not have them."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or not all(name in rows[0] for name in _COLUMNS[-3:]):
        return None

    def number(row: dict[str, str], name: str) -> float | None:
        try:
            return float(row[name])
        except (TypeError, ValueError):
            return None

    values = [{name: number(row, name) for name in (*_COLUMNS[-3:], "arrival_s")} for row in rows]
    in_time = {
        name: [one["ttft_s"] is not None and (one[f"{name}_s"] or 0.0) <= getattr(slo, f"{name}_s") for one in values]
        for name in ("ttft", "tbt", "e2e")
    }
    n = len(values)
    attained = [all(each) for each in zip(*in_time.values(), strict=True)]
    ends = [(one["arrival_s"] or 0.0) + one["e2e_s"] for one in values if one["e2e_s"] is not None]
    duration_s = max(ends) - min(one["arrival_s"] or 0.0 for one in values) if ends else 0.0
    none = Percentiles.of([])
    return Summary(
        num_sent=n, num_completed=len(ends), slo_attainment=sum(attained) / n,
        ttft_attainment=sum(in_time["ttft"]) / n, tbt_attainment=sum(in_time["tbt"]) / n,
        e2e_attainment=sum(in_time["e2e"]) / n, strict_attainment=math.nan,
        ttft_s=Percentiles.of(one["ttft_s"] for one in values), tbt_s=Percentiles.of(one["tbt_s"] for one in values),
        p99_tbt_drop_first_s=none, longest_gap_s=none, e2e_s=Percentiles.of(one["e2e_s"] for one in values),
        duration_s=duration_s,
        tokens_per_s=sum(int(row["output_tokens"]) for row in rows) / duration_s if duration_s > 0 else 0.0,
        goodput=sum(attained) / duration_s if duration_s > 0 else 0.0,
    )  # fmt: skip


def _report(base: SimulationConfig, path: Path, rows: Sequence[tuple[str, Summary | str]]) -> None:
    console = Console(highlight=False, emoji=False)
    title = ", ".join(filter(None, (f"{base.num_requests} requests of {path.name}", f"{base.model} on {Path(base.hardware).name}", objectives(base.slo) or "no objectives")))  # fmt: skip
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=None)
    table.add_column("setting", no_wrap=True)
    for name in ("in time (%)", "TTFT p50/p90/p99 (s)", "TBT p50/p90/p99 (s)", "tokens/s"):
        table.add_column(name, justify="right")
    for label, one in rows:
        if isinstance(one, str):
            table.add_row(Text(label), "-", "-", "-", "-")
            continue
        table.add_row(
            Text(label),
            f"{100 * one.slo_attainment:.1f}",
            _span(one.ttft_s),
            _span(one.tbt_s),
            f"{one.tokens_per_s:.1f}",
        )
    console.print(table)
    for label, one in rows:
        if isinstance(one, str):
            console.print(f"{label}: {one}", markup=False, soft_wrap=True)


def _span(values: Percentiles) -> str:
    return " / ".join("-" if v is None else f"{v:.3g}" for v in (values.p50, values.p90, values.p99))
