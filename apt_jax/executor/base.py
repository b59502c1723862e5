"""The contract between the engine and its executor: a device, a cost model, or a test double.

A step is dispatched by `execute` and its result fetched later by `StepHandle.result`, so that the engine can prepare
the next step while the device works. Steps take effect in the order in which they were dispatched.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

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
    executor shares blocks: the row has positions in the block from its right end (`cache.block_sharing`)."""
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
    others, which leave groups that two requests share, are nobody's destinations."""
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


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means out of memory, on the host or, in JAX's wording, on the device."""
    is_the_devices = isinstance(error, RuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED")
    return is_the_devices or isinstance(error, MemoryError)


_DEVICE_LOST = re.compile(
    r"(CUDA_ERROR_|hipError)(ILLEGAL_?\w+|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|LAUNCH_FAILED|LAUNCH_TIMEOUT|MISALIGNED_ADDRESS"
    r"|INVALID_ADDRESS_SPACE|INVALID_PC|HARDWARE_STACK_ERROR|ASSERT|CONTEXT_IS_DESTROYED|DEVICE_UNAVAILABLE)\b"
    r"|illegal memory access|uncorrectable ECC|unspecified launch failure|device-side assert",
    re.IGNORECASE,
)


def is_device_lost(error: BaseException) -> bool:
    """True if an error leaves the device unusable for this process: every later call fails too, or computes nonsense."""
    return isinstance(error, RuntimeError) and _DEVICE_LOST.search(str(error)) is not None


class StepHandle(Protocol):
    """A dispatched step."""

    def result(self) -> StepResult:
        """Wait for the step to end and fetch its tokens. Raises what the step raised."""
        ...


class MaskedStepHandle(StepHandle, Protocol):
    """A step that has been dispatched up to the point where tokens are sampled, which takes the masks.

    The forward pass takes most of the time and needs no masks: while it runs, the host fetches the tokens of the
    previous step and computes which tokens may follow them.
    """

    def sample(self, masks: NDArray[np.int32]) -> None:
        """Dispatch the rest. Must be called once, before `result` and before the next `execute`.

        Args:
            masks: (rows in `StepBatch.masked`, any width): bit i % 32 of ``masks[j, i // 32]`` allows token i; tokens
                beyond the last word are forbidden. After an exception the pool is gone.
        """
        ...


class HostMemory(Protocol):
    """Blocks of host memory beside the pool of an executor, for `StepBatch.saves` and `loads`."""

    @property
    def num_blocks(self) -> int:
        """Blocks as large as the executor's, with ids in [1, num_blocks]."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers and devices."""
        ...

    def save_now(self, saves: NDArray[np.int32]) -> None:
        """Save blocks between two steps, as `StepBatch.saves`."""
        ...

    def slots_ready(self, spans: NDArray[np.int32]) -> NDArray[np.bool_]:
        """The same of slots: (n, 4) host block, first slot, number of slots, and kind."""
        ...

    def ready_to_load(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Wait until these blocks have been saved, and check their contents.

        Returns:
            (n,) False: the contents are lost, by a transfer that failed or a checksum that differs.
        """
        ...


@dataclasses.dataclass(eq=False)
class DiskRead:
    """Groups that are being read, one after the other, in a thread of their own."""

    kind: int
    groups: "collections.deque[DiskGroup]" = dataclasses.field(default_factory=collections.deque)
    """Groups that have been read and not been taken from the left yet, in their order."""
    is_done: bool = False
    """No more will come: all have been read, or one could not be."""
    is_cancelled: bool = False
    """Cancel reads that have not begun."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskGroup:
    """A group that was read, for `DiskStore.place`."""

    contents: Any
    num_bytes: int
    read_s: float
    """Seconds that this took."""
    is_downward: bool
    """Its positions lie from the right end of the blocks (`apt_jax.cache.block_sharing`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskCounts:
    """Counts of a `DiskStore` since it was made."""

    num_bytes: int = 0
    """Bytes of all its files, including known files of other servers."""
    read_bytes: int = 0
    written_bytes: int = 0
    num_dropped_files: int = 0
    """Files that were removed because they did not match."""
    num_unwritten: int = 0
    """Groups that were not written: the disk failed, was full or too slow."""


class DiskStore(Protocol):
    """Groups of blocks in files that outlive the process, by the digests of their prefixes. No method waits for a disk,
    but where it says so; none raises for one."""

    salt: bytes
    """Start of the digests, of all servers that shall find each other's groups."""

    def has(self, kind: int, digest: bytes) -> bool:
        """True if a group is likely to be found."""
        ...

    def group_bytes(self, kind: int) -> int:
        """Bytes that are read for a group."""
        ...

    def write(self, kind: int, digest: bytes, depth: int, blocks: Sequence[int], is_downward: bool) -> None:
        """Write a group from host memory, after the saves announced for its blocks. The blocks
        may be given to others at once. Where it is there already, that is noted as a use of it.

        Args:
            depth: of the group in its prefix, from 1; of those that are written at one time the deepest is removed first.
            blocks: of host memory.
            is_downward: see `DiskGroup`.
        """
        ...

    def read(self, kind: int, digests: Sequence[bytes], begin: int) -> DiskRead:
        """Read groups `[begin, len(digests))` of a prefix; those before are noted as used."""
        ...

    def place(self, group: DiskGroup, blocks: Sequence[int]) -> None:
        """Put a group that was read into blocks of host memory that have been allocated for it."""
        ...

    def remove(self, kind: int, digests: Sequence[bytes]) -> None:
        """Remove damaged groups."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until something has been read, at most for this time."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was to be written is; False: not within so long."""
        ...

    def close(self) -> None:
        """Read and write no more."""
        ...

    def counts(self) -> DiskCounts: ...


class Executor(Protocol):
    """Runs steps over a pool of `num_blocks` usable blocks with ids in [1, num_blocks]."""

    num_blocks: int
    block_size: int
    """Keys, or values, that a block holds."""
    hidden_block_size: int
    """Layer inputs that a block holds: more than keys where they are narrower, fewer where they are wider."""
    max_num_seqs: int
    can_convert: bool
    """True if steps may have `StepBatch.conversions`."""

    def execute(self, batch: StepBatch) -> StepHandle:
        """Dispatch one step; must not wait for it. After an exception the pool is gone: call `reset`."""
        ...

    def reset(self) -> None:
        """Recreate the pool, all cache on the device lost (a failed step has destroyed the donated arrays). Host memory
        keeps what steps before had saved."""
        ...

    def check_integrity(self) -> None:
        """Check the device's per-slot arrays against the steps that were dispatched. Waits for them.

        Raises:
            RuntimeError: it has something else.
        """
        ...

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile everything that serving can need; `progress(done, total)` before the first program and after each."""
        ...

    def prepare_prompt_logprobs(self) -> None:
        """Compile the programs of steps with `StepBatch.prompt_targets` if they are not compiled yet. From any thread, while
        steps run; a step that comes before its end compiles what it needs itself."""
        ...

    @property
    def compilations(self) -> int:
        """Programs compiled since `warm_up` ended; stays 0 while serving."""
        ...
