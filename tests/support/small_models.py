"""Directories of models with one layer, which are quick to compile."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.support.opt_checkpoint import TINY, write_model
from tests.support.toy_serving import byte_tokenizer

_BUNDLED = Path(__file__).resolve().parents[2] / "apt_jax/assets/tiny-opt"
_BYTE_MODEL = {**TINY, "vocab_size": 280, "num_hidden_layers": 1, "hidden_size": 32, "word_embed_proj_dim": 32}


def write_byte_model(path: Path, **fields: Any) -> Path:
    """Write a model without weights (`--load-format dummy`) that has a token for each byte.

    Args:
        fields: override those of its configuration.
    """
    (path / "config.json").write_text(json.dumps({**_BYTE_MODEL, **fields}))
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


SMALL_ENGINE = shlex.split(
    "--load-format dummy --max-num-seqs 2 --max-num-batched-tokens 32 --max-model-len 64 --num-blocks-override 5"
    " --calibration-time 0"
)
"""Flags of `apt-jax serve` for `write_small_model`. Tests that start it have the same ones: what is compiled for one
serves all."""


def write_small_model(path: Path) -> Path:
    """Write the byte model that tests start as a process."""
    return write_byte_model(path, max_position_embeddings=64)


def write_shallow_model(path: Path) -> Path:
    """Write the bundled model with its first layer alone."""
    fields = json.loads((_BUNDLED / "config.json").read_text()) | {"num_hidden_layers": 1}
    tensors = load_file(_BUNDLED / "model.safetensors")
    write_model(
        path, fields, {name: v for name, v in tensors.items() if ".layers." not in name or ".layers.0." in name}
    )
    for name in ("generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_BUNDLED / name, path)
    return path
