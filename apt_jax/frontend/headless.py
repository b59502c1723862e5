"""Ranks of a replica other than rank 0: they run the steps of rank 0 and serve no requests."""

import logging
import signal

from apt_jax.config import EngineConfig
from apt_jax.frontend.builder import (
    all_hosts,
    freeze_gc_heap,
    load_weights,
    make_executor,
    room_for_steps,
)
from apt_jax.frontend.progress import Progress, of_stage

logger = logging.getLogger(__name__)


def run_headless(config: EngineConfig, progress: Progress | None = None) -> None:
    """Run the steps of rank 0 as another rank of its replica, until rank 0 stops.

    Raises:
        ModelLoadError, ConfigError, HostError: see `build_engine`.
        StepError: a step failed.
    """
    from apt_jax.distributed.hosts import Follower
    from apt_jax.distributed.worker import follow

    with all_hosts(config) as hosts:
        assert isinstance(hosts, Follower), "rank 0 serves"
        signal.signal(signal.SIGTERM, lambda *_: hosts.ask_to_drain())
        signal.signal(signal.SIGINT, lambda *_: hosts.ask_to_drain())
        loaded, mesh = load_weights(config)
        executor = make_executor(config, loaded, mesh)
        with room_for_steps():
            executor.warm_up(of_stage(progress, "preparing"))
            freeze_gc_heap()
            logger.info("rank %d runs the steps of rank 0", config.parallel.node_rank)
            follow(executor, hosts)
