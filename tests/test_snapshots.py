"""The public surface is what it was: flags, the OpenAPI document, public names, protobuf messages.

An intended change rewrites the files (`python tests/support/snapshots.py`) and needs an entry in the changelog.
"""

import json

import pytest

from tests.support.snapshots import DIRECTORY, SNAPSHOTS, cli_flags, openapi_document, public_names


def stored(name: str):
    return json.loads((DIRECTORY / name).read_text())


@pytest.mark.parametrize("command", stored("cli_flags.json"))
def test_flags(command):
    expected, found = stored("cli_flags.json")[command], cli_flags()[command]
    assert sorted(found) == sorted(expected)
    for flag, facts in expected.items():
        assert json.loads(json.dumps(found[flag])) == facts, flag


def test_every_command_has_a_snapshot():
    assert list(cli_flags()) == list(stored("cli_flags.json"))
    assert {path.name for path in DIRECTORY.glob("*.json")} == set(SNAPSHOTS)


def test_the_openapi_document():
    assert json.loads(json.dumps(openapi_document())) == stored("openapi.json")


@pytest.mark.parametrize("kind", stored("public_names.json"))
def test_public_names(kind):
    assert json.loads(json.dumps(public_names()))[kind] == stored("public_names.json")[kind]
