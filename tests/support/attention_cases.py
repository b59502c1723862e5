"""Oracles of the attention ops in NumPy, in float64: nothing to compile. `apt_jax.lab.reference` says what they compute."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from apt_jax.lab import reference
from apt_jax.ops.calls import KeyNorm, LogitModifiers
from tests.support.op_calls import flat


def _wide(a: Any) -> Any:
    if a is None:
        return None
    a = np.asarray(a)
    return a if a.dtype.kind in "biu" else a.astype(np.float64)


def _own(pool: Any, table: Any, ranges: Any, length: int, slots: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what a row's own slots hold, and their positions."""
    position = np.arange(length)
    entry, order = position // slots, position % slots
    slot, own = order, np.full(length, True)
    if ranges is not None:
        first, last = ranges[entry].T
        slot, own = np.where(first <= last, first + order, first - 1 - order), order < np.abs(last - first)
    position, block, slot = position[own], table[entry[own]], slot[own]
    return pool.reshape(len(pool), -1)[block[:, None], slot[:, None] * width + np.arange(width)], position


def _turn(x: np.ndarray, angles: np.ndarray | None) -> np.ndarray:
    if angles is None:
        return x
    half = angles.shape[1]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def _project(x: np.ndarray, w: np.ndarray, b: np.ndarray | None) -> np.ndarray:
    return np.tensordot(x, w, (1, 2)) + (0 if b is None else b)


def _keys(x: np.ndarray, w: np.ndarray, b: Any, norm: KeyNorm | None, angles: np.ndarray | None) -> np.ndarray:
    keys = _project(x, w, b)
    if norm is not None:
        scale = _wide(norm.scale)
        together = keys if scale.size == keys.shape[2] else keys.reshape(len(keys), 1, -1)
        normed = together / np.sqrt((together**2).mean(axis=-1, keepdims=True) + norm.eps)
        keys = (normed * scale).reshape(keys.shape)
    return _turn(keys, angles)


def _softmax(scores: np.ndarray, position: Any, query_position: Any, rules: LogitModifiers | None) -> np.ndarray:
    """Weights of scores (N, T, S) of T queries and S keys at these positions."""
    behind = position[None, :] - query_position[:, None]
    sees = behind <= 0
    if rules is not None:
        if rules.softcap is not None:
            scores = rules.softcap * np.tanh(scores / rules.softcap)
        if rules.slopes is not None:
            scores = scores + _wide(rules.slopes)[:, None, None] * behind
        if rules.window is not None:
            sees = sees & (behind > -rules.window)
    scores = np.where(sees, scores, -np.inf)
    top, more = scores.max(axis=-1, keepdims=True), 0.0
    if rules is not None and rules.sinks is not None:
        sinks = _wide(rules.sinks)[:, None, None]
        top = np.maximum(top, sinks)
        more = np.exp(sinks - top)
    weights = np.exp(scores - top)
    return weights / (weights.sum(axis=-1, keepdims=True) + more)


def _scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """(N, T, S) of queries (T, N, H) and keys (S, K, H)."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    return q.transpose(1, 0, 2) @ k.transpose(1, 2, 0)


def _mix(weights: np.ndarray, v: np.ndarray) -> np.ndarray:
    """(T, N, H) of weights (N, T, S) and values (S, K, H)."""
    v = np.repeat(v, weights.shape[0] // v.shape[1], axis=1)
    return (weights @ v.transpose(1, 0, 2)).transpose(1, 0, 2)


def expected_decode(
    op: str,
    *arguments: Any,
    block_size: int,
    rows: tuple[Any, Any] | None = None,
    slot_ranges: Any = None,
    angles: Any = None,
    key_norm: KeyNorm | None = None,
    rules: LogitModifiers | None = None,
) -> np.ndarray:
    """Return what the op `op` of `apt_jax.lab.reference` returns for these arguments."""
    q, *rest = (_wide(a) for a in arguments)
    absorbed = rest.pop(0) if op == "decode_v_absorbed" else None
    pool, tables, lens, *weights = rest
    angles, slot_ranges = _wide(angles), _wide(slot_ranges)
    if op == "decode_v_absorbed":
        angles = weights.pop()
    tables = tables.reshape(len(lens), -1, tables.shape[-1])
    width = pool.shape[2]
    if op != "decode_kv":
        width = weights[0].shape[2] if weights else q.shape[2]
    out = np.zeros((*q.shape[:2], width if op in ("decode_absorbed", "decode_v_absorbed") else q.shape[2]))
    first, last = (0, len(lens)) if rows is None else (int(a) for a in rows)
    for r in range(first, last):
        if not lens[r]:
            continue
        ranges = None if slot_ranges is None else slot_ranges[r]
        x, position = _own(pool, tables[r, 0], ranges, lens[r], block_size, width)
        query, scale, more = q[r : r + 1], 1.0, 0.0
        if op == "decode_absorbed":
            k = v = x[:, None]
        elif op == "decode_v_absorbed":
            assert angles is not None
            k, v = _keys(x, weights[0], weights[1], key_norm, angles[position]), x[:, None]
            more = 0.0 if absorbed is None else _scores(absorbed[r : r + 1], v)
        else:
            scale = q.shape[2] ** -0.5
            if op == "decode_kv":
                values = _own(pool, tables[r, 1], ranges, lens[r], block_size, width)[0]
                k, v = (a.reshape(len(position), -1, q.shape[2]) for a in (x, values))
            else:
                k = _keys(x, weights[0], weights[1], key_norm, None if angles is None else angles[position])
                v = _project(x, weights[2], weights[3])
        shares = _softmax(_scores(query, k) * scale + more, position, np.array([lens[r] - 1]), rules)
        out[r] = _mix(shares, v)[0]
    return out


def expected_prefill(arguments: Sequence[Any], named: dict[str, Any]) -> np.ndarray:
    """Return what `reference.prefill` returns for these arguments."""
    q, k, v, pool, tables, offsets, chunks, prefixes, hidden, num_rows, *weights = (_wide(a) for a in arguments)
    ranges, angles = _wide(named.get("slot_ranges")), _wide(named.get("angles"))
    block_size = named["block_size"]
    out = np.zeros(q.shape)
    for r in range(int(num_rows)):
        n, m = int(chunks[r]), int(prefixes[r])
        chunk = slice(int(offsets[r]), int(offsets[r]) + n)
        if not n:
            continue
        own = None if ranges is None else ranges[r]
        if named["with_hidden"] and hidden[r]:
            wk, bk, wv, bv = weights
            slots = named.get("hidden_block_size") or block_size
            x, _ = _own(pool, tables[r, 0], own, m, slots, wk.shape[2])
            keys = _keys(x, wk, bk, named.get("key_norm"), None if angles is None else angles[:m])
            values = _project(x, wv, bv)
        else:
            keys, values = (
                _own(pool, half, own, m, block_size, k[0].size)[0].reshape(m, *k.shape[1:]) for half in tables[r]
            )
        keys, values = np.concatenate([keys, k[chunk]]), np.concatenate([values, v[chunk]])
        scores = _scores(q[chunk], keys) * q.shape[2] ** -0.5
        out[chunk] = _mix(_softmax(scores, np.arange(m + n), m + np.arange(n), named.get("rules")), values)
    return out


def reference_prefill(arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """`reference.prefill`, compiled for these rows: op by op, JAX compiles each for the lengths of each row."""
    arrays, rows, weights = arguments[:5], [np.asarray(a) for a in arguments[5:10]], arguments[10:]
    return jax.jit(lambda arrays, weights: flat(reference.prefill)(*arrays, *rows, *weights, **named))(arrays, weights)
