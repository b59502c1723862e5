"""gpt-oss: MXFP4 checkpoints as they are published, and the tokens of a small model under every condition."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from apt_jax.config import CacheConfig, EngineConfig
from apt_jax.errors import ModelLoadError
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.lab.reference_model import forward
from apt_jax.models import load_model
from apt_jax.models.loading.convert import convert_model
from tests.support.cases import cover
from tests.support.generation import CONDITIONS, greedy
from tests.support.paged_driver import reference_greedy
from tests.support.parallel_cases import MODELS, distinct_params

D, F, X, N, K, H, V = 64, 32, 3, 4, 2, 16, 97
FIELDS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": N,
    "num_key_value_heads": K, "head_dim": H, "intermediate_size": F, "max_position_embeddings": 128, "sliding_window": 9,
    "num_local_experts": X, "num_experts_per_tok": 2, "eos_token_id": 2,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 32},
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def packed_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    found = {"model.embed_tokens.weight": normal(V, D), "lm_head.weight": normal(V, D), "model.norm.weight": normal(D)}
    for i in range(FIELDS["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, out in (("q", N), ("k", K), ("v", K)):
            found[f"{layer}self_attn.{name}_proj.weight"] = normal(out * H, D)
            found[f"{layer}self_attn.{name}_proj.bias"] = normal(out * H)
        found |= {
            f"{layer}self_attn.o_proj.weight": normal(D, N * H), f"{layer}self_attn.o_proj.bias": normal(D),
            f"{layer}self_attn.sinks": normal(N), f"{layer}input_layernorm.weight": normal(D),
            f"{layer}post_attention_layernorm.weight": normal(D),
            f"{layer}mlp.router.weight": normal(X, D), f"{layer}mlp.router.bias": normal(X),
            f"{layer}mlp.experts.gate_up_proj_bias": normal(X, 2 * F), f"{layer}mlp.experts.down_proj_bias": normal(X, D),
        }  # fmt: skip
        for name, outputs, inputs in (("gate_up_proj", 2 * F, D), ("down_proj", D, F)):
            shape = (X, outputs, inputs // 32)
            found[f"{layer}mlp.experts.{name}_blocks"] = rng.integers(0, 256, (*shape, 16), np.uint8)
            found[f"{layer}mlp.experts.{name}_scales"] = rng.integers(120, 126, shape, np.uint8)
    return {name: value + np.float32(1) if name.endswith("norm.weight") else value for name, value in found.items()}


def widened(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """(X, inputs, outputs), value by value."""
    experts, outputs, groups, _ = blocks.shape
    out = np.zeros((experts, 32 * groups, outputs), np.float32)
    for x, o, g in np.ndindex(experts, outputs, groups):
        for i, byte in enumerate(blocks[x, o, g]):
            for half, code in enumerate((byte & 15, byte >> 4)):
                out[x, 32 * g + 2 * i + half, o] = E2M1[code] * 2.0 ** (int(scales[x, o, g]) - 127)
    return out


def write(path: Path, tensors: dict[str, np.ndarray], **fields: Any) -> EngineConfig:
    (path / "config.json").write_text(json.dumps(FIELDS | fields))
    save_file(tensors, path / "model.safetensors")
    return EngineConfig(model=str(path), dtype="float32")


def test_packed_experts_are_those_of_an_unpacked_checkpoint(tmp_path: Path) -> None:
    packed = packed_tensors()
    plain = {name: value for name, value in packed.items() if not name.endswith(("_blocks", "_scales"))}
    for name in packed:
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            plain[base] = widened(packed[name], packed[base + "_scales"])
    for directory in ("packed", "plain"):
        (tmp_path / directory).mkdir()
    one = load_model(write(tmp_path / "packed", packed))
    other = load_model(write(tmp_path / "plain", plain, quantization_config=None))
    assert (one.weights, other.weights) == ("F32", "F32")  # most bytes are those of the embeddings
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    experts = one.params.layers[1].experts
    assert experts is not None
    both = plain["model.layers.1.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(experts.w_gate, both[:, :, ::2].swapaxes(1, 2))
    np.testing.assert_array_equal(experts.w_up, both[:, :, 1::2].swapaxes(1, 2))
    np.testing.assert_array_equal(experts.b_up, plain["model.layers.1.mlp.experts.gate_up_proj_bias"][:, 1::2])
    np.testing.assert_array_equal(experts.w_down, plain["model.layers.1.mlp.experts.down_proj"].swapaxes(1, 2))
    assert one.config.layer_windows == (9, None)


def test_a_converted_checkpoint_has_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    packed = load_model(write(tmp_path / "packed", packed_tensors()))
    convert_model(str(tmp_path / "packed"), tmp_path / "made", format="safetensors", dtype="float32", use_tqdm=False)
    made = load_model(EngineConfig(model=str(tmp_path / "made"), dtype="float32"))
    jax.tree.map(np.testing.assert_array_equal, made.params, packed.params)


_DOWN = "model.layers.1.mlp.experts.down_proj"


def _wide(tensors: dict[str, np.ndarray]) -> None:
    tensors[_DOWN + "_scales"][0, 5, 0] = 255


def _infinite(tensors: dict[str, np.ndarray]) -> None:
    tensors[_DOWN + "_scales"][0, 5, 0] = 254
    tensors[_DOWN + "_blocks"][0, 5, 0] = 0x77


DAMAGES: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "no scales": (lambda t: t.pop(_DOWN + "_scales"), r"down_proj_blocks' has no '.*down_proj_scales'; download"),
    "no blocks": (lambda t: t.pop(_DOWN + "_blocks"), r"down_proj_scales' has no '.*down_proj_blocks'; download"),
    "odd blocks": (
        lambda t: t.update({_DOWN + "_blocks": t[_DOWN + "_blocks"][..., :15].copy()}),
        r"_blocks \[3, 64, 1, 15\] U8 and _scales \[3, 64, 1\] U8 are not MXFP4",
    ),
    "scales of other blocks": (
        lambda t: t.update({_DOWN + "_scales": t[_DOWN + "_scales"][:, :60].copy()}),
        r"_blocks \[3, 64, 1, 16\] U8 and _scales \[3, 60, 1\] U8 are not MXFP4",
    ),
    "scales of another type": (
        lambda t: t.update({_DOWN + "_scales": t[_DOWN + "_scales"].astype(np.float32)}),
        r"_scales \[3, 64, 1\] F32 are not MXFP4",
    ),
    "other sizes than config.json": (
        lambda t: t.update({_DOWN + s: t[_DOWN + s][:2].copy() for s in ("_blocks", "_scales")}),
        r"layers.1.mlp.experts.down_proj has \[2, 32, 64\], not \[3, 32, 64\]",
    ),
    "both forms": (lambda t: t.update({_DOWN: np.zeros((X, F, D), np.float32)}), "are the same tensor"),
    "a scale that is NaN": (_wide, "holds NaN or infinite values"),
    "values beyond float32": (_infinite, "holds NaN or infinite values"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_pairs_are_one_line(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    tensors = packed_tensors()
    change(tensors)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(write(tmp_path, tensors))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [{"quant_method": "gptq"}, {}, [], "mxfp4"])
def test_other_quantizations_are_refused(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="quantization_config is set"):
        load_model(write(tmp_path, packed_tensors(), quantization_config=config))


@functools.cache
def _executor(ops: str) -> JaxExecutor:
    config = MODELS["gpt_oss"]
    executor = JaxExecutor(
        distinct_params(config), config, cache=CacheConfig(block_size=4, num_blocks_override=120, enable_prefix_caching=True),
        max_num_seqs=16, max_num_batched_tokens=64, max_model_len=96, attention=ops,
    )  # fmt: skip
    for sizes in (executor.buckets.decode, executor.buckets.prefill):
        del sizes[:-1]  # fewer programs to compile
    return executor


@functools.cache
def _plain() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, two of which begin alike, and what a plain forward pass says."""
    config = MODELS["gpt_oss"]
    model = jax.jit(functools.partial(forward, distinct_params(config), config=config))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, V, n).tolist() for n in (1, 5, 43, 18)]
    prompts.append([*prompts[2][:30], 7, 9])
    return prompts, [reference_greedy(prompt, 12, model)[len(prompt) :] for prompt in prompts]


@pytest.mark.parametrize(
    ("ops", "condition"),
    cover([(o, c) for o in ("cpu", "xla") for c in CONDITIONS], [("cpu", "forced preemptions"), ("xla", "batched")]),
)
def test_tokens_are_those_of_a_plain_forward_pass(ops: str, condition: str) -> None:
    prompts, want = _plain()
    executor = _executor(ops)
    assert executor.kinds_offered == (True, False)
    assert greedy(executor, prompts, 12, "kv", condition, "fcfs") == want
    executor.reset()
