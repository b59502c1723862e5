"""The reference of prefill attention as one compiled program: op by op, JAX compiles each for the lengths of each row."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apt_jax.ops import reference


def reference_prefill(arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """`reference.prefill`, compiled for these rows."""
    arrays, rows, weights = arguments[:5], [np.asarray(a) for a in arguments[5:10]], arguments[10:]
    return jax.jit(lambda arrays, weights: reference.prefill(*arrays, *rows, *weights, **named))(arrays, weights)


def expected_prefill(arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """`reference.prefill` in float32, row by row, so that rows without a prefix are plain causal attention."""
    offsets, chunks, prefixes, hidden, num_rows = (np.asarray(a) for a in arguments[5:10])
    ranges = named.get("slot_ranges")

    def whole(q: Any, k: Any, v: Any, pool: Any, tables: Any, *w: Any) -> Any:
        q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
        out = jnp.zeros_like(q)
        for r in range(int(num_rows)):
            chunk = slice(int(offsets[r]), int(offsets[r] + chunks[r]))
            if not chunks[r]:
                continue
            if not prefixes[r]:
                out = out.at[chunk].set(reference.causal_attention(q[chunk], k[chunk], v[chunk]))
                continue
            one = slice(r, r + 1)
            row = (tables[one], offsets[one], chunks[one], prefixes[one], hidden[one], np.asarray(1, np.int32))
            row_ranges = None if ranges is None else ranges[one]
            out += reference.prefill(q, k, v, pool, *row, *w, **{**named, "slot_ranges": row_ranges})
        return out

    return jax.jit(whole)(*arguments[:5], *arguments[10:])
