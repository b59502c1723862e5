"""Models of the hub, without the hub: a local cache, and a fake download function."""

import sys
from pathlib import Path

import numpy as np
import pytest

from apt_jax.config import EngineConfig
from apt_jax.errors import ModelLoadError
from apt_jax.models import load_model, resolve_model
from apt_jax.models.loading import hub
from apt_jax.models.loading.hub import hub_snapshot, parse_hub_id
from tests.support.opt_checkpoint import TINY, random_tensors, write_model

pytest.importorskip("huggingface_hub")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("owner/model", ("owner/model", None)),
        ("owner/model-7B.v2@main", ("owner/model-7B.v2", "main")),
        ("owner/model@refs/pr/3", ("owner/model", "refs/pr/3")),
        ("model", None),
        ("a/b/c", None),
        ("../model", None),
        ("owner/..", None),
        ("owner/model@../x", None),
        ("/etc/passwd", None),
        ("owner/mo del", None),
        ("", None),
    ],
)
def test_which_names_are_hub_ids(name, parts):
    assert parse_hub_id(name) == parts


def _cache(tmp_path: Path, monkeypatch, revision: str = "main") -> Path:
    """The layout of the library's cache with one model in it; returns its snapshot."""
    root = tmp_path / "cache" / "models--owner--model"
    commit = "a" * 40
    snapshot = root / "snapshots" / commit
    write_model(snapshot, TINY, random_tensors(TINY))
    (root / "refs").mkdir()
    (root / "refs" / revision).write_text(commit)
    (root / "blobs").mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(root / "blobs" / str(i))
        file.symlink_to(Path("../../blobs") / str(i))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return snapshot


def test_a_cached_model_is_loaded_without_asking(tmp_path, monkeypatch):
    snapshot = _cache(tmp_path, monkeypatch)
    model = load_model(EngineConfig(model="owner/model"))
    assert model.path == snapshot
    np.testing.assert_array_equal(model.params.embed, random_tensors(TINY)["model.decoder.embed_tokens.weight"])


def test_a_revision_is_found_in_the_cache(tmp_path, monkeypatch):
    snapshot = _cache(tmp_path, monkeypatch, "v2")
    assert resolve_model("owner/model@v2").path == snapshot


def test_a_model_that_is_not_cached_is_one_line_when_offline(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match="not in the local cache, and the hub cannot be reached") as error:
        resolve_model("owner/absent")
    assert "\n" not in str(error.value)


class Download:
    """In place of `snapshot_download`: makes the files unless only local ones are asked for."""

    def __init__(self, path: Path, *, cached: bool = False, complete: bool = True) -> None:
        self.path, self.cached, self.complete = path, cached, complete
        self.calls: list[dict] = []

    def __call__(self, repo: str, **options) -> str:
        self.calls.append(options)
        if options.get("local_files_only"):
            if not self.cached:
                raise FileNotFoundError
            if not self.complete:
                self.path.mkdir(exist_ok=True)
                (self.path / "config.json").write_text("{}")
            return str(self.path)
        write_model(self.path, TINY, random_tensors(TINY))
        return str(self.path)


def test_what_is_not_cached_is_downloaded_and_only_what_is_needed(tmp_path):
    download = Download(tmp_path / "m")
    assert hub_snapshot("owner/model", "v1", download) == tmp_path / "m"
    assert [call.get("local_files_only") for call in download.calls] == [True, None]
    assert download.calls[1]["revision"] == "v1"
    patterns = download.calls[1]["allow_patterns"]
    assert "*.safetensors" in patterns
    assert not any(p.endswith((".bin", ".py", ".pt", ".pkl", "*")) for p in patterns)


def test_a_download_that_was_interrupted_is_completed(tmp_path):
    download = Download(tmp_path / "m", cached=True, complete=False)
    hub_snapshot("owner/model", None, download)
    assert len(download.calls) == 2


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("RepositoryNotFoundError", "no such model on the hub"),
        ("GatedRepoError", "licence must be accepted"),
        ("RevisionNotFoundError", "no such revision"),
        ("ConnectError", "hub cannot be reached"),
        ("ConnectTimeout", "hub cannot be reached"),
        ("OfflineModeIsEnabled", "hub cannot be reached"),
        ("HTTPError", "cannot be downloaded (HTTPError: line one line two)"),
    ],
)
def test_every_failure_is_one_line(kind, says):
    error = type(kind, (Exception,), {})("line one\nline two")

    def download(*_args, **_options):
        raise error

    with pytest.raises(ModelLoadError) as caught:
        hub_snapshot("owner/model", None, download)
    assert says in str(caught.value)
    assert "owner/model" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match=r"pip install 'apt-jax\[hub\]'"):
        hub_snapshot("owner/model", None)


def test_pickles_and_code_are_not_among_what_is_fetched():
    assert not {"*.bin", "*.py", "*.pt"} & set(hub.ALLOWED)
