"""Upper bounds on the share of requests that any policy can serve on time.

First tokens. A request's whole prompt must be computed before its first token. This takes a minimum of device time,
whatever else the same steps compute. A request is on time if its prompt is computed by its arrival plus the TTFT
objective. With one objective for all requests, deadlines are in order of arrival, so it is best to serve the chosen
requests in that order, and the largest number of requests on time is found exactly (Kise, Ibaraki and Mine 1978: 1 |
agreeable release and due dates | sum of U).

Further tokens, and memory. The requests that decode in a step are all in the pool. So each is charged, in addition to
its own costs, a share of the step's constant cost equal to its prompt's share of the pool. A request that may not pause
must have k further tokens within the TTFT objective plus k times the TBT objective, so the same method bounds how many
requests can.

The true maxima may be far lower: the bounds ignore that contexts grow, consider first and further tokens separately,
and assume that every request that may pause does so and that all arrivals are known in advance.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO
from apt_jax.costs.model import StepCosts

_MAX_GAPS, _LONGEST = 90, 1 / 0.11
"""If the P99 over at most 90 gaps meets the objective, no gap is longer than 1 / 0.11 times the objective and at most
one gap exceeds it, because the longest gap has a weight of at least 0.11 in the P99."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attainable:
    """Upper bounds on the shares of requests that any policy can serve within their objectives."""

    slo: float
    """Share of requests with the TTFT and the P99 of the gaps within the objectives."""
    strict: float
    """Share of requests with the TTFT and every gap within the objectives."""


def attainable(
    arrival_s: NDArray[np.float64],
    prompt_tokens: NDArray[np.int32],
    output_tokens: NDArray[np.int32],
    costs: StepCosts,
    *,
    slo: SLO,
    step_tokens: int,
    pool_shares: NDArray[np.float64],
    replicas: int = 1,
) -> Attainable:
    """Return upper bounds on the shares of requests that any policy can serve within the objectives.

    The replicas are treated as a single replica that is `replicas` times as fast, which can serve at least as many
    requests.

    Args:
        arrival_s: (n,) arrival times in seconds, ascending.
        prompt_tokens: (n,) prompt lengths; no token is cached, and every chunk has at least two tokens.
        output_tokens: (n,) output lengths.
        costs: cost model.
        slo: objectives of all requests.
        step_tokens: maximum number of tokens per step, which share the constant cost of the step.
        pool_shares: (n, num_kinds) share of the pool that each prompt takes with each kind; inf: not offered.
        replicas: number of replicas.
    """
    # `slo.e2e_s` is left out: an end-to-end objective only lowers attainment, so the bounds hold with it too.
    first = first_tokens_share(
        arrival_s, prompt_tokens, costs, ttft_s=slo.ttft_s, step_tokens=step_tokens, replicas=replicas
    )
    if not (np.isfinite(slo.ttft_s) and np.isfinite(slo.tbt_s)) or costs.prefill_per_token_s <= 0:
        return Attainable(slo=first, strict=first)
    token_s = least_token_s(prompt_tokens, costs, pool_shares) / replicas
    gaps = output_tokens.astype(np.int64) - 1
    slow_s = slo.ttft_s + (_LONGEST - 1) * slo.tbt_s  # the longest gap may come first
    n = max(arrival_s.size, 1)
    strict, forgiving = first, first
    most = int(gaps.max(initial=0))
    for num in (2**i for i in range(1, most.bit_length() + 1)):
        work_s = np.minimum(gaps, num) * token_s
        strict = min(strict, most_on_time(arrival_s, work_s, slo.ttft_s + num * slo.tbt_s) / n)
        cannot_pause = np.where(gaps <= _MAX_GAPS, work_s, 0.0)
        forgiving = min(forgiving, most_on_time(arrival_s, cannot_pause, slow_s + num * slo.tbt_s) / n)
    return Attainable(slo=forgiving, strict=strict)


def least_token_s(
    prompt_tokens: NDArray[np.int32], costs: StepCosts, pool_shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the (n,) minimum device seconds per further token of each request, if other requests share its steps.

    A token comes from a decode step, or from computing the request again. A step with both takes at least any weighted
    mean of the times of the two; the weight is chosen so that no request gains by being computed again.
    """
    tokens = prompt_tokens.astype(np.float64)
    kv = costs.decode_per_request_s + costs.decode_per_token_s * tokens + costs.decode_base_s * pool_shares[:, 0]
    hidden = (
        costs.decode_per_hidden_request_s
        + costs.decode_per_hidden_token_s * tokens
        + costs.decode_base_s * pool_shares[:, 1]
    )
    decode_s = np.minimum(kv, hidden)
    again_s = costs.prefill_per_token_s * tokens
    weight = float((decode_s / (decode_s + again_s)).max(initial=0.0))
    return (1 - weight) * decode_s


def first_tokens_share(
    arrival_s: NDArray[np.float64],
    prompt_tokens: NDArray[np.int32],
    costs: StepCosts,
    *,
    ttft_s: float,
    step_tokens: int,
    replicas: int = 1,
) -> float:
    """Return an upper bound on the share of requests whose first token any policy can deliver within the objective.

    See `attainable` for the arguments.
    """
    if not np.isfinite(ttft_s):
        return 1.0
    work_s = least_prefill_s(prompt_tokens, costs, step_tokens)
    can = work_s <= ttft_s
    return most_on_time(arrival_s[can], work_s[can] / replicas, ttft_s) / max(arrival_s.size, 1)


def least_prefill_s(prompt_tokens: NDArray[np.int32], costs: StepCosts, step_tokens: int) -> NDArray[np.float64]:
    """Return the (n,) minimum device seconds for each prompt, if it shares full steps with other prompts."""
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
        within_s: time limit of each request in seconds, from its arrival.
    """
    before_s = np.cumsum(work_s) - work_s
    if (before_s + work_s + np.maximum.accumulate(arrival_s - before_s) <= arrival_s + within_s).all():
        return arrival_s.size  # one after the other all are in time, the ordinary case
    num_done = 0
    ends_s = np.array(
        [-np.inf]
    )  # [k]: the earliest time by which num_done + k of the requests so far are finished, all on time
    for at_s, takes_s in zip(arrival_s.tolist(), work_s.tolist(), strict=True):
        idle = int(np.searchsorted(ends_s, at_s, side="right")) - 1
        num_done, ends_s = (
            num_done + idle,
            ends_s[idle:],
        )  # a state with fewer finished requests is no better if its machine is idle too
        with_it = np.maximum(ends_s, at_s) + takes_s
        with_it[with_it > at_s + within_s + 1e-9] = np.inf
        ends_s = np.append(ends_s, np.inf)
        ends_s[1:] = np.minimum(ends_s[1:], with_it)
        ends_s = ends_s[np.isfinite(ends_s) | (np.arange(ends_s.size) == 0)]
    return num_done + ends_s.size - 1
