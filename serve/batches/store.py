"""Files, batches and outcomes of batch requests on disk: SQLite for records and outcomes, files for content.

A crash at any moment leaves a consistent state:

* SQLite commits with a synced log (`synchronous=FULL`): a transaction is stored completely or not at all.
* An outcome is written only if its request has none (``outcome IS NULL``), in the transaction that counts it. So a
  request has at most one outcome, and never runs again once it has an outcome.
* A file is written under a temporary name, synced and renamed before its row is committed. Files without a row are
  removed at the next start, so an interrupted upload or output file leaves nothing behind.
* The outcomes of a batch are deleted in the transaction that registers its output files and ends it. After a crash
  before that transaction, the files are written again from the same outcomes.

Methods block: call them in a thread (`BatchStore.run`).
"""

# ruff: noqa: S608 - statements are built from our own names of tables, columns and statuses; values are bound
import asyncio
import collections
import concurrent.futures
import contextlib
import errno
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from apt_jax.errors import ConfigError, counted
from serve.batches.config import FLAG, BatchConfig
from serve.batches.records import (
    OPEN,
    BatchRecord,
    FileRecord,
    Outcome,
    RequestLine,
    batch_of,
    file_of,
    new_id,
    to_row,
)
from serve.compact_json import json_bytes

T = TypeVar("T")

_DATABASE = "batches.sqlite3"
_VERSION = 2
_SCHEMA = """
CREATE TABLE files (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
  filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER);
CREATE INDEX files_by_tenant ON files (tenant, number);
CREATE TABLE batches (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, endpoint TEXT NOT NULL,
  input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
  status TEXT NOT NULL, metadata TEXT, model TEXT, errors TEXT, output_file_id TEXT, error_file_id TEXT,
  output_ttl_s INTEGER, in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER,
  expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER, total INTEGER NOT NULL, completed INTEGER NOT NULL,
  failed INTEGER NOT NULL, input_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
  num_validations INTEGER NOT NULL DEFAULT 0);
CREATE INDEX batches_by_tenant ON batches (tenant, number);
CREATE TABLE requests (
  batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, offset INTEGER NOT NULL,
  size INTEGER NOT NULL, is_error INTEGER, outcome BLOB, PRIMARY KEY (batch_id, number), UNIQUE (batch_id, custom_id));
"""
_FROM_VERSION_1 = "ALTER TABLE batches ADD COLUMN num_validations INTEGER NOT NULL DEFAULT 0;"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_SQLITE_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
"""SQLite error codes of a full or read-only disk; SQLITE_IOERR covers quotas and file size limits of the process."""
_LOG_PAGES = 256
"""Number of 4 KiB pages in the write-ahead log at which SQLite copies the log to the database."""
_LOCK_WAIT_S = 30.0
"""Seconds that startup waits for another program to close the database."""
_COPY_BYTES = 1 << 20
_ROW_BYTES = 256
"""Approximate size in bytes of a request in the tables, without its custom_id and its outcome."""
_REQUEST_BYTES = f"{_ROW_BYTES} + 2 * LENGTH(CAST(custom_id AS BLOB)) + COALESCE(LENGTH(outcome), 0)"
"""SQL for the approximate size of a request; the custom_id counts twice because it is also in an index."""


class DiskFullError(Exception):
    """The disk is full or read-only, or a limit on the files or disk space of batches is reached."""


class NotFoundError(Exception):
    """The tenant has no file or batch with this id."""


class InUseError(Exception):
    """The file is the input of a batch that has not ended."""


class BatchStore:
    """The directory that holds a server's files and batches; only one process at a time can use it.

    Args:
        config: directory and limits.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, config: BatchConfig) -> None:
        self.config = config
        self.files_dir = config.directory / "files"
        """Directory of the files. New files are written here under a temporary name; `add_file` renames them."""
        try:
            config.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.files_dir.mkdir(exist_ok=True, mode=0o700)
            self._lock = os.open(config.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{config.directory}: cannot be used ({error.strerror}) ({FLAG})") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"{config.directory}: in use by another server ({FLAG})") from None
        try:
            self._open()
        except BaseException as error:
            with contextlib.suppress(AttributeError):  # not connected
                self._db.close()
            os.close(self._lock)
            if isinstance(error, sqlite3.Error) and _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise ConfigError(
                    f"{config.directory}/{_DATABASE}: close the program that has it open ({FLAG})"
                ) from None
            if isinstance(error, sqlite3.Error | OSError):
                raise ConfigError(f"{config.directory}: cannot be used ({error}) ({FLAG})") from None
            raise
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="apt-jax-batches")

    def _open(self) -> None:
        path = self.config.directory / _DATABASE
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._db = db = sqlite3.connect(path, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA locking_mode=EXCLUSIVE")  # set before the log is opened: locked until `close`
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute(f"PRAGMA wal_autocheckpoint={_LOG_PAGES}")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")
        elif version == 1:
            db.executescript(f"BEGIN; {_FROM_VERSION_1} PRAGMA user_version={_VERSION}; COMMIT;")
        elif version != _VERSION:
            raise ConfigError(f"{self.config.directory}: written by another version of apt-jax ({FLAG})")
        known, there = {row["id"] for row in db.execute("SELECT id FROM files")}, set(os.listdir(self.files_dir))
        for name in there - known:
            (self.files_dir / name).unlink()
        with contextlib.suppress(DiskFullError), disk_errors():
            for file_id in known - there:  # the server stopped while deleting them
                db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        rows = db.execute(
            f"SELECT b.tenant, SUM({_REQUEST_BYTES}) AS bytes FROM requests r JOIN batches b ON b.id = r.batch_id"
            " GROUP BY b.tenant"
        )
        self._request_bytes = collections.Counter({row["tenant"]: row["bytes"] for row in rows})
        """Bytes of stored requests and outcomes per tenant."""

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function that uses this store in the store's thread, which runs one call at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def call(self, function: Callable[[], T]) -> T:
        """Like `run`, but blocks the calling thread."""
        return self._thread.submit(function).result()

    def close(self) -> None:
        """Wait for the running operation, cancel the operations that wait, and release the directory."""
        self._thread.shutdown(cancel_futures=True)
        self._db.close()
        os.close(self._lock)

    # --- files -------------------------------------------------------------------------------------------------------

    def path(self, file_id: str) -> Path:
        return self.files_dir / file_id

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Check that a tenant may store `num_bytes` more.

        Raises:
            DiskFullError: the tenant's share or the total limit would be exceeded; the message says what to do.
        """
        total, own = self._used_bytes(tenant)
        if own + num_bytes > self.config.disk_share_bytes(tenant):
            share = self.config.disk_share_bytes(tenant) >> 20
            raise DiskFullError(
                f"files and batches of this API key would exceed its share of {share} MiB: delete files (--set batch_disk)"
            )
        if total + num_bytes > self.config.max_disk_bytes:
            whole = self.config.max_disk_bytes >> 20
            raise DiskFullError(
                f"files and batches would exceed their limit of {whole} MiB: delete files (--set batch_disk)"
            )

    def _used_bytes(self, tenant: str) -> tuple[int, int]:
        """Return the bytes used by all tenants, and by this tenant."""
        total = self._one("SELECT COALESCE(SUM(bytes), 0) FROM files") + self._request_bytes.total()
        own = self._one("SELECT COALESCE(SUM(bytes), 0) FROM files WHERE tenant = ?", tenant)
        return total, own + self._request_bytes[tenant]

    def add_file(self, record: FileRecord, written: Path) -> None:
        """Register a file whose content has been written to a path in `files_dir`. After an error the file is removed.

        Raises:
            DiskFullError: the disk is full, or a limit on disk space or the tenant's number of files would be exceeded.
        """
        try:
            self.check_room(record.tenant, record.bytes)
            if self._one("SELECT COUNT(*) FROM files WHERE tenant = ?", record.tenant) >= self.config.max_files:
                raise DiskFullError(
                    f"this API key has the maximum of {counted(self.config.max_files, 'file')}: delete some"
                )
            with disk_errors():
                _sync(written)
                os.replace(written, self.path(record.id))
                _sync(self.files_dir)
                self._insert("files", to_row(record))
        except BaseException:
            for path in (written, self.path(record.id)):
                path.unlink(missing_ok=True)
            raise

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file of a tenant.

        Raises:
            NotFoundError: the tenant has no file with this id.
        """
        row = self._db.execute("SELECT * FROM files WHERE tenant = ? AND id = ?", (tenant, file_id)).fetchone()
        if row is None:
            raise NotFoundError
        return file_of(row)

    def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[FileRecord], bool]:
        """Return a page of at most `limit` files in order of creation, and whether more follow.

        Args:
            tenant: owner of the files.
            purpose: only files with this purpose; None: all.
            after: id of the file after which the page begins; None: the first page.
            limit: maximum number of files.
            newest_first: True if the newest file comes first.

        Raises:
            NotFoundError: the tenant has no file with the id `after`.
        """
        where, values = ("AND purpose = ?", (purpose,)) if purpose is not None else ("", ())
        rows, more = self._page("files", tenant, where, values, after, limit, newest_first)
        return [file_of(row) for row in rows], more

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file of a tenant.

        Raises:
            NotFoundError: the tenant has no file with this id.
            InUseError: the file is the input of a batch that has not ended.
        """
        self.file(tenant, file_id)
        if self._in_use(file_id):
            raise InUseError
        with disk_errors():
            self.path(file_id).unlink(missing_ok=True)  # first: frees space for the transaction on a full disk
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def delete_expired_files(self, now_s: int) -> int:
        """Delete expired files that are not the input of an open batch. Returns the number of deleted files.

        Raises:
            Exception: the last error if some files cannot be deleted; the other files are deleted anyway.
        """
        rows = self._db.execute("SELECT id, tenant FROM files WHERE expires_at <= ?", (now_s,)).fetchall()
        expired = [row for row in rows if not self._in_use(row["id"])]
        failure: Exception | None = None
        for row in expired:
            try:
                self.delete_file(row["tenant"], row["id"])
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
        return len(expired)

    def _in_use(self, file_id: str) -> bool:
        return bool(self._one(f"SELECT COUNT(*) FROM batches WHERE input_file_id = ? AND status IN {OPEN}", file_id))

    # --- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> None:
        """Register a batch. If the tenant has more than `max_ended_batches` ended batches, delete the oldest."""
        with self._transaction():
            self._insert("batches", to_row(record))
            self._db.execute(
                f"DELETE FROM batches WHERE number IN (SELECT number FROM batches WHERE tenant = ? AND status NOT IN {OPEN}"
                " ORDER BY number DESC LIMIT -1 OFFSET ?)",
                (record.tenant, self.config.max_ended_batches),
            )

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch of a tenant.

        Raises:
            NotFoundError: the tenant has no batch with this id.
        """
        row = self._db.execute("SELECT * FROM batches WHERE tenant = ? AND id = ?", (tenant, batch_id)).fetchone()
        if row is None:
            raise NotFoundError
        return batch_of(row)

    def batches(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """Return a page of at most `limit` batches, newest first, and whether more follow.

        The page begins after the batch with the id `after`, or with the newest if None.

        Raises:
            NotFoundError: the tenant has no batch with the id `after`.
        """
        rows, more = self._page("batches", tenant, "", (), after, limit, True)
        return [batch_of(row) for row in rows], more

    def open_batches(self) -> list[BatchRecord]:
        """Return the batches of all tenants that have not ended, oldest first."""
        return [
            batch_of(row) for row in self._db.execute(f"SELECT * FROM batches WHERE status IN {OPEN} ORDER BY number")
        ]

    def num_open_batches(self, tenant: str) -> int:
        return self._one(f"SELECT COUNT(*) FROM batches WHERE tenant = ? AND status IN {OPEN}", tenant)

    def begin(self, batch: BatchRecord, lines: Sequence[RequestLine]) -> None:
        """Store the requests and the new state of a validated batch, in one transaction.

        Raises:
            DiskFullError: there is not enough space; nothing was stored.
        """
        num_bytes = sum(_ROW_BYTES + 2 * len(line.custom_id.encode()) for line in lines)
        self.check_room(batch.tenant, num_bytes)
        with self._transaction():
            self._db.executemany(
                "INSERT INTO requests (batch_id, number, custom_id, offset, size) VALUES (?, ?, ?, ?, ?)",
                ((batch.id, line.number, line.custom_id, line.offset, line.size) for line in lines),
            )
            self._save(batch)
        self._request_bytes[batch.tenant] += num_bytes

    def save(self, batch: BatchRecord) -> None:
        """Store the state of a batch."""
        with self._transaction():
            self._save(batch)

    # --- outcomes ----------------------------------------------------------------------------------------------------

    def pending(self, batch: BatchRecord, after: int, most: int, most_bytes: int) -> list[tuple[RequestLine, bytes]]:
        """Return the next requests without an outcome after line number `after`, each with the bytes of its line.

        At most `most` requests with at most `most_bytes` bytes in total, but at least one request if any is left.

        Raises:
            OSError: the input file cannot be read.
        """
        rows = self._db.execute(
            "SELECT number, custom_id, offset, size FROM requests WHERE batch_id = ? AND number > ? AND outcome IS NULL"
            " ORDER BY number LIMIT ?",
            (batch.id, after, most),
        ).fetchall()
        found: list[tuple[RequestLine, bytes]] = []
        if not rows:
            return found
        with self.path(batch.input_file_id).open("rb") as file:
            for row in rows:
                most_bytes -= row["size"]
                if found and most_bytes < 0:
                    break
                file.seek(row["offset"])
                found.append((RequestLine(**dict(row)), file.read(row["size"])))
        return found

    def commit(self, outcomes: Iterable[tuple[BatchRecord, RequestLine, Outcome]]) -> None:
        """Store outcomes and count them in their batches, in one synced transaction. A request that already has an
        outcome keeps it.

        Raises:
            DiskFullError: there is not enough space; no outcome was stored and no record changed.
        """
        before: dict[str, tuple[BatchRecord, dict[str, int]]] = {}
        names = ("completed", "failed", "input_tokens", "cached_tokens", "output_tokens")
        num_bytes: collections.Counter[str] = collections.Counter()
        try:
            with self._transaction():
                for batch, line, outcome in outcomes:
                    data = _line(line, outcome)
                    before.setdefault(batch.id, (batch, {name: getattr(batch, name) for name in names}))
                    written = self._db.execute(
                        "UPDATE requests SET outcome = ?, is_error = ? WHERE batch_id = ? AND number = ? AND outcome IS NULL",
                        (data, outcome.is_error, batch.id, line.number),
                    )
                    if written.rowcount:
                        num_bytes[batch.tenant] += len(data)
                        batch.completed += not outcome.is_error
                        batch.failed += outcome.is_error
                        batch.input_tokens += outcome.input_tokens
                        batch.cached_tokens += outcome.cached_tokens
                        batch.output_tokens += outcome.output_tokens
                for tenant, more in num_bytes.items():
                    self.check_room(tenant, more)
                for batch, _ in before.values():
                    self._save(batch)
        except BaseException:
            for batch, counts in before.values():
                for name, count in counts.items():
                    setattr(batch, name, count)
            raise
        self._request_bytes.update(num_bytes)

    def end_pending(self, batch: BatchRecord, outcome: Outcome) -> None:
        """Store this outcome for every request of the batch that has no outcome yet."""
        after = 0
        while True:
            rows = self._db.execute(
                "SELECT number, custom_id, offset, size FROM requests WHERE batch_id = ? AND number > ? AND outcome IS NULL"
                " ORDER BY number LIMIT 1000",
                (batch.id, after),
            ).fetchall()
            if not rows:
                return
            lines = [RequestLine(**dict(row)) for row in rows]
            self.commit((batch, line, outcome) for line in lines)
            after = lines[-1].number

    def end(self, batch: BatchRecord, files: Sequence[FileRecord], written: Sequence[Path]) -> None:
        """End a batch: register its output files, store its state and delete its requests, in one transaction.

        Args:
            batch: the batch with its final status.
            files: records of its output files.
            written: path of the content of each output file, from `write_output`.

        Raises:
            DiskFullError: there is not enough space; the stored batch is unchanged and the written files are removed.
        """
        freed = self._one(f"SELECT COALESCE(SUM({_REQUEST_BYTES}), 0) FROM requests WHERE batch_id = ?", batch.id)
        try:
            with disk_errors():
                for record, path in zip(files, written, strict=True):
                    os.replace(path, self.path(record.id))
                if files:
                    _sync(self.files_dir)
            with self._transaction():
                for record in files:
                    self._insert("files", to_row(record))
                self._db.execute("DELETE FROM requests WHERE batch_id = ?", (batch.id,))
                self._save(batch)
        except BaseException:
            for path in (*written, *(self.path(record.id) for record in files)):
                path.unlink(missing_ok=True)
            raise
        self._request_bytes[batch.tenant] -= freed
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def write_output(self, batch: BatchRecord, *, errors: bool) -> tuple[Path, int] | None:
        """Write the outcomes of a batch to a new synced file, one per line in the order of the input.

        Args:
            batch: the batch.
            errors: write the error file's outcomes instead of the output file's outcomes.

        Returns:
            The path and the number of bytes; None if there is no such outcome.

        Raises:
            DiskFullError: there is not enough space.
        """
        query = "SELECT outcome FROM requests WHERE batch_id = ? AND is_error = ? ORDER BY number"
        rows = self._db.execute(query, (batch.id, errors))
        first = rows.fetchone()
        if first is None:
            return None
        path, num_bytes = self.files_dir / new_id("new-"), 0
        try:
            with disk_errors(), path.open("xb", buffering=_COPY_BYTES) as file:
                os.fchmod(file.fileno(), 0o600)
                while first is not None:
                    num_bytes += file.write(first["outcome"] + b"\n")
                    first = rows.fetchone()
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path, num_bytes

    # --- SQL ---------------------------------------------------------------------------------------------------------

    def _one(self, query: str, *values: object) -> Any:
        return self._db.execute(query, values).fetchone()[0]

    def _insert(self, table: str, row: dict[str, Any]) -> None:
        names, marks = ", ".join(row), ", ".join(f":{name}" for name in row)
        self._db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", row)

    def _save(self, batch: BatchRecord) -> None:
        row = to_row(batch)
        self._db.execute(f"UPDATE batches SET {', '.join(f'{name} = :{name}' for name in row)} WHERE id = :id", row)

    def _page(
        self,
        table: str,
        tenant: str,
        where: str,
        values: tuple[object, ...],
        after: str | None,
        limit: int,
        newest_first: bool,
    ) -> tuple[list[sqlite3.Row], bool]:
        if after is not None:
            row = self._db.execute(
                f"SELECT number FROM {table} WHERE tenant = ? AND id = ?", (tenant, after)
            ).fetchone()
            if row is None:
                raise NotFoundError
            where += f" AND number {'<' if newest_first else '>'} ?"
            values += (row["number"],)
        order = "DESC" if newest_first else "ASC"
        query = f"SELECT * FROM {table} WHERE tenant = ? {where} ORDER BY number {order} LIMIT ?"
        rows = self._db.execute(query, (tenant, *values, limit + 1)).fetchall()
        return rows[:limit], len(rows) > limit

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with disk_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                with contextlib.suppress(sqlite3.Error):  # a full disk may need the log's space
                    self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                raise


def _line(line: RequestLine, outcome: Outcome) -> bytes:
    """Return a line of the output file or the error file, without the line ending."""
    return json_bytes({"id": new_id("batch_req_"), "custom_id": line.custom_id, **outcome.value})


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Raise `DiskFullError` in place of OS or SQLite errors that mean a full or read-only disk."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(_full_text(error.strerror)) from None
        raise
    except sqlite3.Error as error:
        if _code(error) in _SQLITE_FULL:
            raise DiskFullError(_full_text(error)) from None
        raise


def _full_text(reason: object) -> str:
    return f"the disk is full, or cannot be written to ({reason})"


def _code(error: sqlite3.Error) -> int | None:
    """Return SQLite's primary result code; None if the error comes from Python's `sqlite3` module."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
