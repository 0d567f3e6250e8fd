"""Every metric the appliance exports, declared once on an injected registry."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from appliance.infra.metrics.cardinality import OTHER, HeavyHitters, TenantSeries
from appliance.infra.metrics.gaps import GAP_SECONDS, CopiedCounter, GapHistogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
FINE_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)
TENANT_SERIES = 3100
"""Maximum series with a label `tenant`; all others of a site with 200 tenants are fewer than 1900."""
TEMPLATES = 16
"""Maximum prompt templates with their own series at a time, over all models."""
OFTEN, AMONG = 20, 1000
"""A template gets its own series after `OFTEN` of the last `AMONG` requests with drafts."""


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:  # noqa: PLR0915 - one statement for each metric
        self.registry = registry
        self._meters: dict[tuple[str, str, str, str], Meters] = {}
        self._entry_counters: dict[str, Counter] = {}
        self._templates = HeavyHitters(
            most=TEMPLATES, often=OFTEN, among=AMONG, on_gone=self._forget_template
        )

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

        self.build_info = gauge(
            "appliance_build_info", "Always 1; its label is the running version.", "version"
        )
        self.requests = counter(
            "appliance_requests",
            "Finished requests by outcome; `appliance_request_seconds_count` has them by route.",
            "tenant", "model", "outcome",
        )  # fmt: skip
        self.errors = counter("appliance_errors", "Errors sent to clients, by code.", "code")
        self.requests_in_flight = gauge(
            "appliance_requests_in_flight", "Accepted requests that are not completely answered yet.", "model"
        )
        self.request_seconds = histogram(
            "appliance_request_seconds",
            "Time from the request to the last byte of the answer.", SECONDS, "model", "route",
        )  # fmt: skip
        self.time_to_first_byte_seconds = histogram(
            "appliance_time_to_first_byte_seconds",
            "Time from the request to the first byte of a stream's content.", SECONDS, "model", "route",
        )  # fmt: skip
        self.inter_token_seconds = GapHistogram(
            "appliance_inter_token_seconds",
            "Time between two frames of a stream, as sent; with drafts a frame has several tokens. Counted "
            "when the stream ends. If it rises and the time to the first byte does not, check batch size "
            "and KV cache.",
            ("model",), buckets=GAP_SECONDS, registry=registry,
        )  # fmt: skip
        self.overhead_seconds = histogram(
            "appliance_overhead_seconds",
            "Time the gateway itself added before the first byte, including the wait for the audit log.",
            FINE_SECONDS, "route",
        )  # fmt: skip
        self.tokens = counter(
            "appliance_tokens",
            "Tokens of prompts processed and of answers delivered.", "tenant", "model", "kind",
        )  # fmt: skip
        self.drafts = counter("appliance_drafts", "Drafts (proposal rounds) for requests.", "tenant", "model")
        self.draft_tokens = counter(
            "appliance_draft_tokens", "Draft tokens proposed for requests.", "tenant", "model"
        )
        self.accepted_tokens = counter(
            "appliance_accepted_tokens", "Draft tokens that the target model accepted.", "tenant", "model"
        )
        self.suspect_answers = counter(
            "appliance_suspect_answers",
            "Answers of which far fewer (`low`) or more (`high`) drafts were accepted than ever for their "
            "tenant and prompt template: they may be garbled, or repeat themselves.",
            "model", "worker", "suspicion",
        )  # fmt: skip
        self.retries = counter(
            "appliance_retries",
            "Attempts that failed before the first byte and were retried on another worker.", "model",
        )  # fmt: skip
        self.trace_spans = counter(
            "appliance_trace_spans",
            "Trace spans: `sent` to the collector, or `dropped` because it was unavailable or too slow. No "
            "request waits for it.", "result",
        )  # fmt: skip
        self.context_drafts = counter(
            "appliance_context_drafts", "Drafts for requests, by the length of their context in tokens.",
            "model", "context",
        )  # fmt: skip
        self.context_draft_tokens = counter(
            "appliance_context_draft_tokens", "Draft tokens proposed for them.", "model", "context"
        )
        self.context_accepted_tokens = counter(
            "appliance_context_accepted_tokens",
            "Draft tokens of them that the target model accepted. If far fewer above some length, the draft "
            "was not trained for such contexts.", "model", "context",
        )  # fmt: skip
        self.template_drafts = counter(
            "appliance_template_drafts",
            "Drafts for requests, by prompt template: the labels that `appliance speculation status` shows; "
            "they change when a gateway starts. `(other)`: rare templates.", "model", "template",
        )  # fmt: skip
        self.template_draft_tokens = counter(
            "appliance_template_draft_tokens", "Draft tokens proposed for them.", "model", "template"
        )
        self.template_accepted_tokens = counter(
            "appliance_template_accepted_tokens",
            "Draft tokens of them that the target model accepted. If far fewer for one template, the draft "
            "was not trained on it.", "model", "template",
        )  # fmt: skip
        self.draft_promotion_steps = counter(
            "appliance_draft_promotion_steps",
            "Steps of promotions and rollbacks of drafts, by new stage. `refused` and `failed`: the former "
            "draft serves, and `appliance draft status` says why; `interrupted`: the gateway that ran it "
            "stopped.", "stage",
        )  # fmt: skip
        self.draft_promotion_running = gauge(
            "appliance_draft_promotion_running",
            "1 while this process runs a promotion or rollback. If for hours, `appliance draft status` says "
            "what it waits for.",
        )  # fmt: skip
        self.tenants_generation = gauge(
            "appliance_tenants_generation",
            "Generation of the tenants and keys in force here: the number of changes so far.",
        )
        self.tenants_age_seconds = gauge(
            "appliance_tenants_age_seconds",
            "Time since the database last confirmed the tenants and keys in force here.",
        )
        self.tenant_series_full = gauge(
            "appliance_tenant_series_full",
            "1 once the maximum of series with a tenant is reached and further tenants are counted as "
            "`(other)`.",
        )
        self.tenant_series_full.set_function(lambda: by_tenant.is_full)
        self.keys_next_end = gauge(
            "appliance_keys_next_end_timestamp_seconds",
            "Earliest expiry of an API key without a successor; 0 if none expires. `appliance key list` "
            "shows which.",
        )
        self.limit_used = gauge(
            "appliance_limit_used_ratio",
            "Fraction of a tenant's limit that is used or held by gateways, 0..1, the maximum over its "
            "models. At 1 requests are refused.", "tenant", "limit",
        )  # fmt: skip
        self.limit_refusals = counter(
            "appliance_limit_refusals", "Requests refused because of a tenant's limit.", "tenant", "limit"
        )
        self.limits_failing = gauge(
            "appliance_limits_failing",
            "1 while the database of limits cannot be reached. Gateways use the units they hold, then refuse "
            "requests.",
        )
        self.batch_lines = counter(
            "appliance_batch_lines",
            "Finished lines (requests) of batches, by result.", "tenant", "result",
        )  # fmt: skip
        self.worker_up = gauge("appliance_worker_up", "1 while the worker can take requests.", "worker")
        self.worker_restarts = counter(
            "appliance_worker_restarts", "Restarts of the worker by its supervisor.", "worker"
        )
        self.worker_recycles = counter(
            "appliance_worker_recycles", "Recycles (restarts on purpose), by reason and result.",
            "worker", "reason", "result",
        )  # fmt: skip
        self.worker_left_out = gauge(
            "appliance_worker_left_out",
            "1 while a worker is excluded from requests, because it failed its canary after a recycle.",
            "worker",
        )  # fmt: skip
        self.worker_running = gauge(
            "appliance_worker_running_requests", "Requests in the worker's batch.", "worker"
        )
        self.worker_waiting = gauge(
            "appliance_worker_waiting_requests", "Requests waiting inside the worker.", "worker"
        )
        self.worker_kv_cache_usage = gauge(
            "appliance_worker_kv_cache_usage_ratio", "Fraction of the KV cache in use, 0..1.", "worker"
        )
        self.worker_tokens_per_second = gauge(
            "appliance_worker_generation_tokens_per_second", "Generated tokens per second.", "worker"
        )
        self.workers_left = counter(
            "appliance_workers_left",
            "Workers that left the list, by their state at that time. `down`: they failed and were not "
            "removed on purpose.", "health",
        )  # fmt: skip
        for health in ("up", "down"):
            self.workers_left.labels(health)  # Prometheus cannot see the first increment of a new series
        self.scrape_failures = counter("appliance_scrape_failures", "Failed scrapes of a worker.", "worker")
        self.worker_step_tokens = CopiedCounter(
            "appliance_worker_step_tokens",
            "Tokens of decode steps, by draft tokens per step and by batch size (upper bound of the bucket). "
            "Falls to 0 when the worker restarts.",
            ("worker", "draft_tokens", "batch"), registry=registry,
        )  # fmt: skip
        self.worker_step_seconds = CopiedCounter(
            "appliance_worker_step_seconds",
            "Engine time of these steps. Tokens divided by seconds show which number of draft tokens is "
            "fastest. Only steps without a prompt count.",
            ("worker", "draft_tokens", "batch"), registry=registry,
        )  # fmt: skip
        self.engine_seconds = counter(
            "appliance_engine_seconds",
            "Engine time by tenant and model of the requests; costs are in `appliance cost report`.",
            "tenant", "model",
        )  # fmt: skip
        self.energy_joules = counter(
            "appliance_energy_joules",
            "Energy by tenant and model of the requests, measured by GPUs or computed from the watts in the "
            "settings.", "tenant", "model",
        )  # fmt: skip
        self.worker_busy_seconds = counter(
            "appliance_worker_busy_seconds", "Time the worker's engine was busy.", "worker"
        )
        self.worker_observed_seconds = counter(
            "appliance_worker_observed_seconds",
            "Time this gateway has observed the worker, busy or idle.", "worker",
        )  # fmt: skip
        self.worker_unattributed_seconds = counter(
            "appliance_worker_unattributed_seconds",
            "Engine time without a request of this gateway: other gateways, or direct calls to the worker.",
            "worker",
        )  # fmt: skip
        self.worker_energy_joules = counter(
            "appliance_worker_energy_joules", "Energy used by the worker, busy or idle.", "worker"
        )
        self.speculation_saved_seconds = gauge(
            "appliance_speculation_saved_engine_seconds",
            "Engine time that drafting has saved since the start, compared with the time without drafts; "
            "below 0: lost. Only the lease holder measures it.", "worker",
        )  # fmt: skip
        self.speculation_saved_bound = gauge(
            "appliance_speculation_saved_bound_engine_seconds",
            "Bounds `low` and `high` of the saved engine time, 95 %, as if all measurements erred in the "
            "same direction. If 0 is between them, it is not known whether drafting saves.",
            "worker", "bound",
        )  # fmt: skip
        self.cost_price = gauge(
            "appliance_cost_price",
            "Prices in the settings, in `cost.currency`: of a `worker_hour` (its machine), a `site_hour` "
            "(people) and a `kwh` (times `cost.pue`). Absent if not set.", "of",
        )  # fmt: skip
        self.cost_written_time = gauge(
            "appliance_cost_written_timestamp_seconds",
            "Time when engine time and energy were last written to the database; a crash loses later ones.",
        )
        self.speculation_mode = gauge(
            "appliance_speculation_mode", "1 for the current mode of the worker.", "worker", "mode"
        )
        self.speculation_reason = gauge(
            "appliance_speculation_reason", "1 for the reason of the current mode.", "worker", "reason"
        )
        self.acceptance_length = gauge(
            "appliance_acceptance_length",
            "Mean tokens per draft, including the bonus token, over the monitor's window.", "worker",
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
            "appliance_acceptance_window_drafts", "Drafts in the monitor's window.", "worker"
        )
        self.speculation_changes = counter(
            "appliance_speculation_changes", "Changes of a worker's mode, by new mode and reason.",
            "worker", "mode", "reason",
        )  # fmt: skip
        self.speculation_collapsed = gauge(
            "appliance_speculation_collapsed",
            "1 while the draft counts as collapsed: check draft, template and traffic.", "worker",
        )  # fmt: skip
        self.worker_capability = gauge(
            "appliance_worker_capability",
            "1 if the worker has the capability: its draft-token table can be changed (`control`), it does "
            "not run the draft while it does not draft (`deferred_prefill`), it reports the drafts of each "
            "request (`attribution`).", "worker", "capability",
        )  # fmt: skip
        self.speculation_draft_tokens = gauge(
            "appliance_speculation_draft_tokens",
            "Draft tokens per step in the draft-token table, by batch size (upper bound of the bucket).",
            "worker", "batch",
        )  # fmt: skip
        self.break_even_length = gauge(
            "appliance_break_even_acceptance_length",
            "Measured acceptance length above which the maximum number of draft tokens pays at this batch "
            "size.", "worker", "batch",
        )  # fmt: skip
        self.speculation_exploration_share = gauge(
            "appliance_speculation_exploration_share",
            "Share of engine time that measuring other numbers of draft tokens cost, over ten minutes.",
            "worker",
        )  # fmt: skip
        self.speculation_probed_steps = gauge(
            "appliance_speculation_probed_steps",
            "Steps that measured other numbers of draft tokens since the worker started.", "worker",
        )  # fmt: skip
        self.control_acting = gauge(
            "appliance_control_acting", "1 while this process holds the lease and controls workers."
        )
        self.control_failures = counter(
            "appliance_control_failures",
            "Polls of a worker that failed because of a defect; nothing was changed.",
        )
        self.connections = gauge(
            "appliance_connections", "Connections of clients, including idle ones; see `api.max_connections`."
        )
        self.callers_refused = counter(
            "appliance_callers_refused",
            "Requests answered 401, by reason; the answer does not contain the reason.", "reason",
        )  # fmt: skip
        self.tls_certificate_not_after = gauge(
            "appliance_tls_certificate_not_after_timestamp_seconds",
            "Expiry of the certificate in force; 0 without TLS. Replace its file before; the gateway "
            "reloads it.",
        )
        self.wall_up = gauge(
            "appliance_wall_up",
            "1 while the kernel allows this process, and the worker it started, to connect to configured TCP "
            "ports only.",
        )
        self.egress_verdict = gauge(
            "appliance_egress_verdict",
            "1 for the verdict of the last egress check: `closed`, `open` or `inconclusive`; all 0 before "
            "the first, and without checks. `open`: something outside was reached.", "verdict",
        )  # fmt: skip
        self.egress_time = gauge(
            "appliance_egress_last_check_timestamp_seconds",
            "Time of this gateway's last egress check; 0 for never. If older than "
            "`egress.interval_seconds`, see its log.",
        )
        self.egress_checks = counter("appliance_egress_checks", "Egress checks by verdict.", "verdict")
        self.queue_requests = gauge(
            "appliance_queue_requests", "Requests that wait for a worker with a free slot.", "priority"
        )
        self.queue_bytes = gauge("appliance_queue_bytes", "Memory of the queued requests.", "priority")
        self.queue_seconds = histogram(
            "appliance_queue_seconds", "Wait of queued requests, with any outcome.",
            SECONDS, "priority",
        )  # fmt: skip
        self.queue_refusals = counter(
            "appliance_queue_refusals",
            "Refused requests: `full` the queue was full, `displaced` by a tenant with fewer queued "
            "requests, `late` they waited too long, `no_worker` the same and no worker was left.",
            "priority", "reason",
        )  # fmt: skip
        self.worker_places = gauge(
            "appliance_worker_places",
            "Slots: maximum requests of this gateway in the worker; falls when requests wait inside the "
            "worker.", "worker",
        )  # fmt: skip
        self.worker_breaker_open = gauge(
            "appliance_worker_breaker_open",
            "1 while the circuit of a worker is open because it failed, until it answers again.", "worker",
        )  # fmt: skip
        self.audit_entries = counter("appliance_audit_entries", "Entries made durable in the log.", "type")
        self.audit_commit_seconds = histogram(
            "appliance_audit_commit_seconds",
            "Duration of one commit; answers wait for two. If it grows, check the database's disk.",
            FINE_SECONDS,
        )  # fmt: skip
        self.audit_failing = gauge(
            "appliance_audit_failing",
            "1 while the database accepts no entries. In `strict` requests are refused; `appliance status` "
            "says why.",
        )
        self.audit_last_failure = gauge(
            "appliance_audit_last_failure_timestamp_seconds",
            "Time when the database last refused an entry; 0 for never since the start.",
        )
        self.audit_refused = counter(
            "appliance_audit_refused_entries",
            "Entries the database did not accept at once. If it rises, the database fails, is full or too "
            "slow.",
        )
        self.audit_open_requests = gauge(
            "appliance_audit_open_requests",
            "Requests with an intent and no outcome yet; 0 without requests in flight.",
        )
        self.audit_tree_size = gauge(
            "appliance_audit_tree_size", "Entries in the log. Never falls, also not over restarts."
        )
        self.audit_queue_entries = gauge(
            "appliance_audit_queue_entries",
            "Entries that wait for a commit. If it grows, the database is too slow.",
        )
        self.audit_checkpoint_size = gauge(
            "appliance_audit_checkpoint_size", "Entries covered by the newest signed checkpoint."
        )
        self.audit_checkpoint_lag = gauge(
            "appliance_audit_checkpoint_lag_entries",
            "Entries not covered by a signed checkpoint yet. If it grows, signing fails; see `appliance "
            "status`.",
        )
        self.audit_checkpoint_time = gauge(
            "appliance_audit_checkpoint_timestamp_seconds",
            "Time when this process last signed a checkpoint; 0 for not yet. If older than "
            "`audit.heartbeat_seconds`, signing fails.",
        )
        self.audit_dropped = counter(
            "appliance_audit_dropped_entries",
            "Entries acknowledged from the spool that the log then refused. If it rises, the log has a gap.",
        )
        self.audit_gap_entries = gauge(
            "appliance_audit_gap_entries",
            "Lost entries that the log does not count yet; 0 once `audit.gap` is in it.",
        )
        self.audit_spooled = counter(
            "appliance_audit_spooled_entries",
            "Entries spooled on this machine because the database accepted none. If it rises, bring the "
            "database back.",
        )
        self.audit_spool_entries = gauge(
            "appliance_audit_spool_entries",
            "Entries that wait in the spool. If it does not fall while the database works, see the log.",
        )
        self.audit_spool_bytes = gauge(
            "appliance_audit_spool_bytes",
            "Size of the spool. At `audit.spool_bytes` requests are refused.",
        )
        self.audit_verified_size = gauge(
            "appliance_audit_verified_size",
            "Entries that the last pass of the log's own check has read, all of them, and found unaltered.",
        )
        self.audit_verified_time = gauge(
            "appliance_audit_last_verification_timestamp_seconds",
            "Time when a pass of that check over the whole log last ended; 0 for not yet. If older than two "
            "days, see the status.",
        )
        self.audit_signing_key_time = gauge(
            "appliance_audit_signing_key_file_timestamp_seconds",
            "Modification time of the signing key's file, or of `audit.vkey` if it is in a token. The key "
            "does not expire: rotate it as your rules say.",
        )
        self.audit_damaged = gauge(
            "appliance_audit_damaged",
            "1 once that check found altered entries. This is an incident: stop, preserve the database.",
        )
        self.audit_witness_time = gauge(
            "appliance_audit_last_witness_timestamp_seconds",
            "Time when a witness last cosigned a checkpoint; 0 for never. If old, no other party holds a "
            "recent head.",
        )
        self.audit_forward_lag = gauge(
            "appliance_audit_forward_lag_entries",
            "Entries not yet sent to the SIEM; 0 without `audit.forward`. All gateways of a log report the "
            "same.",
        )
        self.audit_forward_lag_seconds = gauge(
            "appliance_audit_forward_lag_seconds",
            "Age of the oldest entry not yet sent to the SIEM; 0 if all were sent.",
        )
        self.audit_forward_failures = counter(
            "appliance_audit_forward_failures",
            "Failed connections to the SIEM, and refusals to forward an altered log. The reason is in "
            "`/readyz` and the operator log.",
        )
        self.disk_free_bytes = gauge(
            "appliance_audit_disk_free_bytes",
            "Free space on the disks of the log. At 0 entries, then requests, are refused.", "disk",
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
            "appliance_audit_witnessed_size", "Entries covered by the newest cosignature; 0 for none."
        )
        self.audit_timestamp_interval = gauge(
            "appliance_audit_timestamp_interval_seconds",
            "Time between two time stamps, by the settings; 0 without an authority.",
        )
        self.audit_timestamped_size = gauge(
            "appliance_audit_timestamped_size", "Entries covered by the newest time stamp; 0 for none."
        )
        self.audit_timestamp_time = gauge(
            "appliance_audit_last_timestamp_seconds",
            "Time of the newest time stamp, by the authority's clock; 0 for never.",
        )
        self.audit_timestamp_failures = gauge(
            "appliance_audit_timestamp_failures",
            "Requests to the time-stamp authority that failed since the last one that succeeded.",
        )
        self.audit_timestamp_clock_difference = gauge(
            "appliance_audit_timestamp_clock_difference_seconds",
            "Seconds by which the authority's clock was ahead of the gateway's at its last answer. If it is "
            "large, one of them is wrong.",
        )

    def forget_worker(self, worker_id: str) -> None:
        """Remove all series of a worker that has left: series of changing addresses must not accumulate."""
        is_up = self.worker_up.labels(worker_id)._value.get()  # noqa: SLF001 - 0 if it was never polled
        self.workers_left.labels("up" if is_up else "down").inc()
        for family in vars(self).values():
            if isinstance(family, MetricWrapperBase) and "worker" in family._labelnames:  # noqa: SLF001
                family.remove_by_labels({"worker": worker_id})

    def forget_steps(self, worker_id: str) -> None:
        """Remove the step series of an engine that has stopped; the next one counts from 0."""
        for family in (self.worker_step_tokens, self.worker_step_seconds):
            family.remove_by_labels({"worker": worker_id})

    def record_drafts(
        self, *, model: str, template: str, context: str, drafts: int, draft_tokens: int, accepted_tokens: int
    ) -> None:
        if not self._templates.observe((model, template)):
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

    def record_audit_commit(self, _entries: int, seconds: float) -> None:
        self.audit_commit_seconds.observe(seconds)

    def record_audit_entry(self, entry_type: str, error: Exception | None) -> None:
        if error is None:
            counter = self._entry_counters.get(entry_type)
            if counter is None:
                counter = self._entry_counters[entry_type] = self.audit_entries.labels(str(entry_type))
            counter.inc()
        else:
            self.audit_refused.inc()
            self.audit_last_failure.set_to_current_time()

    def meters(self, tenant: str, model: str, route: str, outcome: str) -> "Meters":
        """The children that a request with these labels moves; cached, since every request needs them."""
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
    requests: Counter
    seconds: Histogram
    first_byte_seconds: Histogram
    prompt_tokens: Counter
    completion_tokens: Counter
