"""The absorbed pair of Triton kernels: run by Triton's interpreter, compiled for A100 and H100, lowered by jax-triton.

None of it needs a GPU. Run as a program, this file computes the interpreter's cases and prints their errors as JSON:
the interpreter has to be chosen before Triton's decorators run.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct

from apt_jax.lab import reference
from apt_jax.lab.kernels import jax_triton_absorbed
from benchmarks.gpu.shapes import PUBLISHED, SMALL
from tests.support.op_calls import flat

BLOCK = 16
TOLERANCE = {"float32": 1e-5, "float16": 2e-3}
"""Relative to the largest output. bfloat16 is left out: the interpreter multiplies its bit patterns as integers."""
LENGTHS = (0, 1, 17, 32, 70)
CASES = [
    (name, dtype, ranged)
    for name in ("one-head", "three-heads", "width-80", "twelve-heads", "seventy-two-heads")
    for dtype in TOLERANCE
    for ranged in (False, True)
]
COMPILED = ("opt-13b", "opt-30b", "opt-66b")


def _installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


needs_triton = pytest.mark.skipif(not _installed("triton"), reason="triton is not installed")
needs_jax_triton = pytest.mark.skipif(
    not _installed("triton", "jax_triton") or not (_installed("jax_cuda12_plugin") or _installed("jax_cuda13_plugin")),
    reason="triton, jax-triton or JAX's CUDA plugin, which launches kernels, is not installed",
)


# ---- interpreter, in a process of its own


class NumpyTensor:
    """A NumPy array with the methods that Triton's interpreter calls on its arguments; results are written in place."""

    NAMES = {"float32": "fp32", "float16": "fp16", "int32": "i32"}  # noqa: RUF012

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)
        self.dtype = self.NAMES[self.array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "NumpyTensor":
        return self

    cpu = untyped_storage

    def new_empty(self, *args: Any, **kwargs: Any) -> "NumpyTensor":
        return self

    set_ = copy_ = new_empty

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)


class InterpretedCalls:
    """Stands for the module jax_triton: runs kernels at once, on copies of the arguments."""

    @staticmethod
    def triton_call(
        *args, kernel, out_type, grid, name, num_warps, num_stages, compute_capability, backend_options, **constants
    ):
        del name, num_warps, num_stages, compute_capability, backend_options
        leaves, tree = jax.tree.flatten(out_type)
        # NaN shows who reads what no program has written.
        outs = [NumpyTensor(np.full(leaf.shape, np.nan, leaf.dtype)) for leaf in leaves]
        kernel[grid](*(NumpyTensor(np.array(a)) for a in args), *outs, **constants)
        return tree.unflatten([jnp.asarray(out.array) for out in outs])


def _poisoned_case(rng, lanes: int, dtype: str, ranged: bool):
    """A pool that is NaN wherever no row owns the slot, random block tables, lengths and (if `ranged`) slot ranges."""
    lens = np.array(LENGTHS, np.int32)
    entries = -(-int(lens.max()) // BLOCK)
    num_blocks = 1 + len(lens) * entries
    pool = np.full((num_blocks, BLOCK, lanes), np.nan, np.float32)
    tables = np.zeros((len(lens), entries), np.int32)
    free = iter(1 + rng.permutation(num_blocks - 1))
    ranges = np.zeros((len(lens), entries, 2), np.int32)
    for b, length in enumerate(lens):
        for e in range(-(-int(length) // BLOCK)):
            count = min(BLOCK, int(length) - e * BLOCK)
            if not ranged:
                first, last = 0, count
            elif rng.integers(2):
                first = int(rng.integers(BLOCK - count + 1))
                last = first + count
            else:
                first = int(rng.integers(count, BLOCK + 1))
                last = first - count
            ranges[b, e] = first, last
            tables[b, e] = next(free)
            own = slice(min(first, last), max(first, last))
            pool[tables[b, e], own] = rng.standard_normal((count, lanes))
    flat = jnp.asarray(pool).astype(dtype)
    return flat, jnp.asarray(tables), jnp.asarray(lens), jnp.asarray(ranges) if ranged else None


def _interpreted_error(name: str, dtype: str, ranged: bool, rows: tuple[int, int] | None) -> float:
    """Largest difference from the reference, relative to the largest output; NaN where rows without tokens are not
    0."""
    shape = SMALL[name]
    rng = np.random.default_rng(len(name) + ranged)
    pool, tables, lens, ranges = _poisoned_case(rng, shape.hidden_size, dtype, ranged)
    q = rng.standard_normal((len(LENGTHS), shape.num_heads, shape.hidden_size)) * 0.2
    more = {
        "block_size": BLOCK,
        "slot_ranges": ranges,
        "rows": rows and (jnp.int32(rows[0]), jnp.int32(rows[1])),
    }
    args = (jnp.asarray(q, jnp.float32).astype(dtype), pool, tables, lens)
    expected = np.asarray(flat(reference.decode_absorbed)(*args, **more), np.float64)
    tiles = jax_triton_absorbed.Tiles(tokens=32, score_lanes=64, output_lanes=128)
    actual = np.asarray(flat(jax_triton_absorbed.decode_absorbed)(*args, **more, tiles=tiles), np.float64)
    if actual[0].any():
        return float("nan")
    return float(np.abs(actual - expected).max() / max(1.0, np.abs(expected).max()))


def _print_interpreted_errors() -> None:
    from apt_jax.lab.kernels import jax_triton_kernels as triton_kernels

    jax_triton_absorbed._import_jax_triton = lambda: (InterpretedCalls, triton_kernels)
    errors = {_key(*case): _interpreted_error(*case, None) for case in CASES}
    errors["rows"] = _interpreted_error("three-heads", "float32", False, (2, 4))
    print(json.dumps(errors))


def _key(name: str, dtype: str, ranged: bool) -> str:
    return f"{name} {dtype} {ranged}"


@pytest.fixture(scope="module")
def interpreted_errors() -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(pathlib.Path(__file__).parents[3]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_triton
@pytest.mark.parametrize(("name", "dtype", "ranged"), CASES)
def test_interpreted_kernels_match_the_reference(
    name: str, dtype: str, ranged: bool, interpreted_errors: dict[str, float]
) -> None:
    assert interpreted_errors[_key(name, dtype, ranged)] <= TOLERANCE[dtype]


@needs_triton
def test_rows_outside_the_range_give_zeros(interpreted_errors: dict[str, float]) -> None:
    assert interpreted_errors["rows"] <= TOLERANCE["float32"]


# ---- compiled


def _compile(kernel, types: dict[str, str], constants: dict[str, Any], chip: int, options) -> dict[str, int]:
    """Machine code for a chip: its registers, and how many instructions of some kinds it has."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        # JAX's arrays are aligned; unless told so, Triton does not make 16-byte loads.
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options={"enable_fp_fusion": True, **options})
    tools = pathlib.Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def run(tool: str, flag: str) -> str:
            command = [str(tools / tool), flag, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage, code = run("cuobjdump", "-res-usage"), run("nvdisasm", "-c")
    registers, stack = (re.search(rf"{n}:(\d+)", usage) for n in ("REG", "STACK"))
    assert registers is not None
    assert stack is not None
    return {
        "registers": int(registers[1]),
        "stack": int(stack[1]),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "tensor_core": len(re.findall(r"\bHG?MMA", code)),
        "async_copies": len(re.findall(r"\bLDGSTS", code)),
        "shared_bytes": compiled.metadata.shared,
    }


@needs_triton
@pytest.mark.parametrize("chip", [80, 90])
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_without_spills(name: str, chip: int) -> None:
    from apt_jax.lab.kernels import jax_triton_kernels as triton_kernels

    shape, floats = PUBLISHED[name], "*fp32"
    tiles = jax_triton_absorbed.default_tiles(shape.num_heads)
    inputs = {"pool": "*bf16", "tables": "*i32", "lens": "*i32", "ranges": "*i32"}
    scores = {**inputs, "q": "*bf16", "p_out": "*bf16", "m_out": floats, "l_out": floats}
    output = {**inputs, "p_in": "*bf16", "m_in": floats, "l_in": floats, "out": floats}
    for ranged in (False, True):
        constants = jax_triton_absorbed.constants(shape.num_heads, shape.hidden_size, 128, BLOCK, ranged, tiles)
        for kernel, types, lanes, options in (
            (
                triton_kernels.absorbed_scores,
                scores,
                tiles.score_lanes,
                {"num_warps": tiles.score_warps, "num_stages": tiles.score_stages},
            ),
            (
                triton_kernels.absorbed_output,
                output,
                tiles.output_lanes,
                {"num_warps": tiles.output_warps, "num_stages": tiles.output_stages},
            ),
        ):
            numbers = _compile(kernel, types, {**constants, "LANES": lanes}, chip, options)
            label = f"{name} sm_{chip} {kernel.__name__}{' ranged' if ranged else ''}"
            print(label, numbers)
            assert numbers["stack"] == 0, (label, numbers)
            assert numbers["spills"] == 0, (label, numbers)
            assert numbers["tensor_core"] > 0, (label, numbers)
            assert numbers["async_copies"] > 0, (label, numbers)
            assert numbers["shared_bytes"] <= 80 << 10, (label, "two programs must fit an A100's")


@needs_jax_triton
@pytest.mark.parametrize("ranged", [False, True], ids=["whole-blocks", "slot-ranges"])
def test_jax_triton_lowers_both_kernels_for_cuda(ranged: bool) -> None:
    shape, batch, entries = PUBLISHED["opt-13b"], 4, 8

    def decode(q, pool, tables, lens, ranges, rows):
        return flat(jax_triton_absorbed.decode_absorbed)(
            q,
            pool,
            tables,
            lens,
            block_size=BLOCK,
            rows=rows,
            slot_ranges=ranges if ranged else None,
            compute_capability=80,
        )

    count = ShapeDtypeStruct((), jnp.int32)
    lowered = (
        jax.jit(decode)
        .trace(
            ShapeDtypeStruct((batch, shape.num_heads, shape.hidden_size), jnp.bfloat16),
            ShapeDtypeStruct((64, BLOCK, shape.lane), jnp.bfloat16),
            ShapeDtypeStruct((batch, entries), jnp.int32),
            ShapeDtypeStruct((batch,), jnp.int32),
            ShapeDtypeStruct((batch, entries, 2), jnp.int32),
            (count, count),
        )
        .lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("triton_kernel_call_ffi") == 2


# ---- without the optional packages


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jax_triton", "triton"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"apt-jax\[jax-triton\]"):
        flat(jax_triton_absorbed.decode_absorbed)(
            jnp.zeros((1, 1, 16)),
            jnp.zeros((2, BLOCK, 16)),
            jnp.zeros((1, 1), jnp.int32),
            jnp.zeros(1, jnp.int32),
            block_size=BLOCK,
        )


def test_heads_are_padded_in_one_or_two_groups() -> None:
    groups = {n: jax_triton_absorbed.head_groups(n) for n in (1, 12, 17, 40, 64, 72, 128)}
    assert groups == {1: (16, 0), 12: (16, 0), 17: (32, 0), 40: (64, 0), 64: (64, 0), 72: (64, 16), 128: (64, 64)}
    with pytest.raises(ValueError, match="exceeds the 128 heads"):
        jax_triton_absorbed.head_groups(129)


if __name__ == "__main__":
    _print_interpreted_errors()
