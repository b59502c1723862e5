"""Memory plans: models that fit devices, and the advice where one does not."""

from typing import Any

import jax
import pytest

from apt_jax.config import CacheConfig
from apt_jax.errors import ConfigError
from apt_jax.executor.pool_memory import PoolMemory
from apt_jax.models import PRESETS, read_model_config
from apt_jax.models.memory_plan import MemoryPlan, memory_plan
from apt_jax.models.params import dummy_params
from apt_jax.models.quantize import quantize_params
from apt_jax.utils.swap_space import blocks_of

GIB = 2**30
USUAL = {
    "dtype": "bfloat16", "num_devices": 1, "device_bytes": GIB, "max_num_seqs": 64, "max_num_batched_tokens": 512,
    "num_blocks_override": None, "device_memory_utilization": 0.9,
}  # fmt: skip
HELPS = {
    "devices with more memory": {"device_bytes": 400 * GIB},
    "-tp": {"num_devices": 12},
    "--dtype": {"dtype": "bfloat16"},
    "--quantization": {"int8": True},
    "--max-num-batched-tokens": {"max_num_batched_tokens": 64, "max_num_seqs": 2},
    "--num-blocks-override": {"num_blocks_override": 4},
    "--device-memory-utilization": {"device_memory_utilization": 1.0},
}
"""Settings that each advice is taken to mean."""


def plan(**given) -> MemoryPlan:
    fields = {**USUAL, **given}
    cache = CacheConfig(
        num_blocks_override=fields.pop("num_blocks_override"),
        device_memory_utilization=fields.pop("device_memory_utilization"),
    )
    model = read_model_config({**PRESETS["opt-125m"], "num_hidden_layers": 2})[1]
    return memory_plan(model, fields.pop("dtype"), cache, **fields)


def test_weights_step_and_pool_fit_the_device():
    made = plan()
    assert made.weight_bytes == pytest.approx(2 * 54.4e6, rel=0.01)  # of two bytes each
    assert made.pool_bytes == pytest.approx(0.9 * (GIB - made.weight_bytes - made.step_bytes), rel=0.01)
    assert made.tokens["hidden"] > made.tokens["kv"]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_host_memory_holds_blocks_of_all_devices(num_devices):
    model = read_model_config(PRESETS["opt-125m"])[1]
    made = memory_plan(
        model, "bfloat16", CacheConfig(swap_space=1), num_devices=num_devices, device_bytes=GIB, max_num_seqs=8, max_num_batched_tokens=64
    )  # fmt: skip
    memory = PoolMemory(model, 16, "bfloat16", jax.local_devices()[0], None)
    assert made.host_blocks == blocks_of(1, memory.host_blocks().block_bytes)
    assert made.host_tokens == {"kv": made.host_blocks // 2 * 16, "hidden": made.host_blocks * 16}


@pytest.mark.parametrize(
    ("trouble", "advised"),
    [
        ({"device_bytes": GIB // 16}, {"-tp"}),
        ({"device_bytes": GIB // 6, "dtype": "float32"}, {"-tp", "--dtype"}),
        ({"device_bytes": GIB // 9}, {"-tp", "--quantization", "--max-num-batched-tokens"}),
        ({"device_bytes": GIB // 2, "max_num_seqs": 4096}, {"--max-num-batched-tokens"}),
        ({"num_blocks_override": 30_000}, {"-tp", "--num-blocks-override"}),
        ({"device_memory_utilization": 1e-4}, {"-tp", "--device-memory-utilization"}),
    ],
)
def test_what_is_advised_helps_and_what_would_not_is_not(trouble, advised):
    with pytest.raises(ConfigError) as refused:
        plan(**trouble)
    ways = str(refused.value).partition("possible remedies: ")[2]
    named = {name for name in HELPS if name in ways}
    assert named == advised | {"devices with more memory"}
    for name in named:
        plan(**{**trouble, **HELPS[name]})
    for name in HELPS.keys() - named - {"--num-blocks-override"}:  # which helps a share that is too small as well
        with pytest.raises(ConfigError):
            plan(**{**trouble, **HELPS[name]})


@pytest.mark.parametrize("mode", ["kv", "hybrid"])
def test_plans_of_int8_weights_are_what_rounded_weights_take(mode):
    model = read_model_config({**PRESETS["opt-125m"], "num_hidden_layers": 1, "vocab_size": 1000})[1]
    params = dummy_params(model, "bfloat16", 0)
    kept = quantize_params(params, keep=mode == "hybrid")
    made = memory_plan(
        model, "bfloat16", CacheConfig(mode=mode, hidden_attention="reproject"), num_devices=1, device_bytes=GIB,
        max_num_seqs=8, max_num_batched_tokens=64, int8=True,
    )  # fmt: skip
    assert made.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(kept))


def test_several_devices_have_the_projections_once_however_they_are_cut():
    model = read_model_config({**PRESETS["opt-125m"], "num_hidden_layers": 2})[1]
    given: dict[str, Any] = {"num_devices": 2, "device_bytes": GIB, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    by_head, by_feature = (memory_plan(model, "bfloat16", CacheConfig(mode=mode), **given) for mode in ("kv", "hybrid"))
    assert by_feature.weight_bytes == by_head.weight_bytes
    cuts = {leaf.name: leaf.cut for leaf in by_feature.leaves}
    assert cuts["layers.*.wk"] == cuts["layers.*.wv"] == "-, -, tensor"
    assert {leaf.cut for leaf in by_head.leaves if leaf.name in ("layers.*.wk", "layers.*.wv")} == {"tensor, -, -"}


def test_experts_are_cut_by_their_width_and_never_quantized():
    model = read_model_config({**PRESETS["qwen3-30b-a3b"], "num_hidden_layers": 1, "num_experts": 8})[1]
    given: dict[str, Any] = {"device_bytes": 8 * GIB, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    one, two = (memory_plan(model, "bfloat16", CacheConfig(mode="kv"), num_devices=n, **given) for n in (1, 2))
    sizes = {leaf.name: (leaf.cut, leaf.device_bytes) for leaf in two.leaves}
    assert sizes["layers.*.experts.w_down"] == ("-, -, tensor", 8 * 2048 * 768)
    assert sizes["layers.*.experts.w_up"] == ("-, tensor, -", 8 * 2048 * 768)
    assert one.weight_bytes == 2 * model.num_params
    with pytest.raises(ConfigError, match="mixtures of experts are not quantized"):
        memory_plan(model, "bfloat16", CacheConfig(mode="kv"), num_devices=1, int8=True, **given)


@pytest.mark.parametrize(
    ("name", "of_latents", "of_keys"),
    [
        ("deepseek-v2-lite", 27 * (512 + 64) * 2, 27 * 2 * 16 * 192 * 2),
        ("deepseek-v3", 61 * (512 + 64) * 2, 61 * 2 * 128 * 192 * 2),
        ("glm-4.7-flash", 47 * (512 + 64) * 2, 47 * 2 * 20 * 256 * 2),
        ("minicpm3-4b", 62 * (256 + 32) * 2, 62 * 2 * 40 * 96 * 2),
    ],
)
@pytest.mark.parametrize("devices", [1, 4])
def test_bytes_that_a_token_of_latent_attention_takes(name, of_latents, of_keys, devices):
    model = read_model_config(PRESETS[name])[1]
    given: dict[str, Any] = {"device_bytes": 2000 * GIB, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    one, two = (
        memory_plan(model, "bfloat16", CacheConfig(mode=mode), num_devices=devices, **given)
        for mode in ("hybrid", "kv")
    )
    assert one.tokens == {"hidden": one.num_blocks * 16}
    assert one.pool_bytes * devices == one.num_blocks * 16 * of_latents
    assert two.tokens == {"kv": two.num_blocks // 2 * 16}
    assert two.pool_bytes * devices == two.num_blocks * 8 * of_keys


def test_latent_attention_is_never_quantized():
    model = read_model_config(PRESETS["minicpm3-4b"])[1]
    with pytest.raises(ConfigError, match="latent attention is not quantized; leave out --quantization"):
        memory_plan(
            model, "bfloat16", CacheConfig(), num_devices=1, int8=True, device_bytes=80 * GIB, max_num_seqs=8, max_num_batched_tokens=64
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "active"), [("qwen3-30b-a3b", 3.35e9), ("mixtral-8x7b", 12.9e9), ("olmoe-1b-7b", 1.28e9)]
)
def test_active_parameters_are_those_that_were_published(name, active):
    assert read_model_config(PRESETS[name])[1].num_active_params == pytest.approx(active, rel=0.01)
