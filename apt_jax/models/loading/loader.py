"""Loading of a model's parameters onto the devices, given its name.

1. `resolve_model` turns the name into a directory, a GGUF file or a preset; the hub is asked only for names of the form
   ``owner/model``. Code in a model directory is never run.
2. config.json, or the same fields from the metadata of a GGUF file, become a `ModelConfig` through the family's
   adapter.
3. The checkpoint's headers are compared with the shapes that the configuration requires. Missing, extra or misshapen
   tensors and too little memory are detected here, before anything is allocated on the device.
4. Tensors are read piece by piece, large tensors first, then in the order of the files; they are dequantized, checked
   for NaN and infinities, cast, and moved to their devices. Host memory holds at most one tensor in its final dtype and
   one piece at a time, in addition to the result.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from apt_jax.config import EngineConfig
from apt_jax.errors import ConfigError, ModelLoadError
from apt_jax.models.check_params import check_params
from apt_jax.models.checkpoint_map import TIED_HEAD, ModelFamily, Source
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.known_fields import unknown_fields
from apt_jax.models.loading.auto_dtype import with_auto_dtype
from apt_jax.models.loading.checkpoint import (
    Checkpoint,
    format_names,
    is_weight_dtype,
    open_checkpoint,
    read_json,
)
from apt_jax.models.loading.gguf.model import GgufCheckpoint, open_gguf
from apt_jax.models.loading.mxfp4 import Mxfp4Checkpoint
from apt_jax.models.loading.orbax_format import DTYPES, OrbaxCheckpoint
from apt_jax.models.loading.resolve import (
    ModelFormat,
    ResolvedModel,
    read_model_config,
    resolve_model,
)
from apt_jax.models.params import ModelParams, abstract_params, dummy_params, is_matrix, leaf_dtype, param_names
from apt_jax.ops.blocks import BLOCK_KINDS
from apt_jax.ops.weights import GroupedMatrix

LeafSharding = Callable[[ModelConfig, str], jax.sharding.Sharding | None]
"""Function from the configuration and the name of a leaf (``layers.3.wq``) to the leaf's sharding; None: it is placed
on the default device."""

_logger = logging.getLogger(__name__)

_PROGRESS_BYTES = 64 * 2**20  # below this, loading is too fast for a progress bar
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_ELEMENTS = 2**20  # per check for NaN: small enough for the processor's cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run."""

    config: ModelConfig
    params: ModelParams
    path: Path | None
    """Directory of the model's files, which may hold a tokenizer, or its GGUF file; None for a preset."""
    eos_token_ids: tuple[int, ...]
    """Token ids that end an output: from generation_config.json if it lists any, otherwise from config.json."""
    hf_config: Mapping[str, Any]
    """Contents of config.json or of the preset, or the same fields derived from the metadata of a GGUF file."""
    format: ModelFormat = "directory"
    weights: str = "random"
    """Storage format of the weights: their dtype or quantization, such as ``BF16`` or ``Q4_K``."""


@contextlib.contextmanager
def open_weights(
    resolved: ResolvedModel, load_format: str = "auto", *, offer_dummy: bool = False
) -> Iterator[Checkpoint]:
    """Open the weights of a model that has files, in any format.

    Args:
        load_format: as in `EngineConfig`; unless it is ``auto``, the model must have this format.
        offer_dummy: see `open_checkpoint`.

    Raises:
        ModelLoadError: the model has another format; see also `open_checkpoint`.
    """
    path = resolved.path
    assert path is not None
    found = {"gguf": ("gguf",), "orbax": ("orbax",)}.get(resolved.format, ("safetensors", "pt"))
    if load_format not in ("auto", *found):
        raise ModelLoadError(
            f"{path}: is {resolved.format if resolved.format != 'directory' else 'in Hugging Face format'}, "
            f"not {load_format} (--load-format {load_format})"
        )
    if resolved.format == "gguf":
        checkpoint, _ = open_gguf(path)
        with contextlib.closing(checkpoint):
            yield checkpoint
    elif resolved.format == "orbax":
        with contextlib.closing(OrbaxCheckpoint(path)) as checkpoint:
            yield checkpoint
    else:
        with open_checkpoint(path, allow_pickle=load_format == "pt", offer_dummy=offer_dummy) as checkpoint:
            packed = any(name.endswith(("_blocks", "_scales")) for name in checkpoint.tensors)
            yield Mxfp4Checkpoint(checkpoint, path) if packed else checkpoint


def _eos_token_ids(path: Path | None, config: ModelConfig, fields: Mapping[str, Any]) -> tuple[int, ...]:
    if path is not None and (path / "generation_config.json").is_file():
        generation = ConfigFields(read_json(path, "generation_config.json"))
        ids = generation.token_ids("eos_token_id", None, config.vocab_size, "generation_config.json")
        if ids:
            return ids
    ids = ConfigFields(fields).token_ids("eos_token_id", config.eos_token_id, config.vocab_size)
    if not ids:
        _logger.warning(
            "the model does not specify an end-of-sequence token: outputs end only at max_tokens or a stop string"
        )
    return ids


def free_memory_bytes(device: Any = None) -> int | None:
    """Return the free memory of a device (by default the first) in bytes; None: unknown."""
    device = jax.local_devices()[0] if device is None else device
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _check_memory(
    config: ModelConfig, dtype: np.dtype[Any], sharding: LeafSharding | None = None, saved: int = 0
) -> None:
    """Raise ModelLoadError if the weights need more memory than a device has free. On CPUs, the host's memory must hold
    the weights of all simulated devices. `saved`: bytes that are saved because some matrices stay integers."""
    needed, free, share = config.num_params * dtype.itemsize - saved, free_memory_bytes(), ""
    if sharding is not None and jax.local_devices()[0].platform != "cpu":
        needed, share = 0, " of each device"
        leaves = jax.tree.leaves(abstract_params(config, dtype))
        for name, leaf in zip(jax.tree.leaves(param_names(config)), leaves, strict=True):
            where = sharding(config, name)
            shape = leaf.shape if where is None else where.shard_shape(leaf.shape)
            needed += math.prod(shape) * dtype.itemsize
    if free is not None and needed > free:
        raise ModelLoadError(
            f"the weights{share} take {needed / 2**30:.1f} GiB in {dtype.name}, but {free / 2**30:.1f} GiB of device memory are free; "
            "choose a smaller model, a 16-bit --dtype or more devices (-tp)"
        )


def _is_finite(values: np.ndarray) -> bool:
    """True if every element is finite: no exponent has all bits set. Avoids slow 16-bit float
    arithmetic."""
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
    """One leaf of the parameters and its source."""

    leaf: str
    shape: tuple[int, ...]
    stored: str | None
    """Name of the checkpoint's tensor; None: the leaf is filled with `constant`."""
    constant: float = 0.0
    """Value of all elements if `stored` is None."""
    source: Source | None = None
    """Layout of the leaf in the tensor; None if `stored` is None."""
    parts: tuple[str, ...] = ()
    """Names of all tensors whose stack is the leaf, of which `stored` is the first; empty: it is one tensor."""


def _match(
    checkpoint: Checkpoint,
    family: ModelFamily,
    config: ModelConfig,
    fields: Mapping[str, Any],
    path: Path,
) -> tuple[list[_Leaf], str | None]:
    """Pair every leaf with its tensor; also return the stored name of a tied head, if the checkpoint has one.

    Raises:
        ModelLoadError: one line that names the missing, extra, misshapen or mistyped tensors.
    """
    by_bare_name: dict[str, str] = {}
    for name in checkpoint.tensors:
        bare = family.strip_prefix(name)
        if bare in by_bare_name:
            raise ModelLoadError(f"{path}: {name!r} and {by_bare_name[bare]!r} are the same tensor")
        by_bare_name[bare] = name
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract_params(config, np.float32))]
    leaves: list[_Leaf] = []
    wanted: dict[str, tuple[int, ...]] = {}
    missing: list[str] = []
    for leaf, shape in zip(jax.tree.leaves(param_names(config)), shapes, strict=True):
        constant = None if family.constant_leaf is None else family.constant_leaf(leaf, fields)
        if constant is not None:
            leaves.append(_Leaf(leaf, shape, None, constant))
            continue
        source = family.source(leaf, shape, config)
        bare = source.name
        if source.parts and bare not in by_bare_name:
            wanted |= dict.fromkeys(source.parts, source.shape[1:])
            absent = [part for part in source.parts if part not in by_bare_name]
            missing += absent
            if not absent:
                stored = tuple(by_bare_name[part] for part in source.parts)
                leaves.append(_Leaf(leaf, shape, stored[0], source=source, parts=stored))
            continue
        wanted[bare] = source.shape
        if bare in by_bare_name:
            leaves.append(_Leaf(leaf, shape, by_bare_name[bare], source=source))
        elif bare not in missing:
            missing.append(bare)
    head = None
    if config.tie_embeddings and TIED_HEAD in by_bare_name:
        head = by_bare_name[TIED_HEAD]
        width = config.embedding_size or config.hidden_size
        wanted[TIED_HEAD] = (config.vocab_size, width)
    extra = [
        name for bare, name in by_bare_name.items() if bare not in wanted and not family.ignored_tensors.search(bare)
    ]
    infos = {bare: checkpoint.tensors[by_bare_name[bare]] for bare in wanted if bare in by_bare_name}
    wrong = [
        f"{bare} has {list(info.shape)}, not {list(wanted[bare])}"
        for bare, info in infos.items()
        if info.shape != wanted[bare]
    ]
    mistyped = [f"{bare} is {info.dtype}" for bare, info in infos.items() if not is_weight_dtype(info)]
    problems = [
        f"{len(found)} {kind} ({format_names(found)})"
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


def read_cast(checkpoint: Checkpoint, name: str, dtype: np.dtype[Any], path: Path) -> np.ndarray:
    """Read a tensor in `dtype`, checked and cast piece by piece: memory holds only the result and one piece."""
    values = _empty(checkpoint, name, dtype, path)
    done = 0
    for chunk in checkpoint.chunks(name):
        if not _is_finite(chunk):
            raise ModelLoadError(f"{path}: tensor {name!r} holds NaN or infinite values; the file is damaged")
        target = values[done : done + chunk.size]
        with np.errstate(over="ignore"):  # detected by the check below
            target[...] = chunk
        if chunk.dtype != dtype and not _is_finite(target):
            raise ModelLoadError(
                f"{path}: tensor {name!r} has values beyond the range of {dtype.name}; choose another --dtype"
            )
        done += chunk.size
    return checkpoint.arrange(name, values)


def _empty(checkpoint: Checkpoint, name: str, dtype: np.dtype[Any], path: Path) -> np.ndarray:
    size = math.prod(checkpoint.tensors[name].shape)
    try:
        return np.empty(size, dtype)
    except MemoryError as error:
        raise ModelLoadError(f"{path}: not enough memory for {name!r:.80} of {size * dtype.itemsize} bytes") from error


def _equal(checkpoint: Checkpoint, name: str, other: str) -> bool:
    """True if two tensors hold the same values, compared piece by piece."""
    pieces = itertools.zip_longest(checkpoint.chunks(name), checkpoint.chunks(other))
    return all(a is not None and b is not None and np.array_equal(a, b) for a, b in pieces)


def _put(values: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Copy values to the devices and wait, so that the host holds at most one tensor in transfer."""
    if sharding is None:
        array = jnp.asarray(values)
    else:
        array = jax.make_array_from_callback(values.shape, sharding, values.__getitem__)
    return array.block_until_ready()


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _restored(
    checkpoint: Checkpoint,
    leaf: _Leaf,
    dtype: np.dtype[Any],
    path: Path,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array | None:
    """Restore a leaf from Orbax format directly onto its devices; None: the host must read the leaf, for example to
    cast it."""
    if sharding is None or leaf.stored is None or not isinstance(checkpoint, OrbaxCheckpoint):
        return None
    info = checkpoint.tensors[leaf.stored]
    assert leaf.source is not None
    if leaf.source.take is not None or info.shape != leaf.shape or DTYPES.get(info.dtype) != dtype.name:
        return None
    array = checkpoint.read_sharded(leaf.stored, sharding)
    if not _all_finite(array):
        raise ModelLoadError(f"{path}: tensor {leaf.stored!r} holds NaN or infinite values; the file is damaged")
    return array


def _stacked(checkpoint: Checkpoint, leaf: _Leaf, dtype: np.dtype[Any], path: Path, bar: Any) -> np.ndarray:
    """Read a leaf that is stored in parts, in `dtype`."""
    values = np.empty(leaf.shape, dtype)
    for i, name in enumerate(leaf.parts):
        values[i] = read_cast(checkpoint, name, dtype, path)
        bar.update(checkpoint.tensors[name].num_bytes)
    return values


def _is_grouped(checkpoint: Checkpoint, leaf: _Leaf) -> bool:
    """True if a leaf is a matrix that can be kept as integers."""
    if leaf.stored is None or not is_matrix(leaf.leaf) or not isinstance(checkpoint, GgufCheckpoint):
        return False
    return checkpoint.is_grouped(leaf.stored)


def _grouped(checkpoint: Checkpoint, leaf: _Leaf) -> GroupedMatrix:
    """Return the matrix of a leaf for which `_is_grouped` is true, with its stored integers."""
    assert leaf.stored is not None
    assert leaf.source is not None
    assert isinstance(checkpoint, GgufCheckpoint)
    blocks = checkpoint.blocks(leaf.stored)
    if leaf.source.take is not None:  # only some of the rows, which `take` selects
        numbers = np.broadcast_to(np.arange(blocks.shape[0])[:, None], leaf.source.shape)
        blocks = blocks[leaf.source.take(numbers)[..., 0].reshape(-1)]
    shape = leaf.shape if leaf.shape[-1] == leaf.source.shape[-1] else (blocks.shape[0], leaf.source.shape[-1])
    return GroupedMatrix(blocks=_put(blocks, None), kind=checkpoint.tensors[leaf.stored].dtype, shape=shape)


def _load_params(
    checkpoint: Checkpoint,
    family: ModelFamily,
    config: ModelConfig,
    fields: Mapping[str, Any],
    dtype: np.dtype[Any],
    path: Path,
    sharding: LeafSharding | None = None,
    *,
    keep_integers: bool = False,
) -> ModelParams:
    leaves, tied_head = _match(checkpoint, family, config, fields, path)
    grouped = {leaf.leaf for leaf in leaves if keep_integers and _is_grouped(checkpoint, leaf)}
    sizes = [(math.prod(leaf.shape), checkpoint.tensors[leaf.stored or ""]) for leaf in leaves if leaf.leaf in grouped]
    saved = sum(n * dtype.itemsize - n * info.num_bytes // math.prod(info.shape) for n, info in sizes)
    _check_memory(config, dtype, sharding, saved)
    if keep_integers and not grouped:
        _logger.warning(
            "%s: has no matrix in %s; all weights are converted to %s", path, ", ".join(BLOCK_KINDS), dtype.name
        )
    if tied_head is not None:
        embed = next(leaf.stored for leaf in leaves if leaf.leaf == "embed")
        assert embed is not None
        if not _equal(checkpoint, embed, tied_head):
            raise ModelLoadError(
                f"{path}: {tied_head!r} differs from {embed!r}, but config.json ties them (tie_word_embeddings)"
            )
    arrays: dict[str, Any] = {}
    stored = {name for leaf in leaves if leaf.stored is not None for name in leaf.parts or (leaf.stored,)}
    total = sum(checkpoint.tensors[name].num_bytes for name in stored)
    # disable=None: shown on a terminal only.
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="loading",
        disable=None if total > _PROGRESS_BYTES else True,
    ) as bar:
        largest = max((info.num_bytes for info in checkpoint.tensors.values()), default=0)

        def place(leaf: _Leaf) -> tuple[bool, str, int]:
            """Sort key: large tensors first, before memory is fragmented, then in the order of the files."""
            info = checkpoint.tensors[leaf.stored] if leaf.stored is not None else None
            return (True, "", 0) if info is None else (2 * info.num_bytes < largest, info.file, info.start)

        last: np.ndarray | None = None
        last_name: str | None = None
        for leaf in sorted(leaves, key=place):
            where = None if sharding is None else sharding(config, leaf.leaf)
            if leaf.stored is None:
                arrays[leaf.leaf] = _put(np.full(leaf.shape, leaf.constant, dtype), where)
                continue
            if leaf.leaf in grouped:
                arrays[leaf.leaf] = _grouped(checkpoint, leaf)
                if leaf.stored != last_name:
                    last, last_name = None, leaf.stored
                    bar.update(checkpoint.tensors[leaf.stored].num_bytes)
                continue
            if leaf.parts:
                last, last_name = None, None
                arrays[leaf.leaf] = _put(_stacked(checkpoint, leaf, dtype, path, bar), where)
                continue
            own_dtype = leaf_dtype(leaf.leaf, dtype)
            array = _restored(checkpoint, leaf, own_dtype, path, where)
            if array is None:
                if leaf.stored != last_name:  # parts of one tensor come one after another
                    last = None  # free the previous tensor first
                    last = read_cast(checkpoint, leaf.stored, own_dtype, path)
                    last_name = leaf.stored
                    bar.update(checkpoint.tensors[leaf.stored].num_bytes)
                assert last is not None
                assert leaf.source is not None
                part = last if leaf.source.take is None else leaf.source.take(last)
                array = _put(part.reshape(leaf.shape), where)
            else:
                bar.update(checkpoint.tensors[leaf.stored].num_bytes)
            arrays[leaf.leaf] = array
    return jax.tree.map(lambda name: arrays[name], param_names(config))


def _placed(
    params: ModelParams, config: ModelConfig, dtype: np.dtype[Any], sharding: LeafSharding | None
) -> ModelParams:
    """Check the caller's weights; return them in `dtype` and on their devices.

    Raises:
        ConfigError: the weights do not match the model's shape, or hold NaN or infinite values.
    """
    check_params(params, config, "params")
    default = jax.sharding.SingleDeviceSharding(next(iter(jnp.zeros(()).devices())))

    def placed(name: str, leaf: Any) -> jax.Array:
        where = None if sharding is None else sharding(config, name)
        leaf = leaf if isinstance(leaf, jax.Array) else jnp.array(leaf)  # a copy: NumPy arrays may change later
        array = jax.device_put(leaf.astype(leaf_dtype(name, dtype)), where or default)
        if not _all_finite(array):
            raise ConfigError(f"params: {name!r} holds NaN or infinite values in {dtype.name}")
        return array

    return jax.tree.map(placed, param_names(config), params)


def load_model(
    config: EngineConfig, sharding: LeafSharding | None = None, params: ModelParams | None = None
) -> LoadedModel:
    """Find, check and load the model that `config` names, or make random weights of its shape (`load_format="dummy"`).

    Args:
        config: engine configuration, which names the model.
        sharding: function that returns the sharding of a leaf, which is then copied to its devices shard by shard.
            None: all leaves go to the default device.
        params: weights to use instead of the model's files. Arrays that are already on their devices and in
            `config.dtype` are not copied.

    Returns:
        The model. All its parameters are in `config.dtype`, but with `quantization="gguf"` every matrix stored as one of
        `BLOCK_KINDS` is a `GroupedMatrix`.

    Raises:
        ModelLoadError: one line that names the file or field and the reason.
        ConfigError: `params` do not match the model, or hold NaN or infinite values.
    """
    dummy = config.load_format == "dummy"
    keep_integers = config.quantization == "gguf"
    resolved = resolve_model(config.model, allow_preset=dummy)
    fields, path = resolved.fields, resolved.path
    where = config.model if path is None else os.fspath(path)
    if keep_integers and params is not None:
        raise ConfigError(
            "quantization='gguf' keeps the integers of a file, but params=... have none; use int8, or leave it out"
        )
    if keep_integers and (dummy or resolved.format != "gguf"):
        raise ModelLoadError(
            f"{where}: is not a GGUF file, and quantization='gguf' keeps the integers of such a file; use int8, or leave it out (--quantization)"
        )
    try:
        family, model_config = read_model_config(fields, config.max_model_len)
        eos_token_ids = _eos_token_ids(path, model_config, fields)
    except ModelLoadError as error:
        # A GGUF file has no config.json: its fields come from the metadata.
        text = str(error).replace("config.json", "metadata") if resolved.format == "gguf" else str(error)
        raise ModelLoadError(text if text.startswith(where) else f"{where}: {text}") from error.__cause__
    if config.quantization is not None and model_config.experts is not None:
        raise ModelLoadError(
            f"{where}: quantization={config.quantization!r} does not support mixtures of experts; leave it out (--quantization)"
        )
    if config.quantization is not None and model_config.latent is not None:
        raise ModelLoadError(
            f"{where}: quantization={config.quantization!r} does not support latent attention; leave it out (--quantization)"
        )
    ignored = [name for name in ("auto_map", "trust_remote_code") if fields.get(name)]
    if ignored:
        _logger.warning(
            "%s: %s in config.json is ignored: code from model directories is never run",
            where,
            " and ".join(ignored),
        )
    unknown = unknown_fields(family.fields, fields)
    if unknown:
        _logger.warning("%s: unknown fields in config.json are ignored: %s", where, format_names(unknown))
    dtype, weights = np.dtype(jnp.dtype(with_auto_dtype(config, fields).dtype)), "random"
    if params is not None:
        params = _placed(params, model_config, dtype, sharding)
        weights = _NAMES[dtype.name]
    elif dummy:
        _check_memory(model_config, dtype, sharding)
        place = None if sharding is None else functools.partial(sharding, model_config)
        params = dummy_params(model_config, dtype, config.seed, place)
    else:
        assert path is not None
        with open_weights(resolved, config.load_format, offer_dummy=True) as checkpoint:
            weights = storage(checkpoint)
            params = _load_params(
                checkpoint, family, model_config, fields, dtype, path, sharding, keep_integers=keep_integers
            )
    return LoadedModel(
        config=model_config,
        params=params,
        path=path,
        eos_token_ids=eos_token_ids,
        hf_config=fields,
        format=resolved.format,
        weights=weights,
    )


def storage(checkpoint: Checkpoint) -> str:
    """Return the dtype or quantization that most bytes of a checkpoint are stored in."""
    sums: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        sums[info.dtype] = sums.get(info.dtype, 0) + info.num_bytes
    return max(sums, key=lambda kind: sums[kind], default="none")
