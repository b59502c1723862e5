"""Hardware descriptions: the step costs of one model on given devices, and the size of the block pool."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from apt_jax.core.kinds import CacheKindSpec, WindowSpec
from apt_jax.costs.model import StepCosts
from apt_jax.costs.programs import ProgramCosts
from apt_jax.errors import ConfigError

MODES = ("kv", "reproject", "absorb")
COEFFICIENTS = tuple(f.name for f in dataclasses.fields(StepCosts) if f.name != "one_program")
HIDDEN_COEFFICIENTS = tuple(name for name in COEFFICIENTS if "hidden" in name)
OPTIONAL_COEFFICIENTS = (
    "convert_per_hidden_token_s", "load_base_s", "load_per_block_s", "save_per_block_s", "decode_per_window_token_s",
    "window_tokens", "experts_s", "experts_per_token",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Description of one model on given devices; times are in seconds, sizes in tokens or blocks."""

    name: str
    """Name of the device kind, a value of ``--hardware`` such as ``a100-40gb``."""
    model: str
    """Name of the model, a value of ``--model`` such as ``opt-13b``."""
    num_devices: int
    """Number of devices that share every layer (tensor parallelism)."""
    max_model_len: int
    """Maximum length of prompt plus output, in tokens."""
    block_size: int
    """Number of tokens whose keys (or whose values) fit in a block."""
    num_blocks: int
    """Number of usable blocks of the unified pool. A KV request of n tokens takes 2 * ceil(n / block_size) blocks, a
    hidden request ceil(n / `hidden_block_size`)."""
    hidden_blocks_per_group: int | None
    """Blocks per group of the hidden kind: 1. None: the hidden kind is not offered, because layer inputs are not
    smaller than keys and values (few KV heads) or its costs were not measured."""
    costs: Mapping[str, StepCosts]
    """Step costs for each kind of attention over hidden cache: ``reproject``, ``absorb`` (only if absorption is exact
    for the model) or both; only ``kv`` if the hidden kind is not offered. All entries have the same KV coefficients."""
    basis: Mapping[str, str]
    """Source of each number or group of numbers, keyed by its name. The entries ``hidden``, ``reproject`` and
    ``absorb`` give the reason if that kind or attention is missing."""
    source: str
    """Description of the data behind the numbers, in prose."""
    programs: ProgramCosts | None = None
    """Step times by compiled program, from the calibration of an executor. The simulator uses them; policies always use
    `costs`. None: the simulator uses `costs` too."""
    fit: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """Quality of each fitted part, keyed by its name: num_points, r2, worst_relative_error, mean_relative_error. Empty
    if the costs do not come from a fit."""
    hidden_block_size: int | None = None
    """Number of layer inputs that fit in a block; None: `block_size`, as for multi-head attention of the model's
    width."""
    kv_blocks_per_group: int = 2
    """Blocks per group of the KV kind: 2, or 1 if keys and values are cached as one tensor."""
    windows: WindowSpec | None = None
    """Groups of windowed layers; None: all layers keep all positions."""

    def __post_init__(self) -> None:
        for name in ("name", "model"):
            if not getattr(self, name):
                raise ValueError(f"{name}: must not be empty")
        for name in ("num_devices", "max_model_len", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks: {self.num_blocks} must be at least 2, one K and one V")
        hidden = self.hidden_blocks_per_group
        if hidden is not None and hidden != 1:
            raise ValueError(f"hidden_blocks_per_group: {hidden} must be 1 or null")
        if self.kv_blocks_per_group not in (1, 2):
            raise ValueError(f"kv_blocks_per_group: {self.kv_blocks_per_group} must be 1 or 2")
        if self.windows is not None and min(dataclasses.astuple(self.windows)) < 1:
            raise ValueError(f"windows: {dataclasses.asdict(self.windows)} must be positive numbers")
        if self.windows is not None and hidden is not None:
            raise ValueError("windows: layer inputs and windows are not offered together; use null for one of them")
        for mode, costs in self.costs.items():
            if costs.experts_per_token > 1:
                raise ValueError(f"costs.{mode}.experts_per_token: {costs.experts_per_token} must be at most 1")
        inputs = self.hidden_block_size
        if inputs is not None and not 2 * inputs > self.block_size:
            raise ValueError(
                f"hidden_block_size: {inputs} must be more than half of block_size {self.block_size}, or null"
            )
        known = MODES[:1] if hidden is None else MODES[1:]
        for mode in self.costs:
            if mode not in known:
                raise ValueError(f"costs: {mode!r} must be {' or '.join(known)} for this model")
        if not self.costs:
            raise ValueError(f"costs: {' or '.join(known)} is missing")
        given, first = next(iter(self.costs.items()))
        one_program = self.programs is None or self.programs.shapes.mixed
        for mode, costs in self.costs.items():
            if costs.one_program != one_program:
                raise ValueError(f"costs.{mode}.one_program: {costs.one_program} must be {one_program}, as in programs")
            for name in COEFFICIENTS:
                value = getattr(costs, name)
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"costs.{mode}.{name}: {value} must be finite and not < 0")
                if name not in HIDDEN_COEFFICIENTS and value != getattr(first, name):
                    raise ValueError(f"costs.{mode}.{name}: {value} must equal that of {given!r}, a KV cost")

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens whose keys and values fit in the pool; of one request if there are windowed layers."""
        return self._kv_kind(offered=True).tokens_in(self.num_blocks, self.block_size)

    def _kv_kind(self, *, offered: bool) -> CacheKindSpec:
        return CacheKindSpec(
            name="kv", blocks_per_group=self.kv_blocks_per_group, offered=offered, windows=self.windows
        )

    def step_costs(self, hidden_attention: Literal["auto", "reproject", "absorb"] = "auto") -> StepCosts:
        """Return the step costs for one kind of attention over hidden cache.

        If the description lacks the cost of converting layer inputs to keys and values
        (`StepCosts.convert_per_hidden_token_s`), the cost per cached token of reprojecting attention is used instead:
        it covers computing the same keys and values, and reading them once, while a conversion writes them once. If
        that cost is missing too, the higher cost of computing the token again is used.

        Args:
            hidden_attention: ``auto`` selects absorption if it is described, else reprojection. If the model has no
                hidden kind, both ``auto`` and ``reproject`` return the KV costs.

        Raises:
            ConfigError: the attention is not described, or its name is unknown.
        """
        if hidden_attention not in ("auto", "reproject", "absorb"):
            raise ConfigError(
                f"hidden_attention={hidden_attention!r} must be one of auto, reproject, absorb (--hidden-attention)"
            )
        if self.hidden_blocks_per_group is None and hidden_attention != "absorb":
            return self.costs["kv"]
        if hidden_attention == "auto":
            hidden_attention = "absorb" if "absorb" in self.costs else "reproject"
        if hidden_attention not in self.costs:
            reason = self.basis.get(hidden_attention, "no costs are given")
            raise ConfigError(
                f"hidden_attention={hidden_attention!r} is not described for {self.model} on {self.name}: {reason} (--hidden-attention)"
            )
        costs = self.costs[hidden_attention]
        if costs.convert_per_hidden_token_s:
            return costs
        convert_s = costs.prefill_per_token_s
        if "reproject" in self.costs:
            convert_s = self.costs["reproject"].decode_per_hidden_token_s
        return dataclasses.replace(costs, convert_per_hidden_token_s=convert_s)

    def kinds(
        self,
        cache: Literal["kv", "hidden", "hybrid"],
        hidden_attention: Literal["auto", "reproject", "absorb"] = "auto",
        *,
        rho_us: float | None = None,
    ) -> tuple[CacheKindSpec, CacheKindSpec]:
        """Return both cache kinds, indexed by `core.kinds.KV` and `HIDDEN`, with the extra time t = c0 + c1 * tokens.

        Args:
            cache: kinds that may be used. ``hybrid`` means only KV if the model has no hidden kind.
            hidden_attention: see `step_costs`.
            rho_us: microseconds per cached token that policies charge for the hidden kind: t = rho m, Apt-Serve Eq. 6.
                None: the extra time derived from the step costs.

        Raises:
            ConfigError: ``hidden`` is requested but the model has no hidden kind, or a name is unknown.
        """
        if cache not in ("kv", "hidden", "hybrid"):
            raise ConfigError(f"cache={cache!r} must be one of kv, hidden, hybrid (--cache)")
        possible = self.hidden_blocks_per_group is not None
        if cache == "hidden" and not possible:
            reason = self.basis.get("hidden", "not offered")
            raise ConfigError(
                f"cache='hidden' is not described for {self.model} on {self.name}: {reason}; use --cache kv"
            )
        costs = self.step_costs(hidden_attention)
        both = cache == "hybrid" and possible
        extra_base_s = costs.decode_per_hidden_request_s - costs.decode_per_request_s
        extra_per_token_s = costs.decode_per_hidden_token_s - costs.decode_per_token_s
        if rho_us is not None:
            extra_base_s, extra_per_token_s = 0.0, 1e-6 * rho_us
        return (
            self._kv_kind(offered=cache != "hidden"),
            CacheKindSpec(
                name="hidden",
                blocks_per_group=self.hidden_blocks_per_group or 2,
                offered=cache != "kv" and possible,
                reprojected=hidden_attention == "reproject" or "absorb" not in self.costs,
                extra_base_s=extra_base_s if both else 0.0,
                extra_per_token_s=extra_per_token_s if both else 0.0,
            ),
        )
