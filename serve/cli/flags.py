"""Command-line flags: the parser, number types, and flags derived from configuration dataclasses and request fields.

A flag has the name, type, choices, default and help of the dataclass field that it sets (`apt_jax.options`) or of the
request field (`apt_jax.validation.REQUEST_FIELDS`); nothing is declared twice.
"""

import argparse
import dataclasses
import decimal
import os
import re
import shlex
import sys
import typing
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from apt_jax.errors import nearest
from apt_jax.frontend.other_servers import advice, nearest_flag, value_of
from apt_jax.options import SET_FLAG, field_docs, option_type, options_of
from apt_jax.validation import REQUEST_FIELDS

Group = argparse._ActionsContainer
"""A parser, or an argument group of a parser."""


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends the default to help texts that do not state it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if action.default is None or isinstance(action.default, bool) or "default: " in text:
            return text
        if action.default == "":
            return f"{text} (default: none)"
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line with the flag and the most similar valid name; exit code 2.

    Attributes:
        brief: longest names of the flags that ``--help`` shows; ``--help=all`` and ``--help=GROUP`` show the
            others (a space instead of ``=`` works too). Empty: ``--help`` shows all flags.
        example: usage example near the end of a brief ``--help``.
        settings: options that ``--set NAME=VALUE`` sets; None: the command has no settings (`settings_of`).
    """

    brief: tuple[str, ...] = ()
    example = ""
    settings: "Settings | None" = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)

        self.register("type", int, _integer)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action,
                f"{str(value)!r:.60} must be one of {', '.join(known)}{nearest(str(value), known)}",
            )

    def _show(self, actions: "Iterable[tuple[str | None, Sequence[argparse.Action]]]", end: str = "") -> NoReturn:
        """Print these flags under their group titles, then `end`, and exit."""
        formatter = self._get_formatter()
        places = [formatter._format_args(action, action.dest) for action in self._actions if not action.option_strings]
        formatter.add_usage(" ".join([self.prog, *places, "[flags]"]), [], [], None)
        formatter.add_text(self.description)
        for title, members in actions:
            formatter.start_section(title)
            formatter.add_arguments(members)
            formatter.end_section()
        self._print_message(formatter.format_help() + end, sys.stdout)
        self.exit()

    def _help_on(self, topic: str) -> None:
        """Print the help on a topic (``--help=TOPIC``) and exit; return if the whole help is to be printed."""
        groups = [(group.title or "", group._group_actions) for group in self._action_groups if group._group_actions]
        if topic == "all" or (not topic and not self.brief):
            return
        if not topic:
            known = {flag: action for action in self._actions for flag in action.option_strings or (action.dest,)}
            titles = _titles(groups)
            rest = f"\n{len(self._actions) - len(self.brief)} more flags: --help=all, --help=GROUP or --help=WORD (in a flag's name); groups: {titles}\n"
            chosen = [known[flag] for flag in self.brief]
            places, flags = [a for a in chosen if not a.option_strings], [a for a in chosen if a.option_strings]
            self._show([("positional arguments", places), ("most used flags", flags)], f"\n{self.example}{rest}")
        found = [(title, members) for title, members in groups if _topic(title) == _topic(topic)]
        if not found:
            word = topic.strip("-").lower().replace("_", "-")
            matching = [
                (title, [a for a in members if any(word in flag for flag in a.option_strings or [_topic(a.dest)])])
                for title, members in groups
            ]
            found = [(title, members) for title, members in matching if members] if word else []
        if not found:
            titles = f"groups: {_titles(groups)}; " if _titles(groups) else ""
            self.error(f"no group or flag matches {topic!r:.60} (--help); {titles}all flags: --help=all")
        self._show(found)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = sys.argv[1:] if args is None else list(args)
        words = given[: given.index("--")] if "--" in given else given
        for at, word in enumerate(words):
            name, _, topic = word.partition("=")
            if word == "-h" or name == "--help":
                if word == "--help" and at + 2 == len(words) and not words[-1].startswith("-"):
                    topic = words[-1]
                self._help_on(topic)
                self.print_help()
                self.exit()
        parsed, unknown = self.parse_known_args(given, namespace)
        names = dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("-") and word != "-")
        if names:
            lines = (f"{self.prog}: unknown flag {name!r:.60}{self._told(name, given)}\n" for name in names)
            self.exit(2, "".join(lines))
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r:.60}{self._place_of(unknown[0])}")
        model = getattr(parsed, "model", None)
        if isinstance(model, str) and _is_address(model) and "model" in self._places():
            place = self._place_of(model) or "; give a model, and the address to listen at as --host and --port"
            self.error(f"{model!r:.80} is the address of a server, not a model{place}")
        return parsed

    def _places(self) -> list[str]:
        """Return the names of the positional arguments."""
        return [action.dest for action in self._actions if not action.option_strings]

    def _place_of(self, word: str) -> str:
        """Return the flag for a word that is not behind one, to append to an error message; empty: not known."""
        flag = "--target" if _is_address(word) else "" if self._places() else "--model"
        return f"; give it as {flag} {word:.60}" if flag in self._option_string_actions else ""

    def _told(self, flag: str, given: Sequence[str]) -> str:
        """Return advice on an unknown flag of this command line, to append to an error message; empty: no advice."""
        value = value_of(flag, given)
        if self.settings is not None and (setting := self.settings.given_by(flag, value)) is not None:
            return f"; it is a setting: {setting}"
        known = self._option_string_actions
        return advice(flag, value, known) or nearest_flag(flag, known)


def _is_address(text: str) -> bool:
    """Return True for the address of a server: a URL or ``HOST:PORT``, but no existing path."""
    return "://" in text or (re.fullmatch(r"[\w.-]+:\d{2,5}", text) is not None and not os.path.exists(text))


def _titles(groups: "Sequence[tuple[str, Sequence[argparse.Action]]]") -> str:
    """Return the names of the groups of flags of a command for messages, without argparse's own."""
    return ", ".join(sorted(_topic(title) for title, _ in groups if title not in ("positional arguments", "options")))


def _topic(title: str) -> str:
    """Return the name of a group of flags as a user types it in ``--help=GROUP``."""
    return title.split("(")[0].strip().lower().replace(" ", "-").replace("_", "-")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not an integer") from None


_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""Units of numbers of tokens, as in vLLM."""


def _tokens(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15}(?=[kmg]))?)([kmgKMG])", text)
    try:
        return int(decimal.Decimal(found[1]) * _UNITS[found[2]]) if found else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is not an integer, 4k (4000) or 4K (4096); leave the flag out for its default"
        ) from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number") from None


def positive(kind: type[int] | type[float]) -> Any:
    """Return an argparse type for positive numbers of this kind."""
    read = _integer if kind is int else _number

    def convert(text: str) -> Any:
        value = read(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r:.40} must be positive")
        return value

    return convert


def share(text: str) -> float:
    """Parse a number in (0, 1]; an argparse type."""
    value = positive(float)(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} must lie in (0, 1], a share such as 0.9")
    return value


def not_negative(text: str) -> float:
    """Parse a number of at least 0; an argparse type."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be at least 0")
    return value


def natural(text: str) -> int:
    """Parse an integer of at least 0; an argparse type."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not an integer of at least 0")
    return int(text)


# --- settings ------------------------------------------------------------------------------------------------------


class Settings(Parser):
    """Rarely changed options: declared like flags, but given as ``--set NAME=VALUE``.

    Args:
        parser: parser of the command. Its help lists the settings in a separate group, and its namespace gets their
            defaults.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(add_help=False)
        self._of = parser
        self._help = parser.add_argument_group(f"settings ({SET_FLAG} NAME=VALUE)")
        self._help.add_argument(
            SET_FLAG, action=_Set, settings=self, dest=argparse.SUPPRESS, metavar="NAME=VALUE",
            help="give one of the settings below; may be given several times",
        )  # fmt: skip

    def add_argument(self, *flags: str, **given: Any) -> argparse.Action:
        action = super().add_argument(*flags, **given)
        self._of.set_defaults(**{action.dest: action.default})
        value = "true|false" if action.nargs == 0 else action.metavar or "|".join(action.choices or ("VALUE",))
        text = action.help or ""
        if action.default is not None and "default: " not in text:
            text += f" (default: {str(action.default).lower()})"
        shown = argparse.Action([], action.dest, metavar=f"{action.dest}={value}", help=text)
        self._help._group_actions.append(shown)  # only in the help: added to the parser, it would be an argument
        return action

    def find(self, name: str) -> argparse.Action | None:
        """Return the setting with this name, whose dashes count as underscores; None: no setting has the name."""
        return next((action for action in self._actions if action.dest == name.replace("-", "_")), None)

    def given_by(self, flag: str, value: str | None) -> str | None:
        """Return the ``--set`` argument that replaces a flag and its value; None: no setting has the flag's name."""
        name = flag.lstrip("-")
        switched_off = name.startswith("no-")
        action = self.find(name.removeprefix("no-"))
        if action is None or (switched_off and action.nargs != 0):
            return None
        if action.nargs == 0:
            value = "false" if switched_off else "true"
        return f"{SET_FLAG} {shlex.quote(f'{action.dest}={value}') if value else f'{action.dest}=VALUE'}"

    def read(self, text: str) -> tuple[str, Any]:
        """Parse ``NAME=VALUE``; returns the name and the value.

        Raises:
            ValueError: the setting is unknown or the value is invalid; the message says which.
        """
        name, equals, given = text.partition("=")
        names = [action.dest for action in self._actions]
        action = self.find(name)
        if action is None:
            hint = nearest(name.replace("-", "_"), names) or "; --help=settings lists them"
            raise ValueError(f"no setting {name!r:.60}{hint}")
        if not equals:
            raise ValueError(f"{text!r:.60} is not {action.dest}=VALUE")
        if action.nargs == 0:
            if given not in ("true", "false"):
                raise ValueError(f"{action.dest}={given!r:.40} must be true or false")
            return action.dest, given == "true"
        try:
            value = self._get_value(action, given)
            self._check_value(action, value)
        except argparse.ArgumentError as error:
            raise ValueError(f"{action.dest}: {error.message}") from None
        return action.dest, value


class _Set(argparse.Action):
    """The argparse action of ``--set NAME=VALUE``."""

    def __init__(self, *args: Any, settings: Settings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            name, value = self._settings.read(values)
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, name, value)


def settings_of(parser: argparse.ArgumentParser) -> Settings:
    """Return the settings of a command; the first call creates them."""
    found: Settings | None = getattr(parser, "settings", None)
    if found is None:
        found = Settings(parser)
        parser.settings = found  # type: ignore[attr-defined]
    return found


# --- derived flags -------------------------------------------------------------------------------------------------


def help_text(doc: str) -> str:
    """Return the first sentence of a docstring as a help text: no capital, except in names such as TTFT and LoRA, no
    period, no markup."""
    text = re.split(r"\.(?: |$)(?=[A-Z]|$)", doc)[0].replace("`", "").replace("%", "%%")
    has_capitals = any(map(str.isupper, text.partition(" ")[0][1:]))
    return text if has_capitals else text[:1].lower() + text[1:]


def add_field(group: Group, cls: type, name: str, *flags: str, **given: Any) -> None:
    """Add the flag of one dataclass field.

    Args:
        group: parser or group that gets the flag.
        cls: dataclass of the field.
        name: name of the field.
        flags: names of the flag; default: the names in its `option`, else the field's name.
        given: arguments of `add_argument`, which override those derived from the field.
    """
    made = options_of(cls)[name][1] if name in options_of(cls) else None
    kind = option_type(cls, name)
    settings: dict[str, Any] = {"default": next(f.default for f in dataclasses.fields(cls) if f.name == name)}
    if "help" not in given:
        settings["help"] = help_text(field_docs(cls)[name])
    if kind is bool:
        settings["action"] = argparse.BooleanOptionalAction
    elif made is not None and made.metavar is not None:
        settings["metavar"] = made.metavar
    elif typing.get_origin(kind) is typing.Literal:
        settings["choices"] = typing.get_args(kind)
    if kind in (int, float):
        in_tokens = kind is int and made is not None and made.metavar == "TOKENS"
        settings["type"] = positive(kind) if made is not None and made.positive else _tokens if in_tokens else kind
    if not flags:
        flags = made.flags if made is not None else (f"--{name.replace('_', '-')}",)
    group.add_argument(*flags, **(settings | given))


def add_options(
    group: Group, cls: type, names: Iterable[str] = (), *, settings: Settings | None = None, **given: dict[str, Any]
) -> None:
    """Add flags for a dataclass's options, or only for the options in `names`.

    Options that are settings are added to `settings` instead, unless it is None. `given` maps field names to arguments
    as in `add_field`.
    """
    for name in names or options_of(cls):
        home = settings if settings is not None and options_of(cls)[name][1].is_setting else group
        add_field(home, cls, name, **given.get(name, {}))


def read_options(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a dataclass's options, keyed by field name; options that `args` lacks are left out."""
    dests = {name: made.dest for name, (_, made) in options_of(cls).items()}
    return {name: getattr(args, dest) for name, dest in dests.items() if hasattr(args, dest)}


def request_help(name: str, end: str = "", *, bounds: bool = True) -> str:
    """Return the help text of a request field, with the field's bounds unless `bounds` is False, followed by `end`."""
    spec = REQUEST_FIELDS[name]
    return help_text(spec.description) + (f"; values: {spec.bounds}" if bounds and spec.bounds else "") + end


def add_request_field(group: Group, name: str, flag: str = "", *, end: str = "", **given: Any) -> None:
    """Add the flag of one request field; if `given` has a `type`, the help omits the field's bounds."""
    spec = REQUEST_FIELDS[name]
    settings: dict[str, Any] = {"help": request_help(name, end, bounds="type" not in given)}
    if spec.type == "boolean":
        settings["action"] = "store_true"
    else:
        settings["type"] = {"integer": int, "number": float}.get(spec.type)
    group.add_argument(flag or f"--{name.replace('_', '-')}", **(settings | given))
