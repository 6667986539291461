# SPDX-License-Identifier: Apache-2.0
"""A collector on loopback that takes spans over OTLP/HTTP as real ones do, and tells what they hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

KINDS: Final = {1: "internal", 2: "server", 3: "client"}
ERROR: Final = 2


@dataclass(frozen=True)
class Exported:
    """A span as it arrived."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    kind: str
    began: int
    ended: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    """Trace and span of each."""
    failed: bool


@dataclass
class Collector:
    """What came, and how it is answered: `status`; None: not at all."""

    status: int | None = 200
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""
    asked: threading.Event = field(default_factory=threading.Event)
    """Set at the first request."""
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def spans(self) -> list[Exported]:
        """All spans so far, the one that began first in front."""
        found = [span for body in list(self.bodies) for span in _decoded(body)]
        return sorted(found, key=lambda span: span.began)

    def named(self, name: str) -> list[Exported]:
        return [span for span in self.spans if span.name == name]

    async def holds(self, *names: str) -> bool:
        """Say whether a span of each name has come: for `serving.until`."""
        return set(names) <= {span.name for span in self.spans}


@contextmanager
def collecting(status: int | None = 200) -> Iterator[Collector]:
    """Run a collector. One that gives no answer holds each request until the end."""
    collector = Collector(status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.paths.append(self.path)
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            collector.asked.set()
            if collector.status is None:
                collector.over.wait()
                return
            if collector.status == 200:
                collector.bodies.append(body)
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        collector.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _decoded(body: bytes) -> Iterator[Exported]:
    request = ExportTraceServiceRequest.FromString(body)
    for of_resource in request.resource_spans:
        resource = {pair.key: _value(pair.value) for pair in of_resource.resource.attributes}
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                yield Exported(
                    name=span.name,
                    service=resource["service.name"],
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    kind=KINDS[span.kind],
                    began=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    attributes={pair.key: _value(pair.value) for pair in span.attributes},
                    links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    failed=span.status.code == ERROR,
                )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
