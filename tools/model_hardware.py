"""Write descriptions of models with experts or windows, whose layers no public profile has measured as a whole.

Steps are put together from parts on a grid of sizes and fitted, as in `tools.hardware_descriptions`:

* dense products and the output head: measured products of the card;
* experts: reading the weights of those that a step touches, E (1 - (1 - k/E)^n) of E in each layer on average, at the
  rate at which a product of one row reads a matrix of 4,096 x 28,672; or, if longer, the measured time of a product
  of all rows with one expert's shape;
* attention: measured kernels of heads of 128 lanes with as many query heads per key head, at the number of requests
  that read as many bytes (decode) or compute as many products (prompts); a layer with a window reads no more than it;
* norms, activations and rotary embeddings: Vidur's profile of Llama-2-7B's layers, by width.

The pool is that of `apt_jax.models.layer_groups`: Gemma 4's global layers cache one tensor, and blocks that have left
the window of windowed layers are free.

    python -m tools.model_hardware [--data DIRECTORY] [--out DIRECTORY]
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import numpy as np

from apt_jax.config import CacheConfig
from apt_jax.core.kinds import CacheKindSpec, most_blocks
from apt_jax.costs.hardware import Hardware
from apt_jax.costs.model import StepCosts
from apt_jax.models import PRESETS, read_model_config
from apt_jax.models.config import ModelConfig
from apt_jax.models.layer_groups import layer_groups
from apt_jax.sim.hardware import save_hardware
from tools.hardware_descriptions import (
    BLOCK_SIZE,
    CARDS,
    GIB,
    MEMORY_SHARE,
    RESERVED_GIB,
    ROOT,
    Card,
    Point,
    Profiles,
    fit_parts,
    print_table,
    rounded,
)

CASES = (
    ("gemma-4-12b", "h100-80gb"),
    ("gemma-4-31b", "h100-80gb"),
    ("qwen3-30b-a3b", "h100-80gb"),
    ("qwen3-30b-a3b", "a100-80gb"),
    ("gpt-oss-20b", "h100-80gb"),
)
_LIKE, _LIKE_WIDTH, _LIKE_FFN = "Llama-2-7b-hf", 4096, 11008
_READ_N, _READ_K = 28_672, 4096
"""Shape of the product whose time for one row gives the rate of reading weights."""
_PROMPT_TOKENS = 128, 16_384
"""Fewest and most tokens of a step with prompts in the fit; shorter ones, which the line misses, are few."""


class Parts:
    """Times of the parts of a model's steps on one card, in seconds."""

    def __init__(self, profiles: Profiles, card: Card, model: ModelConfig) -> None:
        self.profiles, self.model, self.gpu = profiles, model, card.profile
        self.read_bytes_s = 2 * _READ_N * _READ_K / profiles.gemm_s(self.gpu, 1, _READ_N, _READ_K)
        groups = sorted(heads // 8 for phase, gpu, heads, kv in profiles.measured_heads if gpu == self.gpu and kv == 8)
        self._groups = np.array(groups)

    @property
    def experts_s(self) -> float:
        """Seconds of reading all experts of all layers."""
        return self._num_sparse * self._expert_bytes / self.read_bytes_s

    @property
    def _num_sparse(self) -> int:
        return sum(self.model.experts_of(layer) is not None for layer in range(self.model.num_layers))

    @property
    def _expert_bytes(self) -> int:
        experts = self.model.experts
        return 0 if experts is None else 2 * 3 * experts.num_experts * experts.size * self.model.hidden_size

    def sparse_s(self, tokens: int) -> float:
        """Return the time of the experts of all layers beyond reading them."""
        experts, d = self.model.experts, self.model.hidden_size
        if experts is None:
            return 0.0
        rows = tokens * experts.per_token
        products_s = self.profiles.gemm_s(self.gpu, rows, 2 * experts.size, d)
        products_s += self.profiles.gemm_s(self.gpu, rows, d, experts.size)
        return max(self._num_sparse * products_s - self.read_s(tokens), 0.0)

    def read_s(self, tokens: int) -> float:
        """Return the time of reading the experts of all layers that a step of `tokens` tokens touches."""
        experts = self.model.experts
        if experts is None:
            return 0.0
        return self.experts_s * (1 - (1 - experts.per_token / experts.num_experts) ** tokens)

    @functools.cache  # noqa: B019  few instances, as long as the script
    def dense_s(self, tokens: int) -> float:
        """Return the time of all layers without attention and experts."""
        model, d, total = self.model, self.model.hidden_size, 0.0
        vidur = functools.partial(self.profiles.vidur_s, "h100" if self.gpu == "h100_sxm" else "a100", _LIKE, 1)
        columns = ("norm1", "norm2", "residual_add", "rope")
        around_s = sum(vidur(column, tokens) for column in columns) * d / _LIKE_WIDTH
        for layer in range(model.num_layers):
            shape, ffn = model.attention_of(layer), model.dense_size(layer)
            q, kv = model.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
            shapes = [(q + (1 if shape.one_projection else 2) * kv, d), (d, q)]
            shapes += [(2 * ffn, d), (d, ffn)] if ffn else []
            total += around_s + sum(self.profiles.gemm_s(self.gpu, tokens, n, k) for n, k in shapes)
            experts = model.experts_of(layer)
            moved = ffn + (0 if experts is None else experts.per_token * experts.size)
            total += vidur("mlp_act", tokens) * moved / _LIKE_FFN
        return total

    def head_s(self, samples: int) -> float:
        """Return the time of the logits."""
        return self.profiles.gemm_s(self.gpu, samples, self.model.vocab_size, self.model.hidden_size)

    def _kernel_s(self, phase: str, group: int, batch: float, length: int) -> float | None:
        nearest = int(self._groups[np.abs(self._groups - group).argmin()])
        return self.profiles.kernel_s(phase, self.gpu, nearest, batch, length)

    def decode_s(self, batch: int, length: int, *, windowed: bool) -> float | None:
        """Return the time of attention of decode rows in the layers with a window, or in the others."""
        total = 0.0
        for layer in range(self.model.num_layers):
            window = self.model.window(layer)
            if (window is not None) != windowed:
                continue
            shape = self.model.attention_of(layer)
            lanes = shape.lane * (1 if shape.turned_lanes is not None else 2)
            read = min(length, window or length)
            group = self.model.num_heads // shape.num_kv_heads
            one_s = self._kernel_s("decode", group, batch * lanes / (2 * 8 * 128), read)
            if one_s is None:
                return None
            total += one_s
        return total

    def prompt_s(self, batch: int, length: int) -> float | None:
        """Return the time of attention of whole prompts in all layers."""
        total = 0.0
        for layer in range(self.model.num_layers):
            shape, window = self.model.attention_of(layer), self.model.window(layer)
            group = self.model.num_heads // shape.num_kv_heads
            nearest = int(self._groups[np.abs(self._groups - group).argmin()])
            same = batch * self.model.num_heads * shape.head_dim / (8 * nearest * 128)
            one_s = self._kernel_s("prefill", group, same, length)
            if one_s is None:
                return None
            w = min(length, window or length)
            total += one_s * (w * length - w * w / 2) / (length * length / 2)
        return total


def _distinct_lengths() -> list[int]:
    return [2**i for i in range(6, 18)]


def describe(profiles: Profiles, name: str, card_name: str) -> Hardware:
    """Return the description of a model on one card."""
    card, model = CARDS[card_name], read_model_config(PRESETS[name])[1]
    parts = Parts(profiles, card, model)
    groups = layer_groups(model, CacheConfig(block_size=BLOCK_SIZE), hidden=False, max_model_len=model.max_position)
    kind, size = CacheKindSpec(name="kv", blocks_per_group=2), BLOCK_SIZE
    num_arrays = model.num_layers
    if groups is not None:
        kind = dataclasses.replace(kind, blocks_per_group=groups.blocks_per_group, windows=groups.windows)
        size, num_arrays = groups.block_size, groups.num_arrays
    free = (card.memory_gib * MEMORY_SHARE - RESERVED_GIB) * GIB - 2 * model.num_params
    num_blocks = int(free / (num_arrays * BLOCK_SIZE * model.lane * 2))

    def fits(batch: int, length: int) -> bool:
        needed = batch * most_blocks(length, size, kind.blocks_per_group, kind.windows)
        return length <= model.max_position and needed <= 1.25 * num_blocks

    window = 0 if groups is None else groups.windows.window
    points = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for length in _distinct_lengths():
            all_s = parts.decode_s(batch, length, windowed=False)
            near_s = parts.decode_s(batch, length, windowed=True)
            if all_s is None or near_s is None or not fits(batch, length):
                continue
            read = [1.0, batch, batch * length] + ([batch * min(length, window)] if window else [])
            linear_s = parts.dense_s(batch) + parts.sparse_s(batch) + parts.head_s(batch)
            points.append(Point(linear=[1, batch], linear_s=linear_s, read=read, read_s=all_s + near_s))
    known = [parts.read_s(int(point.linear[1])) for point in points]
    decode_linear, decode_read, decode_quality = fit_parts(points, known)
    points = []
    for batch in (1, 2, 4, 8, 16, 32):
        for length in (16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192):
            attention_s, tokens = parts.prompt_s(batch, length), batch * length
            if (
                attention_s is not None
                and length <= model.max_position
                and _PROMPT_TOKENS[0] <= tokens <= _PROMPT_TOKENS[1]
            ):
                linear_s = parts.dense_s(tokens) + parts.read_s(tokens) + parts.sparse_s(tokens) + parts.head_s(batch)
                read = [1, tokens, batch, batch * length**2]
                points.append(Point(linear=[1, tokens, batch], linear_s=linear_s, read=read, read_s=attention_s))
    prefill_linear, prefill_read, prefill_quality = fit_parts(points)
    experts = model.experts
    costs = StepCosts(
        prefill_base_s=prefill_linear[0] + prefill_read[0],
        prefill_per_token_s=prefill_linear[1] + prefill_read[1],
        prefill_per_request_s=prefill_linear[2] + prefill_read[2],
        prefill_per_pair_s=prefill_read[3],
        prefill_per_kv_prefix_s=decode_read[2],
        decode_base_s=decode_linear[0] + decode_read[0],
        decode_per_request_s=decode_linear[1] + decode_read[1],
        decode_per_token_s=decode_read[2],
        decode_per_window_token_s=decode_read[3] if window else 0.0,
        window_tokens=float(window),
        experts_s=parts.experts_s,
        experts_per_token=0.0 if experts is None else experts.per_token / experts.num_experts,
    )
    basis = {
        "prefill, decode": "non-negative least squares on whole steps put together from parts (`fit`: against these points, none "
        "held back); no step of this model was timed",
        "attention": "measured kernels of heads of 128 lanes that read as many bytes or compute as many products, an assumption for "
        "other widths",
        "num_blocks": f"({card.memory_gib} GiB x {MEMORY_SHARE} - weights in 16 bits - {RESERVED_GIB} GiB) / block bytes; an estimate",
        "prefill_per_kv_prefix_s": "cached tokens that a chunk attends to are read once, at the decode speed; without those in windows",
        "hidden": model.hidden_refusal or "keys and values take less",
    }
    if experts is not None:
        basis["experts_s"] = (
            f"all experts' weights at {parts.read_bytes_s / 1e12:.2f} TB/s, at which a measured product of one row reads; experts chosen "
            "alike and independently, an assumption"
        )
    if window:
        basis["windows"] = "blocks of windowed layers are free once they have left the window (models.layer_groups)"
    if model.global_attention is not None:
        basis["kv_blocks_per_group"] = (
            "layers without a window cache one tensor; a kernel that reads it at that speed is assumed"
        )
    return Hardware(
        name=card_name,
        model=name,
        num_devices=1,
        max_model_len=model.max_position,
        block_size=size,
        num_blocks=num_blocks,
        hidden_blocks_per_group=None,
        costs={"kv": rounded(costs)},
        basis=basis,
        source="Matrix products and vLLM's attention kernels from NVIDIA's kernel measurements (aiconfigurator 0.12.0), norms and "
        "activations from Vidur's profiles of Llama-2-7b-hf, by width; put together by tools/model_hardware.py. Time on the GPU "
        "alone: no host, sampling or launch gaps.",
        fit={"prefill": prefill_quality, "decode": decode_quality},
        kv_blocks_per_group=kind.blocks_per_group,
        windows=kind.windows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT.parent / "shared" / "data" / "profiles",
        help="directory of the measured profiles",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "apt_jax" / "sim" / "descriptions", help="where to write")
    args = parser.parse_args()
    profiles = Profiles(args.data)
    described = [describe(profiles, *case) for case in CASES]
    for hardware in described:
        save_hardware(hardware, args.out / f"{hardware.model}_{hardware.name}_x{hardware.num_devices}.json")
    print_table(described)


if __name__ == "__main__":
    main()
