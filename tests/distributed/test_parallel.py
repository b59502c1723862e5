"""Tensor parallelism on simulated devices: the tokens of one device, each with its share of the pool and no more."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from apt_jax.config import ParallelConfig
from apt_jax.errors import ConfigError
from apt_jax.models import sharding as parallel
from apt_jax.models.config import ModelConfig
from tests.support.cases import cover
from tests.support.parallel_cases import CASES, MODELS

ROOT = Path(__file__).parents[2]
REDUCE, GATHER, SCATTER = "all-reduce", "all-gather", "reduce-scatter"
QUICK = [
    "opt, kv",
    "opt, hidden, reprojected",
    "opt, converted",
    "norm of each key, converted",
    "fewer key heads than devices",
    "alibi, hidden",
    "partly rotary, hidden",
    "norm of all keys, fewer than devices",
    "caps and windows, hidden",
    "gemma4",
    "experts, both",
    "latents, absorbed",
    "latents, reprojected",
    "sinks, experts with biases",
    "int8, both",
    "int8, fewer key heads than devices",
]
"""Each kind of cache, way to attend to it, and property of models whose arrays are cut in a way of their own."""


@pytest.fixture(scope="module")
def devices() -> Iterator[subprocess.Popen[str]]:
    """A process with simulated devices that answers one case a line."""
    command = [sys.executable, "-m", "tests.support.parallel_cases"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def results(devices: subprocess.Popen[str], case: str, size: int) -> dict[str, Any]:
    assert devices.stdin is not None
    assert devices.stdout is not None
    print(json.dumps([case, size]), file=devices.stdin, flush=True)
    found = json.loads(devices.stdout.readline())
    assert "error" not in found, found["error"]
    return found


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    "several", [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", cover(CASES, QUICK))
def test_tokens_are_those_of_one_device_and_the_pool_is_cut(devices, case, several):
    one, cut = results(devices, case, 1), results(devices, case, several)
    assert all(len(tokens) == 12 for tokens in one["tokens"])
    assert cut["tokens"] == one["tokens"]
    assert cut["converted"] == one["converted"] == case.endswith("converted")
    model, kind, attention = CASES[case]
    # Some steps of absorbed rows alone have little, and sum their scores in less room.
    assert case != "opt, hidden, on kernels" or cut["decode programs"] == 2
    lanes = parallel.with_repeated_heads(MODELS[model], several).lane
    assert cut["pool bytes"] == [one["pool bytes"][0] * lanes // MODELS[model].lane // several] * several
    assert one["collectives"] == {}
    assert ("embed" in one["deleted"]) == (case == "int8, both")  # the matrix that int8 replaces
    assert ("embed" in cut["deleted"]) == (kind != "kv")  # its rows do not divide; the caller of "kv" keeps all
    assert kind != "kv" or cut["deleted"] == []
    # After attention and after the feed-forward layer, which a parallel layer has as one; norms of all keys and
    # queries; absorbed scores, new queries, and what was absorbed, to its heads; features of layer inputs.
    sums = (1 if MODELS[model].parallel else 2) + (MODELS[model].qk_norm == "lane")
    if kind == "kv":
        assert cut["collectives"] == {REDUCE: sums}
    elif attention == "absorb" and MODELS[model].hidden_mode == "absorb":
        # Where rows may be of both kinds, new keys and values too.
        assert cut["collectives"] == {REDUCE: sums + 1, GATHER: 1, SCATTER: 1 + (kind == "hybrid")}
    else:
        assert cut["collectives"] == {REDUCE: sums, GATHER: 1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kv", "hidden"])
def test_each_device_has_its_share_of_host_memory(devices, kind):
    one, cut = (results(devices, f"host memory, {kind}", size) for size in (1, 4))
    assert cut["tokens"] == one["tokens"]
    assert min(one["loaded"], cut["loaded"], one["saved"], cut["saved"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kv", "hidden", "hybrid"])
def test_blocks_that_requests_share_are_cut(devices, kind):
    one, cut = (results(devices, f"shared blocks, {kind}", size) for size in (1, 4))
    assert cut["tokens"] == one["tokens"]
    assert min(one["loaded"], cut["loaded"], one["saved"], cut["saved"]) > 0


def test_numbers_of_devices_that_do_not_fit_are_refused_with_those_that_do():
    config = MODELS["llama grouped"]
    assert parallel.sizes_that_fit(config) == [1, 2, 4, 8]
    with pytest.raises(ConfigError) as caught:
        parallel.check_size(config, 3)
    assert str(caught.value) == (
        "tensor_parallel_size=3 does not divide this model (8 query heads, 2 key heads, feed-forward width 96); "
        "1, 2, 4, 8 do (-tp)"
    )
    with pytest.raises(ConfigError, match=r"must lie in \[1, 1024\] \(-tp\)"):
        ParallelConfig(tensor_parallel_size=0)


def test_too_few_devices_are_named():
    count = len(jax.devices())
    with pytest.raises(ConfigError) as caught:
        parallel.tensor_mesh(count + 1)
    assert str(caught.value) == (
        f"tensor_parallel_size={count + 1} needs {count + 1} devices; JAX has {count} device{'s' * (count != 1)} (cpu); "
        f"JAX_NUM_CPU_DEVICES={count + 1} simulates them (-tp)"
    )


def test_where_layer_inputs_cannot_be_cut_the_kind_is_not_offered():
    assert parallel.hidden_refusal(MODELS["olmo2"], 1) is None
    assert "key norm" in str(parallel.hidden_refusal(MODELS["olmo2"], 2))
    narrow: ModelConfig = MODELS["opt"]
    assert parallel.hidden_refusal(narrow, 8) is None
    assert "width of 64" in str(parallel.hidden_refusal(narrow, 6))
