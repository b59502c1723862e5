"""Settings that a seed determines before anything runs."""

import dataclasses

import numpy as np

from apt_jax.sched import all_policies


@dataclasses.dataclass(kw_only=True)
class ServingScenario:
    """Settings that a seed determines before anything runs."""

    num_replicas: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    overlap: bool
    debug: bool
    prefix_caching: bool
    offered: tuple[bool, bool]
    max_num_queued_reqs: int
    max_num_queued_tokens: int | None
    max_queue_s: float
    slo_admission: str
    num_tenants: int
    """0: no keys."""
    flood: bool
    """Most calls are of the first tenant, in bursts."""
    num_calls: int
    gap_s: float
    """Mean time between arrivals."""
    p_deadline: float
    p_grammar: float
    p_invalid: float
    p_duplicate: float
    p_leave: float
    p_slow_reader: float
    p_stalled_reader: float
    p_step_failure: float
    p_bad_row: float
    p_slow_step: float
    p_hang: float
    p_preempt: float
    p_abort: float
    clock_jumps: bool
    slow_jobs: bool
    """Jobs before the engine take seconds."""
    short_queues: bool
    """The queues before the engine have few places."""
    stop_at_s: tuple[float, ...]
    """SIGTERM to a replica at these times."""
    drain_s: float
    second_signal: bool
    p_crash: float
    """Rate per second of a process; also the next two."""
    p_pause: float
    p_partition: float


def draw_scenario(rng: np.random.Generator) -> ServingScenario:
    """Swarm: each fault is there or not, then its rate is drawn (docs/lab/testing.md)."""

    def rate(most: float, p: float = 0.5) -> float:
        return float(rng.uniform(0, most)) if rng.random() < p else 0.0

    max_num_seqs = int(rng.choice([1, 2, 4, 8]))
    replicas = int(rng.choice([1, 1, 2, 3]))
    num_calls = int(rng.integers(6, 28))
    gap_s = float(rng.choice([0.0, 0.02, 0.1, 0.5]))
    span_s = max(num_calls * gap_s, 0.3)
    many = replicas > 1
    flood = bool(rng.random() < 0.3)
    if flood and rng.random() < 0.6:  # long queues: tenants come to their shares
        replicas, many, num_calls, gap_s, max_num_seqs = 1, False, int(rng.integers(20, 36)), 0.0, 1
    return ServingScenario(
        num_replicas=replicas,
        num_blocks=int(rng.choice([24, 40, 80, 160])),
        block_size=int(rng.choice([3, 4, 8])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(rng.choice([3, 16, 64])),
        policy=str(rng.choice(tuple(all_policies()))),
        overlap=bool(rng.random() < 0.7),
        debug=bool(rng.random() < 0.15),
        prefix_caching=bool(rng.random() < 0.8),
        offered=((True, True), (True, True), (True, False), (False, True))[int(rng.integers(4))],
        max_num_queued_reqs=int(rng.choice([9, 10, 12] if flood else [2, 5, 12, 1000])),
        max_num_queued_tokens=int(rng.choice([20, 100])) if rng.random() < 0.2 else None,
        max_queue_s=float(rng.choice([0.05, 0.5, 3.0])) if rng.random() < 0.4 else 600.0,
        slo_admission=str(rng.choice(["off", "off", "warn", "on"])),
        num_tenants=int(rng.choice([0, 1, 2, 3])),
        flood=flood,
        num_calls=num_calls,
        gap_s=gap_s,
        p_deadline=rate(0.5),
        p_grammar=rate(0.6),
        p_invalid=rate(0.2),
        p_duplicate=rate(0.2, 0.3),
        p_leave=rate(0.6),
        p_slow_reader=rate(0.4),
        p_stalled_reader=rate(0.3),
        p_step_failure=rate(0.02),
        p_bad_row=rate(0.05),
        p_slow_step=rate(0.1),
        p_hang=rate(0.05, 0.3),
        p_preempt=rate(0.1),
        p_abort=rate(0.05, 0.3),
        clock_jumps=bool(rng.random() < 0.15),
        slow_jobs=bool(rng.random() < 0.4),
        short_queues=bool(rng.random() < 0.4),
        stop_at_s=tuple(float(t) for t in rng.uniform(0, span_s, int(rng.random() < 0.5) + int(rng.random() < 0.1))),
        drain_s=float(rng.choice([0.0, 0.0, 0.05, 0.5, 30.0])),
        second_signal=bool(rng.random() < 0.3),
        p_crash=rate(0.15, 0.5) if many else rate(0.1, 0.15),
        p_pause=rate(0.3, 0.4) if many else rate(0.2, 0.15),
        p_partition=rate(0.3, 0.4) if many else 0.0,
    )
