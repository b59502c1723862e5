"""Chooses an executor's attention implementation: the platform's kernels, and XLA's ops for features that they lack."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from apt_jax.backends import attention_ops, check_platform
from apt_jax.config import EngineConfig
from apt_jax.errors import ConfigError
from apt_jax.models.config import HiddenMode, ModelConfig
from apt_jax.ops.backend import ATTENTION_OPS, BY_LAYER, KernelBackend
from apt_jax.ops.calls import DecodeCall, LogitModifiers, PrefillCall

logger = logging.getLogger(__name__)

_HIDDEN_OP = {None: "decode_reprojected", "absorb": "decode_absorbed", "partial": "decode_v_absorbed"}
"""Decode op of hidden rows, by hidden mode; modes not listed use the op of "partial"."""

_WITH_TILES = (None, "triton", "triton-onepass", "jax-triton")
"""Backends whose kernels have tile sizes only for some GPUs and head sizes; None: the platform's default."""

CHECKED_TPUS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}
"""TPU generations that kernels and steps are test-compiled for (`make gate-tpu`), keyed by JAX's device kind."""


def needed_extras(
    config: ModelConfig,
    hidden_mode: HiddenMode | None,
    *,
    kv: bool,
    hidden: bool,
    adapted_keys: bool = False,
) -> dict[str, frozenset[str]]:
    """Return the features of `ops.backend.EXTRAS` that a model needs from each op that it uses.

    Args:
        hidden_mode: parts of attention that are absorbed when hidden rows decode; None: reprojection.
        kv, hidden: True: rows of this cache kind may occur.
        adapted_keys: True: adapters change W_k or W_v.
    """
    rules = {
        "softcap": config.attention_softcap is not None,
        "alibi": bool(config.alibi_slopes),
        "window": any(window is not None for window in config.layer_windows),
        "sinks": config.attention_sinks,
    }
    projected = {
        "key norm": config.qk_norm == "head",
        "lane norm": config.qk_norm == "lane",
        "adapters": adapted_keys,
        "input width": config.input_width != config.lane,
    }
    grouped = {"grouped absorption": config.num_heads > config.num_kv_heads}
    of_kv = rules | {"slot width": config.global_attention is not None}
    needed = {"prefill": of_kv}
    if kv:
        needed["decode_kv"] = of_kv
    if hidden:
        decode = _HIDDEN_OP.get(hidden_mode, "decode_v_absorbed")
        needed[decode] = rules | projected | (grouped if decode == "decode_v_absorbed" else {})
        needed["prefill_hidden"] = rules | projected
    return {op: frozenset(name for name, is_needed in names.items() if is_needed) for op, names in needed.items()}


def choose_attention(
    platform: str, wanted: str | KernelBackend | None, chip: str | None, needed: Mapping[str, frozenset[str]]
) -> KernelBackend:
    """Return the requested ops, or the platform's default ops. A default op that lacks a needed feature is replaced by
    XLA's op: only in the layers that need it if the feature modifies logits (`LogitModifiers`), otherwise in all
    layers.

    Args:
        needed: needed features by op, from `needed_extras`.

    Raises:
        ConfigError: the ops are unknown, or ops requested by name lack a feature that the model needs.
    """
    if isinstance(wanted, KernelBackend):
        ops = wanted
    else:
        try:
            ops = attention_ops(platform, wanted, chip)
        except ValueError as error:
            raise ConfigError(f"{error} (--attention-backend)") from None
    missing = {op: extras - ops.extras_of(op) for op, extras in needed.items()}
    missing = {op: extras for op, extras in missing.items() if extras}
    if not missing:
        return ops
    if wanted is not None:
        every = ", ".join(sorted(frozenset().union(*missing.values())))
        raise ConfigError(
            f"attention backend {ops.name!r} lacks features of this model: {every}; use xla (--attention-backend)"
        )
    for op, extras in sorted(missing.items()):
        where = "in the layers that need it" if extras <= BY_LAYER else "in all layers"
        logger.warning(
            "attention: %s of %s does not support %s; xla is used %s", op, ops.name, ", ".join(sorted(extras)), where
        )
    return _with_xla(ops, attention_ops(platform, "xla", chip), missing)


def _with_xla(ops: KernelBackend, xla: KernelBackend, missing: Mapping[str, frozenset[str]]) -> KernelBackend:
    """Return `ops`, with the ops of `xla` for calls that need missing features."""

    def falls_back(op: str, call: DecodeCall | PrefillCall) -> bool:
        extras = missing.get(op, frozenset())
        return bool(extras - BY_LAYER) or bool(extras & _needs_of(call))

    def either(op: str) -> Callable[..., Any]:
        kernel, plain = getattr(ops, op), getattr(xla, op)

        def choose(*arguments: Any) -> Any:
            call: DecodeCall | PrefillCall = arguments[-1]
            has_hidden = isinstance(call, PrefillCall) and call.hidden_prefixes is not None
            return (plain if falls_back("prefill_hidden" if has_hidden else op, call) else kernel)(*arguments)

        return choose

    changed = {"prefill" if op == "prefill_hidden" else op for op in missing}
    # XLA's decode ops process rows in tiles, so a step with one of them costs as if all its decode ops did.
    rows = ops.rows_per_tile if changed == {"prefill"} else max(ops.rows_per_tile, xla.rows_per_tile)
    shards = ops.takes_shards - changed
    either_of = {op: either(op) for op in ATTENTION_OPS if op in changed}
    return dataclasses.replace(ops, rows_per_tile=rows, takes_shards=shards, **either_of)


def _needs_of(call: DecodeCall | PrefillCall) -> frozenset[str]:
    """Return the names in `BY_LAYER` of the features that one layer's call needs."""
    rules = call.rules or LogitModifiers()
    given = {"softcap": rules.softcap, "alibi": rules.slopes, "window": rules.window, "sinks": rules.sinks}
    given |= {"slot width": call.lane}
    return frozenset(name for name, value in given.items() if value is not None)


def chip_of(device: Any) -> str | None:
    """Return the chip that kernels are tiled for: a class of NVIDIA GPUs or a TPU generation; None: another device.
    Logs a warning for TPU generations for which nothing was test-compiled.

    Raises:
        ConfigError: the GPU is too old for the kernels.
    """
    if getattr(device, "platform", None) == "tpu":
        if device.device_kind not in CHECKED_TPUS:
            checked = ", ".join(dict.fromkeys(CHECKED_TPUS.values()))
            logger.warning(
                "%s: apt-jax is checked only for TPUs %s; if programs do not compile, leave out the kernels (--attention-backend xla)",
                device.device_kind,
                checked,
            )
        return CHECKED_TPUS.get(device.device_kind)
    capability = getattr(device, "compute_capability", None)
    if capability is None or "gfx" in str(capability):
        return None
    from apt_jax.pallas.triton_tiles import chip_for

    try:
        return chip_for(float(capability))
    except ValueError as error:
        raise ConfigError(f"{device.device_kind}: {error}; use xla (--attention-backend xla)") from None


def check_attention(config: EngineConfig, device: Any, read_model: Callable[[], ModelConfig]) -> None:
    """Check, before anything is loaded, that the kernels run on the platform and have tiles for the GPU and the model.

    Args:
        read_model: function that returns the model's configuration; called only if the check depends on it.

    Raises:
        ConfigError: the kernels cannot run; the message is one line that gives the reason and a remedy.
    """
    try:
        check_platform(config.attention_backend or "", device.platform)
    except ValueError as error:
        raise ConfigError(f"{error} (--attention-backend)") from None
    if device.platform not in ("gpu", "cuda") or config.attention_backend not in _WITH_TILES:
        return
    chip = chip_of(device)
    from apt_jax.pallas.triton_tiles import check_chip

    try:
        check_chip(chip, read_model().head_dim)
    except ValueError as error:
        raise ConfigError(f"{device.device_kind}: {error}; use xla (--attention-backend xla)") from None
