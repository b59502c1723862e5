"""Policies from outside the package, as `--scheduling-policy outside_policies:Class` takes them: good ones, and broken
ones."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from apt_jax.sched import HIDDEN, INTERFACE_VERSION, FcfsPolicy, Plan, SchedulerView


class Latest:
    """First come, first served, in the other order."""

    name = "latest"
    interface_version = INTERFACE_VERSION

    def __init__(self, seed: int, *, most: int | None = None, first: Literal["a", "b"] = "a") -> None:
        self.fcfs = FcfsPolicy()
        self.seed, self.most, self.first = seed, most, first

    def schedule(self, view: SchedulerView) -> Plan:
        return self.fcfs.schedule(dataclasses.replace(view, waiting=view.waiting[::-1][: self.most]))


def _changed(**values: Any) -> Callable[[SchedulerView, Plan], Any]:
    """Breaks a plan: the last element of these fields becomes another one, or all of them where it is a function."""

    def change(view: SchedulerView, plan: Plan) -> Any:
        new = {n: v(getattr(plan, n)) if callable(v) else v for n, v in values.items()}
        for name, value in new.items():
            if isinstance(value, int):
                column = getattr(plan, name).copy()
                column[-1:] = value
                new[name] = column
        return dataclasses.replace(plan, **new)

    return change


def _twice(view: SchedulerView, plan: Plan) -> Plan:
    columns = {n: np.append(getattr(plan, n), getattr(plan, n)[-1:]) for n in ("rows", "num_tokens", "kind")}
    return dataclasses.replace(plan, **columns)


def _everything(view: SchedulerView, plan: Plan) -> Plan:
    """All who wait at once, however much that is; `Broken` asks for it where it breaks something."""
    rows = view.waiting
    return Plan(
        rows=rows,
        num_tokens=view.remaining(rows),
        kind=np.zeros(rows.size, np.int8),
        preempt=view.running,
        iteration="prefill" if rows.size else "idle",
    )


def _write(view: SchedulerView, plan: Plan) -> Plan:
    view.table.num_tokens[view.waiting[:1]] = 1
    view.table.kind[view.running[:1]] = HIDDEN
    view.table.num_cached[:] = 0
    return plan


def _raise(view: SchedulerView, plan: Plan) -> Plan:
    raise ZeroDivisionError("no reason")


def _exit(view: SchedulerView, plan: Plan) -> Plan:
    raise SystemExit(3)


BROKEN: dict[str, Callable[[SchedulerView, Plan], Any]] = {
    "raises": _raise,
    "exits": _exit,
    "raises in lookup": lambda view, plan: [][0],
    "nothing": lambda view, plan: None,
    "words": lambda view, plan: "run all",
    "lists": _changed(rows=lambda rows: rows.tolist()),
    "wide integers": _changed(rows=lambda rows: rows.astype(np.int64)),
    "floats": _changed(num_tokens=lambda tokens: tokens.astype(np.float32)),
    "two dimensions": _changed(rows=lambda rows: rows[:, None]),
    "fewer kinds": _changed(kind=lambda kind: kind[:-1]),
    "preempts in two dimensions": _changed(preempt=lambda rows: rows[None]),
    "unknown row": _changed(rows=10_000),
    "row before the first": _changed(rows=-1),
    "dead row": _changed(rows=200),
    "row twice": _twice,
    "no tokens": _changed(num_tokens=0),
    "tokens before none": _changed(num_tokens=-5),
    "too many tokens": _changed(num_tokens=1000),
    "too many tokens to count": _changed(num_tokens=2**31 - 1),
    "unknown kind": _changed(kind=7),
    "no kind": _changed(kind=-1),
    "preempts a stranger": _changed(preempt=lambda rows: np.append(rows, np.int32(200))),
    "preempts before the first": _changed(preempt=lambda rows: np.append(rows, np.int32(-300))),
    "preempts what runs": lambda view, plan: dataclasses.replace(plan, preempt=plan.rows),
    "preempts twice": lambda view, plan: dataclasses.replace(plan, preempt=np.repeat(view.running[:1], 2)),
    "converts a stranger": _changed(convert=lambda rows: np.array([200], np.int32)),
    "converts before the first": _changed(convert=lambda rows: np.array([-1], np.int32)),
    "converts keys and values": lambda view, plan: dataclasses.replace(plan, convert=plan.rows),
    "converts lists": _changed(convert=lambda rows: []),
    "unknown iteration": _changed(iteration="lunch"),
    "iteration of another type": _changed(iteration=None),
    "idle with rows": _changed(iteration="idle"),
    "everything at once": _everything,
    "writes to the table": _write,
    "adds a request": lambda view, plan: view.table.add(arrival_s=0, rank=0, prompt_len=1, max_tokens=1, slo_ttft_s=1, slo_tbt_s=1),
    "removes a request": lambda view, plan: view.table.remove(int((*view.waiting, *view.running)[0])),
    "delivers tokens": lambda view, plan: view.table.record_tokens(view.running, 1.0) or 0,
    "nothing is run": lambda view, plan: Plan.idle(),
}  # fmt: skip
"""Ways to break a promise, by name."""


class Broken:
    """`fcfs` that breaks one promise.

    Args:
        promise: of `BROKEN`.
        every: in every so manieth call, from the second one on where it is 2 and so on.
    """

    name = "broken"
    interface_version = INTERFACE_VERSION

    def __init__(self, promise: str = "raises", every: int = 1) -> None:
        self.fcfs = FcfsPolicy()
        self.promise, self.every = promise, every
        self.num_calls = self.num_broken = 0

    def schedule(self, view: SchedulerView) -> Plan:
        self.num_calls += 1
        plan = self.fcfs.schedule(view)
        if self.num_calls % self.every:
            return plan
        self.num_broken += 1
        return BROKEN[self.promise](view, plan)


class NoVersion:
    """Written for no version."""

    name = "no-version"

    def schedule(self, view: SchedulerView) -> Plan:
        return Plan.idle()


class OtherVersion(NoVersion):
    """Written for the next one."""

    interface_version = INTERFACE_VERSION + 1


class NoName:
    """Has no name."""

    interface_version = INTERFACE_VERSION

    def schedule(self, view: SchedulerView) -> Plan:
        return Plan.idle()


class NoSchedule:
    """Decides nothing."""

    name = "no-schedule"
    interface_version = INTERFACE_VERSION


class CannotBeMade(Latest):
    """Wants more than it is given."""

    def __init__(self, path: str = "") -> None:
        raise OSError(f"{path or 'a file'} is missing")


class WithFunction(Latest):
    """Has an argument that no text stands for."""

    def __init__(self, order: Callable[[], int] = int) -> None:
        super().__init__(0)


not_a_class = Latest(0)
