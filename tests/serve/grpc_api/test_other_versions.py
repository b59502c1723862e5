"""Clients with another version of aptjax.v1: a rolling upgrade has old and new ones at once."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from serve.grpc_api.service import SERVICE
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from tests.serve.grpc_api.test_grpc_server import GREEDY, expected

NEWEST = {"GenerateRequest": ("slo", "slo_class"), "GenerateResponse": ("sequence",)}
"""Fields that the first version of the messages did not have."""


def _version(change: Any) -> dict[str, type[Message]]:
    """Return the messages of a changed file."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        change(message)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


def last_version() -> dict[str, type[Message]]:
    def without(message: descriptor_pb2.DescriptorProto) -> None:
        left = [field for field in message.field if field.name not in NEWEST.get(message.name, ())]
        assert len(left) == len(message.field) - len(NEWEST.get(message.name, ()))
        del message.field[:]
        message.field.extend(left)

    return _version(without)


def next_version() -> dict[str, type[Message]]:
    def with_more(message: descriptor_pb2.DescriptorProto) -> None:
        for number, (kind, label) in enumerate(
            [
                (descriptor_pb2.FieldDescriptorProto.TYPE_STRING, descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL),
                (descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE, descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED),
            ]
        ):
            message.field.add(name=f"new_{number}", number=1000 + number, type=kind, label=label)

    return _version(with_more)


def _call(served: Any, messages: dict[str, type[Message]], channel: grpc.aio.Channel, max_tokens: int) -> Any:
    request: Any = messages["GenerateRequest"](text="hello")
    sampling = {name: value for name, value in GREEDY.items()}
    for name, value in {**sampling, "max_tokens": max_tokens}.items():
        setattr(request.sampling, name, value)
    if "new_0" in request.DESCRIPTOR.fields_by_name:
        request.new_0 = request.sampling.new_0 = "unknown here"
        request.new_1.extend([1.0, 2.0])
    generate = channel.unary_stream(
        f"/{SERVICE}/Generate",
        request_serializer=type(request).SerializeToString,
        response_deserializer=messages["GenerateResponse"].FromString,
    )
    return generate(request)


@pytest.mark.parametrize("version", [last_version, next_version])
def test_N9_O10_a_client_of_another_version_is_served(serve_toy, version):
    async def scenario(served):
        async with grpc.aio.insecure_channel(served.target) as channel:
            chunks = [chunk async for chunk in _call(served, version(), channel, 10)]
        assert [t for chunk in chunks for t in chunk.token_ids] == expected(served, "hello", 10)
        assert chunks[-1].finish.reason == pb.FINISH_REASON_LENGTH
        # What a client does not know it keeps: a proxy of the last version loses nothing.
        passed_on = [pb.GenerateResponse.FromString(chunk.SerializeToString()) for chunk in chunks]
        assert [chunk.sequence for chunk in passed_on] == list(range(len(chunks)))

    serve_toy(scenario)


@pytest.mark.parametrize("version", [last_version, next_version])
def test_O10_a_drain_ends_streams_of_clients_of_another_version(serve_toy, version):
    async def scenario(served):
        served.executor.step_s = 0.01
        async with grpc.aio.insecure_channel(served.target) as channel:
            open_call = _call(served, version(), channel, 60)
            first = await anext(aiter(open_call))
            stopping = asyncio.create_task(served.server.stop(20))
            await asyncio.sleep(0.05)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in _call(served, version(), channel, 1):
                    pass
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            rest = [chunk async for chunk in open_call]
            await stopping
        tokens = [t for chunk in (first, *rest) for t in chunk.token_ids]
        assert tokens == expected(served, "hello", 60)

    serve_toy(scenario)
