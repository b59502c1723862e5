"""Records of files and batches, as they are stored and returned to clients."""

import dataclasses
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
STATUSES: tuple[Status, ...] = (
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
)  # fmt: skip
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that have not ended."""
INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def now_s() -> int:
    """Return the current time in whole seconds since the epoch, the API's unit of time."""
    return int(time.time())


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A stored file. Times are seconds since the epoch."""

    id: str
    tenant: str
    """Owner of the file; empty if the server has no API keys."""
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the file as OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclasses.dataclass(kw_only=True)
class BatchRecord:
    """A batch. Times are seconds since the epoch, or None if the event has not happened."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    """Deadline of the batch."""
    status: Status = "validating"
    metadata: Mapping[str, str] | None = None
    model: str | None = None
    errors: list[dict[str, Any]] | None = None
    """Errors of a failed batch, each with code, line, message and param."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_ttl_s: int | None = None
    """Lifetime of the batch's output files in seconds; None: they are kept until deleted."""
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    """Number of requests."""
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_validations: int = 0
    """Number of attempts to read the input file, including a running one, that have not finished or stopped cleanly."""

    def as_json(self) -> dict[str, Any]:
        """Return the batch as OpenAI's batch object."""
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        errors = None if self.errors is None else {"object": "list", "data": self.errors}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": getattr(self, f"{name}_at") for name in times},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": self.metadata,
        }


JSON_COLUMNS = ("metadata", "errors")


def to_row(record: FileRecord | BatchRecord) -> dict[str, Any]:
    """Return the database row of a record: a value for each column, with lists and mappings as JSON."""
    row = dataclasses.asdict(record)
    return {name: json.dumps(v) if name in JSON_COLUMNS and v is not None else v for name, v in row.items()}


def file_of(row: Any) -> FileRecord:
    return FileRecord(**{field.name: row[field.name] for field in dataclasses.fields(FileRecord)})


def batch_of(row: Any) -> BatchRecord:
    values = {field.name: row[field.name] for field in dataclasses.fields(BatchRecord)}
    for name in JSON_COLUMNS:
        values[name] = None if values[name] is None else json.loads(values[name])
    return BatchRecord(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLine:
    """A request of a batch: one line of its input file."""

    number: int
    """Number of the line, from 1."""
    custom_id: str
    offset: int
    """Byte offset of the line in the file."""
    size: int
    """Length of the line in bytes, without the line ending."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one request of a batch."""

    is_error: bool
    """True if the outcome goes to the error file."""
    value: Mapping[str, Any]
    """`response` and `error` fields of the output line."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
