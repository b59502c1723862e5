"""Lookup of policies by name, with options: policies from this package, from installed packages, and from any module.

    NAME                    a bundled policy, or an entry point of the group `apt_jax.scheduling_policies`
    package.module:Class    a class, imported from Python's search path or else from the current directory
    ...?option=value&...    one of the above, with keyword arguments for its constructor

A class from outside this package must declare `interface_version` (see `apt_jax.sched.view.INTERFACE_VERSION`).
"""

import dataclasses
import hashlib
import importlib
import importlib.metadata
import inspect
import itertools
import json
import operator
import os
import secrets
import sys
import traceback
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apt_jax.errors import ConfigError, nearest, one_line
from apt_jax.sched.view import INTERFACE_VERSION, Policy

ENTRY_POINTS = "apt_jax.scheduling_policies"
"""Entry point group in which installed packages declare their policies by name."""

_FLAG = "(--scheduling-policy)"
_HOW = "(docs/writing_a_policy.md, --scheduling-policy)"

_loaded: dict[str, bytes] = {}
"""SHA-256 digest of each outside module's file when it was imported, keyed by module name."""
_process = secrets.token_hex(16)


@dataclasses.dataclass(frozen=True)
class PolicyMaker:
    """A policy's class and the constructor arguments that the policy's name implies.

    A constructor argument called `seed` gets the engine's seed unless `settings` or the options set it.
    """

    cls: type[Any]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""
    """Paper or server that the policy comes from."""
    summary: str = ""
    """One-line description for lists of policies."""
    assumes_reprojection: bool = False
    """True if the policy chooses well only where attention over a hidden cache costs as much as by reprojection."""

    def __call__(self, seed: int, options: Mapping[str, Any] | None = None) -> Policy:
        values = {"seed": seed} if "seed" in _parameters(self.cls) else {}
        return self.cls(**{**values, **self.settings, **(options or {})})

    @property
    def is_bundled(self) -> bool:
        return _is_ours(self.cls.__module__)

    def options(self) -> dict[str, inspect.Parameter]:
        """Return the constructor arguments that may be set as options; the `name` of a bundled policy is fixed."""
        accepted = _parameters(self.cls)
        return {n: p for n, p in accepted.items() if not (n == "name" and self.is_bundled)}


def is_bundled(policy: Policy) -> bool:
    """Return True if a policy belongs to this package, whose tests ensure that its plans are valid."""
    return _is_ours(type(getattr(policy, "first", policy)).__module__)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "apt_jax"


def find_policy(text: str, bundled: Mapping[str, PolicyMaker]) -> tuple[PolicyMaker, dict[str, Any]]:
    """Find the policy that `--scheduling-policy` names, and the values of its options, without building the policy.

    Raises:
        ConfigError: the policy or an option is unknown, the value of an option has the wrong type, or the class cannot
            be used (`_load_class`); the message is one line.
    """
    name, mark, query = text.partition("?")
    if name in bundled:
        maker = bundled[name]
    elif ":" in name:
        maker = PolicyMaker(_load_class(name, name))
    else:
        maker = PolicyMaker(_load_class(_installed(name, bundled), name))
    return maker, read_options(text, maker, query) if mark else {}


def make(text: str, bundled: Mapping[str, PolicyMaker], seed: int) -> Policy:
    """Build the policy that `text` names.

    Raises:
        ConfigError: the policy is not found (`find_policy`), cannot be built with these options, or has no `name`.
    """
    maker, options = find_policy(text, bundled)
    try:
        policy = maker(seed, options)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"policy={text!r:.200} cannot be built: {_told(error)} {_FLAG}") from error
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"policy={text!r:.200} has no `name` (a string for logs) {_HOW}")
    return policy


def source_digest(text: str, bundled: Mapping[str, PolicyMaker]) -> str | None:
    """Return a digest of the files that define an outside policy and its base classes; None for a bundled policy.

    The digest of a class without a file (as in a notebook) differs from process to process.
    """
    maker, _ = find_policy(text, bundled)
    if maker.is_bundled:
        return None
    digest = hashlib.sha256()
    for cls in maker.cls.__mro__:
        if cls is not object and not _is_ours(cls.__module__):
            file = getattr(sys.modules.get(cls.__module__), "__file__", None)
            digest.update(Path(file).read_bytes() if file else _process.encode())
    return digest.hexdigest()


# --- classes from outside ------------------------------------------------------------------------------------------


def _installed(name: str, bundled: Mapping[str, PolicyMaker]) -> str:
    """Return the `package.module:Class` that the entry point with this name declares."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    found = sorted({f"{p.module}:{p.attr}" for p in points if p.name == name})
    if len(found) > 1:
        raise ConfigError(f"policy={name!r} is declared by several packages: name one of {', '.join(found)} {_FLAG}")
    if found:
        return found[0]
    if name == "priority":
        raise ConfigError(
            f"policy={name!r} is vLLM's: here a request's priority is its class, which apt-plus and bros tell apart (docs/serving/classes.md) {_FLAG}"
        )
    if "," in name:
        raise ConfigError(
            f"policy={name!r:.200} is a list: give one policy (apt-jax simulate compares several) {_FLAG}"
        )
    hint = nearest(name, sorted({*bundled, *points.names})) or ";"
    raise ConfigError(
        f"policy={name!r:.200} is unknown{hint} `apt-jax policies` lists all; others are package.module:Class {_FLAG}"
    )


def _load_class(path: str, name: str) -> type:
    """Load a policy class and check its interface version.

    Args:
        path: `package.module:Class`.
        name: name of the policy for error messages.

    Raises:
        ConfigError: the class cannot be imported, is not a policy, or does not declare this interface version.
    """
    what = f"policy={name!r:.200}" + ("" if path == name else f" ({path})")
    module_name, _, attribute = path.partition(":")
    if not all(map(str.isidentifier, module_name.split("."))) or not attribute:
        raise ConfigError(
            f"{what} is not package.module:Class; the module is searched for on Python's path and in the current directory {_FLAG}"
        )
    try:
        module = _import(module_name)
    except (Exception, SystemExit) as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name in _prefixes(module_name):
            hint = f"; it is searched for on Python's path and in {Path.cwd()}"
            if module_name.endswith(".py"):
                hint = f"; did you mean {module_name.removesuffix('.py')}:{attribute}?"
        raise ConfigError(f"{what} cannot be imported: {_told(error)}{hint} {_FLAG}") from error
    try:
        cls = operator.attrgetter(attribute)(module)
    except AttributeError:
        classes = [n for n, v in vars(module).items() if isinstance(v, type)]
        hint = nearest(attribute, classes)
        if module_name == "__main__":
            hint = ": other processes do not see classes defined in a notebook; put the class in a file"
        raise ConfigError(f"{what}: {module_name} has no {attribute!r:.60}{hint} {_FLAG}") from None
    if not isinstance(cls, type):
        raise ConfigError(f"{what} is not a class but {type(cls).__name__} {_HOW}")
    if not callable(getattr(cls, "schedule", None)):
        raise ConfigError(f"{what} has no method schedule(view) {_HOW}")
    if _is_ours(cls.__module__):
        return cls
    version = getattr(cls, "interface_version", None)
    if version is None:
        raise ConfigError(
            f"{what} does not declare `interface_version`; this apt-jax has `interface_version = {INTERFACE_VERSION}` {_HOW}"
        )
    if version != INTERFACE_VERSION:
        raise ConfigError(
            f"{what} is written for interface_version {version!r:.40}; this apt-jax has {INTERFACE_VERSION} {_HOW}"
        )
    return cls


def _import(name: str) -> types.ModuleType:
    """Import a module, or reload it if its file has changed since the import (as happens in notebooks)."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that a stray file does not hide an installed module
    importlib.invalidate_caches()
    was_there = name in sys.modules
    module = importlib.import_module(name)
    file = getattr(module, "__file__", None)
    if _is_ours(name) or not file or not os.path.isfile(file):
        return module
    digest = hashlib.sha256(Path(file).read_bytes()).digest()
    if was_there and _loaded.get(name, digest) != digest and name != "__main__":
        module = importlib.reload(module)
    _loaded[name] = digest
    return module


def _prefixes(name: str) -> set[str]:
    """Return the full names of a module and of all packages that contain it."""
    return set(itertools.accumulate(name.split("."), "{}.{}".format))


def _told(error: BaseException) -> str:
    """Return a one-line description of an exception, with file and line if it was raised outside this package."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and frames and _in_this_package(frames[-1].filename):
        return f"{one_line(str(error)):.300}"  # it names the option and its bounds
    text = f"{type(error).__name__}: {one_line(str(error)):.300}"
    if frames and not frames[-1].filename.startswith("<") and not _in_this_package(frames[-1].filename):
        text += f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    return text


def _in_this_package(filename: str) -> bool:
    return Path(filename).is_relative_to(Path(__file__).parents[1]) or "importlib" in filename


# --- options -------------------------------------------------------------------------------------------------------


def _parameters(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the arguments of a constructor that can be passed by name."""
    try:
        found = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # not written in Python
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in found.items() if p.kind in by_name}


def read_options(
    text: str, maker: PolicyMaker, query: str, *, what: str = "policy", flag: str = _FLAG
) -> dict[str, Any]:
    """Return the values of the options in `query`, the part of `text` after the question mark.

    Args:
        text: the whole value, for error messages.
        maker: class whose constructor takes the options.
        query: `option=value`, separated by ``&``.
        what, flag: keyword and flag that take the value, for error messages.

    Raises:
        ConfigError: an option is unknown, given twice, or has a value of the wrong type.
    """
    accepted = maker.options()
    try:
        hints = typing.get_type_hints(maker.cls.__init__)
    except Exception:  # annotations with names that only a type checker knows
        hints = {}
    values: dict[str, Any] = {}
    for part in query.split("&"):
        option, equals, given = part.partition("=")
        where = f"{what}={text!r:.200}"
        if not equals or not option:
            raise ConfigError(f"{where}: {part!r:.60} is not option=value {flag}")
        if option not in accepted:
            known = f"has the options {', '.join(accepted)}" if accepted else "has no options"
            raise ConfigError(f"{where}: no option {option!r:.60}{nearest(option, accepted)}; it {known} {flag}")
        if option in values:
            raise ConfigError(f"{where}: option {option} is given twice {flag}")
        default = accepted[option].default
        hint = hints.get(option, Any)
        if hint is Any and default not in (None, inspect.Parameter.empty):
            hint = type(default)
        try:
            values[option] = _value(given, hint)
        except ValueError as error:
            raise ConfigError(f"{where}: {option}={given!r:.60} {error} {flag}") from None
    return values


_TYPES = {float: "a number", int: "an integer", bool: "true or false", type(None): "none"}


def _told_types(hints: Sequence[Any]) -> str:
    """Return the types of a union in words, for an error message."""
    words = []
    for hint in hints:
        words += typing.get_args(hint) or [_TYPES.get(hint, str(hint))]
    return ", ".join(map(str, words[:-1])) + f" or {words[-1]}"


def _value(text: str, hint: Any) -> Any:
    """Convert `text` to the type of a constructor argument: a number, bool, literal, string, None or a union of them.

    Raises:
        ValueError: the text is not a value of this type; the message lacks its subject, as in "must be one of a, b".
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for one in sorted(args, key=lambda one: one is str):  # str last: it accepts any text
            try:
                return _value(text, one)
            except ValueError:
                continue
        raise ValueError(f"is not {_told_types(args)}")
    if origin is typing.Literal:
        for one in args:
            if str(one) == text:
                return one
        raise ValueError(f"must be one of {', '.join(map(str, args))}{nearest(text, map(str, args))}")
    if hint is str:
        return text
    try:
        value = json.loads(text.lower().replace("none", "null"))
    except ValueError:
        value = text
    if hint is Any:
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number:
        return float(value)
    if hint is int and is_number and isinstance(value, int):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint in (None, type(None)) and value is None:
        return None
    if hint in _TYPES:
        raise ValueError(f"is not {_TYPES[hint]}")
    raise ValueError("cannot be given as text")
