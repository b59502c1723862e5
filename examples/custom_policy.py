"""A scheduling policy in thirty lines, simulated beside a bundled one (docs/writing_a_policy.md).

`apt-jax serve tiny-opt --scheduling-policy examples.custom_policy:ShortestFirst` serves with it.
"""

import numpy as np

from apt_jax.config import SLO
from apt_jax.sched import Plan, SchedulerView
from apt_jax.sched.step_packer import (
    StepPacker,
    allowed_kinds,
    held_blocks_for,
    resolve_prefill_deadlock,
    split_running,
    start_blocks_for,
    target_tokens,
)
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.simulator import simulate


class ShortestFirst:
    """Decodes in every step, the shortest waiting prompt first."""

    name = "shortest-first"
    interface_version = 1

    def schedule(self, view: SchedulerView) -> Plan:
        table = view.table
        decoding, partial = split_running(view)
        # Decoding requests keep their cache while their next positions fit, the oldest first; the others are preempted.
        needed = held_blocks_for(view, decoding, table.num_tokens[decoding])
        have = view.free_blocks + int(table.num_blocks[decoding].sum())
        kept = int(np.searchsorted(np.cumsum(needed), have, side="right"))
        packer = StepPacker(view, preempt=decoding[kept:])
        packer.decode(decoding[:kept][: view.max_num_batched_tokens])
        packer.continue_prefill(partial)
        # Then the shortest waiting prompts, while they fit beside what partly computed prompts still need.
        waiting = view.waiting[np.argsort(table.prompt_len[view.waiting], kind="stable")]
        kind = allowed_kinds(view, waiting).argmax(axis=1).astype(np.int8)
        blocks = start_blocks_for(view, waiting, target_tokens(view, waiting, 1), kind)
        unfinished = held_blocks_for(view, partial, target_tokens(view, partial, 1)) - table.num_blocks[partial]
        spare = view.total_blocks // 50 if view.running.size else 0
        room = packer.blocks_left - int(unfinished.sum()) - spare
        num = int(np.searchsorted(np.cumsum(blocks), room, side="right"))
        packer.start(waiting[:num], kind[:num], in_order=True)
        plan = packer.plan()
        return plan if plan.rows.size or not partial.size else resolve_prefill_deadlock(view, partial)


def main(num_requests: int = 200) -> None:
    config = SimulationConfig(
        model="opt-13b", hardware="a100-40gb", trace="sharegpt", rate=4.0, num_requests=num_requests,
        policy="fcfs", cache="kv", slo=SLO(ttft_s=1.0, tbt_s=1.0),
    )  # fmt: skip
    for name, policy in (("fcfs", None), ("shortest-first", ShortestFirst())):
        result = simulate(config, policy=policy)
        print(f"{name:15} {result.slo_attainment:6.1%} attained, TTFT p99 {result.ttft_p99_s:.1f} s")


if __name__ == "__main__":
    main()
