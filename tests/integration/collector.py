"""
A collector of traces for tests: OTLP over HTTP on loopback, and the settings that send spans to it.
"""

import gzip
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.certificates import Files

PATIENCE_SECONDS = 60


class Collector:
    """Accepts exported traces and keeps them unchanged."""

    def __init__(self, certificate: Files | None = None) -> None:
        self._certificate = certificate
        self.bodies: list[bytes] = []
        self.status = 200
        self.url = ""

    @contextmanager
    def listening(self) -> Iterator["Collector"]:
        """Answer on a free port for as long as the context lasts."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                is_packed = self.headers["Content-Encoding"] == "gzip"
                collector.bodies.append(gzip.decompress(body) if is_packed else body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if self._certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(self._certificate.certificate, self._certificate.key)
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        self.url = f"http{'s' * bool(self._certificate)}://127.0.0.1:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def spans(self) -> list[dict[str, Any]]:
        """All spans so far, with their service and their attributes by name."""
        found = []
        for body in list(self.bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                found += [
                    {
                        "service": service,
                        "name": span.name,
                        "trace": span.trace_id.hex(),
                        "id": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "links": [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                        "events": list(span.events),
                        "attributes": _values(span.attributes),
                    }
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
        return found

    def wait_for(self, *names: str) -> dict[str, dict[str, Any]]:
        """Wait until there is a span of each name; the last one of each."""
        self.wait_until(lambda: set(names) <= {span["name"] for span in self.spans})
        return {span["name"]: span for span in self.spans}

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for something to be true of the spans."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < deadline, self.spans
            time.sleep(0.05)


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def traced(collector: Collector, **more: str) -> dict[str, str]:
    return {
        "APPLIANCE_TRACING__ENABLED": "true",
        "APPLIANCE_TRACING__ENDPOINT": collector.url,
        "APPLIANCE_TRACING__SAMPLE_RATIO": "1",
        "APPLIANCE_TRACING__INTERVAL_SECONDS": "0.1",
        "APPLIANCE_LOG__FORMAT": "json",
        # The resource attributes of a gateway's environment are ignored.
        "OTEL_SDK_DISABLED": "true",
        **more,
    }
