"""Step times of an executor that pads: one compiled program a bucket, attention a tile at a time.

`StepCosts` is linear in tokens, which is what policies can weigh and a solver can optimise. An executor with few
compiled programs is a staircase instead: a step of 5 requests takes as long as one of 8, or nearly so where its products
skip padding. This model knows the stairs:

    step = base of its program + products per decode row and per token of a chunk
                               + attention, where decode rows    have KV (hidden) cache at all, and per tile of it
                                            and chunks           per row, per pair of tiles, per tile of cached prefix

Fitted by non-negative least squares like the linear one; used to predict (the simulator), not to decide.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apt_jax.sched.request_table import HIDDEN, KV


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramShapes:
    """The shapes that an executor pads steps to."""

    decode_buckets: tuple[int, ...]
    """Rows of a step without chunks, ascending."""
    prefill_buckets: tuple[int, ...]
    """Tokens of a step with chunks, ascending."""
    max_num_seqs: int
    """Most rows that a step may have, at most the last bucket's."""
    mixed: bool
    """Decode rows have their own attention beside chunks; else a step with both is two programs, one after another."""
    rows_per_tile: int
    """Decode rows that attend together."""
    tokens_per_tile: int
    """Cached positions that they read at a time."""
    query_tile: int
    """Tokens of a chunk that attend together."""
    key_tile: int
    """Positions that those read at a time."""

    def __post_init__(self) -> None:
        for name in ("decode_buckets", "prefill_buckets"):
            buckets: Sequence[int] = getattr(self, name)
            if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name}: {list(buckets)} must ascend from at least 1")
        if not 1 <= self.max_num_seqs <= self.decode_buckets[-1]:
            raise ValueError(f"max_num_seqs: {self.max_num_seqs} must lie in [1, {self.decode_buckets[-1]}]")
        for name in ("rows_per_tile", "tokens_per_tile", "query_tile", "key_tile"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")

    def programs(self) -> list[tuple[int, int]]:
        """(decode rows, prefill tokens) of every program."""
        programs = [(rows, 0) for rows in self.decode_buckets]
        programs += [(0, tokens) for tokens in self.prefill_buckets]
        if self.mixed:
            programs += [(self.decode_buckets[-1], tokens) for tokens in self.prefill_buckets]
        return programs

    def feature_names(self) -> list[str]:
        """Names of the coefficients, in order."""
        bases = [f"program_{rows}_{tokens}" for rows, tokens in self.programs()]
        return [*bases, *_SHARED]

    def features(
        self, num_tokens: NDArray[np.int32], start: NDArray[np.int32], kind: NDArray[np.int8]
    ) -> NDArray[np.float64]:
        """(num_coefficients,) what is in a step; arguments as of `StepCosts.step_s`, at least one row."""
        decode = num_tokens == 1
        num_decode, chunk = int(np.count_nonzero(decode)), ~decode
        padded_rows = padded_tokens = 0
        if num_decode < num_tokens.size:
            padded_tokens = _bucket(self.prefill_buckets, int(num_tokens[chunk].sum()))
        if num_decode:
            beside = self.mixed and padded_tokens
            padded_rows = self.decode_buckets[-1] if beside else _bucket(self.decode_buckets, num_decode)
        used = [(padded_rows, padded_tokens)]
        if padded_rows and padded_tokens and not self.mixed:
            used = [(padded_rows, 0), (0, padded_tokens)]
        programs = self.programs()
        out = np.zeros(len(programs) + len(_SHARED))
        for program in used:
            out[programs.index(program)] = 1.0
        parts = out[len(programs) :]
        parts[_ROWS], parts[_TOKENS] = num_decode, num_tokens[chunk].sum()
        if padded_rows:
            self._decode_parts(padded_rows, start[decode] + 1, kind[decode], parts)
        if padded_tokens:
            tokens, prefix, hidden = num_tokens[chunk], start[chunk], kind[chunk] == HIDDEN
            query, key = min(self.query_tile, padded_tokens), min(self.key_tile, padded_tokens)
            query_tiles = -(-tokens // query)
            prefix_tiles = -(-prefix // self.key_tile)
            # Tile i of the queries meets the keys of tokens 0 to (i + 1) * query.
            full, rest = np.divmod(tokens, query)
            per_query = query / key
            own = full * (full + 1) / 2 * per_query + (rest > 0) * np.ceil(tokens / key)
            parts[_CHUNKS] = chunk.sum()
            parts[_OWN] = own.sum() * (query * key) / (self.query_tile * self.key_tile)
            parts[_KV_PREFIX] = prefix_tiles[~hidden].sum()
            parts[_HIDDEN_PREFIX] = prefix_tiles[hidden].sum()
            parts[_PREFIX] = (prefix_tiles * query_tiles).sum() * query / self.query_tile
        return out

    def _decode_parts(
        self,
        num_rows: int,
        lens: NDArray[np.int32],
        kind: NDArray[np.int8],
        parts: NDArray[np.float64],
    ) -> None:
        """Tiles of rows, KV rows first and by length within a kind, each read up to its longest context."""
        rows = min(num_rows, self.rows_per_tile)
        order = np.lexsort((-lens, kind))
        lens, kind = lens[order], kind[order]
        num_kv = int(np.count_nonzero(kind == KV))
        for which, first, last in ((KV, 0, num_kv), (HIDDEN, num_kv, lens.size)):
            if first == last:
                continue
            # Its longest row is the first one of the kind in every tile.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramCosts:
    """Coefficients, seconds, in the order of `shapes.feature_names()`."""

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
        """Most rows of a step."""
        return self.shapes.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens of a step with chunks."""
        return self.shapes.prefill_buckets[-1]

    def step_s(self, num_tokens: NDArray[np.int32], start: NDArray[np.int32], kind: NDArray[np.int8]) -> float:
        """Predicted time of one step, seconds; see `StepCosts.step_s`. Raises ValueError for one beyond the buckets."""
        if num_tokens.size == 0:
            return 0.0
        return float(self.shapes.features(num_tokens, start, kind) @ np.array(self.coefficients))


def _bucket(buckets: Sequence[int], size: int) -> int:
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"{size} rows or tokens in a step; measured up to {buckets[-1]}")
