"""The package's CUDA kernel on a CPU: its source compiled with emulated instructions (`emulated_warp_ops.h`)."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apt_jax.cpu.compiler import find_compiler
from apt_jax.lab.kernels.cuda_decode_absorbed import SOURCES, Plan, Variant

_HERE = Path(__file__).parent
_GUARD = 64
"""Elements before and after each result, which no kernel may touch."""


def compiler() -> list[str] | None:
    """Command of a C++ compiler, or None."""
    return find_compiler()


@functools.cache
def library(variant: Variant, *edits: tuple[str, str]) -> ctypes.CDLL:
    """The kernel of a variant.

    Args:
        edits: texts of the source and what stands in their place, to see that a fault is noticed.
    """
    source = SOURCES[0].read_text()
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    command = compiler()
    assert command is not None
    macros = [f"-D{name}={value}" for name, value in variant.macros.items()]
    with tempfile.TemporaryDirectory() as directory:
        path, text = Path(directory) / "kernel.so", Path(directory) / "kernel.cc"
        text.write_text(source)
        subprocess.run(
            [
                *command, "-std=c++17", "-O2", "-Wno-unknown-pragmas", "-shared", "-fPIC", *macros,
                f"-I{_HERE}", str(text), "-o", str(path),
            ],
            check=True,
        )  # fmt: skip
        found = ctypes.CDLL(str(path))
    found.emulate.restype = ctypes.c_char_p
    return found


class EmulationError(Exception):
    """A fault that the emulator found."""


def run(
    plan: Plan,
    count: int,
    operands: list[np.ndarray],
    outs: list[Any],
    *,
    seed: int = 0,
    edits: tuple[tuple[str, str], ...] = (),
) -> list[np.ndarray]:
    """Results of the kernel; NaN where it writes nothing.

    Args:
        seed: of the order of warps, and of when copies and stores take effect.
        edits: of `library`.

    Raises:
        EmulationError: a fault that a chip would not tell of.
    """
    variant, kernel = plan.variant, library(plan.variant, *edits)
    is_half = operands[-1].dtype == np.float16
    results = [np.full(2 * _GUARD + int(np.prod(out.shape)), np.nan, out.dtype) for out in outs]
    inputs = [np.ascontiguousarray(a) for a in operands]
    pointers = [a.ctypes.data for a in inputs] + [a.ctypes.data + _GUARD * a.itemsize for a in results]
    arguments = (ctypes.c_void_p * len(pointers))(*pointers)
    error = kernel.emulate(
        ctypes.cast(kernel.decode_absorbed, ctypes.c_void_p),
        arguments,
        count * plan.groups * variant.cluster,
        variant.cluster,
        variant.threads,
        variant.shared_bytes,
        int(is_half),
        ctypes.c_uint64(seed),
    ).decode()
    if error:
        raise EmulationError(error)
    for a in results:
        if not (np.isnan(a[:_GUARD].astype(np.float32)).all() and np.isnan(a[-_GUARD:].astype(np.float32)).all()):
            raise EmulationError("a result is written to out of its bounds")
    return [a[_GUARD:-_GUARD].reshape(out.shape) for a, out in zip(results, outs, strict=True)]


def launch(plan: Plan, dtype: Any, count: int, operands: tuple[Any, ...], outs: list[Any], **more: Any) -> list[Any]:
    """Takes the place of `cuda_decode_absorbed.launch`."""
    assert operands[-1].dtype == jnp.dtype(dtype)

    def call(*arrays: Any) -> list[np.ndarray]:
        return run(plan, count, [np.asarray(a) for a in arrays], outs, **more)

    return jax.pure_callback(call, outs, *operands)
