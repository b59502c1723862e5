"""Serve a model with several replicas behind one address: each replica is an `apt-jax serve` process on its own
devices, and the gateway smg routes requests to them. Takes every flag of `apt-jax serve`; --host and --port apply to
the gateway.

A process that exits is restarted. On SIGTERM, open requests finish and the launcher exits with code 0; a second SIGTERM
makes it exit at once. SIGHUP is passed on to the replicas.
"""

import argparse
import asyncio
import functools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from serve.cli import options
from serve.cli.commands import serve
from serve.launcher import plan as planner
from serve.launcher.plan import Plan
from serve.launcher.supervisor import launch
from serve.observability import call_log as logs
from serve.security.single_key import KEY_FLAG, take_api_key

POLICIES = (
    "least_load",
    "power_of_two",
    "cache_aware",
    "prefix_hash",
    "consistent_hashing",
    "round_robin",
    "random",
)
"""Routing policies of smg."""

SERVE = (sys.executable, "-m", "serve.cli", "serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    if isinstance(parser, options.Parser):
        parser.brief = (*parser.brief, "--replicas", "--routing-policy")
        parser.example = parser.example.replace("apt-jax serve", "apt-jax launch --replicas 2")
    _add_own_arguments(parser)


def _add_own_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--replicas",
        type=options.positive(int),
        metavar="N",
        default=1,
        help="number of servers, each on -tp devices; gRPC ports start at --grpc-port, HTTP ports after --port",
    )
    group.add_argument(
        "--routing-policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="policy by which the gateway chooses the replica for a request",
    )
    group.add_argument("--gateway", action="store_true", help="put a gateway in front of a single replica too")
    group.add_argument(
        "--max-restarts",
        type=options.natural,
        metavar="N",
        default=5,
        help="maximum consecutive restarts of a process",
    )


def run(args: argparse.Namespace) -> int:
    logs.configure(args.log_format, args.log_level)
    args.api_key = take_api_key(args.api_key, os.environ)  # replicas get it in their environment
    planned = plan(args, shlex.split(args.command_line)[2:], os.environ)
    return asyncio.run(
        launch(
            planned.replicas,
            planned.gateway,
            max_restarts=args.max_restarts,
            drain_s=args.shutdown_timeout,
            where=planned.where,
        )
    )


def plan(args: argparse.Namespace, argv: Sequence[str], env: Mapping[str, str]) -> Plan:
    """See `serve.launcher.plan.plan`.

    Args:
        args: parsed arguments of `argv`.
        argv: flags of `apt-jax launch`.
        env: environment of the launcher.
    """
    command = functools.partial(_serve_command, argv)
    return planner.plan(args, env, command=command, check=serve.check)


def _serve_command(argv: Sequence[str], flags: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    """Return the command line of `apt-jax serve`: its flags from `argv` except ``--api-key``, then `flags`.

    Args:
        argv: flags of `apt-jax launch`.
        flags: further flags, which replace the same flags in `argv`.
        without: flags in `argv` to leave out.
    """
    ours = options.Parser(add_help=False)
    _add_own_arguments(ours)
    given = {flag.split("=")[0] for flag in flags if "=" in flag}
    for flag in {*without, *given, KEY_FLAG}:
        ours.add_argument(flag)
    return [*SERVE, *ours.parse_known_args(argv)[1], *flags]
