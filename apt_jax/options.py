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
from typing import Any

from apt_jax.errors import ConfigError


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


def check_options(config: Any) -> None:
    """Check choices and bounds of every option of a dataclass; called from `__post_init__`.

    Raises:
        ConfigError: a value is not allowed; the message is one line with the value, the rule and the flag.
    """
    cls = type(config)
    for name, (field, made) in options_of(cls).items():
        value = getattr(config, name)
        if value is None and field.default is None:
            continue
        kind = option_type(cls, name)
        if kind in (int, float) and not isinstance(value, numbers.Real):
            raise ConfigError(f"{made.keyword}={value!r:.60} must be a number ({made.given_by})")
        choices = typing.get_args(kind)
        if choices and value not in choices:
            rule = made.rule or f"be one of {', '.join(choices)}"
            raise ConfigError(f"{made.keyword}={value!r} must {rule} ({made.given_by})")
        if not choices and not made.allows(value):
            raise ConfigError(f"{made.keyword}={value} must {made.must} ({made.given_by})")


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
