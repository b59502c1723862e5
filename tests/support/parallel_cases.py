"""Small models of every shape that matters to tensor parallelism, run on simulated devices: python -m
tests.support.parallel_cases

A process of its own, because the number of simulated devices is fixed when JAX starts. Each line of its input is
`[CASE, NUMBER_OF_DEVICES]`, and each line of its output what they generated and how the pool is cut, or an error.
"""

import collections
import dataclasses
import functools
import json
import os
import re
import sys
import traceback
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Many programs are compiled and each runs a few times.
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = quick

import jax
import numpy as np

from apt_jax.config import CacheConfig, Quantization
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.executor.programs import programs
from apt_jax.models import sharding as parallel
from apt_jax.models.config import AttentionShape, ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from apt_jax.models.params import ModelParams, dummy_params, param_names
from apt_jax.pallas import triton_decode_shards
from apt_jax.sched import make_policy
from tests.support.compiled_programs import compiled_decode_step
from tests.support.generation import greedy
from tests.support.random_plan_policy import RandomPlanPolicy, RandomPolicy
from tests.support.shared_serving import draw_requests, serve

BASE: dict[str, Any] = {
    "family": "test", "vocab_size": 97, "hidden_size": 64, "num_layers": 2, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8,
    "ffn_size": 96, "max_position": 128, "tie_embeddings": False,
}  # fmt: skip
LLAMA = BASE | {
    "activation": "silu", "gated": True, "norm": "rms", "norm_bias": False, "position": "rope", "qkv_bias": False, "out_bias": False,
    "ffn_bias": False, "rope": RopeConfig(inv_freq=(1.0, 0.3, 0.1, 0.03)),
}  # fmt: skip


_COLLECTIVE = re.compile(r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(.*")


def collectives_of(compiled: str, scope: str) -> dict[str, int]:
    """Count each collective of a compiled program where `scope` is part of its name, such as ``layer1``.

    Args:
        compiled: text of the program, from `compiled_decode_step`.
    """
    found = (_COLLECTIVE.search(line) for line in compiled.splitlines())
    return dict(collections.Counter(m.group(1) for m in found if m and f"/{scope}/" in m.group(0)))


def _llama(**fields: Any) -> ModelConfig:
    values: dict[str, Any] = LLAMA | fields
    return ModelConfig(**values)


def _base(**fields: Any) -> ModelConfig:
    values: dict[str, Any] = BASE | fields
    return ModelConfig(**values)


_SLOPES = tuple(2.0**-i for i in range(1, 9))
MODELS: dict[str, ModelConfig] = {
    "opt": _base(),
    "bloom": _base(position="alibi", alibi_slopes=_SLOPES, embedding_norm=True, head_bias=True),
    "neox": _base(position="rope", rope=RopeConfig(inv_freq=(1.0, 0.1)), parallel=True),
    "llama": _llama(),
    "llama grouped": _llama(num_kv_heads=2),
    "qwen3": _llama(qk_norm="head", qkv_bias=True),
    "olmo2": _llama(qk_norm="lane", norm_placement="output"),
    "olmo2 grouped": _llama(qk_norm="lane", norm_placement="output", num_kv_heads=2),
    "gemma2": _llama(
        norm_placement="sandwich", attention_softcap=2.0, logits_softcap=5.0, layer_windows=(7, None), head_dim=16
    ),
    "gemma3": _llama(
        norm_placement="sandwich", norm_offset=1.0, qk_norm="head", layer_windows=(7, None), local_layers=(0,),
        local_rope=RopeConfig(inv_freq=(1.5, 0.7, 0.4, 0.2)),
    ),
    "gemma4": _llama(
        norm_placement="sandwich", qk_norm="head", value_norm=True, layer_scale=True, attention_scale=1.0, layer_windows=(7, None),
        local_layers=(0,), local_rope=RopeConfig(inv_freq=(1.5, 0.7, 0.4, 0.2)),
        rope=RopeConfig(inv_freq=(1.0, 0.3, *(0.0,) * 6)),
        global_attention=AttentionShape(num_kv_heads=2, head_dim=16, one_projection=True, turned_lanes=4),
    ),
    "experts": _llama(
        num_layers=3, experts=ExpertsConfig(num_experts=5, per_token=2, size=16, normalize=True, dense_layers=(0,), shared_size=8),
    ),
    "latent": _llama(
        head_dim=22, latent=LatentConfig(rank=24, value_dim=12, query_rank=20), residual_scale=0.7, logits_scale=1.5,
        experts=ExpertsConfig(
            num_experts=6, per_token=2, size=16, normalize=True, scoring="sigmoid", num_groups=3, groups_per_token=2, factor=1.8,
            dense_layers=(0,), shared_size=8, shared_gate=False,
        ),
    ),
    "gpt_oss": _llama(
        num_kv_heads=2, qkv_bias=True, out_bias=True, attention_sinks=True, layer_windows=(7, None),
        experts=ExpertsConfig(num_experts=5, per_token=2, size=16, normalize=True, bias=True, clamp=(1.702, 0.5)),
    ),
}  # fmt: skip
MODELS["gemma4 experts"] = dataclasses.replace(
    MODELS["gemma4"],
    experts=ExpertsConfig(num_experts=5, per_token=2, size=16, normalize=True, shared_size=32, shared_gate=False, apart=True),
)  # fmt: skip
CASES: dict[str, tuple[str, str, Any]] = {
    # name: model, kind that requests get, attention over layer inputs
    "opt, kv": ("opt", "kv", "auto"),
    "opt, hidden, absorbed": ("opt", "hidden", "absorb"),
    "opt, hidden, reprojected": ("opt", "hidden", "reproject"),
    "opt, hidden, on kernels": ("opt", "hidden", "absorb"),
    "opt, both": ("opt", "hybrid", "absorb"),
    "opt, converted": ("opt", "hybrid", "absorb"),
    "llama, kv": ("llama", "kv", "auto"),
    "llama, hidden, values absorbed": ("llama", "hidden", "absorb"),
    "llama, hidden, reprojected": ("llama", "hidden", "reproject"),
    "llama, both": ("llama", "hybrid", "absorb"),
    "norm of each key, converted": ("qwen3", "hybrid", "reproject"),
    "fewer key heads than devices": ("llama grouped", "kv", "auto"),
    "alibi, kv": ("bloom", "kv", "auto"),
    "alibi, hidden": ("bloom", "hidden", "absorb"),
    "alibi, both, on kernels": ("bloom", "hybrid", "absorb"),
    "norm of each key, on kernels": ("qwen3", "hidden", "reproject"),
    "caps and windows, on kernels": ("gemma2", "hidden", "absorb"),
    "partly rotary, hidden": ("neox", "hidden", "absorb"),
    "norm of each key, hidden": ("qwen3", "hidden", "absorb"),
    "norm of all keys": ("olmo2", "kv", "auto"),
    "norm of all keys, fewer than devices": ("olmo2 grouped", "kv", "auto"),
    "caps and windows, hidden": ("gemma2", "hidden", "absorb"),
    "rotary embeddings by layer, hidden": ("gemma3", "hidden", "absorb"),
    "gemma4": ("gemma4", "kv", "auto"),
    "int8, gemma4": ("gemma4", "kv", "auto"),
    "gemma4, experts apart": ("gemma4 experts", "kv", "auto"),
    "experts, kv": ("experts", "kv", "auto"),
    "experts, both": ("experts", "hybrid", "absorb"),
    "latents, kv": ("latent", "kv", "auto"),
    "latents, absorbed": ("latent", "hidden", "absorb"),
    "latents, reprojected": ("latent", "hidden", "reproject"),
    "latents, on kernels": ("latent", "hidden", "absorb"),
    "sinks, experts with biases": ("gpt_oss", "kv", "auto"),
    "int8, both": ("opt", "hybrid", "absorb"),
    "int8, fewer key heads than devices": ("llama grouped", "kv", "auto"),
}


def distinct_params(config: ModelConfig) -> ModelParams:
    """Random float32 weights, so large that a tiny model does not say the same whatever was said before."""
    params = dummy_params(config, "float32", 7)
    layers = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, params.layers)
    layers = tuple(dataclasses.replace(p, sinks=p.sinks if p.sinks is None else p.sinks * 100) for p in layers)
    return dataclasses.replace(params, embed=params.embed * 8, head=params.head * 20, layers=layers)


def make_executor(
    model: str,
    kind: str,
    attention: Any,
    size: int,
    quantization: Quantization,
    ops: str,
    swap_space: float = 0.0,
    *,
    both_ends: bool = False,
) -> tuple[JaxExecutor, list[str]]:
    """The executor, and which of the given weights it has deleted. Those of the kind "kv" are to be kept."""
    if ops != "xla":  # rows few and short, of which some steps still have little
        programs.__dict__["_ROOM_ROWS"] = 1
        programs.__dict__["ROOM_STEP"] = triton_decode_shards.__dict__["ROOM_STEP"] = 32
    config = MODELS[model]
    params = distinct_params(config)
    num_blocks = 44 if swap_space else 120
    if both_ends and kind == "hidden":  # so short that real-time requests take slots of others
        num_blocks //= 2
    cache = CacheConfig(
        block_size=4,
        num_blocks_override=num_blocks,
        mode="hybrid" if kind == "hybrid" else kind,  # type: ignore[arg-type]
        hidden_attention=attention,
        enable_prefix_caching=bool(swap_space),
        swap_space=swap_space,
    )
    executor = JaxExecutor(
        params,
        config,
        cache=cache,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=96,
        attention=ops,
        quantization=quantization,
        mesh=None if size == 1 else parallel.tensor_mesh(size),
        conversion=True,
        keep_params=kind == "kv",
        both_ends=both_ends,
    )
    for sizes in (executor.buckets.decode, executor.buckets.prefill):
        del sizes[:-1]  # fewer programs to compile
    leaves = zip(jax.tree.leaves(param_names(config)), jax.tree.leaves(params), strict=True)
    return executor, [name for name, leaf in leaves if leaf.is_deleted()]


@functools.cache
def run_with_host_memory(kind: str, size: int) -> dict[str, Any]:
    """Prompts that the pool has no room for, twice."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 97, n).tolist() for n in (31, 45, 53, 38)]
    executor, _ = make_executor("opt", kind, "absorb", size, None, "xla", swap_space=1 / 1024)
    assert executor.host is not None
    executor.host.sizes = [16]
    tokens = greedy(executor, prompts * 2, 12, kind, "forced preemptions", "fcfs", executor.host)
    return {"tokens": tokens, "loaded": executor.host.loaded_bytes, "saved": executor.host.saved_bytes}


@functools.cache
def run_with_shared_blocks(kind: str, size: int) -> dict[str, Any]:
    """Requests of two classes, of which real-time ones take slots of best-effort ones."""
    executor, _ = make_executor("opt", kind, "absorb", size, None, "xla", swap_space=1 / 1024, both_ends=True)
    host = executor.host
    assert host is not None
    assert host.slots is not None
    host.sizes = [16]
    executor.warm_up()
    rng = np.random.default_rng(5)
    said = [serve(executor, draw_requests(rng), kind, make_policy("bros"), share=True) for _ in range(5)]
    return {"tokens": said, "loaded": host.slots.loaded_bytes, "saved": host.slots.saved_bytes}


@functools.cache
def run(case: str, size: int) -> dict[str, Any]:
    if case.startswith("host memory, "):
        return run_with_host_memory(case.removeprefix("host memory, "), size)
    if case.startswith("shared blocks, "):
        return run_with_shared_blocks(case.removeprefix("shared blocks, "), size)
    model, kind, attention = CASES[case]
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 97, n).tolist() for n in (1, 5, 53, 18)]
    quantization: Quantization = "int8" if case.startswith("int8") else None
    ops = "triton-interpret" if case.endswith("on kernels") and size > 1 else "xla"
    executor, deleted = make_executor(model, kind, attention, size, quantization, ops)
    policy = "apt"
    if case.endswith("converted"):  # from layer inputs to keys and values, while they run
        policy = RandomPolicy(3, RandomPlanPolicy(convert=0.7))
    tokens = greedy(executor, prompts, 12, kind, "forced preemptions", policy)
    pool = executor.runner.pools[0]
    return {
        "tokens": tokens,
        "deleted": deleted,
        "converted": getattr(executor.programs.jitted["convert"], "_cache_size")() > 0,  # noqa: B009
        "pool bytes": sorted(shard.data.nbytes for shard in pool.addressable_shards),
        "decode programs": getattr(executor.programs.jitted["decode"], "_cache_size")(),  # noqa: B009
        "collectives": collectives_of(compiled_decode_step(executor), "layer1"),
    }


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    for line in sys.stdin:
        try:
            answer = run(*json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
