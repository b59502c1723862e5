"""OPT model directories in Hugging Face format, made from random numbers with NumPy alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np

TINY: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 24,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 16,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
"""A configuration with every width different from the others."""


def tensor_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as Hugging Face's `OPTForCausalLM` saves them, written down independently of the loader."""
    d, f, v = fields["hidden_size"], fields["ffn_dim"], fields["vocab_size"]
    e = fields.get("word_embed_proj_dim", d)
    bias, affine = (fields.get(key, True) for key in ("enable_bias", "layer_norm_elementwise_affine"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.decoder.embed_tokens.weight": (v, e),
        "model.decoder.embed_positions.weight": (fields["max_position_embeddings"] + 2, d),
    }
    if e != d:
        shapes["model.decoder.project_in.weight"] = (d, e)
        shapes["model.decoder.project_out.weight"] = (e, d)

    def norm(name: str) -> None:
        if affine:
            shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (d,)

    def linear(name: str, out: int, into: int) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    if fields.get("do_layer_norm_before", True) and not fields.get("_remove_final_layer_norm"):
        norm("model.decoder.final_layer_norm")
    for i in range(fields["num_hidden_layers"]):
        layer = f"model.decoder.layers.{i}."
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(f"{layer}self_attn.{projection}", d, d)
        norm(layer + "self_attn_layer_norm")
        linear(layer + "fc1", f, d)
        linear(layer + "fc2", d, f)
        norm(layer + "final_layer_norm")
    if not fields.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (v, e)
    return shapes


def random_tensors(fields: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 values of ordinary size for every tensor."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32) * np.float32(0.1) for name, shape in tensor_shapes(fields).items()
    }


_NAMES = {
    "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16", "int64": "I64",
}  # fmt: skip


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    """A safetensors file, put together by hand so that tests can break any part of it."""
    header, data, end = {}, [], 0
    for name, value in tensors.items():
        data.append(value.tobytes())
        header[name] = {
            "dtype": _NAMES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [end, end + len(data[-1])],
        }
        end += len(data[-1])
    return join_header(header, b"".join(data))


def join_header(header: Any, data: bytes) -> bytes:
    """Header (JSON text, or an object that becomes it) and data as one file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_model(path: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 0) -> None:
    """Write config.json and the weights, as one file or as `shards` files with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    if not shards:
        (path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        weight_map |= dict.fromkeys(part, file)
        (path / file).write_bytes(safetensors_bytes(part))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
