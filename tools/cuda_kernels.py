"""Compile the package's CUDA kernel to PTX, after a change of its source; needs `nvcc` of CUDA 12 or 13, and no GPU.

    python -m tools.cuda_kernels            # writes apt_jax/lab/kernels/cuda/decode_absorbed.ptx.xz
    python -m tools.cuda_kernels --check    # exit status 1 where the file is not of this source

The text is of PTX 8.0, which drivers from CUDA 12.0 on (525) take, whatever nvcc this is.
"""

import argparse
import concurrent.futures
import hashlib
import json
import lzma
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from apt_jax.lab.kernels.cuda_decode_absorbed import CHIP, COMPILED, SOURCES, VARIANTS, Variant

PTX_VERSION = "8.0"


def digest() -> str:
    """SHA-256 of the sources and the variants."""
    parts = [path.read_bytes() for path in SOURCES]
    parts += [variant.name.encode() for variant in VARIANTS]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def compile_variant(variant: Variant, nvcc: str = "nvcc") -> str:
    """The PTX of a variant, without comments."""
    macros = [f"-D{name}={value}" for name, value in variant.macros.items()]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.ptx"
        command = [nvcc, "-std=c++17", f"-arch={CHIP}", "-ptx", *macros, str(SOURCES[0]), "-o", str(path)]
        subprocess.run(command, check=True)
        text = path.read_text()
    lines = (line.partition("//")[0].strip() for line in text.splitlines())
    return re.sub(r"^\.version .*$", f".version {PTX_VERSION}", "\n".join(filter(None, lines)) + "\n", flags=re.M)


def is_current() -> bool:
    """True where the compiled file is of this source."""
    return json.loads(lzma.decompress(COMPILED.read_bytes()))["sources"] == digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    parser.add_argument("--nvcc", default="nvcc", help="the compiler")
    options = parser.parse_args()
    if options.check:
        sys.exit(0 if is_current() else f"{COMPILED} is not of this source: run python -m tools.cuda_kernels")
    version = subprocess.run([options.nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    release = re.search(r"release ([\d.]+)", version)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda variant: compile_variant(variant, options.nvcc), VARIANTS))
    found = {
        "compiler": f"nvcc {release[1] if release else version}",
        "sources": digest(),
        "ptx": {variant.name: text for variant, text in zip(VARIANTS, texts, strict=True)},
    }
    COMPILED.write_bytes(lzma.compress(json.dumps(found).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{COMPILED.name}: {len(VARIANTS)} variants, {COMPILED.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
