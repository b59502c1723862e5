"""A tiny engine without device: it does what plans say, counts blocks, and delivers tokens at once."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from apt_jax.core.kinds import HIDDEN, KV, NO_KIND, CacheKindSpec
from apt_jax.sched import Plan, Policy, RequestTable, SchedulerView, StepCosts, check_plan


def kinds(mode: str = "hybrid", base_s: float = 0.0, per_token_s: float = 1e-5) -> tuple[CacheKindSpec, CacheKindSpec]:
    """KV and hidden as `--cache MODE` offers them."""
    return (
        CacheKindSpec(name="kv", blocks_per_group=2, offered=mode != "hidden"),
        CacheKindSpec(
            name="hidden",
            blocks_per_group=1,
            offered=mode != "kv",
            extra_base_s=base_s,
            extra_per_token_s=per_token_s,
        ),
    )


def blocks(tokens: Any, kind: int, block_size: int, hidden_block_size: int | None = None) -> Any:
    """Blocks of so many positions, a number or an array of them; `hidden_block_size` as of `World`."""
    if kind == KV:
        return 2 * -(-tokens // block_size)
    return -(-tokens // (block_size if hidden_block_size is None else hidden_block_size))


COLUMNS = operator.attrgetter(*RequestTable.COLUMNS)


def contents(table: RequestTable) -> dict[str, bytes]:
    """All columns of a table, to compare."""
    return dict(zip(table.COLUMNS, map(np.ndarray.tobytes, COLUMNS(table)), strict=True))


class World:
    """Requests, a pool, and a clock that each step moves on."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        hidden_block_size: int | None = None,
        mode: str = "hybrid",
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        costs: StepCosts | None = None,
        per_token_s: float = 1e-5,
        base_s: float = 0.0,
        can_convert: bool = False,
    ) -> None:
        self.table = RequestTable(4)
        self.num_blocks = num_blocks
        self.block_size, self.hidden_block_size = block_size, hidden_block_size
        self.kinds = kinds(mode, base_s, per_token_s)
        self.mode_is_kv = mode == "kv"
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.costs = StepCosts() if costs is None else costs
        self.can_convert = can_convert
        self.now_s = 0.0
        self.num_steps = self.num_conversions = 0
        self.finished: list[int] = []
        self.last_kind: dict[int, int] = {}
        self._rank = 0

    def add(
        self,
        prompt_len: int,
        max_tokens: int = 1000,
        *,
        arrival_s: float | None = None,
        ttft_s: float = np.inf,
        tbt_s: float = np.inf,
        e2e_s: float = np.inf,
        known_length: bool = False,
        tenant: int = 0,
    ) -> int:
        row = self.table.add(
            arrival_s=self.now_s if arrival_s is None else arrival_s,
            rank=self._rank,
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            slo_ttft_s=ttft_s,
            slo_tbt_s=tbt_s,
            slo_e2e_s=e2e_s,
            known_length=known_length,
            tenant=tenant,
        )
        self._rank += 1
        return row

    def hold(self, row: int, kind: int, num_outputs: int = 1, cached: int | None = None) -> int:
        """Put a request into the running queue as it stands after `num_outputs` tokens, or with `cached` positions."""
        table = self.table
        if cached is None:
            table.num_outputs[row] = table.num_delivered[row] = num_outputs
            table.tokens_since_preemption[row] = num_outputs
            table.num_tokens[row] = table.prompt_len[row] + num_outputs
            cached = int(table.num_tokens[row]) - 1
        table.num_cached[row] = cached
        table.kind[row] = kind
        table.num_blocks[row] = self.blocks(cached, kind)
        return row

    def blocks(self, tokens: Any, kind: int) -> Any:
        return blocks(tokens, kind, self.block_size, self.hidden_block_size)

    @property
    def used_blocks(self) -> int:
        return int(self.table.num_blocks[self.table.live].sum())

    def view(self) -> SchedulerView:
        table = self.table
        rows = np.flatnonzero(table.live).astype(np.int32)
        rows = rows[np.argsort(table.rank[rows])]
        holds = table.kind[rows] != NO_KIND
        waiting, running = rows[~holds], rows[holds]
        waiting.flags.writeable = running.flags.writeable = False
        return SchedulerView(
            now_s=self.now_s,
            table=table,
            waiting=waiting,
            running=running,
            free_blocks=self.num_blocks - self.used_blocks,
            total_blocks=self.num_blocks,
            block_size=self.block_size,
            hidden_block_size=self.hidden_block_size,
            kinds=self.kinds,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            costs=self.costs,
            can_convert=self.can_convert,
        )

    def schedule(self, policy: Policy) -> Plan:
        """A checked decision, and the proof that it changed nothing."""
        view = self.view()
        before = contents(self.table)
        plan = policy.schedule(view)
        after = contents(self.table)
        assert after == before, f"the policy changed {[name for name in after if after[name] != before[name]]}"
        check_plan(view, plan)
        return plan

    def apply(self, plan: Plan, *, seconds: float = 0.01) -> None:
        table, rows, kind = self.table, plan.rows, plan.kind
        if plan.preempt.size:
            table.kind[plan.preempt] = NO_KIND
            for column in (table.num_cached, table.num_blocks, table.tokens_since_preemption):
                column[plan.preempt] = 0
            table.num_preemptions[plan.preempt] += 1
        self.now_s += seconds
        if plan.convert.size:
            kind = np.where(np.isin(rows, plan.convert), KV, kind)
            self.num_conversions += plan.convert.size
        for i in np.flatnonzero(table.kind[rows] == NO_KIND).tolist():
            row, begun = int(rows[i]), int(kind[i])
            table.num_kind_switches[row] += self.last_kind.get(row, begun) != begun
            self.last_kind[row] = begun
        table.kind[rows] = kind
        table.num_cached[rows] += plan.num_tokens
        cached = table.num_cached[rows]
        table.num_blocks[rows] = np.where(kind == KV, self.blocks(cached, KV), self.blocks(cached, HIDDEN))
        assert self.used_blocks <= self.num_blocks
        done = plan.rows[table.num_cached[plan.rows] == table.num_tokens[plan.rows]]
        table.record_tokens(done, self.now_s)
        table.num_tokens[done] += 1
        table.num_outputs[done] += 1
        table.tokens_since_preemption[done] += 1
        for row in done[table.num_tokens[done] >= table.max_tokens_total[done]].tolist():
            table.num_blocks[row] = 0
            table.record_output_length(int(table.num_outputs[row]))
            table.remove(row)
            self.last_kind.pop(row, None)
            self.finished.append(row)
        self.num_steps += 1

    def step(self, policy: Policy, *, seconds: float = 0.01) -> Plan:
        plan = self.schedule(policy)
        self.apply(plan, seconds=seconds)
        return plan


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request of a workload for `drain`."""

    at_step: int
    prompt_len: int
    max_tokens: int
    ttft_s: float = np.inf
    tbt_s: float = np.inf


def drain(world: World, policy: Policy, arrivals: list[Arrival], limit: int) -> int:
    """Serve everything; returns the number of steps. Fails when `limit` steps do not do it, or nothing happens."""
    todo = sorted(arrivals, key=lambda a: a.at_step)
    idle = 0
    for step in range(limit):
        while todo and todo[0].at_step <= step:
            a = todo.pop(0)
            world.add(a.prompt_len, a.max_tokens, ttft_s=a.ttft_s, tbt_s=a.tbt_s)
        if not world.table.live.any():
            if not todo:
                assert len(world.finished) == len(arrivals)
                return step
            continue
        plan = world.step(policy)
        idle = 0 if plan.rows.size else idle + 1
        assert idle < 4, "nothing is scheduled although requests are there"
    raise AssertionError(f"{len(arrivals) - len(world.finished)} of {len(arrivals)} requests left after {limit} steps")


def random_world(rng: np.random.Generator) -> World:
    """Waiting and running requests as an engine could hold them; every prompt fits a step."""
    world = World(
        num_blocks=0,
        block_size=int(rng.choice([1, 4, 16])),
        mode=str(rng.choice(["kv", "hybrid", "hybrid", "hybrid"])),
        max_num_seqs=int(rng.integers(2, 24)),
        max_num_batched_tokens=int(rng.choice([70, 120, 400])),
        per_token_s=float(rng.choice([0.0, 1e-5, 3e-4, 1e-2])),
    )
    world.now_s = 10.0
    slos = (0.05, 0.5, 3.0, np.inf)
    num_running = int(rng.integers(0, world.max_num_seqs + 1))
    for i in range(num_running + int(rng.integers(0, 20))):
        row = world.add(
            int(rng.integers(1, 50)),
            int(rng.integers(21, 40)),
            arrival_s=float(rng.uniform(4, 10)),
            ttft_s=float(rng.choice(slos)),
            tbt_s=float(rng.choice(slos)),
        )
        if i < num_running:
            kind = KV if world.mode_is_kv else int(rng.integers(2))
            world.hold(row, kind, num_outputs=int(rng.integers(1, 20)))
            last_s = 10.0 - float(rng.choice([0.01, 0.03, 0.2, 2.0]) * rng.random())
            world.table.last_token_s[row] = max(last_s, float(world.table.arrival_s[row]) + 1e-3)
        elif rng.random() < 0.4:  # preempted
            outputs = int(rng.integers(1, 20))
            world.table.num_outputs[row] = world.table.num_delivered[row] = outputs
            world.table.num_tokens[row] += outputs
            world.table.last_token_s[row] = rng.uniform(float(world.table.arrival_s[row]), 10)
    need = sum(2 * world.blocks(int(n), HIDDEN) for n in world.table.num_tokens[world.table.live])
    longest = max((int(n) for n in world.table.max_tokens_total[world.table.live]), default=1)
    least = max(world.used_blocks, world.blocks(longest, HIDDEN))
    world.num_blocks = least + int(need * rng.choice([0.0, 0.02, 0.1, 0.4, 1.5]))
    return world


__all__ = ["HIDDEN", "KV", "Arrival", "World", "blocks", "contents", "drain", "kinds", "random_world"]


def short_run(seed: int, policy: Policy, check: Callable[[Plan, World], object]) -> list[Plan]:
    """Serve a few requests in a small pool to their end; `check` sees each plan before it is applied.

    Returns the plans.
    """
    rng = np.random.default_rng(seed)
    world = World(
        num_blocks=int(rng.integers(30, 80)),
        block_size=4,
        mode="kv" if seed % 5 == 0 else "hybrid",
        max_num_seqs=int(rng.integers(3, 12)),
        max_num_batched_tokens=90,
        per_token_s=float(rng.choice([0.0, 1e-5, 1e-4, 1e-3])),
    )
    arrivals = [
        Arrival(
            at_step=int(rng.integers(0, 60)),
            prompt_len=int(rng.integers(1, 30)),
            max_tokens=int(rng.integers(1, 30)),
            ttft_s=float(rng.choice([0.05, 0.2, 1.0])),
            tbt_s=float(rng.choice([0.03, 0.2])),
        )
        for _ in range(int(rng.integers(4, 16)))
    ]
    todo, plans = sorted(arrivals, key=lambda a: a.at_step), list[Plan]()
    for step in range(3000):
        while todo and todo[0].at_step <= step:
            a = todo.pop(0)
            world.add(a.prompt_len, a.max_tokens, ttft_s=a.ttft_s, tbt_s=a.tbt_s)
        if world.table.live.any():
            plans.append(world.schedule(policy))
            check(plans[-1], world)
            world.apply(plans[-1], seconds=float(rng.uniform(0.005, 0.05)))
        elif not todo:
            break
    assert len(world.finished) == len(arrivals)
    return plans
