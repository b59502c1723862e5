"""Helpers of decode and prefill attention in plain XLA: reading blocks of the pool, masks and logit modifiers."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from apt_jax.ops.calls import LogitModifiers, Shards
from apt_jax.ops.linear import dot

MASKED = -1e30
"""Score of a masked position; finite, so a fully masked tile does not produce NaN."""

ROOM_STEP = 128
"""When the host chooses the memory of a step, it rounds the length of each row up to a multiple of this many
positions."""

Fetch = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""Function that reads the slots of G table entries per row. Arguments: table entries (R, A, G); whether the row owns
each of the T slots (R, T); positions of the slots (R, T); and indices of the rows (R,). It returns the slots' keys and
values (R, T, E). Values of slots that the row does not own must be finite."""


def own_slots(
    slot_ranges: Int32[Array, "J 2"] | None,
    length: Int32[Array, ""],
    num_entries: int,
    block_size: int,
) -> tuple[Bool[Array, " S"], Int32[Array, " S"]]:
    """Return a mask and the positions of all slots of a row's blocks, in table order; the mask is True for slots that
    the row owns."""
    slot = jnp.arange(block_size, dtype=jnp.int32)[None, :]
    entry = jnp.arange(num_entries, dtype=jnp.int32)[:, None]
    if slot_ranges is None:
        position = entry * block_size + slot
        own = position < length
    else:
        first, last = slot_ranges[:, :1], slot_ranges[:, 1:]
        upwards = first <= last
        order = jnp.where(upwards, slot - first, first - 1 - slot)
        position = entry * block_size + order
        own = (slot >= jnp.minimum(first, last)) & (slot < jnp.maximum(first, last))
        own = own & (position < length)
    return own.reshape(-1), jnp.where(own, position, 0).reshape(-1)


def project_shards(
    x: Float[Array, "T D"],
    wk: Float[Array, "K H D"],
    bk: Float[Array, "OWN H"] | None,
    wv: Float[Array, "K H D"],
    bv: Float[Array, "OWN H"] | None,
    tensor: Shards,
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """Return keys and values of this device's heads, in float32, from this device's D features of layer inputs, W_k and
    W_v. The products are summed over devices in the dtype of `x`, and scattered over heads."""
    parts = [dot(x.astype(w.dtype), w.reshape(-1, w.shape[2]), (1, 1)).astype(x.dtype) for w in (wk, wv)]
    # Heads are the first axis, so that each device's part is contiguous.
    by_head = jnp.stack([part.reshape(x.shape[0], *wk.shape[:2]) for part in parts]).transpose(2, 0, 1, 3)
    own = tensor.scatter_sum(by_head, 0).astype(jnp.float32)
    k, v = (own[:, i].transpose(1, 0, 2).reshape(x.shape[0], -1) for i in range(2))

    def biased(out: Array, b: Array | None) -> Array:
        return out if b is None else out + b.astype(jnp.float32).reshape(1, -1)

    return biased(k, bk), biased(v, bv)


def apply_rules(
    s: Float[Array, "*heads T"],
    distance: Int32[Array, "*one T"],
    rules: LogitModifiers,
    slopes_shape: tuple[int, ...],
) -> tuple[Array, Array]:
    """Apply logit modifiers to scores; return the scores and a mask of the keys that are not after the query, and
    within its window if there is one.

    `distance` is key position minus query position; distances, and slopes in `slopes_shape`, broadcast against the
    scores. See `reference.modified_scores`.
    """
    if rules.softcap is not None:
        s = rules.softcap * jnp.tanh(s / rules.softcap)
    if rules.slopes is not None:
        s = s + rules.slopes.reshape(slopes_shape) * distance.astype(jnp.float32)
    if rules.window is None:
        return s, distance <= 0
    return s, (distance <= 0) & (distance > -rules.window)


def initial_softmax(
    shape: tuple[int, ...], rules: LogitModifiers | None, sinks_shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """Return maximum and denominator of a softmax, float32 in `shape`, before the first key: those of the sinks if
    there are any. Sinks in `sinks_shape` broadcast against `shape`."""
    if rules is None or rules.sinks is None:
        return jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    sinks = rules.sinks.astype(jnp.float32).reshape(sinks_shape)
    return jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32)


def own_slots_of(
    slot_ranges: Int32[Array, "B J 2"] | None,
    lens: Int32[Array, " R"],
    first_row: Array,
    first_entry: Array,
    num_entries: int,
    block_size: int,
) -> tuple[Bool[Array, "R T"], Int32[Array, "R T"]]:
    """Return `own_slots` for R rows starting at `first_row` and `num_entries` table entries starting at
    `first_entry`."""
    start = first_entry * block_size
    if slot_ranges is None:
        position = start + jnp.arange(num_entries * block_size, dtype=jnp.int32)[None, :]
        return position < lens[:, None], jnp.broadcast_to(position, (lens.shape[0], position.shape[1]))
    ranges = lax.dynamic_slice(slot_ranges, (first_row, first_entry, jnp.int32(0)), (lens.shape[0], num_entries, 2))
    of_row = functools.partial(own_slots, num_entries=num_entries, block_size=block_size)
    own, position = jax.vmap(of_row)(ranges, lens - start)
    return own, start + position


def fetch_blocks(
    pool: Array,
    ids: Int32[Array, "R G"],
    block_size: int,
    own: Bool[Array, "R T"] | None,
    width: int | None = None,
    tensor: Shards | None = None,
) -> Float[Array, "R T E"]:
    """Read the slots of G blocks per row. With `own`, slots that the row does not own are zeros.

    Args:
        width: width of a slot, if `block_size` slots may not fill a block.
        tensor: devices over which the features of a slot are sharded; `width` then counts the features of all devices.
    """
    if tensor is not None:
        assert width is not None
        share = fetch_blocks(pool, ids, block_size, own, width // tensor.size)
        return tensor.gather(share, 2)
    r, g = ids.shape
    blocks = pool[ids.reshape(-1)]
    if width is not None and block_size * width < pool.shape[1] * pool.shape[2]:
        blocks = blocks.reshape(r * g, -1)[:, : block_size * width]
    slots = blocks.reshape(r, g * block_size, -1)
    if own is None:
        return slots
    return jnp.where(own[:, :, None], slots, jnp.zeros((), slots.dtype))
