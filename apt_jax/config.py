"""Frozen configuration objects: model shape, cache, scheduling, parallelism and the engine that joins them.

Every option is declared once, as a field: type, default, bounds (`apt_jax.options.option`) and docstring. Its check, whose message
names the command-line flag, its flag (`serve.flags`) and its help text derive from the field. Nothing in this module reads
files, flags or the environment.
"""

import dataclasses
import math
from typing import Literal

from apt_jax.errors import ConfigError
from apt_jax.options import check_options, option

CacheMode = Literal["kv", "hidden", "hybrid"]
"""Cache kinds that the scheduler may use: only keys and values, only layer inputs, or either per request."""

HiddenAttention = Literal["auto", "reproject", "absorb"]
"""Algorithm of attention over a hidden cache; `auto` takes `absorb` wherever it is exact."""

DType = Literal["float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "orbax", "gguf", "pt", "dummy"]


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
    """Latency SLO of one request. A request attains its SLO when its TTFT and its P99 TBT both do."""

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
            len(self.layer_windows) in (0, self.num_layers) and all(w is None or w > 0 for w in self.layer_windows),
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

    mode: CacheMode = option("hybrid", flag="--cache", keyword="cache")
    """Cache kinds that the scheduler may use."""
    hidden_attention: HiddenAttention = option("auto")
    """Algorithm of attention over a hidden cache; auto: absorb wherever it is exact."""
    block_size: int = option(16, metavar="TOKENS", low=1, high=1024)
    """Tokens whose keys, or values, one block holds. Of layer inputs it holds `ModelConfig.hidden_block_size`."""
    num_blocks_override: int | None = option(None, metavar="BLOCKS", low=2, rule="be at least 2, one K and one V block")
    """Number of cache blocks (default: derived from free memory). The reserved block 0 is not counted."""
    device_memory_utilization: float = option(0.9, metavar="SHARE", above=0, high=1)
    """Share of the device memory that is free after loading the weights to use for the cache, in (0, 1]."""
    enable_prefix_caching: bool = option(True)
    """Share the cache of common prompt prefixes between requests (default: on)."""

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Scheduling policy, batch limits and admission."""

    policy: str = option("apt", flag="--scheduling-policy", keyword="scheduling_policy", metavar="POLICY")
    """Scheduling policy: a name from `apt_jax.sched.POLICIES`, an installed one, or ``package.module:Class``; with options as in
    ``apt?violation_decay=0.4`` (docs/policies.md)."""
    violation_decay: float = option(0.0, metavar="FACTOR", low=0, high=1)
    """Weight of requests already past their SLO, in [0, 1]; 0: near zero. Apt-Serve §6.6 uses 0.4."""
    max_num_seqs: int = option(64, metavar="REQUESTS", low=1, high=4096)
    """Maximum number of requests in one step, and of requests that hold cache."""
    max_num_batched_tokens: int = option(512, metavar="TOKENS")
    """Maximum number of tokens in one step; longer prompts are split into chunks."""
    max_num_queued_reqs: int = option(1024, metavar="REQUESTS", low=1)
    """Maximum number of waiting requests; more are rejected."""
    max_num_queued_tokens: int | None = option(None, metavar="TOKENS", low=1)
    """Maximum number of prompt tokens of waiting requests; more are rejected (default: unlimited)."""
    max_queue_s: float | None = option(None, metavar="S", positive=True)
    """Maximum queueing time in seconds (default: unlimited)."""
    slo_admission: Literal["off", "warn", "on"] = option("off", rule="be 'off', 'warn' or 'on'")
    """Admission of requests whose TTFT SLO cannot be met by the cost model: off admits, warn admits with a warning, on rejects."""
    default_slo: SLO = SLO()
    """Default SLO, for requests that have none."""
    overlap: bool = True
    """Dispatch the next step before the last one's tokens are fetched."""

    def __post_init__(self) -> None:
        check_options(self)
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least max_num_seqs={self.max_num_seqs} (--max-num-batched-tokens)",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Devices and hosts of one replica."""

    tensor_parallel_size: int = option(1, flag=("--tensor-parallel-size", "-tp"), metavar="DEVICES", low=1, high=1024)
    """Number of devices that every layer is sharded over, on all hosts together."""
    nnodes: int = option(1, metavar="HOSTS", low=1)
    """Number of ranks (processes, usually one per host) that share the devices (docs/parallel.md)."""
    node_rank: int = option(0, metavar="RANK")
    """Rank of this process; 0 schedules and serves."""
    master_addr: str = option("127.0.0.1", metavar="HOST")
    """Address of rank 0, unencrypted: use a private network."""
    master_port: int = option(
        29501, metavar="PORT", low=1, high=65534, rule="lie in [1, 65535), and the next one be free too"
    )
    """Port of rank 0; the next port is used too, by JAX."""
    join_timeout_s: float = option(300.0, flag="--join-timeout", metavar="S", positive=True)
    """Seconds that ranks wait for each other at startup."""

    def __post_init__(self) -> None:
        check_options(self)
        _require(
            0 <= self.node_rank < self.nnodes,
            f"node_rank={self.node_rank} must lie in [0, {self.nnodes}), as nnodes={self.nnodes} (--node-rank, --nnodes)",
        )
        _require(
            self.tensor_parallel_size % self.nnodes == 0,
            f"tensor_parallel_size={self.tensor_parallel_size} is the number of devices of all hosts and does not divide among {self.nnodes} (-tp, --nnodes)",
        )
        _require(bool(self.master_addr), "master_addr must not be empty (--master-addr)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Configuration of one engine, for `apt_jax.llm.build_engine`."""

    model: str
    """A bundled name (``tiny-opt``), a directory in Hugging Face format or in ours for Orbax, a ``.gguf`` file, a hub id
    (``owner/model`` or ``owner/model@revision``), or with `load_format="dummy"` any known size (``opt-13b``)."""
    tokenizer: str | None = option(None, metavar="DIR")
    """Directory with a tokenizer.json, or .gguf file (default: the model's)."""
    chat_template: str | None = option(None, metavar="FILE")
    """File of the chat template (Jinja), or none (default: the model's)."""
    dtype: DType = option("float32")
    """Data type of weights, activations and cache."""
    load_format: LoadFormat = option("auto")
    """Checkpoint format; dummy: random weights; pt: PyTorch .bin files, opened with weights_only loading."""
    max_model_len: int | None = option(None, metavar="TOKENS", low=2)
    """Maximum length of prompt plus output in tokens (default: the model's limit)."""
    served_model_name: str | None = option(None, metavar="NAME")
    """Model name that requests use (default: MODEL)."""
    quantization: Quantization = option(None, metavar="int8", rule="be int8, or None for weights as they are")
    """Weight quantization, half the memory of bfloat16; products and cache keep their dtype (default: none; docs/models.md)."""
    attention_backend: str | None = option(None, metavar="NAME")
    """Implementation of the attention kernels, see docs/kernels.md (default: the platform's)."""
    seed: int = option(0, metavar="SEED", low=0, high=2**32 - 1, rule="lie in [0, 2**32)")
    """Random seed of dummy weights and of sampled requests that have none."""
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()

    def __post_init__(self) -> None:
        _require(bool(self.model), "model must not be empty (MODEL)")
        check_options(self)
        _require(
            self.quantization is None or self.parallel.tensor_parallel_size == 1,
            f"quantization={self.quantization!r} runs on one device; leave out -tp or --quantization",
        )
