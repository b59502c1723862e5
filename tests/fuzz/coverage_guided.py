"""Fuzzing by coverage: atheris (libFuzzer) changes bytes and keeps what reaches new code.

    python -m tests.fuzz.coverage_guided TARGET SECONDS [DIRECTORY]      the corpus is kept in the directory

`TARGETS` are functions of bytes; `test_coverage_guided.py` runs them with bytes from Hypothesis, without atheris. An
input that fails is kept in `tests/fuzz_inputs/coverage-TARGET`.
"""

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

with contextlib.ExitStack() as _imports:
    if __name__ == "__main__":
        atheris: Any = importlib.import_module("atheris")

        _imports.enter_context(
            atheris.instrument_imports(include=["apt_jax", "serve"], exclude=["apt_jax.ops", "apt_jax.pallas"])
        )
        os.environ.setdefault("APT_JAX_FUZZ_SEED", "0")
    from apt_jax.errors import AptJaxError, ModelLoadError
    from apt_jax.frontend.components import EngineComponents
    from apt_jax.models.loading.checkpoint import SafetensorsCheckpoint
    from apt_jax.models.loading.gguf.model import open_gguf
    from serve.http_api import openai_request
    from serve.http_api.errors import BadCallError

from tests.fuzz.test_text import check_ids, check_stop
from tests.support.fuzzing import keep_input
from tests.support.gguf_models import assemble, entry, tensor, text
from tests.support.opt_checkpoint import safetensors_bytes
from tests.support.toy_serving import toy_parts

_MEMORY_FILES = "/dev/shm" if os.path.isdir("/dev/shm") else None


@functools.cache
def _parts() -> EngineComponents:
    return toy_parts(max_model_len=64)


def body(data: bytes) -> None:
    """A request's body becomes internal parameters, or is refused in one line."""
    kind, said = "completion" if not data or data[0] % 2 else "chat", ""
    try:
        fields = openai_request.parse_json(data[1:])
        if "structured_outputs" in fields or "response_format" in fields:  # compiled in a process of its own
            return
        openai_request.read_call(_parts(), kind, fields, {}, 0.0)
    except (BadCallError, AptJaxError) as error:
        said = str(error)
    assert "\n" not in said, ascii(said)
    said.encode()


def stop(data: bytes) -> None:
    """Stop strings are those of the whole text: the text, then strings and cuts between NULs."""
    parts = data.decode("utf-8", "ignore").split("\0")
    cuts = [ord(c) for c in parts[1][:20]] if len(parts) > 1 else []
    check_stop(parts[0], [p for p in parts[2:8] if p], cuts, len(data) % 2 == 0)


def tokens(data: bytes) -> None:
    """Pieces of tokens are the whole text."""
    name = ("byte-level", "byte-fallback")[bool(data) and data[0] % 2]
    ids = [(a | b << 8) % 300 for a, b in zip(data[1::2], data[2::2], strict=False)]
    check_ids(name, ids, len(data) % 2 == 0)


def _in_file(data: bytes, name: str, read: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=_MEMORY_FILES) as directory:
        path = Path(directory) / name
        path.write_bytes(data)
        said = ""
        try:
            read(path)
        except ModelLoadError as error:
            said = str(error)
        assert said.isprintable() or not said, ascii(said)


def safetensors(data: bytes) -> None:
    """A safetensors file is read, or refused in one line."""

    def read(path: Path) -> None:
        with contextlib.closing(SafetensorsCheckpoint([path])) as checkpoint:
            for name, info in checkpoint.tensors.items():
                if info.dtype in ("F16", "BF16", "F32", "F64"):
                    checkpoint.read(name)

    _in_file(data, "model.safetensors", read)


def gguf(data: bytes) -> None:
    """A GGUF file is read, or refused in one line."""

    def read(path: Path) -> None:
        checkpoint, _ = open_gguf(path)
        with contextlib.closing(checkpoint):
            for name in checkpoint.tensors:
                checkpoint.read(name)

    _in_file(data, "m.gguf", read)


TARGETS: dict[str, Callable[[bytes], None]] = {
    function.__name__: function for function in (body, stop, tokens, safetensors, gguf)
}


def _bodies() -> list[bytes]:
    sampling = {
        "prompt": "hi", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7, "stop": ["x"], "logprobs": 2, "logit_bias": {"5": 1.5}, "n": 2, "best_of": 2, "echo": True,
        "stream": True, "stream_options": {"include_usage": True}, "presence_penalty": 0.5, "min_tokens": 1, "slo": {"ttft_ms": 500, "tbt_ms": 50}, "service_tier": "flex", "ignore_eos": True, "user": "u", "suffix": None,
    }  # fmt: skip
    chat = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_completion_tokens": 4, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "none", "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    prompts = [{"prompt": [1, 2]}, {"prompt": [[1], [2]]}, {"prompt": ["a", "b"], "n": 1}]
    return [b"\x01" + json.dumps(value).encode() for value in (sampling, *prompts)] + [
        b"\0" + json.dumps(chat).encode()
    ]


def _files() -> tuple[bytes, bytes]:
    import numpy as np

    good = safetensors_bytes({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)})
    entries = [
        entry("general.architecture", 8, text("llama")),
        entry("llama.block_count", 4, (1).to_bytes(4, "little")),
    ]
    return good, assemble(entries, [tensor("token_embd.weight", (8, 4), 0, 0)], bytes(128))


SEEDS: dict[str, list[bytes]] = {
    "body": _bodies(),
    "stop": [b"aab\nabaab\0\x03\x05\0aab\0ab", "é\0\x01\0é".encode()],
    "tokens": [bytes(range(40)), b"\x01" + bytes(range(200))],
    "safetensors": [_files()[0]],
    "gguf": [_files()[1]],
}


def main(target: str, seconds: str, corpus: str = "") -> None:
    function = TARGETS[target]

    def one(data: bytes) -> None:
        try:
            function(data)
        except BaseException as error:
            path = keep_input(f"coverage-{target}", {"data": data})
            sys.stderr.write(f"\n{type(error).__name__}: {error}\nkept: {path}\n")
            raise

    with contextlib.ExitStack() as stack:
        directory = Path(corpus or stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(SEEDS[target]):
            (directory / f"seed-{number}").write_bytes(data)
        _parts()
        flags = [
            f"-max_total_time={seconds}",
            "-timeout=20",
            "-rss_limit_mb=4096",
            "-max_len=4096",
            f"-artifact_prefix={directory}/",
        ]
        atheris.Setup([sys.argv[0], *flags, str(directory)], one)  # type: ignore[possibly-unbound]
        atheris.Fuzz()  # type: ignore[possibly-unbound]


if __name__ == "__main__":
    main(*sys.argv[1:])
