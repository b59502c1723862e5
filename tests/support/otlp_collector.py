"""A collector of OpenTelemetry traces on this machine: OTLP over HTTP, decoded by the official messages."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Span:
    """One span that was received.

    Attributes:
        attributes: by name, as plain values.
        resource: attributes of the process that sent it, by name too.
    """

    def __init__(self, span: Any, resource: Any) -> None:
        self.name: str = span.name
        self.kind: int = span.kind
        self.trace_id, self.span_id = span.trace_id.hex(), span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.start_ns, self.end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        self.is_error: bool = span.status.code == 2
        self.status_text: str = span.status.message
        self.attributes = {item.key: _plain(item.value) for item in span.attributes}
        self.resource = {item.key: _plain(item.value) for item in resource.attributes}


class Collector:
    """Received requests, and the answers to them.

    Attributes:
        status: HTTP status of the answers.
        hold: answers wait for this event.
        raw: received bodies.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.status = 200
        self.hold = threading.Event()
        self.hold.set()
        self.raw: list[bytes] = []

    @property
    def spans(self) -> list[Span]:
        return [
            Span(span, group.resource)
            for data in list(self.raw)
            for group in ExportTraceServiceRequest.FromString(data).resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    """Run one."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            found.hold.wait(30)
            if found.status == 200 and self.path == "/v1/traces":
                found.raw.append(data)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(found.status if self.path == "/v1/traces" else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Not to standard error."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    found = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
