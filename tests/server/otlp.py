"""A collector of traces, as OTLP's exporters see it: over HTTP, or over gRPC."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status

WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Link:
    trace: str
    span: str


@dataclass(frozen=True)
class Span:
    """A span as it was sent; ids are hexadecimal, times nanoseconds since the epoch."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    links: list[Link]
    failed: bool
    service: str
    """``service.name`` of its resource."""


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        service = _values(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _values(span.attributes),
                    [Link(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    span.status.code == Status.STATUS_CODE_ERROR,
                    service,
                )


class Collector(TraceServiceServicer):  # type: ignore[misc]
    """What has been sent so far."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self._changed = threading.Condition()

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            self.spans += _spans(request)
            self._changed.notify_all()

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> Any:  # noqa: N802 - gRPC's
        self.take(request)
        return ExportTraceServiceResponse()

    def wait(self, wanted: Callable[[Span], bool], count: int = 1) -> list[Span]:
        """Return the spans of this kind, once there are so many."""

        def found() -> list[Span]:
            return [span for span in self.spans if wanted(span)]

        with self._changed:
            enough = self._changed.wait_for(lambda: len(found()) >= count, WAIT_SECONDS)
            assert enough, f"of {count} there are {found()} among {self.spans}"
            return found()

    def of_trace(self, trace: str) -> list[Span]:
        """Return the spans of a trace, in the order of their starts, once the first one is there.

        A front end sends those of an HTTP request before its own, which is the last.
        """
        self.wait(lambda span: span.trace == trace and "http.route" in span.attributes)
        found = [span for span in self.spans if span.trace == trace]
        return sorted(found, key=lambda span: (span.start, -span.end))


@contextmanager
def http_collector() -> Iterator[Collector]:
    """Collect over HTTP, as protobuf."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        yield collector
        server.shutdown()
        thread.join()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """Collect over gRPC."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(None).wait()
