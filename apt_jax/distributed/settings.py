"""Settings that must be equal on all ranks of a replica; they are compared before anything is loaded."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from apt_jax.config import EngineConfig
from apt_jax.version import __version__

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_NOT_COMPARED = {
    "model", "tokenizer", "chat_template", "served_model_name", "served_model_aliases", "tool_call_parser",
    "reasoning_parser",
    "parallel.node_rank", "parallel.join_timeout_s", "parallel.master_addr", "parallel.join_key_file",
}  # fmt: skip
"""Settings in which ranks may differ: paths, names, and settings that are specific to a rank."""


class StoredModel(Protocol):
    """The part of `apt_jax.models.ResolvedModel` that is compared."""

    @property
    def path(self) -> Path | None: ...
    @property
    def format(self) -> str: ...


def settings_of(config: EngineConfig, model: "DataclassInstance", resolved: StoredModel) -> dict[str, str]:
    """Return all settings that must be equal on all ranks, keyed by name."""

    def flat(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for key, item in value.items():
            if isinstance(item, dict):
                yield from flat(item, f"{prefix}{key}.")
            elif prefix + key not in _NOT_COMPARED:
                yield prefix + key, repr(item)

    settings = {"version of apt-jax": __version__}
    settings |= {f"version of {name}": version(name) for name in ("jax", "jaxlib")}
    settings |= dict(flat(dataclasses.asdict(config), ""))
    settings |= dict(flat(dataclasses.asdict(model), "model."))
    if config.load_format != "dummy" and resolved.path is not None:
        settings["model.format"] = resolved.format
        settings["model.weights"] = fingerprint(resolved.path)
    return settings


def fingerprint(path: Path) -> str:
    """Return a digest of a model's weights: sizes of the files, and 4 KiB from the middle of each.

    Orbax checkpoints are identified by their orbax.json, because the names of their files differ between machines.
    """
    files = (
        [path]
        if path.is_file()
        else sorted(f for f in path.glob("*.*") if f.suffix in (".safetensors", ".bin", ".gguf"))
    )
    digest = hashlib.sha256((path / "orbax.json").read_bytes() if (path / "orbax.json").is_file() else b"")
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as opened:
            opened.seek(size // 2)
            digest.update(size.to_bytes(8, "little") + opened.read(4096))
    return digest.hexdigest()[:16]


def difference(rank: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str | None:
    """Return a one-line message about the first difference between a rank's settings and rank 0's; None: they are
    equal."""
    for name in {**ours, **theirs}:
        a, b = ours.get(name), theirs.get(name)
        if a == b:
            continue
        if a is None or b is None:
            return f"{rank} runs another version of apt-jax, or has another kind of model"
        what, advice = name.rpartition(".")[2], "give all ranks the same flags"
        if name.startswith("version"):
            what, advice = name, "install the same version on all hosts"
        elif name.startswith("model."):
            what, advice = f"the model's {name[6:]}", "give all ranks the same model"
        return f"{rank} has {what} {b:.60}, rank 0 has {a:.60}; {advice}"
    return None
