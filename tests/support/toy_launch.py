"""`apt-jax launch` whose replicas are toy servers: python -m tests.support.toy_launch FLAGS.

TOY_FAILS, "CODE WORDS", makes replicas write WORDS and end with CODE.
"""

import asyncio
import os
import sys

REPLICA = "replica"
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
    config = ServerConfig(host=args.host, port=args.grpc_port)
    return asyncio.run(serve.serve(parts.config, config, shutdown_timeout_s=args.shutdown_timeout, build=lambda: parts))


if __name__ == "__main__":
    if sys.argv[1] == REPLICA:
        sys.exit(replica(sys.argv[2:]))

    from serve import cli
    from serve.cli.commands import launch
    from serve.launcher import plan

    plan._GATEWAY_FLAGS += ("--shutdown-grace-period-secs=1",)  # it waits for most of it whatever is open
    launch.SERVE = (sys.executable, os.path.abspath(__file__), REPLICA)
    sys.exit(cli.main(["launch", *sys.argv[1:]]))
