"""`apt-jax launch` whose replicas are toy servers: python -m tests.support.toy_launch FLAGS.

TOY_FAILS, "CODE WORDS", makes replicas write WORDS and end with CODE. TOY_LIARS names a file of gRPC ports: replicas at
these ports answer every request with INTERNAL, though they are healthy. A prompt that ends in POISON kills its replica.
PROXY_PORTS: see benchmarks.server.proxied_launch.
"""

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

REPLICA = "replica"
POISON = "!poison!"
STEP_S = 0.005


def replica(argv: list[str]) -> int | None:
    """In the place of `apt-jax serve`."""
    code, _, words = os.environ.get("TOY_FAILS", "").partition(" ")
    if code:
        sys.stderr.write(f"{words}\n")
        return int(code)

    # After that: a replica that fails does so at once.
    from serve.cli import options
    from serve.cli.commands import serve
    from serve.grpc_api.server import ServerConfig
    from serve.observability import call_log as logs
    from tests.support.toy_server import server_parts

    parser = options.Parser(prog="toy")
    serve.add_arguments(parser)
    args = parser.parse_args(argv)
    logs.configure(args.log_format, args.log_level)
    parts = server_parts(STEP_S)
    spoil(args.grpc_port)
    config = ServerConfig(host=args.host, port=args.grpc_port)
    return asyncio.run(serve.serve(parts.config, config, shutdown_timeout_s=args.shutdown_timeout, build=lambda: parts))


def spoil(port: int) -> None:
    """Have requests fail as TOY_LIARS and POISON say."""
    from apt_jax.frontend.components import EngineComponents
    from apt_jax.request import EngineRequest

    liars = Path(os.environ.get("TOY_LIARS", os.devnull))
    build = EngineComponents.build_requests

    def build_requests(self: EngineComponents, **fields: Any) -> list[EngineRequest]:
        if str(port) in liars.read_text().split():
            raise RuntimeError("a replica that lies")
        built = build(self, **fields)
        assert self.tokenizer is not None
        if self.tokenizer.decode(built[0].prompt_token_ids.tolist()).endswith(POISON):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return built

    EngineComponents.build_requests = build_requests


if __name__ == "__main__":
    if sys.argv[1] == REPLICA:
        sys.exit(replica(sys.argv[2:]))

    from serve import cli
    from serve.cli.commands import launch
    from serve.launcher import plan

    if "PROXY_PORTS" in os.environ:
        from benchmarks.server.proxied_launch import route_through_proxies

        route_through_proxies()
    plan._GATEWAY_FLAGS += ("--shutdown-grace-period-secs=1",)  # it waits for most of it whatever is open
    launch.SERVE = (sys.executable, os.path.abspath(__file__), REPLICA)
    sys.exit(cli.main(["launch", *sys.argv[1:]]))
