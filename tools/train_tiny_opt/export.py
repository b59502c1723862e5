"""Write trained parameters as a directory that transformers loads as ``OPTForCausalLM``.

Weights are float16 with the names and layouts of transformers: ``[out, in]`` for a projection,
where flax keeps ``[in, out]``. The output projection is tied and therefore absent.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from tools.train_tiny_opt import tokenizer
from tools.train_tiny_opt.model import OptConfig

_PREFIX = "model.decoder."
_LINEAR = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "out_proj": "self_attn.out_proj",
    "fc1": "fc1",
    "fc2": "fc2",
}
_NORM = {"self_attn_layer_norm": "self_attn_layer_norm", "final_layer_norm": "final_layer_norm"}


def _entries(cfg: OptConfig) -> list[tuple[str, tuple[str, ...], bool]]:
    """(name in transformers, path in flax, transposed) of every weight."""
    entries = [
        ("embed_tokens.weight", ("embed_tokens",), False),
        ("embed_positions.weight", ("embed_positions",), False),
        ("final_layer_norm.weight", ("final_layer_norm", "scale"), False),
        ("final_layer_norm.bias", ("final_layer_norm", "bias"), False),
    ]
    for i in range(cfg.num_layers):
        for ours, theirs in _LINEAR.items():
            base = f"layers.{i}.{theirs}"
            entries.append((f"{base}.weight", (f"layers_{i}", ours, "kernel"), True))
            entries.append((f"{base}.bias", (f"layers_{i}", ours, "bias"), False))
        for ours, theirs in _NORM.items():
            base = f"layers.{i}.{theirs}"
            entries.append((f"{base}.weight", (f"layers_{i}", ours, "scale"), False))
            entries.append((f"{base}.bias", (f"layers_{i}", ours, "bias"), False))
    return [(_PREFIX + name, path, transposed) for name, path, transposed in entries]


def to_float16(params: Any, cfg: OptConfig) -> dict[str, np.ndarray]:
    """Named float16 weights.

    Raises:
        ValueError: a value does not fit float16.
    """
    weights = {}
    for name, path, transposed in _entries(cfg):
        value = params
        for key in path:
            value = value[key]
        value = np.asarray(value, dtype=np.float32)
        largest = float(np.abs(value).max())
        if not largest < float(np.finfo(np.float16).max):
            raise ValueError(f"{name}: {largest=} does not fit float16")
        weights[name] = np.ascontiguousarray(value.T if transposed else value).astype(np.float16)
    return weights


def load(model_dir: Path) -> tuple[OptConfig, Any]:
    """Config and float32 flax parameters of an exported directory."""
    config = json.loads((model_dir / "config.json").read_text())
    cfg = OptConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        ffn_dim=config["ffn_dim"],
        max_len=config["max_position_embeddings"],
    )
    weights = load_file(model_dir / "model.safetensors")
    params: dict[str, Any] = {}
    for name, path, transposed in _entries(cfg):
        value = weights.pop(name).astype(np.float32)
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jnp.asarray(value.T if transposed else value)
    if weights:
        raise ValueError(f"unexpected weights in {model_dir}: {sorted(weights)}")
    return cfg, params


def write(params: Any, cfg: OptConfig, tokenizer_dir: Path, out_dir: Path) -> None:
    """Writes weights, configuration and tokenizer files to ``out_dir``."""
    out_dir.mkdir(parents=True, exist_ok=True)
    weights = to_float16(jax.device_get(params), cfg)
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    (out_dir / "model.safetensors").chmod(0o644)  # the library writes it for the owner only
    ids = {
        "bos_token_id": tokenizer.EOS_ID,
        "eos_token_id": tokenizer.EOS_ID,
        "pad_token_id": tokenizer.PAD_ID,
    }
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "word_embed_proj_dim": cfg.hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "ffn_dim": cfg.ffn_dim,
        "max_position_embeddings": cfg.max_len,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
        "tie_word_embeddings": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "layerdrop": 0.0,
        "init_std": 0.02,
        "use_cache": True,
        "torch_dtype": "float16",
        **ids,
    }
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out_dir / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(tokenizer_dir / name, out_dir / name)
