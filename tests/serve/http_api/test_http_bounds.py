"""Bad HTTP: what is too large, too slow, too much, or no HTTP; the server answers and goes on."""

import asyncio
import json
import socket
import threading
from typing import Any

import pytest

from serve.http_api import calls
from serve.http_api import openai_request as openai_api
from tests.support.http_serving import completion, http_serving, post_head

JSON = {"content-type": "application/json"}
LIMITS = {"header_timeout_s": 0.3, "write_stall_s": 0.5}


def run(scenario, **kwargs: Any) -> None:
    async def whole() -> None:
        async with http_serving(**kwargs) as served:
            await asyncio.wait_for(scenario(served), 60)
            await served.idle()
            assert await served.ask("still there", max_tokens=1)

    asyncio.run(whole())


def error_of(answer: dict[str, Any]) -> dict[str, Any]:
    assert list(answer) == ["error"]
    assert list(answer["error"]) == ["message", "type", "param", "code"]
    return answer["error"]


def steps(served) -> int:
    return served.executor.num_steps


# --- bodies --------------------------------------------------------------------------------------------------------

BODIES: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"[]", "not a JSON object"),
    (b'"hello"', "not a JSON object"),
    (b"null", "not a JSON object"),
    (b'{"prompt": "a", "prompt": "b"}', "repeated"),
    (b'{"prompt": "a", "slo": {"ttft_ms": 1, "ttft_ms": 2}}', "repeated"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b'{"prompt": "a", "temperature": NaN}', "not JSON"),
    (b'{"prompt": "a", "temperature": -Infinity}', "not JSON"),
    (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "too long"),
    (b'{"x": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", "too deeply"),
    (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "lists and objects"),
    (b'{"prompt": "a"} {}', "not JSON"),
    (b'\xef\xbb\xbf{"prompt": "a"}', "not JSON"),
    ('{"prompt": "a"}'.encode("utf-16"), "UTF-8"),
]


def test_R14_R15_bodies_that_are_no_object():
    async def scenario(served):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            for body, says in BODIES:
                response = await served.http.post(path, content=body, headers={"content-type": "application/json"})
                error = error_of(response.json())
                assert (response.status_code, error["param"]) == (400, "body"), body[:40]
                assert says in error["message"], (body[:40], error)
                assert response.headers["x-should-retry"] == "false"

    run(scenario)


CONVERTIBLE: dict[str, list[Any]] = {
    "max_tokens": ["2", True, 2.5, [2], {"tokens": 2}],
    "temperature": ["0.5", True, [0.5]],
    "n": ["1", True, 1.5],
    "seed": ["7", True, 7.5],
    "stream": ["yes", "true", 1, 0],
    "echo": ["no", 1],
    "stop": [5, True, [5], {"a": "b"}],
    "logprobs": ["1", True],
    "ignore_eos": ["true", 1],
    "logit_bias": [[1], {"5": "1"}, {"5": True}],
    "prompt": [5, True, {"a": "b"}, [["5"]], [True]],
    "slo": ["fast", {"ttft_ms": "5"}, {"ttft_ms": True}, {"ttft_mss": 5}],
}
"""Values that a lax reader would take for one of the right type, by field."""


def test_R14_no_value_is_converted():
    async def scenario(served):
        for field, value in ((field, value) for field, values in CONVERTIBLE.items() for value in values):
            response = await served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, field: value})
            assert response.status_code == 400, (field, value)
            assert error_of(response.json())["param"].startswith(field), (field, value)
        assert served.parts.engine.stats().finished == {}

    run(scenario)


def test_R14_names_that_nobody_knows_are_ignored():
    """Clients send fields of other servers; a wrong value of one of ours must not hide behind that."""

    async def scenario(served):
        body = {"prompt": "a", "max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
        plain = (await served.post("/v1/completions", body)).json()["choices"]
        unknown = {"max_tokenz": 99, "metadata": {"deep": [1, {"2": None}]}, "service_tier": "auto", "": 1}
        assert (await served.post("/v1/completions", body | unknown)).json()["choices"] == plain

    run(scenario)


def test_R15_text_with_lone_surrogates_and_zero_bytes():
    async def scenario(served):
        response = await served.http.post(
            "/v1/completions",
            content=b'{"prompt": "a\\ud800"}',
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 400
        assert error_of(response.json())["param"] == "prompt"
        assert (await served.ask("a\x00b", max_tokens=1))["usage"]["prompt_tokens"] == 4
        body = b'{"prompt": "a", "model": "\\ud800"}'
        response = await served.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 404

    run(scenario)


def test_bodies_of_other_types_are_refused():
    async def scenario(served):
        for media in (None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"):
            headers = {} if media is None else {"content-type": media}
            response = await served.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
            assert response.status_code == 415
            assert error_of(response.json())["code"] == "unsupported_media_type"
        for media in ("application/json; charset=utf-8", "Application/JSON"):
            response = await served.http.post(
                "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": media}
            )
            assert response.status_code == 200
        response = await served.http.post(
            "/v1/completions",
            content=b'{"prompt": "a"}',
            headers={"content-type": "application/json", "content-encoding": "gzip"},
        )
        assert response.status_code == 415

    run(scenario)


def test_R16_bodies_that_are_too_large():
    async def scenario(served):
        # Said at once, without reading it.
        connection = await served.raw(post_head("/v1/completions", 2**40))
        status, answer = await connection.answer()
        assert (status, error_of(answer)["code"]) == (413, "body_too_large")
        connection.writer.write(b"x")  # what still comes is not waited for
        assert await connection.at_end()
        await connection.close()
        # Who sends it all the same hears the answer, and may go on.
        data = post_head("/v1/completions", 8 << 20) + b" " * (8 << 20) + completion(max_tokens=2)
        connection = await served.raw(data)
        assert (await connection.answer())[0] == 413
        assert (await connection.answer())[0] == 200
        await connection.close()
        # Said by nobody: in chunks.
        head = post_head("/v1/completions", 0, transfer_encoding="chunked")
        head = head.replace(b"content-length: 0\r\n", b"")
        connection = await served.raw(head)
        try:
            for _ in range(40):
                connection.writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
                await connection.writer.drain()
        except ConnectionError:
            pass
        else:
            status, answer = await connection.answer()
            assert (status, error_of(answer)["code"]) == (413, "body_too_large")
        await connection.close()
        body = json.dumps({"prompt": "a" * 100}).encode().ljust(2 << 20)
        assert (await served.http.post("/tokenize", content=body + b" ", headers=JSON)).status_code == 413
        assert (await served.http.post("/tokenize", content=body, headers=JSON)).json()["count"] == 101

    run(scenario, connections={"header_timeout_s": 3.0})


def test_R22_the_largest_body_does_not_hold_up_others(monkeypatch):
    """R22, Q10: parsed and checked in threads; the loop goes on."""
    where = set()

    def noted(function):
        def call(*args):
            where.add((function.__name__, threading.current_thread() is threading.main_thread()))
            return function(*args)

        return call

    monkeypatch.setattr(calls, "parse_json", noted(calls.parse_json))
    monkeypatch.setattr(openai_api, "read_call", noted(openai_api.read_call))

    async def scenario(served):
        body = json.dumps({"prompt": [list(range(3, 200))] * 2000}).encode()
        loop, worst = asyncio.get_running_loop(), 0.0
        tasks = [asyncio.create_task(served.http.post("/v1/completions", content=body, headers=JSON)) for _ in range(3)]
        while not all(task.done() for task in tasks):
            before = loop.time()
            await asyncio.sleep(0.005)
            worst = max(worst, loop.time() - before)
        assert {task.result().status_code for task in tasks} == {400}
        assert worst < 1.0  # some tens of milliseconds on a quiet machine
        assert where == {("parse_json", False), ("read_call", False)}

    run(scenario)


# --- heads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"x-big": "x" * 20_000}, {f"x-{i}": "1" for i in range(110)}])
def test_R16_heads_that_are_too_large(fields):
    async def scenario(served):
        connection = await served.raw(post_head("/v1/completions", 0, **fields))
        status, answer = await connection.answer()
        assert (status, error_of(answer)["code"]) == (431, "headers_too_large")
        assert await connection.at_end()
        await connection.close()

    run(scenario)


def test_a_head_without_an_end_is_cut():
    async def scenario(served):
        connection = await served.raw(b"GET /health HTTP/1.1\r\nx: " + b"y" * 40_000)
        status, answer = await connection.answer()
        assert (status, error_of(answer)["code"]) == (431, "headers_too_large")
        await connection.close()

    run(scenario)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",  # TLS to a plaintext port
        b"SM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nbad header: 1\r\n\r\n",
        b"\x00" * 50 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(data):
    async def scenario(served):
        connection = await served.raw(data)
        head = await asyncio.wait_for(connection.reader.read(65536), 20)
        assert head == b"" or head.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501"))
        assert await connection.at_end()
        await connection.close()

    run(scenario, connections=LIMITS)


@pytest.mark.parametrize(("data", "status"), [(b"SM\r\n\r\n", 400), (b"GET /health HTTP/1.1\r\n", 408)])
def test_what_the_connection_refuses_is_not_to_be_sent_again(data, status):
    """OpenAI's clients would try 408 again."""

    async def scenario(served):
        connection = await served.raw(data)
        head = await asyncio.wait_for(connection.reader.readuntil(b"\r\n\r\n"), 20)
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        assert b"\r\nx-should-retry: false\r\n" in head
        assert head.count(b"\r\nconnection: close\r\n") == 1
        await connection.close()

    run(scenario, connections=LIMITS)


def test_a_body_that_is_no_http_ends_the_call():
    async def scenario(served):
        head = post_head("/v1/completions", 0, transfer_encoding="chunked")
        connection = await served.raw(head.replace(b"content-length: 0\r\n", b"") + b"zzz\r\nnot a chunk\r\n")
        assert await connection.at_end()
        await connection.close()

    run(scenario, connections=LIMITS)


# --- slow clients --------------------------------------------------------------------------------------------------


def test_C14_slow_heads_and_silent_connections_are_cut():
    async def scenario(served):
        loop = asyncio.get_running_loop()
        silent = await served.raw(b"")
        dripping = await served.raw(b"POST /v1/completions HTTP/1.1\r\n")
        started = loop.time()

        async def drip() -> None:
            for _ in range(400):
                dripping.writer.write(b"x: y\r\n")
                await asyncio.sleep(0.05)

        task = asyncio.create_task(drip())
        status, answer = await dripping.answer()
        assert (status, error_of(answer)["code"]) == (408, "headers_timeout")
        assert await silent.at_end(5.0)
        assert loop.time() - started < 2.0
        assert not task.done()  # both were cut while it dripped
        task.cancel()
        # Also the head of a second request, and empty lines, which are none.
        for more in (b"POST /v1/com", b"\r\n"):
            second = await served.raw(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await second.answer())[0] == 200
            second.writer.write(more)
            assert await second.at_end(5.0)
            await second.close()
        await silent.close()
        await dripping.close()

    run(scenario, connections=LIMITS)


def test_C14_a_slow_body_is_cut():
    async def scenario(served):
        connection = await served.raw(post_head("/v1/completions", 1000) + b'{"prompt"')
        await served.until(lambda: served.server.num_open == 1)
        status, answer = await connection.answer()
        assert (status, error_of(answer)["code"]) == (408, "body_timeout")
        assert await connection.at_end(5.0)
        await connection.close()
        # Whoever leaves in the middle of it is forgotten.
        connection = await served.raw(post_head("/v1/completions", 1000) + b'{"prompt"')
        await served.until(lambda: served.server.num_open == 1)
        connection.writer.transport.abort()
        await served.until(lambda: served.server.num_open == 0, 2.0)
        await connection.close()

    run(scenario, app={"body_timeout_s": 0.3})


def test_the_rest_of_a_body_that_was_refused_is_not_waited_for():
    async def scenario(served):
        # 404 is answered before the body has come; then it comes for ever.
        connection = await served.raw(post_head("/nothing", 10_000) + b"x")
        assert (await connection.answer())[0] == 404

        async def drip() -> None:
            for _ in range(100):
                connection.writer.write(b"x")
                await asyncio.sleep(0.02)

        task = asyncio.create_task(drip())
        assert await connection.at_end(5.0)
        task.cancel()
        await connection.close()

    run(scenario, connections=LIMITS)


def test_what_is_written_is_sent_at_once():
    """Not when the client has acknowledged what came before, which takes it up to 40 ms."""

    async def scenario(served):
        connection = await served.raw(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await connection.answer())[0] == 200
        (theirs,) = served.server._uvicorn.server_state.connections
        sock = theirs.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        await connection.close()

    run(scenario)


def test_C14_idle_connections_are_closed():
    async def scenario(served):
        connection = await served.raw(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await connection.answer())[0] == 200
        assert await connection.at_end(5.0)
        await connection.close()

    run(scenario, http={"idle_timeout_s": 0.2})


def test_pipelined_requests_are_answered_in_order():
    async def scenario(served):
        data = completion(max_tokens=3, temperature=0) + completion(max_tokens=5, temperature=0)
        connection = await served.raw(data)
        for count in (3, 5):
            status, answer = await connection.answer()
            assert (status, answer["usage"]["completion_tokens"]) == (200, count)
        await connection.close()

    run(scenario)


def test_expect_100_continue():
    async def scenario(served):
        body = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
        connection = await served.raw(post_head("/v1/completions", len(body), expect="100-continue"))
        line = await connection.reader.readuntil(b"\r\n\r\n")
        assert line.startswith(b"HTTP/1.1 100")
        connection.writer.write(body)
        assert (await connection.answer())[0] == 200
        await connection.close()

    run(scenario)
