"""
Every metric the appliance exports, declared once on an injected registry.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from appliance.infra.metrics.cardinality import OTHER, Regulars, TenantSeries
from appliance.infra.metrics.copied import CopiedCounter
from appliance.infra.metrics.gaps import GAP_SECONDS, GapHistogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
FINE_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)
TENANT_SERIES = 3100
"""Most series that name a tenant; all others of a site with 200 tenants come to fewer than 1900."""
TEMPLATES = 16
"""Prompt templates with series of their own at a time, over all models."""
OFTEN, AMONG = 20, 1000
"""A template is told apart once it was seen so often among so many requests that were drafted for."""


class Metrics:
    """The metric families, one attribute each."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._meters: dict[tuple[str, str, str, str], Meters] = {}
        self._entry_counters: dict[str, Counter] = {}
        self._templates = Regulars(most=TEMPLATES, often=OFTEN, among=AMONG, on_gone=self._forget_template)

        by_tenant = TenantSeries(TENANT_SERIES)

        def counter(name: str, text: str, *labels: str) -> Counter:
            if labels[:1] == ("tenant",):
                return by_tenant.counter(name, text, labels, registry)
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            if labels[:1] == ("tenant",):
                return by_tenant.gauge(name, text, labels, registry)
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self.build_info = gauge("appliance_build_info", "Always 1; says what runs.", "version")
        self.requests = counter(
            "appliance_requests",
            "Requests by how they ended; `appliance_request_seconds_count` has them by route.",
            "tenant", "model", "outcome",
        )  # fmt: skip
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
        self.inter_token_seconds = GapHistogram(
            "appliance_inter_token_seconds",
            "Between two pieces of a stream's content, as sent; with drafts a piece has several tokens. "
            "Counted when the stream ends. Rising while the time to the first byte does not: look at batch "
            "size and KV cache.",
            ("model",), buckets=GAP_SECONDS, registry=registry,
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

        self.trace_spans = counter(
            "appliance_trace_spans",
            "Spans of traces: `sent` to the collector, or `dropped` because it was away or too slow. No "
            "request waits for it.",
            "result",
        )  # fmt: skip

        self._add_drafting(counter)
        self._add_promotions(counter, gauge)
        self._add_tenants(gauge, by_tenant)
        self._add_limits(counter, gauge)
        self._add_workers(counter, gauge)
        self._add_steps(registry)
        self._add_cost(counter, gauge)

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

        self._add_callers(counter, gauge)
        self._add_egress(counter, gauge)
        self._add_admission(counter, gauge, histogram)
        self._add_audit(counter, gauge, histogram)

    def _add_promotions(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        self.draft_promotion_steps = counter(
            "appliance_draft_promotion_steps",
            "Steps of promotions and rollbacks of drafts, by the stage entered. `refused` and `failed`: the "
            "former draft serves, and `appliance draft status` says why; `interrupted`: the gateway "
            "that ran it ended.",
            "stage",
        )  # fmt: skip
        self.draft_promotion_running = gauge(
            "appliance_draft_promotion_running",
            "1 while this process changes the draft in service. For hours: `appliance draft status` says "
            "what it waits for.",
        )  # fmt: skip

    def _add_drafting(self, counter: Callable[..., Counter]) -> None:
        self.context_drafts = counter(
            "appliance_context_drafts", "Drafts made for requests, by the length of their context in tokens.",
            "model", "context",
        )  # fmt: skip
        self.context_draft_tokens = counter(
            "appliance_context_draft_tokens", "Draft tokens proposed for them.", "model", "context"
        )
        self.context_accepted_tokens = counter(
            "appliance_context_accepted_tokens",
            "Draft tokens of them that the target accepted. Far fewer from some length on: the draft was not "
            "trained for such contexts.",
            "model", "context",
        )  # fmt: skip
        self.template_drafts = counter(
            "appliance_template_drafts",
            "Drafts made for requests, by prompt template: the labels that `appliance speculation status` "
            "shows, made anew when a gateway starts. `(other)`: templates that are seen rarely.",
            "model", "template",
        )  # fmt: skip
        self.template_draft_tokens = counter(
            "appliance_template_draft_tokens", "Draft tokens proposed for them.", "model", "template"
        )
        self.template_accepted_tokens = counter(
            "appliance_template_accepted_tokens",
            "Draft tokens of them that the target accepted. Far fewer for one template: the draft never saw "
            "it.",
            "model", "template",
        )  # fmt: skip

    def _add_workers(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
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
        self.workers_left = counter(
            "appliance_workers_left",
            "Workers that left the list, by whether they were `up` or `down` when they did. `down`: they "
            "failed, and were not taken away.",
            "health",
        )  # fmt: skip
        for health in ("up", "down"):
            self.workers_left.labels(health)  # the first of a new series would not be seen as a rise
        self.scrape_failures = counter(
            "appliance_scrape_failures", "Looks at a worker that failed.", "worker"
        )

    def _add_steps(self, registry: CollectorRegistry) -> None:
        self.worker_step_tokens = CopiedCounter(
            "appliance_worker_step_tokens",
            "Tokens that decode steps gave, by draft tokens a step and by batch size (at most so many). "
            "Falls to 0 when the worker starts anew.",
            ("worker", "draft_tokens", "batch"), registry=registry,
        )  # fmt: skip
        self.worker_step_seconds = CopiedCounter(
            "appliance_worker_step_seconds",
            "Engine time those steps took. Tokens by seconds say which number of draft tokens is fastest. "
            "Only steps without a prompt count.",
            ("worker", "draft_tokens", "batch"), registry=registry,
        )  # fmt: skip

    def _add_admission(
        self,
        counter: Callable[..., Counter],
        gauge: Callable[..., Gauge],
        histogram: Callable[..., Histogram],
    ) -> None:
        self.queue_requests = gauge(
            "appliance_queue_requests", "Requests waiting for a worker with room.", "priority"
        )
        self.queue_bytes = gauge("appliance_queue_bytes", "Memory they hold.", "priority")
        self.queue_seconds = histogram(
            "appliance_queue_seconds", "How long those waited that had to, however it ended.",
            SECONDS, "priority",
        )  # fmt: skip
        self.queue_refusals = counter(
            "appliance_queue_refusals",
            "Requests turned away: `full` there was no place to wait, `displaced` they made way for a tenant "
            "with fewer, `late` they waited too long, `no_worker` as well and no worker was left.",
            "priority", "reason",
        )  # fmt: skip
        self.worker_places = gauge(
            "appliance_worker_places",
            "Most requests this gateway has with the worker at a time; falls when the worker has a queue.",
            "worker",
        )  # fmt: skip
        self.worker_breaker_open = gauge(
            "appliance_worker_breaker_open",
            "1 from the moment a worker gets a rest because it failed, until it answers again.", "worker",
        )  # fmt: skip

    def _add_egress(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        self.wall_up = gauge(
            "appliance_wall_up",
            "1 while the kernel lets this process, and the worker it started, connect to configured TCP "
            "ports only.",
        )
        self.egress_verdict = gauge(
            "appliance_egress_verdict",
            "1 for what the last egress check showed: `closed`, `open` or `inconclusive`; all 0 before the "
            "first, and without checks. `open`: something outside was reached.",
            "verdict",
        )  # fmt: skip
        self.egress_time = gauge(
            "appliance_egress_last_check_timestamp_seconds",
            "When this gateway last tried to get out; 0 for never. Older than `egress.interval_seconds`: see "
            "its log.",
        )
        self.egress_checks = counter(
            "appliance_egress_checks", "Egress checks by what they showed.", "verdict"
        )

    def _add_tenants(self, gauge: Callable[..., Gauge], by_tenant: TenantSeries) -> None:
        self.tenants_generation = gauge(
            "appliance_tenants_generation",
            "Number of changes that led to the tenants and keys in force here.",
        )
        self.tenants_age_seconds = gauge(
            "appliance_tenants_age_seconds",
            "How long ago the database last confirmed the tenants and keys in force here.",
        )
        self.tenant_series_full = gauge(
            "appliance_tenant_series_full",
            "1 once so many series name a tenant that further tenants are counted as `(other)`.",
        )
        self.tenant_series_full.set_function(lambda: by_tenant.is_full)
        self.keys_next_end = gauge(
            "appliance_keys_next_end_timestamp_seconds",
            "When the next API key ends that nobody has rotated; 0 if none does. `appliance key list` says "
            "which.",
        )

    def _add_callers(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        self.connections = gauge(
            "appliance_connections", "Connections of clients, idle ones included; see `api.max_connections`."
        )
        self.callers_refused = counter(
            "appliance_callers_refused", "Requests answered 401, by what was wrong; clients are not told.",
            "reason",
        )  # fmt: skip
        self.tls_certificate_not_after = gauge(
            "appliance_tls_certificate_not_after_timestamp_seconds",
            "When the certificate in force ends; 0 without TLS. Renew its file before: it is taken over.",
        )

    def _add_limits(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        self.limit_used = gauge(
            "appliance_limit_used_ratio",
            "Share of a tenant's limit that is used or held by gateways, 0..1, the fullest of its models. "
            "At 1 requests are refused.",
            "tenant", "limit",
        )  # fmt: skip
        self.limit_refusals = counter(
            "appliance_limit_refusals", "Requests refused because of a tenant's limit.", "tenant", "limit"
        )
        self.limits_failing = gauge(
            "appliance_limits_failing",
            "1 while the database of limits cannot be reached. Gateways go on with what they hold, then "
            "refuse.",
        )

        self.batch_lines = counter(
            "appliance_batch_lines",
            "Requests of batches that are done, by how they ended.",
            "tenant",
            "result",
        )

    def _add_audit(
        self,
        counter: Callable[..., Counter],
        gauge: Callable[..., Gauge],
        histogram: Callable[..., Histogram],
    ) -> None:
        self.audit_entries = counter("appliance_audit_entries", "Entries made durable in the log.", "type")
        self.audit_commit_seconds = histogram(
            "appliance_audit_commit_seconds",
            "Time of one commit; answers wait for two. Growing: look at the database's disk.", FINE_SECONDS,
        )  # fmt: skip
        self.audit_failing = gauge(
            "appliance_audit_failing",
            "1 while the database takes no entries. In `strict` requests are refused: look at "
            "`appliance status` for why.",
        )
        self.audit_last_failure = gauge(
            "appliance_audit_last_failure_timestamp_seconds",
            "When the database last refused an entry; 0 for never since the start.",
        )
        self.audit_refused = counter(
            "appliance_audit_refused_entries",
            "Entries the database did not take at once. Moving: it fails, is full or does not keep up.",
        )
        self.audit_open_requests = gauge(
            "appliance_audit_open_requests",
            "Requests with an intent and no outcome yet; falls to 0 when nothing is being answered.",
        )
        self.audit_tree_size = gauge(
            "appliance_audit_tree_size", "Entries in the log. Never falls, over restarts either."
        )
        self.audit_queue_entries = gauge(
            "appliance_audit_queue_entries",
            "Entries waiting for a commit. Growing: the database does not keep up.",
        )
        self.audit_checkpoint_size = gauge(
            "appliance_audit_checkpoint_size", "Entries the newest signed checkpoint covers."
        )
        self.audit_checkpoint_lag = gauge(
            "appliance_audit_checkpoint_lag_entries",
            "Entries no signed checkpoint covers yet. Growing: signing fails; see `appliance status`.",
        )
        self.audit_checkpoint_time = gauge(
            "appliance_audit_checkpoint_timestamp_seconds",
            "When this process last signed a checkpoint; 0 for not yet. Older than "
            "`audit.heartbeat_seconds`: signing fails.",
        )
        self.audit_dropped = counter(
            "appliance_audit_dropped_entries",
            "Entries that were recorded nowhere. Stays 0 in `strict` and `spool`; moving: the log has a gap.",
        )
        self.audit_gap_entries = gauge(
            "appliance_audit_gap_entries",
            "Entries recorded nowhere that the log has not admitted yet; 0 once `audit.gap` is in it.",
        )
        self.audit_spooled = counter(
            "appliance_audit_spooled_entries",
            "Entries kept on this machine because the database took none. Moving: bring the database back.",
        )
        self.audit_spool_entries = gauge(
            "appliance_audit_spool_entries",
            "Entries that wait in the spool. Not falling while the database works: see the log.",
        )
        self.audit_spool_bytes = gauge(
            "appliance_audit_spool_bytes",
            "Size of the spool. At `audit.spool_bytes` requests are refused, or in `open` unrecorded.",
        )
        self.audit_verified_size = gauge(
            "appliance_audit_verified_size", "Entries the log's own check has read and found whole."
        )
        self.audit_verified_time = gauge(
            "appliance_audit_last_verification_timestamp_seconds",
            "When that check last ended; 0 for not yet. Older than twice `audit.verify_seconds`: see "
            "the status.",
        )
        self.audit_signing_key_time = gauge(
            "appliance_audit_signing_key_file_timestamp_seconds",
            "When the file of the signing key was written. The key does not end by itself: rotate it as your "
            "rules say.",
        )
        self.audit_damaged = gauge(
            "appliance_audit_damaged",
            "1 once that check found that stored entries were altered. An incident: stop, keep the database.",
        )
        self.audit_witness_time = gauge(
            "appliance_audit_last_witness_timestamp_seconds",
            "When a witness last cosigned a checkpoint; 0 for never. Old: nobody else holds a recent head.",
        )
        self.disk_free_bytes = gauge(
            "appliance_audit_disk_free_bytes",
            "Free space where the log is kept. Falling to 0: entries, then requests, are refused.", "disk",
        )  # fmt: skip
        self.disk_low = gauge(
            "appliance_audit_disk_low",
            "1 below `audit.low_disk_bytes`: make room before the database refuses entries.", "disk",
        )  # fmt: skip

        self.audit_witnesses = gauge(
            "appliance_audit_witnesses",
            "Witnesses in the settings (`known`), and those that have cosigned this log (`cosigned`).",
            "state",
        )  # fmt: skip
        self.audit_witnessed_size = gauge(
            "appliance_audit_witnessed_size", "Entries the newest cosignature covers; 0 for none."
        )

    def _add_cost(self, counter: Callable[..., Counter], gauge: Callable[..., Gauge]) -> None:
        self.engine_seconds = counter(
            "appliance_engine_seconds",
            "Engine time by whose requests it went into; what it cost is in `appliance cost report`.",
            "tenant", "model",
        )  # fmt: skip
        self.energy_joules = counter(
            "appliance_energy_joules",
            "Energy by whose requests it went into, measured by GPUs or made of the watts in the settings.",
            "tenant", "model",
        )  # fmt: skip
        self.worker_busy_seconds = counter(
            "appliance_worker_busy_seconds", "Time the worker's engine worked.", "worker"
        )
        self.worker_observed_seconds = counter(
            "appliance_worker_observed_seconds",
            "Time this gateway has looked at the worker, busy or not; what is left of it was idle.", "worker",
        )  # fmt: skip
        self.worker_unattributed_seconds = counter(
            "appliance_worker_unattributed_seconds",
            "Engine time that went into no request of this gateway: other gateways, or calls past them all.",
            "worker",
        )  # fmt: skip
        self.worker_energy_joules = counter(
            "appliance_worker_energy_joules", "Energy the worker took, busy or not.", "worker"
        )
        self.speculation_saved_seconds = gauge(
            "appliance_speculation_saved_engine_seconds",
            "Engine time that drafting has saved since the start, by what the worker takes without; below 0: "
            "lost. Only the gateway that steers measures it.",
            "worker",
        )  # fmt: skip
        self.speculation_saved_bound = gauge(
            "appliance_speculation_saved_bound_engine_seconds",
            "Between `low` and `high` the saved engine time lies with 95 % confidence, if all measurements "
            "erred the same way. On both sides of 0: whether drafting saves is not known.",
            "worker", "bound",
        )  # fmt: skip
        self.cost_price = gauge(
            "appliance_cost_price",
            "Prices in the settings, in `cost.currency`: of a `worker_hour` (its machine), a `site_hour` "
            "(people) and a `kwh` (times `cost.pue`). Absent where there is none.",
            "of",
        )  # fmt: skip
        self.cost_written_time = gauge(
            "appliance_cost_written_timestamp_seconds",
            "When engine time and energy were last written to the database; a crash loses what came after.",
        )

    def forget_worker(self, worker_id: str) -> None:
        """Export nothing more of a worker that has left: addresses that come and go must not pile up."""
        is_up = self.worker_up.labels(worker_id)._value.get()  # noqa: SLF001 - 0 if it was never looked at
        self.workers_left.labels("up" if is_up else "down").inc()
        for family in vars(self).values():
            if isinstance(family, MetricWrapperBase) and "worker" in family._labelnames:  # noqa: SLF001
                family.remove_by_labels({"worker": worker_id})

    def forget_steps(self, worker_id: str) -> None:
        """Export no steps of an engine that is no more; its successor counts from 0."""
        for family in (self.worker_step_tokens, self.worker_step_seconds):
            family.remove_by_labels({"worker": worker_id})

    def saw_drafts(
        self, *, model: str, template: str, context: str, drafts: int, draft_tokens: int, accepted_tokens: int
    ) -> None:
        """Count what drafting for one request came to, by the length of its context and by its template."""
        if not self._templates.saw((model, template)):
            template = OTHER
        self.context_drafts.labels(model, context).inc(drafts)
        self.context_draft_tokens.labels(model, context).inc(draft_tokens)
        self.context_accepted_tokens.labels(model, context).inc(accepted_tokens)
        self.template_drafts.labels(model, template).inc(drafts)
        self.template_draft_tokens.labels(model, template).inc(draft_tokens)
        self.template_accepted_tokens.labels(model, template).inc(accepted_tokens)

    def _forget_template(self, labels: tuple[str, ...]) -> None:
        for family in (self.template_drafts, self.template_draft_tokens, self.template_accepted_tokens):
            family.remove(*labels)

    def saw_audit_commit(self, _entries: int, seconds: float) -> None:
        """Note one commit of the audit log."""
        self.audit_commit_seconds.observe(seconds)

    def saw_audit_entry(self, entry_type: str, error: Exception | None) -> None:
        """Count one entry that became durable, or that the database did not take."""
        if error is None:
            counter = self._entry_counters.get(entry_type)
            if counter is None:
                counter = self._entry_counters[entry_type] = self.audit_entries.labels(str(entry_type))
            counter.inc()
        else:
            self.audit_refused.inc()
            self.audit_last_failure.set_to_current_time()

    def meters(self, tenant: str, model: str, route: str, outcome: str) -> "Meters":
        """The children that a request with these labels moves; found once, since every request asks."""
        key = (tenant, model, route, outcome)
        found = self._meters.get(key)
        if found is None:
            found = self._meters[key] = Meters(
                requests=self.requests.labels(tenant, model, outcome),
                seconds=self.request_seconds.labels(model, route),
                first_byte_seconds=self.time_to_first_byte_seconds.labels(model, route),
                prompt_tokens=self.tokens.labels(tenant, model, "prompt"),
                completion_tokens=self.tokens.labels(tenant, model, "completion"),
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Meters:
    """What every request moves, for one set of labels."""

    requests: Counter
    seconds: Histogram
    first_byte_seconds: Histogram
    prompt_tokens: Counter
    completion_tokens: Counter
