"""Any flags: a configuration that can be served, or exit code 2 (1 for files) and one line that says why; unknown flags
have a line each.

Commands that would load a model or open a port stop before it; files that flags name are made with any content.
"""

import argparse
import contextlib
import importlib
import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from apt_jax.config import EngineConfig
from apt_jax.options import SET_FLAG
from serve import cli
from serve.cli import options
from serve.cli.commands import serve as serve_command
from serve.cli.flags import Parser
from serve.cli.main import _COMMANDS
from tests.support.cases import num_cases
from tests.support.fuzzing import cases, fuzz

COMMANDS = ("serve", "generate", "chat", "calibrate", "convert", "info")
"""Commands whose whole configuration is made from flags before anything is started."""


def parser_of(command: str) -> Parser:
    parser = Parser(prog=f"apt-jax {command}")
    importlib.import_module(_COMMANDS[command][0]).add_arguments(parser)
    return parser


ACTIONS = {
    command: {flag: a for a in parser_of(command)._actions for flag in a.option_strings if flag not in ("-h", "--help")}
    for command in COMMANDS
}
"""Flags of each command."""
SETTINGS = {
    command: [] if settings is None else sorted(settings._actions, key=lambda action: action.dest)
    for command in COMMANDS
    for settings in [parser_of(command).settings]
}
"""Settings of each command, which ``--set`` gives."""
_CHOICES = sorted({str(c) for flags in ACTIONS.values() for action in flags.values() for c in action.choices or ()})
_NUMBERS = st.sampled_from(
    ["0", "1", "2", "16", "17", "64", "4096", "-1", "-0", "1.5", "0.5", "1e3", "1e400", "nan", "inf", "-inf", "2147483648", "9" * 25, "9" * 5000, "0x10", "1_000", " 7 ", "٣", "", "1,2", "1e-320"]
)  # fmt: skip
_WORDS = st.sampled_from(
    ["", " ", "a", "none", "auto", "kv", "hidden", "hybrid", "apt", "apt?violation_decay=0.4", "apt?x=1", "apt?", "apt?violation_decay=nan", "os:path", "json:JSONDecoder", "a.b:C", ":", "x:y:z", "127.0.0.1", "0.0.0.0",
     "::1", "[::1]:80", "localhost:99999", "http://x", "https://127.0.0.1:1", "../..", "/etc/passwd", "/dev/null", "FILE", "FILE", "DIR", "\0", "a\nb", "é", "\udcff", "x" * 5000, "--", "-", "%s", "{}", "tiny-opt", "opt-13b", "no/model", "a@b"]
)  # fmt: skip
_VALUES = _NUMBERS | _WORDS | st.sampled_from(_CHOICES) | st.text(max_size=5)
_CONTENTS = st.sampled_from([b"", b"\n", b"key-0123456789-0123456789\n", b"short\n", b"a b\n", b"\xff\xfe", b"\0" * 50, b"{}", b'{"type": "object"}', b"[", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", b"x" * 100_000, b"a" * 40 + b"\n" + b"a" * 40 + b"\n", b"start: /a/\n"]) | st.binary(max_size=80)  # fmt: skip


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command and some of its flags, with values that are mostly of their kind."""
    command = draw(st.sampled_from(COMMANDS))
    argv = [command]
    for _ in range(draw(st.integers(0, 5))):
        flag, action = draw(st.sampled_from(sorted(ACTIONS[command].items(), key=lambda item: item[0])))
        if draw(st.integers(0, 25)) == 0:
            flag = draw(st.sampled_from([flag[:-1], flag + "x", "--x", "-x", flag.upper(), flag + "=1", "---" + flag]))
        argv.append(flag)
        if flag == SET_FLAG:
            setting = draw(st.sampled_from(SETTINGS[command]))
            usual = ["true", "false"] if setting.nargs == 0 else [str(setting.default), "1", "16"]
            value = draw(st.sampled_from(usual)) if draw(st.integers(0, 3)) else draw(_VALUES)
            argv.append(draw(st.sampled_from([setting.dest, f"{setting.dest}={value}", f"{setting.dest}={value}"])))
        elif action.nargs != 0:
            usual = [str(choice) for choice in action.choices or ()] or [str(action.default), "1", "16", "FILE"]
            argv.append(draw(st.sampled_from(usual)) if draw(st.integers(0, 3)) else draw(_VALUES))
    if draw(st.integers(0, 9)) == 0:
        argv.insert(draw(st.integers(1, len(argv))), draw(_VALUES))
    return argv


class _StartedError(Exception):
    """A command has checked its flags and would begin."""


def _start(*_args: Any, **_kwargs: Any) -> Any:
    raise _StartedError


def run_flags(argv: list[str]) -> tuple[int | None, str]:
    """Exit code and what was written; None: it would begin. The engine's configuration is made and checked."""
    written = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(written),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        command = importlib.import_module(_COMMANDS[argv[0]][0])

        def checked(args: argparse.Namespace) -> int:
            if argv[0] == "serve":
                config, _, _ = serve_command.check(args)
            elif hasattr(args, "scheduling_policy"):
                config = options.engine_config(args)
            else:
                config = None
            if hasattr(args, "top_p"):
                options.request_fields(args)
            assert config is None or isinstance(config, EngineConfig)
            raise _StartedError

        patch.setattr(command, "run", checked)
        try:
            return cli.main(argv), written.getvalue()
        except SystemExit as exit_:
            code = exit_.code
            return code if isinstance(code, int) else 1, written.getvalue()
        except _StartedError:
            return None, written.getvalue()


class Flags:
    """Checks of command lines, and counts of how they ended."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def check(self, argv: list[str], content: bytes) -> None:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "file"
            file.write_bytes(content)
            file.chmod(0o600)
            places = {"FILE": str(file), "DIR": directory}
            code, written = run_flags([places.get(word, word) for word in argv])
        ended = "started" if code is None else str(code)
        self.counts[ended] = self.counts.get(ended, 0) + 1
        if code is None or code == 0:
            return
        assert code in (1, 2), (code, written)
        lines = written.splitlines()
        unknown = [line for line in lines if ": unknown flag " in line]
        assert lines == unknown or len(lines) == 1, written
        assert all(line.startswith("apt-jax") and len(line) < 2000 for line in lines), written


@pytest.mark.seeds
def test_O2_any_flags_are_a_configuration_or_one_line():
    total = cases(num_cases(150, 400), 2_000, 20_000)
    flags = Flags()
    fuzz("command-line", flags.check, total, argv=command_lines(), content=_CONTENTS)
    print(f"  {flags.counts}")
    assert flags.counts.get("started", 0) > total / 20, flags.counts
    assert flags.counts.get("2", 0) > total / 5, flags.counts
