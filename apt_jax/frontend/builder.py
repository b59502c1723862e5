"""Builds a running engine from a configuration.

`build_engine` makes all parts that a front end needs: model, tokenizer, compiled executor, step costs (calibrated or
loaded), policy and engine.
"""

import contextlib
import dataclasses
import functools
import gc
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from apt_jax.config import CacheConfig, EngineConfig
from apt_jax.core.tiers import DiskStore
from apt_jax.cpu import build
from apt_jax.engine.batch import reserver_for
from apt_jax.errors import ConfigError
from apt_jax.executor import is_out_of_memory
from apt_jax.frontend.components import EngineComponents, Unprepared, build_components, cache_kinds, with_costs
from apt_jax.frontend.progress import Progress, in_stage, of_stage
from apt_jax.frontend.start_stages import KERNELS, LAYOUT, LOADING
from apt_jax.sched import make_policy
from apt_jax.sched.retention import make_retention
from apt_jax.sched.view import converts
from apt_jax.text.chat import ChatTemplate, load_chat_template
from apt_jax.text.tokenizer import Tokenizer, load_tokenizer
from apt_jax.utils.activity import activity
from apt_jax.utils.allocator import use_huge_pages
from apt_jax.utils.cache_dir import private_dir
from apt_jax.utils.compile_cache import keep_programs
from apt_jax.utils.device_memory import MEMORY_FRACTION, set_memory_fraction
from apt_jax.utils.memory import spare_memory_bytes

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from apt_jax.distributed.hosts import Hosts, Leader
    from apt_jax.executor.jax_executor import JaxExecutor
    from apt_jax.models import LoadedModel, ModelParams
    from apt_jax.models.config import ModelConfig
    from apt_jax.models.lora import LoraAdapter

DEFAULT_CALIBRATION_S = 10.0
"""Approximate duration of a calibration at start, in seconds; `apt-jax calibrate` takes longer and is more accurate."""

_SMALLER_WEIGHTS = "choose a smaller model, a 16-bit --dtype or --quantization"
_SMALLER_STEPS = "lower --device-memory-utilization, --num-blocks-override, --max-num-batched-tokens or --max-num-seqs"


def build_engine(
    config: EngineConfig,
    *,
    params: "ModelParams | None" = None,
    warm_up: bool = True,
    calibrate: bool = True,
    calibration_s: float = DEFAULT_CALIBRATION_S,
    early: bool = False,
    progress: Progress | None = None,
    on_joined: "Callable[[Leader], None]" = lambda leader: None,
) -> EngineComponents:
    """Load a model and build the engine that serves it.

    Args:
        config: configuration of the engine.
        params: weights that replace the weights in the model's files, as returned by `load_model` and `from_nnx`; see
            `LLM`.
        warm_up: compile every program now; False: each is compiled when it is first needed.
        calibrate: measure step costs if none are stored for this model, machine and configuration; stored costs are
            always used.
        calibration_s: approximate duration of the measurement, in seconds.
        early: prepare only the programs that are needed to serve every request, and leave the other programs and the
            measurement to `BackgroundPreparation` (`EngineComponents.unprepared`). Ignored if the executor does not
            support it (`JaxExecutor.can_start_early`).
        progress: called when a stage begins, while programs are prepared and while step costs are measured.
        on_joined: called with the other hosts of the replica, if any, once they have joined.

    Raises:
        ModelLoadError: the model or its tokenizer cannot be used.
        ConfigError: the configuration does not suit the model or the machine.
    """
    # JAX takes a second to import; validation and simulation do not need it.
    from apt_jax.distributed.hosts import Leader
    from apt_jax.executor.calibrate import calibration_path, load_calibration, load_or_calibrate
    from apt_jax.models.loading.auto_dtype import with_auto_dtype

    policy = make_policy(config=config.scheduler, seed=config.seed)  # a wrong name fails first
    make_retention(config.cache.retention)
    check_swap_space(config.cache.swap_space)
    if params is not None and config.parallel.nnodes > 1:
        raise ConfigError("params=... works in a single process only, not with several hosts (--nnodes)")
    started = time.monotonic()
    with all_hosts(config) as hosts:
        leader = hosts if isinstance(hosts, Leader) else None
        if leader is not None:
            on_joined(leader)
        with in_stage(progress, LOADING):
            loaded, mesh = load_weights(config, params)
        config = with_auto_dtype(config, loaded.hf_config)
        tokenizer = _find_tokenizer(config, loaded.path, loaded.config.vocab_size)
        template = None if tokenizer is None else _find_template(config, tokenizer)
        early = early and warm_up and hosts is None
        if build.is_compiling():
            with in_stage(progress, KERNELS):
                build.wait()
        with in_stage(progress, LAYOUT):
            executor = make_executor(
                config,
                loaded,
                mesh,
                conversion=converts(policy) or config.cache.swap_space > 0,
                both_ends=reserver_for(policy, config.cache).fills_both_ends,
                huge_pages=not early,
                keep_params=params is not None,
            )
        loaded_s = time.monotonic()
        unprepared = None
        with room_for_steps():
            if early and executor.can_start_early:
                others = executor.warm_up_first(of_stage(progress, "preparing"))
                is_known = not calibrate or load_calibration(calibration_path(executor)) is not None
                unprepared = Unprepared(programs=others, calibration_s=None if is_known else calibration_s)
                calibrate = False
            elif warm_up:
                executor.warm_up(of_stage(progress, "preparing"))
            if early and unprepared is None:
                for _ in use_huge_pages(executor.host_buffers()):
                    pass
            warm_s = time.monotonic()
            executor.leader = leader
            if calibrate:
                cost_model = load_or_calibrate(executor, calibration_s, of_stage(progress, "calibrating"))
            else:
                cost_model = load_calibration(calibration_path(executor))
        parts = build_components(
            config,
            executor,
            kinds=cache_kinds(executor, cost_model),
            vocab_size=loaded.config.vocab_size,
            max_model_len=executor.max_model_len,
            tokenizer=tokenizer,
            eos_token_ids=_end_ids(loaded, tokenizer, template),
            policy=policy,
            costs=None if cost_model is None else cost_model.step_costs(),
            disk=open_disk_store(config.cache, executor),
        )
        warn_of_small_pool(parts)
        return dataclasses.replace(
            parts,
            model_config=loaded.config,
            cost_model=cost_model,
            chat_template=template,
            hf_config=loaded.hf_config,
            stored=(loaded.format, loaded.weights),
            load_s=loaded_s - started,
            warm_up_s=warm_s - loaded_s,
            calibration_s=time.monotonic() - warm_s,
            unprepared=unprepared,
        )


def check_swap_space(swap_space: float) -> None:
    """Check that this many GiB of host memory are free.

    Raises:
        ConfigError: less memory is free.
    """
    spare_gib = spare_memory_bytes() / (1 << 30)
    if swap_space > spare_gib:
        raise ConfigError(
            f"swap_space={swap_space:g} GiB is more than the {spare_gib:.1f} GiB of free host memory; lower --swap-space"
        )


def open_disk_store(cache: CacheConfig, executor: "JaxExecutor") -> DiskStore | None:
    """Open the configured directory of cached prefixes; None: no directory is configured, or there is no host tier.

    Raises:
        ConfigError: the directory cannot be used.
    """
    if cache.prefix_cache_dir is None or executor.host is None:
        return None
    from apt_jax.executor.transfers.disk_store import FileStore
    from apt_jax.executor.transfers.model_identity import model_identity
    from apt_jax.executor.transfers.prefix_files import PrefixFiles

    with activity("reading the weights for --prefix-cache-dir"):
        identity = model_identity(executor)
    max_bytes = int(cache.prefix_cache_size * (1 << 30))
    files = PrefixFiles(Path(cache.prefix_cache_dir), identity, executor.host.block_bytes, (2, 1), max_bytes)
    logger.info(
        "%s: %d cached groups of blocks match this model and these flags; all files: %.2f GiB",
        cache.prefix_cache_dir,
        files.num_groups,
        files.num_bytes / 2**30,
    )
    return FileStore(files, executor.host)


def warn_of_small_pool(parts: EngineComponents) -> None:
    """Log a warning if the cache is too small for a request of the maximum length: such requests are rejected."""
    limits = parts.limits
    if limits.max_pool_tokens is not None and limits.max_pool_tokens < limits.max_model_len:
        logger.warning(
            "the cache holds only %d tokens, max_model_len is %d: longer requests are rejected (--max-model-len, "
            "--device-memory-utilization, --num-blocks-override)",
            limits.max_pool_tokens,
            limits.max_model_len,
        )


def recalibrate(
    parts: EngineComponents, budget_s: float, progress: Callable[[int, int], None] | None = None
) -> EngineComponents:
    """Measure step costs now, for about `budget_s` seconds, and use them in the same engine; loads and stores nothing.

    The measurement overwrites the block pool: call it before any request is served.
    """
    from apt_jax.executor.calibrate import calibrate
    from apt_jax.executor.jax_executor import JaxExecutor

    assert isinstance(parts.executor, JaxExecutor)
    return with_costs(parts, calibrate(parts.executor, budget_s, progress))


def freeze_gc_heap() -> None:
    """Exclude all current objects, such as model and programs, from garbage collection. Meant for serving processes.

    A full collection that visits them would stall every request, and every other host, for some tenths of a second.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def all_hosts(config: EngineConfig) -> Iterator["Hosts | None"]:
    """Join the other hosts of this replica and report exceptions in the context to them; yields None on a single host.
    This is the first use of the devices, so it also sets the share of their memory that JAX takes."""
    import jax

    from apt_jax.models import read_model_config, resolve_model
    from apt_jax.models import sharding as parallel

    ours = config.parallel
    if not set_memory_fraction() and jax.default_backend() in ("gpu", "cuda", "rocm"):
        logger.warning(
            "JAX was used before the engine was made, so it takes three quarters of a GPU's memory; set "
            "XLA_CLIENT_MEM_FRACTION=%s, or make the engine first",
            MEMORY_FRACTION,
        )
    if ours.tensor_parallel_size == 1:
        yield None
        return
    # Check the model before anything is loaded.
    resolved = resolve_model(config.model, allow_preset=config.load_format == "dummy")
    model = read_model_config(resolved.fields, config.max_model_len)[1]
    parallel.check_size(model, ours.tensor_parallel_size)
    if ours.nnodes == 1:
        yield None
        return
    from apt_jax.distributed.rendezvous import join

    hosts = join(config, model, resolved)
    with hosts.propagate_errors():
        yield hosts


def load_weights(config: EngineConfig, params: "ModelParams | None" = None) -> "tuple[LoadedModel, Mesh | None]":
    """Load the model, with `params` as its weights if given; return it and its device mesh (None: not sharded)."""
    import jax

    from apt_jax.executor.attention_choice import check_attention
    from apt_jax.models import load_model, read_model_config, resolve_model
    from apt_jax.models import sharding as parallel

    ours = config.parallel

    def read_model() -> "ModelConfig":
        resolved = resolve_model(config.model, allow_preset=config.load_format == "dummy")
        return read_model_config(resolved.fields, config.max_model_len)[1]

    check_attention(config, jax.local_devices()[0], read_model)
    if ours.nnodes == 1:  # JAX stores programs on rank 0 only, and all ranks must do the same
        use_compile_cache()
    mesh = None
    if ours.tensor_parallel_size > 1:
        mesh = parallel.tensor_mesh(ours.tensor_parallel_size, ours.nnodes)
    sharding = None if mesh is None else functools.partial(parallel.leaf_sharding, mesh, cache=config.cache)
    with _room_for("the weights", _SMALLER_WEIGHTS), activity(f"loading {config.model}"):
        return load_model(config, sharding, params), mesh


def make_executor(
    config: EngineConfig,
    loaded: "LoadedModel",
    mesh: "Mesh | None",
    *,
    conversion: bool = False,
    both_ends: bool = False,
    huge_pages: bool = True,
    keep_params: bool = False,
) -> "JaxExecutor":
    """Make the executor of a loaded model; nothing is compiled yet."""
    from apt_jax.executor.jax_executor import JaxExecutor

    with _room_for("the weights in the executor's layout", _SMALLER_WEIGHTS), activity("laying out weights and cache"):
        return JaxExecutor(
            loaded.params,
            loaded.config,
            cache=config.cache,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=config.max_model_len or loaded.config.max_position,
            attention=config.attention_backend,
            quantization=config.quantization,
            mesh=mesh,
            conversion=conversion,
            adapters=load_adapters(config, loaded),
            huge_pages=huge_pages,
            load_executables=config.load_executables and config.parallel.nnodes == 1,
            both_ends=both_ends,
            keep_params=keep_params,
        )


def load_adapters(config: EngineConfig, loaded: "LoadedModel") -> "list[LoraAdapter]":
    """Read the LoRA adapters that a configuration names, in the configured order."""
    if not config.lora_modules:
        return []
    from apt_jax.models.families.registry import FAMILIES
    from apt_jax.models.loading.lora import load_adapter

    family = next(family for family in FAMILIES.values() if family.name == loaded.config.family)
    return [
        load_adapter(name, path, family, loaded.config, max_rank=config.max_lora_rank)
        for name, path in config.lora_modules.items()
    ]


def room_for_steps() -> contextlib.AbstractContextManager[None]:
    """Return a context that turns an out-of-memory error of a step into a `ConfigError`."""
    return _room_for("the largest steps beside weights and cache", _SMALLER_STEPS)


@contextlib.contextmanager
def _room_for(what: str, advice: str) -> Iterator[None]:
    """Turn an out-of-memory error into a `ConfigError` of one line: bytes requested, bytes free, and advice."""
    from apt_jax.models.loading.loader import free_memory_bytes

    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"(\d{1,20}) ?bytes", str(error))
        needed = "" if asked is None else f" ({int(asked[1]):,} bytes were requested)"
        free = free_memory_bytes()
        there = "" if free is None else f"; {free:,} bytes are free"
        raise ConfigError(f"no memory for {what}{needed}{there}: {advice}") from error


def use_compile_cache() -> bool:
    """Keep compiled programs on disk, which makes the next start quick; return False if that is not possible.

    JAX trusts the files in this directory, so it must belong to this user only. A directory that is already configured
    in JAX stays in use.
    """
    import jax

    if jax.config.jax_compilation_cache_dir:
        return True
    directory = private_dir("compiled")
    if directory is None or not keep_programs(directory):
        return False
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return True


def _find_tokenizer(config: EngineConfig, model_path: Path | None, vocab_size: int) -> Tokenizer | None:
    """Load the configured tokenizer, or else the model's; None: a model without files (`load_format="dummy"`) has no
    tokenizer."""
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer, model_vocab_size=vocab_size)
    if model_path is None or (
        config.load_format == "dummy" and model_path.is_dir() and not (model_path / "tokenizer.json").is_file()
    ):
        return None
    return load_tokenizer(model_path, model_vocab_size=vocab_size)


def _find_template(config: EngineConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the configured chat template, or else the tokenizer's, and check it by rendering it once."""
    if tokenizer.path is None:
        return None
    template = load_chat_template(tokenizer.path, config.chat_template)
    if template is not None:
        template.validate()
    return template


def _end_ids(loaded: "LoadedModel", tokenizer: Tokenizer | None, template: ChatTemplate | None) -> Sequence[int]:
    """Return the model's end tokens; with a chat template also the tokenizer's end token, which may end a turn."""
    ids = loaded.eos_token_ids
    if tokenizer is None or template is None:
        return ids
    end = tokenizer.backend.token_to_id(template.special_tokens.get("eos_token", ""))
    return ids if end is None or end >= loaded.config.vocab_size else tuple(dict.fromkeys([*ids, end]))
