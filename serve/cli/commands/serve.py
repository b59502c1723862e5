"""Serve a model over gRPC (aptjax.v1.AptServe, vllm.grpc.engine.VllmEngine, health and reflection on one port) and HTTP
(OpenAI's API on another).

On SIGTERM the server reports NOT_SERVING, rejects new requests, lets open requests finish and exits with code 0; a
second SIGTERM makes it exit at once. On SIGHUP it reloads the API keys and the certificate.
"""

import argparse
import asyncio
import dataclasses
import logging
import os
import string
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from apt_jax.config import EngineConfig, ParallelConfig
from apt_jax.cpu import build
from apt_jax.errors import AptJaxError, ConfigError, one_line
from apt_jax.frontend.builder import DEFAULT_CALIBRATION_S
from apt_jax.frontend.headless import run_headless
from apt_jax.frontend.progress import ProgressBars
from apt_jax.frontend.start_stages import planned
from serve.batches.config import FLAG as BATCH_FLAG
from serve.batches.config import BatchConfig
from serve.batches.store import BatchStore
from serve.cli import flags, options
from serve.errors import CommandError
from serve.grpc_api.server import ServerConfig
from serve.http_api.app_config import AppConfig
from serve.http_api.browsers import HOSTS_FLAG, ORIGIN_FLAG, BrowserRules, browser_rules, is_loopback
from serve.http_api.protocol import ConnectionLimits
from serve.http_api.server import HttpConfig
from serve.http_api.socket_file import FLAG as UDS_FLAG
from serve.http_api.tool_calls.forms import ALIASES as CALL_ALIASES
from serve.http_api.tool_calls.forms import PARSERS as CALL_PARSERS
from serve.http_api.tool_calls.reasoning import ALIASES as REASONING_ALIASES
from serve.http_api.tool_calls.reasoning import PARSERS as REASONING_PARSERS
from serve.memory_gate import MemoryGate, cgroup_limit_bytes
from serve.observability import call_log as logs
from serve.observability.profiler import Profiler
from serve.preprocessing import PreprocessingLimits
from serve.security.api_keys import FLAG, OPERATOR_FLAG, ApiKeys
from serve.security.single_key import KEY_FLAG, KEY_VARIABLE, take_api_key
from serve.security.tls import Tls
from serve.server import (
    ENGINE_LOST,
    WorkerRanks,
    build_parts,
    find_model,
    grpc_connections,
    raise_file_limit,
    serve,
)

if TYPE_CHECKING:
    from serve.batches.http import Batches
    from serve.observability.tracing import Tracer  # requires the extra `otel`

logger = logging.getLogger(__name__)
_PATH_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-._~")


_BRIEF = (
    "model", "--host", "--port", "--api-key", "--max-model-len", "--served-model-name", "--dtype", "--quantization",
    "--tensor-parallel-size", "--max-num-seqs", "--device-memory-utilization", "--scheduling-policy", "--default-slo-ttft-ms",
    "--default-slo-tbt-ms",
)  # fmt: skip
_EXAMPLE = f"""example:
  {options.INSTALL_CHAT_MODEL}
  apt-jax serve {options.CHAT_MODEL} --port 8000 --max-model-len 4096     # then open http://127.0.0.1:8000/chat
"""


def _known_as(aliases: Mapping[str, str]) -> Callable[[str], str]:
    """Return the type of an option whose values have other names, too."""
    return lambda text: aliases.get(text, text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    if isinstance(parser, options.Parser):
        parser.brief, parser.example = _BRIEF, _EXAMPLE
    options.add_served_model_argument(parser)
    settings = flags.settings_of(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="HOST", default=ServerConfig().host, help="address to listen on")
    group.add_argument(
        "--grpc-port", type=int, metavar="PORT", default=ServerConfig().port, help="gRPC port; 0: any free port"
    )
    group.add_argument(
        "--port", dest="http_port", type=int, metavar="PORT", default=HttpConfig().port,
        help="HTTP port; 0: any free port",
    )  # fmt: skip
    group.add_argument("--http-host", metavar="HOST", help="HTTP address to listen on (default: --host)")
    group.add_argument(
        UDS_FLAG, metavar="PATH", help="Unix socket to serve HTTP on, instead of an address and a port; only this user can connect"
    )  # fmt: skip
    group.add_argument(
        "--root-path", metavar="PATH", default="", help="prefix of paths (/llm) behind a proxy that does not strip it"
    )
    group.add_argument("--no-http", action="store_true", help="disable HTTP, serve gRPC only")
    group.add_argument(
        "--tool-call-parser", choices=("auto", *CALL_PARSERS, "none"), default="auto", type=_known_as(CALL_ALIASES),
        help="parser for tool calls, also by its name in vLLM or SGLang; auto: chosen by the model's chat template; none: calls stay in the text",
    )  # fmt: skip
    group.add_argument(
        "--reasoning-parser", choices=("auto", *REASONING_PARSERS, "none"), default="auto", type=_known_as(REASONING_ALIASES),
        help="parser that separates reasoning from the answer, also by its name in vLLM or SGLang; auto: chosen by the model's chat template; deepseek_r1: outputs begin with reasoning; harmony: channels of gpt-oss, calls included; none: reasoning stays in the text",
    )  # fmt: skip
    group.add_argument(
        "--store-responses", type=options.natural, metavar="N", default=0,
        help="responses of /v1/responses kept in memory per API key for a day, to continue by previous_response_id; 0: none",
    )  # fmt: skip
    settings.add_argument(
        "--dashboard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve the pages at /dashboard and /chat",
    )
    group.add_argument(
        KEY_FLAG, metavar="KEY",
        help=f"accepted API key; every user of this machine can read it in the process list, so ${KEY_VARIABLE} or a file is safer",
    )  # fmt: skip
    group.add_argument(FLAG, metavar="FILE", help="file of accepted API keys, one per line; /health needs no key")
    group.add_argument(
        OPERATOR_FLAG,
        metavar="FILE",
        help="file of operators' API keys, which may see and cancel requests of all keys, take profiles and read metrics",
    )
    group.add_argument(
        HOSTS_FLAG, type=lambda text: text.split(","), action="extend", metavar="NAME[,NAME]", default=[],
        help="additional names to accept in Host headers; *: any (default: any, unless --http-host is loopback)",
    )  # fmt: skip
    group.add_argument(
        ORIGIN_FLAG, action="append", metavar="ORIGIN", default=[],
        help="origin whose web pages may call the server (https://example.com), or *; may be given several times (default: none)",
    )  # fmt: skip
    group.add_argument("--tls-cert", metavar="FILE", help="PEM certificate chain for both ports")
    group.add_argument("--tls-key", metavar="FILE", help="PEM private key of the certificate")
    group.add_argument(
        "--tls-client-ca",
        metavar="FILE",
        help="PEM file of CAs; only clients with a certificate from one of them can connect",
    )
    group.add_argument(
        "--shutdown-timeout", type=options.not_negative, metavar="S", default=30.0,
        help="seconds that in-flight requests have to finish after SIGTERM",
    )  # fmt: skip
    settings.add_argument(
        "--decision-log", type=options.natural, metavar="N", default=1024,
        help="number of requests whose timeline is kept (GET /v1/requests/ID/decisions; 0: none)",
    )  # fmt: skip
    settings.add_argument(
        "--step-timeout", type=options.positive(float), metavar="S", default=30.0,
        help="seconds after which a step counts as hung; raised to 20 times the larger of the recent 99th-percentile step time and the expected time of a full step. If a step hangs, open requests fail and the server exits with code 1",
    )  # fmt: skip
    settings.add_argument(
        "--client-timeout", type=options.positive(float), metavar="S", default=4.0,
        help="cancel the requests of a client that stops reading for this many seconds",
    )  # fmt: skip
    settings.add_argument(
        "--body-memory", type=options.positive(int), metavar="MIB", default=PreprocessingLimits().body_memory_bytes >> 20,
        help="memory budget for request bodies in MiB; requests beyond it get 429",
    )  # fmt: skip
    settings.add_argument(
        "--grpc-max-connection-age", type=options.positive(float), metavar="S",
        help="make gRPC clients reconnect after this many seconds, so that they find new replicas behind a load balancer; open streams finish on the old connection (default: never)",
    )  # fmt: skip
    settings.add_argument(
        "--max-connections-per-address", type=options.positive(int), metavar="N",
        help="maximum number of concurrent HTTP connections from one client address (default: three quarters of all)",
    )  # fmt: skip
    settings.add_argument(
        "--memory-soft-limit", type=options.not_negative, metavar="GIB",
        help="reject new requests while the process uses more than this much memory in GiB; 0: never (default: four fifths of its cgroup's limit, if any)",
    )  # fmt: skip
    group.add_argument(
        "--insecure-open", action="store_true", help="allow a non-loopback address without TLS or API keys"
    )
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info",
        help="log level; info logs one line per request, never prompts or outputs",
    )  # fmt: skip
    group.add_argument(
        "--log-format", choices=logs.FORMATS, default="text", help="log format; json: one object per line"
    )
    group.add_argument(
        "--otlp-traces-endpoint", metavar="URL",
        help="export OpenTelemetry traces of requests over OTLP/HTTP (http://127.0.0.1:4318); needs the extra otel",
    )  # fmt: skip
    settings.add_argument(
        "--profiler-dir", metavar="DIR",
        help="directory for JAX profiles, taken by POST /start_profile and /stop_profile (default: profiling disabled)",
    )  # fmt: skip
    group = parser.add_argument_group("batches")
    group.add_argument(
        BATCH_FLAG, metavar="DIR",
        help="directory of files and batches, which survive restarts; enables /v1/files and /v1/batches (default: disabled)",
    )  # fmt: skip
    settings.add_argument(
        "--batch-max-file",
        type=options.positive(int),
        metavar="MIB",
        default=100,
        help="maximum size of one uploaded file in MiB",
    )
    settings.add_argument(
        "--batch-max-requests",
        type=options.positive(int),
        metavar="N",
        default=50_000,
        help="maximum number of requests in one batch",
    )
    settings.add_argument(
        "--batch-disk", type=options.positive(float), metavar="GIB", default=4.0,
        help="maximum disk space in GiB for files and batches of all API keys; one key can use half of it",
    )  # fmt: skip
    settings.add_argument(
        "--batch-concurrency", type=options.positive(int), metavar="N",
        help="maximum number of batch requests in the engine at once, in slots that interactive requests leave free (default: --max-num-seqs)",
    )  # fmt: skip
    group = parser.add_argument_group("several hosts")
    names = ("nnodes", "node_rank", "master_addr", "master_port", "join_timeout_s", "join_key_file")
    flags.add_options(group, ParallelConfig, names, settings=settings)
    group.add_argument(
        "--headless",
        action="store_true",
        help="run as a worker rank without a server (ranks > 0); apt-jax launch adds it",
    )
    options.add_calibration_argument(parser, DEFAULT_CALIBRATION_S)
    settings.add_argument(
        "--early-start", action=argparse.BooleanOptionalAction, default=True,
        help="serve as soon as every request can be answered, without waiting until all programs are compiled and step costs measured",
    )  # fmt: skip
    options.add_engine_arguments(parser, several_names=True)


def run(args: argparse.Namespace) -> int:
    if args.nnodes == 1 and not args.headless:
        return _run(args)
    try:
        code = _run_one_of_several(args)
    except (AptJaxError, CommandError) as error:
        sys.stderr.write(f"apt-jax serve: {one_line(str(error))}\n")
        code = 2 if isinstance(error, ConfigError) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # JAX would wait for processes that have already exited


def _run_one_of_several(args: argparse.Namespace) -> int:
    if not args.headless:
        return _run(args)
    logs.configure(args.log_format, args.log_level)
    args.api_key = take_api_key(args.api_key, os.environ)
    config, _, _ = check(args)
    bars = ProgressBars()
    try:
        run_headless(config, bars)
    finally:
        bars.close()
    return 0


def check(args: argparse.Namespace) -> tuple[EngineConfig, ApiKeys | None, Tls | None]:
    """Return the engine configuration, keys and certificates that the flags specify, without opening a port or loading
    a model.

    Raises:
        ConfigError: a flag is invalid; the message is one line that names it.
    """
    _check_uds(args)
    for flag, port in (("--grpc-port", args.grpc_port), ("--port", args.http_port)):
        if not 0 <= port < 65536:
            raise ConfigError(f"port {port} must lie in [0, 65535] ({flag})")
    _browsers(args)
    _check_root_path(args.root_path)
    keys, tls = _keys(args), _tls(args)
    closed = keys is not None or (tls is not None and tls.asks_clients)
    hosts = [args.host] if args.no_http else [args.host, _http_host(args)]
    reachable = [host for host in hosts if not is_loopback(host)]
    if reachable and not closed:
        if args.insecure_open:
            logger.warning("%s can be reached by anyone from other machines (--insecure-open)", reachable[0])
        else:
            raise ConfigError(
                f"{reachable[0]} can be reached by anyone from other machines; require keys ({FLAG}) or certificates (--tls-client-ca), bind 127.0.0.1 (--host), or allow open access (--insecure-open)"
            )
    config = dataclasses.replace(
        options.engine_config(args), tool_call_parser=args.tool_call_parser, reasoning_parser=args.reasoning_parser
    )
    if args.batch_dir is not None:  # batch requests are best effort
        config = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, best_effort_last=True))
    if args.headless != (args.node_rank > 0):
        why = "serves: leave out --headless" if args.headless else "serves nothing: add --headless"
        raise ConfigError(f"node_rank={args.node_rank} {why}")
    return config, keys, tls


def _check_uds(args: argparse.Namespace) -> None:
    if args.uds is None:
        return
    if not args.uds:
        raise ConfigError(f"{UDS_FLAG} needs the path of a file")
    has_port = args.http_port != HttpConfig().port
    for flag, given in (("--no-http", args.no_http), ("--http-host", args.http_host is not None), ("--port", has_port)):
        if given:
            raise ConfigError(f"{UDS_FLAG} serves HTTP on {args.uds:.200}: it cannot be given together with {flag}")


def _http_host(args: argparse.Namespace) -> str:
    """Return the host that the HTTP server listens on; localhost for a Unix socket."""
    return "localhost" if args.uds is not None else args.http_host or args.host


def _check_root_path(path: str) -> None:
    names = path.split("/")[1:]
    if path and not (path.startswith("/") and all(n and set(n) <= _PATH_CHARACTERS for n in names)):
        raise ConfigError(f"{path!r:.80} must start with a slash, not end with one, and consist of names (--root-path)")


def _run(args: argparse.Namespace) -> int:
    logs.configure(args.log_format, args.log_level)
    args.api_key = take_api_key(args.api_key, os.environ)
    config, keys, tls = check(args)
    if args.model is None:
        logger.warning("%s", options.no_model_given("serve"))
    if config.attention_backend in (None, "cpu") and config.parallel.tensor_parallel_size == 1:
        build.begin()
    early = args.early_start
    stages = planned(config, calibration_s=0.0 if early else args.calibration_time)
    tracer = _tracer(args.otlp_traces_endpoint)
    profiler = None if args.profiler_dir is None else Profiler(args.profiler_dir)
    most_open = config.scheduler.max_num_queued_reqs + config.scheduler.max_num_seqs + 64
    memory = _memory_gate(args.memory_soft_limit)
    http = HttpConfig(
        host=_http_host(args),
        port=args.http_port,
        uds=args.uds,
        tls=tls,
        connections=ConnectionLimits(
            max_connections=2 * most_open,
            max_connections_per_address=args.max_connections_per_address,
            write_stall_s=0.625 * args.client_timeout,
        ),
        app=AppConfig(
            keys=keys, tracer=tracer, memory=memory, profiler=profiler, dashboard=args.dashboard, root_path=args.root_path,
            browsers=_browsers(args), store_responses=args.store_responses, batches=None if args.no_http else _batches(args), starting=stages.status,
        ),
    )  # fmt: skip
    num_http = 0 if args.no_http else http.connections.max_connections
    max_grpc_connections = grpc_connections(most_open, num_http, raise_file_limit())
    hosts, busy = WorkerRanks(), threading.Event()
    code = asyncio.run(
        serve(
            config,
            ServerConfig(
                host=args.host,
                port=args.grpc_port,
                reflection=is_loopback(args.host),
                max_concurrent_rpcs=most_open,
                max_connections=max_grpc_connections,
                keepalive_time_s=0.375 * args.client_timeout,
                keepalive_timeout_s=0.625 * args.client_timeout,
                max_connection_age_s=args.grpc_max_connection_age,
                keys=keys,
                tls=tls,
                tracer=tracer,
                memory=memory,
                profiler=profiler,
                starting=stages.status,
                preprocessing=PreprocessingLimits(body_memory_bytes=args.body_memory << 20),
            ),
            None if args.no_http else http,
            shutdown_timeout_s=args.shutdown_timeout,
            build=lambda: build_parts(config, args.calibration_time, hosts, early=early, stages=stages),
            reload=lambda: _reload(args, keys, tls),
            step_timeout_s=args.step_timeout,
            decision_log=args.decision_log,
            find=lambda: find_model(config),
            log_format=args.log_format,
            hosts=hosts,
            on_busy=busy.set,
        )
    )
    if code in (None, 0):
        hosts.end()
    sys.stdout.flush()
    if code is None:  # stopped while the model was loading: the loading thread cannot be stopped in any other way
        os._exit(0)
    if code == ENGINE_LOST or busy.is_set():  # nor can a thread that runs a hung step or compiles
        sys.stderr.flush()
        os._exit(code)
    return code


def _memory_gate(limit_gib: float | None) -> MemoryGate | None:
    if limit_gib == 0:
        return None
    if limit_gib is not None:
        return MemoryGate(int(limit_gib * 2**30), 1.0)
    total = cgroup_limit_bytes()
    return None if total is None else MemoryGate(total)


def _tracer(endpoint: str | None) -> "Tracer | None":
    if endpoint is None:
        return None
    try:
        from serve.observability.tracing import Tracer
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'apt-jax[otel]'") from None
    return Tracer(endpoint)


def _batches(args: argparse.Namespace) -> "Batches | None":
    if args.batch_dir is None:
        return None
    from serve.batches.http import Batches  # nothing else needs the form parser that it imports

    store = BatchStore(
        BatchConfig(
            directory=Path(args.batch_dir),
            max_file_bytes=args.batch_max_file << 20,
            max_requests=args.batch_max_requests,
            max_disk_bytes=int(args.batch_disk * 2**30),
            max_concurrency=args.batch_concurrency,
        )
    )
    return Batches(store)


def _browsers(args: argparse.Namespace) -> BrowserRules:
    return browser_rules(_http_host(args), args.allowed_hosts, args.cors_allow_origin)


def _keys(args: argparse.Namespace) -> ApiKeys | None:
    if args.api_key is None and args.api_key_file is None and args.operator_key_file is None:
        return None
    return ApiKeys.load(args.api_key_file, args.operator_key_file, args.api_key)


def _tls(args: argparse.Namespace) -> Tls | None:
    if args.tls_cert is None and args.tls_key is None:
        if args.tls_client_ca is not None:
            raise ConfigError("--tls-client-ca needs a server certificate (--tls-cert)")
        return None
    if args.tls_cert is None or args.tls_key is None:
        raise ConfigError("a certificate and its key must be given together (--tls-cert, --tls-key)")
    return Tls(args.tls_cert, args.tls_key, args.tls_client_ca)


def _reload(args: argparse.Namespace, keys: ApiKeys | None, tls: Tls | None) -> None:
    """Reload the API keys, then the certificate. If a file is invalid, its old contents stay in use, and the remaining
    files are not reloaded."""
    try:
        if keys is not None:
            keys.replace(ApiKeys.load(args.api_key_file, args.operator_key_file, args.api_key))
        if tls is not None:
            tls.reload()
    except ConfigError as error:
        logger.error("not reloaded: %s", error)
    else:
        logger.info("keys and certificate reloaded")
