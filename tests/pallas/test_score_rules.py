"""Rules on scores, norms of keys, grouped absorption and narrow layer inputs: XLA's ops, Triton's prefill, and the references.

Slots that no row owns hold NaN, and so does the tail of blocks that layer inputs do not fill.
"""

import functools
import itertools
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apt_jax.backends import attention_ops
from apt_jax.lab import reference
from apt_jax.ops import xla_decode, xla_prefill
from apt_jax.ops.calls import KeyNorm, LogitModifiers
from apt_jax.pallas import triton_prefill
from tests.support.attention_cases import expected_decode, expected_prefill, reference_prefill
from tests.support.cases import cover
from tests.support.op_calls import flat

C, K, G, H, D = 16, 2, 3, 12, 20
"""Slots per block, key heads, queries per key head, head width, model width (narrower than the lane of 24)."""
N, E = K * G, K * H
INPUTS = C * E // D  # layer inputs per block
LENS = (1, 0, 15, 16, 17, 40, 65, 130, 33, 7)

RULES: dict[str, LogitModifiers] = {
    "softcap": LogitModifiers(softcap=1.5),
    "window": LogitModifiers(window=9),
    "wide window": LogitModifiers(window=70),
    "alibi": LogitModifiers(slopes=jnp.asarray(2.0 ** -np.arange(1, N + 1), jnp.float32)),
    "softcap and window": LogitModifiers(softcap=1.5, window=20),
    "sinks": LogitModifiers(sinks=jnp.asarray([6.0, -20.0, 0.5, 2.0, -1.0, 40.0], jnp.float32)),
    "sinks and window": LogitModifiers(window=9, sinks=jnp.asarray([0.0, 3.0, -3.0, 1.0, 12.0, -12.0], jnp.float32)),
}

NORMS = (None, "head", "lane")
EACH_NORM = [(None, None), ("softcap and window", "head"), ("alibi", "lane")]
"""Norms change keys and rules change scores, so that not every pair of them is a case of its own."""


def _normal(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32))


def _pool(rng: np.random.Generator, lens: Any, per_block: int, width: int, halves: int) -> tuple[Any, Any]:
    """A pool with NaN wherever no position lies, and tables (B, halves, J)."""
    entries = max(1, -(-max(lens) // per_block))
    used = [-(-n // per_block) for n in lens]
    pool = np.full((1 + halves * sum(used) + 2, C * E), np.nan, np.float32)
    free = list(1 + rng.permutation(len(pool) - 1))
    tables = np.zeros((len(lens), halves, entries), np.int32)
    for row, n in enumerate(lens):
        for j in range(used[row]):
            count = min(per_block, n - j * per_block) * width
            for half in range(halves):
                tables[row, half, j] = block = free.pop()
                pool[block, :count] = rng.standard_normal(count)
    return jnp.asarray(pool.reshape(-1, C, E)), jnp.asarray(tables)


def _weights(rng: np.random.Generator, lanes: int = H) -> list[Any]:
    scale = D**-0.5
    return [
        scale * _normal(rng, K, lanes, D),
        _normal(rng, K, lanes),
        scale * _normal(rng, K, H, D),
        _normal(rng, K, H),
    ]


def _norm(rng: np.random.Generator, kind: str | None) -> dict[str, Any]:
    if kind is None:
        return {}
    return {"key_norm": KeyNorm(scale=1.0 + 0.2 * _normal(rng, H if kind == "head" else E), eps=1e-6)}


def _angles(positions: int, half: int) -> Any:
    return jnp.asarray(np.arange(positions)[:, None] * 100.0 ** -np.linspace(0, 1, half), jnp.float32)


def _close(ops: str, op: str, args: tuple[Any, ...], **options: Any) -> None:
    function = getattr(reference if ops == "reference" else xla_decode, op)
    got = jax.jit(lambda *a: flat(function)(*a, **options))(*args)
    want = expected_decode(op, *args, **options)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=0)


def _of_both(every: Iterable[Any], quick: Collection[Any], of_reference: Collection[Any]) -> list[Any]:
    """All cases of XLA's ops and of the references; in `make test` those of `quick` and of `of_reference`."""
    cases = list(every)
    return [*cover([("xla", *case) for case in cases], [("xla", *case) for case in quick]),
            *cover([("reference", *case) for case in cases], [("reference", *case) for case in of_reference])]  # fmt: skip


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("ops", "name"),
    _of_both(
        ((name,) for name in RULES), [(name,) for name in RULES], [("softcap and window",), ("alibi",), ("sinks",)]
    ),
)
def test_decode_over_keys_and_values(ops: str, name: str) -> None:
    rng = np.random.default_rng(0)
    pool, tables = _pool(rng, LENS, C, E, 2)
    lens = jnp.asarray(LENS, jnp.int32)
    q = 2.0 * _normal(rng, len(LENS), N, H)
    _close(ops, "decode_kv", (q, pool, tables, lens), block_size=C, rules=RULES[name])
    plain = expected_decode("decode_kv", q, pool, tables, lens, block_size=C)
    ruled = expected_decode("decode_kv", q, pool, tables, lens, block_size=C, rules=RULES[name])
    assert np.abs(plain - ruled).max() > 1e-2  # the rule does something here


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("ops", "name"),
    _of_both(((name,) for name in (None, *RULES)), [(None,), *((name,) for name in RULES)], [("sinks and window",)]),
)
def test_decode_over_absorbed_layer_inputs(ops: str, name: str | None) -> None:
    rng = np.random.default_rng(1)
    pool, tables = _pool(rng, LENS, INPUTS, D, 1)
    q = _normal(rng, len(LENS), N, D)
    args = (q, pool, tables[:, 0], jnp.asarray(LENS, jnp.int32))
    _close(ops, "decode_absorbed", args, block_size=INPUTS, rules=None if name is None else RULES[name])


@pytest.mark.parametrize(
    ("ops", "name", "norm"),
    _of_both(
        itertools.product((None, "softcap and window", "alibi", "sinks and window"), NORMS),
        [*EACH_NORM, ("sinks and window", "head")],
        [*EACH_NORM[1:], ("sinks and window", None)],
    ),
)
def test_decode_over_reprojected_layer_inputs(ops: str, name: str | None, norm: str | None) -> None:
    rng = np.random.default_rng(2)
    pool, tables = _pool(rng, LENS, INPUTS, D, 1)
    args = (
        _normal(rng, len(LENS), N, H),
        pool,
        tables[:, 0],
        jnp.asarray(LENS, jnp.int32),
        *_weights(rng),
    )
    _close(
        ops, "decode_reprojected", args, block_size=INPUTS, angles=_angles(200, 4),
        rules=None if name is None else RULES[name], **_norm(rng, norm),
    )  # fmt: skip


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("ops", "name", "norm", "rotary"),
    _of_both(
        [
            (name, *rest)
            for name in (None, "softcap and window", "sinks")
            for rest in ((None, H), (None, 4), ("head", H), ("lane", H))
        ],
        [(None, None, H), ("softcap and window", None, 4), ("softcap and window", "head", H), ("sinks", "lane", H)],
        [("softcap and window", None, 4), ("sinks", "head", H)],
    ),
)
def test_decode_with_absorbed_values(ops: str, name: str | None, norm: str | None, rotary: int) -> None:
    rng = np.random.default_rng(3)
    pool, tables = _pool(rng, LENS, INPUTS, D, 1)
    wk, bk, _, _ = _weights(rng, rotary)
    rest = None if rotary == H else _normal(rng, len(LENS), N, D)
    args = (
        _normal(rng, len(LENS), N, rotary), rest, pool, tables[:, 0], jnp.asarray(LENS, jnp.int32), wk, bk, _angles(200, 2),
    )  # fmt: skip
    _close(
        ops, "decode_v_absorbed", args, block_size=INPUTS, rules=None if name is None else RULES[name], **_norm(rng, norm)
    )  # fmt: skip


@pytest.mark.in_turn(14, group="kernels in interpreters")
@pytest.mark.parametrize(
    ("ops", "name", "norm"),
    _of_both(
        itertools.product((None, *RULES), NORMS),
        [*EACH_NORM, *((name, None) for name in ("softcap", "window", "wide window", "sinks", "sinks and window"))],
        [("softcap and window", "head"), ("sinks and window", None)],
    )
    + cover(
        [("triton", name, norm) for name in (None, *RULES) for norm in (None, "head")],
        [("triton", "alibi", None), ("triton", "softcap and window", "head"), ("triton", "sinks and window", None)],
    ),
)
def test_prefill_over_prefixes_of_both_kinds(ops: str, name: str | None, norm: str | None) -> None:
    rng = np.random.default_rng(4)
    chunks, prefixes, hidden = (
        (40, 1, 150, 9, 33),
        (0, 17, 40, 130, 64),
        (False, True, False, True, True),
    )
    total = sum(chunks)
    padded = total + 5
    entries = max(-(-n // C) for n in prefixes)
    pools, tables = [], np.zeros((len(chunks), 2, entries), np.int32)
    base = 0
    for row, (prefix, is_hidden) in enumerate(zip(prefixes, hidden, strict=True)):
        part, table = _pool(rng, (prefix,), *((INPUTS, D, 1) if is_hidden else (C, E, 2)))
        used = -(-prefix // (INPUTS if is_hidden else C))
        tables[row, : table.shape[1], :used] = np.asarray(table)[0, :, :used] + base
        pools.append(np.asarray(part))
        base += len(pools[-1])
    args = (
        2.0 * _normal(rng, padded, N, H), _normal(rng, padded, K, H), _normal(rng, padded, K, H),
        jnp.asarray(np.concatenate(pools)), jnp.asarray(tables), jnp.asarray(np.cumsum(chunks) - chunks, jnp.int32),
        jnp.asarray(chunks, jnp.int32), jnp.asarray(prefixes, jnp.int32), jnp.asarray(hidden), jnp.int32(len(chunks)),
        *_weights(rng),
    )  # fmt: skip
    options = dict(
        block_size=C, with_hidden=True, angles=_angles(200, 4), hidden_block_size=INPUTS,
        rules=None if name is None else RULES[name], **_norm(rng, norm),
    )  # fmt: skip
    if ops == "reference":
        got = reference_prefill(args, options)
    elif ops == "triton":
        prefill = functools.partial(flat(triton_prefill.prefill), interpret=True, piece_positions=512)
        got = jax.jit(lambda *a: prefill(*a, **options))(*args)
    else:
        got = jax.jit(lambda *a: flat(xla_prefill.prefill)(*a, **options))(*args)
    np.testing.assert_allclose(got, expected_prefill(args, options), atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", [None, *RULES])
def test_prefill_of_the_cpu_kernels_over_keys_and_values(name: str | None) -> None:
    """Chunks longer than what attends as decode rows do, windows that begin within a tile, and soft caps with them."""
    rng = np.random.default_rng(5)
    chunks, prefixes = (40, 1, 150, 9, 130), (0, 17, 40, 130, 64)
    tables = np.zeros((len(chunks), 2, max(-(-n // C) for n in prefixes)), np.int32)
    pools: list[np.ndarray] = []
    base = 0
    for row, prefix in enumerate(prefixes):
        part, table = _pool(rng, (prefix,), C, E, 2)
        used = -(-prefix // C)
        tables[row, : table.shape[1], :used] = np.asarray(table)[0, :, :used] + base
        pools.append(np.asarray(part))
        base += len(pools[-1])
    total = sum(chunks) + 3
    args = (
        2.0 * _normal(rng, total, N, H), _normal(rng, total, K, H), _normal(rng, total, K, H),
        jnp.asarray(np.concatenate(pools)), jnp.asarray(tables), jnp.asarray(np.cumsum(chunks) - chunks, jnp.int32),
        jnp.asarray(chunks, jnp.int32), jnp.asarray(prefixes, jnp.int32), jnp.zeros(len(chunks), bool),
        jnp.int32(len(chunks)), *_weights(rng),
    )  # fmt: skip
    rules = None if name is None else RULES[name]
    options = {
        "block_size": C,
        "with_hidden": True,
        "angles": _angles(200, 4),
        "hidden_block_size": INPUTS,
        "rules": rules,
    }
    prefill = flat(attention_ops("cpu", "cpu").prefill)
    got = jax.jit(lambda *a: prefill(*a, block_size=C, with_hidden=False, rules=rules))(*args)
    np.testing.assert_allclose(got, expected_prefill(args, options), atol=5e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["decode_kv", "decode_absorbed"])
@pytest.mark.parametrize("name", RULES)
def test_decode_of_the_cpu_kernels(name: str, op: str, dtype: str) -> None:
    rng = np.random.default_rng(6)
    slots, width, halves = (C, E, 2) if op == "decode_kv" else (INPUTS, D, 1)
    pool, tables = _pool(rng, LENS, slots, width, halves)
    q = _normal(rng, len(LENS), N, H if op == "decode_kv" else D)
    tables = tables if op == "decode_kv" else tables[:, 0]
    args = (q.astype(dtype), pool.astype(dtype), tables, jnp.asarray(LENS, jnp.int32))
    kernel = flat(getattr(attention_ops("cpu", "cpu"), op), op)
    got = jax.jit(lambda *a: kernel(*a, block_size=slots, rules=RULES[name]))(*args)
    want = expected_decode(op, *args, block_size=slots, rules=RULES[name])
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=2e-5 if dtype == "float32" else 3e-2, rtol=0)
