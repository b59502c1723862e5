"""Policies from the literature, for comparison; a server and the simulator run them by name."""

from typing import Any

from apt_jax.lab.policies.apt_released import AptInPassPolicy, AptReleasedPolicy
from apt_jax.lab.policies.deadline import FairBatchingPolicy, QoServePolicy
from apt_jax.lab.policies.fastgen import FastGenPolicy
from apt_jax.lab.policies.fcfs_hybrid import FcfsHybridPolicy
from apt_jax.lab.policies.random_order import RandomPolicy
from apt_jax.lab.policies.round_robin import RoundRobinPolicy
from apt_jax.lab.policies.tgi import TgiPolicy
from apt_jax.lab.policies.vllm_v1_variants import HrrnPolicy, LeastComputedPolicy, VtcPolicy
from apt_jax.sched.policies.fcfs import FcfsPolicy
from apt_jax.sched.policies.unified import UnifiedPolicy
from apt_jax.sched.policies.vllm_v1 import VllmV1Policy
from apt_jax.sched.registry import PolicyMaker

_WHOLE_PROMPTS: dict[str, Any] = {"chunked": False, "prefill_tokens": 4096}


def _unified(name: str, source: str, summary: str, **settings: Any) -> dict[str, PolicyMaker]:
    """Return the registry entry for a configuration of InferMax's Algorithm 1, whose settings are arguments of
    `UnifiedPolicy`."""
    return {name: PolicyMaker(UnifiedPolicy, {"name": name, **settings}, source=source, summary=summary)}


def _eviction_free(name: str, **settings: Any) -> dict[str, PolicyMaker]:
    """Return the eviction-free variant of a configuration of Table 1; it reserves memory for prompt and output on
    admission."""
    summary = f"`{name}` without evictions: memory for prompt and output is reserved on admission"
    return _unified(f"{name}-ef", "InferMax §4.4", summary, reserve="all", **settings)


POLICIES: dict[str, PolicyMaker] = {
    "vllm-v1-8192": PolicyMaker(
        VllmV1Policy,
        {"name": "vllm-v1-8192", "budget": 8192},
        source="vLLM 0.32, `vllm/v1/core/sched`",
        summary="`vllm-v1` with 8192 tokens per step",
    ),
    "vllm-v0": PolicyMaker(
        FcfsPolicy, {"name": "vllm-v0"}, source="vLLM's first scheduler", summary="another name of `fcfs`"
    ),
    "apt-released": PolicyMaker(
        AptReleasedPolicy,
        source="Apt-Serve's released code",
        summary="`apt` as its authors released it: violated requests do not count, the limits on tokens and slots end the "
        "greedy pass, hidden caches are dropped at the first decode step; assumes `--hidden-attention reproject`",
        assumes_reprojection=True,
    ),
    "apt-in-pass": PolicyMaker(
        AptInPassPolicy,
        source="Apt-Serve §5, its released code",
        summary="`apt` whose greedy pass ends at the first request that exceeds the tokens or slots of the step",
    ),
    "fcfs-hybrid": PolicyMaker(
        FcfsHybridPolicy,
        source="Apt-Serve Table 5, its released code",
        summary="`fcfs` that, when blocks run out, changes its oldest requests to the hidden kind, up to 7,200 tokens in "
        "total, before it evicts any request",
    ),
    "random": PolicyMaker(RandomPolicy, source="Apt-Serve §3.2", summary="`fcfs` in random order, drawn from `--seed`"),
    "least-computed": PolicyMaker(
        LeastComputedPolicy,
        source="vllm-project/vllm#54644",
        summary="`vllm-v1` that preempts the request with the fewest computed tokens",
    ),
    "hrrn": PolicyMaker(
        HrrnPolicy,
        source="SGLang, sgl-project/sglang#32911",
        summary="`vllm-v1` that admits by the ratio of age to prompt length",
    ),
    "vtc": PolicyMaker(
        VtcPolicy,
        source="Virtual Token Counter, OSDI'24",
        summary="`vllm-v1` that admits requests of the tenant that was served least",
    ),
    "fairbatching": PolicyMaker(
        FairBatchingPolicy,
        source="FairBatching, arXiv 2510.14392",
        summary="steps as long as the least slack: urgent decodes first, then prompts, then other decodes",
    ),
    "qoserve": PolicyMaker(
        QoServePolicy,
        source="QoServe (Niyama), ASPLOS'26, arXiv 2503.22562",
        summary="all decodes, chunks as large as their slack allows, prompts by deadline and length; requests that "
        "cannot be on time come last",
    ),
    **_unified("sarathi-pc", "InferMax Table 1", "`sarathi` with chunks of up to 4096 tokens", prefill_tokens=4096),
    **_unified("sarathi-nocp", "InferMax Table 1", "decodes first in mixed steps, whole prompts", **_WHOLE_PROMPTS),
    **_unified(
        "sarathi-nohy",
        "InferMax Table 1",
        "decodes first, whole prompts, never both in a step",
        hybrid=False,
        **_WHOLE_PROMPTS,
    ),
    **_unified(
        "vllm-hy",
        "InferMax Table 1",
        "prefill first with decodes in the same step, whole prompts",
        first="prefill",
        **_WHOLE_PROMPTS,
    ),
    **_eviction_free("fcfs", first="prefill", hybrid=False, **_WHOLE_PROMPTS),
    **_eviction_free("sarathi"),
    **_eviction_free("sarathi-pc", prefill_tokens=4096),
    **_eviction_free("sarathi-nocp", **_WHOLE_PROMPTS),
    **_eviction_free("sarathi-nohy", hybrid=False, **_WHOLE_PROMPTS),
    **_eviction_free("vllm-hy", first="prefill", **_WHOLE_PROMPTS),
    **_unified(
        "rank-i",
        "InferMax §4.6",
        "shortest prompt first among all requests; waiting requests evict requests with longer prompts",
        first="nobody",
        order="input",
    ),
    **_unified("rank-o", "InferMax §4.6", "shortest output first among all requests", first="nobody", order="output"),
    **_unified(
        "rank-org",
        "InferMax §4.6",
        "`rank-i` and `rank-o` with requests ordered by arrival",
        first="nobody",
    ),
    **_unified(
        "infermax",
        "InferMax §6",
        "`sarathi` that evicts short requests before long requests and reserves lengths estimated from a histogram",
        longest_first=True,
        reserve="estimate",
    ),
    "fastgen": PolicyMaker(
        FastGenPolicy,
        source="DeepSpeed-FastGen",
        summary="every step filled to 512 tokens, decodes first; nothing reserved, no eviction unless no request can run",
    ),
    "round-robin": PolicyMaker(
        RoundRobinPolicy,
        source="BROS §2.2, §7.1",
        summary="real-time and best-effort requests in turn, prefills and decodes in the same step",
    ),
    "tgi": PolicyMaker(
        TgiPolicy,
        source="BROS §7.1, TGI's documentation",
        summary="prompt and output reserved on admission; running requests pause for a prefill when enough requests wait",
    ),
}
"""Policies for comparison, keyed by the name that `--scheduling-policy` accepts."""
