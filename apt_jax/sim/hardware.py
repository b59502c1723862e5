"""Hardware that is not here: what a model costs on it, as a small data file a model, card and number of devices.

    descriptions/opt-13b_a100-40gb_x1.json  ->  load_hardware("opt-13b", "a100-40gb")  ->  Hardware

A description holds the pool (blocks that are left beside the weights) and the coefficients of `sched.view.StepCosts`
for each way to attend over hidden cache. It says where each number comes from (`basis`, `source`) and how well a fit
meets its points (`fit`). `benchmarks/hardware_descriptions.py` writes the files that come with the package, from
measured public profiles; ``apt-jax calibrate --describe FILE`` writes one for the machine that it runs on.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast

from apt_jax.errors import ConfigError
from apt_jax.sched.program_costs import ProgramCosts, ProgramShapes
from apt_jax.sched.view import KindSpec, StepCosts

__all__ = ["Hardware", "known_hardware", "load_hardware", "save_hardware"]

FORMAT_VERSION = 1
"""Value of `format` in a description file."""

_MODES = ("kv", "reproject", "absorb")
_COEFFICIENTS = tuple(f.name for f in dataclasses.fields(StepCosts) if f.name != "one_program")
_HIDDEN_COEFFICIENTS = tuple(name for name in _COEFFICIENTS if "hidden" in name)
_OPTIONAL_COEFFICIENTS = ("convert_per_hidden_token_s",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """One model on one kind and number of devices. Times are seconds, sizes tokens and blocks."""

    name: str
    """The kind of device, what ``--hardware`` takes: ``a100-40gb``."""
    model: str
    """What ``--model`` takes: ``opt-13b``."""
    num_devices: int
    """Devices that share every layer (tensor parallelism)."""
    max_model_len: int
    """Longest prompt plus output, tokens."""
    block_size: int
    """Keys, or values, that a block holds."""
    num_blocks: int
    """Usable blocks of the unified pool. A KV request of n tokens takes 2 * ceil(n / block_size) of them, a hidden one
    ceil(n / `hidden_block_size`)."""
    hidden_blocks_per_group: int | None
    """1, or None: layer inputs are not smaller than keys and values (few KV heads) or were not measured, so the hidden
    kind is not offered."""
    costs: Mapping[str, StepCosts]
    """By attention over hidden cache: ``reproject``, ``absorb`` where it is exact, at least one; ``kv`` alone where the
    hidden kind is not offered. The coefficients of KV requests are the same in all."""
    basis: Mapping[str, str]
    """Where the numbers come from, by number or group of numbers. ``hidden``, ``reproject`` and ``absorb`` say why the
    kind or the attention is missing where it is."""
    source: str
    """The data behind the description, in prose."""
    programs: ProgramCosts | None = None
    """What steps take by compiled program, where an executor was calibrated: the simulator then times steps by it, and
    `costs` is what policies weigh. None: `costs` times them too."""
    fit: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """By fitted part: num_points, r2, worst_relative_error, mean_relative_error. Empty where another's fit is used."""
    hidden_block_size: int | None = None
    """Layer inputs that a block holds; None: `block_size`, as with multi-head attention of the model's width."""

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
        inputs = self.hidden_block_size
        if inputs is not None and not 2 * inputs > self.block_size:
            raise ValueError(
                f"hidden_block_size: {inputs} must be more than half of block_size {self.block_size}, or null"
            )
        known = _MODES[:1] if hidden is None else _MODES[1:]
        for mode in self.costs:
            if mode not in known:
                raise ValueError(f"costs: {mode!r} must be {' or '.join(known)} for this model")
        if not self.costs:
            raise ValueError(f"costs: {' or '.join(known)} is missing")
        given, first = next(iter(self.costs.items()))
        one_program = self.programs is None or self.programs.shapes.mixed
        for mode, costs in self.costs.items():
            if costs.one_program != one_program:
                raise ValueError(
                    f"costs.{mode}.one_program: {costs.one_program} must be {one_program}, as programs has it"
                )
            for name in _COEFFICIENTS:
                value = getattr(costs, name)
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"costs.{mode}.{name}: {value} must be finite and not < 0")
                if name not in _HIDDEN_COEFFICIENTS and value != getattr(first, name):
                    raise ValueError(
                        f"costs.{mode}.{name}: {value} must equal that of {given!r}, a KV cost"
                    )

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit the pool as keys and values."""
        return self.num_blocks // 2 * self.block_size

    def step_costs(
        self, hidden_attention: Literal["auto", "reproject", "absorb"] = "auto"
    ) -> StepCosts:
        """Coefficients with one way to attend over hidden cache.

        What a conversion of layer inputs to keys and values takes (`StepCosts.convert_per_hidden_token_s`) is, where the
        description does not say, what attention that reprojects takes for a cached token: it computes the same keys and values and
        reads them once, where a conversion writes them. Where that is not described either, computing the token again, which is
        more.

        Args:
            hidden_attention: ``auto`` takes absorption where it is described, else reprojection. Without a hidden kind
                ``auto`` and ``reproject`` are the costs of KV.

        Raises:
            ConfigError: an attention that is not described, or an unknown name.
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
    ) -> tuple[KindSpec, KindSpec]:
        """Both cache kinds, indexed by `sched.view.KV` and `HIDDEN`, with the extra time t = c0 + c1 * tokens.

        Args:
            cache: kinds that may be used. ``hybrid`` means KV where the model has no hidden kind.
            hidden_attention: see `step_costs`.
            rho_us: microseconds a cached token that policies charge the hidden kind with: t = rho m, Apt-Serve Eq. 6.
                None: what a step really takes longer.

        Raises:
            ConfigError: ``hidden`` where the model has no hidden kind, or an unknown name.
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
            KindSpec(name="kv", blocks_per_group=2, offered=cache != "hidden"),
            KindSpec(
                name="hidden",
                blocks_per_group=self.hidden_blocks_per_group or 2,
                offered=cache != "kv" and possible,
                reprojected=hidden_attention == "reproject" or "absorb" not in self.costs,
                extra_base_s=extra_base_s if both else 0.0,
                extra_per_token_s=extra_per_token_s if both else 0.0,
            ),
        )


def save_hardware(hardware: Hardware, path: Path | str) -> None:
    """Write a description that `load_hardware` reads; replaces the file as a whole. Raises OSError."""
    path = Path(path)
    data = {"format": FORMAT_VERSION, **dataclasses.asdict(hardware)}
    if hardware.hidden_block_size is None:
        del data["hidden_block_size"]
    for costs in data["costs"].values():
        del costs["one_program"]  # `programs` says it
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(
            json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def known_hardware() -> list[tuple[str, str, int]]:
    """(model, hardware, num_devices) of the descriptions that come with the package, sorted."""
    return sorted(_bundled())


def load_hardware(model: str, hardware: str, num_devices: int | None = None) -> Hardware:
    """A description by name or from a file.

    Args:
        model: name of the model.
        hardware: a name from `known_hardware`, or the path of a ``.json`` file of the same format.
        num_devices: devices that share every layer; None: the fewest that are described.

    Raises:
        ConfigError: nothing described under these names (the message lists what is), a file that cannot be read (the
            message names the field), or a file about another model or number of devices.
    """
    if hardware.endswith(".json"):
        found = _read(Path(hardware))
        if found.model != model:
            raise ConfigError(f"{hardware} describes {found.model!r}, not {model!r} (--model)")
        if num_devices is not None and found.num_devices != num_devices:
            raise ConfigError(
                f"{hardware} describes {found.num_devices} devices, not {num_devices} (--tensor-parallel-size)"
            )
        return found
    bundled = _bundled()
    of_model = sorted(key for key in bundled if key[0] == model)
    if not of_model:
        models = sorted({key[0] for key in bundled})
        raise ConfigError(
            f"no hardware description for model {model!r}; known: {', '.join(models)} (--model, or a .json file as --hardware)"
        )
    matches = [
        key for key in of_model if key[1] == hardware and num_devices in (None, key[2])
    ]  # sorted: the fewest devices come first
    if not matches:
        known = ", ".join(f"{name} x{count}" for _, name, count in of_model)
        wanted = hardware if num_devices is None else f"{hardware} x{num_devices}"
        raise ConfigError(
            f"no description of {model} on {wanted!r}; known: {known} (--hardware, --tensor-parallel-size)"
        )
    return bundled[matches[0]]


@functools.cache
def _bundled() -> dict[tuple[str, str, int], Hardware]:
    directory = resources.files("apt_jax.sim").joinpath("descriptions")
    found: dict[tuple[str, str, int], Hardware] = {}
    for entry in directory.iterdir():
        if entry.name.endswith(".json"):
            hardware = _parse(entry.read_text(encoding="utf-8"), entry.name)
            found[hardware.model, hardware.name, hardware.num_devices] = hardware
    return found


def _read(path: Path) -> Hardware:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"cannot read {path} ({reason}) (--hardware)") from None
    return _parse(text, str(path))


def _parse(text: str, where: str) -> Hardware:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}".splitlines()[0]) from None
    try:
        return _hardware(data)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _hardware(data: object) -> Hardware:
    """Check types field by field; `Hardware` checks values. Raises ValueError that starts with the field's name."""
    fields = _object(data, "description")
    version = fields.pop("format", None)
    if version != FORMAT_VERSION:
        raise ValueError(f"format: {version!r} must be {FORMAT_VERSION}")
    declared = {field.name: field for field in dataclasses.fields(Hardware)}
    for name in fields:
        if name not in declared:
            raise ValueError(f"{name}: unknown field")
    for name in declared:
        if name not in fields and name not in ("fit", "programs", "hidden_block_size"):
            raise ValueError(f"{name}: missing")
    for name in ("name", "model", "source"):
        if not isinstance(fields[name], str):
            raise ValueError(f"{name}: {fields[name]!r} must be a string")
    for name in ("num_devices", "max_model_len", "block_size", "num_blocks"):
        fields[name] = _integer(fields[name], name)
    for name in ("hidden_blocks_per_group", "hidden_block_size"):
        if fields.get(name) is not None:
            fields[name] = _integer(fields[name], name)
    programs = fields.get("programs")
    if programs is not None:
        programs = _programs(_object(programs, "programs"))
    costs = {}
    for mode, values in _object(fields["costs"], "costs").items():
        coefficients = _numbers(values, f"costs.{mode}")
        for name in coefficients:
            if name not in _COEFFICIENTS:
                raise ValueError(f"costs.{mode}.{name}: unknown coefficient")
        for name in _COEFFICIENTS:
            if name not in coefficients and name not in _OPTIONAL_COEFFICIENTS:
                raise ValueError(f"costs.{mode}.{name}: missing")
        one_program = programs is None or programs.shapes.mixed
        costs[mode] = StepCosts(**coefficients, one_program=one_program)
    basis = _object(fields["basis"], "basis")
    for name, value in basis.items():
        if not isinstance(value, str):
            raise ValueError(f"basis.{name}: {value!r} must be a string")
    fit = {
        part: _numbers(values, f"fit.{part}")
        for part, values in _object(fields.get("fit", {}), "fit").items()
    }
    parsed = {"costs": costs, "basis": basis, "fit": fit, "programs": programs}
    return Hardware(**{**fields, **parsed})


def _programs(fields: dict[str, Any]) -> ProgramCosts:
    for name in fields:
        if name not in ("shapes", "coefficients"):
            raise ValueError(f"programs.{name}: unknown field")
    shapes = _object(fields.get("shapes"), "programs.shapes")
    declared = [field.name for field in dataclasses.fields(ProgramShapes)]
    for name in [*shapes, *declared]:
        if name not in shapes:
            raise ValueError(f"programs.shapes.{name}: missing")
        if name not in declared:
            raise ValueError(f"programs.shapes.{name}: unknown field")
    values: dict[str, Any] = {}
    for name, value in shapes.items():
        where = f"programs.shapes.{name}"
        if name.endswith("_buckets"):
            values[name] = tuple(_integer(v, where) for v in _list(value, where))
        elif name == "mixed":
            if not isinstance(value, bool):
                raise ValueError(f"{where}: {value!r:.40} must be true or false")
            values[name] = value
        else:
            values[name] = _integer(value, where)
    where = "programs.coefficients"
    coefficients = _list(fields.get("coefficients"), where)
    numbers = _numbers({str(i): v for i, v in enumerate(coefficients)}, where)
    try:
        return ProgramCosts(shapes=ProgramShapes(**values), coefficients=tuple(numbers.values()))
    except ValueError as error:
        raise ValueError(f"programs.{error}") from None


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: {value!r:.40} must be a list")
    return cast("list[Any]", value)


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {value!r:.40} must be an object")
    return dict(cast("dict[str, Any]", value))


def _integer(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: {value!r:.40} must be an integer")
    if abs(value) >= 2**31:
        raise ValueError(f"{name}: the number is too large")
    return value


def _numbers(value: object, name: str) -> dict[str, float]:
    numbers = {}
    for key, number in _object(value, name).items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{name}.{key}: {number!r:.40} must be a number")
        try:
            numbers[key] = float(number)
        except OverflowError:
            raise ValueError(f"{name}.{key}: the number is too large") from None
    return numbers
