"""Packs a step on the host: all integers of a program are sent as one vector. Uses NumPy only.

Every packed vector is newly allocated, because the device may read it after the program's call returns.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV, WindowSpec
from apt_jax.core.step import NULL_BLOCK, Conversions, StepBatch
from apt_jax.executor.compiling.buckets import (
    CHANGES_PER_CALL,
    Buckets,
    SamplerVariant,
    bucket_for,
    padded_prefix,
)
from apt_jax.executor.programs.block_tables import Changes
from apt_jax.request import SamplingParams

if TYPE_CHECKING:
    from jax import Array

Ints = NDArray[np.int32]
Views = dict[str, Ints]
_Vector = TypeVar("_Vector", Ints, "Array")


class PackedInts:
    """Layout of named int32 arrays in one vector."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._parts: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self.size = 0
        for name, shape in shapes.items():
            begin, self.size = self.size, self.size + math.prod(shape)
            self._parts[name] = (begin, self.size, shape)

    def split(self, vector: _Vector) -> dict[str, _Vector]:
        """Return the arrays in a vector: writeable views on the host, static slices on the device."""
        return {name: vector[begin:end].reshape(shape) for name, (begin, end, shape) in self._parts.items()}

    def zeros(self) -> tuple[Views, Ints]:
        """Return a new host vector of zeros, as named views and as a whole."""
        ints = np.zeros(self.size, np.int32)
        return self.split(ints), ints


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFormat:
    """Sizes and layouts of an executor's packed vectors."""

    block_size: int
    hidden_block_size: int
    num_blocks: int
    max_num_seqs: int
    table_len: int
    """J, the number of entries of each of a request's block tables."""
    vocab_size: int
    num_biases: int
    """Number of entries in a row's bias list."""
    buckets: Buckets
    has_adapters: bool = False
    """True if programs take the adapter of each token."""
    windows: WindowSpec | None = None
    """Cache of windowed layers in groups of their own; None: all layers keep all positions."""
    both_ends: bool = False
    """True if block tables may have negative ids, for blocks that a row fills from the right end
    (`StepBatch.block_tables`)."""

    @property
    def dropped_slot(self) -> int:
        """Token slot outside the pool; writes to it are dropped."""
        windowed = 0 if self.windows is None else self.windows.block_size
        return (self.num_blocks + 1) * max(self.block_size, windowed)

    @property
    def tables_shape(self) -> tuple[int, int, int]:
        """Shape of the device's block tables; the first axis is the slot."""
        return self.max_num_seqs, 2 + self.num_windowed, self.table_len

    @property
    def num_windowed(self) -> int:
        """Number of block tables of windowed layers."""
        return 0 if self.windows is None else self.windows.blocks_per_group

    @property
    def counts_shape(self) -> tuple[int, int]:
        """Shape of the device's token counts; the first axis is the slot."""
        return self.max_num_seqs, self.vocab_size

    @property
    def slot_bytes(self) -> int:
        """Device memory of the per-slot arrays in bytes."""
        return 4 * (self.max_num_seqs + math.prod(self.tables_shape) + math.prod(self.counts_shape))

    def num_table_changes(self, num_decode: int, num_prefill: int) -> int:
        """Return the number of block table changes that fit into a step: one for each block that its rows start to
        fill.

        A row of n tokens starts to fill at most 1 + (n - 1) / C blocks in each half. Rows with cached positions from a
        prefix hit or a conversion change more entries.
        """
        rows = num_decode + min(self.max_num_seqs, num_prefill)
        begun = rows + num_prefill // min(self.block_size, self.hidden_block_size)
        changes = 2 * begun
        if self.windows is not None:
            changes += self.num_windowed * (rows + num_prefill // self.windows.block_size)
        return min(changes, math.prod(self.tables_shape))

    def forward_layout(self, num_decode: int, num_prefill: int) -> PackedInts:
        t, rows = num_decode + num_prefill, min(self.max_num_seqs, num_prefill)
        more: dict[str, tuple[int, ...]] = {"adapters": (t,)} if self.has_adapters else {}
        if self.windows is not None:
            more["window_slots"] = (self.num_windowed, t)
        return PackedInts(
            token_ids=(t,), token_slots=(t,), positions=(t,), first_slots=(t,), second_slots=(t,), token_hidden=(t,),
            table_changes=(2, self.num_table_changes(num_decode, num_prefill)), decode_lens=(num_decode,),
            prefill_slots=(rows,), prefill_offsets=(rows,), prefill_lens=(rows,), prefix_lens=(rows,),
            prefill_hidden=(rows,), counts=(3,), sample_rows=(self.buckets.decode[-1],), **more,
        )  # fmt: skip

    def sample_layout(self, rows: int) -> PackedInts:
        # temperature, top_p and min_p are float32 bit patterns.
        return PackedInts(
            slots=(rows,), top_k=(rows,), seed=(rows,), position=(rows,),
            temperature=(rows,), top_p=(rows,), min_p=(rows,),
        )  # fmt: skip

    def penalty_layout(self, rows: int) -> PackedInts:
        # repetition, presence, frequency and bias_values are float32 bit patterns. Rows usually have one new token.
        return PackedInts(
            count_changes=(2, 2 * rows), count_slots=(rows,), last_slot=(rows,),
            repetition=(rows,), presence=(rows,), frequency=(rows,),
            bias_ids=(rows, self.num_biases), bias_values=(rows, self.num_biases),
        )  # fmt: skip

    def convert_layout(self, num_blocks: int) -> PackedInts:
        slots = (num_blocks * self.hidden_block_size,)
        more = {"adapters": slots} if self.has_adapters else {}
        return PackedInts(blocks=(num_blocks,), positions=slots, first_slots=slots, second_slots=slots, **more)

    # --- padding only ----------------------------------------------------------------------------------------------

    def empty_forward(self, num_decode: int, num_prefill: int) -> tuple[Views, Ints]:
        views, ints = self.forward_layout(num_decode, num_prefill).zeros()
        for name in ("first_slots", "second_slots", *(["window_slots"] if self.windows else [])):
            views[name][:] = self.dropped_slot
        views["token_slots"][:] = self.max_num_seqs
        views["prefill_slots"][:] = self.max_num_seqs
        views["table_changes"][0] = math.prod(self.tables_shape)
        views["sample_rows"][:] = num_decode + num_prefill
        return views, ints

    def empty_sample(self, rows: int) -> tuple[Views, Ints]:
        views, ints = self.sample_layout(rows).zeros()
        views["slots"][:] = self.max_num_seqs
        return views, ints

    def empty_conversion(self, num_blocks: int) -> tuple[Views, Ints]:
        views, ints = self.convert_layout(num_blocks).zeros()
        views["first_slots"][:] = views["second_slots"][:] = self.dropped_slot
        return views, ints

    def empty_masks(self, rows: int) -> Ints:
        """Return masks that allow all tokens."""
        return np.full((rows, -(-self.vocab_size // 32)), -1, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedForward:
    """Packed arguments of a forward program."""

    ints: Ints
    num_decode: int
    num_prefill: int
    prefix_room: int | None
    """Maximum total length of the hidden prefixes; see `PromptSize.prefix_room`."""
    table_changes: Changes
    """Changes of block tables that did not fit into `ints` and must be sent before the step."""


def _split_rows(batch: StepBatch, *, mixed: bool, chunks_only: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows that decode and the rows computed as chunks; without `mixed`, all rows are chunks if any row has
    several tokens."""
    decodes, prefills = np.flatnonzero(batch.num_tokens == 1), np.flatnonzero(batch.num_tokens > 1)
    if chunks_only or (len(prefills) and not mixed):
        return np.zeros(0, np.int64), np.arange(len(batch.slots))
    # KV rows first, then hidden rows; each sorted by length, so that tiles of rows waste little work.
    return decodes[np.lexsort((-batch.start[decodes], batch.kind[decodes]))], prefills


def prefix_positions(batch: StepBatch, prefills: NDArray[np.int64]) -> int:
    """Return the total padded length, in positions, of the hidden prefixes of the rows `prefills` (see
    `Buckets.prompt_size`)."""
    return int(padded_prefix(batch.start[prefills][batch.kind[prefills] == HIDDEN]).sum())


def pack_forward(
    batch: StepBatch,
    step_format: StepFormat,
    table_changes: Changes,
    *,
    mixed: bool,
    sizes: Buckets | None = None,
    only_chunks: list[int] | None = None,
) -> PackedForward:
    """Pack a step's tokens: n decode rows of one token each, then the chunks of m prefill rows; both parts are padded.

    Arrays with a T axis are indexed by `place`; every row of the batch is the `owner` of some places:

        place     0 ........ n-1 | n .. B-1 | B ........................................ | .. B+P-1
        owner     decodes[i]     | padding  | prefills[0] ... | ... | prefills[m-1] ...  | padding
        offset    0              |          | 0, 1, .. len-1  |     | 0, 1, .. len-1     |
        position  start[owner] + offset          B, P: buckets of decode rows and of prefill tokens

    Position t is in block t // C of the row's table (C: positions per block, by kind), so its slot in the pool is

        slot = block_tables[owner, half, t // C] * C + t % C

    in each half of the table (K and V) for KV rows, and in the first half (X) for hidden rows. A block with a negative
    id is filled from its right end: slot = - block * C + C - 1 - t % C. `sample_rows` are the places of the last tokens
    of the sampling rows.

    Args:
        table_changes: changes of the device's block tables that the step needs.
        mixed: True: a program may have decode rows and chunks.
        sizes: sizes of the programs that may run; None: all programs.
        only_chunks: padded numbers of tokens of programs that compute all rows as chunks, in the order of the batch;
            None: use the other programs.
    """
    sizes = sizes or step_format.buckets
    decodes, prefills = _split_rows(batch, mixed=mixed, chunks_only=only_chunks is not None)
    lens = batch.num_tokens[prefills]
    chunk_ends = np.cumsum(lens)
    num_prefill_tokens = int(lens.sum())
    num_prefill, prefix_room = 0, None
    if not len(prefills):
        num_decode = bucket_for(sizes.decode, len(decodes))
    else:
        num_decode = sizes.decode[-1] if len(decodes) else 0
        if only_chunks:
            num_prefill = bucket_for(only_chunks, num_prefill_tokens)
        else:
            num_prefill, prefix_room = sizes.prompt_size(num_prefill_tokens, prefix_positions(batch, prefills))
    views, ints = step_format.empty_forward(num_decode, num_prefill)
    n, m = len(decodes), len(prefills)
    fit = min(views["table_changes"].shape[1], table_changes.shape[1])
    views["table_changes"][:, :fit] = table_changes[:, :fit]
    views["decode_lens"][:n] = batch.start[decodes] + 1
    views["prefill_slots"][:m] = batch.slots[prefills]
    views["prefill_offsets"][:m] = chunk_ends - lens
    views["prefill_lens"][:m] = lens
    views["prefix_lens"][:m] = batch.start[prefills]
    views["prefill_hidden"][:m] = batch.kind[prefills] == HIDDEN
    views["counts"][:] = (np.count_nonzero(batch.kind[decodes] == KV), n, m)

    within = np.arange(num_prefill_tokens)
    place = np.concatenate([np.arange(n), num_decode + within])
    owner = np.concatenate([decodes, np.repeat(prefills, lens)])
    offset = np.concatenate([np.zeros(n, np.int64), within - np.repeat(chunk_ends - lens, lens)])
    position = batch.start[owner] + offset
    hidden = batch.kind[owner] == HIDDEN
    per_block = np.where(hidden, step_format.hidden_block_size, step_format.block_size)
    block, rest = np.divmod(position, per_block)
    token_start = np.cumsum(batch.num_tokens) - batch.num_tokens
    views["token_ids"][place] = batch.token_ids[token_start[owner] + offset]
    views["token_slots"][place] = batch.slots[owner]
    views["positions"][place] = position
    first_blocks, second_blocks = (batch.block_tables[owner, half, block] for half in range(2))
    if step_format.both_ends:
        rest = np.where(first_blocks < 0, per_block - 1 - rest, rest)
        first_blocks, second_blocks = np.abs(first_blocks), np.abs(second_blocks)
    views["first_slots"][place] = first_blocks * per_block + rest
    second = second_blocks * step_format.block_size + rest
    views["second_slots"][place] = np.where(hidden, step_format.dropped_slot, second)
    views["token_hidden"][place] = hidden
    if step_format.windows is not None:
        assert batch.windows is not None
        size, held = step_format.windows.block_size, batch.windows
        column = position // size - held.first[owner]
        is_held = (column >= 0) & (column < held.blocks.shape[2])
        blocks = np.where(is_held, held.blocks[owner, :, np.where(is_held, column, 0)].T, NULL_BLOCK)
        slots = blocks * size + position % size
        views["window_slots"][:, place] = np.where(blocks == NULL_BLOCK, step_format.dropped_slot, slots)
    if step_format.has_adapters and batch.adapters is not None:
        views["adapters"][place] = batch.adapters[owner]

    last_place = np.zeros(len(batch.slots), np.int64)
    last_place[decodes] = np.arange(n)
    last_place[prefills] = num_decode + chunk_ends - 1
    samples = np.flatnonzero(batch.samples)
    views["sample_rows"][: len(samples)] = last_place[samples]
    return PackedForward(
        ints=ints,
        num_decode=num_decode,
        num_prefill=num_prefill,
        prefix_room=prefix_room,
        table_changes=table_changes[:, fit:],
    )


def pack_changes(changes: Changes, dropped: int) -> Iterator[Ints]:
    """Yield changes in the padded arrays that programs take, `CHANGES_PER_CALL` at a time.

    Args:
        dropped: index outside the array, used for padding.
    """
    for begin in range(0, changes.shape[1], CHANGES_PER_CALL):
        part = changes[:, begin : begin + CHANGES_PER_CALL]
        padded = empty_changes(dropped)
        padded[:, : part.shape[1]] = part
        yield padded


def empty_changes(dropped: int) -> Changes:
    """Return an array of changes that has only padding; `dropped`: index outside the array."""
    padded = np.zeros((2, CHANGES_PER_CALL), np.int32)
    padded[0] = dropped
    return padded


def _float_bits(values: Sequence[float]) -> Ints:
    return np.array(values, np.float32).view(np.int32)


def pack_sampling(
    batch: StepBatch,
    rows: NDArray[np.int64],
    params: Sequence[SamplingParams],
    bucket: int,
    variant: SamplerVariant,
    step_format: StepFormat,
) -> Ints:
    """Pack slots and sampling settings of the sampling rows."""
    n = len(rows)
    views, ints = step_format.empty_sample(bucket)
    views["slots"][:n] = batch.slots[rows]
    if not variant.greedy:
        views["top_k"][:n] = [p.top_k for p in params]
        views["seed"][:n] = np.array([(p.seed or 0) & 0xFFFFFFFF for p in params], np.uint32).view(np.int32)
        views["position"][:n] = batch.position[rows]
        for name in ("temperature", "top_p", "min_p"):
            views[name][:n] = _float_bits([getattr(p, name) for p in params])
    return ints


def rows_that_count(batch: StepBatch, rows: NDArray[np.int64]) -> list[int]:
    """Return the rows among `rows` whose penalties need token counts."""
    return [r for r in rows.tolist() if batch.params[r].counts_tokens]


def pack_penalties(
    batch: StepBatch,
    rows: NDArray[np.int64],
    bucket: int,
    eos_token_id: int | None,
    step_format: StepFormat,
    count_changes: Changes,
) -> tuple[Ints, Changes]:
    """Pack new tokens, penalties and biases of the sampling rows.

    Args:
        count_changes: changes of the device's token counts that the rows need.

    Returns:
        The vector, and the changes that did not fit into it and must be sent before it.
    """
    views, ints = step_format.penalty_layout(bucket).zeros()
    fit = min(views["count_changes"].shape[1], count_changes.shape[1])
    views["count_changes"][:, :fit] = count_changes[:, :fit]  # the rest is padding: increments of 0
    views["count_slots"][:] = views["last_slot"][:] = step_format.max_num_seqs
    views["repetition"][:] = _float_bits([1.0])
    views["bias_ids"][:] = step_format.vocab_size
    token_end = np.cumsum(batch.num_tokens)
    for i, r in enumerate(rows):
        p = batch.params[r]
        if p.counts_tokens:
            views["count_slots"][i] = batch.slots[r]
            if batch.token_ids[token_end[r] - 1] < 0:
                views["last_slot"][i] = batch.slots[r]
        views["repetition"][i], views["presence"][i], views["frequency"][i] = _float_bits(
            [p.repetition_penalty, p.presence_penalty, p.frequency_penalty]
        )
        bias = dict(p.logit_bias or {})
        if batch.position[r] < p.min_tokens:
            bias.update(dict.fromkeys(p.stop_token_ids, -np.inf))
            if eos_token_id is not None:
                bias[eos_token_id] = -np.inf
        views["bias_ids"][i, : len(bias)] = list(bias)
        views["bias_values"][i, : len(bias)] = _float_bits(list(bias.values()))
    return ints, count_changes[:, fit:]


def pack_masks(masks: Ints, places: NDArray[np.int64], bucket: int, step_format: StepFormat) -> Ints:
    """Pack one mask per sampling row; in the rows at `places`, tokens beyond the width of `masks` are forbidden."""
    rows = step_format.empty_masks(bucket)
    width = min(rows.shape[1], masks.shape[1])
    rows[places, :width] = masks[:, :width]
    rows[places, width:] = 0
    return rows


def pack_copies(copies: Ints, size: int, step_format: StepFormat) -> Ints:
    """Pack pairs of blocks, padded with copies of the reserved block to a block outside the pool, which are dropped."""
    pairs = np.full((size, 2), (0, step_format.num_blocks + 1), np.int32)
    pairs[: len(copies)] = copies
    return pairs


def pack_conversions(
    batch: StepBatch, conversions: Conversions, step_format: StepFormat, sizes: Sequence[int] = ()
) -> Iterator[tuple[Ints, int]]:
    """Yield the packed vector and the number of X blocks of each conversion call, over the blocks of all rows in order.

    Args:
        sizes: numbers of X blocks of the programs that may run, ascending; empty: all programs.
    """
    sizes = sizes or step_format.buckets.conversions
    start, inputs = batch.start[conversions.rows], conversions.inputs
    per_block = step_format.hidden_block_size
    i, group = np.nonzero(np.arange(inputs.shape[1]) < -(-start // per_block)[:, None])
    positions = group[:, None] * per_block + np.arange(per_block)
    used = positions < start[i, None]
    positions = np.where(used, positions, 0)
    column, rest = np.divmod(positions, step_format.block_size)
    slots = []
    for half in range(2):
        blocks = batch.block_tables[conversions.rows[i, None], half, column]
        slots.append(np.where(used, blocks * step_format.block_size + rest, step_format.dropped_slot))
    arrays = {"blocks": inputs[i, group], "positions": positions, "first_slots": slots[0], "second_slots": slots[1]}
    if step_format.has_adapters and batch.adapters is not None:
        arrays["adapters"] = np.broadcast_to(batch.adapters[conversions.rows[i], None], positions.shape)
    at = 0
    while at < len(i):
        part = slice(at, at + sizes[-1])
        num_blocks = bucket_for(sizes, len(i[part]))
        views, ints = step_format.empty_conversion(num_blocks)
        for name, values in arrays.items():
            flat = values[part].reshape(-1)
            views[name][: flat.size] = flat
        yield ints, num_blocks
        at += num_blocks
