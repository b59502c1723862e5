"""Print versions, devices, the kernels in use, model facts and cache sizes; with --target, a running server's
statistics."""

import argparse
import importlib.metadata
import platform
from typing import Any

from apt_jax.config import EngineConfig
from apt_jax.cpu import build
from apt_jax.errors import ConfigError
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.frontend.builder import build_engine
from apt_jax.frontend.components import EngineComponents
from apt_jax.frontend.llm import LLM
from apt_jax.models.config import ModelConfig
from apt_jax.utils.cache_dir import cache_dir
from apt_jax.version import __version__
from serve.cli import options
from serve.cli.output import print_table, starting_bars, write_json
from serve.client import AptClient
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb

_PACKAGES = (
    "jax", "jaxlib", "numpy", "tokenizers", "safetensors", "gguf", "jinja2", "orbax-checkpoint", "huggingface-hub", "grpcio",
    "protobuf",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_argument(parser)
    options.add_target_argument(parser)
    parser.add_argument("--list", action="store_true", help="print the known models and exit")
    parser.add_argument(
        "--stats",
        action="store_true",
        help="compile all programs, serve 32 short requests and print host time per iteration",
    )
    parser.add_argument(
        "--memory-plan",
        type=options.positive(float),
        metavar="GIB",
        help="print how MODEL would be sharded over -tp devices with this much memory each, in GiB, and how many tokens its cache would hold; then exit. No device is needed",
    )
    options.add_json_argument(parser)
    options.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.list:
        models = known_models()
        for title, rows in models.items():
            print_table(title, rows.items())
        names = dict(zip(("models", "sizes"), models.values(), strict=True))
        write_json(args.json, names)
        return 0
    if args.target is not None:
        with AptClient(args.target, **options.access(args)) as client:
            values = server_facts(client.stats())
        print_table(f"server {args.target}", values.items())
        write_json(args.json, {"server": values})
        return 0
    config = options.engine_config(args)
    if args.memory_plan is not None:
        planned = memory_facts(config, int(args.memory_plan * 2**30))
        for title, rows in planned.items():
            print_table(title, rows.items())
        write_json(args.json, planned)
        return 0
    sections = {"versions": versions(), "devices": devices()}
    bars = starting_bars()
    try:
        parts = build_engine(config, warm_up=args.stats, calibrate=False, progress=bars)
    finally:
        bars.close()
    sections["model"] = model_facts(config, parts)
    sections["cache and kernels"] = cache_facts(parts)
    if args.stats:
        sections["iterations"] = measure(parts)
    for title, rows in sections.items():
        print_table(title, rows.items())
    write_json(args.json, sections)
    return 0


def known_models() -> dict[str, dict[str, str]]:
    """Return the names that MODEL accepts: bundled models, and published sizes without weights."""
    from apt_jax.models import PRESETS, models_with_files, read_model_config

    sizes = {}
    for name, fields in PRESETS.items():
        model = read_model_config(fields)[1]
        sizes[name] = f"{model.family}, {_billions(model)}"
    return {
        "models with their files": models_with_files(),
        "sizes, with random weights (--load-format dummy), or with files from the hub or a directory": sizes,
    }


def _billions(model: ModelConfig) -> str:
    active = f", {model.num_active_params / 1e9:.2g} of them for each token" if model.experts is not None else ""
    return f"{model.num_params / 1e9:.2g} billion parameters{active}"


def versions() -> dict[str, Any]:
    """Return the versions of this package, Python and the libraries."""
    found: dict[str, Any] = {"apt-jax": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def devices() -> dict[str, Any]:
    import jax

    return {
        "platform": jax.default_backend(),
        "devices": ", ".join(f"{d.id}: {d.device_kind}" for d in jax.devices()),
        "files kept in": str(cache_dir()),
    }


def model_facts(config: EngineConfig, parts: EngineComponents) -> dict[str, Any]:
    model = parts.model_config
    assert model is not None
    return {
        "name": parts.model_name,
        "family": model.family,
        "parameters": model.num_params,
        "files": parts.stored[0],
        "weights in the files": parts.stored[1],
        "dtype": parts.config.dtype,
        "quantization": config.quantization or "none: weights as they are",
        "layers": model.num_layers,
        "width": model.hidden_size,
        "heads": f"{model.num_heads} query, {model.num_kv_heads} key/value, {model.head_dim} wide",
        "window": window_of(model),
        "vocabulary": model.vocab_size,
        "tokenizer ids": parts.tokenizer.vocab_size if parts.tokenizer else "no tokenizer",
        "max_model_len (tokens)": parts.limits.max_model_len,
        "end-of-sequence ids": ", ".join(map(str, parts.limits.eos_token_ids)) or "none",
        "chat template": "none" if parts.chat_template is None else f"from {parts.chat_template.where}",
    }


def window_of(model: ModelConfig) -> str:
    """Return the window of a model's attention, and how many layers have it."""
    windows = [window for window in model.layer_windows if window is not None]
    lens = " or ".join(f"{window:,}" for window in sorted(set(windows)))
    return f"{lens} tokens in {len(windows)} of {model.num_layers} layers" if windows else "none"


def memory_facts(config: EngineConfig, device_bytes: int) -> dict[str, dict[str, Any]]:
    """Return the memory that a model takes on each device, and how its parameters are sharded."""
    from apt_jax.models import read_model_config, resolve_model
    from apt_jax.models.loading.auto_dtype import with_auto_dtype
    from apt_jax.models.memory_plan import memory_plan
    from apt_jax.utils.device_memory import memory_fraction

    if config.quantization == "gguf":
        raise ConfigError("--memory-plan supports unquantized and int8 weights only; leave out --quantization gguf")
    fields = resolve_model(config.model, allow_preset=True).fields
    config = with_auto_dtype(config, fields, "gpu")
    model = read_model_config(fields, config.max_model_len)[1]
    devices = config.parallel.tensor_parallel_size
    plan = memory_plan(
        model,
        config.dtype,
        config.cache,
        num_devices=devices,
        device_bytes=device_bytes,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        memory_fraction=memory_fraction(),
        int8=config.quantization == "int8",
    )
    gib = 2**30
    each = {
        "model": f"{config.model}, {_billions(model)}",
        "window": window_of(model),
        "dtype (--dtype)": config.dtype,
        "quantization": config.quantization or "none: weights as they are",
        "devices": devices,
        "memory (GiB)": round(device_bytes / gib, 1),
        f"of it for JAX, {memory_fraction():.0%} (GiB)": round(device_bytes * memory_fraction() / gib, 1),
        "weights (GiB)": round(plan.weight_bytes / gib, 2),
        "a step (GiB)": round(plan.step_bytes / gib, 2),
        f"pool, {config.cache.device_memory_utilization:.0%} of the rest (GiB)": round(plan.pool_bytes / gib, 2),
        "blocks": plan.num_blocks,
    } | {f"{kind}: pool (tokens)": count for kind, count in plan.tokens.items()}
    if config.cache.mode == "hybrid" and "hidden" not in plan.tokens:
        each["hidden: pool (tokens)"] = "not offered for this model"
    if config.cache.swap_space:
        each["host memory, of all devices (--swap-space, GiB)"] = config.cache.swap_space
        each["host memory (blocks)"] = plan.host_blocks
        each |= {f"{kind}: host memory (tokens)": count for kind, count in plan.host_tokens.items()}
    longest = config.max_model_len or model.max_position
    fits = max(plan.tokens.values())
    each["longest context (tokens)"] = (
        longest if fits >= longest else f"{longest}, of which {fits} fit the pool: longer requests are rejected"
    )
    cut = {
        leaf.name: f"{' x '.join(map(str, leaf.shape))}  cut: {leaf.cut or '-'}  {leaf.device_bytes / 2**20:,.1f} MiB a device"
        for leaf in plan.leaves
    }
    return {"each device": each, "parameters (*: every layer; MiB are of all layers)": cut}


def cache_facts(parts: EngineComponents) -> dict[str, Any]:
    executor, engine = parts.executor, parts.engine
    facts: dict[str, Any] = {
        "cache": parts.config.cache.mode,
        "prefix caching": "on" if parts.config.cache.enable_prefix_caching else "off",
        "block_size (tokens)": executor.block_size,
        "blocks": executor.num_blocks,
    }
    block_bytes = executor.block_bytes if isinstance(executor, JaxExecutor) else None
    if block_bytes is not None:
        facts["pool (MiB)"] = round(block_bytes * executor.num_blocks / 2**20, 1)
    for kind, size in zip(engine.kinds, engine.cache.block_sizes, strict=True):
        if not kind.offered:
            facts[kind.name] = "not offered"
            continue
        if size != executor.block_size:
            facts[f"{kind.name}: tokens a block"] = size
        if block_bytes is not None:
            per_token = round(block_bytes * kind.blocks_per_group / size)
            facts[f"{kind.name}: bytes a token"] = per_token
            if kind.windows is not None:
                held = kind.windows.max_groups * kind.windows.blocks_per_group
                facts[f"{kind.name}: bytes of a request's windows, at most"] = block_bytes * held
        of_one = "" if kind.windows is None else " of one request"
        facts[f"{kind.name}: pool (tokens{of_one})"] = parts.pool_tokens[kind.name]
    if isinstance(executor, JaxExecutor):
        facts["attention"] = executor.attention_name
        if executor.attention_name == "cpu":
            facts["CPU kernels"] = build.instructions()
        if engine.kinds[1].offered:
            facts["hidden attention"] = executor.hidden_mode or "reproject"
    if isinstance(executor, JaxExecutor) and executor.host is not None:
        facts["host memory (MiB)"] = round(executor.host.num_blocks * executor.block_bytes / 2**20, 1)
        facts["host memory (blocks)"] = executor.host.num_blocks
    if parts.config.cache.prefix_cache_dir is not None:
        facts["prefixes on disk"] = str(parts.config.cache.prefix_cache_dir)
        facts["prefixes on disk, at most (GiB)"] = parts.config.cache.prefix_cache_size
    facts["scheduling policy"] = parts.policy.name
    model = parts.cost_model
    facts["calibration"] = (
        "none stored for this machine (apt-jax calibrate)"
        if model is None
        else f"stored; decode R² {model.decode_quality.r2:.3f}, prefill R² {model.prefill_quality.r2:.3f}"
    )
    return facts


def measure(parts: EngineComponents) -> dict[str, Any]:
    """Run 32 requests of 16 prompt and 32 output tokens; returns host times per iteration and other statistics."""
    prompts = [[3 + (i + j) % (parts.limits.vocab_size - 3) for j in range(16)] for i in range(32)]
    params = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True}
    LLM.from_parts(parts).generate(prompts, params, use_tqdm=False)
    stats = parts.engine.stats()
    return {
        "iterations": sum(stats.iterations.values()),
        "host p50 (ms)": round(stats.host_p50_ms, 3),
        "host p99 (ms)": round(stats.host_p99_ms, 3),
        "policy p50 (ms)": round(stats.schedule_p50_ms, 3),
        "dispatch p50 (ms)": round(stats.dispatch_p50_ms, 3),
        "prefix cache hits (tokens)": f"{stats.prefix_cache_hits} of {stats.prefix_cache_queries}",
        "compilations after warm-up": stats.compilations,
    }


def server_facts(stats: pb.GetStatsResponse) -> dict[str, Any]:
    """Return all fields of a server's statistics, keyed by name."""
    facts: dict[str, Any] = {}
    for field in pb.GetStatsResponse.DESCRIPTOR.fields:
        if field.has_presence and not stats.HasField(field.name):
            continue
        value = getattr(stats, field.name)
        if field.is_repeated:  # all repeated fields are maps
            facts[field.name] = dict(sorted(value.items()))
        else:
            facts[field.name] = round(value, 3) if isinstance(value, float) else value
    return facts
