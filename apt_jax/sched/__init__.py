"""Scheduling: the view that policies read, the knapsack problem and its solvers, the value model, and the policies."""

import importlib

from apt_jax.config import SchedulerConfig
from apt_jax.core.kinds import HIDDEN, KV, NO_KIND, CacheKindSpec
from apt_jax.costs.model import StepCosts
from apt_jax.sched.knapsack.exact import solve_exact
from apt_jax.sched.knapsack.greedy import solve_greedy
from apt_jax.sched.knapsack.problem import NOT_CHOSEN, KnapsackProblem, Schedule
from apt_jax.sched.plan_check import PlanError, check_plan
from apt_jax.sched.policies.apt import AptPolicy
from apt_jax.sched.policies.apt_plus import AptPlusPolicy
from apt_jax.sched.policies.apt_s import AptSPolicy
from apt_jax.sched.policies.bros import BrosPolicy
from apt_jax.sched.policies.edf import EdfPolicy
from apt_jax.sched.policies.fcfs import FcfsPolicy
from apt_jax.sched.policies.real_time_first import RealTimeFirst
from apt_jax.sched.policies.unified import UnifiedPolicy
from apt_jax.sched.policies.vllm_v1 import VllmV1Policy
from apt_jax.sched.registry import ENTRY_POINTS, PolicyMaker, find_policy, make, source_digest
from apt_jax.sched.request_table import RequestTable
from apt_jax.sched.view import INTERFACE_VERSION, Plan, Policy, SchedulerView, has_classes

__all__ = [
    "ENTRY_POINTS",
    "HIDDEN",
    "INTERFACE_VERSION",
    "KV",
    "NOT_CHOSEN",
    "NO_KIND",
    "POLICIES",
    "AptPlusPolicy",
    "AptPolicy",
    "AptSPolicy",
    "BrosPolicy",
    "CacheKindSpec",
    "EdfPolicy",
    "FcfsPolicy",
    "KnapsackProblem",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyMaker",
    "RealTimeFirst",
    "RequestTable",
    "Schedule",
    "SchedulerView",
    "StepCosts",
    "UnifiedPolicy",
    "VllmV1Policy",
    "all_policies",
    "check_plan",
    "check_policy",
    "make_policy",
    "policy_digest",
    "solve_exact",
    "solve_greedy",
]

POLICIES: dict[str, PolicyMaker] = {
    "apt": PolicyMaker(
        AptPolicy,
        source="Apt-Serve §4.2, §5",
        summary="each iteration is prefill or decode, by pending time; a knapsack over that queue chooses requests and "
        "cache kinds",
    ),
    "apt-plus": PolicyMaker(
        AptPlusPolicy,
        source="ours",
        summary="mixed batches, cost-based cache kind; requests pause for others only if that costs no attainment, "
        "best-effort requests first",
    ),
    "apt-s": PolicyMaker(
        AptSPolicy,
        source="Apt-Serve §6.7",
        summary="a knapsack over each queue in every step, no iteration type: mixed steps of at most 512 tokens",
    ),
    "bros": PolicyMaker(
        BrosPolicy,
        source="BROS §4 and §5",
        summary="real-time requests by the time left to their deadline, then best-effort requests; with "
        "`--swap-space` both may share blocks",
    ),
    "fcfs": PolicyMaker(
        FcfsPolicy, source="vLLM's first scheduler", summary="prefill first, by arrival; evict the latest"
    ),
    "vllm-v1": PolicyMaker(
        VllmV1Policy,
        source="vLLM 0.32, `vllm/v1/core/sched`",
        summary="running requests first, chunks, 2048 tokens per step; preempt the last",
    ),
    "sarathi": PolicyMaker(
        UnifiedPolicy,
        {"name": "sarathi"},
        source="Sarathi-Serve, InferMax Table 1",
        summary="decodes first, then chunks, 512 tokens per step in total; evict the latest",
    ),
    "edf": PolicyMaker(
        EdfPolicy,
        source="earliest deadline first",
        summary="all requests by when they are next due, end-to-end objectives included, mixed steps of 2048 tokens; preempt the latest deadline",
    ),
}
"""Serving policies, keyed by their names for `--scheduling-policy`; `all_policies` adds the policies for comparison."""

_LAB = "apt_jax.lab.policies"
"""Module of the bundled policies for comparison, imported when a name is not in `POLICIES`."""


def all_policies() -> dict[str, PolicyMaker]:
    """Return `POLICIES` and the policies of `apt_jax.lab`, keyed by name."""
    return POLICIES | importlib.import_module(_LAB).POLICIES


def _bundled(text: str) -> dict[str, PolicyMaker]:
    """Return the bundled policies to search for the policy that `text` names; import `apt_jax.lab` only if needed."""
    name = text.partition("?")[0]
    return POLICIES if name in POLICIES or ":" in name else all_policies()


def make_policy(name: str | None = None, config: SchedulerConfig | None = None, *, seed: int = 0) -> Policy:
    """Build a policy by name.

    Args:
        name: a key of `all_policies`, an entry point of the group `ENTRY_POINTS`, or `package.module:Class`, optionally
            with options of its constructor, as in `apt?violation_decay=0.4`. None: `config.policy`.
        config: scheduler configuration; if `best_effort_last` is set, a policy that does not distinguish classes is
            wrapped in `RealTimeFirst`.
        seed: random seed, for policies that draw random numbers.

    Raises:
        ConfigError: no policy has this name, or it cannot be built; the message is one line.
    """
    config = SchedulerConfig() if config is None else config
    text = config.policy if name is None else name
    policy = make(text, _bundled(text), seed)
    if config.best_effort_last and not has_classes(policy):
        return RealTimeFirst(policy, make(text, _bundled(text), seed))
    return policy


def check_policy(name: str) -> None:
    """Raise `ConfigError` for an unknown policy, or for unknown or ill-typed options, without building the policy."""
    find_policy(name, _bundled(name))


def policy_digest(name: str) -> str | None:
    """Return a digest of the source files of a policy from outside this package; None for a bundled policy."""
    return source_digest(name, _bundled(name))
