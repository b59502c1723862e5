"""The released gateway `smg`, unmodified, in front of two servers: all of its endpoints, stops, clients that
disconnect, a server that dies.

The servers are processes, over the engine of `toy_serving`, or over the bundled model where slow tests run. The answer
of an endpoint is compared with that of the engine to the token ids of the same prompt: that holds the gateway's
tokenizer, which it has from GetTokenizer, to ours.
"""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Self

import jsonschema
import pytest

from apt_jax import LLM
from apt_jax.frontend.components import EngineComponents
from serve.client import AptClient
from serve.protos.aptjax.v1 import apt_serve_pb2 as apt_pb
from tests.support.cases import num_cases
from tests.support.chat_templates import QWEN
from tests.support.random_schemas import closed, random_schema
from tests.support.smollm2 import smollm2_file
from tests.support.tool_calls import tool
from tests.support.toy_server import server_parts
from tests.support.toy_serving import expected_tokens

pytestmark = pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="needs the gateway (pip install smg)")

ROOT = Path(__file__).resolve().parents[3]
FEW_PROGRAMS = [
    "--max-num-seqs=4",
    "--max-num-batched-tokens=64",
    "--max-model-len=512",
    "--num-blocks-override=256",
    "--calibration-time=0",
]
QUESTION = "Who are you?"
PROMPT = "Shall I compare thee"


# --- endpoints -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One API of the gateway."""

    path: str
    ask: Mapping[str, Any]
    limit: str
    """Name of the most tokens, within ``sampling_params`` where the API has them."""
    stop: str | None
    text: Callable[[Any], str]
    """Extract the text of an answer."""
    piece: Callable[[Any], str]
    """Extract the text of a stream event."""
    pieces_are_whole: bool = False
    """Every event holds all text so far."""

    def body(self, max_tokens: int, stop: str | None = None) -> dict[str, Any]:
        params: dict[str, Any] = {"temperature": 0, self.limit: max_tokens}
        if stop is not None:
            assert self.stop is not None
            params[self.stop] = [stop]
        if self.path == "/generate":
            return {**self.ask, "sampling_params": params}
        return {**self.ask, **params}


def _first(event: Any, key: str) -> Any:
    return event["choices"][0][key] if event["choices"] else None


MESSAGES = [{"role": "user", "content": QUESTION}]
ENDPOINTS = {
    "completions": Endpoint(
        path="/v1/completions",
        ask={"prompt": PROMPT},
        limit="max_tokens",
        stop="stop",
        text=lambda a: a["choices"][0]["text"],
        piece=lambda e: _first(e, "text") or "",
    ),
    "chat": Endpoint(
        path="/v1/chat/completions",
        ask={"messages": MESSAGES},
        limit="max_completion_tokens",
        stop="stop",
        text=lambda a: a["choices"][0]["message"]["content"],
        piece=lambda e: (_first(e, "delta") or {}).get("content") or "",
    ),
    "responses": Endpoint(
        path="/v1/responses",
        ask={"input": QUESTION},
        limit="max_output_tokens",
        stop=None,
        text=lambda a: a["output"][0]["content"][0]["text"],
        piece=lambda e: e["delta"] if e["type"] == "response.output_text.delta" else "",
    ),
    "messages": Endpoint(
        path="/v1/messages",
        ask={"messages": MESSAGES},
        limit="max_tokens",
        stop="stop_sequences",
        text=lambda a: a["content"][0]["text"],
        piece=lambda e: e["delta"]["text"] if e["type"] == "content_block_delta" else "",
    ),
    "generate": Endpoint(
        path="/generate",
        ask={"text": PROMPT},
        limit="max_new_tokens",
        stop="stop",
        text=lambda a: a[0]["text"],
        piece=lambda e: e["text"],
        pieces_are_whole=True,
    ),
}
STOPPING = [name for name, endpoint in ENDPOINTS.items() if endpoint.stop is not None]


# --- processes -----------------------------------------------------------------------------------------------------


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> float:
    """Wait for a condition; returns how long that took, seconds."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, "it did not happen"
        time.sleep(0.005)
    return time.monotonic() - started_s


class Process:
    """A program with its output in a file, killed at the end of a ``with``."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        text = self._log.read_text()
        assert self.lives, text[-2000:]
        return text

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def terminate(self) -> None:
        self._process.terminate()

    def wait_ended(self) -> int:
        """The exit code."""
        return self._process.wait(60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server(Process):
    """A toy server, or `apt-jax serve MODEL`."""

    port = 0

    @classmethod
    def toy(cls, step_ms: int, log: Path) -> "Server":
        return cls("-m", "tests.support.toy_server", str(step_ms), log=log)

    @classmethod
    def of_model(cls, model: str, *flags: str, log: Path) -> "Server":
        return cls("-m", "serve.cli", "serve", model, "--grpc-port=0", "--no-http", *flags, log=log)

    def wait(self) -> None:
        """Until it serves."""
        until(lambda: "serving" in self.output(), 280)
        line = next(x for x in self.output().splitlines() if x.startswith("serving"))
        self.port = int(line.split(" on 127.0.0.1:")[1].split()[0])


class Gateway(Process):
    """The gateway before some servers."""

    def __init__(self, servers: list[Server], model: str, policy: str, log: Path) -> None:
        self.port, self._num_servers, self._model = free_port(), len(servers), model
        urls = [f"grpc://127.0.0.1:{server.port}" for server in servers]
        super().__init__(
            "-m", "smg", "launch", "--worker-urls", *urls, "--host=127.0.0.1", f"--port={self.port}",
            "--prometheus-host=127.0.0.1", f"--prometheus-port={free_port()}", f"--policy={policy}",
            "--load-monitor-interval=1", log=log,
        )  # fmt: skip

    def wait(self) -> None:
        """Until all servers are ready behind it."""
        until(self._is_ready)

    def _is_ready(self) -> bool:
        self.output()
        try:
            _, workers = self.ask("/workers")
            return (
                workers["stats"]["regular_count"] == self._num_servers
                and all(w["status"] == "ready" for w in workers["workers"])
                and self.ask("/v1/completions", ENDPOINTS["completions"].body(1))[0] == 200
            )
        except OSError:  # not listening yet
            return False

    def send(self, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        headers = {"content-type": "application/json", "x-api-key": "none", "anthropic-version": "2023-06-01"}
        text = None if body is None else json.dumps({"model": self._model, **body})
        connection.request("GET" if body is None else "POST", path, text, headers)
        return connection

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        with contextlib.closing(self.send(path, body)) as connection:
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")


class Fleet:
    """Two servers, the gateway before them, and the engine that they have."""

    def __init__(self, servers: list[Server], gateway: Gateway, parts: EngineComponents, say: Any) -> None:
        self.servers = servers
        self.send, self.ask = gateway.send, gateway.ask
        self.parts = parts
        self._say = say

    def ids(self, endpoint: Endpoint) -> list[int]:
        """Return the prompt as the gateway encodes it: without special tokens."""
        assert self.parts.tokenizer is not None
        if "messages" in endpoint.ask or "input" in endpoint.ask:
            return self.parts.chat_prompt(MESSAGES)
        return self.parts.tokenizer.encode(PROMPT, add_special_tokens=False)

    def said(self, endpoint: Endpoint, max_tokens: int) -> tuple[list[int], str]:
        """Return the token ids and the text that the engine alone generates greedily."""
        tokens = self._say(self.ids(endpoint), {"temperature": 0.0, "max_tokens": max_tokens})
        assert self.parts.tokenizer is not None
        return tokens, self.parts.tokenizer.decode(tokens)

    def answer(self, endpoint: Endpoint, max_tokens: int, stop: str | None = None) -> Any:
        status, answer = self.ask(endpoint.path, endpoint.body(max_tokens, stop))
        assert status == 200, answer
        return answer

    def stream(self, endpoint: Endpoint, max_tokens: int, stop: str | None = None) -> str:
        """The text of a streamed answer."""
        body = {**endpoint.body(max_tokens, stop), "stream": True}
        with contextlib.closing(self.send(endpoint.path, body)) as connection:
            lines = connection.getresponse().read().decode().splitlines()
        data = [x.removeprefix("data: ") for x in lines if x.startswith("data: ")]
        pieces = [endpoint.piece(json.loads(x)) for x in data if x != "[DONE]"]
        return pieces[-1] if endpoint.pieces_are_whole else "".join(pieces)

    def stats(self) -> list[apt_pb.GetStatsResponse]:
        """Return the statistics of the servers that live."""
        found = []
        for server in self.servers:
            if server.lives:
                with AptClient(f"127.0.0.1:{server.port}") as client:
                    found.append(client.stats())
        return found

    def total(self, name: str) -> int:
        return sum(getattr(stats, name) for stats in self.stats())

    def finished(self, reason: str) -> int:
        return sum(stats.finished.get(reason, 0) for stats in self.stats())

    def is_free(self) -> bool:
        return all(
            stats.free_blocks == stats.total_blocks and not (stats.num_running or stats.num_waiting or stats.num_ending)
            for stats in self.stats()
        )


@contextlib.contextmanager
def fleet_of(kind: str, directory: Path, policy: str, step_ms: int = 5) -> Generator[Fleet]:
    template = directory / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with contextlib.ExitStack() as stack:
        servers = []
        for name in ("a", "b"):  # one after the other: the second finds the programs of the first
            log, flags = directory / f"{name}.log", [f"--chat-template={template}", *FEW_PROGRAMS]
            server = Server.toy(step_ms, log) if kind == "toy" else Server.of_model(kind, *flags, log=log)
            servers.append(stack.enter_context(server))
            server.wait()
        if kind == "toy":
            parts = server_parts()
            say = lambda ids, params: expected_tokens(  # noqa: E731
                parts.build_request(prompt_token_ids=ids, params=params)
            )
        else:
            llm = LLM(
                kind,
                chat_template=str(template),
                warm_up=False,
                max_num_seqs=4,
                max_num_batched_tokens=64,
                max_model_len=512,
                num_blocks_override=256,
            )
            parts = llm.parts
            say = lambda ids, params: (  # noqa: E731
                llm.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids
            )
        gateway = stack.enter_context(Gateway(servers, parts.model_name, policy, directory / "smg.log"))
        gateway.wait()
        yield Fleet(servers, gateway, parts, say)


KINDS = ["toy", pytest.param("tiny-opt", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=KINDS)
def fleet(request, tmp_path_factory) -> Generator[Fleet]:
    with fleet_of(request.param, tmp_path_factory.mktemp("fleet"), "least_load") as made:
        yield made


# --- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENDPOINTS)
def test_every_endpoint_answers_as_the_engine(fleet, name):
    endpoint = ENDPOINTS[name]
    tokens, text = fleet.said(endpoint, 24)
    answer = fleet.answer(endpoint, 24)
    assert endpoint.text(answer) == text
    if name == "generate":
        assert answer[0]["output_ids"] == tokens
    if name in ("completions", "chat"):
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(fleet.ids(endpoint))
        assert usage["completion_tokens"] == len(tokens)
    assert fleet.stream(endpoint, 24) == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", STOPPING)
def test_stop_strings_end_generation_in_the_engine(fleet, name, stream):
    endpoint = ENDPOINTS[name]
    most = 200
    tokens, text = fleet.said(endpoint, most)
    stop = text[30:32]
    decode = fleet.parts.tokenizer.decode
    needed = next(n for n in range(len(tokens)) if stop in decode(tokens[:n]))
    before = fleet.total("generation_tokens")
    got = fleet.stream(endpoint, most, stop) if stream else endpoint.text(fleet.answer(endpoint, most, stop))
    if name == "generate" and stream:  # the gateway shows all tokens of such a stream
        assert got == decode(tokens[:needed])
    else:
        assert got == text[: text.index(stop)]
    until(fleet.is_free)
    assert fleet.total("generation_tokens") - before == needed < most / 2


def test_n_and_log_probabilities(fleet):
    body = {**ENDPOINTS["completions"].body(12), "n": 3, "temperature": 0.9, "seed": 5}
    status, answer = fleet.ask("/v1/completions", body)
    assert status == 200
    assert sorted(choice["index"] for choice in answer["choices"]) == [0, 1, 2]
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    body = {**ENDPOINTS["chat"].body(5), "logprobs": True, "top_logprobs": 3}
    status, answer = fleet.ask("/v1/chat/completions", body)
    assert status == 200
    content = answer["choices"][0]["logprobs"]["content"]
    tokens, _ = fleet.said(ENDPOINTS["chat"], 5)
    decode = fleet.parts.tokenizer.decode
    assert [entry["token"] for entry in content] == [decode([token]) for token in tokens]
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0]  # greedy


def test_structured_output_through_the_gateway(fleet):
    pytest.importorskip("llguidance", reason="structured outputs need the extra `structured`")
    schema = {
        "type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
        "additionalProperties": False,
    }  # fmt: skip
    constraint = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {**ENDPOINTS["chat"].body(60), "response_format": constraint}
    status, answer = fleet.ask("/v1/chat/completions", body)
    assert status == 200
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["yes"], bool)


def check_call(gateway: Any, seed: int, more: Mapping[str, Any]) -> None:
    """The gateway makes a constraint of the schemas; ours has to hold it, streamed as not.

    It sends that of a named function as it is, so that objects are closed here: small models go on with new properties
    for ever. It puts the definitions of all functions together, so that each has names of its own.
    """
    random_ = random.Random(seed)
    tools = [tool(f"f{i}", closed(random_schema(random_, f"part_{i}"))) for i in range(2)]
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
    choice = random_.choice(["required", {"type": "function", "function": {"name": "f1"}}])
    body = {"messages": MESSAGES, "temperature": 0, "tools": tools, "tool_choice": choice, **more}
    if choice == "required":
        body |= {"temperature": 1.0, "seed": seed}
    status, answer = gateway.ask("/v1/chat/completions", body)
    assert status == 200, answer
    calls = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
    assert calls
    for call in calls:
        assert choice == "required" or call["name"] == "f1"
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
    with contextlib.closing(gateway.send("/v1/chat/completions", {**body, "stream": True})) as connection:
        lines = connection.getresponse().read().decode().splitlines()
    chunks = [json.loads(x.removeprefix("data: ")) for x in lines if x.startswith("data: {")]
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"]]
    pieces: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls") or []):
        pieces[call["index"]] = pieces.get(call["index"], "") + (call["function"].get("arguments") or "")
    assert list(map(json.loads, pieces.values())) == [json.loads(call["arguments"]) for call in calls]


@pytest.mark.parametrize("seed", [0, 5])  # others need letters that the toy engine does not have
def test_tool_calls_through_the_gateway(fleet, seed):
    pytest.importorskip("llguidance", reason="structured outputs need the extra `structured`")
    check_call(fleet, seed, {"max_tokens": 500})


@pytest.mark.seeds
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_tool_calls_of_smollm2_through_the_gateway(tmp_path):
    smollm2_file()
    template = tmp_path / "chat.jinja"
    template.write_text(QWEN)
    flags = ("--max-num-seqs=8", "--max-model-len=2048", "--num-blocks-override=512", f"--chat-template={template}")
    with Server.of_model("smollm2-135m", *flags, "--calibration-time=0", log=tmp_path / "server.log") as server:
        server.wait()
        with Gateway([server], "smollm2-135m", "round_robin", tmp_path / "smg.log") as gateway:
            gateway.wait()
            with concurrent.futures.ThreadPoolExecutor(8) as threads:
                seeds = range(num_cases(4, 100))
                for done in [threads.submit(check_call, gateway, seed, {"max_tokens": 1500}) for seed in seeds]:
                    done.result()


def test_bad_requests_get_our_line_and_are_not_sent_again(fleet):
    def seen() -> int:
        return sum(s.output().count("/Generate: invalid_argument ") for s in fleet.servers)

    before = seen()
    endpoints = (ENDPOINTS["completions"], ENDPOINTS["chat"], ENDPOINTS["messages"])
    for endpoint in endpoints:
        for stream in (False, True):
            status, answer = fleet.ask(endpoint.path, {**endpoint.body(5000), "stream": stream})
            assert status == 400
            assert "max_tokens can be" in json.dumps(answer)
    until(lambda: seen() - before >= 2 * len(endpoints))
    time.sleep(0.5)  # a gateway that tries again does so within a fraction of this
    assert seen() - before == 2 * len(endpoints)
    assert fleet.is_free()


@pytest.mark.parametrize("stream", [True, False])
def test_C9_a_client_that_leaves_frees_its_blocks_within_a_second(fleet, stream):
    before = fleet.finished("abort")
    body = {**ENDPOINTS["chat"].body(480), "ignore_eos": True, "stream": stream}
    connection = fleet.send("/v1/chat/completions", body)
    if stream:
        response = connection.getresponse()
        for _ in range(6):
            assert response.readline()
    until(lambda: fleet.total("num_running") == 1)
    assert not fleet.is_free()
    if stream:
        response.close()
    connection.close()
    assert until(fleet.is_free) < 1.0
    assert fleet.finished("abort") == before + 1


def test_the_gateway_knows_the_load_of_each_server(fleet):
    def seen() -> list[Any]:
        _, answer = fleet.ask("/workers")
        return [w["engine_load"]["loads"][0] for w in answer["workers"] if "engine_load" in w]

    def total(name: str) -> int:
        loads.append(seen())
        return sum(load[name] for load in loads[-1])

    loads: list[list[Any]] = []
    until(lambda: total("num_total_reqs") == 0 and len(loads[-1]) == 2)
    body = {**ENDPOINTS["chat"].body(450), "ignore_eos": True}
    connections = [fleet.send("/v1/chat/completions", body) for _ in range(4)]
    until(lambda: total("num_running_reqs") == 4)
    for load in loads[-1]:
        busy = load["num_running_reqs"] > 0
        assert (0.0 < load["token_usage"] < 1.0) == busy
        assert (load["num_used_tokens"] > 0) == busy
        assert load["max_total_num_tokens"] > load["num_used_tokens"]
        assert load["max_running_requests"] in (4, 8)
    for connection in connections:
        connection.close()
    assert until(fleet.is_free) < 5.0


@pytest.mark.in_turn(1, group="gateways whose servers end")
@pytest.mark.parametrize(
    ("policy", "busy"),
    [("power_of_two", 1), *(pytest.param("least_load", busy, marks=pytest.mark.slow) for busy in (0, 1))],
)
def test_the_idle_server_gets_the_requests(policy, busy, tmp_path):
    """The load is not of the gateway's own making: it can only know of it from GetLoads."""
    with (
        concurrent.futures.ThreadPoolExecutor(14) as pool,
        fleet_of("toy", tmp_path, policy, step_ms=20) as fleet,
    ):

        def ask(prompt: list[int], max_tokens: int) -> None:
            with AptClient(f"127.0.0.1:{fleet.servers[busy].port}") as client:
                for _ in client.generate(prompt, max_tokens=max_tokens, ignore_eos=True):
                    pass

        def load() -> dict[str, Any]:
            _, answer = fleet.ask("/workers")
            port = f":{fleet.servers[busy].port}"
            (worker,) = (w for w in answer["workers"] if w["url"].endswith(port))
            return worker["engine_load"]["loads"][0] if "engine_load" in worker else {}

        for i in range(8):
            pool.submit(ask, [30 + i] * 20, 480)
        until(lambda: fleet.stats()[busy].num_running == 8)
        for i in range(6):
            pool.submit(ask, [40 + i] * 400, 4)
        until(lambda: load().get("num_waiting_reqs") == 6)
        assert load()["num_waiting_uncached_tokens"] == 6 * 400
        before = [stats.finished.get("length", 0) for stats in fleet.stats()]
        for _ in range(8):
            fleet.answer(ENDPOINTS["completions"], 4)
        after = fleet.stats()
        assert after[busy].num_waiting == 6  # all the while
        served = [s.finished.get("length", 0) - b for s, b in zip(after, before, strict=True)]
        assert served[busy] == 0
        assert served[1 - busy] == 8


@pytest.mark.in_turn(1, group="gateways whose servers end")
@pytest.mark.parametrize("kind", KINDS)
def test_N1_when_a_server_dies_the_next_requests_succeed(kind, tmp_path):
    with fleet_of(kind, tmp_path, "round_robin") as fleet:
        endpoint = ENDPOINTS["completions"]
        _, text = fleet.said(endpoint, 8)
        for _ in range(4):
            assert endpoint.text(fleet.answer(endpoint, 8)) == text
        assert all(stats.generation_tokens for stats in fleet.stats())
        fleet.servers[0].kill()
        for _ in range(8):
            assert endpoint.text(fleet.answer(endpoint, 8)) == text
            assert fleet.stream(endpoint, 8) == text
        assert fleet.is_free()


@pytest.mark.in_turn(1, group="gateways whose servers end")
@pytest.mark.parametrize("kind", KINDS)
def test_H1_a_server_that_is_stopped_ends_its_streams_and_gets_no_more(kind, tmp_path):
    with fleet_of(kind, tmp_path, "round_robin") as fleet:
        endpoint = ENDPOINTS["chat"]
        _, long = fleet.said(endpoint, 300)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            streams = [pool.submit(fleet.stream, endpoint, 300) for _ in range(4)]
            until(lambda: [stats.num_running for stats in fleet.stats()] == [2, 2])
            fleet.servers[0].terminate()
            for _ in range(6):
                assert fleet.stream(ENDPOINTS["completions"], 4) == fleet.said(ENDPOINTS["completions"], 4)[1]
            assert fleet.servers[0].lives  # it waits for its streams
            assert [stream.result(60) for stream in streams] == [long] * 4
        assert fleet.servers[0].wait_ended() == 0
        assert fleet.is_free()
