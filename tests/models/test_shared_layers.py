"""Layers that are alike are one function of a program; random weights of large models."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from apt_jax.backends import attention_ops
from apt_jax.core.kinds import KindSet
from apt_jax.executor.compiling.buckets import GREEDY
from apt_jax.models import params as weights
from apt_jax.models.params import abstract_params, dummy_params, param_names
from tests.support.paged_driver import CONFIG, make_executor

GRAPHS = dataclasses.replace(attention_ops("cpu", "xla"), name="xla-graphs", branches=False)
BOTH = KindSet(kv=True, hidden=True)


def calls(program: str) -> dict[str, int]:
    """Calls of each function of a layer in a lowered program."""
    found = re.findall(r"call @(_layer\w*)\(", program)
    return {name: found.count(name) for name in found}


def layered(num_layers: int, windows: tuple[int | None, ...] = ()):
    config = dataclasses.replace(CONFIG, num_layers=num_layers, layer_windows=windows)
    return make_executor(ops=GRAPHS, mixed=True, params=dummy_params(config, "float32", 7), config=config).runner


@pytest.mark.parametrize("num_layers", [3, 5])
def test_programs_grow_by_a_call_a_layer(num_layers: int) -> None:
    """The last layer has no next one, and of prompts computes the tokens that sample alone."""
    runner = layered(num_layers)
    for call in (runner.empty_decode_call(8, BOTH, GREEDY), runner.empty_forward_call(8, 64, BOTH)):
        assert sorted(calls(call.lower().as_text()).values()) == [1, num_layers - 1]


def test_the_last_layer_has_the_attention_of_the_others() -> None:
    runner = layered(3)
    for call in (runner.empty_decode_call(8, BOTH, GREEDY), runner.empty_forward_call(8, 64, BOTH)):
        program = call.lower().as_text()
        assert len(re.findall(r"func private @_attention", program)) == 1
        assert len(re.findall(r"call @_attention", program)) == 2


def test_layers_with_other_rules_are_functions_of_their_own() -> None:
    runner = layered(6, (9, None, 9, None, 9, None))
    assert sorted(calls(runner.empty_decode_call(8, BOTH, GREEDY).lower().as_text()).values()) == [1, 2, 3]


def test_the_compiler_leaves_no_call() -> None:
    compiled = layered(3).empty_decode_call(8, BOTH, GREEDY).lower().compile().as_text()
    assert compiled is not None
    called = "".join(re.findall(r"to_apply=%?([\w.-]+)", compiled))
    assert "_layer" not in called
    assert "_attention" not in called


def test_large_models_are_made_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MOST_ON_HOST", 1000)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    made = dummy_params(CONFIG, "bfloat16", 3)
    shapes = abstract_params(CONFIG, "bfloat16")
    assert jax.tree.map(lambda a: (a.shape, a.dtype), made) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
    for name, leaf in zip(jax.tree.leaves(param_names(CONFIG)), jax.tree.leaves(made), strict=True):
        values = np.asarray(leaf, np.float32)
        assert abs(values.mean() - weights.is_norm_scale(name)) < 0.02, name
        assert 0.01 < values.std() < 0.03, name
    first, second = (np.asarray(layer.wq, np.float32) for layer in made.layers)
    assert np.abs(first - second).max() > 0.01
    again = jax.tree.leaves(dummy_params(CONFIG, "bfloat16", 3))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(made), again, strict=True))
