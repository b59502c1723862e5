"""The names that `import apt_jax` offers, and the cost of importing them."""

import json
import subprocess
import sys

import pytest

import apt_jax

PUBLIC = {
    "interfaces": ["LLM", "AsyncEngine", "build_engine"],
    "requests": ["SLO", "SamplingParams", "StructuredOutputsParams"],
    "answers": ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"],
    "configuration": [
        "CacheConfig",
        "EngineConfig",
        "ModelConfig",
        "ParallelConfig",
        "SchedulerConfig",
    ],
    "errors": [
        "AptJaxError",
        "ConfigError",
        "DuplicateRequestError",
        "EngineDeadError",
        "InvalidRequestError",
        "ModelLoadError",
        "QueueFullError",
        "UnknownRequestError",
    ],
    "version": ["__version__"],
}
"""The documented names. A change here needs an entry in the changelog."""

NAMES = sorted(name for names in PUBLIC.values() for name in names)


def heavy_modules_after(statements: str) -> list[str]:
    """Which slow or optional libraries a fresh interpreter has imported after `statements`."""
    heavy = ("jax", "tokenizers", "scipy", "grpc", "safetensors", "llguidance")
    code = f"import json, sys\n{statements}\nprint(json.dumps([m for m in {heavy} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_public_names_are_the_documented_ones():
    assert sorted(apt_jax.__all__) == NAMES
    assert set(NAMES) <= set(dir(apt_jax))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(apt_jax, name)
    assert value is not None
    if name != "__version__":
        assert value.__name__ == name
        assert value.__module__.startswith("apt_jax.")
        assert value.__doc__


def test_a_star_import_brings_the_public_names_alone():
    namespace: dict[str, object] = {}
    exec("from apt_jax import *", namespace)
    assert sorted(namespace.keys() - {"__builtins__"}) == NAMES


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="LLLM"):
        _ = apt_jax.LLLM  # type: ignore[attr-defined]


def test_every_error_is_an_apt_jax_error():
    for name in PUBLIC["errors"]:
        assert issubclass(getattr(apt_jax, name), apt_jax.AptJaxError)


def test_the_package_alone_and_its_plain_types_import_nothing_slow():
    assert heavy_modules_after("import apt_jax") == []
    assert heavy_modules_after("from apt_jax import SLO, SamplingParams, EngineConfig") == []
    assert heavy_modules_after("import apt_jax.validation, apt_jax.metrics") == []


def test_scheduling_needs_neither_jax_nor_tokenizers():
    assert not {"jax", "tokenizers", "grpc"} & set(heavy_modules_after("import apt_jax.sched"))
