"""Paths and schemas of files and batches, for the OpenAPI document."""

from collections.abc import Callable

from serve.batches import config as bounds
from serve.batches.calls import ENDPOINTS
from serve.batches.config import BatchConfig
from serve.batches.http.routes import BATCHES_PAGE, MAX_BATCHES_PAGE, MAX_FILES_PAGE
from serve.batches.records import INPUT_PURPOSE, OUTPUT_PURPOSE, STATUSES
from serve.http_api.json_schemas import COUNT, FLAG, STRING, Schema, closed, integer, object_of, ref

_TIME: Schema = {"type": "integer", "minimum": 0, "description": "Seconds since the epoch."}
_EXAMPLE = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


class BatchDescription:
    """The part of the OpenAPI document for files and batches; a `serve.http_api.app_config.Description`."""

    def __init__(self, config: BatchConfig) -> None:
        self._config = config
        self.examples: Schema = {"CreateBatch": {"file": {"value": _EXAMPLE}}}

    def schemas(self) -> Schema:
        """See `Description`."""
        return {**_requests(self._config), **_answers()}

    def paths(
        self, operation: Callable[..., Schema], get: Callable[..., Schema], post: Callable[..., Schema]
    ) -> Schema:
        """See `Description`."""

        def good(name: str) -> Schema:
            return {"description": "The answer.", "content": {"application/json": {"schema": ref(name)}}}

        file_id = _parameter("file_id", "path", STRING, "The `id` of a file.")
        batch_id = _parameter("batch_id", "path", STRING, "The `id` of a batch.")
        after = _parameter("after", "query", STRING, "The `id` after which the page begins.")
        pages = [
            _parameter("purpose", "query", STRING, "Only files of this purpose."),
            _parameter("order", "query", {"enum": ["asc", "desc"], "default": "desc"}, "Order by time of creation."),
            _parameter(
                "limit",
                "query",
                integer(1, MAX_FILES_PAGE) | {"default": MAX_FILES_PAGE},
                "Maximum number of files in a page.",
            ),
            after,
        ]
        limit = _parameter(
            "limit",
            "query",
            integer(1, MAX_BATCHES_PAGE) | {"default": BATCHES_PAGE},
            "Maximum number of batches in a page.",
        )
        upload = operation(
            "UploadFile",
            "Upload the input of batches: one JSON object per line.",
            good("File"),
            (413, 415, 429, 503, 507),
        )
        upload["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": ref("UploadFileRequest")}},
        }
        text = {"description": "The file.", "content": {"application/jsonl": {"schema": STRING}}}
        delete = operation(
            "DeleteFile", "Delete a file that no running batch reads.", good("DeletedFile"), (404, 503, 507)
        )
        cancel = operation("CancelBatch", "Cancel a batch that has not ended.", good("Batch"), (404, 503, 507))
        return {
            "/v1/files": {"post": upload, **get("Files", "Files of this API key.", good("Files"), 404, 503, parameters=pages)},
            "/v1/files/{file_id}": {
                **get("File", "A file.", good("File"), 404, 503, parameters=[file_id]),
                "delete": {**delete, "parameters": [file_id]},
            },
            "/v1/files/{file_id}/content": get("FileContent", "The content of a file.", text, 404, 503, parameters=[file_id]),
            "/v1/batches": {
                **post("CreateBatch", "Run the requests of a file as best effort.", good("Batch"), 429, 507),
                **get("Batches", "Batches of this API key, newest first.", good("Batches"), 404, 503, parameters=[limit, after]),
            },
            "/v1/batches/{batch_id}": get("Batch", "A batch.", good("Batch"), 404, 503, parameters=[batch_id]),
            "/v1/batches/{batch_id}/cancel": {"post": {**cancel, "parameters": [batch_id]}},
        }  # fmt: skip


def _requests(config: BatchConfig) -> Schema:
    """Return the schemas of request bodies, keyed by name."""
    metadata = {
        "type": ["object", "null"],
        "maxProperties": bounds.MAX_METADATA,
        "propertyNames": {"maxLength": bounds.MAX_METADATA_KEY_CHARS},
        "additionalProperties": {"type": "string", "maxLength": bounds.MAX_METADATA_VALUE_CHARS},
    }
    seconds = integer(bounds.MIN_FILE_TTL_S, bounds.MAX_FILE_TTL_S)
    life = object_of({"anchor": {"const": "created_at"}, "seconds": seconds}, required=("anchor", "seconds"))
    create = {
        "input_file_id": {"type": "string", "minLength": 1},
        "endpoint": {"enum": list(ENDPOINTS)},
        "completion_window": {
            "type": "string", "pattern": f"^{bounds.WINDOW_PATTERN}$",
            "description": "The deadline, from `1m` to `336h`; requests without an answer by then get `batch_expired`.",
        },
        "metadata": metadata,
        "output_expires_after": {"anyOf": [life, {"type": "null"}]},
    }  # fmt: skip
    upload = {
        "purpose": {"const": INPUT_PURPOSE},
        "file": {"type": "string", "contentMediaType": "application/octet-stream", "description": f"At most {config.max_file_bytes} bytes."},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": seconds,
    }  # fmt: skip
    return {
        "CreateBatchRequest": object_of(create, required=("input_file_id", "endpoint", "completion_window")),
        "UploadFileRequest": object_of(upload, required=("purpose", "file")),
    }


def _answers() -> Schema:
    """Return the schemas of responses, keyed by name."""
    maybe_time, maybe_text = _TIME | {"type": ["integer", "null"]}, {"type": ["string", "null"]}
    file = closed({
        "id": STRING, "object": {"const": "file"}, "bytes": COUNT, "created_at": _TIME, "expires_at": maybe_time,
        "filename": STRING, "purpose": {"enum": [INPUT_PURPOSE, OUTPUT_PURPOSE]}, "status": {"const": "processed"},
        "status_details": {"type": "null"},
    })  # fmt: skip
    problem = closed(
        {"code": STRING, "line": COUNT | {"type": ["integer", "null"]}, "message": STRING, "param": maybe_text}
    )
    errors = closed({"object": {"const": "list"}, "data": {"type": "array", "items": problem}})
    usage = closed({
        "input_tokens": COUNT, "input_tokens_details": closed({"cached_tokens": COUNT}),
        "output_tokens": COUNT, "output_tokens_details": closed({"reasoning_tokens": COUNT}), "total_tokens": COUNT,
    })  # fmt: skip
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    batch = closed({
        "id": STRING, "object": {"const": "batch"}, "endpoint": {"enum": list(ENDPOINTS)}, "model": maybe_text,
        "errors": {"anyOf": [errors, {"type": "null"}]}, "input_file_id": STRING, "completion_window": STRING,
        "status": {"enum": list(STATUSES)}, "output_file_id": maybe_text, "error_file_id": maybe_text,
        "created_at": _TIME, "expires_at": _TIME, **{f"{name}_at": maybe_time for name in times},
        "request_counts": closed({name: COUNT for name in ("total", "completed", "failed")}),
        "usage": usage, "metadata": {"type": ["object", "null"]},
    })  # fmt: skip
    return {
        "File": file,
        "Files": _list_of("File"),
        "DeletedFile": closed({"id": STRING, "object": {"const": "file"}, "deleted": {"const": True}}),
        "Batch": batch,
        "Batches": _list_of("Batch"),
    }


def _list_of(name: str) -> Schema:
    maybe_id = {"type": ["string", "null"]}
    return closed({
        "object": {"const": "list"}, "data": {"type": "array", "items": ref(name)},
        "first_id": maybe_id, "last_id": maybe_id, "has_more": FLAG,
    })  # fmt: skip


def _parameter(name: str, where: str, schema: Schema, text: str) -> Schema:
    return {"name": name, "in": where, "required": where == "path", "schema": schema, "description": text}
