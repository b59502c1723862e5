"""Snapshots of the public surface: command-line flags, the OpenAPI document, public names, protobuf messages.

`tests/test_snapshots.py` compares them with `tests/snapshots/*.json`. After an intended change, rewrite the files with

    python -m tests.support.snapshots
"""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import apt_jax
from apt_jax.options import SET_FLAG
from apt_jax.validation import RequestLimits
from serve.batches.config import BatchConfig
from serve.batches.http.openapi import BatchDescription
from serve.cli.flags import Parser
from serve.cli.main import _COMMANDS
from serve.http_api import openapi
from serve.protos.aptjax.v1 import apt_serve_pb2

DIRECTORY = Path(__file__).parents[1] / "snapshots"
PROBES = ("-1", "0", "1", "1.5", "inf", "ttft:5")
"""Values given to every flag: what a flag makes of them tells its type and its bounds."""


def parser_of(command: str) -> Parser:
    """The parser of a command."""
    parser = Parser(prog=command)
    importlib.import_module(_COMMANDS[command][0]).add_arguments(parser)
    return parser


def cli_flags() -> dict[str, dict[str, Any]]:
    """The flags of every command: names, types, choices and defaults; not the help texts."""
    flags: dict[str, dict[str, Any]] = {}
    for command in _COMMANDS:
        parser = parser_of(command)
        flags[command] = {}
        exclusive = {
            id(action): number
            for number, group in enumerate(parser._mutually_exclusive_groups)
            for action in group._group_actions
        }
        actions = sorted(parser._actions, key=lambda action: (action.option_strings, action.dest))
        settings = [] if parser.settings is None else sorted(parser.settings._actions, key=lambda action: action.dest)
        for action in (*actions, *settings):
            facts = {
                "dest": action.dest,
                "action": type(action).__name__,
                "default": repr(action.default),
                "metavar": action.metavar,
                "nargs": action.nargs,
                "required": action.required or None,
                "choices": None if action.choices is None else list(action.choices),
                "exclusive": exclusive.get(id(action)),
                "values": None if action.type is None else [_value(parser, action, v) for v in PROBES],
            }
            name = ", ".join(action.option_strings) or f"<{action.dest}>"
            if action in settings:
                name = f"{SET_FLAG} {action.dest}"
            flags[command][name] = {key: fact for key, fact in facts.items() if fact is not None}
    return flags


def _value(parser: argparse.ArgumentParser, action: argparse.Action, text: str) -> str:
    try:
        value = parser._get_value(action, text)
    except argparse.ArgumentError as error:
        return str(error.message)
    return repr(value)


def openapi_document() -> dict[str, Any]:
    """Return the document of a server that has everything, without the version."""
    limits = RequestLimits(vocab_size=1000, max_model_len=512, max_pool_tokens=400)
    document = openapi.document(
        limits,
        ["toy", "alias"],
        has_keys=True,
        profiles=True,
        stores_responses=True,
        batches=BatchDescription(BatchConfig(directory=Path())),
    )
    del document["info"]["version"]
    return document


def public_names() -> dict[str, Any]:
    """`apt_jax.__all__`, and the messages, enums and methods of our proto file."""
    proto = apt_serve_pb2.DESCRIPTOR
    return {
        "apt_jax": sorted(apt_jax.__all__),
        "messages": {
            name: {field.name: field.number for field in message.fields}
            for name, message in sorted(proto.message_types_by_name.items())
        },
        "enums": {
            name: {value.name: value.number for value in enum.values}
            for name, enum in sorted(proto.enum_types_by_name.items())
        },
        "services": {
            name: [method.name for method in service.methods]
            for name, service in sorted(proto.services_by_name.items())
        },
    }


SNAPSHOTS = {
    "cli_flags.json": cli_flags,
    "openapi.json": openapi_document,
    "public_names.json": public_names,
}


def text_of(value: Any, depth: int) -> str:
    """JSON with one line per leaf below `depth` objects, so that a change reads as a diff of few lines."""

    def lines(value: Any, indent: str, depth: int) -> str:
        if not depth or not isinstance(value, dict) or not value:
            return json.dumps(value, ensure_ascii=False)
        deeper = indent + "  "
        body = ",\n".join(f"{deeper}{json.dumps(key)}: {lines(item, deeper, depth - 1)}" for key, item in value.items())
        return f"{{\n{body}\n{indent}}}"

    return lines(value, "", depth) + "\n"


if __name__ == "__main__":
    for name, snapshot in SNAPSHOTS.items():
        (DIRECTORY / name).write_text(text_of(snapshot(), 4 if name == "openapi.json" else 2))
