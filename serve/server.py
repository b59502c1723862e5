"""The life of a server: model loading, serving over every protocol, draining, and the engine's failure.

1. `serve` binds all ports, then loads the model in a thread.
2. It serves over one `AsyncEngine` until a signal or the engine's failure.
3. The first signal drains the server; a second signal stops it at once.
"""

import asyncio
import contextlib
import logging
import os
import resource
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from apt_jax.config import EngineConfig
from apt_jax.errors import counted
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.builder import build_engine, freeze_gc_heap
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.early_start import BackgroundPreparation
from apt_jax.frontend.progress import ProgressBars
from apt_jax.frontend.start_stages import StartStages, keep
from serve.errors import CommandError, PortInUseError
from serve.grpc_api.server import GrpcServer, ServerConfig
from serve.http_api.server import HttpConfig, HttpServer
from serve.observability import call_log
from serve.observability.prometheus import ServerMetrics
from serve.preprocessing import Preprocessing
from serve.signals import Signals

if TYPE_CHECKING:
    from apt_jax.distributed.hosts import Leader

logger = logging.getLogger(__name__)

_MAX_FILES = 65_536
_OTHER_FILES = 32
"""Number of open files reserved for uses other than connections."""

ENGINE_LOST = 1
"""Exit code if the engine has stopped by itself."""

_COMPUTE_NICE = 5  # reduces their share of the CPU to a third


async def serve(
    config: EngineConfig,
    server_config: ServerConfig,
    http_config: HttpConfig | None = None,
    *,
    shutdown_timeout_s: float,
    build: Callable[[], EngineComponents],
    reload: Callable[[], None] = lambda: None,
    step_timeout_s: float | None = None,
    decision_log: int = 1024,
    find: Callable[[], object] = lambda: None,
    log_format: call_log.Format = "text",
    hosts: "WorkerRanks | None" = None,
    on_busy: Callable[[], object] = lambda: None,
) -> int | None:
    """Serve until a signal or the engine's failure. Returns the exit code; None: stopped while the model was loading.

    Args:
        config: configuration of the engine.
        server_config: configuration of the gRPC server.
        http_config: configuration of the HTTP server; None: no HTTP.
        shutdown_timeout_s: seconds for in-flight requests to finish after the first signal.
        build: builds the engine; called in a thread.
        reload: called at SIGHUP.
        step_timeout_s, decision_log: see `AsyncEngine`.
        find: checks that the model exists, before anything is printed; called in the same thread as `build`.
        log_format: format of the status lines on standard output.
        hosts: the other ranks of the replica; None: no other ranks.
        on_busy: called at the end if a thread is still compiling; the process must then exit with `os._exit`.

    Raises:
        CommandError: a port is in use.
        ModelLoadError, ConfigError: raised by `find` or `build`.
    """
    server = ServerGroup(server_config, http_config)
    try:
        await server.start()  # before the model is loaded, to report an unusable port at once
    except PortInUseError as error:
        raise CommandError(str(error)) from None
    address, say = server.addresses, call_log.announcer(log_format)

    def find_and_build() -> EngineComponents:
        find()
        say(f"listening on {address}, loading {config.model}")
        return build()

    signals = Signals(reload)
    if hosts is not None:
        loop = asyncio.get_running_loop()
        hosts.on_drain = lambda: loop.call_soon_threadsafe(signals.first.set)
    building = _in_thread(find_and_build)
    stopped = asyncio.create_task(signals.first.wait())
    preparation: BackgroundPreparation | None = None
    engine: AsyncEngine | None = None
    try:
        await asyncio.wait({building, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            await server.stop(0)
            say("stopped before the model was ready")
            return None
        parts = building.result()
        metrics = ServerMetrics(parts, server_config.memory)
        if server_config.memory is not None:
            server_config.memory.model_loaded()
        engine = AsyncEngine(parts, metrics, step_timeout_s=step_timeout_s, decision_log=decision_log)
        if hosts is not None:
            hosts.tell_engine(engine)
        await server.serve(engine, metrics)
        calibrated = (
            f"calibrated in {parts.calibration_s:.1f} s" if parts.calibration_s else "calibration stored or deferred"
        )
        say(
            f"serving {parts.model_name} on {address} (loaded in {parts.load_s:.1f} s, programs prepared in {parts.warm_up_s:.1f} s, "
            f"{calibrated}; {_cache_size(parts)}; policy {parts.config.scheduler.policy})"
        )
        preparation = BackgroundPreparation(engine, metrics.calibrated)
        preparation.start()
        ended = asyncio.create_task(engine.wait_ended())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            await server.engine_lost()
            logger.critical("%s", ended.result())
            await server.stop(0)
            return ENGINE_LOST
        say(f"stopping: {shutdown_timeout_s:g} s for {counted(server.num_open, 'open request')} to finish")
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
        is_stopped = preparation is None or await asyncio.to_thread(preparation.stop)
        if not is_stopped or (engine is not None and engine.is_compiling):
            on_busy()
        if server_config.profiler is not None:
            await server_config.profiler.close()
        if server_config.tracer is not None:
            await asyncio.to_thread(server_config.tracer.close)


def _cache_size(parts: EngineComponents) -> str:
    """Return the pool's size in tokens, and in requests of the maximum length; ranges if there are two cache kinds."""
    tokens, longest = sorted(set(parts.pool_tokens.values())), parts.limits.max_model_len
    sizes = " to ".join(f"{number:,}" for number in tokens)
    requests = " to ".join(f"{number / longest:,.1f}" for number in tokens)
    return f"cache for {sizes} tokens, {requests} requests of {longest:,}"


class ServerGroup:
    """The gRPC server and the HTTP server, if there is one; both use one engine."""

    def __init__(self, grpc_config: ServerConfig, http_config: HttpConfig | None) -> None:
        work = Preprocessing(grpc_config.preprocessing)
        self._grpc = GrpcServer(grpc_config, work)
        self._http = None if http_config is None else HttpServer(http_config, work)

    @property
    def addresses(self) -> str:
        """Addresses of the servers, for status lines."""
        text = f"{self._grpc.config.host}:{self._grpc.port} (gRPC)"
        if self._http is not None:
            text += f" and {self._http.address} (HTTP)"
        return text

    @property
    def num_open(self) -> int:
        """Number of in-flight requests."""
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


class WorkerRanks:
    """The other ranks of the replica, once they have joined; there are none on a single host.

    Attributes:
        on_drain: called in a thread when another rank has received a termination signal.
    """

    def __init__(self) -> None:
        self._leader: Leader | None = None
        self.on_drain: Callable[[], object] = lambda: None

    def joined(self, leader: "Leader") -> None:
        leader.on_drain = lambda: self.on_drain()
        self._leader = leader

    def tell_engine(self, engine: AsyncEngine) -> None:
        """Make the engine fail when a rank is lost."""

        def fail(reason: str) -> None:
            logger.critical("%s", reason)
            engine.fail("another host of this replica was lost")

        if self._leader is not None:
            self._leader.on_lost = fail

    def end(self) -> None:
        if self._leader is not None:
            self._leader.end()


def build_parts(
    config: EngineConfig,
    calibration_s: float,
    hosts: WorkerRanks,
    *,
    early: bool = False,
    stages: StartStages | None = None,
) -> EngineComponents:
    others, bars = thread_ids(), ProgressBars(stages=stages).keep_reporting()
    try:
        parts = build_engine(
            config,
            calibrate=calibration_s > 0,
            calibration_s=calibration_s,
            early=early,
            progress=bars,
            on_joined=hosts.joined,
        )
        if stages is not None:
            stages.end()
            keep(stages, config)
    finally:
        bars.close()
    freeze_gc_heap()
    _lower_compute_thread_priority(others)
    return parts


def find_model(config: EngineConfig) -> None:
    from apt_jax.models import resolve_model  # JAX takes a second to import

    resolve_model(config.model, allow_preset=config.load_format == "dummy")


def _lower_compute_thread_priority(others: set[int]) -> None:
    """Give the model's compute threads, which use every CPU core, a lower priority than threads that serve calls.

    Args:
        others: ids of native threads that existed before the model. They keep their priority. So do all Python
            threads, because a thread of high priority would wait for the GIL while a thread of low priority holds it.
    """
    import jax

    if jax.default_backend() != "cpu":
        return
    python = {thread.native_id for thread in threading.enumerate()}
    for task in thread_ids() - others - python:
        with contextlib.suppress(OSError):  # the thread has exited
            nice = os.getpriority(os.PRIO_PROCESS, task)
            os.setpriority(os.PRIO_PROCESS, task, min(nice + _COMPUTE_NICE, 19))


def thread_ids() -> set[int]:
    """Return the ids of this process's threads; empty on systems without /proc/self/task."""
    try:
        return {int(task) for task in os.listdir("/proc/self/task")}
    except OSError:
        return set()


def raise_file_limit() -> int:
    """Raise the limit on open files and return it; each connection is an open file, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return _MAX_FILES if soft == resource.RLIM_INFINITY else soft


def grpc_connections(wanted: int, http: int, limit: int) -> int:
    """Return the maximum number of open gRPC connections: `wanted`, or fewer if the limit on open files is low.

    The HTTP server leaves some file descriptors free for other uses (`serve.http_api.acceptor`). The gRPC server
    cannot do so, and without a limit would use them all.

    Args:
        wanted: configured maximum number of gRPC connections.
        http: configured maximum number of HTTP connections.
        limit: maximum number of open files.
    """
    if wanted + http + _OTHER_FILES <= limit:
        return wanted
    some = min(wanted, max(4, (limit - _OTHER_FILES) // 4))
    logger.warning(
        "the limit of %d open files is too low for %d HTTP and %d gRPC connections: gRPC gets %d, HTTP the rest; raise 'ulimit -n' (the hard limit)",
        limit,
        http,
        wanted,
        some,
    )
    return some


def _in_thread(function: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Like `asyncio.to_thread`, but in a thread that does not keep the process alive."""
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
