"""Input and results of one step, passed between engine and executor as host arrays."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.request import PromptLogprobs, SamplingParams

TOKEN_ON_DEVICE = -1
"""Placeholder in `StepBatch.token_ids`: use the last token sampled for the row's slot, which the host has not fetched
yet."""

NO_TOKEN = -1
"""Placeholder in `StepResult.token_ids`: the row did not sample in this step, or its mask left no token."""

NULL_BLOCK = 0
"""Id of the reserved block that pads block tables; never allocated, never read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversions:
    """Rows of a step whose cached layer inputs are converted to keys and values before the step writes anything."""

    rows: NDArray[np.int64]
    """Rows of the batch, (m,), ascending. They are KV rows: the keys and values of positions `[0, start)` are written
    to the blocks in their block tables. No other request holds these blocks."""
    inputs: NDArray[np.int32]
    """X blocks with the layer inputs of these positions, (m, J), padded with `NULL_BLOCK`. Other rows may read them; no
    row of the step writes to them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTargets:
    """Tokens of a prompt whose log probabilities a step returns for one of its rows."""

    position: int
    """Position of the token before the first target. The step computes this position and the position before every
    other target."""
    token_ids: NDArray[np.int32]
    """Target tokens, (m,), m at least 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSpan:
    """Range of prompt positions whose hidden states a step sums."""

    position: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowBlocks:
    """Blocks of windowed layers that the rows of a step hold (`core.kinds.WindowSpec`)."""

    first: NDArray[np.int32]
    """First group of each row in `blocks`, (n,)."""
    blocks: NDArray[np.int32]
    """(n, `blocks_per_group`, K) blocks of the K groups from `first` on; `NULL_BLOCK` for groups that are not held."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One step, as host arrays. n rows; T = sum of `num_tokens`; J = maximum number of blocks per row (for KV rows, of
    K blocks).

    Position t of a row lies in its block `t // size`, where size is the executor's `block_size` or, for hidden rows,
    `hidden_block_size`.

    Row r computes positions `[start[r], start[r] + num_tokens[r])`, writes their cache through its block table, and
    attends to positions `[0, start[r] + num_tokens[r])`. If `samples[r]`, a token is sampled from the last position.
    """

    slots: NDArray[np.int32]
    """Slot of each row's request in the executor's per-request device state, (n,), in [0, max_num_seqs)."""
    num_tokens: NDArray[np.int32]
    """Number of tokens that each row computes, (n,), at least 1."""
    start: NDArray[np.int32]
    """Number of positions of each row that were cached before this step, (n,)."""
    kind: NDArray[np.int8]
    """Cache kind of each row, (n,): `core.kinds.KV` or `HIDDEN`."""
    token_ids: NDArray[np.int32]
    """Tokens to compute, (T,), row after row. `TOKEN_ON_DEVICE` occurs only as the last token of a row."""
    block_tables: NDArray[np.int32]
    """Block tables, (n, 2, J): K or X blocks in [:, 0], V blocks in [:, 1] (`NULL_BLOCK` for hidden rows). If the
    executor takes blocks from both ends, a negative id means that the row fills the block from its right end
    (`cache.placement`)."""
    samples: NDArray[np.bool_]
    """True for rows that sample a token, (n,)."""
    position: NDArray[np.int32]
    """Index of the token to be sampled among the request's output tokens, (n,), starting at 0. It seeds the random
    draw."""
    params: Sequence[SamplingParams]
    """Sampling parameters of each row's request, (n,)."""
    history: Sequence[NDArray[np.int32]]
    """Prompt and known output tokens of each row's request, (n,). Read only for penalties: tokens that the row's slot
    has not counted yet are sent to the device."""
    prompt_len: NDArray[np.int32]
    """Number of prompt tokens in `history`, (n,)."""
    windows: WindowBlocks | None = None
    """Blocks of windowed layers; None: all layers keep all positions."""
    masked: NDArray[np.int64] | None = None
    """Rows that sample with a token mask, ascending; None: no masks. With masks, `Executor.execute` returns a
    `MaskedStepHandle`."""
    copies: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """Block copies, (m, 2): source and destination. Before the step writes anything, all sources are read and then
    written to their destinations; no destination occurs twice. Copies of prefixes, at most 2 * max_num_seqs, come
    first. The other copies give a request its own copy of a group that it shared with another request; their sources
    are not destinations of other copies."""
    saves: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """Blocks saved to host memory, (m, 2): device block and host block. They are read before anything is written,
    including by copies and loads. No host block occurs twice or is loaded in the same step."""
    loads: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """Blocks loaded from host memory, (m, 2): host block and device block. They are written after the copies and before
    conversions and the step. No device block occurs twice; `HostMemory.ready_to_load` must have returned True for all
    host blocks."""
    slot_saves: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros((0, 5), np.int32))
    """Slots saved together with `saves`, (m, 5): device block, host block, first slot, number of slots, and cache kind.
    Slots keep their positions in the block."""
    slot_loads: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros((0, 5), np.int32))
    """Slots loaded together with `loads`, (m, 5): host block, device block, first slot, number of slots, and cache
    kind."""
    adapters: NDArray[np.int32] | None = None
    """LoRA adapter of each row, (n,): index in `JaxExecutor.adapters` plus 1, or 0 for no adapter; None: no row has an
    adapter."""
    conversions: Conversions | None = None
    """Conversions of layer inputs to keys and values, done after copies and loads and before the step; None: no
    conversions."""
    prompt_targets: Mapping[int, PromptTargets] = dataclasses.field(default_factory=dict)
    """Prompt tokens to score, keyed by row, for requests that ask for log probabilities of their prompt."""
    pool_spans: Mapping[int, PoolSpan] = dataclasses.field(default_factory=dict)
    """Prompt positions whose hidden states are summed, keyed by row, for requests that ask for pooled states."""

    @property
    def needs_all_states(self) -> bool:
        """True if results need hidden states of tokens besides the last token of sampling rows."""
        return bool(self.prompt_targets or self.pool_spans)

    @property
    def num_converted_tokens(self) -> int:
        """Number of positions whose layer inputs are converted to keys and values."""
        return 0 if self.conversions is None else int(self.start[self.conversions.rows].sum())

    def moved_blocks(self, block_sizes: Sequence[int]) -> tuple[float, float]:
        """Return the numbers of blocks saved to and loaded from host memory; slots count as fractions of blocks.

        Args:
            block_sizes: number of positions in a block, for each cache kind.
        """
        sizes = np.asarray(block_sizes)
        slots = [float((spans[:, 3] / sizes[spans[:, 4]]).sum()) for spans in (self.slot_saves, self.slot_loads)]
        return len(self.saves) + slots[0], len(self.loads) + slots[1]

    def part(self, rows: NDArray[np.int64]) -> "StepBatch":
        """Return a step with only the given rows (ascending), without masks, copies, transfers or conversions."""
        starts = np.cumsum(self.num_tokens) - self.num_tokens
        lens = self.num_tokens[rows]
        within = np.arange(int(lens.sum())) - np.repeat(np.cumsum(lens) - lens, lens)
        return StepBatch(
            slots=self.slots[rows],
            num_tokens=lens,
            start=self.start[rows],
            kind=self.kind[rows],
            token_ids=self.token_ids[np.repeat(starts[rows], lens) + within],
            block_tables=self.block_tables[rows],
            samples=self.samples[rows],
            position=self.position[rows],
            params=[self.params[r] for r in rows.tolist()],
            history=[self.history[r] for r in rows.tolist()],
            prompt_len=self.prompt_len[rows],
            prompt_targets={
                place: self.prompt_targets[row] for place, row in enumerate(rows.tolist()) if row in self.prompt_targets
            },
            adapters=None if self.adapters is None else self.adapters[rows],
            windows=None
            if self.windows is None
            else WindowBlocks(first=self.windows.first[rows], blocks=self.windows.blocks[rows]),
            pool_spans={
                place: self.pool_spans[row] for place, row in enumerate(rows.tolist()) if row in self.pool_spans
            },
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of a step; rows are in the order of the batch."""

    token_ids: NDArray[np.int32]
    """Sampled token of each row, (n,); `NO_TOKEN` if the row did not sample or its mask excluded all tokens."""
    finite: NDArray[np.bool_]
    """True for rows whose logits are finite, (n,); the tokens of the other rows are meaningless."""
    logprob: NDArray[np.float32] | None = None
    """Log probability of each sampled token, (n,); None: no row asked for log probabilities."""
    top_ids: NDArray[np.int32] | None = None
    """Ids of the k most likely tokens of each row, (n, k), most likely first."""
    top_logprobs: NDArray[np.float32] | None = None
    """Log probabilities of `top_ids`, (n, k)."""
    prompt_logprobs: Mapping[int, PromptLogprobs] = dataclasses.field(default_factory=dict)
    """Log probabilities of `StepBatch.prompt_targets`, keyed by row."""
    pooled: Mapping[int, NDArray[np.float32]] = dataclasses.field(default_factory=dict)
    """Sum of the hidden states over each of `StepBatch.pool_spans`, (D,), keyed by row."""
