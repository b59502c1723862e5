"""The padded sizes that programs are compiled for, and the variants of the sampler. Needs no JAX."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from apt_jax.request import SamplingParams

_MIN_PREFILL_BUCKET = 32
_Length = TypeVar("_Length", int, NDArray[np.int32])
_SPARSE_ROWS = 64
"""Number of rows below which reading the weights takes most of a step's time on GPUs."""
_FLAT_TOKENS = (64, 128)
"""Prompt buckets below `_STEEP_TOKENS`, in tokens, on GPUs. Reading the weights takes as long as multiplying them by
240 tokens on an H100, 150 on an A100."""
_STEEP_TOKENS = 256
_OCTAVE = (16, 18, 21, 24, 28)
"""Buckets from a power of two to the next, in sixteenths of the former: increments of 12 to 17 %."""
_PREFIX_ROOMS = (8192, 32_768)
"""Maximum total padded lengths of hidden prefixes, in positions: a program is compiled for each, and one more program
for any length."""
_SPARSE_PREFIX = 4
"""Factor between prompt sizes with hidden prefixes; they are sparse because the prefixes take most of such a step."""
_CONVERT_TOKENS = (128, 1024)
"""Approximate numbers of layer inputs that the conversion programs convert to keys and values."""

CHANGES_PER_CALL = 4096
"""Number of entries of a per-slot array that one program changes; used for changes that do not fit into a step."""


def power_of_two_buckets(smallest: int, largest: int, multiple: int = 1, *, sparse_below: int = 0) -> list[int]:
    """Return buckets that double from `smallest`. The last bucket holds `largest`: it is `largest` rounded up to a
    multiple of `multiple`, or the next doubling if `largest` is at most `multiple`. Below `sparse_below`, which is
    `smallest` times a power of four, each bucket is four times the previous bucket."""
    buckets = []
    size = smallest
    while size < largest:
        buckets.append(size)
        size *= 4 if size < sparse_below else 2
    last = size if largest <= multiple else -(-largest // multiple) * multiple
    return [b for b in buckets if b < last] + [last]


def prompt_buckets(largest: int) -> list[int]:
    """Return the buckets of prompt tokens of a step on GPUs, up to `largest`: few where reading the weights takes most
    of the time, and above that so dense that few prompts are padded by more than 15 %
    (`python -m benchmarks.gpu.bounds --only buckets`)."""
    buckets, octave = list(_FLAT_TOKENS), _STEEP_TOKENS
    while octave < largest:
        buckets += [octave * part // _OCTAVE[0] for part in _OCTAVE]
        octave *= 2
    return [*(b for b in buckets if b < largest), largest]


class PromptSize(NamedTuple):
    """Limits of a program for prompt chunks."""

    tokens: int
    """Padded number of tokens of all chunks."""
    prefix_room: int | None
    """Maximum total length of the hidden prefixes, each rounded up to a multiple of `PREFIX_STEP`; None: no maximum."""

    def holds(self, tokens: int, prefix: int) -> bool:
        return self.tokens >= tokens and (self.prefix_room is None or self.prefix_room >= prefix)

    @property
    def cost(self) -> tuple[int, bool, int]:
        """Sort key: of several sizes that hold a step, the size with the smallest key takes the least time."""
        return self.tokens, self.prefix_room is None, self.prefix_room or 0


def prefix_sizes(
    prompts: Sequence[int], *, max_num_seqs: int, max_model_len: int, in_pieces: bool, few_tokens: int
) -> list[PromptSize]:
    """Return the sizes of programs for prompts with hidden prefixes, on GPUs; the last size holds every step.

    Only the largest number of tokens has several maximum prefix lengths; smaller sizes hold only the shortest prefixes.

    Args:
        prompts: buckets of prompt tokens of a step, ascending.
        in_pieces: True: a program launches kernels for its maximum prefix length, so shorter maximum lengths are worth
            separate programs; False: the device determines the number of launches, from the prefixes.
        few_tokens: number of tokens up to which the number of kernel launches does not depend on the prefix lengths.
    """
    coarse, size = [prompts[-1]], prompts[0]
    while size < prompts[-1]:
        coarse.insert(-1, bucket_for(prompts, size))
        size *= _SPARSE_PREFIX
    found = []
    for tokens in dict.fromkeys(coarse):
        most = min(max_num_seqs, tokens) * padded_prefix(max_model_len)
        rooms: list[int | None] = [room for room in _PREFIX_ROOMS if room < most] if in_pieces else []
        if tokens <= few_tokens and max_model_len <= _PREFIX_ROOMS[0]:
            rooms = []
        rooms.append(None)
        found += [PromptSize(tokens, room) for room in (rooms if tokens == prompts[-1] else rooms[:1])]
    return found


PREFIX_STEP = 256
"""Hidden prefixes are padded to a multiple of this number of positions, a multiple of every tile of the kernels."""


def padded_prefix(length: _Length) -> _Length:
    """Return the padded length of a hidden prefix, or of each of several."""
    return -(-length // PREFIX_STEP) * PREFIX_STEP


def bucket_for(buckets: Sequence[int], size: int) -> int:
    """Return the smallest bucket that holds `size`."""
    return next(b for b in buckets if b >= size)


@dataclasses.dataclass(kw_only=True)
class Buckets:
    """Padded sizes that programs are compiled for, ascending."""

    decode: list[int]
    """Numbers of decode rows, and of sampling rows."""
    masked: list[int]
    """Numbers of sampling rows in steps with at least one masked row."""
    prefill: list[int]
    """Numbers of tokens of prompt chunks."""
    prefixed: list[PromptSize]
    """Sizes of programs for prompts with hidden prefixes; `prefill` has the sizes for prompts without hidden
    prefixes."""
    scored: list[int]
    """Numbers of tokens of prompt chunks in steps that return the hidden states of all tokens."""
    copies: list[int]
    """Numbers of blocks copied before a step."""
    conversions: list[int]
    """Numbers of X blocks that one program converts."""

    @classmethod
    def for_limits(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        hidden_block_size: int,
        rows_multiple: int,
        sparse: bool = False,
        has_rooms: bool = False,
        in_pieces: bool = True,
        few_tokens: int = 0,
    ) -> "Buckets":
        """Return the buckets up to the limits of a step; the largest number of rows is a multiple of `rows_multiple`.

        Args:
            sparse: True: use fewer row buckets where reading the weights takes most of a step, and `prompt_buckets` for
                tokens.
            has_rooms: True: separate programs are compiled for prompts with hidden prefixes.
            in_pieces, few_tokens: see `prefix_sizes`.
        """
        decode = power_of_two_buckets(1, max_num_seqs, rows_multiple, sparse_below=_SPARSE_ROWS if sparse else 0)
        if sparse:
            prefill = prompt_buckets(max_num_batched_tokens)
        else:
            smallest = min(_MIN_PREFILL_BUCKET, max_num_batched_tokens)
            prefill = power_of_two_buckets(smallest, max_num_batched_tokens)
        prefixed = prefix_sizes(
            prefill, max_num_seqs=max_num_seqs, max_model_len=max_model_len, in_pieces=in_pieces, few_tokens=few_tokens
        )
        return cls(
            decode=decode,
            # Every second bucket: half as many programs to compile, for at most twice the rows in the sampler.
            masked=sorted({decode[0], *decode[::-2]}),
            prefill=prefill,
            prefixed=prefixed if has_rooms else [],
            # About one bucket per power of four, or per power of two with `sparse`.
            scored=prefill[:: -len(_OCTAVE) if sparse else -2][::-1],
            copies=sorted({min(8, 2 * max_num_seqs), 2 * max_num_seqs}),
            conversions=sorted({-(-min(n, max_model_len) // hidden_block_size) for n in _CONVERT_TOKENS}),
        )

    @property
    def prompts(self) -> list[PromptSize]:
        """Sizes of programs for prompts, the cheapest first."""
        without = 0 if self.prefixed else None
        return sorted([*(PromptSize(tokens, without) for tokens in self.prefill), *self.prefixed], key=lambda s: s.cost)

    def prompt_size(self, tokens: int, prefix: int) -> PromptSize:
        """Return the cheapest of `prompts` that holds a step.

        Args:
            tokens: number of tokens of all chunks.
            prefix: total length of the hidden prefixes, each rounded up by `padded_prefix`.
        """
        return next(size for size in self.prompts if size.holds(tokens, prefix))

    def forward_shapes(self, *, mixed: bool) -> list[tuple[int, PromptSize | None]]:
        """Return the (decode rows, prompt size) of every forward program; if `mixed`, including programs that have
        both."""
        prompts = self.prompts
        shapes = [*((rows, None) for rows in self.decode), *((0, size) for size in prompts)]
        return shapes + [(self.decode[-1], size) for size in prompts] if mixed else shapes


@dataclasses.dataclass(frozen=True)
class SamplerVariant:
    """Features of a sampling program; a program is compiled for each combination that requests can need."""

    greedy: bool = False
    """True if all rows take the most likely token and their settings are ignored."""
    penalised: bool = False
    """True if rows may have penalties, a bias or `min_tokens`, and log probabilities are returned."""
    masked: bool = False
    """True if rows may have a mask of allowed tokens."""

    @classmethod
    def for_rows(cls, params: Sequence[SamplingParams], *, masked: bool) -> "SamplerVariant":
        """Return the cheapest variant that serves the rows."""
        if any(p.needs_penalties or p.logprobs is not None for p in params):
            return cls(penalised=True, masked=masked)
        if masked:
            return cls(masked=True)
        return GREEDY if all(p.is_greedy for p in params) else cls()

    def broader(self) -> "list[SamplerVariant]":
        """Return the other variants that sample the same tokens for the same rows, if programs branch; the cheapest
        first."""
        others = [SAMPLED, SamplerVariant(masked=True), SamplerVariant(penalised=True), EVERYTHING]
        needed = {name for name in ("penalised", "masked") if getattr(self, name)}
        return [v for v in others if v != self and all(getattr(v, name) for name in needed)]

    @classmethod
    def variants(cls) -> "list[SamplerVariant]":
        """Return all variants without masks."""
        return [GREEDY, cls(), cls(penalised=True)]

    @classmethod
    def masked_variants(cls) -> "list[SamplerVariant]":
        """Return all variants with masks."""
        return [cls(masked=True), cls(penalised=True, masked=True)]


GREEDY = SamplerVariant(greedy=True)
SAMPLED = SamplerVariant()
EVERYTHING = SamplerVariant(penalised=True, masked=True)
"""Variant that serves all rows, if programs branch."""
