"""Which implementation of the attention ops runs where. Selection is explicit and logged; a missing one is an error.

name            runs on             made for
cpu             CPUs                C++, compiled at first use; `xla` where there is no compiler
xla             every platform      the fallback that one asks for by name elsewhere
triton          NVIDIA GPUs         Pallas kernels on the Triton backend
triton-interpret  every platform    the same kernels in Pallas' interpreter: slow, for tests
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from jax import Array

from apt_jax.cpu import build
from apt_jax.cpu.build import KernelBuildError
from apt_jax.ops import xla_decode as xla

logger = logging.getLogger(__name__)

EXTRAS: frozenset[str] = frozenset({"softcap", "alibi", "window", "key norm", "grouped absorption", "input width"})  # fmt: skip
"""What some models ask of the ops beyond plain attention: the three of `ScoreRules`, `KeyNorm`, `decode_v_absorbed` with fewer
key heads than query heads, and layer inputs narrower or wider than the lane."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOps:
    """One implementation of the family; contracts in `reference.py`."""

    name: str
    decode_kv: Callable[..., Any]
    decode_absorbed: Callable[..., Any]
    decode_reprojected: Callable[..., Any]
    decode_v_absorbed: Callable[..., Any]
    prefill: Callable[..., Any]
    dense: Callable[..., Array] = xla.dense
    """Products of rows with weights, `xla.dense`."""
    dense_argmax: Callable[..., tuple[Array, Array]] | None = None
    """Arguments of `dense` to what `sampling.greedy` gives for their products; None where there
    is none."""
    gated: Callable[[Array, Any, str], Array] | None = None
    """The first half of a gated feed-forward in one: rows (T, I), gate and up as one matrix (2 F, I), and the name of the
    activation, to (T, F) in the dtype of the rows; None where there is none."""
    add_norm: Callable[..., tuple[Array, Array]] | None = None
    """The residual stream and what is added to it, or None, to their sum and its norm: `cpu.ops.add_norm`; None where there is
    none, like the next."""
    split_qkv: Callable[..., tuple[Array, Array, Array]] | None = None
    """One product for q, k and v to the three: `cpu.ops.split_qkv`."""
    tiles: bool = False
    """Products of bfloat16 rows want their weights as `cpu.tiles.tile_params` lays them out."""
    rows_per_tile: int
    """Decode rows that attend together, reading up to the longest of their contexts."""
    extras: frozenset[str]
    """What of `EXTRAS` the ops can do."""
    branches: bool
    """The decoder may branch around ops that have no rows. False: ops are called for every step and must cost little
    where they have none, as a branch on the device would break up a CUDA graph."""


def _xla(chip: str | None) -> AttentionOps:
    del chip
    return AttentionOps(
        name="xla",
        decode_kv=xla.decode_kv,
        decode_absorbed=xla.decode_absorbed,
        decode_reprojected=xla.decode_reprojected,
        decode_v_absorbed=xla.decode_v_absorbed,
        prefill=xla.prefill,
        rows_per_tile=xla.ROWS_PER_TILE,
        extras=EXTRAS,
        branches=True,
    )


def _cpu(chip: str | None) -> AttentionOps:
    from apt_jax.cpu import ops

    build.load()
    return dataclasses.replace(
        _xla(chip),
        name="cpu",
        decode_kv=ops.decode_kv,
        dense=ops.dense,
        dense_argmax=ops.dense_argmax,
        decode_absorbed=ops.decode_absorbed,
        prefill=ops.prefill if build.has_tiles() else xla.prefill,
        add_norm=ops.add_norm,
        split_qkv=ops.split_qkv,
        gated=ops.gated if build.has_tiles() else None,
        tiles=build.has_tiles(),
        rows_per_tile=1,
    )


def _triton(chip: str | None, interpret: bool = False) -> AttentionOps:
    # Imported when asked for: Pallas' Triton backend takes a second.
    from apt_jax.pallas import triton_decode_absorbed as triton_decode
    from apt_jax.pallas import triton_prefill

    def bound(op: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(op, interpret=interpret, chip=chip)

    def decode_absorbed(q_absorbed: Array, *args: Any, **kwargs: Any) -> Array:
        # The result is N times as wide as its input: its traffic counts.
        op = bound(triton_decode.decode_absorbed)
        return op(q_absorbed, *args, out_dtype=q_absorbed.dtype, **kwargs)

    return AttentionOps(
        name="triton-interpret" if interpret else "triton",
        decode_kv=bound(triton_decode.decode_kv),
        decode_absorbed=decode_absorbed,
        decode_reprojected=bound(triton_decode.decode_reprojected),
        decode_v_absorbed=bound(triton_decode.decode_v_absorbed),
        prefill=bound(triton_prefill.prefill),
        rows_per_tile=1,
        extras=frozenset(),
        branches=False,
    )


def _jax_triton(chip: str | None) -> AttentionOps:
    from apt_jax.pallas import jax_triton_absorbed

    return dataclasses.replace(
        _triton(chip), name="jax-triton", decode_absorbed=jax_triton_absorbed.decode_absorbed
    )


def _tpu(chip: str | None, interpret: bool = False) -> AttentionOps:
    from apt_jax.pallas import tpu_decode

    return dataclasses.replace(
        _xla(chip),
        name="tpu-interpret" if interpret else "tpu",
        decode_kv=functools.partial(tpu_decode.decode_kv, interpret=interpret),
        decode_absorbed=functools.partial(tpu_decode.decode_absorbed, interpret=interpret),
        rows_per_tile=1,
        extras=frozenset(),
    )


def over_devices(ops: AttentionOps) -> AttentionOps:
    """The ops where layer inputs are spread over devices by feature: they take `tensor` (`xla.Shards`) wherever they read some.
    Kernels know none such; rows of keys and values keep theirs."""

    def prefill(*args: Any, with_hidden: bool, **kwargs: Any) -> Array:
        op = xla.prefill if with_hidden else ops.prefill
        return op(*args, with_hidden=with_hidden, **kwargs)

    return dataclasses.replace(
        ops,
        decode_absorbed=xla.decode_absorbed,
        decode_reprojected=xla.decode_reprojected,
        decode_v_absorbed=xla.decode_v_absorbed,
        prefill=prefill,
    )


_IMPLEMENTATIONS: dict[str, Callable[[str | None], AttentionOps]] = {
    "cpu": _cpu,
    "xla": _xla,
    "triton": _triton,
    "triton-interpret": functools.partial(_triton, interpret=True),
    "jax-triton": _jax_triton,
    "tpu": _tpu,
    "tpu-interpret": functools.partial(_tpu, interpret=True),
}

_PLATFORM_DEFAULT = {"cpu": "cpu", "gpu": "triton", "cuda": "triton", "tpu": "xla"}


def known_attention_ops() -> list[str]:
    """Names that `attention_ops` takes."""
    return sorted(_IMPLEMENTATIONS)


@functools.cache
def attention_ops(platform: str, name: str | None = None, chip: str | None = None) -> AttentionOps:
    """The implementation called `name`, or the default of a JAX platform.

    Args:
        chip: what tiles are chosen for, one of `tiles.CHIPS`; None: tiles that any of them takes.

    Raises:
        ValueError: no such implementation, one that cannot be had here, or a platform that none was chosen for.
    """
    chosen = name or _PLATFORM_DEFAULT.get(platform)
    if chosen not in _IMPLEMENTATIONS:
        raise ValueError(
            f"no attention implementation {chosen!r} for platform {platform!r}; known: {known_attention_ops()}"
        )
    if chosen == "cpu" and platform != "cpu":
        raise ValueError(
            f"attention implementation 'cpu' runs on CPUs, not on platform {platform!r}"
        )
    try:
        ops = _IMPLEMENTATIONS[chosen](chip)
    except KernelBuildError as error:
        if name is not None:
            raise ValueError(f"attention implementation 'cpu' cannot be had: {error}") from None
        logger.warning("attention kernels: xla, several times slower than cpu, as %s", error)
        return attention_ops(platform, "xla", chip)
    logger.info("attention kernels: %s on %s (%s)", chosen, platform, chip or "any chip")
    return ops
