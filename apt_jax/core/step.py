"""The contract of one step: what the engine asks of an executor and what it gets back, as host arrays."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.request import PromptLogprobs, SamplingParams

TOKEN_ON_DEVICE = -1
"""Placeholder in `StepBatch.token_ids` for the last token sampled for this row's slot, which the host has not seen
yet."""

NO_TOKEN = -1
"""Placeholder in `StepResult.token_ids`: the row did not sample in this step, or its mask left no token."""

NULL_BLOCK = 0
"""Padding in block tables: reserved, never allocated, never read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversions:
    """Rows of a step whose cached layer inputs become keys and values before the step writes anything."""

    rows: NDArray[np.int64]
    """(m,) rows of the batch, ascending. They are KV rows in the batch: their block tables name the blocks that
    positions `[0, start)` are written to, which no other request holds."""
    inputs: NDArray[np.int32]
    """(m, J) the X blocks of these positions, padded with `NULL_BLOCK`. Other rows may read them; no row of the step
    writes to them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTargets:
    """Tokens of a prompt whose log probabilities a step returns for one of its rows."""

    position: int
    """Position of the token before the first of them; it is computed in the step, as are those before the others."""
    token_ids: NDArray[np.int32]
    """(m,) at least one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSpan:
    """Positions of a prompt whose hidden states a step sums."""

    position: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One step, on the host. `n` rows; T = sum of `num_tokens`; J = most blocks of one row (of one half for KV).

    Position t of a row lies in its block `t // size`, size being the executor's `block_size` or `hidden_block_size`.

    Row r computes positions `[start[r], start[r] + num_tokens[r])`, writes their cache through its block table, and
    attends to positions `[0, start[r] + num_tokens[r])`. Where `samples[r]` a token is sampled from the last position.
    """

    slots: NDArray[np.int32]
    """(n,) place of the request in the executor's per-request device state, in [0, max_num_seqs)."""
    num_tokens: NDArray[np.int32]
    """(n,) at least 1."""
    start: NDArray[np.int32]
    """(n,) positions cached before this step."""
    kind: NDArray[np.int8]
    """(n,) `core.kinds.KV` or `HIDDEN`."""
    token_ids: NDArray[np.int32]
    """(T,) row after row. `TOKEN_ON_DEVICE` only in rows with `num_tokens == 1`, or as the last token of a row."""
    block_tables: NDArray[np.int32]
    """(n, 2, J): [:, 0] the K or X blocks, [:, 1] the V blocks (`NULL_BLOCK` for hidden rows). Negative, where the
    executor takes blocks from both ends: the row has positions in the block from its right end (`cache.placement`)."""
    samples: NDArray[np.bool_]
    """(n,)"""
    position: NDArray[np.int32]
    """(n,) index of the token to be sampled within the request's outputs (0 for the first): keys the random draw."""
    params: Sequence[SamplingParams]
    """(n,) of the row's request."""
    history: Sequence[NDArray[np.int32]]
    """(n,) prompt then known output tokens of the row's request; read only for penalties, by the row's slot: what the slot
    has not counted yet is sent."""
    prompt_len: NDArray[np.int32]
    """(n,) how much of `history` is the prompt."""
    masked: NDArray[np.int64] | None = None
    """Rows that sample under a mask, ascending; None: none. `Executor.execute` then gives a `MaskedStepHandle`."""
    copies: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """(m, 2) blocks (source, destination): before the step writes anything, all sources are read, then written to their
    destinations. No destination occurs twice. Those of prefixes, at most 2 * max_num_seqs, come first; the sources of the
    others, which leave groups of two users, are nobody's destinations."""
    saves: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """(m, 2) blocks (device, host) that go to host memory as they are before the step writes anything, its copies and
    loads among it. No host block occurs twice, nor is it loaded in the step."""
    loads: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """(m, 2) blocks (host, device) that come from host memory: written after the copies, and before conversions and the
    step. No device block occurs twice; `HostMemory.ready_to_load` has said that all host blocks are good."""
    slot_saves: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros((0, 5), np.int32))
    """(m, 5) block on the device, host block, first slot, number of slots, and kind of the request: slots that go to the
    same place of a host block, when `saves` do."""
    slot_loads: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros((0, 5), np.int32))
    """(m, 5) host block, block on the device, first slot, number of slots, and kind: they come back when `loads` do."""
    adapters: NDArray[np.int32] | None = None
    """(n,) LoRA adapter of the row's request: its place among `Executor.adapters` plus 1, 0: none; None: no row has
    one."""
    conversions: Conversions | None = None
    """Done after the copies and loads, and before the step; None: there are none."""
    prompt_targets: Mapping[int, PromptTargets] = dataclasses.field(default_factory=dict)
    """By row, where the row's request asks for log probabilities of its prompt."""
    pool_spans: Mapping[int, PoolSpan] = dataclasses.field(default_factory=dict)
    """By row, where the row's request asks for pooled states of its prompt."""

    @property
    def needs_all_states(self) -> bool:
        """True if results need the hidden states of tokens that do not sample."""
        return bool(self.prompt_targets or self.pool_spans)

    @property
    def num_converted_tokens(self) -> int:
        """Positions whose layer inputs are converted to keys and values."""
        return 0 if self.conversions is None else int(self.start[self.conversions.rows].sum())

    def moved_blocks(self, block_sizes: Sequence[int]) -> tuple[float, float]:
        """Blocks that go to host memory and that come from there; slots count as parts of blocks.

        Args:
            block_sizes: positions that a block holds, by kind.
        """
        sizes = np.asarray(block_sizes)
        slots = [float((spans[:, 3] / sizes[spans[:, 4]]).sum()) for spans in (self.slot_saves, self.slot_loads)]
        return len(self.saves) + slots[0], len(self.loads) + slots[1]

    def part(self, rows: NDArray[np.int64]) -> "StepBatch":
        """A step of some rows, ascending, without masks, copies, transfers and conversions."""
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
            pool_spans={
                place: self.pool_spans[row] for place, row in enumerate(rows.tolist()) if row in self.pool_spans
            },
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of a step. Rows as in the batch."""

    token_ids: NDArray[np.int32]
    """(n,) sampled token, `NO_TOKEN` where the row did not sample or its mask excluded all tokens."""
    finite: NDArray[np.bool_]
    """(n,) False: the row's logits were not finite, its token is meaningless."""
    logprob: NDArray[np.float32] | None = None
    """(n,) log probability of the sampled token, where any row asked for logprobs."""
    top_ids: NDArray[np.int32] | None = None
    """(n, k) most likely tokens, best first."""
    top_logprobs: NDArray[np.float32] | None = None
    """(n, k)"""
    prompt_logprobs: Mapping[int, PromptLogprobs] = dataclasses.field(default_factory=dict)
    """By row, of the tokens of `StepBatch.prompt_targets`."""
    pooled: Mapping[int, NDArray[np.float32]] = dataclasses.field(default_factory=dict)
    """By row, (D,) sums of the hidden states in `StepBatch.pool_spans`."""
