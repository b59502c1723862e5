"""`apt-jax launch`: a launcher, its replicas and the released gateway as processes, which are killed in turn.

Most replicas are toy servers (`toy_launch`), whose tokens are known; one test has a real model.
"""

import concurrent.futures
import contextlib
import http.client
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from apt_jax.errors import ConfigError
from apt_jax.text.tokenizer import load_tokenizer
from serve import cli
from serve.cli import options
from serve.cli.commands import launch as launch_command
from serve.client import AptClient
from serve.launcher.plan import visible_gpus
from tests.support.small_models import SMALL_ENGINE, write_shallow_model, write_small_model
from tests.support.toy_server import server_parts
from tests.support.toy_serving import expected_tokens

ROOT = Path(__file__).resolve().parents[3]
TOY = ("-m", "tests.support.toy_launch")
REAL = ("-m", "serve.cli", "launch")
FEW_PROGRAMS = (
    "--max-num-seqs=1",
    "--max-num-batched-tokens=32",
    "--max-model-len=128",
    "--num-blocks-override=64",
    "--calibration-time=0",
)
PROMPT = "Shall I compare thee"
LONG = 200
"""Tokens of an answer that takes a second."""

needs_gateway = pytest.mark.skipif(
    importlib.util.find_spec("smg") is None, reason="needs the gateway (pip install smg)"
)


# --- processes -----------------------------------------------------------------------------------------------------


def until(condition: Callable[[], Any], timeout_s: float = 200.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, "it did not happen"
        time.sleep(0.02)


def whole_lines(text: str) -> list[str]:
    """Lines that were written to their end."""
    return text.split("\n")[:-1]


class Launch:
    """A launcher with its output in files; it and all that it started are killed at the end of a ``with``."""

    def __init__(self, directory: Path, script: Sequence[str], *flags: str, **env: str) -> None:
        self._out, self._err = directory / "out.log", directory / "err.log"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = psutil.Popen(
                [sys.executable, *script, *flags], stdout=out, stderr=err, cwd=ROOT, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            )  # fmt: skip
        self._family: set[psutil.Process] = set()

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        family = self.family()
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(30)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait(self, timeout_s: float = 200.0) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)

    def wait_ready(self, timeout_s: float = 200.0) -> None:
        def is_ready() -> bool:
            assert self.process.is_running(), self.err[-2000:]
            assert self.process.status() != psutil.STATUS_ZOMBIE, self.err[-2000:]
            return "\nlistening on" in f"\n{self.out}"

        until(is_ready, timeout_s)
        self.family()

    @property
    def line(self) -> str:
        return next(x for x in self.out.splitlines() if x.startswith("listening on"))

    @property
    def port(self) -> int:
        """Return the port of the gateway."""
        return int(self.line.split(" (HTTP) over")[0].rsplit(":", 1)[1])

    @property
    def replicas(self) -> list[str]:
        """Return the addresses of the replicas."""
        return self.line.split(" replicas at ")[1].split(" (gRPC)")[0].split(", ")

    def family(self) -> set[psutil.Process]:
        """All that it started, as far as it was seen here."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family.update(self.process.children(recursive=True))
        return self._family

    def pid_of(self, replica: int) -> int:
        return self._running(f"--grpc-port={self.replicas[replica].rsplit(':', 1)[1]}").pid

    @property
    def gateway(self) -> psutil.Process:
        return self._running("smg")

    def _running(self, argument: str) -> psutil.Process:
        """The running process with an argument that begins so; the gateway changes its own to one like `smg::router`."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # of an earlier test, or just gone
                if any(x.startswith(argument) for x in process.cmdline()):
                    return process
        raise AssertionError(f"no process runs with {argument}")

    def orphans(self) -> list[psutil.Process]:
        return [p for p in self._family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def tokens(self) -> list[int]:
        """That each replica has generated."""
        return [_stats(address).generation_tokens for address in self.replicas]


def _stats(address: str) -> Any:
    with AptClient(address) as client:
        return client.stats()


def ask(port: int, max_tokens: int, *, stream: bool = False) -> tuple[int, str, str, str | None]:
    """Status, address of the replica, text and error of a completion."""
    body = {
        "model": "toy", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=200)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
    replica = (response.headers["x-smg-routed-worker-id"] or "").removeprefix("grpc://")
    if not stream:
        answer = json.loads(text)
        if response.status != 200:
            return response.status, replica, "", answer["error"]["message"]
        return response.status, replica, answer["choices"][0]["text"], None
    data = [x.removeprefix("data: ") for x in text.splitlines() if x.startswith("data: ")]
    events = [json.loads(x) for x in data if x != "[DONE]"]
    errors = [event["error"]["message"] for event in events if "error" in event]
    pieces = [event["choices"][0]["text"] for event in events if event.get("choices")]
    return response.status, replica, "".join(pieces), errors[0] if errors else None


def said(max_tokens: int) -> str:
    """By the engine alone."""
    parts = server_parts()
    assert parts.tokenizer is not None
    ids = parts.tokenizer.encode(PROMPT, add_special_tokens=False)
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return parts.tokenizer.decode(expected_tokens(parts.build_request(prompt_token_ids=ids, params=params)))


ANY_PORT = ("--port=0", "--grpc-port=0")
TWO = ("--replicas=2", *ANY_PORT)


@contextlib.contextmanager
def toy_fleet(directory: Path) -> Generator[Launch]:
    """A launcher of two toy replicas, ready."""
    with Launch(directory, TOY, *TWO, "--routing-policy=round_robin") as made:
        made.wait_ready()
        yield made


@pytest.fixture
def two(tmp_path) -> Generator[Launch]:
    """A fleet that the test may end."""
    with toy_fleet(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def lasting(tmp_path_factory) -> Generator[Launch]:
    """A fleet that is whole again after each of its tests."""
    with toy_fleet(tmp_path_factory.mktemp("fleet")) as made:
        yield made


# --- a running fleet -----------------------------------------------------------------------------------------------


@pytest.mark.in_turn(4, group="launched servers")
@needs_gateway
def test_H3_N2_requests_are_spread_and_a_killed_replica_loses_only_its_own(lasting):
    for _ in range(4):
        assert ask(lasting.port, 8)[2] == said(8)
    assert all(lasting.tokens())

    length = 300  # 1.5 s
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(ask, lasting.port, length, stream=True) for _ in range(6)]
        whole = [pool.submit(ask, lasting.port, length) for _ in range(4)]
        until(lambda: sum(_stats(address).num_running for address in lasting.replicas) == 10)
        time.sleep(0.2)
        os.kill(lasting.pid_of(0), signal.SIGKILL)
        during = [ask(lasting.port, 8, stream=i % 2 == 0) for i in range(10)]  # it is away
        answers = [stream.result() for stream in streams]
        retried = [answer.result() for answer in whole]
    expected = said(length)
    lost = [answer for answer in answers if answer[1] == lasting.replicas[0]]
    kept = [answer for answer in answers if answer[1] == lasting.replicas[1]]
    assert lost
    assert kept
    assert len(lost) + len(kept) == 6
    for _, _, text, error in lost:
        assert expected.startswith(text)
        assert len(text) < len(expected)
        assert error is not None
        assert "connection" in error
    for status, _, text, error in kept:
        assert (status, text, error) == (200, expected, None)
    # Nothing of these had been sent: the gateway asks the other replica.
    for status, replica, text, _ in retried:
        assert (status, replica, text) == (200, lasting.replicas[1], expected)
    for status, _, text, error in during:
        assert (status, text, error) == (200, said(8), None)

    until(lambda: "replica 0 is back" in lasting.err)
    assert "replica 0 was killed by SIGKILL; restarting it in 1 s" in lasting.err

    def reaches_it() -> bool:
        status, replica, text, _ = ask(lasting.port, 8)
        assert (status, text) == (200, said(8))
        return replica == lasting.replicas[0]

    until(reaches_it)
    assert all(lasting.tokens())


@pytest.mark.in_turn(4, group="launched servers")
@needs_gateway
@pytest.mark.parametrize("to_group", [False, True])
def test_a_first_signal_lets_open_requests_end(two, to_group):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(ask, two.port, LONG, stream=True) for _ in range(4)]
        until(lambda: sum(_stats(address).num_running for address in two.replicas) == 4)
        if to_group:  # Ctrl-C
            os.killpg(two.process.pid, signal.SIGINT)
        else:
            two.process.terminate()
        for stream in streams:
            assert stream.result()[2:] == (said(LONG), None)
    assert two.wait() == 0
    assert two.orphans() == []
    lines = two.out.splitlines()
    assert lines[-1] == "stopped"
    assert "replica 0 | stopped" in lines
    assert "replica 1 | stopped" in lines


@pytest.mark.in_turn(4, group="launched servers")
@needs_gateway
def test_a_second_signal_ends_all_at_once(two):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = pool.submit(ask, two.port, 900, stream=True)
        until(lambda: sum(_stats(address).num_running for address in two.replicas) == 1)
        two.process.terminate()
        until(lambda: "stopping" in two.out)
        two.process.terminate()
        assert two.wait() == 128 + signal.SIGTERM
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert len(stream.result()[2]) < 900
    assert two.orphans() == []


@pytest.mark.in_turn(4, group="launched servers")
@needs_gateway
def test_H4_nothing_outlives_a_launcher_that_is_killed(two):
    family = two.family()
    assert len([p for p in family if p.is_running()]) >= 3  # two replicas and the gateway
    two.process.kill()
    two.wait()
    until(lambda: two.orphans() == [])


@pytest.mark.in_turn(4, group="launched servers")
@needs_gateway
def test_a_gateway_that_is_killed_comes_back(lasting):
    lasting.gateway.kill()
    until(lambda: "gateway is back" in lasting.err)
    assert ask(lasting.port, 8)[2] == said(8)


@needs_gateway
def test_nobody_can_tell_the_gateway_which_servers_to_use(lasting):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", lasting.port)) as connection:
        body = json.dumps({"url": "grpc://127.0.0.1:1"})
        connection.request("POST", "/workers", body, {"content-type": "application/json"})
        assert connection.getresponse().status == 401


@pytest.mark.in_turn(4, group="launched servers")
@needs_gateway
def test_lines_of_json_stay_json(tmp_path):
    with Launch(tmp_path, TOY, *TWO, "--log-format=json") as fleet:
        fleet.wait_ready()
        ask(fleet.port, 4)
        # By either replica, whose lines are lost if it is killed before it wrote them.
        until(lambda: any(json.loads(line).get("output_tokens") == 4 for line in whole_lines(fleet.err)))
        os.kill(fleet.pid_of(1), signal.SIGKILL)
        until(lambda: "is back" in fleet.err)
        records = [json.loads(line) for line in whole_lines(fleet.err)]
    assert any("restarting it in 1 s" in record["message"] for record in records)


@pytest.mark.slow
@needs_gateway
def test_a_real_model_behind_the_gateway(tmp_path):
    model = write_shallow_model(tmp_path / "model")
    with Launch(tmp_path, REAL, str(model), *TWO, *FEW_PROGRAMS, "--served-model-name=toy") as fleet:
        fleet.wait_ready(280)
        assert "replica 0 | " in fleet.err
        assert "replica 1 | " in fleet.err
        tokenizer = load_tokenizer(model)
        ids = tokenizer.encode(PROMPT, add_special_tokens=False)  # as the gateway encodes it
        for address in fleet.replicas:
            with AptClient(address) as client:
                answers = client.generate(ids, max_tokens=12, temperature=0.0, ignore_eos=True)
                alone = "".join(answer.text for answer in answers)
            for stream in (False, True):
                assert ask(fleet.port, 12, stream=stream)[2] == alone
        fleet.process.terminate()
        assert fleet.wait() == 0
        assert fleet.orphans() == []


# --- one replica ---------------------------------------------------------------------------------------------------


@pytest.mark.in_turn(4, group="launched servers")
def test_a_single_replica_has_no_gateway_and_comes_back_too(tmp_path):
    with Launch(tmp_path, TOY, *ANY_PORT, "--no-http") as alone:
        alone.wait_ready()
        [replica] = [p for p in alone.family() if p.is_running()]
        address = alone.line.split()[2]
        assert _stats(address).generation_tokens == 0
        replica.kill()
        until(lambda: "replica 0 is back" in alone.err)
        assert _stats(address).generation_tokens == 0
        alone.process.terminate()
        assert alone.wait() == 0


@pytest.mark.in_turn(4, group="launched servers")
def test_a_single_replica_of_a_real_model(tmp_path):
    with Launch(tmp_path, REAL, str(write_small_model(tmp_path)), *SMALL_ENGINE, *ANY_PORT) as alone:
        alone.wait_ready(280)
        with AptClient(alone.line.split()[2]) as client:
            assert list(client.generate("hello", max_tokens=5, ignore_eos=True))
        alone.process.terminate()
        assert alone.wait() == 0
        assert alone.orphans() == []


@pytest.mark.in_turn(4, group="launched servers")
def test_a_replica_that_refuses_its_flags_ends_all(tmp_path):
    with Launch(tmp_path, TOY, *TWO, TOY_FAILS="2 toy: no such thing (--thing)") as fleet:
        assert fleet.wait() == 2
        last = fleet.err.splitlines()[-1]
        assert last.startswith("apt-jax launch: replica ")
        assert last.endswith(": toy: no such thing (--thing)")
        assert "restarted" not in fleet.err
        assert fleet.orphans() == []


@pytest.mark.in_turn(4, group="launched servers")
def test_a_replica_that_ends_too_often_ends_all(tmp_path):
    with Launch(tmp_path, TOY, *ANY_PORT, "--max-restarts=2", TOY_FAILS="3 out of luck") as fleet:
        assert fleet.wait() == 1
        assert "restarting it in 1 s" in fleet.err
        assert "restarting it in 2 s" in fleet.err
        assert fleet.err.splitlines()[-1] == (
            "apt-jax launch: replica 0 exited with code 3, 3 times in a row (--max-restarts 2); last log line: out of luck"
        )


@pytest.mark.in_turn(4, group="launched servers")
def test_a_signal_while_a_replica_is_away_ends_all_cleanly(tmp_path):
    with Launch(tmp_path, TOY, *ANY_PORT, "--max-restarts=9", TOY_FAILS="3 out of luck") as fleet:
        until(lambda: "restarting it in 2 s" in fleet.err)
        fleet.process.terminate()
        assert fleet.wait() == 0
        assert fleet.out.splitlines()[-1] == "stopped"
        assert fleet.orphans() == []


# --- wrong usage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        (("--replicas", "0"), {}, "--replicas: '0' must be positive"),
        (("--replicas", "two"), {}, "'two' is not an integer"),
        (("--replcas", "2"), {}, "unknown flag '--replcas'; did you mean --replicas?"),
        (("--replicas", "2", "--block-size", "0"), {}, "(--block-size)"),
        (("--replicas", "2", "--routing-policy", "fast"), {}, "--routing-policy: 'fast' must be one of"),
        (("--replicas", "2", "--host", "0.0.0.0"), {}, "(--insecure-open)"),
        (("--replicas", "2", "--port", "65535"), {}, "port 65538 must lie in [0, 65535]"),
        (("--replicas", "2", "--api-key-file", "keys"), {}, "--api-key-file: the gateway has neither keys nor TLS"),
        (("--tls-cert", "a", "--tls-key", "b"), {}, "start apt-jax serve instead"),
        (
            ("--replicas", "2", "-tp", "2"),
            {"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": ""},
            "2 replicas of 2 devices need 4, but 2 are visible (0, 1): lower --replicas or -tp",
        ),
    ],
)
def test_wrong_usage_is_one_line(flags, env, says, monkeypatch, capsys):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert refused("tiny-opt", *flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("apt-jax launch: ")
    assert says in line


def refused(*argv: str) -> int:
    """The exit code, of a launcher that starts nothing."""
    try:
        return cli.main(["launch", *argv])
    except SystemExit as end:
        return int(end.code or 0)


@needs_gateway
@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_in_use_is_told_before_anything_starts(flag, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused("tiny-opt", *TWO, flag, str(port)) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"127.0.0.1:{port}: Address already in use ({flag}" in line


def test_the_module_runs_too(tmp_path):
    with Launch(tmp_path, REAL, "--replcas", "2") as launcher:
        assert launcher.wait() == 2
        assert launcher.err == "apt-jax launch: unknown flag '--replcas'; did you mean --replicas?\n"


def planned(*argv: str, env: dict[str, str] | None = None) -> launch_command.Plan:
    parser = options.Parser()
    launch_command.add_arguments(parser)
    return launch_command.plan(parser.parse_args(argv), argv, env or {})


def test_O5_a_replica_gets_the_key_by_its_environment_alone():
    key = "sk-0123456789abcdefghij"
    for argv in (("--api-key", key), (f"--api-key={key}",)):
        (replica,) = planned("tiny-opt", *argv, "--grpc-port", "0", "--port", "0").replicas
        assert replica.env["APT_JAX_API_KEY"] == key
        assert not any(key in word or word == "--api-key" for word in replica.command)
        assert "tiny-opt" in replica.command
    (other,) = planned("--model", "tiny-opt", "--grpc-port", "0", "--port", "0").replicas
    assert "APT_JAX_API_KEY" not in other.env
    assert other.command[other.command.index("--model") + 1] == "tiny-opt"


@needs_gateway
def test_O5_a_gateway_refuses_a_key_that_it_does_not_check():
    with pytest.raises(ConfigError, match=r"--api-key, APT_JAX_API_KEY: the gateway has neither keys nor TLS"):
        planned("tiny-opt", "--replicas", "2", "--api-key", "sk-0123456789abcdefghij")


@needs_gateway
def test_a_unix_socket_is_of_a_single_replica():
    with pytest.raises(ConfigError, match="--uds: the gateway listens on a port"):
        planned("tiny-opt", "--replicas", "2", "--uds", "/tmp/x")
    plan = planned("tiny-opt", "--grpc-port", "0", "--uds", "/tmp/x")
    assert plan.where.endswith(" and unix:/tmp/x (HTTP)")
    assert not any(word.startswith("--port") for word in plan.replicas[0].command)


@needs_gateway
def test_O1_a_gateway_that_others_reach_is_refused_or_warned_of(caplog):
    flags = ("tiny-opt", "--replicas", "2", "--host", "0.0.0.0", "--grpc-port", "0", "--port", "0")
    with pytest.raises(ConfigError, match=r"by anyone from.*--insecure-open"):
        planned(*flags)
    assert caplog.text == ""
    planned(*flags, "--insecure-open")
    assert "0.0.0.0 can be reached by anyone from other machines" in caplog.text


def test_without_the_gateway_installed_the_extra_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "smg" else find(n))
    with pytest.raises(ConfigError, match=r"pip install 'apt-jax\[gateway\]'"):
        planned("tiny-opt", "--replicas", "2")
    assert planned("tiny-opt", *ANY_PORT).gateway is None


# --- what is started -----------------------------------------------------------------------------------------------


def test_the_launcher_does_without_jax():
    code = "import sys, serve.cli.commands.launch; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@needs_gateway
def test_replicas_get_the_flags_of_serve_and_addresses_of_their_own():
    plan = planned("--cache", "kv", "tiny-opt", "--replicas", "2", "--routing-policy=cache_aware", "--host", "127.0.0.1",
                   "--port=18400", "-tp", "1", "--grpc-port", "18500", "--max-restarts", "3", "--set", "dashboard=false")  # fmt: skip
    kept = ["--cache", "kv", "tiny-opt", "-tp", "1", "--set", "dashboard=false", "--host=127.0.0.1"]
    assert [list(program.command[4:]) for program in plan.replicas] == [
        [*kept, "--grpc-port=18500", "--port=18401"],
        [*kept, "--grpc-port=18501", "--port=18402"],
    ]
    assert plan.gateway is not None
    for flag in (
        "grpc://127.0.0.1:18500",
        "grpc://127.0.0.1:18501",
        "--port=18400",
        "--policy=cache_aware",
        "--prometheus-port=18403",
    ):
        assert flag in plan.gateway.command


@needs_gateway
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_O5_the_gateways_key_is_in_no_command_line():
    plan = planned("tiny-opt", "--replicas", "2", *ANY_PORT)
    assert plan.gateway is not None
    port = next(int(word.removeprefix("--port=")) for word in plan.gateway.command if word.startswith("--port="))
    process = subprocess.Popen(plan.gateway.command, env=dict(plan.gateway.env), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        seen, status = set(), 0
        until_s = time.monotonic() + 60
        while not status and process.poll() is None and time.monotonic() < until_s:
            seen.add(Path(f"/proc/{process.pid}/cmdline").read_bytes())
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/workers")
                status = connection.getresponse().status
                connection.close()
    finally:
        process.kill()
        process.wait()
    assert any(b"run_gateway" in line for line in seen)  # from its beginning
    assert not [line for line in seen if b"api-key" in line or b"admin" in line]
    assert status == 401  # there is a key


def test_a_single_replica_gets_its_flags_as_they_are():
    plan = planned("tiny-opt", "--grpc-port", "18550", "--no-http", "--max-num-seqs=4")
    assert plan.gateway is None
    assert plan.replicas[0].command[4:] == ["tiny-opt", "--no-http", "--max-num-seqs=4", "--grpc-port=18550"]


@needs_gateway
@pytest.mark.parametrize(
    ("visible", "size", "expected"),
    [
        ("0,1,2,3", "2", ["0,1", "2,3"]),
        ("4,5,6,7", "1", ["4", "5"]),
        ("GPU-aa, GPU-bb", "1", ["GPU-aa", "GPU-bb"]),
    ],
)
def test_replicas_divide_the_gpus_that_the_launcher_was_given(visible, size, expected):
    plan = planned("tiny-opt", "--replicas=2", "-tp", size, *ANY_PORT, env={"CUDA_VISIBLE_DEVICES": visible})
    assert [program.env["CUDA_VISIBLE_DEVICES"] for program in plan.replicas] == expected
    assert [program.cpus for program in plan.replicas] == [(), ()]


def test_gpus_are_found_as_cuda_finds_them(monkeypatch, tmp_path):
    def seen(**env: str) -> list[str]:
        return visible_gpus(env)

    assert seen(CUDA_VISIBLE_DEVICES="0,1,-1,2") == ["0", "1"]
    assert seen(CUDA_VISIBLE_DEVICES="") == []
    assert seen(CUDA_VISIBLE_DEVICES="0", JAX_PLATFORMS="cpu") == []
    assert seen(CUDA_VISIBLE_DEVICES="0", JAX_PLATFORMS="cuda,cpu") == ["0"]
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        "echo 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'\n"
        "echo 'GPU 1: NVIDIA H200 (UUID: GPU-bb)'\n"
        "echo '  MIG 1g.18gb     Device  0: (UUID: MIG-cc)'\n"
        "echo '  MIG 1g.18gb     Device  1: (UUID: MIG-dd)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_cuda12_plugin")
    assert seen() == ["GPU-aa", "MIG-cc", "MIG-dd"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # JAX without CUDA
    assert seen() == []


@needs_gateway
@pytest.mark.skipif(sys.platform != "linux", reason="has no affinity")
def test_replicas_divide_the_cpus():
    mine = os.sched_getaffinity(0)
    plan = planned("tiny-opt", "--replicas=2", *ANY_PORT)
    shares = [set(program.cpus) for program in plan.replicas]
    if len(mine) < 2:
        assert shares == [set(), set()]
    else:
        assert shares[0] | shares[1] == mine
        assert not shares[0] & shares[1]
        assert abs(len(shares[0]) - len(shares[1])) <= 1


def test_a_part_of_a_replica_is_started_on_each_host():
    hosts = shlex.split("tiny-opt --nnodes 2 --master-addr 127.0.0.1 --master-port 38600 -tp 4")
    env = {"CUDA_VISIBLE_DEVICES": "0,1"}

    leader = planned(*hosts, "--node-rank", "0", *ANY_PORT, env=env)
    [program] = leader.replicas
    assert program.is_healthy is not None
    assert "--headless" not in program.command
    follower = planned(*hosts, "--node-rank", "1", env=env)
    [program] = follower.replicas
    assert program.is_healthy is None
    assert program.command[4:] == [*hosts, "--node-rank", "1", "--headless"]
    assert program.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert follower.gateway is None
    again = planned(*hosts, "--node-rank", "1", "--headless", env=env)
    assert again.replicas[0].command.count("--headless") == 1
    with pytest.raises(ConfigError, match="with --nnodes there is only one replica"):
        planned(*hosts, "--node-rank", "0", "--replicas", "2", env=env)
