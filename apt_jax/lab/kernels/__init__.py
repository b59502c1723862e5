"""Kernels for comparison: variants of the `triton` backend whose absorbed decode runs in one pass, or as plain Triton
kernels.

`apt_jax.backends` loads this module when one of `BACKENDS` is requested by name.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping

from jax import Array

from apt_jax.backends import TRITON_CALL, triton
from apt_jax.ops.backend import KernelBackend
from apt_jax.ops.calls import DecodeCall
from apt_jax.ops.lowered_once import lowered_once

logger = logging.getLogger(__name__)


def _triton_onepass(chip: str | None) -> KernelBackend:
    ops = triton(chip)
    from apt_jax.lab.kernels import cuda_decode_absorbed as cuda

    two_kernels, calls = ops.decode_absorbed, [TRITON_CALL, cuda.CALL]
    one_pass = lowered_once(cuda.decode_absorbed, static_argnames=[], platform="cuda", custom_calls=calls)

    @functools.cache
    def say(reason: str) -> None:
        logger.warning("absorbed decode uses two kernels instead of the one-pass kernel: %s", reason)

    def decode_absorbed(q_absorbed: Array, call: DecodeCall) -> Array:
        reason = "layer inputs are sharded over devices"
        if call.tensor is None:
            reason = cuda.why_not(chip, q_absorbed, call.pool)
        if call.rules is not None and call.rules.sinks is not None:
            reason = "it has no attention sinks"
        if reason is None:
            return one_pass(q_absorbed, call)
        say(reason)
        return two_kernels(q_absorbed, call)

    return dataclasses.replace(ops, name="triton-onepass", decode_absorbed=decode_absorbed)


def _jax_triton(chip: str | None) -> KernelBackend:
    ops = triton(chip)
    from apt_jax.lab.kernels import jax_triton_absorbed

    assert isinstance(ops.extras, Mapping)
    extras = {**ops.extras, "decode_absorbed": frozenset({"adapters"})}
    decode_absorbed = jax_triton_absorbed.decode_absorbed
    return dataclasses.replace(
        ops, name="jax-triton", decode_absorbed=decode_absorbed, extras=extras, takes_shards=frozenset({"prefill"})
    )


BACKENDS: dict[str, Callable[[str | None], KernelBackend]] = {
    "triton-onepass": _triton_onepass,
    "jax-triton": _jax_triton,
}
"""Functions that build the backends, keyed by backend name; their argument is the chip that the kernels are laid out
for."""
