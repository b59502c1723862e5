"""One replica over two processes on this machine, as `apt-jax serve --nnodes 2` starts it: tokens, ends, deaths and
mistakes."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from apt_jax import LLM, SamplingParams
from apt_jax.request import StructuredOutputsParams
from serve import cli
from tests.support.small_models import write_byte_model

ROOT = Path(__file__).resolve().parents[2]
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
PROMPTS = ["Once upon a time", "the quick brown fox", "hello", "Once upon a time, again"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight heads in one layer, random weights."""
    sizes = {"num_attention_heads": 8, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96}
    return write_byte_model(tmp_path_factory.mktemp("model"), **sizes, max_position_embeddings=512)


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


WARM, COLD = "serve.cli", "tests.support.cold_serve"


class Rank:
    """A process of `apt-jax serve`."""

    def __init__(
        self,
        model: Path,
        rank: int,
        log: Path,
        port: int,
        *flags: str,
        devices: int,
        module: str = WARM,
        subcommand: str = "serve",
    ) -> None:
        self.log = log / f"rank{rank}.log"
        key = log / f"key{rank}"
        key.write_text("0123456789abcdef" * 2)
        key.chmod(0o600)
        of_rank = ["--headless"] if rank else [f"--grpc-port={port + 2}", f"--port={port + 3}"]
        command = [
            sys.executable, "-m", module, subcommand, str(model), "--load-format=dummy", "--nnodes=2", f"--node-rank={rank}",
            f"--master-port={port}", "--max-num-seqs=2", "--max-num-batched-tokens=32",
            "--calibration-time=0", "--served-model-name=small", "--set", "join_timeout=60", f"--join-key-file={key}", *of_rank, *flags,
        ]  # fmt: skip
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "XLA_FLAGS": QUICK,
            "APT_JAX_CACHE_DIR": str(model / "cache"),
        }
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def code(self, timeout_s: float = 30.0) -> int:
        """Exit code; no process may hang."""
        return self.process.wait(timeout_s)


class Replica:
    """Two ranks."""

    def __init__(self, model: Path, log: Path, *flags: str, devices: int = 1, **started: str) -> None:
        port = free_ports(4)
        self.base = f"http://127.0.0.1:{port + 3}"
        flags = (f"-tp={2 * devices}", *flags)
        self.ranks = [Rank(model, r, log, port, *flags, devices=devices, **started) for r in (0, 1)]

    def wait_until_it_serves(self) -> None:
        end_s = time.monotonic() + 240
        while "serving small" not in self.ranks[0].said:
            for rank in self.ranks:
                assert rank.process.poll() is None, rank.said
            assert time.monotonic() < end_s, self.ranks[0].said
            time.sleep(0.1)

    def complete(self, **fields: Any) -> Any:
        body = {
            "model": "small",
            "temperature": 0.0,
            "ignore_eos": True,
            "max_tokens": 16,
            "return_token_ids": True,
            **fields,
        }
        answer = httpx2.post(f"{self.base}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    def stream(self, **fields: Any) -> Iterator[Any]:
        """Events of a long completion, an error among them."""
        body = {"model": "small", "temperature": 0.0, "ignore_eos": True, "max_tokens": 400, "stream": True, **fields}
        url = f"{self.base}/v1/completions"
        with httpx2.stream("POST", url, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    def kill(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()


@contextlib.contextmanager
def replica(model: Path, log: Path, *flags: str, devices: int = 1, **started: str) -> Iterator[Replica]:
    made = Replica(model, log, *flags, devices=devices, **started)
    try:
        yield made
    finally:
        made.kill()


@pytest.mark.in_turn(2, group="several hosts")
@pytest.mark.parametrize("warm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_O8_two_processes_serve_what_one_serves_and_listen_on_no_open_interface(model, tmp_path, warm):
    """2 devices each. Then a rank is asked to end: open requests end as they should, and so do both."""
    sizes: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "num_blocks_override": 32,
        "max_model_len": 256,
    }
    llm = LLM(str(model), load_format="dummy", warm_up=False, **sizes)
    with replica(
        model,
        tmp_path,
        "--max-model-len=256",
        "--num-blocks-override=32",
        f"--calibration-time={int(warm)}",
        devices=2,
        module=WARM if warm else COLD,
    ) as served:
        served.wait_until_it_serves()
        connections = [c for rank in served.ranks for c in psutil.Process(rank.process.pid).net_connections("inet")]
        listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
        assert listening  # of the server, and of JAX's coordinator
        assert not listening & {"0.0.0.0", "::", "::ffff:0.0.0.0"}
        asks: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            *((p, {}, {}) for p in PROMPTS),
            *((p * 6, {"max_tokens": 24}, {"max_tokens": 24}) for p in PROMPTS),  # in chunks; the pool runs short
            ("hello", {"temperature": 1.0, "seed": 7}, {"temperature": 1.0, "seed": 7}),
            ("hello", {"temperature": 0.8, "top_p": 0.9, "seed": 8}, {"temperature": 0.8, "top_p": 0.9, "seed": 8}),
            ("hello", {"frequency_penalty": 1.5, "logprobs": 2}, {"frequency_penalty": 1.5, "logprobs": 2}),
            (
                "hello",
                {"structured_outputs": {"choice": ["yes", "maybe"]}, "ignore_eos": False},
                {"structured_outputs": StructuredOutputsParams(choice=["yes", "maybe"]), "ignore_eos": False},
            ),
        ]  # fmt: skip
        if not warm:  # each kind of step takes seconds to compile
            asks = [asks[0], *asks[6:8], asks[9]]
        expected = []
        for prompt, _, fields in asks:
            params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **fields})
            expected.append(llm.generate([prompt], params)[0].outputs[0])
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda ask: served.complete(prompt=ask[0], **ask[1]), asks))
        assert [a["token_ids"] for a in answers] == [list(e.token_ids) for e in expected]
        again = served.complete(prompt=PROMPTS[3] * 6, max_tokens=24)  # its prompt is cached
        [first] = (answer for answer, ask in zip(answers, asks, strict=True) if ask[0] == PROMPTS[3] * 6)
        assert again["token_ids"] == first["token_ids"]
        events = served.stream(prompt="hello", max_tokens=100)
        next(events)
        served.ranks[1].process.send_signal(signal.SIGTERM)
        *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        for rank in served.ranks:
            assert rank.code() == 0, rank.said
            assert "Traceback" not in rank.said


@pytest.mark.in_turn(2, group="several hosts")
@pytest.mark.parametrize("victim", [1, 0])
def test_D5_a_rank_that_is_killed_ends_the_other(model, tmp_path, victim):
    with replica(model, tmp_path, "--max-num-seqs=1", "--cache=kv", module=COLD) as served:
        served.wait_until_it_serves()
        events = served.stream(prompt="hello")
        next(events)
        served.ranks[victim].process.kill()
        killed_s = time.monotonic()
        other = served.ranks[1 - victim]
        if victim == 1:
            *_, last = events
            assert last["error"]["code"] == "unavailable"
            assert "another host of this replica was lost" in last["error"]["message"]
        else:
            with contextlib.suppress(httpx2.TransportError):
                list(events)
        code = other.code()
        assert time.monotonic() - killed_s < 30
        assert code != 0
        assert re.search(rf"rank {victim} .*has disconnected", other.said), other.said
        if victim == 1:
            assert code == 1


@pytest.mark.slow
def test_launchers_start_all_ranks_again_when_one_dies(model, tmp_path):
    with replica(model, tmp_path, "--max-num-seqs=2", "--cache=kv", subcommand="launch") as served:
        served.wait_until_it_serves()
        before = served.complete(prompt="hello")["token_ids"]
        first = served.ranks[0].said.count("serving small")
        launchers = [psutil.Process(rank.process.pid) for rank in served.ranks]
        (child,) = launchers[1].children()
        child.kill()
        end_s = time.monotonic() + 120
        while served.ranks[0].said.count("serving small") == first:
            assert time.monotonic() < end_s, served.ranks[0].said + served.ranks[1].said
            time.sleep(0.1)
        assert served.complete(prompt="hello")["token_ids"] == before
        served.ranks[0].process.send_signal(signal.SIGTERM)
        served.ranks[1].process.send_signal(signal.SIGTERM)
        assert [rank.code() for rank in served.ranks] == [0, 0], served.ranks[1].said
    assert not any(launcher.is_running() for launcher in launchers)


@pytest.mark.in_turn(2, group="several hosts")
@pytest.mark.parametrize(
    ("flags", "devices", "says"),
    [
        (["--dtype=bfloat16"], 1, "has dtype 'bfloat16', rank 0 has 'auto'; give all ranks the same flags"),
        ([], 0, "needs 2 devices on each host, but rank 1 has 1 (-tp, --nnodes)"),
        pytest.param(
            ["--tokenizer=none", "--load-format=safetensors"],
            2,
            "has load_format 'safetensors'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_that_do_not_fit(model, tmp_path, flags, devices, says):
    port = free_ports(4)
    first = Rank(model, 0, tmp_path, port, "-tp=4", devices=2)
    second = Rank(model, 1, tmp_path, port, "-tp=4", *flags, devices=devices or 1)
    for rank in (first, second):
        try:
            assert rank.code(90) != 0, rank.said
        finally:
            rank.process.kill()
        assert says in rank.said.splitlines()[-1]
        assert "Traceback" not in rank.said


@pytest.mark.in_turn(2, group="several hosts")
def test_a_model_that_one_rank_cannot_load(model, tmp_path):
    """A failure after the ranks have joined is reported to the other rank."""
    port = free_ports(4)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((model / "config.json").read_text())
    (other / "tokenizer.json").write_text("{}")
    first = Rank(other, 0, tmp_path, port, "-tp=2", devices=1)
    second = Rank(model, 1, tmp_path, port, "-tp=2", devices=1)
    for rank in (first, second):
        try:
            assert rank.code(90) != 0, rank.said
        finally:
            rank.process.kill()
        assert "tokenizer.json" in rank.said.splitlines()[-1], rank.said
        assert "Traceback" not in rank.said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nnodes=2", "-tp=3"], "must be a multiple of nnodes=2 (-tp, --nnodes)"),
        (["--nnodes=2", "--node-rank=2", "-tp=2", "--headless"], "node_rank=2 must lie in [0, 2)"),
        (["--nnodes=2", "--node-rank=1", "-tp=2"], "node_rank=1 serves nothing: add --headless"),
        (["--nnodes=2", "-tp=2", "--headless"], "node_rank=0 serves: leave out --headless"),
        (["--headless"], "node_rank=0 serves: leave out --headless"),
        (["--nnodes=0"], "nnodes=0 must be at least 1 (--nnodes)"),
        (["--nnodes=2", "-tp=2", "--master-port=65535"], "master_port=65535 must lie in"),
        (["--nnodes=2", "-tp=2", "--master-addr="], "master_addr must not be empty"),
        (
            ["--nnodes=2", "-tp=2", "--master-addr=192.0.2.1"],
            "other machines may reach 192.0.2.1; give all ranks the same key (--join-key-file)",
        ),
        (
            ["--nnodes=2", "-tp=2", "--join-key-file=/no/key"],
            "/no/key: cannot be read (No such file or directory) (--join-key-file)",
        ),
        (["--nnodes=16", "-tp=16"], "tensor_parallel_size=16 does not divide this model (8 query heads"),
    ],
)
def test_flags_that_cannot_be(model, flags, says, monkeypatch, capsys):
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)  # as ranks of several hosts end
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main(["serve", str(model), "--load-format=dummy", "--port=0", "--grpc-port=0", *flags]))
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err
