"""The set of compiled programs: padded sizes, cache kinds that can occur, and variants of the sampler. Needs no JAX."""

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
"""Tokens of prompts below `_STEEP_TOKENS`, on GPUs: an H100 reads weights as long as it multiplies 240 tokens by them, an
A100 as long as 150."""
_STEEP_TOKENS = 256
_OCTAVE = (16, 18, 21, 24, 28)
"""Sixteenths between a power of two and the next: steps of 12 to 17 %."""
_PREFIX_ROOMS = (8192, 32_768)
"""Sizes of hidden prefixes, in positions of all rows, with programs of their own; another program takes any size."""
_SPARSE_PREFIX = 4
"""Prompt sizes with hidden prefixes grow by such factors: what is computed of a prefix takes most of such a step."""
_CONVERT_TOKENS = (128, 1024)
"""About how many layer inputs the programs convert that compute keys and values from them."""

CHANGES_PER_CALL = 4096
"""Entries of per-slot arrays that one program changes, if they do not fit into a step."""


def power_of_two_buckets(smallest: int, largest: int, multiple: int = 1, *, sparse_below: int = 0) -> list[int]:
    """Powers of two from `smallest`, and last the smallest multiple of `multiple` that holds `largest`; below
    `sparse_below`, of which it is a multiple by a power of four, powers of four alone."""
    buckets = []
    size = smallest
    while size < largest:
        buckets.append(size)
        size *= 4 if size < sparse_below else 2
    last = size if largest <= multiple else -(-largest // multiple) * multiple
    return [b for b in buckets if b < last] + [last]


def prompt_buckets(largest: int) -> list[int]:
    """Tokens of prompts of a step on GPUs, up to `largest`: few where reading the weights takes the time, above that such
    that few prompts are padded by more than 15 % (`python -m benchmarks.gpu.bounds --only buckets`)."""
    buckets, octave = list(_FLAT_TOKENS), _STEEP_TOKENS
    while octave < largest:
        buckets += [octave * part // _OCTAVE[0] for part in _OCTAVE]
        octave *= 2
    return [*(b for b in buckets if b < largest), largest]


class PromptSize(NamedTuple):
    """Limits of a program for prompt chunks."""

    tokens: int
    """Padded tokens of all chunks."""
    prefix_room: int | None
    """Positions of all hidden prefixes, each rounded up to a multiple of `PREFIX_STEP`; None: any number."""

    def holds(self, tokens: int, prefix: int) -> bool:
        return self.tokens >= tokens and (self.prefix_room is None or self.prefix_room >= prefix)

    @property
    def cost(self) -> tuple[int, bool, int]:
        """Orders sizes by the time of a step that they all hold."""
        return self.tokens, self.prefix_room is None, self.prefix_room or 0


def prefix_sizes(
    prompts: Sequence[int], *, max_num_seqs: int, max_model_len: int, in_pieces: bool, few_tokens: int
) -> list[PromptSize]:
    """Sizes of programs for prompts with hidden prefixes, on GPUs; the last holds every step.

    Any number of positions is held beside many tokens alone, where there are most of them.

    Args:
        prompts: tokens of prompts of a step, ascending.
        in_pieces: kernels for prefixes are launched as often as positions may need; else the device counts.
        few_tokens: number of tokens up to which the number of launches does not depend on the prefixes.
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
"""Granularity of the room for a hidden prefix in positions: a multiple of every tile of the kernels."""


def padded_prefix(length: _Length) -> _Length:
    """Room that hidden prefixes take, each."""
    return -(-length // PREFIX_STEP) * PREFIX_STEP


def bucket_for(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that holds `size`."""
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
    """Sizes of programs for prompts with hidden prefixes; `prefill` has the sizes for prompts without."""
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
        """Buckets up to the limits of a step; the largest number of rows is a multiple of `rows_multiple`.

        Args:
            sparse: use fewer row buckets up to the size at which reading the weights takes most of a step, and
                `prompt_buckets` for tokens.
            has_rooms: programs are compiled for hidden prefixes of prompts by their length.
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
            # Every second one: half as many programs to compile, for at most twice the rows in the sampler.
            masked=sorted({decode[0], *decode[::-2]}),
            prefill=prefill,
            prefixed=prefixed if has_rooms else [],
            # As many as there are powers of four.
            scored=prefill[:: -len(_OCTAVE) if sparse else -2][::-1],
            copies=sorted({min(8, 2 * max_num_seqs), 2 * max_num_seqs}),
            conversions=sorted({-(-min(n, max_model_len) // hidden_block_size) for n in _CONVERT_TOKENS}),
        )

    @property
    def prompts(self) -> list[PromptSize]:
        """Sizes of programs for prompts, the cheapest that holds a step first."""
        without = 0 if self.prefixed else None
        return sorted([*(PromptSize(tokens, without) for tokens in self.prefill), *self.prefixed], key=lambda s: s.cost)

    def prompt_size(self, tokens: int, prefix: int) -> PromptSize:
        """The cheapest of `prompts` that holds a step.

        Args:
            prefix: total positions of the hidden prefixes, each rounded up by `padded_prefix`.
        """
        return next(size for size in self.prompts if size.holds(tokens, prefix))

    def forward_shapes(self, *, mixed: bool) -> list[tuple[int, PromptSize | None]]:
        """(decode rows, size of prompts) of all forward programs; `mixed`: also of those with both."""
        prompts = self.prompts
        shapes = [*((rows, None) for rows in self.decode), *((0, size) for size in prompts)]
        return shapes + [(self.decode[-1], size) for size in prompts] if mixed else shapes


@dataclasses.dataclass(frozen=True)
class SamplerVariant:
    """Features of a sampling program; each needed combination is compiled."""

    greedy: bool = False
    """True if all rows take the most likely token and their settings are ignored."""
    penalised: bool = False
    """True if rows may have penalties, a bias or `min_tokens`, and log probabilities are returned."""
    masked: bool = False
    """True if rows may have a mask of allowed tokens."""

    @classmethod
    def for_rows(cls, params: Sequence[SamplingParams], *, masked: bool) -> "SamplerVariant":
        """The cheapest variant of `variants` that serves the rows."""
        if any(p.needs_penalties or p.logprobs is not None for p in params):
            return cls(penalised=True, masked=masked)
        if masked:
            return cls(masked=True)
        return GREEDY if all(p.is_greedy for p in params) else cls()

    def broader(self) -> "list[SamplerVariant]":
        """Return the other variants that serve the same rows with the same tokens, if programs branch; the cheapest
        first."""
        others = [SAMPLED, SamplerVariant(masked=True), SamplerVariant(penalised=True), EVERYTHING]
        needed = {name for name in ("penalised", "masked") if getattr(self, name)}
        return [v for v in others if v != self and all(getattr(v, name) for name in needed)]

    @classmethod
    def variants(cls) -> "list[SamplerVariant]":
        """All variants without masks."""
        return [GREEDY, cls(), cls(penalised=True)]

    @classmethod
    def masked_variants(cls) -> "list[SamplerVariant]":
        """All variants with masks."""
        return [cls(masked=True), cls(penalised=True, masked=True)]


GREEDY = SamplerVariant(greedy=True)
SAMPLED = SamplerVariant()
EVERYTHING = SamplerVariant(penalised=True, masked=True)
"""Variant that serves all rows, if programs branch."""
