"""Absorbed decode attention for NVIDIA GPUs in plain Triton, launched by jax-triton: an example, which no backend uses
by default.

It shows how a kernel of this package can be written in Triton and called from JAX, in case Pallas' Triton backend,
which JAX has deprecated in favour of jax-triton, is removed. It covers one of the five attention ops; the backend
`jax-triton` takes the other four from Pallas, so it depends on Pallas too. docs/lab/kernels.md lists what is missing to
replace Pallas.

The kernels are in `jax_triton_kernels.py`. This module can be imported without triton; `decode_absorbed` needs it.
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
"""Compiler options that allow fused multiply-adds. This is the default of Triton up to 3.9, which warns if it is not
set."""
MAX_HEADS = 128
"""Maximum number of heads; more would not fit the registers of kernel 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tile sizes of the two kernels; chosen so that they compile for sm_80 and sm_90 without spills, not by timing."""

    tokens: int = 64
    """Number of tokens per tile of scores (T); a multiple of 16."""
    score_lanes: int = 64
    """Number of lanes that kernel 1 reads at a time."""
    score_warps: int = 4
    score_stages: int = 3
    output_lanes: int = 128
    """Number of lanes that a program of kernel 2 computes."""
    output_warps: int = 4
    output_stages: int = 3


def head_groups(num_heads: int) -> tuple[int, int]:
    """Return the sizes of the first and the second group of heads: powers of two of at least 16, or 0 for no second
    group; 40 -> (64, 0), 72 -> (64, 16).

    Raises:
        ValueError: there are more than `MAX_HEADS` heads.
    """
    if num_heads > MAX_HEADS:
        raise ValueError(f"{num_heads=} exceeds the {MAX_HEADS} heads that the Triton kernels support")

    def padded(n: int) -> int:
        return max(16, 1 << (n - 1).bit_length())

    return (padded(num_heads), 0) if num_heads <= 64 else (64, padded(num_heads - 64))


def default_tiles(num_heads: int) -> Tiles:
    """Return the default tiles; if there are two groups of heads, kernel 2 gets eight warps instead of four, because
    they need more registers."""
    return Tiles() if num_heads <= 64 else Tiles(output_warps=8)


def constants(
    num_heads: int,
    width: int,
    num_entries: int,
    block_size: int,
    ranged: bool,
    tiles: Tiles,
) -> dict[str, Any]:
    """Return the static sizes that both kernels are compiled for, except LANES; `jax_triton_kernels` explains the
    names."""
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
    """Import jax_triton, adapted to this version of JAX, and the kernels; return both modules."""
    try:
        import jax_triton  # pyright: ignore[reportMissingImports]  # optional
        from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]

        from apt_jax.lab.kernels import jax_triton_kernels as triton_kernels
    except ImportError as error:
        raise ImportError(
            f"attention by jax-triton needs the packages triton and jax-triton ({error}): pip install 'apt-jax[jax-triton]'"
        ) from error
    # jax-triton 0.4.1 registers a rule for dead code elimination that takes 2 arguments, where JAX 0.12 passes 3.
    # Without the rule JAX assumes that all inputs are used, which is also what the rule returns.
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
    """Return absorbed decode attention in float32; see `reference.decode_absorbed`.

    Products take the pool's dtype (float32, bfloat16 or float16) and accumulate in float32; weights are rounded to the
    pool's dtype.

    Args:
        q_absorbed: queries.
        call: pool, tables and lengths.
        tiles: tile sizes; None: `default_tiles`.
        compute_capability: compute capability of the GPU to compile for, such as 80; None: that of the GPU in use.

    Raises:
        ImportError: triton or jax-triton is missing.
        ValueError: there are more than 128 heads, or the call has logit modifiers.
    """
    jax_triton, kernels = _import_jax_triton()
    if call.rules is not None:
        raise ValueError("the Triton kernels do not support logit modifiers")
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
