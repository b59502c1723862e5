"""Serve a model over gRPC (aptjax.v1.AptServe, vllm.grpc.engine.VllmEngine, health and reflection on one port) and HTTP
(OpenAI's API on another).

SIGTERM turns health to NOT_SERVING, refuses new requests, lets open ones end, and exits with 0; a second one exits now. SIGHUP
reads API keys and the certificate again.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from apt_jax.async_engine import AsyncEngine
from apt_jax.config import EngineConfig, ParallelConfig
from apt_jax.errors import AptJaxError, ConfigError, one_line
from apt_jax.llm import (
    DEFAULT_CALIBRATION_S,
    EngineParts,
    ProgressBars,
    build_engine,
    freeze_loaded,
    run_headless,
)
from serve import logs, options
from serve.errors import CommandError, PortInUseError
from serve.grpc_server import GrpcServer, ServerConfig
from serve.http_app import AppConfig
from serve.http_protocol import ConnectionLimits
from serve.http_server import HttpConfig, HttpServer
from serve.keys import FLAG, ApiKeys
from serve.profiler import FLAG as PROFILER_FLAG
from serve.profiler import Profiler
from serve.prometheus import ServerMetrics
from serve.tls import Tls

if TYPE_CHECKING:
    from apt_jax.hosts import Leader
    from serve.traces import Tracer  # it needs the extra `otel`

logger = logging.getLogger(__name__)

ENGINE_LOST = 1
"""Exit code where the engine has ended by itself."""

_NICE = 5  # a third of the weight that they had


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_argument(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", metavar="HOST", default=ServerConfig().host, help="address to listen on"
    )
    group.add_argument(
        "--grpc-port",
        type=int,
        metavar="PORT",
        default=ServerConfig().port,
        help="of gRPC; 0: any free one",
    )
    group.add_argument(
        "--port",
        "--http-port",
        dest="http_port",
        type=int,
        metavar="PORT",
        default=HttpConfig().port,
        help="of HTTP; 0: any free one",
    )
    group.add_argument(
        "--http-host", metavar="HOST", help="address of HTTP to listen on; without it --host"
    )
    group.add_argument("--no-http", action="store_true", help="serve gRPC alone")
    group.add_argument(
        "--no-dashboard", action="store_true", help="HTTP without the page at /dashboard"
    )
    group.add_argument(
        FLAG,
        metavar="FILE",
        help="only calls with one of these keys, one a line, are served; health asks for none",
    )
    group.add_argument("--tls-cert", metavar="FILE", help="PEM certificate and chain of both ports")
    group.add_argument("--tls-key", metavar="FILE", help="PEM key of the certificate")
    group.add_argument(
        "--tls-client-ca",
        metavar="FILE",
        help="PEM certificates of CAs; only clients that have a certificate of theirs can connect",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=options.not_negative,
        metavar="S",
        default=30.0,
        help="time that open requests have to end after SIGTERM, seconds",
    )
    group.add_argument(
        "--decision-log",
        type=options.natural,
        metavar="N",
        default=1024,
        help="requests of which is kept why they waited, ran or lost their cache (GET /v1/requests/ID/decisions); 0: none",
    )
    group.add_argument(
        "--step-timeout",
        type=options.positive(float),
        metavar="S",
        default=60.0,
        help="seconds after which a step that has not ended is a fault: the server tells its clients and exits with 1",
    )
    group.add_argument(
        "--client-timeout",
        type=options.positive(float),
        metavar="S",
        default=4.0,
        help="seconds after which a client that neither answers nor reads loses its requests, and they their cache",
    )
    group.add_argument(
        "--insecure-open",
        action="store_true",
        help="allow an address that other machines can reach, without encryption or keys",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="one line a request at info; never prompts or outputs",
    )
    group.add_argument(
        "--log-format", choices=logs.FORMATS, default="text", help="json: an object a line"
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry traces of requests there, over OTLP and HTTP (http://127.0.0.1:4318); needs the extra otel",
    )
    group.add_argument(
        PROFILER_FLAG,
        metavar="DIR",
        help="take profiles of JAX into DIR when asked to (POST /start_profile, /stop_profile); without it nobody can ask",
    )
    hosts, ours = parser.add_argument_group("several hosts"), ParallelConfig()
    hosts.add_argument(
        "--nnodes",
        type=int,
        metavar="HOSTS",
        default=ours.nnodes,
        help="processes that share the devices of -tp, usually one a host (docs/parallel.md)",
    )
    hosts.add_argument(
        "--node-rank",
        type=int,
        metavar="RANK",
        default=ours.node_rank,
        help="which of them this is; 0 schedules and serves",
    )
    hosts.add_argument(
        "--master-addr",
        metavar="HOST",
        default=ours.master_addr,
        help="address of rank 0; connections are not encrypted: use a private network",
    )
    hosts.add_argument(
        "--master-port",
        type=int,
        metavar="PORT",
        default=ours.master_port,
        help="port there; the next one is used too",
    )
    hosts.add_argument(
        "--join-timeout",
        type=options.positive(float),
        metavar="S",
        default=ours.join_timeout_s,
        help="seconds that ranks wait for each other",
    )
    hosts.add_argument(
        "--join-key-file",
        metavar="FILE",
        default=ours.join_key_file,
        help="secret that all ranks prove to each other to have, one line; needed unless --master-addr is of this machine alone",
    )
    hosts.add_argument(
        "--headless",
        action="store_true",
        help="serve nothing: for ranks other than 0, to which apt-jax launch adds it",
    )
    options.add_calibration_argument(parser, DEFAULT_CALIBRATION_S)
    options.add_engine_arguments(parser)


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
    os._exit(code)  # JAX would wait for processes that have ended


def _run_one_of_several(args: argparse.Namespace) -> int:
    if not args.headless:
        return _run(args)
    logs.configure(args.log_format, args.log_level)
    config, _, _ = check(args)
    bars = ProgressBars()
    try:
        run_headless(config, bars)
    finally:
        bars.close()
    return 0


def _config(args: argparse.Namespace) -> EngineConfig:
    config = options.engine_config(args)
    ours = dataclasses.replace(
        config.parallel,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
        join_timeout_s=args.join_timeout,
        join_key_file=args.join_key_file,
    )
    return dataclasses.replace(config, parallel=ours)


def check(args: argparse.Namespace) -> tuple[EngineConfig, ApiKeys | None, Tls | None]:
    """What the flags say of the engine, the keys and the certificates; opens no port and loads no model.

    Raises:
        ConfigError: one line that names the flag.
    """
    http_host = args.http_host or args.host
    for flag, port in (("--grpc-port", args.grpc_port), ("--port", args.http_port)):
        if not 0 <= port < 65536:
            raise ConfigError(f"port {port} must lie in [0, 65535] ({flag})")
    keys, tls = _keys(args), _tls(args)
    closed = keys is not None or (tls is not None and tls.asks_clients)
    hosts = [args.host] if args.no_http else [args.host, http_host]
    reachable = [host for host in hosts if not is_loopback(host)]
    if reachable and not closed and not args.insecure_open:
        raise ConfigError(
            f"{reachable[0]} can be reached from other machines, by everybody; ask for keys ({FLAG}) or certificates (--tls-client-ca), bind 127.0.0.1 (--host) or say that this is meant (--insecure-open)"
        )
    config = _config(args)
    if args.headless != (args.node_rank > 0):
        why = "serves: leave out --headless" if args.headless else "serves nothing: add --headless"
        raise ConfigError(f"node_rank={args.node_rank} {why}")
    return config, keys, tls


def _run(args: argparse.Namespace) -> int:
    logs.configure(args.log_format, args.log_level)
    config, keys, tls = check(args)
    tracer = _tracer(args.otlp_traces_endpoint)
    profiler = None if args.profiler_dir is None else Profiler(args.profiler_dir)
    _allow_many_files()
    most_open = config.scheduler.max_num_queued_reqs + config.scheduler.max_num_seqs + 64
    http = HttpConfig(
        host=args.http_host or args.host,
        port=args.http_port,
        tls=tls,
        connections=ConnectionLimits(
            max_connections=2 * most_open, write_stall_s=0.625 * args.client_timeout
        ),
        app=AppConfig(keys=keys, tracer=tracer, profiler=profiler, dashboard=not args.no_dashboard),
    )
    hosts = _OtherHosts()
    code = asyncio.run(
        serve(
            config,
            ServerConfig(
                host=args.host,
                port=args.grpc_port,
                reflection=is_loopback(args.host),
                max_concurrent_rpcs=most_open,
                keepalive_time_s=0.375 * args.client_timeout,
                keepalive_timeout_s=0.625 * args.client_timeout,
                keys=keys,
                tls=tls,
                tracer=tracer,
                profiler=profiler,
            ),
            None if args.no_http else http,
            shutdown_timeout_s=args.shutdown_timeout,
            build=lambda: _build(config, args.calibration_time, hosts),
            reload=lambda: _reload(args, keys, tls),
            step_timeout_s=args.step_timeout,
            decision_log=args.decision_log,
            find=lambda: _find(config),
            log_format=args.log_format,
            hosts=hosts,
        )
    )
    if code in (None, 0):
        hosts.end()
    sys.stdout.flush()
    if code is None:  # stopped while the model was loading: that thread cannot be ended otherwise
        os._exit(0)
    if code == ENGINE_LOST:  # likewise a step that does not end
        sys.stderr.flush()
        os._exit(code)
    return code


def _tracer(endpoint: str | None) -> "Tracer | None":
    if endpoint is None:
        return None
    try:
        from serve.traces import Tracer
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'apt-jax[otel]'") from None  # fmt: skip
    return Tracer(endpoint)


def _keys(args: argparse.Namespace) -> ApiKeys | None:
    return None if args.api_key_file is None else ApiKeys.load(args.api_key_file)


def _tls(args: argparse.Namespace) -> Tls | None:
    if args.tls_cert is None and args.tls_key is None:
        if args.tls_client_ca is not None:
            raise ConfigError("--tls-client-ca needs a certificate of the server (--tls-cert)")
        return None
    if args.tls_cert is None or args.tls_key is None:
        raise ConfigError("a certificate and its key go together (--tls-cert, --tls-key)")
    return Tls(args.tls_cert, args.tls_key, args.tls_client_ca)


def _reload(args: argparse.Namespace, keys: ApiKeys | None, tls: Tls | None) -> None:
    """Read keys and certificate again; what cannot be used leaves the old ones in use."""
    try:
        if keys is not None:
            keys.replace(ApiKeys.load(args.api_key_file))
        if tls is not None:
            tls.reload()
    except ConfigError as error:
        logger.error("not reloaded: %s", error)
    else:
        logger.info("keys and certificate reloaded")


def _allow_many_files() -> None:
    """Every connection is an open file, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _find(config: EngineConfig) -> None:
    from apt_jax.models import resolve_model  # JAX takes a second to import

    resolve_model(config.model, allow_preset=config.load_format == "dummy")


class _OtherHosts:
    """The other ranks of the replica, where there are any and once they have joined.

    Attributes:
        on_drain: called in a thread when one of them was asked to end.
    """

    def __init__(self) -> None:
        self._leader: Leader | None = None
        self.on_drain: Callable[[], object] = lambda: None

    def joined(self, leader: "Leader") -> None:
        leader.on_drain = lambda: self.on_drain()
        self._leader = leader

    def tell_engine(self, engine: AsyncEngine) -> None:
        """Have what is lost end the engine."""

        def lose(reason: str) -> None:
            logger.critical("%s", reason)
            engine.lose("another host of this replica is gone")

        if self._leader is not None:
            self._leader.on_lost = lose

    def end(self) -> None:
        if self._leader is not None:
            self._leader.end()


def _build(config: EngineConfig, calibration_s: float, hosts: _OtherHosts) -> EngineParts:
    bars, others = ProgressBars(), _tasks()
    try:
        parts = build_engine(
            config,
            calibrate=calibration_s > 0,
            calibration_s=calibration_s,
            progress=bars,
            on_joined=hosts.joined,
        )
    finally:
        bars.close()
    freeze_loaded()
    _let_calls_go_first(others)
    return parts


def _let_calls_go_first(others: set[int]) -> None:
    """On a CPU the model's own threads take every core. Those that answer calls need them for moments only, and get them first.

    Args:
        others: threads that are not the model's. Nor are Python's, which the interpreter's lock makes wait for each other.
    """
    import jax

    if jax.default_backend() != "cpu":
        return
    python = {thread.native_id for thread in threading.enumerate()}
    for task in _tasks() - others - python:
        with contextlib.suppress(OSError):  # it has ended
            nice = os.getpriority(os.PRIO_PROCESS, task)
            os.setpriority(os.PRIO_PROCESS, task, min(nice + _NICE, 19))


def _tasks() -> set[int]:
    """The threads of this process, on systems that give each its own priority."""
    try:
        return {int(task) for task in os.listdir("/proc/self/task")}
    except OSError:
        return set()


async def serve(
    config: EngineConfig,
    server_config: ServerConfig,
    http_config: HttpConfig | None = None,
    *,
    shutdown_timeout_s: float,
    build: Callable[[], EngineParts],
    reload: Callable[[], None] = lambda: None,
    step_timeout_s: float | None = None,
    decision_log: int = 1024,
    find: Callable[[], object] = lambda: None,
    log_format: logs.Format = "text",
    hosts: "_OtherHosts | None" = None,
) -> int | None:
    """Serve until a signal or the engine's death; returns the exit code, None if stopped before it served.

    Args:
        config: of the engine.
        server_config: of gRPC.
        http_config: of HTTP; None: no HTTP.
        shutdown_timeout_s: time that open requests have after the first signal.
        build: makes the engine, in a thread.
        reload: called at SIGHUP.
        step_timeout_s, decision_log: see `AsyncEngine`.
        find: looks for the model, before anything is said of it; in the same thread.
        log_format: of the lines on standard output that say what becomes of the server.
        hosts: the other ranks of the replica.

    Raises:
        CommandError: a port is in use.
        ModelLoadError, ConfigError: from `find` or `build`.
    """
    server = _Doors(server_config, http_config)
    try:
        await server.start()  # before the model: a wrong port need not wait for it
    except PortInUseError as error:
        raise CommandError(str(error)) from None
    address, say = server.addresses, logs.announcer(log_format)

    def find_and_build() -> EngineParts:
        find()
        say(f"listening on {address}, loading {config.model}")
        return build()

    signals = Signals(reload)
    if hosts is not None:
        loop = asyncio.get_running_loop()
        hosts.on_drain = lambda: loop.call_soon_threadsafe(signals.first.set)
    building = _in_thread(find_and_build)
    stopped = asyncio.create_task(signals.first.wait())
    try:
        await asyncio.wait({building, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            await server.stop(0)
            say("stopped before the model was ready")
            return None
        parts = building.result()
        metrics = ServerMetrics(parts)
        engine = AsyncEngine(
            parts, metrics, step_timeout_s=step_timeout_s, decision_log=decision_log
        )
        if hosts is not None:
            hosts.tell_engine(engine)
        await server.serve(engine, metrics)
        say(
            f"serving {parts.model_name} on {address} (loaded in {parts.load_s:.1f} s, programs prepared in {parts.warm_up_s:.1f} s, "
            f"calibrated in {parts.calibration_s:.1f} s; {parts.executor.num_blocks} blocks of {parts.executor.block_size} tokens)"
        )
        ended = asyncio.create_task(engine.wait_ended())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            await server.engine_lost()
            logger.critical("%s", ended.result())
            await server.stop(0)
            return ENGINE_LOST
        say(f"stopping: {server.num_open} open requests have {shutdown_timeout_s:g} s to end")
        stopping = asyncio.create_task(server.stop(shutdown_timeout_s))
        hurry = asyncio.create_task(signals.second.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await server.stop(0)
            await stopping
            return 128 + signals.last if engine.dead_reason is None else ENGINE_LOST
        hurry.cancel()
        if engine.dead_reason is not None:
            return ENGINE_LOST
        say("stopped")
        return 0
    finally:
        stopped.cancel()
        signals.close()
        await server.stop(0)
        if server_config.profiler is not None:
            await server_config.profiler.close()
        if server_config.tracer is not None:
            await asyncio.to_thread(server_config.tracer.close)


class _Doors:
    """The gRPC server, and the HTTP server where there is one, over one engine."""

    def __init__(self, grpc_config: ServerConfig, http_config: HttpConfig | None) -> None:
        self._grpc = GrpcServer(grpc_config)
        self._http = None if http_config is None else HttpServer(http_config)

    @property
    def addresses(self) -> str:
        """Where they listen."""
        text = f"{self._grpc.config.host}:{self._grpc.port} (gRPC)"
        if self._http is not None:
            text += f" and {self._http.config.host}:{self._http.port} (HTTP)"
        return text

    @property
    def num_open(self) -> int:
        """Requests in progress."""
        return self._grpc.num_open + (0 if self._http is None else self._http.num_open)

    async def start(self) -> None:
        await self._grpc.start()
        if self._http is not None:
            try:
                await self._http.start()
            except PortInUseError:
                await self._grpc.stop(0)
                raise

    async def serve(self, engine: AsyncEngine, metrics: ServerMetrics) -> None:
        await self._grpc.serve(engine)
        if self._http is not None:
            await self._http.serve(engine, metrics)

    async def engine_lost(self) -> None:
        await self._grpc.engine_lost()

    async def stop(self, drain_s: float) -> None:
        stops = [self._grpc.stop(drain_s)]
        if self._http is not None:
            stops.append(self._http.stop(drain_s))
        await asyncio.gather(*stops)


class Signals:
    """SIGTERM and SIGINT as events, SIGHUP as a call."""

    def __init__(self, reload: Callable[[], None]) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.last = 0
        self._was_told = False
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._note, number)
        self._loop.add_signal_handler(signal.SIGHUP, reload)

    def _note(self, number: int) -> None:
        self.last = int(number)
        (self.second if self._was_told else self.first).set()
        self._was_told = True

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.remove_signal_handler(number)


def _in_thread(function: Callable[[], Any]) -> "asyncio.Future[Any]":
    """As `asyncio.to_thread`, in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    def work() -> None:
        try:
            outcome: tuple[Any, Any] = future.set_result, function()
        except BaseException as error:
            outcome = future.set_exception, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="apt-jax-build", daemon=True).start()
    return future
