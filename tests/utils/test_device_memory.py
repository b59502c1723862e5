"""The share of a GPU's memory that JAX takes: ours, unless the user or JAX was first."""

import os
import subprocess
import sys

import pytest

from apt_jax.errors import ConfigError
from apt_jax.utils import device_memory
from apt_jax.utils.device_memory import MEMORY_FRACTION, memory_fraction, set_memory_fraction

NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@pytest.fixture(autouse=True)
def no_fraction(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_memory, "_jax_has_looked", lambda: False)


def test_it_is_ours_where_nobody_has_said_anything(monkeypatch):
    monkeypatch.setenv(NAMES[0], "")
    assert set_memory_fraction()
    assert os.environ[NAMES[0]] == str(MEMORY_FRACTION)
    assert memory_fraction() == MEMORY_FRACTION


@pytest.mark.parametrize("name", NAMES)
def test_the_users_stays_under_either_name(monkeypatch, name):
    monkeypatch.setenv(name, "0.5")
    assert set_memory_fraction()
    assert {other: os.environ.get(other) for other in NAMES} == {name: "0.5", **{n: None for n in NAMES if n != name}}
    assert memory_fraction() == 0.5


def test_it_is_too_late_once_jax_has_looked(monkeypatch):
    monkeypatch.setattr(device_memory, "_jax_has_looked", lambda: True)
    assert not set_memory_fraction()
    assert NAMES[0] not in os.environ


@pytest.mark.parametrize("text", ["0", "1.5", "-1", "much", "nan"])
def test_no_share_is_refused(monkeypatch, text):
    monkeypatch.setenv(NAMES[0], text)
    with pytest.raises(ConfigError, match=f"XLA_CLIENT_MEM_FRACTION='{text}' must be a share"):
        memory_fraction()


def test_it_is_set_before_the_engine_looks_at_devices():
    """By an engine in a process of its own, told by JAX's own look at the environment."""
    program = """
import os
from jax._src import xla_bridge

seen = []
original = xla_bridge.backends
xla_bridge.backends = lambda: (seen.append(os.environ.get("XLA_CLIENT_MEM_FRACTION")), original())[1]
from apt_jax import EngineConfig, build_engine

build_engine(EngineConfig(model="tiny-opt"), warm_up=False, calibrate=False)
print(set(seen))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{{'{MEMORY_FRACTION}'}}"
