"""The tests of the kernels again, with kernels that are compiled for other CPUs, and under sanitizers."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from apt_jax.cpu import build

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "tests/cpu/test_experts.py",
    "tests/cpu/test_kernels.py",
    "tests/cpu/test_integer_products.py",
    "tests/pallas/test_attention.py",
    "tests/pallas/test_score_rules.py",
]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -O1"


def _passes(flags: str, more: dict[str, str]) -> None:
    environment = {**os.environ, "APT_JAX_KERNEL_FLAGS": flags, **more}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "not compiler and not xla",
        *TESTS,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "passed" in done.stdout


def _library_of(compiler: list[str], name: str) -> Path | None:
    """Where the compiler's own library lies."""
    found = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    path = Path(found.stdout.strip())
    return path if path.is_absolute() else None


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize("cpu", ["bdver2", "x86-64-v3", "x86-64-v4", "sapphirerapids"])
def test_kernels_compile_for_other_cpus(cpu: str) -> None:
    """AVX and FMA without AVX2, AVX2, AVX-512 without dot products of bfloat16, and matrix tiles: what this machine may lack."""
    compiler = build.find_compiler()
    if compiler is None or "zig" in " ".join(compiler):
        pytest.skip("no compiler, or one with other names of CPUs")
    include = ["-isystem", jax.ffi.include_dir()]
    source = str(Path(build.__file__).with_name("kernels.cc"))
    command = [
        *compiler,
        "-std=c++17",
        f"-march={cpu}",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
        *include,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "x86_64-linux-gnu"])
def test_kernels_compile_with_another_compiler_and_for_arm(target: str, tmp_path: Path) -> None:
    """By clang, and with NEON, which has registers of four floats."""
    pytest.importorskip("ziglang")
    include = ["-isystem", jax.ffi.include_dir()]
    source = str(Path(build.__file__).with_name("kernels.cc"))
    command = [
        sys.executable,
        "-m",
        "ziglang",
        "c++",
        "-target",
        target,
        "-std=c++17",
        "-c",
        "-Wall",
        "-Wextra",
        "-Werror",
        *include,
        source,
        "-o",
        str(tmp_path / "kernels.o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize("flags", ["-march=x86-64-v2 -mfma -mf16c", "-march=x86-64-v3", "-march=x86-64-v4"])
def test_kernels_of_cpus_with_less(flags: str) -> None:
    """Registers of four floats, as NEON's; AVX2; AVX-512 without dot products of bfloat16."""
    _passes(flags, {})


@pytest.mark.slow
def test_kernels_under_sanitizers() -> None:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no compiler")
    # JAX throws through a C++ library of its own: the sanitizer finds the function that does so only in one loaded before.
    libraries = [_library_of(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    if None in libraries:
        pytest.skip("this compiler has no libasan")
    _passes(SANITIZERS, {"LD_PRELOAD": ":".join(map(str, libraries)), "ASAN_OPTIONS": "detect_leaks=0"})
