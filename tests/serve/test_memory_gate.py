"""The soft limit of memory: what it counts, when it rejects and admits again, and what clients see."""

import logging
from pathlib import Path

import grpc
import pytest

from apt_jax.frontend.streams import EngineClosedError
from serve.memory_gate import MemoryGate, cgroup_limit_bytes, resident_bytes
from tests.support.http_serving import HttpServed, run

GIB = 1 << 30


class Machine:
    """A process whose memory and time the test sets."""

    def __init__(self) -> None:
        self.used = 2 * GIB
        self.now_s = 0.0

    def gate(self, total: int | None = 10 * GIB) -> MemoryGate:
        return MemoryGate(total, used_bytes=lambda: self.used, clock=lambda: self.now_s)


def is_open(gate: MemoryGate) -> bool:
    try:
        gate.check()
    except EngineClosedError:
        return False
    return True


def test_it_is_closed_above_four_fifths_and_says_so_once_a_minute(caplog):
    machine = Machine()
    gate = machine.gate()
    gate.model_loaded()
    for second in range(130):
        machine.now_s, machine.used = float(second), (7 if second % 2 else 9) * GIB
        assert is_open(gate) == bool(second % 2)
    assert gate.num_rejected == 65
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 3
    assert "9216 MiB are used" in lines[0]
    assert "8192 MiB" in lines[0]


def test_where_the_model_takes_most_the_limit_is_halfway_to_all():
    machine = Machine()
    gate = machine.gate()
    machine.used = 9 * GIB
    gate.model_loaded()
    assert is_open(gate)
    machine.now_s, machine.used = 1.0, 9 * GIB + 600 * (1 << 20)
    assert not is_open(gate)


def test_without_a_limit_nothing_is_rejected():
    machine = Machine()
    gate = machine.gate(None)
    machine.used = 1 << 60
    gate.model_loaded()
    assert is_open(gate)


def test_the_limit_of_a_cgroup_or_of_one_around_it(tmp_path: Path):
    of = tmp_path / "cgroup"

    def limit(groups: str, **files: str) -> int | None:
        of.write_text(groups)
        root = tmp_path / "fs"
        for name, text in files.items():
            path = root / name.replace("__", "/").replace("_max", ".max").replace("limit_in", "memory.limit_in")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return cgroup_limit_bytes(root, of)

    assert limit("0::/a/b\n") is None
    assert limit("0::/a/b\n", a__b__memory_max="max\n") is None
    assert limit("0::/a/b\n", a__memory_max="1000\n") == 1000
    assert limit("0::/a/b\n", a__b__memory_max="500\n") == 500
    assert limit("3:cpu:/x\n2:memory:/y\n", memory__y__limit_in_bytes="700\n") == 700
    assert limit("2:memory:/z\n", memory__z__limit_in_bytes=str(2**63 - 4096)) is None
    assert cgroup_limit_bytes(tmp_path, tmp_path / "none") is None
    assert resident_bytes() > 10 << 20


def test_H6_new_calls_are_rejected_while_memory_is_short_and_streams_go_on():
    machine = Machine()
    gate = machine.gate()

    async def scenario(served: HttpServed) -> None:
        stream = served.grpc.generate("hello", max_tokens=30, temperature=0.0, ignore_eos=True)
        tokens = len((await anext(stream)).token_ids)
        machine.now_s, machine.used = 1.0, 9 * GIB
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/tokenize", {"prompt": "a"}),
        ):
            response = await served.post(path, body)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
            assert "short of memory" in response.text
            assert int(response.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(served.grpc.generate("hello", max_tokens=3))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await served.http.get("/health")).status_code == 200
        async for message in stream:
            tokens += len(message.token_ids)
        assert tokens == 30
        machine.now_s, machine.used = 2.0, 2 * GIB
        assert (await served.ask("after", max_tokens=3))["usage"]["completion_tokens"] == 3
        assert gate.num_rejected == 4

    run(scenario, app={"memory": gate}, grpc={"memory": gate}, step_s=0.01)


def test_the_gate_reads_memory_a_few_times_a_second():
    reads = []
    gate = MemoryGate(10 * GIB, used_bytes=lambda: reads.append(1) or GIB, clock=lambda: 0.1)
    for _ in range(100):
        gate.check()
    assert len(reads) == 1
