"""Absorbed attention over layer inputs that are spread over devices by feature, in Pallas' interpreter against the
float32 reference."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.ops.calls import LogitModifiers
from apt_jax.pallas import triton_decode_absorbed, triton_decode_shards
from apt_jax.pallas.triton_tiles import tile_for
from tests.support.attention_cases import expected_decode
from tests.support.cases import cover
from tests.support.op_calls import flat

C, N, D = 16, 6, 48
"""Slots per block, heads, features of all devices."""
LENS = (40, 0, 1, 129, 16)
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2}


@dataclasses.dataclass
class Devices:
    """One of some devices: keeps what it gives to each sum, whose results are known or, at first, its own part."""

    sums: list[Any] | None = None
    parts: list[Any] = dataclasses.field(default_factory=list)
    size: int = 0

    def sum(self, x: Any) -> Any:
        self.parts.append(x)
        return x if self.sums is None else self.sums[len(self.parts) - 1]

    def scatter_sum(self, x: Any, axis: int) -> Any:
        raise NotImplementedError

    def gather(self, x: Any, axis: int) -> Any:
        raise NotImplementedError


def _over_devices(size: int, q: Any, pool: Any, tables: Any, lens: Any, **static: Any) -> tuple[np.ndarray, int]:
    """The results of devices that have some features each, side by side; and the number of their sums."""
    width = D // size
    own = [slice(i * width, (i + 1) * width) for i in range(size)]

    @jax.jit
    def run(q: Any, pool: Any, tables: Any, lens: Any, sums: list[Any] | None) -> tuple[Any, list[Any]]:
        device = Devices(sums)
        call = flat(triton_decode_shards.decode_absorbed)
        out = call(q, pool, tables, lens, tensor=device, block_size=C, interpret=True, **static)
        return out, device.parts

    parts = [run(q[:, :, lanes], pool[:, :, lanes], tables, lens, None)[1] for lanes in own]
    sums = [sum(of_devices[1:], of_devices[0]) for of_devices in zip(*parts, strict=True)]
    out = [np.asarray(run(q[:, :, lanes], pool[:, :, lanes], tables, lens, sums)[0]) for lanes in own]
    return np.concatenate(out, axis=2), len(sums)


def _case(dtype: str) -> tuple[Any, Any, Any, Any]:
    """Queries, a pool that is NaN wherever no position lies, tables with blocks in random order, lengths."""
    rng = np.random.default_rng(5)
    used = [-(-n // C) for n in LENS]
    pool = np.full((sum(used) + 2, C, D), np.nan, np.float32)
    tables, free = np.zeros((len(LENS), max(used)), np.int32), list(1 + rng.permutation(sum(used)))
    for row, n in enumerate(LENS):
        for j in range(used[row]):
            tables[row, j] = free.pop()
            count = min(C, n - j * C)
            pool[tables[row, j], :count] = rng.standard_normal((count, D))
    q = rng.standard_normal((len(LENS), N, D)) * D**-0.5
    kind = jnp.dtype(dtype)
    return jnp.asarray(q, kind), jnp.asarray(pool, kind), jnp.asarray(tables), jnp.asarray(LENS, jnp.int32)


def _check(args: tuple[Any, ...], actual: np.ndarray, dtype: str, **more: Any) -> None:
    expected = np.asarray(expected_decode("decode_absorbed", *args, **more, block_size=C), np.float64)
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max()


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("size", "dtype"), cover([(n, dtype) for n in (2, 4) for dtype in TOLERANCE], [(2, "float32")])
)
def test_the_parts_of_all_devices_give_the_reference(size: int, dtype: str) -> None:
    args = _case(dtype)
    actual, num_sums = _over_devices(size, *args)
    assert num_sums == 1
    _check(args, actual.astype(np.float64), dtype)
    assert not actual[1].any()  # a row of length 0


SLOPES = jnp.asarray(2.0 ** -np.arange(1, N + 1), jnp.float32)


RULES = {
    "softcap": LogitModifiers(softcap=1.5),
    "window": LogitModifiers(window=20),
    "alibi": LogitModifiers(slopes=SLOPES),
    "sinks": LogitModifiers(sinks=10.0 * SLOPES - 2.0),
    "all": LogitModifiers(softcap=1.5, window=20, slopes=SLOPES, sinks=SLOPES),
}


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize("name", cover(RULES, ["all"]))
def test_rules_apply_to_the_sums_and_rows_outside_the_range_give_zeros(name: str) -> None:
    args = _case("float32")
    more: dict[str, Any] = {"rules": RULES[name], "rows": (jnp.int32(2), jnp.int32(5))}
    actual, _ = _over_devices(2, *args, **more)
    assert not actual[:2].any()
    _check(args, actual, "float32", **more)


@pytest.mark.slow
def test_rows_behind_what_there_is_room_for_give_zeros() -> None:
    args = _case("float32")
    few, _ = _over_devices(2, *args, room=128)
    assert not few[3:].any()
    lens = jnp.where(jnp.arange(len(LENS)) < 3, args[3], 0)
    _check((*args[:3], lens), few, "float32")


@pytest.mark.slow
def test_scores_of_more_rows_than_memory_are_summed_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tile_for("scores", None, N, D // 2, 4).tokens
    most = -(-max(LENS) // tokens)
    monkeypatch.setattr(triton_decode_absorbed, "_SCORE_BYTES", (most + 2) * N * tokens * 4)
    args = _case("float32")
    actual, num_sums = _over_devices(2, *args)
    assert num_sums > 1
    _check(args, actual, "float32")
