"""Frequencies of rotary position embeddings, as Hugging Face configurations describe them.

`read_rope` turns the fields of a ``config.json`` into a `RopeConfig`. Names of types and fields are those of
transformers, old (``rope_theta`` and ``rope_scaling``) and new (``rope_parameters``):

default   1 / theta^(2i / R)                                           (Su et al., 2021)
linear    all frequencies divided by `factor`                          (Chen et al., 2023)
dynamic   theta grows with the context: "dynamic NTK"                  (bloc97 and emozilla, 2023)
llama3    low frequencies divided by `factor`, high ones kept          (Llama 3.1)
yarn      like llama3 with a ramp over lanes, and scaled scores        (Peng et al., 2023)
longrope  a factor per lane, one set for short contexts, one for long  (Ding et al., 2024)
proportional  frequencies of all lanes, of which the lowest are 0        (Gemma 4)

Two types (dynamic and longrope) depend on the length of the context. Cached keys cannot be rotated again when a context
grows, so the frequencies are fixed for one length, `max_len`. Up to the original context they are exactly those of
transformers; a longer context requires a larger `max_len` (``--max-model-len``), which fixes the frequencies of that
length.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apt_jax.errors import ModelLoadError
from apt_jax.models.config import RopeConfig
from apt_jax.models.config_fields import ConfigFields, shown

TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_OLD_NAMES = {"su": "longrope"}


def _parameters(fields: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Return the RoPE parameters from the configuration's old or new fields."""
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):  # the second replaces the first
        value = fields.get(name)
        if not value:
            continue
        if not isinstance(value, Mapping) or any(isinstance(v, Mapping) for v in value.values()):
            raise ModelLoadError(
                f"config.json: {name}={shown(value, 60)} must be one object of plain values for all layers"
            )
        found = dict(value)
    if found.get("rope_theta") is None:
        found["rope_theta"] = theta if fields.get("rope_theta") is None else fields["rope_theta"]
    original = fields.get("original_max_position_embeddings")
    if original is not None:
        found["original_max_position_embeddings"] = original
    kind = found.get("rope_type", found.get("type", "default"))
    if not isinstance(kind, str) or _OLD_NAMES.get(kind, kind) not in TYPES:
        raise ModelLoadError(f"config.json: rope type {shown(kind, 40)} is not known; known: {', '.join(TYPES)}")
    return found | {"rope_type": _OLD_NAMES.get(kind, kind)}


def _powers(theta: float, rotary_dim: int) -> NDArray[np.float32]:
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return np.float32(theta) ** exponent


def _llama3(get: ConfigFields, inv_freq: NDArray[np.float32], original: int) -> NDArray[np.float32]:
    factor = get.number("factor", at_least=1.0)
    low, high = get.number("low_freq_factor"), get.number("high_freq_factor")
    if not 0 < low < high:
        raise ModelLoadError(
            f"config.json: rope low_freq_factor={low} and high_freq_factor={high} must be positive and in this order"
        )
    wavelength = 2 * np.float32(math.pi) / inv_freq
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    scaled = inv_freq / np.float32(factor)
    mixed = (1 - smooth) * scaled + smooth * inv_freq
    return np.where(wavelength > original / low, scaled, np.where(wavelength < original / high, inv_freq, mixed))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(
    get: ConfigFields, theta: float, rotary_dim: int, original: int, factor: float
) -> tuple[NDArray[np.float32], float]:
    def lane(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    fast, slow = (get.number(n, d, at_least=0.0) or d for n, d in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if theta <= 1 or min(fast, slow) < 1e-6:
        raise ModelLoadError(
            f"config.json: rope rope_theta={theta:g}, beta_fast={fast:g} and beta_slow={slow:g} are not valid for type 'yarn'"
        )
    low, high = lane(fast), lane(slow)
    if get.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (np.arange(rotary_dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3)
    keep = 1 - np.clip(ramp, 0, 1).astype(np.float32)
    powers = _powers(theta, rotary_dim)
    inv_freq = (1 - keep) / (np.float32(factor) * powers) + keep / powers

    top, bottom = (get.number(n, 0.0, at_least=0.0) for n in ("mscale", "mscale_all_dim"))
    attention = _mscale(factor, top) / _mscale(factor, bottom) if top and bottom else _mscale(factor, 1.0)
    return inv_freq.astype(np.float32), get.number("attention_factor", attention)


def _longrope(
    get: ConfigFields, fields: Mapping[str, Any], powers: NDArray[np.float32], original: int, max_len: int, longest: int
) -> tuple[NDArray[np.float32], float]:
    name = "long_factor" if max_len > original else "short_factor"
    factors = fields.get(name)
    if (
        not isinstance(factors, list)
        or len(factors) != powers.size
        or not all(isinstance(f, int | float) and not isinstance(f, bool) and 0 < f < 1e30 for f in factors)
    ):
        raise ModelLoadError(f"config.json: rope {name} must be a list of {powers.size} positive numbers")
    if original < 2:
        raise ModelLoadError(f"config.json: rope original_max_position_embeddings={original} must be at least 2")
    factor = get.number("factor", longest / original)
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    inv_freq = np.float32(1) / (np.asarray(factors, np.float32) * powers)
    return inv_freq, get.number("attention_factor", attention)


def read_rope(
    fields: Mapping[str, Any],
    head_dim: int,
    *,
    theta: float = 10_000.0,
    partial: float = 1.0,
    can_be_partial: bool = False,
    max_len: int | None = None,
) -> tuple[RopeConfig, int]:
    """Return the rotary embedding of a ``config.json``, and the longest context in tokens for which its frequencies
    hold.

    Args:
        fields: fields of the configuration, with ``max_position_embeddings``.
        head_dim: H.
        theta: default of the base.
        partial: default of ``partial_rotary_factor``, the fraction of a head's lanes that are rotated.
        can_be_partial: accept a fraction below one; otherwise it is refused, because transformers would rotate all
            lanes.
        max_len: longest context to serve, in tokens; None: the original context for longrope, the extended context for
            yarn, otherwise ``max_position_embeddings``.

    Raises:
        ModelLoadError: an unknown type, or a missing or impossible field.
    """
    found = _parameters(fields, theta)
    get = ConfigFields(found, "config.json: rope ")
    share = get.number("partial_rotary_factor", ConfigFields(fields).number("partial_rotary_factor", partial))
    if head_dim > 8192:
        raise ModelLoadError(f"config.json: heads of {head_dim} lanes; at most 8192 are supported")
    kind, turned = found["rope_type"], share
    if kind == "proportional" and 2 <= int(head_dim * share) <= head_dim:  # all lanes are pairs, some of frequency 0
        share = 1.0
    if share != 1 and not can_be_partial:
        raise ModelLoadError(f"config.json: partial_rotary_factor={share:g} is not supported for this architecture")
    rotary_dim = int(head_dim * share)
    if not 0 < share <= 1 or rotary_dim < 2 or rotary_dim % 2:
        raise ModelLoadError(
            f"config.json: {rotary_dim} of {head_dim} lanes of a head would be rotated; the number must be positive and even"
        )
    base = get.number("rope_theta", at_least=1.0)
    longest = ConfigFields(fields).positive("max_position_embeddings")
    original = get.positive("original_max_position_embeddings", longest)
    attention = 1.0
    native = limit = longest
    if kind == "dynamic":
        factor = get.number("factor", at_least=1.0)
        limit = max(longest, int(longest * factor))
        if rotary_dim <= 2:
            raise ModelLoadError("config.json: rope type 'dynamic' needs more than two rotary lanes")
        served = min(limit, max(longest, max_len or longest))
        base *= (factor * served / longest - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))
        inv_freq = 1 / _powers(base, rotary_dim)
    elif kind == "linear":
        factor = get.number("factor", at_least=1.0)
        limit = max(longest, int(longest * factor))
        inv_freq = 1 / _powers(base, rotary_dim) / np.float32(factor)
    elif kind == "llama3":
        inv_freq = _llama3(get, np.float32(1) / _powers(base, rotary_dim), original)
    elif kind == "yarn":
        factor = get.number("factor", max(1.0, longest / original), at_least=1.0)
        native = limit = max(longest, int(original * factor))
        inv_freq, attention = _yarn(get, base, rotary_dim, original, factor)
    elif kind == "longrope":
        native = min(original, longest)
        powers = _powers(base, rotary_dim)
        inv_freq, attention = _longrope(get, found, powers, original, max_len or native, longest)
    elif kind == "proportional":
        inv_freq = 1 / _powers(base, rotary_dim) / np.float32(get.number("factor", 1.0, at_least=1e-6))
        inv_freq[int(turned * head_dim // 2) :] = 0.0
    else:
        inv_freq = 1 / _powers(base, rotary_dim)
    rope = RopeConfig(inv_freq=tuple(np.asarray(inv_freq, np.float32).tolist()), attention_factor=attention)
    return rope, min(limit, max(native, max_len or native))


def latent_score_factor(fields: Mapping[str, Any]) -> float:
    """Return the factor on attention scores that a rotary embedding with ``mscale_all_dim`` asks for in models with
    latent attention: the square of YaRN's ``mscale``.

    Raises:
        ModelLoadError: as `read_rope`.
    """
    found = _parameters(fields, 10_000.0)
    get = ConfigFields(found, "config.json: rope ")
    weight = get.number("mscale_all_dim", 0.0, at_least=0.0)
    if found["rope_type"] == "default" or not weight:
        return 1.0
    return _mscale(get.number("factor", at_least=0.0), weight) ** 2


__all__ = ["TYPES", "latent_score_factor", "read_rope"]
