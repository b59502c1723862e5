"""Registry of kernel backends: which implementation of the ops (`ops.backend.KernelBackend`) runs on which platform.

name              platforms    status        implementation
cpu               CPU          default       C++ (`cpu/`), compiled at first use; `xla` where there is no compiler
xla               all          fallback      plain XLA (`ops/xla_decode.py`, `ops/xla_prefill.py`); portable
triton            NVIDIA GPU   default       Pallas kernels on the Triton backend (`pallas/triton_*.py`)
triton-interpret  all          tests only    the same kernels in Pallas' interpreter, slow
tpu               TPU          default       `xla` with two decode ops as Pallas kernels (`pallas/tpu_decode.py`)
tpu-interpret     all          tests only    the same kernels in Pallas' interpreter

`apt_jax.lab.kernels` has two more for NVIDIA GPUs, `triton-onepass` and `jax-triton`, loaded only if selected by name.

The selection is logged; selecting an unknown or unavailable backend by name is an error.
"""

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from apt_jax.cpu import build
from apt_jax.cpu.build import KernelBuildError
from apt_jax.ops import xla_decode, xla_prefill
from apt_jax.ops.backend import EXTRAS, RULES, KernelBackend
from apt_jax.ops.calls import DecodeCall, PrefillCall
from apt_jax.ops.lowered_once import lowered_once

logger = logging.getLogger(__name__)

JAX_WITH_TRITON = "<0.13"
"""Versions of JAX known to have Pallas' Triton backend, which is deprecated; the CUDA extras of the package require
them."""


TRITON_CALL = "__gpu$xla.gpu.triton"
"""Name of the custom call that Pallas' Triton backend lowers a kernel to."""


class _MissingBackendError(Exception):
    """This version of JAX lacks the language in which the kernels are written."""


def _xla(chip: str | None) -> KernelBackend:
    del chip
    return KernelBackend(
        name="xla",
        decode_kv=xla_decode.decode_kv,
        decode_absorbed=xla_decode.decode_absorbed,
        decode_reprojected=xla_decode.decode_reprojected,
        decode_v_absorbed=xla_decode.decode_v_absorbed,
        prefill=xla_prefill.prefill,
        rows_per_tile=xla_decode.ROWS_PER_TILE,
        extras=EXTRAS,
        branches=True,
    )


def _cpu(chip: str | None) -> KernelBackend:
    from apt_jax.cpu import ops

    build.load()
    return dataclasses.replace(
        _xla(chip),
        name="cpu",
        decode_kv=ops.decode_kv,
        dense=ops.dense,
        dense_argmax=ops.dense_argmax,
        add_low_rank=ops.add_low_rank,
        head_products=ops.head_products,
        decode_absorbed=ops.decode_absorbed,
        prefill=ops.prefill,
        add_norm=ops.add_norm,
        split_qkv=ops.split_qkv,
        gated=ops.gated,
        experts=ops.experts,
        decode_layer=ops.decode_layer,
        takes_layer=ops.takes_layer,
        tiles=True,
        integer_products=not build.has_tiles(),  # tiles multiply bfloat16 faster than vectors multiply bytes
        skips_rows=True,
        rows_per_tile=1,
    )


def _has_collectives(call: DecodeCall | PrefillCall) -> bool:
    """True if a call makes its devices exchange layer inputs or scores."""
    reads = call if isinstance(call, DecodeCall) else call.hidden_prefixes
    return reads is not None and reads.tensor is not None


def triton(chip: str | None, interpret: bool = False) -> KernelBackend:
    # Imported only when needed: Pallas' Triton backend takes a second to import.
    try:
        from apt_jax.pallas import (
            triton_decode_absorbed,
            triton_decode_kv,
            triton_decode_reprojected,
            triton_decode_shards,
            triton_decode_v_absorbed,
            triton_prefill,
        )
    except ImportError as error:
        raise _MissingBackendError(
            f"JAX {jax.__version__} lacks Pallas' Triton backend ({error}); install 'jax{JAX_WITH_TRITON}'"
        ) from None

    def bound(op: Callable[..., Any], *static: str) -> Callable[..., Any]:
        """Return the op for this chip. Equal calls share one tracing and lowering (0.1 s per kernel in Pallas) across
        layers and programs, except in interpret mode and for calls with collectives."""
        made = functools.partial(op, interpret=interpret, chip=chip)
        in_program = jax.jit(made, static_argnames=static)
        if interpret:
            return in_program
        once = lowered_once(made, static_argnames=static, platform="cuda", custom_calls=[TRITON_CALL])

        def call(*args: Any, **kwargs: Any) -> Any:
            return (in_program if _has_collectives(args[-1]) else once)(*args, **kwargs)

        return call

    absorbed = bound(triton_decode_absorbed.decode_absorbed, "out_dtype")
    absorbed_shards = bound(triton_decode_shards.decode_absorbed, "out_dtype")
    v_absorbed = bound(triton_decode_v_absorbed.decode_v_absorbed, "out_dtype")

    # With N heads, results are N times as wide as a layer input, so their memory traffic matters.
    def decode_absorbed(q_absorbed: Array, call: DecodeCall) -> Array:
        op = absorbed if call.tensor is None else absorbed_shards
        return op(q_absorbed, call, out_dtype=q_absorbed.dtype)

    def decode_v_absorbed(q_rotary: Array, q_absorbed: Array | None, call: DecodeCall) -> Array:
        return v_absorbed(q_rotary, q_absorbed, call, out_dtype=q_rotary.dtype)

    return KernelBackend(
        name="triton-interpret" if interpret else "triton",
        decode_kv=bound(triton_decode_kv.decode_kv),
        decode_absorbed=decode_absorbed,
        decode_reprojected=bound(triton_decode_reprojected.decode_reprojected),
        decode_v_absorbed=decode_v_absorbed,
        prefill=bound(triton_prefill.prefill),
        rows_per_tile=1,
        extras={
            "decode_kv": RULES,
            "decode_absorbed": RULES | {"input width", "adapters"},  # adapters are part of the queries
            "decode_reprojected": RULES | {"key norm", "input width"},
            "decode_v_absorbed": RULES | {"key norm", "grouped absorption", "input width"},
            "prefill": RULES,
            "prefill_hidden": RULES | {"key norm", "input width"},
        },
        takes_shards=frozenset({"decode_absorbed", "prefill"}),
        branches=False,
    )


def _tpu(chip: str | None, interpret: bool = False) -> KernelBackend:
    from apt_jax.pallas import tpu_decode

    common: dict[str, Any] = {"interpret": interpret, "cores": 2 if chip == "v5p" else 1}

    takes = functools.partial(tpu_decode.takes, interpret=interpret)

    # Calls that the kernels do not support run in XLA.
    def decode_kv(q: Array, call: DecodeCall) -> Array:
        if not takes(call.pool, call.tables, call.width):
            return xla_decode.decode_kv(q, call)
        return tpu_decode.decode_kv(q, call, **common)

    def decode_absorbed(q: Array, call: DecodeCall) -> Array:
        if not takes(call.pool, call.tables, q.shape[2]):
            return xla_decode.decode_absorbed(q, call)
        return tpu_decode.decode_absorbed(q, call, **common, out_dtype=q.dtype)

    return dataclasses.replace(
        _xla(chip),
        name="tpu-interpret" if interpret else "tpu",
        decode_kv=decode_kv,
        decode_absorbed=decode_absorbed,
        rows_per_tile=1,
    )


def with_sharded_hidden(ops: KernelBackend) -> KernelBackend:
    """Return the ops for layer inputs that are sharded over devices by feature. Ops that read layer inputs but do not
    support such shards (`KernelBackend.takes_shards`) are replaced by XLA's; ops on keys and values are unchanged."""

    def prefill(q: Array, k: Array, v: Array, call: PrefillCall) -> Array:
        op = ops.prefill if call.hidden_prefixes is None else xla_prefill.prefill
        return op(q, k, v, call)

    plain: dict[str, Callable[..., Any]] = {
        "decode_absorbed": xla_decode.decode_absorbed,
        "decode_reprojected": xla_decode.decode_reprojected,
        "decode_v_absorbed": xla_decode.decode_v_absorbed,
        "prefill": prefill,
    }
    return dataclasses.replace(ops, **{name: op for name, op in plain.items() if name not in ops.takes_shards})


_IMPLEMENTATIONS: dict[str, Callable[[str | None], KernelBackend]] = {
    "cpu": _cpu,
    "xla": _xla,
    "triton": triton,
    "triton-interpret": functools.partial(triton, interpret=True),
    "tpu": _tpu,
    "tpu-interpret": functools.partial(_tpu, interpret=True),
}

_LABORATORY = ("triton-onepass", "jax-triton")
"""Implementations of `apt_jax.lab.kernels`, for comparison."""

_GPU = ("gpu", "cuda")
_PLATFORMS = {"cpu": ("cpu",), "tpu": ("tpu",)} | dict.fromkeys(("triton", *_LABORATORY), _GPU)
"""JAX platforms that an implementation runs on; implementations not listed run on all platforms."""
_DEVICES = {"cpu": "CPUs", "tpu": "TPUs"} | dict.fromkeys(("triton", *_LABORATORY), "NVIDIA GPUs")

_PLATFORM_DEFAULT = {"cpu": "cpu", "gpu": "triton", "cuda": "triton", "tpu": "tpu"}


def known_attention_ops() -> list[str]:
    """Return the names that `attention_ops` accepts, sorted."""
    return sorted((*_IMPLEMENTATIONS, *_LABORATORY))


def check_platform(name: str, platform: str) -> None:
    """Raise ValueError if a known implementation does not run on a JAX platform."""
    if platform not in _PLATFORMS.get(name, (platform,)):
        others = ", ".join(n for n in known_attention_ops() if platform in _PLATFORMS.get(n, (platform,)))
        raise ValueError(
            f"attention implementation {name!r} runs on {_DEVICES[name]}, not on platform {platform!r}; use one of {others}"
        )


def _maker(name: str) -> Callable[[str | None], KernelBackend]:
    """Return the function that creates a known implementation."""
    if name in _LABORATORY:
        return importlib.import_module("apt_jax.lab.kernels").BACKENDS[name]
    return _IMPLEMENTATIONS[name]


@functools.cache
def attention_ops(platform: str, name: str | None = None, chip: str | None = None) -> KernelBackend:
    """Return the implementation called `name`, or the default for a JAX platform. If the default cannot be used on this
    machine, log a warning and return `xla`.

    Args:
        chip: chip that kernels are tiled for, one of `triton_tiles.CHIPS` or a TPU generation of
            `executor.attention_choice.CHECKED_TPUS`; None: tiles that every chip supports.

    Raises:
        ValueError: the implementation is unknown or not available on this machine, or the platform has no default.
    """
    chosen = name or _PLATFORM_DEFAULT.get(platform)
    if chosen not in known_attention_ops():
        raise ValueError(
            f"no attention implementation {chosen!r} for platform {platform!r}; known: {known_attention_ops()}"
        )
    check_platform(chosen, platform)
    try:
        ops = _maker(chosen)(chip)
    except (KernelBuildError, _MissingBackendError) as error:
        if name is not None:
            raise ValueError(f"attention implementation {chosen!r} is not available: {error}") from None
        logger.warning("attention kernels: xla, several times slower than %s, because %s", chosen, error)
        return attention_ops(platform, "xla", chip)
    on = build.instructions() if chosen == "cpu" else chip or "any chip"
    logger.info("attention kernels: %s on %s (%s)", chosen, platform, on)
    return ops
