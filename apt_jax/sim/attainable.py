"""An upper bound on the share of requests that any policy can serve in time.

A request's whole prompt must be computed before its first token. That takes a minimum of device time, whatever else the
same steps compute. A request is on time if its prompt is computed by its arrival plus the TTFT objective. With one
objective for all requests, deadlines have the order of arrivals, so it is best to serve the chosen requests in that
order, and the largest number of requests on time is found exactly (Kise, Ibaraki and Mine 1978: 1 | agreeable release
and due dates | sum of U). The bound ignores decodes, memory and TBT objectives and assumes that all arrivals are known
in advance, so the true maximum may be far lower.
"""

import numpy as np
from numpy.typing import NDArray

from apt_jax.costs.model import StepCosts


def attainable_share(
    arrival_s: NDArray[np.float64],
    prompt_tokens: NDArray[np.int32],
    costs: StepCosts,
    *,
    ttft_s: float,
    step_tokens: int,
    replicas: int = 1,
) -> float:
    """Return an upper bound on the share of requests whose first token any policy can deliver within the objective.

    `replicas` replicas count as a single one that is `replicas` times as fast, which can serve at least as many.

    Args:
        arrival_s: (n,) arrival times in seconds, ascending.
        prompt_tokens: (n,) prompt lengths; no token is cached, and every chunk has at least two tokens.
        costs: cost model, of which only the prefill costs are used.
        ttft_s: TTFT objective of all requests, seconds.
        step_tokens: maximum number of tokens per step, which share the constant cost of the step.
        replicas: number of replicas.
    """
    if not np.isfinite(ttft_s):
        return 1.0
    work_s = least_prefill_s(prompt_tokens, costs, step_tokens)
    can = work_s <= ttft_s
    return most_on_time(arrival_s[can], work_s[can] / replicas, ttft_s) / max(arrival_s.size, 1)


def least_prefill_s(prompt_tokens: NDArray[np.int32], costs: StepCosts, step_tokens: int) -> NDArray[np.float64]:
    """Return the (n,) minimum device seconds of each prompt, computed in full steps that it shares with others."""
    tokens = prompt_tokens.astype(np.float64)
    return (
        (costs.prefill_base_s / step_tokens + costs.prefill_per_token_s) * tokens
        + costs.prefill_per_request_s
        + costs.prefill_per_pair_s * tokens**2
    )


def most_on_time(arrival_s: NDArray[np.float64], work_s: NDArray[np.float64], within_s: float) -> int:
    """Return the largest number of requests that one machine can finish within `within_s` of their arrivals.

    Args:
        arrival_s: (n,) arrival times in seconds, ascending.
        work_s: (n,) seconds of work per request.
        within_s: time limit of each request, from its arrival, seconds.
    """
    num_done = 0
    ends_s = np.array(
        [-np.inf]
    )  # [k]: the earliest time by which num_done + k of those so far are finished, all on time
    for at_s, takes_s in zip(arrival_s.tolist(), work_s.tolist(), strict=True):
        idle = int(np.searchsorted(ends_s, at_s, side="right")) - 1
        num_done, ends_s = (
            num_done + idle,
            ends_s[idle:],
        )  # fewer, with the machine idle too, are no better
        with_it = np.maximum(ends_s, at_s) + takes_s
        with_it[with_it > at_s + within_s + 1e-9] = np.inf
        ends_s = np.append(ends_s, np.inf)
        ends_s[1:] = np.minimum(ends_s[1:], with_it)
        ends_s = ends_s[np.isfinite(ends_s) | (np.arange(ends_s.size) == 0)]
    return num_done + ends_s.size - 1
