"""Choice of the attention implementation of an executor."""

import logging
from typing import Any

from apt_jax.backends import attention_ops
from apt_jax.errors import ConfigError
from apt_jax.models.config import HiddenMode, ModelConfig
from apt_jax.ops.backend import KernelBackend

logger = logging.getLogger(__name__)


def needed_extras(
    config: ModelConfig, hidden_mode: HiddenMode | None, hidden: bool, adapted_keys: bool = False
) -> frozenset[str]:
    """Return the features of `ops.backend.EXTRAS` that a model needs; `adapted_keys`: adapters add to W_k or W_v."""
    needed = {
        "softcap": config.attention_softcap is not None,
        "alibi": bool(config.alibi_slopes),
        "window": any(window is not None for window in config.layer_windows),
        "key norm": hidden and config.qk_norm is not None,
        "grouped absorption": hidden_mode in ("partial", "v-absorb") and config.num_heads > config.num_kv_heads,
        "adapters": hidden and adapted_keys,
        "input width": hidden and config.hidden_size != config.lane,
    }
    return frozenset(name for name, is_needed in needed.items() if is_needed)


def choose_attention(
    platform: str, wanted: str | KernelBackend | None, chip: str | None, extras: frozenset[str]
) -> KernelBackend:
    """Return the requested ops, or the platform's default; XLA's where the default lacks a feature that the model
    needs."""
    if isinstance(wanted, KernelBackend):
        ops = wanted
    else:
        try:
            ops = attention_ops(platform, wanted, chip)
        except ValueError as error:
            raise ConfigError(f"{error} (--attention-backend)") from None
    missing = ", ".join(sorted(extras - ops.extras))
    if not missing:
        return ops
    if wanted is not None:
        raise ConfigError(
            f"attention backend {ops.name!r} cannot do what this model needs: {missing}; use xla (--attention-backend)"
        )
    logger.warning("attention: %s cannot do %s; this model runs on xla", ops.name, missing)
    return attention_ops(platform, "xla", chip)


def chip_of(device: Any) -> str | None:
    """The chip that the tiles of GPU kernels are chosen for; None where there is no GPU."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return None
    if float(capability) < 8.0:
        raise ValueError(f"{device.device_kind} has compute capability {capability}; the kernels need 8.0 or newer")
    return "sm_90" if float(capability) >= 9.0 else "sm_80"
