"""GPU kernels compiled on a machine that has no GPU: what a cubin says about registers, spills, memory and its copies.

Pallas kernels on the Triton backend are lowered for CUDA on the CPU; the Triton code that lies in the lowered program
is compiled by the `triton` package, whose wheel brings ptxas and a disassembler. XLA has a Triton of its own, so on a
real machine register counts can be some 10 % off. Kernels written in Triton are compiled from their source, those that
lie in a program as PTX by the same ptxas.
"""

import contextlib
import dataclasses
import importlib
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from apt_jax.pallas.triton_tiles import chip_for

_CUSTOM_CALL = "__gpu$xla.gpu.triton"
_PTX_CALL = "__gpu$xla.gpu.ptx"
_RESERVED_SHARED_BYTES = 1024
"""Shared memory that the driver takes for itself in every CTA."""
_MAX_CTAS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Limits that occupancy depends on, from the CUDA programming guide's table of compute capabilities."""

    name: str
    device_kind: str
    """Its name in JAX, by which kernels choose their tiles."""
    capability: int
    """80 for 8.0."""
    shared_bytes_per_sm: int
    shared_bytes_per_cta: int
    warps_per_sm: int = 64

    @property
    def arch(self) -> str:
        return f"sm_{self.capability}"

    @property
    def tiles(self) -> str:
        """The class of chips whose tiles it takes."""
        return chip_for(self.capability / 10)


CHIPS = {
    chip.arch: chip
    for chip in (
        Chip(
            name="A100",
            device_kind="NVIDIA A100-SXM4-80GB",
            capability=80,
            shared_bytes_per_sm=164 << 10,
            shared_bytes_per_cta=163 << 10,
        ),
        Chip(
            name="L40",
            device_kind="NVIDIA L40",
            capability=89,
            shared_bytes_per_sm=100 << 10,
            shared_bytes_per_cta=99 << 10,
            warps_per_sm=48,
        ),
        Chip(
            name="H200",
            device_kind="NVIDIA H200",
            capability=90,
            shared_bytes_per_sm=228 << 10,
            shared_bytes_per_cta=227 << 10,
        ),
        Chip(
            name="RTX PRO 6000",
            device_kind="NVIDIA RTX PRO 6000",
            capability=120,
            shared_bytes_per_sm=100 << 10,
            shared_bytes_per_cta=99 << 10,
            warps_per_sm=48,
        ),
    )
}
"""By architecture."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCode:
    """One kernel as it is handed to the compiler."""

    name: str
    ttir: str
    num_warps: int
    num_stages: int
    grid: tuple[int, int, int]
    ptx: str = ""
    """Instead of Triton code."""
    shared_bytes: int = 0
    """With `ptx`: what it is launched with."""

    @property
    def has_products(self) -> bool:
        """Multiplies tiles, which belongs on the tensor cores."""
        return bool(re.search(r"\btt\.dot\b|\bmma\.sync\b", self.ttir + self.ptx))

    @property
    def streams_tiles(self) -> bool:
        """Multiplies tiles that a loop loads, which must be fetched ahead by asynchronous copies."""
        if self.ptx:
            return self.has_products
        depth, found, loops = 0, False, []
        loads = products = False
        for line in self.ttir.splitlines():
            stripped = line.strip()
            if re.search(r"\bscf\.(for|while)\b", stripped):
                loops.append(depth)
            if loops:
                loads |= bool(re.search(r"\btt\.load\b.*tensor<\d+x\d+x", stripped))
                products |= bool(re.search(r"\btt\.dot\b", stripped))
            depth += stripped.count("{") - stripped.count("}")
            while loops and depth <= loops[-1] and "}" in stripped:
                loops.pop()
                if not loops:
                    found |= loads and products
                    loads = products = False
        return found and self.num_stages > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Resources and instructions of a compiled kernel."""

    registers: int
    stack_bytes: int
    spill_ops: int
    """Instructions that load from or store to local memory (STL, LDL)."""
    shared_bytes: int
    ctas_per_sm: int
    """Occupancy; 0 means that the chip cannot run it."""
    hmma: int
    """Tensor core instructions of a warp."""
    hgmma: int
    """Tensor core instructions of four warps, which sm_90 has for tiles of at least 64 rows."""
    async_copies: int
    """LDGSTS, or bulk copies (UTMALDG, UBLKCP)."""


def occupancy(chip: Chip, *, registers: int, num_warps: int, shared_bytes: int) -> int:
    """Return the number of CTAs that fit one SM at a time."""
    if shared_bytes > chip.shared_bytes_per_cta:
        return 0
    registers_of_cta = -(-registers // 8) * 8 * 32 * num_warps
    return min(
        65536 // registers_of_cta,
        chip.shared_bytes_per_sm // (shared_bytes + _RESERVED_SHARED_BYTES),
        chip.warps_per_sm // num_warps,
        _MAX_CTAS,
    )


def disassemble(cubin: bytes, chip: Chip, *, num_warps: int, shared_bytes: int) -> KernelReport:
    """Read a cubin that holds one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([_tool(tool), option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )

    def count(pattern: str) -> int:
        return len(re.findall(rf"\b(?:{pattern})\b", sass))

    def resource(name: str) -> int:
        found = re.search(rf"\b{name}:(\d+)", usage)
        assert found, usage
        return int(found[1])

    registers = resource("REG")
    return KernelReport(
        registers=registers,
        stack_bytes=resource("STACK"),
        spill_ops=count("STL|LDL"),
        shared_bytes=shared_bytes,
        ctas_per_sm=occupancy(chip, registers=registers, num_warps=num_warps, shared_bytes=shared_bytes),
        hmma=count("HMMA"),
        hgmma=count("HGMMA"),
        async_copies=count("LDGSTS|UTMALDG|UBLKCP"),
    )


def _triton(module: str = "") -> Any:
    """The `triton` package or a module of it, which only the gate's environment has."""
    return importlib.import_module(f"triton{module}")


def _tool(name: str) -> Path:
    """One of the programs that the `triton` package brings."""
    return Path(_triton(".backends.nvidia").__path__[0]) / "bin" / name


def _target(chip: Chip) -> Any:
    return _triton(".backends.compiler").GPUTarget("cuda", chip.capability, 32)


@contextlib.contextmanager
def _lowering_for(chip: Chip) -> Iterator[None]:
    """Lowering in this context is told the chip by its device kind (JAX 0.11 and newer ask)."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind=chip.device_kind, num_cores=None, platform="gpu")
    # The Triton backend of Pallas announces its removal at every lowering.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
            yield


def pallas_kernels(function: Callable[..., Any], arguments: tuple[Any, ...], chip: Chip) -> list[KernelCode]:
    """The kernels of a jitted function, Triton's and those in PTX, in the order of its program.

    Args:
        arguments: of `function`, arrays as `jax.ShapeDtypeStruct`.
    """
    import jax

    with _lowering_for(chip):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    found: list[KernelCode] = []
    module: Any = lowered.compiler_ir("stablehlo")
    _walk(module.operation, found)
    return found


def _walk(operation: Any, found: list[KernelCode]) -> None:
    from jaxlib.mlir import ir

    if operation.name == "stablehlo.custom_call":
        target = ir.StringAttr(operation.attributes["call_target_name"]).value
        read = {_CUSTOM_CALL: _read_call, _PTX_CALL: _read_ptx_call}.get(target)
        if read is not None:
            found.append(read(ir.DictAttr(operation.attributes["mhlo.backend_config"])))
    for region in operation.regions:
        for block in region:
            for inner in block:
                _walk(inner.operation, found)


def _read_call(fields: Any) -> KernelCode:
    from jax._src.interpreters import mlir
    from jax._src.lib.triton import dialect
    from jaxlib.mlir import ir

    named = {fields[i].name: fields[i].attr for i in range(len(fields))}

    def number(name: str) -> int:
        return ir.IntegerAttr(named[name]).value

    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    with context:
        module = ir.Module.parse(ir.StringAttr(named["ir"]).value_bytes)
        ttir = str(module.operation.get_asm())
    return KernelCode(
        name=ir.StringAttr(named["name"]).value,
        ttir=ttir,
        num_warps=number("num_warps"),
        num_stages=number("num_stages"),
        grid=(number("grid_x"), number("grid_y"), number("grid_z")),
    )


def _read_ptx_call(fields: Any) -> KernelCode:
    from jaxlib.mlir import ir

    named = {fields[i].name: fields[i].attr for i in range(len(fields))}

    def number(name: str) -> int:
        return ir.IntegerAttr(named[name]).value

    return KernelCode(
        name=ir.StringAttr(named["name"]).value,
        ttir="",
        num_warps=number("block_x") // 32,
        num_stages=1,
        grid=(number("grid_x"), number("grid_y"), number("grid_z")),
        ptx=ir.StringAttr(named["kernel_data"]).value,
        shared_bytes=number("shared_mem_bytes"),
    )


def _options(num_warps: int, num_stages: int) -> dict[str, Any]:
    # Fused multiply-add is what XLA's own Triton takes; the package is about to change its default.
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


def _optimise(path: Path, code: KernelCode, chip: Chip) -> None:
    """Run Triton's passes over its own intermediate code, as XLA does; `triton.compile` leaves them out for a file.

    Among them is the one that turns `acc + dot(a, b)` into a product that accumulates in place.
    """
    ir, backends = _triton("._C.libtriton").ir, _triton(".backends.nvidia.compiler")
    backend = backends.CUDABackend(_target(chip))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(os.fspath(path), context)
    module.context = context
    options = backend.parse_options(_options(code.num_warps, code.num_stages))
    path.write_text(str(backend.make_ttir(module, {}, options, chip.capability)))


def compile_kernel(code: KernelCode, chip: Chip) -> KernelReport:
    """Compile a kernel that `pallas_kernels` found."""
    if code.ptx:
        return _assemble(code, chip)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.ttir"
        path.write_text(code.ttir)
        _optimise(path, code, chip)
        kernel = _triton().compile(
            os.fspath(path),
            target=_target(chip),
            options=_options(code.num_warps, code.num_stages),
        )
    return disassemble(kernel.asm["cubin"], chip, num_warps=code.num_warps, shared_bytes=kernel.metadata.shared)


def _assemble(code: KernelCode, chip: Chip) -> KernelReport:
    """Compile PTX as the driver does when it is loaded."""
    with tempfile.TemporaryDirectory() as directory:
        source, cubin = Path(directory) / "kernel.ptx", Path(directory) / "kernel.cubin"
        source.write_text(code.ptx)
        command = [_tool("ptxas"), f"-arch={chip.arch}", os.fspath(source), "-o", os.fspath(cubin)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        binary = cubin.read_bytes()
    return disassemble(binary, chip, num_warps=code.num_warps, shared_bytes=code.shared_bytes)


def compile_triton(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    chip: Chip,
    *,
    num_warps: int,
    num_stages: int,
    unaligned: tuple[str, ...] = (),
) -> tuple[KernelCode, KernelReport]:
    """Compile a `triton.jit` function.

    Args:
        types: of its arguments in Triton's spelling: `*bf16` a pointer, `i32` or `fp32` a number.
        constants: its `tl.constexpr` arguments.
        unaligned: arguments that may not be taken for multiples of 16, as all other pointers and integers are: without
            that nothing is loaded 16 bytes at a time.
    """
    names = list(function.arg_names)
    wrong = set(names) ^ (set(types) | set(constants))
    if wrong:
        raise ValueError(f"arguments without a type, or types without an argument: {sorted(wrong)}")
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in types and name not in unaligned and types[name][0] in "*i"
    }
    source = _triton(".compiler").ASTSource(
        function,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=divisible,
    )
    kernel = _triton().compile(
        source,
        target=_target(chip),
        options=_options(num_warps, num_stages),
    )
    code = KernelCode(
        name=function.__name__,
        ttir=kernel.asm["ttir"],
        num_warps=num_warps,
        num_stages=num_stages,
        grid=(1, 1, 1),
    )
    report = disassemble(kernel.asm["cubin"], chip, num_warps=num_warps, shared_bytes=kernel.metadata.shared)
    return code, report


def failures(code: KernelCode, report: KernelReport) -> list[str]:
    """Return the faults of a compiled kernel, one line each; empty: it passes."""
    wrong = []
    if report.spill_ops:
        wrong.append(f"{report.spill_ops} spill instructions (must be 0)")
    if report.stack_bytes:
        wrong.append(f"{report.stack_bytes} bytes of stack (must be 0)")
    if not report.ctas_per_sm:
        wrong.append(f"does not fit an SM: {report.registers} registers, {report.shared_bytes} bytes of shared memory")
    if code.has_products and not report.hmma + report.hgmma:
        wrong.append("multiplies tiles without tensor cores")
    if code.streams_tiles and not report.async_copies:
        wrong.append("loads tiles in a loop without asynchronous copies")
    return wrong
