"""Scheduling: the view that a policy gets, the knapsack and its solvers, the value model, the policies."""

from collections.abc import Callable
from typing import Any

from apt_jax.config import SchedulerConfig
from apt_jax.errors import ConfigError
from apt_jax.sched.apt import AptPolicy
from apt_jax.sched.apt_plus import AptPlusPolicy
from apt_jax.sched.apt_s import AptSPolicy
from apt_jax.sched.bros import BrosPolicy
from apt_jax.sched.check import check_plan
from apt_jax.sched.exact import solve_exact
from apt_jax.sched.fastgen import FastGenPolicy
from apt_jax.sched.fcfs import FcfsPolicy
from apt_jax.sched.greedy import solve_greedy
from apt_jax.sched.problem import NOT_CHOSEN, KnapsackProblem, Schedule
from apt_jax.sched.random_order import RandomPolicy
from apt_jax.sched.round_robin import RoundRobinPolicy
from apt_jax.sched.unified import UnifiedPolicy
from apt_jax.sched.view import (
    HIDDEN,
    KV,
    NO_KIND,
    KindSpec,
    Plan,
    Policy,
    RequestTable,
    SchedulerView,
    StepCosts,
)

__all__ = [
    "HIDDEN",
    "KV",
    "NOT_CHOSEN",
    "NO_KIND",
    "POLICIES",
    "AptPlusPolicy",
    "AptPolicy",
    "AptSPolicy",
    "BrosPolicy",
    "FastGenPolicy",
    "FcfsPolicy",
    "KindSpec",
    "KnapsackProblem",
    "Plan",
    "Policy",
    "RandomPolicy",
    "RequestTable",
    "RoundRobinPolicy",
    "Schedule",
    "SchedulerView",
    "StepCosts",
    "UnifiedPolicy",
    "check_plan",
    "make_policy",
    "solve_exact",
    "solve_greedy",
]

_UNIFIED: dict[str, dict[str, Any]] = {
    "fcfs": {"first": "prefill", "hybrid": False, "chunked": False, "prefill_tokens": 4096},
    "infermax": {"longest_first": True, "reserve": "estimate"},
    "rank-i": {"first": "nobody", "order": "input"},
    "rank-o": {"first": "nobody", "order": "output"},
    "sarathi": {},
    "sarathi-nocp": {"chunked": False, "prefill_tokens": 4096},
    "sarathi-nohy": {"hybrid": False, "chunked": False, "prefill_tokens": 4096},
    "sarathi-pc": {"prefill_tokens": 4096},
    "vllm-hy": {"first": "prefill", "chunked": False, "prefill_tokens": 4096},
}
"""Configurations of InferMax Algorithm 1: Table 1, §4.6 and §6. P is at most C (`max_num_batched_tokens`)."""

_EVICTION_FREE = ("fcfs", "sarathi", "sarathi-nocp", "sarathi-nohy", "sarathi-pc", "vllm-hy")
"""Those of Table 1, which have a twin `<name>-ef` (§4.4)."""


def _unified(name: str, **settings: Any) -> Callable[[SchedulerConfig, int], Policy]:
    return lambda config, seed: UnifiedPolicy(name, **settings)


POLICIES: dict[str, Callable[[SchedulerConfig, int], Policy]] = {
    "apt": lambda config, seed: AptPolicy(violation_decay=config.violation_decay),
    "apt-plus": lambda config, seed: AptPlusPolicy(config.violation_decay),
    "apt-s": lambda config, seed: AptSPolicy(violation_decay=config.violation_decay),
    "bros": lambda config, seed: BrosPolicy(),
    "fastgen": lambda config, seed: FastGenPolicy(),
    "fcfs": lambda config, seed: FcfsPolicy(),
    "random": lambda config, seed: RandomPolicy(seed),
    "round-robin": lambda config, seed: RoundRobinPolicy(),
    **{name: _unified(name, **settings) for name, settings in _UNIFIED.items() if name != "fcfs"},
    **{
        f"{name}-ef": _unified(f"{name}-ef", **_UNIFIED[name], reserve="all")
        for name in _EVICTION_FREE
    },
}
"""Policies by the name that `--scheduling-policy` takes: makers from a configuration and a seed."""


def make_policy(
    name: str | None = None, config: SchedulerConfig | None = None, *, seed: int = 0
) -> Policy:
    """A policy by name.

    Args:
        name: a key of `POLICIES`; None: `config.policy`.
        config: what the policy reads its settings from.
        seed: of policies that draw at random.

    Raises:
        ConfigError: no policy has this name.
    """
    config = SchedulerConfig() if config is None else config
    name = config.policy if name is None else name
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"policy={name!r} must be one of {known} (--scheduling-policy)")
    return POLICIES[name](config, seed)
