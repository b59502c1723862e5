"""Apt-Serve §4.2, §5 and Algorithm 1 of the appendix as plain Python, one request at a time: what `AptPolicy` must
decide.

Written from the paper's text, without a line of `apt_jax.sched` but the state that it reads. Token budget and slots, of
which the paper says nothing, are those of `AptPolicy`'s docstring: the candidates of a prefill iteration are those that
can begin in it.
"""

import dataclasses

from apt_jax.core.kinds import HIDDEN, KV, NO_KIND
from apt_jax.sched import SchedulerView

INF = float("inf")
NEAR_ZERO = 1e-9
LEAST_PENDING_S = 1e-6


@dataclasses.dataclass
class Candidate:
    """One request of W or R."""

    row: int
    p: float
    """Pending time, seconds."""
    m: int
    """Size with keys and values, blocks: always even, half of it is the size with layer inputs."""
    t: float
    """Extra time of the hidden kind, seconds a step."""
    violated: bool
    tokens: int
    """To compute in a prefill iteration."""
    held: int
    kinds: tuple[int, ...]
    """Those with which the pool could ever hold the whole request."""


def read(view: SchedulerView) -> tuple[list[Candidate], list[Candidate]]:
    """W and R of a state without cached prefixes and without partly computed prompts."""
    table = view.table
    rho = view.kinds[HIDDEN].extra_per_token_s
    offered = [kind.offered for kind in view.kinds]

    def candidate(row: int, tokens: int, longest: int) -> Candidate:
        p = max(view.now_s - float(table.last_token_s[row]), LEAST_PENDING_S)
        has_token = table.num_outputs[row] > 0
        slo = table.slo_tbt_s[row] if has_token else table.slo_ttft_s[row]
        groups, whole = -(-tokens // view.block_size), -(-longest // view.block_size)
        kinds = [k for k in (KV, HIDDEN) if offered[k] and whole * (2 - k) <= view.total_blocks] or [
            HIDDEN if offered[HIDDEN] else KV
        ]
        n = int(table.num_tokens[row])
        return Candidate(
            row=row,
            p=p,
            m=2 * groups,
            t=rho * n,
            violated=bool(p > slo),
            tokens=n,
            held=int(table.kind[row]),
            kinds=tuple(kinds),
        )

    def longest(row: int) -> int:
        return int(table.max_tokens_total[row])

    waiting = [candidate(r, min(int(table.num_tokens[r]) + 1, longest(r)), longest(r)) for r in view.waiting.tolist()]
    running = [candidate(r, int(table.num_tokens[r]), longest(r)) for r in view.running.tolist()]
    assert all(c.held == NO_KIND for c in waiting)
    return waiting, running


def scheduling_values(c: Candidate, everybody: int, decay: float) -> dict[int, float]:
    """g by kind, Eq. 8 and the SLO-aware fallback."""
    g = {}
    for kind in c.kinds:
        beta = 1 if kind == HIDDEN and len(c.kinds) > 1 else 0
        g[kind] = c.p - beta * everybody * c.t
    if c.violated and decay == 0:
        return {next(iter(c.kinds)): NEAR_ZERO}
    if c.violated:
        return {kind: decay * value for kind, value in g.items()}
    return g


def marginal_gains(c: Candidate, g: dict[int, float]) -> list[tuple[float, int, int]]:
    """theta, kind and added memory of each candidate schedule of a request (§5)."""
    if set(g) == {KV}:
        return [(g[KV] / c.m, KV, c.m)]
    if set(g) == {HIDDEN}:
        return [(g[HIDDEN] / (c.m // 2), HIDDEN, c.m // 2)]
    to_hidden, to_kv = g[HIDDEN] / (c.m // 2), g[KV] / c.m
    if to_hidden < to_kv:  # "its hidden cache usage is avoided"
        return [(to_kv, KV, c.m)]
    return [
        (to_hidden, HIDDEN, c.m // 2),
        ((g[KV] - g[HIDDEN]) / (c.m - c.m // 2), KV, c.m - c.m // 2),
    ]


def algorithm_1(
    candidates: list[Candidate], values: list[dict[int, float]], memory: int, tokens: float = INF, slots: float = INF
) -> dict[int, int]:
    """Row to kind of the chosen ones. Options larger than M are left out beforehand: Theorem 1 needs it.

    `tokens` and `slots` end the pass at the first schedule that exceeds them, as in the released code."""
    schedules = []
    for position in (0, 1):  # equal gains: first increments before second ones, requests in order
        for i, (c, g) in enumerate(zip(candidates, values, strict=True)):
            drop_oversized = {k: v for k, v in g.items() if (c.m if k == KV else c.m // 2) <= memory}
            gains = marginal_gains(c, drop_oversized) if drop_oversized else []
            if position < len(gains):
                schedules.append((*gains[position], i))
    schedules = [s for s in schedules if s[0] > 0]
    schedules.sort(key=lambda s: -s[0])
    chosen: dict[int, int] = {}
    used, total = 0, 0.0
    for theta, kind, delta, i in schedules:
        if candidates[i].tokens > tokens or slots < 1:
            break
        if used + delta <= memory:
            used += delta
            if candidates[i].row not in chosen:
                tokens -= candidates[i].tokens
                slots -= 1
            total += theta * delta
            chosen[candidates[i].row] = kind
        else:
            if total < theta * delta:
                c = candidates[i]
                chosen = {c.row: KV if KV in values[i] and c.m <= memory else HIDDEN}
            break
    return chosen


@dataclasses.dataclass(frozen=True)
class Decision:
    prefill: bool
    runs: dict[int, int]
    """Row to kind."""
    preempts: frozenset[int]


def decide(
    view: SchedulerView,
    *,
    decay: float = 0.0,
    keep_kind: bool = False,
    prefill_memory: str = "kv",
    count_violated: bool = True,
    in_pass: bool = False,
) -> Decision:
    """One iteration; `in_pass`: the tokens and slots of the step are limits of the greedy pass."""
    waiting, running = read(view)
    everybody = len(waiting) + len(running)
    if not count_violated:
        everybody -= sum(c.violated for c in waiting + running)
    if waiting and (not running or sum(c.p for c in waiting) > sum(c.p for c in running)):
        held = sum(int(view.table.num_blocks[c.row]) for c in running)
        pool = view.free_blocks + held
        if prefill_memory == "kv":
            memory = pool - sum(c.m for c in running)
        else:
            memory = pool - sum(c.m if c.held == KV else c.m // 2 for c in running)
        if memory > 0:
            if in_pass:
                values = [scheduling_values(c, everybody, decay) for c in waiting]
                slots = view.max_num_seqs - len(running)
                runs = algorithm_1(waiting, values, memory, view.max_num_batched_tokens, slots)
            else:
                runs = _prefill(view, waiting, everybody, decay, memory, len(running))
            if runs:
                return Decision(True, runs, frozenset())
    if keep_kind:
        running = [dataclasses.replace(c, kinds=(c.held,)) for c in running]
    values = [scheduling_values(c, everybody, decay) for c in running]
    held = sum(int(view.table.num_blocks[c.row]) for c in running)
    chosen = algorithm_1(running, values, view.free_blocks + held)
    runs = {c.row: c.held for c in running if chosen.get(c.row) == c.held}
    return Decision(False, runs, frozenset(c.row for c in running if c.row not in runs))


def decide_s(view: SchedulerView, *, decay: float = 0.0, step_tokens: int) -> Decision:
    """One iteration of Apt-Serve-S (§6.7): both decisions, and no iteration type."""
    waiting, running = read(view)
    everybody = len(waiting) + len(running)
    pool = view.free_blocks + sum(int(view.table.num_blocks[c.row]) for c in running)
    chosen = algorithm_1(running, [scheduling_values(c, everybody, decay) for c in running], pool)
    goes_on = [c for c in running if chosen.get(c.row) == c.held]
    memory = pool - sum(c.m for c in goes_on)
    tokens = min(step_tokens, view.max_num_batched_tokens) - len(running)
    begins = _prefill(view, waiting, everybody, decay, memory, len(running), tokens)
    runs = {c.row: c.held for c in goes_on} | begins
    return Decision(bool(begins), runs, frozenset(c.row for c in running if c.row not in runs))


def _prefill(
    view: SchedulerView,
    waiting: list[Candidate],
    everybody: int,
    decay: float,
    memory: int,
    num_running: int,
    split: int | None = None,
) -> dict[int, int]:
    """Row to kind of those that begin; `split`: tokens of the step, of which the last prompt takes what is left."""
    if memory <= 0:
        return {}
    values = [scheduling_values(c, everybody, decay) for c in waiting]

    def best(i: int) -> float:
        c = waiting[i]
        return max(g / (c.m if kind == KV else c.m // 2) for kind, g in values[i].items())

    order = sorted(range(len(waiting)), key=lambda i: -best(i))
    tokens = view.max_num_batched_tokens if split is None else split
    slots = view.max_num_seqs - num_running
    begin = []
    for i in order:
        too_long = waiting[i].tokens > tokens if split is None else tokens <= 0
        if best(i) <= 0 or too_long or slots < 1:
            break
        begin.append(i)
        tokens -= waiting[i].tokens
        slots -= 1
    return algorithm_1([waiting[i] for i in begin], [values[i] for i in begin], memory)
