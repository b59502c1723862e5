"""Loads damaged model files and measures their memory: `python -m tests.support.hostile_files CASE ...` writes a JSON
line for each, of bytes of files, bytes of memory, and the error. Linux only."""

import gc
import json
import os
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from apt_jax.errors import ModelLoadError
from apt_jax.models.loading.checkpoint import SafetensorsCheckpoint, read_json
from apt_jax.models.loading.gguf.file import GgufFile
from apt_jax.text.tokenizer import load_tokenizer
from apt_jax.text.tokenizer_config import tokenizer_config

UNITS = {
    "arrays": "[],",
    "objects": "{},",
    "pairs": '{"a":0},',
    "nested": "[[[]]],",
    "numbers": "0.5,",
    "texts": '"ab",',
    "emoji": '"\U0001f600",',
    "tensors": '{"dtype":"U8","shape":[0],"data_offsets":[0,0]},',
}
KINDS = ("config", "index", "header", "tokenizer_config", "merges", "fields", "vocab", "gguf")
_TOKENIZER = (
    b'{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":null,'
    b'"post_processor":null,"decoder":null,"model":{"type":"BPE","dropout":null,"unk_token":null,"vocab":{},"merges":['
)


def _write(path: Path, kind: str, unit: str, size: int) -> Callable[[], object]:
    """Write a file of about this size; returns what loads it."""
    body = unit.encode() * (size // len(unit.encode()))
    listed = b'{"a":[' + body + b"0]}"
    match kind:
        case "config" | "index":
            name = {"config": "config.json", "index": "model.safetensors.index.json"}[kind]
            (path / name).write_bytes(listed)
            return lambda: read_json(path, name)
        case "header":
            (path / "m.safetensors").write_bytes(struct.pack("<Q", len(listed)) + listed)
            return lambda: SafetensorsCheckpoint([path / "m.safetensors"])
        case "tokenizer_config":
            (path / "tokenizer_config.json").write_bytes(listed)
            return lambda: tokenizer_config(path)
        case "merges":
            (path / "tokenizer.json").write_bytes(_TOKENIZER + body + b"0]}}")
        case "fields":
            (path / "tokenizer.json").write_bytes(_TOKENIZER.replace(b'{"version', listed[:-1] + b',"version') + b"]}}")
        case "vocab":
            (path / "vocab.json").write_bytes(listed)
            (path / "merges.txt").write_text("")
        case "gguf":
            text = unit.strip('",').encode()
            number = min(size // (8 + len(text)), 2**22)
            head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, number)
            (path / "m.gguf").write_bytes(head + (struct.pack("<Q", len(text)) + text) * number)
            return lambda: GgufFile(path / "m.gguf")
    return lambda: load_tokenizer(path)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(kind: str, unit: str, size: int) -> dict[str, object]:
    """Load one file in a child of this process, so that no memory of a case before is used again."""
    with tempfile.TemporaryDirectory() as own:
        load = _write(Path(own), kind, UNITS[unit], size)
        gc.collect()
        files = sum(file.stat().st_size for file in Path(own).iterdir())
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            before = _status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
            error = None
            try:
                load()
            except ModelLoadError as found:
                error = str(found)
            os.write(write, json.dumps({"memory": _status("VmHWM") - before, "error": error}).encode())
            os._exit(0)
        os.close(write)
        with open(read, "rb") as answer:
            result = json.loads(answer.read())
        os.waitpid(pid, 0)
        return {"kind": kind, "unit": unit, "files": files, **result}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        kind, unit, size = case.split(":")
        print(json.dumps(measure(kind, unit, int(size))), flush=True)
