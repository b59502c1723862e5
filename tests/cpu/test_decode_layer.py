"""A decoder layer in one call does, to the bit, what its parts do one after another."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.backends import attention_ops
from apt_jax.cpu import build
from apt_jax.models.config import ModelConfig, RopeConfig
from apt_jax.models.decoder import decoder_step
from apt_jax.models.params import ModelParams, dummy_params
from apt_jax.models.quantize import quantize_params
from apt_jax.models.step import DecoderBatch, StepOptions
from apt_jax.models.weight_layout import fuse_products, map_matrices, pre_norm_layer, tile_params
from tests.support.grouped import K_KINDS, SMALL_KINDS, in_groups
from tests.support.paged_driver import CONFIG

build.load()
OPT = dataclasses.replace(CONFIG, hidden_size=48, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=96)
LLAMA = dataclasses.replace(
    OPT, family="llama", num_kv_heads=2, norm="rms", norm_bias=False, qkv_bias=False, out_bias=False, ffn_bias=False,
    gated=True, activation="silu", position="rope", rope=RopeConfig(inv_freq=tuple(0.5**i for i in range(8))),
)  # fmt: skip
VARIANTS: dict[str, ModelConfig] = {
    "opt": OPT,
    "llama": LLAMA,
    "heads of 80 lanes": dataclasses.replace(OPT, head_dim=80, num_heads=3, num_kv_heads=1),
    "gelu, partly rotary": dataclasses.replace(
        OPT, activation="gelu_tanh", position="rope", rope=RopeConfig(inv_freq=(1.0, 0.5, 0.25))
    ),
    "soft cap, window": dataclasses.replace(LLAMA, attention_softcap=2.0, layer_windows=(7, None)),
    "alibi": dataclasses.replace(OPT, position="alibi", alibi_slopes=(0.5, 0.25, 0.1, 0.05)),
    "sinks, window": dataclasses.replace(LLAMA, attention_sinks=True, layer_windows=(7, None)),
}
_WHOLE_GROUPS = {"heads of 80 lanes": {"num_heads": 2}}
LENS = (1, 33, 9, 70, 16)
BLOCK, TABLE = 8, 9
OPS = attention_ops("cpu", "cpu")
needs_one_call = pytest.mark.skipif(build.has_tiles(), reason="matrix tiles take parts one after another")


def _batch(rows: int) -> DecoderBatch:
    """`LENS` in a batch of `rows`, the last of them padding."""
    rng = np.random.default_rng(0)
    n, out_of_range = len(LENS), 10**6
    tables = np.zeros((rows, 2, TABLE), np.int32)
    tables[:n] = 1 + rng.permutation(n * 2 * TABLE).reshape(n, 2, TABLE)
    last = np.array(LENS) - 1
    slots = np.full((2, rows), out_of_range)
    slots[:, :n] = tables[np.arange(n), :, last // BLOCK].T * BLOCK + last % BLOCK
    nothing = dict.fromkeys(("prefill_offsets", "prefill_lens", "prefix_lens"), jnp.zeros((0,), jnp.int32))

    def padded(values: Any) -> jax.Array:
        return jnp.asarray(np.pad(np.asarray(values, np.int32), (0, rows - n)))

    return DecoderBatch(
        token_ids=padded(rng.integers(0, 97, n)), positions=padded(last),
        first_slots=jnp.asarray(slots[0], jnp.int32), second_slots=jnp.asarray(slots[1], jnp.int32),
        token_hidden=jnp.zeros(rows, bool), decode_tables=jnp.asarray(tables), decode_lens=padded(LENS),
        num_kv_rows=jnp.int32(n), num_decode_rows=jnp.int32(n), num_prefill_rows=jnp.int32(0), **nothing,
        prefill_tables=jnp.zeros((0, 2, TABLE), jnp.int32), prefill_hidden=jnp.zeros((0,), bool),
    )  # fmt: skip


def _step(
    config: ModelConfig, params: ModelParams, *, in_one: bool, hidden_too: bool = False
) -> tuple[list[np.ndarray], np.ndarray, int]:
    """Pools and hidden states after a step, and the layers that were computed in one call."""
    calls = []

    def decode_layer(*args: Any, **kwargs: Any) -> Any:
        assert OPS.decode_layer is not None
        calls.append(args)
        return OPS.decode_layer(*args, **kwargs)

    ops = dataclasses.replace(OPS, decode_layer=decode_layer)
    if not in_one:
        ops = dataclasses.replace(ops, takes_layer=lambda *_: False)
    options = StepOptions(
        num_decode=8, block_size=BLOCK, hidden_block_size=BLOCK, hidden_mode=None, kinds=(True, hidden_too), ops=ops
    )
    rng = np.random.default_rng(1)
    shape = (1 + len(LENS) * 2 * TABLE, BLOCK, config.lane)
    pools = tuple(jnp.asarray(rng.standard_normal(shape), params.dtype) for _ in params.layers)
    step = jax.jit(decoder_step, static_argnames=("config", "options"))
    after, hidden = step(params, pools, _batch(8), config=config, options=options)
    return [np.asarray(p, np.float32) for p in after], np.asarray(hidden[: len(LENS)], np.float32), len(calls)


@pytest.mark.in_turn(8)
@needs_one_call
@pytest.mark.parametrize(
    "weights", [None, "int8 widened", "int8", *SMALL_KINDS, *K_KINDS, "Q5_0 and Q8_0", "Q4_K and Q6_K"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_in_one_call_equals_its_parts(variant: str, dtype: str, weights: str | None) -> None:
    config = VARIANTS[variant]
    kinds = [] if weights is None or weights.startswith("int8") else weights.split(" and ")
    if set(kinds) & set(K_KINDS):
        sizes = {"num_heads": 16, "num_kv_heads": 4, "hidden_size": 256, "ffn_size": 256}
        slopes = {"alibi_slopes": config.alibi_slopes and config.alibi_slopes * 4}
        config = dataclasses.replace(config, **sizes, **slopes)
    elif kinds:
        config = dataclasses.replace(config, hidden_size=64, **_WHOLE_GROUPS.get(variant, {}))
    params = dummy_params(config, dtype, 3)
    if kinds:
        params = map_matrices(params, functools.partial(in_groups, kind=kinds[0]))
    if len(kinds) == 2:
        layers = [dataclasses.replace(p, wv=in_groups(p.wv.dequantized(dtype), kind=kinds[1])) for p in params.layers]
        params = dataclasses.replace(params, layers=tuple(layers))
    params = fuse_products(params, keep=False)
    if weights is not None and weights.startswith("int8"):
        params = quantize_params(params, keep=False)
    params = tile_params(params, keep=False, integers=weights != "int8 widened")
    one_pools, one, calls = _step(config, params, in_one=True)
    pools, parts, none = _step(config, params, in_one=False)
    assert (calls, none) == (config.num_layers, 0)
    assert np.isfinite(parts).all()
    np.testing.assert_array_equal(one, parts)
    for mine, theirs in zip(one_pools, pools, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@needs_one_call
def test_rows_without_layer_inputs_are_computed_in_one_call_where_others_may_have_them() -> None:
    params = tile_params(fuse_products(dummy_params(OPT, "float32", 3), keep=True), keep=True)
    one_pools, one, calls = _step(OPT, params, in_one=True, hidden_too=True)
    pools, parts, none = _step(OPT, params, in_one=False, hidden_too=True)
    assert (calls, none) == (OPT.num_layers, 0)
    np.testing.assert_array_equal(one, parts)
    for mine, theirs in zip(one_pools, pools, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("pool", "others"),
    [
        ("float32", {}),
        ("bfloat16", {"wo": "float32"}),
        ("bfloat16", {"w_down": "int8"}),
        ("float32", {"wqkv": "float32"}),
    ],
)
def test_a_layer_in_one_call_refuses_matrices_of_another_type(pool: str, others: dict[str, str]) -> None:
    params = tile_params(fuse_products(dummy_params(OPT, "bfloat16", 3), keep=False), keep=False)
    layer = pre_norm_layer(params.layers[0], OPT)
    assert layer is not None
    for name, dtype in others.items():
        tiles = getattr(layer, name)
        layer = dataclasses.replace(layer, **{name: dataclasses.replace(tiles, values=tiles.values.astype(dtype))})
    batch = _batch(8)
    assert OPS.decode_layer is not None
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"decode_layer: .* type"):
        OPS.decode_layer(
            jnp.zeros((8, OPT.hidden_size), jnp.float32), jnp.zeros((100, BLOCK * OPT.lane), pool), layer,
            tables=batch.decode_tables, lens=batch.decode_lens, slots=(batch.first_slots, batch.second_slots),
            live=batch.num_decode_rows, cos_sin=None, rules=None, block_size=BLOCK,
        )  # fmt: skip


@needs_one_call
@pytest.mark.parametrize(
    "change",
    [
        {"parallel": True},
        {"norm_placement": "post"},
        {"qk_norm": "head"},
        {"clip_qkv": 1.0},
        {"activation": "gelu"},
        {"attention_scale": 0.5},
    ],
)
def test_other_layers_are_computed_in_parts(change: dict[str, Any]) -> None:
    config = dataclasses.replace(OPT, **change)
    params = tile_params(fuse_products(dummy_params(config, "float32", 3), keep=False), keep=False)
    pools, hidden, calls = _step(config, params, in_one=True)
    assert calls == 0
    assert np.isfinite(hidden).all()
    assert len(pools) == config.num_layers
