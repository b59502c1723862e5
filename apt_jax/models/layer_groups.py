"""Groups of layers that share arrays of the pool: layers that keep all positions, and layers that keep their window.

A model of which some layers attend to a window of positions, and others to all, has the arrays of its global layers.
The windowed layers use the same arrays, in other blocks, as many layers at a time as there are arrays:

    Gemma 3, 26 layers, every sixth global: 4 arrays, blocks of the global layers and of 6 sets of windowed layers

                       array 0   array 1   array 2   array 3
    global block       layer 5   layer 11  layer 17  layer 23     keys, values: 2 blocks of a group
    windowed, set 0    layer 0   layer 1   layer 2   layer 3      keys, values of 6 sets:
    ...                                                           12 blocks of a group
    windowed, set 5    layer 24  layer 25  -         -

So all blocks have one size and come from one pool. If global layers cache less of a token (Gemma 4: one narrower tensor
in place of two), their blocks hold more positions.
"""

import dataclasses
import math

from apt_jax.config import CacheConfig
from apt_jax.core.kinds import WindowSpec
from apt_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerGroups:
    """Where the layers of a model keep their cache."""

    num_arrays: int
    arrays: tuple[int, ...]
    """Array of the pool that each layer uses."""
    sets: tuple[int | None, ...]
    """Set of windowed layers that each layer belongs to; None: it keeps all positions. Set s uses the block tables 2 + 2
    s of keys and 3 + 2 s of values."""
    block_size: int
    """Positions in a block of the layers that keep all positions."""
    blocks_per_group: int
    """Blocks of these layers in a group: 2, or 1 if they cache keys and values as one tensor."""
    windows: WindowSpec

    def block_size_of(self, layer: int) -> int:
        """Return the number of positions in a block of a layer."""
        return self.block_size if self.sets[layer] is None else self.windows.block_size


def _num_positions(elements: int, lane: int, near: int) -> int:
    """Return how many slots of `lane` elements a block takes: up to a tenth fewer than fit if the number then has a
    smaller common multiple with `near`, because cached prefixes end at common multiples."""
    most = elements // lane
    return min(range(most, most - most // 10 - 1, -1), key=lambda num: math.lcm(num, near))


def layer_groups(
    config: ModelConfig, cache: CacheConfig, *, hidden: bool, max_model_len: int, both_ends: bool = False
) -> LayerGroups | None:
    """Return the groups of a model's layers; None: all layers keep all positions, each in an array of its own.

    That is so if no layer has a window (longer than a token), if all have one or their windows or shapes differ, and if positions of layer inputs, host
    memory or shared blocks are offered, whose groups have the same positions in all layers.

    Args:
        hidden: True if layer inputs are offered.
        max_model_len: longest context; a window that is as long has no effect.
        both_ends: True if requests share blocks.
    """
    if not config.layer_windows or hidden or both_ends or cache.swap_space or cache.mode == "hidden":
        return None
    windows = [w if w is not None and w < max_model_len else None for w in config.layer_windows]
    kept = [i for i, window in enumerate(windows) if window is None]
    windowed = [i for i, window in enumerate(windows) if window is not None]
    sizes = {window for window in windows if window is not None}
    shapes = ({config.attention_of(layer) for layer in layers} for layers in (kept, windowed))
    if not kept or len(sizes) != 1 or 1 in sizes or any(len(alike) != 1 for alike in shapes):
        return None
    arrays, sets = [0] * config.num_layers, list[int | None]([None] * config.num_layers)
    for at, layer in enumerate(kept):
        arrays[layer] = at
    for at, layer in enumerate(windowed):
        sets[layer], arrays[layer] = divmod(at, len(kept))
    num_sets = -(-len(windowed) // len(kept))
    elements, own = cache.block_size * config.lane, config.attention_of(kept[0])
    in_window = _num_positions(elements, config.attention_of(windowed[0]).lane, cache.block_size)
    return LayerGroups(
        num_arrays=len(kept),
        arrays=tuple(arrays),
        sets=tuple(sets),
        block_size=_num_positions(elements, own.lane, in_window),
        blocks_per_group=2 if own.turned_lanes is None else 1,
        windows=WindowSpec(window=sizes.pop(), block_size=in_window, blocks_per_group=2 * num_sets),
    )
