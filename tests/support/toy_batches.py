"""A server over the engine of `toy_server` with files and batches, as a process of its own: python -m
tests.support.toy_batches DIR STEP_MS. It prints its HTTP port."""

import asyncio
import sys
from pathlib import Path

from apt_jax.frontend.async_engine import AsyncEngine
from serve.batches.config import BatchConfig
from serve.batches.http import Batches
from serve.batches.store import BatchStore
from serve.http_api.app_config import AppConfig
from serve.http_api.server import HttpConfig, HttpServer
from tests.support.toy_server import server_parts


async def main(directory: str, step_ms: float) -> None:
    store = BatchStore(BatchConfig(directory=Path(directory)))
    server = HttpServer(HttpConfig(port=0, app=AppConfig(batches=Batches(store))))
    await server.start()
    await server.serve(AsyncEngine(server_parts(step_ms / 1e3)))
    print(server.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
