"""The committed stubs belong to the .proto files."""

from pathlib import Path

import pytest

from apt_jax.core.kinds import KIND_NAMES
from serve.protos import words
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb

ROOT = Path(__file__).resolve().parents[3]


def test_stubs_are_those_of_the_proto_file(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools makes the stubs")
    from serve.protos.generate import generate

    generate(tmp_path)
    stubs = ("serve/protos/aptjax/v1/apt_serve_pb2", "apt_jax/distributed/protos/ranks_pb2")
    for path in (Path(stub + ending) for stub in stubs for ending in (".py", ".pyi")):

        def content(file: Path) -> list[str]:
            """Without the generator's version."""
            lines = file.read_text().splitlines()
            return [x for x in lines if "AddSerializedFile" in x or "def __init__" in x]

        assert content(tmp_path / path) == content(ROOT / path)


def test_every_field_has_a_comment_or_speaks_for_itself():
    text = (ROOT / "serve/protos/aptjax/v1/apt_serve.proto").read_text()
    lines = text.splitlines()
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            if field.name.endswith("_ms") and message.name in ("Slo", "Timings", "GenerateRequest"):
                place = next(i for i, x in enumerate(lines) if f" {field.name} = " in x)
                assert "illiseconds" in " ".join(lines[place - 2 : place]), field.full_name


def test_every_cache_kind_and_finish_reason_has_a_word_that_leads_back_to_it():
    kinds = [value for value in pb.CacheKind.values() if value]
    assert [words.cache_kind_name(value) for value in kinds] == list(KIND_NAMES)
    assert [words.cache_kind(name) for name in KIND_NAMES] == kinds
    assert words.cache_kind_name(pb.CACHE_KIND_UNSPECIFIED) is None
    assert words.cache_kind(None) == pb.CACHE_KIND_UNSPECIFIED
    reasons = pb.FinishReason.values()
    assert [words.finish_reason(words.finish_reason_name(value)) for value in reasons] == reasons
