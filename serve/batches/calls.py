"""Serves one request of a batch like an HTTP call: reading, validation, life cycle and response are the same.

`ENDPOINTS` holds the paths that a batch may use. Requests run as best effort (`slo_class` "be") and without their own
latency objectives; only the batch as a whole has a deadline.
"""

import asyncio
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from apt_jax.config import SchedulerConfig
from apt_jax.engine.admission import TENANT_SHARE
from apt_jax.errors import InvalidRequestError
from apt_jax.frontend.async_engine import AsyncEngine
from apt_jax.frontend.outputs import OutputDelta
from apt_jax.frontend.streams import RequestStreamGroup
from apt_jax.request import EngineRequest
from apt_jax.validation import check_flag
from serve.batches.records import Outcome
from serve.generate_call import CallService, EngineCall, run_generate
from serve.http_api.endpoints import ENDPOINTS as HTTP_ENDPOINTS
from serve.http_api.endpoints import Endpoint, ResponseBuilder, TextCall
from serve.http_api.errors import to_http_error
from serve.http_api.openai_request import Body, parse_json
from serve.observability.call_record import CallRecord
from serve.slo_headers import TIER_KEY, class_of_tier

TEMPORARY = (429, 503)
"""HTTP statuses after which a request runs again instead of getting an outcome."""
_WITHOUT_EFFECT = ("request_id", "slo", "slo_ttft_ms", "slo_tbt_ms", "slo_e2e_ms", "slo_class", "deadline_ms", TIER_KEY)
"""Body fields that are dropped, because a batch has one deadline and identifies its requests by `custom_id`."""


class BatchCall:
    """One request of a batch, a `serve.generate_call.Transport` that collects the response.

    Args:
        endpoint: the HTTP endpoint that the request is for.
        service: the engine and the preprocessing queues.
        data: the request's line of the input file.
        tenant: owner of the batch; empty if the server has no API keys.
        on_read: called just before the call's requests are submitted to the engine.
    """

    def __init__(
        self, endpoint: Endpoint, service: CallService, data: bytes, tenant: str, on_read: Callable[[], object]
    ) -> None:
        self._endpoint = endpoint
        self._service, self._data, self._tenant = service, data, tenant or None
        self.record = CallRecord(protocol="batch", method=endpoint.path, tenant=self._tenant)
        self.outcome: Outcome | None = None
        """Result of the request; None if the request has not ended or must run again."""
        self.retry_after_s: float | None = None
        """Seconds after which to run the request again; set after a temporary error, such as a full queue."""
        self.num_requests = 0
        """Number of engine requests of this call; 0 until the line has been read."""
        self._on_read = on_read
        self._call: TextCall
        self._response: ResponseBuilder
        self._collected: dict[int, OutputDelta] = {}

    async def read(self, engine: AsyncEngine) -> EngineCall:
        """See `serve.generate_call.Transport`. In the queues, a tenant's batches and its interactive calls count as
        different owners."""
        owner, work = ("batch", self._tenant), self._service.work
        parts, arrival_s = engine.parts, engine.parts.clock.now_s()

        def read() -> TextCall:
            body = parse_json(self._data)["body"]
            if body.get("stream") is not None and check_flag("stream", body["stream"]):
                raise InvalidRequestError("stream", "is not supported in a batch; leave it out")
            class_of_tier(body.get(TIER_KEY))  # no effect, but an invalid tier is an error
            call = self._endpoint.read(parts, _as_best_effort(body), {}, arrival_s, self._tenant)
            _require_places(parts.config.scheduler, call, "prompt" if body.get("n") in (None, 1) else "n")
            return call.with_requests([_without_objectives(request) for request in call.requests])

        call = await work.run(read, owner, num_bytes=len(self._data))
        try:
            requests = await work.compile_grammars(call.requests, owner)
        except InvalidRequestError as error:
            raise call.renamed(error) from None
        self._call = call.with_requests(requests)
        self._response = self._endpoint.respond(parts, self._call)
        self.num_requests = len(requests)
        self._on_read()
        return EngineCall(call.call_id, requests, call.deadline_s)

    def on_disconnect(self, cancel: Callable[[], None]) -> None:
        """See `serve.generate_call.Transport`. Does nothing: `BatchFeeder` cancels the call's task."""

    async def write(self, index: int, delta: OutputDelta, group: RequestStreamGroup) -> None:
        """See `serve.generate_call.Transport`."""
        if index in self._collected:
            self._collected[index].merge(delta)
        else:
            self._collected[index] = delta

    async def finish(self) -> None:
        """See `serve.generate_call.Transport`."""
        ordered = [self._collected[index] for index in range(len(self._call.requests))]

        def whole() -> Any:
            return json.loads(self._response.whole(ordered))

        may_be_large = any(
            one is not None for delta in ordered for one in (delta.logprobs, delta.prompt_logprobs, delta.pooled)
        )
        body = await asyncio.to_thread(whole) if may_be_large else whole()
        usage = body["usage"]
        self.outcome = _response(
            200,
            self._call.call_id,
            body,
            input_tokens=usage["prompt_tokens"],
            cached_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
            output_tokens=usage.get("completion_tokens", 0),
        )

    def disconnect_reason(self, error: Exception) -> str | None:
        """See `serve.generate_call.Transport`."""
        return None

    async def fail(self, error: Exception) -> None:
        """See `serve.generate_call.Transport`."""
        failure = to_http_error(error, self.record.request_id)
        self.record.failed(error, str(failure.status), failure.code, internal=failure.status >= 500)
        if failure.status in TEMPORARY:
            self.retry_after_s = float(failure.headers["retry-after"])
            return
        self.outcome = _response(failure.status, self.record.request_id, failure.body(), is_error=True)

    def close(self) -> None:
        """See `serve.generate_call.Transport`."""

    async def run(self) -> None:
        """Serve the request to its end and set `outcome` or `retry_after_s`. A cancelled task leaves no outcome."""
        await run_generate(self, self._service)


def _as_best_effort(body: Body) -> dict[str, Any]:
    return {**{name: value for name, value in body.items() if name not in _WITHOUT_EFFECT}, "slo_class": "be"}


def _require_places(config: SchedulerConfig, call: TextCall, field: str) -> None:
    """Check that an empty queue can hold all requests of a call at once.

    The number of requests must fit in the queue, or in the tenant's share of it if there is a tenant. If there are
    several requests, their prompt tokens must also fit in the whole queue.

    Raises:
        InvalidRequestError: the queue is too small, so retries would never succeed.
    """
    num, most, option = len(call.requests), config.max_num_queued_reqs, "--max-num-queued-reqs"
    if any(request.tenant is not None for request in call.requests):
        most = math.ceil(most * TENANT_SHARE / (1 + TENANT_SHARE))
    asks = f"it makes {num} requests"
    fits = num <= most
    if fits and config.max_num_queued_tokens is not None and num > 1:
        tokens, most = sum(int(r.prompt_token_ids.size) for r in call.requests), config.max_num_queued_tokens
        asks, option, fits = f"its requests have {tokens} prompt tokens", "--max-num-queued-tokens", tokens <= most
    if not fits:
        raise call.renamed(
            InvalidRequestError(field, f"{asks}, but the queue holds at most {most} ({option}); ask for fewer at once")
        )


def _without_objectives(request: EngineRequest) -> EngineRequest:
    return dataclasses.replace(request, slo=type(request.slo)())


def _response(
    status: int, request_id: str, body: Mapping[str, Any], *, is_error: bool = False, **tokens: int
) -> Outcome:
    value = {"response": {"status_code": status, "request_id": request_id, "body": body}, "error": None}
    return Outcome(is_error=is_error, value=value, **tokens)


def failed_outcome(code: str, message: str) -> Outcome:
    """Return the outcome of a request that has an error code and message instead of a response."""
    return Outcome(is_error=True, value={"response": None, "error": {"code": code, "message": message}})


EXPIRED = failed_outcome("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = failed_outcome("batch_cancelled", "The batch was cancelled before this request was executed.")
ENDPOINTS: Mapping[str, Callable[[CallService, bytes, str, Callable[[], object]], BatchCall]] = {
    endpoint.path: functools.partial(BatchCall, endpoint)
    for endpoint in HTTP_ENDPOINTS
    if endpoint.path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
}
"""For each path that a batch may use, a function that creates the `BatchCall` of one request."""
