"""`vllm.grpc.engine.VllmEngine` with the stubs that gateways use: streams, statuses, the tokenizer archive, loads."""

import asyncio
import contextlib
import hashlib
import io
import json
import types
import zipfile
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from apt_jax import LLM
from apt_jax.config import SLO, CacheConfig, SchedulerConfig
from apt_jax.core.kinds import CacheKindSpec, WindowSpec
from apt_jax.engine import Engine
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched import make_policy
from apt_jax.utils.clock import VirtualClock
from serve.grpc_api import vllm_service as vllm_grpc
from serve.grpc_api.server import GrpcServer, ServerConfig
from serve.grpc_api.service import SERVICE as APT_SERVICE
from serve.grpc_api.vllm_service import SERVICE, sampling_fields
from tests.support.endpoints import vllm_request
from tests.support.fake_executor import FakeExecutor, Fault, FaultKind
from tests.support.small_models import write_shallow_model
from tests.support.toy_serving import VOCAB_SIZE, expected_tokens, toy_parts

Code = grpc.StatusCode
pb: Any = vllm_engine_pb2
common: Any = common_pb2
GREEDY = {"temperature": 0.0, "ignore_eos": True}
FEW_PROGRAMS: dict[str, Any] = {
    "warm_up": False,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "num_blocks_override": 64,
}


def stub(served) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(served.client.channel)


async def collect(served, *args, **fields) -> list[Any]:
    return [m async for m in stub(served).Generate(vllm_request(*args, **{**GREEDY, **fields}))]


def completes(messages: list[Any]) -> list[Any]:
    return [m.complete for m in messages if m.HasField("complete")]


def chunks(messages: list[Any], index: int = 0) -> list[Any]:
    return [m.chunk for m in messages if m.HasField("chunk") and m.chunk.index == index]


async def rpc_error_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


def expected(served, prompt: Any = "hello", **params: Any) -> list[int]:
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    request = served.parts.build_request(**{key: prompt}, params={**GREEDY, **params})
    return expected_tokens(request)


# --- answers -------------------------------------------------------------------------------------------------------


def test_a_stream_has_chunks_of_new_tokens_and_one_complete(serve_toy):
    async def scenario(served):
        prompts = ["x" * n for n in range(1, 12)] + [[5, 6, 7]]
        results = await asyncio.gather(*(collect(served, p, max_tokens=10) for p in prompts))
        for prompt, messages in zip(prompts, results, strict=True):
            want = expected(served, prompt, max_tokens=10)
            new_chunks = chunks(messages)
            assert [t for c in new_chunks for t in c.token_ids] == want
            assert all(c.completion_tokens == len(c.token_ids) > 0 for c in new_chunks)
            (complete,) = completes(messages)
            assert messages[-1].HasField("complete")
            assert complete.output_ids == want
            assert (complete.finish_reason, complete.completion_tokens) == ("length", 10)
            assert complete.prompt_tokens == new_chunks[0].prompt_tokens
            assert complete.WhichOneof("matched_stop") is None

    serve_toy(scenario)


def test_without_stream_there_is_one_message(serve_toy):
    async def scenario(served):
        messages = await collect(served, "hello", stream=False, max_tokens=7, logprobs=2)
        assert [m.WhichOneof("response") for m in messages] == ["complete"]
        complete = messages[0].complete
        assert complete.output_ids == expected(served, max_tokens=7)
        assert complete.output_logprobs.token_ids == complete.output_ids
        assert [len(top.values) for top in complete.output_logprobs.top_logprobs] == [2] * 7

    serve_toy(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_n_outputs_of_one_prompt(serve_toy, stream):
    async def scenario(served):
        fields = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 9}
        messages = await collect(served, "hello", stream=stream, **fields)
        done = sorted(completes(messages), key=lambda c: c.index)
        assert [c.index for c in done] == [0, 1, 2]
        for complete in done:
            params = {"seed": 7 + complete.index, "temperature": 1.0, "max_tokens": 9}
            assert complete.output_ids == expected(served, **params)
            said = [t for c in chunks(messages, complete.index) for t in c.token_ids]
            assert said == (complete.output_ids if stream else [])
        assert len({tuple(c.output_ids) for c in done}) == 3
        assert served.parts.engine.stats().finished == {"length": 3}

    serve_toy(scenario)


def test_stop_strings_end_the_output_in_the_engine(serve_toy):
    async def scenario(served):
        want = expected(served, max_tokens=60)
        text = served.parts.tokenizer.decode(want)
        stop = next(c for c in text[3:] if c.isascii() and c.isprintable())
        messages = await collect(served, max_tokens=60, stop=["no such text", stop])
        (complete,) = completes(messages)
        assert complete.finish_reason == "stop"
        assert complete.matched_stop_str == stop
        said = served.parts.tokenizer.decode(complete.output_ids)
        assert said == text[: text.index(stop) + 1]
        assert served.parts.engine.stats().generation_tokens == len(complete.output_ids) < 60
        stop_id = want[4]
        (complete,) = completes(await collect(served, max_tokens=60, stop_token_ids=[stop_id]))
        assert complete.matched_token_id == stop_id
        assert complete.output_ids == want[: want.index(stop_id) + 1]

    serve_toy(scenario)


def test_log_probabilities_are_of_the_news_best_first(serve_toy):
    async def scenario(served):
        messages = await collect(served, max_tokens=8, logprobs=3)
        for chunk in chunks(messages):
            logprobs = chunk.output_logprobs
            assert logprobs.token_ids == chunk.token_ids
            assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(chunk.token_ids)
            for top in logprobs.top_logprobs:
                assert len(top.token_ids) == 3
                assert list(top.values) == sorted(top.values, reverse=True)
        assert not completes(messages)[0].HasField("output_logprobs")  # they have been told
        (complete,) = completes(await collect(served, max_tokens=4, logprobs=0, stream=False))
        assert len(complete.output_logprobs.token_logprobs) == 4
        assert not complete.output_logprobs.top_logprobs
        (complete,) = completes(await collect(served, max_tokens=4, stream=False))
        assert not complete.HasField("output_logprobs")

    serve_toy(scenario)


def test_what_is_not_set_means_what_it_means_in_vllm(serve_toy):
    async def scenario(served):
        seen = []
        add = served.parts.engine.add_request

        def noting(request):
            seen.append(request.params)
            add(request)

        served.parts.engine.add_request = noting
        request = pb.GenerateRequest(text="hello")
        messages = [m async for m in stub(served).Generate(request)]
        (params,) = seen
        assert (params.temperature, params.top_p, params.repetition_penalty) == (1.0, 1.0, 1.0)
        assert params.max_tokens == 256 - 6
        assert not params.skip_special_tokens
        assert messages[-1].complete.finish_reason in ("length", "stop")

    serve_toy(scenario)


def test_numbers_are_the_decimals_that_were_written():
    params = pb.SamplingParams(
        temperature=0.01, top_p=0.9, min_p=0.1, repetition_penalty=1.1, frequency_penalty=-0.3,
        presence_penalty=1.7, logit_bias={5: 0.2},
    )  # fmt: skip
    fields = sampling_fields(params)
    assert (fields["temperature"], fields["top_p"], fields["min_p"]) == (0.01, 0.9, 0.1)
    assert (fields["repetition_penalty"], fields["presence_penalty"]) == (1.1, 1.7)
    assert fields["frequency_penalty"] == -0.3
    assert fields["logit_bias"] == {5: 0.2}


def test_structured_outputs_match_their_constraint(serve_toy):
    pytest.importorskip("llguidance", reason="structured outputs need the extra `structured`")

    async def scenario(served):
        schema = json.dumps(
            {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}},
             "required": ["a"], "additionalProperties": False}
        )  # fmt: skip

        async def text(**constraint) -> str:
            fields = {"max_tokens": 60, "temperature": 0.0, "structured_outputs": constraint}
            request = vllm_request(stream=False, **fields)
            (complete,) = completes([m async for m in stub(served).Generate(request)])
            assert complete.finish_reason == "stop"
            return served.parts.tokenizer.decode(complete.output_ids)

        assert isinstance(json.loads(await text(json=schema))["a"], int)
        assert await text(choice=["yes", "no"]) in ("yes", "no")
        assert (await text(regex="[ab]{3}")).strip("ab") == ""
        assert await text(grammar='start: "x" "y"') == "xy"

    serve_toy(scenario)


def test_tokens_equal_those_of_the_offline_interface_on_a_real_model(tmp_path):
    llm = LLM(str(write_shallow_model(tmp_path)), **FEW_PROGRAMS)
    cases: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 24},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3, "max_tokens": 24},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.02, "seed": 4, "max_tokens": 24},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: -3.5}, "max_tokens": 24},
        {"temperature": 0.0, "stop": ["the"], "max_tokens": 64},
        {"temperature": 1.0, "seed": 9, "logprobs": 4, "max_tokens": 8},
    ]
    prompt = "Shall I compare thee"
    wanted = [llm.generate(prompt, case, use_tqdm=False)[0].outputs[0] for case in cases]

    async def scenario() -> list[Any]:
        async with serving_parts(llm.parts) as served:
            calls = (
                collect(served, prompt, stream=i % 2 == 0, **{"ignore_eos": False, **case})
                for i, case in enumerate(cases)
            )
            return await asyncio.gather(*calls)

    for case, want, messages in zip(cases, wanted, asyncio.run(scenario()), strict=True):
        (complete,) = completes(messages)
        assert complete.output_ids == want.token_ids, case
        assert complete.finish_reason == want.finish_reason
        if isinstance(want.stop_reason, str):
            assert complete.matched_stop_str == want.stop_reason
        if want.logprobs is not None:
            told = [
                x for c in chunks(messages) for x in c.output_logprobs.token_logprobs
            ] or complete.output_logprobs.token_logprobs
            values = [e[t].logprob for t, e in zip(want.token_ids, want.logprobs, strict=True)]
            assert told == pytest.approx(values, abs=1e-4)


class Served:
    """Server over any engine, as far as tests need it."""

    def __init__(self, parts, channel) -> None:
        self.parts = parts
        self.client = type("Client", (), {"channel": channel})


@contextlib.asynccontextmanager
async def serving_parts(parts) -> AsyncIterator[Served]:
    server = GrpcServer(ServerConfig(port=0))
    await server.start()
    await server.serve(AsyncEngine(parts))
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
    try:
        yield Served(parts, channel)
    finally:
        await channel.close()
        await server.stop(0)


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("n", {"sampling_params": {"n": 129}}),
    ("n", {"sampling_params": {"n": 2**32 - 1}}),
    ("prompt_logprobs", {"sampling_params": {"prompt_logprobs": 21}}),
    ("truncate_prompt_tokens", {"sampling_params": {"truncate_prompt_tokens": -2}}),
    ("structural_tag", {"sampling_params": {"structural_tag": "{}"}}),
    ("mm_inputs", {"mm_inputs": {"mm_hashes": ["x"]}}),
    ("mm_inputs", {"mm_inputs": {}}),
    ("extra_mm_inputs", {"extra_mm_inputs": [{}]}),
    ("media_refs", {"media_refs": {"items": [{"url": "file:///etc/passwd"}]}}),
    ("media_refs", {"media_refs": {"items": [{"url": "http://127.0.0.1:1/x.png"}]}}),
    ("kv_transfer_params", {"kv_transfer_params": {"remote_host": "a", "remote_port": 1}}),
    ("kv_transfer_params_json", {"kv_transfer_params_json": "{}"}),
    ("data_parallel_rank", {"data_parallel_rank": 1}),
    ("request_id", {"request_id": "a b"}),
    ("request_id", {"request_id": "a#1"}),
    ("request_id", {"request_id": "x" * 129}),
]


def test_R6_R13_R18_R19_R20_what_is_not_taken_is_an_invalid_argument(serve_toy):
    async def scenario(served):
        for field, fields in REFUSED:
            error = await rpc_error_of(stub(served).Generate(pb.GenerateRequest(text="x", **fields)))
            assert error.code() is Code.INVALID_ARGUMENT, fields
            assert (error.details() or "").startswith(f"{field}: "), error.details()
        error = await rpc_error_of(stub(served).Generate(pb.GenerateRequest()))
        assert (error.code(), error.details()) == (
            Code.INVALID_ARGUMENT, "prompt: missing; give text or token ids",
        )  # fmt: skip
        request = pb.GenerateRequest(text="x", data_parallel_rank=0)
        assert [m async for m in stub(served).Generate(request)]  # the rank that there is
        method = served.client.channel.unary_stream(f"/{SERVICE}/Generate")
        error = await rpc_error_of(method(b"\x1a\x02\xff\xfe"))  # text that is not UTF-8
        assert error.code() is Code.INVALID_ARGUMENT
        assert sum(served.parts.engine.stats().finished.values()) == 1

    serve_toy(scenario)


def test_objectives_come_from_the_metadata(serve_toy):
    async def scenario(served):
        seen = []
        add = served.parts.engine.add_request

        def noting(request):
            seen.append(request)
            add(request)

        served.parts.engine.add_request = noting
        metadata = [("x-slo-ttft-ms", "300"), ("x-slo-e2e-ms", "9000"), ("service_tier", "flex")]
        request = vllm_request(max_tokens=1)
        assert [m async for m in stub(served).Generate(request, metadata=metadata)]
        assert (seen[0].slo, seen[0].slo_class) == (SLO(ttft_s=0.3, e2e_s=9.0), "be")
        error = await rpc_error_of(stub(served).Generate(request, metadata=[("x-slo-ttft-ms", "a")]))
        assert error.code() is Code.INVALID_ARGUMENT
        error = await rpc_error_of(stub(served).Generate(request, metadata=[("x-slo-ttft-ms", "0")]))
        assert (error.details() or "").startswith("x-slo-ttft-ms: an objective of 0 s must lie in")

    serve_toy(scenario)


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_C11_abort_ends_all_outputs_of_a_call_and_frees_their_blocks(serve_toy, stream):
    async def scenario(served):
        task = asyncio.create_task(collect(served, stream=stream, request_id="mine", n=2, max_tokens=200))
        bystander = asyncio.create_task(collect(served, "bystander", max_tokens=60))
        await served.until(lambda: served.parts.engine.stats().generation_tokens > 12)
        engine = stub(served)
        for unknown in ("", "m", "mine#1", "MINE", "mine "):  # exact or nothing
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await engine.Abort(pb.AbortRequest(request_ids=[unknown]))
            assert caught.value.code() is Code.NOT_FOUND
        assert served.parts.engine.num_live == 3
        await engine.Abort(pb.AbortRequest(request_ids=["mine"]))
        messages = await task
        assert [c.finish_reason for c in completes(messages)] == ["abort", "abort"]
        want = expected(served, max_tokens=200)
        for complete in completes(messages):
            assert 0 < len(complete.output_ids) < 200
            assert complete.output_ids == want[: len(complete.output_ids)]  # greedy: n alike
        assert completes(await bystander)[0].output_ids == expected(served, "bystander", max_tokens=60)
        await served.idle()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await engine.Abort(pb.AbortRequest(request_ids=["mine"]))
        assert caught.value.code() is Code.NOT_FOUND
        await engine.Abort(pb.AbortRequest())

    serve_toy(scenario, step_s=0.005)


def test_abort_ends_the_live_ones_among_unknown_ones(serve_toy):
    async def scenario(served):
        task = asyncio.create_task(collect(served, request_id="mine", max_tokens=200))
        await served.until(lambda: served.parts.engine.num_live == 1)
        with pytest.raises(grpc.aio.AioRpcError, match="no live request has the id 'other'"):
            await stub(served).Abort(pb.AbortRequest(request_ids=["other", "mine"]))
        assert completes(await task)[0].finish_reason == "abort"

    serve_toy(scenario, step_s=0.005)


def test_C10_ids_are_unique_among_the_live_of_both_services_and_free_afterwards(serve_toy):
    async def scenario(served):
        task = asyncio.create_task(collect(served, request_id="same", n=2, max_tokens=40))
        await served.until(lambda: served.parts.engine.num_live == 2)
        error = await rpc_error_of(stub(served).Generate(vllm_request(request_id="same")))
        assert error.code() is Code.ALREADY_EXISTS
        error = await rpc_error_of(served.client.generate("x", request_id="same"))
        assert error.code() is Code.ALREADY_EXISTS
        assert {len(c.output_ids) for c in completes(await task)} == {40}
        for _ in range(20):  # at once after the last message
            assert completes(await collect(served, request_id="same", max_tokens=1))

    serve_toy(scenario, step_s=0.002)


@pytest.mark.parametrize("stream", [True, False])
def test_C3_C9_a_client_that_leaves_frees_its_blocks(serve_toy, stream):
    async def scenario(served):
        call = stub(served).Generate(vllm_request(stream=stream, n=4, max_tokens=200, **GREEDY))
        await served.until(lambda: served.parts.engine.num_live == 4)
        call.cancel()
        await served.idle()
        assert served.parts.engine.stats().generation_tokens < 400

    serve_toy(scenario, step_s=0.005)


def test_C8_a_deadline_ends_all_outputs(serve_toy):
    async def scenario(served):
        request = vllm_request(n=3, max_tokens=200, **GREEDY)
        error = await rpc_error_of(stub(served).Generate(request, timeout=0.15))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await served.idle()

    serve_toy(scenario, step_s=0.01)


def test_C5_a_client_that_does_not_read_loses_its_blocks(serve_toy):
    async def scenario(served):
        channel = grpc.aio.insecure_channel(
            served.target, options=[("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
        )
        lazy: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        request = vllm_request("lazy", max_tokens=230, logprobs=20, n=2, **GREEDY)
        calls = [lazy.Generate(request) for _ in range(12)]
        await served.until(lambda: served.parts.engine.num_live == 24)
        await served.until(lambda: served.parts.engine.num_live == 0)
        assert served.parts.engine.stats().finished["abort"] > 0
        for call in calls:
            call.cancel()
        await channel.close()
        await served.idle()

    serve_toy(scenario, server={"write_stall_s": 0.2}, num_blocks=4096, max_num_seqs=32, step_s=0.01)


def test_a_request_that_broke_is_internal(serve_toy):
    def fault(batch):
        fault.steps += 1
        return Fault(kind=FaultKind.NOT_FINITE) if fault.steps == 3 else None

    fault.steps = 0

    async def scenario(served):
        error = await rpc_error_of(stub(served).Generate(vllm_request(n=2, request_id="mine")))
        assert error.code() is Code.INTERNAL
        assert "not finite" in (error.details() or "")
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"
        assert completes(await collect(served, request_id="mine"))

    serve_toy(scenario, fault=fault, debug=False)


def test_a_full_queue_refuses_the_whole_call(serve_toy):
    async def scenario(served):
        served.executor.gate.clear()
        call = stub(served).Generate(vllm_request(n=16, max_tokens=3, **GREEDY))
        task = asyncio.create_task(rpc_error_of(call))
        await asyncio.sleep(0.05)
        served.executor.gate.set()
        error = await task
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata())["retry-after"]) >= 1
        await served.idle()

    serve_toy(scenario, max_num_seqs=2, max_num_queued_reqs=4)


# --- around it -----------------------------------------------------------------------------------------------------


def test_P10_health_of_both_services_follows_the_engine():
    end_of_stream = getattr(grpc.aio, "EOF")  # noqa: B009 - not in the stubs

    async def scenario():
        server = GrpcServer(ServerConfig(port=0))
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
        health: Any = health_pb2_grpc.HealthStub(channel)
        engine: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)

        async def statuses() -> list[int]:
            asked = [health_pb2.HealthCheckRequest(service=s) for s in ("", SERVICE, APT_SERVICE)]
            return [(await health.Check(request)).status for request in asked]

        async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            return caught.value.code(), caught.value.details() or ""

        assert await statuses() == [health_pb2.HealthCheckResponse.NOT_SERVING] * 3
        # A gateway takes any answer for the sign to begin, so there is none.
        code, text = await refusal(engine.HealthCheck(pb.HealthCheckRequest()))
        assert code is Code.UNAVAILABLE
        assert "starting" in text
        assert (await refusal(engine.GetModelInfo(pb.GetModelInfoRequest())))[0] is Code.UNAVAILABLE
        parts = toy_parts(step_s=0.01)
        await server.serve(AsyncEngine(parts))
        assert await statuses() == [health_pb2.HealthCheckResponse.SERVING] * 3
        assert (await engine.HealthCheck(pb.HealthCheckRequest())).healthy
        call = engine.Generate(vllm_request(max_tokens=100, **GREEDY))
        assert (await call.read()).HasField("chunk")
        stopping = asyncio.create_task(server.stop(30))
        await asyncio.sleep(0)
        assert await statuses() == [health_pb2.HealthCheckResponse.NOT_SERVING] * 3
        code, text = await refusal(engine.HealthCheck(pb.HealthCheckRequest()))
        assert code is Code.UNAVAILABLE
        assert "shutting down" in text
        assert (await engine.GetLoads(pb.GetLoadsRequest())).loads[0].num_running_reqs == 1
        while (message := await call.read()) is not end_of_stream:
            last = message
        assert len(last.complete.output_ids) == 100
        await stopping
        await channel.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_P9_the_health_check_of_a_dead_engine_is_unavailable(serve_toy):
    def fault(batch):
        fault.steps += 1
        return Fault(kind=FaultKind.RAISE_AFTER) if fault.steps > 3 else None

    fault.steps = 0

    async def scenario(served):
        error = await rpc_error_of(stub(served).Generate(vllm_request(n=2, max_tokens=50)))
        assert error.code() is Code.UNAVAILABLE
        assert await served.engine.wait_ended()
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub(served).HealthCheck(pb.HealthCheckRequest())
            assert caught.value.code() is Code.UNAVAILABLE
            assert "the engine has ended" in (caught.value.details() or "")

    serve_toy(scenario, fault=fault, debug=False)


def test_reflection_shows_both_services_and_no_other_engines(serve_toy):
    async def scenario(served):
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(served.client.channel)

        async def requests():
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)

        answers = [a async for a in reflection.ServerReflectionInfo(requests())]
        names = {s.name for s in answers[0].list_services_response.service}
        assert names == {
            SERVICE, APT_SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
        }  # fmt: skip
        assert answers[1].file_descriptor_response.file_descriptor_proto
        for path in ("sglang.grpc.scheduler.SglangScheduler", "trtllm.TrtllmService"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.client.channel.unary_unary(f"/{path}/HealthCheck")(b"")
            assert caught.value.code() is Code.UNIMPLEMENTED

    serve_toy(scenario)


def test_the_rest_is_unimplemented(serve_toy):
    async def scenario(served):
        methods = pb.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name
        offered = {
            "Generate", "Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer",
        }  # fmt: skip
        assert offered < set(methods)
        for name in set(methods) - offered:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.client.channel.unary_unary(f"/{SERVICE}/{name}")(b"")
            assert caught.value.code() is Code.UNIMPLEMENTED, name
            assert "this server only generates text" in (caught.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.client.channel.unary_unary(f"/{SERVICE}/NoSuchMethod")(b"")
        assert caught.value.code() is Code.UNIMPLEMENTED

    serve_toy(scenario)


async def archive(served) -> zipfile.ZipFile:
    pieces = [c async for c in stub(served).GetTokenizer(common.GetTokenizerRequest())]
    data = b"".join(c.data for c in pieces)
    assert [bool(c.sha256) for c in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert all(len(c.data) <= 64 << 10 for c in pieces)
    return zipfile.ZipFile(io.BytesIO(data))


TEXTS = ("Shall I compare thee to a summer's day?", "", "  naïve\tcafé 数 🙂", "</s><s>")


def test_the_tokenizer_archive_makes_the_same_ids():
    llm = LLM("tiny-opt", chat_template=None, **FEW_PROGRAMS)

    async def scenario() -> None:
        async with serving_parts(llm.parts) as served:
            files = await archive(served)
            assert set(files.namelist()) == {
                "tokenizer.json",
                "tokenizer_config.json",
                "config.json",
            }
            loaded = tokenizers.Tokenizer.from_str(files.read("tokenizer.json").decode())
            loaded.encode_special_tokens = True
            assert llm.tokenizer is not None
            for text in TEXTS:
                assert loaded.encode(text).ids == llm.tokenizer.encode(text)
            config = json.loads(files.read("config.json"))
            assert (config["model_type"], config["vocab_size"]) == ("opt", 4096)
            settings = json.loads(files.read("tokenizer_config.json"))
            assert (settings["eos_token"], settings["bos_token"]) == ("</s>", "</s>")
            info = await stub(served).GetModelInfo(pb.GetModelInfoRequest())
            assert info.tokenizer_path == str(llm.tokenizer.path)
            assert (info.model_type, list(info.architectures)) == ("opt", ["OPTForCausalLM"])
            assert (info.pad_token_id, info.bos_token_id, info.eos_token_ids) == (1, 2, [2])
            again = await archive(served)
            assert again.read("tokenizer.json") == files.read("tokenizer.json")

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_the_archive_has_the_chat_template_that_is_used(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    llm = LLM("tiny-opt", chat_template=str(template), **FEW_PROGRAMS)

    async def scenario() -> None:
        async with serving_parts(llm.parts) as served:
            settings = json.loads((await archive(served)).read("tokenizer_config.json"))
            assert settings["chat_template"] == template.read_text()
            # Who reads files where they lie would miss the template: it lies nowhere.
            info = await stub(served).GetModelInfo(pb.GetModelInfoRequest())
            assert str(template) in info.tokenizer_path
            assert not info.tokenizer_path.endswith("tiny-opt")

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_model_without_a_tokenizer_says_so(serve_toy):
    async def scenario(served):
        error = await rpc_error_of(stub(served).GetTokenizer(common.GetTokenizerRequest()))
        assert error.code() is Code.FAILED_PRECONDITION
        assert "--tokenizer" in (error.details() or "")
        (complete,) = completes(await collect(served, [5, 6], max_tokens=4))
        assert len(complete.output_ids) == 4

    serve_toy(scenario, tokenizer=None)


def test_loads_under_load(serve_toy):
    async def scenario(served):
        engine = stub(served)

        async def load() -> Any:
            response = await engine.GetLoads(pb.GetLoadsRequest(include=["core"]))
            assert response.dp_rank_count == len(response.loads) == 1
            return response.loads[0]

        idle = await load()
        assert (idle.num_total_reqs, idle.token_usage, idle.num_used_tokens) == (0, 0.0, 0)
        assert idle.max_total_num_tokens == 1024
        assert idle.max_running_requests == 2
        prompts = [str(i) * 19 for i in range(6)]
        tasks = [asyncio.create_task(collect(served, p, max_tokens=100)) for p in prompts]
        await served.until(lambda: served.parts.engine.stats().generation_tokens > 20)
        busy = await load()
        assert (busy.num_running_reqs, busy.num_waiting_reqs, busy.num_total_reqs) == (2, 4, 6)
        assert busy.num_waiting_uncached_tokens == 4 * 20
        assert 0.0 < busy.token_usage < 1.0
        assert 2 * 20 <= busy.num_used_tokens <= busy.max_total_num_tokens
        assert busy.utilization == 1.0
        assert busy.gen_throughput > 0.0
        info = await engine.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.active_requests, info.server_type, info.max_num_seqs) == (6, "vllm-grpc", 2)
        assert info.block_size == 4
        for task in tasks:
            task.cancel()
        await served.idle()
        assert (await load()).num_total_reqs == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await engine.GetLoads(pb.GetLoadsRequest(dp_rank=1))
        assert caught.value.code() is Code.INVALID_ARGUMENT

    serve_toy(scenario, max_num_seqs=2, step_s=0.005)


def test_blocks_of_layer_inputs_count_as_the_tokens_that_they_hold():
    clock = VirtualClock()
    executor = FakeExecutor(num_blocks=64, block_size=4, hidden_block_size=6, max_num_seqs=2, vocab_size=VOCAB_SIZE)
    engine = Engine(
        executor, make_policy("fcfs"), clock,
        (CacheKindSpec(name="kv", blocks_per_group=2, offered=False), CacheKindSpec(name="hidden", blocks_per_group=1)),
        SchedulerConfig(max_num_seqs=2, overlap=False), CacheConfig(block_size=4),
    )  # fmt: skip
    params = SamplingParams(max_tokens=4, temperature=0.0)
    engine.add_request(
        EngineRequest(
            request_id="a",
            prompt=None,
            prompt_token_ids=np.arange(3, 13, dtype=np.int32),
            params=params,
            slo=SLO(),
            arrival_s=0.0,
        )
    )
    engine.step()
    parts: Any = types.SimpleNamespace(
        engine=engine, executor=executor, limits=types.SimpleNamespace(max_pool_tokens=64 * 6)
    )
    load = vllm_grpc._load(parts, engine.stats(), 0.0)
    assert load.num_used_tokens == 12  # two blocks of six for ten tokens
    assert load.max_total_num_tokens == 384


def test_blocks_of_windowed_layers_are_not_counted_as_tokens():
    """More blocks than keys and values alone would take, but never more tokens than the pool can hold."""
    windows = WindowSpec(window=8, block_size=4, blocks_per_group=6)
    kinds = [CacheKindSpec(name="kv", blocks_per_group=2, windows=windows)]
    engine = types.SimpleNamespace(kinds=kinds, max_num_seqs=2, cache=types.SimpleNamespace(block_sizes=(4,)))
    parts: Any = types.SimpleNamespace(engine=engine, limits=types.SimpleNamespace(max_pool_tokens=80))
    numbers = (
        "num_running",
        "num_ending",
        "num_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "waiting_uncached_tokens",
    )
    for used, tokens in ((0, 0), (32, 40), (64, 80)):
        stats: Any = types.SimpleNamespace(
            used_blocks=used, total_blocks=64, blocks_by_kind={"kv": used}, **dict.fromkeys(numbers, 0)
        )
        assert vllm_grpc._load(parts, stats, 0.0).num_used_tokens == tokens
