"""Regenerate the Python stubs from the .proto files: `python serve/protos/generate.py`, in the root of the repository.

Needs grpcio-tools (dependency group `dev`). The stubs are committed; a test compares them with the .proto file.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def generate(out: Path) -> None:
    """Write the stubs of all .proto files to `out`, in the same subdirectories as in the repository."""
    protos = sorted([*ROOT.glob("serve/protos/**/*.proto"), *ROOT.glob("apt_jax/distributed/protos/*.proto")])
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={ROOT}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            *(str(p.relative_to(ROOT)) for p in protos),
        ],
        check=True,
        cwd=ROOT,
    )


if __name__ == "__main__":
    generate(ROOT)
