"""The Ray Serve example: the application alone, and within Ray where that is installed (it is no dependency of
ours)."""

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from apt_jax import LLM
from deploy.ray_serve import EngineApp
from tests.support.small_models import write_shallow_model

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "num_blocks_override": 32,
}
BODY = {"prompt": "The king said", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_shallow_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def flags(model) -> str:
    return " ".join([model, "--calibration-time=0", *(f"--{k.replace('_', '-')}={v}" for k, v in SIZES.items())])


def said(model: str) -> str:
    """By the engine in process."""
    llm = LLM(model, warm_up=False, **SIZES)
    [answer] = llm.generate([BODY["prompt"]], {"max_tokens": 24, "temperature": 0.0}, use_tqdm=False)
    return answer.outputs[0].text


class Lifespan:
    """The lifespan events that a server sends to an ASGI application."""

    def __init__(self, app: EngineApp) -> None:
        self._told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.ensure_future(app({"type": "lifespan"}, self._told.get, self._answers.put))

    async def tell(self, event: str) -> Any:
        await self._told.put({"type": f"lifespan.{event}"})
        return await self._answers.get()


def text_of(stream: str) -> str:
    data = [x.removeprefix("data: ") for x in stream.splitlines() if x.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return "".join(json.loads(x)["choices"][0]["text"] for x in data[:-1])


def test_the_application_serves_from_startup_to_shutdown(model, flags):
    async def main() -> tuple[str, str]:
        app = EngineApp(flags)
        life = Lifespan(app)
        assert await life.tell("startup") == {"type": "lifespan.startup.complete"}
        app.check()
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://ray") as client:
            whole = await client.post("/v1/completions", json=BODY)
            stream = await client.post("/v1/completions", json={**BODY, "stream": True})
            assert await life.tell("shutdown") == {"type": "lifespan.shutdown.complete"}
            late = await client.post("/v1/completions", json=BODY)
        assert late.status_code == 503
        return whole.json()["choices"][0]["text"], text_of(stream.text)

    expected = said(model)
    assert asyncio.run(main()) == (expected, expected)


def test_a_model_that_is_not_there_fails_the_start_with_its_line():
    async def main() -> Any:
        return await Lifespan(EngineApp("/no/such/model")).tell("startup")

    answer = asyncio.run(main())
    assert answer["type"] == "lifespan.startup.failed"
    assert "/no/such/model" in answer["message"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray (ray[serve])")
def test_within_ray_answers_and_streams_are_those_of_the_engine(model, flags):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = f"""
import http.client, json, ray
from ray import serve
env = {{"PYTHONPATH": {str(ROOT)!r}, "JAX_PLATFORMS": "cpu"}}
ray.init(num_cpus=3, include_dashboard=False, runtime_env={{"env_vars": env}}, log_to_driver=False)
serve.start(http_options={{"port": {port}}})
from deploy.ray_serve import app
serve.run(app({{"flags": {flags!r}, "replicas": "2"}}))
for more in ({{}}, {{"stream": True}}):
    connection = http.client.HTTPConnection("127.0.0.1", {port}, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({BODY!r} | more), {{"content-type": "application/json"}})
    print("ANSWER", json.dumps(connection.getresponse().read().decode()))
print("STATUS", serve.grpc_api.errors().applications["default"].status.value)
serve.shutdown()
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    whole, stream = (json.loads(x.removeprefix("ANSWER ")) for x in lines if x.startswith("ANSWER "))
    expected = said(model)
    assert json.loads(whole)["choices"][0]["text"] == expected
    assert text_of(stream) == expected
    assert "STATUS RUNNING" in lines
