"""The least that any retention policy must compute again: a bound for calls of sessions at known times.

Prompts are paths of groups, and two prompts begin alike as far as their groups are the same. Between two calls that use
a group it is idle. It may stay on the device, which costs nothing, or be in host memory, from where it is copied, or it
is computed again:

    call a uses g ──────── g is idle: on the device (y), kept at all (y + z), or neither ──────── call b uses g
                  ▲                     ▲
                  a call starts: idle groups on the device <= device - groups of running calls, and
                                 idle groups kept           <= device - groups of running calls + host memory

y and z are shares in [0, 1] of all groups that were last used by the same call and are used next by the same call. A
group is of use only if all groups before it in the prompt are kept too. Groups that leave the device never return before
they are used, so these rows are all that matters: with whole groups (`whole`) the optimum is exact, and without them a
linear program gives a lower bound. With one tier and equal prices each call that is one group, the matrix is one of
intervals, and both are equal.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.lab.optimal.linear_program import LinearProgram
from apt_jax.sim.sessions import Calls


def paths_of(
    calls: Calls, prompt_tokens: NDArray[np.int32], shared_tokens: NDArray[np.int64], group_tokens: int
) -> list[NDArray[np.int64]]:
    """Return the full groups of each call's prompt, the beginning first; equal numbers are equal groups.

    Args:
        calls: the calls.
        prompt_tokens: (n,) prompt lengths.
        shared_tokens: (n,) tokens that a prompt shares with its parent's (`Workload.shared_tokens`).
        group_tokens: tokens per group.
    """
    paths: list[NDArray[np.int64]] = []
    common = np.zeros(0, np.int64)
    num = 0
    sizes, shared = (prompt_tokens // group_tokens).tolist(), (shared_tokens // group_tokens).tolist()
    for parent, size, at_most in zip(calls.parent.tolist(), sizes, shared, strict=True):
        known = (paths[parent] if parent >= 0 else common)[: min(at_most, size)]
        path = np.concatenate([known, np.arange(num, num := num + size - known.size)])
        if parent < 0:
            common = max(common, path[:at_most], key=len)
        paths.append(path)
    return paths


def least_seconds(
    paths: Sequence[NDArray[np.int64]],
    prompt_tokens: NDArray[np.int32],
    begin_s: NDArray[np.float64],
    hold_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    *,
    group_tokens: int,
    prefill_s: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    load_s: float,
    device_groups: int,
    host_groups: int = 0,
    whole: bool = False,
) -> tuple[float, float]:
    """Return a lower bound on the seconds that any retention policy spends on prefixes that were computed before, and
    the seconds that it spends if it keeps nothing.

    They are prefill computed again and copies from host memory; times of calls are as they are, whatever is kept. What
    a call finds because another runs costs nothing in either.

    Args:
        paths: groups of each call's prompt (`paths_of`).
        prompt_tokens: (n,) prompt lengths; the last token of a prompt is always computed.
        begin_s: (n,) times from which each call looks for its prefix no longer.
        hold_s: (n,) times from which each call holds all its groups until `end_s`; inf: not known, it holds none.
        end_s: (n,) ends of the calls.
        group_tokens: tokens per group.
        prefill_s: function that returns the seconds of computing the first tokens of a prompt.
        load_s: seconds per group of a copy from host memory.
        device_groups, host_groups: number of groups that fit.
        whole: whether groups are kept whole; exact, for few calls.
    """
    order = np.argsort(begin_s, kind="stable").tolist()
    last_s = np.full(1 + max((int(path.max(initial=0)) for path in paths), default=0), np.inf)
    program = LinearProgram()
    gaps: list[tuple[float, float, int, int, int]] = []  # from, to, groups, columns of y and z
    nothing_s = 0.0
    for i in order:
        path = paths[i]
        since_s = last_s[path]
        known = int(np.count_nonzero(np.isfinite(since_s)))  # a beginning: who used a group used all before it
        idle = int(np.count_nonzero(since_s[:known] >= begin_s[i]))  # held by a call that runs
        cuts = np.arange(idle, known + 1)
        if not whole and known > idle:
            cuts = cuts[np.concatenate([[True], np.diff(since_s[idle:known]) != 0, [True]])]
        before: dict[int, float] = {}
        took_s = prefill_s(np.minimum(cuts * group_tokens, prompt_tokens[i] - 1).astype(np.float64))
        for k, (begin, end) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
            saved_s, num = float(took_s[k + 1] - took_s[k]), end - begin
            nothing_s += saved_s
            y = program.column(1.0, integer=whole, cost=-saved_s)
            z = program.column(1.0, integer=whole, cost=num * load_s - saved_s)
            program.at_most({y: 1.0, z: 1.0, **before}, 0.0 if before else 1.0)
            before = {y: -1.0, z: -1.0}
            gaps.append((float(since_s[begin]), float(begin_s[i]), num, y, z))
        last_s[path] = np.where(np.isfinite(since_s), np.maximum(since_s, end_s[i]), end_s[i])
    if not gaps:
        return nothing_s, nothing_s
    table = np.array(gaps)
    holds = np.flatnonzero(np.isfinite(hold_s))
    for at_s in np.unique(hold_s[holds]).tolist():
        runs = holds[(hold_s[holds] <= at_s) & (end_s[holds] >= at_s)].tolist()
        held = np.unique(np.concatenate([paths[i] for i in runs])).size
        spare = device_groups - held - int(np.count_nonzero(prompt_tokens[runs] % group_tokens))  # the last is not full
        is_open = table[(table[:, 0] < at_s) & (table[:, 1] > at_s), 2:]
        if is_open[:, 0].sum() > spare:
            program.at_most({int(y): float(num) for num, y, _ in is_open}, float(spare))
        if is_open[:, 0].sum() > spare + host_groups:
            kept = {int(column): float(num) for num, y, z in is_open for column in (y, z)}
            program.at_most(kept, float(spare + host_groups))
    answer = program.solve(None)
    assert answer.success, answer.message
    return nothing_s + float(answer.fun), nothing_s
