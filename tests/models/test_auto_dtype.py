"""The data type that `--dtype` asks for."""

import pytest

from apt_jax.config import EngineConfig
from apt_jax.models.loading.auto_dtype import with_auto_dtype


@pytest.mark.parametrize(
    ("asked", "stored", "platform", "found"),
    [
        ("auto", "bfloat16", "cpu", "float32"),
        ("auto", "bfloat16", "gpu", "bfloat16"),
        ("auto", "float16", "gpu", "float16"),
        ("auto", "float16", "tpu", "bfloat16"),
        ("auto", "float32", "gpu", "bfloat16"),
        ("auto", None, "gpu", "bfloat16"),
        ("half", "bfloat16", "gpu", "float16"),
        ("float", "bfloat16", "gpu", "float32"),
        ("float32", "bfloat16", "gpu", "float32"),
        ("bfloat16", "float16", "cpu", "bfloat16"),
    ],
)
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_data_type(asked, stored, platform, found, field):
    config = EngineConfig(model="m", dtype=asked)
    assert with_auto_dtype(config, {field: stored}, platform) == EngineConfig(model="m", dtype=found)


def test_the_default_is_float32_on_a_cpu():
    assert with_auto_dtype(EngineConfig(model="m"), {"torch_dtype": "float16"}).dtype == "float32"
