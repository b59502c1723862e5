"""Stores executables of an executor's programs, so that a later start loads them without tracing and lowering again.

JAX's own cache (`apt_jax.utils.compile_cache`) finds an executable by its lowered program. The key of an entry here is
everything that a program depends on, which is known before it is traced. The entry contains the data that JAX needs to
call the program: its arguments, their shardings, which of them are donated, and the key of the executable in JAX's
cache. If no entry is found, or it cannot be loaded, the program is lowered and compiled as usual, and stored for the
next start.

Entries are pickles made with JAX's pickler, and executables are code. Both are stored in a directory that only this
user may access, and each file is checked again when it is read (`cache_dir.read_private`). An entry may name only types
and functions that describe arguments: listed names of JAX and NumPy, and this package's trees of arrays.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
from jax.stages import Compiled, Lowered

from apt_jax.cpu import build, compiler
from apt_jax.errors import one_line
from apt_jax.utils import cache_dir
from apt_jax.utils.compile_cache import CompiledPrograms, kept_programs

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[2]
_SOURCES = (".py", ".cc", ".h")
_ENVIRONMENT = ("XLA_", "JAX_", "LIBTPU_", "TF_", "NVIDIA_", "TRITON_", "PALLAS_", "APT_JAX_KERNEL_")
_NO_FACTS = frozenset({
    "JAX_COMPILATION_CACHE_DIR", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
})  # fmt: skip
"""Variables with locations or device lists, on which no program depends; the devices themselves are among the facts."""
_NAMES_OF_JAX = frozenset({
    "AbstractDevice", "AbstractMesh", "AllArgsInfo", "ArgInfo", "AutoLayout", "AutoLayoutSingleton", "AxisType",
    "DebugInfo", "DeviceList", "DeviceLocalLayout", "Format", "GSPMDSharding", "Layout", "ManualAxisType", "MemorySpace",
    "Mesh", "NamedSharding", "P", "PartitionSpec", "PyTreeDef", "ShapedArray", "SingleDeviceSharding",
    "UnloadedMeshExecutable", "UnspecifiedValue", "_unpickle_gspmd_sharding", "_unpickle_named_sharding",
    "_unpickle_single_device_sharding", "default_registry", "tracing_registry",
})  # fmt: skip
"""Names from JAX that an entry may use: descriptions of arguments, tree registries, and functions that make
shardings."""
_NAMES_OF_NUMPY = frozenset({"dtype", "ndarray", "_reconstruct"})
_NAMES_OF_DTYPES = frozenset({"bfloat16"})
"""Names from ml_dtypes, which defines the dtypes that NumPy lacks."""
_TREES = ("apt_jax.models.", "apt_jax.ops.")
"""Prefixes of the names of modules that define this package's trees of arrays."""


class ExecutableStore:
    """The stored executables of one executor.

    Args:
        kept: JAX's compiled programs on disk; entries are stored in the same directory.
        devices: devices that the programs run on, in the order of their mesh.
        facts: descriptions of everything that all programs of the executor depend on.

    Attributes:
        num_loaded: number of programs that were loaded without tracing or lowering.
    """

    def __init__(self, kept: CompiledPrograms, devices: Sequence[Any], facts: Sequence[str]) -> None:
        self._kept, self._devices = kept, tuple(devices)
        self._facts = (*process_facts(), *device_facts(devices), *facts)
        self._loaded: list[Path] = []
        self._lock = threading.Lock()
        self._has_warned = False

    @classmethod
    def find(cls, devices: Sequence[Any], facts: Sequence[str]) -> Self | None:
        """Return the store of this process; None: compiled programs are not kept, or this version of JAX cannot load
        them."""
        kept = kept_programs()
        if kept is None:
            return None
        try:
            _pickling()
        except (ImportError, AttributeError) as error:
            logger.warning(
                "executables cannot be loaded with this version of JAX; each start lowers all programs (%s)", error
            )
            return None
        return cls(kept, devices, facts)

    @property
    def num_loaded(self) -> int:
        return len(self._loaded)

    def executable(
        self, facts: Sequence[str], lower: Callable[[], Lowered], options: Mapping[str, Any] | None = None
    ) -> Compiled:
        """Return a program: loaded if it is stored, otherwise compiled and then stored. May be called from any thread.

        Args:
            facts: descriptions of everything that the program depends on besides the facts of the executor.
            lower: function that traces and lowers the program.
            options: compiler options, which must be among the facts.
        """
        digest = hashlib.sha256("\0".join([*self._facts, *facts]).encode()).hexdigest()
        path = self._kept.directory / f"{digest}.executable"
        found = self._load(path)
        if found is not None:
            return found
        lowered = lower()  # which may compile programs of its own
        self._kept.take_lookup()
        compiled = lowered.compile(compiler_options=dict(options) if options else None)
        self._keep(path, compiled)
        return compiled

    def forget_loaded(self) -> bool:
        """Remove the entries that were loaded, because one of them did not run; returns False if none was loaded."""
        with self._lock:
            loaded, self._loaded = self._loaded, []
        for path in loaded:
            with contextlib.suppress(OSError):
                path.unlink()
        return bool(loaded)

    def _load(self, path: Path) -> Compiled | None:
        entry = cache_dir.read_private(path)
        if entry is None:
            return None
        try:
            compiled = _unpickle(entry, self._kept, self._devices)
        except Exception as error:  # unpickling and device clients may raise anything
            self._warn("%s: cannot be loaded, compiling it again (%s)", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with self._lock:
            self._loaded.append(path)
        return compiled

    def _keep(self, path: Path, compiled: Compiled) -> None:
        lookup = self._kept.take_lookup()
        if lookup is None:  # not a program that can be kept
            return
        try:
            entry = _pickle(compiled, lookup.key if lookup.is_kept else None)
        except Exception as error:  # the platform or an argument may not support it
            self._warn("%s: cannot be stored; each start lowers it (%s)", path, error)
            return
        try:
            cache_dir.write_verified(path, entry)
        except OSError as error:
            cache_dir.log_not_kept(error)

    def _warn(self, message: str, path: Path, error: Exception) -> None:
        """Log the first failure as a warning and later ones at debug level, because all entries may fail for the same
        reason."""
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        logger.log(
            logging.DEBUG if has_warned else logging.WARNING,
            message,
            path,
            f"{type(error).__name__}: {one_line(str(error)):.200}",
        )


# --- inputs of compilation ---------------------------------------------------------------------------------------------


@functools.cache
def source_digest() -> str:
    """Return a hash of this package's source files and their names."""
    digest = hashlib.sha256()
    for directory, names, files in os.walk(_PACKAGE):
        names.sort()
        for name in sorted(files):
            if name.endswith(_SOURCES):
                path = Path(directory) / name
                content = path.read_bytes()
                digest.update(f"{path.relative_to(_PACKAGE)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def process_facts() -> list[str]:
    """Return the inputs of compilation that depend on this process: sources, versions, options of JAX and XLA."""
    # The versions of all installed packages, because any may take part in tracing; directory names are fast to read.
    packages: set[str] = set()
    for path in sys.path:
        with contextlib.suppress(OSError):  # Python ignores unreadable paths too
            packages.update(name for name in os.listdir(path or ".") if name.endswith((".dist-info", ".egg-info")))
    environment = {
        name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT) and name not in _NO_FACTS
    }
    options = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    return [
        source_digest(),
        sys.version,
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        repr(sorted(packages)),
        repr(sorted(environment.items())),
        repr(sorted(options.items())),
    ]


def device_facts(devices: Sequence[Any]) -> list[str]:
    """Return the inputs of compilation that depend on the machine: devices, cores, CPU."""
    client = devices[0].client
    return [
        f"{client.platform} {client.platform_version}",
        repr([(device.id, device.process_index, device.device_kind) for device in devices]),
        f"{len(jax.devices())} devices, {jax.process_count()} processes",
        f"{os.cpu_count()} cores, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else 'all'} for us",
        compiler.describe_cpu(),
    ]


def kernel_facts(ops_name: str) -> list[str]:
    """Return strings that identify the CPU kernels among the facts that compiled programs depend on.

    They are the file name of the kernel library and its instruction sets; none unless `ops_name` is "cpu" and a C++
    compiler is found. The kernels must be loaded already.
    """
    command = compiler.find_compiler()
    return [] if ops_name != "cpu" or command is None else [compiler.library_name(command), build.instructions()]


def described(tree: Any) -> str:
    """Return a description of a tree: its structure, and the shape, dtype and sharding of each array."""
    leaves, structure = jax.tree.flatten(tree)
    shapes = [(leaf.shape, str(leaf.dtype), repr(getattr(leaf, "sharding", None))) for leaf in leaves]
    return f"{structure} {shapes}"


def described_static(static: Mapping[str, Any]) -> str:
    """Return a description of the static arguments of a program."""
    return repr(sorted(static.items()))


# --- pickles -----------------------------------------------------------------------------------------------------------


@functools.cache
def _pickling() -> tuple[Any, Any, tuple[type, ...]]:
    """Return JAX's classes that pickle and unpickle executables, and the types of executables in a pickle.

    Raises:
        ImportError, AttributeError: this version of JAX does not have them.
    """
    from jax.experimental import serialize_executable

    module: Any = serialize_executable
    return module._JaxPjrtPickler, module._JaxPjrtUnpickler, (module.xc.LoadedExecutable, module._jax.Executable)


def _pickle(compiled: Compiled, key: str | None) -> bytes:
    """Return the entry of a compiled program.

    Args:
        key: key of the executable in JAX's cache. An executable loaded from there cannot be serialised again: on CPUs
            it has lost the names of its functions. None: the executable itself is stored in the entry.

    Raises:
        Exception: the program cannot be serialised.
    """
    base, _, executables = _pickling()

    class Pickler(base):
        def persistent_id(self, obj: Any) -> Any:
            if key is not None and isinstance(obj, executables):
                return ("kept", key)
            return super().persistent_id(obj)

    private: Any = compiled
    if private._params.const_args:
        raise ValueError("it contains constant arrays")
    info, in_tree = jax.tree.flatten(compiled.args_info)
    unloaded = private._executable._unloaded_executable
    with io.BytesIO() as file:
        Pickler(file).dump((unloaded, info, in_tree, compiled.out_tree, private._no_kwargs))
        return file.getvalue()


def _may_name(module: str, name: str) -> bool:
    """Return True if an entry may use a name. Names with dots are rejected, because they reach arbitrary attributes."""
    package = module.partition(".")[0]
    if package in ("jax", "jaxlib"):
        return name in _NAMES_OF_JAX
    if package == "numpy":
        return name in _NAMES_OF_NUMPY
    if package == "ml_dtypes":
        return name in _NAMES_OF_DTYPES
    return module.startswith(_TREES) and name.isidentifier()


def _unpickle(entry: bytes, kept: CompiledPrograms, devices: Sequence[Any]) -> Compiled:
    """Return the program of an entry made by `_pickle`.

    Raises:
        Exception: the program cannot be loaded.
    """
    _, base, _ = _pickling()

    class Unpickler(base):
        def find_class(self, module: str, name: str) -> Any:
            if not _may_name(module, name):
                raise LookupError(f"it names {module}.{name}")
            found = super().find_class(module, name)
            package, of = module.partition(".")[0], getattr(found, "__module__", type(found).__module__)
            is_own = of.partition(".")[0] in (package, package + "lib")
            if not is_own or (package == "apt_jax" and not dataclasses.is_dataclass(found)):
                raise LookupError(f"it names {module}.{name}, which is defined elsewhere")
            return found

        def persistent_load(self, pid: Any) -> Any:
            if pid[0] == "kept":
                executable = kept.executable(pid[1])
                if executable is None:
                    raise LookupError("its executable is missing")
                pid = ("exec", executable)
            return super().persistent_load(pid)

    unloaded, info, in_tree, out_tree, no_kwargs = Unpickler(io.BytesIO(entry), devices[0].client, devices).load()
    return Compiled(unloaded.load(), [], jax.tree.unflatten(in_tree, info), out_tree, no_kwargs=no_kwargs)
