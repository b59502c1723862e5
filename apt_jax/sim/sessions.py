"""Sessions: chains of calls, each sent a think time after the answer to the one before.

An agent's session is a chain of calls whose prompts begin with the prompt of an earlier call. Between two calls a tool
or a person works. Subagents are further chains of the same session: the first call of a subagent waits for the last
call of the main chain before it in the file, and the main chain does not wait for the subagent.

    main      call 0 ──answer── think ── call 1 ──answer── think ── call 4 ...
    subagent                                       └─────── call 2 ──answer── think ── call 3

A trace is a trace of sessions if it has the columns `session`, `parent`, `shared_blocks` and `think_s`. The order of a
session's rows is the order of its calls.

| column | |
|---|---|
| `session` | name of the session |
| `request` | number of the call within its session, as used by `parent`; without this column calls count from 0 |
| `subagent` | name of the subagent that makes the call; empty or without this column: the main chain |
| `parent` | number of the earlier call whose prompt begins like this call's; -1: none |
| `shared_blocks` | number of blocks of `block_tokens` tokens at the beginning of both prompts |
| `think_s` | seconds from the answer that the call waits for to the call |
| `stop` | why the answer ended: tool_use (a tool works next), end_turn (a person does) or empty; may be absent |
| `input` | kind of what is new in the prompt, such as text or tool_result; if `stop` is empty everywhere, it tells who worked |

Prompts have no text. `SessionPrompts` makes token ids that are equal exactly where the trace says so.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from apt_jax.costs.model import StepCosts
from apt_jax.errors import ConfigError
from apt_jax.metrics import Percentiles, RequestRecord

COLUMNS = ("session", "parent", "shared_blocks", "think_s")
"""Columns that make a trace a trace of sessions."""
OPTIONAL_COLUMNS = ("request", "subagent", "input", "stop")
Work = Literal["", "tool", "person"]
_WORKS: dict[str, Work] = {"tool_use": "tool", "end_turn": "person"}
BLOCK_TOKENS = 64
"""Prompt tokens per block that `shared_blocks` counts, if nothing else is given."""
_LONGEST_THINK_S = 30 * 86400.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """Sessions of a trace; all arrays have one entry per request.

    The calls of a session are neighbours, and `follows` and `parent` are indices of earlier calls of the same session.
    """

    session: NDArray[np.int32]
    """Number of the session, ascending from 0."""
    follows: NDArray[np.int32]
    """Index of the call whose answer the call waits for; -1: the call begins its session."""
    think_s: NDArray[np.float64]
    """Seconds from that answer to the call."""
    parent: NDArray[np.int32]
    """Index of the call whose prompt begins like the call's; -1: none. Of the same session, but for `beside`."""
    shared_blocks: NDArray[np.int32]
    """Number of blocks at the beginning of both prompts."""
    works: tuple[Work, ...]
    """Kind of work after each answer, as in `EngineRequest.work`."""
    chain: NDArray[np.int32]
    """Number of the main chain (0) or the subagent within the session."""
    common_tokens: int = 0
    """Number of tokens that all prompts without a parent begin with: a system prompt."""

    @property
    def num_sessions(self) -> int:
        return int(self.session[-1]) + 1 if self.session.size else 0

    def chain_id(self, index: int) -> str:
        """Return the `EngineRequest.session_id` of a call: each subagent is a session of its own for the engine."""
        return f"{self.session[index]}.{self.chain[index]}"

    def gaps_s(self) -> NDArray[np.float64]:
        """Return the (n,) seconds from each call's answer to the next call of its chain; inf: none follows."""
        gap_s = np.full(self.think_s.size, np.inf)
        before = self.follows
        same = (before >= 0) & (self.chain == self.chain[before])
        gap_s[before[same]] = self.think_s[same]
        return gap_s

    def beside(self, other: "Calls", block_tokens: int) -> "Calls":
        """Return these calls followed by the calls of another trace. Each trace has its own system prompt: prompts that
        begin with it have the first of them as parent, whatever its session."""
        shift = np.full(other.session.size, self.session.size)
        parents, blocks = [], []
        for part in (self, other):
            begins = part.parent < 0
            begins[:1] = False
            parents.append(np.where(begins, 0, part.parent).astype(np.int32))
            blocks.append(np.where(begins, part.common_tokens // block_tokens, part.shared_blocks).astype(np.int32))
        return Calls(
            session=np.concatenate([self.session, other.session + self.num_sessions]).astype(np.int32),
            follows=np.concatenate([self.follows, _moved(other.follows, shift)]),
            think_s=np.concatenate([self.think_s, other.think_s]),
            parent=np.concatenate([parents[0], _moved(parents[1], shift)]),
            shared_blocks=np.concatenate(blocks),
            works=self.works + other.works,
            chain=np.concatenate([self.chain, other.chain]),
        )

    def begins(self) -> NDArray[np.intp]:
        """Return the index of the first call of each session, and the number of calls at the end."""
        return np.searchsorted(self.session, np.arange(self.num_sessions + 1))

    def take(self, sessions: Sequence[int]) -> tuple["Calls", NDArray[np.intp]]:
        """Return the calls of these sessions, in this order, and the index that each call had; a session may occur
        several times."""
        begins = self.begins()
        parts = [np.arange(begins[s], begins[s + 1]) for s in sessions]
        index = np.concatenate(parts) if parts else np.zeros(0, np.intp)
        sizes = [part.size for part in parts]
        shift = np.repeat(np.cumsum([0, *sizes[:-1]]) - [begins[s] for s in sessions], sizes) if parts else index
        taken = self._pick(index, np.repeat(np.arange(len(parts)), sizes))
        return dataclasses.replace(
            taken, follows=_moved(taken.follows, shift), parent=_moved(taken.parent, shift)
        ), index

    def without(self, removed: NDArray[np.bool_]) -> tuple["Calls", NDArray[np.intp]]:
        """Return the calls without the masked ones and all that would follow these, and the index that each call had."""
        removed = removed.copy()
        for i, before in enumerate(self.follows.tolist()):
            removed[i] |= before >= 0 and bool(removed[before])
        index = np.flatnonzero(~removed)
        new = np.cumsum(~removed) - 1
        _, session = np.unique(self.session[index], return_inverse=True)
        taken = self._pick(index, session)
        lost = (taken.parent >= 0) & removed[taken.parent]
        return dataclasses.replace(
            taken,
            follows=np.where(taken.follows >= 0, new[taken.follows], -1).astype(np.int32),
            parent=np.where((taken.parent >= 0) & ~lost, new[taken.parent], -1).astype(np.int32),
            shared_blocks=np.where(lost, 0, taken.shared_blocks),
        ), index

    def _pick(self, index: NDArray[np.intp], session: NDArray[np.intp]) -> "Calls":
        return Calls(
            session=session.astype(np.int32),
            follows=self.follows[index],
            think_s=self.think_s[index],
            parent=self.parent[index],
            shared_blocks=self.shared_blocks[index],
            works=tuple(self.works[i] for i in index.tolist()),
            chain=self.chain[index],
            common_tokens=self.common_tokens,
        )


def _moved(of: NDArray[np.int32], shift: NDArray[np.intp]) -> NDArray[np.int32]:
    return np.where(of >= 0, of + shift, -1).astype(np.int32)


# --- files -------------------------------------------------------------------------------------------------------------


def read_calls(
    columns: Mapping[str, Sequence[str]], lines: Sequence[int], prompt_tokens: Sequence[int], name: str
) -> tuple[Calls, NDArray[np.intp]]:
    """Read the columns of sessions of a trace file.

    Args:
        columns: cells of the columns of `COLUMNS`, and of those of `OPTIONAL_COLUMNS` that the file has.
        lines: line number of each request in the file.
        prompt_tokens: prompt length of each request.
        name: name of the file, for messages.

    Returns:
        The calls with those of a session together, and the index in the file of each.

    Raises:
        ConfigError: a cell is not valid; the message names the file, the line and the column.
    """

    def refuse(at: int, column: str, must: str) -> ConfigError:
        return ConfigError(f"{name} line {lines[at]}: {column}={columns[column][at].strip()!r:.40} {must} (--trace)")

    def integer(at: int, column: str, low: int) -> int:
        try:
            value = int(columns[column][at])
        except ValueError:
            value = low - 1
        if not low <= value < 2**31:
            raise refuse(at, column, f"must be a whole number of at least {low}")
        return value

    sessions: dict[str, list[int]] = {}
    for at, cell in enumerate(columns["session"]):
        sessions.setdefault(cell.strip(), []).append(at)
    order = [at for rows in sessions.values() for at in rows]
    follows, parents, shared, think_s, chains = [], [], [], [], list[int]()
    for rows in sessions.values():
        base = len(follows)
        numbers: dict[int, int] = {}
        last: dict[str, int] = {}
        known: dict[str, int] = {"": 0}
        for i, at in enumerate(rows):
            number = integer(at, "request", 0) if "request" in columns else i
            if number in numbers:
                raise refuse(at, "request", "occurs twice in its session")
            parent, blocks = integer(at, "parent", -1), integer(at, "shared_blocks", 0)
            if parent >= 0 and parent not in numbers:
                raise refuse(at, "parent", "must be -1 or the number of an earlier call of its session")
            of = -1 if parent < 0 else numbers[parent]
            if blocks and (parent < 0 or blocks > min(prompt_tokens[at], prompt_tokens[order[of]])):
                raise refuse(at, "shared_blocks", "must be 0 without a parent, and at most the length of both prompts")
            try:
                seconds = float(columns["think_s"][at])
            except ValueError:
                seconds = -1.0
            if not 0 <= seconds <= _LONGEST_THINK_S:
                raise refuse(at, "think_s", f"must be from 0 to {_LONGEST_THINK_S:.0f} seconds (30 days)")
            chain = columns["subagent"][at].strip() if "subagent" in columns else ""
            follows.append(last.get(chain, last.get("", -1)))
            if follows[-1] < 0 and i:
                follows[-1] = base  # the main chain begins after a subagent
            chains.append(known.setdefault(chain, len(known)))
            parents.append(of)
            shared.append(blocks)
            think_s.append(seconds)
            numbers[number] = last[chain] = base + i
    works: list[Work] = [_WORKS.get(cell.strip(), "") for cell in columns.get("stop", [""] * len(order))]
    if not any(works):
        inputs = columns.get("input", ())
        for i, (at, before) in enumerate(zip(order, follows, strict=True) if inputs else ()):
            if before >= 0 and chains[i] == chains[before] and (cell := inputs[at].strip()):
                works[order[before]] = "tool" if "tool_result" in cell else "person"
    return Calls(
        session=np.repeat(np.arange(len(sessions)), [len(rows) for rows in sessions.values()]).astype(np.int32),
        follows=np.array(follows, np.int32),
        think_s=np.array(think_s),
        parent=np.array(parents, np.int32),
        shared_blocks=np.array(shared, np.int32),
        works=tuple(works[at] for at in order),
        chain=np.array(chains, np.int32),
    ), np.array(order, np.intp)


def check_shared(
    calls: Calls, prompt_tokens: NDArray[np.int32], lines: Sequence[int], block_tokens: int, name: str
) -> None:
    """Raise `ConfigError` if a call shares more blocks of `block_tokens` tokens than its or its parent's prompt has."""
    shorter = np.minimum(prompt_tokens, np.where(calls.parent >= 0, prompt_tokens[calls.parent], 0))
    wrong = np.flatnonzero(calls.shared_blocks > -(-shorter // block_tokens))
    if wrong.size:
        at = int(wrong[0])
        raise ConfigError(
            f"{name} line {lines[at]}: shared_blocks={calls.shared_blocks[at]} blocks of {block_tokens} tokens are more than {shorter[at]} tokens, the shorter of both prompts (--hash-block-tokens)"
        )


# --- prompts -----------------------------------------------------------------------------------------------------------


class SessionPrompts(Sequence[NDArray[np.int32]]):
    """Token ids of the prompts of calls, made when they are asked for.

    The first `shared_blocks` blocks of a prompt are those of its parent's. Prompts without a parent have the first
    `common_tokens // block_tokens` blocks in common. Other blocks occur in one prompt and its children alone.

    Args:
        calls: the calls.
        prompt_tokens: prompt length of each, after scaling.
        block_tokens: prompt tokens per block, before scaling.
        scale: factor that prompt lengths were scaled with.
    """

    def __init__(
        self, calls: Calls, prompt_tokens: NDArray[np.int32], *, block_tokens: int = BLOCK_TOKENS, scale: float = 1.0
    ) -> None:
        self._lengths = prompt_tokens
        self._per_token = 1.0 / (block_tokens * scale)
        self._blocks: list[NDArray[np.int64]] = []
        start = np.arange(calls.common_tokens // block_tokens)
        num = start.size
        for length, parent, shared in zip(
            prompt_tokens.tolist(), calls.parent.tolist(), calls.shared_blocks.tolist(), strict=True
        ):
            size = int((length - 1) * self._per_token) + 1
            common = self._blocks[parent][: min(shared, size)] if parent >= 0 else start[:size]
            own = size - common.size
            self._blocks.append(np.concatenate([common, np.arange(num, num + own)]))
            num += own

    def __len__(self) -> int:
        return self._lengths.size

    @overload
    def __getitem__(self, index: int) -> NDArray[np.int32]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[np.int32]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.int32] | list[NDArray[np.int32]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = np.arange(self._lengths[index])
        blocks = self._blocks[index][(at * self._per_token).astype(np.intp)]
        return (scramble((blocks << 24 | at & 0xFFFFFF).view(np.uint64)) >> np.uint64(34)).astype(np.int32)


def scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Map 64-bit integers one to one to values without a visible pattern (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# --- results -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionSummary:
    """Sessions of a run. The completion time of a session is the sum of the durations of its calls, each from its
    arrival to its last token: the time that the session waits for the engine."""

    num_sessions: int
    num_calls: int
    num_completed: int
    """Number of sessions whose calls have all completed; only these have completion times."""
    completion_mean_s: float | None
    completion_s: Percentiles
    slowdown_mean: float | None
    """Mean of completion time divided by the time that the same calls take on an idle engine with all that they share
    cached; None: not known."""
    slowdown: Percentiles
    ttft_first_s: Percentiles
    """TTFT of calls without a parent, which share nothing with earlier calls, in seconds."""
    ttft_later_s: Percentiles
    """TTFT of the other calls, in seconds."""


def summarize_sessions(
    calls: Calls, records: Sequence[RequestRecord], alone: NDArray[np.float64] | None
) -> SessionSummary:
    """Return completion times of the sessions of a run.

    Args:
        calls: the calls.
        records: times of each call.
        alone: (n,) seconds that each call takes alone (`alone_s`); None: not known.
    """
    completed = np.array([record.completed for record in records])
    took_s = np.array([r.token_times_s[-1] - r.arrival_s if r.token_times_s else 0.0 for r in records])
    whole = np.bincount(calls.session, ~completed, calls.num_sessions) == 0
    completion_s = np.bincount(calls.session, took_s, calls.num_sessions)[whole]
    slowdown = np.zeros(0)
    if alone is not None:
        slowdown = completion_s / np.bincount(calls.session, alone, calls.num_sessions)[whole]
    ttft = [(record.ttft_s, parent < 0) for record, parent in zip(records, calls.parent.tolist(), strict=True)]
    return SessionSummary(
        num_sessions=calls.num_sessions,
        num_calls=len(records),
        num_completed=int(whole.sum()),
        completion_mean_s=float(completion_s.mean()) if completion_s.size else None,
        completion_s=Percentiles.of(completion_s.tolist()),
        slowdown_mean=float(slowdown.mean()) if slowdown.size else None,
        slowdown=Percentiles.of(slowdown.tolist()),
        ttft_first_s=Percentiles.of(t for t, is_first in ttft if is_first),
        ttft_later_s=Percentiles.of(t for t, is_first in ttft if not is_first),
    )


def alone_s(
    prompt_tokens: NDArray[np.int32],
    output_tokens: NDArray[np.int32],
    shared_tokens: NDArray[np.int64],
    costs: StepCosts,
    step_tokens: int,
) -> NDArray[np.float64]:
    """Return the (n,) seconds that each call takes on an idle engine that has the keys and values of its shared tokens.

    Args:
        prompt_tokens, output_tokens: lengths of each.
        shared_tokens: number of tokens at the beginning of each prompt that need not be computed.
        costs: time of steps.
        step_tokens: maximum number of tokens per step.
    """
    total, cached = prompt_tokens.astype(np.float64), shared_tokens.astype(np.float64)
    new = total - cached
    chunks = np.ceil(new / step_tokens)
    begun = chunks * cached + step_tokens * chunks * (chunks - 1) / 2
    prefill_s = (
        chunks * (costs.prefill_base_s + costs.prefill_per_request_s)
        + costs.prefill_per_token_s * new
        + costs.prefill_per_pair_s * (total**2 - cached**2)
        + costs.prefill_per_kv_prefix_s * begun
    )
    steps = output_tokens - 1.0
    read = steps * (total + 1) + steps * (steps - 1) / 2
    row_s = costs.decode_base_s + costs.decode_per_request_s + costs.experts_read_s(1)
    decode_s = steps * row_s + costs.decode_per_token_s * read
    if window := costs.window_tokens:
        inside = (np.minimum(end, window) * (np.minimum(end, window) + 1) / 2 for end in (total + steps, total))
        beyond = np.maximum(total + steps - window, 0) - np.maximum(total - window, 0)
        decode_s += costs.decode_per_window_token_s * (next(inside) - next(inside) + beyond * window)
    return prefill_s + decode_s
