"""The share of a GPU's memory that JAX may take. This module does not import JAX, which reads the share once, when it
initializes its devices."""

import os
import sys

from apt_jax.errors import ConfigError

MEMORY_FRACTION = 0.92
"""Default share of a GPU's memory for JAX. The rest holds the CUDA context, code, CUDA graphs and NCCL buffers, which
JAX does not count."""
_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""The environment variable that jaxlib reads, and its older name; jaxlib raises an error if both are set."""


def set_memory_fraction() -> bool:
    """Let JAX take `MEMORY_FRACTION` of a GPU instead of three quarters, unless the user has set a share.

    Must be called before JAX initializes its devices.

    Returns:
        True if JAX uses `memory_fraction`; False if JAX has already initialized its devices without a configured share.
    """
    if any(os.environ.get(name) for name in _NAMES):
        return True
    if "jax" in sys.modules and _jax_has_looked():
        return False
    os.environ[_NAMES[0]] = str(MEMORY_FRACTION)
    return True


def memory_fraction() -> float:
    """Return the share of a GPU's memory that JAX takes after `set_memory_fraction`.

    Raises:
        ConfigError: the user's value is not a number in (0, 1].
    """
    for name in _NAMES:
        text = os.environ.get(name)
        if text:
            try:
                value = float(text)
            except ValueError:
                value = 0.0
            if not 0 < value <= 1:
                raise ConfigError(f"{name}={text!r} must be a share of the GPU's memory, above 0 and up to 1")
            return value
    return MEMORY_FRACTION


def _jax_has_looked() -> bool:
    from jax._src import xla_bridge  # this has no public name

    return xla_bridge.backends_are_initialized()
