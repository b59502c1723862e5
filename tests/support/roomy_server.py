"""`apt-jax serve` over the engine of `toy_serving`, for a model that takes prompts of millions of tokens, as a process of
its own: python -m tests.support.roomy_server GRPC_PORT HTTP_PORT."""

import asyncio
import logging
import sys

from serve.grpc_api.server import ServerConfig
from serve.http_api.server import HttpConfig
from serve.server import serve
from tests.support.toy_serving import toy_parts


def main(grpc_port: int, http_port: int) -> int | None:
    logging.basicConfig(level=logging.INFO)
    parts = toy_parts(max_model_len=1 << 22, step_s=0.005, debug=False)
    server = serve(
        parts.config,
        ServerConfig(port=grpc_port),
        HttpConfig(port=http_port),
        shutdown_timeout_s=5,
        build=lambda: parts,
    )
    return asyncio.run(server)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
