"""How ranks meet, and how they notice that another one is gone; JAX is not joined here (tests/serve/test_several_hosts.py)."""

import contextlib
import dataclasses
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from apt_jax.config import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from apt_jax.distributed import rendezvous, settings, transport
from apt_jax.distributed.authentication import JoinKey
from apt_jax.distributed.protos import ranks_pb2 as pb
from apt_jax.errors import ConfigError
from apt_jax.hosts import Follower, HostError, Hosts, Leader, Plan, join
from apt_jax.models import resolve_model

MODEL = ModelConfig(
    family="test", vocab_size=97, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8, ffn_size=96, max_position=128
)  # fmt: skip
RESOLVED = resolve_model("tiny-opt")
ARRAYS = st.none() | st_np.arrays(np.int32, st_np.array_shapes(min_dims=1, max_dims=3, min_side=0))


@given(
    arrays=st.lists(ARRAYS, max_size=4),
    static=st.dictionaries(
        st.text(max_size=5), st.integers() | st.text(max_size=5) | st.tuples(st.booleans())
    ),
)
def test_a_plan_arrives_as_it_was(arrays, static):
    plan = Plan(program="forward", arrays=arrays, static=static)
    came = Plan.decode(plan.encode())
    assert (came.program, came.static) == (plan.program, plan.static)
    assert len(came.arrays) == len(arrays)
    for a, b in zip(arrays, came.arrays, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert b.dtype == np.int32
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(70_000,), (3, 30_000), (1 << 17,)])
def test_large_arrays_travel_without_their_empty_pieces(shape):
    array = np.zeros(shape, np.int32)
    array.reshape(-1)[[5, 1500, -1]] = 7, -1, 3
    data = Plan(program="sample", arrays=[array, None, np.arange(3, dtype=np.int32)], static={}).encode()  # fmt: skip
    assert len(data) < 4 * 3 * 1024 + 500
    came = Plan.decode(data).arrays
    assert came[1] is None
    np.testing.assert_array_equal(np.asarray(came[0]), array)
    np.testing.assert_array_equal(np.asarray(came[2]), [0, 1, 2])


def free_ports() -> int:
    """A port that is free, and the one after it too."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


def config(
    rank: int, port: int, nnodes: int = 2, timeout_s: float = 20.0, key: str | None = None, **fields: Any
) -> EngineConfig:
    ours = ParallelConfig(
        tensor_parallel_size=nnodes, nnodes=nnodes, node_rank=rank, master_port=port, join_timeout_s=timeout_s, join_key_file=key
    )  # fmt: skip
    return EngineConfig(model="tiny-opt", parallel=ours, **fields)


class Ranks:
    """Ranks of one replica, each in a thread of this process.

    Attributes:
        lost: what each rank was told of a rank that is gone.
    """

    def __init__(self) -> None:
        self.port = free_ports()
        self.results: dict[int, Any] = {}
        self.lost: dict[int, str] = {}
        self._threads: list[threading.Thread] = []

    def start(self, rank: int, model: ModelConfig = MODEL, name: Any = None, **fields: Any) -> None:
        def run() -> None:
            try:
                joined = join(config(rank, self.port, **fields), model, RESOLVED)
                joined.on_lost = lambda reason: self.lost.__setitem__(key, reason)
                self.results[key] = joined
            except BaseException as error:
                self.results[key] = error

        key = rank if name is None else name
        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def ended(self) -> dict[int, Any]:
        for thread in self._threads:
            thread.join(30)
        return self.results


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Ranks]:
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    caplog.set_level(logging.INFO, "apt_jax.distributed")
    ranks = Ranks()
    yield ranks
    for joined in ranks.ended().values():
        if isinstance(joined, Hosts):
            joined.close()


@pytest.fixture
def key(tmp_path: Path) -> str:
    """A file with a join key."""
    return key_file(tmp_path / "key", "k" * 32)


def key_file(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text + "\n")
    path.chmod(mode)
    return str(path)


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def has_joined(caplog: pytest.LogCaptureFixture, rank: int) -> Callable[[], Any]:
    """Whether rank 0 has said that it did."""
    return lambda: re.search(rf"rank {rank} \(.*\) joined", caplog.text)


def pair(ranks: Ranks) -> tuple[Leader, Follower]:
    ranks.start(0)
    ranks.start(1)
    joined = ranks.ended()
    assert isinstance(joined[0], Leader), joined[0]
    assert isinstance(joined[1], Follower), joined[1]
    return joined[0], joined[1]


def test_plans_arrive_in_their_order_until_the_end(ranks):
    leader, follower = pair(ranks)
    for number in range(10):
        leader.announce(Plan(program="copy", arrays=[np.full((2, 2), number, np.int32)], static={}))
    plans = follower.plans()
    for number in range(10):
        (array,) = next(plans).arrays
        assert array is not None
        assert array.tolist() == [[number] * 2] * 2
    leader.end()
    assert list(plans) == []
    assert ranks.lost == {}


def test_a_rank_that_ends_is_noticed_by_all(ranks):
    for rank in range(3):
        ranks.start(rank, nnodes=3)
    joined = ranks.ended()
    joined[2].close()
    until(lambda: {0, 1} <= ranks.lost.keys())
    assert ranks.lost[0] == ranks.lost[1]
    assert ranks.lost[0].startswith("rank 2 (")
    assert ranks.lost[0].endswith("has ended")


def test_an_error_of_one_rank_is_the_last_word_of_all(ranks):
    _, follower = pair(ranks)
    with pytest.raises(ValueError, match="no such file"), follower.telling():
        raise ValueError("no such file\nor directory")
    until(lambda: 0 in ranks.lost)
    assert ranks.lost[0] == f"rank 1 ({socket.gethostname()}): no such file or directory"


def test_rank_0_is_told_when_another_is_asked_to_end(ranks):
    leader, follower = pair(ranks)
    asked = threading.Event()
    leader.on_drain = asked.set
    follower.ask_to_drain()
    assert asked.wait(10)


# --- those that cannot work together -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"dtype": "bfloat16"}, "has dtype 'bfloat16', rank 0 has 'float32'; give all ranks the same flags"),
        ({"scheduler": SchedulerConfig(max_num_seqs=8)}, "has max_num_seqs 8, rank 0 has 64; give all ranks the same flags"),
        ({"model": dataclasses.replace(MODEL, num_layers=3)}, "has the model's num_layers 3, rank 0 has 2; give all ranks the same model"),
        ({"nnodes": 4}, "has tensor_parallel_size 4, rank 0 has 3; give all ranks the same flags"),
    ],
)  # fmt: skip
def test_a_rank_with_other_flags_or_another_model(ranks, caplog, other, says):
    fields = {"nnodes": 3, **other}
    model = fields.pop("model", MODEL)
    ranks.start(0, nnodes=3)
    until(lambda: _listens(ranks.port))
    ranks.start(2, nnodes=3)  # it waits for the others, and is told why they do not come
    until(has_joined(caplog, 2))
    ranks.start(1, model, **fields)
    said = {rank: str(error) for rank, error in ranks.ended().items()}
    assert len(said) == 3
    assert len(set(said.values())) == 1
    assert said[0].startswith("rank 1 (")
    assert says in said[0]


def _listens(port: int) -> bool:
    # Not by a connection, which would be one that is no rank.
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return False
    return True


@pytest.mark.parametrize("what", ["apt-jax", "jax", "jaxlib"])
def test_a_rank_of_another_version(ranks, monkeypatch, what):
    settings_of = settings.settings_of

    def theirs(config: EngineConfig, *rest: Any) -> dict[str, str]:
        found = settings_of(config, *rest)
        if config.parallel.node_rank == 1:
            found[f"version of {what}"] = "9.9"
        return found

    monkeypatch.setattr(rendezvous, "settings_of", theirs)
    ranks.start(0)
    ranks.start(1)
    for error in ranks.ended().values():
        assert isinstance(error, ConfigError)
        assert f"has version of {what} 9.9, rank 0 has " in str(error)
        assert "install the same on all hosts" in str(error)


def test_a_host_that_never_appears(ranks):
    ranks.start(0, nnodes=3, timeout_s=1.0)
    ranks.start(1, nnodes=3, timeout_s=1.0)
    for error in ranks.ended().values():
        assert isinstance(error, HostError)
        assert str(error).startswith(
            f"rank 2 of 3 did not join at 127.0.0.1:{ranks.port} within 1 s; "
        )
        assert "--join-timeout" in str(error)


def test_rank_0_never_appears(ranks):
    ranks.start(1, timeout_s=0.6)
    (error,) = ranks.ended().values()
    assert isinstance(error, HostError)
    assert "rank 1 cannot reach rank 0 at" in str(error)
    assert "Connection refused" in str(error)


def test_a_port_in_use(ranks):
    for taken in (ranks.port, ranks.port + 1):
        with socket.create_server(("127.0.0.1", taken)):
            ranks.start(0)
            error = ranks.ended()[0]
        assert isinstance(error, ConfigError)
        assert f"rank 0 cannot listen on 127.0.0.1:{taken}: Address already in use" in str(error)


def test_an_address_of_another_host(ranks, key):
    parallel = ParallelConfig(nnodes=2, tensor_parallel_size=2, master_addr="192.0.2.1", master_port=ranks.port, join_key_file=key)  # fmt: skip
    with pytest.raises(ConfigError, match=r"rank 0 cannot listen on 192\.0\.2\.1"):
        join(EngineConfig(model="x", parallel=parallel), MODEL, RESOLVED)


def test_a_name_that_is_loopback_here(ranks, key, monkeypatch):
    create = socket.create_server
    monkeypatch.setattr(rendezvous.socket, "create_server", lambda address, **kw: create(("127.0.0.1", address[1]), **kw))  # fmt: skip
    parallel = ParallelConfig(nnodes=2, tensor_parallel_size=2, master_addr="host0", master_port=ranks.port, join_key_file=key)  # fmt: skip
    with pytest.raises(ConfigError, match=r"host0 is 127\.0\.0\.1 on this host, where no other can reach it"):  # fmt: skip
        join(EngineConfig(model="x", parallel=parallel), MODEL, RESOLVED)


def test_two_processes_that_are_the_same_rank(ranks, caplog):
    ranks.start(0, nnodes=3)
    until(lambda: _listens(ranks.port))
    ranks.start(1, nnodes=3)
    until(has_joined(caplog, 1))
    ranks.start(1, nnodes=3, name="twin")
    until(lambda: "twin" in ranks.results)
    assert "node_rank=1 is not free: another process is that rank (--node-rank)" in str(ranks.results["twin"])  # fmt: skip
    ranks.start(2, nnodes=3)  # nobody else is harmed
    there = ranks.ended()
    assert isinstance(there[0], Leader)
    assert isinstance(there[1], Follower)
    assert isinstance(there[2], Follower)


def test_a_rank_that_goes_while_others_are_awaited_can_come_back(ranks, caplog):
    ranks.start(0, nnodes=3)
    until(lambda: _listens(ranks.port))
    ours = config(1, ranks.port, 3)
    first = rendezvous.connect(ours.parallel, settings.settings_of(ours, MODEL, RESOLVED), None)
    until(has_joined(caplog, 1))
    first.close()
    until(lambda: "its place is free again" in caplog.text)
    ranks.start(1, nnodes=3)
    ranks.start(2, nnodes=3)
    joined = ranks.ended()
    assert isinstance(joined[0], Leader), joined
    assert isinstance(joined[1], Follower), joined
    assert ranks.lost == {}


@pytest.mark.parametrize("said", [b"", b"220 mail ready, and more than enough for a frame\r\n"])
def test_a_port_of_something_else(ranks, said):
    """Or rank 0 goes while others are awaited."""
    with socket.create_server(("127.0.0.1", ranks.port)) as server:
        ranks.start(1)
        while 1 not in ranks.results:
            server.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(said)
        (error,) = ranks.ended().values()
    assert isinstance(error, HostError)
    assert "has ended before all ranks had joined, or is no apt-jax" in str(error)


def test_weights_of_the_same_shape_are_told_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode() * 10_000)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.safetensors").write_bytes(b"a" * 10_000)
    a, b, c = (settings.fingerprint(tmp_path / name) for name in "abc")
    assert a == c
    assert a != b
