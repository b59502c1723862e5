"""An executor whose memory can be looked at: every wrong, stale or foreign block changes the tokens.

Its device memory is the pool itself: each slot of each block records which token at which position was written there,
and as what (K, V or X). The next token of a row is a hash of the (token, position) pairs that it *reads back* through
the block table that the engine gave it. `reference_tokens` computes the same stream without any cache, so a stream that
went through chunks, preemptions, kind switches and overlapping steps must equal it bit for bit
(docs/lab/testing.md: three of nine planted bugs break no accounting rule and show only here). Where a row has
a mask, the next allowed token after the hash is taken, and `reference_tokens` does the same with the request's grammar.

Steps take effect at `execute`, in order; their tokens come with `StepHandle.result`. Faults can be planted with a
function that is asked before each step.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV, WindowSpec
from apt_jax.core.step import NO_TOKEN, NULL_BLOCK, TOKEN_ON_DEVICE, PoolSpan, PromptTargets, StepBatch, StepResult
from apt_jax.request import Grammar, PromptLogprobs, SamplingParams
from apt_jax.utils.clock import VirtualClock

_TAG_NONE = 0
_TAG_K = 1
_TAG_V = 2
_TAG_X = 3
_TAG_W = 4

_STALE_TOKEN = 0x5A5A5A
"""Token in slots that nothing has written since the pool was made."""

_ADAPTER = 1 << 40
"""Added to what a request with the first adapter caches, twice with the second, and so on."""


class BatchContractError(AssertionError):
    """A `StepBatch` that breaks what `apt_jax.executor` promises about it."""


class FaultKind(enum.Enum):
    """Faults of a step."""

    RAISE_BEFORE = "execute raises, nothing was written"
    OUT_OF_MEMORY = "execute raises for lack of memory, nothing was written"
    RAISE_AFTER = "execute raises, everything was written"
    RAISE_IN_SAMPLE = "sample raises, where the step has masks"
    RAISE_IN_RESULT = "result raises"
    NOT_FINITE = "one row's logits are not finite, nor is what it wrote"
    BAD_TOKEN = "one row's token is outside the vocabulary"
    PARTIAL = "the result misses its last row"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one step; `row` where it concerns one row."""

    kind: FaultKind
    row: int = 0


def _at(
    entries: NDArray[np.int32], slots: NDArray[np.integer], sizes: NDArray[np.integer] | int
) -> tuple[NDArray[np.int32], NDArray[np.integer]]:
    """Block and slot of positions that are the `slots`-th of their group, by entries of block tables."""
    return np.abs(entries), np.where(entries < 0, sizes - 1 - slots, slots)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection that spreads every bit; arrays only, they wrap without a warning."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _pairs(tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One hash a (token, position) pair; their sum stands for the sequence, in whatever order it was read."""
    return _mix(
        tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        + positions.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
        + np.uint64(1)
    )


def _draw(
    sums: NDArray[np.uint64],
    position: NDArray[np.int32],
    params: Sequence[SamplingParams],
    vocab_size: int,
    allowed: Mapping[int, NDArray[np.bool_]] | None = None,
) -> NDArray[np.int32]:
    """Tokens from the sequences' hashes; seed and output position count unless the request is greedy.

    Without a mask a stop token may come before `min_tokens`, which real executors forbid: the engine must not heed it.

    Args:
        allowed: (vocab_size,) for rows of which only some tokens may come; -1 where none is left.
    """
    salt = np.array([0 if p.is_greedy else ((p.seed or 0) << 1) + 1 for p in params], np.uint64)
    state = _mix(sums + _mix(salt * np.uint64(0xA0761D6478BD642F) + position.astype(np.uint64) + np.uint64(7)))
    tokens = (state % np.uint64(vocab_size)).astype(np.int32)
    for i, p in enumerate(params):
        if allowed is not None and i in allowed:
            left = allowed[i].copy()
            left[[t for t in p.stop_token_ids if p.min_tokens > position[i] and t < left.size]] = False
            ids = np.flatnonzero(left)
            place = int(np.searchsorted(ids, tokens[i]))
            tokens[i] = ids[place % ids.size] if ids.size else -1
    return tokens


def _unpacked(mask: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    bits = np.unpackbits(np.ascontiguousarray(mask, "<i4").view(np.uint8), bitorder="little")
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[: bits.size] = bits[:vocab_size]
    return allowed


def reference_tokens(
    prompt: Sequence[int] | NDArray[np.integer],
    num_tokens: int,
    *,
    vocab_size: int,
    params: SamplingParams | None = None,
    grammar: Grammar | None = None,
    adapter: int = 0,
) -> list[int]:
    """The first `num_tokens` tokens after `prompt`, computed without a cache.

    With `params` the stream ends after a stop token, as the engine's does; `max_tokens` bounds it too. With `grammar`
    it ends where nothing may follow.
    """
    stop: frozenset[int] = frozenset()
    if params is None:
        params = SamplingParams(temperature=0.0)
    else:
        num_tokens, stop = min(num_tokens, params.max_tokens), frozenset(params.stop_token_ids)
    known = np.asarray(prompt, np.int64) + adapter * _ADAPTER
    total = np.add.reduce(_pairs(known, np.arange(known.size)), keepdims=True)
    out: list[int] = []
    constraint = None if grammar is None else grammar.start()
    for i in range(num_tokens):
        allowed: dict[int, NDArray[np.bool_]] = {}
        if constraint is not None:
            mask = np.zeros(-(-vocab_size // 32), np.int32)
            if not constraint.fill_mask(mask):
                break
            allowed[0] = _unpacked(mask, vocab_size)
        token = int(_draw(total, np.array([i], np.int32), [params], vocab_size, allowed)[0])
        out.append(token)
        if token in stop and i + 1 >= params.min_tokens:
            break
        if constraint is not None:
            constraint.accept(token)
            if constraint.ended:
                break
        total = total + _pairs(np.array([token + adapter * _ADAPTER]), np.array([known.size + i]))
    return out


def _scored(sums: NDArray[np.uint64], token_ids: NDArray[np.int32]) -> PromptLogprobs:
    """Log probabilities of tokens after sequences with these hashes, by a hash of both."""
    state = _mix(sums + token_ids.astype(np.uint64) * np.uint64(0xA24BAED4963EE407))
    steps = np.arange(1, 21, dtype=np.float32)
    return PromptLogprobs(
        logprob=-(state % np.uint64(4096)).astype(np.float32) / np.float32(256),
        rank=1 + (state % np.uint64(31)).astype(np.int32),
        top_ids=((state % np.uint64(97)).astype(np.int32)[:, None] + np.arange(20, dtype=np.int32)),
        top_logprobs=-(state % np.uint64(13)).astype(np.float32)[:, None] - steps,
    )


def _states(token_ids: NDArray[np.integer]) -> NDArray[np.float32]:
    """(T, 4) hidden states of tokens."""
    return (np.asarray(token_ids, np.int64)[:, None] * (1, 3, 5, 7) % (11, 13, 17, 19)).astype(np.float32) - 4


def reference_embedding(prompt: NDArray[np.integer], pooling: str) -> NDArray[np.float32]:
    """(4,) pooled states of a prompt, not normalised."""
    states = _states(prompt)
    return states[-1] if pooling == "last" else states.sum(axis=0) / np.float32(len(states))


def reference_prompt_logprobs(prompt: NDArray[np.integer]) -> PromptLogprobs:
    """Log probabilities of all tokens of a prompt but the first, computed without a cache."""
    known = np.asarray(prompt, np.int64)
    sums = np.cumsum(_pairs(known, np.arange(known.size)), dtype=np.uint64)
    return _scored(sums[:-1], known[1:].astype(np.int32))


@dataclasses.dataclass(slots=True)
class _Handle:
    """A step whose tokens are known and not yet delivered."""

    executor: "FakeExecutor"
    outcome: StepResult | Exception
    ready_s: float

    def result(self) -> StepResult:
        if self.executor.clock is not None:
            self.executor.clock.advance_to(self.ready_s)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclasses.dataclass(slots=True)
class _MaskedHandle:
    """A step that waits for its masks."""

    executor: "FakeExecutor"
    batch: StepBatch
    tokens: NDArray[np.int64]
    fault: Fault | None
    handle: _Handle | None = None

    def sample(self, masks: NDArray[np.int32]) -> None:
        rows = self.batch.masked
        if rows is None or self.handle is not None or masks.ndim != 2 or len(masks) != len(rows):
            raise BatchContractError("masks for other rows, or twice")
        self.executor._waiting = False
        if self.fault is not None and self.fault.kind is FaultKind.RAISE_IN_SAMPLE:
            self.executor._broken = True
            raise RuntimeError("planted: before the step was sampled")
        pairs = zip(rows.tolist(), masks, strict=True)
        allowed = {row: _unpacked(mask, self.executor.vocab_size) for row, mask in pairs}
        self.handle = self.executor._finished(self.batch, self.tokens, self.fault, allowed)

    def result(self) -> StepResult:
        if self.handle is None:
            raise BatchContractError("a step with masked rows was not sampled")
        return self.handle.result()


@dataclasses.dataclass
class FakeHostMemory:
    """Host memory of a `FakeExecutor`, a `HostMemory` for the engine.

    Attributes:
        memory: (3, num_blocks + 1, C) tokens, positions and tags.
        good: (num_blocks + 1,) False: nothing was saved here, or it is lost.
        lost: asked for each block that is saved whether the transfer fails; None: none does.
    """

    memory: NDArray[np.int64]
    good: NDArray[np.bool_]
    lost: Callable[[], bool] | None
    num_saved: int = 0
    num_loaded: int = 0
    num_saved_slots: int = 0
    num_loaded_slots: int = 0
    device: Callable[[], Sequence[NDArray]] | None = None
    """The memories of the device."""

    def __post_init__(self) -> None:
        self.good_slots = np.zeros(self.memory.shape[1:], np.bool_)

    @property
    def num_blocks(self) -> int:
        return self.good.size - 1

    @property
    def block_bytes(self) -> int:
        return 100

    def ready_to_load(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        return self.good[blocks]

    def spoil(self, blocks: NDArray[np.integer]) -> None:
        """Change what is in these blocks: their checksums differ from now on."""
        self.memory[:, blocks] = _STALE_TOKEN
        self.good[blocks] = False

    def save(self, pairs: NDArray[np.int32], memories: Sequence[NDArray]) -> None:
        device, host = pairs.T
        for own, memory in zip(self.memory, memories, strict=True):
            own[host] = memory[device]
        self.good[host] = True
        self.num_saved += host.size
        if self.lost is not None:
            self.spoil(np.array([block for block in host.tolist() if self.lost()], np.int32))

    def save_now(self, saves: NDArray[np.int32]) -> None:
        assert self.device is not None
        self.save(saves, self.device())

    def slots_ready(self, spans: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.array([self.good_slots[block, first : first + n].all() for block, first, n, _ in spans.tolist()])

    def save_slots(self, spans: NDArray[np.int32], memories: Sequence[NDArray]) -> None:
        for block, host, first, n, _ in spans.tolist():
            span = slice(first, first + n)
            for own, memory in zip(self.memory, memories, strict=True):
                own[host, span] = memory[block, span]
            self.good_slots[host, span] = self.lost is None or not self.lost()
            if not self.good_slots[host, span].all():
                self.memory[:, host, span] = _STALE_TOKEN
            self.num_saved_slots += n

    def load_slots(self, spans: NDArray[np.int32], memories: Sequence[NDArray]) -> None:
        for host, block, first, n, _ in spans.tolist():
            span = slice(first, first + n)
            for own, memory in zip(self.memory, memories, strict=True):
                memory[block, span] = own[host, span]
            self.num_loaded_slots += n

    def load(self, pairs: NDArray[np.int32], memories: Sequence[NDArray]) -> None:
        host, device = pairs.T
        for own, memory in zip(self.memory, memories, strict=True):
            memory[device] = own[host]
        self.num_loaded += host.size


class FakeExecutor:
    """An `Executor` for tests.

    Args:
        num_blocks: usable blocks.
        block_size: keys, or values, that a block holds.
        hidden_block_size: layer inputs that a block holds; None: `block_size`.
        max_num_seqs: slots.
        vocab_size: tokens are in [0, vocab_size).
        clock: moved forward to the end of a step by `StepHandle.result`; None: time stands still.
        duration_s: seconds that a step takes; steps queue behind each other.
        fault: asked before each step; None: none.
        num_host_blocks: blocks of host memory.
        lost: asked for each block that is saved whether the transfer fails; None: none does.

    Attributes:
        num_steps: steps executed.
        steps_since_reset: steps executed since the pool was last made.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        hidden_block_size: int | None = None,
        vocab_size: int = 50_000,
        clock: VirtualClock | None = None,
        duration_s: Callable[[StepBatch], float] | None = None,
        fault: Callable[[StepBatch], Fault | None] | None = None,
        num_host_blocks: int = 0,
        lost: Callable[[], bool] | None = None,
        windows: WindowSpec | None = None,
    ) -> None:
        self.windows = windows
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hidden_block_size = block_size if hidden_block_size is None else hidden_block_size
        self.max_num_seqs = max_num_seqs
        self.can_convert, self.lengths_only = True, False
        self.adapters: Sequence[str] = ()
        self.vocab_size = vocab_size
        self.clock = clock
        self.duration_s = duration_s
        self.fault = fault
        self.num_steps = 0
        self.num_resets = 0
        shape = (3, num_host_blocks + 1, self._slots)
        self.host = FakeHostMemory(np.full(shape, _STALE_TOKEN, np.int64), np.zeros(shape[1], np.bool_), lost)
        self.host.device = lambda: (self._token, self._position, self._tag)
        self._busy_until_s = 0.0
        self._make_pool()

    @property
    def compilations(self) -> int:
        return 0

    def prepare_prompt_logprobs(self) -> None:
        pass

    def check_integrity(self) -> None:
        pass

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        if progress is not None:
            progress(1, 1)

    def reset(self) -> None:
        self.num_resets += 1
        self._make_pool()

    def execute(self, batch: StepBatch) -> "_Handle | _MaskedHandle":
        batch = self._with_windows(batch)
        self.host.good[batch.saves[:, 1]] = False  # until they are saved, whatever happens
        if self._broken:
            raise RuntimeError("the pool is gone: a step failed and reset was not called")
        if self._waiting:
            raise BatchContractError("the step before has not got its masks")
        self._check(batch)
        fault = self.fault(batch) if self.fault is not None else None
        self.num_steps += 1
        self.steps_since_reset += 1
        if fault is not None and fault.kind in (FaultKind.RAISE_BEFORE, FaultKind.OUT_OF_MEMORY):
            self._broken = True
            failed = MemoryError if fault.kind is FaultKind.OUT_OF_MEMORY else RuntimeError
            raise failed("planted: before the step wrote anything")
        token_ids = self._write(batch)
        if fault is not None and fault.kind is FaultKind.RAISE_AFTER:
            self._broken = True
            raise RuntimeError("planted: after the step wrote everything")
        if batch.masked is not None:
            self._waiting = True
            return _MaskedHandle(self, batch, token_ids, fault)
        return self._finished(batch, token_ids, fault, {})

    def _finished(
        self,
        batch: StepBatch,
        token_ids: NDArray[np.int64],
        fault: Fault | None,
        allowed: Mapping[int, NDArray[np.bool_]],
    ) -> _Handle:
        outcome: StepResult | Exception = self._sample(batch, token_ids, fault, allowed)
        if fault is not None and fault.kind is FaultKind.NOT_FINITE:
            self._spoil(batch, fault.row % batch.num_tokens.size)
        if fault is not None and fault.kind is FaultKind.RAISE_IN_RESULT:
            self._broken = True
            outcome = RuntimeError("planted: while the result was fetched")
        if self.clock is not None:
            duration_s = self.duration_s(batch) if self.duration_s is not None else 0.0
            self._busy_until_s = max(self._busy_until_s, self.clock.now_s()) + duration_s
        return _Handle(self, outcome, self._busy_until_s)

    def _with_windows(self, batch: StepBatch) -> StepBatch:
        """Return the batch with the tables of windowed layers behind its block tables."""
        held = batch.windows
        if (held is None) != (self.windows is None):
            raise BatchContractError("blocks of windowed layers")
        if held is None:
            return batch
        n, halves, num = held.blocks.shape
        if held.first.shape != (n,) or n != batch.slots.size or (held.first < 0).any():
            raise BatchContractError("first groups of windowed layers")
        width = max(batch.block_tables.shape[2], int(held.first.max()) + num)
        tables = np.zeros((n, 2 + halves, width), np.int32)
        tables[:, :2, : batch.block_tables.shape[2]] = batch.block_tables
        for row, (first, blocks) in enumerate(zip(held.first.tolist(), held.blocks, strict=True)):
            tables[row, 2:, first : first + num] = blocks
        return dataclasses.replace(batch, block_tables=tables)

    @property
    def _slots(self) -> int:
        """Slots of a block of the pool."""
        return max(self.block_size, self.hidden_block_size, self.windows.block_size if self.windows else 0)

    def _make_pool(self) -> None:
        shape = (self.num_blocks + 1, self._slots)
        self._token = np.full(shape, _STALE_TOKEN, np.int64)
        self._position = np.full(shape, -1, np.int64)
        self._tag = np.full(shape, _TAG_NONE, np.int8)
        self._last_token = np.full(self.max_num_seqs, NO_TOKEN, np.int64)
        self._broken = self._waiting = False
        self.steps_since_reset = 0

    def _sizes(self, kind: NDArray[np.int8]) -> NDArray[np.int64]:
        """Positions that a block holds, by the kind of each row."""
        return np.where(kind == HIDDEN, self.hidden_block_size, self.block_size)

    def _write(self, batch: StepBatch) -> NDArray[np.int64]:
        """Copy blocks, convert rows, resolve tokens on the device and write the step's positions; returns the tokens,
        (T,)."""
        memories = (self._token, self._position, self._tag)
        self.host.save(batch.saves, memories)
        self.host.save_slots(batch.slot_saves, memories)
        source, destination = batch.copies.T
        for memory in memories:
            memory[destination] = memory[source]
        self.host.load(batch.loads, memories)
        self.host.load_slots(batch.slot_loads, memories)
        self._convert(batch)
        n = batch.num_tokens.size
        row = np.repeat(np.arange(n), batch.num_tokens)
        first = np.cumsum(batch.num_tokens) - batch.num_tokens
        position = np.arange(row.size) - first[row] + batch.start[row]
        tokens = np.where(batch.token_ids == TOKEN_ON_DEVICE, self._last_token[batch.slots[row]], batch.token_ids)
        if (tokens < 0).any():
            raise BatchContractError("a token on the device that was never sampled")
        group, slot = np.divmod(position, self._sizes(batch.kind[row]))
        hidden = batch.kind[row] == HIDDEN
        for half, tag in ((0, np.where(hidden, _TAG_X, _TAG_K)), (1, _TAG_V)):
            where = slice(None) if half == 0 else ~hidden
            sizes = self._sizes(batch.kind[row])[where]
            at = _at(batch.block_tables[row, half, group][where], slot[where], sizes)
            if (at[0] == NULL_BLOCK).any():
                raise BatchContractError("a write to the reserved block")
            marks = 0 if batch.adapters is None else batch.adapters[row].astype(np.int64) * _ADAPTER
            self._token[at] = (tokens + marks)[where]
            self._position[at] = position[where]
            self._tag[at] = tag[where] if isinstance(tag, np.ndarray) else tag
        for at, written in self._windowed(batch, row, position):
            self._token[at], self._position[at], self._tag[at] = tokens[written], position[written], _TAG_W
        return tokens

    def _windowed(
        self, batch: StepBatch, row: NDArray[np.intp], position: NDArray[np.integer]
    ) -> Iterator[tuple[tuple[NDArray[np.int32], NDArray[np.integer]], NDArray[np.bool_]]]:
        """Block and slot of positions in each table of windowed layers, and which of them have one."""
        for half in range(2, batch.block_tables.shape[1]):
            assert self.windows is not None
            group, slot = np.divmod(position, self.windows.block_size)
            block = batch.block_tables[row, half, group]
            yield (block[block != NULL_BLOCK], slot[block != NULL_BLOCK]), block != NULL_BLOCK

    def _wrong_windows(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Rows of which a windowed layer reads another token than the others at some position, (n,)."""
        wrong = np.zeros(batch.start.size, np.bool_)
        if self.windows is None:
            return wrong
        for row, (start, num) in enumerate(zip(batch.start.tolist(), batch.num_tokens.tolist(), strict=True)):
            # Tokens of a chunk read each other directly; a later step reads what this one leaves behind.
            position = np.arange(max(start + num - self.windows.window, 0), start + num)
            if num > 1:
                position = np.append(np.arange(max(start + 1 - self.windows.window, 0), start), position)
            if num > 1:  # the token at the end does not attend to the first of them
                position = position[(position < start) | (position > start + num - self.windows.window)]
            plain = batch.block_tables[row, 0, position // self.block_size], position % self.block_size
            for at, held in self._windowed(batch, np.full(position.size, row), position):
                right = held.all() and (self._tag[at] == _TAG_W).all() and (self._position[at] == position).all()
                wrong[row] |= not (right and (self._token[at] == self._token[plain]).all())
        return wrong

    def _convert(self, batch: StepBatch) -> None:
        """Layer inputs to keys and values, all reads before all writes. What is no layer input of its position gives
        keys and values of no token."""
        conversions = batch.conversions
        if conversions is None:
            return
        found = []
        for row, blocks in zip(conversions.rows.tolist(), conversions.inputs, strict=True):
            position = np.arange(int(batch.start[row]))
            group, slot = np.divmod(position, self.hidden_block_size)
            at = blocks[group], slot
            right = (self._tag[at] == _TAG_X) & (self._position[at] == position)
            found.append((row, position, np.where(right, self._token[at], _STALE_TOKEN)))
        for row, position, tokens in found:
            group, slot = np.divmod(position, self.block_size)
            for half, tag in ((0, _TAG_K), (1, _TAG_V)):
                at = batch.block_tables[row, half, group], slot
                self._token[at], self._position[at], self._tag[at] = tokens, position, tag

    def _spoil(self, batch: StepBatch, row: int) -> None:
        """Corrupt what a row wrote in this step, like its logits: nobody may read it."""
        position = batch.start[row] + np.arange(batch.num_tokens[row])
        size = self._sizes(batch.kind)[row]
        group, slot = np.divmod(position, size)
        for half in range(2):
            self._token[_at(batch.block_tables[row, half, group], slot, size)] = _STALE_TOKEN
        for at, _ in self._windowed(batch, np.full(position.size, row), position):
            self._token[at] = _STALE_TOKEN

    def _sums(self, batch: StepBatch) -> NDArray[np.uint64]:
        """Hash of what each row reads back through its block table, (n,)."""
        end = batch.start + batch.num_tokens
        position = np.arange(int(end.max()))
        read = position < end[:, None]
        group, slot = np.divmod(position, self._sizes(batch.kind)[:, None])
        group = np.where(read, group, 0)  # the table need not go on
        hidden = (batch.kind == HIDDEN)[:, None]

        def half_sum(half: int, tag: NDArray | int) -> NDArray[np.uint64]:
            entry = np.take_along_axis(batch.block_tables[:, half], group, axis=1)
            at = _at(entry, slot, self._sizes(batch.kind)[:, None])
            pairs = _pairs(self._token[at], self._position[at])
            wrong = (self._tag[at] != tag) | (self._position[at] != position)
            pairs = np.where(wrong, _mix(pairs + np.uint64(0xBAD)), pairs)
            return np.where(read, pairs, np.uint64(0)).sum(axis=1, dtype=np.uint64)

        first = half_sum(0, np.where(hidden, np.int8(_TAG_X), np.int8(_TAG_K)))
        second = np.where(hidden[:, 0], first, half_sum(1, _TAG_V))
        sums = np.where(first == second, first, _mix(first + _mix(second)))
        return np.where(self._wrong_windows(batch), _mix(sums + np.uint64(0xBAD)), sums)

    def _sample(
        self,
        batch: StepBatch,
        token_ids: NDArray[np.int64],
        fault: Fault | None,
        allowed: Mapping[int, NDArray[np.bool_]],
    ) -> StepResult:
        prompts = {row: self._score(batch, row, targets) for row, targets in batch.prompt_targets.items()}
        pooled = {row: self._pool(batch, row, span) for row, span in batch.pool_spans.items()}
        return dataclasses.replace(self._draw_tokens(batch, fault, allowed), prompt_logprobs=prompts, pooled=pooled)

    def _pool(self, batch: StepBatch, row: int, span: PoolSpan) -> NDArray[np.float32]:
        """Sum of the states of positions, from what the row reads back."""
        size = self.hidden_block_size if batch.kind[row] == HIDDEN else self.block_size
        position = np.arange(span.position, span.position + span.num_tokens)
        at = _at(batch.block_tables[row, 0, position // size], position % size, size)
        return _states(self._token[at]).sum(axis=0)

    def _score(self, batch: StepBatch, row: int, targets: PromptTargets) -> PromptLogprobs:
        """Log probabilities from what the row reads back, position by position."""
        hidden = batch.kind[row] == HIDDEN
        size = self.hidden_block_size if hidden else self.block_size
        position = np.arange(targets.position + targets.token_ids.size)
        at = _at(batch.block_tables[row, 0, position // size], position % size, size)
        pairs = _pairs(self._token[at], self._position[at])
        wrong = (self._tag[at] != (_TAG_X if hidden else _TAG_K)) | (self._position[at] != position)
        sums = np.cumsum(np.where(wrong, _mix(pairs + np.uint64(0xBAD)), pairs), dtype=np.uint64)
        return _scored(sums[targets.position :], targets.token_ids)

    def _draw_tokens(
        self, batch: StepBatch, fault: Fault | None, allowed: Mapping[int, NDArray[np.bool_]]
    ) -> StepResult:
        n = batch.num_tokens.size
        sampled = _draw(self._sums(batch), batch.position, batch.params, self.vocab_size, allowed)
        finite = np.ones(n, np.bool_)
        if fault is not None and fault.kind is FaultKind.NOT_FINITE:
            finite[fault.row % n] = False
            sampled[fault.row % n] = 0
        if fault is not None and fault.kind is FaultKind.BAD_TOKEN:
            sampled[fault.row % n] = self.vocab_size + 3 if fault.row % 2 else -7
        # The device goes on with what it has sampled, whatever the host makes of it.
        self._last_token[batch.slots[batch.samples]] = np.abs(sampled[batch.samples])
        ids = np.where(batch.samples, sampled, np.int32(NO_TOKEN))
        if fault is not None and fault.kind is FaultKind.PARTIAL:
            return StepResult(token_ids=ids[:-1], finite=finite[:-1])
        wanted = max((p.logprobs for p in batch.params if p.logprobs is not None), default=None)
        if wanted is None:
            return StepResult(token_ids=ids, finite=finite)
        top = (sampled[:, None] + np.arange(wanted, dtype=np.int32)) % self.vocab_size
        top_logprobs = np.broadcast_to(-0.5 - np.arange(wanted, dtype=np.float32), top.shape)
        return StepResult(
            token_ids=ids,
            finite=finite,
            logprob=np.full(n, -0.5, np.float32),
            top_ids=top,
            top_logprobs=top_logprobs,
        )

    def _check_shared(self, batch: StepBatch, groups: NDArray[np.integer]) -> None:
        """Two rows in one block have it from different ends, and together no more slots than there are."""
        if not (batch.block_tables < 0).any():
            return
        used: dict[tuple[int, bool], int] = {}
        sizes = self._sizes(batch.kind)
        for row, size in enumerate(sizes.tolist()):
            end = int(batch.start[row] + batch.num_tokens[row])
            for group, entry in enumerate(batch.block_tables[row, 0, : int(groups[row])].tolist()):
                used[abs(entry), entry < 0] = min(end - group * size, size)
        for (block, down), num in used.items():
            if num + used.get((block, not down), 0) > max(self.block_size, self.hidden_block_size):
                raise BatchContractError("a slot of two rows")

    def _check(self, batch: StepBatch) -> None:
        """Check the guarantees of `StepBatch` that are visible here."""
        n = batch.num_tokens.size

        def require(condition: object, message: str) -> None:
            if not condition:
                raise BatchContractError(message)

        require(n >= 1, "an empty step")
        if batch.masked is not None:
            rows = batch.masked
            require(rows.size and (np.diff(rows) > 0).all(), "masked rows in disorder")
            require(batch.samples[rows].all(), "a mask for a row that does not sample")
        for name, dtype in (
            ("slots", np.int32),
            ("num_tokens", np.int32),
            ("start", np.int32),
            ("kind", np.int8),
            ("samples", np.bool_),
        ):
            values = getattr(batch, name)
            if values.shape != (n,) or values.dtype != dtype:
                raise BatchContractError(f"{name} is {values.dtype}{values.shape}, not {np.dtype(dtype)}({n},)")
        require(
            batch.block_tables.shape[:2] == (n, 2 if self.windows is None else 2 + self.windows.blocks_per_group)
            and batch.block_tables.dtype == np.int32,
            "block tables",
        )
        first = np.cumsum(batch.num_tokens) - batch.num_tokens
        for row, targets in batch.prompt_targets.items():
            require(0 <= row < n and batch.params[row].prompt_logprobs is not None, "targets that nobody asked for")
            begin, count = targets.position - int(batch.start[row]), targets.token_ids.size
            require(count and begin >= 0 and begin + count <= batch.num_tokens[row], "targets outside of the step")
            inside = batch.token_ids[first[row] + begin + 1 : first[row] + batch.num_tokens[row]][:count]
            require((inside == targets.token_ids[: inside.size]).all(), "targets that are not the prompt's tokens")
        require(len(batch.params) == len(batch.history) == n, "params or history of another length")
        require(np.unique(batch.slots).size == n, "two rows on one slot")
        require(
            batch.slots.min() >= 0 and batch.slots.max() < self.max_num_seqs,
            "a slot that is not there",
        )
        require((batch.num_tokens >= 1).all() and (batch.start >= 0).all(), "an empty row")
        require(((batch.kind == KV) | (batch.kind == HIDDEN)).all(), "an unknown kind")
        require(batch.token_ids.shape == (int(batch.num_tokens.sum()),), "token ids of another length")
        is_last = np.zeros(batch.token_ids.size, np.bool_)
        is_last[np.cumsum(batch.num_tokens) - 1] = True
        require(is_last[batch.token_ids == TOKEN_ON_DEVICE].all(), "a token on the device that is not a row's last")
        sizes = self._sizes(batch.kind)
        groups = -(-(batch.start + batch.num_tokens) // sizes)
        require(groups.max() <= batch.block_tables.shape[2], "a block table too short")
        used = np.arange(batch.block_tables.shape[2]) < groups[:, None]
        tables, hidden = np.abs(batch.block_tables), (batch.kind == HIDDEN)[:, None]
        self._check_shared(batch, groups)
        require(tables.min() >= 0 and tables.max() <= self.num_blocks, "a block that is not there")
        require(
            ((tables[:, 0] != NULL_BLOCK) == used).all() and ((tables[:, 1] != NULL_BLOCK) == (used & ~hidden)).all(),
            "a block table with holes",
        )
        # Rows may read the same blocks, but what one writes, no other may hold.
        group = np.arange(tables.shape[2])
        written_from = batch.start // sizes
        conversions = batch.conversions
        if conversions is not None:
            rows, inputs = conversions.rows, conversions.inputs
            require(rows.size and (np.diff(rows) > 0).all(), "converted rows in disorder")
            require(rows[-1] < n and (batch.kind[rows] == KV).all(), "a converted row is no KV row")
            held = -(-batch.start[rows] // self.hidden_block_size)
            require((held >= 1).all(), "a row without cache is converted")
            require(
                inputs.shape == (rows.size, held.max()) and inputs.dtype == np.int32,
                "layer inputs of converted rows",
            )
            require(
                ((inputs != NULL_BLOCK) == (np.arange(held.max()) < held[:, None])).all()
                and inputs.min() >= 0
                and inputs.max() <= self.num_blocks,
                "layer inputs of a converted row with holes",
            )
            written_from = written_from.copy()
            written_from[rows] = 0
        writes = (group >= written_from[:, None]) & used
        both = np.repeat(writes[:, None], tables.shape[1], axis=1)
        if self.windows is not None:
            size = self.windows.block_size
            both[:, 2:] = (group >= (batch.start // size)[:, None])[:, None]
            beyond = group >= -(-(batch.start + batch.num_tokens) // size)[:, None]
            require(not (tables[:, 2:] * beyond[:, None]).any(), "a windowed group beyond the row's positions")
        both &= tables != NULL_BLOCK
        # Two may share a block from both ends.
        ends = (batch.block_tables > 0, batch.block_tables < 0)
        holders = np.max([np.bincount(tables[end], minlength=self.num_blocks + 1) for end in ends], axis=0)
        require((holders[tables[both]] == 1).all(), "a row writes into a block of another row")
        if conversions is not None:
            require(
                not np.isin(conversions.inputs, tables[both]).any(),
                "layer inputs of a converted row are written to in this step",
            )
        for row in range(n):
            own = tables[row][tables[row] != NULL_BLOCK]
            require(np.unique(own).size == own.size, "a row has a block twice")
        copies = batch.copies
        require(copies.ndim == 2 and copies.shape[1] == 2 and copies.dtype == np.int32, "copies")
        require(
            (copies > NULL_BLOCK).all() and (copies <= self.num_blocks).all(),
            "a copy of or to a block that is not there",
        )
        require(
            np.unique(copies[:, 1]).size == copies.shape[0]
            and np.isin(copies[:, 1], tables if (batch.block_tables < 0).any() else tables[both]).all(),
            "a copy to a block that no row writes",
        )
        saves, loads = batch.saves, batch.loads
        for pairs, device, host in ((saves, saves[:, 0], saves[:, 1]), (loads, loads[:, 1], loads[:, 0])):
            require(pairs.ndim == 2 and pairs.dtype == np.int32, "transfers")
            require((device > NULL_BLOCK).all() and (device <= self.num_blocks).all(), "a transfer of no block")
            require((host > NULL_BLOCK).all() and (host <= self.host.num_blocks).all(), "a transfer of no host block")
        require(np.unique(saves[:, 1]).size == len(saves), "a host block is saved to twice")
        require(not np.isin(loads[:, 0], saves[:, 1]).any(), "a host block is loaded in the step that saves it")
        written = np.concatenate([loads[:, 1], copies[:, 1]])
        require(np.unique(written).size == written.size, "a block is loaded or copied to twice")
        held = tables if conversions is None else np.concatenate([tables.reshape(-1), conversions.inputs.reshape(-1)])
        require(np.isin(loads[:, 1], held).all(), "a block is loaded that no row holds")
        require(self.host.good[loads[:, 0]].all(), "a host block is loaded that is not good")
