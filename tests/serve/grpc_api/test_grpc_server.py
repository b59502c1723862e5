"""The gRPC server: streams, statuses, cancellation, deadlines, health, reflection, draining."""

import asyncio
import math
import resource
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.request import SamplingParams
from serve.client import AptClient, AsyncAptClient, address, make_request
from serve.errors import PortInUseError
from serve.grpc_api import messages
from serve.grpc_api.server import GrpcServer, ServerConfig
from serve.grpc_api.service import SERVICE
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from tests.support.fake_executor import Fault, FaultKind, reference_tokens
from tests.support.toy_serving import VOCAB_SIZE, expected_tokens, toy_parts

Code = grpc.StatusCode
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def expected(served, prompt, max_tokens: int) -> list[int]:
    ids = served.parts.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return reference_tokens(ids, max_tokens, vocab_size=VOCAB_SIZE, params=params)


async def collect(served, prompt, **fields) -> tuple[list[pb.GenerateResponse], list[int]]:
    chunks = [c async for c in served.client.generate(prompt, **{**GREEDY, **fields})]
    return chunks, [t for c in chunks for t in c.token_ids]


def details(error: grpc.aio.AioRpcError) -> str:
    return error.details() or ""


async def status_of_call(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


# --- streams -------------------------------------------------------------------------------------------------------


def test_streams_equal_their_reference(serve_toy):
    async def scenario(served):
        prompts = ["x" * n for n in range(1, 25)] + [[5, 6, 7]]
        results = await asyncio.gather(*(collect(served, p, max_tokens=10) for p in prompts))
        for prompt, (chunks, tokens) in zip(prompts, results, strict=True):
            assert tokens == expected(served, prompt, 10)
            assert "".join(c.text for c in chunks) == served.parts.tokenizer.decode(tokens)
            assert [c.sequence for c in chunks] == list(range(len(chunks)))
            assert [c.HasField("finish") for c in chunks] == [False] * (len(chunks) - 1) + [True]

    serve_toy(scenario)


def test_the_last_message_holds_usage_timings_and_the_verdict(serve_toy):
    async def scenario(served):
        chunks, tokens = await collect(
            served, "hello", max_tokens=6, slo_ttft_ms=60_000, slo_tbt_ms=0.01, request_id="r-1"
        )
        finish = chunks[-1].finish
        assert {c.request_id for c in chunks} == {"r-1"}
        assert finish.reason == pb.FINISH_REASON_LENGTH
        assert finish.WhichOneof("matched_stop") is None
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (6, len(tokens))
        t = finish.timings
        assert 0 <= t.queue_ms <= t.ttft_ms <= t.total_ms
        assert t.p99_tbt_ms > 2.0
        assert t.HasField("p99_tbt_drop_first_ms")
        assert (finish.slo.ttft_ms, finish.slo.tbt_ms) == (60_000, 0.01)
        assert (finish.slo.ttft_attained, finish.slo.tbt_attained, finish.slo.attained) == (
            True, False, False,
        )  # fmt: skip
        assert finish.cache_kind in (pb.CACHE_KIND_KV, pb.CACHE_KIND_HIDDEN)

    serve_toy(scenario, step_s=0.004)


def test_one_token_has_no_gap_and_absent_objectives_are_attained(serve_toy):
    async def scenario(served):
        chunks, _ = await collect(served, "hello", max_tokens=1)
        finish = chunks[-1].finish
        assert not finish.timings.HasField("p99_tbt_ms")
        assert not finish.slo.HasField("ttft_ms")
        assert finish.slo.attained

    serve_toy(scenario)


def test_logprobs_stop_tokens_and_stop_strings(serve_toy):
    async def scenario(served):
        want = expected(served, "hello", 30)
        chunks, tokens = await collect(served, "hello", max_tokens=30, logprobs=3)
        logprobs = [entry for c in chunks for entry in c.logprobs]
        assert [entry.sampled.token_id for entry in logprobs] == tokens == want
        assert all([t.rank for t in entry.top] == [1, 2, 3] for entry in logprobs)
        chunks, tokens = await collect(served, "hello", max_tokens=30, stop_token_ids=[want[4]])
        assert tokens == want[: want.index(want[4]) + 1]
        assert chunks[-1].finish.stop_token_id == want[4]
        assert chunks[-1].finish.reason == pb.FINISH_REASON_STOP
        text = served.parts.tokenizer.decode(want)
        stop = next(c for c in text if c.isascii() and c.isprintable())
        chunks, _ = await collect(served, "hello", max_tokens=30, stop=[stop])
        assert "".join(c.text for c in chunks) == text[: text.index(stop)]
        assert chunks[-1].finish.stop_string == stop

    serve_toy(scenario)


def test_sampling_follows_the_seed(serve_toy):
    async def scenario(served):
        sampled = {"temperature": 1.0, "seed": 11, "max_tokens": 12}
        first, second = [
            (await collect(served, "hello", **sampled))[1],
            (await collect(served, "hello", **sampled))[1],
        ]
        assert first == second
        request = served.parts.build_request(prompt="hello", params={**sampled, "ignore_eos": True})
        assert first == expected_tokens(request)
        assert (await collect(served, "hello", **{**sampled, "seed": 12}))[1] != first

    serve_toy(scenario)


def test_the_blocking_client(serve_toy):
    async def scenario(served):
        def blocking() -> tuple[list[int], bool, str]:
            with AptClient(f"grpc://{served.target}") as client:
                tokens = [t for chunk in client.generate("hello", max_tokens=5, **GREEDY) for t in chunk.token_ids]
                return tokens, client.is_serving(), client.stats().model

        tokens, healthy, model = await asyncio.to_thread(blocking)
        assert tokens == expected(served, "hello", 5)
        assert healthy
        assert model == "toy"

    serve_toy(scenario)


@pytest.mark.parametrize("target", ["", "host", "http://h:1", "grpc://", "grpc://h:", "h:x", ":1"])
def test_addresses_are_checked(target):
    with pytest.raises(ValueError, match="grpc://HOST:PORT"):
        address(target)


# --- bad input -----------------------------------------------------------------------------------------------------

BAD_SAMPLING = {
    "max_tokens": [0, -1, 257, 2**63 - 1],
    "temperature": [-0.1, -0.0, 2.1, math.nan, math.inf, -math.inf, 5e-324],
    "top_k": [-2, 2**31],
    "top_p": [-0.5, 1.5, math.nan, math.inf],
    "min_p": [-0.5, 1.5, math.nan],
    "repetition_penalty": [0.0, -1.0, 2.1, math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan, math.inf],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "logit_bias": [{VOCAB_SIZE: 1.0}, {2**32 - 1: 1.0}, {1: math.nan}, {1: 101.0}, dict.fromkeys(range(259), 0.0) | {9**9: 0.0}],
    "min_tokens": [-1, 17],
    "stop": [[""], ["a"] * 17, ["a" * 257]],
    "stop_token_ids": [[VOCAB_SIZE], [2**32 - 1], list(range(17))],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "structured_outputs": [{}, {"json_object": False}, {"disable_any_whitespace": True}],
}  # fmt: skip
NOT_ON_THE_WIRE = {"bad_words", "allowed_token_ids", "truncate_prompt_tokens", "pooling", "n"}
NOT_CHECKED_BY_VALUE = {"seed", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"}


def test_every_sampling_field_of_the_wire_is_covered():
    names = set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert set(BAD_SAMPLING) | NOT_CHECKED_BY_VALUE == names
    fields = SamplingParams.__dataclass_fields__
    assert names | NOT_ON_THE_WIRE == set(fields)  # the Python API has the same fields, and a few more


BAD_REQUESTS: list[tuple[str, dict]] = [
    *((field, {field: value}) for field, values in BAD_SAMPLING.items() for value in values),
    ("prompt", {"prompt": ""}),
    ("prompt_token_ids", {"prompt": []}),
    ("prompt_token_ids", {"prompt": [VOCAB_SIZE]}),
    ("prompt_token_ids", {"prompt": [2**32 - 1]}),
    ("prompt_token_ids", {"prompt": [1] * 256}),
    ("prompt", {"prompt": "x" * 5000}),
    ("max_tokens", {"prompt": "x" * 250}),
    ("request_id", {"request_id": "a b"}),
    ("request_id", {"request_id": "../etc"}),
    ("request_id", {"request_id": "x" * 129}),
    *(
        (name, {field: value})
        for field, name in (
            ("slo_ttft_ms", "slo.ttft_ms: "),
            ("slo_tbt_ms", "slo.tbt_ms: "),
            ("slo_e2e_ms", "slo.e2e_ms: "),
        )
        for value in (0.0, -1.0, math.nan, math.inf, 1e18)
    ),
    *(("deadline_ms", {"deadline_ms": value}) for value in (0.0, -5.0, math.nan, math.inf, 1e18)),
    *(
        (key, {"metadata": {key: value}})
        for key in ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms", "x-slo-e2e-ms")
        for value in ("abc", "", "nan", "inf", "-5", "1e3", "1_000")
    ),
    ("x-slo-ttft-ms: ", {"metadata": {"x-slo-ttft-ms": "0"}}),
    ("x-llm-d-slo-tpot-ms: ", {"metadata": {"x-llm-d-slo-tpot-ms": "999999999999", "x-slo-tpot-ms": "5"}}),
    ("slo.tbt_ms: ", {"slo_tbt_ms": 0.0, "metadata": {"x-slo-tpot-ms": "5"}}),
    ("x-slo-e2e-ms: ", {"metadata": {"x-slo-e2e-ms": "0"}}),
    ("slo.e2e_ms: ", {"slo_e2e_ms": 0.0, "metadata": {"x-slo-e2e-ms": "5"}}),
    ("service_tier", {"metadata": {"service_tier": "gold"}}),
]


def test_R1_R2_R4_R5_R7_R8_R9_R10_R20_R24_bad_requests_are_invalid_arguments(serve_toy):
    """Each is one line naming the field, nothing runs, and a bystander's stream is whole."""

    async def scenario(served):
        bystander = asyncio.create_task(collect(served, "bystander", max_tokens=200))
        for field, fields in BAD_REQUESTS:
            prompt = fields.get("prompt", "hello")
            rest = {k: v for k, v in fields.items() if k != "prompt"}
            error = await status_of_call(served.client.generate(prompt, **rest))
            message = details(error)
            assert error.code() is Code.INVALID_ARGUMENT, (fields, message)
            assert message.startswith(field), (fields, message)
            assert "\n" not in message
            assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"
            # Trailers only: no headers were sent, so nothing commits the RPC.
            assert "content-type" not in dict(error.initial_metadata() or ())
        _, tokens = await bystander
        assert tokens == expected(served, "bystander", 200)
        stats = served.parts.engine.stats()
        assert stats.finished == {"length": 1}
        assert stats.prompt_tokens == 10  # the bystander's alone

    serve_toy(scenario, step_s=0.001)


def test_R3_what_can_never_fit_the_pool_is_refused(serve_toy):
    async def scenario(served):
        error = await status_of_call(served.client.generate("x" * 80, max_tokens=80))
        assert error.code() is Code.INVALID_ARGUMENT
        assert "can never fit" in details(error)
        assert served.executor.num_steps == 0

    serve_toy(scenario, num_blocks=30)


async def raw_call(served, data: bytes) -> grpc.aio.AioRpcError:
    call = served.client.channel.unary_stream(f"/{SERVICE}/Generate")(data, timeout=10)
    return await status_of_call(call)


@pytest.mark.parametrize(
    "data",
    [
        b"\x1a\x02\xff\xfe",  # text that is not UTF-8
        b"\x0a\x02\xc3\x28",  # request_id that is not UTF-8
        b"\x1a\x05abc",  # cut off
        b"\xff" * 20,
    ],
)
def test_R15_R26_messages_that_cannot_be_read(serve_toy, data):
    async def scenario(served):
        error = await raw_call(served, data)
        assert error.code() is Code.INVALID_ARGUMENT
        assert "UTF-8" in details(error)

    serve_toy(scenario)


def test_R26_missing_parts(serve_toy):
    async def scenario(served):
        for message, field in (
            (pb.GenerateRequest(), "prompt"),
            (pb.GenerateRequest(sampling=pb.SamplingParams()), "prompt"),
            (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt_token_ids"),
            (pb.GenerateRequest(text="x", slo_class=9), "slo_class"),  # type: ignore[arg-type]
            (pb.GenerateRequest(text="x", retain_s=-1), "retain_s"),
            (pb.GenerateRequest(text="x", retain_s=float("nan")), "retain_s"),
        ):
            error = await raw_call(served, message.SerializeToString())
            assert error.code() is Code.INVALID_ARGUMENT
            assert details(error).startswith(field)
        error = await raw_call(
            served,
            pb.GenerateRequest(text="x", slo=pb.Slo(), sampling=pb.SamplingParams(max_tokens=0)).SerializeToString(),
        )
        assert details(error).startswith("max_tokens")

    serve_toy(scenario)


def test_R16_a_message_too_large(serve_toy):
    async def scenario(served):
        error = await status_of_call(served.client.generate("x" * (5 << 20)))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert served.server.num_open == 0

    serve_toy(scenario)


def test_R16_compressed_messages_and_metadata_that_are_too_large(serve_toy):
    """A message counts with its size once it is unpacked, and is not unpacked further than that."""

    async def scenario(served):
        bomb = make_request("x" * (64 << 20)).SerializeToString()
        options = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 1 << 20)]
        async with grpc.aio.insecure_channel(served.target, options, compression=grpc.Compression.Gzip) as channel:
            method = channel.unary_stream(f"/{SERVICE}/Generate", response_deserializer=pb.GenerateResponse.FromString)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(3):
                error = await status_of_call(method(bomb))
                assert error.code() is Code.RESOURCE_EXHAUSTED
                assert "larger than max" in details(error)
            assert (
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
            )  # KiB; the client's part is one
            request = make_request("fine", max_tokens=3, **GREEDY).SerializeToString()
            error = await status_of_call(method(request, metadata=(("x-large", "y" * 40_000),)))
            assert error.code() is Code.RESOURCE_EXHAUSTED
            assert "metadata" in details(error)
            tokens = [
                t async for chunk in method(request, metadata=(("x-small", "y" * 4000),)) for t in chunk.token_ids
            ]
        assert tokens == expected(served, "fine", 3)
        assert served.server.num_open == 0

    serve_toy(scenario)


def test_an_unknown_model_is_not_found(serve_toy):
    async def scenario(served):
        error = await status_of_call(served.client.generate("hello", model="gpt-5"))
        assert error.code() is Code.NOT_FOUND
        assert "'toy'" in details(error)
        chunks, _ = await collect(served, "hello", model="toy")
        assert chunks[-1].finish.reason == pb.FINISH_REASON_LENGTH

    serve_toy(scenario)


def test_C10_a_duplicate_id_already_exists_and_the_first_goes_on(serve_toy):
    async def scenario(served):
        first = asyncio.create_task(collect(served, "first", request_id="same", max_tokens=100))
        await served.until(lambda: served.parts.engine.num_live == 1)
        error = await status_of_call(served.client.generate("second", request_id="same"))
        assert error.code() is Code.ALREADY_EXISTS
        assert (await first)[1] == expected(served, "first", 100)

    serve_toy(scenario, step_s=0.002)


def test_a_full_queue_is_resource_exhausted_with_a_hint(serve_toy):
    async def scenario(served):
        served.executor.gate.clear()
        tasks = [asyncio.create_task(collect(served, "x", max_tokens=3)) for _ in range(8)]
        # Those that come while a step runs are refused at once, the others wait for its end.
        await served.until(lambda: served.server.num_open + sum(t.done() for t in tasks) == 8)
        await asyncio.sleep(0.05)
        served.executor.gate.set()
        errors = [
            r for r in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(r, grpc.aio.AioRpcError)
        ]
        assert 0 < len(errors) < 8
        for error in errors:
            assert error.code() is Code.RESOURCE_EXHAUSTED
            trailers = dict(error.trailing_metadata())
            assert int(trailers["retry-after"]) >= 1
            assert int(trailers["grpc-retry-pushback-ms"]) > 0

    serve_toy(scenario, max_num_seqs=1, max_num_queued_reqs=2)


# --- metadata ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "metadata", "want"),
    [
        ({}, {}, (None, None, None)),
        ({}, {"x-slo-ttft-ms": "300", "x-slo-tpot-ms": "30.5", "x-slo-e2e-ms": "9000"}, (300, 30.5, 9000)),
        ({}, {"x-slo-ttft-ms": "300", "x-llm-d-slo-ttft-ms": "200"}, (200, None, None)),
        ({}, {"x-llm-d-slo-tpot-ms": "20", "x-slo-tpot-ms": "30"}, (None, 20, None)),
        ({"slo_ttft_ms": 100}, {"x-llm-d-slo-ttft-ms": "200", "x-slo-tpot-ms": "30"}, (100, 30, None)),
        ({"slo_e2e_ms": 8000}, {"x-slo-e2e-ms": "9000", "x-slo-tpot-ms": "30"}, (None, 30, 8000)),
    ],
)
def test_objectives_come_from_the_message_then_the_headers(serve_toy, fields, metadata, want):
    async def scenario(served):
        chunks, _ = await collect(served, "hello", max_tokens=2, metadata=metadata, **fields)
        slo = chunks[-1].finish.slo
        got = tuple(getattr(slo, name) if slo.HasField(name) else None for name in ("ttft_ms", "tbt_ms", "e2e_ms"))
        assert got == want

    serve_toy(scenario)


def test_a_request_that_ends_late_is_told_so_and_gets_its_whole_output(serve_toy):
    async def scenario(served):
        for e2e_ms, attained in ((60_000, True), (0.01, False)):
            chunks, tokens = await collect(served, "hello", max_tokens=9, slo_ttft_ms=60_000, slo_e2e_ms=e2e_ms)
            assert tokens == expected(served, "hello", 9)
            slo = chunks[-1].finish.slo
            assert (slo.ttft_attained, slo.tbt_attained, slo.e2e_attained) == (True, True, attained)
            assert slo.attained is attained

    serve_toy(scenario)


@pytest.mark.parametrize(
    ("fields", "metadata", "want"),
    [
        ({}, {}, "rt"),
        ({}, {"service_tier": "flex"}, "be"),
        ({}, {"service_tier": "priority"}, "rt"),
        ({}, {"service_tier": "auto"}, "rt"),
        ({"slo_class": "be"}, {"service_tier": "priority"}, "be"),
        ({"slo_class": "rt"}, {"service_tier": "flex"}, "rt"),
    ],
)
def test_the_class_comes_from_the_message_then_the_tier(serve_toy, fields, metadata, want):
    async def scenario(served):
        seen = []
        add = served.parts.engine.add_request

        def noting(request):
            seen.append(request.slo_class)
            add(request)

        served.parts.engine.add_request = noting
        chunks, _ = await collect(served, "hello", max_tokens=1, metadata=metadata, **fields)
        assert seen == [want]
        assert chunks[-1].finish.slo_class == {"rt": pb.SLO_CLASS_RT, "be": pb.SLO_CLASS_BE}[want]

    serve_toy(scenario)


@pytest.mark.parametrize(("asked", "want"), [({}, None), ({"retain_s": 90.0}, 90.0), ({"retain_s": 1e30}, 3600.0)])
def test_a_call_asks_how_long_its_session_is_kept(serve_toy, asked, want):
    async def scenario(served):
        seen = []
        add = served.parts.engine.add_request

        def noting(request):
            seen.append((request.session_id, request.retain_s))
            add(request)

        served.parts.engine.add_request = noting
        await collect(served, "hello", max_tokens=1, metadata={"x-session-id": "s"}, **asked)
        assert seen == [("s", want)]

    serve_toy(scenario)


# --- cancellation and deadlines ------------------------------------------------------------------------------------


def test_C1_cancelled_while_queued(serve_toy):
    async def scenario(served):
        first = asyncio.create_task(collect(served, "first", max_tokens=100))
        await served.until(lambda: served.parts.engine.num_live == 1)
        queued = asyncio.create_task(collect(served, "queued", max_tokens=100))
        await served.until(lambda: served.parts.engine.num_live == 2)
        queued.cancel()
        await served.until(lambda: served.parts.engine.num_live == 1)
        assert (await first)[1] == expected(served, "first", 100)
        await served.idle()
        assert served.parts.engine.stats().prompt_tokens == 6  # of the first alone

    serve_toy(scenario, max_num_seqs=1, step_s=0.002)


def test_C3_cancel_mid_stream_frees_the_blocks(serve_toy):
    async def scenario(served):
        bystander = asyncio.create_task(collect(served, "bystander", max_tokens=100))
        call = served.client.generate("leaver", max_tokens=200, **GREEDY)
        async for chunk in call:
            if chunk.sequence >= 2:
                break
        await call.aclose()
        await served.until(lambda: served.parts.engine.num_live <= 1)
        assert (await bystander)[1] == expected(served, "bystander", 100)
        await served.idle()

    serve_toy(scenario, step_s=0.002)


def test_C3_a_closed_connection_frees_the_blocks(serve_toy):
    async def scenario(served):
        client = AsyncAptClient(served.target)
        call = client.generate("leaver", max_tokens=200, **GREEDY)
        await anext(call)
        await client.close()
        await served.idle()

    serve_toy(scenario, step_s=0.005)


class Hoarder:
    """Calls whose answers outgrow what the transport takes, on a connection that nobody reads from."""

    def __init__(self, served, count: int = 20) -> None:
        self.channel = grpc.aio.insecure_channel(
            served.target,
            options=[("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)],
        )
        method = self.channel.unary_stream(f"/{SERVICE}/Generate", response_deserializer=pb.GenerateResponse.FromString)
        request = make_request("lazy", max_tokens=230, logprobs=20, **GREEDY)
        self.calls = [method(request.SerializeToString()) for _ in range(count)]


def test_C4_C5_clients_that_never_read_block_nobody_and_can_leave_during_a_write(serve_toy, caplog):
    async def scenario(served):
        hoarder = Hoarder(served)
        await served.until(lambda: served.server.num_open == 20)
        for _ in range(3):
            _, tokens = await collect(served, "reader", max_tokens=20)
            assert tokens == expected(served, "reader", 20)
        # The engine is done with all of them, the handlers are not: they are held in a write.
        await served.until(lambda: served.parts.engine.num_live == 0)
        await asyncio.sleep(0.1)
        assert served.server.num_open > 0
        for call in hoarder.calls:
            call.cancel()
        await hoarder.channel.close()
        await served.idle()
        assert "Traceback" not in caplog.text

    serve_toy(scenario, num_blocks=4096, max_num_seqs=32)


def test_C5_a_client_that_does_not_read_loses_its_blocks_and_learns_why(serve_toy, caplog):
    async def scenario(served):
        hoarder = Hoarder(served)
        await served.until(lambda: served.parts.engine.num_live == 20)
        await served.until(lambda: served.parts.engine.num_live == 0)
        aborted = served.parts.engine.stats().finished["abort"]
        assert aborted > 0
        statuses = []
        for call in hoarder.calls:
            try:
                messages = [message async for message in call]
                assert messages[-1].HasField("finish")
            except grpc.aio.AioRpcError as error:
                statuses.append((error.code(), details(error)))
        assert len(statuses) == aborted
        assert {code for code, _ in statuses} == {Code.RESOURCE_EXHAUSTED}
        assert all("did not read" in text for _, text in statuses)
        await hoarder.channel.close()
        await served.idle()
        assert "Traceback" not in caplog.text

    serve_toy(scenario, server={"write_stall_s": 0.2}, num_blocks=4096, max_num_seqs=32, step_s=0.01)


def test_C7_a_deadline_in_the_past(serve_toy):
    async def scenario(served):
        error = await status_of_call(served.client.generate("hello", timeout_s=0.0))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await served.idle()
        assert served.executor.num_steps <= 1  # the transport may round the deadline up to a millisecond

    serve_toy(scenario)


def test_C7_a_deadline_that_passes_before_the_engine_sees_the_request(serve_toy):
    async def scenario(served):
        build = served.parts.build_requests

        def slow(**fields):
            request = build(**fields)
            time.sleep(0.02)
            return request

        object.__setattr__(served.parts, "build_requests", slow)
        error = await status_of_call(served.client.generate("hello", deadline_ms=5.0))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await served.idle()
        assert served.executor.num_steps == 0

    serve_toy(scenario)


@pytest.mark.parametrize("own", [False, True])
def test_C8_a_deadline_mid_stream(serve_toy, own):
    async def scenario(served):
        kwargs = {"deadline_ms": 150.0} if own else {"timeout_s": 0.15}
        error = await status_of_call(served.client.generate("hello", max_tokens=200, **kwargs, **GREEDY))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await served.idle()
        assert served.parts.engine.stats().generation_tokens < 100

    serve_toy(scenario, step_s=0.01)


def test_C13_rapid_open_and_cancel_leaves_nothing(serve_toy):
    async def scenario(served):
        async def one(number: int) -> None:
            call = served.client.generate(f"r{number}", max_tokens=100, **GREEDY)
            if number % 3:
                await anext(call)
            await call.aclose()

        for start in range(0, 300, 50):
            await asyncio.gather(*(one(n) for n in range(start, start + 50)))
        await served.idle()

    serve_toy(scenario)


# --- failures ------------------------------------------------------------------------------------------------------


def test_E7_a_request_that_broke_is_internal_with_its_id_and_not_to_be_retried(serve_toy):
    def fault(batch):
        fault.steps += 1
        return Fault(kind=FaultKind.NOT_FINITE) if fault.steps == 3 else None

    fault.steps = 0

    async def scenario(served):
        error = await status_of_call(served.client.generate("hello", request_id="mine", max_tokens=20, **GREEDY))
        assert error.code() is Code.INTERNAL
        assert "not finite" in details(error)
        assert "mine" in details(error)
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"
        assert (await collect(served, "next"))[0][-1].HasField("finish")

    serve_toy(scenario, fault=fault, debug=False)


def test_P19_no_text_of_an_exception_reaches_the_client(serve_toy, caplog):
    async def scenario(served):
        def broken(**fields):
            raise ValueError("secret prompt text")

        object.__setattr__(served.parts, "build_requests", broken)
        error = await status_of_call(served.client.generate("hello"))
        assert error.code() is Code.INTERNAL
        assert "secret" not in details(error)
        assert "internal error" in details(error)

    serve_toy(scenario)


def test_P20_logs_hold_neither_prompt_nor_output(serve_toy, caplog):
    caplog.set_level("DEBUG")

    async def scenario(served):
        chunks, _ = await collect(served, "canary-prompt", max_tokens=20)
        text = "".join(c.text for c in chunks)
        assert "canary-prompt" not in caplog.text
        assert text not in caplog.text
        assert "20 tokens" in caplog.text

    serve_toy(scenario)


def test_P9_P10_engine_death_is_unavailable_and_health_follows(serve_toy):
    def fault(batch):
        fault.steps += 1
        return Fault(kind=FaultKind.RAISE_AFTER) if fault.steps > 3 else None

    fault.steps = 0

    async def scenario(served):
        errors = await asyncio.gather(*(status_of_call(served.client.generate(f"r{i}", **GREEDY)) for i in range(3)))
        assert {e.code() for e in errors} == {Code.UNAVAILABLE}
        assert await served.engine.wait_ended()
        await served.server.engine_lost()
        assert not await served.client.is_serving()
        error = await status_of_call(served.client.generate("hello"))
        assert error.code() is Code.UNAVAILABLE

    serve_toy(scenario, fault=fault, debug=False)


# --- health, reflection, stats -------------------------------------------------------------------------------------


def test_P10_health_goes_from_loading_to_serving_to_draining():
    async def scenario():
        server = GrpcServer(ServerConfig(port=0))
        await server.start()
        client = AsyncAptClient(f"127.0.0.1:{server.port}")
        for service in ("", SERVICE):
            assert not await client.is_serving(service)
        error = await status_of_call(client.generate("hello"))
        assert error.code() is Code.UNAVAILABLE
        assert "starting" in details(error)
        parts = toy_parts(step_s=0.005)
        await server.serve(AsyncEngine(parts))
        for service in ("", SERVICE):
            assert await client.is_serving(service)
        stub: Any = health_pb2_grpc.HealthStub(client.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="sglang.grpc"))
        assert caught.value.code() is Code.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

        async def run() -> int:
            return sum([len(c.token_ids) async for c in client.generate("hello", max_tokens=60, **GREEDY)])

        task = asyncio.create_task(run())
        while not parts.engine.num_live:
            await asyncio.sleep(0.001)
        stopping = asyncio.create_task(server.stop(30))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await status_of_call(client.generate("late"))
        assert error.code() is Code.UNAVAILABLE
        assert await task == 60  # H1: what was open has ended well
        watch.cancel()
        await stopping
        await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_H1_what_does_not_end_in_the_drain_time_is_unavailable(serve_toy):
    async def scenario(served):
        task = asyncio.create_task(status_of_call(served.client.generate("hello", max_tokens=200, **GREEDY)))
        await served.until(lambda: served.parts.engine.num_live == 1)
        await served.server.stop(0.1)
        assert (await task).code() is Code.UNAVAILABLE

    serve_toy(scenario, step_s=0.02)


def test_reflection_lists_the_service(serve_toy):
    async def scenario(served):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(served.client.channel)

        async def requests():
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)

        answers = [a async for a in stub.ServerReflectionInfo(requests())]
        names = {s.name for s in answers[0].list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
        assert answers[1].file_descriptor_response.file_descriptor_proto

    serve_toy(scenario)


def test_a_client_that_knows_reflection_alone_as_documented(serve_toy, capsys):
    page = (Path(__file__).parents[3] / "docs" / "serving" / "grpc.md").read_text()
    (code,) = (part for part in page.split("```python\n") if "ProtoReflectionDescriptorDatabase" in part)
    code = code.partition("```")[0]

    async def scenario(served):
        own = code.replace("127.0.0.1:50051", served.target)
        await asyncio.to_thread(exec, own, {})
        assert len(capsys.readouterr().out) > 0

    serve_toy(scenario)


def test_reflection_can_be_left_out(serve_toy):
    async def scenario(served):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(served.client.channel)
        # Nothing is sent: a message that is on its way when the server ends the call fails in the client instead.
        assert await stub.ServerReflectionInfo().code() is Code.UNIMPLEMENTED

    serve_toy(scenario, server={"reflection": False})


def test_stats_count_what_happened(serve_toy):
    async def scenario(served):
        await asyncio.gather(*(collect(served, "x" * n, max_tokens=5) for n in range(1, 5)))
        stats = await served.client.stats()
        assert (stats.model, stats.scheduling_policy, stats.cache) == ("toy", "fcfs", "hybrid")
        assert stats.finished == {"length": 4}
        assert stats.generation_tokens == 20
        assert stats.prompt_tokens == 2 + 3 + 4 + 5
        assert stats.free_blocks == stats.total_blocks == 256
        assert (stats.num_running, stats.num_waiting, stats.compilations) == (0, 0, 0)
        assert stats.iterations["decode"] > 0
        assert stats.host_p50_ms > 0
        assert (stats.block_size, stats.max_model_len) == (4, 256)
        assert set(stats.kind_switches) == {"kv>hidden", "hidden>kv"}

    serve_toy(scenario)


def test_every_number_of_the_engine_is_on_the_wire():
    stats = toy_parts().engine.stats()
    wire = set(pb.GetStatsResponse.DESCRIPTOR.fields_by_name)
    internal = {"num_deferred_requests", "num_discarded_tokens", "num_invalid_plan_rows"}
    internal |= {"num_slo_at_risk_admitted", "num_rejected"}  # on the wire under their former names
    internal |= {
        "step_tokens",
        "schedule_s",
        "busy_s",
        "cost_errors",
        "fallback_iterations",
        "prompt_tokens_by_source",
        "sessions",
    }  # for /metrics and loads
    assert set(type(stats).__dataclass_fields__) - wire == internal


# --- sockets -------------------------------------------------------------------------------------------------------


def test_H10_a_port_in_use_is_one_line(serve_toy):
    async def scenario(served):
        second = GrpcServer(ServerConfig(port=served.server.port))
        with pytest.raises(PortInUseError, match="--grpc-port"):
            await second.start()

    serve_toy(scenario)


def test_the_default_address_is_loopback():
    assert ServerConfig().host == "127.0.0.1"
    options = dict(ServerConfig().options())
    assert options["grpc.http2.max_ping_strikes"] == 0
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == 10_000
    assert options["grpc.keepalive_permit_without_calls"] == 1


def test_messages_convert_numpy_ids():
    assert make_request(np.array([1, 2]).tolist()).token_ids.ids == [1, 2]


def test_a_class_that_is_none_is_named_by_the_client():
    with pytest.raises(ValueError, match="slo_class: 'batch' must be 'rt' \\(real time\\) or 'be' \\(best effort\\)"):
        make_request("hi", slo_class="batch")


# --- watching the scheduler ----------------------------------------------------------------------------------------


def test_watchers_see_every_decision(serve_toy):
    async def scenario(served):
        seen: list[pb.Iteration] = []

        async def watch() -> None:
            async for message in served.client.watch_scheduler():
                assert message.num_dropped == 0
                assert message.iterations
                seen.extend(message.iterations)

        task = asyncio.create_task(watch())
        await served.until(lambda: len(served.engine._feed) > 0)
        await asyncio.gather(*(collect(served, chr(97 + n) * n, max_tokens=6, request_id=f"r{n}") for n in (3, 9, 20)))
        stats = await served.client.stats()
        await served.until(lambda: len(seen) == sum(stats.iterations.values()))
        assert [i.number for i in seen] == list(range(len(seen)))
        assert {i.type for i in seen} == set(stats.iterations)
        rows = [row for i in seen for row in i.scheduled]
        assert {row.request_id for row in rows} == {"r3", "r9", "r20"}
        assert sum(i.decode_tokens for i in seen) == 3 * 5
        assert sum(i.prefill_tokens for i in seen) == 4 + 10 + 21
        assert {row.kind for row in rows} <= {pb.CACHE_KIND_KV, pb.CACHE_KIND_HIDDEN}
        assert all(i.step_ms > 0 and not i.failed for i in seen)
        uptimes = [i.uptime_s for i in seen]
        assert uptimes[0] > 0
        assert uptimes == sorted(uptimes)
        assert uptimes[-1] <= stats.uptime_s
        assert seen[-1].num_waiting == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await served.until(lambda: len(served.engine._feed) == 0)

    serve_toy(scenario)


def test_C5_a_watcher_that_does_not_read_loses_the_oldest_and_holds_nothing_up(serve_toy, monkeypatch):
    def large(*args):  # so that the transport is soon full
        message = watch_response(*args)
        message.iterations[0].deferred.append("x" * 500_000)
        return message

    watch_response = messages.watch_response
    monkeypatch.setattr(messages, "watch_response", large)

    async def scenario(served):
        channel = grpc.aio.insecure_channel(
            served.target, options=[("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
        )
        method = channel.unary_stream(
            f"/{SERVICE}/WatchScheduler", response_deserializer=pb.WatchSchedulerResponse.FromString
        )
        call = method(pb.WatchSchedulerRequest(capacity=10).SerializeToString())
        await call.wait_for_connection()
        _, tokens = await collect(served, "reader", max_tokens=200)
        assert tokens == expected(served, "reader", 200)
        total = sum((await served.client.stats()).iterations.values())
        told, dropped = [], 0
        async for message in call:
            assert len(message.iterations) <= 10
            told += [i.number for i in message.iterations]
            dropped += message.num_dropped
            if told[-1] == total - 1:
                break
        assert told == sorted(told)
        assert dropped > 0
        assert dropped + len(told) == total
        call.cancel()
        await channel.close()

    serve_toy(scenario, step_s=0.001)


def test_watching_has_limits(serve_toy):
    async def scenario(served):
        for capacity in (0, 4097, 2**32 - 1):
            error = await status_of_call(served.client.watch_scheduler(capacity))
            assert error.code() is Code.INVALID_ARGUMENT
            assert details(error).startswith("capacity: ")
        method = served.client.channel.unary_stream(f"/{SERVICE}/WatchScheduler")
        calls = [method(b"") for _ in range(16)]
        await asyncio.gather(*(call.wait_for_connection() for call in calls))
        error = await status_of_call(served.client.watch_scheduler())
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "16 clients watch" in details(error)
        for call in calls:
            call.cancel()
        await served.until(lambda: len(served.engine._feed) == 0)

    serve_toy(scenario)


def test_a_watch_ends_with_the_server(serve_toy):
    async def scenario(served):
        task = asyncio.create_task(status_of_call(served.client.watch_scheduler()))
        await served.until(lambda: len(served.engine._feed) > 0)
        await served.server.stop(0.1)
        assert (await task).code() is Code.UNAVAILABLE

    serve_toy(scenario)
