"""Frozen configuration objects: model shape, cache, scheduling, parallelism and the engine that joins them.

Every check that needs only the values themselves is made here, and its message names the command-line flag to change.
Nothing in this module reads files, flags or the environment.
"""

import dataclasses
import math
from typing import Literal

from apt_jax.errors import ConfigError
from apt_jax.models.config import (  # noqa: F401
    Activation,
    HiddenMode,
    ModelConfig,
    NormKind,
    NormPlacement,
    Position,
    RopeConfig,
)

CacheMode = Literal["kv", "hidden", "hybrid"]
"""Which cache kinds the scheduler may use: only keys and values, only layer inputs, or either per request."""

HiddenAttention = Literal["auto", "reproject", "absorb"]
"""How attention over a hidden cache is computed; `auto` takes `absorb` wherever it is exact."""

DType = Literal["float32", "bfloat16", "float16"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_seconds(name: str, value: float) -> None:
    try:
        positive = not math.isnan(value) and value > 0
    except OverflowError:  # not printed: an integer of thousands of digits cannot be
        raise ConfigError(f"{name} is too large a number of seconds") from None
    _require(positive, f"{name}={value!r} must be a positive number of seconds")


@dataclasses.dataclass(frozen=True)
class SLO:
    """Latency objectives of one request. A request attains its SLO when its TTFT and its P99 TBT both do."""

    ttft_s: float = math.inf
    """Time from arrival to the first token, seconds."""
    tbt_s: float = math.inf
    """Gap between two consecutive tokens, seconds."""

    def __post_init__(self) -> None:
        _require_seconds("slo ttft_s", self.ttft_s)
        _require_seconds("slo tbt_s", self.tbt_s)


Quantization = Literal["int8"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The unified block pool (Apt-Serve §4.3)."""

    block_size: int = 16
    """C: keys, or values, that a block holds. Of layer inputs it holds `ModelConfig.hidden_block_size`."""
    num_blocks_override: int | None = None
    """Usable blocks, the reserved block 0 not counted; None: from the memory at hand."""
    device_memory_utilization: float = 0.9
    """Share of the device memory that is free after the weights and is given to the pool, in (0, 1]."""
    mode: CacheMode = "hybrid"
    hidden_attention: HiddenAttention = "auto"
    enable_prefix_caching: bool = True
    """Whether requests with the same beginning share the cache of it."""

    def __post_init__(self) -> None:
        _require(
            1 <= self.block_size <= 1024,
            f"block_size={self.block_size} must lie in [1, 1024] (--block-size)",
        )
        n = self.num_blocks_override
        _require(
            n is None or n >= 2,
            f"num_blocks_override={n} must be at least 2, one K and one V block (--num-blocks-override)",
        )
        u = self.device_memory_utilization
        _require(
            0.0 < u <= 1.0,
            f"device_memory_utilization={u} must lie in (0, 1] (--device-memory-utilization)",
        )
        _require(
            self.mode in ("kv", "hidden", "hybrid"),
            f"cache={self.mode!r} must be one of kv, hidden, hybrid (--cache)",
        )
        _require(
            self.hidden_attention in ("auto", "reproject", "absorb"),
            f"hidden_attention={self.hidden_attention!r} must be one of auto, reproject, absorb (--hidden-attention)",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Who runs, and how many at once."""

    policy: str = "apt"
    """Of `apt_jax.sched.POLICIES`, or from outside; with options (`apt_jax.sched.make_policy`)."""
    violation_decay: float = 0.0
    """Factor on the value of a request that has already missed its objective (Apt-Serve §6.6 uses 0.4; 0: near zero)."""
    max_num_seqs: int = 64
    """Most requests in one step, and most that hold cache at once."""
    max_num_batched_tokens: int = 512
    """Most tokens in one step; longer prompts are split into chunks."""
    max_num_queued_reqs: int = 1024
    """Waiting requests beyond which new ones are refused."""
    max_num_queued_tokens: int | None = None
    """Prompt tokens of waiting requests beyond which new ones are refused; None: no limit of its own."""
    max_queue_s: float | None = None
    """Seconds after which a request that has not begun is given up; None: it waits as long as its client does."""
    slo_admission: Literal["off", "warn", "on"] = "off"
    """What to do with requests whose TTFT objective cannot be met by the cost model: nothing, a warning, or a refusal."""
    default_slo: SLO = SLO()
    """Objectives of requests that bring none."""
    overlap: bool = True
    """Dispatch the next step before the last one's tokens are fetched."""

    def __post_init__(self) -> None:
        _require(
            0.0 <= self.violation_decay <= 1.0,
            f"violation_decay={self.violation_decay} must lie in [0, 1] (--violation-decay)",
        )
        _require(
            1 <= self.max_num_seqs <= 4096,
            f"max_num_seqs={self.max_num_seqs} must lie in [1, 4096] (--max-num-seqs)",
        )
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least max_num_seqs={self.max_num_seqs} (--max-num-batched-tokens)",
        )
        _require(
            self.max_num_queued_reqs >= 1,
            f"max_num_queued_reqs={self.max_num_queued_reqs} must be at least 1 (--max-num-queued-reqs)",
        )
        n = self.max_num_queued_tokens
        _require(
            n is None or n >= 1,
            f"max_num_queued_tokens={n} must be at least 1 (--max-num-queued-tokens)",
        )
        t = self.max_queue_s
        _require(
            t is None or 0.0 < t < float("inf"),
            f"max_queue_s={t} must be positive (--max-queue-s)",
        )
        _require(
            self.slo_admission in ("off", "warn", "on"),
            f"slo_admission={self.slo_admission!r} must be 'off', 'warn' or 'on' (--slo-admission)",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Devices of one replica."""

    tensor_parallel_size: int = 1
    """Devices that share every layer, of all hosts together (-tp)."""
    nnodes: int = 1
    """Hosts, each with a process and as many of the devices."""
    node_rank: int = 0
    """Which of them this is; 0 schedules and serves."""
    master_addr: str = "127.0.0.1"
    """Address of rank 0, where the others reach it."""
    master_port: int = 29501
    """Port there; JAX takes the next one."""
    join_timeout_s: float = 300.0
    """How long ranks wait for each other before anything is loaded, seconds."""

    def __post_init__(self) -> None:
        _require(
            1 <= self.tensor_parallel_size <= 1024,
            f"tensor_parallel_size={self.tensor_parallel_size} must lie in [1, 1024] (-tp)",
        )
        _require(self.nnodes >= 1, f"nnodes={self.nnodes} must be at least 1 (--nnodes)")
        _require(
            0 <= self.node_rank < self.nnodes,
            f"node_rank={self.node_rank} must lie in [0, {self.nnodes}), as nnodes={self.nnodes} (--node-rank, --nnodes)",
        )
        _require(
            self.tensor_parallel_size % self.nnodes == 0,
            f"tensor_parallel_size={self.tensor_parallel_size} is the number of devices of all hosts and does not divide among {self.nnodes} (-tp, --nnodes)",
        )
        _require(bool(self.master_addr), "master_addr must not be empty (--master-addr)")
        _require(
            1 <= self.master_port < 65535,
            f"master_port={self.master_port} must lie in [1, 65535), and the next one be free too (--master-port)",
        )
        _require(
            self.join_timeout_s > 0,
            f"join_timeout_s={self.join_timeout_s} must be positive (--join-timeout)",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that `apt_jax.llm.build_engine` needs to make an engine."""

    model: str
    """A bundled name (``tiny-opt``), a directory in Hugging Face format or in ours for Orbax, a ``.gguf`` file, a hub id
    (``owner/model`` or ``owner/model@revision``), or with `load_format="dummy"` any known size (``opt-13b``)."""
    tokenizer: str | None = None
    """Directory with a tokenizer.json, or a ``.gguf`` file; None: the model's own."""
    chat_template: str | None = None
    """File of a chat template (Jinja) in place of the model's, or ``none``; None: the model's own, if it has one."""
    dtype: DType = "float32"
    load_format: Literal["auto", "safetensors", "orbax", "gguf", "pt", "dummy"] = "auto"
    """What the model's files must be. `pt` opens PyTorch `.bin` files with weights_only loading, and only when asked
    for."""
    max_model_len: int | None = None
    """Longest prompt plus output, tokens; None: the model's own limit."""
    served_model_name: str | None = None
    quantization: Quantization = None
    """"int8": weights as integers with a scale for each output; products and cache keep their dtype."""
    attention_backend: str | None = None
    """Implementation of the attention kernels, a name from `apt_jax.pallas.known_attention_ops()`; None: the
    platform's."""
    seed: int = 0
    """Seed of dummy weights and of requests that bring none."""
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()

    def __post_init__(self) -> None:
        _require(bool(self.model), "model must not be empty (MODEL)")
        _require(
            self.dtype in ("float32", "bfloat16", "float16"),
            f"dtype={self.dtype!r} must be one of float32, bfloat16, float16 (--dtype)",
        )
        _require(
            self.quantization in (None, "int8"),
            f"quantization={self.quantization!r} must be int8, or None for weights as they are (--quantization)",
        )
        _require(
            self.load_format in ("auto", "safetensors", "orbax", "gguf", "pt", "dummy"),
            f"load_format={self.load_format!r} must be one of auto, safetensors, orbax, gguf, pt, dummy (--load-format)",
        )
        _require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"max_model_len={self.max_model_len} must be at least 2 (--max-model-len)",
        )
        _require(0 <= self.seed < 2**32, f"seed={self.seed} must lie in [0, 2**32) (--seed)")
        _require(
            self.quantization is None or self.parallel.tensor_parallel_size == 1,
            f"quantization={self.quantization!r} runs on one device; leave out -tp or --quantization",
        )
