"""Score rules, norms of keys, grouped absorption and narrow layer inputs in the Triton decode kernels, interpreted.

Slots that no row owns hold NaN, and so does the tail of blocks that layer inputs do not fill.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.backends import attention_ops
from apt_jax.ops.calls import KeyNorm, LogitModifiers
from tests.support.attention_cases import expected_decode
from tests.support.cases import cover
from tests.support.op_calls import flat

C, K, G, H, D = 16, 2, 3, 12, 20
"""Slots per block, key heads, queries per key head, head width, model width (narrower than the lane of 24)."""
N, E = K * G, K * H
INPUTS = C * E // D  # layer inputs per block
LENS = (1, 0, 15, 17, 65, 130)

RULES: dict[str, LogitModifiers | None] = {
    "none": None,
    "softcap": LogitModifiers(softcap=1.5),
    "window": LogitModifiers(window=9),
    "wide window": LogitModifiers(window=70),
    "alibi": LogitModifiers(slopes=jnp.asarray(2.0 ** -np.arange(1, N + 1), jnp.float32)),
    "sinks": LogitModifiers(sinks=jnp.asarray(5.0 * np.cos(np.arange(N)), jnp.float32)),
    "all": LogitModifiers(
        softcap=1.5,
        window=20,
        slopes=jnp.asarray(2.0 ** -np.arange(1, N + 1), jnp.float32),
        sinks=jnp.asarray(3.0 * np.sin(np.arange(N)), jnp.float32),
    ),
}


def _normal(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32))


def _pool(rng: np.random.Generator, per_block: int, width: int, halves: int) -> tuple[Any, Any]:
    """A pool with NaN wherever no position lies, and tables (B, halves, J)."""
    used = [-(-n // per_block) for n in LENS]
    pool = np.full((1 + halves * sum(used) + 2, C * E), np.nan, np.float32)
    free = list(1 + rng.permutation(len(pool) - 1))
    tables = np.zeros((len(LENS), halves, max(used)), np.int32)
    for row, n in enumerate(LENS):
        for j in range(used[row]):
            count = min(per_block, n - j * per_block) * width
            for half in range(halves):
                tables[row, half, j] = block = free.pop()
                pool[block, :count] = rng.standard_normal(count)
    return jnp.asarray(pool.reshape(-1, C, E)), jnp.asarray(tables)


def _norm(rng: np.random.Generator, normed: bool) -> dict[str, Any]:
    return {"key_norm": KeyNorm(scale=1.0 + 0.2 * _normal(rng, H), eps=1e-6)} if normed else {}


def _angles(half: int) -> Any:
    return jnp.asarray(np.arange(200)[:, None] * 100.0 ** -np.linspace(0, 1, half), jnp.float32)


def _close(op: str, args: tuple[Any, ...], **options: Any) -> None:
    options = {name: value for name, value in options.items() if value is not None}
    function = flat(getattr(attention_ops("cpu", "triton-interpret"), op), op)
    got = jax.jit(functools.partial(function, **options))(*args)
    want = expected_decode(op, *args, **options)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, atol=5e-5, rtol=0)


LENGTHS = jnp.asarray(LENS, jnp.int32)


@pytest.mark.parametrize("name", cover(RULES, ["all"]))
def test_rules_over_keys_and_values(name: str) -> None:
    rng = np.random.default_rng(0)
    pool, tables = _pool(rng, C, E, 2)
    _close("decode_kv", (2.0 * _normal(rng, len(LENS), N, H), pool, tables, LENGTHS), block_size=C, rules=RULES[name])


@pytest.mark.parametrize("name", cover(RULES, ["all"]))
def test_rules_over_absorbed_layer_inputs(name: str) -> None:
    rng = np.random.default_rng(1)
    pool, tables = _pool(rng, INPUTS, D, 1)
    args = (_normal(rng, len(LENS), N, D), pool, tables[:, 0], LENGTHS)
    _close("decode_absorbed", args, block_size=INPUTS, rules=RULES[name])


@pytest.mark.parametrize(
    ("name", "normed", "half"),
    cover(
        [(name, normed, half) for name in RULES for normed in (False, True) for half in (0, 4, 6)],
        [("all", True, 4)],
    ),
)
def test_rules_over_reprojected_layer_inputs(name: str, normed: bool, half: int) -> None:
    rng = np.random.default_rng(2)
    pool, tables = _pool(rng, INPUTS, D, 1)
    weights = (_normal(rng, K, H, D), _normal(rng, K, H), _normal(rng, K, H, D), _normal(rng, K, H))
    weights = tuple(w * (D**-0.5 if w.ndim == 3 else 1.0) for w in weights)
    args = (_normal(rng, len(LENS), N, H), pool, tables[:, 0], LENGTHS, *weights)
    angles = _angles(half) if half else None
    _close("decode_reprojected", args, block_size=INPUTS, angles=angles, rules=RULES[name], **_norm(rng, normed))


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("name", "normed", "rotary", "half"),
    cover(
        [(name, *rest) for name in RULES for rest in ((False, 4, 2), (False, H, 6), (True, H, 6), (True, H, 2))],
        [("all", True, H, 2)],
    ),
)
def test_rules_with_absorbed_values(name: str, normed: bool, rotary: int, half: int) -> None:
    """Key heads are shared by query heads; of normed keys only some lanes may be turned."""
    rng = np.random.default_rng(3)
    pool, tables = _pool(rng, INPUTS, D, 1)
    rest = None if rotary == H else _normal(rng, len(LENS), N, D)
    keys = (D**-0.5 * _normal(rng, K, rotary, D), _normal(rng, K, rotary), _angles(half))
    args = (_normal(rng, len(LENS), N, rotary), rest, pool, tables[:, 0], LENGTHS, *keys)
    _close("decode_v_absorbed", args, block_size=INPUTS, rules=RULES[name], **_norm(rng, normed))


def test_a_norm_over_all_heads_is_refused() -> None:
    rng = np.random.default_rng(4)
    pool, tables = _pool(rng, INPUTS, D, 1)
    weights = (_normal(rng, K, H, D), None, _normal(rng, K, H, D), None)
    norm = KeyNorm(scale=_normal(rng, E), eps=1e-6)
    ops = attention_ops("cpu", "triton-interpret")
    q = _normal(rng, len(LENS), N, H)
    with pytest.raises(ValueError, match="norms over all heads together"):
        flat(ops.decode_reprojected)(q, pool, tables[:, 0], LENGTHS, *weights, block_size=INPUTS, key_norm=norm)
    with pytest.raises(ValueError, match="do not hold block_size=40 layer inputs of width=20"):
        flat(ops.decode_reprojected)(q, pool, tables[:, 0], LENGTHS, *weights, block_size=40)
