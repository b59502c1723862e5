"""Rendezvous of the ranks of a replica, before JAX touches a device."""

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from apt_jax.config import EngineConfig, ParallelConfig
from apt_jax.distributed.authentication import SAME_KEY, JoinKey, prove_to_leader
from apt_jax.distributed.hosts import BEFORE_ALL_JOINED, Follower, Leader
from apt_jax.distributed.settings import StoredModel, settings_of
from apt_jax.errors import ConfigError, HostError, counted, one_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

_PROBE_S = 5.0
_OPEN_STREAMS_S = 1e9
"""Seconds for which streams may stay open after rank 0 has stopped listening; in effect unlimited."""


def join(config: EngineConfig, model: "DataclassInstance", resolved: StoredModel) -> Leader | Follower:
    """Connect to the other ranks and join their devices into one JAX cluster. Must be called before JAX has touched a
    device.

    Raises:
        ConfigError: grpcio or protobuf is not installed, or this rank's flags are wrong: no usable join key, an address
            of another host, or a port in use.
        HostError: a rank did not join, was lost, or has different flags, another model or another version; all ranks
            that joined raise it. If join keys differ, only the rank with the wrong key raises it.
    """
    try:
        from apt_jax.distributed import transport
    except ImportError:
        raise ConfigError("several hosts need grpcio and protobuf: pip install 'apt-jax[serve]' (--nnodes)") from None
    ours = config.parallel
    key = None if ours.join_key_file is None else JoinKey.load(ours.join_key_file)
    if key is None and not _is_loopback(ours.master_addr):
        raise ConfigError(f"other machines may reach {ours.master_addr}; {SAME_KEY}")
    settings = settings_of(config, model, resolved)
    hosts = lead(ours, settings, key) if ours.node_rank == 0 else connect(ours, settings, key)
    if isinstance(hosts, Follower):
        hosts.meet()
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # the service would handle SIGTERM instead of us
    with hosts.propagate_errors():
        try:
            jax.distributed.initialize(
                f"{ours.master_addr}:{ours.master_port + 1}",
                ours.nnodes,
                ours.node_rank,
                cluster_detection_method="deactivate",  # each process has all devices of its host
                initialization_timeout=60,
                heartbeat_timeout_seconds=int(2 * transport.SILENCE_S),
                coordinator_bind_address=f"{ours.master_addr}:{ours.master_port + 1}",
            )
        except RuntimeError as error:
            raise HostError(
                f"JAX cannot join the hosts at port {ours.master_port + 1}, the port after --master-port: {one_line(str(error))[:200]}"
            ) from error
    return hosts


def lead(ours: ParallelConfig, settings: Mapping[str, str], key: JoinKey | None) -> Leader:
    """Wait, as rank 0, until the other ranks have joined. Raises: see `join`."""
    from apt_jax.distributed import transport

    with contextlib.closing(_bind(ours, 1, "the port after --master-port")) as probe:
        address = probe.getsockname()[0]  # JAX uses the port after all ranks have joined
    leader = Leader(ours, settings, key)
    try:
        server = transport.listen(address, ours.master_port, ours.nnodes - 1, leader.admit)
    except RuntimeError:
        _bind(ours, 0, "--master-addr, --master-port").close()  # raises an error with the reason
        raise
    logger.info(
        "rank 0 waits at %s:%d for %s", ours.master_addr, ours.master_port, counted(ours.nnodes - 1, "other rank")
    )
    leader.meet(lambda: server.stop(0))
    # gRPC starts a thread that finally ends the streams. It is a daemon thread, which does not delay the exit of the
    # process, only if a daemon thread starts it.
    stopping = threading.Thread(target=server.stop, args=(_OPEN_STREAMS_S,), daemon=True)
    stopping.start()
    stopping.join()
    return leader


def _bind(ours: ParallelConfig, offset: int, flags: str) -> socket.socket:
    host, port = ours.master_addr, ours.master_port + offset
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"rank 0 cannot listen on {host}:{port}: {error.strerror or error} ({flags})") from None
    found = server.getsockname()[0]
    if _is_loopback(found) and not _is_loopback(host):
        server.close()
        raise ConfigError(
            f"{host} is {found} on this host, which other hosts cannot reach; use its network address (--master-addr)"
        )
    return server


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def connect(ours: ParallelConfig, settings: Mapping[str, str], key: JoinKey | None) -> Follower:
    """Connect to rank 0 from another rank, and send it this rank's settings. Raises: see `join`."""
    from apt_jax.distributed import transport

    name = f"rank 0 at {ours.master_addr}:{ours.master_port}"
    until_s = time.monotonic() + ours.join_timeout_s
    while True:
        try:
            socket.create_connection((ours.master_addr, ours.master_port), timeout=_PROBE_S).close()
        except OSError as error:
            if time.monotonic() > until_s:
                raise HostError(
                    f"rank {ours.node_rank} cannot reach {name} within {ours.join_timeout_s:g} s: "
                    f"{error.strerror or error}; has it been started? (--master-addr, --master-port, --set join_timeout)"
                ) from None
            time.sleep(0.5)
            continue
        stream, close_transport = transport.connect(ours.master_addr, ours.master_port, name)
        try:
            with stream.limited(transport.SILENCE_S):
                prove_to_leader(stream, key)
            introduction = {"rank": ours.node_rank, "host": socket.gethostname(), "settings": dict(settings)}
            stream.send(introduction=introduction)
            return Follower(ours, stream, close_transport)
        except transport.StreamError as error:
            close_transport()
            if not error.is_busy or time.monotonic() > until_s:
                raise HostError(f"{name} {error}{BEFORE_ALL_JOINED}") from None
            time.sleep(0.5)
        except HostError:
            close_transport()
            raise
