"""Results of autotuning: where they are kept, and which of those that are shipped are taken."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from apt_jax.executor.compiling.tuning_results import (
    card_name,
    jaxlib_version,
    prepare_tuning_dir,
    read_results,
    write_results,
)

CARD: Any = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
RESULTS = {"a_B-c=.textproto": "gemm { algorithm: 7 }", "d.textproto": "triton { block_m: 16 }"}


@pytest.fixture
def kept(tmp_path: Path):
    """Where JAX keeps compiled programs."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    yield tmp_path / "compiled"
    jax.config.update("jax_compilation_cache_dir", before)


def ship(shipped: Path, version: str, text: str | None = None) -> None:
    path = shipped / card_name(CARD.device_kind) / f"{version}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(RESULTS) if text is None else text)


def contents(directory: Path | None) -> dict[str, str]:
    assert directory is not None
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_each_card_and_jaxlib_has_a_directory_beside_the_executables(kept: Path, tmp_path: Path) -> None:
    found = prepare_tuning_dir(CARD, tmp_path)
    assert found == kept / "autotune" / "nvidia-h100-80gb-hbm3" / jaxlib_version()
    assert contents(found) == {}


def test_results_of_this_card_and_jaxlib_are_taken_and_none_is_replaced(kept: Path, tmp_path: Path) -> None:
    ship(tmp_path, jaxlib_version())
    own = kept / "autotune" / card_name(CARD.device_kind) / jaxlib_version()
    own.mkdir(parents=True)
    (own / "d.textproto").write_text("found here")
    assert contents(prepare_tuning_dir(CARD, tmp_path)) == RESULTS | {"d.textproto": "found here"}


@pytest.mark.parametrize(
    ("version", "text", "said"),
    [
        ("0.1.2", None, "with jaxlib 0.1.2, but jaxlib is"),
        (None, "{damaged", "not used, products are tuned at the first start"),
        (None, '{"../../passwd": "x"}', "not a table of autotuning results"),
        (None, "[1]", "not a table of autotuning results"),
    ],
)
def test_others_are_one_line_in_the_log(
    version: str | None, text: str | None, said: str, kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ship(tmp_path, version or jaxlib_version(), text)
    with caplog.at_level(logging.WARNING):
        assert contents(prepare_tuning_dir(CARD, tmp_path)) == {}
    (line,) = caplog.messages
    assert said in line


def test_no_directory_where_nothing_is_kept_or_tuned(kept: Path, tmp_path: Path) -> None:
    cpu: Any = SimpleNamespace(platform="cpu", device_kind="cpu")
    assert prepare_tuning_dir(cpu, tmp_path) is None
    jax.config.update("jax_compilation_cache_dir", None)
    assert prepare_tuning_dir(CARD, tmp_path) is None


def test_a_disk_that_cannot_be_written_to_is_no_error(kept: Path, tmp_path: Path) -> None:
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("a file")
    assert prepare_tuning_dir(CARD, tmp_path) is None


def test_what_is_written_on_a_card_can_be_shipped(tmp_path: Path) -> None:
    for name, text in RESULTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tmp").mkdir()  # XLA's own
    path = tmp_path / "out" / "card" / "1.json"
    assert write_results(tmp_path, path) == 2
    assert read_results(path) == RESULTS
