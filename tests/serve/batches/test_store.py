"""Files and outcomes on disk: what a crash leaves, a full disk, two servers, bounds."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from apt_jax.errors import ConfigError
from serve.batches.calls import EXPIRED, failed_outcome
from serve.batches.config import BatchConfig
from serve.batches.records import BatchRecord, FileRecord, Outcome, RequestLine, new_id
from serve.batches.store import BatchStore, DiskFullError, InUseError, NotFoundError


@pytest.fixture
def opened():
    """Stores that are closed at the end."""
    stores: list[BatchStore] = []
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def open_store(tmp_path, opened):
    """`open_store(path=..., **bounds)`."""

    def make(path: Path = tmp_path / "batches", **bounds: Any) -> BatchStore:
        opened.append(BatchStore(BatchConfig(directory=path, **bounds)))
        return opened[-1]

    return make


def add_file(store: BatchStore, data: bytes, tenant: str = "") -> FileRecord:
    path = store.files_dir / new_id("new-")
    path.write_bytes(data)
    record = FileRecord(id=new_id("file-"), tenant=tenant, purpose="batch", filename="f", bytes=len(data), created_at=1)
    store.add_file(record, path)
    return record


def add_batch(store: BatchStore, num: int = 5, tenant: str = "") -> tuple[BatchRecord, list[RequestLine]]:
    """A batch that runs, of `num` requests, whose lines are their numbers."""
    data = b"".join(b"%06d\n" % i for i in range(1, num + 1))
    file = add_file(store, data, tenant)
    batch = BatchRecord(
        id=new_id("batch_"), tenant=tenant, endpoint="/v1/completions", input_file_id=file.id, completion_window="24h",
        created_at=1, expires_at=2,
    )  # fmt: skip
    store.add_batch(batch)
    lines = [RequestLine(number=i, custom_id=f"r{i}", offset=7 * (i - 1), size=6) for i in range(1, num + 1)]
    batch.status, batch.total = "in_progress", num
    store.begin(batch, lines)
    return batch, lines


def good(text: str = "x") -> Outcome:
    return Outcome(is_error=False, value={"response": text, "error": None}, output_tokens=1)


def outcomes_of(store: BatchStore, batch: BatchRecord, errors: bool = False) -> list[Any]:
    written = store.write_output(batch, errors=errors)
    if written is None:
        return []
    text = written[0].read_text()
    written[0].unlink()
    return [json.loads(one) for one in text.splitlines()]


def test_an_outcome_is_stored_once_whoever_comes_again(open_store):
    store = open_store()
    batch, lines = add_batch(store)
    store.commit([(batch, lines[2], good("first"))])
    store.commit(
        [(batch, lines[2], good("second")), (batch, lines[0], good()), (batch, lines[1], failed_outcome("c", "m"))]
    )
    store.commit([(batch, lines[1], good("second"))])
    assert (batch.completed, batch.failed, batch.output_tokens) == (2, 1, 2)
    assert store.batch("", batch.id) == batch
    assert [(one["custom_id"], one["response"]) for one in outcomes_of(store, batch)] == [("r1", "x"), ("r3", "first")]
    assert [one["error"]["code"] for one in outcomes_of(store, batch, errors=True)] == ["c"]
    assert [(line.number, data) for line, data in store.pending(batch, 0, 10, 1 << 20)] == [
        (4, b"000004"),
        (5, b"000005"),
    ]
    assert [line.number for line, _ in store.pending(batch, 4, 10, 1 << 20)] == [5]
    assert [line.number for line, _ in store.pending(batch, 0, 10, 1)] == [4]  # at least one
    store.end_pending(batch, EXPIRED)
    assert (batch.completed, batch.failed) == (2, 3)
    assert not store.pending(batch, 0, 10, 1 << 20)


def test_a_crash_at_any_moment_leaves_whole_transactions(open_store, tmp_path):
    """The directory is copied as it is on disk, with the log of SQLite cut off anywhere, and opened."""
    store = open_store()
    batch, lines = add_batch(store, 6)
    committed = []
    for line in lines:
        store.commit([(batch, line, good())])
        committed.append(line.custom_id)
    directory = store.config.directory
    log = (directory / "batches.sqlite3-wal").read_bytes()
    seen = set()
    for number, cut in enumerate([*range(0, len(log), len(log) // 16), len(log)]):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("*-shm", "lock"))
        (copy / "batches.sqlite3-wal").write_bytes(log[:cut])
        try:
            found = open_store(copy)
        except ConfigError:  # not even the tables: nothing had been told to anybody
            continue
        batches = found.open_batches()
        if not batches or batches[0].status != "in_progress":
            continue
        outcomes = [one["custom_id"] for one in outcomes_of(found, batches[0])]
        assert outcomes == committed[: len(outcomes)]
        assert batches[0].completed == len(outcomes)
        pending = [line.custom_id for line, _ in found.pending(batches[0], 0, 10, 1 << 20)]
        assert outcomes + pending == [line.custom_id for line in lines]
        seen.add(len(outcomes))
    assert len(seen) > 3
    assert outcomes == committed  # the last is whole


def test_what_an_upload_or_an_end_left_behind_is_removed_at_the_next_start(open_store, opened):
    store = open_store()
    batch, lines = add_batch(store, 2)
    store.commit([(batch, line, good()) for line in lines])
    gone = add_file(store, b"gone")
    store.write_output(batch, errors=False)  # and the server dies
    (store.files_dir / "new-upload").write_bytes(b"half")
    store.path(gone.id).unlink()  # it died while it deleted this one
    opened.remove(store)
    store.close()
    again = open_store()
    assert sorted(os.listdir(again.files_dir)) == [batch.input_file_id]
    with pytest.raises(NotFoundError):
        again.file("", gone.id)
    assert again.batch("", batch.id).completed == 2
    assert [one["custom_id"] for one in outcomes_of(again, batch)] == ["r1", "r2"]


def test_the_end_of_a_batch_is_one_transaction(open_store, monkeypatch):
    store = open_store()
    batch, lines = add_batch(store, 3)
    store.commit([(batch, line, good()) for line in lines])

    def end() -> None:
        path, size = store.write_output(batch, errors=False)
        record = FileRecord(id="file-out", tenant="", purpose="batch_output", filename="o", bytes=size, created_at=1)
        batch.status, batch.output_file_id = "completed", "file-out"
        store.end(batch, [record], [path])

    with monkeypatch.context() as patched:
        patched.setattr(store, "_save", _full)
        with pytest.raises(DiskFullError):
            end()
    assert store.batch("", batch.id).status == "in_progress"
    assert os.listdir(store.files_dir) == [batch.input_file_id]
    assert len(outcomes_of(store, batch)) == 3
    end()
    assert [json.loads(one)["custom_id"] for one in store.path("file-out").read_text().splitlines()] == [
        "r1",
        "r2",
        "r3",
    ]
    assert not outcomes_of(store, batch)
    assert store._request_bytes[""] == 0


def _full(*_: object) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


def test_a_full_disk_stores_nothing_of_a_group(open_store, monkeypatch):
    store = open_store()
    batch, lines = add_batch(store, 3)
    with monkeypatch.context() as patched:
        patched.setattr(store, "_save", _full)
        with pytest.raises(DiskFullError, match="disk is full"):
            store.commit([(batch, line, good()) for line in lines])
    assert (batch.completed, batch.output_tokens) == (0, 0)
    assert len(store.pending(batch, 0, 10, 1 << 20)) == 3
    store.commit([(batch, line, good()) for line in lines])
    assert batch.completed == 3


@pytest.mark.parametrize("pragma", ["max_page_count=1", "query_only=ON"])
def test_a_database_that_cannot_grow_or_be_written_says_so_and_leaves_nothing(open_store, pragma):
    store = open_store()
    batch, lines = add_batch(store, 30)
    kept = add_file(store, b"x")
    (before,) = store._db.execute(f"PRAGMA {pragma.partition('=')[0]}").fetchone()
    store._db.execute(f"PRAGMA {pragma}").fetchall()
    large = Outcome(is_error=False, value={"response": "x" * 5000, "error": None})
    with pytest.raises(DiskFullError, match="full, or cannot be written"):
        store.commit([(batch, line, large) for line in lines])
    with pytest.raises(DiskFullError):
        add_file(store, b"y", "a" * 100_000)
    if pragma == "query_only=ON":
        for call in (lambda: store.save(batch), lambda: store.delete_file("", kept.id)):
            with pytest.raises(DiskFullError):
                call()
    rows = {row["id"] for row in store._db.execute("SELECT id FROM files")}
    assert set(os.listdir(store.files_dir)) <= rows
    store._db.execute(f"PRAGMA {pragma.partition('=')[0]}={before or 'OFF'}").fetchall()
    store.commit([(batch, line, large) for line in lines])
    assert batch.completed == 30


def test_what_a_full_disk_cut_off_is_not_kept_in_the_log(open_store):
    store = open_store()
    batch, lines = add_batch(store, 30)
    store._db.execute("PRAGMA max_page_count=40").fetchall()
    large = Outcome(is_error=False, value={"response": "x" * 9000, "error": None})
    with pytest.raises(DiskFullError):
        store.commit([(batch, line, large) for line in lines])
    assert (store.config.directory / "batches.sqlite3-wal").stat().st_size == 0


def test_one_file_that_cannot_be_deleted_keeps_no_other(open_store, monkeypatch):
    store = open_store()
    files = [add_file(store, b"x") for _ in range(3)]
    store._db.execute("UPDATE files SET expires_at = 5")
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.name == files[0].id:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(PermissionError):
        store.delete_expired_files(10)
    assert os.listdir(store.files_dir) == [files[0].id]


def test_bounds_of_the_disk_are_of_all_and_of_each_key(open_store):
    store = open_store(max_disk_bytes=1000)
    add_file(store, b"x" * 400, "a")
    with pytest.raises(DiskFullError, match="this API key would exceed its"):
        add_file(store, b"x" * 101, "a")
    add_file(store, b"x" * 500, "b")
    with pytest.raises(DiskFullError, match="exceed their limit of"):
        add_file(store, b"x" * 101, "c")
    assert len(os.listdir(store.files_dir)) == 2


def test_requests_count_as_bytes_on_disk_until_their_batch_ends(open_store, opened):
    store = open_store(max_disk_bytes=5000)
    batch, lines = add_batch(store, 10)
    with pytest.raises(DiskFullError, match="--set batch_disk"):
        add_file(store, b"x" * 2400)
    with pytest.raises(DiskFullError, match="--set batch_disk"):
        store.begin(batch, lines)
    store.commit([(batch, lines[0], good())])
    counted = store._request_bytes[""]
    opened.remove(store)
    store.close()
    store = open_store(max_disk_bytes=5000)
    assert store._request_bytes[""] == counted > 2560
    batch.status = "cancelled"
    store.end(batch, [], [])
    assert store._request_bytes[""] == 0
    add_file(store, b"x" * 2400)


def test_files_that_a_batch_reads_are_kept_and_expired_ones_deleted(open_store):
    store = open_store()
    batch, _ = add_batch(store)
    store._db.execute("UPDATE files SET expires_at = 5")
    with pytest.raises(InUseError):
        store.delete_file("", batch.input_file_id)
    assert store.delete_expired_files(10) == 0
    batch.status = "cancelled"
    store.end(batch, [], [])
    assert store.delete_expired_files(4) == 0
    assert store.delete_expired_files(5) == 1
    assert not os.listdir(store.files_dir)


def test_ended_batches_are_forgotten_beyond_a_number(open_store):
    store = open_store(max_ended_batches=2)
    ids = []
    for _ in range(5):
        batch, _ = add_batch(store, 1)
        batch.status = "completed"
        store.end(batch, [], [])
        ids.append(batch.id)
    last, _ = add_batch(store, 1)
    found, more = store.batches("", after=None, limit=10)
    assert ([batch.id for batch in found], more) == ([last.id, *reversed(ids[-2:])], False)


def test_a_directory_has_one_server(open_store, tmp_path):
    open_store()
    with pytest.raises(ConfigError, match="in use by another server"):
        open_store()
    (tmp_path / "plain").write_text("")
    with pytest.raises(ConfigError, match="--batch-dir"):
        open_store(tmp_path / "plain")


LOCK = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
try:
    db.execute(sys.argv[2]).fetchall()
    print("done", flush=True)
except sqlite3.OperationalError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def other_program(directory: Path, statement: str) -> subprocess.Popen[str]:
    """A process that runs a statement on the database and keeps it open until its input is closed."""
    command = [sys.executable, "-c", LOCK, str(directory / "batches.sqlite3"), statement]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"])
def test_no_other_program_can_lock_the_database_of_a_server(open_store, statement):
    store = open_store()
    batch, lines = add_batch(store)
    with other_program(store.config.directory, statement) as other:
        assert other.stdout is not None
        assert "locked" in other.stdout.readline()
        store.commit([(batch, lines[0], good())])
        other.communicate()
    assert batch.completed == 1


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "SELECT * FROM files"])
def test_a_start_waits_for_a_program_that_has_the_database_open(open_store, opened, monkeypatch, statement):
    store = open_store()
    add_batch(store)
    directory = store.config.directory
    opened.pop().close()
    with other_program(directory, statement) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "done\n"
        with monkeypatch.context() as patched:
            patched.setattr("serve.batches.store._LOCK_WAIT_S", 0.0)
            with pytest.raises(ConfigError, match=r"close the program that has it open \(--batch-dir\)"):
                open_store()
        start = threading.Thread(target=open_store)
        start.start()
        other.communicate()
        start.join(60)
    assert len(opened[-1].open_batches()) == 1


def test_a_directory_of_version_1_is_taken_over(open_store, opened):
    store = open_store()
    batch, lines = add_batch(store)
    directory = store.config.directory
    opened.pop().close()
    db = sqlite3.connect(directory / "batches.sqlite3")
    db.executescript("ALTER TABLE batches DROP COLUMN num_validations; PRAGMA user_version=1;")
    db.close()
    for _ in range(2):  # the second time it is of this version
        store = open_store()
        (found,) = store.open_batches()
        assert found == batch
        assert found.num_validations == 0
        assert len(store.pending(found, 0, 10, 1 << 20)) == len(lines)
        opened.pop().close()
    store = open_store()
    batch.num_validations = 2
    store.save(batch)
    assert store.batch("", batch.id).num_validations == 2
