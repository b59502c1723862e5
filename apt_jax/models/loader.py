"""From a model's name to its parameters on the device.

1. `resolve_model` turns the name into a directory or a preset. Nothing is ever downloaded, and no code is ever taken
   from a model directory.
2. config.json becomes a `ModelConfig` through the family's mapping file.
3. The checkpoint's headers are compared with the shapes that the configuration asks for: missing, extra and misshapen
   tensors and too little memory are found here, before anything is allocated on the device.
4. Tensors are read in the order of the file, each checked for NaN and infinities, cast, and moved to the device. Host
   memory holds one tensor besides the result.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from apt_jax.config import EngineConfig, ModelConfig
from apt_jax.errors import ConfigError, ModelLoadError
from apt_jax.models.checkpoint import (
    Checkpoint,
    is_weight_dtype,
    open_checkpoint,
    read_json,
    some_names,
)
from apt_jax.models.families import FAMILIES, MODEL_TYPES, PRESETS, Family, constant_leaf
from apt_jax.models.fields import ConfigFields
from apt_jax.models.mapping import Source
from apt_jax.models.params import ModelParams, abstract_params, dummy_params, param_names

_logger = logging.getLogger(__name__)

_ASSETS = Path(__file__).parent.parent / "assets"
_MAX_LAYERS = 1024  # each layer costs host objects and compile time; the deepest published models have fewer than 200
_PROGRESS_BYTES = 64 * 2**20  # below this, loading is over before a bar is read
_CHUNK_ELEMENTS = 2**20  # of the check for NaN: small enough for the processor's cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """Where a model comes from."""

    fields: Mapping[str, Any]
    """Contents of config.json, or of the preset."""
    path: Path | None
    """Its directory; None for a preset."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run."""

    config: ModelConfig
    params: ModelParams
    path: Path | None
    """Directory of its files, where a tokenizer may be; None for a preset."""
    eos_token_ids: tuple[int, ...]
    """Ids that end an output: those of generation_config.json where it names any, else those of config.json."""


def bundled_models() -> list[str]:
    """Names of the models that come with the package."""
    if not _ASSETS.is_dir():
        return []
    return sorted(entry.name for entry in _ASSETS.iterdir() if (entry / "config.json").is_file())


def resolve_model(name: str, *, allow_preset: bool = False) -> ResolvedModel:
    """Find a model: a directory, then a bundled name, then with `allow_preset` a published size such as ``opt-13b``.

    A hub id whose last part is a published size (``facebook/opt-13b``, ``Qwen/Qwen3-0.6B``) names the same preset.

    Raises:
        ModelLoadError: nothing of this name, or no usable config.json in it.
    """
    try:
        given = Path(name).expanduser()
        is_directory, is_file = given.is_dir(), given.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL inside, an unknown home
        raise ModelLoadError(f"model {name!r:.80} cannot be a path ({error})") from None
    if is_directory:
        return ResolvedModel(fields=read_json(given, "config.json"), path=given)
    if name in bundled_models():
        path = _ASSETS / name
        return ResolvedModel(fields=read_json(path, "config.json"), path=path)
    if is_file:
        raise ModelLoadError(
            f"model {name!r:.200} is a file; give the directory that holds config.json and the weights"
        )
    preset = name.rsplit("/", 1)[-1].lower()
    if preset in PRESETS and name.count("/") <= 1:
        if allow_preset:
            return ResolvedModel(fields=PRESETS[preset], path=None)
        raise ModelLoadError(
            f"model {name!r} is not on this machine and is not downloaded; give a directory with its files, or run it with "
            "random weights (--load-format dummy)"
        )
    raise ModelLoadError(
        f"model {name!r:.200} is neither a directory nor a known name; files must be local, nothing is downloaded. "
        f"Bundled: {', '.join(bundled_models()) or 'none'}; with --load-format dummy also: {', '.join(PRESETS)}"
    )


def _family(fields: Mapping[str, Any]) -> Family:
    listed = fields.get("architectures")
    if listed is None and isinstance(fields.get("model_type"), str):
        listed = [MODEL_TYPES.get(fields["model_type"], fields["model_type"])]
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ModelLoadError(
        f"config.json: architecture {', '.join(names) or listed!r:.80} is not known; known: {', '.join(FAMILIES)}"
    )


def read_model_config(
    fields: Mapping[str, Any], max_len: int | None = None
) -> tuple[Family, ModelConfig]:
    """The family and shape that the fields of a config.json describe.

    Args:
        max_len: longest context that will be served, tokens; None: as long as the configuration says. Some rotary
            embeddings depend on it (`apt_jax.models.rope`).

    Raises:
        ModelLoadError: unknown architecture, missing or impossible values, a feature that is not implemented.
    """
    family = _family(fields)
    if fields.get("quantization_config") is not None:
        raise ModelLoadError(
            "config.json: quantization_config is set, and quantised checkpoints are not supported"
        )
    try:
        config = family.model_config(fields, max_len)
    except ConfigError as error:
        raise ModelLoadError(f"config.json: {error}") from error
    if config.num_layers > _MAX_LAYERS:
        raise ModelLoadError(
            f"config.json: {config.num_layers} layers; at most {_MAX_LAYERS} are supported"
        )
    return family, config


def _eos_token_ids(
    path: Path | None, config: ModelConfig, fields: Mapping[str, Any]
) -> tuple[int, ...]:
    if path is not None and (path / "generation_config.json").is_file():
        generation = ConfigFields(read_json(path, "generation_config.json"))
        ids = generation.token_ids(
            "eos_token_id", None, config.vocab_size, "generation_config.json"
        )
        if ids:
            return ids
    ids = ConfigFields(fields).token_ids("eos_token_id", config.eos_token_id, config.vocab_size)
    if not ids:
        _logger.warning(
            "the model names no end-of-sequence token: outputs end at max_tokens or a stop string only"
        )
    return ids


def _free_memory_bytes() -> int | None:
    """What the default device can still take, or None where it does not tell."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _check_memory(config: ModelConfig, dtype: np.dtype[Any]) -> None:
    needed, free = config.num_params * dtype.itemsize, _free_memory_bytes()
    if free is not None and needed > free:
        raise ModelLoadError(
            f"the weights take {needed / 2**30:.1f} GiB in {dtype.name}, but {free / 2**30:.1f} GiB of device memory are free; "
            "choose a smaller model or a 16-bit --dtype"
        )


def _is_finite(values: np.ndarray) -> bool:
    """No NaN and no infinity: no element has all exponent bits set. Independent of slow 16-bit float arithmetic."""
    bits, mask = {
        "float16": (np.uint16, 0x7C00),
        "bfloat16": (np.uint16, 0x7F80),
        "float32": (np.uint32, 0x7F800000),
        "float64": (np.uint64, 0x7FF0000000000000),
    }[values.dtype.name]
    flat, exponent = values.reshape(-1).view(bits), bits(mask)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        if np.any((flat[start : start + _CHUNK_ELEMENTS] & exponent) == exponent):
            return False
    return True


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """Where one leaf of the parameters comes from."""

    leaf: str
    shape: tuple[int, ...]
    stored: str | None
    """Tensor in the checkpoint, or None:"""
    constant: float = 0.0
    """the leaf is filled with this value."""
    source: Source | None = None
    """How the leaf lies in it."""


def _match(
    checkpoint: Checkpoint,
    family: Family,
    config: ModelConfig,
    fields: Mapping[str, Any],
    path: Path,
) -> tuple[list[_Leaf], str | None]:
    """Pair every leaf with its tensor; also the stored name of a tied head, if the checkpoint has one.

    Raises:
        ModelLoadError: one line that names the missing, extra, misshapen or mistyped tensors.
    """
    by_bare_name: dict[str, str] = {}
    for name in checkpoint.tensors:
        bare = family.bare_name(name)
        if bare in by_bare_name:
            raise ModelLoadError(f"{path}: {name!r} and {by_bare_name[bare]!r} are the same tensor")
        by_bare_name[bare] = name
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract_params(config, np.float32))]
    leaves: list[_Leaf] = []
    wanted: dict[str, tuple[int, ...]] = {}
    missing: list[str] = []
    for leaf, shape in zip(jax.tree.leaves(param_names(config)), shapes, strict=True):
        constant = constant_leaf(family, leaf, fields)
        if constant is not None:
            leaves.append(_Leaf(leaf, shape, None, constant))
            continue
        source = family.source(leaf, shape, config)
        bare = source.name
        wanted[bare] = source.shape
        if bare in by_bare_name:
            leaves.append(_Leaf(leaf, shape, by_bare_name[bare], source=source))
        elif bare not in missing:
            missing.append(bare)
    head = None
    if config.tie_embeddings and family.TIED_HEAD in by_bare_name:
        head = by_bare_name[family.TIED_HEAD]
        width = config.embedding_size or config.hidden_size
        wanted[family.TIED_HEAD] = (config.vocab_size, width)
    extra = [
        name
        for bare, name in by_bare_name.items()
        if bare not in wanted and not family.IGNORED_TENSORS.search(bare)
    ]
    infos = {
        bare: checkpoint.tensors[by_bare_name[bare]] for bare in wanted if bare in by_bare_name
    }
    wrong = [
        f"{bare} has {list(info.shape)}, not {list(wanted[bare])}"
        for bare, info in infos.items()
        if info.shape != wanted[bare]
    ]
    mistyped = [
        f"{bare} is {info.dtype}" for bare, info in infos.items() if not is_weight_dtype(info)
    ]
    problems = [
        f"{len(found)} {kind} ({some_names(found)})"
        for kind, found in (
            ("missing", missing),
            ("unexpected", extra),
            ("misshapen", wrong),
            ("not floating-point", mistyped),
        )
        if found
    ]
    if problems:
        raise ModelLoadError(f"{path}: tensors do not match config.json: {'; '.join(problems)}")
    return leaves, head


def _read_cast(checkpoint: Checkpoint, name: str, dtype: np.dtype[Any], path: Path) -> np.ndarray:
    values = checkpoint.read(name)
    if not _is_finite(values):
        raise ModelLoadError(
            f"{path}: tensor {name!r} holds NaN or infinite values; the file is damaged"
        )
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):  # found by the check that follows
        cast = values.astype(dtype)
    if not _is_finite(cast):
        raise ModelLoadError(
            f"{path}: tensor {name!r} has values beyond the range of {dtype.name}; choose another --dtype"
        )
    return cast


def _load_params(
    checkpoint: Checkpoint,
    family: Family,
    config: ModelConfig,
    fields: Mapping[str, Any],
    dtype: np.dtype[Any],
    path: Path,
) -> ModelParams:
    leaves, tied_head = _match(checkpoint, family, config, fields, path)
    _check_memory(config, dtype)
    if tied_head is not None:
        embed = next(leaf.stored for leaf in leaves if leaf.leaf == "embed")
        assert embed is not None
        if not np.array_equal(checkpoint.read(embed), checkpoint.read(tied_head)):
            raise ModelLoadError(
                f"{path}: {tied_head!r} differs from {embed!r}, but config.json says that they are tied (tie_word_embeddings)"
            )
    arrays: dict[str, jax.Array] = {}
    stored = {leaf.stored for leaf in leaves if leaf.stored is not None}
    total = sum(checkpoint.tensors[name].num_bytes for name in stored)
    # disable=None: shown on a terminal only.
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="loading",
        disable=None if total > _PROGRESS_BYTES else True,
    ) as bar:

        def place(leaf: _Leaf) -> tuple[str, int]:
            info = checkpoint.tensors[leaf.stored] if leaf.stored is not None else None
            return ("", 0) if info is None else (info.file, info.start)

        last: np.ndarray | None = None
        last_name: str | None = None
        for leaf in sorted(leaves, key=place):
            if leaf.stored is None:
                arrays[leaf.leaf] = jnp.full(leaf.shape, leaf.constant, dtype)
                continue
            if leaf.stored != last_name:  # parts of one tensor come one after another
                last = None  # the one before goes first
                last = _read_cast(checkpoint, leaf.stored, dtype, path)
                last_name = leaf.stored
                bar.update(checkpoint.tensors[leaf.stored].num_bytes)
            assert last is not None
            assert leaf.source is not None
            part = last if leaf.source.take is None else leaf.source.take(last)
            arrays[leaf.leaf] = jnp.asarray(part.reshape(leaf.shape))
    return jax.tree.map(lambda name: arrays[name], param_names(config))


def load_model(config: EngineConfig) -> LoadedModel:
    """Find, check and load the model that `config` names, or make random weights of its shape (`load_format="dummy"`).

    Returns:
        Parameters on the default device, every leaf in `config.dtype`.

    Raises:
        ModelLoadError: one line that says which file or field is wrong and why.
    """
    dummy = config.load_format == "dummy"
    resolved = resolve_model(config.model, allow_preset=dummy)
    fields, path = resolved.fields, resolved.path
    where = config.model if path is None else os.fspath(path)
    try:
        family, model_config = read_model_config(fields, config.max_model_len)
        eos_token_ids = _eos_token_ids(path, model_config, fields)
    except ModelLoadError as error:
        named = str(error).startswith(where)
        raise ModelLoadError(str(error) if named else f"{where}: {error}") from error.__cause__
    ignored = [name for name in ("auto_map", "trust_remote_code") if fields.get(name)]
    if ignored:
        _logger.warning(
            "%s: %s in config.json is ignored: code from model directories is never run",
            where,
            " and ".join(ignored),
        )
    dtype = np.dtype(jnp.dtype(config.dtype))
    if dummy:
        _check_memory(model_config, dtype)
        params = dummy_params(model_config, dtype, config.seed)
    else:
        assert path is not None
        with open_checkpoint(path, allow_pickle=config.load_format == "pt") as checkpoint:
            params = _load_params(checkpoint, family, model_config, fields, dtype, path)
    return LoadedModel(config=model_config, params=params, path=path, eos_token_ids=eos_token_ids)


__all__ = [
    "LoadedModel",
    "ResolvedModel",
    "bundled_models",
    "load_model",
    "read_model_config",
    "resolve_model",
]
