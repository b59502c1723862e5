"""The graph of a request's states; each arc is a transition that the request can make in one batch."""

import collections
from typing import NamedTuple

from apt_jax.core.kinds import NO_KIND
from apt_jax.lab.optimal.problem import OptimalProblem, OptimalRequest

MAX_VARIABLES = 200_000
"""Maximum number of arcs in a program, summed over requests and batches."""
State = tuple[int, int, int]
"""Tokens generated, tokens cached, kind."""


class Arc(NamedTuple):
    """One possible transition of a request in a batch, from one state to another."""

    source: State
    target: State
    c: int
    blocks: int
    """Blocks held during the batch, the computed tokens included."""
    phase: int
    """0: does not run; 1: prefill; 2: decode (as `StepCosts` distinguishes them)."""
    generates: bool
    evicts: bool
    kind: int
    """Cache kind held during the batch."""


def arcs_of(problem: OptimalProblem, request: OptimalRequest) -> list[Arc]:
    """Return the arcs of a request's state graph (Eqs. 1 to 3)."""
    offered = [k for k, s in enumerate(problem.kinds) if s.offered]
    start, done = (0, 0, NO_KIND), (request.output_tokens, 0, NO_KIND)
    arcs = [Arc(done, done, 0, 0, 0, False, False, NO_KIND)]
    seen, todo = {start, done}, [start]
    while todo:
        state = todo.pop()
        generated, m, kind = state
        length = request.prompt_tokens + generated
        held = problem.blocks(m, kind) if m else 0
        out = [Arc(state, state, 0, held, 0, False, False, kind)]
        if m and problem.eviction and m >= request.prompt_tokens + max(generated - 1, 0):
            # Evicting a request before it has used its prefill never helps, because that prefill could be omitted.
            out.append(Arc(state, (generated, 0, NO_KIND), 0, 0, 0, False, True, NO_KIND))
        for k in [kind] if m else offered:
            for c in _pieces(problem, m, length):
                blocks = problem.blocks(m + c, k)
                if blocks > problem.capacity_blocks or c > problem.max_num_batched_tokens:
                    continue
                phase = 2 if c == 1 and m else 1
                if phase == 1 and problem.chunk is not None and c > problem.chunk:
                    continue
                generates = m + c == length
                after: State = (generated + generates, m + c, k)
                if after[0] == request.output_tokens:
                    after = done
                out.append(Arc(state, after, c, blocks, phase, generates, False, k))
        arcs += out
        for arc in out:
            if arc.target not in seen:
                seen.add(arc.target)
                todo.append(arc.target)
        if len(arcs) > MAX_VARIABLES:
            break
    return arcs


def _pieces(problem: OptimalProblem, m: int, length: int) -> list[int]:
    if problem.chunk is None or length - m == 1:
        return [length - m]
    step = problem.chunk_step
    ends = range((m // step + 1) * step, min(length - 1, m + problem.chunk) + 1, step)
    return [*(end - m for end in ends), *([length - m] if length - m <= problem.chunk else [])]


def distances(arcs: list[Arc], root: State, *, backwards: bool) -> dict[State, int]:
    """Return the minimum number of batches from `root` to each state, or `backwards` from each state to `root`."""
    near = collections.defaultdict(list)
    for arc in arcs:
        a, b = (arc.target, arc.source) if backwards else (arc.source, arc.target)
        near[a].append(b)
    distance, queue = {root: 0}, collections.deque([root])
    while queue:
        a = queue.popleft()
        for b in near[a]:
            if b not in distance:
                distance[b] = distance[a] + 1
                queue.append(b)
    return distance
