"""LoRA adapters made of random numbers: in memory, in PEFT's files, and merged into a model by hand."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from apt_jax.models.config import ModelConfig
from apt_jax.models.lora import TARGETS, LoraAdapter, target_shape
from apt_jax.models.params import ModelParams


def random_adapter(
    config: ModelConfig,
    name: str,
    seed: int,
    *,
    rank: int = 4,
    fields: Sequence[str] = TARGETS,
    layers: Sequence[int] | None = None,
    size: float = 0.3,
) -> LoraAdapter:
    """An adapter of some matrices of some layers (None: all), large enough to change what a model says."""
    rng = np.random.default_rng(seed)
    matrices = {}
    for layer in range(config.num_layers) if layers is None else layers:
        for field in fields:
            shape = target_shape(field, config, layer)
            if shape is not None:
                a = rng.standard_normal((rank, shape[1]), np.float32) * np.float32(shape[1] ** -0.5)
                matrices[layer, field] = (a, rng.standard_normal((shape[0], rank), np.float32) * np.float32(size))
    return LoraAdapter(name=name, matrices=matrices)


def merged(params: ModelParams, adapter: LoraAdapter | None) -> ModelParams:
    """The model with `W + B A` in the place of W, in float64 and rounded once."""
    if adapter is None:
        return params
    layers = list(params.layers)
    for (layer, field), (a, b) in adapter.matrices.items():
        w = np.asarray(getattr(layers[layer], field))
        added = b.astype(np.float64) @ a.astype(np.float64)
        new = jnp.asarray((w.astype(np.float64) + added.reshape(w.shape)).astype(np.float32))
        layers[layer] = dataclasses.replace(layers[layer], **{field: new})
    return dataclasses.replace(params, layers=tuple(layers))


def write_adapter(
    path: Path,
    modules: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
    size: float = 0.3,
    **fields: Any,
) -> dict[str, np.ndarray]:
    """Write an adapter as PEFT saves it.

    Args:
        modules: inputs and outputs of each linear layer, by its whole name.
        ranks: of modules whose rank is another.
        fields: of the configuration, in place of the usual ones.

    Returns:
        The tensors.
    """
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for module, (inputs, outputs) in modules.items():
        r = (ranks or {}).get(module, rank)
        for which, shape in (("A", (r, inputs)), ("B", (outputs, r))):
            values = rng.standard_normal(shape, np.float32) * np.float32(size * shape[1] ** -0.5)
            tensors[f"base_model.model.{module}.lora_{which}.weight"] = values
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none", "use_rslora": False,
        "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": False,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}), "inference_mode": True,
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config | fields))
    return tensors
