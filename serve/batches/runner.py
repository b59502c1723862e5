"""Runs batches: validates them, runs their requests, writes the output files, and resumes them after a restart.

Each batch that has not ended has a task (`_live`). Each new status is stored before the task continues, and the task
can start from any status, which is how batches are resumed. `BatchFeeder` runs the requests of all batches. Outcomes
that arrive while a group of outcomes is being stored are stored together as the next group.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from apt_jax.errors import counted
from serve.batches.calls import CANCELLED, EXPIRED
from serve.batches.feeder import BatchFeeder, RunningBatch
from serve.batches.input_file import InputRead, read_input
from serve.batches.records import (
    OUTPUT_PURPOSE,
    BatchRecord,
    FileRecord,
    Outcome,
    RequestLine,
    Status,
    new_id,
    now_s,
)
from serve.batches.store import BatchStore, DiskFullError
from serve.generate_call import CallService
from serve.http_api.openai_request import check_model
from serve.observability.call_log import log_failure
from serve.preprocessing import FairQueue

logger = logging.getLogger(__name__)

OUTCOMES = ("completed", "failed", "expired", "cancelled")
_HOUSEKEEPING_S = 60.0
_ANY_NUMBER = 2**31
_SAVE_AGAIN_S = 5.0
MAX_VALIDATIONS = 2
"""Number of times that the server may crash or be killed while reading an input file before the batch fails."""


class ValidationInterruptedError(Exception):
    """The server crashed or was killed too many times while reading an input file. The message is one line."""


class BatchStateError(Exception):
    """The status of a batch does not allow the operation. The message is one line."""


@dataclasses.dataclass(kw_only=True)
class BatchCounters:
    """Counters since the start of the server, and gauges, for its metrics."""

    open: "collections.Counter[str]" = dataclasses.field(default_factory=collections.Counter)
    """Number of batches that have not ended, for each status."""
    ended: "collections.Counter[str]" = dataclasses.field(default_factory=collections.Counter)
    """Number of batches that have ended, for each final status."""
    requests: "collections.Counter[str]" = dataclasses.field(default_factory=collections.Counter)
    """Number of requests whose outcome is on disk, for each outcome: completed, failed, expired or cancelled."""
    num_in_flight: int = 0
    """Number of requests that are being read, waiting or running."""


class BatchRunner:
    """Runs the batches of a store. Used from one event loop only.

    Args:
        store: stored files and batches; closed by `stop`.
        service: the engine, once it is attached, and the preprocessing queues.
    """

    def __init__(self, store: BatchStore, service: CallService) -> None:
        self.store, self._service = store, service
        self._counters = BatchCounters()
        self._running: dict[str, RunningBatch] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._outcomes: list[tuple[RunningBatch, RequestLine, Outcome]] = []
        self._committing: dict[RunningBatch, list[tuple[RequestLine, Outcome]]] = {}
        """Outcomes that are being stored."""
        self._has_outcomes = asyncio.Event()
        self._feeder = BatchFeeder(store, service, self._note, self._num_uncommitted)
        self._files = FairQueue(
            "apt-jax-batch-files", 1, max_waiting=_ANY_NUMBER, max_waiting_per_owner=_ANY_NUMBER, full="never"
        )
        """Thread that reads one input file at a time, because reading occupies a whole core; tenants take turns."""
        self._ended: asyncio.Task[None] | None = None
        self.is_resumed = False
        """True if the batches of earlier runs have been resumed; until then batches cannot be added or cancelled."""

    def counters(self) -> BatchCounters:
        """Return a snapshot of the counters and gauges."""
        by_state = collections.Counter(batch.record.status for batch in self._running.values())
        return BatchCounters(
            open=collections.Counter(by_state), ended=self._counters.ended.copy(),
            requests=self._counters.requests.copy(), num_in_flight=self._feeder.num_calls,
        )  # fmt: skip

    def start(self) -> None:
        """Resume the batches on disk and start the background tasks. The engine must be ready."""
        for name, step, pause_s in (
            ("submitting requests of batches", self._feeder.run, _SAVE_AGAIN_S),
            ("storing outcomes of batches", self._commit, _SAVE_AGAIN_S),
            ("deleting expired files", self._keep_house, _HOUSEKEEPING_S),
        ):
            self._loops.append(asyncio.create_task(_for_ever(name, step, pause_s)))
        self._loops.append(asyncio.create_task(self._resume()))

    async def stop(self) -> None:
        """Cancel all tasks and close the store. Requests in flight get no outcome; they run after the next start."""
        if self._ended is None:
            self._ended = asyncio.create_task(self._end())
        await asyncio.shield(self._ended)

    @property
    def is_stopped(self) -> bool:
        return self._ended is not None

    async def _end(self) -> None:
        self._service.drain()
        tasks = [*self._loops, *self._lives, *(call for batch in self._running.values() for call in batch.calls)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._files.close()
        if self._outcomes:
            try:
                await self._commit_group()
            except Exception as error:
                log_failure(logger, "storing the last outcomes of batches", error)
        await asyncio.to_thread(self.store.close)
        self._service.log.close()

    # --- for endpoints -----------------------------------------------------------------------------------------------

    def add(self, record: BatchRecord) -> None:
        """Run a batch that has just been stored."""
        self._begin(record)

    def current(self, record: BatchRecord) -> BatchRecord:
        """Return the current state of a batch; if the disk is full, a failure may not be in the stored `record` yet."""
        batch = self._running.get(record.id)
        return batch.record if batch is not None and batch.record.status == "failed" else record

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Start cancelling a batch, unless it is already being cancelled. Returns a copy of its new record.

        Raises:
            NotFoundError: the tenant has no batch with this id.
            BatchStateError: the batch has ended or is being finalized.
            DiskFullError: the new status cannot be stored.
        """
        batch = self._running.get(batch_id)
        if batch is None or batch.record.tenant != tenant:
            record = self.current(await self.store.run(lambda: self.store.batch(tenant, batch_id)))
            raise BatchStateError(f"a batch that is {record.status} cannot be cancelled")
        record = batch.record

        def cancel() -> None:
            if record.status == "cancelling":
                return
            if record.status not in ("validating", "in_progress"):
                raise BatchStateError(f"a batch that is {record.status} cannot be cancelled")
            before = record.status
            record.status, record.cancelling_at = "cancelling", now_s()
            try:
                self.store.save(record)
            except BaseException:
                record.status, record.cancelling_at = before, None
                raise

        await self.store.run(cancel)
        batch.done.set()
        return dataclasses.replace(record)

    # --- life of a batch ---------------------------------------------------------------------------------------------

    async def _resume(self) -> None:
        while not self.is_resumed:
            try:
                records = await self.store.run(self.store.open_batches)
            except Exception as error:
                log_failure(logger, "resuming batches", error)
                await asyncio.sleep(_SAVE_AGAIN_S)
                continue
            for record in records:
                logger.info("batch %s: resumed (%s)", record.id, record.status, extra=_fields(record))
                self._begin(record)
            self.is_resumed = True

    def _begin(self, record: BatchRecord) -> None:
        if self.is_stopped:  # the batch is stored and will run after the next start
            return
        batch = self._running[record.id] = RunningBatch(record=record)
        task = asyncio.create_task(self._live(batch))
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)

    async def _live(self, batch: RunningBatch) -> None:
        record = batch.record
        try:
            if record.status == "validating":
                await self._validate(batch)
            if record.status == "in_progress":
                await self._serve(batch)
            if record.status in ("finalizing", "cancelling"):
                await self._finalize(record)
        except Exception as error:
            if not isinstance(error, DiskFullError | OSError | ValidationInterruptedError):
                log_failure(logger, "batch", error)
            await self._fail(record, error)
        finally:
            if not self.is_stopped:
                del self._running[record.id]
        self._counters.ended[record.status] += 1
        logger.info(
            "batch %s: %s, %d of %s completed, %d failed",
            record.id, record.status, record.completed, counted(record.total, "request"), record.failed, extra=_fields(record),
        )  # fmt: skip

    async def _validate(self, batch: RunningBatch) -> None:
        record, store = batch.record, self.store
        parts = self._service.engine().parts
        read = functools.partial(self._read, record, lambda body: check_model(parts, body.get("model")))
        reading = asyncio.ensure_future(self._files.run(read, record.tenant))
        try:
            found = await asyncio.shield(reading)
        except asyncio.CancelledError:  # the server is stopping: reading stops at the next line and is not counted
            with contextlib.suppress(Exception):
                await reading
            raise

        def begin() -> None:
            if record.status != "validating":  # cancelled in the meantime
                return
            if found is None:  # the deadline has passed
                self._end_as(record, "expired", [], [])
                return
            self._take(record, found)
            try:
                if found.errors:
                    store.save(record)
                else:
                    store.begin(record, found.lines)
            except BaseException:
                record.status = "validating"
                raise

        await store.run(begin)
        if record.status == "in_progress":
            logger.info("batch %s: in_progress, %s", record.id, counted(record.total, "request"), extra=_fields(record))

    def _read(self, record: BatchRecord, check: Callable[[Any], None]) -> InputRead | None:
        """Read the input file of a batch; runs in a thread. Returns None if the batch is cancelled, its deadline passes
        or the server stops.

        The attempt is first counted on disk, so that a file that crashes the server does not do so at every start.

        Raises:
            ValidationInterruptedError: reading has been interrupted `MAX_VALIDATIONS` times.
            DiskFullError: the count cannot be stored.
            OSError: the file cannot be read.
        """

        def is_over() -> bool:
            return self.is_stopped or record.status != "validating" or record.expires_at <= time.time()

        def count(change: int) -> None:
            record.num_validations += change
            try:
                self.store.save(record)
            except BaseException:
                record.num_validations -= change
                raise

        if is_over():
            return None
        if record.num_validations >= MAX_VALIDATIONS:
            raise ValidationInterruptedError(
                f"the server stopped {counted(record.num_validations, 'time')} while reading the input file, so the file is not read again; if the "
                "file was not the cause, create the batch again, otherwise split the file"
            )
        self.store.call(lambda: count(1))
        found = read_input(
            self.store.path(record.input_file_id), record.endpoint, self.store.config, check, is_over=is_over
        )
        if found is None:
            with contextlib.suppress(DiskFullError):
                self.store.call(lambda: count(-1))
        return found

    @staticmethod
    def _take(record: BatchRecord, found: InputRead) -> None:
        record.model, record.num_validations = found.model, 0
        if found.errors:
            record.status, record.failed_at, record.errors = "failed", now_s(), found.errors
        else:
            record.status, record.in_progress_at, record.total = "in_progress", now_s(), len(found.lines)

    async def _serve(self, batch: RunningBatch) -> None:
        """Run the requests until all have outcomes, the deadline has passed or the batch is cancelled."""
        record = batch.record
        self._set_done_if_whole(batch)
        self._feeder.add(batch)
        try:
            while not batch.done.is_set() and (left_s := record.expires_at - time.time()) > 0:
                try:  # in short waits, because the wall clock may be changed
                    async with asyncio.timeout(min(left_s, _HOUSEKEEPING_S)):
                        await batch.done.wait()
                except TimeoutError:
                    continue
        finally:
            await self._feeder.remove(batch)
        if batch.failure is not None:
            raise batch.failure

        def finalize() -> None:
            if record.status == "in_progress":
                record.status, record.finalizing_at = "finalizing", now_s()
                if record.completed + record.failed < record.total:
                    record.expired_at = now_s()
                self.store.save(record)

        while self._outcomes_of(batch):
            await asyncio.sleep(0.01)
        if batch.failure is not None:
            raise batch.failure
        await self.store.run(finalize)

    def _outcomes_of(self, batch: RunningBatch) -> bool:
        return batch in self._committing or any(one is batch for one, _, _ in self._outcomes)

    async def _finalize(self, record: BatchRecord) -> None:
        """Write the output files and end the batch."""
        store = self.store

        def finalize() -> None:
            before = record.failed
            left = "cancelled" if record.status == "cancelling" else "expired"
            if record.status == "cancelling" or record.expired_at is not None:
                store.end_pending(record, CANCELLED if record.status == "cancelling" else EXPIRED)
            self._counters.requests[left] += record.failed - before
            files, paths = self._outputs(record)
            last: Status = "completed" if record.expired_at is None else "expired"
            self._end_as(record, "cancelled" if record.status == "cancelling" else last, files, paths)

        await store.run(finalize)

    def _outputs(self, record: BatchRecord) -> tuple[list[FileRecord], list[Path]]:
        """Write the output and error files from the stored outcomes, and set the ids of these files in the record."""
        files: list[FileRecord] = []
        paths: list[Path] = []
        created = now_s()
        try:
            for errors, name in ((False, "output"), (True, "error")):
                written = self.store.write_output(record, errors=errors)
                if written is None:
                    continue
                path, num_bytes = written
                paths.append(path)
                expires = None if record.output_ttl_s is None else created + record.output_ttl_s
                files.append(
                    FileRecord(
                        id=new_id("file-"), tenant=record.tenant, purpose=OUTPUT_PURPOSE,
                        filename=f"{record.id}_{name}.jsonl", bytes=num_bytes, created_at=created, expires_at=expires,
                    )
                )  # fmt: skip
                setattr(record, f"{name}_file_id", files[-1].id)
        except BaseException:
            for path in paths:
                path.unlink(missing_ok=True)
            record.output_file_id = record.error_file_id = None
            raise
        return files, paths

    def _end_as(self, record: BatchRecord, status: Status, files: list[FileRecord], paths: list[Path]) -> None:
        before = record.status
        record.status = status
        if getattr(record, f"{status}_at") is None:
            setattr(record, f"{status}_at", now_s())
        try:
            self.store.end(record, files, paths)
        except BaseException:
            record.status, record.output_file_id, record.error_file_id = before, None, None
            raise

    async def _fail(self, record: BatchRecord, error: Exception) -> None:
        """End a batch as failed; its outcomes so far are written to files if there is disk space."""
        code, message = "internal_error", "The batch failed because of an internal error."
        if isinstance(error, DiskFullError):
            code, message = "disk_full", f"The batch was stopped: {error}."
        elif isinstance(error, ValidationInterruptedError):
            code, message = "validation_interrupted", f"The batch was not run: {error}."
        elif isinstance(error, OSError):
            code, message = "input_file_unreadable", f"The input file cannot be read ({error.strerror})."
        logger.error("batch %s: failed (%s)", record.id, code, extra=_fields(record))

        def fail(with_files: bool) -> None:
            files, paths = self._outputs(record) if with_files else ([], [])
            record.status, record.failed_at = "failed", record.failed_at or now_s()
            record.errors = [{"code": code, "line": None, "message": message, "param": None}]
            try:
                self.store.end(record, files, paths)
            except BaseException:
                record.output_file_id = record.error_file_id = None
                raise

        with_files = True
        while True:
            try:
                await self.store.run(functools.partial(fail, with_files))
                return
            except Exception as again:
                if with_files:
                    with_files = False
                    continue
                if not isinstance(again, DiskFullError):
                    log_failure(logger, "batch", again)
            # Clients already see the failure (`current`); it is stored once there is disk space.
            await asyncio.sleep(_SAVE_AGAIN_S)

    # --- outcomes ----------------------------------------------------------------------------------------------------

    def _note(self, batch: RunningBatch, line: RequestLine, outcome: Outcome) -> None:
        self._outcomes.append((batch, line, outcome))
        self._has_outcomes.set()

    def _num_uncommitted(self) -> int:
        return len(self._outcomes) + sum(len(outcomes) for outcomes in self._committing.values())

    async def _commit(self) -> None:
        while True:
            await self._has_outcomes.wait()
            await self._commit_group()
            self._feeder.wake()

    async def _commit_group(self) -> None:
        """Store the outcomes so far, in one transaction per batch."""
        group, self._outcomes = self._outcomes, []
        self._has_outcomes.clear()
        by_batch: dict[RunningBatch, list[tuple[RequestLine, Outcome]]] = {}
        for batch, line, outcome in group:
            by_batch.setdefault(batch, []).append((line, outcome))
        self._committing = by_batch
        try:
            for batch, outcomes in by_batch.items():
                record = batch.record
                rows = [(record, line, outcome) for line, outcome in outcomes]
                try:
                    await asyncio.shield(
                        asyncio.ensure_future(self.store.run(lambda rows=rows: self.store.commit(rows)))
                    )
                except Exception as error:
                    batch.failure = error
                    batch.done.set()
                    continue
                for _, outcome in outcomes:
                    self._counters.requests["failed" if outcome.is_error else "completed"] += 1
                self._set_done_if_whole(batch)
        finally:
            self._committing = {}

    @staticmethod
    def _set_done_if_whole(batch: RunningBatch) -> None:
        record = batch.record
        if record.completed + record.failed >= record.total:
            batch.done.set()

    # --- files -------------------------------------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        """Delete expired files every `_HOUSEKEEPING_S` seconds, until cancelled."""
        while True:
            num = await self.store.run(lambda: self.store.delete_expired_files(now_s()))
            if num:
                logger.info("deleted %s", counted(num, "expired file"))
            await asyncio.sleep(_HOUSEKEEPING_S)


async def _for_ever(name: str, loop: Callable[[], Awaitable[None]], pause_s: float) -> None:
    """Run a loop until cancelled. After an error, log it and start the loop again `pause_s` seconds later."""
    while True:
        try:
            await loop()
        except Exception as error:
            log_failure(logger, name, error)
            await asyncio.sleep(pause_s)


def _fields(record: BatchRecord) -> dict[str, Any]:
    """Return the structured fields of a log line about a batch."""
    fields = {
        "batch_id": record.id, "tenant": record.tenant or None, "status": record.status, "endpoint": record.endpoint,
        "requests": record.total, "completed": record.completed, "failed": record.failed,
    }  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}
