"""Groups of layers that share arrays of the pool: every layer has a place of its own, and what contexts then take."""

import bisect
import dataclasses

import pytest

from apt_jax.cache import HybridCache
from apt_jax.config import CacheConfig
from apt_jax.core.kinds import KV, CacheKindSpec
from apt_jax.models.config import AttentionShape, ModelConfig, RopeConfig
from apt_jax.models.layer_groups import LayerGroups, layer_groups


def gemma4(num_layers: int, key_heads: int, global_key_heads: int, *, one_tensor: bool) -> ModelConfig:
    """The attention of Gemma 4: five layers of six with a window of 1,024 positions."""
    return ModelConfig(
        family="test", vocab_size=1000, hidden_size=3840, num_layers=num_layers, num_heads=32, num_kv_heads=key_heads, head_dim=256,
        ffn_size=100, max_position=1 << 18, norm="rms", norm_bias=False, norm_placement="sandwich", position="rope",
        rope=RopeConfig(inv_freq=(1.0,) * 64 + (0.0,) * 192), local_rope=RopeConfig(inv_freq=(1.0,) * 128),
        local_layers=tuple(i for i in range(num_layers) if (i + 1) % 6),
        layer_windows=tuple(1024 if (i + 1) % 6 else None for i in range(num_layers)),
        qk_norm="head", value_norm=True, attention_scale=1.0,
        global_attention=AttentionShape(
            num_kv_heads=global_key_heads, head_dim=512, one_projection=True, turned_lanes=128 if one_tensor else None
        ),
    )  # fmt: skip


def groups_of(config: ModelConfig, block_size: int = 16, **changes) -> LayerGroups | None:
    cache = CacheConfig(block_size=block_size, **changes)
    return layer_groups(config, cache, hidden=False, max_model_len=config.max_position)


def request_bytes(config: ModelConfig, context: int) -> int:
    """Bytes of bfloat16 that a request of `context` tokens holds, by the blocks that the cache counts."""
    groups = groups_of(config)
    assert groups is not None
    cache = HybridCache(
        num_blocks=1 << 20, block_size=groups.block_size, max_num_seqs=1, windows=groups.windows,
        blocks_per_group=(groups.blocks_per_group, 1),
    )  # fmt: skip
    blocks = cache.blocks_needed(context, KV) - groups.windows.most_blocks(context) + groups.windows.num_blocks(context)
    return blocks * groups.num_arrays * 16 * config.lane * 2


@pytest.mark.parametrize(
    ("shape", "context", "one", "two", "all_positions"),
    [
        ((48, 8, 1), 16_384, 0.52, 0.61, 5.64),
        ((48, 8, 1), 131_072, 1.77, 2.49, 45.1),
        ((60, 16, 4), 16_384, 1.75, 2.19, 14.8),
        ((60, 16, 4), 131_072, 8.01, 11.6, 118.1),
    ],
    ids=["12B, 16K", "12B, 128K", "31B, 16K", "31B, 128K"],
)
def test_what_a_context_takes(shape, context, one, two, all_positions):
    """GB with one tensor in global layers, with two, and with two and all positions in all layers."""
    configs = [gemma4(*shape, one_tensor=is_one) for is_one in (True, False)]
    assert [request_bytes(config, context) / 1e9 for config in configs] == pytest.approx([one, two], rel=0.01)
    layers, heads, wide = shape
    kept = 2 * 2 * context * (layers - layers // 6) * heads * 256 + 2 * 2 * context * (layers // 6) * wide * 512
    assert kept / 1e9 == pytest.approx(all_positions, rel=0.01)


@pytest.mark.parametrize("pattern", ["wwgww", "gw", "wgggw", "g" + "w" * 13, "wwwwwg" * 4])
def test_layers_of_one_array_never_use_the_same_blocks(pattern):
    config = dataclasses.replace(
        gemma4(len(pattern), 8, 8, one_tensor=False), global_attention=None, value_norm=False,
        rope=RopeConfig(inv_freq=(1.0,)), local_rope=None, local_layers=(), layer_windows=tuple(100 if layer == "w" else None for layer in pattern),
    )  # fmt: skip
    groups = groups_of(config)
    assert groups is not None
    places = list(zip(groups.arrays, groups.sets, strict=True))
    assert len(set(places)) == len(pattern)
    assert max(groups.arrays) < groups.num_arrays == pattern.count("g")
    assert {index is not None for (_, index), layer in zip(places, pattern, strict=True) if layer == "w"} == {True}
    num_sets = max(index for index in groups.sets if index is not None) + 1
    assert groups.windows.blocks_per_group == 2 * num_sets
    assert (num_sets - 1) * groups.num_arrays < pattern.count("w")


def test_where_all_layers_keep_all_positions():
    config = gemma4(12, 8, 1, one_tensor=True)
    assert groups_of(config) is not None
    assert groups_of(config, swap_space=1.0) is None
    assert layer_groups(config, CacheConfig(), hidden=True, max_model_len=1 << 18) is None
    assert layer_groups(config, CacheConfig(), hidden=False, max_model_len=1 << 18, both_ends=True) is None
    assert layer_groups(config, CacheConfig(), hidden=False, max_model_len=1024) is None
    for windows in ((None,) * 12, (7,) * 12, (1, None) * 6, (7, 8, None) * 4):
        assert groups_of(dataclasses.replace(config, layer_windows=windows)) is None


@pytest.mark.parametrize("spec", [(16, 4, 2), (7, 3, 4), (100, 16, 10)])
def test_the_positions_that_blocks_hold_are_counted_one_by_one(spec):
    window, size, per_group = spec
    groups = groups_of(gemma4(12, 8, 1, one_tensor=False))
    assert groups is not None
    windows = dataclasses.replace(groups.windows, window=window, block_size=size, blocks_per_group=per_group)
    kind = CacheKindSpec(name="kv", blocks_per_group=1, windows=windows)

    def needed(tokens: int) -> int:
        first = max(0, tokens + 1 - window) // size  # of the next token's window
        most = max(-(-end // size) - max(0, end + 1 - window) // size for end in range(tokens, tokens + size))
        assert -(-tokens // size) - first <= windows.num_groups(tokens) <= most + 1
        return -(-tokens // 12) + windows.num_blocks(tokens)

    for blocks in range(0, 400, 7):
        held = bisect.bisect_right(range(12_000), blocks, key=needed) - 1
        assert kind.tokens_in(blocks, 12) <= held
        assert held - kind.tokens_in(blocks, 12) < max(size, 12)
