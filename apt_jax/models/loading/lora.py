"""Reading of LoRA adapters as PEFT saves them: ``adapter_config.json`` and ``adapter_model.safetensors``.

Every unsupported feature that would change the output is refused by name: weights other than A and B (`bias`,
`modules_to_save`, embeddings), other kinds of adapters (such as DoRA), initializations that change the base weights.
Names and shapes are checked against the model before a value is read.
"""

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from apt_jax.errors import ModelLoadError, counted
from apt_jax.models.checkpoint_map import ModelFamily, split_leaf
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.loading.checkpoint import SafetensorsCheckpoint, file_inside, format_names, read_json
from apt_jax.models.loading.loader import read_cast
from apt_jax.models.lora import TARGETS, LoraAdapter, target_shape
from apt_jax.models.params import abstract_params, param_names

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` values that also change the base weights."""
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "biases of B",
    "modules_to_save": "whole modules",
    "trainable_token_indices": "new embeddings of tokens",
    "target_parameters": "parameters outside of linear layers",
    "layer_replication": "layers that are repeated",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "routing between adapters",
}
"""Fields that must be unset, and the feature that each requests."""
_MAX_PATTERNS, _MAX_PATTERN_CHARS, _MAX_REPEATS = 4096, 256, 3
_MAX_NAME_CHARS = 1024
"""Longest accepted tensor name in characters: checks take longer for longer module names."""


def load_adapter(name: str, directory: str, family: ModelFamily, config: ModelConfig, *, max_rank: int) -> LoraAdapter:
    """Read and check one adapter.

    Args:
        name: name of the adapter in requests.
        directory: directory of PEFT's two files.
        family: family of the model, for the names of its modules.
        config: configuration of the model.
        max_rank: largest accepted rank of a matrix.

    Raises:
        ModelLoadError: one line that names the file, and the field, module or tensor that is wrong.
    """
    path = Path(directory)
    if not os.path.isdir(path):
        raise ModelLoadError(f"{directory!s:.200}: is not a directory with {CONFIG_FILE} (--lora-modules {name})")
    fields = read_json(path, CONFIG_FILE)
    where = str(path / CONFIG_FILE)
    scale_of = _scales(fields, where)
    weights = file_inside(path, WEIGHTS_FILE)
    if not weights.is_file():
        has_pickle = (path / "adapter_model.bin").is_file()
        hint = (
            "; adapter_model.bin is a pickle, which can run code: save it with safe_serialization" if has_pickle else ""
        )
        raise ModelLoadError(f"{path}: has no {WEIGHTS_FILE}{hint}")
    with contextlib.closing(SafetensorsCheckpoint([weights])) as checkpoint:
        pairs = _pairs(checkpoint, weights)
        _check_targets(fields, pairs, where)
        places = _places(family, config)
        unknown = sorted(module for module in pairs if family.strip_prefix(module) not in places)
        if unknown:
            raise ModelLoadError(
                f"{weights}: it changes {counted(len(unknown), 'module')} where this model has no linear layer, or a layer that adapters "
                f"cannot change here ({format_names(unknown)})"
            )
        matrices: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}
        for module, tensors in pairs.items():
            inputs, outputs, leaves = places[family.strip_prefix(module)]
            rank = _checked_rank(checkpoint, weights, tensors, inputs, outputs, max_rank)
            scale = scale_of(module, rank)
            a, b = (read_cast(checkpoint, tensors[which], np.dtype(np.float32), weights) for which in "AB")
            with np.errstate(over="ignore", invalid="ignore"):
                b = b * np.float32(scale)
            if not np.isfinite(b).all():
                raise ModelLoadError(
                    f"{weights}: {tensors['B']} is not finite after multiplication by its scale, {scale:g} ({where})"
                )
            for layer, field, rows in leaves:
                matrices[layer, field] = (a, b[rows])
    if not matrices:
        raise ModelLoadError(f"{weights}: holds no tensors")
    return LoraAdapter(name=name, matrices=matrices)


def _scales(fields: Mapping[str, Any], where: str) -> Callable[[str, int], float]:
    """Check the configuration; return a function from a module's name and rank to its scale, which also checks the
    rank."""

    def refuse(text: str) -> ModelLoadError:
        return ModelLoadError(f"{where}: {text}")

    kind = fields.get("peft_type")
    if kind != "LORA":
        raise refuse(f"peft_type={kind!r:.40} is not LORA, the only kind of adapter that is supported")
    for field, what in _REFUSED.items():
        if fields.get(field):
            raise refuse(f"{field} is set ({what}), which is not supported")
    bias = fields.get("bias", "none")
    if bias != "none":
        raise refuse(f"bias={bias!r:.40} trains biases of the model, which is not supported; only none is")
    start = fields.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASE):
        raise refuse(
            f"init_lora_weights={start!r:.40} changes the base weights; save it converted to plain LoRA "
            "(path_initial_model_for_weight_conversion)"
        )
    get = ConfigFields(fields, f"{where}: ")
    rank, alpha, stabilised = get.positive("r", 8), get.number("lora_alpha", 8.0), get.flag("use_rslora", False)
    ranks = _patterns(fields, "rank_pattern", where)
    alphas = _patterns(fields, "alpha_pattern", where)

    def scale(module: str, stored_rank: int) -> float:
        expected = ranks(module, float(rank))
        if expected != stored_rank:
            raise refuse(
                f"rank {expected:g} is configured for {module!r:.120}, but its tensors have rank {stored_rank}"
            )
        return alphas(module, alpha) / (math.sqrt(stored_rank) if stabilised else stored_rank)

    return scale


def _patterns(fields: Mapping[str, Any], field: str, where: str) -> Callable[[str, float], float]:
    """Return a function from a module's name and a default to the value of the first matching pattern, or to the
    default. As in PEFT, a pattern must match the whole name or its end after a dot."""
    given = fields.get(field) or {}
    if not isinstance(given, Mapping) or len(given) > _MAX_PATTERNS:
        raise ModelLoadError(f"{where}: {field} must map at most {_MAX_PATTERNS} names to numbers")
    compiled: list[tuple[re.Pattern[str], float]] = []
    for pattern, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6
        if not number:
            raise ModelLoadError(f"{where}: {field}[{pattern!r:.80}] must be a positive number")
        # Without repeated groups, and with few repeats, matching is fast.
        repeats = len(re.findall(r"(?<!\\)[*+{?]", pattern))
        if len(pattern) > _MAX_PATTERN_CHARS or repeats > _MAX_REPEATS or re.search(r"\)[*+{?]", pattern):
            raise ModelLoadError(
                f"{where}: {field} has the pattern {pattern!r:.80}; use names of modules, with at most {_MAX_REPEATS} repeats"
            )
        try:
            compiled.append((re.compile(rf"(.*\.)?({pattern})$"), float(value)))
        except (re.error, RecursionError):
            raise ModelLoadError(f"{where}: {field} has {pattern!r:.80}, which is not a valid pattern") from None

    def value_of(module: str, default: float) -> float:
        return next((value for pattern, value in compiled if pattern.match(module)), default)

    return value_of


def _pairs(checkpoint: SafetensorsCheckpoint, path: Path) -> dict[str, dict[str, str]]:
    """Return a map from each module to the names of its two tensors, under the keys "A" and "B"."""
    pairs: dict[str, dict[str, str]] = {}
    for name, info in checkpoint.tensors.items():
        if len(name) > _MAX_NAME_CHARS:
            raise ModelLoadError(
                f"{path}: tensor {name!r:.80} has a name of {len(name)} characters; at most {_MAX_NAME_CHARS} are supported"
            )
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise ModelLoadError(
                f"{path}: tensor {name!r:.120} is neither lora_A nor lora_B of a linear layer; embeddings, biases and whole "
                "modules are not supported"
            )
        module, which = found.groups()
        if which in pairs.setdefault(module, {}):
            raise ModelLoadError(f"{path}: {name!r:.120} and {pairs[module][which]!r:.120} are the same tensor")
        if info.dtype not in ("F32", "F16", "BF16"):
            raise ModelLoadError(f"{path}: tensor {name!r:.120} is {info.dtype}, not F32, F16 or BF16")
        pairs[module][which] = name
    single = sorted(module for module, tensors in pairs.items() if len(tensors) < 2)
    if single:
        raise ModelLoadError(
            f"{path}: lora_A or lora_B is missing for {counted(len(single), 'module')} ({format_names(single)})"
        )
    return pairs


def _check_targets(fields: Mapping[str, Any], pairs: Mapping[str, Any], where: str) -> None:
    """Raise ModelLoadError if `target_modules` lists names but omits modules that have tensors."""
    targets = fields.get("target_modules")
    if not isinstance(targets, list):
        return  # a pattern, or unset: the tensors show which modules are meant
    if not all(isinstance(target, str) for target in targets):
        raise ModelLoadError(f"{where}: target_modules must list names of modules")
    ends = {module: [module[i:] for i in _starts(module)] for module in pairs}
    wanted = set(targets)  # PEFT ignores targets without tensors, and targets that the model lacks
    extra = sorted(module for module, all_ends in ends.items() if not wanted.intersection(all_ends))
    if extra:
        raise ModelLoadError(
            f"{where}: target_modules does not list {format_names(extra)}, for which there are tensors"
        )


def _starts(module: str) -> list[int]:
    """Return the indices at which the dot-separated parts of the name start."""
    return [0] + [i + 1 for i, c in enumerate(module) if c == "."]


_Leaves = list[tuple[int, str, np.ndarray]]


def _places(family: ModelFamily, config: ModelConfig) -> dict[str, tuple[int, int, _Leaves]]:
    """Return a map from each module's bare name to its number of inputs, number of outputs, and matrices. A matrix is
    given by its layer, its field, and the indices of its outputs among the module's outputs."""
    names = jax.tree.leaves(param_names(config))
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract_params(config, np.float32))]
    places: dict[str, tuple[int, int, _Leaves]] = {}
    for leaf, shape in zip(names, shapes, strict=True):
        field, layer = split_leaf(leaf)
        flat = target_shape(field, config, int(layer)) if layer is not None and field in TARGETS else None
        if flat is None:
            continue
        source = family.source(leaf, shape, config)
        inputs = flat[1]
        stored = source.shape[::-1] if family.inputs_first else source.shape
        outputs = math.prod(stored) // inputs
        rows = np.arange(outputs)
        if source.take is not None:  # applied to the outputs' indices, `take` shows which it selects
            numbers = np.broadcast_to(rows[:, None], (outputs, inputs))
            taken = source.take(numbers.T if family.inputs_first else numbers)
            rows = np.ascontiguousarray(taken[..., 0].reshape(-1))
        module = source.name.removesuffix(".weight")
        _, _, leaves = places.setdefault(module, (inputs, outputs, []))
        leaves.append((int(leaf.split(".")[1]), field, rows))
    return places


def _checked_rank(
    checkpoint: SafetensorsCheckpoint,
    path: Path,
    tensors: Mapping[str, str],
    inputs: int,
    outputs: int,
    max_rank: int,
) -> int:
    """Return the rank of a pair of tensors A and B. Raises ModelLoadError if their shapes do not fit the model or the
    rank exceeds `max_rank`."""
    a, b = (checkpoint.tensors[tensors[which]].shape for which in "AB")
    rank = a[0] if a else 0
    if a != (rank, inputs) or b != (outputs, rank) or rank < 1:
        raise ModelLoadError(
            f"{path}: {tensors['A']!r:.120} and B have {list(a)} and {list(b)}, not [r, {inputs}] and [{outputs}, r]; was it trained "
            "for another model?"
        )
    if rank > max_rank:
        raise ModelLoadError(
            f"{path}: {tensors['A']!r:.120} has rank {rank}, but max_lora_rank={max_rank} (--max-lora-rank)"
        )
    return rank
