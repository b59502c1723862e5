"""apt-jax in Ray Serve: every Ray replica has an engine of its own behind the HTTP API of `apt-jax serve`, streams
included.

    pip install 'apt-jax[serve]' 'ray[serve]'
    serve run deploy.ray_serve:app flags="tiny-opt --max-num-seqs 64" replicas=2
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "The king said", "stream": true}' -H 'content-type: application/json'

`serve` is Ray's command, run from the root of this repository. Arguments of `app`: `flags` (MODEL and the engine's
flags of `apt-jax serve`), `replicas`, `gpus` (of one replica; as many as -tp says, and without it none).
"""

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from apt_jax.errors import AptJaxError
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.builder import DEFAULT_CALIBRATION_S, build_engine
from apt_jax.frontend.components import EngineComponents
from serve.cli import options
from serve.http_api.app import HttpApp
from serve.http_api.app_config import AppConfig
from serve.observability.prometheus import ServerMetrics

DRAIN_S = 30.0
STEP_TIMEOUT_S = 60.0
Message = MutableMapping[str, Any]


def _arguments(flags: str) -> Any:
    parser = options.Parser(prog="flags")
    options.add_model_argument(parser)
    options.add_calibration_argument(parser, DEFAULT_CALIBRATION_S)
    options.add_engine_arguments(parser)
    return parser.parse_args(shlex.split(flags))


def _build(flags: str) -> EngineComponents:
    args = _arguments(flags)
    seconds = args.calibration_time
    return build_engine(options.engine_config(args), calibrate=seconds > 0, calibration_s=seconds)


class EngineApp:
    """An ASGI application: the HTTP API over an engine that is built when the application starts, where it starts.

    Args:
        flags: MODEL and flags of the engine.
    """

    def __init__(self, flags: str) -> None:
        self._flags = flags
        self._engine: AsyncEngine | None = None
        self._http: HttpApp | None = None

    def check(self) -> None:
        """Raises RuntimeError: the engine has ended."""
        if self._engine is not None and self._engine.dead_reason is not None:
            raise RuntimeError(self._engine.dead_reason)

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            assert self._http is not None
            await self._http(scope, receive, send)

    async def _live(
        self,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        await receive()  # startup
        try:
            parts = await asyncio.to_thread(_build, self._flags)
        except AptJaxError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        metrics = ServerMetrics(parts)
        self._engine = AsyncEngine(parts, metrics, step_timeout_s=STEP_TIMEOUT_S)
        self._http = HttpApp(AppConfig())
        self._http.use(self._engine, metrics)
        await send({"type": "lifespan.startup.complete"})
        await receive()  # shutdown
        self._http.drain()
        await self._http.close_event_streams()
        await self._engine.shutdown(DRAIN_S)
        self._http.close()
        await send({"type": "lifespan.shutdown.complete"})


def app(args: Mapping[str, str]) -> Any:
    """The application for `serve run` and for files of `serve deploy`.

    Raises:
        ConfigError: the flags are wrong.
    """
    from ray import serve as ray_serve  # pyright: ignore[reportMissingImports] # no dependency of ours

    flags = args.get("flags", "")
    parsed = _arguments(flags)
    config = options.engine_config(parsed)

    class AptJax:
        async def check_health(self) -> None:
            self.app.check()  # type: ignore[attr-defined] # Ray's

    # Ray lets five requests at a time to a replica by default; here the engine's own queue is the limit.
    most = config.scheduler.max_num_seqs + config.scheduler.max_num_queued_reqs
    deployment = ray_serve.deployment(
        num_replicas=int(args.get("replicas", 1)),
        max_ongoing_requests=most,
        ray_actor_options={"num_gpus": int(args.get("gpus", 0))},
        graceful_shutdown_timeout_s=DRAIN_S,
    )
    return deployment(ray_serve.ingress(EngineApp(flags))(AptJax)).bind()
