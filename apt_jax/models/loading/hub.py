"""Models from the Hugging Face hub: taken from the local cache if they are complete there, otherwise downloaded.

Only configuration, tokenizer and safetensors files are ever fetched: no pickles, no code.
"""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apt_jax.errors import ModelLoadError, one_line
from apt_jax.models.loading.checkpoint import INDEX_FILE, SINGLE_FILE, read_json
from apt_jax.utils.activity import activity

_REPO = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,128}))?")

ALLOWED = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip
"""File patterns that are downloaded from a repository."""


def parse_hub_id(name: str) -> tuple[str, str | None] | None:
    """Return the parts of ``owner/model`` or ``owner/model@revision``; None: the name is not a hub id."""
    match = _REPO.fullmatch(name)
    if match is None or ".." in name or "--" in match[1]:
        return None
    return match[1], match[2]


def _is_complete(directory: Path) -> bool:
    """True if every file needed for loading is present; some may be missing after an interrupted download."""
    if not (directory / "config.json").is_file():
        return False
    if (directory / SINGLE_FILE).is_file():
        return True
    if not (directory / INDEX_FILE).is_file():
        return False
    weight_map = read_json(directory, INDEX_FILE).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [""]
    return all(isinstance(name, str) and os.path.isfile(directory / name) for name in names)


def hub_snapshot(repo: str, revision: str | None, download: Callable[..., str] | None = None) -> Path:
    """Return the local directory of a repository's files, downloaded if necessary.

    Args:
        repo: ``owner/model``.
        revision: branch, tag or commit; None: the main branch.
        download: function to call instead of `huggingface_hub.snapshot_download`.

    Raises:
        ModelLoadError: the model is not cached and cannot be downloaded: it is unknown or private, the hub is offline,
            or the library is not installed.
    """
    name = repo if revision is None else f"{repo}@{revision}"
    if download is None:
        try:
            from huggingface_hub import snapshot_download as download  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ModelLoadError(
                f"model {name!r:.200} is not a local directory; models from the hub need the extra 'hub' "
                "(pip install 'apt-jax[hub]')"
            ) from None
    assert download is not None
    options: dict[str, Any] = {"revision": revision, "allow_patterns": list(ALLOWED)}
    with contextlib.suppress(Exception):  # if anything is wrong with the cache, ask the hub
        cached = Path(download(repo, local_files_only=True, **options))
        if _is_complete(cached):
            return cached
    try:
        with activity(f"downloading {name} from the hub"):
            return Path(download(repo, **options))
    except Exception as error:  # from the library, its HTTP client, the operating system
        raise ModelLoadError(_reason(name, error)) from None


def _reason(name: str, error: Exception) -> str:
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"):
        what = {
            "RepositoryNotFoundError": "there is no such model on the hub, or it is private",
            "GatedRepoError": "its licence must be accepted on the hub first, and a token must be set (HF_TOKEN)",
            "RevisionNotFoundError": "the model has no such revision",
        }[kind]
        return f"model {name!r:.200}: {what}"
    if kind == "LocalEntryNotFoundError" or "Connect" in kind or "Timeout" in kind or "Offline" in kind:
        return (
            f"model {name!r:.200} is not in the local cache, and the hub cannot be reached ({kind}); "
            "give a directory with its files"
        )
    return f"model {name!r:.200} cannot be downloaded ({kind}: {one_line(str(error)):.160})"


__all__ = ["ALLOWED", "hub_snapshot", "parse_hub_id"]
