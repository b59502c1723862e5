"""Ledger of requests to a gateway: how each ended at its client, compared with the offline answer and with what the
replicas executed."""

import dataclasses
import enum
import http.client
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.server.fleet import Execution

_DEFINITE = range(400, 500)
"""Statuses that say that the request was not, and will not be, served as it stands."""


class Outcome(enum.StrEnum):
    """How a request ended at its client."""

    OK = "ok"
    """Whole, with a finish reason."""
    REFUSED = "refused"
    """A status other than 200, before any token."""
    ERROR = "error"
    """A stream that ended with an error event."""
    TRUNCATED = "truncated"
    """The connection broke, or fell silent, after the status."""
    INDETERMINATE = "indeterminate"
    """The connection broke, or fell silent, before the status."""


class Expected(Protocol):
    """Offline answer."""

    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Entry:
    """One request. Times are those of `time.time`."""

    request_id: str
    number: int
    """Index of its offline answer."""
    stream: bool
    sent_s: float
    first_s: float | None = None
    """Time of its first text."""
    ended_s: float = 0.0
    outcome: Outcome = Outcome.INDETERMINATE
    status: int | None = None
    text: str = ""
    finish_reason: str | None = None
    error: str = ""


def ask(
    port: int,
    body: Mapping[str, Any],
    *,
    request_id: str,
    number: int = 0,
    stream: bool = True,
    timeout_s: float = 60.0,
    on_first: Callable[[], object] = lambda: None,
) -> Entry:
    """Send a completion and follow it to its end, however that comes.

    Args:
        port: of the gateway.
        body: of `POST /v1/completions`.
        request_id: unique; replicas log it as the prefix of theirs.
        number: index of the offline answer.
        stream: server-sent events, else one JSON object.
        timeout_s: maximum silence of the connection.
        on_first: called when the first text of a stream arrives.
    """
    entry = Entry(request_id=request_id, number=number, stream=stream, sent_s=time.time())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        headers = {"content-type": "application/json", "x-request-id": request_id}
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": stream}), headers)
        response = connection.getresponse()
        entry.status = response.status
        entry.outcome = Outcome.TRUNCATED
        if response.status != 200:
            entry.error = response.read().decode(errors="replace")
            entry.outcome = Outcome.REFUSED
        elif stream:
            _read_events(response, entry, on_first)
        else:
            choice = json.loads(response.read())["choices"][0]
            entry.text, entry.finish_reason, entry.outcome = choice["text"], choice["finish_reason"], Outcome.OK
    except (OSError, http.client.HTTPException) as error:
        entry.error = f"{type(error).__name__}: {error}"
    finally:
        entry.ended_s = time.time()
        connection.close()
    return entry


def _read_events(response: http.client.HTTPResponse, entry: Entry, on_first: Callable[[], object]) -> None:
    for line in response:
        if not line.startswith(b"data: ") or not line.endswith(b"\n"):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            if entry.outcome is not Outcome.ERROR and entry.finish_reason is not None:
                entry.outcome = Outcome.OK
            continue
        event = json.loads(data)
        if "error" in event:
            entry.outcome, entry.error = Outcome.ERROR, event["error"]["message"]
            continue
        for choice in event["choices"]:
            entry.text += choice["text"]
            entry.finish_reason = choice["finish_reason"] or entry.finish_reason
            if entry.text and entry.first_s is None:
                entry.first_s = time.time()
                on_first()


def differences(entry: Entry, expected: Expected) -> list[str]:
    """Return how what a client got differs from the offline answer, of which it may have only the beginning."""
    found = []
    if entry.outcome is Outcome.OK or entry.finish_reason is not None:
        if entry.text != expected.text:
            found.append("the text differs from the offline answer")
        if entry.finish_reason != expected.finish_reason:
            found.append(f"finish reason {entry.finish_reason}, not {expected.finish_reason}")
    elif not expected.text.startswith(entry.text):
        found.append("the text is not the beginning of the offline answer")
    if entry.outcome is Outcome.ERROR and entry.finish_reason is not None:
        found.append("an error and a finish reason")
    return [f"{entry.request_id}: {entry.outcome}: {text}" for text in found]


def audit(
    entries: Sequence[Entry], executions: Iterable[Execution], disturbed: Sequence[tuple[float, float]]
) -> tuple[list[str], int]:
    """Compare what clients got with what replicas executed.

    Args:
        entries: of all requests.
        executions: by the logs of all replicas.
        disturbed: times, from and to, in which a link or a process was at fault: requests that were open then may have
            been sent again before their first token.

    Returns:
        Violations, and the number of requests that were executed to the end more than once, or to the end though
        their client was refused, while something was at fault.
    """
    by_id: dict[str, list[Execution]] = {}
    for execution in executions:
        by_id.setdefault(execution.request_id, []).append(execution)
    of_entry = _assign(entries, by_id)
    violations, repeated = [], 0
    for entry in entries:
        had = of_entry[entry.request_id]
        complete = sum(execution.is_complete for execution in had)
        excused = any(start < entry.ended_s and entry.sent_s < end for start, end in disturbed)
        name = f"{entry.request_id}: {entry.outcome}"
        if entry.outcome is Outcome.REFUSED and complete:
            if entry.status in _DEFINITE or not excused:
                violations.append(f"{name} with {entry.status}, and executed")
            else:
                repeated += 1
        elif complete > 1:
            repeated += 1
            if not excused:
                violations.append(f"{name}: executed {complete} times without a fault")
        if entry.first_s is not None:
            later = [x for x in had if x.started_s > entry.first_s + 0.05]
            if later:
                violations.append(f"{name}: sent again after its first token")
    return violations, repeated


def _assign(entries: Sequence[Entry], by_id: Mapping[str, list[Execution]]) -> dict[str, list[Execution]]:
    """Replicas' request ids are the client's with a suffix of the gateway: `ID-UUID`."""
    found: dict[str, list[Execution]] = {entry.request_id: [] for entry in entries}
    for request_id, executions in by_id.items():
        own = request_id[: -len("-00000000-0000-0000-0000-000000000000")]
        if own in found:
            found[own] += executions
    return found
