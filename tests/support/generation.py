"""Greedy generation with the real engine under chosen conditions, on one executor."""

import dataclasses

import numpy as np

from apt_jax.config import SLO, CacheConfig, HiddenAttention, SchedulerConfig
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.tiers import HostMemory, Tiers
from apt_jax.engine import Engine
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.components import cache_kinds
from apt_jax.models.config import ModelConfig
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import Policy, make_policy
from apt_jax.utils.clock import WallClock

CONDITIONS = ["one at a time", "batched", "forced preemptions", "chunked prefill"]
MODES: list[tuple[str, HiddenAttention]] = [
    ("kv", "absorb"),
    ("hidden", "reproject"),
    ("hidden", "absorb"),
]
"""(kind that requests get, attention over hidden caches)"""


def make_executor(params, config: ModelConfig, attention: HiddenAttention, num_blocks: int = 1600) -> JaxExecutor:
    cache = CacheConfig(num_blocks_override=num_blocks, hidden_attention=attention)
    return JaxExecutor(params, config, cache=cache, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512)


def greedy(
    executor: JaxExecutor,
    prompts: list[list[int]],
    max_tokens: int,
    kind: str,
    condition: str,
    policy: str | Policy = "apt",
    host_memory: HostMemory | None = None,
) -> list[list[int]]:
    """The output tokens of each prompt, the end-of-sequence token left out. Checks integrity, and that all blocks are
    free at the end."""
    budget = 48 if condition == "chunked prefill" else executor.max_num_batched_tokens
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=budget)
    if isinstance(policy, str):
        policy = make_policy(policy, scheduler)
    kinds = [dataclasses.replace(k, offered=kind in (k.name, "hybrid")) for k in cache_kinds(executor, None)]
    engine = Engine(
        executor, policy, WallClock(), kinds, scheduler,
        dataclasses.replace(executor.cache_config), vocab_size=executor.config.vocab_size,
        tiers=Tiers(host=host_memory), debug=True,
    )  # fmt: skip
    eos = executor.config.eos_token_id
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, seed=0, stop_token_ids=() if eos is None else (eos,)
    )
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    rng = np.random.default_rng(0)
    preempted, steps, kinds_used = 0, 0, set()

    def submit(i: int) -> None:
        ids = np.asarray(prompts[i], np.int32)
        ids.setflags(write=False)
        engine.add_request(
            EngineRequest(
                request_id=str(i),
                prompt=None,
                prompt_token_ids=ids,
                params=params,
                slo=SLO(),
                arrival_s=engine.clock.now_s(),
            )
        )

    def run() -> None:
        nonlocal preempted, steps
        while engine.has_work:
            for out in engine.step():
                outputs[out.request_id] += out.new_token_ids
                assert out.finish_reason in (None, "stop", "length"), out.error
            kinds_used.update(engine.table.kind[engine.table.live].tolist())
            steps += 1
            if condition == "forced preemptions" and steps % 4 == 0:
                preempted += any(engine.preempt(str(i)) for i in rng.permutation(len(prompts)))

    if condition == "one at a time":
        for i in range(len(prompts)):
            submit(i)
            run()
    else:
        for i in range(len(prompts)):
            submit(i)
        run()
    engine.check_integrity()
    stats = engine.stats()
    assert stats.free_blocks == executor.num_blocks
    if condition == "forced preemptions":
        assert preempted >= len(prompts) // 4
    wrong = {"kv": HIDDEN, "hidden": KV}.get(kind)
    assert wrong not in kinds_used
    return [[t for t in tokens if t != eos] for tokens in outputs.values()]
