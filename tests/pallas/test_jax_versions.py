"""Versions of JAX that the GPU kernels can be used with: Pallas' Triton backend is deprecated."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from apt_jax import backends
from apt_jax.errors import ConfigError
from apt_jax.executor.attention_choice import choose_attention

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_extras_ask_for_versions_that_have_the_backend() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    for name in ("cuda12", "cuda13"):
        (requirement,) = extras[name]
        assert requirement.endswith("," + backends.JAX_WITH_TRITON)


def test_this_jax_has_the_backend_or_is_newer_than_the_extras_allow() -> None:
    most = re.fullmatch(r"<0\.(\d+)", backends.JAX_WITH_TRITON)
    assert most is not None
    if jax.__version_info__ < (0, int(most[1])):
        importlib.import_module("jax.experimental.pallas.triton")


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch):
    """A JAX without the backend."""
    package = importlib.import_module("apt_jax.pallas")
    monkeypatch.delattr(package, "triton_decode_kv", raising=False)
    monkeypatch.setitem(sys.modules, "apt_jax.pallas.triton_decode_kv", None)
    backends.attention_ops.cache_clear()
    yield
    backends.attention_ops.cache_clear()


def test_without_it_xla_takes_its_place_and_says_what_to_install(no_triton, caplog) -> None:
    assert choose_attention("gpu", None, "sm_80", {}).name == "xla"
    assert "install 'jax<0.13'" in caplog.text


def test_without_it_the_kernels_asked_for_by_name_are_refused(no_triton) -> None:
    with pytest.raises(ConfigError, match=r"'triton' is not available: JAX .* lacks Pallas' Triton backend.*jax<0\.13"):
        choose_attention("gpu", "triton", "sm_80", {})
