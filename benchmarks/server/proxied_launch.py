"""`apt-jax launch` whose gateway reaches replica i through port i of $PROXY_PORTS (PORT,PORT): python -m
benchmarks.server.proxied_launch FLAGS.

The launcher itself, its probes and its supervision are untouched.
"""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence

from serve import cli
from serve.cli.commands import launch
from serve.launcher.plan import Plan

_REPLICA = re.compile(r"grpc://127\.0\.0\.1:\d+")


def route_through_proxies() -> None:
    """Have `apt-jax launch` in this process give its gateway $PROXY_PORTS in place of the replicas' own ports."""
    ports = os.environ["PROXY_PORTS"].split(",")
    plan = launch.plan

    def proxied(args: argparse.Namespace, argv: Sequence[str], env: Mapping[str, str]) -> Plan:
        planned = plan(args, argv, env)
        if planned.gateway is None:
            return planned
        left = iter(ports)
        command = [
            f"grpc://127.0.0.1:{next(left)}" if _REPLICA.fullmatch(argument) else argument
            for argument in planned.gateway.command
        ]
        return dataclasses.replace(planned, gateway=dataclasses.replace(planned.gateway, command=command))

    launch.plan = proxied


if __name__ == "__main__":
    route_through_proxies()
    sys.exit(cli.main(["launch", *sys.argv[1:]]))
