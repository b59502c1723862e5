"""Write `apt_jax/sim/descriptions/*.json`: what models cost on hardware that is not here, from measured profiles.

Nothing is timed here. The inputs are public measurements and published fits (their README says what each is); the
output is deterministic. Three ways to a description:

* OPT on A100 40 GB: DistServe's published fits on 80 GB cards, scaled by memory bandwidth. The three sizes of
  Apt-Serve come ready from `opt_a100_iteration_model.csv`; tp 2 and tp 4 of BROS are scaled here in the same way.
* Others on A100: operators of one layer (Vidur) + attention and all-reduce kernels, put together to whole steps on a
  grid of sizes; a non-negative least squares fit on relative errors, a phase at a time, as `costs.fit` does.
* H100 and H200: the same with matrix products from the kernel files in place of the layers.

The hidden cache has no public measurements. Reprojection is the two products at their measured speed plus the bytes it
moves; absorption is arithmetic over bytes and operations (see `_absorb`): a model until measured.

    python -m tools.hardware_descriptions [--data DIRECTORY] [--out DIRECTORY]
"""

import argparse
import csv
import dataclasses
import functools
import gzip
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from apt_jax.costs.hardware import Hardware
from apt_jax.costs.model import StepCosts
from apt_jax.sim.hardware import save_hardware

ROOT = Path(__file__).resolve().parents[1]
BLOCK_SIZE = 16
GIB = 2**30

RESERVED_GIB = 0.74
"""Memory per GPU that is neither weights nor pool; from a public vLLM log (README of the data)."""
MEMORY_SHARE = 0.9
COPY_SHARE = 1.3 / 1.555
"""Share of the memory bandwidth that gather and copy of layer inputs reach: 1.3 TB/s on an A100 40 GB, an
assumption."""
WEIGHT_READ_80G = 1.76e12
"""Bytes/s at which an A100 80 GB reads weights in a decode step (86 % of its peak)."""
BANDWIDTH_80_TO_40 = 2039 / 1555
"""A100: memory bandwidth of the 80 GB card over that of the 40 GB one."""
TENSOR_SHARE = 0.6
"""Share of the tensor-core peak in attention over hidden cache."""
LINK_BYTES_S = 230e9
"""Ring bus bandwidth of NVLink between A100s."""
COLLECTIVES_S = (15 + 12 + 12) * 1e-6
"""Latency a layer of absorption under tensor parallelism: all-reduce of scores, all-gather of q, reduce-scatter of
o."""
COLLECTIVES_SHARED_BY = 64
"""Requests that share that latency. `StepCosts` has no term a step for hidden rows, so it is charged to requests."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """A kind of GPU: usable memory, peaks, and its name in the profiles."""

    memory_gib: float
    bandwidth: float
    """Bytes/s, peak."""
    tensor_flops: float
    """bf16 without sparsity, peak."""
    profile: str


CARDS = {
    "a100-40gb": Card(memory_gib=39.5, bandwidth=1.555e12, tensor_flops=312e12, profile="a100_sxm"),
    "a100-80gb": Card(memory_gib=79.2, bandwidth=2.039e12, tensor_flops=312e12, profile="a100_sxm"),
    "h100-80gb": Card(memory_gib=79.1, bandwidth=3.35e12, tensor_flops=989e12, profile="h100_sxm"),
    "h200": Card(memory_gib=139.8, bandwidth=4.8e12, tensor_flops=989e12, profile="h200_sxm"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model's shape; 16-bit weights and cache, head size 128."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    max_len: int
    rotary: bool = True
    vidur: str = ""
    """The model whose layers Vidur has measured; differences are scaled (`_linear_vidur`)."""

    @property
    def params(self) -> float:
        d, f = self.hidden, self.ffn
        qkv_out = d * (2 * d + 2 * self.kv_heads * 128)
        if self.rotary:  # gated, untied head, no biases
            return self.layers * (qkv_out + 3 * d * f) + 2 * self.vocab * d
        return self.layers * (qkv_out + 2 * d * f) + (self.vocab + 2050) * d

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per token, all layers."""
        return self.layers * 2 * self.kv_heads * 128 * 2

    @property
    def offers_hidden(self) -> bool:
        return self.kv_heads == self.heads


def _opt(layers: int, hidden: int) -> Model:
    return Model(
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=hidden // 128,
        kv_heads=hidden // 128,
        vocab=50272,
        max_len=2048,
        rotary=False,
    )


MODELS = {
    "opt-13b": _opt(40, 5120),
    "opt-30b": _opt(48, 7168),
    "opt-66b": _opt(64, 9216),
    "llama-2-7b": Model(
        layers=32,
        hidden=4096,
        ffn=11008,
        heads=32,
        kv_heads=32,
        vocab=32000,
        max_len=4096,
        vidur="Llama-2-7b-hf",
    ),
    "llama-3-8b": Model(
        layers=32,
        hidden=4096,
        ffn=14336,
        heads=32,
        kv_heads=8,
        vocab=128256,
        max_len=8192,
        vidur="Meta-Llama-3-8B",
    ),
    "llama-3-70b": Model(
        layers=80,
        hidden=8192,
        ffn=28672,
        heads=64,
        kv_heads=8,
        vocab=128256,
        max_len=8192,
        vidur="Meta-Llama-3-70B",
    ),
    "qwen2.5-32b": Model(
        layers=64,
        hidden=5120,
        ffn=27648,
        heads=40,
        kv_heads=8,
        vocab=152064,
        max_len=131_072,
    ),
    "yi-6b": Model(
        layers=32,
        hidden=4096,
        ffn=11008,
        heads=32,
        kv_heads=4,
        vocab=64000,
        max_len=200_000,
        vidur="Llama-2-7b-hf",
    ),
}


def _rows(path: Path) -> list[dict[str, str]]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return list(csv.DictReader(text.decode().splitlines()))


def _interp(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Piecewise linear; before the first point its value, beyond the last the slope over the upper half of the
    range."""
    if x <= xs[-1] or len(xs) < 2:
        return float(np.interp(x, xs, ys))
    # Neighbours alone would not do: in thinned tables they lie so close that noise decides.
    half = max(i for i, at in enumerate(xs) if i == 0 or at <= xs[-1] / 2)
    return float(ys[-1] + (x - xs[-1]) * (ys[-1] - ys[half]) / (xs[-1] - xs[half]))


def _log_interp(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    return float(np.exp(np.interp(np.log(x), np.log(xs), np.log(ys))))


class Profiles:
    """The measured tables; every answer in seconds."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._gemm: dict[tuple[str, str], dict[int, dict[tuple[int, int], float]]] = {}
        for row in _rows(directory / "kernel_gemm_bf16.csv.gz"):
            by_m = self._gemm.setdefault((row["gpu"], row["framework"]), {})
            cell = by_m.setdefault(int(row["m"]), {})
            cell[int(row["n"]), int(row["k"])] = float(row["ms"]) * 1e-3
        self._attention: dict[
            tuple[str, str, int, int], dict[int, dict[int, float]]
        ] = {}  # (phase, gpu, heads, kv heads) -> length -> batch -> seconds
        for phase, column in (("decode", "kv_len"), ("prefill", "prompt_len")):
            for row in _rows(directory / f"kernel_{phase}_attention_bf16.csv.gz"):
                if row["framework"] == "vllm":
                    key = (phase, row["gpu"], int(row["num_heads"]), int(row["kv_heads"]))
                    by_len = self._attention.setdefault(key, {}).setdefault(int(row[column]), {})
                    by_len[int(row["batch"])] = float(row["ms"]) * 1e-3
        self._allreduce: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
        for row in _rows(directory / "kernel_allreduce_16bit.csv"):
            key = (row["gpu"], int(row["gpus"]), row["impl"])
            self._allreduce.setdefault(key, []).append((float(row["bytes"]), float(row["ms"]) * 1e-3))
        self._vidur: dict[tuple[str, str, int], list[dict[str, float]]] = {}
        for row in _rows(directory / "vidur_linear_layers.csv.gz"):
            key = (row["gpu"], row["model"], int(row["tp"]))
            self._vidur.setdefault(key, []).append(
                {name: float(value or 0) for name, value in row.items() if name not in ("gpu", "model")}
            )

    @functools.cache  # noqa: B019  one instance, as long as the script
    def gemm_s(self, gpu: str, m: int, n: float, k: float) -> float:
        """An m x k by k x n product; between the measured sizes linear in each of m, n and k."""
        by_m = self._gemm[gpu, "vllm"]
        ms = sorted(by_m)
        below = [x for x in ms if x <= m][-1:] or ms[:1]
        above = [x for x in ms if x >= m][:1] or ms[-2:]
        near = sorted({*below, *above})
        return _interp(m, near, [self._gemm_at(by_m[x], n, k) for x in near])

    @staticmethod
    def _gemm_at(cell: Mapping[tuple[int, int], float], n: float, k: float) -> float:
        ks = sorted({key[1] for key in cell})
        times, at = [], []
        for measured_k in ks:
            ns = sorted(key[0] for key in cell if key[1] == measured_k)
            if ns[-1] >= min(n, 65536):
                at.append(measured_k)
                times.append(_interp(n, ns, [cell[x, measured_k] for x in ns]))
        return _interp(k, at, times)

    def attention_s(self, phase: str, gpu: str, model: Model, tp: int, batch: int, length: int) -> float | None:
        """One layer's attention on one GPU; None outside the measured sizes.

        (sequence, KV head) pairs are independent, so a batch over K heads is taken as one of batch * K / 8 over the 8
        heads that are measured, at the same number of query heads a KV head.
        """
        return self.kernel_s(phase, gpu, model.heads // model.kv_heads, batch * model.kv_heads / tp / 8, length)

    @property
    def measured_heads(self) -> list[tuple[str, str, int, int]]:
        """Measured (phase, GPU, query heads, key heads) of attention."""
        return list(self._attention)

    def kernel_s(self, phase: str, gpu: str, group: int, equivalent: float, length: int) -> float | None:
        """One layer's attention of `equivalent` requests over 8 key heads of 128 lanes, `group` query heads each; None
        outside the measured sizes."""
        by_batch = self._attention[phase, gpu, 8 * group, 8].get(length)
        if by_batch is None or equivalent > max(by_batch):
            return None
        batches = sorted(by_batch)
        if equivalent < batches[0]:
            shortest = self._attention[phase, gpu, 8 * group, 8]
            floor = shortest[min(shortest)][batches[0]]
            return max(floor, by_batch[batches[0]] * equivalent / batches[0])
        return _log_interp(equivalent, batches, [by_batch[b] for b in batches])

    def allreduce_s(self, gpu: str, tp: int, num_bytes: float) -> float:
        """The faster of NCCL and vLLM's own kernel in a graph."""
        if tp == 1:
            return 0.0
        times = []
        for impl in ("nccl", "vllm_graph"):
            points = sorted(self._allreduce[gpu, tp, impl])
            times.append(_log_interp(num_bytes, [p[0] for p in points], [p[1] for p in points]))
        return min(times)

    def vidur_s(self, gpu: str, model: str, tp: int, column: str, tokens: int) -> float:
        """One operator of one layer on one GPU."""
        rows = self._vidur[gpu, model, tp]
        return 1e-3 * _interp(tokens, [row["num_tokens"] for row in rows], [row[column] for row in rows])


def _linear_vidur(profiles: Profiles, model: Model, tp: int, tokens: int) -> float:
    """One layer without attention on an A100, from Vidur's operators."""
    total = profiles.vidur_s("a100", model.vidur, tp, "layer_sum_ms", tokens)
    if model is MODELS["yi-6b"]:
        # Llama-2-7B's layer with fewer KV heads: qkv of Llama-3-8B has (32 + 2 * 8) heads, Yi (32 + 2 * 4).
        total -= profiles.vidur_s("a100", model.vidur, tp, "qkv_proj", tokens)
        total += profiles.vidur_s("a100", "Meta-Llama-3-8B", tp, "qkv_proj", tokens) * 40 / 48
    return total


def _linear_kernels(profiles: Profiles, model: Model, gpu: str, tp: int, tokens: int) -> float:
    """One layer without attention on each of `tp` GPUs: products from the kernel files, the rest from Vidur's H100."""
    d, f = model.hidden, model.ffn / tp
    heads, qkv = d / tp, (d + 2 * model.kv_heads * 128) / tp
    up = 2 * f if model.rotary else f
    total = sum(profiles.gemm_s(gpu, tokens, n, k) for n, k in ((qkv, d), (d, heads), (up, d), (d, f)))
    like, ffn_like = ("Llama-2-7b-hf", 11008) if d == 4096 else ("internlm-20b", 13824)
    columns = ["norm1", "norm2", "residual_add", *(["rope"] if model.rotary else [])]
    total += sum(profiles.vidur_s("h100", like, 1, column, tokens) for column in columns)
    # Elements that the activation moves: gate, up and result where gated, else operand and result.
    moved = (3 if model.rotary else 2) * f / (3 * ffn_like)
    return total + profiles.vidur_s("h100", like, 1, "mlp_act", tokens) * moved


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One step put together from its parts, seconds."""

    linear: Sequence[float]
    """Features of the part without attention."""
    linear_s: float
    read: Sequence[float]
    """Features of attention."""
    read_s: float


def fit_parts(
    points: Sequence[Point], known_s: Sequence[float] | None = None
) -> tuple[list[float], list[float], dict[str, float]]:
    """Coefficients of both parts and how well their sum meets the steps, each longer by `known_s`.

    Non-negative least squares on errors relative to the whole step. The parts are fitted apart: a joint fit would give
    the curvature of the linear layers to the attention of long prompts, which then exceeds what the card can do.
    """
    known = np.zeros(len(points)) if known_s is None else np.array(known_s)
    step_s = np.array([point.linear_s + point.read_s for point in points]) + known

    def solve(features: Sequence[Sequence[float]], part_s: Sequence[float]) -> NDArray[np.float64]:
        a = np.array(features, np.float64) / step_s[:, None]
        scale = np.abs(a).max(axis=0)
        return nnls(a / scale, np.array(part_s) / step_s)[0] / scale

    linear = solve([p.linear for p in points], [p.linear_s for p in points])
    read = solve([p.read for p in points], [p.read_s for p in points])
    predicted = known + np.array([p.linear for p in points]) @ linear + np.array([p.read for p in points]) @ read
    error = np.abs(predicted - step_s)
    quality = {
        "num_points": len(points),
        "r2": round(float(1 - (error**2).sum() / ((step_s - step_s.mean()) ** 2).sum()), 4),
        "worst_relative_error": round(float((error / step_s).max()), 3),
        "mean_relative_error": round(float((error / step_s).mean()), 3),
    }
    return linear.tolist(), read.tolist(), quality


def _fit_step(
    profiles: Profiles,
    model: Model,
    gpu: str,
    tp: int,
    linear: Callable[[int], float],
    num_kv_tokens: int,
    max_len: int,
) -> tuple[StepCosts, dict[str, dict[str, float]]]:
    """Whole steps on a grid of sizes, put together from their parts, and the linear model that meets them best."""

    def linear_s(tokens: int, samples: int) -> float:
        reduce_s = profiles.allreduce_s(gpu, tp, tokens * model.hidden * 2)
        head_s = profiles.gemm_s(gpu, samples, model.vocab / tp, model.hidden)
        return model.layers * (linear(tokens) + 2 * reduce_s) + head_s

    points = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for length in (2**i for i in range(6, 18)):
            attention_s = profiles.attention_s("decode", gpu, model, tp, batch, length)
            # What the pool can hold, and a margin.
            if attention_s and length <= max_len and batch * length <= 1.25 * num_kv_tokens:
                points.append(
                    Point(
                        linear=[1, batch],
                        linear_s=linear_s(batch, batch),
                        read=[1, batch, batch * length],
                        read_s=model.layers * attention_s,
                    )
                )
    decode_linear, decode_read, decode_quality = fit_parts(points)
    points = []
    budget = min(max(2048, max_len), 16384)  # most tokens that a step is given
    for batch in (1, 2, 4, 8, 16, 32):
        for length in (16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192):
            attention_s = profiles.attention_s("prefill", gpu, model, tp, batch, length)
            tokens = batch * length
            if attention_s and length <= max_len and 64 <= tokens <= budget:
                points.append(
                    Point(
                        linear=[1, tokens, batch],
                        linear_s=linear_s(tokens, batch),
                        read=[1, tokens, batch, batch * length**2],
                        read_s=model.layers * attention_s,
                    )
                )
    prefill_linear, prefill_read, prefill_quality = fit_parts(points)
    costs = StepCosts(
        prefill_base_s=prefill_linear[0] + prefill_read[0],
        prefill_per_token_s=prefill_linear[1] + prefill_read[1],
        prefill_per_request_s=prefill_linear[2] + prefill_read[2],
        prefill_per_pair_s=prefill_read[3],
        prefill_per_kv_prefix_s=decode_read[2],
        decode_base_s=decode_linear[0] + decode_read[0],
        decode_per_request_s=decode_linear[1] + decode_read[1],
        decode_per_token_s=decode_read[2],
    )
    return costs, {"prefill": prefill_quality, "decode": decode_quality}


def _to_40g(costs: StepCosts, model: Model, tp: int) -> StepCosts:
    """From an A100 80 GB to 40 GB: reading weights and cache takes longer by the ratio of the bandwidths."""
    weights_s = 2 * model.params / tp / WEIGHT_READ_80G
    token_s = costs.decode_per_token_s * BANDWIDTH_80_TO_40
    return dataclasses.replace(
        costs,
        decode_base_s=costs.decode_base_s + weights_s * (BANDWIDTH_80_TO_40 - 1),
        decode_per_token_s=token_s,
        prefill_per_kv_prefix_s=token_s,
    )


def _reproject(kv: StepCosts, extra_per_token_s: float) -> StepCosts:
    """Hidden rows that compute K and V of all cached tokens again in every step (Apt-Serve §4.2)."""
    per_token_s = kv.decode_per_token_s + extra_per_token_s
    return dataclasses.replace(
        kv,
        decode_per_hidden_request_s=kv.decode_per_request_s,
        decode_per_hidden_token_s=per_token_s,
        prefill_per_hidden_prefix_s=kv.prefill_per_kv_prefix_s + extra_per_token_s,
    )


def _reproject_extra_s(profiles: Profiles, model: Model, card: Card, tp: int) -> float:
    """Seconds a hidden token: products at 4,096 tokens, then gather, copy and write of what they read and make.

    A GPU makes a 1/tp slice of K and V from whole layer inputs: reads and writes X (together as many bytes as K and V)
    and writes and reads its slice. Gathering an X that is sharded by feature is not in it.
    """
    tokens = 4096
    product_s = profiles.gemm_s(card.profile, tokens, 2 * model.hidden / tp, model.hidden)
    moved_bytes = model.kv_bytes * (1 + 1 / tp)
    return product_s * model.layers / tokens + moved_bytes / (card.bandwidth * COPY_SHARE)


def _absorb(reproject: StepCosts, model: Model, card: Card, tp: int) -> StepCosts:
    """Two-kernel absorption: scores from X, then P X; X is read twice, as many bytes as K and V once.

    Bytes per layer over n tokens of one request: 4 d n (X, twice) + 4 H n (P, written and read) + 8 H d (q~ and z,
    written and read, whatever n is). All move at the speed at which the row at hand reads keys and values. Operations
    are 2 * 2 H d n with H padded to a multiple of 16, at 60 % of the tensor peak; what is slower of the two counts.
    Under tensor parallelism X is cut by feature; scores of all heads are summed over GPUs. Prefill chunks reproject:
    over about 131 query tokens that is the cheaper way.
    """
    d, heads, layers = model.hidden, model.heads, model.layers
    bytes_s = model.kv_bytes / tp / reproject.decode_per_token_s  # a GPU
    memory_s = layers * (4 * d / tp + 4 * heads) / bytes_s
    padded = -(-heads // 16) * 16
    tensor_s = layers * 4 * padded * d / tp / (card.tensor_flops * TENSOR_SHARE)
    token_s = max(memory_s, tensor_s)
    request_s = layers * 8 * heads * d / tp / bytes_s
    if tp > 1:
        ring = (tp - 1) / tp / LINK_BYTES_S
        token_s += layers * 2 * (2 * heads) * ring
        request_s += layers * (2 * (2 * d) * ring + COLLECTIVES_S / COLLECTIVES_SHARED_BY)
    return dataclasses.replace(
        reproject,
        decode_per_hidden_token_s=token_s,
        decode_per_hidden_request_s=reproject.decode_per_request_s + request_s,
    )


def rounded(costs: StepCosts) -> StepCosts:
    numbers = dataclasses.asdict(costs)
    one_program = numbers.pop("one_program")
    return StepCosts(**{k: float(f"{v:.6g}") for k, v in numbers.items()}, one_program=one_program)


def _pool_tokens(model: Model, card: Card, tp: int) -> int:
    """KV tokens beside the weights, in whole blocks."""
    weights = 2 * model.params
    free = (card.memory_gib * MEMORY_SHARE - RESERVED_GIB) * GIB * tp - weights
    return int(free / model.kv_bytes / BLOCK_SIZE) * BLOCK_SIZE


_REPROJECT = (
    "K and V products of all layers at their measured speed with 4,096 tokens, plus moved bytes at 84 % of the memory "
    "bandwidth (an assumption); small batches cost more a token"
)
_ABSORB = (
    "model until measured: two kernels that read X twice at this row's KV bandwidth, 8 H d bytes a layer and request for "
    "q~ and z, tensor cores at 60 % of peak; prefill chunks over a hidden prefix reproject"
)
_PREFIX = "cached tokens that a chunk attends to are read once, at the decode speed"


def _capacity(card: Card) -> str:
    return (
        f"({card.memory_gib} GiB x {MEMORY_SHARE} - weights per GPU - {RESERVED_GIB} GiB) x GPUs / KV bytes; "
        "an estimate, about 5 %"
    )


def _describe(
    *,
    name: str,
    model_name: str,
    num_devices: int,
    kv: StepCosts,
    extra_s: float | None,
    num_kv_tokens: int,
    max_len: int,
    basis: dict[str, str],
    source: str,
    fit: Mapping[str, Mapping[str, float]],
) -> Hardware:
    model, card = MODELS[model_name], CARDS[name]
    kv = rounded(kv)
    basis = {**basis, "prefill_per_kv_prefix_s": _PREFIX}
    if extra_s is None:
        costs = {"kv": kv}
        few = "with few KV heads layer inputs are not smaller than keys and values"
        basis |= {"hidden": few, "absorb": few}
    else:
        reproject = _reproject(kv, extra_s)
        costs = {"reproject": rounded(reproject)}
        basis["reproject"] = _REPROJECT
        if not model.rotary:
            costs["absorb"] = rounded(_absorb(reproject, model, card, num_devices))
            basis["absorb"] = _ABSORB
        else:
            basis["absorb"] = "not exact with rotary embedding"
    return Hardware(
        name=name,
        model=model_name,
        num_devices=num_devices,
        max_model_len=max_len,
        block_size=BLOCK_SIZE,
        num_blocks=2 * (num_kv_tokens // BLOCK_SIZE),
        hidden_blocks_per_group=1 if model.offers_hidden else None,
        costs=costs,
        basis=basis,
        source=source,
        fit=fit,
    )


def _opt_of_apt_serve(profiles: Profiles) -> list[Hardware]:
    """OPT-13B, 30B and 66B on 1, 2 and 4 A100 40 GB (Apt-Serve Table 2)."""
    described = []
    for row in _rows(profiles.directory / "opt_a100_iteration_model.csv"):
        token_s = float(row["decode_ms_per_kv_token_40g"]) * 1e-3
        kv = StepCosts(
            prefill_base_s=float(row["prefill_const_ms"]) * 1e-3,
            prefill_per_token_s=float(row["prefill_ms_per_token"]) * 1e-3,
            prefill_per_pair_s=float(row["prefill_ms_per_token2"]) * 1e-3,
            prefill_per_kv_prefix_s=token_s,
            decode_base_s=float(row["decode_const_ms_40g"]) * 1e-3,
            decode_per_request_s=float(row["decode_ms_per_request"]) * 1e-3,
            decode_per_token_s=token_s,
        )
        extra_us = sum(float(row[f"hidden_{part}_us_per_token"]) for part in ("recompute", "copy"))
        described.append(
            _describe(
                name="a100-40gb",
                model_name=row["model"],
                num_devices=int(row["tp"]),
                kv=kv,
                extra_s=extra_us * 1e-6,
                num_kv_tokens=int(row["kv_blocks16_est"]) * BLOCK_SIZE,
                max_len=2048,
                basis={
                    "prefill, decode": f"{row['basis']}: reading weights and cache slower by 2039/1555, compute unchanged",
                    "num_blocks": _capacity(CARDS["a100-40gb"]),
                },
                source="DistServe's published fits of OPT-13B and 66B on A100-SXM 80 GB (its own engine, decode batches "
                "up to 95), scaled to 40 GB; host time of that engine is in them. The source states no fit error.",
                fit={},
            )
        )
    return described


def _opt_of_bros(profiles: Profiles) -> list[Hardware]:
    """OPT-13B on 2 and OPT-30B on 4 A100 40 GB (BROS §7.1)."""
    fits: dict[tuple[str, int, str], NDArray[np.float64]] = {}
    for row in _rows(profiles.directory / "distserve_opt_a100_80g_fits.csv"):
        if row["engine"] == "distserve":
            values = [row["const_ms"], row["ms_per_token"], row["ms_per_token2_or_request"]]
            fits[row["model"], int(row["tp"]), row["phase"]] = 1e-3 * np.array(values, dtype=np.float64)
    small, middle, large = (MODELS[f"opt-{size}b"] for size in (13, 30, 66))
    by_params = (middle.params - small.params) / (large.params - small.params)
    by_width = (middle.kv_bytes - small.kv_bytes) / (large.kv_bytes - small.kv_bytes)

    def between(phase: str, share: NDArray[np.float64]) -> NDArray[np.float64]:
        low, high = fits["opt-13b", 4, phase], fits["opt-66b", 4, phase]
        return low + share * (high - low)

    cases = [
        (
            "opt-13b",
            2,
            fits["opt-13b", 2, "prefill"],
            fits["opt-13b", 2, "decode_small_batch"],
            "measured fit (80 GB, tp 2), bandwidth-scaled to 40 GB",
        ),
        (
            "opt-30b",
            4,
            between("prefill", np.array([by_params, by_params, by_width])),
            between("decode_small_batch", np.array([by_params, by_width, by_width])),
            "not measured: between the 13B and 66B tp 4 fits, weights by parameters, attention and requests by layers x "
            "width; bandwidth-scaled to 40 GB",
        ),
    ]
    described = []
    card = CARDS["a100-40gb"]
    for name, tp, prefill, decode, how in cases:
        model = MODELS[name]
        kv = StepCosts(
            prefill_base_s=float(prefill[0]),
            prefill_per_token_s=float(prefill[1]),
            prefill_per_pair_s=float(prefill[2]),
            decode_base_s=float(decode[0]),
            decode_per_token_s=float(decode[1]),
            decode_per_request_s=float(decode[2]),
        )
        described.append(
            _describe(
                name="a100-40gb",
                model_name=name,
                num_devices=tp,
                kv=_to_40g(kv, model, tp),
                extra_s=_reproject_extra_s(profiles, model, card, tp),
                num_kv_tokens=_pool_tokens(model, card, tp),
                max_len=2048,
                basis={"prefill, decode": how, "num_blocks": _capacity(card)},
                source="DistServe's published fits of OPT on A100-SXM 80 GB (its own engine, decode batches up to 95); host "
                "time of that engine is in them. The source states no fit error.",
                fit={},
            )
        )
    return described


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A description that is put together from operators and fitted."""

    card: str
    model: str
    tp: int = 1
    max_len: int | None = None
    num_kv_tokens: int | None = None
    """Published capacity; None: estimated."""
    note: str = ""


CASES = [
    Case(
        card="a100-80gb",
        model="llama-2-7b",
        num_kv_tokens=100_000,
        note="InferMax §4.1: KV capacity 100K tokens, context limit 4096. ",
    ),
    Case(
        card="a100-80gb",
        model="llama-3-70b",
        tp=4,
        max_len=16384,
        num_kv_tokens=100_000,
        note="InferMax §6: KV capacity 100K tokens, at most 16384 tokens a request and batch (the model's own limit is 8192). "
        "Splitwise measured Llama-2-70B on such cards with an engine of 2023: 227 ms for a prompt of 1,024 tokens (here 201), "
        "45 ms for one decoding request (here 27), host time included. ",
    ),
    Case(card="a100-80gb", model="llama-3-70b", tp=8, note="BROS §7.1. "),
    *(
        Case(card="a100-40gb", model=model, tp=tp, max_len=max_len, note="Apt-Serve §6.7. ")
        for model, max_len in (("llama-3-8b", 262_144), ("yi-6b", 200_000))
        for tp in (1, 2, 4)
    ),
    *(
        Case(card=card, model=model)
        for card in ("h100-80gb", "h200")
        for model in ("opt-13b", "llama-2-7b", "llama-3-8b")
    ),
    Case(card="h100-80gb", model="qwen2.5-32b", tp=2, note="Beyond 8,192 prompt tokens the fit is extended. "),
]


def _fitted(profiles: Profiles, case: Case) -> Hardware:
    model, card, tp = MODELS[case.model], CARDS[case.card], case.tp
    gpu = card.profile
    max_len = case.max_len or model.max_len
    num_kv_tokens = case.num_kv_tokens or _pool_tokens(model, card, tp)

    def linear(tokens: int) -> float:
        if gpu == "a100_sxm":
            return _linear_vidur(profiles, model, tp, tokens)
        return _linear_kernels(profiles, model, gpu, tp, tokens)

    kv, fit = _fit_step(profiles, model, gpu, tp, linear, num_kv_tokens, max_len)
    how = (
        "non-negative least squares on whole steps put together from measured parts"
        " (`fit`: against these points, none held back)"
    )
    if case.card == "a100-40gb":
        kv = _to_40g(kv, model, tp)
        how += ", 80 GB card; reading weights and cache then slower by 2039/1555, compute unchanged"
    if gpu == "a100_sxm":
        layers = f"layers without attention from Vidur's profiles ({model.vidur}, A100)"
        if case.model == "yi-6b":
            layers += " with the qkv product scaled from 48 to 40 heads"
    else:
        layers = (
            "matrix products from NVIDIA's kernel measurements, norms and activations from Vidur's H100 profiles of "
            f"layers as wide ({'internlm-20b' if model.hidden == 5120 else 'Llama-2-7b-hf'})"
        )
    reduce = "; the faster of NCCL's and vLLM's all-reduce" if tp > 1 else ""
    published = case.num_kv_tokens is not None
    return _describe(
        name=case.card,
        model_name=case.model,
        num_devices=tp,
        kv=kv,
        extra_s=_reproject_extra_s(profiles, model, card, tp) if model.offers_hidden else None,
        num_kv_tokens=num_kv_tokens,
        max_len=max_len,
        basis={
            "prefill, decode": how,
            "num_blocks": "as published" if published else _capacity(card),
        },
        source=f"{case.note}Per step: {layers}; vLLM's attention kernels and the output head from NVIDIA's kernel "
        f"measurements (aiconfigurator 0.12.0){reduce}. Time on the GPU alone: no host, sampling or launch gaps.",
        fit=fit,
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
    described = [
        *_opt_of_apt_serve(profiles),
        *_opt_of_bros(profiles),
        *(_fitted(profiles, case) for case in CASES),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    for hardware in described:
        save_hardware(
            hardware,
            args.out / f"{hardware.model}_{hardware.name}_x{hardware.num_devices}.json",
        )
    print_table(described)


def print_table(described: Sequence[Hardware]) -> None:
    """One line per description: pool, what steps cost, how well the fit meets its points."""
    print(
        f"{'description':26}{'KV tokens':>11}{'1k prompt':>11}{'64 x 512':>10}{'t/token':>9}"
        "   prefill R2, worst   decode R2, worst"
    )
    print(f"{'':26}{'':>11}{'ms':>11}{'decode ms':>10}{'hidden us':>9}")
    for hardware in described:
        costs = hardware.step_costs()
        one = np.ones(64, np.int32)
        prompt_s = costs.step_s(np.array([1024]), np.array([0]), np.zeros(1, np.int8))
        decode_s = costs.step_s(one, 511 * one, np.zeros(64, np.int8))
        extra = hardware.costs.get("reproject")
        extra_us = 1e6 * (extra.decode_per_hidden_token_s - extra.decode_per_token_s) if extra else 0
        fits = [hardware.fit.get(phase, {}) for phase in ("prefill", "decode")]
        stated = "   ".join(
            f"{fit['r2']:.4f} {100 * fit['worst_relative_error']:5.0f} %" if fit else " as published " for fit in fits
        )
        title = f"{hardware.model} {hardware.name} x{hardware.num_devices}"
        print(
            f"{title:26}{hardware.num_kv_tokens:11,}{1e3 * prompt_s:11.1f}{1e3 * decode_s:10.1f}{extra_us:9.2f}   {stated}"
        )


if __name__ == "__main__":
    main()
