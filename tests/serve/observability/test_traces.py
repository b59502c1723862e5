"""Spans of calls, received by a collector."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from apt_jax.errors import ConfigError
from serve.observability.call_record import CallRecord
from serve.observability.tracing import Tracer
from tests.support.http_serving import HttpServed, completion, http_serving
from tests.support.otlp_collector import Collector, Span, collector
from tests.support.toy_serving import executor_of

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
CANARY = "canary-7f3a"
SERVER = 2

pb: Any = vllm_engine_pb2


@contextlib.contextmanager
def tracing(endpoint: str) -> Iterator[Tracer]:
    tracer = Tracer(endpoint)
    try:
        yield tracer
    finally:
        tracer.close()


def traced(scenario, **kwargs: Any) -> Collector:
    """Run a scenario with servers that trace; everything has been sent afterwards."""

    async def whole(tracer: Tracer) -> None:
        app, rpc = {"tracer": tracer, **kwargs.pop("app", {})}, {"tracer": tracer}
        async with http_serving(app=app, grpc=rpc, **kwargs) as served:
            await asyncio.wait_for(scenario(served), 60)

    with collector() as found:
        with tracing(found.url) as tracer:
            asyncio.run(whole(tracer))
        return found


def children(found: Collector, parent: Span) -> dict[str, Span]:
    mine = [span for span in found.spans if span.parent_id == parent.span_id]
    assert all(span.trace_id == parent.trace_id for span in mine)
    assert len({span.name for span in mine}) == len(mine)
    return {span.name: span for span in mine}


def vllm_generate(served: HttpServed) -> Any:
    return served.grpc.channel.unary_stream(
        "/vllm.grpc.engine.VllmEngine/Generate",
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )


def test_a_request_is_a_span_with_its_queue_prefill_and_decode():
    before_ns = time.time_ns()

    async def scenario(served):
        await served.ask(CANARY, max_tokens=7, slo={"ttft_ms": 60_000, "tbt_ms": 50_000, "e2e_ms": 0.01})

    found = traced(scenario, step_s=0.02)
    (span,) = found.named("llm_request")
    assert span.kind == SERVER
    assert not span.is_error
    assert not span.parent_id
    assert span.resource["service.name"] == "apt-jax"
    values = span.attributes
    assert values["gen_ai.request.id"]
    assert values["gen_ai.response.model"] == "toy"
    assert values["gen_ai.usage.prompt_tokens"] == len(CANARY) + 1
    assert values["gen_ai.usage.completion_tokens"] == 7
    assert values["gen_ai.request.max_tokens"] == 7
    assert values["gen_ai.request.temperature"] == 0.0
    assert values["gen_ai.request.n"] == 1
    assert values["aptjax.reason"] == "length"
    assert values["aptjax.method"] == "/v1/completions"
    assert values["aptjax.slo.ttft_ms"] == 60_000
    assert values["aptjax.slo.ttft_attained"] is True
    assert values["aptjax.slo.tbt_attained"] is True
    assert values["aptjax.slo.e2e_ms"] == 0.01
    assert values["aptjax.slo.e2e_attained"] is False
    assert values["aptjax.slo.class"] == "rt"
    assert values["aptjax.cache.kind"] in ("kv", "hidden")
    assert values["aptjax.cache.blocks"] > 0
    assert values["aptjax.preemptions"] == 0

    parts = children(found, span)
    assert set(parts) == {"queue", "prefill", "decode"}
    queue, prefill, decode = parts["queue"], parts["prefill"], parts["decode"]
    assert before_ns <= span.start_ns <= queue.start_ns
    assert queue.start_ns <= queue.end_ns == prefill.start_ns <= prefill.end_ns == decode.start_ns
    assert decode.end_ns <= span.end_ns <= time.time_ns()
    assert decode.end_ns - decode.start_ns >= 5 * 20e6  # six steps of 20 ms, of which one may have begun
    seconds = (queue.end_ns - queue.start_ns) / 1e9
    assert values["gen_ai.latency.time_in_queue"] == pytest.approx(seconds, abs=1e-5)
    seconds = (prefill.end_ns - queue.start_ns) / 1e9
    assert values["gen_ai.latency.time_to_first_token"] == pytest.approx(seconds, abs=1e-5)
    seconds = (prefill.end_ns - prefill.start_ns) / 1e9
    assert values["gen_ai.latency.time_in_model_prefill"] == pytest.approx(seconds, abs=1e-5)
    seconds = (span.end_ns - span.start_ns) / 1e9
    assert values["gen_ai.latency.e2e"] == pytest.approx(seconds, abs=1e-5)
    assert not any(CANARY.encode() in data for data in found.raw)


def test_the_parent_comes_with_the_request_at_every_service():
    metadata = (("traceparent", TRACEPARENT), ("tracestate", "vendor=1"))

    async def scenario(served):
        await served.post(
            "/v1/chat/completions",
            {"messages": []},
            headers={"Traceparent": TRACEPARENT, "tracestate": "vendor=1"},
        )
        await served.post("/v1/completions", {"prompt": "hi"}, headers={"traceparent": TRACEPARENT})
        call = served.grpc.channel.unary_stream("/aptjax.v1.AptServe/Generate", request_serializer=lambda data: data)(
            b"", metadata=metadata
        )
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        request = pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(max_tokens=3))
        async for _ in vllm_generate(served)(request, metadata=metadata):
            pass

    found = traced(scenario)
    spans = {span.attributes["aptjax.method"]: span for span in found.named("llm_request")}
    assert set(spans) == {
        "/v1/chat/completions", "/v1/completions", "aptjax.v1.AptServe/Generate", "vllm.grpc.engine.VllmEngine/Generate",
    }  # fmt: skip
    for span in spans.values():
        assert (span.trace_id, span.parent_id) == (TRACE_ID, SPAN_ID)
    served = spans["vllm.grpc.engine.VllmEngine/Generate"]
    assert served.attributes["aptjax.protocol"] == "grpc"
    assert set(children(found, served)) == {"queue", "prefill", "decode"}


def test_a_parent_that_is_not_sampled_is_obeyed_and_nonsense_begins_a_new_trace():
    async def scenario(served):
        for value in (TRACEPARENT[:-1] + "0", "00-nonsense", "x" * 5000, ""):
            response = await served.post("/v1/completions", {"prompt": "hi"}, headers={"traceparent": value})
            assert response.status_code == 200

    roots = traced(scenario).named("llm_request")
    assert len(roots) == 3
    assert all(not span.parent_id and span.trace_id != TRACE_ID for span in roots)


def test_what_was_refused_failed_or_broken_off_has_a_span_that_says_so():
    async def scenario(served: HttpServed):
        executor = executor_of(served.parts)
        await served.post("/v1/completions", {"prompt": CANARY, "temperature": CANARY})
        executor.gate.clear()  # it runs and never has a token
        late = asyncio.create_task(served.post("/v1/completions", {"prompt": "late", "deadline_ms": 100}))
        await served.until(lambda: served.parts.engine.num_live == 1)
        await asyncio.sleep(0.2)
        executor.gate.set()
        assert (await late).status_code == 408
        executor.step_s = 0.01
        connection = await served.raw(completion(max_tokens=200, stream=True))
        await served.until(lambda: served.parts.engine.num_live == 1)
        await connection.close()
        await served.idle()

        def broken(**fields):
            raise ValueError(CANARY)

        object.__setattr__(served.parts, "build_requests", broken)
        await served.post("/v1/completions", {"prompt": "hello"})

    found = traced(scenario)
    spans = {span.attributes["aptjax.reason"]: span for span in found.named("llm_request")}
    assert set(spans) == {"400", "408", "499", "500"}
    assert [spans[reason].is_error for reason in ("400", "408", "499", "500")] == [True, True, False, True]
    assert spans["408"].status_text == spans["408"].attributes["error.type"] == "deadline_exceeded"
    assert "queue" in children(found, spans["408"])
    assert "gen_ai.latency.time_to_first_token" not in spans["408"].attributes
    assert not children(found, spans["400"])
    assert not any(CANARY.encode() in data for data in found.raw)


def test_answers_of_one_call_have_their_own_parts():
    async def scenario(served):
        await served.ask("hi", max_tokens=3, n=2, temperature=1.0)

    found = traced(scenario)
    (span,) = found.named("llm_request")
    assert span.attributes["gen_ai.request.n"] == 2
    assert span.attributes["gen_ai.usage.completion_tokens"] == 6
    decodes = found.named("decode")
    assert sorted(d.attributes["aptjax.index"] for d in decodes) == [0, 1]
    assert {d.parent_id for d in decodes} == {span.span_id}
    assert [d.attributes["gen_ai.usage.completion_tokens"] for d in decodes] == [3, 3]


@pytest.mark.parametrize("trouble", ["nobody there", "no answer", "refuses"])
def test_a_collector_that_does_not_take_them_harms_nobody(trouble, caplog, monkeypatch):
    """More spans than fit the queue; serving goes on, and the log has a line or two."""
    monkeypatch.setattr("serve.observability.tracing._SEND_TIMEOUT_S", 1.0)
    monkeypatch.setattr("serve.observability.tracing._CLOSE_TIMEOUT_S", 0.5)
    caplog.set_level("INFO")

    async def scenario(tracer: Tracer) -> None:
        async with http_serving(app={"tracer": tracer}) as served:
            for _ in range(3):
                await asyncio.wait_for(served.ask("hi", max_tokens=2), 20)
            record = CallRecord(protocol="http", method="/v1/completions")
            record.close(served.engine, None)
            began_s = time.monotonic()
            for _ in range(5000):
                tracer.send(record)
            assert time.monotonic() - began_s < 20
            await asyncio.wait_for(served.ask("hi", max_tokens=2), 20)
            if trouble != "no answer":
                await served.until(lambda: "does not accept traces" in caplog.text, 40)

    with collector() as found:
        if trouble == "no answer":
            found.hold.clear()
        found.status = 400
        endpoint = found.url
        if trouble == "nobody there":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        with tracing(endpoint) as tracer:
            asyncio.run(scenario(tracer))
            began_s = time.monotonic()
            tracer.close()
            assert time.monotonic() - began_s < 10
    # A tracer that an earlier test closed without an answer may still log its failure.
    here = endpoint.removeprefix("http://")
    told = [r for r in caplog.records if r.levelname != "INFO" and here in r.getMessage()]
    assert len(told) <= 1
    assert not found.raw


def test_a_collector_that_comes_back_is_told_of(caplog):
    async def scenario(tracer: Tracer) -> None:
        async with http_serving(app={"tracer": tracer}) as served:
            found.status = 400
            await served.ask("hi", max_tokens=2)
            await served.until(lambda: "does not accept traces" in caplog.text, 40)
            found.status = 200
            await served.ask("hi", max_tokens=2)
            await served.until(lambda: "accepts traces again; lost: 4 spans" in caplog.text, 40)

    with collector() as found, tracing(found.url) as tracer:
        asyncio.run(scenario(tracer))
        assert len(found.named("llm_request")) == 1


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:4318", "grpc://h:4317", "http://", "http://[", "http://h:x"])
def test_an_address_that_is_none_is_refused(endpoint):
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        Tracer(endpoint)


def test_without_the_extra_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from serve.cli import main\n"
        "sys.exit(main(['serve', 'tiny-opt', '--port', '0', '--grpc-port', '0', '--otlp-traces-endpoint', 'http://127.0.0.1:1']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode != 0
    assert "pip install 'apt-jax[otel]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_server_is_without_opentelemetry_where_nobody_asks_for_it():
    code = (
        "import sys; import serve.cli.commands.serve; sys.exit(any(n.startswith('opentelemetry') for n in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 0
