"""
A real Envoy in front of workers, configured as implementations of the inference extension configure theirs.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import envoy._bin

from appliance.serving.supervise import free_port

BINARY = Path(envoy._bin.__file__).with_name("envoy")
START_SECONDS = 60.0
STOP_SECONDS = 30.0
TYPE = "type.googleapis.com/envoy"
EXTENSIONS = f"{TYPE}.extensions"
DESTINATION = "x-gateway-destination-endpoint"


class EnvoyProxy:
    """Envoy between clients and workers, which asks a picker; use it as an async context manager."""

    def __init__(
        self,
        workers: Sequence[str],
        picker: str,
        *,
        directory: Path,
        body_mode: str = "FULL_DUPLEX_STREAMED",
        plaintext: bool = False,
        certificate: tuple[Path, Path] | None = None,
        fails_open: bool = True,
        subset: Sequence[str] | None = None,
    ) -> None:
        """`workers` are base URLs, `picker` is its address; `certificate` and its key are Envoy's own."""
        self.port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        trailers = "SEND" if body_mode == "FULL_DUPLEX_STREAMED" else "SKIP"
        processing = {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": body_mode,
            "response_body_mode": body_mode,
            "request_trailer_mode": trailers,
            "response_trailer_mode": trailers,
        }
        external = {
            "@type": f"{EXTENSIONS}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "failure_mode_allow": fails_open,
            "message_timeout": "20s",
            "processing_mode": processing,
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        }
        filters = [
            {"name": "picker", "typed_config": external},
            {"name": "router", "typed_config": {"@type": f"{EXTENSIONS}.filters.http.router.v3.Router"}},
        ]
        if subset is not None:
            filters.insert(0, {"name": "subset", "typed_config": _subset_filter(subset)})
        configuration = {
            "static_resources": {
                "listeners": [_listener(self.port, filters)],
                "clusters": [_workers(workers), _picker(picker, plaintext, certificate)],
            }
        }
        file = directory / f"envoy-{self.port}.json"
        file.write_text(json.dumps(configuration), encoding="utf-8")
        self._log = (directory / f"envoy-{self.port}.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [
                *(str(BINARY), "--config-path", str(file), "--concurrency", "1"),
                *("--disable-hot-restart", "--log-level", "warning"),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    async def __aenter__(self) -> Self:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                await self.__aexit__()
                raise AssertionError(f"Envoy did not start, see {self._log.name}")
            await asyncio.sleep(0.05)

    async def __aexit__(self, *_reason: object) -> None:
        self._process.terminate()
        await asyncio.to_thread(self._process.wait, STOP_SECONDS)
        self._log.close()


def _listener(port: int, filters: list[dict[str, Any]]) -> dict[str, Any]:
    route = {"match": {"prefix": "/"}, "route": {"cluster": "workers", "timeout": "0s"}}
    manager = {
        "@type": f"{EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": filters,
    }
    return {
        "name": "clients",
        "address": _address("127.0.0.1", port),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _workers(urls: Sequence[str]) -> dict[str, Any]:
    override = {
        "@type": f"{EXTENSIONS}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "round_robin",
                        "typed_config": {
                            "@type": f"{EXTENSIONS}.load_balancing_policies.round_robin.v3.RoundRobin"
                        },
                    }
                }
            ]
        },
    }
    return {
        "name": "workers",
        "type": "STATIC",
        "load_assignment": _assignment("workers", [urlsplit(url).netloc for url in urls]),
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "override_host", "typed_config": override}}]
        },
    }


def _picker(address: str, plaintext: bool, certificate: tuple[Path, Path] | None) -> dict[str, Any]:
    http2 = {
        "@type": f"{EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    cluster = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": _assignment("picker", [address]),
        # So that a stream to a picker that is gone fails before the proxy has sent a part of the body.
        "health_checks": [
            {
                "timeout": "5s",
                **({} if plaintext else {"tls_options": {"alpn_protocols": ["h2"]}}),
                "interval": "0.1s",
                "no_traffic_interval": "0.1s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
            }
        ],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "typed_extension_protocol_options": {f"{HTTP_OPTIONS}": http2},
    }
    if plaintext:
        return cluster
    common: dict[str, Any] = {"validation_context": {}}
    if certificate is not None:
        chain, key = certificate
        own = {"certificate_chain": {"filename": str(chain)}, "private_key": {"filename": str(key)}}
        common["tls_certificates"] = [own]
    tls = {"@type": f"{EXTENSIONS}.transport_sockets.tls.v3.UpstreamTlsContext", "common_tls_context": common}
    return {**cluster, "transport_socket": {"name": "tls", "typed_config": tls}}


HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def _assignment(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    endpoints = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        endpoints.append({"endpoint": {"address": _address(host, int(port))}})
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _subset_filter(addresses: Sequence[str]) -> dict[str, Any]:
    return {
        "@type": f"{EXTENSIONS}.filters.http.set_metadata.v3.Config",
        "metadata": [
            {
                "metadata_namespace": "envoy.lb.subset_hint",
                "value": {f"{DESTINATION}-subset": list(addresses)},
            }
        ],
    }
