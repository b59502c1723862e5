"""Log lines of finished calls, over both protocols, in both formats."""

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from apt_jax.errors import counted
from apt_jax.frontend.streams import EngineStartingError
from serve.observability import call_log as logs
from serve.observability.call_record import CallRecord
from serve.security.api_keys import ApiKeys
from tests.support.http_serving import HttpServed, completion, http_serving
from tests.support.toy_serving import executor_of

KEY = "sk-0123456789abcdefghij"
CANARY = "canary-7f3a"
CALLS = ("serve.http_api.app", "serve.grpc_api.calls")

pb: Any = vllm_engine_pb2


@contextlib.contextmanager
def logged(log_format: logs.Format) -> Iterator[io.StringIO]:
    """Everything that is logged, as `serve` would show it."""
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    handler.setFormatter(logs.TextFormatter() if log_format == "text" else logs.json_formatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel("INFO")
    try:
        yield shown
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def run(scenario, log_format: logs.Format = "json", **kwargs: Any) -> str:
    """Return the log of a scenario, with the shutdown of the servers."""

    async def whole() -> None:
        async with http_serving(**kwargs) as served:
            await asyncio.wait_for(scenario(served), 60)

    with logged(log_format) as shown:
        asyncio.run(whole())
    return shown.getvalue()


def calls(text: str) -> list[dict[str, Any]]:
    """The objects of lines that are about calls."""
    objects = [json.loads(line) for line in text.splitlines()]
    return [found for found in objects if found["logger"] in CALLS]


def vllm_generate(served: HttpServed, **kwargs: Any) -> Any:
    return served.grpc.channel.unary_stream(
        "/vllm.grpc.engine.VllmEngine/Generate",
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )(**kwargs)


async def drained(call: Any) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_json_has_the_fields_of_a_call_over_both_protocols():
    keys = ApiKeys([KEY])
    metadata = (("authorization", f"Bearer {KEY}"),)

    async def scenario(served):
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"prompt": CANARY, "max_tokens": 5, "ignore_eos": True, "request_id": "mine.1"}
        response = await served.post("/v1/completions", body, headers=headers)
        assert response.status_code == 200
        params = pb.SamplingParams(max_tokens=5, ignore_eos=True)
        request = pb.GenerateRequest(text=CANARY, sampling_params=params, request_id="mine.2")
        assert await drained(vllm_generate(served, request=request, metadata=metadata)) is grpc.StatusCode.OK
        assert (await served.post("/v1/completions", body)).status_code == 401
        code = await drained(vllm_generate(served, request=request))
        assert code is grpc.StatusCode.UNAUTHENTICATED

    text = run(scenario, app={"keys": keys}, grpc={"keys": keys})
    http, rpc, no_key, no_key_rpc = calls(text)
    caller = keys.caller_of(f"Bearer {KEY}")
    assert caller is not None
    for found, name, protocol, method in (
        (http, "mine.1", "http", "/v1/completions"),
        (rpc, "mine.2", "grpc", "vllm.grpc.engine.VllmEngine/Generate"),
    ):
        assert found["request_id"].endswith(name)
        assert (found["protocol"], found["method"]) == (protocol, method)
        assert (found["tenant"], found["class"]) == (caller.tenant, "rt")
        assert found["reason"] == "length"
        assert found["level"] == "INFO"
        assert found["prompt_tokens"] == len(CANARY) + 1
        assert found["output_tokens"] == 5
        assert found["blocks"] > 0
        assert 0 <= found["queue_ms"] <= found["ttft_ms"] <= found["duration_ms"]
        assert found["timestamp"].endswith("+00:00")
        assert found["message"].startswith(f"request {found['request_id']}: length, 5 tokens, ")
    assert (no_key["reason"], no_key["code"], no_key["protocol"]) == ("401", "invalid_api_key", "http")
    assert (no_key["http_method"], no_key["method"]) == ("POST", "/v1/completions")
    assert (no_key_rpc["reason"], no_key_rpc["protocol"]) == ("unauthenticated", "grpc")
    assert no_key_rpc["method"] == "vllm.grpc.engine.VllmEngine/Generate"
    assert KEY not in text
    assert CANARY not in text


@pytest.mark.parametrize("log_format", logs.FORMATS)
def test_every_end_has_one_line_and_none_says_what_was_said(log_format, capfd):
    """Answered, refused, too late, left, failed; prompts, outputs and exceptions have a canary in them."""

    async def scenario(served: HttpServed):
        executor = executor_of(served.parts)
        answer = await served.ask(CANARY, max_tokens=20)
        outputs.append(answer["choices"][0]["text"])
        await served.post("/v1/completions", {"prompt": CANARY, "temperature": CANARY})
        await served.post("/v1/completions", {"prompt": CANARY, "request_id": f"{CANARY}\n\x1b[31m"})
        executor.gate.clear()
        late = asyncio.create_task(served.post("/v1/completions", {"prompt": CANARY, "deadline_ms": 100}))
        await served.until(lambda: served.parts.engine.num_live == 1)
        await asyncio.sleep(0.2)
        executor.gate.set()
        assert (await late).status_code == 408
        executor.step_s = 0.01
        connection = await served.raw(completion(prompt=CANARY, max_tokens=200, stream=True))
        await served.until(lambda: served.parts.engine.num_live == 1)
        await connection.close()
        await served.idle()
        params = pb.SamplingParams(max_tokens=200, ignore_eos=True)
        call = vllm_generate(served, request=pb.GenerateRequest(text=CANARY, sampling_params=params))
        await served.until(lambda: served.parts.engine.num_live == 1)
        call.cancel()
        await served.until(lambda: served.grpc_server.num_open == 0)
        bad = pb.GenerateRequest(text=CANARY, request_id=f"{CANARY} x")
        assert await drained(vllm_generate(served, request=bad)) is grpc.StatusCode.INVALID_ARGUMENT

        def broken(**fields):
            try:
                raise KeyError(CANARY)
            except KeyError as error:
                raise ValueError(CANARY) from error

        object.__setattr__(served.parts, "build_requests", broken)
        assert (await served.post("/v1/completions", {"prompt": CANARY})).status_code == 500
        ok = pb.GenerateRequest(text=CANARY)
        assert await drained(vllm_generate(served, request=ok)) is grpc.StatusCode.INTERNAL

    outputs: list[str] = []
    text = run(scenario, log_format)
    reasons = ["length", "400", "400", "408", "499", "cancelled", "invalid_argument", "500", "internal"]
    if log_format == "json":
        found = calls(text)
        assert [line["reason"] for line in found] == reasons
        assert [line["level"] for line in found] == ["INFO"] * 7 + ["ERROR"] * 2
        assert all("in broken" in line["stack"] for line in found[7:])
        assert "KeyError" in found[7]["stack"]
    else:
        lines = text.splitlines()
        began = [line for line in lines if not line.startswith("    ")]
        mine = [line for line in began if any(name in line for name in CALLS)]
        assert [line.split(": ")[2].split(",")[0].split()[0] for line in mine] == reasons
        assert all(line.startswith("20") for line in began)
        assert any("in broken" in line for line in lines)
    assert CANARY not in text
    assert outputs[0] not in text
    assert "\x1b" not in text
    assert CANARY not in "".join(capfd.readouterr())


def test_a_line_says_which_call_was_refused_and_for_which_field():
    async def scenario(served: HttpServed):
        for name, value in (("temperature", CANARY), (f"{CANARY}", 1)):
            body = {"prompt": "x" * 5000, "request_id": "mine", name: value}
            assert (await served.post("/v1/completions", body)).status_code == 400
        assert (await served.post("/v1/chat/completions", {"messages": CANARY})).status_code == 400
        request = pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(top_p=7))
        assert await drained(vllm_generate(served, request=request)) is grpc.StatusCode.INVALID_ARGUMENT
        await served.until(lambda: served.grpc_server.num_open == 0)  # its line comes after the answer
        headers = [(f"x-{i}", "1") for i in range(101)]
        for http_method, path in (("GET", "/v1/models/toy"), ("PUT", f"/{CANARY}"), (CANARY, "/metrics")):
            response = await served.http.request(http_method, path, headers=headers)
            assert response.status_code == 431

    lines = run(scenario, "text").splitlines()
    mine = [line.partition(": ")[2].rsplit(", ", 2)[0] for line in lines if any(name in line for name in CALLS)]
    assert mine == [
        "POST /v1/completions: 400 temperature",
        "POST /v1/completions: 400 context_length_exceeded prompt",
        "POST /v1/chat/completions: 400 messages",
        "vllm.grpc.engine.VllmEngine/Generate: invalid_argument top_p",
        "GET /v1/models/{name:path}: 431 headers_too_large",
        "PUT any: 431 headers_too_large",
        "/metrics: 431 headers_too_large",
    ]


def test_what_is_refused_has_ten_lines_a_second_and_one_for_the_rest():
    async def scenario(served):
        for _ in range(30):
            assert (await served.post("/v1/completions", {"prompt": 1})).status_code == 400
            request = pb.GenerateRequest(text="hi", request_id="no id")
            assert await drained(vllm_generate(served, request=request)) is grpc.StatusCode.INVALID_ARGUMENT
        for _ in range(15):
            await served.ask("hi", max_tokens=1)

    found = calls(run(scenario))
    for reason in ("400", "invalid_argument"):
        mine = [line for line in found if line["reason"] == reason]
        told = [line for line in mine if "request_id" in line]
        rest = [line for line in mine if "left_out" in line]
        assert len(told) + sum(line["left_out"] for line in rest) == 30
        assert all(f"{counted(line['left_out'], 'more request')}: {reason}" in line["message"] for line in rest)
    assert sum(line["reason"] == "length" for line in found) == 15


def refusal(error: Exception | None = None) -> CallRecord:
    record = CallRecord(protocol="http", method="/v1/completions")
    record.failed(error or ValueError(), "429" if error is None else "500", internal=error is not None)
    record.close(None, None)
    return record


def test_requests_before_the_server_is_ready_have_one_line_a_window(caplog, monkeypatch):
    """However many come: they hide no line of the start."""
    caplog.set_level("INFO", "calls")
    timers: list[Callable[[], None]] = []

    class Timer:
        def cancel(self) -> None: ...

    class Loop:
        def call_later(self, delay_s, function, *arguments):
            assert delay_s >= 1
            timers.append(lambda: function(*arguments))
            return Timer()

    monkeypatch.setattr(logs.asyncio, "get_running_loop", Loop)
    log = logs.CallLog(logging.getLogger("calls"))
    for window, (requests, expected) in enumerate(
        [(50, "POST"), (20, "49 more requests: starting"), (0, "20 more requests: starting")]
    ):
        for _ in range(requests):
            record = CallRecord(protocol="http", method="/v1/completions", http_method="POST")
            record.failed(EngineStartingError(None), "503", "unavailable", internal=True)
            record.close(None, None)
            log.write(record)
        assert len(caplog.records) == window + 1
        assert caplog.records[-1].getMessage().startswith(expected)
        timers.pop()()
    assert len(caplog.records) == 3  # a window without requests has no line, and none follows it
    assert not timers
    log.close()


def test_the_rest_is_told_when_the_second_is_over_and_at_the_end(caplog):
    caplog.set_level("INFO", "calls")

    async def scenario() -> None:
        log = logs.CallLog(logging.getLogger("calls"))
        for _ in range(100):
            log.write(refusal())
        assert len(caplog.records) == 10
        async with asyncio.timeout(20):
            while len(caplog.records) < 11:
                await asyncio.sleep(0.01)
        assert caplog.records[-1].getMessage() == "90 more requests: 429"
        for _ in range(12):
            log.write(refusal())
        assert len(caplog.records) == 21
        log.close()
        assert caplog.records[-1].getMessage() == "2 more requests: 429"
        for _ in range(12):  # what failed for our sake is told every time
            log.write(refusal(RuntimeError(CANARY)))
        log.close()
        assert len(caplog.records) == 34

    asyncio.run(scenario())
    assert {r.levelname for r in caplog.records[-12:]} == {"ERROR"}


@pytest.mark.parametrize("forged", ["a\n2026-01-01 00:00:00 ERROR x: forged", "a\x1b[2Jb", "a\r\nb", "a\u2028b\x85c"])
def test_R20_no_value_can_begin_a_line_or_command_a_terminal(forged):
    with logged("text") as text, logged("json") as as_json:
        logging.getLogger("serve.x").info("request %s: length", forged)
    (line,) = as_json.getvalue().splitlines()
    assert json.loads(line)["message"] == f"request {forged}: length"
    first, *rest = text.getvalue().splitlines()
    assert "serve.x: request a" in first
    assert all(other.startswith("    ") for other in rest)
    for shown in (text.getvalue(), as_json.getvalue()):
        assert not any(char in shown for char in "\x1b\r\u2028\x85")


def test_both_formats_come_from_one_flag(monkeypatch):
    taken: list[Any] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: taken.append(kwargs))
    levels = {name: logging.getLogger(name).level for name in ("apt_jax", "serve", "uvicorn")}
    try:
        for log_format in logs.FORMATS:
            logs.configure(log_format, "debug")
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    record = logging.LogRecord("serve.x", logging.INFO, "", 1, "hello", (), None)
    as_text, as_json = (kwargs["handlers"][0].format(record) for kwargs in taken)
    assert as_text.endswith(" INFO serve.x: hello")
    assert json.loads(as_json)["message"] == "hello"
