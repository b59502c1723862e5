"""Whole jitted programs compiled by XLA for GPUs that are not there: copies of the pool, temporaries, CUDA graphs.

The CUDA plugin of JAX compiles for a described GPU ("target config") without a driver. Autotuning needs a GPU and is
off, so matrix products get XLA's default tiles: their number of kernels counts, their speed does not.
"""

import contextlib
import dataclasses
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from apt_jax.models.sharding import AXIS
from benchmarks.gpu.compile_only import Chip

_TARGETS = {
    "sm_80": """
      gpu_device_info {
        cuda_compute_capability { major: 8 minor: 0 }
        core_count: 108  fpus_per_core: 64  clock_rate_ghz: 1.41
        threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
        block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
        registers_per_core_limit: 65536  registers_per_block_limit: 65536
        shared_memory_per_core: 167936  shared_memory_per_block: 49152  shared_memory_per_block_optin: 166912
        l2_cache_size: 41943040  memory_bandwidth: 2039000000000  device_memory_size: 85899345920
      }
      platform_name: "CUDA"
      runtime_version { major: 12 minor: 9 patch: 0 }
      dnn_version_info { major: 9 minor: 10 }
      device_description_str: "NVIDIA A100-SXM4-80GB"
    """,
    "sm_90": """
      gpu_device_info {
        cuda_compute_capability { major: 9 minor: 0 }
        core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
        threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
        block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
        registers_per_core_limit: 65536  registers_per_block_limit: 65536
        shared_memory_per_core: 233472  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
        l2_cache_size: 52428800  memory_bandwidth: 4800000000000  device_memory_size: 151397597184
      }
      platform_name: "CUDA"
      runtime_version { major: 12 minor: 9 patch: 0 }
      dnn_version_info { major: 9 minor: 10 }
      device_description_str: "NVIDIA H200"
    """,
    "sm_89": """
      gpu_device_info {
        cuda_compute_capability { major: 8 minor: 9 }
        core_count: 142  fpus_per_core: 128  clock_rate_ghz: 2.49
        threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 1536
        block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
        registers_per_core_limit: 65536  registers_per_block_limit: 65536
        shared_memory_per_core: 102400  shared_memory_per_block: 49152  shared_memory_per_block_optin: 101376
        l2_cache_size: 100663296  memory_bandwidth: 864000000000  device_memory_size: 51539607552
      }
      platform_name: "CUDA"
      runtime_version { major: 12 minor: 9 patch: 0 }
      dnn_version_info { major: 9 minor: 10 }
      device_description_str: "NVIDIA L40"
    """,
    "sm_120": """
      gpu_device_info {
        cuda_compute_capability { major: 12 minor: 0 }
        core_count: 188  fpus_per_core: 128  clock_rate_ghz: 2.6
        threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 1536
        block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
        registers_per_core_limit: 65536  registers_per_block_limit: 65536
        shared_memory_per_core: 102400  shared_memory_per_block: 49152  shared_memory_per_block_optin: 101376
        l2_cache_size: 134217728  memory_bandwidth: 1792000000000  device_memory_size: 103079215104
      }
      platform_name: "CUDA"
      runtime_version { major: 12 minor: 9 patch: 0 }
      dnn_version_info { major: 9 minor: 10 }
      device_description_str: "NVIDIA RTX PRO 6000"
    """,
}
"""From the datasheets and the CUDA programming guide's table of compute capabilities."""

MAX_TEMPORARY_SHARE = 0.05
"""Temporaries of a step may take this much of the pool's size."""

_PASSED_THROUGH = {
    "parameter",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "scatter",
    "dynamic-update-slice",
    "custom-call",
    "while",
    "conditional",
    "call",
    "copy-done",
}
"""Operations whose pool-sized result is the pool itself: nothing is copied, or it is written in place, or
the copy was counted where it began."""


class PluginMissing(RuntimeError):
    """JAX's CUDA plugin, which has the compiler, is not installed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """Memory use and launches of a compiled program; those of one device where there are several."""

    pool_bytes: int
    pool_copies: int
    """Operations that make a new array as large as a layer's pool."""
    aliased_bytes: int
    """Outputs that take the place of a donated argument."""
    temporary_bytes: int
    command_buffers: int
    kernels: int
    """Number of launches, inside and outside command buffers."""
    outside: int
    """Launches outside command buffers."""
    collectives: int
    input_bytes: int = 0
    """Bytes that a step sends from the host."""
    layers_share: float = 1.0
    """Share of the model's layers that were compiled: `pool_bytes` are theirs, temporaries do not grow with them."""
    lowering_s: float = 0.0
    """Seconds of tracing and lowering, on the machine that compiled."""


def make_mesh(chip: Chip, num_devices: int) -> Any:
    """Return a mesh with one axis `x` over GPUs that are described but not present.

    Raises:
        PluginMissing: the CUDA plugin is not installed.
    """
    import jax
    from jax._src import xla_bridge
    from jax.experimental import topologies

    jax.devices()  # finds the plugins
    if "cuda" not in xla_bridge._backend_factories:
        raise PluginMissing("jax-cuda12-plugin and jax-cuda12-pjrt are not installed")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_TARGETS[chip.arch], topology=f"1x1x{num_devices}"
    )
    return topologies.make_mesh(topology, (num_devices,), (AXIS,))


@contextlib.contextmanager
def pallas_for(chip: Chip) -> Iterator[None]:
    """Pallas asks JAX's default device, the CPU, for its capability: let it answer for `chip` in this context."""
    import jax
    from jax._src.pallas.triton import gpu_info

    version = gpu_info.gpu_version_from_device_kind(chip.device_kind)
    assert version is not None, chip
    jax.clear_caches()  # lowering remembers the last chip
    gpu_info.registry["cpu"] = lambda: gpu_info.get_gpu_info_from_version(version)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            yield
    finally:
        del gpu_info.registry["cpu"]
        jax.clear_caches()


def compile_program(
    lower: Callable[[], Any],
    chip: Chip,
    *,
    pool: tuple[int, int],
    num_pools: int,
    own: Mapping[str, Any] | None = None,
) -> ProgramReport:
    """Compile a program for `chip`, with the options that `lower` gave it.

    Args:
        lower: lowers a jitted function for devices of a mesh of `make_mesh`.
        pool: number of elements of one layer's pool on one device, and their size in bytes.
        own: options of this program alone (`ProgramCall.options`).
    """
    with tempfile.TemporaryDirectory() as directory, pallas_for(chip):
        options: dict[str, Any] = {
            **(own or {}),
            "xla_gpu_autotune_level": 0,
            "xla_dump_to": directory,
            "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
        }
        started = time.perf_counter()
        lowered = lower()
        lowering_s = time.perf_counter() - started
        compiled = lowered.compile(compiler_options=options)
        (thunks,) = Path(directory).glob("*thunk_sequence_after_thunk_passes.txt")
        sequence = thunks.read_text()
    memory: Any = compiled.memory_analysis()
    return ProgramReport(
        pool_bytes=pool[0] * pool[1] * num_pools,
        pool_copies=pool_copies(str(compiled.as_text()), pool[0]),
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        lowering_s=round(lowering_s, 2),
        **_launches(sequence),
    )


def _launches(sequence: str) -> dict[str, int]:
    """Counts from XLA's listing of thunks; what lies in a command buffer is indented."""
    counts = {"command_buffers": 0, "kernels": 0, "outside": 0, "collectives": 0}
    for line in sequence.splitlines():
        found = re.match(r"(\s*)\d+: k(\w+)", line)
        if not found:
            continue
        inside, kind = bool(found[1]), found[2]
        if kind == "CommandBuffer":
            counts["command_buffers"] += not inside
            continue
        counts["outside"] += not inside
        if re.search(r"All|Reduce|Collective|Send|Recv", kind):
            counts["collectives"] += not kind.endswith("Done")
        else:
            counts["kernels"] += 1
    return counts


@dataclasses.dataclass(frozen=True)
class Line:
    """One operation of an optimized program."""

    name: str
    result: str
    """Type of its result, with layouts."""
    operation: str
    operands: tuple[str, ...]
    text: str
    """All after the name."""
    is_root: bool


def computations(hlo: str) -> dict[str, list[Line]]:
    """The computations of an optimized program by name, that of the entry as `ENTRY`."""
    found: dict[str, list[Line]] = {}
    name = ""
    for line in hlo.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = "ENTRY" if header[1] else header[2]
            found[name] = []
        elif name and (parts := re.match(r"\s+(ROOT )?%?([\w.-]+) = (.+)$", line)):
            operation = _operation(parts[3])
            result, _, rest = parts[3].partition(f"{operation}(")
            operands = tuple(re.findall(r"%([\w.-]+)", rest.partition(")")[0]))
            found[name].append(Line(parts[2], result, operation, operands, parts[3], bool(parts[1])))
    return found


def reached(hlo: str) -> list[str]:
    """Names of the computations whose operations run one by one: the entry, bodies of loops and branches."""
    called = re.findall(r"while\(.*body=%?([\w.-]+)", hlo)
    called += re.findall(r"(?:true|false)_computation=%?([\w.-]+)", hlo)
    for names in re.findall(r"branch_computations=\{([^}]*)\}", hlo):
        called += re.findall(r"%?([\w.-]+)", names)
    called += re.findall(r" call\(.*to_apply=%?([\w.-]+)", hlo)
    return ["ENTRY", *dict.fromkeys(called)]


def pool_copies(hlo: str, pool_size: int) -> int:
    """Operations of an optimized program that make a new array of `pool_size` elements.

    A fusion counts unless it scatters into or updates its operand, which XLA does in place or precedes with a copy.
    Bodies of loops and branches count too.
    """
    bodies = computations(hlo)
    roots = {name: line.operation for name, lines in bodies.items() for line in lines if line.is_root}
    copies = 0
    for name in reached(hlo):
        for line in bodies[name]:
            operation = line.operation
            if pool_size not in _sizes(line.result):
                continue
            if operation == "fusion":
                called = re.search(r"calls=%?([\w.-]+)", line.text)
                operation = roots[called[1]] if called else operation
            copies += operation not in _PASSED_THROUGH
    return copies


def _operation(text: str) -> str:
    found = re.search(r"(?:^|[\s)}\]])([a-z][a-z-]*)\(", text)
    return found[1] if found else ""


def _sizes(result: str) -> list[int]:
    """Numbers of elements of the arrays of a type."""
    sizes = []
    for dims in re.findall(r"\w+\[([\d,]*)\]", result):
        size = 1
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        sizes.append(size)
    return sizes


def temporary_share(report: ProgramReport) -> float:
    """Temporaries of a step as a share of the whole model's pool."""
    return report.temporary_bytes * report.layers_share / report.pool_bytes


def failures(report: ProgramReport, num_loops: int = 0) -> list[str]:
    """Return the faults of a compiled step, one line each; empty: it passes.

    Args:
        num_loops: number of loops whose length depends on data, which a command buffer cannot hold: each is a launch
            between two of them.
    """
    wrong = []
    if report.pool_copies:
        wrong.append(f"{report.pool_copies} copies of a layer's pool (must be 0)")
    if report.aliased_bytes < report.pool_bytes:
        wrong.append(f"only {report.aliased_bytes} of the pools' {report.pool_bytes} bytes are updated in place")
    share = temporary_share(report)
    if share >= MAX_TEMPORARY_SHARE:
        wrong.append(f"temporaries take {share:.1%} of the pool (must be less than {MAX_TEMPORARY_SHARE:.0%})")
    if (report.command_buffers, report.outside) != (1 + num_loops, num_loops):
        wrong.append(
            f"{report.command_buffers} command buffers and {report.outside} launches outside them"
            f" (must be {1 + num_loops} and {num_loops})"
        )
    return wrong
