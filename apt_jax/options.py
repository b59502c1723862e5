"""Declaration of configuration options: one dataclass field each, with its docstring, default, bounds and flag.

`option` creates the field, `check_options` checks the values against the bounds and names the flag in its message, and
`field_docs` reads the attribute docstrings for help texts and tables. `serve.cli.flags` derives the command line from
the same fields.
"""

import ast
import dataclasses
import functools
import inspect
import numbers
import textwrap
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np

from apt_jax.errors import ConfigError, one_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """Metadata of one field. A bound of None means no bound."""

    flags: tuple[str, ...]
    """Names of the flag on the command line; empty: the field's name with ``--``."""
    keyword: str
    """Name as a keyword argument and in messages."""
    metavar: str | None
    low: float | None
    high: float | None
    above: float | None
    """Exclusive lower bound."""
    positive: bool
    """True if the value must be a finite number above 0; the flag's parser checks this too."""
    rule: str | None
    """End of the message "NAME=VALUE must ..."; None: derived from the bounds."""
    is_setting: bool
    """True if the option has no flag of its own and is set by ``--set NAME=VALUE``."""

    @property
    def given_by(self) -> str:
        """The flag or setting, as named in error messages."""
        return f"{SET_FLAG} {self.dest}" if self.is_setting else self.flags[-1]

    @property
    def dest(self) -> str:
        """Attribute name of the flag in the parsed arguments."""
        return self.flags[0].lstrip("-").replace("-", "_")

    def allows(self, value: Any) -> bool:
        return (
            (self.low is None or self.low <= value)
            and (self.high is None or value <= self.high)
            and (self.above is None or self.above < value)
            and (not self.positive or 0 < value < float("inf"))
        )

    @property
    def must(self) -> str:
        """End of the message "NAME=VALUE must ..."."""
        if self.rule is not None:
            return self.rule
        if self.high is not None:
            low = f"({_short(self.above)}" if self.low is None else f"[{_short(self.low)}"
            return f"lie in {low}, {_short(self.high)}]{_UNITS.get(self.metavar or '', '')}"
        return "be positive" if self.low is None else f"be at least {_short(self.low)}"


SET_FLAG = "--set"
"""Flag that sets the options without a flag of their own, which are rarely changed."""

_OPTION = "option"
_UNITS = {"GIB": " GiB", "SECONDS": " s"}
"""Unit of a value in messages, keyed by the option's placeholder in help texts."""


def _short(bound: float | None) -> str:
    return f"{bound:,.0f}" if bound is not None and abs(bound) >= 1e6 and bound == round(bound) else f"{bound:g}"


def option(
    default: Any = dataclasses.MISSING,
    *,
    flag: str | tuple[str, ...] | None = None,
    keyword: str = "",
    metavar: str | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    positive: bool = False,
    rule: str | None = None,
    is_setting: bool = False,
) -> Any:
    """Return a dataclass field that is a configuration option.

    Args:
        default: value if the option is not given.
        flag: name or names of the flag, with dashes; None: the field's name with ``--``.
        keyword: name in messages and as a keyword argument of `apt_jax.LLM`; empty: the field's name.
        metavar: placeholder of the value in help texts.
        low, high: inclusive bounds.
        above: exclusive lower bound.
        positive: the value must be a finite number above 0; the flag's parser checks this too. An integer needs `low`
            as well.
        rule: end of the message "NAME=VALUE must ..."; None: derived from the bounds.
        is_setting: the option has no flag of its own and is set by ``--set NAME=VALUE``.
    """
    flags = (flag,) if isinstance(flag, str) else flag or ()
    made = Option(
        flags=flags, keyword=keyword, metavar=metavar, low=low, high=high, above=above, positive=positive, rule=rule,
        is_setting=is_setting,
    )  # fmt: skip
    return dataclasses.field(default=default, metadata={_OPTION: made})


@functools.cache
def options_of(cls: type) -> dict[str, tuple[dataclasses.Field[Any], Option]]:
    """Return the fields of a dataclass that are options, keyed by name, with flags and keyword filled in."""
    return {
        field.name: (
            field,
            dataclasses.replace(
                made,
                flags=made.flags or ("--" + field.name.replace("_", "-"),),
                keyword=made.keyword or field.name,
            ),
        )
        for field in dataclasses.fields(cls)
        if (made := field.metadata.get(_OPTION)) is not None
    }


@functools.cache
def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def unwrap_optional(kind: Any) -> Any:
    """Return the type T of ``T | None``; other types are returned unchanged."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    return parts[0] if type(None) in typing.get_args(kind) and len(parts) == 1 else kind


def option_type(cls: type, name: str) -> Any:
    """Return the type of an option without None: int, float, bool, str or a Literal."""
    return unwrap_optional(_types(cls)[name])


def shown_value(value: object) -> str:
    """Return a wrong value for messages: its first 60 characters, on one line."""
    try:
        return one_line(repr(value.item() if isinstance(value, np.generic) else value))[:60]
    except ValueError:  # an integer with thousands of digits cannot be printed
        return "a huge number"


_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((numbers.Integral,), "a whole number"),
    float: ((numbers.Real,), "a number"),
    bool: ((bool, np.bool_), "True or False"),
    str: ((str,), "a string"),
    Mapping: ((Mapping,), "a mapping"),
    tuple: ((tuple,), "a tuple of strings"),
}
"""For each type of a field: accepted classes, and the end of the message "NAME=VALUE must be ..."."""


def check_type(name: str, value: object, kind: Any, given_by: str = "") -> None:
    """Check the type of a configuration value. NumPy's numbers count as numbers, bools do not.

    Args:
        name: name of the value in messages.
        value: value to check.
        kind: int, float, bool, str, a mapping, a tuple of strings, or a class.
        given_by: flag for the message; empty: none.

    Raises:
        ConfigError: the value has another type.
    """
    kind = typing.get_origin(kind) or kind
    accepted, words = _KINDS.get(kind, ((kind,), f"of the type {kind.__name__}, as in {name}={kind.__name__}(...)"))
    fits = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    if isinstance(value, tuple):
        fits = fits and all(isinstance(part, str) for part in value)
    if not fits:
        raise ConfigError(f"{name}={shown_value(value)} must be {words}{f' ({given_by})' if given_by else ''}")


def check_option(cls: type, name: str, value: Any) -> None:
    """Check type, choices and bounds of the value of one field of a configuration dataclass.

    Raises:
        ConfigError: the value is not allowed; the message is one line with the value, the rule and the flag.
    """
    field, made = options_of(cls).get(name, (None, None))
    kind = _types(cls)[name]
    if value is None and type(None) in typing.get_args(kind):
        return
    kind = unwrap_optional(kind)
    if field is None or made is None:
        return check_type(name, value, kind)
    choices = typing.get_args(kind)
    if not choices:
        check_type(made.keyword, value, kind, made.given_by)
        if not made.allows(value):
            raise ConfigError(f"{made.keyword}={shown_value(value)} must {made.must} ({made.given_by})")
    elif not isinstance(value, str) or value not in choices:
        rule = made.rule or f"be one of {', '.join(choices)}"
        raise ConfigError(f"{made.keyword}={shown_value(value)} must {rule} ({made.given_by})")


def check_options(config: Any) -> None:
    """Check types, choices and bounds of every field of a dataclass; called from `__post_init__`.

    Raises:
        ConfigError: a value is not allowed; the message is one line with the value, the rule and the flag.
    """
    for field in dataclasses.fields(config):
        check_option(type(config), field.name, getattr(config, field.name))


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, keyed by name: the string literal below each field, joined into
    one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }
