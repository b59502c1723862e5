"""Rendezvous of ranks and detection of lost ones; JAX is not joined here (tests/serve/test_several_hosts.py)."""

import contextlib
import dataclasses
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from apt_jax import distributed
from apt_jax.config import EngineConfig, ParallelConfig, SchedulerConfig
from apt_jax.distributed import rendezvous, settings, transport
from apt_jax.distributed.authentication import JoinKey, check_rank
from apt_jax.distributed.hosts import Follower, Hosts, Leader
from apt_jax.distributed.messages import Plan
from apt_jax.distributed.rendezvous import join
from apt_jax.errors import ConfigError, HostError
from apt_jax.frontend.builder import all_hosts
from apt_jax.models import resolve_model
from apt_jax.models.config import ModelConfig

MODEL = ModelConfig(
    family="test", vocab_size=97, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8, ffn_size=96, max_position=128
)  # fmt: skip
RESOLVED = resolve_model("tiny-opt")
ARRAYS = st.none() | st_np.arrays(np.int32, st_np.array_shapes(min_dims=1, max_dims=3, min_side=0))


@given(
    arrays=st.lists(ARRAYS, max_size=4),
    static=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.tuples(st.booleans())),
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
    data = Plan(program="sample", arrays=[array, None, np.arange(3, dtype=np.int32)], static={}).encode()
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
def start_ranks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], Ranks]]:
    """Makes the ranks of one more replica, with ports of its own."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    caplog.set_level(logging.INFO, "apt_jax.distributed")
    replicas: list[Ranks] = []

    def start() -> Ranks:
        ranks = Ranks()
        while any(abs(ranks.port - other.port) < 2 for other in replicas):
            ranks = Ranks()
        replicas.append(ranks)
        return ranks

    yield start
    for joined in (joined for ranks in replicas for joined in ranks.ended().values()):
        if isinstance(joined, Hosts):
            joined.close()


@pytest.fixture
def ranks(start_ranks: Callable[[], Ranks]) -> Ranks:
    return start_ranks()


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
    """Return a check of the log for the line that the rank has joined."""
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


def test_D5_a_rank_that_ends_is_noticed_by_all(ranks):
    for rank in range(3):
        ranks.start(rank, nnodes=3)
    joined = ranks.ended()
    joined[2].close()
    until(lambda: {0, 1} <= ranks.lost.keys())
    assert ranks.lost[0] == ranks.lost[1]
    assert ranks.lost[0].startswith("rank 2 (")
    assert ranks.lost[0].endswith("has disconnected")


def test_an_error_of_one_rank_is_the_last_word_of_all(ranks):
    _, follower = pair(ranks)
    with pytest.raises(ValueError, match="no such file"), follower.propagate_errors():
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
        ({"dtype": "bfloat16"}, "has dtype 'bfloat16', rank 0 has 'auto'; give all ranks the same flags"),
        (
            {"scheduler": SchedulerConfig(max_num_seqs=8)},
            "has max_num_seqs 8, rank 0 has 64; give all ranks the same flags",
        ),
        (
            {"model": dataclasses.replace(MODEL, num_layers=3)},
            "has the model's num_layers 3, rank 0 has 2; give all ranks the same model",
        ),
        ({"nnodes": 4}, "has tensor_parallel_size 4, rank 0 has 3; give all ranks the same flags"),
    ],
)
def test_a_rank_with_other_flags_or_another_model(ranks, caplog, other, says):
    fields = {"nnodes": 3, **other}
    model = fields.pop("model", MODEL)
    ranks.start(0, nnodes=3)
    until(lambda: _listens(ranks.port))
    ranks.start(2, nnodes=3)  # it waits for the others, and is told why they do not come
    until(has_joined(caplog, 2))
    ranks.start(1, model, **fields)
    assert {type(error) for error in ranks.ended().values()} == {HostError}  # a restart may help, unlike ConfigError
    said = {rank: str(error) for rank, error in ranks.ended().items()}
    assert len(said) == 3
    assert len(set(said.values())) == 1
    assert said[0].startswith("rank 1 (")
    assert says in said[0]


def _listens(port: int) -> bool:
    # Neither by a connection, which would be one that is no rank, nor by taking the port, which rank 0 may then find taken.
    return any(c.status == psutil.CONN_LISTEN and port in c.laddr for c in psutil.net_connections("tcp"))


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
        assert isinstance(error, HostError)
        assert f"has version of {what} 9.9, rank 0 has " in str(error)
        assert "install the same version on all hosts" in str(error)


def test_a_host_that_never_appears(ranks):
    ranks.start(0, nnodes=3, timeout_s=1.0)
    ranks.start(1, nnodes=3, timeout_s=1.0)
    for error in ranks.ended().values():
        assert isinstance(error, HostError)
        assert str(error).startswith(f"rank 2 of 3 did not join at 127.0.0.1:{ranks.port} within 1 s; ")
        assert "--set join_timeout" in str(error)


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
    parallel = ParallelConfig(
        nnodes=2, tensor_parallel_size=2, master_addr="192.0.2.1", master_port=ranks.port, join_key_file=key
    )
    with pytest.raises(ConfigError, match=r"rank 0 cannot listen on 192\.0\.2\.1"):
        join(EngineConfig(model="x", parallel=parallel), MODEL, RESOLVED)


def test_a_name_that_is_loopback_here(ranks, key, monkeypatch):
    create = socket.create_server
    monkeypatch.setattr(
        rendezvous.socket, "create_server", lambda address, **kw: create(("127.0.0.1", address[1]), **kw)
    )
    parallel = ParallelConfig(
        nnodes=2, tensor_parallel_size=2, master_addr="host0", master_port=ranks.port, join_key_file=key
    )
    with pytest.raises(ConfigError, match=r"host0 is 127\.0\.0\.1 on this host, which other hosts cannot reach"):
        join(EngineConfig(model="x", parallel=parallel), MODEL, RESOLVED)


def test_two_processes_that_are_the_same_rank(ranks, caplog):
    ranks.start(0, nnodes=3)
    until(lambda: _listens(ranks.port))
    ranks.start(1, nnodes=3)
    until(has_joined(caplog, 1))
    ranks.start(1, nnodes=3, name="twin")
    until(lambda: "twin" in ranks.results)
    assert "node_rank=1 is not available: another process has it (--node-rank)" in str(ranks.results["twin"])
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


def test_rank_0_goes_while_others_are_awaited(ranks):
    def accept(stream: transport.Stream) -> None:
        check_rank(stream, None)
        stream.expect("introduction")

    server = transport.listen("127.0.0.1", ranks.port, 2, accept)
    ranks.start(1, nnodes=3)
    (error,) = ranks.ended().values()
    server.stop(0)
    assert isinstance(error, HostError)
    assert "has disconnected before all ranks had joined" in str(error)


@pytest.mark.parametrize("said", [b"", b"220 mail ready, and more than enough for a frame\r\n"])
def test_a_port_of_something_else(ranks, said):
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
    assert "is not apt-jax" in str(error)


# --- strangers and the join key --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"h\xff\xff\xff\x7f", b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 999]
)
def test_strangers_at_the_port_do_no_harm(ranks, said):
    ranks.start(0)
    until(lambda: _listens(ranks.port))
    stranger = socket.create_connection(("127.0.0.1", ranks.port))
    stranger.sendall(said)
    stranger.shutdown(socket.SHUT_WR)
    ranks.start(1)
    joined = ranks.ended()
    assert isinstance(joined[0], Leader)
    assert isinstance(joined[1], Follower)
    stranger.close()


INTRODUCTION = {"rank": 1, "host": "evil", "settings": {"version of apt-jax": "0"}}
NONCE = {"nonce": bytes(32)}


@pytest.mark.parametrize(
    "said",
    [
        [{"introduction": INTRODUCTION}],
        [{"hello": NONCE}, {"introduction": INTRODUCTION}],
        [{"hello": NONCE}, {"proof": {"mac": bytes(32)}}, {"introduction": INTRODUCTION}],
        [{"hello": {"nonce": b"short"}}, {"proof": {}}, {"introduction": INTRODUCTION}],
        [{"failed": {"reason": "go away"}}],
        [{"drain": {}}],
        [b"\xff\xff no message"],
        [{"introduction": {**INTRODUCTION, "host": "x" * transport.MAX_FROM_RANK}}],
    ],
    ids=["introduction alone", "no proof", "wrong proof", "short nonce", "failed", "drain", "garbage", "too large"],
)
def test_an_unauthenticated_message_ends_no_rank_and_learns_nothing(ranks, key, caplog, said):
    ranks.start(0, key=key)
    until(lambda: _listens(ranks.port))
    stranger, close = transport.connect("127.0.0.1", ranks.port, "rank 0")
    with contextlib.suppress(transport.StreamError):
        for message in said:
            if isinstance(message, bytes):
                stranger.send_encoded(message)
            else:
                stranger.send(**message)
    answers = []
    with contextlib.suppress(transport.StreamError):
        answers += [str(answer) for answer in stranger]
    close()
    until(lambda: "connected to --master-port and was rejected" in caplog.text)
    assert not any(word in "".join(answers) for word in ("version", "dtype", "accepted", "failed"))
    assert ranks.results == {}
    ranks.start(1, key=key)
    joined = ranks.ended()
    assert isinstance(joined[0], Leader), joined
    assert isinstance(joined[1], Follower), joined
    assert ranks.lost == {}


def test_silent_connections_hold_no_rank_up_for_long(ranks, key, monkeypatch):
    """Only so many connections are read at a time, each for a limited time."""
    monkeypatch.setattr(transport, "HELLO_S", 1.0)
    ranks.start(0, key=key)
    until(lambda: _listens(ranks.port))
    silent = [socket.create_connection(("127.0.0.1", ranks.port)) for _ in range(20)]
    strangers = [transport.connect("127.0.0.1", ranks.port, "rank 0") for _ in range(transport.MAX_HELLOS + 5)]
    errors = []
    ranks.start(1, key=key)
    for stranger, close in strangers:
        with pytest.raises(transport.StreamError) as caught:
            stranger.expect("challenge")
        errors.append(caught.value.is_busy)
        close()
    assert 3 <= sum(errors) <= 6  # 17 streams at once, rank 1's among them or not
    joined = ranks.ended()
    assert isinstance(joined[0], Leader), joined
    assert isinstance(joined[1], Follower), joined
    for stranger in silent:
        stranger.close()


@pytest.mark.parametrize(
    ("leaders", "ranks_", "says"),
    [
        (True, "x" * 32, "rank 0 has another join key; give all ranks the same key (--join-key-file)"),
        (True, None, "this rank has no join key, and rank 0 has one; give all ranks the same key (--join-key-file)"),
        (
            False,
            "x" * 32,
            "rank 0 has no join key, and this rank has one; give all ranks the same key (--join-key-file)",
        ),
    ],
)
def test_a_rank_with_another_key_or_none(ranks, key, tmp_path, caplog, leaders, ranks_, says):
    key = key if leaders else None
    ranks.start(0, key=key)
    until(lambda: _listens(ranks.port))
    ranks.start(1, name="wrong", key=ranks_ and key_file(tmp_path / "other", ranks_))
    until(lambda: "wrong" in ranks.results)
    assert isinstance(ranks.results["wrong"], HostError)  # the other side said so: no error of usage
    assert str(ranks.results["wrong"]) == says
    assert 0 not in ranks.results
    ranks.start(1, key=key)
    joined = ranks.ended()
    assert isinstance(joined[0], Leader), joined
    assert isinstance(joined[1], Follower), joined
    assert "x" * 32 not in caplog.text
    assert "k" * 32 not in caplog.text


@pytest.mark.parametrize(
    ("rank_key", "said"),
    [
        (True, [{"refused": {"reason": "go away"}}]),
        (True, [{"challenge": {"nonce": bytes(32), "keyed": False}}]),
        (True, [{"challenge": {"nonce": bytes(32), "keyed": True}}, {"refused": {"reason": "go away"}}]),
        (True, [{"challenge": {"nonce": bytes(32), "keyed": True}}, {"accepted": {"mac": bytes(32)}}]),
        (True, [{"welcome": {}}]),
        (False, [{"challenge": {"keyed": True}}]),
        (False, [{"challenge": {}}, {"accepted": {}}, {"refused": {"reason": "go away"}}]),
        (False, [{"challenge": {}}, {"accepted": {}}, {"failed": {"reason": "go away"}}]),
    ],
)
def test_nothing_that_rank_0_says_is_an_error_of_usage(ranks, key, rank_key, said):
    """A supervisor does not restart what ends with an error of usage, which is `ConfigError`."""

    def pretend(stream: transport.Stream) -> None:
        with contextlib.suppress(transport.StreamError):
            for message in said:
                stream.expect("hello", "proof", "introduction")
                stream.send(**message)

    server = transport.listen("127.0.0.1", ranks.port, 1, pretend)
    ranks.start(1, key=key if rank_key else None)
    (error,) = ranks.ended().values()
    server.stop(0)
    assert isinstance(error, HostError), error
    assert not isinstance(error, ConfigError)


def test_O8_the_coordinator_of_jax_is_bound_to_the_given_address(ranks, monkeypatch):
    """By default it listens on all addresses of the host."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    pair(ranks)
    assert sorted(args for args, _ in calls) == [(f"127.0.0.1:{ranks.port + 1}", 2, rank) for rank in (0, 1)]
    assert {kwargs["coordinator_bind_address"] for _, kwargs in calls} == {f"127.0.0.1:{ranks.port + 1}"}


@pytest.mark.parametrize("devices", [1, 2])
def test_O8_one_host_has_no_coordinator(monkeypatch, devices):
    def unexpected(*_: Any, **__: Any) -> None:
        raise AssertionError("JAX's coordinator is for several hosts")

    monkeypatch.setattr(jax.distributed, "initialize", unexpected)
    monkeypatch.setattr(rendezvous, "join", unexpected)
    ours = ParallelConfig(tensor_parallel_size=devices)
    with all_hosts(EngineConfig(model="tiny-opt", parallel=ours)) as hosts:
        assert hosts is None


def test_a_rank_0_that_does_not_have_the_key(key):
    """It is told neither settings nor the key."""
    ours, heard = config(1, free_ports(), key=key).parallel, []

    def pretend(stream: transport.Stream) -> None:
        heard.append(stream.expect("hello"))
        stream.send(challenge={"nonce": bytes(32), "keyed": True})
        heard.append(stream.expect("proof"))
        stream.send(accepted={"mac": bytes(32)})
        with contextlib.suppress(transport.StreamError):
            heard.extend(stream)

    server = transport.listen("127.0.0.1", ours.master_port, 1, pretend)
    with pytest.raises(HostError, match="does not have the join key of this rank"):
        rendezvous.connect(ours, {"secret": "setting"}, JoinKey.load(key))
    server.stop(0)
    assert [message.WhichOneof("kind") for message in heard] == ["hello", "proof"]
    assert b"k" * 32 not in b"".join(message.SerializeToString() for message in heard)


def test_nobody_listens_once_all_have_joined(ranks):
    leader, follower = pair(ranks)
    until(lambda: not _listens(ranks.port))
    leader.announce(Plan(program="copy", arrays=[None], static={}))
    assert next(follower.plans()).program == "copy"


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("k" * 31, 0o600, "must hold one line of 32 to 4096 bytes"),
        ("k" * 40 + "\n" + "k" * 40, 0o600, "must hold one line of 32 to 4096 bytes"),
        ("k" * 5000, 0o600, "must hold one line of 32 to 4096 bytes"),
        ("k" * 40, 0o604, "every user of this machine can read or write it; chmod 600 it"),
        (None, 0, "cannot be read (No such file or directory)"),
    ],
)
def test_files_that_hold_no_key(tmp_path, text, mode, says):
    path = str(tmp_path / "none") if text is None else key_file(tmp_path / "key", text, mode)
    with pytest.raises(ConfigError) as caught:
        JoinKey.load(path)
    assert says in str(caught.value)
    assert str(caught.value).endswith("(--join-key-file)")
    assert "kkkk" not in str(caught.value)


def test_the_key_is_in_no_representation(key):
    assert "kkkk" not in repr(JoinKey.load(key)) + repr(config(1, 29501, key=key))


def test_an_address_that_others_reach_needs_a_key(ranks):
    for rank in (0, 1):
        parallel = ParallelConfig(
            nnodes=2, tensor_parallel_size=2, node_rank=rank, master_addr="192.0.2.1", master_port=ranks.port
        )
        with pytest.raises(
            ConfigError, match=r"other machines may reach 192\.0\.2\.1; give all ranks the same key \(--join-key-file\)"
        ):
            join(EngineConfig(model="x", parallel=parallel), MODEL, RESOLVED)


def test_where_grpcio_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "apt_jax.distributed.transport", None)
    monkeypatch.delattr(distributed, "transport")
    with pytest.raises(
        ConfigError, match=r"several hosts need grpcio and protobuf: pip install 'apt-jax\[serve\]' \(--nnodes\)"
    ):
        join(config(0, 29501), MODEL, RESOLVED)


# --- ranks that stop answering
# ------------------------------------------------------------------------------------------

RANKS = """
import sys, threading, time
import jax
from apt_jax.distributed import transport
from apt_jax.config import EngineConfig, ParallelConfig
from apt_jax.distributed.rendezvous import join
from apt_jax.models.config import ModelConfig
from apt_jax.models import resolve_model
transport.SILENCE_S = float(sys.argv[1])
jax.distributed.initialize = lambda *_, **__: None
model = ModelConfig(
    family="test", vocab_size=97, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8, ffn_size=96, max_position=128
)
joined = []
def run(rank, port):
    ours = ParallelConfig(tensor_parallel_size=2, nnodes=2, node_rank=rank, master_port=port, join_timeout_s=60)
    joined.append(join(EngineConfig(model="tiny-opt", parallel=ours), model, resolve_model("tiny-opt")))
for rank, port in enumerate(sys.argv[2:]):
    threading.Thread(target=run, args=(rank, int(port))).start()
time.sleep(600)
"""


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_D5_a_process_that_stops_or_dies_is_noticed(start_ranks, monkeypatch, how):
    """A stopped one by gRPC's keepalive: its kernel still acknowledges what it is sent.

    The process is rank 0 of one replica and rank 1 of another; their other ranks are here.
    """
    monkeypatch.setattr(transport, "SILENCE_S", 3.0)
    replicas = [start_ranks(), start_ranks()]
    command = [sys.executable, "-c", RANKS, "3", *(str(ranks.port) for ranks in replicas)]
    with subprocess.Popen(command) as process:
        try:
            for victim, ranks in enumerate(replicas):
                ranks.start(1 - victim, timeout_s=60)
            for victim, ranks in enumerate(replicas):
                until(lambda victim=victim, ranks=ranks: 1 - victim in ranks.results, 60)
                assert isinstance(ranks.results[1 - victim], Hosts), ranks.results
            if how is signal.SIGSTOP:
                time.sleep(4.0)
            assert [ranks.lost for ranks in replicas] == [{}, {}]  # it answers
            process.send_signal(how)
            stopped_s = time.monotonic()
            until(lambda: all(ranks.lost for ranks in replicas), 10)
            took_s = time.monotonic() - stopped_s
        finally:
            process.kill()
    assert took_s < (5.0 if how is signal.SIGSTOP else 1.5)
    what = "has disconnected" if how is signal.SIGKILL else "has not answered for 3 s"
    assert replicas[0].lost[1].endswith(f"rank 0 at 127.0.0.1:{replicas[0].port} {what}")
    assert replicas[1].lost[0].endswith("has not answered for 3 s or has disconnected")


def test_weights_of_the_same_shape_are_told_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode() * 10_000)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.safetensors").write_bytes(b"a" * 10_000)
    a, b, c = (settings.fingerprint(tmp_path / name) for name in "abc")
    assert a == c
    assert a != b
