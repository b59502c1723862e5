"""The committed stubs belong to the .proto files."""

from pathlib import Path

import pytest

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
