"""Policies that make legal plans nobody would make: they drive the engine into its rare states."""

import dataclasses

import numpy as np

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.sched.step_packer import held_blocks_for
from apt_jax.sched.view import Plan, Policy, SchedulerView


@dataclasses.dataclass(kw_only=True)
class RandomPlanPolicy:
    """Probabilities of a policy's whims; all zero: it behaves."""

    preempt: float = 0.0
    """A running request loses its cache, for each of them."""
    skip: float = 0.0
    """A row that could run does not."""
    chunk: float = 0.0
    """A row computes fewer tokens than it could."""
    flip: float = 0.0
    """A request that starts takes the other kind (`PerturbedPolicy`), or a random one (`RandomPolicy`)."""
    shuffle: float = 0.0
    """Requests are gone through in random order."""
    convert: float = 0.0
    """A request that starts takes the hidden kind; a hidden one that runs, and for which there is room, is converted to
    KV."""


def _blocks(view: SchedulerView, tokens: int, kind: int) -> int:
    return view.blocks_of(tokens, kind)


def _held_blocks(view: SchedulerView, row: int, length: int) -> int:
    """Return the blocks that a running request needs for `length` more tokens, including those that it shares."""
    table, one = view.table, np.array([row], np.int32)
    return int((held_blocks_for(view, one, table.num_cached[one] + np.int32(length)) + table.num_shared[one])[0])


def _left(view: SchedulerView, row: int, length: int, kind: int) -> int:
    return min(length, int(view.table.num_tokens[row] - view.table.cached_prefix_tokens[row, kind]))


def _start_blocks(view: SchedulerView, row: int, length: int, kind: int) -> int:
    """Return the blocks that a waiting request needs to compute at most `length` tokens."""
    found = int(view.table.cached_prefix_tokens[row, kind])
    end = found + _left(view, row, length, kind)
    extra = view.windows.extra_blocks(found, end) if view.windows is not None else 0
    return view.blocks_of(end, kind) + extra - int(view.table.shared_prefix_blocks[row, kind])


def _convert_blocks(view: SchedulerView, row: int, length: int) -> int | None:
    """Return the blocks that a running request needs to be converted and compute `length` tokens; None: it may not be
    converted."""
    table = view.table
    if not view.can_convert or table.kind[row] != HIDDEN:
        return None
    if _blocks(view, int(table.max_tokens_total[row]), KV) > view.total_blocks:
        return None
    return _blocks(view, int(table.num_cached[row]) + length, KV)


def _plan(
    rows: list[int],
    num_tokens: list[int],
    kind: list[int],
    preempt: list[int],
    convert: list[int],
) -> Plan:
    return Plan(
        rows=np.array(rows, np.int32),
        num_tokens=np.array(num_tokens, np.int32),
        kind=np.array(kind, np.int8),
        preempt=np.array(preempt, np.int32),
        iteration="mixed" if rows else "idle",
        convert=np.array(convert, np.int32),
    )


class RandomPolicy:
    """Oldest first, evict the youngest; every decision may be made otherwise by chance."""

    name = "random-test"

    def __init__(self, seed: int, chaos: RandomPlanPolicy) -> None:
        self.chaos = chaos
        self._rng = np.random.default_rng(seed)
        self._rng_sharing = np.random.default_rng([3, seed])

    def _chance(self, probability: float) -> bool:
        return bool(probability) and self._rng.random() < probability

    def _length(self, most: int) -> int:
        return int(self._rng.integers(1, most + 1)) if self._chance(self.chaos.chunk) else most

    def schedule(self, view: SchedulerView) -> Plan:
        table, budget, free = view.table, view.max_num_batched_tokens, view.free_blocks
        running = [int(r) for r in view.running]
        preempt = [r for r in running if self._chance(self.chaos.preempt)]
        free += sum(int(table.num_blocks[r]) for r in preempt)
        running = [r for r in running if r not in preempt]
        takeable = [0, 0] if self._rng_sharing.random() < 0.3 else _takeable_blocks(view, preempt)
        if self._chance(self.chaos.shuffle):
            self._rng.shuffle(running)
        rows: list[int] = []
        num_tokens: list[int] = []
        kinds: list[int] = []
        convert: list[int] = []
        while running:
            row = running.pop(0)
            most = min(budget, int(table.num_tokens[row] - table.num_cached[row]))
            if most < 1 or self._chance(self.chaos.skip):
                continue
            length, kind = self._length(most), int(table.kind[row])
            held = int(table.num_blocks[row]) + int(table.num_shared[row])
            need = _held_blocks(view, row, length) - held
            as_kv = _convert_blocks(view, row, length)
            if as_kv is not None and as_kv <= free and self._chance(self.chaos.convert):
                need = as_kv
                convert.append(row)
            taken = min(max(need - free, 0), 0 if table.best_effort[row] or as_kv is not None else takeable[kind])
            while need > free + taken and running:
                victim = running.pop()
                preempt.append(victim)
                free += int(table.num_blocks[victim])
                takeable, taken = [0, 0], 0  # some of these may be the victim's
            if need > free + taken:
                continue
            takeable[kind] -= taken
            free, budget = free - need + taken, budget - length
            rows.append(row)
            num_tokens.append(length)
            kinds.append(kind)
        slots = view.max_num_seqs - (view.running.size - len(preempt))
        waiting = [int(r) for r in view.waiting]
        if self._chance(self.chaos.shuffle):
            self._rng.shuffle(waiting)
        for row in waiting:
            if slots < 1 or budget < 1:
                break
            if self._chance(self.chaos.skip):
                continue
            length = self._length(min(budget, int(table.num_tokens[row])))
            options = [k for k, spec in enumerate(view.kinds) if spec.offered]
            options = [k for k in options if _start_blocks(view, row, length, k) <= free]
            if not options:
                break
            kind = options[0]
            if HIDDEN in options and self._chance(self.chaos.convert):
                kind = HIDDEN
            elif self._chance(self.chaos.flip):
                kind = int(self._rng.choice(options))
            free -= _start_blocks(view, row, length, kind)
            length = _left(view, row, length, kind)
            budget -= length
            slots -= 1
            rows.append(row)
            num_tokens.append(length)
            kinds.append(kind)
        return _plan(rows, num_tokens, kinds, preempt, convert)


class PerturbedPolicy:
    """Another policy's plans, some of them changed into other legal ones."""

    def __init__(self, inner: Policy, seed: int, chaos: RandomPlanPolicy) -> None:
        self.name = f"perturbed-{inner.name}"
        self.chaos = chaos
        self._inner = inner
        self._rng = np.random.default_rng(seed)

    def schedule(self, view: SchedulerView) -> Plan:
        plan, table, rng, chaos = self._inner.schedule(view), view.table, self._rng, self.chaos
        preempt = plan.preempt.tolist()
        for row in view.running.tolist():
            if row not in preempt and chaos.preempt and rng.random() < chaos.preempt:
                preempt.append(row)
        rows: list[int] = []
        num_tokens: list[int] = []
        kinds: list[int] = []
        convert: list[int] = []
        free = view.free_blocks + sum(int(table.num_blocks[r]) for r in preempt)
        takeable = _takeable_blocks(view, preempt)
        planned = zip(plan.rows.tolist(), plan.num_tokens.tolist(), plan.kind.tolist(), strict=True)
        for row, length, kind in planned:
            if row in preempt or (chaos.skip and rng.random() < chaos.skip):
                continue
            if chaos.chunk and rng.random() < chaos.chunk:
                length = int(rng.integers(1, length + 1))
            holds = bool(table.num_cached[row])
            other = 1 - kind
            flippable = not holds and view.kinds[other].offered
            flip = max(chaos.flip, chaos.convert if other == HIDDEN else 0.0)
            if flippable and flip and rng.random() < flip and _start_blocks(view, row, length, other) <= free:
                kind = other
            if holds:
                held = int(table.num_blocks[row]) + int(table.num_shared[row])
                need = _held_blocks(view, row, length) - held
                as_kv = _convert_blocks(view, row, length)
                wanted = row in plan.convert or (chaos.convert and rng.random() < chaos.convert)
                if wanted and as_kv is not None and as_kv <= free:
                    need = as_kv
                    convert.append(row)
            else:
                need = _start_blocks(view, row, length, kind)
                length = _left(view, row, length, kind)
            taken = min(max(need - free, 0), 0 if table.best_effort[row] else takeable[kind])
            if need > free + taken:  # a kind that was flipped before took its blocks
                continue
            takeable[kind] -= taken
            free -= need - taken
            rows.append(row)
            num_tokens.append(length)
            kinds.append(kind)
        return _plan(rows, num_tokens, kinds, preempt, convert)


def _takeable_blocks(view: SchedulerView, preempt: list[int]) -> list[int]:
    """By kind, blocks that real-time requests may take from best-effort ones that stay."""
    if view.takeable is None:
        return [0, 0]
    groups = [int(np.count_nonzero(~np.isin(view.takeable.rows(k), preempt))) for k in range(2)]
    return [n * int(blocks) for n, blocks in zip(groups, view.blocks_per_group, strict=True)]
