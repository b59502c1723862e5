"""Step times of an executor that pads steps to buckets: one compiled program per bucket, attention tile by tile.

`StepCosts` is linear in tokens, which policies and solvers need. The step time of an executor with few compiled
programs is a staircase instead: a step of 5 requests takes as long as a step of 8, or nearly so if matrix products skip
padding. This model describes the staircase:

    step = base of its program + products      per decode row, per token of a chunk
                               + decode rows   by cache kind: once if there are any, per row, per tile of cache
                               + chunks        per chunk, per pair of tiles, per tile of cached prefix
                               + if programs are compiled by kind: once for hidden rows in a step with chunks, and by
                                 the padded size of its hidden prefixes

The model is fitted by non-negative least squares like the linear model. The simulator predicts step times with it;
policies do not use it.
"""

import bisect
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN, KV


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramShapes:
    """Shapes that an executor pads steps to."""

    decode_buckets: tuple[int, ...]
    """Numbers of rows of the programs for steps without chunks, ascending."""
    prefill_buckets: tuple[int, ...]
    """Numbers of tokens of the programs for steps with chunks, ascending."""
    max_num_seqs: int
    """Maximum number of rows in a step, at most the last of `decode_buckets`."""
    mixed: bool
    """True if a step with decode rows and chunks is one program, in which decode rows have their own attention; False
    if it is two programs, run one after the other."""
    rows_per_tile: int
    """Number of decode rows that attend together in one tile."""
    tokens_per_tile: int
    """Number of cached positions that a tile of decode rows reads at a time."""
    query_tile: int
    """Number of tokens of a chunk that attend together in one tile."""
    key_tile: int
    """Number of positions that a tile of chunk tokens reads at a time."""
    by_kind: bool = False
    """True if a step with chunks runs another program when it has hidden rows, and a third when its chunks attend to
    hidden prefixes."""
    prefix_sizes: tuple[tuple[int, int | None], ...] = ()
    """Sizes of the programs for chunks over hidden prefixes: (tokens, positions of hidden prefixes), sorted by both;
    None: any number of positions. Empty: the sizes are `prefill_buckets`, for any number of positions."""
    prefix_step: int = 1
    """Multiple to which the length of each hidden prefix is rounded up before a program is chosen."""

    def __post_init__(self) -> None:
        for name in ("decode_buckets", "prefill_buckets"):
            buckets: Sequence[int] = getattr(self, name)
            if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name}: {list(buckets)} must be ascending and at least 1")
        if self.prefix_sizes:
            if not self.by_kind:
                raise ValueError(f"prefix_sizes: {list(self.prefix_sizes)} must be empty if by_kind is False")
            if not {tokens for tokens, _ in self.prefix_sizes} <= {*self.prefill_buckets}:
                raise ValueError(f"prefix_sizes: {list(self.prefix_sizes)} must use sizes from prefill_buckets")
            if self.prefix_sizes[-1] != (self.prefill_buckets[-1], None):
                raise ValueError(f"prefix_sizes: {list(self.prefix_sizes)} must end with a size that holds every step")
        if not 1 <= self.max_num_seqs <= self.decode_buckets[-1]:
            raise ValueError(f"max_num_seqs: {self.max_num_seqs} must lie in [1, {self.decode_buckets[-1]}]")
        for name in ("rows_per_tile", "tokens_per_tile", "query_tile", "key_tile", "prefix_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")

    def programs(self) -> list[tuple[int, int]]:
        """Return (decode rows, prefill tokens) of every program, regardless of cache kinds."""
        return [program for family in self.families() for program in family]

    def families(self) -> list[list[tuple[int, int]]]:
        """Return `programs` in groups whose members differ only in one size, ascending."""
        families = [[(rows, 0) for rows in self.decode_buckets], [(0, tokens) for tokens in self.prefill_buckets]]
        if self.mixed:
            families.append([(self.decode_buckets[-1], tokens) for tokens in self.prefill_buckets])
        return families

    def feature_names(self) -> list[str]:
        """Return the names of the coefficients, in order."""
        bases = [f"program_{rows}_{tokens}" for rows, tokens in self.programs()]
        of_kinds = [*_OF_KINDS, *(f"hidden_prefix_{room or 'any'}" for room in self._rooms)] if self.by_kind else []
        return [*bases, *_SHARED, *of_kinds]

    @functools.cached_property
    def _rooms(self) -> list[int | None]:
        """Sizes of hidden prefixes that programs are compiled for, in positions, ascending; None: any size."""
        return sorted({room for _, room in self.prefix_sizes}, key=lambda room: room or np.inf) or [None]

    @functools.cached_property
    def _place(self) -> dict[tuple[int, int], int]:
        """Index of each program's base among the coefficients."""
        return {program: i for i, program in enumerate(self.programs())}

    def hidden_prefix(self, start: NDArray[np.int32]) -> int:
        """Return the number of hidden prefix positions, with padding, that a program must hold.

        Args:
            start: (n,) cached positions of each chunk of the hidden kind.
        """
        return int((-(-start // self.prefix_step)).sum()) * self.prefix_step

    def programs_of(
        self, num_decode: int, num_chunk_tokens: int, hidden_prefix: int = 0
    ) -> tuple[list[tuple[int, int]], int | None]:
        """Choose the programs that a step runs.

        Returns:
            The (decode rows, tokens) of each program, and the number of hidden prefix positions that they can hold;
            None: any number.

        Raises:
            ValueError: no program is large enough.
        """
        rows = tokens = 0
        room = None if hidden_prefix else 0
        if num_chunk_tokens:
            tokens = _bucket(self.prefill_buckets, num_chunk_tokens)
            if hidden_prefix and self.prefix_sizes:
                sizes = (size for size in self.prefix_sizes if size[0] >= tokens)
                tokens, room = next(size for size in sizes if size[1] is None or size[1] >= hidden_prefix)
        if num_decode:
            rows = self.decode_buckets[-1] if self.mixed and tokens else _bucket(self.decode_buckets, num_decode)
        return [(rows, 0), (0, tokens)] if rows and tokens and not self.mixed else [(rows, tokens)], room

    def features(
        self, num_tokens: NDArray[np.int32], start: NDArray[np.int32], kind: NDArray[np.int8]
    ) -> NDArray[np.float64]:
        """Return the (num_coefficients,) features of a step with at least one row; see `StepCosts.step_s`."""
        decode, hidden = num_tokens == 1, kind == HIDDEN
        chunk = ~decode
        num_decode = int(np.count_nonzero(decode))
        chunk_tokens = int(num_tokens.sum()) - num_decode
        prefix = self.hidden_prefix(start[chunk & hidden]) if self.by_kind and chunk_tokens else 0
        used, room = self.programs_of(num_decode, chunk_tokens, prefix)
        place = self._place
        out = np.zeros(len(place) + len(_SHARED) + (len(_OF_KINDS) + len(self._rooms) if self.by_kind else 0))
        for program in used:
            out[place[program]] = 1.0
        parts, of_kinds = out[len(place) :], out[len(place) + len(_SHARED) :]
        parts[_ROWS], parts[_TOKENS] = num_decode, chunk_tokens
        if num_decode:
            self._decode_parts(used[0][0], start[decode] + 1, kind[decode], parts)
        if chunk_tokens:
            self._chunk_parts(used[-1][1], num_tokens[chunk], start[chunk], hidden[chunk], parts)
            if self.by_kind and hidden.any():
                of_kinds[1 if num_decode else 0] = 1.0
                if prefix:  # cumulative: a larger size takes at least as long as each smaller size
                    of_kinds[len(_OF_KINDS) : len(_OF_KINDS) + self._rooms.index(room) + 1] = 1.0
        return out

    def _chunk_parts(
        self,
        padded_tokens: int,
        tokens: NDArray[np.int32],
        prefix: NDArray[np.int32],
        hidden: NDArray[np.bool_],
        parts: NDArray[np.float64],
    ) -> None:
        """Write the number of chunks and of their attention tiles, over own tokens and over prefixes, into `parts`."""
        query, key = min(self.query_tile, padded_tokens), min(self.key_tile, padded_tokens)
        # Tile i of the queries attends to tokens 0 to (i + 1) * query.
        full, rest = np.divmod(tokens, query)
        own = full * (full + 1) / 2 * (query / key) + (rest > 0) * np.ceil(tokens / key)
        parts[_CHUNKS] = tokens.size
        parts[_OWN] = own.sum() * (query * key) / (self.query_tile * self.key_tile)
        if not prefix.any():
            return
        query_tiles, prefix_tiles = -(-tokens // query), -(-prefix // self.key_tile)
        parts[_HIDDEN_PREFIX] = hidden_tiles = prefix_tiles[hidden].sum()
        parts[_KV_PREFIX] = prefix_tiles.sum() - hidden_tiles
        parts[_PREFIX] = (prefix_tiles * query_tiles).sum() * query / self.query_tile

    def _decode_parts(
        self,
        num_rows: int,
        lens: NDArray[np.int32],
        kind: NDArray[np.int8],
        parts: NDArray[np.float64],
    ) -> None:
        """Write the numbers of tiles of decode rows into `parts`. Rows are sorted by kind, KV first, then by length;
        each tile reads as many positions as its longest context has."""
        rows = min(num_rows, self.rows_per_tile)
        order = np.lexsort((-lens, kind))
        lens, kind = lens[order], kind[order]
        num_kv = int(np.count_nonzero(kind == KV))
        for which, first, last in ((KV, 0, num_kv), (HIDDEN, num_kv, lens.size)):
            if first == last:
                continue
            # The longest row of a tile is its first row of the kind.
            heads = np.arange(first // rows * rows, last, rows)
            longest = lens[np.maximum(heads, first)]
            steps = float((-(-longest // self.tokens_per_tile)).sum())
            at = _DECODE_KV if which == KV else _DECODE_HIDDEN
            parts[at : at + 4] = 1.0, num_rows, steps, steps * rows


_SHARED = (
    "row", "token",
    "decode_kv", "decode_kv_row", "decode_kv_tile", "decode_kv_tile_row",
    "decode_hidden", "decode_hidden_row", "decode_hidden_tile", "decode_hidden_tile_row",
    "chunk", "own_tile", "kv_prefix_tile", "hidden_prefix_tile", "prefix_tile",
)  # fmt: skip
_ROWS, _TOKENS, _DECODE_KV, _DECODE_HIDDEN = 0, 1, 2, 6
_CHUNKS, _OWN, _KV_PREFIX, _HIDDEN_PREFIX, _PREFIX = range(10, 15)
_OF_KINDS = ("hidden_prompt_step", "hidden_mixed_step")
"""Coefficients of programs compiled by kind: extra time of a step with chunks and hidden rows, without and with decode
rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramCosts:
    """Step times by compiled program; `coefficients` are in seconds, in the order of `shapes.feature_names()`."""

    shapes: ProgramShapes
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        names = self.shapes.feature_names()
        if len(self.coefficients) != len(names):
            raise ValueError(f"coefficients: {len(self.coefficients)} given, {len(names)} needed")
        for name, value in zip(names, self.coefficients, strict=True):
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"coefficients: {name} {value} must be finite and not < 0")

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of rows in a step."""
        return self.shapes.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum number of tokens in a step with chunks."""
        return self.shapes.prefill_buckets[-1]

    def step_s(self, num_tokens: NDArray[np.int32], start: NDArray[np.int32], kind: NDArray[np.int8]) -> float:
        """Return the predicted time of one step, in seconds; see `StepCosts.step_s`. Raises ValueError if the step
        exceeds the largest bucket."""
        if num_tokens.size == 0:
            return 0.0
        return float(self.shapes.features(num_tokens, start, kind) @ self._vector)

    @functools.cached_property
    def _vector(self) -> NDArray[np.float64]:
        return np.array(self.coefficients)


def _bucket(buckets: Sequence[int], size: int) -> int:
    place = bisect.bisect_left(buckets, size)
    if place < len(buckets):
        return buckets[place]
    raise ValueError(f"a step has {size} rows or tokens, but programs were measured only up to {buckets[-1]}")
