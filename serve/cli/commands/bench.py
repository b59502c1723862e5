"""Put load on a server and measure latencies, SLO attainment and the sustained rate as a client sees them.

It works with apt-jax and with any other server that offers vLLM's gRPC service or OpenAI's API.
"""

import argparse
import asyncio
import dataclasses
import math
import os
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from apt_jax.config import SLO
from apt_jax.errors import ConfigError
from apt_jax.metrics import percentile
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.sessions import Calls
from apt_jax.sim.trace import known_traces
from serve.bench import load, report
from serve.bench.backends import Backend, Target
from serve.bench.registry import BACKENDS, open_backend
from serve.bench.runner import Outcome, Run, Runner
from serve.bench.search import Found, Probe, find_rates
from serve.cli import flags, options
from serve.cli.output import objectives, print_table, session_rows, write_json
from serve.client import address
from serve.errors import CommandError, require_matplotlib
from serve.signals import on_interrupt

_DEFAULT_REQUESTS = 200
_WARM_UP_INDEX = 2**31
_OF_SESSIONS = ("num_sessions", "concurrent_sessions", "max_think_s")
_USAGE_ERRORS = ("400", "404", "INVALID_ARGUMENT", "NOT_FOUND")


def _rate(text: str) -> float:
    return math.inf if text == "inf" else options.positive(float)(text)


def _objective(text: str) -> tuple[str, float]:
    name, colon, ms = text.partition(":")
    if name not in ("ttft", "tbt", "e2e", "e2el") or not colon:
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be ttft:MS, tbt:MS or e2el:MS")
    return name.removesuffix("l"), options.positive(float)(ms)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    positive = options.positive
    # fmt: off
    group = parser.add_argument_group("server")
    group.add_argument("--target", required=True, metavar="HOST:PORT|URL", help="HOST:PORT or grpc://HOST:PORT for gRPC, http://HOST:PORT for HTTP")
    group.add_argument("--backend", choices=BACKENDS, help="API of the server (default: aptjax-grpc, or openai (completions) for http targets)")
    group.add_argument("--model", metavar="NAME", help="name of the served model (default: the server's)")
    options.add_access_arguments(group)
    group.add_argument("--timeout", type=positive(float), default=600.0, metavar="S", help="seconds after which a request counts as failed")
    group = parser.add_argument_group("workload (one of trace, random lengths, prompts)")
    group.add_argument("--trace", metavar="NAME|FILE", help=f"CSV file with prompt_tokens,output_tokens[,arrival_s][,class], or one of {', '.join(known_traces())} (default: sharegpt, unless lengths or prompts are given)")
    group.add_argument("--random-input-len", type=positive(int), metavar="TOKENS", help="length of every prompt")
    group.add_argument("--random-output-len", type=positive(int), metavar="TOKENS", help="length of every output; with --prompts, for lines without output_tokens (default: 128)")
    group.add_argument("--prompts", metavar="FILE", help="JSON lines with prompt (text or token ids) or messages, and optionally output_tokens and class")
    group.add_argument("--output-scale", type=positive(float), metavar="FACTOR", default=1.0, help="factor by which output lengths of the trace are multiplied")
    flags.add_options(group, SimulationConfig, ("scale_tokens", "hash_block_tokens"), scale_tokens={"type": options.factor})
    group.add_argument("--max-len", type=positive(int), metavar="TOKENS", help="leave out trace requests with more tokens than this, prompt plus output (default for bundled traces: the server's maximum)")
    group.add_argument("--vocab-size", type=positive(int), metavar="N", help="random prompts have token ids below this number (default with gRPC: the server's vocabulary size)")
    flags.add_request_field(group, "ignore_eos", action=argparse.BooleanOptionalAction, end=" (default: yes, except with --prompts)")
    flags.add_request_field(group, "temperature", type=options.not_negative, metavar="T", default=0.0)
    group = parser.add_argument_group("arrivals")
    group.add_argument("--request-rate", "--rate", type=_rate, metavar="R", help="requests per second, regardless of responses; inf: all at once (default: as recorded, else inf)")
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--burstiness", type=positive(float), metavar="B", help="shape of the Gamma distribution of gaps between arrivals (1: Poisson, below 1: bursts; default: recorded arrivals stretched to the rate, else 1)")
    shape.add_argument("--cv", type=positive(float), metavar="CV", help="burstiness as coefficient of variation, 1 / sqrt(B)")
    group.add_argument("--max-concurrency", type=positive(int), metavar="N", help="maximum number of requests in flight; without a rate, this many are always in flight (closed loop)")
    group.add_argument("--num-requests", "--num-prompts", type=positive(int), metavar="N", help=f"number of requests (default: {_DEFAULT_REQUESTS}, unless --duration is given)")
    group.add_argument("--duration", type=positive(float), metavar="S", help="seconds after which no more requests are sent")
    group.add_argument("--seed", type=int, metavar="SEED", default=0, help="random seed of requests, prompts and arrivals")
    group.add_argument("--num-warmups", type=int, default=1, metavar="N", help="number of warm-up requests before the run, sent one at a time and not counted")
    group = parser.add_argument_group("sessions (traces of sessions; docs/lab/sessions.md)")
    flags.add_options(group, SimulationConfig, _OF_SESSIONS)
    group = parser.add_argument_group("SLO (sent with each request, measured by the client)")
    for name in ("slo_ttft_ms", "slo_tbt_ms", "slo_e2e_ms"):
        flags.add_request_field(group, name, type=positive(float), metavar="MS")
    group.add_argument("--slo-class", choices=load.CLASSES, help="class of requests without a class in the trace: real time or best effort (default: the server's)")
    group.add_argument("--goodput", type=_objective, nargs="+", metavar="ttft:MS tbt:MS e2el:MS", help="the SLO in vLLM's syntax")
    group = parser.add_argument_group("sustained rate")
    group.add_argument("--find-rate", action="store_true", help="find the highest rate that keeps the target attainment, by bisection starting at --request-rate (default 1)")
    group.add_argument("--attainment", type=options.share, nargs="+", default=[0.9], metavar="SHARE", help="target shares of requests that attain the SLO, e.g. 0.9 0.6 (default: 0.9)")
    group.add_argument("--seeds", type=positive(int), default=3, metavar="N", help="number of seeds, starting at --seed, each with its own search")
    group.add_argument("--tolerance", type=positive(float), metavar="SHARE", default=0.05, help="relative width of the bracket at which a search stops")
    group = parser.add_argument_group("results")
    group.add_argument("--save-csv", metavar="FILE", help="one row per request; with --find-rate one row per run")
    group.add_argument("--save-json", "--json", nargs="?", const="-", metavar="FILE", help="JSON summary with command, versions and date; without FILE or with -: to stdout, with everything else on stderr")
    group.add_argument("--save-png", metavar="FILE", help="PNG plot of TTFT, TBT and SLO attainment; with --find-rate, of SLO attainment against request rate")
    # fmt: on


# --- meaning of the flags -------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    """Reject contradictory arguments before any request is sent."""
    sources = [
        flag
        for flag, given in (
            ("--trace", args.trace),
            ("--random-input-len", args.random_input_len),
            ("--prompts", args.prompts),
        )
        if given is not None
    ]
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(sources)} cannot be combined: give only one of them")
    given = [name for name in (*_OF_SESSIONS, "hash_block_tokens") if getattr(args, name) is not None]
    given += ["scale_tokens"] if args.scale_tokens != 1 else []
    if given and args.trace is None:
        flag = given[0].replace("_", "-")
        raise ConfigError(f"--{flag} is of traces; name one (--trace)")
    if args.trace is not None and args.random_output_len is not None:
        raise ConfigError("--random-output-len cannot be used with --trace; use --output-scale")
    if args.find_rate:
        if _slo(args) == SLO():
            raise ConfigError("--find-rate needs objectives (--slo-ttft-ms, --slo-tbt-ms, --slo-e2e-ms)")
        if args.request_rate == math.inf or args.max_concurrency is not None:
            raise ConfigError("--find-rate needs a finite --request-rate and no --max-concurrency")
    if args.duration is not None and args.request_rate == math.inf and args.max_concurrency is None:
        raise ConfigError("--duration needs a finite --request-rate, or --max-concurrency")
    if args.goodput and (args.slo_ttft_ms or args.slo_tbt_ms or args.slo_e2e_ms):
        raise ConfigError(
            "--goodput sets the same SLO as --slo-ttft-ms, --slo-tbt-ms and --slo-e2e-ms: give one or the other"
        )
    load.Arrivals(burstiness=_burstiness(args))
    if args.seed < 0:
        raise ConfigError(f"{args.seed} must be at least 0 (--seed)")
    if args.num_warmups < 0:
        raise ConfigError(f"{args.num_warmups} must be at least 0 (--num-warmups)")
    for flag in ("save_csv", "save_png"):
        path = getattr(args, flag)
        if path is not None and not os.path.isdir(Path(path).absolute().parent):
            name = flag.replace("_", "-")
            raise ConfigError(f"{path}: no such directory (--{name})")
    if args.save_png is not None:
        require_matplotlib("--save-png")


def _burstiness(args: argparse.Namespace) -> float | None:
    return args.burstiness if args.cv is None else args.cv**-2


def _slo(args: argparse.Namespace) -> SLO:
    ms = {"ttft": args.slo_ttft_ms, "tbt": args.slo_tbt_ms, "e2e": args.slo_e2e_ms, **dict(args.goodput or ())}
    return SLO(**{f"{name}_s": value / 1e3 for name, value in ms.items() if value is not None})


def _backend(args: argparse.Namespace) -> tuple[str, Target]:
    is_url = re.match(r"https?://[^/]+", args.target) is not None
    name = args.backend or ("openai" if is_url else "aptjax-grpc")
    where = args.target
    if name.startswith("openai") and not is_url:
        if "://" in where:
            raise ConfigError(f"{where!r:.80} must be http://HOST:PORT (--target, --backend {name})")
        where = f"http://{where}"
    if not name.startswith("openai"):
        try:
            where = address(where)
        except ValueError as error:
            raise ConfigError(f"{error} (--target, --backend {name})") from None
    ignore_eos = args.prompts is None if args.ignore_eos is None else args.ignore_eos
    return name, Target(
        address=where,
        model=args.model,
        slo=_slo(args),
        ignore_eos=ignore_eos,
        temperature=args.temperature,
        vocab_size=args.vocab_size,
        api_key=args.api_key,
        tls_ca=args.tls_ca,
    )


def _source(args: argparse.Namespace, max_model_len: int | None) -> load.Source:
    output_len = args.random_output_len or 128
    if args.prompts is not None:
        source = load.prompts_source(args.prompts, output_len=output_len)
    elif args.random_input_len is not None or args.random_output_len is not None:
        source = load.fixed_source(args.random_input_len or 512, output_len)
    else:
        trace = args.trace or "sharegpt"
        max_len = args.max_len or (max_model_len if trace in known_traces() else None)
        source = load.trace_source(
            trace,
            output_scale=args.output_scale,
            scale_tokens=args.scale_tokens,
            hash_block_tokens=args.hash_block_tokens,
            max_len=max_len,
        )
    return dataclasses.replace(source, slo_class=args.slo_class)


def _sessions(args: argparse.Namespace, source: load.Source, rate: float | None, seed: int) -> load.SessionLoad:
    for flag in ("max_concurrency", "num_requests", "duration", "find_rate"):
        if getattr(args, flag):
            name = flag.replace("_", "-")
            raise ConfigError(
                f"{args.trace} is a trace of sessions; leave out --{name} (--num-sessions, --concurrent-sessions)"
            )
    burstiness = load.Arrivals(burstiness=_burstiness(args))
    config = SimulationConfig(
        trace=source.trace.name,
        rate=rate,
        cv=burstiness.cv,
        seed=seed,
        scale_tokens=args.scale_tokens,
        hash_block_tokens=args.hash_block_tokens,
        **{name: getattr(args, name) for name in _OF_SESSIONS},
    )
    return load.SessionLoad(source, config, f"bench-{uuid.uuid4().hex[:12]}")


def _arrivals(args: argparse.Namespace, source: load.Source, rate: float | None) -> load.Arrivals:
    burstiness = _burstiness(args)
    for name in _OF_SESSIONS:
        if getattr(args, name) is not None:
            flag = name.replace("_", "-")
            raise ConfigError(f"{source.trace.name} is no trace of sessions; leave out --{flag}")
    count = args.num_requests
    if count is None and args.duration is None:
        count = _DEFAULT_REQUESTS
    if rate is None and (source.trace.arrival_s is None or args.max_concurrency is not None):
        rate = math.inf
    if rate is None and burstiness is not None:
        raise ConfigError("--burstiness and --cv need a rate (--request-rate)")
    if rate == math.inf and args.duration is not None and args.max_concurrency is None:
        raise ConfigError("--duration needs a finite --request-rate, or --max-concurrency")
    return load.Arrivals(rate=rate, burstiness=burstiness, num_requests=count, duration_s=args.duration)


# --- one run -------------------------------------------------------------------------------------------------------


class _Live:
    """A progress bar with intermediate results, shown on terminals only."""

    def __init__(self, total: int | None, title: str) -> None:
        self._bar = tqdm(total=total, desc=title, unit="req", disable=None)
        self._ttft: list[float] = []
        self._open = self._attained = self._failed = 0

    def __call__(self, what: str, outcome: Outcome) -> None:
        if what == "sent":
            self._open += 1
            return
        self._open -= 1
        if self._bar.disable:
            return
        record = outcome.record
        self._attained += record.slo_attained
        self._failed += not record.completed
        if record.ttft_s is not None:
            self._ttft.append(record.ttft_s)
        self._bar.update(1)
        ttft = percentile(self._ttft[-200:], 50)
        self._bar.set_postfix_str(
            f"{self._open} in flight, {100 * self._attained / self._bar.n:.0f} % attained, {self._failed} failed"
            + ("" if ttft is None else f", TTFT {ttft * 1e3:.0f} ms"),
            refresh=False,
        )

    def close(self) -> None:
        self._bar.close()


async def _measure(
    args: argparse.Namespace, *, rate: float | None, seed: int, title: str, warm_ups: int
) -> tuple[Run, dict[str, Any], Calls | None]:
    """Measure one run. Returns the run, facts about the server and the load, and the sessions of the calls."""
    name, target = _backend(args)
    backend = await open_backend(name, target)
    stop = asyncio.Event()
    try:
        source = _source(args, backend.max_model_len)
        coming: load.SessionLoad | list[load.BenchRequest] | Iterator[load.BenchRequest]
        arrivals, closed = load.Arrivals(rate=rate, burstiness=_burstiness(args)), False
        if source.trace.calls is not None:
            coming = _sessions(args, source, rate, seed)
        else:
            arrivals = _arrivals(args, source, rate)
            closed = arrivals.rate == math.inf and args.max_concurrency is not None
            if not closed:
                coming = load.requests(source, arrivals, seed)
            else:
                coming = load.endless(source, seed)
                if arrivals.num_requests is not None:
                    coming = (r for r, _ in zip(coming, range(arrivals.num_requests), strict=False))
        await _warm_up(args, backend, source.alone, seed, warm_ups)
        calls = coming.calls if isinstance(coming, load.SessionLoad) else None
        total = arrivals.num_requests
        if calls is not None:
            total = calls.session.size
        elif isinstance(coming, list):
            total = len(coming)
        live = _Live(total, title)
        runner = Runner(
            backend,
            slo=target.slo,
            timeout_s=args.timeout,
            max_concurrency=args.max_concurrency,
            observe=live,
        )
        try:
            with on_interrupt(stop.set):
                if isinstance(coming, load.SessionLoad):
                    run = await runner.session_loop(coming, stop)
                elif isinstance(coming, list):
                    run = await runner.open_loop(coming, stop)
                else:
                    run = await runner.closed_loop(coming, stop, duration_s=arrivals.duration_s)
        finally:
            live.close()
        finite = arrivals.rate if arrivals.rate is not None and math.isfinite(arrivals.rate) else None
        facts = {
            "backend": name,
            "target": target.address,
            "model": backend.model,
            "load": {
                "source": source.trace.name,
                "rate": finite,
                "arrivals": "closed loop" if closed else _pattern(arrivals, source),
                **({} if calls is None else {name: getattr(args, name) for name in _OF_SESSIONS}),
                "cv": arrivals.cv,
                "max_concurrency": args.max_concurrency,
                "duration_s": args.duration,
                "seed": seed,
                "ignore_eos": target.ignore_eos,
            },
            "slo_ms": target.slo_ms(),
        }
        return run, facts, calls
    finally:
        await backend.close()


def _pattern(arrivals: load.Arrivals, source: load.Source) -> str:
    if arrivals.rate == math.inf:
        return "all at once"
    if source.trace.arrival_s is not None and arrivals.cv is None:
        return "recorded"
    return "poisson" if arrivals.cv in (None, 1.0) else "gamma"


async def _warm_up(args: argparse.Namespace, backend: Backend, source: load.Source, seed: int, count: int) -> None:
    """Send `count` requests that are not measured, to detect a failing server before the measured load.

    Raises:
        ConfigError, CommandError: a request failed.
    """
    requests = [
        dataclasses.replace(request, index=_WARM_UP_INDEX + i)
        for i, request in zip(range(count), load.endless(source, seed), strict=False)
    ]
    if not requests:
        return
    runner = Runner(backend, slo=SLO(), timeout_s=args.timeout, max_concurrency=1)
    run = await runner.closed_loop(requests, asyncio.Event(), duration_s=None)
    for outcome in run.outcomes:
        if outcome.status == "ok":
            continue
        kind = ConfigError if outcome.status in _USAGE_ERRORS else CommandError
        raise kind(f"{args.target}: the first request failed: {outcome.status}: {outcome.error}")


# --- the command ---------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    _check(args)
    args.api_key = options.read_api_key(args.api_key_file)
    if args.find_rate:
        return _search(args)
    run, facts, calls = asyncio.run(
        _measure(args, rate=args.request_rate, seed=args.seed, title="requests", warm_ups=args.num_warmups)
    )  # fmt: skip
    if not run.outcomes and run.interrupted:
        sys.stderr.write("apt-jax bench: interrupted before any request finished\n")
        return 130
    values = {**_head(args), **facts, **report.summary(run, calls)}
    title = _title(args, facts)
    of_sessions = session_rows(values["sessions"]) if calls is not None else []
    print_table(title, [*report.rows(values, _slo(args)), *of_sessions])
    for outcome in run.outcomes:
        if outcome.status != "ok":
            sys.stderr.write(f"first failure: {outcome.status}: {outcome.error}\n")
            break
    if values["warning"]:
        sys.stderr.write(f"warning: {values['warning']}\n")
    if args.save_csv is not None:
        report.write_csv(args.save_csv, run)
    if args.save_png is not None:
        report.plot(args.save_png, run, values, title)
    write_json(args.save_json, values)
    if run.interrupted:
        return 130
    return 0 if values["num_completed"] else 1


def _title(args: argparse.Namespace, facts: dict[str, Any]) -> str:
    parts = [f"{facts['model']} at {facts['target']} ({facts['backend']})", facts["load"]["source"]]
    return ", ".join([*parts, *filter(None, [objectives(_slo(args))])])


def _head(args: argparse.Namespace) -> dict[str, Any]:
    return {"command": args.command_line, **report.provenance()}


def _search(args: argparse.Namespace) -> int:
    seeds = range(args.seed, args.seed + args.seeds)
    probes: list[Probe] = []
    facts: dict[str, Any] = {}

    def measure(rate: float, seed: int) -> Probe:
        nonlocal facts
        title = f"{rate:.3g} requests/s, seed {seed}"
        warm_ups = 0 if probes else args.num_warmups
        run, facts, calls = asyncio.run(_measure(args, rate=rate, seed=seed, title=title, warm_ups=warm_ups))
        if run.interrupted:
            raise KeyboardInterrupt
        values = report.summary(run, calls)
        if not values["num_completed"]:
            status = ", ".join(values["statuses"])
            raise CommandError(f"{args.target}: no request completed at {rate:g} requests/s: {status}")
        probe = Probe(
            rate=rate,
            seed=seed,
            attainment=values["slo_attainment"],
            num_sent=values["num_sent"],
            alone=run.peak_concurrency <= 1,
            late=values["warning"] is not None,
        )
        probes.append(probe)
        sys.stderr.write(
            f"{rate:8.3f} requests/s, seed {seed}: {100 * probe.attainment:5.1f} % of {probe.num_sent} attained"
            f"{' (client late)' if probe.late else ''}\n"
        )
        return probe

    found: Sequence[Found] = ()
    code = 0
    try:
        found = find_rates(
            measure,
            targets=args.attainment,
            seeds=seeds,
            guess=args.request_rate or 1.0,
            tolerance=args.tolerance,
        )
    except KeyboardInterrupt:
        code = 130
        sys.stderr.write("interrupted\n")
        if not probes:
            return code
    _report_search(args, found, probes, facts)
    return code


def _report_search(
    args: argparse.Namespace, found: Sequence[Found], probes: Sequence[Probe], facts: dict[str, Any]
) -> None:
    title = _title(args, facts)
    shown = []
    for one in found:
        spread = f" ± {one.rate.std:.2f}" if len(one.rate.rates) > 1 else ""
        note = "" if one.bounded else " or more: send more requests (--num-requests, --duration)"
        shown.append((f"{100 * one.rate.target:g} % attainment", f"{one.rate.mean:.2f}{spread} requests/s{note}"))
    print_table("effective throughput", [("server, load", title), *shown, ("runs", len(probes))])
    if any(probe.late for probe in probes):
        sys.stderr.write(
            "warning: the client itself limited some of these runs; use an idle machine, or several clients\n"
        )
    facts["load"].pop("seed", None)
    facts["load"].pop("rate", None)
    values = {
        **_head(args),
        **facts,
        "effective_rate": found[0].rate.mean if found else None,
        "by_target": [{**one.rate.as_dict(), "bounded": one.bounded} for one in found],
        "runs": [dataclasses.asdict(probe) for probe in probes],
    }
    if args.save_csv is not None:
        report.write_probes(args.save_csv, probes)
    if args.save_png is not None:
        report.plot_search(args.save_png, probes, args.attainment, title)
    write_json(args.save_json, values)
