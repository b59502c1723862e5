"""Serve a model over gRPC: aptjax.v1.AptServe, health and reflection on one port.

SIGTERM turns health to NOT_SERVING, refuses new requests, lets open ones end, and exits with 0; a second one exits now.
"""

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from apt_jax.async_engine import AsyncEngine
from apt_jax.config import EngineConfig
from apt_jax.errors import ConfigError
from apt_jax.llm import DEFAULT_CALIBRATION_S, EngineParts, ProgressBars, build_engine
from serve import options
from serve.errors import CommandError
from serve.grpc_server import GrpcServer, PortInUseError, ServerConfig

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_argument(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default=ServerConfig().host, help="address to listen on")
    group.add_argument(
        "--grpc-port", type=int, metavar="PORT", default=ServerConfig().port, help="0: any free one"
    )
    group.add_argument(
        "--shutdown-timeout",
        type=options.not_negative,
        metavar="S",
        default=30.0,
        help="time that open requests have to end after SIGTERM, seconds",
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
    options.add_calibration_argument(parser, DEFAULT_CALIBRATION_S)
    options.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for name in ("apt_jax", "serve"):
        logging.getLogger(name).setLevel(args.log_level.upper())
    if not 0 <= args.grpc_port < 65536:
        raise ConfigError(f"port {args.grpc_port} must lie in [0, 65535] (--grpc-port)")
    if not args.insecure_open and not _is_loopback(args.host):
        raise ConfigError(
            f"{args.host} can be reached from other machines, without encryption or keys; bind 127.0.0.1 (--host) or say that this is meant (--insecure-open)"
        )
    config = options.engine_config(args)
    code = asyncio.run(
        serve(
            config,
            ServerConfig(
                host=args.host,
                port=args.grpc_port,
                reflection=_is_loopback(args.host),
                max_concurrent_rpcs=config.scheduler.max_num_queued_reqs
                + config.scheduler.max_num_seqs
                + 64,
            ),
            shutdown_timeout_s=args.shutdown_timeout,
            build=lambda: _build(config, args.calibration_time),
        )
    )
    sys.stdout.flush()
    if code is None:  # stopped while the model was loading: that thread cannot be ended otherwise
        os._exit(0)
    return code


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _build(config: EngineConfig, calibration_s: float) -> EngineParts:
    bars = ProgressBars()
    try:
        return build_engine(
            config, calibrate=calibration_s > 0, calibration_s=calibration_s, progress=bars
        )
    finally:
        bars.close()


async def serve(
    config: EngineConfig,
    server_config: ServerConfig,
    *,
    shutdown_timeout_s: float,
    build: Callable[[], EngineParts],
) -> int | None:
    """Serve until a signal or the engine's death; returns the exit code, None if stopped before it served.

    Raises:
        CommandError: the port is in use.
        ModelLoadError, ConfigError: from `build`.
    """
    server = GrpcServer(server_config)
    try:
        await server.start()  # before the model: a wrong port need not wait for it
    except PortInUseError as error:
        raise CommandError(str(error)) from None
    address = f"{server_config.host}:{server.port}"
    _say(f"listening on {address}, loading {config.model}")
    signals = _Signals()
    building = _in_thread(build)
    stopped = asyncio.create_task(signals.first.wait())
    try:
        await asyncio.wait({building, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            await server.stop(0)
            _say("stopped before the model was ready")
            return None
        parts = building.result()
        engine = AsyncEngine(parts)
        await server.serve(engine)
        _say(
            f"serving {parts.model_name} on {address} (loaded in {parts.load_s:.1f} s, compiled in {parts.warm_up_s:.1f} s, "
            f"calibrated in {parts.calibration_s:.1f} s; {parts.executor.num_blocks} blocks of {parts.executor.block_size} tokens)"
        )
        ended = asyncio.create_task(engine.wait_ended())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            await server.engine_lost()
            logger.critical("%s", ended.result())
            await server.stop(0)
            return 1
        _say(f"stopping: {server.num_open} open requests have {shutdown_timeout_s:g} s to end")
        stopping = asyncio.create_task(server.stop(shutdown_timeout_s))
        hurry = asyncio.create_task(signals.second.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await server.stop(0)
            await stopping
            return 128 + signals.last
        hurry.cancel()
        _say("stopped")
        return 0
    finally:
        stopped.cancel()
        signals.close()
        await server.stop(0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _Signals:
    """SIGTERM and SIGINT as events."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.last = 0
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._note, number)

    def _note(self, number: int) -> None:
        self.last = int(number)
        (self.second if self.first.is_set() else self.first).set()

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
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
