"""BROS's Algorithm 1, transcribed in plain Python, decides as `BrosPaperPolicy`."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from apt_jax.lab.policies.bros_paper import BrosAnyPolicy, BrosPaperPolicy
from apt_jax.sched import SchedulerView, StepCosts
from apt_jax.sched.plan_check import check_plan
from apt_jax.sched.policies.bros import BASE_BATCH, BrosPolicy
from apt_jax.sched.view import TakeableGroups
from tests.support.cases import num_cases
from tests.support.sched_world import KV, World

SIZE, GROUP = 4, 2
"""Slots of a block; blocks of a group, keys and values."""
Request = dict[str, Any]
"""row, best_effort, waiting, slack_s (remaining time to the deadline of its next token), tokens (that the step would
compute), context (cached already), new (M^new), cpu (M^cpu), groups: of each group that it has alone, empty slots."""
COSTS = StepCosts(
    prefill_base_s=0.01,
    prefill_per_token_s=4e-4,
    prefill_per_pair_s=1e-6,
    prefill_per_request_s=1e-4,
    prefill_per_kv_prefix_s=2e-6,
    decode_base_s=0.008,
    decode_per_request_s=3e-4,
    decode_per_token_s=1e-5,
    load_base_s=1e-3,
    load_per_block_s=8e-4,
    one_program=False,
)


def cost(batch: Sequence[Request]) -> float:
    """C(L^n, L^a, M^cpu): linear models of both phases added up, or the transfers, whichever takes longer (§4.1)."""
    prefill = decode = swap = 0.0
    for r in batch:
        n, past = r["tokens"], r["context"]
        if n == 1 and past > 0:
            decode = decode or COSTS.decode_base_s
            decode += COSTS.decode_per_request_s + COSTS.decode_per_token_s * (past + 1)
        else:
            prefill = prefill or COSTS.prefill_base_s
            prefill += COSTS.prefill_per_request_s + COSTS.prefill_per_token_s * n
            prefill += COSTS.prefill_per_pair_s * n * (n + 2 * past) + COSTS.prefill_per_kv_prefix_s * past
        if r["cpu"]:
            swap = (swap or COSTS.load_base_s) + COSTS.load_per_block_s * r["cpu"]
    return max(prefill + decode, swap)


def preemptible(best_effort: Sequence[Request]) -> list[int]:
    """Rows of best-effort requests, one for each group that `FindPreemptBlock` may take, in its order (§5.2): those with
    the most empty slots first; of equal ones those of the latest request, the last first."""
    groups = [(-empty, -r["row"], -i) for r in best_effort for i, empty in enumerate(r["groups"])]
    return [-row for _, row, _ in sorted(groups)]


def algorithm_1(
    real_time: list[Request], best_effort: list[Request], free: int, batch_size: int, budget: int
) -> tuple[list[int], list[int], bool]:
    """Rows of the batch in order, rows that are dropped for it, and whether time ended one of its parts.

    Queues hold pending requests before waiting ones, each by arrival. What the paper leaves open is ours: of equal keys
    the first in its queue comes first, a step has at most `budget` tokens, the first real-time request runs in any
    case, and is not replaced.
    """
    out_of_time = False
    queue = sorted(real_time, key=lambda r: r["slack_s"])  # 3
    t_min = min((r["slack_s"] for r in queue), default=math.inf)  # 4
    be_blocks = sum(GROUP * len(r["groups"]) for r in best_effort)

    rt_ready: list[Request] = []
    for i, r in enumerate(queue):  # 5
        if len(rt_ready) == batch_size:  # 6
            break
        # 8, FindPreemptBlock: free blocks, those of best-effort requests, those of real-time ones with more time left
        more_time = sum(GROUP * len(other["groups"]) for other in queue[i + 1 :])
        if sum(x["new"] for x in [*rt_ready, r]) > free + be_blocks + more_time:
            break
        candidates = [*rt_ready, r]  # 10
        if rt_ready:
            late = cost(candidates) > t_min  # 11
            out_of_time |= late
            if late or sum(x["tokens"] for x in candidates) > budget:
                break
        rt_ready = candidates

    lacking = sum(r["new"] for r in rt_ready) - free
    dropped: list[int] = []
    if lacking > be_blocks:  # "we progressively drop requests: first BE, then RT, based on the remaining time"
        freed = 0
        ready = [r["row"] for r in rt_ready]
        rest = [r for r in queue if not r["waiting"] and r["row"] not in ready]
        pending = [r for r in best_effort if not r["waiting"]]
        for r in [*reversed(pending), *reversed(rest)]:
            if freed < lacking:
                freed += GROUP * len(r["groups"])
                dropped.append(r["row"])
        left = freed - lacking
        best_effort = [r for r in best_effort if r["row"] not in dropped]
    else:
        left = max(-lacking, 0)
        for row in preemptible(best_effort)[: -(-lacking // GROUP)] if lacking > 0 else []:
            (r,) = (r for r in best_effort if r["row"] == row)
            r["new"] += GROUP  # what it loses it needs again,
            r["cpu"] += GROUP  # from host memory

    be_ready: list[Request] = []
    for r in sorted(best_effort, key=lambda r: r["cpu"]):  # 17, 18
        if sum(x["new"] for x in [*be_ready, r]) > left:  # 19, FindBlock
            break

        def fits(batch: list[Request]) -> bool:
            return len(batch) <= batch_size and cost(batch) <= t_min and sum(x["tokens"] for x in batch) <= budget

        if fits([*rt_ready, *be_ready, r]):  # 22
            be_ready.append(r)
            continue
        if not any(x["replaced_one"] for x in be_ready):
            has_place = len([*rt_ready, *be_ready, r]) <= batch_size
            out_of_time |= has_place and cost([*rt_ready, *be_ready, r]) > t_min
        if len(rt_ready) < 2 or not fits([*rt_ready[:-1], *be_ready, r]):  # 26, 27, 32
            break
        rt_ready.pop()
        r["replaced_one"] = True
        be_ready.append(r)
    return [r["row"] for r in rt_ready + be_ready], dropped, out_of_time


def random_state(rng: np.random.Generator) -> tuple[World, BrosPolicy, SchedulerView, list[Request], int]:
    """Requests of both classes, some with shared blocks, checkpointed ones, or all of them in host memory."""
    budget = int(rng.choice([40, 90, 400]))
    world = World(
        num_blocks=0, mode="kv", block_size=SIZE, max_num_seqs=500, max_num_batched_tokens=budget, costs=COSTS
    )
    table = world.table
    world.now_s = 10.0
    policy = BrosPaperPolicy()
    policy._batch_size = int(rng.choice([2, 4, 8, 128]))
    policy._average_s = float(rng.uniform(0.01, 0.03))
    requests: list[Request] = []
    num, share = int(rng.integers(1, 18)), rng.uniform(0.1, 0.9)
    urgency = float(rng.choice([0.03, 0.1, 0.5]))
    for _ in range(num):
        arrival_s = float(10.0 - rng.uniform(0, urgency))
        prompt = int(rng.integers(1, 40))
        ttft_s, tbt_s = (rng.uniform(0.5, 1.5, 2) * urgency).tolist()
        row = world.add(prompt, 60, arrival_s=arrival_s, ttft_s=ttft_s, tbt_s=tbt_s)
        best_effort = bool(rng.random() < share)
        table.best_effort[row] = best_effort
        waiting = bool(rng.random() < 0.5)
        outputs = 0 if waiting and rng.random() < 0.7 else int(rng.integers(1, 12))
        table.num_outputs[row] = table.num_delivered[row] = outputs
        table.num_tokens[row] = prompt + outputs
        table.last_token_s[row] = arrival_s if outputs == 0 else rng.uniform(arrival_s, 10.0)
        groups: list[int] = []
        if waiting:
            in_host = int(rng.integers(0, (prompt + outputs - 1) // SIZE + 1)) if rng.random() < 0.3 else 0
            context, cpu = SIZE * in_host, GROUP * in_host
            table.cached_prefix_tokens[row, KV] = table.host_prefix_tokens[row, KV] = context
            left = prompt + outputs - context
            new = GROUP * -(-(prompt + outputs + 1) // SIZE)
        else:
            context = prompt + outputs - 1 if outputs else int(rng.integers(0, prompt))
            left, cpu, missing, shared = prompt + outputs - context, 0, 0, 0
            for i in range(-(-context // SIZE)):
                where = rng.choice(["alone", "shared", "checkpointed", "gone"], p=[0.7, 0.15, 0.1, 0.05])
                cpu += GROUP * (where in ("checkpointed", "gone"))
                missing += GROUP * (where == "gone")
                shared += GROUP * (where in ("shared", "checkpointed"))
                if where == "alone":
                    groups.append(SIZE - min(context - SIZE * i, SIZE))
            table.kind[row], table.num_cached[row] = KV, context
            table.num_blocks[row], table.num_shared[row] = GROUP * len(groups), shared
            table.checkpointed_blocks[row] = cpu
            grown = -(-(context + min(left, budget)) // SIZE) - -(-context // SIZE)
            new = max(GROUP * grown + missing, cpu)
        slo_s = tbt_s if outputs else ttft_s
        steps = -(-left // budget)
        requests.append(
            {
                "row": row,
                "best_effort": best_effort,
                "waiting": waiting,
                "slack_s": slo_s - (10.0 - float(table.last_token_s[row])) - (steps - 1) * policy._average_s,
                "tokens": min(left, budget),
                "context": context,
                "new": new,
                "cpu": cpu,
                "groups": groups,
                "replaced_one": False,
            }
        )
    free = GROUP * int(rng.choice([0, 1, 3, 10, 40, 200]) * rng.random())
    world.num_blocks = 2000
    taken = preemptible([r for r in requests if r["best_effort"]])
    takeable = TakeableGroups(lambda _: np.array(taken, np.int32))
    view = dataclasses.replace(world.view(), free_blocks=free, takeable=takeable)
    return world, policy, view, requests, free


def queue_of(requests: list[Request], has_class: Callable[[Request], bool]) -> list[Request]:
    return sorted(filter(has_class, requests), key=lambda r: (r["waiting"], r["row"]))


@pytest.mark.seeds
def test_the_papers_packing_is_algorithm_1():
    seen = dict.fromkeys(["runs", "taken", "dropped", "out of time", "replaced", "loads", "short"], 0)
    for seed in range(num_cases(300, 4000)):
        world, policy, view, requests, free = random_state(np.random.default_rng(seed))
        real_time = queue_of(requests, lambda r: not r["best_effort"])
        best_effort = queue_of(requests, lambda r: r["best_effort"])
        batch_size = policy._batch_size
        rows, dropped, out_of_time = algorithm_1(real_time, best_effort, free, batch_size, world.max_num_batched_tokens)
        plan = policy.schedule(view)
        if not rows:  # best-effort requests that fill the pool: the paper does not say who makes room
            seen["short"] += 1
            continue
        check_plan(view, plan)
        assert plan.rows.tolist() == rows
        assert plan.preempt.tolist() == dropped
        by_row = {r["row"]: r for r in requests}
        assert plan.num_tokens.tolist() == [by_row[row]["tokens"] for row in rows]
        grown = min(2 * batch_size, max(BASE_BATCH, view.max_num_seqs))
        assert policy._batch_size == (BASE_BATCH if out_of_time else grown)
        seen["runs"] += 1
        seen["taken"] += any(r["cpu"] > view.table.checkpointed_blocks[r["row"]] and not r["waiting"] for r in requests)
        seen["dropped"] += bool(dropped)
        seen["out of time"] += out_of_time
        seen["replaced"] += any(r["replaced_one"] for r in requests)
        seen["loads"] += any(by_row[row]["cpu"] for row in rows)
    assert all(seen.values()), seen
    assert seen["short"] < 0.2 * seen["runs"], seen


def test_replacement_as_the_paper_has_it_asks_for_no_time():
    costs = StepCosts(prefill_base_s=0.01, prefill_per_token_s=1e-3, decode_base_s=0.01, decode_per_request_s=1e-4)
    world = World(num_blocks=4000, mode="kv", max_num_seqs=400, max_num_batched_tokens=1000, costs=costs)
    for _ in range(BASE_BATCH):
        world.hold(world.add(10, tbt_s=9.0), KV)
    be = [world.hold(world.add(10), KV) for _ in range(6)]
    world.table.best_effort[be] = True
    # This step takes 0.023 s, so the next one would be late; 0.05 s are left.
    world.table.last_token_s[world.table.live] = -8.95
    in_time = world.schedule(BrosPolicy()).rows.tolist()
    assert not set(be) & set(in_time)
    plan = world.schedule(BrosAnyPolicy())
    assert plan.rows.size == BASE_BATCH
    assert set(be) <= set(plan.rows.tolist())
