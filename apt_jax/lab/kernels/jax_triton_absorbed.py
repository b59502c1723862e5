"""Absorbed decode attention for NVIDIA GPUs in plain Triton, launched by jax-triton: an example, never the default.

An example of how a kernel of this package is written in Triton itself and called from JAX, and a hedge: JAX has
deprecated Pallas' Triton backend in favour of jax-triton. It is one of the five attention ops, and no backend's default;
the backend `jax-triton` takes the other four from Pallas, so it does not outlive that backend. docs/lab/kernels.md says what
would make it the successor.

The kernels are in `jax_triton_kernels.py`; this module imports without triton, its function does not run without.
"""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from apt_jax.ops.calls import DecodeCall

_BACKEND_OPTIONS = {"enable_fp_fusion": True}
"""Multiply-adds: what Triton does by default up to 3.9, with a warning where it is not asked for."""
MAX_HEADS = 128
"""Per row; more would not fit the registers of kernel 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tile sizes of the two kernels; found by compiling for sm_80 and sm_90 without spills, not by timing."""

    tokens: int = 64
    """T, tokens per tile of scores; a multiple of 16."""
    score_lanes: int = 64
    """Lanes that kernel 1 reads at a time,"""
    score_warps: int = 4
    score_stages: int = 3
    output_lanes: int = 128
    """lanes that a program of kernel 2 computes."""
    output_warps: int = 4
    output_stages: int = 3


def head_groups(num_heads: int) -> tuple[int, int]:
    """Heads of the first group and of the second (0: none), powers of two of at least 16: 40 -> (64, 0), 72 -> (64,
    16).

    Raises:
        ValueError: more heads than the kernels take.
    """
    if num_heads > MAX_HEADS:
        raise ValueError(f"{num_heads=} exceeds the {MAX_HEADS} heads that the Triton kernels take")

    def padded(n: int) -> int:
        return max(16, 1 << (n - 1).bit_length())

    return (padded(num_heads), 0) if num_heads <= 64 else (64, padded(num_heads - 64))


def default_tiles(num_heads: int) -> Tiles:
    """Eight warps where two groups of heads would fill the registers of four."""
    return Tiles() if num_heads <= 64 else Tiles(output_warps=8)


def constants(
    num_heads: int,
    width: int,
    num_entries: int,
    block_size: int,
    ranged: bool,
    tiles: Tiles,
) -> dict[str, Any]:
    """Static sizes that both kernels are compiled for, beside LANES (names: `jax_triton_kernels.py`)."""
    h0, h1 = head_groups(num_heads)
    return {
        "N": num_heads,
        "D": width,
        "J": num_entries,
        "C": block_size,
        "T": tiles.tokens,
        "M": -(-num_entries * block_size // tiles.tokens),
        "H0": h0,
        "H1": h1,
        "RANGED": ranged,
    }


def _import_jax_triton() -> tuple[Any, Any]:
    """jax_triton, fit for this JAX, and the kernels."""
    try:
        import jax_triton  # pyright: ignore[reportMissingImports]  # optional
        from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]

        from apt_jax.lab.kernels import jax_triton_kernels as triton_kernels
    except ImportError as error:
        raise ImportError(
            f"attention by jax-triton needs the packages triton and jax-triton ({error}): pip install 'apt-jax[jax-triton]'"
        ) from error
    # jax-triton 0.4.1 registers a rule for dead code elimination that takes 2 arguments, where JAX 0.12 passes 3. The
    # rule says what JAX assumes of primitives without one: all inputs are used.
    from jax._src.interpreters import partial_eval

    primitive = triton_lib.triton_kernel_call_p
    rule = partial_eval.dce_rules.get(primitive)
    if rule is not None and jax.__version_info__ >= (0, 12) and len(inspect.signature(rule).parameters) == 2:
        del partial_eval.dce_rules[primitive]
    return jax_triton, triton_kernels


def decode_absorbed(
    q_absorbed: Float[Array, "B N D"],
    call: DecodeCall,
    *,
    tiles: Tiles | None = None,
    compute_capability: int | None = None,
) -> Float[Array, "B N D"]:
    """See `reference.decode_absorbed`.

    Products take the pool's dtype (float32, bfloat16 or float16) and accumulate in float32; weights are rounded to the
    pool's dtype.

    Args:
        compute_capability: of the GPU that kernels are compiled for, e.g. 80; None: the one present.

    Raises:
        ImportError: triton or jax-triton is missing.
        ValueError: more than 128 heads, or score rules.
    """
    jax_triton, kernels = _import_jax_triton()
    if call.rules is not None:
        raise ValueError("the Triton kernels take plain scores")
    call = call.by_row()
    pool, tables, slot_ranges = call.pool, call.tables, call.slot_ranges
    batch, num_heads, width = q_absorbed.shape
    num_entries = tables.shape[1]
    tiles = tiles or default_tiles(num_heads)
    ranged = slot_ranges is not None
    consts = constants(num_heads, width, num_entries, call.block_size, ranged, tiles)
    index, (first, last) = jnp.arange(batch, dtype=jnp.int32), call.row_range()
    lens = jnp.where((index >= first) & (index < last), jnp.clip(call.lens, 0, call.capacity), 0)
    ranges = jnp.zeros((1,), jnp.int32) if slot_ranges is None else slot_ranges
    cells = (batch, consts["M"], num_heads)
    weights = jax.ShapeDtypeStruct((*cells, tiles.tokens), pool.dtype)
    per_tile = jax.ShapeDtypeStruct(cells, jnp.float32)
    p, m, l = jax_triton.triton_call(
        q_absorbed.astype(pool.dtype),
        pool,
        tables,
        lens,
        ranges,
        kernel=kernels.absorbed_scores,
        out_type=(weights, per_tile, per_tile),
        grid=(consts["M"], batch),
        num_warps=tiles.score_warps,
        num_stages=tiles.score_stages,
        compute_capability=compute_capability,
        backend_options=_BACKEND_OPTIONS,
        name="absorbed_scores",
        LANES=tiles.score_lanes,
        **consts,
    )
    return jax_triton.triton_call(
        p,
        m,
        l,
        pool,
        tables,
        lens,
        ranges,
        kernel=kernels.absorbed_output,
        out_type=jax.ShapeDtypeStruct(q_absorbed.shape, jnp.float32),
        grid=(-(-width // tiles.output_lanes), batch),
        num_warps=tiles.output_warps,
        num_stages=tiles.output_stages,
        compute_capability=compute_capability,
        backend_options=_BACKEND_OPTIONS,
        name="absorbed_output",
        LANES=tiles.output_lanes,
        **consts,
    )
