"""Host memory while a checkpoint is loaded onto simulated devices, beside what lies on the devices.

Random weights of a Llama-style model are written as safetensors and as Orbax, and each is loaded in a process of its
own. Its memory is the host's and the devices' in one, so what the devices hold is taken off: while each array is
loaded, the peak of the process, less what it had before, less the shards of all arrays so far and of this one.

    python -m benchmarks.engine.sharded_loading --gib 2 --devices 4 --json
    benchmarks/results/2026-11-22-sharded-loading.json
"""

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from apt_jax.config import EngineConfig, ParallelConfig
from apt_jax.models import load_model, read_model_config
from apt_jax.models import sharding as parallel
from apt_jax.models.config import ModelConfig
from apt_jax.models.loading.convert import convert_model
from apt_jax.models.params import abstract_params, param_names

FORMATS = ("safetensors", "orbax")
BOUND = 1.2
"""Most host memory, in sizes of the largest tensor."""


def fields(gib: float) -> dict[str, Any]:
    """config.json of a model of about so many GiB in float32: a quarter of it the head."""
    hidden, ffn, vocab = 1024, 4096, 131_072
    layer = 4 * (4 * hidden**2 + 3 * hidden * ffn)
    layers = max(1, round((gib * 2**30 - 8 * vocab * hidden) / layer))
    return {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": ffn, "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }  # fmt: skip


def write(path: Path, gib: float) -> None:
    """A checkpoint in the format of Hugging Face, in one file."""
    config = fields(gib)
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (v, h),
        "model.norm.weight": (h,),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {at + f"self_attn.{n}_proj.weight": (h, h) for n in "qkvo"}
        shapes |= {at + f"mlp.{n}_proj.weight": (f, h) for n in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.weight": (h, f)}
        shapes |= {at + f"{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
    shapes["lm_head.weight"] = (v, h)
    (path / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (
        (path / "model.safetensors").open("wb") as file,
        tqdm(total=end, unit="B", unit_scale=True, desc="writing") as bar,
    ):
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            for start in range(0, math.prod(shape), 1 << 22):
                count = min(1 << 22, math.prod(shape) - start)
                bar.update(file.write((rng.random(count, np.float32) - 0.5).tobytes()))


def _memory(key: str) -> int:
    """Bytes, from /proc/self/status."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


class Meter:
    """Says where arrays go, and so sees each begin.

    Attributes:
        host: most bytes so far beside the devices.
        on_devices: bytes of all shards.
    """

    def __init__(self, mesh: jax.sharding.Mesh, shapes: dict[str, tuple[int, ...]]) -> None:
        self._mesh, self._shapes = mesh, shapes
        self.host = self.on_devices = 0
        self._before = _memory("VmRSS")

    def sharding(self, config: ModelConfig, name: str) -> jax.sharding.NamedSharding:
        self.note()
        where = parallel.leaf_sharding(self._mesh, config, name)
        shard = where.shard_shape(self._shapes[name])
        self.on_devices += 4 * math.prod(shard) * self._mesh.size
        return where

    def note(self) -> None:
        """An array is loaded."""
        self.host = max(self.host, _memory("VmHWM") - self._before - self.on_devices)
        Path("/proc/self/clear_refs").write_text("5")  # begin a new peak


def load(path: Path, devices: int) -> dict[str, Any]:
    """In this process, which has that many devices."""
    config = EngineConfig(model=str(path), parallel=ParallelConfig(tensor_parallel_size=devices))
    model = read_model_config(json.loads((path / "config.json").read_text()), None)[1]
    leaves = jax.tree.leaves(abstract_params(model, np.float32))
    names = jax.tree.leaves(param_names(model))
    by_name = {name: leaf.shape for name, leaf in zip(names, leaves, strict=True)}
    jax.block_until_ready(jax.numpy.zeros(8))
    meter = Meter(parallel.tensor_mesh(devices), by_name)
    params = load_model(config, meter.sharding).params
    meter.note()
    leaves = jax.tree.leaves(params)
    assert meter.on_devices == sum(s.data.nbytes for x in leaves for s in x.addressable_shards)
    largest = max(leaf.nbytes for leaf in leaves)
    return {
        "devices": devices, "weights_bytes": sum(leaf.nbytes for leaf in leaves), "on_devices_bytes": meter.on_devices,
        "largest_tensor_bytes": largest, "peak_host_bytes": meter.host, "of_largest": round(meter.host / largest, 3), "bound": BOUND,
    }  # fmt: skip


def measure(gib: float, devices: int, directory: Path) -> list[dict[str, Any]]:
    """A row for each format."""
    first = directory / "safetensors"
    first.mkdir()
    write(first, gib)
    convert_model(str(first), directory / "orbax")
    rows = []
    for name in FORMATS:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        command = [sys.executable, __file__, "--load", str(directory / name), "--devices", str(devices)]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        rows.append({"format": name, **json.loads(done.stdout)})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 where the bound does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint, GiB")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--load", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.load is not None:
        print(json.dumps(load(args.load, args.devices)))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(args.gib, args.devices, Path(directory))
    for row in rows:
        print(
            f"{row['format']:>12}: {row['weights_bytes'] / 2**20:,.0f} MiB onto {row['devices']} devices; host at most "
            f"{row['peak_host_bytes'] / 2**20:,.0f} MiB beside them, {row['of_largest']:.2f} of the largest tensor "
            f"({row['largest_tensor_bytes'] / 2**20:,.0f} MiB)"
        )
    if args.json is not None:
        about = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "cpus": os.cpu_count()}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1))
    return int(any(row["of_largest"] > BOUND for row in rows))


if __name__ == "__main__":
    sys.exit(main())
