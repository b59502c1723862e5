"""Every example runs on a CPU."""

import contextlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chat_templates import LLAMA2
from tests.support.small_models import write_shallow_model

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_SERVER = (
    "--max-num-seqs",
    "2",
    "--max-num-batched-tokens",
    "64",
    "--num-blocks-override",
    "64",
    "--calibration-time",
    "0",
)


def run(name: str, *args: object) -> None:
    runpy.run_path(str(EXAMPLES / name))["main"](*args)


def free_ports(num: int) -> list[int]:
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(num)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]


def wait_for(url: str, process: subprocess.Popen) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        time.sleep(0.2)
    raise AssertionError("the server ended")


@contextlib.contextmanager
def running(*command: str, ready: str) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "serve.cli", *command], cwd=EXAMPLES.parent, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )  # fmt: skip
    try:
        wait_for(ready, process)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_every_example_is_here():
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert names == {
        "batch.py",
        "custom_policy.py",
        "embeddings.py",
        "lora.py",
        "messages_client.py",
        "offline.py",
        "openai_client.py",
        "responses_client.py",
        "structured_output.py",
        "tool_calls.py",
        "two_replicas.md",
        "what_if.py",
    }


@pytest.fixture(params=["shallow", pytest.param("bundled", marks=pytest.mark.slow)])
def model(request, tmp_path):
    return "tiny-opt" if request.param == "bundled" else str(write_shallow_model(tmp_path / "tiny-opt"))


def test_offline(capsys, model):
    run("offline.py", model)
    out = capsys.readouterr().out
    assert "Once upon a time" in out
    assert out.count("first token after") == 2


def test_embeddings(capsys, model):
    run("embeddings.py", model)
    scores = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


def test_lora(capsys, model):
    run("lora.py", model)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:10].strip() for line in lines] == ["red", "blue", "no adapter"]
    assert len({line[10:] for line in lines}) > 1


def test_structured_output(capsys, model):
    pytest.importorskip("llguidance")
    run("structured_output.py", model)
    king, answer = capsys.readouterr().out.splitlines()
    assert king.startswith("The king is {'name': ")
    assert answer.rpartition(" ")[2] in ("yes", "no")


@pytest.mark.parametrize("num_requests", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_custom_policy(capsys, num_requests):
    run("custom_policy.py", num_requests)
    assert re.findall(r"^[\w-]+", capsys.readouterr().out, re.MULTILINE) == ["fcfs", "shortest-first"]


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.parametrize("num_requests", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_what_if(capsys, num_requests):
    run("what_if.py", num_requests)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.count("%") == 3 for line in lines[1:])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_openai_client(capsys):
    http, grpc = free_ports(2)
    flags = ("--port", str(http), "--grpc-port", str(grpc), *SMALL_SERVER)
    with running("serve", "tiny-opt", *flags, ready=f"http://127.0.0.1:{http}/ready"):
        run("openai_client.py", f"http://127.0.0.1:{http}/v1")
    assert len(capsys.readouterr().out) > 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clients_of_chat_apis(capsys, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(LLAMA2)
    http, grpc = free_ports(2)
    flags = ("--port", str(http), "--grpc-port", str(grpc), "--chat-template", str(template), *SMALL_SERVER)
    with running("serve", "tiny-opt", *flags, ready=f"http://127.0.0.1:{http}/ready"):
        run("responses_client.py", f"http://127.0.0.1:{http}/v1")
        assert len(capsys.readouterr().out) > 100
        pytest.importorskip("anthropic")
        run("messages_client.py", f"http://127.0.0.1:{http}")
        assert "tokens of the prompt" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_replicas():
    pytest.importorskip("smg")
    text = (EXAMPLES / "two_replicas.md").read_text()
    (command,) = re.findall(r"^apt-jax (launch .*) --port 8000$", text, re.MULTILINE)
    (body,) = re.findall(r"-d '(\{.*\})'$", text, re.MULTILINE)
    (port,) = free_ports(1)
    flags = ("--port", str(port), "--grpc-port", "0", *SMALL_SERVER)
    with running(*command.split(), *flags, ready=f"http://127.0.0.1:{port}/readiness"):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body.encode(), {"content-type": "application/json"}
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as response:
            assert json.load(response)["choices"][0]["text"]
