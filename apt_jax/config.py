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


Quantization = Literal["int8"] | None
NormKind = Literal["layer", "rms"]
NormPlacement = Literal["pre", "post", "output", "sandwich"]
Activation = Literal["relu", "silu", "gelu", "gelu_tanh"]
Position = Literal["learned", "rope", "alibi"]
HiddenMode = Literal["absorb", "partial", "v-absorb", "refused"]
"""What attention over cached layer inputs can absorb: everything; all but the rotary lanes of the keys; the values, with
the keys reprojected; or the kind is not offered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: lanes i and i + `rotary_dim` / 2 of a head turn by position * `inv_freq[i]`."""

    inv_freq: tuple[float, ...]
    """Radians a position, one a pair of lanes; float32 values, scaling applied (`apt_jax.models.rope`)."""
    attention_factor: float = 1.0
    """Factor on the turned lanes of queries and of keys (YaRN, LongRoPE)."""

    def __post_init__(self) -> None:
        _require(
            len(self.inv_freq) > 0 and all(math.isfinite(f) for f in self.inv_freq),
            "model rope: frequencies must be finite numbers, at least one",
        )
        _require(
            math.isfinite(self.attention_factor) and self.attention_factor > 0,
            f"model rope: attention_factor={self.attention_factor} must be a positive number",
        )

    @property
    def rotary_dim(self) -> int:
        """R: lanes of a head that turn."""
        return 2 * len(self.inv_freq)


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
    embedding_scale: float | None = None
    """Factor on the token embeddings (Gemma: sqrt(D))."""
    embedding_norm: bool = False
    """A norm after the token embeddings (BLOOM)."""
    activation: Activation = "relu"
    gated: bool = False
    """The feed-forward layer is `down(activation(gate(x)) * up(x))`, else `down(activation(up(x)))`."""
    norm: NormKind = "layer"
    norm_bias: bool = True
    """Layer norms add a bias; RMS norms have none."""
    norm_offset: float = 0.0
    """Added to the stored scale of every norm (Gemma: 1)."""
    norm_eps: float = 1e-5
    norm_placement: NormPlacement = "pre"
    """`f` being attention or feed-forward: "pre" `h + f(norm(h))`, "post" `norm(h + f(h))` (OPT-350M), "output"
    `h + norm(f(h))` (OLMo-2), "sandwich" `h + norm(f(norm(h)))` (Gemma-2)."""
    parallel: bool = False
    """Attention and feed-forward both start from the layer's input (GPT-NeoX); with "pre" norms only."""
    final_norm: bool = True
    """A norm after the last layer."""
    qk_norm: Literal["head", "lane"] | None = None
    """RMS norm of queries and keys after projection: over each head (Qwen3) or over all of them (OLMo-2)."""
    position: Position = "learned"
    position_offset: int = 0
    """Rows skipped at the start of the learned position table (OPT: 2)."""
    rope: RopeConfig | None = None
    alibi_slopes: tuple[float, ...] = ()
    """(N,) slope of each head: `slope * (j - i)` is added to the score of query i and key j."""
    attention_scale: float | None = None
    """Factor on the scores; None: 1 / sqrt(H)."""
    attention_softcap: float | None = None
    """Scores s become `cap * tanh(s / cap)` (Gemma-2)."""
    logits_softcap: float | None = None
    """Likewise for the logits."""
    layer_windows: tuple[int | None, ...] = ()
    """A layer attends to its last so many positions, its own included; None: all. Empty: no layer has a window."""
    clip_qkv: float | None = None
    """Queries, keys and values are clipped to [-clip, clip] (MPT)."""
    qkv_bias: bool = True
    out_bias: bool = True
    ffn_bias: bool = True
    """Whether the projections to q, k, v, from attention, and in the feed-forward layer add biases."""
    tie_embeddings: bool = True
    """The output head is the transposed embedding table."""
    head_bias: bool = False
    """The output head adds a bias."""
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
        _require(
            (self.rope is not None) == (self.position == "rope"),
            f"model position={self.position!r} and rope={self.rope!r:.40} do not go together",
        )
        _require(
            self.rope is None or self.rope.rotary_dim <= self.head_dim,
            "model rope: more rotary lanes than a head has",
        )
        _require(
            len(self.alibi_slopes) == (self.num_heads if self.position == "alibi" else 0),
            f"model position={self.position!r} with {len(self.alibi_slopes)} ALiBi slopes",
        )
        _require(
            len(self.layer_windows) in (0, self.num_layers)
            and all(w is None or w > 0 for w in self.layer_windows),
            f"model layer_windows={self.layer_windows!r:.60} must name a positive window or None for each layer",
        )
        _require(
            not self.parallel or self.norm_placement == "pre",
            f"model norm_placement={self.norm_placement!r} with parallel layers",
        )

    @property
    def lane(self) -> int:
        """E = K * H: elements that one token position takes in one block of one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def hidden_ratio(self) -> float:
        """Elements of a token's layer input over those of its keys and values: D / 2E."""
        return self.hidden_size / (2 * self.lane)

    def hidden_block_size(self, block_size: int) -> int:
        """Layer inputs that a block of `block_size` keys has room for: floor(C E / D)."""
        return block_size * self.lane // self.hidden_size

    @property
    def hidden_refusal(self) -> str | None:
        """Why the hidden kind is not offered; None where it is."""
        if self.hidden_ratio >= 1:
            size = "larger" if self.hidden_ratio > 1 else "not smaller"
            return (
                f"its layer inputs ({self.hidden_size} values a token and layer) are {size} than its keys and values "
                f"(2 x {self.lane})"
            )
        if self.clip_qkv is not None:
            return "it clips keys and values after projection (clip_qkv)"
        return None

    @property
    def supports_hidden(self) -> bool:
        """Whether the hidden kind is offered: a token's layer input is smaller than its keys and values together."""
        return self.hidden_refusal is None

    @property
    def offers_hybrid(self) -> bool:
        """Whether one engine offers both kinds: where the hidden one takes at most half of K and V. A smaller gain is not
        worth what the choice costs every step, and on CPUs in second copies of weights."""
        return self.supports_hidden and self.hidden_size <= self.lane

    @property
    def hidden_mode(self) -> HiddenMode:
        """What attention over layer inputs can absorb."""
        if not self.supports_hidden:
            return "refused"
        if self.qk_norm is not None:  # the norm stands between query and projection
            return "v-absorb"
        if self.rope is None:
            return "absorb"
        return "partial" if self.rope.rotary_dim < self.head_dim else "v-absorb"

    def window(self, layer: int) -> int | None:
        """Positions that a layer attends to; None: all."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def num_params(self) -> int:
        """Parameters, counting tied embeddings once."""
        d, e, f = self.hidden_size, self.embedding_size or self.hidden_size, self.ffn_size
        q, kv = self.num_heads * self.head_dim, self.lane
        norm = (2 if self.norm_bias else 1) * d
        norms = 4 if self.norm_placement == "sandwich" else 2
        layer = d * (q + 2 * kv) + q * d + (3 if self.gated else 2) * d * f + norms * norm
        layer += (q + 2 * kv) if self.qkv_bias else 0
        layer += d if self.out_bias else 0
        layer += (f * (2 if self.gated else 1) + d) if self.ffn_bias else 0
        if self.qk_norm is not None:
            layer += 2 * self.head_dim if self.qk_norm == "head" else q + kv
        total = self.vocab_size * e + self.num_layers * layer
        if self.position == "learned":
            total += (self.max_position + self.position_offset) * d
        total += norm if self.final_norm else 0
        total += norm if self.embedding_norm else 0
        total += 2 * d * e if e != d else 0
        total += 0 if self.tie_embeddings else self.vocab_size * e
        total += self.vocab_size if self.head_bias else 0
        return total


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
    join_key_file: str | None = None
    """File with the secret that ranks prove to each other to have; None: only where rank 0 is reached on this machine alone."""

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
