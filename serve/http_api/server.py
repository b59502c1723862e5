"""The HTTP server: all HTTP APIs, health checks and metrics on one port.

It starts and stops like `serve.grpc_api.server`, which may share its engine:

1. `HttpServer.start` binds the port and answers at once: while the model loads, `/health` is 200, `/ready` is 503 and
   completions get 503.
2. `HttpServer.serve` attaches the engine when it is ready; `/ready` becomes 200.
3. `HttpServer.stop` sets `/ready` to 503, rejects new completions, waits for completions in flight for a limited time,
   cancels the rest and closes.

`serve.http_api.protocol` limits connections, `serve.http_api.app` limits calls; `openai_request` reads bodies and
`openai_response` writes responses.
"""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Iterator

import uvicorn

from apt_jax.frontend.async_engine import AsyncEngine
from serve.errors import PortInUseError
from serve.http_api.acceptor import Acceptor, Connection
from serve.http_api.app import HttpApp
from serve.http_api.app_config import AppConfig
from serve.http_api.protocol import ConnectionLimits, LimitedHttpProtocol
from serve.http_api.socket_file import BACKLOG, SocketFile
from serve.http_api.stalled_clients import StalledClientDetector
from serve.observability.prometheus import ServerMetrics
from serve.preprocessing import Preprocessing
from serve.security.tls import Tls

_CLOSE_TIMEOUT_S = 2.0
_CLOSE_TICK_S = 0.01
_ABORT_TIMEOUT_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Address and limits of the server."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Port to listen on; 0: any free port."""
    uds: str | None = None
    """Path of a Unix socket to listen on, instead of `host` and `port`."""
    idle_timeout_s: float = 60.0
    """Seconds after which a connection without a request is closed."""
    tls: Tls | None = None
    """Certificate and key for TLS; None: plaintext."""
    connections: ConnectionLimits = ConnectionLimits()  # noqa: RUF009 - frozen
    app: AppConfig = AppConfig()  # noqa: RUF009 - frozen


class _Uvicorn(uvicorn.Server):
    """uvicorn's server with this project's `Acceptor`. It installs no signal handlers; the process has its own."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits, stalled: StalledClientDetector) -> None:
        super().__init__(config)
        self._limits, self._stalled = limits, stalled
        self._acceptors: list[Acceptor] = []
        self._stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `uvicorn.Server`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`. Connections are accepted by `Acceptor`."""
        await self.lifespan.startup()
        config, limits = self.config, self._limits

        def make(connection: Connection) -> LimitedHttpProtocol:
            return LimitedHttpProtocol(
                config, self.server_state, self.lifespan.state, connection=connection, limits=limits, stalled=self._stalled
            )  # fmt: skip

        self._acceptors = [
            Acceptor(
                sock,
                make,
                max_connections=limits.max_connections,
                max_per_address=limits.max_per_address,
                tls=config.ssl,
            )
            for sock in sockets or ()
        ]
        self.started = True

    async def main_loop(self) -> None:
        """See `uvicorn.Server`. Returns as soon as `stop` is called, without waiting for the next tick."""
        while not self._stopping.is_set():
            await self.on_tick(0)  # updates the date in headers
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`. Polls at short intervals, and aborts connections that take too long."""
        for acceptor in self._acceptors:
            acceptor.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                while state.connections or state.tasks:
                    await asyncio.sleep(_CLOSE_TICK_S)
        # Calls that are still reading a body or preparing a request treat this as a disconnect, which ends them.
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=_ABORT_TIMEOUT_S)
        for task in state.tasks:
            task.cancel()

    def stop(self) -> None:
        """Close the port, and close each connection when its response is complete or `_CLOSE_TIMEOUT_S` has passed."""
        self._stopping.set()


class HttpServer:
    """The HTTP server, from start to stop. Used from one event loop only.

    Args:
        config: address and limits.
        work: queues for preprocessing, shared with other servers; None: the server has its own.
    """

    def __init__(self, config: HttpConfig, work: Preprocessing | None = None) -> None:
        self.config = config
        self.port = 0
        """The bound port, after `start`."""
        self.app = HttpApp(config.app, work)
        self._engine: AsyncEngine | None = None
        self._uvicorn: _Uvicorn | None = None
        self._running: asyncio.Task[None] | None = None
        self._socket_file: SocketFile | None = None

    @property
    def address(self) -> str:
        """Address that the server listens on, for messages: ``host:port`` or ``unix:path``."""
        config = self.config
        return f"{config.host}:{self.port}" if config.uds is None else f"unix:{config.uds}"

    @property
    def num_open(self) -> int:
        """Number of in-flight completions."""
        return self.app.num_open

    async def start(self) -> None:
        """Bind the port and start answering calls; `/ready` is 503 until `serve` is called.

        Raises:
            PortInUseError: the address cannot be bound.
        """
        config = self.config
        if config.uds is None:
            listener = _bound(config.host, config.port)
            self.port = listener.getsockname()[1]
        else:
            self._socket_file = SocketFile(config.uds)
            listener = self._socket_file.listener
        limits = config.connections
        settings = uvicorn.Config(
            self.app,
            http=LimitedHttpProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=config.idle_timeout_s,  # type: ignore[arg-type]  # any number is accepted
            ssl_context_factory=None if config.tls is None else lambda *_: config.tls.context,  # type: ignore[union-attr]
        )
        self._uvicorn = server = _Uvicorn(settings, limits, StalledClientDetector(limits.write_stall_s))
        self._running = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not self._running.done():
            await asyncio.sleep(0)
        if self._running.done():
            self._running.result()  # raises

    async def serve(self, engine: AsyncEngine, metrics: ServerMetrics | None = None) -> None:
        """Attach an engine that is ready; `/ready` becomes 200.

        Args:
            engine: the engine, which other servers may share.
            metrics: the engine's metrics, for ``/metrics``.
        """
        self._engine = engine
        self.app.use(engine, metrics)

    async def stop(self, drain_s: float) -> None:
        """Set `/ready` to 503, reject new completions, wait at most `drain_s` seconds for completions in flight, then
        close. A second call may shorten the wait."""
        self.app.drain()
        await self.app.stop_batches()
        if self._engine is not None:
            await self._engine.shutdown(drain_s)
        await self.app.close_event_streams()
        server, running = self._uvicorn, self._running
        if server is not None and running is not None:
            if self._socket_file is not None:
                self._socket_file.remove()
            # All responses have been written completely; uvicorn waits until they have been sent.
            server.stop()
            await asyncio.shield(running)
        self.app.close()


def _bound(host: str, port: int) -> socket.socket:
    """Return a listening socket on the first address of the host.

    Raises:
        PortInUseError: the address cannot be bound.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)  # type: ignore[arg-type]
    except OSError as error:
        # `create_server` appends the address, which the message below already has.
        reason = str(error.strerror).partition(" (while attempting")[0]
        raise PortInUseError(
            f"cannot listen on {host}:{port} ({reason}); choose another address (--port, --http-host) or use --no-http"
        ) from None
