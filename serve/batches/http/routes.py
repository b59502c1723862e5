"""``/v1/files`` and ``/v1/batches`` (`serve.batches`). A call sees only files and batches of its API key's owner."""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from apt_jax.errors import InvalidRequestError, QueueFullError, counted
from apt_jax.frontend.streams import EngineClosedError
from apt_jax.validation import check_mapping
from serve.batches.calls import ENDPOINTS
from serve.batches.config import (
    MAX_FILE_TTL_S,
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    MIN_FILE_TTL_S,
    window_s,
)
from serve.batches.http.uploads import read_form
from serve.batches.records import INPUT_PURPOSE, BatchRecord, FileRecord, new_id, now_s
from serve.batches.runner import BatchRunner, BatchStateError
from serve.batches.store import DiskFullError, InUseError, NotFoundError, disk_errors
from serve.compact_json import json_bytes
from serve.generate_call import LONG_PROMPT_CHARS, CallService
from serve.http_api.app_config import AppConfig
from serve.http_api.calls import CALLER_KEY, owner_of, read_body
from serve.http_api.errors import BadCallError
from serve.http_api.openai_request import Body, parse_json
from serve.security.api_keys import Caller

MAX_FILES_PAGE = 10_000
MAX_BATCHES_PAGE = 100
BATCHES_PAGE = 20

_READ_BYTES = 256 << 10

Endpoint = Callable[[Request], Awaitable[Response]]


class BatchEndpoints:
    """The endpoints for files and batches.

    Args:
        config: limits of HTTP calls.
        service: the engine and the queues of the HTTP application.
        runner: runs the batches.
    """

    def __init__(self, config: AppConfig, service: CallService, runner: BatchRunner) -> None:
        self._config, self._service, self._runner = config, service, runner
        self._uploads: collections.Counter[object] = collections.Counter()
        """Number of uploads in progress per owner."""

    def routes(self, safely: Callable[[Endpoint], Endpoint]) -> list[Route]:
        """Return the routes of all endpoints.

        Args:
            safely: wraps an endpoint so that its errors become responses.
        """

        def route(path: str, endpoint: Endpoint, method: str) -> Route:
            return Route(path, safely(self._mapped(endpoint)), methods=[method])

        return [
            route("/v1/files", self._upload, "POST"),
            route("/v1/files", self._files, "GET"),
            route("/v1/files/{file_id}", self._file, "GET"),
            route("/v1/files/{file_id}", self._delete_file, "DELETE"),
            route("/v1/files/{file_id}/content", self._content, "GET"),
            route("/v1/batches", self._create, "POST"),
            route("/v1/batches", self._batches, "GET"),
            route("/v1/batches/{batch_id}", self._batch, "GET"),
            route("/v1/batches/{batch_id}/cancel", self._cancel, "POST"),
        ]

    def _mapped(self, endpoint: Endpoint) -> Endpoint:
        """Wrap an endpoint so that errors of files and batches become HTTP errors."""

        async def mapped(request: Request) -> Response:
            if self._runner.is_stopped:
                raise EngineClosedError("the server is shutting down")
            try:
                with disk_errors():
                    return await endpoint(request)
            except NotFoundError:
                kind = "file" if "/files" in request.url.path else "batch"
                given = request.path_params.get(f"{kind}_id") or request.query_params.get("after", "")
                raise BadCallError(404, f"{kind}_not_found", f"this API key has no {kind} {given[:80]!r}") from None
            except InUseError:
                message = "a batch that has not ended reads this file: cancel the batch, or wait for it to end"
                raise BadCallError(400, "file_in_use", message) from None
            except BatchStateError as error:
                raise BadCallError(400, "invalid_batch_state", str(error)) from None
            except DiskFullError as error:
                raise BadCallError(507, "disk_full", str(error)) from None

        mapped.__name__ = endpoint.__name__
        return mapped

    # --- files -------------------------------------------------------------------------------------------------------

    async def _upload(self, request: Request) -> Response:
        store, tenant, config = self._runner.store, _tenant(request), self._config
        length = request.headers.get("content-length", "0")
        if length.isdecimal():
            num_bytes = min(int(length[:20]), store.config.max_file_bytes)
            await store.run(lambda: store.check_room(tenant, num_bytes))
        with self._upload_slot(owner_of(request.scope)):
            form = await read_form(request, store.files_dir, store.config, config.body_timeout_s)
            path = form.path
            assert path is not None
            try:
                record = self._record_of(form.fields, tenant, form.filename, form.num_bytes)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            # Not cancelled with the call: `add_file` either registers the file or removes it.
            await asyncio.shield(asyncio.ensure_future(store.run(lambda: store.add_file(record, path))))
        return _json(record.as_json())

    @contextlib.contextmanager
    def _upload_slot(self, owner: object) -> Iterator[None]:
        most, uploads = self._runner.store.config.max_uploads, self._uploads
        if uploads.total() >= most or uploads[owner] >= max(1, most // 2):
            raise QueueFullError("too many files are being uploaded; send fewer at once", 2.0)
        uploads[owner] += 1
        try:
            yield
        finally:
            uploads[owner] -= 1
            if not uploads[owner]:
                del uploads[owner]

    @staticmethod
    def _record_of(fields: Mapping[str, str], tenant: str, filename: str, num_bytes: int) -> FileRecord:
        """Return the record of an uploaded file from the fields of its form.

        Raises:
            InvalidRequestError: a field is invalid.
        """
        purpose = fields.get("purpose")
        if purpose != INPUT_PURPOSE:
            raise InvalidRequestError("purpose", f"must be {INPUT_PURPOSE!r}: files are the input of batches")
        ttl_s, created = None, now_s()
        if "expires_after[anchor]" in fields or "expires_after[seconds]" in fields:
            seconds = fields.get("expires_after[seconds]", "")
            given = int(seconds) if seconds.isascii() and seconds.isdecimal() and len(seconds) < 10 else None
            ttl_s = _expires_after(
                "expires_after", {"anchor": fields.get("expires_after[anchor]"), "seconds": given}
            )  # fmt: skip
        return FileRecord(
            id=new_id("file-"), tenant=tenant, purpose=purpose, filename=filename, bytes=num_bytes,
            created_at=created, expires_at=None if ttl_s is None else created + ttl_s,
        )  # fmt: skip

    async def _files(self, request: Request) -> Response:
        store, tenant, query = self._runner.store, _tenant(request), request.query_params
        limit = _limit(query, MAX_FILES_PAGE, MAX_FILES_PAGE)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order", "must be asc or desc")
        purpose, after = query.get("purpose"), query.get("after")

        def page() -> bytes:
            newest = order == "desc"
            files, more = store.files(tenant, purpose=purpose, after=after, limit=limit, newest_first=newest)
            return json_bytes(_page([file.as_json() for file in files], more))

        return Response(await store.run(page), media_type="application/json")

    async def _file(self, request: Request) -> Response:
        store, tenant, file_id = self._runner.store, _tenant(request), request.path_params["file_id"]
        return _json((await store.run(lambda: store.file(tenant, file_id))).as_json())

    async def _delete_file(self, request: Request) -> Response:
        store, tenant, file_id = self._runner.store, _tenant(request), request.path_params["file_id"]
        await store.run(lambda: store.delete_file(tenant, file_id))
        return _json({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        store, tenant, file_id = self._runner.store, _tenant(request), request.path_params["file_id"]
        record = await store.run(lambda: store.file(tenant, file_id))
        headers = {"content-length": str(record.bytes), "x-content-type-options": "nosniff"}
        if request.method == "HEAD":
            return Response(headers=headers, media_type="application/jsonl")
        try:
            file = await asyncio.to_thread(store.path(record.id).open, "rb")
        except FileNotFoundError:  # it has just been deleted
            raise NotFoundError from None

        async def pieces() -> AsyncIterator[bytes]:
            with file:
                while piece := await asyncio.to_thread(file.read, _READ_BYTES):
                    yield piece

        return StreamingResponse(pieces(), headers=headers, media_type="application/jsonl")

    # --- batches -----------------------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        self._require_resumed()
        store, tenant = self._runner.store, _tenant(request)
        work, owner = self._service.work, owner_of(request.scope)
        with work.bodies.lease(owner) as lease:
            data = await read_body(self._config, request, lease)
            if len(data) > LONG_PROMPT_CHARS:
                body = await work.run(lambda: parse_json(data), owner, num_bytes=len(data))
            else:
                body = parse_json(data)
        record = _batch_of(body, tenant)

        def add() -> None:
            try:
                file = store.file(tenant, record.input_file_id)
            except NotFoundError:
                raise InvalidRequestError(
                    "input_file_id", f"this API key has no file {record.input_file_id[:80]!r}"
                ) from None
            if file.purpose != INPUT_PURPOSE:
                raise InvalidRequestError("input_file_id", f"its purpose must be {INPUT_PURPOSE!r}")
            if store.num_open_batches(tenant) >= store.config.max_open_batches:
                message = f"this API key has the maximum of {counted(store.config.max_open_batches, 'open batch', 'open batches')}; wait or cancel some"
                raise QueueFullError(message, 60.0)
            store.add_batch(record)

        await store.run(add)
        shown = record.as_json()
        self._runner.add(record)
        return _json(shown)

    async def _batches(self, request: Request) -> Response:
        store, tenant, query = self._runner.store, _tenant(request), request.query_params
        limit = _limit(query, MAX_BATCHES_PAGE, BATCHES_PAGE)
        after = query.get("after")
        batches, more = await store.run(lambda: store.batches(tenant, after=after, limit=limit))
        return _json(_page([self._runner.current(batch).as_json() for batch in batches], more))

    async def _batch(self, request: Request) -> Response:
        store, tenant, batch_id = self._runner.store, _tenant(request), request.path_params["batch_id"]
        record = await store.run(lambda: store.batch(tenant, batch_id))
        return _json(self._runner.current(record).as_json())

    async def _cancel(self, request: Request) -> Response:
        self._require_resumed()
        record = await self._runner.cancel(_tenant(request), request.path_params["batch_id"])
        return _json(record.as_json())

    def _require_resumed(self) -> None:
        """Check that the batches on disk have been resumed.

        Raises:
            EngineClosedError: the server is starting or shutting down.
        """
        self._service.engine()
        if not self._runner.is_resumed:
            raise EngineClosedError("the server is starting: batches are being read", why="no-endpoints")


def _tenant(request: Request) -> str:
    caller: Caller = request.scope[CALLER_KEY]
    return caller.tenant or ""


def _json(value: Any) -> Response:
    return Response(json_bytes(value), media_type="application/json")


def _page(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


def _limit(query: Mapping[str, str], most: int, default: int) -> int:
    text = query.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 8 and 1 <= int(text) <= most):
        raise InvalidRequestError("limit", f"must be a whole number from 1 to {most}")
    return int(text)


def _batch_of(body: Body, tenant: str) -> BatchRecord:
    """Return a new batch record from a request body.

    Raises:
        InvalidRequestError: a field is invalid.
    """
    file_id, endpoint, window = (body.get(name) for name in ("input_file_id", "endpoint", "completion_window"))
    if not isinstance(file_id, str) or not file_id or not file_id.isascii():
        raise InvalidRequestError("input_file_id", "must be the id of a file")
    if not isinstance(endpoint, str) or endpoint not in ENDPOINTS:
        raise InvalidRequestError("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    seconds, created = window_s(window), now_s()
    after = body.get("output_expires_after")
    return BatchRecord(
        id=new_id("batch_"), tenant=tenant, endpoint=endpoint, input_file_id=file_id,
        completion_window=str(window), created_at=created, expires_at=created + seconds,
        metadata=_metadata(body.get("metadata")),
        output_ttl_s=None if after is None else _expires_after("output_expires_after", after),
    )  # fmt: skip


def _metadata(value: object) -> Mapping[str, str] | None:
    if value is None:
        return None
    metadata = dict(check_mapping("metadata", value))
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError("metadata", f"can have at most {MAX_METADATA} entries")
    texts: dict[str, str] = {}
    for name, text in metadata.items():
        if len(name) > MAX_METADATA_KEY_CHARS:
            raise InvalidRequestError("metadata", f"its keys can have at most {MAX_METADATA_KEY_CHARS} characters")
        if not isinstance(text, str) or len(text) > MAX_METADATA_VALUE_CHARS:
            raise InvalidRequestError(
                "metadata", f"its values must be strings of at most {MAX_METADATA_VALUE_CHARS} characters"
            )
        texts[name] = text
    return texts


def _expires_after(field: str, value: object) -> int:
    """Return the seconds in OpenAI's ``{"anchor": "created_at", "seconds": N}``."""
    given = check_mapping(field, value)
    if given.get("anchor") != "created_at":
        raise InvalidRequestError(f"{field}.anchor", "must be 'created_at'")
    seconds = given.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not MIN_FILE_TTL_S <= seconds <= MAX_FILE_TTL_S:
        raise InvalidRequestError(
            f"{field}.seconds", f"must be a whole number from {MIN_FILE_TTL_S} to {MAX_FILE_TTL_S}"
        )
    return seconds
