"""A share of requests that no policy can exceed: first tokens alone, with perfect foresight and without limits of
memory.

Before its first token all of a request's prompt must have been computed, which takes the device at least so long,
whatever else is in the same steps. Requests are on time if that has happened by their arrival plus the TTFT objective.
With one objective for all, deadlines fall in the order of arrivals, so that to serve the chosen ones in that order is
best, and the most that can be chosen are found exactly (Kise, Ibaraki and Mine 1978: 1 | agreeable release and due dates | sum of U).
Decodes, memory, TBT objectives and what the policy does not know yet count for nothing: the true maximum may be far
lower.
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
    """The share of requests whose first token can come within the objective under any policy, at most.

    Several replicas count as one that is so many times as fast, which can do all that they can.

    Args:
        arrival_s: (n,) seconds, ascending.
        prompt_tokens: (n,) none of them cached; computed in chunks of two tokens at least.
        costs: of which prefills are taken, and nothing of decodes.
        ttft_s: objective of all, seconds.
        step_tokens: most tokens of a step, so that this many share its constant part.
    """
    if not np.isfinite(ttft_s):
        return 1.0
    work_s = least_prefill_s(prompt_tokens, costs, step_tokens)
    can = work_s <= ttft_s
    return most_on_time(arrival_s[can], work_s[can] / replicas, ttft_s) / max(arrival_s.size, 1)


def least_prefill_s(prompt_tokens: NDArray[np.int32], costs: StepCosts, step_tokens: int) -> NDArray[np.float64]:
    """(n,) seconds of the device that each prompt takes at least, in full steps that it shares with others."""
    tokens = prompt_tokens.astype(np.float64)
    return (
        (costs.prefill_base_s / step_tokens + costs.prefill_per_token_s) * tokens
        + costs.prefill_per_request_s
        + costs.prefill_per_pair_s * tokens**2
    )


def most_on_time(arrival_s: NDArray[np.float64], work_s: NDArray[np.float64], within_s: float) -> int:
    """The most requests that one machine can finish within `within_s` of their arrivals.

    Args:
        arrival_s: (n,) seconds, ascending.
        work_s: (n,) seconds of the machine.
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
