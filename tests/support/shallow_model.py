"""The bundled model with fewer layers: its tokenizer and its widths, and programs that compile in a part of the time."""

import json
import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

from apt_jax.assets import ASSETS

LAYERS = "model.decoder.layers."


def write_shallow_model(path: Path, num_layers: int = 1) -> Path:
    """Write the first layers of the bundled model as a model directory; return it."""
    shutil.copytree(ASSETS / "tiny-opt", path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": num_layers}))
    tensors = load_file(ASSETS / "tiny-opt" / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(LAYERS) or int(name.removeprefix(LAYERS).split(".")[0]) < num_layers
    }
    save_file(kept, path / "model.safetensors")
    return path
