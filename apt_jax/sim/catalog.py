"""Generated workloads by name: agents' sessions, and the workload catalog of inference-perf with its objectives.

`agents` has the distributions of 360 recorded sessions of coding agents (24,108 calls; kv-cache-tester by Callan Fox,
Apache-2.0): for each quantity the quantiles of the recorded values, between which values are interpolated. Kinds of
input and of answer follow each other with the recorded probabilities. tests/sim/test_sessions.py compares both.

The other seven follow the catalog of kubernetes-sigs/inference-perf (Apache-2.0), which gives mean, deviation, bounds
and family of each distribution. All sessions share the system prompt. Draws beyond a bound are set to it, so means differ
from the catalog's: little but for code-generation, whose sessions also end at 900,000 tokens (62 calls where the catalog
has 540). Where it says "bimodal", nearly all values are near the lower bound and the others near the upper one, such
that the mean is the catalog's. For agentic-trace-replay it gives means of recorded traces; its sessions are those of
`agents` with these means.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apt_jax.config import SLO
from apt_jax.sim.sessions import BLOCK_TOKENS, Calls, Work

_NUM_SESSIONS = 400
_NUM_REQUESTS = 4096
_SEED = 20261127

# --- recorded agents ---------------------------------------------------------------------------------------------------

_SHARES = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1)
"""Shares of the values that are at most the numbers of the tables below."""
_CALLS = (3, 3, 4, 4, 6, 12, 20, 28, 41, 60, 77, 104, 155, 231, 236, 291, 439)
"""Calls of the main chain."""
_FIRST = (9690, 10400, 11200, 12600, 15600, 17700, 19200, 20700, 24700, 63100, 89500, 121000, 230000, 335000, 476000, 567000, 791000)  # fmt: skip
"""Tokens of the first prompt; long where an earlier session was resumed."""
_CALLS_BY_FIRST = -0.33
"""Correlation of the logs of both: resumed sessions are shorter."""
_NEW = {
    "tool_result": (97, 147, 163, 193, 233, 320, 421, 539, 701, 928, 1310, 1960, 3570, 6040, 10300, 15900, 224000),
    "text": (31, 126, 147, 179, 213, 309, 389, 482, 580, 734, 1020, 1680, 2900, 5480, 9160, 13500, 95100),
}
"""New tokens of a later prompt by their kind, the answer before them among them."""
_OUTPUT = {
    "tool_use": (35, 72, 79, 95, 109, 128, 149, 174, 210, 263, 347, 510, 900, 1580, 2800, 3600, 16700),
    "end_turn": (2, 13, 20, 40, 90, 220, 300, 360, 420, 482, 565, 680, 920, 1270, 1950, 2400, 7790),
    "": (0, 57, 57, 70, 88, 102, 120, 141, 166, 206, 261, 345, 600, 1200, 2900, 4200, 8140),
}
"""Tokens of an answer by its kind; empty: the client has no kind for it."""
_THINK_S = {
    ("tool_use", "tool_result"): (0, 2, 3, 3, 4, 5, 6, 7, 9, 11, 15, 25, 68, 151, 390, 608, 10400),
    ("tool_use", "text"): (0, 3.1, 4, 4, 4.9, 9, 19.7, 88, 122, 149, 207, 433, 1660, 3040, 3330, 6200, 37400),
    ("end_turn", "text"): (0, 2, 2.2, 4, 8, 46, 101, 174, 264, 430, 805, 1630, 3860, 12200, 39500, 45700, 77600),
    ("", "text"): (0, 0, 0, 11, 15.6, 26, 39, 59, 94, 146, 237, 502, 1180, 2900, 4350, 6510, 6700),
}
"""Seconds between an answer and the next call, by their kinds."""
_ANSWERS = {"text": (2018, 313, 1218), "tool_result": (18470, 981, 669)}
"""Numbers of answers of the kinds of `_OUTPUT` by the kind of the input."""
_WORK: dict[str, Work] = {"tool_use": "tool", "end_turn": "person", "": ""}
_TEXT_AFTER_TOOL_USE = 210 / 20330
_WINDOW, _LIMITS = 200_000, (145_000, 190_000)
"""Sessions that begin below this window are compacted once a prompt would exceed a limit between these."""
_NEVER_COMPACTED = 0.12
"""Share of them whose model has a longer window."""
_COMPACTED_TO = (0.15, 0.65)
"""Length of the prompt after a compaction over the one before."""
_CHANGED = 0.0145
"""Share of the later calls whose prompt otherwise shares less than nine tenths of the prompt before."""
_KEPT = (0, 0, 0, 0.012, 0.046, 0.07, 0.081, 0.098, 0.109, 0.134, 0.17, 0.279, 0.418, 0.54, 0.716, 0.768, 0.837)
"""Share of the prompt before that a compacted or changed prompt begins with."""
_GROWN = (0.7, 0.9, 0.95, 0.97, 0.99, 0.99, 0.99, 1, 1, 1, 1.01, 1.01, 1.04, 1.2, 2, 2.6, 3.2)
"""Length of a changed prompt over that of the prompt before."""
_WITH_SUBAGENTS, _SUBAGENTS = 10 / 360, 3.8
"""Share of the sessions with subagents, and their mean number there."""
_SUBAGENT_CALLS = (2, 3, 3, 5, 6, 7, 8, 10, 11, 12, 13, 15, 20, 24, 24, 24, 24)
_SUBAGENT_FIRST = (8870, 8920, 8970, 9020, 9600, 9870, 9940, 10200, 10400, 11000, 11700, 11700, 13300, 17100, 18300, 18300, 18300)  # fmt: skip
_LONGEST = 900_000


class Generated(NamedTuple):
    """Fields of a `Trace`."""

    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    block_tokens: int
    calls: Calls | None = None
    hash_ids: Sequence[NDArray[np.int64]] | None = None


class _Sessions:
    """Calls of sessions as they are made.

    Args:
        block_tokens: tokens per shared block.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self.block_tokens = block_tokens
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.rows: list[tuple[int, int, float, int, int]] = []
        self.works: list[Work] = []
        self.chains: list[int] = []

    def add(
        self, session: int, prompt: float, output: float, *, follows: int = -1, think_s: float = 0.0, parent: int = -1,
        shared: float = 0.0, work: Work = "", chain: int = 0,
    ) -> int:  # fmt: skip
        """Add a call whose prompt begins with `shared` tokens of its parent's, and return its index."""
        blocks = int(shared) // self.block_tokens
        self.prompt.append(max(min(round(prompt), _LONGEST), blocks * self.block_tokens + 1))
        self.output.append(max(round(output), 1))
        self.rows.append((session, follows, think_s, parent, blocks))
        self.works.append(work)
        self.chains.append(chain)
        return len(self.rows) - 1

    def all(self, common_tokens: int = 0) -> Generated:
        session, follows, think_s, parent, blocks = (np.array(column) for column in zip(*self.rows, strict=True))
        assert (np.unique(session) == np.arange(session[-1] + 1)).all(), "a session has no calls"
        return Generated(
            prompt_tokens=np.array(self.prompt, np.int32),
            output_tokens=np.array(self.output, np.int32),
            block_tokens=self.block_tokens,
            calls=Calls(
                session=session.astype(np.int32),
                follows=follows.astype(np.int32),
                think_s=think_s.astype(np.float64),
                parent=parent.astype(np.int32),
                shared_blocks=blocks.astype(np.int32),
                works=tuple(self.works),
                chain=np.array(self.chains, np.int32),
                common_tokens=common_tokens,
            ),
        )


def _quantile(table: Sequence[float], u: float) -> float:
    """Return the quantile `u` of a table, interpolated in the log."""
    i = min(bisect.bisect_right(_SHARES, u), len(_SHARES) - 1)
    low, high = math.log1p(table[i - 1]), math.log1p(table[i])
    return math.expm1(low + (high - low) * (u - _SHARES[i - 1]) / (_SHARES[i] - _SHARES[i - 1]))


def _agents(of: "_Means") -> Generated:
    """Generate sessions of agents."""
    rng = np.random.default_rng([_SEED, 0])
    made = _Sessions()
    normal = rng.multivariate_normal([0, 0], [[1, _CALLS_BY_FIRST], [_CALLS_BY_FIRST, 1]], _NUM_SESSIONS)
    shares = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))(normal)
    for session in range(_NUM_SESSIONS):
        num = max(round(of.calls * _quantile(_CALLS, shares[session, 0])), 1)
        chain = _chain(made, rng, of, session, num, of.prompt * _quantile(_FIRST, shares[session, 1]))
        if rng.random() >= _WITH_SUBAGENTS:
            continue
        # A subagent's calls come after the call of the main chain that begins it. They are few: their place in the
        # order does not matter to anything but `follows`.
        first = -1
        for subagent in range(1, 2 + rng.poisson(_SUBAGENTS - 1)):
            size = _quantile(_SUBAGENT_FIRST, rng.random()) * of.prompt
            begun_by = chain[int(rng.integers(len(chain)))]
            num = round(_quantile(_SUBAGENT_CALLS, rng.random()))
            calls = _chain(made, rng, of, session, num, size, follows=begun_by, parent=first, chain=subagent)
            first = calls[0]
    return made.all()


def _chain(
    made: _Sessions, rng: np.random.Generator, of: "_Means", session: int, num: int, first: float, *, follows: int = -1, parent: int = -1,
    chain: int = 0,
) -> list[int]:  # fmt: skip
    """Add `num` calls, each following the one before, and return their indices.

    Args:
        first: tokens of the first prompt.
        follows: call whose answer the first call waits for; -1: none.
        parent: call with the same system prompt, which the first prompt begins with; -1: none.
        chain: number of the chain within its session.
    """
    kind, prompt, shared, think_s, made_calls = "text", first, 0.0, 0.0, list[int]()
    if parent >= 0:
        shared = 0.9 * min(first, made.prompt[parent])
    limit = of.prompt * rng.uniform(*_LIMITS)
    if first >= of.prompt * _WINDOW or rng.random() < _NEVER_COMPACTED:
        limit = math.inf
    for _ in range(num):
        answers = np.array(_ANSWERS[kind])
        answer = ("tool_use", "end_turn", "")[int(rng.choice(3, p=answers / answers.sum()))]
        output = of.output * _quantile(_OUTPUT[answer], rng.random())
        at = made.add(
            session, prompt, output, follows=follows, think_s=think_s, parent=parent, shared=shared,
            work=_WORK[answer], chain=chain,
        )  # fmt: skip
        made_calls.append(at)
        prompt = made.prompt[at]
        kind = "tool_result" if answer == "tool_use" and rng.random() >= _TEXT_AFTER_TOOL_USE else "text"
        think_s = of.think * _quantile(_THINK_S[answer, kind], rng.random())
        follows = parent = at
        later = prompt - prompt % made.block_tokens + of.prompt * _quantile(_NEW[kind], rng.random())
        is_over, shared = later > limit, float(prompt)
        if is_over or rng.random() < _CHANGED:
            shared *= _quantile(_KEPT, rng.random())
            later = prompt * (rng.uniform(*_COMPACTED_TO) if is_over else _quantile(_GROWN, rng.random()))
        prompt = max(later, shared + 1)
    return made_calls


@dataclasses.dataclass(frozen=True)
class _Means:
    """Factors on the recorded values of `agents`."""

    calls: float = 1.0
    prompt: float = 1.0
    output: float = 1.0
    think: float = 1.0


# --- the catalog -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Values:
    """A distribution as the catalog describes it."""

    low: float
    high: float
    mean: float
    deviation: float = 0.0
    family: Literal["log_normal", "normal", "exponential", "uniform", "bimodal"] = "normal"

    def draw(self, rng: np.random.Generator, num: int) -> NDArray[np.float64]:
        if self.family == "log_normal":
            sigma = math.sqrt(math.log1p((self.deviation / self.mean) ** 2))
            values = rng.lognormal(math.log(self.mean) - sigma**2 / 2, sigma, num)
        elif self.family == "exponential":
            values = self.low + rng.exponential(self.mean - self.low, num)
        elif self.family == "uniform":
            values = rng.uniform(self.low, self.high, num)
        elif self.family == "bimodal":
            near = rng.uniform(1.0, 1.3, num)  # both modes have some width
            share = (self.mean - 1.15 * self.low) / (self.high / 1.15 - 1.15 * self.low)
            values = np.where(rng.random(num) < share, self.high / near, self.low * near)
        else:
            values = rng.normal(self.mean, self.deviation, num)
        return np.clip(values, self.low, self.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Workload:
    """An entry of the catalog. The first prompt of a session is the system prompt and `prompt`; each later one is all
    before it, the answer and `added`."""

    prompt: _Values
    output: _Values
    system: int
    slo: SLO
    turns: _Values = _Values(1, 1, 1)
    think_s: _Values = _Values(0, 0, 0)
    added: _Values = _Values(0, 0, 0)


_CATALOG = {
    "interactive-chat": _Workload(
        prompt=_Values(500, 15000, 4000, 2500, "log_normal"), output=_Values(10, 1000, 300, 150), system=1000,
        turns=_Values(1, 15, 4, 2.5, "log_normal"), think_s=_Values(5, 300, 45, 40, "log_normal"),
        added=_Values(10, 1000, 50, 40, "log_normal"), slo=SLO(ttft_s=1.0, tbt_s=0.05),
    ),
    "reasoning": _Workload(
        prompt=_Values(100, 5000, 1000, 800, "log_normal"), output=_Values(500, 32000, 8000, 6500, "exponential"),
        system=250, slo=SLO(ttft_s=2.0, tbt_s=0.1),
    ),
    "deep-research": _Workload(
        prompt=_Values(2000, 150000, 45000, 35000, "exponential"), output=_Values(50, 4000, 300, 850, "bimodal"),
        system=2000, turns=_Values(2, 50, 15, 8.5), think_s=_Values(5, 60, 25, 12),
        added=_Values(500, 15000, 3000, 2500, "log_normal"), slo=SLO(ttft_s=10.0, tbt_s=0.1),
    ),
    "code-generation": _Workload(
        prompt=_Values(10000, 990000, 160000, 233600, "log_normal"), output=_Values(50, 10000, 425, 825, "log_normal"),
        system=3000, turns=_Values(1, 3000, 540, 48600, "log_normal"), think_s=_Values(1, 1000, 15, 55, "log_normal"),
        added=_Values(100, 10000, 1500, 1200, "log_normal"), slo=SLO(ttft_s=30.0, tbt_s=0.1),
    ),
    "batch-summarization-rag": _Workload(
        prompt=_Values(1000, 80000, 15000, 22000, "bimodal"), output=_Values(50, 2000, 500, 300), system=500,
        slo=SLO(ttft_s=15.0, tbt_s=0.15, e2e_s=630.0),
    ),
    "batch-synthetic-data": _Workload(
        prompt=_Values(50, 15000, 500, 1200, "log_normal"), output=_Values(500, 8000, 4000, 2500, "uniform"),
        system=2000, slo=SLO(e2e_s=2080.0),
    ),
}  # fmt: skip
_REPLAY = "agentic-trace-replay"
_REPLAY_MEANS = _Means(calls=0.3, prompt=0.59, output=1.4, think=0.053)
"""Such that the means are the catalog's."""

OBJECTIVES: dict[str, SLO] = {name: workload.slo for name, workload in _CATALOG.items()}
"""Objectives of the catalog's workloads that have some. It states percentiles over requests; here they are objectives of
each request."""
NAMES = ("agents", _REPLAY, *_CATALOG)
OF_SESSIONS = ("agents", _REPLAY, *(name for name, workload in _CATALOG.items() if workload.turns.high > 1))
"""Names of the traces of sessions."""


def generate(name: str) -> Generated:
    """Return the requests of the workload of this name, which is one of `NAMES`."""
    if name == "agents":
        return _agents(_Means())
    if name == _REPLAY:
        return _agents(_REPLAY_MEANS)
    of = _CATALOG[name]
    rng = np.random.default_rng([_SEED, 1 + list(_CATALOG).index(name)])
    if of.turns.high == 1:
        prompt, output = of.prompt.draw(rng, _NUM_REQUESTS), of.output.draw(rng, _NUM_REQUESTS)
        system = np.arange(of.system // _SYSTEM_BLOCK)
        return Generated(
            prompt_tokens=(of.system + np.rint(prompt)).astype(np.int32),
            output_tokens=np.rint(output).astype(np.int32),
            hash_ids=[system] * _NUM_REQUESTS,
            block_tokens=_SYSTEM_BLOCK,
        )
    made = _Sessions()
    turns = np.rint(of.turns.draw(rng, _NUM_SESSIONS)).astype(int)
    for session, (num, first) in enumerate(
        zip(turns.tolist(), of.prompt.draw(rng, _NUM_SESSIONS).tolist(), strict=True)
    ):
        output, think_s, added = (values.draw(rng, num).tolist() for values in (of.output, of.think_s, of.added))
        at, prompt = -1, min(of.system + first, _LONGEST)
        for turn in range(num):
            if at >= 0:
                prompt = made.prompt[at] + made.output[at] + added[turn]
            if prompt > _LONGEST:
                break
            at = made.add(
                session, prompt, output[turn], follows=at, parent=at, think_s=think_s[turn] if at >= 0 else 0.0,
                shared=made.prompt[at] if at >= 0 else 0.0, work="tool" if of.turns.high > 15 else "person",
            )  # fmt: skip
    return made.all(of.system)


_SYSTEM_BLOCK = 250
"""Tokens per identified block of prompts without later turns; divides all their system prompts."""
