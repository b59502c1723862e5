"""Helpers for the decode kernels: slots of positions, logit modifiers, a step of the softmax, norms of keys."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plt

from apt_jax.ops.calls import KeyNorm, LogitModifiers
from apt_jax.pallas.triton_common import MASKED, check_pool, load, slot_of


def check_inputs(pool: Array, block_size: int, width: int) -> None:
    """Check that the blocks of a pool can hold `block_size` layer inputs of `width`.

    Raises:
        ValueError: the blocks are too small, or the kernels do not support their size or dtype.
    """
    check_pool(pool, pool.shape[1])
    if block_size < 1 or block_size * width > pool.shape[1] * pool.shape[2]:
        raise ValueError(f"blocks of {pool.shape=} do not hold {block_size=} layer inputs of {width=}")


def by_block(pool: Array) -> Array:
    """Return the pool with shape (P, C * E), indexed by (block, slot * width + lane)."""
    return pool.reshape(pool.shape[0], -1)


def find_slots(
    tables: Any, slot_ranges: Any, table: Any, half: int, position: Any, own: Any, block_size: int
) -> tuple[Any, Any, Any]:
    """Return the blocks and slots of positions, and the mask of positions that the row owns.

    Blocks and slots are valid only for owned positions.

    Args:
        tables: block tables.
        slot_ranges: slot ranges or None.
        table: row of the tables.
        half: 0 for keys or layer inputs, 1 for values.
        position: positions to look up.
        own: mask of positions to look up; positions outside the slot ranges are removed from it.
        block_size: number of slots per block.
    """
    block, slot = slot_of(tables, slot_ranges, table, half, position, own, block_size)
    if slot_ranges is None:
        return block, slot, own
    entry, order = lax.div(position, jnp.int32(block_size)), lax.rem(position, jnp.int32(block_size))
    first, last = (plt.load(slot_ranges.at[table, entry, jnp.int32(i)], mask=own, other=0) for i in range(2))
    return block, slot, own & (order < jnp.abs(last - first))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreModifiers:
    """The static part of `calls.LogitModifiers`, for a query at the last position of its row."""

    softcap: float | None = None
    window: int | None = None

    @classmethod
    def of(cls, rules: LogitModifiers | None) -> "ScoreModifiers":
        return cls() if rules is None else cls(softcap=rules.softcap, window=rules.window)

    def sees(self, position: Any, length: Any) -> Any:
        """Return the mask of positions that the query attends to."""
        return position < length if self.window is None else (position < length) & (position >= length - self.window)

    def __call__(self, s: Any, position: Any, length: Any, slopes: Any, heads: Any, head_ok: Any) -> Any:
        """Apply soft cap and slopes to scores; `sees` applies the window.

        Args:
            s: (heads, positions) scores.
            position: (positions,) positions.
            length: length of the row.
            slopes: ref of (N,) ALiBi slopes, or None.
            heads: (heads,) head numbers.
            head_ok: (heads,) mask of existing heads.
        """
        if self.softcap is not None:
            s = self.softcap * jnp.tanh(s * (1 / self.softcap))
        if slopes is not None:
            slope = plt.load(slopes.at[heads], mask=head_ok, other=0)
            s = s + slope[:, None] * (position - (length - 1)).astype(jnp.float32)[None, :]
        return s


def slopes_of(rules: LogitModifiers | None) -> Array | None:
    """Return the ALiBi slopes in float32, which kernels read from memory; None without slopes."""
    return None if rules is None or rules.slopes is None else rules.slopes.astype(jnp.float32)


def sinks_of(rules: LogitModifiers | None) -> Array | None:
    """Return the sinks in float32, which kernels read from memory; None without sinks."""
    return None if rules is None or rules.sinks is None else rules.sinks.astype(jnp.float32)


def softmax_step(state: tuple[Any, Any], s: Any, own: Any) -> tuple[Any, Any, Any, Any]:
    """Fold scores (heads, tokens) into the running maximum m and denominator l.

    Returns:
        The new m and l, the weights p, and the factor that rescales earlier sums.
    """
    m, l = state
    s = jnp.where(own[None, :], s, MASKED)
    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    p = jnp.where(own[None, :], jnp.exp(s - m_new[:, None]), 0.0)
    before = jnp.exp(m - m_new)
    return m_new, l * before + jnp.sum(p, axis=1), p, before


def check_key_norm(norm: KeyNorm | None, head_dim: int) -> None:
    """Check that a norm of keys is per head.

    Raises:
        ValueError: the norm is over all heads together, but no program of a kernel has the keys of all heads.
    """
    if norm is not None and norm.scale.shape[0] != head_dim:
        raise ValueError(f"norms over all heads together ({norm.scale.shape=}) are not supported by the kernels")


def scale_of(norm: KeyNorm | None) -> Array | None:
    """Return the scale of a norm in float32, which kernels read from memory; None without a norm."""
    return None if norm is None else norm.scale.astype(jnp.float32)


def lane_scale(scale: Any, lane: Any, ok: Any) -> Any:
    """Load the scale of a norm for some lanes of a head."""
    return load(scale, (lane,), lane.shape, ok)
