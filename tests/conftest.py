"""Settings for the whole suite: JAX on the CPU, strict about dtypes and ranks."""

import os
from collections.abc import Generator
from typing import Any

# An environment variable, not a call: it also reaches the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may ask the hub

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A slow or busy machine is no reason to fail; in CI the same examples come every time.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Make recorded NumPy numbers plain ones: test workers can send nothing else to their parent."""
    item.user_properties[:] = [
        (name, value.item() if isinstance(value, np.generic) else value)
        for name, value in item.user_properties
    ]
    return (yield)
