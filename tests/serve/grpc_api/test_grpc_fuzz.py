"""Any message at any method of both gRPC services: an answer or a refusal that is allowed there, soon, and nothing is
left behind.

Messages are made from the descriptors: sane ones with some fields changed, with unknown fields, cut off, overwritten,
or no messages at all. `make fuzz` sends 20,000.
"""

import collections
import contextlib
import math
import time
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2

from serve.grpc_api.server import ServerConfig
from serve.protos.aptjax.v1 import apt_serve_pb2 as apt_pb
from tests.support.cases import num_cases
from tests.support.fuzzing import cases, fuzz, fuzzing
from tests.support.toy_serving import VOCAB_SIZE

Code = grpc.StatusCode
vllm_pb: Any = vllm_engine_pb2
LIMIT_S = 30.0
"""For one call; a grammar may take two seconds to compile, and the machine may be busy."""
_REFUSED = {Code.INVALID_ARGUMENT}
APT = apt_pb.DESCRIPTOR.services_by_name["AptServe"]
VLLM = vllm_pb.DESCRIPTOR.services_by_name["VllmEngine"]
ALLOWED: dict[str, set[grpc.StatusCode]] = {
    f"{APT.full_name}/Generate": {Code.OK, *_REFUSED, Code.NOT_FOUND, Code.DEADLINE_EXCEEDED},
    f"{APT.full_name}/GetStats": {Code.OK, *_REFUSED},
    f"{APT.full_name}/WatchScheduler": {Code.CANCELLED, *_REFUSED},  # ours: it has no end
    f"{VLLM.full_name}/Generate": {Code.OK, *_REFUSED},
    f"{VLLM.full_name}/Abort": {Code.OK, *_REFUSED, Code.NOT_FOUND},
    f"{VLLM.full_name}/GetLoads": {Code.OK, *_REFUSED},
    **{
        f"{VLLM.full_name}/{name}": {Code.OK, *_REFUSED}
        for name in ("HealthCheck", "GetModelInfo", "GetServerInfo", "GetTokenizer")
    },
    **{
        f"{VLLM.full_name}/{name}": {Code.UNIMPLEMENTED}
        for name in ("Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents")
    },
}
METHODS = {f"{service.full_name}/{m.name}": m for service in (APT, VLLM) for m in service.methods}
_SAMPLING: dict[str, Any] = {
    "max_tokens": 4, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7, "repetition_penalty": 1.5,
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 2, "stop": ["x"], "stop_token_ids": [5], "ignore_eos": True,
    "skip_special_tokens": True, "logprobs": 2, "logit_bias": {5: 1.5},
}  # fmt: skip
SANE: dict[str, list[Message]] = {
    f"{APT.full_name}/Generate": [
        apt_pb.GenerateRequest(text="hi", sampling=apt_pb.SamplingParams(max_tokens=4)),
        apt_pb.GenerateRequest(token_ids=apt_pb.TokenIds(ids=[5, 6]), sampling=apt_pb.SamplingParams(**_SAMPLING)),
        apt_pb.GenerateRequest(
            text="hi", request_id="r", model="toy", slo=apt_pb.Slo(ttft_ms=500, tbt_ms=100, e2e_ms=9000), slo_class="SLO_CLASS_BE", deadline_ms=60_000,
            sampling=apt_pb.SamplingParams(max_tokens=4, structured_outputs=apt_pb.StructuredOutputs(regex="a+")),
        ),
    ],
    f"{VLLM.full_name}/Generate": [
        vllm_pb.GenerateRequest(text="hi", sampling_params=vllm_pb.SamplingParams(max_tokens=4)),
        vllm_pb.GenerateRequest(tokenized={"input_ids": [5, 6]}, stream=True, sampling_params=vllm_pb.SamplingParams(n=2, **_SAMPLING)),
        vllm_pb.GenerateRequest(text="hi", request_id="r", sampling_params={"max_tokens": 4, "choice": {"choices": ["a", "b"]}}),
    ],
}  # fmt: skip

F = FieldDescriptor
_RANGES = {
    F.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    F.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    F.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    F.CPPTYPE_UINT32: (0, 2**32 - 1),
    F.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    edges = (low, high, 0, 1, 2, 3, 4, 16, 17, 20, 21, VOCAB_SIZE - 1, VOCAB_SIZE)
    return st.sampled_from([n for n in edges if low <= n <= high]) | st.integers(low, high)


_TEXTS = st.sampled_from(
    ["", "\x00", "hi", "toy", "r", "x" * 62, "x" * 64, "x" * 300, "x" * 5000, "é" * 100_000, "<s>", "{", "{}", '{"type": "object"}', "(", "[a-z]{1,9}", "start: /a+/", "../x", "r" * 128, "r" * 129, "\U0010ffff"]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=9)  # fmt: skip
_FLOATS = [0.0, -0.0, 1.0, 0.5, 2.0, 2.1, -2.1, 100.0, 1e-3, 1e-42, math.nan, math.inf, -math.inf]
VALUES: dict[int, st.SearchStrategy[Any]] = {
    **{kind: _integers(*bounds) for kind, bounds in _RANGES.items()},
    F.CPPTYPE_DOUBLE: st.sampled_from([*_FLOATS, 5e-324, 1e308]) | st.floats(),
    F.CPPTYPE_FLOAT: st.sampled_from(_FLOATS) | st.floats(width=32),
    F.CPPTYPE_BOOL: st.booleans(),
    F.CPPTYPE_STRING: _TEXTS,
}


def _value(draw: st.DrawFn, field: FieldDescriptor) -> Any:
    if field.type == F.TYPE_BYTES:
        return draw(st.binary(max_size=9))
    return draw(VALUES[field.cpp_type])


def _change(draw: st.DrawFn, message: Any, depth: int = 0) -> None:
    """Set some fields to anything that their types hold."""
    fields = list(message.DESCRIPTOR.fields)
    for field in draw(st.lists(st.sampled_from(fields), max_size=2)) if fields else ():
        nested = field.message_type
        count = draw(st.sampled_from([0, 1, 1, 2, 5, 17, 400])) if field.is_repeated else 1
        if nested is not None and nested.GetOptions().map_entry:
            key, value = (nested.fields_by_name[name] for name in ("key", "value"))
            if value.message_type is None:
                getattr(message, field.name).update(
                    {_value(draw, key): _value(draw, value) for _ in range(min(count, 5))}
                )
        elif nested is not None and depth < 4:
            if field.is_repeated:
                for _ in range(min(count, 3)):
                    _change(draw, getattr(message, field.name).add(), depth + 1)
            else:
                getattr(message, field.name).SetInParent()
                _change(draw, getattr(message, field.name), depth + 1)
        elif nested is None and field.is_repeated:
            value = _value(draw, field)
            long = isinstance(value, str) and len(value) > 1000
            getattr(message, field.name).extend([value] * min(count, 3 if long else count))
        elif nested is None:
            setattr(message, field.name, _value(draw, field))
        if draw(st.integers(0, 19)) == 0:
            message.ClearField(field.name)


_UNKNOWN = st.sampled_from(
    [
        b"\xc0\x3e\x05",
        b"\xc2\x3e\x03abc",
        b"\xc5\x3e\x00\x00\x80\x7f",
        b"\xc3\x3e\xc4\x3e",
        b"\xc0\x3e" + b"\xff" * 9 + b"\x01",
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A method and the bytes that it is called with."""
    generates = [name for name in SANE for _ in range(8)]
    method = draw(st.sampled_from([*generates, *METHODS]))
    sane = SANE.get(method, [])
    made = GetMessageClass(METHODS[method].input_type)()
    if sane and draw(st.integers(0, 4)):
        made.CopyFrom(draw(st.sampled_from(sane)))
    if not sane or draw(st.integers(0, 3)):
        _change(draw, made)
    data = made.SerializeToString()
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return method, draw(st.binary(max_size=60))
    if kind == 1:
        return method, data[: draw(st.integers(0, len(data)))]
    if kind == 2 and data:
        at = draw(st.integers(0, min(len(data), 1000) - 1))
        return method, data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
    return method, data + (draw(_UNKNOWN) if kind < 6 else b"")


METADATA = st.none() | st.none() | st.none() | st.tuples(
    st.sampled_from(["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-slo-tpot-ms", "service_tier", "authorization"]),
    st.sampled_from(["250", "0", "12.5", "1e5", "flex", "default", "Bearer x"]) | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
)  # fmt: skip


def _answer(channel: grpc.Channel, method: str, data: bytes, metadata: Any) -> tuple[grpc.StatusCode, str, list[bytes]]:
    """Status, its text and the messages of a call."""
    call: Any
    given_metadata = () if metadata is None else (metadata,)
    if not METHODS[method].server_streaming:
        try:
            message = channel.unary_unary(f"/{method}")(data, timeout=2 * LIMIT_S, metadata=given_metadata)
        except grpc.RpcError as error:
            call = error
            return call.code(), call.details() or "", []
        return Code.OK, "", [message]
    call = channel.unary_stream(f"/{method}")(data, timeout=2 * LIMIT_S, metadata=given_metadata)
    if method.endswith("/WatchScheduler"):
        call.initial_metadata()
        call.cancel()
    received: list[bytes] = []
    with contextlib.suppress(grpc.RpcError):
        received.extend(call)
    return call.code(), call.details() or "", received


def test_the_sets_of_statuses_know_every_method():
    assert set(ALLOWED) == set(METHODS)


@pytest.mark.seeds
def test_every_answer_is_one_that_the_method_may_give():
    pytest.importorskip("llguidance")
    statuses: collections.Counter[tuple[str, str]] = collections.Counter()
    slowest_s: dict[str, float] = collections.defaultdict(float)
    total = cases(num_cases(200, 400), 20_000, 500_000)
    with fuzzing("gRPC", 0) as fuzzed, grpc.insecure_channel(fuzzed.grpc_target) as channel:

        def send(request: tuple[str, bytes], metadata: tuple[str, str] | None) -> None:
            method, data = request
            began_s = time.monotonic()
            code, details, received = _answer(channel, method, data, metadata)
            took_s = time.monotonic() - began_s
            assert took_s < LIMIT_S
            slowest_s[method] = max(slowest_s[method], took_s)
            assert code in ALLOWED[method], (method, code, details)
            if code not in (Code.OK, Code.CANCELLED):
                assert details
                assert "\n" not in details
            if code is Code.OK and method.endswith("/Generate"):
                _check_end(method, received)
            statuses[method.rpartition("/")[0].rpartition(".")[2] + "." + METHODS[method].name, code.name] += 1
            fuzzed.note()

        total = fuzz("grpc", send, total, may_crash=True, request=requests(), metadata=METADATA)
        print(f"  {dict(sorted(statuses.items()))}, slowest answer: {max(slowest_s.values()):.2f} s")
        generated = {
            code: sum(n for (name, c), n in statuses.items() if name.endswith("Generate") and c == code)
            for code in ("OK", "INVALID_ARGUMENT")
        }
        assert min(generated.values()) > total / 10


def _check_end(method: str, received: list[bytes]) -> None:
    """The last message says how the answer ended."""
    if method.startswith(APT.full_name):
        assert apt_pb.GenerateResponse.FromString(received[-1]).finish.reason != 0
    else:
        complete = vllm_pb.GenerateResponse.FromString(received[-1]).complete
        assert complete.finish_reason in ("stop", "length")


def test_a_message_that_is_too_large_is_refused():
    data = apt_pb.GenerateRequest(text="x" * (ServerConfig().max_message_bytes + 1)).SerializeToString()
    with fuzzing("gRPC", 1) as fuzzed, grpc.insecure_channel(fuzzed.grpc_target) as channel:
        code, _, _ = _answer(channel, f"{APT.full_name}/Generate", data, None)
        assert code is Code.RESOURCE_EXHAUSTED
