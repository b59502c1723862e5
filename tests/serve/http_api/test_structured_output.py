"""Structured output over gRPC and the command line."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from apt_jax.errors import ConfigError
from apt_jax.frontend.components import EngineComponents
from serve import cli
from serve.cli import options
from serve.grpc_api.messages import request_fields, structured_outputs
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from tests.support.toy_serving import toy_parts

pytest.importorskip("llguidance")

SCHEMA = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 4},
    {"ignore_eos": True, "logprobs": 2},
]
SLOW = {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79)]}


async def text_of(served, prompt: str = "hello", **fields) -> tuple[str, int]:
    chunks = [c async for c in served.client.generate(prompt, **{"max_tokens": 60, **fields})]
    return "".join(c.text for c in chunks), chunks[-1].finish.reason


def close(parts: EngineComponents) -> None:
    assert parts.grammars is not None
    parts.grammars.close()


def test_every_constraint(serve_toy):
    async def scenario(served):
        for constraint, pattern in (
            ({"json": SCHEMA, "disable_any_whitespace": True}, r'\["[ab]"(,"[ab]"){1,2}\]'),
            ({"json": json.dumps(SCHEMA), "whitespace_pattern": "_"}, r'\[_?"[ab]"_?(,_?"[ab]"_?){1,2}\]'),
            ({"regex": r"\d{2}-[xyz]"}, r"\d{2}-[xyz]"),
            ({"choice": ["yes", "no, never"]}, "yes|no, never"),
            ({"grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
            ({"json_object": True, "disable_any_whitespace": True}, r"(?s)\{.*"),
        ):
            for settings in SETTINGS:
                text, reason = await text_of(served, structured_outputs=constraint, **settings)
                assert re.fullmatch(pattern, text), (constraint, text)
                assert reason == pb.FINISH_REASON_STOP or "json_object" in constraint
        assert served.parts.grammars.num_trials == 6
        close(served.parts)

    serve_toy(scenario)


def test_R11_what_cannot_be_used_is_invalid_argument(serve_toy):
    async def scenario(served):
        for constraint, field in (
            ({"json": "{"}, "json"),
            ({"json": {"type": "thing"}}, "json"),
            ({"json": ""}, "json"),
            ({"regex": "("}, "regex"),
            ({"choice": []}, "choice"),
            ({"choice": [""]}, "choice"),
            ({"grammar": "start"}, "grammar"),
            ({"json": SLOW}, "json"),
            ({"json": {"enum": ["x" * 70_000]}}, "json"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await text_of(served, structured_outputs=constraint)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(f"structured_outputs.{field}: ")
        for constraint in ({}, {"json_object": False}, {"disable_any_whitespace": True}):
            with pytest.raises(grpc.aio.AioRpcError, match="give exactly one of"):
                await text_of(served, structured_outputs=constraint)
        assert served.executor.num_steps == 0
        close(served.parts)

    serve_toy(scenario)


def test_R11_Q10_slow_constraints_do_not_hold_up_others(serve_toy):
    """The event loop goes on, and so do requests that bring none, or a known one."""

    async def scenario(served):
        choice = {"choice": ["yes", "no"]}
        await text_of(served, structured_outputs=choice)
        slow = [
            asyncio.create_task(text_of(served, structured_outputs={"json": {**SLOW, "title": str(i)}}))
            for i in range(2)
        ]  # fmt: skip
        await asyncio.sleep(0.1)
        num_served = 0
        while num_served < 15 and not any(task.done() for task in slow):
            await asyncio.sleep(0.01)
            await text_of(served, max_tokens=2)
            await text_of(served, structured_outputs=choice)
            num_served += not any(task.done() for task in slow)
        assert num_served >= 1  # while both are compiled, which takes two seconds each
        for task in slow:
            with pytest.raises(grpc.aio.AioRpcError, match="more than 2 s"):
                await task
        close(served.parts)

    serve_toy(scenario)


def test_E1_a_grammar_that_fails_is_told_and_ends_its_request_alone(serve_toy):
    async def scenario(served):
        from apt_jax.structured.constraint import GrammarError, LLConstraint

        other = asyncio.create_task(text_of(served, max_tokens=40, structured_outputs={"regex": "b+"}))
        await text_of(served, structured_outputs={"choice": ["yes"]})  # known from now on
        build = served.parts.build_requests

        def broken(**fields):
            (request,) = build(**fields)
            if request.params.structured_outputs.choice:
                constraint = request.grammar.start()

                def fill_mask(row):
                    raise GrammarError("too complex; make it smaller")

                constraint.fill_mask = fill_mask
                object.__setattr__(request, "grammar", type("G", (), {"start": lambda self: constraint})())
            return [request]

        object.__setattr__(served.parts, "build_requests", broken)
        assert LLConstraint
        with pytest.raises(grpc.aio.AioRpcError, match="grammar: too complex") as caught:
            await text_of(served, structured_outputs={"choice": ["yes"]})
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        text, _ = await other
        assert set(text) == {"b"}
        close(served.parts)

    serve_toy(scenario)


def test_messages_and_fields_say_the_same():
    for constraint in (
        {"json": "{}"},
        {"regex": ""},
        {"choice": ["a", "b"]},
        {"choice": []},
        {"grammar": "g"},
        {"json_object": False},
        {"json": "{}", "disable_any_whitespace": True},
        {"json_object": True, "whitespace_pattern": " "},
        {},
    ):
        request = pb.GenerateRequest(
            text="a", sampling=pb.SamplingParams(structured_outputs=structured_outputs(constraint))
        )
        assert request_fields(request, [])["params"] == {"structured_outputs": constraint}
    assert structured_outputs({"json": {"type": "null"}, "regex": None}).json == '{"type": "null"}'
    assert "structured_outputs" not in request_fields(pb.GenerateRequest(text="a"), [])["params"]


def test_a_message_has_room_for_one_constraint():
    """The last one would silently be the only one."""
    with pytest.raises(ValueError, match="regex and json_object given"):
        structured_outputs({"regex": "a", "json_object": True})
    assert structured_outputs({"regex": "a", "json_object": False}).WhichOneof("form") == "regex"
    assert structured_outputs({"json_object": False}).WhichOneof("form") == "json_object"


# --- the command line ----------------------------------------------------------------------------------------------


def fields_of(*flags: str) -> dict | None:
    parser = options.Parser(prog="generate")
    options.add_sampling_arguments(parser, max_tokens=5)
    options.add_structured_output_arguments(parser)
    return options.sampling_fields(parser.parse_args(flags)).get("structured_outputs")


def test_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "é"', encoding="utf-8")
    assert fields_of() is None
    assert fields_of("--json-schema", str(schema)) == {"json": json.dumps(SCHEMA)}
    assert fields_of("--json-object") == {"json_object": True}
    assert fields_of("--regex", "a+") == {"regex": "a+"}
    assert fields_of("--choice", "yes,no") == {"choice": ["yes", "no"]}
    assert fields_of("--grammar", str(grammar)) == {"grammar": 'start: "é"'}
    with pytest.raises(ConfigError, match=r"No such file.*\(--json-schema\)"):
        fields_of("--json-schema", str(tmp_path / "none"))
    with pytest.raises(SystemExit):
        fields_of("--regex", "a", "--json-object")
    assert "not allowed with" in capsys.readouterr().err


def test_generate_locally_and_remotely(monkeypatch, capsys, tmp_path):
    """The same flags, through both completers."""
    from contextlib import asynccontextmanager

    from apt_jax.frontend.async_engine import AsyncEngine
    from serve.cli import completion_client as completer
    from serve.cli.commands import generate
    from serve.client import AsyncAptClient
    from serve.grpc_api.server import GrpcServer, ServerConfig

    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    for remote in (False, True):

        @asynccontextmanager
        async def opened(args, remote=remote):
            parts = toy_parts()
            engine = AsyncEngine(parts)
            server = GrpcServer(ServerConfig(port=0))
            await server.start()
            await server.serve(engine)
            async with AsyncAptClient(f"127.0.0.1:{server.port}") as client:
                yield completer.RemoteCompleter(client) if remote else completer.LocalCompleter(engine)
            await server.stop(0)
            close(parts)

        monkeypatch.setattr(generate, "open_completer", opened)
        assert cli.main(["generate", "toy", "hi", "--quiet", "--json-schema", str(path)]) == 0
        out = capsys.readouterr().out
        assert set(json.loads(out.removeprefix("hi"))) <= {"a", "b"}
        assert cli.main(["generate", "toy", "hi", "--quiet", "--regex", "("]) in (1, 2)
        assert "structured_outputs.regex" in capsys.readouterr().err
