"""Hardware descriptions: data files with the costs of a model on a card, one per model, card and number of devices.

    descriptions/opt-13b_a100-40gb_x1.json  ->  load_hardware("opt-13b", "a100-40gb")  ->  Hardware

A description holds the pool size (blocks that fit in memory besides the weights) and the coefficients of
`apt_jax.costs.model.StepCosts` for each way to attend over hidden cache. It names the source of each number (`basis`,
`source`) and the errors of the fit (`fit`). `tools/hardware_descriptions.py` writes the files that come with the
package, from measured public profiles; ``apt-jax calibrate --describe FILE`` writes one for the machine that it runs
on.
"""

import dataclasses
import functools
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any, cast

from apt_jax.core.kinds import WindowSpec
from apt_jax.costs.hardware import COEFFICIENTS, OPTIONAL_COEFFICIENTS, Hardware
from apt_jax.costs.model import StepCosts
from apt_jax.costs.programs import ProgramCosts, ProgramShapes
from apt_jax.errors import ConfigError
from apt_jax.utils.text_files import read_text

__all__ = [
    "as_description",
    "known_hardware",
    "load_hardware",
    "save_hardware",
]
FORMAT_VERSION = 1
"""Value of `format` in a description file."""
_LEFT_OUT = frozenset({"hidden_block_size", "kv_blocks_per_group", "windows"})
"""Fields that a description file has only if they differ from their defaults."""


def save_hardware(hardware: Hardware, path: Path | str) -> None:
    """Write a description file that `load_hardware` reads, replacing an existing file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    data = as_description(hardware)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def as_description(hardware: Hardware) -> dict[str, Any]:
    """Return the contents of a description file, for JSON."""
    data = {"format": FORMAT_VERSION, **dataclasses.asdict(hardware)}
    for field in dataclasses.fields(Hardware):
        if field.name in _LEFT_OUT and data[field.name] == field.default:
            del data[field.name]
    for costs in data["costs"].values():
        del costs["one_program"]  # given by `programs`
        for name in OPTIONAL_COEFFICIENTS:
            if not costs[name]:
                del costs[name]
    return data


def known_hardware() -> list[tuple[str, str, int]]:
    """Return (model, hardware, num_devices) of each description that comes with the package, sorted."""
    return sorted(_bundled())


def load_hardware(model: str, hardware: str, num_devices: int | None = None) -> Hardware:
    """Return a hardware description, by name or from a file.

    Args:
        model: name of the model.
        hardware: a name from `known_hardware`, or the path of a ``.json`` file of the same format.
        num_devices: number of devices that share every layer; None: the smallest number that has a description.

    Raises:
        ConfigError: no description has these names (the message lists the known names), the file cannot be read or has
            an invalid field (the message names it), or it describes another model or number of devices.
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
    return _parse(read_text(path, "--hardware"), str(path))


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
    """Build a `Hardware`, checking the type of each field; `Hardware` checks the values.

    Raises:
        ValueError: a field is missing, unknown or invalid; the message starts with its name.
    """
    fields = _object(data, "description")
    version = fields.pop("format", None)
    if version != FORMAT_VERSION:
        raise ValueError(f"format: {version!r} must be {FORMAT_VERSION}")
    declared = {field.name: field for field in dataclasses.fields(Hardware)}
    for name in fields:
        if name not in declared:
            raise ValueError(f"{name}: unknown field")
    for name in declared:
        if name not in fields and name not in {"fit", "programs"} | _LEFT_OUT:
            raise ValueError(f"{name}: missing")
    for name in ("name", "model", "source"):
        if not isinstance(fields[name], str):
            raise ValueError(f"{name}: {fields[name]!r} must be a string")
    for name in ("num_devices", "max_model_len", "block_size", "num_blocks"):
        fields[name] = _integer(fields[name], name)
    for name in ("hidden_blocks_per_group", "hidden_block_size"):
        if fields.get(name) is not None:
            fields[name] = _integer(fields[name], name)
    if "kv_blocks_per_group" in fields:
        fields["kv_blocks_per_group"] = _integer(fields["kv_blocks_per_group"], "kv_blocks_per_group")
    if fields.get("windows") is not None:
        fields["windows"] = _windows(_object(fields["windows"], "windows"))
    programs = fields.get("programs")
    if programs is not None:
        programs = _programs(_object(programs, "programs"))
    costs = {}
    for mode, values in _object(fields["costs"], "costs").items():
        coefficients = _numbers(values, f"costs.{mode}")
        for name in coefficients:
            if name not in COEFFICIENTS:
                raise ValueError(f"costs.{mode}.{name}: unknown coefficient")
        for name in COEFFICIENTS:
            if name not in coefficients and name not in OPTIONAL_COEFFICIENTS:
                raise ValueError(f"costs.{mode}.{name}: missing")
        one_program = programs is None or programs.shapes.mixed
        costs[mode] = StepCosts(**coefficients, one_program=one_program)
    basis = _object(fields["basis"], "basis")
    for name, value in basis.items():
        if not isinstance(value, str):
            raise ValueError(f"basis.{name}: {value!r} must be a string")
    fit = {part: _numbers(values, f"fit.{part}") for part, values in _object(fields.get("fit", {}), "fit").items()}
    parsed = {"costs": costs, "basis": basis, "fit": fit, "programs": programs}
    return Hardware(**{**fields, **parsed})


def _windows(fields: dict[str, Any]) -> WindowSpec:
    names = [field.name for field in dataclasses.fields(WindowSpec)]
    for name in [*fields, *names]:
        if name not in names or name not in fields:
            raise ValueError(f"windows.{name}: {'missing' if name in names else 'unknown field'}")
    return WindowSpec(**{name: _integer(value, f"windows.{name}") for name, value in fields.items()})


def _programs(fields: dict[str, Any]) -> ProgramCosts:
    for name in fields:
        if name not in ("shapes", "coefficients"):
            raise ValueError(f"programs.{name}: unknown field")
    shapes = _object(fields.get("shapes"), "programs.shapes")
    declared = {field.name: field.default for field in dataclasses.fields(ProgramShapes)}
    for name in [*shapes, *declared]:
        if name not in shapes and declared[name] is dataclasses.MISSING:
            raise ValueError(f"programs.shapes.{name}: missing")
        if name not in declared:
            raise ValueError(f"programs.shapes.{name}: unknown field")
    values: dict[str, Any] = {}
    for name, value in shapes.items():
        where = f"programs.shapes.{name}"
        if name.endswith("_buckets"):
            values[name] = tuple(_integer(v, where) for v in _list(value, where))
        elif name == "prefix_sizes":
            pairs = [_list(pair, where) for pair in _list(value, where)]
            if any(len(pair) != 2 for pair in pairs):
                raise ValueError(f"{where}: {value!r:.40} must be pairs")
            values[name] = tuple(
                (_integer(tokens, where), None if room is None else _integer(room, where)) for tokens, room in pairs
            )
        elif name in ("mixed", "by_kind"):
            if not isinstance(value, bool):
                raise ValueError(f"{where}: {value!r:.40} must be true or false")
            values[name] = value
        else:
            values[name] = _integer(value, where)
    where = "programs.coefficients"
    coefficients = _list(fields.get("coefficients"), where)
    numbers = _numbers({str(i): v for i, v in enumerate(coefficients)}, where)
    try:
        shapes = ProgramShapes(**values)
    except ValueError as error:
        raise ValueError(f"programs.shapes.{error}") from None
    try:
        return ProgramCosts(shapes=shapes, coefficients=tuple(numbers.values()))
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
