"""Write trained parameters as a directory that transformers loads as ``OPTForCausalLM``.

Weights are float16 with the names and shapes of transformers. The output projection is tied and therefore absent.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from apt_jax.config import EngineConfig
from apt_jax.models import load_model
from apt_jax.models.families.opt import FAMILY as opt
from apt_jax.models.params import param_names
from tools.train_tiny_opt import tokenizer
from tools.train_tiny_opt.model import OptConfig, to_params, to_state

_PREFIX = "model.decoder."


def to_float16(params: Any, cfg: OptConfig) -> dict[str, np.ndarray]:
    """Named float16 weights.

    Raises:
        ValueError: a value does not fit float16.
    """
    weights = {}
    leaves = jax.tree.leaves(to_params(params, cfg))
    for leaf, array in zip(jax.tree.leaves(param_names(cfg.shape)), leaves, strict=True):
        source = opt.source(leaf, array.shape, cfg.shape)
        name = _PREFIX + source.name
        value = np.asarray(array, dtype=np.float32).reshape(source.shape)
        largest = float(np.abs(value).max())
        if not largest < float(np.finfo(np.float16).max):
            raise ValueError(f"{name}: {largest=} does not fit float16")
        weights[name] = value.astype(np.float16)
    return weights


def load(model_dir: Path) -> tuple[OptConfig, nnx.State]:
    """Config and float32 parameters of an exported directory."""
    loaded = load_model(EngineConfig(model=str(model_dir)))
    shape = loaded.config
    cfg = OptConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        ffn_dim=shape.ffn_size,
        max_len=shape.max_position,
    )
    return cfg, to_state(loaded.params, cfg)


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
    (out_dir / "config.json").write_text(json.dumps(cfg.fields, indent=2) + "\n")
    (out_dir / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(tokenizer_dir / name, out_dir / name)
