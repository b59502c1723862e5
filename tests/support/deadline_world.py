"""Worlds for policies that go by deadlines: requests that decode, and a step as plain values."""

import numpy as np

from apt_jax.sched import Policy, StepCosts
from tests.support.sched_world import KV, World

COSTS = StepCosts(
    prefill_base_s=0.01,
    prefill_per_token_s=0.001,
    decode_base_s=0.01,
    decode_per_request_s=0.001,
)
"""A step takes 10 ms and 1 ms per token."""


def world_of(*, num_blocks: int = 10**5, max_num_batched_tokens: int = 1000, block_size: int = 4) -> World:
    return World(
        num_blocks=num_blocks,
        block_size=block_size,
        mode="kv",
        max_num_seqs=50,
        max_num_batched_tokens=max_num_batched_tokens,
        costs=COSTS,
    )


def decode(
    world: World,
    *,
    last_s: float = 0.0,
    outputs: int = 1,
    arrival_s: float = 0.0,
    ttft_s: float = np.inf,
    tbt_s: float = np.inf,
    e2e_s: float = np.inf,
) -> int:
    """A request that decodes and had its last token at `last_s`."""
    row = world.add(8, 100, arrival_s=arrival_s, ttft_s=ttft_s, tbt_s=tbt_s, e2e_s=e2e_s)
    world.hold(row, KV, num_outputs=outputs)
    world.table.last_token_s[row] = last_s
    return row


def step(world: World, policy: Policy) -> tuple[str, dict[int, int], list[int]]:
    plan = world.schedule(policy)
    tokens = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
    return plan.iteration, tokens, plan.preempt.tolist()
