"""Routing of each request to one of several replicas, decided once, on arrival.

A router knows only facts about a replica that a server could report at that moment: its state when the running step was
built (`apt_jax.engine.admission.QueueSnapshot`), the expected end of that step by the cost model, and the requests sent
to the replica since then. It never knows output lengths. Among equally good replicas it takes the lowest index, so a
run depends only on its seed.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from apt_jax.engine.admission import Admission, PendingArrivals, QueueSnapshot
from apt_jax.request import EngineRequest

# Defaults in smg 1.13: --least-load-default-throughput, --least-load-mean-prefill-tokens,
# --least-load-kv-pressure-weight.
_TOKENS_PER_S, _RUNNING_TOKENS, _PRESSURE_WEIGHT_S = 2000.0, 1024, 0.15
_AS_GOOD = 0.05
"""Slacks that differ by less than this share of the SLO count as equal, because the cost model is not more precise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """The state of a replica as a router sees it."""

    admission: Admission
    queue_snapshot: QueueSnapshot
    pending: PendingArrivals
    """Requests sent to the replica since `queue_snapshot`."""
    busy_s: float
    """Expected time until the running step ends, in seconds; 0: no step runs."""
    num_running: int
    """Number of requests that hold cache."""
    num_blocks: int
    """Blocks in the pool."""
    free_blocks: int
    """Free blocks in the pool."""
    queued_tokens: int
    """Number of tokens that the waiting requests have to compute."""
    tokens_per_s: float
    """Output tokens per second of step time, over the last ten seconds; 0: no output."""
    min_blocks_for: Callable[[int], int]
    """Function that returns the minimum number of blocks for a number of tokens."""


Router = Callable[[EngineRequest, Sequence[ReplicaState]], int]
"""Function that returns the index of the replica for a request; it may keep state, so each run needs a new router."""


def round_robin() -> Router:
    """Return a router that takes the replicas in turn."""
    turns = itertools.count()
    return lambda request, states: next(turns) % len(states)


def session() -> Router:
    """Return a router that sends the calls of a session to one replica; sessions take the replicas in turn."""
    turn, homes = round_robin(), dict[str, int]()

    def choose(request: EngineRequest, states: Sequence[ReplicaState]) -> int:
        name = request.session_id
        if name is None:
            return turn(request, states)
        if name not in homes:
            homes[name] = turn(request, states)
        return homes[name]

    return choose


def least_load() -> Router:
    """Return a router that chooses the replica with the shortest estimated drain time.

    The formula is that of the policy `least_load` of the gateway smg 1.13, but the loads are always current.
    """

    def score_s(state: ReplicaState) -> float:
        tokens = state.queued_tokens + state.pending.tokens + _RUNNING_TOKENS * state.num_running
        used = min(1 - state.free_blocks / state.num_blocks, 0.999)
        rate = state.tokens_per_s or _TOKENS_PER_S
        return tokens / rate + _PRESSURE_WEIGHT_S * used / (1 - used)

    return lambda request, states: min(range(len(states)), key=lambda i: score_s(states[i]))


def expected_ttft_s(request: EngineRequest, state: ReplicaState) -> float:
    """Estimate the TTFT of a new request in seconds, as admission does.

    It is the sum of the rest of the running step, the wait for other requests (prompts, memory, slots) and the prefill
    of the request's own prompt.
    """
    num_tokens, snapshot = int(request.prompt_token_ids.size), state.queue_snapshot
    queue = snapshot.queue_before(
        state.pending,
        blocks=state.min_blocks_for(num_tokens),
        best_effort=request.slo_class == "be",
        tenant=request.tenant,
    )
    return (
        state.busy_s
        + state.admission.expected_wait_s(queue, snapshot.costs, snapshot.margin_s)
        + state.admission.prefill_s(num_tokens, 1, snapshot.costs)
    )


def expected_slack() -> Router:
    """Return a router that chooses the replica with the largest slack between expected TTFT and TTFT SLO.

    Slacks within a twentieth of the SLO below the largest count as equal to it; among these replicas, the router takes
    the one with the smallest claimed share of its pool. A request without an SLO goes to the replica with the
    earliest expected first token.
    """

    def choose(request: EngineRequest, states: Sequence[ReplicaState]) -> int:
        objective_s = request.slo.ttft_s
        expected_s = [expected_ttft_s(request, state) for state in states]
        # The objective is the same for all replicas: the largest slack is the earliest first token.
        good_s = min(expected_s) + (_AS_GOOD * objective_s if math.isfinite(objective_s) else 0.0)
        return min(
            (i for i in range(len(states)) if expected_s[i] <= good_s),
            key=lambda i: _share_claimed(states[i]),
        )

    return choose


def _share_claimed(state: ReplicaState) -> float:
    """Return the share of the pool claimed by requests that hold cache and by the prompts of waiting requests."""
    queue = state.queue_snapshot.queues[1]
    return (queue.missing_blocks + state.pending.blocks_before[1]) / state.num_blocks


ROUTING_POLICIES: dict[str, Callable[[], Router]] = {
    "round_robin": round_robin,
    "session": session,
    "least_load": least_load,
    "expected_slack": expected_slack,
}
