"""Whole jitted programs compiled by XLA for TPUs that are not there, and what their code says: copies, traffic, memory.

libtpu holds the compiler, and compiles for a described topology without a TPU. It also knows the memory of the chip: a
program that does not fit is a compile error.

Traffic is counted in the optimized program, whose arrays carry their memory space: what lies in VMEM costs nothing. It
is exact for what is copied or streamed whole. A Pallas kernel is opaque and left out. The body of a loop counts once, as
nobody knows how often it runs.
"""

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from apt_jax.models.sharding import AXIS
from benchmarks.gpu.device_free import computations, pool_copies, reached

MAX_TRAFFIC_RATIO = 1.3
"""A decode step may move so many times the bytes that it must."""
MAX_TEMPORARY_SHARE = 0.05
"""Temporaries of a step may take this much of the pool's size."""

_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1, "s16": 2, "u16": 2}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "call", "after-all",
    "copy-done", "slice-done", "async-done", "async-update", "partition-id", "opt-barrier", "iota",
}  # fmt: skip
"""Operations that move nothing themselves: what they stand for is counted where it starts, or where it is computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A TPU generation by the name of a topology with four of them."""

    name: str
    topology: str
    memory_bytes: int
    """HBM, from the datasheet; the compiler keeps some of it for itself."""
    cores: int = 1
    """Cores that are one device together."""


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(name="v5e", topology="v5e:2x2", memory_bytes=16 << 30),
        Chip(name="v5p", topology="v5p:2x2x1", memory_bytes=95 << 30, cores=2),
        Chip(name="v6e", topology="v6e:2x2", memory_bytes=32 << 30),
    )
}
"""By name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuReport:
    """Memory, traffic and operations of a compiled program, on one device."""

    pool_bytes: int
    pool_copies: int
    """Operations that make a new array as large as a layer's pool."""
    aliased_bytes: int
    """Outputs that take the place of a donated argument."""
    temporary_bytes: int
    total_bytes: int
    """Arguments, results and temporaries."""
    moved_bytes: int
    """HBM traffic, kernels not included; the body of a loop once."""
    kernels: int
    """Pallas kernels."""
    loops: int
    collectives: str
    """Their kinds and numbers."""


def make_mesh(chip: Chip, num_devices: int) -> Mesh:
    """Return a mesh over the first devices of a topology that is described but not present."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)
    return Mesh(np.array(topology.devices[:num_devices]), (AXIS,))


def compile_program(lower: Callable[[], Any], *, pool_elements: int, pool_bytes: int) -> TpuReport:
    """Compile a program.

    Args:
        lower: gives it as JAX hands it to the compiler, for devices of a mesh of `make_mesh`.
        pool_elements: number of elements of one layer's pool on one device.
        pool_bytes: of all pools that the program is given, on one device.
    """
    compiled = lower().compile()
    memory: Any = compiled.memory_analysis()
    hlo = str(compiled.as_text())
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return TpuReport(
        pool_bytes=pool_bytes,
        pool_copies=pool_copies(hlo, pool_elements),
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        total_bytes=held - memory.alias_size_in_bytes,
        **read_program(hlo),
    )


def compile_kernel(function: Any, arguments: tuple[Any, ...], chip: Chip) -> int:
    """Compile a function for one TPU.

    Returns:
        Bytes of temporaries.
    """
    mesh = make_mesh(chip, 1)
    alike = NamedSharding(mesh, PartitionSpec())
    there = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=alike) for a in arguments]
    compiled = jax.jit(function).lower(*there).compile()
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes


def read_program(hlo: str) -> dict[str, Any]:
    """The fields of `TpuReport` that the text of an optimized program has."""
    bodies = computations(hlo)
    moved = kernels = loops = 0
    collectives: collections.Counter[str] = collections.Counter()
    for name in reached(hlo):
        lines = bodies[name]
        spaces = {line.name: _hbm_bytes(line.result) for line in lines}
        for line in lines:
            operation = line.operation
            for kind in _COLLECTIVES:
                collectives[kind] += operation in (kind, f"{kind}-start")
            loops += operation == "while"
            if operation == "custom-call" and '"tpu_custom_call"' in line.text:
                kernels += 1
            elif operation not in _FREE:
                moved += _traffic(line, spaces, bodies)
    counted = ", ".join(f"{number} {kind}" for kind, number in collectives.items() if number)
    return {
        "moved_bytes": moved,
        "kernels": kernels,
        "loops": loops,
        "collectives": counted or "none",
    }


def _hbm_bytes(result: str) -> int:
    """Bytes of the arrays of a type that lie in HBM: those without another memory space."""
    total = 0
    for dtype, dims, layout in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?", result):
        if dtype in _BYTES and not re.search(r"S\(\d+\)", layout):
            total += _BYTES[dtype] * _elements(dims)
    return total


def _all_bytes(result: str) -> int:
    return _hbm_bytes(re.sub(r"S\(\d+\)", "", result))


def _elements(dims: str) -> int:
    size = 1
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size


def _traffic(line: Any, spaces: dict[str, int], bodies: Any) -> int:
    """Bytes that an operation reads from HBM and writes to it."""
    operation = line.operation
    if operation == "copy-start":  # (destination, source, context)
        parts = _split_tuple(line.result)
        return _hbm_bytes(parts[0]) + _hbm_bytes(parts[1])
    if operation == "slice-start":  # ((source), destination, context): of the source as much as goes to the destination
        destination = _split_tuple(line.result)[1]
        return _hbm_bytes(destination) + _all_bytes(destination)
    read = {operand: spaces.get(operand, 0) for operand in line.operands}
    written = _hbm_bytes(line.result)
    if operation in ("gather", "dynamic-slice", "slice"):
        return min(sum(read.values()), _all_bytes(line.result)) + written
    if operation in ("scatter", "dynamic-update-slice") and line.operands:
        update = line.operands[2 if operation == "scatter" else 1]
        return sum(read.values()) - read[line.operands[0]] + spaces.get(update, 0)
    called = re.search(r"calls=%?([\w.-]+)", line.text)
    if operation == "fusion" and called:
        return _fusion_traffic(line, read, written, bodies[called[1]])
    return sum(read.values()) + written


def _fusion_traffic(line: Any, read: dict[str, int], written: int, body: Any) -> int:
    """`_traffic` of a fusion. Where it picks rows of an operand, those rows count; where its result is an operand with
    some rows replaced, those."""
    parameters = {
        inner.name: int(inner.text.split("parameter(")[1].split(")")[0])
        for inner in body
        if inner.operation == "parameter"
    }
    total = written
    by_name = {inner.name: inner for inner in body}
    for name, place in parameters.items():
        operand = line.operands[place]
        users = _users(name, body)
        if users and all(
            user.operation in ("gather", "dynamic-slice") and source == user.operands[0] for user, source in users
        ):
            total += min(read[operand], sum(_all_bytes(user.result) for user, _ in users))
        elif users and all(
            user.operation in ("scatter", "dynamic-update-slice") and source == user.operands[0]
            for user, source in users
        ):
            user = users[0][0]
            update = by_name.get(user.operands[2 if user.operation == "scatter" else 1])
            # Its result is the operand: what is written is the update.
            total += (_all_bytes(update.result) if update else 0) - min(written, read[operand])
        else:
            total += read[operand]
    return max(total, 0)


def _users(name: str, body: Any) -> list[tuple[Any, str]]:
    """Operations that use an array, through bitcasts, and the name by which they do."""
    found = []
    for inner in body:
        if name in inner.operands:
            found += _users(inner.name, body) if inner.operation == "bitcast" else [(inner, name)]
    return found


def _split_tuple(result: str) -> list[str]:
    """The parts of a tuple's type."""
    parts, depth, start = [], 0, 1
    text = result.strip()
    for place, letter in enumerate(text):
        depth += letter in "([{"
        depth -= letter in ")]}"
        if (letter == "," and depth == 1) or (depth == 0 and place):
            parts.append(text[start:place])
            start = place + 1
            if depth == 0:
                break
    return parts
