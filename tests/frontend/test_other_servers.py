"""Advice on unknown flags and options."""

import pytest

from apt_jax.frontend.other_servers import _DIFFERENT, _NAMES, _NAMES_OF_CLIENTS, _NOTHING, advice, nearest_flag
from serve.cli.options import Parser
from tests.support.snapshots import parser_of

FLAGS = parser_of("serve")._option_string_actions


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ("--enforce_eager", "--enforce-eager"),
        ("--no-enable-chunked-prefill", "--enable-chunked-prefill"),
        ("--no-async-scheduling", "--async-scheduling"),
        ("--no_trust_remote_code", "--trust-remote-code"),
        ("--no-enable-log-requests", "--enable-log-requests"),
        ("--compilation-config.level", "--compilation-config"),
        ("-O3", "--compilation-config"),
        ("-cc", "--compilation-config"),
        ("--gpu_memory_utilization", "--gpu-memory-utilization"),
        ("--no-enable-lora", "--enable-lora"),
    ],
)
def test_other_spellings_are_told_the_same(given, flag):
    assert advice(given, None, FLAGS) == advice(flag, None, FLAGS) != ""


COMMANDS = {name: parser_of(name)._option_string_actions for name in ("chat", "generate", "bench", "simulate")}


def test_every_name_is_a_flag_and_no_flag_of_serve_or_chat_is_told_anything():
    chat = COMMANDS["chat"]
    names = _NAMES | _NAMES_OF_CLIENTS
    assert {*names.values()} <= {*FLAGS}.union(*COMMANDS.values())
    assert {*_DIFFERENT} <= set(names)
    assert not {*_NAMES} & {*_NAMES_OF_CLIENTS}
    assert set(FLAGS) & {*names, *_NOTHING} == {"--api-key"}  # which chat does not have
    assert not chat.keys() & {*names, *_NOTHING}


@pytest.mark.parametrize(
    ("command", "words", "flag"),
    [
        ("simulate", ("--policy", "--policies", "--scheduler"), "--scheduling-policy"),
        ("simulate", ("--request-rate", "--qps", "--arrival-rate"), "--rate"),
        ("simulate", ("--num-prompts", "--requests", "--n-requests"), "--num-requests"),
        ("bench", ("--requests", "--n-requests"), "--num-requests"),
        ("bench", ("--qps", "--arrival-rate"), "--rate"),
        ("bench", ("--output-file", "--save-result"), "--json"),
        ("bench", ("--dataset", "--dataset-name"), "--trace"),
        ("bench", ("--input-len", "--random-input"), "--random-input-len"),
        ("generate", ("--n-predict", "-n", "--max-new-tokens"), "--max-tokens"),
        ("chat", ("--temp",), "--temperature"),
        ("chat", ("-m", "--hf-repo"), "--model"),
        ("generate", ("--guided-json",), "--json-schema"),
    ],
)
def test_names_of_other_commands_are_told_by_each_command(command, words, flag):
    for word in words:
        assert advice(word, None, COMMANDS[command]).startswith(f"; it is {flag} here")


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("--max_model_len", "--max-model-len"),
        ("--max-num-seq", "--max-num-seqs"),
        ("--tensor-parallel", "--tensor-parallel-size"),
        ("--operator-key", "--operator-key-file"),
        ("--enable-prefix-cache", "--enable-prefix-caching"),
        ("--no-prefix-caching", "--no-enable-prefix-caching"),
        ("--no-http2", "--no-http"),
    ],
)
def test_a_similar_flag_is_named(word, flag):
    assert nearest_flag(word, FLAGS) == f"; did you mean {flag}?"


@pytest.mark.parametrize(
    "word",
    [
        "--no-max-loras",
        "--no-enable-chunked-prefil",
        "--max-num",
        "--lora-dtype",
        "--scheduler-cls",
        "--no",
        "--",
        "-x",
    ],
)
def test_no_other_flag_is_named(word):
    assert nearest_flag(word, FLAGS) == ""


def test_an_unknown_flag_of_a_small_command():
    parser = Parser(prog="x")
    parser.add_argument("--you")
    assert advice("--enforce-eager", None, parser._option_string_actions) == ""
    assert nearest_flag("--url", parser._option_string_actions) == ""
