"""Owners of API keys neither see nor reach each other's requests, by any method of any protocol; operators do.

`HTTP` and `GRPC` have an entry for each method of the running servers: a new one fails here until it has its own.
"""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from apt_jax.text.chat import ChatTemplate
from serve.grpc_api import messages
from serve.grpc_api.vllm_service import SERVICE as VLLM
from serve.http_api.endpoints import request_id_of
from serve.observability.profiler import Profiler
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb
from serve.security.api_keys import ApiKeys
from serve.watcher_slots import MAX_OF_TENANT, MAX_WATCHERS
from tests.support.http_serving import HttpServed, bearer, run
from tests.support.toy_serving import executor_of

ONE, TWO, OPERATOR = "sk-the-key-of-tenant-one", "sk-the-key-of-tenant-two", "sk-the-key-of-an-operator"
NO_OPERATORS, OPERATORS = ApiKeys([ONE, TWO]), ApiKeys([ONE, TWO], [OPERATOR])
Code = grpc.StatusCode
APT = "aptjax.v1.AptServe"
vllm: Any = vllm_engine_pb2  # generated without types that checkers can follow
common: Any = common_pb2


def tenant_of(key: str) -> str:
    caller = OPERATORS.caller_of(f"Bearer {key}")
    assert caller is not None
    assert caller.tenant is not None
    return caller.tenant


MARKS = (b"ones-", tenant_of(ONE).encode())
"""In everything that names a request of tenant one."""


class FakeProfiler(Profiler):
    async def start(self) -> Path:
        return Path("profile")

    async def stop(self) -> Path:
        return Path("profile")


class World:
    """A server with a live request of tenant one over each protocol."""

    def __init__(self, served: HttpServed) -> None:
        self.served = served
        self.channel = served.grpc.channel

    async def http(self, method: str, path: str, key: str, body: Any = None) -> tuple[int, bytes]:
        response = await self.served.http.request(method, path, headers=bearer(key), json=body)
        return response.status_code, response.content

    async def rpc(self, method: str, key: str, request: Any = None, most: int = 100) -> tuple[Code, str, list[bytes]]:
        """Status, its text and at most so many messages."""
        call = self.channel.unary_stream(f"/{method}")(
            b"" if request is None else request.SerializeToString(), metadata=tuple(bearer(key).items())
        )
        received: list[bytes] = []
        try:
            async for message in call:
                received.append(message)
                if len(received) == most:
                    call.cancel()
                    return Code.OK, "", received
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or "", received
        return Code.OK, "", received

    async def events(self, key: str, condition: Callable[[Any], Any]) -> Any:
        """A snapshot of the dashboard that meets the condition."""
        async with self.served.http.stream("GET", "/dashboard/events", headers=bearer(key)) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            async with asyncio.timeout(20):
                async for line in lines:
                    if line.startswith("data: {") and condition(seen := json.loads(line.removeprefix("data: "))):
                        return seen
        raise AssertionError("the stream has ended")

    @contextlib.asynccontextmanager
    async def living(self, key: str, request_id: str, *, http: bool = False, n: int = 1) -> AsyncIterator[asyncio.Task]:
        """A request that runs for long; the result is how it ended."""
        body = {"prompt": "hello", "max_tokens": 4000, "temperature": 0.0, "ignore_eos": True, "n": n}
        before = self.served.parts.engine.num_live
        if http:
            call: Any = self.http("POST", "/v1/completions", key, {**body, "request_id": request_id})
        else:
            sampling = pb.SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
            call = self.rpc(
                f"{APT}/Generate", key, pb.GenerateRequest(text="hello", request_id=request_id, sampling=sampling), 9999
            )
        task = asyncio.create_task(call)
        await self.served.until(lambda: self.served.parts.engine.num_live == before + n)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.served.until(lambda: self.served.parts.engine.num_live <= before)


Check = Callable[[World, str, str], Awaitable[None]]
"""Given the method as its protocol names it: the HTTP method and path, or "" and the full name."""


def shows_nothing(body: Any = None, status: int = 200, path: str | None = None) -> Check:
    """Every key may make the call, and nothing of tenant one is shown to tenant two."""

    async def check(world: World, http_method: str, name: str) -> None:
        for key in (ONE, TWO, OPERATOR):
            found, data = await world.http(http_method, path or name, key, body)
            assert found == status, (name, key, data)
            assert key != TWO or not any(mark in data for mark in MARKS)

    return check


def for_operators(body: Any = None) -> Check:
    async def check(world: World, http_method: str, name: str) -> None:
        for key in (ONE, TWO):
            status, data = await world.http(http_method, name, key, body)
            assert status == 403
            error = json.loads(data)["error"]
            assert error["code"] == "operator_key_required"
            assert "--operator-key-file" in error["message"]
        assert (await world.http(http_method, name, OPERATOR, body))[0] == 200

    return check


HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
}


async def completes_by_tenant_and_id(world: World, http_method: str, path: str) -> None:
    body = BODIES[path]
    for live in ("ones-http", "ones-grpc"):
        status, data = await world.http(http_method, path, ONE, {**body, "request_id": live})
        error = json.loads(data)["error"]
        assert status == 400
        assert error.get("code") == (None if path == "/v1/messages" else "duplicate_id")
        assert "already in use" in error["message"]
        assert tenant_of(ONE).encode() not in data
        for key in (TWO, OPERATOR):
            status, data = await world.http(
                http_method, path, key, {**body, "request_id": live, "aptjax_timings": True}
            )
            assert status == 200
            found = json.loads(data)
            assert request_id_of(found["id"]) == live
            if path != "/v1/embeddings":  # no timings
                served = found["choices"][0] if "choices" in found else found
                assert served["aptjax"]["request_id"] == live
    await shows_nothing(body)(world, http_method, path)


async def decides_by_tenant_and_id(world: World, http_method: str, path: str) -> None:
    async def ask(key: str, request_id: str) -> tuple[int, bytes]:
        return await world.http(http_method, path.replace("{request_id}", request_id), key)

    whole = f"{tenant_of(ONE)}:ones-d"
    async with world.living(ONE, "ones-d", http=True), world.living(ONE, "ones-e"):
        for request_id in ("ones-d", "cmpl-ones-d", "ones-e"):
            status, data = await ask(ONE, request_id)
            assert (status, json.loads(data)["request_id"]) == (200, request_id.removeprefix("cmpl-"))
            assert tenant_of(ONE).encode() not in data
        for key, request_id in ((TWO, "ones-d"), (TWO, "ones-e"), (TWO, whole), (OPERATOR, "ones-d")):
            status, data = await ask(key, request_id)
            assert status == 404
            assert data == (await ask(key, "unknown"))[1].replace(b"unknown", request_id.encode())
        status, data = await ask(OPERATOR, whole)
        assert (status, json.loads(data)["request_id"]) == (200, whole)
        # The same id of two tenants has two timelines.
        async with world.living(TWO, "ones-d"):
            assert (await ask(TWO, "ones-d"))[0] == (await ask(ONE, "ones-d"))[0] == 200
            assert (await ask(TWO, "ones-d"))[1] != (await ask(ONE, "ones-d"))[1]
        assert json.loads((await ask(TWO, "ones-d"))[1])["events"][-1]["reason"] == "abort"
        assert json.loads((await ask(ONE, "ones-d"))[1])["events"][-1]["event"] != "ended"


def has_rows(num: int, snapshot: dict[str, Any]) -> bool:
    return len(snapshot["batch"]) == num


async def events_by_tenant(world: World, http_method: str, path: str) -> None:
    ones, all_ids = {"ones-http", "ones-grpc"}, {f"{tenant_of(TWO)}:twos-1"}
    all_ids |= {f"{tenant_of(ONE)}:{label}" for label in ones}
    async with world.living(TWO, "twos-1"):
        for key, own, shown in (
            (ONE, ones, ones),
            (TWO, {"twos-1"}, {"twos-1"}),
            (OPERATOR, all_ids, all_ids),
        ):
            seen = await world.events(key, functools.partial(has_rows, len(shown)))
            assert {row["request_id"] for row in seen["batch"]} == shown
            assert seen["point"]["running"] == len(shown)
            assert {row["request_id"] for row in seen["requests"] if row["ended_ms"] is None} == own
            assert key != TWO or tenant_of(ONE) not in json.dumps(seen)


async def ends_by_tenant(world: World, _: str, path: str) -> None:
    status, _data = await world.http(
        "POST", "/v1/completions", ONE, {"prompt": "hi", "max_tokens": 2, "session_id": "s"}
    )
    assert status == 200
    for key, ended in ((TWO, False), (OPERATOR, False), (ONE, True)):
        status, data = await world.http("DELETE", "/v1/sessions/s", key)
        assert (status, json.loads(data)["deleted"]) == (200, ended)
        assert not any(mark in data for mark in MARKS)


async def stores_by_tenant(world: World, http_method: str, path: str) -> None:
    body = {"input": "hi", "max_output_tokens": 2, "request_id": "ones-r"}
    assert (await world.http("POST", "/v1/responses", ONE, body))[0] == 200
    found = path.replace("{response_id}", "resp_ones-r")
    for key in (TWO, OPERATOR):
        status, data = await world.http(http_method, found, key)
        assert status == 404
        unknown = (await world.http(http_method, path.replace("{response_id}", "unknown"), key))[1]
        assert data == unknown.replace(b"unknown", b"resp_ones-r")
        body = {"input": "hi", "previous_response_id": "resp_ones-r"}
        assert (await world.http("POST", "/v1/responses", key, body))[0] == 404
    assert (await world.http(http_method, found, ONE))[0] == 200


HTTP: dict[tuple[str, str], Check] = {
    ("GET", "/dashboard/events"): events_by_tenant,  # first, as it shows the last requests alone
    ("POST", "/v1/completions"): completes_by_tenant_and_id,
    ("POST", "/v1/chat/completions"): completes_by_tenant_and_id,
    ("POST", "/v1/responses"): completes_by_tenant_and_id,
    ("POST", "/v1/messages"): completes_by_tenant_and_id,
    ("POST", "/v1/embeddings"): completes_by_tenant_and_id,
    ("POST", "/v1/score"): shows_nothing({"text_1": "hi", "text_2": "you"}),
    **{
        ("POST", path): shows_nothing({"query": "hi", "documents": ["you"]})
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    },
    ("GET", "/load"): shows_nothing(),
    ("GET", "/server_info"): shows_nothing(),
    ("POST", "/infill"): shows_nothing({"input_prefix": "hi", "input_suffix": "you"}, 400),  # no tokens for it
    ("POST", "/api/chat"): shows_nothing({"messages": HELLO, "options": {"num_predict": 2}}),
    ("POST", "/api/generate"): shows_nothing({"prompt": "hi", "options": {"num_predict": 2}}),
    ("POST", "/api/embed"): shows_nothing({"input": "hi"}),
    ("POST", "/api/embeddings"): shows_nothing({"prompt": "hi"}),
    ("POST", "/api/show"): shows_nothing({}),
    ("GET", "/api/tags"): shows_nothing(),
    ("GET", "/api/ps"): shows_nothing(),
    ("GET", "/api/version"): shows_nothing(),
    ("POST", "/v1/messages/count_tokens"): shows_nothing({"messages": HELLO}),
    ("GET", "/v1/models"): shows_nothing(),
    ("GET", "/v1/models/{name:path}"): shows_nothing(path="/v1/models/toy"),
    ("GET", "/v1/requests/{request_id}/decisions"): decides_by_tenant_and_id,
    ("DELETE", "/v1/sessions/{session_id:path}"): ends_by_tenant,
    ("GET", "/v1/responses/{response_id}"): stores_by_tenant,
    ("DELETE", "/v1/responses/{response_id}"): stores_by_tenant,
    ("POST", "/tokenize"): shows_nothing({"prompt": "hi"}),
    ("POST", "/detokenize"): shows_nothing({"tokens": [5]}),
    ("GET", "/tokenizer_info"): shows_nothing(),
    ("GET", "/version"): shows_nothing(),
    ("GET", "/ping"): shows_nothing(),
    ("POST", "/ping"): shows_nothing(),
    ("GET", "/health"): shows_nothing(),
    ("GET", "/ready"): shows_nothing(),
    ("GET", "/metrics"): for_operators(),
    ("GET", "/arrivals"): for_operators(),
    ("GET", "/openapi.json"): shows_nothing(),
    ("POST", "/start_profile"): for_operators({}),
    ("POST", "/stop_profile"): for_operators({}),
    ("GET", "/"): shows_nothing(),
    ("GET", "/dashboard"): shows_nothing(),
    ("GET", "/dashboard/style.css"): shows_nothing(),
    ("GET", "/dashboard/dashboard.js"): shows_nothing(),
    ("GET", "/dashboard/charts.js"): shows_nothing(),
    ("GET", "/dashboard/icon.svg"): shows_nothing(),
    ("GET", "/chat"): shows_nothing(),
    ("GET", "/chat/chats.js"): shows_nothing(),
    ("GET", "/chat/markdown.js"): shows_nothing(),
    ("GET", "/chat/marked.js"): shows_nothing(),
    ("GET", "/chat/chat.css"): shows_nothing(),
    ("GET", "/chat/chat.js"): shows_nothing(),
    ("GET", "/chat/timeline.js"): shows_nothing(),
}


def rpc_shows_nothing(request: Any = None, code: Code = Code.OK) -> Check:
    async def check(world: World, _: str, name: str) -> None:
        for key in (ONE, TWO, OPERATOR):
            found, text, received = await world.rpc(name, key, request, most=1)
            assert found is code, (name, text)
            assert key != TWO or not any(mark in data for data in (text.encode(), *received) for mark in MARKS)

    return check


def rpc_for_operators(request: Any = None) -> Check:
    async def check(world: World, _: str, name: str) -> None:
        for key in (ONE, TWO):
            code, text, received = await world.rpc(name, key, request)
            assert (code, received) == (Code.PERMISSION_DENIED, [])
            assert "--operator-key-file" in text
        assert (await world.rpc(name, OPERATOR, request))[0] is Code.OK

    return check


def generates_by_tenant_and_id(request: Callable[[str], Any]) -> Check:
    async def check(world: World, _: str, name: str) -> None:
        for live in ("ones-grpc", "ones-http"):
            code, text, _received = await world.rpc(name, ONE, request(live))
            assert code is Code.ALREADY_EXISTS
            assert f"{live!r}" in text
            for key in (TWO, OPERATOR):
                code, _text, received = await world.rpc(name, key, request(live))
                assert code is Code.OK
                assert received
                assert not any(tenant_of(k).encode() in data for data in received for k in (ONE, TWO, OPERATOR))
                if name.startswith(APT):
                    assert {pb.GenerateResponse.FromString(data).request_id for data in received} == {live}

    return check


async def watches_by_tenant(world: World, _: str, name: str) -> None:
    ones = {"ones-http", "ones-grpc"}
    async with world.living(TWO, "twos-1"):
        for key, shown in (
            (ONE, ones),
            (TWO, {"twos-1"}),
            (OPERATOR, {f"{tenant_of(TWO)}:twos-1", *(f"{tenant_of(ONE)}:{label}" for label in ones)}),
        ):
            code, _text, received = await world.rpc(name, key, most=3)
            assert code is Code.OK
            iterations = [i for data in received for i in pb.WatchSchedulerResponse.FromString(data).iterations]
            assert max(len(i.scheduled) for i in iterations) == len(shown)
            numbers = [iteration.number for iteration in iterations]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert (numbers[0] == 0) == (key != OPERATOR)
            for iteration in iterations:
                rows, sums = iteration.scheduled, (iteration.num_running, iteration.free_blocks, iteration.schedule_ms)
                assert all(sums) if key == OPERATOR else not any(sums)
                assert iteration.prefill_tokens + iteration.decode_tokens == sum(row.num_tokens for row in rows)
            assert {row.request_id for i in iterations for row in i.scheduled} == shown
            assert key != TWO or not any(mark in data for data in received for mark in MARKS)


async def aborts_by_tenant_and_id(world: World, _: str, name: str) -> None:
    async def abort(key: str, request_id: str) -> tuple[Code, str]:
        return (await world.rpc(name, key, vllm.AbortRequest(request_ids=[request_id])))[:2]

    live = world.served.parts.engine.num_live
    ids = [f"{prefix}{label}" for prefix in ("", f"{tenant_of(ONE)}:") for label in ("ones-grpc", "ones-http")]
    for key, request_id in [*((TWO, i) for i in ids), (OPERATOR, "ones-grpc"), (OPERATOR, "ones-http")]:
        code, text = await abort(key, request_id)
        assert code is Code.NOT_FOUND
        assert text == (await abort(key, "unknown"))[1].replace("unknown", request_id)
    await asyncio.sleep(0.1)
    assert world.served.parts.engine.num_live == live
    # Of two tenants with the same id each ends its own, over any protocol; operators name the tenant too.
    for http in (False, True):
        async with world.living(ONE, "ones-a", http=http) as first, world.living(TWO, "ones-a", http=http) as second:
            assert (await abort(TWO, "ones-a"))[0] is Code.OK
            assert b"abort" in (await second)[1] if http else (await second)[0] is Code.OK
            assert not first.done()
            assert (await abort(OPERATOR, f"{tenant_of(ONE)}:ones-a"))[0] is Code.OK
            assert b"abort" in (await first)[1] if http else (await first)[0] is Code.OK
    async with world.living(ONE, "ones-n", http=True, n=3) as several:
        assert (await abort(ONE, "ones-n"))[0] is Code.OK
        assert (await several)[1].count(b'"abort"') == 3
    async with world.living(OPERATOR, "mine"):
        assert (await abort(OPERATOR, "mine"))[0] is Code.OK


_SERVICES = reflection_pb2.ServerReflectionRequest(list_services="")
GRPC: dict[str, Check] = {
    f"{APT}/Generate": generates_by_tenant_and_id(
        lambda i: pb.GenerateRequest(text="hi", request_id=i, sampling=pb.SamplingParams(max_tokens=2))
    ),
    f"{APT}/WatchScheduler": watches_by_tenant,
    f"{APT}/GetStats": rpc_for_operators(),
    f"{VLLM}/Generate": generates_by_tenant_and_id(
        lambda i: vllm.GenerateRequest(text="hi", request_id=i, sampling_params=vllm.SamplingParams(max_tokens=2))
    ),
    f"{VLLM}/Abort": aborts_by_tenant_and_id,
    f"{VLLM}/HealthCheck": rpc_shows_nothing(),
    f"{VLLM}/GetModelInfo": rpc_shows_nothing(),
    f"{VLLM}/GetServerInfo": rpc_shows_nothing(),
    f"{VLLM}/GetLoads": rpc_for_operators(),
    f"{VLLM}/GetTokenizer": rpc_shows_nothing(),
    f"{VLLM}/StartProfile": rpc_for_operators(),
    f"{VLLM}/StopProfile": rpc_for_operators(),
    f"{VLLM}/Embed": rpc_shows_nothing(code=Code.UNIMPLEMENTED),
    f"{VLLM}/FlushCache": rpc_shows_nothing(code=Code.UNIMPLEMENTED),
    f"{VLLM}/SubscribeKvEvents": rpc_shows_nothing(code=Code.UNIMPLEMENTED),
    f"{health.SERVICE_NAME}/Check": rpc_shows_nothing(),
    f"{health.SERVICE_NAME}/List": rpc_shows_nothing(code=Code.UNIMPLEMENTED),
    f"{health.SERVICE_NAME}/Watch": rpc_shows_nothing(),
    f"{reflection.SERVICE_NAME}/ServerReflectionInfo": rpc_shows_nothing(_SERVICES),
}


def run_world(
    scenario: Callable[[World], Awaitable[None]],
    keys: ApiKeys | None = OPERATORS,
    profiler: Profiler | None = None,
    **toy: Any,
) -> None:
    async def whole(served: HttpServed) -> None:
        served.server.app._dashboard._period_s = 0.02
        executor_of(served.parts).step_s = 0.01
        await scenario(World(served))

    both = {"keys": keys, "profiler": profiler}
    run(whole, app={**both, "store_responses": 9}, grpc=both, num_blocks=8192, max_model_len=4096, debug=False, **toy)


def test_C10_C11_P17_every_method_takes_and_shows_ids_by_tenant(tmp_path):
    async def scenario(world: World) -> None:
        routes = {(http_method, path) for http_method, path in world.served.server.app.paths if http_method != "HEAD"}
        assert routes == set(HTTP)
        _, _, (data,) = await world.rpc(f"{reflection.SERVICE_NAME}/ServerReflectionInfo", ONE, _SERVICES)
        answer = reflection_pb2.ServerReflectionResponse.FromString(data).list_services_response
        services = [descriptor_pool.Default().FindServiceByName(service.name) for service in answer.service]
        assert {f"{s.full_name}/{m.name}" for s in services for m in s.methods} == set(GRPC)
        async with world.living(ONE, "ones-http", http=True) as http, world.living(ONE, "ones-grpc") as rpc:
            for (http_method, path), check in HTTP.items():
                await check(world, http_method, path)
            for name, check in GRPC.items():
                await check(world, "", name)
            assert not http.done()
            assert not rpc.done()

    template = ChatTemplate("{{ messages[0].content }}")
    run_world(scenario, profiler=FakeProfiler(tmp_path), chat_template=template, retention="knapsack")


def test_P17_without_operators_totals_are_for_every_key_and_the_rest_for_nobody(tmp_path):
    async def scenario(world: World) -> None:
        assert (await world.http("GET", "/metrics", TWO))[0] == 200
        for name in (f"{APT}/GetStats", f"{VLLM}/GetLoads"):
            assert (await world.rpc(name, TWO))[0] is Code.OK
        for path in ("/start_profile", "/stop_profile"):
            status, data = await world.http("POST", path, TWO, {})
            assert status == 403
            assert b"start it with --operator-key-file" in data
        for name in ("StartProfile", "StopProfile"):
            code, text, _ = await world.rpc(f"{VLLM}/{name}", TWO)
            assert code is Code.PERMISSION_DENIED
            assert "start it with --operator-key-file" in text

    run_world(scenario, NO_OPERATORS, FakeProfiler(tmp_path))


def test_P17_without_operators_watchers_see_rows_of_others_without_ids(tmp_path):
    async def scenario(world: World) -> None:
        async with world.living(TWO, "twos-1"), world.living(ONE, "ones-1"):
            _code, _text, received = await world.rpc(f"{APT}/WatchScheduler", TWO, most=3)
            iterations = [i for data in received for i in pb.WatchSchedulerResponse.FromString(data).iterations]
            assert {row.request_id for i in iterations for row in i.scheduled} == {"twos-1", ""}
            assert max(len(i.scheduled) for i in iterations) == 2
            assert all(i.free_blocks for i in iterations)

    run_world(scenario, NO_OPERATORS, FakeProfiler(tmp_path))


def test_P17_a_path_written_otherwise_is_for_operators_too(tmp_path):
    async def scenario(world: World) -> None:
        for path in ("/%73tart_profile", "/start%5Fprofile", "/m%65trics"):
            http_method = "POST" if "profile" in path else "GET"
            assert (await world.http(http_method, path, TWO, {}))[0] == 403

    run_world(scenario, profiler=FakeProfiler(tmp_path))


def test_P17_requests_that_have_left_the_log_of_decisions_are_shown_to_their_tenant_alone():
    async def scenario(world: World) -> None:
        log = world.served.engine.decision_log
        assert log is not None
        log._num_requests = 1
        async with world.living(ONE, "ones-1"), world.living(TWO, "twos-1"), world.living(TWO, "twos-2"):
            assert log.of(f"{tenant_of(ONE)}:ones-1") is None
            for key, shown in ((ONE, ["ones-1"]), (TWO, ["twos-1", "twos-2"])):
                seen = await world.events(key, functools.partial(has_rows, len(shown)))
                assert sorted(row["request_id"] for row in seen["batch"]) == shown

    run_world(scenario)


async def joined(world: World, key: str) -> Any:
    """A watcher with a slot; raises otherwise."""
    method = world.channel.unary_stream(f"/{APT}/WatchScheduler")
    call = method(b"", metadata=tuple(bearer(key).items()))
    await call.wait_for_connection()
    return call


def test_P17_each_key_has_so_many_watchers_and_operators_some_more():
    keys = [f"sk-the-key-of-tenant-{i:03}" for i in range(4)]

    async def refused(world: World, key: str) -> str:
        call = world.channel.unary_stream(f"/{APT}/WatchScheduler")(b"", metadata=tuple(bearer(key).items()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is Code.RESOURCE_EXHAUSTED
        trailers: Any = caught.value.trailing_metadata()
        assert dict(trailers)["retry-after"] == "30"
        return str(caught.value.details())

    async def scenario(world: World) -> None:
        calls = [await joined(world, keys[0]) for _ in range(MAX_OF_TENANT)]
        assert "4 clients watch the scheduler with this API key already" in await refused(world, keys[0])
        calls += [await joined(world, key) for key in keys[1:3] for _ in range(MAX_OF_TENANT)]
        assert "12 clients watch the scheduler already" in await refused(world, keys[3])
        calls += [await joined(world, OPERATOR) for _ in range(MAX_WATCHERS - len(calls))]
        assert "16 clients watch the scheduler already" in await refused(world, OPERATOR)
        calls.pop(0).cancel()
        await world.served.until(lambda: len(world.served.engine._feed) == MAX_WATCHERS - 1)
        for call in calls:
            call.cancel()
        await world.served.until(lambda: len(world.served.engine._feed) == 0)
        (await joined(world, keys[3])).cancel()

        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_OF_TENANT):
                stream = world.served.http.stream("GET", "/dashboard/events", headers=bearer(keys[0]))
                assert (await stack.enter_async_context(stream)).status_code == 200
            response = await world.served.http.get("/dashboard/events", headers=bearer(keys[0]))
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) == 30
            assert "with this API key already" in response.json()["error"]["message"]
            await world.events(keys[1], lambda _: True)
            await world.events(OPERATOR, lambda _: True)

    run_world(scenario, ApiKeys(keys, [OPERATOR]))


def test_P17_a_watcher_killed_while_it_is_written_to_frees_its_slot(monkeypatch):
    def large(*args: Any) -> pb.WatchSchedulerResponse:  # so that the transport is soon full
        message = watch_response(*args)
        message.iterations[0].deferred.append("x" * 500_000)
        writing.append(1)
        return message

    writing: list[int] = []
    watch_response = messages.watch_response
    monkeypatch.setattr(messages, "watch_response", large)

    async def scenario(world: World) -> None:
        served = world.served
        executor_of(served.parts).step_s = 0.002
        options = [
            ("grpc.http2.lookahead_bytes", 1),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        async with world.living(ONE, "ones-1"):
            for _ in range(2):
                channels = [
                    grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_server.port}", options=options)
                    for _ in range(MAX_OF_TENANT)
                ]
                calls = []
                for channel in channels:
                    method = channel.unary_stream(f"/{APT}/WatchScheduler")
                    calls.append(method(b"", metadata=tuple(bearer(ONE).items())))
                    await calls[-1].wait_for_connection()
                await served.until(lambda: len(served.engine._feed) == MAX_OF_TENANT)
                before = -1
                while len(writing) != before:  # until all are blocked: nothing is encoded any more
                    before = len(writing)
                    await asyncio.sleep(0.2)
                for call, channel in zip(calls, channels, strict=True):
                    call.cancel()
                    await channel.close()
                await served.until(lambda: len(served.engine._feed) == 0)
        monkeypatch.setattr(messages, "watch_response", watch_response)
        (await joined(world, ONE)).cancel()

    run_world(scenario)


def test_P17_a_revoked_key_watches_no_longer():
    keys = ApiKeys([ONE, TWO])

    async def scenario(world: World) -> None:
        call = await joined(world, ONE)
        async with world.living(TWO, "twos-1"):
            assert await anext(aiter(call))
            keys.replace(ApiKeys([TWO]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is Code.UNAUTHENTICATED
        await world.served.until(lambda: len(world.served.engine._feed) == 0)

    run_world(scenario, keys)


def test_P17_two_keys_in_the_metadata_are_none():
    async def scenario(world: World) -> None:
        call = world.channel.unary_unary(f"/{VLLM}/HealthCheck")
        twice = (*bearer(ONE).items(), *bearer(TWO).items())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", metadata=twice)
        assert caught.value.code() is Code.UNAUTHENTICATED

    run_world(scenario)


@pytest.mark.parametrize(("rpc_s", "own_s"), [(30.0, 20.0), (20.0, 30.0), (30.0, None), (None, 30.0), (None, None)])
def test_C8_of_two_deadlines_the_earlier_one_counts(rpc_s, own_s):
    async def scenario(world: World) -> None:
        engine, given = world.served.engine, []
        submit = engine.submit_batch

        def submit_batch(requests: Any, *, deadline_s: float | None = None) -> Any:
            given.append(None if deadline_s is None else deadline_s - engine.parts.clock.now_s())
            return submit(requests, deadline_s=deadline_s)

        engine.submit_batch = submit_batch
        request = pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=1))
        if own_s is not None:
            request.deadline_ms = 1e3 * own_s
        call = world.channel.unary_stream(f"/{APT}/Generate")(request.SerializeToString(), timeout=rpc_s)
        async for _ in call:
            pass
        known = [s for s in (rpc_s, own_s) if s is not None]
        assert given == [pytest.approx(min(known), abs=5.0) if known else None]

    run_world(scenario, None)
