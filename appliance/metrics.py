"""
Every metric the appliance exports, declared once on an injected registry.

Labels come from closed sets: tenants and models from the configuration, workers from the pool, the
rest from enumerations.  Metrics fail open: nothing here may refuse a request.
"""

from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
FINE_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)


class Metrics:
    """The metric families, one attribute each."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self.build_info = gauge("appliance_build_info", "Always 1; says what runs.", "version")
        self.requests = counter(
            "appliance_requests", "Requests by how they ended.", "tenant", "model", "route", "outcome"
        )
        self.errors = counter("appliance_errors", "Errors sent to clients, by code.", "code")
        self.requests_in_flight = gauge(
            "appliance_requests_in_flight", "Requests being answered now.", "model"
        )
        self.request_seconds = histogram(
            "appliance_request_seconds", "From request to last byte.", SECONDS, "model", "route"
        )
        self.time_to_first_byte_seconds = histogram(
            "appliance_time_to_first_byte_seconds", "From request to the first byte of a stream's content.",
            SECONDS, "model", "route",
        )  # fmt: skip
        self.overhead_seconds = histogram(
            "appliance_overhead_seconds",
            "Time the gateway itself added before the first byte, the wait for the audit log included.",
            FINE_SECONDS, "route",
        )  # fmt: skip
        self.tokens = counter("appliance_tokens", "Tokens delivered.", "tenant", "model", "kind")
        self.drafts = counter("appliance_drafts", "Drafts made for requests.", "tenant", "model")
        self.draft_tokens = counter(
            "appliance_draft_tokens", "Draft tokens proposed for requests.", "tenant", "model"
        )
        self.accepted_tokens = counter(
            "appliance_accepted_tokens", "Draft tokens the target accepted.", "tenant", "model"
        )
        self.retries = counter(
            "appliance_retries", "Attempts that failed before the first byte and went to another worker.",
            "model",
        )  # fmt: skip

        self.worker_up = gauge("appliance_worker_up", "1 while the worker can take requests.", "worker")
        self.worker_restarts = counter(
            "appliance_worker_restarts", "Times the supervisor started the worker again.", "worker"
        )
        self.worker_recycles = counter(
            "appliance_worker_recycles", "Restarts on purpose, by why and how they ended.",
            "worker", "reason", "result",
        )  # fmt: skip
        self.worker_left_out = gauge(
            "appliance_worker_left_out",
            "1 while a worker that was recycled gets no requests, because it did not come back sound.",
            "worker",
        )  # fmt: skip
        self.worker_running = gauge(
            "appliance_worker_running_requests", "Requests in the worker's batch.", "worker"
        )
        self.worker_waiting = gauge(
            "appliance_worker_waiting_requests", "Requests waiting inside the worker.", "worker"
        )
        self.worker_kv_cache_usage = gauge(
            "appliance_worker_kv_cache_usage_ratio", "Share of the KV cache in use, 0..1.", "worker"
        )
        self.worker_tokens_per_second = gauge(
            "appliance_worker_generation_tokens_per_second", "Generated tokens per second.", "worker"
        )
        self.scrape_failures = counter(
            "appliance_scrape_failures", "Looks at a worker that failed.", "worker"
        )

        self.speculation_mode = gauge(
            "appliance_speculation_mode", "1 for the mode the worker is in.", "worker", "mode"
        )
        self.speculation_reason = gauge(
            "appliance_speculation_reason", "1 for the reason of that mode.", "worker", "reason"
        )
        self.acceptance_length = gauge(
            "appliance_acceptance_length",
            "Mean tokens per draft with the bonus token, over the monitor's window.", "worker",
        )  # fmt: skip
        self.acceptance_rate = gauge(
            "appliance_acceptance_rate_ratio",
            "Accepted tokens per draft token, 0..1, over the monitor's window.", "worker",
        )  # fmt: skip
        self.acceptance_rate_per_position = gauge(
            "appliance_acceptance_rate_per_position_ratio",
            "Accepted tokens per draft at each position of the draft, 0..1.", "worker", "position",
        )  # fmt: skip
        self.window_drafts = gauge(
            "appliance_acceptance_window_drafts", "Drafts the window holds now.", "worker"
        )

        self.speculation_changes = counter(
            "appliance_speculation_changes", "Changes of what a worker does, by the mode entered and why.",
            "worker", "mode", "reason",
        )  # fmt: skip
        self.speculation_collapsed = gauge(
            "appliance_speculation_collapsed",
            "1 while the draft counts as collapsed: look at draft, template and traffic.", "worker",
        )  # fmt: skip
        self.speculation_controllable = gauge(
            "appliance_speculation_controllable", "1 if the worker's drafting can be steered.", "worker"
        )
        self.speculation_draft_tokens = gauge(
            "appliance_speculation_draft_tokens",
            "Draft tokens per step that the table gives a batch of at most so many requests.",
            "worker", "batch",
        )  # fmt: skip
        self.break_even_length = gauge(
            "appliance_break_even_acceptance_length",
            "Acceptance length above which the most draft tokens pay at this batch size, as measured.",
            "worker", "batch",
        )  # fmt: skip
        self.speculation_probes_failed = gauge(
            "appliance_speculation_probes_failed",
            "Probes in a row that found drafts not to pay; each doubles the time to the next.", "worker",
        )  # fmt: skip
        self.speculation_probed_steps = gauge(
            "appliance_speculation_probed_steps",
            "Steps spent on probes and on measuring costs since the worker started.", "worker",
        )  # fmt: skip
        self.control_acting = gauge(
            "appliance_control_acting", "1 while this process holds the lease and steers workers."
        )
        self.control_failures = counter(
            "appliance_control_failures", "Looks at a worker that ended in a defect; nothing was changed."
        )

        self.audit_entries = counter("appliance_audit_entries", "Entries made durable.")
        self.audit_commit_seconds = histogram(
            "appliance_audit_commit_seconds", "Time of one commit.", FINE_SECONDS
        )
        self.audit_failing = gauge(
            "appliance_audit_failing", "1 while entries cannot be made durable and requests are refused."
        )
        self.audit_open_requests = gauge(
            "appliance_audit_open_requests", "Requests with an intent and no outcome yet."
        )
        self.audit_tree_size = gauge("appliance_audit_tree_size", "Entries in the log.")
        self.audit_queue_entries = gauge("appliance_audit_queue_entries", "Entries waiting for a commit.")
        self.audit_checkpoint_size = gauge(
            "appliance_audit_checkpoint_size", "Entries the newest signed checkpoint covers."
        )

    def saw_audit_commit(self, entries: int, seconds: float) -> None:
        """Count one commit of the audit log."""
        self.audit_entries.inc(entries)
        self.audit_commit_seconds.observe(seconds)


class AuditView(Protocol):
    """The part of the audit log's state that is exported."""

    @property
    def size(self) -> int:
        """Durable entries."""

    @property
    def queued(self) -> int:
        """Entries waiting for a commit."""

    @property
    def checkpoint_size(self) -> int:
        """Entries the newest checkpoint covers."""

    @property
    def open_requests(self) -> int:
        """Intents without an outcome yet."""

    @property
    def failure(self) -> str | None:
        """Why the last write failed."""


def observe_audit(metrics: Metrics, state: Callable[[], AuditView]) -> None:
    """Read the audit log's state whenever the metrics are read."""
    metrics.audit_tree_size.set_function(lambda: state().size)
    metrics.audit_queue_entries.set_function(lambda: state().queued)
    metrics.audit_checkpoint_size.set_function(lambda: state().checkpoint_size)
    metrics.audit_open_requests.set_function(lambda: state().open_requests)
    metrics.audit_failing.set_function(lambda: state().failure is not None)
