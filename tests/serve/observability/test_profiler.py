"""Profiles on demand, over both protocols."""

import asyncio
import gzip
import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import jax
import pytest
from smg_grpc_proto.generated import common_pb2

from apt_jax.errors import ConfigError
from serve.errors import ProfilerStateError
from serve.observability.profiler import Profiler
from serve.security.api_keys import ApiKeys
from tests.support.http_serving import HttpServed, http_serving

KEY = "sk-0123456789abcdefghij"
BEARER = (("authorization", f"Bearer {KEY}"),)
Code = grpc.StatusCode

common: Any = common_pb2


def run(scenario, profiler: Profiler | None, keys: ApiKeys | None = None, **toy: Any) -> None:
    async def whole() -> None:
        config = {"profiler": profiler, "keys": keys}
        try:
            async with http_serving(app=config, grpc=config, **toy) as served:
                await asyncio.wait_for(scenario(served), 120)
        finally:
            if profiler is not None:
                await profiler.close()

    asyncio.run(whole())


async def rpc(served: HttpServed, name: str, metadata: Any = (), **fields: Any) -> Any:
    request = getattr(common, f"{name}Request")
    call = served.grpc.channel.unary_unary(
        f"/vllm.grpc.engine.VllmEngine/{name}",
        request_serializer=request.SerializeToString,
        response_deserializer=common.ProfileResponse.FromString,
    )
    return await call(request(**fields), metadata=metadata)


async def refusal(call: Any) -> tuple[Code, str, str]:
    """Code, text and what it says about trying again."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailers = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), caught.value.details() or "", str(trailers["grpc-retry-pushback-ms"])


def files(directory: str | Path) -> Iterable[Path]:
    return [path for path in Path(directory).rglob("*") if path.is_file()]


@jax.jit
def a_program_of_the_test(x: jax.Array) -> jax.Array:
    return x @ x


def assert_readable(directory: str | Path, program: str = "") -> None:
    """Check for the files of TensorBoard's plug-in and of Perfetto, and for this program in the trace."""
    by_name = {"".join(path.suffixes[-2:]): path for path in files(directory)}
    assert by_name[".xplane.pb"].stat().st_size > 100
    assert by_name[".xplane.pb"].parent.parent == Path(directory) / "plugins" / "profile"
    events = json.loads(gzip.decompress(by_name[".json.gz"].read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events if event.get("ph") == "X"}
    assert not program or any(program in str(name) for name in names)
    assert stat.S_IMODE(Path(directory).stat().st_mode) == 0o700


def test_a_profile_over_http_is_written_while_requests_are_served(tmp_path):
    async def scenario(served):
        begun = await served.post("/start_profile", {})
        assert begun.status_code == 200
        assert begun.json()["ends_after_s"] == 60.0
        a_program_of_the_test(jax.numpy.ones((64, 64))).block_until_ready()
        answer = await served.ask("hello", max_tokens=20)
        assert answer["usage"]["completion_tokens"] == 20
        busy = await served.post("/start_profile", {})
        assert busy.status_code == 400
        assert busy.json()["error"]["code"] == "profiler_state"
        assert busy.headers["x-should-retry"] == "false"
        ended, _ = await asyncio.gather(served.post("/stop_profile", {}), served.ask("hello", max_tokens=20))
        assert ended.json()["directory"] == begun.json()["directory"]
        assert Path(ended.json()["directory"]).parent == tmp_path / "profiles"
        assert_readable(ended.json()["directory"], "a_program_of_the_test")
        again = await served.post("/stop_profile", {})
        assert again.status_code == 400
        assert "no profile" in again.json()["error"]["message"]

    run(scenario, Profiler(tmp_path / "profiles"))
    assert stat.S_IMODE((tmp_path / "profiles").stat().st_mode) == 0o700


def test_a_profile_over_grpc_is_the_same_one(tmp_path):
    async def scenario(served):
        begun = await rpc(served, "StartProfile")
        assert begun.success
        code, text, pushback = await refusal(rpc(served, "StartProfile"))
        assert code is Code.FAILED_PRECONDITION
        assert "already" in text
        assert pushback == "-1"
        assert (await served.post("/start_profile", {})).status_code == 400
        assert (await rpc(served, "StopProfile")).message == begun.message
        assert_readable(begun.message)
        assert (await refusal(rpc(served, "StopProfile")))[0] is Code.FAILED_PRECONDITION
        for field in ({"output_dir": "/etc"}, {"num_steps": 3}, {"with_stack": True}):
            code, text, _ = await refusal(rpc(served, "StartProfile", **field))
            assert code is Code.INVALID_ARGUMENT
            assert next(iter(field)) in text

    run(scenario, Profiler(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_profile_ends_by_itself(tmp_path):
    profiler = Profiler(tmp_path, max_s=0.2)

    async def scenario(served):
        begun = (await served.post("/start_profile", {})).json()
        await served.until(lambda: not profiler.is_running, 60)
        assert_readable(begun["directory"])
        second = (await served.post("/start_profile", {})).json()
        assert second["directory"] != begun["directory"]

    run(scenario, profiler)  # the second one ends with the server
    assert not profiler.is_running
    for directory in tmp_path.iterdir():
        assert_readable(directory)


def test_of_many_that_start_at_once_one_does(tmp_path):
    async def scenario(served):
        codes = [r.status_code for r in await asyncio.gather(*(served.post("/start_profile", {}) for _ in range(8)))]
        assert sorted(codes) == [200] + [400] * 7
        codes = [r.status_code for r in await asyncio.gather(*(served.post("/stop_profile", {}) for _ in range(4)))]
        assert sorted(codes) == [200] + [400] * 3

    run(scenario, Profiler(tmp_path))


def test_whoever_leaves_while_it_begins_leaves_it_in_order(tmp_path):
    async def scenario() -> None:
        profiler = Profiler(tmp_path)
        starting = asyncio.create_task(profiler.start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        async with asyncio.timeout(60):
            while not profiler.is_running:
                await asyncio.sleep(0.005)
        assert_readable(await profiler.stop())
        with pytest.raises(ProfilerStateError):
            await profiler.stop()
        await profiler.close()

    asyncio.run(scenario())


def test_O6_without_the_flag_there_is_nothing_of_it():
    async def scenario(served):
        for path in ("/start_profile", "/stop_profile"):
            assert (await served.post(path, {})).status_code == 404
        for name in ("StartProfile", "StopProfile"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rpc(served, name)
            assert caught.value.code() is Code.UNIMPLEMENTED

    run(scenario, None)


def test_O6_it_wants_a_key_of_an_operator_where_keys_are_configured(tmp_path):
    profiler = Profiler(tmp_path)

    async def scenario(served):
        for path in ("/start_profile", "/stop_profile"):
            assert (await served.http.post(path)).status_code == 401
            assert (await served.http.get(path, headers=dict(BEARER))).status_code == 405
        for name in ("StartProfile", "StopProfile"):
            assert (await refusal(rpc(served, name)))[0] is Code.UNAUTHENTICATED
        assert not profiler.is_running
        response = await served.http.post("/start_profile", json={}, headers=dict(BEARER))
        assert response.status_code == 200
        assert (await rpc(served, "StopProfile", BEARER)).success

    run(scenario, profiler, ApiKeys([], [KEY]))


def test_a_directory_that_cannot_be_made_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--set profiler_dir"):
        Profiler(tmp_path / "file" / "profiles")


@pytest.mark.parametrize("says", ["No space left on device", "something of JAX"])
def test_a_profile_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, says):
    stop_trace = jax.profiler.stop_trace

    def failing() -> None:
        stop_trace()
        raise RuntimeError(f"UNKNOWN: {says}; /some/where")

    async def scenario(served: HttpServed) -> None:
        monkeypatch.setattr(jax.profiler, "stop_trace", failing)
        directory = (await served.http.post("/start_profile", json={})).json()["directory"]
        answer = await served.http.post("/stop_profile", json={})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "profile_not_written")
        reason = f" ({says})" if says.startswith("No space") else ""
        assert error["message"] == f"{directory}: the profile could not be written{reason}"
        assert not Path(directory).exists()
        await rpc(served, "StartProfile")
        code, text, again = await refusal(rpc(served, "StopProfile"))
        assert (code, again) == (Code.INTERNAL, "-1")
        assert "the profile could not be written" in text
        monkeypatch.setattr(jax.profiler, "stop_trace", stop_trace)
        assert (await served.ask("after", max_tokens=3))["usage"]["completion_tokens"] == 3
        await served.http.post("/start_profile", json={})
        assert_readable((await served.http.post("/stop_profile", json={})).json()["directory"])

    run(scenario, Profiler(tmp_path))


def test_the_newest_profiles_are_kept_and_nothing_else_is_touched(tmp_path):
    (tmp_path / "of somebody else").mkdir()

    async def scenario() -> None:
        profiler = Profiler(tmp_path, max_kept=2)
        made = []
        for _ in range(4):
            await profiler.start()
            made.append(await profiler.stop())
        await profiler.close()
        assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "of somebody else", *made[-2:]])

    asyncio.run(scenario())
