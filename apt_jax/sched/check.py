"""Whether a plan keeps the promises of `Plan`. For debug mode and tests."""

import numpy as np

from apt_jax.sched.view import Plan, SchedulerView


def _require(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def check_plan(view: SchedulerView, plan: Plan) -> None:
    """Check `plan` against the `view` that it was made from.

    Raises:
        AssertionError: a promise in the docstring of `Plan` is broken; the message says which, and by whom.
    """
    table, rows, preempt = view.table, plan.rows, plan.preempt
    n = rows.size
    _require(
        rows.shape == plan.num_tokens.shape == plan.kind.shape == (n,) and preempt.ndim == 1,
        f"shapes differ: rows {rows.shape}, num_tokens {plan.num_tokens.shape}, kind {plan.kind.shape}",
    )
    for name in ("rows", "num_tokens", "kind", "preempt"):
        dtype = getattr(plan, name).dtype
        expected = np.int8 if name == "kind" else np.int32
        _require(dtype == expected, f"{name} is {dtype}, not {np.dtype(expected)}")
    _require(
        plan.iteration in ("prefill", "decode", "mixed", "idle"),
        f"unknown iteration {plan.iteration!r}",
    )
    _require((plan.iteration == "idle") == (n == 0), f"iteration {plan.iteration!r} with {n} rows")
    _require(np.unique(rows).size == n, f"a row is there twice: {rows.tolist()}")
    _require(
        np.unique(preempt).size == preempt.size, f"a row is preempted twice: {preempt.tolist()}"
    )
    holds = np.isin(rows, view.running)
    unknown = rows[~(holds | np.isin(rows, view.waiting))]
    _require(not unknown.size, f"rows {unknown.tolist()} neither wait nor run")
    _require(table.live[rows].all(), f"rows {rows[~table.live[rows]].tolist()} are not live")
    foreign = preempt[~np.isin(preempt, view.running)]
    _require(not foreign.size, f"rows {foreign.tolist()} hold no cache to preempt")
    both = np.intersect1d(rows, preempt)
    _require(not both.size, f"rows {both.tolist()} are both run and preempted")

    bad = (plan.kind < 0) | (plan.kind >= len(view.kinds))
    _require(
        not bad.any(), f"rows {rows[bad].tolist()} have unknown kinds {plan.kind[bad].tolist()}"
    )
    remaining = view.remaining(rows, plan.kind)
    bad = (plan.num_tokens < 1) | (plan.num_tokens > remaining)
    _require(
        not bad.any(),
        f"rows {rows[bad].tolist()} run {plan.num_tokens[bad].tolist()} tokens of {remaining[bad].tolist()} remaining",
    )
    total = int(plan.num_tokens.sum())
    _require(
        total <= view.max_num_batched_tokens,
        f"{total} tokens in a step of {view.max_num_batched_tokens}",
    )
    seats = view.running.size - preempt.size + int(np.count_nonzero(~holds))
    kept = max(view.max_num_seqs, view.running.size - preempt.size)
    _require(seats <= kept, f"{seats} requests would hold cache, {view.max_num_seqs} may")

    bad = holds & (plan.kind != table.kind[rows])
    _require(not bad.any(), f"rows {rows[bad].tolist()} change their kind while they hold cache")
    bad = ~holds & ~np.array([kind.offered for kind in view.kinds])[plan.kind]
    _require(not bad.any(), f"rows {rows[bad].tolist()} take a kind that is not offered")

    found, shared = table.hit_tokens[rows, plan.kind], table.hit_blocks[rows, plan.kind]
    end = table.num_cached[rows] + found + plan.num_tokens
    held = table.num_blocks[rows] + table.num_shared[rows] + shared
    need = int((view.blocks_for(end, plan.kind) - held).sum())
    have = view.free_blocks + int(table.num_blocks[preempt].sum())
    _require(need <= have, f"{need} blocks needed, {have} at hand")
