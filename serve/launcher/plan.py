"""Plan of `apt-jax launch`: the replicas, each on its own devices, and the gateway in front of them. This module starts
no process."""

import argparse
import contextlib
import dataclasses
import http.client
import importlib.util
import itertools
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from apt_jax.errors import ConfigError, counted
from serve.errors import CommandError
from serve.http_api.browsers import HOSTS_FLAG, ORIGIN_FLAG, is_loopback
from serve.http_api.socket_file import FLAG as UDS_FLAG
from serve.launcher.supervisor import ProcessSpec
from serve.security.api_keys import FLAG, OPERATOR_FLAG
from serve.security.single_key import KEY_FLAG, KEY_VARIABLE

logger = logging.getLogger(__name__)

_LOCAL = "127.0.0.1"  # replicas behind a gateway
_BANNER = re.compile("^$|[\u2800-\u28ff]")
_GATEWAY_FLAGS = (
    "--load-monitor-interval=1",
    "--worker-startup-check-interval=1",
    "--worker-startup-timeout-secs=86400",  # loading may take long
    "--health-check-interval-secs=2",
    "--health-check-timeout-secs=2",
    "--health-failure-threshold=2",
    "--health-success-threshold=1",
    "--cb-failure-threshold=5",
    "--cb-success-threshold=1",
    "--cb-timeout-duration-secs=2",
    "--retry-max-retries=2",
    "--shutdown-grace-period-secs=5",
)
"""Flags that make the gateway detect dead, silent and failing replicas, and use restarted replicas, within seconds.

A request is sent at most twice (smg counts the first attempt as a retry), so a request that crashes its replica crashes
at most two.
"""


ServeCommand = Callable[..., list[str]]
"""Function of `flags` and `without` that returns the command line of a replica: `apt-jax serve` with the launcher's own
flags except those in `without`, then `flags`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The programs to run."""

    replicas: Sequence[ProcessSpec]
    gateway: ProcessSpec | None = None
    where: str
    """Line for the user with the addresses of the endpoints."""


def plan(
    args: argparse.Namespace,
    env: Mapping[str, str],
    *,
    command: ServeCommand,
    check: Callable[[argparse.Namespace], object],
) -> Plan:
    """Plan the replicas and the gateway.

    Args:
        args: flags of `apt-jax launch`.
        env: environment of the launcher.
        command: builds the command line of a replica.
        check: checks the flags of a replica; raises ConfigError.

    Raises:
        ConfigError: a flag is invalid, there are too few devices, or no gateway is installed.
        CommandError: a port cannot be bound.
    """
    num_nodes, rank = args.nnodes, args.node_rank
    if num_nodes > 1 and args.replicas > 1:
        raise ConfigError(f"--replicas {args.replicas}: with --nnodes there is only one replica, spread over the hosts")
    headless = num_nodes > 1 and rank > 0
    with_gateway = (args.replicas > 1 or args.gateway) and not headless
    if with_gateway:
        _check_gateway(args)
    elif not headless and (args.tls_cert is not None or args.tls_key is not None):
        raise ConfigError("--tls-cert: the launcher cannot probe health over TLS; start apt-jax serve instead")
    added = ["--headless"] if headless and not args.headless else []
    check(argparse.Namespace(**{**vars(args), "headless": True}) if added else args)
    if headless:
        part = _replica(args, f"rank {rank}", command(added), env)
        return Plan(replicas=[part], where=f"rank {rank} of {num_nodes} has been started; requests go to rank 0")
    # With several hosts, each part of the replica uses all devices of its host.
    envs = [dict(env)] if num_nodes > 1 else _divide_gpus(args.replicas, args.tensor_parallel_size, env)
    with contextlib.ExitStack() as held:
        if with_gateway:
            return _behind_gateway(args, command, envs, held)
        return _alone(args, command, envs[0], held)


def _alone(
    args: argparse.Namespace,
    command: ServeCommand,
    env: Mapping[str, str],
    held: contextlib.ExitStack,
) -> Plan:
    port = _take_port(args.host, args.grpc_port, "--grpc-port", held)
    flags, where = [f"--grpc-port={port}"], f"listening on {_join(args.host, port)} (gRPC)"
    if args.uds is not None:
        where += f" and unix:{args.uds} (HTTP)"
    elif not args.no_http:
        http_host = args.http_host or args.host
        http_port = _take_port(http_host, args.http_port, "--port", held)
        flags.append(f"--port={http_port}")
        where += f" and {_join(http_host, http_port)} (HTTP)"
    is_healthy = _replica_probe(_join(_near(args.host), port))
    replica = _replica(args, "replica 0", command(flags), env, is_healthy)
    return Plan(replicas=[replica], where=where)


def _behind_gateway(
    args: argparse.Namespace,
    command: ServeCommand,
    envs: Sequence[Mapping[str, str]],
    held: contextlib.ExitStack,
) -> Plan:
    host = _gateway_host(args)

    def port(where: str, first: int, i: int, flag: str) -> int:
        return _take_port(where, first and first + i, flag, held)

    count = args.replicas
    front = port(host, args.http_port, 0, "--port")
    metrics = port(host, args.http_port, count + 1, "--port, metrics of the gateway")
    cpus = [()] * count if visible_gpus(envs[0]) else _divide_cpus(count)
    replicas, addresses = [], []
    for i, (env, own_cpus) in enumerate(zip(envs, cpus, strict=True)):
        grpc_port = port(_LOCAL, args.grpc_port, i, f"--grpc-port, replica {i}")
        flags = [f"--host={_LOCAL}", f"--grpc-port={grpc_port}"]
        if not args.no_http:
            flags.append(f"--port={port(_LOCAL, args.http_port, 1 + i, f'--port, replica {i}')}")
        addresses.append(_join(_LOCAL, grpc_port))
        line = command(flags, without=("--host", "--http-host"))
        probe = _replica_probe(addresses[-1])
        replicas.append(_replica(args, f"replica {i}", line, env, probe, own_cpus))
    gateway = ProcessSpec(
        name="gateway",
        command=[
            sys.executable, "-m", "serve.launcher.run_gateway", "--worker-urls", *(f"grpc://{a}" for a in addresses),
            f"--host={host}", f"--port={front}", f"--prometheus-host={host}", f"--prometheus-port={metrics}",
            f"--policy={args.routing_policy}", *_GATEWAY_FLAGS,
            f"--log-level={'info' if args.log_level == 'debug' else 'error'}",
            *(["--log-json"] if args.log_format == "json" else []),
        ],
        env={**envs[0], "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"},
        is_healthy=_gateway_probe(_near(host), front, count),
        keeps_json=args.log_format == "json",
        hides=_BANNER,
    )  # fmt: skip
    where = f"listening on {_join(host, front)} (HTTP) over {count} replicas at {', '.join(addresses)} (gRPC); metrics of the gateway on port {metrics}"
    return Plan(replicas=replicas, gateway=gateway, where=where)


def _check_gateway(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("smg") is None:
        raise ConfigError("several replicas need the gateway smg: pip install 'apt-jax[gateway]'")
    for flag, value in (
        (f"{KEY_FLAG}, {KEY_VARIABLE}", args.api_key),
        (FLAG, args.api_key_file),
        (OPERATOR_FLAG, args.operator_key_file),
        ("--tls-cert", args.tls_cert),
        ("--tls-key", args.tls_key),
        ("--tls-client-ca", args.tls_client_ca),
    ):
        if value is not None:
            raise ConfigError(
                f"{flag}: the gateway has neither keys nor TLS; put a proxy with them in front of it, or start a single replica with apt-jax serve"
            )
    if args.uds is not None:
        raise ConfigError(f"{UDS_FLAG}: the gateway listens on a port; start a single replica with apt-jax serve")
    for flag, values in ((HOSTS_FLAG, args.allowed_hosts), (ORIGIN_FLAG, args.cors_allow_origin)):
        if values:
            raise ConfigError(
                f"{flag}: the gateway does not check requests from browsers; put a proxy that does in front of it, or start a single replica with apt-jax serve"
            )
    host = _gateway_host(args)
    if not is_loopback(host):
        if not args.insecure_open:
            raise ConfigError(
                f"{host} can be reached by anyone from other machines; bind 127.0.0.1 (--host) or allow this (--insecure-open)"
            )
        logger.warning("%s can be reached by anyone from other machines (--insecure-open)", host)


def _gateway_host(args: argparse.Namespace) -> str:
    host = args.http_host or args.host
    return _LOCAL if host == "localhost" else host


def _replica(
    args: argparse.Namespace,
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    is_healthy: Callable[[], bool] | None = None,
    cpus: Sequence[int] = (),
) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        command=command,
        env={**env, "PYTHONUNBUFFERED": "1", **({} if args.api_key is None else {KEY_VARIABLE: args.api_key})},
        cpus=cpus,
        is_healthy=is_healthy,
        keeps_json=args.log_format == "json",
    )


# --- devices and ports ---------------------------------------------------------------------------------------------


def _divide_gpus(count: int, size: int, env: Mapping[str, str]) -> list[dict[str, str]]:
    """Return an environment for each replica: `env` restricted to `size` GPUs, or unchanged on a machine without GPUs.

    Raises:
        ConfigError: there are too few GPUs.
    """
    gpus = visible_gpus(env)
    if not gpus:
        return [dict(env)] * count
    if count * size > len(gpus):
        raise ConfigError(
            f"{counted(count, 'replica')} of {counted(size, 'device')} need {count * size}, but {len(gpus)} are visible ({', '.join(gpus)}): lower --replicas or -tp, or list more in CUDA_VISIBLE_DEVICES"
        )
    return [{**env, "CUDA_VISIBLE_DEVICES": ",".join(gpus[i * size : (i + 1) * size])} for i in range(count)]


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """Return the names, as in CUDA_VISIBLE_DEVICES, of the NVIDIA GPUs that JAX would use in this environment. Does not
    import JAX."""
    platforms = env.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    given = env.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        # CUDA stops at the first invalid name.
        return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return []
    found = re.findall(r"UUID: ((?:GPU|MIG)-[^)\s]+)", listed.stdout)
    # A partitioned GPU is used through its MIG instances, which follow it in the list.
    return [a for a, b in itertools.pairwise([*found, ""]) if not (a.startswith("GPU") and b.startswith("MIG"))]


def _divide_cpus(count: int) -> list[Sequence[int]]:
    """Return the CPUs of each replica, divided core by core, because more threads than cores would slow every step. An
    empty sequence: the replica may use all CPUs."""
    if sys.platform != "linux" or count == 1:
        return [()] * count
    cpus = sorted(os.sched_getaffinity(0), key=_core)
    if len(cpus) < count:
        return [()] * count
    return [cpus[len(cpus) * i // count : len(cpus) * (i + 1) // count] for i in range(count)]


def _core(cpu: int) -> tuple[int, ...]:
    """Return a sort key that keeps the threads of a core and the cores of a socket together."""
    directory = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        place = [int((directory / n).read_text()) for n in ("physical_package_id", "core_id")]
    except (OSError, ValueError):
        place = []
    return (*place, cpu)


def _take_port(host: str, port: int, flag: str, held: contextlib.ExitStack) -> int:
    """Reserve a port, or any free port if `port` is 0, until `held` is closed; return its number.

    Raises:
        ConfigError: the port number is invalid.
        CommandError: the port cannot be bound.
    """
    if not 0 <= port < 65536:
        raise ConfigError(f"port {port} must lie in [0, 65535] ({flag})")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return held.enter_context(socket.create_server((host, port), family=family)).getsockname()[1]
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise CommandError(f"cannot listen on {_join(host, port)}: {reason} ({flag})") from None


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _near(host: str) -> str:
    """Return the address at which this machine reaches a server bound to `host`."""
    return {"0.0.0.0": _LOCAL, "::": "::1", "": _LOCAL}.get(host, host)  # noqa: S104  # nothing is bound here


# --- health --------------------------------------------------------------------------------------------------------


def _replica_probe(address: str) -> Callable[[], bool]:
    def ask() -> bool:
        with grpc.insecure_channel(address) as channel:
            try:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            except grpc.RpcError:
                return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    return ask


def _gateway_probe(host: str, port: int, count: int) -> Callable[[], bool]:
    """Return a health probe: the gateway is healthy once all replicas are, and then as long as any replica is."""
    seen_all = False

    def ask() -> bool:
        nonlocal seen_all
        connection = http.client.HTTPConnection(host, port, timeout=2.0)
        try:
            connection.request("GET", "/readiness")
            ready = json.loads(connection.getresponse().read())["healthy_workers"]
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return False
        finally:
            connection.close()
        seen_all = seen_all or ready >= count
        return seen_all and ready > 0

    return ask
