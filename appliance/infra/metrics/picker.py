"""What an endpoint picker exports for Prometheus; `worker` is an address of the pool."""

from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge


class PickerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.picks = Counter(
            "appliance_picker_picks",
            "Requests that the proxy was told to send to this worker first.",
            ["worker"],
            registry=registry,
        )
        self.refusals = Counter(
            "appliance_picker_refusals",
            "Requests for which no worker was listed, or none that the proxy allowed; it answers 503.",
            registry=registry,
        )
        self.scrape_failures = Counter(
            "appliance_picker_scrape_failures",
            "Failed polls of the worker by the picker.",
            ["worker"],
            registry=registry,
        )
        self.endpoint_up = Gauge(
            "appliance_picker_endpoint_up",
            "1 while the worker answers polls. If 0 for all, requests still go to those that answered last.",
            ["worker"],
            registry=registry,
        )
        self.endpoint_in_fallback = Gauge(
            "appliance_picker_endpoint_in_fallback",
            "1 while one more request would be decoded without drafts on the worker.",
            ["worker"],
            registry=registry,
        )
        self.expected_speed = Gauge(
            "appliance_picker_expected_tokens_per_second",
            "Tokens per second that one more request would get on the worker; 0 if nothing was measured.",
            ["worker"],
            registry=registry,
        )

    def forget_worker(self, worker: str) -> None:
        for labelled in (
            *(self.picks, self.scrape_failures),
            *(self.endpoint_up, self.endpoint_in_fallback, self.expected_speed),
        ):
            with suppress(KeyError):  # no series with it yet
                labelled.remove(worker)
