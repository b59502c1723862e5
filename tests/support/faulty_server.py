"""`apt-jax serve` over a toy engine whose steps fail by a plan: python -m tests.support.faulty_server GRPC_PORT
HTTP_PORT PLAN (see `faults.plan_of`)."""

import asyncio
import logging
import os
import sys

from serve.grpc_api.server import ServerConfig
from serve.http_api.server import HttpConfig
from serve.server import ENGINE_LOST, serve
from tests.support.faults import inject, plan_of
from tests.support.toy_serving import toy_parts


def main(grpc_port: int, http_port: int, plan: str) -> int | None:
    logging.basicConfig(level=logging.INFO)
    parts = toy_parts(debug=False, step_s=0.005)
    inject(parts, plan_of(plan))
    return asyncio.run(
        serve(
            parts.config,
            ServerConfig(port=grpc_port),
            HttpConfig(port=http_port),
            shutdown_timeout_s=30,
            build=lambda: parts,
            step_timeout_s=2.0 if "hang" in plan else 30.0,  # a step may be slow on a busy machine
        )
    )


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    sys.stderr.flush()
    if code == ENGINE_LOST:  # as the serve command does: a step that hangs cannot be ended otherwise
        os._exit(code)
    sys.exit(code)
