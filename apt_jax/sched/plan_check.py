"""Checks that a plan fulfils the contract of `Plan`: in tests, and in every iteration for policies from outside this
package.

Speed: rows are looked up in arrays indexed by table row, and messages are built only for errors. Checking a plan of 256
rows with 1,600 waiting requests takes about 0.1 ms.
"""

import dataclasses

import numpy as np

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.sched.view import Plan, Policy, SchedulerView

_ARRAYS = (
    ("rows", np.int32),
    ("num_tokens", np.int32),
    ("kind", np.int8),
    ("preempt", np.int32),
    ("convert", np.int32),
)
_WAITING, _RUNNING = 1, 2


class PlanError(AssertionError):
    """A plan violates the contract in the docstring of `Plan`; the message names the violation and the rows."""


def checked_schedule(policy: Policy, view: SchedulerView) -> Plan:
    """Run a policy from outside this package on a read-only table, check its plan and return it.

    Raises:
        PlanError: the plan violates the contract of `Plan`.
        Exception: any exception that the policy raises.
    """
    view = dataclasses.replace(view, table=view.table.read_only())
    plan = policy.schedule(view)
    check_plan(view, plan)
    return plan


def check_plan(view: SchedulerView, plan: Plan) -> None:
    """Check `plan` against the `view` from which the policy made it.

    Raises:
        PlanError: the plan violates the contract of `Plan`.
    """
    _check_types(plan)
    table, rows, num_tokens, preempt = view.table, plan.rows, plan.num_tokens, plan.preempt
    n = rows.size
    kind = plan.kind.astype(np.intp)

    status = np.zeros(table.capacity, np.int8)
    status[view.waiting], status[view.running] = _WAITING, _RUNNING
    inside = (rows >= 0) & (rows < table.capacity)
    of_rows = status[rows if inside.all() else np.where(inside, rows, 0)] * inside
    if not of_rows.all():
        raise PlanError(f"rows {rows[of_rows == 0].tolist()} neither wait nor run")
    if not table.live[rows].all():
        raise PlanError(f"rows {rows[~table.live[rows]].tolist()} are not live")
    holds = of_rows == _RUNNING
    if preempt.size:
        inside = (preempt >= 0) & (preempt < table.capacity)
        foreign = (status[np.where(inside, preempt, 0)] != _RUNNING) | ~inside
        if foreign.any():
            raise PlanError(f"rows {preempt[foreign].tolist()} hold no cache to preempt")
        if np.unique(preempt).size != preempt.size:
            raise PlanError(f"a row is preempted twice: {preempt.tolist()}")
    if plan.convert.size:
        _check_conversions(view, plan)
    if not 0 <= plan.num_first <= n:
        raise PlanError(f"num_first={plan.num_first} must lie in [0, {n}], the number of rows")
    if not n:
        return
    used = np.zeros(table.capacity, np.int8)
    used[rows] = 1
    if np.count_nonzero(used) != n:
        raise PlanError(f"a row occurs twice: {rows.tolist()}")
    if preempt.size and used[preempt].any():
        raise PlanError(f"rows {preempt[used[preempt] == 1].tolist()} are both run and preempted")

    bad = (kind < 0) | (kind >= len(view.kinds))
    if bad.any():
        raise PlanError(f"rows {rows[bad].tolist()} have unknown kinds {kind[bad].tolist()}")
    found = table.cached_prefix_tokens[rows, kind]
    cached = table.num_cached[rows]
    remaining = table.num_tokens[rows] - cached - found
    bad = (num_tokens < 1) | (num_tokens > remaining)
    if bad.any():
        raise PlanError(
            f"rows {rows[bad].tolist()} run {num_tokens[bad].tolist()} tokens of {remaining[bad].tolist()} remaining"
        )
    total = int(num_tokens.sum())
    if total > view.max_num_batched_tokens:
        raise PlanError(f"the rows run {total} tokens; a step holds at most {view.max_num_batched_tokens}")
    kept = view.running.size - preempt.size
    slots = kept + n - int(np.count_nonzero(holds))
    if slots > max(view.max_num_seqs, kept):
        raise PlanError(f"{slots} requests would hold cache; at most {view.max_num_seqs} may")

    bad = holds & (kind != table.kind[rows])
    if bad.any():
        raise PlanError(f"rows {rows[bad].tolist()} change their kind while they hold cache")
    bad = ~holds & ~np.array([kind.offered for kind in view.kinds])[kind]
    if bad.any():
        raise PlanError(f"rows {rows[bad].tolist()} take a kind that is not offered")

    held = table.num_blocks[rows] + table.num_shared[rows] + table.shared_prefix_blocks[rows, kind]
    if plan.convert.size:  # their hidden blocks become free only after the step
        converted = np.isin(rows, plan.convert)
        kind, held = np.where(converted, KV, kind), np.where(converted, 0, held)
    new = view.blocks_for(cached + found + num_tokens, kind) - held
    need = int(new.sum())
    have = view.free_blocks + int(table.num_blocks[preempt].sum())
    if view.takeable is not None:
        real_time = ~table.best_effort[rows]
        copied = found % view.block_sizes[kind] > 0
        for k in np.unique(kind[real_time]).tolist():
            halves, of_kind = view.kinds[k].blocks_per_group, real_time & (kind == k)
            wanted = int(new[of_kind].sum()) - halves * int(np.count_nonzero(copied[of_kind]))
            takeable = view.takeable.rows(k)
            if plan.num_first:
                takeable = takeable[~np.isin(takeable, rows[: plan.num_first])]
            have += min(wanted, takeable.size * halves)
    if need > have:
        raise PlanError(f"{need} blocks needed, {have} available")


def _check_types(plan: Plan) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(f"not a Plan but {type(plan).__name__}")
    for name, dtype in _ARRAYS:
        value = getattr(plan, name)
        if not isinstance(value, np.ndarray):
            raise PlanError(f"{name} is {type(value).__name__}, not a NumPy array")
        if value.dtype != dtype:
            raise PlanError(f"{name} is {value.dtype}, not {np.dtype(dtype)}")
    rows, num_tokens, kind = plan.rows, plan.num_tokens, plan.kind
    if not (
        rows.shape == num_tokens.shape == kind.shape == (rows.size,) and plan.preempt.ndim == plan.convert.ndim == 1
    ):
        raise PlanError(
            f"shapes differ: rows {rows.shape}, num_tokens {num_tokens.shape}, kind {kind.shape}, preempt {plan.preempt.shape}, convert {plan.convert.shape}"
        )
    if plan.iteration not in ("prefill", "decode", "mixed", "idle"):
        raise PlanError(f"unknown iteration {plan.iteration!r:.60}")
    if (plan.iteration == "idle") != (rows.size == 0):
        raise PlanError(f"iteration {plan.iteration!r} with {rows.size} rows")


def _check_conversions(view: SchedulerView, plan: Plan) -> None:
    convert, table = plan.convert, view.table
    if not view.can_convert:
        raise PlanError(f"rows {convert.tolist()} are converted, but view.can_convert is False")
    if np.unique(convert).size != convert.size:
        raise PlanError(f"a row is converted twice: {convert.tolist()}")
    missing = ~np.isin(convert, plan.rows)
    if missing.any():
        raise PlanError(f"rows {convert[missing].tolist()} are converted but do not run")
    bad = table.kind[convert] != HIDDEN
    if bad.any():
        raise PlanError(f"rows {convert[bad].tolist()} are converted but hold no layer inputs")
    bad = view.blocks_for(table.max_tokens_total[convert], KV) > view.total_blocks
    if bad.any():
        raise PlanError(f"rows {convert[bad].tolist()} are converted, but their KV cache could outgrow the pool")
