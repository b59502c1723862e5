"""Frozen configuration objects for the cache, scheduling and parallelism, combined in the configuration of an engine.

Every option is declared once, as a field: type, default, bounds (`apt_jax.options.option`) and docstring. The field
determines the check (whose message names the flag), the command-line flag (`serve.cli.flags`) and the help text.
Nothing in this module reads files, flags or the environment.
"""

import dataclasses
import math
import numbers
import re
from collections.abc import Mapping
from typing import Literal

from apt_jax.errors import ConfigError, explained
from apt_jax.options import check_options, option, shown_value

CacheMode = Literal["kv", "hidden", "hybrid"]
"""Cache kinds that the scheduler may use: only keys and values, only layer inputs, or either per request."""

HiddenAttention = Literal["auto", "reproject", "absorb"]
"""Algorithm of attention over a hidden cache; `auto` uses `absorb` if it is exact for the model."""

SessionOrder = Literal["arrival", "program-fcfs", "plas", "hrrn"]
"""Order of requests for policies that take them by arrival (`SchedulerConfig.session_order`)."""

DType = Literal["auto", "float32", "float", "bfloat16", "float16", "half"]
DEFAULT_MAX_SEQUENCES = 128
DEFAULT_MAX_STOP_STRINGS = 16
SloClass = Literal["rt", "be"]
"""Class of a request: real time, or best effort (BROS §2)."""

LoadFormat = Literal["auto", "safetensors", "orbax", "gguf", "pt", "dummy"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_seconds(name: str, value: float) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    _require(is_number and value > 0, f"{name}={shown_value(value)} must be a positive number of seconds")
    try:
        float(value)
    except OverflowError:
        raise ConfigError(f"{name} is too large a number of seconds") from None


@dataclasses.dataclass(frozen=True)
class SLO:
    """Latency SLO of one request. A request attains its SLO if its TTFT, its P99 TBT and its end-to-end latency are
    within these limits."""

    ttft_s: float = math.inf
    """Maximum time from arrival to the first token, in seconds."""
    tbt_s: float = math.inf
    """Maximum 99th percentile of the gaps between consecutive tokens, in seconds."""
    e2e_s: float = dataclasses.field(default=math.inf, kw_only=True)
    """Maximum time from arrival to the last token, in seconds. A later request is not aborted, and policies do not read
    this limit."""

    def __post_init__(self) -> None:
        _require_seconds("slo ttft_s", self.ttft_s)
        _require_seconds("slo tbt_s", self.tbt_s)
        _require_seconds("slo e2e_s", self.e2e_s)


SLO.__init__ = explained({f"{name}_ms": f"use {name}_s, in seconds" for name in ("ttft", "tbt", "e2e")})(SLO.__init__)

_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._/:-]{1,128}")

Quantization = Literal["int8", "gguf"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Options of the unified block pool (Apt-Serve §4.3)."""

    mode: CacheMode = option("hybrid", flag="--cache", keyword="cache")
    """Cache kinds that the scheduler may use."""
    hidden_attention: HiddenAttention = option("auto")
    """Algorithm of attention over a hidden cache; auto: absorb if it is exact for the model."""
    block_size: int = option(16, metavar="TOKENS", low=1, high=1024)
    """Number of tokens whose keys, or values, fit in one block. For layer inputs the number is
    `ModelConfig.hidden_block_size`."""
    num_blocks_override: int | None = option(None, metavar="BLOCKS", low=2, rule="be at least 2, one K and one V block")
    """Number of cache blocks (default: derived from free memory). The reserved block 0 is not counted."""
    device_memory_utilization: float = option(0.9, metavar="SHARE", above=0, high=1)
    """Share of device memory that the cache may use, relative to the memory left after the weights are loaded, in (0,
    1]."""
    enable_prefix_caching: bool = option(True)
    """Share the cache of common prompt prefixes between requests (default: on)."""
    share_prefixes: bool = option(False, is_setting=True)
    """Share cached prefixes between API keys too. The time to first token then reveals whether another key has sent a
    prompt with the same prefix (docs/design/prefix_caching.md)."""
    retention: str = option("lru", metavar="POLICY")
    """Which cached prefixes stay when blocks are needed: lru (least recently used first), knapsack (by session, the
    saved prefill and the chance of a next call), ttl, cache-ttl or progress-ttl, with options as in ``ttl?ttl_s=30``
    (docs/sessions.md)."""
    swap_space: float = option(0.0, metavar="GIB", low=0, high=1 << 20)
    """Host memory for cached blocks that leave the device, in GiB; the cache of preempted requests and of prefixes is
    copied back from it instead of being recomputed (docs/design/host_tier.md; default: 0, none)."""
    prefix_cache_dir: str | None = option(None, metavar="DIR")
    """Directory that keeps cached prefixes evicted from host memory, also across restarts; it must have mode 0700 and
    be used for nothing else, and needs --swap-space (docs/design/host_tier.md; default: none)."""
    prefix_cache_size: float = option(16.0, metavar="GIB", above=0, high=1 << 20, is_setting=True)
    """Maximum total size of the files in --prefix-cache-dir, in GiB; the least recently used files are removed first
    (default: 16)."""
    share_blocks: bool = option(True, is_setting=True)
    """Let real-time and best-effort requests share blocks; takes effect with swap space under a policy that shares
    blocks (bros)."""

    def __post_init__(self) -> None:
        check_options(self)
        _require(
            not self.swap_space or self.enable_prefix_caching,
            f"swap_space={self.swap_space:g} keeps cached prefixes; leave out --no-enable-prefix-caching or --swap-space",
        )
        _require(
            self.retention == "lru" or self.enable_prefix_caching,
            f"retention={self.retention!r:.40} keeps cached prefixes; leave out --no-enable-prefix-caching or --retention",
        )
        _require(self.prefix_cache_dir != "", "prefix_cache_dir must not be empty (--prefix-cache-dir)")
        _require(
            self.prefix_cache_dir is None or self.swap_space > 0,
            f"prefix_cache_dir={self.prefix_cache_dir} is read and written through host memory; set "
            "--swap-space GIB, or leave out --prefix-cache-dir",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Scheduling policy, batch limits and admission."""

    policy: str = option("apt-plus", flag="--scheduling-policy", keyword="scheduling_policy", metavar="POLICY")
    """Scheduling policy: a name from `apt_jax.sched.all_policies`, an installed policy, or ``package.module:Class``.
    Options follow as in ``apt?violation_decay=0.4`` (docs/policies.md)."""
    session_order: SessionOrder = option("arrival", is_setting=True)
    """Order of requests for policies that take them by arrival: arrival, program-fcfs (by the arrival of the first call
    of their session) or plas (by the tokens computed for their session, least first; Autellix, arXiv 2502.13965)."""
    max_num_seqs: int = option(64, metavar="REQUESTS", low=1, high=4096)
    """Maximum number of requests in one step, and of requests that hold cache at the same time."""
    max_num_batched_tokens: int = option(512, metavar="TOKENS")
    """Maximum number of tokens in one step; longer prompts are split into chunks."""
    max_num_queued_reqs: int = option(1024, metavar="REQUESTS", low=1)
    """Maximum number of waiting requests; further requests are rejected."""
    max_num_queued_tokens: int | None = option(None, metavar="TOKENS", low=1)
    """Maximum number of prompt tokens of all waiting requests together; further requests are rejected (default:
    unlimited)."""
    max_prompt_logprobs: int = option(262_144, metavar="NUMBERS", low=1, is_setting=True)
    """Maximum number of prompt log probabilities that one call may ask for: `prompt_logprobs` + 1 for each prompt
    token."""
    max_queue_s: float = option(600.0, metavar="S", positive=True, is_setting=True)
    """Maximum queueing time in seconds; a server rejects requests that wait longer."""
    slo_admission: Literal["off", "warn", "on"] = option("off", rule="be 'off', 'warn' or 'on'", is_setting=True)
    """Admission of requests whose TTFT SLO cannot be met according to the cost model: off admits them, warn admits them
    with a warning, on rejects them."""
    default_slo: SLO = SLO()
    """Default SLO of real-time requests."""
    default_slo_class: SloClass = option("rt", rule="be 'rt' or 'be'", is_setting=True)
    """Default class of requests: rt (real time) or be (best effort)."""
    best_effort_last: bool = option(False, is_setting=True)
    """Under every policy, run best-effort requests only with capacity that real-time requests do not use (default: only
    with --batch-dir; docs/policies.md)."""
    overlap: bool = True
    """Dispatch the next step before the tokens of the previous step are fetched."""

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
    """Number of devices that every layer is sharded over, counted over all hosts."""
    nnodes: int = option(1, metavar="HOSTS", low=1)
    """Number of ranks of the replica: processes, usually one per host (docs/parallel.md)."""
    node_rank: int = option(0, metavar="RANK")
    """Rank of this process; 0 schedules and serves."""
    master_addr: str = option("127.0.0.1", metavar="HOST")
    """Address of rank 0; connections to it are unencrypted, so use a private network."""
    master_port: int = option(
        29501, metavar="PORT", low=1, high=65534, rule="lie in [1, 65535), and the next port must be free too"
    )
    """Port of rank 0; JAX also uses the next port."""
    join_timeout_s: float = option(300.0, flag="--join-timeout", metavar="S", positive=True, is_setting=True)
    """Maximum time that ranks wait for each other at startup, in seconds."""
    join_key_file: str | None = option(None, metavar="FILE")
    """File with the secret that all ranks share, one line; required unless --master-addr is a loopback address."""

    def __post_init__(self) -> None:
        check_options(self)
        _require(
            0 <= self.node_rank < self.nnodes,
            f"node_rank={self.node_rank} must lie in [0, {self.nnodes}), since nnodes={self.nnodes} (--node-rank, --nnodes)",
        )
        _require(
            self.tensor_parallel_size % self.nnodes == 0,
            f"tensor_parallel_size={self.tensor_parallel_size} is the number of devices of all hosts and must be a multiple of nnodes={self.nnodes} (-tp, --nnodes)",
        )
        _require(bool(self.master_addr), "master_addr must not be empty (--master-addr)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Configuration of one engine, for `apt_jax.build_engine`."""

    model: str
    """Model to serve: a bundled name (``tiny-opt``), a directory in Hugging Face format or in this package's Orbax
    format, a ``.gguf`` file, a hub id (``owner/model`` or ``owner/model@revision``), or with `load_format="dummy"` any
    known size (``opt-13b``)."""
    tokenizer: str | None = option(None, metavar="DIR")
    """Directory with a tokenizer.json, or a .gguf file (default: the model's)."""
    chat_template: str | None = option(None, metavar="FILE")
    """File with the chat template in Jinja (default: the model's)."""
    dtype: DType = option("auto")
    """Data type of weights, activations and cache; auto: float32 on CPUs, bfloat16 on TPUs, else the 16-bit type of the
    model's files, or bfloat16 if the files have another type. half is float16, float is float32."""
    load_format: LoadFormat = option("auto")
    """Checkpoint format; dummy: random weights; pt: PyTorch .bin files, opened with weights_only loading."""
    max_model_len: int | None = option(None, metavar="TOKENS", low=2)
    """Maximum length of prompt plus output in tokens (default: the model's limit)."""
    served_model_name: str | None = option(None, metavar="NAME")
    """Model name that requests use (default: MODEL)."""
    served_model_aliases: tuple[str, ...] = ()
    """Additional model names that requests may use."""
    max_sequences_per_call: int = option(DEFAULT_MAX_SEQUENCES, metavar="N", low=1, high=1024, is_setting=True)
    """Maximum number of outputs of one call: number of prompts times n."""
    max_stop_strings: int = option(DEFAULT_MAX_STOP_STRINGS, metavar="N", low=1, high=256, is_setting=True)
    """Maximum number of stop strings of a request."""
    quantization: Quantization = option(
        None, metavar="{int8,gguf}", rule="be int8 or gguf, or left out to keep weights as they are"
    )
    """Store weights as integers: int8 (1 byte per weight; needs the extra int8), or on one device gguf, which keeps
    the weights of a GGUF file as integers (0.56 to 1.06 bytes per weight); the cache keeps its dtype
    (default: no quantization; docs/models.md)."""
    lora_modules: Mapping[str, str] | None = None
    """LoRA adapters that requests may select as their model, as a map from names to directories in PEFT format; all are
    loaded at start (docs/lora.md; default: none)."""
    max_lora_rank: int = option(16, metavar="R", low=1, high=512)
    """Maximum rank of a LoRA adapter; adapters with a larger rank are rejected."""
    max_loras: int = option(16, metavar="ADAPTERS", low=1, high=256, is_setting=True)
    """Maximum number of LoRA adapters; one step may use all of them."""
    attention_backend: str | None = option(None, metavar="NAME")
    """Implementation of the attention kernels; see docs/kernels.md (default: chosen by platform)."""
    tool_call_parser: str = "auto"
    """Parser of tool calls in chat completions: ``auto`` (chosen by the chat template), ``none``, or a name in
    `serve.http_api.tool_calls.forms.PARSERS`."""
    reasoning_parser: str = "auto"
    """Parser that separates reasoning from the answer in chat completions: ``auto`` (chosen by the chat template),
    ``none``, or a name in `serve.http_api.tool_calls.reasoning.PARSERS`."""
    load_executables: bool = option(True, is_setting=True)
    """On one host, load programs compiled by an earlier start instead of tracing and lowering them again."""
    seed: int = option(0, metavar="SEED", low=0, high=2**32 - 1, rule="lie in [0, 2**32)")
    """Random seed of dummy weights, and of sampled requests without a seed."""
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()

    def __post_init__(self) -> None:
        check_options(self)
        _require(bool(self.model), "model must not be empty (MODEL)")
        _require(
            self.quantization != "gguf" or self.parallel.tensor_parallel_size == 1,
            "quantization='gguf' runs on one device; use int8, or leave out -tp or --quantization",
        )
        _require(
            not self.cache.swap_space or self.parallel.nnodes == 1,
            f"swap_space={self.cache.swap_space:g} is host memory of one host; leave out --nnodes or --swap-space",
        )
        self._check_adapters(self.lora_modules or {})

    def _check_adapters(self, modules: Mapping[str, str]) -> None:
        for name, path in modules.items():
            is_name = isinstance(name, str) and _ADAPTER_NAME.fullmatch(name) is not None
            _require(
                is_name,
                f"lora_modules has the name {name!r:.80}, which must be 1 to 128 characters of [A-Za-z0-9._/:-] (--lora-modules)",
            )
            _require(
                isinstance(path, str) and bool(path),
                f"lora_modules must give the directory of {name!r:.80} (--lora-modules NAME=DIR)",
            )
            _require(
                name not in (self.model, self.served_model_name, *self.served_model_aliases),
                f"lora_modules has the name of the model, {name!r:.80}; give the adapter another name (--lora-modules)",
            )
        _require(
            len(modules) <= self.max_loras,
            f"lora_modules has {len(modules)} adapters, more than max_loras={self.max_loras} (--set max_loras)",
        )
        _require(
            not modules or self.parallel.tensor_parallel_size == 1,
            "LoRA adapters run on one device; leave out -tp or --lora-modules",
        )
