"""Frozen configuration objects: model shape, cache, scheduling, parallelism and the engine that joins them.

Every check that needs only the values themselves is made here, and its message names the command-line flag to change.
Nothing in this module reads files, flags or the environment.
"""

import dataclasses
import math
from typing import Literal

from apt_jax.errors import ConfigError

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer, whatever checkpoint family it came from."""

    family: str
    """Name of the mapping file in `apt_jax/models/` that loads it, e.g. ``"opt"``."""
    vocab_size: int
    """V: rows of the embedding table and width of the logits."""
    hidden_size: int
    """D: width of the residual stream."""
    num_layers: int
    """L."""
    num_heads: int
    """N: query heads."""
    num_kv_heads: int
    """K: key/value heads; equal to `num_heads` for multi-head attention."""
    head_dim: int
    """H: width of one head."""
    ffn_size: int
    """F: width of the feed-forward layer."""
    max_position: int
    """Longest context in tokens that the position embeddings cover."""
    embedding_size: int | None = None
    """Width of the token embeddings where it differs from D (OPT-350M projects 512 to 1024); None: equal to D."""
    activation: Literal["relu"] = "relu"
    norm_before: bool = True
    """Pre-norm (layer norm before attention and feed-forward) or post-norm (OPT-350M)."""
    final_norm: bool = True
    """A layer norm after the last layer (pre-norm OPT models have one)."""
    norm_eps: float = 1e-5
    position: Literal["learned"] = "learned"
    position_offset: int = 2
    """Rows skipped at the start of the learned position table (OPT: 2)."""
    bias: bool = True
    """Projections carry biases."""
    tie_embeddings: bool = True
    """The output head is the transposed embedding table."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_size",
            "max_position",
        ):
            value = getattr(self, name)
            _require(
                isinstance(value, int) and 0 < value < 2**31,
                f"model {name}={value!r} must be a positive integer",
            )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"model num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}",
        )

    @property
    def lane(self) -> int:
        """E = K * H: elements that one token position takes in one block of one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def hidden_lanes(self) -> float:
        """Width of the layer input in lanes: 1 for multi-head attention, more for grouped queries."""
        return self.hidden_size / self.lane

    @property
    def supports_hidden(self) -> bool:
        """Whether the hidden kind is smaller than keys and values, and fits the block of one lane."""
        return self.hidden_size == self.lane

    @property
    def supports_absorb(self) -> bool:
        """Whether attention can act on the layer inputs directly: nothing may rotate keys after projection."""
        return self.supports_hidden and self.position == "learned"

    @property
    def num_params(self) -> int:
        """Parameters, counting tied embeddings once."""
        d, e, f = self.hidden_size, self.embedding_size or self.hidden_size, self.ffn_size
        q, kv = self.num_heads * self.head_dim, self.lane
        b = 1 if self.bias else 0
        layer = d * (q + 2 * kv) + q * d + 2 * d * f + b * (q + 2 * kv + d + f + d) + 4 * d
        total = (
            self.vocab_size * e
            + (self.max_position + self.position_offset) * d
            + self.num_layers * layer
        )
        total += 2 * d if self.final_norm else 0
        total += 2 * d * e if e != d else 0
        total += 0 if self.tie_embeddings else self.vocab_size * e
        return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The unified block pool (Apt-Serve §4.3)."""

    block_size: int = 16
    """C: token positions a block."""
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
    """A name from `apt_jax.sched.POLICIES`."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Devices of one replica."""

    tensor_parallel_size: int = 1
    """Devices that share every layer (-tp). More than one is not available in this version."""

    def __post_init__(self) -> None:
        _require(
            self.tensor_parallel_size == 1,
            f"tensor_parallel_size={self.tensor_parallel_size}: only 1 is available in this version (-tp)",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that `apt_jax.llm.build_engine` needs to make an engine."""

    model: str
    """A bundled name (``tiny-opt``), a directory in Hugging Face format, or with `load_format="dummy"` any known size
    (``opt-13b``)."""
    tokenizer: str | None = None
    """Directory with a tokenizer.json; None: the model's own."""
    dtype: DType = "float32"
    load_format: Literal["auto", "safetensors", "pt", "dummy"] = "auto"
    """`pt` opens PyTorch `.bin` files with weights_only loading, and only when asked for."""
    max_model_len: int | None = None
    """Longest prompt plus output, tokens; None: the model's own limit."""
    served_model_name: str | None = None
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
            self.load_format in ("auto", "safetensors", "pt", "dummy"),
            f"load_format={self.load_format!r} must be one of auto, safetensors, pt, dummy (--load-format)",
        )
        _require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"max_model_len={self.max_model_len} must be at least 2 (--max-model-len)",
        )
        _require(0 <= self.seed < 2**32, f"seed={self.seed} must lie in [0, 2**32) (--seed)")
