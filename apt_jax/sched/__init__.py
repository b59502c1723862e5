"""Scheduling: the view that a policy gets, the knapsack and its solvers, the value model, the policies."""

from typing import Any

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
from apt_jax.sched.policies.deadline import EdfPolicy, FairBatchingPolicy, QoServePolicy
from apt_jax.sched.policies.fastgen import FastGenPolicy
from apt_jax.sched.policies.fcfs import FcfsPolicy
from apt_jax.sched.policies.fcfs_hybrid import FcfsHybridPolicy
from apt_jax.sched.policies.random_order import RandomPolicy
from apt_jax.sched.policies.real_time_first import RealTimeFirst
from apt_jax.sched.policies.round_robin import RoundRobinPolicy
from apt_jax.sched.policies.tgi import TgiPolicy
from apt_jax.sched.policies.unified import UnifiedPolicy
from apt_jax.sched.policies.vllm_v1 import HrrnPolicy, LeastComputedPolicy, VllmV1Policy, VtcPolicy
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
    "FairBatchingPolicy",
    "FastGenPolicy",
    "FcfsHybridPolicy",
    "FcfsPolicy",
    "HrrnPolicy",
    "KindSpec",
    "KnapsackProblem",
    "LeastComputedPolicy",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyMaker",
    "QoServePolicy",
    "RandomPolicy",
    "RealTimeFirst",
    "RequestTable",
    "RoundRobinPolicy",
    "Schedule",
    "SchedulerView",
    "StepCosts",
    "TgiPolicy",
    "UnifiedPolicy",
    "VllmV1Policy",
    "VtcPolicy",
    "check_plan",
    "check_policy",
    "make_policy",
    "policy_digest",
    "solve_exact",
    "solve_greedy",
]

KindSpec = CacheKindSpec
"""The former name, for policies from outside; it goes with version 0.3."""

_UNIFIED: dict[str, dict[str, Any]] = {
    "fcfs": {"first": "prefill", "hybrid": False, "chunked": False, "prefill_tokens": 4096},
    "infermax": {"longest_first": True, "reserve": "estimate"},
    "rank-i": {"first": "nobody", "order": "input"},
    "rank-o": {"first": "nobody", "order": "output"},
    "rank-org": {"first": "nobody"},
    "sarathi": {},
    "sarathi-nocp": {"chunked": False, "prefill_tokens": 4096},
    "sarathi-nohy": {"hybrid": False, "chunked": False, "prefill_tokens": 4096},
    "sarathi-pc": {"prefill_tokens": 4096},
    "vllm-hy": {"first": "prefill", "chunked": False, "prefill_tokens": 4096},
}
"""Configurations of InferMax Algorithm 1: Table 1, §4.6 and §6. P is at most C (`max_num_batched_tokens`)."""

_EVICTION_FREE = ("fcfs", "sarathi", "sarathi-nocp", "sarathi-nohy", "sarathi-pc", "vllm-hy")
"""Those of Table 1, which have a twin `<name>-ef` (§4.4)."""


POLICIES: dict[str, PolicyMaker] = {
    "apt": PolicyMaker(AptPolicy),
    "apt-plus": PolicyMaker(AptPlusPolicy),
    "apt-s": PolicyMaker(AptSPolicy),
    "bros": PolicyMaker(BrosPolicy),
    "edf": PolicyMaker(EdfPolicy),
    "fairbatching": PolicyMaker(FairBatchingPolicy),
    "fastgen": PolicyMaker(FastGenPolicy),
    "fcfs": PolicyMaker(FcfsPolicy),
    "fcfs-hybrid": PolicyMaker(FcfsHybridPolicy),
    "hrrn": PolicyMaker(HrrnPolicy),
    "least-computed": PolicyMaker(LeastComputedPolicy),
    "qoserve": PolicyMaker(QoServePolicy),
    "random": PolicyMaker(RandomPolicy),
    "round-robin": PolicyMaker(RoundRobinPolicy),
    "tgi": PolicyMaker(TgiPolicy),
    "vllm-v0": PolicyMaker(FcfsPolicy, {"name": "vllm-v0"}),
    "vllm-v1": PolicyMaker(VllmV1Policy),
    "vllm-v1-8192": PolicyMaker(VllmV1Policy, {"name": "vllm-v1-8192", "budget": 8192}),
    "vtc": PolicyMaker(VtcPolicy),
    **{
        name: PolicyMaker(UnifiedPolicy, {"name": name, **settings})
        for name, settings in _UNIFIED.items()
        if name != "fcfs"
    },
    **{
        f"{name}-ef": PolicyMaker(UnifiedPolicy, {"name": f"{name}-ef", **_UNIFIED[name], "reserve": "all"})
        for name in _EVICTION_FREE
    },
}
"""Bundled policies by the name that `--scheduling-policy` takes."""


def make_policy(name: str | None = None, config: SchedulerConfig | None = None, *, seed: int = 0) -> Policy:
    """A policy by name.

    Args:
        name: a key of `POLICIES`, an entry point of the group `ENTRY_POINTS`, or `package.module:Class`; with options
            of its constructor, as in `apt?violation_decay=0.4`. None: `config.policy`.
        config: what the policy reads its settings from.
        seed: of policies that draw at random.

    Raises:
        ConfigError: no policy has this name, or it cannot be made; one line.
    """
    config = SchedulerConfig() if config is None else config
    text = config.policy if name is None else name
    policy = make(text, POLICIES, config, seed)
    if config.best_effort_last and not has_classes(policy):
        return RealTimeFirst(policy, make(text, POLICIES, config, seed))
    return policy


def check_policy(name: str) -> None:
    """Raise the `ConfigError` of a name or of options that `make_policy` would refuse, without making the policy."""
    find_policy(name, POLICIES)


def policy_digest(name: str) -> str | None:
    """Digest of the source files of a policy from outside this package; None for a bundled one."""
    return source_digest(name, POLICIES)
